/**
 * One request that generates, from its plan to the end of its answer: prompts to tokens, a room for each choice, tokens
 * to deltas to the wire, and exactly one end, whoever brings it about.
 */
import { randomBytes, randomInt, randomUUID } from 'node:crypto';
import { performance } from 'node:perf_hooks';
import { setImmediate as nextTurn } from 'node:timers/promises';
import type { FastifyBaseLogger, FastifyReply, FastifyRequest } from 'fastify';
import { createChatParser } from '../../model/chat-parser.ts';
import { CHAT_TOKENS } from '../../model/chat.ts';
import { createDetokenizer } from '../../model/tokenizer.ts';
import type { Tokenizer } from '../../model/tokenizer.ts';
import { packedChoiceBytes, unpackChoices } from '../../transfer/messages.ts';
import type { PackedChoices, TokenChoice as RoomChoice } from '../../transfer/messages.ts';
import { ApiError, errorOfReason } from '../errors.ts';
import type { RoomHandle, RoomOutcome, Rooms } from '../rooms.ts';
import type { Client } from './access.ts';
import { lengthOf, streamedAnswer, wholeAnswer } from './answer.ts';
import type { StreamLimits } from './answer.ts';
import type { AnswerHead, GenerationPlan, TokenTexts } from './dialect.ts';
import { toApiError } from './edge.ts';
import { appendDelta, createGeneration, sumDeltas } from './generation.ts';
import type { Answer, AnswerDelta, Finish, Generation, TokenChoice, TokenUsage } from './generation.ts';
import { promptTokens } from './prompts.ts';
import type { PromptReader } from './prompts.ts';
import { checkMinTokens, resolveMaxTokens } from './sampling.ts';
import type { Turn, Turns } from './turns.ts';

/** Request-level metrics, as server/metrics.ts keeps them. Durations in seconds. */
export interface RequestObserver {
  /** An HTTP exchange is over. `route` is the pattern, not the URL; 499 where the client closed first. */
  responded(route: string, status: number): void;
  /** A request was refused with 503 before anything was reserved. */
  rejected(code: string): void;
  /** The first token was written, so long after the request came. */
  firstToken(seconds: number, streaming: boolean): void;
  /** More tokens were written, so long after the same choice's previous ones. */
  betweenTokens(seconds: number): void;
  /** An admitted request ended; exactly once for each. `cancelled`: its client left or read too slowly. */
  finished(request: {
    outcome: 'stop' | 'length' | 'cancelled' | 'failed';
    seconds: number;
    streaming: boolean;
    promptTokens: number;
    generatedTokens: number;
  }): void;
  /** A choice that was held to a schema or a tool ended; `cut`: before it was complete. */
  constrained(outcome: 'met' | 'cut' | 'violated'): void;
}

/** A request being answered, as closeApp and operators see it. */
export interface Exchange {
  /** The id in its answer, the one its client gave it (`x-request-id`) or was given, and its `rid`. */
  readonly ids: readonly string[];
  /** Whose it is. */
  readonly client: Client;
  /** End it now with this error, before or after its headers. */
  abort(error: ApiError): void;
}

/** What requests are served with. */
export interface ServeContext extends PromptReader {
  rooms: Rooms;
  limits: Readonly<StreamLimits>;
  log: FastifyBaseLogger;
  observe: RequestObserver;
  turns: Turns;
  /** When a token came last, by performance.now(). */
  lastTokenMs: number;
  /** Set by closeApp: nothing new is taken. */
  draining: boolean;
  /** Requests being answered. */
  exchanges: Set<Exchange>;
  /** Ids (`rid`) that clients gave to requests being answered. */
  requestIds: Set<string>;
  /** Set by closeApp: called when the last of them has ended. */
  whenIdle: (() => void) | null;
}

/** How a request ended, in its log line. */
type RequestEnd = Finish['reason'] | 'rejected' | 'failed' | 'client_lost' | 'slow_client';

