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
