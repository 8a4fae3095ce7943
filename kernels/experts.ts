/** Mixture of experts: gated feed-forward networks, each applied to the rows that were routed to it. */
import assert from 'node:assert/strict';
import type { Device } from './device.ts';
import { dtypeBytes } from './dtype.ts';
import { loadKernel, type Recorder } from './kernel.ts';
import { roundToBlockFormat } from './round.ts';
import { allocateTensor, assertShape, reshapeTensor, segmentsOf, type SplitUnit, type Tensor } from './tensor.ts';

const kernel = loadKernel(new URL('./experts.wgsl', import.meta.url), ['quant', 'round']);

/** Number format of expert weights, as in the checkpoint. */
export type ExpertFormat = 'f32' | 'bf16' | 'e4m3' | 'mxfp4' | 'nvfp4';

/**
 * One matrix of every expert, row-major, in the bytes of the checkpoint. `parts` matrices of equal shape lie one after
 * the other within an expert: gate and up projections (w1, w3) are one weight of two parts, w1 first. The experts of a
 * large layer may lie in segments, cut by `expertSplit`: weights and scales between the same experts.
 */
export interface ExpertWeight {
  readonly format: ExpertFormat;
  /** [E, parts * rows, columns]; columns a multiple of 2 for bf16, 4 for e4m3, 32 for mxfp4, 16 for nvfp4. */
  readonly weight: Tensor;
  /**
   * e4m3: f32 [E, parts * ceil(rows / 128), ceil(columns / 128)], each part's own grid of 128 x 128 blocks;
   * mxfp4: e8m0 [E, parts * rows, columns / 32]; nvfp4: e4m3 [E, parts * rows, columns / 16]. Else absent.
   */
  readonly scale?: Tensor | undefined;
  /** nvfp4: f32 [E, parts], the second scale. Else absent. */
  readonly scale2?: Tensor | undefined;
  readonly experts: number;
  readonly parts: number;
  /** Output dimensions of one part. */
  readonly rows: number;
  /** Input dimensions. */
  readonly columns: number;
}

/** Intermediate results of `experts`, shared by all layers. */
export interface ExpertScratch {
  /** [E] u32: pairs of each expert. */
  readonly counts: Tensor;
  /** [maxRows * K] u32: (row, choice) pairs, r * K + k, grouped by expert, ascending within one. */
  readonly order: Tensor;
  /** [tile capacity, 4] u32: expert, first index into `order`, pair count, unused. */
  readonly tiles: Tensor;
  /** [maxRows * K, I] f32: the hidden layer, in the order of pairs. */
  readonly hidden: Tensor;
  /** [maxRows * K, D] f32: the experts' outputs, in the order of pairs. */
  readonly outputs: Tensor;
}

// Pairs of one expert that share a workgroup's decoded weights (GROUP in the shader).
const TILE_PAIRS = 4;
// With fewer pairs per expert most tiles would be nearly empty, and grouping would not pay (lavapipe, nano: 2.2).
const GROUPED_PAIRS_PER_EXPERT = 2;
// Lanes of a workgroup: without barriers more bring nothing, and small models have few outputs.
const LANES = 8;
const GROUPING_LANES = 64;

/** Allocate the scratch for at most `maxRows` rows of K = `chosenCount` experts each. */
export function allocateExpertScratch(
  device: Device,
  args: { maxRows: number; chosenCount: number; expertCount: number; hiddenWidth: number; width: number },
): ExpertScratch {
  const { maxRows, chosenCount, expertCount, hiddenWidth, width } = args;
  const pairs = maxRows * chosenCount;
  const allocate = (shape: readonly number[], dtype: 'f32' | 'u32', label: string): Tensor =>
    allocateTensor(device, { shape, dtype, label });
  return {
    counts: allocate([expertCount], 'u32', 'expert counts'),
    order: allocate([pairs], 'u32', 'expert order'),
    tiles: allocate([tileCapacity(pairs, expertCount), 4], 'u32', 'expert tiles'),
    hidden: allocate([pairs, hiddenWidth], 'f32', 'expert hidden'),
    outputs: allocate([pairs, width], 'f32', 'expert outputs'),
  };
}

// Every expert's last tile may be partly filled, so there can be one more than full tiles for each expert in use.
function tileCapacity(pairs: number, expertCount: number): number {
  return Math.ceil(pairs / TILE_PAIRS) + Math.min(expertCount, pairs);
}

