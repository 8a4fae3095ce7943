/**
 * Every metric of every process, declared once, and the text that `/metrics` answers with.
 *
 * Names are `sglang_*` where SGLang has the metric (its dashboards then work unchanged) and `handoff_*`
 * otherwise; SGLang's `_ms`, `_mb` and `_histogram` names are left out, because `promtool check metrics` refuses
 * them. Base units, labels from closed sets, never an id. Gauges and ledger counters are read from a
 * `stats()` of the pure state once per scrape, so they cannot drift from it; only what happens between two
 * scrapes (latencies, batch sizes, outcomes) is pushed.
 *
 * A worker exposes its own registry. The router's text is its own and every worker's, merged family by family,
 * with a `worker` label to keep the series apart.
 */
import { readdirSync } from 'node:fs';
import { Agent, get } from 'node:http';
import { Counter, Gauge, Histogram, Registry, exponentialBuckets } from 'prom-client';
import { REASONS } from '../transfer/messages.ts';
import type { Reason } from '../transfer/messages.ts';
import type { BuildInfo } from './operators/build-info.ts';
import type { PeerView } from './operators/peer-book.ts';
import type { OldestStay } from './operators/room-watch.ts';

export type MetricsRole = 'router' | 'prefill' | 'decode';

/** Where a request was when it was aborted, as far as the router can know: prefill lasts until the first token. */
export const ABORT_PHASES = ['queued', 'prefill', 'decode'] as const;
export type AbortPhase = (typeof ABORT_PHASES)[number];

/** How a request can end; the router's room outcomes. */
export const REQUEST_OUTCOMES = ['stop', 'length', 'cancelled', 'failed'] as const;
export type RequestOutcome = (typeof REQUEST_OUTCOMES)[number];

/** Queues of a worker, in the order a room passes them. Those its role lacks stay 0. */
export const WORKER_QUEUES = [
  'prealloc',
  'transfer',
  'waiting',
  'running',
  'retracted',
  'inflight',
  'unwinding',
] as const;
export type WorkerQueue = (typeof WORKER_QUEUES)[number];

export const PAGE_STATES = ['free', 'cached', 'running', 'prealloc', 'inflight', 'quarantined'] as const;
export type PageState = (typeof PAGE_STATES)[number];

/** Why a message of a peer was dropped. */
export const DROPPED_KINDS = ['late', 'duplicate', 'unknown', 'stale_epoch', 'protocol', 'ignored'] as const;
export type DroppedKind = (typeof DROPPED_KINDS)[number];

/** What the router knows at scrape time. */
export interface RouterStats {
  /** Requests admitted that have no first token yet. */
  readonly queued: number;
  /** Requests whose answer is under way. */
  readonly running: number;
  /** Requests whose client has its outcome while a worker still has to report the end of its half. */
  readonly unwinding: number;
}

/** What a worker knows at scrape time: plain counts of its pure state. Totals only grow while it lives. */
export interface WorkerStats {
  /**
   * Rooms per queue. On prefill, prealloc is the bootstrap queue (waiting for the peer's reservation) and
   * running is the rooms being computed. Retracted are those on their way to host memory, in it, or back.
   */
  readonly queues: Readonly<Record<WorkerQueue, number>>;
  /** Pages per state; their sum is the pool. */
  readonly pages: Readonly<Record<PageState, number>>;
  readonly slots: { readonly free: number; readonly used: number };
  /** Payload bytes of KV units sent and received. */
  readonly sentBytesTotal: number;
  readonly receivedBytesTotal: number;
  /** Payload bytes sent and not yet confirmed, or received and not yet written. */
  readonly inFlightBytes: number;
  /** Host memory of retracted sequences; stays 0 on prefill. */
  readonly hostBytes: number;
  /** Times a sequence was retracted; stays 0 on prefill. */
  readonly retractionsTotal: number;
  /** Tokens of headroom in a new reservation; 0 on prefill. */
  readonly headroomTokens: number;
  /** Prompt tokens computed by this worker; stays 0 on decode. */
  readonly prefilledTokensTotal: number;
  /** Prompt tokens taken from the prefix cache instead. */
  readonly cachedTokensTotal: number;
  /** The prefix cache; all 0 on decode. */
  readonly prefixes: {
    /** Prompts that began with cached pages, and that did not. */
    readonly hits: number;
    readonly misses: number;
    readonly evictedPages: number;
    readonly evictedStates: number;
    readonly statesFree: number;
    readonly statesHeld: number;
  };
  /** The tier below it; all 0 where there is none. */
  readonly tier: { readonly heldBytes: number; readonly fetchedPages: number; readonly damaged: number };
  /** Tokens sampled by this worker. */
  readonly generatedTokensTotal: number;
  /** Rows that decode steps have run, those that had a draft, and those whose draft was right; all 0 on prefill. */
  readonly drafts: { readonly rows: number; readonly drafts: number; readonly rightDrafts: number };
  /** Rooms that ended without success before (bootstrap) and during their transfer. */
  readonly bootstrapFailuresTotal: number;
  readonly transferFailuresTotal: number;
  readonly checksumFailuresTotal: number;
  readonly droppedMessagesTotal: Readonly<Record<DroppedKind, number>>;
  /** Terminal messages that wait for an acknowledgement: ABORT and DONE to peers, `end` to routers. */
  readonly unacknowledged: { readonly peer: number; readonly router: number };
  readonly tombstones: number;
  readonly ledgerViolationsTotal: number;
}

/** What every process can tell of its rooms and peers beside counts, at scrape time. */
export interface Sights {
  /** Of the queues and states in `ROOM_STATES`; what is left out is 0. */
  readonly oldest: readonly OldestStay[];
  readonly peers: readonly (PeerView & { readonly creditBytes: number })[];
  readonly reaperAgeSeconds: number;
  readonly links: { readonly queuedBytes: number; readonly droppedTotal: number; readonly rejectedTotal: number };
}

