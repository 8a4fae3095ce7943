/**
 * Adapter set-up: decide which GPU, real or in software, all processes will use, and put a driver in place if needed.
 *
 *   hardware  ->  lavapipe  ->  lavapipe, installed with apt  ->  SwiftShader, fetched with npm  ->  a clear error
 *
 * Every candidate is tried in a child process (probe.ts) with a time limit, so that no driver can hang or crash
 * the caller. The decision is remembered until drivers or devices of the machine change. It reaches other processes by
 * environment variables. Whoever opens a device, or starts processes that do, does this first:
 *
 *   const choice = await setUpAdapter({ wanted: config.adapter, say });
 *   Object.assign(process.env, choice.environment);
 *   ... openDevice({ adapterName: choice.name }), or spawn
 *
 * A child process that does the same gets its parent's decision at once.
 */
import { fork } from 'node:child_process';
import { existsSync, readdirSync, statSync } from 'node:fs';
import { mkdir, readFile, rename, rm, writeFile } from 'node:fs/promises';
import { homedir, tmpdir } from 'node:os';
import { delimiter, dirname, extname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import type { ProbeReport } from './probe.ts';
import { findLavapipe, icdFolders, installLavapipe, obstacleToInstall, oldestMesa } from './lavapipe.ts';
import { cacheFolder, ensureSwiftShader, swiftShaderIcd } from './swiftshader.ts';

/** What was decided, why, and what it takes to use it. */
export interface AdapterChoice {
  readonly kind: 'hardware' | 'software' | 'lavapipe' | 'swiftshader';
  /** Dawn's name of the adapter, for its `adapter=` switch. */
  readonly name: string;
  readonly driver: string;
  /** One sentence for a person: why this one. */
  readonly reason: string;
  /** One sentence: how to get a faster one. Empty when there is nothing to gain. */
  readonly advice: string;
  /** Variables that a process needs in order to see this adapter; `HANDOFF_ADAPTER` repeats the name. */
  readonly environment: Readonly<Record<string, string>>;
}

/** No adapter, or not the one asked for. The message lists what was found and what to install. */
export class AdapterError extends Error {
  override name = 'AdapterError';
}

/** How the decision is made. `say` gets progress lines for a person, only when something slow happens. */
export interface AdapterOptions {
  /** `lavapipe`, `swiftshader` or a part of an adapter's name; nothing for the best one. */
  readonly wanted?: string | null | undefined;
  readonly say: (line: string) => void;
  /** Whether drivers may be installed or fetched; true if left out. */
  readonly mayInstall?: boolean;
}

// Opening an adapter takes 0.4 s; a cold shader cache or a sleeping GPU may need much longer.
const probeLimitMs = 30_000;
const faster =
  process.platform === 'linux'
    ? 'For more speed, use a machine with a GPU and its Vulkan driver (`vulkaninfo --summary` must list it).'
    : 'For more speed, use a machine with a GPU.';
const installHint =
  process.platform === 'linux'
    ? `Install a Vulkan driver: that of your GPU, or as root \`apt-get install mesa-vulkan-drivers\` (Mesa ${oldestMesa} or newer; on Debian 12 from bookworm-backports).`
    : 'Update the driver of your graphics card; Dawn needs Metal (macOS), Direct3D 12 (Windows) or Vulkan.';

/**
 * Choose an adapter as described above. Throws `AdapterError` when there is none, or not the wanted one.
 * Takes milliseconds when the decision is remembered, up to minutes when a driver has to be installed.
 */
export async function setUpAdapter(options: AdapterOptions): Promise<AdapterChoice> {
  const wanted = options.wanted?.trim() ?? '';
  const inherited = inheritedDecision(wanted);
  if (inherited !== null) return inherited;
  const memory = join(cacheFolder(), 'adapter.json');
  const remembered = await recall(memory, wanted);
  if (remembered !== null) return withDecision(wanted, remembered);
  const choice = await decide(wanted, options.say, options.mayInstall ?? true);
  await remember(memory, wanted, choice);
  return withDecision(wanted, choice);
}

/** Carries the whole decision to child processes, as JSON; the other variables are what Dawn and drivers read. */
const decisionVariable = 'HANDOFF_ADAPTER_DECISION';

function withDecision(wanted: string, choice: AdapterChoice): AdapterChoice {
  const decision = JSON.stringify({ wanted, choice });
  return { ...choice, environment: { ...choice.environment, [decisionVariable]: decision } };
}

/** What a parent process decided, if the same is wanted here. */
function inheritedDecision(wanted: string): AdapterChoice | null {
  try {
    const decision = JSON.parse(process.env[decisionVariable] ?? '') as { wanted: string; choice: AdapterChoice };
    const same = wanted === decision.wanted || wanted === decision.choice.name;
    return same && process.env['HANDOFF_ADAPTER'] === decision.choice.name ? decision.choice : null;
  } catch {
    return null; // none, or not ours
  }
}

/** The lines that tell a person which adapter is used, why, and how to get a faster one. */
export function describeAdapter(choice: AdapterChoice): string[] {
  const lines = [`adapter: ${choice.name} (${choice.kind}; ${choice.driver})`, `         ${choice.reason}`];
  if (choice.advice !== '') lines.push(`         ${choice.advice}`);
  return lines;
}

async function decide(wanted: string, say: (line: string) => void, mayInstall: boolean): Promise<AdapterChoice> {
  if (/^lavapipe$/i.test(wanted)) return orThrow(await tryLavapipe({ say, mayInstall, reason: 'It was asked for.' }));
  if (/^swiftshader$/i.test(wanted))
    return orThrow(await trySwiftShader({ say, mayInstall, reason: 'It was asked for.' }));
  const names = await listAdapters();
  if (wanted !== '') return decideByName(wanted, names);
  const selected = process.env['VK_DRIVER_FILES'] || process.env['VK_ICD_FILENAMES'];
  if (selected && names[0] !== undefined)
    return orThrow(await tryByName(names[0], `The environment selects the driver ${selected}.`));

  const failures: string[] = [];
  const hardware = names.filter((name) => kindOf(name, false) === 'hardware');
  for (const name of hardware) {
    const opened = await tryByName(name, 'It is the best hardware adapter that works.');
    if ('choice' in opened && opened.choice.kind === 'hardware') return opened.choice;
    failures.push('choice' in opened ? `${name}: emulated by the CPU` : opened.failure);
  }
  const none =
    hardware.length === 0 ? 'No hardware adapter was found.' : `No hardware adapter works (${failures.join('; ')}).`;
  const lavapipe = await tryLavapipe({ say, mayInstall, reason: `${none} lavapipe is Mesa's renderer for the CPU.` });
  if ('choice' in lavapipe) return lavapipe.choice;
  failures.push(lavapipe.failure);
  const swiftShader = await trySwiftShader({
    say,
    mayInstall,
    reason: `${none} ${lavapipe.failure} SwiftShader is a slow renderer for the CPU.`,
  });
  if ('choice' in swiftShader) return swiftShader.choice;
  failures.push(swiftShader.failure);
  // Whatever else there is, such as the software adapter of Windows.
  const other = await tryByName('', 'Nothing better works.');
  if ('choice' in other) return other.choice;
  throw new AdapterError(`No usable adapter. ${failures.join(' ')} ${installHint}`);
}

async function decideByName(wanted: string, names: readonly string[]): Promise<AdapterChoice> {
  const name = matchName(wanted, names);
  if (name === null) {
    const found = names.length === 0 ? 'none' : names.map((each) => `"${each}"`).join(', ');
    throw new AdapterError(
      `No adapter is called "${wanted}". Found: ${found}. Also possible: lavapipe, swiftshader. ${installHint}`,
    );
  }
  return orThrow(await tryByName(name, 'It was asked for.'));
}

/** The first name that contains `wanted`, whatever the case; an exact one goes first. Null if there is none. */
export function matchName(wanted: string, names: readonly string[]): string | null {
  const low = wanted.toLowerCase();
  return (
    names.find((name) => name.toLowerCase() === low) ?? names.find((name) => name.toLowerCase().includes(low)) ?? null
  );
}

type Attempt = { choice: AdapterChoice } | { failure: string };

function orThrow(attempt: Attempt): AdapterChoice {
  if ('choice' in attempt) return attempt.choice;
  throw new AdapterError(`${attempt.failure} ${installHint}`);
}

interface SoftwareOptions {
  readonly say: (line: string) => void;
  readonly mayInstall: boolean;
  readonly reason: string;
}

async function tryLavapipe({ say, mayInstall, reason }: SoftwareOptions): Promise<Attempt> {
  let attempt = await openLavapipe(reason);
  if ('choice' in attempt) return attempt;
  const obstacle = mayInstall ? obstacleToInstall() : 'installing is switched off';
  if (obstacle !== null) return { failure: `${attempt.failure} It cannot be installed from here: ${obstacle}.` };
  try {
    await installLavapipe(say);
  } catch (error) {
    return { failure: `${attempt.failure} Installing it failed: ${messageOf(error)}.` };
  }
  attempt = await openLavapipe(`${reason} It was installed just now.`);
  return attempt;
}

async function openLavapipe(reason: string): Promise<Attempt> {
  const icd = findLavapipe();
  if (icd === null) return { failure: 'lavapipe is not installed.' };
  return tryDriver({ kind: 'lavapipe', driver: icdEnvironment(icd), name: 'llvmpipe', reason });
}

async function trySwiftShader({ say, mayInstall, reason }: SoftwareOptions): Promise<Attempt> {
  let icd = swiftShaderIcd();
  try {
    if (mayInstall) icd = await ensureSwiftShader(say);
    else if (!existsSync(icd)) return { failure: 'SwiftShader is not on this machine and fetching is switched off.' };
  } catch (error) {
    return { failure: `SwiftShader is not available: ${messageOf(error)}.` };
  }
  // Its folder also holds a Vulkan loader, for machines without one.
  const libraries = [dirname(icd), process.env['LD_LIBRARY_PATH']].filter((part) => part).join(delimiter);
  return tryDriver({
    kind: 'swiftshader',
    driver: { ...icdEnvironment(icd), LD_LIBRARY_PATH: libraries },
    name: 'SwiftShader',
    reason,
  });
}

/** Old Vulkan loaders read the first variable, new ones prefer the second. With them, no other driver is loaded. */
function icdEnvironment(icd: string): Record<string, string> {
  return { VK_ICD_FILENAMES: icd, VK_DRIVER_FILES: icd };
}

async function tryDriver(options: {
  kind: 'lavapipe' | 'swiftshader';
  driver: Record<string, string>;
  name: string;
  reason: string;
}): Promise<Attempt> {
  const { kind, driver, reason } = options;
  const name = matchName(options.name, await listAdapters(driver));
  if (name === null) {
    const why =
      kind === 'lavapipe'
        ? `Dawn refuses the lavapipe on this machine: Mesa ${oldestMesa} or newer is needed.`
        : 'Dawn refuses SwiftShader.';
    return { failure: why };
  }
  const report = await probe(['open', name], driver);
  if (report.opened === null) return { failure: `${kind} does not work: ${report.problem}.` };
  const advice =
    kind === 'swiftshader' && process.platform === 'linux'
      ? `lavapipe is about ten times as fast. ${installHint}`
      : faster;
  return {
    choice: { kind, name, driver: report.opened.driver, reason, advice, environment: environmentFor(name, driver) },
  };
}

async function tryByName(name: string, reason: string): Promise<Attempt> {
  const report = await probe(['open', name], {});
  if (report.opened === null) return { failure: `${name || 'The default adapter'} does not work: ${report.problem}.` };
  const kind = kindOf(name, report.opened.fallback);
  // Whoever asked for a driver by environment variable must get it in the child processes too; they inherit it.
  return {
    choice: {
      kind,
      name,
      driver: report.opened.driver,
      reason,
      advice: kind === 'hardware' ? '' : faster,
      environment: environmentFor(name, {}),
    },
  };
}

function environmentFor(name: string, driver: Record<string, string>): Record<string, string> {
  // Mesa's loader may complain without a runtime folder.
  const runtime: Record<string, string> = process.env['XDG_RUNTIME_DIR'] ? {} : { XDG_RUNTIME_DIR: tmpdir() };
  return { HANDOFF_ADAPTER: name, ...driver, ...runtime };
}

function kindOf(name: string, fallback: boolean): AdapterChoice['kind'] {
  if (/llvmpipe|lavapipe/i.test(name)) return 'lavapipe';
  if (/swiftshader/i.test(name)) return 'swiftshader';
  return fallback ? 'software' : 'hardware';
}

/** Names of the adapters that Dawn accepts, best first; none if there is no driver or the probe dies. */
async function listAdapters(environment: Record<string, string> = {}): Promise<string[]> {
  return (await probe(['list'], environment)).names;
}

/** Run the probe in a child process. Never rejects: a crash or a hang is a report with a problem. */
async function probe(args: string[], environment: Record<string, string>): Promise<ProbeReport> {
  const file = fileURLToPath(new URL(`./probe${extname(import.meta.url)}`, import.meta.url));
  const child = fork(file, args, {
    env: { ...process.env, ...environment },
    stdio: ['ignore', 'ignore', 'ignore', 'ipc'],
  });
  let report: ProbeReport | null = null;
  let late = false;
  const limit = setTimeout(() => {
    late = true;
    child.kill('SIGKILL');
  }, probeLimitMs);
  const failure = await new Promise<string>((resolve) => {
    child.on('message', (message) => (report = message as unknown as ProbeReport));
    child.once('error', (error) => resolve(error.message));
    child.once('close', (code, signal) =>
      resolve(
        late ? `no answer within ${probeLimitMs / 1000} s` : `its process ended with ${signal ?? `code ${code}`}`,
      ),
    );
  });
  clearTimeout(limit);
  return report ?? { names: [], opened: null, problem: failure };
}

/** Everything a decision depends on: if it is unchanged, so is the decision. */
function fingerprint(wanted: string): string {
  const { VK_ICD_FILENAMES, VK_DRIVER_FILES, XDG_DATA_HOME } = process.env;
  const home = join(XDG_DATA_HOME || join(homedir(), '.local/share'), 'vulkan/icd.d');
  const files = [...icdFolders, home].flatMap((folder) =>
    filesIn(folder).map((name) => {
      const { size, mtimeMs } = statSync(join(folder, name), { throwIfNoEntry: false }) ?? {};
      return [join(folder, name), size, mtimeMs];
    }),
  );
  const devices = [...filesIn('/dev/dri'), ...filesIn('/dev').filter((name) => /^(nvidia|kfd|dxg|mali)/.test(name))];
  const format = 1; // raise when AdapterChoice changes
  return JSON.stringify([
    format,
    wanted,
    process.platform,
    process.arch,
    VK_ICD_FILENAMES,
    VK_DRIVER_FILES,
    files,
    devices,
  ]);
}

function filesIn(folder: string): string[] {
  return existsSync(folder) ? readdirSync(folder).sort() : [];
}

async function recall(memory: string, wanted: string): Promise<AdapterChoice | null> {
  if (process.platform !== 'linux') return null; // no way to see there whether drivers changed; a probe is quick
  try {
    const saved = JSON.parse(await readFile(memory, 'utf8')) as { fingerprint: string; choice: AdapterChoice };
    if (saved.fingerprint !== fingerprint(wanted)) return null;
    const driver = saved.choice.environment['VK_ICD_FILENAMES'];
    if (driver !== undefined && !existsSync(driver)) return null;
    // The runtime folder belongs to the session that saved it, not to this one.
    const { VK_ICD_FILENAMES, VK_DRIVER_FILES, LD_LIBRARY_PATH } = saved.choice.environment;
    const kept = Object.entries({ VK_ICD_FILENAMES, VK_DRIVER_FILES, LD_LIBRARY_PATH }).filter(
      (entry): entry is [string, string] => entry[1] !== undefined,
    );
    return { ...saved.choice, environment: environmentFor(saved.choice.name, Object.fromEntries(kept)) };
  } catch {
    return null; // absent or damaged: decide anew
  }
}

async function remember(memory: string, wanted: string, choice: AdapterChoice): Promise<void> {
  const temporary = `${memory}.${process.pid}`;
  try {
    await mkdir(dirname(memory), { recursive: true });
    await writeFile(temporary, JSON.stringify({ fingerprint: fingerprint(wanted), choice }, null, 2));
    await rename(temporary, memory);
  } catch {
    await rm(temporary, { force: true }).catch(() => {}); // a read-only home: the next start decides again, that is all
  }
}

function messageOf(error: unknown): string {
  return error instanceof Error ? error.message.replace(/[.\s]+$/, '') : String(error);
}
