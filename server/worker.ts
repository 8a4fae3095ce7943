/**
 * The effect loop of both worker roles: the only reader of a scheduler's state and the only performer of its effects.
 *
 *     sockets, timer, GPU ──▶ inbox ──▶ step ──▶ effects ──▶ sockets, GPU
 *                                        │
 *                                        └──▶ next batch ──▶ engine
 *
 * Handlers only append to the inbox and ask for a turn. A turn takes what was there, performs the effects in order and
 * starts a step if none is running; what is more than some milliseconds of work waits for the turn after. Nothing waits: a step and a read run beside the loop and come back as events.
 */
import { randomBytes } from 'node:crypto';
import type { AddressInfo } from 'node:net';
import { hostname } from 'node:os';
import type { Logger } from 'pino';
import type { WorkerEffect } from '../scheduler/types.ts';
import { creditByPeer } from '../scheduler/views.ts';
import {
  openConnector,
  openListener,
  type ChannelEvent,
  type ChannelOptions,
  type Listener,
} from '../transfer/channel.ts';
import {
  makeEpoch,
  parseKey,
  type Epoch,
  type Instance,
  type PeerMessage,
  type RoomKey,
  type RouterToWorker,
} from '../transfer/messages.ts';
import { loadTokenizer } from '../model/tokenizer.ts';
import { setUpAdapter } from './adapter/adapter.ts';
import { createAdminGate } from './operators/admin.ts';
import { readBuildInfo, type BuildInfo } from './operators/build-info.ts';
import { choosePageCount, modelName, type WorkerConfig, type WorkerRole } from './config.ts';
import { unackedEntries, workerRooms, type WorkerPage } from './operators/debug-page.ts';
import { openEngine, type Engine } from './engine.ts';
import { createGuideMaker } from './grammar/constraint.ts';
import { createSteering, type Steering } from './grammar/steering.ts';
import { createVocabulary } from './grammar/vocabulary.ts';
import { createLogger } from './log.ts';
import { createWorkerMetrics, type WorkerSights } from './metrics.ts';
import { digestModel } from './model-digest.ts';
import { createPeerBook } from './operators/peer-book.ts';
import { createRoomWatch } from './operators/room-watch.ts';
import { QUICK_GRACE_MS, reportProgress, type RunningRole } from './supervisor.ts';
import { createUnitDepot } from './unit-depot.ts';
import { openPrefixStore } from './prefix-store.ts';
import { createPrefixTier, type PrefixTier } from './prefix-tier.ts';
import { decodeCore, hasTier, prefillCore, workerStats, type Core, type WorkerEvent } from './worker-core.ts';
import { listenHttp, servePages } from './worker-http.ts';

/** Deadlines and re-sends are judged this often. */
const TICK_MS = 50;
/** A turn takes no further event after so long, so that the next step starts in time. */
const TURN_MS = 8;
/** Load is reported to routers this often. */
const LOAD_MS = 250;
/** The ledgers are recounted from scratch this often. */
const AUDIT_MS = 1000;
/** Bounds of the send queue of one peer; the bytes are above every credit, so they bind only when a peer is sick. */
const QUEUED_MESSAGES = 1 << 16;
const QUEUED_BYTES = 256 << 20;
/** Largest payload of a frame that is accepted. */
const MAX_PAYLOAD_BYTES = 1 << 30;
/** The last ABORT and `end` get this long to leave at shutdown. */
const LINGER_MS = 500;
/** Lives of routers without a link that are remembered by name. */
const MAX_LOST_ROUTERS = 1024;
/** Rooms that outlast a drain are cancelled and unwind, which takes a step or a read at most. */
const UNWIND_MS = 1000;

/**
 * Be a worker: load the model, listen, serve until `close`.
 *
 * @throws AdapterError, DeviceError, ConfigError or a loader error when it cannot start.
 */
