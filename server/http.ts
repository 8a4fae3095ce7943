/**
 * The router's HTTP side: the OpenAI routes, answers as a whole or as a stream of events, and everything
 * that must not be got wrong at a socket: a client that leaves, one that reads too slowly, errors before
 * and after the headers, and closing down.
 *
 *     body ─ openai.ts ─▶ call ─ chat, tokenizer ─▶ prompt tokens ─▶ rooms.start
 *     socket ◀─ chunks ─ openai.ts ◀─ deltas ─ generation.ts ◀─ tokens ─┘
 *
 * Headers are held back until there is something to send, so that an error before the first token has its
 * true status. Everything the app needs is handed to `createApp`; nothing here is global.
 */
import { isUtf8 } from 'node:buffer';
import { randomBytes, randomInt, randomUUID } from 'node:crypto';
import type { IncomingMessage } from 'node:http';
import type { Socket } from 'node:net';
import { performance } from 'node:perf_hooks';
import { fastify, LogController } from 'fastify';
import type { FastifyBaseLogger, FastifyInstance, FastifyReply, FastifyRequest } from 'fastify';
import { createChatParser } from '../model/chat-parser.ts';
import { CHAT_TOKENS, ChatError, promptText, renderChat } from '../model/chat.ts';
import type { ChatEncoding, Conversation } from '../model/chat.ts';
import { parseJsonValue } from '../model/json-text.ts';
import { createDetokenizer } from '../model/tokenizer.ts';
import type { PromptPiece, Tokenizer } from '../model/tokenizer.ts';
import { streamedAnswer, wholeAnswer } from './answer.ts';
import type { StreamLimits } from './answer.ts';
import type { AdminGate } from './operators/admin.ts';
import type { RouterPage } from './operators/debug-page.ts';
import { ApiError, errorBody, errorOfReason } from './errors.ts';
import type { ErrorCode } from './errors.ts';
import { isObject } from './fields.ts';
import type { JsonObject } from './fields.ts';
import { createGeneration } from './generation.ts';
import type { Finish, Generation } from './generation.ts';
import {
  createChunkWriter,
  modelBody,
  modelNotFound,
  parseChatRequest,
  parseCompletionRequest,
  parseDetokenizeRequest,
  parseTokenizeRequest,
  resolveMaxTokens,
} from './openai.ts';
import type { AnswerHead, ChatCall, CompletionCall, ServedModel } from './openai.ts';
import type { RoomHandle, RoomOutcome, Rooms } from './rooms.ts';

