/** Routing and experts, row by row in f64, after section 4 of the model description. */

/** sqrt(softplus(x)). */
export function routerScore(logit: number): number {
  return Math.sqrt(Math.max(logit, 0) + Math.log1p(Math.exp(-Math.abs(logit))));
}

/** The ids of the K largest score + bias, the lower id winning ties, in ascending order. */
export function chooseExperts(logits: readonly number[], bias: readonly number[], chosenCount: number): number[] {
  return logits
    .map((logit, id) => ({ id, key: routerScore(logit) + bias[id]! }))
    .sort((left, right) => right.key - left.key || left.id - right.id)
    .slice(0, chosenCount)
    .map((choice) => choice.id)
    .sort((left, right) => left - right);
}

/** Weights of chosen experts: their scores over the sum of these, times scale. */
export function weighExperts(logits: readonly number[], chosen: readonly number[], scale: number): number[] {
  const scores = chosen.map((id) => routerScore(logits[id]!));
  const sum = scores.reduce((total, score) => total + score, 0);
  return scores.map((score) => (score / sum) * scale);
}

/** silu(min(gate, limit)) * clamp(up, -limit, limit). */
export function clampedSwiglu(gate: number, up: number, limit: number): number {
  const clamped = Math.min(gate, limit);
  return (clamped / (1 + Math.exp(-clamped))) * Math.max(-limit, Math.min(limit, up));
}

/** One expert on one row. `gate` and `up` are [I][D], `down` is [D][I]. */
export function applyExpert(
  x: ArrayLike<number>,
  matrices: { gate: ArrayLike<number>; up: ArrayLike<number>; down: ArrayLike<number> },
  args: { hiddenWidth: number; weight: number; limit: number },
): number[] {
  const width = x.length;
  const dot = (matrix: ArrayLike<number>, row: number, vector: ArrayLike<number>): number => {
    let sum = 0;
    for (let k = 0; k < vector.length; k += 1) sum += matrix[row * vector.length + k]! * vector[k]!;
    return sum;
  };
  const hidden = Array.from(
    { length: args.hiddenWidth },
    (_, i) => clampedSwiglu(dot(matrices.gate, i, x), dot(matrices.up, i, x), args.limit) * args.weight,
  );
  return Array.from({ length: width }, (_, d) => dot(matrices.down, d, hidden));
}
