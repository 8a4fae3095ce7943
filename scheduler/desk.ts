/**
 * Desk: what prefill and decode scheduler do alike. It knows which peers are linked, what remains of
 * rooms that are over (transfer/closing.ts), and how to say `end` to a router and ABORT to a peer.
 */

import {
  applyMark,
  bury,
  buryRouter,
  buryUnseen,
  createClosing,
  dropUnwindsOf,
  hastenResends,
  isClosed,
  isDue,
  startResend,
  unburyRouter,
  type Closing,
} from '../transfer/closing.ts';
import {
  parseKey,
  type Epoch,
  type Instance,
  type Outcome,
  type PeerMessage,
  type Reason,
  type RoomKey,
} from '../transfer/messages.ts';
import type { DropCounts, WorkerEffect, WorkerLimits } from './types.ts';

/** Our own pause that is forgiven: a longer gap between ticks extends every deadline by it, once. */
const FORGIVEN_GAP_MS = 1000;

export interface Desk {
  self: Instance;
  /** Linked peers by name. */
  peers: Map<string, Epoch>;
  closing: Closing;
  drops: DropCounts;
  /** Ledger violations so far; production only, tests throw. */
  violations: number;
  draining: boolean;
  lastTickMs: number | null;
}

export function createDesk(self: Instance): Desk {
  return {
    self,
    peers: new Map(),
    closing: createClosing(),
    drops: {
      late: 0,
      duplicate: 0,
      unknown: 0,
      staleEpoch: 0,
      badChecksum: 0,
      protocol: 0,
      ignored: 0,
    },
    violations: 0,
    draining: false,
    lastTickMs: null,
  };
}

/** True if the message is from a linked life of that peer to this life of ours; else it is counted and dropped. */
export function isCurrent(desk: Desk, peer: Instance, message: PeerMessage): boolean {
  if (desk.peers.get(peer.name) === peer.epoch && message.from === peer.epoch && message.to === desk.self.epoch) {
    return true;
  }
  desk.drops.staleEpoch++;
  return false;
}

/** True if a newer life of this peer has spoken, so that `peer` is dead. */
export function isSuperseded(desk: Desk, peer: Instance): boolean {
  return (desk.peers.get(peer.name) ?? '') > peer.epoch;
}

/** Tell the router that its half is over, until it acknowledges. Nothing is said to a dead router. */
export function reportEnd(
  desk: Desk,
  { key, outcome, tokenCount }: { key: RoomKey; outcome: Outcome; tokenCount: number },
  nowMs: number,
  limits: WorkerLimits,
  effects: WorkerEffect[],
): void {
  const router = parseKey(key)?.router;
  if (router === undefined || desk.closing.deadRouters.includes(router)) return;
  const message = { type: 'end', key, epoch: desk.self.epoch, outcome, tokenCount } as const;
  desk.closing.endings.set(key, { router, message, resend: startResend(nowMs, limits) });
  effects.push({ type: 'report', router, message });
}

/** Answer a submit or cancel for a key without a room: `end`, from the tombstone, which is written if missing. */
export function reportClosed(
  desk: Desk,
  key: RoomKey,
  reason: Reason,
  nowMs: number,
  limits: WorkerLimits,
  effects: WorkerEffect[],
): void {
  buryUnseen(desk.closing, key, reason);
  const tombstone = desk.closing.tombstones.get(key);
  if (tombstone === undefined) {
    desk.drops.late++; // below the router's own mark: it does not wait for an answer
    return;
  }
  reportEnd(desk, { key, ...tombstone }, nowMs, limits, effects);
}

