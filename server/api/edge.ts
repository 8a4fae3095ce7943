/**
 * Where requests come in and errors go out: bodies as JSON, request ids, and every error in the shape of the API it
 * belongs to, also those that fastify or Node find before a route is reached.
 */
import { isUtf8 } from 'node:buffer';
import { randomInt, randomUUID } from 'node:crypto';
import type { IncomingMessage } from 'node:http';
import type { Socket } from 'node:net';
import type { FastifyBaseLogger, FastifyReply, FastifyRequest } from 'fastify';
import { parseJsonValue } from '../../model/json-text.ts';
import { ApiError, errorBody } from '../errors.ts';
import type { ErrorCode } from '../errors.ts';
import { isObject } from './fields.ts';
import type { JsonObject } from './fields.ts';

/** Fields of any API that hold JSON which the model is shown: its numbers keep the client's spelling. */
const shownFields = ['tools', 'response_format', 'text', 'output_config'];

/** Deepest nesting of a request body. JSON.parse would take more; walking it recursively would not. */
const maxJsonDepth = 64;

/** Retry-After is spread over up to twice its value, at most this, so that clients do not return in step. */
const maxRetryAfterSeconds = 30;

/** The client's own id for the request where it sent a plain one, else a new one. A label only, never a key. */
export function requestIdOf(request: { headers: IncomingMessage['headers'] }): string {
  const given = request.headers['x-request-id'];
  return typeof given === 'string' && /^[\x21-\x7e]{1,128}$/.test(given) ? given : randomUUID();
}

/**
 * Headers that let pages of any origin read the response. Cookies are never sent along, so there is nothing that a page
 * could steal with them.
 */
export function allowOrigins(request: FastifyRequest, reply: FastifyReply): void {
  if (request.headers.origin === undefined) return;
  reply.header('access-control-allow-origin', '*');
  reply.header('access-control-expose-headers', 'x-request-id, retry-after');
  if (!isPreflight(request)) return;
  // What is asked for is given: clients send headers of their own, and a list of them would break the next one.
  reply.header('access-control-allow-methods', 'GET, POST, OPTIONS');
  reply.header('access-control-allow-headers', request.headers['access-control-request-headers'] ?? '*');
  reply.header('access-control-max-age', '600');
  reply.header('vary', 'access-control-request-headers');
}

/** Whether a browser asks what it may ask. */
export function isPreflight(request: FastifyRequest): boolean {
  return request.method === 'OPTIONS' && request.headers['access-control-request-method'] !== undefined;
}

/** A request body as JSON. Throws `ApiError` 400 for anything that is not JSON in UTF-8 or is nested too deeply. */
export function parseBody(body: Buffer): unknown {
  if (!isUtf8(body)) throw new ApiError('invalid_json', 'The request body is not valid UTF-8.');
  if (nestingDepth(body) > maxJsonDepth) {
    throw new ApiError('invalid_json', `The request body is nested deeper than ${maxJsonDepth} levels.`);
  }
  const text = body.toString('utf8');
  try {
    return parseJsonValue(text.startsWith('\uFEFF') ? text.slice(1) : text, shownFields);
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

/** The body of a request as an object. Throws `ApiError` 400 for an empty body and for any other JSON. */
export function bodyOf(request: FastifyRequest): JsonObject {
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
export function toApiError(error: unknown, log: FastifyBaseLogger): ApiError {
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

/** Send `error` as the whole response; `shape` words it where the API is not OpenAI's. */
export function sendError(
  reply: FastifyReply,
  error: ApiError,
  shape: (error: ApiError) => object = errorBody,
): FastifyReply {
  if (error.retryAfterSeconds !== null) reply.header('retry-after', spreadRetryAfter(error.retryAfterSeconds));
  if (error.status === 499) reply.header('x-should-retry', 'false');
  if (error.status === 401) reply.header('www-authenticate', 'Bearer');
  // The rest of a body that is too large is not read, so the connection cannot be used again.
  if (error.status === 413) reply.header('connection', 'close');
  return reply.code(error.status).type('application/json; charset=utf-8').send(shape(error));
}

/** Between the given time and twice of it, so that clients refused together do not return together. */
function spreadRetryAfter(seconds: number): number {
  const least = Math.max(1, Math.ceil(seconds));
  return Math.min(maxRetryAfterSeconds, least + randomInt(least + 1));
}

/** 405 where the path exists under another method, else 404. `allowed` has the methods of every route's pattern. */
export function answerUnknownRoute(
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
export function answerBrokenRequest(error: Error & { code?: string }, socket: Socket): void {
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
