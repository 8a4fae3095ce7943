/** Rounding to narrow formats by looking for the nearest code, after section 2.4 and appendix A of the model description. */
import { decodeBf16, decodeE2m1, decodeE4m3, encodeBf16 } from '../../kernels/dtype.ts';

/** To bf16, ties to even. */
export function toBf16(value: number): number {
  return decodeBf16(encodeBf16(value));
}

const E4M3 = Array.from({ length: 127 }, (_, code) => decodeE4m3(code));
const E2M1 = Array.from({ length: 8 }, (_, code) => decodeE2m1(code));

/** The nearest of ascending magnitudes, with the sign of `value`; of two equally near the one with the even code. */
function nearest(value: number, magnitudes: readonly number[]): number {
  const magnitude = Math.abs(value);
  let best = 0;
  for (const [code, candidate] of magnitudes.entries()) {
    const gain = Math.abs(magnitude - magnitudes[best]!) - Math.abs(magnitude - candidate);
    if (gain > 0 || (gain === 0 && code % 2 === 0)) best = code;
  }
  return value < 0 ? -magnitudes[best]! : magnitudes[best]!;
}

export const toE4m3 = (value: number): number => nearest(value, E4M3);
export const toE2m1 = (value: number): number => nearest(value, E2M1);

/** The power of two under which a block with this largest magnitude is stored; products rounded to f32 as officially. */
export function blockScale(largest: number, format: 'e4m3' | 'e2m1'): number {
  const [least, top] = format === 'e4m3' ? [Math.fround(1e-4), 448] : [6 * 2 ** -126, 6];
  return 2 ** Math.ceil(Math.log2(Math.fround(Math.max(largest, least) * Math.fround(1 / top))));
}

/** A vector stored in blocks of `block` and read back, in f32. */
export function throughBlocks(vector: ArrayLike<number>, format: 'e4m3' | 'e2m1', block: number): number[] {
  const values = Array.from(vector);
  const round = format === 'e4m3' ? toE4m3 : toE2m1;
  for (let first = 0; first < values.length; first += block) {
    const part = values.slice(first, first + block);
    const scale = blockScale(Math.max(...part.map(Math.abs)), format);
    for (const [index, value] of part.entries()) values[first + index] = round(value / scale) * scale;
  }
  return values;
}
