/**
 * Weights: a checkpoint's tensors, checked against the config and moved to the device in the format they are stored in.
 *
 * The whole inventory is checked before the first byte is uploaded: every tensor that the config asks for must be there
 * with its shape and a dtype that we compute with, and nothing else may be there. Quantised weights stay quantised; only
 * vectors, scales of FP8 blocks and half-precision floats are widened to f32. Formats are read off each tensor, never off
 * the config. Names are taken in the official spelling, in that of transformers and in that of its `save_pretrained`.
 */
import type { Device } from '../kernels/device.ts';
import { decodeBf16, decodeE8m0, type Dtype } from '../kernels/dtype.ts';
import { expertSplit, type ExpertWeight } from '../kernels/experts.ts';
import { linearSplit, type LinearWeight } from '../kernels/linear.ts';
import {
  allocateTensor,
  destroyTensor,
  tensorBytes,
  uploadTensor,
  type SplitUnit,
  type Tensor,
} from '../kernels/tensor.ts';
import { OVERLAP_RATIO, type ModelConfig } from './config.ts';
import {
  CheckpointError,
  READ_PIECE_BYTES,
  type StoredDtype,
  type StoredTensor,
  type TensorSource,
} from './safetensors.ts';

/** Mixing weights of one hyper-connection. */
export interface HyperWeights {
  /** [(2 + n) n, n D], or [n, n D] for the head. */
  readonly fn: LinearWeight;
  readonly base: Tensor;
  readonly scale: Tensor;
}

/** Pools the tokens of a block into one entry. */
export interface CompressorWeights {
  readonly key: LinearWeight;
  readonly gate: LinearWeight;
  /** f32 [ratio, c d]: added to the gate by position inside the block. */
  readonly positionBias: Tensor;
  readonly norm: Tensor;
}

/** Scores entries of a ratio-4 layer. */
export interface IndexerWeights {
  readonly query: LinearWeight;
  readonly headWeights: LinearWeight;
  readonly compressor: CompressorWeights;
}

export interface AttentionWeights {
  readonly queryDown: LinearWeight;
  readonly queryNorm: Tensor;
  readonly queryUp: LinearWeight;
  readonly keyValue: LinearWeight;
  readonly keyValueNorm: Tensor;
  readonly sink: Tensor;
  /** [G o, H d / G]: block-diagonal over the groups. */
  readonly outputDown: LinearWeight;
  readonly outputUp: LinearWeight;
  readonly compressor: CompressorWeights | null;
  readonly indexer: IndexerWeights | null;
}

export interface MoeWeights {
  readonly router: LinearWeight;
  /** f32 [E], or null in hash layers. */
  readonly bias: Tensor | null;
  /** u32 [V, K]: experts by token id, in hash layers only. */
  readonly table: Tensor | null;
  /** Two parts an expert: w1 (gate) and w3 (up). */
  readonly gateUp: ExpertWeight;
  readonly down: ExpertWeight;
  readonly sharedGate: LinearWeight;
  readonly sharedUp: LinearWeight;
  readonly sharedDown: LinearWeight;
}

export interface LayerWeights {
  readonly attentionMix: HyperWeights;
  readonly attentionNorm: Tensor;
  readonly attention: AttentionWeights;
  readonly moeMix: HyperWeights;
  readonly moeNorm: Tensor;
  readonly moe: MoeWeights;
}

/** The draft block: predicts the token after the next. Shares embedding and head with the model. */
export interface MtpWeights {
  readonly embeddingNorm: Tensor;
  readonly embeddingProjection: LinearWeight;
  readonly streamNorm: Tensor;
  readonly streamProjection: LinearWeight;
  readonly layer: LayerWeights;
  readonly headMix: HyperWeights;
  readonly norm: Tensor;
}

export interface ModelWeights {
  readonly embedding: LinearWeight;
  readonly layers: readonly LayerWeights[];
  readonly headMix: HyperWeights;
  readonly norm: Tensor;
  readonly head: LinearWeight;
  readonly mtp: MtpWeights | null;
}

/** Bytes moved so far of all to move: 0 at first, then whenever a piece's worth was moved, and all at last. */
export type WeightsProgress = (progress: { done: number; total: number; note?: string }) => void;

/**
 * Check the checkpoint and upload what the config asks for. The draft block is loaded only when `mtp` is set; its tensors
 * may be there in any case. The weights live as long as the device.
 *
 * @throws CheckpointError listing what is missing, superfluous, misshaped or of a wrong type.
 */
export async function loadWeights(
  device: Device,
  config: ModelConfig,
  source: TensorSource,
  options: { mtp?: boolean; onProgress?: WeightsProgress } = {},
): Promise<ModelWeights> {
  const { totalBytes } = checkCheckpoint(config, source, options);
  const uploader = new Uploader(device, source, totalBytes, options.onProgress ?? (() => {}));
  try {
    const weights = describeModel(new Inventory(config, source, uploader.place), config, options.mtp ?? false);
    await uploader.run();
    return weights;
  } catch (error) {
    uploader.abandon();
    throw error;
  }
}