/** Request-level metrics, as server/metrics.ts keeps them. Durations in seconds. */
export interface RequestObserver {
  /** An HTTP exchange is over. `route` is the pattern, not the URL; 499 where the client closed first. */
  responded(route: string, status: number): void;
  /** A request was refused with 503 before anything was reserved. */
  rejected(code: string): void;
  /** The first token was written, so long after the request came. */
  firstToken(seconds: number, streaming: boolean): void;
  /** More tokens were written, so long after the same request's previous ones. */
  betweenTokens(seconds: number): void;
  /** An admitted request ended; exactly once for each. `cancelled`: its client left or read too slowly. */
  finished(request: {
    outcome: 'stop' | 'length' | 'cancelled' | 'failed';
    seconds: number;
    streaming: boolean;
    promptTokens: number;
    generatedTokens: number;
  }): void;
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

/** What one client may cost. */
export interface HttpLimits extends StreamLimits {
  /** Longest request body. */
  maxBodyBytes: number;
  /** A request must have arrived as a whole after this time. */
  requestTimeoutMs: number;
}

/** Limits where nothing else is configured. undici gives up after 300 s without a byte; heartbeats stay below that. */
export const defaultHttpLimits: Readonly<HttpLimits> = {
  maxBodyBytes: 64 * 1024 * 1024,
  requestTimeoutMs: 60_000,
  maxBufferedBytes: 1024 * 1024,
  slowClientMs: 60_000,
  firstByteMs: 60_000,
  heartbeatMs: 15_000,
};

/** All that the app works with. */
export interface AppOptions {
  rooms: Rooms;
  tokenizer: Tokenizer;
  chat: ChatEncoding;
  /** The name clients know the model by. */
  modelId: string;
  /** Tokens that prompt and answer may have together. */
  contextLength: number;
  limits: Readonly<HttpLimits>;
  log: FastifyBaseLogger;
  /** The text of GET /metrics. */
  metricsText: () => Promise<string>;
  /** Who may ask for what is an operator's. */
  gate: AdminGate;
  /** The body of GET /debug/rooms. */
  debugPage: (draining: boolean) => Promise<RouterPage>;
  observe: RequestObserver;
  /** What requests get that do not say: thinking on, temperature 1, top_p 1 unless given here. */
  defaults?: { thinking?: boolean; temperature?: number; topP?: number };
}

/** Deepest nesting of a request body. JSON.parse would take more; walking it recursively would not. */
const maxJsonDepth = 64;

/** Connections that fell idle after closing began are looked for this often. */
const idleSweepMs = 100;

/** When `closeApp` has ended what was left, error events have this long to reach their clients. */
const closeGraceMs = 500;

/** Retry-After is spread over up to twice its value, at most this, so that clients do not return in step. */
const maxRetryAfterSeconds = 30;

/** What is shared by all requests of one app. */
interface AppContext extends AppOptions {
  served: ServedModel;
  /** Unix time in seconds at which the app was made. */
  createdSeconds: number;
  /** No token is longer; bounds the token count of a text from below before it is encoded. */
  longestTokenBytes: number;
  /** Set by closeApp: nothing new is taken. */
  draining: boolean;
  /** Requests being answered. */
  exchanges: Set<Exchange>;
  /** Set by closeApp: called when the last of them has ended. */
  whenIdle: (() => void) | null;
}

/** A request being answered, as closeApp and operators see it. */
interface Exchange {
  /** The id in its answer, and the one its client gave it (`x-request-id`) or was given. */
  readonly ids: readonly string[];
  /** End it now with this error, before or after its headers. */
  abort(error: ApiError): void;
}

const contexts = new WeakMap<FastifyInstance, AppContext>();

/** The app, ready to listen. Close it with `closeApp`. */
export function createApp(options: AppOptions): FastifyInstance {
  const { limits, log, observe, tokenizer } = options;
  const app: FastifyInstance = fastify({
    loggerInstance: log,
    logController: new LogController({ disableRequestLogging: true }),
    bodyLimit: limits.maxBodyBytes,
    requestTimeout: limits.requestTimeoutMs,
    // While closing, our own 503 is sent: it has the error shape that clients read.
    return503OnClosing: false,
    genReqId: requestIdOf,
    clientErrorHandler: answerBrokenRequest,
    frameworkErrors: (error, request, reply) => {
      void sendError(reply.header('x-request-id', request.id), toApiError(error, log));
    },
  });
  const context: AppContext = {
    ...options,
    served: {
      modelId: options.modelId,
      contextLength: options.contextLength,
      vocabSize: tokenizer.vocabSize,
      thinkingByDefault: options.defaults?.thinking ?? true,
      defaultTemperature: options.defaults?.temperature ?? 1,
      defaultTopP: options.defaults?.topP ?? 1,
    },
    createdSeconds: nowSeconds(),
    longestTokenBytes: longestTokenBytes(tokenizer),
    draining: false,
    exchanges: new Set(),
    whenIdle: null,
  };
  contexts.set(app, context);

  const allowed = new Map<string, Set<string>>();
  app.addHook('onRoute', (route) => {
    const methods = allowed.get(route.url) ?? new Set<string>();
    for (const method of [route.method].flat()) methods.add(method);
    allowed.set(route.url, methods);
  });
  app.addHook('onRequest', async (request, reply) => {
    reply.header('x-request-id', request.id);
    const { raw } = reply;
    // Not an onResponse hook: those stay silent when the client closes first.
    raw.once('close', () => {
      observe.responded(request.routeOptions.url ?? 'unknown', raw.writableFinished ? raw.statusCode : 499);
    });
  });

  app.removeAllContentTypeParsers();
  app.addContentTypeParser('application/json', { parseAs: 'buffer' }, (_request, body, done) => {
    try {
      done(null, parseBody(body as Buffer));
    } catch (error) {
      done(error as Error);
    }
  });
  app.setErrorHandler((error, _request, reply) => sendError(reply, toApiError(error, log)));
  app.setNotFoundHandler((request, reply) => answerUnknownRoute(allowed, request, reply));

  addRoutes(app, context);
  return app;
}

/**
 * Close the app: take nothing new, let running requests finish, and at `deadlineMs` end those that are
 * left with an error that says so. Resolves when every connection is closed.
 *
 * For as long as requests run it goes on listening, so that whoever asks for its readiness hears that it drains, and a
 * request that was sent here too late is told to go elsewhere instead of being refused a connection.
 */
export async function closeApp(app: FastifyInstance, deadlineMs: number): Promise<void> {
  const context = contexts.get(app);
  if (context !== undefined) {
    context.draining = true;
    await untilIdle(context, deadlineMs);
    for (const exchange of context.exchanges) {
      exchange.abort(new ApiError('server_draining', 'The server is shutting down.'));
    }
  }
  // Connections that fall idle after close() began would otherwise stay for their keep-alive time.
  const sweep = setInterval(() => app.server.closeIdleConnections(), idleSweepMs);
  const cut = setTimeout(() => app.server.closeAllConnections(), closeGraceMs);
  try {
    await app.close();
  } finally {
    clearInterval(sweep);
    clearTimeout(cut);
  }
}

/** Resolves when no request is being answered any more, at `deadlineMs` at the latest. */
function untilIdle(context: AppContext, deadlineMs: number): Promise<void> {
  if (context.exchanges.size === 0) return Promise.resolve();
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, deadlineMs);
    context.whenIdle = () => {
      clearTimeout(timer);
      resolve();
    };
  });
}

