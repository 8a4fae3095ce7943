/** Answers held to schemas and tools: what the masks allow is right, what cannot be followed is refused by name and soon. */
import assert from 'node:assert/strict';
import { describe, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { Ajv2020 } from 'ajv/dist/2020.js';
import { createChatParser } from '../../../model/chat-parser.ts';
import { loadTokenizer } from '../../../model/tokenizer.ts';
import { ApiError } from '../../../server/errors.ts';
import { integerAutomaton, patternAutomaton, type Automaton } from '../../../server/grammar/automaton.ts';
import { createGuideMaker, packConstraint, type Constraint } from '../../../server/grammar/constraint.ts';
import { compile } from '../../../server/grammar/program.ts';
import { readPattern } from '../../../server/grammar/pattern.ts';
import { createSteering } from '../../../server/grammar/steering.ts';
import { decodeCore, type CoreParts } from '../../../server/worker-core.ts';
import { createVocabulary, hasBit } from '../../../server/grammar/vocabulary.ts';
import { createPrng } from '../../support/prng.ts';
import { generateObjectSchema, generateSchema } from '../../support/schemas.ts';

const seed = Number(process.env['SEED'] ?? 20_261_130);
const tokenizer = loadTokenizer(fileURLToPath(new URL('../../../model/nano', import.meta.url)));
const { eosId } = tokenizer;
// The model's logits may be wider than the tokenizer: those ids are never allowed.
const vocabSize = tokenizer.vocabSize + 7;
const vocabulary = createVocabulary(tokenizer, vocabSize);
const maker = createGuideMaker(vocabulary);
const utf8 = new TextEncoder();

const held = (value: unknown): Constraint => ({
  thinking: false,
  schema: { value, path: 'schema' },
  tools: [],
  maxCalls: 1,
});

function allowedIds(mask: Uint32Array): number[] {
  return Array.from({ length: vocabulary.maskWords * 32 }, (_, id) => id).filter((id) => hasBit(mask, id));
}

/** An answer of tokens drawn from the masks; it ends as soon as it may, or not at all within `most` tokens. */
function walk(constraint: Constraint, random: () => number, most = 4000): string | null {
  const guide = maker.start(packConstraint(constraint).text);
  const ids: number[] = [];
  while (ids.length < most) {
    const allowed = allowedIds(guide.mask());
    assert.ok(allowed.length > 0, `stuck behind ${JSON.stringify(tokenizer.decode(ids))}`);
    const id = allowed.includes(eosId) ? eosId : allowed[Math.floor(random() * allowed.length)]!;
    assert.ok(guide.accept(id), `token ${id} behind ${JSON.stringify(tokenizer.decode(ids))}`);
    if (id === eosId) {
      assert.deepEqual(allowedIds(guide.mask()), [eosId], 'behind the end there is nothing');
      return tokenizer.decode(ids);
    }
    ids.push(id);
  }
  return null;
}

/** Whether an automaton accepts a whole text. */
function accepts(automaton: Automaton | null, text: string): boolean {
  let state = 0;
  for (const byte of utf8.encode(text)) {
    if (automaton === null || state < 0) return false;
    state = automaton.step(state, byte);
  }
  return automaton !== null && state >= 0 && automaton.accepts(state);
}

function refusalOf(constraint: Constraint): { code: string; param: string | null } {
  try {
    packConstraint(constraint);
  } catch (error) {
    if (error instanceof ApiError) return { code: error.code, param: error.param };
    throw error;
  }
  return assert.fail('it was accepted');
}

describe('answers drawn from the masks', () => {
  test(`are what generated schemas ask for (SEED=${seed})`, () => {
    const random = createPrng(seed);
    let finished = 0;
    for (let count = 0; count < 200; count += 1) {
      const schema = count % 3 === 0 ? generateSchema(random) : generateObjectSchema(random);
      const constraint = held(schema);
      const text = walk(constraint, random);
      if (text === null) continue; // a tree that has grown on and on
      finished += 1;
      const isValid = new Ajv2020({ strict: false }).compile(schema);
      const about = `${JSON.stringify(schema)} got ${text}`;
      assert.ok(isValid(JSON.parse(text)), about);
      assert.equal(packConstraint(constraint).read.check({ content: text, toolCalls: [] }), null, about);
    }
    assert.ok(finished >= 190, `${finished} of 200 came to an end`);
  });

  test(`allow exactly the tokens that can be taken (SEED=${seed})`, () => {
    const random = createPrng(seed);
    for (let count = 0; count < 12; count += 1) {
      const { text } = packConstraint(held(count === 0 ? { type: 'object' } : generateObjectSchema(random)));
      const path: number[] = [];
      for (let step = 0; step < 12; step += 1) {
        const behind = () => {
          const guide = maker.start(text);
          for (const id of path) guide.accept(id);
          return guide;
        };
        const allowed = allowedIds(behind().mask());
        const taken = Array.from({ length: vocabSize }, (_, id) => id).filter((id) => behind().accept(id));
        assert.deepEqual(allowed, taken, `${text} behind ${JSON.stringify(tokenizer.decode(path))}`);
        const next = allowed[Math.floor(random() * allowed.length)]!;
        if (next === eosId) break;
        path.push(next);
      }
    }
  });

  test('are sound where the text can be understood in more ways than are followed', () => {
    const node = { $ref: '#/$defs/a' };
    const schema = {
      $defs: {
        a: {
          anyOf: [
            { type: 'object', properties: { x: node } },
            { type: 'object', properties: { x: node, y: { type: 'null' } } },
            { type: 'array', items: node, maxItems: 2 },
            { type: 'array', items: node, minItems: 1, maxItems: 3 },
          ],
        },
      },
      $ref: '#/$defs/a',
    };
    const { text } = packConstraint(held(schema));
    const guide = maker.start(text);
    for (let depth = 0; depth < 40; depth += 1) {
      for (const id of tokenizer.encode('{"x":[')) assert.ok(guide.accept(id), `at depth ${depth}`);
    }
    for (const id of tokenizer.encode(']}'.repeat(40))) assert.ok(guide.accept(id), `token ${id} is refused`);
    assert.equal(hasBit(guide.mask(), eosId), true, 'the end is not allowed');
  });

  test('of a free object are objects with names told apart from those of the schema', () => {
    const random = createPrng(seed);
    const schema = { type: 'object', properties: { a: { type: 'null' } }, additionalProperties: { type: 'boolean' } };
    const guide = maker.start(packConstraint(held(schema)).text);
    for (const id of tokenizer.encode('{"a')) assert.ok(guide.accept(id), `token ${id} is refused`);
    for (const id of tokenizer.encode('b": true, "a')) assert.ok(guide.accept(id), `token ${id} is refused`);
    // A second "a", now as one of the others, would be a boolean.
    assert.equal(guide.accept(tokenizer.encode('"')[0]!), false);
    for (let count = 0; count < 5; count += 1) {
      const text = walk(held({ type: 'object' }), random, 400);
      if (text !== null) assert.equal(typeof JSON.parse(text), 'object');
    }
  });

  test('reason freely first where the answer does, and cannot end before the mark', () => {
    const guide = maker.start(packConstraint({ ...held({ type: 'boolean' }), thinking: true }).text);
    const thinkEnd = tokenizer.tokenId('</think>')!;
    for (const id of tokenizer.encode('so {')) assert.ok(guide.accept(id), `token ${id} is refused`);
    const allowed = allowedIds(guide.mask());
    assert.ok(allowed.includes(thinkEnd), `${allowed.length} tokens, not the end of thinking`);
    assert.deepEqual(
      [eosId, tokenizer.tokenId('｜DSML｜')!].filter((id) => allowed.includes(id)),
      [],
    );
    assert.ok(allowed.length > 1000, `${allowed.length} tokens`);
    assert.ok(guide.accept(thinkEnd), 'the end of thinking is refused');
    for (const id of tokenizer.encode('true')) assert.ok(guide.accept(id), `token ${id} is refused`);
    assert.deepEqual(allowedIds(guide.mask()), [eosId]);
  });
});

test('a mask that would be too much work has the shorter tokens, and the answer still comes to its end', () => {
  // Sixty patterns that have to be followed side by side, over all words of three letters.
  const letters = Array.from('abcdefghijklmnopqrstuvwxyz');
  const words = letters.flatMap((a) => letters.flatMap((b) => letters.map((c) => `${a}${b}${c}`)));
  const bytes = [
    ...Array.from({ length: 256 }, (_, byte) => Uint8Array.of(byte)),
    ...words.map((word) => utf8.encode(word)),
  ];
  const marks = ['<end>', '</think>'];
  const large = createVocabulary(
    {
      ...tokenizer,
      vocabSize: bytes.length + marks.length,
      eosId: bytes.length,
      tokenId: (text) => (marks.includes(text) ? bytes.length + marks.indexOf(text) : undefined),
      isSpecial: (id) => id >= bytes.length,
      tokenBytes: (id) => bytes[id] ?? utf8.encode(marks[id - bytes.length]!),
    },
    bytes.length + marks.length,
  );
  const guideOf = (count: number) => {
    const anyOf = Array.from({ length: count }, (_, index) => ({
      type: 'string',
      pattern: `^[a-z]*${letters[index % 26]}[a-z]{1,${1 + (index % 5)}}$`,
    }));
    const guide = createGuideMaker(large).start(packConstraint(held({ anyOf })).text);
    assert.ok(guide.accept('"'.charCodeAt(0)), 'the opening quote is refused');
    return guide;
  };
  const few = guideOf(2).mask();
  assert.deepEqual(
    words.filter((_, index) => !hasBit(few, 256 + index)),
    [],
  );
  const guide = guideOf(60);
  for (const letter of 'abcd') {
    const mask = guide.mask();
    for (const each of letters) assert.ok(hasBit(mask, each.charCodeAt(0)), each);
    assert.equal(hasBit(mask, '{'.charCodeAt(0)), false, `a brace before ${letter}`);
    assert.ok(
      words.some((_, index) => !hasBit(mask, 256 + index)),
      `all ${words.length} words are allowed before ${letter}`,
    );
    assert.ok(guide.accept(letter.charCodeAt(0)), `${letter} is refused`);
  }
  assert.ok(guide.accept('"'.charCodeAt(0)), 'the closing quote is refused');
  assert.equal(hasBit(guide.mask(), large.eosId), true, 'the end is not allowed');
});

describe('tool calls drawn from the masks', () => {
  const parameters = {
    type: 'object',
    properties: {
      city: { type: 'string', maxLength: 8 },
      unit: { enum: ['C', 'F', 3] },
      days: { type: 'integer', minimum: 1, maximum: 14 },
      code: { type: ['string', 'null'], pattern: '^[A-Z]{3}$' },
      points: { type: 'array', items: { type: 'boolean' }, maxItems: 2 },
    },
    required: ['city', 'points'],
  };
  const tools = [
    { tool: { name: 'weather', parameters }, path: 'tools[0]' },
    { tool: { name: 'now' }, path: 'tools[1]' },
  ];

  test(`are calls of the tools with arguments of their schemas (SEED=${seed})`, () => {
    const random = createPrng(seed);
    const isValid = new Ajv2020({ strict: false }).compile(parameters);
    const names = new Set<string>();
    for (let count = 0; count < 40; count += 1) {
      const constraint: Constraint = { thinking: false, schema: null, tools, maxCalls: 3 };
      const text = walk(constraint, random);
      assert.ok(text !== null, `walk ${count} is null`);
      const calls: { name: string; arguments: string }[] = [];
      const parser = createChatParser({ thinking: false, tools: true });
      for (const delta of [...parser.push(text), ...parser.end(true)]) {
        if (delta.kind === 'tool_name') calls.push({ name: delta.name, arguments: '' });
        else if (delta.kind === 'tool_arguments') calls[delta.index]!.arguments += delta.text;
        else assert.fail(`${delta.kind} beside the calls: ${text}`);
      }
      assert.ok(calls.length >= 1 && calls.length <= 3, text);
      for (const call of calls) {
        names.add(call.name);
        const given: unknown = JSON.parse(call.arguments);
        if (call.name === 'weather') assert.ok(isValid(given), `${call.arguments}: ${JSON.stringify(isValid.errors)}`);
        else assert.deepEqual([call.name, given], ['now', {}]);
      }
      assert.equal(packConstraint(constraint).read.check({ content: '', toolCalls: calls }), null);
    }
    assert.deepEqual([...names].toSorted(), ['now', 'weather']);
  });

  test('what a tool requires is in its calls, also where its schema is not supported or does not speak of it', () => {
    const of = (more: object): Constraint => ({
      thinking: false,
      schema: null,
      tools: [{ tool: { name: 'f', parameters: { type: 'object', minProperties: 1, ...more } }, path: 'p' }],
      maxCalls: 1,
    });
    const d = { const: 1 };
    const free = of({ properties: { d }, required: ['d', 'zz'] });
    const { read } = packConstraint(free);
    assert.equal(read.check({ content: '', toolCalls: [{ name: 'f', arguments: '{"d":1,"zz":[]}' }] }), null);
    assert.match(read.check({ content: '', toolCalls: [{ name: 'f', arguments: '{"d":1}' }] }) ?? '', /lacks "zz"/);
    const shaped = of({ properties: { d }, required: ['d', 'zz'], additionalProperties: { type: 'boolean' } });
    const call = /name="d" string="false">1<.*\n.*name="zz" string="false">(true|false)</;
    assert.match(walk(shaped, createPrng(seed)) ?? '', call);
    const odd = of({ required: ['zz'], additionalProperties: { type: 'number', multipleOf: 2 } });
    assert.equal(
      packConstraint(odd).read.check({ content: '', toolCalls: [{ name: 'f', arguments: '{"zz":2}' }] }),
      null,
    );
    const none = of({ properties: { d }, required: ['d', 'zz'], additionalProperties: false });
    assert.deepEqual(refusalOf(none), { code: 'invalid_schema', param: 'p.properties.zz' });
  });

  test('a parameter without a value that a call can spell is left out, or refused by name if it is required', () => {
    const of = (properties: object, required: string[]): Constraint => ({
      thinking: false,
      schema: null,
      tools: [{ tool: { name: 'f', parameters: { type: 'object', properties, required }, strict: true }, path: 'p' }],
      maxCalls: 1,
    });
    const b = { type: 'boolean' };
    for (const a of [
      { enum: ['a｜b', '\ud800'] },
      { const: '｜' },
      { type: 'string', pattern: '^｜x$' },
      { anyOf: [{ const: '｜' }, false] },
    ]) {
      assert.deepEqual(refusalOf(of({ b, a }, ['b', 'a'])), { code: 'invalid_schema', param: 'p.properties.a' });
      const text = walk(of({ b, a }, ['b']), createPrng(seed));
      assert.match(text ?? '', /name="b" string="false">(true|false)</);
      assert.doesNotMatch(text ?? '', /name="a"/);
      assert.doesNotMatch(walk(of({ a }, []), createPrng(seed)) ?? 'name="a"', /name="a"/);
      // Others of its values can be spelled; so can these within JSON.
      assert.match(walk(of({ a: { anyOf: [a, b] } }, ['a']), createPrng(seed)) ?? '', />(true|false)</);
      assert.match(walk(of({ a: { type: 'array', items: a, minItems: 1 } }, ['a']), createPrng(seed)) ?? '', />\[\s*"/);
    }
    assert.equal(refusalOf(of({ a: { type: 'array', items: false, minItems: 1 } }, ['a'])).param, 'p.properties.a');
    assert.equal(refusalOf(of({ 'a"': b }, ['a"'])).param, 'p.properties["a\\""]');
  });

  test('a parameter that cannot be followed is free unless the tool is strict', () => {
    const odd = { type: 'object', properties: { n: { type: 'integer', multipleOf: 2 } }, required: ['n'] };
    const of = (strict: boolean): Constraint => ({
      thinking: false,
      schema: null,
      tools: [{ tool: { name: 'f', parameters: odd, strict }, path: 'tools[0].function.parameters' }],
      maxCalls: 1,
    });
    const callOf = (parameter: string): string =>
      `\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="n" string=${parameter}` +
      '</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>';
    for (const parameter of ['"false">3', '"false">[{"any": null}]', '"true">any text']) {
      const guide = maker.start(packConstraint(of(false)).text);
      for (const id of [...tokenizer.encode(callOf(parameter)), eosId]) {
        assert.ok(guide.accept(id), `${parameter}: ${JSON.stringify(tokenizer.decode([id]))} is refused`);
      }
    }
    assert.deepEqual(refusalOf(of(true)), {
      code: 'invalid_schema',
      param: 'tools[0].function.parameters.properties.n.multipleOf',
    });
  });
});

describe('definitions that many parameters of a tool refer to', () => {
  const toolWith = (count: number, of: (index: number) => unknown, $defs: object): Constraint => {
    const properties = Object.fromEntries(Array.from({ length: count }, (_, index) => [`p${index}`, of(index)]));
    const tool = { name: 'f', parameters: { type: 'object', properties, $defs }, strict: true };
    return { thinking: false, schema: null, tools: [{ tool, path: 'tools[0]' }], maxCalls: 1 };
  };

  test('are compiled once', () => {
    const values = [...Array.from({ length: 500 }, (_, index) => `value ${index}`), 1, 2];
    const $defs = { list: { enum: values }, word: { type: 'string', pattern: '^[a-z]+$' } };
    const of = (index: number) =>
      index % 2 === 0 ? { $ref: '#/$defs/list' } : { anyOf: [{ $ref: '#/$defs/list' }, { $ref: '#/$defs/word' }] };
    const automataOf = (count: number): number => {
      const { instructions } = compile(packConstraint(toolWith(count, of, $defs)).read.answer);
      return new Set(instructions.flatMap((each) => (each.op === 'text' ? [each.automaton] : []))).size;
    };
    // Each has its own name, which is an automaton of its own.
    assert.equal(automataOf(60) - automataOf(10), 50);
    assert.match(walk(toolWith(4, of, $defs), createPrng(seed)) ?? '', /invoke name="f"/);
  });

  test('are refused where their alternatives are too many together', () => {
    const $defs = { many: { anyOf: Array.from({ length: 800 }, () => ({ type: 'null' })) } };
    const constraint = toolWith(1900, () => ({ anyOf: [{ $ref: '#/$defs/many' }] }), $defs);
    const { code, param } = refusalOf(constraint);
    assert.equal(code, 'schema_too_complex');
    assert.match(param ?? '', /^tools\[0\]\.properties\.p\d+$/);
  });
});

test(`integers within bounds are those, to the last digit (SEED=${seed})`, () => {
  const random = createPrng(seed);
  for (let count = 0; count < 60; count += 1) {
    const low = Math.floor(random() * 2400) - 1200;
    const high = low + Math.floor(random() * 1300);
    const automaton = integerAutomaton(low, high);
    for (let value = -1300; value <= 1300; value += 1) {
      assert.equal(accepts(automaton, String(value)), value >= low && value <= high, `${value} in ${low}..${high}`);
    }
    for (const odd of ['', '-', '-0', '00', '01', '+1', '1.0']) assert.equal(accepts(automaton, odd), false, odd);
  }
  const large = integerAutomaton(-Infinity, 987_654_321_098_765);
  for (const text of ['987654321098765', '-999999999999999', '0', '7']) assert.ok(accepts(large, text), text);
  for (const text of ['987654321098766', '-1000000000000000', '999999999999999'])
    assert.ok(!accepts(large, text), text);
});

test('integers that may go on alike share their states', () => {
  const automaton = integerAutomaton(-2000, 3500);
  const behind = (text: string): number => utf8.encode(text).reduce((state, byte) => automaton.step(state, byte), 0);
  assert.equal(behind('12'), behind('29'));
  assert.equal(behind('-12'), behind('12'));
  assert.notEqual(behind('35'), behind('29'));
  assert.equal(behind('36'), behind('99'));
});

test('thousands of integers with bounds of their own are compiled soon', () => {
  const integer = (index: number) => ({
    type: 'integer',
    minimum: index - 123_456_789_012_345,
    maximum: 987_654_321_098_765 - index,
  });
  const properties = Object.fromEntries(Array.from({ length: 2400 }, (_, index) => [`p${index}`, integer(index)]));
  const { text } = packConstraint(held({ type: 'object', properties }));
  const startMs = performance.now();
  maker.start(text).mask();
  // It takes some 50 ms. As automata with all their states they took a hundred seconds.
  assert.ok(performance.now() - startMs < 5000, `${performance.now() - startMs} ms`);
});

test(`patterns match what JavaScript's regular expressions do (SEED=${seed})`, () => {
  const random = createPrng(seed);
  const patterns = [
    'a',
    '^a',
    'a$',
    '^a|b$',
    '^(?:ab|c)*$',
    '^[^a]{2,3}$',
    '\\d+',
    '^\\w\\s?\\W$',
    '^.$',
    'b{2}',
    '(a|b)+c?$',
  ];
  patterns.push('^$', '^[\\d-]+$', '^[a-c\\]]+$', '^\\u0061\\x62$', '^(?<n>a)?b*?$', '^a{0}b$', '\\.', '^世+$');
  const alphabet = ['a', 'b', 'c', '1', ' ', '-', '.', '"', '\\', ']', '\n', 'é', '世', '🧀', '\u0001'];
  for (const source of patterns) {
    const automaton = patternAutomaton(readPattern(source), 'json');
    const expected = new RegExp(source, 'u');
    for (let count = 0; count < 300; count += 1) {
      const length = Math.floor(random() * 5);
      const text = Array.from({ length }, () => alphabet[Math.floor(random() * alphabet.length)]!).join('');
      const spelled = JSON.stringify(text).slice(1, -1);
      assert.equal(accepts(automaton, spelled), expected.test(text), `${source} on ${spelled}`);
    }
  }
});

test('what is not supported is refused by the name and the path of its keyword', () => {
  const inside = (schema: unknown) => ({ type: 'object', properties: { a: { type: 'array', items: schema } } });
  const cases: [schema: unknown, param: string][] = [
    [inside({ type: 'integer', multipleOf: 2 }), 'schema.properties.a.items.multipleOf'],
    [inside({ type: 'array', uniqueItems: true }), 'schema.properties.a.items.uniqueItems'],
    [inside({ not: {} }), 'schema.properties.a.items.not'],
    [{ allOf: [{}] }, 'schema.allOf'],
    [{ if: {} }, 'schema.if'],
    [{ type: 'object', patternProperties: {} }, 'schema.patternProperties'],
    [{ type: 'object', minProperties: 1 }, 'schema.minProperties'],
    [{ type: 'string', format: 'email' }, 'schema.format'],
    [{ type: 'number', minimum: 0 }, 'schema.minimum'],
    [{ type: 'boolean', minLength: 1 }, 'schema.minLength'],
    [{ enum: [1], minimum: 0 }, 'schema.enum'],
    [{ anyOf: [{}], properties: {} }, 'schema.anyOf'],
    [{ anyOf: [] }, 'schema.anyOf'],
    [{ enum: [] }, 'schema.enum'],
    // JSON.parse has made other numbers of what was written.
    [JSON.parse('{"const": 9007199254740993}'), 'schema.const'],
    [JSON.parse('{"type": "integer", "enum": [1, -12345678901234567]}'), 'schema.enum[1]'],
    [JSON.parse('{"const": {"a": 123456789012345678901234567890}}'), 'schema.const.a'],
    [{ const: Infinity }, 'schema.const'],
    [inside({ enum: [1, { a: [-Infinity] }] }), 'schema.properties.a.items.enum[1].a[0]'],
    [{ type: 'strnig' }, 'schema.type'],
    [{ type: [] }, 'schema.type'],
    [{ type: 'string', minLength: -1 }, 'schema.minLength'],
    [{ type: 'string', minLength: 3, maxLength: 2 }, 'schema.minLength'],
    [{ type: 'integer', minimum: 5, maximum: 4 }, 'schema'],
    [{ type: 'array', items: [{}] }, 'schema.items'],
    [{ properties: { 'a b': 5 } }, 'schema.properties["a b"]'],
    [{ required: [1] }, 'schema.required'],
    [{ $ref: 'https://example.com/x' }, 'schema.$ref'],
    [{ $ref: '#/$defs/none', $defs: {} }, 'schema.$ref'],
    [{ $ref: '#/$defs/__proto__' }, 'schema.$ref'],
    [{ type: 'string', pattern: '(?=a)' }, 'schema.pattern'],
    [{ type: 'string', pattern: '(a)\\1' }, 'schema.pattern'],
    [{ type: 'string', pattern: '\\bword' }, 'schema.pattern'],
    [{ type: 'string', pattern: '(' }, 'schema.pattern'],
    [{ type: 'string', pattern: 'a^b' }, 'schema.pattern'],
    [{ type: 'string', pattern: '^abc$', maxLength: 2 }, 'schema.pattern'],
    [false, 'schema'],
    // No value is of finite size.
    [{ $ref: '#' }, 'schema'],
    [{ $ref: '#/$defs/a', $defs: { a: { $ref: '#/$defs/b' }, b: { anyOf: [{ $ref: '#/$defs/a' }] } } }, 'schema'],
    [{ type: 'object', properties: { x: { $ref: '#' } }, required: ['x'] }, 'schema'],
    [{ type: 'object', required: ['x'], additionalProperties: false }, 'schema'],
  ];
  for (const [schema, param] of cases) {
    assert.deepEqual(refusalOf(held(schema)), { code: 'invalid_schema', param }, JSON.stringify(schema));
  }
});

test('schemas made to do harm are refused soon, each within the limits that are written down', () => {
  const nest = (depth: number, around: (inner: unknown) => unknown): unknown => {
    let schema: unknown = { type: 'null' };
    for (let level = 0; level < depth; level += 1) schema = around(schema);
    return schema;
  };
  const many = (count: number, of: (index: number) => unknown) =>
    Object.fromEntries(Array.from({ length: count }, (_, index) => [`p${index}`, of(index)]));
  const cases: Record<string, unknown> = {
    'oneOf nested 40 deep': nest(40, (inner) => ({ oneOf: [inner, { type: 'string' }] })),
    'arrays nested 100,000 deep': nest(100_000, (items) => ({ type: 'array', items })),
    '100,000 properties': { type: 'object', properties: many(100_000, () => true) },
    'an enum of 100,000': { enum: Array.from({ length: 100_000 }, (_, index) => index) },
    'an enum of 1,001': { enum: Array.from({ length: 1001 }, (_, index) => index) },
    'a long text': { description: 'x'.repeat(10_000_000) },
    'a long pattern': { type: 'string', pattern: 'a'.repeat(1025) },
    'many patterns': { properties: many(65, (index) => ({ type: 'string', pattern: `^${index}$` })) },
    'exponentially many states': { type: 'string', pattern: '(a|b)*a(a|b){24}' },
    'repetitions of repetitions': { type: 'string', pattern: '((a{0,1000}){0,1000}){0,1000}' },
    'gaps between gaps': { type: 'string', pattern: '(.*a){30}' },
    'a length that is too large for a pattern': { type: 'string', pattern: 'a', minLength: 1e9 },
    'many patterns of many states': {
      properties: many(60, (index) => ({ type: 'string', pattern: `(x|y)*x(x|y){9}${index}` })),
    },
  };
  for (const [name, schema] of Object.entries(cases)) {
    const startMs = performance.now();
    assert.equal(refusalOf(held(schema)).code, 'schema_too_complex', name);
    // The bound of the surface. It takes some 50 ms; machines that run tests are slow at times.
    assert.ok(performance.now() - startMs < 5000, name);
  }
  // The nested quantifiers that other engines fall over are no trouble to an automaton.
  assert.equal(walk(held({ type: 'string', pattern: '^(a+)+$' }), createPrng(seed), 50)?.replace(/a+/, 'a'), '"a"');
});

test('a finished answer is checked by itself, also for what no mask can see', () => {
  const cases: [schema: unknown, content: string, fault: RegExp | null][] = [
    [{ type: 'integer' }, '5', null],
    [{ type: 'integer' }, '"5"', /no integer/],
    [{ type: 'integer' }, '5x', /not JSON/],
    [{ oneOf: [{ type: 'integer' }, { type: 'number' }] }, '5', /more than one schema of oneOf at \$/],
    [{ oneOf: [{ type: 'integer' }, { type: 'number' }] }, '5.5', null],
    [{ type: 'object', properties: { a: { type: 'string', maxLength: 1 } } }, '{"a": "🧀"}', null],
    [{ type: 'object', properties: { a: { type: 'string', maxLength: 1 } } }, '{"a": "no"}', /length .* at \$\.a/],
    [{ type: 'object', properties: { a: {} }, required: ['a'] }, '{}', /lacks "a"/],
    [{ type: 'object', properties: { a: {} }, additionalProperties: false }, '{"b": 1}', /"b" at \$, which/],
    [{ type: 'array', items: { enum: [1, { a: [2] }] } }, '[1, {"a": [2]}, {"a": [3]}]', /list at \$\[2\]/],
    [{ type: 'string', pattern: '^\\d+$' }, '"12a"', /pattern/],
    [{ const: 9007199254740991 }, '9007199254740991', null],
  ];
  for (const [schema, content, fault] of cases) {
    const found = packConstraint(held(schema)).read.check({ content, toolCalls: [] });
    if (fault === null) assert.equal(found, null, content);
    else assert.match(found ?? '', fault, content);
  }
});

test('references are followed to the end, or refused where what they refer to is nested too deep', () => {
  const chain = (length: number, link: (next: object) => object, end: object) =>
    held({
      $ref: '#/$defs/d0',
      $defs: Object.fromEntries(
        Array.from({ length: length + 1 }, (_, index) => [
          `d${index}`,
          index === length ? end : link({ $ref: `#/$defs/d${index + 1}` }),
        ]),
      ),
    });
  const bare = chain(2000, (next) => next, { type: 'boolean' });
  const lists = (length: number) =>
    chain(length, (items) => ({ anyOf: [{ type: 'array', minItems: 1, maxItems: 1, items }] }), { type: 'null' });
  for (const [constraint, content] of [
    [bare, 'true'],
    [lists(90), `${'['.repeat(90)}null${']'.repeat(90)}`],
    [lists(128), `${'['.repeat(128)}null${']'.repeat(128)}`],
  ] as const) {
    assert.equal(packConstraint(constraint).read.check({ content, toolCalls: [] }), null, content);
  }
  assert.match(walk(bare, createPrng(seed)) ?? '', /^(true|false)$/);
  const refused = { code: 'schema_too_complex', param: 'schema' };
  assert.deepEqual(refusalOf(lists(129)), refused);
  assert.deepEqual(refusalOf(lists(900)), refused);
  // The short way to the end is not the only one.
  const shortcut = { ...(lists(129).schema!.value as object), $ref: undefined };
  const both = { ...shortcut, prefixItems: [{ $ref: '#/$defs/d60' }, { $ref: '#/$defs/d0' }] };
  assert.deepEqual(refusalOf(held(both)), refused);
  // What contains itself has no depth of its own, and a ring of references no value.
  const tree = { $defs: { t: { type: 'array', items: { $ref: '#/$defs/t' } } }, $ref: '#/$defs/t' };
  assert.equal(packConstraint(held(tree)).read.check({ content: '[[],[[]]]', toolCalls: [] }), null);
  const ring = { $defs: { a: { $ref: '#/$defs/b' }, b: { $ref: '#/$defs/a' } } };
  const besideRing = held({ ...ring, anyOf: [{ $ref: '#/$defs/a' }, { type: 'boolean' }] });
  assert.equal(packConstraint(besideRing).read.check({ content: 'true', toolCalls: [] }), null);
});

describe('steering', () => {
  const { text: constraint } = packConstraint(held({ type: 'boolean' }));
  const first = (tokens: string) => tokenizer.encode(tokens)[0]!;

  test('follows an answer from its first token, which another worker has sampled', () => {
    const steering = createSteering(maker, vocabulary.maskWords, (key, fault) =>
      assert.fail(`${key}: ${String(fault)}`),
    );
    const [start, ...rest] = tokenizer.encode('true');
    const other = { key: 'b', sampling: {}, token: 5 };
    const masks = steering.masks([{ key: 'a', sampling: { constraint }, token: start! }, other]);
    assert.deepEqual([...masks.keys()], ['a']);
    for (const id of rest) {
      assert.ok(
        hasBit(steering.masks([{ key: 'a', sampling: { constraint }, token: start! }]).get('a')!, id),
        `token ${id} is not allowed`,
      );
      steering.took('a', id);
    }
    const last = steering.masks([{ key: 'a', sampling: { constraint }, token: rest.at(-1) ?? start! }]).get('a')!;
    assert.deepEqual(allowedIds(last), [eosId]);
    assert.equal(steering.size, 1);
    steering.keep(new Set(['a']));
    assert.equal(steering.size, 1);
    steering.keep(new Set());
    assert.equal(steering.size, 0);
  });

  test('of a decode worker keeps nothing of a room that is over, though nobody was told its end', () => {
    const steering = createSteering(maker, vocabulary.maskWords, () => assert.fail());
    const sizes = {
      config: { pageTokens: 4 },
      pageBytes: 8,
      slotBytes: 8,
      pageCount: 4,
      slotCount: 1,
      contextTokens: 16,
    };
    const limits = { maxRunningRequests: 1, maxQueuedRequests: 1, headroomTokens: 1, hostBytes: 0 };
    const config = { limits, deadlines: { leaseMs: 1, stallMs: 1, roomMs: 1 }, speculative: false };
    const parts = { config, engine: sizes, modelDigest: '', steering } as unknown as CoreParts;
    const core = decodeCore(parts, { name: 'd0', epoch: '0'.repeat(20) });
    steering.masks([{ key: 'a', sampling: { constraint }, token: first('true') }]);
    assert.equal(steering.size, 1);
    assert.deepEqual(core.step({ type: 'tick', nowMs: 0 }), []);
    assert.equal(steering.size, 0);
  });

  test('keeps nothing of an answer of which only the first token is sampled here', () => {
    const steering = createSteering(maker, vocabulary.maskWords, () => assert.fail());
    const mask = steering.masks([{ key: 'a', sampling: { constraint }, token: null }]).get('a')!;
    assert.deepEqual([hasBit(mask, first('true')), hasBit(mask, first('x'))], [true, false]);
    assert.equal(steering.size, 0);
  });

  test('leaves an answer no token when its constraint cannot be followed, and says so', () => {
    const faults: string[] = [];
    const steering = createSteering(maker, vocabulary.maskWords, (key) => faults.push(key));
    const rows = [
      { key: 'no JSON', sampling: { constraint: '{' }, token: null },
      { key: 'not ours', sampling: { constraint: '{"schema":{"value":5,"path":"x"},"tools":[]}' }, token: null },
      { key: 'other token', sampling: { constraint }, token: first('x') },
      { key: 'good', sampling: { constraint }, token: first('true') },
    ];
    const masks = steering.masks(rows);
    assert.deepEqual(faults, ['no JSON', 'not ours', 'other token']);
    for (const key of faults) assert.deepEqual(allowedIds(masks.get(key)!), [], key);
    assert.notDeepEqual(allowedIds(masks.get('good')!), []);
    steering.took('good', first('x'));
    assert.deepEqual(allowedIds(steering.masks(rows).get('good')!), []);
  });
});
