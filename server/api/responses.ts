/**
 * POST /v1/responses, stateless: OpenAI's newer API as agents use it. Input items become the same conversation that a chat
 * request becomes; the answer is worded as output items. Nothing is stored, so earlier responses cannot be named.
 * The tools are in responses-tools.ts. Pure.
 */
import type { ChatMessage, ChatToolCall } from '../../model/chat.ts';
import { ApiError, errorBody } from '../errors.ts';
import { conversationOf, efforts, hasToolCalls, readTextPart } from './conversation.ts';
import { constrain, textFormatField } from './constraints.ts';
import { event, finiteLogprob } from './dialect.ts';
import type { Dialect, DialectContext, GenerationPlan, TokenTexts } from './dialect.ts';
import {
  anyObject,
  boolean,
  choice,
  echo,
  finite,
  ignored,
  integer,
  isObject,
  list,
  object,
  optional,
  pathOf,
  text,
  unsupported,
  wellFormed,
  wrong,
} from './fields.ts';
import type { Field, JsonObject } from './fields.ts';
import type { AnswerDelta, Finish, LoggedToken } from './generation.ts';
import { inputOfCustomCall, readResponseTools } from './responses-tools.ts';
import type { ResponseTools } from './responses-tools.ts';
import { maxTopLogprobs, saltFields, saltOf, samplingCall, servedModelName } from './sampling.ts';
import type { GenerationCall, ServedModel } from './sampling.ts';

const maxItemCount = 100_000;
const maxToolCount = 1024;
const maxIncludeCount = 64;
/** What a request includes to see the choice of each token. */
const logprobsInclude = 'message.output_text.logprobs';

const inputField: Field<string | unknown[]> = {
  expected: 'a non-empty string or an array of input items',
  schema: {
    anyOf: [
      { type: 'string' },
      { type: 'array', items: { type: 'object', properties: { type: { type: 'string' } } }, minItems: 1 },
    ],
  },
  read(value, path) {
    if (typeof value === 'string') return wellFormed(value);
    if (!Array.isArray(value)) throw wrong('invalid_type', path, this.expected, value);
    if (value.length === 0 || value.length > maxItemCount) throw wrong('invalid_value', path, this.expected, value);
    return value as unknown[];
  },
};

/** The body of POST /v1/responses. */
export const responsesRequest = object({
  model: optional(text()),
  input: inputField,
  instructions: optional(text()),
  max_output_tokens: optional(integer({ min: 1 })),
  reasoning: optional(object({ effort: optional(choice(efforts)), summary: ignored('Reasoning is given in full.') })),
  text: optional(
    object({
      format: textFormatField,
      verbosity: ignored('Without effect.'),
    }),
  ),
  tools: optional(list(anyObject(), { minItems: 0, maxItems: maxToolCount })),
  tool_choice: ignored('auto, none, required or a function; read together with the tools.'),
  parallel_tool_calls: optional(boolean()),
  temperature: optional(finite({ min: 0, max: 2 })),
  top_p: optional(finite({ min: 0, max: 1 })),
  top_logprobs: optional(integer({ min: 0, max: maxTopLogprobs })),
  stream: optional(boolean()),
  stream_options: ignored('Without effect.'),
  metadata: optional(anyObject()),
  store: ignored('Nothing is stored.', boolean()),
  include: optional(list(text(), { minItems: 0, maxItems: maxIncludeCount })),
  truncation: optional(choice(['auto', 'disabled'])),
  user: ignored('Without effect.'),
  ...saltFields,
  background: unsupported({ field: boolean(), neutral: (value) => value === false, accepted: 'false' }),
  previous_response_id: unsupported({ neutral: () => false, accepted: 'null, since nothing is stored' }),
  conversation: unsupported({ neutral: () => false, accepted: 'null, since nothing is stored' }),
  prompt: unsupported({ neutral: () => false, accepted: 'null, since nothing is stored' }),
});

