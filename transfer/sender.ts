/**
 * Sender: the prefill half of a room's transfer.
 *
 *   bootstrapping   submit and OPEN in either order, then RESERVED
 *   waiting         for pages and a slot on this worker
 *   transferring    computing (but for what is cached), reading and sending units, then END until DONE
 *   unwinding       stopped; a read or a step still refers to the pages
 *   ended           nothing refers to them
 *
 * Pages and slot belong to the scheduler (scheduler/prefill.ts), which also pulls reads with
 * `nextRead` so that all rooms share the staging. Units go out in manifest order, a page once its last
 * token is computed, the slot after the last chunk of the prompt, and never beyond the peer's credit.
 */

import { combineChecksums } from './checksum.ts';
import { roomDeadline } from './clock.ts';
import { isDue, startResend, type Resend } from './closing.ts';
import {
  manifestBytes,
  unitBytes,
  type Epoch,
  type Instance,
  type Manifest,
  type Outcome,
  type PackedChoices,
  type PeerMessage,
  type Reason,
  type RoomKey,
  type TokenChoice,
} from './messages.ts';

export type SenderPhase = 'bootstrapping' | 'waiting' | 'transferring' | 'unwinding' | 'ended';

/** A contiguous range of units. */
export interface UnitRange {
  firstUnit: number;
  unitCount: number;
}

export interface Sender {
  key: RoomKey;
  self: Epoch;
  peer: Instance;
  phase: SenderPhase;
  digest: string;
  tokenCount: number;
  /** Submit was seen: the router expects an `end`. */
  submitted: boolean;
  /** OPEN was seen. */
  opened: boolean;
  manifest: Manifest | null;
  /** Bytes granted in total. */
  creditBytes: number;
  /** Bytes of units read or being read; never above the credit. */
  readBytes: number;
  /** Units [0, nextUnit) were read or are being read. */
  nextUnit: number;
  /** Reads that have not come back. */
  reads: UnitRange[];
  /** By unit, 0 where not read yet. */
  checksums: number[];
  sentUnits: number;
  chunkCount: number;
  computedTokens: number;
  firstToken: number | null;
  /** Of the first token, if the request asked for it. */
  firstChoice: TokenChoice | null;
  /** Of the prompt, if the request asked for it. */
  promptChoices: PackedChoices | null;
  /** A step that writes our pages is under way. */
  stepping: boolean;
  /** Set from the first END on. */
  endResend: Resend | null;
  stopReason: Reason | null;
  /** Time in a queue, here or at the peer, excluded. */
  roomDeadlineMs: number;
  /** Runs only while there is something we could send. */
  stallDeadlineMs: number | null;
  statusDueMs: number;
}

export interface SenderLimits {
  pageTokens: number;
  pageBytes: number;
  slotBytes: number;
  stallMs: number;
  roomMs: number;
  statusMs: number;
  resendMinMs: number;
  resendMaxMs: number;
}

export type SenderEvent =
  | { type: 'submit'; digest: string; tokenCount: number; nowMs: number }
  | { type: 'message'; message: PeerMessage; nowMs: number }
  /** Own pages and slot are lent. */
  | { type: 'admitted'; nowMs: number }
  /** Tokens up to here need not be computed: their pages are there. */
  | { type: 'cached'; computedTokens: number }
  | { type: 'step_started' }
  /** `firstToken` is null until the last chunk. */
  | {
      type: 'computed';
      computedTokens: number;
      firstToken: number | null;
      firstChoice?: TokenChoice | undefined;
      promptChoices?: PackedChoices | undefined;
      nowMs: number;
    }
  | { type: 'read_done'; firstUnit: number; checksums: number[]; nowMs: number }
  | { type: 'peer_up'; nowMs: number }
  | { type: 'stop'; reason: Reason; tellPeer: boolean; nowMs: number }
  | { type: 'tick'; nowMs: number };

export type SenderEffect =
  | { type: 'send'; socket: 'control' | 'data'; message: PeerMessage }
  | { type: 'discard'; firstUnit: number; unitCount: number }
  /** Queue for pages and a slot. */
  | { type: 'waiting' }
  /** Write the tombstone; with `tellPeer`, send ABORT until acknowledged. */
  | { type: 'stopped'; reason: Reason; tellPeer: boolean }
  /** Release everything and tell the router. The last effect of a sender. */
  | { type: 'ended'; outcome: Outcome }
  | { type: 'drop'; kind: 'duplicate' | 'protocol' | 'ignored' };

