/**
 * Clients that leave and workers that die, for minutes: `npm run soak`. One JSON line at the end; exit code 1 if it
 * names a fault.
 *
 * Closed loops of clients ask a cluster of its own for answers that are known (test/data/nano-samples.jsonl, greedy). A
 * share of them leaves at a random moment; a worker, prefill and decode by turns, is killed every so often and started
 * again. Required: every completed answer is the known one, every other request was told why or cut by its client,
 * nothing is held at the end, the router's descriptors and memory are flat, no process died of itself, and the last
 * minutes are as fast as the first.
 *
 *   npm run soak -- [--minutes 10] [--abort-share 0.5] [--kill-every 30s] [--clients 8] [--prefill 1] [--decode 1]
 *                   [--seed 1]
 */
import { readFileSync } from 'node:fs';
import { readMetrics, sumOf, untilMetrics } from '../test/support/cluster.ts';
import { createPrng } from '../test/support/prng.ts';
import { unsettled, untilQuiet } from '../test/support/quiet.ts';
import { startSplitCluster, untilUp, type Seat } from '../test/support/split-cluster.ts';
import { openCompletion, ServerError } from '../test/support/stream.ts';
import { hundredths, quantile, surroundings } from './measurement.ts';
import { parseCommandLine, positive, refuse, within } from './command-line.ts';

const HELP = `
npm run soak [-- OPTIONS]

  --minutes N        how long (default 10)
  --clients N        requests at a time (default 8)
  --abort-share N    of the requests, cut by their client (default 0.5)
  --kill-every TIME  a worker is killed so often (default 30s)
  --prefill N        prefill workers (default 1)
  --decode N         decode workers (default 1)
  --seed N           (default 1)`;

const { values: options } = parseCommandLine(HELP, {
  options: {
    minutes: { type: 'string', default: '10' },
    'abort-share': { type: 'string', default: '0.5' },
    'kill-every': { type: 'string', default: '30s' },
    clients: { type: 'string', default: '8' },
    prefill: { type: 'string', default: '1' },
    decode: { type: 'string', default: '1' },
    seed: { type: 'string', default: '1' },
  },
});
const durationMs = within('--minutes', options.minutes, { min: 0.1, max: 100_000 }) * 60_000;
const abortShare = within('--abort-share', options['abort-share'], { min: 0, max: 0.99 });
const killEveryMs = millisecondsOf(options['kill-every']);
const seed = positive('--seed', options.seed);

/** First and last windows that are compared: three minutes of ten, less of a shorter soak. */
const WINDOW_MS = Math.min(180_000, durationMs / 3);
/** Throughput is counted in pieces so long, and the median piece of a window is what counts. */
const BUCKET_MS = Math.min(10_000, WINDOW_MS / 3);
/** The router is looked at so often. */
const LOOK_MS = Math.min(5000, BUCKET_MS);
/** A request that has no end by then hangs. */
const HANG_MS = 90_000;
/** What is still held so long after the last request has leaked. */
const QUIET_MS = 30_000;
/** Idle connections of clients that are gone are closed by then. */
const CLOSE_MS = 15_000;
/** The last window against the first. */
const LEAST_THROUGHPUT = 0.85;
const MOST_GROWTH = 1.05;
/** Longest time that a refused client waits before it asks again. */
const BACKOFF_MS = 500;
/** Messages of faults that the summary repeats. */
const SHOWN = 5;

interface KnownAnswer {
  readonly prompt_ids: number[];
  readonly output_ids: number[];
  readonly output_text: string;
}

const answers = readFileSync(new URL('../test/data/nano-samples.jsonl', import.meta.url), 'utf8')
  .trim()
  .split('\n')
  .map((line) => JSON.parse(line) as KnownAnswer);

