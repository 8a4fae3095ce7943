/** Names, limits and messages for tests of one worker's scheduler, with the peer and the router played by hand. */

import type { DecodeLimits, PrefillLimits, WorkerEffect } from '../../scheduler/types.ts';
import { promptDigest } from '../../transfer/checksum.ts';
import {
  makeEpoch,
  makeKey,
  makeRoomId,
  type Instance,
  type PeerMessage,
  type RoomKey,
  type SubmitMessage,
} from '../../transfer/messages.ts';

export const P: Instance = { name: 'p0', epoch: makeEpoch(1000, 1) };
export const D: Instance = { name: 'd0', epoch: makeEpoch(1000, 2) };
export const ROUTER = makeEpoch(1000, 3);
export const SAMPLING = { temperature: 0, topK: 0, topP: 1, minP: 0, seed: 0 };

const SHARED = {
  pageTokens: 128,
  pageBytes: 8,
  slotBytes: 12,
  pageCount: 20,
  slotCount: 8,
  maxRooms: 8,
  maxSequenceTokens: 4096,
  strictLedger: true,
  modelDigest: 'm',
  leaseMs: 10_000,
  dataSilenceMs: 10_000,
  stallMs: 15_000,
  roomMs: 60_000,
  resendMinMs: 100,
  resendMaxMs: 2_000,
  statusMs: 2_000,
};
export const PREFILL_LIMITS: PrefillLimits = {
  ...SHARED,
  stateCount: 0,
  hasTier: false,
  prefillChunkTokens: 256,
  maxChunkBytes: 1000,
  stagingBytes: 1000,
};
export const DECODE_LIMITS: DecodeLimits = {
  ...SHARED,
  maxRunning: 4,
  peerBufferBytes: 1000,
  roomWindowBytes: 1000,
  headroomTokens: 128,
  hostBytes: 1000,
  drafts: false,
};

/** Key of attempt 1 of a room. */
export function keyOf(sequence: number): RoomKey {
  return makeKey(makeRoomId(ROUTER, sequence), 1);
}

export function promptOf(count: number): Uint32Array {
  return Uint32Array.from({ length: count }, (_, index) => index);
}

/** A submit of a prompt of `count` tokens. */
export function submitOf(sequence: number, count: number, changes: Partial<SubmitMessage> = {}): SubmitMessage {
  const promptTokens = promptOf(count);
  return {
    type: 'submit',
    key: keyOf(sequence),
    prefill: { ...P, address: 'tcp://p' },
    decode: { ...D, address: '' },
    digest: promptDigest(promptTokens, 'm'),
    promptTokens,
    maxTokens: 4,
    stopTokens: [],
    sampling: SAMPLING,
    salt: null,
    budgetMs: 100_000,
    ...changes,
  };
}

/** Effects in short: messages by type, with the reason or the outcome where there is one. */
export function shorten(effects: readonly WorkerEffect[]): string[] {
  return effects.map((effect) => {
    switch (effect.type) {
      case 'send':
        return nameOf(effect.message);
      case 'report': {
        const { message } = effect;
        if (message.type === 'end') {
          return `end:${message.outcome.ok ? message.outcome.finish : message.outcome.reason}`;
        }
        if (message.type === 'tokens') {
          return message.rows.map((row) => `token${row.position}:${row.tokens.join()}`).join(' ');
        }
        return message.type;
      }
      case 'read':
        return `read:${effect.firstUnit}+${effect.places.length}`;
      case 'write':
        return `write:${effect.unit}`;
      case 'save':
      case 'restore':
        return `${effect.type}:${effect.places.length}`;
      case 'fetch':
      case 'stash':
      case 'connect':
      case 'discard':
      case 'forget':
      case 'violation':
        return effect.type;
      default:
        throw new Error(String(effect satisfies never));
    }
  });
}

function nameOf(message: PeerMessage): string {
  return message.type === 'ABORT' ? `ABORT:${message.reason}` : message.type;
}
