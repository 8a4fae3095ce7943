/** What a request's rules are at one position of its answer: what a batch says of the token that it samples. Pure. */
import type { SamplingRules } from '../transfer/messages.ts';
import type { Request, RowRules } from './types.ts';

/**
 * Rules for the token behind these answer tokens; null if there are none. They are made anew from the sequence's tokens
 * in each step, so an interrupted sequence goes on as if nothing had been.
 */
export function rowRules(request: Request, answerTokens: readonly number[]): RowRules | null {
  const { rules } = request.sampling;
  if (rules === undefined) return null;
  const banned = banEnds(rules, answerTokens.length) ? request.stopTokens : [];
  const penalised = hasPenalties(rules);
  if (banned.length === 0 && rules.biasIds.length === 0 && !penalised) return null;
  const { repetitionPenalty } = rules;
  return {
    biasIds: rules.biasIds,
    biases: rules.biases,
    banned,
    penalties: penalised
      ? {
          presence: rules.presencePenalty,
          frequency: rules.frequencyPenalty,
          repetition: repetitionPenalty,
          prompt: repetitionPenalty === 1 ? new Uint32Array(0) : request.promptTokens,
          generated: answerTokens.slice(),
        }
      : null,
  };
}

/**
 * True if the rules of the next two tokens do not depend on what the first of them will be, and are the same: such a row
 * may have a draft.
 */
export function allowsDraft({ sampling }: Request, answerTokenCount: number): boolean {
  const { rules, constraint } = sampling;
  if (constraint !== undefined) return false;
  if (rules === undefined) return true;
  return !hasPenalties(rules) && banEnds(rules, answerTokenCount) === banEnds(rules, answerTokenCount + 1);
}

function hasPenalties({ presencePenalty, frequencyPenalty, repetitionPenalty }: SamplingRules): boolean {
  return presencePenalty !== 0 || frequencyPenalty !== 0 || repetitionPenalty !== 1;
}

function banEnds(rules: SamplingRules, answerTokenCount: number): boolean {
  return answerTokenCount < rules.minTokens;
}
