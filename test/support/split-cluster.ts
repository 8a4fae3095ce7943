/** A cluster whose processes are started one by one, can be killed and started again, with a proxy on every link. */
import { once } from 'node:events';
import { readMetrics, startHandoff, type Handoff, type Sample } from './cluster.ts';
import { freePort, startProxy, type Proxy } from './proxy.ts';

/** One process: its ports stay when it is started again. */
export interface Seat {
  /** Its own HTTP. */
  readonly url: string;
  /** The process that sits there now. */
  process: Handoff;
  /** SIGKILL, and wait until it is gone. */
  kill(): Promise<void>;
  /** Start it anew with the same arguments (and `more`), on the same ports. Does not wait until it is ready. */
  start(more?: readonly string[]): void;
}

/** A worker, with the proxy on the router's control link to it. */
export interface WorkerSeat extends Seat {
  readonly routerLink: Proxy;
  /** Where the worker itself listens for routers, past the proxy. */
  readonly controlAddress: string;
}

/** A prefill worker: decode workers reach it through these two. */
export interface PrefillSeat extends WorkerSeat {
  /** Control of transfers, both ways. */
  readonly control: Proxy;
  /** KV units, END and ABORT of prefill. */
  readonly data: Proxy;
}

/** Router, prefill and decode workers started alone. */
export interface SplitCluster {
  readonly url: string;
  readonly model: string;
  readonly router: Seat;
  readonly prefills: readonly PrefillSeat[];
  readonly decodes: readonly WorkerSeat[];
  /** Of the first prefill worker. */
  readonly control: Proxy;
  readonly data: Proxy;
  /** The series of every process from its own page. One that is down or does not answer within a second has none. */
  samples(): Promise<Sample[]>;
  stop(): Promise<void>;
}

/** How many workers, and what only one role is told. */
export interface SplitOptions {
  readonly prefills?: number;
  readonly decodes?: number;
  readonly router?: readonly string[];
  readonly prefill?: readonly string[];
  readonly decode?: readonly string[];
  readonly env?: Readonly<Record<string, string>>;
}

const WORKER_HOST = '127.0.0.2';
const PROXY_HOST = '127.0.0.3';
const START_TIMEOUT_MS = 180_000;

/** Start everything on free ports. `args` go to every role. */
export async function startSplitCluster(
  args: readonly string[] = [],
  options: SplitOptions = {},
): Promise<SplitCluster> {
  const proxies: Proxy[] = [];
  const seats: Seat[] = [];
  const openProxy = async (port: number): Promise<Proxy> => {
    const proxy = await startProxy({ listenHost: PROXY_HOST, targetHost: WORKER_HOST, port });
    proxies.push(proxy);
    return proxy;
  };
  const sit = (httpPort: number, command: readonly string[]): Seat => {
    const seat = createSeat(`http://127.0.0.1:${httpPort}`, command, options.env ?? {});
    seats.push(seat);
    return seat;
  };

  async function startWorker(role: 'prefill' | 'decode', own: readonly string[]): Promise<WorkerSeat> {
    const [port, controlPort] = [await freePort(), await freePort()];
    const routerLink = await openProxy(controlPort);
    const controlAddress = `tcp://${WORKER_HOST}:${controlPort}`;
    const seat = sit(port, [role, '--port', String(port), '--control', controlAddress, ...own, ...args]);
    return Object.assign(seat, { routerLink, controlAddress });
  }

  async function startPrefill(): Promise<PrefillSeat> {
    const [transferPort, dataPort] = [await freePort(), await freePort()];
    const [control, data] = [await openProxy(transferPort), await openProxy(dataPort)];
    const seat = await startWorker('prefill', [
      ...['--transfer', `tcp://${WORKER_HOST}:${transferPort}`],
      ...['--transfer-data', `tcp://${WORKER_HOST}:${dataPort}`],
      ...['--advertise', PROXY_HOST],
      ...(options.prefill ?? []),
    ]);
    return Object.assign(seat, { control, data });
  }

  const stop = async (): Promise<void> => {
    await Promise.all(seats.map(({ process }) => process.stop()));
    await Promise.all(proxies.map((proxy) => proxy.close()));
  };
  try {
    const prefills: PrefillSeat[] = [];
    const decodes: WorkerSeat[] = [];
    for (let i = 0; i < (options.prefills ?? 1); i++) prefills.push(await startPrefill());
    for (let i = 0; i < (options.decodes ?? 1); i++) decodes.push(await startWorker('decode', options.decode ?? []));
    const routerPort = await freePort();
    const linkOf = ({ controlAddress }: WorkerSeat): string => controlAddress.replace(WORKER_HOST, PROXY_HOST);
    const router = sit(routerPort, [
      ...['router', '--port', String(routerPort)],
      ...prefills.flatMap((seat) => ['--prefill-worker', linkOf(seat)]),
      ...decodes.flatMap((seat) => ['--decode-worker', linkOf(seat)]),
      ...(options.router ?? []),
      ...args,
    ]);
    await untilUp(seats);
    await untilAnswering(router.url, seats);
    const models = (await (await fetch(`${router.url}/v1/models`)).json()) as { data: { id: string }[] };
    const { control, data } = prefills[0]!;
    const samples = async (): Promise<Sample[]> => {
      const pages = await Promise.all(seats.map(readOwnPage));
      // The router's page repeats what its workers have, but leaves out one that takes over 50 ms.
      const own = pages.map((page, index) => (seats[index] === router ? page.filter(isOfRouter) : page));
      return own.flat();
    };
    return { url: router.url, model: models.data[0]!.id, router, prefills, decodes, control, data, samples, stop };
  } catch (error) {
    await stop();
    throw error;
  }
}

/** Ask `/health` of every process until it answers 200. */
export async function untilUp(seats: readonly Seat[]): Promise<void> {
  for (const seat of seats) await untilAnswering(seat.url, [seat]);
}

function createSeat(url: string, command: readonly string[], env: Readonly<Record<string, string>>): Seat {
  const seat: Seat = {
    url,
    process: startHandoff(command, env),
    async kill() {
      const { child } = seat.process;
      if (child.exitCode !== null || child.signalCode !== null) return;
      const gone = once(child, 'exit');
      child.kill('SIGKILL');
      await gone;
    },
    start(more = []) {
      seat.process = startHandoff([...command, ...more], env);
    },
  };
  return seat;
}

/** A stopped process accepts the connection and says nothing. */
function readOwnPage({ url }: Seat): Promise<Sample[]> {
  return readMetrics(url, AbortSignal.timeout(1000)).catch(() => []);
}

function isOfRouter({ labels }: Sample): boolean {
  return labels.engine_type === 'router';
}

/** The router may listen long before its workers have loaded. */
async function untilAnswering(url: string, seats: readonly Seat[]): Promise<void> {
  const endMs = performance.now() + START_TIMEOUT_MS;
  for (;;) {
    const ok = await fetch(`${url}/health`).then(
      (response) => response.ok,
      () => false, // not listening yet
    );
    if (ok) return;
    const ended = seats.find(({ process }) => process.child.exitCode !== null || process.child.signalCode !== null);
    if (ended || performance.now() > endMs) {
      throw new Error(
        `the cluster did not become healthy:\n${seats.map(({ process }) => process.output()).join('\n---\n')}`,
      );
    }
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}
