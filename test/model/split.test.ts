/** Tensors larger than one binding: whatever lies in segments computes the same bits as when it lies in one piece. */
import assert from 'node:assert/strict';
import { after, describe, test } from 'node:test';
import { openDevice, type Device } from '../../kernels/device.ts';
import { segmentsOf, type Tensor } from '../../kernels/tensor.ts';
import { parseModelConfig } from '../../model/config.ts';
import { createKvCache } from '../../model/kv-cache.ts';
import { memorySource } from '../../model/safetensors.ts';
import { forward } from '../../model/transformer.ts';
import type { ModelWeights } from '../../model/weights.ts';
import { generateCheckpoint, type StorageFormats } from '../support/checkpoints.ts';
import { createTestCache, openTestModel, prefillLogits } from '../support/engine.ts';
import { assertSameBits, createTestRandom, openTestDevice } from '../support/gpu.ts';

const device = await openTestDevice();
const random = createTestRandom();
const adapterName = process.env['HANDOFF_ADAPTER'];
const opened: Device[] = [];
after(() => opened.forEach((other) => other.close()));

async function openNarrow(maxBindingBytes: number): Promise<Device> {
  const narrow = await openDevice({ ...(adapterName ? { adapterName } : {}), maxBindingBytes });
  opened.push(narrow);
  return narrow;
}

// Wide enough for several FP8 blocks, groups that a cut goes through, and more experts than fit a segment. Ratio 8 has
// entries without a selection.
const config = parseModelConfig({
  vocab_size: 900,
  hidden_size: 160,
  num_hidden_layers: 3,
  num_attention_heads: 6,
  head_dim: 64,
  qk_rope_head_dim: 16,
  q_lora_rank: 96,
  o_lora_rank: 88,
  o_groups: 3,
  n_routed_experts: 9,
  num_experts_per_tok: 2,
  moe_intermediate_size: 96,
  routed_scaling_factor: 1.5,
  swiglu_limit: 1,
  sliding_window: 16,
  hc_mult: 3,
  hc_sinkhorn_iters: 20,
  hc_eps: 1e-6,
  rms_norm_eps: 1e-6,
  index_n_heads: 8,
  index_head_dim: 32,
  index_topk: 12,
  max_position_embeddings: 1024,
  rope_theta: 10000,
  compress_rope_theta: 160000,
  compress_ratios: [0, 4, 8],
  num_hash_layers: 1,
});
const ids = Array.from({ length: 150 }, () => random.integer(config.vocabSize));
const size = { maxRows: 256, maxSequences: 4, maxPositions: 1024 };
const greedy = { temperature: 0, topK: 0, topP: 1, minP: 0, seed: 0 };

/** Logits of a prompt in two chunks, of decode steps after it, and the token that a batch of four samples. */
async function results(on: Device, format: StorageFormats) {
  const { entries } = generateCheckpoint(config, format);
  const model = await openTestModel(on, { config, source: memorySource(entries) }, size);
  const { cache, places } = createTestCache(model, 4);
  const rows = await prefillLogits(model, cache, { place: places[1]!, ids: ids.slice(0, 140), chunk: 100 });
  const decode = { place: places[1]!, ids: ids.slice(140), chunk: 1, start: 140, phase: 'decode' as const };
  rows.push(...(await prefillLogits(model, cache, decode)));
  const sequences = places.map((place, index) => ({
    ...place,
    start: 0,
    tokens: ids.slice(index, index + 64),
    sampling: index === 2 ? null : greedy,
  }));
  const sampled = await forward(model, cache, { phase: 'prefill', sequences });
  return { model, cache, places, rows, sampled };
}

const segmentCount = (tensor: Tensor | null | undefined): number => (tensor ? segmentsOf(tensor).length : 0);

/** The tensors of a model that may lie in segments, with the number of theirs. */
function segmentCounts(weights: ModelWeights): Record<string, number> {
  const [, layer] = weights.layers;
  return {
    embedding: segmentCount(weights.embedding.weight),
    head: segmentCount(weights.head.weight),
    queryUp: segmentCount(layer!.attention.queryUp.weight),
    outputDown: segmentCount(layer!.attention.outputDown.weight),
    gateUp: segmentCount(layer!.moe.gateUp.weight),
    down: segmentCount(layer!.moe.down.weight),
  };
}

describe('a model whose tensors lie in segments', () => {
  // The smallest bindings that hold one expert, and 128 rows of the widest FP8 matrix.
  const cases: [name: string, format: StorageFormats, bindingBytes: number][] = [
    ['f32 throughout', { plain: 'F32', linears: 'plain', experts: 'plain' }, 4 * 2 * 96 * 160],
    ['FP8 throughout', { plain: 'BF16', linears: 'fp8', experts: 'fp8' }, 128 * 3 * 88],
    ['NVFP4 experts', { plain: 'BF16', linears: 'fp8', experts: 'nvfp4' }, 128 * 3 * 88],
  ];
  for (const [name, format, bindingBytes] of cases) {
    test(`${name}: computes the same bits as in one piece`, async (t) => {
      const narrow = await openNarrow(bindingBytes);
      const whole = await results(device, format);
      const cut = await results(narrow, format);
      const counts = segmentCounts(cut.model.weights);
      t.diagnostic(JSON.stringify({ ...counts, maxRows: cut.model.limits.maxRows }));
      for (const [kind, count] of Object.entries(counts)) assert.ok(count > 1, `${kind} should lie in segments`);
      for (const [kind, count] of Object.entries(segmentCounts(whole.model.weights))) assert.equal(count, 1, kind);
      for (const { entries, indexKeys, gathered } of cut.cache.layers.slice(1)) {
        assert.ok(
          segmentCount(entries) > 1 && gathered,
          `${segmentCount(entries)} segments, gathered: ${Boolean(gathered)}`,
        );
        assert.ok(
          indexKeys === null || segmentCount(indexKeys) > 1,
          `${indexKeys && segmentCount(indexKeys)} segments of index keys`,
        );
      }
      // A batch of four prompts has more rows than a step may now have, and so has one chunk.
      assert.ok(cut.model.limits.maxRows < 100, `${cut.model.limits.maxRows} rows`);
      for (const [position, row] of cut.rows.entries()) {
        assertSameBits(row, whole.rows[position]!, `position ${position}`);
      }
      assert.deepEqual(cut.sampled, whole.sampled);
      assert.equal(cut.sampled.length, 3);

      // Pages are the same bytes wherever they lie.
      const { pages } = whole.places[1]!;
      const units = { pages: pages.slice(0, 2), slot: whole.places[1]!.slot };
      assert.deepEqual(await cut.cache.readUnits(units), await whole.cache.readUnits(units));
      const before = narrow.allocatedBytes;
      cut.cache.destroy();
      whole.cache.destroy();
      const again = createKvCache(narrow, config, { pageCount: cut.cache.pageCount, slotCount: cut.cache.slotCount });
      assert.equal(narrow.allocatedBytes, before);
      again.destroy();
    });
  }
});
