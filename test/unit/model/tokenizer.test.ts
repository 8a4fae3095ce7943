import assert from 'node:assert/strict';
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import test from 'node:test';
import fc from 'fast-check';
import { createDetokenizer, loadTokenizer } from '../../../model/tokenizer.ts';

const NANO = 'model/nano';
const tokenizer = loadTokenizer(NANO);

interface Sample {
  output_ids: number[];
  output_text: string;
  prompt_ids: number[];
}
const samples = readFileSync('test/data/nano-samples.jsonl', 'utf8')
  .trim()
  .split('\n')
  .map((line) => JSON.parse(line) as Sample);

/** Ids from the Rust library, tokenizers 0.23.2, on the same tokenizer.json. */
const REFERENCE_IDS: [text: string, ids: number[]][] = [
  ['', []],
  [' ', [222]],
  ['Hello world', [801, 308, 928]],
  // In these four, JavaScript's \s would split elsewhere: it lacks U+0085 and has U+FEFF.
  ['a\u0085b', [66, 128, 229, 67]],
  ['a \u0085 b', [66, 222, 128, 229, 297]],
  ['\ufeffabc', [173, 121, 125, 430, 68]],
  ['x\ufeff y', [89, 173, 121, 125, 459]],
  ['1234567 12', [18, 19, 20, 21, 22, 23, 24, 222, 18, 19]],
  ['naïve café ½', [913, 129, 109, 87, 70, 266, 66, 71, 129, 104, 222, 128, 123]],
  ['e\u0301tude', [70, 138, 225, 85, 86, 69, 70]],
  ['tab\t\ttab\r\n\r\n  end  ', [85, 430, 199, 199, 85, 430, 203, 200, 203, 200, 222, 222, 874, 358]],
  ['<think>x</think>', [1020, 89, 1021]],
  ['a<｜User｜>b', [66, 1018, 67]],
  ['<｜DSML｜tool_calls>', [29, 1022, 329, 360, 31]],
  ['｜DSML', [173, 123, 252, 37, 52, 46, 45]],
  ['👧 ok', [174, 255, 241, 102, 269, 76]],
  ['\u{10ffff}\0', [178, 239, 125, 125, 190]],
];

test('texts become the ids that the Rust library gives', () => {
  for (const [text, ids] of REFERENCE_IDS) assert.deepEqual(tokenizer.encode(text), ids, JSON.stringify(text));
});

test('texts of awkward characters become the ids that the Rust library gives', () => {
  // Lines of [text, ids] by tokenizers 0.23.2: blanks of every kind, marks, digits, several scripts, added tokens.
  const lines = readFileSync('test/data/tokenizer-ids.jsonl', 'utf8').trim().split('\n');
  assert.ok(lines.length > 250, `${lines.length} lines`);
  for (const line of lines) {
    const [text, ids] = JSON.parse(line) as [string, number[]];
    assert.deepEqual(tokenizer.encode(text), ids, line);
    assert.equal(tokenizer.decode(ids), text);
  }
});

test('a text that is not trusted holds no special token, and is cut into words as if it stood alone', () => {
  const plain = (text: string) => tokenizer.encode([{ text, trusted: false }]);
  for (const [text, ids] of REFERENCE_IDS) {
    const found = plain(text);
    assert.equal(tokenizer.decode(found), text);
    assert.deepEqual(
      found.filter((id) => tokenizer.isSpecial(id)),
      [],
    );
    if (!ids.some((id) => tokenizer.isSpecial(id))) assert.deepEqual(found, ids);
  }
  assert.deepEqual(plain('｜DSML｜').slice(0, 7), [173, 123, 252, 37, 52, 46, 45]);
});

