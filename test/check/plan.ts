/**
 * What one exploration is about: how many rooms, how small the pools, which faults and how many of each. And the ghost
 * model: the bytes of a unit and the tokens of an answer follow from the prompt, so every wrong one is seen.
 */
import { nextDecodeBatch, stepDecode } from '../../scheduler/decode.ts';
import { nextPrefillBatch, stepPrefill } from '../../scheduler/prefill.ts';
import type { DecodeLimits, PrefillLimits, UnitPlace } from '../../scheduler/types.ts';
import { crc32c, promptDigest } from '../../transfer/checksum.ts';
import { makeEpoch, type Epoch } from '../../transfer/messages.ts';
import { stepRoom, type RoomRequest } from '../../transfer/room.ts';
import { share } from './values.ts';

/**
 * What may go wrong, each as often as the plan allows:
 *
 *   cancel     a client leaves                    stop      a client's stop string is found
 *   drop       the head of a socket is lost       duplicate the head of a socket comes again, at any later time
 *   reorder    others overtake the head           expiry    a deadline passes
 *   status     a half says that it is still alive reset     a connection breaks and is made again, both lives go on
 *   unlink     a link is given up by both sides and made again
 *   restartP, restartD, restartR                  a process dies and comes back empty, in a new life
 */
export const FAULTS = [
  'cancel',
  'stop',
  'drop',
  'duplicate',
  'reorder',
  'expiry',
  'status',
  'reset',
  'unlink',
  'restartP',
  'restartD',
  'restartR',
] as const;
export type Fault = (typeof FAULTS)[number];

/** A client's request: lengths in tokens. */
export interface RoomPlan {
  promptTokens: number;
  /** So many tokens of the prompt are the same for all clients that say so; none if left out. */
  commonTokens?: number;
  maxTokens: number;
}

/** A page and a slot, in bytes. */
const PAGE_BYTES = 2;
const SLOT_BYTES = 3;

/** One exploration. Bytes: a page has 2, a slot 3; a page holds one token. */
export interface Plan {
  name: string;
  rooms: RoomPlan[];
  prefillPages: number;
  decodePages: number;
  /** Rooms a worker takes; one more is refused. */
  maxRooms: number;
  /** What P may have under way to D, and what one room may. */
  peerBufferBytes: number;
  roomWindowBytes: number;
  /** Host memory for retracted sequences on D. */
  hostBytes: number;
  /** Rows of D have drafts; each step ends with all of them wrong, or all right. */
  drafts: boolean;
  /** Tokens of one prefill step. */
  prefillChunkTokens: number;
  /** States of the prefix cache on P; 0 is no cache. */
  stateCount: number;
  maxAttempts: number;
  /**
   * Where the exploration begins: null at the very start, else after these transitions. Before and after each of them
   * every room gets as far as it can without an engine. `until decode is PHASE` follows the fair schedule instead.
   */
  setup: readonly string[] | null;
  faults: Partial<Record<Fault, number>>;
}

/** One room of two pages, three pages on D and two on P. */
export const ONE_ROOM: Omit<Plan, 'name' | 'faults'> = {
  rooms: [{ promptTokens: 2, maxTokens: 2 }],
  prefillPages: 2,
  decodePages: 3,
  maxRooms: 2,
  peerBufferBytes: 6,
  roomWindowBytes: SLOT_BYTES,
  hostBytes: 20,
  drafts: false,
  prefillChunkTokens: 2,
  stateCount: 0,
  maxAttempts: 2,
  setup: null,
};

/** Tried once more from every state of rest: a plain request that must succeed. */
export const CANARY: RoomPlan = { promptTokens: 1, maxTokens: 1 };

/** Time stands still; a deadline or a re-send that is to come is set to `NOW_MS`, all others to `FAR_MS`. */
export const NOW_MS = 0;
export const FAR_MS = 1e9;

const MODEL_DIGEST = 'ghost';

/** The step functions under test; another set of them shows that the checker finds what is broken. */
export interface Rules {
  stepPrefill: typeof stepPrefill;
  nextPrefillBatch: typeof nextPrefillBatch;
  stepDecode: typeof stepDecode;
  nextDecodeBatch: typeof nextDecodeBatch;
  stepRoom: typeof stepRoom;
}

