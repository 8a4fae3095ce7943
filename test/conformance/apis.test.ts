/**
 * Many choices, Responses, Anthropic's messages, SGLang's native route and what the server says of itself, over real
 * sockets and scripted rooms. Numbers in the names are cases of public bug reports.
 */
import assert from 'node:assert/strict';
import { after, afterEach, before, describe, test } from 'node:test';
import { inspect } from 'node:util';
import OpenAI from 'openai';
import { closeApp } from '../../server/http.ts';
import { contextLength, listen, tokenizer } from '../support/scripted-rooms.ts';
import type { Room } from '../support/scripted-rooms.ts';

let server: Awaited<ReturnType<typeof listen>>;
let client: OpenAI;

before(async () => {
  server = await listen();
  client = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: 'none', maxRetries: 0 });
});
afterEach(() => server.rooms.reset());
after(() => closeApp(server.app, 0));

const messages = [{ role: 'user' as const, content: 'hi' }];
const plain = { model: 'nano', messages, chat_template_kwargs: { thinking: false } };
const tool = { name: 'add', parameters: { type: 'object', properties: { a: { type: 'integer' } } } };
const toolCall =
  'Calling.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n' +
  '<｜DSML｜parameter name="a" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>';

function post(path: string, body: object): Promise<Response> {
  const headers = { 'content-type': 'application/json' };
  return fetch(server.url + path, { method: 'POST', headers, body: JSON.stringify(body) });
}

async function get(path: string): Promise<unknown> {
  const response = await fetch(server.url + path);
  assert.equal(response.status, 200, path);
  return response.json();
}

/** Events of a stream, each with its name if it has one. */
function eventsOf(stream: string): { name: string | null; data: string }[] {
  return stream
    .split('\n\n')
    .filter((block) => block !== '')
    .map((block) => {
      const match = /^(?:event: (\S+)\n)?data: (.*)$/.exec(block);
      assert.ok(match, JSON.stringify(block));
      return { name: match[1] ?? null, data: match[2]! };
    });
}

const answer = (text: string) => (room: Room) => room.finish(text);

/** What stands at that path of a JSON value. */
function at(value: unknown, ...path: (string | number)[]): unknown {
  return path.reduce((inner, key) => (inner as Record<string | number, unknown>)[key], value);
}

