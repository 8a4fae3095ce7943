/**
 * Choose and set up the adapter, and say so: `npm run adapter -- [--adapter NAME] [--env]`.
 *
 * With `--env` it prints `NAME=value` lines for `env` or a shell instead, the rest goes to stderr.
 */
import { AdapterError, describeAdapter, setUpAdapter } from '../server/adapter/adapter.ts';
import { parseCommandLine } from './command-line.ts';

const HELP = `
npm run adapter [-- OPTIONS]

  --adapter NAME  lavapipe, swiftshader or a part of an adapter's name
  --env           print NAME=value lines for a shell, the rest to standard error`;

const { values } = parseCommandLine(HELP, {
  options: { adapter: { type: 'string' }, env: { type: 'boolean', default: false } },
});
try {
  const choice = await setUpAdapter({
    wanted: values.adapter ?? process.env['HANDOFF_ADAPTER'],
    say: (line) => console.error(line),
  });
  for (const line of describeAdapter(choice)) (values.env ? console.error : console.log)(line);
  if (values.env) for (const [name, value] of Object.entries(choice.environment)) console.log(`${name}=${value}`);
} catch (error) {
  if (!(error instanceof AdapterError)) throw error;
  console.error(error.message);
  process.exitCode = 1;
}
