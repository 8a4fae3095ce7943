/**
 * POST /v1/messages and /v1/messages/count_tokens: Anthropic's API. Its requests become the same conversation that a chat
 * request becomes, its answers are worded as blocks. Pure.
 */
import type { ChatMessage, ChatToolCall, Conversation, ToolDefinition } from '../../model/chat.ts';
import { ApiError } from '../errors.ts';
import { conversationOf, efforts, hasToolCalls, readTextPart, toolName } from './conversation.ts';
import { constrain, outputFormatField, type ToolChoice } from './constraints.ts';
import { event } from './dialect.ts';
import type { Dialect, DialectContext, GenerationPlan } from './dialect.ts';
import {
  anyObject,
  boolean,
  choice,
  finite,
  ignored,
  integer,
  isObject,
  list,
  missing,
  object,
  optional,
  pathOf,
  text,
  wellFormed,
  wrong,
} from './fields.ts';
import type { Field, JsonObject } from './fields.ts';
import type { AnswerDelta, Finish } from './generation.ts';
import { saltFields, saltOf, samplingCall, servedModelName, stopTexts } from './sampling.ts';
import type { GenerationCall, ServedModel } from './sampling.ts';

const maxMessageCount = 100_000;
const maxToolCount = 1024;

/** Text as a string or as blocks of text; blocks are joined by newlines. */
const textBlocks: Field<string> = {
  expected: 'a string or an array of text blocks',
  schema: {
    anyOf: [
      { type: 'string' },
      { type: 'array', items: { type: 'object', properties: { type: { const: 'text' }, text: { type: 'string' } } } },
    ],
  },
  read(value, path) {
    if (typeof value === 'string') return wellFormed(value);
    if (!Array.isArray(value)) throw wrong('invalid_type', path, this.expected, value);
    return value.map((block: unknown, index) => readTextPart(block, `${path}[${index}]`)).join('\n');
  },
};

const toolFields = object({
  type: optional(text()),
  name: toolName,
  description: optional(text()),
  input_schema: anyObject(),
});

/** The tools of a request, in the shape that the chat template shows. */
const tools: Field<ToolDefinition[]> = {
  expected: `an array of up to ${maxToolCount} tools`,
  schema: { type: 'array', items: toolFields.schema, maxItems: maxToolCount },
  read(value, path) {
    const entries = list(anyObject(), { minItems: 0, maxItems: maxToolCount }).read(value, path);
    const names = new Set<string>();
    return entries.map((entry, index) => {
      const at = `${path}[${index}]`;
      const kind = entry['type'] ?? 'custom';
      if (kind !== 'custom') {
        throw new ApiError('unsupported_value', `${at}.type must be "custom": this server runs no tools of its own.`, {
          param: `${at}.type`,
        });
      }
      const { name, description, input_schema: parameters } = toolFields.read(entry, at);
      if (names.has(name)) throw wrong('invalid_value', `${at}.name`, 'unlike all others', name);
      names.add(name);
      return {
        type: 'function',
        function: { name, ...(description === undefined ? {} : { description }), parameters },
      };
    });
  },
};

const conversationFields = {
  model: optional(text()),
  messages: {
    expected: `an array of 1 to ${maxMessageCount} messages`,
    schema: {
      type: 'array',
      minItems: 1,
      maxItems: maxMessageCount,
      items: {
        type: 'object',
        properties: { role: { enum: ['user', 'assistant', 'system'] }, content: {} },
        required: ['role', 'content'],
      },
    },
    read(value, path) {
      if (!Array.isArray(value)) throw wrong('invalid_type', path, this.expected, value);
      if (value.length === 0 || value.length > maxMessageCount) {
        throw wrong('invalid_value', path, this.expected, value);
      }
      return value.flatMap((entry: unknown, index) => readMessage(entry, `${path}[${index}]`));
    },
  } satisfies Field<ChatMessage[]>,
  system: optional(textBlocks),
  tools: optional(tools),
  tool_choice: optional(
    object({
      type: choice(['auto', 'any', 'tool', 'none']),
      name: optional(text()),
      disable_parallel_tool_use: optional(boolean()),
    }),
  ),
  thinking: optional(
    object({ type: choice(['enabled', 'disabled', 'adaptive']), budget_tokens: optional(integer({ min: 1 })) }),
  ),
  output_config: optional(
    object({
      effort: optional(choice(efforts)),
      format: outputFormatField,
    }),
  ),
};

/** The body of POST /v1/messages/count_tokens. */
export const countTokensRequest = object(conversationFields);

