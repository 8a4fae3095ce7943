/**
 * What must always be true of the simulated world (`always`: I1 to I11 of the protocol), what must be true again when it
 * has settled (`residueOf`: L2 and L3), and what a long run must have seen (`mustSee`), or it proves less than it says.
 */

import { auditDecode, statsDecode, type DecodeState } from '../../scheduler/decode.ts';
import { auditPrefill, statsPrefill, type PrefillState } from '../../scheduler/prefill.ts';
import { parseKey, type Epoch, type RoomKey } from '../../transfer/messages.ts';

/** A broken promise; `rule` is its number in the protocol. */
export class SimFailure extends Error {
  readonly rule: string;
  constructor(rule: string, what: string) {
    super(`${rule}: ${what}`);
    this.name = 'SimFailure';
    this.rule = rule;
  }
}

/** Fail unless it holds. */
export function always(holds: boolean, rule: string, what: () => string): asserts holds {
  if (!holds) throw new SimFailure(rule, what());
}

/** What was seen, over any number of seeds. */
export interface Coverage {
  readonly counts: Map<string, number>;
  saw(what: string): void;
}

export function createCoverage(): Coverage {
  const counts = new Map<string, number>();
  return {
    counts,
    saw(what) {
      counts.set(what, (counts.get(what) ?? 0) + 1);
    },
  };
}

/** A worker's state as the audit sees it. */
export type Scheduler = { role: 'prefill'; state: PrefillState } | { role: 'decode'; state: DecodeState };

/** What the audit remembers of one life of a worker. */
export interface Ghost {
  live: Set<RoomKey>;
  /** Keys that are over: nothing may be created for them again (I6). */
  closed: Set<RoomKey>;
}

export function createGhost(): Ghost {
  return { live: new Set(), closed: new Set() };
}

/** I6: no key that was closed is live again. Called after every event; `ended` is a key whose end was just reported. */
export function auditKeys(ghost: Ghost, live: ReadonlyMap<RoomKey, unknown>): void {
  for (const key of ghost.live) {
    if (live.has(key)) continue;
    ghost.live.delete(key);
    ghost.closed.add(key);
  }
  if (ghost.live.size === live.size) return;
  for (const key of live.keys()) {
    if (ghost.live.has(key)) continue;
    always(!ghost.closed.has(key), 'I6', () => `${key} was closed and is live again`);
    ghost.live.add(key);
  }
}

/** I1, I2, I7 and what else a scheduler promises between two events, recounted from scratch. */
export function auditScheduler(worker: Scheduler): void {
  const found = worker.role === 'prefill' ? auditPrefill(worker.state) : auditDecode(worker.state);
  always(found.length === 0, 'I1', () => found.join('; '));
}

/** I9: what the gauges say is what a recount of the state says. */
export function auditGauges(worker: Scheduler): void {
  const { pools, live, limits } = worker.state;
  const stats = worker.role === 'prefill' ? statsPrefill(worker.state) : statsDecode(worker.state);
  const held = pools.pages.owners.filter((owner) => owner !== null).length;
  const heldSlots = pools.slots.owners.filter((owner) => owner !== null).length;
  always(stats.pagesFree + held === limits.pageCount, 'I9', () => `${stats.pagesFree} free and ${held} held pages`);
  always(stats.slotsHeld === heldSlots, 'I9', () => `${stats.slotsHeld} slots in gauges, ${heldSlots} held`);
  always(stats.rooms === live.size, 'I9', () => `${stats.rooms} rooms in gauges, ${live.size} live`);
  const pages = 'pagesHeld' in stats ? stats.pagesHeld + stats.pagesCached : stats.pagesPrealloc + stats.pagesRunning;
  always(pages === held, 'I9', () => `${pages} pages in gauges, ${held} held`);
}

/**
 * What a worker still holds or owes. It may owe something to peers outside of `workers`, and remember rooms of routers
 * outside of `routers` if that is given: they are silent for good.
 */
