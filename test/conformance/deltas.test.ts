/**
 * A stream is the body in pieces: for any output of the model, any split of its tokens into steps and any way to ask,
 * what a client puts together from the chunks is what it would have got as a whole.
 */
import assert from 'node:assert/strict';
import { after, test } from 'node:test';
import { inspect } from 'node:util';
import fc from 'fast-check';
import {
  assemble,
  assembleLogprobs,
  choiceOf,
  chunksOf,
  openApp,
  promptChoicesOf,
  tokenizer,
  type LoggedEntry,
} from '../support/ask.ts';

const app = openApp();
after(() => app.close());

const seed = Number(process.env['FC_SEED'] ?? 20_261_129);

/** Markup whole, broken and in the wrong place, between text of every kind. */
const call =
  '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">2.50</｜DSML｜parameter>\n</｜DSML｜invoke>\n';
const fragments = [
  call,
  call,
  `\n\n<｜DSML｜tool_calls>\n${call}${call}</｜DSML｜tool_calls>`,
  'a',
  ' word',
  '\n',
  '\n\n',
  '<',
  '</',
  '>',
  '"',
  '\\',
  '世',
  '😀',
  'é',
  'STOP',
  'ST',
  '12',
  '{"a": 1.0}',
  '<think>',
  '</think>',
  '</thi',
  '<｜User｜>',
  '<｜DSML｜',
  '｜DSML｜',
  '<|DSML|tool_calls>',
  '\n\n<｜DSML｜tool_calls>\n',
  '<｜DSML｜ calls>\n',
  '</｜DSML｜tool_calls>',
  '<｜DSML｜invoke name="add">\n',
  '<｜DSML｜invoke name="no',
  '</｜DSML｜invoke>\n',
  '<｜DSML｜parameter name="n" string="false">1.0</｜DSML｜parameter>\n',
  '<｜DSML｜parameter name="s" string="true">a\n"b" </x></｜DSML｜parameter>\n',
  '<｜DSML｜parameter name="t" string="true">',
];
const written = fc.array(fc.constantFrom(...fragments), { maxLength: 16 }).map((parts) => parts.join(''));
const marks = ['<think>', '</think>', '｜DSML｜', '<｜Assistant｜>'].map((text) => {
  const id = tokenizer.tokenId(text);
  assert.ok(id !== undefined, text);
  return { text, id };
});
/** Those that the parser reads: they are text where they are no markup. Others are dropped. */
const markIds = marks.filter(({ id }) => id !== tokenizer.tokenId('<｜Assistant｜>')).map(({ id }) => id);
/** Tokens of text, some of them cut short so that a character stays incomplete, and special tokens anywhere. */
const output = fc.record({
  text: written,
  marks: fc.array(fc.record({ id: fc.constantFrom(...marks.map(({ id }) => id)), at: fc.nat() }), { maxLength: 4 }),
  lost: fc.constantFrom(0, 0, 1, 3),
  outcome: fc.constantFrom('stop' as const, 'length' as const),
  steps: fc.array(fc.integer({ min: 1, max: 9 }), { minLength: 1, maxLength: 2 }),
});

/** The tokens of such an output, without its end. */
function idsOf(given: { text: string; lost: number; marks: { id: number; at: number }[] }): number[] {
  const all = tokenizer.encode(given.text);
  const ids = all.slice(0, all.length - given.lost);
  for (const { id, at } of given.marks) ids.splice(at % (ids.length + 1), 0, id);
  return ids;
}

/** Whether the bytes of `text` are among `bytes` in their order; characters that were never whole are passed over. */
function isWithin(text: string, bytes: readonly number[]): boolean {
  const wanted = Buffer.from(text.replaceAll('\ufffd', ''));
  let found = 0;
  for (const byte of bytes) if (byte === wanted[found]) found += 1;
  return found === wanted.length;
}

/**
 * Check the entries of one whole answer against its text `shown`: they are tokens of `ids` in their order, all of the
 * text is theirs, and special tokens are among them only where they show.
 */
function assertAligned(shown: string, entries: readonly LoggedEntry[], ids: readonly number[]): void {
  let before = -1;
  for (const { logprob, bytes } of entries) {
    // The room that answers here gives each place in the answer its own logarithm.
    const position = -8 * logprob - 1;
    assert.ok(position > before, 'in the order of the tokens, and each once');
    before = position;
    assert.deepEqual(bytes, [...tokenizer.tokenBytes(ids[position]!)]);
    assert.notEqual(ids[position], tokenizer.eosId);
  }
  const bytes = entries.flatMap((entry) => entry.bytes);
  assert.ok(
    isWithin(shown, bytes),
    `${JSON.stringify(shown)} is not in ${JSON.stringify(entries.map((e) => e.token))}`,
  );
  for (const { text } of marks) {
    const count = entries.filter(({ token }) => token === text).length;
    assert.ok(count < shown.split(text).length, `${count} times ${text} for ${JSON.stringify(shown)}`);
  }
}

