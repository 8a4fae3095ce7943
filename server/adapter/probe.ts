/**
 * The child process of adapter set-up: tries Dawn where a hang or a crash of a driver hurts nobody.
 *
 * Forked by adapter.ts with one argument, and answers with one IPC message, a `ProbeReport`:
 * `list` names the adapters that Dawn accepts, best first; `open NAME` opens one (an empty name: the best one),
 * runs a small compute kernel on it and checks the result.
 */
import { create, globals } from 'webgpu';

/** What a probe found out. `names` come from `list`, the rest from `open`. */
export interface ProbeReport {
  /** Dawn's names of the adapters, best first. */
  readonly names: string[];
  /** The opened adapter, or null with `problem` saying what failed. */
  readonly opened: { readonly driver: string; readonly fallback: boolean } | null;
  readonly problem: string;
}

// Dawn dies at the next garbage collection if nothing refers to what `create` returned.
const keep = globalThis as { handoffGpu?: GPU };

/** A name no adapter has: Dawn's complaint about it is the only place where it lists the adapters there are. */
const nobody = 'adapter=no adapter has this name';

async function list(): Promise<ProbeReport> {
  const gpu = (keep.handoffGpu = create([nobody]));
  try {
    await gpu.requestAdapter({ powerPreference: 'high-performance' });
    return { names: [], opened: null, problem: '' }; // no driver at all: null, not an error
  } catch (error) {
    const text = error instanceof Error ? error.message : String(error);
    const names = [...text.matchAll(/^ \* backend: '[^']*', name: '(.*)'$/gm)].map((match) => match[1] ?? '');
    return { names, opened: null, problem: names.length > 0 ? '' : text };
  }
}

async function open(name: string): Promise<ProbeReport> {
  const gpu = (keep.handoffGpu = create(name === '' ? [] : [`adapter=${name}`]));
  const adapter = await gpu.requestAdapter({ powerPreference: 'high-performance' });
  if (adapter === null) return { names: [], opened: null, problem: 'Dawn offers no adapter' };
  const device = await adapter.requestDevice();
  const { GPUBufferUsage, GPUMapMode } = globals as unknown as typeof globalThis;
  const cell = device.createBuffer({ size: 4, usage: GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC });
  const copy = device.createBuffer({ size: 4, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
  const code =
    '@group(0) @binding(0) var<storage, read_write> cell: u32; @compute @workgroup_size(1) fn main() { cell = 417u; }';
  const pipeline = await device.createComputePipelineAsync({
    layout: 'auto',
    compute: { module: device.createShaderModule({ code }) },
  });
  const bindings = device.createBindGroup({
    layout: pipeline.getBindGroupLayout(0),
    entries: [{ binding: 0, resource: { buffer: cell } }],
  });
  const encoder = device.createCommandEncoder();
  const pass = encoder.beginComputePass();
  pass.setPipeline(pipeline);
  pass.setBindGroup(0, bindings);
  pass.dispatchWorkgroups(1);
  pass.end();
  encoder.copyBufferToBuffer(cell, 0, copy, 0, 4);
  device.queue.submit([encoder.finish()]);
  await copy.mapAsync(GPUMapMode.READ);
  const result = new Uint32Array(copy.getMappedRange().slice(0))[0];
  const { description, device: model, vendor } = adapter.info;
  device.destroy();
  if (result !== 417) return { names: [], opened: null, problem: `a test kernel gave ${result} instead of 417` };
  return {
    names: [],
    opened: { driver: description || `${vendor} ${model}`, fallback: adapter.info.isFallbackAdapter },
    problem: '',
  };
}

async function answer(): Promise<void> {
  const [mode, name] = process.argv.slice(2);
  let report: ProbeReport;
  try {
    report = mode === 'list' ? await list() : await open(name ?? '');
  } catch (error) {
    report = { names: [], opened: null, problem: error instanceof Error ? error.message : String(error) };
  }
  process.send?.(report, () => process.disconnect());
}

await answer();
