/**
 * Names, messages and the codec of everything that crosses a process border.
 *
 * Upper-case messages travel between a prefill worker (P) and a decode worker (D); lower-case ones
 * between the router (R) and a worker. All are idempotent. One message is one or two frames:
 *
 *   frame 0   magic 'HO' | frame version u8 | 0 | crc32c of the rest u32 LE | msgpack [type, field, field, ...]
 *   frame 1   raw payload; only CHUNK has one
 *
 * Fields go by position, in the order of `SHAPES`, which is also what the decoder checks: it accepts
 * exactly what is described there and rejects everything else without throwing.
 */

import { Decoder, Encoder } from '@msgpack/msgpack';
import { crc32c } from './checksum.ts';

/** Version of the messages and their meaning. Peers of another version are refused in HELLO, by name. */
export const PROTOCOL_VERSION = 4;

/** Version of the frame itself: what is needed to read a HELLO of any protocol version, and its refusal. */
const FRAME_VERSION = 1;

/** Longest constraint, in UTF-16 units: schemas of 256 Ki characters, each written as six at most, and what is around them. */
const MAX_CONSTRAINT = 1 << 21;

/** Longest name of a worker, and longest text field, in UTF-16 units. */
const MAX_TEXT = 1024;

/** Most likeliest tokens that are told with one. */
const MAX_TOP_LOGPROBS = 20;

/** Most units one message may list: 1 M pages of 128 tokens. */
const MAX_LIST = 1 << 20;

const MAGIC_0 = 0x48;
const MAGIC_1 = 0x4f;
const HEADER_BYTES = 8;

// ---------------------------------------------------------------------------------------------
// Identities

/**
 * One life of a process: 12 hex digits of start time in ms, then 8 random hex digits. Fixed width, so
 * string order is time order; of one name a smaller epoch is stale and a larger one kills it.
 */
export type Epoch = string;

/** One client request: `${router epoch}-${sequence}`. */
export type RoomId = string;

/** One try of a room on one pair: `${room}.${attempt}`. The key of every table, message and tombstone. */
export type RoomKey = string;

/** Index into one worker's page pool; meaningless elsewhere. */
export type PageId = number;

/** Index into one worker's state-slot pool; meaningless elsewhere. */
export type SlotId = number;

/** A process in one of its lives. */
export interface Instance {
  name: string;
  epoch: Epoch;
}

/** A worker as the router names it to others; `address` is where a prefill worker's transfer socket listens. */
export interface WorkerRef extends Instance {
  address: string;
}

/** Why something ended that did not succeed. */
export type Reason = (typeof REASONS)[number];

export const REASONS = [
  'client_cancel', // the client, or an operator, asked
  'client_lost', // the client's connection went away
  'deadline', // a stall, room or request clock ran out
  'peer_lost', // lease over, or a newer epoch spoke
  'peer_aborted', // the other half said ABORT
  'gone', // the thing asked for is over or never was promised
  'mismatch', // the two halves disagree about the prompt or the manifest
  'bad_checksum', // payload bytes changed on the way
  'protocol', // a message that an honest peer does not send
  'overloaded', // over an admission limit, or larger than the pool
  'out_of_memory', // pages and host memory of the decode worker ran out in mid-answer
  'draining', // the worker takes nothing new
  'shutdown', // the worker stops
  'unknown', // answer to a cancel of something never seen
  'unsatisfiable', // the request's own rules leave no token to choose
  'internal', // a ledger violation on our side; the room is the price
] as const;

/** How a half, or a room, ended. `sent` is the prefill half's success; the others are the decode half's. */
export type Outcome = { ok: true; finish: 'stop' | 'length' | 'sent' } | { ok: false; reason: Reason };

/** The epoch of a life that began at `startMs` with 32 random bits. */
export function makeEpoch(startMs: number, random32: number): Epoch {
  return Math.floor(startMs).toString(16).padStart(12, '0') + (random32 >>> 0).toString(16).padStart(8, '0');
}

/** Name of the room with this sequence number under a router's epoch. */
export function makeRoomId(router: Epoch, sequence: number): RoomId {
  return `${router}-${sequence}`;
}

