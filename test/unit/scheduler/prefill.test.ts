import assert from 'node:assert/strict';
import { test } from 'node:test';
import {
  auditPrefill,
  createPrefill,
  nextPrefillBatch,
  statsPrefill,
  stepPrefill,
  type PrefillEvent,
  type PrefillState,
} from '../../../scheduler/prefill.ts';
import type { PrefillLimits } from '../../../scheduler/types.ts';
import type { Manifest, PeerMessage, RouterToWorker } from '../../../transfer/messages.ts';
import { makeEpoch, makeKey, makeRoomId } from '../../../transfer/messages.ts';
import { D, keyOf, P, PREFILL_LIMITS, ROUTER, SAMPLING, shorten, submitOf } from '../../support/halves.ts';

function create(changes: Partial<PrefillLimits> = {}): PrefillState {
  const state = createPrefill({ ...PREFILL_LIMITS, ...changes }, P);
  step(state, { type: 'peer_up', peer: D, nowMs: 0 });
  return state;
}

function step(state: PrefillState, event: PrefillEvent): string[] {
  const effects = stepPrefill(state, event);
  assert.deepEqual(auditPrefill(state), []);
  return shorten(effects);
}

function fromRouter(state: PrefillState, message: RouterToWorker, nowMs = 1): string[] {
  return step(state, { type: 'router_message', router: ROUTER, message, nowMs });
}

type Content = PeerMessage extends infer M ? (M extends PeerMessage ? Omit<M, 'from' | 'to' | 'key'> : never) : never;

function fromPeer(state: PrefillState, sequence: number, content: Content, nowMs = 1): string[] {
  const message = { from: D.epoch, to: P.epoch, key: keyOf(sequence), ...content } as PeerMessage;
  return step(state, { type: 'peer_message', peer: D, message, nowMs });
}

function openOf(count: number): Content {
  return { type: 'OPEN', digest: submitOf(0, count).digest, tokenCount: count };
}

function reservedOf(count: number, credit?: number): Content {
  const pageCount = Math.ceil(count / 128);
  const manifest: Manifest = {
    tokenCount: count,
    validInLastPage: count - (pageCount - 1) * 128,
    pageCount,
    pageBytes: 8,
    slotBytes: 12,
    generations: Array.from({ length: pageCount + 1 }, () => 1),
  };
  return { type: 'RESERVED', manifest, credit: credit ?? pageCount * 8 + 12 };
}

/** Bring a room of `count` tokens to the computing queue. */
function admit(state: PrefillState, sequence: number, count: number): void {
  fromRouter(state, submitOf(sequence, count));
  fromPeer(state, sequence, openOf(count));
  fromPeer(state, sequence, reservedOf(count));
}

/** The batch in short: sequence number and token range of each chunk. */
function rangesOf(state: PrefillState): string[] {
  const batch = nextPrefillBatch(state);
  return (batch?.chunks ?? []).map(({ key, start, end, last }) => {
    const room = [0, 1, 2, 3, 4].find((sequence) => keyOf(sequence) === key);
    return `${room}:${start}-${end}${last ? '!' : ''}`;
  });
}

function stepDone(state: PrefillState, sequences: number[]): string[] {
  const tokens = sequences.map((sequence) => ({ key: keyOf(sequence), token: 7 }));
  return step(state, { type: 'step_done', tokens, nowMs: 1 });
}

