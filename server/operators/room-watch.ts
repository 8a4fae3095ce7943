/**
 * How long each room has been where it is, and what happened to it last.
 *
 * The state machines keep no history and no time of entry: a checker that explores them would then tell states apart
 * that behave alike. This table stands beside them, fed with what they show, and forgets a room when it is over.
 */

/** The latest events of a room that are kept. */
const KEPT_EVENTS = 8;

/** What the watch needs to know of a room. */
export interface Sighting {
  readonly key: string;
  readonly queue: string;
  readonly state: string;
}

/** Something that happened to a room `count` times in a row, the last time `atMs` on the clock of its process. */
export interface RoomEventNote {
  readonly what: string;
  readonly count: number;
  readonly atMs: number;
}

/** What is known of a room beside its state. */
export interface RoomHistory {
  /** When it entered the queue and state it is in. */
  readonly sinceMs: number;
  /** Oldest first. */
  readonly events: readonly RoomEventNote[];
}

/** The longest stay in one queue and state. */
export interface OldestStay {
  readonly queue: string;
  readonly state: string;
  readonly seconds: number;
}

interface Watched {
  queue: string;
  state: string;
  sinceMs: number;
  events: { what: string; count: number; atMs: number }[];
}

/** The watch of one process. */
export interface RoomWatch {
  /** Something happened to a room; it need not have been seen before. */
  note(key: string, what: string, nowMs: number): void;
  /** The rooms there are now: notices which have moved, and forgets which are gone. Call it every tick. */
  look(rooms: readonly Sighting[], nowMs: number): void;
  /** Null for a room that the last look did not show. */
  historyOf(key: string): RoomHistory | null;
  /** By queue and state, the room that has been there longest. Look first. */
  oldest(nowMs: number): OldestStay[];
}

/** A watch that has seen nothing. */
export function createRoomWatch(): RoomWatch {
  const rooms = new Map<string, Watched>();

  return {
    note(key, what, nowMs) {
      const room = rooms.get(key) ?? { queue: '', state: '', sinceMs: nowMs, events: [] };
      rooms.set(key, room);
      const last = room.events.at(-1);
      if (last?.what === what) {
        last.count++;
        last.atMs = nowMs;
        return;
      }
      if (room.events.length === KEPT_EVENTS) room.events.shift();
      room.events.push({ what, count: 1, atMs: nowMs });
    },
    look(seen, nowMs) {
      const keys = new Set<string>();
      for (const { key, queue, state } of seen) {
        keys.add(key);
        const room = rooms.get(key);
        if (room === undefined) rooms.set(key, { queue, state, sinceMs: nowMs, events: [] });
        else if (room.queue !== queue || room.state !== state) Object.assign(room, { queue, state, sinceMs: nowMs });
      }
      for (const key of rooms.keys()) if (!keys.has(key)) rooms.delete(key);
    },
    historyOf(key) {
      const room = rooms.get(key);
      return room === undefined ? null : { sinceMs: room.sinceMs, events: room.events };
    },
    oldest(nowMs) {
      const stays = new Map<string, OldestStay>();
      for (const { queue, state, sinceMs } of rooms.values()) {
        if (queue === '') continue; // noted, not seen yet
        const seconds = Math.max(0, nowMs - sinceMs) / 1000;
        const stay = stays.get(`${queue} ${state}`);
        if (stay === undefined || stay.seconds < seconds) stays.set(`${queue} ${state}`, { queue, state, seconds });
      }
      return [...stays.values()];
    },
  };
}
