/** What the benches share: order statistics, and the head of a line that says where its numbers come from. */
import { execFileSync } from 'node:child_process';
import { availableParallelism, loadavg } from 'node:os';
import type { Sample } from '../test/support/cluster.ts';

/** Median, 95th percentile and extremes, to a hundredth of their unit. */
export interface Spread {
  readonly median: number;
  readonly p95: number;
  readonly min: number;
  readonly max: number;
}

/** The smallest value that at least `share` (0 to 1) of all values do not exceed; NaN when there are none. */
export function quantile(values: readonly number[], share: number): number {
  const sorted = [...values].sort((left, right) => left - right);
  return sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)] ?? NaN;
}

/** See `Spread`. */
export function spread(values: readonly number[]): Spread {
  const at = (share: number): number => hundredths(quantile(values, share));
  return { median: at(0.5), p95: at(0.95), min: at(0), max: at(1) };
}

/** `value` to two decimals, as it is printed. */
export function hundredths(value: number): number {
  return Math.round(value * 100) / 100;
}

/** Commit, GPU adapter, cores, and the load of the last minute: others may share the machine. */
export function surroundings(samples: readonly Sample[]): {
  commit: string;
  device: string;
  cores: number;
  loadAverage: number;
} {
  const commit = execFileSync('git', ['rev-parse', '--short', 'HEAD']).toString().trim();
  const device = samples.find(({ name }) => name === 'handoff_worker_info')?.labels.adapter ?? 'unknown';
  return { commit, device, cores: availableParallelism(), loadAverage: hundredths(loadavg()[0]!) };
}
