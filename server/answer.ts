/**
 * The two forms of an answer on the wire: one JSON body when it is complete, or server-sent events while it
 * grows, with everything that can go wrong at the socket of a stream: a reader that is slow, one that is gone,
 * an answer that fails after its headers.
 */
import type { FastifyReply } from 'fastify';
import { errorBody } from './errors.ts';
import type { ApiError } from './errors.ts';
import { appendDelta, sumDeltas } from './generation.ts';
import type { AnswerDelta, Finish, TokenUsage } from './generation.ts';
import { chatBody, completionBody } from './openai.ts';
import type { AnswerHead, ChatCall, ChunkWriter, CompletionCall } from './openai.ts';

/** What the reader of one stream may cost. */
export interface StreamLimits {
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
  deltas(deltas: readonly AnswerDelta[]): void;
  finish(finish: Finish): void;
  /** Tell the client about an error; false if the headers are not sent, so that it can be a plain response. */
  fail(error: ApiError): boolean;
  /** The client is gone, or no longer wanted: release timers and the socket. */
  drop(): void;
}

/** An answer that is sent when it is complete. */
export function wholeAnswer(
  reply: FastifyReply,
  call: ChatCall | CompletionCall,
  head: AnswerHead,
  usage: TokenUsage,
): AnswerForm {
  const parts: AnswerDelta[] = [];
  return {
    deltas(deltas) {
      for (const delta of deltas) appendDelta(parts, delta);
    },
    finish(finish) {
      const body = call.kind === 'chat' ? chatBody : completionBody;
      void reply.send(body(head, sumDeltas(parts), finish, usage));
    },
    fail: () => false,
    drop: () => void reply.hijack(),
  };
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
  chunks: ChunkWriter,
  usage: TokenUsage,
  limits: Readonly<StreamLimits>,
  onSlow: () => void,
): AnswerForm {
  const { raw } = reply;
  const waiting: AnswerDelta[] = [];
  let waitingLength = 0;
  let isCommitted = false;
  let isOpened = false;
  let isStalled = false;
  /** The last events, once they are known: they are sent when nothing waits any more. */
  let ending: object[] | null = null;
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

  function send(event: object): void {
    commit();
    idleTimer?.refresh();
    write(`data: ${JSON.stringify(event)}\n\n`);
  }

  function onDrain(): void {
    isStalled = false;
    clearTimeout(slowTimer);
    pump();
  }

  function open(): void {
    if (isOpened) return;
    isOpened = true;
    for (const event of chunks.open(usage)) send(event);
  }

  function pump(): void {
    while (waiting.length > 0 && !isStalled) {
      open();
      const delta = waiting.shift()!;
      waitingLength -= lengthOf(delta);
      send(chunks.delta(delta, usage));
    }
    if (ending === null || waiting.length > 0) return;
    for (const event of ending) send(event);
    write('data: [DONE]\n\n');
    raw.end();
    ending = null;
  }

  return {
    deltas(deltas) {
      for (const delta of deltas) {
        appendDelta(waiting, delta);
        waitingLength += lengthOf(delta);
      }
      pump();
      if (isStalled && waitingLength + raw.writableLength > limits.maxBufferedBytes) onSlow();
    },
    finish(finish) {
      if (waiting.length === 0) open();
      ending = chunks.close(finish, usage);
      pump();
    },
    fail(error) {
      if (!isCommitted) {
        release();
        return false;
      }
      ending = [errorBody(error)];
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

function lengthOf(delta: AnswerDelta): number {
  return delta.kind === 'tool_call' ? delta.name.length : delta.text.length;
}
