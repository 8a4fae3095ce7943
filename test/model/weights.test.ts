/** Loading onto a device: the same numbers from every spelling and layout of a checkpoint; damaged values are refused. */
import assert from 'node:assert/strict';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, describe, test } from 'node:test';
import { inspect } from 'node:util';
import { openDevice } from '../../kernels/device.ts';
import { parseModelConfig } from '../../model/config.ts';
import { createKvCache } from '../../model/kv-cache.ts';
import { memorySource, openCheckpoint, type TensorSource } from '../../model/safetensors.ts';
import { forward } from '../../model/transformer.ts';
import { loadWeights, surveyWeights } from '../../model/weights.ts';
import {
  fuseExperts,
  generateCheckpoint,
  safetensorsBytes,
  savedName,
  transformersName,
  type StorageFormats,
  type StoredEntry,
} from '../support/checkpoints.ts';
import { createTestCache, openTestModel, prefillLogits } from '../support/engine.ts';
import { assertSameBits, openTestDevice } from '../support/gpu.ts';

const device = await openTestDevice();
const config = parseModelConfig({
  vocab_size: 48,
  hidden_size: 64,
  num_hidden_layers: 3,
  num_attention_heads: 2,
  head_dim: 32,
  qk_rope_head_dim: 16,
  q_lora_rank: 32,
  o_lora_rank: 16,
  o_groups: 1,
  n_routed_experts: 3,
  num_experts_per_tok: 2,
  moe_intermediate_size: 32,
  routed_scaling_factor: 1.5,
  swiglu_limit: 1,
  sliding_window: 8,
  hc_mult: 4,
  hc_sinkhorn_iters: 20,
  hc_eps: 1e-6,
  rms_norm_eps: 1e-6,
  index_n_heads: 8,
  index_head_dim: 16,
  index_topk: 4,
  max_position_embeddings: 128,
  rope_theta: 10000,
  compress_rope_theta: 160000,
  compress_ratios: [0, 4, 16],
  num_hash_layers: 1,
  num_nextn_predict_layers: 1,
});
const size = { maxRows: 64, maxSequences: 2, maxPositions: 128 };
const ids = Array.from({ length: 40 }, (_, index) => (index * 7 + 3) % 48);

async function logitsOf(source: TensorSource): Promise<Float32Array[]> {
  const model = await openTestModel(device, { config, source }, size);
  const { cache, places } = createTestCache(model, 2);
  const rows = await prefillLogits(model, cache, { place: places[0]!, ids, chunk: 64 });
  cache.destroy();
  return rows;
}

const root = mkdtempSync(join(tmpdir(), 'handoff-weights-'));
after(() => rmSync(root, { recursive: true }));

test('a checkpoint that transformers saved, FP8 and MXFP4, computes the same bits as the official one', async () => {
  const { entries } = generateCheckpoint(config, { plain: 'BF16', linears: 'fp8', experts: 'mxfp4' });
  const official = await logitsOf(memorySource(entries));
  const saved = entries.map((entry): StoredEntry => ({ ...entry, name: savedName(entry.name) }));
  const rows = await logitsOf(memorySource(saved));
  for (const [position, row] of rows.entries()) assertSameBits(row, official[position]!, `position ${position}`);
});

test('a checkpoint of transformers, experts fused, in shards, computes the same bits as the official one', async () => {
  const { entries } = generateCheckpoint(config, { plain: 'BF16', linears: 'plain', experts: 'plain' });
  const official = await logitsOf(memorySource(entries));
  const renamed = fuseExperts(entries).map((entry): StoredEntry =>
    entry.name.startsWith('model.') ? entry : { ...entry, name: transformersName(entry.name) },
  );
  const shards = [renamed.filter((_, index) => index % 2 === 0), renamed.filter((_, index) => index % 2 === 1)];
  const weightMap: Record<string, string> = {};
  for (const [index, shard] of shards.entries()) {
    const file = `model-0000${index + 1}-of-00002.safetensors`;
    writeFileSync(join(root, file), safetensorsBytes(shard));
    for (const { name } of shard) weightMap[name] = file;
  }
  writeFileSync(join(root, 'model.safetensors.index.json'), JSON.stringify({ metadata: {}, weight_map: weightMap }));
  const source = await openCheckpoint(root);
  const rows = await logitsOf(source);
  await source.close();
  for (const [position, row] of rows.entries()) assertSameBits(row, official[position]!, `position ${position}`);
});

