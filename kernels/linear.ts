/**
 * Linear layers: out = x · Wᵀ with W in the checkpoint's own format, decoded inside the kernel.
 *
 * A lane makes R outputs of T rows. R and T are chosen by the number of rows and never change a result: every output
 * is accumulated by one lane in ascending k, in blocks of the weight's scale.
 */
import { loadKernel, type Recorder } from './kernel.ts';
import { dtypeBytes, type Dtype } from './dtype.ts';
import { assertShape, segmentsOf, type SplitUnit, type Tensor } from './tensor.ts';

const kernel = loadKernel(new URL('./linear.wgsl', import.meta.url), ['quant']);

/** How a weight is stored. */
export type LinearFormat = 'f32' | 'bf16' | 'e4m3' | 'mxfp4' | 'nvfp4';

/**
 * A weight matrix [rows, columns] in checkpoint bytes, row-major, packed as dtype.ts says. A large one may lie in segments
 * of rows, its scales in segments of the same rows: cut it by `linearSplit`.
 */
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
  const { x, weight, out, step, rowCount, groups = 1, countFrom = 'rows' } = args;
  const { rows, columns } = weight;
  assertLinearWeight(weight);
  assertShape(step, [4], 'u32');
  assertRows(x, groups * columns);
  assertRows(out, rows);
  if (rows % groups !== 0) throw new RangeError(`linear: ${rows} outputs do not split into ${groups} groups`);
  const scales = weight.scale && segmentsOf(weight.scale);
  for (const [index, segment] of segmentsOf(weight.weight).entries()) {
    const tensors = {
      x,
      weight: segment.tensor,
      // Formats without scales read neither, but the bindings of the file want a buffer.
      scale: scales?.[index]!.tensor ?? segment.tensor,
      scale2: weight.scale2 ?? segment.tensor,
      step,
      out,
    };
    for (const run of runsOf(segment, rows / groups, groups)) {
      const tile = chooseTile(recorder.device.info.software, run.outputs, rowCount);
      recorder.run(kernel, {
        overrides: { WORKGROUP_SIZE: tile.workgroupSize },
        constants: { R: `${tile.outputsPerLane}u`, T: `${tile.rowsPerLane}u`, FORMAT: formatConstant(weight) },
        tensors,
        params: {
          columns,
          outputs: run.outputs,
          groups,
          count_from: countFrom === 'rows' ? 0 : 2,
          width: rows,
          first_group: run.firstGroup,
          first_output: run.firstOutput,
          segment_start: segment.start,
        },
        workgroups: [
          Math.ceil(run.outputs / (tile.workgroupSize * tile.outputsPerLane)),
          Math.ceil(rowCount / tile.rowsPerLane),
          run.groupCount,
        ],
      });
    }
  }
}

/** What one dispatch makes: `outputs` outputs of each of `groupCount` groups, the first of them `firstOutput`. */
interface Run {
  readonly firstGroup: number;
  readonly groupCount: number;
  readonly firstOutput: number;
  readonly outputs: number;
}

// A whole matrix is one run. A segment that cuts through groups is one run a group: each reads its own part of x.
function runsOf(segment: { start: number; count: number }, outputs: number, groups: number): Run[] {
  const end = segment.start + segment.count;
  if (segment.count === outputs * groups) return [{ firstGroup: 0, groupCount: groups, firstOutput: 0, outputs }];
  const runs: Run[] = [];
  for (let group = Math.floor(segment.start / outputs); group * outputs < end; group++) {
    const firstOutput = Math.max(segment.start, group * outputs);
    const runEnd = Math.min(end, (group + 1) * outputs);
    runs.push({ firstGroup: group, groupCount: 1, firstOutput, outputs: runEnd - firstOutput });
  }
  return runs;
}

/** Outputs and rows of one lane. Of no influence on results; measured on lavapipe, where loads are what costs. */
function chooseTile(
  software: boolean,
  outputs: number,
  rowCount: number,
): { workgroupSize: number; outputsPerLane: number; rowsPerLane: number } {
  const rowsPerLane = rowCount === 1 ? 1 : rowCount <= 4 ? 4 : 8;
  if (!software) return { workgroupSize: 64, outputsPerLane: 1, rowsPerLane };
  return { workgroupSize: 8, outputsPerLane: outputs <= 64 ? 4 : 8, rowsPerLane };
}

// Rows and columns under one scale of e4m3.
const FP8_BLOCK = 128;
// Whatever a row of weights or scales takes, a whole number of bytes, so many rows fill words.
const WHOLE_WORD_ROWS = 4;

/** The kernel's name of the format. */
function formatConstant(weight: LinearWeight): string {
  if (weight.format === 'bf16' && weight.columns % 2 === 1) return 'BF16_ODD';
  return weight.format.toUpperCase();
}

const STORAGE: Record<LinearFormat, { dtype: Dtype; columnMultiple: number }> = {
  f32: { dtype: 'f32', columnMultiple: 1 },
  bf16: { dtype: 'bf16', columnMultiple: 1 },
  e4m3: { dtype: 'e4m3', columnMultiple: 4 },
  mxfp4: { dtype: 'e2m1', columnMultiple: 32 },
  nvfp4: { dtype: 'e2m1', columnMultiple: 16 },
};

/** Where a matrix of this size and its scales may be cut: between rows that share no scale and no word. */
export function linearSplit(format: LinearFormat, rows: number, columns: number): SplitUnit {
  const unitRows = Math.min(rows, format === 'e4m3' ? FP8_BLOCK : WHOLE_WORD_ROWS);
  return {
    rows: unitRows,
    bytes: Math.ceil(dtypeBytes(STORAGE[format].dtype, unitRows * columns) / 4) * 4,
    elements: unitRows * columns,
  };
}

/**
 * Check that the weight's tensors have the shapes and types that its format says.
 *
 * @throws RangeError naming the tensor.
 */
export function assertLinearWeight({ format, weight, scale, scale2, rows, columns }: LinearWeight): void {
  const { dtype, columnMultiple } = STORAGE[format];
  assertShape(weight, [rows, columns], dtype);
  if (columns % columnMultiple !== 0) {
    throw new RangeError(`weight ${weight.label}: ${columns} columns, ${format} needs a multiple of ${columnMultiple}`);
  }
  if (format === 'f32' || format === 'bf16') return;
  if (!scale || (format === 'nvfp4' && !scale2))
    throw new RangeError(`weight ${weight.label}: ${format} without scale`);
  if (segmentsOf(weight).length !== segmentsOf(scale).length)
    throw new RangeError(`weight ${weight.label}: its scales are cut elsewhere`);
  if (format === 'e4m3') assertShape(scale, [Math.ceil(rows / FP8_BLOCK), Math.ceil(columns / FP8_BLOCK)], 'f32');
  if (format === 'mxfp4') assertShape(scale, [rows, columns / 32], 'e8m0');
  if (format === 'nvfp4') {
    assertShape(scale, [rows, columns / 16], 'e4m3');
    assertShape(scale2!, [1], 'f32');
  }
}

function assertRows(tensor: Tensor, width: number): void {
  const count = tensor.shape.slice(1).reduce((product, size) => product * size, 1);
  if (tensor.dtype !== 'f32' || count !== width) {
    throw new RangeError(
      `tensor ${tensor.label} is ${tensor.dtype} [${tensor.shape}], f32 rows of ${width} are needed`,
    );
  }
}
