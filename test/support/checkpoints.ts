/**
 * Checkpoints for tests: weights generated from their names, stored in any of the formats, and read back as plain numbers
 * for the reference. Shares no code with model/weights.ts, which is what the tests examine.
 */
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { decodeBf16, decodeE2m1, decodeE4m3, decodeE8m0, encodeBf16 } from '../../kernels/dtype.ts';
import type { ModelConfig } from '../../model/config.ts';
import type { StoredDtype, TensorSource } from '../../model/safetensors.ts';
import type { ReferenceTensor } from '../reference/model.ts';

/** A tensor as a checkpoint stores it. */
export interface StoredEntry {
  readonly name: string;
  readonly dtype: StoredDtype;
  readonly shape: readonly number[];
  readonly bytes: Uint8Array;
}

/** What the matrices are stored as. Vectors are always f32; embedding, head, compressors and gates as `plain`. */
export interface StorageFormats {
  readonly plain: 'F32' | 'BF16' | 'F16';
  readonly linears: 'plain' | 'fp8' | 'fp8-f32-scales';
  readonly experts: 'plain' | 'fp8' | 'fp8-f32-scales' | 'mxfp4' | 'nvfp4';
}

/** A generated checkpoint, and the numbers that its bytes mean. */
export interface GeneratedCheckpoint {
  readonly entries: StoredEntry[];
  readonly weights: Map<string, ReferenceTensor>;
}

/** Names and shapes of the official inventory, in its order. */
export function officialShapes(config: ModelConfig, options: { mtp?: boolean } = {}): Map<string, number[]> {
  const { hiddenSize: D, headDim: d, queryRank: q, outputRank: o, outputGroups: G, heads: H } = config;
  const { expertHiddenSize: I, experts: E, vocabSize: V, streams: n, indexHeads: ih, indexHeadDim: id } = config;
  const shapes = new Map<string, number[]>();
  const put = (name: string, ...shape: number[]): unknown => shapes.set(name, shape);
  put('embed.weight', V, D);
  put('head.weight', V, D);
  put('norm.weight', D);
  const putHead = (p: string): void => {
    put(`${p}hc_head_fn`, n, n * D);
    put(`${p}hc_head_base`, n);
    put(`${p}hc_head_scale`, 1);
  };
  const putCompressor = (p: string, ratio: number, dim: number): void => {
    const width = ratio === 4 ? 2 * dim : dim;
    put(`${p}ape`, ratio, width);
    put(`${p}wkv.weight`, width, D);
    put(`${p}wgate.weight`, width, D);
    put(`${p}norm.weight`, dim);
  };
  const putLayer = (p: string, ratio: number, hash: boolean): void => {
    put(`${p}attn_norm.weight`, D);
    put(`${p}ffn_norm.weight`, D);
    for (const site of ['attn', 'ffn']) {
      put(`${p}hc_${site}_fn`, (2 + n) * n, n * D);
      put(`${p}hc_${site}_base`, (2 + n) * n);
      put(`${p}hc_${site}_scale`, 3);
    }
    put(`${p}attn.wq_a.weight`, q, D);
    put(`${p}attn.q_norm.weight`, q);
    put(`${p}attn.wq_b.weight`, H * d, q);
    put(`${p}attn.wkv.weight`, d, D);
    put(`${p}attn.kv_norm.weight`, d);
    put(`${p}attn.attn_sink`, H);
    put(`${p}attn.wo_a.weight`, G * o, (H * d) / G);
    put(`${p}attn.wo_b.weight`, D, G * o);
    if (ratio > 0) putCompressor(`${p}attn.compressor.`, ratio, d);
    if (ratio === 4) {
      put(`${p}attn.indexer.wq_b.weight`, ih * id, q);
      put(`${p}attn.indexer.weights_proj.weight`, ih, D);
      putCompressor(`${p}attn.indexer.compressor.`, ratio, id);
    }
    put(`${p}ffn.gate.weight`, E, D);
    if (hash) put(`${p}ffn.gate.tid2eid`, V, config.expertsPerToken);
    else put(`${p}ffn.gate.bias`, E);
    for (const expert of [...Array.from({ length: E }, (_, index) => `experts.${index}`), 'shared_experts']) {
      put(`${p}ffn.${expert}.w1.weight`, I, D);
      put(`${p}ffn.${expert}.w3.weight`, I, D);
      put(`${p}ffn.${expert}.w2.weight`, D, I);
    }
  };
  putHead('');
  for (const [index, { ratio, hash }] of config.layers.entries()) putLayer(`layers.${index}.`, ratio, hash);
  if (options.mtp) {
    put('mtp.0.e_proj.weight', D, D);
    put('mtp.0.h_proj.weight', D, D);
    put('mtp.0.enorm.weight', D);
    put('mtp.0.hnorm.weight', D);
    put('mtp.0.norm.weight', D);
    putHead('mtp.0.');
    putLayer('mtp.0.', 0, false);
  }
  return shapes;
}

