/** Plain hyper-connections in f64: specification of the model, section 3.2. */

/** What `hyperPre` makes of one row. */
export interface HyperGates {
  readonly pre: number[];
  readonly post: number[];
  /** [i][j]: source stream i, destination j. */
  readonly comb: number[][];
}

const sigmoid = (value: number): number => 1 / (1 + Math.exp(-value));

/** The gates of one row from m, the mixing logits after the norm. */
export function hyperGates(
  m: ArrayLike<number>,
  base: ArrayLike<number>,
  scale: ArrayLike<number>,
  args: { streams: number; eps: number; iterations: number },
): HyperGates {
  const { streams, eps, iterations } = args;
  const indices = Array.from({ length: streams }, (_, index) => index);
  const logit = (k: number, group: number): number => m[k]! * scale[group]! + base[k]!;
  const pre = indices.map((i) => sigmoid(logit(i, 0)) + eps);
  const post = indices.map((i) => 2 * sigmoid(logit(streams + i, 1)));
  let comb = indices.map((i) => {
    const logits = indices.map((j) => logit(2 * streams + streams * i + j, 2));
    const exps = logits.map((value) => Math.exp(value - Math.max(...logits)));
    const sum = exps.reduce((left, right) => left + right, 0);
    return exps.map((value) => value / sum + eps);
  });
  const byColumns = (matrix: number[][]): number[][] => {
    const sums = indices.map((j) => matrix.reduce((sum, row) => sum + row[j]!, 0));
    return matrix.map((row) => row.map((value, j) => value / (sums[j]! + eps)));
  };
  const byRows = (matrix: number[][]): number[][] =>
    matrix.map((row) => {
      const sum = row.reduce((left, right) => left + right, 0);
      return row.map((value) => value / (sum + eps));
    });
  comb = byColumns(comb);
  for (let iteration = 1; iteration < iterations; iteration += 1) comb = byColumns(byRows(comb));
  return { pre, post, comb };
}

/** 1 / rms of a row's streams. */
export function hyperFactor(streams: ArrayLike<number>, normEps: number): number {
  let sum = 0;
  for (let index = 0; index < streams.length; index += 1) sum += streams[index]! ** 2;
  return 1 / Math.sqrt(sum / streams.length + normEps);
}
