import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import test from 'node:test';
import fc from 'fast-check';
import { createChatParser } from '../../../model/chat-parser.ts';
import { loadChatEncoding, promptText, renderChat } from '../../../model/chat.ts';
import type { ChatDelta } from '../../../model/chat.ts';
import { createDetokenizer, loadTokenizer } from '../../../model/tokenizer.ts';
import { parseCompletion } from '../../reference/completion.ts';

const THINKING = { thinking: true, tools: true };
const CHAT = { thinking: false, tools: true };

const BLOCK = '<｜DSML｜tool_calls>\n';
const BLOCK_END = '</｜DSML｜tool_calls>';
const INVOKE_END = '</｜DSML｜invoke>\n';
const invoke = (name: string, ...parameters: string[]) =>
  `<｜DSML｜invoke name="${name}">\n${parameters.join('\n')}\n${INVOKE_END}`;
const string = (name: string, text: string) =>
  `<｜DSML｜parameter name="${name}" string="true">${text}</｜DSML｜parameter>`;
const json = (name: string, text: string) =>
  `<｜DSML｜parameter name="${name}" string="false">${text}</｜DSML｜parameter>`;

interface Answer {
  reasoning: string;
  content: string;
  calls: { name: string; arguments: string }[];
  /** Calls read to their end. */
  complete: number;
}

test('content and reasoning are told apart by how the prompt ended', () => {
  const rows: [options: { thinking: boolean; tools: boolean }, text: string, reasoning: string, content: string][] = [
    [CHAT, '7', '', '7'],
    [THINKING, 'why</think>because', 'why', 'because'],
    [THINKING, 'never ends\n\n', 'never ends\n\n', ''],
    [THINKING, '</think>7', '', '7'],
    [THINKING, '<think>why</think>7', 'why', '7'],
    [THINKING, '<think>', '', ''],
    [THINKING, '<thi', '<thi', ''],
    [THINKING, '<think><think>a', '<think>a', ''],
    [THINKING, 'a</think>b</think>c<think>', 'a', 'b</think>c<think>'],
    // Without <think> in the prompt, think tags are text.
    [CHAT, '<think>a</think>b', '', '<think>a</think>b'],
    [THINKING, 'a </thin', 'a </thin', ''],
    [CHAT, 'a\n\n', '', 'a\n\n'],
    [CHAT, 'a <', '', 'a <'],
    [CHAT, '1 < 2 </b> <｜User｜> <｜DSML｜other>', '', '1 < 2 </b> <｜User｜> <｜DSML｜other>'],
    // Public servers escape markup like this when they quote it.
    [CHAT, '<｜｜DSML｜｜tool_calls> <｜｜DSML｜｜invoke', '', '<｜｜DSML｜｜tool_calls> <｜｜DSML｜｜invoke'],
    [CHAT, 'x <| y <|D |> <｜DSML｜call> <｜DSML｜  calls>', '', 'x <| y <|D |> <｜DSML｜call> <｜DSML｜  calls>'],
    [CHAT, 'f <|', '', 'f <|'],
    // Closing tags that close nothing are no text.
    [CHAT, 'a</｜DSML｜tool_calls>b</｜DSML｜ invoke>\n</|DSML|parameter>', '', 'ab\n'],
    [THINKING, 'a</｜DSML｜invoke>b</think>c', 'ab', 'c'],
    [CHAT, 'a</｜DSML｜par', '', 'a'],
    [CHAT, 'a</｜DSML｜other> </', '', 'a</｜DSML｜other> </'],
    [CHAT, '', '', ''],
  ];
  for (const [options, text, reasoning, content] of rows) {
    assert.deepEqual(parse(text, options), { reasoning, content, calls: [], complete: 0 }, JSON.stringify(text));
  }
});

