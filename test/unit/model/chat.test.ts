import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import test from 'node:test';
import { ChatError, loadChatEncoding, promptText, renderChat } from '../../../model/chat.ts';
import type { ChatMessage, Conversation, ToolDefinition } from '../../../model/chat.ts';
import { MAX_JSON_VALUES, parseJsonValue } from '../../../model/json-text.ts';
import { loadTokenizer } from '../../../model/tokenizer.ts';

const NANO = 'model/nano';
const encoding = loadChatEncoding(NANO);
const text = (conversation: Conversation) => promptText(renderChat(encoding, conversation));

const BOS = '<｜begin▁of▁sentence｜>';
const EOS = '<｜end▁of▁sentence｜>';

const ADD: ToolDefinition = {
  type: 'function',
  function: { name: 'add', parameters: { type: 'object', properties: { a: { type: 'number', minimum: 0.5 } } } },
};
const ADD_TEXT =
  '## Tools\n\nTo call functions, write one <｜DSML｜tool_calls> block.\n\n### Available Tool Schemas\n\n' +
  '{"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number", "minimum": 0.5}}}}' +
  '\n\nCall only these functions.\n';

test('every sample renders to its recorded prompt ids', () => {
  interface Sample {
    messages: ChatMessage[];
    tools: ToolDefinition[] | null;
    thinking: boolean;
    prompt_ids: number[];
  }
  const tokenizer = loadTokenizer(NANO);
  const lines = readFileSync('test/data/nano-samples.jsonl', 'utf8').trim().split('\n');
  assert.equal(lines.length, 74);
  for (const line of lines) {
    const { messages, tools, thinking, prompt_ids: promptIds } = JSON.parse(line) as Sample;
    assert.deepEqual(tokenizer.encode(renderChat(encoding, { messages, tools, thinking })), promptIds, line);
  }
});

test('a system and a user message are rendered without a break between them', () => {
  const messages: ChatMessage[] = [
    { role: 'system', content: 'Be brief.' },
    { role: 'user', content: 'Name a prime.' },
  ];
  assert.equal(text({ messages, thinking: false }), `${BOS}Be brief.<｜User｜>Name a prime.<｜Assistant｜></think>`);
});

test('reasoning of earlier turns is dropped by default and kept on request', () => {
  const messages: ChatMessage[] = [
    { role: 'user', content: 'Hi' },
    { role: 'assistant', reasoning_content: 'greet', content: 'Hello!' },
    { role: 'user', content: '6*7?' },
  ];
  assert.equal(
    text({ messages, thinking: true }),
    `${BOS}<｜User｜>Hi<｜Assistant｜></think>Hello!${EOS}<｜User｜>6*7?<｜Assistant｜><think>`,
  );
  assert.equal(
    text({ messages, thinking: true, dropThinking: false }),
    `${BOS}<｜User｜>Hi<｜Assistant｜><think>greet</think>Hello!${EOS}<｜User｜>6*7?<｜Assistant｜><think>`,
  );
  assert.equal(
    text({ messages, thinking: false, dropThinking: false }),
    `${BOS}<｜User｜>Hi<｜Assistant｜></think>Hello!${EOS}<｜User｜>6*7?<｜Assistant｜></think>`,
  );
});

test('tools stand on the leading system message, or on an empty one that is inserted', () => {
  const user: ChatMessage = { role: 'user', content: 'add 2 and 3' };
  const asked = '<｜User｜>add 2 and 3<｜Assistant｜><think>';
  const render = (messages: ChatMessage[]) => text({ messages, tools: [ADD], thinking: true });
  assert.equal(render([{ role: 'system', content: '' }, user]), `${BOS}\n\n${ADD_TEXT}${asked}`);
  assert.equal(render([user]), `${BOS}\n\n${ADD_TEXT}${asked}`);
  assert.equal(render([{ role: 'system', content: 'S' }, user]), `${BOS}S\n\n${ADD_TEXT}${asked}`);
  assert.equal(text({ messages: [user], tools: [], thinking: true }), `${BOS}${asked}`);
});

