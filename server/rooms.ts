/**
 * The router's rooms: drives `transfer/room.ts`, one `Room` a client request, over the control links.
 *
 * `http.ts` starts rooms and gets tokens and one outcome; the balancer picks the pair; the links carry messages. What
 * happens to a room is decided in the pure state machine; this file performs its effects and keeps the table of rooms,
 * whose smallest sequence number is what lets workers forget closed ones.
 */
import { promptDigest } from '../transfer/checksum.ts';
import {
  makeRoomId,
  parseKey,
  type Epoch,
  type PackedChoices,
  type Reason,
  type RoomId,
  type RoomKey,
  type RouterToWorker,
  type Salt,
  type SamplingParams,
  type TokenChoice,
  type WorkerToRouter,
} from '../transfer/messages.ts';
import {
  createRoom,
  currentKey,
  stepRoom,
  type Half,
  type Room,
  type RoomEffect,
  type RoomEvent,
} from '../transfer/room.ts';
import { choosePair, type WorkerView } from './balancer.ts';
import { ApiError, errorOfReason } from './errors.ts';
import { historyEntry, type HalfEntry, type RouterRoomEntry } from './operators/debug-page.ts';
import type { AbortPhase } from './metrics.ts';
import { createRoomWatch, type OldestStay, type Sighting } from './operators/room-watch.ts';

/** What the HTTP side asks for. */
export interface RoomRequest {
  readonly requestId: string;
  readonly promptTokens: readonly number[];
  readonly sampling: SamplingParams;
  readonly maxTokens: number;
  /** Ids that end the answer; the one that was sampled is delivered, last. */
  readonly stopTokenIds: readonly number[];
  /** Rooms of another one share no cached prefix with it. */
  readonly salt: Salt;
}

/** How a room ended, as the HTTP side sees it; exactly one for each room that was started. */
export type RoomOutcome =
  | { readonly kind: 'stop' }
  | { readonly kind: 'length' }
  | { readonly kind: 'cancelled'; readonly reason: Reason }
  | { readonly kind: 'failed'; readonly error: ApiError };

/** Where a room's tokens go. Called from the event loop, never inside `start`. */
export interface RoomSink {
  /** `choices`: one for each id, if the request asked for log probabilities; `promptChoices`: beside the first, likewise. */
  onTokens(ids: number[], choices?: readonly TokenChoice[], promptChoices?: PackedChoices): void;
  /** So many tokens of the prompt were not computed, because they were cached. Told before the first token, as a rule. */
  onCached(tokenCount: number): void;
  onEnd(outcome: RoomOutcome): void;
}

/** A room that was started. */
export interface RoomHandle {
  /**
   * Give it up: the client left, the text it asked for is complete, or an operator asked. No tokens come after it, one
   * `onEnd` does.
   */
  cancel(reason: 'client_lost' | 'stop_string' | 'client_cancel'): void;
}

/** What `http.ts` needs of this file. */
export interface Rooms {
  /**
   * Start a room on the least loaded pair.
   *
   * @throws ApiError 503 when no worker of a role is there or all are full; nothing is reserved then.
   */
  start(request: RoomRequest, sink: RoomSink): RoomHandle;
  /** At least one live prefill and one live decode worker. */
  ready(): boolean;
}

/** The control links, as far as rooms use them. */
export interface WorkerLinks {
  /** Live workers. */
  workers(): Iterable<WorkerView>;
  /** Queue a message to that life of a worker; dropped when it is dead. */
  send(epoch: Epoch, message: RouterToWorker): void;
}

/** Events of the control links. */
export type LinkEvent =
  | { readonly type: 'worker_up'; readonly epoch: Epoch }
  | { readonly type: 'worker_lost'; readonly epoch: Epoch }
  | { readonly type: 'message'; readonly epoch: Epoch; readonly message: Exclude<WorkerToRouter, { type: 'load' }> };

