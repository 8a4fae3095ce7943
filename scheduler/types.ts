/**
 * What both schedulers share: limits, requests, batches, and the effects a worker performs for them.
 */

import type {
  Epoch,
  Instance,
  PackedChoices,
  PageId,
  PeerMessage,
  RoomKey,
  Salt,
  SamplingParams,
  SlotId,
  TokenChoice,
  WorkerToRouter,
} from '../transfer/messages.ts';

/** Sizes and clocks of one worker. All durations in ms; all of them must be positive. */
export interface WorkerLimits {
  /** Tokens of one page; a multiple of the least common multiple of the model's compression ratios. */
  pageTokens: number;
  pageBytes: number;
  slotBytes: number;
  pageCount: number;
  slotCount: number;
  /** Rooms not yet terminal, unwinding included; one more is answered `overloaded`. */
  maxRooms: number;
  /** Longest request: prompt and answer, in tokens. */
  maxSequenceTokens: number;
  /** Ledger violations throw (tests) instead of being counted and quarantined (production). */
  strictLedger: boolean;
  /** Digest of the model, part of every prompt digest. */
  modelDigest: string;
  /** How long a terminal message waits for a peer that has no link to us: 10 s. */
  leaseMs: number;
  /** Without a sign of progress from the transfer: 15 s. */
  stallMs: number;
  /** From creation to `ready` (D) or `end` (P), time queued here or at the peer excluded: 60 s. */
  roomMs: number;
  /** First re-send of an unanswered message, doubling up to `resendMaxMs`: 100 ms and 2 s. */
  resendMinMs: number;
  resendMaxMs: number;
  /** How often a half that keeps its peer waiting says QUEUED: 2 s, well under `stallMs`. */
  statusMs: number;
}

/** Limits of a prefill worker. */
export interface PrefillLimits extends WorkerLimits {
  /** Copies of slots that the prefix cache may keep, beside the slots; 0 turns it off. */
  stateCount: number;
  /** Verified pages are copied to a tier outside the adapter, and come back from there. */
  hasTier: boolean;
  /** Tokens computed in one step over all rooms; a multiple of `pageTokens`. */
  prefillChunkTokens: number;
  /** Payload of one CHUNK, unless a single unit is larger. */
  maxChunkBytes: number;
  /** Bytes read or being read and not yet handed to the channel, over all rooms. One unit may exceed it. */
  stagingBytes: number;
}

/** Limits of a decode worker. */
export interface DecodeLimits extends WorkerLimits {
  /** Rows of a decode step. */
  maxRunning: number;
  /** Bytes each prefill worker may have under way to us; at least the larger of page and slot. */
  peerBufferBytes: number;
  /** Bytes one room may have under way once its first unit has arrived. */
  roomWindowBytes: number;
  /** Tokens beyond what it has for which a sequence gets pages in advance; at least 1. */
  headroomTokens: number;
  /** Host memory for pages and slots of retracted sequences, in bytes; 0 ends them instead. */
  hostBytes: number;
  /** Rows have drafts: a step may return two tokens for one row. */
  drafts: boolean;
}

/** What a client asked for, as a worker keeps it. */
export interface Request {
  promptTokens: Uint32Array;
  sampling: SamplingParams;
  maxTokens: number;
  stopTokens: number[];
  deadlineMs: number;
}

/** Index of a copy of a state slot, kept by the prefix cache of one prefill worker. */
export type StateId = number;

/** Where the bytes of a unit live on this worker. */
export type UnitPlace = { kind: 'page'; page: PageId } | { kind: 'slot'; slot: SlotId };

/**
 * One prefill step. Each chunk computes tokens [start, end) of its prompt: KV into `pages` (the
 * sequence's page table, all pages of the prompt in order), running state into `slot` (to be reset
 * when `start` is 0). `end` is a multiple of the page except in the `last` chunk, which also samples
 * the token at position `end`.
 *
 * States are copied around the step: before it, all `resume` into their slots; after it, slots into their `keep`. One
 * state may be both, of different chunks.
 */
export interface PrefillBatch {
  chunks: PrefillChunk[];
}

export interface PrefillChunk {
  key: RoomKey;
  slot: SlotId;
  pages: PageId[];
  /** Token ids of [start, end). */
  tokens: Uint32Array;
  /** The token at `end`; null in the last chunk, which samples it. */
  next: number | null;
  start: number;
  end: number;
  last: boolean;
  sampling: SamplingParams;
  /** Of the token that the last chunk samples; null: none. */
  rules: RowRules | null;
  /** The state that `slot` begins with; null where it already has it. */
  resume: StateId | null;
  /** Where the state at `end` is copied to. */
  keep: StateId | null;
}

