import assert from 'node:assert/strict';
import { test } from 'node:test';
import { indexKeyWords, packKeys, type IndexPrecision } from '../../kernels/index-keys.ts';
import { encodedKey, readBackKey } from '../reference/index-keys.ts';
import {
  assertClose,
  assertUntouched,
  createTestRandom,
  f32Tensor,
  guardedTensor,
  makeStep,
  openTestDevice,
  readU32,
  runOnDevice,
} from '../support/gpu.ts';

const device = await openTestDevice();
const random = createTestRandom();
const PRECISIONS: readonly IndexPrecision[] = ['f32', 'bf16', 'fp8', 'fp4'];

test('a key of 128 dimensions takes the bytes that the model description says', () => {
  const bytes = PRECISIONS.map((precision) => 4 * indexKeyWords(128, precision));
  assert.deepEqual(bytes, [512, 256, 132, 68]);
});

for (const precision of PRECISIONS) {
  for (const width of [2, 16, 64, 128, 256]) {
    test(`keys of ${width} dimensions are stored as ${precision} in their pages, and nothing else is`, async () => {
      const [ratio, entriesPerPage] = [4, 4];
      const words = indexKeyWords(width, precision);
      // Both chunks begin and end inside a block; pages are in no order.
      const chunks = [
        { start: 14, tokens: Array.from({ length: 11 }, () => 0), pages: [5, 2] },
        { start: 3, tokens: [0, 0], pages: [4, 1] },
      ];
      const step = makeStep(device, chunks);
      const values = random.f32(step.rowCount * width, 3).map((value, index) => value * 2 ** -(index % 9));
      const staged = f32Tensor(device, [step.rowCount, width], values);
      const keys = guardedTensor(device, [7, entriesPerPage, words], 'u32');
      await runOnDevice(device, (recorder) =>
        packKeys(recorder, { ...step, staged, keys, precision, ratio, rowCount: step.rowCount + 1 }),
      );
      const content = await readU32(device, keys);
      const written = new Set<number>();
      let row = 0;
      for (const { start, tokens, pages } of chunks) {
        for (let position = start; position < start + tokens.length; position++, row++) {
          if ((position + 1) % ratio !== 0) continue;
          const entry = Math.floor(position / ratio);
          const base = (pages[Math.floor(entry / entriesPerPage)]! * entriesPerPage + (entry % entriesPerPage)) * words;
          written.add(base);
          const expected = encodedKey(values.subarray(row * width, (row + 1) * width), precision);
          assert.deepEqual(content.slice(base, base + words), expected, `row ${row}`);
        }
      }
      assert.equal(written.size, 4);
      for (let base = 0; base < content.length; base += words) {
        if (!written.has(base)) assertUntouched(content, base, base + words);
      }
    });
  }
}

test('the reference reads back what it stores, and a narrower format loses more', () => {
  const key = random.f32(128, 2);
  const losses = PRECISIONS.map((precision) => {
    const read = readBackKey(key, precision);
    return Math.sqrt(read.reduce((sum, value, index) => sum + (value - key[index]!) ** 2, 0));
  });
  assert.equal(losses[0], 0);
  assert.ok(losses[0]! < losses[1]! && losses[1]! < losses[2]! && losses[2]! < losses[3]!, String(losses));
  assertClose(readBackKey(key, 'fp4'), key, { absolute: 0.5 });
});
