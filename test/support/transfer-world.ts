/**
 * A world in memory: one router, one prefill and one decode worker, made of the real step functions and
 * the real codec, on a network whose every move is an explicit choice. The model is a ghost: the bytes
 * of a unit are a hash of the prompt and the place, and so is every token, so each wrong byte is seen.
 */

import assert from 'node:assert/strict';
import { auditDecode, createDecode, isStepReady, nextDecodeBatch, stepDecode } from '../../scheduler/decode.ts';
import type { DecodeEvent, DecodeState } from '../../scheduler/decode.ts';
import { auditPrefill, createPrefill, nextPrefillBatch, stepPrefill } from '../../scheduler/prefill.ts';
import type { PrefillEvent, PrefillState } from '../../scheduler/prefill.ts';
import type {
  DecodeBatch,
  DecodeLimits,
  PrefillBatch,
  PrefillLimits,
  UnitPlace,
  WorkerEffect,
} from '../../scheduler/types.ts';
import { crc32c, promptDigest } from '../../transfer/checksum.ts';
import {
  decodeMessage,
  encodeMessage,
  makeEpoch,
  makeKey,
  makeRoomId,
  parseKey,
  type Epoch,
  type Instance,
  type Message,
  type Outcome,
  type PeerMessage,
  type RoomId,
  type RoomKey,
  type RouterToWorker,
  type WorkerToRouter,
} from '../../transfer/messages.ts';
import { auditRoom, createRoom, stepRoom, type Room, type RoomEvent } from '../../transfer/room.ts';

export const MODEL_DIGEST = 'ghost';

const SHARED_LIMITS = {
  pageTokens: 4,
  pageBytes: 8,
  slotBytes: 12,
  strictLedger: true,
  modelDigest: MODEL_DIGEST,
  maxSequenceTokens: 64,
  maxRooms: 8,
  leaseMs: 10_000,
  stallMs: 15_000,
  roomMs: 60_000,
  resendMinMs: 100,
  resendMaxMs: 2_000,
  statusMs: 2_000,
};

/** Small pools, so that rooms contend for everything. */
export const PREFILL_LIMITS: PrefillLimits = {
  ...SHARED_LIMITS,
  pageCount: 9,
  slotCount: 3,
  prefillChunkTokens: 8,
  maxChunkBytes: 16,
  stagingBytes: 24,
};

export const DECODE_LIMITS: DecodeLimits = {
  ...SHARED_LIMITS,
  pageCount: 12,
  slotCount: 4,
  maxRunning: 3,
  peerBufferBytes: 40,
  roomWindowBytes: 20,
  headroomTokens: 1,
  hostBytes: 1000,
};

const RESEND = { resendMinMs: 100, resendMaxMs: 2_000 };
const REQUEST_MS = 120_000;

/** The ghost's bytes of a unit. */
export function ghostBytes(digest: string, unit: string, count: number): Uint8Array {
  const bytes = new Uint8Array(count);
  let word = crc32c(Buffer.from(`${digest} ${unit}`));
  for (let i = 0; i < count; i++) {
    word = Math.imul(word ^ (word >>> 13), 0x5bd1e995) + i;
    bytes[i] = word >>> 24;
  }
  return bytes;
}

/** The ghost's i-th token of an answer. */
export function ghostToken(digest: string, index: number): number {
  return crc32c(Buffer.from(`${digest} token ${index}`)) % 20;
}

/** One client as the world sees it. */
export interface Client {
  room: RoomId;
  digest: string;
  maxTokens: number;
  stopTokens: number[];
  tokens: number[];
  outcomes: Outcome[];
  /** The client went away or cancelled: nothing is promised any more. */
  left: boolean;
}

interface Packet {
  type: Message['type'];
  bytes: Uint8Array[];
  payloadBytes: number;
}

type Role = 'prefill' | 'decode';

interface PendingRead {
  key: RoomKey;
  firstUnit: number;
  places: UnitPlace[];
}

