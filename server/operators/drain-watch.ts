/**
 * `handoff drain-watch`: sample the queues of a cluster that gets no new requests, and say whether they drain or leak.
 *
 * The judgement is pure: samples in, verdict out. A cluster that still works is not leaking, so progress (tokens and
 * KV bytes) is sampled beside the queues; but an entry that outlives the whole watch leaks whatever else moves.
 */
import { setTimeout as pause } from 'node:timers/promises';
import type { DrainWatchConfig } from '../config.ts';
import { parseExposition, type Family } from '../metrics.ts';

/** The router's metrics at one moment. */
export interface DrainSample {
  readonly atMs: number;
  /** What is held, by series, zeros left out: `decode-0 queue transfer` → 3. */
  readonly held: Readonly<Record<string, number>>;
  /** Tokens computed and KV bytes moved so far. */
  readonly progress: number;
}

/**
 *   drained   nothing is held
 *   draining  less is held than half the watch ago, or work is being done
 *   leak      something is held, nothing moves
 */
export type Verdict = 'drained' | 'draining' | 'leak';

/** Metrics that count what is held: which label tells their series apart, and the values that do not count. */
const HELD = [
  { name: 'handoff_active_requests', kind: 'request', label: 'state', except: [] },
  { name: 'handoff_queue_requests', kind: 'queue', label: 'queue', except: [] },
  { name: 'handoff_kv_pages', kind: 'pages', label: 'state', except: ['free', 'cached'] },
  { name: 'handoff_state_slots', kind: 'slots', label: 'state', except: ['free'] },
] as const;
const PROGRESS = ['sglang_realtime_tokens_total', 'handoff_transfer_bytes_total'];
const SAMPLE_LIMIT_MS = 5000;

/**
 * Watch until everything is given back or the time is over; resolves with the exit code: 1 for a leak, or when the
 * router never answered, else 0.
 */
export async function runDrainWatch({ url, intervalMs, durationMs }: DrainWatchConfig): Promise<number> {
  const samples: DrainSample[] = [];
  const startMs = performance.now();
  for (;;) {
    const sample = await takeSample(url).catch(() => null); // a router that restarts may be back for the next one
    const elapsedMs = performance.now() - startMs;
    const what = sample === null ? `${url}/metrics does not answer` : describeHeld(sample);
    process.stdout.write(`${(elapsedMs / 1000).toFixed(1).padStart(7)} s  ${what}\n`);
    if (sample !== null) samples.push(sample);
    if ((sample !== null && isEmpty(sample)) || elapsedMs >= durationMs) break;
    await pause(intervalMs);
  }
  if (samples.length === 0) {
    process.stdout.write('no answer: nothing can be said\n');
    return 1;
  }
  const verdict = judgeDrain(samples);
  const last = samples.at(-1)!;
  const texts = {
    drained: 'drained: nothing is held any more',
    draining: `still draining: ${describeHeld(last)}`,
    leak: `LEAK: nothing moves, and this is held: ${describeHeld(last)}`,
  };
  process.stdout.write(`${texts[verdict]}\n`);
  return verdict === 'leak' ? 1 : 0;
}

/** The verdict on samples in order of time, at least one. */
export function judgeDrain(samples: readonly DrainSample[]): Verdict {
  const last = samples.at(-1);
  if (last === undefined) throw new Error('no samples to judge');
  if (isEmpty(last)) return 'drained';
  const middle = samples[Math.floor((samples.length - 1) / 2)]!;
  if (middle === last || last.progress > middle.progress) return 'draining';
  const hasShrunk = Object.entries(middle.held).some(([series, count]) => (last.held[series] ?? 0) < count);
  return hasShrunk ? 'draining' : 'leak';
}

/** A sample from the text of `/metrics`. */
export function readSample(text: string, atMs: number): DrainSample {
  const families = new Map((parseExposition(text) ?? []).map((family) => [family.name, family]));
  if (families.size === 0) throw new Error('/metrics does not parse');
  const held: Record<string, number> = {};
  for (const { name, kind, label, except } of HELD) {
    for (const { labels, value } of families.get(name)?.samples ?? []) {
      const state = labelOf(labels, label);
      if ((except as readonly string[]).includes(state) || Number(value) === 0) continue;
      held[`${labelOf(labels, 'worker')} ${kind} ${state}`] = Number(value);
    }
  }
  const progress = PROGRESS.reduce((sum, name) => sum + total(families.get(name)), 0);
  return { atMs, held, progress };
}

async function takeSample(url: string): Promise<DrainSample> {
  const response = await fetch(`${url}/metrics`, { signal: AbortSignal.timeout(SAMPLE_LIMIT_MS) });
  if (!response.ok) throw new Error(`${url}/metrics answered ${response.status}`);
  return readSample(await response.text(), performance.now());
}

function isEmpty({ held }: DrainSample): boolean {
  return Object.keys(held).length === 0;
}

function describeHeld({ held }: DrainSample): string {
  const parts = Object.entries(held).map(([series, count]) => `${series} ${count}`);
  return parts.length === 0 ? 'nothing held' : parts.join(', ');
}

function labelOf(labels: string, name: string): string {
  return new RegExp(`(?:^|,)${name}="([^"]*)"`).exec(labels)?.[1] ?? '';
}

function total(family: Family | undefined): number {
  return (family?.samples ?? []).reduce((sum, { value }) => sum + Number(value), 0);
}
