/**
 * The draft block: from a position's residual streams and the token after it, it predicts the token after that. One more
 * sliding-window layer with a head of its own; embedding and output matrix are the model's. Section 5 of the model
 * description.
 */
import type { Device } from '../kernels/device.ts';
import { embed } from '../kernels/embed.ts';
import { hyperPost } from '../kernels/hyper-connection.ts';
import type { LinearWeight } from '../kernels/linear.ts';
import { rmsnorm } from '../kernels/rmsnorm.ts';
import { allocateTensor, reshapeTensor, uploadTensor, type Tensor } from '../kernels/tensor.ts';
import type { BlockContext } from './attention.ts';
import type { ModelConfig } from './config.ts';
import type { LayerCache } from './kv-cache.ts';
import { recordLinear, recordRounding } from './rounding.ts';
import type { MtpWeights } from './weights.ts';
import type { ModelLimits } from './workspace.ts';

/** What the draft block's input needs beside the model's workspace. */
export interface MtpWorkspace {
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
  const { maxRows } = limits;
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
    normed: allocate('normed streams', [maxRows, n, hiddenSize], 'f32'),
    streamStep: allocate('stream step', [4], 'u32'),
    post,
    comb,
  };
}

/** The draft block's own past: a sliding window. */
export function allocateMtpCache(device: Device, config: ModelConfig, slotCount: number): LayerCache {
  const shape = [slotCount, config.windowTokens, config.headDim];
  const window = allocateTensor(device, { shape, dtype: 'f32', label: 'draft window' });
  return { window, entries: null, tail: null, gathered: null, indexKeys: null, indexTail: null };
}

/**
 * Record Z[j] = e_proj(norm(embedding of the next token)) + h_proj(norm(X[j])) on `workspace.streams` in place.
 * `rows` must hold the next tokens; the recorder must be submitted before the next call.
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
  rmsnorm(recorder, { x: streams, weight: weights.streamNorm, out: buffers.normed, eps, step, rowCount });
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
