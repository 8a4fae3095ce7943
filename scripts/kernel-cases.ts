/**
 * What scripts/bench-kernels.ts times: each kernel's wrapper with tensors of a model's sizes, and how many bytes and
 * floating-point operations the call stands for.
 *
 * Bytes are the traffic that no implementation avoids: every input read once, every output written once; scratch and
 * step metadata are not counted. Operations are additions, multiplications, divisions, roots and exponentials, one each;
 * comparisons are not counted, nor what decoding a weight takes. So both rates say how fast the work gets done, and a
 * kernel that reads something twice shows a lower one.
 */
import { fileURLToPath } from 'node:url';
import { attentionDecode } from '../kernels/attention-decode.ts';
import { allocateAttentionScratch, attentionPrefill, type AttentionArgs } from '../kernels/attention-prefill.ts';
import { compress, OVERLAP_RATIO, tailShape } from '../kernels/compress.ts';
import type { Device } from '../kernels/device.ts';
import { encodeBf16, type Dtype } from '../kernels/dtype.ts';
import { embed } from '../kernels/embed.ts';
import { allocateExpertScratch, experts, type ExpertFormat, type ExpertWeight } from '../kernels/experts.ts';
import { gate } from '../kernels/gate.ts';
import { hyperHead, hyperPost, hyperPre } from '../kernels/hyper-connection.ts';
import { indexKeyWords, type IndexPrecision } from '../kernels/index-keys.ts';
import { hadamard, selectEntries } from '../kernels/indexer.ts';
import type { Recorder } from '../kernels/kernel.ts';
import { linear, type LinearFormat, type LinearWeight } from '../kernels/linear.ts';
import { rmsnorm } from '../kernels/rmsnorm.ts';
import { rope } from '../kernels/rope.ts';
import { sample, SAMPLING_WORDS, writeSamplingRow, type SamplingRow } from '../kernels/sample.ts';
import { swiglu } from '../kernels/swiglu.ts';
import { allocateTensor, destroyTensor, uploadTensor, type Tensor } from '../kernels/tensor.ts';
import { appendWindow } from '../kernels/window.ts';
import { loadModelConfig, type ModelConfig } from '../model/config.ts';
import { makeStep, type TestChunk, type TestStep } from '../test/support/gpu.ts';
import { createPrng } from '../test/support/prng.ts';

/** The sizes that kernels depend on. */
export interface Geometry extends Pick<
  ModelConfig,
  | 'vocabSize'
  | 'hiddenSize'
  | 'heads'
  | 'headDim'
  | 'ropeDim'
  | 'outputRank'
  | 'outputGroups'
  | 'experts'
  | 'expertsPerToken'
  | 'expertHiddenSize'
  | 'routeScale'
  | 'swigluLimit'
  | 'windowTokens'
  | 'streams'
  | 'sinkhornIterations'
  | 'hcEps'
  | 'normEps'
  | 'indexHeads'
  | 'indexHeadDim'
  | 'indexTopK'
  | 'pageTokens'
> {
  /** Tokens of a sequence unless asked otherwise: enough that the indexer has a choice to make. */
  readonly context: number;
}

const nano = loadModelConfig(fileURLToPath(new URL('../model/nano', import.meta.url)));

/** By name: the embedded model, and one layer of DeepSeek-V4-Flash (its config.json). */
export const geometries: Readonly<Record<string, Geometry>> = {
  nano: { ...nano, context: 1024 },
  'flash-layer': {
    vocabSize: 129280,
    hiddenSize: 4096,
    heads: 64,
    headDim: 512,
    ropeDim: 64,
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
    pageTokens: 128,
    context: 4096,
  },
};

/** A call that is ready to be recorded, any number of times. */
export interface Work {
  /** What the rates depend on, apart from geometry and rows. */
  readonly parameters: Readonly<Record<string, number | string>>;
  /** Of one call, as the head of this file says. */
  readonly bytes: number;
  readonly flops: number;
  /** Record one call; `turn` counts them, for work that goes round several copies of a weight. */
  record(recorder: Recorder, turn: number): void;
}

/** How large a case is. `context` is at least `rows`. */
export interface CaseSize {
  readonly geometry: Geometry;
  readonly rows: number;
  /** Tokens of a sequence when the step is over. */
  readonly context: number;
}

/** One kernel in one of its forms. `prepare` throws a RangeError when the size does not suit the adapter or the kernel. */
export interface KernelCase {
  readonly kernel: string;
  readonly variant: string;
  readonly prepare: (material: Material, size: CaseSize) => Work;
}

