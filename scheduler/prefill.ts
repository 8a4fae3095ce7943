/**
 * The prefill worker's scheduler: rooms from submit to sent.
 *
 * Events come in through `stepPrefill`, which mutates the state and returns effects (scheduler/types.ts
 * says who performs them); batches are pulled with `nextPrefillBatch`.
 *
 * | event          | from |
 * |----------------|------|
 * | router_message | control channel: submit, cancel, peer_failed, end_ack, mark, drain |
 * | router_up      | control channel: that life of a router is linked; again after it was lost |
 * | router_lost    | control channel: lease over, newer epoch or newer link; ends all its rooms |
 * | peer_message   | transfer channel: OPEN, QUEUED, RESERVED, CREDIT, DONE, ABORT, ABORT_ACK |
 * | peer_up        | transfer channel: both sockets are linked; again after a reconnect |
 * | peer_lost      | transfer channel: lease over or newer epoch; last event of that epoch's link |
 * | read_done      | engine, for every `read` effect, also when the room is unwinding |
 * | fetched        | tier, for every `fetch` effect, soon and whatever comes of it |
 * | stashed        | tier, for every `stash` effect |
 * | step_done      | engine, once for every batch that `nextPrefillBatch` returned |
 * | tick           | a timer, also when idle, paused and draining (50 ms is a good period) |
 * | flush          | an operator: forget all cached prefixes |
 * | drain          | worker shutdown |
 *
 * Effects returned: send, read, discard, fetch, stash, report, violation.
 *
 * Pages of prompts are kept after their rooms (scheduler/prefix-cache.ts). A room reads what it finds there when it is
 * admitted, and again before each of its steps, for others may have computed more meanwhile. All pages of a prompt are
 * sent, wherever they came from.
 */

import { promptDigest } from '../transfer/checksum.ts';
import { bury, buryUnseen, isClosed } from '../transfer/closing.ts';
import { giveBack, quarantinedCount, takeViolations } from '../transfer/ledger.ts';
import {
  packedChoiceBytes,
  parseKey,
  type Epoch,
  type Instance,
  type Outcome,
  type PackedChoices,
  type PageId,
  type PeerMessage,
  type Reason,
  type RoomKey,
  type RouterToWorker,
  type Salt,
  type SubmitMessage,
} from '../transfer/messages.ts';
import { createSender, nextRead, readingBytes, stepSender, type Sender, type SenderEvent } from '../transfer/sender.ts';
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
import { auditPools, createPools, lend, release, takePoolViolations, type Lease, type Pools } from './pages.ts';
import {
  auditPrefix,
  createPrefixCache,
  disownPrefix,
  findPath,
  flushPrefixes,
  hashPrompt,
  holdPrefix,
  isCaching,
  joinPrefix,
  leavePrefix,
  leaveState,
  makeRoom,
  publishPrefix,
  statsPrefix,
  takeState,
  takeUnstashed,
  usableLength,
  verifyPrefix,
  type PrefixCache,
  type PrefixCounts,
  type PromptHashes,
} from './prefix-cache.ts';
import { rowRules } from './rules.ts';
import type {
  DropCounts,
  PrefillBatch,
  PrefillChunk,
  PrefillLimits,
  Request,
  SampledToken,
  StateId,
  UnitPlace,
  WorkerEffect,
} from './types.ts';

export type PrefillEvent =
  | { type: 'router_message'; router: Epoch; message: RouterToWorker; nowMs: number }
  | { type: 'router_up'; router: Epoch; nowMs: number }
  /** `isDead`: a later life of it has spoken, so this one will not come back. */
  | { type: 'router_lost'; router: Epoch; isDead: boolean; nowMs: number }
  | { type: 'peer_message'; peer: Instance; message: PeerMessage; nowMs: number }
  | { type: 'peer_up'; peer: Instance; nowMs: number }
  | { type: 'peer_lost'; peer: Instance; nowMs: number }
  | { type: 'read_done'; key: RoomKey; firstUnit: number; checksums: number[]; nowMs: number }
  /** `tokens`: the sampled first token of every `last` chunk of the batch. */
  | { type: 'step_done'; tokens: SampledToken[]; nowMs: number }
  /** `tokenCount`: everything up to there is in the room's pages and slot now, a whole number of pages. */
  | { type: 'fetched'; key: RoomKey; tokenCount: number; nowMs: number }
  | { type: 'stashed'; key: RoomKey; nowMs: number }
  | { type: 'tick'; nowMs: number }
  | { type: 'flush'; nowMs: number }
  | { type: 'drain'; nowMs: number };

/** One room on this worker, from the first submit or OPEN to `end`. */
export interface PrefillRoom {
  sender: Sender;
  /** Null until submit. */
  request: Request | null;
  /** Null until admitted. */
  lease: Lease | null;
  /** Of the prompt's whole pages; none until submit, or if nothing of it is cached. */
  hashes: PromptHashes;
  /** Of the prompt; null until submit. */
  salt: Salt;
  /** The state from which its next step starts, held until that step begins; null: its slot has it. */
  resume: StateId | null;
  /** Where its prompt and another one's were seen to part, which is where a third may go on: a step ends there. */
  branchTokens: number;
  /** Tokens that it did not have to compute. */
  cachedTokens: number;
  /** What is known so far of the choice of its tokens but the first; null before its first step, or if nobody asks. */
  promptChoices: PackedChoices | null;
  /** The tier is asked for more of its prompt, and fills this state if it has any; null: it is not. */
  fetching: { keep: StateId | null } | null;
}