test('the borders of pieces leave no trace, and special tokens only come from trusted ones', () => {
  const piece = fc.record({
    text: fc
      .array(fc.constantFrom('a', ' b', 'Hello', '世', '1', '<', '<｜User｜>', '</think>', '｜DSML｜', '\n', ' '), {
        maxLength: 6,
      })
      .map((parts) => parts.join('')),
    trusted: fc.boolean(),
  });
  fc.assert(
    fc.property(fc.array(piece, { maxLength: 6 }), (pieces) => {
      const ids = tokenizer.encode(pieces);
      assert.equal(tokenizer.decode(ids), pieces.map(({ text }) => text).join(''));
      const expected = pieces
        .filter(({ trusted }) => trusted)
        .flatMap(({ text }) => tokenizer.encode(text).filter((id) => tokenizer.isSpecial(id)));
      assert.deepEqual(
        ids.filter((id) => tokenizer.isSpecial(id)),
        expected,
      );
      const harmless = pieces.map(({ text }) => ({ text: text.replaceAll(/[｜>]/g, '.'), trusted: true }));
      assert.deepEqual(tokenizer.encode(harmless), tokenizer.encode(harmless.map(({ text }) => text).join('')));
    }),
    { seed: 9, numRuns: 2000 },
  );
});

test('ids become text again, special tokens written out or skipped', () => {
  for (const [text, ids] of REFERENCE_IDS) assert.equal(tokenizer.decode(ids), text);
  assert.equal(tokenizer.decode([1020, 89, 1021], { skipSpecialTokens: true }), 'x');
  assert.equal(tokenizer.decode([1020], { skipSpecialTokens: true }), '');
});

test('spaces before punctuation survive decoding', () => {
  const text = "it is , I 'm sure . Is n't it ?";
  assert.equal(tokenizer.decode(tokenizer.encode(text)), text);
});

test('special tokens are found by their text', () => {
  assert.equal(tokenizer.bosId, tokenizer.tokenId('<｜begin▁of▁sentence｜>'));
  assert.equal(tokenizer.eosId, tokenizer.tokenId('<｜end▁of▁sentence｜>'));
  assert.equal(tokenizer.tokenId('no such token'), undefined);
  assert.equal(tokenizer.vocabSize, 1024);
  const special = Array.from({ length: 1100 }, (_, id) => id).filter((id) => tokenizer.isSpecial(id));
  assert.deepEqual(special, [0, 1, 1018, 1019, 1020, 1021, 1022, 1023]);
});

test('ids without a token decode to nothing', () => {
  assert.equal(tokenizer.decode([1024, 801, 99_999]), tokenizer.decode([801]));
  assert.equal(tokenizer.decode([1024]), '');
  const detokenizer = createDetokenizer(tokenizer, { skipSpecialTokens: false });
  assert.equal(detokenizer.push(1024) + detokenizer.push(801) + detokenizer.flush(), tokenizer.decode([801]));
});

test('sample outputs decode to their recorded texts, at once and token by token', () => {
  assert.equal(samples.length, 74);
  for (const { output_ids: ids, output_text: text } of samples) {
    assert.equal(tokenizer.decode(ids), text);
    assert.equal(pushAll(ids, { skipSpecialTokens: false }).join(''), text);
  }
});

test('a code point spread over tokens appears whole with its last byte', () => {
  const pushed = pushAll([174, 255, 241, 102, 269], { skipSpecialTokens: false });
  assert.deepEqual(pushed, ['', '', '', '👧', tokenizer.decode([269]), '']);
});

test('an incomplete code point becomes U+FFFD on flush and before a special token', () => {
  assert.deepEqual(pushAll([174, 255], { skipSpecialTokens: false }), ['', '', '\ufffd']);
  assert.deepEqual(pushAll([174, 1020], { skipSpecialTokens: false }), ['', '\ufffd<think>', '']);
});

test('a detokenizer can be used again after flush', () => {
  const detokenizer = createDetokenizer(tokenizer, { skipSpecialTokens: false });
  detokenizer.push(174);
  assert.equal(detokenizer.flush(), '\ufffd');
  assert.equal(detokenizer.push(89) + detokenizer.flush(), 'x');
});

