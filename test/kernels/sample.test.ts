import assert from 'node:assert/strict';
import { test } from 'node:test';
import { NO_TOKEN, sample, SAMPLING_WORDS, writeSamplingRow, type SamplingRow } from '../../kernels/sample.ts';
import { draw, keptTokens } from '../reference/sample.ts';
import {
  assertUntouched,
  createTestRandom,
  f32Tensor,
  guardedTensor,
  openTestDevice,
  readU32,
  runOnDevice,
  u32Tensor,
} from '../support/gpu.ts';

const device = await openTestDevice();
const random = createTestRandom();

const GREEDY: SamplingRow = { temperature: 0, topK: 0, topP: 1, minP: 0, seed: 0, position: 0 };

/** One token for every row of logits. */
async function run(logits: readonly ArrayLike<number>[], rows: readonly SamplingRow[]): Promise<number[]> {
  const vocabulary = logits[0]!.length;
  const count = logits.length;
  const words = new Uint32Array((count + 1) * SAMPLING_WORDS);
  for (const [index, row] of rows.entries()) writeSamplingRow(words, index, row);
  const flat = new Float32Array((count + 1) * vocabulary);
  for (const [index, row] of logits.entries()) flat.set(row, index * vocabulary);
  const tokens = guardedTensor(device, [count + 2], 'u32');
  const tensors = {
    logits: f32Tensor(device, [count + 1, vocabulary], flat),
    sampling: u32Tensor(device, [count + 1, SAMPLING_WORDS], words),
    step: u32Tensor(device, [4], [9999, 1, count, 0]),
  };
  await runOnDevice(device, (recorder) => sample(recorder, { ...tensors, tokens, sampledCount: count + 1 }));
  const result = await readU32(device, tokens);
  assertUntouched(result, count);
  return [...result.slice(0, count)];
}

/** Check that every token is the one whose interval holds the draw. */
function assertDrawn(tokens: readonly number[], logits: ArrayLike<number>, rows: readonly SamplingRow[]): void {
  for (const [index, row] of rows.entries()) {
    const kept = keptTokens(logits, row);
    const at = kept.tokens.indexOf(tokens[index]!);
    assert.ok(at >= 0, `token ${tokens[index]} is not among the ${kept.tokens.length} kept (${JSON.stringify(row)})`);
    const total = kept.cumulative.at(-1)!;
    const target = draw(row.seed, row.position) * total;
    // The kernel sums exponentials in f32, each off by up to 2 · 87 + 3 units in the last place, most by far less.
    const slack = 2e-5 * total;
    const start = at === 0 ? 0 : kept.cumulative[at - 1]!;
    assert.ok(target >= start - slack && target <= kept.cumulative[at]! + slack, `draw ${target}, row ${index}`);
  }
}

test('greedy takes the largest logit of every row', async () => {
  const logits = Array.from({ length: 5 }, () => random.f32(77, 20));
  const expected = logits.map((row) => row.indexOf(Math.max(...row)));
  assert.deepEqual(await run(logits, Array(5).fill(GREEDY)), expected);
});

test('greedy takes the lowest index of equal logits, also of 0 and -0 and below zero', async () => {
  const row = (fill: number, at: Record<number, number>): number[] => {
    const values: number[] = Array(40).fill(fill);
    for (const [index, value] of Object.entries(at)) values[Number(index)] = value;
    return values;
  };
  const logits = [row(1, { 17: 3, 9: 3, 25: 3 }), row(-5, { 12: -0, 11: 0, 20: 0 }), row(-7, {}), row(-9, { 30: -8 })];
  assert.deepEqual(await run(logits, Array(4).fill(GREEDY)), [9, 11, 0, 30]);
  const negativeZeroFirst = [row(-5, { 12: -0, 20: 0 })];
  assert.deepEqual(await run(negativeZeroFirst, [GREEDY]), [12]);
});

test('logits that are NaN or infinite are never chosen', async () => {
  const logits = [NaN, 2, Infinity, 1, -Infinity, 2.5, NaN];
  const sampled = { ...GREEDY, temperature: 1, seed: 3 };
  assert.deepEqual(await run([logits], [GREEDY]), [5]);
  const rows = Array.from({ length: 20 }, (_, position) => ({ ...sampled, position }));
  assertDrawn(await run(Array(20).fill(logits), rows), logits, rows);
});