test('a tool call after reasoning and content is read', () => {
  const text = `use tool</think>Calling.\n\n${BLOCK}${invoke('add', json('a', '2'), string('note', 'x'))}${BLOCK_END}`;
  assert.deepEqual(parse(text, THINKING), {
    reasoning: 'use tool',
    content: 'Calling.',
    calls: [{ name: 'add', arguments: '{"a": 2, "note": "x"}' }],
    complete: 1,
  });
});

test('every sample output is read: the calls of tool samples, the reasoning of thinking ones', () => {
  interface Sample {
    output_text: string;
    thinking: boolean;
    tools: object[] | null;
  }
  const lines = readFileSync('test/data/nano-samples.jsonl', 'utf8').trim().split('\n');
  assert.equal(lines.length, 74);
  let callCount = 0;
  for (const line of lines) {
    const sample = JSON.parse(line) as Sample;
    const text = sample.output_text.replace(/<｜end▁of▁sentence｜>$/, '');
    const answer = parse(text, { thinking: sample.thinking, tools: sample.tools !== null });
    callCount += answer.complete;
    assert.equal(answer.calls.length, answer.complete);
    assert.doesNotMatch(answer.reasoning + answer.content, /DSML|think>/);
    if (answer.calls.length > 0) continue;
    assert.equal(sample.thinking ? `${answer.reasoning}</think>${answer.content}` : answer.content, text);
  }
  assert.equal(callCount, 1);
  assert.deepEqual(parse(`\n\n${BLOCK}${invoke('book_trip', string('origin', 'Sydney'))}${BLOCK_END}`, CHAT).calls, [
    { name: 'book_trip', arguments: '{"origin": "Sydney"}' },
  ]);
});

// surface: tools.values
test('arguments are assembled as text', () => {
  const rows: [parameters: string[], args: string][] = [
    [[], '{}'],
    [[string('s', '')], '{"s": ""}'],
    [[string('s', 'Zürich "q" \\ \n\t\u0001 😀')], '{"s": "Zürich \\"q\\" \\\\ \\n\\t\\u0001 😀"}'],
    [
      [string('s', '<a></｜DSML｜invoke></｜DSML｜param\n\n<｜DSML｜tool_calls>')],
      JSON.stringify({ s: '<a></｜DSML｜invoke></｜DSML｜param\n\n<｜DSML｜tool_calls>' }).replace(':', ': '),
    ],
    [[string('cmd', 'make 2>&1')], '{"cmd": "make 2>&1"}'],
    // JSON is passed on as it was written.
    [[json('n', ' 1.0 '), json('o', '{"b":1,"a":[ ]}')], '{"n":  1.0 , "o": {"b":1,"a":[ ]}}'],
    [[json('broken', '{"a":')], '{"broken": "{\\"a\\":"}'],
    [[json('nan', 'NaN')], '{"nan": "NaN"}'],
    [[json('empty', '')], '{"empty": ""}'],
    [[json('k', '1'), json('k', '2')], '{"k": 1, "k": 2}'],
    [[string('a"b', 'x'), string('c>d', 'y')], '{"a\\"b": "x", "c>d": "y"}'],
    [['<｜DSML｜parameter name="p">5</｜DSML｜parameter>'], '{"p": "5"}'],
    // A JSON object in the place of parameters.
    [['{"a": 1, "b": {}}'], '{"a": 1, "b": {}}'],
    [['[1]'], '{}'],
    [['{"a":'], '{}'],
  ];
  for (const [parameters, args] of rows) {
    const answer = parse(`${BLOCK}${invoke('f', ...parameters)}${BLOCK_END}`, CHAT);
    assert.deepEqual(answer, { reasoning: '', content: '', calls: [{ name: 'f', arguments: args }], complete: 1 });
  }
});

test('several calls of one block are numbered from 0', () => {
  const parser = createChatParser(CHAT);
  const deltas = parser.push(`${BLOCK}${invoke('f', json('a', '1'))}${invoke('g')}${BLOCK_END}`);
  assert.deepEqual(deltas, [
    { kind: 'tool_name', index: 0, name: 'f' },
    { kind: 'tool_arguments', index: 0, text: '{"a": 1}' },
    { kind: 'tool_name', index: 1, name: 'g' },
    { kind: 'tool_arguments', index: 1, text: '{}' },
  ]);
  assert.equal(parser.toolCallCount, 2);
});