/** Values that a tensor gets from its name: section 9.3 of the model description. */
export function generatedValues(name: string, shape: readonly number[]): Float32Array {
  let seed = 2166136261;
  for (const byte of new TextEncoder().encode(name)) seed = Math.imul(seed ^ byte, 16777619) >>> 0;
  const count = shape.reduce((product, size) => product * size, 1);
  const [scale, offset] = generatedRange(name, shape.at(-1) ?? 1);
  return Float32Array.from({ length: count }, (_, index) => {
    let v = (seed + Math.imul(index, 0x9e3779b1)) >>> 0;
    v = Math.imul(v ^ (v >>> 16), 0x85ebca6b);
    v = Math.imul(v ^ (v >>> 13), 0xc2b2ae35);
    v = (v ^ (v >>> 16)) >>> 0;
    return offset + scale * (v / 2 ** 32 - 0.5);
  });
}

function generatedRange(name: string, lastSize: number): [scale: number, offset: number] {
  if (name.includes('norm') || name.endsWith('_scale')) return [0.5, 1];
  if (name.endsWith('_base') || name.endsWith('gate.bias')) return [1, 0];
  if (name.endsWith('_fn')) return [0.4, 0];
  if (name.endsWith('ape') || name.endsWith('attn_sink') || name.endsWith('embed.weight')) return [2, 0];
  return [4 / Math.sqrt(lastSize), 0];
}

/** Generate every tensor of the config and store it in the given formats, all alike or each by its name. */
export function generateCheckpoint(
  config: ModelConfig,
  formats: StorageFormats | ((name: string) => StorageFormats),
  options: { mtp?: boolean } = {},
): GeneratedCheckpoint {
  const entries: StoredEntry[] = [];
  const weights = new Map<string, ReferenceTensor>();
  for (const [name, shape] of officialShapes(config, options)) {
    const stored = name.endsWith('tid2eid')
      ? storeTable(config, name, shape)
      : storeMatrix(
          name,
          shape,
          generatedValues(name, shape),
          formatOf(name, shape, typeof formats === 'function' ? formats(name) : formats),
        );
    entries.push(...stored.entries);
    weights.set(name, { shape, values: stored.values });
  }
  return { entries, weights };
}

type MatrixStorage = 'F32' | 'BF16' | 'F16' | 'fp8' | 'fp8-f32-scales' | 'mxfp4' | 'nvfp4';

function formatOf(name: string, shape: readonly number[], formats: StorageFormats): MatrixStorage {
  if (shape.length < 2 || name.endsWith('ape') || name.endsWith('_fn')) return 'F32';
  const { plain, linears, experts } = formats;
  if (/\.experts\.\d+\./.test(name)) return experts === 'plain' ? plain : experts;
  const linear =
    /\.(wq_a|wq_b|wkv|wo_a|wo_b|w1|w2|w3|e_proj|h_proj)\.weight$/.test(name) && !name.includes('compressor');
  return linear && linears !== 'plain' ? linears : plain;
}

function storeTable(config: ModelConfig, name: string, shape: number[]): { entries: StoredEntry[]; values: number[] } {
  const [tokens, perToken] = shape as [number, number];
  const values: number[] = [];
  for (let token = 0; token < tokens; token++) {
    for (let choice = 0; choice < perToken; choice++) values.push((7 * token + 3 * choice) % config.experts);
  }
  const bytes = bytesOf(BigInt64Array.from(values, BigInt));
  return { entries: [{ name, dtype: 'I64', shape, bytes }], values };
}

function storeMatrix(
  name: string,
  shape: readonly number[],
  values: Float32Array,
  format: MatrixStorage,
): { entries: StoredEntry[]; values: Float32Array } {
  const base = name.replace(/\.weight$/, '');
  switch (format) {
    case 'F32':
      return { entries: [{ name, dtype: 'F32', shape, bytes: bytesOf(values) }], values };
    case 'BF16': {
      const bits = Uint16Array.from(values, encodeBf16);
      return {
        entries: [{ name, dtype: 'BF16', shape, bytes: bytesOf(bits) }],
        values: Float32Array.from(bits, decodeBf16),
      };
    }
    case 'F16': {
      const bits = Uint16Array.from(values, encodeF16);
      return {
        entries: [{ name, dtype: 'F16', shape, bytes: bytesOf(bits) }],
        values: Float32Array.from(bits, decodeF16),
      };
    }
    case 'fp8':
    case 'fp8-f32-scales':
      return storeFp8(base, shape as [number, number], values, format === 'fp8');
    case 'mxfp4':
      return storeMxfp4(base, shape as [number, number], values);
    case 'nvfp4':
      return storeNvfp4(base, shape as [number, number], values);
  }
}

