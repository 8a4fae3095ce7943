/**
 * The collection of bugs of public servers that this server's API is tested against: each of the hundred is named, by
 * its number, in the name of a test (`api-bugs 7` or `(api-bugs 7, 8)`).
 */
import assert from 'node:assert/strict';
import { readdirSync, readFileSync } from 'node:fs';
import { test } from 'node:test';

const TESTS = new URL('../', import.meta.url);
const COUNT = 100;

test('every bug of the collection is named by a test, and no other number is', () => {
  const named = new Set<number>();
  for (const path of readdirSync(TESTS, { recursive: true, encoding: 'utf8' })) {
    if (!path.endsWith('.test.ts')) continue;
    const source = readFileSync(new URL(path, TESTS), 'utf8');
    for (const [, quoted] of source.matchAll(/(?<!\w)test\(\s*('[^'\n]*'|`[^`\n]*`)/g)) {
      for (const [, numbers] of quoted!.matchAll(/\bapi-bugs (\d+(?:, \d+)*)/g)) {
        for (const number of numbers!.split(', ')) named.add(Number(number));
      }
    }
  }
  const all = Array.from({ length: COUNT }, (_, index) => index + 1);
  assert.deepEqual(
    [...named].filter((number) => !all.includes(number)),
    [],
  );
  assert.deepEqual(
    all.filter((number) => !named.has(number)),
    [],
  );
});