/** The body of POST /v1/messages. */
export const messagesRequest = object({
  ...conversationFields,
  max_tokens: integer({ min: 1 }),
  stream: optional(boolean()),
  stop_sequences: optional(stopTexts),
  temperature: optional(finite({ min: 0, max: 2 })),
  top_p: optional(finite({ min: 0, max: 1 })),
  top_k: optional(integer({ min: -1 })),
  metadata: ignored('Not kept.', anyObject()),
  ...saltFields,
});

type ConversationValues = ReturnType<(typeof countTokensRequest)['read']>;

/** Check a body of POST /v1/messages. Throws `ApiError` naming the first field at fault. */
export function planMessages(body: JsonObject, served: ServedModel): GenerationPlan {
  const fields = messagesRequest.read(body, '');
  const conversation = messagesConversation(fields, served);
  const hasTools = (fields.tools ?? []).length > 0;
  const choice = readToolChoice(fields);
  const call: GenerationCall = {
    model: servedModelName(fields.model, served),
    stream: fields.stream ?? false,
    includeUsage: true,
    continuousUsage: false,
    ...samplingCall(
      {
        temperature: fields.temperature,
        top_p: fields.top_p,
        top_k: fields.top_k,
        stop: fields.stop_sequences,
      },
      served,
    ),
    seed: null,
    maxTokens: fields.max_tokens,
    requestId: null,
    salt: saltOf(fields),
  };
  const oneCall = fields.tool_choice?.disable_parallel_tool_use === true || typeof choice === 'object';
  const constraint = constrain({
    format: fields.output_config?.format,
    choice,
    tools: (fields.tools ?? []).map(({ function: { name, parameters } }, index) => ({
      tool: { name, parameters },
      path: `tools[${index}].input_schema`,
    })),
    oneCall,
    thinking: conversation.thinking,
    continues: false,
    call,
  });
  return {
    call,
    idPrefix: 'msg_',
    prompts: [{ kind: 'conversation', conversation }],
    promptParam: 'messages',
    fallbackTokens: Infinity,
    clampsTokens: true,
    reading: {
      kind: 'chat',
      thinking: conversation.thinking,
      reasoning: 'separate',
      readsToolCalls: hasTools || hasToolCalls(conversation.messages),
      maxToolCalls: choice === 'none' || !hasTools ? 0 : oneCall ? 1 : Infinity,
    },
    constraint,
    createDialect: createMessagesDialect,
  };
}

/** Check a body of POST /v1/messages/count_tokens; returns what /v1/messages would prefill. */
export function parseCountTokens(body: JsonObject, served: ServedModel): Conversation {
  const fields = countTokensRequest.read(body, '');
  servedModelName(fields.model, served);
  return messagesConversation(fields, served);
}

function messagesConversation(fields: ConversationValues, served: ServedModel): Conversation {
  const system: ChatMessage[] = fields.system === undefined ? [] : [{ role: 'system', content: fields.system }];
  const conversation = conversationOf(
    [...system, ...fields.messages],
    readToolChoice(fields) === 'none' ? [] : (fields.tools ?? []),
    {
      thinking:
        fields.thinking === undefined
          ? undefined
          : { type: fields.thinking.type === 'disabled' ? 'disabled' : 'enabled' },
      reasoning: undefined,
      reasoning_effort: fields.output_config?.effort,
      chat_template_kwargs: undefined,
    },
    served,
  );
  const format = fields.output_config?.format;
  if (format !== undefined) conversation.responseSchema = format.schema;
  return conversation;
}

function readToolChoice({ tools: given = [], tool_choice: chosen }: ConversationValues): ToolChoice {
  if (chosen === undefined) return given.length > 0 ? 'auto' : 'none';
  switch (chosen.type) {
    case 'auto':
    case 'none':
      return chosen.type;
    case 'any':
      if (given.length === 0) throw wrong('invalid_value', 'tool_choice.type', '"auto" or "none" without tools', 'any');
      return 'required';
    case 'tool':
      if (!given.some((tool) => tool.function.name === chosen.name)) {
        throw wrong('invalid_value', 'tool_choice.name', 'the name of one of the tools', chosen.name);
      }
      return { name: chosen.name! };
    default:
      return chosen.type satisfies never;
  }
}

// ---------------------------------------------------------------------------------------------------------
// Messages

const messageFields = object({ role: choice(['user', 'assistant', 'system']) });

