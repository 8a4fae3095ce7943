/** POST /v1/chat/completions: the fields of its requests, and its answers as a body and as chunks. Pure. */
import type { Conversation } from '../../model/chat.ts';
import { ApiError } from '../errors.ts';
import {
  conversationOf,
  hasToolCalls,
  messagesField,
  readToolChoice,
  thinkingFields,
  toolChoiceField,
  toolParameters,
  toolsField,
} from './conversation.ts';
import { constrain } from './constraints.ts';
import { DONE, event, logprobsBody, openaiErrorEvents, usageBody } from './dialect.ts';
import type { Dialect, DialectContext, FinishedChoice, GenerationPlan } from './dialect.ts';
import { boolean, integer, list, object, optional, text, unsupported, wrong } from './fields.ts';
import type { JsonObject } from './fields.ts';
import type { AnswerDelta, Finish, LoggedToken } from './generation.ts';
import { maxTopLogprobs, openaiCall, openaiFields } from './sampling.ts';
import type { GenerationCall, ServedModel } from './sampling.ts';

const maxModalities = 8;

/** The body of POST /v1/chat/completions. */
export const chatRequest = object({
  messages: messagesField,
  ...openaiFields,
  ...thinkingFields,
  tools: toolsField,
  tool_choice: toolChoiceField,
  parallel_tool_calls: optional(boolean()),
  max_completion_tokens: optional(integer({ min: 1 })),
  continue_final_message: optional(boolean()),
  add_generation_prompt: optional(boolean()),
  logprobs: optional(boolean()),
  top_logprobs: optional(integer({ min: 0, max: maxTopLogprobs })),
  separate_reasoning: optional(boolean()),
  include_reasoning: optional(boolean()),
  stream_reasoning: optional(boolean()),
  modalities: unsupported({
    field: list(text(), { minItems: 0, maxItems: maxModalities }),
    neutral: (value) => Array.isArray(value) && value.every((entry) => entry === 'text'),
    accepted: '["text"]',
  }),
  functions: unsupported({ neutral: () => false, accepted: 'null, and use tools instead' }),
  function_call: unsupported({ neutral: () => false, accepted: 'null, and use tool_choice instead' }),
});

/**
 * Check a body of POST /v1/chat/completions. Throws `ApiError` naming the first field at fault; an
 * unknown model is a 404.
 */
export function planChat(body: JsonObject, served: ServedModel): GenerationPlan {
  const fields = chatRequest.read(body, '');
  const asked = openaiCall(fields, served);
  const topLogprobs = fields.top_logprobs ?? 0;
  if (topLogprobs > 0 && fields.logprobs !== true) {
    throw wrong('invalid_value', 'top_logprobs', '0 unless logprobs is true', topLogprobs);
  }
  const call: GenerationCall = {
    ...asked,
    sampling: { ...asked.sampling, ...(fields.logprobs === true ? { logprobs: topLogprobs } : {}) },
    maxTokens: fields.max_completion_tokens ?? fields.max_tokens ?? null,
  };
  const toolChoice = readToolChoice(fields.tool_choice, fields.tools);
  const tools = toolChoice === 'none' ? [] : fields.tools;
  const conversation = conversationOf(fields.messages, tools, fields, served);
  const format = fields.response_format;
  if (format?.isShown) conversation.responseSchema = format.schema;
  const { prompt, thinking } = promptOf(conversation, fields);
  const oneCall = fields.parallel_tool_calls === false || typeof toolChoice === 'object';
  const constraint = constrain({
    format,
    choice: toolChoice,
    tools: toolParameters(tools),
    oneCall,
    thinking,
    continues: fields.continue_final_message === true,
    call,
  });
  return {
    call,
    idPrefix: 'chatcmpl-',
    prompts: [prompt],
    promptParam: 'messages',
    fallbackTokens: Infinity,
    clampsTokens: false,
    reading: {
      kind: 'chat',
      thinking,
      reasoning:
        fields.include_reasoning === false ? 'hidden' : fields.separate_reasoning === false ? 'inline' : 'separate',
      readsToolCalls: fields.tools.length > 0 || hasToolCalls(fields.messages),
      maxToolCalls: toolChoice === 'none' ? 0 : oneCall ? 1 : Infinity,
    },
    constraint,
    createDialect: (context) => createChatDialect(context, call),
  };
}

