import assert from 'node:assert/strict';
import { test } from 'node:test';
import { decodeE4m3, encodeBf16 } from '../../kernels/dtype.ts';
import { linear, type LinearFormat, type LinearWeight, type RowCount } from '../../kernels/linear.ts';
import { dot } from '../reference/linear.ts';
import {
  assertSameBits,
  assertUntouched,
  createTestRandom,
  f32Tensor,
  guardedTensor,
  makePlainStep,
  makeStep,
  openTestDevice,
  packedTensor,
  readF32,
  runOnDevice,
  u32Tensor,
} from '../support/gpu.ts';
import { randomWeight } from '../support/weights.ts';

const device = await openTestDevice();
const random = createTestRandom();

/** Rows in every output beyond those of the step. */
const SPARE_ROWS = 2;

/** Runs the kernel and returns the live rows, after checking that nothing else was written. */
async function run(
  weight: LinearWeight,
  x: Float32Array,
  rowCount: number,
  options: { groups?: number; countFrom?: RowCount } = {},
): Promise<Float32Array> {
  const width = weight.columns * (options.groups ?? 1);
  const out = guardedTensor(device, [rowCount + SPARE_ROWS, weight.rows]);
  const { step } =
    options.countFrom === 'sampled'
      ? { step: u32Tensor(device, [4], [1000, 1, rowCount, 0]) }
      : makePlainStep(device, rowCount);
  const input = f32Tensor(device, [x.length / width, width], x);
  await runOnDevice(device, (recorder) => linear(recorder, { x: input, weight, out, step, rowCount, ...options }));
  const values = await readF32(device, out);
  assertUntouched(values, rowCount * weight.rows);
  return values.slice(0, rowCount * weight.rows);
}

// Odd sizes and block edges: fewer outputs than lanes, one more than a tile, a short last scale block.
const SHAPES: Record<LinearFormat, readonly (readonly [rows: number, columns: number])[]> = {
  f32: [
    [1, 1],
    [13, 37],
    [65, 130],
  ],
  bf16: [
    [9, 33],
    [67, 130],
  ],
  e4m3: [
    [7, 4],
    [130, 260],
  ],
  mxfp4: [
    [5, 32],
    [131, 96],
  ],
  nvfp4: [
    [5, 16],
    [131, 80],
  ],
};

for (const [format, shapes] of Object.entries(SHAPES) as [LinearFormat, (typeof SHAPES)['f32']][]) {
  for (const [rows, columns] of shapes) {
    for (const rowCount of [1, 3, 11]) {
      test(`${format} [${rows}, ${columns}] times ${rowCount} rows agrees with f64 within the rounding of f32`, async () => {
        const { weight, values } = randomWeight(device, random, format, rows, columns);
        const x = random.f32(rowCount * columns);
        const out = await run(weight, x, rowCount);
        for (let row = 0; row < rowCount; row += 1) {
          for (let n = 0; n < rows; n += 1) {
            const expected = dot(x, row * columns, values, n * columns, columns);
            const error = Math.abs(out[row * rows + n]! - expected.value);
            assert.ok(error <= expected.errorBound, `row ${row}, output ${n}: error ${error} > ${expected.errorBound}`);
          }
        }
      });
    }
  }

  test(`${format}: a row has the same bits alone, in a step of three and in a step of eleven`, async () => {
    const [rows, columns] = shapes.at(-1)!;
    const { weight } = randomWeight(device, random, format, rows, columns);
    const x = random.f32(11 * columns);
    const together = await run(weight, x, 11);
    const sliceOf = (first: number, count: number): Float32Array => x.slice(first * columns, (first + count) * columns);
    for (const row of [0, 7, 8, 10]) {
      const alone = await run(weight, sliceOf(row, 1), 1);
      assertSameBits(alone, together.slice(row * rows, (row + 1) * rows), `row ${row} alone`);
    }
    const three = await run(weight, sliceOf(6, 3), 3);
    assertSameBits(three, together.slice(6 * rows, 9 * rows), 'rows 6 to 8');
  });
}

for (const rowCount of [1, 4, 9]) {
  test(`groups read their own part of ${rowCount} rows`, async () => {
    const [groups, rows, columns] = [3, 33, 64];
    const { weight, values } = randomWeight(device, random, 'mxfp4', rows, columns);
    const x = random.f32(rowCount * groups * columns);
    const out = await run(weight, x, rowCount, { groups });
    for (let row = 0; row < rowCount; row += 1) {
      for (let n = 0; n < rows; n += 1) {
        const group = Math.floor(n / (rows / groups));
        const expected = dot(x, (row * groups + group) * columns, values, n * columns, columns);
        assert.ok(Math.abs(out[row * rows + n]! - expected.value) <= expected.errorBound, `row ${row}, output ${n}`);
      }
    }
  });
}

test('the count of sampled rows bounds the rows when it is asked for', async () => {
  const { weight, values } = randomWeight(device, random, 'bf16', 10, 6);
  const x = random.f32(4 * 6);
  const out = await run(weight, x, 2, { countFrom: 'sampled' });
  const expected = dot(x, 6, values, 9 * 6, 6);
  assert.ok(
    Math.abs(out[19]! - expected.value) <= expected.errorBound,
    `${out[19]} for ${expected.value} within ${expected.errorBound}`,
  );
});

