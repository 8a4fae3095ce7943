import assert from 'node:assert/strict';
import { test } from 'node:test';
import type { BuildInfo } from '../../../server/operators/build-info.ts';
import type { RouterPage, RouterRoomEntry, WorkerPage, WorkerRoomEntry } from '../../../server/operators/debug-page.ts';
import { diagnose } from '../../../server/operators/doctor.ts';
import { makeEpoch, makeKey, makeRoomId } from '../../../transfer/messages.ts';

const R = makeEpoch(1, 1);
const P = makeEpoch(2, 2);
const D = makeEpoch(3, 3);

const build: BuildInfo = {
  version: '1.2.3',
  commit: 'abcdef0123456789',
  codeDigest: 'c0de',
  code: 'clean',
  modelDigest: 'f00d',
  checkpoint: 'external',
};
const history = { ageSeconds: 1, lastEvent: null, events: [] };

function worker(role: 'prefill' | 'decode', change: Partial<WorkerPage> = {}): WorkerPage {
  return {
    role,
    name: `${role}@a:1`,
    epoch: role === 'prefill' ? P : D,
    draining: false,
    build,
    queues: {},
    pages: { free: 10, cached: 0, running: 0 },
    slots: { free: 4, used: 0 },
    rooms: [],
    unacknowledged: [],
    tombstones: 0,
    conservation: { faults: [], auditAgeSeconds: 0, violationsTotal: 0 },
    reaperAgeSeconds: 0,
    peers: [],
    ...change,
  };
}

function half(room: string, change: Partial<WorkerRoomEntry> = {}): WorkerRoomEntry {
  return {
    room,
    queue: 'transfer',
    state: 'transferring',
    peer: { name: 'prefill@a:1', epoch: P },
    owns: { owner: `session ${room}`, pages: [1], slot: 0, creditBytes: 0 },
    progress: { unitsDone: 0, units: 2, tokens: 0 },
    isBusy: false,
    stopReason: null,
    ...history,
    ...change,
  };
}

function page(change: Partial<RouterPage> = {}, prefill = worker('prefill'), decode = worker('decode')): RouterPage {
  const seat = (own: WorkerPage) => ({
    worker: `${own.role}-0`,
    role: own.role,
    address: 'tcp://a:1',
    epoch: own.epoch,
    page: own,
    error: null,
  });
  return {
    role: 'router',
    name: 'router@a:1',
    epoch: R,
    draining: false,
    build,
    deadlines: {
      heartbeatMs: 1000,
      leaseMs: 10_000,
      stallMs: 15_000,
      roomMs: 60_000,
      requestMs: 600_000,
      drainMs: 30_000,
    },
    rooms: [],
    reaperAgeSeconds: 0,
    peers: [],
    workers: [seat(prefill), seat(decode)],
    ...change,
  };
}

const faultsOf = (of: RouterPage): readonly string[] => diagnose('http://r', of).faults;
const roomId = makeRoomId(R, 7);
const key = makeKey(roomId, 1);
const known: RouterRoomEntry = {
  room: roomId,
  requestId: 'x',
  queue: 'running',
  state: 'running',
  attempt: 1,
  tokens: 3,
  outcome: null,
  prefill: null,
  decode: null,
  ...history,
};

test('a cluster at rest is healthy, on one screen, with its versions', () => {
  const { lines, faults } = diagnose('http://r', page());
  assert.deepEqual(faults, []);
  assert.match(lines[0]!, /healthy/);
  assert.ok(lines.length <= 24 && lines.every((line) => line.length <= 160), lines.join('\n'));
  assert.ok(
    lines.some((line) => /router, prefill-0, decode-0: version 1\.2\.3 at abcdef012345, code c0de/.test(line)),
    lines.join('\n'),
  );
});

test('an entry that stays in a hand-over beyond the stall clock is named, with process, queue and age', () => {
  const seen = (ageSeconds: number): readonly string[] =>
    faultsOf(page({ rooms: [known] }, worker('prefill', { rooms: [half(key, { queue: 'inflight', ageSeconds })] })));
  assert.deepEqual(seen(21), ['prefill-0: …000100000001-7.1 is in inflight (transferring) for 21 s']);
  assert.deepEqual(seen(19), []);
});

