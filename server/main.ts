#!/usr/bin/env node
/**
 * The `handoff` command: reads the command line, then becomes one role, supervises all of them, or runs a tool.
 *
 * Exit codes: 0 asked to end, 1 failed, 2 wrong command line. Roles and tools are imported only when they run, so that
 * `handoff router` never loads WebGPU and `--help` loads nothing.
 */
import { setTimeout as pause } from 'node:timers/promises';
import { AdapterError, describeAdapter, setUpAdapter } from './adapter/adapter.ts';
import { ConfigError, flagOf, resolveConfig } from './config.ts';
import type { AllConfig, RouterConfig, WorkerConfig } from './config.ts';
import { createLogger } from './log.ts';
import { SupervisorError, createSupervisor, createTerminal, describeCluster, serveRole } from './supervisor.ts';
import type { Closing, RunningRole } from './supervisor.ts';

/** Links come up in milliseconds; after this the lines are printed anyway, and the log says what is wrong. */
const SERVING_LIMIT_MS = 10_000;
const SERVING_POLL_MS = 20;

async function main(): Promise<void> {
  const config = resolveConfig(process.argv.slice(2), process.env);
  switch (config.command) {
    case 'help':
      process.stdout.write(config.text);
      return;
    case 'all':
      return runAll(config);
    case 'router':
    case 'prefill':
    case 'decode': {
      const log = createLogger({ role: config.command, level: config.logLevel });
      return serveRole({ start: () => startRole(config), log });
    }
    case 'logits':
      return (await import('./tools.ts')).runLogits(config);
    case 'generate':
      return (await import('./tools.ts')).runGenerate(config);
    case 'inspect':
      process.exitCode = await (await import('./inspect.ts')).runInspect(config);
      return;
    case 'import-encoding':
      process.exitCode = (await import('./import-encoding.ts')).runImportEncoding(config);
      return;
    case 'doctor':
      process.exitCode = await (await import('./operators/doctor.ts')).runDoctor(config);
      return;
    case 'drain-watch':
      process.exitCode = await (await import('./operators/drain-watch.ts')).runDrainWatch(config);
      return;
    default:
      config satisfies never;
  }
}

async function startRole(config: RouterConfig | WorkerConfig): Promise<RunningRole> {
  try {
    if (config.command === 'router') return await (await import('./router.ts')).runRouter(config);
    return await (await import('./worker.ts')).runWorker(config, config.command);
  } catch (error) {
    throw explainBusyAddress(error, config);
  }
}

/** An address that somebody else has is a matter of flags: name the one to change. Other errors stay as they are. */
function explainBusyAddress(error: unknown, config: RouterConfig | WorkerConfig): unknown {
  if (!(error instanceof Error) || (error as NodeJS.ErrnoException).code !== 'EADDRINUSE') return error;
  // Node names host and port of a socket that cannot listen, zeromq the whole address.
  const { port, address } = error as { port?: number; address?: string };
  const text = `${address ?? ''} ${error.message}`;
  const worker = config.command === 'router' ? null : config;
  if (port === undefined && worker !== null) {
    for (const key of ['control', 'transfer'] as const) {
      if (!text.includes(worker[key])) continue;
      return new Error(`${worker[key]} is in use; choose another with ${flagOf(key)}`, { cause: error });
    }
  }
  return new Error(`port ${port ?? config.port} on ${config.host} is in use; choose another with ${flagOf('port')}`, {
    cause: error,
  });
}

async function runAll(config: AllConfig): Promise<void> {
  const log = createLogger({ role: 'all', level: config.logLevel });
  const terminal = createTerminal(process.stderr);
  const adapter = await setUpAdapter({ wanted: config.adapter, say: (line) => terminal.line(line) });
  const supervisor = createSupervisor(config, {
    environment: { ...adapter.environment, ...config.childEnvironment },
    softwareAdapter: adapter.kind !== 'hardware',
    log,
    terminal,
    onEvent: (event) => process.send?.({ type: 'process', ...event }),
  });

  let asked = false;
  const stop = (how: Closing): void => {
    asked = true;
    supervisor.close(how).then(() => process.exit(0), fail);
  };
  for (const signal of ['SIGINT', 'SIGTERM'] as const) {
    process.on(signal, () => {
      if (!asked) return stop(signal === 'SIGTERM' ? 'drain' : 'quick');
      supervisor.kill(); // the second signal: at once
      process.exit(1);
    });
  }
  if (process.send !== undefined) process.on('disconnect', () => stop('quick'));
  for (const fault of ['uncaughtException', 'unhandledRejection'] as const) {
    process.on(fault, (error: unknown) => {
      supervisor.kill();
      fail(error);
    });
  }

  try {
    await supervisor.start();
  } catch (error) {
    if (asked) return; // `stop` ends the process when the last child has ended
    throw error;
  }
  await untilServing(supervisor.processes().find(({ role }) => role === 'router')?.addresses?.http);
  for (const line of [...describeAdapter(adapter), '', ...describeCluster(config, supervisor.processes())]) {
    process.stdout.write(`${line}\n`);
  }
}

/** The router listens before its links to the workers are up: what is printed to be tried should work. */
async function untilServing(url: string | undefined): Promise<void> {
  const endMs = performance.now() + SERVING_LIMIT_MS;
  while (url !== undefined && performance.now() < endMs) {
    const response = await fetch(`${url}/readyz`).catch(() => null);
    if (response?.ok) return;
    await pause(SERVING_POLL_MS);
  }
}

/** Say what went wrong and end: without a stack trace where the message is written for a person. */
function fail(error: unknown): never {
  const forPeople = error instanceof ConfigError || error instanceof SupervisorError || error instanceof AdapterError;
  const text = error instanceof Error ? (forPeople ? error.message : (error.stack ?? error.message)) : String(error);
  process.stderr.write(`${text}\n`);
  process.exit(error instanceof ConfigError ? 2 : 1);
}

main().catch(fail);
