/** Pool blocks of tokens into compressed key-value entries, and keep the tokens of unfinished blocks. */
import assert from 'node:assert/strict';
import { loadKernel, type Recorder } from './kernel.ts';
import { assertShape, segmentsOf, type Tensor } from './tensor.ts';

const kernel = loadKernel(new URL('./compress.wgsl', import.meta.url), ['round']);
const LANES = 64;

/** The ratio whose blocks overlap: an entry also pools the block before its own (and only this ratio has an indexer). */
export const OVERLAP_RATIO = 4;

/** Shape of the tails of one layer: [slots, ring, c * d], where c = 2 and ring = 2r for the overlapping ratio, else 1 and r. */
export function tailShape(args: { slotCount: number; ratio: number; entryWidth: number }): [number, number, number] {
  const halves = args.ratio === OVERLAP_RATIO ? 2 : 1;
  return [args.slotCount, args.ratio * halves, args.entryWidth * halves];
}

/**
 * Emit the entries that this step's rows complete, then append the rows to the tails.
 *
 * Row t with (t+1) mod r = 0 makes entry (t+1)/r - 1: a softmax over the block's tokens, per channel, of z + ape weighs k;
 * then norm, rotation at the block's first position, and for index keys a scaled Hadamard transform.
 *
 * k, z           [maxRows, c * d] f32, straight from the projections (z without ape); c = 2 for the overlapping ratio, halves A then B
 * ape            [r, c * d] f32
 * norm           [d] f32
 * tailK, tailZ   [slots, ring, c * d] f32 (`tailShape`): token t at t mod ring; tailZ holds ape already
 * entries        [pages, entriesPerPage, d] f32: entry e of a sequence in page pageTable[e / entriesPerPage], perhaps in segments;
 *                or [maxRows, d] f32: the entry of the row that completes it, for `packKeys`; other rows are not written
 * cos, sin       [positions, R/2] f32: tables of the compressed layers
 * rows, sequences, pageTable, step: step metadata
 *
 * `rounding` rounds where the official runtime does: appendix A 5 to 7. Follows section 3.7 of the model description.
 */
export function compress(
  recorder: Recorder,
  args: {
    readonly k: Tensor;
    readonly z: Tensor;
    readonly ape: Tensor;
    readonly norm: Tensor;
    readonly tailK: Tensor;
    readonly tailZ: Tensor;
    readonly entries: Tensor;
    readonly cos: Tensor;
    readonly sin: Tensor;
    readonly rows: Tensor;
    readonly sequences: Tensor;
    readonly pageTable: Tensor;
    readonly step: Tensor;
    readonly ratio: number;
    /** rms_norm_eps. */
    readonly eps: number;
    /** Transform the entries (index keys). */
    readonly hadamard: boolean;
    readonly rounding?: boolean | undefined;
    /** Rows of this step. */
    readonly rowCount: number;
  },
): void {
  const {
    k,
    z,
    ape,
    norm,
    tailK,
    tailZ,
    entries,
    cos,
    sin,
    rows,
    sequences,
    pageTable,
    step,
    ratio,
    eps,
    hadamard,
    rounding = false,
    rowCount,
  } = args;
  const [slotCount = 0] = tailK.shape;
  const staged = entries.shape.length === 2;
  const entryWidth = entries.shape.at(-1) ?? 0;
  const entriesPerPage = staged ? 1 : (entries.shape[1] ?? 0);
  const [, maxPages = 0] = pageTable.shape;
  const [, pairs = 0] = cos.shape;
  const tail = tailShape({ slotCount, ratio, entryWidth });
  const [, ring, width] = tail;
  assertShape(k, [null, width], 'f32');
  assertShape(z, [null, width], 'f32');
  assertShape(ape, [ratio, width], 'f32');
  assertShape(norm, [entryWidth], 'f32');
  assertShape(tailK, tail, 'f32');
  assertShape(tailZ, tail, 'f32');
  assert(2 * pairs <= entryWidth, `${2 * pairs} rotated dimensions of ${entryWidth}`);
  assert(!hadamard || (entryWidth & (entryWidth - 1)) === 0, `a Hadamard transform of ${entryWidth} dimensions`);
  const params = {
    ratio,
    ring,
    width,
    entry_width: entryWidth,
    entries_per_page: entriesPerPage,
    max_pages: maxPages,
    pairs,
    eps,
    segment_start: 0,
    segment_count: 0,
  };
  const constants = { STAGED: `${staged}`, ROUND: `${rounding}` };
  for (const { start, count, tensor } of segmentsOf(entries)) {
    const segmentParams = { ...params, segment_start: start, segment_count: count };
    recorder.run(kernel, {
      entry: 'pool',
      constants,
      tensors: { k, z, ape, tailK, tailZ, entries: tensor, rows, sequences, pageTable, step },
      params: segmentParams,
      workgroups: [Math.ceil(entryWidth / LANES), rowCount],
    });
    recorder.run(kernel, {
      entry: 'finish',
      constants: { ...constants, HADAMARD: `${hadamard}` },
      tensors: { norm, entries: tensor, cos, sin, rows, pageTable, step },
      params: segmentParams,
      workgroups: [Math.ceil(rowCount / LANES)],
    });
  }
  recorder.run(kernel, {
    entry: 'append',
    tensors: { k, z, ape, tailK, tailZ, rows, sequences, step },
    params,
    workgroups: [Math.ceil(width / LANES), rowCount],
  });
}
