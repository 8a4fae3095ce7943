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
import { once } from 'node:events';
import { performance } from 'node:perf_hooks';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { fastify, LogController } from 'fastify';
import type { FastifyBaseLogger, FastifyInstance, FastifyReply, FastifyRequest } from 'fastify';
import type { ChatEncoding } from '../model/chat.ts';
import { createDetokenizer } from '../model/tokenizer.ts';
import type { Detokenizer, Tokenizer } from '../model/tokenizer.ts';
import type { StreamLimits } from './api/answer.ts';
import { ANYONE, createDoor } from './api/access.ts';
import type { Client, Door } from './api/access.ts';
import { chatRequest, planChat } from './api/chat.ts';
import { completionRequest, planCompletion } from './api/completions.ts';
import { boolean, list, object, optional, text } from './api/fields.ts';
import { generateRequest, planGenerate } from './api/generate.ts';
import { loadsBody, modelInfo, serverInfo } from './api/info.ts';
import type { InfoSubject, WorkerSight } from './api/info.ts';
import {
  anthropicErrorBody,
  countTokensRequest,
  messagesRequest,
  parseCountTokens,
  planMessages,
} from './api/messages.ts';
import { docsPage, openapiDocument } from './api/openapi.ts';
import type { Endpoint } from './api/openapi.ts';
import { createProbe } from './api/probe.ts';
import { planResponse, responsesRequest } from './api/responses.ts';
import { createTurns } from './api/turns.ts';
import type { GenerationPlan, Prompt } from './api/dialect.ts';
import {
  allowOrigins,
  answerBrokenRequest,
  answerUnknownRoute,
  bodyOf,
  isPreflight,
  parseBody,
  requestIdOf,
  sendError,
  toApiError,
} from './api/edge.ts';
import type { JsonObject } from './api/fields.ts';
import type { EncodeAside } from './api/encoder.ts';
import { longestTokenBytes, promptTokens } from './api/prompts.ts';
import { maxChoiceCount, modelNotFound } from './api/sampling.ts';
import type { ServedModel } from './api/sampling.ts';
import { serveGeneration } from './api/serve.ts';
import type { Exchange, RequestObserver, ServeContext } from './api/serve.ts';
import { detokenizeRequest, parseDetokenizeRequest, parseTokenizeRequest, tokenizeRequest } from './api/tokenize.ts';
import type { AdminGate } from './operators/admin.ts';
import type { RouterPage } from './operators/debug-page.ts';
import { DEFAULT_EFFORT_MAP } from './config.ts';
import { ApiError } from './errors.ts';
import { METRICS_CONTENT_TYPE } from './metrics.ts';
import type { Rooms } from './rooms.ts';

/** What one client may cost. */
export interface HttpLimits extends StreamLimits {
  /** Longest request body. */
  maxBodyBytes: number;
  /** A request must have arrived as a whole after this time. */
  requestTimeoutMs: number;
  /** An idle connection is kept for so long. */
  keepAliveMs: number;
  /** Requests of one API key at once, and in a minute; null: no limit. */
  keyMaxRequests: number | null;
  keyRequestsPerMinute: number | null;
  /** With several API keys: a request whose turn has not come after this time is refused. */
  maxWaitMs: number;
}

/** Limits where nothing else is configured. undici gives up after 300 s without a byte; heartbeats stay below that. */
export const defaultHttpLimits: Readonly<HttpLimits> = {
  maxBodyBytes: 64 * 1024 * 1024,
  requestTimeoutMs: 60_000,
  keepAliveMs: 72_000,
  maxBufferedBytes: 1024 * 1024,
  maxAnswerBytes: 64 * 1024 * 1024,
  slowClientMs: 60_000,
  firstByteMs: 60_000,
  heartbeatMs: 15_000,
  keyMaxRequests: null,
  keyRequestsPerMinute: null,
  maxWaitMs: 60_000,
};