/** Everything `createRooms` works with. */
export interface RoomsOptions {
  readonly epoch: Epoch;
  readonly links: WorkerLinks;
  /** Digest of the model both workers serve; part of every prompt digest. */
  readonly modelDigest: string;
  /** Life of a request, in ms. */
  readonly requestMs: number;
  readonly now: () => number;
  readonly onAborted: (reason: Reason, phase: AbortPhase) => void;
  /** One line a room when it is closed. */
  readonly onClosed: (room: ClosedRoom) => void;
}

/** What is known of a room when both its halves have ended. */
export interface ClosedRoom {
  readonly requestId: string;
  readonly room: RoomId;
  readonly attempts: number;
  readonly tokenCount: number;
  readonly outcome: string;
  /** From `start` to the end of the second half. */
  readonly lifeMs: number;
}

/** The rooms of one router, and how the router's loop drives them. */
export interface RoomDriver extends Rooms {
  onLink(event: LinkEvent): void;
  /** Judge deadlines and re-send; call about every 50 ms. */
  tick(): void;
  /** Rooms without a first token, and rooms with one; rooms that only wait for their halves to end are in neither. */
  stats(): { queued: number; running: number; unwinding: number };
  /** Every room with its halves and history, oldest first. */
  views(): RouterRoomEntry[];
  /** By queue and state, the room that has been there longest. */
  oldest(): OldestStay[];
  /** Nothing below this sequence is in use. */
  smallestSequence(): number;
  /** Cancel every room; resolves when all are closed or `deadlineMs` has passed. */
  drain(deadlineMs: number): Promise<void>;
}

/** First re-send of an unanswered message, doubling up to the second number. */
const RESEND = { resendMinMs: 100, resendMaxMs: 2000 } as const;
/** Tries of one request before its first token. */
const MAX_ATTEMPTS = 3;
/** How long a next attempt waits for a pair: a supervised worker is back within this. */
const CHOOSE_MS = 5000;

/**
 * Clients that left: so many rooms are cancelled at once, and so many a second when more leave together. To unwind
 * hundreds in one go would take the processors from the streams of those who stay.
 */
const LEAVE_AT_ONCE = 32;
const LEAVE_PER_SECOND = 400;

interface Entry {
  readonly requestId: string;
  readonly sequence: number;
  readonly startedMs: number;
  readonly room: Room;
  readonly sink: RoomSink;
  accepted: boolean;
  delivered: boolean;
  /** A pair is looked for: whom to spare, and until when. */
  choice: { readonly avoid: readonly Epoch[]; readonly untilMs: number } | null;
}