/** A `save` or `restore` under way, and the generations its places must keep until it is done. */
interface PendingMove {
  type: 'save' | 'restore';
  key: RoomKey;
  places: UnitPlace[];
  generations: number[];
}

interface PendingWrite {
  key: RoomKey;
  unit: number;
  place: UnitPlace;
  payload: Uint8Array;
  generation: number;
}

export interface World {
  nowMs: number;
  random: () => number;
  router: { epoch: Epoch; rooms: Map<RoomId, Room>; nextSequence: number };
  clients: Map<RoomId, Client>;
  digestByRoom: Map<RoomId, string>;
  self: { prefill: Instance; decode: Instance };
  prefill: PrefillState;
  decode: DecodeState;
  decodeLimits: DecodeLimits;
  memory: { prefill: Map<string, Uint8Array>; decode: Map<string, Uint8Array> };
  reads: PendingRead[];
  writes: PendingWrite[];
  moves: PendingMove[];
  /** Host copies of retracted sequences on the decode worker, unit by unit. */
  copies: Map<RoomKey, Uint8Array[]>;
  staging: Map<string, Uint8Array>;
  prefillBatch: PrefillBatch | null;
  decodeBatch: DecodeBatch | null;
  /** Packets in order, by `sender>receiver socket`. */
  network: Map<string, Packet[]>;
  seen: Set<string>;
  /** Lives begun so far; stands for the random part of an epoch. */
  lives: number;
}

/** A world with both workers linked and idle. */
export function createWorld(random: () => number, changes: Partial<DecodeLimits> = {}): World {
  const decodeLimits = { ...DECODE_LIMITS, ...changes };
  const self = {
    prefill: { name: 'p0', epoch: makeEpoch(1000, 1) },
    decode: { name: 'd0', epoch: makeEpoch(1000, 2) },
  };
  const world: World = {
    nowMs: 0,
    random,
    router: { epoch: makeEpoch(1000, 3), rooms: new Map(), nextSequence: 0 },
    clients: new Map(),
    digestByRoom: new Map(),
    self,
    prefill: createPrefill(PREFILL_LIMITS, self.prefill),
    decode: createDecode(decodeLimits, self.decode),
    decodeLimits,
    memory: { prefill: new Map(), decode: new Map() },
    reads: [],
    writes: [],
    moves: [],
    copies: new Map(),
    staging: new Map(),
    prefillBatch: null,
    decodeBatch: null,
    network: new Map(),
    seen: new Set(),
    lives: 3,
  };
  runPrefill(world, { type: 'peer_up', peer: self.decode, nowMs: 0 });
  runDecode(world, { type: 'peer_up', peer: self.prefill, nowMs: 0 });
  return world;
}

/** A new client with a random prompt. */
export function submit(
  world: World,
  { promptCount, maxTokens, stopTokens }: { promptCount: number; maxTokens: number; stopTokens: number[] },
): Client {
  const { router, random } = world;
  const room = makeRoomId(router.epoch, router.nextSequence++);
  const promptTokens = Uint32Array.from({ length: promptCount }, () => Math.floor(random() * 1000));
  const digest = promptDigest(promptTokens, MODEL_DIGEST);
  const sampling = { temperature: 0, topK: 0, topP: 1, minP: 0, seed: 0 };
  const request = { digest, promptTokens, maxTokens, stopTokens, sampling };
  const deadlineMs = world.nowMs + REQUEST_MS;
  router.rooms.set(room, createRoom(room, request, { deadlineMs, maxAttempts: 3 }));
  const client: Client = { room, digest, maxTokens, stopTokens, tokens: [], outcomes: [], left: false };
  world.clients.set(room, client);
  world.digestByRoom.set(room, digest);
  runRoom(world, room, pairEvent(world));
  return client;
}

/** The client of a key. */
export function clientOf(world: World, key: RoomKey): Client {
  return world.clients.get(parseKey(key)?.room as RoomId) as Client;
}

