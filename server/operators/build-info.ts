/**
 * Which code and which checkpoint a process runs, and whether both are what was released.
 *
 * A clean build is one whose files are those of a commit: from sources, git says so; from `dist/`, the stamp that
 * `scripts/build.ts` left there, checked against the files. Read once at start.
 */
import { execFile } from 'node:child_process';
import { createHash } from 'node:crypto';
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { dirname, join, sep } from 'node:path';
import { fileURLToPath } from 'node:url';
import { embeddedModelDir } from '../config.ts';

/** `modified`: files differ from the commit or stamp; `unknown`: there is neither git nor a stamp to ask. */
export type Cleanness = 'clean' | 'modified' | 'unknown';

/** What a process runs. */
export interface BuildInfo {
  readonly version: string;
  /** Of the sources it was built from; null where unknown. */
  readonly commit: string | null;
  /** Of the files that run: two processes with equal digests run the same code. */
  readonly codeDigest: string;
  readonly code: Cleanness;
  readonly modelDigest: string;
  /** `external`: a checkpoint that was never part of the build. */
  readonly checkpoint: Cleanness | 'external';
}

/** What `scripts/build.ts` writes as `dist/build.json`. */
export interface BuildStamp {
  readonly commit: string | null;
  /** The sources were those of the commit. */
  readonly clean: boolean;
  readonly codeDigest: string;
  /** Of the embedded checkpoint. */
  readonly modelDigest: string;
}

/** Folders that make up the server; `model/nano` is data and digested apart. */
const CODE_FOLDERS = ['kernels', 'model', 'scheduler', 'server', 'transfer'];
/** What decides which code runs: a build of a commit with changes in these is not that commit's. */
export const CODE_PATHS = [...CODE_FOLDERS, 'package.json', 'package-lock.json'];
const CODE_FILE = /\.(ts|js|wgsl)$/;
const DIGEST_HEX_DIGITS = 16;
/** git answers in milliseconds; a broken one must not hold up a start. */
const GIT_LIMIT_MS = 3000;

/** The folder above `server/`: the repository, or `dist`. */
const codeRoot = dirname(dirname(dirname(fileURLToPath(import.meta.url))));

/** Digest of every source or compiled file below `root`, by path and content. */
export function digestCode(root: string): string {
  const hash = createHash('sha256');
  for (const folder of CODE_FOLDERS) {
    const files = readdirSync(join(root, folder), { recursive: true, encoding: 'utf8' });
    for (const file of files.filter((name) => CODE_FILE.test(name)).sort()) {
      const path = join(root, folder, file);
      hash
        .update(`${folder}/${file.split(sep).join('/')}\0`)
        .update(readFileSync(path))
        .update('\0');
    }
  }
  return hash.digest('hex').slice(0, DIGEST_HEX_DIGITS);
}

/** The commit of a repository and which of `paths` differ from it; null when git cannot say. */
export async function askGit(
  root: string,
  paths: readonly string[],
): Promise<{ commit: string; changed: boolean } | null> {
  if (!existsSync(join(root, '.git'))) return null;
  const commit = await git(root, ['rev-parse', 'HEAD']);
  const changes = await git(root, ['status', '--porcelain', '--', ...paths]);
  return commit === null || changes === null ? null : { commit, changed: changes !== '' };
}

/**
 * What this process runs.
 *
 * modelDir, modelDigest  the checkpoint it serves, and `digestModel` of it
 */
export async function readBuildInfo(modelDir: string, modelDigest: string): Promise<BuildInfo> {
  const codeDigest = digestCode(codeRoot);
  const isEmbedded = modelDir === embeddedModelDir();
  const stampPath = join(codeRoot, 'build.json');
  if (existsSync(stampPath)) {
    const stamp = JSON.parse(readFileSync(stampPath, 'utf8')) as BuildStamp;
    const isStamped = stamp.clean && stamp.codeDigest === codeDigest;
    const checkpoint = stamp.modelDigest === modelDigest ? 'clean' : 'modified';
    return {
      version: versionOf(dirname(codeRoot)),
      commit: stamp.commit,
      codeDigest,
      code: isStamped ? 'clean' : 'modified',
      modelDigest,
      checkpoint: isEmbedded ? checkpoint : 'external',
    };
  }
  const [code, checkpoint] = await Promise.all([askGit(codeRoot, CODE_PATHS), askGit(codeRoot, ['model/nano'])]);
  return {
    version: versionOf(codeRoot),
    commit: code?.commit ?? null,
    codeDigest,
    code: cleannessOf(code),
    modelDigest,
    checkpoint: isEmbedded ? cleannessOf(checkpoint) : 'external',
  };
}

function cleannessOf(answer: { changed: boolean } | null): Cleanness {
  if (answer === null) return 'unknown';
  return answer.changed ? 'modified' : 'clean';
}

function versionOf(root: string): string {
  const path = join(root, 'package.json');
  if (!existsSync(path)) return 'unknown';
  return (JSON.parse(readFileSync(path, 'utf8')) as { version: string }).version;
}

function git(root: string, args: readonly string[]): Promise<string | null> {
  return new Promise((settle) => {
    execFile('git', ['-C', root, ...args], { timeout: GIT_LIMIT_MS, encoding: 'utf8' }, (error, output) => {
      settle(error === null ? output.trim() : null);
    });
  });
}
