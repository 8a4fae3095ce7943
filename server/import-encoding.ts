/**
 * `handoff import-encoding`: the fixed texts of a checkpoint's chat format, out of the Python file that it ships
 * (`encoding/encoding_dsv4.py`), into the `encoding.json` beside its weights that the server reads.
 *
 * Nothing of the file is run and no name in it is relied on: its string literals are read, what they say of other
 * constants (`{dsml_token}`) is filled in, and a text is taken because its SHA-256 is the expected one. So a text that
 * was changed, cut or re-encoded on its way is refused, and each release's own arrangement of constants is read.
 */
import { createHash } from 'node:crypto';
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { SCHEMA_MARK } from '../model/chat.ts';
import type { EncodingFile } from '../model/chat.ts';
import type { ImportEncodingConfig } from './config.ts';

/** A text by its length in characters and its SHA-256 in hexadecimal. */
export interface TextDigest {
  readonly length: number;
  readonly sha256: string;
}

/** What to look for. */
export interface EncodingDigests {
  /** Before and after the tool schemas. */
  readonly toolsHead: TextDigest;
  readonly toolsTail: TextDigest;
  /** The text that the April release has for effort `max`, and later ones for `high`. */
  readonly effort: TextDigest;
  /** The text that later releases have for `max`. */
  readonly laterEffort: TextDigest;
  /** With SCHEMA_MARK where the schema stands. */
  readonly responseFormat: TextDigest;
}

/** The texts of DeepSeek-V4 in its April release and the one of 31 July. */
export const DEEPSEEK_V4_DIGESTS: EncodingDigests = {
  toolsHead: { length: 854, sha256: 'c7c9042638154a237b5d1bd48be772374a35a4d24c5cacfd1ffbd92703da329c' },
  toolsTail: { length: 99, sha256: '690702850fe256512cb1ee67c4e436ecb3e735c71ebee77ca45ff357a75fb5a7' },
  effort: { length: 476, sha256: 'f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7' },
  laterEffort: { length: 526, sha256: '53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c' },
  responseFormat: { length: 88, sha256: '012f31fcc1338bdfe25b132eaf56ab020ee75ab8e649f37b30b8e5f544fb17a5' },
};

/** A file that does not hold the expected texts; the message names each that is missing. */
export class EncodingFileError extends Error {
  constructor(message: string) {
    super(message);
    this.name = 'EncodingFileError';
  }
}

/** Run the command: the exit code, 0 when encoding.json now holds the texts. Says on standard error what it did. */
export function runImportEncoding(config: ImportEncodingConfig): number {
  try {
    say(importEncoding(config));
    return 0;
  } catch (error) {
    const isFileFault = error instanceof Error && 'syscall' in error;
    if (!(error instanceof EncodingFileError) && !isFileFault) throw error;
    say(`handoff: ${error.message}`);
    return 1;
  }
}

/**
 * Write encoding.json into the directory `model` from the Python file `source`; returns what to tell a person. One that
 * is there already is left alone: it throws EncodingFileError if that one says something else.
 */
export function importEncoding(
  { model, source }: Pick<ImportEncodingConfig, 'model' | 'source'>,
  digests: EncodingDigests = DEEPSEEK_V4_DIGESTS,
): string {
  let file: EncodingFile;
  try {
    file = extractEncoding(readFileSync(source, 'utf8'), digests);
  } catch (error) {
    if (error instanceof EncodingFileError) throw new EncodingFileError(`${source}: ${error.message}`);
    throw error;
  }
  const path = join(model, 'encoding.json');
  const text = `${JSON.stringify(file, null, 2)}\n`;
  const efforts = Object.keys(file.effort_prefix).join(', ');
  const found =
    `tool instructions; texts for effort ${efforts}; ` +
    (file.response_format === undefined ? 'none for a response format' : 'one for a response format');
  if (existsSync(path)) {
    if (readFileSync(path, 'utf8') === text) return `${path} is up to date: ${found}`;
    throw new EncodingFileError(`${path} is there already and says something else; move it away first`);
  }
  writeFileSync(path, text);
  return `wrote ${path}: ${found}`;
}

function say(line: string): void {
  process.stderr.write(`${line}\n`);
}

/** The digest of `text`. Lengths count code points, as Python does. */
export function digestOf(text: string): TextDigest {
  return { length: Array.from(text).length, sha256: createHash('sha256').update(text).digest('hex') };
}

/**
 * The texts in `source`, the text of a Python file. The ladder of efforts is the April one unless the later text is
 * there. Throws EncodingFileError when a text is missing, but for that of the response format, which not every release
 * has.
 */
