/**
 * How fast a cluster is clean after clients have left: `npm run bench:abort`. JSON lines on stdout, progress on stderr.
 *
 * `disconnect` lines: the time from closing the connections until every gauge is zero on every process. One request in
 * prefill or in decode and nothing else (`prefill`, `decode`); 32 rooms whose transfer a proxy holds, the link released
 * as the clients leave (`transfer`), or still held, where the credit set aside for it does not count (`held-transfer`).
 * Beside it the mean step (one forward pass) that ended in that time, which no abort can cut short, and the time between
 * two looks at the gauges, which bounds the resolution.
 *
 * `mass-abort` lines: 500 clients leave at once, whatever stage they are in, while others go on reading. The gaps between
 * tokens of those others: alone, before (with the crowd there), and during (from the moment it left until all is clean, a
 * second at least). At the end the
 * server's counters are compared with what the clients know.
 *
 * With `--url` (and `--worker-url` for each worker) a running cluster is measured instead of one started here; then there
 * is no proxy to hold a transfer and those two lines are left out. It must serve nobody else, and the mass abort needs
 * its `--max-queued-requests` to be large.
 */
import { sumOf, untilMetrics, type Sample } from '../test/support/cluster.ts';
import { createPrng, randomPrompt } from '../test/support/prng.ts';
import { held, unsettled } from '../test/support/quiet.ts';
import { complete, openCompletion, type OpenStream } from '../test/support/stream.ts';
import { openBystanders } from './bystanders.ts';
import { parseCommandLine, positive, positiveOrZero } from './command-line.ts';
import { hundredths, quantile, spread, surroundings } from './measurement.ts';
import { compareLedgers, countsOf, openTarget, type Counts, type Target } from './target.ts';

const HELP = `
npm run bench:abort [-- OPTIONS]

  --repetitions N   disconnects of each kind (default 20); 0 leaves their lines out
  --rooms N         in transfer when their clients leave (default 32)
  --clients N       that leave at once (default 500)
  --runs N          of that (default 5); 0 leaves its lines out
  --seed N          (default 1)
  --url URL         a router to measure; without it a cluster is started on free ports and stopped afterwards
  --worker-url URL  of each of its prefill and decode workers`;

const { values: options } = parseCommandLine(HELP, {
  options: {
    url: { type: 'string' },
    'worker-url': { type: 'string', multiple: true, default: [] },
    repetitions: { type: 'string', default: '20' },
    rooms: { type: 'string', default: '32' },
    clients: { type: 'string', default: '500' },
    runs: { type: 'string', default: '5' },
    seed: { type: 'string', default: '1' },
  },
});
const repetitions = positiveOrZero('--repetitions', options.repetitions);
const rooms = positive('--rooms', options.rooms);
const clients = positive('--clients', options.clients);
const runs = positiveOrZero('--runs', options.runs);
const seed = positive('--seed', options.seed);
const random = createPrng(seed);

/** More than any of these waits takes on a machine that works at all. */
const PATIENCE_MS = 120_000;
/** A repetition that is not clean by then has leaked. */
const CLEAN_MS = 30_000;
/** Streams that read on while the others leave. */
const BYSTANDERS = 4;
/** How long gaps are collected before, and with the crowd there. */
const WINDOW_MS = 3000;
/** The crowd leaves when so many of it are being decoded: the rest is then spread over the other stages. */
const CROWD_RUNNING = 8;
/** Prompt tokens of a request that is cut in prefill: several chunks. */
const LONG_PROMPT = 3000;
/** Prompt tokens of a room in transfer: one page and the slot. */
const SHORT_PROMPT = 64;