/** The client closes its connection. */
export function leave(world: World, client: Client): void {
  client.left = true;
  runRoom(world, client.room, { type: 'client_lost', nowMs: world.nowMs });
}

function pairEvent(world: World): RoomEvent {
  const prefill = { ...world.self.prefill, address: 'tcp://p0' };
  const decode = { ...world.self.decode, address: '' };
  return { type: 'pair', prefill, decode, nowMs: world.nowMs };
}

/** Step the router's room and do what it asks. */
export function runRoom(world: World, room: RoomId, event: RoomEvent): void {
  const state = world.router.rooms.get(room);
  const client = world.clients.get(room) as Client;
  if (state === undefined) {
    if (event.type === 'end') sendToWorker(world, event.epoch, { type: 'end_ack', key: event.key });
    return;
  }
  const effects = stepRoom(state, event, RESEND);
  assert.deepEqual(auditRoom(state), []);
  for (const effect of effects) {
    world.seen.add(`room ${effect.type}`);
    switch (effect.type) {
      case 'send':
        sendToWorker(world, effect.epoch, effect.message);
        break;
      case 'deliver':
        assert.equal(client.outcomes.length, 0, 'a token after the outcome');
        assert.equal(effect.position, client.tokens.length);
        client.tokens.push(...effect.tokens);
        checkTokens(client);
        break;
      case 'outcome':
        client.outcomes.push(effect.outcome);
        checkOutcome(client);
        break;
      case 'choose_pair': {
        const { prefill, decode } = world.self;
        const isRefused = effect.avoid.includes(prefill.epoch) || effect.avoid.includes(decode.epoch);
        const { nowMs } = world;
        runRoom(world, room, isRefused ? { type: 'no_pair', nowMs } : pairEvent(world));
        break;
      }
      case 'close':
        world.router.rooms.delete(room);
        break;
      default:
        throw new Error(`unknown effect ${JSON.stringify(effect satisfies never)}`);
    }
  }
}

function checkTokens({ digest, tokens }: Client): void {
  for (const [index, token] of tokens.entries()) assert.equal(token, ghostToken(digest, index));
}

function checkOutcome({ outcomes, tokens, maxTokens, stopTokens }: Client): void {
  assert.equal(outcomes.length, 1, 'one outcome');
  const [outcome] = outcomes;
  if (outcome?.ok !== true) return;
  const last = tokens.at(-1) as number;
  assert.ok(tokens.length === maxTokens || stopTokens.includes(last), 'a complete answer');
}

function sendToWorker(world: World, epoch: Epoch, message: RouterToWorker): void {
  if (epoch === world.self.prefill.epoch) post(world, 'router>prefill control', message);
  if (epoch === world.self.decode.epoch) post(world, 'router>decode control', message);
}

function post(world: World, path: string, message: Message, payload?: Uint8Array): void {
  const bytes = [encodeMessage(message)];
  if (payload !== undefined) bytes.push(payload);
  const queue = world.network.get(path) ?? [];
  queue.push({ type: message.type, bytes, payloadBytes: payload?.length ?? 0 });
  world.network.set(path, queue);
  world.seen.add(`message ${message.type}`);
}

/** Step the prefill worker, check it, and do what it asks. */
export function runPrefill(world: World, event: PrefillEvent): void {
  const effects = stepPrefill(world.prefill, event);
  assert.deepEqual(auditPrefill(world.prefill), []);
  perform(world, 'prefill', effects);
}

/** Step the decode worker, check it, and do what it asks. */
export function runDecode(world: World, event: DecodeEvent): void {
  if (event.type === 'router_message' && event.message.type === 'cancel') {
    const phase = world.decode.live.get(event.message.key)?.sequence?.phase;
    if (phase !== undefined) world.seen.add(`cancel while ${phase}`);
  }
  const effects = stepDecode(world.decode, event);
  assert.deepEqual(auditDecode(world.decode), []);
  perform(world, 'decode', effects);
  checkBuffer(world);
}

