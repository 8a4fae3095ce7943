/**
 * The prefill worker's scheduler: rooms from submit to sent.
 *
 * Events come in through `stepPrefill`, which mutates the state and returns effects (scheduler/types.ts
 * says who performs them); batches are pulled with `nextPrefillBatch`.
 *
 * | event          | from |
 * |----------------|------|
 * | router_message | control channel: submit, cancel, peer_failed, end_ack, mark, drain |
 * | router_lost    | control channel: lease over or newer epoch; last event of that epoch |
 * | peer_message   | transfer channel: OPEN, QUEUED, RESERVED, CREDIT, DONE, ABORT, ABORT_ACK |
 * | peer_up        | transfer channel: both sockets are linked; again after a reconnect |
 * | peer_lost      | transfer channel: lease over or newer epoch; last event of that epoch's link |
 * | read_done      | engine, for every `read` effect, also when the room is unwinding |
 * | step_done      | engine, once for every batch that `nextPrefillBatch` returned |
 * | tick           | a timer, also when idle, paused and draining (50 ms is a good period) |
 * | drain          | worker shutdown |
 *
 * Effects returned: send, read, discard, report, violation.
 */

import type { Epoch, Instance, PeerMessage, RoomKey, RouterToWorker } from '../transfer/messages.ts';
import type { SampledToken } from './types.ts';

export type PrefillEvent =
  | { type: 'router_message'; router: Epoch; message: RouterToWorker; nowMs: number }
  | { type: 'router_lost'; router: Epoch; nowMs: number }
  | { type: 'peer_message'; peer: Instance; message: PeerMessage; nowMs: number }
  | { type: 'peer_up'; peer: Instance; nowMs: number }
  | { type: 'peer_lost'; peer: Instance; nowMs: number }
  | { type: 'read_done'; key: RoomKey; firstUnit: number; checksums: number[]; nowMs: number }
  /** `tokens`: the sampled first token of every `last` chunk of the batch. */
  | { type: 'step_done'; tokens: SampledToken[]; nowMs: number }
  | { type: 'tick'; nowMs: number }
  | { type: 'drain'; nowMs: number };