export interface PrefillState {
  limits: PrefillLimits;
  desk: Desk;
  /** Every room that is not over, in order of creation. Queues hold keys of this table. */
  live: Map<RoomKey, PrefillRoom>;
  pools: Pools;
  cache: PrefixCache;
  /** By room that is over: what the tier copies of it. */
  stashes: Map<RoomKey, Stash>;
  /** Waiting for pages and a slot, first come first served. */
  waiting: RoomKey[];
  /** Admitted and not yet computed to the end, in order of admission. */
  computing: RoomKey[];
  /** Token ranges of the step under way, or null. */
  step: StepPart[] | null;
  /** Tokens computed so far, over all rooms. */
  computedTokens: number;
}

/** A room's part of a step: tokens up to `end`, and the state that is filled with its slot. */
interface StepPart {
  key: RoomKey;
  end: number;
  last: boolean;
  keep: StateId | null;
}

interface Stash extends Omit<Lease, 'slot'> {
  states: StateId[];
}

/** What `/metrics` shows, counted from the state. */
export interface PrefillStats {
  bootstrapping: number;
  waiting: number;
  computing: number;
  /** Prompt computed, transfer not confirmed. */
  inflight: number;
  unwinding: number;
  rooms: number;
  pagesFree: number;
  /** Of rooms, shared ones counted once. */
  pagesHeld: number;
  /** Of the prefix cache and no room: given back whenever a room needs them. */
  pagesCached: number;
  pagesQuarantined: number;
  statesFree: number;
  statesHeld: number;
  prefixes: PrefixCounts;
  slotsFree: number;
  slotsHeld: number;
  stagingBytes: number;
  queuedTokens: number;
  unackedToPeers: number;
  unackedToRouters: number;
  tombstones: number;
  computedTokens: number;
  violations: number;
  draining: boolean;
  drops: DropCounts;
}

/** An idle prefill worker. Throws if the limits contradict each other. */
export function createPrefill(limits: PrefillLimits, self: Instance): PrefillState {
  if (limits.prefillChunkTokens % limits.pageTokens !== 0 || limits.prefillChunkTokens <= 0) {
    throw new Error(
      `prefillChunkTokens ${limits.prefillChunkTokens} must be a multiple of pageTokens ${limits.pageTokens}`,
    );
  }
  return {
    limits,
    desk: createDesk(self),
    live: new Map(),
    pools: createPools(limits.pageCount, limits.slotCount, limits.strictLedger),
    cache: createPrefixCache(limits.pageTokens, limits.stateCount, limits.strictLedger),
    stashes: new Map(),
    waiting: [],
    computing: [],
    step: null,
    computedTokens: 0,
  };
}

/** Step the worker. Mutates `state`; returns effects in order. Throws only for a fault of our own. */
export function stepPrefill(state: PrefillState, event: PrefillEvent): WorkerEffect[] {
  const effects: WorkerEffect[] = [];
  switch (event.type) {
    case 'router_message':
      onRouterMessage(state, event.router, event.message, event.nowMs, effects);
      break;
    case 'router_up':
      linkRouter(state.desk, event.router);
      break;
    case 'router_lost':
      // Each peer is told: a late OPEN would otherwise re-create what no submit will ever finish.
      for (const [key, room] of state.live) {
        if (parseKey(key)?.router === event.router) {
          stopRoom(state, key, room, { reason: 'peer_lost', tellPeer: true }, event.nowMs, effects);
        }
      }
      unlinkRouter(state.desk, event.router, event.isDead);
      break;
    case 'peer_message':
      onPeerMessage(state, event.peer, event.message, event.nowMs, effects);
      break;
    case 'peer_up':
      onPeerUp(state, event.peer, event.nowMs, effects);
      break;
    case 'peer_lost':
      onPeerLost(state, event.peer, event.nowMs, effects);
      break;
    case 'read_done': {
      const { key, firstUnit, checksums, nowMs } = event;
      const room = state.live.get(key);
      if (room === undefined) throw new Error(`read_done for ${key}, which is not live`);
      runSender(state, key, room, { type: 'read_done', firstUnit, checksums, nowMs }, effects);
      break;
    }
    case 'fetched':
      onFetched(state, event.key, event.tokenCount, event.nowMs, effects);
      break;
    case 'stashed': {
      const stash = state.stashes.get(event.key);
      if (stash === undefined) throw new Error(`stashed for ${event.key}, which is not being copied`);
      state.stashes.delete(event.key);
      for (const held of stash.states) leaveState(state.cache, held, stash.owner);
      leavePrefix(state.cache, state.pools, stash);
      break;
    }
    case 'step_done':
      onStepDone(state, event.tokens, event.nowMs, effects);
      break;
    case 'tick':
      onTick(state, event.nowMs, effects);
      break;
    case 'flush':
      flushPrefixes(state.cache, state.pools);
      break;
    case 'drain':
      state.desk.draining = true;
      break;
    default:
      throw new Error(`unknown event ${JSON.stringify(event satisfies never)}`);
  }
  admitWaiting(state, event.nowMs, effects);
  startReads(state, event.nowMs, effects);
  return effects;
}

