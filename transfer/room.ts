/**
 * The router's view of a room: one client request over all its attempts.
 *
 * The router alone decides the outcome, once; workers propose with `tokens` and `end`. One `Room` is
 * stepped by server/rooms.ts, which also owns the links and the client.
 *
 * | event       | from |
 * |-------------|------|
 * | pair        | the balancer's answer to `choose_pair` (and the very first event of a room) |
 * | no_pair     | the balancer has none; the room ends with the reason of the last attempt |
 * | accepted, tokens, end | a worker, by control channel; `epoch` says which life of it |
 * | worker_up   | control link to that epoch is there (again): unanswered messages are re-sent at once |
 * | worker_lost | that epoch is dead: counts as the end of its half |
 * | client_lost, client_cancel | the HTTP side; `client_cancel` with `finish` is a stop string found by the router |
 * | tick        | a timer |
 *
 * | effect      | performed by |
 * |-------------|--------------|
 * | send        | control channel: to the worker of that epoch |
 * | choose_pair | server/rooms.ts: ask the balancer, answer with `pair` or `no_pair` |
 * | deliver     | generation: new tokens for the client, in order, each once |
 * | outcome     | generation: the one and only outcome the client sees; nothing is delivered after it |
 * | close       | server/rooms.ts: both halves have ended; forget the room (this moves the smallest sequence in use) |
 */

import { isDue, startResend, type Resend, type ResendLimits } from './closing.ts';
import {
  makeKey,
  type Epoch,
  type Outcome,
  type PackedChoices,
  type Reason,
  type RoomId,
  type RoomKey,
  type RouterToWorker,
  type Salt,
  type SamplingParams,
  type SubmitMessage,
  type TokenChoice,
  type TokensRow,
  type WorkerRef,
} from './messages.ts';

export type RoomEvent =
  | { type: 'pair'; prefill: WorkerRef; decode: WorkerRef; nowMs: number }
  | { type: 'no_pair'; nowMs: number }
  | { type: 'accepted'; key: RoomKey; epoch: Epoch; nowMs: number }
  | ({ type: 'tokens'; epoch: Epoch; nowMs: number } & TokensRow)
  | { type: 'end'; key: RoomKey; epoch: Epoch; outcome: Outcome; tokenCount: number; nowMs: number }
  | { type: 'worker_up'; epoch: Epoch; nowMs: number }
  | { type: 'worker_lost'; epoch: Epoch; nowMs: number }
  | { type: 'client_lost'; nowMs: number }
  | { type: 'client_cancel'; finish: 'stop' | 'length' | null; nowMs: number }
  | { type: 'tick'; nowMs: number };

export type RoomEffect =
  | { type: 'send'; epoch: Epoch; message: RouterToWorker }
  /** `avoid`: lives that died or refused during this room. */
  | { type: 'choose_pair'; room: RoomId; attempt: number; avoid: Epoch[] }
  /** `choices`: one for each token, if the request asked for them; `promptChoices`: beside the first, likewise. */
  | { type: 'deliver'; position: number; tokens: number[]; choices?: TokenChoice[]; promptChoices?: PackedChoices }
  | { type: 'outcome'; outcome: Outcome; attempts: number; tokenCount: number }
  | { type: 'close' };

/**
 *   choosing   waits for `pair`
 *   running    an attempt is under way; also after the outcome, until both halves have ended
 *   ended      closed
 */
export type RoomPhase = 'choosing' | 'running' | 'ended';

/** What the client asked for, as both halves get it. */
export interface RoomRequest {
  digest: string;
  promptTokens: Uint32Array;
  maxTokens: number;
  stopTokens: number[];
  sampling: SamplingParams;
  salt: Salt;
}

/** One half of the attempt under way. */
export interface Half {
  worker: WorkerRef;
  /** How it ended; null until then. The death of its worker counts as an end. */
  outcome: Outcome | null;
  /** Unanswered message, re-sent until answered. */
  pending: { message: RouterToWorker; resend: Resend } | null;
}