test('submit and OPEN come in either order, then RESERVED, and the room is computed and sent', () => {
  for (const isOpenFirst of [true, false]) {
    const state = create();
    const submit = (): string[] => fromRouter(state, submitOf(0, 200));
    const open = (): string[] => fromPeer(state, 0, openOf(200));
    if (isOpenFirst) {
      assert.deepEqual(open(), ['QUEUED']);
      assert.deepEqual(submit(), ['accepted']);
    } else {
      assert.deepEqual(submit(), ['accepted']);
      assert.deepEqual(open(), ['QUEUED']);
    }
    assert.deepEqual(fromPeer(state, 0, reservedOf(200)), ['QUEUED', 'QUEUED']);
    assert.deepEqual(rangesOf(state), ['0:0-200!']);
    assert.deepEqual(stepDone(state, [0]), ['read:0+3']);
    const read: PrefillEvent = { type: 'read_done', key: keyOf(0), firstUnit: 0, checksums: [1, 2, 3], nowMs: 1 };
    assert.deepEqual(step(state, read), ['CHUNK', 'END']);
    assert.equal(statsPrefill(state).inflight, 1);
    assert.deepEqual(fromPeer(state, 0, { type: 'DONE' }), ['DONE_ACK', 'end:sent']);
    assert.equal(statsPrefill(state).pagesFree, 20);
    // Until the router has heard, the end is told again; a DONE whose answer was lost is answered.
    assert.deepEqual(step(state, { type: 'tick', nowMs: 200 }), ['end:sent']);
    assert.deepEqual(fromPeer(state, 0, { type: 'DONE' }), ['DONE_ACK']);
    fromRouter(state, { type: 'end_ack', key: keyOf(0) });
    assert.deepEqual(step(state, { type: 'tick', nowMs: 5000 }), []);
  }
});

test('chunks are whole pages under the budget, except the last of a prompt', () => {
  const state = create();
  admit(state, 0, 300);
  admit(state, 1, 100);
  admit(state, 2, 400);
  assert.deepEqual(rangesOf(state), ['0:0-256']);
  assert.deepEqual(rangesOf(state), [], 'one step at a time');
  stepDone(state, []);
  // 44 + 100 tokens leave 112: less than a page, so the third room waits.
  assert.deepEqual(rangesOf(state), ['0:256-300!', '1:0-100!']);
  stepDone(state, [0, 1]);
  assert.deepEqual(rangesOf(state), ['2:0-256']);
  stepDone(state, []);
  assert.deepEqual(rangesOf(state), ['2:256-400!']);
});

test('a chunk carries its tokens and the page table of the whole prompt', () => {
  const state = create();
  admit(state, 0, 300);
  nextPrefillBatch(state);
  stepDone(state, []);
  const [chunk] = nextPrefillBatch(state)?.chunks ?? [];
  assert.deepEqual(
    [...(chunk?.tokens ?? [])],
    Array.from({ length: 44 }, (_, index) => 256 + index),
  );
  assert.equal(chunk?.pages.length, 3);
});

test('a prompt whose rules leave no first token ends at once, and the peer is told', () => {
  const state = create();
  const rules = {
    presencePenalty: 0,
    frequencyPenalty: 0,
    repetitionPenalty: 1,
    biasIds: [],
    biases: [],
    minTokens: 1,
  };
  fromRouter(state, submitOf(0, 300, { sampling: { ...SAMPLING, rules }, stopTokens: [9] }));
  fromPeer(state, 0, openOf(300));
  fromPeer(state, 0, reservedOf(300, 0));
  assert.equal(nextPrefillBatch(state)?.chunks[0]?.rules, null, 'nothing is sampled yet');
  stepDone(state, []);
  assert.deepEqual(nextPrefillBatch(state)?.chunks[0]?.rules?.banned, [9]);
  const event = { type: 'step_done', tokens: [{ key: keyOf(0), token: null }], nowMs: 2 } as const;
  assert.deepEqual(step(state, { ...event, tokens: [...event.tokens] }), ['ABORT:unsatisfiable', 'end:unsatisfiable']);
  assert.equal(statsPrefill(state).pagesFree, PREFILL_LIMITS.pageCount);
});

test('full pages are read before the last chunk is computed', () => {
  const state = create();
  admit(state, 0, 300);
  nextPrefillBatch(state);
  assert.deepEqual(stepDone(state, []), ['read:0+2']);
  nextPrefillBatch(state);
  assert.deepEqual(stepDone(state, [0]), ['read:2+2']);
});

test('staging bounds what is read at once, over all rooms', () => {
  const state = create({ stagingBytes: 16, maxChunkBytes: 8 });
  admit(state, 0, 128);
  admit(state, 1, 128);
  nextPrefillBatch(state);
  assert.deepEqual(stepDone(state, [0, 1]), ['read:0+1', 'read:0+1']);
  assert.equal(statsPrefill(state).stagingBytes, 16);
  const read: PrefillEvent = { type: 'read_done', key: keyOf(0), firstUnit: 0, checksums: [1], nowMs: 1 };
  assert.deepEqual(step(state, read), ['CHUNK', 'read:1+1']);
});