/** What the clients know. Every request is in exactly one of the first four. */
const ledger = { completed: 0, cut: 0, refused: 0, failed: 0, tokens: 0 };
/** How often a code was told. */
const codes: Record<string, number> = {};
/** Everything that must not happen, in words. */
const faults: string[] = [];
/** When each answer was complete and what it had, from the start of the load. */
const completions: { atMs: number; tokens: number }[] = [];
/** The router under load, garbage collected. */
const looks: { atMs: number; fds: number; residentBytes: number }[] = [];
/** From a kill until the worker and the router serve again. */
const recoveriesMs: number[] = [];

const cluster = await startSplitCluster([], {
  prefills: Number(options.prefill),
  decodes: Number(options.decode),
  env: {
    NODE_OPTIONS: `--expose-gc --import ${new URL('../test/support/collect-garbage.mjs', import.meta.url).href}`,
  },
});
for (const signal of ['SIGINT', 'SIGTERM'] as const) {
  process.once(signal, () => void cluster.stop().finally(() => process.exit(1)));
}
try {
  process.exitCode = await main();
} finally {
  await cluster.stop();
}

async function main(): Promise<number> {
  await askAll(); // pipelines are compiled, and all answers right before anything is done to the cluster
  await untilQuiet(() => cluster.samples(), QUIET_MS);
  const fdsBefore = await restingFds(Infinity);
  const startMs = performance.now();
  const elapsedMs = (): number => performance.now() - startMs;
  const ended = new AbortController();
  setTimeout(() => ended.abort(), durationMs);
  const loops = [
    ...Array.from({ length: Number(options.clients) }, (_, index) => runClient(index, elapsedMs, ended.signal)),
    killWorkers(ended.signal),
    watchRouter(elapsedMs, ended.signal),
  ];
  await Promise.all(loops);
  const seats: readonly Seat[] = [cluster.router, ...cluster.prefills, ...cluster.decodes];
  await untilUp(seats);
  const samples = await settle();
  const residue = unsettled(samples);
  for (const line of residue) faults.push(`residue: ${line}`);
  await askAll(); // and they still are
  const fdsAfter = await restingFds(fdsBefore);
  if (fdsAfter > fdsBefore) faults.push(`the router has ${fdsAfter} descriptors, it had ${fdsBefore}`);

  const first = medianRate(0);
  const last = medianRate(durationMs - WINDOW_MS);
  const throughputShare = hundredths(last / first);
  if (!(throughputShare >= LEAST_THROUGHPUT)) faults.push(`throughput fell to ${throughputShare} of the first minutes`);
  // The first window warms up: compiled code and caches are paid for once.
  const early = medianResident(Math.min(WINDOW_MS, durationMs - 2 * WINDOW_MS));
  const late = medianResident(durationMs - WINDOW_MS);
  const memoryGrowth = hundredths(late / early);
  if (!(memoryGrowth <= MOST_GROWTH)) faults.push(`the router's memory grew to ${memoryGrowth} of what it was`);
  if (ledger.completed === 0) faults.push('no answer was completed');

  const line = {
    soak: faults.length === 0 ? 'ok' : 'failed',
    ...surroundings(samples),
    model: cluster.model,
    minutes: Number(options.minutes),
    abortShare,
    killEverySeconds: killEveryMs / 1000,
    clients: Number(options.clients),
    workers: { prefill: Number(options.prefill), decode: Number(options.decode) },
    seed,
    requests: ledger,
    told: codes,
    kills: recoveriesMs.length,
    recoveryMs: { median: Math.round(quantile(recoveriesMs, 0.5)), max: Math.round(quantile(recoveriesMs, 1)) },
    tokensPerSecond: { first: hundredths(first), last: hundredths(last), share: throughputShare },
    router: {
      fds: { before: fdsBefore, after: fdsAfter },
      residentMiB: { early: hundredths(early / 2 ** 20), late: hundredths(late / 2 ** 20), growth: memoryGrowth },
    },
    faultCount: faults.length,
    faults: faults.slice(0, SHOWN),
  };
  process.stdout.write(`${JSON.stringify(line)}\n`);
  return faults.length === 0 ? 0 : 1;
}

