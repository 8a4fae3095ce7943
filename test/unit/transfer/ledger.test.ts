import assert from 'node:assert/strict';
import { test } from 'node:test';
import {
  auditLedger,
  createLedger,
  giveBack,
  handlesByOwner,
  move,
  quarantinedCount,
  take,
  takeViolations,
} from '../../../transfer/ledger.ts';

test('all handles are lent or none, longest free first, under a new generation', () => {
  const ledger = createLedger('page', 3, true);
  assert.deepEqual(take(ledger, 2, 'a'), [0, 1]);
  assert.equal(take(ledger, 2, 'b'), null);
  giveBack(ledger, [1, 0], 'a');
  assert.deepEqual(take(ledger, 3, 'b'), [2, 1, 0]);
  assert.deepEqual(ledger.generations, [3, 3, 1]);
  assert.deepEqual(auditLedger(ledger), []);
});

test('a move changes the owner and keeps the generation', () => {
  const ledger = createLedger('page', 2, true);
  const handles = take(ledger, 2, 'session') as number[];
  move(ledger, handles, 'session', 'sequence');
  assert.deepEqual(handlesByOwner(ledger), new Map([['sequence', [0, 1]]]));
  assert.deepEqual(ledger.generations, [1, 1]);
  assert.throws(() => giveBack(ledger, handles, 'session'), /page 0: give back by session/);
});

test('a strict ledger throws on a double release and on a handle that does not exist', () => {
  const ledger = createLedger('slot', 1, true);
  take(ledger, 1, 'a');
  giveBack(ledger, [0], 'a');
  assert.throws(() => giveBack(ledger, [0], 'a'), /owner is nobody/);
  assert.throws(() => giveBack(ledger, [5], 'a'), /slot 5/);
});

test('in production a violation is recorded once and its handle never lent again', () => {
  const ledger = createLedger('page', 2, false);
  take(ledger, 1, 'a');
  giveBack(ledger, [0], 'b');
  assert.equal(takeViolations(ledger).length, 1);
  assert.deepEqual(takeViolations(ledger), []);
  assert.equal(quarantinedCount(ledger), 1);
  // A double release takes the handle out of the free list again.
  giveBack(ledger, [1], 'a');
  assert.equal(take(ledger, 1, 'c'), null);
  assert.deepEqual(auditLedger(ledger), []);
});

test('an audit finds a handle in two places and one in none', () => {
  const ledger = createLedger('page', 2, true);
  ledger.free.push(0);
  assert.match(auditLedger(ledger).join('; '), /page 0: twice/);
  ledger.free = [1];
  assert.match(auditLedger(ledger).join('; '), /page 0: owner null/);
});
