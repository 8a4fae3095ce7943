/** POST /v1/completions: the fields of its requests, and its answers as a body and as chunks. Pure. */
import { ApiError } from '../errors.ts';
import { constrain } from './constraints.ts';
import { DONE, event, finiteLogprob, openaiErrorEvents, usageBody } from './dialect.ts';
import type { Dialect, DialectContext, GenerationPlan, Prompt, TokenTexts } from './dialect.ts';
import { boolean, integer, missing, object, optional, text, unsupported, wellFormed, wrong } from './fields.ts';
import type { Field, JsonObject } from './fields.ts';
import type { Finish, LoggedToken, TokenChoice } from './generation.ts';
import { maxChoiceCount, maxTopLogprobs, openaiCall, openaiFields, readTokenIds } from './sampling.ts';
import type { GenerationCall, ServedModel } from './sampling.ts';

const maxPromptCount = 256;
/** Choices over all prompts. Each is a request of its own to the workers. */
const maxTotalChoices = 256;
/** Tokens of an answer when none are asked for, as OpenAI has it. */
const defaultCompletionTokens = 16;

const promptExpected = `a non-empty string, an array of token ids, or an array of up to ${maxPromptCount} of those`;

/** Checked in full by `readPrompts`, which knows the vocabulary. */
const promptField: Field<unknown> = {
  expected: promptExpected,
  schema: {
    anyOf: [
      { type: 'string', minLength: 1 },
      { type: 'array', items: { type: 'string', minLength: 1 }, minItems: 1, maxItems: maxPromptCount },
      { type: 'array', items: { type: 'integer', minimum: 0 }, minItems: 1 },
      {
        type: 'array',
        items: { type: 'array', items: { type: 'integer', minimum: 0 }, minItems: 1 },
        minItems: 1,
        maxItems: maxPromptCount,
      },
    ],
  },
  read: (value) => value,
};

/** The body of POST /v1/completions. */
export const completionRequest = object({
  prompt: promptField,
  ...openaiFields,
  max_tokens: optional(integer({ min: 0 })),
  echo: optional(boolean()),
  logprobs: optional(integer({ min: 0, max: maxTopLogprobs })),
  best_of: optional(integer({ min: 1, max: maxChoiceCount })),
  suffix: unsupported({ field: text(), neutral: (value) => value === '', accepted: 'null' }),
});

/**
 * Check a body of POST /v1/completions. Throws `ApiError` naming the
 * first field at fault; an unknown model is a 404.
 */
export function planCompletion(body: JsonObject, served: ServedModel): GenerationPlan {
  const fields = completionRequest.read(body, '');
  const asked = openaiCall(fields, served);
  const echo = fields.echo ?? false;
  const prompt = echo ? { promptLogprobs: true } : {};
  const logged = fields.logprobs === undefined ? {} : { logprobs: fields.logprobs, ...prompt };
  const call: GenerationCall = {
    ...asked,
    sampling: { ...asked.sampling, ...logged },
    maxTokens: fields.max_tokens ?? null,
  };
  if (call.maxTokens === 0 && !echo) throw wrong('invalid_value', 'max_tokens', 'at least 1 unless echo is true', 0);
  if (fields.best_of !== undefined && fields.best_of !== call.choiceCount && fields.best_of !== 1) {
    throw new ApiError('unsupported_value', `best_of must be 1 or the same as n, found ${fields.best_of}.`, {
      param: 'best_of',
    });
  }
  const format = fields.response_format;
  if (format !== undefined && !call.skipSpecialTokens) {
    throw new ApiError('unsupported_value', 'skip_special_tokens must be true with response_format.', {
      param: 'skip_special_tokens',
    });
  }
  const free = { choice: 'none', tools: [], oneCall: false, thinking: false, continues: false } as const;
  const constraint = constrain({ ...free, format, call });
  const prompts = readPrompts(fields.prompt, served);
  if (prompts.length * call.choiceCount > maxTotalChoices) {
    throw wrong('invalid_value', 'n', `small enough for ${maxTotalChoices} choices over all prompts`, call.choiceCount);
  }
  return {
    call,
    idPrefix: 'cmpl-',
    prompts,
    promptParam: 'prompt',
    fallbackTokens: defaultCompletionTokens,
    clampsTokens: false,
    reading: { kind: 'text' },
    constraint,
    createDialect: (context) => createCompletionDialect(context, { ...call, echo, prompts }),
  };
}

function readPrompts(value: unknown, served: ServedModel): Prompt[] {
  if (typeof value === 'string') {
    if (value === '') throw wrong('invalid_value', 'prompt', promptExpected, value);
    return [{ kind: 'text', text: wellFormed(value) }];
  }
  if (!Array.isArray(value)) throw wrong('invalid_type', 'prompt', promptExpected, value);
  if (value.length === 0) throw wrong('invalid_value', 'prompt', promptExpected, value);
  if (typeof value[0] === 'number') return [{ kind: 'ids', ids: readTokenIds(value, 'prompt', served) }];
  if (value.length > maxPromptCount) throw wrong('invalid_value', 'prompt', promptExpected, value);
  const kind = typeof value[0] === 'string' ? 'string' : 'ids';
  return value.map((entry: unknown, index) => {
    const path = `prompt[${index}]`;
    const isKind = kind === 'string' ? typeof entry === 'string' : Array.isArray(entry);
    const expected = kind === 'string' ? 'a non-empty string like the first' : 'an array of token ids';
    if (entry === undefined || entry === null) throw missing(path, expected);
    if (!isKind) throw wrong('invalid_type', path, expected, entry);
    if ((entry as string | unknown[]).length === 0) throw wrong('invalid_value', path, expected, entry);
    if (typeof entry === 'string') return { kind: 'text', text: wellFormed(entry) };
    return { kind: 'ids', ids: readTokenIds(entry, path, served) };
  });
}