/**
 * Check names, shapes and types against the config without reading any tensor.
 *
 * @returns stored bytes that loading will read, which is what progress counts.
 * @throws CheckpointError as `loadWeights` does.
 */
export function checkCheckpoint(
  config: ModelConfig,
  source: Pick<TensorSource, 'tensors'>,
  options: { mtp?: boolean } = {},
): { totalBytes: number } {
  const weights = surveyWeights(config, source, options);
  return { totalBytes: weights.reduce((sum, weight) => sum + weight.storedBytes, 0) };
}

/** One weight as the checkpoint stores it, its scales included, and what it takes on a device. */
export interface WeightSummary {
  /** Official name; the experts of a layer are one weight: `layers.3.ffn.experts.*.w1+w3`. */
  readonly name: string;
  /** For people: `MXFP4`, `FP8 (ue8m0 scales)`, `bf16`. */
  readonly format: string;
  readonly elements: number;
  readonly storedBytes: number;
  readonly deviceBytes: number;
}

/**
 * `checkCheckpoint`, telling what was found: every weight that would be loaded, in the order of loading.
 *
 * @throws CheckpointError as `loadWeights` does.
 */
export function surveyWeights(
  config: ModelConfig,
  source: Pick<TensorSource, 'tensors'>,
  options: { mtp?: boolean } = {},
): WeightSummary[] {
  const found = new Map<string, PlaceRequest[]>();
  const inventory = new Inventory(config, source, (request) => {
    const weight = request.scaleOf ?? request.label;
    found.set(weight, [...(found.get(weight) ?? []), request]);
    return { dtype: request.dtype, shape: request.shape, label: request.label } as Tensor;
  });
  describeModel(inventory, config, options.mtp ?? false);
  inventory.finish();
  return [...found].map(([name, requests]) => ({
    name,
    format: formatName(requests.map(({ parts }) => parts[0]!.stored.dtype)),
    elements: requests[0]!.shape.reduce((product, size) => product * size, 1),
    storedBytes: requests.reduce(
      (sum, { parts }) => sum + parts.reduce((bytes, part) => bytes + part.byteLength, 0),
      0,
    ),
    deviceBytes: requests.reduce((sum, request) => sum + tensorBytes(request.dtype, request.shape), 0),
  }));
}

// By the storage types of the elements and of up to two kinds of scales.
function formatName([dtype, scale, scale2]: readonly StoredDtype[]): string {
  if (scale2) return 'NVFP4';
  if (dtype === 'F8_E4M3') return `FP8 (${scale === 'F32' || scale === 'BF16' ? scale.toLowerCase() : 'ue8m0'} scales)`;
  return scale ? 'MXFP4' : dtype!.toLowerCase();
}

// ---------------------------------------------------------------------------------------------------------- names

// Spellings of transformers and of its save_pretrained, in order, each turned into the official one.
const SPELLINGS: readonly (readonly [pattern: RegExp, official: string])[] = [
  [/^model\./, ''],
  [/^lm_head\./, 'head.'],
  [/^embed_tokens\./, 'embed.'],
  [/^hc_head\.(?:hc_)?/, 'hc_head_'],
  [/\.(attn|ffn)_hc\.(fn|base|scale)$/, '.hc_$1_$2'],
  [/\.input_layernorm\./, '.attn_norm.'],
  [/\.post_attention_layernorm\./, '.ffn_norm.'],
  [/\.self_attn\./, '.attn.'],
  [/\.mlp\./, '.ffn.'],
  [/\.compressor\.indexer\.(kv_proj|gate_proj|position_bias|kv_norm|wkv|wgate|ape|norm)\b/, '.indexer.compressor.$1'],
  [/\.compressor\.indexer\.(?:scorer\.)?/, '.indexer.'],
  [/\.compressor\.kv_proj\./, '.compressor.wkv.'],
  [/\.compressor\.gate_proj\./, '.compressor.wgate.'],
  [/\.compressor\.position_bias$/, '.compressor.ape'],
  [/\.compressor\.kv_norm\./, '.compressor.norm.'],
  [/\.q_a_proj\./, '.wq_a.'],
  [/\.q_a_norm\./, '.q_norm.'],
  [/\.q_b_proj\./, '.wq_b.'],
  [/\.attn\.kv_proj\./, '.attn.wkv.'],
  [/\.attn\.norm\./, '.attn.kv_norm.'],
  [/\.o_a_proj\./, '.wo_a.'],
  [/\.o_b_proj\./, '.wo_b.'],
  [/\.attn\.sinks$/, '.attn.attn_sink'],
  [/\.gate\.e_score_correction_bias$/, '.gate.bias'],
  [/\.(experts\.\d+|shared_experts)\.gate_proj\./, '.$1.w1.'],
  [/\.(experts\.\d+|shared_experts)\.up_proj\./, '.$1.w3.'],
  [/\.(experts\.\d+|shared_experts)\.down_proj\./, '.$1.w2.'],
  [/\.weight_scale_inv$/, '.scale'],
];

