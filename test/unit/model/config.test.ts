/** config.json in its three spellings, and every fault named by its field. */
import assert from 'node:assert/strict';
import { mkdirSync, mkdtempSync, rmSync, truncateSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { describe, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { ConfigError, loadModelConfig, parseModelConfig, type ModelConfig } from '../../../model/config.ts';

type Json = Record<string, unknown>;

/** The published config.json, shortened to 4 layers. */
const checkpoint: Json = {
  architectures: ['DeepseekV4ForCausalLM'],
  model_type: 'deepseek_v4',
  vocab_size: 129280,
  hidden_size: 4096,
  num_hidden_layers: 4,
  num_attention_heads: 64,
  num_key_value_heads: 1,
  head_dim: 512,
  qk_rope_head_dim: 64,
  q_lora_rank: 1024,
  o_lora_rank: 1024,
  o_groups: 8,
  sliding_window: 128,
  compress_ratios: [0, 0, 4, 128, 0],
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
  quantization_config: { quant_method: 'fp8', weight_block_size: [128, 128] },
  expert_dtype: 'fp4',
};

const expected: ModelConfig = {
  vocabSize: 129280,
  hiddenSize: 4096,
  layers: [
    { ratio: 0, hash: true },
    { ratio: 0, hash: true },
    { ratio: 4, hash: true },
    { ratio: 128, hash: false },
  ],
  heads: 64,
  headDim: 512,
  ropeDim: 64,
  queryRank: 1024,
  outputRank: 1024,
  outputGroups: 8,
  experts: 256,
  expertsPerToken: 6,
  expertHiddenSize: 2048,
  routeScale: 1.5,
  swigluLimit: 10,
  windowTokens: 128,
  streams: 4,
  sinkhornIterations: 20,
  hcEps: 1e-6,
  normEps: 1e-6,
  indexHeads: 64,
  indexHeadDim: 128,
  indexTopK: 512,
  maxPositions: 1048576,
  ropeTheta: 10000,
  compressRopeTheta: 160000,
  yarn: { factor: 16, originalMaxPositions: 65536, betaFast: 32, betaSlow: 1 },
  mtpBlocks: 1,
  bosTokenId: 0,
  eosTokenId: 1,
  pageTokens: 128,
  mode: 'hp',
  indexPrecision: 'f32',
};

const without = (json: Json, ...names: string[]): Json =>
  Object.fromEntries(Object.entries(json).filter(([name]) => !names.includes(name)));

describe('a config', () => {
  test('is read as the checkpoint spells it', () => {
    assert.deepEqual(parseModelConfig(checkpoint), expected);
  });

  test('is read as the official inference code spells it', () => {
    const official = {
      vocab_size: 129280,
      dim: 4096,
      n_layers: 4,
      n_heads: 64,
      head_dim: 512,
      rope_head_dim: 64,
      q_lora_rank: 1024,
      o_lora_rank: 1024,
      o_groups: 8,
      window_size: 128,
      compress_ratios: [0, 0, 4, 128, 0],
      compress_rope_theta: 160000,
      rope_theta: 10000,
      rope_factor: 16,
      original_seq_len: 65536,
      beta_fast: 32,
      beta_slow: 1,
      max_seq_len: 1048576,
      index_n_heads: 64,
      index_head_dim: 128,
      index_topk: 512,
      hc_mult: 4,
      hc_sinkhorn_iters: 20,
      hc_eps: 1e-6,
      n_routed_experts: 256,
      n_activated_experts: 6,
      n_shared_experts: 1,
      moe_inter_dim: 2048,
      n_hash_layers: 3,
      score_func: 'sqrtsoftplus',
      route_scale: 1.5,
      swiglu_limit: 10,
      n_mtp_layers: 1,
      norm_eps: 1e-6,
    };
    assert.deepEqual(parseModelConfig(official), expected);
    assert.equal(parseModelConfig({ ...official, original_seq_len: 0 }).yarn, null);
  });

  test('is read as transformers saves it', () => {
    const saved = {
      ...without(
        checkpoint,
        'compress_ratios',
        'compress_rope_theta',
        'rope_theta',
        'rope_scaling',
        'num_hash_layers',
        'qk_rope_head_dim',
      ),
      layer_types: [
        'sliding_attention',
        'sliding_attention',
        'compressed_sparse_attention',
        'heavily_compressed_attention',
      ],
      mlp_layer_types: ['hash_moe', 'hash_moe', 'hash_moe', 'moe'],
      compress_rates: { compressed_sparse_attention: 4, heavily_compressed_attention: 128 },
      partial_rotary_factor: 0.125,
      rope_parameters: {
        main: { rope_type: 'default', rope_theta: 10000, partial_rotary_factor: 0.125 },
        compress: {
          rope_type: 'yarn',
          factor: 16,
          original_max_position_embeddings: 65536,
          beta_fast: 32,
          beta_slow: 1,
          rope_theta: 160000,
          attention_factor: 1,
        },
      },
    };
    assert.deepEqual(parseModelConfig(saved), expected);
    const shorter = parseModelConfig({ ...saved, compress_rates: { heavily_compressed_attention: 16 } });
    assert.deepEqual(
      shorter.layers.map(({ ratio }) => ratio),
      [0, 0, 4, 16],
    );
  });

  test('of the embedded model is sound', () => {
    const nano = loadModelConfig(fileURLToPath(new URL('../../../model/nano', import.meta.url)));
    assert.deepEqual(
      nano.layers.map(({ ratio }) => ratio),
      [0, 4, 128, 4],
    );
  });

  test('has pages that every ratio divides', () => {
    const { pageTokens } = parseModelConfig({ ...checkpoint, compress_ratios: [0, 4, 48, 128] });
    assert.equal(pageTokens, 384);
  });

  test('has as many positions as a deployment wants, or as many as it was trained for', () => {
    const nano = fileURLToPath(new URL('../../../model/nano', import.meta.url));
    assert.equal(loadModelConfig(nano).maxPositions, 4096);
    for (const contextTokens of [1024, 131_072]) {
      assert.equal(loadModelConfig(nano, { contextTokens }).maxPositions, contextTokens);
    }
  });

  test('takes larger pages that every ratio divides, and no others', () => {
    const nano = fileURLToPath(new URL('../../../model/nano', import.meta.url));
    assert.equal(loadModelConfig(nano, { pageTokens: 256 }).pageTokens, 256);
    for (const pageTokens of [0, 64, 192]) {
      assert.throws(() => loadModelConfig(nano, { pageTokens }), /multiple of 128 tokens/, String(pageTokens));
    }
  });
});

describe('a fault names its field', () => {
  const faults: [name: string, change: Json, field: string][] = [
    ['a size that is no number', { hidden_size: '4096' }, 'hidden_size'],
    ['a size that is not whole', { head_dim: 512.5 }, 'head_dim'],
    ['a size of zero', { vocab_size: 0 }, 'vocab_size'],
    ['a negative size', { index_topk: -1 }, 'index_topk'],
    ['a size past exact integers', { q_lora_rank: 2 ** 60 }, 'q_lora_rank'],
    [
      'a theta that is not finite',
      { rope_theta: null, rope_parameters: { main: { rope_theta: 'x' } } },
      'rope_parameters.main.rope_theta',
    ],
    ['another architecture', { model_type: 'llama' }, 'model_type'],
    ['another activation', { hidden_act: 'gelu' }, 'hidden_act'],
    ['another routing score', { scoring_func: 'softmax' }, 'scoring_func'],
    ['tied embeddings', { tie_word_embeddings: true }, 'tie_word_embeddings'],
    ['two shared experts', { n_shared_experts: 2 }, 'n_shared_experts'],
    ['two draft blocks', { num_nextn_predict_layers: 2 }, 'num_nextn_predict_layers'],
    ['too few ratios', { compress_ratios: [0, 4] }, 'compress_ratios'],
    ['a ratio of one', { compress_ratios: [0, 1, 4, 128] }, 'compress_ratios[1]'],
    ['a ratio that fits no page', { compress_ratios: [0, 4, 127, 4] }, 'compress_ratios[2]'],
    ['an unknown layer type', { compress_ratios: null, layer_types: ['a', 'b', 'c', 'd'] }, 'layer_types[0]'],
    [
      'layer types that contradict the ratios',
      { layer_types: Array.from({ length: 4 }, () => 'sliding_attention') },
      'layer_types[2]',
    ],
    ['an unknown expert type', { mlp_layer_types: ['moe', 'moe', 'dense', 'moe'] }, 'mlp_layer_types[2]'],
    ['an unknown position correction', { rope_scaling: { type: 'linear', factor: 2 } }, 'rope_scaling.type'],
    [
      'an amplitude factor',
      { rope_scaling: { ...(checkpoint['rope_scaling'] as Json), mscale: 1 } },
      'rope_scaling.mscale',
    ],
    ['a correction without its factor', { rope_scaling: { type: 'yarn' } }, 'rope_scaling.factor'],
    ['an odd rotated part', { qk_rope_head_dim: 63 }, 'qk_rope_head_dim'],
    ['groups that do not divide the heads', { o_groups: 7 }, 'o_groups'],
    ['more chosen experts than there are', { num_experts_per_tok: 300 }, 'num_experts_per_tok'],
    ['index heads without a Hadamard transform', { index_head_dim: 96 }, 'index_head_dim'],
    ['an end token past the vocabulary', { eos_token_id: 129280 }, 'eos_token_id'],
    ['two end tokens', { eos_token_id: [1, 2] }, 'eos_token_id'],
    ['no clamp', { swiglu_limit: 0 }, 'swiglu_limit'],
    ['layers without end', { num_hidden_layers: 2000, compress_ratios: Array(2000).fill(0) }, 'num_hidden_layers'],
    ['positions without end', { max_position_embeddings: 2 ** 40 }, 'max_position_embeddings'],
    ['a window without end', { sliding_window: 2 ** 40 }, 'sliding_window'],
    ['a selection without end', { index_topk: 2 ** 40 }, 'index_topk'],
    ['iterations without end', { hc_sinkhorn_iters: 2 ** 40 }, 'hc_sinkhorn_iters'],
  ];
  for (const [name, change, field] of faults) {
    test(name, () => {
      assert.throws(
        () => parseModelConfig({ ...checkpoint, ...change }),
        (error) => {
          assert.ok(error instanceof ConfigError, String(error));
          assert.equal(error.field, field, error.message);
          return true;
        },
      );
    });
  }

  test('every field without a default is missed', () => {
    const optional = [
      'architectures',
      'model_type',
      'num_key_value_heads',
      'n_shared_experts',
      'scoring_func',
      'topk_method',
    ];
    optional.push('norm_topk_prob', 'hidden_act', 'num_nextn_predict_layers', 'tie_word_embeddings', 'attention_bias');
    optional.push('bos_token_id', 'eos_token_id', 'quantization_config', 'expert_dtype', 'rope_scaling');
    for (const field of Object.keys(checkpoint).filter((name) => !optional.includes(name))) {
      assert.throws(
        () => parseModelConfig(without(checkpoint, field)),
        (error) => {
          assert.ok(error instanceof ConfigError && error.field === field, `${field}: ${String(error)}`);
          return true;
        },
      );
    }
    for (const field of optional) parseModelConfig(without(checkpoint, field));
  });

  test('what is no object, no JSON or no file', () => {
    for (const json of [null, [], 'config', 7]) assert.throws(() => parseModelConfig(json), ConfigError);
    assert.throws(() => loadModelConfig('/no/such/directory'), /config\.json: \(file\): cannot be read/);
    const directory = mkdtempSync(join(tmpdir(), 'handoff-config-'));
    const path = join(directory, 'config.json');
    try {
      mkdirSync(path);
      assert.throws(() => loadModelConfig(directory), /it is not a regular file/);
      rmSync(path, { recursive: true });
      writeFileSync(path, '{}');
      truncateSync(path, 2 ** 40); // a sparse file: it takes no space
      assert.throws(() => loadModelConfig(directory), /it has 1099511627776 bytes, at most 16777216 are allowed/);
    } finally {
      rmSync(directory, { recursive: true });
    }
  });
});
