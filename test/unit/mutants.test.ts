/** The table of `npm run mutants`: every edit still fits, and everything that must notice a mutant is there. */
import assert from 'node:assert/strict';
import { existsSync, readFileSync } from 'node:fs';
import { describe, test } from 'node:test';
import { MUTANTS } from '../../scripts/mutant-table.ts';
import { CI_SETS, DEEP_SETS } from '../check/sets.ts';

const ROOT = new URL('../../', import.meta.url);
/** Starred failures that no pure core could have: they are about sockets, threads and processes. */
const OUTSIDE = ['C-06', 'M-01'];

const read = (path: string): string => readFileSync(new URL(path, ROOT), 'utf8');

describe('the table of mutants', () => {
  test('every edit fits exactly once, in a pure file, and changes it', () => {
    for (const { name, edits } of MUTANTS) {
      const texts = new Map<string, string>();
      for (const { file, find, put } of edits) {
        assert.match(file, /^(transfer|scheduler)\/(?!channel)[\w-]+\.ts$/, name);
        const parts = (texts.get(file) ?? read(file)).split(find);
        assert.equal(parts.length, 2, `${name}: this is ${parts.length - 1} times in ${file}:\n${find}`);
        assert.notEqual(find, put, name);
        texts.set(file, parts.join(put));
      }
    }
  });

  test('names are unique, and every mutant has something that must notice it', () => {
    assert.equal(new Set(MUTANTS.map(({ name }) => name)).size, MUTANTS.length);
    for (const { name, killers } of MUTANTS) assert.ok(killers.length > 0, name);
  });

  test('every test and set that must notice a mutant exists', () => {
    const sets = [...CI_SETS, ...DEEP_SETS].map(({ name }) => name);
    for (const { name, killers } of MUTANTS) {
      for (const killer of killers) {
        if (killer.kind === 'check') {
          assert.ok(sets.includes(killer.set), `${name}: no set is called ${killer.set}`);
        } else if (killer.kind === 'unit') {
          const file = `test/unit/${killer.file}.test.ts`;
          assert.ok(existsSync(new URL(file, ROOT)), `${name}: ${file}`);
          assert.ok(read(file).includes(`test('${killer.test}'`), `${name}: ${file} has no test "${killer.test}"`);
        }
      }
    }
  });

  test('every starred failure that a pure core could have is among them', () => {
    const starred = [...read('docs/testing.md').matchAll(/^\| ([A-Z]-\d\d) ★ \|/gm)].map(([, id]) => id!);
    assert.equal(starred.length, 15);
    const brought = new Set(MUTANTS.map(({ failure }) => failure));
    for (const id of starred) assert.equal(brought.has(id), !OUTSIDE.includes(id), id);
  });
});
