/**
 * The client libraries that agents are written with, against a running server with the embedded model: whole answers
 * and streams, tool loops, clients that leave in mid-answer, and errors as the classes that each library has for them.
 *
 * Everything is greedy, so that each library must come to the same answer. What the model says is in
 * nano-samples.jsonl; how the API splits it is tested in other files.
 */
import assert from 'node:assert/strict';
import { after, before, describe, test } from 'node:test';
import { inspect } from 'node:util';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import Anthropic from '@anthropic-ai/sdk';
import { betaTool } from '@anthropic-ai/sdk/helpers/beta/json-schema';
import { jsonSchemaOutputFormat } from '@anthropic-ai/sdk/helpers/json-schema';
import { ContextOverflowError } from '@langchain/core/errors';
import {
  AIMessageChunk,
  HumanMessage,
  ToolMessage,
  type BaseMessage,
  type UsageMetadata,
} from '@langchain/core/messages';
import { tool as langchainTool } from '@langchain/core/tools';
import { ChatOpenAI, OpenAI as LangchainCompletions } from '@langchain/openai';
import { APICallError, generateText, Output, stepCountIs, streamText, tool as aiTool } from 'ai';
import OpenAI from 'openai';
import { zodFunction, zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';
import { ApiError } from '../../server/errors.ts';
import { closeApp } from '../../server/http.ts';
import { readMetrics, startCluster, sumOf, untilMetrics, type Cluster } from '../support/cluster.ts';
import { untilQuiet } from '../support/quiet.ts';
import { listen } from '../support/scripted-rooms.ts';

// LangChain reports runs to a service when a variable asks for it. Not from here, whoever set it.
process.env['LANGSMITH_TRACING'] = 'false';
process.env['LANGCHAIN_TRACING_V2'] = 'false';

const MODEL = 'nano';
const GREETING = { reasoning: 'A greeting.', content: 'Hello! How can I help?' };
const FILE = { name: 'mirror.txt', text: 'wallet train pipe statue' };
const QUESTION = `Show me ${FILE.name}`;
const READ_FILE = 'read_file';
const DESCRIPTION = 'Read a file';
const pathSchema = z.object({ path: z.string().describe('The path') });
const plainPathSchema = {
  type: 'object',
  properties: { path: { type: 'string', description: 'The path' } },
  required: ['path'],
} as const;
const PERSON = 'Anton is 67 years old and lives in Quito. Return JSON with the keys age, name.';
const personSchema = z.object({ age: z.number().int().min(0).max(150), name: z.string().max(20) });
const plainPersonSchema = {
  type: 'object',
  properties: { age: { type: 'integer' }, name: { type: 'string' } },
  required: ['age', 'name'],
  additionalProperties: false,
} as const;
const ANSWER = `The file says: ${FILE.text}`;
/** The model repeats a list that is too long for it until the context is full: far longer than any test waits. */
const ENDLESS = `Repeat: ${Array<string>(8).fill('Dublin Toronto blue Tunis Madrid net silver kite Lars Carl Gina').join(' ')}`;
/** What is cut off must be free after this; seconds only because the machine may be busy. */
const FREE_MS = 20_000;

let cluster: Cluster;
before(async () => {
  cluster = await startCluster();
});
after(async () => {
  await cluster?.stop();
});

/** Something that the schema allows: what the model knows of people is not the point. */
function assertPerson(value: unknown): void {
  const { name } = personSchema.parse(value);
  assert.ok(name.length <= 20, `the name ${name}`);
}

/** What a tool of the tests is called with, and what it says. */
function readFile(paths: string[], path: string): string {
  paths.push(path);
  return FILE.text;
}

const cancelledCount = async (): Promise<number> =>
  sumOf(await readMetrics(cluster.url), 'handoff_request_outcomes_total', { outcome: 'cancelled' });

/** `leave` opens a request and gives it up; nothing of it may be left, and it counts as cancelled. */
async function givesUp(leave: () => Promise<void>): Promise<void> {
  const before = await cancelledCount();
  await leave();
  await untilQuiet(cluster.url, FREE_MS);
  assert.equal((await cancelledCount()) - before, 1);
}

/** Resolves when the server is busy with a request. */
const untilBusy = () => untilMetrics(cluster.url, FREE_MS, (samples) => sumOf(samples, 'handoff_active_requests') > 0);

/** Abort a request that has no stream while the server is busy with it. */
async function abortWhole(ask: (signal: AbortSignal) => Promise<unknown>, expected: (error: unknown) => boolean) {
  const aborter = new AbortController();
  const answer = ask(aborter.signal);
  const rejected = assert.rejects(answer, expected);
  await untilBusy();
  aborter.abort();
  await rejected;
}

const isAbort = (error: unknown) => error instanceof Error && /abort/i.test(`${error.name} ${error.message}`);

describe('openai', () => {
  let client: OpenAI;
  before(() => {
    client = new OpenAI({ baseURL: `${cluster.url}/v1`, apiKey: 'none', maxRetries: 0 });
  });
  const asked = { model: MODEL, temperature: 0 } as const;
  const hello = [{ role: 'user', content: 'Hello' }] as const satisfies OpenAI.ChatCompletionMessageParam[];
  const aboutPerson = [{ role: 'user', content: PERSON }] as const satisfies OpenAI.ChatCompletionMessageParam[];
  const endless = [{ role: 'user', content: ENDLESS }] as const satisfies OpenAI.ChatCompletionMessageParam[];

  test('lists and finds the model', async () => {
    const { data } = await client.models.list();
    assert.deepEqual(
      data.map(({ id }) => id),
      [MODEL],
    );
    assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
  });

  test('gets an answer whole, as a stream and through the stream helper', async () => {
    const whole = await client.chat.completions.create({ ...asked, messages: [...hello] });
    const message = whole.choices[0]!.message as OpenAI.ChatCompletionMessage & { reasoning_content?: string };
    assert.deepEqual([message.content, message.reasoning_content], [GREETING.content, GREETING.reasoning]);
    const { usage } = whole;
    assert.equal(usage!.total_tokens, usage!.prompt_tokens + usage!.completion_tokens);
    assert.ok(usage!.completion_tokens_details!.reasoning_tokens! < usage!.completion_tokens, inspect(usage));

    const options = { stream: true, stream_options: { include_usage: true } } as const;
    let [content, reasoning] = ['', ''];
    let streamedUsage: OpenAI.CompletionUsage | undefined;
    for await (const chunk of await client.chat.completions.create({ ...asked, messages: [...hello], ...options })) {
      const delta = chunk.choices[0]?.delta as { content?: string; reasoning_content?: string } | undefined;
      content += delta?.content ?? '';
      reasoning += delta?.reasoning_content ?? '';
      streamedUsage = chunk.usage ?? streamedUsage;
    }
    assert.deepEqual({ content, reasoning }, GREETING);
    // The prompt was in the cache the second time; all else is alike.
    assert.deepEqual(
      [streamedUsage!.prompt_tokens, streamedUsage!.completion_tokens],
      [usage!.prompt_tokens, usage!.completion_tokens],
    );

    const texts: string[] = [];
    const runner = client.chat.completions.stream({ ...asked, messages: [...hello] });
    runner.on('content', (delta) => texts.push(delta));
    const final = await runner.finalChatCompletion();
    assert.equal(final.choices[0]!.message.content, GREETING.content);
    assert.equal(texts.join(''), GREETING.content);
  });

  for (const stream of [false, true]) {
    test(`runs a tool loop (stream: ${stream})`, async () => {
      const paths: string[] = [];
      const tool = zodFunction({
        name: READ_FILE,
        description: DESCRIPTION,
        parameters: pathSchema,
        function: ({ path }) => readFile(paths, path),
      });
      const body = { ...asked, messages: [{ role: 'user' as const, content: QUESTION }], tools: [tool] };
      const runner = stream
        ? client.chat.completions.runTools({ ...body, stream: true })
        : client.chat.completions.runTools(body);
      assert.equal(await runner.finalContent(), ANSWER);
      assert.deepEqual(paths, [FILE.name]);
    });
  }

  // surface: endpoint.completions
  test('continues texts, and counts choices by index', async () => {
    const body = { ...asked, prompt: 'The code of the', max_tokens: 8, n: 2 };
    const whole = await client.completions.create(body);
    const texts = ['', ''];
    for await (const { choices } of await client.completions.create({ ...body, stream: true })) {
      for (const { index, text } of choices) texts[index] += text;
    }
    assert.deepEqual(
      whole.choices.map(({ text }) => text),
      texts,
    );
    assert.notEqual(texts[0], '');
    assert.equal(texts[0], texts[1]);
  });

  // surface: responses.stream
  test('gets a response, whole and through the stream helper, with a call and its result', async () => {
    const whole = await client.responses.create({ ...asked, input: 'Hello' });
    assert.equal(whole.output_text, GREETING.content);
    const streamed = await client.responses.stream({ ...asked, input: 'Hello' }).finalResponse();
    assert.equal(streamed.output_text, GREETING.content);
    assert.deepEqual(
      streamed.output.map(({ type }) => type),
      ['reasoning', 'message'],
    );
    const tools = [
      { type: 'function', name: READ_FILE, description: DESCRIPTION, parameters: plainPathSchema, strict: null },
    ] as const satisfies OpenAI.Responses.FunctionTool[];
    const input: OpenAI.Responses.ResponseInput = [{ role: 'user', content: QUESTION }];
    const first = await client.responses.create({ ...asked, input, tools: [...tools] });
    const call = first.output.find(({ type }) => type === 'function_call');
    assert.ok(call?.type === 'function_call', inspect(first.output));
    assert.deepEqual([call.name, JSON.parse(call.arguments)], [READ_FILE, { path: FILE.name }]);
    const result = { type: 'function_call_output', call_id: call.call_id, output: FILE.text } as const;
    const second = await client.responses.create({
      ...asked,
      input: [...input, ...(first.output as OpenAI.Responses.ResponseInputItem[]), result],
      tools: [...tools],
    });
    assert.equal(second.output_text, ANSWER);
  });

  // surface: format.json-schema, tools.forced
  test('parses an answer by a schema, whole and as a stream, and gets a call that it asks for', async () => {
    const format = zodResponseFormat(personSchema, 'person');
    const body = { ...asked, messages: [...aboutPerson], response_format: format };
    const whole = await client.chat.completions.parse(body);
    assertPerson(whole.choices[0]!.message.parsed);
    const streamed = await client.chat.completions.stream(body).finalChatCompletion();
    assert.deepEqual(streamed.choices[0]!.message.parsed, whole.choices[0]!.message.parsed);
    const response = await client.responses.parse({
      ...asked,
      input: PERSON,
      text: { format: zodTextFormat(personSchema, 'person') },
    });
    assertPerson(response.output_parsed);
    const tools = [zodFunction({ name: READ_FILE, description: DESCRIPTION, parameters: pathSchema })];
    for (const choice of ['required', { type: 'function', function: { name: READ_FILE } }] as const) {
      const called = await client.chat.completions.parse({
        ...asked,
        messages: [...hello],
        tools,
        tool_choice: choice,
        max_completion_tokens: 300,
      });
      const { message, finish_reason: reason } = called.choices[0]!;
      assert.deepEqual([message.tool_calls?.[0]?.function.name, reason], [READ_FILE, 'tool_calls']);
      pathSchema.parse(message.tool_calls![0]!.function.parsed_arguments);
    }
  });

  // surface: chat.logprobs, chat.logit-bias, completions.logprobs
  test('gets log probabilities with a chat answer and a text, and can steer the choice of tokens', async () => {
    const body = { ...asked, messages: [...hello], logprobs: true, top_logprobs: 2 };
    const whole = await client.chat.completions.create(body);
    const logged = whole.choices[0]!.logprobs!.content!;
    assert.notDeepEqual(logged, []);
    for (const { logprob, top_logprobs: top, bytes } of logged) {
      assert.ok(logprob <= 0, `log probability ${logprob}`);
      assert.deepEqual([top.length, top[0]?.logprob, bytes === null], [2, logprob, false]);
    }
    const streamed = await client.chat.completions.stream(body).finalChatCompletion();
    assert.deepEqual(streamed.choices[0]!.logprobs!.content, logged);
    const text = { ...asked, prompt: 'The code of the', max_tokens: 1, logprobs: 3 };
    const first = (await client.completions.create(text)).choices[0]!;
    assert.equal(first.logprobs!.tokens![0], first.text);
    const { tokens } = (await (
      await fetch(`${cluster.url}/tokenize`, {
        method: 'POST',
        headers: { 'content-type': 'application/json' },
        body: JSON.stringify({ prompt: first.text }),
      })
    ).json()) as { tokens: number[] };
    assert.equal(tokens.length, 1);
    const banned = await client.completions.create({ ...text, logit_bias: { [tokens[0]!]: -100 } });
    assert.notEqual(banned.choices[0]!.text, first.text);
    const penalised = { ...text, max_tokens: 60, presence_penalty: 2, frequency_penalty: 2 };
    const [free, varied] = [
      await client.completions.create({ ...text, max_tokens: 60 }),
      await client.completions.create(penalised),
    ].map(({ choices }) => new Set(choices[0]!.logprobs!.tokens).size);
    assert.ok(varied! > free!, `${varied} tokens of 60 are different, ${free} without penalties`);
  });

  test('leaves a stream by break, by its controller, by a signal, and a whole answer by a signal', async () => {
    const body = { ...asked, messages: [...endless] };
    await givesUp(async () => {
      for await (const chunk of await client.chat.completions.create({ ...body, stream: true })) {
        if (chunk.choices[0]?.delta.content !== '') break;
      }
    });
    await givesUp(async () => {
      const stream = await client.chat.completions.create({ ...body, stream: true });
      for await (const _ of stream) stream.controller.abort();
    });
    await givesUp(async () => {
      const runner = client.chat.completions.stream(body);
      runner.once('content', () => runner.abort());
      await assert.rejects(runner.done(), OpenAI.APIUserAbortError);
    });
    await givesUp(() =>
      abortWhole(
        (signal) => client.chat.completions.create(body, { signal }),
        (error) => error instanceof OpenAI.APIUserAbortError,
      ),
    );
  });
});

describe('ai with @ai-sdk/openai-compatible', () => {
  let model: ReturnType<ReturnType<typeof createOpenAICompatible>>;
  before(() => {
    const baseURL = `${cluster.url}/v1`;
    model = createOpenAICompatible({ name: 'handoff', baseURL, apiKey: 'none', includeUsage: true })(MODEL);
  });
  const asked = { temperature: 0, maxRetries: 0 } as const;

  test('gets an answer whole and as a stream, with reasoning and usage', async () => {
    const whole = await generateText({ ...asked, model, prompt: 'Hello' });
    assert.deepEqual({ reasoning: whole.reasoningText, content: whole.text }, GREETING);
    assert.equal(whole.finishReason, 'stop');
    const streamed = streamText({ ...asked, model, prompt: 'Hello' });
    let [content, reasoning] = ['', ''];
    for await (const part of streamed.fullStream) {
      assert.notEqual(part.type, 'error');
      if (part.type === 'text-delta') content += part.text;
      if (part.type === 'reasoning-delta') reasoning += part.text;
    }
    assert.deepEqual({ reasoning, content }, GREETING);
    const usage = await streamed.usage;
    assert.deepEqual(
      [usage.inputTokens, usage.outputTokens, usage.totalTokens],
      [whole.usage.inputTokens, whole.usage.outputTokens, whole.usage.totalTokens],
    );
  });

  test('runs a tool in steps, with the reasoning of the first handed back, whole and as a stream', async () => {
    const paths: string[] = [];
    const tools = {
      [READ_FILE]: aiTool({
        description: DESCRIPTION,
        inputSchema: pathSchema,
        execute: ({ path }) => readFile(paths, path),
      }),
    };
    const body = { ...asked, model, prompt: QUESTION, tools, stopWhen: stepCountIs(3) };
    const whole = await generateText(body);
    assert.equal(whole.text, ANSWER);
    assert.deepEqual(
      whole.steps.map(({ finishReason }) => finishReason),
      ['tool-calls', 'stop'],
    );
    const streamed = streamText(body);
    await streamed.consumeStream();
    assert.equal(await streamed.text, ANSWER);
    assert.deepEqual(paths, [FILE.name, FILE.name]);
  });

  test('gets an object by a schema, whole and as a stream, and a call that it asks for', async () => {
    const baseURL = `${cluster.url}/v1`;
    const strict = createOpenAICompatible({
      name: 'handoff',
      baseURL,
      apiKey: 'none',
      supportsStructuredOutputs: true,
    });
    const body = { ...asked, model: strict(MODEL), prompt: PERSON, output: Output.object({ schema: personSchema }) };
    assertPerson((await generateText(body)).output);
    const streamed = streamText(body);
    await streamed.consumeStream();
    assertPerson(await streamed.output);
    const read = aiTool({ description: DESCRIPTION, inputSchema: pathSchema, execute: ({ path }) => path });
    const tools = { [READ_FILE]: read };
    const forced = { ...asked, model, prompt: 'Hello', tools, toolChoice: 'required', maxOutputTokens: 300 } as const;
    const { toolCalls } = await generateText(forced);
    assert.equal(toolCalls[0]?.toolName, READ_FILE);
    pathSchema.parse(toolCalls[0].input);
  });

  test('leaves a stream and a whole answer by a signal', async () => {
    await givesUp(async () => {
      const aborter = new AbortController();
      const stream = streamText({ ...asked, model, prompt: ENDLESS, abortSignal: aborter.signal });
      const kinds = new Set<string>();
      for await (const { type } of stream.fullStream) {
        kinds.add(type);
        if (type === 'reasoning-delta' || type === 'text-delta') aborter.abort();
      }
      assert.ok(kinds.has('abort') && !kinds.has('error'), [...kinds].join(', '));
    });
    await givesUp(() =>
      abortWhole((abortSignal) => generateText({ ...asked, model, prompt: ENDLESS, abortSignal }), isAbort),
    );
  });
});

describe('@langchain/openai', () => {
  let model: ChatOpenAI;
  const options = () => ({
    model: MODEL,
    apiKey: 'none',
    temperature: 0,
    maxRetries: 0,
    configuration: { baseURL: `${cluster.url}/v1` },
  });
  before(() => {
    model = new ChatOpenAI(options());
  });
  const readFileTool = (paths: string[]) =>
    langchainTool(({ path }) => readFile(paths, path), {
      name: READ_FILE,
      description: DESCRIPTION,
      schema: pathSchema,
    });

  test('gets an answer whole and as a stream, with reasoning and usage', async () => {
    const whole = await model.invoke('Hello');
    assert.equal(whole.content, GREETING.content);
    let sum: AIMessageChunk | undefined;
    for await (const chunk of await model.stream('Hello')) sum = sum === undefined ? chunk : sum.concat(chunk);
    assert.equal(sum!.content, GREETING.content);
    assert.equal(sum!.additional_kwargs['reasoning_content'], GREETING.reasoning);
    const usageOf = (message: { usage_metadata?: unknown }) => message.usage_metadata as UsageMetadata;
    assert.ok(usageOf(whole).output_tokens > 0, inspect(usageOf(whole)));
    assert.equal(usageOf(sum!).output_tokens, usageOf(whole).output_tokens);
    assert.equal(usageOf(sum!).total_tokens, usageOf(whole).total_tokens);
  });

  test('runs a tool loop, whole and as a stream', async () => {
    const paths: string[] = [];
    const tool = readFileTool(paths);
    const bound = model.bindTools([tool]);
    for (const stream of [false, true]) {
      const ask = async (messages: BaseMessage[]) => {
        if (!stream) return bound.invoke(messages);
        let sum: AIMessageChunk | undefined;
        for await (const chunk of await bound.stream(messages)) sum = sum === undefined ? chunk : sum.concat(chunk);
        return sum!;
      };
      const messages: BaseMessage[] = [new HumanMessage(QUESTION)];
      const first = await ask(messages);
      assert.equal(first.tool_calls?.length, 1);
      messages.push(first);
      for (const call of first.tool_calls) {
        const result = (await tool.invoke({ ...call, type: 'tool_call' })) as ToolMessage;
        assert.equal(result.tool_call_id, call.id);
        messages.push(result);
      }
      assert.equal((await ask(messages)).content, ANSWER);
    }
    assert.deepEqual(paths, [FILE.name, FILE.name]);
  });

  test('gets an object by a schema or by a call, and log probabilities', async () => {
    for (const method of ['jsonSchema', 'functionCalling'] as const) {
      assertPerson(await model.withStructuredOutput(personSchema, { name: 'person', method }).invoke(PERSON));
    }
    const logged = await new ChatOpenAI({ ...options(), logprobs: true, topLogprobs: 1 }).invoke('Hello');
    const { content } = logged.response_metadata['logprobs'] as { content: unknown[] };
    assert.notDeepEqual(content, []);
  });

  test('continues a text', async () => {
    const completions = new LangchainCompletions({ ...options(), maxTokens: 8 });
    const text = await completions.invoke('The code of the');
    let streamed = '';
    for await (const piece of await completions.stream('The code of the')) streamed += piece;
    assert.notEqual(text, '');
    assert.equal(streamed, text);
  });

  test('leaves a stream by break and by a signal, and a whole answer by a signal', async () => {
    await givesUp(async () => {
      for await (const chunk of await model.stream(ENDLESS)) {
        if (chunk.content !== '' || chunk.additional_kwargs['reasoning_content'] !== undefined) break;
      }
    });
    await givesUp(async () => {
      const aborter = new AbortController();
      await assert.rejects(async () => {
        for await (const _ of await model.stream(ENDLESS, { signal: aborter.signal })) aborter.abort();
      }, isAbort);
    });
    await givesUp(() => abortWhole((signal) => model.invoke(ENDLESS, { signal }), isAbort));
  });
});

describe('@anthropic-ai/sdk', () => {
  let client: Anthropic;
  before(() => {
    client = new Anthropic({ baseURL: cluster.url, apiKey: 'none', maxRetries: 0 });
  });
  const asked = { model: MODEL, max_tokens: 400, temperature: 0 } as const;
  const hello = [{ role: 'user', content: 'Hello' }] as const satisfies Anthropic.MessageParam[];
  const thinking = { type: 'enabled', budget_tokens: 1024 } as const;

  // surface: messages.request
  test('gets an answer whole and through the stream helper, and counts its prompt', async () => {
    const whole = await client.messages.create({ ...asked, messages: [...hello], thinking });
    const stream = client.messages.stream({ ...asked, messages: [...hello], thinking });
    let text = '';
    let thought = '';
    stream.on('text', (delta) => (text += delta)).on('thinking', (delta) => (thought += delta));
    const streamed = await stream.finalMessage();
    for (const { content, stop_reason: reason } of [whole, streamed]) {
      const [first, second] = content;
      assert.ok(
        first?.type === 'thinking' && second?.type === 'text',
        `content of types ${content.map(({ type }) => type).join(', ')}`,
      );
      assert.deepEqual({ reasoning: first.thinking, content: second.text }, GREETING);
      assert.equal(reason, 'end_turn');
    }
    assert.deepEqual({ reasoning: thought, content: text }, GREETING);
    assert.equal(streamed.usage.output_tokens, whole.usage.output_tokens);
    const counted = await client.messages.countTokens({ model: MODEL, messages: [...hello], thinking });
    const { input_tokens: computed, cache_read_input_tokens: cached } = whole.usage;
    assert.equal(counted.input_tokens, computed + (cached ?? 0));
  });

  for (const stream of [false, true]) {
    test(`runs a tool loop (stream: ${stream})`, async () => {
      const paths: string[] = [];
      const tool = betaTool({
        name: READ_FILE,
        description: DESCRIPTION,
        inputSchema: plainPathSchema,
        run: ({ path }) => readFile(paths, path),
      });
      const body = { ...asked, messages: [{ role: 'user' as const, content: QUESTION }], tools: [tool] };
      const final = await client.beta.messages.toolRunner({ ...body, stream });
      assert.equal(final.stop_reason, 'end_turn');
      assert.deepEqual(final.content.map((block) => (block.type === 'text' ? block.text : null)).at(-1), ANSWER);
      assert.deepEqual(paths, [FILE.name]);
    });
  }

  test('gets an object by a schema, and a call that it asks for', async () => {
    const parsed = await client.messages.parse({
      ...asked,
      messages: [{ role: 'user', content: PERSON }],
      thinking: { type: 'disabled' },
      output_config: { format: jsonSchemaOutputFormat(plainPersonSchema) },
    });
    assertPerson(parsed.parsed_output);
    const tool = {
      name: READ_FILE,
      description: DESCRIPTION,
      input_schema: { ...plainPathSchema, required: ['path'] },
    };
    for (const choice of [{ type: 'any' }, { type: 'tool', name: READ_FILE }] as const) {
      const called = await client.messages.create({
        ...asked,
        messages: [...hello],
        tools: [tool],
        tool_choice: choice,
      });
      const block = called.content.find(({ type }) => type === 'tool_use');
      assert.ok(block?.type === 'tool_use', inspect(called.content));
      assert.deepEqual([block.name, called.stop_reason], [READ_FILE, 'tool_use']);
      pathSchema.parse(block.input);
    }
  });

  test('leaves a stream by break and by its controller, and a whole answer by a signal', async () => {
    const body = { ...asked, max_tokens: 20_000, messages: [{ role: 'user' as const, content: ENDLESS }] };
    await givesUp(async () => {
      for await (const { type } of await client.messages.create({ ...body, stream: true })) {
        if (type === 'content_block_delta') break;
      }
    });
    await givesUp(async () => {
      const stream = client.messages.stream(body);
      stream.once('streamEvent', () => stream.abort());
      await assert.rejects(stream.done(), Anthropic.APIUserAbortError);
    });
    await givesUp(() =>
      abortWhole(
        (signal) => client.messages.create(body, { signal }),
        (error) => error instanceof Anthropic.APIUserAbortError,
      ),
    );
  });
});

describe('errors are the classes of each library', () => {
  let server: Awaited<ReturnType<typeof listen>>;
  before(async () => {
    server = await listen({}, { apiKeys: ['right'] });
  });
  after(() => closeApp(server.app, 0));

  /** How a library is asked with a key, for a model, with a temperature and a text. */
  type Ask = (request: { key?: string; model?: string; temperature?: number; text?: string }) => Promise<unknown>;
  const asks: Record<string, Ask> = {
    openai: ({ key = 'right', model = MODEL, temperature = 0, text = 'hi' }) =>
      new OpenAI({ baseURL: `${server.url}/v1`, apiKey: key, maxRetries: 0 }).chat.completions.create({
        model,
        temperature,
        messages: [{ role: 'user', content: text }],
      }),
    ai: ({ key = 'right', model = MODEL, temperature = 0, text = 'hi' }) =>
      generateText({
        model: createOpenAICompatible({ name: 'x', baseURL: `${server.url}/v1`, apiKey: key })(model),
        maxRetries: 0,
        temperature,
        prompt: text,
      }),
    langchain: ({ key = 'right', model = MODEL, temperature = 0, text = 'hi' }) =>
      new ChatOpenAI({
        model,
        temperature,
        apiKey: key,
        maxRetries: 0,
        configuration: { baseURL: `${server.url}/v1` },
      }).invoke(text),
    anthropic: ({ key = 'right', model = MODEL, temperature = 0, text = 'hi' }) =>
      new Anthropic({ baseURL: server.url, apiKey: key, maxRetries: 0 }).messages.create({
        model,
        temperature,
        max_tokens: 9,
        messages: [{ role: 'user', content: text }],
      }),
  };
  /** The status that an error of any of them carries. */
  function statusOf(error: unknown): number | undefined {
    return APICallError.isInstance(error) ? error.statusCode : (error as { status?: number }).status;
  }
  const failing: Record<string, () => Promise<void>> = {
    openai: () =>
      assert.rejects(asks['openai']!({ key: 'wrong' }), (error) => {
        assert.ok(error instanceof OpenAI.AuthenticationError, inspect(error));
        assert.equal(error.code, 'invalid_api_key');
        assert.match(error.requestID ?? '', /^[0-9a-f-]{36}$/);
        return true;
      }),
    ai: () =>
      assert.rejects(asks['ai']!({ key: 'wrong' }), (error) => {
        assert.ok(APICallError.isInstance(error), inspect(error));
        assert.match(error.message, /API key/);
        return !error.isRetryable;
      }),
    langchain: () =>
      assert.rejects(asks['langchain']!({ key: 'wrong' }), (error) => {
        assert.ok(error instanceof Error && 'lc_error_code' in error, inspect(error));
        return error.lc_error_code === 'MODEL_AUTHENTICATION';
      }),
    anthropic: () =>
      assert.rejects(asks['anthropic']!({ key: 'wrong' }), (error) => {
        assert.ok(error instanceof Anthropic.AuthenticationError, inspect(error));
        assert.match(error.requestID ?? '', /^[0-9a-f-]{36}$/);
        return /API key/.test(error.message);
      }),
  };

  for (const [name, ask] of Object.entries(asks)) {
    test(`${name}: keys, fields, models and a full queue`, async () => {
      await failing[name]!();
      const refusals: [request: Parameters<Ask>[0], status: number, message: RegExp][] = [
        [{ temperature: 9 }, 400, /temperature must be a number/],
        [{ text: 'word '.repeat(5000) }, 400, /maximum context length is 4096 tokens/],
        [{ model: 'other' }, 404, /other/],
      ];
      for (const [request, status, message] of refusals) {
        await assert.rejects(ask(request), (error) => {
          assert.ok(error instanceof Error, inspect(error));
          assert.match(error.message, message);
          // LangChain has a class of its own for this, without a status.
          return ContextOverflowError.isInstance(error) || statusOf(error) === status;
        });
      }
      server.rooms.refusal = new ApiError('queue_full', 'The queue is full.');
      await assert.rejects(ask({}), (error) => error instanceof Error && /queue is full/.test(error.message));
      server.rooms.reset();
    });
  }

  test('a server that is full for a moment is asked again, after the time it gives', async () => {
    const client = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: 'right', maxRetries: 1 });
    server.rooms.refusal = new ApiError('queue_full', 'The queue is full.', { retryAfterSeconds: 1 });
    server.rooms.script = (room) => room.finish('so</think>At last.');
    const refused = server.nextResponse();
    const answer = client.chat.completions.create({ model: MODEL, messages: [{ role: 'user', content: 'hi' }] });
    await refused;
    server.rooms.refusal = null;
    assert.equal((await answer).choices[0]!.message.content, 'At last.');
    server.rooms.reset();
  });

  // surface: errors.mid-stream
  test('an error after the first token is thrown by each, and never taken for an answer', async () => {
    server.rooms.script = (room) => {
      room.text('so</think>Hi');
      room.end({ kind: 'cancelled', reason: 'peer_lost' });
    };
    const text = 'hi';
    const messages = [{ role: 'user' as const, content: text }];
    const openai = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: 'right', maxRetries: 0 });
    await assert.rejects(
      openai.chat.completions.stream({ model: MODEL, messages }).finalContent(),
      (error) => error instanceof OpenAI.APIError && error.code === 'kv_transfer_failed',
    );
    const kinds: string[] = [];
    const stream = streamText({
      model: createOpenAICompatible({ name: 'x', baseURL: `${server.url}/v1`, apiKey: 'right' })(MODEL),
      maxRetries: 0,
      prompt: text,
      onError: () => {},
    });
    for await (const { type } of stream.fullStream) kinds.push(type);
    assert.ok(kinds.includes('error'), kinds.join(', '));
    const langchain = new ChatOpenAI({
      model: MODEL,
      apiKey: 'right',
      maxRetries: 0,
      configuration: { baseURL: `${server.url}/v1` },
    });
    await assert.rejects(async () => {
      for await (const _ of await langchain.stream(text));
    }, /worker serving this request was lost/);
    const anthropic = new Anthropic({ baseURL: server.url, apiKey: 'right', maxRetries: 0 });
    await assert.rejects(
      anthropic.messages.stream({ model: MODEL, max_tokens: 9, messages }).finalMessage(),
      Anthropic.APIError,
    );
    server.rooms.reset();
  });
});