/** The official name of a stored tensor, whatever spelling it was stored under. */
export function officialName(stored: string): string {
  return SPELLINGS.reduce((name, [pattern, official]) => name.replace(pattern, official), stored);
}

// Copies of the shared embedding and head that third-party tools store beside the draft block.
const SKIPPED = new Set(['mtp.0.emb.tok_emb.weight', 'mtp.0.head.weight']);

// ------------------------------------------------------------------------------------------------------ inventory

type Conversion = 'copy' | 'bf16-f32' | 'f16-f32' | 'e8m0-f32' | 'i64-u32' | 'i32-u32';

/** A range of a stored tensor that becomes part of a device tensor. */
interface Part {
  readonly stored: StoredTensor;
  readonly offset: number;
  readonly byteLength: number;
  readonly conversion: Conversion;
  /** Values of a table must be below this. */
  readonly limit?: number;
  /** Scales must be: one that is not ruins its whole block. */
  readonly finite?: boolean;
}

/** A device tensor and the stored ranges that fill it, in order. */
interface PlaceRequest {
  readonly label: string;
  readonly dtype: Dtype;
  readonly shape: readonly number[];
  readonly parts: readonly Part[];
  /** Set for scales: the label of the matrix they belong to. */
  readonly scaleOf?: string;
  /** Where it may be cut if it is larger than one binding. */
  readonly split?: SplitUnit;
}

type Place = (request: PlaceRequest) => Tensor;

/** The storage of one matrix: what its elements and its scales are. */
interface MatrixFormat {
  readonly format: LinearWeight['format'];
  readonly dtype: Dtype;
  readonly conversion: Conversion;
  readonly weight: StoredTensor;
  readonly scale?: {
    readonly stored: StoredTensor;
    readonly dtype: Dtype;
    readonly conversion: Conversion;
    readonly shape: readonly number[];
  };
  readonly scale2?: StoredTensor;
}

/** Which matrices of the experts to stack, and their shape. */
interface ExpertArgs {
  readonly prefix: string;
  readonly matrices: readonly ['w1', 'w3'] | readonly ['w2'];
  readonly count: number;
  readonly rows: number;
  readonly columns: number;
}

const FP8_BLOCK = 128;
// Elements of one word, which is what the kernels read.
const FP8_COLUMNS = 4;
const MXFP4_BLOCK = 32;
const NVFP4_BLOCK = 16;
const SCALE_SUFFIXES = ['.scale', '.weight_scale', '.weight_scale_2', '.input_scale'];
// More faults than this say nothing new.
const MAX_FAULTS_SHOWN = 12;

/** Finds tensors by official name, checks them, and notes every fault instead of stopping at the first. */
class Inventory {
  readonly #tensors = new Map<string, StoredTensor>();
  readonly #used = new Set<string>();
  readonly #faults: string[] = [];
  readonly #place: Place;

  constructor(config: ModelConfig, source: Pick<TensorSource, 'tensors'>, place: Place) {
    this.#place = place;
    for (const stored of source.tensors.values()) {
      const name = officialName(stored.name);
      const other = this.#tensors.get(name);
      if (other) this.#faults.push(`${stored.name} and ${other.name} are the same tensor (${name})`);
      this.#tensors.set(name, stored);
    }
  }

  has(name: string): boolean {
    return this.#tensors.has(name);
  }

  /** Accept tensors that are not loaded. */
  skip(matches: (name: string) => boolean): void {
    for (const name of this.#tensors.keys()) if (matches(name)) this.#used.add(name);
  }

  /** Throws when anything was wrong, or anything is left over. */
  finish(): void {
    for (const [name, stored] of this.#tensors) {
      if (!this.#used.has(name)) this.#faults.push(`${stored.name} is superfluous: the config has no such tensor`);
    }
    if (this.#faults.length === 0) return;
    const shown = this.#faults.slice(0, MAX_FAULTS_SHOWN);
    if (shown.length < this.#faults.length) shown.push(`and ${this.#faults.length - shown.length} more`);
    throw new CheckpointError(`the checkpoint does not fit its config:\n  ${shown.join('\n  ')}`);
  }

  /** A tensor used as f32: norms, biases, sinks. */
  vector(name: string, shape: readonly number[]): Tensor {
    const stored = this.#take(name, shape);
    const conversion = stored && FLOAT_CONVERSIONS[stored.dtype];
    if (stored && !conversion) this.#mistyped(stored, 'F32, BF16 or F16');
    return this.#place({
      label: name,
      dtype: 'f32',
      shape,
      parts: stored && conversion ? [whole(stored, conversion)] : [],
    });
  }

  /** A table of whole numbers below `limit`, as u32. */
  table(name: string, shape: readonly number[], limit: number): Tensor {
    const stored = this.#take(name, shape);
    const conversion = stored?.dtype === 'I64' ? 'i64-u32' : stored?.dtype === 'I32' ? 'i32-u32' : undefined;
    if (stored && !conversion) this.#mistyped(stored, 'I64 or I32');
    return this.#place({
      label: name,
      dtype: 'u32',
      shape,
      parts: stored && conversion ? [{ ...whole(stored, conversion), limit }] : [],
    });
  }