/** A room was stopped: close its key and, unless the peer knows or is dead, send ABORT until acknowledged. */
export function enterUnwinding(
  desk: Desk,
  {
    key,
    peer,
    reason,
    tellPeer,
    tokenCount,
    socket,
  }: {
    key: RoomKey;
    peer: Instance;
    reason: Reason;
    tellPeer: boolean;
    tokenCount: number;
    socket: 'control' | 'data';
  },
  nowMs: number,
  limits: WorkerLimits,
  effects: WorkerEffect[],
): void {
  bury(desk.closing, key, { ok: false, reason }, tokenCount);
  if (!tellPeer) return;
  const message = {
    type: 'ABORT',
    from: desk.self.epoch,
    to: peer.epoch,
    key,
    reason,
  } as const;
  const resend = startResend(nowMs, limits);
  desk.closing.unwinds.set(key, { peer, message, resend, sinceMs: nowMs, strandedBytes: 0, returned: false });
  effects.push({ type: 'send', peer, socket, message });
}

/** `peer_up`: everything unacknowledged is due now. */
export function linkPeer(desk: Desk, peer: Instance, nowMs: number): void {
  desk.peers.set(peer.name, peer.epoch);
  hastenResends(desk.closing, peer.epoch, nowMs);
}

/** `peer_lost`: nothing more is owed to that life. */
export function unlinkPeer(desk: Desk, peer: Instance): void {
  if (desk.peers.get(peer.name) === peer.epoch) desk.peers.delete(peer.name);
  dropUnwindsOf(desk.closing, peer.epoch);
}

/** The router messages that do not touch a room. */
export function onRouterNote(
  desk: Desk,
  router: Epoch,
  message: { type: 'end_ack'; key: RoomKey } | { type: 'mark'; smallestSequence: number } | { type: 'drain' },
): void {
  if (message.type === 'end_ack') desk.closing.endings.delete(message.key);
  else if (message.type === 'mark') applyMark(desk.closing, router, message.smallestSequence);
  else desk.draining = true;
}

/** `router_up`: its rooms may come (again). */
export function linkRouter(desk: Desk, router: Epoch): void {
  unburyRouter(desk.closing, router);
}

/** `router_lost`: its rooms are stopped by the caller first, so that no tombstone is missing meanwhile. */
export function unlinkRouter(desk: Desk, router: Epoch, isDead: boolean): void {
  buryRouter(desk.closing, router, isDead);
}

/**
 * Re-send what is due, and forget messages to peers that have had no link to us for a lease: they were
 * never told anything that could keep the room alive, and our tombstone answers if they come.
 */
export function tickDesk(
  desk: Desk,
  nowMs: number,
  abortSocket: 'control' | 'data',
  limits: WorkerLimits,
  effects: WorkerEffect[],
): void {
  for (const [key, { peer, message, resend, sinceMs }] of desk.closing.unwinds) {
    const isLinked = desk.peers.get(peer.name) === peer.epoch;
    if (!isLinked && nowMs - sinceMs >= limits.leaseMs) {
      desk.closing.unwinds.delete(key);
    } else if (isDue(resend, nowMs, limits)) {
      const socket = message.type === 'ABORT' ? abortSocket : 'control';
      effects.push({ type: 'send', peer, socket, message });
    }
  }
  for (const { router, message, resend } of desk.closing.endings.values()) {
    if (isDue(resend, nowMs, limits)) effects.push({ type: 'report', router, message });
  }
}

/** How much every deadline is to be moved: our own pause since the last tick, if it was a long one. */
export function ownPauseMs(desk: Desk, nowMs: number): number {
  const gapMs = nowMs - (desk.lastTickMs ?? nowMs);
  desk.lastTickMs = nowMs;
  return gapMs > FORGIVEN_GAP_MS ? gapMs : 0;
}

/** Count a message for a key without a room. */
export function countStray(desk: Desk, key: RoomKey): void {
  if (isClosed(desk.closing, key)) desk.drops.late++;
  else desk.drops.unknown++;
}

/** Hand ledger violations to the worker. */
export function reportViolations(
  desk: Desk,
  key: RoomKey,
  violations: readonly string[],
  effects: WorkerEffect[],
): void {
  desk.violations += violations.length;
  for (const what of violations) effects.push({ type: 'violation', key, what });
}
