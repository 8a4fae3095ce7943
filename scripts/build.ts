/**
 * Build what the npm package carries: `dist/` with the compiled sources, the .wgsl files and the embedded model.
 *
 * `dist/build.json` says which commit it was built from and what it consists of, so that `handoff doctor` can tell a clean
 * build. The package then needs neither tsx nor a TypeScript compiler. Files keep their relative places, so that
 * `new URL('./x.wgsl', import.meta.url)` finds the same thing in both worlds.
 */
import { spawnSync } from 'node:child_process';
import { cpSync, existsSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { askGit, CODE_PATHS, digestCode, type BuildStamp } from '../server/operators/build-info.ts';
import { digestModel } from '../server/model-digest.ts';
import { parseCommandLine } from './command-line.ts';

parseCommandLine(
  'npm run build\n\nWrites dist/, which is what the package carries. Prints nothing unless it fails.',
  {},
);
const root = fileURLToPath(new URL('..', import.meta.url));
const dist = join(root, 'dist');
const entry = join(dist, 'server/main.js');

rmSync(dist, { recursive: true, force: true });
const compiler = join(root, 'node_modules/typescript/bin/tsc');
const { status } = spawnSync(process.execPath, [compiler, '-p', 'tsconfig.build.json'], {
  cwd: root,
  stdio: 'inherit',
});
if (status !== 0) process.exit(status ?? 1);

cpSync(join(root, 'kernels'), join(dist, 'kernels'), {
  recursive: true,
  filter: (path) => !path.endsWith('.ts'),
});
cpSync(join(root, 'model/nano'), join(dist, 'model/nano'), { recursive: true });

const git = await askGit(root, [...CODE_PATHS, 'model/nano']);
const stamp: BuildStamp = {
  commit: git?.commit ?? null,
  clean: git !== null && !git.changed,
  codeDigest: digestCode(dist),
  modelDigest: await digestModel(join(dist, 'model/nano')),
};
writeFileSync(join(dist, 'build.json'), `${JSON.stringify(stamp, null, 2)}\n`);

// npm makes the entry executable; the shell must also find node.
if (!existsSync(entry) || !readFileSync(entry, 'utf8').startsWith('#!/usr/bin/env node\n')) {
  console.error('server/main.ts must start with #!/usr/bin/env node: it is the `handoff` command');
  process.exit(1);
}