/** What only workers can tell. */
export interface WorkerSights extends Sights {
  readonly oldestUnacknowledgedSeconds: number;
  readonly auditAgeSeconds: number;
  readonly conservationFaults: number;
}

/** Queues and the states in them, per role: the series of `handoff_oldest_age_seconds` that are always there. */
const ROOM_STATES: Readonly<Record<MetricsRole, Readonly<Record<string, readonly string[]>>>> = {
  router: { queued: ['choosing', 'running'], running: ['running'], unwinding: ['choosing', 'running'] },
  prefill: {
    prealloc: ['bootstrapping'],
    waiting: ['waiting'],
    running: ['transferring'],
    inflight: ['transferring'],
    unwinding: ['unwinding'],
  },
  decode: {
    prealloc: ['queued'],
    transfer: ['bootstrapping', 'transferring'],
    waiting: ['waiting'],
    running: ['running'],
    retracted: ['saving', 'retracted', 'restoring'],
    unwinding: ['unwinding'],
  },
};

interface Declaration {
  readonly name: string;
  readonly type: 'counter' | 'gauge' | 'histogram';
  readonly help: string;
  /** Besides `model_name` and `engine_type`, which all series have. */
  readonly labels: readonly string[];
  readonly buckets?: readonly number[];
  readonly on: readonly MetricsRole[];
}

/** SGLang's, so that its dashboards' quantiles line up. */
const TTFT_BUCKETS = [0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400];
const ITL_BUCKETS = [
  0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4,
  6, 8,
];
const E2E_BUCKETS = [...TTFT_BUCKETS, 600, 1200, 1800, 2400];
const QUEUE_BUCKETS = [
  0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100, 200, 300, 400,
  500, 600, 700, 800, 900, 1000, 1200, 1400, 1600, 1800, 2000, 2500, 3000,
];
const LAG_BUCKETS = [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5];
/** 1 ms to 33 s. */
const STEP_BUCKETS = exponentialBuckets(0.001, 2, 16);
const BATCH_BUCKETS = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024];

const ROUTER = ['router'] as const;
const WORKERS = ['prefill', 'decode'] as const;
const EVERYWHERE = ['router', 'prefill', 'decode'] as const;

