/**
 * Whether a finished value is of a shape. It looks at the parsed value and knows nothing of programs and matchers, so
 * that it notices what these get wrong, and what they cannot see: whether exactly one schema of `oneOf` fits. Pure.
 */
import type { Automaton } from './automaton.ts';
import { jsonString } from './automaton.ts';
import { SCHEMA_LIMITS, type Shape } from './schema.ts';

const utf8 = new TextEncoder();
/** Values are nested so deep at most: what contains itself could go on. */
const MAX_DEPTH = SCHEMA_LIMITS.nesting;
/** They are looked at so often: schemas of `oneOf` may make that many times their size. */
const MAX_LOOKS = 1_000_000;

/** Where and why a value is not of a shape, in words that follow "the answer"; null if it is. */
export function misfit(value: unknown, shape: Shape): string | null {
  let looks = 0;

  function look(part: unknown, of: Shape, path: string, depth: number): string | null {
    looks += 1;
    if (looks > MAX_LOOKS || depth > MAX_DEPTH) return 'is too complex to be checked';
    const wrong = (expected: string): string => `has no ${expected} at ${path}`;
    switch (of.kind) {
      case 'any':
        return null;
      case 'never':
        return `has a value at ${path}, where none may be`;
      case 'null':
        return part === null ? null : wrong('null');
      case 'boolean':
      case 'number':
        return typeof part === of.kind ? null : wrong(of.kind);
      case 'integer':
        return Number.isInteger(part) && (part as number) >= of.min && (part as number) <= of.max
          ? null
          : wrong('integer that is allowed');
      case 'string': {
        if (typeof part !== 'string') return wrong('string');
        const { length } = Array.from(part);
        if (length < of.min || length > of.max) return wrong('string of a length that is allowed');
        return of.pattern === null || accepts(of.pattern.automaton('json', of.min, of.max), part)
          ? null
          : wrong('string that matches the pattern');
      }
      case 'literals':
        return of.values.some((each) => isSame(each, part)) ? null : wrong('value of the list');
      case 'array': {
        if (!Array.isArray(part)) return wrong('array');
        if (part.length < of.min || part.length > of.max) return wrong('array of a length that is allowed');
        for (const [index, item] of part.entries()) {
          const itemShape = of.prefix[index] ?? of.items;
          if (itemShape === null) return wrong('array of a length that is allowed');
          const fault = look(item, itemShape, `${path}[${index}]`, depth + 1);
          if (fault !== null) return fault;
        }
        return null;
      }
      case 'object':
        return lookAtObject(part, of, path, depth);
      case 'union': {
        let fitting = 0;
        let first: string | null = null;
        for (const option of of.options) {
          const fault = look(part, option, path, depth + 1);
          first ??= fault;
          if (fault === null) fitting += 1;
          if (fitting > 0 && !of.exactlyOne) return null;
        }
        if (fitting === 1) return null;
        return fitting > 1 ? `fits more than one schema of oneOf at ${path}` : first;
      }
      case 'reference':
        return look(part, of.target, path, depth);
      default:
        return of satisfies never;
    }
  }

  function lookAtObject(
    part: unknown,
    { properties, additional, isOpen }: Extract<Shape, { kind: 'object' }>,
    path: string,
    depth: number,
  ): string | null {
    if (typeof part !== 'object' || part === null || Array.isArray(part)) return `has no object at ${path}`;
    const names = new Map(properties.map((property) => [property.name, property.shape]));
    for (const { name, required } of properties) {
      if (required && !Object.hasOwn(part, name)) return `lacks ${JSON.stringify(name)} at ${path}`;
    }
    for (const [name, member] of Object.entries(part)) {
      const memberShape = names.get(name) ?? additional;
      if (memberShape === null && isOpen) continue;
      if (memberShape === null) return `has ${JSON.stringify(name)} at ${path}, which is not allowed`;
      const fault = look(member, memberShape, `${path}.${name}`, depth + 1);
      if (fault !== null) return fault;
    }
    return null;
  }

  return look(value, shape, '$', 0);
}

/** Whether an automaton accepts a text as it stands between the quotes of JSON. */
function accepts(automaton: Automaton | null, text: string): boolean {
  if (automaton === null) return false;
  let state = 0;
  for (const byte of utf8.encode(jsonString(text).slice(1, -1))) {
    state = automaton.step(state, byte);
    if (state < 0) return false;
  }
  return automaton.accepts(state);
}

/** Whether two JSON values are equal; the order of keys says nothing. */
function isSame(left: unknown, right: unknown): boolean {
  if (typeof left !== 'object' || typeof right !== 'object' || left === null || right === null) return left === right;
  if (Array.isArray(left) !== Array.isArray(right)) return false;
  const [ours, theirs] = [Object.entries(left), Object.entries(right)];
  return (
    ours.length === theirs.length &&
    ours.every(([key, value]) => Object.hasOwn(right, key) && isSame(value, (right as Record<string, unknown>)[key]))
  );
}
