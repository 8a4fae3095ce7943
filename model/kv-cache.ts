/**
 * What the model keeps of its past: pages of compressed entries, and one state slot a sequence.
 *
 * A page holds the entries of `pageTokens` tokens, of every compressed layer; pages grow with the sequence and are lent
 * by the scheduler. A slot has a fixed size and holds, per layer, the sliding window and the compressors' tails (the raw
 * rows of the unfinished block and, where blocks overlap, of the one before). Everything is f32 but index keys, whose
 * precision is chosen; one buffer a layer and kind. A page leaves the device as one run of bytes, and so does a slot:
 *
 *     page | layer 1 entries | layer 1 index keys | layer 2 entries | …        (layers without entries have no part)
 *     slot | layer 0 window | layer 1 window | tail keys | tail gates | index tail keys | index tail gates | …
 *          | draft window | draft                                   (only where steps draft)
 *
 * Steps that draft run one row of a sequence that may turn out wrong; nothing is undone then, since the next step starts
 * at that row's position again. A ring holds exactly what its next reader needs, and the wrong row took the place of the
 * oldest, which that reader is one position past; an entry or index key of a block that a wrong row completed is seen by
 * nobody before it is made again. Two wrong rows would need rings that are one row longer.
 *
 * A layer's share of all pages may be more than the adapter binds at once: it then lies in segments of whole pages.
 *
 * Nothing needs clearing when a page or a slot changes hands: what is valid follows from positions alone.
 *
 * Beside the slots there may be *states*: copies of slots, in the form in which a slot leaves the device, from which other
 * sequences with the same beginning go on. No kernel sees them.
 */
import type { Device } from '../kernels/device.ts';
import { indexKeyWords, type IndexPrecision } from '../kernels/index-keys.ts';
import { Recorder } from '../kernels/kernel.ts';
import { allocateTensor, destroyTensor, forEachPiece, uploadTensor, type Tensor } from '../kernels/tensor.ts';
import { OVERLAP_RATIO, type ModelConfig, type NumericMode } from './config.ts';
import { ReadbackPool } from './readback.ts';

/** Raw rows of one compressor that later entries still need. Row of token t at t mod ring. */
export interface TailTensors {
  /** f32 [slots, ring, c d]. */
  readonly key: Tensor;
  /** f32 [slots, ring, c d]; the position bias is already in it. */
  readonly gate: Tensor;
}

/** The past of one layer. */
export interface LayerCache {
  /** f32 [slots, window, d]: row of token t at t mod window. */
  readonly window: Tensor;
  /** f32 [pages, pageTokens / ratio, d], and the tail it is made from; null in sliding layers. */
  readonly entries: Tensor | null;
  readonly tail: TailTensors | null;
  /**
   * f32 [rows, entries of a row, d]: what attention copies the entries of some rows into, if `entries` lies in segments;
   * else null. All layers share its memory.
   */
  readonly gathered: Tensor | null;
  /** u32 [pages, pageTokens / ratio, indexKeyWords], and its tail; ratio-4 layers only. */
  readonly indexKeys: Tensor | null;
  readonly indexTail: TailTensors | null;
}

/** What drafting keeps of a sequence. */
export interface DraftCache {
  /** The draft block's own past: a window. Its row of token t is made from the token at t + 1 too. */
  readonly layer: LayerCache;
  /** u32 [slots, 1]: what the draft block expects behind the token that the next step runs. */
  readonly tokens: Tensor;
}

/** What two workers must agree on before bytes of pages and slots mean the same to both. */
export interface CacheLayout {
  readonly version: number;
  readonly dtype: 'f32';
  /** What was rounded before it was stored: a cache of one mode says nothing to a model in another. */
  readonly mode: NumericMode;
  readonly indexPrecision: IndexPrecision;
  readonly pageTokens: number;
  readonly windowTokens: number;
  readonly headDim: number;
  readonly indexHeadDim: number;
  readonly ratios: readonly number[];
  /** Slots hold the state of the draft block. */
  readonly draft: boolean;
  readonly pageBytes: number;
  readonly slotBytes: number;
}

