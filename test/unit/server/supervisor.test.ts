import assert from 'node:assert/strict';
import { fork, spawn } from 'node:child_process';
import { once } from 'node:events';
import { createServer, connect } from 'node:net';
import type { AddressInfo } from 'node:net';
import { createInterface } from 'node:readline';
import { availableParallelism } from 'node:os';
import { PassThrough } from 'node:stream';
import { test } from 'node:test';
import type { TestContext } from 'node:test';
import { fileURLToPath } from 'node:url';
import { inspect } from 'node:util';
import { resolveConfig } from '../../../server/config.ts';
import type { AllConfig } from '../../../server/config.ts';
import { createLogger } from '../../../server/log.ts';
import { SupervisorError, createSupervisor, createTerminal, describeCluster } from '../../../server/supervisor.ts';
import type { Patience, ProcessEvent, ProcessView, Supervisor } from '../../../server/supervisor.ts';
import type { FakeAnswer } from '../../support/fake-role.ts';

const fakeRole = fileURLToPath(new URL('../../support/fake-role.ts', import.meta.url));
const fakeAll = fileURLToPath(new URL('../../support/fake-all.ts', import.meta.url));
const loader = ['--import', import.meta.resolve('tsx')];

function allConfig(...flags: string[]): AllConfig {
  const config = resolveConfig(['all', '--port=0', '--prefill-port=0', '--decode-port=0', ...flags], {});
  assert.equal(config.command, 'all');
  return config as AllConfig;
}

/** A supervisor over fake roles, ended when the test ends; `until` waits for an event, also one of the past. */
function supervise(
  t: TestContext,
  config: AllConfig,
  options: { faults?: Record<string, string>; patience?: Partial<Patience>; softwareAdapter?: boolean } = {},
): {
  supervisor: Supervisor;
  events: ProcessEvent[];
  printed: () => string;
  until: (holds: (event: ProcessEvent) => boolean) => Promise<ProcessEvent>;
} {
  const events: ProcessEvent[] = [];
  const waiting = new Set<() => void>();
  const out = new PassThrough();
  const supervisor = createSupervisor(config, {
    environment: options.faults ?? {},
    softwareAdapter: options.softwareAdapter ?? false,
    log: createLogger({ role: 'all', level: 'silent' }),
    terminal: createTerminal(out),
    patience: { backoffFirstMs: 5, backoffMaxMs: 20, ...options.patience },
    entry: fakeRole,
    onEvent(event) {
      events.push(event);
      for (const look of waiting) look();
    },
  });
  t.after(() => supervisor.close('quick'));
  return {
    supervisor,
    events,
    printed: () => String(out.read() ?? ''),
    until: (holds) =>
      new Promise((resolve) => {
        const look = (): void => {
          const found = events.find(holds);
          if (found === undefined) return;
          waiting.delete(look);
          resolve(found);
        };
        waiting.add(look);
        look();
      }),
  };
}

async function ask(url: string | undefined): Promise<FakeAnswer> {
  assert.ok(url !== undefined, 'the process has no address');
  return (await (await fetch(url)).json()) as FakeAnswer;
}

function named(processes: readonly ProcessView[], name: string): ProcessView {
  const found = processes.find((process) => process.name === name);
  assert.ok(found !== undefined, `no process ${name}`);
  return found;
}

test('the router gets every control address, workers the flags of all and their share of a software adapter', async (t) => {
  const config = allConfig('--prefill=2', '--decode=1', '--lease=9s', '--max-running-requests=7');
  const { supervisor } = supervise(t, config, { softwareAdapter: true });
  await supervisor.start();

  const processes = supervisor.processes();
  assert.deepEqual(
    processes.map(({ name }) => name),
    ['router', 'prefill-0', 'prefill-1', 'decode-0'],
  );
  assert.deepEqual(new Set(processes.map(({ state }) => state)), new Set(['ready']));
  const router = await ask(named(processes, 'router').addresses?.http);
  for (const name of ['prefill-0', 'prefill-1'])
    assert.ok(router.argv.includes(`--prefill-worker=${named(processes, name).addresses?.control}`), name);
  assert.ok(
    router.argv.includes(`--decode-worker=${named(processes, 'decode-0').addresses?.control}`),
    router.argv.join(' '),
  );
  const decode = await ask(named(processes, 'decode-0').addresses?.http);
  assert.equal(router.threads, null);
  assert.equal(decode.threads, String(Math.max(1, Math.floor(availableParallelism() / 3))));
  for (const { argv } of [router, decode]) {
    assert.ok(argv.includes('--lease=9s') && argv.includes('--max-running-requests=7'), argv.join(' '));
  }
});

