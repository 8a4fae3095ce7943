/**
 * Receiver: the decode half of a room's transfer.
 *
 *   queued          OPEN until answered, then in the prealloc queue until pages and slot are lent
 *   bootstrapping   RESERVED until answered
 *   transferring    units arrive and are written; credit grows with them
 *   unwinding       stopped; a write still refers to the pages
 *   ended           ready (everything written and proved complete), or nothing refers to the pages
 *
 * The receiver copies from the message into the page, so a late write is impossible: a unit is written
 * only while its room is live, under the generation it was promised with, and once.
 */

import { combineChecksums, crc32c } from './checksum.ts';
import { roomDeadline } from './clock.ts';
import { isDue, startResend, type Resend } from './closing.ts';
import {
  manifestBytes,
  unitBytes,
  type ChunkMessage,
  type EndMessage,
  type Epoch,
  type Instance,
  type Manifest,
  type PackedChoices,
  type PeerMessage,
  type Reason,
  type RoomKey,
  type TokenChoice,
} from './messages.ts';

export type ReceiverPhase = 'queued' | 'bootstrapping' | 'transferring' | 'unwinding' | 'ended';

/** A unit's way: not seen, being written, written. */
export type UnitState = 'missing' | 'writing' | 'written';

export interface Receiver {
  key: RoomKey;
  self: Epoch;
  peer: Instance;
  phase: ReceiverPhase;
  digest: string;
  tokenCount: number;
  /** OPEN was answered: the room is in the prealloc queue. */
  answered: boolean;
  manifest: Manifest | null;
  /** Credit sent in RESERVED, which is repeated unchanged. */
  reservedBytes: number;
  /** Bytes granted in total. */
  grantedBytes: number;
  /** The grant before the latest: once more than this has arrived, the peer has seen the latest. */
  grantedBeforeBytes: number;
  /** Bytes that have arrived (being written or written), and that were written. */
  arrivedBytes: number;
  settledBytes: number;
  units: UnitState[];
  checksums: number[];
  /** END, once it was seen and is consistent with the manifest. */
  end: EndMessage | null;
  /** Of OPEN, RESERVED or CREDIT: whichever is unanswered. */
  resend: Resend | null;
  stopReason: Reason | null;
  /** Time in a queue, here or at the peer, excluded. */
  roomDeadlineMs: number;
  /** Runs from the first unit on. */
  stallDeadlineMs: number | null;
  statusDueMs: number;
}

export interface ReceiverLimits {
  stallMs: number;
  roomMs: number;
  statusMs: number;
  resendMinMs: number;
  resendMaxMs: number;
}

export type ReceiverEvent =
  /** Pages and slot are lent, `creditBytes` are set aside. */
  | { type: 'reserved'; manifest: Manifest; creditBytes: number; nowMs: number }
  /** The scheduler grants more; `grantedBytes` in total. */
  | { type: 'granted'; grantedBytes: number; nowMs: number }
  | { type: 'message'; message: PeerMessage; payload: Uint8Array; nowMs: number }
  | { type: 'written'; unit: number; nowMs: number }
  | { type: 'peer_up'; nowMs: number }
  | { type: 'stop'; reason: Reason; tellPeer: boolean; nowMs: number }
  | { type: 'tick'; nowMs: number };

export type ReceiverDrop = 'duplicate' | 'unknown' | 'badChecksum' | 'protocol' | 'ignored';

export type ReceiverEffect =
  | { type: 'send'; message: PeerMessage }
  /** OPEN was answered: queue for pages and a slot. */
  | { type: 'queued' }
  | { type: 'write'; unit: number; payload: Uint8Array }
  /** Complete and proved; pages and slot go to the sequence. Send DONE until acknowledged. Last effect. */
  | { type: 'ready'; firstToken: number; firstChoice: TokenChoice | null; promptChoices: PackedChoices | null }
  /** Write the tombstone; with `tellPeer`, send ABORT until acknowledged. */
  | { type: 'stopped'; reason: Reason; tellPeer: boolean }
  /** Release everything and tell the router. Last effect. */
  | { type: 'ended'; reason: Reason }
  | { type: 'drop'; kind: ReceiverDrop };

