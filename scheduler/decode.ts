/**
 * The decode worker's scheduler: rooms from submit to the last token.
 *
 * Events come in through `stepDecode`, which mutates the state and returns effects (scheduler/types.ts
 * says who performs them); batches are pulled with `nextDecodeBatch`.
 *
 * | event          | from |
 * |----------------|------|
 * | router_message | control channel: submit, cancel, peer_failed, end_ack, mark, drain |
 * | router_lost    | control channel: lease over or newer epoch; last event of that epoch |
 * | peer_message   | transfer channel: QUEUED, CHUNK (with payload), END, DONE_ACK, ABORT, ABORT_ACK |
 * | peer_up        | transfer channel: both sockets are linked; again after a reconnect |
 * | peer_lost      | transfer channel: lease over or newer epoch; its data socket is closed by then |
 * | written        | engine, for every `write` effect, also when the room is unwinding |
 * | step_done      | engine, once for every batch that `nextDecodeBatch` returned: one token per row |
 * | tick           | a timer, also when idle, paused and draining (50 ms is a good period) |
 * | drain          | worker shutdown |
 *
 * Effects returned: connect, send, write, report, violation.
 *
 * Admission reserves pages for prompt and longest answer up front, so a running sequence never lacks
 * a page and nothing is ever retracted. A request larger than the whole pool is refused (`overloaded`).
 */

import type { Epoch, Instance, PeerMessage, RoomKey, RouterToWorker } from '../transfer/messages.ts';
import type { SampledToken } from './types.ts';

export type DecodeEvent =
  | { type: 'router_message'; router: Epoch; message: RouterToWorker; nowMs: number }
  | { type: 'router_lost'; router: Epoch; nowMs: number }
  /** `payload` belongs to CHUNK; it is empty for everything else. */
  | { type: 'peer_message'; peer: Instance; message: PeerMessage; payload: Uint8Array; nowMs: number }
  | { type: 'peer_up'; peer: Instance; nowMs: number }
  | { type: 'peer_lost'; peer: Instance; nowMs: number }
  | { type: 'written'; key: RoomKey; unit: number; nowMs: number }
  | { type: 'step_done'; tokens: SampledToken[]; nowMs: number }
  | { type: 'tick'; nowMs: number }
  | { type: 'drain'; nowMs: number };
