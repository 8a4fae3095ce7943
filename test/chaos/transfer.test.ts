/**
 * A hand-over whose link holds, damages or loses bytes. The starred failures T-01, T-02, T-03 and G-01 on real processes:
 * nothing late is written, every wait ends by a clock, no failure looks like an answer, and then everything is zero.
 */
import assert from 'node:assert/strict';
import { after, afterEach, before, test } from 'node:test';
import { ask, createClient, type Client } from '../support/client.ts';
import { sumOf } from '../support/cluster.ts';
import { startSplitCluster, untilUp, type SplitCluster } from '../support/split-cluster.ts';
import { complete, openCompletion, ServerError } from '../support/stream.ts';

const SEED = 41;
const STALL_MS = 3000;
const ROOM_MS = 8000;
/** A deadline is judged every 50 ms; the rest is for two busy cores. */
const SLACK_MS = 1500;
/** Prompt and answer of a room that takes five pages, and how many of them the pool holds at once. */
const ROOM_TOKENS = 600;
const ROOMS_OF_POOL = 3;
const POOL_PAGES = 16;

/** A test that hangs has failed. */
const LIMIT = { timeout: 300_000 };

let cluster: SplitCluster;
let client: Client;

before(async () => {
  const pool = ['--kv-pages', String(POOL_PAGES)];
  cluster = await startSplitCluster(
    [
      ...['--context-length', String(POOL_PAGES * 128)],
      ...['--heartbeat', '200ms', '--lease', `${STALL_MS}ms`],
      ...['--transfer-stall-timeout', `${STALL_MS}ms`, '--room-timeout', `${ROOM_MS}ms`],
    ],
    { prefill: pool, decode: pool },
  );
  client = await createClient(cluster, SEED);
});
after(async () => {
  await cluster?.stop();
});

afterEach(() => {
  cluster?.data.resume(); // held any longer, it would fail the tests that follow
});

async function total(name: string, labels: Readonly<Record<string, string>>): Promise<number> {
  return sumOf(await cluster.samples(), name, labels);
}

function lateAtDecode(): Promise<number> {
  return total('handoff_dropped_messages_total', { engine_type: 'decode', kind: 'late' });
}

function receivedBytes(): Promise<number> {
  return total('handoff_transfer_bytes_total', { engine_type: 'decode', direction: 'received' });
}

async function rejection(promise: Promise<unknown>): Promise<ServerError> {
  const error = await promise.then(
    () => assert.fail('an answer'),
    (reason: unknown) => reason,
  );
  assert.ok(error instanceof ServerError, `an explicit error, not ${String(error)}`);
  return error;
}

test(
  `seed ${SEED}: T-01: chunks of an aborted room that arrive after its pages were lent again are dropped`,
  LIMIT,
  async () => {
    const requests = Array.from({ length: ROOMS_OF_POOL }, () => client.request(ROOM_TOKENS, 12));
    const alone = [];
    for (const request of requests) alone.push((await complete(cluster.url, cluster.model, request)).text);
    const lateBefore = await lateAtDecode();

    const isHeld = cluster.data.pauseAfter(1000);
    const aborted = client.open(ROOM_TOKENS, 12);
    await isHeld;
    await client.untilStage(['decode', 'transfer'], 1);
    aborted.cut();
    await client.untilStage(['decode', 'transfer'], 0);
    // The whole pool is lent again, the pages of the aborted room among it, before its chunks arrive.
    const together = requests.map((request) => openCompletion(cluster.url, cluster.model, request).text);
    await client.untilStage(['decode', 'transfer'], ROOMS_OF_POOL);
    cluster.data.resume();

    assert.deepEqual(await Promise.all(together), alone);
    assert.ok((await lateAtDecode()) > lateBefore, 'late chunks were seen and dropped');
    await client.settles(3000);
  },
);

test(
  `seed ${SEED}: T-02: a transfer whose rest never comes ends by the stall clock, on both sides`,
  LIMIT,
  async () => {
    const isHeld = cluster.data.pauseAfter(40_000);
    const startMs = performance.now();
    const stream = client.open(ROOM_TOKENS, 12);
    await isHeld;
    const error = await rejection(stream.text);
    assert.equal(error.status, 504);
    assert.ok(performance.now() - startMs < ROOM_MS + SLACK_MS, 'before the room clock and its slack');
    await client.untilNothingHeld(SLACK_MS);
    cluster.data.resume();
    await client.settles(3000);
  },
);

test(`seed ${SEED}: T-02: a transfer of which nothing comes ends by the room clock, on both sides`, LIMIT, async () => {
  cluster.data.pause();
  const startMs = performance.now();
  const error = await rejection(client.open(ROOM_TOKENS, 12).text);
  assert.equal(error.status, 504);
  const tookMs = performance.now() - startMs;
  assert.ok(tookMs < ROOM_MS + SLACK_MS, `${tookMs} ms`);
  await client.untilNothingHeld(SLACK_MS);
  cluster.data.resume();
  await client.settles(3000);
});

