/**
 * Closing: what a worker still knows of rooms that are over. Terminal knowledge is state, not an event:
 *
 *   unwinds     ABORT or DONE that the peer has not acknowledged: re-sent until it has, or is dead
 *   endings     `end` that the router has not acknowledged: the same
 *   tombstones  closed keys, so that a late message is answered and never re-creates the room;
 *               kept until the router says that it no longer uses the sequence
 */

import {
  parseKey,
  type AbortMessage,
  type DoneMessage,
  type EndedMessage,
  type Epoch,
  type Instance,
  type Outcome,
  type Reason,
  type RoomKey,
} from './messages.ts';

/** Most dead routers remembered; one is added per loss of a router, which takes a lease each. */
const MAX_DEAD_ROUTERS = 1024;

/** When an unanswered message is sent again. */
export interface Resend {
  atMs: number;
  gapMs: number;
}

/** First and largest gap between re-sends. */
export interface ResendLimits {
  resendMinMs: number;
  resendMaxMs: number;
}

/** The clock of a message that is being sent for the first time now. */
export function startResend(nowMs: number, limits: ResendLimits): Resend {
  return { atMs: nowMs + limits.resendMinMs, gapMs: limits.resendMinMs };
}

/** True if the message is due again; its next turn comes after twice the gap, up to the largest. */
export function isDue(resend: Resend, nowMs: number, limits: ResendLimits): boolean {
  if (nowMs < resend.atMs) return false;
  resend.gapMs = Math.min(2 * resend.gapMs, limits.resendMaxMs);
  resend.atMs = nowMs + resend.gapMs;
  return true;
}

/** An unacknowledged terminal message to a peer. Outlives the room. */
export interface UnwindEntry {
  peer: Instance;
  message: AbortMessage | DoneMessage;
  resend: Resend;
  sinceMs: number;
  /** Credit of the room, in bytes, that the peer may still use up (decode only). */
  strandedBytes: number;
  /** The peer's own ABORT was heard: nothing of the room is under way any more (decode only). */
  returned: boolean;
}

/** An `end` that its router has not acknowledged. */
export interface Ending {
  router: Epoch;
  message: EndedMessage;
  resend: Resend;
}

/** What a late message for a closed key is answered with. */
export interface Tombstone {
  outcome: Outcome;
  tokenCount: number;
}

export interface Closing {
  unwinds: Map<RoomKey, UnwindEntry>;
  endings: Map<RoomKey, Ending>;
  tombstones: Map<RoomKey, Tombstone>;
  /** By router: its smallest sequence still in use. */
  marks: Map<Epoch, number>;
  /** Routers without a link, latest last: all of their keys are closed until they link again. */
  deadRouters: Epoch[];
}

export function createClosing(): Closing {
  return {
    unwinds: new Map(),
    endings: new Map(),
    tombstones: new Map(),
    marks: new Map(),
    deadRouters: [],
  };
}

/** True if nothing may be created for this key any more. */
export function isClosed(closing: Closing, key: RoomKey): boolean {
  return closing.tombstones.has(key) || isForgotten(closing, key);
}

/** True if the key is below its router's mark, its router is dead, or it is no key: closed without a tombstone. */
export function isForgotten(closing: Closing, key: RoomKey): boolean {
  const parts = parseKey(key);
  if (parts === null || closing.deadRouters.includes(parts.router)) return true;
  return parts.sequence < (closing.marks.get(parts.router) ?? 0);
}

/** Close a key. The first outcome stays. */
export function bury(closing: Closing, key: RoomKey, outcome: Outcome, tokenCount: number): void {
  if (!isClosed(closing, key)) closing.tombstones.set(key, { outcome, tokenCount });
}

/** Close a key that had no room here. */
export function buryUnseen(closing: Closing, key: RoomKey, reason: Reason): void {
  bury(closing, key, { ok: false, reason }, 0);
}

/** A router's smallest sequence in use: tombstones below it are no longer needed. Marks never fall. */
export function applyMark(closing: Closing, router: Epoch, smallestSequence: number): void {
  if (closing.deadRouters.includes(router)) return;
  closing.marks.set(router, Math.max(smallestSequence, closing.marks.get(router) ?? 0));
  evict(closing, (owner, sequence) => owner === router && sequence < smallestSequence);
}

/**
 * A router has no link any more: nobody waits for its ends, and nothing is created for its keys.
 *
 * If it is dead, because a later life of it has spoken, its keys are closed for ever and need no tombstones. Otherwise
 * they stay until it is the oldest of too many, for the same life may link again.
 */
export function buryRouter(closing: Closing, router: Epoch, isDead: boolean): void {
  if (!closing.deadRouters.includes(router)) closing.deadRouters.push(router);
  for (const [key, ending] of closing.endings) if (ending.router === router) closing.endings.delete(key);
  if (isDead) forgetRouter(closing, router);
  if (closing.deadRouters.length > MAX_DEAD_ROUTERS) forgetRouter(closing, closing.deadRouters.shift() as Epoch);
}

function forgetRouter(closing: Closing, router: Epoch): void {
  closing.marks.delete(router);
  evict(closing, (owner) => owner === router);
}

/**
 * The same life of a router has a link again. Both sides have ended all that was under way when the link was lost, so it
 * only brings keys that are new or have a tombstone.
 */
export function unburyRouter(closing: Closing, router: Epoch): void {
  closing.deadRouters = closing.deadRouters.filter((dead) => dead !== router);
}

/** A peer's life is over: so is every message to it. */
export function dropUnwindsOf(closing: Closing, epoch: Epoch): void {
  for (const [key, entry] of closing.unwinds) {
    if (entry.peer.epoch === epoch) closing.unwinds.delete(key);
  }
}

/** Make everything unacknowledged to `epoch` (a peer or a router) due now: its link was made anew. */
export function hastenResends(closing: Closing, epoch: Epoch, nowMs: number): void {
  for (const entry of closing.unwinds.values()) {
    if (entry.peer.epoch === epoch) entry.resend.atMs = nowMs;
  }
  for (const ending of closing.endings.values()) {
    if (ending.router === epoch) ending.resend.atMs = nowMs;
  }
}

function evict(closing: Closing, isOver: (router: Epoch, sequence: number) => boolean): void {
  for (const key of closing.tombstones.keys()) {
    const parts = parseKey(key);
    if (parts === null || isOver(parts.router, parts.sequence)) closing.tombstones.delete(key);
  }
  for (const key of closing.endings.keys()) {
    const parts = parseKey(key);
    if (parts === null || isOver(parts.router, parts.sequence)) closing.endings.delete(key);
  }
}
