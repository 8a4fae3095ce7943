/**
 * Prefix cache: KV pages of prompts, kept after their rooms, so that a prompt that begins alike computes only the rest.
 *
 * A tree. Each node is one page, the tokens it holds, and the page before it; so a node stands for everything from the
 * first token to its end. A page alone is not enough to go on from: that takes the state slot as it was at that end
 * (window rows and compressor tails, which nothing but the computation of the whole prefix gives). So some nodes have a
 * *state*, a copy of a slot on the device, and a room goes on from the deepest node of its prompt that has one.
 *
 *     tokens 0..127   128..255   256..383   384..511         a room with the same 400 tokens reads pages 4, 9 and 2,
 *     page 4 ──────── page 9 ─── page 2 ─┬─ page 7            starts with state 5 in its slot, and computes from token
 *                     state 1    state 5 └─ page 3            384 on
 *
 * Pages of the tree are *shared* in the ledger: rooms read them and nobody writes them. A node enters when its page is
 * computed and is *verified* once a room that reads it has been handed over whole. If a room fails, all that it reads
 * and that is not verified leaves the tree with everything that hangs on it; who reads it still goes on.
 *
 * Each salt has a tree of its own: prompts that clients want apart share nothing, though their tokens be the same.
 *
 * The cache never keeps a page that a room needs: idle leaves go, the longest unused first. Nodes are found by a hash of
 * the salt and all tokens up to their end; what decides is a comparison of both.
 */

import { crc32c } from '../transfer/checksum.ts';
import {
  auditLedger,
  borrow,
  createLedger,
  giveBack,
  isIdle,
  leave,
  share,
  SHARED,
  take,
  type Ledger,
} from '../transfer/ledger.ts';
import type { PageId, Salt } from '../transfer/messages.ts';
import type { Lease, Pools } from './pages.ts';
import type { StateId } from './types.ts';

/** A node of the tree. */
export interface CachedPage {
  page: PageId;
  /** The page before it, or null at the beginning of a prompt. */
  parent: PageId | null;
  children: PageId[];
  /** Of the prompts that may read it, and so of all that hangs on it. */
  salt: Salt;
  /** Of that and all tokens up to its end. */
  hash: number;
  /** Those it holds: `pageTokens`. */
  tokens: Uint32Array;
  /** Copy of a slot as it was at its end, or null. */
  state: StateId | null;
  verified: boolean;
  /** The tier was given the page, and a state at its end. */
  stashed: { page: boolean; state: boolean };
}

export interface PrefixCache {
  pageTokens: number;
  /** The tree. Longest unused first; of one path the deepest first. */
  pages: Map<PageId, CachedPage>;
  /** By hash: the nodes that have it. */
  byHash: Map<number, PageId[]>;
  /** Pages and states that have left the tree and are still read. */
  orphanPages: Set<PageId>;
  orphanStates: Set<StateId>;
  /** Nodes that nobody reads. */
  idleCount: number;
  /** State copies; one that is being made belongs to its room, the others are shared. */
  states: Ledger;
  counts: PrefixCounts;
}

/** Since the start. */
export interface PrefixCounts {
  /** Rooms that began with cached pages, and rooms that did not. */
  hits: number;
  misses: number;
  /** Tokens that were not computed because of that. */
  tokens: number;
  evictedPages: number;
  evictedStates: number;
}

/** What a room knows of its prompt: the hash up to the end of each whole page. */
export type PromptHashes = readonly number[];

/** A prompt as it is looked for. */
export interface HashedPrompt {
  tokens: Uint32Array;
  salt: Salt;
  hashes: PromptHashes;
}

/** An empty cache. Without states it keeps nothing. */
export function createPrefixCache(pageTokens: number, stateCount: number, strict: boolean): PrefixCache {
  return {
    pageTokens,
    pages: new Map(),
    byHash: new Map(),
    orphanPages: new Set(),
    orphanStates: new Set(),
    idleCount: 0,
    states: createLedger('state', stateCount, strict),
    counts: { hits: 0, misses: 0, tokens: 0, evictedPages: 0, evictedStates: 0 },
  };
}

/** True if the cache may keep anything. */
export function isCaching(cache: PrefixCache): boolean {
  return cache.states.total > 0;
}

/** Hashes of a prompt's whole pages. */
export function hashPrompt(cache: PrefixCache, tokens: Uint32Array, salt: Salt): PromptHashes {
  const hashes: number[] = [];
  let hash = salt === null ? 0 : crc32c(new TextEncoder().encode(salt));
  for (let end = cache.pageTokens; end <= tokens.length; end += cache.pageTokens) {
    hash = hashPage(tokens.subarray(end - cache.pageTokens, end), hash);
    hashes.push(hash);
  }
  return hashes;
}

