/**
 * The end of a seed: heal a core of the cluster, break the rest for good, and demand progress. Wedges (an entry that
 * nothing will ever move, a worker that takes no more) are found only this way: while faults last, anything may be slow.
 */

import type { Epoch } from '../../transfer/messages.ts';
import { always, residueOf } from './audit.ts';
import type { Cluster, Seat } from './cluster.ts';
import { canaryWish } from './workload.ts';

/** How a seat that is not part of the core is broken for good. */
type Breakage = 'dead' | 'paused' | 'isolated' | 'flapping';
const BREAKAGES: readonly Breakage[] = ['dead', 'paused', 'isolated', 'flapping'];

/** The healed seats, and what is wrong with the others. */
interface Split {
  core: ReadonlySet<Seat>;
  broken: ReadonlyMap<Seat, Breakage>;
}

/**
 * Let the cluster settle: within a bound that its clocks give, every request of the core has an outcome (L1), all ledgers
 * are at their baseline and nothing is owed (L2, L3), and a new request succeeds (L4).
 */
export function settle(cluster: Cluster): void {
  const { plan, clock, clients, coverage, trace } = cluster;
  const { maxLatencyMs } = plan.weather;
  calmDown(cluster);
  const split = heal(cluster);
  const { core, broken } = split;
  trace('all', () => {
    const parts = [...core].map(({ name }) => name).concat([...broken].map(([{ name }, how]) => `${name} ${how}`));
    return `healed: ${parts.join(', ')}`;
  });
  const { leaseMs, roomMs, stallMs } = plan.decode;
  const boundMs = plan.requestMs + roomMs + 2 * stallMs + 4 * leaseMs + 10_000;
  // By then every router has noticed who is silent, and links that ended because all was slow are there again.
  const isSlow = maxLatencyMs >= leaseMs / 4;
  const noticedMs = clock.nowMs + (broken.size === 0 && !isSlow ? 0 : 2 * leaseMs + 1000) + 2 * maxLatencyMs;
  waitUntil(cluster, boundMs, 'L2', () => [
    ...(clock.nowMs < noticedMs ? ['leases may still run out'] : []),
    ...restlessness(split),
  ]);
  const routers = [...core].filter(({ role }) => role === 'router');
  for (const client of clients) {
    const isOwed = !client.isRouterDead && routers.some(({ life }) => life?.router?.epoch === client.router);
    always(!isOwed || client.outcome !== null, 'L1', () => `${client.name} got no outcome`);
  }
  for (const seat of routers) {
    waitUntil(cluster, 3 * leaseMs + 5000, 'L4', () => missingLinks(cluster, seat, core));
    askCanary(cluster, seat, split, boundMs);
  }
  waitUntil(cluster, boundMs, 'L2', () => restlessness(split));
  if (broken.size === 0) coverage.saw('settled: whole cluster');
  for (const [seat, how] of broken) {
    if (seat.role !== 'router') coverage.saw(`settled: beside a${how === 'isolated' ? 'n' : ''} ${how} worker`);
  }
}

/** No packet is lost any more and no engine stands still; requests get the time that a settled cluster needs. */
function calmDown({ plan }: Cluster): void {
  const { weather } = plan;
  const calm = { drop: 0, dropRepeated: 0, duplicate: 0, reorder: 0, corrupt: 0, queueLimit: 1000, ackDelayMs: 0 };
  Object.assign(weather, calm);
  weather.maxLatencyMs = Math.min(weather.maxLatencyMs, 20);
  plan.engine.slow = 0;
  plan.requestMs = Math.max(plan.requestMs, 15_000);
  plan.shuffleFree = false;
}

/** Choose a core, at least one process of each role, and make it whole; the rest breaks. */
function heal(cluster: Cluster): Split {
  const { plan, network, random, seats, seatsOf, shuffled, pick } = cluster;
  const core = new Set<Seat>();
  for (const role of ['prefill', 'decode', 'router'] as const) {
    const candidates = shuffled(seatsOf(role));
    const count = plan.mode === 'harmless' || random() < 0.5 ? candidates.length : 1;
    for (const seat of candidates.slice(0, count)) core.add(seat);
  }
  for (const a of seats) for (const b of seats) if (a !== b) network.block(a.name, b.name, null);
  const broken = new Map<Seat, Breakage>();
  for (const seat of seats) {
    // What was planned for the seat is off; a worker that was told to stop does it now.
    seat.turn++;
    if (seat.life?.worker?.scheduler.state.desk.draining === true) cluster.stop(seat, true);
    if (core.has(seat)) {
      cluster.resume(seat);
      cluster.start(seat);
      continue;
    }
    const how = pick(BREAKAGES);
    broken.set(seat, how);
    breakForGood(cluster, seat, how, core);
  }
  return { core, broken };
}

