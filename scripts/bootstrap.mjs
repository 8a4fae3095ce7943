/**
 * Run one of the project's TypeScript files on a checkout in any state: `node scripts/bootstrap.mjs FILE [ARGS]`.
 *
 * `npm start` and `npm test` go through here, so that they work on a fresh clone. Plain JavaScript with nothing but
 * Node's own modules, as nothing else may be there yet. It checks Node's version, installs the dependencies if they are
 * missing or not those of package-lock.json (the only step that needs a network), and runs FILE under tsx.
 *
 * The program runs in a process group of its own: a Ctrl-C then reaches it once, from here. A terminal would send it to
 * everybody and npm would send it on again, and a second Ctrl-C usually means "at once". An IPC channel tells the program
 * when this process dies without a word.
 */
import { spawn } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { constants } from 'node:os';
import { fileURLToPath } from 'node:url';

const oldestNode = [20, 19];
const root = fileURLToPath(new URL('..', import.meta.url));
/** npm repeats the signal of a key press: within this time it is the same one. */
const sameSignalMs = 1000;
/** After a Ctrl-C everything has ended within 5 s; this is the net below the program's own shutdown. */
const interruptLimitMs = 4000;

const [major = 0, minor = 0] = process.versions.node.split('.').map(Number);
if (major < oldestNode[0] || (major === oldestNode[0] && minor < oldestNode[1])) {
  console.error(`Node ${oldestNode.join('.')} or newer is needed, this is ${process.versions.node}.`);
  process.exit(1);
}

const [file, ...args] = process.argv.slice(2);
if (file === undefined) {
  console.error('usage: node scripts/bootstrap.mjs FILE [ARGS]');
  process.exit(2);
}

if (!dependenciesMatchLock()) {
  console.error('Installing dependencies (once, and when package-lock.json changes).');
  const code = await run(npmCommand('ci', '--include=dev', '--ignore-scripts', '--no-progress'), ['ignore', 2, 2]);
  if (code > 128) process.exit(code); // a signal: somebody changed his mind
  if (code !== 0) {
    console.error('npm ci failed. The first start needs a network (or a filled npm cache); later ones do not.');
    process.exit(code);
  }
}
process.exit(await run([process.execPath, '--import', 'tsx', file, ...args], ['inherit', 'inherit', 'inherit', 'ipc']));

/**
 * Whether node_modules holds what package-lock.json asks for. npm writes its own record last, so an install that was
 * interrupted does not match. Packages for other platforms may be missing.
 * @returns {boolean}
 */
function dependenciesMatchLock() {
  let wanted, present;
  try {
    wanted = JSON.parse(readFileSync(`${root}package-lock.json`, 'utf8')).packages;
    present = JSON.parse(readFileSync(`${root}node_modules/.package-lock.json`, 'utf8')).packages;
  } catch {
    return false;
  }
  for (const [path, entry] of Object.entries(wanted)) {
    if (path === '') continue;
    const installed = present[path];
    if (
      installed === undefined
        ? !(entry.optional || entry.devOptional || entry.peer)
        : installed.version !== entry.version
    ) {
      return false;
    }
  }
  return true; // more than that does no harm
}

/**
 * The npm that runs this script if there is one, else the one in PATH.
 * @param {...string} args
 * @returns {string[]}
 */
function npmCommand(...args) {
  const npm = process.env.npm_execpath ?? '';
  if (/npm-cli\.c?js$/.test(npm)) return [process.execPath, npm, ...args];
  return [process.platform === 'win32' ? 'npm.cmd' : 'npm', ...args];
}

/**
 * Run a command in its own process group, pass signals on, and leave none of its processes behind.
 * @param {string[]} command
 * @param {import('node:child_process').StdioOptions} stdio
 * @returns {Promise<number>} the exit code, 128 + signal number if a signal ended it
 */
async function run([program, ...args], stdio) {
  const windows = process.platform === 'win32';
  const child = spawn(program, args, { cwd: root, stdio, detached: !windows, shell: program.endsWith('.cmd') });
  const killGroup = () => {
    try {
      if (child.pid !== undefined && !windows) process.kill(-child.pid, 'SIGKILL');
    } catch {
      // nobody is left
    }
  };
  let last = { signal: '', atMs: 0 };
  let limit;
  const pass = (signal) => {
    const nowMs = Date.now();
    if (signal === last.signal && nowMs - last.atMs < sameSignalMs) return;
    last = { signal, atMs: nowMs };
    // A terminal that went away is not coming back: end in order.
    child.kill(signal === 'SIGHUP' ? 'SIGTERM' : signal);
    if (signal === 'SIGINT') limit ??= setTimeout(killGroup, interruptLimitMs);
  };
  const signals = ['SIGINT', 'SIGTERM', 'SIGHUP'];
  for (const signal of signals) process.on(signal, pass);
  const code = await new Promise((resolve) => {
    child.once('error', (error) => {
      console.error(`cannot run ${program}: ${error.message}`);
      resolve(127);
    });
    child.once('exit', (status, signal) => resolve(status ?? 128 + constants.signals[signal]));
  });
  clearTimeout(limit);
  killGroup();
  for (const signal of signals) process.off(signal, pass);
  return code;
}