type Stored = { entries: StoredEntry[]; values: Float32Array };

function storeFp8(base: string, shape: [number, number], values: Float32Array, exponents: boolean): Stored {
  const [rows, columns] = shape;
  const grid = [Math.ceil(rows / 128), Math.ceil(columns / 128)] as const;
  const block = (index: number): number =>
    Math.floor(Math.floor(index / columns) / 128) * grid[1] + Math.floor((index % columns) / 128);
  const largest = new Float32Array(grid[0] * grid[1]);
  for (const [index, value] of values.entries())
    largest[block(index)] = Math.max(largest[block(index)]!, Math.abs(value));
  // f32 scales need not be powers of two.
  const scales = largest.map((value) => (exponents ? 2 ** Math.ceil(Math.log2(value / 448)) : value / 448));
  const bytes = Uint8Array.from(values, (value, index) => encodeE4m3(value / scales[block(index)]!));
  const scaleEntry: StoredEntry = exponents
    ? {
        name: `${base}.scale`,
        dtype: 'F8_E8M0',
        shape: grid,
        bytes: Uint8Array.from(scales, (scale) => Math.log2(scale) + 127),
      }
    : { name: `${base}.scale`, dtype: 'F32', shape: grid, bytes: bytesOf(scales) };
  return {
    entries: [{ name: `${base}.weight`, dtype: 'F8_E4M3', shape, bytes }, scaleEntry],
    values: Float32Array.from(bytes, (byte, index) => decodeE4m3(byte) * scales[block(index)]!),
  };
}

function storeMxfp4(base: string, shape: [number, number], values: Float32Array): Stored {
  const [rows, columns] = shape;
  const scales = blockMaxima(values, 32).map((value) => 2 ** Math.ceil(Math.log2(Math.max(value, 2 ** -120) / 6)));
  const nibbles = Uint8Array.from(values, (value, index) => encodeE2m1(value / scales[Math.floor(index / 32)]!));
  return {
    entries: [
      { name: `${base}.weight`, dtype: 'I8', shape: [rows, columns / 2], bytes: packNibbles(nibbles) },
      {
        name: `${base}.scale`,
        dtype: 'F8_E8M0',
        shape: [rows, columns / 32],
        bytes: Uint8Array.from(scales, (scale) => Math.log2(scale) + 127),
      },
    ],
    values: Float32Array.from(nibbles, (nibble, index) => decodeE2m1(nibble) * scales[Math.floor(index / 32)]!),
  };
}

function storeNvfp4(base: string, shape: [number, number], values: Float32Array): Stored {
  const [rows, columns] = shape;
  const maxima = blockMaxima(values, 16);
  const scale2 = Math.fround(maxima.reduce((left, right) => Math.max(left, right)) / (6 * 448));
  const scales = Uint8Array.from(maxima, (value) => encodeE4m3(value / 6 / scale2));
  const scaleAt = (index: number): number => decodeE4m3(scales[Math.floor(index / 16)]!);
  const nibbles = Uint8Array.from(values, (value, index) => encodeE2m1(value / (scaleAt(index) * scale2 || 1)));
  const scalar = (suffix: string, value: number): StoredEntry => ({
    name: `${base}.${suffix}`,
    dtype: 'F32',
    shape: [],
    bytes: bytesOf(Float32Array.of(value)),
  });
  return {
    entries: [
      { name: `${base}.weight`, dtype: 'U8', shape: [rows, columns / 2], bytes: packNibbles(nibbles) },
      { name: `${base}.weight_scale`, dtype: 'F8_E4M3', shape: [rows, columns / 16], bytes: scales },
      scalar('weight_scale_2', scale2),
      scalar('input_scale', 1),
    ],
    values: Float32Array.from(nibbles, (nibble, index) => decodeE2m1(nibble) * scaleAt(index) * scale2),
  };
}

function blockMaxima(values: Float32Array, size: number): Float64Array {
  return Float64Array.from({ length: values.length / size }, (_, block) => {
    let largest = 0;
    for (let index = block * size; index < (block + 1) * size; index++)
      largest = Math.max(largest, Math.abs(values[index]!));
    return largest;
  });
}

