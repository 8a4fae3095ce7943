/**
 * Many clients that leave at once, and halves that give up alone. The starred failures on real
 * processes: whoever ends first tells the other half, and nothing is left on either side.
 *
 * Where the notice of one worker to the other is what is tested, the router is stopped, so that it cannot help.
 */
import assert from 'node:assert/strict';
import { test, type TestContext } from 'node:test';
import { ask, countOf, createClient, type Client } from '../support/client.ts';
import { startHandoff, sumOf, untilMetrics } from '../support/cluster.ts';
import { freePort } from '../support/proxy.ts';
import { createPrng } from '../support/prng.ts';
import { startSplitCluster, untilUp, type SplitCluster, type SplitOptions } from '../support/split-cluster.ts';
import { complete, openCompletion, ServerError, type OpenStream } from '../support/stream.ts';

const SEED = 43;
/** A test that hangs has failed. */
const LIMIT = { timeout: 300_000 };
/** One message over loopback and one tick, on two busy cores. */
const NOTICE_MS = 2000;
/** Context of the embedded model, in pages. */
const CONTEXT_PAGES = 32;

async function start(
  t: TestContext,
  args: readonly string[],
  options: SplitOptions,
): Promise<{ cluster: SplitCluster; client: Client }> {
  const cluster = await startSplitCluster(args, options);
  t.after(() => cluster.stop());
  return { cluster, client: await createClient(cluster, SEED) };
}

/** Every stream has ended, each with the server's own error. */
async function assertAllFail(streams: readonly OpenStream[]): Promise<void> {
  for (const outcome of await Promise.allSettled(streams.map((stream) => stream.text))) {
    const error: unknown = outcome.status === 'rejected' ? outcome.reason : 'an answer';
    assert.ok(error instanceof ServerError, `an explicit error, not ${String(error)}`);
  }
}

test(
  `seed ${SEED}: X-01: rounds of 40 clients that leave at once leave nothing, and disturb nobody`,
  LIMIT,
  async (t) => {
    const { cluster, client } = await start(t, [], {});
    const random = createPrng(SEED);
    const request = client.request(40, 400);
    const alone = (await complete(cluster.url, cluster.model, request)).text;
    for (let round = 0; round < 3; round++) {
      const bystander = openCompletion(cluster.url, cluster.model, request);
      await bystander.firstText;
      const streams = Array.from({ length: 40 }, () => client.open(10 + Math.floor(random() * 400)));
      // From before the first of them has a token until half of them have one.
      const awaited = streams.slice(0, round * 10);
      await Promise.all(awaited.map((stream) => stream.firstText));
      for (const stream of streams) stream.cut();
      await untilMetrics(
        () => cluster.samples(),
        5000,
        (samples) => sumOf(samples, 'handoff_active_requests') <= 1 && countOf(samples, ['prefill', 'unwinding']) === 0,
      );
      assert.equal(await bystander.text, alone);
      await client.settles(5000);
    }
  },
);

/** One room of full length fills the pool of prefill, so that all others wait there. */
const ONE_AT_A_TIME = ['--kv-pages', String(CONTEXT_PAGES)];
/** The worker with this lease misses its stopped router long before the other one does. */
const SHORT_LEASE = ['--lease', '2s'];

test(
  `seed ${SEED}: X-02: decode is told at once of rooms that prefill alone gives up (api-bugs 84)`,
  LIMIT,
  async (t) => {
    const { cluster, client } = await start(t, ['--heartbeat', '200ms'], {
      prefill: [...ONE_AT_A_TIME, ...SHORT_LEASE],
      decode: ['--lease', '15s'],
    });
    const streams = Array.from({ length: 8 }, () => client.open(3500, 20));
    await client.untilStage(['decode', 'transfer'], streams.length);
    cluster.router.process.child.kill('SIGSTOP');
    t.after(() => cluster.router.process.child.kill('SIGCONT'));
    const [prefill, decode] = [cluster.prefills[0]!, cluster.decodes[0]!];
    await untilMetrics(prefill.url, 10_000, (samples) => countOf(samples, ['prefill', 'waiting']) === 0);
    await untilMetrics(decode.url, NOTICE_MS, (samples) => sumOf(samples, 'handoff_queue_requests') === 0);
    cluster.router.process.child.kill('SIGCONT');
    await Promise.allSettled(streams.map((stream) => stream.text)); // answered by a second attempt, or told why not
    await client.settles(10_000);
  },
);

