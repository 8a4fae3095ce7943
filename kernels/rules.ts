/**
 * Rules of a request, applied to the logits of its row on the device before a token is chosen.
 *
 * Of a logit l: divided by the repetition penalty where it is positive, else multiplied by it (for tokens of the prompt
 * and of the answer); less frequency penalty times how often the answer has the token; less presence penalty if it has
 * it at all; plus the token's bias. Bias comes last, so that no penalty scales it. A banned token, and one without its
 * bit in the mask, becomes minus infinity, which is never chosen; if no token is left, `sample` writes NO_TOKEN.
 */
import { loadKernel, type Recorder } from './kernel.ts';
import { assertShape, type Tensor } from './tensor.ts';

const kernel = loadKernel(new URL('./rules.wgsl', import.meta.url), ['edits']);

/** u32 words of one row of the `rules` tensor, and of one edit. */
export const RULES_WORDS = 8;
export const EDIT_WORDS = 4;

/** In place of a row of `masks`: every token may be chosen. */
export const NO_MASK = 0xffff_ffff;

/** Flags of an edit's `seen`, above the count of how often its token was generated. */
export const IN_PROMPT = 0x8000_0000;
export const BANNED = 0x4000_0000;

/** Smaller repetition penalties act like this one: no logit leaves the range of f32 by it. */
const LEAST_REPETITION = 1e-30;

/** The rules of one row of logits. */
export interface RulesRow {
  /** Row of the logits. */
  readonly sample: number;
  /** Row of `masks`, or NO_MASK. */
  readonly mask: number;
  /** Its edits, one a token at most: [firstEdit, firstEdit + editCount). */
  readonly firstEdit: number;
  readonly editCount: number;
  /** 0, 0 and 1 leave everything as it is. */
  readonly presence: number;
  readonly frequency: number;
  /** Above 0. */
  readonly repetition: number;
}

/** Write one row of the `rules` tensor's words, of RULES_WORDS each. */
export function writeRulesRow(words: Uint32Array, index: number, row: RulesRow): void {
  const view = new DataView(words.buffer, words.byteOffset + index * RULES_WORDS * 4, RULES_WORDS * 4);
  view.setUint32(0, row.sample, true);
  view.setUint32(4, row.mask, true);
  view.setUint32(8, row.firstEdit, true);
  view.setUint32(12, row.editCount, true);
  view.setFloat32(16, row.presence, true);
  view.setFloat32(20, row.frequency, true);
  view.setFloat32(24, Math.max(row.repetition, LEAST_REPETITION), true);
  view.setUint32(28, 0, true);
}

/** Write one edit: `seen` is a count below 2^30, with IN_PROMPT or BANNED added where they hold. */
export function writeEdit(
  words: Uint32Array,
  index: number,
  edit: { readonly token: number; readonly seen: number; readonly bias: number },
): void {
  const view = new DataView(words.buffer, words.byteOffset + index * EDIT_WORDS * 4, EDIT_WORDS * 4);
  view.setUint32(0, edit.token, true);
  view.setUint32(4, edit.seen, true);
  view.setFloat32(8, edit.bias, true);
  view.setUint32(12, 0, true);
}

/** u32 words of one mask: bit `id % 32` of word `id >> 5` is set if the token may be chosen. */
export function maskWords(vocabulary: number): number {
  return Math.ceil(vocabulary / 32);
}

/**
 * Record the rules of a step's rows. Rows without rules cost nothing.
 *
 * @param args.logits f32 [maxSampled, V], written.
 * @param args.rules u32 [maxSampled, RULES_WORDS], from `writeRulesRow`; each row of logits at most once.
 * @param args.edits u32 [maxEdits, EDIT_WORDS], from `writeEdit`; the last word becomes the bits of the logit before.
 *   An id past the vocabulary is passed over.
 * @param args.masks u32 [masks, maskWords(V)].
 * @param args.ruledCount rows of `rules`, for the grid.
 * @throws RangeError on a shape that does not fit.
 */
export function applyRules(
  recorder: Recorder,
  args: { logits: Tensor; rules: Tensor; edits: Tensor; masks: Tensor; ruledCount: number },
): void {
  const { logits, rules, edits, masks, ruledCount } = args;
  const vocabulary = logits.shape[1]!;
  assertShape(logits, [null, vocabulary]);
  assertShape(rules, [null, RULES_WORDS], 'u32');
  assertShape(edits, [null, EDIT_WORDS], 'u32');
  assertShape(masks, [null, maskWords(vocabulary)], 'u32');
  recorder.run(kernel, {
    overrides: { WORKGROUP_SIZE: recorder.device.info.software ? 8 : 256 },
    tensors: { logits, rules, edits, masks },
    params: { vocabulary },
    workgroups: [ruledCount],
  });
}
