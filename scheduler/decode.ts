/**
 * The decode worker's scheduler: rooms from submit to the last token.
 *
 * Events come in through `stepDecode`, which mutates the state and returns effects (scheduler/types.ts
 * says who performs them); batches are pulled with `nextDecodeBatch`.
 *
 * | event          | from |
 * |----------------|------|
 * | router_message | control channel: submit, cancel, peer_failed, end_ack, mark, drain |
 * | router_up      | control channel: that life of a router is linked; again after it was lost |
 * | router_lost    | control channel: lease over, newer epoch or newer link; ends all its rooms |
 * | peer_message   | transfer channel: QUEUED, CHUNK (with payload), END, DONE_ACK, ABORT, ABORT_ACK |
 * | peer_up        | transfer channel: both sockets are linked; again after a reconnect |
 * | peer_lost      | transfer channel: lease over or newer epoch; its data socket is closed by then |
 * | written        | engine, for every `write` effect, also when the room is unwinding |
 * | saved          | engine, for every `save` effect, also when the room is unwinding |
 * | restored       | engine, for every `restore` effect, also when the room is unwinding |
 * | step_done      | engine, once for every batch that `nextDecodeBatch` returned: one token per row, or two of a drafted row |
 * | tick           | a timer, also when idle, paused and draining (50 ms is a good period) |
 * | drain          | worker shutdown |
 *
 * Effects returned: connect, send, write, save, restore, forget, report, violation.
 *
 * Memory. A reservation lends pages for the prompt and some headroom; a running sequence grows page by
 * page. When none is free, the newest sequence is retracted: its pages and slot go to host memory and
 * come back into others, ahead of every new reservation. That ends well because memory goes to the
 * oldest first, the oldest that has pages is never retracted, and a request that the empty pool could
 * not hold is refused at submit (`overloaded`): whoever holds what the oldest waits for is newer, and
 * either a sequence, which can be retracted, or a transfer, which has clocks. With host memory full,
 * the newest is ended instead (`out_of_memory`).
 */

import { promptDigest } from '../transfer/checksum.ts';
import { bury, buryUnseen, isClosed, startResend, type UnwindEntry } from '../transfer/closing.ts';
import {
  auditBudget,
  createBudget,
  giveBackBytes,
  quarantinedCount,
  takeBytes,
  takeViolations,
  type Budget,
} from '../transfer/ledger.ts';
import {
  manifestBytes,
  parseKey,
  type Epoch,
  type Instance,
  type Manifest,
  type Outcome,
  type PeerMessage,
  type Reason,
  type RoomKey,
  type RouterToWorker,
  type SubmitMessage,
  type TokensMessage,
} from '../transfer/messages.ts';
import {
  baseCreditBytes,
  createReceiver,
  outstandingBytes,
  stepReceiver,
  type Receiver,
  type ReceiverEffect,
  type ReceiverEvent,
} from '../transfer/receiver.ts';
import {
  countStray,
  createDesk,
  enterUnwinding,
  isCurrent,
  isSuperseded,
  linkPeer,
  linkRouter,
  onRouterNote,
  ownPauseMs,
  reportClosed,
  reportEnd,
  reportViolations,
  tickDesk,
  unlinkPeer,
  unlinkRouter,
  type Desk,
} from './desk.ts';
import {
  auditPools,
  createPools,
  extend,
  handOver,
  lend,
  release,
  takePoolViolations,
  type Lease,
  type Pools,
} from './pages.ts';
import { allowsDraft, rowRules } from './rules.ts';
import type {
  DecodeBatch,
  DecodeLimits,
  DecodeRow,
  DropCounts,
  Request,
  SampledToken,
  UnitPlace,
  WorkerEffect,
} from './types.ts';

export type DecodeEvent =
  | { type: 'router_message'; router: Epoch; message: RouterToWorker; nowMs: number }
  | { type: 'router_up'; router: Epoch; nowMs: number }
  /** `isDead`: a later life of it has spoken, so this one will not come back. */
  | { type: 'router_lost'; router: Epoch; isDead: boolean; nowMs: number }
  /** `payload` belongs to CHUNK; it is empty for everything else. */
  | { type: 'peer_message'; peer: Instance; message: PeerMessage; payload: Uint8Array; nowMs: number }
  | { type: 'peer_up'; peer: Instance; nowMs: number }
  | { type: 'peer_lost'; peer: Instance; nowMs: number }
  | { type: 'written'; key: RoomKey; unit: number; nowMs: number }
  | { type: 'saved'; key: RoomKey; nowMs: number }
  | { type: 'restored'; key: RoomKey; nowMs: number }
  | { type: 'step_done'; tokens: SampledToken[]; nowMs: number }
  | { type: 'tick'; nowMs: number }
  | { type: 'drain'; nowMs: number };

/**
 *   waiting     for a row
 *   running     has a row; it takes part in a step when it has the page for its next position
 *   saving      retracted: pages and slot are being copied to host memory
 *   retracted   has neither pages nor slot, waits for new ones
 *   restoring   its copy is being written into new pages and a new slot
 *   unwinding   stopped; a step, a save or a restore still refers to the pages
 */
export type SequencePhase = 'waiting' | 'running' | 'saving' | 'retracted' | 'restoring' | 'unwinding';

/** Phases of a sequence that has pages and is not about to give them up. */
const STAYING: readonly SequencePhase[] = ['waiting', 'running', 'restoring'];

/** A sequence whose KV is complete on this worker. */
export interface Sequence {
  /** Generated so far; the last one has not been run through the model. */
  tokens: number[];
  /** A step that writes our pages is under way. */
  stepping: boolean;
  /** A `save` or a `restore` of our units is under way. */
  moving: 'save' | 'restore' | null;
  /** Of the host memory that is ours, from `save` until `forget`; else 0. */
  hostBytes: number;
  phase: SequencePhase;
  stopReason: Reason | null;
}

/** One room on this worker, from submit to `end`. */
export interface DecodeRoom {
  request: Request;
  peer: Instance;
  /** Until `ready`; null after. */
  receiver: Receiver | null;
  /** From `ready` on; null before. */
  sequence: Sequence | null;
  /** Null until reserved, and while retracted. */
  lease: Lease | null;
}