/** Key of an attempt (from 1) of a room. */
export function makeKey(room: RoomId, attempt: number): RoomKey {
  return `${room}.${attempt}`;
}

const KEY_PATTERN = /^([0-9a-f]{20})-(0|[1-9][0-9]{0,15})\.([1-9][0-9]{0,8})$/;

/** Parts of a key, or null if it is not one. */
export function parseKey(key: RoomKey): { router: Epoch; room: RoomId; sequence: number; attempt: number } | null {
  const match = KEY_PATTERN.exec(key);
  if (match === null) return null;
  const [, router, sequence, attempt] = match as unknown as [string, string, string, string];
  return { router, room: `${router}-${sequence}`, sequence: Number(sequence), attempt: Number(attempt) };
}

// ---------------------------------------------------------------------------------------------
// What a room transfers

/**
 * What P must deliver, fixed when D reserves: `pageCount` page units (unit i is page i of the prompt)
 * and then one slot unit (index `pageCount`). `generations` has one entry per unit, D's count of how
 * often that page or slot changed hands; P echoes it.
 */
export interface Manifest {
  tokenCount: number;
  validInLastPage: number;
  pageCount: number;
  pageBytes: number;
  slotBytes: number;
  generations: number[];
}

/** Bytes of unit `unit` of a manifest. */
export function unitBytes(manifest: Manifest, unit: number): number {
  return unit === manifest.pageCount ? manifest.slotBytes : manifest.pageBytes;
}

/** Bytes of all units of a manifest. */
export function manifestBytes(manifest: Pick<Manifest, 'pageCount' | 'pageBytes' | 'slotBytes'>): number {
  return manifest.pageCount * manifest.pageBytes + manifest.slotBytes;
}

/** SHA-256 of what a client keeps its prompts apart with, as 64 hex digits; null: nothing. */
export type Salt = string | null;

/** How to choose the next token. Greedy is `temperature: 0`. `seed` and the position key the generator. */
export interface SamplingParams {
  temperature: number;
  topK: number;
  topP: number;
  minP: number;
  seed: number;
  /** Absent: none. */
  rules?: SamplingRules;
  /** How many of the likeliest tokens are told with each token, beside its own logprob, 0 to 20; absent: nothing is. */
  logprobs?: number;
  /** Whether the tokens of the prompt are told the same way, from its second on; only with `logprobs`. */
  promptLogprobs?: boolean;
  /** What the answer is held to, as server/grammar/constraint.ts packs it; absent: nothing. */
  constraint?: string;
}

/** What changes the model's logits before a token is chosen; kernels/rules.ts says how. */
export interface SamplingRules {
  /** -2 to 2 each, over the tokens of the answer; 0 does nothing. */
  presencePenalty: number;
  frequencyPenalty: number;
  /** Above 0, up to 2, over prompt and answer; 1 does nothing. */
  repetitionPenalty: number;
  /** Token ids, and the bias of each, -100 to 100: lists of equal length, no id twice. */
  biasIds: number[];
  biases: number[];
  /** None of the answer's first so many tokens is one of the `stopTokens`. */
  minTokens: number;
}

/**
 * What is known of the choice of one token: natural logarithms of probabilities under the model's logits, before
 * temperature and rules. The chosen token need not be among the likeliest.
 */
export interface TokenChoice {
  logprob: number;
  /** The likeliest tokens and theirs, likeliest first: lists of equal length. */
  topIds: number[];
  topLogprobs: number[];
}

/**
 * Choices as bytes, little-endian, each of `packedChoiceBytes`: f32 logprob, then for each of the likeliest its u32 id and
 * f32 logprob. Where there are fewer likeliest than asked for, the id is 2^32 - 1.
 */
export type PackedChoices = Uint8Array;

// ---------------------------------------------------------------------------------------------
// P <-> D. Every message names both lives, so what was meant for an earlier one is dropped.

interface PeerEnvelope {
  from: Epoch;
  to: Epoch;
  key: RoomKey;
}

