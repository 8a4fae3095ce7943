/**
 * The simulated cluster of one seed: routers, prefill and decode workers and clients in one thread, on one clock, and the
 * faults that its plan asks for. The same seed is the same run, event for event.
 *
 *   clock, network   what happens when; hosts and connections      swarm     what the seed decides before it begins
 *   links            the protocol of transfer/channel.ts           workload  clients, who check what they get
 *   worker, router   the loops of server/ over the real machines   faults    what goes wrong
 *   ghost            a model whose bytes say where they belong     settle    a core is healed and must come to rest
 *   answer           the right answer to a request                 audit     what must always hold, and at rest
 *   cluster          who sits where, in which life
 */

import { createPrng } from '../support/prng.ts';
import { auditGauges, auditScheduler, createCoverage, SimFailure, type Coverage } from './audit.ts';
import { createCluster, type Cluster } from './cluster.ts';
import { startFaults } from './faults.ts';
import { settle } from './settle.ts';
import { drawPlan, type Plan } from './swarm.ts';
import type { Bug } from './worker.ts';
import { drawWishes, leave } from './workload.ts';

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
  const cluster = createCluster(plan, random, { coverage, bug, onTrace });
  const { clock, clients } = cluster;
  for (const seat of cluster.shuffled(cluster.seats)) clock.after(random() * 100, () => cluster.start(seat));
  startClients(cluster);
  const faults = startFaults(cluster);
  while (clock.next(plan.activeMs));
  faults.areOver = true;
  if (plan.mode !== 'safety') settle(cluster);
  auditAll(cluster);
  const completed = clients.filter(({ outcome }) => outcome?.kind === 'stop' || outcome?.kind === 'length').length;
  const fingerprint = cluster.fingerprint();
  return { plan, fingerprint, events: clock.eventCount, simulatedMs: clock.nowMs, clients: clients.length, completed };
}

function startClients({ plan, clock, random, clients, desk, ask, pick, seatsOf, trace }: Cluster): void {
  for (const [index, wish] of drawWishes(plan, random).entries()) {
    clock.after(wish.atMs, () => void ask(wish, pick(seatsOf('router')), `c${index}`));
  }
  if (random() >= plan.cancel * 0.2) return;
  clock.after(random() * plan.activeMs, () => {
    trace('all', () => 'clients leave at once');
    for (const client of clients) leave(desk, client, 'client_lost');
  });
}

function auditAll({ seats, coverage }: Cluster): void {
  for (const { life } of seats) {
    if (!life?.worker) continue;
    const { scheduler } = life.worker;
    auditScheduler(scheduler);
    auditGauges(scheduler);
    for (const [kind, count] of Object.entries(scheduler.state.desk.drops)) {
      if (count > 0) coverage.saw(`${scheduler.role} drop ${kind}`);
    }
  }
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
