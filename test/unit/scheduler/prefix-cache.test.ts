/** The prefix cache inside a prefill worker's scheduler, with the peer and the router played by hand. */
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
import { findPath } from '../../../scheduler/prefix-cache.ts';
import type { PrefillBatch, PrefillChunk, PrefillLimits, WorkerEffect } from '../../../scheduler/types.ts';
import { promptDigest } from '../../../transfer/checksum.ts';
import {
  manifestBytes,
  packChoices,
  type PeerMessage,
  type Salt,
  type SubmitMessage,
} from '../../../transfer/messages.ts';
import { D, keyOf, P, PREFILL_LIMITS, ROUTER, SAMPLING, submitOf } from '../../support/halves.ts';

const PAGE = 128;
const SALTS: readonly Salt[] = [null, 'a'.repeat(64), 'b'.repeat(64)];

function create(changes: Partial<PrefillLimits> = {}): PrefillState {
  const state = createPrefill({ ...PREFILL_LIMITS, stateCount: 8, ...changes }, P);
  step(state, { type: 'peer_up', peer: D, nowMs: 0 });
  return state;
}

function step(state: PrefillState, event: PrefillEvent): WorkerEffect[] {
  const effects = stepPrefill(state, event);
  assert.deepEqual(auditPrefill(state), []);
  return effects;
}

/** A prompt of `common` tokens that all have, and `own` ones that only `who` has. */
function promptOf(common: number, own: number, who = 0): Uint32Array {
  return Uint32Array.from({ length: common + own }, (_, index) =>
    index < common ? index : 100_000 * (who + 1) + index,
  );
}

function fromPeer(state: PrefillState, sequence: number, content: object): WorkerEffect[] {
  const message = { from: D.epoch, to: P.epoch, key: keyOf(sequence), ...content } as PeerMessage;
  return step(state, { type: 'peer_message', peer: D, message, nowMs: 1 });
}

/** Bring a room to where it waits for pages, with credit for everything. */
function ask(
  state: PrefillState,
  sequence: number,
  promptTokens: Uint32Array,
  salt: Salt = null,
  changes: Partial<SubmitMessage> = {},
): WorkerEffect[] {
  const digest = promptDigest(promptTokens, 'm');
  const tokenCount = promptTokens.length;
  const submit = submitOf(sequence, 1, { promptTokens, digest, salt, ...changes });
  step(state, { type: 'router_message', router: ROUTER, message: submit, nowMs: 1 });
  fromPeer(state, sequence, { type: 'OPEN', digest, tokenCount });
  const pageCount = Math.ceil(tokenCount / PAGE);
  const sizes = { pageCount, pageBytes: 8, slotBytes: 12 };
  const validInLastPage = tokenCount - (pageCount - 1) * PAGE;
  const generations = Array.from({ length: pageCount + 1 }, () => 1);
  const manifest = { tokenCount, validInLastPage, generations, ...sizes };
  return fromPeer(state, sequence, { type: 'RESERVED', manifest, credit: manifestBytes(sizes) });
}

/** End all reads that are under way, and those that begin because of it. */
function endReads(state: PrefillState): WorkerEffect[] {
  const effects: WorkerEffect[] = [];
  for (let isBusy = true; isBusy;) {
    isBusy = false;
    for (const [key, { sender }] of state.live) {
      for (const { firstUnit, unitCount } of sender.reads.slice()) {
        const checksums = Array.from({ length: unitCount }, () => 1);
        effects.push(...step(state, { type: 'read_done', key, firstUnit, checksums, nowMs: 1 }));
        isBusy = true;
      }
    }
  }
  return effects;
}

/** Compute until nothing is left to compute: the ranges of each step, and what the router was told was cached. */
function compute(state: PrefillState): { steps: string[][]; cached: Map<string, number> } {
  const steps: string[][] = [];
  const cached = new Map<string, number>();
  endReads(state);
  for (let batch = nextPrefillBatch(state); batch !== null; batch = nextPrefillBatch(state)) {
    steps.push(batch.chunks.map(({ key, start, end }) => `${sequenceOf(key)}:${start}-${end}`));
    for (const effect of finish(state, batch)) {
      if (effect.type !== 'report' || effect.message.type !== 'cached') continue;
      cached.set(effect.message.key, effect.message.tokenCount);
    }
    endReads(state);
  }
  return { steps, cached };
}

