/**
 * The OpenAI API as data: the rules of every request field, requests turned into what the server works
 * with, and the bodies and stream chunks of the answers. Pure: no clock, no randomness, no sockets.
 *
 * Fields that this server does not know are ignored, since clients send many; fields that it knows and
 * cannot honour are refused by name, since ignoring one would change the answer behind the client's back.
 */
import type { ChatContent, ChatMessage, ChatToolCall, Conversation, ToolDefinition } from '../model/chat.ts';
import type { SamplingParams } from '../transfer/messages.ts';
import { ApiError } from './errors.ts';
import {
  anyObject,
  boolean,
  choice,
  finite,
  integer,
  isObject,
  list,
  missing,
  object,
  optional,
  pathOf,
  text,
  unsupported,
  wellFormed,
  wrong,
} from './fields.ts';
import type { Field, FieldValue, JsonObject } from './fields.ts';
import type { Answer, AnswerDelta, Finish, TokenUsage } from './generation.ts';

/** What requests are checked against. */
export interface ServedModel {
  /** The name clients know the model by. */
  modelId: string;
  /** Tokens that prompt and answer may have together. */
  contextLength: number;
  /** Token ids are below this. */
  vocabSize: number;
  /** Whether answers start with reasoning where the request says nothing. */
  thinkingByDefault: boolean;
  /** Sampling where the request says nothing. */
  defaultTemperature: number;
  defaultTopP: number;
}

/** What chat and completion requests have in common once checked. */
export interface GenerationCall {
  /** The name the client used for the model, for the answer. */
  model: string;
  stream: boolean;
  includeUsage: boolean;
  continuousUsage: boolean;
  /** Sampling without the seed; `seed` is the client's, folded to 32 bits, or null for a random one. */
  sampling: Omit<SamplingParams, 'seed'>;
  seed: number | null;
  /** Tokens asked for, or null where the request leaves it to the server; see resolveMaxTokens. */
  maxTokens: number | null;
  stop: string[];
  stopTokenIds: number[];
  ignoreEos: boolean;
  skipSpecialTokens: boolean;
}

/** A checked request to /v1/chat/completions. */
export interface ChatCall extends GenerationCall {
  kind: 'chat';
  conversation: Conversation;
  /** Whether the answer is read for tool calls at all. */
  readsToolCalls: boolean;
  /** How many tool calls the answer may hold; 0 where the client wants none (`tool_choice: "none"`). */
  maxToolCalls: number;
}

/** A checked request to /v1/completions. */
export interface CompletionCall extends GenerationCall {
  kind: 'completion';
  /** Text, or token ids as they stand. */
  prompt: string | number[];
}

/** A checked request to /tokenize: texts, or a conversation to be rendered as chat would. */
export type TokenizeCall = (
  | { kind: 'texts'; texts: string[]; nested: boolean }
  | { kind: 'chat'; conversation: Conversation }
) & { returnTokenStrings: boolean };

/** Identity of one answer, the same in its body and in all of its chunks. */
export interface AnswerHead {
  id: string;
  /** Unix time in seconds. */
  created: number;
  model: string;
}

// ---------------------------------------------------------------------------------------------------------
// Request fields

const maxMessageCount = 100_000;
const maxPromptCount = 256;
const maxStopCount = 16;
const maxStopLength = 1024;
const maxStopTokenCount = 1024;
const maxToolCount = 1024;
const maxChoiceCount = 128;
const maxTopLogprobs = 20;
const maxLogitBiasCount = 1024;
/** OpenAI's seed is a signed 64-bit integer; the upper end is exclusive because 2^63 - 1 is no double. */
const seedLimit = 2 ** 63;
/** /v1/completions answers with this many tokens when none are asked for, as OpenAI does. */
const defaultCompletionTokens = 16;

const efforts = ['none', 'minimal', 'low', 'medium', 'high', 'xhigh', 'max'] as const;

