/**
 * Every buffer of a step: activations, scratch, rotation tables and the step's description. Allocated once, for the
 * largest step; a step uses the first rows of each.
 */
import { allocateAttentionScratch, type AttentionScratch } from '../kernels/attention-prefill.ts';
import type { Device } from '../kernels/device.ts';
import type { Dtype } from '../kernels/dtype.ts';
import { allocateExpertScratch, type ExpertScratch } from '../kernels/experts.ts';
import { SAMPLING_WORDS } from '../kernels/sample.ts';
import { allocateTensor, uploadTensor, type Tensor } from '../kernels/tensor.ts';
import { allocateChoiceWorkspace, maxEditsOf, type ChoiceWorkspace } from './choice.ts';
import { OVERLAP_RATIO, type ModelConfig } from './config.ts';

/** Largest step, and the longest sequence. */
export interface ModelLimits {
  readonly maxRows: number;
  readonly maxSequences: number;
  readonly maxPositions: number;
  /** Pages of the longest sequence. */
  readonly maxPages: number;
  /** Rows that one step can sample, or whose logits it can make. */
  readonly maxSampled: number;
  /** Changes of single logits in one step (kernels/rules.ts). */
  readonly maxEdits: number;
}

/** The step's description on the device; see `writeStep` in transformer.ts. */
export interface StepTensors {
  /** u32 [4]: row count, sequence count, sampled count, 0. */
  readonly step: Tensor;
  /** u32 [maxRows, 4]: token, position, sequence, index inside its chunk. */
  readonly rows: Tensor;
  /** u32 [maxSequences, 4]: slot, first position of the chunk, its first row, its rows. */
  readonly sequences: Tensor;
  /** u32 [maxSequences, maxPages]. */
  readonly pageTable: Tensor;
  /** u32 [maxSampled]: rows whose logits are wanted. */
  readonly sampled: Tensor;
  /** u32 [maxSampled, SAMPLING_WORDS]. */
  readonly sampling: Tensor;
}

/** f32 [maxPositions, R / 2] each. */
export interface RopeTable {
  readonly cos: Tensor;
  readonly sin: Tensor;
}

/** Projections that a compressor pools: f32 [maxRows, c d] each. */
export interface CompressorWorkspace {
  readonly key: Tensor;
  readonly gate: Tensor;
}

export interface IndexerWorkspace {
  readonly queries: Tensor;
  readonly headWeights: Tensor;
  /** f32 [blockRows, maxEntries]. */
  readonly scores: Tensor;
  /** u32 [maxRows, topK]. */
  readonly selected: Tensor;
  readonly compressor: CompressorWorkspace;
  /** f32 [maxRows, index d]: keys that the step completes, before they are packed. */
  readonly keys: Tensor;
}

export interface AttentionWorkspace {
  readonly queryRank: Tensor;
  readonly queries: Tensor;
  readonly keyValue: Tensor;
  /** By ratio of the layer. */
  readonly compressors: ReadonlyMap<number, CompressorWorkspace>;
  readonly indexer: IndexerWorkspace | null;
  readonly heads: Tensor;
  readonly outputRank: Tensor;
  readonly scratch: AttentionScratch;
}

export interface MoeWorkspace {
  readonly scores: Tensor;
  readonly experts: Tensor;
  readonly weights: Tensor;
  readonly gate: Tensor;
  readonly up: Tensor;
  readonly hidden: Tensor;
  readonly shared: Tensor;
  readonly scratch: ExpertScratch;
}

export interface Workspace {
  readonly limits: ModelLimits;
  readonly steps: StepTensors;
  readonly ropeMain: RopeTable;
  readonly ropeCompressed: RopeTable;
  /** The residual, f32 [maxRows, n, D]. */
  readonly streams: Tensor;
  readonly mix: Tensor;
  readonly post: Tensor;
  readonly comb: Tensor;
  /** A block's input before and after its norm, and its output: f32 [maxRows, D]. */
  readonly hidden: Tensor;
  readonly normed: Tensor;
  readonly blockOut: Tensor;
  /** `normed` rounded to e4m3, for the mode that rounds the inputs of linears; else null. */
  readonly roundedNormed: Tensor | null;
  readonly attention: AttentionWorkspace;
  readonly moe: MoeWorkspace;
  readonly headMix: Tensor;
  /** f32 [maxSampled, D]. */
  readonly headHidden: Tensor;
  readonly headNormed: Tensor;
  /** f32 [maxSampled, V]. */
  readonly logits: Tensor;
  /** u32 [maxSampled]. */
  readonly tokens: Tensor;
  readonly choice: ChoiceWorkspace;
}