// ---------------------------------------------------------------------------------------------------------
// Routes

function addRoutes(app: FastifyInstance, context: AppContext): void {
  const { served, tokenizer } = context;

  app.post('/v1/chat/completions', (request, reply) =>
    serveGeneration(context, request, reply, () => parseChatRequest(bodyOf(request), served)),
  );
  app.post('/v1/completions', (request, reply) =>
    serveGeneration(context, request, reply, () => parseCompletionRequest(bodyOf(request), served)),
  );

  app.get('/v1/models', async () => ({ object: 'list', data: [modelBody(served, context.createdSeconds)] }));
  app.get<{ Params: { '*': string } }>('/v1/models/*', async (request) => {
    const name = request.params['*'];
    if (name !== served.modelId) throw modelNotFound(name, served);
    return modelBody(served, context.createdSeconds);
  });

  for (const path of ['/tokenize', '/v1/tokenize']) {
    app.post(path, async (request) => tokenize(context, bodyOf(request)));
  }
  for (const path of ['/detokenize', '/v1/detokenize']) {
    app.post(path, async (request) => {
      const { sequences, nested } = parseDetokenizeRequest(bodyOf(request), served);
      const texts = sequences.map((ids) => tokenizer.decode(ids));
      const value = nested ? texts : texts[0];
      return { text: value, prompt: value };
    });
  }

  app.get('/debug/rooms', async (request) => {
    context.gate(request.raw);
    return context.debugPage(context.draining);
  });

  app.post('/abort_request', async (request) => {
    const { rid, abort_all: abortAll } = bodyOf(request);
    if (abortAll === true) context.gate(request.raw);
    else if (typeof rid !== 'string' || rid === '') {
      throw new ApiError('invalid_value', 'Give the id of a request as rid, or abort_all: true.', { param: 'rid' });
    }
    return { success: true, aborted: abortRequests(context, abortAll === true ? null : (rid as string)) };
  });
  // There is no prefix cache yet, so nothing is ever kept of a request that is over.
  app.post('/flush_cache', async (request) => {
    context.gate(request.raw);
    return {
      success: true,
      flushed_pages: 0,
      message: 'This server keeps no prefix cache; there is nothing to flush.',
    };
  });

  // Alive as long as it answers; a process that cannot serve is not ready, and killing it would not help.
  app.get('/livez', async () => ({ status: 'ok' }));
  for (const path of ['/health', '/ping', '/readyz']) {
    app.get(path, async () => {
      if (context.draining) throw new ApiError('server_draining', 'The server is shutting down.');
      if (!context.rooms.ready()) {
        throw new ApiError('engine_unavailable', 'No prefill worker or no decode worker is live.');
      }
      return { status: 'ok' };
    });
  }
  for (const path of ['/metrics', '/metrics/']) {
    app.get(path, async (_request, reply) => {
      reply.header('content-type', 'text/plain; version=0.0.4; charset=utf-8');
      return context.metricsText();
    });
  }
}

