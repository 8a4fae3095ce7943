import assert from 'node:assert/strict';
import { test } from 'node:test';
import { choosePair, type WorkerView } from '../../../server/balancer.ts';

function worker(
  role: 'prefill' | 'decode',
  name: string,
  options: { halves?: number; rooms?: number; roomLimit?: number; queuedTokens?: number; draining?: boolean } = {},
): WorkerView {
  const epoch = name.padStart(20, '0');
  return {
    role,
    ref: { name, epoch, address: 'tcp://127.0.0.1:1' },
    load: {
      type: 'load',
      epoch,
      rooms: options.rooms ?? 0,
      roomLimit: options.roomLimit ?? 4,
      running: 0,
      queuedTokens: options.queuedTokens ?? 0,
      pagesFree: 1,
      pagesTotal: 1,
      draining: options.draining ?? false,
    },
    halves: new Set(Array.from({ length: options.halves ?? 0 }, (_, index) => `${name}-${index}`)),
  };
}

function names(workers: WorkerView[], avoid: string[] = []): string {
  const choice = choosePair(workers, avoid);
  return choice.kind === 'pair'
    ? `${choice.prefill.ref.name} ${choice.decode.ref.name}`
    : `${choice.kind} ${choice.role}`;
}

test('the pair is the least loaded worker of each role', () => {
  const workers = [
    worker('prefill', 'a', { halves: 2 }),
    worker('prefill', 'b', { halves: 1 }),
    worker('decode', 'c', { halves: 1, rooms: 3 }),
    worker('decode', 'd', { halves: 1, rooms: 1 }),
  ];
  assert.equal(names(workers), 'b d');
});

test('equal loads are decided by queued tokens, then by name', () => {
  const workers = [
    worker('prefill', 'b'),
    worker('prefill', 'a', { queuedTokens: 9 }),
    worker('decode', 'd'),
    worker('decode', 'c'),
  ];
  assert.equal(names(workers), 'b c');
});

test('a missing role and a full role are told apart', () => {
  assert.equal(names([worker('prefill', 'a')]), 'no_worker decode');
  assert.equal(names([worker('decode', 'a')]), 'no_worker prefill');
  assert.equal(names([worker('prefill', 'a'), worker('decode', 'b', { halves: 4 })]), 'full decode');
  assert.equal(names([worker('prefill', 'a', { draining: true }), worker('decode', 'b')]), 'full prefill');
});

test('fullness is judged by the halves this router holds, not by an older report', () => {
  assert.equal(names([worker('prefill', 'a', { rooms: 4 }), worker('decode', 'b', { rooms: 4, halves: 3 })]), 'a b');
});

test('a worker that just failed the room is taken only when it is the last one', () => {
  const epoch = (name: string): string => name.padStart(20, '0');
  const both = [worker('prefill', 'a'), worker('prefill', 'b', { halves: 3 }), worker('decode', 'c')];
  assert.equal(names(both, [epoch('a')]), 'b c');
  assert.equal(names([worker('prefill', 'a'), worker('decode', 'c')], [epoch('a'), epoch('c')]), 'a c');
});
