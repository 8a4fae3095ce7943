/** Decode sequences that grow page by page, and what happens when the pages run out. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import {
  auditDecode,
  isStepReady,
  nextDecodeBatch,
  statsDecode,
  stepDecode,
  type DecodeEvent,
  type DecodeState,
  type Sequence,
} from '../../../scheduler/decode.ts';
import { QUARANTINED } from '../../../transfer/ledger.ts';
import type { DecodeLimits } from '../../../scheduler/types.ts';
import {
  chunk,
  create,
  endOf,
  fromPeer,
  fromRouter,
  makeReady,
  run,
  step,
  stepDone,
  waiting,
} from '../../support/decode-half.ts';
import { keyOf, P, ROUTER, shorten, submitOf } from '../../support/halves.ts';

/** A prompt that leaves one position of its only page, and an answer that needs all three pages of the pool. */
const PROMPT = 127;
const LONG = { maxTokens: 200 };
const TIGHT: Partial<DecodeLimits> = { pageCount: 3, headroomTokens: 1 };
/** A page and the slot. */
const COPY_BYTES = 8 + 12;

function sequenceOf(state: DecodeState, sequence: number): Sequence | null | undefined {
  return state.live.get(keyOf(sequence))?.sequence;
}

function phaseOf(state: DecodeState, sequence: number): string | undefined {
  return sequenceOf(state, sequence)?.phase;
}

/** Run one step over all rows that can; every one samples `token`. */
function stepOnce(state: DecodeState, token = 60): string[] {
  nextDecodeBatch(state);
  return stepDone(state, token);
}

function moved(state: DecodeState, type: 'saved' | 'restored', sequence: number): string[] {
  return step(state, { type, key: keyOf(sequence), nowMs: 1 });
}

function cancel(state: DecodeState, sequence: number): string[] {
  return fromRouter(state, { type: 'cancel', key: keyOf(sequence), reason: 'client_lost' });
}

/** Rooms 0 and 1 have filled their pages; one page is free, so 0 got it and 1 is being saved. */
function createSaving(changes: Partial<DecodeLimits> = {}): DecodeState {
  const state = create({ ...TIGHT, ...changes });
  makeReady(state, 0, PROMPT, LONG);
  makeReady(state, 1, PROMPT, LONG);
  assert.deepEqual(stepOnce(state), ['token1:60 token1:60', 'save:2']);
  return state;
}

function createRetracted(): DecodeState {
  const state = createSaving();
  moved(state, 'saved', 1);
  return state;
}

/** Room 0 has left, and room 1 comes back. */
function createRestoring(): DecodeState {
  const state = createRetracted();
  assert.deepEqual(cancel(state, 0), ['end:client_lost', 'restore:2']);
  return state;
}

test('a reservation is for the prompt and the headroom, but never for more than the longest answer', () => {
  const reserved = (headroomTokens: number, count: number, maxTokens: number): number => {
    const state = create({ headroomTokens });
    fromRouter(state, submitOf(0, count, { maxTokens }));
    fromPeer(state, 0, waiting);
    return statsDecode(state).pagesPrealloc;
  };
  assert.equal(reserved(1, 127, 500), 1);
  assert.equal(reserved(1, 128, 500), 2, 'the first step needs position 128');
  assert.equal(reserved(1, 128, 1), 1, 'no step at all');
  assert.equal(reserved(128, 128, 500), 2);
  assert.equal(reserved(129, 128, 500), 3);
  assert.equal(reserved(4000, 128, 129), 2);
});

test('a sequence grows page by page', () => {
  const state = create({ headroomTokens: 1 });
  makeReady(state, 0, PROMPT, LONG);
  const held = (): number => statsDecode(state).pagesRunning;
  assert.equal(held(), 1);
  stepOnce(state);
  assert.equal(held(), 2);
  for (let index = 0; index < 127; index++) stepOnce(state);
  assert.equal(held(), 2);
  stepOnce(state);
  assert.equal(held(), 3);
});