// surface: tools.reasoning
test('a call in the reasoning ends it, unless </think> came first', () => {
  for (const opener of [`\n\n${BLOCK}`, BLOCK, '\n\n', '']) {
    const answer = parse(`so${opener}${invoke('f')}${BLOCK_END}`, THINKING);
    assert.deepEqual(answer, {
      reasoning: 'so',
      content: '',
      calls: [{ name: 'f', arguments: '{}' }],
      complete: 1,
    });
  }
  const answer = parse(`so</think>now\n${invoke('f')}`, THINKING);
  assert.deepEqual([answer.reasoning, answer.content, answer.complete], ['so', 'now\n', 1]);
});

test('tags are read with a blank after the mark, with the later name of the block, and with ASCII bars', () => {
  const written = `now\n\n${BLOCK}${invoke('f', string('s', 'a </｜DSML｜invoke> b'), json('n', '1.0'))}${invoke('g')}${BLOCK_END}`;
  const expected = {
    reasoning: '',
    content: 'now',
    calls: [
      { name: 'f', arguments: '{"s": "a </｜DSML｜invoke> b", "n": 1.0}' },
      { name: 'g', arguments: '{}' },
    ],
    complete: 2,
  };
  assert.deepEqual(parse(written, CHAT), expected);
  // The value stays as it is.
  const respelled = (mark: string, block: string) =>
    written
      .replaceAll('｜DSML｜', mark)
      .replaceAll('tool_calls', block)
      .replace(`a </${mark}invoke> b`, 'a </｜DSML｜invoke> b');
  for (const mark of ['｜DSML｜', '｜DSML｜ ', '|DSML|', '|DSML| ']) {
    for (const block of ['tool_calls', 'calls']) {
      const text = respelled(mark, block);
      assert.deepEqual(parsePieces(text.split(''), CHAT), expected, text);
      assert.deepEqual(parse(`why${text.slice('now'.length)}`, THINKING), {
        ...expected,
        reasoning: 'why',
        content: '',
      });
      for (let length = 'now'.length; length < text.length; length++) {
        const { content } = parse(text.slice(0, length), CHAT);
        assert.match(content, /^now\n{0,2}<?\|?$/, content);
      }
    }
  }
});

test('a value ends only where its own tag is closed', () => {
  const value = 'x</｜DSML｜ parameter></|DSML|parameter>y';
  const answer = parse(`${BLOCK}${invoke('f', string('s', value))}${BLOCK_END}`, CHAT);
  assert.deepEqual(answer.calls, [{ name: 'f', arguments: JSON.stringify({ s: value }).replace(':', ': ') }]);
});

// surface: tools.after
test('text after the block is dropped, also a second block', () => {
  const block = `\n\n${BLOCK}${invoke('f')}${BLOCK_END}`;
  assert.deepEqual(parse(`a${block}\nbye${block}`, CHAT), {
    reasoning: '',
    content: 'a',
    calls: [{ name: 'f', arguments: '{}' }],
    complete: 1,
  });
});

test('an invoke that lacks its closing tag ends with the next invoke or the block', () => {
  const open = (name: string) => `<｜DSML｜invoke name="${name}">\n${json('a', '1')}\n`;
  assert.deepEqual(parse(`${BLOCK}${open('f')}${open('g')}${BLOCK_END}`, CHAT), {
    reasoning: '',
    content: '',
    calls: [
      { name: 'f', arguments: '{"a": 1}' },
      { name: 'g', arguments: '{"a": 1}' },
    ],
    complete: 2,
  });
});

