/**
 * The draft block: from a position's residual streams and the token after it, it predicts the token after that. One more
 * sliding-window layer with a head of its own; embedding and output matrix are the model's. Section 5 of the model
 * description.
 *
 * A step that drafts runs it behind the model, on the step's own rows. Its past is a window whose row of position t
 * comes from position t's streams and token t + 1, nothing else; so after a prompt it is enough to run it on the last W
 * positions, and what a sequence keeps of it is that window and the draft (kv-cache.ts).
 */
import type { Device } from '../kernels/device.ts';
import {
  DRAFTING_WORDS,
  gatherRows,
  judgeDrafts,
  keepDrafts,
  NO_ROW,
  placeDrafts,
  type DraftingArgs,
} from '../kernels/draft.ts';
import { embed } from '../kernels/embed.ts';
import { hyperPost } from '../kernels/hyper-connection.ts';
import type { LinearWeight } from '../kernels/linear.ts';
import { rmsnorm } from '../kernels/rmsnorm.ts';
import { sample, SAMPLING_WORDS, writeSamplingRow, type SamplingRow } from '../kernels/sample.ts';
import { allocateTensor, reshapeTensor, uploadTensor, type Tensor } from '../kernels/tensor.ts';
import type { BlockContext, StepShape } from './attention.ts';
import type { ModelConfig } from './config.ts';
import type { DraftCache } from './kv-cache.ts';
import { recordHead, recordLayer } from './layer.ts';
import { recordLinear, recordRounding } from './rounding.ts';
import type { ModelWeights, MtpWeights } from './weights.ts';
import { allocateStepTensors, type ModelLimits, type StepTensors } from './workspace.ts';

/** What the draft block needs beside the model's workspace. */
export interface MtpWorkspace {
  /** The block's own step, behind the model's. */
  readonly steps: StepTensors;
  /** u32 [maxRows]: the model's row whose streams each row takes. */
  readonly sources: Tensor;
  /** u32 [maxSequences, DRAFTING_WORDS]: see kernels/draft.ts. */
  readonly drafting: Tensor;
  /** u32 [maxSampled]: the new drafts. */
  readonly drafts: Tensor;
  /** f32 [maxRows, n, D]: the streams after their norm. */
  readonly normed: Tensor;
  /** u32 [4]: a step in which every stream is a row. */
  readonly streamStep: Tensor;
  /** f32 [maxRows, n], all one, and f32 [maxRows, n, n], identities: they turn a hyper-connection into a plain sum. */
  readonly post: Tensor;
  readonly comb: Tensor;
}

export function allocateMtpWorkspace(device: Device, config: ModelConfig, limits: ModelLimits): MtpWorkspace {
  const { streams: n, hiddenSize } = config;
  const { maxRows, maxSequences, maxSampled } = limits;
  const allocate = (label: string, shape: readonly number[], dtype: 'f32' | 'u32'): Tensor =>
    allocateTensor(device, { shape, dtype, label: `draft ${label}` });
  const post = allocate('post', [maxRows, n], 'f32');
  const comb = allocate('comb', [maxRows, n, n], 'f32');
  uploadTensor(device, post, new Float32Array(maxRows * n).fill(1));
  uploadTensor(
    device,
    comb,
    Float32Array.from({ length: maxRows * n * n }, (_, index) => ((index % (n * n)) % (n + 1) === 0 ? 1 : 0)),
  );
  return {
    steps: allocateStepTensors(device, limits, 'draft '),
    sources: allocate('sources', [maxRows], 'u32'),
    drafting: allocate('sequences that get one', [maxSequences, DRAFTING_WORDS], 'u32'),
    drafts: allocate('tokens', [maxSampled], 'u32'),
    normed: allocate('normed streams', [maxRows, n, hiddenSize], 'f32'),
    streamStep: allocate('stream step', [4], 'u32'),
    post,
    comb,
  };
}