/**
 * The next step under the token budget, or null if there is nothing to compute or a step is under way.
 * Rooms are served in order of admission; the caller answers with `step_done` once.
 *
 * A room whose next page an earlier one computes in this step waits for it: it will find that page in the cache.
 */
export function nextPrefillBatch(state: PrefillState): PrefillBatch | null {
  if (state.step !== null) return null;
  const { cache, limits } = state;
  const { prefillChunkTokens, pageTokens } = limits;
  const chunks: PrefillChunk[] = [];
  const step: StepPart[] = [];
  const underWay = new Set<number>();
  let budget = prefillChunkTokens;
  for (const key of state.computing) {
    const room = state.live.get(key) as PrefillRoom;
    const { sender, request, lease, hashes } = room;
    if (request === null || lease === null) throw new Error(`${key} computes without a lease`);
    if (room.fetching !== null) continue;
    joinDeeper(state, room, lease);
    const start = sender.computedTokens;
    const nextPage = hashes[start / pageTokens];
    if (nextPage !== undefined && underWay.has(nextPage)) continue;
    const end = chunkEnd(room, budget, limits);
    if (end === start) break;
    budget -= end - start;
    for (const hash of hashes.slice(start / pageTokens, Math.floor(end / pageTokens))) underWay.add(hash);
    const { promptTokens, sampling } = request;
    const tokens = promptTokens.slice(start, end);
    const last = end === sender.tokenCount;
    const next = last ? null : (promptTokens[end] as number);
    const { resume } = room;
    if (resume !== null) leaveState(cache, resume, lease.owner);
    room.resume = null;
    const keep = hashes.length > 0 && end % pageTokens === 0 ? takeState(cache, lease.owner) : null;
    const { slot, pages } = lease;
    const rules = last ? rowRules(request, []) : null;
    chunks.push({ key, slot, pages: pages.slice(), tokens, next, start, end, last, sampling, rules, resume, keep });
    step.push({ key, end, last, keep });
    stepSender(sender, { type: 'step_started' }, limits);
    if (budget === 0) break;
  }
  if (chunks.length === 0) return null;
  state.step = step;
  return { chunks };
}

/**
 * Where a room's next chunk ends: under the budget, on a page unless it is the last, and with a cache also where its
 * whole pages end and where it parted from another prompt, so that there are states at both.
 */
function chunkEnd(
  { sender, hashes, branchTokens }: PrefillRoom,
  budget: number,
  { pageTokens }: PrefillLimits,
): number {
  const { computedTokens: start, tokenCount } = sender;
  const isLast = tokenCount - start <= budget;
  const end = isLast ? tokenCount : start + Math.floor(budget / pageTokens) * pageTokens;
  const stops = [branchTokens, hashes.length * pageTokens].filter((stop) => stop > start && stop < end);
  return Math.min(end, ...stops);
}

/** Other rooms may have computed more of a room's prompt since it was admitted: it reads that instead. */
function joinDeeper(state: PrefillState, room: PrefillRoom, lease: Lease): void {
  const { cache, pools, limits } = state;
  const { sender, request, salt, hashes } = room;
  const { shared, owner } = lease;
  if (request === null || hashes.length === 0 || sender.computedTokens !== shared * limits.pageTokens) return;
  const prompt = { tokens: request.promptTokens, salt, hashes };
  const path = findPath(cache, prompt, shared, lease.pages[shared - 1] ?? null);
  room.branchTokens = Math.max(room.branchTokens, (shared + path.length) * limits.pageTokens);
  const usable = path.slice(0, usableLength(cache, path));
  if (usable.length === 0) return;
  const replaced = lease.pages.slice(shared, shared + usable.length);
  if (room.resume !== null) leaveState(cache, room.resume, owner);
  room.resume = joinPrefix(cache, pools, usable, owner);
  giveBack(pools.pages, replaced, owner);
  lease.pages.splice(shared, usable.length, ...usable);
  lease.shared += usable.length;
  skipCached(state, room, lease);
}

/** The room's shared pages count as computed. */
function skipCached(state: PrefillState, room: PrefillRoom, lease: Lease): void {
  const computedTokens = lease.shared * state.limits.pageTokens;
  room.cachedTokens += computedTokens - room.sender.computedTokens;
  stepSender(room.sender, { type: 'cached', computedTokens }, state.limits);
}

