/** Token embedding: gathers rows of the table, widens them to f32 and copies each into all residual streams. */
import { loadKernel, type Recorder } from './kernel.ts';
import type { LinearWeight } from './linear.ts';
import { assertShape, segmentsOf, type Tensor } from './tensor.ts';

const kernel = loadKernel(new URL('./embed.wgsl', import.meta.url), ['quant']);

const WORKGROUP_SIZE = 64;

/**
 * Record out[r, i, :] = table[token of row r, :] for every stream i.
 *
 * @param args.rows u32 [maxRows, 4], token id first. An id past the table reads its last row.
 * @param args.table f32 or bf16 [V, D].
 * @param args.out f32 [rows, n, D], or [rows, D].
 * @param args.step u32 [4].
 * @param args.rowCount rows of the step, for the grid.
 * @throws RangeError on a shape or format that does not fit.
 */
export function embed(
  recorder: Recorder,
  args: { rows: Tensor; table: LinearWeight; out: Tensor; step: Tensor; rowCount: number },
): void {
  const { rows, table, out, step, rowCount } = args;
  const streams = out.shape.length === 3 ? out.shape[1]! : 1;
  const { columns } = table;
  if (table.format !== 'f32' && table.format !== 'bf16') {
    throw new RangeError(`embedding table ${table.weight.label} is ${table.format}, f32 or bf16 is needed`);
  }
  assertShape(table.weight, [table.rows, columns], table.format);
  assertShape(rows, [null, 4], 'u32');
  assertShape(step, [4], 'u32');
  assertShape(out, out.shape.length === 3 ? [null, streams, columns] : [null, columns]);
  for (const { start, count, tensor } of segmentsOf(table.weight)) {
    recorder.run(kernel, {
      constants: { BF16: String(table.format === 'bf16') },
      tensors: { rows, table: tensor, out, step },
      params: { vocabulary: table.rows, columns, streams, segment_start: start, segment_count: count },
      workgroups: [Math.ceil(columns / WORKGROUP_SIZE), rowCount],
    });
  }
}