/** I8: what is under way to D, or at D and not written, never exceeds the buffer it offers. */
function checkBuffer(world: World): void {
  let bytes = 0;
  for (const packet of world.network.get('prefill>decode data') ?? []) bytes += packet.payloadBytes;
  for (const write of world.writes) bytes += write.payload.length;
  assert.ok(bytes <= DECODE_LIMITS.peerBufferBytes, `${bytes} bytes under way`);
}

function perform(world: World, role: Role, effects: readonly WorkerEffect[]): void {
  const other = role === 'prefill' ? 'decode' : 'prefill';
  for (const effect of effects) {
    switch (effect.type) {
      case 'connect':
        break;
      case 'send': {
        if (effect.peer.epoch !== world.self[other].epoch) break; // no link to that life
        const { message } = effect;
        let payload: Uint8Array | undefined;
        if (message.type === 'CHUNK') {
          const stagingKey = `${message.key} ${message.firstUnit}`;
          payload = world.staging.get(stagingKey) as Uint8Array;
          world.staging.delete(stagingKey);
        }
        post(world, `${role}>${other} ${effect.socket}`, message, payload);
        break;
      }
      case 'read':
        world.reads.push({ key: effect.key, firstUnit: effect.firstUnit, places: effect.places });
        break;
      case 'discard':
        assert.ok(world.staging.delete(`${effect.key} ${effect.firstUnit}`));
        break;
      case 'write':
        world.writes.push({
          key: effect.key,
          unit: effect.unit,
          place: effect.place,
          payload: effect.payload,
          generation: generationOf(world, effect.place),
        });
        break;
      case 'save':
      case 'restore': {
        const { type, key, places } = effect;
        assert.equal(world.copies.has(key), type === 'restore');
        world.moves.push({ type, key, places, generations: places.map((place) => generationOf(world, place)) });
        world.seen.add(type);
        break;
      }
      case 'forget':
        assert.ok(world.copies.delete(effect.key));
        break;
      case 'report':
        if (effect.message.type === 'end' && !effect.message.outcome.ok) {
          world.seen.add(`half ended ${effect.message.outcome.reason}`);
        }
        if (effect.router === world.router.epoch) post(world, `${role}>router control`, effect.message);
        break;
      case 'violation':
        assert.fail(effect.what);
        break;
      default:
        throw new Error(`unknown effect ${JSON.stringify(effect satisfies never)}`);
    }
  }
}

function generationOf({ decode }: World, place: UnitPlace): number {
  const { pages, slots } = decode.pools;
  return (place.kind === 'page' ? pages.generations[place.page] : slots.generations[place.slot]) as number;
}

function placeName(place: UnitPlace): string {
  return place.kind === 'page' ? `page ${place.page}` : `slot ${place.slot}`;
}

function digestOf(world: World, key: RoomKey): string {
  return world.digestByRoom.get(parseKey(key)?.room as RoomId) as string;
}

// ---------------------------------------------------------------------------------------------
// Moves

/** Deliver the head of a path; `copies` 0 loses it, 2 duplicates it. */
export function deliver(world: World, path: string, copies: number): void {
  const packet = world.network.get(path)?.shift() as Packet;
  const [from, to] = path.split(/[> ]/) as [string, string];
  for (let copy = 0; copy < copies; copy++) {
    const decoded = decodeMessage(packet.bytes);
    assert.ok(decoded.ok);
    if (to === 'router') toRouter(world, from as Role, decoded.message as WorkerToRouter);
    else toWorker(world, from, to as Role, decoded.message, decoded.payload);
  }
}

function toRouter(world: World, from: Role, message: WorkerToRouter): void {
  const { nowMs } = world;
  // The control channel drops what another life of the worker has sent.
  if (message.epoch !== world.self[from].epoch || message.type === 'load') return;
  const parts = message.type === 'tokens' ? message.rows : [message];
  for (const part of parts) {
    const { room } = parseKey(part.key) as { room: RoomId };
    runRoom(world, room, { ...message, ...part, nowMs } as RoomEvent);
  }
}

