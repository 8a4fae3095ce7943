/** JSON schemas of the supported subset, generated: small and bounded, so that an answer to one ends soon. */
/** As createPrng makes it. */
type Random = () => number;

/** A schema with at most `depth` levels below it. */
export function generateSchema(random: Random, depth = 2): Record<string, unknown> {
  const bounded = [leafOf, leafOf, enumOf];
  const nested = [objectOf, objectOf, arrayOf, tupleOf, unionOf];
  return pick(random, depth > 0 ? [...bounded, ...nested] : bounded)(random, depth);
}

/** An object whose properties are generated: what clients ask for. */
export function generateObjectSchema(random: Random): Record<string, unknown> {
  return random() < 0.15 ? recursive(random) : objectOf(random, 2);
}

function pick<T>(random: Random, from: readonly T[]): T {
  return from[Math.floor(random() * from.length)]!;
}

function upTo(random: Random, most: number): number {
  return Math.floor(random() * (most + 1));
}

function leafOf(random: Random): Record<string, unknown> {
  const min = upTo(random, 40) - 20;
  return pick<() => Record<string, unknown>>(random, [
    () => ({ type: 'boolean' }),
    () => ({ type: 'null' }),
    () => ({ type: 'number' }),
    () => ({ type: 'integer' }),
    () => ({ type: 'integer', minimum: min, exclusiveMaximum: min + 1 + upTo(random, 2000) }),
    () => ({ type: 'string', maxLength: 1 + upTo(random, 12) }),
    () => ({ type: 'string', minLength: 2, maxLength: 2 + upTo(random, 5) }),
    () => ({ type: ['string', 'null'], maxLength: 6 }),
    () => ({ type: 'string', pattern: pick(random, PATTERNS) }),
  ])();
}

const PATTERNS = [
  '^[a-z]{2,5}$',
  '^\\d{4}-\\d{2}-\\d{2}$',
  '^(red|green|blue)$',
  '^[A-Z][a-z]{0,6}( [A-Z][a-z]{0,6})?$',
  '^x[^x"]{1,4}x$',
  '^#[0-9a-f]{6}$',
];
const LITERALS = [
  'red',
  'a "b"\n',
  '',
  'Zürich',
  'x\\y',
  '世界',
  0,
  -1.5,
  1e-7,
  true,
  null,
  [1, 'a'],
  { k: { n: null } },
];
const NAMES = ['id', 'name', 'a b', 'Größe', 'quote"d', 'tags', 'n', 'value', 'back\\slash', 'deep'];

function enumOf(random: Random): Record<string, unknown> {
  const values = LITERALS.filter(() => random() < 0.4);
  return random() < 0.3 ? { const: pick(random, LITERALS) } : { enum: values.length > 0 ? values : ['only'] };
}

function objectOf(random: Random, depth: number): Record<string, unknown> {
  const names = NAMES.filter(() => random() < 0.35);
  const properties = Object.fromEntries(names.map((name) => [name, generateSchema(random, depth - 1)]));
  const required = names.filter(() => random() < 0.6);
  return {
    type: 'object',
    properties,
    ...(required.length === 0 ? {} : { required }),
    additionalProperties: false,
    ...(random() < 0.2 ? { title: 'Thing', description: 'An annotation says nothing about values.' } : {}),
  };
}

function arrayOf(random: Random, depth: number): Record<string, unknown> {
  const minItems = upTo(random, 2);
  return { type: 'array', items: generateSchema(random, depth - 1), minItems, maxItems: minItems + upTo(random, 2) };
}

function tupleOf(random: Random, depth: number): Record<string, unknown> {
  const prefixItems = [generateSchema(random, depth - 1), generateSchema(random, 0)];
  return { type: 'array', prefixItems, items: false, minItems: upTo(random, 2) };
}

/** Alternatives of different types, so that exactly one of them fits. */
function unionOf(random: Random, depth: number): Record<string, unknown> {
  const options = [objectOf(random, depth - 1), { type: 'integer', minimum: 0, maximum: 99 }, { type: 'boolean' }];
  return { [pick(random, ['anyOf', 'oneOf'])]: options.slice(upTo(random, 1)) };
}

/** A tree that ends of itself: what leads on is one of several ways. */
function recursive(random: Random): Record<string, unknown> {
  const node = { $ref: '#/$defs/node' };
  const next = { anyOf: [{ type: 'null' }, { type: 'boolean' }, node] };
  return {
    $defs: {
      node: {
        type: 'object',
        properties: { value: generateSchema(random, 0), next },
        required: ['value', 'next'],
        additionalProperties: false,
      },
    },
    $ref: '#/$defs/node',
  };
}
