/**
 * Keys that are used twice, bursts over the limit, and deadlines while others are served. The starred failures
 * and B-02 on real processes.
 */
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { ask, createClient, type Told } from '../support/client.ts';
import { sumOf } from '../support/cluster.ts';
import { openHandRouter } from '../support/hand-router.ts';
import { createPrng, randomPrompt } from '../support/prng.ts';
import { untilQuiet } from '../support/quiet.ts';
import { startSplitCluster } from '../support/split-cluster.ts';

const SEED = 47;
/** A test that hangs has failed. */
const LIMIT = { timeout: 300_000 };

test(`seed ${SEED}: A-01: a key that is used twice costs nothing but the second use`, LIMIT, async (t) => {
  const cluster = await startSplitCluster();
  t.after(() => cluster.stop());
  const client = await createClient(cluster, SEED);
  const router = await openHandRouter({
    prefill: cluster.prefills[0]!.controlAddress,
    decode: cluster.decodes[0]!.controlAddress,
  });
  t.after(() => router.close());
  const { prefill, decode } = router;
  const random = createPrng(SEED);
  const [prompt, other] = [randomPrompt(random, 300), randomPrompt(random, 300)];
  const untilEnded = (...keys: string[]): Promise<void> =>
    router.until(() =>
      keys.every((key) => router.endsOf(key, prefill).length > 0 && router.endsOf(key, decode).length > 0),
    );

  const once = router.keyOf(0);
  router.send(router.submitOf(once, prompt, 20));
  await untilEnded(once);
  const expected = router.tokensOf(once);
  assert.equal(expected.length, 20);

  await t.test('at once: both halves accept again, and the answer comes once', async () => {
    const key = router.keyOf(1);
    for (let copy = 0; copy < 3; copy++) router.send(router.submitOf(key, prompt, 20));
    await untilEnded(key);
    assert.deepEqual(router.tokensOf(key), expected);
    assert.deepEqual([router.endsOf(key, prefill), router.endsOf(key, decode)], [['sent'], ['length']]);
  });

  await t.test('with another prompt: the first is answered, the second is not', async () => {
    const key = router.keyOf(2);
    router.send(router.submitOf(key, prompt, 20));
    router.send(router.submitOf(key, other, 20));
    await untilEnded(key);
    assert.deepEqual(router.tokensOf(key), expected);
    const dropped = { kind: 'protocol' };
    assert.ok(sumOf(await cluster.samples(), 'handoff_dropped_messages_total', dropped) >= 1, 'counted');
  });

  await t.test('after its end, and after an abort: answered from memory, nothing is computed', async () => {
    const key = router.keyOf(3);
    router.send(router.submitOf(key, prompt, 1000));
    await router.until(() => router.tokensOf(key).length > 0);
    router.send({ type: 'cancel', key, reason: 'client_cancel' });
    await untilEnded(key);
    const answered = router.tokensOf(key).length;
    for (const [again, end] of [
      [key, 'client_cancel'],
      [once, 'length'],
    ] as const) {
      const before = router.endsOf(again, decode).length;
      router.send(router.submitOf(again, prompt, 20));
      await router.until(() => router.endsOf(again, decode).length > before);
      assert.equal(router.endsOf(again, decode).at(-1), end);
    }
    assert.equal(router.tokensOf(key).length, answered);
    assert.deepEqual(router.tokensOf(once), expected);
  });

  await t.test('keys that a narrower number would merge stay apart', async () => {
    const keys = [5, 5 + 2 ** 32, 2n ** 53n + 1n, 2n ** 53n + 2n].map((sequence) => router.keyOf(sequence));
    for (const key of keys) router.send(router.submitOf(key, prompt, 20));
    await untilEnded(...keys);
    for (const key of keys) assert.deepEqual(router.tokensOf(key), expected, key);
  });

  // surface: chat.internal
  await t.test('ids and counts that a client chooses never reach a worker', async () => {
    const request = { prompt, maxTokens: 5, ignoreEos: true };
    const chosen = { ...request, extra: { rid: 'twice', bootstrap_room: 7, bootstrap_host: '169.254.169.254' } };
    const told = await Promise.all([ask(cluster, chosen, false), ask(cluster, chosen, true)]);
    // The router refuses an id that is in use; the request that has it is not touched.
    assert.deepEqual(new Set(told.map(({ status }) => status)), new Set([200, 400]));
    assert.deepEqual(told.find(({ status }) => status === 200)?.finishReasons, ['length']);
    assert.deepEqual(await ask(cluster, chosen, false), { status: 200, code: null, finishReasons: ['length'] });
    assert.equal((await ask(cluster, { ...request, extra: { n: 1000 } }, false)).status, 400);
  });

  await client.settles(5000);
});

