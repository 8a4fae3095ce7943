/**
 * A role as the effect loop of worker.ts sees it: one scheduler behind the same few calls, and its state as gauges.
 *
 * Which scheduler runs, with which limits, and how its batches reach the engine is decided here and nowhere else.
 */
import {
  auditDecode,
  createDecode,
  nextDecodeBatch,
  statsDecode,
  stepDecode,
  type DecodeEvent,
} from '../scheduler/decode.ts';
import {
  auditPrefill,
  createPrefill,
  nextPrefillBatch,
  statsPrefill,
  stepPrefill,
  type PrefillEvent,
} from '../scheduler/prefill.ts';
import type { TokenLogprobs } from '../kernels/logprobs.ts';
import type { Sample } from '../model/choice.ts';
import type { PrefixCounts } from '../scheduler/prefix-cache.ts';
import type { DropCounts, PrefillChunk, SampledToken, WorkerEffect, WorkerLimits } from '../scheduler/types.ts';
import { viewDecode, viewPrefill, viewUnacked, type RoomView, type UnackedView } from '../scheduler/views.ts';
import { packChoices, type Instance, type RoomKey, type TokenChoice } from '../transfer/messages.ts';
import type { WorkerConfig } from './config.ts';
import type { Engine, PrefilledChunk } from './engine.ts';
import type { Steering } from './grammar/steering.ts';
import type { WorkerStats } from './metrics.ts';

/** First re-send of an unanswered message, doubling up to the second. */
const RESEND_MIN_MS = 100;
const RESEND_MAX_MS = 2000;
/** How often a half that makes its peer wait says so. */
const STATUS_MS = 2000;
/** Payload of one CHUNK; larger frames gain nothing on loopback. */
const CHUNK_BYTES = 1 << 20;
/** Bytes read back and not yet handed to the channel. */
const STAGING_BYTES = 64 << 20;
/** What one prefill worker may have under way to a decode worker. */
const PEER_BUFFER_BYTES = 64 << 20;
/** What one room may have under way. */
const ROOM_WINDOW_BYTES = 8 << 20;

/** An event of either role. */
export type WorkerEvent = PrefillEvent | DecodeEvent;

/** What the loop needs of a role. */
export interface Core {
  step(event: WorkerEvent): WorkerEffect[];
  /** Start the next step, if there is one: its size, rooms computed for the first time, the tokens it will have sampled. */
  next(): { rows: number; first: readonly RoomKey[]; run: () => Promise<SampledToken[]> } | null;
  /** Rooms that are not over. */
  keys(): RoomKey[];
  /** Every room, and every terminal message without an acknowledgement, for operators. */
  rooms(): RoomView[];
  unacked(): UnackedView[];
  /** Recount everything from scratch. Empty when all is well. */
  audit(): string[];
  /** Gauges of the state; totals that only the loop knows are added by it. */
  gauges(): CoreGauges;
}

/** One snapshot of a scheduler's state, in the shape of the metrics. */
export interface CoreGauges {
  readonly queues: WorkerStats['queues'];
  readonly pages: WorkerStats['pages'];
  readonly slots: WorkerStats['slots'];
  readonly inFlightBytes: number;
  readonly hostBytes: number;
  readonly retractionsTotal: number;
  readonly headroomTokens: number;
  readonly generatedTokensTotal: number;
  readonly unacknowledged: WorkerStats['unacknowledged'];
  readonly tombstones: number;
  readonly ledgerViolationsTotal: number;
  readonly drops: DropCounts;
  readonly rooms: number;
  readonly running: number;
  readonly queuedTokens: number;
  /** Free ones and those that are given back when they are needed. */
  readonly pagesFree: number;
  readonly draining: boolean;
  readonly prefixes: PrefixCounts & { readonly statesFree: number; readonly statesHeld: number };
}

const NO_TIER: WorkerStats['tier'] = { heldBytes: 0, fetchedPages: 0, damaged: 0 };

/** Decode keeps no prefixes. */
const NO_PREFIXES: CoreGauges['prefixes'] = {
  hits: 0,
  misses: 0,
  tokens: 0,
  evictedPages: 0,
  evictedStates: 0,
  statesFree: 0,
  statesHeld: 0,
};

/** What a role is made of. */
export interface CoreParts {
  readonly config: WorkerConfig;
  readonly engine: Engine;
  readonly modelDigest: string;
  /** Follows the answers that are held to a constraint. */
  readonly steering: Steering;
}