test('pages are lent for a whole prompt or not at all, and the queue keeps its order', () => {
  const state = create({ pageCount: 4 });
  admit(state, 0, 300);
  admit(state, 1, 300);
  admit(state, 2, 100);
  const { computing, waiting, pagesFree } = statsPrefill(state);
  assert.deepEqual({ computing, waiting, pagesFree }, { computing: 1, waiting: 2, pagesFree: 1 });
  fromRouter(state, { type: 'cancel', key: keyOf(0), reason: 'client_lost' });
  assert.equal(statsPrefill(state).computing, 2);
});

test('a cancel in mid-step keeps the pages until the step returns', () => {
  const state = create();
  admit(state, 0, 300);
  nextPrefillBatch(state);
  const cancel = { type: 'cancel', key: keyOf(0), reason: 'client_lost' } as const;
  assert.deepEqual(fromRouter(state, cancel), ['ABORT:client_lost']);
  assert.equal(statsPrefill(state).pagesHeld, 3);
  assert.deepEqual(fromRouter(state, cancel), [], 'the end will answer');
  assert.deepEqual(stepDone(state, []), ['end:client_lost']);
  assert.equal(statsPrefill(state).pagesHeld, 0);
});

test('a cancel in mid-read keeps the pages until the read returns, whose bytes are not sent', () => {
  const state = create();
  admit(state, 0, 100);
  nextPrefillBatch(state);
  stepDone(state, [0]);
  fromRouter(state, { type: 'cancel', key: keyOf(0), reason: 'client_lost' });
  assert.equal(statsPrefill(state).unwinding, 1);
  const read: PrefillEvent = { type: 'read_done', key: keyOf(0), firstUnit: 0, checksums: [1, 2], nowMs: 1 };
  assert.deepEqual(step(state, read), ['discard', 'end:client_lost']);
});

test('ABORT is sent again until acknowledged, and outlives the room', () => {
  const state = create();
  fromRouter(state, submitOf(0, 100));
  fromRouter(state, { type: 'cancel', key: keyOf(0), reason: 'client_lost' });
  fromRouter(state, { type: 'end_ack', key: keyOf(0) });
  assert.equal(statsPrefill(state).rooms, 0);
  assert.deepEqual(step(state, { type: 'tick', nowMs: 200 }), ['ABORT:client_lost']);
  assert.deepEqual(step(state, { type: 'peer_up', peer: D, nowMs: 201 }), ['ABORT:client_lost']);
  fromPeer(state, 0, { type: 'ABORT_ACK' });
  assert.equal(statsPrefill(state).unackedToPeers, 0);
});

test('a closed key is answered and never comes back', () => {
  const state = create();
  fromPeer(state, 0, { type: 'ABORT', reason: 'gone' });
  assert.deepEqual(fromRouter(state, submitOf(0, 100)), ['end:peer_aborted']);
  assert.deepEqual(fromPeer(state, 0, openOf(100)), ['ABORT:peer_aborted']);
  assert.deepEqual(fromRouter(state, { type: 'cancel', key: keyOf(0), reason: 'deadline' }), ['end:peer_aborted']);
  assert.equal(statsPrefill(state).rooms, 0);
});

test('a cancel of a room that was never seen is answered, and closes it', () => {
  const state = create();
  assert.deepEqual(fromRouter(state, { type: 'cancel', key: keyOf(0), reason: 'deadline' }), ['end:unknown']);
  assert.deepEqual(fromRouter(state, submitOf(0, 100)), ['end:unknown']);
});

test('only below the router’s mark are tombstones forgotten, and keys stay closed', () => {
  const state = create();
  for (const sequence of [0, 1]) fromPeer(state, sequence, { type: 'ABORT', reason: 'gone' });
  fromRouter(state, { type: 'mark', smallestSequence: 1 });
  assert.equal(statsPrefill(state).tombstones, 1);
  assert.deepEqual(fromPeer(state, 0, openOf(100)), ['ABORT:gone']);
  assert.deepEqual(fromRouter(state, submitOf(0, 100)), []);
  assert.equal(statsPrefill(state).rooms, 0);
  // A mark never falls.
  fromRouter(state, { type: 'mark', smallestSequence: 0 });
  assert.deepEqual(fromPeer(state, 0, openOf(100)), ['ABORT:gone']);
});