test(
  `seed ${SEED}: T-02: prefill stopped in mid-transfer costs its rooms only, and it goes on when continued`,
  LIMIT,
  async () => {
    const { child } = cluster.prefills[0]!.process;
    const isHeld = cluster.data.pauseAfter(1000);
    const stream = client.open(ROOM_TOKENS, 12);
    await isHeld;
    child.kill('SIGSTOP');
    await rejection(stream.text);
    await client.untilStage(['decode', 'transfer'], 0);
    const before = await receivedBytes();
    cluster.data.resume();
    child.kill('SIGCONT');
    // The canary's own units arrive, and not one of the room that was given up.
    await client.settles(10_000);
    const canary = (await receivedBytes()) - before;
    await client.settles(3000);
    assert.equal((await receivedBytes()) - before, 2 * canary, 'late units were not written');
  },
);

test(
  `seed ${SEED}: T-03: a pool full of stalled transfers is free again by the clock alone, with nothing else to do`,
  LIMIT,
  async () => {
    cluster.data.pause();
    const startMs = performance.now();
    const stuck = Array.from({ length: ROOMS_OF_POOL }, () => client.open(ROOM_TOKENS, 12));
    await client.untilStage(['decode', 'transfer'], ROOMS_OF_POOL);
    const waits = client.open(ROOM_TOKENS, 12);
    for (const stream of stuck) assert.equal((await rejection(stream.text)).status, 504);
    assert.ok(performance.now() - startMs < ROOM_MS + 2 * SLACK_MS, 'one room clock for all of them');
    // The one behind them gets their pages, and then its own clock: nothing new arrives meanwhile.
    assert.equal((await rejection(waits.text)).status, 504);
    await client.untilNothingHeld(SLACK_MS);
    cluster.data.resume();
    await client.settles(3000);
  },
);

for (const stream of [false, true]) {
  const how = stream ? 'streamed' : 'not streamed';

  /** Ask while `fault` happens; the answer must be an error, and only the counter of failures may move. */
  async function assertFails(promptTokens: number, maxTokens: number, fault: () => Promise<void>): Promise<void> {
    const outcomes = async (): Promise<Record<string, number>> => {
      const samples = await cluster.samples();
      const of = (outcome: string): number => sumOf(samples, 'handoff_request_outcomes_total', { outcome });
      return { stop: of('stop'), length: of('length'), failed: of('failed'), cancelled: of('cancelled') };
    };
    const before = await outcomes();
    const asked = ask(cluster, client.request(promptTokens, maxTokens), stream);
    await fault();
    const told = await asked;
    assert.notEqual(told.code, null, JSON.stringify(told));
    assert.ok(told.status >= 500 || (stream && told.status === 200), JSON.stringify(told));
    assert.deepEqual(told.finishReasons, [], 'no answer is pretended');
    assert.deepEqual(await outcomes(), { ...before, failed: before['failed']! + 1 });
  }

  test(`seed ${SEED}: G-01: a flipped bit is an error, ${how}`, LIMIT, async () => {
    assert.equal((await fetch(`${cluster.url}/flush_cache`, { method: 'POST' })).status, 200);
    const flipped = cluster.data.flipOneBit(16_384);
    await assertFails(ROOM_TOKENS, 12, () => flipped);
    await client.untilNothingHeld(3000);
    assert.equal(await total('handoff_kv_pages', { engine_type: 'prefill', state: 'cached' }), 0, 'nothing is cached');
    await client.settles(3000);
  });

  test(`seed ${SEED}: G-01: a stalled transfer is an error, ${how}`, LIMIT, async () => {
    const isHeld = cluster.data.pauseAfter(40_000);
    await assertFails(ROOM_TOKENS, 12, () => isHeld);
    cluster.data.resume();
    await client.settles(3000);
  });

  test(`seed ${SEED}: G-01: prefill killed in mid-transfer is an error, ${how} (api-bugs 85)`, LIMIT, async () => {
    const [prefill] = cluster.prefills;
    const isHeld = cluster.data.pauseAfter(40_000);
    await assertFails(ROOM_TOKENS, 12, async () => {
      await isHeld;
      await prefill!.kill();
      prefill!.start();
    });
    cluster.data.resume();
    await untilUp([prefill!, cluster.router]);
    await client.settles(10_000);
  });

  test(`seed ${SEED}: G-01: decode killed in mid-answer is an error, ${how}`, LIMIT, async () => {
    const [decode] = cluster.decodes;
    await assertFails(20, 1500, async () => {
      await client.untilStage(['decode', 'running'], 1);
      await decode!.kill();
      decode!.start();
    });
    await untilUp([decode!, cluster.router]);
    await client.settles(10_000);
  });
}
