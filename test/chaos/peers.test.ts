/**
 * Processes that die, stop, come back and are fed garbage. The starred failures C-03, C-06, M-01 and O-01 on real
 * processes: one sick process costs its own rooms, says so in the metrics, and needs nobody else's restart.
 */
import assert from 'node:assert/strict';
import { once } from 'node:events';
import { connect } from 'node:net';
import { test } from 'node:test';
import { setTimeout as pause } from 'node:timers/promises';
import { Dealer } from 'zeromq';
import { createClient } from '../support/client.ts';
import { sumOf, untilMetrics, type Sample } from '../support/cluster.ts';
import { createPrng } from '../support/prng.ts';
import { startSplitCluster, untilUp, type SplitCluster } from '../support/split-cluster.ts';
import { complete, openCompletion, ServerError } from '../support/stream.ts';

const SEED = 53;
/** A test that hangs has failed. */
const LIMIT = { timeout: 300_000 };
/** From a worker's return to the first request that succeeds. */
const RECOVERY_MS = 5000;

test(
  `seed ${SEED}: C-03: a worker killed and started again behind its address is a new one to everybody`,
  LIMIT,
  async (t) => {
    const cluster = await startSplitCluster(['--heartbeat', '200ms', '--lease', '2s']);
    t.after(() => cluster.stop());
    const client = await createClient(cluster, SEED);
    for (let round = 0; round < 2; round++) {
      for (const seat of [cluster.decodes[0]!, cluster.prefills[0]!]) {
        const streams = Array.from({ length: 8 }, (_, index) => client.open(20 + 100 * index, 300));
        await Promise.any(streams.map((stream) => stream.firstText));
        await seat.kill();
        seat.start();
        for (const outcome of await Promise.allSettled(streams.map((stream) => stream.text))) {
          if (outcome.status === 'fulfilled') continue;
          assert.ok(outcome.reason instanceof ServerError, `an explicit error, not ${String(outcome.reason)}`);
        }
        await untilUp([seat, cluster.router]);
        const upMs = performance.now();
        await client.settles(RECOVERY_MS);
        assert.ok(performance.now() - upMs < 2 * RECOVERY_MS, `round ${round}`);
      }
    }
    assert.ok(sumOf(await cluster.samples(), 'handoff_peer_epoch_changes_total') >= 4, 'each life was told apart');
  },
);

test(`seed ${SEED}: C-06: garbage on every port ends no loop`, LIMIT, async (t) => {
  const cluster = await startSplitCluster();
  t.after(() => cluster.stop());
  const client = await createClient(cluster, SEED);
  const random = createPrng(SEED);
  const bystander = client.open(50, 500);
  await bystander.firstText;
  const rejected = async (): Promise<number> => sumOf(await cluster.samples(), 'handoff_link_rejected_messages_total');
  const before = await rejected();
  const ports = [...portsOf(cluster)];
  assert.ok(ports.length >= 4, ports.join());
  let junkCount = 0;
  for (const address of ports) {
    // Bytes that are not even ZeroMQ's.
    const socket = connect(Number(address.split(':')[1]), address.split(':')[0]!);
    socket.on('error', () => {}); // refused as it should be
    await once(socket, 'connect');
    socket.end(Buffer.from(Array.from({ length: 5000 }, () => Math.floor(random() * 256))));
    // Frames that are, and mean nothing.
    const dealer = new Dealer({ linger: 1000 });
    dealer.connect(`tcp://${address}`);
    for (const size of [0, 1, 7, 8, 9, 64, 4096, 65_536]) {
      const frame = Buffer.from(Array.from({ length: size }, () => Math.floor(random() * 256)));
      if (size >= 64) frame.set([0x48, 0x4f, 1, 0]); // the right magic, and nothing else right
      await dealer.send([frame, Buffer.alloc(size)]);
      junkCount++;
    }
    t.after(() => dealer.close());
  }
  await untilMetrics(
    () => cluster.samples(),
    10_000,
    (samples) => sumOf(samples, 'handoff_link_rejected_messages_total') - before >= junkCount,
    (samples) => `${sumOf(samples, 'handoff_link_rejected_messages_total') - before} of ${junkCount} counted`,
  );
  assert.match(await bystander.text, /./s);
  await client.settles(5000);
});

