/**
 * The simulated cluster of one seed: routers, prefill and decode workers and clients in one thread, on one clock, and the
 * faults that its plan asks for. The same seed is the same run, event for event.
 *
 *   clock     what happens when                     swarm     what the seed decides before it begins
 *   network   hosts and connections                 workload  clients, who check what they get
 *   links     the protocol of transfer/channel.ts   audit     what must always hold, and at rest
 *   worker, router, ghost                           the loops of server/ over the real state machines, and a model
 */

import { makeEpoch, parseKey, type Epoch, type Reason, type RoomId, type RoomKey } from '../../transfer/messages.ts';
import { createPrng } from '../support/prng.ts';
import { always, auditGauges, auditScheduler, createCoverage, residueOf, SimFailure, type Coverage } from './audit.ts';
import { createClock } from './clock.ts';
import { createNetwork, type Block, type Host, type Pipe } from './network.ts';
import { startRouter, type Router } from './router.ts';
import { drawPlan, type FaultRates, type Plan } from './swarm.ts';
import { startWorker, type Bug, type Surroundings, type Worker } from './worker.ts';
import { canaryWish, drawWishes, leave, startClient, type Client, type Desk, type Wish } from './workload.ts';

/** A process's place: it outlives the lives that sit there. */
interface Seat {
  name: string;
  role: 'router' | 'prefill' | 'decode';
  /** Null while the process is down. */
  life: { host: Host; router: Router | null; worker: Worker | null } | null;
  /** Grows with every start and stop, so that a restart that was planned earlier does not disturb a later life. */
  turn: number;
  lives: number;
}

/** What a run was. */
export interface SimReport {
  plan: Plan;
  /** Hash over every message delivered and its time: equal for equal runs. */
  fingerprint: number;
  events: number;
  simulatedMs: number;
  clients: number;
  completed: number;
}

export interface SimOptions {
  coverage?: Coverage;
  bug?: Bug | null;
  /** Called with every line of the trace. */
  onTrace?: ((line: string) => void) | null;
}

/** When the simulated wall clock starts. */
const EPOCH_MS = 1_700_000_000_000;
/** How a seat that is not part of the core is broken for good. */
type Breakage = 'dead' | 'paused' | 'isolated' | 'flapping';
const BREAKAGES: readonly Breakage[] = ['dead', 'paused', 'isolated', 'flapping'];

/**
 * Run one seed to its end.
 *
 * @throws SimFailure, or whatever a state machine throws, when something that must hold does not.
 */
