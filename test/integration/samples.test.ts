/**
 * Every sample conversation of the embedded model through router, prefill, transfer and decode.
 *
 * The expected ids and texts are the reference implementation's greedy answers (test/data/nano-samples.jsonl), with a
 * smallest top-1 to top-2 gap of 0.2, so an engine in f32 has no excuse for another token.
 */
import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { after, before, test } from 'node:test';
import { promisify } from 'node:util';
import OpenAI from 'openai';
import { createChatParser } from '../../model/chat-parser.ts';
import { plainLogprobs } from '../reference/rules.ts';
import { startCluster, type Cluster } from '../support/cluster.ts';
import { GOLDEN_TOLERANCE, readGolden } from '../support/golden.ts';

const EOS_TEXT = '<｜end▁of▁sentence｜>';

interface ToolCall {
  id: string;
  type: 'function';
  function: { name: string; arguments: string };
}

interface ChatSample {
  skill: string;
  thinking: boolean;
  messages: OpenAI.ChatCompletionMessageParam[];
  tools: OpenAI.ChatCompletionTool[] | null;
  prompt_ids: number[];
  output_ids: number[];
  output_text: string;
}

interface Answer {
  content: string | null;
  reasoning: string | null;
  toolCalls: { name: string; arguments: string }[];
  finishReason: string;
}

const samples = readFileSync(new URL('../data/nano-samples.jsonl', import.meta.url), 'utf8')
  .trim()
  .split('\n')
  .map((line) => JSON.parse(line) as ChatSample);

const run = promisify(execFile);
let cluster: Cluster;
let client: OpenAI;

before(async () => {
  cluster = await startCluster();
  client = new OpenAI({ baseURL: `${cluster.url}/v1`, apiKey: 'unused', maxRetries: 0 });
});
after(async () => {
  await cluster?.stop();
});

async function post<T>(path: string, body: object): Promise<T> {
  const response = await fetch(`${cluster.url}${path}`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify(body),
  });
  const text = await response.text();
  assert.equal(response.status, 200, text);
  return JSON.parse(text) as T;
}

/** POST with curl; returns the body as it came. */
async function curl(path: string, body: object): Promise<string> {
  const { stdout } = await run(
    'curl',
    [
      '-sS',
      '-N',
      '--fail-with-body',
      '-H',
      'content-type: application/json',
      '-d',
      JSON.stringify(body),
      cluster.url + path,
    ],
    { maxBuffer: 1 << 24 },
  );
  return stdout;
}

function eventsOf(stream: string): unknown[] {
  const payloads = stream
    .split('\n\n')
    .filter((event) => event.startsWith('data: '))
    .map((event) => event.slice('data: '.length));
  assert.equal(payloads.pop(), '[DONE]', 'a stream ends with [DONE]');
  return payloads.map((payload) => JSON.parse(payload) as unknown);
}

/** What the chat response must say: the parse of the sample's text. */
function expectedAnswer(sample: ChatSample): Answer {
  const ended = sample.output_text.endsWith(EOS_TEXT);
  const text = ended ? sample.output_text.slice(0, -EOS_TEXT.length) : sample.output_text;
  const parser = createChatParser({ thinking: sample.thinking, tools: sample.tools !== null });
  const answer: Answer = { content: '', reasoning: '', toolCalls: [], finishReason: ended ? 'stop' : 'length' };
  for (const delta of [...parser.push(text), ...parser.end(true)]) {
    if (delta.kind === 'content') answer.content += delta.text;
    else if (delta.kind === 'reasoning') answer.reasoning += delta.text;
    else if (delta.kind === 'tool_name') answer.toolCalls[delta.index] = { name: delta.name, arguments: '' };
    else answer.toolCalls[delta.index]!.arguments += delta.text;
  }
  if (answer.toolCalls.length > 0 && ended) answer.finishReason = 'tool_calls';
  return normalise(answer);
}

// Absent and empty mean the same to a client; which of the two is sent is the API's business and tested there.
function normalise(answer: Answer): Answer {
  return { ...answer, content: answer.content || null, reasoning: answer.reasoning || null };
}

function chatBody(sample: ChatSample): OpenAI.ChatCompletionCreateParamsNonStreaming {
  return {
    model: cluster.model,
    messages: sample.messages,
    ...(sample.tools ? { tools: sample.tools } : {}),
    temperature: 0,
    max_tokens: sample.output_ids.length,
    chat_template_kwargs: { thinking: sample.thinking },
  } as OpenAI.ChatCompletionCreateParamsNonStreaming;
}

function completionBody(sample: ChatSample): OpenAI.CompletionCreateParamsNonStreaming {
  return {
    model: cluster.model,
    prompt: sample.prompt_ids,
    temperature: 0,
    max_tokens: sample.output_ids.length,
    skip_special_tokens: false,
  } as OpenAI.CompletionCreateParamsNonStreaming;
}