  /** The matrix NAME.weight (or NAME itself for those without a suffix), [rows, columns]. */
  linear(name: string, rows: number, columns: number): LinearWeight {
    const matrix = this.#matrix(name, rows, columns);
    if (!matrix)
      return {
        format: 'f32',
        weight: this.#place({ label: name, dtype: 'f32', shape: [rows, columns], parts: [] }),
        rows,
        columns,
      };
    const split = linearSplit(matrix.format, rows, columns);
    return {
      format: matrix.format,
      weight: this.#place({
        label: name,
        dtype: matrix.dtype,
        shape: [rows, columns],
        parts: [whole(matrix.weight, matrix.conversion)],
        split,
      }),
      ...this.#scales(name, [matrix], split),
      rows,
      columns,
    };
  }

  /** Matrices of equal shape of every expert, stacked: [count, matrices * rows, columns]. */
  experts(args: ExpertArgs): ExpertWeight {
    const { prefix, matrices, count, rows, columns } = args;
    const parts = matrices.length;
    const label = `${prefix}*.${matrices.join('+')}`;
    const shape = [count, parts * rows, columns];
    const size = { experts: count, parts, rows, columns };
    const fused = this.#fused(args);
    if (fused) return { ...fused, ...size };
    if (count > this.#tensors.size) {
      // Each would be a fault of its own, and the number comes from a stranger.
      this.#faults.push(
        `${label}: the config asks for ${count} experts, the checkpoint has ${this.#tensors.size} tensors`,
      );
      return { format: 'f32', weight: this.#place({ label, dtype: 'f32', shape, parts: [] }), ...size };
    }
    const found: MatrixFormat[] = [];
    for (let expert = 0; expert < count; expert++) {
      for (const matrix of matrices) {
        const one = this.#matrix(`${prefix}${expert}.${matrix}`, rows, columns);
        if (one) found.push(one);
      }
    }
    const first = found[0];
    const odd = found.find((one) => one.format !== first!.format);
    if (odd) {
      this.#faults.push(
        `${odd.weight.name} is stored in ${odd.format}, ${first!.weight.name} in ${first!.format}: experts of a layer must agree`,
      );
    }
    if (!first || odd || found.length < count * parts) {
      return { format: 'f32', weight: this.#place({ label, dtype: 'f32', shape, parts: [] }), ...size };
    }
    const split = expertSplit(first.format, size);
    return {
      format: first.format,
      weight: this.#place({
        label,
        dtype: first.dtype,
        shape,
        parts: found.map((one) => whole(one.weight, one.conversion)),
        split,
      }),
      ...this.#scales(label, found, split, { count, parts }),
      ...size,
    };
  }

  // transformers keeps experts in two tensors: gate_up_proj [E, 2 I, D] (gate rows first) and down_proj [E, D, I].
  #fused(args: ExpertArgs): Pick<LinearWeight, 'format' | 'weight'> | null {
    const { prefix, matrices, count, rows, columns } = args;
    const name = prefix + (matrices.length === 2 ? 'gate_up_proj' : 'down_proj');
    if (!this.has(name)) return null;
    const shape = [count, matrices.length * rows, columns];
    const stored = this.#take(name, shape);
    const conversion = stored && MATRIX_CONVERSIONS[stored.dtype];
    if (stored && !conversion) this.#mistyped(stored, 'F32, BF16 or F16 (fused experts)');
    const format = stored?.dtype === 'BF16' ? 'bf16' : 'f32';
    const parts = stored && conversion ? [whole(stored, conversion)] : [];
    const split = expertSplit(format, { parts: matrices.length, rows, columns });
    return { format, weight: this.#place({ label: name, dtype: format, shape, parts, split }) };
  }

  // `stack` is given for experts, whose scales are stacked like their matrices. Scales are cut where the weights are.
  #scales(
    label: string,
    matrices: readonly MatrixFormat[],
    split: SplitUnit,
    stack?: { count: number; parts: number },
  ): Pick<LinearWeight, 'scale' | 'scale2'> {
    const { scale, scale2 } = matrices[0]!;
    if (!scale) return {};
    const [rows, columns] = scale.shape as [number, number];
    const scaleTensor = this.#place({
      label: `${label} scale`,
      scaleOf: label,
      dtype: scale.dtype,
      shape: stack ? [stack.count, stack.parts * rows, columns] : [rows, columns],
      parts: matrices.map((matrix) => ({ ...whole(matrix.scale!.stored, matrix.scale!.conversion), finite: true })),
      // A row of an FP8 matrix's scales is for a whole unit of its rows.
      split: !stack && matrices[0]!.format === 'e4m3' ? { ...split, rows: 1 } : split,
    });
    if (!scale2) return { scale: scaleTensor };
    return {
      scale: scaleTensor,
      scale2: this.#place({
        label: `${label} scale 2`,
        scaleOf: label,
        dtype: 'f32',
        shape: stack ? [stack.count, stack.parts] : [1],
        parts: matrices.map((matrix) => ({ ...whole(matrix.scale2!, 'copy'), finite: true })),
        ...(stack ? { split } : {}),
      }),
    };
  }

  // What a matrix is stored as, told by its own dtype and by the scales beside it; null when there is a fault.
  #matrix(base: string, rows: number, columns: number): MatrixFormat | null {
    const found = this.#storedMatrix(base, rows, columns);
    // Its fault is noted; that its scales are left over would say the same once more.
    if (!found) for (const suffix of SCALE_SUFFIXES) this.#used.add(base + suffix);
    return found;
  }

  #storedMatrix(base: string, rows: number, columns: number): MatrixFormat | null {
    const name = this.has(base) ? base : `${base}.weight`;
    const dtype = this.#tensors.get(name)?.dtype;
    if (dtype === 'I8' || dtype === 'U8') return this.#fp4(base, name, rows, columns);
    if (dtype === 'F8_E4M3' && !this.#suits(name, columns, FP8_COLUMNS)) return null;
    const weight = this.#take(name, [rows, columns]);
    if (!weight) return null;
    if (weight.dtype === 'F8_E4M3') {
      const shape = [Math.ceil(rows / FP8_BLOCK), Math.ceil(columns / FP8_BLOCK)];
      const stored = this.#take(`${base}.scale`, shape);
      const conversion = stored && FP8_SCALE_CONVERSIONS[stored.dtype];
      if (stored && !conversion) this.#mistyped(stored, 'F8_E8M0 (or U8), F32 or BF16');
      if (!stored || !conversion) return null;
      return {
        format: 'e4m3',
        dtype: 'e4m3',
        conversion: 'copy',
        weight,
        scale: { stored, dtype: 'f32', conversion, shape },
      };
    }
    const conversion = MATRIX_CONVERSIONS[weight.dtype];
    if (!conversion) {
      this.#mistyped(weight, 'F32, BF16, F16, F8_E4M3, or I8/U8 (packed FP4)');
      return null;
    }
    const format = weight.dtype === 'BF16' ? 'bf16' : 'f32';
    return { format, dtype: format, conversion, weight };
  }

  #fp4(base: string, name: string, rows: number, columns: number): MatrixFormat | null {
    const nvfp4 = this.has(`${base}.weight_scale_2`);
    if (!this.#suits(name, columns, nvfp4 ? NVFP4_BLOCK : MXFP4_BLOCK)) return null;
    const weight = this.#take(name, [rows, columns / 2]);
    if (!nvfp4) {
      const shape = [rows, columns / MXFP4_BLOCK];
      const stored = this.#take(`${base}.scale`, shape);
      if (stored && stored.dtype !== 'F8_E8M0' && stored.dtype !== 'U8') {
        this.#mistyped(stored, 'F8_E8M0 or U8');
        return null;
      }
      if (!weight || !stored) return null;
      return {
        format: 'mxfp4',
        dtype: 'e2m1',
        conversion: 'copy',
        weight,
        scale: { stored, dtype: 'e8m0', conversion: 'copy', shape },
      };
    }
    const shape = [rows, columns / NVFP4_BLOCK];
    const stored = this.#take(`${base}.weight_scale`, shape);
    const scale2 = this.#take(
      `${base}.weight_scale_2`,
      this.#tensors.get(`${base}.weight_scale_2`)!.shape.length === 0 ? [] : [1],
    );
    // For activations quantised on the way in, which we do not do.
    if (this.has(`${base}.input_scale`)) this.#used.add(`${base}.input_scale`);
    if (stored && stored.dtype !== 'F8_E4M3') this.#mistyped(stored, 'F8_E4M3');
    if (scale2 && scale2.dtype !== 'F32') this.#mistyped(scale2, 'F32');
    if (!weight || !stored || !scale2) return null;
    return {
      format: 'nvfp4',
      dtype: 'e2m1',
      conversion: 'copy',
      weight,
      scale: { stored, dtype: 'e4m3', conversion: 'copy', shape },
      scale2,
    };
  }

  #take(name: string, shape: readonly number[]): StoredTensor | null {
    const stored = this.#tensors.get(name);
    if (!stored) {
      this.#faults.push(`${name} [${shape}] is missing`);
      return null;
    }
    this.#used.add(name);
    if (stored.shape.length === shape.length && stored.shape.every((size, axis) => size === shape[axis])) return stored;
    this.#faults.push(`${stored.name} is [${stored.shape}], the config asks for [${shape}]`);
    return null;
  }

  // Whether rows of this many elements can be decoded: blocks and words must not reach into the next row.
  #suits(name: string, columns: number, multiple: number): boolean {
    if (columns % multiple === 0) return true;
    const stored = this.#tensors.get(name)!;
    this.#used.add(name);
    this.#faults.push(`${stored.name} is ${stored.dtype} in rows of ${columns}, a multiple of ${multiple} is needed`);
    return false;
  }

  #mistyped(stored: StoredTensor, expected: string): void {
    this.#faults.push(`${stored.name} is ${stored.dtype}, expected ${expected}`);
  }
}

