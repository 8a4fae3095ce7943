/**
 * The cells that no exploration reaches, by force: each message in each state where an honest peer never sends it. The
 * worker must come out of it with every ledger intact, nothing created for a closed or unseen key, and no token emitted.
 */
import assert from 'node:assert/strict';
import { describe, test } from 'node:test';
import { auditDecode, stepDecode, type DecodeEvent } from '../../scheduler/decode.ts';
import { auditPrefill, stepPrefill, type PrefillEvent } from '../../scheduler/prefill.ts';
import type { WorkerEffect } from '../../scheduler/types.ts';
import type { Epoch, PeerMessage, RoomKey, RouterToWorker } from '../../transfer/messages.ts';
import { BEYOND, IMPOSSIBLE } from './coverage.ts';
import { decodePhase, type DecodeProcess } from './decode-process.ts';
import { exploreModel } from './explore.ts';
import { createModel, type Model } from './model.ts';
import { CANARY, epochOf, NOW_MS, requestOf } from './plan.ts';
import { prefillPhase, type PrefillProcess } from './prefill-process.ts';
import { CI_SETS } from './sets.ts';
import { copyOf } from './values.ts';

/** Sets whose states are used: together they have every phase. */
const SOURCES = [
  'one room: cancel',
  'one room: restartP',
  'behind a step of P: status',
  'behind a write of D: status',
  'retracting: cancel',
];
/** States tried for each cell. */
const SAMPLES = 25;

const models: Model[] = SOURCES.map((name) => {
  const plan = CI_SETS.find((set) => set.name === name);
  assert.ok(plan !== undefined, name);
  const model = createModel(plan);
  assert.equal(exploreModel(model).violation, null);
  return model;
});
const UNSEEN: RoomKey = `${epochOf('router', 1)}-77.1`;

const cells = [...IMPOSSIBLE, ...BEYOND].flatMap(({ owner, phases, messages, why }) =>
  phases.flatMap((phase) => messages.map((message) => ({ owner, phase, message, why }))),
);

/** A message as a liar would send it, with all the right names. */
function forge(name: string, key: RoomKey, from: Epoch, to: Epoch): PeerMessage | RouterToWorker {
  const digest = requestOf(0, CANARY).digest;
  switch (name) {
    case 'submit': {
      const prefill = { name: 'p0', epoch: epochOf('prefill', 1), address: '' };
      const decode = { name: 'd0', epoch: epochOf('decode', 1), address: '' };
      return { type: 'submit', key, prefill, decode, ...requestOf(0, CANARY), budgetMs: 1e6 };
    }
    case 'peer_failed':
    case 'end_ack':
      return { type: name, key };
    case 'OPEN':
      return { type: 'OPEN', from, to, key, digest, tokenCount: 1 };
    case 'QUEUED waiting':
    case 'QUEUED computing':
      return { type: 'QUEUED', from, to, key, state: name === 'QUEUED waiting' ? 'waiting' : 'computing' };
    case 'RESERVED': {
      const manifest = {
        tokenCount: 1,
        validInLastPage: 1,
        pageCount: 1,
        pageBytes: 2,
        slotBytes: 3,
        generations: [1, 1],
      };
      return { type: 'RESERVED', from, to, key, manifest, credit: 3 };
    }
    case 'CREDIT':
      return { type: 'CREDIT', from, to, key, bytes: 1e6 };
    case 'CHUNK':
      return {
        type: 'CHUNK',
        from,
        to,
        key,
        sequence: 0,
        firstUnit: 0,
        generations: [1],
        checksums: [7],
        payloadBytes: 2,
      };
    case 'END':
      return {
        type: 'END',
        from,
        to,
        key,
        unitCount: 2,
        tokenCount: 1,
        digest,
        firstToken: 5,
        firstChoice: null,
        promptChoices: null,
        checksum: 0,
      };
    case 'ABORT':
      return { type: 'ABORT', from, to, key, reason: 'internal' };
    case 'DONE':
    case 'DONE_ACK':
    case 'ABORT_ACK':
      return { type: name, from, to, key };
    default:
      throw new Error(`nobody sends ${name}`);
  }
}

