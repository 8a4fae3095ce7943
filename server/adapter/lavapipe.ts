/**
 * lavapipe, Mesa's software Vulkan driver: find it, and on Debian-like systems install a version that Dawn accepts.
 *
 * Dawn refuses Mesa before 24 (Debian 12's own 22.3.6 lacks dynamic indexing of uniform arrays); Debian's backports have
 * a newer one. Where packages come from is read from the machine's own apt sources, so mirrors keep working.
 */
import { execFile } from 'node:child_process';
import { existsSync, readdirSync } from 'node:fs';
import { readFile, rm, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { promisify } from 'node:util';

const run = promisify(execFile);

/** The first Mesa that Dawn accepts. */
export const oldestMesa = 24;
const mesaPackage = 'mesa-vulkan-drivers';
const addedSources = '/etc/apt/sources.list.d/handoff-backports.sources';
const commandLimitMs = 600_000;

/** Folders where Vulkan loaders look for drivers, in their order. */
export const icdFolders = ['/etc/vulkan/icd.d', '/usr/local/share/vulkan/icd.d', '/usr/share/vulkan/icd.d'];

/** lavapipe's ICD file (`lvp_icd.json`, on newer systems `lvp_icd.x86_64.json`), or null if Mesa is not installed. */
export function findLavapipe(folders: readonly string[] = icdFolders): string | null {
  for (const folder of folders) {
    if (!existsSync(folder)) continue;
    const name = readdirSync(folder)
      .sort()
      .find((file) => /^lvp_icd.*\.json$/.test(file) && !/i[36]86/.test(file));
    if (name !== undefined) return join(folder, name);
  }
  return null;
}

/** One apt source: where packages of some suites come from. `options` are deb822 fields such as `Signed-By`. */
export interface AptSource {
  readonly uris: string[];
  readonly suites: string[];
  readonly components: string[];
  readonly options: Record<string, string>;
}

/** Read a deb822 `.sources` file. Stanzas without `deb` packages or switched off are left out. */
export function parseDeb822(text: string): AptSource[] {
  const sources: AptSource[] = [];
  for (const stanza of text.split(/\n\s*\n/)) {
    const fields: Record<string, string> = {};
    let field = '';
    for (const line of stanza.split('\n')) {
      if (line.startsWith('#')) continue;
      const start = /^([A-Za-z][A-Za-z0-9-]*):[ \t]*(.*)$/.exec(line);
      if (start !== null) fields[(field = (start[1] ?? '').toLowerCase())] = start[2] ?? '';
      else if (field !== '' && /^[ \t]/.test(line)) fields[field] += `\n${line}`; // continuation, e.g. an embedded key
    }
    const { types = '', uris = '', suites = '', components = '', enabled = 'yes', ...rest } = fields;
    if (!words(types).includes('deb') || enabled.trim().toLowerCase() === 'no') continue;
    const options: Record<string, string> = {};
    if (rest['signed-by'] !== undefined) options['Signed-By'] = rest['signed-by'];
    sources.push({ uris: words(uris), suites: words(suites), components: words(components), options });
  }
  return sources;
}

/** Read a one-line-style `.list` file: `deb [signed-by=KEY] URI SUITE COMPONENT...`. */
export function parseOneLine(text: string): AptSource[] {
  const sources: AptSource[] = [];
  for (const line of text.split('\n')) {
    const match = /^\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s+([^#]*)/.exec(line);
    if (match === null) continue;
    const options: Record<string, string> = {};
    for (const option of words(match[1] ?? '')) {
      const [key, value] = option.split('=');
      if (key?.toLowerCase() === 'signed-by' && value !== undefined) options['Signed-By'] = value;
    }
    sources.push({ uris: [match[2] ?? ''], suites: [match[3] ?? ''], components: words(match[4] ?? ''), options });
  }
  return sources;
}

/**
 * The text of a `.sources` file that adds the backports of a Debian release, taken from the source that serves the
 * release itself. Null if no source does.
 */
export function backportsSource(sources: readonly AptSource[], codename: string): string | null {
  const base = sources.find((source) => source.suites.includes(codename) && source.components.includes('main'));
  if (base === undefined) return null;
  const fields = {
    Types: 'deb',
    URIs: base.uris.join(' '),
    Suites: `${codename}-backports`,
    Components: 'main',
    ...base.options,
  };
  return Object.entries(fields)
    .map(([key, value]) => `${key}: ${value}\n`)
    .join('');
}

/** The suite that offers an acceptable Mesa according to `apt-cache madison`, or null. The first line is the newest. */
export function suiteWithMesa(madison: string): string | null {
  for (const line of madison.split('\n')) {
    const [, version = '', origin = ''] = line.split('|').map((part) => part.trim());
    const upstream = Number.parseInt(version.replace(/^\d+:/, ''), 10);
    const suite = /^\S+ ([^\s/]+)\/\S+ .*Packages$/.exec(origin)?.[1];
    if (upstream >= oldestMesa && suite !== undefined) return suite;
  }
  return null;
}

/** Why lavapipe cannot be installed from here, or null if it can: another system, not root, no apt. */
export function obstacleToInstall(): string | null {
  if (process.platform !== 'linux') return `this is ${process.platform}, not Linux`;
  if (!existsSync('/usr/bin/apt-get')) return 'there is no apt';
  if (process.geteuid?.() !== 0) return 'this user is not root';
  return null;
}

/**
 * Install lavapipe with apt; the caller has checked `obstacleToInstall`. Adds Debian's backports if, and only if, no
 * configured source has a Mesa that Dawn accepts. Throws an error that says which step failed, and then leaves no
 * source behind that it added itself.
 */
export async function installLavapipe(say: (line: string) => void): Promise<void> {
  say("Installing Mesa's software Vulkan driver (lavapipe) with apt; this takes a minute, once.");
  await updateLists(say);
  let suite = await findSuite();
  const alreadyAdded = existsSync(addedSources);
  if (suite === null) {
    const text = backportsSource(await readAptSources(), await debianCodename());
    if (text === null) throw new Error(`no apt source offers ${mesaPackage} ${oldestMesa} or newer`);
    say(`Adding Debian's backports: ${addedSources}`);
    await writeFile(addedSources, text);
    try {
      await updateLists(say);
      suite = await findSuite();
      if (suite === null) throw new Error(`not even the backports offer ${mesaPackage} ${oldestMesa} or newer`);
    } catch (error) {
      if (!alreadyAdded) await rm(addedSources, { force: true });
      throw error;
    }
  }
  await apt('apt-get', ['install', '--yes', '--no-install-recommends', '--target-release', suite, mesaPackage]);
}

/** A source that cannot be reached is no reason to give up: what matters is whether Mesa is offered afterwards. */
async function updateLists(say: (line: string) => void): Promise<void> {
  await apt('apt-get', ['update']).catch((error: unknown) => say(`Going on although ${(error as Error).message}`));
}

async function findSuite(): Promise<string | null> {
  return suiteWithMesa(await apt('apt-cache', ['madison', mesaPackage]));
}

async function debianCodename(): Promise<string> {
  const text = await readFile('/etc/os-release', 'utf8');
  const field = (name: string): string => new RegExp(`^${name}="?([^"\\n]*)"?$`, 'm').exec(text)?.[1] ?? '';
  if (field('ID') !== 'debian')
    throw new Error(`${field('ID')} offers no ${mesaPackage} ${oldestMesa} or newer, and has no backports`);
  return field('VERSION_CODENAME');
}

async function readAptSources(): Promise<AptSource[]> {
  const folder = '/etc/apt/sources.list.d';
  const names = existsSync(folder) ? readdirSync(folder).sort() : [];
  const files = ['/etc/apt/sources.list', ...names.map((name) => join(folder, name))];
  const sources: AptSource[] = [];
  for (const file of files) {
    if (!existsSync(file)) continue;
    const text = await readFile(file, 'utf8');
    if (file.endsWith('.sources')) sources.push(...parseDeb822(text));
    else if (file.endsWith('.list')) sources.push(...parseOneLine(text));
  }
  return sources;
}

async function apt(command: 'apt-get' | 'apt-cache', args: string[]): Promise<string> {
  // Another apt may be at work (unattended upgrades): wait for its lock rather than fail.
  const options = ['--quiet', '--quiet', '--option', 'DPkg::Lock::Timeout=120'];
  const env = { ...process.env, DEBIAN_FRONTEND: 'noninteractive', LC_ALL: 'C' };
  try {
    return (
      await run(command, command === 'apt-get' ? [...options, ...args] : args, {
        env,
        timeout: commandLimitMs,
        maxBuffer: 1 << 24,
      })
    ).stdout;
  } catch (error) {
    const { stderr } = error as { stderr?: string };
    const output = (stderr ?? '').trim().split('\n').slice(-3).join(' ');
    throw new Error(`${command} ${args[0]} failed: ${output || String(error)}`, { cause: error });
  }
}

function words(text: string): string[] {
  return text.split(/\s+/).filter((word) => word !== '');
}
