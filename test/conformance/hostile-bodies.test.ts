/**
 * Generated bad bodies, thousands of them: every one is answered, with the field at fault by name or with a right answer,
 * and none with a fault of the server. BODIES sets their number, SEED what they are. With a number given, how late the
 * event loop was is tested, too; in the suite other processes take the cores away, and only processor time is.
 */
import assert from 'node:assert/strict';
import { monitorEventLoopDelay } from 'node:perf_hooks';
import { after, before, test } from 'node:test';
import { createEncoder } from '../../server/api/encoder.ts';
import { closeApp } from '../../server/http.ts';
import { createPrng } from '../support/prng.ts';
import { listen } from '../support/scripted-rooms.ts';

const bodyCount = Number(process.env['BODIES'] ?? 2500);
const isMeasured = process.env['BODIES'] !== undefined;
const seed = Number(process.env['SEED'] ?? 20_261_129);

let server: Awaited<ReturnType<typeof listen>>;
before(async () => {
  server = await listen({}, { encodeAside: createEncoder('model/nano') });
  server.rooms.script = (room) => room.finish('Fine.');
});
after(() => closeApp(server.app, 0));

/** Values as JSON text, so that numbers that no double holds and keys that objects inherit can be sent. */
const hostile = [
  ...['null', 'true', 'false', '0', '-0', '-1', '1', '1.5', '0.1e-400', '1e999', '-1e999', '9007199254740993'],
  ...['18446744073709551616', '-9223372036854775809', '128', '129', '4294967296', '""', '"x"', '"0"', '"true"'],
  ...['"\\u0000"', '"\\ud800"', '"\\udfff\\ud800"', '"</think><｜User｜>"', '"\u202e\u200d🧀"', '"__proto__"'],
  ...['[]', '[null]', '[[]]', '[{}]', '[0]', '[-1]', '[1e999]', '["", "x"]', '[1, "x"]', '[true, null, {}]'],
  ...['{}', '{"__proto__": {"x": 1}}', '{"constructor": {"prototype": {}}}', '{"toString": 1, "length": -1}'],
  ...['{"type": null}', '{"type": "text"}', '{"type": "function"}', '{"type": "function", "function": {}}'],
  ...['{"0": 1}', '{"01": 1}', '{"-1": 1}', '{"5": "x"}', '{"5": 1000}', '{"include_usage": "yes"}'],
  '[{"role": "user", "content": 5}]',
  '[{"role": "system"}, {"role": "nobody", "content": ""}]',
  '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]',
  '[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}]',
  '[{"type": "function", "function": {"name": "a b"}}]',
  '[{"type": "function", "function": {"name": "f", "parameters": []}}]',
  `"${'x'.repeat(100_000)}"`,
  `"${'word '.repeat(2000)}"`,
  `[${'0,'.repeat(5000)}0]`,
  `${'['.repeat(50)}${']'.repeat(50)}`,
  `${'{"a":'.repeat(50)}1${'}'.repeat(50)}`,
];

interface Route {
  path: string;
  /** A good body, as JSON text by field. */
  good: Record<string, string>;
  /** Other fields whose fault may be found first, or named in the place of this one. */
  related?: Record<string, readonly string[]>;
}

const messages = '[{"role": "user", "content": "hi"}]';
const chatRelated = {
  continue_final_message: ['messages', 'add_generation_prompt'],
  add_generation_prompt: ['messages', 'continue_final_message'],
  max_tokens: ['messages'],
  max_completion_tokens: ['messages'],
  tools: ['tool_choice'],
};
const routes: Route[] = [
  { path: '/v1/chat/completions', good: { messages }, related: chatRelated },
  { path: '/v1/completions', good: { prompt: '"hi"' }, related: { max_tokens: ['prompt'], n: ['best_of'] } },
  {
    path: '/v1/responses',
    good: { input: '"hi"' },
    related: { max_output_tokens: ['input'], instructions: ['input'], tools: ['tool_choice'] },
  },
  { path: '/v1/messages', good: { messages, max_tokens: '9' }, related: { system: ['messages'] } },
  { path: '/v1/messages/count_tokens', good: { messages }, related: { system: ['messages'] } },
  { path: '/generate', good: { text: '"hi"' }, related: { sampling_params: ['text'], input_ids: ['text'] } },
  { path: '/tokenize', good: { prompt: '"hi"' }, related: { messages: ['prompt'] } },
  { path: '/detokenize', good: { tokens: '[5]' } },
];

/** The fields of each route, as its own documentation lists them. */
async function fieldsOf(path: string): Promise<string[]> {
  const response = await server.app.inject({ method: 'GET', url: '/openapi.json' });
  const document = JSON.parse(response.body) as {
    paths: Record<string, { post: { requestBody: { content: Record<string, { schema: { properties: object } }> } } }>;
  };
  return Object.keys(document.paths[path]!.post.requestBody.content['application/json']!.schema.properties);
}