export interface Room {
  room: RoomId;
  request: RoomRequest;
  deadlineMs: number;
  maxAttempts: number;
  phase: RoomPhase;
  /** The attempt under way, or the last one; 0 before the first. */
  attempt: number;
  prefill: Half | null;
  decode: Half | null;
  /** Tokens delivered to the client. */
  tokenCount: number;
  /** Decided once; nothing is delivered afterwards. */
  outcome: Outcome | null;
  /** Why the last attempt failed. */
  lastReason: Reason | null;
  avoid: Epoch[];
}

/** Reasons after which another attempt may do better. The others would repeat, or were wanted. */
const RETRYABLE: ReadonlySet<Reason> = new Set<Reason>([
  'peer_lost',
  'peer_aborted',
  'gone',
  'unknown',
  'overloaded',
  'draining',
  'shutdown',
  'internal',
]);

/** Reasons that say only that the other half failed first; `unknown` is the answer to the cancel that this caused. */
const SECONDARY: ReadonlySet<Reason> = new Set<Reason>(['peer_aborted', 'peer_lost', 'client_cancel', 'unknown']);

/** A room that waits for its first pair. */
export function createRoom(
  room: RoomId,
  request: RoomRequest,
  { deadlineMs, maxAttempts }: { deadlineMs: number; maxAttempts: number },
): Room {
  return {
    room,
    request,
    deadlineMs,
    maxAttempts,
    phase: 'choosing',
    attempt: 0,
    prefill: null,
    decode: null,
    tokenCount: 0,
    outcome: null,
    lastReason: null,
    avoid: [],
  };
}

/** Step a room. Mutates it; returns effects in order. Events of other attempts or lives change nothing. */
export function stepRoom(room: Room, event: RoomEvent, limits: ResendLimits): RoomEffect[] {
  const effects: RoomEffect[] = [];
  const { nowMs } = event;
  switch (event.type) {
    case 'pair':
      startAttempt(room, event.prefill, event.decode, nowMs, limits, effects);
      break;
    case 'no_pair':
      if (room.phase !== 'choosing') break;
      decide(room, { ok: false, reason: room.lastReason ?? 'overloaded' }, effects);
      break;
    case 'accepted': {
      const half = halfOf(room, event.key, event.epoch);
      if (half?.pending?.message.type === 'submit') half.pending = null;
      break;
    }
    case 'tokens':
      onTokens(room, event, limits, effects);
      break;
    case 'end': {
      // Always acknowledged: one that is late or repeated has only lost its acknowledgement.
      effects.push({ type: 'send', epoch: event.epoch, message: { type: 'end_ack', key: event.key } });
      const half = halfOf(room, event.key, event.epoch);
      if (half === null || half.outcome !== null) break;
      let { outcome } = event;
      if (half === room.decode && outcome.ok && event.tokenCount !== room.tokenCount) {
        outcome = { ok: false, reason: 'peer_lost' }; // tokens were lost on the way
      }
      endHalf(room, half, outcome, nowMs, limits, effects);
      break;
    }
    case 'worker_up':
      for (const half of [room.prefill, room.decode]) {
        if (half?.worker.epoch === event.epoch && half.pending !== null) {
          send(half, half.pending.message, nowMs, limits, effects);
        }
      }
      break;
    case 'worker_lost':
      if (room.phase === 'running') avoid(room, event.epoch);
      for (const half of [room.prefill, room.decode]) {
        if (half?.worker.epoch === event.epoch && half.outcome === null) {
          endHalf(room, half, { ok: false, reason: 'peer_lost' }, nowMs, limits, effects);
        }
      }
      break;
    case 'client_lost':
      giveUp(room, { ok: false, reason: 'client_lost' }, nowMs, limits, effects);
      break;
    case 'client_cancel': {
      const { finish } = event;
      const outcome: Outcome = finish === null ? { ok: false, reason: 'client_cancel' } : { ok: true, finish };
      giveUp(room, outcome, nowMs, limits, effects);
      break;
    }
    case 'tick':
      onTick(room, nowMs, limits, effects);
      break;
    default:
      throw new Error(`unknown event ${JSON.stringify(event satisfies never)}`);
  }
  finishIfOver(room, effects);
  return effects;
}