/** Makes tensors for one case and frees them together. */
export interface Material {
  readonly device: Device;
  /** Uniform in [0, 1), from a fixed seed. */
  readonly random: () => number;
  /** Random numbers of [-1, 1), or random codes without NaN. */
  noise(dtype: Dtype, shape: readonly number[]): Tensor;
  filled(shape: readonly number[], values: Float32Array | Uint32Array): Tensor;
  /** Step metadata of these chunks. */
  step(chunks: readonly TestChunk[], sampled?: readonly number[]): TestStep;
  /** Own every tensor of a record that somebody else allocated. */
  keep<T extends object>(tensors: T): T;
  destroy(): void;
}

const SEED = 20260424;
/** Noise is repeated after so many bytes: making it takes longer than writing it. */
const NOISE_BYTES = 2 ** 20;
const noiseByDtype = new Map<Dtype, Uint8Array>();

export function createMaterial(device: Device): Material {
  const owned: Tensor[] = [];
  const random = createPrng(SEED);
  const allocate = (dtype: Dtype, shape: readonly number[]): Tensor => {
    const tensor = allocateTensor(device, { shape, dtype, label: `bench ${dtype}` });
    owned.push(tensor);
    return tensor;
  };
  const material: Material = {
    device,
    random,
    noise(dtype, shape) {
      const tensor = allocate(dtype, shape);
      const bytes = noiseOf(dtype);
      for (let offset = 0; offset < tensor.byteLength; offset += NOISE_BYTES) {
        uploadTensor(device, tensor, bytes.subarray(0, Math.min(NOISE_BYTES, tensor.byteLength - offset)), offset);
      }
      return tensor;
    },
    filled(shape, values) {
      const tensor = allocate(values instanceof Float32Array ? 'f32' : 'u32', shape);
      uploadTensor(device, tensor, values);
      return tensor;
    },
    step: (chunks, sampled = []) => material.keep(makeStep(device, chunks, { sampled })),
    keep(tensors) {
      for (const value of Object.values(tensors) as unknown[]) {
        if (typeof value === 'object' && value !== null && 'buffer' in value) owned.push(value as Tensor);
      }
      return tensors;
    },
    destroy() {
      for (const tensor of owned) destroyTensor(device, tensor);
    },
  };
  return material;
}

function noiseOf(dtype: Dtype): Uint8Array {
  const known = noiseByDtype.get(dtype);
  if (known) return known;
  const random = createPrng(SEED);
  const numbers = Float32Array.from({ length: NOISE_BYTES / 4 }, () => 2 * random() - 1);
  const bytes = Uint8Array.from({ length: NOISE_BYTES }, () => Math.floor(256 * random()));
  const pattern =
    dtype === 'f32'
      ? new Uint8Array(numbers.buffer)
      : dtype === 'bf16'
        ? new Uint8Array(Uint16Array.from({ length: NOISE_BYTES / 2 }, (_, i) => encodeBf16(numbers[i >> 1]!)).buffer)
        : dtype === 'e4m3'
          ? bytes.map((code) => ((code & 0x7f) === 0x7f ? code - 1 : code))
          : dtype === 'e8m0'
            ? bytes.map((code) => 120 + (code & 7))
            : bytes;
  noiseByDtype.set(dtype, pattern);
  return pattern;
}

/** One sequence whose last `rows` tokens are this step, as prefill has it. */
function chunkStep(material: Material, { geometry, rows, context }: CaseSize): TestStep {
  const start = context - rows;
  const tokens = Array.from({ length: rows }, () => Math.floor(material.random() * geometry.vocabSize));
  const sampled = tokens.map((_, row) => row);
  return material.step([{ start, tokens, pages: pagesOf(geometry, context, 0) }], sampled);
}

/** As many sequences as rows, each with its next token, as decode has it. */
function batchStep(material: Material, { geometry, rows, context }: CaseSize): TestStep {
  const chunks = Array.from({ length: rows }, (_, sequence) => ({
    start: context - 1,
    tokens: [Math.floor(material.random() * geometry.vocabSize)],
    pages: pagesOf(geometry, context, sequence),
  }));
  return material.step(chunks);
}

function pagesOf(geometry: Geometry, context: number, sequence: number): number[] {
  const count = Math.ceil(context / geometry.pageTokens);
  return Array.from({ length: count }, (_, page) => sequence * count + page);
}

function bytesOf(...tensors: readonly (Tensor | undefined)[]): number {
  return tensors.reduce((sum, tensor) => sum + (tensor?.byteLength ?? 0), 0);
}

