import assert from 'node:assert/strict';
import { test } from 'node:test';
import { createDecode, nextDecodeBatch, statsDecode, type DecodeState } from '../../../scheduler/decode.ts';
import { crc32c } from '../../../transfer/checksum.ts';
import type { PeerMessage } from '../../../transfer/messages.ts';
import { makeEpoch } from '../../../transfer/messages.ts';
import {
  chunk,
  create,
  endOf,
  fromPeer,
  fromRouter,
  makeReady,
  manifestOf,
  NONE,
  step,
  stepDone,
  waiting,
  type Content,
} from '../../support/decode-half.ts';
import { D, DECODE_LIMITS, keyOf, P, submitOf } from '../../support/halves.ts';

test('a room goes from submit to the last token', () => {
  const state = create();
  const submit = submitOf(0, 200);
  assert.deepEqual(fromRouter(state, submit), ['accepted', 'connect', 'OPEN']);
  assert.equal(statsDecode(state).pagesFree, 20, 'nothing is lent before OPEN is answered');
  assert.deepEqual(fromPeer(state, 0, waiting), ['RESERVED']);
  // 200 tokens and an answer of 4, whose last token is never run: 203 positions, two pages.
  assert.equal(statsDecode(state).pagesPrealloc, 2);
  assert.deepEqual(chunk(state, 0, 0, 1), ['write:0']);
  assert.deepEqual(step(state, { type: 'written', key: keyOf(0), unit: 0, nowMs: 1 }), ['CREDIT']);
  assert.deepEqual(chunk(state, 0, 1, 3), ['write:1', 'write:2']);
  step(state, { type: 'written', key: keyOf(0), unit: 2, nowMs: 1 });
  assert.deepEqual(fromPeer(state, 0, endOf(2, submit, 50)), []);
  assert.deepEqual(step(state, { type: 'written', key: keyOf(0), unit: 1, nowMs: 1 }), ['DONE', 'token0:50']);
  for (const [index, token] of [60, 61, 62].entries()) {
    const [row] = nextDecodeBatch(state)?.rows ?? [];
    assert.equal(row?.position, 200 + index);
    assert.equal(row?.token, index === 0 ? 50 : 59 + index);
    assert.equal(nextDecodeBatch(state), null, 'one step at a time');
    const effects = stepDone(state, token);
    assert.deepEqual(effects, [`token${index + 1}:${token}`, ...(index === 2 ? ['end:length'] : [])]);
  }
  const { rooms, pagesFree, slotsFree, creditBytes, unackedToPeers } = statsDecode(state);
  assert.deepEqual(
    { rooms, pagesFree, slotsFree, creditBytes },
    { rooms: 0, pagesFree: 20, slotsFree: 8, creditBytes: 0 },
  );
  assert.equal(unackedToPeers, 1, 'DONE is still unanswered');
});

test('an answer of one token, and a stop token first of all, end right after ready', () => {
  assert.deepEqual(makeReady(create(), 0, 10, { maxTokens: 1 }), ['DONE', 'token0:50', 'end:length']);
  assert.deepEqual(makeReady(create(), 0, 10, { stopTokens: [9, 50] }), ['DONE', 'token0:50', 'end:stop']);
});

test('a stop token ends the answer and is delivered', () => {
  const state = create();
  makeReady(state, 0, 10, { stopTokens: [9], maxTokens: 100 });
  nextDecodeBatch(state);
  assert.deepEqual(stepDone(state, 9), ['token1:9', 'end:stop']);
});

test('a row has a draft where the token behind it is wanted and its page is there', () => {
  const state = create({ drafts: true });
  const draftedAt = (): [number, boolean] => {
    const [row] = nextDecodeBatch(state)?.rows ?? [];
    assert.ok(row, 'the batch has no row');
    return [row.position, row.drafted];
  };
  const done = (...tokens: number[]): string[] =>
    step(state, { type: 'step_done', tokens: tokens.map((token) => ({ key: keyOf(0), token })), nowMs: 1 });
  // One page holds the prompt and headroom of 1; the first row takes its last place.
  state.headroomTokens = 1;
  makeReady(state, 0, 127, { maxTokens: 5 });
  assert.deepEqual(draftedAt(), [127, false]);
  assert.deepEqual(done(60), ['token1:60']);
  assert.deepEqual(draftedAt(), [128, true]);
  assert.deepEqual(done(61, 62), ['token2:61,62']);
  assert.deepEqual(draftedAt(), [130, false], 'the last token has none behind it');
  assert.deepEqual(done(63), ['token4:63', 'end:length']);
  assert.equal(statsDecode(state).generatedTokens, 5);

  makeReady(state, 1, 10, { maxTokens: 2 });
  assert.equal(nextDecodeBatch(state)?.rows[0]?.drafted, false);
  const plain = create();
  makeReady(plain, 0, 10, { maxTokens: 9 });
  assert.equal(nextDecodeBatch(plain)?.rows[0]?.drafted, false, 'without drafts nobody has one');
});