/** Ask for every known answer, a few at a time. */
async function askAll(): Promise<void> {
  const rest = [...answers];
  const ask = async (): Promise<void> => {
    for (let answer = rest.pop(); answer !== undefined; answer = rest.pop()) {
      const text = await open(answer).text.catch((error: unknown) => String(error));
      check(answer, text, 'without faults');
    }
  };
  await Promise.all(Array.from({ length: 8 }, ask));
}

function open({ prompt_ids: prompt, output_ids: ids }: KnownAnswer): ReturnType<typeof openCompletion> {
  return openCompletion(cluster.url, cluster.model, { prompt, maxTokens: ids.length });
}

function check(answer: KnownAnswer, text: string, when: string): void {
  if (text === answer.output_text) return;
  faults.push(`${when}, ${JSON.stringify(text)} instead of ${JSON.stringify(answer.output_text)}`);
}

/** One client: ask, read or leave, ask again. */
async function runClient(index: number, elapsedMs: () => number, ended: AbortSignal): Promise<void> {
  const random = createPrng(seed * 1000 + index);
  /** How long whole answers took lately; whoever leaves does it within that time. */
  let usualMs = 500;
  while (!ended.aborted) {
    const answer = answers[Math.floor(random() * answers.length)]!;
    const leaves = random() < abortShare;
    const cutAfterMs = random() * usualMs;
    const startMs = performance.now();
    const stream = open(answer);
    let isCut = false;
    let hangs = false;
    const leave = (): void => {
      isCut = true;
      stream.cut();
    };
    const timer = setTimeout(leaves ? leave : () => ((hangs = true), leave()), leaves ? cutAfterMs : HANG_MS);
    try {
      const text = await stream.text;
      check(answer, text, `request at ${Math.round(elapsedMs() / 1000)} s`);
      ledger.completed++;
      ledger.tokens += answer.output_ids.length;
      completions.push({ atMs: elapsedMs(), tokens: answer.output_ids.length });
      usualMs = 0.8 * usualMs + 0.2 * (performance.now() - startMs);
    } catch (error) {
      await noteEnd(error, isCut, hangs, ended);
    } finally {
      clearTimeout(timer);
    }
  }
}

async function noteEnd(error: unknown, isCut: boolean, hangs: boolean, ended: AbortSignal): Promise<void> {
  if (hangs) faults.push(`a request had no end after ${HANG_MS / 1000} s`);
  if (isCut) {
    ledger.cut++;
    return;
  }
  if (!(error instanceof ServerError)) {
    // The router never dies: a broken connection or a stream without an end is a fault.
    ledger.failed++;
    faults.push(`a request ended with ${String(error)}`);
    return;
  }
  const code = `${error.status} ${error.code}`;
  codes[code] = (codes[code] ?? 0) + 1;
  if (error.status === 503) ledger.refused++;
  else ledger.failed++;
  const retryMs = Number(error.retryAfter ?? 0) * 1000;
  await pause(Math.min(BACKOFF_MS, Math.max(50, retryMs)), ended);
}

/** Kill a worker every so often, prefill and decode by turns, and start it again. */
async function killWorkers(ended: AbortSignal): Promise<void> {
  const victims: Seat[] = [];
  const count = Math.max(cluster.prefills.length, cluster.decodes.length);
  for (let i = 0; i < count; i++) {
    victims.push(cluster.prefills[i % cluster.prefills.length]!, cluster.decodes[i % cluster.decodes.length]!);
  }
  let dueMs = performance.now();
  for (let turn = 0; ; turn++) {
    dueMs += killEveryMs;
    await pause(dueMs - performance.now(), ended);
    if (ended.aborted) return;
    const victim = victims[turn % victims.length]!;
    for (const { process: alive, url } of [cluster.router, ...victims]) {
      if (alive.child.exitCode !== null || alive.child.signalCode !== null) {
        throw new Error(`${url} died of itself:\n${alive.output().slice(-2000)}`);
      }
    }
    const startMs = performance.now();
    await victim.kill();
    victim.start();
    await untilUp([victim, cluster.router]);
    recoveriesMs.push(performance.now() - startMs);
    process.stderr.write(`kill ${turn + 1}: ${summary()}\n`);
  }
}

