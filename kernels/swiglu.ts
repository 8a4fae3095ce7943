/** Clamped SwiGLU of the shared expert: silu(min(gate, limit)) · clamp(up, -limit, limit). */
import { loadKernel, type Recorder } from './kernel.ts';
import { assertShape, type Tensor } from './tensor.ts';

const kernel = loadKernel(new URL('./swiglu.wgsl', import.meta.url));

const WORKGROUP_SIZE = 64;

/**
 * Record out = a·sigmoid(a)·b with a = min(gate, limit), b = clamp(up, -limit, limit), element by element.
 *
 * @param args.gate f32 [rows, I]; up and out alike. out must be neither of them.
 * @param args.step u32 [4].
 * @param args.rowCount rows of the step, for the grid.
 * @throws RangeError on a shape that does not fit.
 */
export function swiglu(
  recorder: Recorder,
  args: { gate: Tensor; up: Tensor; out: Tensor; limit: number; step: Tensor; rowCount: number },
): void {
  const { gate, up, out, limit, step, rowCount } = args;
  const columns = gate.shape[1]!;
  assertShape(gate, [null, columns]);
  assertShape(up, [null, columns]);
  assertShape(out, [null, columns]);
  assertShape(step, [4], 'u32');
  recorder.run(kernel, {
    tensors: { gate, up, out, step },
    params: { columns, limit },
    workgroups: [Math.ceil(columns / WORKGROUP_SIZE), rowCount],
  });
}
