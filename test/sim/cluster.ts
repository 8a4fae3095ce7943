/**
 * The processes of a seed and the clients that ask them: who sits where, in which life, and what was disturbed when.
 * faults.ts and settle.ts act on it.
 */

import { makeEpoch, parseKey, type Epoch, type Reason, type RoomId } from '../../transfer/messages.ts';
import type { Coverage } from './audit.ts';
import { createClock, type Clock } from './clock.ts';
import { createNetwork, type Host, type Network } from './network.ts';
import { startRouter, type Router } from './router.ts';
import type { Plan } from './swarm.ts';
import { startWorker, type Bug, type Surroundings, type Worker } from './worker.ts';
import { startClient, type Client, type Desk, type Wish } from './workload.ts';

/** A process's place: it outlives the lives that sit there. */
export interface Seat {
  readonly name: string;
  readonly role: 'router' | 'prefill' | 'decode';
  /** Null while the process is down. */
  life: { host: Host; router: Router | null; worker: Worker | null } | null;
  /** Grows with every start and stop, so that a restart that was planned earlier does not disturb a later life. */
  turn: number;
  lives: number;
}

export interface Cluster {
  readonly plan: Plan;
  readonly clock: Clock;
  readonly network: Network;
  readonly coverage: Coverage;
  readonly random: () => number;
  readonly seats: readonly Seat[];
  readonly clients: readonly Client[];
  /** What clients need of the world. */
  readonly desk: Desk;
  trace: (who: string, what: () => string) => void;
  /** Hash over everything that was traced: equal for equal runs. */
  fingerprint: () => number;
  pick: <T>(list: readonly T[]) => T;
  shuffled: <T>(list: readonly T[]) => T[];
  seatsOf: (...roles: Seat['role'][]) => Seat[];
  /** A new life in this seat; nothing if it has one. */
  start: (seat: Seat) => void;
  /** The end of its life. With `flushes`, what it sent before still arrives. */
  stop: (seat: Seat, flushes: boolean) => void;
  restartLater: (seat: Seat, ms: number) => void;
  resume: (seat: Seat) => void;
  /** A client asks the router in that seat. Null if it is down, or refuses. */
  ask: (wish: Wish, seat: Seat, name: string) => Client | null;
  /** Something that this process sent, or that was sent to it, may be lost from now on. */
  noteDisturbance: (name: string) => void;
}

/** When the simulated wall clock starts. */
const EPOCH_MS = 1_700_000_000_000;