/** Efforts the way DeepSeek's own API maps them onto those the model was trained with. */
const trainedEffort: Record<(typeof efforts)[number], string | undefined> = {
  none: undefined,
  minimal: 'low',
  low: 'high',
  medium: 'high',
  high: 'high',
  xhigh: 'max',
  max: 'max',
};

const isFalse = (value: unknown): boolean => value === false;
const isEmpty = (value: unknown): boolean => isObject(value) && Object.keys(value).length === 0;

const seed: Field<number> = {
  schema: { type: 'integer', minimum: -seedLimit, exclusiveMaximum: seedLimit },
  read(value, path) {
    const expected = 'an integer from -2^63 to 2^63 - 1';
    if (typeof value !== 'number' || !Number.isInteger(value)) throw wrong('invalid_type', path, expected, value);
    if (value < -seedLimit || value >= seedLimit) throw wrong('invalid_value', path, expected, value);
    return value;
  },
};

const stopText = text({ minLength: 1, maxLength: maxStopLength });
const stopTexts = list(stopText, { minItems: 0, maxItems: maxStopCount });

const stop: Field<string[]> = {
  schema: { anyOf: [stopText.schema, stopTexts.schema] },
  read(value, path) {
    if (typeof value === 'string') return [stopText.read(value, path)];
    if (Array.isArray(value)) return stopTexts.read(value, path);
    throw wrong('invalid_type', path, `a string or an array of up to ${maxStopCount} strings`, value);
  },
};

/** Fields that chat and completions share. */
const generationFields = {
  model: optional(text()),
  stream: optional(boolean()),
  stream_options: optional(object({ include_usage: optional(boolean()), continuous_usage_stats: optional(boolean()) })),
  max_tokens: optional(integer({ min: 1 })),
  temperature: optional(finite({ min: 0, max: 2 })),
  top_p: optional(finite({ min: 0, max: 1 })),
  top_k: optional(integer({ min: -1 })),
  min_p: optional(finite({ min: 0, max: 1 })),
  seed: optional(seed),
  stop: optional(stop),
  stop_token_ids: optional(list(integer({ min: 0 }), { minItems: 0, maxItems: maxStopTokenCount })),
  ignore_eos: optional(boolean()),
  skip_special_tokens: optional(boolean()),

  n: unsupported({
    field: integer({ min: 1, max: maxChoiceCount }),
    neutral: (value) => value === 1,
    accepted: '1',
  }),
  min_tokens: unsupported({ field: integer({ min: 0 }), neutral: (value) => value === 0, accepted: '0' }),
  presence_penalty: unsupported({
    field: finite({ min: -2, max: 2 }),
    neutral: (value) => value === 0,
    accepted: '0',
  }),
  frequency_penalty: unsupported({
    field: finite({ min: -2, max: 2 }),
    neutral: (value) => value === 0,
    accepted: '0',
  }),
  repetition_penalty: unsupported({
    field: finite({ min: 0, max: 2, above: true }),
    neutral: (value) => value === 1,
    accepted: '1',
  }),
  logit_bias: unsupported({ field: anyObject(), neutral: isEmpty, accepted: '{}' }),
  response_format: unsupported({
    field: object({ type: choice(['text', 'json_object', 'json_schema', 'structural_tag']) }),
    neutral: (value) => isObject(value) && value['type'] === 'text',
    accepted: '{"type": "text"}',
  }),
  include_stop_str_in_output: unsupported({ field: boolean(), neutral: isFalse, accepted: 'false' }),
  no_stop_trim: unsupported({ field: boolean(), neutral: isFalse, accepted: 'false' }),
  return_hidden_states: unsupported({ field: boolean(), neutral: isFalse, accepted: 'false' }),
  ...Object.fromEntries(
    [
      'stop_regex',
      'lora_path',
      'session_params',
      'custom_logit_processor',
      'custom_params',
      'regex',
      'ebnf',
      'structured_outputs',
      'guided_json',
      'guided_regex',
      'guided_choice',
      'guided_grammar',
    ].map((name) => [name, unsupported({ neutral: () => false, accepted: 'null' })]),
  ),
};

