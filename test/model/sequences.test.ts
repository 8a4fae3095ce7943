/** What a sequence computes is its own affair: not its neighbours', not its place's, not the process's. Bit for bit, on nano. */
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { describe, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import type { TokenLogprobs } from '../../kernels/logprobs.ts';
import { maskWords } from '../../kernels/rules.ts';
import type { SampleRules } from '../../model/choice.ts';
import type { KvCache } from '../../model/kv-cache.ts';
import { forward, forwardLogits, forwardSamples, type ForwardSequence, type Model } from '../../model/transformer.ts';
import { NO_RULES, plainLogprobs, ruledLogits } from '../reference/rules.ts';
import { createTestCache, openTestModel, prefillLogits, type TestPlace } from '../support/engine.ts';
import { argmax } from '../support/golden.ts';
import { assertSameBits, createTestRandom, openTestDevice } from '../support/gpu.ts';

const device = await openTestDevice();
const random = createTestRandom();
const model = await openTestModel(device, fileURLToPath(new URL('../../model/nano', import.meta.url)), {
  maxRows: 512,
  maxSequences: 16,
  maxPositions: 640,
});
const greedy = { temperature: 0, topK: 0, topP: 1, minP: 0, seed: 0 };
const randomIds = (count: number): number[] => Array.from({ length: count }, () => random.integer(1024));

/** Logits of `count` decode steps of one sequence alone, always continuing with the likeliest token. */
async function decodeAlone(
  cache: KvCache,
  place: TestPlace,
  start: number,
  first: number,
  count: number,
): Promise<Float32Array[]> {
  const rows: Float32Array[] = [];
  let token = first;
  for (let step = 0; step < count; step++) {
    const [row] = await prefillLogits(model, cache, {
      place,
      ids: [token],
      chunk: 1,
      start: start + step,
      phase: 'decode',
    });
    rows.push(row!);
    token = argmax(row!);
  }
  return rows;
}

describe('a sequence', () => {
  test('computes the same bits alone and among others, prefill and decode', async () => {
    const lengths = [1, 3, 64, 127, 128, 129, 58];
    const prompts = lengths.map(randomIds);
    const { cache, places } = createTestCache(model, 16);
    const alone: Float32Array[][] = [];
    for (const [index, ids] of prompts.entries()) {
      const rows = await prefillLogits(model, cache, { place: places[index]!, ids, chunk: 512 });
      alone.push([...rows, ...(await decodeAlone(cache, places[index]!, ids.length, argmax(rows.at(-1)!), 5))]);
    }

    // The same prompts again in one step, in other places whose pages and slots have been used before.
    const moved = places.toReversed();
    const sequences = prompts.map((tokens, index): ForwardSequence => ({
      ...moved[index]!,
      start: 0,
      tokens,
      sampling: null,
    }));
    const rows = await forwardLogits(model, cache, { phase: 'prefill', sequences, positions: 'all' });
    let row = 0;
    for (const [index, ids] of prompts.entries()) {
      for (let position = 0; position < ids.length; position++) {
        assertSameBits(rows[row++]!, alone[index]![position]!, `prompt ${index}, position ${position}`);
      }
    }
    const last = prompts.map((ids, index) => argmax(alone[index]![ids.length - 1]!));
    for (let step = 0; step < 5; step++) {
      const batch = prompts.map((ids, index) => ({
        ...moved[index]!,
        start: ids.length + step,
        tokens: [last[index]!],
        sampling: null,
      }));
      const logits = await forwardLogits(model, cache, { phase: 'decode', sequences: batch, positions: 'all' });
      for (const [index, ids] of prompts.entries()) {
        assertSameBits(logits[index]!, alone[index]![ids.length + step]!, `prompt ${index}, decode step ${step}`);
        last[index] = argmax(logits[index]!);
      }
    }
    cache.destroy();
  });

  test('moved to another cache, decodes on with the same bits', async () => {
    const home = createTestCache(model, 2);
    const away = createTestCache(model, 5);
    for (const length of [1, 3, 4, 63, 64, 65, 127, 128, 129, 300]) {
      const ids = randomIds(length);
      const here = home.places[1]!;
      const there = away.places[3]!;
      // The new place has been used by somebody else.
      await prefillLogits(model, away.cache, { place: there, ids: randomIds(200), chunk: 200 });
      const rows = await prefillLogits(model, home.cache, { place: here, ids, chunk: 512 });
      const pageCount = Math.ceil(length / model.config.pageTokens);
      const units = await home.cache.readUnits({ pages: here.pages.slice(0, pageCount), slot: here.slot });
      assert.deepEqual(
        units.map(({ byteLength }) => byteLength),
        [...Array.from({ length: pageCount }, () => home.cache.pageBytes), home.cache.slotBytes],
      );
      const first = argmax(rows.at(-1)!);
      const stayed = await decodeAlone(home.cache, here, length, first, 8);
      for (const [index, bytes] of units.slice(0, -1).entries()) away.cache.writePage(there.pages[index]!, bytes);
      away.cache.writeSlot(there.slot, units.at(-1)!);
      await away.cache.flushed();
      const went = await decodeAlone(away.cache, there, length, first, 8);
      for (const [step, row] of went.entries()) assertSameBits(row, stayed[step]!, `length ${length}, step ${step}`);
    }
    home.cache.destroy();
    away.cache.destroy();
  });

  test('goes on from the pages and the state of another with the same beginning, with the same bits', async () => {
    const { pageTokens } = model.config;
    const sizes = createTestCache(model, 1);
    const { slotBytes } = sizes.cache;
    sizes.cache.destroy();
    const { cache, places } = createTestCache(model, 3, { stateBytes: 4 * slotBytes });
    const prefix = randomIds(3 * pageTokens);
    const [donor, alone, heir] = places;
    // The donor leaves a state at each page, and then goes on where nobody follows.
    for (let start = 0; start < prefix.length; start += pageTokens) {
      const ids = prefix.slice(start, start + pageTokens);
      await prefillLogits(model, cache, { place: donor!, ids, chunk: pageTokens, start });
      cache.keepSlot(donor!.slot, start / pageTokens);
    }
    await prefillLogits(model, cache, { place: donor!, ids: randomIds(70), chunk: 512, start: prefix.length });
    for (const pageCount of [1, 2, 3]) {
      for (const rest of [1, 63, 130]) {
        const start = pageCount * pageTokens;
        const ids = [...prefix.slice(0, start), ...randomIds(rest)];
        const rows = await prefillLogits(model, cache, { place: alone!, ids, chunk: 512 });
        const first = argmax(rows.at(-1)!);
        const expected = [...rows.slice(start), ...(await decodeAlone(cache, alone!, ids.length, first, 8))];
        const place = {
          slot: heir!.slot,
          pages: [...donor!.pages.slice(0, pageCount), ...heir!.pages.slice(pageCount)],
        };
        cache.resumeSlot(pageCount - 1, place.slot);
        const own = await prefillLogits(model, cache, { place, ids: ids.slice(start), chunk: 512, start });
        const actual = [...own, ...(await decodeAlone(cache, place, ids.length, first, 8))];
        assert.equal(actual.length, expected.length);
        for (const [index, row] of actual.entries()) {
          assertSameBits(row, expected[index]!, `${pageCount} pages and ${rest} tokens, row ${index}`);
        }
      }
    }
    cache.destroy();
  });

  test('samples the likeliest token when greedy, and one that depends on seed and position only', async () => {
    const { cache, places } = createTestCache(model, 16);
    const ids = randomIds(40);
    const rows = await prefillLogits(model, cache, { place: places[0]!, ids, chunk: 512 });
    const sampled = async (samplings: ForwardSequence['sampling'][]): Promise<number[]> =>
      forward(model, cache, {
        phase: 'prefill',
        sequences: samplings.map((sampling, index) => ({ ...places[index]!, start: 0, tokens: ids, sampling })),
      });
    assert.deepEqual(await sampled([greedy]), [argmax(rows.at(-1)!)]);
    assert.deepEqual(await sampled([null]), []);
    const warm = (seed: number): ForwardSequence['sampling'] => ({ ...greedy, temperature: 3, seed });
    const [seven] = await sampled([warm(7)]);
    const together = await sampled([warm(1), null, warm(7), greedy, warm(7), warm(2)]);
    assert.equal(together.length, 5);
    assert.deepEqual([together[1], together[3]], [seven, seven]);
    assert.equal(together[2], argmax(rows.at(-1)!));
    const seeds = await sampled(Array.from({ length: 12 }, (_, seed) => warm(seed)));
    assert.ok(new Set(seeds).size > 1, 'twelve seeds at temperature 3 should not all choose the same token');
    cache.destroy();
  });
});

describe('the choice of a token', () => {
  const ids = randomIds(70);
  const best = (logits: Float32Array): number[] =>
    [...logits.keys()].toSorted((left, right) => logits[right]! - logits[left]! || left - right);
  const maskOf = (allowed: readonly number[]): Uint32Array => {
    const mask = new Uint32Array(maskWords(model.config.vocabSize));
    for (const id of allowed) mask[id >> 5]! |= 1 << (id % 32);
    return mask;
  };

  test('is under the rules of its own row, and its log probabilities are those of the logits', async () => {
    const { cache, places } = createTestCache(model, 16);
    const logits = (await prefillLogits(model, cache, { place: places[0]!, ids, chunk: 512 })).at(-1)!;
    const order = best(logits);
    const asked: [rules: SampleRules | null, logprobs: number | null, token: number | null][] = [
      [null, null, order[0]!],
      [{ mask: maskOf(order.slice(5, 9)) }, 2, order[5]!],
      [{ banned: order.slice(0, 3) }, 20, order[3]!],
      [null, 0, order[0]!],
      [{ bias: { ids: [order[700]!], amounts: [100] } }, 5, order[700]!],
      [{ mask: maskOf([]) }, 5, null],
      [{ mask: maskOf([order[9]!]), banned: [order[9]!] }, null, null],
      [{ mask: maskOf([order[0]!, order[1]!]), banned: [order[0]!] }, null, order[1]!],
    ];
    const sequences = asked.map(([rules, logprobs], index) => {
      return { ...places[index + 1]!, start: 0, tokens: ids, sampling: greedy, rules, logprobs };
    });
    const samples = await forwardSamples(model, cache, { phase: 'prefill', sequences });
    for (const [index, [, topCount, token]] of asked.entries()) {
      const [sample] = samples[index]!;
      assert.equal(sample!.token, token, `row ${index}`);
      if (topCount === null || token === null) continue;
      const expected = plainLogprobs(logits, token, topCount);
      assert.deepEqual(
        sample!.logprobs!.top.map((each) => each.id),
        expected.top.map((each) => each.id),
      );
      // As in test/kernels/rules.test.ts.
      assert.ok(Math.abs(sample!.logprobs!.logprob - expected.logprob) < 2e-5, `row ${index}`);
    }
    assert.deepEqual(
      [samples[0]![0]!.logprobs, samples[3]![0]!.logprobs?.top],
      [null, []],
      'who does not ask is told nothing, who asks for none of the likeliest gets the chosen one',
    );
    await assert.rejects(forward(model, cache, { phase: 'prefill', sequences: sequences.slice(5, 6) }), /no token/);
    cache.destroy();
  });

  test('of a prompt is told row by row, however it is cut, and changes nothing of what is sampled', async () => {
    const { cache, places } = createTestCache(model, 16);
    const long = [...randomIds(600 - ids.length), ...ids];
    const rows = await prefillLogits(model, cache, { place: places[0]!, ids: long, chunk: 512 });
    const company = { ...places[1]!, start: 0, tokens: ids, sampling: greedy, logprobs: 3 };
    const [alone] = await forwardSamples(model, cache, { phase: 'prefill', sequences: [company] });
    for (const cuts of [[600], [1, 250, 349]]) {
      const told = { topCount: 2, into: [] as TokenLogprobs[] };
      let start = 0;
      for (const count of cuts) {
        const tokens = long.slice(start, start + count);
        const next = long[start + count];
        const sampling = next === undefined ? greedy : null;
        const own = { ...places[2]!, start, tokens, next, sampling, told };
        const samples = await forwardSamples(model, cache, { phase: 'prefill', sequences: [company, own] });
        assert.deepEqual(samples[0], alone);
        if (next === undefined) assert.equal(samples[1]![0]!.token, argmax(rows.at(-1)!));
        start += count;
      }
      assert.equal(told.into.length, long.length - 1);
      for (const [index, { logprob, top }] of told.into.entries()) {
        const expected = plainLogprobs(rows[index]!, long[index + 1]!, 2);
        // As in test/kernels/rules.test.ts.
        assert.ok(Math.abs(logprob - expected.logprob) < 2e-5, `token ${index + 1}: ${logprob}, ${expected.logprob}`);
        assert.deepEqual(
          top.map(({ id }) => id),
          expected.top.map(({ id }) => id),
        );
      }
    }
    cache.destroy();
  });

  test('is penalised for the tokens of prompt and answer, and a step of many edits is cut', async () => {
    const { cache, places } = createTestCache(model, 16);
    const logits = (await prefillLogits(model, cache, { place: places[0]!, ids, chunk: 512 })).at(-1)!;
    const generated = best(logits).slice(0, 5);
    const penalties = { presence: 1.5, frequency: 0.75, repetition: 1.3, prompt: ids, generated };
    const plain = { ...NO_RULES, ...penalties };
    const expected = best(Float32Array.from(ruledLogits(logits, plain)))[0]!;
    assert.notEqual(expected, generated[0]);
    const sequences = places.map((place) => {
      return { ...place, start: 0, tokens: ids, sampling: greedy, rules: { penalties } };
    });
    const small: Model = { ...model, limits: { ...model.limits, maxEdits: 2 * model.config.vocabSize } };
    const tight: Model = { ...model, limits: { ...model.limits, maxEdits: 160 } };
    for (const each of [small, tight]) {
      const samples = await forwardSamples(each, cache, { phase: 'prefill', sequences });
      assert.deepEqual(
        samples.map(([sample]) => sample!.token),
        places.map(() => expected),
      );
    }
    cache.destroy();
  });
});

test('sixteen sample conversations decode together to the answers of the reference', async () => {
  const lines = readFileSync(new URL('../data/nano-samples.jsonl', import.meta.url), 'utf8')
    .trim()
    .split('\n');
  const samples = lines.map((line) => JSON.parse(line) as { prompt_ids: number[]; output_ids: number[] });
  const chosen = samples.toSorted((left, right) => left.output_ids.length - right.output_ids.length).slice(0, 16);
  const { cache, places } = createTestCache(model, 16);
  const outputs: number[][] = [];
  for (const [index, { prompt_ids: tokens }] of chosen.entries()) {
    outputs.push(
      await forward(model, cache, {
        phase: 'prefill',
        sequences: [{ ...places[index]!, start: 0, tokens, sampling: greedy }],
      }),
    );
  }
  for (;;) {
    const running = chosen
      .map((_, index) => index)
      .filter((index) => outputs[index]!.length < chosen[index]!.output_ids.length);
    if (running.length === 0) break;
    const sequences = running.map((index) => ({
      ...places[index]!,
      start: chosen[index]!.prompt_ids.length + outputs[index]!.length - 1,
      tokens: [outputs[index]!.at(-1)!],
      sampling: greedy,
    }));
    const next = await forward(model, cache, { phase: 'decode', sequences });
    for (const [row, index] of running.entries()) outputs[index]!.push(next[row]!);
  }
  assert.deepEqual(
    outputs,
    chosen.map(({ output_ids: ids }) => ids),
  );
  cache.destroy();
});

describe('a step', () => {
  test('refuses what does not fit, before anything is recorded', async () => {
    const { cache, places } = createTestCache(model, 2);
    const sequence: ForwardSequence = { ...places[0]!, start: 0, tokens: [1], sampling: greedy };
    const refused: [name: string, change: Partial<ForwardSequence>, message: RegExp][] = [
      ['a token past the vocabulary', { tokens: [1024] }, /token 1024 of a vocabulary of 1024/],
      ['a slot that is not there', { slot: 2 }, /slot 2/],
      ['a page that is not there', { pages: [99] }, /page 99/],
      ['too few pages', { pages: [0], start: 128 }, /1 pages for 129 positions/],
      ['a position past the longest sequence', { start: 640 }, /at most 640/],
      ['no tokens', { tokens: [] }, /without tokens/],
    ];
    for (const [name, change, message] of refused) {
      const batch = { phase: 'decode', sequences: [{ ...sequence, ...change }] } as const;
      await assert.rejects(forward(model, cache, batch), message, name);
    }
    assert.equal((await forward(model, cache, { phase: 'decode', sequences: [sequence] })).length, 1);
    cache.destroy();
  });

  test('keeps no bind groups or pipelines of its own: the second run of a shape adds none', async () => {
    const { cache, places } = createTestCache(model, 2);
    const count = (): number => {
      const pipelines = [...device.pipelines.values()] as { bindGroups: Map<string, unknown> }[];
      return pipelines.reduce((sum, { bindGroups }) => sum + bindGroups.size + 1, 0);
    };
    const run = (start: number): Promise<number[]> =>
      forward(model, cache, { phase: 'decode', sequences: [{ ...places[0]!, start, tokens: [5], sampling: greedy }] });
    // Far enough for ratio-4 layers to choose among their entries.
    await run(300);
    const before = count();
    for (let start = 301; start < 340; start++) await run(start);
    assert.equal(count(), before);
    cache.destroy();
  });
});
