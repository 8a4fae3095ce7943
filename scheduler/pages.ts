/**
 * Page pool and slot pool of one worker. A sequence holds two kinds of device memory, pages and one
 * state slot; both are lent, handed over and released together, as a `Lease`.
 */

import {
  auditLedger,
  createLedger,
  giveBack,
  handlesByOwner,
  move,
  QUARANTINED,
  SHARED,
  take,
  takeViolations,
  type Ledger,
} from '../transfer/ledger.ts';
import type { PageId, SlotId } from '../transfer/messages.ts';

export interface Pools {
  pages: Ledger;
  slots: Ledger;
}

/** Device memory of one sequence: its page table, in order, and its slot. */
export interface Lease {
  owner: string;
  pages: PageId[];
  /** So many pages, from the first on, belong to the prefix cache and are only read (scheduler/prefix-cache.ts). */
  shared: number;
  slot: SlotId;
}

/** Pools with everything free. */
export function createPools(pageCount: number, slotCount: number, strict: boolean): Pools {
  return {
    pages: createLedger('page', pageCount, strict),
    slots: createLedger('slot', slotCount, strict),
  };
}

/** Lend `pageCount` pages and a slot to `owner`, or nothing (null) if either is short. */
export function lend(pools: Pools, pageCount: number, owner: string): Lease | null {
  if (pools.slots.free.length === 0) return null;
  const pages = take(pools.pages, pageCount, owner);
  if (pages === null) return null;
  const [slot] = take(pools.slots, 1, owner) as [SlotId];
  return { owner, pages, shared: 0, slot };
}

/** One more page at the end of a lease's page table; false if none is free. */
export function extend(pools: Pools, lease: Lease): boolean {
  const pages = take(pools.pages, 1, lease.owner);
  if (pages === null) return false;
  lease.pages.push(...pages);
  return true;
}

/** The lease goes to a new owner; nothing is copied and generations stay. */
export function handOver(pools: Pools, lease: Lease, to: string): void {
  move(pools.pages, lease.pages, lease.owner, to);
  move(pools.slots, [lease.slot], lease.owner, to);
  lease.owner = to;
}

/**
 * Everything of a lease becomes free; the prefix cache's pages are left by `leavePrefix` before. The caller forgets the
 * lease: releasing twice is a violation.
 */
export function release(pools: Pools, lease: Lease): void {
  giveBack(pools.pages, lease.pages.slice(lease.shared), lease.owner);
  giveBack(pools.slots, [lease.slot], lease.owner);
}

/** Violations of both ledgers since the last call. */
export function takePoolViolations(pools: Pools): string[] {
  return [...takeViolations(pools.pages), ...takeViolations(pools.slots)];
}

/**
 * Recount from scratch: each ledger is conserved, what is lent is exactly what `leases` hold, and a shared page is read
 * by exactly the leases that begin with it, and `others` that read only.
 */
export function auditPools(
  pools: Pools,
  leases: readonly Lease[],
  others: readonly Omit<Lease, 'slot'>[] = [],
): string[] {
  const found = [...auditLedger(pools.pages), ...auditLedger(pools.slots)];
  const expected = {
    pages: new Map(leases.map((lease) => [lease.owner, lease.pages.slice(lease.shared)])),
    slots: new Map(leases.map((lease) => [lease.owner, [lease.slot]])),
  };
  for (const pool of ['pages', 'slots'] as const) {
    const held = handlesByOwner(pools[pool]);
    held.delete(QUARANTINED);
    held.delete(SHARED);
    for (const [owner, handles] of held) {
      const claimed = [...(expected[pool].get(owner) ?? [])].sort((a, b) => a - b);
      if (claimed.join() !== handles.join()) {
        found.push(`${pool} of ${owner}: ledger has ${handles.join()}, lease has ${claimed.join()}`);
      }
    }
    for (const [owner, handles] of expected[pool]) {
      if (handles.length > 0 && !held.has(owner)) found.push(`${pool} of ${owner}: not in the ledger`);
    }
  }
  return [...found, ...auditReaders(pools.pages, [...leases, ...others])];
}

function auditReaders({ readers }: Ledger, leases: readonly Omit<Lease, 'slot'>[]): string[] {
  const found: string[] = [];
  let locks = 0;
  for (const { owner, pages, shared } of leases) {
    locks += shared;
    for (const page of pages.slice(0, shared)) {
      if (readers[page]?.has(owner) !== true) found.push(`page ${page}: ${owner} reads it unnoticed`);
    }
  }
  for (const names of readers) locks -= names?.size ?? 0;
  if (locks !== 0) found.push(`${locks} more readers in leases than in the ledger`);
  return found;
}