/** Gauges, counted from the state. */
export function statsPrefill(state: PrefillState): PrefillStats {
  const { desk, pools } = state;
  const prefix = statsPrefix(state.cache);
  const stats: PrefillStats = {
    bootstrapping: 0,
    waiting: 0,
    computing: 0,
    inflight: 0,
    unwinding: 0,
    rooms: state.live.size,
    pagesFree: pools.pages.free.length,
    pagesHeld: prefix.pagesRead,
    pagesCached: prefix.pagesIdle,
    pagesQuarantined: quarantinedCount(pools.pages),
    statesFree: prefix.statesFree,
    statesHeld: prefix.statesHeld,
    prefixes: { ...state.cache.counts },
    slotsFree: pools.slots.free.length,
    slotsHeld: 0,
    stagingBytes: stagedBytes(state),
    queuedTokens: 0,
    unackedToPeers: desk.closing.unwinds.size,
    unackedToRouters: desk.closing.endings.size,
    tombstones: desk.closing.tombstones.size,
    computedTokens: state.computedTokens,
    violations: desk.violations,
    draining: desk.draining,
    drops: { ...desk.drops },
  };
  for (const { sender, lease } of state.live.values()) {
    stats[gaugeOf(sender)]++;
    if (lease !== null) stats.pagesHeld += lease.pages.length - lease.shared;
    stats.slotsHeld += lease === null ? 0 : 1;
    if (sender.phase !== 'unwinding') stats.queuedTokens += sender.tokenCount - sender.computedTokens;
  }
  return stats;
}

/** Everything that must be true between steps, recounted from scratch. Empty when all is well. */
export function auditPrefill(state: PrefillState): string[] {
  const leases: Lease[] = [];
  const found: string[] = [];
  for (const [key, { sender, lease, request, fetching }] of state.live) {
    if (lease !== null) leases.push(lease);
    if (sender.phase === 'ended') found.push(`${key}: ended, but live`);
    if ((sender.phase === 'transferring') !== (lease !== null) && sender.phase !== 'unwinding') {
      found.push(`${key}: ${sender.phase} ${lease === null ? 'without' : 'with'} a lease`);
    }
    if (sender.readBytes > sender.creditBytes) found.push(`${key}: read beyond the credit`);
    if (sender.submitted !== (request !== null) && sender.phase !== 'unwinding') {
      found.push(`${key}: submitted ${sender.submitted}, but ${request === null ? 'no ' : ''}request`);
    }
    if (sender.phase !== 'unwinding' && isClosed(state.desk.closing, key)) found.push(`${key}: closed, but live`);
    const isStepping = fetching !== null || (state.step?.some((part) => part.key === key) ?? false);
    if (sender.stepping !== isStepping) {
      found.push(`${key}: stepping ${sender.stepping}`);
    }
    const isQueued = state.waiting.includes(key);
    if (isQueued !== (sender.phase === 'waiting')) found.push(`${key}: ${sender.phase}, queued ${isQueued}`);
    const isComputing = sender.phase === 'transferring' && sender.firstToken === null;
    if (isComputing !== state.computing.includes(key)) found.push(`${key}: computing ${isComputing}`);
  }
  for (const key of [...state.waiting, ...state.computing]) {
    if (!state.live.has(key)) found.push(`${key}: queued, but not live`);
  }
  if (state.live.size > state.limits.maxRooms) found.push(`${state.live.size} rooms`);
  const making = new Map<StateId, string>();
  for (const { key, keep } of state.step ?? []) {
    const owner = state.live.get(key)?.lease?.owner;
    if (keep !== null && owner !== undefined) making.set(keep, owner);
  }
  const starting = new Map<string, StateId[]>();
  for (const { lease, resume, fetching } of state.live.values()) {
    if (lease !== null && resume !== null) starting.set(lease.owner, [resume]);
    if (lease !== null && fetching !== null && fetching.keep !== null) making.set(fetching.keep, lease.owner);
  }
  const stashes = [...state.stashes.values()];
  for (const { owner, states } of stashes) starting.set(owner, states);
  const { cache, pools } = state;
  return [...found, ...auditPools(pools, leases, stashes), ...auditPrefix(cache, pools, { making, starting })];
}

/** The queue that a room counts in. */
export function gaugeOf(sender: Sender): 'bootstrapping' | 'waiting' | 'computing' | 'inflight' | 'unwinding' {
  if (sender.phase === 'transferring') return sender.firstToken === null ? 'computing' : 'inflight';
  return sender.phase === 'ended' ? 'unwinding' : sender.phase;
}

