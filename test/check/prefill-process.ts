/** The prefill worker in the model: the real scheduler, an engine that computes ghosts, and its channel's memory. */
import {
  auditPrefill,
  createPrefill,
  type PrefillEvent,
  type PrefillRoom,
  type PrefillState,
} from '../../scheduler/prefill.ts';
import type { PrefillBatch, Request, SampledToken, WorkerEffect } from '../../scheduler/types.ts';
import { crc32c } from '../../transfer/checksum.ts';
import { isClosed } from '../../transfer/closing.ts';
import type { PeerMessage, RoomKey, RouterToWorker } from '../../transfer/messages.ts';
import { checkChunk, checkPrefillTurn } from './invariants.ts';
import { epochOf, FAR_MS, ghostBytes, ghostToken, NOW_MS, placeName, prefillLimitsOf, type Plan } from './plan.ts';
import {
  deskInternals,
  expect,
  forgetFree,
  generationsOf,
  keysOf,
  nameOf,
  NO_PAYLOAD,
  normaliseDesk,
  QUEUE,
  quiet,
  type Internal,
  type Packet,
  type Places,
  type Turn,
  type WorkerProcess,
} from './process.ts';

export interface PrefillProcess extends WorkerProcess {
  state: PrefillState;
  reads: ({ key: RoomKey; firstUnit: number } & Places)[];
  batch: PrefillBatch | null;
}

/** The `life`-th life of the prefill worker, without links. */
export function bornPrefill(plan: Plan, life: number): PrefillProcess {
  const self = { name: 'p0', epoch: epochOf('prefill', life) };
  return {
    self,
    state: createPrefill(prefillLimitsOf(plan), self),
    router: null,
    lostRouters: [],
    memory: new Map(),
    closed: new Set(),
    reads: [],
    batch: null,
  };
}

/** Where a key stands on P, as the rows of its table are called. */
export function prefillPhase(state: PrefillState, key: RoomKey): string {
  const sender = state.live.get(key)?.sender;
  if (sender === undefined) return isClosed(state.desk.closing, key) ? 'closed' : 'unseen';
  if (sender.phase !== 'transferring') return sender.phase;
  if (sender.firstToken === null) return 'computing';
  return sender.endResend === null ? 'sending' : 'confirming';
}

/** Step P: check it, take note of the cells that were reached, and do what its effects ask. */
export function runPrefill(
  process: PrefillProcess,
  event: PrefillEvent,
  turn: Turn,
  { cells, staged }: { cells: [RoomKey, string][]; staged?: Uint8Array },
): void {
  const { state } = process;
  for (const [key, name] of cells) turn.seen.add(`prefill | ${prefillPhase(state, key)} | ${name}`);
  const before = new Map(state.live);
  const effects = turn.rules.stepPrefill(state, event);
  const found = auditPrefill(state);
  expect(found.length === 0, `I1: ${found.join('; ')}`);
  checkPrefillTurn(process, before);
  perform(process, effects, turn, staged);
}

function perform(process: PrefillProcess, effects: readonly WorkerEffect[], turn: Turn, staged?: Uint8Array): void {
  for (const effect of effects) {
    switch (effect.type) {
      case 'send': {
        const { message, peer, socket } = effect;
        const isChunk = message.type === 'CHUNK';
        expect(!isChunk || staged?.length === message.payloadBytes, 'a CHUNK without the bytes that were read for it');
        const payload = isChunk ? (staged as Uint8Array) : NO_PAYLOAD;
        const queue = socket === 'data' ? QUEUE.data : QUEUE.prefillToDecode;
        turn.sent.push({ queue, to: peer.epoch, packet: { message, payload, isCopy: false } });
        break;
      }
      case 'read': {
        const { key, firstUnit, places } = effect;
        process.reads.push({ key, firstUnit, places, generations: generationsOf(process.state.pools, places) });
        break;
      }
      case 'discard':
        break;
      case 'report': {
        const packet = { message: effect.message, payload: NO_PAYLOAD, isCopy: false };
        turn.sent.push({ queue: QUEUE.prefillToRouter, to: effect.router, packet });
        break;
      }
      default:
        throw new Error(`I1: a prefill worker asks for ${JSON.stringify(effect)}`);
    }
  }
}