/** Key of the attempt under way. */
export function currentKey(room: Room): RoomKey {
  return makeKey(room.room, room.attempt);
}

/** What must be true between steps. Empty when all is well. */
export function auditRoom(room: Room): string[] {
  const found: string[] = [];
  const isOver = room.prefill?.outcome != null && room.decode?.outcome != null;
  if (room.phase === 'running' && isOver) found.push(`${room.room}: both halves ended, but running`);
  if (room.phase === 'ended' && room.outcome === null) found.push(`${room.room}: ended without outcome`);
  if (room.phase === 'choosing' && room.outcome !== null) found.push(`${room.room}: choosing after outcome`);
  for (const half of [room.prefill, room.decode]) {
    if (half !== null && half.outcome !== null && half.pending !== null) {
      found.push(`${room.room}: something pending for an ended half`);
    }
  }
  return found;
}

function startAttempt(
  room: Room,
  prefill: WorkerRef,
  decode: WorkerRef,
  nowMs: number,
  limits: ResendLimits,
  effects: RoomEffect[],
): void {
  if (room.phase !== 'choosing') return; // the client left while a pair was chosen
  room.phase = 'running';
  room.attempt++;
  const submit: SubmitMessage = {
    type: 'submit',
    key: currentKey(room),
    prefill,
    decode,
    ...room.request,
    budgetMs: Math.max(0, room.deadlineMs - nowMs),
  };
  room.prefill = { worker: prefill, outcome: null, pending: null };
  room.decode = { worker: decode, outcome: null, pending: null };
  send(room.decode, submit, nowMs, limits, effects);
  send(room.prefill, submit, nowMs, limits, effects);
}

function onTokens(
  room: Room,
  event: TokensRow & { epoch: Epoch; nowMs: number },
  limits: ResendLimits,
  effects: RoomEffect[],
): void {
  const half = halfOf(room, event.key, event.epoch);
  if (half === null || half !== room.decode || half.outcome !== null || room.outcome !== null) return;
  if (event.position > room.tokenCount) {
    // A message was lost with its connection; tokens are not repeated.
    giveUp(room, { ok: false, reason: 'peer_lost' }, event.nowMs, limits, effects);
    return;
  }
  const seen = room.tokenCount - event.position;
  const tokens = event.tokens.slice(seen);
  if (tokens.length === 0) return;
  // A token answers everything but a cancel.
  half.pending = null;
  const choices = event.choices === undefined ? {} : { choices: event.choices.slice(seen) };
  const { promptChoices } = event;
  const isFirst = room.tokenCount === 0 && promptChoices !== undefined;
  effects.push({
    type: 'deliver',
    position: room.tokenCount,
    tokens,
    ...choices,
    ...(isFirst ? { promptChoices } : {}),
  });
  room.tokenCount += tokens.length;
}

function endHalf(
  room: Room,
  half: Half,
  outcome: Outcome,
  nowMs: number,
  limits: ResendLimits,
  effects: RoomEffect[],
): void {
  half.outcome = outcome;
  half.pending = null;
  if (!outcome.ok) {
    // A half that refuses is not asked again for this room.
    const refusals: readonly Reason[] = ['overloaded', 'draining', 'shutdown'];
    if (refusals.includes(outcome.reason)) avoid(room, half.worker.epoch);
  }
  const isDecode = half === room.decode;
  const other = (isDecode ? room.prefill : room.decode) as Half;
  const key = currentKey(room);
  if (isDecode) {
    if (outcome.ok) {
      decide(room, outcome, effects);
    } else {
      // Tokens that the client has seen cannot be taken back: no other attempt may start over.
      if (room.tokenCount > 0) decide(room, outcome, effects);
      cancel(other, key, outcome.reason, nowMs, limits, effects);
    }
  } else if (!outcome.ok && other.outcome === null && other.pending?.message.type !== 'cancel') {
    // Not a cancel: past `ready` the decode half no longer needs the prefill half and runs on.
    send(other, { type: 'peer_failed', key }, nowMs, limits, effects);
  }
}

