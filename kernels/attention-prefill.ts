/** Attention of many rows over the sliding window and compressed entries. */
import assert from 'node:assert/strict';
import type { Device } from './device.ts';
import { gatherEntries } from './gather.ts';
import { loadKernel, type Recorder } from './kernel.ts';
import { allocateTensor, assertShape, type Tensor } from './tensor.ts';

const kernel = loadKernel(new URL('./attention-prefill.wgsl', import.meta.url), ['attention', 'round']);

/** Keys and heads that one lane scores. */
export const TILE = 4;
/** Dimensions that one lane sums. */
export const VALUE_DIMS = 8;
/** Lanes of a workgroup: without barriers more bring nothing, and small models have few dimensions. */
export const LANES = 8;

/** What attention reads and writes; the same for prefill and decode. */
export interface AttentionArgs {
  /** [maxRows, H, d] f32: normed and rotated queries. */
  readonly queries: Tensor;
  /** [maxRows, d] f32: this step's window keys, normed and rotated; each is key and value of all heads. */
  readonly kv: Tensor;
  /** [slots, W, d] f32: window keys of earlier steps, position t at t mod W. */
  readonly ring: Tensor;
  /** [H] f32: the logit of the sink, which takes weight and gives no value. */
  readonly sinks: Tensor;
  /** Compressed entries of the layer; absent in a layer of the window alone (ratio 0). */
  readonly compressed?:
    | {
        readonly ratio: number;
        /** [pages, entriesPerPage, d] f32. In segments only with `gathered`. */
        readonly entries: Tensor;
        /** [gatherRows, capacity, d] f32, scratch for entries in segments: so many rows are handled at once at most. */
        readonly gathered?: Tensor | undefined;
        /** [maxRows, topk] u32 (`selectEntries`): a row with more than topk visible entries sees these only. Absent: all are seen. */
        readonly selected?: Tensor | undefined;
      }
    | undefined;
  readonly rows: Tensor;
  readonly sequences: Tensor;
  readonly pageTable: Tensor;
  readonly step: Tensor;
  /** [maxRows, H, d] f32, out; not yet rotated back. */
  readonly out: Tensor;
  readonly scratch: AttentionScratch;
  /** Rows of this step, exactly as many as `step` says. */
  readonly rowCount: number;
  /** The greatest position among the rows of this step. */
  readonly lastPosition: number;
  /** Round softmax numerators to bf16, as the official runtime does before it weighs the keys (appendix A 9). */
  readonly roundNumerators?: boolean | undefined;
}

/** Intermediate results of attention, shared by all layers. Rows are handled as many at a time as fit. */
export interface AttentionScratch {
  /** [blockRows, H, maxKeys] f32: scores, then softmax numerators. */
  readonly scores: Tensor;
  /** [blockRows, H] f32: softmax denominators. */
  readonly denominators: Tensor;
  /** [splitRows, maxSplits, H, d] f32: partial sums of decode attention. */
  readonly partials: Tensor;
}

/** Keys of one split of the weighted sum (include/attention.wgsl). Prefill and decode add up split by split, so that both give the same bits. */
export const KEYS_PER_SPLIT = 64;

/**
 * Allocate the scratch of one device. `maxKeys` is the largest key count of any row in any layer: the window plus
 * topk or maxPositions / ratio. `blockRows` bounds the rows handled at once by prefill, `splitRows` by decode.
 */
export function allocateAttentionScratch(
  device: Device,
  args: { blockRows: number; splitRows: number; heads: number; headDim: number; maxKeys: number },
): AttentionScratch {
  const { blockRows, splitRows, heads, headDim, maxKeys } = args;
  const allocate = (shape: readonly number[], label: string): Tensor =>
    allocateTensor(device, { shape, dtype: 'f32', label });
  return {
    scores: allocate([blockRows, heads, maxKeys], 'attention scores'),
    denominators: allocate([blockRows, heads], 'attention denominators'),
    partials: allocate([splitRows, Math.ceil(maxKeys / KEYS_PER_SPLIT), heads, headDim], 'attention partials'),
  };
}

/**
 * Attention of a prefill step: each row over its window, positions max(0, t - W + 1) to t, and its compressed entries,
 * all floor((t+1)/r) of them or the selected ones.
 *
 * Key j of head h scores q . key * d^-0.5; the sink is part of the maximum and of the denominator.
 * A row's result depends on nothing but its own keys: not on other rows, chunks, or whether prefill or decode made it.
 * Follows section 3.9 of the model description.
 */
export function attentionPrefill(recorder: Recorder, args: AttentionArgs): void {
  const shape = attentionShape(args);
  const { kv, ring, rows, sequences, pageTable, out, rowCount, scratch } = args;
  const { scores, denominators } = scratch;
  for (let rowStart = 0; rowStart < rowCount; rowStart += shape.blockRows) {
    const blockCount = Math.min(shape.blockRows, rowCount - rowStart);
    recordScores(recorder, args, shape, { rowStart, blockCount, blockRows: shape.blockRows });
    recorder.run(kernel, {
      entry: 'values',
      overrides: { LANES },
      constants: shape.constants,
      tensors: {
        kv,
        ring,
        entries: shape.entries,
        selected: shape.selected,
        rows,
        sequences,
        pageTable,
        scores,
        denominators,
        out,
      },
      params: { ...shape.params, row_start: rowStart, block_rows: shape.blockRows },
      workgroups: [
        Math.ceil(shape.params.head_dim / VALUE_DIMS / LANES),
        blockCount,
        Math.ceil(shape.params.heads / TILE),
      ],
    });
  }
}

