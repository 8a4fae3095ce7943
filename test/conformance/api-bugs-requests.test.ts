/**
 * Bugs of public servers about the shape of streams, usage, status codes and checks of requests, by their numbers in the
 * collection that they were taken from. Those about tool calls, reasoning and text are in api-bugs-answers.test.ts.
 */
import assert from 'node:assert/strict';
import { after, test } from 'node:test';
import { ApiError } from '../../server/errors.ts';
import { chunksOf, openApp, promptChoicesOf } from '../support/ask.ts';
import type { Output, StreamChunk } from '../support/ask.ts';

const app = openApp();
after(() => app.close());

const path = '/v1/chat/completions';
const messages = [{ role: 'user', content: 'hi' }];
const off = { messages, chat_template_kwargs: { thinking: false } };
const tools = [{ type: 'function', function: { name: 'add' } }];
const calling =
  'why</think>so\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>';

interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  prompt_tokens_details: { cached_tokens: number };
  completion_tokens_details: { reasoning_tokens: number };
}

type Chunk = StreamChunk & { id: string; object: string; created: number; model: string; usage?: Usage | null };

async function stream(fields: object, ...outputs: Output[]): Promise<Chunk[]> {
  const { status, body } = await app.post(path, { messages, ...fields, stream: true }, ...outputs);
  assert.equal(status, 200, body);
  return chunksOf(body) as Chunk[];
}

async function refusal(body: object | string, to = path) {
  const { status, body: text } = await app.post(to, body);
  const { error } = JSON.parse(text) as { error: { message: string; param: string | null; code: string } };
  return { status, ...error };
}

// surface: answer.finish
test('api-bugs 1, 3, 7: each choice has one finish chunk, and its own index in every chunk', async () => {
  const choices = (await stream({ ...off, n: 2 }, { text: 'one two', step: 1 })).flatMap((chunk) => chunk.choices);
  for (const index of [0, 1]) {
    const own = choices.filter((choice) => choice.index === index);
    assert.ok(own.length > 2, `${own.length} chunks of choice ${index}`);
    assert.deepEqual(
      own.map((choice) => choice.finish_reason).filter((reason) => reason !== null),
      ['stop'],
    );
    assert.deepEqual(own.at(-1)!.delta, {});
  }
  assert.deepEqual(new Set(choices.map((choice) => choice.index)), new Set([0, 1]));
});

// surface: answer.tool-deltas
test('api-bugs 2, 4: finish_reason is there in every chunk, null until the end', async () => {
  const chunks = await stream({ tools }, { text: calling, step: 1 });
  assert.ok(chunks.length > 2, `${chunks.length} chunks`);
  for (const [at, chunk] of chunks.entries()) {
    assert.ok('finish_reason' in chunk.choices[0]!, `chunk ${at}: ${JSON.stringify(chunk)}`);
    assert.equal(chunk.choices[0].finish_reason, at === chunks.length - 1 ? 'tool_calls' : null);
  }
});

// surface: answer.role, answer.content
test('api-bugs 6, 11: the first delta has role and content, and no later one has a role', async () => {
  const [first, ...rest] = (await stream({ tools }, { text: calling, step: 1 })).map(
    (chunk) => chunk.choices[0]!.delta,
  );
  assert.deepEqual(first, { role: 'assistant', content: '' });
  assert.ok(rest.length > 1, `${rest.length} later deltas`);
  for (const delta of rest) {
    assert.equal('role' in delta, false);
    assert.ok(Object.keys(delta).length <= 1, Object.keys(delta).join(', '));
    assert.notEqual(delta.content, '');
  }
});

test('api-bugs 8, 9, 10, 12: kinds, ids, times and names are those of the API, one for a stream', async () => {
  const chunks = await stream({ ...off, model: 'default' }, { text: 'one two', step: 1 });
  assert.equal(new Set(chunks.map(({ id, created }) => `${id} ${created}`)).size, 1);
  for (const { id, object, model } of chunks) {
    assert.match(id, /^chatcmpl-/);
    assert.deepEqual([object, model], ['chat.completion.chunk', 'default']);
  }
  const whole = JSON.parse((await app.post(path, off, { text: 'x' })).body) as { object: string; model: string };
  assert.deepEqual([whole.object, whole.model], ['chat.completion', 'nano']);
  const completion = await app.post('/v1/completions', { prompt: 'a', stream: true }, { text: 'b' });
  for (const chunk of chunksOf(completion.body)) assert.equal((chunk as Chunk).object, 'text_completion');
});