const request = fc.record({
  thinking: fc.boolean(),
  tools: fc.constantFrom('none', 'given', 'given', 'unwanted'),
  parallel: fc.boolean(),
  stop: fc.constantFrom(null, 'STOP', ['STOP', '\n\n'], ['a']),
  maxTokens: fc.constantFrom(null, null, 5, 60),
  separate: fc.boolean(),
  included: fc.boolean(),
  minTokens: fc.constantFrom(0, 0, 3),
  logprobs: fc.constantFrom(null, 0, 2),
});

const tools = [{ type: 'function', function: { name: 'add' } }];

interface Body {
  choices: {
    message: {
      content: string | null;
      reasoning_content?: string;
      tool_calls?: { type: string; function: { name: string; arguments: string } }[];
    };
    logprobs: { content: LoggedEntry[] } | null;
    finish_reason: string;
    matched_stop: unknown;
  }[];
  usage: object;
}

// surface: answer.sum
test(`chunks put together are the body, for any output and any split (seed ${seed})`, async () => {
  let callCount = 0;
  let reasoningCount = 0;
  let loggedCount = 0;
  await fc.assert(
    fc.asyncProperty(request, fc.array(output, { minLength: 1, maxLength: 2 }), async (way, outputs) => {
      const body = {
        messages: [{ role: 'user', content: 'q' }],
        n: outputs.length,
        chat_template_kwargs: { thinking: way.thinking },
        ...(way.tools === 'none' ? {} : { tools, parallel_tool_calls: way.parallel }),
        ...(way.tools === 'unwanted' ? { tool_choice: 'none' } : {}),
        ...(way.stop === null ? {} : { stop: way.stop }),
        ...(way.maxTokens === null ? {} : { max_tokens: way.maxTokens }),
        separate_reasoning: way.separate,
        include_reasoning: way.included,
        min_tokens: way.minTokens,
        ...(way.logprobs === null ? {} : { logprobs: true, top_logprobs: way.logprobs }),
      };
      const whole = outputs.map((each) => ({
        ids: [...idsOf(each), ...(each.outcome === 'stop' ? [tokenizer.eosId] : [])],
        outcome: each.outcome,
      }));
      const asWhole = JSON.parse((await app.post('/v1/chat/completions', body, ...whole)).body) as Body;
      const expected = asWhole.choices.map(({ message, finish_reason: finish }) => ({
        content: message.content ?? '',
        reasoning: message.reasoning_content ?? '',
        calls: (message.tool_calls ?? []).map(({ type, function: called }) => ({ type, ...called })),
        finishes: [finish],
      }));
      const logged = asWhole.choices.map(({ logprobs }) => logprobs?.content ?? []);
      for (const [index, entries] of logged.entries()) {
        loggedCount += entries.length;
        if (way.logprobs === null) continue;
        const { reasoning, content } = expected[index]!;
        const { ids } = whole[index]!;
        const shown = reasoning + content;
        // A call inside the reasoning closes it in the text, without a token for that.
        const mayClose = !way.separate && way.thinking && way.tools !== 'none';
        const bytes = entries.flatMap((entry) => entry.bytes);
        const closes = mayClose && !isWithin(shown, bytes);
        assertAligned(closes ? shown.replace('</think>', '') : shown, entries, ids);
        if (way.tools === 'none' && !way.thinking && way.stop === null) {
          const limit = way.maxTokens ?? Infinity;
          const shownIds = ids.slice(0, limit).filter((id) => !tokenizer.isSpecial(id) || markIds.includes(id));
          assert.equal(entries.length, shownIds.length, 'without markup each token of text has an entry');
        }
      }
      for (const { calls, reasoning } of expected) {
        callCount += calls.length;
        if (reasoning !== '') reasoningCount++;
      }

      const longest = Math.max(...outputs.map(({ steps }) => steps.length));
      for (let turn = 0; turn < longest; turn++) {
        const split = whole.map((each, index) => {
          const { steps } = outputs[index]!;
          return { ...each, step: steps[turn % steps.length]! };
        });
        const streamed = await app.post(
          '/v1/chat/completions',
          { ...body, stream: true, stream_options: { include_usage: true } },
          ...split,
        );
        const chunks = chunksOf(streamed.body);
        const found = assemble(chunks).map(({ calls, ...rest }) => ({
          ...rest,
          calls: calls.map(({ id: _, ...call }) => call),
        }));
        assert.deepEqual(found, expected);
        assert.deepEqual(assembleLogprobs(chunks), logged);
        for (const { delta, logprobs } of chunks.flatMap((each) => each.choices)) {
          const text = delta.content ?? delta.reasoning_content ?? '';
          for (const { token } of logprobs?.content ?? []) {
            const isShown = token.includes('\ufffd') || Array.from(token).some((character) => text.includes(character));
            assert.ok(isShown, `${JSON.stringify(token)} came with ${JSON.stringify(text)}`);
          }
        }
        const last = chunks.at(-1) as unknown as { choices: []; usage: object };
        assert.deepEqual([last.choices, last.usage], [[], asWhole.usage]);
      }
      const shown = JSON.stringify(expected.map(({ content, reasoning }) => [content, reasoning]));
      if (way.tools !== 'none') assert.doesNotMatch(shown, /<.DSML. ?((tool_)?calls>|invoke name=)/);
    }),
    { seed, numRuns: 200 },
  );
  assert.ok(callCount > 10 && reasoningCount > 10, `only ${callCount} calls and ${reasoningCount} with reasoning`);
  assert.ok(loggedCount > 500, `only ${loggedCount} log probabilities`);
});

