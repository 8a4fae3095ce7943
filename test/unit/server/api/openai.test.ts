import assert from 'node:assert/strict';
import { test } from 'node:test';
import { planChat } from '../../../../server/api/chat.ts';
import { planCompletion } from '../../../../server/api/completions.ts';
import type { GenerationPlan } from '../../../../server/api/dialect.ts';
import type { JsonObject } from '../../../../server/api/fields.ts';
import { sumDeltas } from '../../../../server/api/generation.ts';
import type { AnswerDelta, Finish, LoggedToken, TokenUsage } from '../../../../server/api/generation.ts';
import { resolveMaxTokens } from '../../../../server/api/sampling.ts';
import type { ServedModel } from '../../../../server/api/sampling.ts';
import { parseDetokenizeRequest, parseTokenizeRequest } from '../../../../server/api/tokenize.ts';
import { DEFAULT_EFFORT_MAP } from '../../../../server/config.ts';
import { ApiError } from '../../../../server/errors.ts';

const served: ServedModel = {
  modelId: 'nano',
  names: ['nano', 'small/one'],
  contextLength: 100,
  vocabSize: 1000,
  maxChoices: 8,
  thinkingByDefault: true,
  effortMap: new Map(Object.entries(DEFAULT_EFFORT_MAP)),
  defaultTemperature: 1,
  defaultTopP: 1,
};

const messages = [{ role: 'user', content: 'hi' }];
const tool = { type: 'function', function: { name: 'add', parameters: { type: 'object' } } };
const call = { id: 'c1', type: 'function', function: { name: 'add', arguments: '{"a":1}' } };

const plan = (fields: JsonObject) => planChat({ messages, ...fields }, served);
const chat = (fields: JsonObject) => plan(fields).call;
const completion = (fields: JsonObject) => planCompletion({ prompt: 'hi', ...fields }, served);
const conversation = (fields: JsonObject) => {
  const [prompt] = plan(fields).prompts;
  assert.ok(prompt?.kind === 'conversation', `found ${prompt?.kind}`);
  return prompt.conversation;
};
const reading = (fields: JsonObject) => {
  const found = plan(fields).reading;
  assert.ok(found.kind === 'chat', `found ${found.kind}`);
  return found;
};
const message = (fields: JsonObject) => conversation({ messages: [...messages, fields] }).messages[1];

function refusal(act: () => unknown): { code: string; param: string | null; message: string } {
  try {
    act();
  } catch (error) {
    assert.ok(error instanceof ApiError, String(error));
    const { code, param, message: text } = error;
    return { code, param, message: text };
  }
  assert.fail('the request was accepted');
}

