/** Plain rules and log probabilities in f64, in the order that kernels/rules.ts and kernels/logprobs.ts document. */
import type { TokenLogprobs } from '../../kernels/logprobs.ts';

/** The rules of one row, as a request states them. */
export interface PlainRules {
  readonly presence: number;
  readonly frequency: number;
  readonly repetition: number;
  readonly prompt: readonly number[];
  readonly generated: readonly number[];
  readonly bias: ReadonlyMap<number, number>;
  readonly banned: readonly number[];
  /** Null: every token may be chosen. */
  readonly allowed: ReadonlySet<number> | null;
}

/** Rules that leave everything as it is. */
export const NO_RULES: PlainRules = {
  presence: 0,
  frequency: 0,
  repetition: 1,
  prompt: [],
  generated: [],
  bias: new Map(),
  banned: [],
  allowed: null,
};

/** The logits that tokens are chosen from. */
export function ruledLogits(logits: ArrayLike<number>, rules: PlainRules): number[] {
  const { presence, frequency, repetition, prompt, generated, bias, banned, allowed } = rules;
  return Array.from(logits, (raw, token) => {
    if (banned.includes(token) || (allowed !== null && !allowed.has(token))) return -Infinity;
    const count = generated.filter((each) => each === token).length;
    const isSeen = count > 0 || prompt.includes(token);
    const repeated = !isSeen ? raw : raw > 0 ? raw / repetition : raw * repetition;
    return repeated - frequency * count - (count > 0 ? presence : 0) + (bias.get(token) ?? 0);
  });
}

/** What is told of a choice from these logits: the chosen token's, and the `count` likeliest. */
export function plainLogprobs(logits: ArrayLike<number>, chosen: number, count: number): TokenLogprobs {
  const usable = Array.from(logits, (_, id) => id).filter((id) => Number.isFinite(logits[id]));
  const largest = usable.reduce((most, id) => Math.max(most, logits[id]!), -Infinity);
  const logSum = Math.log(usable.reduce((sum, id) => sum + Math.exp(logits[id]! - largest), 0));
  const logprobOf = (id: number): number => (Number.isFinite(logits[id]) ? logits[id]! - largest - logSum : -9999);
  usable.sort((left, right) => logits[right]! - logits[left]! || left - right);
  return {
    logprob: logprobOf(chosen),
    top: usable.slice(0, count).map((id) => ({ id, logprob: logprobOf(id) })),
  };
}
