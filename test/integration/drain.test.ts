/** Ending and restarting processes one by one: answers that run are finished, and nobody else needs a restart. */
import assert from 'node:assert/strict';
import { once } from 'node:events';
import { after, before, test } from 'node:test';
import { createPrng, randomPrompt } from '../support/prng.ts';
import { untilQuiet } from '../support/quiet.ts';
import { startSplitCluster, untilUp, type Seat, type SplitCluster } from '../support/split-cluster.ts';
import { complete, openCompletion, ServerError } from '../support/stream.ts';

const SEED = 511;
const random = createPrng(SEED);
/** Short clocks, so that a drain that reaches its end can be waited for. */
const CLOCKS = [
  ...['--heartbeat', '500ms', '--lease', '3s', '--transfer-stall-timeout', '3s'],
  ...['--room-timeout', '30s', '--drain-grace', '4s'],
];
const RECOVERY_MS = 15_000;

let cluster: SplitCluster;

before(async () => {
  cluster = await startSplitCluster(CLOCKS);
});
after(async () => {
  await cluster?.stop();
});

function open(maxTokens: number) {
  const prompt = randomPrompt(random, 40);
  return openCompletion(cluster.url, cluster.model, { prompt, maxTokens, ignoreEos: true });
}

async function ended(seat: Seat): Promise<number | null> {
  const { child } = seat.process;
  if (child.exitCode === null && child.signalCode === null) await once(child, 'exit');
  return child.exitCode;
}

/** New requests succeed, after refusals if need be, and then nothing is held anywhere. */
async function works(): Promise<void> {
  const endMs = performance.now() + RECOVERY_MS;
  for (;;) {
    const answer = await complete(cluster.url, cluster.model, {
      prompt: randomPrompt(random, 150),
      maxTokens: 4,
      ignoreEos: true,
    }).catch((error: unknown) => {
      if (!(error instanceof ServerError) || error.status !== 503 || performance.now() > endMs) throw error;
      return null;
    });
    if (answer === null) continue;
    assert.equal(answer.completionTokens, 4);
    break;
  }
  await untilQuiet(() => cluster.samples(), RECOVERY_MS);
}

const seats: [name: string, seat: () => Seat][] = [
  ['router', () => cluster.router],
  ['prefill', () => cluster.prefills[0]!],
  ['decode', () => cluster.decodes[0]!],
];

for (const [name, seat] of seats) {
  for (const how of ['SIGTERM', 'SIGKILL'] as const) {
    test(`a restart of ${name} alone by ${how} needs no other restart`, async () => {
      const others = seats.filter(([other]) => other !== name).map(([, other]) => other().process.child.pid);
      seat().process.child.kill(how);
      await ended(seat());
      seat().start();
      await untilUp([seat()]);
      await works();
      const now = seats.filter(([other]) => other !== name).map(([, other]) => other().process.child.pid);
      assert.deepEqual(now, others);
    });
  }
}

for (const [name, seat] of seats) {
  test(`SIGTERM of ${name} lets a running answer finish and refuses new requests`, async () => {
    const running = open(40);
    await running.firstText;
    seat().process.child.kill('SIGTERM');
    assert.notEqual(await running.text, '');
    assert.equal(await ended(seat()), 0);
    await assert.rejects(complete(cluster.url, cluster.model, { prompt: [0, 40], maxTokens: 1 }));
    seat().start();
    await untilUp([seat()]);
    await works();
  });
}

test('a drain that reaches its deadline ends what is left with an error, and then the process', async (t) => {
  const decode = cluster.decodes[0]!;
  const endless = open(4000);
  t.after(() => endless.cut());
  await endless.firstText;
  const startMs = performance.now();
  decode.process.child.kill('SIGTERM');
  // Readiness goes at once, while the process lives on for its requests.
  while ((await fetch(`${decode.url}/readyz`)).ok) assert.ok(performance.now() - startMs < 2000, 'still ready');
  assert.equal((await fetch(`${decode.url}/livez`)).status, 200);
  await assert.rejects(endless.text, (error) => {
    assert.ok(error instanceof ServerError, String(error));
    assert.equal(error.code, 'server_draining');
    return true;
  });
  const tookMs = performance.now() - startMs;
  assert.ok(tookMs >= 3900, `it had only ${tookMs} ms`);
  assert.equal(await ended(decode), 0);
  decode.start();
  await untilUp([decode]);
  await works();
});

test('SIGINT leaves running answers 2 s, not the whole grace', async (t) => {
  const endless = open(4000);
  t.after(() => endless.cut());
  await endless.firstText;
  const startMs = performance.now();
  cluster.router.process.child.kill('SIGINT');
  await assert.rejects(endless.text);
  assert.equal(await ended(cluster.router), 0);
  assert.ok(performance.now() - startMs < 4000, 'the grace is 4 s');
  cluster.router.start();
  await untilUp([cluster.router]);
  await works();
});
