/**
 * Tensors: a range of a GPU buffer with a shape, a storage type and a label.
 *
 * An adapter binds no more than `Device.bindingBytes` at once, on some only 128 MiB. A tensor that may be larger (a large
 * matrix, the experts of a layer, a pool of pages) is allocated with `split`: it then lies in segments, each a tensor of
 * its own that holds a run of the first dimension. Kernels that take such a tensor go through its segments; no kernel
 * can bind it as a whole.
 */
import type { Device } from './device.ts';
import { dtypeBytes, type Dtype } from './dtype.ts';

/** A range of a GPU buffer. Narrow types are packed into u32 words (dtype.ts); rows are contiguous, last dimension fastest. */
export interface Tensor {
  /** Unique per process; bind groups are cached by it. */
  readonly id: number;
  readonly buffer: GPUBuffer;
  readonly offsetBytes: number;
  readonly byteLength: number;
  readonly shape: readonly number[];
  readonly dtype: Dtype;
  readonly label: string;
  /** Set when the tensor is larger than one binding: its parts in order. `buffer` is then that of the first. */
  readonly segments?: readonly Segment[];
}

/** A run of a tensor's first dimension. */
export interface Segment {
  /** First index of the run. */
  readonly start: number;
  /** Indices of the run: the first dimension of `tensor`. */
  readonly count: number;
  readonly tensor: Tensor;
}

/** Where a tensor may be cut: at multiples of `rows` of its first dimension. */
export interface SplitUnit {
  readonly rows: number;
  /**
   * Bytes (whole words, so that writes may begin at any segment) and elements of one unit. Tensors that must be cut at
   * the same places (a matrix and its scales) are all given those of the largest among them.
   */
  readonly bytes: number;
  readonly elements: number;
}

/** Kernels count elements in u32. */
const MAX_ELEMENTS = 2 ** 32;

let nextId = 1;

/** Bytes that every tensor's storage is a multiple of: WebGPU copies and binds whole words. */
const WORD_BYTES = 4;

/** Bytes that a tensor takes on a device. */
export function tensorBytes(dtype: Dtype, shape: readonly number[]): number {
  const elementCount = shape.reduce((product, size) => product * size, 1);
  return Math.max(WORD_BYTES, Math.ceil(dtypeBytes(dtype, elementCount) / WORD_BYTES) * WORD_BYTES);
}

/**
 * Allocate a tensor, zero-filled, in a buffer of its own. The caller owns it and ends it with `destroyTensor`.
 *
 * With `split` a tensor that one binding cannot hold is cut into segments of equal length (the last may be shorter).
 *
 * @throws RangeError when it exceeds what the device can bind at once and may not be split, or a unit alone exceeds that.
 */
export function allocateTensor(
  device: Device,
  args: {
    shape: readonly number[];
    dtype: Dtype;
    label: string;
    usage?: GPUBufferUsageFlags;
    split?: SplitUnit | undefined;
  },
): Tensor {
  const { shape, dtype, label, split } = args;
  const rows = shape[0] ?? 1;
  const segmentRows = split ? rowsOfSegment(device, split) : rows;
  if (segmentRows >= rows) return allocateWhole(device, args);
  if (segmentRows === 0) throw tooLarge(device, `${split!.rows} rows of tensor ${label} [${shape}]`, split!.bytes);
  const segments: Segment[] = [];
  for (let start = 0; start < rows; start += segmentRows) {
    const count = Math.min(segmentRows, rows - start);
    const part = { ...args, shape: [count, ...shape.slice(1)], label: `${label} from ${start}` };
    segments.push({ start, count, tensor: allocateWhole(device, part) });
  }
  const byteLength = segments.reduce((sum, { tensor }) => sum + tensor.byteLength, 0);
  return { ...segments[0]!.tensor, id: nextId++, byteLength, shape, dtype, label, segments };
}

function rowsOfSegment(device: Device, { rows, bytes, elements }: SplitUnit): number {
  return Math.floor(Math.min(device.bindingBytes / bytes, MAX_ELEMENTS / elements)) * rows;
}

function allocateWhole(
  device: Device,
  args: { shape: readonly number[]; dtype: Dtype; label: string; usage?: GPUBufferUsageFlags },
): Tensor {
  const { shape, dtype, label } = args;
  const byteLength = tensorBytes(dtype, shape);
  if (byteLength > device.bindingBytes) throw tooLarge(device, `tensor ${label} [${shape}]`, byteLength);
  const usage = args.usage ?? GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
  const buffer = device.gpu.createBuffer({ size: byteLength, usage, label });
  device.allocatedBytes += byteLength;
  return { id: nextId++, buffer, offsetBytes: 0, byteLength, shape, dtype, label };
}

function tooLarge(device: Device, what: string, byteLength: number): RangeError {
  return new RangeError(`${what} needs ${byteLength} bytes, the adapter binds ${device.bindingBytes}`);
}