export interface KvCache {
  readonly layers: readonly LayerCache[];
  /** Null unless steps draft. */
  readonly draft: DraftCache | null;
  readonly pageCount: number;
  readonly slotCount: number;
  readonly stateCount: number;
  readonly pageBytes: number;
  readonly slotBytes: number;
  readonly layout: CacheLayout;
  /**
   * Copy units out, after all work submitted so far: one buffer for each page in order, then the slot's. The buffers are
   * the caller's own memory. Rejects when the device is lost.
   */
  readUnits(units: { readonly pages: readonly number[]; readonly slot: number | null }): Promise<Uint8Array[]>;
  /** Write one page from bytes made by `readUnits`; ordered before work submitted later. */
  writePage(page: number, bytes: Uint8Array): void;
  /** Write one slot; ordered before work submitted later. */
  writeSlot(slot: number, bytes: Uint8Array): void;
  /** Copy a slot into a state; ordered behind work submitted before. */
  keepSlot(slot: number, state: number): void;
  /** Copy a state out, as `readUnits` does a slot. */
  readState(state: number): Promise<Uint8Array>;
  /** Copy a state into a slot; ordered before work submitted later. */
  resumeSlot(state: number, slot: number): void;
  /** Resolves when all writes so far have reached the device. Rejects when the device is lost. */
  flushed(): Promise<void>;
  /** Free all buffers. */
  destroy(): void;
}

const LAYOUT_VERSION = 2;
const WORD_BYTES = 4;

/** Rows that a compressor of this ratio must keep: the unfinished block, and the one before it where blocks overlap. */
export function tailRows(ratio: number): number {
  return ratio === OVERLAP_RATIO ? 2 * ratio : ratio;
}

/** Bytes of one page of a cache for this model, all layers. */
export function pageBytesOf(config: ModelConfig): number {
  const { headDim, indexHeadDim, indexPrecision, pageTokens } = config;
  let words = 0;
  for (const { ratio } of config.layers) {
    if (ratio > 0) words += (pageTokens / ratio) * headDim;
    if (ratio === OVERLAP_RATIO) words += (pageTokens / ratio) * indexKeyWords(indexHeadDim, indexPrecision);
  }
  return words * WORD_BYTES;
}

/**
 * Allocate a cache of `pageCount` pages, `slotCount` slots, and as many states as `stateBytes` hold. With `draft`, slots keep
 * the draft block's state too; of a state its last row is made from the token that followed there, so that the first
 * drafts of who goes on otherwise are worse, and nothing else.
 *
 * @throws RangeError when a layer's part of all slots, or of one page, exceeds what the device binds at once.
 */