// surface: errors.400, chat.messages, chat.parts, chat.continue, chat.stream, chat.temperature, chat.stop, chat.tools
// surface: chat.tool-choice, chat.accepted
test('a wrong chat field is refused by name', () => {
  const cases: [JsonObject, string, string][] = [
    [{ messages: null }, 'missing_required_parameter', 'messages'],
    [{ messages: 'hi' }, 'invalid_type', 'messages'],
    [{ messages: [] }, 'invalid_value', 'messages'],
    [{ messages: ['hi'] }, 'invalid_type', 'messages[0]'],
    [{ messages: [{ content: 'hi' }] }, 'missing_required_parameter', 'messages[0].role'],
    [{ messages: [...messages, { role: 'User', content: 'hi' }] }, 'invalid_value', 'messages[1].role'],
    [{ messages: [{ role: 'user' }] }, 'missing_required_parameter', 'messages[0].content'],
    [{ messages: [{ role: 'user', content: 5 }] }, 'invalid_type', 'messages[0].content'],
    [{ messages: [{ role: 'user', content: [] }] }, 'invalid_value', 'messages[0].content'],
    [
      { messages: [{ role: 'user', content: [{ type: 'image_url', image_url: {} }] }] },
      'unsupported_value',
      'messages[0].content[0].type',
    ],
    [
      { messages: [{ role: 'user', content: [{ type: 'text' }] }] },
      'missing_required_parameter',
      'messages[0].content[0].text',
    ],
    [
      { messages: [{ role: 'assistant', tool_calls: [{ function: { name: 'f', arguments: '[1]' } }] }] },
      'invalid_value',
      'messages[0].tool_calls[0].function.arguments',
    ],
    [{ temperature: 2.1 }, 'invalid_value', 'temperature'],
    [{ temperature: Infinity }, 'invalid_value', 'temperature'],
    [{ temperature: '1' }, 'invalid_type', 'temperature'],
    [{ top_p: -0.1 }, 'invalid_value', 'top_p'],
    [{ top_k: 1.5 }, 'invalid_type', 'top_k'],
    [{ top_k: -2 }, 'invalid_value', 'top_k'],
    [{ min_p: 2 }, 'invalid_value', 'min_p'],
    [{ seed: 2 ** 64 }, 'invalid_value', 'seed'],
    [{ seed: 0.5 }, 'invalid_type', 'seed'],
    [{ stop: '' }, 'invalid_value', 'stop'],
    [{ stop: ['a', ''] }, 'invalid_value', 'stop[1]'],
    [{ stop: Array(17).fill('a') }, 'invalid_value', 'stop'],
    [{ stop: 5 }, 'invalid_type', 'stop'],
    [{ stop_token_ids: [1000] }, 'invalid_value', 'stop_token_ids[0]'],
    [{ max_tokens: 0 }, 'invalid_value', 'max_tokens'],
    [{ max_completion_tokens: '5' }, 'invalid_type', 'max_completion_tokens'],
    [{ max_tokens: 1.5 }, 'invalid_type', 'max_tokens'],
    [{ stream: 'true' }, 'invalid_type', 'stream'],
    [{ stream_options: { include_usage: 1 } }, 'invalid_type', 'stream_options.include_usage'],
    [{ ignore_eos: 1 }, 'invalid_type', 'ignore_eos'],
    [{ n: 0 }, 'invalid_value', 'n'],
    [{ n: 9 }, 'invalid_value', 'n'],
    [{ n: 1.5 }, 'invalid_type', 'n'],
    [{ rid: 'a b' }, 'invalid_value', 'rid'],
    [{ priority: 2 ** 40 }, 'invalid_value', 'priority'],
    ...['cache_salt', 'extra_key'].flatMap((name): [JsonObject, string, string][] => [
      [{ [name]: 5 }, 'invalid_type', name],
      [{ [name]: ['a'] }, 'invalid_type', name],
      [{ [name]: '' }, 'invalid_value', name],
      [{ [name]: 'a'.repeat(257) }, 'invalid_value', name],
    ]),
    [{ logprobs: 1 }, 'invalid_type', 'logprobs'],
    [{ logprobs: true, top_logprobs: '5' }, 'invalid_type', 'top_logprobs'],
    [{ logprobs: true, top_logprobs: 21 }, 'invalid_value', 'top_logprobs'],
    [{ top_logprobs: 1 }, 'invalid_value', 'top_logprobs'],
    [{ logprobs: false, top_logprobs: 1 }, 'invalid_value', 'top_logprobs'],
    [{ presence_penalty: 2.1 }, 'invalid_value', 'presence_penalty'],
    [{ frequency_penalty: '1' }, 'invalid_type', 'frequency_penalty'],
    [{ repetition_penalty: 2.1 }, 'invalid_value', 'repetition_penalty'],
    [{ min_tokens: -1 }, 'invalid_value', 'min_tokens'],
    [{ min_tokens: 1.5 }, 'invalid_type', 'min_tokens'],
    [{ repetition_penalty: 0 }, 'invalid_value', 'repetition_penalty'],
    [{ logit_bias: [5] }, 'invalid_type', 'logit_bias'],
    [{ logit_bias: { '1000': 1 } }, 'invalid_value', 'logit_bias'],
    [{ logit_bias: { '05': 1 } }, 'invalid_value', 'logit_bias'],
    [{ logit_bias: { '+5': 1 } }, 'invalid_value', 'logit_bias'],
    [{ logit_bias: { five: 1 } }, 'invalid_value', 'logit_bias'],
    [{ logit_bias: { '5': 101 } }, 'invalid_value', 'logit_bias.5'],
    [{ logit_bias: { '5': '1' } }, 'invalid_type', 'logit_bias.5'],
    [{ logit_bias: { '5': null } }, 'invalid_type', 'logit_bias.5'],
    [
      { logit_bias: Object.fromEntries(Array.from({ length: 1025 }, (_, id) => [id, 1])) },
      'invalid_value',
      'logit_bias',
    ],
    [{ response_format: { type: 'json_schema' } }, 'missing_required_parameter', 'response_format.json_schema'],
    [{ response_format: { type: 'xml' } }, 'invalid_value', 'response_format.type'],
    [{ guided_json: {} }, 'unsupported_parameter', 'guided_json'],
    [{ regex: 'a+' }, 'unsupported_parameter', 'regex'],
    [{ functions: [] }, 'unsupported_parameter', 'functions'],
    [{ tools: [{ type: 'web_search' }] }, 'invalid_value', 'tools[0].type'],
    [{ tools: [{ type: 'function', function: { name: 'a b' } }] }, 'invalid_value', 'tools[0].function.name'],
    [{ tools: [tool, tool] }, 'invalid_value', 'tools[1].function.name'],
    [
      { tools: [tool], tool_choice: { type: 'function', function: { name: 'sub' } } },
      'invalid_value',
      'tool_choice.function.name',
    ],
    [{ tool_choice: 'required' }, 'invalid_value', 'tool_choice'],
    [{ tool_choice: 'sometimes' }, 'invalid_value', 'tool_choice'],
    [{ reasoning_effort: 'huge' }, 'invalid_value', 'reasoning_effort'],
    [{ chat_template_kwargs: { thinking: 'yes' } }, 'invalid_type', 'chat_template_kwargs.thinking'],
    [{ thinking: { type: 'maybe' } }, 'invalid_value', 'thinking.type'],
    [{ continue_final_message: true, add_generation_prompt: true }, 'invalid_value', 'continue_final_message'],
    [{ add_generation_prompt: false }, 'unsupported_value', 'add_generation_prompt'],
    [{ tools: [{ type: 'function' }] }, 'missing_required_parameter', 'tools[0].function'],
    [{ tools: [{ function: { name: 'f' } }] }, 'missing_required_parameter', 'tools[0].type'],
    [{ model: 'gpt-4' }, 'model_not_found', 'model'],
  ];
  for (const [fields, code, param] of cases) {
    const found = refusal(() => chat(fields));
    assert.deepEqual({ code: found.code, param: found.param }, { code, param }, JSON.stringify(fields));
  }
});