test('a row without a usable logit gives NO_TOKEN and leaves the others alone', async () => {
  const bad = [NaN, -Infinity, NaN];
  const sampled = { ...GREEDY, temperature: 0.7, topK: 2, topP: 0.9 };
  assert.deepEqual(await run([bad, [0, 1, 0], bad], [GREEDY, GREEDY, sampled]), [NO_TOKEN, 1, NO_TOKEN]);
});

const SETTINGS: readonly (readonly [string, Partial<SamplingRow>])[] = [
  ['temperature 1', { temperature: 1 }],
  ['temperature 0.3', { temperature: 0.3 }],
  ['a temperature near zero', { temperature: 1e-6 }],
  ['top-k 5', { topK: 5 }],
  ['top-k 1', { topK: 1 }],
  ['top-k beyond the vocabulary', { topK: 5000 }],
  ['top-p 0.6', { topP: 0.6 }],
  ['top-p 0', { topP: 0 }],
  ['min-p 0.2', { minP: 0.2 }],
  ['min-p 1', { minP: 1 }],
  ['top-k 20, top-p 0.8 and min-p 0.05', { topK: 20, topP: 0.8, minP: 0.05, temperature: 1.5 }],
];

for (const [name, settings] of SETTINGS) {
  test(`${name}: draws fall into the interval of the token in the kept set`, async () => {
    const logits = random.f32(101, 4);
    const rows = Array.from({ length: 24 }, (_, index) => ({
      ...GREEDY,
      temperature: 1,
      ...settings,
      seed: index % 2 ? 2 ** 40 + index : index,
      position: 100 + index,
    }));
    assertDrawn(await run(Array(rows.length).fill(logits), rows), logits, rows);
  });
}

test('tokens that tie with the last kept one are kept', async () => {
  const logits = [1, 3, 2, 2, 2, 0];
  const rows = Array.from({ length: 60 }, (_, position) => ({ ...GREEDY, temperature: 1, topK: 2, seed: 5, position }));
  const tokens = await run(Array(60).fill(logits), rows);
  assertDrawn(tokens, logits, rows);
  assert.deepEqual(
    [...new Set(tokens)].toSorted((left, right) => left - right),
    [1, 2, 3, 4],
  );
});

test('a vocabulary of 129280 is searched to its end', async () => {
  const logits = random.f32(129280, 3);
  logits[129279] = 8;
  logits[64000] = 7.5;
  const rows = [
    GREEDY,
    { ...GREEDY, temperature: 0.5, topK: 50, topP: 0.95, seed: 11, position: 1 },
    { ...GREEDY, temperature: 1, seed: 11, position: 2 },
  ];
  const tokens = await run([logits, logits, logits], rows);
  assert.equal(tokens[0], 129279);
  assertDrawn(tokens.slice(1), logits, rows.slice(1));
});

test('a row draws the same token alone and in any batch', async () => {
  const logits = Array.from({ length: 6 }, () => random.f32(50, 2));
  const rows = logits.map((_, index) => ({ ...GREEDY, temperature: 1, topP: 0.9, seed: 77, position: index }));
  const together = await run(logits, rows);
  const reversed = await run(logits.toReversed(), rows.toReversed());
  assert.deepEqual(reversed.toReversed(), together);
  assert.deepEqual(await run([logits[3]!], [rows[3]!]), [together[3]]);
});

test('draws are uniform over positions and over seeds', () => {
  for (const numbers of [
    Array.from({ length: 4096 }, (_, position) => draw(1, position)),
    Array.from({ length: 4096 }, (_, seed) => draw(seed, 1)),
  ]) {
    const buckets = Array<number>(16).fill(0);
    for (const number of numbers) buckets[Math.floor(number * 16)]! += 1;
    // 256 expected in each, standard deviation 15.5.
    for (const count of buckets) assert.ok(Math.abs(count - 256) < 5 * 15.5, `buckets ${buckets}`);
  }
});