/** D -> P, control. The only peer message that may create state. Answered by QUEUED or ABORT. */
export interface OpenMessage extends PeerEnvelope {
  type: 'OPEN';
  digest: string;
  tokenCount: number;
}
/** Both, control. Liveness of a room; `computing` also renews D's stall clock. */
export interface QueuedMessage extends PeerEnvelope {
  type: 'QUEUED';
  state: 'waiting' | 'computing';
}
/** D -> P, control. Pages and slot are lent. Answered by QUEUED, the first unit or END. `credit` is in bytes. */
export interface ReservedMessage extends PeerEnvelope {
  type: 'RESERVED';
  manifest: Manifest;
  credit: number;
}
/** P -> D, data, with payload: units [firstUnit, firstUnit + generations.length), one checksum (crc32c) each. */
export interface ChunkMessage extends PeerEnvelope {
  type: 'CHUNK';
  sequence: number;
  firstUnit: number;
  generations: number[];
  checksums: number[];
  payloadBytes: number;
}
/** D -> P, control. Bytes granted to the room in total, ever. Answered by the next unit. */
export interface CreditMessage extends PeerEnvelope {
  type: 'CREDIT';
  bytes: number;
}
/** P -> D, data, behind the last chunk. Answered by DONE or ABORT. `checksum` is `combineChecksums` of all units. */
export interface EndMessage extends PeerEnvelope {
  type: 'END';
  unitCount: number;
  tokenCount: number;
  digest: string;
  firstToken: number;
  /** Null unless the request asked for it. */
  firstChoice: TokenChoice | null;
  /** Of each token of the prompt but the first; null unless the request asked for it. */
  promptChoices: PackedChoices | null;
  checksum: number;
}
/** D -> P, control. All arrived; P may release. Answered by DONE_ACK, also for an unknown key. */
export interface DoneMessage extends PeerEnvelope {
  type: 'DONE';
}
/** P -> D, control. */
export interface DoneAckMessage extends PeerEnvelope {
  type: 'DONE_ACK';
}
/** Both; from P on the data socket, behind the room's last chunk. Answered by ABORT_ACK, also for an unknown key. */
export interface AbortMessage extends PeerEnvelope {
  type: 'ABORT';
  reason: Reason;
}
/** Both; from P on the data socket, behind the room's last chunk: it returns the room's unspent credit. */
export interface AbortAckMessage extends PeerEnvelope {
  type: 'ABORT_ACK';
}

/** What the pure halves say to each other. */
export type PeerMessage =
  | OpenMessage
  | QueuedMessage
  | ReservedMessage
  | ChunkMessage
  | CreditMessage
  | EndMessage
  | DoneMessage
  | DoneAckMessage
  | AbortMessage
  | AbortAckMessage;

// ---------------------------------------------------------------------------------------------
// Links. Spoken and heard only by channel.ts; the same on every link, whoever is at its ends.

/**
 * From the side that connects, until answered. `link` counts the links this life has opened to the
 * other side: a larger one says that everything of the one before is lost. `fields` are compared one
 * by one (model, layout, limits); a difference is refused by name.
 */
export interface HelloMessage {
  type: 'HELLO';
  version: number;
  role: string;
  name: string;
  epoch: Epoch;
  link: number;
  fields: Record<string, string>;
}
/** Answer to HELLO: who listens, and where its data socket is ('' where there is none). */
export interface WelcomeMessage {
  type: 'WELCOME';
  version: number;
  role: string;
  name: string;
  epoch: Epoch;
  link: number;
  dataAddress: string;
  fields: Record<string, string>;
}
/** Answer to a HELLO or PING that cannot be accepted: which field, and both values. `epoch` is the refuser's. */
export interface RefuseMessage {
  type: 'REFUSE';
  epoch: Epoch;
  link: number;
  field: string;
  ours: string;
  theirs: string;
}
/** Renews the lease; answered by a PING with `answer`. Names both lives and the link. */
export interface PingMessage {
  type: 'PING';
  from: Epoch;
  to: Epoch;
  link: number;
  answer: boolean;
}

export type LinkMessage = HelloMessage | WelcomeMessage | RefuseMessage | PingMessage;

// ---------------------------------------------------------------------------------------------
// R -> worker