/**
 * Apply the routed experts: out = sum over chosen e, ascending, of down_e(h_e) + shared, where
 * h_e = weight_e * silu(min(gate_e x, limit)) * clamp(up_e x, -limit, limit).
 *
 * x         [maxRows, D] f32: the normed input
 * experts   [maxRows, K] u32, ascending ids (`gate`)
 * weights   [maxRows, K] f32 (`gate`)
 * gateUp    ExpertWeight of two parts, rows I, columns D (w1 then w3)
 * down      ExpertWeight of one part, rows D, columns I (w2)
 * shared    [maxRows, D] f32: the shared expert's output
 * out       [maxRows, D] f32, out; may not alias shared
 *
 * A row's result is the same bit for bit whatever other rows the step has. Follows section 4 of the model description.
 */
export function experts(
  recorder: Recorder,
  args: {
    readonly x: Tensor;
    readonly experts: Tensor;
    readonly weights: Tensor;
    readonly gateUp: ExpertWeight;
    readonly down: ExpertWeight;
    readonly shared: Tensor;
    readonly out: Tensor;
    readonly step: Tensor;
    readonly scratch: ExpertScratch;
    /** swiglu_limit. */
    readonly limit: number;
    /** Rows of this step. */
    readonly rowCount: number;
    /**
     * Round to bf16 what the official runtime does: both projections, the hidden layer, an expert's output and the sum
     * (appendix A 11); `inputs` also rounds the hidden layer to e4m3 in blocks of 128 before `down` (appendix A 1).
     */
    readonly rounding?: 'bf16' | 'inputs' | undefined;
  },
): void {
  const { x, weights, gateUp, down, shared, out, step, scratch, limit, rowCount, rounding } = args;
  const [, chosenCount = 0] = args.experts.shape;
  const { experts: expertCount, rows: hiddenWidth, columns: width } = gateUp;
  assertExpertWeight(gateUp, 2);
  assertExpertWeight(down, 1);
  assert(
    down.experts === expertCount && down.rows === width && down.columns === hiddenWidth,
    `down is ${down.experts} x ${down.rows} x ${down.columns}, gateUp ${expertCount} x 2 x ${hiddenWidth} x ${width}`,
  );
  assertShape(x, [null, width]);
  assertShape(args.experts, [null, chosenCount], 'u32');
  assertShape(weights, [null, chosenCount]);
  assertShape(shared, [null, width]);
  assertShape(out, [null, width]);
  assertShape(scratch.hidden, [null, hiddenWidth]);
  assertShape(scratch.outputs, [null, width]);
  assertShape(scratch.counts, [expertCount], 'u32');
  const pairs = rowCount * chosenCount;
  const [pairCapacity = 0] = scratch.order.shape;
  const [tileCount = 0] = scratch.tiles.shape;
  assert(pairs <= pairCapacity, `${pairs} pairs, scratch for ${pairCapacity}`);

  const { counts, order, tiles, hidden, outputs } = scratch;
  const common = {
    chosen_count: chosenCount,
    expert_count: expertCount,
    tile_capacity: tileCount,
    limit,
    segment_start: 0,
    segment_count: expertCount,
  };
  const grouped = pairs >= GROUPED_PAIRS_PER_EXPERT * expertCount;
  const tileGrid = grouped ? tileCapacity(pairs, expertCount) : pairs;
  if (grouped) {
    const params = { ...common, columns: width, outputs: hiddenWidth };
    recorder.run(kernel, {
      entry: 'count',
      tensors: { step, experts: args.experts, counts },
      params,
      workgroups: [Math.ceil(expertCount / GROUPING_LANES)],
    });
    recorder.run(kernel, {
      entry: 'place',
      tensors: { experts: args.experts, counts, order, tiles },
      params,
      workgroups: [Math.ceil((expertCount + tileGrid) / GROUPING_LANES)],
    });
  }
  const tilePairs = grouped ? TILE_PAIRS : 1;
  const tensors = { step, experts: args.experts, order, tiles };
  const rounded = rounding ? { ROUND: 'true' } : {};
  const multiply = (
    entry: 'gate_up' | 'down',
    matrix: ExpertWeight,
    args: { tensors: Record<string, Tensor>; lanes: number },
  ): void => {
    const { columns, rows: outputCount } = matrix;
    for (const { start, count: segmentCount, tensors: weightTensors } of weightSegments(matrix, weights)) {
      recorder.run(kernel, {
        entry,
        overrides: { LANES },
        constants: { PAIRS: `${tilePairs}u`, FORMAT: FORMAT_CONSTANTS[matrix.format], ...rounded },
        tensors: { ...tensors, ...args.tensors, ...weightTensors },
        params: { ...common, columns, outputs: outputCount, segment_start: start, segment_count: segmentCount },
        workgroups: [Math.ceil(args.lanes / LANES), tileGrid],
      });
    }
  };
  multiply('gate_up', gateUp, { tensors: { x, weights, out: hidden }, lanes: hiddenWidth / 4 });
  if (rounding === 'inputs') {
    // Pairs of a row lie side by side, so the hidden layer has the shape of K vectors a row.
    const [pairRows = 0] = hidden.shape;
    const vectors = reshapeTensor(hidden, [pairRows / chosenCount, chosenCount, hiddenWidth]);
    roundToBlockFormat(recorder, { x: vectors, step, rowCount, format: 'e4m3', block: 128 });
  }
  multiply('down', down, { tensors: { x: hidden, out: outputs }, lanes: width / 8 });
  recorder.run(kernel, {
    entry: 'combine',
    overrides: { LANES },
    ...(rounding ? { constants: rounded } : {}),
    tensors: { step, x: outputs, shared_out: shared, out },
    params: { ...common, columns: hiddenWidth, outputs: width },
    workgroups: [Math.ceil(width / LANES), rowCount],
  });
}