/**
 * Nodes that hold a prompt's tokens from page `from` on, as far as there are any; `parent` is the page before. They end
 * before the last token of the prompt: that one must be computed to know what follows it.
 */
export function findPath(cache: PrefixCache, prompt: HashedPrompt, from: number, parent: PageId | null): PageId[] {
  const path: PageId[] = [];
  if (parent !== null && !cache.pages.has(parent)) return path; // it has left the tree
  const most = Math.floor((prompt.tokens.length - 1) / cache.pageTokens);
  let before = parent;
  for (let index = from; index < most; index++) {
    const page = findNode(cache, prompt, index, before);
    if (page === null) break;
    path.push(page);
    before = page;
  }
  return path;
}

/** How many pages of a path can be used: up to the deepest that has a state. */
export function usableLength(cache: PrefixCache, path: readonly PageId[]): number {
  return path.findLastIndex((page) => cache.pages.get(page)?.state != null) + 1;
}

/** A room reads these nodes from now on, and is about to start from the state of the last; returns that. */
export function joinPrefix(cache: PrefixCache, pools: Pools, path: readonly PageId[], reader: string): StateId {
  for (const page of path) if (isIdle(pools.pages, page)) cache.idleCount--;
  borrow(pools.pages, path, reader);
  touch(cache, path);
  const state = cache.pages.get(path.at(-1) as PageId)?.state as StateId;
  borrow(cache.states, [state], reader);
  return state;
}

/** A room no longer needs the state that it was about to start from. */
export function leaveState(cache: PrefixCache, state: StateId, reader: string): void {
  leave(cache.states, [state], reader);
  if (isIdle(cache.states, state) && cache.orphanStates.delete(state)) giveBack(cache.states, [state], SHARED);
}

/** A room no longer reads what it shares. What is left of its lease is its own. */
export function leavePrefix(cache: PrefixCache, pools: Pools, lease: Omit<Lease, 'slot'>): void {
  const pages = lease.pages.splice(0, lease.shared);
  lease.shared = 0;
  leave(pools.pages, pages, lease.owner);
  for (const page of pages) {
    if (!isIdle(pools.pages, page)) continue;
    if (cache.orphanPages.delete(page)) giveBack(pools.pages, [page], SHARED);
    else cache.idleCount++;
  }
}

/**
 * Make `count` pages free, by eviction of idle ones if need be. False, and nothing is evicted, if that would not do.
 */
export function makeRoom(cache: PrefixCache, pools: Pools, count: number): boolean {
  const { pages } = pools;
  if (pages.free.length + cache.idleCount < count) return false;
  while (pages.free.length < count) {
    const before = pages.free.length;
    for (const entry of cache.pages.values()) {
      if (entry.children.length > 0 || !isIdle(pages, entry.page)) continue;
      cache.counts.evictedPages++;
      removeNode(cache, pools, entry);
      if (pages.free.length >= count) break;
    }
    if (pages.free.length === before) return false; // only after a ledger violation
  }
  return true;
}

/** A place for the copy of a slot, for `owner` to fill; null if all are about to be used. */
export function takeState(cache: PrefixCache, owner: string): StateId | null {
  if (cache.states.free.length === 0) evictState(cache);
  return take(cache.states, 1, owner)?.[0] ?? null;
}

/**
 * The pages of a room up to token `end` are computed: the whole ones enter the tree, and `state`, a copy of its slot at
 * `end`, with the last. Where the tree has a page already, the room reads that from now on and its own becomes free; so
 * none of these pages may be under a read or a step.
 */