/** Check a body of POST /v1/responses. Throws `ApiError` naming the first field at fault. */
export function planResponse(body: JsonObject, served: ServedModel): GenerationPlan {
  const fields = responsesRequest.read(body, '');
  const tools = readResponseTools(fields.tools ?? [], body['tool_choice']);
  const system: ChatMessage[] =
    fields.instructions === undefined ? [] : [{ role: 'system', content: fields.instructions }];
  const { input } = fields;
  const messages: ChatMessage[] =
    typeof input === 'string' ? [{ role: 'user', content: input }] : readItems(input, 'input', tools);
  const conversation = conversationOf(
    [...system, ...messages],
    tools.choice === 'none' ? [] : tools.offered,
    {
      thinking: undefined,
      reasoning: undefined,
      reasoning_effort: fields.reasoning?.effort,
      chat_template_kwargs: undefined,
    },
    served,
  );
  const asked = samplingCall({ temperature: fields.temperature, top_p: fields.top_p }, served);
  const topLogprobs = fields.top_logprobs ?? 0;
  const isLogged = topLogprobs > 0 || fields.include?.includes(logprobsInclude) === true;
  const call: GenerationCall = {
    model: servedModelName(fields.model, served),
    stream: fields.stream ?? false,
    includeUsage: true,
    continuousUsage: false,
    ...asked,
    sampling: { ...asked.sampling, ...(isLogged ? { logprobs: topLogprobs } : {}) },
    seed: null,
    maxTokens: fields.max_output_tokens ?? null,
    requestId: null,
    salt: saltOf(fields),
  };
  const format = fields.text?.format;
  if (format?.isShown) conversation.responseSchema = format.schema;
  const oneCall = fields.parallel_tool_calls === false || typeof tools.choice === 'object';
  const constraint = constrain({
    format,
    choice: tools.choice,
    tools: tools.parameters,
    oneCall,
    thinking: conversation.thinking,
    continues: false,
    call,
  });
  /** What the response says of its request. */
  const said = {
    instructions: fields.instructions ?? null,
    max_output_tokens: fields.max_output_tokens ?? null,
    metadata: fields.metadata ?? {},
    parallel_tool_calls: fields.parallel_tool_calls ?? true,
    previous_response_id: null,
    reasoning: { effort: fields.reasoning?.effort ?? null, summary: null },
    store: false,
    temperature: fields.temperature ?? served.defaultTemperature,
    text: { format: (isObject(body['text']) ? body['text']['format'] : null) ?? { type: 'text' } },
    tool_choice: body['tool_choice'] ?? tools.choice,
    tools: fields.tools ?? [],
    top_p: fields.top_p ?? served.defaultTopP,
    top_logprobs: topLogprobs,
    truncation: fields.truncation ?? 'disabled',
    service_tier: 'default',
    user: null,
  };
  return {
    call,
    idPrefix: 'resp_',
    ...(tools.leftOut.length === 0 ? {} : { headers: { 'x-handoff-tools-left-out': tools.leftOut.join(', ') } }),
    prompts: [{ kind: 'conversation', conversation }],
    promptParam: 'input',
    fallbackTokens: Infinity,
    clampsTokens: false,
    reading: {
      kind: 'chat',
      thinking: conversation.thinking,
      reasoning: 'separate',
      readsToolCalls: tools.offered.length > 0 || hasToolCalls(conversation.messages),
      maxToolCalls: tools.choice === 'none' || tools.offered.length === 0 ? 0 : oneCall ? 1 : Infinity,
    },
    constraint,
    createDialect: (context) => createResponsesDialect(context, said, tools),
  };
}

// ---------------------------------------------------------------------------------------------------------
// Input items

/** Roles of the template by those of the API. */
const itemRoles = { user: 'user', assistant: 'assistant', system: 'system', developer: 'system' } as const;
const roleField = choice(['user', 'assistant', 'system', 'developer']);

/** Text as a string or as parts; parts are joined by newlines. */
function readText(value: unknown, path: string): string {
  if (typeof value === 'string') return wellFormed(value);
  if (value === undefined || value === null) return '';
  if (!Array.isArray(value)) throw wrong('invalid_type', path, 'a string or an array of text parts', value);
  return value.map((part: unknown, index) => readTextPart(part, `${path}[${index}]`)).join('\n');
}

