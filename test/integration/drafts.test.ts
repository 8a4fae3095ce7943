/**
 * Drafts through router, prefill, transfer and decode: the answers are the reference's, and the first draft of an answer,
 * which prefill makes and decode checks, comes over with the KV.
 */
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { after, before, test } from 'node:test';
import { readWholeMetrics, startCluster, sumOf, type Cluster } from '../support/cluster.ts';

interface Sample {
  readonly prompt_ids: number[];
  readonly output_ids: number[];
  readonly output_text: string;
}

const samples = readFileSync(new URL('../data/nano-samples.jsonl', import.meta.url), 'utf8')
  .trim()
  .split('\n')
  .map((line) => JSON.parse(line) as Sample);

let cluster: Cluster;
before(async () => {
  cluster = await startCluster(['--speculative', 'on']);
});
after(async () => {
  await cluster?.stop();
});

async function answer(sample: Sample, maxTokens: number): Promise<{ text: string; tokens: number }> {
  const response = await fetch(`${cluster.url}/v1/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({
      model: cluster.model,
      prompt: sample.prompt_ids,
      temperature: 0,
      max_tokens: maxTokens,
      skip_special_tokens: false,
    }),
  });
  const body = (await response.json()) as { choices: { text: string }[]; usage: { completion_tokens: number } };
  assert.equal(response.status, 200, JSON.stringify(body));
  return { text: body.choices[0]!.text, tokens: body.usage.completion_tokens };
}

async function draftCounts(): Promise<{ right: number; wrong: number }> {
  const metrics = await readWholeMetrics(cluster.url);
  const count = (outcome: string): number => sumOf(metrics, 'handoff_draft_tokens_total', { outcome });
  return { right: count('right'), wrong: count('wrong') };
}

test('the first draft of an answer comes over with the KV', async () => {
  // Of three tokens prefill samples the first, and only the step that runs it may have a draft.
  const long = samples.filter(({ output_ids: ids }) => ids.length >= 3);
  const answers = await Promise.all(long.map((sample) => answer(sample, 3)));
  for (const [index, { text, tokens }] of answers.entries()) {
    assert.equal(tokens, 3);
    assert.ok(long[index]!.output_text.startsWith(text), text);
  }
  const { right, wrong } = await draftCounts();
  assert.equal(right + wrong, long.length);
  // What lies in a slot that was not sent would be right by chance, one time in a thousand.
  assert.ok(right > 0.5 * long.length, `${right} of ${long.length}`);
});

test('all samples get the answers of the reference, in fewer steps', async () => {
  const before = await draftCounts();
  const answers = await Promise.all(samples.map((sample) => answer(sample, sample.output_ids.length)));
  for (const [index, { text, tokens }] of answers.entries()) {
    assert.equal(text, samples[index]!.output_text);
    assert.equal(tokens, samples[index]!.output_ids.length);
  }
  const { right, wrong } = await draftCounts();
  assert.ok(
    right - before.right > 0.6 * (right + wrong - before.right - before.wrong),
    `${right} right, ${wrong} wrong`,
  );
  const metrics = await readWholeMetrics(cluster.url);
  assert.equal(sumOf(metrics, 'sglang_spec_accept_rate'), right / (right + wrong));
  assert.ok(sumOf(metrics, 'sglang_spec_accept_length') > 1.4, `${sumOf(metrics, 'sglang_spec_accept_length')} a step`);
});