export interface DecodeState {
  limits: DecodeLimits;
  desk: Desk;
  /** Every room that is not over, in order of submit. Queues hold keys of this table. */
  live: Map<RoomKey, DecodeRoom>;
  pools: Pools;
  /** OPEN was answered; waiting for pages, a slot and credit, first come first served. */
  prealloc: RoomKey[];
  /** Every sequence, in order of `ready`: the oldest first. */
  order: RoomKey[];
  /** Waiting for a row, the oldest first. */
  waiting: RoomKey[];
  /** Rows of the batch, in order of arrival. */
  running: RoomKey[];
  /** Rooms of the step under way, or null. */
  step: RoomKey[] | null;
  /** By peer epoch: credit set aside, in bytes; never above `peerBufferBytes`. */
  creditBytes: Map<Epoch, number>;
  /** Memory of copies of retracted sequences. */
  host: Budget;
  /**
   * Tokens of headroom in a new reservation. Each retraction doubles it, and each answer that ends
   * while nothing is retracted takes an eighth off again, down to the limit's: the pool is promised to
   * fewer sequences as long as that turns out to be needed.
   */
  headroomTokens: number;
  /** Sequences retracted so far, each time. */
  retractions: number;
  generatedTokens: number;
}

/** What `/metrics` shows, counted from the state. */
export interface DecodeStats {
  prealloc: number;
  /** Pages lent, KV on its way. */
  transfer: number;
  waiting: number;
  running: number;
  saving: number;
  retracted: number;
  restoring: number;
  unwinding: number;
  rooms: number;
  pagesFree: number;
  /** Lent to rooms whose KV has not all arrived. */
  pagesPrealloc: number;
  pagesRunning: number;
  pagesQuarantined: number;
  slotsFree: number;
  slotsHeld: number;
  creditBytes: number;
  hostBytes: number;
  headroomTokens: number;
  retractions: number;
  contextTokens: number;
  unackedToPeers: number;
  unackedToRouters: number;
  tombstones: number;
  generatedTokens: number;
  /** Always 0 here: prompts are computed by prefill workers only. */
  prefilledTokens: number;
  violations: number;
  draining: boolean;
  drops: DropCounts;
}

/** An idle decode worker. Throws if the limits contradict each other. */
export function createDecode(limits: DecodeLimits, self: Instance): DecodeState {
  const largestUnit = Math.max(limits.pageBytes, limits.slotBytes);
  if (limits.peerBufferBytes < largestUnit || limits.roomWindowBytes < largestUnit) {
    throw new Error(
      `peerBufferBytes ${limits.peerBufferBytes} and roomWindowBytes ${limits.roomWindowBytes} ` +
        `must hold the largest unit, ${largestUnit} bytes`,
    );
  }
  if (!(limits.headroomTokens >= 1)) throw new Error(`headroomTokens ${limits.headroomTokens} must be at least 1`);
  return {
    limits,
    desk: createDesk(self),
    live: new Map(),
    pools: createPools(limits.pageCount, limits.slotCount, limits.strictLedger),
    prealloc: [],
    order: [],
    waiting: [],
    running: [],
    step: null,
    creditBytes: new Map(),
    host: createBudget('host', limits.hostBytes, limits.strictLedger),
    headroomTokens: limits.headroomTokens,
    retractions: 0,
    generatedTokens: 0,
  };
}

/** Step the worker. Mutates `state`; returns effects in order. Throws only for a fault of our own. */
export function stepDecode(state: DecodeState, event: DecodeEvent): WorkerEffect[] {
  const effects: WorkerEffect[] = [];
  const { nowMs } = event;
  switch (event.type) {
    case 'router_message':
      onRouterMessage(state, event.router, event.message, nowMs, effects);
      break;
    case 'router_up':
      linkRouter(state.desk, event.router);
      break;
    case 'router_lost':
      // Each peer is told: a late OPEN of ours would otherwise stay on it for ever.
      for (const [key, room] of state.live) {
        if (parseKey(key)?.router === event.router) {
          stopRoom(state, key, room, { reason: 'peer_lost', tellPeer: true }, nowMs, effects);
        }
      }
      unlinkRouter(state.desk, event.router, event.isDead);
      break;
    case 'peer_message':
      onPeerMessage(state, event.peer, event.message, event.payload, nowMs, effects);
      break;
    case 'peer_up':
      onPeerUp(state, event.peer, nowMs, effects);
      break;
    case 'peer_lost':
      onPeerLost(state, event.peer, nowMs, effects);
      break;
    case 'written': {
      const { key, unit } = event;
      const room = state.live.get(key);
      if (room === undefined || room.receiver === null) {
        throw new Error(`written unit ${unit} of ${key}, which is not receiving`);
      }
      runReceiver(state, key, room, { type: 'written', unit, nowMs }, effects);
      grantCredit(state, key, room, nowMs, effects);
      break;
    }
    case 'saved':
      onSaved(state, event.key, nowMs, effects);
      break;
    case 'restored':
      onRestored(state, event.key, nowMs, effects);
      break;
    case 'step_done':
      onStepDone(state, event.tokens, nowMs, effects);
      break;
    case 'tick':
      onTick(state, nowMs, effects);
      break;
    case 'drain':
      state.desk.draining = true;
      break;
    default:
      throw new Error(`unknown event ${JSON.stringify(event satisfies never)}`);
  }
  assignMemory(state, nowMs, effects);
  return mergeTokens(effects);
}

/**
 * The next step, or null if no row is ready or a step is under way. Rooms move up from waiting while
 * there are free rows, and a row that lacks its next page sits the step out; the caller answers with
 * `step_done` once, with the tokens of each row.
 */
export function nextDecodeBatch(state: DecodeState): DecodeBatch | null {
  if (state.step !== null) return null;
  while (state.running.length < state.limits.maxRunning && state.waiting.length > 0) {
    const key = state.waiting.shift() as RoomKey;
    sequenceOf(state, key).phase = 'running';
    state.running.push(key);
  }
  const rows: DecodeRow[] = [];
  for (const key of state.running) {
    const room = state.live.get(key) as DecodeRoom;
    const { request, lease } = room;
    const sequence = sequenceOf(state, key);
    if (lease === null) throw new Error(`${key} runs without a lease`);
    if (lacksPage(state, room)) continue;
    sequence.stepping = true;
    rows.push({
      key,
      slot: lease.slot,
      pages: lease.pages.slice(),
      token: sequence.tokens.at(-1) as number,
      position: request.promptTokens.length + sequence.tokens.length - 1,
      drafted: isDrafted(state, room),
      sampling: request.sampling,
      rules: rowRules(request, sequence.tokens),
    });
  }
  if (rows.length === 0) return null;
  state.step = rows.map((row) => row.key);
  return { rows };
}

/** True if `nextDecodeBatch` would return a step. */
export function isStepReady(state: DecodeState): boolean {
  const { live, limits, running, waiting } = state;
  if (state.step !== null) return false;
  const joining = waiting.slice(0, Math.max(0, limits.maxRunning - running.length));
  return [...running, ...joining].some((key) => !lacksPage(state, live.get(key) as DecodeRoom));
}