export function runSeed(
  seed: number,
  { coverage = createCoverage(), bug = null, onTrace = null }: SimOptions = {},
): SimReport {
  const random = createPrng(seed);
  const plan = drawPlan(seed, random);
  const clock = createClock();
  const network = createNetwork(clock, random, plan.weather);
  let fingerprint = 0;
  let life = 0;
  let isFaulty = plan.mode !== 'harmless';
  const { drop, corrupt, reorder, queueLimit } = plan.weather;
  /** Tokens may be lost at any time, without a trace on a link. */
  const isLossy = drop + corrupt + reorder > 0 || queueLimit < 1000;

  /** Lives in traces: `d0`, and after a restart `d0'2`. */
  const names = new Map<Epoch, string>();
  const trace = (who: string, what: () => string): void => {
    fingerprint = (Math.imul(fingerprint ^ Math.floor(clock.nowMs * 1000), 0x01000193) + who.length) >>> 0;
    if (onTrace === null) return;
    const line = `${clock.nowMs.toFixed(1).padStart(9)} ${who.padEnd(4)} ${what()}`;
    onTrace(line.replace(/[0-9a-f]{20}/g, (epoch) => names.get(epoch) ?? epoch));
  };

  // ---- clients and what they asked
  const clients: Client[] = [];
  const clientOf = new Map<RoomId, Client>();
  const disturbedMs = new Map<Epoch, number>();
  let asking: Client | null = null;
  let failing: Reason | null = null;

  function roomOf(key: RoomKey): RoomId {
    return parseKey(key)!.room;
  }

  const around: Surroundings = {
    plan,
    clock,
    network,
    random,
    coverage,
    bug,
    trace,
    promptOf(key) {
      const client = clientOf.get(roomOf(key))!;
      return { seed: client.seed, promptCount: client.wish.promptTokens.length };
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

  // ---- processes
  const seats: Seat[] = [
    ...Array.from({ length: plan.prefillCount }, (_, i) => newSeat(`p${i}`, 'prefill')),
    ...Array.from({ length: plan.decodeCount }, (_, i) => newSeat(`d${i}`, 'decode')),
    ...Array.from({ length: plan.routerCount }, (_, i) => newSeat(`r${i}`, 'router')),
  ];
  const workerSeats = seats.filter((seat): seat is Seat & { role: 'prefill' | 'decode' } => seat.role !== 'router');
  const routerSeats = seats.filter((seat) => seat.role === 'router');

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
    const epoch = makeEpoch(EPOCH_MS + clock.nowMs, ++life);
    names.set(epoch, seat.lives++ === 0 ? seat.name : `${seat.name}'${seat.lives}`);
    trace(seat.name, () => `starts as ${epoch}`);
    if (seat.role === 'router') {
      const router = startRouter(host, epoch, workerSeats, around, {
        onSubmit(submit, worker) {
          const room = roomOf(submit.key);
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

  function routerAt(seat: Seat): Router | null {
    return seat.life?.router ?? null;
  }

  function ask(wish: Wish, seat: Seat, name: string): Client | null {
    const router = routerAt(seat);
    if (router === null || seat.life!.host.isPaused) return null;
    trace(name, () => `asks ${seat.name}: ${wish.promptTokens.length} tokens, at most ${wish.maxTokens}`);
    const client = startClient(desk, router.rooms, { name, wish, router: router.epoch, plan }, (created) => {
      asking = created;
    });
    asking = null;
    if (client !== null) clients.push(client);
    return client;
  }

  // ---- faults
  const pick = <T>(list: readonly T[]): T => list[Math.floor(random() * list.length)]!;
  /** Mostly short, now and then longer than a lease. */
  const spanMs = (): number => 20 + random() ** 3 * 1.8 * plan.decode.leaseMs;
  const shuffled = <T>(list: readonly T[]): T[] =>
    list
      .map((each) => ({ each, at: random() }))
      .sort((a, b) => a.at - b.at)
      .map(({ each }) => each);

  function isOver(): boolean {
    return !isFaulty;
  }

  function blockFor(from: string, to: string, how: Block, ms: number): void {
    trace(from, () => `cannot reach ${to} for ${ms.toFixed(0)} ms (${how})`);
    network.block(from, to, how);
    clock.after(ms, () => {
      if (!isOver()) network.block(from, to, null);
    });
  }

  const acts: Record<keyof FaultRates, () => void> = {
    cut() {
      const open = [...network.pipes].filter((pipe: Pipe) => pipe.state === 'open');
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
          if (!isOver()) blockFor(seat.name, other.name, 'hold', spanMs());
        });
      }
    },
    crash() {
      const seat = pick(workerSeats);
      stop(seat, false);
      restartLater(seat, 5 + random() ** 2 * plan.decode.leaseMs * 1.5);
    },
    shutdown() {
      const seat = pick(workerSeats);
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
      const seat = pick(routerSeats);
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
        if (!isOver()) resume(seat, host);
      });
    },
  };

  function resume(seat: Seat, host: Host): void {
    if (!host.isPaused) return;
    trace(seat.name, () => 'is resumed');
    network.resume(host);
  }

  /** Something sent by this process, or to it, may be lost. */
  function noteDisturbance(name: string): void {
    const worker = seats.find((seat) => seat.name === name)?.life?.worker;
    if (worker) disturbedMs.set(worker.self.epoch, clock.nowMs);
    else
      for (const seat of workerSeats) if (seat.life?.worker) disturbedMs.set(seat.life.worker.self.epoch, clock.nowMs);
  }

  function scheduleFault(kind: keyof FaultRates): void {
    const rate = plan.rates[kind];
    if (rate === 0) return;
    clock.after((-Math.log(1 - random()) / rate) * 1000, () => {
      if (isOver()) return;
      coverage.saw(`fault ${kind}`);
      acts[kind]();
      scheduleFault(kind);
    });
  }

  // ---- the run
  for (const seat of shuffled(seats)) clock.after(random() * 100, () => start(seat));
  for (const [index, wish] of drawWishes(plan, random).entries()) {
    clock.after(wish.atMs, () => {
      ask(wish, pick(routerSeats), `c${index}`);
    });
  }
  if (random() < plan.cancel * 0.2) {
    clock.after(random() * plan.activeMs, () => {
      trace('all', () => 'clients leave at once');
      for (const client of clients) leave(desk, client, 'client_lost');
    });
  }
  for (const kind of Object.keys(plan.rates) as (keyof FaultRates)[]) scheduleFault(kind);
  while (clock.next(plan.activeMs));
  if (plan.mode !== 'safety') settle();
  auditAll();
  for (const { life: current } of seats) {
    if (!current?.worker) continue;
    const { role, state } = current.worker.scheduler;
    for (const [kind, count] of Object.entries(state.desk.drops)) if (count > 0) coverage.saw(`${role} drop ${kind}`);
  }

  const completed = clients.filter(({ outcome }) => outcome?.kind === 'stop' || outcome?.kind === 'length').length;
  return { plan, fingerprint, events: clock.eventCount, simulatedMs: clock.nowMs, clients: clients.length, completed };

  function auditAll(): void {
    for (const { life: current } of seats) {
      if (!current?.worker) continue;
      auditScheduler(current.worker.scheduler);
      auditGauges(current.worker.scheduler);
    }
  }

  /** Heal a core, break the rest for good, and demand that the core comes to rest and serves. */
  function settle(): void {
    isFaulty = false;
    const { weather } = plan;
    Object.assign(weather, {
      drop: 0,
      dropRepeated: 0,
      duplicate: 0,
      reorder: 0,
      corrupt: 0,
      queueLimit: 1000,
      maxLatencyMs: Math.min(weather.maxLatencyMs, 20),
      ackDelayMs: 0,
    });
    plan.engine.slow = 0;
    plan.requestMs = Math.max(plan.requestMs, 15_000);
    plan.shuffleFree = false;
    const core = new Set<Seat>();
    for (const role of ['prefill', 'decode', 'router'] as const) {
      const candidates = shuffled(seats.filter((seat) => seat.role === role));
      const count = plan.mode === 'harmless' || random() < 0.5 ? candidates.length : 1;
      for (const seat of candidates.slice(0, count)) core.add(seat);
    }
    for (const a of seats) for (const b of seats) if (a !== b) network.block(a.name, b.name, null);
    const broken = new Map<Seat, Breakage>();
    for (const seat of seats) {
      // What was planned for the seat is off; a worker that was told to stop does it now.
      seat.turn++;
      if (seat.life?.worker?.scheduler.state.desk.draining === true) stop(seat, true);
      if (core.has(seat)) {
        if (seat.life !== null) resume(seat, seat.life.host);
        start(seat);
        continue;
      }
      const how = pick(BREAKAGES);
      broken.set(seat, how);
      breakForGood(seat, how, core);
    }
    trace(
      'all',
      () =>
        `healed: ${[...core].map(({ name }) => name).join(' ')}; ${[...broken].map(([seat, how]) => `${seat.name} ${how}`).join(', ')}`,
    );

    const { leaseMs, roomMs, stallMs } = plan.decode;
    const boundMs = plan.requestMs + roomMs + 2 * stallMs + 4 * leaseMs + 10_000;
    // A worker that flaps may be chosen for any request, which then may fail; all must still come to rest.
    const isFlapping = [...broken.values()].includes('flapping');
    // By then every router has noticed who is silent.
    const noticedMs = clock.nowMs + (broken.size === 0 ? 0 : 2 * leaseMs + 1000);
    waitUntil(boundMs, 'L2', () => [
      ...(clock.nowMs < noticedMs ? ['the lease of what is broken'] : []),
      ...restlessness(core, broken),
    ]);
    for (const client of clients) {
      const isOwed = !client.isRouterDead && [...core].some((seat) => routerAt(seat)?.epoch === client.router);
      always(!isOwed || client.outcome !== null, 'L1', () => `${client.name} got no outcome`);
    }
    const isCoreName = (name: string): boolean => [...core].some((seat) => seat.name === name);
    for (const seat of core) {
      if (seat.role !== 'router') continue;
      waitUntil(3 * leaseMs + 5000, 'L4', () => {
        const { epoch, live } = routerAt(seat)!;
        const workers = [...core].flatMap(({ life: current }) => current?.worker ?? []);
        const apart = workers.filter(({ self, routers }) => !live.has(self.epoch) || !routers.has(epoch));
        // A unit that is sent while its connection is being made again is lost, and that costs the request.
        const hosts = new Set([...core].map(({ life: current }) => current?.host));
        const cut = [...network.pipes].filter(
          ({ host, address, state }) => state !== 'open' && hosts.has(host) && isCoreName(address.split(':')[0]!),
        );
        return [
          ...apart.map(({ self }) => `${seat.name} is not linked to ${self.name}`),
          ...cut.map(({ host, address, socket }) => `${host.name} has no ${socket} connection to ${address}`),
        ];
      });
      const canary = ask(canaryWish(clock.nowMs, random), seat, `canary-${seat.name}`);
      always(canary !== null || isFlapping, 'L4', () => `${seat.name} refused a request at rest`);
      if (canary === null) continue;
      waitUntil(boundMs, 'L4', () => (canary.outcome === null ? ['the canary has no outcome'] : []));
      const isServed = canary.outcome?.kind === 'length';
      always(isServed || isFlapping, 'L4', () => `the canary ended ${JSON.stringify(canary.outcome)} ${canary.reason}`);
    }
    waitUntil(boundMs, 'L2', () => restlessness(core, broken));
    if (broken.size === 0) coverage.saw('settled: whole cluster');
    for (const [seat, how] of broken) {
      if (seat.role !== 'router') coverage.saw(`settled: beside a${how === 'isolated' ? 'n' : ''} ${how} worker`);
    }
  }

  /** Run until nothing is missing, for at most `boundMs`. */
  function waitUntil(boundMs: number, rule: string, missing: () => string[]): void {
    const untilMs = clock.nowMs + boundMs;
    for (;;) {
      const found = missing();
      if (found.length === 0) return;
      always(clock.nowMs < untilMs, rule, () => `after ${(boundMs / 1000).toFixed(0)} s: ${found.join('; ')}`);
      const stepMs = clock.nowMs + 200;
      while (clock.next(stepMs));
    }
  }

  function breakForGood(seat: Seat, how: Breakage, core: ReadonlySet<Seat>): void {
    if (how === 'dead') {
      stop(seat, false);
      return;
    }
    start(seat);
    if (how === 'paused') {
      noteDisturbance(seat.name);
      network.pause(seat.life!.host);
      return;
    }
    resume(seat, seat.life!.host);
    const toggle = (isBlocked: boolean): void => {
      noteDisturbance(seat.name);
      for (const other of core) {
        const block = isBlocked ? 'lose' : null;
        network.block(seat.name, other.name, block);
        network.block(other.name, seat.name, block);
      }
      if (how === 'flapping') clock.after(500 + random() * 2 * plan.decode.leaseMs, () => toggle(!isBlocked));
    };
    toggle(true);
  }

  /** What keeps the core from being at rest. */
  function restlessness(core: ReadonlySet<Seat>, broken: ReadonlyMap<Seat, Breakage>): string[] {
    const found: string[] = [];
    const workers = new Set<Epoch>();
    const strangers = new Set<Epoch>();
    for (const { life: current } of core) if (current?.worker) workers.add(current.worker.self.epoch);
    for (const { life: current } of broken.keys()) if (current?.router) strangers.add(current.router.epoch);
    // A router that is down for good may have had many lives, none of which will ever be heard of again.
    const isRouterBroken = [...broken.keys()].some(({ role }) => role === 'router');
    if (isRouterBroken) {
      const known = new Set([...core].map((seat) => routerAt(seat)?.epoch));
      for (const client of clients) if (!known.has(client.router)) strangers.add(client.router);
    }
    for (const seat of core) {
      const { router, worker } = seat.life!;
      if (router !== null) {
        const { queued, running, unwinding } = router.rooms.stats();
        if (queued + running + unwinding > 0)
          found.push(`${seat.name}: ${queued} queued, ${running} running, ${unwinding} unwinding`);
        for (const { ref, halves } of router.live.values()) {
          if (halves.size > 0 && workers.has(ref.epoch))
            found.push(`${seat.name}: ${halves.size} halves counted at ${ref.name}`);
        }
      }
      if (worker === null) continue;
      const residue = residueOf(worker.scheduler, { workers, strangers });
      for (const what of [...residue, ...worker.busy()]) found.push(`${seat.name}: ${what}`);
    }
    return found;
  }
}

function newSeat(name: string, role: Seat['role']): Seat {
  return { name, role, life: null, turn: 0, lives: 0 };
}

/** The lines of a seed's trace, and how it failed, if it did. */
export function traceSeed(
  seed: number,
  bug: Bug | null = null,
): { lines: string[]; error: Error | null; report: SimReport | null } {
  const lines: string[] = [];
  try {
    const report = runSeed(seed, { bug, onTrace: (line) => lines.push(line) });
    return { lines, error: null, report };
  } catch (error) {
    if (!(error instanceof SimFailure)) lines.push(String((error as Error).stack));
    return { lines, error: error as Error, report: null };
  }
}
