/**
 * Formats and forced tool calls in the words of each API, over rooms that do what their constraints allow; and what
 * clients are told when an answer cannot be held to what they ask for. The model itself is in
 * test/integration/structured.test.ts.
 */
import assert from 'node:assert/strict';
import { after, test } from 'node:test';
import { chunksOf, openApp, tokenizer } from '../support/ask.ts';
import { guidedRooms } from '../support/guided-rooms.ts';
import { createPrng } from '../support/prng.ts';

const seed = Number(process.env['SEED'] ?? 20_261_130);
const outcomes: string[] = [];
const observe = {
  responded() {},
  rejected() {},
  firstToken() {},
  betweenTokens() {},
  finished() {},
  constrained: (outcome: string) => void outcomes.push(outcome),
};
/** Rooms that obey, and rooms that say what the test tells them. */
const app = openApp({ rooms: guidedRooms(createPrng(seed)), observe });
const disobedient = openApp({ observe });
after(() => Promise.all([app.close(), disobedient.close()]));

const chat = '/v1/chat/completions';
const messages = [{ role: 'user', content: 'hi' }];
const off = { messages, chat_template_kwargs: { thinking: false } };
const schema = {
  type: 'object',
  properties: { n: { type: 'integer', minimum: 1, maximum: 3 }, ok: { type: 'boolean' } },
  required: ['n', 'ok'],
  additionalProperties: false,
};
const format = { type: 'json_schema', json_schema: { name: 'thing', schema, strict: true } };
const parameters = { type: 'object', properties: { a: { type: 'integer' } }, required: ['a'] };
const tools = ['add', 'sub'].map((name) => ({ type: 'function', function: { name, parameters } }));

interface ToolCall {
  function: { name: string; arguments: string };
}
interface Message {
  content: string | null;
  reasoning_content?: string;
  tool_calls?: ToolCall[];
}

async function answer(body: object): Promise<{ message: Message; end: string }> {
  const response = await app.post(chat, body);
  assert.equal(response.status, 200, `${response.body} (SEED=${seed})`);
  const { choices } = JSON.parse(response.body) as { choices: { message: Message; finish_reason: string }[] };
  return { message: choices[0]!.message, end: choices[0]!.finish_reason };
}

async function refusal(body: object, to = chat) {
  const { status, body: text } = await app.post(to, body);
  const { error } = JSON.parse(text) as { error: { message: string; param: string | null; code: string } };
  return { status, code: error.code, param: error.param, message: error.message };
}

function assertThing(text: string | null | undefined): void {
  const value = JSON.parse(text ?? '') as Record<string, unknown>;
  assert.deepEqual(Object.keys(value), ['n', 'ok']);
  assert.ok([1, 2, 3].includes(value['n'] as number) && typeof value['ok'] === 'boolean', text ?? '');
}

// surface: chat.response-format, format.json-schema
test('a chat answer has the format that is asked for, with reasoning before it or without, streamed or not', async () => {
  const { message, end } = await answer({ ...off, response_format: format });
  assertThing(message.content);
  assert.equal(end, 'stop');
  const thought = await answer({ messages, response_format: format });
  assertThing(thought.message.content);
  assert.match(thought.message.reasoning_content ?? '', /./s);
  const inline = await answer({ messages, response_format: format, separate_reasoning: false });
  assertThing(inline.message.content?.split('</think>')[1]);
  const { body } = await app.post(chat, { ...off, response_format: format, stream: true });
  assertThing(
    chunksOf(body)
      .map((chunk) => chunk.choices[0]?.delta.content ?? '')
      .join(''),
  );
});