test('schemas of several tools stand on a line each', () => {
  const tools: ToolDefinition[] = [{ function: { name: 'a' } }, { function: { name: 'b', strict: true } }];
  const prompt = text({ messages: [{ role: 'user', content: 'x' }], tools, thinking: false });
  assert.ok(prompt.includes('Schemas\n\n{"name": "a"}\n{"name": "b", "strict": true}\n\nCall'), prompt);
});

test('tool results and the next user text become one turn, results in the order of their calls', () => {
  const messages: ChatMessage[] = [
    { role: 'user', content: 'q' },
    {
      role: 'assistant',
      content: null,
      reasoning_content: 'call both',
      tool_calls: [
        { id: 'c1', type: 'function', function: { name: 'f', arguments: '{}' } },
        { id: 'c2', type: 'function', function: { name: 'g', arguments: '{}' } },
      ],
    },
    { role: 'tool', tool_call_id: 'c2', content: 'B' },
    { role: 'tool', tool_call_id: 'c1', content: 'A' },
    { role: 'user', content: 'thanks, so?' },
  ];
  const calls =
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>\n' +
    '<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>';
  const results =
    '<｜User｜><tool_result>A</tool_result>\n\n<tool_result>B</tool_result>\n\nthanks, so?<｜Assistant｜><think>';
  assert.equal(
    text({ messages, tools: [ADD], thinking: true }),
    `${BOS}\n\n${ADD_TEXT}<｜User｜>q<｜Assistant｜><think>call both</think>${calls}${EOS}${results}`,
  );
  // Without tools the results are the last user turn, so the reasoning before them is dropped.
  assert.equal(text({ messages, thinking: true }), `${BOS}<｜User｜>q<｜Assistant｜></think>${calls}${EOS}${results}`);
});

// surface: chat.tool-results
test('results are sorted among their own places, one of an unknown call like one of the first', () => {
  const call = (id: string) => ({ id, function: { name: 'f', arguments: '{}' } });
  const result = (id: string | null, content: string): ChatMessage => ({ role: 'tool', tool_call_id: id, content });
  const turn = (...results: ChatMessage[]) => {
    const messages: ChatMessage[] = [{ role: 'assistant', tool_calls: [call('a'), call('b'), call('c')] }, ...results];
    return /<｜User｜>(.*)<｜Assistant｜>/s
      .exec(text({ messages, thinking: false }))?.[1]
      ?.replaceAll(/<\/?tool_result>/g, '')
      .split('\n\n');
  };
  const said: ChatMessage = { role: 'user', content: 'text' };
  assert.deepEqual(turn(result('c', 'C'), said, result('a', 'A'), result('b', 'B')), ['A', 'text', 'B', 'C']);
  assert.deepEqual(turn(result('b', 'B'), result('x', 'X'), result('a', 'A'), result(null, 'N')), ['X', 'A', 'N', 'B']);
});

test('consecutive user messages become one turn', () => {
  const messages: ChatMessage[] = [
    { role: 'user', content: 'one' },
    { role: 'user', content: '' },
    { role: 'user', content: 'two' },
  ];
  assert.equal(text({ messages, thinking: false }), `${BOS}<｜User｜>one\n\n\n\ntwo<｜Assistant｜></think>`);
});

test('arguments are rendered as parameters: strings raw, the rest as Python writes JSON', () => {
  const render = (args: string | object | null) =>
    /invoke name="f">\n(.*)\n<\/｜DSML｜invoke>/s.exec(
      text({
        messages: [{ role: 'assistant', content: 'x', tool_calls: [{ function: { name: 'f', arguments: args } }] }],
        thinking: false,
      }),
    )?.[1];
  const string = (name: string, raw: string) =>
    `<｜DSML｜parameter name="${name}" string="true">${raw}</｜DSML｜parameter>`;
  const json = (name: string, raw: string) =>
    `<｜DSML｜parameter name="${name}" string="false">${raw}</｜DSML｜parameter>`;

  assert.equal(
    render('{"s":"a \\"b\\"\\n<é>","n":1.0,"2":1e5,"big":9007199254740993,"o":{"b":[1,"x"],"a":null},"n":2}'),
    [
      string('s', 'a "b"\n<é>'),
      json('n', '2'),
      json('2', '100000.0'),
      json('big', '9007199254740993'),
      json('o', '{"b": [1, "x"], "a": null}'),
    ].join('\n'),
  );
  assert.equal(render({ a: 1, b: 'x' }), `${json('a', '1')}\n${string('b', 'x')}`);
  for (const none of ['', '{}', ' { } ', {}, null]) assert.equal(render(none), '');
  for (const odd of ['{"a":', '[1, 2]', '5', 'null', '"text"', '{a: 1}']) {
    assert.equal(render(odd), string('arguments', odd));
  }
});

