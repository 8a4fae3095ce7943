/**
 * The test suites: `npm test -- [SUITE...] [--seed N] [--grep PATTERN] [--list]`.
 *
 * Without arguments everything runs but `large`, first what is quick: static checks (format, lint, types), then test/tidy.test.ts
 * and every folder of test/. SUITE is `static`, a folder (`unit`, `unit/server`) or a file (`tidy`, `kernels/rmsnorm`).
 * Each test file is a process of its own. Suites without a GPU run two files at a time, the others one: a software
 * adapter takes every core there is.
 */
import { spawnSync } from 'node:child_process';
import { existsSync, readdirSync } from 'node:fs';
import { availableParallelism, homedir, tmpdir } from 'node:os';
import { join, relative, sep } from 'node:path';
import { run } from 'node:test';
import { spec as SpecReporter } from 'node:test/reporters';
import { fileURLToPath } from 'node:url';
import { describeAdapter, setUpAdapter } from '../server/adapter/adapter.ts';
import { parseCommandLine } from './command-line.ts';

const root = fileURLToPath(new URL('..', import.meta.url));

/** Order of the default run. `gpu` suites open a device or start workers that do; `asked` ones run only when named. */
const suites: readonly { name: string; gpu: boolean; asked?: boolean }[] = [
  { name: 'tidy', gpu: false },
  { name: 'unit', gpu: false },
  { name: 'check', gpu: false },
  { name: 'sim', gpu: false },
  { name: 'kernels', gpu: true },
  { name: 'model', gpu: true },
  { name: 'integration', gpu: true },
  { name: 'conformance', gpu: true },
  { name: 'chaos', gpu: true },
  { name: 'large', gpu: true, asked: true },
];
const staticChecks: Record<string, string[]> = {
  format: ['oxfmt', '--check'],
  lint: ['oxlint', '--type-aware', '--deny-warnings'],
  types: ['tsc', '--noEmit'],
};
/** A file that takes longer hangs; it is ended, counted as failed, and the next one runs. */
const fileLimitMs = 900_000;

interface Totals {
  passed: number;
  failed: number;
}

const HELP = `
npm test [-- SUITE or FILE ...] [-- OPTIONS]

  SUITE           ${['static', ...suites.map(({ name }) => name)].join(', ')}; by default all but ${suites
    .filter(({ asked }) => asked)
    .map(({ name }) => name)
    .join(' and ')}
  FILE            a path under test/, without .test.ts: chaos/links
  --grep PATTERN  tests whose name matches
  --seed N        of the tests that draw at random
  --list          print the files that would run`;

const { values, positionals } = parseCommandLine(HELP, {
  allowPositionals: true,
  options: {
    seed: { type: 'string', default: process.env['HANDOFF_SEED'] ?? '20260424' },
    grep: { type: 'string' },
    list: { type: 'boolean', default: false },
  },
});
process.exitCode = await main();

async function main(): Promise<number> {
  const files = testFiles();
  const wanted =
    positionals.length > 0 ? positionals : ['static', ...suites.filter(({ asked }) => !asked).map(({ name }) => name)];
  const checks = wanted.includes('static') ? Object.keys(staticChecks) : wanted.filter((name) => name in staticChecks);
  const chosen = new Set<string>();
  for (const name of wanted) {
    const matches = select(files, name);
    const known = name === 'static' || name in staticChecks || suites.some((suite) => suite.name === name);
    if (matches.length === 0 && !known) {
      console.error(`no test is called ${name}; there are: static, ${files.map(stemOf).join(', ')}`);
      return 2;
    }
    for (const file of matches) chosen.add(file);
  }
  const groups = [false, true].map((gpu) => ({ gpu, files: [...chosen].filter((file) => needsGpu(file) === gpu) }));
  if (values.list) {
    for (const file of [...checks, ...groups.flatMap((group) => group.files)]) console.log(file);
    return 0;
  }

  process.env['HANDOFF_SEED'] = values.seed;
  process.env['XDG_RUNTIME_DIR'] ||= tmpdir();
  console.log(`Node ${process.version}, seed ${values.seed} (again with --seed ${values.seed})`);
  const totals: Totals = { passed: 0, failed: 0 };
  for (const name of checks) runStaticCheck(name, totals);
  if (chosen.size > 0) {
    const choice = await setUpAdapter({ wanted: process.env['HANDOFF_ADAPTER'], say: (line) => console.log(line) });
    Object.assign(process.env, choice.environment);
    console.log(describeAdapter(choice).join('\n'));
    if (choice.kind === 'lavapipe') console.log(`         ${describeShaderCache()}`);
  }
  await runFiles(groups, totals);
  console.log(`${totals.passed} passed, ${totals.failed} failed`);
  return totals.failed > 0 || totals.passed === 0 ? 1 : 0;
}

