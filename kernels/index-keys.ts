/** Storage of the lightning indexer's keys, in four precisions. */
import assert from 'node:assert/strict';
import { loadKernel, type Recorder } from './kernel.ts';
import { assertShape, segmentsOf, type Tensor } from './tensor.ts';

const kernel = loadKernel(new URL('./index-keys.wgsl', import.meta.url), ['index-keys', 'round']);
const LANES = 64;

/**
 * How index keys are stored. fp8: e4m3 with one f32 scale a key; fp4: e2m1 with one e8m0 scale for 32 dimensions; both
 * scales are powers of two.
 */
export type IndexPrecision = 'f32' | 'bf16' | 'fp8' | 'fp4';

/** Names of the precisions in the kernels that read or write keys. */
export const PRECISION_CONSTANTS: Readonly<Record<IndexPrecision, string>> = {
  f32: 'KEYS_F32',
  bf16: 'KEYS_BF16',
  fp8: 'KEYS_FP8',
  fp4: 'KEYS_FP4',
};

/** 32-bit words of one key of `width` dimensions, its scales included. */
export function indexKeyWords(width: number, precision: IndexPrecision): number {
  switch (precision) {
    case 'f32':
      return width;
    case 'bf16':
      return Math.ceil(width / 2);
    case 'fp8':
      return Math.ceil(width / 4) + 1;
    case 'fp4':
      return Math.ceil(width / 8) + Math.ceil(Math.ceil(width / 32) / 4);
    default:
      return precision satisfies never;
  }
}

/**
 * Store the keys that this step's rows complete in their pages.
 *
 * staged     [maxRows, width] f32: from `compress`, the key of the row that completes it
 * keys       [pages, entriesPerPage, indexKeyWords] u32, out; perhaps in segments
 * rows, pageTable, step: step metadata
 */
export function packKeys(
  recorder: Recorder,
  args: {
    readonly staged: Tensor;
    readonly keys: Tensor;
    readonly precision: IndexPrecision;
    readonly rows: Tensor;
    readonly pageTable: Tensor;
    readonly step: Tensor;
    readonly ratio: number;
    /** Rows of this step. */
    readonly rowCount: number;
  },
): void {
  const { staged, keys, precision, rows, pageTable, step, ratio, rowCount } = args;
  const [, width = 0] = staged.shape;
  const [, entriesPerPage = 0] = keys.shape;
  const [, maxPages = 0] = pageTable.shape;
  assertShape(staged, [null, width]);
  assertShape(keys, [null, entriesPerPage, indexKeyWords(width, precision)], 'u32');
  assertShape(rows, [null, 4], 'u32');
  assertShape(pageTable, [null, maxPages], 'u32');
  assertShape(step, [4], 'u32');
  assert(ratio > 0 && entriesPerPage > 0, `ratio ${ratio}, ${entriesPerPage} entries a page`);
  for (const { start, count, tensor } of segmentsOf(keys)) {
    recorder.run(kernel, {
      constants: { PRECISION: PRECISION_CONSTANTS[precision] },
      tensors: { staged, keys: tensor, rows, pageTable, step },
      params: {
        width,
        ratio,
        entries_per_page: entriesPerPage,
        max_pages: maxPages,
        segment_start: start,
        segment_count: count,
      },
      workgroups: [Math.ceil(rowCount / LANES)],
    });
  }
}
