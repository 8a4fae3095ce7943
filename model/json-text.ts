/**
 * JSON spelled as Python's `json.dumps(value, ensure_ascii=False)` spells it.
 *
 * The model was trained on prompts rendered in Python, so `{"a":1.0}` must reach it as `{"a": 1.0}`. JSON.parse loses
 * what that needs: number texts (1.0, 1e5, integers past 2^53) and the order of integer-like keys. Hence a reader that
 * keeps both. Most code wants plain values, though: `parseJsonValue` returns what JSON.parse returns and remembers what
 * was lost beside it, so that `jsonFromValue` spells these objects as they came. Values from elsewhere are spelled as
 * well as what is left allows: 1.0 has become 1, and integer-like keys stand first.
 */

/** A JSON value with its number texts and key order. A repeated key has its first place and its last value. */
export type Json =
  | { kind: 'literal'; text: 'true' | 'false' | 'null' }
  | { kind: 'number'; text: string }
  | { kind: 'string'; value: string }
  | { kind: 'array'; items: Json[] }
  | { kind: 'object'; members: Map<string, Json> };

/** Nesting allowed in a value. Python's own limit is about 1000; the bound keeps the recursion off the stack's end. */
export const MAX_JSON_DEPTH = 256;

/** How many values may still be read. One of these goes through all that is read for one purpose. */
export interface JsonBudget {
  valuesLeft: number;
}

/** Values that one prompt may hold: more than the longest context has tokens. Bounds memory, whatever clients send. */
export const MAX_JSON_VALUES = 2 ** 20;

/**
 * Read JSON text (RFC 8259). Throws SyntaxError for anything else and for values nested beyond MAX_JSON_DEPTH, RangeError
 * when the budget, MAX_JSON_VALUES for this text alone if none is given, is used up.
 */
export function parseJson(text: string, budget: JsonBudget = { valuesLeft: MAX_JSON_VALUES }): Json {
  const reader: Reader = { text, offset: 0, valuesLeft: budget.valuesLeft };
  const value = readValue(reader, 0);
  skipWhitespace(reader);
  if (reader.offset !== text.length) throw unexpected(reader);
  budget.valuesLeft = reader.valuesLeft;
  return value;
}

/** Objects and arrays of parseJsonValue whose number texts or key order JSON.parse has lost, as they were written. */
const spellings = new WeakMap<object, Json>();

/** Texts without any of these lose nothing: no fraction, exponent, integer past 2^53 or key that looks like an integer. */
const MAY_LOSE = /\d[.eE]|\d{16}|"\d+"\s*:/;

/** Longer members are not read a second time. */
const MAX_SPELLED_LENGTH = 2 ** 20;

/**
 * What JSON.parse returns for `text`. Where that is an object, its members with the names `spelled` keep what JSON.parse
 * loses: for as long as the objects and arrays in them are not changed, jsonFromValue gives them their number texts and
 * key order back. Members of more than a million characters do not. Throws SyntaxError like parseJson.
 */
export function parseJsonValue(text: string, spelled: readonly string[]): unknown {
  const value = JSON.parse(text) as unknown;
  if (!isComposite(value) || Array.isArray(value)) return value;
  const body = value as Record<string, unknown>;
  if (!spelled.some((name) => Object.hasOwn(body, name) && isComposite(body[name]))) return value;
  // Of a repeated member the last value counts, as it does for JSON.parse.
  const members = new Map<string, string>();
  for (const [name, memberText] of memberTexts(text)) if (spelled.includes(name)) members.set(name, memberText);
  for (const [name, memberText] of members) {
    if (memberText.length <= MAX_SPELLED_LENGTH && MAY_LOSE.test(memberText)) {
      rememberSpelling(body[name], parseJson(memberText));
    }
  }
  return value;
}

function isComposite(value: unknown): boolean {
  return typeof value === 'object' && value !== null;
}

/** Names and texts of the members of the object that `text`, which is known to be JSON, holds. */
function* memberTexts(text: string): Generator<[name: string, text: string]> {
  const reader: Reader = { text, offset: text.indexOf('{') + 1, valuesLeft: 0 };
  if (takeChar(reader, '}')) return;
  do {
    skipWhitespace(reader);
    const name = readString(reader);
    takeChar(reader, ':');
    const start = reader.offset;
    skipValue(reader);
    yield [name, text.slice(start, reader.offset)];
  } while (takeChar(reader, ','));
}

/** Go to the end of a value that is known to be JSON, without looking at more than its brackets and strings. */
function skipValue(reader: Reader): void {
  let depth = 0;
  do {
    const pattern = depth === 0 ? BRACKET_QUOTE_OR_COMMA : BRACKET_OR_QUOTE;
    pattern.lastIndex = reader.offset;
    const { index, 0: found } = pattern.exec(reader.text)!;
    reader.offset = index;
    if (found === '"') {
      skipString(reader);
    } else if (found === '{' || found === '[') {
      depth++;
      reader.offset++;
    } else if (depth > 0) {
      depth--;
      reader.offset++;
    }
    // Else it is what stands behind a number or a literal.
  } while (depth > 0);
}

