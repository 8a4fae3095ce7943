/** What an operator can see and do on a running cluster: every room on every process, aborts by id, a peer that is silent. */
import assert from 'node:assert/strict';
import { once } from 'node:events';
import { after, before, test } from 'node:test';
import { inspect } from 'node:util';
import type { RouterPage } from '../../server/operators/debug-page.ts';
import { readMetrics, startHandoff, sumOf } from '../support/cluster.ts';
import { createPrng, randomPrompt } from '../support/prng.ts';
import { untilQuiet } from '../support/quiet.ts';
import { startSplitCluster, type SplitCluster } from '../support/split-cluster.ts';
import { openCompletion } from '../support/stream.ts';

const SEED = 509;
const random = createPrng(SEED);
const KEY = 'operators-only';
const authorization = { authorization: `Bearer ${KEY}` };

let cluster: SplitCluster;

before(async () => {
  cluster = await startSplitCluster([], { env: { HANDOFF_ADMIN_KEY: KEY } });
});
after(async () => {
  await cluster?.stop();
});

async function debugPage(): Promise<RouterPage> {
  const response = await fetch(`${cluster.url}/debug/rooms`, { headers: authorization });
  assert.equal(response.status, 200);
  return (await response.json()) as RouterPage;
}

/** Ask for the page until it is so. */
async function pageWhere(holds: (page: RouterPage) => boolean): Promise<RouterPage> {
  const startMs = performance.now();
  for (;;) {
    const page = await debugPage();
    if (holds(page)) return page;
    assert.ok(performance.now() - startMs < 10_000, JSON.stringify(page));
  }
}

/** Run an operator's command to its end. */
async function run(args: readonly string[]): Promise<{ code: number | null; text: string }> {
  const handoff = startHandoff([...args, '--url', cluster.url], { HANDOFF_ADMIN_KEY: KEY });
  await once(handoff.child, 'close');
  return { code: handoff.child.exitCode, text: handoff.output() };
}

/** A stream whose request can be told by the id its client gave it. */
function openNamed(id: string) {
  const abort = new AbortController();
  const response = fetch(`${cluster.url}/v1/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json', 'x-request-id': id },
    body: JSON.stringify({
      model: cluster.model,
      prompt: randomPrompt(random, 200),
      max_tokens: 3500,
      ignore_eos: true,
      stream: true,
    }),
    signal: abort.signal,
  });
  return { response, cut: () => abort.abort() };
}

test('a room is seen with its halves, what it owns, and its last event, and the doctor finds it healthy', async (t) => {
  const prompt = randomPrompt(random, 200);
  const stream = openCompletion(cluster.url, cluster.model, { prompt, maxTokens: 3500, ignoreEos: true });
  t.after(() => stream.cut());
  await stream.firstText;
  // The prefill half ends when it has heard that everything arrived, which the client does not wait for.
  const page = await pageWhere(
    ({ rooms: [room] }) => room?.prefill?.outcome === 'sent' && room.lastEvent?.what === 'tokens',
  );
  assert.equal(page.rooms.length, 1);
  const [room] = page.rooms;
  assert.deepEqual([room?.queue, room?.attempt, room?.outcome], ['running', 1, null]);
  assert.equal(room?.decode?.outcome, 'open');

  const [, decode] = page.workers;
  const half = decode?.page?.rooms[0];
  assert.equal(half?.room, `${room?.room}.1`);
  assert.deepEqual([half?.queue, half?.owns.owner], ['running', `sequence ${half?.room}`]);
  assert.ok(half!.owns.pages.length >= 2, 'the pages of 200 tokens');
  assert.deepEqual(half?.peer, { name: page.workers[0]?.page?.name, epoch: page.workers[0]?.page?.epoch });
  assert.ok(half!.ageSeconds >= 0 && half!.lastEvent !== null, inspect([half!.ageSeconds, half!.lastEvent]));

  const doctor = await run(['doctor']);
  assert.equal(doctor.code, 0, doctor.text);
  assert.match(doctor.text, /: healthy\n/);
  assert.ok(doctor.text.split('\n').length < 40, 'one screen');

  stream.cut();
  await untilQuiet(() => cluster.samples(), 5000);
  const watch = await run(['drain-watch', '--interval', '50ms', '--duration', '5s']);
  assert.equal(watch.code, 0, watch.text);
  assert.match(watch.text, /drained: nothing is held/);
});

test('the pages need the key, on every process', async () => {
  for (const url of [cluster.url, cluster.prefills[0]!.url, cluster.decodes[0]!.url]) {
    assert.equal((await fetch(`${url}/debug/rooms`)).status, 401, url);
    const wrong = { authorization: `Bearer ${KEY}x` };
    assert.equal((await fetch(`${url}/debug/rooms`, { headers: wrong })).status, 401, url);
    assert.equal((await fetch(`${url}/debug/rooms`, { headers: authorization })).status, 200, url);
  }
});

test('/abort_request ends one request on both sides and leaves the others alone', async (t) => {
  const streams = ['agent-1', 'agent-10'].map(openNamed);
  t.after(() => streams.forEach(({ cut }) => cut()));
  const bodies = await Promise.all(streams.map(async ({ response }) => (await response).text.bind(await response)));
  assert.equal((await debugPage()).rooms.length, 2);
  const aborted = await fetch(`${cluster.url}/abort_request`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ rid: 'agent-1' }),
  });
  assert.deepEqual(await aborted.json(), { success: true, aborted: 1 });
  assert.match(await bodies[0]!(), /"code":"request_aborted"/);

  const page = await pageWhere(
    ({ rooms, workers }) => rooms.length === 1 && workers.every(({ page: own }) => own!.rooms.length <= 1),
  );
  assert.equal(page.rooms[0]?.queue, 'running');
  streams[1]!.cut();
  await untilQuiet(() => cluster.samples(), 5000);
});

test('a decode worker that stands still in mid-transfer is named in metrics within 10 s', async () => {
  const decode = cluster.decodes[0]!;
  const { name } = (await (await fetch(`${decode.url}/health`)).json()) as { name: string };
  const streams = Array.from({ length: 4 }, () =>
    openCompletion(cluster.url, cluster.model, {
      prompt: randomPrompt(random, 1500),
      maxTokens: 10,
      ignoreEos: true,
    }),
  );
  let samples = await cluster.samples();
  while (sumOf(samples, 'handoff_queue_requests', { engine_type: 'decode', queue: 'transfer' }) === 0) {
    samples = await cluster.samples();
  }
  decode.process.child.kill('SIGSTOP');
  const startMs = performance.now();
  try {
    // Both who talk to it, on the one page that is scraped.
    const isNamed = (worker: string): boolean =>
      samples.some(
        (sample) =>
          sample.name === 'handoff_peer_silence_seconds' &&
          sample.labels.worker === worker &&
          sample.labels.peer === name &&
          sample.value > 5,
      );
    do {
      samples = await readMetrics(cluster.url);
      assert.ok(performance.now() - startMs < 10_000, 'named within 10 s');
    } while (!isNamed('router') || !isNamed('prefill-0'));
    assert.equal(sumOf(samples, 'handoff_worker_up', { worker: 'decode-0' }), 0);

    const doctor = await run(['doctor']);
    assert.equal(doctor.code, 1, doctor.text);
    assert.ok(
      doctor.text.includes(`prefill-0: ${name} is silent`) || doctor.text.includes(`lost ${name}`),
      doctor.text,
    );
  } finally {
    decode.process.child.kill('SIGCONT');
  }
  await Promise.allSettled(streams.map((stream) => stream.text));
  await untilQuiet(() => cluster.samples(), 30_000);
});