/** The same as a metric: a tool call is an answer that stopped; a request that was refused was never admitted. */
const measuredOutcome = {
  stop: 'stop',
  tool_calls: 'stop',
  length: 'length',
  failed: 'failed',
  client_lost: 'cancelled',
  slow_client: 'cancelled',
  rejected: null,
} as const satisfies Record<RequestEnd, Parameters<RequestObserver['finished']>[0]['outcome'] | null>;

/** What comes with tokens, where it was asked for. */
interface TokensTold {
  readonly choices: readonly RoomChoice[] | undefined;
  readonly promptChoices: PackedChoices | undefined;
}

/** Most bytes of `PackedChoices` of the prompts of a request: those of one travel in one message. */
const MAX_PROMPT_LOG_BYTES = 2 << 20;

/** One answer to one prompt. */
interface Choice {
  readonly promptTokens: readonly number[];
  /** Of its prompt's tokens but the first, once they are known; empty where nobody asks. */
  promptChoices: readonly TokenChoice[];
  readonly maxTokens: number;
  readonly generation: Generation;
  /** The answer so far, where it is held to something. */
  readonly deltas: AnswerDelta[];
  /** Tokens of the prompt that its room did not have to compute. */
  cachedTokens: number;
  handle: RoomHandle | null;
  isOver: boolean;
  lastTokensMs: number | null;
}