/** One sequence's chunk as the draft block sees it, once the model has computed it. */
export interface DraftChunk {
  readonly slot: number;
  /** Position of the chunk's first token, and its row in the model's step. */
  readonly start: number;
  readonly firstRow: number;
  /** The token that follows each row: its id, or SAMPLED plus the index of a sample. The last rows may have none. */
  readonly next: ArrayLike<number>;
  /** Set if the chunk's last row is a draft: the index of the sample that checks it. The next sample is the one behind. */
  readonly checkedBy: number | null;
  /** How the new draft is chosen; null: none is. */
  readonly sampling: Omit<SamplingRow, 'position'> | null;
}

/**
 * Describe the block's step to the device. At most `rowsEach` rows are taken of a chunk, its last.
 *
 * @returns its shape; no row at all when nothing is known of what follows.
 */
export function writeDraftStep(
  device: Device,
  buffers: MtpWorkspace,
  args: { phase: StepShape['phase']; chunks: readonly DraftChunk[]; rowsEach: number },
): StepShape {
  const { phase, rowsEach } = args;
  const chunks = args.chunks.filter(({ next }) => next.length > 0);
  const countOf = ({ next }: DraftChunk): number => Math.min(next.length, rowsEach);
  const rowCount = chunks.reduce((sum, chunk) => sum + countOf(chunk), 0);
  const sampledCount = chunks.filter(({ sampling }) => sampling).length;
  const rows = new Uint32Array(rowCount * 4);
  const sources = new Uint32Array(rowCount);
  const sequences = new Uint32Array(chunks.length * 4);
  const drafting = new Uint32Array(sampledCount * DRAFTING_WORDS);
  const sampling = new Uint32Array(sampledCount * SAMPLING_WORDS);
  let row = 0;
  let drafts = 0;
  let lastPosition = 0;
  for (const [index, chunk] of chunks.entries()) {
    const { slot, next, checkedBy } = chunk;
    const count = countOf(chunk);
    const skipped = next.length - count;
    const start = chunk.start + skipped;
    sequences.set([slot, start, row, count], index * 4);
    for (let offset = 0; offset < count; offset++) {
      rows.set([next[skipped + offset]!, start + offset, index, offset], (row + offset) * 4);
      sources[row + offset] = chunk.firstRow + skipped + offset;
    }
    row += count;
    lastPosition = Math.max(lastPosition, start + count - 1);
    if (!chunk.sampling) continue;
    // The row that is last if the draft turns out wrong. What it predicts stands two positions further on.
    const sure = checkedBy === null ? count - 1 : count - 2;
    const draftedRow = checkedBy === null ? NO_ROW : chunk.firstRow + next.length - 1;
    drafting.set([slot, draftedRow, checkedBy ?? 0, row - count + sure], drafts * DRAFTING_WORDS);
    writeSamplingRow(sampling, drafts, { ...chunk.sampling, position: start + sure + 2 });
    drafts++;
  }

  const { steps } = buffers;
  uploadTensor(device, steps.step, Uint32Array.of(rowCount, chunks.length, sampledCount, 0));
  if (rowCount > 0) {
    uploadTensor(device, steps.rows, rows);
    uploadTensor(device, steps.sequences, sequences);
    uploadTensor(device, buffers.sources, sources);
  }
  if (sampledCount > 0) {
    uploadTensor(device, buffers.drafting, drafting);
    uploadTensor(device, steps.sampling, sampling);
  }
  return { phase, rowCount, sampledCount, lastPosition };
}

/** What recording the block takes: the context of the model's step, the block's own step, and where it reads and writes. */
export interface DraftArgs {
  readonly buffers: MtpWorkspace;
  readonly shape: StepShape;
  readonly cache: DraftCache;
}

/** Record that the slots' drafts become tokens of the model's step; before its layers. */
export function recordDraftTokens(context: BlockContext, args: DraftArgs): void {
  const { recorder, workspace } = context;
  const drafts = args.cache.tokens;
  placeDrafts(recorder, { ...draftingArgs(context, args), drafts, rows: workspace.steps.rows });
}

/**
 * Record everything behind the model's samples in `workspace.tokens`: the verdict on the drafts, the draft block on the
 * rows of both outcomes (the row of a wrong draft is overwritten by the next step, see kv-cache.ts), and new drafts.
 */
