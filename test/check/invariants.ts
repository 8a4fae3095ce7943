/**
 * What must hold. `audit*` of the sources recounts the ledgers (I1, I7, parts of I2 and I8); the rest is here:
 *
 *   I1   conservation of every ledger                          audits, strict ledgers
 *   I2   a page has at most one owner, or readers only         checkLeases, checkChunk
 *   I3   a read or write ends in the generation it began with  the engines of the processes
 *   I4   a token was emitted: its units and it are right       checkGhosts, checkTokens, checkChunk
 *   I5   one outcome, nothing after it                         router-process.ts
 *   I6   nothing is created for a key that was closed          checkClosed
 *   I7   live rooms within the limit                           audits
 *   I8   bytes under way within the buffer, credit as granted  checkCredit
 *   I9   gauges equal a recount                                checkGauges
 *   I10  a bad end comes only from unwinding, with nothing under way   checkEnds
 *   I11  after a first token only client, router, D itself or the request's deadline ends a room
 *                                                              checkCause, and the world for what the client sees
 */
import { statsDecode, type DecodeEvent, type DecodeRoom } from '../../scheduler/decode.ts';
import type { Pools } from '../../scheduler/pages.ts';
import { statsPrefill, type PrefillRoom } from '../../scheduler/prefill.ts';
import type { PrefillChunk, WorkerEffect } from '../../scheduler/types.ts';
import type { Desk } from '../../scheduler/desk.ts';
import type { RoomKey } from '../../transfer/messages.ts';
import type { DecodeProcess } from './decode-process.ts';
import { digestOf, ghostBytes, ghostToken } from './plan.ts';
import type { PrefillProcess } from './prefill-process.ts';
import { expect } from './process.ts';

/** After each step of P. `before` are the rooms that were live before it. */
export function checkPrefillTurn(process: PrefillProcess, before: ReadonlyMap<RoomKey, PrefillRoom>): void {
  const { state } = process;
  const leases = [...state.live].flatMap(([key, { lease }]) => (lease === null ? [] : [{ key, ...lease }]));
  checkLeases(state.pools, leases);
  for (const [key, { sender }] of before) {
    if (state.live.has(key)) continue;
    const isGood = sender.stopReason === null;
    expect(sender.phase === 'ended' && sender.reads.length === 0 && !sender.stepping, `I10: ${key} ended too early`);
    expect(isGood === (state.desk.closing.tombstones.get(key)?.outcome.ok ?? isGood), `I10: ${key} ended otherwise`);
  }
  const going = [...state.live].filter(([, { sender }]) => sender.phase !== 'unwinding').map(([key]) => key);
  checkClosed(process.closed, state.desk, going, [...before.keys()]);

  const stats = statsPrefill(state);
  checkGauges(stats, state.pools, state.desk, {
    rooms: stats.bootstrapping + stats.waiting + stats.computing + stats.inflight + stats.unwinding,
    live: state.live.size,
    pages: stats.pagesHeld + stats.pagesCached,
  });
}

/** After each step of D. `before` and `phases` are the rooms that were live before it, and where they stood. */
export function checkDecodeTurn(
  process: DecodeProcess,
  {
    before,
    phases,
    event,
    effects,
  }: {
    before: ReadonlyMap<RoomKey, DecodeRoom>;
    phases: ReadonlyMap<RoomKey, string>;
    event: DecodeEvent;
    effects: readonly WorkerEffect[];
  },
): void {
  const { state } = process;
  const leases = [...state.live].flatMap(([key, { lease }]) => (lease === null ? [] : [{ key, ...lease }]));
  checkLeases(state.pools, leases);
  for (const [key, room] of before) {
    if (!state.live.has(key)) checkEnd(process, key, room);
    checkCause(key, room, phases.get(key) as string, event);
  }
  const going = [...state.live]
    .filter(([, { receiver, sequence }]) => receiver?.phase !== 'unwinding' && sequence?.phase !== 'unwinding')
    .map(([key]) => key);
  checkClosed(process.closed, state.desk, going, [...before.keys()]);
  checkTokens(process, before, effects);

  const stats = statsDecode(state);
  const { prealloc, transfer, waiting, running, saving, retracted, restoring, unwinding } = stats;
  checkGauges(stats, state.pools, state.desk, {
    rooms: prealloc + transfer + waiting + running + saving + retracted + restoring + unwinding,
    live: state.live.size,
    pages: stats.pagesPrealloc + stats.pagesRunning,
  });
  let creditBytes = 0;
  for (const bytes of state.creditBytes.values()) creditBytes += bytes;
  expect(stats.creditBytes === creditBytes, `I9: ${stats.creditBytes} bytes of credit shown, ${creditBytes} counted`);
  let hostBytes = 0;
  for (const { sequence } of state.live.values()) hostBytes += sequence?.hostBytes ?? 0;
  expect(stats.hostBytes === hostBytes, `I9: ${stats.hostBytes} bytes of host memory shown, ${hostBytes} counted`);
}