const linearFormats: readonly LinearFormat[] = ['f32', 'bf16', 'e4m3', 'mxfp4', 'nvfp4'];

/** Scales of a matrix, or of `count` stacked ones of equal shape; f32 and bf16 have none. */
function scalesOf(
  material: Material,
  weight: { format: LinearFormat; count: number; parts: number; rows: number; columns: number; stacked: boolean },
): { scale?: Tensor; scale2?: Tensor } {
  const { format, count, parts, rows, columns, stacked } = weight;
  const shape = (perPart: number, width: number): number[] =>
    stacked ? [count, parts * perPart, width] : [perPart, width];
  if (format === 'e4m3') {
    return { scale: material.noise('f32', shape(Math.ceil(rows / 128), Math.ceil(columns / 128))) };
  }
  if (format === 'mxfp4') return { scale: material.noise('e8m0', shape(rows, columns / 32)) };
  if (format === 'nvfp4') {
    return {
      scale: material.noise('e4m3', shape(rows, columns / 16)),
      scale2: material.noise('f32', stacked ? [count, parts] : [1]),
    };
  }
  return {};
}

function storageOf(format: LinearFormat): Dtype {
  return format === 'mxfp4' || format === 'nvfp4' ? 'e2m1' : format;
}

function linearWeight(material: Material, format: LinearFormat, rows: number, columns: number): LinearWeight {
  const scales = scalesOf(material, { format, count: 1, parts: 1, rows, columns, stacked: false });
  return { format, weight: material.noise(storageOf(format), [rows, columns]), ...scales, rows, columns };
}

function expertWeight(
  material: Material,
  shape: { format: ExpertFormat; experts: number; parts: number; rows: number; columns: number },
): ExpertWeight {
  const { format, experts: count, parts, rows, columns } = shape;
  const scales = scalesOf(material, { format, count, parts, rows, columns, stacked: true });
  return { ...shape, weight: material.noise(storageOf(format), [count, parts * rows, columns]), ...scales };
}

function weightBytes(weight: LinearWeight | ExpertWeight): number {
  return bytesOf(weight.weight, weight.scale, weight.scale2);
}

// A layer's weights are used once a step, and by then the caches of a GPU hold those of other layers. So a large weight
// is timed from several copies in turn, together larger than any cache. Small models do stay in the caches.
const COPIES_FROM_BYTES = 16 * 2 ** 20;
const COPIES_BYTES = 256 * 2 ** 20;

/** `make` called as often as copies are needed. */
function copiesOf<T>(make: () => T, byteLength: (made: T) => number): T[] {
  const copies = [make()];
  const each = byteLength(copies[0]!);
  const count = each < COPIES_FROM_BYTES ? 1 : Math.ceil(COPIES_BYTES / each);
  while (copies.length < count) copies.push(make());
  return copies;
}

function linearCase(format: LinearFormat): KernelCase {
  return {
    kernel: 'linear',
    variant: format,
    prepare(material, size) {
      const { geometry, rows } = size;
      const { step } = chunkStep(material, size);
      // The second half of attention's output: the largest matrix outside of the experts and the head.
      const [outputs, columns] = [geometry.hiddenSize, geometry.outputGroups * geometry.outputRank];
      const weights = copiesOf(() => linearWeight(material, format, outputs, columns), weightBytes);
      const x = material.noise('f32', [rows, columns]);
      const out = material.noise('f32', [rows, outputs]);
      return {
        parameters: { outputs, columns, copies: weights.length },
        bytes: weightBytes(weights[0]!) + bytesOf(x, out),
        flops: 2 * rows * outputs * columns,
        record: (recorder, turn) =>
          linear(recorder, { x, weight: weights[turn % weights.length]!, out, step, rowCount: rows }),
      };
    },
  };
}