/** Start a half of an attempt; the same message goes to both. Answered by `accepted` or `end`. */
export interface SubmitMessage {
  type: 'submit';
  key: RoomKey;
  prefill: WorkerRef;
  decode: WorkerRef;
  /** `promptDigest` of the prompt; each worker computes its own and compares. */
  digest: string;
  promptTokens: Uint32Array;
  maxTokens: number;
  /** Ids that end the answer when sampled; empty for `ignore_eos`. The stopping id is delivered too. */
  stopTokens: number[];
  sampling: SamplingParams;
  /** Prompts of different salts share no cached prefix; null is one too. Only P looks at it. */
  salt: Salt;
  /** What is left of the client's budget, as a duration. */
  budgetMs: number;
}
/** Stop this half, at any phase. Answered by `end`. */
export interface CancelMessage {
  type: 'cancel';
  key: RoomKey;
  reason: Reason;
}
/** The other half failed. Stops a half that still needs it; a room past `ready` ignores it. */
export interface PeerFailedMessage {
  type: 'peer_failed';
  key: RoomKey;
}
/** `end` arrived and is decided. */
export interface EndAckMessage {
  type: 'end_ack';
  key: RoomKey;
}
/** Nothing below this sequence of the sending router is in use; closed keys below it may be forgotten. */
export interface MarkMessage {
  type: 'mark';
  smallestSequence: number;
}
/** Take nothing new; finish what runs. */
export interface DrainMessage {
  type: 'drain';
}

export type RouterToWorker =
  | SubmitMessage
  | CancelMessage
  | PeerFailedMessage
  | EndAckMessage
  | MarkMessage
  | DrainMessage;

// ---------------------------------------------------------------------------------------------
// worker -> R

/** The half exists and will `end`. */
export interface AcceptedMessage {
  type: 'accepted';
  key: RoomKey;
  epoch: Epoch;
}
/**
 * Tokens of one decode step, one row per room of this router. `position` counts the room's generated tokens from 0.
 * `choices` is there if the request asked for log probabilities, one for each token; `promptChoices` beside the first
 * token if it asked for those of its prompt.
 */
export interface TokensMessage {
  type: 'tokens';
  epoch: Epoch;
  rows: TokensRow[];
}
/** The new tokens of one room. */
export interface TokensRow {
  key: RoomKey;
  position: number;
  tokens: number[];
  choices?: TokenChoice[];
  promptChoices?: PackedChoices;
}
/** The half is over and holds nothing. Repeated until `end_ack`. `tokenCount`: tokens this half has sent in all. */
export interface EndedMessage {
  type: 'end';
  key: RoomKey;
  epoch: Epoch;
  outcome: Outcome;
  tokenCount: number;
}
/** What the balancer needs. Counts; pages of this worker's pool. */
export interface LoadMessage {
  type: 'load';
  epoch: Epoch;
  rooms: number;
  roomLimit: number;
  running: number;
  queuedTokens: number;
  pagesFree: number;
  pagesTotal: number;
  draining: boolean;
}

/**
 * Prefill: the prompt is computed, but for so many of its tokens, which were cached. Told once, and nothing depends on
 * it but what the client is told.
 */
export interface CachedMessage {
  type: 'cached';
  key: RoomKey;
  epoch: Epoch;
  tokenCount: number;
}

export type WorkerToRouter = AcceptedMessage | TokensMessage | EndedMessage | LoadMessage | CachedMessage;

/** Everything that can be on a wire. */
export type Message = PeerMessage | LinkMessage | RouterToWorker | WorkerToRouter;

// ---------------------------------------------------------------------------------------------
// Codec

type Check = (value: unknown) => boolean;

// Kept: a new encoder would allocate its buffer again for each message.
const encoder = new Encoder();
const decoder = new Decoder();