/** Gauges of every process are looked at again and again until they hold; with the number of looks. */
async function watch(
  target: Target,
  withinMs: number,
  found: (samples: readonly Sample[]) => readonly string[],
): Promise<{ tookMs: number; looks: number; samples: readonly Sample[] }> {
  let looks = 0;
  let samples: readonly Sample[] = [];
  const look = async (): Promise<readonly Sample[]> => {
    looks++;
    samples = await target.samples();
    return samples;
  };
  const tookMs = await untilMetrics(
    look,
    withinMs,
    (page) => missingOr(found, page).length === 0,
    (page) => missingOr(found, page).join('\n'),
  );
  return { tookMs, looks, samples };
}

/** A process that is too busy to show its page is not clean. */
function missingOr(
  found: (samples: readonly Sample[]) => readonly string[],
  samples: readonly Sample[],
): readonly string[] {
  const missing = ['router', 'prefill', 'decode'].filter(
    (role) => !samples.some(({ labels }) => labels.engine_type === role),
  );
  return missing.length > 0 ? missing.map((role) => `no metrics of ${role}`) : found(samples);
}

function open(target: Target, promptTokens: number): OpenStream {
  const prompt = randomPrompt(random, promptTokens);
  return openCompletion(target.url, target.model, { prompt, maxTokens: 1000, ignoreEos: true });
}

function queued(samples: readonly Sample[], role: string, queue: string): number {
  return sumOf(samples, 'handoff_queue_requests', { engine_type: role, queue });
}

async function until(target: Target, holds: (samples: readonly Sample[]) => boolean): Promise<readonly Sample[]> {
  const { samples } = await watch(target, PATIENCE_MS, (page) =>
    holds(page) ? [] : held(page).concat('still waiting for the stage'),
  );
  return samples;
}

/** Mean of the steps that ended between two looks, of the role whose steps are longer, ms; 0: none ended. */
function stepBetween(before: readonly Sample[], after: readonly Sample[]): number {
  const means = ['prefill', 'decode'].map((role) => {
    const grown = (name: string): number =>
      sumOf(after, name, { engine_type: role }) - sumOf(before, name, { engine_type: role });
    const count = grown('handoff_step_seconds_count');
    return count === 0 ? 0 : (grown('handoff_step_seconds_sum') / count) * 1000;
  });
  return Math.max(...means);
}

/** One stage that clients leave in. */
interface Scenario {
  readonly stage: string;
  readonly rooms: number;
  /** What `limitMs` of the 95th percentile means is added to: the step that was running, or nothing. */
  readonly limitMs: number;
  /** Bring the requests there. */
  enter(): Promise<OpenStream[]>;
  /** Called as soon as the connections are closed. */
  leave(): void;
  /** What is still held. */
  found(samples: readonly Sample[]): readonly string[];
  /** Called when it was clean. */
  finish(): void;
}

const nothing = (): void => {};

function scenariosOf(target: Target): Scenario[] {
  const alone = { rooms: 1, limitMs: 100, leave: nothing, finish: nothing, found: unsettled };
  const scenarios: Scenario[] = [
    {
      ...alone,
      stage: 'prefill',
      async enter() {
        const stream = open(target, LONG_PROMPT);
        await until(target, (samples) => queued(samples, 'prefill', 'running') === 1);
        return [stream];
      },
    },
    {
      ...alone,
      stage: 'decode',
      async enter() {
        const stream = open(target, SHORT_PROMPT);
        await stream.firstText;
        await until(target, (samples) => queued(samples, 'decode', 'running') === 1);
        return [stream];
      },
    },
  ];
  const { link } = target;
  if (link === null) return scenarios;
  const enter = async (): Promise<OpenStream[]> => {
    link.pause();
    const streams = Array.from({ length: rooms }, () => open(target, SHORT_PROMPT));
    await until(
      target,
      (samples) => queued(samples, 'prefill', 'inflight') === rooms && queued(samples, 'decode', 'transfer') === rooms,
    );
    return streams;
  };
  const inTransfer = { rooms, limitMs: 500, enter };
  scenarios.push(
    { ...inTransfer, stage: 'transfer', leave: () => link.resume(), found: unsettled, finish: nothing },
    { ...inTransfer, stage: 'held-transfer', leave: nothing, found: heldButCredit, finish: () => link.resume() },
  );
  return scenarios;
}