test('what a right draft brings behind the end of an answer is dropped', () => {
  for (const [changes, expected] of [
    [{ stopTokens: [60], maxTokens: 100 }, ['token1:60', 'end:stop']],
    [{ stopTokens: [61], maxTokens: 100 }, ['token1:60,61', 'end:stop']],
    [{ stopTokens: [61], maxTokens: 2 }, ['token1:60', 'end:length']],
  ] as const) {
    const state = create({ drafts: true });
    makeReady(state, 0, 10, { ...changes, stopTokens: [...changes.stopTokens] });
    nextDecodeBatch(state);
    const tokens = [60, 61].map((token) => ({ key: keyOf(0), token }));
    assert.deepEqual(step(state, { type: 'step_done', tokens, nowMs: 1 }), expected);
  }
  const state = create({ drafts: true });
  makeReady(state, 0, 10, { maxTokens: 9 });
  nextDecodeBatch(state);
  assert.throws(() => step(state, { type: 'step_done', tokens: [], nowMs: 1 }), /no token for/);
});

test('rows join and leave between steps, at most maxRunning at a time, in order of arrival', () => {
  const state = create({ maxRunning: 2 });
  makeReady(state, 0, 10, { maxTokens: 2 });
  makeReady(state, 1, 10, { maxTokens: 3 });
  makeReady(state, 2, 10);
  const keys = (): string[] => (nextDecodeBatch(state)?.rows ?? []).map((row) => row.key);
  assert.deepEqual(keys(), [keyOf(0), keyOf(1)]);
  assert.equal(statsDecode(state).waiting, 1);
  // The tokens of a step travel in one message, ahead of the ends.
  assert.deepEqual(stepDone(state, 60), ['token1:60 token1:60', 'end:length']);
  assert.deepEqual(keys(), [keyOf(1), keyOf(2)]);
});

test('a cancel in mid-step keeps the pages until the step returns, and sends no token', () => {
  const state = create();
  makeReady(state, 0, 10);
  nextDecodeBatch(state);
  assert.deepEqual(fromRouter(state, { type: 'cancel', key: keyOf(0), reason: 'client_lost' }), []);
  assert.equal(statsDecode(state).unwinding, 1);
  assert.equal(statsDecode(state).pagesFree, 19);
  assert.deepEqual(stepDone(state, 60), ['end:client_lost']);
  assert.equal(statsDecode(state).pagesFree, 20);
});

test('a cancel between steps ends a running row at once', () => {
  const state = create();
  makeReady(state, 0, 10);
  nextDecodeBatch(state);
  stepDone(state, 60);
  assert.deepEqual(fromRouter(state, { type: 'cancel', key: keyOf(0), reason: 'client_lost' }), ['end:client_lost']);
  assert.equal(nextDecodeBatch(state), null);
});

test('a cancel in mid-write keeps the pages until the write is done (api-bugs 83)', () => {
  const state = create();
  fromRouter(state, submitOf(0, 10));
  fromPeer(state, 0, waiting);
  chunk(state, 0, 0, 1);
  assert.deepEqual(fromRouter(state, { type: 'cancel', key: keyOf(0), reason: 'client_lost' }), ['ABORT:client_lost']);
  assert.equal(statsDecode(state).pagesFree, 19);
  assert.deepEqual(step(state, { type: 'written', key: keyOf(0), unit: 0, nowMs: 1 }), ['end:client_lost']);
  assert.equal(statsDecode(state).pagesFree, 20);
});

test('after ready no failure of the prefill half ends a room', () => {
  const state = create();
  makeReady(state, 0, 10);
  assert.deepEqual(fromPeer(state, 0, { type: 'ABORT', reason: 'deadline' }), ['ABORT_ACK']);
  assert.deepEqual(fromRouter(state, { type: 'peer_failed', key: keyOf(0) }), []);
  assert.deepEqual(step(state, { type: 'peer_lost', peer: P, nowMs: 1 }), []);
  assert.equal(statsDecode(state).unackedToPeers, 0, 'a dead peer is owed nothing');
  nextDecodeBatch(state);
  assert.deepEqual(stepDone(state, 60), ['token1:60']);
});