export function createKvCache(
  device: Device,
  config: ModelConfig,
  options: { pageCount: number; slotCount: number; stateBytes?: number; draft?: boolean },
): KvCache {
  const { draft: withDraft = false, stateBytes = 0, ...size } = options;
  const { pageCount, slotCount } = size;
  const ungathered = config.layers.map((_, index) => allocateLayer(device, config, index, size));
  const gathering = allocateGathered(device, config, ungathered, size.pageCount);
  const layers = ungathered.map((layer, index): LayerCache => ({ ...layer, gathered: gathering.views[index]! }));
  const draft = withDraft ? allocateDraftCache(device, config, size.slotCount) : null;
  // Parts of a page and of a slot in the order of their bytes. The first dimension of each tensor is the page or slot.
  const pageParts = layers.flatMap((layer) => [layer.entries, layer.indexKeys].filter((part) => part !== null));
  const slotParts = layers.flatMap(slotPartsOf);
  if (draft) slotParts.push(draft.layer.window, draft.tokens);
  const pageBytes = pageBytesOf(config);
  const slotBytes = slotParts.reduce((sum, part) => sum + unitBytes(part), 0);
  const readback = new ReadbackPool(device);
  const states = Array.from({ length: Math.floor(stateBytes / slotBytes) }, (_, index) => {
    return allocateTensor(device, {
      shape: [slotBytes / WORD_BYTES],
      dtype: 'f32',
      label: `cache state ${index}`,
      usage: GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST,
    });
  });

  const write = (parts: readonly Tensor[], unit: number, bytes: Uint8Array): void => {
    let offset = 0;
    for (const part of parts) {
      const partBytes = unitBytes(part);
      uploadTensor(device, part, bytes.subarray(offset, offset + partBytes), unit * partBytes);
      offset += partBytes;
    }
  };

  return {
    layers,
    draft,
    pageCount,
    slotCount,
    stateCount: states.length,
    pageBytes,
    slotBytes,
    layout: {
      version: LAYOUT_VERSION,
      dtype: 'f32',
      mode: config.mode,
      indexPrecision: config.indexPrecision,
      pageTokens: config.pageTokens,
      windowTokens: config.windowTokens,
      headDim: config.headDim,
      indexHeadDim: config.indexHeadDim,
      ratios: config.layers.map((layer) => layer.ratio),
      draft: withDraft,
      pageBytes,
      slotBytes,
    },
    async readUnits({ pages, slot }) {
      for (const page of pages) checkUnit('page', page, size.pageCount);
      if (slot !== null) checkUnit('slot', slot, size.slotCount);
      const units = pages.map((page) => ({ parts: pageParts, unit: page, byteLength: pageBytes }));
      if (slot !== null) units.push({ parts: slotParts, unit: slot, byteLength: slotBytes });
      const totalBytes = units.reduce((sum, unit) => sum + unit.byteLength, 0);
      if (totalBytes === 0) return units.map(() => new Uint8Array(0));
      return readback.read(
        totalBytes,
        (buffer) => copyOut(device, units, buffer),
        (mapped) => {
          let offset = 0;
          return units.map(({ byteLength }) => {
            offset += byteLength;
            return new Uint8Array(mapped, offset - byteLength, byteLength).slice();
          });
        },
      );
    },
    writePage(page, bytes) {
      checkUnit('page', page, size.pageCount);
      checkBytes('page', bytes, pageBytes);
      write(pageParts, page, bytes);
    },
    writeSlot(slot, bytes) {
      checkUnit('slot', slot, size.slotCount);
      checkBytes('slot', bytes, slotBytes);
      write(slotParts, slot, bytes);
    },
    keepSlot(slot, state) {
      checkUnit('slot', slot, slotCount);
      checkUnit('state', state, states.length);
      copyOut(device, [{ parts: slotParts, unit: slot }], states[state]!.buffer);
    },
    readState(state) {
      checkUnit('state', state, states.length);
      // One part, whose only unit it is.
      const whole = { ...states[state]!, shape: [1] };
      return readback.read(
        slotBytes,
        (buffer) => copyOut(device, [{ parts: [whole], unit: 0 }], buffer),
        (mapped) => new Uint8Array(mapped, 0, slotBytes).slice(),
      );
    },
    resumeSlot(state, slot) {
      checkUnit('state', state, states.length);
      checkUnit('slot', slot, slotCount);
      const recorder = new Recorder(device);
      let offset = 0;
      for (const part of slotParts) {
        const partBytes = unitBytes(part);
        recorder.copy(states[state]!.buffer, offset, part.buffer, part.offsetBytes + slot * partBytes, partBytes);
        offset += partBytes;
      }
      recorder.submit();
    },
    flushed() {
      // A small read, since `onSubmittedWorkDone` resolves even when the device is lost.
      const first = slotParts[0]!;
      return readback.read(
        WORD_BYTES,
        (buffer) => copyOut(device, [{ parts: [{ ...first, byteLength: WORD_BYTES, shape: [1] }], unit: 0 }], buffer),
        () => {},
      );
    },
    destroy() {
      readback.destroy();
      for (const part of [...pageParts, ...slotParts, ...states]) destroyTensor(device, part);
      if (gathering.memory) destroyTensor(device, gathering.memory);
      // Dawn frees the memory of destroyed buffers at the next submit.
      device.queue.submit([]);
    },
  };
}

function allocateLayer(
  device: Device,
  config: ModelConfig,
  index: number,
  size: { pageCount: number; slotCount: number },
): Omit<LayerCache, 'gathered'> {
  const { ratio } = config.layers[index]!;
  const { headDim, indexHeadDim, indexPrecision, pageTokens, windowTokens } = config;
  const allocate = (name: string, shape: readonly number[]): Tensor =>
    allocateTensor(device, { shape, dtype: 'f32', label: `cache layer ${index} ${name}` });
  const allocatePages = (name: string, entryWords: number, dtype: 'f32' | 'u32'): Tensor => {
    const elements = (pageTokens / ratio) * entryWords;
    return allocateTensor(device, {
      shape: [size.pageCount, pageTokens / ratio, entryWords],
      dtype,
      label: `cache layer ${index} ${name}`,
      split: { rows: 1, bytes: elements * WORD_BYTES, elements },
    });
  };
  const tail = (name: string, dim: number): TailTensors => {
    const shape = [size.slotCount, tailRows(ratio), ratio === OVERLAP_RATIO ? 2 * dim : dim];
    return { key: allocate(`${name} keys`, shape), gate: allocate(`${name} gates`, shape) };
  };
  const indexed = ratio === OVERLAP_RATIO;
  return {
    window: allocate('window', [size.slotCount, windowTokens, headDim]),
    entries: ratio > 0 ? allocatePages('entries', headDim, 'f32') : null,
    tail: ratio > 0 ? tail('tail', headDim) : null,
    indexKeys: indexed ? allocatePages('index keys', indexKeyWords(indexHeadDim, indexPrecision), 'u32') : null,
    indexTail: indexed ? tail('index tail', indexHeadDim) : null,
  };
}