type Conversions = Partial<Record<StoredTensor['dtype'], Conversion>>;
const FLOAT_CONVERSIONS: Conversions = { F32: 'copy', BF16: 'bf16-f32', F16: 'f16-f32' };
const MATRIX_CONVERSIONS: Conversions = { F32: 'copy', BF16: 'copy', F16: 'f16-f32' };
// U8: what tools write that have no type for exponents.
const FP8_SCALE_CONVERSIONS: Conversions = { F8_E8M0: 'e8m0-f32', U8: 'e8m0-f32', F32: 'copy', BF16: 'bf16-f32' };

function whole(stored: StoredTensor, conversion: Conversion): Part {
  return { stored, offset: 0, byteLength: stored.end - stored.start, conversion };
}

// ---------------------------------------------------------------------------------------- the model, tensor by tensor

function describeModel(inventory: Inventory, config: ModelConfig, mtp: boolean): ModelWeights {
  const { vocabSize, hiddenSize } = config;
  inventory.skip((name) => SKIPPED.has(name) || (!mtp && name.startsWith('mtp.')));
  return {
    embedding: inventory.linear('embed', vocabSize, hiddenSize),
    layers: config.layers.map(({ ratio, hash }, index) =>
      describeLayer(inventory, config, { prefix: `layers.${index}.`, ratio, hash }),
    ),
    headMix: describeMix(inventory, config, 'hc_head', config.streams, 1),
    norm: inventory.vector('norm.weight', [hiddenSize]),
    head: inventory.linear('head', vocabSize, hiddenSize),
    mtp: mtp ? describeMtp(inventory, config) : null,
  };
}