test('before ready each of them does', () => {
  const causes: [(state: DecodeState) => string[], string[]][] = [
    [(state) => fromPeer(state, 0, { type: 'ABORT', reason: 'deadline' }), ['ABORT_ACK', 'end:peer_aborted']],
    [(state) => fromRouter(state, { type: 'peer_failed', key: keyOf(0) }), ['ABORT:peer_lost', 'end:peer_lost']],
    [(state) => step(state, { type: 'peer_lost', peer: P, nowMs: 1 }), ['end:peer_lost']],
    [
      (state) => step(state, { type: 'peer_up', peer: { ...P, epoch: makeEpoch(2000, 1) }, nowMs: 1 }),
      ['end:peer_lost'],
    ],
  ];
  for (const [cause, expected] of causes) {
    const state = create();
    fromRouter(state, submitOf(0, 10));
    fromPeer(state, 0, waiting);
    assert.deepEqual(cause(state), expected);
    assert.equal(statsDecode(state).pagesFree, 20);
  }
});

test('DONE is sent again after the sequence has ended, until acknowledged; END is answered by it', () => {
  const state = create();
  makeReady(state, 0, 10, { maxTokens: 1 });
  fromRouter(state, { type: 'end_ack', key: keyOf(0) });
  assert.deepEqual(step(state, { type: 'tick', nowMs: 200 }), ['DONE']);
  assert.deepEqual(fromPeer(state, 0, endOf(1, submitOf(0, 10), 50)), ['DONE']);
  fromPeer(state, 0, { type: 'DONE_ACK' });
  assert.deepEqual(step(state, { type: 'tick', nowMs: 9000 }), []);
});

test('a room’s unspent credit waits for the peer’s acknowledgement', () => {
  const state = create({ peerBufferBytes: 20, roomWindowBytes: 20 });
  fromRouter(state, submitOf(0, 10));
  fromPeer(state, 0, waiting);
  fromRouter(state, submitOf(1, 10));
  assert.deepEqual(fromPeer(state, 1, waiting), [], 'the buffer is lent out');
  fromRouter(state, { type: 'cancel', key: keyOf(0), reason: 'client_lost' });
  assert.equal(statsDecode(state).creditBytes, 12);
  assert.equal(statsDecode(state).prealloc, 1);
  assert.deepEqual(fromPeer(state, 0, { type: 'ABORT_ACK' }), ['RESERVED']);
  assert.equal(statsDecode(state).creditBytes, 12);
});

test('the loss of the peer returns its whole buffer', () => {
  const state = create({ peerBufferBytes: 20, roomWindowBytes: 20 });
  fromRouter(state, submitOf(0, 10));
  fromPeer(state, 0, waiting);
  fromRouter(state, { type: 'cancel', key: keyOf(0), reason: 'client_lost' });
  step(state, { type: 'peer_lost', peer: P, nowMs: 1 });
  assert.equal(statsDecode(state).creditBytes, 0);
});

test('a new life of a peer gets the buffer when what the old one has sent is written', () => {
  const state = create({ peerBufferBytes: 20, roomWindowBytes: 20 });
  fromRouter(state, submitOf(0, 10));
  fromPeer(state, 0, waiting);
  assert.deepEqual(chunk(state, 0, 0, 1), ['write:0']);
  step(state, { type: 'peer_lost', peer: P, nowMs: 1 });
  const later = { name: P.name, epoch: makeEpoch(2000, 8) };
  step(state, { type: 'peer_up', peer: later, nowMs: 1 });
  fromRouter(state, submitOf(1, 10, { prefill: { ...later, address: '' } }));
  const message = { from: later.epoch, to: D.epoch, key: keyOf(1), ...waiting } as PeerMessage;
  assert.deepEqual(step(state, { type: 'peer_message', peer: later, message, payload: NONE, nowMs: 1 }), []);
  const written = step(state, { type: 'written', key: keyOf(0), unit: 0, nowMs: 1 });
  assert.deepEqual(written, ['end:peer_lost', 'RESERVED']);
});

test('a peer with a full buffer holds up only its own rooms', () => {
  const state = create({ peerBufferBytes: 20, roomWindowBytes: 20 });
  const other = { name: 'p1', epoch: makeEpoch(1000, 8) };
  step(state, { type: 'peer_up', peer: other, nowMs: 0 });
  for (const sequence of [0, 1]) {
    fromRouter(state, submitOf(sequence, 10));
    fromPeer(state, sequence, waiting);
  }
  fromRouter(state, submitOf(2, 10, { prefill: { ...other, address: '' } }));
  const message = { from: other.epoch, to: D.epoch, key: keyOf(2), ...waiting } as PeerMessage;
  assert.deepEqual(step(state, { type: 'peer_message', peer: other, message, payload: NONE, nowMs: 1 }), ['RESERVED']);
});

