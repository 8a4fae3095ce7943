/** Sixty-four streams at once through one prefill and one decode worker, and the one too many. */
import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import { inspect } from 'node:util';
import { readMetrics, readWholeMetrics, startCluster, sumOf, untilMetrics, type Cluster } from '../support/cluster.ts';
import { createPrng, randomPrompt } from '../support/prng.ts';
import { held } from '../support/quiet.ts';
import { complete, openCompletion, ServerError } from '../support/stream.ts';

const SEED = 64;
const STREAMS = 64;
// Long answers to short prompts: decode, not prefill, is what fills the batch here.
const OUTPUT_TOKENS = 128;

let cluster: Cluster;

before(async () => {
  cluster = await startCluster(['--max-running-requests', String(STREAMS), '--max-queued-requests', '0']);
});
after(async () => {
  await cluster?.stop();
});

test(`seed ${SEED}: 64 streams get the answers they have when alone, in batches above 16`, async () => {
  const random = createPrng(SEED);
  const requests = Array.from({ length: STREAMS }, () => ({
    prompt: randomPrompt(random, 5 + Math.floor(random() * 36)),
    maxTokens: OUTPUT_TOKENS,
    ignoreEos: true,
  }));
  const alone: string[] = [];
  for (const request of requests) alone.push((await complete(cluster.url, cluster.model, request)).text);

  const before = await readWholeMetrics(cluster.url);
  const together = await Promise.all(
    requests.map((request) => openCompletion(cluster.url, cluster.model, request).text),
  );
  assert.deepEqual(together, alone);

  const after = await readWholeMetrics(cluster.url);
  const grown = (name: string): number => sumOf(after, name) - sumOf(before, name);
  const meanBatch = grown('handoff_decode_batch_size_sum') / grown('handoff_decode_batch_size_count');
  assert.ok(meanBatch > 16, `mean decode batch ${meanBatch}`);
});

test('one request over the limit gets 503 with Retry-After at once, and leaves nothing', async () => {
  const prompt = randomPrompt(createPrng(SEED + 1), 64);
  const request = { prompt, maxTokens: 4000, ignoreEos: true };
  const streams = Array.from({ length: STREAMS }, () => openCompletion(cluster.url, cluster.model, request));
  await untilMetrics(
    cluster.url,
    30_000,
    (samples) => sumOf(samples, 'handoff_active_requests') === STREAMS,
    (samples) => `${sumOf(samples, 'handoff_active_requests')} active`,
  );
  const startMs = performance.now();
  await assert.rejects(complete(cluster.url, cluster.model, { prompt, maxTokens: 1 }), (error) => {
    assert.ok(error instanceof ServerError, inspect(error));
    assert.equal(error.status, 503);
    assert.match(error.retryAfter ?? '', /^[1-9]\d*$/);
    return true;
  });
  assert.ok(performance.now() - startMs < 1000, 'a refusal is immediate');
  assert.equal(sumOf(await readMetrics(cluster.url), 'handoff_active_requests'), STREAMS);

  for (const stream of streams) stream.cut();
  await untilMetrics(
    cluster.url,
    2000,
    (samples) => held(samples).length === 0,
    (samples) => held(samples).join('\n'),
  );
});
