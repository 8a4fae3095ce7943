/** The cluster that a bench measures, started here or running elsewhere, and its counters beside what clients know. */
import { readMetrics, sumOf, type Sample } from '../test/support/cluster.ts';
import { startSplitCluster } from '../test/support/split-cluster.ts';

/** Processes to measure. */
export interface Target {
  readonly url: string;
  readonly model: string;
  /** The link that KV pages take; null: out of reach. */
  readonly link: { pause(): void; resume(): void } | null;
  samples(): Promise<Sample[]>;
  stop(): Promise<void>;
}

/**
 * Start a router and two workers with `flags` on free ports; or, with `url`, take what runs there and leave it running.
 * `workers`: the URL of each of its prefill and decode workers.
 */
export async function openTarget(
  given: { url: string | undefined; workers: readonly string[] },
  flags: readonly string[],
): Promise<Target> {
  if (given.url === undefined) {
    const cluster = await startSplitCluster(flags);
    const { url, model, data } = cluster;
    return stoppedBySignals({ url, model, link: data, samples: () => cluster.samples(), stop: () => cluster.stop() });
  }
  const { url, workers } = given;
  if (workers.length < 2) throw new Error('--url needs the --worker-url of each prefill and decode worker');
  const models = (await (await fetch(`${url}/v1/models`)).json()) as { data: { id: string }[] };
  const samples = async (): Promise<Sample[]> => {
    const [own, ...others] = await Promise.all([url, ...workers].map((each) => readMetrics(each)));
    return [...own!.filter(({ labels }) => labels.engine_type === 'router'), ...others.flat()];
  };
  return { url, model: models.data[0]!.id, link: null, samples, stop: () => Promise.resolve() };
}

function stoppedBySignals(target: Target): Target {
  for (const signal of ['SIGINT', 'SIGTERM'] as const) {
    process.once(signal, () => void target.stop().finally(() => process.exit(1)));
  }
  return target;
}

/** The router's counters that a client can check. */
export interface Counts {
  readonly ended: number;
  readonly aborted: number;
  readonly abortsByReason: number;
  readonly length: number;
  readonly stop: number;
  readonly cancelled: number;
  readonly failed: number;
  readonly rejected: number;
}

/** What the counters say now. */
export function countsOf(samples: readonly Sample[]): Counts {
  // A counter with labels has no series before its first event.
  const sum = (name: string, labels: Readonly<Record<string, string>> = {}): number =>
    samples.some((sample) => sample.name === name && Object.entries(labels).every(([k, v]) => sample.labels[k] === v))
      ? sumOf(samples, name, labels)
      : 0;
  const outcome = (name: string): number => sum('handoff_request_outcomes_total', { outcome: name });
  return {
    ended: sum('sglang_num_requests_total'),
    aborted: sum('sglang_num_aborted_requests_total'),
    abortsByReason: sum('handoff_aborts_total'),
    length: outcome('length'),
    stop: outcome('stop'),
    cancelled: outcome('cancelled'),
    failed: outcome('failed'),
    rejected: sum('handoff_rejections_total'),
  };
}

/** By how much the counters grew, beside what the clients counted: once if both agree, else both. */
export function compareLedgers(
  grown: { before: Counts; after: Counts },
  clients: Counts,
): { agrees: boolean; line: object } {
  const { before, after } = grown;
  const server = Object.fromEntries(
    Object.entries(after).map(([name, value]) => [name, value - before[name as keyof Counts]]),
  ) as unknown as Counts;
  const names = Object.keys(server) as (keyof Counts)[];
  const agrees = names.every((name) => server[name] === clients[name]);
  return { agrees, line: agrees ? { agrees, ...server } : { agrees, server, clients } };
}