/** End the requests with exactly this id, or all; returns how many there were. Both halves are told by the room. */
function abortRequests(context: AppContext, id: string | null): number {
  const found = [...context.exchanges].filter(({ ids }) => id === null || ids.includes(id));
  for (const exchange of found) exchange.abort(new ApiError('request_aborted', 'The request was aborted.'));
  return found.length;
}

/** The ids of texts, or of a conversation exactly as chat would prefill it. */
function tokenize(context: AppContext, body: JsonObject): object {
  const { tokenizer } = context;
  const call = parseTokenizeRequest(body, context.served);
  const isNested = call.kind === 'texts' && call.nested;
  const sequences =
    call.kind === 'texts'
      ? call.texts.map((text) => encode(context, text, 'prompt'))
      : [encode(context, renderPrompt(context.chat, call.conversation), 'messages')];
  const strings = sequences.map((ids) => ids.map((id) => tokenizer.decode([id])));
  return {
    tokens: isNested ? sequences : sequences[0],
    count: isNested ? sequences.map((ids) => ids.length) : sequences[0]?.length,
    max_model_len: context.contextLength,
    ...(call.returnTokenStrings ? { token_strs: isNested ? strings : strings[0] } : {}),
  };
}

/** The prompt of a conversation; a fault in it is a 400 that names the message. */
function renderPrompt(chat: ChatEncoding, conversation: Conversation): PromptPiece[] {
  try {
    return renderChat(chat, conversation);
  } catch (error) {
    if (!(error instanceof ChatError)) throw error;
    const param = error.messageIndex === null ? 'tools' : `messages[${error.messageIndex}]`;
    throw new ApiError('invalid_value', `${param}: ${error.message}.`, { param, cause: error });
  }
}

/**
 * Ids of `prompt`. A prompt that cannot fit the context is refused before it is encoded: encoding blocks the
 * event loop for about 2 µs a character, and a body may hold many millions.
 */
function encode(context: AppContext, prompt: string | readonly PromptPiece[], param: string): number[] {
  const text = typeof prompt === 'string' ? prompt : promptText(prompt);
  const leastCount = Math.ceil(text.length / context.longestTokenBytes);
  if (leastCount > context.contextLength) {
    throw new ApiError(
      'context_length_exceeded',
      `This model's maximum context length is ${context.contextLength} tokens. ` +
        `However, your prompt has at least ${leastCount} tokens. Please shorten the prompt.`,
      { param },
    );
  }
  return context.tokenizer.encode(prompt);
}

// ---------------------------------------------------------------------------------------------------------
// Answers

