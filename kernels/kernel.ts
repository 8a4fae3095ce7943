/**
 * Kernels: a .wgsl file, specialised, compiled once a device and recorded into a command encoder.
 *
 * The WGSL text is the single source of a kernel's interface: its bindings, its `Params` struct, its `override` and
 * `const` lines are read from it, so a wrapper that passes a wrong name fails at once. There is no preprocessor:
 * `specialise` may replace the right-hand side of a top-level `const NAME: T = …;` or `alias NAME = …;` line, and
 * includes are appended, so that compile errors keep the line numbers of the file.
 */
import { readFileSync } from 'node:fs';
import type { Device } from './device.ts';
import { allocateTensor, uploadTensor, type Tensor } from './tensor.ts';

/** A kernel's text and the interface read from it. Made at module load by each wrapper; holds no GPU object. */
export interface Kernel {
  readonly name: string;
  readonly source: string;
  /** Bindings of group 0 in order of their index. `params` is filled from `Call.params`. */
  readonly bindings: readonly Binding[];
  /** Fields of `struct Params`, 4 bytes each, in order. */
  readonly params: readonly { readonly name: string; readonly type: 'u32' | 'i32' | 'f32' }[];
}

interface Binding {
  readonly index: number;
  readonly name: string;
  readonly type: GPUBufferBindingType;
}

/** One dispatch. */
export interface Call {
  /** Entry point; `main` when left out. */
  readonly entry?: string;
  /** Values of `override` declarations. */
  readonly overrides?: Readonly<Record<string, number>>;
  /** Right-hand sides of top-level `const` and `alias` lines (register array lengths, types, format switches). */
  readonly constants?: Readonly<Record<string, string | number>>;
  /** One tensor for each binding but `params`, by its WGSL name. A kernel entry must use every binding it is given. */
  readonly tensors: Readonly<Record<string, Tensor>>;
  /** One number for each field of `struct Params`. Should not change from step to step: each distinct set is a uniform buffer and a bind group kept for good. */
  readonly params?: Readonly<Record<string, number>>;
  /** Workgroup counts in x, y, z; a zero records nothing. */
  readonly workgroups: readonly [number, number?, number?];
}

interface CompiledPipeline {
  readonly pipeline: GPUComputePipeline;
  readonly layout: GPUBindGroupLayout;
  readonly used: readonly Binding[];
  readonly bindGroups: Map<string, GPUBindGroup>;
}

/** WebGPU's limit on workgroups in one dimension. */
const MAX_WORKGROUPS = 65535;

/** Read a kernel's WGSL. `includes` are files of kernels/include, appended to the text. */
export function loadKernel(url: URL, includes: readonly string[] = []): Kernel {
  const text = readFileSync(url, 'utf8');
  const name = url.pathname.slice(url.pathname.lastIndexOf('/') + 1).replace(/\.wgsl$/, '');
  const parts = [text];
  for (const include of includes)
    parts.push(readFileSync(new URL(`./include/${include}.wgsl`, import.meta.url), 'utf8'));
  return { name, source: parts.join('\n'), bindings: readBindings(text, name), params: readParams(text, name) };
}

function readBindings(text: string, name: string): Binding[] {
  const found: Binding[] = [];
  for (const match of text.matchAll(/@group\(0\)\s*@binding\((\d+)\)\s*var<([^>]+)>\s*(\w+)\s*:/g)) {
    const space = match[2]!.replace(/\s/g, '');
    const type = space === 'uniform' ? 'uniform' : space === 'storage,read_write' ? 'storage' : 'read-only-storage';
    found.push({ index: Number(match[1]), name: match[3]!, type });
  }
  found.sort((left, right) => left.index - right.index);
  if (found.length === 0) throw new Error(`kernel ${name}: no bindings found`);
  return found;
}

function readParams(text: string, name: string): Kernel['params'] {
  const struct = /struct Params \{([^}]*)\}/.exec(text);
  if (!struct) return [];
  const body = struct[1]!.replace(/\/\/[^\n]*/g, '');
  return body
    .split(',')
    .map((field) => field.trim())
    .filter((field) => field !== '')
    .map((field) => {
      const match = /^(\w+)\s*:\s*(u32|i32|f32)$/.exec(field);
      if (!match) throw new Error(`kernel ${name}: Params field "${field}" is not a 4-byte scalar`);
      return { name: match[1]!, type: match[2] as 'u32' | 'i32' | 'f32' };
    });
}