/** An empty table of rooms. */
export function createRooms(options: RoomsOptions): RoomDriver {
  const { links, now } = options;
  const entries = new Map<RoomId, Entry>();
  const watch = createRoomWatch();
  /** Rooms without a client, to be cancelled in their turn. */
  const leaving: Entry[] = [];
  const leave = { allowance: LEAVE_AT_ONCE, atMs: 0 };
  let nextSequence = 0;
  let whenEmpty: (() => void) | null = null;

  function step(entry: Entry, event: RoomEvent): void {
    if (event.type !== 'tick') watch.note(entry.room.room, event.type, event.nowMs);
    for (const effect of stepRoom(entry.room, event, RESEND)) perform(entry, effect);
  }

  function perform(entry: Entry, effect: RoomEffect): void {
    switch (effect.type) {
      case 'send':
        if (effect.message.type === 'submit') halvesOf(effect.epoch)?.add(effect.message.key);
        links.send(effect.epoch, effect.message);
        break;
      case 'choose_pair':
        entry.choice = { avoid: effect.avoid, untilMs: now() + CHOOSE_MS };
        choose(entry);
        break;
      case 'deliver':
        entry.delivered = true;
        entry.sink.onTokens(effect.tokens, effect.choices, effect.promptChoices);
        break;
      case 'outcome': {
        const { outcome } = effect;
        if (!outcome.ok) options.onAborted(outcome.reason, phaseOf(entry));
        entry.sink.onEnd(toRoomOutcome(outcome));
        break;
      }
      case 'close':
        close(entry);
        break;
      default:
        effect satisfies never;
    }
  }

  /** Find a pair for the next attempt. While there is none it is asked again: a worker that died is being restarted. */
  function choose(entry: Entry): void {
    const { choice, room } = entry;
    if (choice === null) return;
    if (room.phase !== 'choosing') {
      entry.choice = null; // its client left meanwhile
      return;
    }
    const found = choosePair(links.workers(), choice.avoid);
    if (found.kind !== 'pair' && now() < choice.untilMs) return;
    entry.choice = null;
    if (found.kind !== 'pair') return step(entry, { type: 'no_pair', nowMs: now() });
    step(entry, { type: 'pair', prefill: found.prefill.ref, decode: found.decode.ref, nowMs: now() });
  }

  function close(entry: Entry): void {
    const { room } = entry;
    entries.delete(room.room);
    options.onClosed({
      requestId: entry.requestId,
      room: room.room,
      attempts: room.attempt,
      tokenCount: room.tokenCount,
      outcome: room.outcome === null ? 'none' : room.outcome.ok ? room.outcome.finish : room.outcome.reason,
      lifeMs: now() - entry.startedMs,
    });
    if (entries.size === 0) whenEmpty?.();
  }

  function cancelLeaving(): void {
    const nowMs = now();
    const earned = ((nowMs - leave.atMs) / 1000) * LEAVE_PER_SECOND;
    leave.allowance = Math.min(LEAVE_AT_ONCE, leave.allowance + earned);
    leave.atMs = nowMs;
    for (; leave.allowance >= 1 && leaving.length > 0; leave.allowance--) {
      step(leaving.shift()!, { type: 'client_lost', nowMs });
    }
  }

  function halvesOf(epoch: Epoch): Set<RoomKey> | undefined {
    for (const worker of links.workers()) if (worker.ref.epoch === epoch) return worker.halves;
    return undefined;
  }

  function onMessage(epoch: Epoch, message: Extract<LinkEvent, { type: 'message' }>['message']): void {
    const nowMs = now();
    switch (message.type) {
      case 'tokens':
        for (const row of message.rows) {
          const entry = entryOf(row.key);
          if (entry) step(entry, { type: 'tokens', ...row, epoch, nowMs });
        }
        break;
      case 'accepted': {
        const entry = entryOf(message.key);
        if (entry) {
          entry.accepted = true;
          step(entry, { type: 'accepted', key: message.key, epoch, nowMs });
        }
        break;
      }
      case 'end': {
        halvesOf(epoch)?.delete(message.key);
        const entry = entryOf(message.key);
        const { key, outcome, tokenCount } = message;
        if (entry) step(entry, { type: 'end', key, epoch, outcome, tokenCount, nowMs });
        // A room that is closed here has lost only its acknowledgement.
        else links.send(epoch, { type: 'end_ack', key });
        break;
      }
      case 'cached': {
        const entry = entryOf(message.key);
        const isCurrent = entry?.room.prefill?.worker.epoch === epoch && currentKey(entry.room) === message.key;
        if (isCurrent) entry.sink.onCached(message.tokenCount);
        break;
      }
      default:
        message satisfies never;
    }
  }

  function sightings(): Sighting[] {
    return [...entries.values()].map((entry) => {
      return { key: entry.room.room, queue: queueOf(entry), state: entry.room.phase };
    });
  }

  function entryOf(key: RoomKey): Entry | undefined {
    const parts = parseKey(key);
    return parts === null ? undefined : entries.get(parts.room);
  }

  return {
    start(request, sink) {
      const choice = choosePair(links.workers());
      if (choice.kind === 'no_worker') {
        throw new ApiError('engine_unavailable', `No ${choice.role} worker is up; try again shortly.`);
      }
      if (choice.kind === 'full') {
        throw new ApiError('queue_full', 'The server is at its limit of requests; try again shortly.');
      }
      const sequence = nextSequence++;
      const promptTokens = Uint32Array.from(request.promptTokens);
      const startedMs = now();
      const room = createRoom(
        makeRoomId(options.epoch, sequence),
        {
          digest: promptDigest(promptTokens, options.modelDigest),
          promptTokens,
          maxTokens: request.maxTokens,
          stopTokens: [...request.stopTokenIds],
          sampling: request.sampling,
          salt: request.salt,
        },
        { deadlineMs: startedMs + options.requestMs, maxAttempts: MAX_ATTEMPTS },
      );
      const entry: Entry = {
        requestId: request.requestId,
        sequence,
        startedMs,
        room,
        sink,
        accepted: false,
        delivered: false,
        choice: null,
      };
      entries.set(room.room, entry);
      step(entry, { type: 'pair', prefill: choice.prefill.ref, decode: choice.decode.ref, nowMs: startedMs });
      return {
        cancel(reason) {
          if (room.phase === 'ended') return;
          if (reason === 'client_lost') {
            leaving.push(entry);
            cancelLeaving();
          } else {
            step(entry, { type: 'client_cancel', finish: reason === 'stop_string' ? 'stop' : null, nowMs: now() });
          }
        },
      };
    },
    ready() {
      const roles = new Set([...links.workers()].map((worker) => worker.role));
      return roles.size === 2;
    },
    onLink(event) {
      if (event.type === 'message') return onMessage(event.epoch, event.message);
      for (const entry of [...entries.values()]) step(entry, { type: event.type, epoch: event.epoch, nowMs: now() });
    },
    tick() {
      cancelLeaving();
      for (const entry of [...entries.values()]) {
        step(entry, { type: 'tick', nowMs: now() });
        choose(entry);
      }
      watch.look(sightings(), now());
    },
    stats() {
      const counts = { queued: 0, running: 0, unwinding: 0 };
      for (const entry of entries.values()) counts[queueOf(entry)]++;
      return counts;
    },
    views() {
      const nowMs = now();
      watch.look(sightings(), nowMs);
      return [...entries.values()].map((entry): RouterRoomEntry => {
        const { room, requestId } = entry;
        return {
          room: room.room,
          requestId,
          queue: queueOf(entry),
          state: room.phase,
          attempt: room.attempt,
          tokens: room.tokenCount,
          outcome: room.outcome === null ? null : room.outcome.ok ? room.outcome.finish : room.outcome.reason,
          prefill: halfEntry(room.prefill),
          decode: halfEntry(room.decode),
          ...historyEntry(watch.historyOf(room.room), nowMs),
        };
      });
    },
    oldest() {
      watch.look(sightings(), now());
      return watch.oldest(now());
    },
    smallestSequence() {
      // Rooms are inserted in order of their sequence.
      const first = entries.values().next();
      return first.done ? nextSequence : first.value.sequence;
    },
    drain(deadlineMs) {
      for (const entry of [...entries.values()]) step(entry, { type: 'client_cancel', finish: null, nowMs: now() });
      if (entries.size === 0) return Promise.resolve();
      return new Promise((resolve) => {
        const timer = setTimeout(resolve, deadlineMs);
        whenEmpty = () => {
          clearTimeout(timer);
          resolve();
        };
      });
    },
  };
}

/** A room that was answered only waits for its halves; before, the first token makes the difference. */
function queueOf({ room, delivered }: Entry): 'queued' | 'running' | 'unwinding' {
  if (room.outcome !== null) return 'unwinding';
  return delivered ? 'running' : 'queued';
}

function halfEntry(half: Half | null): HalfEntry | null {
  if (half === null) return null;
  const { worker, outcome, pending } = half;
  return {
    name: worker.name,
    epoch: worker.epoch,
    outcome: outcome === null ? 'open' : outcome.ok ? outcome.finish : outcome.reason,
    pending: pending?.message.type ?? null,
  };
}

function phaseOf(entry: Entry): AbortPhase {
  if (entry.delivered) return 'decode';
  return entry.accepted ? 'prefill' : 'queued';
}

function toRoomOutcome(outcome: NonNullable<Room['outcome']>): RoomOutcome {
  if (outcome.ok) return { kind: outcome.finish === 'length' ? 'length' : 'stop' };
  if (outcome.reason === 'client_lost' || outcome.reason === 'client_cancel') {
    return { kind: 'cancelled', reason: outcome.reason };
  }
  return { kind: 'failed', error: errorOfReason(outcome.reason) };
}
