/**
 * What an operator sees of a worker's rooms: one plain record for each live room, and one for each terminal message
 * that is not acknowledged. Read from the state on demand; nothing here is kept, so it cannot drift from it.
 */

import type { AbortMessage, DoneMessage, Epoch, Instance, PageId, RoomKey, SlotId } from '../transfer/messages.ts';
import { outstandingBytes } from '../transfer/receiver.ts';
import { gaugeOf as decodeGauge, type DecodeRoom, type DecodeState } from './decode.ts';
import type { Desk } from './desk.ts';
import type { Lease } from './pages.ts';
import { gaugeOf as prefillGauge, type PrefillRoom, type PrefillState } from './prefill.ts';

/** A live room of one worker. */
export interface RoomView {
  readonly key: RoomKey;
  /** Where its worker counts it: prealloc, transfer, waiting, running, inflight, unwinding, ... */
  readonly queue: string;
  /** Its phase in the state machine, finer than the queue. */
  readonly state: string;
  readonly peer: Instance;
  /** What it owns here, and under which name the ledger has it. */
  readonly owns: {
    readonly owner: string | null;
    readonly pages: readonly PageId[];
    readonly slot: SlotId | null;
    /** Credit granted and not used up, in bytes. */
    readonly creditBytes: number;
  };
  readonly progress: { readonly unitsDone: number; readonly units: number; readonly tokens: number };
  /** A step, read or write that refers to its memory is under way: an unwinding room waits for it. */
  readonly isBusy: boolean;
  readonly stopReason: string | null;
}

/** An ABORT or DONE that a peer, or an `end` that a router has not acknowledged. */
export interface UnackedView {
  readonly key: RoomKey;
  readonly to: 'peer' | 'router';
  readonly message: AbortMessage['type'] | DoneMessage['type'] | 'end';
  /** Name of the peer, epoch of the router. */
  readonly name: string;
  /** On the worker's clock; null where it is not known. */
  readonly sinceMs: number | null;
}

/** Every live room of a prefill worker, oldest first. */
export function viewPrefill(state: PrefillState): RoomView[] {
  return [...state.live].map(([key, room]) => prefillView(key, room));
}

/** Every live room of a decode worker, oldest first. */
export function viewDecode(state: DecodeState): RoomView[] {
  return [...state.live].map(([key, room]) => decodeView(key, room));
}

/** Every terminal message of this worker that waits for its acknowledgement. */
export function viewUnacked(desk: Desk): UnackedView[] {
  const toPeers = [...desk.closing.unwinds].map(([key, { peer, message, sinceMs }]): UnackedView => {
    return { key, to: 'peer', message: message.type, name: peer.name, sinceMs };
  });
  const toRouters = [...desk.closing.endings].map(([key, { router }]): UnackedView => {
    return { key, to: 'router', message: 'end', name: router, sinceMs: null };
  });
  return [...toPeers, ...toRouters];
}

/** Credit by epoch of the peer, in bytes: granted to it by us and not used up. Prefill: granted to us. */
export function creditByPeer(rooms: readonly RoomView[]): Map<Epoch, number> {
  const credit = new Map<Epoch, number>();
  for (const { peer, owns } of rooms) credit.set(peer.epoch, (credit.get(peer.epoch) ?? 0) + owns.creditBytes);
  return credit;
}

/** `bootstrapping` is what prefill calls the time before its peer has reserved; the queue is `prealloc` on both sides. */
const PREFILL_QUEUES = {
  bootstrapping: 'prealloc',
  waiting: 'waiting',
  computing: 'running',
  inflight: 'inflight',
  unwinding: 'unwinding',
} as const;

function prefillView(key: RoomKey, { sender, lease }: PrefillRoom): RoomView {
  return {
    key,
    queue: PREFILL_QUEUES[prefillGauge(sender)],
    state: sender.phase,
    peer: sender.peer,
    owns: { ...ownsOf(lease), creditBytes: sender.creditBytes - sender.readBytes },
    progress: { unitsDone: sender.sentUnits, units: sender.checksums.length, tokens: sender.computedTokens },
    isBusy: sender.stepping || sender.reads.length > 0,
    stopReason: sender.stopReason,
  };
}

/** A sequence on its way to host memory, or back, counts as retracted. */
const DECODE_QUEUES = {
  prealloc: 'prealloc',
  transfer: 'transfer',
  waiting: 'waiting',
  running: 'running',
  saving: 'retracted',
  retracted: 'retracted',
  restoring: 'retracted',
  unwinding: 'unwinding',
} as const;

function decodeView(key: RoomKey, room: DecodeRoom): RoomView {
  const { receiver, sequence, lease, peer } = room;
  const units = receiver?.units ?? [];
  return {
    key,
    queue: DECODE_QUEUES[decodeGauge(room)],
    state: sequence?.phase ?? receiver?.phase ?? 'ended',
    peer,
    owns: { ...ownsOf(lease), creditBytes: receiver === null ? 0 : outstandingBytes(receiver) },
    progress: {
      unitsDone: units.filter((unit) => unit === 'written').length,
      units: units.length,
      tokens: sequence?.tokens.length ?? 0,
    },
    isBusy: (sequence?.stepping ?? false) || (sequence?.moving ?? null) !== null || units.includes('writing'),
    stopReason: sequence?.stopReason ?? receiver?.stopReason ?? null,
  };
}

function ownsOf(lease: Lease | null): Pick<RoomView['owns'], 'owner' | 'pages' | 'slot'> {
  return lease === null
    ? { owner: null, pages: [], slot: null }
    : { owner: lease.owner, pages: [...lease.pages], slot: lease.slot };
}
