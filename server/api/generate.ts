/** POST /generate: SGLang's native API, as far as its own benchmark and simple clients use it. Pure. */
import { ApiError } from '../errors.ts';
import { DONE, event, openaiErrorEvents } from './dialect.ts';
import type { Dialect, DialectContext, GenerationPlan } from './dialect.ts';
import { boolean, ignored, integer, list, missing, object, optional, text, unsupported } from './fields.ts';
import type { JsonObject } from './fields.ts';
import { appendDelta, sumDeltas } from './generation.ts';
import type { AnswerDelta, Finish } from './generation.ts';
import { clientRequestId, constraintFields, readTokenIds, samplingCall, samplingFields } from './sampling.ts';
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
    object({ ...samplingFields, ...constraintFields, max_new_tokens: optional(integer({ min: 1 })) }),
  ),
  stream: optional(boolean()),
  rid: optional(clientRequestId),
  return_logprob: unsupported({ field: boolean(), neutral: isFalse, accepted: 'false' }),
  return_hidden_states: unsupported({ field: boolean(), neutral: isFalse, accepted: 'false' }),
  return_routed_experts: unsupported({ field: boolean(), neutral: isFalse, accepted: 'false' }),
  logprob_start_len: ignored('Without effect while return_logprob is false.', integer({ min: -1 })),
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
  const sampling = fields.sampling_params ?? object(samplingFields).read({}, '');
  const call: GenerationCall = {
    model: served.modelId,
    stream: fields.stream ?? false,
    includeUsage: false,
    continuousUsage: false,
    ...samplingCall(sampling, served, 'sampling_params'),
    seed: null,
    maxTokens: fields.sampling_params?.max_new_tokens ?? null,
    requestId: fields.rid ?? null,
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
    createDialect: (context) => createGenerateDialect(context, call),
  };
}

/** How /generate words its answers: every event has all of the text so far. */
export function createGenerateDialect(context: DialectContext, call: GenerationCall): Dialect {
  const parts = Array.from({ length: call.choiceCount }, (): AnswerDelta[] => []);

  function state(choice: number, content: string, finish: Finish | null): object {
    const { promptTokens, cachedTokens, completionTokens } = context.usage();
    const matched = finish === null || finish.matchedStop === null ? {} : { matched: finish.matchedStop };
    return {
      ...(call.choiceCount > 1 ? { index: choice } : {}),
      text: content,
      meta_info: {
        id: call.requestId ?? context.head.id,
        prompt_tokens: promptTokens,
        completion_tokens: completionTokens,
        cached_tokens: cachedTokens,
        finish_reason:
          finish === null
            ? null
            : finish.reason === 'length'
              ? { type: 'length', length: completionTokens }
              : { type: 'stop', ...matched },
      },
    };
  }

  const textOf = (choice: number) => sumDeltas(parts[choice] ?? []).content;
  return {
    delta(choice, delta) {
      appendDelta(parts[choice]!, delta);
      return [event(state(choice, textOf(choice), null))];
    },
    finish: (choice, finish) => [event(state(choice, textOf(choice), finish))],
    end: () => [DONE],
    error: openaiErrorEvents,
    body(choices) {
      const bodies = choices.map(({ answer, finish }, index) => state(index, answer.content, finish));
      return call.choiceCount > 1 ? bodies : bodies[0]!;
    },
  };
}
