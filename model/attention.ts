/**
 * One attention block as kernel calls: low-rank queries, one shared key-value head, the sliding window, compressed
 * entries in the layers that have them, and the grouped low-rank output. Sections 3.5 to 3.10 of the model description.
 */
import { attentionDecode } from '../kernels/attention-decode.ts';
import { attentionPrefill } from '../kernels/attention-prefill.ts';
import { compress } from '../kernels/compress.ts';
import { packKeys } from '../kernels/index-keys.ts';
import { hadamard, selectEntries } from '../kernels/indexer.ts';
import type { Recorder } from '../kernels/kernel.ts';
import { linear, type LinearWeight } from '../kernels/linear.ts';
import { rmsnorm } from '../kernels/rmsnorm.ts';
import { rope } from '../kernels/rope.ts';
import type { Tensor } from '../kernels/tensor.ts';
import { appendWindow } from '../kernels/window.ts';
import type { ModelConfig } from './config.ts';
import type { LayerCache, TailTensors } from './kv-cache.ts';
import {
  blockInput,
  recordIndexRounding,
  recordKeyRounding,
  recordLinear,
  recordRounding,
  roundsActivations,
} from './rounding.ts';
import type { AttentionWeights, CompressorWeights, IndexerWeights } from './weights.ts';
import type { CompressorWorkspace, IndexerWorkspace, RopeTable, Workspace } from './workspace.ts';

/** What the host knows of a step; the device reads the same from the step's tensors. */
export interface StepShape {
  readonly phase: 'prefill' | 'decode';
  readonly rowCount: number;
  readonly sampledCount: number;
  /** The greatest position among the rows. */
  readonly lastPosition: number;
}

/** What a block records with. */
export interface BlockContext {
  readonly recorder: Recorder;
  readonly config: ModelConfig;
  readonly workspace: Workspace;
  readonly shape: StepShape;
}

/**
 * Record attention of the normed rows in `workspace.normed` into `workspace.blockOut`, and append the rows to the cache.
 *
 * Order matters: entries that this step completes are visible to it, so compression comes first; the window's ring is
 * written last, because attention still reads the rows that are overwritten.
 */
export function recordAttention(
  context: BlockContext,
  layer: { ratio: number; weights: AttentionWeights; cache: LayerCache },
): void {
  const { recorder, config, workspace, shape } = context;
  const { ratio, weights, cache } = layer;
  const { rowCount, lastPosition } = shape;
  const { steps, blockOut } = workspace;
  const { step, rows, sequences, pageTable } = steps;
  const { queryRank, queries, keyValue, heads, outputRank, scratch } = workspace.attention;
  const table = ratio > 0 ? workspace.ropeCompressed : workspace.ropeMain;
  const rowwise = { step, rowCount };
  const eps = config.normEps;

  const fromBlock = (weight: LinearWeight, out: Tensor): void =>
    recordLinear(context, { x: blockInput(context, weight.format), weight, out, inputs: 'as they are', ...rowwise });

  fromBlock(weights.queryDown, queryRank);
  rmsnorm(recorder, { x: queryRank, weight: weights.queryNorm, out: queryRank, eps, ...rowwise });
  recordRounding(context, queryRank, rowwise);
  recordLinear(context, { x: queryRank, weight: weights.queryUp, out: queries, inputs: 'rounded', ...rowwise });
  rmsnorm(recorder, { x: queries, out: queries, eps, inBf16: roundsActivations(config), ...rowwise });
  rope(recorder, { x: queries, rows, ...table, inverse: false, ...rowwise });
  recordRounding(context, queries, rowwise);

  fromBlock(weights.keyValue, keyValue);
  rmsnorm(recorder, { x: keyValue, weight: weights.keyValueNorm, out: keyValue, eps, ...rowwise });
  recordRounding(context, keyValue, rowwise);
  rope(recorder, { x: keyValue, rows, ...table, inverse: false, ...rowwise });
  recordRounding(context, keyValue, rowwise);
  recordKeyRounding(context, keyValue, rowwise);

  if (weights.compressor) {
    recordCompressor(context, {
      ratio,
      weights: weights.compressor,
      projections: workspace.attention.compressors.get(ratio)!,
      tail: cache.tail!,
      entries: cache.entries!,
      hadamard: false,
    });
  }
  if (weights.indexer) {
    recordIndexer(context, {
      ratio,
      weights: weights.indexer,
      buffers: workspace.attention.indexer!,
      cache,
      table,
    });
  }

  const attend = shape.phase === 'prefill' ? attentionPrefill : attentionDecode;
  attend(recorder, {
    queries,
    kv: keyValue,
    ring: cache.window,
    sinks: weights.sink,
    compressed: cache.entries
      ? {
          ratio,
          entries: cache.entries,
          gathered: cache.gathered ?? undefined,
          selected: weights.indexer ? workspace.attention.indexer!.selected : undefined,
        }
      : undefined,
    rows,
    sequences,
    pageTable,
    step,
    out: heads,
    scratch,
    rowCount,
    lastPosition,
    roundNumerators: roundsActivations(config),
  });
  appendWindow(recorder, { kv: keyValue, ring: cache.window, rows, sequences, step, rowCount });

  recordRounding(context, heads, rowwise);
  rope(recorder, { x: heads, rows, ...table, inverse: true, ...rowwise });
  recordRounding(context, heads, rowwise);
  const down = { x: heads, weight: weights.outputDown, out: outputRank, groups: config.outputGroups };
  recordLinear(context, { ...down, inputs: 'as they are', ...rowwise });
  recordLinear(context, { x: outputRank, weight: weights.outputUp, out: blockOut, inputs: 'rounded', ...rowwise });
}