export function extractEncoding(source: string, digests: EncodingDigests = DEEPSEEK_V4_DIGESTS): EncodingFile {
  // Python reads every kind of line end as one.
  const literals = pythonStrings(source.replaceAll(/\r\n?/g, '\n'));
  const constants = new Map(literals.flatMap(({ name, value }) => (name === null ? [] : [[name, value] as const])));
  const texts = literals.map(({ value }) => fillIn(value, constants));
  const isText = (text: string | undefined, { sha256 }: TextDigest) =>
    text !== undefined && digestOf(text).sha256 === sha256;

  const whole = (digest: TextDigest) =>
    texts.find(({ parts }) => parts.length === 1 && isText(parts[0], digest))?.parts[0];
  const split = (index: 0 | 1, digest: TextDigest) =>
    texts.find(({ parts }) => parts.length === 2 && isText(parts[index], digest))?.parts[index];
  const toolsHead = split(0, digests.toolsHead);
  const toolsTail = split(1, digests.toolsTail);
  const effort = whole(digests.effort);
  const laterEffort = whole(digests.laterEffort);
  const responseFormat = texts
    .filter(({ parts }) => parts.length === 2)
    .map(({ parts }) => parts.join(SCHEMA_MARK))
    .find((text) => isText(text, digests.responseFormat));

  if (toolsHead === undefined || toolsTail === undefined || effort === undefined) {
    const wanted = [
      { name: 'before the tool schemas', text: toolsHead, digest: digests.toolsHead },
      { name: 'after the tool schemas', text: toolsTail, digest: digests.toolsTail },
      { name: 'for the highest effort', text: effort, digest: digests.effort },
    ].filter(({ text }) => text === undefined);
    const lines = wanted.map(
      ({ name, digest }) => `no text ${name}: ${digest.length} characters with SHA-256 ${digest.sha256}`,
    );
    throw new EncodingFileError(
      `${lines.join('; ')}. The file is of another release or was changed; take it from the checkpoint's own repository`,
    );
  }
  return {
    tools_head: toolsHead,
    tools_tail: toolsTail,
    effort_prefix: laterEffort === undefined ? { max: effort } : { high: effort, max: laterEffort },
    ...(responseFormat === undefined ? {} : { response_format: responseFormat }),
  };
}

/** A string of the file: adjacent literals are one. `name` is that of the constant it is assigned to, if it is. */
interface PythonString {
  readonly name: string | null;
  readonly value: string;
}

/** What can stand in Python source, as far as strings are concerned; a name is one only where it begins a line. */
const TOKEN =
  /(?<comment>#[^\n]*)|(?<space>[\s\\]+)|(?<assigned>(?<=^|\n)(?<name>[A-Za-z_]\w*)[ \t]*(?::[^=\n#"']*)?=[ \t]*(?!=))|(?<open>(?:\b[rRbBfFuU]{1,2})?(?:"""|'''|"|'))|(?<other>\w+|[^])/y;

/** Every string literal of `source`, in order. A literal without an end is left out. */
function pythonStrings(source: string): PythonString[] {
  const strings: { name: string | null; value: string }[] = [];
  let name: string | null = null;
  // Whether only blanks, comments and brackets stand between here and the literal before.
  let continues = false;
  TOKEN.lastIndex = 0;
  for (let match = TOKEN.exec(source); match !== null; match = TOKEN.exec(source)) {
    const groups = match.groups!;
    if (groups['comment'] !== undefined || groups['space'] !== undefined) continue;
    if (groups['open'] !== undefined) {
      const literal = readLiteral(source, TOKEN.lastIndex, groups['open']);
      if (literal === null) break;
      TOKEN.lastIndex = literal.end;
      if (continues) strings.at(-1)!.value += literal.value;
      else strings.push({ name, value: literal.value });
      continues = true;
      name = null;
      continue;
    }
    continues = false;
    if (groups['assigned'] !== undefined) name = groups['name']!;
    else if (groups['other'] !== '(') name = null;
  }
  return strings;
}

/** Read the literal whose opening, `open`, ends at `start`; null when it has no end. */
function readLiteral(source: string, start: number, open: string): { value: string; end: number } | null {
  const [, prefix = '', quote = ''] = /^([a-z]*)(.*)$/i.exec(open)!;
  const isRaw = /r/i.test(prefix);
  let value = '';
  for (let offset = start; offset < source.length; offset++) {
    if (source.startsWith(quote, offset)) return { value, end: offset + quote.length };
    if (source[offset] !== '\\') {
      value += source[offset];
      continue;
    }
    const escape = ESCAPE.exec(source.slice(offset, offset + 10));
    if (isRaw || escape === null) {
      // Python keeps the backslash of what is no escape, and of a quote in a raw string.
      value += source.slice(offset, offset + 2);
      offset++;
    } else {
      value += unescape(escape[0]);
      offset += escape[0].length - 1;
    }
  }
  return null;
}

const ESCAPE = /^\\(?:\n|["'\\abfnrtv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})/;
const ESCAPED: Record<string, string> = {
  '\n': '',
  a: '\x07',
  b: '\b',
  f: '\f',
  n: '\n',
  r: '\r',
  t: '\t',
  v: '\v',
};

function unescape(escape: string): string {
  const code = escape[1]!;
  if (!'xuU'.includes(code)) return ESCAPED[code] ?? code;
  const codePoint = Number.parseInt(escape.slice(2), 16);
  return codePoint > 0x10ffff ? escape : String.fromCodePoint(codePoint);
}

/**
 * A template with the names of constants filled in, cut where other names stand. Doubled brackets are single ones, as
 * `str.format` and f-strings have it.
 */
function fillIn(template: string, constants: ReadonlyMap<string, string>): { parts: string[] } {
  const parts = [''];
  for (const [piece] of template.matchAll(/\{\{|\}\}|\{\w+\}|[^]/g)) {
    const value = piece.length > 2 ? constants.get(piece.slice(1, -1)) : undefined;
    if (piece.length > 2 && value === undefined) parts.push('');
    else parts[parts.length - 1] += value ?? (piece === '{{' || piece === '}}' ? piece[0]! : piece);
  }
  return { parts };
}
