/** A router's HTTP side over rooms whose tokens, ends and faults the test decides. */
import type { AddressInfo } from 'node:net';
import { fileURLToPath } from 'node:url';
import { pino } from 'pino';
import { loadChatEncoding } from '../../model/chat.ts';
import { loadTokenizer } from '../../model/tokenizer.ts';
import type { RequestObserver } from '../../server/api/serve.ts';
import type { ApiError } from '../../server/errors.ts';
import { createApp, defaultHttpLimits } from '../../server/http.ts';
import type { AppOptions, HttpLimits } from '../../server/http.ts';
import { createAdminGate } from '../../server/operators/admin.ts';
import type { RoomHandle, RoomOutcome, RoomRequest, Rooms } from '../../server/rooms.ts';

const modelDirectory = fileURLToPath(new URL('../../model/nano', import.meta.url));

/** Those of nano. */
export const tokenizer = loadTokenizer(modelDirectory);
const chat = loadChatEncoding(modelDirectory);

/** Of every app made here. */
export const contextLength = 4096;

/** One room, driven by the test. */
export class Room implements RoomHandle {
  readonly request: RoomRequest;
  readonly #sink: Parameters<Rooms['start']>[1];
  readonly cancelled: Promise<'client_lost' | 'stop_string' | 'client_cancel'>;
  #resolveCancelled!: (reason: 'client_lost' | 'stop_string' | 'client_cancel') => void;
  cancelReason: 'client_lost' | 'stop_string' | 'client_cancel' | null = null;
  cancelCount = 0;

  constructor(request: RoomRequest, sink: Parameters<Rooms['start']>[1]) {
    this.request = request;
    this.#sink = sink;
    this.cancelled = new Promise((resolve) => {
      this.#resolveCancelled = resolve;
    });
  }

  cancel(reason: 'client_lost' | 'stop_string' | 'client_cancel'): void {
    this.cancelCount += 1;
    if (this.cancelReason !== null) return;
    this.cancelReason = reason;
    this.#resolveCancelled(reason);
    // At once, before this returns: so do real rooms.
    if (reason === 'stop_string') this.#sink.onEnd({ kind: 'stop' });
    else this.#sink.onEnd({ kind: 'cancelled', reason });
  }

  tokens(ids: number[]): void {
    if (this.cancelReason === null) this.#sink.onTokens(ids);
  }

  text(text: string): void {
    this.tokens(tokenizer.encode(text));
  }

  end(outcome: RoomOutcome): void {
    if (this.cancelReason === null) this.#sink.onEnd(outcome);
  }

  /** The rest of an answer that ends by itself. */
  finish(text: string): void {
    this.text(text);
    this.tokens([tokenizer.eosId]);
    this.end({ kind: 'stop' });
  }
}

/** Rooms whose answers the test gives: by hand through `next`, or through `script`. */
export class ScriptedRooms implements Rooms {
  isReady = true;
  refusal: ApiError | null = null;
  /** Run for every room, after `start` has returned. */
  script: ((room: Room) => void) | null = null;
  startCount = 0;
  readonly #rooms: Room[] = [];
  readonly #waiting: ((room: Room) => void)[] = [];

  start(request: RoomRequest, sink: Parameters<Rooms['start']>[1]): RoomHandle {
    if (this.refusal !== null) throw this.refusal;
    this.startCount += 1;
    const room = new Room(request, sink);
    const waiting = this.#waiting.shift();
    if (waiting !== undefined) waiting(room);
    else this.#rooms.push(room);
    const { script } = this;
    if (script !== null) setImmediate(() => script(room));
    return room;
  }

  ready(): boolean {
    return this.isReady;
  }

  /** The next room that starts. */
  next(): Promise<Room> {
    const room = this.#rooms.shift();
    return room === undefined ? new Promise((resolve) => this.#waiting.push(resolve)) : Promise.resolve(room);
  }

  reset(): void {
    this.isReady = true;
    this.refusal = null;
    this.script = null;
    this.startCount = 0;
    this.#rooms.length = 0;
  }
}

/** What its metrics were told. */
export interface Observed {
  responded: [string, number][];
  rejected: string[];
  firstTokens: number;
  laterTokens: number;
  constrained: string[];
  finished: Parameters<RequestObserver['finished']>[0][];
}

/** An app on a free port, its rooms, and what its metrics were told. */
export async function listen(limits: Partial<HttpLimits> = {}, options: Partial<AppOptions> = {}) {
  const rooms = new ScriptedRooms();
  const observed: Observed = {
    responded: [],
    rejected: [],
    firstTokens: 0,
    laterTokens: 0,
    constrained: [],
    finished: [],
  };
  const responses: (() => void)[] = [];
  const app = createApp({
    rooms,
    tokenizer,
    chat,
    modelId: 'nano',
    contextLength,
    limits: { ...defaultHttpLimits, ...limits },
    apiKeys: [],
    version: '0.0.0',
    fleet: () => [],
    capacity: () => ({ running: 8, waiting: 8 }),
    log: pino({ level: 'silent' }),
    gate: createAdminGate('test-key'),
    debugPage: () => Promise.reject(new Error('asked for by no test here')),
    flushCache: () => Promise.resolve(3),
    metricsText: () => Promise.resolve('handoff_up 1\n'),
    observe: {
      responded(route, status) {
        observed.responded.push([route, status]);
        for (const resolve of responses.splice(0)) resolve();
      },
      rejected: (code) => observed.rejected.push(code),
      firstToken: () => (observed.firstTokens += 1),
      betweenTokens: () => (observed.laterTokens += 1),
      constrained: (outcome) => observed.constrained.push(outcome),
      finished: (request) => observed.finished.push(request),
    },
    ...options,
  });
  await app.listen({ host: '127.0.0.1', port: 0 });
  const { port } = app.server.address() as AddressInfo;
  /** Resolves when the next HTTP exchange is over. */
  const nextResponse = () => new Promise<void>((resolve) => responses.push(resolve));
  return { app, rooms, observed, nextResponse, port, url: `http://127.0.0.1:${port}` };
}