/** What is held, but for the bytes that a held link may still bring. */
function heldButCredit(samples: readonly Sample[]): string[] {
  return held(samples).filter((line) => !line.startsWith('handoff_transfer_in_flight_bytes'));
}

async function measureDisconnect(target: Target, scenario: Scenario): Promise<object> {
  const tookMs: number[] = [];
  const stepMs: number[] = [];
  const lookMs: number[] = [];
  const beyondStepMs: number[] = [];
  for (let repetition = 0; repetition < repetitions; repetition++) {
    const streams = await scenario.enter();
    const before = await target.samples();
    const startMs = performance.now();
    for (const stream of streams) stream.cut();
    scenario.leave();
    const { looks, samples } = await watch(target, CLEAN_MS, (page) => scenario.found(page));
    const cleanMs = performance.now() - startMs;
    const step = stepBetween(before, samples);
    tookMs.push(cleanMs);
    stepMs.push(step);
    lookMs.push(cleanMs / looks);
    beyondStepMs.push(cleanMs - step);
    scenario.finish();
    await watch(target, CLEAN_MS, unsettled);
  }
  const p95 = hundredths(quantile(scenario.limitMs === 100 ? beyondStepMs : tookMs, 0.95));
  return {
    stage: scenario.stage,
    rooms: scenario.rooms,
    repetitions,
    untilZeroMs: spread(tookMs),
    stepMs: spread(stepMs),
    beyondStepMs: spread(beyondStepMs),
    betweenLooksMs: spread(lookMs),
    limit: scenario.limitMs === 100 ? 'p95 of beyondStepMs < 100' : 'p95 of untilZeroMs < 500',
    ok: p95 < scenario.limitMs,
  };
}

const pause = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));

async function measureMassAbort(
  target: Target,
): Promise<{ line: object; ok: boolean; cleanMs: number; ratio: number }> {
  const before = countsOf(await target.samples());
  const bystanders = await openBystanders(target.url, target.model, BYSTANDERS);
  const aloneFromMs = Date.now();
  await pause(WINDOW_MS);
  const aloneToMs = Date.now();
  const crowd = Array.from({ length: clients }, () => open(target, 20 + Math.floor(random() * 400)));
  let running = 0;
  for (const stream of crowd) stream.firstText.then(() => running++, nothing);
  // Everybody is admitted, or the ledgers could not be compared: who leaves before is counted by nobody.
  const stages = await until(
    target,
    (samples) =>
      running >= Math.min(CROWD_RUNNING, clients) && sumOf(samples, 'handoff_active_requests') === clients + BYSTANDERS,
  );
  const crowdedFromMs = Date.now();
  await pause(WINDOW_MS);
  const cutMs = Date.now();
  for (const stream of crowd) stream.cut();
  const results = Promise.allSettled(crowd.map((stream) => stream.text));
  await watch(target, CLEAN_MS, (samples) => {
    const active = sumOf(samples, 'handoff_active_requests');
    const others = ['prealloc', 'transfer', 'waiting', 'inflight', 'unwinding', 'retracted'].flatMap((queue) =>
      sumOf(samples, 'handoff_queue_requests', { queue }) === 0 ? [] : [queue],
    );
    const decoding = queued(samples, 'decode', 'running');
    const computing = queued(samples, 'prefill', 'running');
    if (active > BYSTANDERS || decoding > BYSTANDERS || computing > 0) others.push('active or running');
    return others;
  });
  const cleanAtMs = Date.now();
  // At least a second of gaps, even if all was clean at once.
  await pause(Math.max(0, cutMs + 1000 - cleanAtMs));
  const duringToMs = Date.now();
  const gaps = {
    alone: await bystanders.gaps(aloneFromMs, aloneToMs),
    before: await bystanders.gaps(crowdedFromMs, cutMs),
    during: await bystanders.gaps(cutMs, duringToMs),
  };
  const completedOfCrowd = (await results).filter(({ status }) => status === 'fulfilled').length;
  const completed = completedOfCrowd + (await bystanders.leave());
  await watch(target, CLEAN_MS, unsettled);
  const answer = await complete(target.url, target.model, { prompt: [0, 5, 6, 7], maxTokens: 4, ignoreEos: true });
  const { samples } = await watch(target, CLEAN_MS, unsettled);
  const cut = clients + BYSTANDERS - completed;
  const ledger: Counts = {
    ended: clients + BYSTANDERS + 1,
    aborted: cut,
    abortsByReason: cut,
    length: completed + (answer.finishReason === 'length' ? 1 : 0),
    stop: 0,
    cancelled: cut,
    failed: 0,
    rejected: 0,
  };
  const p95 = (values: readonly number[]): number => hundredths(quantile(values, 0.95));
  const [aloneP95, beforeP95, duringP95] = [p95(gaps.alone), p95(gaps.before), p95(gaps.during)];
  const cleanMs = cleanAtMs - cutMs;
  const { agrees, line: counters } = compareLedgers({ before, after: countsOf(samples) }, ledger);
  return {
    cleanMs,
    // 1 is the limit: one and a half times what it was before they left, and 50 ms.
    ratio: duringP95 / (1.5 * beforeP95 + 50),
    ok: agrees && cleanMs < 5000,
    line: {
      stagesAtCut: stagesOf(stages),
      cleanMs: hundredths(cleanMs),
      gapP95Ms: { alone: aloneP95, before: beforeP95, during: duringP95 },
      gaps: { alone: gaps.alone.length, before: gaps.before.length, during: gaps.during.length },
      ledger: counters,
    },
  };
}

