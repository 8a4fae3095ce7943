/**
 * Messages, tools and the many ways to ask for reasoning, as OpenAI-shaped requests have them, checked and turned into
 * the conversation that the chat template renders. Pure.
 */
import type { ChatContent, ChatMessage, ChatToolCall, Conversation, ToolDefinition } from '../../model/chat.ts';
import { ApiError } from '../errors.ts';
import {
  anyObject,
  boolean,
  choice,
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
import type { ConstrainedTool } from '../grammar/constraint.ts';
import type { ToolChoice } from './constraints.ts';
import type { Field, FieldValue, JsonObject, JsonSchema } from './fields.ts';
import type { ServedModel } from './sampling.ts';

const maxMessageCount = 100_000;
const maxToolCount = 1024;

/** Efforts that requests may name. */
export const efforts = ['none', 'minimal', 'low', 'medium', 'high', 'xhigh', 'max'] as const;

const chatTemplateKwargs = object({
  thinking: optional(boolean()),
  enable_thinking: optional(boolean()),
  reasoning_effort: optional(choice(efforts)),
  drop_thinking: optional(boolean()),
});

/** Fields that decide how a conversation becomes a prompt, but for the messages themselves. */
export const thinkingFields = {
  thinking: optional(object({ type: choice(['enabled', 'disabled']) })),
  reasoning: optional(object({ enabled: optional(boolean()) })),
  reasoning_effort: optional(choice(efforts)),
  chat_template_kwargs: optional(chatTemplateKwargs),
};

type ThinkingValues = { [K in keyof typeof thinkingFields]: FieldValue<(typeof thinkingFields)[K]> };

// ---------------------------------------------------------------------------------------------------------
// Messages

const roles = ['system', 'developer', 'user', 'assistant', 'tool', 'function', 'latest_reminder'] as const;

/** Roles as the chat template knows them: developers speak as the system, functions are tools. */
const templateRole = {
  system: 'system',
  developer: 'system',
  user: 'user',
  assistant: 'assistant',
  tool: 'tool',
  function: 'tool',
  latest_reminder: 'latest_reminder',
} as const satisfies Record<(typeof roles)[number], ChatMessage['role']>;

/** Kinds of content parts that are plain text in their `text` (or `refusal`) field. */
const textParts = ['text', 'input_text', 'output_text', 'refusal'];

const contentSchema: JsonSchema = {
  anyOf: [
    { type: 'string' },
    {
      type: 'array',
      items: {
        type: 'object',
        properties: { type: { enum: textParts }, text: { type: 'string' }, refusal: { type: 'string' } },
        required: ['type'],
      },
    },
    { type: 'null' },
  ],
};

/** The arguments of an earlier tool call, as JSON text or an object; text that is no JSON is left to the template. */
const callArguments: Field<string | object> = {
  expected: 'a string holding a JSON object',
  schema: { anyOf: [{ type: 'string' }, { type: 'object' }, { type: 'null' }] },
  isOptional: true,
  read(value, path) {
    if (value === undefined || value === null || value === '') return '{}';
    if (isObject(value)) return value;
    if (typeof value !== 'string') throw wrong('invalid_type', path, this.expected, value);
    let parsed: unknown;
    try {
      parsed = JSON.parse(value);
    } catch {
      return wellFormed(value);
    }
    if (!isObject(parsed)) throw wrong('invalid_value', path, this.expected, value);
    return wellFormed(value);
  },
};

const toolCall = object({
  id: optional(text()),
  type: optional(choice(['function'])),
  function: object({ name: text({ minLength: 1 }), arguments: callArguments }),
});

/** Calls are bounded by the body alone; a list has to say some number. */
const toolCalls = list(toolCall, { minItems: 0, maxItems: maxMessageCount });

const messageFields = object({
  role: choice(roles),
  reasoning_content: optional(text()),
  reasoning: optional(text()),
  tool_call_id: optional(text()),
});

const messageSchema: JsonSchema = {
  ...messageFields.schema,
  properties: {
    ...(messageFields.schema['properties'] as JsonSchema),
    content: contentSchema,
    tool_calls: optional(toolCalls).schema,
  },
};

/** The messages of a conversation. */
export const messagesField: Field<ChatMessage[]> = {
  expected: `an array of 1 to ${maxMessageCount} messages`,
  schema: { type: 'array', items: messageSchema, minItems: 1, maxItems: maxMessageCount },
  read(value, path) {
    if (!Array.isArray(value)) throw wrong('invalid_type', path, this.expected, value);
    if (value.length === 0 || value.length > maxMessageCount) throw wrong('invalid_value', path, this.expected, value);
    return value.map((entry: unknown, index) => readMessage(entry, `${path}[${index}]`));
  },
};

function readMessage(value: unknown, path: string): ChatMessage {
  const fields = messageFields.read(value, path);
  const body = value as JsonObject;
  const role = templateRole[fields.role];
  const content = readContent(body['content'], role, pathOf(path, 'content'));
  if (role === 'assistant') {
    const reasoning = fields.reasoning_content ?? fields.reasoning;
    const calls: ChatToolCall[] = optional(toolCalls).read(body['tool_calls'], pathOf(path, 'tool_calls')) ?? [];
    return {
      role,
      content,
      ...(reasoning === undefined ? {} : { reasoning_content: reasoning }),
      ...(calls.length === 0 ? {} : { tool_calls: calls.map((call) => ({ ...call, type: 'function' })) }),
    };
  }
  if (role === 'tool' && fields.tool_call_id !== undefined) {
    return { role, content, tool_call_id: fields.tool_call_id };
  }
  return { role, content };
}

/** Text as it stands, or parts, which the chat template joins. */
function readContent(value: unknown, role: ChatMessage['role'], path: string): ChatContent {
  const mayBeEmpty = role === 'assistant' || role === 'tool';
  if (typeof value === 'string') return wellFormed(value);
  if (value === undefined || value === null) {
    if (mayBeEmpty) return '';
    throw missing(path, 'a string or an array of text parts');
  }
  if (!Array.isArray(value)) throw wrong('invalid_type', path, 'a string or an array of text parts', value);
  if (value.length === 0 && !mayBeEmpty) {
    throw wrong('invalid_value', path, 'a string or a non-empty array of text parts', value);
  }
  return value.map((part: unknown, index) => ({ type: 'text', text: readTextPart(part, `${path}[${index}]`) }));
}

/** The text of one content part. Throws `ApiError` for parts that are no text, which this model cannot read. */
export function readTextPart(part: unknown, path: string): string {
  if (!isObject(part)) throw wrong('invalid_type', path, 'an object with type and text', part);
  const kind = part['type'];
  if (kind === undefined || kind === null) throw missing(pathOf(path, 'type'), '"text"');
  if (typeof kind !== 'string') throw wrong('invalid_type', pathOf(path, 'type'), '"text"', kind);
  if (!textParts.includes(kind)) {
    throw new ApiError(
      'unsupported_value',
      `${path}.type must be "text": this model reads text only, found ${JSON.stringify(kind.slice(0, 64))}.`,
      { param: pathOf(path, 'type') },
    );
  }
  const key = kind === 'refusal' ? 'refusal' : 'text';
  const value = part[key] ?? undefined;
  if (value === undefined) throw missing(pathOf(path, key), 'a string');
  return text().read(value, pathOf(path, key));
}

// ---------------------------------------------------------------------------------------------------------
// Tools

/** Names are printed inside an attribute of the prompt, so quotes, blanks and brackets are left out. */
export const toolName: Field<string> = {
  expected: 'a name of 1 to 128 letters, digits or _ . : / -',
  schema: { type: 'string', pattern: '^[A-Za-z0-9_.:/-]{1,128}$' },
  read(value, path) {
    if (typeof value !== 'string') throw wrong('invalid_type', path, this.expected, value);
    if (!/^[A-Za-z0-9_.:/-]{1,128}$/.test(value)) throw wrong('invalid_value', path, this.expected, value);
    return value;
  },
};

const tool = object({
  type: choice(['function']),
  function: object({
    name: toolName,
    description: optional(text()),
    parameters: optional(anyObject()),
    strict: optional(boolean()),
  }),
});

const toolList = list(tool, { minItems: 0, maxItems: maxToolCount });

/** The tools of a request, as they stand: the prompt shows them with all their keys in their order. */
export const toolsField: Field<ToolDefinition[]> = {
  expected: toolList.expected,
  schema: optional(toolList).schema,
  isOptional: true,
  read(value, path) {
    if (value === undefined || value === null) return [];
    const names = new Set<string>();
    for (const [index, { function: definition }] of toolList.read(value, path).entries()) {
      const { name } = definition;
      if (names.has(name)) throw wrong('invalid_value', `${path}[${index}].function.name`, 'unlike all others', name);
      names.add(name);
    }
    return value as ToolDefinition[];
  },
};

/** Which tools the model may call. The name of a chosen one is checked against the tools by `readToolChoice`. */
export const toolChoiceField: Field<unknown> = {
  expected: '"auto", "none", "required" or a function',
  schema: {
    anyOf: [
      { enum: ['auto', 'none', 'required'] },
      { type: 'object', properties: { type: { const: 'function' }, function: { type: 'object' } } },
      { type: 'null' },
    ],
  },
  isOptional: true,
  read: (value) => value,
};

/** What `tool_choice` means for a request with these tools. Throws `ApiError` for what cannot be honoured. */
export function readToolChoice(value: unknown, tools: readonly ToolDefinition[]): ToolChoice {
  const path = 'tool_choice';
  const expected = toolChoiceField.expected;
  if (value === undefined || value === null) return tools.length > 0 ? 'auto' : 'none';
  if (value === 'auto' || value === 'none') return value;
  if (typeof value === 'string' && value !== 'required') throw wrong('invalid_value', path, expected, value);
  if (tools.length === 0) throw wrong('invalid_value', path, '"auto" or "none" in a request without tools', value);
  if (typeof value === 'string') return 'required';
  const { function: called } = object({ function: object({ name: text() }) }).read(value, path);
  if (!tools.some((each) => each.function.name === called.name)) {
    throw wrong('invalid_value', `${path}.function.name`, 'the name of one of the tools', called.name);
  }
  return { name: called.name };
}

// ---------------------------------------------------------------------------------------------------------
// Conversations

/** Whether an earlier turn called a tool. A model that sees one may write a call although it is offered no tools now. */
export function hasToolCalls(messages: readonly ChatMessage[]): boolean {
  return messages.some((message) => (message.tool_calls ?? []).length > 0);
}

/** The parameters of tools in a request that lists them as functions, with their places. */
export function toolParameters(tools: readonly ToolDefinition[]): { tool: ConstrainedTool; path: string }[] {
  return tools.map(({ function: { name, parameters, strict } }, index) => ({
    tool: { name, parameters, strict },
    path: `tools[${index}].function.parameters`,
  }));
}

/** Precedence of the many ways to ask for reasoning: thinking, kwargs, reasoning_effort, reasoning. */
export function conversationOf(
  messages: ChatMessage[],
  tools: ToolDefinition[],
  fields: ThinkingValues,
  served: ServedModel,
): Conversation {
  const kwargs = fields.chat_template_kwargs;
  const offByEffort = (effort: string | undefined) => (effort === 'none' ? false : undefined);
  const thinking =
    (fields.thinking === undefined ? undefined : fields.thinking.type === 'enabled') ??
    kwargs?.thinking ??
    kwargs?.enable_thinking ??
    offByEffort(kwargs?.reasoning_effort) ??
    offByEffort(fields.reasoning_effort) ??
    fields.reasoning?.enabled ??
    served.thinkingByDefault;
  const effort = kwargs?.reasoning_effort ?? fields.reasoning_effort;
  return {
    messages,
    tools,
    thinking,
    reasoningEffort: effort === undefined ? undefined : (served.effortMap.get(effort) ?? effort),
    dropThinking: kwargs?.drop_thinking,
  };
}