/** What an assistant said, thought and called, item by item, is one message. */
function readItems(items: readonly unknown[], path: string, tools: ResponseTools): ChatMessage[] {
  const messages: ChatMessage[] = [];
  let turn: { texts: string[]; thoughts: string[]; calls: ChatToolCall[] } | null = null;
  const assistant = () => (turn ??= { texts: [], thoughts: [], calls: [] });
  const endTurn = () => {
    if (turn === null) return;
    const { texts, thoughts, calls } = turn;
    turn = null;
    // Thoughts alone are no turn: their answer was left out.
    if (texts.length === 0 && calls.length === 0) return;
    messages.push({
      role: 'assistant',
      content: texts.join('\n'),
      ...(thoughts.length === 0 ? {} : { reasoning_content: thoughts.join('\n') }),
      ...(calls.length === 0 ? {} : { tool_calls: calls }),
    });
  };

  for (const [index, item] of items.entries()) {
    const at = `${path}[${index}]`;
    if (!isObject(item)) throw wrong('invalid_type', at, 'an input item', item);
    const kind = item['type'] ?? 'message';
    switch (kind) {
      case 'message': {
        const { role } = object({ role: roleField }).read(item, at);
        const content = readText(item['content'], pathOf(at, 'content'));
        if (role === 'assistant') {
          assistant().texts.push(content);
          break;
        }
        endTurn();
        messages.push({ role: itemRoles[role], content });
        break;
      }
      case 'reasoning':
        assistant().thoughts.push(...readThoughts(item, at));
        break;
      case 'function_call': {
        const fields = object({ call_id: text(), name: text({ minLength: 1 }), namespace: optional(text()) });
        const call = fields.read(item, at);
        const given = optional(text()).read(item['arguments'], pathOf(at, 'arguments')) ?? '';
        const name = tools.flatName(call.name, call.namespace);
        assistant().calls.push({ id: call.call_id, type: 'function', function: { name, arguments: given } });
        break;
      }
      case 'custom_tool_call': {
        const call = object({ call_id: text(), name: text({ minLength: 1 }), input: text() }).read(item, at);
        const given = { input: call.input };
        assistant().calls.push({ id: call.call_id, type: 'function', function: { name: call.name, arguments: given } });
        break;
      }
      case 'function_call_output':
      case 'custom_tool_call_output': {
        const { call_id: id } = object({ call_id: text() }).read(item, at);
        endTurn();
        messages.push({ role: 'tool', tool_call_id: id, content: readText(item['output'], pathOf(at, 'output')) });
        break;
      }
      default:
        throw new ApiError(
          'unsupported_value',
          `${at}.type is not an input item that this server reads: ${echo(kind)}.`,
          {
            param: `${at}.type`,
          },
        );
    }
  }
  endTurn();
  return messages;
}

/** The texts of a reasoning item; one that holds only what another server has encrypted has none. */
function readThoughts(item: JsonObject, path: string): string[] {
  const part = list(object({ text: text() }), { minItems: 0, maxItems: maxItemCount });
  const content = optional(part).read(item['content'], pathOf(path, 'content')) ?? [];
  const shown = content.length > 0 ? content : (optional(part).read(item['summary'], pathOf(path, 'summary')) ?? []);
  return shown.map((each) => each.text);
}

// ---------------------------------------------------------------------------------------------------------
// Answers

/** An output item under way. */
interface OpenItem {
  kind: 'reasoning' | 'content' | 'tool_call';
  index: number;
  id: string;
  text: string;
  logged: LoggedToken[];
  call: { id: string; name: string } | null;
}

