/** A cluster whose processes are started one by one, with a proxy on the transfer link. */
import { startHandoff, type Handoff } from './cluster.ts';
import { freePort, startProxy, type Proxy } from './proxy.ts';

/** Router, prefill and decode started alone; KV units pass through `data`, transfer control through `control`. */
export interface SplitCluster {
  readonly url: string;
  readonly model: string;
  readonly router: Handoff;
  readonly prefill: Handoff;
  readonly decode: Handoff;
  readonly control: Proxy;
  readonly data: Proxy;
  stop(): Promise<void>;
}

const WORKER_HOST = '127.0.0.2';
const PROXY_HOST = '127.0.0.3';

/** Start everything on free ports. `args` go to every role. */
export async function startSplitCluster(args: readonly string[] = []): Promise<SplitCluster> {
  const [transferPort, dataPort, prefillControl, decodeControl, routerPort, prefillPort, decodePort] = [
    await freePort(),
    await freePort(),
    await freePort(),
    await freePort(),
    await freePort(),
    await freePort(),
    await freePort(),
  ];
  const control = await startProxy({ listenHost: PROXY_HOST, targetHost: WORKER_HOST, port: transferPort });
  const data = await startProxy({ listenHost: PROXY_HOST, targetHost: WORKER_HOST, port: dataPort });
  const prefill = startHandoff([
    'prefill',
    ...['--port', String(prefillPort)],
    ...['--control', `tcp://127.0.0.1:${prefillControl}`],
    ...['--transfer', `tcp://${WORKER_HOST}:${transferPort}`],
    ...['--transfer-data', `tcp://${WORKER_HOST}:${dataPort}`],
    ...['--advertise', PROXY_HOST],
    ...args,
  ]);
  const decode = startHandoff([
    'decode',
    '--port',
    String(decodePort),
    '--control',
    `tcp://127.0.0.1:${decodeControl}`,
    ...args,
  ]);
  const router = startHandoff([
    'router',
    ...['--port', String(routerPort)],
    ...['--prefill-worker', `tcp://127.0.0.1:${prefillControl}`],
    ...['--decode-worker', `tcp://127.0.0.1:${decodeControl}`],
    ...args,
  ]);
  const stop = async (): Promise<void> => {
    await Promise.all([router.stop(), prefill.stop(), decode.stop()]);
    await Promise.all([control.close(), data.close()]);
  };
  const url = `http://127.0.0.1:${routerPort}`;
  try {
    await untilHealthy(url, [router, prefill, decode]);
    const models = (await (await fetch(`${url}/v1/models`)).json()) as { data: { id: string }[] };
    return { url, model: models.data[0]!.id, router, prefill, decode, control, data, stop };
  } catch (error) {
    await stop();
    throw error;
  }
}

const START_TIMEOUT_MS = 180_000;

/** Ask `/health` until it answers 200: the router may be up long before its workers have loaded. */
async function untilHealthy(url: string, processes: readonly Handoff[]): Promise<void> {
  const endMs = performance.now() + START_TIMEOUT_MS;
  for (;;) {
    const ok = await fetch(`${url}/health`).then(
      (response) => response.ok,
      () => false, // not listening yet
    );
    if (ok) return;
    const ended = processes.find(({ child }) => child.exitCode !== null || child.signalCode !== null);
    if (ended || performance.now() > endMs) {
      throw new Error(
        `the cluster did not become healthy:\n${processes.map((process) => process.output()).join('\n---\n')}`,
      );
    }
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}