const BRACKET_OR_QUOTE = /[[\]{}"]/g;
const BRACKET_QUOTE_OR_COMMA = /[[\]{}",]/g;

/** Remember every object and array below `value` that would be spelled unlike `json`; returns whether `value` would be. */
function rememberSpelling(value: unknown, json: Json): boolean {
  let isLossy = false;
  switch (json.kind) {
    case 'literal':
    case 'string':
      return false;
    case 'number':
      // A whole number is printed as an integer, and one past 2^53 with other digits.
      if (/[.eE]/.test(json.text)) return Number.isInteger(value);
      return json.text.length > 15 && numberText(value as number) !== json.text;
    case 'array':
      for (const [index, item] of json.items.entries()) {
        if (rememberSpelling((value as unknown[])[index], item)) isLossy = true;
      }
      break;
    case 'object': {
      const keys = Object.keys(value as object);
      for (const [index, [key, member]] of [...json.members].entries()) {
        if (keys[index] !== key) isLossy = true;
        if (rememberSpelling((value as Record<string, unknown>)[key], member)) isLossy = true;
      }
      break;
    }
    default:
      json satisfies never;
  }
  if (isLossy) spellings.set(value as object, json);
  return isLossy;
}

/**
 * The same for a value that JSON.parse or parseJsonValue returned. Members that are undefined are left out, as
 * JSON.stringify does. Throws SyntaxError for what JSON cannot hold and for values nested beyond MAX_JSON_DEPTH,
 * RangeError when the budget is used up.
 */
export function jsonFromValue(value: unknown, budget: JsonBudget = { valuesLeft: MAX_JSON_VALUES }, depth = 0): Json {
  if (budget.valuesLeft-- <= 0) throw new RangeError(TOO_MANY_VALUES);
  if (depth > MAX_JSON_DEPTH) throw new SyntaxError(`JSON nested deeper than ${MAX_JSON_DEPTH} levels`);
  if (value === null) return { kind: 'literal', text: 'null' };
  switch (typeof value) {
    case 'boolean':
      return { kind: 'literal', text: value ? 'true' : 'false' };
    case 'string':
      return { kind: 'string', value };
    case 'number':
      return { kind: 'number', text: numberText(value) };
    case 'object': {
      const spelled = spellings.get(value);
      if (spelled !== undefined) return spelled;
      if (Array.isArray(value)) {
        return { kind: 'array', items: value.map((item: unknown) => jsonFromValue(item, budget, depth + 1)) };
      }
      const members = new Map<string, Json>();
      for (const [key, member] of Object.entries(value)) {
        if (member !== undefined) members.set(key, jsonFromValue(member, budget, depth + 1));
      }
      return { kind: 'object', members };
    }
    default:
      throw new SyntaxError(`JSON has no ${typeof value}`);
  }
}

/** The text that Python's `json.dumps(value, ensure_ascii=False)` gives. */
export function formatJson(value: Json): string {
  switch (value.kind) {
    case 'literal':
      return value.text;
    case 'number':
      return pythonNumber(value.text);
    case 'string':
      return formatString(value.value);
    case 'array':
      return `[${value.items.map(formatJson).join(', ')}]`;
    case 'object':
      return `{${[...value.members].map(([key, member]) => `${formatString(key)}: ${formatJson(member)}`).join(', ')}}`;
    default:
      return value satisfies never;
  }
}

/** A JSON string literal. JSON.stringify escapes what Python escapes, and lone surrogates, which UTF-8 cannot hold. */
export function formatString(value: string): string {
  return JSON.stringify(value);
}

/** An integer stays as written, but for -0, which Python reads as the integer 0. A float is read and printed again. */
function pythonNumber(text: string): string {
  if (/^-?\d+$/.test(text)) return text === '-0' ? '0' : text;
  return pythonFloat(Number(text));
}

/**
 * Python's `repr` of a float. Both languages print the fewest digits that read back the same; they differ in where the
 * exponent begins (Python: below 1e-4 and from 1e16) and in how it is written.
 */
function pythonFloat(value: number): string {
  // Python reads 1e400 as infinity and prints it like this, JSON or not.
  if (!Number.isFinite(value)) return value < 0 ? '-Infinity' : 'Infinity';
  if (Object.is(value, -0)) return '-0.0';
  const [mantissa, exponentText] = value.toExponential().split('e') as [string, string];
  const exponent = Number(exponentText);
  if (exponent < -4 || exponent >= 16) {
    return `${mantissa}e${exponent < 0 ? '-' : '+'}${String(Math.abs(exponent)).padStart(2, '0')}`;
  }
  const digits = mantissa.replace(/[-.]/g, '');
  const sign = value < 0 ? '-' : '';
  if (exponent < 0) return `${sign}0.${'0'.repeat(-exponent - 1)}${digits}`;
  return `${sign}${digits.slice(0, exponent + 1).padEnd(exponent + 1, '0')}.${digits.slice(exponent + 1) || '0'}`;
}

/** Text for a number whose spelling is lost: whole numbers are taken for integers, up to where JavaScript prints 1e+21. */
function numberText(value: number): string {
  if (Number.isSafeInteger(value)) return String(value);
  return Number.isInteger(value) && Math.abs(value) < 1e21 ? BigInt(value).toString() : String(value);
}

interface Reader {
  readonly text: string;
  offset: number;
  valuesLeft: number;
}

const TOO_MANY_VALUES = `JSON of more than ${MAX_JSON_VALUES} values`;

const WHITESPACE = /[ \t\r\n]*/y;
const NUMBER = /-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?/y;
const LITERAL = /true|false|null/y;

function readValue(reader: Reader, depth: number): Json {
  if (depth > MAX_JSON_DEPTH) throw new SyntaxError(`JSON nested deeper than ${MAX_JSON_DEPTH} levels`);
  if (reader.valuesLeft-- <= 0) throw new RangeError(TOO_MANY_VALUES);
  skipWhitespace(reader);
  switch (reader.text[reader.offset]) {
    case '{':
      return readObject(reader, depth);
    case '[':
      return readArray(reader, depth);
    case '"':
      return { kind: 'string', value: readString(reader) };
    case 't':
    case 'f':
    case 'n':
      return { kind: 'literal', text: take(reader, LITERAL) as 'true' | 'false' | 'null' };
    default:
      return { kind: 'number', text: take(reader, NUMBER) };
  }
}

function readObject(reader: Reader, depth: number): Json {
  const members = new Map<string, Json>();
  reader.offset++;
  if (takeChar(reader, '}')) return { kind: 'object', members };
  for (;;) {
    skipWhitespace(reader);
    const key = readString(reader);
    if (!takeChar(reader, ':')) throw unexpected(reader);
    // Map.set on a key it has keeps the place and replaces the value, which is what a Python dict does.
    members.set(key, readValue(reader, depth + 1));
    if (takeChar(reader, '}')) return { kind: 'object', members };
    if (!takeChar(reader, ',')) throw unexpected(reader);
  }
}

function readArray(reader: Reader, depth: number): Json {
  const items: Json[] = [];
  reader.offset++;
  if (takeChar(reader, ']')) return { kind: 'array', items };
  for (;;) {
    items.push(readValue(reader, depth + 1));
    if (takeChar(reader, ']')) return { kind: 'array', items };
    if (!takeChar(reader, ',')) throw unexpected(reader);
  }
}

/** Go behind the string that begins here. */
function skipString(reader: Reader): void {
  // A search, not a pattern: (?:[^"\\]|\\.)* overflows the matcher's stack on a string of some megabytes.
  let end = reader.offset;
  do end = reader.text.indexOf('"', end + 1);
  while (end !== -1 && isEscaped(reader.text, end));
  reader.offset = end === -1 ? reader.text.length : end + 1;
}

function readString(reader: Reader): string {
  const start = reader.offset;
  if (reader.text[start] !== '"') throw unexpected(reader);
  skipString(reader);
  // JSON.parse checks the escapes, the control characters and the closing quote.
  return JSON.parse(reader.text.slice(start, reader.offset)) as string;
}

/** Whether an odd number of backslashes stands before `offset`. */
function isEscaped(text: string, offset: number): boolean {
  let start = offset;
  while (text[start - 1] === '\\') start--;
  return (offset - start) % 2 === 1;
}

/** Take `char` after whitespace, if it comes next. */
function takeChar(reader: Reader, char: string): boolean {
  skipWhitespace(reader);
  if (reader.text[reader.offset] !== char) return false;
  reader.offset++;
  return true;
}

function take(reader: Reader, pattern: RegExp): string {
  pattern.lastIndex = reader.offset;
  const match = pattern.exec(reader.text);
  if (match === null) throw unexpected(reader);
  reader.offset = pattern.lastIndex;
  return match[0];
}

function skipWhitespace(reader: Reader): void {
  take(reader, WHITESPACE);
}

function unexpected(reader: Reader): SyntaxError {
  const char = reader.text[reader.offset];
  return new SyntaxError(
    `expected JSON, found ${char === undefined ? 'its end' : JSON.stringify(char)} at offset ${reader.offset}`,
  );
}
