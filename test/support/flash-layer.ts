/**
 * One layer of DeepSeek-V4-Flash at full width, of the official release's formats: every weight at its real size, made
 * when it is read. A tensor's bytes are a window of 16 MiB of mixed numbers that begins where its name says, turned into
 * codes whose values have a useful size. test/reference/flash_layers.py makes the same numbers.
 */
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { segmentsOf } from '../../kernels/tensor.ts';
import { parseModelConfig, type ModelConfig } from '../../model/config.ts';
import { createKvCache } from '../../model/kv-cache.ts';
import type { StoredTensor, TensorSource } from '../../model/safetensors.ts';
import { createModel, forwardLogits } from '../../model/transformer.ts';
import { argmax, readGolden } from './golden.ts';
import { openTestDevice } from './gpu.ts';
import { FLASH_CONFIG, releaseHeaders } from './headers.ts';

/** Made by test/reference/flash_layers.py. */
interface LayerGolden {
  readonly tokens: number;
  readonly positions: readonly number[];
  /** Every so many-th logit is listed. */
  readonly stride: number;
  readonly index_topk: number;
  readonly kinds: Record<
    string,
    {
      readonly ratio: number;
      readonly hash: boolean;
      readonly argmax: readonly number[];
      readonly margin: readonly number[];
      readonly logits: readonly (readonly number[])[];
    }
  >;
}

// Ten times what an f32 engine is away from f64 here; a wrong segment, expert or entry moves logits by tenths.
const TOLERANCE = 2e-5;

/**
 * Define the test of one kind of layer, a key of `kinds` in the golden file: 300 tokens against the f64 reference. One kind
 * a file, and so a process: an adapter may keep a closed device's 6 GiB until garbage is collected.
 */
export function testFlashLayer(kind: string): void {
  test(`a layer of full width, ${kind}, agrees with the reference`, async (t) => {
    const golden = readGolden<LayerGolden>(new URL('../data/golden/flash-layers.json', import.meta.url));
    const expected = golden.kinds[kind]!;
    const { ratio, hash } = expected;
    const config = flashLayerConfig({ ratio, hash, indexTopK: golden.index_topk });
    const device = await openTestDevice();
    const startMs = performance.now();
    const size = { maxRows: golden.tokens, maxSequences: 1, maxPositions: 384 };
    const model = await createModel(device, config, flashLayerSource(config), size);
    const loadedMs = performance.now();
    const cache = createKvCache(device, config, { pageCount: 3, slotCount: 1 });
    const logits = await forwardLogits(model, cache, {
      phase: 'prefill',
      sequences: [{ slot: 0, pages: [2, 0, 1], start: 0, tokens: flashTokens(golden.tokens), sampling: null }],
      positions: golden.positions,
    });
    const doneMs = performance.now();
    assert.equal(logits.length, golden.positions.length);
    let worst = 0;
    for (const [index, row] of logits.entries()) {
      for (const [listed, value] of expected.logits[index]!.entries()) {
        worst = Math.max(worst, Math.abs(row[listed * golden.stride]! - value));
      }
      if (expected.margin[index]! > 2 * TOLERANCE) assert.equal(argmax(row), expected.argmax[index]);
    }
    const { embedding, layers } = model.weights;
    const [embeddings, experts] = [embedding.weight, layers[0]!.moe.gateUp.weight].map((one) => segmentsOf(one).length);
    const seconds = (fromMs: number, toMs: number): string => `${((toMs - fromMs) / 1e3).toFixed(1)} s`;
    t.diagnostic(
      `largest difference ${worst}; embedding in ${embeddings} segments, experts in ${experts}; ` +
        `loaded in ${seconds(startMs, loadedMs)}, ran in ${seconds(loadedMs, doneMs)}; ` +
        `${(device.allocatedBytes / 2 ** 30).toFixed(1)} GiB on the device, ` +
        `${(process.resourceUsage().maxRSS / 2 ** 20).toFixed(1)} GiB resident at most`,
    );
    assert.ok(worst < TOLERANCE, `largest difference ${worst}`);
  });
}

// The config of a model that has nothing but one layer.
function flashLayerConfig(layer: { ratio: number; hash: boolean; indexTopK: number }): ModelConfig {
  return parseModelConfig({
    ...FLASH_CONFIG,
    num_hidden_layers: 1,
    compress_ratios: [layer.ratio],
    num_hash_layers: layer.hash ? 1 : 0,
    num_nextn_predict_layers: 0,
    index_topk: layer.indexTopK,
  });
}

// The tokens that the golden logits are of.
function flashTokens(count: number): number[] {
  return Array.from({ length: count }, (_, index) => (index * index * 31 + index * 17 + 5) % 129280);
}

