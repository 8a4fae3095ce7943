/** POST /generate: SGLang's native API, as far as its own benchmark and simple clients use it. Pure. */
import { ApiError } from '../errors.ts';
import { DONE, event, finiteLogprob, openaiErrorEvents } from './dialect.ts';
import type { Dialect, DialectContext, GenerationPlan } from './dialect.ts';
import { boolean, integer, list, missing, object, optional, text, unsupported } from './fields.ts';
import type { JsonObject } from './fields.ts';
import { appendDelta, sumDeltas } from './generation.ts';
import type { Answer, AnswerDelta, Finish, LoggedToken } from './generation.ts';
import {
  clientRequestId,
  constraintFields,
  maxTopLogprobs,
  readTokenIds,
  saltFields,
  saltOf,
  samplingCall,
  samplingFields,
} from './sampling.ts';
import type { GenerationCall, ServedModel } from './sampling.ts';

/** Tokens of an answer when none are asked for, as SGLang has it. */
const defaultNewTokens = 128;
const maxPromptTokens = 1 << 24;

const isFalse = (value: unknown): boolean => value === false;

/** The body of POST /generate. */
export const generateRequest = object({
  text: optional(text({ minLength: 1 })),
  input_ids: optional(list(integer({ min: 0 }), { minItems: 1, maxItems: maxPromptTokens })),
  sampling_params: optional(
    object({
      ...samplingFields,
      ...constraintFields,
      max_new_tokens: optional(integer({ min: 1 })),
      min_new_tokens: optional(integer({ min: 0 })),
    }),
  ),
  stream: optional(boolean()),
  rid: optional(clientRequestId),
  ...saltFields,
  return_logprob: optional(boolean()),
  top_logprobs_num: optional(integer({ min: 0, max: maxTopLogprobs })),
  return_text_in_logprobs: optional(boolean()),
  return_hidden_states: unsupported({ field: boolean(), neutral: isFalse, accepted: 'false' }),
  return_routed_experts: unsupported({ field: boolean(), neutral: isFalse, accepted: 'false' }),
  logprob_start_len: optional(integer({ min: -1 })),
  lora_path: unsupported({ neutral: () => false, accepted: 'null' }),
});

/** Check a body of POST /generate: one prompt, as `text` or as `input_ids`. Throws `ApiError` naming the field at fault. */
export function planGenerate(body: JsonObject, served: ServedModel): GenerationPlan {
  const fields = generateRequest.read(body, '');
  const ids = fields.input_ids;
  if (fields.text === undefined && ids === undefined) throw missing('text', 'a string, or input_ids in its place');
  if (fields.text !== undefined && ids !== undefined) {
    throw new ApiError('invalid_value', 'Send either text or input_ids, not both.', { param: 'input_ids' });
  }
  const isLogged = fields.return_logprob === true;
  const promptStart = isLogged ? (fields.logprob_start_len ?? -1) : -1;
  const given = fields.sampling_params;
  const sampling = given ?? object(samplingFields).read({}, '');
  // SGLang's own name for it first.
  const minTokens = given?.min_new_tokens ?? sampling.min_tokens;
  const asked = samplingCall({ ...sampling, min_tokens: minTokens }, served, 'sampling_params');
  const call: GenerationCall = {
    model: served.modelId,
    stream: fields.stream ?? false,
    includeUsage: false,
    continuousUsage: false,
    ...asked,
    sampling: {
      ...asked.sampling,
      ...(isLogged ? { logprobs: fields.top_logprobs_num ?? 0 } : {}),
      ...(promptStart >= 0 ? { promptLogprobs: true } : {}),
    },
    seed: null,
    maxTokens: given?.max_new_tokens ?? null,
    requestId: fields.rid ?? null,
    salt: saltOf(fields),
  };
  return {
    call,
    idPrefix: 'gen-',
    prompts: [
      ids === undefined
        ? { kind: 'text', text: fields.text ?? '' }
        : { kind: 'ids', ids: readTokenIds(ids, 'input_ids', served) },
    ],
    promptParam: ids === undefined ? 'text' : 'input_ids',
    fallbackTokens: defaultNewTokens,
    clampsTokens: false,
    reading: { kind: 'text' },
    createDialect: (context) =>
      createGenerateDialect(context, call, { promptStart, namesTokens: fields.return_text_in_logprobs ?? false }),
  };
}

/**
 * How /generate words its answers: every event has all of the text so far. Log probabilities of the prompt begin with
 * token `promptStart`, -1: none; of that first one nothing is told, as SGLang has it.
 */
export function createGenerateDialect(
  context: DialectContext,
  call: GenerationCall,
  { promptStart, namesTokens }: { promptStart: number; namesTokens: boolean },
): Dialect {
  const parts = Array.from({ length: call.choiceCount }, (): AnswerDelta[] => []);

  /** Log probabilities as SGLang words them: value, id, and the text where it is asked for. */
  function logprobs(choice: number, logged: readonly LoggedToken[], isWhole: boolean): object {
    if (call.sampling.logprobs === undefined) return {};
    const nameOf = (id: number) => (namesTokens ? context.tokens.text(id) : null);
    const entry = ({ id, logprob }: { id: number; logprob: number }) => [finiteLogprob(logprob), id, nameOf(id)];
    // Once, with the end: all of a long prompt with every event would be megabytes each.
    const isTold = promptStart >= 0 && isWhole;
    const first = isTold ? context.promptIds(choice).slice(promptStart, promptStart + 1) : [];
    const prompt = isTold ? context.promptChoices(choice).slice(promptStart) : [];
    const tops = {
      input_top_logprobs: [...first.map(() => null), ...prompt.map(({ top }) => top.map(entry))],
      output_top_logprobs: logged.map(({ top }) => top.map(entry)),
    };
    return {
      input_token_logprobs: [...first.map((id) => [null, id, nameOf(id)]), ...prompt.map(entry)],
      output_token_logprobs: logged.map(entry),
      ...(call.sampling.logprobs === 0 ? {} : tops),
    };
  }

  function state(choice: number, { content, logged }: Answer, finish: Finish | null): object {
    const { promptTokens, cachedTokens } = context.usage();
    const completionTokens = context.completionTokens(choice);
    const matched = finish === null || finish.matchedStop === null ? {} : { matched: finish.matchedStop };
    return {
      ...(call.choiceCount > 1 ? { index: choice } : {}),
      text: content,
      meta_info: {
        id: call.requestId ?? context.head.id,
        prompt_tokens: promptTokens,
        completion_tokens: completionTokens,
        cached_tokens: cachedTokens,
        ...logprobs(choice, logged, finish !== null),
        finish_reason:
          finish === null
            ? null
            : finish.reason === 'length'
              ? { type: 'length', length: completionTokens }
              : { type: 'stop', ...matched },
      },
    };
  }

  const answerOf = (choice: number) => sumDeltas(parts[choice] ?? []);
  return {
    delta(choice, delta) {
      appendDelta(parts[choice]!, delta);
      return [event(state(choice, answerOf(choice), null))];
    },
    finish: (choice, finish) => [event(state(choice, answerOf(choice), finish))],
    end: () => [DONE],
    error: openaiErrorEvents,
    body(choices) {
      const bodies = choices.map(({ answer, finish }, index) => state(index, answer, finish));
      return call.choiceCount > 1 ? bodies : bodies[0]!;
    },
  };
}