/**
 * Replace right-hand sides of top-level `const NAME: T = …;` and `alias NAME = …;` lines.
 *
 * @throws Error when a line is not there, so a misspelt constant cannot be ignored.
 */
export function specialise(source: string, constants: Readonly<Record<string, string | number>>): string {
  let text = source;
  for (const [name, value] of Object.entries(constants)) {
    const line = new RegExp(`^((?:const ${name}\\s*:[^=]*|alias ${name}\\s*)=)[^;]*;`, 'm');
    if (!line.test(text)) throw new Error(`no top-level const or alias "${name}" to specialise`);
    text = text.replace(line, `$1 ${value};`);
  }
  return text;
}

/**
 * Records dispatches and copies into one command buffer. All dispatches share compute passes, which order them: a
 * dispatch sees what earlier ones wrote. Nothing is submitted before `submit`.
 */
export class Recorder {
  /** The device it records for; wrappers choose the shape of a kernel by its adapter. */
  readonly device: Device;
  #encoder: GPUCommandEncoder;
  #pass: GPUComputePassEncoder | null = null;
  /** Called with the kernel's name when a pipeline was compiled for the first time on this device. */
  onCompile: ((name: string) => void) | null = null;

  constructor(device: Device) {
    this.device = device;
    this.#encoder = device.gpu.createCommandEncoder();
  }

  /** Record one dispatch. Throws on a missing or superfluous tensor or parameter. */
  run(kernel: Kernel, call: Call): void {
    const [x, y = 1, z = 1] = call.workgroups;
    if (x === 0 || y === 0 || z === 0) return;
    if (Math.max(x, y, z) > MAX_WORKGROUPS) {
      throw new RangeError(
        `kernel ${kernel.name}: ${x} x ${y} x ${z} workgroups, at most ${MAX_WORKGROUPS} in one dimension`,
      );
    }
    const compiled = this.#pipeline(kernel, call);
    this.#pass ??= this.#encoder.beginComputePass();
    this.#pass.setPipeline(compiled.pipeline);
    this.#pass.setBindGroup(0, this.#bindGroup(kernel, compiled, call));
    this.#pass.dispatchWorkgroups(x, y, z);
  }

  /** Record a copy of `byteLength` bytes (a multiple of 4) between buffers. */
  copy(source: GPUBuffer, sourceOffset: number, target: GPUBuffer, targetOffset: number, byteLength: number): void {
    this.#endPass();
    this.#encoder.copyBufferToBuffer(source, sourceOffset, target, targetOffset, byteLength);
  }

  /** Submit everything recorded so far as one command buffer; the recorder can be used again. */
  submit(): void {
    this.#endPass();
    this.device.queue.submit([this.#encoder.finish()]);
    this.#encoder = this.device.gpu.createCommandEncoder();
  }

  #endPass(): void {
    this.#pass?.end();
    this.#pass = null;
  }

  #pipeline(kernel: Kernel, call: Call): CompiledPipeline {
    const key = `${kernel.name}|${call.entry ?? 'main'}|${spell(call.overrides)}|${spell(call.constants)}`;
    const known = this.device.pipelines.get(key) as CompiledPipeline | undefined;
    if (known) return known;
    const compiled = compile(this.device, kernel, call);
    this.device.pipelines.set(key, compiled);
    this.onCompile?.(kernel.name);
    return compiled;
  }

