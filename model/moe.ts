/** One expert block as kernel calls: routing, the shared expert, the routed experts. Section 4 of the model description. */
import { experts } from '../kernels/experts.ts';
import { gate } from '../kernels/gate.ts';
import { linear, type LinearWeight } from '../kernels/linear.ts';
import { swiglu } from '../kernels/swiglu.ts';
import type { Tensor } from '../kernels/tensor.ts';
import type { BlockContext } from './attention.ts';
import { blockInput, recordLinear, recordRounding, roundsActivations, roundsInputs } from './rounding.ts';
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

  const fromBlock = (weight: LinearWeight, out: Tensor): void =>
    recordLinear(context, {
      x: blockInput(context, weight.format),
      weight,
      out,
      inputs: 'as they are',
      step,
      rowCount,
    });
  fromBlock(weights.sharedGate, moe.gate);
  fromBlock(weights.sharedUp, moe.up);
  swiglu(recorder, { gate: moe.gate, up: moe.up, out: moe.hidden, limit, step, rowCount });
  recordRounding(context, moe.hidden, { step, rowCount });
  const sharedDown = { x: moe.hidden, weight: weights.sharedDown, out: moe.shared };
  recordLinear(context, { ...sharedDown, inputs: 'rounded', step, rowCount });

  experts(recorder, {
    x: blockInput(context, weights.gateUp.format),
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
    rounding: roundsInputs(config, weights.down.format) ? 'inputs' : roundsActivations(config) ? 'bf16' : undefined,
  });
}