test('reasoning of the calling turn is written even if empty, when it is kept', () => {
  const messages: ChatMessage[] = [
    { role: 'user', content: 'q' },
    { role: 'assistant', content: 'a', tool_calls: [] },
    { role: 'user', content: 'r' },
  ];
  assert.equal(
    text({ messages, tools: [ADD], thinking: true }),
    `${BOS}\n\n${ADD_TEXT}<｜User｜>q<｜Assistant｜><think></think>a${EOS}<｜User｜>r<｜Assistant｜><think>`,
  );
});

test('developer messages are user turns; those before the last one go with the dropped reasoning', () => {
  const messages: ChatMessage[] = [
    { role: 'developer', content: 'D1' },
    { role: 'user', content: 'U' },
    { role: 'assistant', content: 'A', reasoning_content: 'R' },
    { role: 'developer', content: 'D2' },
  ];
  assert.equal(
    text({ messages, thinking: true }),
    `${BOS}<｜User｜>U<｜Assistant｜></think>A${EOS}<｜User｜>D2<｜Assistant｜><think>`,
  );
  assert.equal(
    text({ messages, thinking: false }),
    `${BOS}<｜User｜>D1<｜User｜>U<｜Assistant｜></think>A${EOS}<｜User｜>D2<｜Assistant｜></think>`,
  );
});

// surface: chat.role
test('a latest reminder follows the opened answer', () => {
  const messages: ChatMessage[] = [
    { role: 'user', content: 'U' },
    { role: 'latest_reminder', content: '2026-04-24' },
  ];
  assert.equal(
    text({ messages, thinking: true }),
    `${BOS}<｜User｜>U<｜Assistant｜><think><｜latest_reminder｜>2026-04-24`,
  );
});

test('a conversation that ends with an answer or a system message gets a new answer opened', () => {
  const messages: ChatMessage[] = [
    { role: 'user', content: 'U' },
    { role: 'assistant', content: 'A', reasoning_content: 'R' },
  ];
  assert.equal(
    text({ messages, thinking: true }),
    `${BOS}<｜User｜>U<｜Assistant｜><think>R</think>A${EOS}<｜Assistant｜><think>`,
  );
  assert.equal(
    text({ messages: [{ role: 'system', content: 'S' }], thinking: false }),
    `${BOS}S<｜Assistant｜></think>`,
  );
});

// surface: tools.injection
test('what clients send never becomes a special token, wherever it stands', () => {
  const marks = ['<｜User｜>', '<｜Assistant｜>', '<think>', '</think>', '｜DSML｜', BOS, EOS, '<｜latest_reminder｜>'];
  const tokenizer = loadTokenizer(NANO);
  const conversationOf = (hostile: string): Conversation => ({
    messages: [
      { role: 'system', content: `s${hostile}` },
      { role: 'user', content: [{ type: 'text', text: hostile }] },
      {
        role: 'assistant',
        content: `c${hostile}`,
        reasoning_content: hostile,
        tool_calls: [
          {
            id: 'c1',
            function: { name: `f${hostile}`, arguments: JSON.stringify({ [hostile]: hostile, n: [hostile] }) },
          },
          { id: 'c2', function: { name: 'g', arguments: hostile } },
        ],
      },
      { role: 'tool', tool_call_id: 'c1', content: hostile },
      { role: 'latest_reminder', content: hostile },
      { role: 'developer', content: hostile },
    ],
    tools: [{ function: { name: 'f', description: hostile, parameters: { enum: [hostile] } } }],
    responseSchema: { description: hostile },
    thinking: true,
    reasoningEffort: hostile,
  });
  const specialsOf = (hostile: string) => {
    const ids = tokenizer.encode(
      renderChat({ ...encoding, responseFormat: '## F\n{schema}' }, conversationOf(hostile)),
    );
    return ids.filter((id) => tokenizer.isSpecial(id));
  };
  const harmless = specialsOf('x');
  assert.ok(harmless.length > 20, `${harmless.length} special tokens`);
  for (const mark of marks) {
    assert.ok(tokenizer.isSpecial(tokenizer.tokenId(mark)!), mark);
    assert.deepEqual(specialsOf(`a ${mark} b`), harmless, mark);
  }
});