// Scratch that grows with rows times keys is cut at this size, or at what the adapter binds; kernels then go through the rows block by block.
const SCRATCH_BYTES = 32 * 1024 * 1024;
// Logits of one step: enough for every sequence, and as many rows as fit for the tools.
const LOGITS_BYTES = 64 * 1024 * 1024;

/**
 * Limits of a workspace, derived from what the caller asks for and from what the adapter binds at once: `forward` runs
 * larger batches as several steps. With `mtp` a sequence may have a draft in each step.
 */
export function modelLimits(
  device: Device,
  config: ModelConfig,
  asked: { maxRows: number; maxSequences: number; maxPositions: number; mtp?: boolean },
): ModelLimits {
  const maxPositions = Math.min(asked.maxPositions, config.maxPositions);
  const rowsThatBind = (elements: number): number => Math.floor(device.bindingBytes / (4 * elements));
  const sampledRows = (asked.mtp ? 2 : 1) * asked.maxSequences;
  const maxRows = Math.min(Math.max(asked.maxRows, sampledRows), rowsThatBind(widestRow(config)));
  return {
    maxRows,
    maxSequences: asked.maxSequences,
    maxPositions,
    maxPages: Math.ceil(maxPositions / config.pageTokens),
    maxEdits: maxEditsOf(device, config.vocabSize),
    maxSampled: Math.min(
      maxRows,
      rowsThatBind(config.vocabSize),
      Math.max(sampledRows, Math.floor(LOGITS_BYTES / (4 * config.vocabSize))),
    ),
  };
}

// Elements of the largest thing that the workspace holds once a row.
function widestRow(config: ModelConfig): number {
  const { hiddenSize, streams, heads, headDim, indexHeads, indexHeadDim, outputGroups, outputRank } = config;
  return Math.max(
    streams * hiddenSize,
    heads * headDim,
    indexHeads * indexHeadDim,
    outputGroups * outputRank,
    config.expertsPerToken * Math.max(hiddenSize, config.expertHiddenSize),
    config.indexTopK,
    config.experts,
  );
}

/** Allocate everything. It lives as long as the device. The rotation tables are still to be filled: `writeRopeTables`. */
export function allocateWorkspace(device: Device, config: ModelConfig, limits: ModelLimits): Workspace {
  const { maxRows, maxSampled } = limits;
  const { hiddenSize, streams, vocabSize } = config;
  const allocate = (label: string, shape: readonly number[], dtype: Dtype = 'f32'): Tensor =>
    allocateTensor(device, { shape, dtype, label });
  const rope = (name: string): RopeTable => {
    const shape = [limits.maxPositions, config.ropeDim / 2];
    return { cos: allocate(`rope ${name} cos`, shape), sin: allocate(`rope ${name} sin`, shape) };
  };
  return {
    limits,
    steps: allocateStepTensors(device, limits),
    ropeMain: rope('main'),
    ropeCompressed: rope('compressed'),
    streams: allocate('streams', [maxRows, streams, hiddenSize]),
    mix: allocate('mix', [maxRows, (2 + streams) * streams]),
    post: allocate('post', [maxRows, streams]),
    comb: allocate('comb', [maxRows, streams, streams]),
    hidden: allocate('hidden', [maxRows, hiddenSize]),
    normed: allocate('normed', [maxRows, hiddenSize]),
    blockOut: allocate('block out', [maxRows, hiddenSize]),
    roundedNormed: config.mode === 'q-inputs' ? allocate('rounded normed', [maxRows, hiddenSize]) : null,
    attention: allocateAttention(device, config, limits, allocate),
    moe: allocateMoe(device, config, limits, allocate),
    headMix: allocate('head mix', [maxRows, streams]),
    headHidden: allocate('head hidden', [maxSampled, hiddenSize]),
    headNormed: allocate('head normed', [maxSampled, hiddenSize]),
    logits: allocate('logits', [maxSampled, vocabSize]),
    tokens: allocate('tokens', [maxSampled], 'u32'),
    choice: allocateChoiceWorkspace(device, config, limits),
  };
}

