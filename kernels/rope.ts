/** Rotary position embedding on the last dimensions of vectors, forward and inverse, in place. */
import { loadKernel, type Recorder } from './kernel.ts';
import { assertShape, type Tensor } from './tensor.ts';

const kernel = loadKernel(new URL('./rope.wgsl', import.meta.url));

const WORKGROUP_SIZE = 64;

/**
 * Record the rotation of interleaved pairs (x[2i], x[2i+1]) of the last R dimensions by the angle of the row's position.
 *
 * @param args.x f32 [rows, H, d] or [rows, d], changed in place.
 * @param args.rows u32 [maxRows, 4], position second.
 * @param args.cos f32 [maxPositions, R/2], made on the CPU; sin alike. They fix R.
 * @param args.inverse rotate by the negative angle.
 * @param args.step u32 [4].
 * @param args.rowCount rows of the step, for the grid.
 * @throws RangeError on a shape that does not fit.
 */
export function rope(
  recorder: Recorder,
  args: { x: Tensor; rows: Tensor; cos: Tensor; sin: Tensor; inverse: boolean; step: Tensor; rowCount: number },
): void {
  const { x, rows, cos, sin, inverse, step, rowCount } = args;
  const heads = x.shape.length === 3 ? x.shape[1]! : 1;
  const columns = x.shape.at(-1)!;
  const pairs = cos.shape[1]!;
  assertShape(x, x.shape.length === 3 ? [null, heads, columns] : [null, columns]);
  assertShape(rows, [null, 4], 'u32');
  assertShape(cos, [null, pairs]);
  assertShape(sin, [cos.shape[0]!, pairs]);
  assertShape(step, [4], 'u32');
  if (2 * pairs > columns) throw new RangeError(`rope: ${pairs} pairs do not fit a vector of ${columns}`);
  recorder.run(kernel, {
    tensors: { x, rows, cos, sin, step },
    params: { heads, columns, pairs, sign: inverse ? -1 : 1 },
    workgroups: [Math.ceil((heads * pairs) / WORKGROUP_SIZE), rowCount],
  });
}