function recordCompressor(
  context: BlockContext,
  args: {
    ratio: number;
    weights: CompressorWeights;
    projections: CompressorWorkspace;
    tail: TailTensors;
    entries: Tensor;
    hadamard: boolean;
  },
): void {
  const { recorder, config, workspace, shape } = context;
  const { ratio, weights, projections, tail, entries } = args;
  const { step, rows, sequences, pageTable } = workspace.steps;
  const { rowCount } = shape;
  const project = (weight: LinearWeight, out: Tensor): void =>
    linear(recorder, { x: workspace.normed, weight, out, step, rowCount });
  project(weights.key, projections.key);
  project(weights.gate, projections.gate);
  compress(recorder, {
    k: projections.key,
    z: projections.gate,
    ape: weights.positionBias,
    norm: weights.norm,
    tailK: tail.key,
    tailZ: tail.gate,
    entries,
    ...workspace.ropeCompressed,
    rows,
    sequences,
    pageTable,
    step,
    ratio,
    eps: config.normEps,
    hadamard: args.hadamard,
    rounding: roundsActivations(config),
    rowCount,
  });
}

// Index keys are always made: later steps may need them. The choice is made only when there is one to make.
function recordIndexer(
  context: BlockContext,
  args: { ratio: number; weights: IndexerWeights; buffers: IndexerWorkspace; cache: LayerCache; table: RopeTable },
): void {
  const { recorder, config, workspace, shape } = context;
  const { ratio, weights, buffers, cache, table } = args;
  const { step, rows, pageTable } = workspace.steps;
  const { rowCount, lastPosition } = shape;
  recordCompressor(context, {
    ratio,
    weights: weights.compressor,
    projections: buffers.compressor,
    tail: cache.indexTail!,
    entries: buffers.keys,
    hadamard: true,
  });
  const precision = config.indexPrecision;
  const keys = cache.indexKeys!;
  packKeys(recorder, { staged: buffers.keys, keys, precision, rows, pageTable, step, ratio, rowCount });
  const visible = Math.floor((lastPosition + 1) / ratio);
  if (visible <= config.indexTopK) return;
  const { queries, headWeights, scores, selected } = buffers;
  const rowwise = { step, rowCount };
  const { queryRank } = workspace.attention;
  recordLinear(context, { x: queryRank, weight: weights.query, out: queries, inputs: 'rounded', ...rowwise });
  rope(recorder, { x: queries, rows, ...table, inverse: false, ...rowwise });
  recordRounding(context, queries, rowwise);
  hadamard(recorder, { queries, ...rowwise });
  recordRounding(context, queries, rowwise);
  recordIndexRounding(context, queries, rowwise);
  const weigh = { x: workspace.normed, weight: weights.headWeights, out: headWeights };
  recordLinear(context, { ...weigh, inputs: 'as they are', ...rowwise });
  selectEntries(recorder, {
    queries,
    headWeights,
    keys,
    precision,
    rounding: roundsActivations(config),
    scores,
    selected,
    rows,
    pageTable,
    step,
    ratio,
    rowCount,
    lastPosition,
  });
}