  #bindGroup(kernel: Kernel, compiled: CompiledPipeline, call: Call): GPUBindGroup {
    let key = spell(call.params);
    for (const binding of compiled.used) {
      if (binding.name !== 'params') key += `,${call.tensors[binding.name]?.id}`;
    }
    const known = compiled.bindGroups.get(key);
    if (known) return known;
    for (const name of Object.keys(call.tensors)) {
      if (!compiled.used.some((binding) => binding.name === name)) {
        throw new Error(`kernel ${kernel.name}: no binding called ${name}`);
      }
    }
    const entries = compiled.used.map((binding): GPUBindGroupEntry => {
      const tensor =
        binding.name === 'params' ? uniformFor(this.device, kernel, call.params ?? {}) : call.tensors[binding.name];
      if (!tensor) throw new Error(`kernel ${kernel.name}: tensor ${binding.name} is missing`);
      if (tensor.segments || tensor.byteLength > this.device.bindingBytes) {
        throw new RangeError(
          `kernel ${kernel.name}: tensor ${tensor.label} of ${tensor.byteLength} bytes is more than one binding`,
        );
      }
      return {
        binding: binding.index,
        resource: { buffer: tensor.buffer, offset: tensor.offsetBytes, size: tensor.byteLength },
      };
    });
    const group = this.device.gpu.createBindGroup({ layout: compiled.layout, entries, label: kernel.name });
    compiled.bindGroups.set(key, group);
    return group;
  }
}

function spell(values: Readonly<Record<string, string | number>> | undefined): string {
  let text = '';
  for (const name in values) text += `${name}=${values[name]};`;
  return text;
}

// Bindings are declared for the whole file; an entry point gets those that the caller passes and `params` if it has fields.
function compile(device: Device, kernel: Kernel, call: Call): CompiledPipeline {
  const used = kernel.bindings.filter((binding) =>
    binding.name === 'params' ? call.params !== undefined : binding.name in call.tensors,
  );
  const code = specialise(kernel.source, call.constants ?? {});
  const layout = device.gpu.createBindGroupLayout({
    label: kernel.name,
    entries: used.map((binding) => ({
      binding: binding.index,
      visibility: GPUShaderStage.COMPUTE,
      buffer: { type: binding.type },
    })),
  });
  const module = device.gpu.createShaderModule({ code, label: `${kernel.name}.wgsl` });
  const pipeline = device.gpu.createComputePipeline({
    label: kernel.name,
    layout: device.gpu.createPipelineLayout({ bindGroupLayouts: [layout] }),
    compute: {
      module,
      entryPoint: call.entry ?? 'main',
      ...(call.overrides ? { constants: { ...call.overrides } } : {}),
    },
  });
  return { pipeline, layout, used, bindGroups: new Map() };
}

function uniformFor(device: Device, kernel: Kernel, params: Readonly<Record<string, number>>): Tensor {
  const bytes = new DataView(new ArrayBuffer(Math.ceil((kernel.params.length * 4) / 16) * 16));
  for (const [index, field] of kernel.params.entries()) {
    const value = params[field.name];
    if (value === undefined) throw new Error(`kernel ${kernel.name}: parameter ${field.name} is missing`);
    if (field.type === 'f32') bytes.setFloat32(index * 4, value, true);
    else if (field.type === 'i32') bytes.setInt32(index * 4, value, true);
    else bytes.setUint32(index * 4, value, true);
  }
  for (const name of Object.keys(params)) {
    if (!kernel.params.some((field) => field.name === name))
      throw new Error(`kernel ${kernel.name}: no parameter called ${name}`);
  }
  const key = Buffer.from(bytes.buffer).toString('base64');
  const known = device.uniforms.get(key) as Tensor | undefined;
  if (known) return known;
  const uniform = allocateTensor(device, {
    shape: [bytes.byteLength / 4],
    dtype: 'u32',
    label: `${kernel.name} params`,
    usage: GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST,
  });
  uploadTensor(device, uniform, bytes);
  device.uniforms.set(key, uniform);
  return uniform;
}

/**
 * The compiler's messages for a kernel with its defaults, as `file:line:column message`; empty when it is sound.
 * Tests compile every .wgsl with it.
 */
export async function compileMessages(device: Device, kernel: Kernel): Promise<string[]> {
  device.gpu.pushErrorScope('validation');
  const module = device.gpu.createShaderModule({ code: kernel.source });
  const info = await module.getCompilationInfo();
  await device.gpu.popErrorScope();
  return info.messages
    .filter((message) => message.type === 'error')
    .map((message) => `${kernel.name}.wgsl:${message.lineNum}:${message.linePos} ${message.message}`);
}
