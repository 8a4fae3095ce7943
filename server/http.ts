/**
 * The router's HTTP side: the OpenAI routes, answers as a whole or as a stream of events, and everything
 * that must not be got wrong at a socket: a client that leaves, one that reads too slowly, errors before
 * and after the headers, and closing down.
 *
 *     body ─ chat.ts ─▶ plan ─ chat, tokenizer ─▶ prompt tokens ─▶ rooms.start
 *     socket ◀─ events ─ chat.ts ◀─ deltas ─ generation.ts ◀─ tokens ─┘
 *
 * Headers are held back until there is something to send, so that an error before the first token has its
 * true status. Everything the app needs is handed to `createApp`; nothing here is global.
 */
import { fastify, LogController } from 'fastify';
import type { FastifyBaseLogger, FastifyInstance } from 'fastify';
import type { ChatEncoding } from '../model/chat.ts';
import type { Tokenizer } from '../model/tokenizer.ts';
import type { StreamLimits } from './api/answer.ts';
import { planChat } from './api/chat.ts';
import { planCompletion } from './api/completions.ts';
import type { GenerationPlan } from './api/dialect.ts';
import {
  answerBrokenRequest,
  answerUnknownRoute,
  bodyOf,
  parseBody,
  requestIdOf,
  sendError,
  toApiError,
} from './api/edge.ts';
import type { JsonObject } from './api/fields.ts';
import { longestTokenBytes, promptTokens } from './api/prompts.ts';
import { maxChoiceCount, modelNotFound } from './api/sampling.ts';
import type { ServedModel } from './api/sampling.ts';
import { serveGeneration } from './api/serve.ts';
import type { RequestObserver, ServeContext } from './api/serve.ts';
import { parseDetokenizeRequest, parseTokenizeRequest } from './api/tokenize.ts';
import type { AdminGate } from './operators/admin.ts';
import type { RouterPage } from './operators/debug-page.ts';
import { DEFAULT_EFFORT_MAP } from './config.ts';
import { ApiError } from './errors.ts';
import type { Rooms } from './rooms.ts';

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
  /** Whether special tokens in what clients put into conversations are special: no, unless given here. */
  allowsSpecialTokens?: boolean;
  /** Efforts that mean another one to this checkpoint; DEFAULT_EFFORT_MAP when left out. */
  effortMap?: Readonly<Record<string, string>>;
  /** The name clients know the model by. */
  modelId: string;
  /** Other names of it. */
  aliases?: readonly string[];
  /** Most choices of one request; what OpenAI allows when left out. */
  maxChoices?: number;
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

/** Connections that fell idle after closing began are looked for this often. */
const idleSweepMs = 100;

/** When `closeApp` has ended what was left, error events have this long to reach their clients. */
const closeGraceMs = 500;

/** What is shared by all requests of one app. */
interface AppContext extends AppOptions, ServeContext {
  limits: Readonly<HttpLimits>;
  served: ServedModel;
  /** Unix time in seconds at which the app was made. */
  createdSeconds: number;
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
      names: [options.modelId, ...(options.aliases ?? [])],
      maxChoices: options.maxChoices ?? maxChoiceCount,
      contextLength: options.contextLength,
      vocabSize: tokenizer.vocabSize,
      thinkingByDefault: options.defaults?.thinking ?? true,
      effortMap: new Map(Object.entries(options.effortMap ?? DEFAULT_EFFORT_MAP)),
      defaultTemperature: options.defaults?.temperature ?? 1,
      defaultTopP: options.defaults?.topP ?? 1,
    },
    createdSeconds: Math.floor(Date.now() / 1000),
    longestTokenBytes: longestTokenBytes(tokenizer),
    draining: false,
    exchanges: new Set(),
    requestIds: new Set(),
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

  const generate = (path: string, plan: (body: JsonObject, served: ServedModel) => GenerationPlan) => {
    app.post(path, (request, reply) => serveGeneration(context, request, reply, () => plan(bodyOf(request), served)));
  };
  generate('/v1/chat/completions', planChat);
  generate('/v1/completions', planCompletion);

  app.get('/v1/models', async () => ({ object: 'list', data: served.names.map((name) => modelBody(name, context)) }));
  app.get<{ Params: { '*': string } }>('/v1/models/*', async (request) => {
    const name = request.params['*'];
    if (!served.names.includes(name)) throw modelNotFound(name, served);
    return modelBody(name, context);
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
      ? call.texts.map((text) => promptTokens(context, { kind: 'text', text }, 'prompt'))
      : [promptTokens(context, { kind: 'conversation', conversation: call.conversation }, 'messages')];
  const strings = sequences.map((ids) => ids.map((id) => tokenizer.decode([id])));
  return {
    tokens: isNested ? sequences : sequences[0],
    count: isNested ? sequences.map((ids) => ids.length) : sequences[0]?.length,
    max_model_len: context.contextLength,
    ...(call.returnTokenStrings ? { token_strs: isNested ? strings : strings[0] } : {}),
  };
}

/** One entry of GET /v1/models. `created` is fixed when the server starts. */
function modelBody(id: string, { served, createdSeconds }: AppContext) {
  return {
    id,
    object: 'model',
    created: createdSeconds,
    owned_by: 'handoff',
    root: served.modelId,
    parent: null,
    max_model_len: served.contextLength,
  };
}
