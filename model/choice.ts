/**
 * How tokens are chosen beyond temperature and its like: the rules of a request, and log probabilities for those who ask.
 *
 * A step uploads what its rows need and no more; rows without rules and without log probabilities cost nothing. Nothing
 * is kept from step to step: penalties are counted anew from the sequence's tokens, so it makes no difference where a
 * sequence runs, or whether it was interrupted.
 */
import assert from 'node:assert/strict';
import type { Device } from '../kernels/device.ts';
import type { Recorder } from '../kernels/kernel.ts';
import {
  LOGGED_WORDS,
  LOGPROB_WORDS,
  noteChosen,
  rankTokens,
  readLogprobs,
  writeLoggedRow,
  type TokenLogprobs,
} from '../kernels/logprobs.ts';
import {
  applyRules,
  BANNED,
  EDIT_WORDS,
  IN_PROMPT,
  maskWords,
  NO_MASK,
  RULES_WORDS,
  writeEdit,
  writeRulesRow,
} from '../kernels/rules.ts';
import { allocateTensor, uploadTensor, type Tensor } from '../kernels/tensor.ts';
import type { ModelConfig } from './config.ts';
import type { ModelLimits } from './workspace.ts';

/** Penalties on tokens that were there before; see kernels/rules.ts for what each does to a logit. */
export interface Penalties {
  readonly presence: number;
  readonly frequency: number;
  /** Above 0; 1 does nothing. The only one that looks at the prompt. */
  readonly repetition: number;
  readonly prompt: ArrayLike<number>;
  /** The answer so far, the token that this step runs included. */
  readonly generated: ArrayLike<number>;
}

/**
 * Rules of one row. If they leave no token to choose from, the row's sample has the token null and the other rows are
 * as they would be; the caller ends that sequence.
 */
export interface SampleRules {
  /**
   * The tokens that may be chosen: bit `id % 32` of word `id >> 5`, ceil(V / 32) words (`maskWords` of
   * kernels/rules.ts). Absent: every token. They must stay as they are until the step is
   * done.
   */
  readonly mask?: Uint32Array | undefined;
  /** Token ids, and what is added to the logit of each: lists of equal length. */
  readonly bias?: { readonly ids: readonly number[]; readonly amounts: readonly number[] } | undefined;
  /** Tokens that must not be chosen, at this position. */
  readonly banned?: readonly number[] | undefined;
  readonly penalties?: Penalties | undefined;
}

/** What one sequence asks of its samples. */
export interface Choosing {
  readonly rules?: SampleRules | null | undefined;
  /** How many of the likeliest tokens are told with each sample, beside its own logprob (0 to 20); null: nothing is. */
  readonly logprobs?: number | null | undefined;
}

/** A token that was chosen. */
export interface Sample {
  /** Null: the sequence's rules leave none. */
  readonly token: number | null;
  /** Null unless asked for. */
  readonly logprobs: TokenLogprobs | null;
}

/** Tensors of rules and log probabilities. Row i of each is not of sample i: those that have none take no row. */
export interface ChoiceWorkspace {
  /** u32 [maxSampled, RULES_WORDS]. */
  readonly rules: Tensor;
  /** u32 [maxEdits, EDIT_WORDS]. */
  readonly edits: Tensor;
  /** u32 [maxSampled, maskWords(V)]. */
  readonly masks: Tensor;
  /** u32 [maxSampled, LOGGED_WORDS]. */
  readonly logged: Tensor;
  /** u32 [maxSampled, LOGPROB_WORDS]. */
  readonly logprobs: Tensor;
}

/** What a step's rows have asked for, in the order of the tensors' rows. */
export interface StepChoices {
  readonly ruledCount: number;
  /** By row of `logprobs`: the sample it is of, and how many of the likeliest it has. */
  readonly logged: readonly { readonly sample: number; readonly topCount: number }[];
}

/** A step that asks for nothing. */
export const NO_CHOICES: StepChoices = { ruledCount: 0, logged: [] };

// Edits of one step, where the adapter binds as much: enough for a thousand different tokens of each of 256 sequences.
const EDIT_BYTES = 4 * 1024 * 1024;

