/**
 * Real processes for integration tests: `handoff all` or single roles, on free loopback ports, ready when they say so.
 *
 * Nothing here waits by sleeping: readiness is a line of the process, gauges are read again until they hold or the
 * given time is over.
 */
import { spawn, type ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { setTimeout as pause } from 'node:timers/promises';

/** A running `handoff` process. */
export interface Handoff {
  readonly child: ChildProcess;
  /** Everything printed so far, both streams. */
  output(): string;
  /** Resolves with the first match of `pattern` in the output; rejects when the process ends or `timeoutMs` passes before. */
  printed(pattern: RegExp, timeoutMs?: number): Promise<RegExpExecArray>;
  /** SIGTERM and wait for the end; SIGKILL after 10 s. Returns the exit code. */
  stop(): Promise<number | null>;
}

/** A cluster started by `handoff all`. */
export interface Cluster extends Handoff {
  /** The router, e.g. http://127.0.0.1:43210 */
  readonly url: string;
  readonly model: string;
}

// Generous: pipelines are compiled on the first start of a fresh machine.
const START_TIMEOUT_MS = 180_000;

/** Start one `handoff` command from the sources. */
export function startHandoff(args: readonly string[], env: Readonly<Record<string, string>> = {}): Handoff {
  const child = spawn(process.execPath, ['--import', 'tsx', 'server/main.ts', ...args], {
    stdio: ['ignore', 'pipe', 'pipe'],
    env: { ...process.env, ...env },
  });
  let text = '';
  const listeners = new Set<() => void>();
  const note = (bytes: Buffer): void => {
    text += bytes.toString();
    for (const listener of [...listeners]) listener();
  };
  child.stdout!.on('data', note);
  child.stderr!.on('data', note);
  const ended = once(child, 'exit');
  return {
    child,
    output: () => text,
    printed(pattern, timeoutMs = START_TIMEOUT_MS) {
      return new Promise((resolve, reject) => {
        const finish = (act: () => void): void => {
          listeners.delete(look);
          clearTimeout(timer);
          child.off('exit', exited);
          act();
        };
        const look = (): void => {
          const match = pattern.exec(text);
          if (match) finish(() => resolve(match));
        };
        const exited = (): void =>
          finish(() => reject(new Error(`process ended before printing ${pattern}:\n${text}`)));
        const timer = setTimeout(
          () => finish(() => reject(new Error(`not printed within ${timeoutMs} ms: ${pattern}\n${text}`))),
          timeoutMs,
        );
        listeners.add(look);
        child.once('exit', exited);
        look();
      });
    },
    async stop() {
      if (child.exitCode === null && child.signalCode === null) {
        child.kill('SIGTERM');
        const timer = setTimeout(() => child.kill('SIGKILL'), 10_000);
        await ended;
        clearTimeout(timer);
      }
      return child.exitCode;
    },
  };
}

/** Start `handoff all` on free ports and wait until its router serves. */
export async function startCluster(
  args: readonly string[] = [],
  env: Readonly<Record<string, string>> = {},
): Promise<Cluster> {
  const handoff = startHandoff(['all', '--port', '0', '--prefill-port', '0', '--decode-port', '0', ...args], env);
  try {
    const [, url] = await handoff.printed(/curl[^\n]*?(http:\/\/[\d.]+:\d+)/);
    const models = (await (await fetch(`${url}/v1/models`)).json()) as { data: { id: string }[] };
    return { ...handoff, url: url!, model: models.data[0]!.id };
  } catch (error) {
    await handoff.stop();
    throw error;
  }
}

/** One sample of a /metrics page. */
export interface Sample {
  readonly name: string;
  readonly labels: Readonly<Record<string, string>>;
  readonly value: number;
}

/** All samples of a /metrics page. Rejects when there is none before `signal`. */
export async function readMetrics(url: string, signal: AbortSignal | null = null): Promise<Sample[]> {
  const response = await fetch(`${url}/metrics`, { signal });
  if (!response.ok) throw new Error(`/metrics answered ${response.status}`);
  const samples: Sample[] = [];
  for (const line of (await response.text()).split('\n')) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels: Record<string, string> = {};
    for (const [, name, value] of (match[2] ?? '').matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name!] = value!;
    samples.push({ name: match[1]!, labels, value: Number(match[3]) });
  }
  return samples;
}

/**
 * The router's page with every worker on it: one that is busy for longer than the router waits is left out of a page.
 * Throws when some worker stays away for ten seconds.
 */
export async function readWholeMetrics(url: string): Promise<Sample[]> {
  const startMs = performance.now();
  for (;;) {
    const samples = await readMetrics(url);
    const absent = samples.filter(({ name, value }) => name === 'handoff_worker_up' && value === 0);
    if (absent.length === 0) return samples;
    if (performance.now() - startMs > 10_000) throw new Error(`never on the page: ${JSON.stringify(absent)}`);
    await pause(5); // polling another process
  }
}

/** Sum of all samples called `name` whose labels contain `labels`. Throws when there is none: a misspelt gauge is not zero. */
export function sumOf(samples: readonly Sample[], name: string, labels: Readonly<Record<string, string>> = {}): number {
  const found = samples.filter(
    (sample) => sample.name === name && Object.entries(labels).every(([key, value]) => sample.labels[key] === value),
  );
  if (found.length === 0) throw new Error(`no metric ${name} with ${JSON.stringify(labels)}`);
  return found.reduce((sum, sample) => sum + sample.value, 0);
}

/**
 * Read /metrics (or what `source` returns) until `holds` returns true.
 *
 * @returns milliseconds it took. Throws after `timeoutMs`, showing what `describe` says of the last page.
 */
export async function untilMetrics(
  source: string | (() => Promise<readonly Sample[]>),
  timeoutMs: number,
  holds: (samples: readonly Sample[]) => boolean,
  describe: (samples: readonly Sample[]) => string = () => '',
): Promise<number> {
  const startMs = performance.now();
  for (;;) {
    const samples = typeof source === 'string' ? await readMetrics(source) : await source();
    const tookMs = performance.now() - startMs;
    if (holds(samples)) return tookMs;
    if (tookMs > timeoutMs) throw new Error(`not so within ${timeoutMs} ms: ${describe(samples)}`);
    await pause(5); // polling another process; the loop ends by the condition, not by the time slept
  }
}