/** States of all models in which some room stands where it should, with the key of that room. */
function samplesOf<Process extends PrefillProcess | DecodeProcess>(
  processes: readonly Process[],
  phase: string,
  phaseOf: (process: Process, key: RoomKey) => string,
): { process: Process; key: RoomKey }[] {
  const found: { process: Process; key: RoomKey }[] = [];
  for (const process of processes) {
    const { live, desk } = process.state;
    if (process.router === null || desk.peers.size === 0) continue;
    const keys =
      phase === 'unseen' ? [UNSEEN] : phase === 'closed' ? [...desk.closing.tombstones.keys()] : [...live.keys()];
    for (const key of keys) if (phaseOf(process, key) === phase) found.push({ process: copyOf(process), key });
  }
  // From all over the exploration, not only its beginning.
  const stride = Math.max(1, Math.floor(found.length / SAMPLES));
  return found.filter((_, index) => index % stride === 0).slice(0, SAMPLES);
}

/** What holds whatever a liar sends. */
function judge(
  effects: readonly WorkerEffect[],
  audit: readonly string[],
  live: ReadonlySet<RoomKey>,
  before: ReadonlySet<RoomKey>,
): void {
  assert.deepEqual(audit, []);
  for (const key of live) assert.ok(before.has(key), `${key} was created`);
  for (const effect of effects) {
    assert.notEqual(effect.type, 'violation');
    assert.ok(effect.type !== 'report' || effect.message.type !== 'tokens', 'a token was emitted');
  }
}

function envelope(process: PrefillProcess | DecodeProcess, peerName: string, name: string, key: RoomKey): PrefillEvent {
  const peer = { name: peerName, epoch: process.state.desk.peers.get(peerName) as Epoch };
  const message = forge(name, key, peer.epoch, process.self.epoch);
  if (!('from' in message)) return { type: 'router_message', router: process.router as Epoch, message, nowMs: NOW_MS };
  return { type: 'peer_message', peer, message, nowMs: NOW_MS };
}

describe('a prefill worker', () => {
  const states = models.flatMap((model) => model.prefillStates());
  for (const { phase, message, why } of cells.filter(({ owner }) => owner === 'prefill')) {
    test(`survives ${message} for a room that is ${phase} (${why})`, () => {
      const samples = samplesOf(states, phase, ({ state }, key) => prefillPhase(state, key));
      assert.ok(samples.length > 0, `a state with a room that is ${phase}`);
      for (const { process, key } of samples) {
        const { state } = process;
        const before = new Set(state.live.keys());
        const effects = stepPrefill(state, envelope(process, 'd0', message, key));
        judge(effects, auditPrefill(state), new Set(state.live.keys()), before);
      }
    });
  }
});

describe('a decode worker', () => {
  const states = models.flatMap((model) => model.decodeStates());
  for (const { phase, message, why } of cells.filter(({ owner }) => owner === 'decode')) {
    test(`survives ${message} for a room that is ${phase} (${why})`, () => {
      const samples = samplesOf(states, phase, ({ state }, key) => decodePhase(state, key));
      assert.ok(samples.length > 0, `a state with a room that is ${phase}`);
      for (const { process, key } of samples) {
        const { state } = process;
        const before = new Set(state.live.keys());
        const event = envelope(process, 'p0', message, key);
        const payload = new Uint8Array(message === 'CHUNK' ? 2 : 0);
        const whole: DecodeEvent = event.type === 'peer_message' ? { ...event, payload } : (event as DecodeEvent);
        const effects = stepDecode(state, whole);
        judge(effects, auditDecode(state), new Set(state.live.keys()), before);
      }
    });
  }
});