function describeMtp(inventory: Inventory, config: ModelConfig): MtpWeights {
  const { hiddenSize } = config;
  const prefix = 'mtp.0.';
  return {
    embeddingNorm: inventory.vector(`${prefix}enorm.weight`, [hiddenSize]),
    embeddingProjection: inventory.linear(`${prefix}e_proj`, hiddenSize, hiddenSize),
    streamNorm: inventory.vector(`${prefix}hnorm.weight`, [hiddenSize]),
    streamProjection: inventory.linear(`${prefix}h_proj`, hiddenSize, hiddenSize),
    layer: describeLayer(inventory, config, { prefix, ratio: 0, hash: false }),
    headMix: describeMix(inventory, config, `${prefix}hc_head`, config.streams, 1),
    norm: inventory.vector(`${prefix}norm.weight`, [hiddenSize]),
  };
}

function describeLayer(
  inventory: Inventory,
  config: ModelConfig,
  layer: { prefix: string; ratio: number; hash: boolean },
): LayerWeights {
  const { prefix, ratio, hash } = layer;
  const mixRows = (2 + config.streams) * config.streams;
  return {
    attentionMix: describeMix(inventory, config, `${prefix}hc_attn`, mixRows, 3),
    attentionNorm: inventory.vector(`${prefix}attn_norm.weight`, [config.hiddenSize]),
    attention: describeAttention(inventory, config, `${prefix}attn.`, ratio),
    moeMix: describeMix(inventory, config, `${prefix}hc_ffn`, mixRows, 3),
    moeNorm: inventory.vector(`${prefix}ffn_norm.weight`, [config.hiddenSize]),
    moe: describeMoe(inventory, config, `${prefix}ffn.`, hash),
  };
}

function describeMix(
  inventory: Inventory,
  config: ModelConfig,
  prefix: string,
  rows: number,
  scales: number,
): HyperWeights {
  return {
    fn: inventory.linear(`${prefix}_fn`, rows, config.streams * config.hiddenSize),
    base: inventory.vector(`${prefix}_base`, [rows]),
    scale: inventory.vector(`${prefix}_scale`, [scales]),
  };
}