/** One message of the API is one or more of the template: each tool result is one of its own. */
function readMessage(value: unknown, path: string): ChatMessage[] {
  const { role } = messageFields.read(value, path);
  const content = (value as JsonObject)['content'] ?? undefined;
  const at = pathOf(path, 'content');
  if (content === undefined) throw missing(at, 'a string or an array of blocks');
  if (typeof content === 'string') return [{ role, content: wellFormed(content) }];
  if (!Array.isArray(content)) throw wrong('invalid_type', at, 'a string or an array of blocks', content);
  const blocks = content.map((block: unknown, index) => {
    const blockPath = `${at}[${index}]`;
    if (!isObject(block)) throw wrong('invalid_type', blockPath, 'an object with a type', block);
    const kind = block['type'];
    if (typeof kind !== 'string') throw wrong('invalid_type', `${blockPath}.type`, 'the name of a block type', kind);
    return { block, kind, at: blockPath };
  });
  return role === 'assistant' ? [readAssistant(blocks)] : readUser(blocks, role);
}

interface Block {
  block: JsonObject;
  kind: string;
  at: string;
}

function readAssistant(blocks: readonly Block[]): ChatMessage {
  const texts: string[] = [];
  const thoughts: string[] = [];
  const calls: ChatToolCall[] = [];
  for (const { block, kind, at } of blocks) {
    switch (kind) {
      case 'text':
        texts.push(readTextPart(block, at));
        break;
      case 'thinking':
        thoughts.push(text().read(block['thinking'] ?? '', `${at}.thinking`));
        break;
      case 'redacted_thinking':
        break;
      case 'tool_use': {
        const call = object({ id: text(), name: text({ minLength: 1 }), input: optional(anyObject()) }).read(block, at);
        calls.push({ id: call.id, type: 'function', function: { name: call.name, arguments: call.input ?? {} } });
        break;
      }
      default:
        throw refusedBlock(kind, at);
    }
  }
  return {
    role: 'assistant',
    content: texts.join('\n'),
    ...(thoughts.length === 0 ? {} : { reasoning_content: thoughts.join('\n') }),
    ...(calls.length === 0 ? {} : { tool_calls: calls }),
  };
}

function readUser(blocks: readonly Block[], role: 'user' | 'system'): ChatMessage[] {
  const messages: ChatMessage[] = [];
  let texts: string[] = [];
  const endText = () => {
    if (texts.length > 0) messages.push({ role, content: texts.join('\n') });
    texts = [];
  };
  for (const { block, kind, at } of blocks) {
    if (kind === 'text') {
      texts.push(readTextPart(block, at));
      continue;
    }
    if (kind !== 'tool_result' || role === 'system') throw refusedBlock(kind, at);
    endText();
    const result = object({ tool_use_id: text(), content: optional(textBlocks), is_error: optional(boolean()) });
    const { tool_use_id: id, content, is_error: isError } = result.read(block, at);
    const shown = content ?? '';
    messages.push({ role: 'tool', tool_call_id: id, content: isError === true ? `Error: ${shown}` : shown });
  }
  endText();
  return messages.length === 0 ? [{ role, content: '' }] : messages;
}

function refusedBlock(kind: string, at: string): ApiError {
  const shown = JSON.stringify(kind.slice(0, 64));
  return new ApiError('unsupported_value', `${at}.type ${shown} cannot be read here: this model reads text only.`, {
    param: `${at}.type`,
  });
}

// ---------------------------------------------------------------------------------------------------------
// Answers

/** An error as Anthropic words it. `requestId`: the one in the response's headers. */
export function anthropicErrorBody(error: ApiError, requestId: string | null = null): object {
  return {
    type: 'error',
    error: { type: anthropicErrorType(error), message: error.message },
    ...(requestId === null ? {} : { request_id: requestId }),
  };
}

function anthropicErrorType({ status }: ApiError): string {
  switch (status) {
    case 401:
      return 'authentication_error';
    case 403:
      return 'permission_error';
    case 404:
      return 'not_found_error';
    case 413:
      return 'request_too_large';
    case 429:
      return 'rate_limit_error';
    case 503:
      return 'overloaded_error';
    default:
      return status < 500 ? 'invalid_request_error' : 'api_error';
  }
}

/** Thoughts are not signed here; clients send the signature back, and it is not looked at. */
const signature = 'unsigned';

/** A content block under way. */
interface OpenBlock {
  kind: 'thinking' | 'text' | 'tool_use';
  index: number;
  /** What it held when it was opened, and what has come since. */
  opening: object;
  text: string;
}