/** lavapipe compiles each kernel at its first dispatch, seconds in all; Mesa keeps the results between runs. */
function describeShaderCache(): string {
  const home = process.env['XDG_CACHE_HOME'] || join(homedir(), '.cache');
  const folder = process.env['MESA_SHADER_CACHE_DIR'] || join(home, 'mesa_shader_cache');
  return `Mesa's shader cache ${folder} is ${existsSync(folder) ? 'there' : 'empty: this run compiles all kernels'}.`;
}

/** All test files, relative to test/, in the order of `suites`. */
function testFiles(): string[] {
  const folder = join(root, 'test');
  const found = readdirSync(folder, { recursive: true, encoding: 'utf8' })
    .filter((path) => path.endsWith('.test.ts'))
    .map((path) => path.split(sep).join('/'))
    .sort();
  return suites.flatMap(({ name }) => select(found, name));
}

function select(files: readonly string[], name: string): string[] {
  const stem = name
    .replace(/^test\//, '')
    .replace(/(\.test)?\.ts$/, '')
    .replace(/\/$/, '');
  return files.filter((file) => stemOf(file) === stem || file.startsWith(`${stem}/`));
}

function stemOf(file: string): string {
  return file.replace(/\.test\.ts$/, '');
}

function needsGpu(file: string): boolean {
  return suites.some(({ name, gpu }) => gpu && file.startsWith(`${name}/`));
}

function runStaticCheck(name: string, totals: Totals): void {
  const [tool = '', ...args] = staticChecks[name] ?? [];
  const program = join(root, 'node_modules/.bin', process.platform === 'win32' ? `${tool}.cmd` : tool);
  const startMs = performance.now();
  const { status, stdout, stderr } = spawnSync(program, args, {
    cwd: root,
    encoding: 'utf8',
    shell: process.platform === 'win32',
  });
  const passed = status === 0;
  totals[passed ? 'passed' : 'failed'] += 1;
  console.log(
    `${passed ? '✔' : '✖'} ${name}: ${tool} ${args.join(' ')} (${Math.round(performance.now() - startMs)} ms)`,
  );
  if (!passed) console.log(`${stdout}${stderr}`);
}

/** Run the groups one after the other under one reporter, so that the closing lines count all of them. */
async function runFiles(groups: readonly { gpu: boolean; files: string[] }[], totals: Totals): Promise<void> {
  const reporter = new SpecReporter();
  reporter.pipe(process.stdout, { end: false });
  const ended = new Promise<void>((resolve) => reporter.once('end', resolve));
  const sums = new Map<string, number>();
  for (const { gpu, files } of groups) {
    if (files.length === 0) continue;
    const stream = run({
      files: files.map((file) => join(root, 'test', file)).filter((file) => existsSync(file)),
      concurrency: gpu ? 1 : Math.min(2, availableParallelism()),
      timeout: fileLimitMs,
      ...(values.grep === undefined ? {} : { testNamePatterns: [new RegExp(values.grep)] }),
    });
    for await (const event of stream as AsyncIterable<{
      type: string;
      data: { nesting: number; message?: string; name?: string };
    }>) {
      // Node closes each run with counts such as `pass 12`; they are added up and printed once.
      const count =
        event.type === 'test:diagnostic' && event.data.nesting === 0
          ? /^([a-z_]+) ([\d.]+)$/.exec(event.data.message ?? '')
          : null;
      if (count !== null) sums.set(count[1] ?? '', (sums.get(count[1] ?? '') ?? 0) + Number(count[2]));
      else if (event.type !== 'test:summary' && event.type !== 'test:plan') reporter.write(shorten(event));
    }
  }
  for (const [name, value] of sums)
    reporter.write({ type: 'test:diagnostic', data: { nesting: 0, message: `${name} ${value}` } });
  reporter.end();
  await ended;
  totals.passed += sums.get('pass') ?? 0;
  totals.failed += (sums.get('fail') ?? 0) + (sums.get('cancelled') ?? 0);
}

/** A file that fails as a whole is reported under its path; a relative one reads better. */
function shorten<Event extends { data: { name?: string } }>(event: Event): Event {
  if (event.data.name?.startsWith(root) === true) event.data.name = relative(root, event.data.name);
  return event;
}
