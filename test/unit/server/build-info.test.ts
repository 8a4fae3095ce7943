import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { test } from 'node:test';
import type { TestContext } from 'node:test';
import { askGit, digestCode, readBuildInfo } from '../../../server/operators/build-info.ts';

function makeTree(t: TestContext): string {
  const root = mkdtempSync(join(tmpdir(), 'handoff-build-'));
  t.after(() => rmSync(root, { recursive: true }));
  for (const folder of ['kernels', 'model', 'scheduler', 'server', 'transfer']) mkdirSync(join(root, folder));
  writeFileSync(join(root, 'server/main.ts'), 'run();\n');
  return root;
}

test('the digest of the code changes with any file that runs, and with nothing else', (t) => {
  const root = makeTree(t);
  const first = digestCode(root);
  assert.match(first, /^[0-9a-f]{16}$/);
  writeFileSync(join(root, 'model/notes.md'), 'not code\n');
  assert.equal(digestCode(root), first);
  writeFileSync(join(root, 'kernels/linear.wgsl'), '@compute\n');
  const second = digestCode(root);
  assert.notEqual(second, first);
  writeFileSync(join(root, 'server/main.ts'), 'run(1);\n');
  const third = digestCode(root);
  for (const earlier of [first, second]) assert.notEqual(third, earlier);
});

test('git says whether the paths that were asked for are those of the commit', async (t) => {
  const root = makeTree(t);
  assert.equal(await askGit(root, ['server']), null, 'no repository');
  const git = (...args: string[]) => {
    const identity = ['-c', 'user.name=t', '-c', 'user.email=t@example.com'];
    const { status, stderr } = spawnSync('git', ['-C', root, ...identity, ...args], { encoding: 'utf8' });
    assert.equal(status, 0, stderr);
  };
  git('init', '-q');
  git('add', '.');
  git('commit', '-qm', 'first');
  const clean = await askGit(root, ['server']);
  assert.match(clean?.commit ?? '', /^[0-9a-f]{40}$/);
  assert.equal(clean?.changed, false);
  writeFileSync(join(root, 'model/extra.ts'), 'x\n');
  assert.equal((await askGit(root, ['server']))?.changed, false, 'a change elsewhere');
  assert.equal((await askGit(root, ['server', 'model']))?.changed, true, 'a new file is a change');
});

test('a checkpoint from elsewhere is no part of the build', async () => {
  const { checkpoint, modelDigest, version, codeDigest } = await readBuildInfo('/models/other', 'f00d');
  assert.deepEqual([checkpoint, modelDigest], ['external', 'f00d']);
  assert.match(version, /^\d+\.\d+\.\d+/);
  assert.match(codeDigest, /^[0-9a-f]{16}$/);
});
