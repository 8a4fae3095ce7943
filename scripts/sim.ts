/**
 * The deterministic simulator: `npm run sim -- --seed N` replays one seed and prints its trace, `--seeds N` runs N of
 * them on all cores (`--from` says where they begin, `--jobs` on how many) and stops with the first that fails.
 *
 * With `--bug NAME` every worker has that bug, and a run is good if it fails. docs/testing.md says how to read a trace.
 */
import { spawn } from 'node:child_process';
import { availableParallelism } from 'node:os';
import { createCoverage, mustSee } from '../test/sim/audit.ts';
import { BUGS, type Bug } from '../test/sim/worker.ts';
import { runSeed, traceSeed } from '../test/sim/world.ts';
import { parseCommandLine } from './command-line.ts';

/** Lines of a trace that are shown of a seed that failed among others. */
const TAIL_LINES = 60;
/** Seeds from which on everything rare must have been seen. */
const COVERED_SEEDS = 5000;
/** Seeds that one process runs before it takes more. */
const BATCH_SEEDS = 500;

const HELP = `
npm run sim [-- OPTIONS]

  --seed N        replay one seed and print its trace
  --seeds N       run so many (default 1000)
  --from N        the first of them (default 1)
  --jobs N        processes (default: one a core)
  --bug NAME      every worker has this bug, and a seed must fail: ${BUGS.join(', ')}
  --match REGEXP  only the lines of a trace that match
  --coverage      print how often everything rare was seen`;

const { values } = parseCommandLine(HELP, {
  options: {
    seed: { type: 'string' },
    seeds: { type: 'string', default: '1000' },
    from: { type: 'string', default: '1' },
    jobs: { type: 'string', default: String(availableParallelism()) },
    bug: { type: 'string' },
    match: { type: 'string' },
    coverage: { type: 'boolean', default: false },
    batch: { type: 'string' },
  },
});

/** What a batch tells the process that started it: one line of JSON. */
interface BatchReport {
  failed: { seed: number; message: string } | null;
  events: number;
  simulatedMs: number;
  clients: number;
  completed: number;
  counts: [string, number][];
}

process.exitCode = await main();

async function main(): Promise<number> {
  const bug = values.bug === undefined ? null : (BUGS.find((name) => name === values.bug) ?? 'unknown');
  if (bug === 'unknown') {
    console.error(`no bug is called ${values.bug}; there are: ${BUGS.join(', ')}`);
    return 2;
  }
  for (const name of ['seed', 'seeds', 'from', 'jobs', 'batch'] as const) {
    if (values[name] !== undefined && !/^[1-9]\d*$/.test(values[name])) {
      console.error(`--${name} ${values[name]} is not a positive whole number`);
      return 2;
    }
  }
  if (values.seed !== undefined) return replay(Number(values.seed), bug);
  if (values.batch !== undefined) return runBatch(Number(values.from), Number(values.batch), bug);
  return runAll(Number(values.from), Number(values.seeds), bug);
}

function commandFor(seed: number, bug: Bug | null): string {
  return `npm run sim -- --seed ${seed}${bug === null ? '' : ` --bug ${bug}`}`;
}

/** One seed with its trace; `--match` shows only the lines that match, or name what failed. */
function replay(seed: number, bug: Bug | null): number {
  const { lines, error, report } = traceSeed(seed, bug);
  const pattern = values.match === undefined ? null : new RegExp(values.match);
  for (const line of lines) if (pattern === null || pattern.test(line)) console.log(line);
  if (error === null) console.log(JSON.stringify(report));
  else console.log(`seed ${seed} failed: ${error.message}`);
  return (error === null) === (bug === null) ? 0 : 1;
}

/** Run some seeds in this process. */
function runBatch(from: number, count: number, bug: Bug | null): number {
  const coverage = createCoverage();
  const sum: BatchReport = { failed: null, events: 0, simulatedMs: 0, clients: 0, completed: 0, counts: [] };
  for (let seed = from; seed < from + count && sum.failed === null; seed++) {
    try {
      const { events, simulatedMs, clients, completed } = runSeed(seed, { coverage, bug });
      sum.events += events;
      sum.simulatedMs += simulatedMs;
      sum.clients += clients;
      sum.completed += completed;
    } catch (error) {
      sum.failed = { seed, message: (error as Error).message };
    }
  }
  console.log(JSON.stringify({ ...sum, counts: [...coverage.counts] }));
  return 0;
}

async function runAll(from: number, count: number, bug: Bug | null): Promise<number> {
  const startMs = performance.now();
  const totals = { seeds: 0, events: 0, simulatedMs: 0, clients: 0, completed: 0 };
  const counts = new Map<string, number>();
  const failures: { seed: number; message: string }[] = [];
  let next = from;
  const worker = async (): Promise<void> => {
    while (next < from + count && failures.length === 0) {
      const size = Math.min(BATCH_SEEDS, from + count - next);
      const first = next;
      next += size;
      const report = await startBatch(first, size, bug);
      if (report.failed !== null) failures.push(report.failed);
      totals.seeds += size;
      totals.events += report.events;
      totals.simulatedMs += report.simulatedMs;
      totals.clients += report.clients;
      totals.completed += report.completed;
      for (const [what, times] of report.counts) counts.set(what, (counts.get(what) ?? 0) + times);
    }
  };
  await Promise.all(Array.from({ length: Number(values.jobs) }, worker));
  failures.sort((a, b) => a.seed - b.seed);
  const [failed] = failures;
  if (failed !== undefined) {
    for (const line of traceSeed(failed.seed, bug).lines.slice(-TAIL_LINES)) console.log(line);
    console.log(`seed ${failed.seed} failed: ${failed.message}`);
    console.log(`replay it with: ${commandFor(failed.seed, bug)}`);
    return bug === null ? 1 : 0;
  }
  if (values.coverage)
    for (const [what, times] of [...counts].sort(([a], [b]) => a.localeCompare(b)))
      console.log(`${String(times).padStart(9)} ${what}`);
  const seconds = (performance.now() - startMs) / 1000;
  const hours = totals.simulatedMs / 3_600_000;
  console.log(
    `${totals.seeds} seeds from ${from} in ${seconds.toFixed(1)} s: ${totals.events} events, ${hours.toFixed(1)} simulated ` +
      `hours, ${totals.clients} requests, ${totals.completed} completed`,
  );
  if (bug !== null) {
    console.log(`the bug ${bug} was not found`);
    return 1;
  }
  const unseen = count >= COVERED_SEEDS ? mustSee.filter((what) => !counts.has(what)) : [];
  for (const what of unseen) console.log(`never seen: ${what}`);
  return unseen.length === 0 ? 0 : 1;
}

/** A process of its own for some seeds: it uses another core, and its memory ends with it. */
function startBatch(from: number, count: number, bug: Bug | null): Promise<BatchReport> {
  const args = [...process.execArgv, process.argv[1]!, '--from', String(from), '--batch', String(count)];
  if (bug !== null) args.push('--bug', bug);
  const child = spawn(process.execPath, args, { stdio: ['ignore', 'pipe', 'inherit'] });
  let output = '';
  child.stdout.setEncoding('utf8').on('data', (text: string) => (output += text));
  return new Promise((resolve, reject) => {
    child.on('error', reject);
    child.on('close', (code) => {
      if (code === 0) resolve(JSON.parse(output) as BatchReport);
      else reject(new Error(`the process of seeds ${from} to ${from + count - 1} ended with ${code}`));
    });
  });
}
