/** The decode worker in the model: the real scheduler, an engine that checks and computes ghosts, and its channel. */
import {
  auditDecode,
  createDecode,
  type DecodeEvent,
  type DecodeRoom,
  type DecodeState,
} from '../../scheduler/decode.ts';
import type { DecodeBatch, WorkerEffect } from '../../scheduler/types.ts';
import { isClosed } from '../../transfer/closing.ts';
import type { PeerMessage, RoomKey, RouterToWorker } from '../../transfer/messages.ts';
import { checkDecodeTurn, checkGhosts } from './invariants.ts';
import {
  decodeLimitsOf,
  digestOf,
  epochOf,
  FAR_MS,
  ghostBytes,
  ghostToken,
  NOW_MS,
  placeName,
  type Plan,
} from './plan.ts';
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
  sorted,
  type Internal,
  type Packet,
  type Places,
  type Turn,
  type WorkerProcess,
} from './process.ts';

export interface DecodeProcess extends WorkerProcess {
  state: DecodeState;
  writes: ({ key: RoomKey; unit: number; payload: Uint8Array } & Places)[];
  /** Saves and restores of retracted sequences. */
  moves: ({ key: RoomKey; kind: 'save' | 'restore' } & Places)[];
  /** Host memory. */
  copies: Map<RoomKey, Uint8Array[]>;
  batch: DecodeBatch | null;
  /** The channel keeps a link to P, or tries to have one. */
  wantsLink: boolean;
}

/** The `life`-th life of the decode worker, without links. */
export function bornDecode(plan: Plan, life: number): DecodeProcess {
  const self = { name: 'd0', epoch: epochOf('decode', life) };
  return {
    self,
    state: createDecode(decodeLimitsOf(plan), self),
    router: null,
    lostRouters: [],
    memory: new Map(),
    closed: new Set(),
    writes: [],
    moves: [],
    copies: new Map(),
    batch: null,
    wantsLink: false,
  };
}

/** Where a key stands on D, as the rows of its table are called. */
export function decodePhase(state: DecodeState, key: RoomKey): string {
  const room = state.live.get(key);
  if (room === undefined) return isClosed(state.desk.closing, key) ? 'closed' : 'unseen';
  const { receiver, sequence } = room;
  if (sequence !== null) return sequence.phase === 'unwinding' ? 'unwinding (sequence)' : sequence.phase;
  if (receiver === null) return 'nothing';
  return receiver.phase === 'queued' && !receiver.answered ? 'opening' : receiver.phase;
}

/** Step D: check it, take note of the cells that were reached, and do what its effects ask. */
export function runDecode(process: DecodeProcess, event: DecodeEvent, turn: Turn, cells: [RoomKey, string][]): void {
  const { state } = process;
  for (const [key, name] of cells) turn.seen.add(`decode | ${decodePhase(state, key)} | ${name}`);
  const before = new Map(state.live);
  const phases = new Map([...before.keys()].map((key) => [key, decodePhase(state, key)]));
  const effects = turn.rules.stepDecode(state, event);
  const found = auditDecode(state);
  expect(found.length === 0, `I1: ${found.join('; ')}`);
  checkDecodeTurn(process, { before, phases, event, effects });
  perform(process, effects, turn);
}

function perform(process: DecodeProcess, effects: readonly WorkerEffect[], turn: Turn): void {
  for (const effect of effects) {
    switch (effect.type) {
      case 'connect':
        process.wantsLink = true;
        break;
      case 'send': {
        const packet = { message: effect.message, payload: NO_PAYLOAD, isCopy: false };
        turn.sent.push({ queue: QUEUE.decodeToPrefill, to: effect.peer.epoch, packet });
        break;
      }
      case 'write': {
        const { key, unit, place, payload } = effect;
        const places = [place];
        process.writes.push({ key, unit, payload, places, generations: generationsOf(process.state.pools, places) });
        break;
      }
      case 'save':
      case 'restore': {
        const { key, type: kind, places } = effect;
        process.moves.push({ key, kind, places, generations: generationsOf(process.state.pools, places) });
        break;
      }
      case 'forget':
        expect(process.copies.delete(effect.key), `I1: ${effect.key} has no copy to forget`);
        break;
      case 'report': {
        const packet = { message: effect.message, payload: NO_PAYLOAD, isCopy: false };
        turn.sent.push({ queue: QUEUE.decodeToRouter, to: effect.router, packet });
        break;
      }
      default:
        throw new Error(`I1: a decode worker asks for ${JSON.stringify(effect)}`);
    }
  }
}

