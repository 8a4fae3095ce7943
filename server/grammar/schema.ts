/**
 * JSON schemas as clients send them, checked and turned into shapes: the few kinds of values that an answer can be held
 * to. What is not supported is refused by the name and the path of its keyword, since an answer that ignores a part of
 * its schema would be wrong behind the client's back; so is what is larger than is built. Pure.
 */
import { ApiError } from '../errors.ts';
import {
  ANY_TEXT,
  hasInteger,
  patternAutomaton,
  TooComplexError,
  type Automaton,
  type Pattern,
  type Spelling,
  type WorkBudget,
} from './automaton.ts';
import { PatternError, readPattern } from './pattern.ts';

/** Values of one kind. Shapes may contain themselves. */
export type Shape =
  | { readonly kind: 'any' }
  /** No value at all. */
  | { readonly kind: 'never' }
  | { readonly kind: 'null' | 'boolean' | 'number' }
  | { readonly kind: 'integer'; readonly min: number; readonly max: number }
  | { readonly kind: 'string'; readonly min: number; readonly max: number; readonly pattern: TextPattern | null }
  | { readonly kind: 'literals'; readonly values: readonly unknown[] }
  | {
      readonly kind: 'array';
      readonly prefix: readonly Shape[];
      /** Of the values behind the prefix; null where there are none. */
      readonly items: Shape | null;
      readonly min: number;
      readonly max: number;
    }
  | {
      readonly kind: 'object';
      readonly properties: readonly { readonly name: string; readonly shape: Shape; readonly required: boolean }[];
      /** Of properties with other names; null where there are none. */
      readonly additional: Shape | null;
      /** Whether the schema allows others although answers never have them. */
      readonly isOpen: boolean;
    }
  | { readonly kind: 'union'; readonly options: readonly Shape[]; readonly exactlyOne: boolean }
  | { readonly kind: 'reference'; target: Shape };

/** A regular expression, and the texts that it matches. */
export interface TextPattern {
  readonly source: string;
  automaton(spelling: Spelling, min: number, max: number): Automaton | null;
}

/** What schemas may have at most, all of those of one request together. */
export const SCHEMA_LIMITS = {
  depth: 32,
  /** Arrays, objects and unions within each other where references are followed; what contains itself counts once. */
  nesting: 256,
  nodes: 10_000,
  characters: 256 * 1024,
  enumValues: 1000,
  patternLength: 1024,
  patterns: 64,
  /** Steps of building the automata of all patterns. */
  work: 300_000,
} as const;

/** What is left of the limits. */
export interface SchemaBudget extends WorkBudget {
  nodes: number;
  characters: number;
  patterns: number;
}

/** All of the limits. */
export function fullBudget(): SchemaBudget {
  const { nodes, characters, patterns, work } = SCHEMA_LIMITS;
  return { nodes, characters, patterns, work };
}

type Keywords = Readonly<Record<string, unknown>>;
type ShapeKind = 'null' | 'boolean' | 'number' | 'integer' | 'string' | 'array' | 'object';

/** Say something about a schema, and nothing about the values. */
const ANNOTATIONS = new Set([
  '$schema',
  '$id',
  '$comment',
  '$defs',
  'definitions',
  'title',
  'description',
  'default',
  'examples',
  'deprecated',
  'readOnly',
  'writeOnly',
]);

/** Keywords of each kind of value. */
const KEYWORDS: Readonly<Record<ShapeKind, readonly string[]>> = {
  null: [],
  boolean: [],
  number: [],
  integer: ['minimum', 'maximum', 'exclusiveMinimum', 'exclusiveMaximum'],
  string: ['minLength', 'maxLength', 'pattern'],
  array: ['items', 'prefixItems', 'minItems', 'maxItems'],
  object: ['properties', 'required', 'additionalProperties'],
};
const KINDS = Object.keys(KEYWORDS) as ShapeKind[];
const KIND_KEYWORDS = new Set(Object.values(KEYWORDS).flat());
/** Each says everything about a value by itself, but for what `type` adds. */
const WHOLE = ['enum', 'const', 'anyOf', 'oneOf', '$ref'] as const;

const ANY: Shape = { kind: 'any' };

function invalid(path: string, message: string): ApiError {
  return new ApiError('invalid_schema', `${path} ${message}`, { param: path });
}