/** Gauges, counted from the state. */
export function statsDecode(state: DecodeState): DecodeStats {
  const { desk, pools } = state;
  const stats: DecodeStats = {
    prealloc: 0,
    transfer: 0,
    waiting: 0,
    running: 0,
    saving: 0,
    retracted: 0,
    restoring: 0,
    unwinding: 0,
    rooms: state.live.size,
    pagesFree: pools.pages.free.length,
    pagesPrealloc: 0,
    pagesRunning: 0,
    pagesQuarantined: quarantinedCount(pools.pages),
    slotsFree: pools.slots.free.length,
    slotsHeld: 0,
    creditBytes: 0,
    hostBytes: state.host.heldBytes,
    headroomTokens: state.headroomTokens,
    retractions: state.retractions,
    contextTokens: 0,
    unackedToPeers: desk.closing.unwinds.size,
    unackedToRouters: desk.closing.endings.size,
    tombstones: desk.closing.tombstones.size,
    generatedTokens: state.generatedTokens,
    prefilledTokens: 0,
    violations: desk.violations,
    draining: desk.draining,
    drops: { ...desk.drops },
  };
  for (const room of state.live.values()) {
    stats[gaugeOf(room)]++;
    stats.slotsHeld += room.lease === null ? 0 : 1;
    const held = room.lease?.pages.length ?? 0;
    if (room.sequence === null) stats.pagesPrealloc += held;
    else stats.pagesRunning += held;
    if (room.sequence !== null) {
      stats.contextTokens += room.request.promptTokens.length + room.sequence.tokens.length;
    }
  }
  for (const bytes of state.creditBytes.values()) stats.creditBytes += bytes;
  return stats;
}

/** Everything that must be true between steps, recounted from scratch. Empty when all is well. */
export function auditDecode(state: DecodeState): string[] {
  const leases: Lease[] = [];
  const found: string[] = [];
  const credit = new Map<Epoch, number>();
  const addCredit = (epoch: Epoch, bytes: number): void => {
    if (bytes > 0) credit.set(epoch, (credit.get(epoch) ?? 0) + bytes);
  };
  for (const [key, room] of state.live) {
    const { receiver, sequence, lease, peer } = room;
    if (lease !== null) leases.push(lease);
    if ((receiver === null) === (sequence === null)) found.push(`${key}: receiver and sequence`);
    if (receiver?.phase === 'ended') found.push(`${key}: ended, but live`);
    if (receiver !== null) addCredit(peer.epoch, setAsideBytes(receiver));
    const gauge = gaugeOf(room);
    const mayLackLease = gauge === 'prealloc' || gauge === 'retracted' || gauge === 'unwinding';
    if (lease === null && !mayLackLease) found.push(`${key}: ${gauge} without a lease`);
    if (lease !== null && gauge === 'retracted') found.push(`${key}: ${gauge} with a lease`);
    if (sequence !== null) found.push(...auditSequence(state, key, sequence));
    if (gauge !== 'unwinding' && isClosed(state.desk.closing, key)) found.push(`${key}: closed, but live`);
    const isQueued = gauge === 'prealloc' && receiver?.answered === true;
    for (const [queue, expected] of [
      [state.prealloc, isQueued],
      [state.order, sequence !== null],
      [state.waiting, gauge === 'waiting'],
      [state.running, gauge === 'running'],
    ] as const) {
      const times = queue.filter((other) => other === key).length;
      if (times !== (expected ? 1 : 0)) found.push(`${key}: ${gauge}, but ${times} times in a queue`);
    }
    if ((sequence?.stepping ?? false) !== (state.step?.includes(key) ?? false)) found.push(`${key}: stepping`);
  }
  for (const { peer, strandedBytes } of state.desk.closing.unwinds.values()) {
    addCredit(peer.epoch, strandedBytes);
  }
  for (const key of [...state.prealloc, ...state.order, ...state.host.byOwner.keys()]) {
    if (!state.live.has(key)) found.push(`${key}: queued, but not live`);
  }
  for (const epoch of new Set([...credit.keys(), ...state.creditBytes.keys()])) {
    const counted = credit.get(epoch) ?? 0;
    const kept = state.creditBytes.get(epoch) ?? 0;
    if (counted !== kept) found.push(`credit of ${epoch}: counted ${counted}, kept ${kept}`);
    if (kept > state.limits.peerBufferBytes) found.push(`credit of ${epoch}: ${kept} over the buffer`);
  }
  if (state.live.size > state.limits.maxRooms) found.push(`${state.live.size} rooms`);
  if (state.running.length > state.limits.maxRunning) found.push(`${state.running.length} rows`);
  const inOrder = state.order.filter((key) => state.live.get(key)?.sequence?.phase === 'waiting');
  if (inOrder.join() !== state.waiting.join()) found.push(`waiting: ${state.waiting.join()}, not the oldest first`);
  return [...found, ...auditBudget(state.host), ...auditPools(state.pools, leases)];
}

/** What is under way for a sequence, and its host memory, fit its phase. */
function auditSequence(state: DecodeState, key: RoomKey, sequence: Sequence): string[] {
  const { phase, moving, stepping, hostBytes } = sequence;
  const found: string[] = [];
  const expected = phase === 'saving' ? 'save' : phase === 'restoring' ? 'restore' : null;
  if (phase !== 'unwinding' && moving !== expected) found.push(`${key}: ${phase}, but ${moving}`);
  if (phase === 'unwinding' && (moving !== null) === stepping) found.push(`${key}: unwinding without a cause, or two`);
  const hasCopy = moving !== null || phase === 'retracted';
  if (hasCopy !== hostBytes > 0) found.push(`${key}: ${phase} with ${hostBytes} bytes of host memory`);
  const kept = state.host.byOwner.get(key) ?? 0;
  if (kept !== hostBytes) found.push(`${key}: ${hostBytes} bytes of host memory, ledger has ${kept}`);
  return found;
}

/** The queue that a room counts in. */
export function gaugeOf({ receiver, sequence }: DecodeRoom): 'prealloc' | 'transfer' | SequencePhase {
  if (sequence !== null) return sequence.phase;
  if (receiver === null || receiver.phase === 'unwinding' || receiver.phase === 'ended') return 'unwinding';
  return receiver.phase === 'queued' ? 'prealloc' : 'transfer';
}

function sequenceOf(state: DecodeState, key: RoomKey): Sequence {
  const sequence = state.live.get(key)?.sequence ?? null;
  if (sequence === null) throw new Error(`${key} has no sequence`);
  return sequence;
}

