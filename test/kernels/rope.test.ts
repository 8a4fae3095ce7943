import { test } from 'node:test';
import { rope } from '../../kernels/rope.ts';
import {
  assertClose,
  assertUntouched,
  createTestRandom,
  f32Tensor,
  guardedTensorFrom,
  makeStep,
  openTestDevice,
  readF32,
  runOnDevice,
} from '../support/gpu.ts';

const device = await openTestDevice();
const random = createTestRandom();

const MAX_POSITIONS = 40;

function tables(pairs: number): { cos: Float32Array; sin: Float32Array } {
  const angles = Float64Array.from({ length: MAX_POSITIONS * pairs }, (_, index) =>
    Math.fround(Math.floor(index / pairs) * Math.fround(10000 ** (-(index % pairs) / pairs))),
  );
  return { cos: Float32Array.from(angles, Math.cos), sin: Float32Array.from(angles, Math.sin) };
}

/** The rotation in f64 with the tables' values. */
function rotate(
  x: Float32Array,
  positions: readonly number[],
  args: { heads: number; columns: number; pairs: number; inverse: boolean },
): Float64Array {
  const { heads, columns, pairs, inverse } = args;
  const { cos, sin } = tables(pairs);
  const result = Float64Array.from(x);
  for (const [row, position] of positions.entries()) {
    for (let head = 0; head < heads; head += 1) {
      for (let pair = 0; pair < pairs; pair += 1) {
        const at = (row * heads + head) * columns + columns - 2 * pairs + 2 * pair;
        const c = cos[position * pairs + pair]!;
        const s = sin[position * pairs + pair]! * (inverse ? -1 : 1);
        result[at] = x[at]! * c - x[at + 1]! * s;
        result[at + 1] = x[at]! * s + x[at + 1]! * c;
      }
    }
  }
  return result;
}

for (const [heads, columns, pairs] of [
  [1, 8, 4],
  [3, 21, 5],
  [4, 128, 32],
] as const) {
  for (const inverse of [false, true]) {
    test(`${inverse ? 'inverse' : 'forward'}: ${heads} heads of ${columns}, the last ${2 * pairs} dimensions turn by the row's own position`, async () => {
      const positions = [7, 8, 9, 0, 39];
      const { step, rows, rowCount } = makeStep(device, [
        { start: 7, tokens: [1, 2, 3] },
        { start: 0, tokens: [4] },
        { start: 39, tokens: [5] },
      ]);
      const values = random.f32(rowCount * heads * columns);
      const x = guardedTensorFrom(device, [rowCount + 2, heads, columns], values);
      const { cos, sin } = tables(pairs);
      const cosTensor = f32Tensor(device, [MAX_POSITIONS, pairs], cos);
      const sinTensor = f32Tensor(device, [MAX_POSITIONS, pairs], sin);
      await runOnDevice(device, (recorder) =>
        rope(recorder, { x, rows, cos: cosTensor, sin: sinTensor, inverse, step, rowCount: rowCount + 1 }),
      );
      const result = await readF32(device, x);
      // Two products and one sum of numbers up to 1: three roundings of at most 2^-24 each.
      assertClose(result, rotate(values, positions, { heads, columns, pairs, inverse }), { absolute: 3 * 2 ** -24 });
      assertUntouched(result, values.length);
    });
  }
}

test('forward and then inverse gives the vector back', async () => {
  const values = random.f32(2 * 16);
  const { step, rows } = makeStep(device, [{ start: 20, tokens: [1, 2] }]);
  const x = guardedTensorFrom(device, [2, 16], values);
  const { cos, sin } = tables(8);
  const shared = {
    x,
    rows,
    cos: f32Tensor(device, [MAX_POSITIONS, 8], cos),
    sin: f32Tensor(device, [MAX_POSITIONS, 8], sin),
    step,
    rowCount: 2,
  };
  await runOnDevice(device, (recorder) => {
    rope(recorder, { ...shared, inverse: false });
    rope(recorder, { ...shared, inverse: true });
  });
  // Two rotations, and cos² + sin² of rounded tables is 1 within 2^-23.
  assertClose(await readF32(device, x), values, { absolute: 2 ** -21 });
});