export async function runWorker(config: WorkerConfig, role: WorkerRole): Promise<RunningRole> {
  const log = createLogger({ role, level: config.logLevel });
  const adapter = await setUpAdapter({ wanted: config.adapter, say: (line) => log.info({ detail: line }, 'adapter') });
  Object.assign(process.env, adapter.environment);
  const modelDigest = await digestModel(config.model);
  const build = await readBuildInfo(config.model, modelDigest);
  const engine = await openWorkerEngine(config, role, adapter.name);
  try {
    return await serve({ config, role, log, engine, modelDigest, build, adapterName: adapter.name });
  } catch (error) {
    engine.close();
    throw error;
  }
}

function openWorkerEngine(config: WorkerConfig, role: WorkerRole, adapterName: string): Promise<Engine> {
  const { limits } = config;
  return openEngine({
    modelDir: config.model,
    choices: {
      pageTokens: limits.pageTokens,
      ...config.numerics,
      ...(limits.contextLength === null ? {} : { contextTokens: limits.contextLength }),
    },
    adapterName,
    maxRows: role === 'prefill' ? limits.prefillChunkTokens : limits.maxRunningRequests,
    maxSequences: limits.maxRunningRequests,
    choosePageCount: (sizes) => choosePageCount(limits, sizes),
    slotCount: limits.maxRunningRequests,
    speculative: config.speculative,
    stateBytes: role === 'prefill' ? limits.prefixCacheBytes : 0,
    onProgress: ({ stage, done, total }) =>
      reportProgress({ step: stage, done, total, unit: stage === 'weights' ? 'bytes' : 'steps' }),
  });
}

interface Service {
  readonly config: WorkerConfig;
  readonly role: WorkerRole;
  readonly log: Logger;
  readonly engine: Engine;
  readonly modelDigest: string;
  readonly build: BuildInfo;
  readonly adapterName: string;
}