/** The description of one step at most as large as the limits. */
export function allocateStepTensors(device: Device, limits: ModelLimits, prefix = ''): StepTensors {
  const { maxRows, maxSequences, maxSampled, maxPages } = limits;
  const allocate = (label: string, shape: readonly number[]): Tensor =>
    allocateTensor(device, { shape, dtype: 'u32', label: prefix + label });
  return {
    step: allocate('step', [4]),
    rows: allocate('rows', [maxRows, 4]),
    sequences: allocate('sequences', [maxSequences, 4]),
    pageTable: allocate('page table', [maxSequences, maxPages]),
    sampled: allocate('sampled', [maxSampled]),
    sampling: allocate('sampling', [maxSampled, SAMPLING_WORDS]),
  };
}

type Allocate = (label: string, shape: readonly number[], dtype?: Dtype) => Tensor;

function allocateAttention(
  device: Device,
  config: ModelConfig,
  limits: ModelLimits,
  allocate: Allocate,
): AttentionWorkspace {
  const { maxRows, maxPositions } = limits;
  const { heads, headDim, indexHeads, indexHeadDim, indexTopK } = config;
  const compressor = (ratio: number, dim: number, label: string): CompressorWorkspace => {
    const shape = [maxRows, ratio === OVERLAP_RATIO ? 2 * dim : dim];
    return { key: allocate(`${label} key`, shape), gate: allocate(`${label} gate`, shape) };
  };
  const ratios = [...new Set(config.layers.map((layer) => layer.ratio))].filter((ratio) => ratio > 0);
  const maxEntries = Math.max(1, Math.floor(maxPositions / OVERLAP_RATIO));
  const rowsThatFit = (rowBytes: number): number =>
    Math.max(1, Math.min(maxRows, Math.floor(Math.min(SCRATCH_BYTES, device.bindingBytes) / rowBytes)));
  const maxKeys = mostKeys(config, maxPositions);
  return {
    queryRank: allocate('query rank', [maxRows, config.queryRank]),
    queries: allocate('queries', [maxRows, heads, headDim]),
    keyValue: allocate('key value', [maxRows, headDim]),
    compressors: new Map(ratios.map((ratio) => [ratio, compressor(ratio, headDim, `compressor ${ratio}`)])),
    indexer: ratios.includes(OVERLAP_RATIO)
      ? {
          queries: allocate('index queries', [maxRows, indexHeads, indexHeadDim]),
          headWeights: allocate('index head weights', [maxRows, indexHeads]),
          scores: allocate('index scores', [rowsThatFit(4 * maxEntries), maxEntries]),
          selected: allocate('selected entries', [maxRows, indexTopK], 'u32'),
          compressor: compressor(OVERLAP_RATIO, indexHeadDim, 'index compressor'),
          keys: allocate('index keys', [maxRows, indexHeadDim]),
        }
      : null,
    heads: allocate('head outputs', [maxRows, heads, headDim]),
    outputRank: allocate('output rank', [maxRows, config.outputGroups * config.outputRank]),
    scratch: allocateAttentionScratch(device, {
      blockRows: rowsThatFit(4 * heads * maxKeys),
      splitRows: Math.min(limits.maxSequences, rowsThatFit(4 * heads * headDim * Math.ceil(maxKeys / 64))),
      heads,
      headDim,
      maxKeys,
    }),
  };
}

// Keys of one query in the layer that has the most of them.
function mostKeys(config: ModelConfig, maxPositions: number): number {
  const counts = config.layers.map(({ ratio }) => {
    const entries = ratio === 0 ? 0 : Math.floor(maxPositions / ratio);
    return ratio === OVERLAP_RATIO ? Math.min(entries, config.indexTopK) : entries;
  });
  return config.windowTokens + Math.max(0, ...counts);
}