/**
 * One decode step: every row runs `token` at `position` and samples the token at `position + 1`. A `drafted` row also runs
 * the engine's guess of that token, at `position + 1`, for which it has the page; if the guess is what it samples, the
 * row has the token at `position + 2` too. What a wrong guess has written is not read before it is written again.
 */
export interface DecodeBatch {
  rows: DecodeRow[];
}

export interface DecodeRow {
  key: RoomKey;
  slot: SlotId;
  pages: PageId[];
  token: number;
  position: number;
  drafted: boolean;
  sampling: SamplingParams;
  /** Of the token that is sampled, and of the one behind a draft; null: none. */
  rules: RowRules | null;
}

/** What a request's rules come to at one position; kernels/rules.ts says what they do. */
export interface RowRules {
  biasIds: readonly number[];
  biases: readonly number[];
  /** Tokens that must not come here. */
  banned: readonly number[];
  /** `generated` is the answer so far; `prompt` is empty where it makes no difference. */
  penalties: {
    presence: number;
    frequency: number;
    repetition: number;
    prompt: Uint32Array;
    generated: readonly number[];
  } | null;
}

/** A token sampled in a step, by room. Several of one room are in the order of their positions. */
export interface SampledToken {
  key: RoomKey;
  /** Null: the room's rules leave none, which ends it; or it is a chunk of a prompt that is not its last. */
  token: number | null;
  /** There if the request asked for log probabilities. */
  choice?: TokenChoice | undefined;
  /** Of the prompt's tokens that follow the chunk's, there if the request asked for them. */
  promptChoices?: PackedChoices | undefined;
}

/** A prompt, and where what is known of it goes. Index i of `pages` holds page i of the prompt. */
export interface TierFetch {
  tokens: Uint32Array;
  salt: Salt;
  from: number;
  pages: PageId[];
  slot: SlotId;
  keep: StateId | null;
}

/** A prompt's pages by index, and states at the ends of pages. Nobody writes any of them before `stashed`. */
export interface TierStash {
  tokens: Uint32Array;
  salt: Salt;
  pages: { index: number; page: PageId }[];
  states: { index: number; state: StateId }[];
}

/**
 * What a scheduler asks of its worker, in order. The worker performs each one without waiting:
 *
 * | effect    | performed by | then |
 * |-----------|--------------|------|
 * | connect   | channel: open a link to a prefill worker (decode only; no-op if there is one) | peer_up when both sockets are |
 * | send      | channel: queue on that peer's control or data socket; for CHUNK with the staged bytes of exactly its units, copied, after which the staging is free | – |
 * | read      | engine: copy units (pages, slot) to staging, checksum each (crc32c) | read_done |
 * | discard   | worker: the staged bytes of these units will not be sent | – |
 * | write     | engine: copy payload into the page or slot | written |
 * | save      | engine: copy these units to host memory; the worker keeps the copy under the key (decode only) | saved |
 * | restore   | engine: copy the key's copy, unit by unit, into these places; the copy stays (decode only) | restored |
 * | forget    | worker: free the key's copy (decode only) | – |
 * | fetch     | tier: write what it has of these tokens from page `from` on into the pages, the state at the end into the slot, and that into `keep`; nothing is an answer (prefill only) | fetched |
 * | stash     | tier: copy these pages and states of a prompt (prefill only) | stashed |
 * | report    | control channel: to the router of that epoch | – |
 * | violation | worker: log and count; the handles stay quarantined | – |
 */
export type WorkerEffect =
  | { type: 'connect'; peer: Instance; address: string }
  | { type: 'send'; peer: Instance; socket: 'control' | 'data'; message: PeerMessage }
  | { type: 'read'; key: RoomKey; firstUnit: number; places: UnitPlace[] }
  | { type: 'discard'; key: RoomKey; firstUnit: number; unitCount: number }
  | { type: 'write'; key: RoomKey; unit: number; place: UnitPlace; payload: Uint8Array }
  | { type: 'save'; key: RoomKey; places: UnitPlace[] }
  | { type: 'restore'; key: RoomKey; places: UnitPlace[] }
  | { type: 'forget'; key: RoomKey }
  | ({ type: 'fetch'; key: RoomKey } & TierFetch)
  | ({ type: 'stash'; key: RoomKey } & TierStash)
  | { type: 'report'; router: Epoch; message: WorkerToRouter }
  | { type: 'violation'; key: RoomKey; what: string };

/** Messages and units that were dropped, by kind. Never reset. */
export interface DropCounts {
  /** For a key that is closed here. */
  late: number;
  /** Already had it. */
  duplicate: number;
  /** For a key never seen. */
  unknown: number;
  /** From or for another life of a process. */
  staleEpoch: number;
  badChecksum: number;
  /** What an honest peer does not send. */
  protocol: number;
  /** In order but not of use in this phase. */
  ignored: number;
}
