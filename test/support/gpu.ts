/**
 * What the kernel tests share: one device a file, tensors from arrays, outputs between guards, step metadata,
 * comparison with a tolerance or bit for bit, and seeded random numbers.
 */
import assert from 'node:assert/strict';
import { after } from 'node:test';
import { openDevice, type Device } from '../../kernels/device.ts';
import type { Dtype } from '../../kernels/dtype.ts';
import { Recorder } from '../../kernels/kernel.ts';
import { allocateTensor, downloadTensor, uploadTensor, type Tensor } from '../../kernels/tensor.ts';

/** Words in front of and behind a guarded output: WebGPU's largest minimum offset alignment is 256 bytes. */
const GUARD_WORDS = 64;

/** Fill of guards and unwritten outputs. As f32 it is NaN, so an output element that nobody wrote fails every comparison. */
const PATTERN = 0x7fc0dead;

let opened: Promise<Device> | null = null;

/**
 * The file's device, opened at the first call and closed after the last test. HANDOFF_ADAPTER names an adapter
 * (Dawn's exact name). Call it at the top level of the test file.
 */
export function openTestDevice(): Promise<Device> {
  if (opened) return opened;
  const adapterName = process.env['HANDOFF_ADAPTER'];
  opened = openDevice(adapterName ? { adapterName } : {});
  after(async () => {
    const device = await opened!;
    await device.queue.onSubmittedWorkDone();
    device.close();
  });
  return opened;
}

/** Record with `record`, submit once, and reject if the device reported an error. */
export async function runOnDevice(device: Device, record: (recorder: Recorder) => void): Promise<void> {
  const recorder = new Recorder(device);
  record(recorder);
  recorder.submit();
  await Promise.race([device.queue.onSubmittedWorkDone(), device.lost]);
}

/** A tensor that holds `values`, or zeros. */
export function f32Tensor(
  device: Device,
  shape: readonly number[],
  values?: ArrayLike<number>,
  label = 'test f32',
): Tensor {
  return filledTensor(device, 'f32', shape, values && Float32Array.from(values), label);
}

/** A tensor that holds `values`, or zeros. */
export function u32Tensor(
  device: Device,
  shape: readonly number[],
  values?: ArrayLike<number>,
  label = 'test u32',
): Tensor {
  return filledTensor(device, 'u32', shape, values && Uint32Array.from(values), label);
}

/** A tensor of packed elements (bf16, e4m3, e8m0, e2m1) from their bytes as a checkpoint holds them. */
export function packedTensor(
  device: Device,
  dtype: Dtype,
  shape: readonly number[],
  bytes: ArrayBufferView,
  label = `test ${dtype}`,
): Tensor {
  return filledTensor(device, dtype, shape, bytes, label);
}

function filledTensor(
  device: Device,
  dtype: Dtype,
  shape: readonly number[],
  bytes: ArrayBufferView | undefined,
  label: string,
): Tensor {
  const tensor = allocateTensor(device, { shape, dtype, label });
  if (bytes) uploadTensor(device, tensor, bytes);
  return tensor;
}

/**
 * An output of `shape`, filled with the pattern, in a buffer that has guards on both sides. The guard behind it is part
 * of the binding, so a write past the end lands there instead of being dropped by bounds checks.
 * Allocate more rows than the step has, and the rows past the live ones are guards too (`assertUntouched`).
 */
export function guardedTensor(
  device: Device,
  shape: readonly number[],
  dtype: 'f32' | 'u32' = 'f32',
  label = 'test output',
): Tensor {
  const words = shape.reduce((product, size) => product * size, 1);
  const whole = allocateTensor(device, { shape: [words + 2 * GUARD_WORDS], dtype, label });
  uploadTensor(device, whole, new Uint32Array(words + 2 * GUARD_WORDS).fill(PATTERN));
  return { ...whole, shape, offsetBytes: GUARD_WORDS * 4, byteLength: whole.byteLength - GUARD_WORDS * 4 };
}