export const REAL_RULES: Rules = { stepPrefill, nextPrefillBatch, stepDecode, nextDecodeBatch, stepRoom };

const SHARED_LIMITS = {
  pageTokens: 1,
  pageBytes: PAGE_BYTES,
  slotBytes: SLOT_BYTES,
  slotCount: 2,
  strictLedger: true,
  modelDigest: MODEL_DIGEST,
  maxSequenceTokens: 16,
  leaseMs: 10_000,
  stallMs: 15_000,
  roomMs: 60_000,
  resendMinMs: 100,
  resendMaxMs: 100,
  statusMs: 2_000,
};

export function prefillLimitsOf(plan: Plan): PrefillLimits {
  return share({
    ...SHARED_LIMITS,
    pageCount: plan.prefillPages,
    maxRooms: plan.maxRooms,
    prefillChunkTokens: plan.prefillChunkTokens,
    stateCount: plan.stateCount,
    hasTier: false,
    maxChunkBytes: 1,
    stagingBytes: 4,
  });
}

export function decodeLimitsOf(plan: Plan): DecodeLimits {
  return share({
    ...SHARED_LIMITS,
    pageCount: plan.decodePages,
    maxRooms: plan.maxRooms,
    maxRunning: 2,
    peerBufferBytes: plan.peerBufferBytes,
    roomWindowBytes: plan.roomWindowBytes,
    // A page holds one token, and a draft never asks for a page of its own.
    headroomTokens: plan.drafts ? 2 : 1,
    hostBytes: plan.hostBytes,
    drafts: plan.drafts,
  });
}

/** The request of a client, by its number. */
export function requestOf(client: number, { promptTokens, commonTokens = 0, maxTokens }: RoomPlan): RoomRequest {
  const tokenAt = (index: number): number => (index < commonTokens ? 900 + index : 10 * client + index);
  const tokens = Uint32Array.from({ length: promptTokens }, (_, index) => tokenAt(index));
  const sampling = share({ temperature: 0, topK: 0, topP: 1, minP: 0, seed: 0 });
  return { digest: digestOf(tokens), promptTokens: tokens, maxTokens, stopTokens: [], sampling, salt: null };
}

const digests = new WeakMap<Uint32Array, string>();

/** The digest of a prompt, by which its ghosts are known. */
export function digestOf(promptTokens: Uint32Array): string {
  let digest = digests.get(promptTokens);
  if (digest === undefined) {
    digest = promptDigest(promptTokens, MODEL_DIGEST);
    digests.set(promptTokens, digest);
  }
  return digest;
}

/** The epoch of a life, counted from 1, of a process. */
export function epochOf(role: 'router' | 'prefill' | 'decode', life: number): Epoch {
  return makeEpoch(1000 + life, { router: 1, prefill: 2, decode: 3 }[role]);
}

const ghosts = new Map<string, Uint8Array>();

/**
 * What a sequence's page of number `index` holds, or its slot after `index` tokens. It follows from the tokens up to
 * there, so that sequences whose prompts begin alike may share it; the answer follows from the prompt.
 */
export function ghostBytes(promptTokens: Uint32Array, kind: UnitPlace['kind'], index: number): Uint8Array {
  const name = `${promptTokens.slice(0, kind === 'page' ? index + 1 : index).join()} ${kind} ${index}`;
  let bytes = ghosts.get(name);
  if (bytes === undefined) {
    const hash = crc32c(Buffer.from(name));
    bytes = Uint8Array.from({ length: kind === 'slot' ? SLOT_BYTES : PAGE_BYTES }, (_, byte) => hash >>> (8 * byte));
    ghosts.set(name, bytes);
  }
  return bytes;
}

/** The i-th token of the answer to a prompt. */
export function ghostToken(digest: string, index: number): number {
  return 1000 + ((Number.parseInt(digest.slice(0, 6), 16) + index) % 1000);
}

/** A name for a place in a worker's memory. */
export function placeName(place: UnitPlace): string {
  return place.kind === 'page' ? `page ${place.page}` : `slot ${place.slot}`;
}