type Message = OpenAI.ChatCompletionMessage & { reasoning_content?: string | null };

function answerOf(message: Message, finishReason: string): Answer {
  return normalise({
    content: message.content,
    reasoning: message.reasoning_content ?? null,
    toolCalls: ((message.tool_calls ?? []) as ToolCall[]).map((call) => ({ ...call.function })),
    finishReason,
  });
}

type Delta = {
  content?: string | null;
  reasoning_content?: string | null;
  tool_calls?: { index: number; function?: { name?: string; arguments?: string } }[];
};

function answerOfChunks(chunks: readonly { choices: { delta: Delta; finish_reason: string | null }[] }[]): Answer {
  const answer: Answer = { content: '', reasoning: '', toolCalls: [], finishReason: '' };
  for (const chunk of chunks) {
    const choice = chunk.choices[0];
    if (!choice) continue;
    answer.content += choice.delta.content ?? '';
    answer.reasoning += choice.delta.reasoning_content ?? '';
    for (const call of choice.delta.tool_calls ?? []) {
      const known = (answer.toolCalls[call.index] ??= { name: '', arguments: '' });
      known.name += call.function?.name ?? '';
      known.arguments += call.function?.arguments ?? '';
    }
    if (choice.finish_reason) answer.finishReason = choice.finish_reason;
  }
  return normalise(answer);
}

test('there are samples with and without thinking, with and without tools', () => {
  assert.equal(samples.length, 74);
  for (const thinking of [true, false]) {
    for (const tools of [true, false]) {
      assert.ok(
        samples.some((sample) => sample.thinking === thinking && (sample.tools !== null) === tools),
        `none with thinking ${thinking}, tools ${tools}`,
      );
    }
  }
});

/** All ways to ask for one sample, at once: the requests share batches, as they would in service. */
function checksOf(sample: ChatSample): Record<string, () => Promise<void>> {
  const expected = expectedAnswer(sample);
  return {
    '/tokenize renders the prompt of the reference': async () => {
      const { tokens } = await post<{ tokens: number[] }>('/tokenize', {
        messages: sample.messages,
        ...(sample.tools ? { tools: sample.tools } : {}),
        chat_template_kwargs: { thinking: sample.thinking },
      });
      assert.deepEqual(tokens, sample.prompt_ids);
    },
    'completion through openai': async () => {
      const whole = await client.completions.create(completionBody(sample));
      assert.equal(whole.choices[0]!.text, sample.output_text);
      assert.equal(whole.usage!.prompt_tokens, sample.prompt_ids.length);
      assert.equal(whole.usage!.completion_tokens, sample.output_ids.length);
    },
    'completion through openai, streamed': async () => {
      let streamed = '';
      for await (const chunk of await client.completions.create({ ...completionBody(sample), stream: true })) {
        streamed += chunk.choices[0]?.text ?? '';
      }
      assert.equal(streamed, sample.output_text);
    },
    'completion through curl': async () => {
      const whole = JSON.parse(await curl('/v1/completions', completionBody(sample))) as OpenAI.Completion;
      assert.equal(whole.choices[0]!.text, sample.output_text);
    },
    'completion through curl, streamed': async () => {
      const body = { ...completionBody(sample), stream: true };
      const chunks = eventsOf(await curl('/v1/completions', body)) as OpenAI.Completion[];
      assert.equal(chunks.map((chunk) => chunk.choices[0]?.text ?? '').join(''), sample.output_text);
    },
    'chat through openai': async () => {
      const whole = await client.chat.completions.create(chatBody(sample));
      assert.deepEqual(answerOf(whole.choices[0]!.message as Message, whole.choices[0]!.finish_reason), expected);
    },
    'chat through openai, streamed': async () => {
      const chunks: OpenAI.ChatCompletionChunk[] = [];
      for await (const chunk of await client.chat.completions.create({ ...chatBody(sample), stream: true })) {
        chunks.push(chunk);
      }
      assert.deepEqual(answerOfChunks(chunks as Parameters<typeof answerOfChunks>[0]), expected);
    },
    'chat through curl': async () => {
      const whole = JSON.parse(await curl('/v1/chat/completions', chatBody(sample))) as OpenAI.ChatCompletion;
      assert.deepEqual(answerOf(whole.choices[0]!.message as Message, whole.choices[0]!.finish_reason), expected);
    },
    'chat through curl, streamed': async () => {
      const chunks = eventsOf(await curl('/v1/chat/completions', { ...chatBody(sample), stream: true }));
      assert.deepEqual(answerOfChunks(chunks as Parameters<typeof answerOfChunks>[0]), expected);
    },
  };
}

