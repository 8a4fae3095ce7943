/**
 * The GPU: one adapter, one device, opened with the limits the kernels need.
 *
 * Dawn frees everything when the object returned by `create()` is collected, even while a device is in use, so the
 * `Device` holds it and a module-level set holds the `Device` until `close()`.
 */
import { create, globals } from 'webgpu';

/** An open device and what its users share: the pipeline cache and the memory count. */
export interface Device {
  readonly gpu: GPUDevice;
  readonly queue: GPUQueue;
  readonly info: AdapterInfo;
  readonly limits: GPUSupportedLimits;
  readonly features: ReadonlySet<string>;
  /** The most bytes that one binding, and so one buffer of a tensor, may have. Larger tensors lie in segments (tensor.ts). */
  readonly bindingBytes: number;
  /** Rejects when the device is lost or reports an uncaptured error; never resolves. Whoever opens the device must watch it. */
  readonly lost: Promise<never>;
  /** Bytes of all live tensors. */
  allocatedBytes: number;
  /** Compiled pipelines and their bind groups; owned by kernel.ts. */
  readonly pipelines: Map<string, unknown>;
  /** Small immutable uniform buffers by content; owned by kernel.ts. */
  readonly uniforms: Map<string, unknown>;
  /** Destroy the device. Call when no GPU work is in flight; the process may exit afterwards. */
  close(): void;
}

/** What the adapter calls itself. */
export interface AdapterInfo {
  readonly name: string;
  readonly vendor: string;
  readonly architecture: string;
  /** Computed on the CPU (lavapipe, SwiftShader): kernels choose other shapes there, and workers share cores. */
  readonly software: boolean;
}

/** What `openDevice` throws: no usable adapter, or a limit that the adapter lacks. */
export class DeviceError extends Error {
  override readonly name = 'DeviceError';
}

const open = new Set<Device>();

// Limits that are raised to what the adapter offers; everything else stays at WebGPU's defaults.
const RAISED_LIMITS = [
  'maxBufferSize',
  'maxStorageBufferBindingSize',
  'maxStorageBuffersPerShaderStage',
  'maxComputeWorkgroupStorageSize',
  'maxComputeInvocationsPerWorkgroup',
  'maxComputeWorkgroupSizeX',
] as const;

// The most storage buffers one kernel binds (SwiftShader offers 12).
const STORAGE_BUFFERS_NEEDED = 10;

/**
 * Open the adapter called `adapterName` (Dawn's exact name), or the first one.
 *
 * `maxBindingBytes` lowers what one binding may have, so that tests can split small tensors: WebGPU has no limit below
 * 128 MiB.
 *
 * @throws DeviceError naming what is missing and what to install.
 */
