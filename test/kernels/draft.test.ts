import assert from 'node:assert/strict';
import { test } from 'node:test';
import { gatherRows, judgeDrafts, keepDrafts, NO_ROW, NOT_REACHED, placeDrafts, SAMPLED } from '../../kernels/draft.ts';
import { SAMPLING_WORDS } from '../../kernels/sample.ts';
import {
  assertUntouched,
  createTestRandom,
  f32Tensor,
  guardedTensor,
  guardedTensorFrom,
  openTestDevice,
  readF32,
  readU32,
  runOnDevice,
  u32Tensor,
} from '../support/gpu.ts';

const device = await openTestDevice();
const random = createTestRandom();
const vocabulary = 50;

// Three sequences: a draft at row 1, none, a draft at row 4. Rows of the draft block: 0 and 1, 2, 3 and 4.
const drafting = u32Tensor(device, [5, 4], [7, 1, 0, 0, 2, NO_ROW, 2, 2, 4, 4, 3, 3]);
const draftStep = u32Tensor(device, [4], [5, 3, 3, 0]);
const rowTokens = (words: Uint32Array): number[] => [...words].filter((_, index) => index % 4 === 0);
const common = { drafting, draftStep, draftingCount: 5, vocabulary };

test('a draft becomes the token of its row, and an impossible one a possible one', async () => {
  const drafts = u32Tensor(device, [9, 1], [0, 0, 11, 0, 0xffff_ffff, 0, 0, 33, 0]);
  const rows = guardedTensorFrom(
    device,
    [6, 4],
    Uint32Array.from({ length: 20 }, (_, index) => 100 + index),
  );
  await runOnDevice(device, (recorder) => placeDrafts(recorder, { ...common, drafts, rows }));
  const words = await readU32(device, rows);
  const expected = Uint32Array.from({ length: 20 }, (_, index) => 100 + index);
  expected[1 * 4] = 33;
  expected[4 * 4] = vocabulary - 1;
  assert.deepEqual(words.slice(0, 20), expected);
  assertUntouched(words, 20);
});

test('a draft is right if the model sampled it; the rows of the draft block are followed by the samples', async () => {
  const rows = u32Tensor(device, [6, 4], [1, 0, 0, 0, 33, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 44, 0, 0, 0]);
  // The first sequence samples its draft and 8 behind it, the last one something else than its draft.
  const tokens = guardedTensorFrom(device, [6], Uint32Array.of(33, 8, 9, 43, 12));
  const next = [SAMPLED, SAMPLED + 1, 17, SAMPLED + 3, SAMPLED + 4];
  const draftRows = guardedTensorFrom(device, [6, 4], Uint32Array.from(next.flatMap((token) => [token, 5, 6, 7])));
  const draftSampled = guardedTensor(device, [4], 'u32');
  const draftSampling = guardedTensorFrom(device, [4, SAMPLING_WORDS], new Uint32Array(3 * SAMPLING_WORDS).fill(20));
  const args = { ...common, rows, tokens, draftRows, draftSampled, draftSampling, rowCount: 6 };
  await runOnDevice(device, (recorder) => judgeDrafts(recorder, args));

  const found = await readU32(device, tokens);
  assert.deepEqual([...found.slice(0, 5)], [33, 8, 9, 43, NOT_REACHED]);
  assertUntouched(found, 5);
  const followed = await readU32(device, draftRows);
  assert.deepEqual(rowTokens(followed.slice(0, 20)), [33, 8, 17, 43, 12]);
  assertUntouched(followed, 20);
  const read = await readU32(device, draftSampled);
  assert.deepEqual([...read.slice(0, 3)], [1, 2, 3], 'the row of the last token that is sure');
  assertUntouched(read, 3);
  const sampling = await readU32(device, draftSampling);
  const positions = [0, 1, 2].map((index) => sampling[index * SAMPLING_WORDS + 6]);
  assert.deepEqual(positions, [21, 20, 20]);
  assert.equal([...sampling.slice(0, 3 * SAMPLING_WORDS)].filter((word) => word !== 20).length, 1);
  assertUntouched(sampling, 3 * SAMPLING_WORDS);
});

test('rows are gathered in the order asked for', async () => {
  const values = random.f32(7 * 2 * 33);
  const x = f32Tensor(device, [7, 2, 33], values);
  const sources = u32Tensor(device, [6], [6, 0, 3, 3, 5]);
  const out = guardedTensor(device, [6, 2, 33]);
  await runOnDevice(device, (recorder) => gatherRows(recorder, { x, sources, out, draftStep, rowCount: 6 }));
  const found = await readF32(device, out);
  const expected = [6, 0, 3, 3, 5].flatMap((row) => [...values.slice(row * 66, (row + 1) * 66)]);
  assert.deepEqual([...found.slice(0, 5 * 66)], expected);
  assertUntouched(found, 5 * 66);
});

test('new drafts go to the slots of their sequences and to no other', async () => {
  const drafts = u32Tensor(
    device,
    [9, 1],
    Array.from({ length: 9 }, (_, slot) => 100 + slot),
  );
  const chosen = u32Tensor(device, [5], [21, 22, 0xffff_ffff, 23, 24]);
  await runOnDevice(device, (recorder) => keepDrafts(recorder, { ...common, chosen, drafts }));
  assert.deepEqual([...(await readU32(device, drafts))], [100, 101, 22, 103, vocabulary - 1, 105, 106, 21, 108]);
});