/** How /v1/messages words its answers. */
export function createMessagesDialect(context: DialectContext): Dialect {
  const { head } = context;
  let isStarted = false;
  let blockCount = 0;
  let open: OpenBlock | null = null;
  /** The blocks that are complete. */
  const content: object[] = [];

  const named = (data: { type: string }) => event(data, data.type);
  const usage = () => {
    const { promptTokens, cachedTokens, completionTokens } = context.usage();
    return {
      input_tokens: promptTokens - cachedTokens,
      cache_creation_input_tokens: 0,
      cache_read_input_tokens: cachedTokens,
      output_tokens: completionTokens,
    };
  };
  const message = (blocks: object[]) => ({
    id: head.id,
    type: 'message',
    role: 'assistant',
    model: head.model,
    content: blocks,
    stop_reason: null as string | null,
    stop_sequence: null as string | null,
    usage: usage(),
  });

  function start(): string[] {
    if (isStarted) return [];
    isStarted = true;
    const opening = message([]);
    opening.usage.output_tokens = 0;
    return [named({ type: 'message_start', ...{ message: opening } })];
  }

  function closeBlock(): string[] {
    if (open === null) return [];
    const { kind, index } = open;
    content.push(completed(open));
    open = null;
    const events: string[] = [];
    if (kind === 'thinking') events.push(blockDelta(index, { type: 'signature_delta', signature }));
    events.push(named({ type: 'content_block_stop', ...{ index } }));
    return events;
  }

  function openBlock(kind: OpenBlock['kind'], opening: object): string[] {
    const events = closeBlock();
    open = { kind, index: blockCount, opening, text: '' };
    blockCount += 1;
    events.push(named({ type: 'content_block_start', ...{ index: open.index, content_block: opening } }));
    return events;
  }

  /** Close the last block; an answer without any has one that is empty. */
  function endBlocks(): string[] {
    const events = blockCount === 0 ? openBlock('text', { type: 'text', text: '' }) : [];
    events.push(...closeBlock());
    return events;
  }

  const blockDelta = (index: number, delta: object) => named({ type: 'content_block_delta', ...{ index, delta } });

  /** More of a block of that kind, which is opened unless it is the one under way. */
  function extend(kind: 'thinking' | 'text', opening: object, more: string): string[] {
    const events = open?.kind === kind ? [] : openBlock(kind, opening);
    open!.text += more;
    const key = kind === 'thinking' ? 'thinking' : 'text';
    events.push(blockDelta(open!.index, { type: `${kind}_delta`, [key]: more }));
    return events;
  }

  function deltaEvents(delta: AnswerDelta): string[] {
    switch (delta.kind) {
      case 'reasoning':
        return extend('thinking', { type: 'thinking', thinking: '', signature: '' }, delta.text);
      case 'content':
        return extend('text', { type: 'text', text: '' }, delta.text);
      case 'tool_call':
        return openBlock('tool_use', { type: 'tool_use', id: delta.id, name: delta.name, input: {} });
      case 'tool_arguments':
        open!.text += delta.text;
        return [blockDelta(open!.index, { type: 'input_json_delta', partial_json: delta.text })];
      default:
        return delta satisfies never;
    }
  }

  return {
    delta: (_, delta) => [...start(), ...deltaEvents(delta)],
    finish(_, finish) {
      const events = start();
      events.push(...endBlocks());
      const { stop_reason: reason, stop_sequence: sequence } = stopOf(finish);
      const delta = { stop_reason: reason, stop_sequence: sequence };
      events.push(named({ type: 'message_delta', ...{ delta, usage: usage() } }));
      return events;
    },
    end: () => [named({ type: 'message_stop' })],
    error: (error) => [event(anthropicErrorBody(error), 'error')],
    body([choice]) {
      if (choice === undefined) throw new Error('an answer has one choice');
      for (const delta of choice.deltas) deltaEvents(delta);
      endBlocks();
      return { ...message(content), ...stopOf(choice.finish) };
    },
  };
}

/** A block as a whole answer has it. */
function completed({ kind, opening, text: content }: OpenBlock): object {
  switch (kind) {
    case 'thinking':
      return { ...opening, thinking: content, signature };
    case 'text':
      return { ...opening, text: content };
    case 'tool_use':
      return { ...opening, input: inputOf(content) };
    default:
      return kind satisfies never;
  }
}

function stopOf({ reason, matchedStop }: Finish): { stop_reason: string; stop_sequence: string | null } {
  if (typeof matchedStop === 'string') return { stop_reason: 'stop_sequence', stop_sequence: matchedStop };
  const reasons = { stop: 'end_turn', length: 'max_tokens', tool_calls: 'tool_use' } as const;
  return { stop_reason: reasons[reason], stop_sequence: null };
}

/** The arguments of a call as an object; those of a call that was cut off may not be one. */
function inputOf(text: string): object {
  try {
    const value = JSON.parse(text) as unknown;
    return isObject(value) ? value : {};
  } catch {
    return {};
  }
}
