/**
 * Every error a client can be told about: one table of codes with their HTTP status and OpenAI `type`,
 * the `ApiError` that carries one of them, and the body it is sent as.
 *
 * Statuses follow what the public SDKs do with them: 408, 429 and 5xx are retried, 4xx are not, and 409
 * and 422 are never used.
 */
import type { Reason } from '../transfer/messages.ts';

/** All error codes, each with the HTTP status and the OpenAI error type it is sent with. */
export const errorKinds = {
  invalid_json: { status: 400, type: 'invalid_request_error' },
  missing_required_parameter: { status: 400, type: 'invalid_request_error' },
  invalid_type: { status: 400, type: 'invalid_request_error' },
  invalid_value: { status: 400, type: 'invalid_request_error' },
  unsupported_parameter: { status: 400, type: 'invalid_request_error' },
  unsupported_value: { status: 400, type: 'invalid_request_error' },
  duplicate_request_id: { status: 400, type: 'invalid_request_error' },
  context_length_exceeded: { status: 400, type: 'invalid_request_error' },
  invalid_schema: { status: 400, type: 'invalid_request_error' },
  schema_too_complex: { status: 400, type: 'invalid_request_error' },
  bad_request: { status: 400, type: 'invalid_request_error' },
  invalid_api_key: { status: 401, type: 'authentication_error' },
  insufficient_permissions: { status: 403, type: 'permission_error' },
  model_not_found: { status: 404, type: 'invalid_request_error' },
  not_found: { status: 404, type: 'invalid_request_error' },
  method_not_allowed: { status: 405, type: 'invalid_request_error' },
  request_timeout: { status: 408, type: 'timeout_error' },
  request_too_large: { status: 413, type: 'invalid_request_error' },
  unsupported_media_type: { status: 415, type: 'invalid_request_error' },
  rate_limit_exceeded: { status: 429, type: 'rate_limit_error' },
  headers_too_large: { status: 431, type: 'invalid_request_error' },
  request_aborted: { status: 499, type: 'aborted' },
  invalid_answer: { status: 500, type: 'server_error' },
  internal_error: { status: 500, type: 'server_error' },
  queue_full: { status: 503, type: 'overloaded_error' },
  queue_timeout: { status: 503, type: 'overloaded_error' },
  engine_unavailable: { status: 503, type: 'overloaded_error' },
  server_draining: { status: 503, type: 'overloaded_error' },
  prefill_timeout: { status: 504, type: 'timeout_error' },
  decode_timeout: { status: 504, type: 'timeout_error' },
  kv_transfer_failed: { status: 504, type: 'timeout_error' },
} as const satisfies Record<string, { status: number; type: string }>;

/** One of the codes of the table above. */
export type ErrorCode = keyof typeof errorKinds;

/** The body of every answer that is not a success, and of an error event in a stream. */
export interface ErrorBody {
  error: { message: string; type: string; param: string | null; code: string };
}

/** Messages are cut to this many characters, so that no error can echo a whole prompt. */
const maxMessageLength = 2000;

/** Clients wait this long when an overload error says nothing else. */
const defaultRetryAfterSeconds = 1;

/**
 * Something that went wrong with one request, in the words its client will read.
 *
 * `param` is the path of the field at fault (`messages[2].role`), or null. `retryAfterSeconds` is set
 * for every 429, 503 and 504 and null for all others: the shortest time after which trying again makes sense.
 */
export class ApiError extends Error {
  override readonly name = 'ApiError';
  readonly code: ErrorCode;
  readonly status: number;
  readonly type: string;
  readonly param: string | null;
  readonly retryAfterSeconds: number | null;

  constructor(
    code: ErrorCode,
    message: string,
    options: { param?: string; retryAfterSeconds?: number; cause?: unknown } = {},
  ) {
    super(message.slice(0, maxMessageLength), options.cause === undefined ? {} : { cause: options.cause });
    const { status, type } = errorKinds[code];
    this.code = code;
    this.status = status;
    this.type = type;
    this.param = options.param ?? null;
    const retryable = status === 429 || status === 503 || status === 504;
    this.retryAfterSeconds = retryable ? (options.retryAfterSeconds ?? defaultRetryAfterSeconds) : null;
  }
}

/** The JSON body that tells a client about `error`. */
export function errorBody(error: ApiError): ErrorBody {
  return { error: { message: error.message, type: error.type, param: error.param, code: error.code } };
}

/** What a client is told when its room ended early for a reason that was not the client's own. */
const reasonErrors: Record<Reason, { code: ErrorCode; message: string }> = {
  client_cancel: { code: 'request_aborted', message: 'The request was aborted.' },
  client_lost: { code: 'request_aborted', message: 'The client closed the connection.' },
  deadline: { code: 'decode_timeout', message: 'The request ran out of time.' },
  peer_lost: { code: 'kv_transfer_failed', message: 'A worker serving this request was lost.' },
  peer_aborted: { code: 'kv_transfer_failed', message: 'A worker serving this request gave it up.' },
  gone: { code: 'kv_transfer_failed', message: 'A worker no longer knew this request.' },
  mismatch: { code: 'kv_transfer_failed', message: 'The two workers of this request do not fit together.' },
  bad_checksum: { code: 'kv_transfer_failed', message: 'The KV cache was damaged on its way between workers.' },
  protocol: { code: 'kv_transfer_failed', message: 'The KV transfer of this request broke its protocol.' },
  overloaded: { code: 'queue_full', message: 'The workers have no room for this request.' },
  out_of_memory: { code: 'queue_full', message: 'The decode worker ran out of KV memory for this request.' },
  draining: { code: 'server_draining', message: 'The server is shutting down.' },
  shutdown: { code: 'server_draining', message: 'The server is shutting down.' },
  unknown: { code: 'kv_transfer_failed', message: 'A worker did not know this request.' },
  unsatisfiable: {
    code: 'invalid_value',
    message: 'The constraints of this request leave no token to choose; send fewer of them.',
  },
  internal: { code: 'internal_error', message: 'The server found a fault of its own and gave this request up.' },
};

/** The error for a room that ended with `reason`. */
export function errorOfReason(reason: Reason): ApiError {
  const { code, message } = reasonErrors[reason];
  return new ApiError(code, message);
}