test('a killed worker or router comes back at its old addresses and leaves the others alone', async (t) => {
  const { supervisor, until } = supervise(t, allConfig(), { softwareAdapter: false });
  await supervisor.start();
  const before = supervisor.processes();

  for (const name of ['decode-0', 'router']) process.kill(named(before, name).pid!, 'SIGKILL');
  for (const name of ['decode-0', 'router'])
    await until((event) => event.name === name && event.state === 'ready' && event.restarts === 1);

  const after = supervisor.processes();
  for (const name of ['decode-0', 'router']) {
    const fresh = named(after, name);
    assert.notEqual(fresh.pid, named(before, name).pid);
    assert.deepEqual(fresh.addresses, named(before, name).addresses);
    const answer = await ask(fresh.addresses?.http);
    assert.equal(answer.pid, fresh.pid);
    assert.equal(answer.threads, null, 'a hardware adapter has no cores to divide');
  }
  assert.equal(named(after, 'prefill-0').pid, named(before, 'prefill-0').pid);
});

test('the back-off of a worker that keeps dying doubles up to its limit', async (t) => {
  const { supervisor, events, until } = supervise(t, allConfig(), { faults: { FAKE_DECODE: 'fleeting' } });
  await supervisor.start();
  await until((event) => event.name === 'decode-0' && event.restarts === 4 && event.state === 'waiting');

  const delays = events.filter(({ name, state }) => name === 'decode-0' && state === 'waiting').map((e) => e.delayMs);
  assert.deepEqual(delays.slice(0, 5), [5, 10, 20, 20, 20]);
});

test('a worker that was up for long enough starts with the first back-off again', async (t) => {
  const patience = { stableMs: 0 };
  const { supervisor, events, until } = supervise(t, allConfig(), { faults: { FAKE_DECODE: 'fleeting' }, patience });
  await supervisor.start();
  await until((event) => event.name === 'decode-0' && event.restarts === 2 && event.state === 'waiting');

  const delays = events.filter(({ name, state }) => name === 'decode-0' && state === 'waiting').map((e) => e.delayMs);
  assert.deepEqual(delays.slice(0, 3), [5, 5, 5]);
});

test('a worker that cannot start three times ends everything and says why', async (t) => {
  const { supervisor } = supervise(t, allConfig(), { faults: { FAKE_DECODE: 'broken' } });

  await assert.rejects(supervisor.start(), (error: Error) => {
    assert.ok(error instanceof SupervisorError, inspect(error));
    assert.match(error.message, /^decode-0 could not be started \(3 tries, last: exit code 1\):\nno weights here$/);
    return true;
  });
  assert.deepEqual(
    supervisor.processes().map(({ state, pid }) => ({ state, pid })),
    Array(3).fill({ state: 'ended', pid: null }),
  );
});

test('a worker that will never be able to start is tried once', async (t) => {
  const { supervisor } = supervise(t, allConfig(), { faults: { FAKE_PREFILL: 'hopeless' } });

  await assert.rejects(supervisor.start(), {
    message: 'prefill-0 could not be started (1 try, last: exit code 2):\nhalf a file',
  });
});

test('a worker that dies without a word is explained by its last lines', async (t) => {
  const { supervisor } = supervise(t, allConfig(), { faults: { FAKE_PREFILL: 'crashing' } });

  await assert.rejects(supervisor.start(), /prefill-0 could not be started .*exit code 7\):\na driver fell over/);
});

test('every busy port is named with the flag that changes it, and nothing is started', async (t) => {
  const taken = [createServer(), createServer()];
  for (const server of taken) await once(server.listen(0, '127.0.0.1'), 'listening');
  t.after(() => taken.forEach((server) => server.close()));
  const [routerPort, decodePort] = taken.map((server) => (server.address() as AddressInfo).port);
  const { supervisor, events } = supervise(t, allConfig(`--port=${routerPort}`, `--decode-port=${decodePort}`));

  await assert.rejects(supervisor.start(), (error: Error) => {
    assert.equal(
      error.message,
      `port ${routerPort} on 127.0.0.1, for the router, is in use; choose another with --port\n` +
        `port ${decodePort} on 127.0.0.1, for decode-0, is in use; choose another with --decode-port`,
    );
    return true;
  });
  assert.equal(events.filter(({ state }) => state === 'starting').length, 0);
});

