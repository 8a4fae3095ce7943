/**
 * Ledger: who owns each handle of one kind of resource (pages, state slots), at every moment.
 *
 * A handle is free or has exactly one owner; hand-over is an explicit `move`. The generation of a
 * handle counts its changes between free and owned, so a unit that was promised under one generation
 * is recognised as stale under the next.
 *
 * A handle whose content will not change any more may be *shared*: it then belongs to nobody in particular and has
 * readers, each known by name. It can be given back or moved only when the last of them has left.
 *
 * A `Budget` is the same for memory without handles: who holds how many bytes of a limit.
 */

/** Owner of handles that took part in a violation. They are never given out again. */
export const QUARANTINED = 'quarantined';

/** Owner of handles that are only read: see `share`. */
export const SHARED = 'shared';

export interface Ledger {
  name: string;
  total: number;
  /** By handle: its owner, or null when free. */
  owners: (string | null)[];
  /** By handle: who reads it while it is shared, or null while it is not. */
  readers: (Set<string> | null)[];
  /** By handle: changes between free and owned so far, modulo 2^32. */
  generations: number[];
  /** Free handles, longest free first. */
  free: number[];
  /** Violations throw instead of being counted: for tests, where the first one should be seen. */
  strict: boolean;
  /** What went wrong, for the caller to report; drained with `takeViolations`. */
  violations: string[];
}

/** A ledger of `total` free handles, numbered from 0. */
export function createLedger(name: string, total: number, strict: boolean): Ledger {
  return {
    name,
    total,
    owners: Array.from({ length: total }, () => null),
    readers: Array.from({ length: total }, () => null),
    generations: Array.from({ length: total }, () => 0),
    free: Array.from({ length: total }, (_, handle) => handle),
    strict,
    violations: [],
  };
}

/** Lend `count` handles to `owner`: all of them, or null if fewer are free. */
export function take(ledger: Ledger, count: number, owner: string): number[] | null {
  if (count > ledger.free.length) return null;
  const handles = ledger.free.splice(0, count);
  for (const handle of handles) {
    ledger.owners[handle] = owner;
    bump(ledger, handle);
  }
  return handles;
}

/** Hand handles over from one owner to another. Their generations stay. */
export function move(ledger: Ledger, handles: readonly number[], from: string, to: string): void {
  for (const handle of handles) {
    if (!checkOwner(ledger, handle, from, `move to ${to}`)) continue;
    ledger.owners[handle] = to;
    ledger.readers[handle] = null;
  }
}

/** An owner's handles become shared ones, of which it is the first reader. Their generations stay. */
export function share(ledger: Ledger, handles: readonly number[], from: string): void {
  for (const handle of handles) {
    if (!checkOwner(ledger, handle, from, 'share')) continue;
    ledger.owners[handle] = SHARED;
    ledger.readers[handle] = new Set([from]);
  }
}

/** One more reader of shared handles. One that is not shared, or that it reads already, is a violation. */
export function borrow(ledger: Ledger, handles: readonly number[], reader: string): void {
  for (const handle of handles) {
    const readers = ledger.readers[handle];
    if (readers == null || readers.has(reader)) {
      quarantine(ledger, handle, `borrow by ${reader}, read by ${readersText(ledger, handle)}`);
    } else readers.add(reader);
  }
}

/** A reader leaves shared handles; they stay shared. One that it does not read is a violation. */
export function leave(ledger: Ledger, handles: readonly number[], reader: string): void {
  for (const handle of handles) {
    if (ledger.readers[handle]?.delete(reader) === true) continue;
    quarantine(ledger, handle, `left by ${reader}, read by ${readersText(ledger, handle)}`);
  }
}

/** True if nobody reads this shared handle at the moment. */
export function isIdle(ledger: Ledger, handle: number): boolean {
  return ledger.readers[handle]?.size === 0;
}

/** Return handles to the free list. A handle that `owner` does not own, or that is still read, is a violation. */
export function giveBack(ledger: Ledger, handles: readonly number[], owner: string): void {
  for (const handle of handles) {
    if (!checkOwner(ledger, handle, owner, 'give back')) continue;
    ledger.owners[handle] = null;
    ledger.readers[handle] = null;
    bump(ledger, handle);
    ledger.free.push(handle);
  }
}

/** The violations since the last call. */
export function takeViolations(ledger: Ledger | Budget): string[] {
  return ledger.violations.splice(0);
}

/**
 * Recount from scratch: every handle is in the free list once and has no owner, or is not and has one; and it has a
 * list of readers if, and only if, it is shared.
 */
