/**
 * Steps that draft against steps that do not: the same tokens for every prompt, seed and company, whatever the drafts
 * are; the same distribution; and drafts that are those of the draft block computed from scratch. On nano.
 */
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { describe, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { downloadTensor, uploadTensor } from '../../kernels/tensor.ts';
import type { TokenLogprobs } from '../../kernels/logprobs.ts';
import type { Sample } from '../../model/choice.ts';
import type { KvCache } from '../../model/kv-cache.ts';
import {
  forward,
  forwardDrafting,
  forwardLogits,
  forwardMtpLogits,
  forwardSamples,
  type ForwardSequence,
  type SamplingParams,
} from '../../model/transformer.ts';
import { createTestCache, openTestModel, prefillLogits, type TestPlace } from '../support/engine.ts';
import { argmax } from '../support/golden.ts';
import { assertSameBits, createTestRandom, openTestDevice } from '../support/gpu.ts';

const BATCH = 64;
const device = await openTestDevice();
const random = createTestRandom();
const model = await openTestModel(device, fileURLToPath(new URL('../../model/nano', import.meta.url)), {
  maxRows: 640,
  maxSequences: BATCH,
  maxPositions: 640,
  mtp: true,
});
const { vocabSize, windowTokens } = model.config;
const greedy: SamplingParams = { temperature: 0, topK: 0, topP: 1, minP: 0, seed: 0 };
const samples = readFileSync(new URL('../data/nano-samples.jsonl', import.meta.url), 'utf8')
  .trim()
  .split('\n')
  .map((line) => JSON.parse(line) as { prompt_ids: number[]; output_ids: number[] });

/** A request and how far it is. */
interface Run {
  readonly place: TestPlace;
  readonly prompt: readonly number[];
  readonly sampling: SamplingParams;
  readonly maxTokens: number;
  readonly output: number[];
  drafts: number;
  rightDrafts: number;
}

interface Asked {
  readonly prompt: readonly number[];
  readonly maxTokens: number;
  readonly sampling?: SamplingParams;
}

function start(place: TestPlace, { prompt, maxTokens, sampling = greedy }: Asked): Run {
  return { place, prompt, sampling, maxTokens, output: [], drafts: 0, rightDrafts: 0 };
}

/** The prompts in chunks, many to a step; the last one of a prompt samples. */
async function prefill(cache: KvCache, runs: readonly Run[], chunk = 256): Promise<void> {
  const waiting = runs.flatMap((run) =>
    Array.from({ length: Math.ceil(run.prompt.length / chunk) }, (_, index) => ({ run, from: index * chunk })),
  );
  while (waiting.length > 0) {
    const step: { run: Run; sequence: ForwardSequence }[] = [];
    let rows = 0;
    for (const { run, from } of [...waiting]) {
      const tokens = run.prompt.slice(from, from + chunk);
      // A chunk needs the state of the one before it, so it waits for the next step.
      if (rows + tokens.length > model.limits.maxRows || step.some((other) => other.run === run)) break;
      const next = run.prompt[from + chunk];
      const sampling = next === undefined ? run.sampling : null;
      step.push({ run, sequence: { ...run.place, start: from, tokens, next, sampling } });
      rows += tokens.length;
      waiting.shift();
    }
    const batch = { phase: 'prefill', sequences: step.map(({ sequence }) => sequence) } as const;
    const sampled = cache.draft
      ? (await forwardDrafting(model, cache, batch)).flat()
      : await forward(model, cache, batch);
    const ended = step.filter(({ sequence }) => sequence.sampling !== null);
    for (const [index, { run }] of ended.entries()) run.output.push(sampled[index]!);
  }
}

/** One decode step of all that are not done. `isDrafted` false leaves a sequence's draft unused. */
async function decode(cache: KvCache, runs: readonly Run[], isDrafted = (_: Run): boolean => true): Promise<void> {
  const going = runs.filter(({ output, maxTokens }) => output.length < maxTokens);
  const sequences = going.map((run): ForwardSequence => {
    const { place, prompt, output, sampling } = run;
    const drafted = cache.draft !== null && isDrafted(run);
    const tokens = drafted ? [output.at(-1)!, 0] : [output.at(-1)!];
    return { ...place, start: prompt.length + output.length - 1, tokens, sampling, drafted };
  });
  const batch = { phase: 'decode', sequences } as const;
  const sampled = cache.draft
    ? await forwardDrafting(model, cache, batch)
    : (await forward(model, cache, batch)).map((token) => [token]);
  for (const [index, run] of going.entries()) {
    const tokens = sampled[index]!;
    run.drafts += sequences[index]!.drafted ? 1 : 0;
    run.rightDrafts += tokens.length - 1;
    run.output.push(...tokens.slice(0, run.maxTokens - run.output.length));
  }
}

/** Answers to all requests, in batches of at most `batch`. */
async function answer(
  asked: readonly Asked[],
  options: { drafting: boolean; batch?: number; chunk?: number },
): Promise<{ outputs: number[][]; rightShare: number }> {
  const { drafting, batch = BATCH, chunk } = options;
  const { cache, places } = createTestCache(model, batch, { draft: drafting });
  const runs: Run[] = [];
  for (let first = 0; first < asked.length; first += batch) {
    const group = asked.slice(first, first + batch).map((request, index) => start(places[index]!, request));
    await prefill(cache, group, chunk);
    while (group.some(({ output, maxTokens }) => output.length < maxTokens)) await decode(cache, group);
    runs.push(...group);
  }
  cache.destroy();
  const sum = (of: (run: Run) => number): number => runs.reduce((total, run) => total + of(run), 0);
  return {
    outputs: runs.map(({ output }) => output),
    rightShare:
      sum((run) => run.rightDrafts) /
      Math.max(
        1,
        sum((run) => run.drafts),
      ),
  };
}

/** A prompt of pieces of the samples, to which the model has something to say, and of ids without sense. */
function generatePrompt(): number[] {
  const prompt: number[] = [0];
  const length = 2 + random.integer(random.uniform() < 0.05 ? 250 : 50);
  while (prompt.length < length) {
    const { prompt_ids: ids } = samples[random.integer(samples.length)]!;
    const from = random.integer(ids.length);
    prompt.push(...ids.slice(from, from + 1 + random.integer(60)));
    if (random.uniform() < 0.3) prompt.push(...Array.from({ length: 5 }, () => random.integer(vocabSize)));
  }
  return prompt.slice(0, length);
}

describe('greedy answers with drafts', () => {
  test("are the reference's on all samples, and most drafts are right", async (t) => {
    const asked = samples.map(({ prompt_ids: prompt, output_ids: ids }) => ({ prompt, maxTokens: ids.length }));
    const { outputs, rightShare } = await answer(asked, { drafting: true });
    t.diagnostic(`${(100 * rightShare).toFixed(1)} % of the drafts were right`);
    assert.deepEqual(
      outputs,
      samples.map(({ output_ids: ids }) => ids),
    );
    // Far below what this model reaches (0.9), far above what drafts by chance, or of the token before, would.
    assert.ok(rightShare > 0.6, `${rightShare}`);
  });

  test('are those without on 200 generated prompts, in other company', async (t) => {
    const asked = Array.from({ length: 200 }, () => ({ prompt: generatePrompt(), maxTokens: 6 + random.integer(10) }));
    const plain = await answer(asked, { drafting: false });
    const mixed = asked.map((request, index) => ({ request, index, at: random.uniform() }));
    mixed.sort((left, right) => left.at - right.at);
    const { outputs, rightShare } = await answer(
      mixed.map(({ request }) => request),
      { drafting: true, batch: 40, chunk: 128 },
    );
    t.diagnostic(`${(100 * rightShare).toFixed(1)} % of the drafts were right`);
    for (const [place, { index }] of mixed.entries()) assert.deepEqual(outputs[place], plain.outputs[index]);
    assert.ok(rightShare > 0.3 && rightShare < 0.99, `both outcomes of a draft must occur: ${rightShare}`);
  });
});

test('rules that each token has alone, and log probabilities, are the same with drafts', async () => {
  const { prompt_ids: prompt } = samples[0]!;
  const bias = { ids: [5, 77], amounts: [3, -100] };
  const asked = { rules: { bias, banned: [9] }, logprobs: 3 };
  const answers: Sample[][] = [];
  const prompts: TokenLogprobs[][] = [];
  for (const drafting of [false, true]) {
    const { cache, places } = createTestCache(model, 1, { draft: drafting });
    const told = { topCount: 3, into: [] as TokenLogprobs[] };
    const first = { ...places[0]!, start: 0, tokens: prompt, sampling: greedy, told, ...asked };
    const found = (await forwardSamples(model, cache, { phase: 'prefill', sequences: [first] })).flat();
    while (found.length < 24) {
      const start = prompt.length + found.length - 1;
      const last = found.at(-1)!.token!;
      const tokens = drafting ? [last, 0] : [last];
      const sequences = [{ ...places[0]!, start, tokens, sampling: greedy, drafted: drafting, ...asked }];
      found.push(...(await forwardSamples(model, cache, { phase: 'decode', sequences })).flat());
    }
    answers.push(found.slice(0, 24));
    prompts.push(told.into);
    if (drafting) {
      const penalties = { presence: 1, frequency: 0, repetition: 1, prompt: [], generated: [] };
      const sequence = { ...places[0]!, start: 5, tokens: [1, 0], sampling: greedy, drafted: true };
      const batch = { phase: 'decode', sequences: [{ ...sequence, rules: { penalties } }] } as const;
      await assert.rejects(forwardSamples(model, cache, batch), /rules look at earlier tokens/);
    }
    cache.destroy();
  }
  assert.deepEqual(answers[1], answers[0]);
  assert.equal(prompts[0]!.length, prompt.length - 1);
  assert.deepEqual(prompts[1], prompts[0]);
});

describe('a sequence whose drafts are wrong', () => {
  // Long enough for every phase of both compressors, the window's ring more than once, a selection, and a second page.
  const ids = [...Array(9)].flatMap(() => samples[random.integer(samples.length)]!.prompt_ids).slice(0, 300);
  const from = 90;

  /** Put the slot's draft there by hand. */
  const setDraft = (cache: KvCache, { slot }: TestPlace, token: number): void =>
    uploadTensor(device, cache.draft!.tokens, Uint32Array.of(token), slot * 4);
  const draftOf = async (cache: KvCache, { slot }: TestPlace): Promise<number> =>
    new Uint32Array(await downloadTensor(device, cache.draft!.tokens))[slot]!;

  test('computes the same bits in every layer as one without drafts, at every position', async () => {
    const { cache, places } = createTestCache(model, 2);
    const place = places[0]!;
    const expected = await prefillLogits(model, cache, { place: places[1]!, ids, chunk: 300 });
    const run: Run = start(place, { prompt: ids.slice(0, from), maxTokens: 1 });
    await prefill(cache, [run]);
    for (let position = from; position < ids.length - 1; position++) {
      // A draft that the model does not sample: its row passes through all layers and leaves its traces everywhere.
      setDraft(cache, place, (argmax(expected[position]!) + 1 + random.integer(vocabSize - 1)) % vocabSize);
      const sequence = { ...place, start: position, tokens: [ids[position]!, 0], sampling: greedy, drafted: true };
      const [sampled] = await forwardDrafting(model, cache, { phase: 'decode', sequences: [sequence] });
      assert.deepEqual(sampled, [argmax(expected[position]!)], `position ${position}`);
      const at = { ...place, start: position + 1, tokens: [ids[position + 1]!], sampling: null };
      const batch = { phase: 'decode', sequences: [at], positions: 'all' } as const;
      const [logits] = await forwardLogits(model, cache, batch);
      assertSameBits(logits!, expected[position + 1]!, `position ${position + 1}`);
    }
    cache.destroy();
  });

  test('gets the drafts that the draft block computes from scratch, after right, wrong and no drafts', async () => {
    const { cache, places } = createTestCache(model, 2);
    const place = places[0]!;
    const sequence = { ...places[1]!, start: 0, tokens: ids, sampling: null };
    const main = await prefillLogits(model, cache, { place: places[1]!, ids, chunk: 300 });
    const draft = await forwardMtpLogits(model, cache, { phase: 'prefill', sequence, positions: 'all' });
    const run: Run = start(place, { prompt: ids.slice(0, from), maxTokens: 1 });
    await prefill(cache, [run], 37);
    let compared = 0;
    const outcomes = new Set<string>();
    const isRight = (position: number): boolean => argmax(main[position]!) === ids[position + 1];
    for (let position = from; position < ids.length - 2;) {
      const known = { ...place, start: position, tokens: [ids[position]!], sampling: null, next: ids[position + 1]! };
      if (!isRight(position)) {
        // The model would say something else. As in a prompt, it is told, so that both windows hold the same.
        await forwardDrafting(model, cache, { phase: 'decode', sequences: [known] });
        position += 1;
        continue;
      }
      const kind = (['right', 'wrong', 'none'] as const)[random.integer(3)]!;
      if (kind === 'right' && !isRight(position + 1)) continue;
      if (kind !== 'none') setDraft(cache, place, (ids[position + 1]! + (kind === 'right' ? 0 : 1)) % vocabSize);
      const drafted = kind !== 'none';
      const tokens = drafted ? [ids[position]!, 0] : [ids[position]!];
      const step = { ...place, start: position, tokens, sampling: greedy, drafted };
      const [sampled] = await forwardDrafting(model, cache, { phase: 'decode', sequences: [step] });
      assert.equal(sampled!.length, kind === 'right' ? 2 : 1);
      position += sampled!.length;
      const found = await draftOf(cache, place);
      assert.equal(found, argmax(draft[position - 1]!), `position ${position - 1}, draft ${kind}`);
      compared += 1;
      outcomes.add(kind);
    }
    assert.ok(compared > 50 && outcomes.size === 3, `${compared} drafts, after ${[...outcomes].join()}`);
    cache.destroy();
  });

  test('takes its draft along to another cache', async () => {
    const home = createTestCache(model, 2);
    const away = createTestCache(model, 3);
    for (const length of [1, 2, windowTokens, 129, 200]) {
      const [here, there] = [home.places[1]!, away.places[2]!];
      const stays = start(here, { prompt: ids.slice(0, length), maxTokens: 12 });
      await prefill(home.cache, [stays], 128);
      const pages = here.pages.slice(0, Math.ceil(length / model.config.pageTokens));
      const units = await home.cache.readUnits({ pages, slot: here.slot });
      for (const [index, bytes] of units.slice(0, -1).entries()) away.cache.writePage(there.pages[index]!, bytes);
      away.cache.writeSlot(there.slot, units.at(-1)!);
      const goes: Run = { ...stays, place: there, output: [...stays.output] };
      while (stays.output.length < stays.maxTokens) {
        await decode(home.cache, [stays]);
        await decode(away.cache, [goes]);
        assert.deepEqual(goes, { ...stays, place: there });
        assert.equal(await draftOf(away.cache, there), await draftOf(home.cache, here));
      }
      assert.ok(stays.drafts > 0, `${stays.drafts} drafts`);
    }
    home.cache.destroy();
    away.cache.destroy();
  });
});

describe('sampled answers with drafts', () => {
  const warm = (seed: number): SamplingParams => ({ ...greedy, temperature: 1, seed });
  // Ids without sense: the model is in doubt, and so is its draft block.
  const prompts = Array.from({ length: 8 }, () => [0, ...Array.from({ length: 10 }, () => random.integer(vocabSize))]);
  const asked = Array.from({ length: 2 * BATCH }, (_, index): Asked => ({
    prompt: prompts[index % prompts.length]!,
    maxTokens: 12,
    sampling: warm(random.integer(2 ** 32)),
  }));

  test('are, seed by seed, those without, whatever is cut off the distribution', async () => {
    const cuts = [{ temperature: 1.5 }, { topK: 5 }, { topP: 0.8 }, { minP: 0.05 }];
    const cut = asked.slice(0, BATCH).map((request, index): Asked => {
      const { seed } = request.sampling!;
      return { ...request, maxTokens: 6, sampling: { ...warm(seed), ...cuts[index % cuts.length] } };
    });
    const plain = await answer(cut, { drafting: false });
    const { outputs } = await answer(cut, { drafting: true, batch: 50 });
    assert.deepEqual(outputs, plain.outputs);
  });

  test('are distributed as the model says, and a sampler that lets wrong drafts pass is caught', async (t) => {
    const plain = await answer(asked, { drafting: false });
    const { outputs, rightShare } = await answer(asked, { drafting: true });
    assert.deepEqual(outputs, plain.outputs);
    const honest = chiSquare(await ranks(asked, outputs));
    const biased = chiSquare(await ranks(asked, await answerBiased(asked, 0.25)));
    t.diagnostic(`${(100 * rightShare).toFixed(1)} % of the drafts were right`);
    t.diagnostic(`chi-square of ${BINS} bins: ${honest.toFixed(1)}, of the biased sampler ${biased.toFixed(1)}`);
    assert.ok(rightShare > 0.1 && rightShare < 0.9, `both outcomes of a draft must occur: ${rightShare}`);
    assert.ok(honest < CHI_SQUARE_LIMIT, `${honest}`);
    assert.ok(biased > CHI_SQUARE_LIMIT, `${biased}`);
  });

  const BINS = 10;
  /** A chi-square variable of 9 degrees of freedom is above this once in a thousand times. */
  const CHI_SQUARE_LIMIT = 27.88;

  /** Of uniform numbers: how far their counts in equal bins are from equal. */
  function chiSquare(uniforms: readonly number[]): number {
    const counts = Array.from({ length: BINS }, () => 0);
    for (const uniform of uniforms) counts[Math.min(BINS - 1, Math.floor(uniform * BINS))]! += 1;
    const expected = uniforms.length / BINS;
    return counts.reduce((sum, count) => sum + (count - expected) ** 2 / expected, 0);
  }

  /**
   * For each token of each answer, a number that is uniform in [0, 1) if the token was drawn from the model's softmax at
   * temperature 1 after all before it: the probability of all likelier tokens, plus a random share of its own.
   */
  async function ranks(requests: readonly Asked[], outputs: readonly (readonly number[])[]): Promise<number[]> {
    const { cache, places } = createTestCache(model, BATCH, { draft: false });
    const found: number[] = [];
    const together = Math.floor(model.limits.maxRows / Math.max(...outputs.map((output) => 11 + output.length)));
    for (let first = 0; first < requests.length; first += together) {
      const group = requests.slice(first, first + together).map(({ prompt }, index) => ({
        prompt,
        place: places[index]!,
        output: outputs[first + index]!,
      }));
      const sequences = group.map(({ prompt, place, output }) => ({
        ...place,
        start: 0,
        tokens: [...prompt, ...output.slice(0, -1)],
        sampling: null,
      }));
      // All prompts have one length.
      const positions = Array.from({ length: 12 }, (_, index) => group[0]!.prompt.length - 1 + index);
      const rows = await forwardLogits(model, cache, { phase: 'prefill', sequences, positions });
      for (const [index, token] of group.flatMap(({ output }) => output).entries()) {
        const row = rows[index]!;
        const largest = Math.max(...row);
        const weights = Array.from(row, (logit) => Math.exp(logit - largest));
        const total = weights.reduce((sum, weight) => sum + weight, 0);
        const own = weights[token]!;
        const likelier = weights.reduce((sum, weight) => sum + (weight > own ? weight : 0), 0);
        found.push((likelier + random.uniform() * own) / total);
      }
    }
    cache.destroy();
    return found;
  }

  /** Answers of a sampler that lets a wrong draft pass in `share` of all cases. */
  async function answerBiased(requests: readonly Asked[], share: number): Promise<number[][]> {
    const { cache, places } = createTestCache(model, BATCH);
    const outputs: number[][] = [];
    for (let first = 0; first < requests.length; first += BATCH) {
      const group = requests.slice(first, first + BATCH).map((request, index) => start(places[index]!, request));
      await prefill(cache, group);
      while (group.some(({ output, maxTokens }) => output.length < maxTokens)) {
        const going = group.filter(({ output, maxTokens }) => output.length < maxTokens);
        const drafts = new Uint32Array(await downloadTensor(device, cache.draft!.tokens));
        const before = going.map(({ place }) => drafts[place.slot]!);
        await decode(cache, going);
        for (const [index, run] of going.entries()) {
          const isWrong = run.output.at(-1) !== before[index] && run.output.at(-2) !== before[index];
          if (isWrong && random.uniform() < share) run.output[run.output.length - 1] = before[index]!;
        }
      }
      outputs.push(...group.map(({ output }) => output));
    }
    cache.destroy();
    return outputs;
  }
});
