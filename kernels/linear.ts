/**
 * Linear layers: out = x · Wᵀ with W in the checkpoint's own format, decoded inside the kernel.
 *
 * A lane makes R outputs of T rows. R and T are chosen by the number of rows and never change a result: every output
 * is accumulated by one lane in ascending k, in blocks of the weight's scale.
 */
import { loadKernel, type Recorder } from './kernel.ts';
import { assertShape, type Tensor } from './tensor.ts';

/** How a weight is stored. */
export type LinearFormat = 'f32' | 'bf16' | 'e4m3' | 'mxfp4' | 'nvfp4';

/** A weight matrix [rows, columns] in checkpoint bytes, row-major, packed as dtype.ts says. */
export interface LinearWeight {
  readonly format: LinearFormat;
  /** [N, K]; dtype f32, bf16, e4m3 or (both fp4 formats) e2m1. */
  readonly weight: Tensor;
  /** e4m3: f32 [ceil(N/128), ceil(K/128)]; mxfp4: e8m0 [N, K/32]; nvfp4: e4m3 [N, K/16]. */
  readonly scale?: Tensor;
  /** nvfp4: f32 [1], one factor for the whole matrix. */
  readonly scale2?: Tensor;
  /** N, outputs. */
  readonly rows: number;
  /** K, inputs. f32 and bf16: any; e4m3: a multiple of 4; mxfp4: of 32; nvfp4: of 16. */
  readonly columns: number;
}

/** Which count of the `step` tensor bounds a kernel's rows: all rows of the step, or only the sampled ones. */
export type RowCount = 'rows' | 'sampled';

/**
 * Record out[r, n] = Σ_k x[r, k] W[n, k] for the rows of the step.
 *
 * With `groups` G the outputs are split into G equal runs and run g reads its own part of x:
 * out[r, g·o + j] = Σ_k x[r, g·K + k] W[g·o + j, k] with o = N / G.
 *
 * @param args.x f32 [rows, …] whose trailing dimensions multiply to G·K.
 * @param args.out f32 [rows, …] whose trailing dimensions multiply to N. Must not be x.
 * @param args.step u32 [4].
 * @param args.rowCount how many rows the step has, for the grid and the choice of T; at least the count in `step`.
 * @throws RangeError on a shape that does not fit.
 */
export function linear(
  recorder: Recorder,
  args: {
    x: Tensor;
    weight: LinearWeight;
    out: Tensor;
    step: Tensor;
    rowCount: number;
    groups?: number;
    countFrom?: RowCount;
  },
): void {
  throw new Error('body follows');
}
