/**
 * Answers held to schemas and tools by the real server with nano at temperature 1, streams side by side; and schemas made
 * to do harm, refused while others stream. SCHEMAS sets the number of generated schemas, SEED what they are.
 */
import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import { Ajv2020 } from 'ajv/dist/2020.js';
import { startCluster, type Cluster } from '../support/cluster.ts';
import { createPrng } from '../support/prng.ts';
import { generateObjectSchema } from '../support/schemas.ts';

const schemaCount = Number(process.env['SCHEMAS'] ?? 60);
const seed = Number(process.env['SEED'] ?? 20_261_130);
/** Streams at once: as many as the server runs by itself. */
const streamCount = 16;

let cluster: Cluster;
before(async () => {
  cluster = await startCluster(['--speculative', 'on']);
});
after(async () => {
  await cluster?.stop();
});

interface Completion {
  choices: {
    finish_reason: string;
    message: { content: string | null; tool_calls?: { function: { name: string; arguments: string } }[] };
  }[];
}

async function ask(
  body: object,
): Promise<{ status: number; body: Completion & { error?: { code: string; param: string } } }> {
  const response = await fetch(`${cluster.url}/v1/chat/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ temperature: 1, ...body }),
  });
  return { status: response.status, body: (await response.json()) as Completion };
}

const user = (content: string) => [{ role: 'user', content }];
const off = { chat_template_kwargs: { thinking: false } };

test(`answers to ${schemaCount} generated schemas are what they ask for (SEED=${seed})`, async (t) => {
  const random = createPrng(seed);
  const schemas = Array.from({ length: schemaCount }, () => generateObjectSchema(random));
  const ends = { stop: 0, length: 0 };
  const next = schemas.entries();
  async function work(): Promise<void> {
    for (const [index, schema] of next) {
      const response_format = { type: 'json_schema', json_schema: { name: 'thing', schema, strict: index % 2 === 0 } };
      const messages = user(`Thing number ${index}, please.`);
      const { status, body } = await ask({ messages, response_format, max_tokens: 300, seed: index, ...off });
      const about = `schema ${index}: ${JSON.stringify(schema)} got ${JSON.stringify(body)}`;
      assert.equal(status, 200, about);
      const { finish_reason: end, message } = body.choices[0]!;
      assert.ok(end === 'stop' || end === 'length', about);
      ends[end] += 1;
      if (end !== 'stop') {
        t.diagnostic(about);
        continue;
      }
      // An independent validator, one for each schema: it keeps all that it has compiled.
      const isValid = new Ajv2020({ strict: false }).compile(schema);
      assert.ok(isValid(JSON.parse(message.content ?? '')), `${about}: ${JSON.stringify(isValid.errors)}`);
    }
  }
  await Promise.all(Array.from({ length: streamCount }, work));
  t.diagnostic(JSON.stringify(ends));
  assert.ok(ends.stop >= 0.95 * schemaCount, `${ends.stop} of ${schemaCount} ended with stop`);
});

test('a tool that must be called is called, with arguments of its schema', async () => {
  const parameters = {
    type: 'object',
    properties: { city: { type: 'string', maxLength: 12 }, days: { type: 'integer', minimum: 1, maximum: 9 } },
    required: ['city', 'days'],
  };
  const tools = ['forecast', 'history'].map((name) => ({ type: 'function', function: { name, parameters } }));
  const isValid = new Ajv2020({ strict: false }).compile(parameters);
  const choices = ['required', { type: 'function', function: { name: 'history' } }];
  for (const tool_choice of choices) {
    // With reasoning too, which is free until its end.
    for (const thinking of [false, true]) {
      const fields = { tools, tool_choice, parallel_tool_calls: false, chat_template_kwargs: { thinking } };
      const { status, body } = await ask({ messages: user('How warm is Lima?'), seed: 5, max_tokens: 400, ...fields });
      assert.equal(status, 200, JSON.stringify(body));
      const { finish_reason: end, message } = body.choices[0]!;
      if (thinking && end === 'length') continue; // it may think for as long as it likes
      assert.equal(end, 'tool_calls', JSON.stringify(body));
      const called = message.tool_calls!.map((call) => call.function);
      assert.equal(called.length, 1);
      if (tool_choice !== 'required') assert.equal(called[0]!.name, 'history');
      assert.ok(isValid(JSON.parse(called[0]!.arguments)), JSON.stringify(called));
    }
  }
});

test('schemas made to do harm are refused while others stream on, and those that are only hard cost nobody a token', async () => {
  const streamed = ask({ messages: user('Say anything.'), max_tokens: 200, ignore_eos: true, seed: 1, ...off });
  const self = { $ref: '#/$defs/a' };
  const deep = Array.from({ length: 40 }).reduce((inner: object) => ({ oneOf: [inner, { type: 'string' }] }), {});
  const many = (count: number) =>
    Object.fromEntries(Array.from({ length: count }, (_, index) => [`p${index}`, { type: 'string' }]));
  const hostile = [
    deep,
    { type: 'object', properties: many(100_000) },
    { enum: Array.from({ length: 100_000 }, (_, index) => index) },
    { $defs: { a: { anyOf: [self, { type: 'array', items: self, minItems: 1 }] } }, ...self },
    { type: 'string', pattern: '(a|b)*a(a|b){24}' },
    { type: 'string', pattern: '((a{0,999}){0,999}){0,999}' },
    { type: 'string', pattern: '^(?=(a+)+$)' },
  ];
  const hard = [
    { type: 'object', properties: many(4000) },
    {
      $defs: {
        a: {
          anyOf: [
            { type: 'object', properties: { x: self } },
            { type: 'object', properties: { x: self, y: { type: 'null' } } },
            { type: 'array', items: self },
            { type: 'array', items: self, minItems: 1 },
          ],
        },
      },
      ...self,
    },
  ];
  const of = (schema: object) => ({ type: 'json_schema', json_schema: { name: 'x', schema } });
  const hardOnes = hard.map((schema) =>
    ask({ messages: user('Go.'), response_format: of(schema), max_tokens: 40, ...off }),
  );
  for (const schema of hostile) {
    const startMs = performance.now();
    const { status, body } = await ask({ messages: user('Go.'), response_format: of(schema), ...off });
    assert.equal(status, 400);
    assert.ok(performance.now() - startMs < 5000, JSON.stringify(body));
    assert.match(body.error!.code, /^(invalid_json|invalid_schema|schema_too_complex)$/);
  }
  for (const { status, body } of await Promise.all(hardOnes)) assert.equal(status, 200, JSON.stringify(body));
  const { status, body } = await streamed;
  assert.deepEqual([status, body.choices[0]!.finish_reason], [200, 'length']);
  const metrics = await (await fetch(`${cluster.url}/metrics`)).text();
  assert.match(metrics, /^handoff_constrained_answers_total\{[^}]*outcome="violated"[^}]*\} 0$/m);
  assert.match(metrics, /^handoff_constrained_answers_total\{[^}]*outcome="met"[^}]*\} [1-9]/m);
});