test('the newest gives way, waits, and goes on where it was with other pages', () => {
  const state = createSaving();
  assert.deepEqual(
    nextDecodeBatch(state)?.rows.map((row) => row.key),
    [keyOf(0)],
  );
  assert.equal(statsDecode(state).pagesFree, 0, 'pages are lent until the copy is complete');
  assert.equal(statsDecode(state).hostBytes, COPY_BYTES);
  assert.deepEqual(moved(state, 'saved', 1), []);
  const { pagesFree, slotsHeld, retracted, retractions } = statsDecode(state);
  assert.deepEqual(
    { pagesFree, slotsHeld, retracted, retractions },
    { pagesFree: 1, slotsHeld: 1, retracted: 1, retractions: 1 },
  );
  // Room 0 runs up to its last token; only then are there pages enough.
  assert.deepEqual(stepDone(state, 60), ['token2:60']);
  for (let index = 3; index < 199; index++) assert.deepEqual(stepOnce(state), [`token${index}:60`]);
  assert.deepEqual(stepOnce(state), ['token199:60', 'end:length', 'restore:2']);
  assert.equal(isStepReady(state), false, 'nothing runs before the copy is back');
  assert.deepEqual(moved(state, 'restored', 1), ['forget']);
  assert.equal(statsDecode(state).hostBytes, 0);
  const [row] = nextDecodeBatch(state)?.rows ?? [];
  assert.equal(row?.position, PROMPT + 1);
  assert.equal(row?.token, 60);
  assert.equal(row?.pages.length, 2);
  assert.deepEqual(stepDone(state, 61), ['token2:61']);
});

test('the units of a copy are the pages that were written, then the slot, and go back in that order', () => {
  const state = create({ ...TIGHT, headroomTokens: 128, pageCount: 4 });
  makeReady(state, 0, PROMPT, LONG);
  makeReady(state, 1, PROMPT, LONG);
  const lease = state.live.get(keyOf(1))?.lease;
  assert.equal(lease?.pages.length, 2, 'one of them is headroom');
  for (let index = 0; index < 128; index++) stepOnce(state);
  nextDecodeBatch(state);
  const tokens = (state.step ?? []).map((key) => ({ key, token: 60 }));
  const effects = stepDecode(state, { type: 'step_done', tokens, nowMs: 1 });
  const save = effects.find((effect) => effect.type === 'save');
  assert.deepEqual(save?.places, [
    { kind: 'page', page: lease?.pages[0] },
    { kind: 'page', page: lease?.pages[1] },
    { kind: 'slot', slot: lease?.slot },
  ]);
  moved(state, 'saved', 1);
  const [, restore] = stepDecode(state, {
    type: 'router_message',
    router: ROUTER,
    message: { type: 'cancel', key: keyOf(0), reason: 'client_lost' },
    nowMs: 1,
  });
  const now = state.live.get(keyOf(1))?.lease;
  assert.deepEqual(restore, {
    type: 'restore',
    key: keyOf(1),
    places: [
      { kind: 'page', page: now?.pages[0] },
      { kind: 'page', page: now?.pages[1] },
      { kind: 'slot', slot: now?.slot },
    ],
  });
});

test('a page with a single position is copied, a page of headroom is not', () => {
  const saved = (maxRunning: number): string[] => {
    const state = create({ ...TIGHT, maxRunning });
    makeReady(state, 0, PROMPT, LONG);
    makeReady(state, 1, 128, LONG);
    assert.equal(state.live.get(keyOf(1))?.lease?.pages.length, 2);
    return stepOnce(state).slice(1);
  };
  assert.deepEqual(saved(2), ['save:3'], 'position 128 was run');
  assert.deepEqual(saved(1), ['save:2'], 'it waited for a row');
});

test('a row without a page sits the step out, and the others run on', () => {
  const state = create({ pageCount: 4, headroomTokens: 1 });
  // Room 1 ends one page later than rooms 0 and 2.
  makeReady(state, 0, PROMPT, LONG);
  makeReady(state, 1, 100, LONG);
  makeReady(state, 2, 100, LONG);
  fromRouter(state, submitOf(3, 10));
  assert.deepEqual(fromPeer(state, 3, waiting), ['RESERVED']);
  // The pool is full: room 2 is the newest sequence, room 3 still a transfer.
  assert.deepEqual(stepOnce(state), ['token1:60 token1:60 token1:60', 'save:2']);
  assert.deepEqual(
    nextDecodeBatch(state)?.rows.map((row) => row.key),
    [keyOf(1)],
  );
  assert.deepEqual(moved(state, 'saved', 2), []);
  stepDone(state, 60);
  assert.deepEqual(
    nextDecodeBatch(state)?.rows.map((row) => row.key),
    [keyOf(0), keyOf(1)],
  );
});