for (const [index, sample] of samples.entries()) {
  test(`sample ${index} (${sample.skill}${sample.thinking ? ', thinking' : ''})`, { concurrency: true }, async (t) => {
    await Promise.all(Object.entries(checksOf(sample)).map(([name, check]) => t.test(name, check)));
  });
}

interface Logged {
  readonly choices: {
    text: string;
    finish_reason: string;
    logprobs: { tokens: string[]; token_logprobs: number[]; top_logprobs: Record<string, number>[] };
  }[];
  readonly usage: { completion_tokens: number };
}

/** A greedy completion with the 20 likeliest tokens of each of its own. */
async function logged(prompt: string | readonly number[], fields: object): Promise<Logged> {
  const body = { model: cluster.model, prompt, temperature: 0, skip_special_tokens: false, logprobs: 20, ...fields };
  return post<Logged>('/v1/completions', body);
}

// surface: completions.logprobs, chat.logit-bias
test('log probabilities are those of the reference, of the token that prefill chooses and of one that decode does', async () => {
  const golden = readGolden(new URL('../data/golden/nano-mxfp4.json', import.meta.url));
  const positions = Object.keys(golden.logits)
    .map(Number)
    .filter((position) => position > 0);
  for (const position of positions.slice(-3)) {
    const row = golden.logits[position]!;
    const { top } = plainLogprobs(row, 0, 20);
    const prompt = golden.ids.slice(0, position);
    const first = await logged([...prompt, golden.ids[position]!], { max_tokens: 1 });
    // The first token is forced to be the next of the prompt; the model's opinion of the second is the same one.
    const bias = { logit_bias: { [golden.ids[position]!]: 100 }, max_tokens: 2, ignore_eos: true };
    const second = await logged(prompt, bias);
    for (const [body, index] of [
      [first, 0],
      [second, 1],
    ] as const) {
      const { tokens, top_logprobs: tops } = body.choices[0]!.logprobs;
      const found = Object.values(tops[index]!).toSorted((left, right) => right - left);
      assert.equal(tokens.length, index + 1);
      // Both logit and sum are off by as much as a logit of ours may be.
      for (const [rank, { logprob }] of top.entries()) {
        const difference = Math.abs(found[rank]! - logprob);
        assert.ok(difference <= 2 * GOLDEN_TOLERANCE + 2e-5, `position ${position}, rank ${rank}: ${difference}`);
      }
    }
  }
});

// surface: completions.echo, completions.logprobs, generate.stream
test('log probabilities of a prompt are those of the reference, of a cached one too, with the same answer', async () => {
  const golden = readGolden(new URL('../data/golden/nano-mxfp4.json', import.meta.url));
  const positions = Object.keys(golden.logits)
    .map(Number)
    .filter((position) => position + 1 < golden.ids.length);
  assert.ok(positions.length > 2, `${positions.length} positions`);
  const echoed = await logged(golden.ids, { echo: true, max_tokens: 0 });
  const { token_logprobs: known, top_logprobs: tops } = echoed.choices[0]!.logprobs;
  assert.deepEqual([known.length, known[0], echoed.usage.completion_tokens], [golden.ids.length, null, 0]);
  for (const position of positions) {
    const next = golden.ids[position + 1]!;
    const { logprob, top } = plainLogprobs(golden.logits[position]!, next, 20);
    const tolerance = 2 * GOLDEN_TOLERANCE + 2e-5;
    const difference = Math.abs(known[position + 1]! - logprob);
    assert.ok(difference <= tolerance, `position ${position}: ${difference}`);
    const found = Object.values(tops[position + 1]!).toSorted((left, right) => right - left);
    for (const [rank, each] of top.entries()) {
      assert.ok(Math.abs(found[rank]! - each.logprob) <= tolerance, `position ${position}, rank ${rank}`);
    }
  }

  // A prompt that the cache has is told all the same, its answer is the same, and so it is in SGLang's words.
  const prompt = samples[1]!.prompt_ids;
  const { choices } = await logged(prompt, { max_tokens: 6, ignore_eos: true });
  const again = await logged(prompt, { max_tokens: 6, ignore_eos: true, echo: true });
  assert.deepEqual(again.choices[0]!.logprobs.tokens.slice(-6), choices[0]!.logprobs.tokens);
  assert.deepEqual(again.choices[0]!.logprobs.token_logprobs.slice(-6), choices[0]!.logprobs.token_logprobs);
  const fields = { return_logprob: true, logprob_start_len: 0, sampling_params: { max_new_tokens: 1 } };
  const { meta_info: meta } = await post<{ meta_info: { input_token_logprobs: [number | null, number][] } }>(
    '/generate',
    { input_ids: prompt, ...fields },
  );
  assert.deepEqual(
    meta.input_token_logprobs.map(([logprob, id]) => [logprob, id]),
    prompt.map((id, index) => [again.choices[0]!.logprobs.token_logprobs[index], id]),
  );
});