const METRICS = {
  // The router: what clients see.
  requests: {
    name: 'sglang_num_requests_total',
    type: 'counter',
    help: 'Requests that ended, however.',
    labels: ['is_streaming'],
    on: ROUTER,
  },
  outcomes: {
    name: 'handoff_request_outcomes_total',
    type: 'counter',
    help: 'Requests that ended, by outcome: stop, length, cancelled, failed.',
    labels: ['outcome'],
    on: ROUTER,
  },
  aborted: {
    name: 'sglang_num_aborted_requests_total',
    type: 'counter',
    help: 'Requests that were cancelled or failed after they were admitted.',
    labels: [],
    on: ROUTER,
  },
  aborts: {
    name: 'handoff_aborts_total',
    type: 'counter',
    help: 'Aborted requests by reason and by the phase they were in: queued, prefill (hand-over included), decode.',
    labels: ['reason', 'phase'],
    on: ROUTER,
  },
  rejections: {
    name: 'handoff_rejections_total',
    type: 'counter',
    help: 'Requests refused with 503 before anything was reserved, by error code.',
    labels: ['code'],
    on: ROUTER,
  },
  constrained: {
    name: 'handoff_constrained_answers_total',
    type: 'counter',
    help: 'Answers held to a schema or a tool, by what became of them: met, cut (off by a limit), violated (see the log).',
    labels: ['outcome'],
    on: ROUTER,
  },
  responses: {
    name: 'handoff_http_responses_total',
    type: 'counter',
    help: 'HTTP responses by route pattern and status.',
    labels: ['route', 'status'],
    on: ROUTER,
  },
  promptTokens: {
    name: 'sglang_prompt_tokens_total',
    type: 'counter',
    help: 'Prompt tokens of ended requests.',
    labels: ['is_streaming'],
    on: ROUTER,
  },
  generationTokens: {
    name: 'sglang_generation_tokens_total',
    type: 'counter',
    help: 'Generated tokens of ended requests.',
    labels: ['is_streaming'],
    on: ROUTER,
  },
  timeToFirstToken: {
    name: 'sglang_time_to_first_token_seconds',
    type: 'histogram',
    help: "Request received until the first token's bytes were written.",
    labels: ['is_streaming'],
    buckets: TTFT_BUCKETS,
    on: ROUTER,
  },
  interToken: {
    name: 'sglang_inter_token_latency_seconds',
    type: 'histogram',
    help: 'Gap between successive token writes of one request.',
    labels: [],
    buckets: ITL_BUCKETS,
    on: ROUTER,
  },
  endToEnd: {
    name: 'sglang_e2e_request_latency_seconds',
    type: 'histogram',
    help: 'Request received until its last byte was written.',
    labels: ['is_streaming'],
    buckets: E2E_BUCKETS,
    on: ROUTER,
  },
  queueTime: {
    name: 'sglang_queue_time_seconds',
    type: 'histogram',
    help: 'Submit received until the first chunk of the prompt is computed.',
    labels: [],
    buckets: QUEUE_BUCKETS,
    on: ['prefill'],
  },
  activeRequests: {
    name: 'handoff_active_requests',
    type: 'gauge',
    help: 'Requests in the router: queued (no token yet), running, unwinding (answered, a half still to end).',
    labels: ['state'],
    on: ROUTER,
  },
  workerUp: {
    name: 'handoff_worker_up',
    type: 'gauge',
    help: '1 if the worker answered this scrape within the cap, else 0.',
    labels: ['worker', 'role'],
    on: ROUTER,
  },

  // Workers: the scheduler.
  workerInfo: {
    name: 'handoff_worker_info',
    type: 'gauge',
    help: 'Always 1; its label names the GPU adapter.',
    labels: ['adapter'],
    on: WORKERS,
  },
  runningRequests: {
    name: 'sglang_num_running_reqs',
    type: 'gauge',
    help: 'Requests in the running batch.',
    labels: [],
    on: WORKERS,
  },
  queuedRequests: {
    name: 'sglang_num_queue_reqs',
    type: 'gauge',
    help: 'Requests in the waiting queue.',
    labels: [],
    on: WORKERS,
  },
  bootstrapQueue: {
    name: 'sglang_num_prefill_bootstrap_queue_reqs',
    type: 'gauge',
    help: "Requests that wait for decode's reservation.",
    labels: [],
    on: ['prefill'],
  },
  inflightQueue: {
    name: 'sglang_num_prefill_inflight_queue_reqs',
    type: 'gauge',
    help: 'Requests that are computed, their KV not yet confirmed.',
    labels: [],
    on: ['prefill'],
  },
  preallocQueue: {
    name: 'sglang_num_decode_prealloc_queue_reqs',
    type: 'gauge',
    help: 'Requests that wait for pages.',
    labels: [],
    on: ['decode'],
  },
  transferQueue: {
    name: 'sglang_num_decode_transfer_queue_reqs',
    type: 'gauge',
    help: 'Requests whose pages are reserved, their KV not yet complete.',
    labels: [],
    on: ['decode'],
  },
  retracted: {
    name: 'sglang_num_retracted_reqs',
    type: 'gauge',
    help: 'Requests whose pages and slot gave way to older ones, until they are back.',
    labels: [],
    on: ['decode'],
  },
  retractions: {
    name: 'sglang_num_retracted_requests_total',
    type: 'counter',
    help: 'Retractions; one request may be retracted several times.',
    labels: [],
    on: ['decode'],
  },
  queues: {
    name: 'handoff_queue_requests',
    type: 'gauge',
    help: 'Requests per queue: prealloc, transfer, waiting, running, retracted, inflight, unwinding.',
    labels: ['queue'],
    on: WORKERS,
  },
  stepSeconds: {
    name: 'handoff_step_seconds',
    type: 'histogram',
    help: 'Wall time of one forward pass.',
    labels: [],
    buckets: STEP_BUCKETS,
    on: WORKERS,
  },
  batchSize: {
    name: 'handoff_decode_batch_size',
    type: 'histogram',
    help: 'Rows of a decode step.',
    labels: [],
    buckets: BATCH_BUCKETS,
    on: ['decode'],
  },
  meanBatchSize: {
    name: 'handoff_decode_batch_size_mean',
    type: 'gauge',
    help: 'Mean rows of the last 512 decode steps, 0 before the first.',
    labels: [],
    on: ['decode'],
  },
  realtimeTokens: {
    name: 'sglang_realtime_tokens_total',
    type: 'counter',
    help: 'Tokens processed: prefill_compute (prompt tokens computed here), prefill_cache, decode.',
    labels: ['mode'],
    on: WORKERS,
  },

  draftTokens: {
    name: 'handoff_draft_tokens_total',
    type: 'counter',
    help: 'Drafts that were checked: right ones came one step early, wrong ones cost a row.',
    labels: ['outcome'],
    on: ['decode'],
  },
  draftAcceptRate: {
    name: 'sglang_spec_accept_rate',
    type: 'gauge',
    help: 'Share of right drafts since the start; 0 before the first draft.',
    labels: [],
    on: ['decode'],
  },
  draftAcceptLength: {
    name: 'sglang_spec_accept_length',
    type: 'gauge',
    help: 'Mean tokens of a row in a step since the start, so by how much fewer steps an answer takes; 1 without drafts.',
    labels: [],
    on: ['decode'],
  },

  // Workers: memory.
  pages: {
    name: 'handoff_kv_pages',
    type: 'gauge',
    help: 'KV pages by state: free, cached, running, prealloc, inflight, quarantined.',
    labels: ['state'],
    on: WORKERS,
  },
  slots: {
    name: 'handoff_state_slots',
    type: 'gauge',
    help: 'State slots by state: free, used.',
    labels: ['state'],
    on: WORKERS,
  },
  availableTokens: {
    name: 'sglang_kv_available_tokens',
    type: 'gauge',
    help: 'Tokens that the free KV pages hold.',
    labels: [],
    on: WORKERS,
  },
  evictableTokens: {
    name: 'sglang_kv_evictable_tokens',
    type: 'gauge',
    help: 'Tokens that cached, evictable KV pages hold.',
    labels: [],
    on: WORKERS,
  },
  usedTokens: {
    name: 'sglang_kv_used_tokens',
    type: 'gauge',
    help: 'Tokens that KV pages in use hold.',
    labels: [],
    on: WORKERS,
  },
  tokenUsage: {
    name: 'sglang_token_usage',
    type: 'gauge',
    help: 'Used share of the KV pool, 0 to 1.',
    labels: [],
    on: WORKERS,
  },
  totalTokens: {
    name: 'sglang_max_total_num_tokens',
    type: 'gauge',
    help: 'Tokens that the KV pool holds.',
    labels: [],
    on: WORKERS,
  },
  pageTokens: {
    name: 'sglang_page_size',
    type: 'gauge',
    help: 'Tokens of one KV page.',
    labels: [],
    on: WORKERS,
  },

  prefixLookups: {
    name: 'handoff_prefix_cache_prompts_total',
    type: 'counter',
    help: 'Prompts computed, by whether they began with cached pages: hit, miss.',
    labels: ['result'],
    on: ['prefill'],
  },
  prefixStates: {
    name: 'handoff_prefix_cache_states',
    type: 'gauge',
    help: 'States from which cached prefixes go on: free, used.',
    labels: ['state'],
    on: ['prefill'],
  },
  prefixEvictions: {
    name: 'handoff_prefix_cache_evictions_total',
    type: 'counter',
    help: 'What the prefix cache gave up for want of room: page, state.',
    labels: ['kind'],
    on: ['prefill'],
  },
  tierBytes: {
    name: 'handoff_prefix_tier_bytes',
    type: 'gauge',
    help: 'Host memory that copies of cached prefixes hold.',
    labels: [],
    on: ['prefill'],
  },
  tierPages: {
    name: 'handoff_prefix_tier_pages_total',
    type: 'counter',
    help: 'Pages that came back from host memory or the prefix store instead of being computed.',
    labels: [],
    on: ['prefill'],
  },
  tierDamaged: {
    name: 'handoff_prefix_tier_damaged_total',
    type: 'counter',
    help: 'Copies of cached prefixes that were not whole, and not used.',
    labels: [],
    on: ['prefill'],
  },
  hostBytes: {
    name: 'handoff_host_bytes',
    type: 'gauge',
    help: 'Host memory that copies of retracted requests hold.',
    labels: [],
    on: ['decode'],
  },
  headroomTokens: {
    name: 'handoff_decode_headroom_tokens',
    type: 'gauge',
    help: 'Tokens beyond its prompt for which a new request gets pages; grows with each retraction, then relaxes.',
    labels: [],
    on: ['decode'],
  },

  // Workers: the hand-over.
  transferBytes: {
    name: 'handoff_transfer_bytes_total',
    type: 'counter',
    help: 'Payload bytes of KV units by direction: sent, received.',
    labels: ['direction'],
    on: WORKERS,
  },
  inFlightBytes: {
    name: 'handoff_transfer_in_flight_bytes',
    type: 'gauge',
    help: 'Payload bytes sent and not confirmed, or received and not written.',
    labels: [],
    on: WORKERS,
  },
  bootstrapFailures: {
    name: 'sglang_num_bootstrap_failed_reqs_total',
    type: 'counter',
    help: 'Requests that failed before their transfer began.',
    labels: [],
    on: WORKERS,
  },
  transferFailures: {
    name: 'sglang_num_transfer_failed_reqs_total',
    type: 'counter',
    help: 'Requests that failed in their transfer.',
    labels: [],
    on: WORKERS,
  },
  checksumFailures: {
    name: 'handoff_checksum_failures_total',
    type: 'counter',
    help: 'KV chunks whose checksum was wrong.',
    labels: [],
    on: WORKERS,
  },
  unacknowledged: {
    name: 'handoff_unacknowledged_messages',
    type: 'gauge',
    help: 'Terminal messages that are repeated until acknowledged, by receiver: peer, router.',
    labels: ['to'],
    on: WORKERS,
  },
  tombstones: {
    name: 'handoff_tombstones',
    type: 'gauge',
    help: 'Ended rooms that are remembered to answer late messages.',
    labels: [],
    on: WORKERS,
  },
  ledgerViolations: {
    name: 'handoff_ledger_violations_total',
    type: 'counter',
    help: 'Pages or slots found with a wrong owner and quarantined. Anything but 0 is a fault of ours.',
    labels: [],
    on: WORKERS,
  },
  droppedMessages: {
    name: 'handoff_dropped_messages_total',
    type: 'counter',
    help: 'Messages of peers dropped: late, duplicate, unknown, stale_epoch, protocol, ignored.',
    labels: ['kind'],
    on: WORKERS,
  },

  // Every process: what is stuck, and who is silent.
  oldestAge: {
    name: 'handoff_oldest_age_seconds',
    type: 'gauge',
    help: 'Longest stay of a room in its present queue and state, 0 where there is none.',
    labels: ['queue', 'state'],
    on: EVERYWHERE,
  },
  oldestUnacknowledged: {
    name: 'handoff_oldest_unacknowledged_seconds',
    type: 'gauge',
    help: 'Age of the oldest terminal message that a peer has not acknowledged.',
    labels: [],
    on: WORKERS,
  },
  peerUp: {
    name: 'handoff_peer_up',
    type: 'gauge',
    help: '1 while there is a link to this peer, else 0.',
    labels: ['peer', 'peer_role'],
    on: EVERYWHERE,
  },
  peerSilence: {
    name: 'handoff_peer_silence_seconds',
    type: 'gauge',
    help: 'Since anything was heard of this peer; a living one speaks at least once per heartbeat.',
    labels: ['peer', 'peer_role'],
    on: EVERYWHERE,
  },
  peerInfo: {
    name: 'handoff_peer_info',
    type: 'gauge',
    help: 'Always 1; its labels name the present life of each peer.',
    labels: ['peer', 'peer_role', 'epoch'],
    on: EVERYWHERE,
  },
  peerEpochChanges: {
    name: 'handoff_peer_epoch_changes_total',
    type: 'counter',
    help: 'How often another life took the name of this peer: its restarts, as seen from here.',
    labels: ['peer', 'peer_role'],
    on: EVERYWHERE,
  },
  peerCredit: {
    name: 'handoff_peer_credit_bytes',
    type: 'gauge',
    help: 'Payload bytes that may be on their way between this peer and here: granted and not used up.',
    labels: ['peer', 'peer_role'],
    on: WORKERS,
  },
  reaperAge: {
    name: 'handoff_reaper_age_seconds',
    type: 'gauge',
    help: 'Since deadlines were last judged.',
    labels: [],
    on: EVERYWHERE,
  },
  auditAge: {
    name: 'handoff_audit_age_seconds',
    type: 'gauge',
    help: 'Since the ledgers were last recounted from scratch.',
    labels: [],
    on: WORKERS,
  },
  conservationFaults: {
    name: 'handoff_conservation_faults',
    type: 'gauge',
    help: 'Faults that the last recount found. Anything but 0 is a fault of ours.',
    labels: [],
    on: WORKERS,
  },
  linkDropped: {
    name: 'handoff_link_dropped_messages_total',
    type: 'counter',
    help: 'Messages that could not be sent: queue full, peer gone, or no link.',
    labels: [],
    on: EVERYWHERE,
  },
  linkRejected: {
    name: 'handoff_link_rejected_messages_total',
    type: 'counter',
    help: 'Frames that decode to nothing, or that no link expects.',
    labels: [],
    on: EVERYWHERE,
  },
  linkQueuedBytes: {
    name: 'handoff_link_queued_bytes',
    type: 'gauge',
    help: 'Bytes in send queues.',
    labels: [],
    on: EVERYWHERE,
  },
  buildInfo: {
    name: 'handoff_build_info',
    type: 'gauge',
    help: 'Always 1; its labels say which code and checkpoint run and whether both are as released.',
    labels: ['version', 'code_digest', 'code', 'model_digest', 'checkpoint'],
    on: EVERYWHERE,
  },

  // Every process: itself.
  eventLoopLag: {
    name: 'handoff_event_loop_lag_seconds',
    type: 'histogram',
    help: 'How much later than asked a timer rang, sampled four times a second.',
    labels: [],
    buckets: LAG_BUCKETS,
    on: EVERYWHERE,
  },
  residentBytes: {
    name: 'process_resident_memory_bytes',
    type: 'gauge',
    help: 'Resident memory of the process.',
    labels: [],
    on: EVERYWHERE,
  },
  openFds: {
    name: 'process_open_fds',
    type: 'gauge',
    help: 'Open file descriptors of the process, 0 where the platform does not tell.',
    labels: [],
    on: EVERYWHERE,
  },
  cpuSeconds: {
    name: 'process_cpu_seconds_total',
    type: 'counter',
    help: 'User and system time of the process.',
    labels: [],
    on: EVERYWHERE,
  },
  startTime: {
    name: 'process_start_time_seconds',
    type: 'gauge',
    help: 'When the process started, in seconds since 1970.',
    labels: [],
    on: EVERYWHERE,
  },
} as const satisfies Record<string, Declaration>;