/** A sender created by its router's submit or by its peer's OPEN; that event is stepped next. */
export function createSender(
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
  limits: SenderLimits,
): Sender {
  return {
    key,
    self,
    peer,
    phase: 'bootstrapping',
    digest,
    tokenCount,
    submitted: false,
    opened: false,
    manifest: null,
    creditBytes: 0,
    readBytes: 0,
    nextUnit: 0,
    reads: [],
    checksums: [],
    sentUnits: 0,
    chunkCount: 0,
    computedTokens: 0,
    firstToken: null,
    firstChoice: null,
    promptChoices: null,
    stepping: false,
    endResend: null,
    stopReason: null,
    roomDeadlineMs: nowMs + limits.roomMs,
    stallDeadlineMs: null,
    statusDueMs: nowMs + limits.statusMs,
  };
}

/** Step a sender. Effects are in order. */
export function stepSender(sender: Sender, event: SenderEvent, limits: SenderLimits): SenderEffect[] {
  switch (event.type) {
    case 'submit':
      return onSubmit(sender, event, limits);
    case 'message':
      return onMessage(sender, event.message, event.nowMs, limits);
    case 'admitted':
      if (sender.phase !== 'waiting') return unexpected(sender, event.type);
      sender.phase = 'transferring';
      sender.statusDueMs = event.nowMs + limits.statusMs;
      return [{ type: 'send', socket: 'control', message: queued(sender, 'computing') }];
    case 'cached':
      if (sender.phase !== 'transferring' || sender.stepping || sender.firstToken !== null) {
        return unexpected(sender, event.type);
      }
      sender.computedTokens = event.computedTokens;
      return [];
    case 'step_started':
      if (sender.phase !== 'transferring' || sender.stepping) return unexpected(sender, event.type);
      sender.stepping = true;
      return [];
    case 'computed':
      if (!sender.stepping) return unexpected(sender, event.type);
      sender.stepping = false;
      if (sender.phase === 'unwinding') return finishUnwinding(sender);
      sender.computedTokens = event.computedTokens;
      sender.firstToken = event.firstToken;
      sender.firstChoice = event.firstChoice ?? null;
      sender.promptChoices = event.promptChoices ?? null;
      renewStall(sender, event.nowMs, limits);
      return [];
    case 'read_done':
      return onReadDone(sender, event, limits);
    case 'peer_up':
      if (sender.endResend !== null && sender.phase === 'transferring') {
        sender.endResend = startResend(event.nowMs, limits);
        return [{ type: 'send', socket: 'data', message: end(sender) }];
      }
      return [];
    case 'stop':
      return stop(sender, event.reason, event.tellPeer);
    case 'tick':
      return onTick(sender, event.nowMs, limits);
    default:
      throw new Error(`unknown event ${JSON.stringify(event satisfies never)}`);
  }
}

/**
 * The next units to read, or null: computed, within the credit, at most `maxBytes` (but at least one
 * unit if `maxBytes` is positive). The scheduler turns the range into places and must answer with read_done.
 */
export function nextRead(sender: Sender, maxBytes: number, nowMs: number, limits: SenderLimits): UnitRange | null {
  const { manifest } = sender;
  if (sender.phase !== 'transferring' || manifest === null || maxBytes <= 0) return null;
  const end = readableEnd(sender, manifest, limits);
  const firstUnit = sender.nextUnit;
  let bytes = 0;
  let unit = firstUnit;
  for (; unit < end; unit++) {
    const size = unitBytes(manifest, unit);
    if (unit > firstUnit && bytes + size > maxBytes) break;
    if (sender.readBytes + bytes + size > sender.creditBytes) break;
    bytes += size;
  }
  if (unit === firstUnit) return null;
  const range = { firstUnit, unitCount: unit - firstUnit };
  sender.nextUnit = unit;
  sender.readBytes += bytes;
  sender.reads.push(range);
  // From here on the engine owes us a read; the clock starts unless it already runs.
  sender.stallDeadlineMs ??= nowMs + limits.stallMs;
  return range;
}

/** Bytes of reads that have not come back. */
export function readingBytes(sender: Sender): number {
  const { manifest } = sender;
  if (manifest === null) return 0;
  let bytes = 0;
  for (const { firstUnit, unitCount } of sender.reads) {
    for (let unit = firstUnit; unit < firstUnit + unitCount; unit++) bytes += unitBytes(manifest, unit);
  }
  return bytes;
}

/** Units that are computed, so may be read: full pages, and everything once the first token exists. */
function readableEnd(sender: Sender, manifest: Manifest, limits: SenderLimits): number {
  if (sender.firstToken !== null) return manifest.pageCount + 1;
  return Math.floor(sender.computedTokens / limits.pageTokens);
}

function onSubmit(
  sender: Sender,
  event: { digest: string; tokenCount: number; nowMs: number },
  limits: SenderLimits,
): SenderEffect[] {
  if (sender.submitted || sender.phase === 'unwinding' || sender.phase === 'ended') {
    sender.submitted = true;
    return [{ type: 'drop', kind: 'duplicate' }];
  }
  sender.submitted = true;
  if (event.digest !== sender.digest || event.tokenCount !== sender.tokenCount) {
    return stop(sender, 'mismatch', true);
  }
  return becomeWaiting(sender, event.nowMs, limits);
}

