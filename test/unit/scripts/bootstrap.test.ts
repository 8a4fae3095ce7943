/** The entry of `npm start` and `npm test`: exit codes, arguments, and that signals end whole trees of processes. */
import assert from 'node:assert/strict';
import { spawn, type ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, test } from 'node:test';
import { fileURLToPath } from 'node:url';

const root = fileURLToPath(new URL('../../..', import.meta.url));
const folder = mkdtempSync(join(tmpdir(), 'handoff-bootstrap-'));
after(() => rmSync(folder, { recursive: true }));

/** Write a program, run it under the bootstrap, and resolve with the process when it has printed its first line. */
async function start(
  name: string,
  program: string,
  args: string[] = [],
): Promise<{ child: ChildProcess; line: string }> {
  const file = join(folder, name);
  writeFileSync(file, program);
  const child = spawn(process.execPath, ['scripts/bootstrap.mjs', file, ...args], {
    cwd: root,
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  child.stdout.setEncoding('utf8');
  const [line] = (await once(child.stdout, 'data')) as [string];
  return { child, line };
}

/**
 * The exit code, once no process is left that writes to the program's output. The end of that pipe is the only sure
 * sign: process ids of orphans stay for as long as nobody collects them.
 */
async function endOf(child: ChildProcess): Promise<number | null> {
  if (child.stdout?.closed !== true) await once(child, 'close');
  return child.exitCode;
}

/** A program with a child process that shares its output and survives all signals but one. */
const family = (onSignal: string): string => `
  import { spawn } from 'node:child_process';
  const stay = 'setInterval(() => {}, 1000); process.on("SIGTERM", () => {}); process.on("SIGINT", () => {}); console.log("ready")';
  let count = 0;
  for (const signal of ['SIGINT', 'SIGTERM']) process.on(signal, () => { count += 1; ${onSignal} });
  setInterval(() => {}, 1000);
  spawn(process.execPath, ['-e', stay], { stdio: ['ignore', 'inherit', 'ignore'] });
`;
const limit = { timeout: 30_000 };

test('arguments reach the program, TypeScript included, and its exit code comes back', async () => {
  const program =
    'const args: string[] = process.argv.slice(2); console.log(JSON.stringify(args)); process.exitCode = 7;';
  const { child, line } = await start('arguments.ts', program, ['--port', '8123', '--help', 'a b']);
  assert.deepEqual(JSON.parse(line), ['--port', '8123', '--help', 'a b']);
  assert.equal(await endOf(child), 7);
});

test('a termination of the bootstrap alone ends the program and whatever it leaves behind', limit, async () => {
  const { child } = await start('terminate.mjs', family('process.exit(3)'));
  child.kill('SIGTERM');
  assert.equal(await endOf(child), 3);
});

test('an interrupt that npm repeats reaches the program once', limit, async () => {
  const { child } = await start('repeat.mjs', family('setTimeout(() => process.exit(count), 300)'));
  child.kill('SIGINT');
  child.kill('SIGINT');
  assert.equal(await endOf(child), 1);
});

test('a program that ignores an interrupt is ended within five seconds', limit, async () => {
  const { child } = await start('stubborn.mjs', family(''));
  const startMs = performance.now();
  child.kill('SIGINT');
  assert.equal(await endOf(child), 128 + 9);
  assert.ok(performance.now() - startMs < 5000, `${performance.now() - startMs} ms`);
});
