/** Mixture of experts: gated feed-forward networks, each applied to the rows that were routed to it. */
import assert from 'node:assert/strict';
import { assertShape } from './assert-shape.ts';
import type { Device } from './device.ts';
import { loadKernel, type Recorder } from './kernel.ts';
import { allocateTensor, type Tensor } from './tensor.ts';

const kernel = loadKernel(new URL('./experts.wgsl', import.meta.url), ['quant']);

/** Number format of expert weights, as in the checkpoint. */
export type ExpertFormat = 'f32' | 'bf16' | 'e4m3' | 'mxfp4' | 'nvfp4';

/**
 * One matrix of every expert, row-major, in the bytes of the checkpoint. `parts` matrices of equal shape lie one after
 * the other within an expert: gate and up projections (w1, w3) are one weight of two parts, w1 first.
 */
export interface ExpertWeight {
  readonly format: ExpertFormat;
  /** [E, parts * rows, columns]; columns a multiple of 8 (mxfp4: 32, nvfp4: 16). */
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

// Pairs of one expert that share a workgroup's decoded weights.
const TILE_PAIRS = 4;

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
  },
): void {
  throw new Error('body follows');
}
