/**
 * Who this process has talked to: every peer by name, its present life, and how long it has been silent.
 *
 * Links forget a peer when it is lost, which is the moment an operator wants its name. The book keeps it, down and with
 * its silence growing, until it comes back, a later life takes its name, or it has been gone for long.
 */
import type { ChannelEvent, LinkView } from '../../transfer/channel.ts';
import type { Epoch } from '../../transfer/messages.ts';

/** A peer that has been gone for so long is forgotten: in a cluster that scales, names do not come back. */
const FORGET_MS = 600_000;

/** A peer as `/metrics` and `/debug/rooms` show it. */
export interface PeerView {
  readonly name: string;
  readonly role: string;
  readonly epoch: Epoch;
  readonly isUp: boolean;
  /** Since anything was heard of it. */
  readonly silenceSeconds: number;
  /** How often another life took its name. */
  readonly epochChanges: number;
}

interface Entry {
  role: string;
  epoch: Epoch;
  isUp: boolean;
  heardMs: number;
  epochChanges: number;
}

/** The book of one process. */
export interface PeerBook {
  /** Every event of a channel passes here; only `up` and `lost` are of interest. */
  onEvent(event: ChannelEvent, nowMs: number): void;
  /** Ask the links when their peers were last heard. Call it every tick: a lost link cannot be asked any more. */
  look(nowMs: number): void;
  peers(nowMs: number): PeerView[];
}

/** An empty book. `links` are what the channels say of their links at the moment. */
export function createPeerBook(links: () => readonly LinkView[]): PeerBook {
  const entries = new Map<string, Entry>();

  function look(nowMs: number): void {
    for (const { peer, silenceMs } of links()) {
      const entry = entries.get(peer.name);
      if (entry?.epoch === peer.epoch && entry.isUp) entry.heardMs = nowMs - silenceMs;
    }
    for (const [name, { isUp, heardMs }] of entries) {
      if (!isUp && nowMs - heardMs > FORGET_MS) entries.delete(name);
    }
  }

  return {
    onEvent(event, nowMs) {
      if (event.type !== 'up' && event.type !== 'lost') return;
      const { name, role, epoch } = event.peer;
      const entry = entries.get(name);
      if (event.type === 'up') {
        const changes = entry?.epochChanges ?? 0;
        const epochChanges = entry === undefined || entry.epoch === epoch ? changes : changes + 1;
        entries.set(name, { role, epoch, isUp: true, heardMs: nowMs, epochChanges });
      } else if (entry?.epoch === epoch) {
        entry.isUp = false;
      }
    },
    look,
    peers(nowMs) {
      look(nowMs);
      return [...entries].map(([name, { role, epoch, isUp, heardMs, epochChanges }]) => {
        return { name, role, epoch, isUp, silenceSeconds: Math.max(0, nowMs - heardMs) / 1000, epochChanges };
      });
    },
  };
}