const chatTemplateKwargs = object({
  thinking: optional(boolean()),
  enable_thinking: optional(boolean()),
  reasoning_effort: optional(choice(efforts)),
  drop_thinking: optional(boolean()),
});

/** Fields that decide how a conversation becomes a prompt: shared by chat and /tokenize. */
const conversationFields = {
  thinking: optional(object({ type: choice(['enabled', 'disabled']) })),
  reasoning: optional(object({ enabled: optional(boolean()) })),
  reasoning_effort: optional(choice(efforts)),
  chat_template_kwargs: optional(chatTemplateKwargs),
  continue_final_message: unsupported({ field: boolean(), neutral: isFalse, accepted: 'false' }),
};

const chatRequest = object({
  ...generationFields,
  ...conversationFields,
  max_completion_tokens: optional(integer({ min: 1 })),
  parallel_tool_calls: optional(boolean()),
  add_generation_prompt: unsupported({
    field: boolean(),
    neutral: (value) => value === true,
    accepted: 'true',
  }),
  logprobs: unsupported({ field: boolean(), neutral: isFalse, accepted: 'false' }),
  top_logprobs: unsupported({
    field: integer({ min: 0, max: maxTopLogprobs }),
    neutral: (value) => value === 0,
    accepted: '0',
  }),
  separate_reasoning: unsupported({
    field: boolean(),
    neutral: (value) => value === true,
    accepted: 'true',
  }),
  include_reasoning: unsupported({
    field: boolean(),
    neutral: (value) => value === true,
    accepted: 'true',
  }),
  modalities: unsupported({
    field: list(text(), { minItems: 0, maxItems: maxChoiceCount }),
    neutral: (value) => Array.isArray(value) && value.every((entry) => entry === 'text'),
    accepted: '["text"]',
  }),
  functions: unsupported({ neutral: () => false, accepted: 'null, and use tools instead' }),
  function_call: unsupported({ neutral: () => false, accepted: 'null, and use tool_choice instead' }),
});

const completionRequest = object({
  ...generationFields,
  echo: unsupported({ field: boolean(), neutral: isFalse, accepted: 'false' }),
  logprobs: unsupported({
    field: integer({ min: 0, max: maxTopLogprobs }),
    neutral: () => false,
    accepted: 'null',
  }),
  best_of: unsupported({
    field: integer({ min: 1, max: maxChoiceCount }),
    neutral: (value) => value === 1,
    accepted: '1',
  }),
  suffix: unsupported({ field: text(), neutral: (value) => value === '', accepted: 'null' }),
});

const tokenizeRequest = object({
  ...conversationFields,
  model: optional(text()),
  add_special_tokens: optional(boolean()),
  add_generation_prompt: optional(boolean()),
  return_token_strs: optional(boolean()),
});

/**
 * Check a body of POST /v1/chat/completions. Throws `ApiError` naming the first field at fault; an
 * unknown model is a 404.
 */
export function parseChatRequest(body: JsonObject, served: ServedModel): ChatCall {
  const fields = chatRequest.read(body, '');
  const model = servedModelName(fields.model, served);
  const messages = readMessages(body['messages'], 'messages');
  const tools = readTools(body['tools'], 'tools');
  const toolChoice = readToolChoice(body['tool_choice'], tools);
  checkLogitBias(body['logit_bias'], served);

  return {
    kind: 'chat',
    ...generationCall(fields, model, served),
    maxTokens: fields.max_completion_tokens ?? fields.max_tokens ?? null,
    conversation: conversationOf(messages, toolChoice === 'none' ? [] : tools, fields, served),
    readsToolCalls: tools.length > 0,
    maxToolCalls: toolChoice === 'none' ? 0 : fields.parallel_tool_calls === false ? 1 : Infinity,
  };
}

/**
 * Check a body of POST /v1/completions: one prompt, as text or as token ids. Throws `ApiError` naming the
 * first field at fault; an unknown model is a 404.
 */
