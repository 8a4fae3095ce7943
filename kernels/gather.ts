/**
 * Copy the compressed entries that rows attend to out of a pool of pages that one binding cannot hold.
 *
 * Attention adds up its keys in their order, and consecutive keys may lie in any segment of the pool, so it cannot go
 * through the segments one after the other. Copying costs each entry once; attention then reads it twice for every head.
 */
import assert from 'node:assert/strict';
import { loadKernel, type Recorder } from './kernel.ts';
import { assertShape, segmentsOf, type Tensor } from './tensor.ts';

const kernel = loadKernel(new URL('./gather.wgsl', import.meta.url));
// Of one workgroup: eight lanes copy an entry.
const ENTRIES_PER_GROUP = 8;

/**
 * Record gathered[r, i, :] = entry i of row rowStart + r: of all that it sees, or of those selected for it.
 *
 * entries    [pages, entriesPerPage, d] f32, in segments
 * selected   [maxRows, topk] u32 (`selectEntries`), or absent: then every visible entry is copied
 * gathered   [blockRows, capacity, d] f32, out
 * rows, pageTable, step: step metadata
 */
export function gatherEntries(
  recorder: Recorder,
  args: {
    readonly entries: Tensor;
    readonly selected?: Tensor | undefined;
    readonly gathered: Tensor;
    readonly rows: Tensor;
    readonly pageTable: Tensor;
    readonly step: Tensor;
    readonly ratio: number;
    /** The most entries of any row of this step. */
    readonly entryCount: number;
    readonly rowStart: number;
    readonly blockCount: number;
  },
): void {
  const { entries, selected, gathered, rows, pageTable, step, ratio, entryCount, rowStart, blockCount } = args;
  const [, entriesPerPage = 0, headDim = 0] = entries.shape;
  const [blockRows = 0, capacity = 0] = gathered.shape;
  const [, maxPages = 0] = pageTable.shape;
  assertShape(gathered, [blockRows, capacity, headDim]);
  assert(entryCount <= capacity, `${entryCount} entries of a row, scratch for ${capacity}`);
  assert(blockCount <= blockRows, `${blockCount} rows, scratch for ${blockRows}`);
  for (const { start, count, tensor } of segmentsOf(entries)) {
    recorder.run(kernel, {
      // Without a selection the binding is not read, but the file wants a buffer.
      tensors: { entries: tensor, selected: selected ?? rows, rows, pageTable, step, gathered },
      params: {
        head_dim: headDim,
        ratio,
        topk: selected?.shape[1] ?? 0,
        entries_per_page: entriesPerPage,
        max_pages: maxPages,
        capacity,
        row_start: rowStart,
        segment_start: start,
        segment_count: count,
      },
      workgroups: [Math.ceil(entryCount / ENTRIES_PER_GROUP), blockCount],
    });
  }
}