/** All that the app works with. */
export interface AppOptions {
  rooms: Rooms;
  tokenizer: Tokenizer;
  /** For long prompts; without it they hold the event loop. */
  encodeAside?: EncodeAside;
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
  /** Keys that requests must show one of; empty: none is needed. */
  apiKeys: readonly string[];
  /** Version of this software. */
  version: string;
  /** The workers there are, for info and loads. */
  fleet: () => readonly WorkerSight[];
  /** Rooms that run at once on them, and those that may wait beyond. */
  capacity: () => { running: number; waiting: number };
  log: FastifyBaseLogger;
  /** The text of GET /metrics. */
  metricsText: () => Promise<string>;
  /** Who may ask for what is an operator's. */
  gate: AdminGate;
  /** The body of GET /debug/rooms. */
  debugPage: (draining: boolean) => Promise<RouterPage>;
  /** Empty the prefix cache of every worker; how many pages there were. Rejects with an `ApiError` if one did not. */
  flushCache: () => Promise<number>;
  observe: RequestObserver;
  /** What requests get that do not say: thinking on, temperature 1, top_p 1 unless given here. */
  defaults?: { thinking?: boolean; temperature?: number; topP?: number };
}

/** Connections that fell idle after closing began are looked for this often. */
const idleSweepMs = 100;

/** Ids are made text so many at a time, some milliseconds; then others have their turn. */
const idsPerTurn = 5000;
/** How ids are made text for those who ask for it: special tokens are written out. */
const PLAIN = { skipSpecialTokens: false };

/** When `closeApp` has ended what was left, error events have this long to reach their clients. */
const closeGraceMs = 500;

declare module 'fastify' {
  interface FastifyContextConfig {
    /** Not set where there is no route: such a path leads nowhere, with any key. */
    endpoint?: Endpoint;
  }
}

/** What is shared by all requests of one app. */
interface AppContext extends AppOptions, ServeContext {
  door: Door;
  limits: Readonly<HttpLimits>;
  served: ServedModel;
  /** Unix time in seconds at which the app was made. */
  createdSeconds: number;
  /** Every route, for the documentation. */
  endpoints: Endpoint[];
  /** When a token came last, by performance.now(). */
  lastTokenMs: number;
}

const contexts = new WeakMap<FastifyInstance, AppContext>();

/** Whose request it is, as the door has found. */
const clients = new WeakMap<FastifyRequest, Client>();

