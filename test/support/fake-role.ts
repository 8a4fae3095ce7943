/**
 * Stands in for server/main.ts in tests of the supervisor: the same command line and IPC, but no model.
 *
 * Answers every GET with what it knows of itself. `FAKE_ROUTER`, `FAKE_PREFILL` and `FAKE_DECODE` say how that role
 * misbehaves:
 *
 *   broken    cannot start, and says why
 *   hopeless  cannot start, and will never be able to
 *   crashing  dies while starting, after a line on standard error
 *   fleeting  dies as soon as it was ready
 *   stubborn  never closes
 *   careless  leaves a rejection unhandled once it was ready
 *   loading   reports progress before it is ready
 */
import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { CheckpointError } from '../../model/safetensors.ts';
import { resolveConfig } from '../../server/config.ts';
import type { WorkerConfig } from '../../server/config.ts';
import { createLogger } from '../../server/log.ts';
import { reportProgress, serveRole } from '../../server/supervisor.ts';
import type { RunningRole } from '../../server/supervisor.ts';

/** What a GET answers with. */
export interface FakeAnswer {
  readonly pid: number;
  readonly argv: readonly string[];
  readonly threads: string | null;
}

const config = resolveConfig(process.argv.slice(2), {});
if (config.command !== 'router' && config.command !== 'prefill' && config.command !== 'decode') {
  throw new Error(`not a role: ${config.command}`);
}
const { host, port, command } = config;
const fault = process.env[`FAKE_${command.toUpperCase()}`] ?? '';

async function start(): Promise<RunningRole> {
  if (fault === 'broken') throw new Error('no weights here');
  if (fault === 'hopeless') throw new CheckpointError('half a file');
  if (fault === 'crashing') {
    process.stderr.write('a driver fell over\n');
    process.exit(7);
  }
  if (fault === 'loading') {
    for (const done of [0, 1, 2]) reportProgress({ step: 'weights', done, total: 2, unit: 'files' });
  }
  const answer: FakeAnswer = {
    pid: process.pid,
    argv: process.argv.slice(2),
    threads: process.env['LP_NUM_THREADS'] ?? null,
  };
  const server = createServer((_, response) => response.end(JSON.stringify(answer)));
  await new Promise<void>((settle) => server.listen({ host, port }, settle));
  const bound = (server.address() as AddressInfo).port;

  // Behind `ready` on the same channel: what came before has left when the callback runs.
  const last = { type: 'progress', step: 'flight', done: 1, total: 1, unit: 'steps' };
  if (fault === 'fleeting') setImmediate(() => process.send?.(last, undefined, undefined, () => process.exit(9)));
  if (fault === 'careless') setImmediate(() => void Promise.reject(new Error('nobody waits for this')));
  const addresses = { http: `http://${host}:${bound}` };
  const close = (): Promise<void> => (fault === 'stubborn' ? new Promise(() => {}) : Promise.resolve());
  if (command === 'router') return { ...addresses, close };
  // Port 0 asks for any port: invent one, as nothing connects to it.
  const chosen = (address: string, invented: number): string => address.replace(/:0$/, `:${invented}`);
  const worker = config as WorkerConfig;
  return {
    ...addresses,
    control: chosen(worker.control, bound + 1),
    transfer: chosen(worker.transfer, bound + 2),
    close,
  };
}

serveRole({ start, log: createLogger({ role: command, level: 'silent' }) });
