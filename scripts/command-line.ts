/** How every script reads its command line: `--help` prints what there is, a mistake is one line and exit code 2. */
import { parseArgs, type ParseArgsConfig } from 'node:util';

/**
 * What was given, as `parseArgs` of Node has it.
 *
 * help   printed for `--help`, which ends the process; the option need not be declared
 * config options and their defaults
 */
export function parseCommandLine<T extends ParseArgsConfig>(help: string, config: T): ReturnType<typeof parseArgs<T>> {
  if (process.argv.slice(2).includes('--help')) {
    process.stdout.write(`${help.trim()}\n`);
    process.exit(0);
  }
  try {
    return parseArgs(config);
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    // Node adds advice about arguments that begin with a dash, which no script takes.
    process.stderr.write(`${error.message.replace(/\. To specify a positional.*/s, '')}\nTry --help.\n`);
    process.exit(2);
  }
}