/** The sizes of one attention call, read from its tensors and checked. */
export interface AttentionShape {
  /** Rows that the score scratch holds. */
  readonly blockRows: number;
  /** The most keys of any row. */
  readonly keyCount: number;
  readonly constants: Readonly<Record<string, string>>;
  /** The pool, or what is gathered from it. */
  readonly entries: Tensor;
  readonly selected: Tensor;
  readonly params: {
    readonly heads: number;
    readonly head_dim: number;
    readonly window: number;
    readonly ratio: number;
    readonly topk: number;
    readonly entries_per_page: number;
    readonly max_pages: number;
    readonly max_keys: number;
    readonly gathered_entries: number;
  };
}

/** Check the tensors of an attention call and read its sizes from them. */
export function attentionShape(args: AttentionArgs): AttentionShape {
  const { queries, kv, ring, sinks, compressed, rows, sequences, pageTable, out, scratch, lastPosition } = args;
  const [, heads = 0, headDim = 0] = queries.shape;
  const [, window = 0] = ring.shape;
  const [, maxPages = 0] = pageTable.shape;
  const [scoreRows = 0, , maxKeys = 0] = scratch.scores.shape;
  assertShape(queries, [null, heads, headDim]);
  assertShape(kv, [null, headDim]);
  assertShape(ring, [null, window, headDim]);
  assertShape(sinks, [heads]);
  assertShape(rows, [null, 4], 'u32');
  assertShape(sequences, [null, 4], 'u32');
  assertShape(pageTable, [null, maxPages], 'u32');
  assertShape(out, [null, heads, headDim]);
  assertShape(scratch.scores, [scoreRows, heads, maxKeys]);
  assertShape(scratch.denominators, [scoreRows, heads]);
  const ratio = compressed?.ratio ?? 0;
  // Bindings that a layer does not read still need a buffer of the right kind.
  const pool = compressed?.entries ?? ring;
  const gathered = pool.segments ? compressed?.gathered : undefined;
  const selected = compressed?.selected ?? rows;
  const topk = compressed?.selected?.shape[1] ?? 0;
  if (compressed) assertShape(pool, [null, null, headDim]);
  assert(!pool.segments || gathered, `${pool.label} lies in segments, which needs a tensor to gather into`);
  if (compressed?.selected) assertShape(selected, [null, topk], 'u32');
  const keyCount = Math.min(lastPosition + 1, window) + entryCount(ratio, topk, lastPosition);
  assert(keyCount <= maxKeys, `${keyCount} keys at position ${lastPosition}, scratch for ${maxKeys}`);
  return {
    blockRows: Math.min(scoreRows, gathered?.shape[0] ?? scoreRows),
    keyCount,
    constants: gathered ? { GATHERED: 'true' } : {},
    entries: gathered ?? pool,
    selected,
    params: {
      heads,
      head_dim: headDim,
      window,
      ratio,
      topk,
      entries_per_page: compressed ? pool.shape[1]! : 1,
      max_pages: maxPages,
      max_keys: maxKeys,
      gathered_entries: gathered?.shape[1] ?? 0,
    },
  };
}

/** Compressed entries that a query at `position` attends to. */
function entryCount(ratio: number, topk: number, position: number): number {
  const visible = ratio === 0 ? 0 : Math.floor((position + 1) / ratio);
  return topk === 0 ? visible : Math.min(visible, topk);
}

/** Gather entries if they lie in segments, then record scores and softmax numerators of a block of rows, `blockCount` of at most `blockRows`, into the scratch. */
export function recordScores(
  recorder: Recorder,
  args: AttentionArgs,
  shape: AttentionShape,
  block: { readonly rowStart: number; readonly blockCount: number; readonly blockRows: number },
): void {
  const { queries, kv, ring, sinks, rows, sequences, pageTable, step, lastPosition, scratch } = args;
  const { rowStart, blockCount, blockRows } = block;
  const { scores, denominators } = scratch;
  const { heads, window, ratio, topk } = shape.params;
  const params = { ...shape.params, row_start: rowStart, block_rows: blockRows };
  const { compressed } = args;
  const entriesSeen = entryCount(ratio, topk, lastPosition);
  if (compressed?.entries.segments) {
    gatherEntries(recorder, {
      ...compressed,
      gathered: shape.entries,
      rows,
      pageTable,
      step,
      entryCount: entriesSeen,
      rowStart,
      blockCount,
    });
  }
  // The window's two sources are tiled on their own, which takes one tile more.
  const windowTiles = Math.ceil(Math.min(lastPosition + 1, window) / TILE / LANES) + 1;
  const entryTiles = Math.ceil(entriesSeen / TILE / LANES);
  recorder.run(kernel, {
    entry: 'score',
    overrides: { LANES },
    constants: shape.constants,
    tensors: {
      queries,
      kv,
      ring,
      entries: shape.entries,
      selected: shape.selected,
      rows,
      sequences,
      pageTable,
      scores,
    },
    params,
    workgroups: [windowTiles + entryTiles, blockCount, Math.ceil(heads / TILE)],
  });
  recorder.run(kernel, {
    entry: 'normalise',
    overrides: { LANES },
    ...(args.roundNumerators ? { constants: { ROUND: 'true' } } : {}),
    tensors: { sinks, rows, step, scores, denominators },
    params,
    workgroups: [Math.ceil((blockCount * heads) / LANES)],
  });
}