/** A receiver, made by its router's submit, and its first effect: OPEN. */
export function createReceiver(
  {
    key,
    self,
    peer,
    tokenCount,
    digest,
  }: {
    key: RoomKey;
    self: Epoch;
    peer: Instance;
    tokenCount: number;
    digest: string;
  },
  nowMs: number,
  limits: ReceiverLimits,
): { receiver: Receiver; effects: ReceiverEffect[] } {
  const receiver: Receiver = {
    key,
    self,
    peer,
    phase: 'queued',
    digest,
    tokenCount,
    answered: false,
    manifest: null,
    reservedBytes: 0,
    grantedBytes: 0,
    grantedBeforeBytes: 0,
    arrivedBytes: 0,
    settledBytes: 0,
    units: [],
    checksums: [],
    end: null,
    resend: startResend(nowMs, limits),
    stopReason: null,
    roomDeadlineMs: roomDeadline(nowMs, tokenCount, limits),
    stallDeadlineMs: null,
    statusDueMs: nowMs + limits.statusMs,
  };
  return { receiver, effects: [{ type: 'send', message: pending(receiver) as PeerMessage }] };
}

/** Step a receiver. Effects are in order. */
export function stepReceiver(receiver: Receiver, event: ReceiverEvent, limits: ReceiverLimits): ReceiverEffect[] {
  switch (event.type) {
    case 'reserved':
      if (receiver.phase !== 'queued' || !receiver.answered) return unexpected(receiver, event.type);
      receiver.phase = 'bootstrapping';
      receiver.manifest = event.manifest;
      receiver.reservedBytes = event.creditBytes;
      receiver.grantedBytes = event.creditBytes;
      receiver.units = event.manifest.generations.map(() => 'missing');
      receiver.checksums = event.manifest.generations.map(() => 0);
      return sendPending(receiver, event.nowMs, limits);
    case 'granted':
      if (receiver.phase !== 'transferring' || event.grantedBytes <= receiver.grantedBytes) {
        return unexpected(receiver, event.type);
      }
      receiver.grantedBeforeBytes = receiver.grantedBytes;
      receiver.grantedBytes = event.grantedBytes;
      return sendPending(receiver, event.nowMs, limits);
    case 'message':
      return onMessage(receiver, event, limits);
    case 'written':
      return onWritten(receiver, event.unit);
    case 'peer_up':
      if (receiver.resend === null || isOver(receiver)) return [];
      return sendPending(receiver, event.nowMs, limits);
    case 'stop':
      return stop(receiver, event.reason, event.tellPeer);
    case 'tick':
      return onTick(receiver, event.nowMs, limits);
    default:
      throw new Error(`unknown event ${JSON.stringify(event satisfies never)}`);
  }
}

/** Bytes the peer may still have under way to us for this room. */
export function outstandingBytes(receiver: Receiver): number {
  return receiver.grantedBytes - receiver.settledBytes;
}

function onMessage(
  receiver: Receiver,
  event: { message: PeerMessage; payload: Uint8Array; nowMs: number },
  limits: ReceiverLimits,
): ReceiverEffect[] {
  // Our ABORT is on its way and answers everything; ABORT itself is acknowledged by the caller.
  if (isOver(receiver)) return [{ type: 'drop', kind: 'ignored' }];
  const { message, nowMs } = event;
  switch (message.type) {
    case 'QUEUED':
      return onQueued(receiver, message.state, nowMs, limits);
    case 'CHUNK':
      return onChunk(receiver, message, event.payload, nowMs, limits);
    case 'END':
      return onEnd(receiver, message, nowMs, limits);
    case 'ABORT':
      return stop(receiver, 'peer_aborted', false);
    case 'OPEN':
    case 'RESERVED':
    case 'CREDIT':
    case 'DONE':
    case 'DONE_ACK':
      return [{ type: 'drop', kind: 'protocol' }];
    case 'ABORT_ACK':
      return [{ type: 'drop', kind: 'ignored' }];
    default:
      throw new Error(`unknown message ${JSON.stringify(message satisfies never)}`);
  }
}

function onQueued(
  receiver: Receiver,
  state: 'waiting' | 'computing',
  nowMs: number,
  limits: ReceiverLimits,
): ReceiverEffect[] {
  if (state === 'waiting') receiver.roomDeadlineMs = roomDeadline(nowMs, receiver.tokenCount, limits);
  else if (receiver.stallDeadlineMs !== null) receiver.stallDeadlineMs = nowMs + limits.stallMs;
  if (receiver.phase === 'queued' && !receiver.answered) {
    receiver.answered = true;
    receiver.resend = null;
    return [{ type: 'queued' }];
  }
  // A QUEUED that answers an OPEN sent twice looks like one that answers RESERVED. Believing it is
  // harmless only if RESERVED did arrive, which the peer proves by saying `computing` or by a unit;
  // so `waiting` slows the re-sends down (they double up to the largest gap) but does not stop them.
  if (receiver.phase === 'bootstrapping' && state === 'computing') receiver.resend = null;
  return [];
}