test(
  `seed ${SEED}: C-06: an exception that escapes in a worker's loop ends the process, loudly and at once`,
  LIMIT,
  async (t) => {
    // The signal stands for a fault that nobody thought of; its handler throws as any callback of the loop could.
    const fault = `process.on('SIGUSR2', () => { throw new Error('injected fault'); });`;
    const preload = `data:text/javascript,${encodeURIComponent(fault)}`;
    const cluster = await startSplitCluster(['--heartbeat', '200ms', '--lease', '2s'], {
      env: { NODE_OPTIONS: `--import ${preload}` },
    });
    t.after(() => cluster.stop());
    const client = await createClient(cluster, SEED);
    for (const seat of [cluster.decodes[0]!, cluster.prefills[0]!]) {
      const stream = client.open(3000, 500);
      await untilMetrics(seat.url, 10_000, (samples) => sumOf(samples, 'handoff_queue_requests') > 0);
      const { child } = seat.process;
      const startMs = performance.now();
      const exited = once(child, 'exit');
      child.kill('SIGUSR2');
      await exited;
      assert.ok(performance.now() - startMs < 5000, 'within 5 s');
      assert.notEqual(child.exitCode, 0);
      assert.match(seat.process.output(), /injected fault/);
      await assert.rejects(stream.text, ServerError);
      seat.start();
      await untilUp([seat, cluster.router]);
      await client.settles(RECOVERY_MS);
    }
  },
);

test(`seed ${SEED}: M-01: a stopped prefill worker holds up no stream of another one`, LIMIT, async (t) => {
  const cluster = await startSplitCluster([], { prefills: 2 });
  t.after(() => cluster.stop());
  const client = await createClient(cluster, SEED);
  const running = Array.from({ length: 8 }, () => client.open(20, 1200));
  await Promise.all(running.map((stream) => stream.firstText));
  const stopped = cluster.prefills[1]!.process.child;
  stopped.kill('SIGSTOP');
  t.after(() => stopped.kill('SIGCONT'));
  const before = await slowGaps(cluster);
  // Every second one of these is sent to the stopped worker: OPENs, and submits of the router, that nobody takes.
  const more = Array.from({ length: 16 }, () => client.open(600, 8));
  await Promise.all(running.map((stream) => stream.text));
  const after = await slowGaps(cluster);
  assert.ok(after.all - before.all > 1000, 'tokens went on while the worker stood still');
  assert.equal(after.slow - before.slow, 0, 'no long gap; a send that waits would have made one of a whole lease');
  stopped.kill('SIGCONT');
  for (const outcome of await Promise.allSettled(more.map((stream) => stream.text))) {
    if (outcome.status === 'rejected') assert.ok(outcome.reason instanceof ServerError, String(outcome.reason));
  }
  // Decode may have given the link up by now; what the worker still wants to tell it is forgotten after a lease of 10 s.
  await client.settles(20_000);
});

