/** What goes wrong with hosts and connections while a seed's faults last, at the rates of its plan. */

import type { Cluster, Seat } from './cluster.ts';
import type { Block } from './network.ts';
import type { FaultRates } from './swarm.ts';

/** The faults of a run, which somebody ends. */
export interface Faults {
  areOver: boolean;
}

/** Let faults happen from now on, until `areOver` is set. */
export function startFaults(cluster: Cluster): Faults {
  const { plan, clock, network, random, seats, coverage, trace } = cluster;
  const { pick, shuffled, seatsOf, stop, restartLater, resume, noteDisturbance } = cluster;
  const faults: Faults = { areOver: false };
  /** Mostly short, now and then longer than a lease. */
  const spanMs = (): number => 20 + random() ** 3 * 1.8 * plan.decode.leaseMs;

  function blockFor(from: string, to: string, how: Block, ms: number): void {
    trace(from, () => `cannot reach ${to} for ${ms.toFixed(0)} ms (${how})`);
    network.block(from, to, how);
    clock.after(ms, () => {
      if (!faults.areOver) network.block(from, to, null);
    });
  }

  const acts: Record<keyof FaultRates, () => void> = {
    cut() {
      const open = [...network.pipes].filter((pipe) => pipe.state === 'open');
      if (open.length === 0) return;
      const pipe = pick(open);
      trace(pipe.host.name, () => `loses its ${pipe.socket} connection to ${pipe.address}`);
      noteDisturbance(pipe.address.split(':')[0]!);
      network.cut(pipe);
    },
    partition() {
      const [a, b] = shuffled(seats) as [Seat, Seat];
      const ms = spanMs();
      const how = random() < 0.5 ? 'hold' : 'lose';
      noteDisturbance(a.name);
      noteDisturbance(b.name);
      blockFor(a.name, b.name, how, ms);
      // One way only: each side believes something else.
      if (random() < 0.6) blockFor(b.name, a.name, how, ms);
    },
    isolate() {
      const seat = pick(seats);
      const ms = spanMs();
      noteDisturbance(seat.name);
      for (const other of seats) {
        if (other === seat) continue;
        blockFor(seat.name, other.name, 'lose', ms);
        blockFor(other.name, seat.name, 'lose', ms);
      }
    },
    swizzle() {
      const seat = pick(seats);
      noteDisturbance(seat.name);
      for (const [index, other] of shuffled(seats).entries()) {
        if (other === seat) continue;
        clock.after(index * 100, () => {
          if (!faults.areOver) blockFor(seat.name, other.name, 'hold', spanMs());
        });
      }
    },
    crash() {
      const seat = pick(seatsOf('prefill', 'decode'));
      stop(seat, false);
      restartLater(seat, 5 + random() ** 2 * plan.decode.leaseMs * 1.5);
    },
    shutdown() {
      const seat = pick(seatsOf('prefill', 'decode'));
      const worker = seat.life?.worker ?? null;
      if (worker === null || worker.host.isPaused) return;
      trace(seat.name, () => 'is told to stop');
      const { turn } = seat;
      const isSame = (): boolean => seat.turn === turn && !worker.host.isPaused;
      worker.drain();
      clock.after(random() * 2000, () => {
        if (isSame()) worker.cancelAll();
      });
      clock.after(2000 + random() * 1000, () => {
        if (!isSame()) return;
        stop(seat, true);
        restartLater(seat, 5 + random() * 2000);
      });
    },
    routerCrash() {
      const seat = pick(seatsOf('router'));
      stop(seat, false);
      restartLater(seat, 5 + random() ** 2 * plan.decode.leaseMs * 1.5);
    },
    pause() {
      const seat = pick(seats);
      const host = seat.life?.host;
      if (host === undefined || host.isPaused) return;
      const ms = spanMs();
      trace(seat.name, () => `is paused for ${ms.toFixed(0)} ms`);
      noteDisturbance(seat.name);
      network.pause(host);
      clock.after(ms, () => {
        if (!faults.areOver && seat.life?.host === host) resume(seat);
      });
    },
  };

  /** The next fault of a kind comes after an exponentially distributed time. */
  function scheduleNext(kind: keyof FaultRates): void {
    const rate = plan.rates[kind];
    if (rate === 0) return;
    clock.after((-Math.log(1 - random()) / rate) * 1000, () => {
      if (faults.areOver) return;
      coverage.saw(`fault ${kind}`);
      acts[kind]();
      scheduleNext(kind);
    });
  }
  for (const kind of Object.keys(acts) as (keyof FaultRates)[]) scheduleNext(kind);
  return faults;
}
