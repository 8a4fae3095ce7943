/** Plain x · Wᵀ in f64, and how far f32 arithmetic may be from it. */

/** One output: its value, and the largest error of a sum of K products in f32, in any order. */
export interface Product {
  readonly value: number;
  readonly errorBound: number;
}

/** Unit roundoff of f32. */
const ROUNDOFF = 2 ** -24;

/**
 * Σ_k x[xOffset + k] · w[wOffset + k]. Error bound: K additions, one product and up to two scalings, each of one
 * rounding of at most the sum of magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
 */
export function dot(
  x: ArrayLike<number>,
  xOffset: number,
  w: ArrayLike<number>,
  wOffset: number,
  columns: number,
): Product {
  let value = 0;
  let magnitude = 0;
  for (let k = 0; k < columns; k += 1) {
    const product = x[xOffset + k]! * w[wOffset + k]!;
    value += product;
    magnitude += Math.abs(product);
  }
  return { value, errorBound: 1.01 * (columns + 3) * ROUNDOFF * magnitude };
}
