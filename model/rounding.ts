/**
 * Where a step rounds, by the model's mode.
 *
 * `hp` rounds nothing: every value is f32. The others compute what the official runtime does: activations are bf16,
 * keys and entries have been through e4m3, index queries and keys through e2m1. Appendix A of the model description.
 * Blocks call these at every rounding point, so that they read the same in all modes.
 */
import type { Recorder } from '../kernels/kernel.ts';
import { linear, type LinearFormat, type LinearWeight, type RowCount } from '../kernels/linear.ts';
import { roundToBf16, roundToBlockFormat } from '../kernels/round.ts';
import type { Tensor } from '../kernels/tensor.ts';
import type { ModelConfig } from './config.ts';
import type { Workspace } from './workspace.ts';

/** Blocks of the official kernels: inputs of linears, keys and entries, index queries. */
const INPUT_BLOCK = 128;
const KEY_BLOCK = 64;
const INDEX_BLOCK = 32;

/** What rounding needs of a block's context. */
interface Context {
  readonly recorder: Recorder;
  readonly config: ModelConfig;
}

/** Rows that are worked on, as kernels take them: f32 [rows, H, d] or [rows, d]. */
interface Rows {
  readonly step: Tensor;
  readonly rowCount: number;
  readonly countFrom?: RowCount;
}

/** Whether activations are rounded at all. */
export function roundsActivations(config: ModelConfig): boolean {
  return config.mode !== 'hp';
}

/** Round x to bf16 in place, unless the mode is `hp`. */
export function recordRounding(context: Context, x: Tensor, rows: Rows): void {
  if (roundsActivations(context.config)) roundToBf16(context.recorder, { x, ...rows });
}

/** Round the dimensions of window keys that are not rotated to e4m3 in place, unless the mode is `hp`. Appendix A 5. */
export function recordKeyRounding(context: Context, x: Tensor, rows: Rows): void {
  const { recorder, config } = context;
  const columns = config.headDim - config.ropeDim;
  if (!roundsActivations(config) || columns === 0) return;
  roundToBlockFormat(recorder, { x, ...rows, format: 'e4m3', block: KEY_BLOCK, columns });
}

/** Round transformed index queries to e2m1 in place, unless the mode is `hp`. Appendix A 7. */
export function recordIndexRounding(context: Context, x: Tensor, rows: Rows): void {
  const { recorder, config } = context;
  if (roundsActivations(config)) roundToBlockFormat(recorder, { x, ...rows, format: 'e2m1', block: INDEX_BLOCK });
}

/** Whether linears with weights in this format round their inputs to e4m3. Appendix A 1. */
export function roundsInputs(config: ModelConfig, format: LinearFormat): boolean {
  return config.mode === 'q-inputs' && format !== 'f32' && format !== 'bf16';
}

/** Make the block's input `workspace.normed` once more, rounded for the linears that want it so (`blockInput`). */
export function recordBlockInput(context: Context & { readonly workspace: Workspace }, rows: Rows): void {
  const { recorder, workspace } = context;
  const { normed, roundedNormed } = workspace;
  if (!roundedNormed) return;
  const byteLength = rows.rowCount * normed.shape[1]! * Float32Array.BYTES_PER_ELEMENT;
  recorder.copy(normed.buffer, normed.offsetBytes, roundedNormed.buffer, roundedNormed.offsetBytes, byteLength);
  recordInputRounding(recorder, roundedNormed, rows);
}

/** The block's input for a weight of this format. */
export function blockInput(
  context: { readonly config: ModelConfig; readonly workspace: Workspace },
  format: LinearFormat,
): Tensor {
  const { normed, roundedNormed } = context.workspace;
  return roundedNormed && roundsInputs(context.config, format) ? roundedNormed : normed;
}

/**
 * Record a linear layer and round its output. `inputs` says what becomes of its inputs in the mode that rounds them:
 * `rounded` in place, for inputs that nothing but linears reads, or `as they are`.
 */
export function recordLinear(
  context: Context,
  args: Rows & {
    readonly x: Tensor;
    readonly weight: LinearWeight;
    readonly out: Tensor;
    readonly groups?: number;
    readonly inputs: 'rounded' | 'as they are';
  },
): void {
  const { recorder, config } = context;
  const { inputs, ...call } = args;
  const { x, weight, out, step, rowCount, countFrom = 'rows' } = call;
  const rows = { step, rowCount, countFrom };
  if (inputs === 'rounded' && roundsInputs(config, weight.format)) recordInputRounding(recorder, x, rows);
  linear(recorder, call);
  recordRounding(context, out, rows);
}

function recordInputRounding(recorder: Recorder, x: Tensor, rows: Rows): void {
  roundToBlockFormat(recorder, { x, ...rows, format: 'e4m3', block: INPUT_BLOCK });
}
