/** More answers than the decode worker has pages for: they take turns, and each is the one it would be alone. */
import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import { sumOf, untilMetrics, type Sample } from '../support/cluster.ts';
import { createPrng, randomPrompt } from '../support/prng.ts';
import { untilQuiet } from '../support/quiet.ts';
import { startSplitCluster, type SplitCluster } from '../support/split-cluster.ts';
import { complete, openCompletion, type CompletionRequest } from '../support/stream.ts';

const SEED = 16;
const STREAMS = 16;
/** Two or three pages a stream, about 40 in all. */
const OUTPUT_TOKENS = 150;
const PAGES = 10;
const QUIET_MS = 5000;

const random = createPrng(SEED);
/** Every other one is drawn under penalties, whose counts go over retractions too. */
const PENALTIES = { temperature: 1, presence_penalty: 0.7, frequency_penalty: 0.3, repetition_penalty: 1.2 };
const requests: readonly CompletionRequest[] = Array.from({ length: STREAMS }, (_, index) => ({
  prompt: randomPrompt(random, 40 + Math.floor(random() * 100)),
  maxTokens: OUTPUT_TOKENS,
  ignoreEos: true,
  ...(index % 2 === 0 ? {} : { extra: { ...PENALTIES, seed: index } }),
}));
/** The text of each request when it has the workers for itself. */
const alone: string[] = [];
const clusters: SplitCluster[] = [];

async function start(hostMemoryMiB: number): Promise<SplitCluster> {
  const decode = ['--kv-pages', String(PAGES), '--num-reserved-decode-tokens', '1'];
  const cluster = await startSplitCluster(['--max-running-requests', String(STREAMS), '--context-length', '1024'], {
    decode: [...decode, '--retraction-memory', String(hostMemoryMiB)],
  });
  clusters.push(cluster);
  return cluster;
}

function texts(cluster: SplitCluster): Promise<PromiseSettledResult<string>[]> {
  return Promise.allSettled(requests.map((request) => openCompletion(cluster.url, cluster.model, request).text));
}

let roomy: SplitCluster;

before(async () => {
  roomy = await start(64);
  for (const request of requests) alone.push((await complete(roomy.url, roomy.model, request)).text);
});
after(async () => {
  for (const cluster of clusters) await cluster.stop();
});

test(`seed ${SEED}: D-05: clients that leave while some are retracted free the host copies too`, async () => {
  // First of all: with each retraction, the worker promises its pages to fewer.
  const idle = await roomy.samples();
  assert.equal(sumOf(idle, 'sglang_num_retracted_requests_total'), 0, 'one stream alone has pages enough');
  const streams = requests.map((request) => openCompletion(roomy.url, roomy.model, request));
  await untilMetrics(
    () => roomy.samples(),
    60_000,
    (samples) => sumOf(samples, 'sglang_num_retracted_reqs') >= 2 && sumOf(samples, 'handoff_host_bytes') > 0,
    (samples) => `${sumOf(samples, 'sglang_num_retracted_reqs')} retracted`,
  );
  for (const stream of streams) stream.cut();
  await untilQuiet(() => roomy.samples(), QUIET_MS);
});

test(`seed ${SEED}: D-03: ${STREAMS} streams on ${PAGES} pages give the texts they give alone, and no prompt is computed twice`, async () => {
  const before = await roomy.samples();
  const together = await texts(roomy);
  const after = await roomy.samples();
  assert.deepEqual(
    together.map((result) => (result.status === 'fulfilled' ? result.value : result.reason)),
    alone,
  );
  const name = 'sglang_num_retracted_requests_total';
  assert.ok(sumOf(after, name) > sumOf(before, name), 'nothing was retracted');
  // Each prompt was asked before, so its first pages may be cached.
  const prefilled = (samples: readonly Sample[], role: string): number =>
    ['prefill_compute', 'prefill_cache'].reduce(
      (sum, mode) => sum + sumOf(samples, 'sglang_realtime_tokens_total', { mode, engine_type: role }),
      0,
    );
  const promptTokens = requests.reduce((sum, { prompt }) => sum + prompt.length, 0);
  assert.equal(prefilled(after, 'prefill') - prefilled(before, 'prefill'), promptTokens);
  assert.equal(prefilled(after, 'decode'), 0);
  await untilQuiet(() => roomy.samples(), QUIET_MS);
});

test(`seed ${SEED}: without host memory the newest end with an error that says so, and the others are right`, async () => {
  const cramped = await start(0);
  const together = await texts(cramped);
  let failedCount = 0;
  for (const [index, result] of together.entries()) {
    if (result.status === 'fulfilled') {
      assert.equal(result.value, alone[index]);
      continue;
    }
    failedCount++;
    assert.match(String(result.reason), /ran out of KV memory/);
  }
  assert.ok(failedCount > 0 && failedCount < STREAMS, `${failedCount} failed`);
  assert.equal(sumOf(await cramped.samples(), 'sglang_num_retracted_requests_total'), 0);
  await untilQuiet(() => cramped.samples(), QUIET_MS);
});