function onRouterMessage(
  state: DecodeState,
  router: Epoch,
  message: RouterToWorker,
  nowMs: number,
  effects: WorkerEffect[],
): void {
  const { desk, limits, live } = state;
  if (desk.closing.deadRouters.includes(router)) {
    desk.drops.staleEpoch++;
    return;
  }
  switch (message.type) {
    case 'submit':
      onSubmit(state, router, message, nowMs, effects);
      break;
    case 'cancel': {
      const room = live.get(message.key);
      if (room === undefined) {
        reportClosed(desk, message.key, 'unknown', nowMs, limits, effects);
      } else {
        stopRoom(state, message.key, room, { reason: message.reason, tellPeer: true }, nowMs, effects);
      }
      break;
    }
    case 'peer_failed': {
      const room = live.get(message.key);
      if (room === undefined) {
        reportClosed(desk, message.key, 'peer_lost', nowMs, limits, effects);
      } else if (room.sequence === null) {
        stopRoom(state, message.key, room, { reason: 'peer_lost', tellPeer: true }, nowMs, effects);
      } else {
        desk.drops.ignored++; // after ready the prefill half no longer matters
      }
      break;
    }
    case 'mark':
      for (const [key, room] of live) {
        const parts = parseKey(key);
        if (parts?.router !== router || parts.sequence >= message.smallestSequence) continue;
        stopRoom(state, key, room, { reason: 'gone', tellPeer: true }, nowMs, effects);
      }
      onRouterNote(desk, router, message);
      break;
    case 'end_ack':
    case 'drain':
      onRouterNote(desk, router, message);
      break;
    default:
      throw new Error(`unknown message ${JSON.stringify(message satisfies never)}`);
  }
}

function onSubmit(
  state: DecodeState,
  router: Epoch,
  message: SubmitMessage,
  nowMs: number,
  effects: WorkerEffect[],
): void {
  const { desk, limits, live } = state;
  const { key } = message;
  if (message.decode.epoch !== desk.self.epoch || parseKey(key)?.router !== router) {
    desk.drops.staleEpoch++;
    return;
  }
  const accepted = { type: 'accepted', key, epoch: desk.self.epoch } as const;
  const existing = live.get(key);
  if (existing !== undefined) {
    if (promptDigest(existing.request.promptTokens, limits.modelDigest) !== message.digest) {
      desk.drops.protocol++;
    } else if (gaugeOf(existing) !== 'unwinding') {
      effects.push({ type: 'report', router, message: accepted });
    }
    return;
  }
  const refusal = refuse(state, message);
  if (refusal !== null) {
    reportClosed(desk, key, refusal, nowMs, limits, effects);
    return;
  }
  const { promptTokens, sampling, maxTokens, stopTokens, digest, budgetMs } = message;
  const peer = { name: message.prefill.name, epoch: message.prefill.epoch };
  effects.push({ type: 'report', router, message: accepted });
  effects.push({ type: 'connect', peer, address: message.prefill.address });
  const tokenCount = promptTokens.length;
  const created = createReceiver({ key, self: desk.self.epoch, peer, tokenCount, digest }, nowMs, limits);
  const request = { promptTokens, sampling, maxTokens, stopTokens, deadlineMs: nowMs + budgetMs };
  const room: DecodeRoom = { request, peer, receiver: created.receiver, sequence: null, lease: null };
  live.set(key, room);
  perform(state, key, room, created.effects, nowMs, effects);
}

/** Why a submit cannot become a room, or null. */
function refuse(state: DecodeState, message: SubmitMessage): Reason | null {
  const { desk, limits, live } = state;
  if (isClosed(desk.closing, message.key)) return 'gone'; // answered from its tombstone
  if (desk.draining) return 'draining';
  const { promptTokens, maxTokens } = message;
  if (promptTokens.length === 0 || maxTokens === 0) return 'protocol';
  if (live.size >= limits.maxRooms) return 'overloaded';
  if (promptTokens.length + maxTokens > limits.maxSequenceTokens) return 'overloaded';
  if (pagesFor(limits, promptTokens.length + maxTokens - 1) > limits.pageCount) return 'overloaded';
  if (message.digest !== promptDigest(promptTokens, limits.modelDigest)) return 'mismatch';
  if (isSuperseded(desk, message.prefill)) return 'peer_lost';
  return null;
}

/** Pages for so many positions. The last token of an answer is never run, so never stored. */
function pagesFor(limits: DecodeLimits, positionCount: number): number {
  return Math.ceil(positionCount / limits.pageTokens);
}

function onPeerMessage(
  state: DecodeState,
  peer: Instance,
  message: PeerMessage,
  payload: Uint8Array,
  nowMs: number,
  effects: WorkerEffect[],
): void {
  const { desk, live } = state;
  if (!isCurrent(desk, peer, message)) return;
  const { key } = message;
  const { unwinds } = desk.closing;
  const entry = unwinds.get(key);
  const room = live.get(key);
  if ((room ?? entry) !== undefined && (room ?? entry)?.peer.epoch !== peer.epoch) {
    desk.drops.protocol++;
    return;
  }
  const to = { from: desk.self.epoch, to: peer.epoch, key };
  switch (message.type) {
    case 'ABORT_ACK':
    case 'DONE_ACK':
      if (entry?.message.type !== (message.type === 'ABORT_ACK' ? 'ABORT' : 'DONE')) {
        desk.drops.duplicate++;
        return;
      }
      returnStranded(state, entry);
      unwinds.delete(key);
      return;
    case 'ABORT':
      effects.push({ type: 'send', peer, socket: 'control', message: { type: 'ABORT_ACK', ...to } });
      // P's ABORT travels behind its last chunk: nothing of the room is under way any more.
      if (entry !== undefined) returnStranded(state, entry);
      if (room === undefined) buryUnseen(desk.closing, key, 'peer_aborted');
      else if (room.receiver === null) desk.drops.ignored++;
      break;
    case 'END':
      // The peer has not heard our DONE yet.
      if (entry?.message.type === 'DONE') {
        effects.push({ type: 'send', peer, socket: 'control', message: entry.message });
        return;
      }
      break;
    default:
      break;
  }
  if (room === undefined) {
    if (message.type !== 'ABORT') countStray(desk, key);
  } else if (room.receiver !== null) {
    runReceiver(state, key, room, { type: 'message', message, payload, nowMs }, effects);
  } else if (message.type !== 'ABORT') {
    desk.drops.late++;
  }
}