export function parseCompletionRequest(body: JsonObject, served: ServedModel): CompletionCall {
  const fields = completionRequest.read(body, '');
  const model = servedModelName(fields.model, served);
  checkLogitBias(body['logit_bias'], served);
  return {
    kind: 'completion',
    ...generationCall(fields, model, served),
    maxTokens: fields.max_tokens ?? null,
    prompt: readPrompt(body['prompt'], served),
  };
}

/** Check a body of POST /tokenize: `prompt` (a string or an array of strings) or `messages`. */
export function parseTokenizeRequest(body: JsonObject, served: ServedModel): TokenizeCall {
  const fields = tokenizeRequest.read(body, '');
  servedModelName(fields.model, served);
  const returnTokenStrings = fields.return_token_strs ?? false;
  const prompt = body['prompt'] ?? undefined;
  const hasMessages = (body['messages'] ?? undefined) !== undefined;

  if (prompt !== undefined && hasMessages) {
    throw new ApiError('invalid_value', 'Send either prompt or messages, not both.', { param: 'messages' });
  }
  if (hasMessages) {
    const messages = readMessages(body['messages'], 'messages');
    const tools = readTools(body['tools'], 'tools');
    const openAnswer = fields.add_generation_prompt ?? true;
    const conversation = { ...conversationOf(messages, tools, fields, served), openAnswer };
    return { kind: 'chat', conversation, returnTokenStrings };
  }
  if (prompt === undefined) throw missing('prompt', 'a string, an array of strings, or messages in its place');
  if (typeof prompt === 'string') {
    return { kind: 'texts', texts: [wellFormed(prompt)], nested: false, returnTokenStrings };
  }
  const texts = list(text(), { minItems: 1, maxItems: maxPromptCount }).read(prompt, 'prompt');
  return { kind: 'texts', texts, nested: true, returnTokenStrings };
}

/** Check a body of POST /detokenize: `tokens`, an array of ids or an array of such arrays. */
export function parseDetokenizeRequest(
  body: JsonObject,
  served: ServedModel,
): { sequences: number[][]; nested: boolean } {
  const tokens = body['tokens'] ?? undefined;
  if (tokens === undefined) throw missing('tokens', 'an array of token ids');
  if (!Array.isArray(tokens)) throw wrong('invalid_type', 'tokens', 'an array of token ids', tokens);
  if (Array.isArray(tokens[0])) {
    const sequences = tokens.map((entry: unknown, index) => readTokenIds(entry, `tokens[${index}]`, served));
    return { sequences, nested: true };
  }
  return { sequences: [readTokenIds(tokens, 'tokens', served)], nested: false };
}

/**
 * How many tokens the answer may have: what was asked for, else what the context still holds after the
 * prompt (chat), or 16 of it (completion). Throws `ApiError` context_length_exceeded if the two do not fit together; `param` is the field
 * that holds the prompt.
 */
export function resolveMaxTokens(
  call: GenerationCall & { kind: 'chat' | 'completion' },
  promptTokenCount: number,
  contextLength: number,
): number {
  const room = contextLength - promptTokenCount;
  const fallback = call.kind === 'chat' ? room : Math.min(defaultCompletionTokens, room);
  const wanted = call.maxTokens ?? Math.max(fallback, 1);
  if (wanted <= room) return wanted;
  const asked =
    call.maxTokens === null
      ? `your prompt has ${promptTokenCount} tokens`
      : `you requested ${promptTokenCount + wanted} tokens (${promptTokenCount} in the prompt, ${wanted} in the answer)`;
  throw new ApiError(
    'context_length_exceeded',
    `This model's maximum context length is ${contextLength} tokens. However, ${asked}. ` +
      'Please shorten the prompt or ask for fewer tokens.',
    { param: call.kind === 'chat' ? 'messages' : 'prompt' },
  );
}

// ---------------------------------------------------------------------------------------------------------
// Parts of requests

/** The model name to answer with; throws 404 for a model that is not served. */
function servedModelName(name: string | undefined, served: ServedModel): string {
  if (name === undefined) return served.modelId;
  if (name === served.modelId || name === 'default') return name;
  throw modelNotFound(name, served);
}