function onChunk(
  receiver: Receiver,
  chunk: ChunkMessage,
  payload: Uint8Array,
  nowMs: number,
  limits: ReceiverLimits,
): ReceiverEffect[] {
  const { manifest } = receiver;
  if (manifest === null || receiver.phase === 'queued') return [{ type: 'drop', kind: 'protocol' }];
  const unitCount = chunk.generations.length;
  const unitEnd = chunk.firstUnit + unitCount;
  if (unitCount === 0 || unitEnd > receiver.units.length || chunk.checksums.length !== unitCount) {
    return [{ type: 'drop', kind: 'unknown' }];
  }
  let size = 0;
  for (let unit = chunk.firstUnit; unit < unitEnd; unit++) {
    if (chunk.generations[unit - chunk.firstUnit] !== manifest.generations[unit]) {
      return [{ type: 'drop', kind: 'unknown' }];
    }
    size += unitBytes(manifest, unit);
  }
  if (size !== payload.length) return [{ type: 'drop', kind: 'protocol' }];

  const effects: ReceiverEffect[] = [];
  let offset = 0;
  for (let unit = chunk.firstUnit; unit < unitEnd; unit++) {
    const bytes = unitBytes(manifest, unit);
    const checksum = chunk.checksums[unit - chunk.firstUnit] as number;
    const part = payload.subarray(offset, offset + bytes);
    offset += bytes;
    if (receiver.units[unit] !== 'missing') {
      if (checksum !== receiver.checksums[unit]) return [...effects, ...stop(receiver, 'protocol', true)];
      effects.push({ type: 'drop', kind: 'duplicate' });
      continue;
    }
    if (receiver.arrivedBytes + bytes > receiver.grantedBytes) {
      return [...effects, ...stop(receiver, 'protocol', true)];
    }
    if (crc32c(part) !== checksum) {
      // The header has a checksum of its own, so this is our room's data. A lost unit is never sent
      // again: ending the room now says why, where the stall clock would only say `deadline`.
      return [...effects, { type: 'drop', kind: 'badChecksum' }, ...stop(receiver, 'bad_checksum', true)];
    }
    receiver.units[unit] = 'writing';
    receiver.checksums[unit] = checksum;
    receiver.arrivedBytes += bytes;
    effects.push({ type: 'write', unit, payload: part });
    // A unit within the previous grant does not prove that the latest CREDIT arrived.
    if (receiver.arrivedBytes > receiver.grantedBeforeBytes) receiver.resend = null;
    receiver.phase = 'transferring';
    receiver.stallDeadlineMs = nowMs + limits.stallMs;
  }
  return effects;
}

function onEnd(receiver: Receiver, end: EndMessage, nowMs: number, limits: ReceiverLimits): ReceiverEffect[] {
  const { manifest } = receiver;
  if (manifest === null || receiver.phase === 'queued') return [{ type: 'drop', kind: 'protocol' }];
  if (
    end.unitCount !== receiver.units.length ||
    end.tokenCount !== receiver.tokenCount ||
    end.digest !== receiver.digest ||
    (receiver.end !== null && receiver.end.firstToken !== end.firstToken)
  ) {
    return stop(receiver, 'mismatch', true);
  }
  receiver.phase = 'transferring';
  receiver.resend = null;
  if (receiver.end !== null) return [{ type: 'drop', kind: 'duplicate' }];
  receiver.end = end;
  // Data is ordered, so a unit that is missing now was lost and will not come.
  receiver.stallDeadlineMs ??= nowMs + limits.stallMs;
  return finishIfComplete(receiver);
}

function onWritten(receiver: Receiver, unit: number): ReceiverEffect[] {
  const { manifest } = receiver;
  if (manifest === null || receiver.units[unit] !== 'writing') return unexpected(receiver, 'written');
  receiver.units[unit] = 'written';
  receiver.settledBytes += unitBytes(manifest, unit);
  if (receiver.phase === 'unwinding') return finishUnwinding(receiver);
  return finishIfComplete(receiver);
}

