/** Routing: which experts a row goes to, and with which weights. */
import assert from 'node:assert/strict';
import { loadKernel, type Recorder } from './kernel.ts';
import { assertShape, type Tensor } from './tensor.ts';

const kernel = loadKernel(new URL('./gate.wgsl', import.meta.url));
const LANES = 64;

/**
 * Choose K experts for every row and weigh them: score s = sqrt(softplus(logit)); chosen are the K largest s + bias
 * (the lower id wins a tie), or `tokenExperts[token]` in a hash-routed layer; weight = scale * s / sum of the chosen s.
 *
 * logits        [maxRows, E] f32: x times the gate's weight, transposed
 * bias          [E] f32; only moves the choice, never the weights. Exactly one of bias and tokenExperts is given
 * tokenExperts  [V, K] u32: the experts of a token id (tid2eid)
 * experts       [maxRows, K] u32, out: ids, ascending
 * weights       [maxRows, K] f32, out: in the order of `experts`
 *
 * A row whose logits are NaN gets valid ids and NaN weights. Follows section 4 of the model description.
 */
export function gate(
  recorder: Recorder,
  args: {
    readonly logits: Tensor;
    readonly bias?: Tensor | undefined;
    readonly tokenExperts?: Tensor | undefined;
    readonly rows: Tensor;
    readonly step: Tensor;
    readonly experts: Tensor;
    readonly weights: Tensor;
    /** routed_scaling_factor. */
    readonly scale: number;
    /** Rows of this step. */
    readonly rowCount: number;
  },
): void {
  const { logits, bias, tokenExperts, rows, step, experts, weights, scale, rowCount } = args;
  const [, expertCount = 0] = logits.shape;
  const [, chosenCount = 0] = experts.shape;
  assert(chosenCount >= 1 && chosenCount <= expertCount, `${chosenCount} experts a row out of ${expertCount}`);
  assertShape(logits, [null, expertCount], 'f32');
  assertShape(experts, [null, chosenCount], 'u32');
  assertShape(weights, [null, chosenCount], 'f32');
  assert((bias === undefined) !== (tokenExperts === undefined), 'a gate has either a bias or a token table');
  const shared = {
    constants: { CHOSEN: `${chosenCount}` },
    params: { expert_count: expertCount, scale },
    workgroups: [Math.ceil(rowCount / LANES)] as const,
  };
  if (tokenExperts) {
    assertShape(tokenExperts, [null, chosenCount], 'u32');
    recorder.run(kernel, {
      ...shared,
      entry: 'hashed',
      tensors: { logits, tokenExperts, rows, step, experts, weights },
    });
    return;
  }
  assert(bias, 'a gate without tokenExperts needs a bias, found none');
  assertShape(bias, [expertCount], 'f32');
  recorder.run(kernel, { ...shared, entry: 'scored', tensors: { logits, bias, step, experts, weights } });
}