const isText: Check = (value) => typeof value === 'string' && value.length <= MAX_TEXT;
const isEpoch: Check = (value) => typeof value === 'string' && /^[0-9a-f]{20}$/.test(value);
const isEpochOrNone: Check = (value) => value === '' || isEpoch(value);
const isKey: Check = (value) => typeof value === 'string' && KEY_PATTERN.test(value);
const isCount: Check = (value) => Number.isSafeInteger(value) && (value as number) >= 0;
const isU32: Check = (value) => isCount(value) && (value as number) <= 0xffffffff;
const isNumber: Check = (value) => typeof value === 'number' && Number.isFinite(value);
const isFlag: Check = (value) => typeof value === 'boolean';
const isReason: Check = (value) => (REASONS as readonly unknown[]).includes(value);
const isBytes: Check = (value) => value instanceof Uint8Array;
const isOneOf =
  (...values: string[]): Check =>
  (value) =>
    values.includes(value as string);
const isListOf =
  (check: Check): Check =>
  (value) =>
    Array.isArray(value) && value.length <= MAX_LIST && value.every(check);
const isRecord: Check = (value) => typeof value === 'object' && value !== null && !Array.isArray(value);
/** Exactly these fields; those of `extras` may be left out. */
const isShape =
  (shape: Record<string, Check>, extras: Record<string, Check> = {}): Check =>
  (value) =>
    isRecord(value) &&
    Object.entries(shape).every(([field, check]) => check((value as Record<string, unknown>)[field])) &&
    Object.entries(value as object).every(
      ([field, given]) =>
        Object.hasOwn(shape, field) || (Object.hasOwn(extras, field) && (extras[field] as Check)(given)),
    );
const isFields: Check = (value) =>
  isRecord(value) &&
  Object.keys(value as object).length <= 64 &&
  Object.entries(value as object).every(([field, text]) => isText(field) && isText(text));
const isManifest: Check = (value) =>
  isShape({
    tokenCount: isCount,
    validInLastPage: isCount,
    pageCount: isCount,
    pageBytes: isCount,
    slotBytes: isCount,
    generations: isListOf(isU32),
  })(value) && (value as Manifest).generations.length === (value as Manifest).pageCount + 1;
const isWorkerRef = isShape({ name: isText, epoch: isEpoch, address: isText });
const isBetween =
  (least: number, most: number): Check =>
  (value) =>
    isNumber(value) && (value as number) >= least && (value as number) <= most;
const isRules: Check = (value) =>
  isShape({
    presencePenalty: isBetween(-2, 2),
    frequencyPenalty: isBetween(-2, 2),
    repetitionPenalty: (penalty) => isBetween(0, 2)(penalty) && penalty !== 0,
    biasIds: isListOf(isU32),
    biases: isListOf(isBetween(-100, 100)),
    minTokens: isCount,
  })(value) && (value as SamplingRules).biasIds.length === (value as SamplingRules).biases.length;
const isConstraint: Check = (value) => typeof value === 'string' && value.length <= MAX_CONSTRAINT;
const isSalt: Check = (value) => value === null || (typeof value === 'string' && /^[0-9a-f]{64}$/.test(value));
const isTopCount: Check = (value) => isCount(value) && (value as number) <= MAX_TOP_LOGPROBS;
const isSampling = isShape(
  { temperature: isNumber, topK: isCount, topP: isNumber, minP: isNumber, seed: isU32 },
  { rules: isRules, logprobs: isTopCount, promptLogprobs: isFlag, constraint: isConstraint },
);
const isChoice: Check = (value) =>
  isShape({ logprob: isNumber, topIds: isListOf(isU32), topLogprobs: isListOf(isNumber) })(value) &&
  (value as TokenChoice).topIds.length <= MAX_TOP_LOGPROBS &&
  (value as TokenChoice).topIds.length === (value as TokenChoice).topLogprobs.length;
const isTokensRow: Check = (value) =>
  isShape(
    { key: isKey, position: isCount, tokens: isListOf(isU32) },
    { choices: isListOf(isChoice), promptChoices: isBytes },
  )(value) &&
  ((value as TokensRow).choices?.length ?? (value as TokensRow).tokens.length) === (value as TokensRow).tokens.length;
const isOutcome: Check = (value) =>
  isShape({ ok: (ok) => ok === true, finish: isOneOf('stop', 'length', 'sent') })(value) ||
  isShape({ ok: (ok) => ok === false, reason: isReason })(value);

const PEER = { from: isEpoch, to: isEpoch, key: isKey };
const NUMBERS = isListOf(isU32);