function toWorker(world: World, from: string, to: Role, message: Message, payload: Uint8Array): void {
  const { nowMs } = world;
  const run = to === 'prefill' ? runPrefill : (runDecode as typeof runPrefill);
  if (from === 'router') {
    run(world, { type: 'router_message', router: world.router.epoch, message: message as RouterToWorker, nowMs });
  } else {
    const peer = world.self[from as Role];
    const event = { type: 'peer_message', peer, message: message as PeerMessage, payload, nowMs } as const;
    run(world, event);
  }
}

/** The engine finishes a read: the bytes are those the pages hold now. */
export function finishRead(world: World, index: number): void {
  const [read] = world.reads.splice(index, 1) as [PendingRead];
  const parts = read.places.map((place) => world.memory.prefill.get(placeName(place)) as Uint8Array);
  world.staging.set(`${read.key} ${read.firstUnit}`, new Uint8Array(Buffer.concat(parts)));
  const { key, firstUnit } = read;
  const checksums = parts.map((part) => crc32c(part));
  runPrefill(world, { type: 'read_done', key, firstUnit, checksums, nowMs: world.nowMs });
}

/** The engine finishes a write. I3: the unit still has the generation it was started with. */
export function finishWrite(world: World, index: number): void {
  const [write] = world.writes.splice(index, 1) as [PendingWrite];
  assert.equal(generationOf(world, write.place), write.generation, 'a late write');
  world.memory.decode.set(placeName(write.place), write.payload.slice());
  runDecode(world, { type: 'written', key: write.key, unit: write.unit, nowMs: world.nowMs });
}

/** The engine finishes a save or a restore. Nobody else has had the units meanwhile. */
export function finishMove(world: World, index: number): void {
  const [move] = world.moves.splice(index, 1) as [PendingMove];
  const { type, key, places, generations } = move;
  const found = places.map((place) => generationOf(world, place));
  assert.deepEqual(found, generations, `${type} of units that were given away`);
  const { decode: memory } = world.memory;
  if (type === 'save') {
    world.copies.set(
      key,
      places.map((place) => memory.get(placeName(place)) as Uint8Array),
    );
    runDecode(world, { type: 'saved', key, nowMs: world.nowMs });
  } else {
    const copy = world.copies.get(key) as Uint8Array[];
    for (const [unit, place] of places.entries()) memory.set(placeName(place), copy[unit] as Uint8Array);
    runDecode(world, { type: 'restored', key, nowMs: world.nowMs });
  }
}

/**
 * What page `page` or the slot of a sequence holds on D before the token at `position` is run. A step
 * rewrites the page of its position, and the slot.
 */
function expectedUnit(digest: string, promptCount: number, position: number, page: number | 'slot'): Uint8Array {
  const { pageTokens, pageBytes, slotBytes } = DECODE_LIMITS;
  if (page === 'slot') return ghostBytes(digest, `slot ${position}`, slotBytes);
  const end = Math.min(position, (page + 1) * pageTokens);
  return ghostBytes(digest, end <= promptCount ? `page ${page}` : `page ${page} to ${end}`, pageBytes);
}

/** The prefill engine begins a step, if there is one. */
export function beginPrefill(world: World): boolean {
  world.prefillBatch ??= nextPrefillBatch(world.prefill);
  return world.prefillBatch !== null;
}

/** The prefill engine ends its step: pages and slot have their bytes. */
export function finishPrefill(world: World): void {
  const batch = world.prefillBatch as PrefillBatch;
  world.prefillBatch = null;
  let tokenCount = 0;
  const tokens = [];
  const { pageTokens, pageBytes, slotBytes } = PREFILL_LIMITS;
  for (const { key, slot, pages, start, end, last } of batch.chunks) {
    tokenCount += end - start;
    const digest = digestOf(world, key);
    assert.ok(last || end % pageTokens === 0);
    for (let page = start / pageTokens; page * pageTokens < end; page++) {
      world.memory.prefill.set(`page ${pages[page]}`, ghostBytes(digest, `page ${page}`, pageBytes));
    }
    world.memory.prefill.set(`slot ${slot}`, ghostBytes(digest, `slot ${end}`, slotBytes));
    if (last) tokens.push({ key, token: ghostToken(digest, 0) });
  }
  assert.ok(tokenCount <= PREFILL_LIMITS.prefillChunkTokens);
  runPrefill(world, { type: 'step_done', tokens, nowMs: world.nowMs });
}