export function auditLedger(ledger: Ledger): string[] {
  const found: string[] = [];
  const inFree = new Uint8Array(ledger.total);
  for (const handle of ledger.free) {
    if (!(handle >= 0 && handle < ledger.total)) found.push(`${ledger.name}: free list has ${handle}`);
    else if (inFree[handle] !== 0) found.push(`${ledger.name} ${handle}: twice in the free list`);
    inFree[handle] = 1;
  }
  for (let handle = 0; handle < ledger.total; handle++) {
    const owner = ledger.owners[handle];
    if ((owner === null) !== (inFree[handle] === 1)) {
      found.push(`${ledger.name} ${handle}: owner ${owner}, in free list ${inFree[handle]}`);
    }
    if ((owner === SHARED) !== (ledger.readers[handle] !== null)) {
      found.push(`${ledger.name} ${handle}: owner ${owner}, read by ${readersText(ledger, handle)}`);
    }
  }
  return found;
}

/** Handles by owner, free ones left out. */
export function handlesByOwner(ledger: Ledger): Map<string, number[]> {
  const byOwner = new Map<string, number[]>();
  for (const [handle, owner] of ledger.owners.entries()) {
    if (owner === null) continue;
    const handles = byOwner.get(owner);
    if (handles === undefined) byOwner.set(owner, [handle]);
    else handles.push(handle);
  }
  return byOwner;
}

/** How many handles are quarantined. */
export function quarantinedCount(ledger: Ledger): number {
  let count = 0;
  for (const owner of ledger.owners) if (owner === QUARANTINED) count++;
  return count;
}

/** Bytes of one limit, by owner. An owner holds one amount at a time. */
export interface Budget {
  name: string;
  limitBytes: number;
  heldBytes: number;
  byOwner: Map<string, number>;
  /** As for a ledger. */
  strict: boolean;
  violations: string[];
}

/** A budget of which nothing is held. */
export function createBudget(name: string, limitBytes: number, strict: boolean): Budget {
  return { name, limitBytes, heldBytes: 0, byOwner: new Map(), strict, violations: [] };
}

/** Lend `bytes` to `owner`; false if they do not fit. An owner that holds some already is a violation, and gets none. */
export function takeBytes(budget: Budget, bytes: number, owner: string): boolean {
  const held = budget.byOwner.get(owner);
  if (held !== undefined) {
    violate(budget, `${budget.name}: take by ${owner}, who has ${held} bytes`);
    return false;
  }
  if (budget.heldBytes + bytes > budget.limitBytes) return false;
  budget.byOwner.set(owner, bytes);
  budget.heldBytes += bytes;
  return true;
}

/** Return all that `owner` holds. An owner that holds nothing is a violation. */
export function giveBackBytes(budget: Budget, owner: string): void {
  const held = budget.byOwner.get(owner);
  if (held === undefined) {
    violate(budget, `${budget.name}: give back by ${owner}, who has nothing`);
    return;
  }
  budget.byOwner.delete(owner);
  budget.heldBytes -= held;
}

/** Recount from scratch: what is held is the sum over the owners, and within the limit. */
export function auditBudget(budget: Budget): string[] {
  let bytes = 0;
  for (const held of budget.byOwner.values()) bytes += held;
  const found: string[] = [];
  if (bytes !== budget.heldBytes) found.push(`${budget.name}: counted ${bytes} bytes, kept ${budget.heldBytes}`);
  if (bytes > budget.limitBytes) found.push(`${budget.name}: ${bytes} bytes over the limit of ${budget.limitBytes}`);
  return found;
}

function violate(ledger: { strict: boolean; violations: string[] }, what: string): void {
  if (ledger.strict) throw new Error(what);
  ledger.violations.push(what);
}

function bump(ledger: Ledger, handle: number): void {
  ledger.generations[handle] = ((ledger.generations[handle] as number) + 1) >>> 0;
}

/** True if `owner` owns the handle and nobody reads it; otherwise it is quarantined and the violation recorded. */
function checkOwner(ledger: Ledger, handle: number, owner: string, doing: string): boolean {
  const actual = ledger.owners[handle];
  const isRead = (ledger.readers[handle]?.size ?? 0) > 0;
  if (actual === owner && !isRead) return true;
  const what = isRead ? `it is read by ${readersText(ledger, handle)}` : `the owner is ${actual ?? 'nobody'}`;
  quarantine(ledger, handle, `${doing} by ${owner}, but ${what}`);
  return false;
}

/** Record a violation and take the handle out of circulation. */
function quarantine(ledger: Ledger, handle: number, what: string): void {
  violate(ledger, `${ledger.name} ${handle}: ${what}`);
  if (!(handle >= 0 && handle < ledger.total)) return;
  if (ledger.owners[handle] === null) ledger.free.splice(ledger.free.indexOf(handle), 1);
  ledger.owners[handle] = QUARANTINED;
  ledger.readers[handle] = null;
}

function readersText(ledger: Ledger, handle: number): string {
  const readers = ledger.readers[handle];
  return readers == null || readers.size === 0 ? 'nobody' : [...readers].join();
}
