/** RMS normalisation of vectors: x / sqrt(mean(x²) + eps), times a weight if there is one. */
import { loadKernel, type Recorder } from './kernel.ts';
import type { RowCount } from './linear.ts';
import { assertShape, type Tensor } from './tensor.ts';

const kernel = loadKernel(new URL('./rmsnorm.wgsl', import.meta.url), ['round']);

/**
 * Record out[r, h, :] = x[r, h, :] / sqrt(mean(x[r, h, :]²) + eps) · weight. One workgroup a vector.
 *
 * @param args.x f32 [rows, H, d] or [rows, d].
 * @param args.weight f32 [d]; left out, every vector is only scaled to unit mean square.
 * @param args.out f32 shaped like x; may be x itself.
 * @param args.step u32 [4].
 * @param args.rowCount rows of the step, for the grid.
 * @param args.inBf16 round the squares, their mean, its root and the result to bf16 (appendix A 3 of the model
 *   description); without a weight only.
 * @throws RangeError on a shape that does not fit.
 */
export function rmsnorm(
  recorder: Recorder,
  args: {
    x: Tensor;
    weight?: Tensor;
    out: Tensor;
    step: Tensor;
    eps: number;
    rowCount: number;
    countFrom?: RowCount;
    inBf16?: boolean;
  },
): void {
  const { x, weight, out, step, eps, rowCount, countFrom = 'rows', inBf16 = false } = args;
  const heads = x.shape.length === 3 ? x.shape[1]! : 1;
  const columns = x.shape.at(-1)!;
  const shape = x.shape.length === 3 ? [null, heads, columns] : [null, columns];
  assertShape(x, shape);
  assertShape(out, [x.shape[0]!, ...shape.slice(1)]);
  assertShape(step, [4], 'u32');
  if (weight) assertShape(weight, [columns]);
  if (weight && inBf16) throw new RangeError('rmsnorm: a weighted norm is computed in f32');
  const inPlace = x.buffer === out.buffer;
  recorder.run(kernel, {
    entry: weight ? (inPlace ? 'weighted_in_place' : 'weighted') : inPlace ? 'plain_in_place' : 'plain',
    overrides: { WORKGROUP_SIZE: recorder.device.info.software ? 8 : 64 },
    ...(inBf16 ? { constants: { ROUND: 'true' } } : {}),
    tensors: { ...(inPlace ? {} : { x }), ...(weight ? { weight } : {}), out, step },
    params: { heads, columns, count_from: countFrom === 'rows' ? 0 : 2, eps },
    workgroups: [heads, rowCount],
  });
}