/** The decode engine begins a step, if there is one. I4: all bytes so far are there and right. */
export function beginDecode(world: World): boolean {
  world.decodeBatch ??= nextDecodeBatch(world.decode);
  const { pageTokens } = DECODE_LIMITS;
  for (const { key, slot, pages, position } of world.decodeBatch?.rows ?? []) {
    const digest = digestOf(world, key);
    const count = world.decode.live.get(key)?.request.promptTokens.length as number;
    for (let page = 0; page * pageTokens < position; page++) {
      const held = world.memory.decode.get(`page ${pages[page]}`);
      assert.deepEqual(held, expectedUnit(digest, count, position, page), `page ${page} of ${key}`);
    }
    const held = world.memory.decode.get(`slot ${slot}`);
    assert.deepEqual(held, expectedUnit(digest, count, position, 'slot'), `slot of ${key}`);
    assert.ok(pages.length * pageTokens > position, `a page for position ${position} of ${key}`);
  }
  return world.decodeBatch !== null;
}

/** The decode engine ends its step. */
export function finishDecode(world: World): void {
  const batch = world.decodeBatch as DecodeBatch;
  world.decodeBatch = null;
  const tokens = batch.rows.map(({ key, token, position, pages, slot }) => {
    const digest = digestOf(world, key);
    const promptCount = world.decode.live.get(key)?.request.promptTokens.length as number;
    const page = Math.floor(position / DECODE_LIMITS.pageTokens);
    const { decode: memory } = world.memory;
    memory.set(`page ${pages[page]}`, expectedUnit(digest, promptCount, position + 1, page));
    memory.set(`slot ${slot}`, expectedUnit(digest, promptCount, position + 1, 'slot'));
    const index = position - promptCount;
    assert.equal(token, ghostToken(digest, index));
    return { key, token: ghostToken(digest, index + 1) };
  });
  runDecode(world, { type: 'step_done', tokens, nowMs: world.nowMs });
}

/** Time passes everywhere. */
export function passTime(world: World, ms: number): void {
  world.nowMs += ms;
  const { nowMs } = world;
  for (const room of [...world.router.rooms.keys()]) runRoom(world, room, { type: 'tick', nowMs });
  runPrefill(world, { type: 'tick', nowMs });
  runDecode(world, { type: 'tick', nowMs });
}

/** The router tells both workers the smallest sequence it still uses. */
export function announceMark(world: World): void {
  let smallestSequence = world.router.nextSequence;
  for (const room of world.router.rooms.keys()) {
    const parts = parseKey(makeKey(room, 1));
    smallestSequence = Math.min(smallestSequence, parts?.sequence as number);
  }
  for (const role of ['prefill', 'decode'] as const) {
    post(world, `router>${role} control`, { type: 'mark', smallestSequence });
  }
}

/** Two lives may begin in the same millisecond; then only the random part tells them apart. */
function newEpoch(world: World): Epoch {
  return makeEpoch(2000 + world.nowMs, ++world.lives);
}