function describeAttention(inventory: Inventory, config: ModelConfig, prefix: string, ratio: number): AttentionWeights {
  const { hiddenSize, heads, headDim, queryRank, outputRank, outputGroups, indexHeads, indexHeadDim } = config;
  return {
    queryDown: inventory.linear(`${prefix}wq_a`, queryRank, hiddenSize),
    queryNorm: inventory.vector(`${prefix}q_norm.weight`, [queryRank]),
    queryUp: inventory.linear(`${prefix}wq_b`, heads * headDim, queryRank),
    keyValue: inventory.linear(`${prefix}wkv`, headDim, hiddenSize),
    keyValueNorm: inventory.vector(`${prefix}kv_norm.weight`, [headDim]),
    sink: inventory.vector(`${prefix}attn_sink`, [heads]),
    outputDown: inventory.linear(`${prefix}wo_a`, outputGroups * outputRank, (heads * headDim) / outputGroups),
    outputUp: inventory.linear(`${prefix}wo_b`, hiddenSize, outputGroups * outputRank),
    compressor: ratio > 0 ? describeCompressor(inventory, config, `${prefix}compressor.`, ratio, headDim) : null,
    indexer:
      ratio === OVERLAP_RATIO
        ? {
            query: inventory.linear(`${prefix}indexer.wq_b`, indexHeads * indexHeadDim, queryRank),
            headWeights: inventory.linear(`${prefix}indexer.weights_proj`, indexHeads, hiddenSize),
            compressor: describeCompressor(inventory, config, `${prefix}indexer.compressor.`, ratio, indexHeadDim),
          }
        : null,
  };
}

function describeCompressor(
  inventory: Inventory,
  config: ModelConfig,
  prefix: string,
  ratio: number,
  dim: number,
): CompressorWeights {
  const width = ratio === OVERLAP_RATIO ? 2 * dim : dim;
  return {
    key: inventory.linear(`${prefix}wkv`, width, config.hiddenSize),
    gate: inventory.linear(`${prefix}wgate`, width, config.hiddenSize),
    positionBias: inventory.vector(`${prefix}ape`, [ratio, width]),
    norm: inventory.vector(`${prefix}norm.weight`, [dim]),
  };
}

function describeMoe(inventory: Inventory, config: ModelConfig, prefix: string, hash: boolean): MoeWeights {
  const { hiddenSize, expertHiddenSize, experts: count, expertsPerToken, vocabSize } = config;
  const experts = { prefix: `${prefix}experts.`, count };
  return {
    router: inventory.linear(`${prefix}gate`, count, hiddenSize),
    bias: hash ? null : inventory.vector(`${prefix}gate.bias`, [count]),
    table: hash ? inventory.table(`${prefix}gate.tid2eid`, [vocabSize, expertsPerToken], count) : null,
    gateUp: inventory.experts({ ...experts, matrices: ['w1', 'w3'], rows: expertHiddenSize, columns: hiddenSize }),
    down: inventory.experts({ ...experts, matrices: ['w2'], rows: hiddenSize, columns: expertHiddenSize }),
    sharedGate: inventory.linear(`${prefix}shared_experts.w1`, expertHiddenSize, hiddenSize),
    sharedUp: inventory.linear(`${prefix}shared_experts.w3`, expertHiddenSize, hiddenSize),
    sharedDown: inventory.linear(`${prefix}shared_experts.w2`, hiddenSize, expertHiddenSize),
  };
}

// --------------------------------------------------------------------------------------------------------- upload

// Dawn copies every write into staging memory until the queue has run it; this bounds how much waits.
const MAX_UNFINISHED_BYTES = 64 * 1024 * 1024;

/** Allocates device tensors as they are asked for and fills them afterwards, piece by piece. */
class Uploader {
  readonly #device: Device;
  readonly #source: TensorSource;
  readonly #totalBytes: number;
  readonly #onProgress: WeightsProgress;
  readonly #placed: { request: PlaceRequest; tensor: Tensor }[] = [];
  readonly #piece = new Uint8Array(READ_PIECE_BYTES);
  #doneBytes = 0;
  #reportedBytes = 0;
  #unfinishedBytes = 0;

  constructor(device: Device, source: TensorSource, totalBytes: number, onProgress: WeightsProgress) {
    this.#device = device;
    this.#source = source;
    this.#totalBytes = totalBytes;
    this.#onProgress = onProgress;
  }