interface CompletionChoice {
  index: number;
  text: string;
  logprobs: Record<'tokens' | 'token_logprobs' | 'top_logprobs' | 'text_offset', unknown[]> | null;
}

/** The choices of completion chunks, or of a body, put together. */
function assembleCompletion(bodies: readonly { choices: CompletionChoice[] }[]): object[] {
  const choices: { text: string; logprobs: Record<string, unknown[]> }[] = [];
  for (const { index, text, logprobs } of bodies.flatMap((body) => body.choices)) {
    const choice = (choices[index] ??= { text: '', logprobs: {} });
    choice.text += text;
    for (const [name, values] of Object.entries(logprobs ?? {})) (choice.logprobs[name] ??= []).push(...values);
  }
  return choices;
}

// surface: completions.logprobs, completions.echo
test(`completion chunks put together are the body, each token with its place in the text (seed ${seed})`, async () => {
  let tokenCount = 0;
  const way = fc.record({
    stop: fc.constantFrom(null, 'STOP', ['STOP', '\n\n'], ['a']),
    keepsStop: fc.boolean(),
    echo: fc.boolean(),
    logprobs: fc.constantFrom(0, 2),
    skips: fc.boolean(),
  });
  await fc.assert(
    fc.asyncProperty(way, output, async ({ stop, keepsStop, echo, logprobs, skips }, written) => {
      const { outcome, steps } = written;
      const given = { ids: idsOf(written), outcome };
      const body = {
        prompt: 'é 世',
        echo,
        logprobs,
        skip_special_tokens: skips,
        no_stop_trim: keepsStop,
        ...(stop === null ? {} : { stop }),
      };
      const asWhole = JSON.parse((await app.post('/v1/completions', { ...body, max_tokens: 999 }, given)).body) as {
        choices: CompletionChoice[];
      };
      const expected = assembleCompletion([asWhole]);
      for (const step of steps) {
        const asked = { ...body, max_tokens: 999, stream: true };
        const streamed = await app.post('/v1/completions', asked, { ...given, step });
        const chunks = chunksOf(streamed.body) as unknown as { choices: CompletionChoice[] }[];
        assert.deepEqual(assembleCompletion(chunks), expected);
      }
      const [choice] = asWhole.choices;
      assert.ok(choice!.logprobs !== null, inspect(choice));
      const { tokens, text_offset: offsets } = choice!.logprobs;
      tokenCount += tokens.length;
      for (const [index, token] of (tokens as string[]).entries()) {
        // A token of whole characters stands where its offset says, unless a stop string was cut out of it.
        const at = offsets[index] as number;
        const isWhole = !token.includes('\ufffd') && token !== '';
        if (isWhole) assert.ok(choice!.text.startsWith(token, at) || token.startsWith(choice!.text.slice(at)), token);
      }
      if (stop === null) {
        const shown = given.ids.filter((id) => !skips || !tokenizer.isSpecial(id)).map((id) => tokenizer.decode([id]));
        assert.deepEqual(tokens.slice(tokens.length - shown.length), shown);
        const echoed = echo ? tokenizer.encode('é 世').length : 0;
        assert.ok(tokens.length - shown.length - echoed <= 1, 'the prompt may begin with a token of its own');
      }
    }),
    { seed, numRuns: 100 },
  );
  assert.ok(tokenCount > 500, `only ${tokenCount} tokens`);
});

