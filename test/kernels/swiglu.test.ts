import { test } from 'node:test';
import { swiglu } from '../../kernels/swiglu.ts';
import {
  assertClose,
  assertUntouched,
  createTestRandom,
  f32Tensor,
  guardedTensor,
  makePlainStep,
  openTestDevice,
  readF32,
  runOnDevice,
} from '../support/gpu.ts';

const device = await openTestDevice();
const random = createTestRandom();

async function run(
  gate: ArrayLike<number>,
  up: ArrayLike<number>,
  columns: number,
  limit: number,
): Promise<Float32Array> {
  const rowCount = gate.length / columns;
  const out = guardedTensor(device, [rowCount + 2, columns]);
  const { step } = makePlainStep(device, rowCount);
  const tensors = {
    gate: f32Tensor(device, [rowCount, columns], gate),
    up: f32Tensor(device, [rowCount, columns], up),
  };
  await runOnDevice(device, (recorder) => swiglu(recorder, { ...tensors, out, limit, step, rowCount: rowCount + 1 }));
  const result = await readF32(device, out);
  assertUntouched(result, gate.length);
  return result.slice(0, gate.length);
}

test('the vectors of the specification', async () => {
  const out = await run([12, -12, 5, 0.5], [3, 3, -40, 0.25], 4, 10);
  // Nine printed digits; WGSL allows exp(x) an error of 3 + 2|x| units in the last place.
  assertClose(out, [29.9986381, -2.2119029e-4, -49.6653575, 0.0778074164], { relative: 40 * 2 ** -23 });
});

test('rows of an odd length agree with f64', async () => {
  const gate = random.f32(3 * 77, 15);
  const up = random.f32(3 * 77, 15);
  const expected = Float64Array.from(gate, (value, index) => {
    const a = Math.min(value, 10);
    return (a / (1 + Math.exp(-a))) * Math.min(Math.max(up[index]!, -10), 10);
  });
  assertClose(await run(gate, up, 77, 10), expected, { relative: 50 * 2 ** -23 });
});

test('a gate far below zero gives zero and not NaN', async () => {
  assertClose(await run([-1e4, -200], [1, 1], 2, 10), [0, 0], { absolute: 1e-30 });
});
