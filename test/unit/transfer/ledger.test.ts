import assert from 'node:assert/strict';
import { test } from 'node:test';
import {
  auditBudget,
  auditLedger,
  borrow,
  createBudget,
  createLedger,
  giveBack,
  giveBackBytes,
  handlesByOwner,
  isIdle,
  leave,
  move,
  quarantinedCount,
  share,
  SHARED,
  take,
  takeBytes,
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

test('shared handles have readers, and come free only when the last has left', () => {
  const ledger = createLedger('page', 2, true);
  take(ledger, 1, 'a');
  share(ledger, [0], 'a');
  borrow(ledger, [0], 'b');
  assert.throws(() => giveBack(ledger, [0], SHARED), /page 0: give back by shared, but it is read by a,b/);
  const again = createLedger('page', 2, true);
  take(again, 1, 'a');
  share(again, [0], 'a');
  borrow(again, [0], 'b');
  leave(again, [0], 'a');
  assert.equal(isIdle(again, 0), false);
  leave(again, [0], 'b');
  assert.equal(isIdle(again, 0), true);
  assert.deepEqual(auditLedger(again), []);
  giveBack(again, [0], SHARED);
  assert.deepEqual(again.generations, [2, 0]);
  assert.equal(isIdle(again, 0), false, 'a free handle is not shared');
  assert.deepEqual(auditLedger(again), []);
});

test('reading what is not shared, reading twice and leaving twice are violations', () => {
  const ledger = createLedger('page', 4, false);
  take(ledger, 4, 'a');
  share(ledger, [1, 2, 3], 'a');
  borrow(ledger, [0], 'b');
  borrow(ledger, [1], 'a');
  leave(ledger, [2], 'b');
  giveBack(ledger, [3], 'a');
  assert.equal(takeViolations(ledger).length, 4);
  assert.equal(quarantinedCount(ledger), 4);
  assert.deepEqual(auditLedger(ledger), []);
});

test('an audit finds a handle in two places and one in none', () => {
  const ledger = createLedger('page', 2, true);
  ledger.free.push(0);
  assert.match(auditLedger(ledger).join('; '), /page 0: twice/);
  ledger.free = [1];
  assert.match(auditLedger(ledger).join('; '), /page 0: owner null/);
});

test('a budget lends bytes up to its limit, one amount to an owner, and gets all of it back', () => {
  const budget = createBudget('host', 100, true);
  assert.equal(takeBytes(budget, 60, 'a'), true);
  assert.equal(takeBytes(budget, 41, 'b'), false);
  assert.equal(takeBytes(budget, 40, 'b'), true);
  assert.equal(budget.heldBytes, 100);
  giveBackBytes(budget, 'a');
  assert.deepEqual(budget.byOwner, new Map([['b', 40]]));
  assert.deepEqual(auditBudget(budget), []);
  assert.throws(() => giveBackBytes(budget, 'a'), /host: give back by a, who has nothing/);
  assert.throws(() => takeBytes(budget, 1, 'b'), /host: take by b, who has 40 bytes/);
});

test('a violation of a budget changes nothing in production, and is reported once', () => {
  const budget = createBudget('host', 100, false);
  takeBytes(budget, 60, 'a');
  assert.equal(takeBytes(budget, 1, 'a'), false);
  giveBackBytes(budget, 'b');
  assert.equal(budget.heldBytes, 60);
  assert.equal(takeViolations(budget).length, 2);
  assert.deepEqual(takeViolations(budget), []);
});

test('the audit of a budget counts for itself', () => {
  const budget = createBudget('host', 100, true);
  takeBytes(budget, 60, 'a');
  budget.heldBytes = 50;
  assert.deepEqual(auditBudget(budget), ['host: counted 60 bytes, kept 50']);
  budget.byOwner.set('b', 60);
  budget.heldBytes = 120;
  assert.deepEqual(auditBudget(budget), ['host: 120 bytes over the limit of 100']);
});
