import assert from 'node:assert/strict';
import { once } from 'node:events';
import { test } from 'node:test';
import { inspect } from 'node:util';
import { createTurns } from '../../../../server/api/turns.ts';
import type { Turn, TurnsOptions } from '../../../../server/api/turns.ts';
import { ApiError } from '../../../../server/errors.ts';

function lines(more: Partial<TurnsOptions> = {}) {
  let nowMs = 0;
  const served: string[] = [];
  const refused: string[] = [];
  const turns = createTurns({
    limits: { maxRequests: null, requestsPerMinute: null },
    clientCount: 2,
    capacity: () => ({ running: 4, waiting: 100 }),
    maxWaitMs: 60_000,
    now: () => nowMs,
    ...more,
  });
  return {
    served,
    refused,
    pass: (ms: number) => (nowMs += ms),
    enter: (client: string, name: string, rooms = 1): Turn =>
      turns.enter(
        client,
        rooms,
        () => served.push(name),
        (error) => refused.push(error.code),
      ),
  };
}

const codeOf = (act: () => unknown): string => {
  try {
    act();
  } catch (error) {
    assert.ok(error instanceof ApiError, inspect(error));
    return error.code;
  }
  assert.fail('it was let in');
};

test("a key's hundred requests do not stand before another's one", () => {
  const { served, enter } = lines();
  const many = Array.from({ length: 40 }, (_, index) => enter('a', `a${index}`));
  assert.equal(served.length, 4);
  enter('b', 'b0');
  assert.equal(served.length, 4, 'all that can run does');
  many[0]!.leave();
  assert.deepEqual(served.slice(4), ['b0'], 'what is free goes to who has least');
  many[1]!.leave();
  assert.deepEqual(served.slice(5), ['a4']);
});

test('a line keeps its order, and who leaves it is passed over', () => {
  const { served, enter } = lines();
  const running = ['a0', 'a1', 'a2', 'a3'].map((name) => enter('a', name));
  const waiting = ['a4', 'a5', 'a6'].map((name) => enter('a', name));
  waiting[1]!.leave();
  for (const turn of running) turn.leave();
  assert.deepEqual(served.slice(4), ['a4', 'a6']);
});

test('leaving twice frees one place', () => {
  const { served, enter } = lines();
  const first = enter('a', 'a0', 4);
  enter('a', 'a1', 4);
  enter('b', 'b0', 4);
  first.leave();
  first.leave();
  assert.deepEqual(served, ['a0', 'b0']);
});

test('a request larger than all there is runs alone', () => {
  const { served, enter } = lines();
  const large = enter('a', 'large', 9);
  enter('b', 'small');
  assert.deepEqual(served, ['large']);
  large.leave();
  assert.deepEqual(served, ['large', 'small']);
});

test('each key has its own share of the places to wait', () => {
  const { enter } = lines({ capacity: () => ({ running: 1, waiting: 4 }) });
  enter('a', 'running');
  enter('a', 'waiting');
  enter('a', 'waiting');
  assert.equal(
    codeOf(() => enter('a', 'too many')),
    'queue_full',
  );
  enter('b', 'waits still');
});

test('one key alone is never held back here', () => {
  const { served, enter } = lines({ clientCount: 1 });
  for (let count = 0; count < 50; count += 1) enter('a', 'a');
  assert.equal(served.length, 50);
});

test('requests at once are limited by key, waiting ones included', () => {
  const { enter } = lines({ limits: { maxRequests: 2, requestsPerMinute: null } });
  const first = enter('a', 'a0');
  enter('a', 'a1');
  assert.equal(
    codeOf(() => enter('a', 'a2')),
    'rate_limit_exceeded',
  );
  enter('b', 'b0');
  first.leave();
  enter('a', 'a3');
});

test('requests in a minute are limited by key, and the answer says when to come again', () => {
  const { enter, pass } = lines({ limits: { maxRequests: null, requestsPerMinute: 6 } });
  for (let count = 0; count < 6; count += 1) enter('a', 'a').leave();
  try {
    enter('a', 'a');
    assert.fail('it was let in');
  } catch (error) {
    assert.ok(error instanceof ApiError, inspect(error));
    assert.equal(error.status, 429);
    assert.equal(error.retryAfterSeconds, 10);
  }
  enter('b', 'b');
  pass(10_000);
  enter('a', 'a');
});

test('a request whose turn does not come is refused, and its place in the line is free again', async () => {
  const { served, refused, enter } = lines({ capacity: () => ({ running: 1, waiting: 2 }), maxWaitMs: 1 });
  const running = enter('a', 'a0');
  enter('a', 'a1');
  const until = new EventTarget();
  const look = setInterval(() => refused.length > 0 && until.dispatchEvent(new Event('refused')), 1);
  await once(until, 'refused');
  clearInterval(look);
  assert.deepEqual(refused, ['queue_timeout']);
  running.leave();
  assert.deepEqual(served, ['a0']);
});
