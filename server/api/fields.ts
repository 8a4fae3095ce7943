/**
 * Rules for the fields of JSON request bodies. A rule reads one value (returning it typed, or throwing an
 * `ApiError` that names the field, what was accepted and what was found) and carries the JSON schema that
 * says the same, so that validation, types and documentation have one source. Pure.
 *
 * Everywhere `null` means absent, unknown keys are ignored, and nothing is coerced: `"5"` is not a number.
 */
import { ApiError } from '../errors.ts';

/** A JSON schema as plain data. */
export type JsonSchema = { readonly [keyword: string]: unknown };

/**
 * A rule for one value: its schema, what it accepts in words (`a string`), and `read`, which returns the value or throws
 * an `ApiError` 400. Only rules with `isOptional` are asked to read what is absent or null.
 */
export interface Field<T> {
  readonly schema: JsonSchema;
  readonly expected: string;
  readonly isOptional?: true;
  read(value: unknown, path: string): T;
}

/** The type that a rule reads. */
export type FieldValue<F> = F extends Field<infer T> ? T : never;

/** A JSON object whose keys have not been looked at. */
export type JsonObject = Record<string, unknown>;

/** Offending values are echoed up to this many characters. */
const maxEchoLength = 64;

/** `value` as short JSON for an error message. */
export function echo(value: unknown): string {
  if (typeof value === 'number') return String(value);
  if (Array.isArray(value)) return `an array of ${value.length}`;
  if (typeof value === 'object' && value !== null) return 'an object';
  const text = typeof value === 'string' ? JSON.stringify(value.slice(0, maxEchoLength + 1)) : String(value);
  return text.length > maxEchoLength ? `${text.slice(0, maxEchoLength)}…` : text;
}

/** The path of `key` below `path`: `key` alone at the top, `path.key` below it. */
export function pathOf(path: string, key: string): string {
  return path === '' ? key : `${path}.${key}`;
}

/** An `ApiError` saying that `path` should have been `expected`; its type was wrong, or only its value. */
export function wrong(code: 'invalid_type' | 'invalid_value', path: string, expected: string, value: unknown) {
  return new ApiError(code, `${path} must be ${expected}, found ${echo(value)}.`, { param: path });
}

/** An `ApiError` for a field that must be there and is not. */
export function missing(path: string, expected: string): ApiError {
  return new ApiError('missing_required_parameter', `${path} is required: ${expected}.`, { param: path });
}