/** Choices of tokens as completions show them: lists of equal length. */
interface Logprobs {
  tokens: string[];
  token_logprobs: (number | null)[];
  top_logprobs: (Record<string, number> | null)[];
  text_offset: number[];
}

function joined(first: Logprobs | null, second: Logprobs | null): Logprobs | null {
  if (first === null || second === null) return first ?? second;
  return {
    tokens: [...first.tokens, ...second.tokens],
    token_logprobs: [...first.token_logprobs, ...second.token_logprobs],
    top_logprobs: [...first.top_logprobs, ...second.top_logprobs],
    text_offset: [...first.text_offset, ...second.text_offset],
  };
}

/** Where the text of each token begins in their text together, in UTF-16 units. */
function textOffsets(ids: readonly number[], tokens: TokenTexts): number[] {
  const decoder = new TextDecoder('utf-8', { ignoreBOM: true });
  let offset = 0;
  return ids.map((id) => {
    const start = offset;
    // A token that stands for no text, like the one that begins a prompt, takes none.
    if (tokens.text(id) !== '') offset += decoder.decode(tokens.bytes(id), { stream: true }).length;
    return start;
  });
}

/** How /v1/completions words its answers. With `echo`, each begins with its prompt. */
export function createCompletionDialect(
  context: DialectContext,
  call: Pick<GenerationCall, 'includeUsage' | 'continuousUsage' | 'choiceCount' | 'sampling'> & {
    echo: boolean;
    prompts: readonly Prompt[];
  },
): Dialect {
  const { head, tokens } = context;
  const base = { id: head.id, object: 'text_completion', created: head.created, model: head.model };
  const opened = new Set<number>();
  const usage = () => usageBody(context.usage());

  /** What stands before the answer of a choice. */
  function echoOf(index: number): string {
    const prompt = call.prompts[Math.floor(index / call.choiceCount)];
    if (!call.echo || prompt === undefined) return '';
    if (prompt.kind === 'ids') return tokens.textOf(prompt.ids);
    return prompt.kind === 'text' ? prompt.text : '';
  }

  /** The tokens of an echoed prompt. Nothing is known of the first: null. */
  function echoed(index: number): Logprobs | null {
    if (!call.echo || call.sampling.logprobs === undefined) return null;
    const ids = context.promptIds(index);
    const choices = context.promptChoices(index);
    return {
      tokens: ids.map((id) => tokens.text(id)),
      token_logprobs: [null, ...choices.map(({ logprob }) => finiteLogprob(logprob))],
      top_logprobs: [null, ...choices.map(topOf)],
      text_offset: textOffsets(ids, tokens),
    };
  }

  /** Null where they were not asked for; lists without entries where text has no token of its own. */
  function logprobs(index: number, logged: readonly LoggedToken[]): Logprobs | null {
    if (call.sampling.logprobs === undefined) return null;
    const start = echoOf(index).length;
    return {
      tokens: logged.map(({ id }) => tokens.text(id)),
      token_logprobs: logged.map(({ logprob }) => finiteLogprob(logprob)),
      top_logprobs: logged.map(topOf),
      text_offset: logged.map(({ offset }) => start + offset),
    };
  }

  function topOf({ id, logprob, top }: TokenChoice): Record<string, number> {
    return Object.fromEntries([...top, { id, logprob }].map((each) => [nameOf(each.id), finiteLogprob(each.logprob)]));
  }

  /** A token as a key: its text, or its bytes where they are no whole text, so that no two tokens share a key by that. */
  function nameOf(id: number): string {
    const name = tokens.text(id);
    if (!name.includes('\ufffd')) return name;
    return `bytes:${Array.from(tokens.bytes(id), (byte) => `\\x${byte.toString(16).padStart(2, '0')}`).join('')}`;
  }

  function chunk(index: number, content: string, more: { logprobs?: Logprobs | null; finish?: Finish } = {}) {
    const { finish } = more;
    const choice = {
      index,
      text: content,
      logprobs: more.logprobs ?? null,
      finish_reason: finish?.reason ?? null,
      ...(finish === undefined ? {} : { matched_stop: finish.matchedStop }),
    };
    const running = call.includeUsage ? { usage: call.continuousUsage ? usage() : null } : {};
    return event({ ...base, choices: [choice], ...running });
  }

  function open(index: number): string[] {
    if (opened.has(index)) return [];
    opened.add(index);
    const echo = echoOf(index);
    return echo === '' ? [] : [chunk(index, echo, { logprobs: echoed(index) })];
  }

  return {
    delta: (index, delta) => {
      const isText = delta.kind === 'content';
      const found = logprobs(index, (isText ? delta.logged : undefined) ?? []);
      return [...open(index), chunk(index, isText ? delta.text : '', { logprobs: found })];
    },
    finish: (index, finish) => [...open(index), chunk(index, '', { finish, logprobs: logprobs(index, []) })],
    end: () => [...(call.includeUsage ? [event({ ...base, choices: [], usage: usage() })] : []), DONE],
    error: openaiErrorEvents,
    body: (choices) => ({
      ...base,
      choices: choices.map(({ answer, finish }, index) => ({
        index,
        text: echoOf(index) + answer.content,
        logprobs: joined(echoed(index), logprobs(index, answer.logged)),
        finish_reason: finish.reason,
        matched_stop: finish.matchedStop,
      })),
      usage: usage(),
      system_fingerprint: null,
    }),
  };
}