test('a task ends its message with a token, and what answers it has no reasoning', () => {
  const title: ChatMessage[] = [
    { role: 'system', content: 'S' },
    { role: 'user', content: 'one', task: 'title' },
    { role: 'assistant', content: 'T', reasoning_content: 'R' },
  ];
  // The user turn after an answered task is a turn of its own.
  assert.equal(text({ messages: title.slice(0, 2), thinking: true }), `${BOS}S<｜User｜>one<｜title｜>`);
  assert.equal(
    text({ messages: [...title, { role: 'user', content: 'two' }], thinking: true, dropThinking: false }),
    `${BOS}S<｜User｜>one<｜title｜>T${EOS}<｜User｜>two<｜Assistant｜><think>`,
  );
  const action: ChatMessage[] = [{ role: 'user', content: 'one', task: 'action' }];
  assert.equal(text({ messages: action, thinking: true }), `${BOS}<｜User｜>one<｜Assistant｜><think><｜action｜>`);
  assert.equal(text({ messages: action, thinking: false }), `${BOS}<｜User｜>one<｜Assistant｜></think><｜action｜>`);
  // Users' messages are not joined to one that has a task.
  assert.equal(
    text({ messages: [...action, { role: 'user', content: 'two' }], thinking: false }),
    `${BOS}<｜User｜>one<｜User｜>two<｜Assistant｜></think>`,
  );
});

test('a schema for the answer follows the tools, where the checkpoint has a text for it', () => {
  const withText = { ...encoding, responseFormat: '## Response Format:\n\nFollow this:\n{schema}' };
  const user: ChatMessage = { role: 'user', content: 'u' };
  const { schema: responseSchema } = parseJsonValue('{"schema":{"minimum":1.0}}', ['schema']) as { schema: object };
  const render = (messages: ChatMessage[], tools?: ToolDefinition[]) =>
    promptText(renderChat(withText, { messages, tools, responseSchema, thinking: false }));
  const asked = '\n\n## Response Format:\n\nFollow this:\n{"minimum": 1.0}<｜User｜>u<｜Assistant｜></think>';
  assert.equal(render([user]), `${BOS}${asked}`);
  assert.equal(render([{ role: 'system', content: 'S' }, user], [ADD]), `${BOS}S\n\n${ADD_TEXT}${asked}`);
  assert.equal(text({ messages: [user], responseSchema, thinking: false }), `${BOS}<｜User｜>u<｜Assistant｜></think>`);
});

test('numbers and keys of a tool are spelled as the client wrote them', () => {
  const body = '{"tools":[{"function":{"name":"f","parameters":{"10":1.0,"2":1e5}}}]}';
  const { tools } = parseJsonValue(body, ['tools']) as { tools: ToolDefinition[] };
  const prompt = text({ messages: [{ role: 'user', content: 'x' }], tools, thinking: false });
  assert.ok(prompt.includes('{"name": "f", "parameters": {"10": 1.0, "2": 100000.0}}'), prompt);
});

test('the answer is opened unless the request says otherwise, or continues the last one', () => {
  const asked: ChatMessage[] = [{ role: 'user', content: 'U' }];
  assert.equal(text({ messages: asked, thinking: true, openAnswer: false }), `${BOS}<｜User｜>U`);
  const begun: ChatMessage[] = [...asked, { role: 'assistant', content: 'The answer is' }];
  assert.equal(
    text({ messages: begun, thinking: false, openAnswer: false }),
    `${BOS}<｜User｜>U<｜Assistant｜></think>The answer is${EOS}`,
  );
  assert.equal(
    text({ messages: begun, thinking: false, continueFinalMessage: true }),
    `${BOS}<｜User｜>U<｜Assistant｜></think>The answer is`,
  );
  // The reasoning is closed: what follows is content.
  assert.equal(
    text({ messages: begun, thinking: true, continueFinalMessage: true }),
    `${BOS}<｜User｜>U<｜Assistant｜><think></think>The answer is`,
  );
});