test('a call whose closing tags are missing is complete where the model ended by itself, and nowhere else', () => {
  const begun = `${BLOCK}<｜DSML｜invoke name="f">\n`;
  const rows: [text: string, args: string, complete: number][] = [
    [`${begun}${json('a', '1')}\n`, '{"a": 1}', 1],
    [`${begun}${json('a', '1')}\n</｜DSML｜inv`, '{"a": 1}', 1],
    [`${begun}{"a": 1.0}\n`, '{"a": 1.0}', 1],
    [`${begun}${json('a', '1')}\n<｜DSML｜param`, '{"a": 1', 0],
    [`${begun}${json('a', '1')}\n<｜DSML｜parameter name="b`, '{"a": 1', 0],
    [`${begun}<｜DSML｜parameter name="s" string="true">cut of`, '{"s": "cut of', 0],
    [begun, '', 0],
    [`${begun}{"a":`, '', 0],
  ];
  for (const [text, args, complete] of rows) {
    const answer = parse(text, CHAT, true);
    assert.deepEqual([answer.calls, answer.complete], [[{ name: 'f', arguments: args }], complete], text);
    assert.deepEqual(parsePieces(text.split(''), CHAT, true), answer);
    assert.equal(parse(text, CHAT).complete, 0);
  }
});

test('unreadable headers are dropped and what follows them is read', () => {
  const good = invoke('g', json('b', '2'));
  const calls = [{ name: 'g', arguments: '{"b": 2}' }];
  for (const bad of [
    `<｜DSML｜invoke name=f>\n${json('a', '1')}\n${INVOKE_END}`,
    invoke('', json('a', '1')),
    '<｜DSML｜invoke name="f\n',
    'text between\n',
    `${json('a', '1')}\n`,
  ]) {
    const answer = parse(`x\n\n${BLOCK}${bad}${good}${BLOCK_END}`, CHAT);
    assert.deepEqual(answer, { reasoning: '', content: 'x', calls, complete: 1 }, bad);
  }
  const parameter = '<｜DSML｜parameter name=a>1</｜DSML｜parameter>';
  assert.deepEqual(parse(`${BLOCK}${invoke('g', parameter, json('b', '2'))}${BLOCK_END}`, CHAT).calls, calls);
});

test('without tools their markup is text', () => {
  const text = `a\n\n${BLOCK}${invoke('f')}${BLOCK_END}`;
  assert.equal(parse(text, { thinking: false, tools: false }).content, text);
  assert.equal(parse(text, { thinking: true, tools: false }).reasoning, text);
  assert.equal(parse('a\n\n<｜DSML｜to', { thinking: false, tools: false }).content, 'a\n\n<｜DSML｜to');
});

test('text is passed on at once unless it could be markup', () => {
  const parser = createChatParser(CHAT);
  const rows: [pushed: string, content: string][] = [
    ['Hi', 'Hi'],
    [' there\n', ' there'],
    ['\n', ''],
    ['\n', '\n'],
    ['<', ''],
    ['b>', '\n\n<b>'],
    ['<｜DSML｜', ''],
    ['x', '<｜DSML｜x'],
    ['\ud83d', ''],
    ['\ude00', '😀'],
  ];
  for (const [pushed, content] of rows) {
    assert.equal(collect(parser.push(pushed)).content, content, JSON.stringify(pushed));
  }
  assert.deepEqual(parser.end(false), []);
});