/** D gets a message of the router or of P. */
export function deliverToDecode(process: DecodeProcess, packet: Packet, isFromRouter: boolean, turn: Turn): void {
  const { message, payload } = packet;
  if (isFromRouter) {
    const router = process.router;
    if (router === null) return;
    const note = message as RouterToWorker;
    const keys = keysOf(note, process.state.live);
    const event = { type: 'router_message', router, message: note, nowMs: NOW_MS } as const;
    const cells = keys.map((key): [RoomKey, string] => [key, note.type]);
    runDecode(process, event, turn, cells);
    return;
  }
  const epoch = process.state.desk.peers.get('p0');
  if (epoch === undefined) return;
  const peer = { name: 'p0', epoch };
  const said = message as PeerMessage;
  const isOther = said.from !== epoch || said.to !== process.self.epoch;
  const event = { type: 'peer_message', peer, message: said, payload, nowMs: NOW_MS } as const;
  if (isOther) turn.seen.add('decode | of another life | message');
  runDecode(process, event, turn, isOther ? [] : [[said.key, nameOf(said)]]);
}

/** Cells of an event that is about every room. */
export function allDecodeRooms({ state }: DecodeProcess, name: string): [RoomKey, string][] {
  return [...state.live.keys()].map((key) => [key, name]);
}

/** What D may do by itself now: its engine first, then its timers. */
export function decodeInternals(process: DecodeProcess): Internal<DecodeProcess>[] {
  const found: Internal<DecodeProcess>[] = [];
  const { state, writes, moves, batch } = process;
  const add = (
    key: RoomKey | null,
    kind: Internal<DecodeProcess>['kind'],
    label: string,
    run: Internal<DecodeProcess>['run'],
  ): void => void found.push({ label, kind, key, to: kind === 'resend' ? 'prefill' : null, run });

  // The queue of the device keeps the order of its writes.
  const [write] = writes;
  if (write !== undefined) add(write.key, 'engine', `unit ${write.unit} is written`, finishWrite);
  for (const [index, { key, kind }] of moves.entries()) {
    add(key, 'engine', `${kind} ends`, (at, turn) => finishMove(at, index, turn));
  }
  if (batch !== null) {
    add(null, 'engine', 'the step ends', (at, turn) => finishStep(at, 1, turn));
    if (batch.rows.some(({ drafted }) => drafted)) {
      add(null, 'engine', 'the step ends, drafts are right', (at, turn) => finishStep(at, 2, turn));
    }
  }
  if (batch === null && state.step === null && state.waiting.length + state.running.length > 0) {
    add(null, 'engine', 'a step begins', beginStep);
  }

  for (const [key, { receiver, sequence }] of state.live) {
    if (sequence?.phase !== 'unwinding' && receiver?.phase !== 'unwinding') {
      add(key, 'request', "the client's budget is used up", (at, turn) => {
        (at.state.live.get(key) as DecodeRoom).request.deadlineMs = NOW_MS;
        tick(at, turn, [[key, 'request deadline']]);
      });
    }
    if (receiver === null || receiver.phase === 'unwinding' || receiver.phase === 'ended') continue;
    const arm = (name: 'roomDeadlineMs' | 'stallDeadlineMs' | 'statusDueMs', what: string) => {
      return (at: DecodeProcess, turn: Turn): void => {
        const armed = at.state.live.get(key)?.receiver;
        if (armed == null) return;
        armed[name] = NOW_MS;
        tick(at, turn, [[key, what]]);
      };
    };
    if (receiver.stallDeadlineMs !== null) {
      add(key, 'stall', 'the stall deadline passes', arm('stallDeadlineMs', 'stall deadline'));
    }
    add(key, 'room', 'the room deadline passes', arm('roomDeadlineMs', 'room deadline'));
    if (receiver.resend !== null) {
      add(key, 'resend', 'the pending message is sent again', (at, turn) => {
        const resend = at.state.live.get(key)?.receiver?.resend;
        if (resend == null) return;
        resend.atMs = NOW_MS;
        tick(at, turn, [[key, 're-send']]);
      });
    } else if (receiver.phase === 'queued') {
      add(key, 'status', 'QUEUED is due', arm('statusDueMs', 'status'));
    }
  }
  const { leaseMs } = state.limits;
  found.push(...deskInternals(process, { leaseMs, peer: 'prefill', tick: (at, turn) => tick(at, turn, []) }));
  return found;
}

