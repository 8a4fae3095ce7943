import assert from 'node:assert/strict';
import { test } from 'node:test';
import { roundToBf16, roundToBlockFormat } from '../../kernels/round.ts';
import { throughBlocks, toBf16 } from '../reference/rounding.ts';
import {
  assertClose,
  assertUntouched,
  createTestRandom,
  guardedTensorFrom,
  makePlainStep,
  openTestDevice,
  readF32,
  runOnDevice,
  u32Tensor,
} from '../support/gpu.ts';

const device = await openTestDevice();
const random = createTestRandom();
const exactly = {};

/** Values of many magnitudes, halfway points of every format among them. */
function spread(count: number): Float32Array {
  const values = random.f32(count, 1).map((value, index) => value * 2 ** ((index % 29) - 18));
  for (let index = 3; index < count; index += 7) {
    values[index] = (2 * random.integer(32) + 1) * 2 ** -(2 + random.integer(12)) * (index % 2 ? -1 : 1);
  }
  return values;
}

async function bf16Of(values: Float32Array, shape: readonly number[], rowCount: number): Promise<Float32Array> {
  const x = guardedTensorFrom(device, shape, values);
  const { step } = makePlainStep(device, rowCount);
  await runOnDevice(device, (recorder) => roundToBf16(recorder, { x, step, rowCount: rowCount + 1 }));
  return readF32(device, x);
}

interface Blocks {
  readonly format: 'e4m3' | 'e2m1';
  readonly block: number;
  readonly columns?: number;
}

async function blocksOf(
  values: Float32Array,
  shape: readonly [number, number, number],
  rowCount: number,
  options: Blocks,
): Promise<Float32Array> {
  const x = guardedTensorFrom(device, shape, values);
  const { step } = makePlainStep(device, rowCount);
  await runOnDevice(device, (recorder) => roundToBlockFormat(recorder, { x, step, rowCount, ...options }));
  return readF32(device, x);
}

for (const [rowCount, heads, columns] of [
  [1, 1, 1],
  [3, 1, 37],
  [2, 5, 66],
] as const) {
  test(`${rowCount} x ${heads} vectors of ${columns} become bf16, to nearest with ties to even`, async () => {
    const values = spread(rowCount * heads * columns);
    const result = await bf16Of(values, [rowCount + 2, heads, columns], rowCount);
    assertClose(result, [...values].map(toBf16), exactly);
    assertUntouched(result, values.length);
  });
}

test('halfway values, infinities and not-a-number become the bf16 they should', async () => {
  const ulp = 2 ** -7;
  const values = Float32Array.from([1 + ulp / 2, 1 + (3 * ulp) / 2, -(1 + ulp / 2), 3.4e38, Infinity, -0, NaN]);
  const result = await bf16Of(values, [1, values.length], 1);
  assert.deepEqual([...result], [1, 1 + 2 * ulp, -1, Infinity, Infinity, -0, NaN]);
});

test('only sampled rows are rounded when it is asked for', async () => {
  const values = random.f32(12);
  const x = guardedTensorFrom(device, [4, 3], values);
  const step = u32Tensor(device, [4], [4, 1, 2, 0]);
  await runOnDevice(device, (recorder) => roundToBf16(recorder, { x, step, rowCount: 4, countFrom: 'sampled' }));
  const result = await readF32(device, x);
  assertClose(
    result,
    [...values].map((value, index) => (index < 6 ? toBf16(value) : value)),
    exactly,
  );
});

for (const [format, block, rowCount, heads, width, columns] of [
  ['e4m3', 64, 3, 1, 192, 128],
  ['e4m3', 64, 2, 3, 37, 29],
  ['e4m3', 128, 1, 2, 300, 300],
  ['e2m1', 32, 2, 5, 64, 64],
  ['e2m1', 32, 1, 1, 45, 41],
] as const) {
  test(`${rowCount} x ${heads} vectors of ${width} go through ${format} in blocks of ${block}, their first ${columns} columns`, async () => {
    const values = spread(rowCount * heads * width);
    const options = { format, block, columns };
    const result = await blocksOf(values, [rowCount + 1, heads, width], rowCount, options);
    for (let base = 0; base < values.length; base += width) {
      const own = values.subarray(base, base + width);
      const rounded = throughBlocks(own.subarray(0, columns), format, block).map(toBf16);
      assertClose(result.subarray(base, base + width), [...rounded, ...own.subarray(columns)], exactly);
    }
    assertUntouched(result, values.length);
  });
}

test('blocks have the published values', async () => {
  const blockOf = (values: readonly number[], length: number): Float32Array => {
    const block = new Float32Array(length);
    block.set(values);
    return block;
  };
  const fp8 = blockOf([0.10009766, -3.296875, 0.75, 0.00099945], 64);
  const fp4 = blockOf([0.1, -3.3, 0.75, 0.25, 1.25, 2.4], 32);
  const roundedFp8 = await blocksOf(fp8, [1, 1, 64], 1, { format: 'e4m3', block: 64 });
  const roundedFp4 = await blocksOf(fp4, [1, 1, 32], 1, { format: 'e2m1', block: 32 });
  assert.deepEqual([...roundedFp8.subarray(0, 5)], [0.1015625, -3.25, 0.75, 0.0009765625, 0]);
  assert.deepEqual([...roundedFp4.subarray(0, 7)], [0, -3, 1, 0, 1, 2, 0]);
});

test('a block is scaled by the published power of two', async () => {
  // A tenth of the step below the second value rounds to it under that scale, and would not under half of it.
  for (const [format, largest, scale] of [
    ['e4m3', 448, 1],
    ['e4m3', 449, 2],
    ['e4m3', 3.5, 0.0078125],
    ['e4m3', 1e-4, 2 ** -22],
    ['e2m1', 6, 1],
    ['e2m1', 6.1, 2],
    ['e2m1', 0.75, 0.125],
  ] as const) {
    const least = format === 'e4m3' ? scale * 2 ** -9 : scale / 2;
    const values = Float32Array.from([largest, 0.9 * least, 0.45 * least]);
    const rounded = await blocksOf(values, [1, 1, 3], 1, { format, block: 32 });
    assert.deepEqual([...rounded.subarray(1)], [least, 0], `${format} up to ${largest}`);
  }
});

test('what has been through a format stays what it is', async () => {
  for (const [format, block] of [
    ['e4m3', 64],
    ['e2m1', 32],
  ] as const) {
    const once = await blocksOf(spread(256), [1, 2, 128], 1, { format, block });
    assertClose(await blocksOf(once, [1, 2, 128], 1, { format, block }), once, exactly);
  }
});

test('more columns than there are are refused', async () => {
  const options = { format: 'e4m3', block: 64, columns: 9 } as const;
  await assert.rejects(blocksOf(random.f32(8), [1, 1, 8], 1, options), /9 columns of 8/);
});