function finish(state: PrefillState, { chunks }: PrefillBatch): WorkerEffect[] {
  const tokens = chunks.filter(({ last }) => last).map(({ key }) => ({ key, token: 7 }));
  return step(state, { type: 'step_done', tokens, nowMs: 1 });
}

function sequenceOf(key: string): number {
  return Array.from({ length: 64 }, (_, sequence) => sequence).find((sequence) => keyOf(sequence) === key) as number;
}

function done(state: PrefillState, sequence: number): void {
  fromPeer(state, sequence, { type: 'DONE' });
}

function cancel(state: PrefillState, sequence: number): WorkerEffect[] {
  const message = { type: 'cancel', key: keyOf(sequence), reason: 'client_lost' } as const;
  return step(state, { type: 'router_message', router: ROUTER, message, nowMs: 1 });
}

/** Compute and hand over one room. */
function serve(state: PrefillState, sequence: number, prompt: Uint32Array, salt: Salt = null): string[] {
  ask(state, sequence, prompt, salt);
  const { steps } = compute(state);
  done(state, sequence);
  return steps.flat();
}

test('a prompt that begins like an earlier one computes from where they part', () => {
  const state = create();
  assert.deepEqual(serve(state, 0, promptOf(256, 100)), ['0:0-256', '0:256-356']);
  assert.equal(statsPrefill(state).pagesCached, 2);
  ask(state, 1, promptOf(256, 50, 1));
  const { steps, cached } = compute(state);
  assert.deepEqual(steps, [['1:256-306']]);
  assert.deepEqual(cached, new Map([[keyOf(1), 256]]));
  const { hits, misses, tokens } = statsPrefill(state).prefixes;
  assert.deepEqual({ hits, misses, tokens }, { hits: 1, misses: 1, tokens: 256 });
  assert.equal(state.computedTokens, 356 + 50);
});

test('its first chunk names the shared pages and the state that its slot begins with', () => {
  const state = create();
  ask(state, 0, promptOf(256, 100));
  const first = nextPrefillBatch(state) as PrefillBatch;
  assert.equal(first.chunks[0]?.resume, null);
  const kept = first.chunks[0]?.keep;
  assert.notEqual(kept, null);
  finish(state, first);
  compute(state);
  done(state, 0);
  ask(state, 1, promptOf(256, 50, 1));
  const [chunk] = nextPrefillBatch(state)?.chunks ?? [];
  assert.equal(chunk?.resume, kept);
  assert.equal(chunk?.keep, null, 'it ends inside a page');
  assert.deepEqual(chunk?.pages.slice(0, 2), first.chunks[0]?.pages.slice(0, 2));
});

test('all pages are sent, the cached ones before anything is computed', () => {
  const state = create();
  serve(state, 0, promptOf(256, 100));
  ask(state, 1, promptOf(256, 50, 1));
  assert.deepEqual(state.live.get(keyOf(1))?.sender.reads, [{ firstUnit: 0, unitCount: 2 }]);
});

test('an equal prompt still computes its last token, and a shorter one its last page', () => {
  const state = create();
  serve(state, 0, promptOf(384, 0));
  assert.deepEqual(serve(state, 1, promptOf(384, 0)), ['1:256-384']);
  assert.deepEqual(serve(state, 2, promptOf(256, 0)), ['2:0-128', '2:128-256']);
  assert.deepEqual(serve(state, 3, promptOf(256, 0)), ['3:128-256'], 'where two parted there is a state since');
});

