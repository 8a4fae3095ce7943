/** Attention of many rows over the sliding window and compressed entries. */
import assert from 'node:assert/strict';
import { assertShape } from './assert-shape.ts';
import type { Device } from './device.ts';
import { loadKernel, type Recorder } from './kernel.ts';
import { allocateTensor, type Tensor } from './tensor.ts';

const kernel = loadKernel(new URL('./attention-prefill.wgsl', import.meta.url), ['keys']);

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
        /** [pages, entriesPerPage, d] f32. */
        readonly entries: Tensor;
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
  /** Rows of this step. */
  readonly rowCount: number;
  /** The greatest position among the rows of this step. */
  readonly lastPosition: number;
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

/** Keys of one split of the weighted sum. Prefill and decode add up split by split, so that both give the same bits. */
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
  throw new Error('body follows');
}
