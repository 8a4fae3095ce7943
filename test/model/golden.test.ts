/**
 * The model against reference logits: of files that an independent program computed in f64, and of test/reference.
 *
 * An f32 engine is about 1e-5 from an f64 reference. Above 2e-5 on lavapipe are quant-fp8 (2.1e-5) and quant-nvfp4
 * (2.1e-5, its drafts too). That is what f32 gives on these weights, not a kernel: test/reference with every product and
 * sum rounded to f32 is itself 2.0e-5 away from quant-fp8, and twice as close to the other files.
 */
import assert from 'node:assert/strict';
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { describe, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { loadModelConfig, parseModelConfig } from '../../model/config.ts';
import { memorySource } from '../../model/safetensors.ts';
import { forwardMtpLogits, type Model } from '../../model/transformer.ts';
import { ReferenceModel } from '../reference/model.ts';
import { generateCheckpoint, type StorageFormats } from '../support/checkpoints.ts';
import { createTestCache, openTestModel, prefillLogits } from '../support/engine.ts';
import { assertGolden, readGolden, type Golden } from '../support/golden.ts';
import { assertSameBits, openTestDevice } from '../support/gpu.ts';

const device = await openTestDevice();
const dataUrl = new URL('../data/golden/', import.meta.url);
const nanoDirectory = fileURLToPath(new URL('../../model/nano', import.meta.url));

async function draftLogits(model: Model, ids: readonly number[], chunk: number): Promise<Float32Array[]> {
  const { cache, places } = createTestCache(model, 2);
  const rows: Float32Array[] = [];
  for (let start = 0; start < ids.length; start += chunk) {
    const tokens = ids.slice(start, start + chunk);
    const sequence = { ...places[0]!, start, tokens, sampling: null, next: ids[start + chunk] };
    const step = { phase: 'prefill', positions: 'all', sequence } as const;
    rows.push(...(await forwardMtpLogits(model, cache, step)));
  }
  cache.destroy();
  return rows;
}

/** Whole prompt, chunks of 37, and one by one as decode does: the same bits, and the golden's values. */
async function checkEveryChunking(model: Model, golden: Golden, undecided: readonly number[] = []): Promise<number> {
  const { cache, places } = createTestCache(model, 2);
  const ids = golden.ids.slice(0, golden.argmax.length);
  const whole = await prefillLogits(model, cache, { place: places[0]!, ids, chunk: ids.length });
  const worst = assertGolden(whole, golden, { undecided });
  for (const chunk of [128, 37]) {
    const rows = await prefillLogits(model, cache, { place: places[1]!, ids, chunk });
    for (const [position, row] of rows.entries())
      assertSameBits(row, whole[position]!, `chunk ${chunk}, position ${position}`);
  }
  const decoded = await prefillLogits(model, cache, { place: places[0]!, ids, chunk: 1, phase: 'decode' });
  for (const [position, row] of decoded.entries())
    assertSameBits(row, whole[position]!, `decode, position ${position}`);
  cache.destroy();
  return worst;
}

describe('tiny-golden', async () => {
  const golden = readGolden<Golden & { config: object; mtp_logits_first8: Record<string, number[]> }>(
    new URL('tiny-golden.json', dataUrl),
  );
  const config = parseModelConfig({ ...golden.config, max_position_embeddings: 1024 });
  const plain = { plain: 'F32', linears: 'plain', experts: 'plain' } as const;
  const generated = generateCheckpoint(config, plain, { mtp: true });
  const model = await openTestModel(
    device,
    { config, source: memorySource(generated.entries) },
    { maxRows: 256, maxSequences: 2, maxPositions: 256, mtp: true },
  );
  // The margin there is 2.7e-4.
  const undecided = [40];

  test('prefill, chunks and decode give the listed logits, the same bits each', async (t) => {
    const worst = await checkEveryChunking(model, golden, undecided);
    t.diagnostic(`largest difference ${worst}`);
    assert.ok(worst < 2e-5, `an f32 engine is about 1e-5 away, this one ${worst}`);
  });

  test('the draft block gives the listed draft logits', async () => {
    const rows = await draftLogits(model, golden.ids, 50);
    for (const [position, expected] of Object.entries(golden.mtp_logits_first8)) {
      const row = rows[Number(position)]!;
      for (const [token, value] of expected.entries()) {
        assert.ok(
          Math.abs(row[token]! - value) < 2e-5,
          `position ${position}, token ${token}: ${row[token]}, not ${value}`,
        );
      }
    }
  });

  test('the plain reference gives the listed logits', () => {
    const reference = new ReferenceModel(config, generated.weights);
    const rows = golden.argmax.map((_, position) => reference.step(golden.ids[position]!).logits);
    // The file has six decimals. The trap of angle rounding does not show this early in a sequence.
    assertGolden(rows, golden, { tolerance: 2e-6, undecided });
  });
});

describe('nano', async () => {
  const golden = readGolden(new URL('nano-mxfp4.json', dataUrl));
  const model = await openTestModel(device, nanoDirectory, {
    maxRows: 512,
    maxSequences: 2,
    maxPositions: 512,
    mtp: true,
  });

  test('prefill, chunks and decode give the listed logits, the same bits each', async (t) => {
    const worst = await checkEveryChunking(model, golden);
    t.diagnostic(`largest difference ${worst}`);
    assert.ok(worst < 2e-5, `an f32 engine is about 1e-5 away, this one ${worst}`);
  });

  test('the draft block gives the listed draft logits', async () => {
    const rows = await draftLogits(model, golden.ids, 100);
    assertGolden(rows, { logits: golden.mtp_logits!, argmax: golden.mtp_argmax! }, { tolerance: 5e-5 });
  });
});

describe('generated checkpoints in every format', () => {
  // No size is a multiple of FP8's 128 x 128 blocks, streams are not four, and ratio 8 is neither of the official ones.
  const config = parseModelConfig({
    vocab_size: 80,
    hidden_size: 96,
    num_hidden_layers: 4,
    num_attention_heads: 6,
    head_dim: 48,
    qk_rope_head_dim: 16,
    q_lora_rank: 64,
    o_lora_rank: 32,
    o_groups: 2,
    n_routed_experts: 7,
    num_experts_per_tok: 3,
    moe_intermediate_size: 160,
    routed_scaling_factor: 1.5,
    swiglu_limit: 0.7,
    sliding_window: 9,
    hc_mult: 3,
    hc_sinkhorn_iters: 20,
    hc_eps: 1e-6,
    rms_norm_eps: 1e-6,
    index_n_heads: 24,
    index_head_dim: 32,
    index_topk: 5,
    max_position_embeddings: 4096,
    rope_theta: 10000,
    compress_rope_theta: 160000,
    rope_scaling: { type: 'yarn', factor: 16, original_max_position_embeddings: 64, beta_fast: 32, beta_slow: 1 },
    compress_ratios: [4, 0, 8, 4],
    num_hash_layers: 1,
  });
  const ids = Array.from({ length: 70 }, (_, index) => (index * index * 31 + index * 17 + 5) % 80);
  // Layers 0 to 3 as the releases have them, and no two linears of a layer alike.
  const mixed = (name: string): StorageFormats => {
    const layer = Number(/layers\.(\d)/.exec(name)?.[1] ?? 0);
    const linears = (['fp8', 'fp8-f32-scales', 'plain'] as const)[name.length % 3]!;
    const experts = (['mxfp4', 'nvfp4', 'fp8-f32-scales', 'fp8'] as const)[layer]!;
    return { plain: layer === 1 ? 'F32' : 'BF16', linears, experts };
  };
  const formats: Record<string, StorageFormats | typeof mixed> = {
    'f16 throughout': { plain: 'F16', linears: 'plain', experts: 'plain' },
    'bf16 throughout': { plain: 'BF16', linears: 'plain', experts: 'plain' },
    'FP8 with power-of-two scales': { plain: 'BF16', linears: 'fp8', experts: 'fp8' },
    'FP8 with f32 scales, bf16 experts': { plain: 'BF16', linears: 'fp8-f32-scales', experts: 'plain' },
    'MXFP4 experts': { plain: 'BF16', linears: 'fp8', experts: 'mxfp4' },
    'NVFP4 experts': { plain: 'BF16', linears: 'fp8', experts: 'nvfp4' },
    'FP8 experts with f32 scales': { plain: 'BF16', linears: 'fp8', experts: 'fp8-f32-scales' },
    'every format in one checkpoint': mixed,
  };
  for (const [name, format] of Object.entries(formats)) {
    test(`${name}: the kernels agree with the plain reference`, async (t) => {
      const { entries, weights } = generateCheckpoint(config, format);
      const reference = new ReferenceModel(config, weights);
      const expected = ids.map((id) => reference.step(id).logits);
      const { route, topK } = reference.smallestLead;
      assert.ok(route > 1e-5 && topK > 1e-5, `this prompt leaves choices open: ${route}, ${topK}`);
      const model = await openTestModel(
        device,
        { config, source: memorySource(entries) },
        { maxRows: 128, maxSequences: 2, maxPositions: 128 },
      );
      const { cache, places } = createTestCache(model, 2);
      const rows = await prefillLogits(model, cache, { place: places[0]!, ids, chunk: 33 });
      let worst = 0;
      for (const [position, row] of rows.entries()) {
        for (const [token, value] of expected[position]!.entries())
          worst = Math.max(worst, Math.abs(row[token]! - value));
      }
      cache.destroy();
      t.diagnostic(`largest difference ${worst}`);
      assert.ok(worst < 2e-5, `largest difference ${worst}`);
    });
  }
});

describe('golden checkpoints outside the repository', () => {
  const names = [
    'quant-mxfp4',
    'quant-nvfp4',
    'quant-fp8',
    'plain-bf16',
    'nano-mxfp4',
    'nano-nvfp4',
    'nano-fp8',
    'nano-bf16',
  ];
  const root = process.env['HANDOFF_GOLDEN_DIR'];
  const there = root ? names.filter((name) => existsSync(join(root, name, 'golden.json'))) : [];
  const absent = names.filter((name) => !there.includes(name));
  if (absent.length > 0) {
    console.log(`# not run, since HANDOFF_GOLDEN_DIR (${root ?? 'not set'}) does not have them: ${absent.join(', ')}`);
  }
  for (const name of there) {
    test(`${name}: prefill, chunks, decode and drafts give the listed logits`, async (t) => {
      const directory = join(root!, name);
      const golden = readGolden(join(directory, 'golden.json'));
      assert.equal(loadModelConfig(directory).mtpBlocks, 1);
      const model = await openTestModel(device, directory, {
        maxRows: 512,
        maxSequences: 2,
        maxPositions: 512,
        mtp: true,
      });
      const worst = await checkEveryChunking(model, golden);
      const drafts = await draftLogits(model, golden.ids, 64);
      const worstDraft = assertGolden(
        drafts,
        { logits: golden.mtp_logits!, argmax: golden.mtp_argmax! },
        { undecided: [] },
      );
      t.diagnostic(`largest difference ${worst}, of drafts ${worstDraft}`);
      // See the top of the file; SwiftShader reaches 2.6e-5.
      assert.ok(worst < 3e-5 && worstDraft < 3e-5, `${worst}, ${worstDraft}`);
    });
  }
});