/** Answer one request of the routes that generate; rejects with what the error handler is to send. */
async function serveGeneration(
  context: AppContext,
  request: FastifyRequest,
  reply: FastifyReply,
  parse: () => ChatCall | CompletionCall,
): Promise<FastifyReply> {
  const { observe } = context;
  const startMs = performance.now();
  const secondsSince = (ms: number) => (performance.now() - ms) / 1000;

  if (context.draining) {
    observe.rejected('server_draining');
    throw new ApiError('server_draining', 'The server is shutting down.');
  }
  const call = parse();
  const promptTokens = promptTokensOf(context, call);
  const maxTokens = resolveMaxTokens(call, promptTokens.length, context.contextLength);
  const head: AnswerHead = {
    id: `${call.kind === 'chat' ? 'chatcmpl' : 'cmpl'}-${randomUUID().replaceAll('-', '')}`,
    created: nowSeconds(),
    model: call.model,
  };
  const stopTokenIds = [...(call.ignoreEos ? [] : [context.tokenizer.eosId]), ...call.stopTokenIds];
  const generation = generationOf(context, call, promptTokens.length, stopTokenIds);

  await new Promise<void>((resolve, reject) => {
    const { raw } = reply;
    let handle: RoomHandle | null = null;
    let isOver = false;
    let lastTokensMs: number | null = null;
    const answer = call.stream
      ? streamedAnswer(reply, createChunkWriter(head, call), generation.usage, context.limits, dropSlow)
      : wholeAnswer(reply, call, head, generation.usage);

    /**
     * The one end of every request; `finish` deals with the reply. Who stops a room does it after this has begun: a room
     * that is cancelled may report its end at once, and that is not what the client is told or what is counted.
     */
    function conclude(end: RequestEnd, finish: () => void): void {
      if (isOver) return;
      isOver = true;
      context.exchanges.delete(exchange);
      finish();
      if (context.exchanges.size === 0) context.whenIdle?.();
      const seconds = secondsSince(startMs);
      const { completionTokens } = generation.usage;
      const outcome = measuredOutcome[end];
      if (outcome !== null) {
        const streaming = call.stream;
        const generatedTokens = completionTokens;
        observe.finished({ outcome, seconds, streaming, promptTokens: promptTokens.length, generatedTokens });
      }
      context.log.info(
        {
          requestId: head.id,
          clientRequestId: request.id,
          end,
          stream: call.stream,
          seconds,
          promptTokenCount: promptTokens.length,
          completionTokenCount: completionTokens,
        },
        'request ended',
      );
    }

    function succeed(finish: Finish): void {
      conclude(finish.reason, () => {
        answer.finish(finish);
        resolve();
      });
    }

    function fail(error: ApiError, end: 'rejected' | 'failed' = 'failed'): void {
      conclude(end, () => {
        if (answer.fail(error)) resolve();
        else reject(error);
      });
    }

    /** Nobody listens any more: stop the room and let go of the socket. */
    function lose(end: 'client_lost' | 'slow_client'): void {
      conclude(end, () => {
        handle?.cancel('client_lost');
        answer.drop();
        resolve();
      });
    }

    /** The reader is too slow, perhaps for an answer that is complete. */
    function dropSlow(): void {
      if (isOver) answer.drop();
      else lose('slow_client');
    }

    function takeTokens(ids: number[]): void {
      if (isOver || ids.length === 0) return;
      answer.deltas(generation.push(ids));
      if (isOver) return;
      if (lastTokensMs === null) observe.firstToken(secondsSince(startMs), call.stream);
      else observe.betweenTokens(secondsSince(lastTokensMs));
      lastTokensMs = performance.now();
      if (generation.finish === null) return;
      // The client has its whole answer; there is no need to wait until the room has unwound.
      succeed(generation.finish);
      handle?.cancel('stop_string');
    }

    function takeEnd(outcome: RoomOutcome): void {
      if (isOver) return;
      switch (outcome.kind) {
        case 'stop':
        case 'length':
          answer.deltas(generation.end(outcome.kind));
          if (generation.finish !== null) succeed(generation.finish);
          return;
        case 'cancelled':
          return fail(errorOfReason(outcome.reason));
        case 'failed':
          return fail(outcome.error);
        default:
          outcome satisfies never;
      }
    }

    /** Run a callback of the room. A fault of ours costs this request only, and never the others' loop. */
    function guarded(act: () => void): void {
      try {
        act();
      } catch (error) {
        context.log.error({ err: error, requestId: head.id }, 'request failed by a fault of the server');
        if (isOver) return;
        fail(new ApiError('internal_error', 'The server failed to process the answer.'));
        handle?.cancel('client_lost');
      }
    }

    const exchange: Exchange = {
      ids: [head.id, request.id],
      abort(error) {
        if (isOver) return;
        fail(error);
        handle?.cancel('client_cancel');
      },
    };

    // With a request body, 'close' of the request fires as soon as the body is read; that of the reply does not.
    raw.once('close', () => {
      if (!raw.writableFinished) lose('client_lost');
    });
    if (raw.destroyed) return lose('client_lost');
    try {
      handle = context.rooms.start(
        {
          requestId: head.id,
          promptTokens,
          sampling: { ...call.sampling, seed: call.seed ?? randomInt(2 ** 32) },
          maxTokens,
          stopTokenIds,
        },
        {
          onTokens: (ids) => guarded(() => takeTokens(ids)),
          onEnd: (outcome) => guarded(() => takeEnd(outcome)),
        },
      );
      context.exchanges.add(exchange);
    } catch (error) {
      const refusal = toApiError(error, context.log);
      if (refusal.status === 503) observe.rejected(refusal.code);
      fail(refusal, 'rejected');
    }
  });
  return reply;
}

