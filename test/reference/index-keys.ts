/** Index keys as words, and what is left of them, after section 6.3 of the model description. */
import { decodeE2m1, decodeE4m3, encodeBf16 } from '../../kernels/dtype.ts';
import type { IndexPrecision } from '../../kernels/index-keys.ts';
import { blockScale, throughBlocks, toBf16 } from './rounding.ts';

const FP4_BLOCK = 32;

/** The values that are read back from a stored key. */
export function readBackKey(key: ArrayLike<number>, precision: IndexPrecision): number[] {
  if (precision === 'f32') return Array.from(key);
  if (precision === 'bf16') return Array.from(key, toBf16);
  return precision === 'fp8' ? throughBlocks(key, 'e4m3', key.length) : throughBlocks(key, 'e2m1', FP4_BLOCK);
}

/** The words of a stored key: elements packed from the lowest bits up, then scales. */
export function encodedKey(key: Float32Array, precision: IndexPrecision): Uint32Array {
  if (precision === 'f32') return new Uint32Array(key.slice().buffer);
  const values = readBackKey(key, precision);
  const largestOf = (block: number, size: number): number =>
    Math.max(...[...key.subarray(block * size, (block + 1) * size)].map(Math.abs));
  if (precision === 'bf16') return wordsOf(values.map(encodeBf16), 16);
  if (precision === 'fp8') {
    const scale = blockScale(largestOf(0, key.length), 'e4m3');
    const codes = values.map((value) => codeOf(value / scale, decodeE4m3, 0x80));
    return Uint32Array.of(...wordsOf(codes, 8), ...new Uint32Array(Float32Array.of(scale).buffer));
  }
  const scales = Array.from({ length: Math.ceil(key.length / FP4_BLOCK) }, (_, block) =>
    blockScale(largestOf(block, FP4_BLOCK), 'e2m1'),
  );
  const codes = values.map((value, index) => codeOf(value / scales[Math.floor(index / FP4_BLOCK)]!, decodeE2m1, 8));
  const exponents = scales.map((scale) => Math.log2(scale) + 127);
  return Uint32Array.of(...wordsOf(codes, 4), ...wordsOf(exponents, 8));
}

/** The code of a value that is exactly representable. */
function codeOf(value: number, decode: (code: number) => number, signBit: number): number {
  for (let code = 0; code < signBit; code++) {
    if (decode(code) === Math.abs(value)) return value < 0 || Object.is(value, -0) ? code | signBit : code;
  }
  throw new RangeError(`${value} has no code`);
}

function wordsOf(codes: readonly number[], bits: number): Uint32Array {
  const perWord = 32 / bits;
  const words = new Uint32Array(Math.ceil(codes.length / perWord));
  for (const [index, code] of codes.entries())
    words[Math.floor(index / perWord)]! |= code << (bits * (index % perWord));
  return words;
}