test('prompts that part inside a chunk leave a state where they do, for the third', () => {
  const state = create({ prefillChunkTokens: 512 });
  assert.deepEqual(serve(state, 0, promptOf(256, 200)), ['0:0-384', '0:384-456']);
  assert.deepEqual(serve(state, 1, promptOf(256, 200, 1)), ['1:0-256', '1:256-384', '1:384-456']);
  assert.deepEqual(serve(state, 2, promptOf(256, 200, 2)), ['2:256-384', '2:384-456']);
});

test('agents that share a prefix compute it once, though all come at the same time', () => {
  const agents = 32;
  const state = create({ pageCount: 1000, slotCount: 64, maxRooms: 64, stateCount: 64 });
  for (let agent = 0; agent < agents; agent++) ask(state, agent, promptOf(2000, 60, agent));
  const { cached } = compute(state);
  // Whole pages are shared: 15 of them. The second agent makes the state at the 15th, from the one at the 14th.
  const shared = 15 * PAGE;
  assert.equal(state.computedTokens, 2060 + (2060 - shared + PAGE) + (agents - 2) * (2060 - shared));
  assert.equal([...cached.values()].filter((count) => count === shared).length, agents - 2);
  for (let agent = 0; agent < agents; agent++) done(state, agent);
  const { pagesHeld, pagesFree, pagesCached, rooms } = statsPrefill(state);
  assert.deepEqual({ pagesHeld, rooms, sum: pagesFree + pagesCached }, { pagesHeld: 0, rooms: 0, sum: 1000 });
});

test('a room whose next page another one computes in the same step waits for it', () => {
  const state = create({ prefillChunkTokens: 1024 });
  for (const room of [0, 1, 2]) ask(state, room, promptOf(128, 20, room));
  assert.deepEqual(compute(state).steps, [['0:0-128'], ['0:128-148', '1:128-148', '2:128-148']]);
});

test('a room that fails takes what it computed out of the cache, unless it was verified before', () => {
  const state = create();
  ask(state, 0, promptOf(256, 100));
  compute(state);
  assert.equal(state.cache.pages.size, 2);
  cancel(state, 0);
  assert.equal(state.cache.pages.size, 0);
  assert.equal(statsPrefill(state).pagesFree, 20);
  assert.equal(statsPrefill(state).statesHeld, 0);
  serve(state, 1, promptOf(256, 100));
  ask(state, 2, promptOf(256, 200, 2));
  compute(state);
  assert.equal(state.cache.pages.size, 3, 'one page of its own');
  cancel(state, 2);
  assert.equal(state.cache.pages.size, 2);
  assert.equal(statsPrefill(state).pagesCached, 2);
});

test('who reads what a failed room computed goes on with it, and leaves nothing of it behind', () => {
  const state = create();
  ask(state, 0, promptOf(256, 300));
  finish(state, nextPrefillBatch(state) as PrefillBatch);
  ask(state, 1, promptOf(256, 10, 1));
  assert.equal(state.live.get(keyOf(1))?.lease?.shared, 2);
  cancel(state, 0);
  assert.equal(state.cache.orphanPages.size, 2);
  assert.deepEqual(compute(state).steps, [['1:256-266']]);
  done(state, 1);
  const { pagesFree, statesFree } = statsPrefill(state);
  assert.deepEqual({ pagesFree, statesFree }, { pagesFree: 20, statesFree: 8 });
});

test('a room that is stopped in mid-step leaves no page and no state', () => {
  const state = create();
  ask(state, 0, promptOf(256, 100));
  const batch = nextPrefillBatch(state) as PrefillBatch;
  cancel(state, 0);
  finish(state, batch);
  const { pagesFree, statesFree } = statsPrefill(state);
  assert.deepEqual({ pagesFree, statesFree }, { pagesFree: 20, statesFree: 8 });
});