/** P gets a message of the router or of D. */
export function deliverToPrefill(process: PrefillProcess, packet: Packet, isFromRouter: boolean, turn: Turn): void {
  const { message } = packet;
  if (isFromRouter) {
    const router = process.router;
    if (router === null) return;
    const note = message as RouterToWorker;
    const keys = keysOf(note, process.state.live);
    const event = { type: 'router_message', router, message: note, nowMs: NOW_MS } as const;
    runPrefill(process, event, turn, { cells: keys.map((key) => [key, note.type]) });
    return;
  }
  const epoch = process.state.desk.peers.get('d0');
  if (epoch === undefined) return;
  const peer = { name: 'd0', epoch };
  const said = message as PeerMessage;
  const isOther = said.from !== epoch || said.to !== process.self.epoch;
  const event = { type: 'peer_message', peer, message: said, nowMs: NOW_MS } as const;
  if (isOther) turn.seen.add('prefill | of another life | message');
  runPrefill(process, event, turn, { cells: isOther ? [] : [[said.key, nameOf(said)]] });
}

/** Cells of an event that is about every room. */
export function allPrefillRooms({ state }: PrefillProcess, name: string): { cells: [RoomKey, string][] } {
  return { cells: [...state.live.keys()].map((key) => [key, name]) };
}

/** What P may do by itself now: its engine first, then its timers. */
export function prefillInternals(process: PrefillProcess): Internal<PrefillProcess>[] {
  const found: Internal<PrefillProcess>[] = [];
  const { state, reads, batch } = process;
  const add = (
    key: RoomKey | null,
    kind: Internal<PrefillProcess>['kind'],
    label: string,
    run: Internal<PrefillProcess>['run'],
  ): void => void found.push({ label, kind, key, to: kind === 'resend' ? 'decode' : null, run });

  for (const [index, { key, firstUnit }] of reads.entries()) {
    add(key, 'engine', `unit ${firstUnit} is read`, (at, turn) => finishRead(at, index, turn));
  }
  if (batch !== null) add(null, 'engine', 'the step ends', finishStep);
  else if (state.step === null && state.computing.length > 0) add(null, 'engine', 'a step begins', beginStep);

  for (const [key, { sender }] of state.live) {
    if (sender.phase === 'unwinding' || sender.phase === 'ended') continue;
    const arm = (name: 'roomDeadlineMs' | 'stallDeadlineMs' | 'statusDueMs', what: string) => {
      return (at: PrefillProcess, turn: Turn): void => {
        (at.state.live.get(key) as { sender: typeof sender }).sender[name] = NOW_MS;
        tick(at, turn, [[key, what]]);
      };
    };
    add(key, 'room', 'the room deadline passes', arm('roomDeadlineMs', 'room deadline'));
    if (sender.stallDeadlineMs !== null) {
      add(key, 'stall', 'the stall deadline passes', arm('stallDeadlineMs', 'stall deadline'));
    }
    if (sender.phase !== 'bootstrapping' && sender.firstToken === null) {
      add(key, 'status', 'QUEUED is due', arm('statusDueMs', 'status'));
    }
    if (sender.endResend !== null) {
      add(key, 'resend', 'END is sent again', (at, turn) => {
        const resend = at.state.live.get(key)?.sender.endResend;
        if (resend == null) return;
        resend.atMs = NOW_MS;
        tick(at, turn, [[key, 're-send']]);
      });
    }
  }
  const { leaseMs } = state.limits;
  found.push(...deskInternals(process, { leaseMs, peer: 'decode', tick: (at, turn) => tick(at, turn, []) }));
  return found;
}

