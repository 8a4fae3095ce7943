/** Append a step's keys to the per-sequence rings of the sliding window. */
import { loadKernel, type Recorder } from './kernel.ts';
import { assertShape, type Tensor } from './tensor.ts';

const kernel = loadKernel(new URL('./window.wgsl', import.meta.url));
const LANES = 64;

/**
 * Write the last W rows of every chunk into its sequence's ring. Record it after the layer's attention, which still
 * reads the rows that this overwrites.
 *
 * kv         [maxRows, d] f32: normed and rotated key-values of the step
 * ring       [slots, W, d] f32: the row of position t is at t mod W
 * rows, sequences, step: step metadata
 */
export function appendWindow(
  recorder: Recorder,
  args: {
    readonly kv: Tensor;
    readonly ring: Tensor;
    readonly rows: Tensor;
    readonly sequences: Tensor;
    readonly step: Tensor;
    /** Rows of this step. */
    readonly rowCount: number;
  },
): void {
  const { kv, ring, rows, sequences, step, rowCount } = args;
  const [, window = 0, width = 0] = ring.shape;
  assertShape(kv, [null, width], 'f32');
  assertShape(ring, [null, window, width], 'f32');
  recorder.run(kernel, {
    tensors: { kv, ring, rows, sequences, step },
    params: { width, window },
    workgroups: [Math.ceil(width / LANES), rowCount],
  });
}
