/**
 * Plain-data states as values: deep copies, one text for equal states, and small numbers for both.
 *
 * A worker's state is stepped in place, so each step works on a copy; equal states get the same number, so a whole world
 * is a handful of numbers, and a step that was made once from a state is never made again.
 */

/** Things that never change and are the same everywhere; copied by reference, left out of texts. */
const shared = new WeakSet<object>();

/** Declare a value (limits, for example) to be constant for the whole exploration. */
export function share<T extends object>(value: T): T {
  shared.add(value);
  return value;
}

/** A deep copy of plain data, maps and sets. Typed arrays are never written to, so they are kept. */
export function copyOf<T>(value: T): T {
  return copy(value) as T;
}

function copy(value: unknown): unknown {
  if (typeof value !== 'object' || value === null) return value;
  if (Array.isArray(value)) return value.map(copy);
  if (shared.has(value) || ArrayBuffer.isView(value)) return value;
  if (value instanceof Map) {
    const copied = new Map<unknown, unknown>();
    for (const [key, item] of value) copied.set(key, copy(item));
    return copied;
  }
  if (value instanceof Set) return new Set(value);
  const copied: Record<string, unknown> = {};
  for (const name in value) copied[name] = copy((value as Record<string, unknown>)[name]);
  return copied;
}

/** A text that is the same for equal values and for no others. Order counts in arrays and maps, not in sets. */
export function textOf(value: unknown): string {
  switch (typeof value) {
    case 'string':
      return `"${value}"`;
    case 'object':
      break;
    default:
      return String(value);
  }
  if (value === null) return 'null';
  if (Array.isArray(value)) return `[${value.map(textOf).join()}]`;
  if (shared.has(value)) return '@';
  if (ArrayBuffer.isView(value)) return `<${(value as Uint8Array).join()}>`;
  if (value instanceof Map) {
    let text = '{';
    for (const [key, item] of value) text += `${textOf(key)}>${textOf(item)};`;
    return `${text}}`;
  }
  if (value instanceof Set) return `(${[...value].map(textOf).sort().join()})`;
  let text = '{';
  for (const name in value) text += `${name}:${textOf((value as Record<string, unknown>)[name])};`;
  return `${text}}`;
}

/** Numbers for values, from 0, in order of first sight. */
export interface Interner<T> {
  /** The value's number, and whether it was new. */
  intern(value: T): { id: number; isNew: boolean };
  get(id: number): T;
  size(): number;
}

export function createInterner<T>(): Interner<T> {
  const ids = new Map<string, number>();
  const values: T[] = [];
  return {
    intern(value) {
      const text = textOf(value);
      const known = ids.get(text);
      if (known !== undefined) return { id: known, isNew: false };
      const id = values.length;
      ids.set(text, id);
      values.push(value);
      return { id, isNew: true };
    },
    get: (id) => values[id] as T,
    size: () => values.length,
  };
}