  readonly place: Place = (request) => {
    const tensor = allocateTensor(this.#device, request);
    this.#placed.push({ request, tensor });
    return tensor;
  };

  async run(): Promise<void> {
    this.#onProgress({ done: 0, total: this.#totalBytes });
    for (const { request, tensor } of this.#placed) await this.#fill(request, tensor);
    await this.#settle();
  }

  abandon(): void {
    for (const { tensor } of this.#placed) destroyTensor(this.#device, tensor);
    this.#device.queue.submit([]);
  }

  // Parts need not end on whole words, which is all that the queue writes: the odd bytes wait for the next part.
  async #fill(request: PlaceRequest, tensor: Tensor): Promise<void> {
    let carried: Uint8Array = new Uint8Array(0);
    let written = 0;
    for (const part of request.parts) {
      for (let offset = 0; offset < part.byteLength; offset += READ_PIECE_BYTES) {
        const piece = this.#piece.subarray(0, Math.min(READ_PIECE_BYTES, part.byteLength - offset));
        await this.#source.read(part.stored, part.offset + offset, piece);
        let bytes = convert(part, piece);
        if (carried.byteLength > 0) bytes = Buffer.concat([carried, bytes]);
        const wholeBytes = bytes.byteLength - (bytes.byteLength % 4);
        if (wholeBytes > 0) uploadTensor(this.#device, tensor, bytes.subarray(0, wholeBytes), written);
        written += wholeBytes;
        carried = bytes.slice(wholeBytes);
        await this.#account(piece.byteLength, wholeBytes, request.label);
      }
    }
    if (carried.byteLength > 0) uploadTensor(this.#device, tensor, carried, written);
  }

  async #account(readBytes: number, writtenBytes: number, note: string): Promise<void> {
    this.#doneBytes += readBytes;
    this.#unfinishedBytes += writtenBytes;
    // Experts come in many small parts: who listens wants to know how far it is, not every one of them.
    if (this.#doneBytes - this.#reportedBytes >= READ_PIECE_BYTES || this.#doneBytes === this.#totalBytes) {
      this.#reportedBytes = this.#doneBytes;
      this.#onProgress({ done: this.#doneBytes, total: this.#totalBytes, note });
    }
    if (this.#unfinishedBytes >= MAX_UNFINISHED_BYTES) await this.#settle();
  }

  async #settle(): Promise<void> {
    this.#device.queue.submit([]);
    await Promise.race([this.#device.queue.onSubmittedWorkDone(), this.#device.lost]);
    this.#unfinishedBytes = 0;
  }
}

// A piece of a stored tensor as the device wants it. Pieces start at a multiple of 16 MiB, so elements are never cut.
function convert(part: Part, piece: Uint8Array): Uint8Array {
  const fault = (problem: string): CheckpointError => new CheckpointError(`${part.stored.name}: ${problem}`);
  if (part.finite) checkScales(part.stored.dtype, piece, fault);
  switch (part.conversion) {
    case 'copy':
      return piece;
    case 'e8m0-f32':
      return bytesOf(Float32Array.from(piece, decodeE8m0));
    case 'bf16-f32':
      return bytesOf(
        Float32Array.from(new Uint16Array(piece.buffer, piece.byteOffset, piece.byteLength / 2), decodeBf16),
      );
    case 'f16-f32':
      return bytesOf(
        Float32Array.from(new Uint16Array(piece.buffer, piece.byteOffset, piece.byteLength / 2), decodeF16),
      );
    case 'i32-u32':
      return bytesOf(
        checkedIds(new Int32Array(piece.buffer, piece.byteOffset, piece.byteLength / 4), part.limit!, fault),
      );
    case 'i64-u32': {
      const wide = new BigInt64Array(piece.buffer, piece.byteOffset, piece.byteLength / 8);
      return bytesOf(checkedIds(Array.from(wide, Number), part.limit!, fault));
    }
  }
}

// Exponents have one code that is no number, e4m3 has two; floats of either width have all exponent bits set then.
function checkScales(dtype: StoredDtype, piece: Uint8Array, fault: (problem: string) => CheckpointError): void {
  if (dtype === 'F32') {
    const scales = new Float32Array(piece.buffer, piece.byteOffset, piece.byteLength / 4);
    if (!scales.every(Number.isFinite)) throw fault('a scale is not a finite number');
  } else if (dtype === 'BF16') {
    const scales = new Uint16Array(piece.buffer, piece.byteOffset, piece.byteLength / 2);
    if (scales.some((bits) => (bits & 0x7f80) === 0x7f80)) throw fault('a scale is not a finite number');
  } else if (dtype === 'F8_E4M3') {
    if (piece.includes(0x7f) || piece.includes(0xff)) throw fault('a scale is NaN (e4m3 byte 127 or 255)');
  } else if (piece.includes(0xff)) throw fault('a scale is NaN (e8m0 byte 255)');
}

function checkedIds(
  values: ArrayLike<number>,
  limit: number,
  fault: (problem: string) => CheckpointError,
): Uint32Array {
  return Uint32Array.from(values, (value) => {
    if (value < 0 || value >= limit) throw fault(`entry ${value} is not below ${limit}`);
    return value;
  });
}

function decodeF16(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const mantissa = bits & 1023;
  if (exponent === 31) return mantissa === 0 ? sign * Infinity : NaN;
  return sign * (exponent === 0 ? mantissa * 2 ** -24 : (1024 + mantissa) * 2 ** (exponent - 25));
}

function bytesOf(values: Float32Array | Uint32Array): Uint8Array {
  return new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
}