/** Edits that one step holds, those of any one sequence at least; a step with more is cut. */
export function maxEditsOf(device: Device, vocabulary: number): number {
  return Math.max(2 * vocabulary, Math.floor(Math.min(EDIT_BYTES, device.bindingBytes) / (4 * EDIT_WORDS)));
}

export function allocateChoiceWorkspace(device: Device, config: ModelConfig, limits: ModelLimits): ChoiceWorkspace {
  const { maxSampled, maxEdits } = limits;
  const allocate = (label: string, shape: readonly number[]): Tensor =>
    allocateTensor(device, { shape, dtype: 'u32', label });
  return {
    rules: allocate('rules', [maxSampled, RULES_WORDS]),
    edits: allocate('edits', [maxEdits, EDIT_WORDS]),
    masks: allocate('masks', [maxSampled, maskWords(config.vocabSize)]),
    logged: allocate('logged', [maxSampled, LOGGED_WORDS]),
    logprobs: allocate('logprobs', [maxSampled, LOGPROB_WORDS]),
  };
}

/** Whether the second of two samples of one step would need to know the first: such a sequence takes no draft. */
export function needsEarlierTokens(rules: SampleRules | null | undefined): boolean {
  return rules?.mask !== undefined || rules?.penalties !== undefined;
}

/** At most how many edits the rules of `sampleCount` samples take; for cutting steps. */
export function editBound(rules: SampleRules | null | undefined, vocabulary: number, sampleCount: number): number {
  if (!rules) return 0;
  const { bias, banned, penalties } = rules;
  const { prompt, generated, repetition } = penalties ?? { prompt: [], generated: [], repetition: 1 };
  const seen = generated.length + (repetition === 1 ? 0 : prompt.length);
  return Math.min(vocabulary, (bias?.ids.length ?? 0) + (banned?.length ?? 0) + seen) * sampleCount;
}

/**
 * Upload what a step's samples ask for.
 *
 * @param step.sequences the step's, in order, with how many samples each has, if any.
 * @throws AssertionError on a mask of another vocabulary, or on a draft for rules that look at earlier tokens.
 */
export function writeChoices(
  device: Device,
  workspace: ChoiceWorkspace,
  step: {
    readonly config: ModelConfig;
    readonly limits: ModelLimits;
    readonly sequences: readonly (Choosing & { readonly sampleCount: number })[];
  },
): StepChoices {
  const { config, limits, sequences } = step;
  if (!sequences.some(({ rules, logprobs }) => rules || (logprobs ?? null) !== null)) return NO_CHOICES;
  const writer = new EditWriter(config.vocabSize);
  const rules = new Uint32Array(limits.maxSampled * RULES_WORDS);
  const logged = new Uint32Array(limits.maxSampled * LOGGED_WORDS);
  const counts = { ruled: 0, masks: 0 };
  const asked: { sample: number; topCount: number }[] = [];
  let sample = 0;
  for (const { rules: own, logprobs, sampleCount } of sequences) {
    assert(sampleCount < 2 || !needsEarlierTokens(own), 'a draft in a sequence whose rules look at earlier tokens');
    for (let each = 0; each < sampleCount; each++, sample++) {
      const firstEdit = writer.count;
      if (own) {
        writer.add(own);
        let mask = NO_MASK;
        if (own.mask !== undefined) {
          const words = maskWords(config.vocabSize);
          assert.equal(own.mask.length, words, `a mask of ${own.mask.length} words, ${words} are needed`);
          mask = counts.masks++;
          uploadTensor(device, workspace.masks, own.mask, mask * words * 4);
        }
        const { presence, frequency, repetition } = own.penalties ?? { presence: 0, frequency: 0, repetition: 1 };
        const editCount = writer.count - firstEdit;
        writeRulesRow(rules, counts.ruled++, { sample, mask, firstEdit, editCount, presence, frequency, repetition });
      }
      if (logprobs === null || logprobs === undefined) continue;
      const editCount = writer.count - firstEdit;
      writeLoggedRow(logged, asked.length, { sample, topCount: logprobs, firstEdit, editCount });
      asked.push({ sample, topCount: logprobs });
    }
  }
  if (counts.ruled > 0) uploadTensor(device, workspace.rules, rules.subarray(0, counts.ruled * RULES_WORDS));
  if (writer.count > 0) uploadTensor(device, workspace.edits, writer.words.subarray(0, writer.count * EDIT_WORDS));
  if (asked.length > 0) uploadTensor(device, workspace.logged, logged.subarray(0, asked.length * LOGGED_WORDS));
  return { ruledCount: counts.ruled, logged: asked };
}