describe('loading', () => {
  const quantised = { plain: 'BF16', linears: 'fp8', experts: 'mxfp4' } as const;

  test('loads the draft block only when it is asked for, and tells how far it is', async () => {
    const { entries } = generateCheckpoint(config, quantised, { mtp: true });
    const progress: { done: number; total: number }[] = [];
    const without = await loadWeights(device, config, memorySource(entries), {
      onProgress: (step) => progress.push(step),
    });
    assert.equal(without.mtp, null);
    assert.ok(
      progress.every(({ done }, index) => index === 0 || done > progress[index - 1]!.done),
      inspect(progress),
    );
    assert.equal(progress.at(-1)!.done, progress.at(-1)!.total);
    const before = device.allocatedBytes;
    assert.ok(
      (await loadWeights(device, config, memorySource(entries), { mtp: true })).mtp,
      'the draft block is not loaded',
    );
    const survey = surveyWeights(config, memorySource(entries), { mtp: true });
    const surveyed = survey.reduce((sum, weight) => sum + weight.deviceBytes, 0);
    assert.equal(device.allocatedBytes - before, surveyed, 'the survey knows what the weights take');
  });

  const f32Nan = [0, 0, 0xc0, 0x7f];
  const f32Infinity = [0, 0, 0x80, 0x7f];
  const base: StorageFormats = { plain: 'BF16', linears: 'fp8', experts: 'fp8-f32-scales' };
  const nvfp4: StorageFormats = { plain: 'BF16', linears: 'fp8', experts: 'nvfp4' };
  const damages: [name: string, formats: StorageFormats, tensor: string, first: number[], message: RegExp][] = [
    [
      'an FP8 scale that is NaN',
      quantised,
      'layers.0.attn.wq_a.scale',
      [0xff],
      /layers\.0\.attn\.wq_a\.scale: a scale is NaN/,
    ],
    [
      'an f32 scale that is NaN',
      base,
      'layers.1.ffn.experts.2.w2.scale',
      f32Nan,
      /experts\.2\.w2\.scale: a scale is not a finite number/,
    ],
    [
      'an MXFP4 scale that is NaN',
      quantised,
      'layers.1.ffn.experts.2.w3.scale',
      [0xff],
      /experts\.2\.w3\.scale: a scale is NaN/,
    ],
    [
      'an NVFP4 scale that is NaN',
      nvfp4,
      'layers.1.ffn.experts.2.w3.weight_scale',
      [0x7f],
      /experts\.2\.w3\.weight_scale: a scale is NaN/,
    ],
    [
      'an infinite second scale',
      nvfp4,
      'layers.1.ffn.experts.2.w3.weight_scale_2',
      f32Infinity,
      /experts\.2\.w3\.weight_scale_2: a scale is not a finite number/,
    ],
    [
      'a token table that names an expert too many',
      quantised,
      'layers.0.ffn.gate.tid2eid',
      [3],
      /tid2eid: entry 3 is not below 3/,
    ],
  ];
  for (const [name, formats, tensor, first, message] of damages) {
    test(`refuses ${name}, and keeps no memory`, async () => {
      const { entries } = generateCheckpoint(config, formats);
      assert.ok(
        entries.some((entry) => entry.name === tensor),
        `no ${tensor} among ${entries.length} entries`,
      );
      const damaged = entries.map((entry) => {
        if (entry.name !== tensor) return entry;
        const bytes = entry.bytes.slice();
        bytes.set(first);
        return { ...entry, bytes };
      });
      const before = device.allocatedBytes;
      await assert.rejects(loadWeights(device, config, memorySource(damaged)), message);
      assert.equal(device.allocatedBytes, before);
    });
  }

  test('a step on a lost device is rejected, with and without a token to bring back', async () => {
    const adapterName = process.env['HANDOFF_ADAPTER'];
    const doomed = await openDevice(adapterName ? { adapterName } : {});
    const { entries } = generateCheckpoint(config, quantised);
    const model = await openTestModel(doomed, { config, source: memorySource(entries) }, size);
    const cache = createKvCache(doomed, config, { pageCount: 1, slotCount: 1 });
    const greedy = { temperature: 0, topK: 0, topP: 1, minP: 0, seed: 0 };
    const step = (sampling: typeof greedy | null): Promise<number[]> =>
      forward(model, cache, {
        phase: 'prefill',
        sequences: [{ slot: 0, pages: [0], start: 0, tokens: ids, sampling }],
      });
    const running = step(greedy);
    doomed.close();
    await assert.rejects(running, /GPU/);
    await assert.rejects(step(null), /GPU/);
  });
});
