import assert from 'node:assert/strict';
import { test } from 'node:test';
import { indexKeyWords, type IndexPrecision } from '../../kernels/index-keys.ts';
import { hadamard, selectEntries } from '../../kernels/indexer.ts';
import { Recorder } from '../../kernels/kernel.ts';
import { hadamardTransform, indexScore, largestIndices } from '../reference/attention.ts';
import { encodedKey, readBackKey } from '../reference/index-keys.ts';
import { toBf16 } from '../reference/rounding.ts';
import {
  assertClose,
  assertUntouched,
  createTestRandom,
  f32Tensor,
  guardedTensor,
  guardedTensorFrom,
  makePlainStep,
  makeStep,
  openTestDevice,
  readF32,
  readU32,
  runOnDevice,
  u32Tensor,
  type TestChunk,
} from '../support/gpu.ts';

const device = await openTestDevice();
const random = createTestRandom();

for (const [rowCount, heads, width] of [
  [1, 16, 64],
  [5, 32, 16],
  [3, 64, 128],
  [2, 3, 1],
] as const) {
  test(`${rowCount} rows of ${heads} x ${width} index queries are transformed in place`, async () => {
    const values = random.f32(rowCount * heads * width, 2);
    const queries = guardedTensorFrom(device, [rowCount + 2, heads, width], values);
    await runOnDevice(device, (recorder) => {
      hadamard(recorder, { queries, step: makePlainStep(device, rowCount).step, rowCount });
    });
    const actual = await readF32(device, queries);
    for (let base = 0; base < values.length; base += width) {
      // Sums of at most 128 values below 2, scaled back to order 2.
      const expected = hadamardTransform([...values.subarray(base, base + width)]);
      assertClose(actual.subarray(base, base + width), expected, { absolute: 5e-6 });
    }
    assertUntouched(actual, values.length);
  });
}

test('the transform has the published values', async () => {
  const values = new Float32Array(128);
  values[0] = 1;
  values[3] = 2;
  const queries = guardedTensorFrom(device, [2, 1, 128], values);
  await runOnDevice(device, (recorder) => {
    hadamard(recorder, { queries, step: makePlainStep(device, 1).step, rowCount: 1 });
  });
  const first = [0.26516504, -0.08838835, -0.08838835, 0.26516504];
  assertClose((await readF32(device, queries)).subarray(0, 8), [...first, ...first], {
    absolute: 1e-8,
    relative: 1e-7,
  });
});

interface Sizes {
  readonly heads: number;
  readonly width: number;
  readonly topk: number;
  readonly ratio: number;
  readonly entriesPerPage: number;
  /** Rows of the score scratch. */
  readonly blockRows: number;
}

/**
 * Select with random queries and compare each row that has a choice to make. `tied`: all scores are zero. `whole`: queries,
 * weights and keys are small whole numbers, so that scores are exact in f32 and many are equal. Both must match exactly.
 */