describe('several choices', () => {
  // surface: chat.seed
  test('are rooms with seeds of their own, answered by index and counted together', async () => {
    const whole = client.chat.completions.create({ ...plain, n: 3, seed: 7 });
    const rooms = [await server.rooms.next(), await server.rooms.next(), await server.rooms.next()];
    assert.deepEqual(
      rooms.map((room) => room.request.sampling.seed),
      [7, 8, 9],
    );
    for (const [index, room] of rooms.toReversed().entries()) room.finish(`text ${index}`);
    const { choices, usage } = await whole;
    assert.deepEqual(
      choices.map(({ index, message, finish_reason: reason }) => [index, message.content, reason]),
      [
        [0, 'text 2', 'stop'],
        [1, 'text 1', 'stop'],
        [2, 'text 0', 'stop'],
      ],
    );
    const promptTokens = rooms[0]!.request.promptTokens.length;
    assert.equal(usage?.prompt_tokens, promptTokens, 'the prompt counts once (api-bugs 19)');
    assert.equal(usage?.total_tokens, promptTokens + usage!.completion_tokens);
  });

  // surface: answer.choices
  test('stream side by side, each with one role and one end (api-bugs 1)', async () => {
    const body = { ...plain, n: 2, stream: true, stream_options: { include_usage: true } } as const;
    const stream = client.chat.completions.create(body);
    const [first, second] = [await server.rooms.next(), await server.rooms.next()];
    second.text('b');
    first.text('a');
    second.finish('B');
    first.finish('A');
    const seen: string[] = [];
    let usageCount = 0;
    for await (const { choices, usage } of await stream) {
      if (choices.length === 0) usageCount += 1;
      for (const { index, delta, finish_reason: reason } of choices) {
        seen.push(`${index}${delta.role === undefined ? '' : ' role'} ${delta.content ?? ''} ${reason}`);
      }
      assert.equal(usage === null, choices.length > 0);
    }
    const of = (index: number) => seen.filter((line) => line.startsWith(String(index)));
    assert.deepEqual(of(0), ['0 role  null', '0 a null', '0 A null', '0  stop']);
    assert.deepEqual(of(1), ['1 role  null', '1 b null', '1 B null', '1  stop']);
    assert.equal(usageCount, 1);
  });

  test('have parsers of their own: calls of one never reach another (api-bugs 35)', async () => {
    const tools = [{ type: 'function' as const, function: tool }];
    const runner = client.chat.completions.stream({ ...plain, n: 2, tools });
    const [first, second] = [await server.rooms.next(), await server.rooms.next()];
    const ids = tokenizer.encode(toolCall);
    for (const id of ids) {
      first.tokens([id]);
      second.tokens(tokenizer.encode('x'));
    }
    first.finish('');
    second.finish('');
    const { choices } = await runner.finalChatCompletion();
    assert.equal(choices[0]?.message.tool_calls?.[0]?.type, 'function');
    assert.equal(choices[0]?.finish_reason, 'tool_calls');
    assert.equal(choices[1]?.message.tool_calls, undefined);
    assert.equal(choices[1]?.message.content, 'x'.repeat(ids.length));
  });

  test('fail together, and the others are stopped', async () => {
    const whole = post('/v1/chat/completions', { ...plain, n: 2 });
    const [first, second] = [await server.rooms.next(), await server.rooms.next()];
    first.end({ kind: 'cancelled', reason: 'peer_lost' });
    assert.equal((await whole).status, 504);
    assert.equal(await second.cancelled, 'client_cancel');
  });

  // surface: completions.stream
  test('of several prompts are numbered prompt by prompt', async () => {
    const whole = client.completions.create({ model: 'nano', prompt: ['one', 'two'], n: 2, echo: true });
    const rooms = [];
    for (let count = 0; count < 4; count += 1) rooms.push(await server.rooms.next());
    for (const [index, room] of rooms.entries()) room.finish(` ${index}`);
    const { choices, usage } = await whole;
    assert.deepEqual(
      choices.map(({ index, text }) => [index, text]),
      [
        [0, 'one 0'],
        [1, 'one 1'],
        [2, 'two 2'],
        [3, 'two 3'],
      ],
    );
    assert.equal(usage?.prompt_tokens, tokenizer.encode('one').length + tokenizer.encode('two').length);
  });

  // surface: chat.n
  test('more than the server allows are refused', async () => {
    const other = await listen({}, { maxChoices: 2 });
    const body = JSON.stringify({ prompt: 'a', n: 3 });
    const headers = { 'content-type': 'application/json' };
    const response = await fetch(`${other.url}/v1/completions`, { method: 'POST', headers, body });
    assert.equal(((await response.json()) as { error: { param: string } }).error.param, 'n');
    await closeApp(other.app, 0);
  });
});

// surface: completions.max-tokens
test('a prompt that is only echoed starts nothing (api-bugs 71)', async () => {
  for (const stream of [false, true]) {
    const response = await post('/v1/completions', { prompt: 'ab', echo: true, max_tokens: 0, stream });
    const text = await response.text();
    const choice = stream
      ? eventsOf(text)
          .slice(0, -1)
          .map(({ data }) => (JSON.parse(data) as OpenAI.Completion).choices[0]!.text)
          .join('')
      : (JSON.parse(text) as OpenAI.Completion).choices[0]!.text;
    assert.equal(choice, 'ab');
  }
  assert.equal(server.rooms.startCount, 0);
});

// surface: chat.rid
test('an id of the client may be used again when its request is over, and not before (api-bugs 73)', async () => {
  const first = post('/v1/chat/completions', { ...plain, rid: 'mine' });
  const room = await server.rooms.next();
  const second = await post('/v1/chat/completions', { ...plain, rid: 'mine' });
  assert.equal(second.status, 400);
  assert.equal(((await second.json()) as { error: { code: string } }).error.code, 'duplicate_request_id');
  room.finish('fine');
  assert.equal((await first).status, 200);
  server.rooms.script = answer('again');
  assert.equal((await post('/v1/chat/completions', { ...plain, rid: 'mine' })).status, 200);
});

