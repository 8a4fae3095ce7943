/**
 * Manifold-constrained hyper-connections: n residual streams are mixed into the input of a block (`hyperPre`), the
 * block's output is spread over them (`hyperPost`), and after the last layer they become one vector (`hyperHead`).
 *
 * `mix` is X · fnᵀ without the norm, made by `linear` from the flattened streams; the norm is applied here, since a
 * scalar of the row commutes with the product.
 */
import { loadKernel, type Recorder } from './kernel.ts';
import { assertShape, type Tensor } from './tensor.ts';

const kernel = loadKernel(new URL('./hyper-connection.wgsl', import.meta.url));

/** Columns of one workgroup of `hyperPost`. */
const POST_COLUMNS = 256;

/** Constants of the model's configuration. */
export interface HyperConfig {
  /** rms_norm_eps: inside the root of the norm of the streams. */
  readonly normEps: number;
  /** hc_eps: added to the gates and in the Sinkhorn divisions. */
  readonly eps: number;
  /** hc_sinkhorn_iters: column normalisations, the first one included. */
  readonly iterations: number;
}

/**
 * Record the gates of a block and its input: y[r] = Σ_i pre[r, i] X[r, i].
 *
 * @param args.streams f32 [rows, n, D].
 * @param args.mix f32 [rows, (2+n)·n]: streams · fnᵀ, order pre, post, comb (comb[i][j] at 2n + n·i + j, i the source).
 * @param args.base f32 [(2+n)·n].
 * @param args.scale f32 [3].
 * @param args.y f32 [rows, D], written.
 * @param args.post f32 [rows, n], written.
 * @param args.comb f32 [rows, n, n], written.
 * @param args.step u32 [4].
 * @param args.rowCount rows of the step, for the grid.
 * @throws RangeError on a shape that does not fit.
 */
export function hyperPre(
  recorder: Recorder,
  args: {
    streams: Tensor;
    mix: Tensor;
    base: Tensor;
    scale: Tensor;
    y: Tensor;
    post: Tensor;
    comb: Tensor;
    config: HyperConfig;
    step: Tensor;
    rowCount: number;
  },
): void {
  const { streams, mix, base, scale, y, post, comb, config, step, rowCount } = args;
  const count = streams.shape[1]!;
  const columns = streams.shape[2]!;
  assertShape(streams, [null, count, columns]);
  assertShape(mix, [null, (2 + count) * count]);
  assertShape(base, [(2 + count) * count]);
  assertShape(scale, [3]);
  assertShape(y, [null, columns]);
  assertShape(post, [null, count]);
  assertShape(comb, [null, count, count]);
  assertShape(step, [4], 'u32');
  const { workgroupSize, workgroupRows } = chooseGroup(recorder);
  recorder.run(kernel, {
    entry: 'pre',
    overrides: { WORKGROUP_SIZE: workgroupSize, WORKGROUP_ROWS: workgroupRows },
    constants: { STREAMS: `${count}u` },
    tensors: { streams, mix, base, scale, y, post, comb, step },
    params: { columns, iterations: config.iterations, norm_eps: config.normEps, eps: config.eps },
    workgroups: [Math.ceil(rowCount / workgroupRows)],
  });
}

/**
 * Record the spread of a block's output, in place: X'[r, j] = post[r, j]·y[r] + Σ_i comb[r, i, j] X[r, i].
 *
 * @param args.streams f32 [rows, n, D], changed in place.
 * @param args.y f32 [rows, D]: the block's output.
 * @param args.post f32 [rows, n] and
 * @param args.comb f32 [rows, n, n], from `hyperPre`.
 * @param args.step u32 [4].
 * @param args.rowCount rows of the step, for the grid.
 * @throws RangeError on a shape that does not fit.
 */
export function hyperPost(
  recorder: Recorder,
  args: { streams: Tensor; y: Tensor; post: Tensor; comb: Tensor; step: Tensor; rowCount: number },
): void {
  const { streams, y, post, comb, step, rowCount } = args;
  const count = streams.shape[1]!;
  const columns = streams.shape[2]!;
  assertShape(streams, [null, count, columns]);
  assertShape(y, [null, columns]);
  assertShape(post, [null, count]);
  assertShape(comb, [null, count, count]);
  assertShape(step, [4], 'u32');
  recorder.run(kernel, {
    entry: 'post_in_place',
    overrides: { WORKGROUP_SIZE: chooseGroup(recorder).workgroupSize },
    constants: { STREAMS: `${count}u`, POST_COLUMNS: `${POST_COLUMNS}u` },
    tensors: { streams, y, post, comb, step },
    params: { columns, iterations: 0, norm_eps: 0, eps: 0 },
    workgroups: [Math.ceil(columns / POST_COLUMNS), rowCount],
  });
}

/**
 * Record the vectors whose logits are wanted: out[s] = Σ_i pre[i] X[sampled[s], i].
 *
 * @param args.streams f32 [rows, n, D].
 * @param args.mix f32 [rows, n]: streams · fnᵀ of all rows.
 * @param args.base f32 [n].
 * @param args.scale f32 [1].
 * @param args.sampled u32 [maxSampled]: row indices.
 * @param args.out f32 [maxSampled, D], written densely in the order of `sampled`.
 * @param args.step u32 [4].
 * @param args.sampledCount sampled rows of the step, for the grid.
 * @throws RangeError on a shape that does not fit.
 */
export function hyperHead(
  recorder: Recorder,
  args: {
    streams: Tensor;
    mix: Tensor;
    base: Tensor;
    scale: Tensor;
    sampled: Tensor;
    out: Tensor;
    config: HyperConfig;
    step: Tensor;
    sampledCount: number;
  },
): void {
  const { streams, mix, base, scale, sampled, out, config, step, sampledCount } = args;
  const count = streams.shape[1]!;
  const columns = streams.shape[2]!;
  assertShape(streams, [null, count, columns]);
  assertShape(mix, [null, count]);
  assertShape(base, [count]);
  assertShape(scale, [1]);
  assertShape(sampled, [null], 'u32');
  assertShape(out, [null, columns]);
  assertShape(step, [4], 'u32');
  const { workgroupSize, workgroupRows } = chooseGroup(recorder);
  recorder.run(kernel, {
    entry: 'head',
    overrides: { WORKGROUP_SIZE: workgroupSize, WORKGROUP_ROWS: workgroupRows },
    constants: { STREAMS: `${count}u` },
    tensors: { streams, mix, base, scale, sampled, out, step },
    params: { columns, iterations: 0, norm_eps: config.normEps, eps: config.eps },
    workgroups: [Math.ceil(sampledCount / workgroupRows)],
  });
}

/**
 * Lanes and rows of a workgroup. On a software adapter the lanes are those of one vector, and eight rows share it so
 * that each lane makes the gates of one.
 */
function chooseGroup(recorder: Recorder): { workgroupSize: number; workgroupRows: number } {
  return recorder.device.info.software
    ? { workgroupSize: 8, workgroupRows: 8 }
    : { workgroupSize: 64, workgroupRows: 1 };
}
