/**
 * Which pair of workers gets a room. Pure: the router's table of workers in, a pair or the reason for none out.
 *
 * The router counts the halves it has started itself and not seen end; that count is exact for one router and never
 * late. The workers' own `load` adds what other routers sent them.
 */
import type { Epoch, LoadMessage, RoomKey, WorkerRef } from '../transfer/messages.ts';

/** A live worker as the router sees it. */
export interface WorkerView {
  readonly role: 'prefill' | 'decode';
  readonly ref: WorkerRef;
  /** The last report; null until the first one arrives. */
  load: LoadMessage | null;
  /** Halves started here by this router and not ended. */
  readonly halves: Set<RoomKey>;
}

/** Two workers, or why there are none: a role has no live worker, or every one of them is full or draining. */
export type PairChoice =
  | { kind: 'pair'; prefill: WorkerView; decode: WorkerView }
  | { kind: 'no_worker'; role: 'prefill' | 'decode' }
  | { kind: 'full'; role: 'prefill' | 'decode' };

/**
 * Choose the least loaded worker of each role that has room for one more.
 *
 * Lives in `avoid` (those that just failed this room) are taken only when nothing else is left.
 */
export function choosePair(workers: Iterable<WorkerView>, avoid: readonly Epoch[] = []): PairChoice {
  const all = [...workers];
  const chosen: { prefill?: WorkerView; decode?: WorkerView } = {};
  for (const role of ['decode', 'prefill'] as const) {
    const live = all.filter((worker) => worker.role === role);
    if (live.length === 0) return { kind: 'no_worker', role };
    const open = live.filter(hasRoom);
    if (open.length === 0) return { kind: 'full', role };
    const preferred = open.filter((worker) => !avoid.includes(worker.ref.epoch));
    chosen[role] = leastLoaded(preferred.length > 0 ? preferred : open);
  }
  return { kind: 'pair', prefill: chosen.prefill!, decode: chosen.decode! };
}

/** Rooms this worker holds, as far as this router can know: never less than what it started itself. */
export function roomsOf(worker: WorkerView): number {
  return Math.max(worker.halves.size, worker.load?.rooms ?? 0);
}

function hasRoom(worker: WorkerView): boolean {
  // Before its first report a worker's limit is unknown; it answers `overloaded` itself if it is full.
  if (worker.load === null) return true;
  // The report may be older than halves that have ended since, so fullness is judged by the exact count.
  return !worker.load.draining && worker.halves.size < worker.load.roomLimit;
}

function leastLoaded(workers: readonly WorkerView[]): WorkerView {
  return workers.reduce((best, worker) => (compareLoad(worker, best) < 0 ? worker : best));
}

function compareLoad(left: WorkerView, right: WorkerView): number {
  const byHalves = left.halves.size - right.halves.size;
  if (byHalves !== 0) return byHalves;
  const byRooms = roomsOf(left) - roomsOf(right);
  if (byRooms !== 0) return byRooms;
  const byTokens = (left.load?.queuedTokens ?? 0) - (right.load?.queuedTokens ?? 0);
  if (byTokens !== 0) return byTokens;
  return left.ref.name < right.ref.name ? -1 : left.ref.name > right.ref.name ? 1 : 0;
}
