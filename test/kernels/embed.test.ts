import assert from 'node:assert/strict';
import { test } from 'node:test';
import { embed } from '../../kernels/embed.ts';
import {
  assertUntouched,
  createTestRandom,
  guardedTensor,
  makeStep,
  openTestDevice,
  readF32,
  runOnDevice,
} from '../support/gpu.ts';
import { randomWeight } from '../support/weights.ts';

const device = await openTestDevice();
const random = createTestRandom();

for (const format of ['f32', 'bf16'] as const) {
  for (const [streams, columns] of [
    [4, 70],
    [2, 33],
  ] as const) {
    test(`${format}: the rows of ${columns} columns are copied exactly into ${streams} streams`, async () => {
      const { weight: table, values } = randomWeight(device, random, format, 11, columns);
      const tokens = [10, 0, 3, 3];
      const { step, rows, rowCount } = makeStep(device, [
        { start: 5, tokens: tokens.slice(0, 3) },
        { start: 0, tokens: tokens.slice(3) },
      ]);
      const out = guardedTensor(device, [rowCount + 2, streams, columns]);
      await runOnDevice(device, (recorder) => embed(recorder, { rows, table, out, step, rowCount }));
      const result = await readF32(device, out);
      for (const [row, token] of tokens.entries()) {
        for (let i = 0; i < streams * columns; i += 1) {
          assert.equal(result[row * streams * columns + i], values[token * columns + (i % columns)], `row ${row}`);
        }
      }
      assertUntouched(result, rowCount * streams * columns);
    });
  }
}

test('without streams the output has one vector a row', async () => {
  const { weight: table, values } = randomWeight(device, random, 'bf16', 5, 8);
  const { step, rows } = makeStep(device, [{ start: 0, tokens: [4] }]);
  const out = guardedTensor(device, [2, 8]);
  await runOnDevice(device, (recorder) => embed(recorder, { rows, table, out, step, rowCount: 1 }));
  assert.deepEqual([...(await readF32(device, out)).slice(0, 8)], [...values.slice(32)]);
});

test('a token past the table reads its last row instead of other memory', async () => {
  const { weight: table, values } = randomWeight(device, random, 'f32', 5, 8);
  const { step, rows } = makeStep(device, [{ start: 0, tokens: [0xffff_ffff] }]);
  const out = guardedTensor(device, [2, 8]);
  await runOnDevice(device, (recorder) => embed(recorder, { rows, table, out, step, rowCount: 1 }));
  assert.deepEqual([...(await readF32(device, out)).slice(0, 8)], [...values.slice(32)]);
});

test('a quantised table is refused', async () => {
  const { weight: table } = randomWeight(device, random, 'e4m3', 5, 8);
  const { step, rows } = makeStep(device, [{ start: 0, tokens: [1] }]);
  const out = guardedTensor(device, [2, 8]);
  await assert.rejects(
    runOnDevice(device, (recorder) => embed(recorder, { rows, table, out, step, rowCount: 1 })),
    /is e4m3, f32 or bf16 is needed/,
  );
});
