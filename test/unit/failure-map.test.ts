/** The map of known failures in docs/testing.md: complete, and every test it names exists under that name. */
import assert from 'node:assert/strict';
import { existsSync, readFileSync } from 'node:fs';
import { describe, test } from 'node:test';

const ROOT = new URL('../../', import.meta.url);

/** How many failures of each stage of a request there are, numbered from 01. */
const STAGES = { S: 13, A: 14, R: 7, B: 12, T: 18, D: 9, G: 7, X: 11, C: 12, M: 11, K: 5, O: 8, H: 7, Z: 4 };
const STARRED = 'T-01 T-02 X-01 X-02 X-03 R-01 B-02 T-03 C-03 C-06 M-01 A-01 A-02 G-01 O-01'.split(' ');
const VERDICTS = ['tested', 'impossible by design', 'not applicable'];

interface Entry {
  readonly id: string;
  readonly starred: boolean;
  readonly verdict: string;
  /** Sentences and tests. */
  readonly parts: readonly string[];
}

const entries = readFileSync(new URL('docs/testing.md', ROOT), 'utf8')
  .split('\n')
  .flatMap((line): Entry[] => {
    const [, id, star, verdict, how] = /^\| ([A-Z]-\d\d)( ★)? \| [^|]+ \| ([^|]+) \| (.*) \|$/.exec(line) ?? [];
    if (id === undefined) return [];
    return [{ id, starred: star !== undefined, verdict: verdict!, parts: how!.split('<br>') }];
  });

/** `path: name` of the tests that an entry names. */
function testsOf({ parts }: Entry): { path: string; name: string }[] {
  return parts.flatMap((part) => {
    const [, path, name] = /^([a-z][a-z-]*(?:\/[a-z-]+)+): (.+)$/.exec(part) ?? [];
    return path === undefined ? [] : [{ path, name: name! }];
  });
}

/** Names of the tests of a file as its source has them, without the seed in front. */
function namesIn(path: string): string[] {
  const file = new URL(`test/${path}.test.ts`, ROOT);
  assert.ok(existsSync(file), `test/${path}.test.ts`);
  const call = /(?<![\w])(?:t\.)?test\(\s*('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`(?:[^`\\]|\\.)*`)/g;
  return [...readFileSync(file, 'utf8').matchAll(call)].map(([, quoted]) =>
    quoted!.slice(1, -1).replace(/^seed \$\{SEED\}: /, ''),
  );
}

describe('the map of known failures', () => {
  test('has every failure once, in order', () => {
    const expected = Object.entries(STAGES).flatMap(([stage, count]) =>
      Array.from({ length: count }, (_, index) => `${stage}-${String(index + 1).padStart(2, '0')}`),
    );
    assert.equal(expected.length, 138);
    assert.deepEqual(
      entries.map(({ id }) => id),
      expected,
    );
  });

  test('says of each what stands against it', () => {
    for (const entry of entries) {
      assert.ok(VERDICTS.includes(entry.verdict), `${entry.id}: ${entry.verdict}`);
      const tests = testsOf(entry);
      if (entry.verdict === 'tested') assert.ok(tests.length > 0 && tests.length === entry.parts.length, entry.id);
      else assert.ok(entry.parts.length > tests.length, `${entry.id} says why`);
    }
  });

  test('names tests that exist', () => {
    const known = new Map<string, string[]>();
    for (const entry of entries) {
      for (const { path, name } of testsOf(entry)) {
        const names = known.get(path) ?? namesIn(path);
        known.set(path, names);
        assert.ok(names.includes(name), `${entry.id}: test/${path}.test.ts has no test ${name}`);
      }
    }
  });

  test('has for each starred failure a test of its name on real processes', () => {
    assert.deepEqual(
      entries.filter(({ starred }) => starred).map(({ id }) => id),
      [...STARRED].sort((a, b) => order(a) - order(b)),
    );
    for (const entry of entries) {
      if (!entry.starred) continue;
      assert.equal(entry.verdict, 'tested', entry.id);
      const own = testsOf(entry).filter(({ path, name }) => path.startsWith('chaos/') && name.startsWith(entry.id));
      assert.ok(own.length > 0, entry.id);
    }
  });
});

/** Place of an id in the map. */
function order(id: string): number {
  return entries.findIndex((entry) => entry.id === id);
}