function expertsCase(format: LinearFormat): KernelCase {
  return {
    kernel: 'experts',
    variant: format,
    prepare(material, size) {
      const { geometry, rows } = size;
      const { hiddenSize: width, expertHiddenSize: hiddenWidth, expertsPerToken: chosenCount } = geometry;
      const { step } = chunkStep(material, size);
      // One buffer holds a matrix of all experts; some adapters do not bind as much, and then there are fewer of them.
      const bits = { f32: 32, bf16: 16, e4m3: 8, mxfp4: 4, nvfp4: 4 }[format];
      const fitting = Math.floor(bindableBytes(material.device) / ((2 * hiddenWidth * width * bits) / 8));
      if (fitting < chosenCount) throw new RangeError(`the adapter binds ${fitting} experts of ${format}`);
      const expertCount = Math.min(geometry.experts, fitting);
      const layers = copiesOf(
        () => ({
          gateUp: expertWeight(material, { format, experts: expertCount, parts: 2, rows: hiddenWidth, columns: width }),
          down: expertWeight(material, { format, experts: expertCount, parts: 1, rows: width, columns: hiddenWidth }),
        }),
        ({ gateUp, down }) => weightBytes(gateUp) + weightBytes(down),
      );
      // Each layer routes on its own, so that a copy's turn finds other experts than the one before.
      const routes = layers.map(() => routeRows(material, { rows, chosenCount, expertCount }));
      const distinct = Math.round(routes.reduce((sum, route) => sum + route.distinct, 0) / routes.length);
      const weights = material.noise('f32', [rows, chosenCount]);
      const x = material.noise('f32', [rows, width]);
      const shared = material.noise('f32', [rows, width]);
      const out = material.noise('f32', [rows, width]);
      const scratch = material.keep(
        allocateExpertScratch(material.device, { maxRows: rows, chosenCount, expertCount, hiddenWidth, width }),
      );
      const expertBytes = (weightBytes(layers[0]!.gateUp) + weightBytes(layers[0]!.down)) / expertCount;
      return {
        parameters: { experts: expertCount, chosen: chosenCount, distinct, width, hiddenWidth, copies: layers.length },
        bytes: distinct * expertBytes + bytesOf(routes[0]!.experts, weights, x, shared, out),
        flops: rows * chosenCount * 6 * hiddenWidth * width,
        record(recorder, turn) {
          const index = turn % layers.length;
          experts(recorder, {
            x,
            experts: routes[index]!.experts,
            weights,
            ...layers[index]!,
            shared,
            out,
            step,
            scratch,
            limit: geometry.swigluLimit,
            rowCount: rows,
          });
        },
      };
    },
  };
}

/** Random experts of every row, ascending and different from each other, and how many are used at all. */
function routeRows(
  material: Material,
  { rows, chosenCount, expertCount }: { rows: number; chosenCount: number; expertCount: number },
): { experts: Tensor; distinct: number } {
  const ids = new Uint32Array(rows * chosenCount);
  for (let row = 0; row < rows; row++) {
    const chosen = new Set<number>();
    while (chosen.size < chosenCount) chosen.add(Math.floor(material.random() * expertCount));
    ids.set(
      [...chosen].sort((left, right) => left - right),
      row * chosenCount,
    );
  }
  return { experts: material.filled([rows, chosenCount], ids), distinct: new Set(ids).size };
}

// As model/workspace.ts: scratch that grows with rows times keys is cut at this size.
const SCRATCH_BYTES = 32 * 2 ** 20;

function attentionCase(phase: 'prefill' | 'decode', ratio: number): KernelCase {
  return {
    kernel: `attention-${phase}`,
    variant: ratio === 0 ? 'window' : `ratio ${ratio}`,
    prepare(material, size) {
      const { geometry, rows, context } = size;
      const { heads, headDim, windowTokens, indexTopK } = geometry;
      const metadata = phase === 'prefill' ? chunkStep(material, size) : batchStep(material, size);
      const sequences = phase === 'prefill' ? 1 : rows;
      const pageCount = sequences * Math.ceil(context / geometry.pageTokens);
      const entriesAt = (position: number): number => (ratio === 0 ? 0 : Math.floor((position + 1) / ratio));
      const topk = ratio === OVERLAP_RATIO ? indexTopK : Infinity;
      const keysAt = (position: number): number =>
        Math.min(position + 1, windowTokens) + Math.min(entriesAt(position), topk);
      const positions = Array.from({ length: rows }, (_, row) =>
        phase === 'prefill' ? context - rows + row : context - 1,
      );

      const queries = material.noise('f32', [rows, heads, headDim]);
      const kv = material.noise('f32', [rows, headDim]);
      const ring = material.noise('f32', [sequences, windowTokens, headDim]);
      const out = material.noise('f32', [rows, heads, headDim]);
      const selected = topk < Infinity ? selectEvenly(material, positions.map(entriesAt), topk) : undefined;
      const compressed =
        ratio === 0
          ? undefined
          : { ratio, entries: material.noise('f32', [pageCount, geometry.pageTokens / ratio, headDim]), selected };
      const maxKeys = keysAt(context - 1);
      const rowsThatFit = (rowBytes: number): number =>
        Math.max(1, Math.min(rows, Math.floor(SCRATCH_BYTES / rowBytes)));
      const scratch = material.keep(
        allocateAttentionScratch(material.device, {
          blockRows: rowsThatFit(4 * heads * maxKeys),
          splitRows: rowsThatFit(4 * heads * headDim * Math.ceil(maxKeys / 64)),
          heads,
          headDim,
          maxKeys,
        }),
      );
      const args: AttentionArgs = {
        queries,
        kv,
        ring,
        sinks: material.noise('f32', [heads]),
        compressed,
        rows: metadata.rows,
        sequences: metadata.sequences,
        pageTable: metadata.pageTable,
        step: metadata.step,
        out,
        scratch,
        rowCount: rows,
        lastPosition: context - 1,
      };
      // What is in memory and needed by any row: one sequence's rows share most of it.
      const ringRows = sequences * Math.min(positions[0]!, windowTokens - 1);
      const entries =
        phase === 'prefill'
          ? Math.min(entriesAt(context - 1), rows * topk)
          : rows * Math.min(entriesAt(context - 1), topk);
      const keys = positions.reduce((sum, position) => sum + keysAt(position), 0);
      return {
        parameters: { context, heads, headDim, keysPerRow: Math.round(keys / rows) },
        bytes: bytesOf(queries, kv, out, selected) + 4 * headDim * (ringRows + entries),
        // Score and weighted sum; the softmax is a few operations in a thousand.
        flops: 4 * heads * headDim * keys,
        record: (recorder) => (phase === 'prefill' ? attentionPrefill : attentionDecode)(recorder, args),
      };
    },
  };
}

