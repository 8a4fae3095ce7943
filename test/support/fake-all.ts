/**
 * A supervisor over fake roles in a process of its own, for tests that end it from outside.
 * Prints the processes as one line of JSON when everything is ready.
 */
import { fileURLToPath } from 'node:url';
import { resolveConfig } from '../../server/config.ts';
import { createLogger } from '../../server/log.ts';
import { createSupervisor, createTerminal } from '../../server/supervisor.ts';

const config = resolveConfig(['all', '--port', '0', '--prefill-port', '0', '--decode-port', '0'], {});
if (config.command !== 'all') throw new Error(`not all: ${config.command}`);
const supervisor = createSupervisor(config, {
  softwareAdapter: false,
  log: createLogger({ role: 'all', level: 'silent' }),
  terminal: createTerminal(process.stderr),
  entry: fileURLToPath(new URL('fake-role.ts', import.meta.url)),
});
await supervisor.start();
process.stdout.write(`${JSON.stringify(supervisor.processes())}\n`);