test('rooms wait for pages in order, and a request larger than the pool is refused', () => {
  const state = create({ pageCount: 3 });
  assert.deepEqual(fromRouter(state, submitOf(9, 128 * 3, { maxTokens: 2 })), ['end:overloaded']);
  fromRouter(state, submitOf(0, 128 * 2, { maxTokens: 2 }));
  assert.deepEqual(fromPeer(state, 0, waiting), ['RESERVED']);
  for (const sequence of [1, 2]) {
    fromRouter(state, submitOf(sequence, 10));
    assert.deepEqual(fromPeer(state, sequence, waiting), []);
  }
  const effects = fromRouter(state, { type: 'cancel', key: keyOf(0), reason: 'client_lost' });
  assert.deepEqual(effects, ['ABORT:client_lost', 'end:client_lost', 'RESERVED', 'RESERVED']);
});

test('admission counts everything that is not over, and refuses at once', () => {
  const state = create({ maxRooms: 1 });
  fromRouter(state, submitOf(0, 10));
  assert.deepEqual(fromRouter(state, submitOf(1, 10)), ['end:overloaded']);
  assert.deepEqual(fromRouter(state, submitOf(1, 10)), ['end:overloaded'], 'the same answer again');
  assert.deepEqual(fromRouter(state, submitOf(0, 10)), ['accepted']);
  assert.equal(statsDecode(state).rooms, 1);
});

test('the client’s budget ends a running room, and the stall clock a transfer', () => {
  const running = create();
  makeReady(running, 0, 10, { budgetMs: 900 });
  step(running, { type: 'tick', nowMs: 500 });
  fromPeer(running, 0, { type: 'DONE_ACK' });
  assert.deepEqual(step(running, { type: 'tick', nowMs: 901 }), ['end:deadline']);

  const stalled = create();
  fromRouter(stalled, submitOf(0, 10));
  fromPeer(stalled, 0, waiting);
  chunk(stalled, 0, 0, 1);
  step(stalled, { type: 'written', key: keyOf(0), unit: 0, nowMs: 1 });
  const seen: string[] = [];
  for (let nowMs = 500; nowMs <= 15_500; nowMs += 500) seen.push(...step(stalled, { type: 'tick', nowMs }));
  assert.ok(seen.includes('end:deadline'), seen.join(', '));
});

test('one flipped byte ends its room with that reason, and no other', () => {
  const state = create();
  for (const sequence of [0, 1]) {
    fromRouter(state, submitOf(sequence, 10));
    fromPeer(state, sequence, waiting);
  }
  const content: Content = {
    type: 'CHUNK',
    sequence: 0,
    firstUnit: 0,
    generations: [manifestOf(state, 0).generations[0] as number],
    checksums: [crc32c(new Uint8Array(8))],
    payloadBytes: 8,
  };
  const payload = Uint8Array.of(0, 0, 0, 1, 0, 0, 0, 0);
  assert.deepEqual(fromPeer(state, 0, content, payload), ['ABORT:bad_checksum', 'end:bad_checksum']);
  assert.deepEqual(chunk(state, 1, 0, 1), ['write:0']);
  assert.equal(statsDecode(state).drops.badChecksum, 1);
});

test('a chunk of a closed room is late, of an unheard-of one unknown, of a ready one late', () => {
  const state = create();
  const stray: Content = {
    type: 'CHUNK',
    sequence: 0,
    firstUnit: 0,
    generations: [1],
    checksums: [0],
    payloadBytes: 8,
  };
  fromRouter(state, submitOf(0, 10));
  fromRouter(state, { type: 'cancel', key: keyOf(0), reason: 'client_lost' });
  assert.deepEqual(fromPeer(state, 0, stray, new Uint8Array(8)), []);
  assert.deepEqual(fromPeer(state, 7, stray, new Uint8Array(8)), []);
  makeReady(state, 1, 10);
  assert.deepEqual(fromPeer(state, 1, stray, new Uint8Array(8)), []);
  const { late, unknown } = statsDecode(state).drops;
  assert.deepEqual({ late, unknown }, { late: 2, unknown: 1 });
});

test('states are plain data: a clone steps to the same effects', () => {
  const state = create();
  makeReady(state, 0, 10);
  const clone = structuredClone(state);
  assert.deepEqual(nextDecodeBatch(clone), nextDecodeBatch(state));
  assert.deepEqual(stepDone(clone, 60), stepDone(state, 60));
  assert.deepEqual(clone, state);
});

test('limits that contradict each other are named', () => {
  assert.throws(
    () => createDecode({ ...DECODE_LIMITS, peerBufferBytes: 11 }, D),
    /must hold the largest unit, 12 bytes/,
  );
});