/** For each row `topk` entries, ascending and spread over those that it sees. */
function selectEvenly(material: Material, visible: readonly number[], topk: number): Tensor {
  const indices = new Uint32Array(visible.length * topk);
  for (const [row, count] of visible.entries()) {
    for (let slot = 0; slot < topk; slot++) indices[row * topk + slot] = Math.floor((slot * count) / topk);
  }
  return material.filled([visible.length, topk], indices);
}

const hadamardCase: KernelCase = {
  kernel: 'indexer',
  variant: 'hadamard',
  prepare(material, size) {
    const { geometry, rows } = size;
    const { indexHeads: heads, indexHeadDim: width } = geometry;
    const { step } = chunkStep(material, size);
    const queries = material.noise('f32', [rows, heads, width]);
    return {
      parameters: { heads, width },
      bytes: 2 * bytesOf(queries),
      flops: rows * heads * width * (Math.log2(width) + 1),
      record: (recorder) => hadamard(recorder, { queries, step, rowCount: rows }),
    };
  },
};

const selectCase = (precision: IndexPrecision): KernelCase => ({
  kernel: 'indexer',
  variant: `select ${precision}`,
  prepare(material, size) {
    const { geometry, rows, context } = size;
    const { indexHeads: heads, indexHeadDim: width, indexTopK: topk } = geometry;
    const metadata = chunkStep(material, size);
    const capacity = Math.floor(context / OVERLAP_RATIO);
    if (capacity <= topk) throw new RangeError(`${capacity} entries, all ${topk} are taken; needs a longer --context`);
    const queries = material.noise('f32', [rows, heads, width]);
    const headWeights = material.noise('f32', [rows, heads]);
    const pageCount = Math.ceil(context / geometry.pageTokens);
    // Words of f32 noise: what the bits mean in other precisions costs the same.
    const words = indexKeyWords(width, precision);
    const bits = material.noise('f32', [pageCount, geometry.pageTokens / OVERLAP_RATIO, words]);
    const keys = { ...bits, dtype: 'u32' } as const;
    const blockRows = Math.max(1, Math.min(rows, Math.floor(SCRATCH_BYTES / (4 * capacity))));
    const scores = material.noise('f32', [blockRows, capacity]);
    const selected = material.noise('u32', [rows, topk]);
    let scored = 0;
    for (let position = context - rows; position < context; position++) {
      const visible = Math.floor((position + 1) / OVERLAP_RATIO);
      if (visible > topk) scored += visible;
    }
    return {
      parameters: { context, heads, width, topk },
      bytes: bytesOf(queries, headWeights, keys, selected),
      flops: scored * heads * (2 * width + 2),
      record: (recorder) =>
        selectEntries(recorder, {
          queries,
          headWeights,
          keys,
          precision,
          scores,
          selected,
          rows: metadata.rows,
          pageTable: metadata.pageTable,
          step: metadata.step,
          ratio: OVERLAP_RATIO,
          rowCount: rows,
          lastPosition: context - 1,
        }),
    };
  },
});

