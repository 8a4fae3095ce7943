/**
 * The mutants: `npm run mutants [-- --only NAME] [--list] [--help]`.
 *
 * Each bug of scripts/mutant-table.ts is put into a copy of the sources, and every test that is said to notice it must
 * do so. First the same tests run on an untouched copy, where they must pass. Prints one line for each mutant; exits with
 * 1 if one survives, fits nowhere or was not judged.
 */
import { spawn } from 'node:child_process';
import { cpSync, mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseCommandLine } from './command-line.ts';
import { MUTANTS, type Killer, type Mutant } from './mutant-table.ts';

const root = fileURLToPath(new URL('..', import.meta.url));
/** What is copied: mutants change the first two, and their importers must find the changed files. */
const COPIED = ['transfer', 'scheduler', 'server', 'scripts', 'test', 'package.json', 'tsconfig.json'];
const LINKED = ['node_modules', 'kernels', 'model', 'docs'];
/** Many times what the slowest killer takes; a mutant that hangs is not a mutant that was noticed. */
const LIMIT_MS = 300_000;
/** Lines that are shown of a killer that failed otherwise than it was to. */
const TAIL_LINES = 8;
const HELP = `npm run mutants [-- OPTIONS]

  --only NAME   judge the mutants whose name has this in it; may be given more than once
  --list        print the mutants and what must kill them
  --help        print this`;

const { values } = parseCommandLine(HELP, {
  options: {
    only: { type: 'string', multiple: true },
    list: { type: 'boolean', default: false },
  },
});

/** What one killer says of one copy of the sources. */
interface Judgement {
  verdict: 'killed' | 'survived' | 'not judged';
  /** The seed, test or invariant that failed; else the end of the output. */
  what: string;
  seconds: number;
}

/** What is there only while this runs: the process group of a killer, folders of copies. Each is undone by its function. */
const leftovers = new Set<() => void>();
for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP', 'disconnect'] as const)
  process.once(signal, () => process.exit(1));
process.once('exit', () => {
  for (const undo of leftovers) undo();
});

process.exitCode = await main();
// The channel to who started this would keep it alive; that it ends now is no reason to fail.
process.removeAllListeners('disconnect');
if (process.connected) process.disconnect();

async function main(): Promise<number> {
  const chosen = MUTANTS.filter(({ name }) => values.only?.some((part) => name.includes(part)) ?? true);
  if (chosen.length === 0) {
    console.error('no mutant has that in its name; `--list` prints all');
    return 2;
  }
  if (values.list) {
    for (const mutant of chosen) list(mutant);
    return 0;
  }
  const startMs = performance.now();
  // One copy for all, so that whoever edits meanwhile does not change what is judged.
  const clean = copySources(root).folder;
  if (!(await judgeClean(chosen, clean))) return 1;
  let failed = 0;
  for (const [index, mutant] of chosen.entries()) {
    process.stdout.write(`[${String(index + 1).padStart(2)}/${chosen.length}] ${mutant.name} ... `);
    if (!(await judge(mutant, clean))) failed++;
  }
  const seconds = Math.round((performance.now() - startMs) / 1000);
  console.log(`${chosen.length} mutants in ${seconds} s: ${chosen.length - failed} killed, ${failed} not`);
  return failed === 0 ? 0 : 1;
}

function list({ name, failure, why, edits, killers }: Mutant): void {
  const files = [...new Set(edits.map(({ file }) => file))];
  console.log(`${name}${failure === null ? '' : ` (${failure})`}: ${why}`);
  console.log(`    changes ${files.join(', ')}`);
  for (const killer of killers) console.log(`    killed by ${nameOf(killer)}`);
}

/** The killers of all chosen mutants must pass on sources without a mutant, or what they say means nothing. */
async function judgeClean(chosen: readonly Mutant[], clean: string): Promise<boolean> {
  const killers = new Map<string, Killer>();
  for (const killer of chosen.flatMap((mutant) => mutant.killers)) {
    const known = killers.get(sourceOf(killer));
    // Of ranges of seeds the longest says it for all.
    if (known?.kind === 'sim' && killer.kind === 'sim' && known.seeds >= killer.seeds) continue;
    killers.set(sourceOf(killer), killer);
  }
  for (const killer of killers.values()) {
    process.stdout.write(`without a mutant: ${sourceOf(killer)} ... `);
    const { what, status, seconds } = await run(clean, commandOf(killer, false));
    console.log(status === 0 ? `passes in ${seconds.toFixed(1)} s` : `FAILS:\n${what.trimEnd()}`);
    if (status !== 0) return false;
  }
  return true;
}

/** Apply one mutant and let each of its killers have a go. Prints the rest of its line; true if all noticed it. */
async function judge({ edits, killers }: Mutant, clean: string): Promise<boolean> {
  const { folder, remove } = copySources(clean);
  const said: string[] = [];
  let isKilled = true;
  for (const edit of edits) {
    const text = readFileSync(join(folder, edit.file), 'utf8');
    const times = text.split(edit.find).length - 1;
    if (times !== 1) {
      said.push(`DOES NOT FIT: what it replaces is ${times} times in ${edit.file}`);
      isKilled = false;
    }
    writeFileSync(
      join(folder, edit.file),
      text.replace(edit.find, () => edit.put),
    );
  }
  for (const killer of isKilled ? killers : []) {
    const { verdict, what, seconds } = await ask(killer, folder);
    const took = `${seconds.toFixed(1)} s`;
    if (verdict === 'killed') said.push(`killed by ${what} (${took})`);
    else said.push(`${verdict === 'survived' ? 'SURVIVED' : 'NOT JUDGED by'} ${nameOf(killer)} (${took})${what}`);
    isKilled &&= verdict === 'killed';
  }
  remove();
  console.log(said.join('; '));
  return isKilled;
}