/** How /v1/responses words its answers. `said`: what the response says of its request. */
function createResponsesDialect(context: DialectContext, said: object, tools: ResponseTools): Dialect {
  const { head, tokens } = context;
  const suffix = head.id.slice('resp_'.length);
  let sequence = 0;
  let isStarted = false;
  let open: OpenItem | null = null;
  const output: object[] = [];

  function named(type: string, payload: object): string {
    const data = { type, sequence_number: sequence, ...payload };
    sequence += 1;
    return event(data, type);
  }

  const response = (
    status: string,
    more: { output: object[]; usage?: object; incomplete?: string; error?: object },
  ) => ({
    id: head.id,
    object: 'response',
    created_at: head.created,
    status,
    error: more.error ?? null,
    incomplete_details: more.incomplete === undefined ? null : { reason: more.incomplete },
    model: head.model,
    output: more.output,
    usage: more.usage ?? null,
    ...said,
  });

  function usage(): object {
    const { promptTokens, cachedTokens, completionTokens, reasoningTokens } = context.usage();
    return {
      input_tokens: promptTokens,
      input_tokens_details: { cached_tokens: cachedTokens },
      output_tokens: completionTokens,
      output_tokens_details: { reasoning_tokens: reasoningTokens },
      total_tokens: promptTokens + completionTokens,
    };
  }

  function finished(finish: Finish, items: object[]): ReturnType<typeof response> {
    const isCut = finish.reason === 'length';
    return response(isCut ? 'incomplete' : 'completed', {
      output: items,
      usage: usage(),
      ...(isCut ? { incomplete: 'max_output_tokens' } : {}),
    });
  }

  const itemOf = (item: OpenItem, status: 'in_progress' | 'completed' | 'incomplete') =>
    outputItem(item, status, tools, tokens);

  function start(): string[] {
    if (isStarted) return [];
    isStarted = true;
    const opening = response('in_progress', { output: [] });
    return [named('response.created', { response: opening }), named('response.in_progress', { response: opening })];
  }

  function openItem(kind: OpenItem['kind'], call: OpenItem['call'] = null): string[] {
    const events = closeItem('completed');
    const index = output.length;
    const prefix = { reasoning: 'rs', content: 'msg', tool_call: tools.isCustom(call?.name ?? '') ? 'ctc' : 'fc' }[
      kind
    ];
    open = { kind, index, id: `${prefix}_${suffix}${index}`, text: '', logged: [], call };
    events.push(named('response.output_item.added', { output_index: index, item: itemOf({ ...open }, 'in_progress') }));
    if (kind !== 'tool_call') {
      const part =
        kind === 'content'
          ? { type: 'output_text', text: '', annotations: [], logprobs: [] }
          : { type: 'reasoning_text', text: '' };
      events.push(named('response.content_part.added', { ...place(open), content_index: 0, part }));
    }
    return events;
  }

  const place = (item: OpenItem) => ({ item_id: item.id, output_index: item.index });

  function closeItem(status: 'completed' | 'incomplete'): string[] {
    if (open === null) return [];
    const item = open;
    open = null;
    const at = place(item);
    const events: string[] = [];
    switch (item.kind) {
      case 'reasoning': {
        events.push(named('response.reasoning_text.done', { ...at, content_index: 0, text: item.text }));
        const part = { type: 'reasoning_text', text: item.text };
        events.push(named('response.content_part.done', { ...at, content_index: 0, part }));
        break;
      }
      case 'content': {
        const logprobs = logprobsOf(item.logged, tokens);
        events.push(named('response.output_text.done', { ...at, content_index: 0, text: item.text, logprobs }));
        const part = { type: 'output_text', text: item.text, annotations: [], logprobs };
        events.push(named('response.content_part.done', { ...at, content_index: 0, part }));
        break;
      }
      case 'tool_call': {
        const name = item.call?.name ?? '';
        if (!tools.isCustom(name)) {
          const { name: shown } = tools.nameOf(name);
          const done = { ...at, name: shown, arguments: item.text };
          events.push(named('response.function_call_arguments.done', done));
          break;
        }
        // The input is a string inside the arguments, which can be read once they are complete.
        const input = inputOfCustomCall(item.text);
        events.push(named('response.custom_tool_call_input.delta', { ...at, delta: input }));
        events.push(named('response.custom_tool_call_input.done', { ...at, input }));
        break;
      }
      default:
        item.kind satisfies never;
    }
    const done = itemOf(item, status);
    output.push(done);
    events.push(named('response.output_item.done', { output_index: item.index, item: done }));
    return events;
  }

  function deltaEvents(delta: AnswerDelta): string[] {
    if (delta.kind === 'tool_call') return openItem('tool_call', { id: delta.id, name: delta.name });
    const kind = delta.kind === 'tool_arguments' ? 'tool_call' : delta.kind;
    const events = open?.kind === kind ? [] : openItem(kind);
    const item = open!;
    item.text += delta.text;
    const at = place(item);
    switch (delta.kind) {
      case 'reasoning':
        events.push(named('response.reasoning_text.delta', { ...at, content_index: 0, delta: delta.text }));
        break;
      case 'content': {
        item.logged.push(...(delta.logged ?? []));
        const logprobs = logprobsOf(delta.logged ?? [], tokens);
        events.push(named('response.output_text.delta', { ...at, content_index: 0, delta: delta.text, logprobs }));
        break;
      }
      case 'tool_arguments':
        if (tools.isCustom(item.call?.name ?? '')) break;
        events.push(named('response.function_call_arguments.delta', { ...at, delta: delta.text }));
        break;
      default:
        delta satisfies never;
    }
    return events;
  }

  /** Events for the end of the answer, and the response as it is then. */
  function finish(end: Finish): { events: string[]; last: ReturnType<typeof response> } {
    const events = start();
    if (open === null && output.length === 0) events.push(...openItem('content'));
    events.push(...closeItem(end.reason === 'length' ? 'incomplete' : 'completed'));
    const last = finished(end, output);
    events.push(named(`response.${last.status}`, { response: last }));
    return { events, last };
  }

  return {
    delta: (_, delta) => [...start(), ...deltaEvents(delta)],
    finish: (_, end) => finish(end).events,
    end: () => [],
    error(error) {
      const { message, code } = errorBody(error).error;
      const failed = response('failed', { output, error: { code, message } });
      return [...start(), named('response.failed', { response: failed })];
    },
    body([choice]) {
      if (choice === undefined) throw new Error('an answer has one choice');
      start();
      for (const delta of choice.deltas) deltaEvents(delta);
      return finish(choice.finish).last;
    },
  };
}

