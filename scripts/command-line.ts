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

/** The value of an option that counts something; ends the process with a line about a wrong one. */
export function positive(option: string, text: string): number {
  const value = Number(text);
  if (!Number.isSafeInteger(value) || value < 1) refuse(`${option}: expected a positive whole number, found "${text}"`);
  return value;
}

/** As `positive`, for an option that may be zero. */
export function positiveOrZero(option: string, text: string): number {
  return text === '0' ? 0 : positive(option, text);
}

/** The value of an option that measures something, from `min` to `max`. */
export function within(option: string, text: string, { min, max }: { min: number; max: number }): number {
  const value = Number(text);
  if (text.trim() === '' || !(value >= min && value <= max)) {
    refuse(`${option}: expected a number from ${min} to ${max}, found "${text}"`);
  }
  return value;
}

/** The value of an option that is one of a few words. */
export function oneOf<const T extends string>(option: string, text: string, words: readonly T[]): T {
  const found = words.find((word) => word === text);
  return found ?? refuse(`${option}: expected one of ${words.join(', ')}, found "${text}"`);
}

/** End the process: the command line asks for what cannot be. */
export function refuse(problem: string): never {
  process.stderr.write(`${problem}\n`);
  process.exit(2);
}

/** A line about progress, beside the results on standard output. */
export function say(line: string): void {
  process.stderr.write(`${line}\n`);
}