function summary(): string {
  const { completed, cut, refused, failed } = ledger;
  const back = Math.round(recoveriesMs.at(-1)!);
  return `a worker back in ${back} ms; ${completed} completed, ${cut} cut, ${refused} refused, ${failed} failed, ${faults.length} faults`;
}

/** Descriptors and memory of the router, garbage collected: both are turns of its loop, the signal's comes first. */
async function lookAtRouter(): Promise<{ fds: number; residentBytes: number } | null> {
  cluster.router.process.child.kill('SIGUSR2');
  const samples = await readMetrics(cluster.router.url, AbortSignal.timeout(2000)).catch(() => null);
  if (samples === null) return null;
  const labels = { engine_type: 'router' };
  return {
    fds: sumOf(samples, 'process_open_fds', labels),
    residentBytes: sumOf(samples, 'process_resident_memory_bytes', labels),
  };
}

async function watchRouter(elapsedMs: () => number, ended: AbortSignal): Promise<void> {
  while (!ended.aborted) {
    const look = await lookAtRouter();
    if (look !== null) looks.push({ atMs: elapsedMs(), ...look });
    await pause(LOOK_MS, ended);
  }
}

/** Descriptors of the router at rest: the least seen until there are at most `wanted`, or idle sockets had their time. */
async function restingFds(wanted: number): Promise<number> {
  let least = Infinity;
  const endMs = performance.now() + CLOSE_MS;
  while (performance.now() < endMs) {
    least = Math.min(least, (await lookAtRouter())?.fds ?? Infinity);
    if (least <= wanted && wanted !== Infinity) break;
    await pause(200);
  }
  return least;
}

/** Wait until nothing is held anywhere, and return the last pages even if that never comes. */
async function settle(): Promise<Awaited<ReturnType<typeof cluster.samples>>> {
  let samples = await cluster.samples();
  await untilMetrics(
    async () => (samples = await cluster.samples()),
    QUIET_MS,
    (page) => unsettled(page).length === 0,
  ).catch(() => {}); // what is left is reported as residue
  return samples;
}

/** Tokens of completed answers per second in the median piece of the window that begins at `fromMs`. */
function medianRate(fromMs: number): number {
  const buckets = Array.from({ length: Math.round(WINDOW_MS / BUCKET_MS) }, () => 0);
  for (const { atMs, tokens } of completions) {
    const bucket = Math.floor((atMs - fromMs) / BUCKET_MS);
    if (bucket >= 0 && bucket < buckets.length) buckets[bucket]! += tokens;
  }
  return quantile(buckets, 0.5) / (BUCKET_MS / 1000);
}

function medianResident(fromMs: number): number {
  const within = looks.filter(({ atMs }) => atMs >= fromMs && atMs < fromMs + WINDOW_MS);
  return quantile(
    within.map(({ residentBytes }) => residentBytes),
    0.5,
  );
}

/** `30s`, `2m`, `500ms`. */
function millisecondsOf(text: string): number {
  const match = /^(\d+(?:\.\d+)?)(ms|s|m)$/.exec(text);
  if (match === null) refuse(`--kill-every: expected a time like 30s, found "${text}"`);
  return Number(match[1]) * { ms: 1, s: 1000, m: 60_000 }[match[2] as 'ms' | 's' | 'm'];
}

/** Wait, but not beyond the end of the soak. */
function pause(ms: number, ended?: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    if (ended?.aborted) return resolve();
    const finish = (): void => {
      clearTimeout(timer);
      ended?.removeEventListener('abort', finish);
      resolve();
    };
    const timer = setTimeout(finish, ms);
    ended?.addEventListener('abort', finish);
  });
}