/** The 404 for a model name that is not served. */
export function modelNotFound(name: string, served: ServedModel): ApiError {
  const shown = JSON.stringify(name.slice(0, 64));
  return new ApiError('model_not_found', `The model ${shown} does not exist; this server has "${served.modelId}".`, {
    param: 'model',
  });
}

function generationCall(
  fields: FieldValue<typeof chatRequest> | FieldValue<typeof completionRequest>,
  model: string,
  served: ServedModel,
): Omit<GenerationCall, 'maxTokens'> {
  const stopTokenIds = fields.stop_token_ids ?? [];
  for (const [index, id] of stopTokenIds.entries()) checkTokenId(id, `stop_token_ids[${index}]`, served);
  const topP = fields.top_p ?? served.defaultTopP;
  const topK = fields.top_k ?? 0;
  return {
    model,
    stream: fields.stream ?? false,
    includeUsage: fields.stream_options?.include_usage ?? false,
    continuousUsage: fields.stream_options?.continuous_usage_stats ?? false,
    sampling: {
      // A top_p of 0 leaves the likeliest token alone, which is what temperature 0 says.
      temperature: topP === 0 ? 0 : (fields.temperature ?? served.defaultTemperature),
      topP: topP === 0 ? 1 : topP,
      topK: topK < 1 || topK >= served.vocabSize ? 0 : topK,
      minP: fields.min_p ?? 0,
    },
    seed: fields.seed === undefined ? null : foldSeed(fields.seed),
    stop: fields.stop ?? [],
    stopTokenIds,
    ignoreEos: fields.ignore_eos ?? false,
    skipSpecialTokens: fields.skip_special_tokens ?? true,
  };
}

/** The seed as 32 bits: itself below 2^32, else both halves of its two's complement mixed. */
function foldSeed(value: number): number {
  const bits = BigInt.asUintN(64, BigInt(value));
  return Number((bits & 0xffff_ffffn) ^ (bits >> 32n));
}

function checkTokenId(id: number, path: string, served: ServedModel): void {
  if (id >= served.vocabSize) {
    throw wrong('invalid_value', path, `a token id from 0 to ${served.vocabSize - 1}`, id);
  }
}

function readTokenIds(value: unknown, path: string, served: ServedModel): number[] {
  const expected = `a token id from 0 to ${served.vocabSize - 1}`;
  if (!Array.isArray(value)) throw wrong('invalid_type', path, 'an array of token ids', value);
  for (const [index, id] of value.entries()) {
    if (!Number.isInteger(id)) throw wrong('invalid_type', `${path}[${index}]`, expected, id);
    if (id < 0 || id >= served.vocabSize) throw wrong('invalid_value', `${path}[${index}]`, expected, id);
  }
  return value as number[];
}

/** The bias itself cannot be applied yet; a wrong one is still reported as wrong rather than unsupported. */
function checkLogitBias(value: unknown, served: ServedModel): void {
  if (!isObject(value)) return;
  const entries = Object.entries(value);
  if (entries.length > maxLogitBiasCount) {
    throw wrong('invalid_value', 'logit_bias', `an object of up to ${maxLogitBiasCount} keys`, value);
  }
  for (const [key] of entries) {
    if (!/^(0|[1-9]\d*)$/.test(key) || Number(key) >= served.vocabSize) {
      throw wrong('invalid_value', 'logit_bias', `keyed by token ids from 0 to ${served.vocabSize - 1}`, key);
    }
  }
}

