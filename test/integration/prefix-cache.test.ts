/** The prefix cache on real processes: agents that share a system prompt, what they are told, and what is left of it. */
import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import { startCluster, sumOf, untilMetrics, type Cluster } from '../support/cluster.ts';
import { createPrng, randomPrompt } from '../support/prng.ts';
import { untilQuiet } from '../support/quiet.ts';

const SEED = 55;
const AGENTS = 32;
const PREFIX_TOKENS = 2000;
const SUFFIX_TOKENS = 40;
const OUTPUT_TOKENS = 8;
const PAGE_TOKENS = 128;
/** Agents that are asked again without a cache, where each computes its whole prompt. */
const COMPARED = [1, 20];
const QUIET_MS = 10_000;
const SCRAPE_MS = 60_000;

const random = createPrng(SEED);
const prefix = randomPrompt(random, PREFIX_TOKENS);
const prompts = Array.from({ length: AGENTS }, () => [...prefix, ...randomPrompt(random, SUFFIX_TOKENS)]);

let cluster: Cluster;

before(async () => {
  cluster = await startCluster([]);
});
after(async () => {
  await cluster?.stop();
});

interface Answer {
  text: string;
  cachedTokens: number;
}

async function ask({ url, model }: Cluster, prompt: readonly number[], salts: object = {}): Promise<Answer> {
  const response = await fetch(`${url}/v1/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ model, prompt, max_tokens: OUTPUT_TOKENS, temperature: 0, ignore_eos: true, ...salts }),
  });
  assert.equal(response.status, 200);
  const body = (await response.json()) as {
    choices: { text: string }[];
    usage: { prompt_tokens: number; prompt_tokens_details: { cached_tokens: number } };
  };
  assert.equal(body.usage.prompt_tokens, prompt.length);
  return { text: body.choices[0]!.text, cachedTokens: body.usage.prompt_tokens_details.cached_tokens };
}

async function flush(): Promise<number> {
  const response = await fetch(`${cluster.url}/flush_cache`, { method: 'POST' });
  assert.equal(response.status, 200);
  return ((await response.json()) as { flushed_pages: number }).flushed_pages;
}

/** A metric of the prefill worker, which leaves a scrape out when it is too busy to answer in time. */
async function metric(name: string, labels: Readonly<Record<string, string>>): Promise<number> {
  let value = Number.NaN;
  await untilMetrics(cluster.url, SCRAPE_MS, (samples) => {
    const isThere = samples.some((sample) => sample.name === name && sample.labels['engine_type'] === 'prefill');
    if (isThere) value = sumOf(samples, name, { ...labels, engine_type: 'prefill' });
    return isThere;
  });
  return value;
}

const tokens = (mode: 'prefill_compute' | 'prefill_cache'): Promise<number> =>
  metric('sglang_realtime_tokens_total', { mode });
const cachedPages = (): Promise<number> => metric('handoff_kv_pages', { state: 'cached' });

test(`seed ${SEED}: ${AGENTS} agents that share ${PREFIX_TOKENS} tokens cost one prefix and their own ends`, async () => {
  const before = await tokens('prefill_compute');
  const answers = await Promise.all(prompts.map((prompt) => ask(cluster, prompt)));
  const computed = (await tokens('prefill_compute')) - before;

  // What is shared is whole pages; the second agent makes the state at their end, from one at most two pages earlier.
  const sharedTokens = PAGE_TOKENS * Math.floor(PREFIX_TOKENS / PAGE_TOKENS);
  const ownTokens = PREFIX_TOKENS + SUFFIX_TOKENS - sharedTokens;
  const least = sharedTokens + AGENTS * ownTokens;
  assert.ok(computed >= least && computed <= least + 2 * PAGE_TOKENS, `${computed} tokens, ${least} at least`);
  const cached = answers.map(({ cachedTokens }) => cachedTokens).sort((left, right) => left - right);
  assert.equal(
    cached.reduce((sum, count) => sum + count, computed),
    AGENTS * (PREFIX_TOKENS + SUFFIX_TOKENS),
  );
  assert.deepEqual(
    cached.slice(2),
    Array.from({ length: AGENTS - 2 }, () => sharedTokens),
  );
  assert.equal(
    await tokens('prefill_cache'),
    cached.reduce((sum, count) => sum + count, 0),
  );

  const plain = await startCluster(['--prefix-cache-memory', '0']);
  try {
    for (const index of COMPARED) {
      const { text, cachedTokens } = await ask(plain, prompts[index]!);
      assert.equal(answers[index]!.text, text, `agent ${index}`);
      assert.equal(cachedTokens, 0);
    }
  } finally {
    await plain.stop();
  }
  await untilQuiet(cluster.url, QUIET_MS);
});

test('a conversation computes each turn once, and says so', async () => {
  let prompt = randomPrompt(createPrng(SEED + 1), 300);
  let before = 0;
  for (let turn = 0; turn < 3; turn++) {
    const { cachedTokens } = await ask(cluster, prompt);
    assert.equal(cachedTokens, before, `turn ${turn}`);
    before = PAGE_TOKENS * Math.floor(prompt.length / PAGE_TOKENS);
    prompt = [...prompt, ...randomPrompt(createPrng(SEED + 2 + turn), 200)];
  }
});

// surface: chat.cache-salt
test('a prompt finds what was computed for the same salts, and nothing else', async () => {
  const prompt = randomPrompt(createPrng(SEED + 7), 300);
  const shared = PAGE_TOKENS * Math.floor(prompt.length / PAGE_TOKENS);
  const all = [{}, { cache_salt: 'a' }, { cache_salt: 'b' }, { extra_key: 'a' }, { cache_salt: 'a', extra_key: 'a' }];
  const texts = new Set<string>();
  for (const expected of [0, shared]) {
    for (const salts of all) {
      const { text, cachedTokens } = await ask(cluster, prompt, salts);
      assert.equal(cachedTokens, expected, JSON.stringify(salts));
      texts.add(text);
    }
  }
  assert.equal(texts.size, 1, 'the answer is the same');
});

// surface: chat.n
test('the choices of one request compute its prompt once', async () => {
  const prompt = randomPrompt(createPrng(SEED + 8), 700);
  const choices = 4;
  const before = await tokens('prefill_compute');
  const response = await fetch(`${cluster.url}/v1/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ model: cluster.model, prompt, max_tokens: 3, n: choices, seed: 1 }),
  });
  assert.equal(response.status, 200);
  const { choices: answers, usage } = (await response.json()) as {
    choices: unknown[];
    usage: { prompt_tokens: number; prompt_tokens_details: { cached_tokens: number } };
  };
  assert.equal(answers.length, choices);
  assert.equal(usage.prompt_tokens, prompt.length);
  assert.equal(usage.prompt_tokens_details.cached_tokens, 0, 'what one choice computed for another is not counted');
  const rest = prompt.length % PAGE_TOKENS;
  assert.equal((await tokens('prefill_compute')) - before, prompt.length + (choices - 1) * rest);
});

test('a request that is given up leaves nothing in the cache, and a flush empties it', async () => {
  await untilQuiet(cluster.url, QUIET_MS);
  const pages = await cachedPages();
  assert.ok(pages > 0, `${pages} pages`);
  assert.equal(await flush(), pages);
  assert.equal(await cachedPages(), 0);

  const client = new AbortController();
  const prompt = randomPrompt(createPrng(SEED + 9), 3500);
  const before = await tokens('prefill_compute');
  const request = fetch(`${cluster.url}/v1/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ model: cluster.model, prompt, max_tokens: 5 }),
    signal: client.signal,
  });
  while ((await tokens('prefill_compute')) < before + 256); // some of it is computed, and kept for now
  client.abort();
  await assert.rejects(request);
  await untilQuiet(cluster.url, QUIET_MS);
  assert.equal(await cachedPages(), 0);
});
