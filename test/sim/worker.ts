/**
 * A worker of the simulator: the effect loop of server/worker.ts over a real scheduler, with simulated links in place of
 * sockets and the ghost in place of an engine, but the real steering of answers that have a constraint. Every event is
 * stepped, audited and performed on its own; steps, reads and writes take simulated time and come back in any order.
 */

import { createDecode, nextDecodeBatch, statsDecode, stepDecode, type DecodeEvent } from '../../scheduler/decode.ts';
import {
  createPrefill,
  nextPrefillBatch,
  statsPrefill,
  stepPrefill,
  type PrefillEvent,
  type PrefillState,
} from '../../scheduler/prefill.ts';
import type {
  DecodeBatch,
  PrefillBatch,
  PrefillChunk,
  RowRules,
  SampledToken,
  UnitPlace,
  WorkerEffect,
} from '../../scheduler/types.ts';
import { createSteering } from '../../server/grammar/steering.ts';
import type { ChannelEvent } from '../../transfer/channel.ts';
import { crc32c } from '../../transfer/checksum.ts';
import {
  packChoices,
  parseKey,
  type ChunkMessage,
  type Epoch,
  type Instance,
  type PackedChoices,
  type PeerMessage,
  type RoomKey,
  type RouterToWorker,
  type Salt,
  type SamplingParams,
} from '../../transfer/messages.ts';
import type { Answer } from './answer.ts';
import { always, auditGauges, auditKeys, auditScheduler, createGhost, type Scheduler } from './audit.ts';
import {
  answerSeed,
  createMemory,
  fillPositions,
  fillSlot,
  findWrongPosition,
  GHOST_GUIDES,
  ghostChoice,
  ghostPromptChoice,
  isSlotRight,
  sampleToken,
  SLOT_BYTES,
  type GhostMemory,
  type GhostSeeds,
} from './ghost.ts';
import { openConnector, openListener, type Connector, type Links } from './links.ts';
import type { Host, Network } from './network.ts';
import type { Clock } from './clock.ts';
import type { Coverage } from './audit.ts';
import type { Plan } from './swarm.ts';

/** Every how many events the gauges are compared with a recount. */
const GAUGE_AUDIT_EVENTS = 16;
const FIELDS = { model: 'ghost', layout: 'ghost' };

/**
 * Bugs that are put into every worker on purpose, to see that the simulator finds them:
 *
 *   crossed-read  a read returns another page's bytes, with their checksum
 *   kept-page     a page stays with a room that was stopped
 *   abort-once    ABORT is sent once and forgotten
 *   end-once      `end` is sent once and forgotten
 */
export const BUGS = ['crossed-read', 'kept-page', 'abort-once', 'end-once'] as const;
export type Bug = (typeof BUGS)[number];

/** What a worker needs of the world around it. */
export interface Surroundings {
  plan: Plan;
  clock: Clock;
  network: Network;
  random: () => number;
  coverage: Coverage;
  bug: Bug | null;
  trace: (who: string, what: () => string) => void;
  /** The true prompt of a room and its right answer, whatever workers believe. */
  promptOf: (key: RoomKey) => { answer: Answer; seeds: GhostSeeds; digest: string; promptCount: number };
  /** Bytes on their way between two lives of workers, and not yet written or dropped (I8). */
  underWay: Map<string, number>;
}

export interface Worker {
  readonly host: Host;
  readonly self: Instance;
  readonly scheduler: Scheduler;
  /** Lives of routers that are linked. */
  readonly routers: ReadonlyMap<Epoch, string>;
  /** Reads, writes, moves and steps that have not come back, staged and saved units, and guides of answers. */
  busy(): string[];
  /** The phase of a room here, or null. */
  phaseOf(key: RoomKey): string | null;
  /** SIGTERM, first half: take nothing new. */
  drain(): void;
  /** Second half: cancel what is left. */
  cancelAll(): void;
  rooms(): number;
}

type Event = PrefillEvent | DecodeEvent;

/** Addresses of a worker by its name. */
export function controlAddress(name: string): string {
  return `${name}:control`;
}