/** Answer one request; rejects with what the error handler is to send. */
export async function serveGeneration(
  context: ServeContext,
  { request, reply, client }: { request: FastifyRequest; reply: FastifyReply; client: Client },
  makePlan: () => GenerationPlan,
): Promise<FastifyReply> {
  const { observe } = context;
  const startMs = performance.now();
  const secondsSince = (ms: number) => (performance.now() - ms) / 1000;
  if (context.draining) {
    observe.rejected('server_draining');
    throw new ApiError('server_draining', 'The server is shutting down.');
  }
  const plan = makePlan();
  const { call } = plan;
  const stopTokenIds = [...(call.ignoreEos ? [] : [context.tokenizer.eosId]), ...call.stopTokenIds];
  if (call.requestId !== null && context.requestIds.has(call.requestId)) {
    throw new ApiError('duplicate_request_id', 'Another request with this id is being answered.', { param: 'rid' });
  }
  const head: AnswerHead = {
    id: plan.idPrefix + randomUUID().replaceAll('-', ''),
    created: Math.floor(Date.now() / 1000),
    model: call.model,
  };

  // Until its prompts are encoded it is ended by leaving that; later, as `abort` says then.
  const encoding = new AbortController();
  let abort = (error: ApiError): void => encoding.abort(error);
  const exchange: Exchange = {
    client,
    ids: [head.id, request.id, ...(call.requestId === null ? [] : [call.requestId])],
    abort: (error) => abort(error),
  };
  context.exchanges.add(exchange);
  if (call.requestId !== null) context.requestIds.add(call.requestId);
  const forget = (): void => {
    context.exchanges.delete(exchange);
    if (call.requestId !== null) context.requestIds.delete(call.requestId);
  };
  // With a request body, 'close' of the request fires as soon as the body is read; that of the reply does not.
  reply.raw.once('close', () => encoding.abort());
  let made: Awaited<ReturnType<typeof makeChoices>>;
  try {
    made = await makeChoices(context, plan, stopTokenIds, encoding.signal);
    if (encoding.signal.reason instanceof ApiError) throw encoding.signal.reason;
  } catch (error) {
    forget();
    if (context.exchanges.size === 0) context.whenIdle?.();
    throw error;
  }
  const { choices, promptTokenCount } = made;
  const usage = () => sumUsage(choices, promptTokenCount);
  reply.headers(plan.headers ?? {});
  const promptIds = (choice: number) => choices[choice]?.promptTokens ?? [];
  const promptChoices = (choice: number) => choices[choice]?.promptChoices ?? [];
  const completionTokens = (choice: number) => choices[choice]?.generation.usage.completionTokens ?? 0;
  const tokens = tokenTexts(context.tokenizer);
  const dialect = plan.createDialect({ head, usage, completionTokens, promptIds, promptChoices, tokens });

  await new Promise<void>((resolve, reject) => {
    const { raw } = reply;
    let isOver = false;
    let turn: Turn | null = null;
    let hasTokens = false;
    let answerBytes = 0;
    const answer = call.stream
      ? streamedAnswer(reply, dialect, context.limits, dropSlow)
      : wholeAnswer(reply, dialect, choices.length);

    /**
     * The one end of every request; `finish` deals with the reply. Who stops a room does it after this has begun: a room
     * that is cancelled may report its end at once, and that is not what the client is told or what is counted.
     */
    function conclude(end: RequestEnd, finish: () => void): void {
      if (isOver) return;
      isOver = true;
      forget();
      finish();
      turn?.leave();
      if (context.exchanges.size === 0) context.whenIdle?.();
      const seconds = secondsSince(startMs);
      const { completionTokens } = usage();
      const outcome = measuredOutcome[end];
      if (outcome !== null) {
        const streaming = call.stream;
        const generatedTokens = completionTokens;
        observe.finished({ outcome, seconds, streaming, promptTokens: promptTokenCount, generatedTokens });
      }
      context.log.info(
        {
          requestId: head.id,
          clientRequestId: request.id,
          end,
          stream: call.stream,
          seconds,
          choiceCount: choices.length,
          promptTokenCount,
          completionTokenCount: completionTokens,
        },
        'request ended',
      );
    }

    /** A choice has its finish. The request ends with the last of them. */
    function succeed(index: number, choice: Choice, finish: Finish): void {
      choice.isOver = true;
      const violation = violationOf(choice, finish);
      if (violation !== null) {
        fail(violation);
        return cancelRooms('client_cancel');
      }
      answer.finish(index, finish);
      // Writing may have found the reader too slow, which ended the request.
      if (isOver || choices.some((each) => !each.isOver)) return;
      conclude(finish.reason, () => {
        answer.end();
        resolve();
      });
    }

    /** Whether a choice is what it was held to. What the client's own stop cuts off is the client's. */
    function violationOf(choice: Choice, { reason, matchedStop }: Finish): ApiError | null {
      if (plan.constraint === undefined) return null;
      const isComplete = reason !== 'length' && (matchedStop === null || matchedStop === context.tokenizer.eosId);
      const fault = isComplete ? plan.constraint.check(constrainedPart(choice.deltas, plan)) : null;
      observe.constrained(fault !== null ? 'violated' : isComplete ? 'met' : 'cut');
      if (fault === null) return null;
      context.log.error({ requestId: head.id, fault }, 'an answer is not what it was held to');
      return new ApiError('invalid_answer', `The model's answer ${fault}: it is not what the request asks for.`);
    }

    function fail(error: ApiError, end: 'rejected' | 'failed' = 'failed'): void {
      conclude(end, () => {
        if (answer.fail(error)) resolve();
        else reject(error);
      });
    }

    function cancelRooms(reason: Parameters<RoomHandle['cancel']>[0]): void {
      for (const choice of choices) {
        if (!choice.isOver) choice.handle?.cancel(reason);
      }
    }

    /** Nobody listens any more: stop the rooms and let go of the socket. */
    function lose(end: 'client_lost' | 'slow_client'): void {
      conclude(end, () => {
        cancelRooms('client_lost');
        answer.drop();
        resolve();
      });
    }

    /** The reader is too slow, perhaps for an answer that is complete. */
    function dropSlow(): void {
      if (isOver) answer.drop();
      else lose('slow_client');
    }

    function noted(choice: Choice, deltas: AnswerDelta[]): AnswerDelta[] {
      if (plan.constraint !== undefined) for (const delta of deltas) appendDelta(choice.deltas, delta);
      return deltas;
    }

    function takeTokens(index: number, choice: Choice, ids: number[], told: TokensTold): void {
      if (isOver || choice.isOver || ids.length === 0) return;
      const { choices, promptChoices } = told;
      if (call.sampling.promptLogprobs && choice.lastTokensMs === null) {
        choice.promptChoices = readPromptChoices(choice.promptTokens, call.sampling.logprobs ?? 0, promptChoices);
      }
      if (choice.maxTokens === 0) return endEmpty(index, choice);
      const deltas = choice.generation.push(ids, choices && ids.map((id, at) => tokenChoice(id, choices[at]!)));
      answer.deltas(index, noted(choice, deltas));
      if (isOver) return;
      if (!hasTokens) observe.firstToken(secondsSince(startMs), call.stream);
      else if (choice.lastTokensMs !== null) observe.betweenTokens(secondsSince(choice.lastTokensMs));
      hasTokens = true;
      choice.lastTokensMs = performance.now();
      context.lastTokenMs = choice.lastTokensMs;
      for (const delta of deltas) answerBytes += lengthOf(delta);
      if (!call.stream && answerBytes > context.limits.maxAnswerBytes && choice.generation.finish === null) {
        answer.deltas(index, noted(choice, choice.generation.end('length')));
      }
      const { finish } = choice.generation;
      if (finish === null) return;
      // The client has its whole answer; there is no need to wait until the room has unwound.
      succeed(index, choice, finish);
      choice.handle?.cancel('stop_string');
    }

    function takeEnd(index: number, choice: Choice, outcome: RoomOutcome): void {
      if (isOver || choice.isOver) return;
      switch (outcome.kind) {
        case 'stop':
        case 'length':
          answer.deltas(index, noted(choice, choice.generation.end(outcome.kind)));
          if (choice.generation.finish !== null) succeed(index, choice, choice.generation.finish);
          return;
        case 'cancelled':
        case 'failed': {
          choice.isOver = true;
          fail(outcome.kind === 'failed' ? outcome.error : errorOfReason(outcome.reason));
          // The other choices would be an answer that nobody gets.
          return cancelRooms('client_cancel');
        }
        default:
          outcome satisfies never;
      }
    }

    /** Run a callback of a room. A fault of ours costs this request only, and never the others' loop. */
    function guarded(act: () => void): void {
      try {
        act();
      } catch (error) {
        context.log.error({ err: error, requestId: head.id }, 'request failed by a fault of the server');
        if (isOver) return;
        fail(new ApiError('internal_error', 'The server failed to process the answer.'));
        cancelRooms('client_lost');
      }
    }

    abort = (error) => {
      if (isOver) return;
      fail(error);
      cancelRooms('client_cancel');
    };

    /** The end of an answer of no tokens. */
    function endEmpty(index: number, choice: Choice): void {
      answer.deltas(index, choice.generation.end('length'));
      succeed(index, choice, choice.generation.finish!);
    }

    /** A room for each choice, or none at all. */
    function startRooms(): void {
      if (isOver) return;
      const seed = call.seed ?? randomInt(2 ** 32);
      for (const [index, choice] of choices.entries()) {
        if (choice.maxTokens === 0 && !call.sampling.promptLogprobs) {
          endEmpty(index, choice);
          continue;
        }
        choice.handle = context.rooms.start(
          {
            requestId: head.id,
            promptTokens: choice.promptTokens,
            sampling: {
              ...call.sampling,
              seed: (seed + (index % call.choiceCount)) >>> 0,
              ...(plan.constraint === undefined ? {} : { constraint: plan.constraint.text }),
            },
            // What is known of a prompt comes with the token behind it, whether that is wanted or not.
            maxTokens: Math.max(1, choice.maxTokens),
            stopTokenIds,
            salt: call.salt,
          },
          {
            onTokens: (ids, choices, promptChoices) =>
              guarded(() => takeTokens(index, choice, ids, { choices, promptChoices })),
            onCached: (tokenCount) => void (choice.cachedTokens = tokenCount),
            onEnd: (outcome) => guarded(() => takeEnd(index, choice, outcome)),
          },
        );
      }
    }

    raw.once('close', () => {
      if (!raw.writableFinished) lose('client_lost');
    });
    if (raw.destroyed) return lose('client_lost');
    const refuse = (error: unknown): void => {
      const refusal = toApiError(error, context.log);
      if (refusal.status === 503 || refusal.status === 429) observe.rejected(refusal.code);
      fail(refusal, 'rejected');
      cancelRooms('client_cancel');
    };
    const begin = (): void => {
      try {
        startRooms();
      } catch (error) {
        refuse(error);
      }
    };
    try {
      turn = context.turns.enter(client, choices.length, begin, refuse);
      // It may be over already: refused as it began, or without a token to wait for.
      if (isOver) turn.leave();
    } catch (error) {
      refuse(error);
    }
  });
  return reply;
}