export function publishPrefix(
  cache: PrefixCache,
  pools: Pools,
  lease: Lease,
  { prompt, end, state }: { prompt: HashedPrompt; end: number; state: StateId | null },
): void {
  const { pageTokens } = cache;
  const pageCount = Math.floor(end / pageTokens);
  for (let index = lease.shared; index < pageCount; index++) {
    const parent = index === 0 ? null : (lease.pages[index - 1] as PageId);
    const before = parent === null ? null : cache.pages.get(parent);
    if (before === undefined) break; // what it stands on has left the tree
    const own = lease.pages[index] as PageId;
    const known = findNode(cache, prompt, index, parent);
    if (known === null) {
      share(pools.pages, [own], lease.owner);
      const tokens = prompt.tokens.slice(index * pageTokens, (index + 1) * pageTokens);
      const hash = prompt.hashes[index] as number;
      cache.pages.set(own, {
        page: own,
        parent,
        children: [],
        salt: prompt.salt,
        hash,
        tokens,
        state: null,
        verified: false,
        stashed: { page: false, state: false },
      });
      cache.byHash.set(hash, [...(cache.byHash.get(hash) ?? []), own]);
      before?.children.push(own);
    } else {
      if (isIdle(pools.pages, known)) cache.idleCount--;
      borrow(pools.pages, [known], lease.owner);
      giveBack(pools.pages, [own], lease.owner);
      lease.pages[index] = known;
    }
    lease.shared = index + 1;
  }
  touch(cache, lease.pages.slice(0, lease.shared));
  if (state === null) return;
  const last = lease.shared === pageCount ? cache.pages.get(lease.pages[pageCount - 1] as PageId) : undefined;
  if (last === undefined || last.state !== null || pageCount * pageTokens !== end) {
    giveBack(cache.states, [state], lease.owner);
    return;
  }
  share(cache.states, [state], lease.owner);
  leave(cache.states, [state], lease.owner);
  last.state = state;
}

/** A room was handed over whole: what it reads is right. */
export function verifyPrefix(cache: PrefixCache, lease: Lease): void {
  const path = lease.pages.slice(0, lease.shared);
  for (const page of path) {
    const entry = cache.pages.get(page);
    if (entry !== undefined) entry.verified = true;
  }
  touch(cache, path);
}

/** Pages and states of a path that the tier has not, by index; from now on it has. */
export function takeUnstashed(
  cache: PrefixCache,
  path: readonly PageId[],
): { pages: { index: number; page: PageId }[]; states: { index: number; state: StateId }[] } {
  const found: ReturnType<typeof takeUnstashed> = { pages: [], states: [] };
  for (const [index, page] of path.entries()) {
    const entry = cache.pages.get(page);
    if (entry === undefined) break; // it has left the tree, with all behind it
    const { stashed, state } = entry;
    if (!stashed.page) found.pages.push({ index, page });
    if (!stashed.state && state !== null) found.states.push({ index, state });
    entry.stashed = { page: true, state: stashed.state || state !== null };
  }
  return found;
}

/** Somebody else than a room reads these pages and states. */
export function holdPrefix(
  cache: PrefixCache,
  pools: Pools,
  { pages, states }: { pages: readonly PageId[]; states: readonly StateId[] },
  reader: string,
): void {
  for (const page of pages) if (isIdle(pools.pages, page)) cache.idleCount--;
  borrow(pools.pages, pages, reader);
  borrow(cache.states, states, reader);
}

/** A room failed: what it reads and nobody has verified leaves the tree, with all that hangs on it. */
export function disownPrefix(cache: PrefixCache, pools: Pools, lease: Lease): void {
  // Above a node that is verified all are, so the first that is not has the others below it.
  for (const page of lease.pages.slice(0, lease.shared)) {
    const entry = cache.pages.get(page);
    if (entry !== undefined && !entry.verified) return removeTree(cache, pools, entry);
  }
}

/** Empty the tree. Returns how many pages it had. */
export function flushPrefixes(cache: PrefixCache, pools: Pools): number {
  const count = cache.pages.size;
  for (const entry of [...cache.pages.values()]) if (entry.parent === null) removeTree(cache, pools, entry);
  return count;
}

/** Pages and states of the cache, counted from the tree. */
export function statsPrefix(cache: PrefixCache): {
  /** Nodes that nobody reads; given back whenever a room needs pages. */
  pagesIdle: number;
  /** Pages that rooms share, in the tree or not. */
  pagesRead: number;
  statesFree: number;
  statesHeld: number;
} {
  return {
    pagesIdle: cache.idleCount,
    pagesRead: cache.pages.size - cache.idleCount + cache.orphanPages.size,
    statesFree: cache.states.free.length,
    statesHeld: cache.states.total - cache.states.free.length,
  };
}

/**
 * Recount from scratch: the tree is one, every node is shared in the ledger and read by nobody who does not read all
 * before it, and every state is a node's, a reader's, or of a room in `making`, whose step fills it.
 */