export function transferAddress(name: string): string {
  return `${name}:transfer`;
}

/** Start a life of a worker on `host`. */
export function startWorker(role: 'prefill' | 'decode', host: Host, epoch: Epoch, around: Surroundings): Worker {
  const { plan, clock, network, random, coverage, trace } = around;
  const self: Instance = { name: host.name, epoch };
  const scheduler: Scheduler =
    role === 'prefill'
      ? { role, state: createPrefill(plan.prefill, self) }
      : { role, state: createDecode(plan.decode, self) };
  const { state } = scheduler;
  const { pools, limits } = state;
  const memory = createMemory(limits);
  const ghost = createGhost();
  const now = (): number => clock.nowMs + host.offsetMs;

  const staging = new Map<string, Uint8Array>();
  const copies = new Map<RoomKey, Uint8Array[]>();
  const tier = new Map<string, Uint8Array>();
  const steering = createSteering(GHOST_GUIDES, 1, (key, fault) =>
    always(false, 'I4', () => `${key}: ${String(fault)}`),
  );
  const pending = { reads: 0, writes: 0, moves: 0 };
  /** By peer: bytes of units that are being written. */
  const writingBytes = new Map<Epoch, number>();
  let isStepping = false;
  let eventCount = 0;

  // ---- links, as in server/worker.ts
  const routers = new Map<Epoch, string>();
  const lostRouters = new Map<Epoch, string>();
  const options = {
    host,
    network,
    role,
    epoch,
    heartbeatMs: plan.heartbeatMs,
    leaseMs: plan.decode.leaseMs,
    now,
    onRejected: () => coverage.saw('frame rejected'),
  };
  const peerOptions = { ...options, fields: FIELDS, onEvent: onPeerEvent };
  const peers: Links | Connector =
    role === 'prefill'
      ? openListener(peerOptions, { address: transferAddress(host.name), hasData: true })
      : openConnector(peerOptions);
  const control = openListener(
    { ...options, fields: { model: FIELDS.model, role }, onEvent: onRouterEvent },
    { address: controlAddress(host.name), hasData: false },
  );

  function onPeerEvent(event: ChannelEvent): void {
    if (event.type === 'refused') return;
    const peer = { name: event.peer.name, epoch: event.peer.epoch };
    if (event.type === 'up') {
      trace(host.name, () => `peer up ${peer.name}`);
      step({ type: 'peer_up', peer, nowMs: now() });
    } else if (event.type === 'lost') {
      trace(host.name, () => `peer lost ${peer.name}: ${event.why}`);
      coverage.saw(`link lost: ${event.why}`);
      step({ type: 'peer_lost', peer, nowMs: now() });
    } else {
      const message = event.message as PeerMessage;
      trace(host.name, () => `<- ${peer.name} ${describe(message)}`);
      step({ type: 'peer_message', peer, message, payload: event.payload, nowMs: now() });
    }
  }

  function onRouterEvent(event: ChannelEvent): void {
    if (event.type === 'refused') return;
    const { name, epoch: router } = event.peer;
    if (event.type === 'up') {
      trace(host.name, () => `router up ${name}`);
      if (lostRouters.has(router)) coverage.saw('same life of a router linked again');
      routers.set(router, name);
      step({ type: 'router_up', router, nowMs: now() });
      for (const [earlier, earlierName] of lostRouters) {
        if (earlierName !== name) continue;
        lostRouters.delete(earlier);
        if (earlier !== router) step({ type: 'router_lost', router: earlier, isDead: true, nowMs: now() });
      }
      reportLoad();
    } else if (event.type === 'lost') {
      trace(host.name, () => `router lost ${name}: ${event.why}`);
      coverage.saw(`link lost: ${event.why}`);
      routers.delete(router);
      if (event.why !== 'superseded') lostRouters.set(router, name);
      step({ type: 'router_lost', router, isDead: event.why === 'superseded', nowMs: now() });
    } else {
      const message = event.message as RouterToWorker;
      if (message.type !== 'mark') trace(host.name, () => `<- ${name} ${describe(message)}`);
      step({ type: 'router_message', router, message, nowMs: now() });
    }
  }

  // ---- the loop
  function step(event: Event): void {
    if (plan.shuffleFree && random() < 0.1) (random() < 0.5 ? pools.pages : pools.slots).free.reverse();
    const before = observe(event);
    const cacheBefore = scheduler.role === 'prefill' ? cacheOf(scheduler.state) : null;
    const effects =
      scheduler.role === 'prefill'
        ? stepPrefill(scheduler.state, event as PrefillEvent)
        : stepDecode(scheduler.state, event as DecodeEvent);
    // As server/worker-core.ts does it: a router that is dead gets no `end`.
    if (event.type === 'tick') steering.keep(state.live);
    if (around.bug !== null) misbehave(around.bug);
    eventCount++;
    // Ticks without effects are most of the events and change next to nothing.
    if (event.type !== 'tick' || effects.length > 0) {
      auditKeys(ghost, state.live);
      auditScheduler(scheduler);
      if (eventCount % GAUGE_AUDIT_EVENTS === 0) auditGauges(scheduler);
    }
    before?.();
    if (scheduler.role === 'prefill' && cacheBefore !== null) seeCache(scheduler.state, cacheBefore, event);
    for (const effect of effects) perform(effect);
    if (event.type === 'peer_message') auditBuffer(event.peer);
    startStep();
  }

  /** Note what is rare; the returned function is called after the step. */
  function observe(event: Event): (() => void) | null {
    if (event.type === 'tick') return null;
    if (event.type === 'router_message') {
      const { message } = event;
      coverage.saw(`message ${message.type}`);
      if (message.type === 'cancel') {
        const phase = phaseOf(message.key);
        if (phase !== null) coverage.saw(`${role} stopped while ${phase}`);
      }
      const tombstones = state.desk.closing.tombstones.size;
      if (message.type !== 'mark' || tombstones === 0) return null;
      return () => {
        if (state.desk.closing.tombstones.size < tombstones) coverage.saw('tombstone evicted by a mark');
      };
    }
    if (event.type !== 'peer_message') return null;
    const { type } = event.message;
    coverage.saw(`message ${type}`);
    const { late } = state.desk.drops;
    if (type !== 'CHUNK') return null;
    return () => {
      if (state.desk.drops.late > late) coverage.saw('late CHUNK dropped');
    };
  }

  /** Note what happened to the prefix cache. */
  function seeCache(prefill: PrefillState, before: CacheSight, event: Event): void {
    const after = cacheOf(prefill);
    if (after.evictedPages > before.evictedPages) coverage.saw('cached page evicted');
    if (after.evictedStates > before.evictedStates) coverage.saw('cached state evicted');
    const gone = before.pages - after.pages - (after.evictedPages - before.evictedPages);
    if (gone > 0 && event.type !== 'flush') coverage.saw('unverified pages of a failed room left the cache');
    if (prefill.cache.orphanPages.size > 0) coverage.saw('page read after it left the cache');
    if (event.type !== 'step_done') return;
    const isShared = prefill.pools.pages.readers.some((readers) => (readers?.size ?? 0) > 1);
    if (isShared) coverage.saw('cached page read by two rooms');
  }

  function phaseOf(key: RoomKey): string | null {
    if (scheduler.role === 'prefill') return scheduler.state.live.get(key)?.sender.phase ?? null;
    const room = scheduler.state.live.get(key);
    return room?.sequence?.phase ?? room?.receiver?.phase ?? null;
  }

  function perform(effect: WorkerEffect): void {
    switch (effect.type) {
      case 'connect':
        if ('connect' in peers) peers.connect(effect.address, false);
        break;
      case 'send': {
        const { peer, socket, message } = effect;
        const payload = message.type === 'CHUNK' ? takeStaged(message) : undefined;
        const onGone = payload === undefined ? undefined : trackBytes(peer.epoch, payload.length);
        trace(host.name, () => `-> ${peer.name} ${describe(message)}`);
        if (!peers.send(peer.epoch, socket, message, payload, onGone)) onGone?.();
        break;
      }
      case 'read':
        read(effect.key, effect.firstUnit, effect.places);
        break;
      case 'discard':
        for (let unit = 0; unit < effect.unitCount; unit++) {
          const isStaged = staging.delete(stagedName(effect.key, effect.firstUnit + unit));
          always(isStaged, 'I1', () => `${host.name} discards a unit of ${effect.key} that is not staged`);
        }
        break;
      case 'write':
        write(effect.key, effect.unit, effect.place, effect.payload);
        break;
      case 'save': {
        const { key, places } = effect;
        coverage.saw('retracted');
        if (
          scheduler.role === 'decode' &&
          [...scheduler.state.live.values()].some((room) => (room.receiver?.arrivedBytes ?? 0) > 0)
        ) {
          coverage.saw('retracted while another room was being received');
        }
        move(places, () => {
          copies.set(
            key,
            places.map((place) => bytesAt(memory, place).slice()),
          );
          step({ type: 'saved', key, nowMs: now() });
        });
        break;
      }
      case 'restore': {
        const { key, places } = effect;
        move(places, () => {
          const units = copies.get(key) ?? [];
          always(
            units.length === places.length,
            'I4',
            () => `${key}: ${units.length} saved units for ${places.length}`,
          );
          for (const [index, place] of places.entries()) bytesAt(memory, place).set(units[index]!);
          for (const kind of kindsOf(state.live.get(key)?.request?.sampling)) coverage.saw(`restored with ${kind}`);
          step({ type: 'restored', key, nowMs: now() });
        });
        break;
      }
      case 'forget':
        always(
          copies.delete(effect.key),
          'I1',
          () => `${host.name} forgets a copy of ${effect.key} that it does not have`,
        );
        break;
      case 'fetch':
        fetchTier(effect);
        break;
      case 'stash':
        stashTier(effect);
        break;
      case 'report': {
        const { router, message } = effect;
        if (message.type === 'end') {
          ghost.closed.add(message.key);
          if (!message.outcome.ok) coverage.saw(`half ended ${message.outcome.reason}`);
          const isByClock = !message.outcome.ok && message.outcome.reason === 'deadline';
          always(!isByClock || plan.mode !== 'harmless', 'L1', () => `${host.name} ended ${message.key} by a clock`);
        }
        trace(host.name, () => `-> router ${describe(message)}`);
        control.send(router, 'control', message);
        break;
      }
      case 'violation':
        always(false, 'I1', () => effect.what);
        break;
      default:
        throw new Error(`unknown effect ${JSON.stringify(effect satisfies never)}`);
    }
  }

  // ---- the engine
  function later(ms: number, act: () => void): void {
    const isSlow = plan.engine.slow > 0 && random() < plan.engine.slow;
    clock.after((0.5 + random()) * ms * (isSlow ? 50 : 1), () => network.runOn(host, act));
  }

  /** I3: whatever takes time still finds its pages and slot as they were lent to it. */
  function guard(places: readonly UnitPlace[], what: string): () => void {
    const before = places.map((place) => generationOf(place));
    return () => {
      for (const [index, place] of places.entries()) {
        const isSame = generationOf(place) === before[index];
        always(isSame, 'I3', () => `${host.name}: ${what} ends on ${placeName(place)}, which changed hands meanwhile`);
      }
    };
  }

  function generationOf(place: UnitPlace): number {
    return (place.kind === 'page' ? pools.pages.generations[place.page] : pools.slots.generations[place.slot])!;
  }

  function read(key: RoomKey, firstUnit: number, places: UnitPlace[]): void {
    const check = guard(places, `a read of ${key}`);
    pending.reads++;
    later(plan.engine.readMs, () => {
      check();
      pending.reads--;
      const checksums = places.map((place, index) => {
        const bytes = bytesAt(memory, place).slice();
        if (around.bug === 'crossed-read' && random() < 0.05) bytes.set(memory.pages.subarray(0, bytes.length));
        staging.set(stagedName(key, firstUnit + index), bytes);
        return crc32c(bytes);
      });
      step({ type: 'read_done', key, firstUnit, checksums, nowMs: now() });
    });
  }

  function write(key: RoomKey, unit: number, place: UnitPlace, payload: Uint8Array): void {
    const check = guard([place], `a write of ${key}`);
    const peer = (scheduler.role === 'decode' && scheduler.state.live.get(key)?.peer.epoch) || '';
    pending.writes++;
    writingBytes.set(peer, (writingBytes.get(peer) ?? 0) + payload.length);
    later(plan.engine.writeMs, () => {
      check();
      pending.writes--;
      writingBytes.set(peer, writingBytes.get(peer)! - payload.length);
      bytesAt(memory, place).set(payload);
      step({ type: 'written', key, unit, nowMs: now() });
    });
  }

  function move(places: UnitPlace[], act: () => void): void {
    const check = guard(places, 'a move');
    pending.moves++;
    later(plan.engine.readMs, () => {
      check();
      pending.moves--;
      act();
    });
  }

  // ---- the tier: what it has is right, but it may have lost anything, or be late
  function stashTier({ key, tokens, salt, pages, states }: Extract<WorkerEffect, { type: 'stash' }>): void {
    const check = guard(
      pages.map(({ page }) => ({ kind: 'page', page }) as const),
      `a copy of ${key}`,
    );
    pending.moves++;
    later(plan.engine.readMs, () => {
      check();
      pending.moves--;
      for (const { index, page } of pages) {
        tier.set(`${tierName(tokens, salt, index)} page`, bytesAt(memory, { kind: 'page', page }).slice());
      }
      for (const { index, state: held } of states) {
        tier.set(`${tierName(tokens, salt, index)} state`, slotBytes(memory.states, held).slice());
      }
      for (const name of tier.keys()) if (random() < 0.05) tier.delete(name);
      step({ type: 'stashed', key, nowMs: now() });
    });
  }

  function fetchTier({ key, tokens, salt, from, pages, slot, keep }: Extract<WorkerEffect, { type: 'fetch' }>): void {
    const check = guard([{ kind: 'slot', slot }, ...pages.map((page) => ({ kind: 'page', page }) as const)], 'a fetch');
    pending.moves++;
    later(plan.engine.readMs, () => {
      check();
      pending.moves--;
      let end = from;
      while (end < pages.length && tier.has(`${tierName(tokens, salt, end)} page`)) end++;
      while (end > from && !tier.has(`${tierName(tokens, salt, end - 1)} state`)) end--;
      checkOwn(key, pages, from * limits.pageTokens, end * limits.pageTokens);
      for (let index = from; index < end; index++) {
        bytesAt(memory, { kind: 'page', page: pages[index]! }).set(tier.get(`${tierName(tokens, salt, index)} page`)!);
      }
      if (end > from) {
        coverage.saw('prefix from the tier');
        if (salt !== null) coverage.saw('prefix from the tier, with a salt');
        memory.slots.set(tier.get(`${tierName(tokens, salt, end - 1)} state`)!, slot * SLOT_BYTES);
        if (keep !== null) memory.states.set(slotBytes(memory.slots, slot), keep * SLOT_BYTES);
      }
      step({ type: 'fetched', key, tokenCount: end * limits.pageTokens, nowMs: now() });
    });
  }

  function tierName(tokens: Uint32Array, salt: Salt, index: number): string {
    return `${salt} ${tokens.slice(0, (index + 1) * limits.pageTokens).join()}`;
  }

  function startStep(): void {
    if (isStepping) return;
    if (scheduler.role === 'prefill') {
      const batch = nextPrefillBatch(scheduler.state);
      if (batch !== null) {
        resumeSlots(batch);
        // As server/worker-core.ts does it: what may come next is asked before the step, for those that sample.
        const sampling = batch.chunks.filter(({ last }) => last);
        const masks = steering.masks(sampling.map((chunk) => ({ ...chunk, token: null })));
        runStep(batch.chunks, () => computeChunks(batch, masks));
      }
    } else {
      const batch = nextDecodeBatch(scheduler.state);
      if (batch === null) return;
      checkRows(batch);
      const masks = steering.masks(batch.rows);
      runStep(batch.rows, () => computeRows(batch, masks));
    }
  }

  function runStep(parts: readonly { slot: number; pages: number[] }[], compute: () => SampledToken[]): void {
    const check = guard(
      parts.flatMap(({ slot, pages }): UnitPlace[] => [
        { kind: 'slot', slot },
        ...pages.map((page) => ({ kind: 'page', page }) as const),
      ]),
      'a step',
    );
    isStepping = true;
    later(plan.engine.stepMs, () => {
      check();
      isStepping = false;
      step({ type: 'step_done', tokens: compute(), nowMs: now() });
    });
  }

  function resumeSlots({ chunks }: PrefillBatch): void {
    for (const { key, slot, resume, end, last } of chunks) {
      if (resume === null) continue;
      memory.slots.set(slotBytes(memory.states, resume), slot * SLOT_BYTES);
      coverage.saw(last ? 'cached prefix, computed at once' : 'cached prefix');
      if (scheduler.role === 'prefill' && scheduler.state.live.get(key)?.salt !== null) {
        coverage.saw('cached prefix, with a salt');
      }
      trace(host.name, () => `${key} goes on from a cached prefix to ${end}`);
    }
  }

  function computeChunks({ chunks }: PrefillBatch, masks: ReadonlyMap<RoomKey, Uint32Array>): SampledToken[] {
    const tokens: SampledToken[] = [];
    for (const chunk of chunks) {
      const { key, slot, pages, start, end, last, keep } = chunk;
      const { seeds, promptCount } = around.promptOf(key);
      const isReady = start === 0 || isSlotRight(memory, slot, start, seeds);
      always(isReady, 'I4', () => `${host.name}: the slot of ${key} is wrong at token ${start}`);
      const wrong = findWrongPosition(memory, pages, start, seeds);
      always(wrong === null, 'I4', () => `${host.name}: position ${wrong} of ${key} is wrong`);
      always(end === promptCount || !last, 'I4', () => `${key}: the last chunk ends at ${end} of ${promptCount}`);
      checkOwn(key, pages, start, end);
      if (start === 0) seeOtherSalts(key, chunk.tokens);
      fillPositions(memory, pages, start, end, seeds);
      fillSlot(memory, slot, end, seeds);
      if (keep !== null) memory.states.set(slotBytes(memory.slots, slot), keep * SLOT_BYTES);
      const told = tellPrompt(chunk);
      if (last) tokens.push({ ...sample(chunk, 0, masks.get(key)), ...told });
      else if (told !== null) tokens.push({ key, token: null, ...told });
    }
    return tokens;
  }

  /** What is told of the prompt's tokens behind a chunk's own, if the request asked; what it sees, it has computed. */
  function tellPrompt({ key, tokens, next, start, sampling }: PrefillChunk): { promptChoices: PackedChoices } | null {
    const { logprobs = 0, promptLogprobs = false } = sampling;
    if (!promptLogprobs) return null;
    const seed = answerSeed(around.promptOf(key).digest, sampling.seed);
    const behind = [...tokens.subarray(1), ...(next === null ? [] : [next])];
    const choices = behind.map((token, index) => ghostPromptChoice(seed, start + 1 + index, token, logprobs));
    return { promptChoices: packChoices(choices, logprobs) };
  }

  /** Note a prompt that is computed although the cache has its first page, of another salt. */
  function seeOtherSalts(key: RoomKey, tokens: Uint32Array): void {
    if (plan.salts.length < 2 || scheduler.role !== 'prefill') return;
    const { cache, live } = scheduler.state;
    const salt = live.get(key)?.salt;
    for (const node of cache.pages.values()) {
      if (node.parent !== null || node.salt === salt) continue;
      if (node.tokens.every((token, at) => token === tokens[at])) coverage.saw('prompt that another salt has');
    }
  }

  /** Token `index` of an answer, and what is told of it if the request asked. */
  function sample(
    { key, sampling, rules }: { key: RoomKey; sampling: SamplingParams; rules: RowRules | null },
    index: number,
    mask: Uint32Array | undefined,
  ): SampledToken {
    const seed = answerSeed(around.promptOf(key).digest, sampling.seed);
    const token = sampleToken(seed, index, rules, mask);
    if (token === null || sampling.logprobs === undefined) return { key, token };
    return { key, token, choice: ghostChoice(seed, index, token, sampling.logprobs) };
  }

  /** I2: a step writes no page that others read. */
  function checkOwn(key: RoomKey, pages: readonly number[], start: number, end: number): void {
    for (let page = Math.floor(start / limits.pageTokens); page * limits.pageTokens < end; page++) {
      const owner = pools.pages.owners[pages[page]!];
      always(owner === `session ${key}`, 'I2', () => `${host.name}: ${key} writes page ${page} of ${owner}`);
    }
  }

  /** I4: all that a row stands on is there and right. */
  function checkRows({ rows }: DecodeBatch): void {
    for (const { key, slot, pages, token, position } of rows) {
      const { answer, seeds, promptCount } = around.promptOf(key);
      const wrong = findWrongPosition(memory, pages, position, seeds);
      always(wrong === null, 'I4', () => `${host.name}: position ${wrong} of ${key} is wrong`);
      always(isSlotRight(memory, slot, position, seeds), 'I4', () => `${host.name}: the slot of ${key} is wrong`);
      always(token === answer.tokens[position - promptCount], 'I4', () => `${key}: the token to run is wrong`);
    }
  }

  function computeRows({ rows }: DecodeBatch, masks: ReadonlyMap<RoomKey, Uint32Array>): SampledToken[] {
    return rows.flatMap((row) => {
      const { key, slot, pages, position, drafted } = row;
      const { seeds, promptCount } = around.promptOf(key);
      const isRight = drafted && random() < 0.6;
      const count = isRight ? 2 : 1;
      if (drafted) coverage.saw(isRight ? 'a draft was right' : 'a draft was wrong');
      fillPositions(memory, pages, position, position + count, seeds);
      // What a wrong draft leaves is another answer's.
      if (drafted && !isRight) fillPositions(memory, pages, position + 1, position + 2, (at) => seeds(at) + 1);
      fillSlot(memory, slot, position + count, seeds);
      const samples = Array.from({ length: count }, (_, index) =>
        sample(row, position - promptCount + 1 + index, masks.get(key)),
      );
      for (const { token } of samples) if (token !== null) steering.took(key, token);
      return samples;
    });
  }

  /** The bytes of a chunk's units, which leave the staging with it. */
  function takeStaged(message: ChunkMessage): Uint8Array {
    const units = message.generations.map((_, index) => {
      const name = stagedName(message.key, message.firstUnit + index);
      const bytes = staging.get(name);
      always(bytes !== undefined, 'I4', () => `${name} is sent and was not read`);
      staging.delete(name);
      return bytes;
    });
    return units.length === 1 ? units[0]! : new Uint8Array(Buffer.concat(units));
  }

  // ---- I8
  function trackBytes(peer: Epoch, count: number): () => void {
    const path = `${epoch}>${peer}`;
    around.underWay.set(path, (around.underWay.get(path) ?? 0) + count);
    let isGone = false;
    return () => {
      if (isGone) return;
      isGone = true;
      around.underWay.set(path, around.underWay.get(path)! - count);
    };
  }

  function auditBuffer(peer: Instance): void {
    if (scheduler.role !== 'decode') return;
    const bytes = (around.underWay.get(`${peer.epoch}>${epoch}`) ?? 0) + (writingBytes.get(peer.epoch) ?? 0);
    const limit = plan.decode.peerBufferBytes;
    always(bytes <= limit, 'I8', () => `${bytes} bytes under way from ${peer.name} to ${host.name}, buffer ${limit}`);
  }

  // ---- bugs on purpose
  function misbehave(bug: Bug): void {
    const { closing } = state.desk;
    if (bug === 'abort-once') {
      for (const [key, { message }] of closing.unwinds) if (message.type === 'ABORT') closing.unwinds.delete(key);
    } else if (bug === 'end-once') {
      closing.endings.clear();
    } else if (bug === 'kept-page' && scheduler.role === 'prefill') {
      for (const { sender, lease } of scheduler.state.live.values()) {
        if (sender.phase === 'unwinding' && lease !== null && lease.pages.length > 1) lease.pages.pop();
      }
    }
  }

  // ---- timers
  function reportLoad(): void {
    const stats = scheduler.role === 'prefill' ? statsPrefill(scheduler.state) : statsDecode(scheduler.state);
    for (const router of routers.keys()) {
      control.send(router, 'control', {
        type: 'load',
        epoch,
        rooms: stats.rooms,
        roomLimit: limits.maxRooms,
        running: 'running' in stats ? stats.running : stats.computing,
        queuedTokens: 'queuedTokens' in stats ? stats.queuedTokens : 0,
        pagesFree: stats.pagesFree + ('pagesCached' in stats ? stats.pagesCached : 0),
        pagesTotal: limits.pageCount,
        draining: stats.draining,
      });
    }
  }

  every(around, host, plan.tickMs, () => {
    peers.check();
    control.check();
    step({ type: 'tick', nowMs: now() });
  });
  every(around, host, plan.loadMs, reportLoad);
  if (role === 'prefill' && plan.flushMs !== null) {
    every(around, host, plan.flushMs, () => step({ type: 'flush', nowMs: now() }));
  }

  return {
    host,
    self,
    scheduler,
    routers,
    busy() {
      const found: string[] = [];
      const kept = { staged: staging.size, copies: copies.size, guides: steering.size };
      for (const [what, count] of Object.entries({ ...pending, ...kept })) {
        if (count > 0) found.push(`${count} ${what}`);
      }
      if (isStepping) found.push('a step');
      return found;
    },
    phaseOf,
    drain: () => step({ type: 'drain', nowMs: now() }),
    cancelAll() {
      for (const key of [...state.live.keys()]) {
        const message = { type: 'cancel', key, reason: 'shutdown' } as const;
        step({ type: 'router_message', router: parseKey(key)!.router, message, nowMs: now() });
      }
    },
    rooms: () => state.live.size,
  };
}