function outputItem(
  item: OpenItem,
  status: 'in_progress' | 'completed' | 'incomplete',
  tools: ResponseTools,
  tokens: TokenTexts,
): object {
  const isEmpty = status === 'in_progress';
  switch (item.kind) {
    case 'reasoning': {
      const content = isEmpty ? [] : [{ type: 'reasoning_text', text: item.text }];
      return { id: item.id, type: 'reasoning', summary: [], content, encrypted_content: null, status };
    }
    case 'content': {
      const part = {
        type: 'output_text',
        text: item.text,
        annotations: [],
        logprobs: logprobsOf(item.logged, tokens),
      };
      return { id: item.id, type: 'message', status, role: 'assistant', content: isEmpty ? [] : [part] };
    }
    case 'tool_call': {
      const { id: callId, name } = item.call ?? { id: '', name: '' };
      if (tools.isCustom(name)) {
        const input = isEmpty ? '' : inputOfCustomCall(item.text);
        return { id: item.id, type: 'custom_tool_call', status, call_id: callId, name, input };
      }
      const shown = tools.nameOf(name);
      return { id: item.id, type: 'function_call', status, call_id: callId, ...shown, arguments: item.text };
    }
    default:
      return item.kind satisfies never;
  }
}

function logprobsOf(logged: readonly LoggedToken[], tokens: TokenTexts): object[] {
  const entry = ({ id, logprob }: { id: number; logprob: number }) => ({
    token: tokens.text(id),
    logprob: finiteLogprob(logprob),
    bytes: [...tokens.bytes(id)],
  });
  return logged.map((token) => ({ ...entry(token), top_logprobs: token.top.map(entry) }));
}