test('the oldest waits for a transfer rather than going itself', () => {
  const state = create({ pageCount: 3, headroomTokens: 1 });
  makeReady(state, 0, PROMPT, LONG);
  const other = submitOf(1, 200, { maxTokens: 4 });
  fromRouter(state, other);
  assert.deepEqual(fromPeer(state, 1, waiting), ['RESERVED']);
  assert.deepEqual(stepOnce(state), ['token1:60']);
  assert.equal(isStepReady(state), false);
  assert.equal(nextDecodeBatch(state), null);
  for (let unit = 0; unit <= 2; unit++) {
    chunk(state, 1, unit, unit + 1);
    step(state, { type: 'written', key: keyOf(1), unit, nowMs: 1 });
  }
  // Now it is a sequence, and the newest.
  assert.deepEqual(fromPeer(state, 1, endOf(2, other, 50)), ['DONE', 'token0:50', 'save:3']);
  moved(state, 'saved', 1);
  assert.deepEqual(stepOnce(state), ['token2:60']);
});

test('nothing new is reserved while a sequence is retracted, and the oldest comes back first', () => {
  const state = create({ pageCount: 6, headroomTokens: 1 });
  for (const sequence of [0, 1, 2, 3]) makeReady(state, sequence, PROMPT, LONG);
  assert.deepEqual(stepOnce(state).slice(1), ['save:2']);
  moved(state, 'saved', 3);
  // Rooms 0 and 1 took the free pages, room 2 that of room 3.
  assert.equal(statsDecode(state).pagesFree, 0);
  for (let index = 0; index < 127; index++) stepOnce(state);
  assert.deepEqual(stepOnce(state).slice(1), ['save:3']);
  moved(state, 'saved', 2);
  fromRouter(state, submitOf(4, 10));
  assert.deepEqual(fromPeer(state, 4, waiting), []);
  assert.deepEqual(cancel(state, 0), ['end:client_lost', 'restore:3']);
  assert.equal(phaseOf(state, 2), 'restoring');
  assert.equal(phaseOf(state, 3), 'retracted');
  moved(state, 'restored', 2);
  assert.deepEqual(cancel(state, 1), ['end:client_lost', 'restore:2', 'RESERVED']);
});

test('a page that is free is for who was retracted, also while it is not enough', () => {
  const state = createRetracted();
  fromRouter(state, submitOf(2, 10));
  assert.deepEqual(fromPeer(state, 2, waiting), []);
  assert.equal(statsDecode(state).pagesFree, 1);
});

test('nobody comes back as long as that would leave no page for the others to grow', () => {
  const state = create({ pageCount: 4, headroomTokens: 1 });
  for (const sequence of [0, 1, 2]) makeReady(state, sequence, PROMPT, LONG);
  assert.deepEqual(stepOnce(state).slice(1), ['save:2']);
  moved(state, 'saved', 2);
  assert.deepEqual(cancel(state, 1), ['end:client_lost'], 'two pages are free, and room 0 may need one of them');
  assert.deepEqual(cancel(state, 0), ['end:client_lost', 'restore:2']);
});

test('a row of the step under way is not retracted before the step is over', () => {
  const state = create({ pageCount: 4, headroomTokens: 1, strictLedger: false });
  for (const [sequence, count] of [100, PROMPT, 100, 100].entries()) makeReady(state, sequence, count, LONG);
  assert.deepEqual(stepOnce(state).slice(1), ['save:2']);
  assert.equal(nextDecodeBatch(state)?.rows.length, 2, 'room 1 waits for the page of room 3');
  const page = state.live.get(keyOf(3))?.lease?.pages[0] as number;
  state.pools.pages.owners[page] = QUARANTINED; // and that page will never come
  assert.deepEqual(moved(state, 'saved', 3), ['violation', 'forget', 'end:internal']);
  assert.deepEqual(stepDone(state, 60), ['token2:60 token2:60', 'save:2']);
  assert.equal(phaseOf(state, 2), 'saving');
});

test('with host memory full the newest ends with that reason, and nobody else does', () => {
  const state = create({ ...TIGHT, hostBytes: COPY_BYTES - 1 });
  makeReady(state, 0, PROMPT, LONG);
  makeReady(state, 1, PROMPT, LONG);
  assert.deepEqual(stepOnce(state), ['token1:60 token1:60', 'end:out_of_memory']);
  assert.equal(statsDecode(state).retractions, 0);
  assert.deepEqual(stepOnce(state), ['token2:60']);
});