// surface: completions.prompt, completions.best-of, completions.suffix
test('a wrong completion field is refused by name', () => {
  const cases: [JsonObject, string, string][] = [
    [{ prompt: null }, 'missing_required_parameter', 'prompt'],
    [{ prompt: '' }, 'invalid_value', 'prompt'],
    [{ prompt: [] }, 'invalid_value', 'prompt'],
    [{ prompt: [''] }, 'invalid_value', 'prompt[0]'],
    [{ prompt: [1, 'a'] }, 'invalid_type', 'prompt[1]'],
    [{ prompt: [1, 1000] }, 'invalid_value', 'prompt[1]'],
    [{ prompt: [1, -1] }, 'invalid_value', 'prompt[1]'],
    [{ prompt: ['a', [1]] }, 'invalid_type', 'prompt[1]'],
    [{ prompt: ['a', null] }, 'missing_required_parameter', 'prompt[1]'],
    [{ prompt: Array(257).fill('a') }, 'invalid_value', 'prompt'],
    [{ prompt: Array(100).fill('a'), n: 3 }, 'invalid_value', 'n'],
    [{ prompt: [[1, 0.5]] }, 'invalid_type', 'prompt[0][1]'],
    [{ prompt: { text: 'a' } }, 'invalid_type', 'prompt'],
    [{ echo: 1 }, 'invalid_type', 'echo'],
    [{ logprobs: 21 }, 'invalid_value', 'logprobs'],
    [{ logprobs: true }, 'invalid_type', 'logprobs'],
    [{ logprobs: '0' }, 'invalid_type', 'logprobs'],
    [{ best_of: 2 }, 'unsupported_value', 'best_of'],
    [{ suffix: 'x' }, 'unsupported_parameter', 'suffix'],
    [{ max_tokens: 0 }, 'invalid_value', 'max_tokens'],
  ];
  for (const [fields, code, param] of cases) {
    const found = refusal(() => completion(fields));
    assert.deepEqual({ code: found.code, param: found.param }, { code, param }, JSON.stringify(fields));
  }
});

// surface: errors.shape
test('a refusal names what is accepted and echoes little of what was sent', () => {
  assert.equal(refusal(() => chat({ temperature: 3 })).message, 'temperature must be a number from 0 to 2, found 3.');
  const { message } = refusal(() => chat({ stop: 'x'.repeat(5000) }));
  assert.ok(message.length < 200, message);
});

// surface: transport.null, chat.priority, chat.accepted, chat.internal
test('null means absent in every field, and unknown fields are ignored', () => {
  const same = (fields: JsonObject) => ({ ...plan(fields), createDialect: null });
  const plain = same({});
  const fields = ['temperature', 'top_p', 'top_k', 'min_p', 'seed', 'stop', 'max_tokens', 'stream', 'stream_options'];
  const more = ['tools', 'tool_choice', 'parallel_tool_calls', 'logit_bias', 'response_format', 'n', 'logprobs'];
  const kwargs = ['chat_template_kwargs', 'reasoning_effort', 'thinking', 'ignore_eos', 'skip_special_tokens'];
  for (const name of [...fields, ...more, ...kwargs]) assert.deepEqual(same({ [name]: null }), plain, name);
  const extras = {
    store: true,
    user: 7,
    metadata: { a: 1 },
    service_tier: 'auto',
    bootstrap_room: 5,
    priority: 3,
    made_up: {},
  };
  assert.deepEqual(same(extras), plain);
});

// surface: chat.stop-extras, chat.refused
test('constraints that would not be kept are refused by name', () => {
  const names = ['stop_regex', 'lora_path', 'session_params', 'custom_params', 'custom_logit_processor'];
  const grammars = ['regex', 'ebnf', 'structured_outputs', 'guided_json', 'guided_regex', 'guided_choice'];
  for (const name of [...names, ...grammars]) {
    const { code, param } = refusal(() => chat({ [name]: 'x' }));
    assert.deepEqual([code, param], ['unsupported_parameter', name]);
    chat({ [name]: null });
  }
  assert.equal(refusal(() => chat({ return_hidden_states: true })).param, 'return_hidden_states');
  assert.equal(refusal(() => chat({ modalities: ['text', 'audio'] })).param, 'modalities');
  chat({ return_hidden_states: false });
});