test('a reservation is named when nothing comes for it, not when its long prompt is computed for minutes', () => {
  const seen = (change: Partial<WorkerRoomEntry>): readonly string[] =>
    faultsOf(page({ rooms: [known] }, worker('prefill'), worker('decode', { rooms: [half(key, change)] })));
  assert.deepEqual(seen({ ageSeconds: 21 }), [
    'decode-0: …000100000001-7.1 is in transfer (transferring), but nothing happened to it for 21 s',
  ]);
  assert.deepEqual(seen({ ageSeconds: 19 }), []);
  const lastEvent = { what: 'QUEUED', count: 3, ageSeconds: 2 };
  assert.deepEqual(seen({ ageSeconds: 200, lastEvent }), []);
  assert.equal(seen({ ageSeconds: 200, lastEvent: { ...lastEvent, ageSeconds: 21 } }).length, 1);
});

test('a half that its router does not know is an orphan; one of another router is not judged', () => {
  const orphan = worker('prefill', { rooms: [half(key, { queue: 'inflight', ageSeconds: 6 })] });
  assert.match(
    faultsOf(page({}, orphan)).join(),
    /prefill-0: .*-7\.1 is in inflight for 6\.0 s, but its router does not/,
  );
  const foreign = worker('prefill', {
    rooms: [half(makeKey(makeRoomId(D, 7), 1), { queue: 'inflight', ageSeconds: 6 })],
  });
  assert.deepEqual(faultsOf(page({}, foreign)), []);
});

test('a running room to which nothing happens is stuck, one that runs for an hour is not', () => {
  const lastEvent = (ageSeconds: number) => ({ what: 'tokens', count: 1, ageSeconds });
  assert.deepEqual(faultsOf(page({ rooms: [{ ...known, ageSeconds: 3600, lastEvent: lastEvent(0.1) }] })), []);
  const silent = faultsOf(page({ rooms: [{ ...known, ageSeconds: 3600, lastEvent: lastEvent(25) }] }));
  assert.match(silent.join(), /nothing happened to it for 25 s/);
});

const broken: [what: string, page: RouterPage, fault: RegExp][] = [
  [
    'a ledger that does not add up',
    page(
      {},
      worker('prefill', { conservation: { faults: ['page 3: twice'], auditAgeSeconds: 0, violationsTotal: 0 } }),
    ),
    /prefill-0: ledger: page 3: twice/,
  ],
  [
    'past ledger violations',
    page({}, worker('prefill', { conservation: { faults: [], auditAgeSeconds: 0, violationsTotal: 2 } })),
    /2 ledger violations/,
  ],
  [
    'memory in use without a room',
    page({}, worker('prefill'), worker('decode', { pages: { free: 7, running: 3 }, slots: { free: 3, used: 1 } })),
    /decode-0: 3 pages and 1 slots in use, but no room/,
  ],
  [
    'a terminal message nobody acknowledges',
    page(
      {},
      worker('prefill', {
        unacknowledged: [{ room: key, to: 'peer', message: 'ABORT', name: 'decode@a:1', ageSeconds: 11 }],
      }),
    ),
    /prefill-0: ABORT of .* is not acknowledged by decode@a:1 for 11 s/,
  ],
  [
    'a peer that is silent',
    page(
      {},
      worker('prefill', {
        peers: [{ name: 'decode@a:1', role: 'decode', epoch: D, isUp: true, silenceSeconds: 6, epochChanges: 0 }],
      }),
    ),
    /prefill-0: decode@a:1 is silent for 6\.0 s/,
  ],
  [
    'a peer that is lost',
    page({
      peers: [{ name: 'decode@a:1', role: 'decode', epoch: D, isUp: false, silenceSeconds: 12, epochChanges: 0 }],
    }),
    /router: lost decode@a:1 12 s ago/,
  ],
  ['a reaper that stands still', page({ reaperAgeSeconds: 3 }), /router: deadlines not judged for 3\.0 s/],
  [
    'other code on a worker',
    page({}, worker('prefill', { build: { ...build, codeDigest: 'beef' } })),
    /code beef, the router has c0de/,
  ],
  [
    'a worker that shows nothing',
    page({ workers: page().workers.map((seat) => ({ ...seat, page: null, error: 'it answered 401' })) }),
    /decode-0: it answered 401/,
  ],
  [
    'a role without a worker',
    page({ workers: page().workers.filter(({ role }) => role === 'prefill') }),
    /router: no decode worker is linked/,
  ],
];
for (const [what, of, fault] of broken) {
  test(`${what} makes a cluster unhealthy`, () => {
    const { lines, faults } = diagnose('http://r', of);
    assert.match(faults.join('\n'), fault);
    assert.match(lines[0]!, /NOT HEALTHY/);
  });
}
