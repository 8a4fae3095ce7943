import assert from 'node:assert/strict';
import { test } from 'node:test';
import type { WorkerView } from '../../../server/balancer.ts';
import { createRooms, type RoomDriver, type RoomOutcome } from '../../../server/rooms.ts';
import { makeEpoch, type Epoch, type RouterToWorker, type SubmitMessage } from '../../../transfer/messages.ts';

const GREEDY = { temperature: 0, topK: 0, topP: 1, minP: 0, seed: 0 };
const REQUEST = {
  requestId: 'r',
  promptTokens: [0, 5, 9],
  sampling: GREEDY,
  maxTokens: 8,
  salt: null,
  stopTokenIds: [1],
};

interface Bench {
  rooms: RoomDriver;
  workers: Map<Epoch, WorkerView>;
  sent: { epoch: Epoch; message: RouterToWorker }[];
  tokens: number[];
  cached: number[];
  ends: RoomOutcome[];
  aborted: string[];
  closed: string[];
  nowMs: number;
}

function view(role: 'prefill' | 'decode', startMs: number): WorkerView {
  const epoch = makeEpoch(startMs, 1);
  return { role, ref: { name: role, epoch, address: 'tcp://127.0.0.1:1' }, load: null, halves: new Set() };
}

function createBench(): Bench {
  const bench: Omit<Bench, 'rooms'> = {
    workers: new Map(),
    sent: [],
    tokens: [],
    cached: [],
    ends: [],
    aborted: [],
    closed: [],
    nowMs: 0,
  };
  for (const worker of [view('prefill', 1), view('decode', 2)]) bench.workers.set(worker.ref.epoch, worker);
  const rooms = createRooms({
    epoch: makeEpoch(0, 0),
    modelDigest: 'digest',
    requestMs: 60_000,
    now: () => result.nowMs,
    links: {
      workers: () => result.workers.values(),
      send: (epoch, message) => void result.sent.push({ epoch, message }),
    },
    onAborted: (reason, phase) => void result.aborted.push(`${reason} ${phase}`),
    onClosed: (room) => void result.closed.push(room.outcome),
  });
  const result: Bench = { ...bench, rooms };
  return result;
}

function start(bench: Bench): ReturnType<RoomDriver['start']> {
  return bench.rooms.start(REQUEST, {
    onTokens: (ids) => void bench.tokens.push(...ids),
    onCached: (tokenCount) => void bench.cached.push(tokenCount),
    onEnd: (outcome) => void bench.ends.push(outcome),
  });
}

function submits(bench: Bench): { epoch: Epoch; key: string }[] {
  return bench.sent
    .filter(({ message }) => message.type === 'submit')
    .map(({ epoch, message }) => ({ epoch, key: (message as SubmitMessage).key }));
}

function lose(bench: Bench, epoch: Epoch): void {
  bench.workers.delete(epoch);
  bench.rooms.onLink({ type: 'worker_lost', epoch });
}

function end(bench: Bench, at: { epoch: Epoch; key: string }, reason: 'peer_lost'): void {
  const { epoch, key } = at;
  const outcome = { ok: false, reason } as const;
  bench.rooms.onLink({ type: 'message', epoch, message: { type: 'end', key, epoch, outcome, tokenCount: 0 } });
}

test('without a live worker of a role nothing is started', () => {
  const bench = createBench();
  bench.workers.delete(makeEpoch(2, 1));
  assert.throws(() => start(bench), { code: 'engine_unavailable', status: 503 });
  assert.equal(bench.rooms.ready(), false);
  assert.deepEqual(bench.sent, []);
});

test('a room whose only decode worker died waits for the next life of it, and is tried again there', () => {
  const bench = createBench();
  start(bench);
  const [decode, prefill] = submits(bench) as [{ epoch: Epoch; key: string }, { epoch: Epoch; key: string }];
  lose(bench, decode.epoch);
  end(bench, prefill, 'peer_lost');
  assert.equal(submits(bench).length, 2, 'nobody to try it on yet');
  assert.deepEqual(bench.ends, []);

  bench.nowMs = 3000;
  const restarted = view('decode', 9);
  bench.workers.set(restarted.ref.epoch, restarted);
  bench.rooms.onLink({ type: 'worker_up', epoch: restarted.ref.epoch });
  bench.rooms.tick();
  const again = submits(bench).slice(2);
  assert.deepEqual(
    again.map(({ epoch, key }) => [epoch, key.endsWith('.2')]),
    [
      [restarted.ref.epoch, true],
      [prefill.epoch, true],
    ],
  );
});

test('of clients that leave together thirty-two are cancelled at once and four hundred a second after', () => {
  const bench = createBench();
  const handles = Array.from({ length: 100 }, () => start(bench));
  // By key: what is not answered is sent again.
  const cancels = (): number =>
    new Set(bench.sent.flatMap(({ message }) => (message.type === 'cancel' ? [message.key] : []))).size;
  for (const handle of handles) handle.cancel('client_lost');
  assert.equal(cancels(), 32);
  for (const [nowMs, expected] of [
    [50, 52],
    [100, 72],
    [170, 100],
    [200, 100],
  ] as const) {
    bench.nowMs = nowMs;
    bench.rooms.tick();
    assert.equal(cancels(), expected, `after ${nowMs} ms`);
  }
  assert.deepEqual(new Set(bench.aborted), new Set(['client_lost queued']));
  assert.equal(bench.aborted.length, 100, 'each once');
});

test('a room for which no worker comes back ends with an explicit error after five seconds', () => {
  const bench = createBench();
  start(bench);
  const [decode, prefill] = submits(bench) as [{ epoch: Epoch; key: string }, { epoch: Epoch; key: string }];
  lose(bench, decode.epoch);
  end(bench, prefill, 'peer_lost');
  bench.nowMs = 4999;
  bench.rooms.tick();
  assert.equal(bench.ends.length, 0);
  bench.nowMs = 5000;
  bench.rooms.tick();
  const ends = bench.ends.map((outcome: RoomOutcome) =>
    outcome.kind === 'failed' ? outcome.error.status : outcome.kind,
  );
  assert.deepEqual(ends, [504]);
  assert.deepEqual(bench.closed, ['peer_lost']);
});

test('a client that leaves while a pair is looked for ends the room at once', () => {
  const bench = createBench();
  const handle = start(bench);
  const [decode, prefill] = submits(bench) as [{ epoch: Epoch; key: string }, { epoch: Epoch; key: string }];
  lose(bench, decode.epoch);
  end(bench, prefill, 'peer_lost');
  handle.cancel('client_lost');
  assert.deepEqual(bench.ends, [{ kind: 'cancelled', reason: 'client_lost' }]);
  assert.deepEqual(bench.closed, ['client_lost']);
  bench.rooms.tick();
  assert.equal(submits(bench).length, 2);
  assert.equal(bench.rooms.smallestSequence(), 1);
});