test('closing ends all processes, a stubborn one by force', async (t) => {
  const { supervisor } = supervise(t, allConfig(), { faults: { FAKE_DECODE: 'stubborn' }, patience: { killMs: 300 } });
  await supervisor.start();
  const pids = supervisor.processes().map(({ pid }) => pid!);

  const startMs = performance.now();
  await supervisor.close('quick');
  const tookMs = performance.now() - startMs;

  assert.ok(tookMs >= 300, `the stubborn one had only ${tookMs} ms`);
  for (const pid of pids) assert.throws(() => process.kill(pid, 0), { code: 'ESRCH' });
  assert.deepEqual(new Set(supervisor.processes().map(({ state }) => state)), new Set(['ended']));
});

test('a drain leaves the children its grace, a quick end does not', async (t) => {
  const tookMs = async (how: 'drain' | 'quick', drainMs: number): Promise<number> => {
    const config = { ...allConfig(), drainMs };
    const { supervisor } = supervise(t, config, { faults: { FAKE_DECODE: 'stubborn' }, patience: { killMs: 300 } });
    await supervisor.start();
    const startMs = performance.now();
    await supervisor.close(how);
    return performance.now() - startMs;
  };
  const drainedMs = await tookMs('drain', 400);
  assert.ok(drainedMs >= 700, `the stubborn one had only ${drainedMs} ms`);
  const endedMs = await tookMs('quick', 60_000);
  assert.ok(endedMs < 30_000, `a quick end took ${endedMs} ms`);
});

test('closing during a start ends it, and no process is started afterwards', async (t) => {
  const { supervisor, events, until } = supervise(t, allConfig());
  const started = assert.rejects(supervisor.start(), /stopped before everything was ready/);
  await until((event) => event.name === 'prefill-0' && event.state === 'starting');
  await supervisor.close('quick');
  await started;

  assert.deepEqual(
    events.filter(({ name, state }) => name === 'router' && state === 'starting'),
    [],
  );
});

test('closing during a back-off cancels the restart', async (t) => {
  const patience = { backoffFirstMs: 60_000 };
  const { supervisor, events, until } = supervise(t, allConfig(), { patience });
  await supervisor.start();
  process.kill(named(supervisor.processes(), 'decode-0').pid!, 'SIGKILL');
  await until((event) => event.name === 'decode-0' && event.state === 'waiting');
  await supervisor.close('quick');

  assert.equal(events.filter(({ name, state }) => name === 'decode-0' && state === 'starting').length, 1);
});

test('children end when the supervisor is killed', { timeout: 30_000 }, async () => {
  const all = spawn(process.execPath, [...loader, fakeAll], { stdio: ['ignore', 'pipe', 'inherit'] });
  const [line] = (await once(createInterface({ input: all.stdout }), 'line')) as [string];
  const processes = JSON.parse(line) as ProcessView[];
  // A connection that nobody uses stays open as long as the process lives.
  const sockets = processes.map(({ addresses }) => connect(Number(new URL(addresses!.http).port), '127.0.0.1'));
  await Promise.all(sockets.map((socket) => once(socket, 'connect')));
  const closed = sockets.map((socket) => {
    socket.on('error', () => {});
    socket.resume();
    return once(socket, 'close');
  });

  all.kill('SIGKILL');
  await Promise.all(closed);
});

test('a role ends with 0 on SIGTERM', async () => {
  const child = fork(fakeRole, ['decode', '--port=0'], { execArgv: loader });
  await once(child, 'message');
  child.kill('SIGTERM');
  assert.deepEqual(await once(child, 'exit'), [0, null]);
});

test('a role that does not close ends with 1 when the same signal comes again', async () => {
  const child = spawn(process.execPath, [...loader, fakeRole, 'decode', '--port=0'], {
    stdio: ['ignore', 'ignore', 'ignore', 'ipc'],
    env: { ...process.env, FAKE_DECODE: 'stubborn' },
  });
  await once(child, 'message');
  const ended = once(child, 'exit');
  // Two pending signals of one kind are one: repeat until it has ended.
  const again = setInterval(() => child.kill('SIGTERM'), 20);
  try {
    assert.deepEqual(await ended, [1, null]);
  } finally {
    clearInterval(again);
  }
});