function compressCase(variant: string, ratio: number, index: boolean): KernelCase {
  return {
    kernel: 'compress',
    variant,
    prepare(material, size) {
      const { geometry, rows, context } = size;
      const entryWidth = index ? geometry.indexHeadDim : geometry.headDim;
      const metadata = chunkStep(material, size);
      const tail = tailShape({ slotCount: 1, ratio, entryWidth });
      const [, ring, width] = tail;
      const k = material.noise('f32', [rows, width]);
      const z = material.noise('f32', [rows, width]);
      const ape = material.noise('f32', [ratio, width]);
      const pageCount = Math.ceil(context / geometry.pageTokens);
      const made = Math.floor(context / ratio) - Math.floor((context - rows) / ratio);
      const args = {
        k,
        z,
        ape,
        norm: material.noise('f32', [entryWidth]),
        tailK: material.noise('f32', tail),
        tailZ: material.noise('f32', tail),
        entries: material.noise('f32', [pageCount, geometry.pageTokens / ratio, entryWidth]),
        ...ropeTable(material, geometry, context),
        rows: metadata.rows,
        sequences: metadata.sequences,
        pageTable: metadata.pageTable,
        step: metadata.step,
        ratio,
        eps: geometry.normEps,
        hadamard: index,
        rowCount: rows,
      };
      // Read from the tails: what the first entry of this step needs and the step does not have. Written: the last rows.
      const tailRead = made === 0 ? 0 : Math.max(0, ring - 1 - ((context - rows) % ratio === 0 ? ratio - 1 : 0));
      const tailWritten = Math.min(rows, ring);
      const pooled = made * entryWidth * (5 * ring + 4 + (index ? Math.log2(entryWidth) + 1 : 0));
      return {
        parameters: { context, ratio, entryWidth, entries: made },
        bytes: bytesOf(k, z, ape) + 4 * (2 * width * (tailRead + tailWritten) + made * entryWidth),
        flops: pooled + made * 3 * geometry.ropeDim + rows * width,
        record: (recorder) => compress(recorder, args),
      };
    },
  };
}

/** Rotations by the angles of a base of 10000. */
function ropeTable(material: Material, geometry: Geometry, positions: number): { cos: Tensor; sin: Tensor } {
  const pairs = geometry.ropeDim / 2;
  const angles = Float64Array.from(
    { length: positions * pairs },
    (_, index) => Math.floor(index / pairs) * 10000 ** (-(index % pairs) / pairs),
  );
  return {
    cos: material.filled([positions, pairs], Float32Array.from(angles, Math.cos)),
    sin: material.filled([positions, pairs], Float32Array.from(angles, Math.sin)),
  };
}

function gateCase(variant: 'scored' | 'hashed'): KernelCase {
  return {
    kernel: 'gate',
    variant,
    prepare(material, size) {
      const { geometry, rows } = size;
      const { experts: expertCount, expertsPerToken: chosenCount, vocabSize, routeScale: scale } = geometry;
      const metadata = chunkStep(material, size);
      const logits = material.noise('f32', [rows, expertCount]);
      const bias = variant === 'scored' ? material.noise('f32', [expertCount]) : undefined;
      const tokenExperts =
        variant === 'hashed' ? routeRows(material, { rows: vocabSize, chosenCount, expertCount }).experts : undefined;
      const chosen = material.noise('u32', [rows, chosenCount]);
      const weights = material.noise('f32', [rows, chosenCount]);
      // A table is read for the chosen experts only, and their scores are the only ones needed.
      const scored = variant === 'scored' ? expertCount : chosenCount;
      return {
        parameters: { experts: expertCount, chosen: chosenCount },
        bytes: 4 * rows * scored + bytesOf(bias, chosen, weights) + (tokenExperts ? bytesOf(chosen) : 0),
        // softplus (exponential, addition, logarithm), root and bias; sum, division and scale of the chosen
        flops: rows * (scored * 5 + chosenCount * 3),
        record: (recorder) =>
          gate(recorder, {
            logits,
            bias,
            tokenExperts,
            rows: metadata.rows,
            step: metadata.step,
            experts: chosen,
            weights,
            scale,
            rowCount: rows,
          }),
      };
    },
  };
}

