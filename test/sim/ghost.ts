/**
 * The ghost model: no arithmetic, only bytes that say where they belong. A byte of a page is a hash of (salt, tokens up to
 * it, layer), the bytes of a slot are a hash of (salt, tokens seen, layer). What a prompt leaves behind therefore is that
 * of another one of the same salt that begins alike, and of no other.
 * Whoever runs a sequence recomputes all of them first, so a byte that is stale, crossed or missing is seen at once.
 *
 * Token i of an answer is the one with the largest logit, a hash of (prompt, seed, i, token), after the rules that the
 * batch says. test/sim/answer.ts knows the right one without any batch.
 */

import type { RowRules } from '../../scheduler/types.ts';
import type { GuideMaker } from '../../server/grammar/constraint.ts';
import { crc32c } from '../../transfer/checksum.ts';
import type { PageId, Salt, SlotId, TokenChoice } from '../../transfer/messages.ts';

const LAYERS = 2;
/** Bytes of a slot by layer. */
const SLOT_LAYER_BYTES = 6;

export const SLOT_BYTES = LAYERS * SLOT_LAYER_BYTES;
/** Token ids of answers are below this; at most 32. */
export const VOCABULARY = 20;
/** One constraint in so many positions leaves no token. */
const DEAD_END = 40;

/** Bytes of a page of so many tokens. */
export function pageBytesOf(pageTokens: number): number {
  return LAYERS * pageTokens;
}

/** What stands for a prompt and a generator's seed in every logit. */
export function answerSeed(digest: string, samplingSeed: number): number {
  return hash(crc32c(Buffer.from(digest)), samplingSeed, 13);
}

/** What is hashed at each position of a sequence: its salt and its tokens up to there. */
export type GhostSeeds = (position: number) => number;

/** The seeds of a sequence, its answer included. */
export function ghostSeeds(tokens: readonly number[], salt: Salt): GhostSeeds {
  let prefix = salt === null ? 0 : crc32c(Buffer.from(salt));
  const prefixes = tokens.map((token) => (prefix = hash(prefix, token, 11)));
  return (position) => prefixes[position] ?? 0;
}

/** The logit of a token at `index` of an answer: a multiple of 1/16 from -2 up to below 2, so that sums of it are exact. */
export function ghostLogit(seed: number, index: number, token: number): number {
  return (hash(seed, index, 200 + token) % 64) / 16 - 2;
}

/** Further than any answer goes, so that a prompt's logits are its own. */
const PROMPT_INDEX = 100_000;

/** The token at `index` of an answer, under a row's rules and mask; null if they leave none. */
export function sampleToken(
  seed: number,
  index: number,
  rules: RowRules | null,
  mask: Uint32Array | undefined,
): number | null {
  const logits = Array.from({ length: VOCABULARY }, (_, token) => ghostLogit(seed, index, token));
  if (rules !== null) applyRules(logits, rules);
  let best: number | null = null;
  for (const [token, logit] of logits.entries()) {
    if (mask !== undefined && ((mask[0]! >>> token) & 1) === 0) continue;
    if (logit > (best === null ? -Infinity : logits[best]!)) best = token;
  }
  return best;
}

/** As kernels/rules.ts says. */
function applyRules(logits: number[], { biasIds, biases, banned, penalties }: RowRules): void {
  if (penalties !== null) {
    const { presence, frequency, repetition, prompt, generated } = penalties;
    const counts = new Map<number, number>([...prompt].map((token) => [token, 0]));
    for (const token of generated) counts.set(token, (counts.get(token) ?? 0) + 1);
    for (const [token, count] of counts) {
      const logit = logits[token];
      if (logit === undefined) continue;
      const scaled = logit > 0 ? logit / repetition : logit * repetition;
      logits[token] = scaled - frequency * count - (count > 0 ? presence : 0);
    }
  }
  for (const [index, token] of biasIds.entries()) logits[token]! += biases[index]!;
  for (const token of banned) logits[token] = -Infinity;
}

/** What is told of the choice of a token; its logits stand for its log probabilities. */
export function ghostChoice(seed: number, index: number, token: number, topCount: number): TokenChoice {
  const logits = Array.from({ length: VOCABULARY }, (_, id) => ghostLogit(seed, index, id));
  const topIds = [...logits.keys()].sort((a, b) => logits[b]! - logits[a]! || a - b).slice(0, topCount);
  return { logprob: logits[token]!, topIds, topLogprobs: topIds.map((id) => logits[id]!) };
}