function promptTokensOf(context: AppContext, call: ChatCall | CompletionCall): number[] {
  if (call.kind === 'chat') {
    return encode(context, renderPrompt(context.chat, call.conversation), 'messages');
  }
  return typeof call.prompt === 'string' ? encode(context, call.prompt, 'prompt') : call.prompt;
}

function generationOf(
  context: AppContext,
  call: ChatCall | CompletionCall,
  promptTokenCount: number,
  stopTokenIds: number[],
): Generation {
  const { tokenizer } = context;
  const common = {
    promptTokenCount,
    stopTokenIds,
    stop: call.stop,
    newCallId: () => `call_${randomBytes(12).toString('hex')}`,
  };
  if (call.kind === 'completion') {
    return createGeneration({
      ...common,
      isHidden: (id) => call.stopTokenIds.includes(id),
      detokenizer: createDetokenizer(tokenizer, { skipSpecialTokens: call.skipSpecialTokens }),
      parser: null,
      thinking: false,
      maxToolCalls: 0,
    });
  }
  const { thinking } = call.conversation;
  // The parser needs the text of these; other special tokens are no part of an answer.
  const marks = [CHAT_TOKENS.thinkStart, CHAT_TOKENS.thinkEnd, CHAT_TOKENS.dsml].map((text) => tokenizer.tokenId(text));
  const isHiddenMark = (id: number) => call.skipSpecialTokens && tokenizer.isSpecial(id) && !marks.includes(id);
  return createGeneration({
    ...common,
    isHidden: (id) => id === tokenizer.eosId || call.stopTokenIds.includes(id) || isHiddenMark(id),
    detokenizer: createDetokenizer(tokenizer, { skipSpecialTokens: false }),
    parser: createChatParser({ thinking, tools: call.readsToolCalls }),
    thinking,
    maxToolCalls: call.maxToolCalls,
  });
}

// ---------------------------------------------------------------------------------------------------------
// Requests and errors at the edge

/** The client's own id for the request where it sent a plain one, else a new one. A label only, never a key. */
function requestIdOf(request: { headers: IncomingMessage['headers'] }): string {
  const given = request.headers['x-request-id'];
  return typeof given === 'string' && /^[\x21-\x7e]{1,128}$/.test(given) ? given : randomUUID();
}

/** A request body as JSON. Throws `ApiError` 400 for anything that is not JSON in UTF-8 or is nested too deeply. */
function parseBody(body: Buffer): unknown {
  if (!isUtf8(body)) throw new ApiError('invalid_json', 'The request body is not valid UTF-8.');
  if (nestingDepth(body) > maxJsonDepth) {
    throw new ApiError('invalid_json', `The request body is nested deeper than ${maxJsonDepth} levels.`);
  }
  const text = body.toString('utf8');
  try {
    return parseJsonValue(text.startsWith('\uFEFF') ? text.slice(1) : text);
  } catch {
    // V8's message quotes the body, which may hold a prompt.
    throw new ApiError(
      'invalid_json',
      body.length === 0 ? 'The request body is empty.' : 'The request body is not valid JSON.',
    );
  }
}

/** Deepest nesting of brackets outside strings in JSON text. */
function nestingDepth(bytes: Uint8Array): number {
  const [quote, backslash] = [0x22, 0x5c];
  let depth = 0;
  let deepest = 0;
  let inString = false;
  for (let offset = 0; offset < bytes.length; offset += 1) {
    const byte = bytes[offset];
    if (inString) {
      if (byte === backslash) offset += 1;
      else if (byte === quote) inString = false;
    } else if (byte === quote) inString = true;
    else if (byte === 0x5b || byte === 0x7b) deepest = Math.max(deepest, (depth += 1));
    else if (byte === 0x5d || byte === 0x7d) depth -= 1;
  }
  return deepest;
}

function bodyOf(request: FastifyRequest): JsonObject {
  const { body } = request;
  if (body === undefined) throw new ApiError('invalid_json', 'The request body is empty.');
  if (!isObject(body)) throw new ApiError('invalid_json', 'The request body must be a JSON object.');
  return body;
}