/**
 * The choices of a request, prompt by prompt, and the tokens of its prompts, each counted once. Encoding a short prompt
 * holds the event loop, so others have their turn between two. Once `signal` is aborted, what there is so far.
 */
async function makeChoices(
  context: ServeContext,
  plan: GenerationPlan,
  stopTokenIds: number[],
  signal: AbortSignal,
): Promise<{ choices: Choice[]; promptTokenCount: number }> {
  const { call } = plan;
  const choices: Choice[] = [];
  let promptTokenCount = 0;
  let toldTokenCount = 0;
  for (const [index, prompt] of plan.prompts.entries()) {
    if (index > 0) await nextTurn();
    const ids = await promptTokens(context, prompt, plan.promptParam, signal);
    if (ids === null) break;
    promptTokenCount += ids.length;
    const room = context.contextLength - ids.length;
    const clamped = plan.clampsTokens && call.maxTokens !== null ? Math.max(1, Math.min(call.maxTokens, room)) : null;
    const limits = { tokenCount: ids.length, param: plan.promptParam, fallback: plan.fallbackTokens };
    const maxTokens = resolveMaxTokens({ maxTokens: clamped ?? call.maxTokens }, limits, context.contextLength);
    checkMinTokens(call, maxTokens);
    toldTokenCount += ids.length * call.choiceCount;
    if (call.sampling.promptLogprobs) checkPromptLog(toldTokenCount, call.sampling.logprobs ?? 0, plan.promptParam);
    for (let choice = 0; choice < call.choiceCount; choice += 1) {
      const generation = generationOf(context, plan, stopTokenIds);
      const start = { promptChoices: [], deltas: [], cachedTokens: 0, handle: null, isOver: false, lastTokensMs: null };
      choices.push({ promptTokens: ids, maxTokens, generation, ...start });
    }
  }
  return { choices, promptTokenCount };
}

