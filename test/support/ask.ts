/**
 * The HTTP side in this process, without sockets or a model: a request goes in, the test says what the model writes,
 * the response comes out. Tokens come in steps of a given size, so that one answer can be tried under every split.
 */
import assert from 'node:assert/strict';
import { pino } from 'pino';
import { loadChatEncoding } from '../../model/chat.ts';
import { loadTokenizer } from '../../model/tokenizer.ts';
import type { ApiError } from '../../server/errors.ts';
import { closeApp, createApp, defaultHttpLimits } from '../../server/http.ts';
import type { AppOptions } from '../../server/http.ts';
import { createAdminGate } from '../../server/operators/admin.ts';
import type { RoomOutcome, RoomRequest } from '../../server/rooms.ts';
import { packChoices, type TokenChoice } from '../../transfer/messages.ts';

const modelDirectory = 'model/nano';

/** The embedded model's. */
export const tokenizer = loadTokenizer(modelDirectory);

/** What the model writes: text with its special tokens, or token ids. A text that ends in `stop` gets its end token. */
export interface Output {
  text?: string;
  ids?: readonly number[];
  outcome?: 'stop' | 'length';
  /** The room fails with this when the tokens are out, and has no outcome. */
  error?: ApiError;
  /** Tokens that a step brings; all at once when left out. */
  step?: number;
}

/** One tool call as clients put it together from the chunks of a stream. */
export interface StreamedCall {
  id: string;
  type: string;
  name: string;
  arguments: string;
}

/** A choice put together from the chunks of a stream. */
export interface StreamedChoice {
  content: string;
  reasoning: string;
  calls: StreamedCall[];
  finishes: (string | null)[];
}

/** A response, and what the room of its first choice was asked for; null if nothing came to a room. */
export interface Response {
  status: number;
  headers: Record<string, unknown>;
  body: string;
  room: RoomRequest | null;
}

/** An app whose rooms answer as the test says. */
export interface Asked {
  /** POST `body`; choice number n is answered with `outputs[n]`, the last one standing for those after it. */
  post(path: string, body: object | string, ...outputs: Output[]): Promise<Response>;
  /** The same with headers of the test's own, and no output: for requests that come to no room. */
  postWith(headers: Record<string, string>, path: string, body: object | string): Promise<Response>;
  close(): Promise<void>;
}

/** Make such an app. */
export function openApp(options: Partial<AppOptions> = {}): Asked {
  let outputs: Output[] = [];
  let requests: RoomRequest[] = [];
  const app = createApp({
    rooms: {
      ready: () => true,
      start(request, sink) {
        const output = outputs[Math.min(requests.length, outputs.length - 1)];
        assert.ok(output !== undefined, 'a room was started without an output for it');
        requests.push(request);
        let isCancelled = false;
        setImmediate(() => {
          const ids = idsOf(output).slice(0, request.maxTokens);
          const step = output.step ?? Math.max(1, ids.length);
          for (let start = 0; start < ids.length && !isCancelled; start += step) {
            const part = ids.slice(start, start + step);
            const { logprobs: topCount } = request.sampling;
            if (topCount === undefined) sink.onTokens(part);
            else
              sink.onTokens(
                part,
                part.map((id, index) => choiceOf(id, start + index, topCount)),
                start === 0 && request.sampling.promptLogprobs
                  ? packChoices(promptChoicesOf(request.promptTokens, topCount), topCount)
                  : undefined,
              );
          }
          const end: RoomOutcome =
            output.error === undefined ? { kind: output.outcome ?? 'stop' } : { kind: 'failed', error: output.error };
          if (!isCancelled) sink.onEnd(end);
        });
        return { cancel: () => void (isCancelled = true) };
      },
    },
    tokenizer,
    chat: loadChatEncoding(modelDirectory),
    modelId: 'nano',
    contextLength: 4096,
    limits: defaultHttpLimits,
    apiKeys: [],
    version: '0.0.0',
    fleet: () => [],
    capacity: () => ({ running: 64, waiting: 64 }),
    log: pino({ level: 'silent' }),
    gate: createAdminGate('test-key'),
    debugPage: () => Promise.reject(new Error('asked for by no test here')),
    flushCache: () => Promise.resolve(0),
    metricsText: () => Promise.resolve(''),
    observe: { responded() {}, rejected() {}, firstToken() {}, betweenTokens() {}, constrained() {}, finished() {} },
    ...options,
  });
  async function postWith(headers: Record<string, string>, path: string, body: object | string): Promise<Response> {
    requests = [];
    const payload = typeof body === 'string' ? body : JSON.stringify(body);
    const response = await app.inject({ method: 'POST', url: path, headers, payload });
    return {
      status: response.statusCode,
      headers: response.headers,
      body: response.body,
      room: requests[0] ?? null,
    };
  }

  return {
    post(path, body, ...given) {
      outputs = given;
      return postWith({ 'content-type': 'application/json' }, path, body);
    },
    postWith,
    close: () => closeApp(app, 0),
  };
}

