/**
 * Logging: one JSON line per event on standard error, through pino.
 *
 * Message strings are constant, variable parts are fields. Standard output stays free for results (the tools'
 * JSON lines, the start-up summary). The destination is synchronous: asynchronous ones lose lines at exit.
 * Prompts and outputs are never logged; redaction is the second net for objects that carry them or credentials.
 */
import { pino } from 'pino';
import type { DestinationStream, Logger } from 'pino';
import type { LogLevel } from './config.ts';

/** Fields that must not reach a log, alone or one level down in another object. */
const SECRET_FIELDS = [
  'authorization',
  'cookie',
  'api_key',
  'apiKey',
  'password',
  'secret',
  'token',
  'prompt',
  'messages',
  'text',
  'content',
  'promptTokens',
  'outputTokens',
] as const;

/**
 * The logger of one process.
 *
 * role    the command that runs; worker, if any, tells several of one role apart
 * destination  standard error unless given (tests)
 */
export function createLogger(options: {
  role: string;
  worker?: string;
  level: LogLevel;
  destination?: DestinationStream;
}): Logger {
  const { role, worker, level } = options;
  return pino(
    {
      level,
      base: { role, ...(worker === undefined ? {} : { worker }), pid: process.pid },
      timestamp: pino.stdTimeFunctions.isoTime,
      formatters: { level: (label) => ({ level: label }) },
      serializers: { err: pino.stdSerializers.err, error: pino.stdSerializers.err },
      redact: {
        paths: [
          ...SECRET_FIELDS,
          ...SECRET_FIELDS.map((field) => `*.${field}`),
          'req.headers.authorization',
          'req.headers.cookie',
        ],
        censor: '[redacted]',
      },
    },
    options.destination ?? pino.destination({ fd: 2, sync: true }),
  );
}

/** A child that names the request on every line. */
export function requestLogger(log: Logger, bindings: { requestId: string; room?: string; attempt?: number }): Logger {
  return log.child(bindings);
}