// surface: chat.penalties, chat.repetition, chat.logit-bias, chat.logprobs, completions.logprobs
test('penalties, biases, shortest answers and log probabilities go to the workers, and only where they do something', () => {
  const neutral = { presence_penalty: 0, frequency_penalty: 0, repetition_penalty: 1, logit_bias: {}, min_tokens: 0 };
  assert.equal(chat(neutral).sampling.rules, undefined);
  const fields = { presence_penalty: 1, frequency_penalty: -2, repetition_penalty: 0.5, min_tokens: 3 };
  const rules = { presencePenalty: 1, frequencyPenalty: -2, repetitionPenalty: 0.5, minTokens: 3 };
  const { sampling, minTokens } = chat({ ...fields, logit_bias: { '7': -100, '0': 0.5 } });
  assert.deepEqual(sampling.rules, { ...rules, biasIds: [0, 7], biases: [0.5, -100] });
  assert.equal(minTokens, 3);
  assert.deepEqual(
    [{}, { logprobs: false }, { logprobs: true }, { logprobs: true, top_logprobs: 5 }].map(
      (asked) => chat(asked).sampling.logprobs,
    ),
    [undefined, undefined, 0, 5],
  );
  assert.deepEqual(
    [{}, { logprobs: 0 }, { logprobs: 20 }].map((asked) => completion(asked).call.sampling.logprobs),
    [undefined, 0, 20],
  );
});

// surface: chat.cache-salt
test('cache_salt and extra_key make one salt, another one for each pair, which does not show them', () => {
  const a = 'a'.repeat(256);
  const pairs: JsonObject[] = [
    ...[{ cache_salt: 'ab' }, { extra_key: 'ab' }, { cache_salt: 'a', extra_key: 'b' }],
    ...[
      { cache_salt: 'b', extra_key: 'a' },
      { cache_salt: 'a', extra_key: '","b' },
    ],
    ...[{ cache_salt: 'a","', extra_key: 'b' }, { cache_salt: 'null' }, { cache_salt: a, extra_key: a }],
  ];
  const salts = pairs.map((pair) => chat(pair).salt);
  assert.equal(new Set(salts).size, pairs.length);
  for (const salt of salts) assert.match(String(salt), /^[0-9a-f]{64}$/);
  assert.deepEqual(
    pairs.map((pair) => completion(pair).call.salt),
    salts,
    'the same for both APIs',
  );
  for (const none of [{}, { cache_salt: null, extra_key: null }]) assert.equal(chat(none).salt, null);
});

// surface: completions.best-of
test('values that change nothing are accepted for fields that are not supported', () => {
  const neutral = { n: 1, presence_penalty: 0, frequency_penalty: 0, repetition_penalty: 1, logit_bias: {} };
  chat({ ...neutral, logprobs: false, top_logprobs: 0, response_format: { type: 'text' }, modalities: ['text'] });
  completion({ ...neutral, best_of: 1, echo: false, suffix: '', logprobs: null });
});

// surface: chat.temperature, chat.top-p, chat.top-k, chat.min-p
test('sampling fields take the defaults of the model and fold what means the same', () => {
  assert.deepEqual(chat({}).sampling, { temperature: 1, topP: 1, topK: 0, minP: 0 });
  const given = { temperature: 0.5, top_p: 0.9, top_k: 5, min_p: 0.1, seed: 7 };
  assert.deepEqual(chat(given).sampling, { temperature: 0.5, topP: 0.9, topK: 5, minP: 0.1 });
  assert.equal(chat({ top_p: 0 }).sampling.temperature, 0);
  for (const topK of [-1, 0, 1000, 5000]) assert.equal(chat({ top_k: topK }).sampling.topK, 0);
});

// surface: chat.seed
test('seeds keep their value below 2^32 and stay 32 bits beyond', () => {
  assert.equal(chat({}).seed, null);
  assert.equal(chat({ seed: 0 }).seed, 0);
  assert.equal(chat({ seed: 2 ** 32 - 1 }).seed, 2 ** 32 - 1);
  for (const seed of [-1, -(2 ** 63), 2 ** 53, 2 ** 63 - 1024]) {
    const folded = chat({ seed }).seed!;
    assert.ok(Number.isInteger(folded) && folded >= 0 && folded < 2 ** 32, String(seed));
  }
});

// surface: chat.stop
test('stop is one string or many, and an empty list is none', () => {
  assert.deepEqual(chat({ stop: 'a' }).stop, ['a']);
  assert.deepEqual(chat({ stop: ['a', 'b'] }).stop, ['a', 'b']);
  assert.deepEqual(chat({ stop: [] }).stop, []);
});