// surface: format.json-object
test('json_object is an object, and text is text', async () => {
  const { message } = await answer({ ...off, response_format: { type: 'json_object' }, max_tokens: 3000 });
  if (message.content !== null) assert.match(message.content, /^\{/);
  const free = await disobedient.post(chat, { ...off, response_format: { type: 'text' } }, { text: 'free' });
  assert.match(free.body, /"content":"free"/);
  assert.equal(free.room?.sampling.constraint, undefined);
});

test('every choice and every completion has the format', async () => {
  const { body } = await app.post(chat, { ...off, response_format: format, n: 3 });
  const { choices } = JSON.parse(body) as { choices: { message: Message }[] };
  assert.equal(choices.length, 3);
  for (const { message } of choices) assertThing(message.content);
  const completion = await app.post('/v1/completions', { prompt: 'x', response_format: format, max_tokens: 500 });
  assertThing((JSON.parse(completion.body) as { choices: { text: string }[] }).choices[0]!.text);
});

// surface: chat.tool-choice, tools.forced
test('a required call is one or more calls, a named one is that call once, and both end with tool_calls', async () => {
  const names = new Set<string>();
  for (let count = 0; count < 10; count += 1) {
    const { message, end } = await answer({ ...off, tools, tool_choice: 'required', max_tokens: 3900 });
    if (end === 'length') continue; // rooms that know nothing go on calling at times
    assert.equal(end, 'tool_calls');
    assert.equal(message.content, null);
    for (const call of message.tool_calls ?? []) {
      names.add(call.function.name);
      assert.ok(Number.isInteger((JSON.parse(call.function.arguments) as { a: unknown }).a), call.function.arguments);
    }
  }
  assert.deepEqual([...names].toSorted(), ['add', 'sub']);
  const named = { type: 'function', function: { name: 'sub' } };
  for (const fields of [{ tool_choice: named }, { tool_choice: named, messages, chat_template_kwargs: null }]) {
    const { message, end } = await answer({ ...off, tools, ...fields });
    assert.deepEqual([end, message.tool_calls?.map((call) => call.function.name)], ['tool_calls', ['sub']]);
  }
  for (let count = 0; count < 5; count += 1) {
    const { message } = await answer({ ...off, tools, tool_choice: 'required', parallel_tool_calls: false });
    assert.equal(message.tool_calls?.length, 1);
  }
});

test('with tools that may be called an answer has the format or calls one', async () => {
  const kinds = new Set<string>();
  for (let count = 0; count < 16; count += 1) {
    const fields = { tools, response_format: format, parallel_tool_calls: false };
    const { message, end } = await answer({ ...off, ...fields });
    kinds.add(end);
    if (end === 'stop') assertThing(message.content);
    else assert.equal(message.tool_calls?.length, 1);
  }
  assert.ok(kinds.has('stop'), [...kinds].join(', '));
});

test('Responses has formats and forced calls in its own words', async () => {
  const reasoning = { effort: 'none' };
  const said = { type: 'json_schema', name: 'thing', schema };
  const { body } = await app.post('/v1/responses', { input: 'hi', reasoning, text: { format: said } });
  const response = JSON.parse(body) as { output: { content: { text: string }[] }[]; text: object };
  assertThing(response.output[0]!.content[0]!.text);
  assert.deepEqual(response.text, { format: said });
  const flat = [
    { type: 'function', name: 'add', parameters },
    { type: 'custom', name: 'shell' },
  ];
  for (const [choice, name] of [
    [{ type: 'function', name: 'add' }, 'add'],
    [{ type: 'custom', name: 'shell' }, 'shell'],
  ] as const) {
    const called = await app.post('/v1/responses', { input: 'hi', reasoning, tools: flat, tool_choice: choice });
    const { output } = JSON.parse(called.body) as { output: { type: string; name: string }[] };
    assert.deepEqual(
      output.map((item) => item.name),
      [name],
    );
  }
  assert.deepEqual(
    (await refusal({ input: 'hi', tools: flat, tool_choice: { type: 'mcp' } }, '/v1/responses')).param,
    'tool_choice.type',
  );
});

test('Messages has formats and forced calls in its own words', async () => {
  const base = { messages, max_tokens: 3000, thinking: { type: 'disabled' } };
  const named = ['add', 'sub'].map((name) => ({ name, input_schema: parameters }));
  interface Block {
    type: string;
    name?: string;
    text?: string;
  }
  const ask = async (fields: object) => {
    const { body } = await app.post('/v1/messages', { ...base, ...fields });
    return JSON.parse(body) as { content: Block[]; stop_reason: string };
  };
  assertThing((await ask({ output_config: { format: { type: 'json_schema', schema } } })).content[0]!.text);
  const one = await ask({ tools: named, tool_choice: { type: 'tool', name: 'sub' } });
  assert.deepEqual([one.stop_reason, one.content.map((block) => block.name)], ['tool_use', ['sub']]);
  const any = await ask({ tools: named, tool_choice: { type: 'any', disable_parallel_tool_use: true } });
  assert.deepEqual([any.stop_reason, any.content.map((block) => block.type)], ['tool_use', ['tool_use']]);
});

test('api-bugs 33: a forced call that is cut off is no call', async () => {
  const { message, end } = await answer({ ...off, tools, tool_choice: 'required', max_completion_tokens: 3 });
  assert.deepEqual([end, message.tool_calls, message.content], ['length', undefined, '']);
});

test('api-bugs 63, 64: a format without its schema, or with one that cannot be followed, is a 400 that names it', async () => {
  const inside = 'response_format.json_schema';
  const of = (given: unknown) => ({ type: 'json_schema', json_schema: { name: 'x', schema: given } });
  const cases: [unknown, string, string][] = [
    [{ type: 'json_schema' }, 'missing_required_parameter', inside],
    [{ type: 'json_schema', json_schema: { name: 'x' } }, 'missing_required_parameter', `${inside}.schema`],
    [{ type: 'json_schema', json_schema: { schema: {} } }, 'missing_required_parameter', `${inside}.name`],
    [{ type: 'json_schema', json_schema: { name: 'a b', schema: {} } }, 'invalid_value', `${inside}.name`],
    [{ type: 'structural_tag' }, 'unsupported_value', 'response_format.type'],
    [of({ type: 'string', pattern: '(?=x)y' }), 'invalid_schema', `${inside}.schema.pattern`],
    [of({ properties: { a: { not: {} } } }), 'invalid_schema', `${inside}.schema.properties.a.not`],
  ];
  for (const [response_format, code, param] of cases) {
    const found = await refusal({ ...off, response_format });
    assert.deepEqual([found.status, found.code, found.param], [400, code, param]);
  }
  const strict = [{ type: 'function', function: { name: 'f', strict: true, parameters: { allOf: [] } } }];
  const found = await refusal({ ...off, tools: strict, tool_choice: 'required' });
  assert.deepEqual([found.code, found.param], ['invalid_schema', 'tools[0].function.parameters.allOf']);
});

test('api-bugs 65: a schema that nests or branches without measure is a 400 at once, and others are answered', async () => {
  let nested: object = { type: 'null' };
  for (let level = 0; level < 40; level += 1) nested = { oneOf: [nested, { type: 'string' }] };
  const wide = { enum: Array.from({ length: 20_000 }, (_, index) => index) };
  const states = { type: 'string', pattern: '(a|b)*a(a|b){24}' };
  for (const given of [nested, wide, states]) {
    const startMs = performance.now();
    const body = { ...off, response_format: { type: 'json_schema', json_schema: { name: 'x', schema: given } } };
    const [found, other] = await Promise.all([refusal(body), answer({ ...off, response_format: format })]);
    assert.equal(found.status, 400);
    assertThing(other.message.content);
    assert.ok(performance.now() - startMs < 5000, `${performance.now() - startMs} ms`);
  }
});

test('what does not go together with a format is refused by name', async () => {
  const final = { messages: [...messages, { role: 'assistant', content: '{' }], continue_final_message: true };
  for (const [fields, param] of [
    [{ ignore_eos: true }, 'ignore_eos'],
    [final, 'continue_final_message'],
  ] as const) {
    const found = await refusal({ ...off, response_format: format, ...fields });
    assert.deepEqual([found.status, found.code, found.param], [400, 'unsupported_value', param]);
  }
});

test('an answer that is not what was asked for is an error and never a success; one that is cut off is shown', async () => {
  const ambiguous = { oneOf: [{ type: 'integer' }, { type: 'number' }] };
  const response_format = { type: 'json_schema', json_schema: { name: 'x', schema: ambiguous } };
  outcomes.length = 0;
  const whole = await disobedient.post(chat, { ...off, response_format }, { text: '5' });
  assert.equal(whole.status, 500);
  assert.match(whole.body, /"code":"invalid_answer"/);
  const streamed = await disobedient.post(chat, { ...off, response_format, stream: true }, { text: '5' });
  const events = streamed.body.split('\n').filter((line) => line !== '');
  assert.match(events.at(-2) ?? '', /"code":"invalid_answer"/);
  assert.equal(events.at(-1), 'data: [DONE]');
  assert.doesNotMatch(streamed.body, /"finish_reason":"stop"/);
  const fits = await disobedient.post(chat, { ...off, response_format }, { text: '5.5' });
  assert.equal(fits.status, 200);
  const cut = await disobedient.post(chat, { ...off, response_format }, { text: '[', outcome: 'length' });
  assert.match(cut.body, /"content":"\[".*"finish_reason":"length"/);
  // The client's own stop string cuts off what the client knows of.
  const stopped = await disobedient.post(chat, { ...off, response_format, stop: ';' }, { text: '[;' });
  assert.match(stopped.body, /"matched_stop":";"/);
  assert.deepEqual(outcomes, ['violated', 'violated', 'met', 'cut', 'cut']);
});

test('a schema is shown to the model where its checkpoint has words for it, and goes to the workers as it stands', async () => {
  const { room } = await disobedient.post(chat, { ...off, response_format: format }, { text: '{"n":1,"ok":true}' });
  const sent = JSON.parse(room?.sampling.constraint ?? '') as { schema: { value: unknown }; thinking: boolean };
  assert.deepEqual([sent.schema.value, sent.thinking], [schema, false]);
  assert.doesNotMatch(tokenizer.decode(room?.promptTokens ?? []), /exclusive/);
});
