/**
 * Rounding of activations in place, for the mode that computes what the official runtime does. Appendix A of the model
 * description.
 */
import { loadKernel, type Recorder } from './kernel.ts';
import type { RowCount } from './linear.ts';
import { assertShape, type Tensor } from './tensor.ts';

const kernel = loadKernel(new URL('./round.wgsl', import.meta.url), ['round']);

const LANES = 64;
/** Elements of one lane of `to_bf16` (RUN in the shader). */
const RUN = 4;

/** Rows that are rounded: x f32 [rows, H, d] or [rows, d]. */
interface RoundedRows {
  readonly x: Tensor;
  /** u32 [4]. */
  readonly step: Tensor;
  /** Rows of the step, for the grid. */
  readonly rowCount: number;
  readonly countFrom?: RowCount;
}

/**
 * Record x = bf16(x) for the rows of the step, to nearest, ties to even.
 *
 * @throws RangeError on a shape that does not fit.
 */
export function roundToBf16(recorder: Recorder, args: RoundedRows): void {
  const { heads, columns } = sizesOf(args);
  recorder.run(kernel, {
    entry: 'to_bf16',
    tensors: { x: args.x, step: args.step },
    params: paramsOf(args, columns, 1),
    workgroups: [Math.ceil((heads * columns) / RUN / LANES), args.rowCount],
  });
}

/**
 * Record the loss of storing vectors in a block format: in blocks of `block` columns, x = bf16(format(x / s) · s) with
 * the smallest power of two s under which the block's largest magnitude fits (e4m3: 448, never below 1e-4 / 448;
 * e2m1: 6).
 *
 * @param args.columns the first columns of every vector are rounded, the others stay; all when left out. They need not
 *   be a multiple of `block`.
 * @throws RangeError on a shape that does not fit.
 */
export function roundToBlockFormat(
  recorder: Recorder,
  args: RoundedRows & { readonly format: 'e4m3' | 'e2m1'; readonly block: number; readonly columns?: number },
): void {
  const { heads, columns } = sizesOf(args);
  const { format, block, columns: roundedColumns = columns } = args;
  if (roundedColumns > columns) throw new RangeError(`round: ${roundedColumns} columns of ${columns}`);
  recorder.run(kernel, {
    entry: 'to_block_format',
    constants: { FORMAT: format.toUpperCase() },
    tensors: { x: args.x, step: args.step },
    params: paramsOf(args, roundedColumns, block),
    workgroups: [Math.ceil((heads * Math.ceil(roundedColumns / block)) / LANES), args.rowCount],
  });
}

function sizesOf({ x, step }: RoundedRows): { heads: number; columns: number } {
  const heads = x.shape.length === 3 ? x.shape[1]! : 1;
  const columns = x.shape.at(-1)!;
  assertShape(x, x.shape.length === 3 ? [null, heads, columns] : [null, columns]);
  assertShape(step, [4], 'u32');
  return { heads, columns };
}

function paramsOf(args: RoundedRows, roundedColumns: number, block: number): Record<string, number> {
  return {
    ...sizesOf(args),
    rounded_columns: roundedColumns,
    block,
    count_from: args.countFrom === 'sampled' ? 2 : 0,
  };
}