async function serve(service: Service): Promise<RunningRole> {
  const { config, role, log, engine, modelDigest } = service;
  const now = (): number => performance.now();
  const epoch = makeEpoch(Date.now(), randomBytes(4).readUInt32LE());

  // ---- for operators: who was heard when, what happened to which room
  const watch = createRoomWatch();
  const book = createPeerBook(() => [...peers.links(), ...control.links()]);
  const reaped = { atMs: now() };
  const audited = { atMs: now(), faults: [] as readonly string[] };

  // ---- sockets: they only append to the inbox
  const inbox: WorkerEvent[] = [];
  /** Lives of routers with a link, and those that lost it and may come back, by name. */
  const routers = new Map<Epoch, string>();
  const lostRouters = new Map<Epoch, string>();
  const linkOptions = (name: string, fields: Record<string, string>): Omit<ChannelOptions, 'onEvent'> => ({
    role,
    name,
    epoch,
    fields,
    heartbeatMs: config.deadlines.heartbeatMs,
    leaseMs: config.deadlines.leaseMs,
    dataSilenceMs: config.deadlines.stallMs,
    maxQueuedMessages: QUEUED_MESSAGES,
    maxQueuedBytes: QUEUED_BYTES,
    maxPayloadBytes: MAX_PAYLOAD_BYTES,
    lingerMs: LINGER_MS,
  });
  const onPeerEvent = (event: ChannelEvent): void => {
    const nowMs = now();
    book.onEvent(event, nowMs);
    switch (event.type) {
      case 'up':
        return post({ type: 'peer_up', peer: event.peer, nowMs });
      case 'lost':
        log.warn({ peer: event.peer.name, epoch: event.peer.epoch, why: event.why }, 'peer lost');
        return post({ type: 'peer_lost', peer: event.peer, nowMs });
      case 'message': {
        const message = event.message as PeerMessage;
        return post({ type: 'peer_message', peer: event.peer, message, payload: event.payload, nowMs });
      }
      case 'refused':
        return logRefusal(log, event);
      default:
        event satisfies never;
    }
  };
  const rememberLost = (router: Instance): void => {
    lostRouters.set(router.epoch, router.name);
    const [oldest] = lostRouters.keys();
    if (lostRouters.size > MAX_LOST_ROUTERS && oldest !== undefined) lostRouters.delete(oldest);
  };
  const onRouterEvent = (event: ChannelEvent): void => {
    const nowMs = now();
    book.onEvent(event, nowMs);
    switch (event.type) {
      case 'up':
        routers.set(event.peer.epoch, event.peer.name);
        post({ type: 'router_up', router: event.peer.epoch, nowMs });
        // A later life of a router ends the earlier one, also if its link was lost before.
        for (const [earlier, name] of lostRouters) {
          if (name !== event.peer.name) continue;
          lostRouters.delete(earlier);
          if (earlier !== event.peer.epoch) post({ type: 'router_lost', router: earlier, isDead: true, nowMs });
        }
        log.info({ router: event.peer.name, epoch: event.peer.epoch }, 'router up');
        return reportLoad();
      case 'lost':
        routers.delete(event.peer.epoch);
        if (event.why !== 'superseded') rememberLost(event.peer);
        log.warn({ router: event.peer.name, epoch: event.peer.epoch, why: event.why }, 'router lost');
        return post({ type: 'router_lost', router: event.peer.epoch, isDead: event.why === 'superseded', nowMs });
      case 'message':
        return post({
          type: 'router_message',
          router: event.peer.epoch,
          message: event.message as RouterToWorker,
          nowMs,
        });
      case 'refused':
        return logRefusal(log, event);
      default:
        event satisfies never;
    }
  };

  const http = await listenHttp(config.host, config.port);
  const httpUrl = `http://${config.host}:${(http.address() as AddressInfo).port}`;
  // Stable over restarts at the same port, so that a newer epoch of this worker replaces the older one everywhere.
  const name = `${role}@${hostname()}:${new URL(httpUrl).port}`;
  const modelFields = { model: modelDigest, context: String(engine.contextTokens) };
  const peerFields = { ...modelFields, layout: JSON.stringify(engine.layout) };
  const peers =
    role === 'prefill'
      ? await openListener({ ...linkOptions(name, peerFields), onEvent: onPeerEvent }, transferAddresses(config))
      : openConnector({ ...linkOptions(name, peerFields), onEvent: onPeerEvent });
  const transfer = 'address' in peers ? advertised(peers.address, config.advertise) : undefined;
  const control: Listener = await openListener(
    {
      ...linkOptions(name, { ...modelFields, role, http: httpUrl, transfer: transfer ?? '' }),
      onEvent: onRouterEvent,
    },
    { address: config.control, dataAddress: null },
  );

  // ---- the pure state
  const parts = { config, engine, modelDigest, steering: openSteering(service) };
  const core: Core = role === 'prefill' ? prefillCore(parts, { name, epoch }) : decodeCore(parts, { name, epoch });
  const units = createUnitDepot(engine);
  const tier = role === 'prefill' && hasTier(config.limits) ? openTier(service) : null;
  const submittedMs = new Map<RoomKey, number>();
  const moving = new Set<RoomKey>();
  const totals = { sentBytes: 0, receivedBytes: 0, bootstrapFailures: 0, transferFailures: 0 };
  const metrics = createWorkerMetrics({
    role,
    modelName: modelName(config),
    adapter: service.adapterName,
    pageTokens: engine.config.pageTokens,
    build: service.build,
    stats: () => workerStats(core.gauges(), engine, totals, tier?.stats() ?? null),
    sights: () => sights(now()),
  });

  // ---- turns
  let turnAsked = false;
  let stepping = false;
  let closed = false;
  let whenIdle: (() => void) | null = null;

  /** Resolves when no room is left and no step runs, or after `limitMs`. */
  function idle(limitMs: number): Promise<void> {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, limitMs);
      whenIdle = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  function post(event: WorkerEvent): void {
    // Tokens that are there do not wait behind hundreds of rooms that end at once.
    if (event.type === 'step_done') inbox.unshift(event);
    else inbox.push(event);
    askTurn();
  }

  function askTurn(): void {
    if (turnAsked || closed) return;
    turnAsked = true;
    setImmediate(turn);
  }

  function turn(): void {
    turnAsked = false;
    const endMs = now() + TURN_MS;
    // What the effects of this turn append (a write that is done at once) waits for the next.
    let left = inbox.length;
    while (left-- > 0) {
      const event = inbox.shift()!;
      noteEvent(event);
      for (const effect of core.step(event)) perform(effect);
      if (event.type === 'drain') reportLoad(); // routers are to choose others from now on
      if (now() > endMs) break;
    }
    if (inbox.length > 0) askTurn();
    startStep();
    if (!stepping && whenIdle !== null && core.gauges().rooms === 0) whenIdle();
  }

  function noteEvent(event: WorkerEvent): void {
    const { nowMs } = event;
    switch (event.type) {
      case 'router_message':
      case 'peer_message': {
        const { message } = event;
        if ('key' in message) watch.note(message.key, message.type, nowMs);
        if (message.type === 'submit' && !submittedMs.has(message.key)) submittedMs.set(message.key, nowMs);
        break;
      }
      case 'written':
      case 'read_done':
        watch.note(event.key, event.type, nowMs);
        break;
      case 'step_done':
        for (const { key } of event.tokens) watch.note(key, event.type, nowMs);
        break;
      case 'tick':
        reaped.atMs = nowMs;
        book.look(nowMs);
        watch.look(core.rooms(), nowMs);
        forgetStrays();
        break;
      default:
        break; // of no one room
    }
  }

  /** A submit that was dropped, say of a dead router, never gets an end; nor does a room whose router is dead. */
  function forgetStrays(): void {
    const live = new Set(core.keys());
    for (const keys of [submittedMs, moving]) {
      for (const key of keys.keys()) if (!live.has(key)) keys.delete(key);
    }
  }

  /** Recount the ledgers. A fault is logged when it is new; it stays in the gauge for as long as it is there. */
  function audit(): void {
    const faults = core.audit();
    if (faults.join() !== audited.faults.join() && faults.length > 0)
      log.error({ faults }, 'the ledgers do not add up');
    Object.assign(audited, { atMs: now(), faults });
  }

  function sights(nowMs: number): WorkerSights {
    const rooms = core.rooms();
    watch.look(rooms, nowMs);
    const credit = creditByPeer(rooms);
    const channels = [peers.stats(), control.stats()];
    const sum = (of: (stats: (typeof channels)[number]) => number): number => of(channels[0]!) + of(channels[1]!);
    const unacked = core.unacked().flatMap(({ sinceMs }) => (sinceMs === null ? [] : [nowMs - sinceMs]));
    return {
      oldest: watch.oldest(nowMs),
      peers: book.peers(nowMs).map((peer) => ({ ...peer, creditBytes: credit.get(peer.epoch) ?? 0 })),
      reaperAgeSeconds: (nowMs - reaped.atMs) / 1000,
      links: {
        queuedBytes: sum((stats) => stats.queuedBytes),
        droppedTotal: sum((stats) => stats.droppedMessages),
        rejectedTotal: sum((stats) => stats.rejectedMessages),
      },
      oldestUnacknowledgedSeconds: Math.max(0, ...unacked) / 1000,
      auditAgeSeconds: (nowMs - audited.atMs) / 1000,
      conservationFaults: audited.faults.length,
    };
  }

  function debugPage(): WorkerPage {
    const nowMs = now();
    const { queues, pages, slots, tombstones, draining, ledgerViolationsTotal } = core.gauges();
    const rooms = core.rooms();
    watch.look(rooms, nowMs);
    audit();
    return {
      role,
      name,
      epoch,
      draining,
      build: service.build,
      queues,
      pages,
      slots,
      rooms: workerRooms(rooms, watch, nowMs),
      unacknowledged: unackedEntries(core.unacked(), nowMs),
      tombstones,
      conservation: { faults: audited.faults, auditAgeSeconds: 0, violationsTotal: ledgerViolationsTotal },
      reaperAgeSeconds: (nowMs - reaped.atMs) / 1000,
      peers: book.peers(nowMs),
    };
  }

  function startStep(): void {
    if (stepping) return;
    const batch = core.next();
    if (batch === null) return;
    stepping = true;
    const startMs = now();
    for (const key of batch.first) metrics.queued((startMs - (submittedMs.get(key) ?? startMs)) / 1000);
    batch.run().then((tokens) => {
      stepping = false;
      metrics.stepped({ seconds: (now() - startMs) / 1000, rows: batch.rows });
      post({ type: 'step_done', tokens, nowMs: now() });
    }, die);
  }

  function perform(effect: WorkerEffect): void {
    switch (effect.type) {
      case 'connect':
        if ('connect' in peers) peers.connect(effect.address, false);
        break;
      case 'send': {
        const { peer, socket, message } = effect;
        const payload = message.type === 'CHUNK' ? units.take(message) : undefined;
        if (payload !== undefined) {
          totals.sentBytes += payload.byteLength;
          moving.add(message.key);
        }
        peers.send(peer.epoch, socket, message, payload);
        break;
      }
      case 'read': {
        const { key, firstUnit, places } = effect;
        units
          .stage(key, firstUnit, places)
          .then((checksums) => post({ type: 'read_done', key, firstUnit, checksums, nowMs: now() }), die);
        break;
      }
      case 'discard':
        units.discard(effect.key, effect.firstUnit, effect.unitCount);
        break;
      case 'write': {
        const { key, unit, place, payload } = effect;
        units.write(place, payload);
        totals.receivedBytes += payload.byteLength;
        moving.add(key);
        post({ type: 'written', key, unit, nowMs: now() });
        break;
      }
      case 'save': {
        const { key, places } = effect;
        units.save(key, places).then(() => post({ type: 'saved', key, nowMs: now() }), die);
        break;
      }
      case 'restore':
        units.restore(effect.key, effect.places);
        post({ type: 'restored', key: effect.key, nowMs: now() });
        break;
      case 'forget':
        units.forget(effect.key);
        break;
      case 'fetch': {
        const { type: _, key, ...where } = effect;
        tier!.fetch(where).then((tokenCount) => post({ type: 'fetched', key, tokenCount, nowMs: now() }), die);
        break;
      }
      case 'stash': {
        const { type: _, key, ...what } = effect;
        tier!.stash(what).then(() => post({ type: 'stashed', key, nowMs: now() }), die);
        break;
      }
      case 'report': {
        const { router, message } = effect;
        if (message.type === 'end') noteEnd(message.key, message);
        control.send(router, 'control', message);
        break;
      }
      case 'violation':
        log.error(
          { room: effect.key, what: effect.what, events: watch.historyOf(effect.key)?.events ?? [] },
          'ledger violation: quarantined',
        );
        break;
      default:
        effect satisfies never;
    }
  }

  function noteEnd(key: RoomKey, end: { outcome: { ok: boolean; reason?: string }; tokenCount: number }): void {
    const known = submittedMs.delete(key);
    const wasMoving = moving.delete(key);
    if (!known) return; // a re-sent end, or the answer to a late submit
    const { ok, reason } = end.outcome;
    const byClient = reason === 'client_lost' || reason === 'client_cancel';
    // The router has a line for every request; a thousand clients that leave are no news here.
    log[ok || byClient ? 'debug' : 'info']({ room: key, ok, reason, tokens: end.tokenCount }, 'room ended');
    if (ok || byClient || end.tokenCount > 0) return;
    if (wasMoving) totals.transferFailures++;
    else totals.bootstrapFailures++;
  }

  function reportLoad(): void {
    const gauges = core.gauges();
    const { maxRunningRequests, maxQueuedRequests } = config.limits;
    for (const router of routers.keys()) {
      control.send(router, 'control', {
        type: 'load',
        epoch,
        rooms: gauges.rooms,
        roomLimit: maxRunningRequests + maxQueuedRequests,
        running: gauges.running,
        queuedTokens: gauges.queuedTokens,
        pagesFree: gauges.pagesFree,
        pagesTotal: engine.pageCount,
        draining: gauges.draining,
      });
    }
  }

  /** A lost device or a broken read: nothing on this worker can be trusted any more. The supervisor starts another. */
  function die(error: unknown): void {
    if (closed) return;
    throw error;
  }

  engine.device.lost.catch(die);
  const timers = [
    setInterval(() => post({ type: 'tick', nowMs: now() }), TICK_MS),
    setInterval(reportLoad, LOAD_MS),
    setInterval(audit, AUDIT_MS),
  ];
  servePages(http, {
    gate: createAdminGate(config.adminKey),
    metrics: () => metrics.text(),
    health() {
      const { draining, rooms } = core.gauges();
      const model = modelName(config);
      return { draining, body: { role, name, epoch, model, adapter: service.adapterName, rooms } };
    },
    rooms: debugPage,
    flush() {
      const { cached } = core.gauges().pages;
      post({ type: 'flush', nowMs: now() });
      tier?.clear();
      return cached;
    },
  });

  return {
    http: httpUrl,
    control: control.address,
    transfer,
    async close(how) {
      post({ type: 'drain', nowMs: now() });
      await idle(how === 'drain' ? config.deadlines.drainMs : QUICK_GRACE_MS);
      for (const key of core.keys()) {
        const router = parseKey(key)?.router;
        if (router === undefined) continue;
        post({ type: 'router_message', router, message: { type: 'cancel', key, reason: 'shutdown' }, nowMs: now() });
      }
      await idle(UNWIND_MS);
      closed = true;
      for (const timer of timers) clearInterval(timer);
      await Promise.all([peers.close(), control.close()]);
      http.close();
      http.closeAllConnections();
      metrics.close();
      tier?.close();
      engine.close();
    },
  };
}