export function residueOf(
  worker: Scheduler,
  core: { workers: ReadonlySet<Epoch>; routers: ReadonlySet<Epoch> | null },
): string[] {
  const found: string[] = [];
  const { live, pools, desk } = worker.state;
  const { unwinds, endings, tombstones } = desk.closing;
  const isStrange = (key: RoomKey): boolean => core.routers !== null && !core.routers.has(parseKey(key)?.router ?? '');
  for (const key of live.keys()) found.push(`room ${key}`);
  // Cached pages that nobody reads are given back when they are needed; any other is held.
  const cachedCount = worker.role === 'prefill' ? worker.state.cache.idleCount : 0;
  for (const pool of [pools.pages, pools.slots]) {
    const held = pool.total - pool.free.length - (pool === pools.pages ? cachedCount : 0);
    if (held !== 0) found.push(`${held} ${pool.name}s held by ${[...new Set(pool.owners)].join()}`);
  }
  for (const [key, { peer, message }] of unwinds) {
    if (core.workers.has(peer.epoch)) found.push(`${message.type} of ${key} unacknowledged by ${peer.name}`);
  }
  for (const key of endings.keys()) if (!isStrange(key)) found.push(`end of ${key} unacknowledged`);
  for (const key of tombstones.keys()) if (!isStrange(key)) found.push(`tombstone of ${key}`);
  if (worker.role === 'decode') {
    for (const [epoch, bytes] of worker.state.creditBytes) {
      if (core.workers.has(epoch)) found.push(`${bytes} bytes of credit lent to ${epoch}`);
    }
  }
  return found;
}

/** What a run of thousands of seeds must have met at least once. */
export const mustSee: readonly string[] = [
  ...[
    ...['OPEN', 'QUEUED', 'RESERVED', 'CHUNK', 'CREDIT', 'END', 'DONE', 'DONE_ACK', 'ABORT', 'ABORT_ACK'],
    ...['submit', 'cancel', 'peer_failed', 'end_ack', 'mark', 'accepted', 'tokens', 'end', 'load'],
  ].map((type) => `message ${type}`),
  // A stop found a half in each of its phases.
  ...['bootstrapping', 'waiting', 'transferring', 'unwinding'].map((phase) => `prefill stopped while ${phase}`),
  ...['queued', 'bootstrapping', 'transferring', 'waiting', 'running', 'unwinding'].map(
    (phase) => `decode stopped while ${phase}`,
  ),
  ...['late', 'duplicate', 'ignored'].flatMap((kind) => [`prefill drop ${kind}`, `decode drop ${kind}`]),
  'prefill drop unknown',
  'decode drop badChecksum',
  'late CHUNK dropped',
  ...[
    'client_lost',
    'deadline',
    'peer_lost',
    'peer_aborted',
    'bad_checksum',
    'overloaded',
    'shutdown',
    'draining',
    'out_of_memory',
    'unsatisfiable',
  ].map((reason) => `half ended ${reason}`),
  ...['stop', 'length', 'cancelled client_lost', 'failed deadline', 'failed peer_lost', 'failed overloaded'].map(
    (outcome) => `outcome ${outcome}`,
  ),
  'refused queue_full',
  'refused engine_unavailable',
  'attempt 2',
  'attempt 3',
  'tombstone evicted by a mark',
  'worker restarted with rooms in flight',
  'router restarted with rooms in flight',
  'same life of a router linked again',
  'link lost: lease',
  'link lost: superseded',
  'link lost: relinked',
  'link lost: refused',
  'frame rejected',
  'a draft was right',
  'a draft was wrong',
  ...['bias', 'minimum', 'presence', 'frequency', 'repetition', 'constraint'].map(
    (rule) => `answer changed by ${rule}`,
  ),
  ...['rules', 'constraint', 'logprobs'].flatMap((kind) => [`another attempt with ${kind}`, `restored with ${kind}`]),
  'outcome failed unsatisfiable',
  'a prompt was told of',
  'prompt that another salt has',
  'settled: whole cluster',
  'settled: beside a dead worker',
  'settled: beside a paused worker',
  'settled: beside an isolated worker',
  'settled: beside a flapping worker',
  'retracted',
  'retracted while another room was being received',
  'decode stopped while retracted',
  'cached prefix',
  'cached prefix, computed at once',
  'cached prefix, with a salt',
  'cached page evicted',
  'prefix from the tier',
  'prefix from the tier, with a salt',
  'cached state evicted',
  'cached page read by two rooms',
  'page read after it left the cache',
  'unverified pages of a failed room left the cache',
];
