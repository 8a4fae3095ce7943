/** Compression, index scores and attention, one query at a time in f64, after sections 3.7 to 3.9 of the model description. */

/** Rotate the last 2 * cos.length dimensions of `vector` by the given angles, interleaved pairs. */
export function rotate(vector: readonly number[], cos: ArrayLike<number>, sin: ArrayLike<number>): number[] {
  const out = [...vector];
  const first = vector.length - 2 * cos.length;
  for (let i = 0; i < cos.length; i += 1) {
    const a = vector[first + 2 * i]!;
    const b = vector[first + 2 * i + 1]!;
    out[first + 2 * i] = a * cos[i]! - b * sin[i]!;
    out[first + 2 * i + 1] = a * sin[i]! + b * cos[i]!;
  }
  return out;
}

/** Scaled Hadamard transform by its definition: sign (-1)^(bits of i & j). */
export function hadamardTransform(vector: readonly number[]): number[] {
  const parity = (value: number): number => {
    let bits = value;
    let odd = 0;
    for (; bits; bits &= bits - 1) odd ^= 1;
    return odd;
  };
  return vector.map(
    (_, i) => vector.reduce((sum, value, j) => sum + (parity(i & j) ? -value : value), 0) / Math.sqrt(vector.length),
  );
}

/** x / sqrt(mean(x^2) + eps) * weight. */
export function normalise(vector: readonly number[], weight: ArrayLike<number>, eps: number): number[] {
  const mean = vector.reduce((sum, value) => sum + value * value, 0) / vector.length;
  return vector.map((value, i) => (value / Math.sqrt(mean + eps)) * weight[i]!);
}

/**
 * The pooled entry of block `block` before norm and rotation. `k[t]`, `z[t]` are rows of c * width, z without ape;
 * `ape[t mod ratio]` likewise. Ratio 4 overlaps with the block before.
 */
export function poolBlock(
  k: readonly ArrayLike<number>[],
  z: readonly ArrayLike<number>[],
  ape: readonly ArrayLike<number>[],
  args: { block: number; ratio: number; width: number },
): number[] {
  const { block, ratio, width } = args;
  const overlap = ratio === 4;
  const slots: { token: number; column: number }[] = [];
  if (overlap && block > 0) {
    for (let i = 0; i < ratio; i += 1) slots.push({ token: (block - 1) * ratio + i, column: 0 });
  }
  for (let i = 0; i < ratio; i += 1) slots.push({ token: block * ratio + i, column: overlap ? width : 0 });
  return Array.from({ length: width }, (_, channel) => {
    const logits = slots.map(
      ({ token, column }) => z[token]![column + channel]! + ape[token % ratio]![column + channel]!,
    );
    const largest = Math.max(...logits);
    const weights = logits.map((logit) => Math.exp(logit - largest));
    const sum = weights.reduce((total, weight) => total + weight, 0);
    return slots.reduce((total, { token, column }, i) => total + (weights[i]! / sum) * k[token]![column + channel]!, 0);
  });
}

/** Index score of one entry: sum over heads of weight * relu(query . key), times (width * heads)^-0.5. */
export function indexScore(
  queries: readonly ArrayLike<number>[],
  weights: ArrayLike<number>,
  key: ArrayLike<number>,
): number {
  let total = 0;
  for (const [head, query] of queries.entries()) {
    let dot = 0;
    for (let i = 0; i < key.length; i += 1) dot += query[i]! * key[i]!;
    total += weights[head]! * Math.max(0, dot);
  }
  return total / Math.sqrt(key.length * queries.length);
}

/** Indices of the `count` largest scores, the smaller index winning ties, ascending. */
export function largestIndices(scores: ArrayLike<number>, count: number): number[] {
  return Array.from(scores, (score, index) => ({ score, index }))
    .sort((left, right) => right.score - left.score || left.index - right.index)
    .slice(0, count)
    .map((choice) => choice.index)
    .sort((left, right) => left - right);
}

/** Attention of one head: keys are values too; the sink takes weight and gives nothing. */
export function attend(query: ArrayLike<number>, keys: readonly ArrayLike<number>[], sink: number): number[] {
  const width = query.length;
  const logits = keys.map((key) => {
    let dot = 0;
    for (let i = 0; i < width; i += 1) dot += query[i]! * key[i]!;
    return dot / Math.sqrt(width);
  });
  const largest = Math.max(sink, ...logits);
  const numerators = logits.map((logit) => Math.exp(logit - largest));
  const sum = numerators.reduce((total, value) => total + value, Math.exp(sink - largest));
  return Array.from({ length: width }, (_, i) =>
    keys.reduce((total, key, j) => total + (numerators[j]! / sum) * key[i]!, 0),
  );
}