// surface: generate.stream, answer.logprobs
test('log probabilities of /generate and /v1/responses are those of the tokens, the same streamed and whole', async () => {
  const text = 'one 世 two';
  const ids = tokenizer.encode(text);
  const choices = ids.map((id, index) => choiceOf(id, index, 2));
  const dataOf = (stream: string): Record<string, unknown>[] =>
    stream
      .split('\n')
      .filter((line) => line.startsWith('data: {'))
      .map((line) => JSON.parse(line.slice('data: '.length)) as Record<string, unknown>);

  const asked = { text: 'a', return_logprob: true, top_logprobs_num: 2, return_text_in_logprobs: true };
  const generated = JSON.parse((await app.post('/generate', asked, { text })).body) as { meta_info: object };
  const meta = generated.meta_info as Record<string, unknown>;
  const entry = (id: number, logprob: number) => [logprob, id, tokenizer.decode([id])];
  assert.deepEqual(
    meta['output_token_logprobs'],
    ids.map((id, index) => entry(id, choices[index]!.logprob)),
  );
  assert.deepEqual(
    meta['output_top_logprobs'],
    choices.map(({ topIds, topLogprobs }) => topIds.map((id, rank) => entry(id, topLogprobs[rank]!))),
  );
  const events = dataOf((await app.post('/generate', { ...asked, stream: true }, { text, step: 1 })).body);
  assert.deepEqual({ ...(events.at(-1)!['meta_info'] as object), id: meta['id'] }, meta);
  assert.deepEqual([meta['input_token_logprobs'], meta['input_top_logprobs']], [[], []]);
  const from = 1;
  const prompted = await app.post('/generate', { ...asked, text: 'a b c', logprob_start_len: from }, { text });
  const { promptTokens } = prompted.room!;
  const known = promptChoicesOf(promptTokens, 2).slice(from);
  const { meta_info: input } = JSON.parse(prompted.body) as { meta_info: Record<string, unknown> };
  assert.deepEqual(input['input_token_logprobs'], [
    [null, promptTokens[from], tokenizer.decode([promptTokens[from]!])],
    ...known.map(({ logprob }, index) => entry(promptTokens[from + 1 + index]!, logprob)),
  ]);
  assert.deepEqual(input['input_top_logprobs'], [
    null,
    ...known.map(({ topIds, topLogprobs }) => topIds.map((id, rank) => entry(id, topLogprobs[rank]!))),
  ]);

  const several = await app.post(
    '/generate',
    { text: 'a', sampling_params: { n: 2, max_new_tokens: 5 } },
    { ids: [60], outcome: 'length' },
    { ids: [61, 62, 63], outcome: 'length' },
  );
  const each = JSON.parse(several.body) as { meta_info: { completion_tokens: number; finish_reason: object } }[];
  assert.deepEqual(
    each.map(({ meta_info: { completion_tokens: count, finish_reason: finish } }) => [count, finish]),
    [1, 3].map((length) => [length, { type: 'length', length }]),
    'the tokens of each choice are its own',
  );

  const request = { input: 'hi', reasoning: { effort: 'none' }, top_logprobs: 2 };
  const body = JSON.parse((await app.post('/v1/responses', request, { text })).body) as {
    top_logprobs: number;
    output: { content: { logprobs: { bytes: number[]; logprob: number }[] }[] }[];
  };
  const { logprobs } = body.output[0]!.content[0]!;
  assert.equal(body.top_logprobs, 2);
  assert.deepEqual(
    logprobs.map(({ bytes, logprob }) => [bytes, logprob]),
    ids.map((id, index) => [[...tokenizer.tokenBytes(id)], choices[index]!.logprob]),
  );
  const streamed = dataOf((await app.post('/v1/responses', { ...request, stream: true }, { text, step: 1 })).body);
  const deltas = streamed.filter(({ type }) => type === 'response.output_text.delta');
  assert.deepEqual(
    deltas.flatMap((each) => each['logprobs'] as object[]),
    logprobs,
  );
  const plain = await app.post('/v1/responses', { ...request, top_logprobs: 0 }, { text });
  assert.match(plain.body, /"logprobs":\[\]/);
  const included = { ...request, top_logprobs: 0, include: ['message.output_text.logprobs'] };
  assert.doesNotMatch((await app.post('/v1/responses', included, { text })).body, /"logprobs":\[\]/);
});