// surface: transport.text, chat.role, chat.name, chat.history-reasoning
test('messages are taken in all the shapes that clients send', () => {
  assert.equal(message({ role: 'developer', content: 'be brief', id: 7 })?.role, 'system');
  assert.equal(message({ role: 'function', name: 'f', content: 'r' })?.role, 'tool');
  assert.equal(message({ role: 'user', name: null, content: '' })?.content, '');
  assert.deepEqual(message({ role: 'user', content: [{ type: 'input_text', text: 'a' }] })?.content, [
    { type: 'text', text: 'a' },
  ]);
  assert.equal(message({ role: 'user', content: 'a\uD800b' })?.content, 'a\uFFFDb');
  const assistant = message({ role: 'assistant', content: null, reasoning: 'r', tool_calls: [call] });
  assert.equal(assistant?.content, '');
  assert.equal(assistant?.reasoning_content, 'r');
  assert.deepEqual(assistant?.tool_calls, [call]);
  assert.equal(message({ role: 'assistant', tool_calls: [] })?.tool_calls, undefined);
  assert.equal(message({ role: 'tool', tool_call_id: 'c1', content: 'r' })?.tool_call_id, 'c1');
});

// surface: chat.history-calls
test('arguments of earlier calls may be empty, null, an object, or no JSON at all', () => {
  const cases: [unknown, string | object][] = [
    ['', '{}'],
    [null, '{}'],
    [undefined, '{}'],
    [{ a: 1 }, { a: 1 }],
    ['{"a": 1.0}', '{"a": 1.0}'],
    ['not json', 'not json'],
  ];
  for (const [given, expected] of cases) {
    const found = message({ role: 'assistant', tool_calls: [{ function: { name: 'add', arguments: given } }] });
    assert.deepEqual(found?.tool_calls?.[0]?.function.arguments, expected);
  }
});

// surface: chat.tools
test('tools are kept as they stand, and left out of the prompt when the choice is none', () => {
  assert.deepEqual(conversation({ tools: [tool] }).tools, [tool]);
  assert.equal(reading({ tools: [tool] }).maxToolCalls, Infinity);
  assert.equal(reading({ tools: [tool], parallel_tool_calls: null }).maxToolCalls, Infinity);
  assert.equal(reading({ tools: [tool], parallel_tool_calls: false }).maxToolCalls, 1);
  const none = { tools: [tool], tool_choice: 'none' };
  assert.deepEqual(conversation(none).tools, []);
  assert.equal(reading(none).maxToolCalls, 0);
  assert.equal(reading(none).readsToolCalls, true);
  assert.equal(reading({ tools: [] }).readsToolCalls, false);
});

test('a final message that goes on is the end of the prompt, and the answer is no reasoning', () => {
  const given = { messages: [...messages, { role: 'assistant', content: 'The answer is' }] };
  const { prompts, reading: read } = plan({ ...given, continue_final_message: true });
  const [prompt] = prompts;
  assert.ok(prompt?.kind === 'conversation' && read.kind === 'chat', `found ${prompt?.kind}, read as ${read.kind}`);
  assert.equal(prompt.conversation.continueFinalMessage, true);
  assert.equal(read.thinking, false);
});

// surface: chat.reasoning-shown
test('reasoning is told apart, hidden or written into the content, as asked', () => {
  assert.equal(reading({ include_reasoning: false }).reasoning, 'hidden');
  assert.equal(reading({ separate_reasoning: false }).reasoning, 'inline');
  assert.equal(reading({}).reasoning, 'separate');
});

// surface: chat.thinking
test('the ways to ask for reasoning have an order', () => {
  const cases: [JsonObject, boolean][] = [
    [{}, true],
    [{ reasoning: { enabled: false } }, false],
    [{ reasoning_effort: 'none' }, false],
    [{ reasoning_effort: 'none', reasoning: { enabled: true } }, false],
    [{ chat_template_kwargs: { thinking: true }, reasoning_effort: 'none' }, true],
    [{ chat_template_kwargs: { enable_thinking: false } }, false],
    [{ chat_template_kwargs: { enable_thinking: false, thinking: true } }, true],
    [{ thinking: { type: 'disabled' }, chat_template_kwargs: { thinking: true } }, false],
  ];
  for (const [fields, thinking] of cases) {
    assert.equal(conversation(fields).thinking, thinking, JSON.stringify(fields));
  }
  const off = { ...served, thinkingByDefault: false };
  assert.equal((planChat({ messages }, off).reading as { thinking: boolean }).thinking, false);
});

// surface: chat.effort
test('efforts are mapped to those the model was trained with', () => {
  const efforts: [string, string | undefined][] = [
    ['minimal', 'low'],
    ['low', 'high'],
    ['medium', 'high'],
    ['xhigh', 'max'],
    ['max', 'max'],
  ];
  for (const [given, expected] of efforts) {
    assert.equal(conversation({ reasoning_effort: given }).reasoningEffort, expected);
    assert.equal(conversation({ chat_template_kwargs: { reasoning_effort: given } }).reasoningEffort, expected);
  }
  assert.equal(conversation({}).reasoningEffort, undefined);
  const own = { ...served, effortMap: new Map([['low', 'low']]) };
  const asOwn = (effort: string) => {
    const { prompts } = planChat({ messages, reasoning_effort: effort }, own);
    return prompts[0]?.kind === 'conversation' ? prompts[0].conversation.reasoningEffort : null;
  };
  assert.deepEqual([asOwn('low'), asOwn('medium')], ['low', 'medium']);
});