/** Ready: every unit written, and END agrees with what was written. Progress is a set of units, not a count. */
function finishIfComplete(receiver: Receiver): ReceiverEffect[] {
  const { end } = receiver;
  if (end === null || receiver.units.some((unit) => unit !== 'written')) return [];
  if (combineChecksums(receiver.checksums) !== end.checksum) return stop(receiver, 'mismatch', true);
  receiver.phase = 'ended';
  const { firstToken, firstChoice, promptChoices } = end;
  return [{ type: 'ready', firstToken, firstChoice, promptChoices }];
}

/** Enter unwinding, whatever the cause. Idempotent: a stopped or ended receiver ignores it. */
function stop(receiver: Receiver, reason: Reason, tellPeer: boolean): ReceiverEffect[] {
  if (isOver(receiver)) return [];
  receiver.phase = 'unwinding';
  receiver.stopReason = reason;
  receiver.resend = null;
  receiver.stallDeadlineMs = null;
  return [{ type: 'stopped', reason, tellPeer }, ...finishUnwinding(receiver)];
}

/** Pages stay held until no write refers to them: it would land in a page already given away. */
function finishUnwinding(receiver: Receiver): ReceiverEffect[] {
  if (receiver.units.includes('writing')) return [];
  receiver.phase = 'ended';
  return [{ type: 'ended', reason: receiver.stopReason as Reason }];
}

function onTick(receiver: Receiver, nowMs: number, limits: ReceiverLimits): ReceiverEffect[] {
  if (isOver(receiver)) return [];
  if (nowMs >= receiver.roomDeadlineMs || nowMs >= (receiver.stallDeadlineMs ?? Infinity)) {
    return stop(receiver, 'deadline', true);
  }
  if (receiver.resend !== null) {
    if (!isDue(receiver.resend, nowMs, limits)) return [];
    return [{ type: 'send', message: pending(receiver) as PeerMessage }];
  }
  if (receiver.phase !== 'queued' || nowMs < receiver.statusDueMs) return [];
  receiver.statusDueMs = nowMs + limits.statusMs;
  // Time in our own queue is not counted either: it says how busy we are, not that something is wrong.
  receiver.roomDeadlineMs = roomDeadline(nowMs, receiver.tokenCount, limits);
  const { self, peer, key } = receiver;
  return [{ type: 'send', message: { type: 'QUEUED', from: self, to: peer.epoch, key, state: 'waiting' } }];
}

function sendPending(receiver: Receiver, nowMs: number, limits: ReceiverLimits): ReceiverEffect[] {
  const message = pending(receiver);
  if (message === null) return [];
  receiver.resend = startResend(nowMs, limits);
  return [{ type: 'send', message }];
}

/** The message that waits for an answer in this phase. */
function pending(receiver: Receiver): PeerMessage | null {
  const { self: from, key, manifest } = receiver;
  const to = receiver.peer.epoch;
  switch (receiver.phase) {
    case 'queued':
      return {
        type: 'OPEN',
        from,
        to,
        key,
        digest: receiver.digest,
        tokenCount: receiver.tokenCount,
      };
    case 'bootstrapping':
      return {
        type: 'RESERVED',
        from,
        to,
        key,
        manifest: manifest as Manifest,
        credit: receiver.reservedBytes,
      };
    case 'transferring':
      return { type: 'CREDIT', from, to, key, bytes: receiver.grantedBytes };
    case 'unwinding':
    case 'ended':
      return null;
    default:
      throw new Error(`unknown phase ${String(receiver.phase satisfies never)}`);
  }
}

function isOver(receiver: Receiver): boolean {
  return receiver.phase === 'unwinding' || receiver.phase === 'ended';
}

/** Credit that makes the next unit possible whatever it is: D grants at least this to every reserved room. */
export function baseCreditBytes(manifest: Pick<Manifest, 'pageCount' | 'pageBytes' | 'slotBytes'>): number {
  return Math.min(Math.max(manifest.pageBytes, manifest.slotBytes), manifestBytes(manifest));
}

/** Our own code lied: these events come from the scheduler, never from outside. */
function unexpected(receiver: Receiver, what: string): never {
  throw new Error(`receiver ${receiver.key}: ${what} in phase ${receiver.phase}`);
}
