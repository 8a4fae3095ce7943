/**
 * The router's view of a room: one client request over all its attempts.
 *
 * The router alone decides the outcome, once; workers propose with `tokens` and `end`. One `Room` is
 * stepped by server/rooms.ts, which also owns the links and the client.
 *
 * | event       | from |
 * |-------------|------|
 * | pair        | the balancer's answer to `choose_pair` (and the very first event of a room) |
 * | no_pair     | the balancer has none; the room ends with the reason of the last attempt |
 * | accepted, tokens, end | a worker, by control channel; `epoch` says which life of it |
 * | worker_up   | control link to that epoch is there (again): unanswered messages are re-sent at once |
 * | worker_lost | that epoch is dead: counts as the end of its half |
 * | client_lost, client_cancel | the HTTP side; `client_cancel` with `finish` is a stop string found by the router |
 * | tick        | a timer |
 *
 * | effect      | performed by |
 * |-------------|--------------|
 * | send        | control channel: to the worker of that epoch |
 * | choose_pair | server/rooms.ts: ask the balancer, answer with `pair` or `no_pair` |
 * | deliver     | generation: new tokens for the client, in order, each once |
 * | outcome     | generation: the one and only outcome the client sees; nothing is delivered after it |
 * | close       | server/rooms.ts: both halves have ended; forget the room (this moves the smallest sequence in use) |
 */

import type { Epoch, Outcome, Reason, RoomId, RoomKey, RouterToWorker, WorkerRef } from './messages.ts';

export type RoomEvent =
  | { type: 'pair'; prefill: WorkerRef; decode: WorkerRef; nowMs: number }
  | { type: 'no_pair'; nowMs: number }
  | { type: 'accepted'; key: RoomKey; epoch: Epoch; nowMs: number }
  | { type: 'tokens'; key: RoomKey; epoch: Epoch; position: number; tokens: number[]; nowMs: number }
  | { type: 'end'; key: RoomKey; epoch: Epoch; outcome: Outcome; tokenCount: number; nowMs: number }
  | { type: 'worker_up'; epoch: Epoch; nowMs: number }
  | { type: 'worker_lost'; epoch: Epoch; nowMs: number }
  | { type: 'client_lost'; nowMs: number }
  | { type: 'client_cancel'; finish: 'stop' | 'length' | null; nowMs: number }
  | { type: 'tick'; nowMs: number };

export type RoomEffect =
  | { type: 'send'; worker: WorkerRef; message: RouterToWorker }
  | { type: 'choose_pair'; room: RoomId; attempt: number; avoid: Epoch[] }
  | { type: 'deliver'; position: number; tokens: number[] }
  /** `attempts` made; `reason` inside the outcome is that of the last attempt or of the client. */
  | { type: 'outcome'; outcome: Outcome; attempts: number; tokenCount: number }
  | { type: 'close'; reason: Reason | null };
