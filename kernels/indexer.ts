/** The lightning indexer: which compressed entries a query attends to in an overlapping (CSA) layer. */
import assert from 'node:assert/strict';
import { indexKeyWords, PRECISION_CONSTANTS, type IndexPrecision } from './index-keys.ts';
import { loadKernel, type Recorder } from './kernel.ts';
import { assertShape, segmentsOf, type Tensor } from './tensor.ts';

const kernel = loadKernel(new URL('./indexer.wgsl', import.meta.url), ['quant', 'round', 'index-keys']);
const LANES = 64;
// Entries of one workgroup of `scores`: 64 lanes of 4.
const SCORES_PER_GROUP = 256;

/**
 * Replace every index query by its scaled Hadamard transform (Sylvester order, times width^-0.5). After the rotation.
 *
 * queries [maxRows, heads, width] f32, in place; width is a power of two
 */
export function hadamard(
  recorder: Recorder,
  args: {
    readonly queries: Tensor;
    readonly step: Tensor;
    /** Rows of this step. */
    readonly rowCount: number;
  },
): void {
  const { queries, step, rowCount } = args;
  const [, heads = 0, width = 0] = queries.shape;
  assertShape(queries, [null, heads, width], 'f32');
  assert((width & (width - 1)) === 0, `a Hadamard transform of ${width} dimensions`);
  recorder.run(kernel, {
    entry: 'transform',
    tensors: { queries, step },
    params: {
      heads,
      width,
      ratio: 1,
      entries_per_page: 1,
      max_pages: 1,
      capacity: 1,
      row_start: 0,
      topk: 0,
      segment_start: 0,
      segment_count: 0,
    },
    workgroups: [Math.ceil((rowCount * heads) / LANES)],
  });
}

/**
 * Select the entries that each row attends to: with n(t) = floor((t+1)/r) visible entries, the topk largest scores
 * I(t, s) = sum over heads of headWeights * max(0, query . key), times (width * heads)^-0.5; the smaller index wins a tie.
 * Rows with n(t) <= topk see all their entries: nothing is written for them, and attention does not look.
 *
 * queries      [maxRows, heads, width] f32, rotated and transformed (`hadamard`)
 * headWeights  [maxRows, heads] f32: x times weights_proj, transposed, unscaled
 * keys         [pages, entriesPerPage, indexKeyWords] u32: index keys, transformed and packed (`packKeys`); perhaps in segments
 * scores       [blockRows, maxEntries] f32, scratch. maxEntries is at least the largest n(t); rows are handled blockRows at a time
 * selected     [maxRows, topk] u32, out: entry indices, ascending
 * rows, sequences, pageTable, step: step metadata
 *
 * `rounding` rounds where the official runtime does: appendix A 8; scores then tie often. Follows section 3.8 of the model description.
 */
export function selectEntries(
  recorder: Recorder,
  args: {
    readonly queries: Tensor;
    readonly headWeights: Tensor;
    readonly keys: Tensor;
    readonly precision: IndexPrecision;
    readonly rounding?: boolean | undefined;
    readonly scores: Tensor;
    readonly selected: Tensor;
    readonly rows: Tensor;
    readonly pageTable: Tensor;
    readonly step: Tensor;
    readonly ratio: number;
    /** Rows of this step. */
    readonly rowCount: number;
    /** The greatest position among the rows of this step. */
    readonly lastPosition: number;
  },
): void {
  const { queries, headWeights, keys, precision, scores, selected, rows, pageTable, step } = args;
  const { ratio, rowCount, lastPosition, rounding = false } = args;
  const [, heads = 0, width = 0] = queries.shape;
  const [, entriesPerPage = 0] = keys.shape;
  const [, maxPages = 0] = pageTable.shape;
  const [blockRows = 0, capacity = 0] = scores.shape;
  const [, topk = 0] = selected.shape;
  assertShape(queries, [null, heads, width], 'f32');
  assertShape(headWeights, [null, heads], 'f32');
  assertShape(keys, [null, entriesPerPage, indexKeyWords(width, precision)], 'u32');
  assertShape(selected, [null, topk], 'u32');
  const entryCount = Math.floor((lastPosition + 1) / ratio);
  if (entryCount <= topk) return;
  assert(entryCount <= capacity, `${entryCount} entries, scratch for ${capacity}`);
  for (let rowStart = 0; rowStart < rowCount; rowStart += blockRows) {
    const blockCount = Math.min(blockRows, rowCount - rowStart);
    const params = {
      heads,
      width,
      ratio,
      entries_per_page: entriesPerPage,
      max_pages: maxPages,
      capacity,
      row_start: rowStart,
      topk,
      segment_start: 0,
      segment_count: 0,
    };
    for (const { start, count, tensor } of segmentsOf(keys)) {
      recorder.run(kernel, {
        entry: 'score',
        constants: { HEADS: `${Math.min(8, heads)}u`, PRECISION: PRECISION_CONSTANTS[precision], ROUND: `${rounding}` },
        tensors: { queries, headWeights, keys: tensor, scores, rows, pageTable, step },
        params: { ...params, segment_start: start, segment_count: count },
        workgroups: [Math.ceil(entryCount / SCORES_PER_GROUP), blockCount],
      });
    }
    recorder.run(kernel, {
      entry: 'select_topk',
      tensors: { scores, selected, rows, step },
      params,
      workgroups: [blockCount],
    });
  }
}
