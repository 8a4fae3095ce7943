import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { loadTokenizer } from '../../../model/tokenizer.ts';
import { recallFacts } from '../../../scripts/recall-prompts.ts';
import { recallTable, replaceTable, type RecallLine } from '../../../scripts/recall-table.ts';
import { createPrng } from '../../support/prng.ts';

const SEED = 20261129;

test(`seed ${SEED}: facts are distinct, each sentence ends in its answer, and the same seed gives the same`, () => {
  const facts = recallFacts(createPrng(SEED), 500);
  assert.equal(new Set(facts.map(({ question }) => question)).size, 500);
  for (const { sentence, answer } of facts) assert.ok(sentence.endsWith(` ${answer}`), sentence);
  assert.deepEqual(recallFacts(createPrng(SEED), 500), facts);
  assert.throws(() => recallFacts(createPrng(SEED), 10_000), /10000 facts of/);
});

test('an answer is a few tokens of the embedded model', () => {
  const tokenizer = loadTokenizer(fileURLToPath(new URL('../../../model/nano', import.meta.url)));
  const lengths = recallFacts(createPrng(SEED), 500).map(({ answer }) => tokenizer.encode(answer).length);
  assert.ok(Math.max(...lengths) < 8, 'bench-recall stops an answer at 8 tokens');
});

const line: RecallLine = {
  bench: 'recall',
  commit: 'abc',
  device: 'some adapter',
  seed: 1,
  contextTokens: 256,
  precision: 'fp8',
  keyBytes: 68,
  kvBytesPerToken: 294,
  selections: [null, { k: 16, rows: 4, mean: 0.98765, least: 0.5 }],
  answers: { asked: 10, right: 3, asWithF32: 9 },
};

test('the table has a row for each line and the k of those that have a choice', () => {
  const table = recallTable([line, { ...line, selections: [{ k: 64, rows: 4, mean: 1, least: 1 }, null] }], 'how');
  assert.deepEqual(table.split('\n').slice(2), [
    '| context | keys | KV bytes per token | recall of the best 64 | recall of the best 16 | right answers | answers as with f32 |',
    '| --- | --- | --- | --- | --- | --- | --- |',
    '| 256 | fp8 | 294 | no choice | 0.9877 (0.5000) | 3 of 10 | 9 of 10 |',
    '| 256 | fp8 | 294 | 1.0000 (1.0000) | no choice | 3 of 10 | 9 of 10 |',
  ]);
});

test('only what is between the marks of the page is replaced', () => {
  const page = readFileSync(new URL('../../../docs/recall.md', import.meta.url), 'utf8');
  const replaced = replaceTable(page, 'A TABLE');
  assert.match(replaced, /--write -->\n\nA TABLE\n\n<!-- end of recall table -->/);
  assert.equal(replaceTable(replaced, 'A TABLE'), replaced);
  assert.equal(replaced.split('<!--')[0], page.split('<!--')[0]);
  assert.throws(() => replaceTable('no marks', 'A TABLE'), /no marks/);
});