test('a leading byte order mark is text', () => {
  assert.equal(pushAll([173, 121, 125, 430], { skipSpecialTokens: false }).join(''), '\ufeffab');
});

test('pushed texts join to the decoding of all ids, and none ends in half a code point', () => {
  // Ids 90 to 260 hold most single bytes, so incomplete code points are common.
  const id = fc.oneof(fc.integer({ min: 0, max: 1030 }), fc.integer({ min: 90, max: 260 }));
  fc.assert(
    fc.property(fc.array(id, { maxLength: 30 }), fc.boolean(), (ids, skipSpecialTokens) => {
      const texts = pushAll(ids, { skipSpecialTokens });
      assert.equal(texts.join(''), tokenizer.decode(ids, { skipSpecialTokens }));
      for (const text of texts) assert.doesNotMatch(text, /\p{Surrogate}/u);
    }),
    { seed: 1, numRuns: 2000 },
  );
});

test('encoding and decoding returns any text', () => {
  fc.assert(
    fc.property(fc.string({ unit: 'grapheme', maxLength: 40 }), (text) => {
      assert.equal(tokenizer.decode(tokenizer.encode(text)), text);
    }),
    { seed: 2, numRuns: 1000 },
  );
});

test('a checkpoint whose tokens are not bytes, or that lacks the end token, is refused', () => {
  const root = mkdtempSync(join(tmpdir(), 'handoff-tokenizer-'));
  const file = JSON.parse(readFileSync(`${NANO}/tokenizer.json`, 'utf8')) as {
    decoder: unknown;
    added_tokens: object[];
  };
  const config = JSON.parse(readFileSync(`${NANO}/tokenizer_config.json`, 'utf8')) as Record<string, unknown>;
  const write = (name: string, tokenizerFile: object, configFile: object): string => {
    const dir = join(root, name);
    mkdirSync(dir);
    writeFileSync(join(dir, 'tokenizer.json'), JSON.stringify(tokenizerFile));
    writeFileSync(join(dir, 'tokenizer_config.json'), JSON.stringify(configFile));
    return dir;
  };
  try {
    const metaspace = write('metaspace', { ...file, decoder: { type: 'Metaspace' } }, config);
    assert.throws(() => loadTokenizer(metaspace), /expected a ByteLevel decoder, found Metaspace/);
    const noEos = write('no-eos', file, { ...config, eos_token: '<eos>' });
    assert.throws(() => loadTokenizer(noEos), /eos_token <eos> has no id/);
    const strips = { ...file, added_tokens: [{ id: 5, content: '<x>', special: true, lstrip: true }] };
    assert.throws(() => loadTokenizer(write('strips', strips, config)), /added token <x> has lstrip/);
    const unmarked = write(
      'unmarked',
      { ...file, added_tokens: file.added_tokens.map((token) => ({ ...token, special: false })) },
      config,
    );
    const found = loadTokenizer(unmarked);
    assert.deepEqual(
      [0, 1, 1018, 1019, 1020, 1021, 1022, 1023].map((id) => found.isSpecial(id)),
      [true, true, true, true, false, false, false, true],
    );
    const objects = write('objects', file, { ...config, bos_token: { content: '<｜begin▁of▁sentence｜>' } });
    assert.equal(loadTokenizer(objects).bosId, tokenizer.bosId);
  } finally {
    rmSync(root, { recursive: true });
  }
});

/** Text of each push, then of the flush. */
function pushAll(ids: readonly number[], options: { skipSpecialTokens: boolean }): string[] {
  const detokenizer = createDetokenizer(tokenizer, options);
  const texts = ids.map((id) => detokenizer.push(id));
  const { holdsBytes } = detokenizer;
  const rest = detokenizer.flush();
  assert.equal(holdsBytes, rest !== '', 'it says whether it holds something back');
  return [...texts, rest];
}