test('a retracted sequence keeps its turn: it goes on before those that became ready later', () => {
  const state = create({ pageCount: 8, headroomTokens: 1, maxRunning: 1 });
  makeReady(state, 0, PROMPT, LONG);
  makeReady(state, 1, 10, LONG);
  makeReady(state, 2, 10, LONG);
  nextDecodeBatch(state);
  assert.deepEqual(state.waiting, [keyOf(1), keyOf(2)]);
  // As if room 1 had been away: what comes back is put before the newer one.
  const lease = state.live.get(keyOf(1))?.lease;
  const sequence = sequenceOf(state, 1) as Sequence;
  assert.ok(lease, 'room 1 holds no lease');
  state.waiting.shift();
  sequence.phase = 'restoring';
  sequence.moving = 'restore';
  sequence.hostBytes = COPY_BYTES;
  state.host.byOwner.set(keyOf(1), COPY_BYTES);
  state.host.heldBytes = COPY_BYTES;
  assert.deepEqual(auditDecode(state), []);
  moved(state, 'restored', 1);
  assert.deepEqual(state.waiting, [keyOf(1), keyOf(2)]);
});

test('what can never fit is refused at submit; what quarantine leaves no page for ends with a reason', () => {
  const state = create({ ...TIGHT, strictLedger: false });
  assert.deepEqual(fromRouter(state, submitOf(9, PROMPT, { maxTokens: 300 })), ['end:overloaded']);
  makeReady(state, 0, PROMPT, LONG);
  for (const page of state.pools.pages.free.splice(0)) state.pools.pages.owners[page] = QUARANTINED;
  assert.deepEqual(stepOnce(state), ['token1:60', 'end:out_of_memory']);

  const retracted = createRetracted();
  const [page] = retracted.pools.pages.free.splice(0, 1);
  retracted.pools.pages.owners[page as number] = QUARANTINED;
  const [other] = retracted.live.get(keyOf(0))?.lease?.pages.splice(1, 1) ?? [];
  retracted.pools.pages.owners[other as number] = QUARANTINED;
  assert.deepEqual(cancel(retracted, 0), ['end:client_lost', 'forget', 'end:out_of_memory']);
});

test('a page that somebody else had a hand on is the end of the sequence that was copied from it', () => {
  const state = createSaving({ strictLedger: false });
  const page = state.live.get(keyOf(1))?.lease?.pages[0] as number;
  state.pools.pages.owners[page] = 'somebody else';
  const effects = stepDecode(state, { type: 'saved', key: keyOf(1), nowMs: 1 });
  assert.deepEqual(
    effects.map((effect) => effect.type),
    ['violation', 'forget', 'report'],
  );
  assert.deepEqual(auditDecode(state), []);
  assert.equal(statsDecode(state).pagesQuarantined, 1);
});

test('headroom doubles with each retraction and goes back with answers that end in peace', () => {
  const state = createSaving();
  assert.equal(state.headroomTokens, 2);
  moved(state, 'saved', 1);
  makeEnd(state, 0);
  assert.equal(state.headroomTokens, 2, 'not while a sequence is retracted');
  moved(state, 'restored', 1);
  makeEnd(state, 1);
  assert.equal(state.headroomTokens, 1);

  state.headroomTokens = 512;
  makeReady(state, 2, 10, { maxTokens: 1 });
  assert.equal(state.headroomTokens, 448);
  fromRouter(state, submitOf(3, 10, { maxTokens: 300 }));
  fromPeer(state, 3, waiting);
  assert.equal(statsDecode(state).pagesPrealloc, 3, 'a reservation uses it');
});

/** Step until a room has all its tokens. */
function makeEnd(state: DecodeState, sequence: number): void {
  while (state.live.has(keyOf(sequence))) stepOnce(state);
}

// ---------------------------------------------------------------------------------------------
// Every phase of a sequence, and everything that can end it

/** By phase: how room 1 gets there, and what its end looks like. A busy one ends when `finish` has come. */
const PHASES: Record<
  string,
  { create: () => DecodeState; ends: string[]; finish?: { event: DecodeEvent; ends: string[] } }