// surface: chat.continue
test('a final message goes on, and what follows is content (api-bugs 44)', async () => {
  const conversation = [...messages, { role: 'assistant' as const, content: 'The answer is' }];
  const whole = post('/v1/chat/completions', { messages: conversation, continue_final_message: true });
  const room = await server.rooms.next();
  assert.match(tokenizer.decode([...room.request.promptTokens]), /The answer is$/);
  room.finish(' 4.');
  const { choices } = (await (await whole).json()) as OpenAI.ChatCompletion;
  assert.equal(choices[0]?.message.content, ' 4.');
});

test('an answer that is not streamed and grows beyond all bounds is cut off', async () => {
  const other = await listen({ maxAnswerBytes: 100 });
  const body = JSON.stringify({ prompt: 'a', max_tokens: 4000 });
  const headers = { 'content-type': 'application/json' };
  const whole = fetch(`${other.url}/v1/completions`, { method: 'POST', headers, body });
  const room = await other.rooms.next();
  while (room.cancelReason === null) room.text('word ');
  const { choices } = (await (await whole).json()) as OpenAI.Completion;
  assert.equal(choices[0]?.finish_reason, 'length');
  await closeApp(other.app, 0);
});

describe('/v1/responses', () => {
  const body = { model: 'nano', input: 'hi', reasoning: { effort: 'none' as const } };

  // surface: endpoint.responses
  test('answers with a message and its usage', async () => {
    server.rooms.script = answer('Hello.');
    const response = await client.responses.create({ ...body, instructions: 'Be brief.', metadata: { a: '1' } });
    assert.equal(response.status, 'completed');
    assert.equal(response.output_text, 'Hello.');
    assert.deepEqual(response.metadata, { a: '1' });
    assert.ok(response.usage!.input_tokens > 0, `${response.usage!.input_tokens} tokens`);
    assert.equal(response.usage!.total_tokens, response.usage!.input_tokens + response.usage!.output_tokens);
  });

  // surface: responses.stream
  test('streams numbered events whose done texts are the sums of their deltas (api-bugs 94)', async () => {
    const ids = tokenizer.encode(`thinking</think>${toolCall}`);
    const request = { model: 'nano', input: 'hi', tools: [{ type: 'function' as const, strict: null, ...tool }] };
    const whole = client.responses.create(request);
    const room = await server.rooms.next();
    room.tokens([...ids, tokenizer.eosId]);
    room.end({ kind: 'stop' });
    const stream = await Promise.all([
      client.responses.create({ ...request, stream: true }),
      server.rooms.next().then((each) => {
        for (const id of ids) each.tokens([id]);
        each.tokens([tokenizer.eosId]);
        each.end({ kind: 'stop' });
      }),
    ]);
    const types: string[] = [];
    const sums = new Map<string, string>();
    let last: OpenAI.Responses.Response | null = null;
    let count = 0;
    for await (const event of stream[0]) {
      assert.equal(event.sequence_number, count);
      count += 1;
      if (types.at(-1) !== event.type) types.push(event.type);
      if ('delta' in event && typeof event.delta === 'string') {
        const itemId = 'item_id' in event ? event.item_id : '';
        sums.set(itemId, (sums.get(itemId) ?? '') + event.delta);
      }
      if (event.type === 'response.output_text.done') assert.equal(event.text, sums.get(event.item_id));
      if (event.type === 'response.reasoning_text.done') assert.equal(event.text, sums.get(event.item_id));
      if (event.type === 'response.function_call_arguments.done') {
        assert.equal(event.arguments, sums.get(event.item_id));
      }
      if (event.type === 'response.completed') last = event.response;
    }
    assert.deepEqual(types, [
      'response.created',
      'response.in_progress',
      'response.output_item.added',
      'response.content_part.added',
      'response.reasoning_text.delta',
      'response.reasoning_text.done',
      'response.content_part.done',
      'response.output_item.done',
      'response.output_item.added',
      'response.content_part.added',
      'response.output_text.delta',
      'response.output_text.done',
      'response.content_part.done',
      'response.output_item.done',
      'response.output_item.added',
      'response.function_call_arguments.delta',
      'response.function_call_arguments.done',
      'response.output_item.done',
      'response.completed',
    ]);
    const strip = (output: OpenAI.Responses.ResponseOutputItem[]) =>
      output.map((item) => ({ ...item, id: '', ...('call_id' in item ? { call_id: '' } : {}) }));
    assert.deepEqual(strip(last!.output), strip((await whole).output), 'the same as without a stream');
    const call = last!.output.at(-1);
    assert.ok(call?.type === 'function_call', `the last item is ${call?.type}`);
    assert.deepEqual([call.name, call.arguments], ['add', '{"a": 2}']);
    assert.match(call.call_id, /^call_/);
  });

  // surface: responses.request
  test('reads the items of earlier turns as one conversation', async () => {
    const input = [
      { role: 'developer', content: 'Be brief.' },
      { role: 'user', content: [{ type: 'input_text', text: 'add 1' }] },
      { type: 'reasoning', id: 'rs_1', summary: [], content: [{ type: 'reasoning_text', text: 'hm' }] },
      { type: 'function_call', call_id: 'c1', name: 'add', arguments: '{"a":1}' },
      { type: 'function_call_output', call_id: 'c1', output: '2' },
    ];
    const whole = post('/v1/responses', { ...body, input, tools: [{ type: 'function', ...tool }] });
    const room = await server.rooms.next();
    const prompt = tokenizer.decode([...room.request.promptTokens]);
    assert.match(
      prompt,
      /Be brief\..*<｜User｜>add 1<｜Assistant｜>.*invoke name="add".*<tool_result>2<\/tool_result>/s,
    );
    room.finish('Two.');
    assert.equal((await whole).status, 200);
  });

  test('goes on with a turn of codex whose tools have run', async () => {
    // As codex 0.171.0 sent it, but for long texts. Arguments are what the model had written, an unknown name included.
    const calls = [
      { id: 'fc_1', name: 'exec_command', arguments: '{"cmd":"echo hi"}', call_id: 'call_1' },
      { id: 'fc_2', name: 'list_agents', namespace: 'multi_agent_v1', arguments: '{}', call_id: 'call_2' },
      { id: 'fc_3', name: 'nope', arguments: '{broken', call_id: 'call_3' },
    ].map((call) => ({ type: 'function_call', status: 'completed', ...call }));
    const outputs = ['hi\n', 'unsupported call: multi_agent_v1list_agents', 'unsupported call: nope'].map(
      (output, index) => ({ type: 'function_call_output', id: `fco_${index}`, call_id: `call_${index + 1}`, output }),
    );
    const thought = { type: 'reasoning_text', text: 'I should call it.' };
    const request = {
      model: 'nano',
      stream: true,
      store: false,
      include: ['reasoning.encrypted_content'],
      prompt_cache_key: '01a22a63-483b-7fb0-84b8-669245fd32bf',
      client_metadata: { 'x-codex-window-id': '1' },
      reasoning: { summary: 'auto' },
      parallel_tool_calls: true,
      tool_choice: 'auto',
      tools: [
        { type: 'function', name: 'exec_command', strict: false, parameters: { type: 'object', properties: {} } },
        {
          type: 'namespace',
          name: 'multi_agent_v1',
          description: 'Tools for sub-agents.',
          tools: [{ type: 'function', name: 'list_agents', strict: false, parameters: { type: 'object' } }],
        },
        { type: 'web_search', external_web_access: false },
      ],
      input: [
        { type: 'message', id: 'msg_1', role: 'developer', content: [{ type: 'input_text', text: 'Be brief.' }] },
        { type: 'message', id: 'msg_2', role: 'user', content: [{ type: 'input_text', text: 'Say hello' }] },
        { type: 'reasoning', id: 'rs_1', summary: [], content: [thought], encrypted_content: null },
        ...calls,
        ...outputs,
      ],
    };
    const whole = post('/v1/responses', request);
    const room = await server.rooms.next();
    const prompt = tokenizer.decode([...room.request.promptTokens]);
    const parts = [
      'I should call it.</think>',
      'invoke name="exec_command">',
      'echo hi</',
      'invoke name="multi_agent_v1.list_agents">',
      'invoke name="nope">',
      '{broken',
      '<tool_result>hi\n</tool_result>',
      '<tool_result>unsupported call: nope</tool_result>',
    ];
    let end = 0;
    for (const part of parts) {
      const start = prompt.indexOf(part, end);
      assert.ok(start >= 0, `${part} is not behind position ${end} of ${prompt}`);
      end = start + part.length;
    }
    room.finish('Hello.');
    assert.match(await (await whole).text(), /event: response\.completed\n/);
  });

  // surface: responses.tools
  test('offers custom tools and namespaces as functions and leaves out what a vendor runs', async () => {
    const tools = [
      { type: 'custom', name: 'patch' },
      { type: 'namespace', name: 'mcp', tools: [{ type: 'function', name: 'look', parameters: {} }] },
      { type: 'web_search' },
    ];
    const call = (name: string, parameter: string, value: string) =>
      `\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="${name}">\n<｜DSML｜parameter name="${parameter}" string="true">` +
      `${value}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>`;
    server.rooms.script = answer(call('patch', 'input', '*** x'));
    const response = await post('/v1/responses', { ...body, tools });
    assert.equal(response.headers.get('x-handoff-tools-left-out'), 'web_search');
    const { output } = (await response.json()) as { output: object[] };
    assert.deepEqual(at(output, 0, 'type'), 'custom_tool_call');
    assert.deepEqual(at(output, 0, 'input'), '*** x');
    server.rooms.script = answer(call('mcp.look', 'at', 'it'));
    const second = (await (await post('/v1/responses', { ...body, tools })).json()) as { output: object[] };
    assert.deepEqual([at(second, 'output', 0, 'name'), at(second, 'output', 0, 'namespace')], ['look', 'mcp']);
    const forced = await post('/v1/responses', { ...body, tools, tool_choice: { type: 'web_search' } });
    assert.equal(forced.status, 400);
  });

  // surface: responses.end
  test('says that an answer was cut off', async () => {
    server.rooms.script = (room) => {
      room.text('Hel');
      room.end({ kind: 'length' });
    };
    const response = await client.responses.create(body);
    assert.equal(response.status, 'incomplete');
    assert.deepEqual(response.incomplete_details, { reason: 'max_output_tokens' });
  });

  // surface: responses.end
  test('fails in the stream after its first event, and as a status before', async () => {
    server.rooms.script = (room) => {
      room.text('Hel');
      room.end({ kind: 'cancelled', reason: 'peer_lost' });
    };
    const text = await (await post('/v1/responses', { ...body, stream: true })).text();
    const last = eventsOf(text).at(-1);
    assert.equal(last?.name, 'response.failed');
    server.rooms.script = (room) => room.end({ kind: 'cancelled', reason: 'peer_lost' });
    assert.equal((await post('/v1/responses', { ...body, stream: true })).status, 504);
  });

  // surface: endpoint.responses
  test('refuses what would need a memory', async () => {
    const response = await post('/v1/responses', { ...body, previous_response_id: 'resp_1' });
    const { error } = (await response.json()) as { error: { code: string; param: string } };
    assert.deepEqual(
      [response.status, error.code, error.param],
      [400, 'unsupported_parameter', 'previous_response_id'],
    );
  });
});