// surface: completions.prompt
test('a prompt is text or ids, alone or one of many', () => {
  const prompts = (prompt: unknown) => completion({ prompt }).prompts;
  const text = (content: string) => ({ kind: 'text', text: content });
  const ids = (...of: number[]) => ({ kind: 'ids', ids: of });
  assert.deepEqual(prompts('a'), [text('a')]);
  assert.deepEqual(prompts(['a', 'b']), [text('a'), text('b')]);
  assert.deepEqual(prompts([1, 2]), [ids(1, 2)]);
  assert.deepEqual(prompts([[1, 2], [3]]), [ids(1, 2), ids(3)]);
  assert.deepEqual(prompts('a\uDC00'), [text('a\uFFFD')]);
});

/** The tokens of an answer to a prompt of that many, with a context of 100. */
const limitOf = (given: GenerationPlan, tokenCount: number) =>
  resolveMaxTokens(given.call, { tokenCount, param: given.promptParam, fallback: given.fallbackTokens }, 100);

// surface: chat.max-tokens, completions.max-tokens
test('the token limit is what was asked for, else the rest of the context or sixteen', () => {
  assert.equal(limitOf(plan({ max_tokens: 5 }), 90), 5);
  assert.equal(limitOf(plan({ max_tokens: 5, max_completion_tokens: 6 }), 90), 6);
  assert.equal(limitOf(plan({}), 90), 10);
  assert.equal(limitOf(completion({}), 50), 16);
  assert.equal(limitOf(completion({}), 90), 10);
  assert.equal(limitOf(completion({ echo: true, max_tokens: 0 }), 90), 0);
});

// surface: errors.context
test('what does not fit the context is refused with the real numbers', () => {
  const asked = refusal(() => limitOf(completion({ max_tokens: 16 }), 90));
  assert.equal(asked.code, 'context_length_exceeded');
  assert.equal(asked.param, 'prompt');
  assert.match(
    asked.message,
    /maximum context length is 100 tokens.*106 tokens \(90 in the prompt, 16 in the answer\)/,
  );
  const full = refusal(() => limitOf(plan({}), 120));
  assert.equal(full.param, 'messages');
  assert.match(full.message, /maximum context length is 100 tokens.*120 tokens/);
  assert.ok(!full.message.includes('-'), full.message);
});

// surface: chat.model
test('the model is the served one, by name, as default, or unsaid', () => {
  assert.equal(chat({}).model, 'nano');
  assert.equal(chat({ model: 'nano' }).model, 'nano');
  assert.equal(chat({ model: 'default' }).model, 'default');
  assert.equal(chat({ model: 'small/one' }).model, 'small/one');
});

// surface: endpoint.tokenize
test('tokenize takes a text, texts or a conversation, and detokenize one or many lists of ids', () => {
  const texts = (body: JsonObject) => parseTokenizeRequest(body, served);
  assert.deepEqual(texts({ prompt: '' }), { kind: 'texts', texts: [''], nested: false, returnTokenStrings: false });
  assert.deepEqual(texts({ prompt: ['a', 'b'] }), {
    kind: 'texts',
    texts: ['a', 'b'],
    nested: true,
    returnTokenStrings: false,
  });
  const rendered = texts({ messages, tools: [tool], chat_template_kwargs: { thinking: false } });
  assert.ok(rendered.kind === 'chat', `found ${rendered.kind}`);
  assert.deepEqual(rendered.conversation.tools, [tool]);
  assert.equal(rendered.conversation.thinking, false);
  assert.equal(rendered.conversation.openAnswer, true);
  assert.equal(refusal(() => texts({})).param, 'prompt');
  assert.equal(refusal(() => texts({ prompt: 'a', messages })).param, 'messages');
  assert.equal(refusal(() => texts({ prompt: [1] })).param, 'prompt[0]');

  const ids = (tokens: unknown) => parseDetokenizeRequest({ tokens }, served);
  assert.deepEqual(ids([1, 2]), { sequences: [[1, 2]], nested: false });
  assert.deepEqual(ids([[1], [2]]), { sequences: [[1], [2]], nested: true });
  assert.deepEqual(ids([]), { sequences: [[]], nested: false });
  assert.equal(refusal(() => ids([1, 1000])).param, 'tokens[1]');
  assert.equal(refusal(() => ids([[1], 2])).param, 'tokens[1]');
  assert.equal(refusal(() => ids(null)).param, 'tokens');
});

