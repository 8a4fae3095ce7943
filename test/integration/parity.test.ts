/**
 * PD parity: what comes out of router, prefill, transfer and decode is what one engine in one process computes.
 *
 * Sixty greedy tokens after prompts around every boundary of the architecture (ratio 4, window 64, page and ratio 128),
 * and the same answers whatever else runs: other requests in the batch, another chunk size, more workers.
 */
import assert from 'node:assert/strict';
import { before, test } from 'node:test';
import type { Sample } from '../../model/choice.ts';
import type { ConfigChoices } from '../../model/config.ts';
import { openEngine, type Engine } from '../../server/engine.ts';
import { loadTokenizer } from '../../model/tokenizer.ts';
import { startCluster, readWholeMetrics, sumOf, type Cluster } from '../support/cluster.ts';
import { createPrng, randomPrompt } from '../support/prng.ts';
import { complete, openCompletion } from '../support/stream.ts';

const SEED = 20260420;
const LENGTHS = [1, 3, 4, 5, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 3000];
const OUTPUT_TOKENS = 60;
const CHUNK_TOKENS = 512;
const CONTEXT_TOKENS = 4096;
const PAGE_TOKENS = 128;
const GREEDY = { temperature: 0, topK: 0, topP: 1, minP: 0, seed: 0 };
const MODEL_DIR = new URL('../../model/nano/', import.meta.url).pathname;

const random = createPrng(SEED);
const prompts = LENGTHS.map((length) => randomPrompt(random, length));
const expected: string[] = [];

/** Prefill in chunks, then decode row by row, in this process. */
async function generateAlone(engine: Engine, prompt: readonly number[]): Promise<number[]> {
  const pages = Array.from({ length: Math.ceil((prompt.length + OUTPUT_TOKENS) / PAGE_TOKENS) }, (_, page) => page);
  const shared = { key: 'alone', slot: 0, pages, sampling: GREEDY, rules: null };
  let sampled: Sample | null = null;
  for (let start = 0; start < prompt.length; start += CHUNK_TOKENS) {
    const end = Math.min(start + CHUNK_TOKENS, prompt.length);
    const last = end === prompt.length;
    const tokens = Uint32Array.from(prompt.slice(start, end));
    const [chunk] = await engine.prefill({
      chunks: [{ ...shared, tokens, next: null, start, end, last, resume: null, keep: null }],
    });
    sampled = chunk!.sample;
  }
  const output = [sampled!.token!];
  while (output.length < OUTPUT_TOKENS) {
    const position = prompt.length + output.length - 1;
    const next = await engine.decode({ rows: [{ ...shared, token: output.at(-1)!, position, drafted: false }] });
    output.push(next[0]![0]!.token!);
  }
  return output;
}

/** What one engine answers to each prompt. */
async function answersAlone(asked: readonly (readonly number[])[], choices: ConfigChoices = {}): Promise<string[]> {
  const adapterName = process.env.HANDOFF_ADAPTER;
  const engine = await openEngine({
    modelDir: MODEL_DIR,
    choices: { contextTokens: CONTEXT_TOKENS, ...choices },
    ...(adapterName ? { adapterName } : {}),
    maxRows: CHUNK_TOKENS,
    maxSequences: 4,
    choosePageCount: () => CONTEXT_TOKENS / PAGE_TOKENS,
    slotCount: 1,
  });
  try {
    const tokenizer = loadTokenizer(MODEL_DIR);
    const answers: string[] = [];
    for (const prompt of asked) answers.push(tokenizer.decode(await generateAlone(engine, prompt)));
    return answers;
  } finally {
    engine.close();
  }
}

before(async () => {
  expected.push(...(await answersAlone(prompts)));
});

function request(prompt: readonly number[]): Parameters<typeof complete>[2] {
  return { prompt, maxTokens: OUTPUT_TOKENS, ignoreEos: true };
}

async function prefilledOnDecode(cluster: Cluster): Promise<number> {
  const samples = await readWholeMetrics(cluster.url);
  return sumOf(samples, 'sglang_realtime_tokens_total', { engine_type: 'decode', mode: 'prefill_compute' });
}

test(`seed ${SEED}: the answers of one engine differ from prompt to prompt`, () => {
  // A model that repeats itself would make every comparison below empty.
  assert.ok(
    new Set(expected).size > LENGTHS.length / 2,
    `${new Set(expected).size} different answers to ${LENGTHS.length} prompts`,
  );
});

for (const setup of [
  { name: 'one worker of each role', args: [] },
  {
    name: 'chunks of 128 tokens and two workers of each role',
    args: ['--prefill', '2', '--decode', '2', '--prefill-chunk-tokens', '128'],
  },
  { name: 'pages of 256 tokens', args: ['--page-tokens', '256', '--prefill-chunk-tokens', '512'] },
]) {
  test(`seed ${SEED}: ${setup.name}`, async (t) => {
    const cluster = await startCluster(setup.args);
    try {
      for (const [index, prompt] of prompts.entries()) {
        await t.test(`a prompt of ${prompt.length} tokens, alone`, async () => {
          const answer = await complete(cluster.url, cluster.model, request(prompt));
          assert.equal(answer.text, expected[index]);
          assert.equal(answer.promptTokens, prompt.length);
          assert.equal(answer.completionTokens, OUTPUT_TOKENS);
          assert.equal(answer.finishReason, 'length');
        });
      }
      await t.test('all prompts at once, streamed', async () => {
        const texts = await Promise.all(
          prompts.map((prompt) => openCompletion(cluster.url, cluster.model, request(prompt)).text),
        );
        assert.deepEqual(texts, expected);
      });
      await t.test('decode computed no prompt token', async () => {
        assert.equal(await prefilledOnDecode(cluster), 0);
      });
    } finally {
      await cluster.stop();
    }
  });
}

test(`seed ${SEED}: official rounding, with pages of FP4 index keys`, async () => {
  const chosen = [5, 257, 1000];
  const asked = prompts.filter((prompt) => chosen.includes(prompt.length));
  const answers = await answersAlone(asked, { mode: 'q' });
  const others = expected.filter((_, index) => chosen.includes(LENGTHS[index]!));
  assert.notDeepEqual(answers, others, 'another mode answers random prompts in another way');
  const cluster = await startCluster(['--mode', 'q']);
  try {
    const texts = asked.map((prompt) => openCompletion(cluster.url, cluster.model, request(prompt)).text);
    assert.deepEqual(await Promise.all(texts), answers);
  } finally {
    await cluster.stop();
  }
});