test('cached pages give way to rooms, the longest unused first, so the cache refuses nobody', () => {
  const state = create({ pageCount: 6 });
  serve(state, 0, promptOf(0, 256, 0));
  serve(state, 1, promptOf(0, 256, 1));
  serve(state, 2, promptOf(0, 300, 0));
  assert.equal(statsPrefill(state).pagesCached, 4);
  ask(state, 3, promptOf(0, 500, 3));
  assert.equal(state.live.get(keyOf(3))?.lease?.pages.length, 4);
  const { pagesCached, prefixes } = statsPrefill(state);
  assert.deepEqual([pagesCached, prefixes.evictedPages], [2, 2]);
  const kept = [...state.cache.pages.values()].map(({ tokens }) => tokens[0]);
  assert.deepEqual(kept, [100_128, 100_000], 'what was used again stays');
});

test('a room does not evict what it is about to read', () => {
  const state = create({ pageCount: 6 });
  serve(state, 0, promptOf(512, 10));
  assert.equal(statsPrefill(state).pagesCached, 4);
  assert.deepEqual(serve(state, 1, promptOf(512, 140, 1)), ['1:512-640', '1:640-652']);
});

test('a room that waits for pages locks none', () => {
  const state = create({ pageCount: 6 });
  serve(state, 0, promptOf(256, 10));
  ask(state, 1, promptOf(0, 500, 1));
  ask(state, 2, promptOf(256, 200, 2));
  assert.deepEqual(statsPrefill(state).waiting, 1);
  assert.equal(statsPrefill(state).pagesCached, 2);
  assert.deepEqual(compute(state).steps.flat().slice(-1), ['1:384-500']);
  done(state, 1);
  compute(state);
  done(state, 2);
  assert.equal(statsPrefill(state).rooms, 0);
});

test('states are bounded, the longest unused makes room, and a prompt without one computes all', () => {
  const state = create({ stateCount: 1 });
  serve(state, 0, promptOf(0, 300, 0));
  serve(state, 1, promptOf(0, 300, 1));
  assert.equal(statsPrefill(state).prefixes.evictedStates, 1);
  assert.deepEqual(serve(state, 2, promptOf(0, 300, 1)), ['2:256-300']);
  assert.deepEqual(serve(state, 3, promptOf(0, 300, 0)), ['3:0-256', '3:256-300']);
});

test('equal hashes are no match: the tokens decide', () => {
  const state = create();
  serve(state, 0, promptOf(0, 300, 0));
  const other = promptOf(0, 300, 1);
  ask(state, 1, other);
  // As if all hashes collided: every node stands under the hashes of the other prompt.
  const { cache, live } = state;
  const hashes = live.get(keyOf(1))?.hashes ?? [];
  for (const hash of hashes) cache.byHash.set(hash, [...cache.pages.keys()]);
  const [chunk] = nextPrefillBatch(state)?.chunks ?? [];
  assert.equal(chunk?.start, 0);
});

test('equal prompts of different salts share nothing, and of equal ones all', () => {
  const state = create();
  for (const [room, salt] of SALTS.entries()) {
    assert.deepEqual(serve(state, room, promptOf(256, 100), salt), [`${room}:0-256`, `${room}:256-356`]);
  }
  assert.equal(statsPrefill(state).pagesCached, 2 * SALTS.length);
  for (const [index, salt] of SALTS.entries()) {
    const room = SALTS.length + index;
    assert.deepEqual(serve(state, room, promptOf(256, 50, 1), salt), [`${room}:256-306`]);
  }
  assert.equal(statsPrefill(state).pagesCached, 2 * SALTS.length);
});

test('equal prompts of different salts do not wait for each other', () => {
  const state = create({ prefillChunkTokens: 1024 });
  for (const [room, salt] of SALTS.entries()) ask(state, room, promptOf(128, 20), salt);
  assert.deepEqual(compute(state).steps[0], ['0:0-128', '1:0-128', '2:0-128']);
});

