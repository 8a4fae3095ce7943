/**
 * SwiftShader, the software Vulkan driver of last resort: needs neither root nor a package manager of the system.
 *
 * An npm package made for headless browsers carries it, together with a Vulkan loader. The package is fetched only when
 * nothing else is there, through the npm client and whatever registry it is set up for, and unpacked into the cache folder.
 */
import { execFile } from 'node:child_process';
import { createHash } from 'node:crypto';
import { existsSync } from 'node:fs';
import { mkdir, mkdtemp, readFile, rename, rm, writeFile } from 'node:fs/promises';
import { homedir, tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { promisify } from 'node:util';
import { brotliDecompressSync, gunzipSync } from 'node:zlib';

const run = promisify(execFile);

const packageVersion = '153.0.0';
const packageName = '@sparticuz/chromium';
/** sha512 of that version's tarball, as the public registry states it: whatever mirror it comes from must match. */
const packageIntegrity = 'jiGWqSvPMdu4+P9TilYqAR7yEGPEHINx+lCvE/NqNO/EHYzF/x1hUiI5T6ioVIt7dEy7n88byyT0vk+dnsgQwA==';
const wantedFiles = ['libvk_swiftshader.so', 'libvulkan.so.1', 'vk_swiftshader_icd.json'];
const icdFile = 'vk_swiftshader_icd.json';
const fetchLimitMs = 300_000; // 70 MB; most of it is a browser that is thrown away

/** Where downloads and decisions are kept: `$XDG_CACHE_HOME/handoff`, by default `~/.cache/handoff`. */
export function cacheFolder(environment: NodeJS.ProcessEnv = process.env): string {
  return join(environment['XDG_CACHE_HOME'] || join(homedir(), '.cache'), 'handoff');
}

/** Where SwiftShader's driver description (a Vulkan "ICD" file) lies, or would lie after `ensureSwiftShader`. */
export function swiftShaderIcd(): string {
  return join(cacheFolder(), `swiftshader-${packageVersion}`, icdFile);
}

/**
 * Make sure that SwiftShader is on this machine and return the path of its ICD file, for `VK_ICD_FILENAMES`.
 *
 * Downloads once (70 MB), later calls return at once and need no network. Throws an error that says what failed:
 * another platform than Linux on x64, no npm, no network, wrong bytes.
 */
export async function ensureSwiftShader(say: (line: string) => void = () => {}): Promise<string> {
  const icd = swiftShaderIcd();
  if (existsSync(icd)) return icd;
  if (process.platform !== 'linux' || process.arch !== 'x64') {
    throw new Error(`SwiftShader is packaged for Linux on x64 only, this is ${process.platform} on ${process.arch}`);
  }
  say('Fetching SwiftShader (70 MB, once).');
  const target = dirname(icd);
  await mkdir(dirname(target), { recursive: true }).catch((cause: unknown) => {
    throw new Error(`cannot create ${dirname(target)}: set XDG_CACHE_HOME to a folder that can be written`, { cause });
  });
  const work = await mkdtemp(join(tmpdir(), 'handoff-swiftshader-'));
  try {
    const tarball = await fetchPackage(work);
    const outer = readTar(gunzipSync(tarball));
    const packed = outer.get('package/bin/swiftshader.tar.br');
    if (packed === undefined) throw new Error(`${packageName} ${packageVersion} holds no SwiftShader`);
    const inner = readTar(brotliDecompressSync(packed));
    const staged = await mkdtemp(`${target}.`);
    for (const name of wantedFiles) {
      const bytes = inner.get(name);
      if (bytes === undefined) throw new Error(`${packageName} ${packageVersion} holds no ${name}`);
      await writeFile(join(staged, name), bytes, { mode: 0o755 });
    }
    // Another process may have done the same meanwhile; a folder that is there is complete, as it came by rename.
    await rename(staged, target).catch(() => rm(staged, { recursive: true }));
  } finally {
    await rm(work, { recursive: true, force: true });
  }
  if (!existsSync(icd)) throw new Error(`SwiftShader could not be put into ${target}`);
  return icd;
}

async function fetchPackage(folder: string): Promise<Buffer> {
  // Without a network, npm's own patience would take more than a minute.
  const patience = ['--fetch-retries', '1', '--fetch-retry-mintimeout', '1000'];
  const args = [
    'pack',
    `${packageName}@${packageVersion}`,
    '--pack-destination',
    folder,
    '--ignore-scripts',
    ...patience,
  ];
  // Inside an npm script the environment names the running npm; it may be the only one, so it goes first.
  const npm = process.env['npm_execpath'] ?? '';
  const command: [string, string[]] = /npm-cli\.c?js$/.test(npm) ? [process.execPath, [npm, ...args]] : ['npm', args];
  await run(command[0], command[1], { cwd: folder, timeout: fetchLimitMs }).catch((cause: unknown) => {
    throw new Error(`npm could not fetch ${packageName}@${packageVersion} (it needs a network, once)`, { cause });
  });
  const tarball = await readFile(join(folder, `${packageName.slice(1).replace('/', '-')}-${packageVersion}.tgz`));
  const digest = createHash('sha512').update(tarball).digest('base64');
  if (digest !== packageIntegrity)
    throw new Error(`${packageName} ${packageVersion} has the checksum ${digest}, expected ${packageIntegrity}`);
  return tarball;
}

/** Regular files of an uncompressed tar archive by name. Enough for npm packages: short names, no links. */
export function readTar(archive: Uint8Array): Map<string, Uint8Array> {
  const blockBytes = 512;
  const files = new Map<string, Uint8Array>();
  const text = (start: number, length: number): string =>
    Buffer.from(archive.subarray(start, start + length))
      .toString('latin1')
      .replace(/\0.*$/s, '');
  for (let start = 0; start + blockBytes <= archive.length && archive[start] !== 0;) {
    const sizeBytes = Number.parseInt(text(start + 124, 12).trim(), 8);
    const body = start + blockBytes;
    if (!Number.isSafeInteger(sizeBytes) || body + sizeBytes > archive.length)
      throw new Error(`tar archive is damaged at byte ${start}`);
    const type = text(start + 156, 1);
    if (type === '0' || type === '') files.set(text(start, 100), archive.subarray(body, body + sizeBytes));
    start = body + Math.ceil(sizeBytes / blockBytes) * blockBytes;
  }
  return files;
}
