/** The checker finds what is broken, with the shortest way there, and nothing where nothing is. */
import assert from 'node:assert/strict';
import { describe, test } from 'node:test';
import { BROKEN_RULES } from './broken-rules.ts';
import { BEYOND, cellsOf, IMPOSSIBLE, judge, TABLES } from './coverage.ts';
import { explore } from './explore.ts';
import { FAULTS, type Plan } from './plan.ts';
import { CI_SETS, DEEP_SETS } from './sets.ts';
import { copyOf, createInterner, share, textOf } from './values.ts';

function setOf(name: string): Plan {
  const set = [...CI_SETS, ...DEEP_SETS].find((each) => each.name === name);
  assert.ok(set !== undefined, `there is a set ${name}`);
  return set;
}

describe('exploration', () => {
  for (const name of [
    'one room: no fault',
    'one room: restartD',
    'crowded, retraction: no fault',
    'retracting: cancel',
  ]) {
    test(`"${name}" is explored to the end, settles from every world and holds`, () => {
      const report = explore(setOf(name));
      assert.equal(report.violation, null);
      assert.equal(report.isComplete, true, `cut short after ${report.states} states`);
      assert.ok(
        report.states > 100 && report.quiet > 0 && report.canaries > 0,
        `${report.states} states, ${report.quiet} quiet, ${report.canaries} canaries`,
      );
      assert.ok(report.settleSteps > 0 && report.settleSteps < 100, `${report.settleSteps} steps`);
    });
  }

  test('the same set has the same worlds each time', () => {
    const [first, second] = [1, 2].map(() => explore(setOf('one room: restartP')));
    assert.equal(first?.states, second?.states);
    assert.equal(first?.transitions, second?.transitions);
    assert.deepEqual(first?.seen, second?.seen);
  });

  test('a restart of P leads to a second attempt, which delivers', () => {
    const { seen } = explore(setOf('one room: restartP'));
    for (const cell of [
      'router | choosing | pair',
      'prefill | unseen | submit',
      'router | streaming | end of decode',
    ]) {
      assert.ok(seen.includes(cell), cell);
    }
  });

  test('a bound on worlds is reported as such', () => {
    const report = explore(setOf('one room: cancel'), { maxStates: 1000 });
    assert.equal(report.isComplete, false);
    assert.equal(report.violation, null);
  });

  for (const [name, { rule, set, finds, rules }] of Object.entries(BROKEN_RULES)) {
    test(`it is found when it does not hold that ${rule} (${name})`, () => {
      const { violation } = explore(setOf(set), { rules });
      assert.ok(violation !== null, 'found');
      assert.match(violation.what, finds);
      assert.ok(violation.trace.length > 3 && violation.trace.length < 60, violation.trace.join('\n'));
      assert.equal(violation.trace[0], 'client: 0 asks');
    });
  }
});

describe('sets', () => {
  test('every run has each single fault on one room, pairs, and two rooms that contend for a page', () => {
    const names = CI_SETS.map(({ name }) => name);
    for (const fault of FAULTS) assert.ok(names.includes(`one room: ${fault}`), fault);
    for (const name of ['one room: drop+duplicate', 'two rooms, one page of D: no fault'])
      assert.ok(names.includes(name), `no ${name} among ${names.join('; ')}`);
  });

  test('deep runs have every pair of faults on one room and every fault on two', () => {
    const names = [...CI_SETS, ...DEEP_SETS].map(({ name }) => name);
    assert.equal(new Set(names).size, names.length, 'names are different');
    for (const [index, first] of FAULTS.entries()) {
      for (const second of FAULTS.slice(index + 1))
        assert.ok(names.includes(`one room: ${first}+${second}`), `no ${first}+${second}`);
      assert.ok(names.includes(`two rooms, one page of D: ${first}`), `no ${first} in two rooms`);
    }
  });
});

describe('coverage', () => {
  test('a missing cell, a wrong declaration and an unknown cell are told apart', () => {
    const all = new Set<string>();
    for (const [owner, { phases, messages, happenings }] of Object.entries(TABLES)) {
      for (const phase of phases) for (const message of messages) all.add(`${owner} | ${phase} | ${message}`);
      for (const [name, where] of Object.entries(happenings))
        for (const phase of where) all.add(`${owner} | ${phase} | ${name}`);
    }
    const possible = [...all].filter((cell) => !cellsOf([...IMPOSSIBLE, ...BEYOND]).has(cell));
    const clean = judge(possible);
    assert.deepEqual([clean.missing, clean.impossibleButReached, clean.unknown], [[], [], []]);
    assert.deepEqual(judge(possible.slice(1)).missing, [possible[0]]);
    assert.deepEqual(judge([...possible, 'prefill | unseen | DONE']).impossibleButReached, ['prefill | unseen | DONE']);
    assert.deepEqual(judge([...possible, 'prefill | asleep | DONE']).unknown, ['prefill | asleep | DONE']);
  });

  test('every declared cell is a cell of its table, once', () => {
    const declared = [...IMPOSSIBLE, ...BEYOND].flatMap(({ owner, phases, messages }) =>
      phases.flatMap((phase) => messages.map((message) => `${owner} | ${phase} | ${message}`)),
    );
    assert.equal(new Set(declared).size, declared.length);
    for (const cell of declared) {
      const [owner, phase, message] = cell.split(' | ') as [keyof typeof TABLES, string, string];
      assert.ok(TABLES[owner].phases.includes(phase) && TABLES[owner].messages.includes(message), cell);
    }
  });
});

describe('values', () => {
  test('equal values have one text and number, others do not; the order of maps counts, of sets not', () => {
    const value = (order: string[]): unknown => ({
      a: [1, null, 'x'],
      map: new Map(order.map((key) => [key, 1])),
      set: new Set(['p', 'q']),
      bytes: Uint8Array.of(1, 2),
    });
    const interner = createInterner<unknown>();
    assert.deepEqual(interner.intern(value(['m', 'n'])), { id: 0, isNew: true });
    assert.deepEqual(interner.intern(copyOf(value(['m', 'n']))), { id: 0, isNew: false });
    assert.deepEqual(interner.intern(value(['n', 'm'])), { id: 1, isNew: true });
    assert.equal(textOf(new Set(['q', 'p'])), textOf(new Set(['p', 'q'])));
    assert.notEqual(textOf({ a: '1' }), textOf({ a: 1 }));
  });

  test('a copy shares nothing that can be written to, except what is declared constant', () => {
    const limits = share({ pages: 3 });
    const original = { limits, list: [{ n: 1 }], map: new Map([['k', { n: 1 }]]) };
    const copy = copyOf(original);
    assert.equal(copy.limits, limits);
    copy.list[0]!.n = 2;
    copy.map.get('k')!.n = 2;
    assert.equal(original.list[0]?.n, 1);
    assert.equal(original.map.get('k')?.n, 1);
  });
});