describe('/v1/messages', () => {
  const body = { model: 'nano', max_tokens: 50, messages, thinking: { type: 'disabled' } };
  const tools = [{ name: 'add', input_schema: tool.parameters }];

  // surface: endpoint.messages, messages.count
  test('answers with blocks, and counts what it will prefill', async () => {
    server.rooms.script = answer('Hello.');
    const response = await post('/v1/messages', { ...body, system: 'Be brief.' });
    const message: unknown = await response.json();
    assert.equal(response.headers.get('request-id'), response.headers.get('x-request-id'));
    assert.deepEqual(at(message, 'content'), [{ type: 'text', text: 'Hello.' }]);
    assert.equal(at(message, 'stop_reason'), 'end_turn');
    const counted = await post('/v1/messages/count_tokens', { ...body, system: 'Be brief.' });
    assert.deepEqual(await counted.json(), { input_tokens: at(message, 'usage', 'input_tokens') });
  });

  // surface: messages.stream
  test('streams named events in their order, without [DONE] (api-bugs 89, 90, 91, 92)', async () => {
    const ids = tokenizer.encode(`thinking</think>${toolCall}`);
    server.rooms.script = (room) => {
      for (const id of ids) room.tokens([id]);
      room.tokens([tokenizer.eosId]);
      room.end({ kind: 'stop' });
    };
    const request = { ...body, thinking: { type: 'enabled', budget_tokens: 1024 }, tools, stream: true };
    const events = eventsOf(await (await post('/v1/messages', request)).text());
    const parsed = events.map(({ name, data }) => {
      const event: unknown = JSON.parse(data);
      assert.equal(at(event, 'type'), name);
      return event;
    });
    const types = parsed.map((event) => at(event, 'type') as string);
    assert.deepEqual(
      types.filter((type, index) => type !== types[index - 1]),
      [
        'message_start',
        ...['content_block_start', 'content_block_delta', 'content_block_stop'],
        ...['content_block_start', 'content_block_delta', 'content_block_stop'],
        ...['content_block_start', 'content_block_delta', 'content_block_stop'],
        'message_delta',
        'message_stop',
      ],
    );
    assert.ok(
      (at(parsed, 0, 'message', 'usage', 'input_tokens') as number) > 0,
      inspect(at(parsed, 0, 'message', 'usage')),
    );
    const deltas = parsed.filter((event) => at(event, 'type') === 'content_block_delta');
    const sum = (index: number, key: string) =>
      deltas
        .filter((event) => at(event, 'index') === index)
        .map((event) => (at(event, 'delta', key) as string | undefined) ?? '')
        .join('');
    assert.equal(sum(0, 'thinking'), 'thinking');
    assert.equal(sum(1, 'text'), 'Calling.');
    assert.deepEqual(JSON.parse(sum(2, 'partial_json')), { a: 2 });
    assert.equal(at(parsed.at(-2), 'delta', 'stop_reason'), 'tool_use');
    const whole: unknown = await (await post('/v1/messages', { ...request, stream: false })).json();
    assert.deepEqual(
      (at(whole, 'content') as object[]).map((block) => at(block, 'type')),
      ['thinking', 'text', 'tool_use'],
    );
  });

  // surface: messages.stream
  test('an empty answer has one empty block', async () => {
    server.rooms.script = answer('');
    assert.deepEqual(at(await (await post('/v1/messages', body)).json(), 'content'), [{ type: 'text', text: '' }]);
  });

  // surface: messages.request
  test('takes tool results with their ids, and a limit beyond the context is cut down (api-bugs 38)', async () => {
    const conversation = [
      { role: 'user', content: 'add 1' },
      { role: 'assistant', content: [{ type: 'tool_use', id: 't1', name: 'add', input: { a: 1 } }] },
      { role: 'user', content: [{ type: 'tool_result', tool_use_id: 't1', content: [{ type: 'text', text: '2' }] }] },
    ];
    const whole = post('/v1/messages', { ...body, messages: conversation, tools, max_tokens: 32_000 });
    const room = await server.rooms.next();
    assert.equal(room.request.maxTokens, contextLength - room.request.promptTokens.length);
    assert.match(tokenizer.decode([...room.request.promptTokens]), /<tool_result>2<\/tool_result>/);
    room.finish('Two.');
    assert.equal((await whole).status, 200);
  });

  // surface: messages.errors
  test('errors have the shape of this API (api-bugs 93)', async () => {
    const cases: [object, number, string][] = [
      [{ ...body, max_tokens: undefined }, 400, 'invalid_request_error'],
      [{ ...body, model: 'other' }, 404, 'not_found_error'],
      [{ ...body, messages: [{ role: 'user', content: [{ type: 'image' }] }] }, 400, 'invalid_request_error'],
    ];
    for (const [request, status, type] of cases) {
      const response = await post('/v1/messages', request);
      const error: unknown = await response.json();
      assert.deepEqual([response.status, at(error, 'type'), at(error, 'error', 'type')], [status, 'error', type]);
      assert.equal(at(error, 'request_id'), response.headers.get('x-request-id'));
    }
    server.rooms.script = (room) => {
      room.text('Hel');
      room.end({ kind: 'cancelled', reason: 'peer_lost' });
    };
    const last = eventsOf(await (await post('/v1/messages', { ...body, stream: true })).text()).at(-1);
    assert.equal(last?.name, 'error');
  });

  // surface: messages.stop
  test('a stop sequence is named', async () => {
    const whole = post('/v1/messages', { ...body, stop_sequences: ['END'] });
    (await server.rooms.next()).text('one END');
    const message: unknown = await (await whole).json();
    assert.deepEqual([at(message, 'stop_reason'), at(message, 'stop_sequence')], ['stop_sequence', 'END']);
  });
});

