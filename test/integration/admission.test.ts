/** `--max-running-requests` and `--max-queued-requests` under bursts: exact, immediate, and without a trace. */
import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import { sumOf, untilMetrics, type Sample } from '../support/cluster.ts';
import { createPrng, randomPrompt } from '../support/prng.ts';
import { untilQuiet } from '../support/quiet.ts';
import { startSplitCluster, type SplitCluster } from '../support/split-cluster.ts';
import { complete, openCompletion, ServerError, type OpenStream } from '../support/stream.ts';

const SEED = 508;
const RUNNING = 3;
const QUEUED = 2;
const LIMIT = RUNNING + QUEUED;
const BURST = 40;
const SECOND_BURST = 10;
const ROUNDS = 3;
/** A refusal is a look at a table, by the router's own clock: it never waits for a worker. */
const IMMEDIATE_SECONDS = 0.25;

let cluster: SplitCluster;
const random = createPrng(SEED);

before(async () => {
  cluster = await startSplitCluster([
    '--max-running-requests',
    String(RUNNING),
    '--max-queued-requests',
    String(QUEUED),
  ]);
});
after(async () => {
  await cluster?.stop();
});

const pages = (): Promise<readonly Sample[]> => cluster.samples();
const active = (samples: readonly Sample[]): number => sumOf(samples, 'handoff_active_requests');
const rooms = (samples: readonly Sample[], role: string): number =>
  sumOf(samples, 'handoff_queue_requests', { engine_type: role });

/** How long the router took to refuse each request it refused, from its log, in seconds. */
function refusalSeconds(): number[] {
  const lines = cluster.router.process.output().split('\n');
  const ended = lines.filter((line) => line.includes('"end":"rejected"'));
  return ended.map((line) => (JSON.parse(line) as { seconds: number }).seconds);
}

/** Open a stream that goes on until it is cut; tells whether it was admitted as soon as that is known. */
function openLong(): { stream: OpenStream; refusal: Promise<ServerError | null> } {
  const prompt = randomPrompt(random, 20 + Math.floor(random() * 200));
  const stream = openCompletion(cluster.url, cluster.model, { prompt, maxTokens: 3500, ignoreEos: true });
  const refusal = stream.firstText.then(
    () => null,
    // Anything else: it was cut by the test while it waited.
    (error: unknown) => (error instanceof ServerError ? error : null),
  );
  return { stream, refusal };
}

test(`seed ${SEED}: of ${BURST} requests at once exactly ${LIMIT} are admitted, in every round`, async () => {
  for (let round = 0; round < ROUNDS; round++) {
    const peak = { router: 0, prefill: 0, decode: 0 };
    let isSampling = true;
    const sampling = (async () => {
      while (isSampling) {
        const samples = await pages();
        peak.router = Math.max(peak.router, active(samples));
        for (const role of ['prefill', 'decode'] as const) peak[role] = Math.max(peak[role], rooms(samples, role));
      }
    })();
    const burst = Array.from({ length: BURST }, openLong);
    // Only what runs has a first token; the queued ones are told nothing yet, so refusals are counted.
    const refused = new Set<number>();
    burst.forEach(({ refusal }, index) => void refusal.then((told) => told !== null && refused.add(index)));
    await untilMetrics(
      pages,
      30_000,
      (samples) => refused.size >= BURST - LIMIT && active(samples) === LIMIT,
      (samples) => `${refused.size} refused, ${active(samples)} active`,
    );
    isSampling = false;
    await sampling;
    assert.equal(refused.size, BURST - LIMIT);
    assert.equal(peak.router, LIMIT, 'never one more, not for a moment');
    assert.ok(peak.prefill <= LIMIT && peak.decode <= LIMIT, JSON.stringify(peak));
    for (const index of refused) {
      const error = (await burst[index]!.refusal)!;
      assert.deepEqual([error.status, error.code], [503, 'queue_full']);
      assert.match(error.retryAfter ?? '', /^[1-9]\d*$/);
    }

    // One place that becomes free is given to one request of the next burst.
    const admitted = burst.filter((_, index) => !refused.has(index));
    admitted[0]!.stream.cut();
    await untilMetrics(pages, 10_000, (samples) => active(samples) === LIMIT - 1);
    const second = Array.from({ length: SECOND_BURST }, openLong);
    let refusedLater = 0;
    for (const { refusal } of second) void refusal.then((told) => told !== null && refusedLater++);
    await untilMetrics(
      pages,
      30_000,
      (samples) => refusedLater === SECOND_BURST - 1 && active(samples) === LIMIT,
      (samples) => `${refusedLater} refused, ${active(samples)} active`,
    );

    for (const { stream } of [...burst, ...second]) stream.cut();
    await untilQuiet(pages, 10_000);
  }
});

test('refusals are immediate and leave nothing on either side, and the next request succeeds', async () => {
  await untilQuiet(pages, 10_000);
  const samples = await pages();
  const seconds = refusalSeconds();
  assert.equal(seconds.length, ROUNDS * (BURST - LIMIT + SECOND_BURST - 1));
  assert.ok(Math.max(...seconds) < IMMEDIATE_SECONDS, `refused after ${Math.max(...seconds)} s`);
  assert.ok(
    sumOf(samples, 'handoff_rejections_total', { code: 'queue_full' }) >= ROUNDS * (BURST - LIMIT),
    `${sumOf(samples, 'handoff_rejections_total', { code: 'queue_full' })} counted`,
  );
  const answer = await complete(cluster.url, cluster.model, { prompt: [0, 40, 41], maxTokens: 3, ignoreEos: true });
  assert.equal(answer.completionTokens, 3);
});