/** What such a room knows of the choice of `id` as token number `position` of its answer: of no two tokens the same. */
export function choiceOf(id: number, position: number, topCount: number): TokenChoice {
  const topIds = Array.from({ length: topCount }, (_, rank) => (7 * (id + position) + rank) % tokenizer.vocabSize);
  return { logprob: -(position + 1) / 8, topIds, topLogprobs: topIds.map((_, rank) => -rank - (position + 1) / 16) };
}

/** What such a room knows of the tokens of a prompt but the first. */
export function promptChoicesOf(prompt: readonly number[], topCount: number): TokenChoice[] {
  return prompt.slice(1).map((id, index) => choiceOf(id, 100 + index, topCount));
}

function idsOf({ text = '', ids, outcome = 'stop' }: Output): readonly number[] {
  return ids ?? [...tokenizer.encode(text), ...(outcome === 'stop' ? [tokenizer.eosId] : [])];
}

/** The chunks of a stream, which must end with the mark of the OpenAI API. */
export function chunksOf(body: string): StreamChunk[] {
  const events = body.split('\n').filter((line) => line !== '');
  assert.equal(events.at(-1), 'data: [DONE]');
  return events.slice(0, -1).map((line) => JSON.parse(line.replace(/^data: /, '')) as StreamChunk);
}

/** As much of a chat chunk as tests look at. */
export interface StreamChunk {
  choices: {
    index: number;
    delta: {
      role?: string;
      content?: string;
      reasoning_content?: string;
      tool_calls?: { index: number; id?: string; type?: string; function: { name?: string; arguments: string } }[];
    };
    logprobs: { content: LoggedEntry[] } | null;
    finish_reason: string | null;
  }[];
}

/** One token in a list of log probabilities of a chat answer. */
export interface LoggedEntry {
  token: string;
  logprob: number;
  bytes: number[];
  top_logprobs: { token: string; logprob: number; bytes: number[] }[];
}

/** The log probabilities of each choice of a chat stream, in the order they came. */
export function assembleLogprobs(chunks: readonly StreamChunk[]): LoggedEntry[][] {
  const choices: LoggedEntry[][] = [];
  for (const { index, logprobs } of chunks.flatMap((chunk) => chunk.choices)) {
    (choices[index] ??= []).push(...(logprobs?.content ?? []));
  }
  return choices;
}

/** Put the choices of a chat stream together the way clients do, by their indices. */
export function assemble(chunks: readonly StreamChunk[]): StreamedChoice[] {
  const choices: StreamedChoice[] = [];
  for (const { index, delta, finish_reason: finish } of chunks.flatMap((chunk) => chunk.choices)) {
    const choice = (choices[index] ??= { content: '', reasoning: '', calls: [], finishes: [] });
    choice.content += delta.content ?? '';
    choice.reasoning += delta.reasoning_content ?? '';
    if (finish !== null) choice.finishes.push(finish);
    for (const { index: at, id, type, function: called } of delta.tool_calls ?? []) {
      if (id !== undefined) {
        assert.equal(choice.calls[at], undefined, 'a call began twice');
        choice.calls[at] = { id, type: type ?? '', name: called.name ?? '', arguments: '' };
      }
      const call = choice.calls[at];
      assert.ok(call !== undefined, 'arguments of a call that has not begun');
      call.arguments += called.arguments;
    }
  }
  return choices;
}