test('the name of a call and the text of a string argument are passed on while it is written', () => {
  const parser = createChatParser(CHAT);
  const rows: [pushed: string, deltas: ChatDelta[]][] = [
    [`${BLOCK}<｜DSML｜invoke name="f`, []],
    ['">\n', [{ kind: 'tool_name', index: 0, name: 'f' }]],
    ['<｜DSML｜parameter name="s" string="true">', [{ kind: 'tool_arguments', index: 0, text: '{"s": "' }]],
    ['one\n<', [{ kind: 'tool_arguments', index: 0, text: 'one\\n' }]],
    ['/two"', [{ kind: 'tool_arguments', index: 0, text: '</two\\"' }]],
    ['</｜DSML｜parameter>', [{ kind: 'tool_arguments', index: 0, text: '"' }]],
    // Other values wait until they are known to be JSON.
    ['<｜DSML｜parameter name="n" string="false">', [{ kind: 'tool_arguments', index: 0, text: ', "n": ' }]],
    ['[1, ', []],
    ['2]</｜DSML｜parameter>', [{ kind: 'tool_arguments', index: 0, text: '[1, 2]' }]],
    [`\n${INVOKE_END}`, [{ kind: 'tool_arguments', index: 0, text: '}' }]],
    [`${BLOCK_END}dropped`, []],
  ];
  for (const [pushed, deltas] of rows) assert.deepEqual(parser.push(pushed), deltas, JSON.stringify(pushed));
  assert.deepEqual(parser.end(false), []);
});

test('an answer cut anywhere shows a beginning of the whole one and no markup', () => {
  const calls = `\n\n${BLOCK}${invoke('f', string('s', 'a <b> "😀'), json('n', '[1]'))}${invoke('g')}${BLOCK_END}`;
  for (const [options, text] of [
    [CHAT, `Calling <it>.${calls}`],
    [THINKING, `use\n\ntool</think>Calling.${calls}`],
    [THINKING, `use tool${calls}`],
  ] as const) {
    const whole = parse(text, options);
    for (let length = 0; length < text.length; length++) {
      const cut = parse(text.slice(0, length), options);
      assert.doesNotMatch(cut.reasoning + cut.content, /DSML/);
      // Half of </think>, or the line ends before a tag, may turn out to be markup only later.
      assert.ok(whole.reasoning.startsWith(cut.reasoning.replace(/\n*(<(\/t?h?i?n?k?)?)?$/, '')), cut.reasoning);
      assert.ok(whole.content.startsWith(cut.content.replace(/\n*<?$/, '')), cut.content);
      assert.ok(
        cut.complete <= cut.calls.length && cut.calls.length <= whole.calls.length,
        `${cut.complete} complete of ${cut.calls.length}, ${whole.calls.length} in the whole`,
      );
      for (const [index, call] of cut.calls.entries()) {
        assert.equal(call.name, whole.calls[index]!.name);
        if (index < cut.complete) assert.equal(call.arguments, whole.calls[index]!.arguments);
        else
          assert.ok(whole.calls[index]!.arguments.startsWith(call.arguments.replace(/\\ud83d$/, '')), call.arguments);
      }
    }
  }
});

/** Texts that meet every branch: markup whole, broken and in the wrong place, between ordinary text. */
const FRAGMENTS = [
  'a',
  ' ',
  '\n',
  '\n\n',
  '<',
  '</',
  '>',
  '"',
  '">',
  '\\',
  '{',
  '}',
  '{"a": 1}',
  '12',
  'true',
  'é',
  '😀',
  '\ud83d',
  '\ude00',
  '<think>',
  '</think>',
  '</thi',
  '｜DSML｜',
  '<｜DSML｜',
  '</｜DSML｜',
  BLOCK,
  BLOCK_END,
  INVOKE_END,
  '<|',
  '｜DSML｜ ',
  '<｜DSML｜ calls>',
  '<|DSML|invoke name="h">',
  '</|DSML|invoke>',
  '<｜DSML｜ parameter name="r" string="true">',
  '</｜DSML｜ parameter>',
  `\n\n${BLOCK}`,
  '<｜DSML｜invoke name=',
  '<｜DSML｜invoke name="f">\n',
  '<｜DSML｜invoke name="">',
  'tool_calls>',
  '<｜DSML｜parameter name=',
  '<｜DSML｜parameter name="p" string="true">',
  '</｜DSML｜parameter>\n',
  ' string="false',
  '<｜DSML｜parameter name="q" string="false">',
  json('n', '5'),
  string('s', 'x'),
  invoke('g'),
];
const soup = fc.array(fc.constantFrom(...FRAGMENTS), { maxLength: 25 }).map((parts) => parts.join(''));
const options = fc.record({ thinking: fc.boolean(), tools: fc.boolean() });