export function auditPrefix(
  cache: PrefixCache,
  pools: Pools,
  { making, starting }: { making: ReadonlyMap<StateId, string>; starting: ReadonlyMap<string, readonly StateId[]> },
): string[] {
  const found = auditLedger(cache.states);
  const { owners, readers } = pools.pages;
  let idleCount = 0;
  const states = new Set<StateId>(cache.orphanStates);
  for (const [page, { parent, children, salt, hash, state, verified }] of cache.pages) {
    if (owners[page] !== SHARED) found.push(`page ${page}: in the tree, but of ${owners[page] ?? 'nobody'}`);
    if (isIdle(pools.pages, page)) idleCount++;
    if (isIdle(pools.pages, page) && !verified) found.push(`page ${page}: kept, but nobody has verified it`);
    if (!(cache.byHash.get(hash) ?? []).includes(page)) found.push(`page ${page}: not under its hash`);
    const above = parent === null ? undefined : cache.pages.get(parent);
    if (parent !== null && above?.children.includes(page) !== true) found.push(`page ${page}: not below ${parent}`);
    if (above !== undefined && above.salt !== salt) found.push(`page ${page}: of another salt than what is before it`);
    if (verified && above?.verified === false) found.push(`page ${page}: verified, but not what is before it`);
    for (const child of children) if (!cache.pages.has(child)) found.push(`page ${page}: lost child ${child}`);
    for (const reader of readers[page] ?? []) {
      if (parent !== null && readers[parent]?.has(reader) !== true) found.push(`page ${page}: ${reader} reads a part`);
    }
    if (state !== null && states.has(state)) found.push(`state ${state}: of two nodes`);
    if (state !== null) states.add(state);
  }
  const shared = owners.filter((owner) => owner === SHARED).length;
  const known = cache.pages.size + cache.orphanPages.size;
  if (shared !== known) found.push(`${shared} shared pages, ${known} known`);
  if (idleCount !== cache.idleCount) found.push(`${cache.idleCount} idle pages kept, ${idleCount} counted`);
  for (const [state, owner] of cache.states.owners.entries()) {
    const isRight = owner === SHARED ? states.has(state) : owner === (making.get(state) ?? null);
    if (!isRight && owner !== 'quarantined') found.push(`state ${state}: of ${owner ?? 'nobody'}`);
    for (const reader of cache.states.readers[state] ?? []) {
      if (starting.get(reader)?.includes(state) !== true)
        found.push(`state ${state}: ${reader} does not start from it`);
    }
  }
  return found;
}

function hashPage(tokens: Uint32Array, previous: number): number {
  return crc32c(new Uint8Array(tokens.buffer, tokens.byteOffset, tokens.byteLength), previous);
}

function findNode(
  cache: PrefixCache,
  { tokens, salt, hashes }: HashedPrompt,
  index: number,
  parent: PageId | null,
): PageId | null {
  const start = index * cache.pageTokens;
  for (const page of cache.byHash.get(hashes[index] as number) ?? []) {
    const entry = cache.pages.get(page) as CachedPage;
    const isNext = entry.parent === parent && entry.salt === salt;
    if (isNext && entry.tokens.every((token, offset) => token === tokens[start + offset])) return page;
  }
  return null;
}

/** A path was used: it is evicted last, and its end before its beginning. */
function touch(cache: PrefixCache, path: readonly PageId[]): void {
  for (const page of path.toReversed()) {
    const entry = cache.pages.get(page);
    if (entry === undefined) continue;
    cache.pages.delete(page);
    cache.pages.set(page, entry);
  }
}

function evictState(cache: PrefixCache): void {
  for (const entry of cache.pages.values()) {
    const { state } = entry;
    if (state === null || !isIdle(cache.states, state)) continue;
    cache.counts.evictedStates++;
    entry.state = null;
    giveBack(cache.states, [state], SHARED);
    return;
  }
}

function removeTree(cache: PrefixCache, pools: Pools, top: CachedPage): void {
  const below = [top];
  for (const entry of below) for (const child of entry.children) below.push(cache.pages.get(child) as CachedPage);
  for (const entry of below.toReversed()) removeNode(cache, pools, entry);
}

/** A node without children leaves the tree. What is still read of it is an orphan until its last reader leaves. */
function removeNode(cache: PrefixCache, pools: Pools, { page, parent, hash, state }: CachedPage): void {
  cache.pages.delete(page);
  const others = (cache.byHash.get(hash) ?? []).filter((other) => other !== page);
  if (others.length === 0) cache.byHash.delete(hash);
  else cache.byHash.set(hash, others);
  const above = parent === null ? undefined : cache.pages.get(parent);
  if (above !== undefined) above.children = above.children.filter((child) => child !== page);
  if (state !== null) {
    if (isIdle(cache.states, state)) giveBack(cache.states, [state], SHARED);
    else cache.orphanStates.add(state);
  }
  if (isIdle(pools.pages, page)) {
    cache.idleCount--;
    giveBack(pools.pages, [page], SHARED);
  } else cache.orphanPages.add(page);
}