function breakForGood(cluster: Cluster, seat: Seat, how: Breakage, core: ReadonlySet<Seat>): void {
  const { plan, clock, network, random } = cluster;
  if (how === 'dead') {
    cluster.stop(seat, false);
    return;
  }
  cluster.start(seat);
  if (how === 'paused') {
    cluster.noteDisturbance(seat.name);
    network.pause(seat.life!.host);
    return;
  }
  cluster.resume(seat);
  const toggle = (isBlocked: boolean): void => {
    cluster.noteDisturbance(seat.name);
    for (const other of core) {
      const block = isBlocked ? 'lose' : null;
      network.block(seat.name, other.name, block);
      network.block(other.name, seat.name, block);
    }
    if (how === 'flapping') clock.after(500 + random() * 2 * plan.decode.leaseMs, () => toggle(!isBlocked));
  };
  toggle(true);
}

/** One more request at a router of the core: it must be served. */
function askCanary(cluster: Cluster, seat: Seat, { broken }: Split, boundMs: number): void {
  const { clock, random } = cluster;
  // A worker that flaps may be chosen for any request, which then may fail; it still must have an outcome.
  const isFlapping = [...broken.values()].includes('flapping');
  const canary = cluster.ask(canaryWish(clock.nowMs, random), seat, `canary-${seat.name}`);
  always(canary !== null || isFlapping, 'L4', () => `${seat.name} refused a request at rest`);
  if (canary === null) return;
  waitUntil(cluster, boundMs, 'L4', () => (canary.outcome === null ? ['the canary has no outcome'] : []));
  const { outcome, reason } = canary;
  always(outcome?.kind === 'length' || isFlapping, 'L4', () => `the canary ended ${outcome?.kind} (${reason})`);
}

/** Links and connections that a router of the core, and workers among each other, have still to make. */
function missingLinks({ network }: Cluster, seat: Seat, core: ReadonlySet<Seat>): string[] {
  const { epoch, live } = seat.life!.router!;
  const found: string[] = [];
  for (const { life } of core) {
    const worker = life!.worker;
    if (worker === null || (live.has(worker.self.epoch) && worker.routers.has(epoch))) continue;
    found.push(`${seat.name} is not linked to ${worker.self.name}`);
  }
  // A unit that is sent while its connection is being made again is lost, and that costs the request.
  const names = new Set([...core].map(({ name }) => name));
  for (const { host, address, socket, state } of network.pipes) {
    if (state === 'open' || !names.has(host.name) || !names.has(address.split(':')[0]!)) continue;
    found.push(`${host.name} has no ${socket} connection to ${address}`);
  }
  return found;
}

/** What keeps the core from being at rest. */
function restlessness({ core, broken }: Split): string[] {
  const found: string[] = [];
  const workers = new Set<Epoch>();
  const routers = new Set<Epoch>();
  for (const { life } of core) {
    if (life?.worker) workers.add(life.worker.self.epoch);
    if (life?.router) routers.add(life.router.epoch);
  }
  // Of a router that is broken for good, in whichever life, workers may remember what they cannot tell it.
  const isRouterBroken = [...broken.keys()].some(({ role }) => role === 'router');
  for (const seat of core) {
    const { router, worker } = seat.life!;
    if (router !== null) {
      for (const [what, count] of Object.entries(router.rooms.stats())) {
        if (count > 0) found.push(`${seat.name}: ${count} rooms ${what}`);
      }
      for (const { ref, halves } of router.live.values()) {
        if (halves.size > 0 && workers.has(ref.epoch)) found.push(`${seat.name}: ${halves.size} halves at ${ref.name}`);
      }
    }
    if (worker === null) continue;
    const residue = residueOf(worker.scheduler, { workers, routers: isRouterBroken ? routers : null });
    for (const what of [...residue, ...worker.busy()]) found.push(`${seat.name}: ${what}`);
  }
  return found;
}

/** Run until nothing is missing, for at most `boundMs`. */
function waitUntil({ clock }: Cluster, boundMs: number, rule: string, missing: () => string[]): void {
  const untilMs = clock.nowMs + boundMs;
  for (;;) {
    const found = missing();
    if (found.length === 0) return;
    always(clock.nowMs < untilMs, rule, () => `after ${(boundMs / 1000).toFixed(0)} s: ${found.join('; ')}`);
    const stepMs = clock.nowMs + 200;
    while (clock.next(stepMs));
  }
}