async function checkSelection(
  sizes: Sizes,
  chunks: readonly TestChunk[],
  options: { tied?: boolean; whole?: boolean; precision?: IndexPrecision } = {},
): Promise<void> {
  const { heads, width, topk, ratio, entriesPerPage, blockRows } = sizes;
  const { precision = 'f32' } = options;
  const lastPosition = Math.max(...chunks.map((chunk) => chunk.start + chunk.tokens.length - 1));
  const maxEntries = Math.floor((lastPosition + 1) / ratio);
  const pagesEach = Math.ceil((maxEntries + 1) / entriesPerPage);
  // Pages of all sequences are interleaved, and none is its own index.
  const withPages = chunks.map((chunk, sequence) => ({
    ...chunk,
    pages: Array.from({ length: pagesEach }, (_, index) => (pagesEach - 1 - index) * chunks.length + sequence),
  }));
  const step = makeStep(device, withPages);
  const { rowCount } = step;
  const numbers = (count: number): Float32Array =>
    options.whole ? Float32Array.from({ length: count }, () => random.integer(5) - 2) : random.f32(count, 1);
  const queries = numbers(rowCount * heads * width);
  const weights = numbers(rowCount * heads);
  if (options.tied) queries.fill(0);
  const keys = Array.from({ length: pagesEach * chunks.length * entriesPerPage }, () => numbers(width));
  const words = indexKeyWords(width, precision);
  const stored = keys.flatMap((key) => [...encodedKey(key, precision)]);
  const selected = guardedTensor(device, [rowCount + 2, topk], 'u32');
  const scores = guardedTensor(device, [blockRows, maxEntries + 5]);
  await runOnDevice(device, (recorder) => {
    selectEntries(recorder, {
      queries: f32Tensor(device, [rowCount, heads, width], queries),
      headWeights: f32Tensor(device, [rowCount, heads], weights),
      keys: u32Tensor(device, [pagesEach * chunks.length, entriesPerPage, words], stored),
      precision,
      scores,
      selected,
      rows: step.rows,
      pageTable: step.pageTable,
      step: step.step,
      ratio,
      rowCount,
      lastPosition,
    });
  });
  const actual = await readU32(device, selected);
  await readF32(device, scores); // checks its guards
  let row = 0;
  for (const chunk of withPages) {
    for (let i = 0; i < chunk.tokens.length; i += 1, row += 1) {
      const count = Math.floor((chunk.start + i + 1) / ratio);
      if (count <= topk) {
        assertUntouched(actual, row * topk, (row + 1) * topk);
        continue;
      }
      const own = Array.from({ length: heads }, (_, head) =>
        queries.subarray((row * heads + head) * width, (row * heads + head + 1) * width),
      );
      const expected = Array.from({ length: count }, (_, entry) => {
        const page = chunk.pages[Math.floor(entry / entriesPerPage)]!;
        const key = readBackKey(keys[page * entriesPerPage + (entry % entriesPerPage)]!, precision);
        return indexScore(own, weights.subarray(row * heads, (row + 1) * heads), key);
      });
      const got = [...actual.subarray(row * topk, (row + 1) * topk)];
      const wanted = largestIndices(expected, topk);
      if (options.tied || options.whole) {
        assert.deepEqual(got, wanted);
        continue;
      }
      assert.ok(
        got.every((entry, slot) => entry < count && (slot === 0 || entry > got[slot - 1]!)),
        `row ${row}: ${got}`,
      );
      // f32 scores may swap entries closer than their error to the boundary; no others.
      const boundary = Math.min(...wanted.map((entry) => expected[entry]!));
      for (const entry of got) assert.ok(expected[entry]! >= boundary - 1e-5, `row ${row} took ${entry}`);
      for (const entry of wanted) {
        assert.ok(got.includes(entry) || expected[entry]! <= boundary + 1e-5, `row ${row} left out ${entry}`);
      }
    }
  }
  assertUntouched(actual, rowCount * topk);
}

const tokens = (count: number): number[] => Array.from({ length: count }, () => 0);

test('one row of a long sequence selects its best entries', async () => {
  const sizes = { heads: 16, width: 64, topk: 64, ratio: 4, entriesPerPage: 32, blockRows: 4 };
  await checkSelection(sizes, [{ start: 1600, tokens: tokens(1) }]);
});

test('rows around the first choice: at most topk entries need none', async () => {
  const sizes = { heads: 32, width: 16, topk: 8, ratio: 4, entriesPerPage: 4, blockRows: 64 };
  await checkSelection(sizes, [{ start: 30, tokens: tokens(12) }]);
});

test('several sequences, and more rows than the scratch holds', async () => {
  const sizes = { heads: 16, width: 64, topk: 24, ratio: 4, entriesPerPage: 32, blockRows: 3 };
  await checkSelection(sizes, [
    { start: 97, tokens: tokens(6) },
    { start: 400, tokens: tokens(1) },
    { start: 0, tokens: tokens(4) },
    { start: 255, tokens: tokens(2) },
  ]);
});

test('head counts that are no multiple of a pass, and a topk of one', async () => {
  await checkSelection({ heads: 3, width: 8, topk: 1, ratio: 4, entriesPerPage: 4, blockRows: 8 }, [
    { start: 41, tokens: tokens(5) },
  ]);
});

test('topk 512 of 64 heads', async () => {
  const sizes = { heads: 64, width: 128, topk: 512, ratio: 4, entriesPerPage: 32, blockRows: 2 };
  await checkSelection(sizes, [{ start: 2090, tokens: tokens(2) }]);
});

