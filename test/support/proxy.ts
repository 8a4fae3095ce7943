/**
 * A TCP proxy between two real processes, for what a network does: hold bytes back, flip one, cut the line.
 *
 * It listens on the same ports as the worker it stands before, on another loopback host, so a worker that advertises
 * that host is reached through it.
 */
import { connect, createServer, type Server, type Socket } from 'node:net';
import { once } from 'node:events';

/** One proxied port. */
export interface Proxy {
  /** Bytes forwarded so far in the worker-to-client direction. */
  forwardedBytes(): number;
  /** Hold everything the worker sends until `resume`. */
  pause(): void;
  resume(): void;
  /** Flip one bit in the next piece of at least `minBytes` that the worker sends. Resolves when it was sent on. */
  flipOneBit(minBytes: number): Promise<void>;
  /** Reset every connection; new ones are accepted. */
  cut(): void;
  close(): Promise<void>;
}

/** Listen on `listenHost:port` and forward to `targetHost:port`. */
export async function startProxy(args: { listenHost: string; targetHost: string; port: number }): Promise<Proxy> {
  const pairs = new Set<{ client: Socket; worker: Socket }>();
  let paused = false;
  let forwarded = 0;
  let flip: { minBytes: number; done: () => void } | null = null;

  const server: Server = createServer((client) => {
    const worker = connect(args.port, args.targetHost);
    const pair = { client, worker };
    pairs.add(pair);
    const drop = (): void => {
      pairs.delete(pair);
      client.destroy();
      worker.destroy();
    };
    for (const socket of [client, worker]) {
      socket.setNoDelay(true);
      socket.on('close', drop);
      socket.on('error', drop); // a reset at either end is the point of this proxy
    }
    client.on('data', (bytes) => worker.write(bytes));
    worker.on('data', (bytes: Buffer) => {
      if (flip !== null && bytes.length >= flip.minBytes) {
        // The middle of a large piece is payload: frame headers are a few hundred bytes at its start.
        const middle = bytes.length >> 1;
        bytes[middle] = bytes[middle]! ^ 1;
        flip.done();
        flip = null;
      }
      forwarded += bytes.length;
      client.write(bytes);
    });
    if (paused) worker.pause();
  });
  server.listen(args.port, args.listenHost);
  await once(server, 'listening');

  return {
    forwardedBytes: () => forwarded,
    pause() {
      paused = true;
      for (const { worker } of pairs) worker.pause();
    },
    resume() {
      paused = false;
      for (const { worker } of pairs) worker.resume();
    },
    flipOneBit: (minBytes) => new Promise((done) => (flip = { minBytes, done })),
    cut() {
      for (const { client, worker } of pairs) {
        client.resetAndDestroy();
        worker.resetAndDestroy();
      }
    },
    async close() {
      for (const { client, worker } of pairs) {
        client.destroy();
        worker.destroy();
      }
      server.close();
      await once(server, 'close');
    },
  };
}

/** A TCP port that is free now on all loopback hosts. */
export async function freePort(): Promise<number> {
  const server = createServer();
  server.listen(0, '0.0.0.0');
  await once(server, 'listening');
  const address = server.address();
  server.close();
  await once(server, 'close');
  if (address === null || typeof address === 'string') throw new Error('no port');
  return address.port;
}