/** A guarded output (or in-place argument) that starts with `values`; elements past them hold the pattern. */
export function guardedTensorFrom(
  device: Device,
  shape: readonly number[],
  values: Float32Array | Uint32Array,
): Tensor {
  const tensor = guardedTensor(device, shape, values instanceof Float32Array ? 'f32' : 'u32');
  uploadTensor(device, tensor, values);
  return tensor;
}

/** The elements of an f32 tensor. Of a guarded one, after checking that both guards are intact. */
export async function readF32(device: Device, tensor: Tensor): Promise<Float32Array> {
  return new Float32Array(await readContent(device, tensor));
}

/** The elements of a u32 tensor. Of a guarded one, after checking that both guards are intact. */
export async function readU32(device: Device, tensor: Tensor): Promise<Uint32Array> {
  return new Uint32Array(await readContent(device, tensor));
}

async function readContent(device: Device, tensor: Tensor): Promise<ArrayBuffer> {
  const words = tensor.shape.reduce((product, size) => product * size, 1);
  if (tensor.offsetBytes === 0) return (await downloadTensor(device, tensor)).slice(0, words * 4);
  const all = new Uint32Array(
    await downloadTensor(device, { ...tensor, offsetBytes: 0, byteLength: tensor.offsetBytes + tensor.byteLength }),
  );
  for (let index = 0; index < GUARD_WORDS; index += 1) {
    assert.equal(all[index], PATTERN, `${tensor.label}: guard word ${index} in front was overwritten`);
    const behind = GUARD_WORDS + words + index;
    assert.equal(all[behind], PATTERN, `${tensor.label}: guard word ${index} behind was overwritten`);
  }
  return all.slice(GUARD_WORDS, GUARD_WORDS + words).buffer;
}

/** Check that the elements [from, to) of a guarded output still hold the pattern: rows that the step does not have. */
export function assertUntouched(values: Float32Array | Uint32Array, from: number, to = values.length): void {
  const bits = new Uint32Array(values.buffer, values.byteOffset, values.length);
  for (let index = from; index < to; index += 1) assert.equal(bits[index], PATTERN, `element ${index} was written`);
}

/** Check |actual - expected| <= absolute + relative * |expected| for every element of `expected`; NaN never passes. */
export function assertClose(
  actual: ArrayLike<number>,
  expected: ArrayLike<number>,
  tolerance: { absolute?: number; relative?: number },
  label = 'values',
): void {
  const { absolute = 0, relative = 0 } = tolerance;
  assert.ok(actual.length >= expected.length, `${label}: ${actual.length} values, expected ${expected.length}`);
  for (let index = 0; index < expected.length; index += 1) {
    const got = actual[index]!;
    const want = expected[index]!;
    const bound = absolute + relative * Math.abs(want);
    if (!(Math.abs(got - want) <= bound)) {
      assert.fail(`${label}[${index}] is ${got}, expected ${want} within ${bound}`);
    }
  }
}

/** Check that two results agree bit for bit. */
export function assertSameBits(actual: Float32Array, expected: Float32Array, label = 'values'): void {
  assert.equal(actual.length, expected.length, `${label}: lengths`);
  const left = new Uint32Array(actual.buffer, actual.byteOffset, actual.length);
  const right = new Uint32Array(expected.buffer, expected.byteOffset, expected.length);
  for (let index = 0; index < left.length; index += 1) {
    if (left[index] !== right[index]) {
      assert.fail(`${label}[${index}] is ${actual[index]}, expected the same bits as ${expected[index]}`);
    }
  }
}