function onRouterMessage(
  state: PrefillState,
  router: Epoch,
  message: RouterToWorker,
  nowMs: number,
  effects: WorkerEffect[],
): void {
  const { desk, live, limits } = state;
  if (desk.closing.deadRouters.includes(router)) {
    desk.drops.staleEpoch++;
    return;
  }
  switch (message.type) {
    case 'submit':
      onSubmit(state, router, message, nowMs, effects);
      break;
    case 'cancel':
    case 'peer_failed': {
      const { key } = message;
      const reason = message.type === 'cancel' ? message.reason : 'peer_lost';
      const room = live.get(key);
      if (room === undefined) {
        const isFirst = message.type === 'cancel' ? 'unknown' : 'peer_lost';
        reportClosed(desk, key, isFirst, nowMs, limits, effects);
        break;
      }
      // A cancel says that the router knows the room, so it is told the end even if submit never came.
      room.sender.submitted = true;
      stopRoom(state, key, room, { reason, tellPeer: true }, nowMs, effects);
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
  state: PrefillState,
  router: Epoch,
  message: SubmitMessage,
  nowMs: number,
  effects: WorkerEffect[],
): void {
  const { desk, limits, live } = state;
  const { key } = message;
  if (message.prefill.epoch !== desk.self.epoch || parseKey(key)?.router !== router) {
    desk.drops.staleEpoch++;
    return;
  }
  let room = live.get(key);
  if (room?.sender.submitted === true) {
    if (room.sender.digest !== message.digest) desk.drops.protocol++;
    else if (room.sender.phase !== 'unwinding') accept(state, router, key, effects);
    return;
  }
  if (room === undefined) {
    const refusal = refuse(state, message);
    if (refusal !== null) {
      reportClosed(desk, key, refusal, nowMs, limits, effects);
      return;
    }
    room = createRoom(state, key, message.decode, message.digest, message.promptTokens.length, nowMs);
  }
  const { promptTokens, sampling, maxTokens, stopTokens, salt, budgetMs } = message;
  const deadlineMs = nowMs + budgetMs;
  room.salt = salt;
  // Of a cached token there are no logits: a prompt that is to be told of is computed whole, and no page of it is kept.
  const isCached = isCaching(state.cache) && !sampling.promptLogprobs;
  if (isCached) room.hashes = hashPrompt(state.cache, promptTokens, salt);
  room.request = { promptTokens, sampling, maxTokens, stopTokens, deadlineMs };
  accept(state, router, key, effects);
  const digest = promptDigest(promptTokens, limits.modelDigest);
  const tokenCount = promptTokens.length;
  runSender(state, key, room, { type: 'submit', digest, tokenCount, nowMs }, effects);
}

/** Why a submit cannot become a room, or null. */
function refuse(state: PrefillState, message: SubmitMessage): Reason | null {
  const { desk, limits, live } = state;
  if (isClosed(desk.closing, message.key)) return 'gone'; // answered from its tombstone
  if (desk.draining) return 'draining';
  const tokenCount = message.promptTokens.length;
  if (tokenCount === 0 || message.maxTokens === 0) return 'protocol';
  if (live.size >= limits.maxRooms || !canEverFit(limits, tokenCount)) return 'overloaded';
  if (message.digest !== promptDigest(message.promptTokens, limits.modelDigest)) return 'mismatch';
  if (isSuperseded(desk, message.decode)) return 'peer_lost';
  return null;
}

function canEverFit(limits: PrefillLimits, tokenCount: number): boolean {
  return tokenCount <= limits.maxSequenceTokens && Math.ceil(tokenCount / limits.pageTokens) <= limits.pageCount;
}

function accept(state: PrefillState, router: Epoch, key: RoomKey, effects: WorkerEffect[]): void {
  const { epoch } = state.desk.self;
  effects.push({ type: 'report', router, message: { type: 'accepted', key, epoch } });
}

function createRoom(
  state: PrefillState,
  key: RoomKey,
  decode: Instance,
  digest: string,
  tokenCount: number,
  nowMs: number,
): PrefillRoom {
  const peer = { name: decode.name, epoch: decode.epoch };
  const self = state.desk.self.epoch;
  const sender = createSender({ key, self, peer, tokenCount, digest }, nowMs, state.limits);
  const room: PrefillRoom = {
    sender,
    request: null,
    lease: null,
    hashes: [],
    salt: null,
    resume: null,
    branchTokens: 0,
    cachedTokens: 0,
    promptChoices: null,
    fetching: null,
  };
  state.live.set(key, room);
  return room;
}

function onPeerMessage(
  state: PrefillState,
  peer: Instance,
  message: PeerMessage,
  nowMs: number,
  effects: WorkerEffect[],
): void {
  const { desk, live } = state;
  if (!isCurrent(desk, peer, message)) return;
  const { key } = message;
  const to = { from: desk.self.epoch, to: peer.epoch, key };
  let room = live.get(key);
  if (room !== undefined && room.sender.peer.epoch !== peer.epoch) {
    desk.drops.protocol++;
    return;
  }
  if (message.type === 'ABORT_ACK') {
    if (desk.closing.unwinds.get(key)?.message.type === 'ABORT') desk.closing.unwinds.delete(key);
    else desk.drops.duplicate++;
    return;
  }
  if (message.type === 'DONE') {
    effects.push({ type: 'send', peer, socket: 'control', message: { type: 'DONE_ACK', ...to } });
  }
  if (message.type === 'ABORT' && room === undefined) {
    buryUnseen(desk.closing, key, 'peer_aborted');
  }
  if (room === undefined && message.type === 'OPEN') {
    const refusal = refuseOpen(state, message);
    if (refusal !== null) {
      // Stateless, one for each OPEN heard; the peer's re-sends set the pace.
      const abort = { type: 'ABORT', ...to, reason: refusal } as const;
      effects.push({ type: 'send', peer, socket: 'data', message: abort });
      countStray(desk, key);
      return;
    }
    room = createRoom(state, key, peer, message.digest, message.tokenCount, nowMs);
  }
  if (room === undefined) {
    if (message.type !== 'ABORT' && message.type !== 'DONE') countStray(desk, key);
  } else {
    runSender(state, key, room, { type: 'message', message, nowMs }, effects);
  }
  if (message.type === 'ABORT') {
    // Behind everything the stop itself sent on the data socket, so it also returns the room's credit.
    effects.push({ type: 'send', peer, socket: 'data', message: { type: 'ABORT_ACK', ...to } });
  }
}

/** Why an OPEN cannot become a room, or null. */
function refuseOpen(state: PrefillState, message: { key: RoomKey; tokenCount: number }): Reason | null {
  const { desk, limits, live } = state;
  const tombstone = desk.closing.tombstones.get(message.key);
  if (tombstone !== undefined) return tombstone.outcome.ok ? 'gone' : tombstone.outcome.reason;
  if (isClosed(desk.closing, message.key)) return 'gone';
  if (desk.draining) return 'draining';
  if (live.size >= limits.maxRooms || !canEverFit(limits, message.tokenCount)) return 'overloaded';
  return message.tokenCount === 0 ? 'protocol' : null;
}

function onPeerUp(state: PrefillState, peer: Instance, nowMs: number, effects: WorkerEffect[]): void {
  const known = state.desk.peers.get(peer.name);
  if (known !== undefined && known !== peer.epoch) {
    onPeerLost(state, { name: peer.name, epoch: known }, nowMs, effects);
  }
  // Rooms of an older life that never had a link to us.
  for (const [key, room] of state.live) {
    const other = room.sender.peer;
    if (other.name === peer.name && other.epoch < peer.epoch) {
      stopRoom(state, key, room, { reason: 'peer_lost', tellPeer: false }, nowMs, effects);
    }
  }
  linkPeer(state.desk, peer, nowMs);
  for (const [key, room] of state.live) {
    if (room.sender.peer.epoch === peer.epoch) {
      runSender(state, key, room, { type: 'peer_up', nowMs }, effects);
    }
  }
  tickDesk(state.desk, nowMs, 'data', state.limits, effects);
}

function onPeerLost(state: PrefillState, peer: Instance, nowMs: number, effects: WorkerEffect[]): void {
  for (const [key, room] of state.live) {
    if (room.sender.peer.epoch === peer.epoch) {
      stopRoom(state, key, room, { reason: 'peer_lost', tellPeer: false }, nowMs, effects);
    }
  }
  unlinkPeer(state.desk, peer);
}

function onStepDone(
  state: PrefillState,
  tokens: readonly SampledToken[],
  nowMs: number,
  effects: WorkerEffect[],
): void {
  const { step } = state;
  if (step === null) throw new Error('step_done without a step');
  state.step = null;
  const sampled = new Map(tokens.map((each) => [each.key, each]));
  for (const { key, end, last, keep } of step) {
    const room = state.live.get(key) as PrefillRoom;
    state.computedTokens += end - room.sender.computedTokens;
    const told = sampled.get(key);
    if (last && told === undefined) throw new Error(`step_done has no token for the last chunk of ${key}`);
    notePromptChoices(room, told?.promptChoices);
    if (last) remove(state.computing, key);
    publish(state, room, end, keep);
    if (last) reportCached(state, key, room, effects);
    const firstToken = told?.token ?? null;
    const choices = last ? { firstChoice: told?.choice, promptChoices: room.promptChoices ?? undefined } : {};
    runSender(state, key, room, { type: 'computed', computedTokens: end, firstToken, ...choices, nowMs }, effects);
    if (last && firstToken === null && state.live.has(key)) {
      stopRoom(state, key, room, { reason: 'unsatisfiable', tellPeer: true }, nowMs, effects);
    }
  }
}

/** What a step tells of the tokens that follow those of its chunk, before the chunk counts as computed. */
function notePromptChoices(room: PrefillRoom, told: PackedChoices | undefined): void {
  const { request, sender } = room;
  if (!request?.sampling.promptLogprobs) return;
  if (told === undefined) throw new Error(`step_done tells nothing of the prompt of ${sender.key}, which asks for it`);
  const choiceBytes = packedChoiceBytes(request.sampling.logprobs ?? 0);
  room.promptChoices ??= new Uint8Array((sender.tokenCount - 1) * choiceBytes);
  room.promptChoices.set(told, sender.computedTokens * choiceBytes);
}

/** What a step computed enters the cache, before any of it is read, unless its room has been stopped meanwhile. */
function publish(
  state: PrefillState,
  { sender, request, lease, salt, hashes }: PrefillRoom,
  end: number,
  keep: StateId | null,
): void {
  const { cache, pools } = state;
  if (request === null || lease === null || hashes.length === 0) return;
  if (sender.phase === 'unwinding') {
    if (keep !== null) giveBack(cache.states, [keep], lease.owner);
    return;
  }
  publishPrefix(cache, pools, lease, { prompt: { tokens: request.promptTokens, salt, hashes }, end, state: keep });
}

/** A prompt is computed: count it, and tell its router how much of it was cached. */
function reportCached(state: PrefillState, key: RoomKey, room: PrefillRoom, effects: WorkerEffect[]): void {
  const { cache, desk } = state;
  const router = parseKey(key)?.router;
  if (!isCaching(cache) || room.sender.phase === 'unwinding' || router === undefined) return;
  const { cachedTokens: tokenCount } = room;
  if (tokenCount > 0) cache.counts.hits++;
  else cache.counts.misses++;
  cache.counts.tokens += tokenCount;
  effects.push({ type: 'report', router, message: { type: 'cached', key, epoch: desk.self.epoch, tokenCount } });
}

function onTick(state: PrefillState, nowMs: number, effects: WorkerEffect[]): void {
  const pauseMs = ownPauseMs(state.desk, nowMs);
  for (const [key, room] of state.live) {
    const { request } = room;
    if (request !== null) request.deadlineMs += pauseMs;
    if (nowMs >= (request?.deadlineMs ?? Infinity)) {
      stopRoom(state, key, room, { reason: 'deadline', tellPeer: true }, nowMs, effects);
      continue;
    }
    room.sender.roomDeadlineMs += pauseMs;
    if (room.sender.stallDeadlineMs !== null) room.sender.stallDeadlineMs += pauseMs;
    runSender(state, key, room, { type: 'tick', nowMs }, effects);
  }
  tickDesk(state.desk, nowMs, 'data', state.limits, effects);
}

function stopRoom(
  state: PrefillState,
  key: RoomKey,
  room: PrefillRoom,
  { reason, tellPeer }: { reason: Reason; tellPeer: boolean },
  nowMs: number,
  effects: WorkerEffect[],
): void {
  runSender(state, key, room, { type: 'stop', reason, tellPeer, nowMs }, effects);
}

/** Step one sender and do what its effects ask of this worker. */
function runSender(
  state: PrefillState,
  key: RoomKey,
  room: PrefillRoom,
  event: Exclude<SenderEvent, { type: 'cached' | 'step_started' }>,
  effects: WorkerEffect[],
): void {
  const { desk, limits } = state;
  const { peer } = room.sender;
  for (const effect of stepSender(room.sender, event, limits)) {
    switch (effect.type) {
      case 'send':
        effects.push({ type: 'send', peer, socket: effect.socket, message: effect.message });
        break;
      case 'discard':
        effects.push({ type: 'discard', key, firstUnit: effect.firstUnit, unitCount: effect.unitCount });
        break;
      case 'waiting':
        state.waiting.push(key);
        break;
      case 'stopped': {
        remove(state.waiting, key);
        remove(state.computing, key);
        if (room.lease !== null) disownPrefix(state.cache, state.pools, room.lease);
        const { reason, tellPeer } = effect;
        const stop = { key, peer, reason, tellPeer, tokenCount: 0, socket: 'data' } as const;
        enterUnwinding(desk, stop, event.nowMs, limits, effects);
        break;
      }
      case 'ended':
        closeRoom(state, key, room, effect.outcome, event.nowMs, effects);
        break;
      case 'drop':
        desk.drops[effect.kind]++;
        break;
      default:
        throw new Error(`unknown effect ${JSON.stringify(effect satisfies never)}`);
    }
  }
}

/** The one place where a room's resources are released. */
function closeRoom(
  state: PrefillState,
  key: RoomKey,
  room: PrefillRoom,
  outcome: Outcome,
  nowMs: number,
  effects: WorkerEffect[],
): void {
  const { cache, desk, live, limits, pools } = state;
  const { lease, resume } = room;
  if (lease !== null) {
    if (outcome.ok) {
      verifyPrefix(cache, lease);
      stash(state, key, room, effects);
    }
    if (resume !== null) leaveState(cache, resume, lease.owner);
    leavePrefix(cache, pools, lease);
    release(pools, lease);
  }
  reportViolations(desk, key, [...takePoolViolations(pools), ...takeViolations(cache.states)], effects);
  live.delete(key);
  bury(desk.closing, key, outcome, 0);
  if (room.sender.submitted) reportEnd(desk, { key, outcome, tokenCount: 0 }, nowMs, limits, effects);
}

/** What a room has verified is copied to the tier, which reads it until then. */
function stash(state: PrefillState, key: RoomKey, room: PrefillRoom, effects: WorkerEffect[]): void {
  const { cache, pools, limits, stashes } = state;
  const { lease, request, salt } = room;
  if (!limits.hasTier || lease === null || request === null) return;
  const path = lease.pages.slice(0, lease.shared).filter((page) => cache.pages.has(page));
  const { pages, states } = takeUnstashed(cache, path);
  if (pages.length + states.length === 0) return;
  const held = states.map(({ state: each }) => each);
  const owner = `stash ${key}`;
  holdPrefix(cache, pools, { pages: path, states: held }, owner);
  stashes.set(key, { owner, pages: path, shared: path.length, states: held });
  effects.push({ type: 'stash', key, tokens: request.promptTokens, salt, pages, states });
}

/**
 * Lend pages and a slot to the head of the queue while they suffice: all of a room's pages, or none. Those that the
 * cache has are read instead, and those that nobody reads give way.
 */
function admitWaiting(state: PrefillState, nowMs: number, effects: WorkerEffect[]): void {
  const { cache, pools, limits } = state;
  for (;;) {
    const key = state.waiting[0];
    if (key === undefined) return;
    // The last page of a prompt is never a cached one, so a room needs a page in any case.
    if (pools.slots.free.length === 0 || pools.pages.free.length + cache.idleCount === 0) return;
    const room = state.live.get(key) as PrefillRoom;
    const owner = `session ${key}`;
    const prefix = usablePrefix(state, room);
    const pageCount = Math.ceil(room.sender.tokenCount / limits.pageTokens) - prefix.length;
    const resume = prefix.length > 0 ? joinPrefix(cache, pools, prefix, owner) : null;
    const lease = makeRoom(cache, pools, pageCount) ? lend(pools, pageCount, owner) : null;
    if (lease === null) {
      if (resume !== null) leaveState(cache, resume, owner);
      leavePrefix(cache, pools, { owner, pages: prefix, shared: prefix.length });
      return;
    }
    lease.pages.unshift(...prefix);
    lease.shared = prefix.length;
    Object.assign(room, { lease, resume });
    state.waiting.shift();
    state.computing.push(key);
    runSender(state, key, room, { type: 'admitted', nowMs }, effects);
    skipCached(state, room, lease);
    askTier(state, key, room, effects);
  }
}

/** If the tier may have more of the prompt than the cache, it is asked before anything is computed. */
function askTier(state: PrefillState, key: RoomKey, room: PrefillRoom, effects: WorkerEffect[]): void {
  const { cache, limits } = state;
  const { lease, request, salt, hashes } = room;
  if (!limits.hasTier || lease === null || request === null) return;
  const { pages, shared, slot, owner } = lease;
  const most = Math.floor((request.promptTokens.length - 1) / limits.pageTokens);
  if (hashes.length === 0 || shared >= most) return;
  const keep = takeState(cache, owner);
  room.fetching = { keep };
  stepSender(room.sender, { type: 'step_started' }, limits);
  const tokens = request.promptTokens;
  effects.push({ type: 'fetch', key, tokens, salt, from: shared, pages: pages.slice(0, most), slot, keep });
}

function onFetched(
  state: PrefillState,
  key: RoomKey,
  tokenCount: number,
  nowMs: number,
  effects: WorkerEffect[],
): void {
  const { cache } = state;
  const room = state.live.get(key);
  if (room?.fetching == null || room.lease === null) throw new Error(`fetched for ${key}, which does not wait for it`);
  const { keep } = room.fetching;
  room.fetching = null;
  const computedTokens = Math.max(tokenCount, room.sender.computedTokens);
  if (tokenCount > room.sender.computedTokens) {
    room.cachedTokens += tokenCount - room.sender.computedTokens;
    // Its slot is further than the state that it was to start from.
    if (room.resume !== null) leaveState(cache, room.resume, room.lease.owner);
    room.resume = null;
    publish(state, room, tokenCount, keep);
  } else if (keep !== null) giveBack(cache.states, [keep], room.lease.owner);
  runSender(state, key, room, { type: 'computed', computedTokens, firstToken: null, nowMs }, effects);
}

/** Cached pages from which a room can start. */
function usablePrefix({ cache }: PrefillState, { request, salt, hashes }: PrefillRoom): PageId[] {
  if (request === null || hashes.length === 0) return [];
  const path = findPath(cache, { tokens: request.promptTokens, salt, hashes }, 0, null);
  return path.slice(0, usableLength(cache, path));
}

/** Start reads while staging has room, one chunk a room in turn. */
function startReads(state: PrefillState, nowMs: number, effects: WorkerEffect[]): void {
  const { limits, live } = state;
  let free = limits.stagingBytes - stagedBytes(state);
  for (let started = true; started && free > 0;) {
    started = false;
    for (const [key, { sender, lease }] of live) {
      if (lease === null || free <= 0) continue;
      const range = nextRead(sender, Math.min(free, limits.maxChunkBytes), nowMs, limits);
      if (range === null) continue;
      const places: UnitPlace[] = [];
      const unitEnd = range.firstUnit + range.unitCount;
      for (let unit = range.firstUnit; unit < unitEnd; unit++) {
        const page = lease.pages[unit];
        const isPage = page !== undefined;
        places.push(isPage ? { kind: 'page', page } : { kind: 'slot', slot: lease.slot });
        free -= isPage ? limits.pageBytes : limits.slotBytes;
      }
      effects.push({ type: 'read', key, firstUnit: range.firstUnit, places });
      started = true;
    }
  }
}

function stagedBytes(state: PrefillState): number {
  let bytes = 0;
  for (const { sender } of state.live.values()) bytes += readingBytes(sender);
  return bytes;
}

function remove(queue: RoomKey[], key: RoomKey): void {
  const index = queue.indexOf(key);
  if (index >= 0) queue.splice(index, 1);
}
