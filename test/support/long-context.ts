/**
 * A model of one small ratio-4 layer with two index heads, and prompts of any length through it and through the reference.
 * The indexer's work grows with the square of the context; so small, it can be done on a CPU.
 */
import assert from 'node:assert/strict';
import type { Device } from '../../kernels/device.ts';
import { parseModelConfig } from '../../model/config.ts';
import { memorySource } from '../../model/safetensors.ts';
import { forward, forwardLogits, type Model } from '../../model/transformer.ts';
import { ReferenceModel, type ReferenceWeights } from '../reference/model.ts';
import { generateCheckpoint } from './checkpoints.ts';
import { createTestCache, openTestModel } from './engine.ts';

export interface IndexedModel {
  readonly model: Model;
  readonly weights: ReferenceWeights;
}

/** Generated weights on the device. */
export async function openIndexedModel(device: Device, maxPositions: number): Promise<IndexedModel> {
  const config = parseModelConfig({
    vocab_size: 64,
    hidden_size: 32,
    num_hidden_layers: 1,
    num_attention_heads: 2,
    head_dim: 16,
    qk_rope_head_dim: 8,
    q_lora_rank: 16,
    o_lora_rank: 8,
    o_groups: 1,
    n_routed_experts: 4,
    num_experts_per_tok: 2,
    moe_intermediate_size: 32,
    routed_scaling_factor: 1.5,
    swiglu_limit: 1,
    sliding_window: 128,
    hc_mult: 2,
    hc_sinkhorn_iters: 20,
    hc_eps: 1e-6,
    rms_norm_eps: 1e-6,
    index_n_heads: 2,
    index_head_dim: 8,
    index_topk: 64,
    max_position_embeddings: 1048576,
    rope_theta: 10000,
    compress_rope_theta: 160000,
    rope_scaling: { type: 'yarn', factor: 16, original_max_position_embeddings: 65536, beta_fast: 32, beta_slow: 1 },
    compress_ratios: [4],
    num_hash_layers: 0,
  });
  const { entries, weights } = generateCheckpoint(config, { plain: 'F32', linears: 'plain', experts: 'plain' });
  const source = memorySource(entries);
  const model = await openTestModel(device, { config, source }, { maxRows: CHUNK, maxSequences: 1, maxPositions });
  return { model, weights };
}

const CHUNK = 1024;

export interface LongRun {
  /** Largest difference of a logit from the reference, at the middle and at the end of the prompt. */
  readonly worst: number;
  /** Bytes after each eighth of the prompt, the first included. */
  readonly allocatedBytes: readonly number[];
  readonly residentBytes: readonly number[];
  /** For a person. */
  readonly words: string;
}

/** Prefill `tokenCount` tokens, a multiple of 8192, and compare with the reference. */
export async function runLongContext({ model, weights }: IndexedModel, tokenCount: number): Promise<LongRun> {
  const { config, device } = model;
  let state = 17;
  const ids = Uint32Array.from({ length: tokenCount }, () => {
    state = (Math.imul(state, 1103515245) + 12345) & 0x7fffffff;
    return (state >>> 16) % config.vocabSize;
  });
  const { cache, places } = createTestCache(model, 1);
  const wanted = [tokenCount / 2 - 1, tokenCount / 2, tokenCount - 2, tokenCount - 1];
  const rows: Float32Array[] = [];
  const residentBytes: number[] = [];
  const allocatedBytes: number[] = [];
  const startMs = performance.now();
  for (let start = 0; start < tokenCount; start += CHUNK) {
    const sequence = { ...places[0]!, start, tokens: ids.subarray(start, start + CHUNK), sampling: null };
    const step = { phase: 'prefill', sequences: [sequence] } as const;
    if (wanted.some((position) => position >= start && position < start + CHUNK)) {
      rows.push(...(await forwardLogits(model, cache, { ...step, positions: wanted })));
    } else await forward(model, cache, step);
    if ((start + CHUNK) % (tokenCount / 8) === 0) {
      residentBytes.push(process.memoryUsage.rss());
      allocatedBytes.push(device.allocatedBytes);
    }
  }
  const seconds = (performance.now() - startMs) / 1e3;
  cache.destroy();

  const reference = new ReferenceModel(config, weights);
  let position = 0;
  let worst = 0;
  for (const [index, next] of wanted.entries()) {
    reference.skim(ids.subarray(position, next));
    const { logits } = reference.step(ids[next]!);
    position = next + 1;
    for (const [token, value] of logits.entries()) worst = Math.max(worst, Math.abs(rows[index]![token]! - value));
  }
  const { topK, route } = reference.smallestLead;
  const words =
    `largest difference ${worst}; smallest lead of an entry ${topK}, of an expert ${route}; ` +
    `prefill ${seconds.toFixed(1)} s; resident MiB ${residentBytes.map((bytes) => Math.round(bytes / 2 ** 20))}`;
  return { worst, allocatedBytes, residentBytes, words };
}

/** The state was allocated before the prompt began: what its steps add must not depend on their number. */
export function assertFlatMemory({ allocatedBytes, residentBytes }: LongRun): void {
  const growth = (samples: readonly number[]): number => samples.at(-1)! - samples[1]!;
  // Small uniforms of shapes that come first in a later step.
  assert.ok(growth(allocatedBytes) < 2 ** 16, `allocated ${allocatedBytes}`);
  // The heap breathes, and a software adapter's memory becomes resident when it is first written.
  assert.ok(growth(residentBytes) < 64 * 2 ** 20, `resident ${residentBytes}`);
}