function onPeerUp(state: DecodeState, peer: Instance, nowMs: number, effects: WorkerEffect[]): void {
  const known = state.desk.peers.get(peer.name);
  if (known !== undefined && known !== peer.epoch) {
    onPeerLost(state, { name: peer.name, epoch: known }, nowMs, effects);
  }
  // Rooms of an older life that never had a link to us.
  for (const [key, room] of state.live) {
    if (room.sequence === null && room.peer.name === peer.name && room.peer.epoch < peer.epoch) {
      stopRoom(state, key, room, { reason: 'peer_lost', tellPeer: false }, nowMs, effects);
    }
  }
  linkPeer(state.desk, peer, nowMs);
  for (const [key, room] of state.live) {
    if (room.receiver !== null && room.peer.epoch === peer.epoch) {
      runReceiver(state, key, room, { type: 'peer_up', nowMs }, effects);
    }
  }
  tickDesk(state.desk, nowMs, 'control', state.limits, effects);
}

function onPeerLost(state: DecodeState, peer: Instance, nowMs: number, effects: WorkerEffect[]): void {
  for (const [key, room] of state.live) {
    if (room.peer.epoch === peer.epoch && room.sequence === null) {
      stopRoom(state, key, room, { reason: 'peer_lost', tellPeer: false }, nowMs, effects);
    }
  }
  for (const entry of state.desk.closing.unwinds.values()) {
    if (entry.peer.epoch === peer.epoch) returnStranded(state, entry);
  }
  unlinkPeer(state.desk, peer);
}

function onStepDone(state: DecodeState, tokens: readonly SampledToken[], nowMs: number, effects: WorkerEffect[]): void {
  const { step } = state;
  if (step === null) throw new Error('step_done without a step');
  state.step = null;
  const sampled = new Map<RoomKey, SampledToken[]>(step.map((key) => [key, []]));
  for (const each of tokens) sampled.get(each.key)?.push(each);
  for (const key of step) {
    const room = state.live.get(key) as DecodeRoom;
    const sequence = sequenceOf(state, key);
    const added = sampled.get(key) as SampledToken[];
    if (added.length === 0) throw new Error(`step_done has no token for ${key}`);
    sequence.stepping = false;
    if (sequence.stopReason !== null) {
      closeRoom(state, key, room, { ok: false, reason: sequence.stopReason }, nowMs, effects);
    } else {
      addTokens(state, key, room, added, nowMs, effects);
    }
  }
}

/** New tokens: to the router at once, up to the last of the answer, which ends the room. */
function addTokens(
  state: DecodeState,
  key: RoomKey,
  room: DecodeRoom,
  sampled: readonly SampledToken[],
  nowMs: number,
  effects: WorkerEffect[],
): void {
  const { stopTokens, maxTokens } = room.request;
  const { tokens } = sequenceOf(state, key);
  const position = tokens.length;
  const added: number[] = [];
  for (const { token } of sampled) if (token !== null) added.push(token);
  const isStuck = added.length < sampled.length;
  const stopIndex = added.findIndex((token) => stopTokens.includes(token));
  const isStopped = stopIndex >= 0 && position + stopIndex < maxTokens;
  tokens.push(...added.slice(0, isStopped ? stopIndex + 1 : maxTokens - position));
  const count = tokens.length - position;
  state.generatedTokens += count;
  if (count > 0) {
    const choices = sampled.slice(0, count).flatMap(({ choice }) => (choice === undefined ? [] : [choice]));
    const promptChoices = sampled[0]?.promptChoices;
    const row = {
      key,
      position,
      tokens: tokens.slice(position),
      ...(choices.length < count ? {} : { choices }),
      ...(promptChoices === undefined ? {} : { promptChoices }),
    };
    const router = parseKey(key)?.router as Epoch;
    effects.push({
      type: 'report',
      router,
      message: { type: 'tokens', epoch: state.desk.self.epoch, rows: [row] },
    });
  }
  if (isStopped) {
    closeRoom(state, key, room, { ok: true, finish: 'stop' }, nowMs, effects);
  } else if (tokens.length >= maxTokens) {
    closeRoom(state, key, room, { ok: true, finish: 'length' }, nowMs, effects);
  } else if (isStuck) {
    closeRoom(state, key, room, { ok: false, reason: 'unsatisfiable' }, nowMs, effects);
  }
}

function onTick(state: DecodeState, nowMs: number, effects: WorkerEffect[]): void {
  const pauseMs = ownPauseMs(state.desk, nowMs);
  for (const [key, room] of state.live) {
    const { receiver, request } = room;
    request.deadlineMs += pauseMs;
    if (nowMs >= request.deadlineMs) {
      stopRoom(state, key, room, { reason: 'deadline', tellPeer: true }, nowMs, effects);
    } else if (receiver !== null) {
      receiver.roomDeadlineMs += pauseMs;
      if (receiver.stallDeadlineMs !== null) receiver.stallDeadlineMs += pauseMs;
      runReceiver(state, key, room, { type: 'tick', nowMs }, effects);
    }
  }
  tickDesk(state.desk, nowMs, 'control', state.limits, effects);
}

/** Stop a room in whatever phase it is. Idempotent. */
function stopRoom(
  state: DecodeState,
  key: RoomKey,
  room: DecodeRoom,
  { reason, tellPeer }: { reason: Reason; tellPeer: boolean },
  nowMs: number,
  effects: WorkerEffect[],
): void {
  const { sequence } = room;
  if (sequence === null) {
    runReceiver(state, key, room, { type: 'stop', reason, tellPeer, nowMs }, effects);
    return;
  }
  if (sequence.phase === 'unwinding') return;
  // The prefill half has finished with this room; only work of ours may still refer to the pages.
  sequence.phase = 'unwinding';
  sequence.stopReason = reason;
  remove(state.waiting, key);
  remove(state.running, key);
  bury(state.desk.closing, key, { ok: false, reason }, sequence.tokens.length);
  if (!sequence.stepping && sequence.moving === null) {
    closeRoom(state, key, room, { ok: false, reason }, nowMs, effects);
  }
}

/** Step one receiver and do what its effects ask of this worker. */
function runReceiver(
  state: DecodeState,
  key: RoomKey,
  room: DecodeRoom,
  event: ReceiverEvent,
  effects: WorkerEffect[],
): void {
  const { receiver } = room;
  if (receiver === null) throw new Error(`${key} has no receiver`);
  const before = setAsideBytes(receiver);
  const asked = stepReceiver(receiver, event, state.limits);
  addCreditBytes(state, room.peer.epoch, setAsideBytes(receiver) - before);
  perform(state, key, room, asked, event.nowMs, effects);
}