/** A worker dies and comes back empty, in a new life; connections and what was in them are gone. */
export function restart(world: World, role: Role): void {
  const old = world.self[role];
  const other = role === 'prefill' ? 'decode' : 'prefill';
  const life = { name: old.name, epoch: newEpoch(world) };
  world.self[role] = life;
  for (const [path, queue] of world.network) if (path.includes(role)) queue.length = 0;
  world.memory[role].clear();
  const { nowMs } = world;
  if (role === 'prefill') {
    world.prefill = createPrefill(PREFILL_LIMITS, life);
    world.reads = [];
    world.staging.clear();
    world.prefillBatch = null;
    runPrefill(world, { type: 'peer_up', peer: world.self.decode, nowMs });
  } else {
    world.decode = createDecode(world.decodeLimits, life);
    world.writes = [];
    world.moves = [];
    world.copies.clear();
    world.decodeBatch = null;
    runDecode(world, { type: 'peer_up', peer: world.self.prefill, nowMs });
  }
  const run = other === 'prefill' ? runPrefill : (runDecode as typeof runPrefill);
  run(world, { type: 'peer_lost', peer: old, nowMs });
  run(world, { type: 'peer_up', peer: life, nowMs });
  for (const room of [...world.router.rooms.keys()]) {
    runRoom(world, room, { type: 'worker_lost', epoch: old.epoch, nowMs });
  }
}

/** The router dies and comes back with no room; its clients are gone with it. */
export function restartRouter(world: World): void {
  const { nowMs, router } = world;
  const old = router.epoch;
  router.epoch = newEpoch(world);
  router.rooms.clear();
  router.nextSequence = 0;
  for (const [path, queue] of world.network) if (path.includes('router')) queue.length = 0;
  for (const client of world.clients.values()) client.left = true;
  runPrefill(world, { type: 'router_lost', router: old, isDead: true, nowMs });
  runDecode(world, { type: 'router_lost', router: old, isDead: true, nowMs });
}

/** Every move but faults, clients and time that is possible now. */
export function movesOf(world: World): (() => void)[] {
  const moves: (() => void)[] = [];
  for (const [index] of world.reads.entries()) moves.push(() => finishRead(world, index));
  for (const [index] of world.writes.entries()) moves.push(() => finishWrite(world, index));
  for (const [index] of world.moves.entries()) moves.push(() => finishMove(world, index));
  if (world.prefillBatch !== null) moves.push(() => finishPrefill(world));
  else if (world.prefill.step === null && world.prefill.computing.length > 0) {
    moves.push(() => void beginPrefill(world));
  }
  if (world.decodeBatch !== null) moves.push(() => finishDecode(world));
  else if (isStepReady(world.decode)) moves.push(() => void beginDecode(world));
  return moves;
}

/** True if the head of a path is a message that is sent only once. */
export function isHeadSentOnce(world: World, path: string): boolean {
  const type = world.network.get(path)?.[0]?.type;
  return type === 'CHUNK' || type === 'tokens';
}

/** Paths with something to deliver. */
export function pathsOf(world: World): string[] {
  return [...world.network].filter(([, queue]) => queue.length > 0).map(([path]) => path);
}

/** Nothing happens any more and nothing is held anywhere: the baseline. Returns what is not so. */
export function residueOf(world: World): string[] {
  const found: string[] = [];
  const expectEmpty = (what: string, size: number): void => {
    if (size !== 0) found.push(`${what}: ${size}`);
  };
  expectEmpty('rooms at the router', world.router.rooms.size);
  for (const role of ['prefill', 'decode'] as const) {
    const { live, pools, desk } = world[role];
    expectEmpty(`${role} rooms`, live.size);
    expectEmpty(`${role} pages`, pools.pages.total - pools.pages.free.length);
    expectEmpty(`${role} slots`, pools.slots.total - pools.slots.free.length);
    expectEmpty(`${role} unacknowledged to peers`, desk.closing.unwinds.size);
    expectEmpty(`${role} unacknowledged to the router`, desk.closing.endings.size);
    expectEmpty(`${role} tombstones`, desk.closing.tombstones.size);
  }
  expectEmpty('credit', world.decode.creditBytes.size);
  expectEmpty('host bytes', world.decode.host.heldBytes);
  expectEmpty('host copies', world.copies.size);
  expectEmpty('moves', world.moves.length);
  expectEmpty('reads', world.reads.length);
  expectEmpty('writes', world.writes.length);
  expectEmpty('staging', world.staging.size);
  expectEmpty('packets', pathsOf(world).length);
  return found;
}