/** The app, ready to listen. Close it with `closeApp`. */
export function createApp(options: AppOptions): FastifyInstance {
  const { limits, log, observe, tokenizer } = options;
  const door = createDoor(options.apiKeys, options.gate);
  const app: FastifyInstance = fastify({
    loggerInstance: log,
    logController: new LogController({ disableRequestLogging: true }),
    bodyLimit: limits.maxBodyBytes,
    requestTimeout: limits.requestTimeoutMs,
    keepAliveTimeout: limits.keepAliveMs,
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
    door,
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
    turns: createTurns({
      limits: { maxRequests: limits.keyMaxRequests, requestsPerMinute: limits.keyRequestsPerMinute },
      clientCount: options.apiKeys.length,
      capacity: options.capacity,
      maxWaitMs: limits.maxWaitMs,
      now: () => performance.now(),
    }),
    endpoints: [],
    lastTokenMs: -Infinity,
  };
  contexts.set(app, context);

  const allowed = new Map<string, Set<string>>();
  app.addHook('onRoute', (route) => {
    const methods = allowed.get(route.url) ?? new Set<string>();
    for (const method of [route.method].flat()) methods.add(method);
    allowed.set(route.url, methods);
  });
  // Before the body is read: who may not use a route costs nothing more.
  app.addHook('onRequest', async (request, reply) => {
    const { endpoint } = request.routeOptions.config;
    reply.header('x-request-id', request.id);
    if (endpoint?.shape === 'anthropic') reply.header('request-id', request.id);
    allowOrigins(request, reply);
    const { raw } = reply;
    // Not an onResponse hook: those stay silent when the client closes first.
    raw.once('close', () => {
      observe.responded(request.routeOptions.url ?? 'unknown', raw.writableFinished ? raw.statusCode : 499);
    });
    if (isPreflight(request)) return reply.code(204).send();
    if (endpoint === undefined) return undefined;
    const client = door.enter(request.raw, endpoint.access, endpoint.shape === 'anthropic');
    clients.set(request, client);
    return undefined;
  });

  // A request sent behind another one on its connection begins when that has its whole answer: until then nothing would
  // tell that its client has left. Its body is read by now, so that the connection does not stand still.
  app.addHook('preHandler', async (_request, { raw }) => {
    if (raw.socket === null) await once(raw, 'socket');
  });

  app.removeAllContentTypeParsers();
  app.addContentTypeParser('application/json', { parseAs: 'buffer' }, (_request, body, done) => {
    try {
      done(null, parseBody(body as Buffer));
    } catch (error) {
      done(error as Error);
    }
  });
  app.setErrorHandler((error, request, reply) => {
    const isAnthropic = request.routeOptions.config.endpoint?.shape === 'anthropic';
    const shape = isAnthropic ? (fault: ApiError) => anthropicErrorBody(fault, request.id) : undefined;
    return sendError(reply, toApiError(error, log), shape);
  });
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
  addGeneration(app, context);
  addModels(app, context);
  addText(app, context);
  addOperation(app, context);
  addHealth(app, context);
  addDescription(app, context);
}

/** Register a route and describe it. */
function route(
  app: FastifyInstance,
  context: AppContext,
  endpoint: Endpoint,
  handler: (request: FastifyRequest, reply: FastifyReply) => Promise<unknown>,
): void {
  const { method, path: url } = endpoint;
  context.endpoints.push(endpoint);
  app.route({ method, url, config: { endpoint }, handler });
}

function addGeneration(app: FastifyInstance, context: AppContext): void {
  const { served } = context;
  const generate = (
    endpoint: Omit<Endpoint, 'method' | 'access' | 'streams'>,
    plan: (body: JsonObject, served: ServedModel) => GenerationPlan,
  ) => {
    route(app, context, { method: 'POST', access: 'key', streams: true, ...endpoint }, (request, reply) =>
      serveGeneration(context, { request, reply, client: clients.get(request) ?? ANYONE }, () =>
        plan(bodyOf(request), served),
      ),
    );
  };
  generate({ path: '/v1/chat/completions', summary: 'Answer a conversation (OpenAI).', body: chatRequest }, planChat);
  generate({ path: '/v1/completions', summary: 'Continue a text (OpenAI).', body: completionRequest }, planCompletion);
  generate({ path: '/v1/responses', summary: 'Answer input items (OpenAI).', body: responsesRequest }, planResponse);
  generate(
    { path: '/v1/messages', summary: 'Answer a conversation (Anthropic).', body: messagesRequest, shape: 'anthropic' },
    planMessages,
  );
  generate({ path: '/generate', summary: 'Continue a text (SGLang).', body: generateRequest }, planGenerate);
}

function addModels(app: FastifyInstance, context: AppContext): void {
  const { served } = context;
  route(
    app,
    context,
    { method: 'GET', path: '/v1/models', summary: 'The models that are served.', access: 'key' },
    async () => ({ object: 'list', data: served.names.map((name) => modelBody(name, context)) }),
  );
  route(
    app,
    context,
    { method: 'GET', path: '/v1/models/*', summary: 'One model, by its name.', access: 'key' },
    async (request) => {
      const name = (request.params as { '*': string })['*'];
      if (!served.names.includes(name)) throw modelNotFound(name, served);
      return modelBody(name, context);
    },
  );
}

function addText(app: FastifyInstance, context: AppContext): void {
  const { served, tokenizer } = context;
  for (const path of ['/tokenize', '/v1/tokenize']) {
    const summary = 'The token ids of texts, or of a conversation as it would be prefilled.';
    route(
      app,
      context,
      { method: 'POST', path, summary, access: 'key', body: tokenizeRequest },
      async (request, reply) => tokenize(context, bodyOf(request), whenClosed(reply)),
    );
  }
  for (const path of ['/detokenize', '/v1/detokenize']) {
    const summary = 'The text of token ids.';
    route(app, context, { method: 'POST', path, summary, access: 'key', body: detokenizeRequest }, async (request) => {
      const { sequences, nested } = parseDetokenizeRequest(bodyOf(request), served);
      const texts: string[] = [];
      for (const ids of sequences) texts.push((await textsOf(ids, createDetokenizer(tokenizer, PLAIN))).join(''));
      const value = nested ? texts : texts[0];
      return { text: value, prompt: value };
    });
  }
  const endpoint: Endpoint = {
    method: 'POST',
    path: '/v1/messages/count_tokens',
    summary: 'How many tokens /v1/messages would prefill (Anthropic).',
    access: 'key',
    body: countTokensRequest,
    shape: 'anthropic',
  };
  route(app, context, endpoint, async (request, reply) => {
    const conversation = parseCountTokens(bodyOf(request), served);
    const ids = await promptTokens(context, { kind: 'conversation', conversation }, 'messages', whenClosed(reply));
    return { input_tokens: ids?.length ?? 0 };
  });
}

function addOperation(app: FastifyInstance, context: AppContext): void {
  route(
    app,
    context,
    { method: 'GET', path: '/debug/rooms', summary: 'Every request in every process.', access: 'admin' },
    () => context.debugPage(context.draining),
  );

  const abort: Endpoint = {
    method: 'POST',
    path: '/abort_request',
    summary: 'End requests: by id those of the same API key, all of them with the admin key.',
    access: 'open',
    body: abortRequest,
  };
  route(app, context, abort, async (request) => {
    const { rid, abort_all: abortAll } = abortRequest.read(bodyOf(request), '');
    if (abortAll === true) {
      context.door.enter(request.raw, 'admin', false);
      return { success: true, aborted: abortRequests(context, () => true) };
    }
    if (rid === undefined) {
      throw new ApiError('invalid_value', 'Give the id of a request as rid, or abort_all: true.', { param: 'rid' });
    }
    const client = context.door.enter(request.raw, 'key', false);
    const isMeant = (exchange: Exchange) => exchange.client === client && rid.some((id) => exchange.ids.includes(id));
    return { success: true, aborted: abortRequests(context, isMeant) };
  });
  const flush = { path: '/flush_cache', summary: 'Forget cached prefixes.', access: 'admin' } as const;
  for (const method of ['GET', 'POST'] as const) {
    route(app, context, { method, ...flush }, async () => {
      const flushedPages = await context.flushCache();
      return { success: true, flushed_pages: flushedPages, message: 'All cached prefixes are forgotten.' };
    });
  }
}

function addHealth(app: FastifyInstance, context: AppContext): void {
  const open = (
    path: string,
    summary: string,
    handler: (request: FastifyRequest, reply: FastifyReply) => Promise<unknown>,
  ) => route(app, context, { method: 'GET', path, summary, access: 'open' }, handler);

  // Alive as long as it answers; a process that cannot serve is not ready, and killing it would not help.
  open('/livez', 'Whether the process answers.', async () => ({ status: 'ok' }));
  for (const path of ['/health', '/ping', '/readyz']) {
    open(path, 'Whether requests can be served.', async () => {
      checkReady(context);
      return { status: 'ok' };
    });
  }
  const probe = createProbe(context, () => context.lastTokenMs);
  route(
    app,
    context,
    { method: 'GET', path: '/health_generate', summary: 'The same, proved by one token.', access: 'key' },
    async () => {
      checkReady(context);
      await probe();
      return { status: 'ok' };
    },
  );
  for (const path of ['/metrics', '/metrics/']) {
    open(path, 'Metrics for Prometheus.', async (_request, reply) => {
      reply.header('content-type', METRICS_CONTENT_TYPE);
      return context.metricsText();
    });
  }
}

function checkReady(context: AppContext): void {
  if (context.draining) throw new ApiError('server_draining', 'The server is shutting down.');
  if (!context.rooms.ready()) {
    throw new ApiError('engine_unavailable', 'No prefill worker or no decode worker is live.');
  }
}

function addDescription(app: FastifyInstance, context: AppContext): void {
  const { served, version } = context;
  const keyed = (
    path: string,
    summary: string,
    handler: (request: FastifyRequest, reply: FastifyReply) => Promise<unknown>,
  ) => route(app, context, { method: 'GET', path, summary, access: 'key' }, handler);
  const subject = (): InfoSubject => ({
    version,
    modelId: served.modelId,
    names: served.names,
    contextLength: served.contextLength,
    fleet: context.fleet(),
  });
  for (const path of ['/server_info', '/get_server_info']) {
    keyed(path, 'What this server is (SGLang).', async () => serverInfo(subject()));
  }
  for (const path of ['/model_info', '/get_model_info']) {
    keyed(path, 'What the model is (SGLang).', async () => modelInfo(subject()));
  }
  keyed('/v1/loads', 'How busy the workers are (SGLang).', async (request, reply) => {
    const { include, format } = request.query as { include?: unknown; format?: unknown };
    if (format === 'prometheus') {
      reply.header('content-type', METRICS_CONTENT_TYPE);
      return context.metricsText();
    }
    const sections = typeof include === 'string' ? include : undefined;
    return loadsBody(subject(), sections, new Date().toISOString());
  });
  const open = { method: 'GET', access: 'open' } as const;
  route(app, context, { ...open, path: '/openapi.json', summary: 'This API for machines.' }, async () =>
    openapiDocument(context.endpoints, version),
  );
  route(app, context, { ...open, path: '/docs', summary: 'This API for people.' }, async (_request, reply) => {
    reply.header('content-type', 'text/html; charset=utf-8');
    reply.header('content-security-policy', "default-src 'none'; style-src 'unsafe-inline'");
    return docsPage(context.endpoints, version);
  });
}

const maxAbortedIds = 1024;
const oneId = text({ minLength: 1 });
const manyIds = list(oneId, { minItems: 1, maxItems: maxAbortedIds });

/** The body of POST /abort_request. */
const abortRequest = object({
  rid: optional<string[]>({
    expected: 'the id of a request, or an array of such ids',
    schema: { anyOf: [oneId.schema, manyIds.schema] },
    read: (value, path) => (Array.isArray(value) ? manyIds.read(value, path) : [oneId.read(value, path)]),
  }),
  abort_all: optional(boolean()),
});

/** End the requests that are meant; returns how many there were. Both halves of each are told by its room. */
function abortRequests(context: AppContext, isMeant: (exchange: Exchange) => boolean): number {
  const found = [...context.exchanges].filter(isMeant);
  for (const exchange of found) exchange.abort(new ApiError('request_aborted', 'The request was aborted.'));
  return found.length;
}

/** Aborted when the connection is closed: nobody reads the answer. */
function whenClosed(reply: FastifyReply): AbortSignal {
  const aborter = new AbortController();
  reply.raw.once('close', () => aborter.abort());
  return aborter.signal;
}

/** The ids of texts, or of a conversation exactly as chat would prefill it. Others have their turn between two texts. */
async function tokenize(context: AppContext, body: JsonObject, signal: AbortSignal): Promise<object> {
  const { tokenizer } = context;
  const call = parseTokenizeRequest(body, context.served);
  const isNested = call.kind === 'texts' && call.nested;
  const prompts: Prompt[] =
    call.kind === 'texts'
      ? call.texts.map((each) => ({ kind: 'text', text: each }))
      : [{ kind: 'conversation', conversation: call.conversation }];
  const sequences: number[][] = [];
  for (const [index, prompt] of prompts.entries()) {
    if (index > 0) await nextTurn();
    const ids = await promptTokens(context, prompt, call.kind === 'texts' ? 'prompt' : 'messages', signal);
    if (ids === null) break;
    sequences.push(ids);
  }
  const strings: string[][] = [];
  if (call.returnTokenStrings) {
    const each = createDetokenizer(tokenizer, PLAIN);
    const alone = { push: (id: number) => each.push(id) + each.flush(), flush: () => '' };
    for (const ids of sequences) strings.push(await textsOf(ids, alone));
  }
  return {
    tokens: isNested ? sequences : sequences[0],
    count: isNested ? sequences.map((ids) => ids.length) : sequences[0]?.length,
    max_model_len: context.contextLength,
    ...(call.returnTokenStrings ? { token_strs: isNested ? strings : strings[0] } : {}),
  };
}

/** What each id adds to the text, and last of all what was held back. Others have their turn meanwhile. */
async function textsOf(ids: readonly number[], detokenizer: Pick<Detokenizer, 'push' | 'flush'>): Promise<string[]> {
  const texts: string[] = [];
  for (const [index, id] of ids.entries()) {
    if (index % idsPerTurn === 0) await nextTurn();
    texts.push(detokenizer.push(id));
  }
  const rest = detokenizer.flush();
  return rest === '' ? texts : [...texts, rest];
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