// surface: chat.stream-options, answer.usage-chunk
test('api-bugs 13, 14, 15, 16: usage comes when asked for, once, in a chunk of its own', async () => {
  for (const options of [{}, { stream_options: {} }, { stream_options: { include_usage: false } }]) {
    for (const chunk of await stream({ ...off, ...options }, { text: 'one two', step: 1 })) {
      assert.equal('usage' in chunk, false);
      assert.equal(chunk.choices.length, 1);
    }
  }
  const asked = await stream({ ...off, stream_options: { include_usage: true } }, { text: 'one two', step: 1 });
  const last = asked.at(-1)!;
  assert.deepEqual(last.choices, []);
  assert.equal(last.usage!.total_tokens, last.usage!.prompt_tokens + last.usage!.completion_tokens);
  for (const chunk of asked.slice(0, -1)) assert.equal(chunk.usage, null);
});

// surface: answer.usage
test('api-bugs 17: reasoning that is cut is no more than the answer, and the sums are exact', async () => {
  const output: Output = { text: 'one two three four', outcome: 'length' };
  const { usage } = JSON.parse((await app.post(path, { messages }, output)).body) as { usage: Usage };
  assert.ok(usage.completion_tokens > 0, `${usage.completion_tokens} tokens`);
  assert.equal(usage.completion_tokens_details.reasoning_tokens, usage.completion_tokens);
  assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
});

// surface: answer.continuous-usage
test('api-bugs 18: continuous usage only grows, and ends with the final one', async () => {
  const options = { stream_options: { include_usage: true, continuous_usage_stats: true } };
  const usages = (await stream({ ...off, ...options }, { text: 'one two three', step: 1 })).map(({ usage }) => usage!);
  const counts = usages.map((usage) => usage.completion_tokens);
  assert.deepEqual(
    counts,
    counts.toSorted((a, b) => a - b),
  );
  assert.deepEqual(usages.at(-1), usages.at(-2));
});

// surface: answer.usage
test('api-bugs 19: the prompt of several choices is counted once', async () => {
  const usageOf = async (n: number) =>
    (JSON.parse((await app.post(path, { ...off, n }, { text: 'x' })).body) as { usage: Usage }).usage;
  const [one, two] = [await usageOf(1), await usageOf(2)];
  assert.equal(two.prompt_tokens, one.prompt_tokens);
  assert.equal(two.completion_tokens, 2 * one.completion_tokens);
  assert.equal(two.prompt_tokens_details.cached_tokens, one.prompt_tokens_details.cached_tokens);
});

// surface: errors.context
test('api-bugs 56, 60, 76: what does not fit the context is a 400 with real numbers, streamed or not', async () => {
  const long = { messages: [{ role: 'user', content: 'word '.repeat(9000) }] };
  const wide = { ...off, max_tokens: 5000 };
  for (const body of [long, wide]) {
    const found = await refusal(body);
    assert.deepEqual([found.status, found.code, found.param], [400, 'context_length_exceeded', 'messages']);
    assert.match(found.message, /maximum context length is 4096 tokens/);
    assert.doesNotMatch(found.message, /-\d/);
    assert.deepEqual(await refusal({ ...body, stream: true }), found);
  }
});

// surface: errors.503
test('api-bugs 57: a full queue is a 503 that says when to come back, also for a stream', async () => {
  const full = openApp({
    rooms: {
      ready: () => true,
      start() {
        throw new ApiError('queue_full', 'The queue is full.');
      },
    },
  });
  try {
    for (const streamed of [false, true]) {
      const { status, headers, body } = await full.post(path, { ...off, stream: streamed });
      assert.equal(status, 503, body);
      assert.match(String(headers['retry-after']), /^\d+$/);
      assert.match(body, /"code":"queue_full"/);
    }
  } finally {
    await full.close();
  }
});

// surface: transport.json
test('api-bugs 58: a body that is no object is a 400', async () => {
  for (const body of ['[]', 'null', '"x"', '5', 'true', '', '{']) {
    const found = await refusal(body);
    assert.deepEqual([found.status, found.code], [400, 'invalid_json'], body);
  }
});

// surface: transport.content-type
test('api-bugs 59: a body without its media type is a 415; parameters of the type are fine', async () => {
  const body = JSON.stringify({ messages: [] });
  assert.equal((await app.postWith({}, path, body)).status, 415);
  assert.equal((await app.postWith({ 'content-type': 'text/plain' }, path, body)).status, 415);
  for (const type of ['application/json; charset=utf-8', 'Application/JSON;charset=UTF-8']) {
    assert.equal((await app.postWith({ 'content-type': type }, path, body)).status, 400, type);
  }
});

