/** Tensors: a range of a GPU buffer with a shape, a storage type and a label. */
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
}

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
 * @throws RangeError when it exceeds what the device can bind at once.
 */
export function allocateTensor(
  device: Device,
  args: { shape: readonly number[]; dtype: Dtype; label: string; usage?: GPUBufferUsageFlags },
): Tensor {
  const byteLength = tensorBytes(args.dtype, args.shape);
  const limit = Math.min(device.limits.maxBufferSize, device.limits.maxStorageBufferBindingSize);
  if (byteLength > limit) {
    throw new RangeError(`tensor ${args.label} [${args.shape}] needs ${byteLength} bytes, the adapter binds ${limit}`);
  }
  const usage = args.usage ?? GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
  const buffer = device.gpu.createBuffer({ size: byteLength, usage, label: args.label });
  device.allocatedBytes += byteLength;
  return { id: nextId++, buffer, offsetBytes: 0, byteLength, shape: args.shape, dtype: args.dtype, label: args.label };
}

/** The same storage under another shape; element count and bytes must agree. */
export function reshapeTensor(tensor: Tensor, shape: readonly number[]): Tensor {
  const count = (dims: readonly number[]): number => dims.reduce((product, size) => product * size, 1);
  if (count(shape) !== count(tensor.shape)) {
    throw new RangeError(`tensor ${tensor.label} [${tensor.shape}] cannot be seen as [${shape}]`);
  }
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

/** Free the tensor's buffer. Work already submitted still completes. */
export function destroyTensor(device: Device, tensor: Tensor): void {
  tensor.buffer.destroy();
  device.allocatedBytes -= tensor.byteLength;
}

/** Write `bytes` at `offsetBytes` into the tensor, ordered before any later submit. Lengths that are no multiple of 4 are padded with zeros. */
export function uploadTensor(device: Device, tensor: Tensor, bytes: ArrayBufferView, offsetBytes = 0): void {
  const padded = Math.ceil(bytes.byteLength / WORD_BYTES) * WORD_BYTES;
  if (offsetBytes + padded > tensor.byteLength) {
    throw new RangeError(
      `write of ${bytes.byteLength} bytes at ${offsetBytes} past tensor ${tensor.label} of ${tensor.byteLength}`,
    );
  }
  const at = tensor.offsetBytes + offsetBytes;
  const source = bytes.buffer as ArrayBuffer;
  if (padded === bytes.byteLength) {
    device.queue.writeBuffer(tensor.buffer, at, source, bytes.byteOffset, bytes.byteLength);
    return;
  }
  const copy = new Uint8Array(padded);
  copy.set(new Uint8Array(source, bytes.byteOffset, bytes.byteLength));
  device.queue.writeBuffer(tensor.buffer, at, copy);
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
    encoder.copyBufferToBuffer(tensor.buffer, tensor.offsetBytes, staging, 0, tensor.byteLength);
    device.queue.submit([encoder.finish()]);
    await staging.mapAsync(GPUMapMode.READ);
    return staging.getMappedRange().slice(0);
  } finally {
    staging.destroy();
  }
}