test(
  `seed ${SEED}: A-02: a burst never exceeds the limit by one, and what is refused is refused at once`,
  LIMIT,
  async (t) => {
    const LIMIT_REQUESTS = 8;
    const cluster = await startSplitCluster(['--max-running-requests', '4', '--max-queued-requests', '4']);
    t.after(() => cluster.stop());
    const client = await createClient(cluster, SEED);
    const startMs = performance.now();
    let open = true;
    let longestRefusalMs = 0;
    const asked = Promise.all(
      Array.from({ length: 60 }, async (): Promise<Told> => {
        const told = await ask(cluster, client.request(600, 100), false);
        if (told.status === 503) longestRefusalMs = Math.max(longestRefusalMs, performance.now() - startMs);
        return told;
      }),
    ).finally(() => (open = false));
    // Every scrape while the burst lasts, of every process.
    let highest = 0;
    while (open) {
      const samples = await cluster.samples();
      const atRouter = sumOf(samples, 'handoff_active_requests');
      const atWorkers = ['prefill', 'decode'].map((role) =>
        sumOf(samples, 'handoff_queue_requests', { engine_type: role }),
      );
      highest = Math.max(highest, atRouter, ...atWorkers);
      assert.ok(highest <= LIMIT_REQUESTS, `${atRouter} at the router, ${atWorkers.join(' and ')} at the workers`);
    }
    const told = await asked;
    assert.equal(told.filter(({ status }) => status === 200).length, LIMIT_REQUESTS);
    assert.ok(
      told.every(({ status, code }) => status === 200 || (status === 503 && code === 'queue_full')),
      JSON.stringify(told),
    );
    assert.equal(highest, LIMIT_REQUESTS, 'the limit was reached');
    assert.ok(longestRefusalMs < 2000, `refused after ${longestRefusalMs} ms`);
    await client.settles(5000);
  },
);

test(
  `seed ${SEED}: B-02: requests that only wait for their turn at decode outlive every room clock`,
  LIMIT,
  async (t) => {
    const ROOM_MS = 2500;
    const cluster = await startSplitCluster(
      [
        ...[
          '--heartbeat',
          '200ms',
          '--lease',
          '2s',
          '--transfer-stall-timeout',
          '2s',
          '--room-timeout',
          `${ROOM_MS}ms`,
        ],
        ...['--max-running-requests', '4', '--max-queued-requests', '28'],
      ],
      {},
    );
    t.after(() => cluster.stop());
    const client = await createClient(cluster, SEED);
    const startMs = performance.now();
    const told = await Promise.all(Array.from({ length: 24 }, () => ask(cluster, client.request(20, 200), true)));
    for (const { status, finishReasons } of told) assert.deepEqual([status, finishReasons], [200, ['length']]);
    const tookMs = performance.now() - startMs;
    assert.ok(tookMs > 2 * ROOM_MS, `${tookMs} ms: nobody waited long enough for this test to mean anything`);
    await untilQuiet(() => cluster.samples(), 5000);
    await client.settles(5000);
  },
);
