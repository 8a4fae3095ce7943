/** One expert block as kernel calls: routing, the shared expert, the routed experts. Section 4 of the model description. */
import { experts } from '../kernels/experts.ts';
import { gate } from '../kernels/gate.ts';
import { linear } from '../kernels/linear.ts';
import { swiglu } from '../kernels/swiglu.ts';
import type { BlockContext } from './attention.ts';
import type { MoeWeights } from './weights.ts';

/** Record the experts' answer to the normed rows in `workspace.normed` into `workspace.blockOut`. */
export function recordMoe(context: BlockContext, weights: MoeWeights): void {
  const { recorder, config, workspace, shape } = context;
  const { normed, blockOut, moe } = workspace;
  const { step, rows } = workspace.steps;
  const { rowCount } = shape;
  const limit = config.swigluLimit;

  linear(recorder, { x: normed, weight: weights.router, out: moe.scores, step, rowCount });
  gate(recorder, {
    logits: moe.scores,
    bias: weights.bias ?? undefined,
    tokenExperts: weights.table ?? undefined,
    rows,
    step,
    experts: moe.experts,
    weights: moe.weights,
    scale: config.routeScale,
    rowCount,
  });

  linear(recorder, { x: normed, weight: weights.sharedGate, out: moe.gate, step, rowCount });
  linear(recorder, { x: normed, weight: weights.sharedUp, out: moe.up, step, rowCount });
  swiglu(recorder, { gate: moe.gate, up: moe.up, out: moe.hidden, limit, step, rowCount });
  linear(recorder, { x: moe.hidden, weight: weights.sharedDown, out: moe.shared, step, rowCount });

  experts(recorder, {
    x: normed,
    experts: moe.experts,
    weights: moe.weights,
    gateUp: weights.gateUp,
    down: weights.down,
    shared: moe.shared,
    out: blockOut,
    step,
    scratch: moe.scratch,
    limit,
    rowCount,
  });
}