async function ask(killer: Killer, copy: string): Promise<Judgement> {
  const { status, what: output, seconds } = await run(copy, commandOf(killer, true));
  const lines = output.trimEnd().split('\n');
  // The checker says first what is wrong, everybody else last.
  const found = lines.findIndex((line) => line.endsWith('VIOLATION'));
  const shown = found < 0 ? lines.slice(-TAIL_LINES) : lines.slice(found, found + TAIL_LINES);
  const tail = `:\n${shown.join('\n')}\n`;
  if (status === 0) return { verdict: 'survived', what: '', seconds };
  // A mutant that does not run proves nothing.
  if (status === null || /\b(SyntaxError|ReferenceError|ERR_MODULE_NOT_FOUND)\b/.test(output)) {
    return { verdict: 'not judged', what: tail, seconds };
  }
  const finding = findingOf(killer, output);
  return finding === null
    ? { verdict: 'not judged', what: tail, seconds }
    : { verdict: 'killed', what: finding, seconds };
}

/** What failed, if it is what the killer was to find. */
function findingOf(killer: Killer, output: string): string | null {
  if (killer.kind === 'unit') {
    const isFailed = new RegExp(`^not ok \\d+ - ${escapeForTap(killer.test)}$`, 'm').test(output);
    return isFailed ? nameOf(killer) : null;
  }
  if (killer.kind === 'sim') {
    const [, seed, message = ''] = /^seed (\d+) failed: (.*)$/m.exec(output) ?? [];
    return seed !== undefined && killer.finds.test(message) ? `sim seed ${seed}: ${shorten(message)}` : null;
  }
  const [line] = output.split('\n').filter((each) => killer.finds.test(each));
  return line === undefined ? null : `check "${killer.set}": ${shorten(line)}`;
}

/** Arguments of Node for a killer. Without a mutant a whole test file runs: that is quicker than test by test. */
function commandOf(killer: Killer, byTest: boolean): string[] {
  if (killer.kind === 'unit') {
    const only = byTest ? ['--test-name-pattern', `^${escapePattern(killer.test)}$`] : [];
    return ['--import', 'tsx', '--test', '--test-reporter', 'tap', ...only, `test/unit/${killer.file}.test.ts`];
  }
  if (killer.kind === 'sim')
    return ['--import', 'tsx', 'scripts/sim.ts', '--seeds', String(killer.seeds), '--jobs', '1'];
  return ['--import', 'tsx', 'scripts/check.ts', '--set', killer.set, '--jobs', '1'];
}

function nameOf(killer: Killer): string {
  if (killer.kind === 'unit') return `${killer.file}: ${killer.test}`;
  return killer.kind === 'sim' ? `sim seeds 1 to ${killer.seeds}` : `check "${killer.set}"`;
}

/** What runs, as often as it has to be run without a mutant. */
function sourceOf(killer: Killer): string {
  if (killer.kind === 'unit') return `unit/${killer.file}`;
  return killer.kind === 'sim' ? 'sim' : `check "${killer.set}"`;
}

/** Run Node in a copy of the sources. `status` is null if it was ended: by its limit, or by somebody else. */
function run(cwd: string, args: string[]): Promise<{ status: number | null; what: string; seconds: number }> {
  const startMs = performance.now();
  const isWindows = process.platform === 'win32';
  // A group of its own, so that its children end with it.
  const child = spawn(process.execPath, args, { cwd, stdio: ['ignore', 'pipe', 'pipe'], detached: !isWindows });
  let what = '';
  for (const stream of [child.stdout, child.stderr]) {
    stream.setEncoding('utf8').on('data', (text: string) => (what += text));
  }
  const end = (): void => {
    try {
      if (isWindows || child.pid === undefined) child.kill('SIGKILL');
      else process.kill(-child.pid, 'SIGKILL');
    } catch {
      // it has ended by itself
    }
  };
  leftovers.add(end);
  let isLate = false;
  const limit = setTimeout(() => {
    isLate = true;
    end();
  }, LIMIT_MS);
  return new Promise((resolve, reject) => {
    child.once('error', reject);
    child.once('close', (code, signal) => {
      clearTimeout(limit);
      leftovers.delete(end);
      const seconds = (performance.now() - startMs) / 1000;
      if (code === null) what += `${isLate ? 'it took too long' : `ended by ${signal}`}\n`;
      resolve({ status: code, what, seconds });
    });
  });
}

/** A folder with the sources of `from`. */
function copySources(from: string): { folder: string; remove: () => void } {
  const folder = mkdtempSync(join(tmpdir(), 'handoff-mutant-'));
  const remove = (): void => {
    rmSync(folder, { recursive: true, force: true });
    leftovers.delete(remove);
  };
  leftovers.add(remove);
  for (const name of COPIED) cpSync(join(from, name), join(folder, name), { recursive: true });
  for (const name of LINKED) symlinkSync(join(root, name), join(folder, name), 'junction');
  return { folder, remove };
}

function shorten(message: string): string {
  return message.length <= 90 ? message : `${message.slice(0, 89)}…`;
}

function escapePattern(text: string): string {
  return text.replace(/[.*+?^${}()|[\]\\]/g, '\\$&');
}

/** As TAP writes it: `#` begins a comment there. */
function escapeForTap(name: string): string {
  return escapePattern(name.replace(/[\\#]/g, '\\$&'));
}