const head = { id: 'chatcmpl-1', created: 5, model: 'nano' };
const usage: TokenUsage = { promptTokens: 3, cachedTokens: 0, completionTokens: 4, reasoningTokens: 1 };
const finish: Finish = { reason: 'tool_calls', matchedStop: 1 };
const deltas: AnswerDelta[] = [
  { kind: 'reasoning', text: 'r' },
  { kind: 'content', text: 'c' },
  { kind: 'tool_call', index: 0, id: 'call_1', name: 'add' },
  { kind: 'tool_arguments', index: 0, text: '{"a":' },
  { kind: 'tool_arguments', index: 0, text: '1}' },
];
/** Token 1 is the first byte of a character, token 2 a word. */
const tokens = {
  bytes: (id: number) => (id === 1 ? Uint8Array.of(0xe4) : Buffer.from(`w${id}`)),
  text: (id: number) => (id === 1 ? '\uFFFD' : `w${id}`),
  textOf: (ids: readonly number[]) => ids.map((id) => `w${id}`).join(''),
};
const dialectOf = (given: GenerationPlan) =>
  given.createDialect({
    ...{ head, usage: () => usage, tokens },
    completionTokens: () => usage.completionTokens,
    promptIds: () => [3, 1, 1, 4],
    promptChoices: () => [
      { id: 1, logprob: -0.5, top: [{ id: 2, logprob: -0.25 }] },
      { id: 1, logprob: -Infinity, top: [{ id: 4, logprob: -1 }] },
      { id: 4, logprob: -2, top: [{ id: 4, logprob: -2 }] },
    ],
  });
const parsed = (events: string[]) =>
  events.map((each): unknown => {
    const data = /^data: (.*)\n\n$/s.exec(each)?.[1];
    assert.ok(data !== undefined && !data.includes('\n'), each);
    return data === '[DONE]' ? data : JSON.parse(data);
  });

// surface: answer.tool-deltas
test('the chunks of a chat stream come in the order and shape that clients rely on', () => {
  const dialect = dialectOf(plan({ stream_options: { include_usage: true } }));
  const events = deltas.flatMap((delta) => dialect.delta(0, delta));
  events.push(...dialect.finish(0, finish), ...dialect.end());
  const base = { id: 'chatcmpl-1', object: 'chat.completion.chunk', created: 5, model: 'nano' };
  const chunk = (delta: object) => ({
    ...base,
    choices: [{ index: 0, delta, logprobs: null, finish_reason: null }],
    usage: null,
  });
  const usageFields = {
    prompt_tokens: 3,
    completion_tokens: 4,
    total_tokens: 7,
    prompt_tokens_details: { cached_tokens: 0 },
    completion_tokens_details: { reasoning_tokens: 1 },
  };
  assert.deepEqual(parsed(events), [
    chunk({ role: 'assistant', content: '' }),
    chunk({ reasoning_content: 'r' }),
    chunk({ content: 'c' }),
    chunk({ tool_calls: [{ index: 0, id: 'call_1', type: 'function', function: { name: 'add', arguments: '' } }] }),
    chunk({ tool_calls: [{ index: 0, function: { arguments: '{"a":' } }] }),
    chunk({ tool_calls: [{ index: 0, function: { arguments: '1}' } }] }),
    {
      ...base,
      choices: [{ index: 0, delta: {}, logprobs: null, finish_reason: 'tool_calls', matched_stop: 1 }],
      usage: null,
    },
    { ...base, choices: [], usage: usageFields },
    '[DONE]',
  ]);
});

test('usage stays out of a stream unless asked for, and runs along only when asked for too', () => {
  const plain = dialectOf(plan({ stream_options: {} }));
  const events = [...plain.delta(0, deltas[1]!), ...plain.finish(0, finish), ...plain.end()];
  assert.deepEqual(
    events.filter((each) => each.includes('usage')),
    [],
  );
  const options = { include_usage: true, continuous_usage_stats: true };
  const running = dialectOf(completion({ stream_options: options }));
  const [first] = parsed(running.delta(0, { kind: 'content', text: 'c' })) as { usage: { total_tokens: number } }[];
  assert.equal(first?.usage.total_tokens, 7);
});

test('every choice opens with its role and ends with one finish, whatever the others do', () => {
  const dialect = dialectOf(plan({ n: 2 }));
  const events = [
    ...dialect.delta(1, { kind: 'content', text: 'b' }),
    ...dialect.finish(1, { reason: 'stop', matchedStop: null }),
    ...dialect.finish(0, { reason: 'length', matchedStop: null }),
  ];
  const choices = (parsed(events) as { choices: { index: number; delta: object; finish_reason: string }[] }[]).map(
    ({ choices: [choice] }) => [choice?.index, Object.keys(choice!.delta), choice?.finish_reason],
  );
  assert.deepEqual(choices, [
    [1, ['role', 'content'], null],
    [1, ['content'], null],
    [1, [], 'stop'],
    [0, ['role', 'content'], null],
    [0, [], 'length'],
  ]);
});

// surface: completions.stream
test('the chunks of a completion stream carry text and no role', () => {
  const dialect = dialectOf(completion({}));
  const [chunk] = parsed(dialect.delta(0, { kind: 'content', text: 'c' })) as { object: string; choices: object[] }[];
  assert.equal(chunk?.object, 'text_completion');
  assert.deepEqual(chunk?.choices, [{ index: 0, text: 'c', logprobs: null, finish_reason: null }]);
});

