/** The table of what the API does: complete, up to date, and written from what tests say of themselves. */
import assert from 'node:assert/strict';
import { test } from 'node:test';
import type { SurfaceRow } from '../../../scripts/surface-rows.ts';
import { checkSurface, coverageOf, faultsOf, tableOf } from '../../../scripts/surface.ts';

const rows: SurfaceRow[] = [
  { id: 'a.one', need: 'M', what: 'one' },
  { id: 'a.two', need: 'S', what: 'two', missing: 'it takes long' },
];
/** A file of tests; its comments are put together here, so that this file has none of its own. */
const file = (...lines: string[]) => new Map([['unit/a', `${lines.join('\n').replaceAll('@', '// surface:')}\n`]]);

test('every row is shown by a test or says why it is not, and docs/api.md has the table', () => {
  assert.deepEqual(checkSurface().faults, []);
});

test('a comment above a test counts for that test, one line or several', () => {
  const sources = file(
    '@ a.one',
    "test('first', () => {});",
    '  @ a.one',
    '  @ a.two',
    '  test(',
    '    `seed ${SEED}: b`,',
  );
  const coverage = coverageOf(sources, rows);
  assert.deepEqual(coverage.get('a.one'), ['unit/a: first', 'unit/a: b']);
  assert.deepEqual(coverage.get('a.two'), ['unit/a: b']);
  assert.deepEqual(faultsOf(coverage, rows), ['a.two is shown by a test: it is not missing any more']);
});

test('unknown rows and comments without a test are errors, rows without a test are faults', () => {
  assert.throws(() => coverageOf(file('@ a.three', "test('x'"), rows), /unit\/a.*no row "a\.three"/);
  assert.throws(
    () => coverageOf(file('@ a.one', 'const x = 1;', "test('x'"), rows),
    /no test follows "surface: a\.one"/,
  );
  assert.deepEqual(faultsOf(coverageOf(new Map(), rows), rows), ['a.one is shown by no test']);
});

test('the table has a line for each row', () => {
  const coverage = coverageOf(file('@ a.one', "test('x | y', () => {});"), rows);
  assert.deepEqual(
    tableOf(coverage, [{ chapter: 'A', rows }])
      .split('\n')
      .slice(2),
    ['| **A** | | | |', '| a.one | M | one | unit/a: x \\| y |', '| a.two | S | two | not there: it takes long |'],
  );
});