type Key = keyof typeof METRICS;
type MetricOf<Type> = Type extends 'counter' ? Counter : Type extends 'gauge' ? Gauge : Histogram;
type Metrics = { [K in Key]: MetricOf<(typeof METRICS)[K]['type']> };

/** What the text of `/metrics` is sent as. */
export const METRICS_CONTENT_TYPE = Registry.PROMETHEUS_CONTENT_TYPE;

/** How long the router waits for a worker's metrics. */
const SCRAPE_CAP_MS = 50;
/** A worker exposes about 20 KB; a body past this is not ours. */
const MAX_SCRAPE_BYTES = 2 ** 20;
const LAG_SAMPLE_MS = 250;
const MEAN_WINDOW_STEPS = 512;

/** A worker whose metrics the router carries. */
export interface WorkerTarget {
  /** The label value: a name that outlives restarts, such as `decode-0`. */
  readonly worker: string;
  readonly role: 'prefill' | 'decode';
  /** Base URL of its HTTP, http://HOST:PORT; null while it is not connected. */
  readonly http: string | null;
}

/** What became of an answer that was held to a schema or a tool. */
type ConstraintOutcome = (typeof CONSTRAINT_OUTCOMES)[number];
const CONSTRAINT_OUTCOMES = ['met', 'cut', 'violated'] as const;

