/** A router of the simulator: the real rooms and balancer of server/, the links of server/router.ts, no HTTP. */

import type { WorkerView } from '../../server/balancer.ts';
import { createRooms, type RoomDriver } from '../../server/rooms.ts';
import type { ChannelEvent } from '../../transfer/channel.ts';
import { parseKey, type Epoch, type Reason, type SubmitMessage, type WorkerToRouter } from '../../transfer/messages.ts';
import { openConnector } from './links.ts';
import type { Host } from './network.ts';
import { controlAddress, describe, every, kindsOf, type Surroundings } from './worker.ts';

export interface Router {
  readonly host: Host;
  readonly epoch: Epoch;
  readonly rooms: RoomDriver;
  /** Live workers, as the balancer sees them. */
  readonly live: ReadonlyMap<Epoch, WorkerView>;
}

export interface RouterHooks {
  /** A half is being sent to a worker. */
  onSubmit: (submit: SubmitMessage, worker: Epoch) => void;
  /** A room failed for this reason; its client hears of it next. */
  onAborted: (reason: Reason) => void;
  /** A worker, or its link, was lost, or something it sent may have been. */
  onDisturbed: (worker: Epoch) => void;
}

/** Start a life of a router on `host`, with a seat for every worker. */
export function startRouter(
  host: Host,
  epoch: Epoch,
  seats: readonly { name: string; role: 'prefill' | 'decode' }[],
  around: Surroundings,
  hooks: RouterHooks,
): Router {
  const { plan, clock, network, coverage, trace } = around;
  const now = (): number => clock.nowMs + host.offsetMs;
  const live = new Map<Epoch, WorkerView>();

  const connector = openConnector({
    host,
    network,
    role: 'router',
    epoch,
    fields: { model: 'ghost' },
    heartbeatMs: plan.heartbeatMs,
    leaseMs: plan.decode.leaseMs,
    now,
    onEvent: onLinkEvent,
    onRejected: () => coverage.saw('frame rejected'),
  });
  const rooms = createRooms({
    epoch,
    modelDigest: plan.decode.modelDigest,
    get requestMs() {
      return plan.requestMs;
    },
    now,
    links: {
      workers: () => live.values(),
      send(worker, message) {
        if (message.type === 'submit') {
          const attempt = parseKey(message.key)!.attempt;
          if (attempt > 1) {
            coverage.saw(`attempt ${attempt}`);
            for (const kind of kindsOf(message.sampling)) coverage.saw(`another attempt with ${kind}`);
          }
          hooks.onSubmit(message, worker);
        }
        trace(host.name, () => `-> ${live.get(worker)?.ref.name ?? 'nobody'} ${describe(message)}`);
        connector.send(worker, 'control', message);
      },
    },
    onAborted: (reason) => hooks.onAborted(reason),
    onClosed: () => {},
  });

  function onLinkEvent(event: ChannelEvent): void {
    switch (event.type) {
      case 'up': {
        const { peer, address } = event;
        const seat = seats.find(({ name }) => controlAddress(name) === address);
        if (seat === undefined) return;
        trace(host.name, () => `worker up ${peer.name}`);
        if (live.has(peer.epoch)) {
          hooks.onDisturbed(peer.epoch);
        } else {
          const ref = { name: peer.name, epoch: peer.epoch, address: `${peer.name}:transfer` };
          live.set(peer.epoch, { role: seat.role, ref, load: null, halves: new Set() });
        }
        rooms.onLink({ type: 'worker_up', epoch: peer.epoch });
        break;
      }
      case 'lost':
        trace(host.name, () => `worker lost ${event.peer.name}: ${event.why}`);
        coverage.saw(`link lost: ${event.why}`);
        if (!live.delete(event.peer.epoch)) return;
        hooks.onDisturbed(event.peer.epoch);
        rooms.onLink({ type: 'worker_lost', epoch: event.peer.epoch });
        break;
      case 'message': {
        const message = event.message as WorkerToRouter;
        const { epoch: worker, name } = event.peer;
        coverage.saw(`message ${message.type}`);
        if (message.type === 'load') {
          const view = live.get(worker);
          if (view !== undefined) view.load = message;
          return;
        }
        trace(host.name, () => `<- ${name} ${describe(message)}`);
        rooms.onLink({ type: 'message', epoch: worker, message });
        break;
      }
      case 'refused':
        break;
      default:
        event satisfies never;
    }
  }

  for (const { name } of seats) connector.connect(controlAddress(name), true);
  every(around, host, plan.tickMs, () => {
    connector.check();
    rooms.tick();
  });
  every(around, host, plan.markMs, () => {
    const mark = { type: 'mark', smallestSequence: rooms.smallestSequence() } as const;
    for (const worker of live.keys()) connector.send(worker, 'control', mark);
  });
  return { host, epoch, rooms, live };
}