/** Decide now and cancel both halves. Ignored once the outcome is decided. */
function giveUp(room: Room, outcome: Outcome, nowMs: number, limits: ResendLimits, effects: RoomEffect[]): void {
  if (room.outcome !== null) return;
  decide(room, outcome, effects);
  const reason = outcome.ok ? 'client_cancel' : outcome.reason;
  for (const half of [room.decode, room.prefill]) {
    if (half !== null) cancel(half, currentKey(room), reason, nowMs, limits, effects);
  }
}

/** Cancel a half that has neither ended nor been cancelled. */
function cancel(
  half: Half,
  key: RoomKey,
  reason: Reason,
  nowMs: number,
  limits: ResendLimits,
  effects: RoomEffect[],
): void {
  if (half.outcome !== null || half.pending?.message.type === 'cancel') return;
  send(half, { type: 'cancel', key, reason }, nowMs, limits, effects);
}

function decide(room: Room, outcome: Outcome, effects: RoomEffect[]): void {
  if (room.outcome !== null) return;
  room.outcome = outcome;
  const { attempt: attempts, tokenCount } = room;
  effects.push({ type: 'outcome', outcome, attempts, tokenCount });
}

/** With both halves ended: the next attempt, or the end of the room. */
function finishIfOver(room: Room, effects: RoomEffect[]): void {
  if (room.phase === 'choosing' && room.outcome !== null) {
    room.phase = 'ended';
    effects.push({ type: 'close' });
    return;
  }
  if (room.phase !== 'running' || room.prefill?.outcome == null || room.decode?.outcome == null) return;
  if (room.outcome === null) {
    const reason = failure(room.prefill.outcome, room.decode.outcome);
    room.lastReason = reason;
    if (RETRYABLE.has(reason) && room.tokenCount === 0 && room.attempt < room.maxAttempts) {
      room.phase = 'choosing';
      room.prefill = null;
      room.decode = null;
      const attempt = room.attempt + 1;
      effects.push({ type: 'choose_pair', room: room.room, attempt, avoid: room.avoid.slice() });
      return;
    }
    decide(room, { ok: false, reason }, effects);
  }
  room.phase = 'ended';
  effects.push({ type: 'close' });
}

/** The reason of the half that failed first, as far as the reasons tell. */
function failure(prefill: Outcome, decode: Outcome): Reason {
  const reasons = [decode, prefill].flatMap((outcome) => (outcome.ok ? [] : [outcome.reason]));
  const primary = reasons.find((reason) => !SECONDARY.has(reason));
  if (primary !== undefined) return primary;
  if (reasons.includes('peer_lost')) return 'peer_lost';
  return reasons.find((reason) => reason !== 'unknown') ?? reasons[0] ?? 'internal';
}

function onTick(room: Room, nowMs: number, limits: ResendLimits, effects: RoomEffect[]): void {
  if (nowMs >= room.deadlineMs) {
    giveUp(room, { ok: false, reason: 'deadline' }, nowMs, limits, effects);
  }
  for (const half of [room.decode, room.prefill]) {
    if (half === null || half.pending === null) continue;
    if (!isDue(half.pending.resend, nowMs, limits)) continue;
    effects.push({ type: 'send', epoch: half.worker.epoch, message: half.pending.message });
  }
}

/** Send a message that waits for an answer; it replaces an older one. */
function send(half: Half, message: RouterToWorker, nowMs: number, limits: ResendLimits, effects: RoomEffect[]): void {
  half.pending = { message, resend: startResend(nowMs, limits) };
  effects.push({ type: 'send', epoch: half.worker.epoch, message });
}

/** The half that speaks, if it is of the attempt under way. */
function halfOf(room: Room, key: RoomKey, epoch: Epoch): Half | null {
  if (room.phase !== 'running' || key !== currentKey(room)) return null;
  if (room.decode?.worker.epoch === epoch) return room.decode;
  return room.prefill?.worker.epoch === epoch ? room.prefill : null;
}

function avoid(room: Room, epoch: Epoch): void {
  if (!room.avoid.includes(epoch)) room.avoid.push(epoch);
}