function readPrompt(value: unknown, served: ServedModel): string | number[] {
  const expected = 'a non-empty string or an array of token ids';
  if (value === undefined || value === null) throw missing('prompt', expected);
  if (typeof value === 'string') {
    if (value === '') throw wrong('invalid_value', 'prompt', expected, value);
    return wellFormed(value);
  }
  if (!Array.isArray(value)) throw wrong('invalid_type', 'prompt', expected, value);
  if (value.length === 0) throw wrong('invalid_value', 'prompt', expected, value);
  if (typeof value[0] === 'number') return readTokenIds(value, 'prompt', served);
  if (value.length > 1) {
    throw new ApiError('unsupported_value', `prompt must hold one prompt, found an array of ${value.length}.`, {
      param: 'prompt',
    });
  }
  const only: unknown = value[0];
  if (typeof only !== 'string' && !Array.isArray(only)) throw wrong('invalid_type', 'prompt[0]', expected, only);
  if (only.length === 0) throw wrong('invalid_value', 'prompt[0]', expected, only);
  return typeof only === 'string' ? wellFormed(only) : readTokenIds(only, 'prompt[0]', served);
}

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

const messageFields = object({
  role: {
    schema: choice(roles).schema,
    read(value: unknown, path: string) {
      if (value === undefined || value === null) throw missing(path, `one of ${roles.join(', ')}`);
      return choice(roles).read(value, path);
    },
  },
  reasoning_content: optional(text()),
  reasoning: optional(text()),
  tool_call_id: optional(text()),
});

function readMessages(value: unknown, path: string): ChatMessage[] {
  const expected = `an array of 1 to ${maxMessageCount} messages`;
  if (value === undefined || value === null) throw missing(path, expected);
  if (!Array.isArray(value)) throw wrong('invalid_type', path, expected, value);
  if (value.length === 0 || value.length > maxMessageCount) throw wrong('invalid_value', path, expected, value);
  return value.map((entry: unknown, index) => readMessage(entry, `${path}[${index}]`));
}

function readMessage(value: unknown, path: string): ChatMessage {
  const fields = messageFields.read(value, path);
  const body = value as JsonObject;
  const role = templateRole[fields.role];
  const content = readContent(body['content'], role, pathOf(path, 'content'));
  if (role === 'assistant') {
    const reasoning = fields.reasoning_content ?? fields.reasoning;
    const toolCalls = readToolCalls(body['tool_calls'], pathOf(path, 'tool_calls'));
    return {
      role,
      content,
      ...(reasoning === undefined ? {} : { reasoning_content: reasoning }),
      ...(toolCalls.length === 0 ? {} : { tool_calls: toolCalls }),
    };
  }
  if (role === 'tool' && fields.tool_call_id !== undefined) {
    return { role, content, tool_call_id: fields.tool_call_id };
  }
  return { role, content };
}

/** Kinds of content parts that are plain text in their `text` (or `refusal`) field. */
const textParts = ['text', 'input_text', 'output_text', 'refusal'];

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

function readTextPart(part: unknown, path: string): string {
  if (!isObject(part)) throw wrong('invalid_type', path, 'an object with type and text', part);
  const kind = part['type'];
  if (typeof kind !== 'string') throw wrong('invalid_type', pathOf(path, 'type'), '"text"', kind);
  if (!textParts.includes(kind)) {
    throw new ApiError(
      'unsupported_value',
      `${path}.type must be "text": this model reads text only, found ${JSON.stringify(kind.slice(0, 64))}.`,
      { param: pathOf(path, 'type') },
    );
  }
  const key = kind === 'refusal' ? 'refusal' : 'text';
  return text().read(part[key], pathOf(path, key));
}

function readToolCalls(value: unknown, path: string): ChatToolCall[] {
  if (value === undefined || value === null) return [];
  if (!Array.isArray(value)) throw wrong('invalid_type', path, 'an array of tool calls', value);
  return value.map((entry: unknown, index) => {
    const at = `${path}[${index}]`;
    const call = anyObject().read(entry, at);
    const type = call['type'] ?? 'function';
    if (type !== 'function') throw wrong('invalid_value', pathOf(at, 'type'), '"function"', type);
    const called = anyObject().read(call['function'], pathOf(at, 'function'));
    const name = text({ minLength: 1 }).read(called['name'], `${at}.function.name`);
    const id = optional(text()).read(call['id'], pathOf(at, 'id'));
    return { id, type, function: { name, arguments: readArguments(called['arguments'], `${at}.function.arguments`) } };
  });
}