export async function openDevice(options: { adapterName?: string; maxBindingBytes?: number } = {}): Promise<Device> {
  const flags = ['disable-dawn-features=timestamp_quantization'];
  if (options.adapterName) flags.push(`adapter=${options.adapterName}`);
  Object.assign(globalThis, globals);
  easePolling();
  const root = create(flags);
  const adapter = await root.requestAdapter();
  if (!adapter) {
    throw new DeviceError(
      'no WebGPU adapter: install a Vulkan driver (hardware, or mesa-vulkan-drivers 24 or newer for the CPU), or point VK_ICD_FILENAMES at one',
    );
  }
  if (adapter.limits.maxStorageBuffersPerShaderStage < STORAGE_BUFFERS_NEEDED) {
    throw new DeviceError(
      `adapter ${adapter.info.description} binds ${adapter.limits.maxStorageBuffersPerShaderStage} storage buffers, ${STORAGE_BUFFERS_NEEDED} are needed`,
    );
  }
  const requiredFeatures = (['shader-f16', 'subgroups', 'timestamp-query'] as const).filter((feature) =>
    adapter.features.has(feature),
  );
  const requiredLimits: Record<string, number> = {};
  for (const limit of RAISED_LIMITS) requiredLimits[limit] = adapter.limits[limit];
  const gpu = await adapter.requestDevice({ requiredFeatures, requiredLimits });

  let fail: (error: Error) => void = () => {};
  const lost = new Promise<never>((_, reject) => (fail = reject));
  lost.catch(() => {}); // the owner watches `lost`; without an owner the rejection must not end the process twice
  gpu.addEventListener('uncapturederror', (event) => {
    event.preventDefault(); // Dawn would also print it to stdout
    fail(new DeviceError(`GPU error: ${event.error.message}`));
  });
  void gpu.lost.then((info) => fail(new DeviceError(`GPU device lost (${info.reason}): ${info.message}`)));

  const { info } = adapter;
  const name = info.description || info.device || info.vendor;
  const device: Device & { readonly root: GPU; readonly adapter: GPUAdapter } = {
    gpu,
    queue: gpu.queue,
    info: {
      name,
      vendor: info.vendor,
      architecture: info.architecture,
      software: info.isFallbackAdapter || /llvmpipe|lavapipe|swiftshader/i.test(name),
    },
    limits: gpu.limits,
    features: new Set(gpu.features),
    bindingBytes: Math.min(
      gpu.limits.maxStorageBufferBindingSize,
      gpu.limits.maxBufferSize,
      options.maxBindingBytes ?? Infinity,
    ),
    lost,
    allocatedBytes: 0,
    pipelines: new Map(),
    uniforms: new Map(),
    close() {
      gpu.destroy();
      open.delete(device);
    },
    root,
    adapter,
  };
  open.add(device);
  return device;
}

/**
 * A device without an adapter that counts what is allocated on it, for whoever wants to know what something would take.
 * Buffers on it have no memory, writes to them are dropped, and nothing can run.
 */
export function countingDevice(): Device {
  Object.assign(globalThis, globals); // the flags that name a buffer's usage
  const buffer = { destroy: () => {} } as GPUBuffer;
  return {
    gpu: { createBuffer: () => buffer } as unknown as GPUDevice,
    queue: { writeBuffer: () => {}, submit: () => {} } as unknown as GPUQueue,
    info: { name: 'none', vendor: '', architecture: '', software: false },
    limits: {} as GPUSupportedLimits,
    bindingBytes: Number.MAX_SAFE_INTEGER,
    features: new Set(),
    lost: new Promise<never>(() => {}),
    allocatedBytes: 0,
    pipelines: new Map(),
    uniforms: new Map(),
    close: () => {},
  };
}

// How long Dawn may poll at full speed before it is slowed to once a millisecond.
const EAGER_POLL_MS = 0.5;
let polling = false;

/**
 * Dawn polls with `setImmediate` while a GPU promise is pending, which takes one whole core from a software adapter.
 * Its callback is a native function, so only its polls are slowed and nobody else's.
 */
function easePolling(): void {
  if (polling) return;
  polling = true;
  const immediate = globalThis.setImmediate;
  let eagerUntilMs = 0;
  const isDawnPoll = (callback: (...args: never[]) => void): boolean =>
    callback.name === '' &&
    callback.length === 0 &&
    'prototype' in callback &&
    Function.prototype.toString.call(callback).includes('[native code]');
  const eased = (callback: (...args: never[]) => void, ...args: never[]): unknown =>
    isDawnPoll(callback) && performance.now() >= eagerUntilMs
      ? setTimeout(callback as () => void, 1)
      : immediate(callback, ...args);
  Object.defineProperties(eased, Object.getOwnPropertyDescriptors(immediate));
  globalThis.setImmediate = eased as unknown as typeof setImmediate;
  const eager = (prototype: object, method: string): void => {
    const original = (prototype as Record<string, (...args: unknown[]) => unknown>)[method]!;
    (prototype as Record<string, unknown>)[method] = function (this: unknown, ...args: unknown[]) {
      eagerUntilMs = performance.now() + EAGER_POLL_MS;
      return original.apply(this, args);
    };
  };
  eager(GPUBuffer.prototype, 'mapAsync');
  eager(GPUQueue.prototype, 'onSubmittedWorkDone');
  eager(GPUDevice.prototype, 'popErrorScope');
}
