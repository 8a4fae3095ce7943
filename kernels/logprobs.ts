/**
 * Log probabilities of tokens, on the device, for the rows that ask: of the chosen token, and of the likeliest ones.
 *
 * Natural logarithms of the softmax of the logits as the model gives them, before temperature, penalties, bias and mask:
 * what the model thinks, whatever the request did to the choice. The chosen token need not be among the likeliest.
 */
import { loadKernel, type Recorder } from './kernel.ts';
import { EDIT_WORDS } from './rules.ts';
import { assertShape, type Tensor } from './tensor.ts';

const kernel = loadKernel(new URL('./logprobs.wgsl', import.meta.url), ['edits', 'logits']);

/** Most likeliest tokens that a row may ask for. */
export const MAX_TOP_LOGPROBS = 20;

/** u32 words of one row of the `logged` tensor, and of one row of `logprobs`. */
export const LOGGED_WORDS = 4;
export const LOGPROB_WORDS = 44;

const CHOSEN_WORD = 0;
const TOP_IDS_WORD = 4;
const TOP_VALUES_WORD = 24;
const NO_ID = 0xffff_ffff;

/** A row that asks: its row of logits, how many of the likeliest, and its edits (kernels/rules.ts; none: 0 and 0). */
export interface LoggedRow {
  readonly sample: number;
  readonly topCount: number;
  readonly firstEdit: number;
  readonly editCount: number;
}

/** What is known of one choice. */
export interface TokenLogprobs {
  readonly logprob: number;
  /** Likeliest first, the lower id first where they tie. */
  readonly top: readonly { readonly id: number; readonly logprob: number }[];
}

/** What recording both halves takes. */
interface LogprobsArgs {
  /** f32 [maxSampled, V]. */
  readonly logits: Tensor;
  /** u32 [maxSampled, LOGGED_WORDS], from `writeLoggedRow`. */
  readonly logged: Tensor;
  /** u32 [maxSampled, LOGPROB_WORDS], written; row i is of row i of `logged`. */
  readonly logprobs: Tensor;
  /** Rows of `logged`, for the grid. */
  readonly loggedCount: number;
}

/** Write one row of the `logged` tensor's words, of LOGGED_WORDS each. */
export function writeLoggedRow(words: Uint32Array, index: number, row: LoggedRow): void {
  words.set([row.sample, Math.min(row.topCount, MAX_TOP_LOGPROBS), row.firstEdit, row.editCount], index * LOGGED_WORDS);
}

/** Record the likeliest tokens; before the rules. */
export function rankTokens(recorder: Recorder, args: LogprobsArgs): void {
  const { logits, logged, logprobs, loggedCount } = args;
  checkShapes(args);
  recorder.run(kernel, {
    ...callFor(recorder, args),
    entry: 'rank',
    tensors: { logits, logged, logprobs },
    workgroups: [loggedCount],
  });
}

/**
 * Record what the chosen tokens have; after `rankTokens`, the rules and `sample`. Nothing is written for NO_TOKEN.
 *
 * @param args.tokens u32 [maxSampled], from `sample`.
 * @param args.edits u32 [maxEdits, EDIT_WORDS], as the rules have left them.
 */
export function noteChosen(recorder: Recorder, args: LogprobsArgs & { tokens: Tensor; edits: Tensor }): void {
  const { logits, logged, logprobs, tokens, edits, loggedCount } = args;
  checkShapes(args);
  assertShape(tokens, [null], 'u32');
  assertShape(edits, [null, EDIT_WORDS], 'u32');
  recorder.run(kernel, {
    ...callFor(recorder, args),
    entry: 'note',
    tensors: { logits, logged, tokens, edits, logprobs },
    workgroups: [loggedCount],
  });
}

/** Read row `index` of the words of `logprobs`, of which `topCount` likeliest tokens were asked for. */
export function readLogprobs(words: Uint32Array, index: number, topCount: number): TokenLogprobs {
  const row = words.subarray(index * LOGPROB_WORDS, (index + 1) * LOGPROB_WORDS);
  const values = new Float32Array(row.slice().buffer);
  const count = Math.min(topCount, MAX_TOP_LOGPROBS);
  const top = Array.from({ length: count }, (_, rank) => ({
    id: row[TOP_IDS_WORD + rank]!,
    logprob: values[TOP_VALUES_WORD + rank]!,
  }));
  return { logprob: values[CHOSEN_WORD]!, top: top.filter(({ id }) => id !== NO_ID) };
}

function callFor(
  recorder: Recorder,
  { logits }: LogprobsArgs,
): { overrides: Record<string, number>; params: Record<string, number> } {
  return {
    overrides: { WORKGROUP_SIZE: recorder.device.info.software ? 8 : 256 },
    params: { vocabulary: logits.shape[1]! },
  };
}

function checkShapes({ logits, logged, logprobs }: LogprobsArgs): void {
  assertShape(logits, [null, null]);
  assertShape(logged, [null, LOGGED_WORDS], 'u32');
  assertShape(logprobs, [null, LOGPROB_WORDS], 'u32');
}