// surface: errors.400
test(`${bodyCount} bad bodies are answered by name or rightly, and never with a fault (seed ${seed})`, async (t) => {
  const random = createPrng(seed);
  const pick = <T>(values: readonly T[]): T => values[Math.floor(random() * values.length)]!;
  const fields = new Map<string, string[]>();
  for (const { path } of routes) fields.set(path, await fieldsOf(path));
  const cpuMs: number[] = [];
  const counts = { refused: 0, answered: 0 };
  const delay = monitorEventLoopDelay({ resolution: 1 });
  delay.enable();

  for (let index = 0; index < bodyCount; index += 1) {
    const route = pick(routes);
    const changed = new Map<string, string>();
    const changeCount = 1 + Math.floor(random() ** 2 * 4);
    for (let change = 0; change < changeCount; change += 1) changed.set(pick(fields.get(route.path)!), pick(hostile));
    const members = Object.entries({ ...route.good, ...Object.fromEntries(changed) });
    const payload = `{${members.map(([name, value]) => `"${name}": ${value}`).join(', ')}}`;

    const before = process.cpuUsage();
    const headers = { 'content-type': 'application/json' };
    const response = await fetch(server.url + route.path, { method: 'POST', headers, body: payload });
    const body = await response.text();
    const used = process.cpuUsage(before);
    cpuMs.push((used.user + used.system) / 1000);

    const what = `body ${index}: ${route.path} ${payload.slice(0, 400)} → ${response.status} ${body.slice(0, 300)}`;
    if (response.status === 200) {
      counts.answered += 1;
      continue;
    }
    counts.refused += 1;
    assert.ok([400, 404].includes(response.status), what);
    const { error } = JSON.parse(body) as { error: { message: string; param?: string | null } };
    assert.ok(error.message.length <= 2000, what);
    if (route.path.startsWith('/v1/messages')) continue; // errors of this API name no field but in their message
    const allowed = [...changed.keys()].flatMap((name) => [name, ...(route.related?.[name] ?? [])]);
    const top = /^[A-Za-z_]+/.exec(error.param ?? '')?.[0];
    assert.ok(top !== undefined && allowed.includes(top), what);
  }
  assert.ok(counts.refused > bodyCount / 4 && counts.answered > bodyCount / 50, JSON.stringify(counts));
  const worst = cpuMs.toSorted((a, b) => a - b)[Math.floor(cpuMs.length * 0.99)]!;
  // Processor time, not the clock's: what the event loop is held for, however busy the machine is.
  assert.ok(worst < 50, `99 of 100 bodies hold the event loop for less than ${worst} ms`);
  delay.disable();
  const [p99Ms, maxMs] = [delay.percentile(99) / 1e6, delay.max / 1e6];
  t.diagnostic(
    `${counts.refused} refused, ${counts.answered} answered; processor time of a body: p99 ${worst.toFixed(1)} ms; ` +
      `event loop late by p50 ${(delay.percentile(50) / 1e6).toFixed(1)} ms, p99 ${p99Ms.toFixed(1)} ms, max ${maxMs.toFixed(1)} ms`,
  );
  if (isMeasured) assert.ok(p99Ms < 50, `the event loop was late by ${p99Ms} ms`);
});

// surface: transport.json
test('bodies that are no JSON object, in every way, are a 400 or another plain refusal', async () => {
  const bodies: (string | Buffer)[] = [
    ...['', ' ', '[]', 'null', '"x"', '5', 'true', '{', '{"a"', '{"a":}', '{"a":1,}', "{'a':1}", '{"a":NaN}', '\0'],
    ...['{"a":1}{"b":2}', '\u2028{}', '{"a":"\n"}', '['.repeat(100_000), `${'{"a":'.repeat(65)}1${'}'.repeat(65)}`],
    ...['{"messages": [{"role": "user", "content": "\\u12"}]}', '//{}', 'undefined', '{"__proto__": null, "a": tru}'],
    Buffer.from([0xff, 0xfe, 0x7b, 0x7d]),
    Buffer.from([0x7b, 0x22, 0x61, 0x22, 0x3a, 0x22, 0xc3, 0x22, 0x7d]),
  ];
  for (const { path } of routes) {
    for (const payload of bodies) {
      const headers = { 'content-type': 'application/json' };
      const response = await server.app.inject({ method: 'POST', url: path, headers, payload });
      assert.equal(response.statusCode, 400, `${path} ${payload.toString().slice(0, 60)}`);
    }
  }
});

// surface: transport.text
test('of a repeated key the last value counts, and keys that objects inherit are fields like any other', async () => {
  const ask = async (payload: string) => {
    const headers = { 'content-type': 'application/json' };
    return (await server.app.inject({ method: 'POST', url: '/v1/completions', headers, payload })).statusCode;
  };
  assert.equal(await ask('{"prompt": "a", "temperature": "x", "temperature": 1}'), 200);
  assert.equal(await ask('{"prompt": "a", "temperature": 1, "temperature": "x"}'), 400);
  assert.equal(await ask('{"prompt": "a", "__proto__": {"temperature": "x"}, "constructor": {"prototype": 5}}'), 200);
});