function perform(
  state: DecodeState,
  key: RoomKey,
  room: DecodeRoom,
  asked: readonly ReceiverEffect[],
  nowMs: number,
  effects: WorkerEffect[],
): void {
  const { desk, limits } = state;
  const { peer, lease } = room;
  for (const effect of asked) {
    switch (effect.type) {
      case 'send':
        effects.push({ type: 'send', peer, socket: 'control', message: effect.message });
        break;
      case 'queued':
        state.prealloc.push(key);
        break;
      case 'write': {
        if (lease === null) throw new Error(`${key} receives without a lease`);
        const { unit, payload } = effect;
        const promptPages = (room.receiver as Receiver).units.length - 1;
        const place: UnitPlace =
          unit === promptPages
            ? { kind: 'slot', slot: lease.slot }
            : { kind: 'page', page: lease.pages[unit] as number };
        effects.push({ type: 'write', key, unit, place, payload });
        break;
      }
      case 'ready':
        becomeReady(state, key, room, effect, nowMs, effects);
        break;
      case 'stopped': {
        remove(state.prealloc, key);
        const { reason, tellPeer } = effect;
        const stop = { key, peer, reason, tellPeer, tokenCount: 0, socket: 'control' } as const;
        enterUnwinding(desk, stop, nowMs, limits, effects);
        break;
      }
      case 'ended':
        strandCredit(state, key, room);
        closeRoom(state, key, room, { ok: false, reason: effect.reason }, nowMs, effects);
        break;
      case 'drop':
        desk.drops[effect.kind]++;
        break;
      default:
        throw new Error(`unknown effect ${JSON.stringify(effect satisfies never)}`);
    }
  }
}

/** The transfer is over: pages and slot go to the sequence, the peer is told DONE until it has heard. */
function becomeReady(
  state: DecodeState,
  key: RoomKey,
  room: DecodeRoom,
  { firstToken, firstChoice, promptChoices }: Extract<ReceiverEffect, { type: 'ready' }>,
  nowMs: number,
  effects: WorkerEffect[],
): void {
  const { desk, limits, pools } = state;
  const { peer, lease } = room;
  if (lease === null) throw new Error(`${key} is ready without a lease`);
  handOver(pools, lease, `sequence ${key}`);
  room.receiver = null;
  room.sequence = { tokens: [], stepping: false, moving: null, hostBytes: 0, phase: 'waiting', stopReason: null };
  const message = { type: 'DONE', from: desk.self.epoch, to: peer.epoch, key } as const;
  const resend = startResend(nowMs, limits);
  desk.closing.unwinds.set(key, { peer, message, resend, sinceMs: nowMs, strandedBytes: 0, returned: false });
  effects.push({ type: 'send', peer, socket: 'control', message });
  state.order.push(key);
  state.waiting.push(key);
  const told = { choice: firstChoice ?? undefined, promptChoices: promptChoices ?? undefined };
  addTokens(state, key, room, [{ key, token: firstToken, ...told }], nowMs, effects);
}

/** The one place where a room's resources are released. */
function closeRoom(
  state: DecodeState,
  key: RoomKey,
  room: DecodeRoom,
  outcome: Outcome,
  nowMs: number,
  effects: WorkerEffect[],
): void {
  const { desk, live, limits, pools } = state;
  if (room.lease !== null) release(pools, room.lease);
  if (room.sequence !== null) forgetCopy(state, key, room.sequence, effects);
  reportViolations(desk, key, takeAllViolations(state), effects);
  live.delete(key);
  remove(state.order, key);
  remove(state.waiting, key);
  remove(state.running, key);
  if (outcome.ok) relaxHeadroom(state);
  const tokenCount = room.sequence?.tokens.length ?? 0;
  bury(desk.closing, key, outcome, tokenCount);
  reportEnd(desk, { key, outcome, tokenCount }, nowMs, limits, effects);
}

// ---------------------------------------------------------------------------------------------
// Memory of sequences

/**
 * Lend what is free: to sequences that lack a page, then to retracted ones, then to new rooms. As long
 * as somebody lacks something, whoever comes after gets nothing.
 */
function assignMemory(state: DecodeState, nowMs: number, effects: WorkerEffect[]): void {
  let lackingCount = growSequences(state);
  // Between steps only: a step writes the pages of its rows.
  while (lackingCount > 0 && state.step === null && retractNewest(state, lackingCount, nowMs, effects)) {
    lackingCount = growSequences(state);
  }
  if (lackingCount > 0) return;
  restoreRetracted(state, nowMs, effects);
  const isShort = ({ sequence }: DecodeRoom): boolean =>
    sequence?.phase === 'saving' || sequence?.phase === 'retracted';
  if (!state.order.some((key) => isShort(state.live.get(key) as DecodeRoom))) reserveQueued(state, nowMs, effects);
}

/** A page to each sequence that lacks one, the oldest first. Returns how many still do. */
function growSequences(state: DecodeState): number {
  let lackingCount = 0;
  for (const key of state.order) {
    const room = state.live.get(key) as DecodeRoom;
    if (lacksPage(state, room) && !extend(state.pools, room.lease as Lease)) lackingCount++;
  }
  return lackingCount;
}

/** True if a sequence could take part in a step, but for a page for its next position. */
function lacksPage({ limits }: DecodeState, { request, sequence, lease }: DecodeRoom): boolean {
  if (sequence === null || lease === null) return false;
  if (sequence.phase !== 'waiting' && sequence.phase !== 'running') return false;
  return lease.pages.length < pagesFor(limits, request.promptTokens.length + sequence.tokens.length);
}

/**
 * True if a row has a draft in the next step: its rules allow one, the page for its place is there, and the token behind
 * it would be of use.
 * No page is lent for a draft, so drafts take nothing from anybody; a row whose page is full waits one step for the next.
 */
function isDrafted({ limits }: DecodeState, { request, sequence, lease }: DecodeRoom): boolean {
  if (!limits.drafts || sequence === null || lease === null) return false;
  if (!allowsDraft(request, sequence.tokens.length)) return false;
  const tokenCount = sequence.tokens.length + 1;
  return (
    tokenCount < request.maxTokens && lease.pages.length >= pagesFor(limits, request.promptTokens.length + tokenCount)
  );
}

/**
 * Retract the newest sequence, unless enough pages are coming free already or it is the oldest that has
 * any. Returns whether it is worth to ask again.
 */