/** The arguments of an earlier tool call, as JSON text or an object; text that is no JSON is left to the template. */
function readArguments(value: unknown, path: string): string | object {
  const expected = 'a string holding a JSON object';
  if (value === undefined || value === null || value === '') return '{}';
  if (isObject(value)) return value;
  if (typeof value !== 'string') throw wrong('invalid_type', path, expected, value);
  let parsed: unknown;
  try {
    parsed = JSON.parse(value);
  } catch {
    return wellFormed(value);
  }
  if (!isObject(parsed)) throw wrong('invalid_value', path, expected, value);
  return wellFormed(value);
}

/** Names are printed inside an attribute of the prompt, so quotes, blanks and brackets are left out. */
const toolName = /^[A-Za-z0-9_.:/-]{1,128}$/;

function readTools(value: unknown, path: string): ToolDefinition[] {
  if (value === undefined || value === null) return [];
  const tools = list(anyObject(), { minItems: 0, maxItems: maxToolCount }).read(value, path);
  const names = new Set<string>();
  for (const [index, tool] of tools.entries()) {
    const at = `${path}[${index}]`;
    if (tool['type'] !== 'function') throw wrong('invalid_value', `${at}.type`, '"function"', tool['type']);
    const definition = anyObject().read(tool['function'], `${at}.function`);
    const name = definition['name'];
    const expected = 'a name of 1 to 128 letters, digits or _ . : / -';
    if (typeof name !== 'string') throw wrong('invalid_type', `${at}.function.name`, expected, name);
    if (!toolName.test(name)) throw wrong('invalid_value', `${at}.function.name`, expected, name);
    if (names.has(name)) throw wrong('invalid_value', `${at}.function.name`, 'unlike all other names', name);
    names.add(name);
    optional(text()).read(definition['description'], `${at}.function.description`);
    optional(anyObject()).read(definition['parameters'], `${at}.function.parameters`);
    optional(boolean()).read(definition['strict'], `${at}.function.strict`);
  }
  return tools as unknown as ToolDefinition[];
}

function readToolChoice(value: unknown, tools: readonly ToolDefinition[]): 'auto' | 'none' {
  const path = 'tool_choice';
  const expected = '"auto" or "none"';
  if (value === undefined || value === null) return tools.length > 0 ? 'auto' : 'none';
  if (value === 'auto' || value === 'none') return value;
  if (typeof value === 'string' && value !== 'required') throw wrong('invalid_value', path, expected, value);
  if (typeof value !== 'string') {
    const called = anyObject().read(anyObject().read(value, path)['function'], `${path}.function`);
    const name = text().read(called['name'], `${path}.function.name`);
    if (!tools.some((tool) => tool.function.name === name)) {
      throw wrong('invalid_value', `${path}.function.name`, 'the name of one of the tools', name);
    }
  }
  if (tools.length === 0) throw wrong('invalid_value', path, `${expected} in a request without tools`, value);
  throw new ApiError('unsupported_value', `${path} must be ${expected}: this server cannot force a tool call yet.`, {
    param: path,
  });
}

/** Precedence of the many ways to ask for reasoning: thinking, kwargs, reasoning_effort, reasoning. */
function conversationOf(
  messages: ChatMessage[],
  tools: ToolDefinition[],
  fields: FieldValue<ReturnType<typeof object<typeof conversationFields>>>,
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
    reasoningEffort: effort === undefined ? undefined : trainedEffort[effort],
    dropThinking: kwargs?.drop_thinking,
  };
}

// ---------------------------------------------------------------------------------------------------------
// Answers

/** Usage as OpenAI words it. */
export function usageBody(usage: TokenUsage) {
  return {
    prompt_tokens: usage.promptTokens,
    completion_tokens: usage.completionTokens,
    total_tokens: usage.promptTokens + usage.completionTokens,
    prompt_tokens_details: { cached_tokens: 0 },
    completion_tokens_details: { reasoning_tokens: usage.reasoningTokens },
  };
}