/** Fields of each message in wire order, and what each must be. */
const SHAPES: { [Type in Message['type']]: Record<string, Check> } = {
  OPEN: { ...PEER, digest: isText, tokenCount: isCount },
  QUEUED: { ...PEER, state: isOneOf('waiting', 'computing') },
  RESERVED: { ...PEER, manifest: isManifest, credit: isCount },
  CHUNK: {
    ...PEER,
    sequence: isCount,
    firstUnit: isCount,
    generations: NUMBERS,
    checksums: NUMBERS,
    payloadBytes: isCount,
  },
  CREDIT: { ...PEER, bytes: isCount },
  END: {
    ...PEER,
    unitCount: isCount,
    tokenCount: isCount,
    digest: isText,
    firstToken: isU32,
    firstChoice: (value) => value === null || isChoice(value),
    promptChoices: (value) => value === null || isBytes(value),
    checksum: isU32,
  },
  DONE: PEER,
  DONE_ACK: PEER,
  ABORT: { ...PEER, reason: isReason },
  ABORT_ACK: PEER,
  HELLO: {
    version: isCount,
    role: isText,
    name: isText,
    epoch: isEpoch,
    link: isCount,
    fields: isFields,
  },
  WELCOME: {
    version: isCount,
    role: isText,
    name: isText,
    epoch: isEpoch,
    link: isCount,
    dataAddress: isText,
    fields: isFields,
  },
  REFUSE: { epoch: isEpoch, link: isCount, field: isText, ours: isText, theirs: isText },
  PING: { from: isEpoch, to: isEpochOrNone, link: isCount, answer: isFlag },
  submit: {
    key: isKey,
    prefill: isWorkerRef,
    decode: isWorkerRef,
    digest: isText,
    promptTokens: (value) => isBytes(value) && (value as Uint8Array).length % 4 === 0,
    maxTokens: isCount,
    stopTokens: NUMBERS,
    sampling: isSampling,
    salt: isSalt,
    budgetMs: isNumber,
  },
  cancel: { key: isKey, reason: isReason },
  peer_failed: { key: isKey },
  end_ack: { key: isKey },
  mark: { smallestSequence: isCount },
  drain: {},
  accepted: { key: isKey, epoch: isEpoch },
  tokens: { epoch: isEpoch, rows: isListOf(isTokensRow) },
  end: { key: isKey, epoch: isEpoch, outcome: isOutcome, tokenCount: isCount },
  load: {
    epoch: isEpoch,
    rooms: isCount,
    roomLimit: isCount,
    running: isCount,
    queuedTokens: isCount,
    pagesFree: isCount,
    pagesTotal: isCount,
    draining: isFlag,
  },
  cached: { key: isKey, epoch: isEpoch, tokenCount: isCount },
};

const NO_TOP_ID = 0xffff_ffff;

/** Bytes of one choice in `PackedChoices`. */
export function packedChoiceBytes(topCount: number): number {
  return 4 + 8 * topCount;
}

/** See `PackedChoices`. */
export function packChoices(choices: readonly TokenChoice[], topCount: number): PackedChoices {
  const packed = new Uint8Array(choices.length * packedChoiceBytes(topCount));
  const view = new DataView(packed.buffer);
  let at = 0;
  for (const { logprob, topIds, topLogprobs } of choices) {
    view.setFloat32(at, logprob, true);
    at += 4;
    for (let rank = 0; rank < topCount; rank++, at += 8) {
      view.setUint32(at, topIds[rank] ?? NO_TOP_ID, true);
      view.setFloat32(at + 4, topLogprobs[rank] ?? 0, true);
    }
  }
  return packed;
}

/** What `packChoices` has packed. A last choice that is cut is left out. */
export function unpackChoices(packed: PackedChoices, topCount: number): TokenChoice[] {
  const view = new DataView(packed.buffer, packed.byteOffset, packed.byteLength);
  const stride = packedChoiceBytes(topCount);
  return Array.from({ length: Math.floor(packed.length / stride) }, (_, index) => {
    const choice: TokenChoice = { logprob: view.getFloat32(index * stride, true), topIds: [], topLogprobs: [] };
    for (let at = index * stride + 4; at < (index + 1) * stride; at += 8) {
      const id = view.getUint32(at, true);
      if (id === NO_TOP_ID) break;
      choice.topIds.push(id);
      choice.topLogprobs.push(view.getFloat32(at + 4, true));
    }
    return choice;
  });
}

