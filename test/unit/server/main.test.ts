import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { test } from 'node:test';
import { fileURLToPath } from 'node:url';

const main = fileURLToPath(new URL('../../../server/main.ts', import.meta.url));

function handoff(...args: string[]): { status: number | null; stdout: string; stderr: string } {
  return spawnSync(process.execPath, ['--import', 'tsx', main, ...args], { encoding: 'utf8' });
}

test('help goes to standard output and ends with 0', () => {
  const { status, stdout, stderr } = handoff('router', '--help');
  assert.deepEqual({ status, stderr }, { status: 0, stderr: '' });
  assert.match(stdout, /^handoff router: .*\n\n {2}--host HOST/);
});

test('a wrong command line goes to standard error, with a hint instead of a stack, and ends with 2', () => {
  const { status, stdout, stderr } = handoff('all', '--prot', '80');
  assert.deepEqual({ status, stdout }, { status: 2, stdout: '' });
  assert.equal(stderr, 'handoff: unknown option --prot; did you mean --port?\nTry: handoff all --help\n');
});