function onMessage(sender: Sender, message: PeerMessage, nowMs: number, limits: SenderLimits): SenderEffect[] {
  if (sender.phase === 'unwinding' || sender.phase === 'ended') {
    // Our ABORT is on its way and answers everything; ABORT and DONE themselves are acknowledged by the caller.
    return [{ type: 'drop', kind: 'ignored' }];
  }
  switch (message.type) {
    case 'OPEN':
      if (message.digest !== sender.digest || message.tokenCount !== sender.tokenCount) {
        return stop(sender, 'mismatch', true);
      }
      sender.opened = true;
      return [{ type: 'send', socket: 'control', message: queued(sender, status(sender)) }];
    case 'QUEUED':
      // Time spent in the peer's queue is not ours.
      if (sender.phase === 'bootstrapping') sender.roomDeadlineMs = nowMs + limits.roomMs;
      return [];
    case 'RESERVED':
      return onReserved(sender, message.manifest, message.credit, nowMs, limits);
    case 'CREDIT':
      if (sender.manifest === null) return [{ type: 'drop', kind: 'protocol' }];
      if (message.bytes > manifestBytes(sender.manifest)) return stop(sender, 'protocol', true);
      if (message.bytes <= sender.creditBytes) return [{ type: 'drop', kind: 'duplicate' }];
      sender.creditBytes = message.bytes;
      return [];
    case 'DONE':
      if (sender.endResend === null) return stop(sender, 'protocol', true);
      sender.phase = 'ended';
      return [{ type: 'ended', outcome: { ok: true, finish: 'sent' } }];
    case 'ABORT':
      return stop(sender, 'peer_aborted', false);
    case 'CHUNK':
    case 'END':
    case 'DONE_ACK':
      return [{ type: 'drop', kind: 'protocol' }];
    case 'ABORT_ACK':
      return [{ type: 'drop', kind: 'ignored' }];
    default:
      throw new Error(`unknown message ${JSON.stringify(message satisfies never)}`);
  }
}

function onReserved(
  sender: Sender,
  manifest: Manifest,
  credit: number,
  nowMs: number,
  limits: SenderLimits,
): SenderEffect[] {
  // Without OPEN we do not know that the prompts agree; the peer sends both again.
  if (!sender.opened) return [{ type: 'drop', kind: 'ignored' }];
  const answer: SenderEffect = {
    type: 'send',
    socket: 'control',
    message: queued(sender, status(sender)),
  };
  if (sender.manifest !== null) {
    if (!sameManifest(sender.manifest, manifest)) return stop(sender, 'protocol', true);
    return [{ type: 'drop', kind: 'duplicate' }, answer];
  }
  if (!fits(manifest, sender.tokenCount, limits) || credit > manifestBytes(manifest)) {
    return stop(sender, 'mismatch', true);
  }
  sender.manifest = manifest;
  sender.creditBytes = credit;
  sender.checksums = manifest.generations.map(() => 0);
  return [answer, ...becomeWaiting(sender, nowMs, limits)];
}

function becomeWaiting(sender: Sender, nowMs: number, limits: SenderLimits): SenderEffect[] {
  if (!sender.submitted || sender.manifest === null) return [];
  sender.phase = 'waiting';
  sender.roomDeadlineMs = roomDeadline(nowMs, sender.tokenCount, limits);
  sender.statusDueMs = nowMs + limits.statusMs;
  return [{ type: 'waiting' }];
}

function onReadDone(
  sender: Sender,
  { firstUnit, checksums, nowMs }: { firstUnit: number; checksums: number[]; nowMs: number },
  limits: SenderLimits,
): SenderEffect[] {
  const { manifest } = sender;
  const index = sender.reads.findIndex((read) => read.firstUnit === firstUnit);
  const range = sender.reads[index];
  if (manifest === null || range === undefined || range.unitCount !== checksums.length) {
    return unexpected(sender, 'read_done');
  }
  sender.reads.splice(index, 1);
  if (sender.phase === 'unwinding') {
    return [{ type: 'discard', ...range }, ...finishUnwinding(sender)];
  }
  const unitEnd = firstUnit + range.unitCount;
  let payloadBytes = 0;
  for (let unit = firstUnit; unit < unitEnd; unit++) {
    sender.checksums[unit] = checksums[unit - firstUnit] as number;
    payloadBytes += unitBytes(manifest, unit);
  }
  sender.sentUnits += range.unitCount;
  renewStall(sender, nowMs, limits);
  const effects: SenderEffect[] = [
    {
      type: 'send',
      socket: 'data',
      message: {
        type: 'CHUNK',
        from: sender.self,
        to: sender.peer.epoch,
        key: sender.key,
        sequence: sender.chunkCount++,
        firstUnit,
        generations: manifest.generations.slice(firstUnit, unitEnd),
        checksums,
        payloadBytes,
      },
    },
  ];
  if (sender.sentUnits === manifest.pageCount + 1) {
    sender.endResend = startResend(nowMs, limits);
    sender.stallDeadlineMs = null;
    effects.push({ type: 'send', socket: 'data', message: end(sender) });
  }
  return effects;
}