test('a grid larger than the step writes only the rows of the step', async () => {
  const { weight } = randomWeight(device, random, 'f32', 8, 8);
  const out = guardedTensor(device, [8, 8]);
  const { step } = makeStep(device, [{ start: 0, tokens: [1, 2, 3] }]);
  const x = f32Tensor(device, [8, 8], random.f32(64));
  await runOnDevice(device, (recorder) => linear(recorder, { x, weight, out, step, rowCount: 8 }));
  assertUntouched(await readF32(device, out), 3 * 8);
});

test('mxfp4 decodes the vector of the specification: byte 0x9C under scale 0x7B is -0.125 and -0.03125', async () => {
  const weight: LinearWeight = {
    format: 'mxfp4',
    weight: packedTensor(device, 'e2m1', [1, 32], Uint8Array.from([0x9c, ...Array(15).fill(0)])),
    scale: packedTensor(device, 'e8m0', [1, 1], Uint8Array.from([0x7b])),
    rows: 1,
    columns: 32,
  };
  assert.deepEqual([...(await run(weight, unitRows(2, 32), 2))], [-0.125, -0.03125]);
});

test('nvfp4 decodes the vector of the specification: nibble 7, scale 0x50, second scale 0.001 is 0.048', async () => {
  const weight: LinearWeight = {
    format: 'nvfp4',
    weight: packedTensor(device, 'e2m1', [1, 16], Uint8Array.from([7, ...Array(7).fill(0)])),
    scale: packedTensor(device, 'e4m3', [1, 1], Uint8Array.from([0x50])),
    scale2: f32Tensor(device, [1], [0.001]),
    rows: 1,
    columns: 16,
  };
  assert.equal((await run(weight, unitRows(1, 16), 1))[0], Math.fround(48 * Math.fround(0.001)));
});

test('all sixteen e2m1 codes decode exactly', async () => {
  const codes = Uint8Array.from([0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe, ...Array(8).fill(0)]);
  const weight: LinearWeight = {
    format: 'mxfp4',
    weight: packedTensor(device, 'e2m1', [1, 32], codes),
    scale: packedTensor(device, 'e8m0', [1, 1], Uint8Array.from([127])),
    rows: 1,
    columns: 32,
  };
  const out = await run(weight, unitRows(16, 32), 16);
  // 0 and -0 are one number here: the sum starts at 0.
  assert.deepEqual([...out], [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]);
});

test('every e4m3 code but NaN decodes exactly', async () => {
  const codes = Uint8Array.from({ length: 256 }, (_, code) => ((code & 0x7f) === 0x7f ? 0 : code));
  const weight: LinearWeight = {
    format: 'e4m3',
    weight: packedTensor(device, 'e4m3', [64, 4], codes),
    scale: f32Tensor(device, [1, 1], [1]),
    rows: 64,
    columns: 4,
  };
  const out = await run(weight, unitRows(4, 4), 4);
  for (const [code, value] of codes.entries()) {
    assert.equal(out[(code % 4) * 64 + Math.floor(code / 4)]! + 0, decodeE4m3(value) + 0, `code ${code}`);
  }
});

test('bf16 reads odd rows of an odd number of columns', async () => {
  const numbers = [1, 2, 3, -4, 5, 6, 7, 8, -9];
  const weight: LinearWeight = {
    format: 'bf16',
    weight: packedTensor(device, 'bf16', [3, 3], Uint16Array.from(numbers, encodeBf16)),
    rows: 3,
    columns: 3,
  };
  assert.deepEqual([...(await run(weight, unitRows(3, 3), 3))], [1, -4, 7, 2, 5, 8, 3, 6, -9]);
});

test('shapes that do not fit are refused before anything is recorded', async () => {
  const { weight } = randomWeight(device, random, 'mxfp4', 8, 32);
  const { step } = makePlainStep(device, 1);
  const tensors = { x: f32Tensor(device, [1, 32]), out: f32Tensor(device, [1, 8]), step };
  const attempt = (change: object) => (): Promise<void> =>
    runOnDevice(device, (recorder) => linear(recorder, { ...tensors, weight, rowCount: 1, ...change }));
  await assert.rejects(attempt({ x: f32Tensor(device, [1, 31]) }), RangeError);
  await assert.rejects(attempt({ out: f32Tensor(device, [1, 9]) }), RangeError);
  await assert.rejects(attempt({ groups: 3 }), RangeError);
  await assert.rejects(attempt({ weight: { ...weight, columns: 16 } }), RangeError);
  await assert.rejects(attempt({ weight: { ...weight, format: 'nvfp4' } }), RangeError);
});

/** The first rows of the unit matrix: row r picks column r of the weight. */
function unitRows(rowCount: number, columns: number): Float32Array {
  const rows = new Float32Array(rowCount * columns);
  for (let row = 0; row < rowCount; row += 1) rows[row * columns + row] = 1;
  return rows;
}