test('every split of any text gives the same answer', () => {
  fc.assert(
    fc.property(soup, options, fc.array(fc.nat({ max: 300 }), { maxLength: 20 }), (text, parserOptions, cuts) => {
      const whole = parse(text, parserOptions);
      const ends = [...cuts.filter((cut) => cut < text.length).toSorted((a, b) => a - b), text.length];
      const pieces = ends.map((end, index) => text.slice(ends[index - 1] ?? 0, end));
      assert.deepEqual(parsePieces(pieces, parserOptions), whole);
      assert.deepEqual(parsePieces(text.split(''), parserOptions), whole);
    }),
    { seed: 5, numRuns: 4000 },
  );
});

test('well-formed answers are read like the official parser does, under every split of their tokens', () => {
  const tokenizer = loadTokenizer('model/nano');
  const prose = fc
    .array(
      fc.constantFrom('a', ' so', '\n', '\n\n', '<', '</', '>', '世', '😀', '"', '\\', '</b>', '<tool_result>', ' '),
      {
        maxLength: 8,
      },
    )
    .map((parts) => parts.join(''));
  const name = fc.stringMatching(/^[\w.:/-]{1,6}$/);
  const jsonText = fc.oneof(
    fc.constantFrom(
      '1',
      '1.0',
      '-0',
      '1e5',
      '12345678901234567890',
      '0.10',
      ' true',
      '{"b":1,"a":[ ],"10":2.50}',
      '"\\u00e9"',
    ),
    fc.json({ maxDepth: 2 }),
  );
  const parameter = fc.oneof(
    fc.tuple(name, prose).map(([key, text]) => [key, string(key, text)] as const),
    fc.tuple(name, jsonText).map(([key, text]) => [key, json(key, text)] as const),
  );
  const call = fc
    .tuple(name, fc.uniqueArray(parameter, { maxLength: 3, selector: ([key]) => key }))
    .map(([called, parameters]) => invoke(called, ...parameters.map(([, text]) => text)));
  const block = fc
    .array(call, { minLength: 1, maxLength: 3 })
    .map((calls) => `\n\n${BLOCK}${calls.join('')}${BLOCK_END}`);
  const reasoning = fc.option(prose, { nil: null });
  fc.assert(
    fc.property(reasoning, prose, fc.option(block, { nil: '' }), (thought, content, calls) => {
      const text = `${thought === null ? '' : `${thought}</think>`}${content}${calls}`;
      const thinking = thought !== null;
      const { calls: expectedCalls, ...expected } = parseCompletion(`${text}<｜end▁of▁sentence｜>`, thinking);
      const whole = { ...expected, calls: expectedCalls, complete: expectedCalls.length };
      assert.deepEqual(parse(text, { thinking, tools: true }), whole);

      const detokenizer = createDetokenizer(tokenizer, { skipSpecialTokens: false });
      const pieces = tokenizer.encode(text).map((id) => detokenizer.push(id));
      assert.deepEqual(parsePieces(pieces, { thinking, tools: true }), whole);
      for (let size = 2; size < 6; size++) {
        const groups = pieces.flatMap((_, at) => (at % size === 0 ? [pieces.slice(at, at + size).join('')] : []));
        assert.deepEqual(parsePieces(groups, { thinking, tools: true }), whole);
      }
    }),
    { seed: 10, numRuns: 600 },
  );
});

const OPENING = /<(｜DSML｜|\|DSML\|) ?((tool_)?calls>|invoke name=)/g;
const CLOSING = /<\/(｜DSML｜|\|DSML\|) ?((tool_)?calls|invoke|parameter)>/g;
const openingCount = (text: string) => [...text.matchAll(OPENING)].length;