> = {
  waiting: {
    create() {
      const state = create({ pageCount: 3, maxRunning: 1 });
      makeReady(state, 0, 10, { maxTokens: 100 });
      makeReady(state, 1, 10, { maxTokens: 100 });
      nextDecodeBatch(state);
      return state;
    },
    ends: ['end:REASON'],
  },
  running: {
    create() {
      const state = create({ pageCount: 3 });
      makeReady(state, 1, 10, { maxTokens: 100 });
      stepOnce(state);
      return state;
    },
    ends: ['end:REASON'],
  },
  'running, in a step': {
    create() {
      const state = create({ pageCount: 3 });
      makeReady(state, 1, 10, { maxTokens: 100 });
      nextDecodeBatch(state);
      return state;
    },
    ends: [],
    finish: {
      event: { type: 'step_done', tokens: [{ key: keyOf(1), token: 60 }], nowMs: 2 },
      ends: ['end:REASON'],
    },
  },
  'running, without a page': {
    create() {
      const state = create({ pageCount: 3, headroomTokens: 1 });
      makeReady(state, 1, PROMPT, LONG);
      fromRouter(state, submitOf(2, 200));
      fromPeer(state, 2, waiting);
      stepOnce(state);
      assert.equal(isStepReady(state), false);
      return state;
    },
    ends: ['end:REASON'],
  },
  saving: {
    create: createSaving,
    ends: [],
    finish: { event: { type: 'saved', key: keyOf(1), nowMs: 2 }, ends: ['forget', 'end:REASON'] },
  },
  retracted: { create: createRetracted, ends: ['forget', 'end:REASON'] },
  restoring: {
    create: createRestoring,
    ends: [],
    finish: { event: { type: 'restored', key: keyOf(1), nowMs: 2 }, ends: ['forget', 'end:REASON'] },
  },
};

/** Everything that ends a sequence. */
const CAUSES: Record<string, { event: DecodeEvent; reason: string }> = {
  cancel: {
    event: {
      type: 'router_message',
      router: ROUTER,
      message: { type: 'cancel', key: keyOf(1), reason: 'client_lost' },
      nowMs: 1,
    },
    reason: 'client_lost',
  },
  mark: {
    event: { type: 'router_message', router: ROUTER, message: { type: 'mark', smallestSequence: 2 }, nowMs: 1 },
    reason: 'gone',
  },
  deadline: { event: { type: 'tick', nowMs: 1_000_000 }, reason: 'deadline' },
  'a lost router': { event: { type: 'router_lost', router: ROUTER, isDead: true, nowMs: 1 }, reason: 'peer_lost' },
};

/** And what does not: past ready, the prefill half no longer matters. */
const HARMLESS: Record<string, DecodeEvent> = {
  peer_failed: {
    type: 'router_message',
    router: ROUTER,
    message: { type: 'peer_failed', key: keyOf(1) },
    nowMs: 1,
  },
  'a lost peer': { type: 'peer_lost', peer: P, nowMs: 1 },
  'a tick': { type: 'tick', nowMs: 1 },
  drain: { type: 'drain', nowMs: 1 },
};

/** What an event means for room 1: its `forget` and its end. */
function fateAfter(state: DecodeState, event: DecodeEvent): string[] {
  const effects = run(state, event).filter((effect) => {
    if (effect.type === 'report') return effect.message.type === 'end' && effect.message.key === keyOf(1);
    return effect.type === 'forget' && effect.key === keyOf(1);
  });
  return shorten(effects);
}

for (const [name, { create: make, ends, finish }] of Object.entries(PHASES)) {
  for (const [cause, { event, reason }] of Object.entries(CAUSES)) {
    test(`${name}: ${cause} ends it once, and gives everything back`, () => {
      const state = make();
      const expected = (list: readonly string[]): string[] => list.map((line) => line.replace('REASON', reason));
      const held = state.live.get(keyOf(1))?.lease?.pages.length;
      assert.deepEqual(fateAfter(state, event), expected(ends));
      if (finish !== undefined) {
        assert.equal(phaseOf(state, 1), 'unwinding');
        assert.equal(state.live.get(keyOf(1))?.lease?.pages.length, held, 'pages stay while something refers to them');
        assert.deepEqual(fateAfter(state, event), [], 'the same again changes nothing');
        // A lost router is told nothing any more.
        const told = expected(finish.ends).filter((line) => cause !== 'a lost router' || line === 'forget');
        assert.deepEqual(fateAfter(state, finish.event), told);
      }
      assert.equal(state.live.has(keyOf(1)), false);
      assert.equal(state.host.byOwner.has(keyOf(1)), false);
      assert.equal(state.order.includes(keyOf(1)), false);
    });
  }
  for (const [cause, event] of Object.entries(HARMLESS)) {
    test(`${name}: ${cause} does not end it`, () => {
      const state = make();
      const phase = phaseOf(state, 1);
      assert.deepEqual(fateAfter(state, event), []);
      assert.equal(phaseOf(state, 1), phase);
    });
  }
  for (const type of ['saved', 'restored'] as const) {
    if (finish?.event.type === type) continue;
    test(`${name}: ${type}, which nobody asked for, is a fault of ours`, () => {
      const state = make();
      assert.throws(() => stepDecode(state, { type, key: keyOf(1), nowMs: 1 }), /is under way/);
    });
  }
}