export interface RouterMetrics {
  /** An HTTP response was sent. route: its pattern, never the raw URL. */
  responded(route: string, status: number): void;
  /** A request was refused with 503. code: one of the registry in errors.ts. */
  rejected(code: string): void;
  /** The first token's bytes were written, so long after the request came. */
  firstToken(seconds: number, streaming: boolean): void;
  /** Token bytes were written, so long after the same request's previous ones. */
  betweenTokens(seconds: number): void;
  /** An admitted request was cancelled or failed. */
  aborted(reason: Reason, phase: AbortPhase): void;
  /** A request ended; exactly once per admitted request. */
  finished(request: {
    outcome: RequestOutcome;
    seconds: number;
    streaming: boolean;
    promptTokens: number;
    generatedTokens: number;
  }): void;
  /** An answer that was held to a schema or a tool ended; `cut`: before it was complete. */
  constrained(outcome: ConstraintOutcome): void;
  /** What `/metrics` answers with: the router's own and every worker's series. Never rejects because of a worker. */
  text(): Promise<string>;
  /** Stop the lag timer and drop the connections to workers. */
  close(): void;
}

/**
 * Metrics of the router; `stats` and `workers` are read at each scrape.
 *
 * Series of closed label sets are exported at 0 from the start, so that a first event shows as an increase.
 */
export function createRouterMetrics(options: {
  modelName: string;
  build: BuildInfo;
  stats: () => RouterStats;
  sights: () => Sights;
  workers: () => readonly WorkerTarget[];
  /** How long a scrape waits for a worker; 50 ms unless given. */
  scrapeCapMs?: number;
}): RouterMetrics {
  const scrapeCapMs = options.scrapeCapMs ?? SCRAPE_CAP_MS;
  const { registry, metrics, close } = createRegistry('router', options.modelName);
  showBuild(metrics, options.build);
  const agent = new Agent({ keepAlive: true });

  for (const streaming of ['true', 'false']) {
    metrics.requests.inc({ is_streaming: streaming }, 0);
    metrics.promptTokens.inc({ is_streaming: streaming }, 0);
    metrics.generationTokens.inc({ is_streaming: streaming }, 0);
    for (const latency of [metrics.timeToFirstToken, metrics.endToEnd]) latency.zero({ is_streaming: streaming });
  }
  for (const outcome of REQUEST_OUTCOMES) metrics.outcomes.inc({ outcome }, 0);
  for (const outcome of CONSTRAINT_OUTCOMES) metrics.constrained.inc({ outcome }, 0);
  for (const reason of REASONS) {
    for (const phase of ABORT_PHASES) metrics.aborts.inc({ reason, phase }, 0);
  }

  return {
    responded: (route, status) => metrics.responses.inc({ route, status: String(status) }),
    rejected: (code) => metrics.rejections.inc({ code }),
    firstToken: (seconds, streaming) => metrics.timeToFirstToken.observe({ is_streaming: String(streaming) }, seconds),
    betweenTokens: (seconds) => metrics.interToken.observe(seconds),
    constrained: (outcome) => metrics.constrained.inc({ outcome }),
    aborted(reason, phase) {
      metrics.aborted.inc();
      metrics.aborts.inc({ reason, phase });
    },
    finished({ outcome, seconds, streaming, promptTokens, generatedTokens }) {
      const labels = { is_streaming: String(streaming) };
      metrics.requests.inc(labels);
      metrics.outcomes.inc({ outcome });
      metrics.promptTokens.inc(labels, promptTokens);
      metrics.generationTokens.inc(labels, generatedTokens);
      metrics.endToEnd.observe(labels, seconds);
    },
    async text() {
      const targets = options.workers();
      const texts = await Promise.all(targets.map((target) => scrape(target, agent, scrapeCapMs)));
      const parts: ExpositionPart[] = [];
      metrics.workerUp.reset();
      for (const [index, { worker, role }] of targets.entries()) {
        const families = texts[index] === null ? null : parseExposition(texts[index]!);
        metrics.workerUp.set({ worker, role }, families === null ? 0 : 1);
        if (families !== null) parts.push({ worker, families });
      }
      for (const [state, count] of Object.entries(options.stats())) metrics.activeRequests.set({ state }, count);
      readSights(metrics, options.sights(), 'router');
      readProcess(metrics);
      const own = parseExposition(await registry.metrics());
      if (own === null) throw new Error("the router's own metrics do not parse");
      return mergeExpositions([{ worker: 'router', families: own }, ...parts]);
    },
    close() {
      close();
      agent.destroy();
    },
  };
}