// surface: transport.numbers
test('api-bugs 61, 62: numbers that would hurt a worker are refused by name', async () => {
  const cases: [fields: object, param: string][] = [
    [{ seed: 2 ** 64 }, 'seed'],
    [{ logit_bias: { '999999999': 5 } }, 'logit_bias'],
    [{ stop_token_ids: [999_999_999] }, 'stop_token_ids[0]'],
    [{ max_tokens: -1 }, 'max_tokens'],
  ];
  for (const [fields, param] of cases) {
    const found = await refusal({ ...off, ...fields });
    assert.deepEqual([found.status, found.param], [400, param]);
  }
  // JSON.parse makes it infinite.
  const found = await refusal(JSON.stringify(off).replace('{', '{"temperature":1e400,'));
  assert.deepEqual([found.status, found.param], [400, 'temperature']);
});

test('api-bugs 53: top_logprobs as a string is a 400 that names it', async () => {
  for (const fields of [
    { logprobs: true, top_logprobs: '5' },
    { logprobs: true, top_logprobs: 21 },
    { top_logprobs: 2 },
  ]) {
    const found = await refusal({ ...off, ...fields });
    assert.deepEqual([found.status, found.param], [400, 'top_logprobs']);
  }
});

// surface: chat.logit-bias
test('api-bugs 62: a bias of a token that there is comes to the workers', async () => {
  const { room } = await app.post(path, { ...off, messages, logit_bias: { '9': 5 } }, { text: 'x' });
  assert.deepEqual([room?.sampling.rules?.biasIds, room?.sampling.rules?.biases], [[9], [5]]);
});

// surface: chat.min-tokens
test('an answer that is to be longer than it may be is refused', async () => {
  const found = await refusal({ ...off, min_tokens: 6, max_tokens: 5 });
  assert.deepEqual([found.status, found.param], [400, 'min_tokens']);
  const generate = await refusal({ text: 'a', sampling_params: { min_tokens: 6, max_new_tokens: 5 } }, '/generate');
  assert.deepEqual([generate.status, generate.param], [400, 'sampling_params.min_tokens']);
});

test('api-bugs 63: a response format without its schema is a 400', async () => {
  const found = await refusal({ ...off, response_format: { type: 'json_schema' } });
  assert.equal(found.status, 400);
  assert.match(found.param ?? '', /^response_format/);
});

// surface: transport.null
test('api-bugs 66: fields that nobody knows are ignored', async () => {
  const body = { ...off, messages: [{ ...messages[0], id: 7 }], store: true, no_such_field: { a: 1 } };
  assert.equal((await app.post(path, body, { text: 'x' })).status, 200);
});

test('api-bugs 71: an echo without new tokens lists the tokens of the prompt', async () => {
  const body = { prompt: 'ab', echo: true, max_tokens: 0, logprobs: 1 };
  const { status, body: answer, room } = await app.post('/v1/completions', body, { text: 'c' });
  // What is known of the prompt comes with a token, which is nobody's.
  assert.deepEqual([status, room?.maxTokens, room?.sampling.promptLogprobs], [200, 1, true], answer);
  const { choices, usage } = JSON.parse(answer) as {
    choices: { text: string; logprobs: { tokens: string[]; token_logprobs: unknown[]; text_offset: number[] } }[];
    usage: { completion_tokens: number };
  };
  assert.deepEqual([choices[0]!.text, usage.completion_tokens], ['ab', 0]);
  const { tokens, token_logprobs: logprobs } = choices[0]!.logprobs;
  assert.equal(tokens.join(''), 'ab');
  assert.deepEqual(logprobs, [null, ...promptChoicesOf(room!.promptTokens, 1).map(({ logprob }) => logprob)]);
  const long = { ...body, prompt: Array.from({ length: 4000 }, () => 5), logprobs: 20 };
  assert.equal((await app.post('/v1/completions', long, { text: 'c' })).status, 200);
  const found = await refusal({ ...long, n: 8 }, '/v1/completions');
  assert.deepEqual([found.status, found.param], [400, 'prompt']);
});

// surface: completions.prompt
test('api-bugs 72: an empty prompt is a 400, an empty message is answered', async () => {
  const empty = await refusal({ prompt: '' }, '/v1/completions');
  assert.deepEqual([empty.status, empty.param], [400, 'prompt']);
  const answered = await app.post(path, { messages: [{ role: 'user', content: '' }] }, { text: 'a</think>b' });
  assert.equal(answered.status, 200);
});

test('api-bugs 77: an error after the first token is an event that SDKs know, and the end of the stream', async () => {
  const error = new ApiError('internal_error', 'A worker failed.');
  const { body } = await app.post(path, { ...off, stream: true }, { text: 'one two', outcome: 'length', error });
  const last = chunksOf(body).at(-1) as unknown as { error: { message: string; code: string } };
  assert.deepEqual([last.error.message, last.error.code], ['A worker failed.', 'internal_error']);
  assert.doesNotMatch(body, /"finish_reason":"/);
});