/** Codes of fastify's own errors that have one of ours. */
const frameworkCodes: Record<string, { code: ErrorCode; message: string }> = {
  FST_ERR_CTP_BODY_TOO_LARGE: { code: 'request_too_large', message: 'The request body is too large.' },
  FST_ERR_CTP_INVALID_MEDIA_TYPE: {
    code: 'unsupported_media_type',
    message: 'Send the request body as content-type application/json.',
  },
  FST_ERR_BAD_URL: { code: 'bad_request', message: 'The URL is malformed.' },
};

/** `error` as the client may see it. What we did not expect is logged here and tells the client nothing. */
function toApiError(error: unknown, log: FastifyBaseLogger): ApiError {
  if (error instanceof ApiError) return error;
  const { code, statusCode } = (typeof error === 'object' && error !== null ? error : {}) as {
    code?: unknown;
    statusCode?: unknown;
  };
  const known = typeof code === 'string' ? frameworkCodes[code] : undefined;
  if (known !== undefined) return new ApiError(known.code, known.message, { cause: error });
  if (typeof statusCode === 'number' && statusCode >= 400 && statusCode < 500) {
    return new ApiError('bad_request', 'The request could not be read.', { cause: error });
  }
  log.error({ err: error }, 'request failed by a fault of the server');
  return new ApiError('internal_error', 'The server had an internal error.', { cause: error });
}

function sendError(reply: FastifyReply, error: ApiError): FastifyReply {
  if (error.retryAfterSeconds !== null) reply.header('retry-after', spreadRetryAfter(error.retryAfterSeconds));
  if (error.status === 499) reply.header('x-should-retry', 'false');
  // The rest of a body that is too large is not read, so the connection cannot be used again.
  if (error.status === 413) reply.header('connection', 'close');
  return reply.code(error.status).type('application/json; charset=utf-8').send(errorBody(error));
}

/** Between the given time and twice of it, so that clients refused together do not return together. */
function spreadRetryAfter(seconds: number): number {
  const least = Math.max(1, Math.ceil(seconds));
  return Math.min(maxRetryAfterSeconds, least + randomInt(least + 1));
}

/** 405 where the path exists under another method, else 404. */
function answerUnknownRoute(
  allowed: ReadonlyMap<string, ReadonlySet<string>>,
  request: FastifyRequest,
  reply: FastifyReply,
): FastifyReply {
  const path = request.url.split('?', 1)[0]!;
  for (const [pattern, methods] of allowed) {
    const isMatch = pattern.endsWith('*') ? path.startsWith(pattern.slice(0, -1)) : path === pattern;
    if (!isMatch) continue;
    const allow = [...methods].join(', ');
    reply.header('allow', allow);
    return sendError(
      reply,
      new ApiError('method_not_allowed', `${request.method} is not allowed here; allowed: ${allow}.`),
    );
  }
  const shown = `${request.method} ${path.slice(0, 64)}`;
  return sendError(reply, new ApiError('not_found', `${shown} is not an endpoint of this server.`));
}

/** Answer bytes that are no HTTP request, or a request that did not arrive in time. */
function answerBrokenRequest(error: Error & { code?: string }, socket: Socket): void {
  if (error.code === 'ECONNRESET' || !socket.writable) {
    socket.destroy();
    return;
  }
  const answers: Record<string, ApiError> = {
    ERR_HTTP_REQUEST_TIMEOUT: new ApiError('request_timeout', 'The request did not arrive in time.'),
    HPE_HEADER_OVERFLOW: new ApiError('headers_too_large', 'The request headers are too large.'),
  };
  const answer = answers[error.code ?? ''] ?? new ApiError('bad_request', 'The request is not valid HTTP.');
  const body = JSON.stringify(errorBody(answer));
  const head = `HTTP/1.1 ${answer.status} Error\r\ncontent-type: application/json; charset=utf-8\r\n`;
  socket.end(`${head}content-length: ${Buffer.byteLength(body)}\r\nconnection: close\r\n\r\n${body}`);
}

function nowSeconds(): number {
  return Math.floor(Date.now() / 1000);
}

function longestTokenBytes(tokenizer: Tokenizer): number {
  let longest = 1;
  for (let id = 0; id < tokenizer.vocabSize; id += 1) longest = Math.max(longest, tokenizer.tokenBytes(id).length);
  return longest;
}