/** What follows constrained answers. Made at the start: a large vocabulary takes a second. */
function openSteering({ config, engine, log }: Service): Steering {
  const vocabulary = createVocabulary(loadTokenizer(config.model), engine.config.vocabSize);
  return createSteering(createGuideMaker(vocabulary), vocabulary.maskWords, (room, error) =>
    log.error({ room, err: error }, 'a constraint could not be followed: its request ends'),
  );
}

/** The prefix tier of a prefill worker. */
function openTier({ config, engine, modelDigest, log }: Service): PrefixTier {
  const { prefixHostBytes: limitBytes, prefixStore } = config.limits;
  const identity = JSON.stringify({ modelDigest, layout: engine.layout });
  const store =
    prefixStore === null
      ? null
      : openPrefixStore(prefixStore, (kind, detail) => log.warn({ kind, detail }, 'the prefix store does not answer'));
  return createPrefixTier(engine, { identity, limitBytes, store });
}

function transferAddresses(config: WorkerConfig): { address: string; dataAddress: string } {
  return {
    address: config.transfer,
    dataAddress: config.transferData ?? config.transfer.replace(/:[^:]*$/, ':0'),
  };
}

/** The address that peers are told: the bound one, under another host if one is advertised. */
function advertised(address: string, host: string | null): string {
  return host === null ? address : `tcp://${host}:${address.slice(address.lastIndexOf(':') + 1)}`;
}

function logRefusal(log: Logger, event: Extract<ChannelEvent, { type: 'refused' }>): void {
  const { address, field, ours, theirs } = event;
  log.error({ address, field, ours, theirs }, 'link refused: the two sides do not fit together');
}