/** Enter unwinding, whatever the cause. Idempotent: a stopped or ended sender ignores it. */
function stop(sender: Sender, reason: Reason, tellPeer: boolean): SenderEffect[] {
  if (sender.phase === 'unwinding' || sender.phase === 'ended') return [];
  sender.phase = 'unwinding';
  sender.stopReason = reason;
  sender.endResend = null;
  sender.stallDeadlineMs = null;
  return [{ type: 'stopped', reason, tellPeer }, ...finishUnwinding(sender)];
}

/** Pages stay held until no read and no step refers to them: the next room would overwrite what is being read. */
function finishUnwinding(sender: Sender): SenderEffect[] {
  if (sender.reads.length > 0 || sender.stepping) return [];
  sender.phase = 'ended';
  return [{ type: 'ended', outcome: { ok: false, reason: sender.stopReason as Reason } }];
}

function onTick(sender: Sender, nowMs: number, limits: SenderLimits): SenderEffect[] {
  if (sender.phase === 'unwinding' || sender.phase === 'ended') return [];
  if (nowMs >= sender.roomDeadlineMs || nowMs >= (sender.stallDeadlineMs ?? Infinity)) {
    return stop(sender, 'deadline', true);
  }
  if (sender.endResend !== null) {
    if (!isDue(sender.endResend, nowMs, limits)) return [];
    return [{ type: 'send', socket: 'data', message: end(sender) }];
  }
  // Nothing is said once all is computed: then only units count as progress at the peer.
  if (sender.phase === 'bootstrapping' || sender.firstToken !== null) return [];
  if (nowMs < sender.statusDueMs) return [];
  sender.statusDueMs = nowMs + limits.statusMs;
  // As time in the peer's queue.
  if (sender.phase === 'waiting') sender.roomDeadlineMs = roomDeadline(nowMs, sender.tokenCount, limits);
  return [{ type: 'send', socket: 'control', message: queued(sender, status(sender)) }];
}

/** Progress was made. The clock runs on only if something of ours is still being read. */
function renewStall(sender: Sender, nowMs: number, limits: SenderLimits): void {
  sender.stallDeadlineMs = sender.reads.length > 0 ? nowMs + limits.stallMs : null;
}

function status(sender: Sender): 'waiting' | 'computing' {
  return sender.phase === 'transferring' ? 'computing' : 'waiting';
}

function queued(sender: Sender, state: 'waiting' | 'computing'): PeerMessage {
  return { type: 'QUEUED', from: sender.self, to: sender.peer.epoch, key: sender.key, state };
}

function end(sender: Sender): PeerMessage {
  return {
    type: 'END',
    from: sender.self,
    to: sender.peer.epoch,
    key: sender.key,
    unitCount: sender.sentUnits,
    tokenCount: sender.tokenCount,
    digest: sender.digest,
    firstToken: sender.firstToken as number,
    firstChoice: sender.firstChoice,
    promptChoices: sender.promptChoices,
    checksum: combineChecksums(sender.checksums),
  };
}

function sameManifest(a: Manifest, b: Manifest): boolean {
  return (
    a.tokenCount === b.tokenCount &&
    a.validInLastPage === b.validInLastPage &&
    a.pageCount === b.pageCount &&
    a.pageBytes === b.pageBytes &&
    a.slotBytes === b.slotBytes &&
    a.generations.every((generation, unit) => generation === b.generations[unit])
  );
}

/** Unequal sizes are an error, never truncation. */
function fits(manifest: Manifest, tokenCount: number, limits: SenderLimits): boolean {
  const pageCount = Math.ceil(tokenCount / limits.pageTokens);
  return (
    manifest.tokenCount === tokenCount &&
    manifest.pageCount === pageCount &&
    manifest.validInLastPage === tokenCount - (pageCount - 1) * limits.pageTokens &&
    manifest.pageBytes === limits.pageBytes &&
    manifest.slotBytes === limits.slotBytes
  );
}

/** Our own code lied: these events come from the scheduler, never from outside. */
function unexpected(sender: Sender, what: string): never {
  throw new Error(`sender ${sender.key}: ${what} in phase ${sender.phase}`);
}