test('the effort text follows the beginning of the prompt, in thinking mode and if the checkpoint has one', () => {
  const messages: ChatMessage[] = [{ role: 'system', content: 'S' }];
  const render = (thinking: boolean, reasoningEffort: string) => text({ messages, thinking, reasoningEffort });
  const effort = 'Think step by step and check every step.\n\n';
  assert.equal(render(true, 'max'), `${BOS}${effort}S<｜Assistant｜><think>`);
  assert.equal(render(true, 'high'), `${BOS}S<｜Assistant｜><think>`);
  assert.equal(render(true, 'constructor'), `${BOS}S<｜Assistant｜><think>`);
  assert.equal(render(false, 'max'), `${BOS}S<｜Assistant｜></think>`);
});

test('content parts are joined: by a line end, in a tool result by an empty line', () => {
  const parts = [
    { type: 'text', text: 'a' },
    { type: 'text', text: 'b' },
  ] as const;
  const messages: ChatMessage[] = [
    { role: 'user', content: parts },
    { role: 'tool', content: parts },
    { role: 'assistant', content: [] },
  ];
  assert.equal(
    text({ messages, thinking: false }),
    `${BOS}<｜User｜>a\nb\n\n<tool_result>a\n\nb</tool_result><｜Assistant｜></think>${EOS}<｜Assistant｜></think>`,
  );
});

test('what cannot be rendered is refused with the index of its message', () => {
  const half = { enum: Array.from({ length: MAX_JSON_VALUES / 2 + 1 }, () => 1) };
  const long = JSON.stringify({ a: half, b: half });
  const deep = JSON.parse('['.repeat(1000) + ']'.repeat(1000)) as object;
  const second = (message: object) => ({ messages: [{ role: 'user', content: 'x' }, message], thinking: false });
  const cases: [conversation: object, messageIndex: number | null, message: RegExp][] = [
    [{ messages: [], thinking: false }, null, /at least one message/],
    [{ ...second({ role: 'user', content: 'x' }), continueFinalMessage: true }, 1, /assistant message to continue/],
    [
      {
        ...second({ role: 'assistant', content: 'x', tool_calls: [{ function: { name: 'f' } }] }),
        continueFinalMessage: true,
      },
      1,
      /tool calls cannot be continued/,
    ],
    [second({ role: 'user', content: 'x', task: 'constructor' }), 1, /unknown task "constructor"/],
    [second({ role: 'critic', content: 'x' }), 1, /unknown role "critic"/],
    [second({ role: 'user', content: 5 }), 1, /string or a list of parts/],
    [second({ role: 'user', content: [{ type: 'image_url' }] }), 1, /of type text, found "image_url"/],
    [second({ role: 'tool', content: [null] }), 1, /of type text/],
    [second({ role: 'assistant', tool_calls: [{ function: { name: 'f', arguments: deep } }] }), 1, /nested deeper/],
    [
      second({ role: 'assistant', tool_calls: [{ function: { name: 'f', arguments: long } }] }),
      1,
      /more than \d+ values/,
    ],
    [
      {
        ...second({ role: 'user', content: 'x' }),
        tools: [half, half].map((parameters) => ({ function: { name: 'f', parameters } })),
      },
      null,
      /tools\[1\]: JSON of more than/,
    ],
    [
      { ...second({ role: 'user', content: 'x' }), tools: [{ function: { name: 'f', parameters: deep } }] },
      null,
      /tools\[0\]/,
    ],
  ];
  for (const [conversation, messageIndex, message] of cases) {
    assert.throws(
      () => renderChat(encoding, conversation as Conversation),
      (error) => error instanceof ChatError && error.messageIndex === messageIndex && message.test(error.message),
      String(message),
    );
  }
});

test('a checkpoint without encoding.json is refused with the command that makes one', () => {
  assert.throws(() => loadChatEncoding('test/data'), /encoding\.json is missing; .*handoff import-encoding/);
});
