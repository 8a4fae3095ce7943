/** Attention of few rows over many keys: the weighted sum is split over the keys, then combined. */
import {
  KEYS_PER_SPLIT,
  LANES,
  TILE,
  VALUE_DIMS,
  attentionPrefill,
  attentionShape,
  recordScores,
  type AttentionArgs,
} from './attention-prefill.ts';
import { loadKernel, type Recorder } from './kernel.ts';
import { assertShape } from './tensor.ts';

const kernel = loadKernel(new URL('./attention-decode.wgsl', import.meta.url), ['attention']);

// Rows with so few splits are as fast in one pass: splitting writes and reads every partial sum once more.
const SINGLE_PASS_SPLITS = 4;

/**
 * Attention of a decode step; arguments and results (bit for bit) are those of `attentionPrefill`.
 * Few rows with many keys (long contexts, large windows) are split over the keys; others go through `attentionPrefill`.
 */
export function attentionDecode(recorder: Recorder, args: AttentionArgs): void {
  const shape = attentionShape(args);
  const splitCount = Math.ceil(shape.keyCount / KEYS_PER_SPLIT);
  if (splitCount <= SINGLE_PASS_SPLITS) {
    attentionPrefill(recorder, args);
    return;
  }
  const { kv, ring, rows, sequences, pageTable, out, rowCount, scratch } = args;
  const { scores, denominators, partials } = scratch;
  const { heads, head_dim: headDim, max_keys: maxKeys } = shape.params;
  const [splitRows = 0, maxSplits = 0] = partials.shape;
  assertShape(partials, [splitRows, Math.ceil(maxKeys / KEYS_PER_SPLIT), heads, headDim]);
  const blockRows = Math.min(shape.blockRows, splitRows);
  for (let rowStart = 0; rowStart < rowCount; rowStart += blockRows) {
    const blockCount = Math.min(blockRows, rowCount - rowStart);
    const params = { ...shape.params, row_start: rowStart, max_splits: maxSplits };
    recordScores(recorder, args, shape, { rowStart, blockCount, blockRows });
    recorder.run(kernel, {
      entry: 'split',
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
        partials,
      },
      params,
      workgroups: [Math.ceil(headDim / VALUE_DIMS / LANES), blockCount, splitCount * Math.ceil(heads / TILE)],
    });
    recorder.run(kernel, {
      entry: 'combine',
      overrides: { LANES },
      tensors: { rows, denominators, partials, out },
      params,
      workgroups: [Math.ceil(headDim / LANES), blockCount, heads],
    });
  }
}