interface CacheSight {
  pages: number;
  evictedPages: number;
  evictedStates: number;
}

function cacheOf({ cache }: PrefillState): CacheSight {
  const { evictedPages, evictedStates } = cache.counts;
  return { pages: cache.pages.size, evictedPages, evictedStates };
}

/** A timer of a process: it stands still while the process does and fires once after that. */
export function every(
  around: Pick<Surroundings, 'clock' | 'network'>,
  host: Host,
  periodMs: number,
  act: () => void,
): void {
  const wait = (): void => {
    around.clock.after(periodMs, () =>
      around.network.runOn(host, () => {
        act();
        wait();
      }),
    );
  };
  wait();
}

function bytesAt(memory: GhostMemory, place: UnitPlace): Uint8Array {
  return place.kind === 'page'
    ? memory.pages.subarray(place.page * memory.pageBytes, (place.page + 1) * memory.pageBytes)
    : slotBytes(memory.slots, place.slot);
}

/** One slot of many, or one copy of one. */
function slotBytes(all: Uint8Array, index: number): Uint8Array {
  return all.subarray(index * SLOT_BYTES, (index + 1) * SLOT_BYTES);
}

/** What a request asks of its tokens, for the coverage. */
export function kindsOf(sampling: SamplingParams | undefined): string[] {
  return (['rules', 'constraint', 'logprobs'] as const).filter((kind) => sampling?.[kind] !== undefined);
}

function placeName(place: UnitPlace): string {
  return place.kind === 'page' ? `page ${place.page}` : `slot ${place.slot}`;
}

function stagedName(key: RoomKey, unit: number): string {
  return `${key}#${unit}`;
}

/** A message in a trace: its type and what tells it from others. */
export function describe(message: PeerMessage | RouterToWorker | { type: string }): string {
  const {
    type,
    from: _from,
    to: _to,
    epoch: _epoch,
    digest: _digest,
    ...rest
  } = message as unknown as Record<string, unknown>;
  if (type === 'submit') return `submit ${String(rest['key'])}`;
  const fields = Object.entries(rest).map(([name, value]) => `${name} ${JSON.stringify(value)}`);
  return `${String(type)} ${fields.join(', ')}`;
}
