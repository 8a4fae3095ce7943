/** A decode scheduler stepped by hand, event by event, and audited after each. */

import assert from 'node:assert/strict';
import { auditDecode, createDecode, stepDecode, type DecodeEvent, type DecodeState } from '../../scheduler/decode.ts';
import type { DecodeLimits, WorkerEffect } from '../../scheduler/types.ts';
import { combineChecksums, crc32c } from '../../transfer/checksum.ts';
import type { Manifest, PeerMessage, RouterToWorker, SubmitMessage } from '../../transfer/messages.ts';
import { D, DECODE_LIMITS, keyOf, P, ROUTER, shorten, submitOf } from './halves.ts';

/** The payload of everything but CHUNK. */
export const NONE = new Uint8Array(0);

/** An idle worker with a link to P. */
export function create(changes: Partial<DecodeLimits> = {}): DecodeState {
  const state = createDecode({ ...DECODE_LIMITS, ...changes }, D);
  step(state, { type: 'peer_up', peer: P, nowMs: 0 });
  return state;
}

/** Step, audit, and return the effects. */
export function run(state: DecodeState, event: DecodeEvent): WorkerEffect[] {
  const effects = stepDecode(state, event);
  assert.deepEqual(auditDecode(state), []);
  return effects;
}

/** The same, in short. */
export function step(state: DecodeState, event: DecodeEvent): string[] {
  return shorten(run(state, event));
}

/** A message of the router. */
export function fromRouter(state: DecodeState, message: RouterToWorker, nowMs = 1): string[] {
  return step(state, { type: 'router_message', router: ROUTER, message, nowMs });
}

/** A message of P without its address. */
export type Content = PeerMessage extends infer M
  ? M extends PeerMessage
    ? Omit<M, 'from' | 'to' | 'key'>
    : never
  : never;

/** A message of P about a room. */
export function fromPeer(state: DecodeState, sequence: number, content: Content, payload = NONE, nowMs = 1): string[] {
  const message = { from: P.epoch, to: D.epoch, key: keyOf(sequence), ...content } as PeerMessage;
  return step(state, { type: 'peer_message', peer: P, message, payload, nowMs });
}

/** P's answer to OPEN. */
export const waiting: Content = { type: 'QUEUED', state: 'waiting' };

/** What a room was promised. */
export function manifestOf(state: DecodeState, sequence: number): Manifest {
  return state.live.get(keyOf(sequence))?.receiver?.manifest as Manifest;
}

/** Send units [first, end) of a room, all zero. */
export function chunk(state: DecodeState, sequence: number, first: number, end: number): string[] {
  const manifest = manifestOf(state, sequence);
  const sizes = [...Array.from({ length: manifest.pageCount }, () => 8), 12].slice(first, end);
  const payload = new Uint8Array(sizes.reduce((sum, size) => sum + size, 0));
  const content: Content = {
    type: 'CHUNK',
    sequence: 0,
    firstUnit: first,
    generations: manifest.generations.slice(first, end),
    checksums: sizes.map((size) => crc32c(new Uint8Array(size))),
    payloadBytes: payload.length,
  };
  return fromPeer(state, sequence, content, payload);
}

/** END of such a room. */
export function endOf(pageCount: number, submit: SubmitMessage, firstToken: number): Content {
  const sizes = [...Array.from({ length: pageCount }, () => 8), 12];
  return {
    type: 'END',
    unitCount: pageCount + 1,
    tokenCount: submit.promptTokens.length,
    digest: submit.digest,
    firstToken,
    firstChoice: null,
    promptChoices: null,
    checksum: combineChecksums(sizes.map((size) => crc32c(new Uint8Array(size)))),
  };
}

/** Bring a room of `count` tokens to ready; its pages are asked for with RESERVED, which must be possible now. */
export function makeReady(
  state: DecodeState,
  sequence: number,
  count: number,
  changes: Partial<SubmitMessage> = {},
  firstToken = 50,
): string[] {
  const submit = submitOf(sequence, count, changes);
  fromRouter(state, submit);
  fromPeer(state, sequence, waiting);
  const pageCount = Math.ceil(count / 128);
  for (let unit = 0; unit <= pageCount; unit++) {
    chunk(state, sequence, unit, unit + 1);
    step(state, { type: 'written', key: keyOf(sequence), unit, nowMs: 1 });
  }
  return fromPeer(state, sequence, endOf(pageCount, submit, firstToken));
}

/** End the step under way with the same token for every row. */
export function stepDone(state: DecodeState, token: number): string[] {
  const tokens = (state.step ?? []).map((key) => ({ key, token }));
  return step(state, { type: 'step_done', tokens, nowMs: 1 });
}