/** Of an answer what is held to something: its reasoning is free, wherever the client wants it. */
function constrainedPart(deltas: readonly AnswerDelta[], { reading }: GenerationPlan): Answer {
  const answer = sumDeltas(deltas);
  if (reading.kind === 'text' || reading.reasoning !== 'inline' || !reading.thinking) return answer;
  const end = answer.content.indexOf(CHAT_TOKENS.thinkEnd);
  return { ...answer, content: end < 0 ? answer.content : answer.content.slice(end + CHAT_TOKENS.thinkEnd.length) };
}

function sumUsage(choices: readonly Choice[], promptTokenCount: number): TokenUsage {
  const sum: TokenUsage = { promptTokens: promptTokenCount, cachedTokens: 0, completionTokens: 0, reasoningTokens: 0 };
  // Choices of one prompt find in the cache what the first of them computed: only what that found was there before.
  const cached = new Map<readonly number[], number>();
  for (const choice of choices) {
    const others = cached.get(choice.promptTokens) ?? Infinity;
    cached.set(choice.promptTokens, Math.min(choice.cachedTokens, others));
  }
  for (const count of cached.values()) sum.cachedTokens += count;
  for (const { generation } of choices) {
    sum.completionTokens += generation.usage.completionTokens;
    sum.reasoningTokens += generation.usage.reasoningTokens;
  }
  return sum;
}

