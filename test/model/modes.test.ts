/**
 * Rounding as the official runtime does it, and index keys of every precision: on nano that no step's shape changes a
 * bit, on the Q golden that it is that rounding.
 */
import assert from 'node:assert/strict';
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { describe, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { loadModelConfig, type ConfigChoices, type NumericMode } from '../../model/config.ts';
import { createTestCache, openTestModel, prefillLogits } from '../support/engine.ts';
import { argmax, readGolden, type Golden } from '../support/golden.ts';
import { assertSameBits, openTestDevice } from '../support/gpu.ts';

const device = await openTestDevice();
const nanoDirectory = fileURLToPath(new URL('../../model/nano', import.meta.url));
const nanoIds = readGolden(new URL('../data/golden/nano-mxfp4.json', import.meta.url)).ids;
const sizes = { maxRows: 512, maxSequences: 2, maxPositions: 512 };

function meanDifference(left: readonly Float32Array[], right: readonly ArrayLike<number>[]): number {
  let sum = 0;
  let count = 0;
  for (const [position, row] of right.entries()) {
    for (let token = 0; token < row.length; token++, count++) sum += Math.abs(left[position]![token]! - row[token]!);
  }
  return sum / count;
}

describe('nano', () => {
  // 300 tokens: layers of ratio 4 choose among 75 entries.
  const ids = nanoIds.slice(0, 300);
  const results = new Map<NumericMode, Float32Array[]>();

  async function logitsOf(choices: ConfigChoices): Promise<Float32Array[]> {
    const model = await openTestModel(device, nanoDirectory, { ...sizes, ...choices });
    const { cache, places } = createTestCache(model, 1);
    const rows = await prefillLogits(model, cache, { place: places[0]!, ids, chunk: ids.length });
    cache.destroy();
    return rows;
  }

  for (const [mode, indexPrecision] of [
    ['hp', 'bf16'],
    ['q', 'fp4'],
    ['q-inputs', 'fp8'],
  ] as const) {
    test(`mode ${mode} with ${indexPrecision} keys: whole, chunked, decoded and handed over give the same bits`, async () => {
      const model = await openTestModel(device, nanoDirectory, { ...sizes, mode, indexPrecision });
      const { cache, places } = createTestCache(model, 2);
      const whole = await prefillLogits(model, cache, { place: places[0]!, ids, chunk: 300 });
      results.set(mode, whole);
      const chunked = await prefillLogits(model, cache, { place: places[1]!, ids: ids.slice(0, 280), chunk: 37 });
      for (const [position, row] of chunked.entries()) assertSameBits(row, whole[position]!, `position ${position}`);

      const other = createTestCache(model, 2);
      const target = other.places[0]!;
      const units = await cache.readUnits({ pages: [...places[1]!.pages], slot: places[1]!.slot });
      other.cache.writeSlot(target.slot, units.pop()!);
      for (const [index, bytes] of units.entries()) other.cache.writePage(target.pages[index]!, bytes);
      const rest = { place: target, ids: ids.slice(280), start: 280, chunk: 1, phase: 'decode' } as const;
      for (const [index, row] of (await prefillLogits(model, other.cache, rest)).entries())
        assertSameBits(row, whole[280 + index]!, `decoded position ${280 + index}`);
      other.cache.destroy();
      cache.destroy();
    });
  }

  test('what mode q chooses by is stored in FP4 without loss, as is its default', async () => {
    assert.equal(loadModelConfig(nanoDirectory, { mode: 'q' }).indexPrecision, 'fp4');
    const rows = await logitsOf({ mode: 'q', indexPrecision: 'f32' });
    for (const [position, row] of rows.entries()) assertSameBits(row, results.get('q')![position]!, `${position}`);
  });

  test('narrower keys change what is computed from the first choice on, and nothing before', async () => {
    assert.equal(loadModelConfig(nanoDirectory).indexPrecision, 'f32');
    const [exact, narrow] = [await logitsOf({}), await logitsOf({ indexPrecision: 'fp4' })];
    // The first row that sees more than 64 entries of 4 tokens.
    const firstChoice = 259;
    for (let position = 0; position < firstChoice; position++)
      assertSameBits(narrow[position]!, exact[position]!, `position ${position}`);
    const difference = meanDifference(narrow.slice(firstChoice), exact.slice(firstChoice));
    assert.ok(difference > 1e-6 && difference < 0.5, `${difference}`);
  });

  test('every mode computes something of its own', () => {
    const [hp, q, inputs] = [results.get('hp')!, results.get('q')!, results.get('q-inputs')!];
    for (const [left, right] of [
      [hp, q],
      [hp, inputs],
      [q, inputs],
    ] as const) {
      const difference = meanDifference(left, right);
      assert.ok(difference > 1e-3 && difference < 2, `${difference}`);
    }
  });
});

describe('the Q golden outside the repository', () => {
  // Rounding in another order moves a right implementation by 0.005 to 0.014 from this file; HP mode is 0.05 away, and
  // rule 1 (rounded inputs), which the file does without, 0.13. Section 9.3 of the model description.
  const directory = join(process.env['HANDOFF_GOLDEN_DIR'] ?? '', 'quant-mxfp4-q');
  if (!existsSync(join(directory, 'golden.json'))) {
    console.log(`# not run, since HANDOFF_GOLDEN_DIR does not have it: quant-mxfp4-q`);
    return;
  }
  for (const [mode, expected] of [
    ['q', 'is as close as its order of additions allows'],
    ['hp', 'fails the bounds of Q mode'],
    ['q-inputs', 'is further away'],
  ] as const) {
    test(`mode ${mode} ${expected}`, async (t) => {
      const golden = readGolden<Golden>(join(directory, 'golden.json'));
      const model = await openTestModel(device, directory, { ...sizes, mode });
      const { cache, places } = createTestCache(model, 2);
      const ids = golden.ids.slice(0, golden.argmax.length);
      const rows = await prefillLogits(model, cache, { place: places[0]!, ids, chunk: ids.length });
      cache.destroy();
      const listed = Object.keys(golden.logits).map(Number);
      const difference = meanDifference(
        listed.map((position) => rows[position]!),
        listed.map((position) => golden.logits[position]!),
      );
      const equal = rows.filter((row, position) => argmax(row) === golden.argmax[position]).length;
      t.diagnostic(`mean difference ${difference}, argmax equal in ${equal} of ${rows.length}`);
      if (mode === 'q') assert.ok(difference <= 0.025 && equal >= 285, `${difference}, ${equal}`);
      else if (mode === 'hp') assert.ok(difference > 0.04 && equal < 285, `${difference}, ${equal}`);
      else assert.ok(difference > 0.1 && difference < 0.16, `${difference}, ${equal}`);
    });
  }
});
