/**
 * Work that shows what an adapter can do at best: copies, and multiplications and additions in registers.
 * scripts/bench-kernels.ts times it and compares the kernels with it.
 */
import { loadKernel } from '../kernels/kernel.ts';
import { bindableBytes, type Material, type Work } from './kernel-cases.ts';

const kernel = loadKernel(new URL('./adapter-rates.wgsl', import.meta.url));

// Larger than any cache; a smaller adapter limit wins.
const COPY_BYTES = 256 * 2 ** 20;
const LANES = 64;
const REPEATS = 8; // as in the shader

/** One way to copy or to compute. `rate` says which of the two it measures. */
export interface RateCase {
  readonly rate: 'copy' | 'multiply-add';
  readonly variant: string;
  readonly prepare: (material: Material) => Work;
}

/** The best of each `rate` is the adapter's. */
export const rateCases: readonly RateCase[] = [
  { rate: 'copy', variant: 'copyBufferToBuffer', prepare: (material) => prepareCopy(material, 'command') },
  { rate: 'copy', variant: 'wgsl', prepare: (material) => prepareCopy(material, 'kernel') },
  // Few chains wait for their own results, many do not fit the registers: where the best is depends on the adapter.
  ...[1, 2, 4, 8].map((vectors): RateCase => ({
    rate: 'multiply-add',
    variant: `${4 * vectors} chains`,
    prepare: (material) => prepareMultiplyAdd(material, vectors),
  })),
];

function prepareCopy(material: Material, by: 'command' | 'kernel'): Work {
  const { device } = material;
  const byteLength = Math.min(COPY_BYTES, bindableBytes(device));
  const vectors = byteLength / 16;
  const source = material.noise('u32', [byteLength / 4]);
  const copied = material.noise('u32', [byteLength / 4]);
  // One dimension of a grid ends at 65535 workgroups.
  const groups = Math.ceil(vectors / LANES);
  const groupRows = Math.ceil(groups / 65535);
  const groupsPerRow = Math.ceil(groups / groupRows);
  return {
    parameters: { bufferBytes: byteLength },
    bytes: 2 * byteLength,
    flops: 0,
    record(recorder) {
      if (by === 'command') {
        recorder.copy(source.buffer, 0, copied.buffer, 0, byteLength);
        return;
      }
      recorder.run(kernel, {
        entry: 'copy',
        tensors: { source, copied },
        params: { count: vectors, lanes_per_row: groupsPerRow * LANES, iterations: 0, factor: 0, addend: 0 },
        workgroups: [groupsPerRow, groupRows],
      });
    },
  };
}

function prepareMultiplyAdd(material: Material, vectors: number): Work {
  // Enough lanes to fill a large GPU; enough iterations that starting a workgroup does not count.
  const lanes = material.device.info.software ? 4096 : 2 ** 20;
  const iterations = 256;
  const sums = material.noise('f32', [lanes]);
  return {
    parameters: { lanes, iterations: iterations * REPEATS },
    bytes: sums.byteLength,
    flops: lanes * iterations * REPEATS * 4 * vectors * 2,
    record(recorder) {
      recorder.run(kernel, {
        entry: 'multiply_add',
        constants: { CHAINS: `${vectors}u`, REPEATS: `${REPEATS}u` },
        tensors: { sums },
        params: { count: lanes, lanes_per_row: lanes, iterations, factor: 0.99, addend: 0.01 },
        workgroups: [Math.ceil(lanes / LANES)],
      });
    },
  };
}
