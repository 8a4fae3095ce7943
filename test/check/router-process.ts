/** The router in the model: the real rooms and balancer, its links to one worker of each role, and its clients. */
import { choosePair } from '../../server/balancer.ts';
import {
  makeRoomId,
  parseKey,
  type Epoch,
  type RoomId,
  type RoomKey,
  type WorkerToRouter,
} from '../../transfer/messages.ts';

import { auditRoom, createRoom, type Room, type RoomEvent } from '../../transfer/room.ts';
import { CANARY, epochOf, FAR_MS, ghostToken, NOW_MS, requestOf, type Plan, type RoomPlan } from './plan.ts';
import { expect, NO_PAYLOAD, QUEUE, quiet, type Internal, type Packet, type Turn } from './process.ts';

/** First re-send and largest gap, as everywhere in the model. */
const RESEND = { resendMinMs: 100, resendMaxMs: 100 };

/**
 *   new      has not asked yet
 *   open     has asked; its room lives and is undecided
 *   decided  has its outcome
 *   gone     its router died
 */
export interface Client {
  phase: 'new' | 'open' | 'decided' | 'gone';
  room: RoomId | null;
  tokenCount: number;
  isOk: boolean;
}

export interface RouterProcess {
  epoch: Epoch;
  rooms: Map<RoomId, Room>;
  nextSequence: number;
  /** Lives of workers it has a link to. */
  linked: { prefill: Epoch | null; decode: Epoch | null };
  clients: Client[];
}

/** The `life`-th life of the router, without rooms and links. */
export function bornRouter(life: number, clients: Client[]): RouterProcess {
  const linked = { prefill: null, decode: null };
  return { epoch: epochOf('router', life), rooms: new Map(), nextSequence: 0, linked, clients };
}

/** Clients that have not asked yet. */
export function newClients(plan: Plan): Client[] {
  return plan.rooms.map(() => ({ phase: 'new', room: null, tokenCount: 0, isOk: false }));
}

/** Clients of a router that died: those that had asked are gone. */
export function abandonedClients(clients: readonly Client[]): Client[] {
  return clients.map((client) =>
    client.phase === 'open' ? { phase: 'gone', room: null, tokenCount: 0, isOk: false } : { ...client, room: null },
  );
}

/** Where a room stands, as the rows of its table are called. */
export function roomPhase(room: Room | undefined): string {
  if (room === undefined) return 'closed';
  if (room.phase === 'running' && room.outcome !== null) return 'unwinding';
  if (room.phase === 'running' && room.tokenCount > 0) return 'streaming';
  return room.phase;
}

/** What a client asks for; the one after the last of the plan is the canary. */
function planOf(plan: Plan, client: number): RoomPlan {
  return plan.rooms[client] ?? CANARY;
}

/** A client asks: a room on the pair that is linked. Only when both roles are; else the request is refused at once. */
export function submit(process: RouterProcess, index: number, turn: Turn): void {
  const client = process.clients[index] as Client;
  const room = makeRoomId(process.epoch, process.nextSequence++);
  client.phase = 'open';
  client.room = room;
  const limits = { deadlineMs: FAR_MS, maxAttempts: turn.plan.maxAttempts };
  process.rooms.set(room, createRoom(room, requestOf(index, planOf(turn.plan, index)), limits));
  runRoom(process, room, pairEvent(process), 'pair', turn);
}

function pairEvent({ linked }: RouterProcess): RoomEvent {
  const workers = (['prefill', 'decode'] as const).flatMap((role) => {
    const epoch = linked[role];
    const ref = { name: role === 'prefill' ? 'p0' : 'd0', epoch: epoch ?? '', address: `tcp://${role}` };
    return epoch === null ? [] : [{ role, ref, load: null, halves: new Set<RoomKey>() }];
  });
  const choice = choosePair(workers);
  if (choice.kind !== 'pair') return { type: 'no_pair', nowMs: NOW_MS };
  return { type: 'pair', prefill: choice.prefill.ref, decode: choice.decode.ref, nowMs: NOW_MS };
}

