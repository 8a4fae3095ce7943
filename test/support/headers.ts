/**
 * Checkpoints without weights: the headers of any geometry in the published formats, for tests of what is decided before
 * a tensor is read. 160 GB of DeepSeek-V4-Flash are 46 files of a few hundred kB each, or of full size and sparse.
 */
import { closeSync, ftruncateSync, mkdirSync, openSync, writeFileSync, writeSync } from 'node:fs';
import { join } from 'node:path';
import type { ModelConfig } from '../../model/config.ts';
import type { StoredDtype } from '../../model/safetensors.ts';
import { officialShapes } from './checkpoints.ts';

/** config.json of DeepSeek-V4-Flash: section 1.1 of the model description. */
export const FLASH_CONFIG: Readonly<Record<string, unknown>> = {
  architectures: ['DeepseekV4ForCausalLM'],
  model_type: 'deepseek_v4',
  vocab_size: 129280,
  hidden_size: 4096,
  num_hidden_layers: 43,
  num_attention_heads: 64,
  num_key_value_heads: 1,
  head_dim: 512,
  qk_rope_head_dim: 64,
  q_lora_rank: 1024,
  o_lora_rank: 1024,
  o_groups: 8,
  sliding_window: 128,
  compress_ratios: [0, 0, ...Array.from({ length: 41 }, (_, index) => (index % 2 === 0 ? 4 : 128)), 0],
  compress_rope_theta: 160000,
  rope_theta: 10000,
  rope_scaling: { type: 'yarn', factor: 16, original_max_position_embeddings: 65536, beta_fast: 32, beta_slow: 1 },
  max_position_embeddings: 1048576,
  index_n_heads: 64,
  index_head_dim: 128,
  index_topk: 512,
  hc_mult: 4,
  hc_sinkhorn_iters: 20,
  hc_eps: 1e-6,
  n_routed_experts: 256,
  num_experts_per_tok: 6,
  n_shared_experts: 1,
  moe_intermediate_size: 2048,
  num_hash_layers: 3,
  scoring_func: 'sqrtsoftplus',
  topk_method: 'noaux_tc',
  norm_topk_prob: true,
  routed_scaling_factor: 1.5,
  swiglu_limit: 10,
  hidden_act: 'silu',
  num_nextn_predict_layers: 1,
  rms_norm_eps: 1e-6,
  tie_word_embeddings: false,
  attention_bias: false,
  bos_token_id: 0,
  eos_token_id: 1,
};

/** Shards of the published checkpoint. */
export const FLASH_SHARDS = 46;

/** Routed experts as one of the releases has them; the rest of a release follows from that. */
export type Release = 'mxfp4' | 'nvfp4' | 'fp8' | 'fp8-f32-scales' | 'bf16';

/** A tensor as a header tells it. */
export interface HeaderEntry {
  readonly name: string;
  readonly dtype: StoredDtype;
  readonly shape: readonly number[];
  readonly byteLength: number;
}

const BYTES: Partial<Record<StoredDtype, number>> = { I8: 1, U8: 1, F8_E4M3: 1, F8_E8M0: 1, BF16: 2, F32: 4, I64: 8 };

/** Every tensor of a release, its draft block included: sections 2.1 and 2.3 of the model description. */
export function releaseHeaders(config: ModelConfig, release: Release): HeaderEntry[] {
  const entries: HeaderEntry[] = [];
  const put = (name: string, dtype: StoredDtype, ...shape: number[]): unknown =>
    entries.push({
      name,
      dtype,
      shape,
      byteLength: shape.reduce((product, size) => product * size, BYTES[dtype]!),
    });
  for (const [name, shape] of officialShapes(config, { mtp: config.mtpBlocks > 0 })) {
    const base = name.replace(/\.weight$/, '');
    const [rows = 0, columns = 0] = shape;
    const expert = /\.experts\.\d+\./.test(name);
    // The NVFP4 release leaves the draft block's experts as they were.
    const kind = expert && release === 'nvfp4' && name.startsWith('mtp.') ? 'mxfp4' : release;
    const fp8 = (scale: StoredDtype): void => {
      put(name, 'F8_E4M3', rows, columns);
      put(`${base}.scale`, scale, Math.ceil(rows / 128), Math.ceil(columns / 128));
    };
    if (name.endsWith('.tid2eid')) put(name, 'I64', ...shape);
    else if (/(_fn|_base|_scale|\.ape|\.attn_sink|gate\.bias)$/.test(name)) put(name, 'F32', ...shape);
    else if (expert && kind === 'mxfp4') {
      put(name, 'I8', rows, columns / 2);
      put(`${base}.scale`, 'F8_E8M0', rows, columns / 32);
    } else if (expert && kind === 'nvfp4') {
      put(name, 'U8', rows, columns / 2);
      put(`${base}.weight_scale`, 'F8_E4M3', rows, columns / 16);
      put(`${base}.weight_scale_2`, 'F32');
      put(`${base}.input_scale`, 'F32');
    } else if (release !== 'bf16' && (expert || isLinear(name))) {
      fp8(expert && release === 'fp8-f32-scales' ? 'F32' : 'F8_E8M0');
    } else put(name, 'BF16', ...shape);
  }
  return entries;
}

// The linears that a release quantises, the routed experts apart.
function isLinear(name: string): boolean {
  if (/\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|indexer\.wq_b)\.weight$/.test(name)) return true;
  return /\.(shared_experts\.w[123]|e_proj|h_proj)\.weight$/.test(name);
}

/**
 * Write config.json, the index and the shards, each entry in the shard that its place in the list gives.
 *
 * data  `none`: files end after their header; `sparse`: they have their full size, and zeros that take no space
 */
export function writeHeaders(
  directory: string,
  configJson: unknown,
  entries: readonly HeaderEntry[],
  options: { shards: number; data: 'none' | 'sparse' },
): void {
  const { shards, data } = options;
  mkdirSync(directory, { recursive: true });
  writeFileSync(join(directory, 'config.json'), JSON.stringify(configJson));
  const weightMap: Record<string, string> = {};
  const total = entries.reduce((sum, { byteLength }) => sum + byteLength, 0);
  let written = 0;
  let next = 0;
  for (let shard = 1; shard <= shards; shard++) {
    const file = `model-${String(shard).padStart(5, '0')}-of-${String(shards).padStart(5, '0')}.safetensors`;
    const header: Record<string, unknown> = { __metadata__: { format: 'pt' } };
    let offset = 0;
    while (next < entries.length && (written < (total / shards) * shard || shard === shards)) {
      const { name, dtype, shape, byteLength } = entries[next++]!;
      header[name] = { dtype, shape, data_offsets: [offset, offset + byteLength] };
      weightMap[name] = file;
      offset += byteLength;
      written += byteLength;
    }
    const json = Buffer.from(JSON.stringify(header));
    const length = Buffer.alloc(8);
    length.writeBigUInt64LE(BigInt(json.byteLength));
    const handle = openSync(join(directory, file), 'w');
    writeSync(handle, Buffer.concat([length, json]));
    if (data === 'sparse') ftruncateSync(handle, 8 + json.byteLength + offset);
    closeSync(handle);
  }
  writeFileSync(
    join(directory, 'model.safetensors.index.json'),
    JSON.stringify({ metadata: { total_size: total }, weight_map: weightMap }),
  );
}
