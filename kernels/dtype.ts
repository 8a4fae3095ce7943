/**
 * Number formats of the checkpoint, encoded and decoded on the CPU.
 *
 * The kernels decode the same formats on the device (include/quant.wgsl); these functions serve the loader,
 * the plain reference and the tests. Formulas: OCP MX specification 1.0 and the FP8 paper (e4m3 "fn": no infinities).
 */

/** Storage type of a tensor. Types narrower than 32 bits are packed into u32 words, lowest element in the lowest bits. */
export type Dtype = 'f32' | 'u32' | 'bf16' | 'e4m3' | 'e8m0' | 'e2m1';

const BITS: Record<Dtype, number> = { f32: 32, u32: 32, bf16: 16, e4m3: 8, e8m0: 8, e2m1: 4 };

/** Bytes of `elementCount` elements, rounded up to whole bytes. */
export function dtypeBytes(dtype: Dtype, elementCount: number): number {
  return Math.ceil((elementCount * BITS[dtype]) / 8);
}

const words = new Uint32Array(1);
const floats = new Float32Array(words.buffer);

function bitsToFloat(bits: number): number {
  words[0] = bits;
  return floats[0]!;
}

function floatToBits(value: number): number {
  floats[0] = value;
  return words[0]!;
}

/** bf16 bits to number: the upper half of an f32. */
export function decodeBf16(bits: number): number {
  return bitsToFloat(bits << 16);
}

/** Number to bf16 bits, round to nearest, ties to even; NaN stays NaN. */
export function encodeBf16(value: number): number {
  const bits = floatToBits(value);
  if (Number.isNaN(value)) return 0x7fc0;
  return ((bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16) & 0xffff;
}

/** e4m3fn byte to number: bias 7, subnormals of 2^-9, 0x7f and 0xff are NaN, no infinities. */
export function decodeE4m3(byte: number): number {
  const sign = byte & 0x80 ? -1 : 1;
  const exponent = (byte >> 3) & 15;
  const mantissa = byte & 7;
  if (exponent === 15 && mantissa === 7) return NaN;
  return sign * (exponent === 0 ? mantissa * 2 ** -9 : (8 + mantissa) * 2 ** (exponent - 10));
}

/** e8m0 byte to number: 2^(byte - 127); 255 is NaN. */
export function decodeE8m0(byte: number): number {
  return byte === 255 ? NaN : 2 ** (byte - 127);
}

const E2M1_MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6] as const;

/** e2m1 nibble (bit 3 = sign) to number. */
export function decodeE2m1(nibble: number): number {
  const magnitude = E2M1_MAGNITUDES[nibble & 7]!;
  return nibble & 8 ? -magnitude : magnitude;
}
