/**
 * What every API says of an answer, whatever its words: the contract between the answer's two forms on the wire
 * (answer.ts) and the files that word them (chat.ts, completions.ts and their neighbours). Pure.
 */
import type { Conversation } from '../../model/chat.ts';
import type { ApiError, ErrorBody } from '../errors.ts';
import { errorBody } from '../errors.ts';
import type { PackedConstraint } from './constraints.ts';
import type { Answer, AnswerDelta, Finish, LoggedToken, TokenChoice, TokenUsage } from './generation.ts';
import type { GenerationCall } from './sampling.ts';

/** Identity of one answer, the same in its body and in all of its events. */
export interface AnswerHead {
  id: string;
  /** Unix time in seconds. */
  created: number;
  model: string;
}

/** The end of one choice, or the whole of it. */
export interface FinishedChoice {
  answer: Answer;
  /** The same in the order it came. */
  deltas: readonly AnswerDelta[];
  finish: Finish;
}

/** Bytes and text of tokens, for those who want to see them one by one. */
export interface TokenTexts {
  bytes(id: number): Uint8Array;
  /** The text of several together. */
  textOf(ids: readonly number[]): string;
  /** The bytes as text, with replacement characters where they are no whole text. */
  text(id: number): string;
}

/** What a dialect knows of its request beside the call itself. `usage` is that of all choices so far. */
export interface DialectContext {
  head: AnswerHead;
  usage: () => TokenUsage;
  /** Tokens of one choice so far. */
  completionTokens: (choice: number) => number;
  tokens: TokenTexts;
  /** Token ids of the prompt of a choice. */
  promptIds: (choice: number) => readonly number[];
  /** Of those but the first, where it was asked for and is known. */
  promptChoices: (choice: number) => readonly TokenChoice[];
}

/** How one API words one answer: as events while it grows, or as a whole. Keeps the state of its stream. */
export interface Dialect {
  /** Events for more of a choice, each complete; the first call for a choice opens it. */
  delta(choice: number, delta: AnswerDelta): string[];
  /** Events for the end of a choice; comes once for each, and opens a choice that has no deltas. */
  finish(choice: number, finish: Finish): string[];
  /** Events behind the end of the last choice. */
  end(): string[];
  /** Events for an error after the headers; nothing follows. */
  error(error: ApiError): string[];
  /** The whole answer, choices in their order. */
  body(choices: readonly FinishedChoice[]): object;
}

/** How the text of an answer is read. */
export type AnswerReading =
  | { kind: 'text' }
  | {
      kind: 'chat';
      /** Whether the answer begins as reasoning. */
      thinking: boolean;
      reasoning: 'separate' | 'inline' | 'hidden';
      /** Whether the answer is read for tool calls at all. */
      readsToolCalls: boolean;
      /** How many tool calls the answer may hold; 0 where the client wants none (`tool_choice: "none"`). */
      maxToolCalls: number;
    };

/** One prompt: text, token ids as they stand, or a conversation to be rendered. */
export type Prompt =
  | { kind: 'text'; text: string }
  | { kind: 'ids'; ids: number[] }
  | { kind: 'conversation'; conversation: Conversation };

/** One checked request, ready to be served whatever API it came by. */
export interface GenerationPlan {
  call: GenerationCall;
  /** Ids of answers begin with it. */
  idPrefix: string;
  /** More headers of the response. */
  headers?: Readonly<Record<string, string>>;
  /** At least one. Choices are numbered prompt by prompt. */
  prompts: readonly Prompt[];
  /** The field that holds the prompt, for errors. */
  promptParam: string;
  /** Tokens of an answer when none are asked for; the rest of the context bounds them. */
  fallbackTokens: number;
  /** Whether more tokens than fit the context are cut down rather than refused. */
  clampsTokens: boolean;
  reading: AnswerReading;
  /** What the answer is held to; absent: it is free. */
  constraint?: PackedConstraint | undefined;
  createDialect(context: DialectContext): Dialect;
}

/** One server-sent event. `data` is JSON, or text that is sent as it stands. */
export function event(data: object | string, name?: string): string {
  const text = typeof data === 'string' ? data : JSON.stringify(data);
  return `${name === undefined ? '' : `event: ${name}\n`}data: ${text}\n\n`;
}

/** The mark that ends a stream of the OpenAI API. */
export const DONE = event('[DONE]');

/** An error in a stream of the OpenAI API, and its end. */
export function openaiErrorEvents(error: ApiError): string[] {
  return [event(errorBody(error) satisfies ErrorBody), DONE];
}

/** Usage as OpenAI words it. */
export function usageBody(usage: TokenUsage) {
  return {
    prompt_tokens: usage.promptTokens,
    completion_tokens: usage.completionTokens,
    total_tokens: usage.promptTokens + usage.completionTokens,
    prompt_tokens_details: { cached_tokens: usage.cachedTokens },
    completion_tokens_details: { reasoning_tokens: usage.reasoningTokens },
  };
}

/** JSON has no infinity: less likely tokens are all this unlikely. */
const leastLogprob = -9999;

/** A logarithm that JSON can hold. */
export function finiteLogprob(logprob: number): number {
  return logprob >= leastLogprob ? logprob : leastLogprob;
}

/** Choices of tokens as chat answers show them. */
export function logprobsBody(logged: readonly LoggedToken[], tokens: TokenTexts) {
  const entry = ({ id, logprob }: { id: number; logprob: number }) => ({
    token: tokens.text(id),
    logprob: finiteLogprob(logprob),
    bytes: [...tokens.bytes(id)],
  });
  return {
    content: logged.map((token) => ({ ...entry(token), top_logprobs: token.top.map(entry) })),
    refusal: null,
  };
}