// The low nibble is the even column.
function packNibbles(nibbles: Uint8Array): Uint8Array {
  return Uint8Array.from(
    { length: nibbles.length / 2 },
    (_, pair) => nibbles[2 * pair]! | (nibbles[2 * pair + 1]! << 4),
  );
}

/** Nearest of a format's finite codes, by search: slow and plain. Ties go to the even code. */
function nearestCode(value: number, magnitudes: readonly number[], signBit: number): number {
  const magnitude = Math.abs(value);
  let best = 0;
  for (const [code, candidate] of magnitudes.entries()) {
    const gain = Math.abs(magnitudes[best]! - magnitude) - Math.abs(candidate - magnitude);
    if (gain > 0 || (gain === 0 && code % 2 === 0)) best = code;
  }
  return value < 0 ? best | signBit : best;
}

const E4M3_MAGNITUDES = Array.from({ length: 127 }, (_, code) => decodeE4m3(code));
const E2M1_MAGNITUDES = Array.from({ length: 8 }, (_, code) => decodeE2m1(code));

function encodeE4m3(value: number): number {
  return nearestCode(value, E4M3_MAGNITUDES, 0x80);
}

function encodeE2m1(value: number): number {
  return nearestCode(value, E2M1_MAGNITUDES, 8);
}

// Normal numbers only, truncated: any f16 near the value will do.
function encodeF16(value: number): number {
  const magnitude = Math.abs(value);
  if (magnitude < 2 ** -14) return 0;
  const exponent = Math.floor(Math.log2(magnitude));
  const mantissa = Math.floor((magnitude / 2 ** exponent - 1) * 1024);
  return (value < 0 ? 0x8000 : 0) | ((exponent + 15) << 10) | mantissa;
}

function decodeF16(bits: number): number {
  if ((bits & 0x7fff) === 0) return 0;
  return (bits & 0x8000 ? -1 : 1) * (1 + (bits & 1023) / 1024) * 2 ** (((bits >> 10) & 31) - 15);
}

/** The official name as transformers spells it. */
export function transformersName(official: string): string {
  if (official.startsWith('head.')) return `lm_${official}`;
  return `model.${official}`
    .replace('model.embed.', 'model.embed_tokens.')
    .replace('hc_head_', 'hc_head.hc_')
    .replace('.attn_norm.', '.input_layernorm.')
    .replace('.ffn_norm.', '.post_attention_layernorm.')
    .replace(/\.hc_(attn|ffn)_(\w+)$/, '.$1_hc.$2')
    .replace('.attn.indexer.compressor.', '.attn.compressor.indexer.')
    .replace('.attn.indexer.weights_proj', '.attn.compressor.indexer.scorer.weights_proj')
    .replace('.attn.indexer.', '.attn.compressor.indexer.')
    .replace('.attn_sink', '.sinks')
    .replace('.attn.', '.self_attn.')
    .replace('.ffn.', '.mlp.')
    .replace(/(compressor\S*)\.wkv\./, '$1.kv_proj.')
    .replace(/(compressor\S*)\.wgate\./, '$1.gate_proj.')
    .replace(/(compressor\S*)\.ape$/, '$1.position_bias')
    .replace(/(compressor\S*)\.norm\./, '$1.kv_norm.')
    .replace('self_attn.wkv.', 'self_attn.kv_proj.')
    .replace('.wq_a.', '.q_a_proj.')
    .replace('.q_norm.', '.q_a_norm.')
    .replace('.wq_b.', '.q_b_proj.')
    .replace('.wo_a.', '.o_a_proj.')
    .replace('.wo_b.', '.o_b_proj.')
    .replace('.gate.bias', '.gate.e_score_correction_bias')
    .replace('.w1.', '.gate_proj.')
    .replace('.w3.', '.up_proj.')
    .replace('.w2.', '.down_proj.')
    .replace(/(?<!_hc)\.scale$/, '.weight_scale_inv');
}

/** The official name as transformers spells it in what `save_pretrained` writes: section 2.2 of the model description. */
export function savedName(official: string): string {
  if (official.startsWith('head.')) return official;
  return `model.${official}`
    .replace('model.embed.', 'model.embed_tokens.')
    .replace('model.hc_head_', 'model.hc_head.hc_')
    .replace('.attn.kv_norm.', '.attn.norm.');
}