function retractNewest(state: DecodeState, lackingCount: number, nowMs: number, effects: WorkerEffect[]): boolean {
  const { limits, live, order, pools } = state;
  let comingCount = 0;
  for (const room of live.values()) {
    const gauge = gaugeOf(room);
    if (gauge === 'saving' || gauge === 'unwinding') comingCount += room.lease?.pages.length ?? 0;
  }
  if (comingCount >= lackingCount) return false;
  const phaseOf = (key: RoomKey): SequencePhase => sequenceOf(state, key).phase;
  const key = order.findLast((other) => phaseOf(other) === 'waiting' || phaseOf(other) === 'running');
  if (key === undefined) return false;
  const room = live.get(key) as DecodeRoom;
  const lease = room.lease as Lease;
  if (key === order.find((other) => STAYING.includes(phaseOf(other)))) {
    // What it lacks is with transfers, which end. Only quarantine could take it for ever.
    if (lease.pages.length < usablePageCount(pools)) return false;
    stopRoom(state, key, room, { reason: 'out_of_memory', tellPeer: false }, nowMs, effects);
    return true;
  }
  const sequence = sequenceOf(state, key);
  const places = copiedPlaces(limits, room);
  const bytes = (places.length - 1) * limits.pageBytes + limits.slotBytes;
  if (!takeBytes(state.host, bytes, key)) {
    stopRoom(state, key, room, { reason: 'out_of_memory', tellPeer: false }, nowMs, effects);
    return true;
  }
  sequence.hostBytes = bytes;
  sequence.phase = 'saving';
  sequence.moving = 'save';
  remove(state.waiting, key);
  remove(state.running, key);
  state.retractions++;
  state.headroomTokens = Math.min(2 * state.headroomTokens, limits.maxSequenceTokens);
  effects.push({ type: 'save', key, places });
  return true;
}

/** The units of a sequence that hold something: the pages of the positions that were run, then the slot. */
function copiedPlaces(limits: DecodeLimits, { request, sequence, lease }: DecodeRoom): UnitPlace[] {
  const { pages, slot } = lease as Lease;
  const count = pagesFor(limits, request.promptTokens.length + (sequence as Sequence).tokens.length - 1);
  return [...pages.slice(0, count).map((page) => ({ kind: 'page', page }) as const), { kind: 'slot', slot }];
}

/** The copy is complete: pages and slot are free for others. */
function onSaved(state: DecodeState, key: RoomKey, nowMs: number, effects: WorkerEffect[]): void {
  const { room, sequence } = movedRoom(state, key, 'save');
  if (sequence.stopReason !== null) {
    closeRoom(state, key, room, { ok: false, reason: sequence.stopReason }, nowMs, effects);
    return;
  }
  release(state.pools, room.lease as Lease);
  room.lease = null;
  sequence.phase = 'retracted';
  const violations = takeAllViolations(state);
  if (violations.length === 0) return;
  // Somebody else had a hand on these pages, so the copy cannot be trusted.
  reportViolations(state.desk, key, violations, effects);
  stopRoom(state, key, room, { reason: 'internal', tellPeer: false }, nowMs, effects);
}

/**
 * The oldest retracted sequence comes back when its pages are free, and besides them one for each other
 * sequence that may need it soon: else it would be the next to go.
 */
function restoreRetracted(state: DecodeState, nowMs: number, effects: WorkerEffect[]): void {
  const { limits, live, pools } = state;
  for (const key of state.order.slice()) {
    const room = live.get(key) as DecodeRoom;
    const { request } = room;
    const sequence = sequenceOf(state, key);
    if (sequence.phase !== 'retracted') continue;
    const pageCount = pagesWithHeadroom(limits, request, sequence.tokens.length, limits.headroomTokens);
    if (pageCount > usablePageCount(pools)) {
      stopRoom(state, key, room, { reason: 'out_of_memory', tellPeer: false }, nowMs, effects);
      continue;
    }
    const growing = state.order.filter((other) => isGrowing(limits, live.get(other) as DecodeRoom));
    if (pools.pages.free.length < pageCount + growing.length) return;
    const lease = lend(pools, pageCount, `sequence ${key}`);
    if (lease === null) return;
    room.lease = lease;
    sequence.phase = 'restoring';
    sequence.moving = 'restore';
    effects.push({ type: 'restore', key, places: copiedPlaces(limits, room) });
  }
}

/** True if a sequence has pages and may need more. */
function isGrowing(limits: DecodeLimits, { request, sequence, lease }: DecodeRoom): boolean {
  if (lease === null || sequence === null || !STAYING.includes(sequence.phase)) return false;
  return lease.pages.length < pagesFor(limits, request.promptTokens.length + request.maxTokens - 1);
}

/** The copy is in its new place: the sequence runs on as if nothing had been. */
function onRestored(state: DecodeState, key: RoomKey, nowMs: number, effects: WorkerEffect[]): void {
  const { room, sequence } = movedRoom(state, key, 'restore');
  if (sequence.stopReason !== null) {
    closeRoom(state, key, room, { ok: false, reason: sequence.stopReason }, nowMs, effects);
    return;
  }
  forgetCopy(state, key, sequence, effects);
  sequence.phase = 'waiting';
  state.waiting = state.order.filter((other) => sequenceOf(state, other).phase === 'waiting');
}

/** A `save` or `restore` has ended. Throws if none was under way. */
function movedRoom(
  state: DecodeState,
  key: RoomKey,
  moving: 'save' | 'restore',
): { room: DecodeRoom; sequence: Sequence } {
  const room = state.live.get(key);
  const sequence = room?.sequence ?? null;
  if (room === undefined || sequence?.moving !== moving) throw new Error(`no ${moving} of ${key} is under way`);
  sequence.moving = null;
  return { room, sequence };
}

/** Free a sequence's copy in host memory, if it has one. */
function forgetCopy(state: DecodeState, key: RoomKey, sequence: Sequence, effects: WorkerEffect[]): void {
  if (sequence.hostBytes === 0) return;
  sequence.hostBytes = 0;
  giveBackBytes(state.host, key);
  effects.push({ type: 'forget', key });
}

function relaxHeadroom(state: DecodeState): void {
  if (state.order.some((key) => sequenceOf(state, key).phase === 'retracted')) return;
  const { headroomTokens } = state;
  state.headroomTokens = Math.max(state.limits.headroomTokens, headroomTokens - Math.ceil(headroomTokens / 8));
}

/** Pages for what a sequence with so many answer tokens has stored, and for its next `headroomTokens` at most. */
function pagesWithHeadroom(limits: DecodeLimits, request: Request, tokenCount: number, headroomTokens: number): number {
  const { promptTokens, maxTokens } = request;
  const ahead = Math.min(tokenCount + headroomTokens, maxTokens);
  return pagesFor(limits, promptTokens.length + ahead - 1);
}