// surface: completions.echo
test('an echo is the prompt of the choice, once, and moves the offsets of its tokens', () => {
  const given = completion({ prompt: ['one', 'two'], n: 2, echo: true, logprobs: 0 });
  const logged: LoggedToken[] = [{ id: 2, logprob: -0.5, top: [], offset: 0 }];
  const dialect = dialectOf(given);
  const events = [
    ...dialect.delta(2, { kind: 'content', text: 'w2', logged }),
    ...dialect.delta(2, { kind: 'content', text: '!' }),
    ...dialect.finish(3, finish),
  ];
  const choices = (parsed(events) as { choices: { index: number; text: string; logprobs: unknown }[] }[]).map(
    ({ choices: [choice] }) => choice!,
  );
  assert.deepEqual(
    choices.map(({ index, text }) => [index, text]),
    [
      [2, 'two'],
      [2, 'w2'],
      [2, '!'],
      [3, 'two'],
      [3, ''],
    ],
  );
  assert.deepEqual(choices[1]?.logprobs, {
    tokens: ['w2'],
    token_logprobs: [-0.5],
    top_logprobs: [{ w2: -0.5 }],
    text_offset: [3],
  });
});

test('the choices of a completion name tokens by their text, or by their bytes where it is none', () => {
  const top = [
    { id: 1, logprob: -0.25 },
    { id: 4, logprob: -2 },
  ];
  const logged: LoggedToken[] = [{ id: 2, logprob: -3, top, offset: 0 }];
  const [chunk] = parsed(dialectOf(completion({ logprobs: 2 })).delta(0, { kind: 'content', text: 'w2', logged }));
  const { choices } = chunk as { choices: { logprobs: { top_logprobs: unknown } }[] };
  assert.deepEqual(choices[0]?.logprobs.top_logprobs, [{ 'bytes:\\xe4': -0.25, w4: -2, w2: -3 }]);
});

test('an echoed prompt is listed token by token; of the first one nothing is known', () => {
  const dialect = dialectOf(completion({ prompt: 'w3..w4', echo: true, logprobs: 1 }));
  const [chunk] = parsed(dialect.finish(0, finish));
  const { choices } = chunk as { choices: { logprobs: unknown }[] };
  assert.deepEqual(choices[0]?.logprobs, {
    tokens: ['w3', '\uFFFD', '\uFFFD', 'w4'],
    token_logprobs: [null, -0.5, -9999, -2],
    top_logprobs: [null, { w2: -0.25, 'bytes:\\xe4': -0.5 }, { w4: -1, 'bytes:\\xe4': -9999 }, { w4: -2 }],
    // Two first bytes of a character: the first shows itself when the second comes, that one when `w` does.
    text_offset: [0, 2, 2, 3],
  });
});

// surface: answer.logprobs
test('a token is shown with its true bytes, and an impossible one with a number that JSON can hold', () => {
  const top = [{ id: 2, logprob: -0.1 }];
  const logged: LoggedToken[] = [{ id: 1, logprob: -Infinity, top, offset: 0 }];
  const [, chunk] = parsed(dialectOf(plan({})).delta(0, { kind: 'content', text: 'x', logged }));
  const { choices } = chunk as { choices: { logprobs: { content: unknown } }[] };
  assert.deepEqual(choices[0]?.logprobs.content, [
    {
      token: '\uFFFD',
      logprob: -9999,
      bytes: [0xe4],
      top_logprobs: [{ token: 'w2', logprob: -0.1, bytes: [0x77, 0x32] }],
    },
  ]);
});

interface WholeBody {
  object: string;
  choices: { message: { content: string | null } }[];
  usage: { total_tokens: number };
}

// surface: answer.body
test('a whole chat answer leaves out what is not there', () => {
  const body = (of: readonly AnswerDelta[], end: Finish) =>
    dialectOf(plan({})).body([{ answer: sumDeltas(of), deltas: of, finish: end }]) as WholeBody;
  assert.deepEqual(body(deltas, finish).choices[0]?.message, {
    role: 'assistant',
    content: 'c',
    refusal: null,
    reasoning_content: 'r',
    tool_calls: [{ id: 'call_1', type: 'function', function: { name: 'add', arguments: '{"a":1}' } }],
  });
  const empty = body([], { reason: 'stop', matchedStop: null });
  assert.deepEqual(empty.choices[0]?.message, { role: 'assistant', content: '', refusal: null });
  assert.equal(body(deltas.slice(2), finish).choices[0]?.message.content, null);
});

// surface: answer.matched-stop
test('a whole completion answer has text, finish reason and usage', () => {
  const answer = sumDeltas([{ kind: 'content', text: 'x' }]);
  const end: Finish = { reason: 'length', matchedStop: null };
  const body = dialectOf(completion({})).body([{ answer, deltas: [], finish: end }]) as WholeBody;
  assert.equal(body.object, 'text_completion');
  assert.deepEqual(body.choices, [
    { index: 0, text: 'x', logprobs: null, finish_reason: 'length', matched_stop: null },
  ]);
  assert.equal(body.usage.total_tokens, 7);
});
