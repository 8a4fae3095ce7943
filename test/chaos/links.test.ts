/**
 * Slow, late, half-open and cut links between real processes. None of it may cost more than the requests on that link,
 * and none of it needs a restart.
 */
import assert from 'node:assert/strict';
import { after, afterEach, before, test } from 'node:test';
import { createClient, type Client } from '../support/client.ts';
import { sumOf, untilMetrics } from '../support/cluster.ts';
import { startSplitCluster, type SplitCluster } from '../support/split-cluster.ts';
import { complete, openCompletion, ServerError, type OpenStream } from '../support/stream.ts';

const SEED = 59;
/** A test that hangs has failed. */
const LIMIT = { timeout: 300_000 };
const LEASE_MS = 2000;
/** A lost link is opened again within a lease and a HELLO; the rest is for two busy cores. */
const RECOVERY_MS = 10_000;

let cluster: SplitCluster;
let client: Client;

before(async () => {
  cluster = await startSplitCluster([
    ...['--heartbeat', '200ms', '--lease', `${LEASE_MS}ms`, '--transfer-stall-timeout', '8s', '--room-timeout', '20s'],
  ]);
  client = await createClient(cluster, SEED);
});
afterEach(() => {
  for (const proxy of [cluster?.control, cluster?.data]) {
    proxy?.shape({});
    proxy?.resume();
    proxy?.heal();
  }
});
after(async () => {
  await cluster?.stop();
});

/** Every stream ends, with its answer or with the server's own error. Returns how many have an answer. */
async function endOf(streams: readonly OpenStream[]): Promise<number> {
  let answers = 0;
  for (const outcome of await Promise.allSettled(streams.map((stream) => stream.text))) {
    if (outcome.status === 'fulfilled') answers++;
    else assert.ok(outcome.reason instanceof ServerError, `an explicit error, not ${String(outcome.reason)}`);
  }
  return answers;
}

test(`seed ${SEED}: M-08: a transfer slower than three leases, but alive, is finished`, LIMIT, async () => {
  // One CHUNK of a mebibyte takes 5 s of the 8 that a stall takes; all of them take over three leases.
  const request = client.request(3900, 12);
  const alone = (await complete(cluster.url, cluster.model, request)).text;
  const startMs = performance.now();
  cluster.data.shape({ bytesPerSecond: 200_000 });
  assert.equal((await complete(cluster.url, cluster.model, request)).text, alone);
  const tookMs = performance.now() - startMs;
  assert.ok(tookMs > 3 * LEASE_MS, `${tookMs} ms: not slow enough for this test to mean anything`);
  cluster.data.shape({});
  await client.settles(RECOVERY_MS);
});

test(
  `seed ${SEED}: M-05: control that is late by half a second while data is not changes no answer`,
  LIMIT,
  async () => {
    const requests = Array.from({ length: 4 }, () => client.request(400, 12));
    const alone = [];
    for (const request of requests) alone.push((await complete(cluster.url, cluster.model, request)).text);
    cluster.control.shape({ latencyMs: 500 });
    const late = requests.map((request) => openCompletion(cluster.url, cluster.model, request).text);
    assert.deepEqual(await Promise.all(late), alone);
    cluster.control.shape({});
    cluster.data.shape({ latencyMs: 300 });
    const behind = requests.map((request) => openCompletion(cluster.url, cluster.model, request).text);
    assert.deepEqual(await Promise.all(behind), alone);
    cluster.data.shape({});
    await client.settles(RECOVERY_MS);
  },
);

test(`seed ${SEED}: T-10: a cut of every link under load is forgotten with it`, LIMIT, async () => {
  for (let round = 0; round < 3; round++) {
    const streams = Array.from({ length: 6 }, (_, index) => client.open(50 + 200 * index, 100));
    await streams[0]!.firstText;
    for (const seat of [...cluster.prefills, ...cluster.decodes]) seat.routerLink.cut();
    cluster.control.cut();
    cluster.data.cut();
    await endOf(streams);
    await client.settles(RECOVERY_MS);
  }
});

test(
  `seed ${SEED}: C-11: a link that is open one way only ends its rooms on both sides, and heals`,
  LIMIT,
  async () => {
    for (const direction of ['toWorker', 'fromWorker'] as const) {
      const running = client.open(20, 800);
      await running.firstText;
      cluster.control.pause(direction);
      const stuck = client.open(600, 12);
      await untilMetrics(
        () => cluster.samples(),
        RECOVERY_MS,
        (samples) => sumOf(samples, 'handoff_peer_up', { engine_type: 'prefill', peer_role: 'decode' }) === 0,
      );
      // After its first token an answer needs no prefill worker.
      assert.ok((await running.text).length > 0, direction);
      cluster.control.resume();
      await endOf([stuck]);
      await client.settles(RECOVERY_MS);
    }
  },
);

test(
  `seed ${SEED}: C-09: half-open connections are noticed by silence, replaced, and leave nothing`,
  LIMIT,
  async () => {
    for (const proxies of [[cluster.data], [cluster.control, cluster.data]]) {
      for (const proxy of proxies) proxy.silence();
      const stuck = Array.from({ length: 3 }, () => client.open(600, 12));
      await endOf(stuck);
      for (const proxy of proxies) proxy.heal();
      await client.settles(RECOVERY_MS);
    }
  },
);