test('admission counts everything that is not over, and refuses at once', () => {
  const state = create({ maxRooms: 2 });
  fromRouter(state, submitOf(0, 100));
  fromPeer(state, 1, openOf(100));
  assert.deepEqual(fromRouter(state, submitOf(2, 100)), ['end:overloaded']);
  assert.deepEqual(fromPeer(state, 3, openOf(100)), ['ABORT:overloaded']);
  assert.deepEqual(fromRouter(state, submitOf(1, 100)), ['accepted'], 'the room exists already');
  assert.deepEqual(fromRouter(state, submitOf(4, 3000)), ['end:overloaded']);
});

test('a prompt larger than the pool, an empty one and another digest are refused', () => {
  const state = create();
  assert.deepEqual(fromRouter(state, submitOf(0, 128 * 21)), ['end:overloaded']);
  assert.deepEqual(fromRouter(state, submitOf(1, 0)), ['end:protocol']);
  assert.deepEqual(fromRouter(state, submitOf(2, 100, { digest: 'other' })), ['end:mismatch']);
});

test('halves that disagree about the prompt end as a mismatch', () => {
  const state = create();
  fromRouter(state, submitOf(0, 100));
  assert.deepEqual(fromPeer(state, 0, { type: 'OPEN', digest: 'other', tokenCount: 100 }), [
    'ABORT:mismatch',
    'end:mismatch',
  ]);
});

test('a message of an earlier attempt changes nothing', () => {
  const state = create();
  admit(state, 0, 100);
  fromPeer(state, 0, { type: 'ABORT', reason: 'peer_lost' });
  const key = makeKey(makeRoomId(ROUTER, 0), 2);
  const message = { from: D.epoch, to: P.epoch, key };
  fromRouter(state, { ...submitOf(0, 100), key });
  for (const content of [openOf(100), reservedOf(100, 12)]) {
    step(state, { type: 'peer_message', peer: D, message: { ...message, ...content } as PeerMessage, nowMs: 1 });
  }
  assert.equal(state.live.get(key)?.sender.creditBytes, 12);
  assert.deepEqual(fromPeer(state, 0, { type: 'CREDIT', bytes: 20 }), []);
  assert.equal(state.live.get(key)?.sender.creditBytes, 12);
  assert.equal(statsPrefill(state).drops.late, 1);
});

test('messages of and for another life are dropped and counted', () => {
  const state = create();
  const newer = { name: 'd0', epoch: makeEpoch(2000, 2) };
  const open = { ...openOf(100), key: keyOf(0) };
  const cases: [typeof D, PeerMessage][] = [
    [D, { ...open, from: D.epoch, to: makeEpoch(1, 1) } as PeerMessage],
    [D, { ...open, from: newer.epoch, to: P.epoch } as PeerMessage],
    [newer, { ...open, from: newer.epoch, to: P.epoch } as PeerMessage],
  ];
  for (const [peer, message] of cases) {
    assert.deepEqual(step(state, { type: 'peer_message', peer, message, nowMs: 1 }), []);
  }
  assert.equal(statsPrefill(state).drops.staleEpoch, 3);
});

test('a newer life of the peer ends the rooms of the older one without an ABORT', () => {
  const state = create();
  admit(state, 0, 100);
  const newer = { name: 'd0', epoch: makeEpoch(2000, 2) };
  assert.deepEqual(step(state, { type: 'peer_up', peer: newer, nowMs: 1 }), ['end:peer_lost']);
  assert.equal(statsPrefill(state).unackedToPeers, 0);
  assert.deepEqual(fromRouter(state, submitOf(1, 100)), ['end:peer_lost']);
});