/** Whether `value` is a JSON object, not null and not an array. */
export function isObject(value: unknown): value is JsonObject {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

/** `text` with every lone surrogate replaced by U+FFFD, as UTF-8 needs it. */
export function wellFormed(text: string): string {
  return text.replaceAll(/\p{Surrogate}/gu, '\uFFFD');
}

/** true or false. */
export function boolean(): Field<boolean> {
  return {
    schema: { type: 'boolean' },
    expected: 'true or false',
    read(value, path) {
      if (typeof value !== 'boolean') throw wrong('invalid_type', path, 'true or false', value);
      return value;
    },
  };
}

/** A finite number in [min, max]; with `above`, greater than min. */
export function finite(range: { min: number; max: number; above?: boolean }): Field<number> {
  const { min, max, above = false } = range;
  const expected = above ? `a number above ${min} and up to ${max}` : `a number from ${min} to ${max}`;
  return {
    expected,
    schema: { type: 'number', [above ? 'exclusiveMinimum' : 'minimum']: min, maximum: max },
    read(value, path) {
      if (typeof value !== 'number') throw wrong('invalid_type', path, expected, value);
      if (!Number.isFinite(value) || value < min || value > max || (above && value === min)) {
        throw wrong('invalid_value', path, expected, value);
      }
      return value;
    },
  };
}

/** An integer in [min, max]; no upper end when `max` is left out. */
export function integer(range: { min: number; max?: number }): Field<number> {
  const { min, max = Infinity } = range;
  const expected = max === Infinity ? `an integer of at least ${min}` : `an integer from ${min} to ${max}`;
  return {
    expected,
    schema: { type: 'integer', minimum: min, ...(max === Infinity ? {} : { maximum: max }) },
    read(value, path) {
      if (typeof value !== 'number') throw wrong('invalid_type', path, expected, value);
      if (!Number.isInteger(value)) throw wrong('invalid_type', path, expected, value);
      if (value < min || value > max) throw wrong('invalid_value', path, expected, value);
      return value;
    },
  };
}

/** A string of minLength to maxLength UTF-16 units, returned well-formed. */
export function text(range: { minLength?: number; maxLength?: number } = {}): Field<string> {
  const { minLength = 0, maxLength = Infinity } = range;
  const upTo = maxLength === Infinity ? '' : ` of up to ${maxLength} characters`;
  const expected = `${minLength > 0 ? 'a non-empty string' : 'a string'}${upTo}`;
  return {
    expected,
    schema: {
      type: 'string',
      ...(minLength === 0 ? {} : { minLength }),
      ...(maxLength === Infinity ? {} : { maxLength }),
    },
    read(value, path) {
      if (typeof value !== 'string') throw wrong('invalid_type', path, expected, value);
      if (value.length < minLength || value.length > maxLength) throw wrong('invalid_value', path, expected, value);
      return wellFormed(value);
    },
  };
}

/** One of the given strings. */
export function choice<const T extends string>(values: readonly T[]): Field<T> {
  const expected = `one of ${values.map((value) => JSON.stringify(value)).join(', ')}`;
  return {
    expected,
    schema: { type: 'string', enum: values },
    read(value, path) {
      if (typeof value !== 'string') throw wrong('invalid_type', path, expected, value);
      const found = values.find((candidate) => candidate === value);
      if (found === undefined) throw wrong('invalid_value', path, expected, value);
      return found;
    },
  };
}

/** An array of minItems to maxItems values that all follow `item`. */
export function list<T>(item: Field<T>, range: { minItems: number; maxItems: number }): Field<T[]> {
  const { minItems, maxItems } = range;
  const expected = `an array of ${minItems} to ${maxItems} items`;
  return {
    expected,
    schema: { type: 'array', items: item.schema, minItems, maxItems },
    read(value, path) {
      if (!Array.isArray(value)) throw wrong('invalid_type', path, expected, value);
      if (value.length < minItems || value.length > maxItems) throw wrong('invalid_value', path, expected, value);
      return value.map((entry, index) => item.read(entry, `${path}[${index}]`));
    },
  };
}

/** A JSON object, taken as it stands. */
export function anyObject(): Field<JsonObject> {
  return {
    expected: 'an object',
    schema: { type: 'object' },
    read(value, path) {
      if (!isObject(value)) throw wrong('invalid_type', path, 'an object', value);
      return value;
    },
  };
}

/** The rule `field`, or undefined where the value is absent or null. */
export function optional<T>(field: Field<T>): Field<T | undefined> {
  return {
    expected: `${field.expected} or null`,
    schema: { anyOf: [field.schema, { type: 'null' }] },
    isOptional: true,
    read: (value, path) => (value === undefined || value === null ? undefined : field.read(value, path)),
  };
}

/** `field` with a sentence about it for the documentation. */
export function described<T>(field: Field<T>, description: string): Field<T> {
  return { ...field, schema: { ...field.schema, description } };
}

/** An object whose named keys follow the given rules; other keys are ignored. */
export function object<S extends Record<string, Field<unknown>>>(
  shape: S,
): Field<{ [K in keyof S]: FieldValue<S[K]> }> {
  const entries = Object.entries(shape);
  const required = entries.filter(([, field]) => field.isOptional !== true).map(([key]) => key);
  return {
    expected: 'an object',
    schema: {
      type: 'object',
      properties: Object.fromEntries(entries.map(([key, field]) => [key, field.schema])),
      ...(required.length === 0 ? {} : { required }),
    },
    read(value, path) {
      if (!isObject(value)) throw wrong('invalid_type', path, 'an object', value);
      const result: JsonObject = {};
      for (const [key, field] of entries) {
        const member = Object.hasOwn(value, key) ? (value[key] ?? undefined) : undefined;
        const at = pathOf(path, key);
        if (member === undefined && field.isOptional !== true) throw missing(at, field.expected);
        result[key] = field.read(member, at);
      }
      return result as { [K in keyof S]: FieldValue<S[K]> };
    },
  };
}

/** A field that clients send and that has no effect here: its type is checked as far as `field` says. */
export function ignored(description: string, field?: Field<unknown>): Field<undefined> {
  return {
    expected: 'anything',
    schema: { ...field?.schema, description },
    isOptional: true,
    read(value, path) {
      if (value !== undefined && value !== null) field?.read(value, path);
      return undefined;
    },
  };
}

/**
 * A field that clients send but this server cannot honour: absent and the values that change nothing are accepted,
 * everything else is a 400 that says so. Reading never returns anything.
 */
export function unsupported(options: {
  neutral: (value: unknown) => boolean;
  accepted: string;
  field?: Field<unknown>;
}): Field<undefined> {
  return {
    expected: options.accepted,
    schema: { ...options.field?.schema, description: `Not supported; accepted values: ${options.accepted}.` },
    isOptional: true,
    read(value, path) {
      if (value === undefined || value === null) return undefined;
      options.field?.read(value, path);
      if (options.neutral(value)) return undefined;
      throw new ApiError(
        'unsupported_parameter',
        `${path} is not supported by this server: leave it out, or send ${options.accepted}; found ${echo(value)}.`,
        { param: path },
      );
    },
  };
}