function tooComplex(path: string, message: string): ApiError {
  return new ApiError('schema_too_complex', `${path} ${message}`, { param: path });
}

/** The path of a member of what is at `path`. */
export function at(path: string, key: string): string {
  return /^[A-Za-z_$][\w$-]*$/.test(key) ? `${path}.${key}` : `${path}[${JSON.stringify(key.slice(0, 64))}]`;
}

function isSchemaObject(value: unknown): value is Keywords {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

/**
 * Count everything that a schema holds, annotations too, before any of it is read.
 *
 * @throws ApiError schema_too_complex naming the limit.
 */
export function chargeSchema(schema: unknown, path: string, budget: SchemaBudget): void {
  // Breadth first by hand: a schema is as deep as its client likes.
  const left: { value: unknown; depth: number }[] = [{ value: schema, depth: 0 }];
  for (const { value, depth } of left) {
    if (typeof value === 'string') budget.characters -= value.length;
    if (budget.characters < 0) throw tooComplex(path, `is longer than ${SCHEMA_LIMITS.characters} characters.`);
    if (typeof value !== 'object' || value === null) continue;
    // Each schema of a property is two levels of JSON.
    if (depth > 3 * SCHEMA_LIMITS.depth) throw tooComplex(path, `is nested more than ${SCHEMA_LIMITS.depth} deep.`);
    const isList = Array.isArray(value);
    budget.nodes -= isList ? value.length : Object.keys(value).length;
    if (budget.nodes < 0) throw tooComplex(path, `has more than ${SCHEMA_LIMITS.nodes} values.`);
    for (const [key, member] of Object.entries(value)) {
      if (!isList) budget.characters -= key.length;
      left.push({ value: member, depth: depth + 1 });
    }
  }
}

/**
 * The shape of a schema at `path` of its request. `chargeSchema` comes first.
 *
 * @throws ApiError invalid_schema or schema_too_complex, naming the keyword and its path.
 */
export function readSchema(schema: unknown, path: string, budget: SchemaBudget): Shape {
  return createSchemaReader(schema, path, budget).read(schema, path, 0);
}

/** Reads a schema and its parts, which share what they refer to. */
export interface SchemaReader {
  read(schema: unknown, path: string, depth: number): Shape;
}

/** A reader of the parts of `root`, to whose `$defs` they refer. */
export function createSchemaReader(root: unknown, rootPath: string, budget: SchemaBudget): SchemaReader {
  const references = new Map<string, { kind: 'reference'; target: Shape }>();

  function read(schema: unknown, path: string, depth: number): Shape {
    if (schema === true) return ANY;
    if (schema === false) return { kind: 'never' };
    if (!isSchemaObject(schema)) throw invalid(path, 'must be a schema: an object, true or false.');
    if (depth > SCHEMA_LIMITS.depth) throw tooComplex(path, `is nested more than ${SCHEMA_LIMITS.depth} deep.`);
    const used = Object.keys(schema).filter((key) => !ANNOTATIONS.has(key) && schema[key] !== undefined);
    for (const key of used) {
      if (key === 'type' || KIND_KEYWORDS.has(key) || (WHOLE as readonly string[]).includes(key)) continue;
      throw invalid(at(path, key), 'is not supported in a schema that an answer is held to.');
    }
    const whole = WHOLE.filter((key) => used.includes(key));
    const [keyword] = whole;
    if (keyword === undefined) return readKinds(schema, used, path, depth);
    const beside = used.find((key) => key !== keyword && key !== 'type');
    if (beside !== undefined) {
      throw invalid(at(path, keyword), `beside ${JSON.stringify(beside)} is not supported: put one into the other.`);
    }
    const kinds = readType(schema, path);
    const where = at(path, keyword);
    switch (keyword) {
      case 'const':
        checkNumbers(schema['const'], where);
        return literals([schema['const']], kinds);
      case 'enum':
        return readEnum(schema['enum'], where, kinds);
      case '$ref':
        if (kinds !== null) throw invalid(where, 'beside "type" is not supported: leave out the type.');
        return readReference(schema['$ref'], where);
      case 'anyOf':
      case 'oneOf': {
        if (kinds !== null) throw invalid(where, 'beside "type" is not supported: put the type into its schemas.');
        const options = schema[keyword];
        if (!Array.isArray(options) || options.length === 0) throw invalid(where, 'must be an array of schemas.');
        return {
          kind: 'union',
          options: options.map((option: unknown, index) => read(option, `${where}[${index}]`, depth + 1)),
          exactlyOne: keyword === 'oneOf',
        };
      }
      default:
        return keyword satisfies never;
    }
  }

  function readKinds(schema: Keywords, used: readonly string[], path: string, depth: number): Shape {
    // Where a schema does not say the type, its keywords do. JSON Schema would let other types pass; no answer has them.
    const said = readType(schema, path);
    const kinds = said ?? KINDS.filter((kind) => KEYWORDS[kind].some((key) => used.includes(key)));
    if (kinds.length === 0) return ANY;
    for (const key of used) {
      if (key === 'type' || kinds.some((kind) => KEYWORDS[kind].includes(key))) continue;
      const isNumber = kinds.includes('number') && KEYWORDS.integer.includes(key);
      throw invalid(at(path, key), isNumber ? 'is supported for integers only.' : 'does not fit the type.');
    }
    const shapes = kinds.map((kind) => readKind(kind, schema, path, depth));
    return shapes.length === 1 ? shapes[0]! : { kind: 'union', options: shapes, exactlyOne: false };
  }

  function readKind(kind: ShapeKind, schema: Keywords, path: string, depth: number): Shape {
    switch (kind) {
      case 'null':
      case 'boolean':
      case 'number':
        return { kind };
      case 'integer':
        return readInteger(schema, path);
      case 'string': {
        const { min, max } = readCounts(schema, 'minLength', 'maxLength', path);
        const pattern =
          schema['pattern'] === undefined ? null : readTextPattern(schema['pattern'], at(path, 'pattern'));
        const shape: Shape = { kind, min, max, pattern };
        if (pattern !== null) checkPattern(pattern, min, max, at(path, 'pattern'));
        return shape;
      }
      case 'array':
        return readArray(schema, path, depth);
      case 'object':
        return readObject(schema, path, depth);
      default:
        return kind satisfies never;
    }
  }

  function readTextPattern(value: unknown, path: string): TextPattern {
    if (typeof value !== 'string') throw invalid(path, 'must be a string.');
    if (value.length > SCHEMA_LIMITS.patternLength) {
      throw tooComplex(path, `is longer than ${SCHEMA_LIMITS.patternLength} characters.`);
    }
    if (--budget.patterns < 0) throw tooComplex(path, `is one of more than ${SCHEMA_LIMITS.patterns} patterns.`);
    let parsed: Pattern;
    try {
      parsed = readPattern(value);
    } catch (error) {
      if (error instanceof PatternError) throw invalid(path, `${error.message}.`);
      throw error;
    }
    const built = new Map<string, Automaton | null>();
    return {
      source: value,
      automaton(spelling, min, max) {
        const key = `${spelling},${min},${max}`;
        let automaton = built.get(key);
        if (automaton === undefined) {
          automaton = patternAutomaton(parsed, spelling, { min, max, budget });
          built.set(key, automaton);
        }
        return automaton;
      },
    };
  }

  function readArray(schema: Keywords, path: string, depth: number): Shape {
    const { min, max } = readCounts(schema, 'minItems', 'maxItems', path);
    const given = schema['prefixItems'] ?? [];
    const where = at(path, 'prefixItems');
    if (!Array.isArray(given)) throw invalid(where, 'must be an array of schemas.');
    const prefix = given.map((each: unknown, index) => read(each, `${where}[${index}]`, depth + 1));
    const itemsPath = at(path, 'items');
    if (Array.isArray(schema['items'])) throw invalid(itemsPath, 'must be one schema: a list is spelled prefixItems.');
    const items = schema['items'] === undefined ? ANY : read(schema['items'], itemsPath, depth + 1);
    // Behind a tuple nothing is written that its schema does not speak of, unless it has to be.
    const isTuple = schema['items'] === undefined && prefix.length > 0 && min <= prefix.length;
    return { kind: 'array', prefix, items: isTuple || items.kind === 'never' ? null : items, min, max };
  }

  function readObject(schema: Keywords, path: string, depth: number): Shape {
    const given = schema['properties'] ?? {};
    if (!isSchemaObject(given)) throw invalid(at(path, 'properties'), 'must be an object of schemas.');
    const required = schema['required'] ?? [];
    if (!Array.isArray(required) || required.some((name) => typeof name !== 'string')) {
      throw invalid(at(path, 'required'), 'must be an array of strings.');
    }
    const names = new Set<string>(required as string[]);
    const others = schema['additionalProperties'];
    const otherShape = others === undefined ? ANY : read(others, at(path, 'additionalProperties'), depth + 1);
    const properties = Object.entries(given).map(([name, member]) => ({
      name,
      shape: read(member, at(at(path, 'properties'), name), depth + 1),
      required: names.has(name),
    }));
    for (const name of names) {
      if (!Object.hasOwn(given, name)) properties.push({ name, shape: otherShape, required: true });
    }
    for (const { name } of properties) {
      if (/\p{Surrogate}/u.test(name)) throw invalid(at(path, 'properties'), 'has a name with half a surrogate pair.');
    }
    // An object whose properties are listed has these, as strict mode means it; one without a list may have any.
    const isClosed = otherShape.kind === 'never' || (others === undefined && properties.length > 0);
    return {
      kind: 'object',
      properties,
      additional: isClosed ? null : otherShape,
      isOpen: others === undefined,
    };
  }

  function readReference(value: unknown, path: string): Shape {
    if (typeof value !== 'string') throw invalid(path, 'must be a string.');
    const known = references.get(value);
    if (known !== undefined) return known;
    const match = /^#(?:\/(\$defs|definitions)\/([^/]+))?$/.exec(value);
    if (match === null)
      throw invalid(path, 'must be "#", or "#/$defs/" and a name: other references are not supported.');
    let target = root;
    if (match[1] !== undefined) {
      const definitions = isSchemaObject(root) && Object.hasOwn(root, match[1]) ? root[match[1]] : undefined;
      const name = decodePointer(match[2]!);
      if (!isSchemaObject(definitions) || !Object.hasOwn(definitions, name)) {
        throw invalid(path, `refers to ${JSON.stringify(value.slice(0, 64))}, which is not there.`);
      }
      target = definitions[name];
    }
    const reference: { kind: 'reference'; target: Shape } = { kind: 'reference', target: ANY };
    references.set(value, reference);
    try {
      // Depth is that of the text: a chain of references is as long as the list of definitions at most.
      pending.push({ reference, schema: target, path: match[1] === undefined ? rootPath : pointerPath(match) });
      if (pending.length === 1) resolvePending();
    } catch (error) {
      references.clear();
      pending.length = 0;
      throw error;
    }
    return reference;
  }

  const pending: { reference: { kind: 'reference'; target: Shape }; schema: unknown; path: string }[] = [];

  /** Read what is referred to, one after the other and not one within the other. */
  function resolvePending(): void {
    for (const { reference, schema, path } of pending) reference.target = read(schema, path, 0);
    // No reference refers to another one: chains are as long as the list of definitions. Their ends were read last.
    for (const { reference } of pending.toReversed()) reference.target = endOfChain(reference);
    pending.length = 0;
  }

  function pointerPath(match: RegExpExecArray): string {
    return at(at(rootPath, match[1]!), decodePointer(match[2]!));
  }

  return { read };
}

/** What a chain of references leads to: nothing if it is a ring. */
function endOfChain(reference: Extract<Shape, { kind: 'reference' }>): Shape {
  const seen = new Set<Shape>();
  let shape: Shape = reference;
  while (shape.kind === 'reference' && !seen.has(shape)) {
    seen.add(shape);
    shape = shape.target;
  }
  return shape.kind === 'reference' ? { kind: 'never' } : shape;
}

/**
 * Refuse a shape whose parts are nested deeper than answers are checked, which references make possible.
 *
 * @throws ApiError schema_too_complex.
 */
export function checkNesting(root: Shape, path: string): void {
  const heights = new Map<Shape, number>();
  const limit = SCHEMA_LIMITS.nesting;

  function heightOf(shape: Shape, depth: number): number {
    if (shape.kind === 'reference') return heightOf(shape.target, depth);
    let height = heights.get(shape);
    if (height === undefined) {
      heights.set(shape, 0); // for the parts that contain it
      height = 0;
      if (depth <= limit) for (const part of partsOf(shape)) height = Math.max(height, heightOf(part, depth + 1) + 1);
      heights.set(shape, height);
    }
    if (depth + height > limit)
      throw tooComplex(path, `is nested more than ${limit} deep where it refers to its parts.`);
    return height;
  }

  heightOf(root, 0);
}

function decodePointer(text: string): string {
  let decoded = text;
  try {
    decoded = decodeURIComponent(text);
  } catch {
    // A lone % stands for itself.
  }
  return decoded.replaceAll('~1', '/').replaceAll('~0', '~');
}

/** The types that a schema names; null if it names none. */
function readType(schema: Keywords, path: string): ShapeKind[] | null {
  const { type } = schema;
  if (type === undefined) return null;
  const names: unknown[] = Array.isArray(type) ? type : [type];
  const where = at(path, 'type');
  if (names.length === 0 || names.some((name) => !(KINDS as unknown[]).includes(name))) {
    throw invalid(where, `must be one or more of ${KINDS.join(', ')}.`);
  }
  const kinds = [...new Set(names as ShapeKind[])];
  return kinds.includes('number') ? kinds.filter((kind) => kind !== 'integer') : kinds;
}

function readCounts(schema: Keywords, minKey: string, maxKey: string, path: string): { min: number; max: number } {
  const count = (key: string, fallback: number): number => {
    const value = schema[key];
    if (value === undefined) return fallback;
    if (!Number.isSafeInteger(value) || (value as number) < 0) throw invalid(at(path, key), 'must be a whole number.');
    return value as number;
  };
  const [min, max] = [count(minKey, 0), count(maxKey, Infinity)];
  if (min > max) throw invalid(at(path, minKey), `must not be above ${maxKey}.`);
  return { min, max };
}

function readInteger(schema: Keywords, path: string): Shape {
  const bound = (key: string): number | null => {
    const value = schema[key];
    if (value === undefined) return null;
    if (typeof value !== 'number' || !Number.isFinite(value)) throw invalid(at(path, key), 'must be a number.');
    return value;
  };
  const [least, above] = [bound('minimum'), bound('exclusiveMinimum')];
  const [most, below] = [bound('maximum'), bound('exclusiveMaximum')];
  const min = Math.max(
    least === null ? -Infinity : Math.ceil(least),
    above === null ? -Infinity : Math.floor(above) + 1,
  );
  const max = Math.min(most === null ? Infinity : Math.floor(most), below === null ? Infinity : Math.ceil(below) - 1);
  if (!hasInteger(min, max)) throw invalid(path, 'allows no integer of up to 15 digits.');
  return { kind: 'integer', min, max };
}

/** Build the automaton of a string now, where it can be refused. */
function checkPattern(pattern: TextPattern, min: number, max: number, path: string): void {
  try {
    if (pattern.automaton('json', min, max) !== null) return;
  } catch (error) {
    if (error instanceof TooComplexError) throw tooComplex(path, `cannot be followed: ${error.message}.`);
    throw error;
  }
  throw invalid(path, 'matches no text of the lengths that are allowed.');
}

function readEnum(value: unknown, path: string, kinds: readonly ShapeKind[] | null): Shape {
  if (!Array.isArray(value) || value.length === 0) throw invalid(path, 'must be an array of values.');
  if (value.length > SCHEMA_LIMITS.enumValues) {
    throw tooComplex(path, `has more than ${SCHEMA_LIMITS.enumValues} values.`);
  }
  checkNumbers(value, path);
  return literals(value, kinds);
}

/** Refuse numbers that JavaScript has read as something else: no answer could have them. */
function checkNumbers(value: unknown, path: string): void {
  if (typeof value === 'number' && !Number.isFinite(value)) throw invalid(path, 'is a number that is too large.');
  if (Number.isInteger(value) && !Number.isSafeInteger(value)) {
    throw invalid(path, 'is an integer of more than 53 bits, which is not kept to the last digit: make it a string.');
  }
  if (typeof value !== 'object' || value === null) return;
  const isList = Array.isArray(value);
  for (const [key, member] of Object.entries(value)) {
    checkNumbers(member, isList ? `${path}[${key}]` : at(path, key));
  }
}

function literals(values: readonly unknown[], kinds: readonly ShapeKind[] | null): Shape {
  const fitting = kinds === null ? values : values.filter((value) => kinds.some((kind) => isOfKind(value, kind)));
  return fitting.length === 0 ? { kind: 'never' } : { kind: 'literals', values: fitting };
}

/** Whether a JSON value is of a type of JSON Schema. */
function isOfKind(value: unknown, kind: ShapeKind): boolean {
  switch (kind) {
    case 'null':
      return value === null;
    case 'integer':
      return Number.isInteger(value);
    case 'array':
      return Array.isArray(value);
    case 'object':
      return isSchemaObject(value);
    case 'boolean':
    case 'number':
    case 'string':
      return typeof value === kind;
    default:
      return kind satisfies never;
  }
}

/** Shapes of which there is a value of finite size. */
export function possibleShapes(root: Shape): ReadonlySet<Shape> {
  const users = new Map<Shape, Shape[]>();
  const all = new Set<Shape>([root]);
  for (const shape of all) {
    for (const part of partsOf(shape)) {
      all.add(part);
      const list = users.get(part);
      if (list === undefined) users.set(part, [shape]);
      else list.push(shape);
    }
  }
  // A shape is looked at again whenever one that it needs has turned out to be possible.
  const possible = new Set<Shape>();
  const queue = [...all];
  for (const shape of queue) {
    if (possible.has(shape) || !isPossible(shape, possible)) continue;
    possible.add(shape);
    queue.push(...(users.get(shape) ?? []));
  }
  return possible;
}

function partsOf(shape: Shape): readonly Shape[] {
  switch (shape.kind) {
    case 'array':
      return shape.items === null ? shape.prefix : [...shape.prefix, shape.items];
    case 'object':
      return [
        ...shape.properties.map((property) => property.shape),
        ...(shape.additional === null ? [] : [shape.additional]),
      ];
    case 'union':
      return shape.options;
    case 'reference':
      return [shape.target];
    default:
      return [];
  }
}

function isPossible(shape: Shape, possible: ReadonlySet<Shape>): boolean {
  switch (shape.kind) {
    case 'never':
      return false;
    case 'array': {
      if (shape.min === 0) return true;
      const needed = shape.prefix.slice(0, shape.min);
      if (!needed.every((part) => possible.has(part))) return false;
      return shape.min <= shape.prefix.length || (shape.items !== null && possible.has(shape.items));
    }
    case 'object':
      return shape.properties.every((property) => !property.required || possible.has(property.shape));
    case 'union':
      return shape.options.some((option) => possible.has(option));
    case 'reference':
      return possible.has(shape.target);
    default:
      return true;
  }
}

/**
 * Count the alternatives of a tool's parameter, which may refer to those of others, and build the automata of its strings
 * as they stand in a tool call, where both can be refused.
 *
 * @throws ApiError schema_too_complex.
 */
export function checkParameter(shape: Shape, path: string, budget: SchemaBudget): void {
  const all = alternativesWithin(shape);
  budget.work -= all.size;
  if (budget.work < 0) throw tooComplex(path, 'cannot be followed: the parameters have too many alternatives.');
  for (const each of all) {
    if (each.kind !== 'string' || each.pattern === null) continue;
    try {
      each.pattern.automaton('raw', each.min, each.max);
    } catch (error) {
      if (error instanceof TooComplexError) throw tooComplex(path, `cannot be followed: ${error.message}.`);
      throw error;
    }
  }
}

/** The alternatives of a shape that are no union and no reference. */
export function alternativesOf(root: Shape): Shape[] {
  return [...alternativesWithin(root)].filter(({ kind }) => kind !== 'union' && kind !== 'reference');
}

/** The same with the unions and references that lead to them. */
function alternativesWithin(root: Shape): Set<Shape> {
  const seen = new Set<Shape>([root]);
  for (const shape of seen) {
    if (shape.kind === 'union') for (const option of shape.options) seen.add(option);
    else if (shape.kind === 'reference') seen.add(shape.target);
  }
  return seen;
}

/** The texts of a string without a pattern of its own. */
export function freeText(spelling: Spelling): Automaton {
  return FREE_TEXT[spelling];
}

const FREE_TEXT: Readonly<Record<Spelling, Automaton>> = {
  json: patternAutomaton(ANY_TEXT, 'json')!,
  raw: patternAutomaton(ANY_TEXT, 'raw')!,
};