test('equal hashes are no match: the salt decides, at the beginning and behind it', () => {
  const state = create();
  const [, salt = null, other = null] = SALTS;
  serve(state, 0, promptOf(300, 0), salt);
  ask(state, 1, promptOf(300, 0), other);
  // As if both salts had the same hash: every node stands under the hashes of the other one too.
  const { cache, live } = state;
  const hashes = live.get(keyOf(1))?.hashes ?? [];
  assert.equal(hashes.length, 2);
  for (const hash of hashes) cache.byHash.set(hash, [...cache.pages.keys()]);
  const prompt = { tokens: promptOf(300, 0), salt: other, hashes };
  assert.deepEqual(findPath(cache, prompt, 0, null), []);
  const [first = -1] = findPath(cache, { ...prompt, salt }, 0, null);
  assert.deepEqual(findPath(cache, prompt, 1, first), [], 'a page of a prompt with another salt leads nowhere');
  assert.equal(findPath(cache, { ...prompt, salt }, 1, first).length, 1);
});

test('however many salts come, nothing is left of those whose pages are gone', () => {
  const state = create({ pageCount: 6 });
  for (let room = 0; room < 40; room++) {
    serve(state, room, promptOf(256, 10), room.toString(16).padStart(64, '0'));
    const { pages, byHash } = state.cache;
    assert.ok(pages.size <= 6 && byHash.size <= pages.size, `${pages.size} pages, ${byHash.size} hashes`);
  }
  const salts = new Set([...state.cache.pages.values()].map(({ salt }) => salt));
  assert.ok(salts.size <= 3, 'two pages each');
  step(state, { type: 'flush', nowMs: 1 });
  assert.deepEqual([state.cache.pages.size, state.cache.byHash.size, statsPrefill(state).pagesFree], [0, 0, 6]);
});

test('the audit sees a page behind one of another salt', () => {
  const state = create();
  serve(state, 0, promptOf(256, 10));
  const child = [...state.cache.pages.values()].find(({ parent }) => parent !== null);
  assert.ok(child !== undefined, `none of ${state.cache.pages.size} pages has a parent`);
  child.salt = SALTS[1] ?? null;
  assert.deepEqual(auditPrefill(state), [`page ${child.page}: of another salt than what is before it`]);
});

test('a flush forgets everything, also what is read at the moment, and disturbs nobody', () => {
  const state = create();
  serve(state, 0, promptOf(256, 100));
  ask(state, 1, promptOf(256, 50, 1));
  step(state, { type: 'flush', nowMs: 1 });
  assert.equal(state.cache.pages.size, 0);
  assert.deepEqual(compute(state).steps, [['1:256-306']]);
  done(state, 1);
  assert.equal(statsPrefill(state).pagesFree, 20);
  assert.deepEqual(serve(state, 2, promptOf(256, 50, 2)), ['2:0-256', '2:256-306']);
});

test('without states nothing is cached, and no step is cut for it', () => {
  const state = create({ stateCount: 0 });
  assert.deepEqual(serve(state, 0, promptOf(200, 0)), ['0:0-200']);
  assert.deepEqual(serve(state, 1, promptOf(200, 0)), ['1:0-200']);
  assert.equal(statsPrefill(state).pagesFree, 20);
});

test('the tier is asked before anything is computed, and what it brings is published and read like the rest', () => {
  const state = create({ hasTier: true });
  ask(state, 0, promptOf(300, 100));
  const { pages, slot } = state.live.get(keyOf(0))?.lease ?? { pages: [], slot: -1 };
  assert.deepEqual(state.live.get(keyOf(0))?.fetching, { keep: 0 });
  assert.equal(nextPrefillBatch(state), null);
  step(state, { type: 'fetched', key: keyOf(0), tokenCount: 256, nowMs: 1 });
  assert.deepEqual([...state.cache.pages.keys()], pages.slice(0, 2).toReversed());
  const [chunk] = nextPrefillBatch(state)?.chunks ?? [];
  assert.deepEqual([chunk?.start, chunk?.slot, chunk?.resume], [256, slot, null], 'its slot has the state');
});

test('the tier is told the salt, when it is asked and when it is given something', () => {
  const state = create({ hasTier: true });
  const [, salt = null] = SALTS;
  const asked = ask(state, 0, promptOf(300, 0), salt).find(({ type }) => type === 'fetch');
  step(state, { type: 'fetched', key: keyOf(0), tokenCount: 0, nowMs: 1 });
  compute(state);
  const given = fromPeer(state, 0, { type: 'DONE' }).find(({ type }) => type === 'stash');
  assert.ok(asked?.type === 'fetch' && given?.type === 'stash', `found ${asked?.type} and ${given?.type}`);
  assert.deepEqual([asked.salt, given.salt], [salt, salt]);
});