function generationOf(context: ServeContext, plan: GenerationPlan, stopTokenIds: number[]): Generation {
  const { tokenizer } = context;
  const { call, reading } = plan;
  const isTrimmed = (id: number) => !call.keepsStop && call.stopTokenIds.includes(id);
  const common = {
    stopTokenIds,
    stop: call.stop,
    keepsStop: call.keepsStop,
    minTokens: call.minTokens,
    newCallId: () => `call_${randomBytes(12).toString('hex')}`,
  };
  if (reading.kind === 'text') {
    return createGeneration({
      ...common,
      isHidden: (id) => isTrimmed(id) || (call.skipSpecialTokens && tokenizer.isSpecial(id)),
      detokenizer: createDetokenizer(tokenizer, { skipSpecialTokens: false }),
      parser: null,
      thinking: false,
      onlyCalls: false,
      reasoning: 'separate',
      maxToolCalls: 0,
    });
  }
  const { thinking } = reading;
  // The parser needs the text of these; other special tokens are no part of an answer.
  const marks = [CHAT_TOKENS.thinkStart, CHAT_TOKENS.thinkEnd, CHAT_TOKENS.dsml].map((text) => tokenizer.tokenId(text));
  const isHiddenMark = (id: number) => call.skipSpecialTokens && tokenizer.isSpecial(id) && !marks.includes(id);
  return createGeneration({
    ...common,
    isHidden: (id) => id === tokenizer.eosId || isTrimmed(id) || isHiddenMark(id),
    detokenizer: createDetokenizer(tokenizer, { skipSpecialTokens: false }),
    parser: createChatParser({ thinking, tools: reading.readsToolCalls }),
    thinking,
    onlyCalls: plan.constraint?.onlyCalls ?? false,
    reasoning: reading.reasoning,
    maxToolCalls: reading.maxToolCalls,
  });
}

/** @throws ApiError where more would be told of the prompts of all choices than one request may ask for. */
function checkPromptLog(tokenCount: number, topCount: number, param: string): void {
  const most = Math.floor(MAX_PROMPT_LOG_BYTES / packedChoiceBytes(topCount));
  if (tokenCount <= most) return;
  throw new ApiError(
    'invalid_value',
    `With ${topCount} of the likeliest beside each, log probabilities of at most ${most} tokens of prompts are told, over ` +
      `all choices; these have ${tokenCount}: shorten them, or ask for fewer of the likeliest or fewer choices.`,
    { param },
  );
}

/** What the room knows of its prompt, as answers show it. Throws where it is not what was asked for. */
function readPromptChoices(
  prompt: readonly number[],
  topCount: number,
  packed: PackedChoices | undefined,
): TokenChoice[] {
  const choices = unpackChoices(packed ?? new Uint8Array(0), topCount);
  if (choices.length !== prompt.length - 1) {
    throw new Error(`log probabilities of ${choices.length} tokens behind the first, of a prompt of ${prompt.length}`);
  }
  return choices.map((choice, index) => tokenChoice(prompt[index + 1]!, choice));
}

/** What the room knows of a choice, as answers show it. */
function tokenChoice(id: number, { logprob, topIds, topLogprobs }: RoomChoice): TokenChoice {
  return { id, logprob, top: topIds.map((top, rank) => ({ id: top, logprob: topLogprobs[rank]! })) };
}

function tokenTexts(tokenizer: Tokenizer): TokenTexts {
  // The same few are the likeliest again and again.
  const texts = new Map<number, string>();
  return {
    bytes: (id) => tokenizer.tokenBytes(id),
    text(id) {
      const text = texts.get(id) ?? tokenizer.decode([id]);
      texts.set(id, text);
      return text;
    },
    textOf: (ids) => tokenizer.decode(ids),
  };
}
