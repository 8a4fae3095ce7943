/**
 * The router process: HTTP in front, control links to the workers behind, rooms between them.
 *
 * It keeps a link to every configured worker for as long as it lives; a worker that dies and comes back at its address
 * is a new life of it. The router holds no GPU and loads only the text files of the model.
 */
import { randomBytes } from 'node:crypto';
import type { AddressInfo } from 'node:net';
import { hostname } from 'node:os';
import { loadChatEncoding } from '../model/chat.ts';
import { loadModelConfig } from '../model/config.ts';
import { loadTokenizer } from '../model/tokenizer.ts';
import { openConnector, type ChannelEvent, type Peer } from '../transfer/channel.ts';
import { makeEpoch, type Epoch, type WorkerToRouter } from '../transfer/messages.ts';
import { createEncoder } from './api/encoder.ts';
import type { WorkerView } from './balancer.ts';
import { adminHeaders, createAdminGate } from './operators/admin.ts';
import { readBuildInfo } from './operators/build-info.ts';
import { modelName, type RouterConfig, type WorkerRole } from './config.ts';
import type { RouterPage, SeatEntry, WorkerPage } from './operators/debug-page.ts';
import { ApiError } from './errors.ts';
import { closeApp, createApp, defaultHttpLimits } from './http.ts';
import { createLogger } from './log.ts';
import { createRouterMetrics, withColonAliases, type WorkerTarget } from './metrics.ts';
import { digestModel } from './model-digest.ts';
import { createPeerBook } from './operators/peer-book.ts';
import { createRooms } from './rooms.ts';
import { QUICK_GRACE_MS, type RunningRole } from './supervisor.ts';

/** Deadlines and re-sends are judged this often. */
const TICK_MS = 50;
/** The smallest sequence in use is told to workers this often. */
const MARK_MS = 1000;
/** Bounds of the send queue of one worker. */
const QUEUED_MESSAGES = 1 << 16;
const QUEUED_BYTES = 64 << 20;
/** Workers send no payload to a router. */
const MAX_PAYLOAD_BYTES = 0;
/** The last cancel and `end_ack` get this long to leave at shutdown. */
const LINGER_MS = 500;
/** A worker gets this long to show its rooms. */
const PAGE_LIMIT_MS = 2000;
/** At shutdown the halves of requests that were ended get this long to end too. */
const UNWIND_MS = 500;

/** A configured worker: where it is, and what metrics call it. */
interface Seat {
  readonly address: string;
  readonly role: WorkerRole;
  /** `prefill-0`: outlives restarts. */
  readonly label: string;
  /** The life that sits there now. */
  view: WorkerView | null;
  /** Where the last known life serves HTTP. */
  http: string | null;
}

/**
 * Be the router: serve HTTP until `close`. Workers may come up before or after it.
 *
 * @throws when the model's text files are missing or the port is taken.
 */