test('the death of the router ends its rooms, tells the peers, and closes its keys for ever', () => {
  const state = create();
  fromPeer(state, 0, openOf(100));
  fromRouter(state, submitOf(1, 100));
  assert.deepEqual(step(state, { type: 'router_lost', router: ROUTER, isDead: true, nowMs: 1 }), [
    'ABORT:peer_lost',
    'ABORT:peer_lost',
    'end:peer_lost',
  ]);
  const { rooms, tombstones, unackedToRouters } = statsPrefill(state);
  assert.deepEqual({ rooms, tombstones, unackedToRouters }, { rooms: 0, tombstones: 0, unackedToRouters: 0 });
  assert.deepEqual(fromPeer(state, 5, openOf(100)), ['ABORT:gone']);
  assert.deepEqual(fromRouter(state, submitOf(6, 100)), []);
});

test('a router that lost its link and comes back finds its old keys closed and may open new ones', () => {
  const state = create();
  fromRouter(state, submitOf(0, 100));
  assert.deepEqual(step(state, { type: 'router_lost', router: ROUTER, isDead: false, nowMs: 1 }), [
    'ABORT:peer_lost',
    'end:peer_lost',
  ]);
  assert.deepEqual(fromRouter(state, submitOf(1, 100)), [], 'nothing is created while it has no link');
  step(state, { type: 'router_up', router: ROUTER, nowMs: 2 });
  assert.deepEqual(fromRouter(state, submitOf(0, 100)), ['end:peer_lost'], 'answered from the tombstone');
  assert.deepEqual(fromRouter(state, submitOf(1, 100)), ['accepted']);
});

test('a drain refuses what is new and finishes what runs', () => {
  const state = create();
  fromRouter(state, submitOf(0, 100));
  step(state, { type: 'drain', nowMs: 1 });
  assert.deepEqual(fromRouter(state, submitOf(1, 100)), ['end:draining']);
  assert.deepEqual(fromPeer(state, 2, openOf(100)), ['ABORT:draining']);
  assert.deepEqual(fromPeer(state, 0, openOf(100)), ['QUEUED']);
  fromPeer(state, 0, reservedOf(100));
  assert.deepEqual(rangesOf(state), ['0:0-100!']);
});

test('a drain does not stop the clocks', () => {
  const state = create();
  fromRouter(state, submitOf(0, 100, { budgetMs: 900 }));
  step(state, { type: 'drain', nowMs: 1 });
  step(state, { type: 'tick', nowMs: 500 });
  const effects = step(state, { type: 'tick', nowMs: 902 });
  assert.ok(effects.includes('end:deadline'), effects.join());
  assert.equal(statsPrefill(state).rooms, 0);
});

test('a long pause of our own is forgiven once; the same time in small steps is not', () => {
  const paused = create();
  fromRouter(paused, submitOf(0, 100));
  step(paused, { type: 'tick', nowMs: 10 });
  step(paused, { type: 'tick', nowMs: 70_000 });
  assert.equal(statsPrefill(paused).rooms, 1);
  const ticking = create();
  fromRouter(ticking, submitOf(0, 100));
  for (let nowMs = 10; nowMs <= 70_000; nowMs += 500) step(ticking, { type: 'tick', nowMs });
  assert.equal(statsPrefill(ticking).rooms, 0);
});

test('the client’s budget ends a room that waits, though its room clock would not', () => {
  const state = create();
  fromRouter(state, submitOf(0, 100, { budgetMs: 5000 }));
  for (let nowMs = 500; nowMs < 5000; nowMs += 500) step(state, { type: 'tick', nowMs });
  assert.equal(statsPrefill(state).rooms, 1);
  const effects = step(state, { type: 'tick', nowMs: 5001 }); // it was submitted at 1
  assert.deepEqual(effects, ['ABORT:deadline', 'end:deadline']);
});

test('ABORT to a peer that has no link is given up after a lease', () => {
  const state = createPrefill(PREFILL_LIMITS, P);
  fromRouter(state, submitOf(0, 100));
  fromRouter(state, { type: 'cancel', key: keyOf(0), reason: 'client_lost' });
  step(state, { type: 'tick', nowMs: 9_000 });
  assert.equal(statsPrefill(state).unackedToPeers, 1);
  step(state, { type: 'tick', nowMs: 10_001 });
  assert.equal(statsPrefill(state).unackedToPeers, 0);
});

test('limits that contradict each other are named', () => {
  assert.throws(() => createPrefill({ ...PREFILL_LIMITS, prefillChunkTokens: 100 }, P), /multiple of pageTokens 128/);
});