test('a role ends with 1 on an unhandled rejection, and its parent learns why', async () => {
  const child = fork(fakeRole, ['decode', '--port=0'], {
    execArgv: loader,
    env: { ...process.env, FAKE_DECODE: 'careless' },
  });
  const messages: unknown[] = [];
  child.on('message', (message) => messages.push(message));
  assert.deepEqual(await once(child, 'exit'), [1, null]);
  assert.deepEqual(messages.at(-1), { type: 'failed', message: 'nobody waits for this' });
});

test('progress off a terminal is one line at each end of a step', async (t) => {
  const { supervisor, printed } = supervise(t, allConfig(), { faults: { FAKE_PREFILL: 'loading' } });
  await supervisor.start();
  assert.equal(printed(), 'prefill-0: weights 0 of 2 files\nprefill-0: weights 2 of 2 files\n');
});

test('progress on a terminal is redrawn in place and makes room for lines', () => {
  const out = Object.assign(new PassThrough(), { isTTY: true, columns: 200 });
  const terminal = createTerminal(out);
  terminal.progress('decode-0', { step: 'weights', done: 2 ** 20, total: 2 ** 21, unit: 'bytes' });
  terminal.line('a line');
  terminal.finished('decode-0');

  const erase = '\r\u001b[K';
  const bar = `${erase}decode-0 weights [##########..........] 1.0 of 2.0 MiB`;
  assert.equal(String(out.read()), `${bar}${erase}a line\n${bar}${erase}`);
});

test('progress in bytes has a rate, once there is something to divide by', () => {
  const out = new PassThrough();
  let nowMs = 5000;
  const terminal = createTerminal(out, () => nowMs);
  const at = (step: string, seconds: number, done: number, total: number): void => {
    nowMs = 5000 + 1000 * seconds;
    terminal.progress('decode-0', { step, done: done * 2 ** 20, total: total * 2 ** 20, unit: 'bytes' });
  };
  at('weights', 0, 0, 4096);
  at('weights', 0.5, 100, 4096);
  at('weights', 4, 2048, 4096);
  at('weights', 8, 4096, 4096);
  at('copies', 9, 10, 20);
  at('copies', 10, 20, 20);
  assert.deepEqual(String(out.read()).trimEnd().split('\n'), [
    'decode-0: weights 0.0 of 4.0 GiB',
    'decode-0: weights 2.0 of 4.0 GiB, 512 MiB/s',
    'decode-0: weights 4.0 of 4.0 GiB, 512 MiB/s',
    'decode-0: copies 10.0 of 20.0 MiB',
    'decode-0: copies 20.0 of 20.0 MiB, 10 MiB/s',
  ]);
});

test('the summary shows each process and a curl line that a client can reach', () => {
  const addresses = { http: 'http://0.0.0.0:8123' };
  const lines = describeCluster(allConfig(), [
    { name: 'router', role: 'router', state: 'ready', pid: 12, addresses, restarts: 0 },
    {
      name: 'decode-0',
      role: 'decode',
      state: 'ready',
      pid: 34,
      addresses: { http: 'http://127.0.0.1:8200', control: 'tcp://127.0.0.1:1', transfer: 'tcp://127.0.0.1:2' },
      restarts: 0,
    },
  ]);
  assert.deepEqual(lines.slice(0, 3), [
    'process   pid  http                   control            transfer',
    'router    12   http://0.0.0.0:8123    -                  -',
    'decode-0  34   http://127.0.0.1:8200  tcp://127.0.0.1:1  tcp://127.0.0.1:2',
  ]);
  assert.match(lines.at(-1)!, /^curl http:\/\/127\.0\.0\.1:8123\/v1\/chat\/completions .*"model":"nano"/);
  assert.doesNotMatch(lines.at(-1)!, /authorization/);
  const named = describeCluster(allConfig('--served-model-name=other', '--api-key=secret'), []);
  assert.match(named.at(-1)!, /-H "authorization: Bearer \$HANDOFF_API_KEY" .*"model":"other"/);
  assert.doesNotMatch(named.join(), /secret/);
});
