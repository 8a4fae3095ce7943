/**
 * What `GET /debug/rooms` answers with: every live room of a process, what it owns, and what happened to it last.
 *
 * A worker's page is its own; the router's has its rooms and the page of every worker, so that one request shows both
 * halves of a room side by side. `handoff doctor` reads the same page.
 */
import type { RoomView, UnackedView } from '../../scheduler/views.ts';
import type { Epoch, RoomId, RoomKey } from '../../transfer/messages.ts';
import type { BuildInfo } from './build-info.ts';
import type { Deadlines } from '../config.ts';
import type { PeerView } from './peer-book.ts';
import type { RoomHistory, RoomWatch } from './room-watch.ts';

/** An event of a room that happened `count` times in a row, the last time so long ago. */
export interface EventEntry {
  readonly what: string;
  readonly count: number;
  readonly ageSeconds: number;
}

/** How long a room is where it is, and its latest events, the last one last. */
export interface HistoryEntry {
  readonly ageSeconds: number;
  readonly lastEvent: EventEntry | null;
  readonly events: readonly EventEntry[];
}

/** A half of a room on its worker. */
export interface WorkerRoomEntry extends Omit<RoomView, 'key'>, HistoryEntry {
  readonly room: RoomKey;
}

/** A terminal message that waits for its acknowledgement. */
export interface UnackedEntry extends Omit<UnackedView, 'key' | 'sinceMs'> {
  readonly room: RoomKey;
  readonly ageSeconds: number | null;
}

/** One worker. */
export interface WorkerPage {
  readonly role: 'prefill' | 'decode';
  readonly name: string;
  readonly epoch: Epoch;
  readonly draining: boolean;
  readonly build: BuildInfo;
  readonly queues: Readonly<Record<string, number>>;
  readonly pages: Readonly<Record<string, number>>;
  readonly slots: Readonly<Record<string, number>>;
  readonly rooms: readonly WorkerRoomEntry[];
  readonly unacknowledged: readonly UnackedEntry[];
  readonly tombstones: number;
  readonly conservation: {
    /** What the last recount found; empty when all is well. */
    readonly faults: readonly string[];
    readonly auditAgeSeconds: number;
    readonly violationsTotal: number;
  };
  readonly reaperAgeSeconds: number;
  readonly peers: readonly PeerView[];
}

/** The half of a router's room at one worker. */
export interface HalfEntry {
  readonly name: string;
  readonly epoch: Epoch;
  /** `open`, or how it ended. */
  readonly outcome: string;
  /** The message that its worker has not answered. */
  readonly pending: string | null;
}

/** A room on its router. */
export interface RouterRoomEntry extends HistoryEntry {
  readonly room: RoomId;
  readonly requestId: string;
  readonly queue: string;
  readonly state: string;
  readonly attempt: number;
  readonly tokens: number;
  /** What the client was told; null while it waits. */
  readonly outcome: string | null;
  readonly prefill: HalfEntry | null;
  readonly decode: HalfEntry | null;
}

/** A worker as its router sees it. */
export interface SeatEntry {
  /** `prefill-0`, as in the `worker` label of metrics. */
  readonly worker: string;
  readonly role: 'prefill' | 'decode';
  readonly address: string;
  /** The life that is linked; null while none is. */
  readonly epoch: Epoch | null;
  /** Its own page; null if it did not answer, and then `error` says why. */
  readonly page: WorkerPage | null;
  readonly error: string | null;
}

/** One router and all its workers. */
export interface RouterPage {
  readonly role: 'router';
  readonly name: string;
  readonly epoch: Epoch;
  readonly draining: boolean;
  readonly build: BuildInfo;
  /** The clocks that end what is stuck, so that a reader can tell long from too long. */
  readonly deadlines: Deadlines;
  readonly rooms: readonly RouterRoomEntry[];
  readonly reaperAgeSeconds: number;
  readonly peers: readonly PeerView[];
  readonly workers: readonly SeatEntry[];
}

/** What the watch knows of a room, as ages. */
export function historyEntry(history: RoomHistory | null, nowMs: number): HistoryEntry {
  const secondsSince = (ms: number): number => round(Math.max(0, nowMs - ms) / 1000);
  const events = (history?.events ?? []).map(({ what, count, atMs }) => ({
    what,
    count,
    ageSeconds: secondsSince(atMs),
  }));
  return {
    ageSeconds: history === null ? 0 : secondsSince(history.sinceMs),
    lastEvent: events.at(-1) ?? null,
    events,
  };
}

/** A worker's rooms with their history. */
export function workerRooms(views: readonly RoomView[], watch: RoomWatch, nowMs: number): WorkerRoomEntry[] {
  return views.map(({ key, ...view }) => ({ room: key, ...view, ...historyEntry(watch.historyOf(key), nowMs) }));
}

/** Terminal messages with their ages. */
export function unackedEntries(views: readonly UnackedView[], nowMs: number): UnackedEntry[] {
  return views.map(({ key, sinceMs, ...view }) => {
    return { room: key, ...view, ageSeconds: sinceMs === null ? null : round((nowMs - sinceMs) / 1000) };
  });
}

/** To a millisecond: more digits are noise to read. */
function round(seconds: number): number {
  return Math.round(seconds * 1000) / 1000;
}
