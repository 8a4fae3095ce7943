/**
 * The two forms of an answer on the wire: one JSON body when it is complete, or server-sent events while it
 * grows, with everything that can go wrong at the socket of a stream: a reader that is slow, one that is gone,
 * an answer that fails after its headers. What the events say is the dialect's.
 */
import type { FastifyReply } from 'fastify';
import type { ApiError } from '../errors.ts';
import type { Dialect } from './dialect.ts';
import { appendDelta, sumDeltas } from './generation.ts';
import type { AnswerDelta, Finish } from './generation.ts';

/** What the reader of one stream may cost. */
export interface StreamLimits {
  /** An answer that is not streamed is cut off, as if by its token limit, beyond this. */
  maxAnswerBytes: number;
  /** A stream that a slow reader leaves unsent beyond this is dropped. */
  maxBufferedBytes: number;
  /** A stream whose reader takes nothing for this long is dropped. */
  slowClientMs: number;
  /** A stream without a first token for this long gets its headers and heartbeats. */
  firstByteMs: number;
  /** An idle stream gets a blank line this often; 0 turns heartbeats off. */
  heartbeatMs: number;
}

const eventStreamHeaders = {
  'content-type': 'text/event-stream; charset=utf-8',
  'cache-control': 'no-cache, no-transform',
  'x-accel-buffering': 'no',
  connection: 'keep-alive',
};

/** One of the two forms of an answer on the wire. */
export interface AnswerForm {
  /** More of a choice. */
  deltas(choice: number, deltas: readonly AnswerDelta[]): void;
  /** The end of a choice; comes once for each. */
  finish(choice: number, finish: Finish): void;
  /** All choices have ended. */
  end(): void;
  /** Tell the client about an error; false if the headers are not sent, so that it can be a plain response. */
  fail(error: ApiError): boolean;
  /** The client is gone, or no longer wanted: release timers and the socket. */
  drop(): void;
}

/** An answer of `choiceCount` choices that is sent when it is complete. */
export function wholeAnswer(reply: FastifyReply, dialect: Dialect, choiceCount: number): AnswerForm {
  const parts = Array.from({ length: choiceCount }, (): AnswerDelta[] => []);
  const finishes: Finish[] = [];
  return {
    deltas(choice, deltas) {
      for (const delta of deltas) appendDelta(parts[choice]!, delta);
    },
    finish(choice, finish) {
      finishes[choice] = finish;
    },
    end() {
      const choices = parts.map((deltas, choice) => ({ answer: sumDeltas(deltas), deltas, finish: finishes[choice]! }));
      void reply.send(dialect.body(choices));
    },
    fail: () => false,
    drop: () => void reply.hijack(),
  };
}

/** What waits of one choice: its deltas, and behind them its end. */
interface Waiting {
  deltas: AnswerDelta[];
  finish: Finish | null;
}

/**
 * An answer that is sent as server-sent events while it grows.
 *
 * The first event commits the headers; so does the first heartbeat. When the socket is full, deltas wait
 * and are joined, so a slow reader gets fewer and larger events; one that leaves too much unread, or reads
 * nothing for too long, is reported through `onSlow`.
 */
export function streamedAnswer(
  reply: FastifyReply,
  dialect: Dialect,
  limits: Readonly<StreamLimits>,
  onSlow: () => void,
): AnswerForm {
  const { raw } = reply;
  /** By choice, those that came first ahead. */
  const waiting = new Map<number, Waiting>();
  let waitingLength = 0;
  let isCommitted = false;
  let isStalled = false;
  /** The last events, once nothing but them can follow: they are sent when nothing waits any more. */
  let ending: (() => string[]) | null = null;
  let slowTimer: NodeJS.Timeout | undefined;
  let idleTimer = limits.heartbeatMs > 0 ? setTimeout(beat, limits.firstByteMs) : undefined;

  function release(): void {
    clearTimeout(slowTimer);
    clearTimeout(idleTimer);
    raw.off('drain', onDrain);
  }

  function commit(): void {
    if (isCommitted) return;
    isCommitted = true;
    reply.hijack();
    raw.writeHead(200, { ...(reply.getHeaders() as Record<string, string>), ...eventStreamHeaders });
    raw.once('close', release);
    clearTimeout(idleTimer);
    if (limits.heartbeatMs > 0) idleTimer = setTimeout(beat, limits.heartbeatMs);
  }

  /** A blank line is the one heartbeat that every client and load generator accepts. */
  function beat(): void {
    commit();
    if (!isStalled) write('\n');
    idleTimer?.refresh();
  }

  function write(bytes: string): void {
    if (raw.write(bytes) || isStalled) return;
    isStalled = true;
    slowTimer = setTimeout(onSlow, limits.slowClientMs);
    raw.once('drain', onDrain);
  }

  function send(events: readonly string[]): void {
    commit();
    idleTimer?.refresh();
    for (const each of events) write(each);
  }

  function onDrain(): void {
    isStalled = false;
    clearTimeout(slowTimer);
    pump();
  }

  function waitingOf(choice: number): Waiting {
    const found = waiting.get(choice) ?? { deltas: [], finish: null };
    waiting.set(choice, found);
    return found;
  }

  /** Send what waits while the socket takes it, choice by choice. */
  function pump(): void {
    for (const [choice, { deltas, finish }] of waiting) {
      while (deltas.length > 0 && !isStalled) {
        const delta = deltas.shift()!;
        waitingLength -= lengthOf(delta);
        send(dialect.delta(choice, delta));
      }
      if (isStalled) break;
      waiting.delete(choice);
      if (finish !== null) send(dialect.finish(choice, finish));
      if (isStalled) break;
    }
    if (ending === null || waiting.size > 0) return;
    send(ending());
    raw.end();
    ending = null;
  }

  return {
    deltas(choice, deltas) {
      if (deltas.length === 0) return;
      const { deltas: queue } = waitingOf(choice);
      for (const delta of deltas) {
        appendDelta(queue, delta);
        waitingLength += lengthOf(delta);
      }
      pump();
      if (isStalled && waitingLength + raw.writableLength > limits.maxBufferedBytes) onSlow();
    },
    finish(choice, finish) {
      waitingOf(choice).finish = finish;
      pump();
    },
    end() {
      ending = () => dialect.end();
      pump();
    },
    fail(error) {
      if (!isCommitted) {
        release();
        return false;
      }
      ending = () => dialect.error(error);
      pump();
      return true;
    },
    drop() {
      release();
      reply.hijack();
      raw.destroy();
    },
  };
}

/** What one token of a list of log probabilities takes on the wire, about. */
const loggedLength = 64;

/** About how many bytes a delta holds. */
export function lengthOf(delta: AnswerDelta): number {
  if (delta.kind === 'tool_call') return delta.name.length;
  const logged = delta.kind === 'tool_arguments' ? [] : (delta.logged ?? []);
  return logged.reduce((sum, { top }) => sum + loggedLength * (1 + top.length), delta.text.length);
}