/** The prompt, and whether the answer begins as reasoning: not when it continues text that came after the reasoning. */
function promptOf(
  conversation: Conversation,
  fields: { continue_final_message: boolean | undefined; add_generation_prompt: boolean | undefined },
): { prompt: GenerationPlan['prompts'][number]; thinking: boolean } {
  const { thinking } = conversation;
  const continues = fields.continue_final_message === true;
  if (continues && fields.add_generation_prompt === true) {
    throw new ApiError('invalid_value', 'Only one of continue_final_message and add_generation_prompt can be true.', {
      param: 'continue_final_message',
    });
  }
  if (!continues) {
    if (fields.add_generation_prompt !== false) return { prompt: { kind: 'conversation', conversation }, thinking };
    throw new ApiError('unsupported_value', 'add_generation_prompt must be true unless the final message goes on.', {
      param: 'add_generation_prompt',
    });
  }
  // Whether the final message can be continued is for the template to say.
  const continued = { ...conversation, continueFinalMessage: true };
  return { prompt: { kind: 'conversation', conversation: continued }, thinking: false };
}

/** How /v1/chat/completions words its answers. */
export function createChatDialect(
  context: DialectContext,
  call: Pick<GenerationCall, 'includeUsage' | 'continuousUsage'>,
): Dialect {
  const { head, tokens } = context;
  const base = { id: head.id, object: 'chat.completion.chunk', created: head.created, model: head.model };
  const opened = new Set<number>();
  const usage = () => usageBody(context.usage());
  const logprobs = (logged: readonly LoggedToken[] | undefined) =>
    logged === undefined || logged.length === 0 ? null : logprobsBody(logged, tokens);

  function chunk(index: number, delta: object, more: { logged?: LoggedToken[] | undefined; finish?: Finish } = {}) {
    const { logged, finish } = more;
    const choice = {
      index,
      delta,
      logprobs: logprobs(logged),
      finish_reason: finish?.reason ?? null,
      ...(finish === undefined ? {} : { matched_stop: finish.matchedStop }),
    };
    const running = call.includeUsage ? { usage: call.continuousUsage ? usage() : null } : {};
    return event({ ...base, choices: [choice], ...running });
  }

  function open(index: number): string[] {
    if (opened.has(index)) return [];
    opened.add(index);
    return [chunk(index, { role: 'assistant', content: '' })];
  }

  return {
    delta: (index, delta) => [
      ...open(index),
      chunk(index, chatDelta(delta), { logged: 'logged' in delta ? delta.logged : undefined }),
    ],
    finish: (index, finish) => [...open(index), chunk(index, {}, { finish })],
    end: () => [...(call.includeUsage ? [event({ ...base, choices: [], usage: usage() })] : []), DONE],
    error: openaiErrorEvents,
    body: (choices) => ({
      ...base,
      object: 'chat.completion',
      choices: choices.map(({ answer, finish }, index) => ({
        index,
        message: messageBody(answer),
        logprobs: logprobs(answer.logged),
        finish_reason: finish.reason,
        matched_stop: finish.matchedStop,
      })),
      usage: usage(),
      system_fingerprint: null,
      service_tier: 'default',
    }),
  };
}

function messageBody(answer: FinishedChoice['answer']): object {
  const toolCalls = answer.toolCalls.map((call) => ({
    id: call.id,
    type: 'function',
    function: { name: call.name, arguments: call.arguments },
  }));
  return {
    role: 'assistant',
    content: answer.content === '' && toolCalls.length > 0 ? null : answer.content,
    refusal: null,
    ...(answer.reasoning === '' ? {} : { reasoning_content: answer.reasoning }),
    ...(toolCalls.length === 0 ? {} : { tool_calls: toolCalls }),
  };
}

/** A delta as OpenAI words it; keys without a value are left out. */
function chatDelta(delta: AnswerDelta): object {
  switch (delta.kind) {
    case 'reasoning':
      return { reasoning_content: delta.text };
    case 'content':
      return { content: delta.text };
    case 'tool_call':
      return {
        tool_calls: [
          {
            index: delta.index,
            id: delta.id,
            type: 'function',
            function: { name: delta.name, arguments: '' },
          },
        ],
      };
    case 'tool_arguments':
      return { tool_calls: [{ index: delta.index, function: { arguments: delta.text } }] };
    default:
      return delta satisfies never;
  }
}
