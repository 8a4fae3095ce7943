/**
 * Real agent programs against this server: `npm run test:agents`. Linux on x64, with `unshare` and `ip`.
 *
 * The programs are packages of npm, too large to be dependencies: they are installed into the cache folder, once, and
 * their checksums compared with those below. The tests (test/agents) then run, server and all, in a network namespace that
 * has a loopback and nothing else: such programs look for updates and report on their users.
 */
import { spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { cacheFolder } from '../server/adapter/swiftshader.ts';
import { describeAdapter, setUpAdapter } from '../server/adapter/adapter.ts';
import { oneOf, parseCommandLine, refuse, say } from './command-line.ts';

const HELP = `
npm run test:agents [-- OPTIONS]

  --only NAME  codex or opencode

The first run downloads both programs into ${folderOf()}.`;

/** One program as npm has it. `integrity`: of the package, as npm writes it. */
interface Program {
  readonly name: string;
  readonly packageName: string;
  readonly version: string;
  readonly integrity: string;
  readonly downloadMb: number;
  readonly unpackedMb: number;
  /** In the package. */
  readonly path: string;
}

const CODEX: Program = {
  name: 'codex',
  packageName: '@openai/codex',
  version: '0.171.0-linux-x64',
  integrity: 'sha512-l66NZkQgdk2C3pbcfULDz42yEUB581MVA6I+Y43Wp4OIqEy73HCdmZ0GTjeAHY2ycuH4N00d9VsLrwT1jxshTw==',
  downloadMb: 172,
  unpackedMb: 444,
  path: 'vendor/x86_64-unknown-linux-musl/bin/codex',
};
const OPENCODE: Program = {
  name: 'opencode',
  packageName: 'opencode-linux-x64',
  version: '1.18.33',
  integrity: 'sha512-q/t/3p2CTxOT9y2kvjesb/LZab2+1eqlhhWA02Be6mjTtmYtNBcBsrI5yDo4Fw7ZSPBW2oyMIGMNRqiKQjiAWw==',
  downloadMb: 60,
  unpackedMb: 185,
  path: 'bin/opencode',
};
/** The same for processors without AVX2. */
const OPENCODE_BASELINE: Program = {
  ...OPENCODE,
  packageName: 'opencode-linux-x64-baseline',
  integrity: 'sha512-1KQGBiiDDeL/VHHbHkOvvFo8Jr97WT5+C1tear+p7IcDTnXgVHXqIjU4O4jM4mHQzykTP2i884FCnW5LDa+zCA==',
};
/** Minutes that a slow line may take. */
const INSTALL_LIMIT_MS = 1_800_000;

const { values: options } = parseCommandLine(HELP, { options: { only: { type: 'string' } } });
process.exitCode = await main();

async function main(): Promise<number> {
  if (process.platform !== 'linux' || process.arch !== 'x64') {
    refuse(`the programs are tested on Linux on x64, this is ${process.platform} on ${process.arch}`);
  }
  const only = options.only === undefined ? null : oneOf('--only', options.only, ['codex', 'opencode']);
  const programs = [CODEX, hasAvx2() ? OPENCODE : OPENCODE_BASELINE].filter(
    ({ name }) => only === null || name === only,
  );
  const seal = ['unshare', ...(process.getuid?.() === 0 ? [] : ['--map-root-user']), '--net'];
  const sealed = spawnSync(seal[0]!, [...seal.slice(1), 'ip', 'link', 'set', 'lo', 'up'], { encoding: 'utf8' });
  if (sealed.status !== 0) {
    refuse(`a network of its own is needed (unshare of util-linux, ip of iproute2): ${sealed.stderr ?? sealed.error}`);
  }
  for (const program of programs) install(program);
  const choice = await setUpAdapter({ wanted: process.env['HANDOFF_ADAPTER'], say });
  say(describeAdapter(choice).join('\n'));
  const tests = [process.execPath, '--import', 'tsx', '--test', '--test-reporter', 'spec'];
  const { status } = spawnSync(
    seal[0]!,
    [...seal.slice(1), 'sh', '-c', 'ip link set lo up && exec "$@"', 'sh', ...tests, 'test/agents/programs.test.ts'],
    {
      stdio: 'inherit',
      env: {
        ...process.env,
        ...choice.environment,
        ...Object.fromEntries(programs.map((program) => [`HANDOFF_${program.name.toUpperCase()}`, pathOf(program)])),
      },
    },
  );
  return status ?? 1;
}

function folderOf(): string {
  return join(cacheFolder(), 'agents');
}

function pathOf({ packageName, path }: Program): string {
  return join(folderOf(), 'node_modules', packageName, path);
}

function install(program: Program): void {
  const { name, packageName, version, integrity, downloadMb, unpackedMb } = program;
  const isThere = recordOf(program)?.version === version && existsSync(pathOf(program));
  if (!isThere) {
    say(`Downloading ${name}: ${packageName} ${version}, ${downloadMb} MB (${unpackedMb} MB unpacked), once,`);
    say(`into ${folderOf()}. Its install scripts are not run.`);
    mkdirSync(folderOf(), { recursive: true });
    const args = ['install', '--prefix', folderOf(), '--no-save', '--ignore-scripts', '--no-audit', '--no-fund'];
    // Inside an npm script the environment names the running npm; it may be the only one.
    const npm = process.env['npm_execpath'] ?? '';
    const [command, first] = /npm-cli\.c?js$/.test(npm) ? [process.execPath, [npm]] : ['npm', []];
    const { status } = spawnSync(command, [...first, ...args, ...wanted(program)], {
      stdio: ['ignore', 'inherit', 'inherit'],
      timeout: INSTALL_LIMIT_MS,
    });
    if (status !== 0) refuse(`npm could not install ${packageName} ${version} (it needs a network, once)`);
  }
  const found = recordOf(program)?.integrity;
  if (found !== integrity) refuse(`${packageName} ${version} has the checksum ${found}, expected ${integrity}`);
}

/** What npm is asked for: it removes whatever is installed and not named. */
function wanted(program: Program): string[] {
  const kept = [CODEX, OPENCODE, OPENCODE_BASELINE].filter(
    (other) => other !== program && recordOf(other)?.version === other.version,
  );
  return [program, ...kept].map(({ packageName, version }) => `${packageName}@${version}`);
}

/** What npm has recorded of an installed package. */
function recordOf({ packageName }: Program): { version?: string; integrity?: string } | undefined {
  const path = join(folderOf(), 'node_modules', '.package-lock.json');
  if (!existsSync(path)) return undefined;
  const { packages } = JSON.parse(readFileSync(path, 'utf8')) as {
    packages: Record<string, { version?: string; integrity?: string }>;
  };
  return packages[`node_modules/${packageName}`];
}

function hasAvx2(): boolean {
  return /^flags\s*:.*\bavx2\b/m.test(readFileSync('/proc/cpuinfo', 'utf8'));
}
