/** What the three processes of the model have in common: packets, turns, timers, and how time is taken out of a state. */
import type { Desk } from '../../scheduler/desk.ts';
import type { Pools } from '../../scheduler/pages.ts';
import type { PrefixCache } from '../../scheduler/prefix-cache.ts';
import type { UnitPlace } from '../../scheduler/types.ts';
import type { Resend } from '../../transfer/closing.ts';
import {
  parseKey,
  type Epoch,
  type Instance,
  type Message,
  type Reason,
  type RoomKey,
  type RouterToWorker,
} from '../../transfer/messages.ts';
import { FAR_MS, NOW_MS, type Plan, type Rules } from './plan.ts';

export type Role = 'router' | 'prefill' | 'decode';

/** Sockets, in one direction each; a world has one queue of packets for each. */
export const QUEUES = [
  'router>prefill',
  'prefill>router',
  'router>decode',
  'decode>router',
  'decode>prefill control',
  'prefill>decode control',
  'prefill>decode data',
] as const;
export const QUEUE = {
  routerToPrefill: 0,
  prefillToRouter: 1,
  routerToDecode: 2,
  decodeToRouter: 3,
  decodeToPrefill: 4,
  prefillToDecode: 5,
  data: 6,
} as const;

export interface Packet {
  message: Message;
  /** Of a CHUNK. */
  payload: Uint8Array;
  /** The network made it twice; it counts for no credit. */
  isCopy: boolean;
}

export const NO_PAYLOAD = new Uint8Array(0);

/** A packet for a socket; it is lost unless the life it is meant for has a link there. */
export interface Sent {
  queue: number;
  to: Epoch;
  packet: Packet;
}

/** One step of one process. */
export interface Turn {
  plan: Plan;
  rules: Rules;
  sent: Sent[];
  /** A client that had tokens got a bad outcome; the world knows whether there was a cause for it. */
  lateFailure: Reason | null;
  /** Cells of the tables that were reached, as `process | phase | event`. */
  seen: Set<string>;
}

/**
 * Something a process does by itself:
 *
 *   engine     a read, write, step or copy begins or ends
 *   resend     an unanswered message is due again
 *   status     a half says that it still waits
 *   stall, room, request   a deadline passes
 *   lease      a terminal message is given up, for its peer has had no link for a lease
 */
export interface Internal<Process> {
  label: string;
  kind: 'engine' | 'resend' | 'status' | 'stall' | 'room' | 'request' | 'lease';
  /** The room it is about; null for a step of the engine. */
  key: RoomKey | null;
  /** To whom a re-send goes. */
  to: Role | null;
  run(process: Process, turn: Turn): void;
}

/** The engine's work under way for one unit or more. */
export interface Places {
  places: UnitPlace[];
  /** Of the places, when the work began: I3 says that they are the same when it ends. */
  generations: number[];
}

/** What prefill and decode process have in common. */
export interface WorkerProcess {
  self: Instance;
  /** The life of the router that its control channel has a link to. */
  router: Epoch | null;
  /** Lives that lost their link and may come back, as server/worker.ts remembers them. */
  lostRouters: Epoch[];
  memory: Map<string, Uint8Array>;
  /** Ghost: every key that was closed in this life. */
  closed: Set<RoomKey>;
}

/** A re-send that is not due. */
export function quiet(resend: Resend): void {
  resend.atMs = FAR_MS;
}

/** Take time and counters out of a desk. */
export function normaliseDesk(desk: Desk): void {
  for (const name of Object.keys(desk.drops) as (keyof typeof desk.drops)[]) desk.drops[name] = 0;
  desk.lastTickMs = null;
  const { closing } = desk;
  for (const entry of closing.unwinds.values()) {
    quiet(entry.resend);
    entry.sinceMs = NOW_MS;
  }
  for (const ending of closing.endings.values()) quiet(ending.resend);
  closing.tombstones = sorted(closing.tombstones);
  closing.marks = sorted(closing.marks);
}

/** Entries in order of their keys: for maps whose order has no effect. */
export function sorted<Item>(map: Map<string, Item>): Map<string, Item> {
  return map.size < 2 ? map : new Map([...map].sort(([left], [right]) => (left < right ? -1 : 1)));
}

/** The desk's own timers: unacknowledged messages to peers and to routers. */
export function deskInternals<Process extends WorkerProcess & { state: { desk: Desk } }>(
  process: Process,
  { leaseMs, peer, tick }: { leaseMs: number; peer: Role; tick: (process: Process, turn: Turn) => void },
): Internal<Process>[] {
  const found: Internal<Process>[] = [];
  const { closing, peers } = process.state.desk;
  for (const [key, entry] of closing.unwinds) {
    const isLinked = peers.get(entry.peer.name) === entry.peer.epoch;
    found.push({
      label: isLinked ? `${entry.message.type} is sent again` : `${entry.message.type} is given up`,
      kind: isLinked ? 'resend' : 'lease',
      key,
      to: peer,
      run(at, turn) {
        const armed = at.state.desk.closing.unwinds.get(key);
        if (armed === undefined) return;
        if (isLinked) armed.resend.atMs = NOW_MS;
        else armed.sinceMs = NOW_MS - leaseMs;
        tick(at, turn);
      },
    });
  }
  for (const key of closing.endings.keys()) {
    found.push({
      label: 'end is sent again',
      kind: 'resend',
      key,
      to: 'router',
      run(at, turn) {
        const armed = at.state.desk.closing.endings.get(key);
        if (armed === undefined) return;
        armed.resend.atMs = NOW_MS;
        tick(at, turn);
      },
    });
  }
  return found;
}

/** Generations of places, by the ledgers that own them. */
export function generationsOf(pools: Pools, places: readonly UnitPlace[]): number[] {
  return places.map((place) =>
    place.kind === 'page'
      ? (pools.pages.generations[place.page] as number)
      : (pools.slots.generations[place.slot] as number),
  );
}

/** What is in the memory of places that nobody owns does not matter. */
export function forgetFree(process: WorkerProcess & { state: { pools: Pools; cache?: PrefixCache } }): void {
  const { pages, slots } = process.state.pools;
  const kept = new Map<string, Uint8Array>();
  const keep = (kind: 'page' | 'slot' | 'state', owners: readonly (string | null)[]): void => {
    for (const [handle, owner] of owners.entries()) {
      const name = `${kind} ${handle}`;
      const bytes = process.memory.get(name);
      if (owner !== null && bytes !== undefined) kept.set(name, bytes);
    }
  };
  keep('page', pages.owners);
  keep('slot', slots.owners);
  keep('state', process.state.cache?.states.owners ?? []);
  process.memory = kept;
}

/** A short name of a message for tables: its type, and what it says where that decides. */
export function nameOf(message: Message): string {
  return message.type === 'QUEUED' ? `QUEUED ${message.state}` : message.type;
}

/** The rooms that a message of the router is about: one, or those below its mark. */
export function keysOf(message: RouterToWorker, live: ReadonlyMap<RoomKey, unknown>): RoomKey[] {
  if ('key' in message) return [message.key];
  if (message.type !== 'mark') return [];
  return [...live.keys()].filter((key) => (parseKey(key)?.sequence ?? 0) < message.smallestSequence);
}

/** Fails the exploration: an invariant does not hold. */
export function expect(holds: boolean, what: string): asserts holds {
  if (!holds) throw new Error(what);
}