// surface: endpoint.generate, generate.stream
test('/generate sends all of the text so far with every event', async () => {
  const request = {
    text: 'a',
    sampling_params: { temperature: 0, max_new_tokens: 8, ignore_eos: true },
    ...{ stream: true, lora_path: null, return_logprob: false, return_routed_experts: false, logprob_start_len: -1 },
  };
  const whole = post('/generate', request);
  const room = await server.rooms.next();
  assert.deepEqual([room.request.maxTokens, room.request.stopTokenIds.length], [8, 0]);
  room.text('one');
  room.text(' two');
  room.end({ kind: 'length' });
  const events = eventsOf(await (await whole).text());
  assert.equal(events.at(-1)?.data, '[DONE]');
  const parsed = events.slice(0, -1).map(({ data }) => JSON.parse(data) as unknown);
  assert.equal(at(parsed, 0, 'text'), 'one');
  assert.equal(at(parsed.at(-1), 'text'), 'one two');
  const count = tokenizer.encode('one').length + tokenizer.encode(' two').length;
  assert.equal(at(parsed.at(-1), 'meta_info', 'completion_tokens'), count);
  assert.equal(at(parsed.at(-1), 'meta_info', 'finish_reason', 'type'), 'length');
});

test("/generate knows SGLang's names of what it can do, and refuses those of what it cannot", async () => {
  const whole = post('/generate', { text: 'a', sampling_params: { max_new_tokens: 8, min_new_tokens: 2 } });
  const room = await server.rooms.next();
  assert.equal(room.request.sampling.rules?.minTokens, 2);
  room.text('one');
  room.end({ kind: 'length' });
  assert.equal((await whole).status, 200);
  for (const name of ['json_schema', 'regex', 'ebnf', 'structural_tag']) {
    const refused = await post('/generate', { text: 'a', sampling_params: { [name]: '{}' } });
    assert.equal(refused.status, 400);
    assert.equal(at(await refused.json(), 'error', 'param'), `sampling_params.${name}`);
  }
});