/** Frame 0 of a message. The payload of a CHUNK goes in a frame of its own, after it. */
export function encodeMessage(message: Message): Uint8Array {
  const shape = SHAPES[message.type];
  const fields: unknown[] = [message.type];
  for (const field of Object.keys(shape)) {
    const value = (message as unknown as Record<string, unknown>)[field];
    // Token ids travel as raw little-endian bytes; msgpack would spend up to five bytes and a branch on each.
    fields.push(
      value instanceof Uint32Array ? new Uint8Array(value.buffer, value.byteOffset, value.byteLength) : value,
    );
  }
  const body = encoder.encodeSharedRef(fields); // valid until the next call; copied below
  const frame = new Uint8Array(HEADER_BYTES + body.length);
  frame.set(body, HEADER_BYTES);
  frame[0] = MAGIC_0;
  frame[1] = MAGIC_1;
  frame[2] = FRAME_VERSION;
  new DataView(frame.buffer).setUint32(4, crc32c(frame.subarray(HEADER_BYTES)), true);
  return frame;
}

/** Why frames were rejected; a label of a counter. */
export type Rejection = 'short' | 'magic' | 'version' | 'checksum' | 'syntax' | 'type' | 'field' | 'payload';

/** A decoded message with its payload (empty unless CHUNK), or the reason why there is none. */
export type Decoded = { ok: true; message: Message; payload: Uint8Array } | { ok: false; rejection: Rejection };

const NO_PAYLOAD = new Uint8Array(0);

/**
 * Decode the frames of one message. Never throws and never trusts: anything but an exact message of
 * this version is rejected. The payload is a view of the given frame; its checksum is not verified here.
 */
export function decodeMessage(frames: readonly Uint8Array[]): Decoded {
  const frame = frames[0];
  if (frame === undefined || frame.length < HEADER_BYTES) return rejected('short');
  if (frame[0] !== MAGIC_0 || frame[1] !== MAGIC_1) return rejected('magic');
  if (frame[2] !== FRAME_VERSION || frame[3] !== 0) return rejected('version');
  const body = frame.subarray(HEADER_BYTES);
  const checksum = new DataView(frame.buffer, frame.byteOffset).getUint32(4, true);
  if (crc32c(body) !== checksum) return rejected('checksum');
  let fields: unknown;
  try {
    fields = decoder.decode(body);
  } catch {
    return rejected('syntax'); // msgpack throws on cut or hostile input; the caller counts it
  }
  if (!Array.isArray(fields) || typeof fields[0] !== 'string') return rejected('syntax');
  if (!Object.hasOwn(SHAPES, fields[0])) return rejected('type');
  const type = fields[0] as Message['type'];
  const shape = Object.entries(SHAPES[type]);
  if (fields.length !== shape.length + 1) return rejected('field');
  const message: Record<string, unknown> = { type };
  for (const [index, [field, check]] of shape.entries()) {
    const value: unknown = fields[index + 1];
    if (!check(value)) return rejected('field');
    message[field] = field === 'promptTokens' ? toTokens(value as Uint8Array) : value;
  }
  const payload = frames[1] ?? NO_PAYLOAD;
  if (frames.length > 2 || payload.length !== (type === 'CHUNK' ? message['payloadBytes'] : 0)) {
    return rejected('payload');
  }
  if (type === 'CHUNK' && (message['generations'] as number[]).length !== (message['checksums'] as number[]).length) {
    return rejected('field');
  }
  return { ok: true, message: message as unknown as Message, payload };
}

function rejected(rejection: Rejection): Decoded {
  return { ok: false, rejection };
}

/** A copy: msgpack binary values lie at odd offsets, where a Uint32Array cannot be laid over them. */
function toTokens(bytes: Uint8Array): Uint32Array {
  return new Uint32Array(new Uint8Array(bytes).buffer);
}