test('any text gives complete calls with JSON objects, no opening tag as text and no empty delta', () => {
  let callCount = 0;
  fc.assert(
    fc.property(soup, fc.boolean(), (text, thinking) => {
      const answer = parse(text, { thinking, tools: true });
      // A closing tag left out between two halves of an opening one makes it whole: nobody writes that.
      const isJoined = openingCount(text.replaceAll(CLOSING, '')) > openingCount(text);
      assert.equal(isJoined ? 0 : openingCount(answer.reasoning) + openingCount(answer.content), 0);
      for (const call of answer.calls.slice(0, answer.complete)) {
        assert.match(call.arguments, /^\{/);
        assert.equal(typeof JSON.parse(call.arguments), 'object');
        callCount++;
      }
    }),
    { seed: 6, numRuns: 4000 },
  );
  assert.ok(callCount > 500, `the texts held only ${callCount} complete calls`);
});

test('without tools any text comes back whole', () => {
  fc.assert(
    fc.property(soup, (text) => {
      assert.equal(parse(text, { thinking: false, tools: false }).content, text);
    }),
    { seed: 7, numRuns: 1000 },
  );
});

test('rendered calls are read back with equal arguments', () => {
  const encoding = loadChatEncoding('model/nano');
  const name = fc.stringMatching(/^[\w.-]{1,8}$/);
  const args = fc.dictionary(name, fc.jsonValue({ maxDepth: 2 }), { noNullPrototype: true });
  fc.assert(
    fc.property(fc.array(fc.record({ name, args }), { minLength: 1, maxLength: 3 }), (calls) => {
      const toolCalls = calls.map((call) => ({ function: { name: call.name, arguments: JSON.stringify(call.args) } }));
      const prompt = promptText(
        renderChat(encoding, {
          messages: [{ role: 'assistant', content: 'Calling.', tool_calls: toolCalls }],
          thinking: false,
        }),
      );
      const text = /^<｜begin▁of▁sentence｜>(.*)<｜end▁of▁sentence｜>/s.exec(prompt)![1]!;
      const answer = parse(text, CHAT);
      assert.equal(answer.content, 'Calling.');
      assert.equal(answer.complete, calls.length);
      assert.deepEqual(
        answer.calls.map((call) => ({ name: call.name, args: JSON.parse(call.arguments) as unknown })),
        calls.map((call) => ({ name: call.name, args: JSON.parse(JSON.stringify(call.args)) as unknown })),
      );
    }),
    { seed: 8, numRuns: 500 },
  );
});

/** The answer in `text`: one that was cut, or with `stopped` one that the model ended. */
function parse(text: string, parserOptions: { thinking: boolean; tools: boolean }, stopped = false): Answer {
  return parsePieces([text], parserOptions, stopped);
}

function parsePieces(
  pieces: readonly string[],
  parserOptions: { thinking: boolean; tools: boolean },
  stopped = false,
): Answer {
  const parser = createChatParser(parserOptions);
  const deltas = pieces.flatMap((piece) => parser.push(piece));
  deltas.push(...parser.end(stopped));
  return { ...collect(deltas), complete: parser.toolCallCount };
}

/** Sum of the deltas, which must come in order and hold text. */
function collect(deltas: readonly ChatDelta[]): Omit<Answer, 'complete'> {
  const answer: Omit<Answer, 'complete'> = { reasoning: '', content: '', calls: [] };
  for (const delta of deltas) {
    switch (delta.kind) {
      case 'reasoning':
      case 'content':
        assert.notEqual(delta.text, '');
        answer[delta.kind] += delta.text;
        break;
      case 'tool_name':
        assert.equal(delta.index, answer.calls.length);
        answer.calls.push({ name: delta.name, arguments: '' });
        break;
      case 'tool_arguments':
        assert.notEqual(delta.text, '');
        assert.equal(delta.index, answer.calls.length - 1);
        answer.calls[delta.index]!.arguments += delta.text;
        break;
      default:
        delta satisfies never;
    }
  }
  return answer;
}