export async function runRouter(config: RouterConfig): Promise<RunningRole> {
  const log = createLogger({ role: 'router', level: config.logLevel });
  const now = (): number => performance.now();
  const tokenizer = loadTokenizer(config.model);
  const chat = loadChatEncoding(config.model);
  const { maxPositions } = loadModelConfig(config.model);
  const contextLength = config.limits.contextLength ?? maxPositions;
  if (contextLength > maxPositions) {
    log.warn(
      { contextLength, trainedFor: maxPositions },
      'answers beyond what the checkpoint was trained for are worse',
    );
  }
  const modelDigest = await digestModel(config.model);
  const build = await readBuildInfo(config.model, modelDigest);
  const epoch = makeEpoch(Date.now(), randomBytes(4).readUInt32LE());
  // A router on a port of its own choice comes back as the next life of the same one.
  const name = `router@${hostname()}:${config.port === 0 ? epoch : config.port}`;
  const book = createPeerBook(() => connector.links());
  let reapedMs = now();

  const seats: Seat[] = [
    ...config.prefillWorkers.map((address, index) => newSeat(address, 'prefill', index)),
    ...config.decodeWorkers.map((address, index) => newSeat(address, 'decode', index)),
  ];
  const live = new Map<Epoch, WorkerView>();

  const connector = openConnector({
    role: 'router',
    name,
    epoch,
    fields: { model: modelDigest, context: String(contextLength) },
    heartbeatMs: config.deadlines.heartbeatMs,
    leaseMs: config.deadlines.leaseMs,
    dataSilenceMs: config.deadlines.stallMs,
    maxQueuedMessages: QUEUED_MESSAGES,
    maxQueuedBytes: QUEUED_BYTES,
    maxPayloadBytes: MAX_PAYLOAD_BYTES,
    lingerMs: LINGER_MS,
    onEvent: onLinkEvent,
  });

  const rooms = createRooms({
    epoch,
    modelDigest,
    requestMs: config.deadlines.requestMs,
    now,
    links: {
      workers: () => live.values(),
      send: (worker, message) => void connector.send(worker, 'control', message),
    },
    onAborted: (reason, phase) => metrics.aborted(reason, phase),
    // Every request has its line; a room has one of its own where there is more to tell.
    onClosed: (room) => log[room.attempts > 1 ? 'info' : 'debug'](room, 'room closed'),
  });
  const metrics = createRouterMetrics({
    modelName: modelName(config),
    build,
    stats: () => rooms.stats(),
    sights() {
      const { queuedBytes, droppedMessages, rejectedMessages } = connector.stats();
      return {
        oldest: rooms.oldest(),
        peers: book.peers(now()).map((peer) => ({ ...peer, creditBytes: 0 })),
        reaperAgeSeconds: (now() - reapedMs) / 1000,
        links: { queuedBytes, droppedTotal: droppedMessages, rejectedTotal: rejectedMessages },
      };
    },
    workers: () => seats.map((seat): WorkerTarget => ({ worker: seat.label, role: seat.role, http: seat.http })),
  });

  /** This router's rooms, and what every worker says of its own. */
  async function debugPage(draining: boolean): Promise<RouterPage> {
    return {
      role: 'router',
      name,
      epoch,
      draining,
      build,
      deadlines: config.deadlines,
      rooms: rooms.views(),
      reaperAgeSeconds: (now() - reapedMs) / 1000,
      peers: book.peers(now()),
      workers: await Promise.all(seats.map((seat) => seatEntry(seat, config.adminKey))),
    };
  }

  async function flushCache(): Promise<number> {
    const prefills = seats.filter(({ role, http }) => role === 'prefill' && http !== null);
    const counts = await Promise.all(prefills.map((seat) => flushSeat(seat, config.adminKey)));
    return counts.reduce((sum, count) => sum + count, 0);
  }

  function onLinkEvent(event: ChannelEvent): void {
    book.onEvent(event, now());
    switch (event.type) {
      case 'up':
        return onUp(event.peer, event.address);
      case 'lost':
        return onLost(event.peer, event.address, event.why);
      case 'message':
        return onMessage(event.peer.epoch, event.message as WorkerToRouter);
      case 'refused': {
        const { address, field, ours, theirs } = event;
        return log.error({ address, field, ours, theirs }, 'worker refused: it does not fit this router');
      }
      default:
        event satisfies never;
    }
  }

  function onUp(peer: Peer, address: string): void {
    const seat = seats.find((candidate) => candidate.address === address);
    if (seat === undefined) return;
    if (peer.role !== seat.role) {
      log.error({ worker: seat.label, address, role: peer.role }, 'this address belongs to a worker of another role');
      return;
    }
    if (!live.has(peer.epoch)) {
      const ref = { name: peer.name, epoch: peer.epoch, address: peer.fields['transfer'] ?? '' };
      seat.view = { role: seat.role, ref, load: null, halves: new Set() };
      live.set(peer.epoch, seat.view);
    }
    seat.http = peer.fields['http'] ?? null;
    log.info({ worker: seat.label, address, epoch: peer.epoch }, 'worker up');
    rooms.onLink({ type: 'worker_up', epoch: peer.epoch });
  }

  function onLost(peer: Peer, address: string, why: string): void {
    if (!live.delete(peer.epoch)) return;
    const seat = seats.find((candidate) => candidate.address === address);
    if (seat?.view?.ref.epoch === peer.epoch) seat.view = null;
    log.warn({ worker: seat?.label, address, epoch: peer.epoch, why }, 'worker lost');
    rooms.onLink({ type: 'worker_lost', epoch: peer.epoch });
  }

  function onMessage(worker: Epoch, message: WorkerToRouter): void {
    if (message.type !== 'load') return rooms.onLink({ type: 'message', epoch: worker, message });
    const view = live.get(worker);
    if (view !== undefined) view.load = message;
  }

  const app = createApp({
    rooms,
    tokenizer,
    encodeAside: createEncoder(config.model),
    chat,
    allowsSpecialTokens: config.allowSpecialTokens,
    effortMap: config.effortMap,
    modelId: config.api.modelNames[0] ?? modelName(config),
    aliases: config.api.modelNames.slice(1),
    maxChoices: config.api.maxChoices,
    contextLength,
    limits: {
      ...defaultHttpLimits,
      maxBodyBytes: config.api.maxBodyBytes,
      firstByteMs: config.api.firstByteMs,
      heartbeatMs: config.api.heartbeatMs,
      keyMaxRequests: config.api.keyMaxRequests,
      keyRequestsPerMinute: config.api.keyRequestsPerMinute,
    },
    apiKeys: config.api.keys,
    version: build.version,
    defaults: { thinking: config.api.thinkingByDefault },
    fleet: () => seats.map(({ role, label, view }) => ({ role, label, load: view?.load ?? null })),
    capacity() {
      const decodes = [...live.values()].filter((worker) => worker.role === 'decode').length;
      const { maxRunningRequests, maxQueuedRequests } = config.limits;
      return { running: decodes * maxRunningRequests, waiting: decodes * maxQueuedRequests };
    },
    log,
    metricsText: async () => {
      const text = await metrics.text();
      return config.metricsColonAliases ? withColonAliases(text) : text;
    },
    gate: createAdminGate(config.adminKey),
    debugPage,
    flushCache,
    observe: metrics,
  });
  const timers = [
    setInterval(() => {
      rooms.tick();
      book.look(now());
      reapedMs = now();
    }, TICK_MS),
    setInterval(() => {
      const mark = { type: 'mark', smallestSequence: rooms.smallestSequence() } as const;
      for (const worker of live.keys()) connector.send(worker, 'control', mark);
    }, MARK_MS),
  ];

  const stop = async (): Promise<void> => {
    for (const timer of timers) clearInterval(timer);
    await connector.close();
    metrics.close();
  };
  try {
    await app.listen({ host: config.host, port: config.port });
  } catch (error) {
    await stop();
    throw error;
  }
  for (const seat of seats) connector.connect(seat.address, true);

  return {
    http: `http://${config.host}:${(app.server.address() as AddressInfo).port}`,
    async close(how) {
      await closeApp(app, how === 'drain' ? config.deadlines.drainMs : QUICK_GRACE_MS);
      await rooms.drain(UNWIND_MS);
      await stop();
    },
  };
}

