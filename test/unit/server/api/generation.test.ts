import assert from 'node:assert/strict';
import { test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { inspect } from 'node:util';
import fc from 'fast-check';
import { createChatParser } from '../../../../model/chat-parser.ts';
import { createDetokenizer, loadTokenizer } from '../../../../model/tokenizer.ts';
import { appendDelta, createGeneration, createStopMatcher, sumDeltas } from '../../../../server/api/generation.ts';
import type { Answer, AnswerDelta, ChoiceUsage, Finish, Generation } from '../../../../server/api/generation.ts';

const tokenizer = loadTokenizer(fileURLToPath(new URL('../../../../model/nano', import.meta.url)));
const eos = tokenizer.eosId;
const dsml = '｜DSML｜';

/** A tool block as the model writes it: calls as [name, parameters as [name, isString, text]]. */
function toolBlock(calls: [string, [string, boolean, string][]][]): string {
  const invokes = calls.map(([name, parameters]) => {
    const lines = parameters.map(([key, isString, value]) => {
      return `<${dsml}parameter name="${key}" string="${isString}">${value}</${dsml}parameter>\n`;
    });
    return `<${dsml}invoke name="${name}">\n${lines.join('') || '\n'}</${dsml}invoke>\n`;
  });
  return `\n\n<${dsml}tool_calls>\n${invokes.join('')}</${dsml}tool_calls>`;
}

interface Setup {
  kind: 'chat' | 'completion';
  stop?: string[];
  stopTokenIds?: number[];
  thinking?: boolean;
  maxToolCalls?: number;
  skipSpecialTokens?: boolean;
  keepsStop?: boolean;
  minTokens?: number;
  reasoning?: 'separate' | 'inline' | 'hidden';
}

function makeGeneration(setup: Setup): Generation {
  const { kind, stop = [], stopTokenIds = [eos], thinking = false, maxToolCalls = Infinity } = setup;
  let callCount = 0;
  const isChat = kind === 'chat';
  return createGeneration({
    stop,
    stopTokenIds,
    isHidden: (id) => isChat && id === eos,
    detokenizer: createDetokenizer(tokenizer, { skipSpecialTokens: !isChat && (setup.skipSpecialTokens ?? true) }),
    parser: isChat ? createChatParser({ thinking, tools: true }) : null,
    thinking,
    onlyCalls: false,
    maxToolCalls,
    keepsStop: setup.keepsStop ?? false,
    minTokens: setup.minTokens ?? 0,
    reasoning: setup.reasoning ?? 'separate',
    newCallId: () => `call_${(callCount += 1)}`,
  });
}

interface Result {
  answer: Answer;
  finish: Finish;
  usage: ChoiceUsage;
}

/** Feed `ids` in batches of the given sizes, repeated; stop as a room would when the generation is finished. */
function run(setup: Setup, ids: readonly number[], sizes: readonly number[], outcome: 'stop' | 'length'): Result {
  const generation = makeGeneration(setup);
  const deltas: AnswerDelta[] = [];
  let start = 0;
  for (let turn = 0; start < ids.length && generation.finish === null; turn += 1) {
    const end = start + sizes[turn % sizes.length]!;
    for (const delta of generation.push(ids.slice(start, end))) deltas.push(delta);
    start = end;
  }
  for (const delta of generation.end(outcome)) deltas.push(delta);
  for (const delta of deltas) assert.ok(delta.kind === 'tool_call' || delta.text !== '', 'an empty delta');
  assert.ok(generation.finish !== null, `no finish after ${inspect(outcome)}`);
  return { answer: sumDeltas(deltas), finish: generation.finish, usage: generation.usage };
}

/** The rule for stop strings, written plainly: the first end wins, at one end the longest. */
function cutAtStop(text: string, stops: readonly string[]): { text: string; matched: string | null } {
  for (let end = 1; end <= text.length; end += 1) {
    const matches = stops.filter((stop) => text.slice(0, end).endsWith(stop));
    const longest = matches.toSorted((a, b) => b.length - a.length)[0];
    if (longest !== undefined) return { text: text.slice(0, end - longest.length), matched: longest };
  }
  return { text, matched: null };
}

const seedOf = Number(process.env['FC_SEED'] ?? 20_260_727);
const parameters = { seed: seedOf, numRuns: 300 };
const sizes = fc.array(fc.integer({ min: 1, max: 7 }), { minLength: 1, maxLength: 5 });
const pieces = [
  'a',
  'b',
  'ab',
  'ba',
  ' ',
  '\n',
  '\n\n',
  '<',
  '</',
  'END',
  'EN',
  '世',
  '界',
  '😀',
  'é',
  'Alice:',
  ' Al',
];
const prose = fc.array(fc.constantFrom(...pieces), { maxLength: 30 }).map((parts) => parts.join(''));
const stops = fc.uniqueArray(fc.constantFrom('ab', 'abab', 'b', 'END', '\n\n', 'Alice:', '界😀', 'aba', '</'), {
  maxLength: 3,
});

// surface: answer.stop
test(`the text of a completion ends before the stop string that ends first, for every split (seed ${seedOf})`, () => {
  fc.assert(
    fc.property(prose, stops, sizes, (text, stop, batchSizes) => {
      const ids = tokenizer.encode(text);
      const result = run({ kind: 'completion', stop }, ids, batchSizes, 'length');
      const expected = cutAtStop(text, stop);
      assert.equal(result.answer.content, expected.text);
      assert.deepEqual(result.finish, {
        reason: expected.matched === null ? 'length' : 'stop',
        matchedStop: expected.matched,
      });
    }),
    parameters,
  );
});

test(`every split of the tokens gives the same answer, calls, finish and usage (seed ${seedOf})`, () => {
  const call = fc.tuple(
    fc.constantFrom('add', 'now'),
    fc.array(fc.tuple(fc.constantFrom('x', 'y'), fc.constant(true), prose), { maxLength: 2 }),
  );
  const output = fc
    .tuple(prose, fc.boolean(), prose, fc.array(call, { maxLength: 2 }))
    .map(([first, , second, calls]) => {
      return `${first}</think>${second}${calls.length === 0 ? '' : toolBlock(calls as Parameters<typeof toolBlock>[0])}`;
    });
  const cut = fc.double({ min: 0.2, max: 1, noNaN: true });
  fc.assert(
    fc.property(output, stops, sizes, cut, fc.boolean(), (text, stop, batchSizes, share, ends) => {
      const all = [...tokenizer.encode(text), eos];
      const ids = ends ? all : all.slice(0, Math.floor(all.length * share));
      const setup: Setup = { kind: 'chat', thinking: true, stop };
      const whole = run(setup, ids, [ids.length + 1], ends ? 'stop' : 'length');
      assert.deepEqual(run(setup, ids, batchSizes, ends ? 'stop' : 'length'), whole);
      assert.deepEqual(run(setup, ids, [1], ends ? 'stop' : 'length'), whole);
      assert.ok(!JSON.stringify(whole.answer).includes(dsml), 'markup shows');
      assert.ok(whole.usage.reasoningTokens <= whole.usage.completionTokens, inspect(whole.usage));
    }),
    parameters,
  );
});

test('what has been sent is never more than the final answer', () => {
  const generation = makeGeneration({ kind: 'completion', stop: ['Alice:', '\n\n'] });
  let sent = '';
  for (const id of tokenizer.encode('Hi Al\nAlic Alice: hidden')) {
    for (const delta of generation.push([id])) sent += delta.kind === 'content' ? delta.text : '';
    assert.ok('Hi Al\nAlic '.startsWith(sent), JSON.stringify(sent));
  }
  assert.equal(sent, 'Hi Al\nAlic ');
  assert.deepEqual(generation.finish, { reason: 'stop', matchedStop: 'Alice:' });
});

test('a stop string in the first token gives an empty answer with consistent usage', () => {
  const { answer, finish, usage } = run({ kind: 'completion', stop: ['a'] }, tokenizer.encode('a'), [1], 'length');
  assert.equal(answer.content, '');
  assert.deepEqual(finish, { reason: 'stop', matchedStop: 'a' });
  assert.deepEqual(usage, { completionTokens: 1, reasoningTokens: 0 });
});

test('text held back for a stop string that never completes is sent at the end', () => {
  const ids = [...tokenizer.encode('wait: EN'), eos];
  const { answer, finish } = run({ kind: 'chat', stop: ['END'] }, ids, [1], 'stop');
  assert.equal(answer.content, 'wait: EN');
  assert.deepEqual(finish, { reason: 'stop', matchedStop: eos });
});

test('the matcher of one request knows nothing of another', () => {
  createStopMatcher(['X']).push('aX');
  assert.deepEqual(createStopMatcher([]).push('aXb'), { free: 'aXb', matched: null });
});

test('reasoning, content and calls of a thinking answer are told apart', () => {
  const block = toolBlock([
    [
      'add',
      [
        ['a', false, '2'],
        ['note', true, ' x>&1 '],
      ],
    ],
    ['now', []],
  ]);
  const ids = [...tokenizer.encode(`use tool</think>Calling.${block}`), eos];
  const { answer, finish, usage } = run({ kind: 'chat', thinking: true }, ids, [3], 'stop');
  assert.deepEqual(answer, {
    reasoning: 'use tool',
    content: 'Calling.',
    toolCalls: [
      { id: 'call_1', name: 'add', arguments: '{"a": 2, "note": " x>&1 "}' },
      { id: 'call_2', name: 'now', arguments: '{}' },
    ],
    logged: [],
  });
  assert.deepEqual(finish, { reason: 'tool_calls', matchedStop: eos });
  assert.equal(usage.completionTokens, ids.length);
  assert.equal(usage.reasoningTokens, tokenizer.encode('use tool</think>').length);
});

// surface: answer.finish-reason
test('an answer cut by length in its reasoning has no content, and length wins over tool calls', () => {
  const cut = run({ kind: 'chat', thinking: true }, tokenizer.encode('still thinking'), [1], 'length');
  assert.deepEqual(cut.answer, { reasoning: 'still thinking', content: '', toolCalls: [], logged: [] });
  assert.equal(cut.finish.reason, 'length');
  const ids = tokenizer.encode(toolBlock([['add', [['a', false, '2']]]]));
  assert.equal(run({ kind: 'chat' }, ids, [1], 'length').finish.reason, 'length');
});

test('a stop string inside a tool block does not stop the call', () => {
  const ids = [...tokenizer.encode(toolBlock([['add', [['note', true, 'the END is near']]]])), eos];
  const { answer, finish } = run({ kind: 'chat', stop: ['END', 'name'] }, ids, [2], 'stop');
  assert.equal(answer.toolCalls[0]?.arguments, '{"note": "the END is near"}');
  assert.equal(finish.reason, 'tool_calls');
});

test('with one call allowed, the answer ends before the second', () => {
  const ids = [
    ...tokenizer.encode(
      toolBlock([
        ['add', []],
        ['now', []],
      ]),
    ),
    eos,
  ];
  const { answer, finish, usage } = run({ kind: 'chat', maxToolCalls: 1 }, ids, [1], 'stop');
  assert.deepEqual(answer.toolCalls, [{ id: 'call_1', name: 'add', arguments: '{}' }]);
  assert.deepEqual(finish, { reason: 'tool_calls', matchedStop: null });
  assert.ok(usage.completionTokens < ids.length, `${usage.completionTokens} of ${ids.length} tokens`);
});

test('with no calls allowed, a tool block is dropped and the answer just stops', () => {
  const ids = [...tokenizer.encode(`No.${toolBlock([['add', []]])}`), eos];
  const { answer, finish } = run({ kind: 'chat', maxToolCalls: 0 }, ids, [1], 'stop');
  assert.deepEqual(answer, { reasoning: '', content: 'No.', toolCalls: [], logged: [] });
  assert.equal(finish.reason, 'stop');
});

// surface: answer.special
test('a completion keeps the text of special tokens only when asked to', () => {
  const ids = [...tokenizer.encode('Done.'), eos];
  assert.equal(run({ kind: 'completion' }, ids, [1], 'stop').answer.content, 'Done.');
  const kept = run({ kind: 'completion', skipSpecialTokens: false }, ids, [1], 'stop');
  assert.equal(kept.answer.content, 'Done.<｜end▁of▁sentence｜>');
});

test('a character cut off by the token limit becomes one replacement character', () => {
  const ids = tokenizer.encode('A世');
  const cut = ids.slice(0, -1);
  assert.ok(tokenizer.decode(cut).endsWith('\uFFFD'), 'the sample must cut a character');
  assert.equal(run({ kind: 'completion' }, cut, [1], 'length').answer.content, tokenizer.decode(cut));
});

test('tokens after the end are neither read nor counted', () => {
  const generation = makeGeneration({ kind: 'completion', stop: ['b'] });
  generation.push(tokenizer.encode('abaaaa'));
  const { completionTokens } = generation.usage;
  assert.deepEqual(generation.push(tokenizer.encode('more')), []);
  assert.deepEqual(generation.end('length'), []);
  assert.equal(generation.usage.completionTokens, completionTokens);
  assert.equal(generation.finish?.matchedStop, 'b');
});

test('deltas join only where they are of one kind and one call', () => {
  const deltas: AnswerDelta[] = [];
  appendDelta(deltas, { kind: 'content', text: 'a' });
  appendDelta(deltas, { kind: 'content', text: 'b' });
  appendDelta(deltas, { kind: 'tool_arguments', index: 0, text: '{' });
  appendDelta(deltas, { kind: 'tool_arguments', index: 1, text: '{' });
  appendDelta(deltas, { kind: 'content', text: '' });
  assert.deepEqual(deltas, [
    { kind: 'content', text: 'ab' },
    { kind: 'tool_arguments', index: 0, text: '{' },
    { kind: 'tool_arguments', index: 1, text: '{' },
  ]);
});

// surface: chat.stop-extras
test('a stop string stays in the answer when it is to be kept', () => {
  const ids = tokenizer.encode('one END two');
  const { answer, finish } = run({ kind: 'completion', stop: ['END'], keepsStop: true }, ids, [1], 'length');
  assert.equal(answer.content, 'one END');
  assert.equal(finish.matchedStop, 'END');
});

// surface: chat.min-tokens
test('stop strings count only behind the least number of tokens', () => {
  const ids = tokenizer.encode('x x x x x x');
  const least = 3;
  const { answer, usage } = run({ kind: 'completion', stop: ['x'], minTokens: least }, ids, [1], 'length');
  assert.ok(usage.completionTokens > least, `${usage.completionTokens} tokens`);
  assert.match(answer.content, /^x/);
  assert.ok(answer.content.length < 'x x x x x x'.length, answer.content);
});

// surface: chat.reasoning-shown
test('reasoning can be hidden, or written before the content as the model does', () => {
  const ids = [...tokenizer.encode('use tool</think>Done.'), eos];
  const hidden = run({ kind: 'chat', thinking: true, reasoning: 'hidden' }, ids, [2], 'stop');
  assert.deepEqual(hidden.answer, { reasoning: '', content: 'Done.', toolCalls: [], logged: [] });
  assert.ok(hidden.usage.reasoningTokens > 0, inspect(hidden.usage));
  const inline = run({ kind: 'chat', thinking: true, reasoning: 'inline' }, ids, [2], 'stop');
  assert.equal(inline.answer.content, 'use tool</think>Done.');
  assert.equal(inline.answer.reasoning, '');
});

/** A made-up choice for each token, told apart by its logarithm. */
const choicesOf = (ids: readonly number[]) => ids.map((id, index) => ({ id, logprob: -index, top: [] }));

function runLogged(setup: Setup, ids: readonly number[], sizes: readonly number[]): AnswerDelta[] {
  const generation = makeGeneration(setup);
  const choices = choicesOf(ids);
  const deltas: AnswerDelta[] = [];
  for (let start = 0, turn = 0; start < ids.length && generation.finish === null; turn += 1) {
    const end = start + sizes[turn % sizes.length]!;
    deltas.push(...generation.push(ids.slice(start, end), choices.slice(start, end)));
    start = end;
  }
  deltas.push(...generation.end('length'));
  return deltas;
}

test(`the tokens shown with an answer are the same for every split (seed ${seedOf})`, () => {
  const text = 'Ein Käse 世界 🧀 und ENDE';
  fc.assert(
    fc.property(sizes, fc.constantFrom<string[]>([], ['ENDE'], ['D'], ['se 世']), (split, stop) => {
      const ids = tokenizer.encode(text);
      const whole = sumDeltas(runLogged({ kind: 'completion', stop }, ids, [1])).logged;
      assert.deepEqual(sumDeltas(runLogged({ kind: 'completion', stop }, ids, split)).logged, whole);
      assert.notDeepEqual(whole, []);
    }),
    parameters,
  );
});

// surface: answer.logprobs
test('a token is shown with the piece of text in which it begins, and not if none of it is shown', () => {
  const ids = tokenizer.encode('one ENtwo END three');
  const { content, logged } = sumDeltas(runLogged({ kind: 'completion', stop: ['END'] }, ids, [1]));
  assert.equal(content, 'one ENtwo ');
  assert.deepEqual(
    logged.map(({ id }) => id),
    ids.slice(0, logged.length),
    'in order and without gaps',
  );
  for (const { offset, id } of logged) {
    assert.ok(offset < content.length, `offset ${offset} of ${content.length}`);
    assert.equal(content.slice(offset, offset + 1), tokenizer.decode([id]).slice(0, 1));
  }
  assert.ok(tokenizer.decode(ids.slice(0, logged.length)).startsWith(content), 'all of the text has its tokens');
  assert.ok(!tokenizer.decode(ids.slice(0, logged.length - 1)).startsWith(content), 'and no token has none');
});

test('marks that show nothing and the tokens of tool calls have no entry', () => {
  const ids = [...tokenizer.encode(`think</think>Calling.${toolBlock([['add', [['a', false, '2']]]])}`), eos];
  const { logged } = sumDeltas(runLogged({ kind: 'chat', thinking: true }, ids, [3]));
  // The token of the full stop goes on with the blank lines that belong to the block.
  assert.equal(tokenizer.decode(logged.map(({ id }) => id)).trimEnd(), 'thinkCalling.');
});

// surface: answer.logprobs
test('marks have an entry where the answer has their text, and dropped closing tags have none', () => {
  const textsOf = (setup: Partial<Setup>, text: string, step = 1): [string, string] => {
    const { content, logged } = sumDeltas(runLogged({ kind: 'chat', ...setup }, tokenizer.encode(text), [step]));
    return [content, tokenizer.decode(logged.map(({ id }) => id))];
  };
  for (const text of ['</think>a</think>', '<think>b', 'c ｜DSML｜ d', 'e\n<｜DSML｜parameter name="a"']) {
    assert.deepEqual(textsOf({}, text), [text, text]);
  }
  for (const step of [1, 2, 99]) {
    const stray = 'a 1</｜DSML｜parameter></｜DSML｜invoke> b 2</｜DSML｜tool_calls>';
    assert.deepEqual(textsOf({}, stray, step), ['a 1 b 2', 'a 1 b 2']);
    const inline: Partial<Setup> = { thinking: true, reasoning: 'inline' };
    assert.deepEqual(textsOf(inline, 'a</think>b</think>', step), ['a</think>b</think>', 'a</think>b</think>']);
  }
  // A call closes the reasoning without a mark of the model's own.
  const closed = textsOf({ thinking: true, reasoning: 'inline' }, `a${toolBlock([['add', []]])}`);
  assert.deepEqual(closed, ['a</think>', 'a']);
});

test('a token that breaks off a character begins behind it, and those that make one up all have an entry', () => {
  const cheese = tokenizer.encode('🧀');
  assert.ok(cheese.length > 1, 'the sample must be of several tokens');
  const mark = tokenizer.tokenId('</think>')!;
  const ids = [...cheese, ...cheese.slice(0, -1), mark];
  const { content, logged } = sumDeltas(runLogged({ kind: 'chat' }, ids, [1]));
  assert.equal(content, '🧀\ufffd</think>');
  assert.deepEqual(
    logged.map(({ id, offset }) => [id, offset]),
    ids.map((id, index) => [id, index < cheese.length ? 0 : index < ids.length - 1 ? 2 : 3]),
  );
});
