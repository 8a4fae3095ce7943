import assert from 'node:assert/strict';
import { test } from 'node:test';
import {
  LOGGED_WORDS,
  LOGPROB_WORDS,
  noteChosen,
  rankTokens,
  readLogprobs,
  writeLoggedRow,
  type TokenLogprobs,
} from '../../kernels/logprobs.ts';
import {
  applyRules,
  BANNED,
  EDIT_WORDS,
  IN_PROMPT,
  maskWords,
  NO_MASK,
  RULES_WORDS,
  writeEdit,
  writeRulesRow,
} from '../../kernels/rules.ts';
import { NO_TOKEN, sample, SAMPLING_WORDS, writeSamplingRow } from '../../kernels/sample.ts';
import { NO_RULES, plainLogprobs, ruledLogits, type PlainRules } from '../reference/rules.ts';
import {
  assertClose,
  assertSameBits,
  assertUntouched,
  createTestRandom,
  f32Tensor,
  guardedTensor,
  openTestDevice,
  readF32,
  readU32,
  runOnDevice,
  u32Tensor,
} from '../support/gpu.ts';

const device = await openTestDevice();
const random = createTestRandom();

const GREEDY = { temperature: 0, topK: 0, topP: 1, minP: 0, seed: 0, position: 0 };

interface Row {
  readonly logits: ArrayLike<number>;
  /** Null: the row has none. */
  readonly rules: PlainRules | null;
  /** Null: the row asks for no log probabilities. */
  readonly topCount: number | null;
}

interface Result {
  readonly logits: Float32Array;
  readonly token: number;
  readonly logprobs: TokenLogprobs | null;
}

/** The four kernels as a step runs them: rank, rules, sample, note. */
async function run(rows: readonly Row[]): Promise<Result[]> {
  const vocabulary = rows[0]!.logits.length;
  const count = rows.length;
  const flat = new Float32Array((count + 1) * vocabulary);
  const sampling = new Uint32Array(count * SAMPLING_WORDS);
  const rules = new Uint32Array((count + 1) * RULES_WORDS);
  const masks = new Uint32Array((count + 1) * maskWords(vocabulary));
  const edits = new Uint32Array((count * vocabulary + 1) * EDIT_WORDS);
  const logged = new Uint32Array((count + 1) * LOGGED_WORDS);
  const [counts, ranges] = [{ ruled: 0, masks: 0, edits: 0, logged: 0 }, new Map<number, [number, number]>()];
  for (const [index, row] of rows.entries()) {
    flat.set(row.logits, index * vocabulary);
    writeSamplingRow(sampling, index, GREEDY);
    if (row.rules !== null) {
      const { presence, frequency, repetition, prompt, generated, bias, banned, allowed } = row.rules;
      const firstEdit = counts.edits;
      for (const token of new Set([...prompt, ...generated, ...bias.keys(), ...banned])) {
        const times = generated.filter((each) => each === token).length;
        const flags = (prompt.includes(token) ? IN_PROMPT : 0) + (banned.includes(token) ? BANNED : 0);
        writeEdit(edits, counts.edits++, { token, seen: times + flags, bias: bias.get(token) ?? 0 });
      }
      for (const token of allowed ?? [])
        masks[counts.masks * maskWords(vocabulary) + (token >> 5)]! |= 1 << (token % 32);
      const mask = allowed === null ? NO_MASK : counts.masks++;
      const editCount = counts.edits - firstEdit;
      ranges.set(index, [firstEdit, editCount]);
      writeRulesRow(rules, counts.ruled++, {
        sample: index,
        mask,
        firstEdit,
        editCount,
        presence,
        frequency,
        repetition,
      });
    }
    if (row.topCount === null) continue;
    const [firstEdit, editCount] = ranges.get(index) ?? [0, 0];
    writeLoggedRow(logged, counts.logged++, { sample: index, topCount: row.topCount, firstEdit, editCount });
  }
  const tokens = guardedTensor(device, [count + 1], 'u32');
  const logprobs = guardedTensor(device, [count + 1, LOGPROB_WORDS], 'u32');
  const tensors = {
    logits: f32Tensor(device, [count + 1, vocabulary], flat),
    rules: u32Tensor(device, [count + 1, RULES_WORDS], rules),
    edits: u32Tensor(device, [count * vocabulary + 1, EDIT_WORDS], edits),
    masks: u32Tensor(device, [count + 1, maskWords(vocabulary)], masks),
  };
  const asked = {
    logits: tensors.logits,
    logged: u32Tensor(device, [count + 1, LOGGED_WORDS], logged),
    logprobs,
    loggedCount: counts.logged,
  };
  await runOnDevice(device, (recorder) => {
    rankTokens(recorder, asked);
    applyRules(recorder, { ...tensors, ruledCount: counts.ruled });
    const step = u32Tensor(device, [4], [9999, 1, count, 0]);
    const choice = { sampling: u32Tensor(device, [count, SAMPLING_WORDS], sampling), tokens, step };
    sample(recorder, { logits: tensors.logits, ...choice, sampledCount: count });
    noteChosen(recorder, { ...asked, tokens, edits: tensors.edits });
  });
  const chosen = await readU32(device, tokens);
  const words = await readU32(device, logprobs);
  const after = await readF32(device, tensors.logits);
  assertUntouched(words, counts.logged * LOGPROB_WORDS);
  let found = 0;
  return rows.map(({ topCount }, index) => ({
    logits: after.slice(index * vocabulary, (index + 1) * vocabulary),
    token: chosen[index]!,
    logprobs: topCount === null ? null : readLogprobs(words, found++, topCount),
  }));
}