/** What is told of the token at `position` of a prompt. */
export function ghostPromptChoice(seed: number, position: number, token: number, topCount: number): TokenChoice {
  return ghostChoice(seed, PROMPT_INDEX + position, token % VOCABULARY, topCount);
}

/** Where an answer begins under a constraint. What may come next follows from all tokens before. */
export function constraintStart(constraint: string): number {
  return Number(constraint);
}

/** A bit for each token that may come here, about half of them; now and then none. */
export function constraintMask(state: number): number {
  return hash(state, 0, 17) % DEAD_END === 0 ? 0 : hash(state, 1, 17) & ((1 << VOCABULARY) - 1);
}

/** Behind one more token. */
export function constraintNext(state: number, token: number): number {
  return hash(state, token, 19);
}

/** Guides of such constraints, for the steering of a worker. */
export const GHOST_GUIDES: GuideMaker = {
  start(constraint) {
    let state = constraintStart(constraint);
    return {
      mask: () => Uint32Array.of(constraintMask(state)),
      accept(token) {
        const isAllowed = ((constraintMask(state) >>> token) & 1) === 1;
        state = constraintNext(state, token);
        return isAllowed;
      },
    };
  },
};

/** Device memory of one worker. */
export interface GhostMemory {
  readonly pageTokens: number;
  readonly pageBytes: number;
  readonly pages: Uint8Array;
  readonly slots: Uint8Array;
  /** Copies of slots. */
  readonly states: Uint8Array;
}

/** Memory with nothing of worth in it. */
export function createMemory(sizes: {
  pageTokens: number;
  pageCount: number;
  slotCount: number;
  stateCount?: number;
}): GhostMemory {
  const pageBytes = pageBytesOf(sizes.pageTokens);
  return {
    pageTokens: sizes.pageTokens,
    pageBytes,
    pages: new Uint8Array(sizes.pageCount * pageBytes),
    slots: new Uint8Array(sizes.slotCount * SLOT_BYTES),
    states: new Uint8Array((sizes.stateCount ?? 0) * SLOT_BYTES),
  };
}

/** The KV of positions [start, end), as a forward pass leaves it in the pages of a sequence. */
export function fillPositions(
  memory: GhostMemory,
  pages: readonly PageId[],
  start: number,
  end: number,
  seeds: GhostSeeds,
): void {
  for (let position = start; position < end; position++) {
    const at = placeOf(memory, pages, position);
    for (let layer = 0; layer < LAYERS; layer++) memory.pages[at + layer] = hash(seeds(position), position, layer);
  }
}

/** The first position of [0, end) whose KV is not this prompt's, or null. */
export function findWrongPosition(
  memory: GhostMemory,
  pages: readonly PageId[],
  end: number,
  seeds: GhostSeeds,
): number | null {
  for (let position = 0; position < end; position++) {
    const at = placeOf(memory, pages, position);
    for (let layer = 0; layer < LAYERS; layer++) {
      if (memory.pages[at + layer] !== (hash(seeds(position), position, layer) & 255)) return position;
    }
  }
  return null;
}

/** The running state after `count` tokens, at least one. */
export function fillSlot(memory: GhostMemory, slot: SlotId, count: number, seeds: GhostSeeds): void {
  const seed = seeds(count - 1);
  for (let i = 0; i < SLOT_BYTES; i++) memory.slots[slot * SLOT_BYTES + i] = hash(seed, count, 100 + i);
}

/** True if the slot holds the running state of this prompt after `count` tokens. */
export function isSlotRight(memory: GhostMemory, slot: SlotId, count: number, seeds: GhostSeeds): boolean {
  const seed = seeds(count - 1);
  for (let i = 0; i < SLOT_BYTES; i++) {
    if (memory.slots[slot * SLOT_BYTES + i] !== (hash(seed, count, 100 + i) & 255)) return false;
  }
  return true;
}

function placeOf(memory: GhostMemory, pages: readonly PageId[], position: number): number {
  const page = pages[Math.floor(position / memory.pageTokens)];
  if (page === undefined) throw new Error(`position ${position} has no page among ${pages.join()}`);
  return page * memory.pageBytes + (position % memory.pageTokens) * LAYERS;
}

/** 32 well mixed bits of three numbers (the finisher of MurmurHash3). */
function hash(a: number, b: number, c: number): number {
  let bits = a ^ Math.imul(b + 1, 0x9e3779b1) ^ Math.imul(c + 1, 0x85ebca6b);
  bits = Math.imul(bits ^ (bits >>> 16), 0x85ebca6b);
  bits = Math.imul(bits ^ (bits >>> 13), 0xc2b2ae35);
  return (bits ^ (bits >>> 16)) >>> 0;
}