function newSeat(address: string, role: WorkerRole, index: number): Seat {
  return { address, role, label: `${role}-${index}`, view: null, http: null };
}

async function seatEntry({ address, role, label, view, http }: Seat, adminKey: string | null): Promise<SeatEntry> {
  const seat = { worker: label, role, address, epoch: view?.ref.epoch ?? null };
  if (http === null) return { ...seat, page: null, error: 'it was never linked' };
  try {
    const signal = AbortSignal.timeout(PAGE_LIMIT_MS);
    const response = await fetch(`${http}/debug/rooms`, { headers: adminHeaders(adminKey), signal });
    if (!response.ok) return { ...seat, page: null, error: `it answered ${response.status}` };
    return { ...seat, page: (await response.json()) as WorkerPage, error: null };
  } catch (error) {
    const why =
      (error as Error).name === 'TimeoutError' ? `no answer within ${PAGE_LIMIT_MS} ms` : 'it cannot be reached';
    return { ...seat, page: null, error: why };
  }
}

/** Empty the prefix cache of one worker. One that is down has none. */
async function flushSeat({ label, view, http }: Seat, adminKey: string | null): Promise<number> {
  if (view === null) return 0;
  try {
    const signal = AbortSignal.timeout(PAGE_LIMIT_MS);
    const response = await fetch(`${http}/flush_cache`, { method: 'POST', headers: adminHeaders(adminKey), signal });
    if (!response.ok) throw new Error(`it answered ${response.status}`);
    return ((await response.json()) as { flushed_pages: number }).flushed_pages;
  } catch (cause) {
    throw new ApiError('engine_unavailable', `The worker ${label} did not flush its cache; try again.`, { cause });
  }
}
