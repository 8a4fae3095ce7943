import assert from 'node:assert/strict';
import { test } from 'node:test';
import { Recorder } from '../../kernels/kernel.ts';
import { rmsnorm } from '../../kernels/rmsnorm.ts';
import { toBf16 } from '../reference/rounding.ts';
import {
  assertClose,
  assertSameBits,
  assertUntouched,
  createTestRandom,
  f32Tensor,
  guardedTensor,
  guardedTensorFrom,
  makePlainStep,
  openTestDevice,
  readF32,
  runOnDevice,
  u32Tensor,
} from '../support/gpu.ts';

const device = await openTestDevice();
const random = createTestRandom();
const eps = 1e-6;

// The sum of squares of d numbers is off by less than d roundings (all terms are positive), the rest by a few more;
// WGSL allows sqrt and division 2.5 to 4 units in the last place.
const roundings = (columns: number): { relative: number } => ({ relative: (columns + 16) * 2 ** -24 });

function expected(x: Float32Array, columns: number, weight?: Float32Array): Float64Array {
  return Float64Array.from(x, (value, index) => {
    const vector = x.subarray(index - (index % columns), index - (index % columns) + columns);
    const mean = vector.reduce((sum, element) => sum + element * element, 0) / columns;
    return (value / Math.sqrt(mean + eps)) * (weight?.[index % columns] ?? 1);
  });
}

for (const [rowCount, heads, columns] of [
  [1, 1, 1],
  [3, 1, 37],
  [2, 5, 64],
  [1, 3, 130],
] as const) {
  for (const weighted of [true, false]) {
    for (const inPlace of [true, false]) {
      const name = `${rowCount} x ${heads} vectors of ${columns}, ${weighted ? 'weighted' : 'plain'}, ${inPlace ? 'in place' : 'into another tensor'}`;
      test(`${name}, agree with f64 within the rounding of f32`, async () => {
        const x = random.f32(rowCount * heads * columns, 3);
        const scales = weighted ? random.f32(columns) : undefined;
        const shape = [rowCount + 2, heads, columns];
        const out = inPlace ? guardedTensorFrom(device, shape, x) : guardedTensor(device, shape);
        const input = inPlace
          ? out
          : f32Tensor(device, shape, x.length ? [...x, ...Array(2 * heads * columns).fill(9)] : []);
        const weight = scales ? { weight: f32Tensor(device, [columns], scales) } : {};
        const { step } = makePlainStep(device, rowCount);
        await runOnDevice(device, (recorder) =>
          rmsnorm(recorder, { x: input, ...weight, out, step, eps, rowCount: rowCount + 1 }),
        );
        const result = await readF32(device, out);
        assertClose(result, expected(x, columns, scales), roundings(columns));
        assertUntouched(result, x.length);
      });
    }
  }
}

test('eps keeps a vector of zeros at zero and bounds a tiny one', async () => {
  const x = Float32Array.from([0, 0, 0, 0, 1e-9, 1e-9, 1e-9, 1e-9]);
  const out = guardedTensorFrom(device, [3, 4], x);
  const { step } = makePlainStep(device, 2);
  await runOnDevice(device, (recorder) => rmsnorm(recorder, { x: out, out, step, eps, rowCount: 2 }));
  const result = await readF32(device, out);
  assert.deepEqual([...result.slice(0, 4)], [0, 0, 0, 0]);
  assertClose(result.slice(4, 8), [1e-6, 1e-6, 1e-6, 1e-6], { relative: 1e-5 });
});

test('a plain norm is computed in bf16 on request, and a weighted one is not', async () => {
  // Multiples of 1/8 below 16: their squares, rounded or not, are summed exactly.
  const x = Float32Array.from({ length: 48 }, (_, index) => ((index * 37) % 125) / 8);
  const out = guardedTensorFrom(device, [2, 2, 24], x);
  const { step } = makePlainStep(device, 1);
  const call = { x: out, out, step, eps, rowCount: 1, inBf16: true };
  await runOnDevice(device, (recorder) => rmsnorm(recorder, call));
  const factors = [x.subarray(0, 24), x.subarray(24)].map((vector) => {
    const mean = toBf16(Math.fround(vector.reduce((sum, value) => sum + toBf16(value * value), 0) / 24));
    return toBf16(1 / Math.sqrt(toBf16(mean + eps)));
  });
  const result = await readF32(device, out);
  assert.deepEqual(
    [...result.subarray(0, 48)],
    [...x].map((value, index) => toBf16(Math.fround(value * factors[Math.floor(index / 24)]!))),
  );
  assert.notDeepEqual(result.subarray(0, 48), expected(x, 24).map(toBf16), 'rounding the result alone is not enough');
  assertUntouched(result, 48);
  const weight = f32Tensor(device, [24]);
  assert.throws(() => rmsnorm(new Recorder(device), { ...call, weight }), /in f32/);
});

test('a row has the same bits alone and in a step of five', async () => {
  const columns = 100;
  const x = random.f32(5 * columns);
  const normalise = async (rows: Float32Array): Promise<Float32Array> => {
    const rowCount = rows.length / columns;
    const out = guardedTensorFrom(device, [rowCount, columns], rows);
    const { step } = makePlainStep(device, rowCount);
    await runOnDevice(device, (recorder) => rmsnorm(recorder, { x: out, out, step, eps, rowCount }));
    return readF32(device, out);
  };
  const together = await normalise(x);
  assertSameBits(await normalise(x.slice(300, 400)), together.slice(300, 400));
});

test('the count of sampled rows bounds the rows when it is asked for', async () => {
  const x = random.f32(4 * 8);
  const out = guardedTensor(device, [4, 8]);
  const step = u32Tensor(device, [4], [4, 1, 2, 0]);
  const input = f32Tensor(device, [4, 8], x);
  await runOnDevice(device, (recorder) =>
    rmsnorm(recorder, { x: input, out, step, eps, rowCount: 4, countFrom: 'sampled' }),
  );
  const result = await readF32(device, out);
  assertClose(result, expected(x, 8).slice(0, 16), roundings(8));
  assertUntouched(result, 16);
});
