/**
 * A TCP proxy between two real processes, for what a network does: delay bytes, narrow the line, hold bytes back, flip
 * one, cut the connection, or keep it open and let nothing through.
 *
 * It listens on the same ports as the worker it stands before, on another loopback host, so a worker that advertises
 * that host is reached through it. Bytes are never lost on a connection that lives on: TCP does not do that either.
 */
import { connect, createServer, type Server, type Socket } from 'node:net';
import { once } from 'node:events';

/** Which way bytes go. The worker is the side that listens. */
export type Direction = 'fromWorker' | 'toWorker';

/** One proxied port. */
export interface Proxy {
  /** Bytes forwarded so far, from the worker unless told otherwise. */
  forwardedBytes(direction?: Direction): number;
  /** Hold everything that goes in this direction (from the worker unless told otherwise) until `resume`. */
  pause(direction?: Direction): void;
  /** Forward `bytes` more from the worker, then `pause`. Resolves when it is paused. */
  pauseAfter(bytes: number): Promise<void>;
  /** Let what was held go on, in both directions. */
  resume(): void;
  /** From now on each byte arrives so much later, and no more than so many in a second, in both directions. */
  shape(line: { latencyMs?: number; bytesPerSecond?: number }): void;
  /** Flip one bit in the next piece of at least `minBytes` that the worker sends. Resolves when it was sent on. */
  flipOneBit(minBytes: number): Promise<void>;
  /**
   * Nothing passes any more and neither end is told: connections stay open, new ones are accepted, what is closed at
   * one end stays open at the other. Until `heal`.
   */
  silence(): void;
  /** End `silence`: its connections are reset, new ones work. */
  heal(): void;
  /** Reset every connection; new ones are accepted. */
  cut(): void;
  close(): Promise<void>;
}

/** More than this waits at its source. */
const MAX_QUEUED_BYTES = 1 << 16;

/** One direction of all connections of a proxy. */
interface Lane {
  paused: boolean;
  /** Bytes to forward before pausing; null: no such limit. */
  allowance: { bytes: number; done: () => void } | null;
  forwarded: number;
  /** When the narrow line will have sent what was put on it. */
  freeAtMs: number;
}

/** One direction of one connection. */
interface Pipe {
  pump(): void;
  stop(): void;
}

interface Pair {
  readonly client: Socket;
  readonly worker: Socket;
  readonly pipes: Pipe[];
  silent: boolean;
}