/**
 * The page with every family `sglang_NAME` a second time as `sglang:NAME`, which is how SGLang itself spells it. Prometheus
 * takes colons though its own lint wants none.
 */
export function withColonAliases(text: string): string {
  const spelled = /^((?:# (?:HELP|TYPE) )?sglang)_(.*\n)/gm;
  return text + [...text.matchAll(spelled)].map(([, before, rest]) => `${before}:${rest}`).join('');
}

export interface WorkerMetrics {
  /** A prompt's first chunk enters a step, so long after its submit (prefill only). */
  queued(seconds: number): void;
  /** One forward pass ended. rows: sequences in it. */
  stepped(step: { seconds: number; rows: number }): void;
  /** What `/metrics` answers with. */
  text(): Promise<string>;
  /** Stop the lag timer. */
  close(): void;
}

/** Metrics of a worker; `stats` is read once at each scrape. adapter: its name; pageTokens: tokens of one page. */
export function createWorkerMetrics(options: {
  role: 'prefill' | 'decode';
  modelName: string;
  adapter: string;
  pageTokens: number;
  build: BuildInfo;
  stats: () => WorkerStats;
  sights: () => WorkerSights;
}): WorkerMetrics {
  const { role, pageTokens } = options;
  const { registry, metrics, close } = createRegistry(role, options.modelName);
  metrics.workerInfo.set({ adapter: options.adapter }, 1);
  showBuild(metrics, options.build);
  const recentRows: number[] = [];
  let steps = 0;

  return {
    queued: (seconds) => metrics.queueTime.observe(seconds),
    stepped({ seconds, rows }) {
      metrics.stepSeconds.observe(seconds);
      if (role === 'decode') metrics.batchSize.observe(rows);
      recentRows[steps % MEAN_WINDOW_STEPS] = rows;
      steps += 1;
    },
    async text() {
      const stats = options.stats();
      readWorker(metrics, stats, { role, pageTokens });
      const sights = options.sights();
      readSights(metrics, sights, role);
      metrics.peerCredit.reset();
      for (const { name, role: peerRole, creditBytes } of sights.peers) {
        metrics.peerCredit.set({ peer: name, peer_role: peerRole }, creditBytes);
      }
      metrics.oldestUnacknowledged.set(sights.oldestUnacknowledgedSeconds);
      metrics.auditAge.set(sights.auditAgeSeconds);
      metrics.conservationFaults.set(sights.conservationFaults);
      if (role === 'decode') metrics.meanBatchSize.set(mean(recentRows));
      readProcess(metrics);
      return registry.metrics();
    },
    close,
  };
}

/** Copy one snapshot of the worker's state into its gauges and ledger counters. */
function readWorker(
  metrics: Metrics,
  stats: WorkerStats,
  { role, pageTokens }: { role: 'prefill' | 'decode'; pageTokens: number },
): void {
  const { queues, pages } = stats;
  for (const queue of WORKER_QUEUES) metrics.queues.set({ queue }, queues[queue]);
  metrics.runningRequests.set(queues.running);
  metrics.queuedRequests.set(queues.waiting);
  if (role === 'prefill') {
    metrics.bootstrapQueue.set(queues.prealloc);
    metrics.inflightQueue.set(queues.inflight);
    const { prefixes } = stats;
    setTotal(metrics.prefixLookups, { result: 'hit' }, prefixes.hits);
    setTotal(metrics.prefixLookups, { result: 'miss' }, prefixes.misses);
    metrics.prefixStates.set({ state: 'free' }, prefixes.statesFree);
    metrics.prefixStates.set({ state: 'used' }, prefixes.statesHeld);
    setTotal(metrics.prefixEvictions, { kind: 'page' }, prefixes.evictedPages);
    setTotal(metrics.prefixEvictions, { kind: 'state' }, prefixes.evictedStates);
    metrics.tierBytes.set(stats.tier.heldBytes);
    setTotal(metrics.tierPages, {}, stats.tier.fetchedPages);
    setTotal(metrics.tierDamaged, {}, stats.tier.damaged);
  } else {
    metrics.preallocQueue.set(queues.prealloc);
    metrics.transferQueue.set(queues.transfer);
    metrics.retracted.set(queues.retracted);
    setTotal(metrics.retractions, {}, stats.retractionsTotal);
    metrics.hostBytes.set(stats.hostBytes);
    metrics.headroomTokens.set(stats.headroomTokens);
  }

  for (const state of PAGE_STATES) metrics.pages.set({ state }, pages[state]);
  metrics.slots.set({ state: 'free' }, stats.slots.free);
  metrics.slots.set({ state: 'used' }, stats.slots.used);
  const usedPages = pages.running + pages.prealloc + pages.inflight + pages.quarantined;
  const allPages = usedPages + pages.free + pages.cached;
  metrics.availableTokens.set(pages.free * pageTokens);
  metrics.evictableTokens.set(pages.cached * pageTokens);
  metrics.usedTokens.set(usedPages * pageTokens);
  metrics.tokenUsage.set(allPages === 0 ? 0 : usedPages / allPages);
  metrics.totalTokens.set(allPages * pageTokens);
  metrics.pageTokens.set(pageTokens);

  setTotal(metrics.realtimeTokens, { mode: 'prefill_compute' }, stats.prefilledTokensTotal);
  setTotal(metrics.realtimeTokens, { mode: 'prefill_cache' }, stats.cachedTokensTotal);
  setTotal(metrics.realtimeTokens, { mode: 'decode' }, stats.generatedTokensTotal);
  if (role === 'decode') {
    const { rows, drafts, rightDrafts } = stats.drafts;
    setTotal(metrics.draftTokens, { outcome: 'right' }, rightDrafts);
    setTotal(metrics.draftTokens, { outcome: 'wrong' }, drafts - rightDrafts);
    metrics.draftAcceptRate.set(drafts === 0 ? 0 : rightDrafts / drafts);
    metrics.draftAcceptLength.set(rows === 0 ? 1 : (rows + rightDrafts) / rows);
  }
  setTotal(metrics.transferBytes, { direction: 'sent' }, stats.sentBytesTotal);
  setTotal(metrics.transferBytes, { direction: 'received' }, stats.receivedBytesTotal);
  metrics.inFlightBytes.set(stats.inFlightBytes);
  setTotal(metrics.bootstrapFailures, {}, stats.bootstrapFailuresTotal);
  setTotal(metrics.transferFailures, {}, stats.transferFailuresTotal);
  setTotal(metrics.checksumFailures, {}, stats.checksumFailuresTotal);
  metrics.unacknowledged.set({ to: 'peer' }, stats.unacknowledged.peer);
  metrics.unacknowledged.set({ to: 'router' }, stats.unacknowledged.router);
  metrics.tombstones.set(stats.tombstones);
  setTotal(metrics.ledgerViolations, {}, stats.ledgerViolationsTotal);
  for (const kind of DROPPED_KINDS) setTotal(metrics.droppedMessages, { kind }, stats.droppedMessagesTotal[kind]);
}

/** Copy what a process sees of its rooms and peers. Peers come and go, so their series are made anew. */
function readSights(metrics: Metrics, sights: Sights, role: MetricsRole): void {
  metrics.oldestAge.reset();
  for (const [queue, states] of Object.entries(ROOM_STATES[role])) {
    for (const state of states) metrics.oldestAge.set({ queue, state }, 0);
  }
  for (const { queue, state, seconds } of sights.oldest) metrics.oldestAge.set({ queue, state }, seconds);

  for (const metric of [metrics.peerUp, metrics.peerSilence, metrics.peerInfo, metrics.peerEpochChanges])
    metric.reset();
  for (const { name, role: peerRole, epoch, isUp, silenceSeconds, epochChanges } of sights.peers) {
    const labels = { peer: name, peer_role: peerRole };
    metrics.peerUp.set(labels, isUp ? 1 : 0);
    metrics.peerSilence.set(labels, silenceSeconds);
    metrics.peerInfo.set({ ...labels, epoch }, 1);
    metrics.peerEpochChanges.inc(labels, epochChanges);
  }
  metrics.reaperAge.set(sights.reaperAgeSeconds);
  metrics.linkQueuedBytes.set(sights.links.queuedBytes);
  setTotal(metrics.linkDropped, {}, sights.links.droppedTotal);
  setTotal(metrics.linkRejected, {}, sights.links.rejectedTotal);
}

function showBuild(metrics: Metrics, build: BuildInfo): void {
  const { version, codeDigest, code, modelDigest, checkpoint } = build;
  metrics.buildInfo.set({ version, code_digest: codeDigest, code, model_digest: modelDigest, checkpoint }, 1);
}

function readProcess(metrics: Metrics): void {
  const { user, system } = process.cpuUsage();
  metrics.residentBytes.set(process.memoryUsage.rss());
  metrics.openFds.set(openFdCount());
  setTotal(metrics.cpuSeconds, {}, (user + system) / 1e6);
  metrics.startTime.set(Math.round(performance.timeOrigin) / 1000);
}

function openFdCount(): number {
  try {
    return readdirSync('/proc/self/fd').length;
  } catch {
    return 0; // no procfs: macOS, Windows
  }
}

/** Bring a counter to a total that is kept elsewhere. prom-client has no `set` for counters. */
function setTotal(counter: Counter, labels: Record<string, string>, total: number): void {
  counter.remove(labels);
  counter.inc(labels, total);
}

function mean(values: readonly number[]): number {
  if (values.length === 0) return 0;
  let sum = 0;
  for (const value of values) sum += value;
  return sum / values.length;
}

/** The declared metrics of one role in a registry of their own, and the timer that samples the event loop. */
function createRegistry(
  role: MetricsRole,
  modelName: string,
): { registry: Registry; metrics: Metrics; close: () => void } {
  const registry = new Registry();
  registry.setDefaultLabels({ model_name: modelName, engine_type: role });
  const made: Record<string, Counter | Gauge | Histogram> = {};
  for (const [key, declaration] of Object.entries(METRICS) as [Key, Declaration][]) {
    if (!declaration.on.includes(role)) continue;
    const shared = {
      name: declaration.name,
      help: declaration.help,
      labelNames: [...declaration.labels],
      registers: [registry],
    };
    switch (declaration.type) {
      case 'counter':
        made[key] = new Counter(shared);
        break;
      case 'gauge':
        made[key] = new Gauge(shared);
        break;
      case 'histogram':
        made[key] = new Histogram({ ...shared, buckets: [...(declaration.buckets ?? [])] });
        break;
      default:
        declaration.type satisfies never;
    }
  }
  // The keys this role lacks are absent; the functions above touch only those their role has.
  const metrics = made as Metrics;

  let dueAt = performance.now() + LAG_SAMPLE_MS;
  const timer = setInterval(() => {
    const now = performance.now();
    metrics.eventLoopLag.observe(Math.max(0, now - dueAt) / 1000);
    dueAt = now + LAG_SAMPLE_MS;
  }, LAG_SAMPLE_MS);
  timer.unref();
  return { registry, metrics, close: () => clearInterval(timer) };
}

/** A worker's `/metrics`, or null if it did not answer in time, or not with 200 and a bounded body. */
function scrape(target: WorkerTarget, agent: Agent, capMs: number): Promise<string | null> {
  const { http } = target;
  if (http === null) return Promise.resolve(null);
  return new Promise((settle) => {
    const request = get(`${http}/metrics`, { agent }, (response) => {
      const chunks: Buffer[] = [];
      let size = 0;
      response.on('data', (chunk: Buffer) => {
        size += chunk.length;
        if (size > MAX_SCRAPE_BYTES) request.destroy();
        else chunks.push(chunk);
      });
      response.on('end', () => done(response.statusCode === 200 ? Buffer.concat(chunks).toString('utf8') : null));
      response.on('close', () => done(null));
      response.on('error', () => done(null));
    });
    request.on('error', () => done(null));
    // When our own loop was busy, timers ring before sockets are read: give an answer that has arrived already one
    // turn of the loop, so that a late router does not report its workers as silent.
    const timer = setTimeout(() => setImmediate(() => request.destroy()), capMs);
    const done = (text: string | null): void => {
      clearTimeout(timer);
      settle(text);
      if (text === null) request.destroy();
    };
  });
}

/** One family of an exposition: its HELP and TYPE lines and its samples, as they came. */
export interface Family {
  readonly name: string;
  readonly help: string;
  readonly type: string;
  readonly samples: readonly { readonly name: string; readonly labels: string; readonly value: string }[];
}

/** The families of one process, and the `worker` label its series get. */
export interface ExpositionPart {
  readonly worker: string;
  readonly families: readonly Family[];
}

const METRIC_NAME = '[a-zA-Z_:][a-zA-Z0-9_:]*';
const LABEL = '[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\\]|\\\\.)*"';
const META_LINE = new RegExp(`^# (HELP|TYPE) (${METRIC_NAME}) (.*)$`);
const SAMPLE_LINE = new RegExp(
  `^(${METRIC_NAME})(?:\\{((?:${LABEL}(?:,${LABEL})*)?,?)\\})? ([+-]?(?:[0-9.]+(?:e[+-]?[0-9]+)?|Inf)|Nan|NaN)$`,
  'i',
);

/**
 * Read the Prometheus text format, version 0.0.4, as prom-client writes it: HELP and TYPE before the samples.
 * Returns null for any line that is not of that form: half a text is not passed on.
 */
export function parseExposition(text: string): Family[] | null {
  const families = new Map<
    string,
    { name: string; help: string; type: string; samples: Family['samples'][number][] }
  >();
  let current: string | null = null;
  for (const line of text.split('\n')) {
    if (line === '') continue;
    const meta = META_LINE.exec(line);
    if (meta !== null) {
      const [, keyword, name, rest] = meta as unknown as [string, string, string, string];
      const family = families.get(name) ?? { name, help: '', type: 'untyped', samples: [] };
      families.set(name, family);
      if (keyword === 'HELP') family.help = rest;
      else family.type = rest;
      current = name;
      continue;
    }
    const sample = SAMPLE_LINE.exec(line);
    if (sample === null || current === null) return null;
    const [, name, labels = '', value] = sample as unknown as [string, string, string | undefined, string];
    const family = families.get(current)!;
    if (!belongs(name, family)) return null;
    family.samples.push({ name, labels, value });
  }
  return [...families.values()];
}

function belongs(sampleName: string, family: { name: string; type: string }): boolean {
  if (sampleName === family.name) return true;
  return family.type === 'histogram' && ['_bucket', '_sum', '_count'].some((end) => sampleName === family.name + end);
}

/**
 * One exposition of several processes: each family once, its HELP and TYPE from the first part that has it, and a
 * `worker` label on every series that has none. A part whose family has another type (another version of a
 * worker) loses that family.
 */
export function mergeExpositions(parts: readonly ExpositionPart[]): string {
  const merged = new Map<string, { family: Family; lines: string[] }>();
  for (const { worker, families } of parts) {
    const label = `worker="${worker.replace(/[\\"\n]/g, (character) => (character === '\n' ? '\\n' : `\\${character}`))}"`;
    for (const family of families) {
      const entry = merged.get(family.name) ?? { family, lines: [] };
      merged.set(family.name, entry);
      if (entry.family.type !== family.type) continue;
      for (const { name, labels, value } of family.samples) {
        const named = /(^|,)worker="/.test(labels);
        const all = named ? labels : labels === '' ? label : `${label},${labels}`;
        entry.lines.push(`${name}{${all}} ${value}`);
      }
    }
  }
  const blocks = [...merged.values()].map(({ family, lines }) =>
    [`# HELP ${family.name} ${family.help}`, `# TYPE ${family.name} ${family.type}`, ...lines].join('\n'),
  );
  return `${blocks.join('\n\n')}\n`;
}

/** The metrics table of docs/operations.md, in Markdown. */
export function metricsTable(): string {
  const lines = ['| metric | type | labels | of | meaning |', '| --- | --- | --- | --- | --- |'];
  for (const declaration of Object.values(METRICS) as Declaration[]) {
    const { name, type, labels, on, help } = declaration;
    const where = on.length === EVERYWHERE.length ? 'every process' : on.join(', ');
    lines.push(`| \`${name}\` | ${type} | ${labels.map((label) => `\`${label}\``).join(', ')} | ${where} | ${help} |`);
  }
  return lines.join('\n');
}
