/** Plain token choice in f64 by sorting, in the order that kernels/sample.ts documents. */
import type { SamplingRow } from '../../kernels/sample.ts';

/** The kept tokens in the order of their ids, with the running sum of their weights (relative to the largest). */
export interface KeptTokens {
  readonly tokens: readonly number[];
  /** cumulative[i] is the weight of tokens[0..i], itself included. */
  readonly cumulative: readonly number[];
}

/** What temperature, top-k, top-p and min-p keep of one row. Tokens that tie with the last kept one are kept. */
export function keptTokens(logits: ArrayLike<number>, row: SamplingRow): KeptTokens {
  const usable = Array.from(logits, (_, token) => token).filter((token) => Number.isFinite(logits[token]));
  usable.sort((left, right) => logits[right]! - logits[left]! || left - right);
  const largest = logits[usable[0]!]!;
  const weight = (token: number): number => Math.exp((logits[token]! - largest) / row.temperature);
  let count = row.topK > 0 ? Math.min(row.topK, usable.length) : usable.length;
  const extendTies = (): void => {
    while (count < usable.length && logits[usable[count]!] === logits[usable[count - 1]!]) count += 1;
  };
  extendTies();
  if (row.topP < 1) {
    const total = usable.slice(0, count).reduce((sum, token) => sum + weight(token), 0);
    let mass = 0;
    let reached = 0;
    do mass += weight(usable[reached++]!);
    while (mass < row.topP * total && reached < count);
    count = reached;
    extendTies();
  }
  const tokens = usable.slice(0, count).filter((token) => weight(token) >= row.minP);
  tokens.sort((left, right) => left - right);
  let sum = 0;
  return { tokens, cumulative: tokens.map((token) => (sum += weight(token))) };
}

/** The number in [0, 1) that a row draws: pcg4d of (seed, position), the fourth word's upper 24 bits. */
export function draw(seed: number, position: number): number {
  let [x, y, z, w] = [seed >>> 0, Math.floor(seed / 2 ** 32), position, 0].map(
    (word) => (Math.imul(word, 1664525) + 1013904223) >>> 0,
  ) as [number, number, number, number];
  const mix = (): void => {
    x = (x + Math.imul(y, w)) >>> 0;
    y = (y + Math.imul(z, x)) >>> 0;
    z = (z + Math.imul(x, y)) >>> 0;
    w = (w + Math.imul(y, z)) >>> 0;
  };
  mix();
  [x, y, z, w] = [x ^ (x >>> 16), y ^ (y >>> 16), z ^ (z >>> 16), w ^ (w >>> 16)];
  mix();
  return (w >>> 8) / 2 ** 24;
}