/** Listen on `listenHost:port` and forward to `targetHost:port`. */
export async function startProxy(args: { listenHost: string; targetHost: string; port: number }): Promise<Proxy> {
  const pairs = new Set<Pair>();
  const lanes = { fromWorker: createLane(), toWorker: createLane() };
  const line = { latencyMs: 0, bytesPerSecond: Infinity };
  let isSilent = false;
  let flip: { minBytes: number; done: () => void } | null = null;

  function openPipe(lane: Lane, source: Socket, sink: Socket, pair: Pair): Pipe {
    const queue: { bytes: Buffer; dueMs: number }[] = [];
    let queuedBytes = 0;
    let timer: NodeJS.Timeout | null = null;

    const accept = (bytes: Buffer): void => {
      if (pair.silent) return;
      const nowMs = performance.now();
      lane.freeAtMs = Math.max(lane.freeAtMs, nowMs) + (bytes.length / line.bytesPerSecond) * 1000;
      queue.push({ bytes, dueMs: lane.freeAtMs + line.latencyMs });
      queuedBytes += bytes.length;
      pump();
    };
    const pump = (): void => {
      if (timer !== null) clearTimeout(timer);
      timer = null;
      while (queue.length > 0 && !lane.paused && !pair.silent) {
        const head = queue[0]!;
        const waitMs = head.dueMs - performance.now();
        if (waitMs > 0) {
          timer = setTimeout(pump, waitMs);
          break;
        }
        forward(head);
      }
      // A full queue is felt by whoever sends, as a full line would be.
      if (queuedBytes > MAX_QUEUED_BYTES || lane.paused) source.pause();
      else source.resume();
    };
    const forward = (head: { bytes: Buffer }): void => {
      const { allowance } = lane;
      const count = Math.min(head.bytes.length, allowance?.bytes ?? Infinity);
      sink.write(head.bytes.subarray(0, count));
      lane.forwarded += count;
      queuedBytes -= count;
      if (count === head.bytes.length) queue.shift();
      else head.bytes = head.bytes.subarray(count);
      if (allowance === null) return;
      allowance.bytes -= count;
      if (allowance.bytes > 0) return;
      lane.allowance = null;
      lane.paused = true;
      allowance.done();
    };
    source.on('data', accept);
    return {
      pump,
      stop() {
        if (timer !== null) clearTimeout(timer);
        queue.length = 0;
      },
    };
  }

  function damage(bytes: Buffer): void {
    if (flip === null || bytes.length < flip.minBytes) return;
    // The middle of a large piece is payload: frame headers are a few hundred bytes at its start.
    const middle = bytes.length >> 1;
    bytes[middle] = bytes[middle]! ^ 1;
    flip.done();
    flip = null;
  }

  function remove(pair: Pair): void {
    pairs.delete(pair);
    for (const pipe of pair.pipes) pipe.stop();
  }

  function reset(pair: Pair): void {
    remove(pair);
    pair.client.resetAndDestroy();
    pair.worker.resetAndDestroy();
  }

  const server: Server = createServer((client) => {
    const worker = connect(args.port, args.targetHost);
    const pair: Pair = { client, worker, pipes: [], silent: isSilent };
    pairs.add(pair);
    const drop = (): void => {
      if (pair.silent) return; // the other end must not notice
      remove(pair);
      client.destroy();
      worker.destroy();
    };
    for (const socket of [client, worker]) {
      socket.setNoDelay(true);
      socket.on('close', drop);
      socket.on('error', drop); // a reset at either end is the point of this proxy
    }
    worker.on('data', damage); // before the pipe takes the bytes
    pair.pipes.push(openPipe(lanes.toWorker, client, worker, pair), openPipe(lanes.fromWorker, worker, client, pair));
    for (const pipe of pair.pipes) pipe.pump();
  });
  server.listen(args.port, args.listenHost);
  await once(server, 'listening');

  function pumpAll(): void {
    for (const pair of pairs) for (const pipe of pair.pipes) pipe.pump();
  }

  return {
    forwardedBytes: (direction = 'fromWorker') => lanes[direction].forwarded,
    pause(direction = 'fromWorker') {
      lanes[direction].paused = true;
      pumpAll();
    },
    pauseAfter(bytes) {
      return new Promise((done) => {
        lanes.fromWorker.allowance = { bytes, done };
      });
    },
    resume() {
      for (const lane of Object.values(lanes)) {
        lane.paused = false;
        lane.allowance = null;
      }
      pumpAll();
    },
    shape({ latencyMs = 0, bytesPerSecond = Infinity }) {
      Object.assign(line, { latencyMs, bytesPerSecond });
      for (const lane of Object.values(lanes)) lane.freeAtMs = 0;
    },
    flipOneBit: (minBytes) => new Promise((done) => (flip = { minBytes, done })),
    silence() {
      isSilent = true;
      for (const pair of pairs) pair.silent = true;
    },
    heal() {
      isSilent = false;
      for (const pair of [...pairs]) if (pair.silent) reset(pair);
    },
    cut() {
      for (const pair of [...pairs]) reset(pair);
    },
    async close() {
      for (const pair of [...pairs]) {
        remove(pair);
        pair.client.destroy();
        pair.worker.destroy();
      }
      server.close();
      await once(server, 'close');
    },
  };
}

function createLane(): Lane {
  return { paused: false, allowance: null, forwarded: 0, freeAtMs: 0 };
}

// Linux hands out ports from 32768 for outgoing connections: one of those, free now, may be taken before it is bound.
// Every process draws from a slice of its own, so that two test files at once do not draw the same.
const PORTS_BEGIN = 10_000;
const SLICE = 100;
const SLICES = 220;
let drawn = 0;

/** A TCP port that is free on all loopback hosts, and that nobody takes who does not ask for it by number. */
export async function freePort(): Promise<number> {
  for (; drawn < SLICE; drawn++) {
    const server = createServer();
    const port = PORTS_BEGIN + (process.pid % SLICES) * SLICE + drawn;
    const free = await new Promise<boolean>((resolve) => {
      server.once('error', () => resolve(false));
      server.listen(port, '0.0.0.0', () => resolve(true));
    });
    if (!free) continue;
    server.close();
    await once(server, 'close');
    drawn++;
    return port;
  }
  throw new Error(`no port left in this process's slice of ${SLICE}`);
}