// The generated weights of such a config.
function flashLayerSource(config: ModelConfig): TensorSource {
  const pool = createPool();
  const tensors = new Map<string, StoredTensor>();
  for (const { name, dtype, shape, byteLength } of releaseHeaders(config, 'mxfp4')) {
    tensors.set(name, { name, dtype, shape, start: 0, end: byteLength, file: 'generated' });
  }
  return {
    tensors,
    files: [],
    read(tensor, offset, target) {
      fill(pool, config, tensor, offset, target);
      return Promise.resolve();
    },
    close: () => Promise.resolve(),
  };
}

// No multiple of a row, so that no two rows of a table are alike.
const POOL_BYTES = 2 ** 24 - 8;

function createPool(): Uint8Array {
  const words = new Uint32Array(POOL_BYTES / 4);
  for (let index = 0; index < words.length; index++) {
    let mixed = Math.imul(index, 0x9e3779b1);
    mixed = Math.imul(mixed ^ (mixed >>> 16), 0x85ebca6b);
    mixed = Math.imul(mixed ^ (mixed >>> 13), 0xc2b2ae35);
    words[index] = mixed ^ (mixed >>> 16);
  }
  return new Uint8Array(words.buffer);
}

// FNV-1a.
function hashName(name: string): number {
  let hash = 2166136261;
  for (const byte of Buffer.from(name)) hash = Math.imul(hash ^ byte, 16777619);
  return hash >>> 0;
}

function fill(pool: Uint8Array, config: ModelConfig, tensor: StoredTensor, offset: number, target: Uint8Array): void {
  const { name, dtype } = tensor;
  if (dtype === 'I64') {
    fillTable(config, offset, target);
    return;
  }
  let from = (((hashName(name) % POOL_BYTES) & ~7) + offset) % POOL_BYTES;
  for (let done = 0; done < target.byteLength; from = 0) {
    const piece = pool.subarray(from, Math.min(POOL_BYTES, from + target.byteLength - done));
    target.set(piece, done);
    done += piece.byteLength;
  }
  const { buffer, byteOffset, byteLength } = target;
  if (dtype === 'F8_E4M3') mapInPlace(target, (byte) => (byte & 0x80) | (0x28 + (byte & 0x1f)));
  else if (dtype === 'F8_E8M0' && name.includes('.experts.')) {
    mapInPlace(target, (byte) => 118 + (byte & 1) + ((byte >> 1) & 1));
  } else if (dtype === 'F8_E8M0') mapInPlace(target, (byte) => 119 + (byte & 1));
  else if (dtype === 'BF16') fillBf16(name, new Uint16Array(buffer, byteOffset, byteLength / 2));
  else if (dtype === 'F32') fillF32(name, new Uint32Array(buffer, byteOffset, byteLength / 4));
  // Packed FP4 takes any byte.
}

function mapInPlace(bytes: Uint8Array, map: (byte: number) => number): void {
  const codes = Uint8Array.from({ length: 256 }, (_, byte) => map(byte));
  for (let index = 0; index < bytes.length; index++) bytes[index] = codes[bytes[index]!]!;
}

// Norm weights in [0.5, 1), embeddings of magnitude 1/16 to 1, other matrices 1/1024 to 1/64.
function fillBf16(name: string, words: Uint16Array): void {
  const isNorm = name.includes('norm');
  const exponent = name === 'embed.weight' ? 0x7b : 0x75;
  for (let index = 0; index < words.length; index++) {
    const word = words[index]!;
    words[index] = isNorm
      ? 0x3f00 | (word & 0x7f)
      : (word & 0x8000) | ((exponent + ((word >> 7) & 3)) << 7) | (word & 0x7f);
  }
}

function fillF32(name: string, words: Uint32Array): void {
  const [scale, centre] = name.endsWith('_scale')
    ? [0.5, 1]
    : name.endsWith('_fn')
      ? [0.05, 0]
      : /(ape|attn_sink)$/.test(name)
        ? [2, 0]
        : name.endsWith('gate.bias')
          ? [0.2, 0]
          : [1, 0];
  const values = new Float32Array(words.buffer, words.byteOffset, words.length);
  for (let index = 0; index < words.length; index++) values[index] = centre + scale * (words[index]! / 2 ** 32 - 0.5);
}

function fillTable(config: ModelConfig, offset: number, target: Uint8Array): void {
  const ids = new BigInt64Array(target.buffer, target.byteOffset, target.byteLength / 8);
  for (let index = 0; index < ids.length; index++) {
    const entry = offset / 8 + index;
    const token = Math.floor(entry / config.expertsPerToken);
    ids[index] = BigInt((7 * token + 3 * (entry % config.expertsPerToken)) % config.experts);
  }
}