function hyperCase(variant: 'pre' | 'post' | 'head'): KernelCase {
  return {
    kernel: 'hyper-connection',
    variant,
    prepare(material, size) {
      const { geometry, rows } = size;
      const { streams: count, hiddenSize, sinkhornIterations: iterations } = geometry;
      const { step, sampled } = chunkStep(material, size);
      const config = { normEps: geometry.normEps, eps: geometry.hcEps, iterations };
      const parameters = { streams: count, width: hiddenSize };
      const streams = material.noise('f32', [rows, count, hiddenSize]);
      const y = material.noise('f32', [rows, hiddenSize]);
      if (variant === 'post') {
        const post = material.noise('f32', [rows, count]);
        // Averages: applied in place thousands of times they neither grow nor vanish.
        const comb = material.filled([rows, count, count], new Float32Array(rows * count * count).fill(1 / count));
        return {
          parameters,
          bytes: 2 * bytesOf(streams) + bytesOf(y, post, comb),
          flops: rows * count * hiddenSize * (2 * count + 1),
          record: (recorder) => hyperPost(recorder, { streams, y, post, comb, step, rowCount: rows }),
        };
      }
      const gates = variant === 'pre' ? (2 + count) * count : count;
      const mix = material.noise('f32', [rows, gates]);
      const base = material.noise('f32', [gates]);
      const scale = material.noise('f32', [variant === 'pre' ? 3 : 1]);
      // The norm of the streams and their weighted sum.
      const flops = rows * 4 * count * hiddenSize;
      if (variant === 'head') {
        const args = { streams, mix, base, scale, sampled, out: y, config, step, sampledCount: rows };
        return {
          parameters,
          bytes: bytesOf(streams, mix, y),
          flops,
          record: (recorder) => hyperHead(recorder, args),
        };
      }
      const post = material.noise('f32', [rows, count]);
      const comb = material.noise('f32', [rows, count, count]);
      return {
        parameters: { ...parameters, iterations },
        bytes: bytesOf(streams, mix, y, post, comb),
        // An iteration sums and divides rows, then columns.
        flops: flops + rows * iterations * 4 * count * count,
        record: (recorder) =>
          hyperPre(recorder, { streams, mix, base, scale, y, post, comb, config, step, rowCount: rows }),
      };
    },
  };
}

function rmsnormCase(variant: 'weighted' | 'heads in place'): KernelCase {
  return {
    kernel: 'rmsnorm',
    variant,
    prepare(material, size) {
      const { geometry, rows } = size;
      const { step } = chunkStep(material, size);
      const common = { step, eps: geometry.normEps, rowCount: rows };
      if (variant === 'weighted') {
        const x = material.noise('f32', [rows, geometry.hiddenSize]);
        const out = material.noise('f32', [rows, geometry.hiddenSize]);
        const weight = material.noise('f32', [geometry.hiddenSize]);
        return {
          parameters: { columns: geometry.hiddenSize },
          bytes: bytesOf(x, out, weight),
          flops: 4 * rows * geometry.hiddenSize,
          record: (recorder) => rmsnorm(recorder, { x, weight, out, ...common }),
        };
      }
      const x = material.noise('f32', [rows, geometry.heads, geometry.headDim]);
      return {
        parameters: { heads: geometry.heads, columns: geometry.headDim },
        bytes: 2 * bytesOf(x),
        flops: 3 * rows * geometry.heads * geometry.headDim,
        record: (recorder) => rmsnorm(recorder, { x, out: x, ...common }),
      };
    },
  };
}

const ropeCase: KernelCase = {
  kernel: 'rope',
  variant: 'queries',
  prepare(material, size) {
    const { geometry, rows, context } = size;
    const { heads, headDim, ropeDim } = geometry;
    const metadata = chunkStep(material, size);
    const x = material.noise('f32', [rows, heads, headDim]);
    const table = ropeTable(material, geometry, context);
    return {
      parameters: { heads, headDim, ropeDim },
      bytes: 4 * rows * (2 * heads * ropeDim + ropeDim),
      flops: rows * heads * 3 * ropeDim,
      record: (recorder) =>
        rope(recorder, { x, rows: metadata.rows, ...table, inverse: false, step: metadata.step, rowCount: rows }),
    };
  },
};

const embedCase: KernelCase = {
  kernel: 'embed',
  variant: 'bf16',
  prepare(material, size) {
    const { geometry, rows } = size;
    const { vocabSize, hiddenSize, streams } = geometry;
    const metadata = chunkStep(material, size);
    // The whole table does not fit every adapter; ids past its end read the last row.
    const fitting = Math.min(vocabSize, Math.floor(bindableBytes(material.device) / (2 * hiddenSize)));
    const table = linearWeight(material, 'bf16', fitting, hiddenSize);
    const out = material.noise('f32', [rows, streams, hiddenSize]);
    return {
      parameters: { vocabulary: fitting, width: hiddenSize, streams },
      bytes: 2 * rows * hiddenSize + bytesOf(out),
      flops: 0,
      record: (recorder) => embed(recorder, { rows: metadata.rows, table, out, step: metadata.step, rowCount: rows }),
    };
  },
};