/** Rules with much of everything. */
function randomRules(vocabulary: number): PlainRules {
  const some = (count: number): number[] => Array.from({ length: count }, () => random.integer(vocabulary));
  return {
    presence: 4 * random.uniform() - 2,
    frequency: 4 * random.uniform() - 2,
    repetition: 0.2 + 1.8 * random.uniform(),
    prompt: some(vocabulary),
    generated: some(vocabulary),
    bias: new Map(some(20).map((token) => [token, 200 * random.uniform() - 100])),
    banned: some(3),
    allowed: random.uniform() < 0.5 ? null : new Set(some(2 * vocabulary)),
  };
}

for (const vocabulary of [1, 31, 33, 257, 1003]) {
  test(`rules of rows of ${vocabulary} logits are those of the plain reference`, async () => {
    const rows = Array.from({ length: 7 }, (_, index): Row => ({
      logits: random.f32(vocabulary, 12),
      rules: index === 3 ? null : randomRules(vocabulary),
      topCount: null,
    }));
    for (const [index, result] of (await run(rows)).entries()) {
      const { logits, rules } = rows[index]!;
      if (rules === null) {
        assertSameBits(result.logits, Float32Array.from(logits), 'a row without rules');
        continue;
      }
      const expected = ruledLogits(logits, rules);
      // A division of at most 2.5 units in the last place and three roundings, of numbers up to 160.
      const finite = expected.map((value, token) => (Number.isFinite(value) ? value : result.logits[token]!));
      assertClose(
        result.logits.map((value) => Math.max(value, -1e9)),
        finite.map((value) => Math.max(value, -1e9)),
        { absolute: 1e-4 },
      );
      assert.deepEqual(
        [...result.logits].map((value) => value === -Infinity),
        expected.map((value) => value === -Infinity),
      );
    }
  });
}

test('a bias decides the choice, up to a single token and against every other rule but a ban', async () => {
  const logits = random.f32(500, 9);
  const biased = { ...NO_RULES, bias: new Map([[321, 100]]) };
  const penalised = { ...biased, generated: [321, 321], presence: 2, frequency: 2, repetition: 2 };
  const against = { ...NO_RULES, bias: new Map([[logits.indexOf(Math.max(...logits)), -100]]) };
  const rows = [biased, penalised, { ...biased, banned: [321] }, against];
  const results = await run(rows.map((rules) => ({ logits, rules, topCount: null })));
  const tokens = results.map(({ token }) => token);
  const order = [...logits.keys()].toSorted((left, right) => logits[right]! - logits[left]!);
  assert.deepEqual(tokens, [321, 321, order[0] === 321 ? order[1] : order[0], order[1]]);
});

test('the token is chosen among those of the mask, and equal ones by the lowest id', async () => {
  const logits = Float32Array.from({ length: 70 }, (_, token) =>
    token === 5 ? 9 : token === 69 || token === 40 ? 4 : 1,
  );
  const masks = [[69], [40, 69], [1, 2, 3], [5, 40]];
  const rows = masks.map((allowed): Row => ({
    logits,
    rules: { ...NO_RULES, allowed: new Set(allowed) },
    topCount: null,
  }));
  assert.deepEqual(
    (await run(rows)).map(({ token }) => token),
    [69, 40, 1, 5],
  );
});