function tick(process: PrefillProcess, turn: Turn, cells: [RoomKey, string][]): void {
  runPrefill(process, { type: 'tick', nowMs: NOW_MS }, turn, { cells });
}

function finishRead(process: PrefillProcess, index: number, turn: Turn): void {
  const [read] = process.reads.splice(index, 1) as [PrefillProcess['reads'][number]];
  const { key, firstUnit, places, generations } = read;
  const now = generationsOf(process.state.pools, places);
  expect(now.join() === generations.join(), `I3: unit ${firstUnit} of ${key} is read after its page was given away`);
  const parts = places.map((place) => process.memory.get(placeName(place)) ?? new Uint8Array(0));
  const staged = Uint8Array.from(parts.flatMap((part) => [...part]));
  const event = {
    type: 'read_done',
    key,
    firstUnit,
    checksums: parts.map((part) => crc32c(part)),
    nowMs: NOW_MS,
  } as const;
  runPrefill(process, event, turn, { cells: [[key, 'read_done']], staged });
}

function beginStep(process: PrefillProcess, turn: Turn): void {
  process.batch = turn.rules.nextPrefillBatch(process.state);
  const chunks = process.batch?.chunks ?? [];
  for (const { slot, resume } of chunks) if (resume !== null) copyPlace(process, `state ${resume}`, `slot ${slot}`);
  for (const chunk of chunks) {
    turn.seen.add(`prefill | ${prefillPhase(process.state, chunk.key)} | step begins`);
    checkChunk(process, chunk);
  }
}

function copyPlace({ memory }: PrefillProcess, from: string, to: string): void {
  memory.set(to, memory.get(from) ?? new Uint8Array(0));
}

/** The pages of the chunks and the slots have their bytes; last chunks have a token. */
function finishStep(process: PrefillProcess, turn: Turn): void {
  const batch = process.batch as PrefillBatch;
  process.batch = null;
  const tokens: SampledToken[] = [];
  for (const chunk of batch.chunks) {
    const { key, pages, slot, start, end, last, keep } = chunk;
    const { sender, request } = process.state.live.get(key) as PrefillRoom;
    const { promptTokens } = request as Request;
    checkChunk(process, chunk);
    for (let page = start; page < end; page++) {
      process.memory.set(`page ${pages[page]}`, ghostBytes(promptTokens, 'page', page));
    }
    process.memory.set(`slot ${slot}`, ghostBytes(promptTokens, 'slot', end));
    if (keep !== null) copyPlace(process, `slot ${slot}`, `state ${keep}`);
    if (last) tokens.push({ key, token: ghostToken(sender.digest, 0) });
  }
  const cells = batch.chunks.map(({ key, last }): [RoomKey, string] => [key, last ? 'last step done' : 'step done']);
  runPrefill(process, { type: 'step_done', tokens, nowMs: NOW_MS }, turn, { cells });
}

/** Take out what must not tell states apart: time, counters, the bytes of free places. */
export function normalisePrefill(process: PrefillProcess): void {
  const { state } = process;
  normaliseDesk(state.desk);
  state.computedTokens = 0;
  const { cache } = state;
  cache.counts = { hits: 0, misses: 0, tokens: 0, evictedPages: 0, evictedStates: 0 };
  cache.byHash = new Map([...cache.byHash].sort(([left], [right]) => left - right));
  for (const entry of cache.pages.values()) entry.children.sort((left, right) => left - right);
  for (const { sender, request } of state.live.values()) {
    sender.roomDeadlineMs = FAR_MS;
    if (sender.stallDeadlineMs !== null) sender.stallDeadlineMs = FAR_MS;
    sender.statusDueMs = FAR_MS;
    if (sender.endResend !== null) quiet(sender.endResend);
    if (request !== null) request.deadlineMs = FAR_MS;
  }
  forgetFree(process);
}
