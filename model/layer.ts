/**
 * What a layer and the head are made of: blocks between residual streams, as kernel calls. Sections 3.1 and 3.2 of the
 * model description. The model and the draft block are both built from these.
 */
import { hyperHead, hyperPost, hyperPre } from '../kernels/hyper-connection.ts';
import { linear, type LinearWeight } from '../kernels/linear.ts';
import { rmsnorm } from '../kernels/rmsnorm.ts';
import type { Tensor } from '../kernels/tensor.ts';
import { recordAttention, type BlockContext } from './attention.ts';
import type { ModelConfig } from './config.ts';
import type { LayerCache } from './kv-cache.ts';
import { recordMoe } from './moe.ts';
import { recordBlockInput, recordRounding } from './rounding.ts';
import type { HyperWeights, LayerWeights } from './weights.ts';

/** Record one layer: attention, then experts, on `workspace.streams` in place. */
export function recordLayer(
  context: BlockContext,
  layer: { ratio: number; weights: LayerWeights; cache: LayerCache },
): void {
  const { weights } = layer;
  recordBlock(context, { mix: weights.attentionMix, norm: weights.attentionNorm }, () =>
    recordAttention(context, { ...layer, weights: weights.attention }),
  );
  recordBlock(context, { mix: weights.moeMix, norm: weights.moeNorm }, () => recordMoe(context, weights.moe));
}

// A block sees the streams mixed into one normed vector; its output is spread over all streams.
function recordBlock(context: BlockContext, around: { mix: HyperWeights; norm: Tensor }, block: () => void): void {
  const { recorder, config, workspace, shape } = context;
  const { streams, mix, post, comb, hidden, normed, blockOut, steps } = workspace;
  const { step } = steps;
  const { rowCount } = shape;
  linear(recorder, { x: streams, weight: around.mix.fn, out: mix, step, rowCount });
  hyperPre(recorder, {
    streams,
    mix,
    base: around.mix.base,
    scale: around.mix.scale,
    y: hidden,
    post,
    comb,
    config: hyperConfig(config),
    step,
    rowCount,
  });
  const rows = { step, rowCount };
  recordRounding(context, hidden, rows);
  rmsnorm(recorder, { x: hidden, weight: around.norm, out: normed, eps: config.normEps, ...rows });
  recordRounding(context, normed, rows);
  recordBlockInput(context, rows);
  block();
  hyperPost(recorder, { streams, y: blockOut, post, comb, step, rowCount });
  recordRounding(context, streams, rows);
}

/** Record the logits of the step's sampled rows into `workspace.logits`, in the order of `sampled`. */
export function recordHead(
  context: BlockContext,
  weights: { headMix: HyperWeights; norm: Tensor; head: LinearWeight },
): void {
  const { recorder, config, workspace, shape } = context;
  const { headMix, norm, head } = weights;
  const { streams, headHidden, headNormed, logits, steps } = workspace;
  const { step, sampled } = steps;
  const { rowCount, sampledCount } = shape;
  linear(recorder, { x: streams, weight: headMix.fn, out: workspace.headMix, step, rowCount });
  hyperHead(recorder, {
    streams,
    mix: workspace.headMix,
    base: headMix.base,
    scale: headMix.scale,
    sampled,
    out: headHidden,
    config: hyperConfig(config),
    step,
    sampledCount,
  });
  const samplewise = { step, rowCount: sampledCount, countFrom: 'sampled' } as const;
  recordRounding(context, headHidden, samplewise);
  rmsnorm(recorder, { x: headHidden, weight: norm, out: headNormed, eps: config.normEps, ...samplewise });
  recordRounding(context, headNormed, samplewise);
  linear(recorder, { x: headNormed, weight: head, out: logits, ...samplewise });
}

function hyperConfig(config: ModelConfig): { normEps: number; eps: number; iterations: number } {
  return { normEps: config.normEps, eps: config.hcEps, iterations: config.sinkhornIterations };
}