/** The whole answer to a chat request that does not stream. */
export function chatBody(head: AnswerHead, answer: Answer, finish: Finish, usage: TokenUsage) {
  const toolCalls = answer.toolCalls.map((call) => ({
    id: call.id,
    type: 'function',
    function: { name: call.name, arguments: call.arguments },
  }));
  const message = {
    role: 'assistant',
    content: answer.content === '' && toolCalls.length > 0 ? null : answer.content,
    refusal: null,
    ...(answer.reasoning === '' ? {} : { reasoning_content: answer.reasoning }),
    ...(toolCalls.length === 0 ? {} : { tool_calls: toolCalls }),
  };
  return {
    id: head.id,
    object: 'chat.completion',
    created: head.created,
    model: head.model,
    choices: [
      {
        index: 0,
        message,
        logprobs: null,
        finish_reason: finish.reason,
        matched_stop: finish.matchedStop,
      },
    ],
    usage: usageBody(usage),
    system_fingerprint: null,
    service_tier: 'default',
  };
}

/** The whole answer to a completion request that does not stream. */
export function completionBody(head: AnswerHead, answer: Answer, finish: Finish, usage: TokenUsage) {
  return {
    id: head.id,
    object: 'text_completion',
    created: head.created,
    model: head.model,
    choices: [
      {
        index: 0,
        text: answer.content,
        logprobs: null,
        finish_reason: finish.reason,
        matched_stop: finish.matchedStop,
      },
    ],
    usage: usageBody(usage),
    system_fingerprint: null,
  };
}

/**
 * The chunks of one stream, in the form that `call` asks for. `usage` is that of the request so far; it
 * goes into the chunks only where the client asked for it.
 */
export interface ChunkWriter {
  /** Chunks that come before the first delta: the role, in a chat. */
  open(usage: TokenUsage): object[];
  delta(delta: AnswerDelta, usage: TokenUsage): object;
  /** The finish chunk and, if asked for, the usage chunk. */
  close(finish: Finish, usage: TokenUsage): object[];
}

/** Chunks for a chat or a completion stream. */
export function createChunkWriter(head: AnswerHead, call: ChatCall | CompletionCall): ChunkWriter {
  const isChat = call.kind === 'chat';
  const base = {
    id: head.id,
    object: isChat ? 'chat.completion.chunk' : 'text_completion',
    created: head.created,
    model: head.model,
  };

  function usageField(usage: TokenUsage): object {
    if (!call.includeUsage) return {};
    return { usage: call.continuousUsage ? usageBody(usage) : null };
  }

  function chunk(payload: object, finish: Finish | null, usage: TokenUsage): object {
    const ending = finish === null ? {} : { matched_stop: finish.matchedStop };
    const choiceBody = {
      index: 0,
      ...payload,
      logprobs: null,
      finish_reason: finish === null ? null : finish.reason,
      ...ending,
    };
    return { ...base, choices: [choiceBody], ...usageField(usage) };
  }

  return {
    open: (usage) => (isChat ? [chunk({ delta: { role: 'assistant', content: '' } }, null, usage)] : []),
    delta: (delta, usage) => chunk(isChat ? { delta: chatDelta(delta) } : { text: textOf(delta) }, null, usage),
    close: (finish, usage) => [
      chunk(isChat ? { delta: {} } : { text: '' }, finish, usage),
      ...(call.includeUsage ? [{ ...base, choices: [], usage: usageBody(usage) }] : []),
    ],
  };
}

function textOf(delta: AnswerDelta): string {
  return delta.kind === 'content' ? delta.text : '';
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

/** One entry of GET /v1/models. `created` is fixed when the server starts. */
export function modelBody(served: ServedModel, created: number) {
  return {
    id: served.modelId,
    object: 'model',
    created,
    owned_by: 'handoff',
    root: served.modelId,
    parent: null,
    max_model_len: served.contextLength,
  };
}
