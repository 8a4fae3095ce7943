/**
 * Logging: one JSON line per event on standard error, through pino.
 *
 * Message strings are constant, variable parts are fields. Standard output stays free for results (the tools'
 * JSON lines, the start-up summary). A reader of the log that is slow or stopped never holds up the process: lines wait
 * in memory, within a bound, and are written out at exit.
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

/** Of lines that wait for their reader; what comes beyond it is dropped, and counted in a line of its own. */
const MAX_BACKLOG_BYTES = 4 << 20;
/** Tries at exit, 100 ms apart, to write to a reader that takes nothing. */
const LAST_TRIES = 10;

/**
 * Makes writes to a full pipe fail instead of wait: one that waits would hold the process at exit, for ever.
 *
 * Opening `process.stderr` is not enough. A pipe has one mode for all who share it, and a child that inherits it (the
 * compiler service of tsx, say) sets it back when it starts. Nothing else in Node's interface reaches the mode.
 */
function letWritesFail(): void {
  const { _handle: handle } = process.stderr as { _handle?: { setBlocking?(waits: boolean): void } };
  handle?.setBlocking?.(false);
}

/**
 * Standard error, written in the background: a write to a full pipe would stop every stream of the process.
 *
 * onCaughtUp  called with the number of lines that were dropped, once the rest is written
 */
function standardError(onCaughtUp: (dropped: number) => void): DestinationStream {
  let dropped = 0;
  let triesLeft = Infinity;
  // Before the destination's own listener, which writes what is left.
  process.once('exit', () => {
    letWritesFail();
    triesLeft = LAST_TRIES;
  });
  letWritesFail();
  const stream = pino.destination({
    fd: 2,
    sync: false,
    maxLength: MAX_BACKLOG_BYTES,
    retryEAGAIN: () => triesLeft-- > 0,
  });
  stream.on('drop', () => dropped++);
  stream.on('drain', () => {
    if (dropped === 0) return;
    onCaughtUp(dropped);
    dropped = 0;
  });
  return stream;
}

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
  const log: Logger = pino(
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
    options.destination ??
      standardError((lines) => log.warn({ lines }, 'log lines were dropped: their reader is too slow')),
  );
  return log;
}

/** A child that names the request on every line. */
export function requestLogger(log: Logger, bindings: { requestId: string; room?: string; attempt?: number }): Logger {
  return log.child(bindings);
}
