/** `kill -9` of a worker under load: explicit errors or a retry, a restart by the supervisor, nothing left on the other side. */
import assert from 'node:assert/strict';
import { readFileSync, readdirSync } from 'node:fs';
import { after, before, test } from 'node:test';
import { startCluster, untilMetrics, sumOf, type Cluster } from '../support/cluster.ts';
import { createPrng, randomPrompt } from '../support/prng.ts';
import { held } from '../support/quiet.ts';
import { complete, openCompletion, ServerError } from '../support/stream.ts';

const SEED = 9;
const random = createPrng(SEED);
let cluster: Cluster;

before(async () => {
  cluster = await startCluster();
});
after(async () => {
  await cluster?.stop();
});

/** Process id of the cluster's child that runs `role`. */
function pidOf(role: 'prefill' | 'decode'): number {
  for (const entry of readdirSync('/proc').filter((name) => /^\d+$/.test(name))) {
    try {
      const status = readFileSync(`/proc/${entry}/stat`, 'utf8');
      const parent = Number(status.slice(status.lastIndexOf(')') + 2).split(' ')[1]);
      const args = readFileSync(`/proc/${entry}/cmdline`, 'utf8').split('\0');
      if (parent === cluster.child.pid && args.includes(role)) return Number(entry);
    } catch {
      continue; // a process that ended while it was looked at
    }
  }
  throw new Error(`no ${role} process below ${cluster.child.pid}`);
}

for (const role of ['decode', 'prefill'] as const) {
  test(`seed ${SEED}: kill -9 of the ${role} worker under load`, async () => {
    const streams = Array.from({ length: 16 }, (_, index) =>
      openCompletion(cluster.url, cluster.model, {
        prompt: randomPrompt(random, 30 + index * 40),
        maxTokens: 200,
        ignoreEos: true,
      }),
    );
    await Promise.any(streams.map((stream) => stream.firstText));
    const victim = pidOf(role);
    process.kill(victim, 'SIGKILL');
    const outcomes = await Promise.allSettled(streams.map((stream) => stream.text));
    for (const outcome of outcomes) {
      if (outcome.status === 'fulfilled') continue;
      assert.ok(outcome.reason instanceof ServerError, `an explicit error, not ${outcome.reason}`);
      assert.ok(outcome.reason.status === 200 || outcome.reason.status >= 500, `status ${outcome.reason.status}`);
    }

    // The start of the new worker is not counted: its metrics answer once it is there.
    await untilMetrics(
      cluster.url,
      60_000,
      (samples) =>
        samples.some(
          (sample) => sample.name === 'handoff_worker_up' && sample.labels.role === role && sample.value === 1,
        ) && pidOf(role) !== victim,
    );
    const startMs = performance.now();
    for (;;) {
      const answer = await complete(cluster.url, cluster.model, {
        prompt: randomPrompt(random, 20),
        maxTokens: 4,
        ignoreEos: true,
      }).catch((error: unknown) => {
        assert.ok(error instanceof ServerError && error.status === 503, String(error));
        return null;
      });
      if (answer) break;
      assert.ok(performance.now() - startMs < 10_000, 'new requests succeed within 10 s of the restart');
    }
    await untilMetrics(
      cluster.url,
      2000,
      (samples) => held(samples).length === 0,
      (samples) => held(samples).join('\n'),
    );
    await untilMetrics(cluster.url, 2000, (samples) => sumOf(samples, 'handoff_worker_up') === 2);
  });
}