test('a tier that brings nothing costs nothing, and one whose room was stopped leaves nothing', () => {
  const state = create({ hasTier: true });
  ask(state, 0, promptOf(300, 100));
  step(state, { type: 'fetched', key: keyOf(0), tokenCount: 0, nowMs: 1 });
  assert.deepEqual(compute(state).steps[0], ['0:0-256']);
  cancel(state, 0);
  ask(state, 1, promptOf(300, 100));
  cancel(state, 1);
  assert.equal(statsPrefill(state).unwinding, 1, 'its pages may still be written');
  step(state, { type: 'fetched', key: keyOf(1), tokenCount: 256, nowMs: 1 });
  const { rooms, pagesFree, statesFree } = statsPrefill(state);
  assert.deepEqual({ rooms, pagesFree, statesFree }, { rooms: 0, pagesFree: 20, statesFree: 8 });
});

test('what a room has verified is copied to the tier once, and not evicted meanwhile', () => {
  const state = create({ hasTier: true, pageCount: 5 });
  const handOver = (sequence: number, prompt: Uint32Array): WorkerEffect[] => {
    ask(state, sequence, prompt);
    if (state.live.get(keyOf(sequence))?.fetching != null) {
      step(state, { type: 'fetched', key: keyOf(sequence), tokenCount: 0, nowMs: 1 });
    }
    compute(state);
    return fromPeer(state, sequence, { type: 'DONE' }).filter(({ type }) => type === 'stash');
  };
  const [stash] = handOver(0, promptOf(300, 0));
  assert.ok(stash?.type === 'stash', `found ${stash?.type}`);
  assert.deepEqual([stash.pages.map(({ index }) => index), stash.states.map(({ index }) => index)], [[0, 1], [1]]);
  assert.deepEqual(handOver(1, promptOf(300, 0)), [], 'it has been given all of it');
  ask(state, 2, promptOf(0, 500, 2));
  assert.equal(statsPrefill(state).waiting, 1, 'two pages are being read');
  step(state, { type: 'stashed', key: keyOf(0), nowMs: 1 });
  assert.equal(statsPrefill(state).waiting, 0);
});

test('a prompt whose own log probabilities are asked for is computed whole, keeps nothing, and END tells them', () => {
  const state = create({ prefillChunkTokens: 2 * PAGE });
  const prompt = promptOf(256, 100);
  serve(state, 0, prompt);
  const { pagesCached } = statsPrefill(state);
  ask(state, 1, prompt, null, { sampling: { ...SAMPLING, logprobs: 1, promptLogprobs: true } });
  const choiceOf = (position: number) => ({ logprob: -position, topIds: [position], topLogprobs: [-position / 2] });
  const choices = Array.from(prompt.slice(1), (_, index) => choiceOf(index + 1));
  const ends: unknown[] = [];
  const ranges: number[][] = [];
  endReads(state);
  for (let batch = nextPrefillBatch(state); batch !== null; batch = nextPrefillBatch(state)) {
    const [{ key, start, end, last }] = batch.chunks as [PrefillChunk];
    ranges.push([start, end]);
    const promptChoices = packChoices(choices.slice(start, end), 1);
    step(state, { type: 'step_done', tokens: [{ key, token: last ? 7 : null, promptChoices }], nowMs: 1 });
    for (const effect of endReads(state)) {
      if (effect.type === 'send' && effect.message.type === 'END') ends.push(effect.message.promptChoices);
    }
  }
  assert.deepEqual(ranges, [
    [0, 256],
    [256, 356],
  ]);
  assert.deepEqual(ends, [packChoices(choices, 1)]);
  done(state, 1);
  assert.equal(statsPrefill(state).pagesCached, pagesCached);
});