/** The cluster of a plan, with every seat empty. */
export function createCluster(
  plan: Plan,
  random: () => number,
  { coverage, bug, onTrace }: { coverage: Coverage; bug: Bug | null; onTrace: ((line: string) => void) | null },
): Cluster {
  const clock = createClock();
  const network = createNetwork(clock, random, plan.weather);
  const { drop, corrupt, reorder, queueLimit } = plan.weather;
  /** Tokens may be lost at any time, without a trace on a link. */
  const isLossy = drop + corrupt + reorder > 0 || queueLimit < 1000;
  let fingerprint = 0;
  let lifeCount = 0;

  /** Lives in traces: `d0`, and after a restart `d0'2`. */
  const names = new Map<Epoch, string>();
  const trace = (who: string, what: () => string): void => {
    fingerprint = (Math.imul(fingerprint ^ Math.floor(clock.nowMs * 1000), 0x01000193) + who.length) >>> 0;
    if (onTrace === null) return;
    const line = `${clock.nowMs.toFixed(1).padStart(9)} ${who.padEnd(4)} ${what()}`;
    onTrace(line.replace(/[0-9a-f]{20}/g, (epoch) => names.get(epoch) ?? epoch));
  };

  const clients: Client[] = [];
  const clientOf = new Map<RoomId, Client>();
  /** By life of a worker: when tokens of it may last have been lost. */
  const disturbedMs = new Map<Epoch, number>();
  /** The client that is asking, and why the room whose end is being told failed: both only during one call. */
  let asking: Client | null = null;
  let failing: Reason | null = null;

  const around: Surroundings = {
    plan,
    clock,
    network,
    random,
    coverage,
    bug,
    trace,
    promptOf(key) {
      const { answer, seeds, digest, wish } = clientOf.get(parseKey(key)!.room)!;
      return { answer, seeds, digest, promptCount: wish.promptTokens.length };
    },
    underWay: new Map(),
  };

  const desk: Desk = {
    coverage,
    now: () => clock.nowMs,
    after: (ms, act) => clock.after(ms, act),
    trace,
    takeReason() {
      const reason = failing;
      failing = null;
      return reason;
    },
    wasDisturbed: (epoch, sinceMs) => isLossy || (disturbedMs.get(epoch) ?? -1) >= sinceMs,
  };

  const newSeats = (role: Seat['role'], count: number): Seat[] =>
    Array.from({ length: count }, (_, i) => ({ name: `${role[0]}${i}`, role, life: null, turn: 0, lives: 0 }));
  const seats = [
    ...newSeats('prefill', plan.prefillCount),
    ...newSeats('decode', plan.decodeCount),
    ...newSeats('router', plan.routerCount),
  ];
  const seatsOf = (...roles: Seat['role'][]): Seat[] => seats.filter(({ role }) => roles.includes(role));
  const workerSeats = seats.flatMap(({ name, role }) => (role === 'router' ? [] : [{ name, role }]));

  function start(seat: Seat): void {
    if (seat.life !== null) return;
    seat.turn++;
    const host: Host = {
      name: seat.name,
      isAlive: true,
      isPaused: false,
      backlog: [],
      offsetMs: Math.floor(random() * 1_000_000),
    };
    const epoch = makeEpoch(EPOCH_MS + clock.nowMs, ++lifeCount);
    names.set(epoch, seat.lives++ === 0 ? seat.name : `${seat.name}'${seat.lives}`);
    trace(seat.name, () => `starts as ${epoch}`);
    if (seat.role === 'router') {
      const router = startRouter(host, epoch, workerSeats, around, {
        onSubmit(submit, worker) {
          const { room } = parseKey(submit.key)!;
          if (asking !== null) clientOf.set(room, asking);
          clientOf.get(room)!.workers.add(worker);
        },
        onAborted(reason) {
          failing = reason;
        },
        onDisturbed: (worker) => disturbedMs.set(worker, clock.nowMs),
      });
      seat.life = { host, router, worker: null };
    } else {
      seat.life = { host, router: null, worker: startWorker(seat.role, host, epoch, around) };
    }
  }

  function stop(seat: Seat, flushes: boolean): void {
    if (seat.life === null) return;
    const { host, router, worker } = seat.life;
    trace(seat.name, () => 'ends');
    if (worker !== null) {
      disturbedMs.set(worker.self.epoch, clock.nowMs);
      if (worker.rooms() > 0) coverage.saw('worker restarted with rooms in flight');
    }
    if (router !== null) {
      const { queued, running } = router.rooms.stats();
      if (queued + running > 0) coverage.saw('router restarted with rooms in flight');
      for (const client of clients) {
        if (client.router !== router.epoch) continue;
        client.hasLeft = true;
        client.isRouterDead = true;
      }
    }
    network.kill(host, flushes);
    seat.life = null;
    seat.turn++;
  }

  function restartLater(seat: Seat, ms: number): void {
    const { turn } = seat;
    clock.after(ms, () => {
      if (seat.turn === turn) start(seat);
    });
  }

  function ask(wish: Wish, seat: Seat, name: string): Client | null {
    const { router, host } = seat.life ?? {};
    if (router == null || host?.isPaused === true) return null;
    trace(name, () => `asks ${seat.name}: ${wish.promptTokens.length} tokens, at most ${wish.maxTokens}`);
    const client = startClient(desk, router.rooms, { name, wish, router: router.epoch, plan }, (created) => {
      asking = created;
    });
    asking = null;
    if (client !== null) clients.push(client);
    return client;
  }

  function noteDisturbance(name: string): void {
    const itself = seats.filter((seat) => seat.name === name && seat.role !== 'router');
    // A router's trouble is trouble for what every worker tells it.
    for (const { life } of itself.length > 0 ? itself : seats) {
      if (life?.worker) disturbedMs.set(life.worker.self.epoch, clock.nowMs);
    }
  }

  return {
    plan,
    clock,
    network,
    coverage,
    random,
    seats,
    clients,
    desk,
    trace,
    fingerprint: () => fingerprint,
    pick: (list) => list[Math.floor(random() * list.length)]!,
    shuffled: (list) =>
      list
        .map((each) => ({ each, at: random() }))
        .sort((a, b) => a.at - b.at)
        .map(({ each }) => each),
    seatsOf,
    start,
    stop,
    restartLater,
    resume(seat) {
      const host = seat.life?.host;
      if (host?.isPaused !== true) return;
      trace(seat.name, () => 'is resumed');
      network.resume(host);
    },
    ask,
    noteDisturbance,
  };
}