const swigluCase: KernelCase = {
  kernel: 'swiglu',
  variant: 'shared expert',
  prepare(material, size) {
    const { geometry, rows } = size;
    const { step } = chunkStep(material, size);
    const columns = geometry.expertHiddenSize;
    const [gateValues, up, out] = [0, 1, 2].map(() => material.noise('f32', [rows, columns])) as [
      Tensor,
      Tensor,
      Tensor,
    ];
    return {
      parameters: { columns },
      bytes: bytesOf(gateValues, up, out),
      // exponential, addition, division, two multiplications
      flops: 5 * rows * columns,
      record: (recorder) =>
        swiglu(recorder, { gate: gateValues, up, out, limit: geometry.swigluLimit, step, rowCount: rows }),
    };
  },
};

function sampleCase(variant: string, row: Omit<SamplingRow, 'position'>): KernelCase {
  return {
    kernel: 'sample',
    variant,
    prepare(material, size) {
      const { geometry, rows } = size;
      const vocabulary = geometry.vocabSize;
      const { step } = chunkStep(material, size);
      const logits = material.noise('f32', [rows, vocabulary]);
      const words = new Uint32Array(rows * SAMPLING_WORDS);
      for (let index = 0; index < rows; index++) writeSamplingRow(words, index, { ...row, position: index });
      const sampling = material.filled([rows, SAMPLING_WORDS], words);
      const tokens = material.noise('u32', [rows]);
      return {
        parameters: { vocabulary, topK: row.topK, topP: row.topP },
        bytes: bytesOf(logits, sampling, tokens),
        // One probability each: difference, scale, exponential, sum. The search only compares them again.
        flops: row.temperature === 0 ? 0 : 4 * rows * vocabulary,
        record: (recorder) => sample(recorder, { logits, sampling, tokens, step, sampledCount: rows }),
      };
    },
  };
}

const windowCase: KernelCase = {
  kernel: 'window',
  variant: 'append',
  prepare(material, size) {
    const { geometry, rows } = size;
    const metadata = chunkStep(material, size);
    const kv = material.noise('f32', [rows, geometry.headDim]);
    const ring = material.noise('f32', [1, geometry.windowTokens, geometry.headDim]);
    const { sequences, step } = metadata;
    return {
      parameters: { window: geometry.windowTokens, width: geometry.headDim },
      // Rows that the window has left again are neither read nor written.
      bytes: 2 * 4 * Math.min(rows, geometry.windowTokens) * geometry.headDim,
      flops: 0,
      record: (recorder) => appendWindow(recorder, { kv, ring, rows: metadata.rows, sequences, step, rowCount: rows }),
    };
  },
};

/** Everything in kernels/, in the order of a layer. */
export const kernelCases: readonly KernelCase[] = [
  embedCase,
  ...(['pre', 'post', 'head'] as const).map(hyperCase),
  ...(['weighted', 'heads in place'] as const).map(rmsnormCase),
  ...linearFormats.map(linearCase),
  ropeCase,
  compressCase('ratio 4', OVERLAP_RATIO, false),
  compressCase('ratio 128', 128, false),
  compressCase('index keys', OVERLAP_RATIO, true),
  hadamardCase,
  ...(['f32', 'bf16', 'fp8', 'fp4'] as const).map(selectCase),
  ...(['prefill', 'decode'] as const).flatMap((phase) =>
    [0, OVERLAP_RATIO, 128].map((ratio) => attentionCase(phase, ratio)),
  ),
  windowCase,
  ...(['scored', 'hashed'] as const).map(gateCase),
  swigluCase,
  ...linearFormats.map(expertsCase),
  sampleCase('greedy', { temperature: 0, topK: 0, topP: 1, minP: 0, seed: 1 }),
  sampleCase('top-k and top-p', { temperature: 1, topK: 40, topP: 0.9, minP: 0, seed: 1 }),
];

/** The largest buffer that a kernel can see whole, in bytes. */
export function bindableBytes(device: Device): number {
  // 256: everything that is allocated by this number should divide evenly.
  return Math.floor(device.bindingBytes / 256) * 256;
}