// surface: chat.penalties, chat.repetition
test('penalties count what the answer has, on prefill and decode, and choose what they leave the likeliest', async () => {
  const [presence, frequency] = [1.25, 0.5];
  const fields = { presence_penalty: presence, frequency_penalty: frequency, max_tokens: 24, ignore_eos: true };
  // Nothing that nano was trained for: there it is too sure to be moved by any penalty.
  const prompt = 'Once upon a time the the';
  const plain = await logged(prompt, { max_tokens: 24, ignore_eos: true });
  const company = Promise.all(samples.slice(1, 9).map(({ prompt_ids: ids }) => logged(ids, fields)));
  const { choices } = await logged(prompt, fields);
  await company;
  const { tokens, top_logprobs: tops } = choices[0]!.logprobs;
  assert.equal(tokens.length, 24);
  assert.notEqual(choices[0]!.text, plain.choices[0]!.text);
  const counts = new Map<string, number>();
  for (const [index, token] of tokens.entries()) {
    const valueOf = (name: string): number => {
      const count = counts.get(name) ?? 0;
      return tops[index]![name]! - frequency * count - (count > 0 ? presence : 0);
    };
    const best = Object.keys(tops[index]!).reduce((most, name) => (valueOf(name) > valueOf(most) ? name : most));
    // Names are not unique where tokens are no whole text; those that are not equal to the best must be as good.
    if (token in tops[index]!)
      assert.ok(valueOf(token) >= valueOf(best) - 1e-3, `token ${index}: ${token}, not ${best}`);
    counts.set(token, (counts.get(token) ?? 0) + 1);
  }
  assert.deepEqual((await logged(prompt, fields)).choices, choices, 'the same alone as in company');
  const repeated = await logged(prompt, { repetition_penalty: 1.8, max_tokens: 24, ignore_eos: true });
  assert.notEqual(repeated.choices[0]!.text, plain.choices[0]!.text);
});

// surface: chat.min-tokens
test('an answer has as many tokens as it must have at least, and ends where it may', async () => {
  const ended = samples.find(({ output_ids: ids, output_text: text }) => ids.length < 40 && text.endsWith(EOS_TEXT))!;
  const count = ended.output_ids.length;
  const longer = await logged(ended.prompt_ids, { min_tokens: count + 3, max_tokens: count + 8 });
  assert.ok(longer.usage.completion_tokens >= count + 3, `${longer.usage.completion_tokens} tokens`);
  assert.ok(!longer.choices[0]!.text.slice(0, -EOS_TEXT.length).includes(EOS_TEXT), longer.choices[0]!.text);
  const same = await logged(ended.prompt_ids, { min_tokens: count, max_tokens: count + 8 });
  assert.notEqual(same.usage.completion_tokens, count, 'the end would be token number min_tokens');
  const free = await logged(ended.prompt_ids, { min_tokens: count - 1, max_tokens: count + 8 });
  assert.deepEqual([free.choices[0]!.text, free.usage.completion_tokens], [ended.output_text, count]);
});

test('rules that leave no token end their own request, and no worker', async () => {
  const everything = Array.from({ length: 1024 }, (_, id) => id);
  const response = await fetch(`${cluster.url}/v1/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ model: cluster.model, prompt: 'a', min_tokens: 1, stop_token_ids: everything }),
  });
  const { error } = (await response.json()) as { error: { message: string; code: string } };
  assert.deepEqual([response.status, error.code], [400, 'invalid_value']);
  assert.match(error.message, /leave no token/);
  const { choices } = await logged(samples[0]!.prompt_ids, { max_tokens: samples[0]!.output_ids.length });
  assert.equal(choices[0]!.text, samples[0]!.output_text);
});

// surface: chat.logprobs
test('log probabilities of a chat are the same streamed and whole, of reasoning and content', async () => {
  const sample = samples.find(({ thinking, tools }) => thinking && tools === null)!;
  const body = { ...chatBody(sample), logprobs: true, top_logprobs: 3 };
  const whole = await client.chat.completions.create(body);
  const streamed: OpenAI.ChatCompletionTokenLogprob[] = [];
  for await (const { choices } of await client.chat.completions.create({ ...body, stream: true })) {
    streamed.push(...(choices[0]?.logprobs?.content ?? []));
  }
  const { message, logprobs } = whole.choices[0]!;
  assert.deepEqual(streamed, logprobs!.content);
  const { reasoning_content: reasoning } = message as Message;
  const bytes = Buffer.from(streamed.flatMap((entry) => entry.bytes ?? []));
  assert.equal(bytes.toString().trim(), `${reasoning ?? ''}${message.content ?? ''}`.trim());
  for (const { logprob, top_logprobs: top } of streamed) {
    assert.equal(top.length, 3);
    assert.equal(logprob, top[0]!.logprob, 'a greedy token is the likeliest');
  }
});
