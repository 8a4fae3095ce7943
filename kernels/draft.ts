/**
 * The bookkeeping of drafts on the device: into the rows that the model checks, against what it sampled, and back to the
 * state slots. All in the step's one submit, so a draft costs no round trip to the host.
 */
import { loadKernel, type Recorder } from './kernel.ts';
import { SAMPLING_WORDS } from './sample.ts';
import { assertShape, type Tensor } from './tensor.ts';

const kernel = loadKernel(new URL('./draft.wgsl', import.meta.url));
const LANES = 64;

/** u32 words of one row of the `drafting` tensor: slot, row of the draft or NO_ROW, first sample, row of the draft block. */
export const DRAFTING_WORDS = 4;

/** In place of a row: the sequence has no draft in this step. */
export const NO_ROW = 0xffff_ffff;

/** What `judgeDrafts` leaves of a token that was sampled behind a wrong draft. */
export const NOT_REACHED = 0xffff_fffe;

/** Added to the index of a sample, it stands for its token in `draftRows`. */
export const SAMPLED = 0x8000_0000;

/** A step's sequences that get a new draft, and the draft block's own step. */
export interface DraftingArgs {
  /** u32 [maxSequences, DRAFTING_WORDS]. */
  readonly drafting: Tensor;
  /** u32 [4] of the draft block: its rows, its sequences, the sequences that get a draft, 0. */
  readonly draftStep: Tensor;
  /** Sequences that get a draft, for the grid. */
  readonly draftingCount: number;
  readonly vocabulary: number;
}

/**
 * Record that each draft becomes the token of its row.
 *
 * @param args.drafts u32 [slots, 1]. An id past the vocabulary counts as the last one.
 * @param args.rows u32 [maxRows, 4], written.
 */
export function placeDrafts(recorder: Recorder, args: DraftingArgs & { drafts: Tensor; rows: Tensor }): void {
  const { drafts, rows } = args;
  checkDrafting(args);
  assertShape(drafts, [null, 1], 'u32');
  assertShape(rows, [null, 4], 'u32');
  recorder.run(kernel, {
    entry: 'place',
    tensors: { drafting: args.drafting, drafts, rows, draftStep: args.draftStep },
    params: { vocabulary: args.vocabulary, columns: 0 },
    workgroups: [Math.ceil(args.draftingCount / LANES)],
  });
}

/**
 * Record the verdict on each draft: right if the model sampled the same token. Rows of the draft block get the tokens
 * that follow them.
 *
 * @param args.rows u32 [maxRows, 4] of the step that was checked.
 * @param args.tokens u32 [maxSampled]: the samples; NOT_REACHED is written over those behind a wrong draft.
 * @param args.draftRows u32 [maxRows, 4]: SAMPLED plus an index becomes that sample.
 * @param args.draftSampled u32 [maxSampled], written: the row of each sequence that its new draft is read from.
 * @param args.draftSampling u32 [maxSampled, SAMPLING_WORDS]: a position one further on behind a right draft.
 * @param args.rowCount rows of the draft block, for the grid.
 */
export function judgeDrafts(
  recorder: Recorder,
  args: DraftingArgs & {
    rows: Tensor;
    tokens: Tensor;
    draftRows: Tensor;
    draftSampled: Tensor;
    draftSampling: Tensor;
    rowCount: number;
  },
): void {
  const { drafting, draftStep, rows, tokens, draftRows, draftSampled, draftSampling } = args;
  checkDrafting(args);
  assertShape(rows, [null, 4], 'u32');
  assertShape(tokens, [null], 'u32');
  assertShape(draftRows, [null, 4], 'u32');
  assertShape(draftSampled, [null], 'u32');
  assertShape(draftSampling, [null, SAMPLING_WORDS], 'u32');
  const params = { vocabulary: args.vocabulary, columns: 0 };
  recorder.run(kernel, {
    entry: 'follow',
    tensors: { tokens, draftRows, draftStep },
    params,
    workgroups: [Math.ceil(args.rowCount / LANES)],
  });
  recorder.run(kernel, {
    entry: 'judge',
    tensors: { drafting, rows, tokens, draftSampled, draftSampling, draftStep },
    workgroups: [Math.ceil(args.draftingCount / LANES)],
  });
}

/**
 * Record out[i] = x[sources[i]] for the rows of the draft block.
 *
 * @param args.x f32 [rows, …]; args.out is shaped like it and must not be it.
 * @param args.sources u32 [rows].
 */
export function gatherRows(
  recorder: Recorder,
  args: { x: Tensor; sources: Tensor; out: Tensor; draftStep: Tensor; rowCount: number },
): void {
  const { x, sources, out, draftStep, rowCount } = args;
  const columns = x.shape.slice(1).reduce((product, size) => product * size, 1);
  assertShape(out, [null, ...x.shape.slice(1)]);
  assertShape(sources, [null], 'u32');
  recorder.run(kernel, {
    entry: 'gather',
    tensors: { x, sources, out, draftStep },
    params: { vocabulary: 0, columns },
    workgroups: [Math.ceil(columns / LANES), rowCount],
  });
}

/**
 * Record that the chosen tokens are the sequences' drafts from now on.
 *
 * @param args.chosen u32 [maxSequences], in the order of `drafting`.
 * @param args.drafts u32 [slots, 1], written.
 */
export function keepDrafts(recorder: Recorder, args: DraftingArgs & { chosen: Tensor; drafts: Tensor }): void {
  const { drafting, draftStep, chosen, drafts } = args;
  checkDrafting(args);
  assertShape(chosen, [null], 'u32');
  assertShape(drafts, [null, 1], 'u32');
  recorder.run(kernel, {
    entry: 'keep',
    tensors: { drafting, drafts, draftStep, chosen },
    params: { vocabulary: args.vocabulary, columns: 0 },
    workgroups: [Math.ceil(args.draftingCount / LANES)],
  });
}

function checkDrafting({ drafting, draftStep }: DraftingArgs): void {
  assertShape(drafting, [null, DRAFTING_WORDS], 'u32');
  assertShape(draftStep, [4], 'u32');
}
