/** Tensors in one buffer and in segments: where they are cut, what is refused, that bytes come back. */
import assert from 'node:assert/strict';
import { after, describe, test } from 'node:test';
import { openDevice } from '../../kernels/device.ts';
import { Recorder } from '../../kernels/kernel.ts';
import { rmsnorm } from '../../kernels/rmsnorm.ts';
import {
  allocateTensor,
  destroyTensor,
  downloadTensor,
  reshapeTensor,
  segmentsOf,
  uploadTensor,
} from '../../kernels/tensor.ts';
import { createTestRandom, makePlainStep } from '../support/gpu.ts';

const adapterName = process.env['HANDOFF_ADAPTER'];
const narrow = await openDevice({ ...(adapterName ? { adapterName } : {}), maxBindingBytes: 1024 });
after(async () => {
  await narrow.queue.onSubmittedWorkDone();
  narrow.close();
});
const random = createTestRandom();
// 26 rows of 48 bytes; units of two rows, ten of which bind.
const args = {
  shape: [26, 12],
  dtype: 'f32',
  label: 'test',
  split: { rows: 2, bytes: 96, elements: 24 },
} as const;

describe('a tensor larger than one binding', () => {
  test('lies in segments of whole units, and its bytes are one run', async () => {
    const before = narrow.allocatedBytes;
    const tensor = allocateTensor(narrow, args);
    assert.deepEqual(
      segmentsOf(tensor).map(({ start, count, tensor: part }) => [start, count, part.shape]),
      [
        [0, 20, [20, 12]],
        [20, 6, [6, 12]],
      ],
    );
    assert.equal(tensor.byteLength, 26 * 48);
    assert.equal(narrow.allocatedBytes - before, tensor.byteLength);
    const bytes = random.bytes(26 * 48);
    uploadTensor(narrow, tensor, bytes);
    // Across the cut at byte 960, and of no whole number of words.
    const patch = random.bytes(99);
    uploadTensor(narrow, tensor, patch, 920);
    bytes.set(patch, 920);
    bytes[920 + 99] = 0;
    assert.deepEqual(new Uint8Array(await downloadTensor(narrow, tensor)), bytes);
    destroyTensor(narrow, tensor);
    assert.equal(narrow.allocatedBytes, before);
  });

  test('is refused where it may not be cut, where a unit does not fit, and as one binding or another shape', () => {
    const { split: _, ...whole } = args;
    assert.throws(
      () => allocateTensor(narrow, whole),
      /tensor test \[26,12\] needs 1248 bytes, the adapter binds 1024/,
    );
    const tooLong = { ...args, split: { rows: 26, bytes: 1248, elements: 312 } };
    assert.throws(() => allocateTensor(narrow, tooLong), /26 rows of tensor test .* needs 1248 bytes/);
    const tensor = allocateTensor(narrow, args);
    assert.throws(() => reshapeTensor(tensor, [13, 24]), /lies in segments/);
    const { step } = makePlainStep(narrow, 1);
    const normalise = (): void =>
      rmsnorm(new Recorder(narrow), { x: tensor, out: tensor, eps: 1e-6, step, rowCount: 1 });
    assert.throws(normalise, /tensor test of 1248 bytes is more than one binding/);
    destroyTensor(narrow, tensor);
  });

  test('is cut where elements would no longer be counted in 32 bits', () => {
    const wide = { ...narrow, bindingBytes: 2 ** 33 };
    const sizes: number[] = [];
    const gpu = {
      createBuffer: ({ size }: { size: number }) => {
        sizes.push(size);
        return { destroy: () => {} };
      },
    } as unknown as GPUDevice;
    const split = { rows: 1, bytes: 2 ** 30, elements: 2 ** 31 };
    const shape = [5, 2 ** 31];
    allocateTensor({ ...wide, gpu }, { shape, dtype: 'e2m1', label: 'experts', split });
    assert.deepEqual(sizes, [2 ** 31, 2 ** 31, 2 ** 30]);
  });
});

test('a tensor that one binding holds is not cut', () => {
  const tensor = allocateTensor(narrow, { ...args, shape: [20, 12] });
  assert.equal(tensor.segments, undefined);
  assert.equal(segmentsOf(tensor)[0]!.tensor, tensor);
  destroyTensor(narrow, tensor);
});