function workerLimits({ config, engine, modelDigest }: CoreParts): WorkerLimits {
  const { limits, deadlines } = config;
  return {
    pageTokens: engine.config.pageTokens,
    pageBytes: engine.pageBytes,
    slotBytes: engine.slotBytes,
    pageCount: engine.pageCount,
    slotCount: engine.slotCount,
    maxRooms: limits.maxRunningRequests + limits.maxQueuedRequests,
    maxSequenceTokens: engine.contextTokens,
    strictLedger: false,
    modelDigest,
    leaseMs: deadlines.leaseMs,
    stallMs: deadlines.stallMs,
    roomMs: deadlines.roomMs,
    resendMinMs: RESEND_MIN_MS,
    resendMaxMs: RESEND_MAX_MS,
    statusMs: Math.min(STATUS_MS, deadlines.stallMs / 4),
  };
}

/** True if a prefill worker keeps prefixes outside its adapter. */
export function hasTier(limits: WorkerConfig['limits']): boolean {
  return limits.prefixCacheBytes > 0 && (limits.prefixHostBytes > 0 || limits.prefixStore !== null);
}

/** The prefill role. */
export function prefillCore(parts: CoreParts, self: Instance): Core {
  const { engine } = parts;
  const state = createPrefill(
    {
      ...workerLimits(parts),
      stateCount: engine.stateCount,
      hasTier: hasTier(parts.config.limits),
      prefillChunkTokens: parts.config.limits.prefillChunkTokens,
      maxChunkBytes: CHUNK_BYTES,
      stagingBytes: STAGING_BYTES,
    },
    self,
  );
  return {
    step: (event) => stepPrefill(state, event as PrefillEvent),
    next() {
      const batch = nextPrefillBatch(state);
      if (batch === null) return null;
      return {
        rows: batch.chunks.length,
        first: batch.chunks.flatMap(({ key, start, resume }) => (start === 0 || resume !== null ? [key] : [])),
        async run() {
          const sampling = batch.chunks.filter((chunk) => chunk.last);
          const masks = parts.steering.masks(sampling.map((chunk) => ({ ...chunk, token: null })));
          const chunks = await engine.prefill(batch, masks);
          return chunks.flatMap((chunk, index) => prefilledToken(batch.chunks[index]!, chunk));
        },
      };
    },
    keys: () => [...state.live.keys()],
    rooms: () => viewPrefill(state),
    unacked: () => viewUnacked(state.desk),
    audit: () => auditPrefill(state),
    gauges() {
      const stats = statsPrefill(state);
      const { bootstrapping, waiting, computing, inflight, unwinding } = stats;
      return {
        ...commonGauges(stats),
        queues: {
          prealloc: bootstrapping,
          transfer: 0,
          waiting,
          running: computing,
          retracted: 0,
          inflight,
          unwinding,
        },
        pages: {
          free: stats.pagesFree,
          cached: stats.pagesCached,
          running: 0,
          prealloc: 0,
          inflight: stats.pagesHeld,
          quarantined: stats.pagesQuarantined,
        },
        inFlightBytes: stats.stagingBytes,
        hostBytes: 0,
        retractionsTotal: 0,
        headroomTokens: 0,
        // The first token of every prompt is sampled here, and counted where it is delivered.
        generatedTokensTotal: 0,
        running: computing,
        queuedTokens: stats.queuedTokens,
        pagesFree: stats.pagesFree + stats.pagesCached,
        prefixes: { ...stats.prefixes, statesFree: stats.statesFree, statesHeld: stats.statesHeld },
      };
    },
  };
}

/** The decode role. */
export function decodeCore(parts: CoreParts, self: Instance): Core {
  const { engine } = parts;
  const largestUnit = Math.max(engine.pageBytes, engine.slotBytes);
  const state = createDecode(
    {
      ...workerLimits(parts),
      maxRunning: parts.config.limits.maxRunningRequests,
      peerBufferBytes: Math.max(PEER_BUFFER_BYTES, 4 * largestUnit),
      roomWindowBytes: Math.max(ROOM_WINDOW_BYTES, largestUnit),
      headroomTokens: parts.config.limits.headroomTokens,
      hostBytes: parts.config.limits.hostBytes,
      drafts: parts.config.speculative,
    },
    self,
  );
  return {
    step(event) {
      const effects = stepDecode(state, event as DecodeEvent);
      // Not with the `end` of a room: a router that is dead gets none.
      if (event.type === 'tick') parts.steering.keep(state.live);
      return effects;
    },
    next() {
      const batch = nextDecodeBatch(state);
      if (batch === null) return null;
      return {
        rows: batch.rows.length,
        first: [],
        async run() {
          const samples = await engine.decode(batch, parts.steering.masks(batch.rows));
          return batch.rows.flatMap(({ key }, index) =>
            samples[index]!.map((sample) => {
              if (sample.token !== null) parts.steering.took(key, sample.token);
              return sampledToken(key, sample);
            }),
          );
        },
      };
    },
    keys: () => [...state.live.keys()],
    rooms: () => viewDecode(state),
    unacked: () => viewUnacked(state.desk),
    audit: () => auditDecode(state),
    gauges() {
      const stats = statsDecode(state);
      const { prealloc, transfer, waiting, running, unwinding } = stats;
      return {
        ...commonGauges(stats),
        queues: {
          prealloc,
          transfer,
          waiting,
          running,
          retracted: stats.saving + stats.retracted + stats.restoring,
          inflight: 0,
          unwinding,
        },
        pages: {
          free: stats.pagesFree,
          cached: 0,
          running: stats.pagesRunning,
          prealloc: stats.pagesPrealloc,
          inflight: 0,
          quarantined: stats.pagesQuarantined,
        },
        inFlightBytes: stats.creditBytes,
        hostBytes: stats.hostBytes,
        retractionsTotal: stats.retractions,
        headroomTokens: stats.headroomTokens,
        generatedTokensTotal: stats.generatedTokens,
        running,
        queuedTokens: 0,
        prefixes: NO_PREFIXES,
      };
    },
  };
}