test(
  `seed ${SEED}: X-03: rooms that decode alone gives up leave the queue of prefill and are not computed`,
  LIMIT,
  async (t) => {
    const { cluster, client } = await start(t, ['--heartbeat', '200ms'], {
      router: ['--lease', '15s'],
      prefill: [...ONE_AT_A_TIME, '--lease', '15s'],
      decode: SHORT_LEASE,
    });
    const computedTokens = async (): Promise<number> =>
      sumOf(await cluster.samples(), 'sglang_realtime_tokens_total', {
        engine_type: 'prefill',
        mode: 'prefill_compute',
      });
    const streams = Array.from({ length: 20 }, () => client.open(3500, 20));
    await client.untilStage(['decode', 'transfer'], streams.length);
    cluster.router.process.child.kill('SIGSTOP');
    t.after(() => cluster.router.process.child.kill('SIGCONT'));
    const [prefill, decode] = [cluster.prefills[0]!, cluster.decodes[0]!];
    await untilMetrics(decode.url, 10_000, (samples) => sumOf(samples, 'handoff_queue_requests') === 0);
    await untilMetrics(prefill.url, NOTICE_MS, (samples) => sumOf(samples, 'handoff_queue_requests') === 0);
    const computed = await computedTokens();
    assert.ok(computed < (streams.length / 2) * 3500, `${computed} tokens were computed`);
    for (const stream of streams) stream.cut();
    cluster.router.process.child.kill('SIGCONT');
    await client.settles(10_000);
    assert.ok((await computedTokens()) - computed < 1000, 'only canaries were computed afterwards');
  },
);

test(`seed ${SEED}: R-01: a half that is refused or dies takes its other half along`, LIMIT, async (t) => {
  const { cluster, client } = await start(t, ['--heartbeat', '200ms', '--lease', '2s'], {
    decode: ['--max-running-requests', '1', '--max-queued-requests', '0'],
  });
  const [prefill] = cluster.prefills;
  const [decode] = cluster.decodes;

  await t.test('decode refuses: prefill is cancelled and the client is told at once', LIMIT, async () => {
    // Only a router that does not know of the other's room sends one too many.
    const port = await freePort();
    const second = startHandoff([
      ...['router', '--port', String(port)],
      ...['--prefill-worker', prefill!.controlAddress, '--decode-worker', decode!.controlAddress],
    ]);
    try {
      const url = `http://127.0.0.1:${port}`;
      await second.printed(/"worker":"decode-0"[^\n]*worker up/);
      await second.printed(/"worker":"prefill-0"[^\n]*worker up/);
      const running = client.open(20, 3000);
      await running.firstText;
      const told = await ask({ url, model: cluster.model }, client.request(600, 4), true);
      assert.deepEqual(told, { status: 503, code: 'queue_full', finishReasons: [] });
      await untilMetrics(
        prefill!.url,
        NOTICE_MS,
        (samples) =>
          sumOf(samples, 'handoff_queue_requests') === 0 &&
          sumOf(samples, 'handoff_state_slots', { state: 'used' }) === 0,
      );
      running.cut();
    } finally {
      await second.stop();
    }
    await client.settles(5000);
  });

  for (const [victim, survivor, role] of [
    [decode!, prefill!, 'prefill'],
    [prefill!, decode!, 'decode'],
  ] as const) {
    await t.test(`${role === 'prefill' ? 'decode' : 'prefill'} dies: ${role} gives its half back`, LIMIT, async () => {
      cluster.data.pause();
      const stream = client.open(600, 20);
      await client.untilStage(['prefill', 'inflight'], 1);
      await victim.kill();
      await assertAllFail([stream]);
      await untilMetrics(survivor.url, 2 * NOTICE_MS, (samples) => sumOf(samples, 'handoff_queue_requests') === 0);
      cluster.data.resume();
      victim.start();
      await untilUp([victim, cluster.router]);
      await client.settles(10_000);
    });
  }
});