function usablePageCount({ pages }: Pools): number {
  return pages.total - quarantinedCount(pages);
}

function takeAllViolations({ pools, host }: DecodeState): string[] {
  return [...takePoolViolations(pools), ...takeViolations(host)];
}

// ---------------------------------------------------------------------------------------------
// Reservation and credit

/**
 * Reserve for the head of the prealloc queue while pages, slots and its peer's buffer suffice. Every
 * reserved room holds credit for at least one unit: a room that held none could block, with its pages
 * on the prefill worker, the very room that holds all of the credit.
 */
function reserveQueued(state: DecodeState, nowMs: number, effects: WorkerEffect[]): void {
  const { limits, pools } = state;
  for (const key of state.prealloc.slice()) {
    const room = state.live.get(key) as DecodeRoom;
    const { promptTokens } = room.request;
    const pageCount = Math.ceil(promptTokens.length / limits.pageTokens);
    const sizes = { pageCount, pageBytes: limits.pageBytes, slotBytes: limits.slotBytes };
    // A peer with a full buffer holds up its own rooms only; a lack of pages holds up all behind.
    if (freeCreditBytes(state, room.peer) < baseCreditBytes(sizes)) continue;
    const reserved = pagesWithHeadroom(limits, room.request, 1, state.headroomTokens);
    const lease = lend(pools, reserved, `session ${key}`);
    if (lease === null) return;
    remove(state.prealloc, key);
    room.lease = lease;
    const manifest = manifestOf(state, promptTokens.length, lease);
    const creditBytes = baseCreditBytes(manifest);
    runReceiver(state, key, room, { type: 'reserved', manifest, creditBytes, nowMs }, effects);
  }
}

function manifestOf(state: DecodeState, tokenCount: number, lease: Lease): Manifest {
  const { limits, pools } = state;
  const pageCount = Math.ceil(tokenCount / limits.pageTokens);
  const generations = lease.pages.slice(0, pageCount).map((page) => pools.pages.generations[page] as number);
  generations.push(pools.slots.generations[lease.slot] as number);
  return {
    tokenCount,
    validInLastPage: tokenCount - (pageCount - 1) * limits.pageTokens,
    pageCount,
    pageBytes: limits.pageBytes,
    slotBytes: limits.slotBytes,
    generations,
  };
}

/** Raise a receiving room's credit up to its window, as far as its peer's buffer allows. */
function grantCredit(state: DecodeState, key: RoomKey, room: DecodeRoom, nowMs: number, effects: WorkerEffect[]): void {
  const { receiver, peer } = room;
  if (receiver === null || receiver.phase !== 'transferring' || receiver.manifest === null) return;
  const { limits } = state;
  const ceiling = Math.min(manifestBytes(receiver.manifest), receiver.settledBytes + limits.roomWindowBytes);
  // What is already set aside for the room is its own; beyond that the buffer is shared.
  const ours = setAsideBytes(receiver) + freeCreditBytes(state, peer);
  const grantedBytes = Math.min(ceiling, receiver.settledBytes + ours);
  if (grantedBytes <= receiver.grantedBytes) return;
  runReceiver(state, key, room, { type: 'granted', grantedBytes, nowMs }, effects);
}

/**
 * Bytes of the peer's buffer that belong to this room: what is outstanding, and at least enough for
 * the next unit as long as one is missing, so that a grant never has to wait for another room.
 */
function setAsideBytes(receiver: Receiver): number {
  const { manifest } = receiver;
  if (manifest === null) return 0;
  const outstanding = outstandingBytes(receiver);
  if (receiver.phase === 'unwinding' || receiver.phase === 'ended') return outstanding;
  const remaining = manifestBytes(manifest) - receiver.settledBytes;
  return Math.max(outstanding, Math.min(baseCreditBytes(manifest), remaining));
}

/** A stopped room is over here, but its peer may still send what was granted: keep that set aside. */
function strandCredit(state: DecodeState, key: RoomKey, room: DecodeRoom): void {
  const receiver = room.receiver as Receiver;
  const bytes = setAsideBytes(receiver);
  const entry = state.desk.closing.unwinds.get(key);
  // No entry: the peer's own ABORT or ABORT_ACK came behind its last chunk, or it is dead.
  if (entry === undefined || entry.returned) addCreditBytes(state, room.peer.epoch, -bytes);
  else entry.strandedBytes = bytes;
}

/** Nothing of the room is under way any more. If the room still writes, its own bytes stay set aside until it ends. */
function returnStranded(state: DecodeState, entry: UnwindEntry): void {
  addCreditBytes(state, entry.peer.epoch, -entry.strandedBytes);
  entry.strandedBytes = 0;
  entry.returned = true;
}

/** What is left of a peer's buffer. What an earlier life of it has sent and is still being written, is in it too. */
function freeCreditBytes({ limits, creditBytes, live }: DecodeState, peer: Instance): number {
  let bytes = limits.peerBufferBytes - (creditBytes.get(peer.epoch) ?? 0);
  if (creditBytes.size === (creditBytes.has(peer.epoch) ? 1 : 0)) return bytes;
  for (const room of live.values()) {
    const isEarlier = room.peer.name === peer.name && room.peer.epoch !== peer.epoch;
    if (isEarlier && room.receiver !== null) bytes -= setAsideBytes(room.receiver);
  }
  return bytes;
}

function addCreditBytes(state: DecodeState, epoch: Epoch, change: number): void {
  const bytes = (state.creditBytes.get(epoch) ?? 0) + change;
  if (bytes === 0) state.creditBytes.delete(epoch);
  else state.creditBytes.set(epoch, bytes);
}

/** Tokens of one step travel in one message per router; a room's `end` stays behind its tokens. */
function mergeTokens(effects: WorkerEffect[]): WorkerEffect[] {
  const merged: WorkerEffect[] = [];
  const byRouter = new Map<Epoch, TokensMessage>();
  for (const effect of effects) {
    if (effect.type !== 'report' || effect.message.type !== 'tokens') {
      merged.push(effect);
      continue;
    }
    const first = byRouter.get(effect.router);
    if (first !== undefined) {
      first.rows.push(...effect.message.rows);
      continue;
    }
    const message = { ...effect.message, rows: [...effect.message.rows] };
    byRouter.set(effect.router, message);
    merged.push({ type: 'report', router: effect.router, message });
  }
  return merged;
}

function remove(queue: RoomKey[], key: RoomKey): void {
  const index = queue.indexOf(key);
  if (index >= 0) queue.splice(index, 1);
}
