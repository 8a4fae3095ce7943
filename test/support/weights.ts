/** Random weights in every storage format, with the numbers that they stand for. */
import type { Device } from '../../kernels/device.ts';
import { decodeBf16, decodeE2m1, decodeE4m3, decodeE8m0 } from '../../kernels/dtype.ts';
import type { LinearFormat, LinearWeight } from '../../kernels/linear.ts';
import { f32Tensor, packedTensor, type TestRandom } from './gpu.ts';

/** A weight on the device and its decoded values [rows, columns]. */
export interface TestWeight {
  readonly weight: LinearWeight;
  readonly values: Float64Array;
}

/** A weight of random codes (without NaN codes) and random scales. `columns` must suit the format. */
export function randomWeight(
  device: Device,
  random: TestRandom,
  format: LinearFormat,
  rows: number,
  columns: number,
): TestWeight {
  const count = rows * columns;
  const shape = [rows, columns];
  const values = new Float64Array(count);
  const fill = (value: (index: number) => number): void => {
    for (let index = 0; index < count; index += 1) values[index] = value(index);
  };
  if (format === 'f32') {
    const numbers = random.f32(count);
    fill((index) => numbers[index]!);
    return { weight: { format, weight: f32Tensor(device, shape, numbers), rows, columns }, values };
  }
  if (format === 'bf16') {
    // Signs and exponents around 1: arbitrary bits would be infinities and numbers of no use together.
    const codes = Uint16Array.from(
      { length: count },
      () => 0x3e80 + random.integer(0x180) + 0x8000 * random.integer(2),
    );
    fill((index) => decodeBf16(codes[index]!));
    return { weight: { format, weight: packedTensor(device, 'bf16', shape, codes), rows, columns }, values };
  }
  if (format === 'e4m3') {
    const codes = randomE4m3(random, count);
    const [blockRows, blockColumns] = [Math.ceil(rows / 128), Math.ceil(columns / 128)];
    const scales = Float32Array.from({ length: blockRows * blockColumns }, () => 2 ** (random.integer(9) - 8));
    fill((index) => {
      const block = Math.floor(index / columns / 128) * blockColumns + Math.floor((index % columns) / 128);
      return decodeE4m3(codes[index]!) * scales[block]!;
    });
    const scale = f32Tensor(device, [blockRows, blockColumns], scales);
    return { weight: { format, weight: packedTensor(device, 'e4m3', shape, codes), scale, rows, columns }, values };
  }
  const block = format === 'mxfp4' ? 32 : 16;
  const nibbles = random.bytes(count / 2);
  const scaleShape = [rows, columns / block];
  const nibble = (index: number): number => decodeE2m1((nibbles[index >> 1]! >> (4 * (index & 1))) & 15);
  const weight = packedTensor(device, 'e2m1', shape, nibbles);
  if (format === 'mxfp4') {
    const scales = Uint8Array.from({ length: count / block }, () => 120 + random.integer(8));
    fill((index) => nibble(index) * decodeE8m0(scales[Math.floor(index / block)]!));
    return {
      weight: { format, weight, scale: packedTensor(device, 'e8m0', scaleShape, scales), rows, columns },
      values,
    };
  }
  const scales = randomE4m3(random, count / block).map((code) => code & 0x7f);
  const scale2 = Math.fround(0.0137);
  fill((index) => nibble(index) * decodeE4m3(scales[Math.floor(index / block)]!) * scale2);
  const scale = packedTensor(device, 'e4m3', scaleShape, scales);
  return { weight: { format, weight, scale, scale2: f32Tensor(device, [1], [scale2]), rows, columns }, values };
}

function randomE4m3(random: TestRandom, count: number): Uint8Array {
  return random.bytes(count).map((code) => ((code & 0x7f) === 0x7f ? code - 1 : code));
}