/** I2: no handle in two leases unless both only read it, and the ledger knows each lease's owner. */
function checkLeases(
  pools: Pools,
  leases: readonly { key: RoomKey; owner: string; pages: number[]; shared: number; slot: number }[],
): void {
  const pages = new Set<number>();
  const slots = new Set<number>();
  for (const lease of leases) {
    for (const page of lease.pages.slice(0, lease.shared)) {
      expect(pools.pages.readers[page]?.has(lease.owner) === true, `I2: page ${page} of ${lease.key} is not shared`);
    }
    for (const page of lease.pages.slice(lease.shared)) {
      expect(!pages.has(page) && pools.pages.owners[page] === lease.owner, `I2: page ${page} of ${lease.key}`);
      pages.add(page);
    }
    expect(!slots.has(lease.slot) && pools.slots.owners[lease.slot] === lease.owner, `I2: slot of ${lease.key}`);
    slots.add(lease.slot);
  }
}

/** I6: a key that was closed in this life is never live again. Keys that are closed now are noted for later. */
function checkClosed(closed: Set<RoomKey>, desk: Desk, going: readonly RoomKey[], before: readonly RoomKey[]): void {
  for (const key of going) expect(!closed.has(key), `I6: ${key} was closed and is back`);
  for (const key of desk.closing.tombstones.keys()) closed.add(key);
  for (const key of before) if (!going.includes(key)) closed.add(key);
}

/** I9: what metrics show is what is there. */
function checkGauges(
  stats: { rooms: number; pagesFree: number; slotsFree: number; unackedToPeers: number; unackedToRouters: number },
  { pages, slots }: Pools,
  { closing }: Desk,
  counted: { rooms: number; live: number; pages: number },
): void {
  const owned = pages.owners.filter((owner) => owner !== null).length;
  const free = slots.owners.filter((owner) => owner === null).length;
  const holds =
    counted.rooms === counted.live &&
    stats.rooms === counted.live &&
    counted.pages === owned &&
    stats.pagesFree === pages.total - owned &&
    stats.slotsFree === free &&
    stats.unackedToPeers === closing.unwinds.size &&
    stats.unackedToRouters === closing.endings.size;
  expect(holds, `I9: gauges ${JSON.stringify(stats)} against ${JSON.stringify({ ...counted, owned })}`);
}

/** I10 on D: nothing of the room is under way when it is over. */
function checkEnd(process: DecodeProcess, key: RoomKey, { receiver, sequence }: DecodeRoom): void {
  const { state, writes, moves } = process;
  const reason = sequence === null ? receiver?.stopReason : sequence.stopReason;
  // Without a tombstone its router is dead, and nobody asks how it ended.
  const isGood = state.desk.closing.tombstones.get(key)?.outcome.ok ?? reason === null;
  expect(isGood === (reason === null), `I10: ${key} ended ${isGood ? 'well' : 'badly'} with reason ${reason}`);
  const isUnderWay = writes.some((write) => write.key === key) || moves.some((move) => move.key === key);
  expect(!isUnderWay && sequence?.stepping !== true, `I10: ${key} ended with work under way`);
}

/** I11 on D: whatever P says or suffers, a sequence runs on. */
function checkCause(key: RoomKey, { sequence }: DecodeRoom, phase: string, event: DecodeEvent): void {
  const hadTokens = !['opening', 'queued', 'bootstrapping', 'transferring', 'unwinding'].includes(phase);
  if (!hadTokens || sequence === null || sequence.stopReason === null || phase === 'unwinding (sequence)') return;
  const isCause =
    event.type === 'router_lost' ||
    event.type === 'tick' ||
    (event.type === 'router_message' && event.message.type === 'cancel') ||
    sequence.stopReason === 'out_of_memory';
  expect(isCause, `I11: ${event.type} ended ${key}, which has tokens`);
}

