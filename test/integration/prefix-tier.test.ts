/** Cached prefixes outside the adapter: they come back from host memory and from a store, which may stop or die. */
import assert from 'node:assert/strict';
import { spawn, type ChildProcess } from 'node:child_process';
import { test } from 'node:test';
import { startCluster, type Cluster } from '../support/cluster.ts';
import { ensureStoreServer } from '../support/programs.ts';
import { createPrng, randomPrompt } from '../support/prng.ts';
import { freePort } from '../support/proxy.ts';
import { untilQuiet } from '../support/quiet.ts';

const SEED = 59;
const PROMPT_TOKENS = 900;
/** Whole pages of it. */
const CACHED_TOKENS = 896;
/** Ten pages: the second of two prompts takes those of the first. */
const POOL = ['--context-length', '1024', '--kv-pages', '10'];
const LIMIT = { timeout: 240_000 };

const random = createPrng(SEED);
const prompts = Array.from({ length: 4 }, () => randomPrompt(random, PROMPT_TOKENS));

async function ask({ url, model }: Cluster, prompt: readonly number[]): Promise<{ text: string; cached: number }> {
  const response = await fetch(`${url}/v1/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ model, prompt, max_tokens: 8, temperature: 0, ignore_eos: true }),
  });
  assert.equal(response.status, 200, 'a tier never fails a request');
  const body = (await response.json()) as {
    choices: { text: string }[];
    usage: { prompt_tokens_details: { cached_tokens: number } };
  };
  return { text: body.choices[0]!.text, cached: body.usage.prompt_tokens_details.cached_tokens };
}

/**
 * Ask each prompt in turn, so that the pool has evicted it in between, until every one comes back from a tier. On a busy
 * machine a tier may be too late, which costs a computation. Returns the answers, always the same.
 */
async function untilAllCached(cluster: Cluster): Promise<string[]> {
  for (let round = 0; round < 20; round++) {
    const { texts, cached } = await askInTurn(cluster);
    if (cached.every((count) => count === CACHED_TOKENS)) return texts;
  }
  throw new Error('the tier gives nothing back');
}

async function askInTurn(cluster: Cluster): Promise<{ texts: string[]; cached: number[] }> {
  const first = [];
  for (const prompt of prompts) first.push((await ask(cluster, prompt)).text);
  const again = [];
  for (const prompt of prompts) again.push(await ask(cluster, prompt));
  assert.deepEqual(
    again.map(({ text }) => text),
    first,
  );
  return { texts: first, cached: again.map(({ cached }) => cached) };
}

test(`seed ${SEED}: what the adapter evicts comes back from host memory`, LIMIT, async () => {
  const plain = await startCluster([...POOL, '--prefix-cache-memory', '0']);
  const cluster = await startCluster([...POOL, '--prefix-host-memory', '64']);
  try {
    const texts = await untilAllCached(cluster);
    assert.deepEqual((await askInTurn(plain)).texts, texts);
    await untilQuiet(cluster.url, 10_000);
  } finally {
    await Promise.all([plain.stop(), cluster.stop()]);
  }
});

test(
  `seed ${SEED}: a store gives prefixes back, and stopped or killed under load it costs no answer`,
  LIMIT,
  async (t) => {
    const server = ensureStoreServer();
    // Without root and apt there is no real server to stop and kill, and a fake would show nothing; CI has both.
    if (server === null) return t.skip('neither valkey-server nor redis-server is there or can be installed');
    const port = await freePort();
    let store = await startStore(server, port);
    const cluster = await startCluster([...POOL, '--prefix-store', `redis://127.0.0.1:${port}`]);
    try {
      const texts = await untilAllCached(cluster);
      const load = async (): Promise<string[]> =>
        (await Promise.all(prompts.map((prompt) => ask(cluster, prompt)))).map(({ text }) => text);

      store.kill('SIGSTOP');
      for (let round = 0; round < 2; round++) assert.deepEqual(await load(), texts, 'a store that stands still');
      store.kill('SIGCONT');
      assert.deepEqual(await load(), texts, 'a store that goes on');

      const underWay = load();
      store.kill('SIGKILL');
      assert.deepEqual(await underWay, texts, 'a store that dies');
      assert.deepEqual(await load(), texts, 'no store');

      // A new and empty one is taken up by itself, and filled again.
      store = await startStore(server, port);
      assert.deepEqual(await untilAllCached(cluster), texts);
      await untilQuiet(cluster.url, 10_000);
    } finally {
      store.kill('SIGKILL');
      await cluster.stop();
    }
  },
);

async function startStore(command: string, port: number): Promise<ChildProcess> {
  const args = ['--port', String(port), '--bind', '127.0.0.1', '--save', '', '--appendonly', 'no'];
  const child = spawn(command, args, { stdio: ['ignore', 'pipe', 'inherit'] });
  for await (const line of child.stdout) if (/ready to accept connections/i.test(String(line))) break;
  return child;
}