export function recordDrafts(
  context: BlockContext,
  args: DraftArgs & { weights: MtpWeights; model: Pick<ModelWeights, 'embedding' | 'head'> },
): void {
  const { recorder, workspace } = context;
  const { buffers, cache, shape, weights, model } = args;
  if (shape.rowCount === 0) return;
  const { steps } = buffers;
  const drafting = draftingArgs(context, args);
  judgeDrafts(recorder, {
    ...drafting,
    rows: workspace.steps.rows,
    tokens: workspace.tokens,
    draftRows: steps.rows,
    draftSampled: steps.sampled,
    draftSampling: steps.sampling,
    rowCount: shape.rowCount,
  });
  const own = draftContext(context, args);
  recordMtpInput(own, { weights, embedding: model.embedding, buffers });
  recordLayer(own, { ratio: 0, weights: weights.layer, cache: cache.layer });
  if (shape.sampledCount === 0) return;
  recordHead(own, { ...weights, head: model.head });
  const { logits } = workspace;
  const { sampling, step } = steps;
  sample(recorder, { logits, sampling, tokens: buffers.drafts, step, sampledCount: shape.sampledCount });
  keepDrafts(recorder, { ...drafting, chosen: buffers.drafts, drafts: cache.tokens });
}

/** The context of the block's own step. */
export function draftContext(context: BlockContext, args: Pick<DraftArgs, 'buffers' | 'shape'>): BlockContext {
  return { ...context, shape: args.shape, workspace: { ...context.workspace, steps: args.buffers.steps } };
}

function draftingArgs({ config }: BlockContext, { buffers, shape }: DraftArgs): DraftingArgs {
  return {
    drafting: buffers.drafting,
    draftStep: buffers.steps.step,
    draftingCount: shape.sampledCount,
    vocabulary: config.vocabSize,
  };
}

/**
 * Record Z[j] = e_proj(norm(embedding of the next token)) + h_proj(norm(X[j])) on `workspace.streams`, which hold the
 * model's X and then the block's Z. `context` is of the block's own step, whose rows hold the next tokens; the recorder
 * must be submitted before the next call.
 */
export function recordMtpInput(
  context: BlockContext,
  args: { weights: MtpWeights; embedding: LinearWeight; buffers: MtpWorkspace },
): void {
  const { recorder, config, workspace, shape } = context;
  const { weights, embedding, buffers } = args;
  const { streams, hidden, normed, blockOut, steps } = workspace;
  const { step, rows } = steps;
  const { rowCount } = shape;
  const eps = config.normEps;
  embed(recorder, { rows, table: embedding, out: hidden, step, rowCount });
  recordRounding(context, hidden, { step, rowCount });
  rmsnorm(recorder, { x: hidden, weight: weights.embeddingNorm, out: normed, eps, step, rowCount });
  recordRounding(context, normed, { step, rowCount });
  const project = { x: normed, weight: weights.embeddingProjection, out: blockOut };
  recordLinear(context, { ...project, inputs: 'rounded', step, rowCount });

  const streamRows = rowCount * config.streams;
  const asRows = (tensor: Tensor): Tensor =>
    reshapeTensor(tensor, [tensor.shape[0]! * config.streams, config.hiddenSize]);
  uploadTensor(recorder.device, buffers.streamStep, Uint32Array.of(streamRows, 0, 0, 0));
  gatherRows(recorder, { x: streams, sources: buffers.sources, out: buffers.normed, draftStep: step, rowCount });
  rmsnorm(recorder, { x: buffers.normed, weight: weights.streamNorm, out: buffers.normed, eps, step, rowCount });
  recordRounding(context, buffers.normed, { step, rowCount });
  recordLinear(context, {
    x: asRows(buffers.normed),
    weight: weights.streamProjection,
    out: asRows(streams),
    inputs: 'rounded',
    step: buffers.streamStep,
    rowCount: streamRows,
  });
  hyperPost(recorder, { streams, y: blockOut, post: buffers.post, comb: buffers.comb, step, rowCount });
  recordRounding(context, streams, { step, rowCount });
}