/** The segments of a tensor; of one that was not split, the whole as one. */
export function segmentsOf(tensor: Tensor): readonly Segment[] {
  return tensor.segments ?? [{ start: 0, count: tensor.shape[0] ?? 1, tensor }];
}

/** The same storage under another shape; element count and bytes must agree. */
export function reshapeTensor(tensor: Tensor, shape: readonly number[]): Tensor {
  const count = (dims: readonly number[]): number => dims.reduce((product, size) => product * size, 1);
  if (count(shape) !== count(tensor.shape)) {
    throw new RangeError(`tensor ${tensor.label} [${tensor.shape}] cannot be seen as [${shape}]`);
  }
  if (tensor.segments) throw new RangeError(`tensor ${tensor.label} lies in segments and cannot be reshaped`);
  return { ...tensor, shape };
}

/**
 * Check a wrapper's argument before anything is recorded; `null` stands for any size.
 *
 * @throws RangeError naming the tensor, what it is and what it should be.
 */
export function assertShape(tensor: Tensor, shape: readonly (number | null)[], dtype: Dtype = 'f32'): void {
  const fits =
    tensor.shape.length === shape.length && shape.every((size, index) => size === null || size === tensor.shape[index]);
  if (!fits || tensor.dtype !== dtype) {
    const wanted = shape.map((size) => size ?? 'any').join(',');
    throw new RangeError(`tensor ${tensor.label} is ${tensor.dtype} [${tensor.shape}], ${dtype} [${wanted}] is needed`);
  }
}

/** Free the tensor's buffers. Work already submitted still completes. */
export function destroyTensor(device: Device, tensor: Tensor): void {
  for (const { tensor: part } of segmentsOf(tensor)) {
    part.buffer.destroy();
    device.allocatedBytes -= part.byteLength;
  }
}

/** Write `bytes` at `offsetBytes` into the tensor, ordered before any later submit. Lengths that are no multiple of 4 are padded with zeros. */
export function uploadTensor(device: Device, tensor: Tensor, bytes: ArrayBufferView, offsetBytes = 0): void {
  const padded = Math.ceil(bytes.byteLength / WORD_BYTES) * WORD_BYTES;
  if (offsetBytes + padded > tensor.byteLength) {
    throw new RangeError(
      `write of ${bytes.byteLength} bytes at ${offsetBytes} past tensor ${tensor.label} of ${tensor.byteLength}`,
    );
  }
  const source = bytes.buffer as ArrayBuffer;
  forEachPiece(tensor, { offsetBytes, byteLength: bytes.byteLength }, (piece) => {
    const from = bytes.byteOffset + piece.done;
    if (piece.byteLength % WORD_BYTES === 0) {
      device.queue.writeBuffer(piece.buffer, piece.at, source, from, piece.byteLength);
      return;
    }
    const copy = new Uint8Array(Math.ceil(piece.byteLength / WORD_BYTES) * WORD_BYTES);
    copy.set(new Uint8Array(source, from, piece.byteLength));
    device.queue.writeBuffer(piece.buffer, piece.at, copy);
  });
}

/** A run of bytes of a tensor that lies in one buffer. */
export interface Piece {
  readonly buffer: GPUBuffer;
  /** Offset in `buffer`. */
  readonly at: number;
  readonly byteLength: number;
  /** Bytes of the range before this piece. */
  readonly done: number;
}

/** Go through a range of a tensor's bytes in order, one piece for each segment that it touches. */
export function forEachPiece(
  tensor: Tensor,
  range: { readonly offsetBytes: number; readonly byteLength: number },
  visit: (piece: Piece) => void,
): void {
  const end = range.offsetBytes + range.byteLength;
  let segmentStart = 0;
  for (const { tensor: part } of segmentsOf(tensor)) {
    const segmentEnd = segmentStart + part.byteLength;
    const from = Math.max(range.offsetBytes, segmentStart);
    const byteLength = Math.min(end, segmentEnd) - from;
    if (byteLength > 0) {
      const at = part.offsetBytes + from - segmentStart;
      visit({ buffer: part.buffer, at, byteLength, done: from - range.offsetBytes });
    }
    segmentStart = segmentEnd;
  }
}

/** Copy the tensor's bytes back, after all submitted work. For tests and tools; a step reads its results through a ring of its own. */
export async function downloadTensor(device: Device, tensor: Tensor): Promise<ArrayBuffer> {
  const staging = device.gpu.createBuffer({
    size: tensor.byteLength,
    usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST,
    label: `download ${tensor.label}`,
  });
  try {
    const encoder = device.gpu.createCommandEncoder();
    forEachPiece(tensor, { offsetBytes: 0, byteLength: tensor.byteLength }, ({ buffer, at, byteLength, done }) =>
      encoder.copyBufferToBuffer(buffer, at, staging, done, byteLength),
    );
    device.queue.submit([encoder.finish()]);
    await staging.mapAsync(GPUMapMode.READ);
    return staging.getMappedRange().slice(0);
  } finally {
    staging.destroy();
  }
}