/** Step a room and do what it asks. A room that is closed answers an `end` only. */
function runRoom(process: RouterProcess, id: RoomId, event: RoomEvent, name: string, turn: Turn): void {
  const room = process.rooms.get(id);
  turn.seen.add(`router | ${roomPhase(room)} | ${name}`);
  if (room === undefined) {
    if (event.type === 'end') send(process, event.epoch, { type: 'end_ack', key: event.key }, turn);
    return;
  }
  const index = process.clients.findIndex((client) => client.room === id);
  const client = process.clients[index] as Client;
  const effects = turn.rules.stepRoom(room, event, RESEND);
  const found = auditRoom(room);
  expect(found.length === 0, `I1: ${found.join('; ')}`);
  for (const effect of effects) {
    switch (effect.type) {
      case 'send':
        send(process, effect.epoch, effect.message, turn);
        break;
      case 'deliver':
        expect(client.phase === 'open', `I5: tokens for client ${index}, who is ${client.phase}`);
        expect(
          effect.position === client.tokenCount,
          `I5: tokens from ${effect.position}, ${client.tokenCount} are there`,
        );
        for (const token of effect.tokens) {
          const isRight = token === ghostToken(room.request.digest, client.tokenCount++);
          expect(isRight, `I4: client ${index} gets a wrong token`);
        }
        break;
      case 'outcome': {
        const { outcome } = effect;
        expect(client.phase === 'open', `I5: an outcome for client ${index}, who is ${client.phase}`);
        client.phase = 'decided';
        client.isOk = outcome.ok;
        const isWhole = client.tokenCount === planOf(turn.plan, index).maxTokens;
        expect(!outcome.ok || isWhole || outcome.finish === 'stop', `I4: a good answer of ${client.tokenCount} tokens`);
        const isClients = !outcome.ok && (outcome.reason === 'client_lost' || outcome.reason === 'client_cancel');
        if (!outcome.ok && !isClients && client.tokenCount > 0) turn.lateFailure = outcome.reason;
        client.tokenCount = 0;
        break;
      }
      case 'choose_pair': {
        const answer = pairEvent(process);
        runRoom(process, id, answer, answer.type, turn);
        break;
      }
      case 'close':
        process.rooms.delete(id);
        client.room = null;
        break;
      default:
        throw new Error(`unknown effect ${JSON.stringify(effect satisfies never)}`);
    }
  }
}

function send({ linked }: RouterProcess, epoch: Epoch, message: Packet['message'], turn: Turn): void {
  const packet = { message, payload: NO_PAYLOAD, isCopy: false };
  if (linked.prefill === epoch) turn.sent.push({ queue: QUEUE.routerToPrefill, to: epoch, packet });
  if (linked.decode === epoch) turn.sent.push({ queue: QUEUE.routerToDecode, to: epoch, packet });
}

/** The client leaves, or a stop string is found in its answer. */
export function endClient(
  process: RouterProcess,
  index: number,
  type: 'client_lost' | 'client_cancel',
  turn: Turn,
): void {
  const { room } = process.clients[index] as Client;
  if (room === null) return;
  const event: RoomEvent = type === 'client_lost' ? { type, nowMs: NOW_MS } : { type, finish: 'stop', nowMs: NOW_MS };
  runRoom(process, room, event, type, turn);
}

/** A message of a worker, by the link to that life. */
export function deliverToRouter(process: RouterProcess, packet: Packet, role: 'prefill' | 'decode', turn: Turn): void {
  const epoch = process.linked[role];
  const message = packet.message as WorkerToRouter;
  if (epoch === null || message.type === 'load' || message.type === 'cached') return;
  const parts = message.type === 'tokens' ? message.rows : [message];
  for (const part of parts) {
    const room = parseKey(part.key)?.room as RoomId;
    const event = { ...message, ...part, epoch, nowMs: NOW_MS } as RoomEvent;
    runRoom(process, room, event, `${message.type} of ${role}`, turn);
  }
}

/** A link to a worker is there, or is lost: every room is told. */
export function linkEvent(process: RouterProcess, type: 'worker_up' | 'worker_lost', epoch: Epoch, turn: Turn): void {
  for (const room of [...process.rooms.keys()]) runRoom(process, room, { type, epoch, nowMs: NOW_MS }, type, turn);
}

/** What the router may do by itself: its timers. */
export function routerInternals({ rooms }: RouterProcess): Internal<RouterProcess>[] {
  const found: Internal<RouterProcess>[] = [];
  for (const [id, room] of rooms) {
    for (const role of ['prefill', 'decode'] as const) {
      const pending = room[role]?.pending;
      if (pending == null) continue;
      found.push({
        label: `${pending.message.type} is sent again to ${role}`,
        kind: 'resend',
        key: 'key' in pending.message ? pending.message.key : null,
        to: role,
        run(at, turn) {
          const armed = at.rooms.get(id)?.[role]?.pending;
          if (armed == null) return;
          armed.resend.atMs = NOW_MS;
          runRoom(at, id, { type: 'tick', nowMs: NOW_MS }, 're-send', turn);
        },
      });
    }
    if (room.outcome !== null) continue;
    found.push({
      label: "the client's budget is used up",
      kind: 'request',
      key: null,
      to: null,
      run(at, turn) {
        (at.rooms.get(id) as Room).deadlineMs = NOW_MS;
        runRoom(at, id, { type: 'tick', nowMs: NOW_MS }, 'request deadline', turn);
      },
    });
  }
  return found;
}

/** The smallest sequence in use, which `mark` announces. */
export function smallestSequence({ rooms, nextSequence }: RouterProcess): number {
  let smallest = nextSequence;
  for (const id of rooms.keys()) smallest = Math.min(smallest, parseKey(`${id}.1`)?.sequence ?? smallest);
  return smallest;
}

/** Take time out. */
export function normaliseRouter({ rooms }: RouterProcess): void {
  for (const room of rooms.values()) {
    room.deadlineMs = FAR_MS;
    for (const half of [room.prefill, room.decode]) if (half?.pending != null) quiet(half.pending.resend);
  }
}