function allocateMoe(device: Device, config: ModelConfig, limits: ModelLimits, allocate: Allocate): MoeWorkspace {
  const { maxRows } = limits;
  const { hiddenSize, expertHiddenSize, experts, expertsPerToken } = config;
  return {
    scores: allocate('router scores', [maxRows, experts]),
    experts: allocate('chosen experts', [maxRows, expertsPerToken], 'u32'),
    weights: allocate('expert weights', [maxRows, expertsPerToken]),
    gate: allocate('shared gate', [maxRows, expertHiddenSize]),
    up: allocate('shared up', [maxRows, expertHiddenSize]),
    hidden: allocate('shared hidden', [maxRows, expertHiddenSize]),
    shared: allocate('shared out', [maxRows, hiddenSize]),
    scratch: allocateExpertScratch(device, {
      maxRows,
      chosenCount: expertsPerToken,
      expertCount: experts,
      hiddenWidth: expertHiddenSize,
      width: hiddenSize,
    }),
  };
}

/**
 * Angles per position of the R/2 rotated pairs, for sliding layers and for compressed ones (YaRN).
 *
 * Every step is rounded to f32: the reference computes them so, and at half a million positions the last bit of a
 * frequency moves the angle by 0.03. Section 3.4 and appendix B of the model description.
 */
export function ropeFrequencies(config: ModelConfig): { main: Float32Array; compressed: Float32Array } {
  const { ropeDim, ropeTheta, compressRopeTheta, yarn } = config;
  const plain = (theta: number): Float32Array =>
    Float32Array.from({ length: ropeDim / 2 }, (_, pair) => 1 / Math.fround(theta ** ((2 * pair) / ropeDim)));
  const compressed = plain(compressRopeTheta);
  if (yarn) {
    const turns = (beta: number): number =>
      (ropeDim * Math.log(yarn.originalMaxPositions / (beta * 2 * Math.PI))) / (2 * Math.log(compressRopeTheta));
    const low = Math.max(Math.floor(turns(yarn.betaFast)), 0);
    const last = Math.min(Math.ceil(turns(yarn.betaSlow)), ropeDim - 1);
    const high = last === low ? low + 0.001 : last;
    for (const [pair, base] of compressed.entries()) {
      const ramp = Math.fround(Math.min(Math.max((pair - low) / (high - low), 0), 1));
      const slowed = Math.fround(Math.fround(base / yarn.factor) * ramp);
      compressed[pair] = slowed + Math.fround(base * Math.fround(1 - ramp));
    }
  }
  return { main: plain(ropeTheta), compressed };
}

// Positions whose angles are made at once: their host memory does not grow with the longest sequence.
const ROPE_BLOCK_POSITIONS = 16_384;

/** Fill the rotation tables, once, before the first step. */
export function writeRopeTables(device: Device, config: ModelConfig, workspace: Workspace): void {
  const frequencies = ropeFrequencies(config);
  writeRopeTable(device, workspace.ropeMain, frequencies.main);
  writeRopeTable(device, workspace.ropeCompressed, frequencies.compressed);
}

function writeRopeTable(device: Device, table: RopeTable, frequencies: Float32Array): void {
  const [maxPositions = 0, pairs = 0] = table.cos.shape;
  for (let start = 0; start < maxPositions; start += ROPE_BLOCK_POSITIONS) {
    const positions = Math.min(ROPE_BLOCK_POSITIONS, maxPositions - start);
    const cos = new Float32Array(positions * pairs);
    const sin = new Float32Array(positions * pairs);
    for (let position = 0; position < positions; position++) {
      for (let pair = 0; pair < pairs; pair++) {
        const angle = Math.fround((start + position) * frequencies[pair]!);
        cos[position * pairs + pair] = Math.cos(angle);
        sin[position * pairs + pair] = Math.sin(angle);
      }
    }
    const offsetBytes = start * pairs * Float32Array.BYTES_PER_ELEMENT;
    uploadTensor(device, table.cos, cos, offsetBytes);
    uploadTensor(device, table.sin, sin, offsetBytes);
  }
}
