/**
 * The ghost model: no arithmetic, only bytes that say where they belong. A byte of a page is a hash of (tokens up to it,
 * layer), the bytes of a slot are a hash of (tokens seen, layer), and token i of an answer is a hash of (prompt, i). What
 * a prompt leaves behind therefore is that of another one that begins alike, and of no other.
 * Whoever runs a sequence recomputes all of them first, so a byte that is stale, crossed or missing is seen at once.
 */

import { crc32c } from '../../transfer/checksum.ts';
import type { PageId, SlotId } from '../../transfer/messages.ts';

const LAYERS = 2;
/** Bytes of a slot by layer. */
const SLOT_LAYER_BYTES = 6;

export const SLOT_BYTES = LAYERS * SLOT_LAYER_BYTES;
/** Token ids are below this. */
export const VOCABULARY = 20;

/** Bytes of a page of so many tokens. */
export function pageBytesOf(pageTokens: number): number {
  return LAYERS * pageTokens;
}

/** What stands for a prompt in every hash. */
export function promptSeed(digest: string): number {
  return crc32c(Buffer.from(digest));
}

/** What is hashed at each position of a sequence: its tokens up to there, as far as they are the prompt's. */
export type GhostSeeds = (position: number) => number;

/** The seeds of a sequence. What stands behind its prompt follows from the prompt. */
export function ghostSeeds(promptTokens: readonly number[], seed: number): GhostSeeds {
  let prefix = 0;
  const prefixes = promptTokens.map((token) => (prefix = hash(prefix, token, 11)));
  return (position) => prefixes[position] ?? seed;
}

/** Token `index` of the answer to a prompt. */
export function ghostToken(seed: number, index: number): number {
  return hash(seed, index, 7) % VOCABULARY;
}

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