// surface: endpoint.server-info, endpoint.model-info, endpoint.loads
test('the server says what it is, without keys and paths', async () => {
  for (const path of ['/server_info', '/get_server_info']) {
    const info = await get(path);
    assert.equal(at(info, 'served_model_name'), 'nano');
    assert.equal(at(info, 'context_length'), contextLength);
    assert.doesNotMatch(JSON.stringify(info), /\//);
  }
  for (const path of ['/model_info', '/get_model_info']) assert.equal(at(await get(path), 'is_generation'), true);
  assert.deepEqual(at(await get('/v1/loads?include=core,queues'), 'loads'), []);
  assert.equal((await fetch(`${server.url}/v1/loads?include=all,nonsense`)).status, 400);
});

test('the document of the API has every route with the schema of its body, and the page loads nothing from elsewhere', async () => {
  const document = await get('/openapi.json');
  const schemaOf = (path: string) =>
    at(document, 'paths', path, 'post', 'requestBody', 'content', 'application/json', 'schema');
  for (const path of ['/v1/chat/completions', '/v1/completions', '/v1/responses', '/v1/messages', '/generate']) {
    assert.equal(at(schemaOf(path), 'type'), 'object', path);
    assert.ok(Object.keys(at(schemaOf(path), 'properties') as object).length > 5, path);
  }
  assert.deepEqual(at(schemaOf('/v1/chat/completions'), 'required'), ['messages']);
  const page = await fetch(`${server.url}/docs`);
  assert.match(page.headers.get('content-type') ?? '', /^text\/html/);
  const html = await page.text();
  assert.match(html, /\/v1\/chat\/completions/);
  assert.match(html, /max_completion_tokens/);
  assert.doesNotMatch(html, /https?:|<script|src=/);
});

// surface: endpoint.health-generate
test('health by generation takes one token through the rooms, unless one came lately', async () => {
  const other = await listen();
  const probe = fetch(`${other.url}/health_generate`);
  const room = await other.rooms.next();
  assert.equal(room.request.maxTokens, 1);
  room.text('x');
  room.end({ kind: 'length' });
  assert.equal((await probe).status, 200);
  const failing = fetch(`${other.url}/health_generate`);
  (await other.rooms.next()).end({ kind: 'cancelled', reason: 'peer_lost' });
  assert.equal((await failing).status, 503);
  assert.equal(other.observed.finished.length, 0, 'probes are no requests');
  await closeApp(other.app, 0);
});