/** A sample as the schedulers and the wire have it. */
function sampledToken(key: RoomKey, { token, logprobs }: Sample): SampledToken {
  return token === null || logprobs === null ? { key, token } : { key, token, choice: tokenChoice(logprobs) };
}

function tokenChoice({ logprob, top }: TokenLogprobs): TokenChoice {
  return { logprob, topIds: top.map(({ id }) => id), topLogprobs: top.map((each) => each.logprob) };
}

/** What the prefill scheduler is told of a chunk: nothing of one in the midst of a prompt, unless the prompt asks. */
function prefilledToken({ key, sampling }: PrefillChunk, chunk: PrefilledChunk): SampledToken[] {
  const { sample, promptLogprobs } = chunk;
  const sampled = sample === null ? { key, token: null } : sampledToken(key, sample);
  if (promptLogprobs === null) return sample === null ? [] : [sampled];
  return [{ ...sampled, promptChoices: packChoices(promptLogprobs.map(tokenChoice), sampling.logprobs ?? 0) }];
}

function commonGauges(
  stats: ReturnType<typeof statsPrefill> | ReturnType<typeof statsDecode>,
): Pick<
  CoreGauges,
  'slots' | 'unacknowledged' | 'tombstones' | 'ledgerViolationsTotal' | 'drops' | 'rooms' | 'pagesFree' | 'draining'
> {
  return {
    slots: { free: stats.slotsFree, used: stats.slotsHeld },
    unacknowledged: { peer: stats.unackedToPeers, router: stats.unackedToRouters },
    tombstones: stats.tombstones,
    ledgerViolationsTotal: stats.violations,
    drops: stats.drops,
    rooms: stats.rooms,
    pagesFree: stats.pagesFree,
    draining: stats.draining,
  };
}

/** What `/metrics` shows of a worker: the gauges of its state, the engine's count, and the loop's totals. */
export function workerStats(
  gauges: CoreGauges,
  engine: Engine,
  totals: { sentBytes: number; receivedBytes: number; bootstrapFailures: number; transferFailures: number },
  tier: WorkerStats['tier'] | null,
): WorkerStats {
  const { drops } = gauges;
  return {
    queues: gauges.queues,
    pages: gauges.pages,
    slots: gauges.slots,
    sentBytesTotal: totals.sentBytes,
    receivedBytesTotal: totals.receivedBytes,
    inFlightBytes: gauges.inFlightBytes,
    hostBytes: gauges.hostBytes,
    retractionsTotal: gauges.retractionsTotal,
    headroomTokens: gauges.headroomTokens,
    drafts: engine.draftCounts(),
    prefilledTokensTotal: engine.prefilledTokens(),
    cachedTokensTotal: gauges.prefixes.tokens,
    prefixes: gauges.prefixes,
    tier: tier ?? NO_TIER,
    generatedTokensTotal: gauges.generatedTokensTotal,
    bootstrapFailuresTotal: totals.bootstrapFailures,
    transferFailuresTotal: totals.transferFailures,
    checksumFailuresTotal: drops.badChecksum,
    droppedMessagesTotal: {
      late: drops.late,
      duplicate: drops.duplicate,
      unknown: drops.unknown,
      stale_epoch: drops.staleEpoch,
      protocol: drops.protocol,
      ignored: drops.ignored,
    },
    unacknowledged: gauges.unacknowledged,
    tombstones: gauges.tombstones,
    ledgerViolationsTotal: gauges.ledgerViolationsTotal,
  };
}