/** Record what comes before `sample`: the likeliest tokens of those who ask, then the rules. */
export function recordRules(
  recorder: Recorder,
  workspace: ChoiceWorkspace & { readonly logits: Tensor },
  choices: StepChoices,
): void {
  const { logits, logged, logprobs, rules, edits, masks } = workspace;
  rankTokens(recorder, { logits, logged, logprobs, loggedCount: choices.logged.length });
  applyRules(recorder, { logits, rules, edits, masks, ruledCount: choices.ruledCount });
}

/** Record what comes behind it: the log probabilities of the tokens that it chose. */
export function recordChosen(
  recorder: Recorder,
  workspace: ChoiceWorkspace & { readonly logits: Tensor; readonly tokens: Tensor },
  choices: StepChoices,
): void {
  const { logits, tokens, logged, logprobs, edits } = workspace;
  noteChosen(recorder, { logits, tokens, logged, logprobs, edits, loggedCount: choices.logged.length });
}

/** The log probabilities of each sample of a step, from the words of the `logprobs` tensor; null where none were asked. */
export function loggedSamples(
  choices: StepChoices,
  words: Uint32Array,
  sampledCount: number,
): (TokenLogprobs | null)[] {
  const samples = Array.from<TokenLogprobs | null>({ length: sampledCount }).fill(null);
  for (const [row, { sample, topCount }] of choices.logged.entries()) {
    samples[sample] = readLogprobs(words, row, topCount);
  }
  return samples;
}

/** Turns rules into edits, one a token: what a token was seen for, its bias, whether it is banned. */
class EditWriter {
  words = new Uint32Array(256 * EDIT_WORDS);
  count = 0;
  // By token id; `seen` and `bias` are cleared again behind each row, so a row costs no more than its own tokens.
  readonly #seen: Uint32Array;
  readonly #bias: Float32Array;
  readonly #isListed: Uint8Array;
  readonly #listed: number[] = [];

  constructor(vocabulary: number) {
    this.#seen = new Uint32Array(vocabulary);
    this.#bias = new Float32Array(vocabulary);
    this.#isListed = new Uint8Array(vocabulary);
  }

  add({ bias, banned, penalties }: SampleRules): void {
    if (penalties) {
      const { prompt, generated, repetition } = penalties;
      if (repetition !== 1) this.#each(prompt, (token) => (this.#seen[token] = IN_PROMPT));
      this.#each(generated, (token) => this.#seen[token]!++);
    }
    if (bias) this.#each(bias.ids, (token, index) => (this.#bias[token]! += bias.amounts[index]!));
    if (banned) this.#each(banned, (token) => (this.#seen[token]! |= BANNED));
    this.#reserve(this.#listed.length);
    for (const token of this.#listed) {
      writeEdit(this.words, this.count++, { token, seen: this.#seen[token]! >>> 0, bias: this.#bias[token]! });
      this.#seen[token] = 0;
      this.#bias[token] = 0;
      this.#isListed[token] = 0;
    }
    this.#listed.length = 0;
  }

  #each(tokens: ArrayLike<number>, act: (token: number, index: number) => void): void {
    for (let index = 0; index < tokens.length; index++) {
      const token = tokens[index]!;
      // An id past the vocabulary can never be chosen, so nothing need be done about it.
      if (token >= this.#seen.length) continue;
      if (this.#isListed[token] === 0) {
        this.#isListed[token] = 1;
        this.#listed.push(token);
      }
      act(token, index);
    }
  }

  #reserve(more: number): void {
    const needed = (this.count + more) * EDIT_WORDS;
    if (needed <= this.words.length) return;
    const words = new Uint32Array(Math.max(needed, 2 * this.words.length));
    words.set(this.words);
    this.words = words;
  }
}
