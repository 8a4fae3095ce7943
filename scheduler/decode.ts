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
 * | step_done      | engine, once for every batch that `nextDecodeBatch` returned: one token per row |
 * | tick           | a timer, also when idle, paused and draining (50 ms is a good period) |
 * | drain          | worker shutdown |
 *
 * Effects returned: connect, send, write, report, violation.
 *
 * Admission reserves pages for prompt and longest answer up front, so a running sequence never lacks
 * a page and nothing is ever retracted. A request larger than the whole pool is refused (`overloaded`).
 */

import { promptDigest } from '../transfer/checksum.ts';
import { bury, buryUnseen, isClosed, startResend, type UnwindEntry } from '../transfer/closing.ts';
import { quarantinedCount } from '../transfer/ledger.ts';
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
  handOver,
  lend,
  release,
  takePoolViolations,
  type Lease,
  type Pools,
} from './pages.ts';
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
  /** Null until reserved. */
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
  /** Ready, waiting for a row. */
  waiting: RoomKey[];
  /** Rows of the batch, in order of arrival. */
  running: RoomKey[];
  /** Rooms of the step under way, or null. */
  step: RoomKey[] | null;
  /** By peer epoch: credit set aside, in bytes; never above `peerBufferBytes`. */
  creditBytes: Map<Epoch, number>;
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
  return {
    limits,
    desk: createDesk(self),
    live: new Map(),
    pools: createPools(limits.pageCount, limits.slotCount, limits.strictLedger),
    prealloc: [],
    waiting: [],
    running: [],
    step: null,
    creditBytes: new Map(),
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
    case 'restored':
      throw new Error(`${event.type} ${event.key}, which is not being moved`);
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
  reserveQueued(state, nowMs, effects);
  return mergeTokens(effects);
}

/**
 * The next step, or null if no row is ready or a step is under way. Rooms move up from waiting while
 * there are free rows; the caller answers with `step_done` once, with one token for each row.
 */
export function nextDecodeBatch(state: DecodeState): DecodeBatch | null {
  if (state.step !== null) return null;
  while (state.running.length < state.limits.maxRunning && state.waiting.length > 0) {
    const key = state.waiting.shift() as RoomKey;
    sequenceOf(state, key).phase = 'running';
    state.running.push(key);
  }
  if (state.running.length === 0) return null;
  const rows: DecodeRow[] = [];
  for (const key of state.running) {
    const { request, lease } = state.live.get(key) as DecodeRoom;
    const sequence = sequenceOf(state, key);
    if (lease === null) throw new Error(`${key} runs without a lease`);
    sequence.stepping = true;
    rows.push({
      key,
      slot: lease.slot,
      pages: lease.pages.slice(),
      token: sequence.tokens.at(-1) as number,
      position: request.promptTokens.length + sequence.tokens.length - 1,
      sampling: request.sampling,
    });
  }
  state.step = state.running.slice();
  return { rows };
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
    if (lease === null && gauge !== 'prealloc' && gauge !== 'unwinding') found.push(`${key}: ${gauge} without a lease`);
    if (gauge !== 'unwinding' && isClosed(state.desk.closing, key)) found.push(`${key}: closed, but live`);
    const isQueued = gauge === 'prealloc' && receiver?.answered === true;
    for (const [queue, expected] of [
      [state.prealloc, isQueued],
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
  for (const key of [...state.prealloc, ...state.waiting, ...state.running]) {
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
  return [...found, ...auditPools(state.pools, leases)];
}

function gaugeOf({ receiver, sequence }: DecodeRoom): 'prealloc' | 'transfer' | SequencePhase {
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
  if (pagesFor(limits, promptTokens.length, maxTokens) > limits.pageCount) return 'overloaded';
  if (message.digest !== promptDigest(promptTokens, limits.modelDigest)) return 'mismatch';
  if (isSuperseded(desk, message.prefill)) return 'peer_lost';
  return null;
}

/** Pages for a prompt and its longest answer; the last token of an answer is never run, so never stored. */
function pagesFor(limits: DecodeLimits, promptCount: number, maxTokens: number): number {
  return Math.ceil((promptCount + maxTokens - 1) / limits.pageTokens);
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
  const sampled = new Map(tokens.map(({ key, token }) => [key, token]));
  for (const key of step) {
    const room = state.live.get(key) as DecodeRoom;
    const sequence = sequenceOf(state, key);
    const token = sampled.get(key);
    if (token === undefined) throw new Error(`step_done has no token for ${key}`);
    sequence.stepping = false;
    if (sequence.stopReason !== null) {
      closeRoom(state, key, room, { ok: false, reason: sequence.stopReason }, nowMs, effects);
    } else {
      addToken(state, key, room, token, nowMs, effects);
    }
  }
}

/** A new token: to the router at once, and the end of the room if it was the last. */
function addToken(
  state: DecodeState,
  key: RoomKey,
  room: DecodeRoom,
  token: number,
  nowMs: number,
  effects: WorkerEffect[],
): void {
  const { request } = room;
  const { tokens } = sequenceOf(state, key);
  tokens.push(token);
  state.generatedTokens++;
  const router = parseKey(key)?.router as Epoch;
  const rows = [{ key, position: tokens.length - 1, tokens: [token] }];
  effects.push({
    type: 'report',
    router,
    message: { type: 'tokens', epoch: state.desk.self.epoch, rows },
  });
  if (request.stopTokens.includes(token)) {
    closeRoom(state, key, room, { ok: true, finish: 'stop' }, nowMs, effects);
  } else if (tokens.length >= request.maxTokens) {
    closeRoom(state, key, room, { ok: true, finish: 'length' }, nowMs, effects);
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
  // The prefill half has finished with this room; only a step of ours may still refer to the pages.
  sequence.phase = 'unwinding';
  sequence.stopReason = reason;
  remove(state.waiting, key);
  remove(state.running, key);
  bury(state.desk.closing, key, { ok: false, reason }, sequence.tokens.length);
  if (!sequence.stepping) closeRoom(state, key, room, { ok: false, reason }, nowMs, effects);
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
        becomeReady(state, key, room, effect.firstToken, nowMs, effects);
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
  firstToken: number,
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
  state.waiting.push(key);
  addToken(state, key, room, firstToken, nowMs, effects);
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
  reportViolations(desk, key, takePoolViolations(pools), effects);
  live.delete(key);
  remove(state.waiting, key);
  remove(state.running, key);
  const tokenCount = room.sequence?.tokens.length ?? 0;
  bury(desk.closing, key, outcome, tokenCount);
  reportEnd(desk, { key, outcome, tokenCount }, nowMs, limits, effects);
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
    const { promptTokens, maxTokens } = room.request;
    const pageCount = Math.ceil(promptTokens.length / limits.pageTokens);
    const sizes = { pageCount, pageBytes: limits.pageBytes, slotBytes: limits.slotBytes };
    // A peer with a full buffer holds up its own rooms only; a lack of pages holds up all behind.
    if (freeCreditBytes(state, room.peer.epoch) < baseCreditBytes(sizes)) continue;
    const lease = lend(pools, pagesFor(limits, promptTokens.length, maxTokens), `session ${key}`);
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
  const ours = setAsideBytes(receiver) + freeCreditBytes(state, peer.epoch);
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

function freeCreditBytes(state: DecodeState, epoch: Epoch): number {
  return state.limits.peerBufferBytes - (state.creditBytes.get(epoch) ?? 0);
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
