/** What "nothing is left" means: the gauges that must be zero on every process of a cluster at rest. */
import { untilMetrics, type Sample } from './cluster.ts';

/** Gauges that count something held; with the label values that do not count. */
const HELD: readonly { name: string; except?: { label: string; values: readonly string[] } }[] = [
  { name: 'handoff_active_requests' },
  { name: 'handoff_queue_requests' },
  { name: 'handoff_kv_pages', except: { label: 'state', values: ['free', 'cached'] } },
  { name: 'handoff_state_slots', except: { label: 'state', values: ['free'] } },
  { name: 'handoff_transfer_in_flight_bytes' },
  { name: 'handoff_host_bytes' },
];

/** Every gauge that is not zero, as text; empty when nothing is held. Throws when a gauge of a worker is missing. */
export function held(samples: readonly Sample[]): string[] {
  // A process that was too busy to answer in time is not at rest.
  if (!samples.some((sample) => sample.name === 'handoff_active_requests')) return ['no metrics of the router'];
  for (const role of ['prefill', 'decode']) {
    if (!samples.some((sample) => sample.name === 'handoff_queue_requests' && sample.labels.engine_type === role)) {
      return [`no metrics of ${role}`];
    }
  }
  const found: string[] = [];
  for (const { name, except } of HELD) {
    const family = samples.filter((sample) => sample.name === name);
    if (family.length === 0) throw new Error(`no metric ${name}`);
    for (const sample of family) {
      if (except?.values.includes(sample.labels[except.label] ?? '')) continue;
      if (sample.value !== 0) found.push(`${name}${JSON.stringify(sample.labels)} = ${sample.value}`);
    }
  }
  return found;
}

/** As `held`, and what is remembered of rooms that are over until somebody has acknowledged it. */
export function unsettled(samples: readonly Sample[]): string[] {
  const found = held(samples);
  for (const { name, labels, value } of samples) {
    const counts = name === 'handoff_unacknowledged_messages' || name === 'handoff_ledger_violations_total';
    if (counts && value !== 0) found.push(`${name}${JSON.stringify(labels)} = ${value}`);
  }
  return found;
}

/** Wait until nothing is held, nothing is unacknowledged and no ledger was violated, on every process. Returns ms. */
export function untilQuiet(source: string | (() => Promise<readonly Sample[]>), withinMs: number): Promise<number> {
  return untilMetrics(
    source,
    withinMs,
    (samples) => unsettled(samples).length === 0,
    (samples) => unsettled(samples).join('\n'),
  );
}