/** The tensors of one step, as model/workspace.ts makes them. */
export interface TestStep {
  readonly rowCount: number;
  readonly sequenceCount: number;
  readonly sampledCount: number;
  /** u32 [4]: rowCount, sequenceCount, sampledCount, 0. */
  readonly step: Tensor;
  /** u32 [maxRows, 4]: token id, position, sequence index, index inside the chunk. */
  readonly rows: Tensor;
  /** u32 [maxSequences, 4]: state slot, first position of the chunk, its first row, its row count. */
  readonly sequences: Tensor;
  /** u32 [maxSequences, maxPages]. */
  readonly pageTable: Tensor;
  /** u32 [maxRows]: rows whose logits are wanted. */
  readonly sampled: Tensor;
}

/** One sequence's chunk of a step. */
export interface TestChunk {
  readonly slot?: number;
  /** Position of the first token. */
  readonly start: number;
  readonly tokens: readonly number[];
  readonly pages?: readonly number[];
}

/** Metadata of a step over `chunks`, rows in their order. `sampled` are row indices; capacities default to 3 more than needed. */
export function makeStep(
  device: Device,
  chunks: readonly TestChunk[],
  options: { sampled?: readonly number[]; maxRows?: number; maxSequences?: number; maxPages?: number } = {},
): TestStep {
  const rowCount = chunks.reduce((sum, chunk) => sum + chunk.tokens.length, 0);
  const sampled = options.sampled ?? [];
  const maxRows = options.maxRows ?? rowCount + 3;
  const maxSequences = options.maxSequences ?? chunks.length + 3;
  const maxPages = options.maxPages ?? Math.max(1, ...chunks.map((chunk) => chunk.pages?.length ?? 0));
  const rows = new Uint32Array(maxRows * 4);
  const sequences = new Uint32Array(maxSequences * 4);
  const pageTable = new Uint32Array(maxSequences * maxPages);
  let row = 0;
  for (const [index, chunk] of chunks.entries()) {
    sequences.set([chunk.slot ?? index, chunk.start, row, chunk.tokens.length], index * 4);
    pageTable.set(chunk.pages ?? [], index * maxPages);
    for (const [offset, token] of chunk.tokens.entries()) {
      rows.set([token, chunk.start + offset, index, offset], row * 4);
      row += 1;
    }
  }
  return {
    rowCount,
    sequenceCount: chunks.length,
    sampledCount: sampled.length,
    step: u32Tensor(device, [4], [rowCount, chunks.length, sampled.length, 0], 'step'),
    rows: u32Tensor(device, [maxRows, 4], rows, 'rows'),
    sequences: u32Tensor(device, [maxSequences, 4], sequences, 'sequences'),
    pageTable: u32Tensor(device, [maxSequences, maxPages], pageTable, 'page_table'),
    sampled: u32Tensor(device, [maxRows], sampled, 'sampled'),
  };
}

/** A step of `rowCount` rows of one sequence from position 0, when a kernel only looks at the row count. */
export function makePlainStep(device: Device, rowCount: number): TestStep {
  return makeStep(device, [{ start: 0, tokens: Array.from({ length: rowCount }, (_, index) => index) }]);
}

/** Seeded random numbers (mulberry32). */
export interface TestRandom {
  /** Uniform in [0, 1). */
  uniform(): number;
  /** Uniform integer in [0, limit). */
  integer(limit: number): number;
  /** `count` numbers, uniform in [-scale, scale), rounded to f32. */
  f32(count: number, scale?: number): Float32Array;
  /** `count` random bytes. */
  bytes(count: number): Uint8Array;
}

/** The seed of a test file: HANDOFF_SEED, or a fixed one. Printed, so that a failure can be repeated. */
export function createTestRandom(): TestRandom {
  const seed = Number(process.env['HANDOFF_SEED'] ?? 20260424);
  console.log(`# HANDOFF_SEED=${seed}`);
  let state = seed >>> 0;
  const uniform = (): number => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
  return {
    uniform,
    integer: (limit) => Math.floor(uniform() * limit),
    f32: (count, scale = 1) => Float32Array.from({ length: count }, () => (2 * uniform() - 1) * scale),
    bytes: (count) => Uint8Array.from({ length: count }, () => Math.floor(uniform() * 256)),
  };
}