const FORMAT_CONSTANTS: Record<ExpertFormat, string> = {
  f32: 'F32',
  bf16: 'BF16',
  e4m3: 'E4M3',
  mxfp4: 'MXFP4',
  nvfp4: 'NVFP4',
};
// Columns must fill words, and scale blocks where rows of scales are packed.
const COLUMN_MULTIPLE: Record<ExpertFormat, number> = { f32: 1, bf16: 2, e4m3: 4, mxfp4: 32, nvfp4: 16 };

/** Where the matrices of a layer's experts and their scales may be cut: between experts. */
export function expertSplit(format: ExpertFormat, size: { parts: number; rows: number; columns: number }): SplitUnit {
  const elements = size.parts * size.rows * size.columns;
  // Four experts fill whole words whatever one takes.
  const scaleBytes = format === 'mxfp4' ? elements / 32 : format === 'nvfp4' ? elements / 16 : 0;
  const bytes = dtypeBytes(FORMAT_DTYPES[format], elements);
  const unitExperts = bytes % 4 === 0 && scaleBytes % 4 === 0 ? 1 : 4;
  return { rows: unitExperts, bytes: unitExperts * bytes, elements: unitExperts * elements };
}

const FORMAT_DTYPES = { f32: 'f32', bf16: 'bf16', e4m3: 'e4m3', mxfp4: 'e2m1', nvfp4: 'e2m1' } as const;

/** Experts of one segment, and the tensors of their weights. */
interface WeightSegment {
  readonly start: number;
  readonly count: number;
  readonly tensors: { readonly weight: Tensor; readonly scale: Tensor; readonly scale2: Tensor };
}

// Bindings that a format does not read still need a buffer.
function weightSegments(weight: ExpertWeight, filler: Tensor): WeightSegment[] {
  const scales = weight.scale && segmentsOf(weight.scale);
  const scales2 = weight.scale2 && segmentsOf(weight.scale2);
  return segmentsOf(weight.weight).map(({ start, count, tensor }, index) => ({
    start,
    count,
    tensors: { weight: tensor, scale: scales?.[index]!.tensor ?? filler, scale2: scales2?.[index]!.tensor ?? filler },
  }));
}

function assertExpertWeight(args: ExpertWeight, parts: number): void {
  const { format, weight, scale, scale2, experts: count, rows, columns } = args;
  assert.equal(args.parts, parts, `${weight.label}: parts`);
  assert(
    columns % COLUMN_MULTIPLE[format] === 0,
    `${weight.label}: ${columns} columns, ${format} needs a multiple of ${COLUMN_MULTIPLE[format]}`,
  );
  const fp4 = format === 'mxfp4' || format === 'nvfp4';
  assertShape(weight, [count, parts * rows, columns], FORMAT_DTYPES[format]);
  for (const other of [scale, scale2]) {
    const isCutAlike = other === undefined || segmentsOf(other).length === segmentsOf(weight).length;
    assert(isCutAlike, `${weight.label}: its scales are cut elsewhere`);
  }
  assert((scale !== undefined) === (fp4 || format === 'e4m3'), `${weight.label}: scale of ${format}`);
  assert((scale2 !== undefined) === (format === 'nvfp4'), `${weight.label}: scale2 of ${format}`);
  if (format === 'e4m3' && scale) assertShape(scale, [count, parts * Math.ceil(rows / 128), Math.ceil(columns / 128)]);
  if (format === 'mxfp4' && scale) assertShape(scale, [count, parts * rows, columns / 32], 'e8m0');
  if (format === 'nvfp4' && scale) assertShape(scale, [count, parts * rows, columns / 16], 'e4m3');
  if (scale2) assertShape(scale2, [count, parts]);
}
