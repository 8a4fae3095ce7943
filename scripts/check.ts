/**
 * The exhaustive checker: `npm run check [-- --deep] [--set PATTERN] [--break RULE] [--jobs N] [--list]`.
 *
 * Explores every interleaving of two workers and a router under the faults of each set (test/check/sets.ts), two sets at
 * a time. Prints the worlds of each and, where an invariant does not hold, the shortest way there. At the end: which cells
 * of the tables were reached, and that none is missing which is not declared impossible.
 *
 * `--deep` adds the sets that take hours in all. `--set` chooses by the name, or by a part of it. `--break` explores with
 * a rule broken on purpose, which must be found. `--minutes` and `--states` bound one set; a set that reaches a bound says so.
 */
import { fork } from 'node:child_process';
import { availableParallelism } from 'node:os';
import { BROKEN_RULES } from '../test/check/broken-rules.ts';
import { judge } from '../test/check/coverage.ts';
import { explore, type Report } from '../test/check/explore.ts';
import { CI_SETS, DEEP_SETS } from '../test/check/sets.ts';
import { parseCommandLine } from './command-line.ts';

/** Worlds of one set: 60 bytes each, and half as much while the table grows. */
const DEFAULT_STATES = 30_000_000;
const DEFAULT_MINUTES = 30;

const HELP = `
npm run check [-- OPTIONS]

  --deep          the sets that take hours, too
  --set PATTERN   sets with this name, or with this in it, deep ones too; may be given more than once
  --break RULE    break a rule on purpose, and show the way to the violation
  --list          print the names of the sets
  --jobs N        sets at a time (default: up to 2)
  --minutes N     bound of one set (default ${DEFAULT_MINUTES})
  --states N      bound of one set (default ${DEFAULT_STATES})`;

const { values } = parseCommandLine(HELP, {
  options: {
    deep: { type: 'boolean', default: false },
    set: { type: 'string', multiple: true },
    break: { type: 'string' },
    jobs: { type: 'string' },
    minutes: { type: 'string', default: String(DEFAULT_MINUTES) },
    states: { type: 'string', default: String(DEFAULT_STATES) },
    list: { type: 'boolean', default: false },
    worker: { type: 'boolean', default: false },
  },
});

if (values.worker) serve();
else process.exitCode = await main();

/** A process of its own explores the sets it is given, one at a time. */
function serve(): void {
  process.on('message', (name: string) => {
    const set = [...CI_SETS, ...DEEP_SETS].find((each) => each.name === name);
    if (set === undefined) throw new Error(`no set is called ${name}`);
    const rules = values.break === undefined ? undefined : BROKEN_RULES[values.break]?.rules;
    const limits = { maxStates: Number(values.states), maxSeconds: 60 * Number(values.minutes) };
    process.send?.(explore(set, { ...limits, ...(rules === undefined ? {} : { rules }) }));
  });
}

async function main(): Promise<number> {
  if (values.break !== undefined && !(values.break in BROKEN_RULES)) {
    console.error(`no rule is called ${values.break}; there are: ${Object.keys(BROKEN_RULES).join(', ')}`);
    return 2;
  }
  const all = values.deep || values.set !== undefined ? [...CI_SETS, ...DEEP_SETS] : [...CI_SETS];
  const whole = new Set(all.map(({ name }) => name));
  const isChosen = (name: string, part: string): boolean => (whole.has(part) ? name === part : name.includes(part));
  const sets = all.filter(({ name }) => values.set?.some((part) => isChosen(name, part)) ?? true);
  if (sets.length === 0) {
    console.error('no set has that in its name; `--list --deep` prints all');
    return 2;
  }
  if (values.list) {
    for (const { name } of sets) console.log(name);
    return 0;
  }
  const startMs = performance.now();
  console.log('    worlds  depth  settles within  seconds  set');
  const reports = await exploreAll(
    sets.map(({ name }) => name),
    Number(values.jobs ?? Math.min(2, availableParallelism())),
  );
  const seconds = (performance.now() - startMs) / 1000;
  const states = reports.reduce((sum, report) => sum + report.states, 0);
  const transitions = reports.reduce((sum, report) => sum + report.transitions, 0);
  console.log(`${states} worlds, ${transitions} transitions, ${reports.length} sets in ${seconds.toFixed(1)} s`);
  const broken = reports.filter(({ violation }) => violation !== null);
  const unfinished = reports.filter((report) => !report.isComplete);
  if (unfinished.length > 0) console.log(`not explored to the end: ${unfinished.map(({ name }) => name).join('; ')}`);
  console.log(`${broken.length} violations`);
  if (values.break !== undefined) return broken.length > 0 ? 1 : 0;
  const isCovered = values.set !== undefined || reportCoverage(reports);
  return broken.length > 0 || unfinished.length > 0 || !isCovered ? 1 : 0;
}

/** Explore sets in `jobs` processes; each report is printed as it comes. */
async function exploreAll(names: readonly string[], jobs: number): Promise<Report[]> {
  const waiting = [...names];
  const reports: Report[] = [];
  const work = async (): Promise<void> => {
    const child = fork(import.meta.filename, [...process.argv.slice(2), '--worker']);
    try {
      for (let name = waiting.shift(); name !== undefined; name = waiting.shift()) {
        const report = await ask(child, name);
        reports.push(report);
        print(report);
      }
    } finally {
      child.kill();
    }
  };
  await Promise.all(Array.from({ length: Math.min(jobs, names.length) }, work));
  return reports;
}

function ask(child: ReturnType<typeof fork>, name: string): Promise<Report> {
  return new Promise((resolve, reject) => {
    const onExit = (code: number | null): void => reject(new Error(`exploring "${name}" ended with ${code}`));
    child.once('exit', onExit);
    child.once('message', (report) => {
      child.off('exit', onExit);
      resolve(report as Report);
    });
    child.send(name);
  });
}

function print(report: Report): void {
  const { name, states, depth, settleSteps, seconds, isComplete, violation } = report;
  const columns = [String(states).padStart(10), String(depth).padStart(5), String(settleSteps).padStart(14)];
  const end = violation !== null ? '  VIOLATION' : isComplete ? '' : '  not to the end';
  console.log(`${columns.join('  ')}  ${seconds.toFixed(1).padStart(7)}  ${name}${end}`);
  if (violation === null) return;
  console.log(`\n${violation.what}\n\nShortest way there, ${violation.trace.length} steps:`);
  for (const [index, line] of violation.trace.entries()) console.log(`${String(index + 1).padStart(5)}  ${line}`);
  console.log('');
}

/** True if every cell was reached or is declared impossible, and none of those was reached. */
function reportCoverage(reports: readonly Report[]): boolean {
  const { tables, missing, impossibleButReached, unknown } = judge(reports.flatMap(({ seen }) => seen));
  for (const { owner, phases, events, reached, impossible, beyond } of tables) {
    console.log(
      `${owner}: ${phases} states, ${events} messages and events; ` +
        `cells: ${reached} reached, ${impossible} impossible, ${beyond} beyond the faults of these sets`,
    );
  }
  console.log(`${missing.length + impossibleButReached.length + unknown.length} cells unexplained`);
  for (const cell of missing) console.log(`never reached: ${cell}`);
  for (const cell of impossibleButReached) console.log(`declared impossible, but reached: ${cell}`);
  for (const cell of unknown) console.log(`not in the tables: ${cell}`);
  return missing.length + impossibleButReached.length + unknown.length === 0;
}
