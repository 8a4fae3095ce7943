import assert from 'node:assert/strict';
import { test } from 'node:test';
import { createRoomWatch } from '../../../server/operators/room-watch.ts';

const room = (key: string, queue: string, state = queue) => ({ key, queue, state });

test('a stay lasts from the first look at a queue and state to the first look at another', () => {
  const watch = createRoomWatch();
  watch.look([room('a', 'waiting')], 1000);
  watch.look([room('a', 'waiting')], 3000);
  assert.deepEqual(watch.oldest(3500), [{ queue: 'waiting', state: 'waiting', seconds: 2.5 }]);
  watch.look([room('a', 'transfer', 'bootstrapping')], 4000);
  assert.deepEqual(watch.oldest(4000), [{ queue: 'transfer', state: 'bootstrapping', seconds: 0 }]);
  watch.look([room('a', 'transfer', 'transferring')], 5000);
  assert.deepEqual(watch.oldest(5250), [{ queue: 'transfer', state: 'transferring', seconds: 0.25 }]);
});

test('the oldest of each queue and state is told', () => {
  const watch = createRoomWatch();
  watch.look([room('a', 'running')], 0);
  watch.look([room('a', 'running'), room('b', 'running'), room('c', 'inflight')], 1000);
  assert.deepEqual(watch.oldest(2000), [
    { queue: 'running', state: 'running', seconds: 2 },
    { queue: 'inflight', state: 'inflight', seconds: 1 },
  ]);
});

test('the latest events are kept, repetitions as one', () => {
  const watch = createRoomWatch();
  watch.look([room('a', 'running')], 0);
  for (let index = 0; index < 10; index++) watch.note('a', `event ${index}`, index);
  for (const atMs of [20, 21, 22]) watch.note('a', 'step_done', atMs);
  const events = watch.historyOf('a')?.events ?? [];
  assert.equal(events.length, 8);
  assert.equal(events[0]?.what, 'event 3');
  assert.deepEqual(events.at(-1), { what: 'step_done', count: 3, atMs: 22 });
});

test('what happens to a room before it is seen belongs to it; a room that is gone is forgotten', () => {
  const watch = createRoomWatch();
  watch.note('a', 'submit', 5);
  assert.deepEqual(watch.oldest(9), [], 'a room in no queue has no stay');
  watch.look([room('a', 'prealloc')], 10);
  assert.equal(watch.historyOf('a')?.events.at(-1)?.what, 'submit');
  watch.note('stray', 'ABORT', 11);
  watch.look([], 20);
  assert.deepEqual([watch.historyOf('a'), watch.historyOf('stray'), watch.oldest(20)], [null, null, []]);
});