function stagesOf(samples: readonly Sample[]): Record<string, number> {
  const stages: Record<string, number> = {};
  for (const { name, labels, value } of samples) {
    if (name === 'handoff_queue_requests' && value > 0) stages[`${labels.engine_type} ${labels.queue}`] = value;
  }
  return stages;
}

const target = await openTarget({ url: options.url, workers: options['worker-url'] }, [
  ...['--max-queued-requests', String(Math.max(clients, rooms) + BYSTANDERS)],
  ...['--transfer-stall-timeout', '25s'], // a held link is not what is measured
]);
try {
  await complete(target.url, target.model, { prompt: [0, 2, 3], maxTokens: 4, ignoreEos: true }); // pipelines are warm
  const print = async (bench: string, line: object): Promise<void> => {
    const head = { bench, ...surroundings(await target.samples()), model: target.model, seed };
    process.stdout.write(`${JSON.stringify({ ...head, ...line })}\n`);
  };
  if (repetitions > 0) {
    for (const scenario of scenariosOf(target)) {
      process.stderr.write(`disconnect, ${scenario.stage}: ${repetitions} times\n`);
      await print('disconnect', await measureDisconnect(target, scenario));
    }
  }
  const masses: { ok: boolean; cleanMs: number; ratio: number }[] = [];
  for (let run = 0; run < runs; run++) {
    process.stderr.write(`mass abort, run ${run + 1} of ${runs}\n`);
    const { line, ...result } = await measureMassAbort(target);
    masses.push(result);
    await print('mass-abort', { run, clients, bystanders: BYSTANDERS, ...line });
  }
  if (runs > 0) {
    const ratio = quantile(
      masses.map((mass) => mass.ratio),
      0.5,
    );
    await print('mass-abort-median', {
      runs,
      clients,
      cleanMs: spread(masses.map((mass) => mass.cleanMs)),
      gapShareOfLimit: hundredths(ratio),
      limit: 'cleanMs < 5000, p95 gap during <= 1.5 before + 50 ms, ledgers agree',
      ok: ratio <= 1 && masses.every((mass) => mass.ok),
    });
  }
} finally {
  await target.stop();
}