test('a row whose rules leave no token gives NO_TOKEN, and the rows beside it their own', async () => {
  const logits = random.f32(100, 3);
  const best = logits.indexOf(Math.max(...logits));
  const none = { ...NO_RULES, allowed: new Set<number>() };
  const clash = { ...NO_RULES, allowed: new Set([7]), banned: [7] };
  const everything = { ...NO_RULES, banned: [...logits.keys()] };
  const rows = [none, null, clash, everything, NO_RULES].map((rules): Row => ({ logits, rules, topCount: 2 }));
  assert.deepEqual(
    (await run(rows)).map(({ token }) => token),
    [NO_TOKEN, best, NO_TOKEN, NO_TOKEN, best],
  );
});

test('ids past the vocabulary are passed over', async () => {
  const logits = [1, 2, 3];
  const bias = new Map([
    [3, 100],
    [0xffff_ffff, 100],
    [0, 50],
  ]);
  const [result, next] = await run([
    { logits, rules: { ...NO_RULES, bias, banned: [4, 5] }, topCount: null },
    { logits, rules: null, topCount: null },
  ]);
  assert.deepEqual([...result!.logits], [51, 2, 3]);
  assert.deepEqual([...next!.logits], logits);
});

test('logits stay usable numbers under the hardest penalty', async () => {
  const logits = [5, -5, 4];
  const rules = { ...NO_RULES, repetition: Number.MIN_VALUE, generated: [0, 1] };
  const [result] = await run([{ logits, rules, topCount: null }]);
  assert.equal(result!.token, 0);
  for (const value of result!.logits) assert.ok(Number.isFinite(value), `${value}`);
});

for (const vocabulary of [1, 19, 20, 257, 1003]) {
  test(`log probabilities of ${vocabulary} logits are those of the plain reference, whatever the rules`, async () => {
    const counts = [0, 1, 5, 20, 20];
    const rows = counts.map((topCount, index): Row => {
      const allowed = new Set([index % vocabulary, (index * 7) % vocabulary]);
      const rules = { ...randomRules(vocabulary), banned: [], allowed };
      return { logits: random.f32(vocabulary, 8), rules: index === 1 ? null : rules, topCount };
    });
    for (const [index, { token, logprobs }] of (await run(rows)).entries()) {
      const expected = plainLogprobs(rows[index]!.logits, token, counts[index]!);
      assert.deepEqual(
        logprobs!.top.map(({ id }) => id),
        expected.top.map(({ id }) => id),
      );
      // Sums of up to 1003 exponentials in f32, each off by up to 2 · 16 + 3 units in the last place.
      const values = [logprobs!.logprob, ...logprobs!.top.map(({ logprob }) => logprob)];
      assertClose(values, [expected.logprob, ...expected.top.map(({ logprob }) => logprob)], { absolute: 2e-5 });
    }
  });
}

test('equal logits are ranked by id, and fewer usable ones than asked for are all there are', async () => {
  const logits = [2, NaN, 3, 2, -Infinity, 3, 0, -0];
  const [result] = await run([{ logits, rules: null, topCount: 20 }]);
  assert.deepEqual(
    result!.logprobs!.top.map(({ id }) => id),
    [2, 5, 0, 3, 6, 7],
  );
  const total = result!.logprobs!.top.reduce((sum, { logprob }) => sum + Math.exp(logprob), 0);
  assert.ok(Math.abs(total - 1) < 1e-5, `probabilities sum to ${total}`);
});

test('a vocabulary of 129280 is ranked and masked to its end', async () => {
  const logits = random.f32(129280, 3);
  logits[129279] = 8;
  logits[64000] = 7.5;
  const [free, masked] = await run([
    { logits, rules: null, topCount: 2 },
    { logits, rules: { ...NO_RULES, allowed: new Set([129278]) }, topCount: 2 },
  ]);
  assert.equal(masked!.token, 129278);
  for (const { token, logprobs } of [free!, masked!]) {
    const expected = plainLogprobs(logits, token, 2);
    assert.deepEqual(
      logprobs!.top.map(({ id }) => id),
      [129279, 64000],
    );
    // As above, of 129280 terms.
    assertClose([logprobs!.logprob, logprobs!.top[1]!.logprob], [expected.logprob, expected.top[1]!.logprob], {
      absolute: 1e-4,
    });
  }
});