function tick(process: DecodeProcess, turn: Turn, cells: [RoomKey, string][]): void {
  runDecode(process, { type: 'tick', nowMs: NOW_MS }, turn, cells);
}

function finishWrite(process: DecodeProcess, turn: Turn): void {
  const { key, unit, places, generations, payload } = process.writes.shift() as DecodeProcess['writes'][number];
  const now = generationsOf(process.state.pools, places);
  expect(now.join() === generations.join(), `I3: unit ${unit} of ${key} is written after its page was given away`);
  for (const place of places) process.memory.set(placeName(place), payload);
  runDecode(process, { type: 'written', key, unit, nowMs: NOW_MS }, turn, [[key, 'written']]);
}

function finishMove(process: DecodeProcess, index: number, turn: Turn): void {
  const [move] = process.moves.splice(index, 1) as [DecodeProcess['moves'][number]];
  const { key, kind, places, generations } = move;
  const now = generationsOf(process.state.pools, places);
  expect(now.join() === generations.join(), `I3: ${kind} of ${key} ends after its pages were given away`);
  if (kind === 'save') {
    const bytes = places.map((place) => process.memory.get(placeName(place)) ?? NO_PAYLOAD);
    process.copies.set(key, bytes);
  } else {
    const copy = process.copies.get(key);
    expect(copy?.length === places.length, `I4: ${key} comes back into ${places.length} places from another copy`);
    for (const [unit, place] of places.entries()) process.memory.set(placeName(place), copy[unit] as Uint8Array);
  }
  const type = kind === 'save' ? 'saved' : 'restored';
  runDecode(process, { type, key, nowMs: NOW_MS }, turn, [[key, type]]);
}

function beginStep(process: DecodeProcess, turn: Turn): void {
  const before = new Map([...process.state.live.keys()].map((key) => [key, decodePhase(process.state, key)]));
  process.batch = turn.rules.nextDecodeBatch(process.state);
  for (const row of process.batch?.rows ?? []) {
    turn.seen.add(`decode | ${before.get(row.key)} | step begins`);
    const room = process.state.live.get(row.key) as DecodeRoom;
    checkGhosts(process, row.key, room, row.position);
    const index = row.position - room.request.promptTokens.length;
    expect(row.token === ghostToken(digestOf(room.request.promptTokens), index), `I4: ${row.key} runs a wrong token`);
  }
}

/** Each row has written the pages of its positions and its slot, and has its next token, or two behind a right draft. */
function finishStep(process: DecodeProcess, rightCount: 1 | 2, turn: Turn): void {
  const batch = process.batch as DecodeBatch;
  process.batch = null;
  const tokens = batch.rows.flatMap(({ key, pages, slot, position, drafted }) => {
    const room = process.state.live.get(key) as DecodeRoom;
    const { promptTokens } = room.request;
    const digest = digestOf(promptTokens);
    const count = drafted ? rightCount : 1;
    for (let at = position; at < position + (drafted ? 2 : 1); at++) {
      const page = pages[at];
      expect(page !== undefined, `I4: ${key} runs position ${at} without a page for it`);
      expect(room.lease?.pages[at] === page && room.lease.slot === slot, `I3: ${key} lost its pages during a step`);
      process.memory.set(`page ${page}`, at < position + count ? ghostBytes(promptTokens, 'page', at) : NO_PAYLOAD);
    }
    process.memory.set(`slot ${slot}`, ghostBytes(promptTokens, 'slot', position + count));
    return Array.from({ length: count }, (_, index) => ({
      key,
      token: ghostToken(digest, position - promptTokens.length + 1 + index),
    }));
  });
  const cells = batch.rows.map(({ key }): [RoomKey, string] => [key, 'step_done']);
  runDecode(process, { type: 'step_done', tokens, nowMs: NOW_MS }, turn, cells);
}

/** Take out what must not tell states apart: time, counters, the bytes of free places. */
export function normaliseDecode(process: DecodeProcess): void {
  const { state } = process;
  normaliseDesk(state.desk);
  state.generatedTokens = 0;
  state.retractions = 0;
  state.creditBytes = sorted(state.creditBytes);
  for (const { receiver, request } of state.live.values()) {
    request.deadlineMs = FAR_MS;
    if (receiver === null) continue;
    receiver.roomDeadlineMs = FAR_MS;
    if (receiver.stallDeadlineMs !== null) receiver.stallDeadlineMs = FAR_MS;
    receiver.statusDueMs = FAR_MS;
    if (receiver.resend !== null) quiet(receiver.resend);
  }
  forgetFree(process);
}