/** Expert matrices in the two tensors that transformers keeps them in, under its names; the other tensors as they are. */
export function fuseExperts(entries: readonly StoredEntry[]): StoredEntry[] {
  const groups = new Map<string, StoredEntry[]>();
  const others: StoredEntry[] = [];
  for (const entry of entries) {
    const match = /^(.*)\.ffn\.experts\.(\d+)\.(w[123])\.weight$/.exec(entry.name);
    if (!match) others.push(entry);
    else {
      const name = `model.${match[1]}.mlp.experts.${match[3] === 'w2' ? 'down_proj' : 'gate_up_proj'}`;
      groups.set(name, [...(groups.get(name) ?? []), entry]);
    }
  }
  // Entries come expert by expert, w1 before w3.
  const fused = [...groups].map(([name, parts]): StoredEntry => {
    const { dtype, shape } = parts[0]!;
    const perExpert = name.endsWith('gate_up_proj') ? 2 : 1;
    return {
      name,
      dtype,
      shape: [parts.length / perExpert, perExpert * shape[0]!, shape[1]!],
      bytes: Buffer.concat(parts.map(({ bytes }) => bytes)),
    };
  });
  return [...others, ...fused];
}

/** Write `model.safetensors` and `config.json`. */
export function writeCheckpoint(directory: string, configJson: unknown, entries: readonly StoredEntry[]): void {
  mkdirSync(directory, { recursive: true });
  writeFileSync(join(directory, 'config.json'), JSON.stringify(configJson));
  writeFileSync(join(directory, 'model.safetensors'), safetensorsBytes(entries));
}

/** A safetensors file of these tensors. */
export function safetensorsBytes(entries: readonly StoredEntry[]): Buffer {
  const header: Record<string, unknown> = { __metadata__: { format: 'pt' } };
  let offset = 0;
  for (const { name, dtype, shape, bytes } of entries) {
    header[name] = { dtype, shape, data_offsets: [offset, offset + bytes.byteLength] };
    offset += bytes.byteLength;
  }
  const json = Buffer.from(JSON.stringify(header));
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(json.byteLength));
  return Buffer.concat([length, json, ...entries.map(({ bytes }) => bytes)]);
}

/** The numbers of a checkpoint in official names and formats, for the reference. */
export async function dequantise(source: TensorSource): Promise<Map<string, ReferenceTensor>> {
  const bytesOfTensor = async (name: string): Promise<Uint8Array> => {
    const tensor = source.tensors.get(name)!;
    const bytes = new Uint8Array(tensor.end - tensor.start);
    await source.read(tensor, 0, bytes);
    return bytes;
  };
  const weights = new Map<string, ReferenceTensor>();
  for (const { name, dtype, shape } of source.tensors.values()) {
    if (/scale(_2)?$/.test(name) && !name.includes('hc_')) continue;
    const bytes = await bytesOfTensor(name);
    const base = name.replace(/\.weight$/, '');
    if (dtype === 'I64') weights.set(name, { shape, values: Array.from(new BigInt64Array(bytes.buffer), Number) });
    else if (dtype === 'F32') weights.set(name, { shape, values: new Float32Array(bytes.buffer) });
    else if (dtype === 'BF16')
      weights.set(name, { shape, values: Float32Array.from(new Uint16Array(bytes.buffer), decodeBf16) });
    else if (dtype === 'F8_E4M3') {
      const columns = shape[1]!;
      const scales = await bytesOfTensor(`${base}.scale`);
      const gridColumns = Math.ceil(columns / 128);
      const values = Float32Array.from(bytes, (byte, index) => {
        const block = Math.floor(Math.floor(index / columns) / 128) * gridColumns + Math.floor((index % columns) / 128);
        return decodeE4m3(byte) * decodeE8m0(scales[block]!);
      });
      weights.set(name, { shape, values });
    } else {
      const values = new Float32Array(bytes.length * 2);
      const nvfp4 = source.tensors.has(`${base}.weight_scale_2`);
      const scales = await bytesOfTensor(nvfp4 ? `${base}.weight_scale` : `${base}.scale`);
      const scale2 = nvfp4 ? new Float32Array((await bytesOfTensor(`${base}.weight_scale_2`)).buffer)[0]! : 1;
      for (let index = 0; index < values.length; index++) {
        const nibble = (bytes[index >> 1]! >> (4 * (index & 1))) & 15;
        const scale = nvfp4 ? decodeE4m3(scales[index >> 4]!) : decodeE8m0(scales[index >> 5]!);
        values[index] = decodeE2m1(nibble) * scale * scale2;
      }
      weights.set(name, { shape: [shape[0]!, shape[1]! * 2], values });
    }
  }
  return weights;
}

function bytesOf(values: Float32Array | Uint16Array | BigInt64Array): Uint8Array {
  return new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
}
