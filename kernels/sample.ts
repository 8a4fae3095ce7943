/**
 * Choice of the next token from logits, on the device.
 *
 * Order: temperature, then top-k, then top-p, then min-p, then one draw. Tokens that tie with the last one kept by
 * top-k or top-p are kept too. The draw depends on the row's seed and position alone, so neither the batch nor the
 * order of its rows changes a token.
 */
import { loadKernel, type Recorder } from './kernel.ts';
import { assertShape, type Tensor } from './tensor.ts';

const kernel = loadKernel(new URL('./sample.wgsl', import.meta.url), ['logits']);

/** u32 words of one row of the `sampling` tensor. */
export const SAMPLING_WORDS = 8;

/** What `sample` writes for a row without a usable logit (every one NaN or minus infinity). */
export const NO_TOKEN = 0xffff_ffff;

/** How one token is chosen. */
export interface SamplingRow {
  /** 0 takes the largest logit, the lowest index on a tie; the other fields are then without effect. */
  readonly temperature: number;
  /** Keep the k largest; 0 keeps all. */
  readonly topK: number;
  /** Keep the smallest set of most probable tokens whose probability reaches this; 1 keeps all. */
  readonly topP: number;
  /** Keep tokens whose probability is at least this share of the largest; 0 keeps all. */
  readonly minP: number;
  /** Integer below 2^53. */
  readonly seed: number;
  /** Position of the token that is chosen. */
  readonly position: number;
}

/** Write one row of the `sampling` tensor's words, of SAMPLING_WORDS each. */
export function writeSamplingRow(words: Uint32Array, index: number, row: SamplingRow): void {
  const view = new DataView(words.buffer, words.byteOffset + index * SAMPLING_WORDS * 4, SAMPLING_WORDS * 4);
  view.setFloat32(0, row.temperature, true);
  view.setUint32(4, row.topK, true);
  view.setFloat32(8, row.topP, true);
  view.setFloat32(12, row.minP, true);
  view.setUint32(16, row.seed >>> 0, true);
  view.setUint32(20, Math.floor(row.seed / 2 ** 32) >>> 0, true);
  view.setUint32(24, row.position, true);
  view.setUint32(28, 0, true);
}

/**
 * Record the choice of one token for each sampled row.
 *
 * @param args.logits f32 [maxSampled, V].
 * @param args.sampling u32 [maxSampled, SAMPLING_WORDS], from `writeSamplingRow`.
 * @param args.tokens u32 [maxSampled], written; NO_TOKEN where no logit is usable.
 * @param args.step u32 [4].
 * @param args.sampledCount sampled rows of the step, for the grid.
 * @throws RangeError on a shape that does not fit.
 */
export function sample(
  recorder: Recorder,
  args: { logits: Tensor; sampling: Tensor; tokens: Tensor; step: Tensor; sampledCount: number },
): void {
  const { logits, sampling, tokens, step, sampledCount } = args;
  const vocabulary = logits.shape[1]!;
  assertShape(logits, [null, vocabulary]);
  assertShape(sampling, [null, SAMPLING_WORDS], 'u32');
  assertShape(tokens, [null], 'u32');
  assertShape(step, [4], 'u32');
  recorder.run(kernel, {
    overrides: { WORKGROUP_SIZE: recorder.device.info.software ? 8 : 256 },
    tensors: { logits, sampling, tokens, step },
    params: { vocabulary },
    workgroups: [sampledCount],
  });
}