for (const precision of ['bf16', 'fp8', 'fp4'] as const) {
  for (const [heads, width] of [
    [16, 64],
    [3, 2],
    [9, 128],
  ] as const) {
    test(`${heads} heads choose among keys of ${width} dimensions stored as ${precision}`, async () => {
      const sizes = { heads, width, topk: 24, ratio: 4, entriesPerPage: 32, blockRows: 3 };
      const chunks = [
        { start: 255, tokens: tokens(2) },
        { start: 401, tokens: tokens(3) },
      ];
      await checkSelection(sizes, chunks, { precision });
    });
  }
}

test('scores are rounded where the official runtime rounds them', async () => {
  const [heads, width, count] = [5, 16, 9];
  const step = makeStep(device, [{ start: 4 * count - 1, tokens: [0], pages: [0] }]);
  const bf16 = (length: number): Float32Array => random.f32(length, 2).map(toBf16);
  const [queries, weights] = [bf16(heads * width), bf16(heads)];
  const keys = Array.from({ length: count }, () => bf16(width));
  const scores = guardedTensor(device, [1, count + 1]);
  await runOnDevice(device, (recorder) =>
    selectEntries(recorder, {
      ...step,
      queries: f32Tensor(device, [1, heads, width], queries),
      headWeights: f32Tensor(device, [1, heads], weights),
      keys: u32Tensor(
        device,
        [1, count, width],
        keys.flatMap((key) => [...encodedKey(key, 'f32')]),
      ),
      precision: 'f32',
      rounding: true,
      scores,
      selected: guardedTensor(device, [1, 2], 'u32'),
      ratio: 4,
      lastPosition: 4 * count - 1,
    }),
  );
  const expected = keys.map((key) => {
    let total = 0;
    for (let head = 0; head < heads; head += 1) {
      let dot = 0;
      for (let i = 0; i < width; i += 1) dot = Math.fround(dot + Math.fround(queries[head * width + i]! * key[i]!));
      const weight = toBf16(Math.fround(weights[head]! * Math.fround(1 / Math.sqrt(width * heads))));
      total = Math.fround(total + toBf16(Math.fround(weight * Math.max(0, toBf16(dot)))));
    }
    return toBf16(total);
  });
  // A dot product that f32 sums to the other side of a halfway point moves one term by 2^-8 of itself.
  const actual = await readF32(device, scores);
  assertClose(actual, expected, { absolute: 0.02 });
  assert.deepEqual(
    [...actual.subarray(0, count)].filter((score) => score !== toBf16(score)),
    [],
  );
  const same = expected.filter((score, index) => score === actual[index]).length;
  assert.ok(same >= count - 2, `${same} of ${count} scores are the expected bf16`);
});

test('equal scores go to the smaller index', async () => {
  const sizes = { heads: 4, width: 8, topk: 10, ratio: 4, entriesPerPage: 4, blockRows: 8 };
  await checkSelection(sizes, [{ start: 100, tokens: tokens(3) }], { tied: true });
});

test('at 131072 tokens the selection is exact, and equal scores go to the smaller index', async () => {
  // width * heads is 16: the scale is a power of two.
  const sizes = { heads: 2, width: 8, topk: 512, ratio: 4, entriesPerPage: 32, blockRows: 3 };
  await checkSelection(sizes, [{ start: 131_066, tokens: tokens(6) }], { whole: true });
});

test('more entries than the scratch holds are refused', () => {
  const step = makePlainStep(device, 1);
  const record = (): void =>
    selectEntries(new Recorder(device), {
      queries: f32Tensor(device, [1, 2, 8]),
      headWeights: f32Tensor(device, [1, 2]),
      keys: u32Tensor(device, [30, 4, 8]),
      precision: 'f32',
      scores: f32Tensor(device, [1, 20]),
      selected: guardedTensor(device, [1, 4], 'u32'),
      rows: step.rows,
      pageTable: step.pageTable,
      step: step.step,
      ratio: 4,
      rowCount: 1,
      lastPosition: 99,
    });
  assert.throws(record, /25 entries, scratch for 20/);
});
