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
import { startCluster, type Cluster } from '../support/cluster.ts';

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
      assert.ok(samples.some((sample) => sample.thinking === thinking && (sample.tools !== null) === tools));
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