test(`seed ${SEED}: processes that do not fit together refuse each other by name`, LIMIT, async (t) => {
  const clocks = ['--heartbeat', '200ms', '--lease', '2s', '--transfer-stall-timeout', '3s', '--room-timeout', '5s'];
  const cluster = await startSplitCluster(clocks, { prefill: ['--mode', 'q'], decode: ['--mode', 'hp'] });
  t.after(() => cluster.stop());
  const prompt = [0, 5, 7, 9];
  await assert.rejects(complete(cluster.url, cluster.model, { prompt, maxTokens: 4 }), ServerError);
  const samples = await cluster.samples();
  assert.equal(sumOf(samples, 'sglang_realtime_tokens_total', { engine_type: 'decode' }), 0);
  const said = cluster.decodes[0]!.process.output();
  assert.match(said, /"field":"layout"/, said.slice(-2000));
  assert.match(said, /"ours":"[^\n]*\\"mode\\":\\"hp\\"[^\n]*"theirs":"[^\n]*\\"mode\\":\\"q\\"/, said.slice(-2000));

  // Nor does a router admit what its workers could not hold.
  await cluster.router.kill();
  cluster.router.start(['--context-length', '8192']);
  const refusal = /"address":"([^"]*)","field":"context","ours":"8192","theirs":"4096"/g;
  const refusers = () =>
    new Set(Array.from(cluster.router.process.output().matchAll(refusal), ([, address]) => address));
  while (refusers().size < 2) await pause(20);
});

test(
  `seed ${SEED}: O-01: what is stuck shows its age and what is silent its name, while health is green`,
  LIMIT,
  async (t) => {
    const cluster = await startSplitCluster();
    t.after(() => cluster.stop());
    const client = await createClient(cluster, SEED);

    await t.test('a transfer that stands still', LIMIT, async () => {
      cluster.data.pause();
      const stuck = client.open(600, 8);
      const ageOf = (samples: readonly Sample[]): number =>
        sumOf(samples, 'handoff_oldest_age_seconds', { engine_type: 'decode', queue: 'transfer' });
      await untilMetrics(
        () => cluster.samples(),
        10_000,
        (samples) => ageOf(samples) > 3 && sumOf(samples, 'handoff_oldest_age_seconds', { queue: 'inflight' }) > 3,
      );
      assert.equal((await fetch(`${cluster.url}/health`)).status, 200);
      cluster.data.resume();
      await stuck.text;
      await client.settles(5000);
      assert.equal(ageOf(await cluster.samples()), 0);
    });

    await t.test('a decode worker that is stopped', LIMIT, async () => {
      const request = client.request(600, 8);
      const expected = (await complete(cluster.url, cluster.model, request)).text;
      const isHeld = cluster.data.pauseAfter(1000);
      const stream = openCompletion(cluster.url, cluster.model, request);
      await isHeld;
      const { child } = cluster.decodes[0]!.process;
      child.kill('SIGSTOP');
      t.after(() => child.kill('SIGCONT'));
      await untilMetrics(
        () => cluster.samples(),
        10_000,
        (samples) =>
          samples.some(
            ({ name, labels, value }) =>
              name === 'handoff_peer_silence_seconds' &&
              labels.engine_type === 'prefill' &&
              labels.peer_role === 'decode' &&
              labels.peer!.startsWith('decode@') &&
              value > 3,
          ),
      );
      cluster.data.resume();
      child.kill('SIGCONT');
      // Its own pause is forgiven on its side and shorter than a lease on the others: nothing is lost.
      assert.equal(await stream.text, expected);
      await client.settles(10_000);
    });
  },
);

/** Gaps between tokens seen by clients so far, and how many were longer than two busy cores explain: over 4 s. */
async function slowGaps(cluster: SplitCluster): Promise<{ all: number; slow: number }> {
  const samples = await cluster.samples();
  const all = sumOf(samples, 'sglang_inter_token_latency_seconds_count');
  return { all, slow: all - sumOf(samples, 'sglang_inter_token_latency_seconds_bucket', { le: '4' }) };
}

/** Everything a worker listens on for other processes, as host:port. */
function* portsOf(cluster: SplitCluster): Iterable<string> {
  for (const { process } of [...cluster.prefills, ...cluster.decodes]) {
    const args = process.child.spawnargs;
    for (const flag of ['--control', '--transfer', '--transfer-data']) {
      const address = args[args.indexOf(flag) + 1];
      if (args.includes(flag)) yield address!.replace('tcp://', '');
    }
  }
}