// Rows that are gathered for at once: more make no step faster.
const GATHERED_BYTES = 32 * 1024 * 1024;

// One piece of memory for what layers gather, and each layer's view of it; null where entries lie in one segment.
function allocateGathered(
  device: Device,
  config: ModelConfig,
  layers: readonly Pick<LayerCache, 'entries'>[],
  pageCount: number,
): { memory: Tensor | null; views: (Tensor | null)[] } {
  const { headDim, pageTokens, maxPositions, indexTopK } = config;
  const capacities = layers.map(({ entries }, index) => {
    if (!entries?.segments) return 0;
    const { ratio } = config.layers[index]!;
    const visible = Math.floor(Math.min(pageCount * pageTokens, maxPositions) / ratio);
    return ratio === OVERLAP_RATIO ? Math.min(visible, indexTopK) : visible;
  });
  const largest = Math.max(...capacities);
  if (largest === 0) return { memory: null, views: layers.map(() => null) };
  const rowElements = largest * headDim;
  const fitting = Math.floor(Math.min(GATHERED_BYTES, device.bindingBytes) / (rowElements * WORD_BYTES));
  const elements = Math.max(1, fitting) * rowElements;
  const memory = allocateTensor(device, { shape: [elements], dtype: 'f32', label: 'gathered entries' });
  const views = capacities.map((capacity) => {
    if (capacity === 0) return null;
    return { ...memory, shape: [Math.floor(elements / (capacity * headDim)), capacity, headDim] };
  });
  return { memory, views };
}

function allocateDraftCache(device: Device, config: ModelConfig, slotCount: number): DraftCache {
  const shape = [slotCount, config.windowTokens, config.headDim];
  const window = allocateTensor(device, { shape, dtype: 'f32', label: 'cache draft window' });
  return {
    layer: { window, entries: null, tail: null, gathered: null, indexKeys: null, indexTail: null },
    tokens: allocateTensor(device, { shape: [slotCount, 1], dtype: 'u32', label: 'cache drafts' }),
  };
}

function slotPartsOf(layer: LayerCache): Tensor[] {
  const tails = [layer.tail, layer.indexTail].filter((tail) => tail !== null);
  return [layer.window, ...tails.flatMap((tail) => [tail.key, tail.gate])];
}

/** Bytes of one page's or slot's share of a tensor. */
function unitBytes(part: Tensor): number {
  return part.byteLength / part.shape[0]!;
}

function checkUnit(kind: string, unit: number, count: number): void {
  if (!Number.isInteger(unit) || unit < 0 || unit >= count)
    throw new RangeError(`${kind} ${unit} of a cache of ${count}`);
}

function checkBytes(kind: string, bytes: Uint8Array, expected: number): void {
  if (bytes.byteLength !== expected) throw new RangeError(`a ${kind} has ${expected} bytes, found ${bytes.byteLength}`);
}

function copyOut(
  device: Device,
  units: readonly { parts: readonly Tensor[]; unit: number }[],
  target: GPUBuffer,
): void {
  const recorder = new Recorder(device);
  let offset = 0;
  for (const { parts, unit } of units) {
    for (const part of parts) {
      const partBytes = unitBytes(part);
      forEachPiece(part, { offsetBytes: unit * partBytes, byteLength: partBytes }, (piece) =>
        recorder.copy(piece.buffer, piece.at, target, offset + piece.done, piece.byteLength),
      );
      offset += partBytes;
    }
  }
  recorder.submit();
}
