/** Adapter set-up as processes see it: each case runs scripts/adapter.ts with an environment and a cache of its own. */
import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { matchName } from '../../../server/adapter/adapter.ts';

const root = fileURLToPath(new URL('../../..', import.meta.url));
const cache = mkdtempSync(join(tmpdir(), 'handoff-adapter-'));
after(() => rmSync(cache, { recursive: true }));
const memory = join(cache, 'handoff/adapter.json');

function adapter(
  args: string[],
  environment: NodeJS.ProcessEnv = {},
): { status: number | null; out: string; err: string } {
  const { HANDOFF_ADAPTER: _name, HANDOFF_ADAPTER_DECISION: _decision, ...inherited } = process.env;
  const { status, stdout, stderr } = spawnSync(process.execPath, ['--import', 'tsx', 'scripts/adapter.ts', ...args], {
    cwd: root,
    encoding: 'utf8',
    env: { ...inherited, XDG_CACHE_HOME: cache, ...environment },
  });
  return { status, out: stdout, err: stderr };
}

test('a name is matched exactly first, then by any part of it, whatever the case', () => {
  const names = ['NVIDIA H200 NVL', 'NVIDIA H200', 'llvmpipe (LLVM 15)'];
  assert.equal(matchName('nvidia h200', names), 'NVIDIA H200');
  assert.equal(matchName('NVIDIA', names), 'NVIDIA H200 NVL');
  assert.equal(matchName('LLVMPIPE', names), 'llvmpipe (LLVM 15)');
  assert.equal(matchName('radeon', names), null);
});

test('an adapter is chosen, explained and remembered', () => {
  const first = adapter([]);
  assert.equal(first.status, 0, first.err);
  assert.match(first.out, /^adapter: .+ \((hardware|lavapipe|swiftshader|software); .+\)\n {9}.+\./);
  // What is remembered is what the next start uses, without another probe.
  const saved = readFileSync(memory, 'utf8');
  writeFileSync(memory, saved.replace(/"driver": "[^"]*"/, '"driver": "from memory"'));
  assert.match(adapter([]).out, /from memory/);
});

test('a damaged memory or a change of drivers leads to a new decision', () => {
  mkdirSync(join(cache, 'handoff'), { recursive: true });
  writeFileSync(memory, '{');
  assert.equal(adapter([]).status, 0);
  const saved = readFileSync(memory, 'utf8');
  writeFileSync(
    memory,
    saved.replace(/"driver": "[^"]*"/, '"driver": "from memory"').replace('"fingerprint": "', '"fingerprint": "x'),
  );
  assert.doesNotMatch(adapter([]).out, /from memory/);
});

test('an unknown name ends with the adapters found and what to install', () => {
  const { status, err } = adapter(['--adapter', 'voodoo']);
  assert.equal(status, 1);
  assert.match(err, /No adapter is called "voodoo"\. Found: .+ (Install|Update)/);
});

test('the environment of the choice leads a child process to the same adapter at once', () => {
  const { out } = adapter(['--env']);
  const environment = Object.fromEntries(
    out
      .trim()
      .split('\n')
      .map((line) => [line.slice(0, line.indexOf('=')), line.slice(line.indexOf('=') + 1)]),
  );
  assert.ok(environment['HANDOFF_ADAPTER'], Object.keys(environment).join(', '));
  const decision = JSON.parse(environment['HANDOFF_ADAPTER_DECISION'] ?? '') as { choice: { reason: string } };
  decision.choice.reason = 'My parent said so.';
  const child = adapter([], {
    ...environment,
    HANDOFF_ADAPTER_DECISION: JSON.stringify(decision),
    XDG_CACHE_HOME: join(cache, 'other'),
  });
  assert.match(child.out, /My parent said so\./);
});
