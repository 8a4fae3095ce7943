/**
 * Long contexts: positions far from the start, thousands of entries to choose from, prompts of many chunks. The longest
 * context runs in test/large.
 */
import assert from 'node:assert/strict';
import { describe, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { downloadTensor } from '../../kernels/tensor.ts';
import { forwardLogits } from '../../model/transformer.ts';
import { createTestCache, openTestModel } from '../support/engine.ts';
import { argmax, readGolden } from '../support/golden.ts';
import { assertSameBits, openTestDevice } from '../support/gpu.ts';
import { assertFlatMemory, openIndexedModel, runLongContext } from '../support/long-context.ts';

const device = await openTestDevice();

test('nano at 5120 tokens, beyond its own 4096, has the logits of the reference, however the prompt is cut', async (t) => {
  // Made by test/reference/nano_long.py.
  const golden = readGolden<{
    tokens: number;
    positions: number[];
    stride: number;
    argmax: number[];
    margin: number[];
    logits: number[][];
  }>(new URL('../data/golden/nano-long.json', import.meta.url));
  let state = 1;
  const ids = Array.from({ length: golden.tokens }, () => {
    state = (Math.imul(state, 1103515245) + 12345) & 0x7fffffff;
    return (state >>> 16) % 1024;
  });
  const size = { maxRows: 1024, maxSequences: 1, maxPositions: golden.tokens, contextTokens: golden.tokens };
  const model = await openTestModel(device, fileURLToPath(new URL('../../model/nano', import.meta.url)), size);
  const { cache, places } = createTestCache(model, 1);
  const prefill = async (chunk: number): Promise<Float32Array[]> => {
    const rows: Float32Array[] = [];
    for (let start = 0; start < ids.length; start += chunk) {
      const sequence = { ...places[0]!, start, tokens: ids.slice(start, start + chunk), sampling: null };
      const step = { phase: 'prefill', sequences: [sequence], positions: golden.positions } as const;
      rows.push(...(await forwardLogits(model, cache, step)));
    }
    return rows;
  };
  const rows = await prefill(1024);
  let worst = 0;
  for (const [index, row] of rows.entries()) {
    for (const [listed, value] of golden.logits[index]!.entries()) {
      worst = Math.max(worst, Math.abs(row[listed * golden.stride]! - value));
    }
    if (golden.margin[index]! > 1e-3) assert.equal(argmax(row), golden.argmax[index]);
  }
  t.diagnostic(`largest difference ${worst}`);
  assert.equal(rows.length, golden.positions.length);
  // Five times that of short prompts: among a thousand entries some lead by less than f32 resolves (5e-7 here), and
  // whichever is then chosen moves logits of 8 to 20 a little.
  assert.ok(worst < 1e-4, `largest difference ${worst}`);
  for (const [index, row] of (await prefill(700)).entries()) {
    assertSameBits(row, rows[index]!, `chunks of 700, position ${golden.positions[index]}`);
  }
  cache.destroy();
});

describe('one ratio-4 layer with two index heads', async () => {
  const indexed = await openIndexedModel(device, 131_072);

  test('rotates by angles that are products rounded to f32, up to the last position', async () => {
    const { cos, sin } = indexed.model.workspace.ropeCompressed;
    const [positions, pairs] = cos.shape as [number, number];
    assert.equal(positions, 131_072);
    const cosines = new Float32Array(await downloadTensor(device, cos));
    const sines = new Float32Array(await downloadTensor(device, sin));
    // Pairs 0 and 1 of this config turn so fast that YaRN leaves them alone.
    const second = Math.fround(1 / Math.fround(160000 ** (2 / 8)));
    let visible = 0;
    for (let position = 0; position < positions; position += 11) {
      for (const [pair, frequency] of [1, second].entries()) {
        const angle = Math.fround(position * frequency);
        assert.equal(cosines[position * pairs + pair], Math.fround(Math.cos(angle)), `position ${position}`);
        assert.equal(sines[position * pairs + pair], Math.fround(Math.sin(angle)), `position ${position}`);
        visible = Math.max(visible, Math.abs(Math.cos(position * frequency) - Math.cos(angle)));
      }
    }
    assert.ok(visible > 1e-4, `an angle that is not rounded would differ by ${visible} only`);
  });

  test('computes at 16384 tokens what the reference does, in flat memory', async (t) => {
    const run = await runLongContext(indexed, 16_384);
    t.diagnostic(run.words);
    assert.ok(run.worst < 1e-5, `largest difference ${run.worst}`);
    assertFlatMemory(run);
  });
});