/** I4: every token that is reported is the prompt's, and the memory it came from is whole. */
function checkTokens(
  process: DecodeProcess,
  before: ReadonlyMap<RoomKey, DecodeRoom>,
  effects: readonly WorkerEffect[],
): void {
  for (const effect of effects) {
    if (effect.type !== 'report' || effect.message.type !== 'tokens') continue;
    for (const { key, position, tokens } of effect.message.rows) {
      const room = before.get(key);
      expect(room !== undefined, `I4: tokens of ${key}, which was not live`);
      const { promptTokens } = room.request;
      for (const [index, token] of tokens.entries()) {
        const isRight = token === ghostToken(digestOf(promptTokens), position + index);
        expect(isRight, `I4: token ${position + index} of ${key} is wrong`);
      }
      // A first token comes with a transfer; what later ones need was checked when their step began.
      if (position === 0) checkGhosts(process, key, room, promptTokens.length);
    }
  }
}

/** I4: pages and slot of a sequence hold what its first `count` tokens leave there. */
export function checkGhosts(
  { memory }: DecodeProcess,
  key: RoomKey,
  { lease, request }: DecodeRoom,
  count: number,
): void {
  expect(lease !== null, `I4: ${key} has tokens but no pages`);
  const { promptTokens } = request;
  for (let page = 0; page < count; page++) {
    const held = memory.get(`page ${lease.pages[page]}`);
    expect(sameBytes(held, ghostBytes(promptTokens, 'page', page)), `I4: page ${page} of ${key}`);
  }
  expect(sameBytes(memory.get(`slot ${lease.slot}`), ghostBytes(promptTokens, 'slot', count)), `I4: slot of ${key}`);
}

/** I4 on P: what a chunk stands on is there, whoever computed it; and it writes only what is its own. */
export function checkChunk({ memory, state }: PrefillProcess, { key, pages, slot, start, end }: PrefillChunk): void {
  const { lease, request } = state.live.get(key) as PrefillRoom;
  expect(lease !== null && request !== null, `I4: ${key} computes without a lease`);
  const { promptTokens } = request;
  for (let page = 0; page < start; page++) {
    const held = memory.get(`page ${pages[page]}`);
    expect(sameBytes(held, ghostBytes(promptTokens, 'page', page)), `I4: page ${page} of ${key} on P`);
  }
  const isReady = start === 0 || sameBytes(memory.get(`slot ${slot}`), ghostBytes(promptTokens, 'slot', start));
  expect(isReady, `I4: slot of ${key} on P at token ${start}`);
  for (const page of pages.slice(start, end)) {
    expect(state.pools.pages.owners[page] === lease.owner, `I2: ${key} writes page ${page}, which is not its own`);
  }
}

function sameBytes(left: Uint8Array | undefined, right: Uint8Array): boolean {
  return left?.length === right.length && right.every((byte, index) => byte === left[index]);
}

/** What is left of rooms that are over: nothing, when all is at rest. */
export function residueOf(prefill: PrefillProcess, decode: DecodeProcess): string[] {
  const found: string[] = [];
  const none = (what: string, count: number): void => void (count === 0 || found.push(`${count} ${what}`));
  for (const { state, self } of [prefill, decode]) {
    const { live, pools, desk } = state;
    none(`rooms on ${self.name}`, live.size);
    const cachedCount = self === prefill.self ? prefill.state.cache.idleCount : 0;
    none(`pages lent on ${self.name}`, pools.pages.total - pools.pages.free.length - cachedCount);
    none(`slots lent on ${self.name}`, pools.slots.total - pools.slots.free.length);
    none(`messages that no peer has acknowledged on ${self.name}`, desk.closing.unwinds.size);
    none(`ends that no router has acknowledged on ${self.name}`, desk.closing.endings.size);
    none(`tombstones on ${self.name}`, desk.closing.tombstones.size);
  }
  none('reads under way', prefill.reads.length);
  none('steps of p0', prefill.batch === null ? 0 : 1);
  none('writes and copies under way', decode.writes.length + decode.moves.length);
  none('steps of d0', decode.batch === null ? 0 : 1);
  none('copies in host memory', decode.copies.size);
  none('peers with credit', decode.state.creditBytes.size);
  return found;
}
