/**
 * Reads from the device: mappable buffers, a power of two long, that are used again. Fresh ones cost page faults, and
 * their memory is freed only at a later submit.
 */
import { DeviceError, type Device } from '../kernels/device.ts';

// Smaller reads share buffers of this size.
const MIN_BUFFER_BYTES = 256;
// Idle buffers kept for the next read; more are freed. Reads under way at once are bounded by their callers.
const MAX_IDLE_BUFFERS = 8;

export class ReadbackPool {
  readonly #device: Device;
  readonly #idle: GPUBuffer[] = [];

  constructor(device: Device) {
    this.#device = device;
  }

  /**
   * Let `submit` copy `byteLength` bytes to the start of a buffer and submit that, wait, and hand the bytes to `take`,
   * which must copy what it keeps.
   *
   * @throws DeviceError when the device is lost meanwhile. (A pending map rejects then, so there is no need to race
   *   it against `device.lost`, whose list of waiters would grow by one with every step.)
   */
  async read<T>(byteLength: number, submit: (buffer: GPUBuffer) => void, take: (bytes: ArrayBuffer) => T): Promise<T> {
    const found = this.#idle.findIndex((buffer) => buffer.size >= byteLength);
    const buffer = found >= 0 ? this.#idle.splice(found, 1)[0]! : this.#allocate(byteLength);
    let intact = false;
    try {
      submit(buffer);
      await this.#map(buffer, byteLength);
      const result = take(buffer.getMappedRange(0, byteLength));
      buffer.unmap();
      intact = true;
      return result;
    } finally {
      if (intact && this.#idle.length < MAX_IDLE_BUFFERS) this.#keep(buffer);
      else buffer.destroy();
    }
  }

  /** Free the idle buffers. */
  destroy(): void {
    for (const buffer of this.#idle.splice(0)) buffer.destroy();
  }

  async #map(buffer: GPUBuffer, byteLength: number): Promise<void> {
    try {
      await buffer.mapAsync(GPUMapMode.READ, 0, byteLength);
    } catch (cause) {
      throw new DeviceError(`a read of ${byteLength} bytes from the GPU failed: ${(cause as Error).message}`, {
        cause,
      });
    }
  }

  // Smallest first, so that a small read does not occupy a large buffer.
  #keep(buffer: GPUBuffer): void {
    this.#idle.push(buffer);
    this.#idle.sort((left, right) => left.size - right.size);
  }

  #allocate(byteLength: number): GPUBuffer {
    const size = Math.max(MIN_BUFFER_BYTES, 2 ** Math.ceil(Math.log2(byteLength)));
    const usage = GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST;
    return this.#device.gpu.createBuffer({ size, usage, label: 'readback' });
  }
}
