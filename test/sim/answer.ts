/**
 * The right answer to a request, from the request alone: what the clients of a run compare theirs with. It knows no rows,
 * no steps and no steering; what those forget, count twice or mix up makes another answer.
 */

import { packChoices, type PackedChoices } from '../../transfer/messages.ts';
import type { SamplingParams, SamplingRules, TokenChoice } from '../../transfer/messages.ts';
import {
  constraintMask,
  constraintNext,
  constraintStart,
  ghostChoice,
  ghostLogit,
  ghostPromptChoice,
  VOCABULARY,
} from './ghost.ts';

/** What an answer follows from. */
export interface Question {
  promptTokens: readonly number[];
  sampling: SamplingParams;
  maxTokens: number;
  stopTokens: readonly number[];
}

export interface Answer {
  tokens: number[];
  /** One for each token; null if nobody asked. */
  choices: TokenChoice[] | null;
  /** Of the prompt's tokens but the first; null if nobody asked. */
  promptChoices: PackedChoices | null;
  /** Behind these tokens the request's own rules leave none. */
  isStuck: boolean;
  /** Rules without which one of the tokens would be another one. */
  causes: Set<string>;
}

/** A position of an answer: the tokens before it, and those that its constraint allows, a bit each. */
interface Place {
  tokens: readonly number[];
  allowed: number;
}

/** Every token. */
const ALL = -1;

/** Each rule switched off. */
const WITHOUT: Record<string, Partial<SamplingRules>> = {
  presence: { presencePenalty: 0 },
  frequency: { frequencyPenalty: 0 },
  repetition: { repetitionPenalty: 1 },
  bias: { biasIds: [], biases: [] },
  minimum: { minTokens: 0 },
};

/** The whole answer. `seed` stands for the prompt and the generator's seed (`answerSeed` of test/sim/ghost.ts). */
export function answerTo(question: Question, seed: number): Answer {
  const { maxTokens, stopTokens } = question;
  const { rules, constraint, logprobs } = question.sampling;
  const answer: Answer = {
    tokens: [],
    choices: logprobs === undefined ? null : [],
    promptChoices: promptChoicesTo(question, seed),
    isStuck: false,
    causes: new Set(),
  };
  const { tokens, causes } = answer;
  let state = constraint === undefined ? null : constraintStart(constraint);
  while (tokens.length < maxTokens && !stopTokens.includes(tokens.at(-1) ?? -1)) {
    const place = { tokens, allowed: state === null ? ALL : constraintMask(state) };
    const token = tokenAt(question, seed, place, rules);
    if (rules !== undefined) {
      for (const [name, changes] of Object.entries(WITHOUT)) {
        if (tokenAt(question, seed, place, { ...rules, ...changes }) !== token) causes.add(name);
      }
    }
    if (state !== null && tokenAt(question, seed, { tokens, allowed: ALL }, rules) !== token) causes.add('constraint');
    if (token === null) {
      answer.isStuck = true;
      break;
    }
    answer.choices?.push(ghostChoice(seed, tokens.length, token, logprobs as number));
    tokens.push(token);
    if (state !== null) state = constraintNext(state, token);
  }
  return answer;
}

function promptChoicesTo({ promptTokens, sampling }: Question, seed: number): PackedChoices | null {
  const { logprobs = 0, promptLogprobs = false } = sampling;
  if (!promptLogprobs) return null;
  const behind = promptTokens.slice(1);
  return packChoices(
    behind.map((token, index) => ghostPromptChoice(seed, index + 1, token, logprobs)),
    logprobs,
  );
}

/** The token with the largest logit, the first of several; null if none is left. */
function tokenAt(
  { promptTokens, stopTokens }: Question,
  seed: number,
  { tokens, allowed }: Place,
  rules: SamplingRules | undefined,
): number | null {
  const index = tokens.length;
  let best: number | null = null;
  let most = -Infinity;
  for (let token = 0; token < VOCABULARY; token++) {
    if (((allowed >>> token) & 1) === 0) continue;
    let logit = ghostLogit(seed, index, token);
    if (rules !== undefined) {
      if (index < rules.minTokens && stopTokens.includes(token)) continue;
      const count = tokens.filter((earlier) => earlier === token).length;
      if (count > 0 || promptTokens.includes(token)) {
        logit *= logit > 0 ? 1 / rules.repetitionPenalty : rules.repetitionPenalty;
      }
      if (count > 0) logit -= rules.presencePenalty + rules.frequencyPenalty * count;
      logit += rules.biases[rules.biasIds.indexOf(token)] ?? 0;
    }
    if (logit <= most) continue;
    best = token;
    most = logit;
  }
  return best;
}
