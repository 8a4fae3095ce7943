/** A model and its cache for tests: whole prompts in chunks, batches of decode rows, always the full logits. */
import type { Device } from '../../kernels/device.ts';
import { loadModelConfig, type ConfigChoices, type ModelConfig } from '../../model/config.ts';
import { createKvCache, type KvCache } from '../../model/kv-cache.ts';
import { openCheckpoint, type TensorSource } from '../../model/safetensors.ts';
import { createModel, forwardLogits, type Model } from '../../model/transformer.ts';

/** Sizes that all tests of a file share. */
export interface TestEngineSize extends ConfigChoices {
  readonly maxRows: number;
  readonly maxSequences: number;
  readonly maxPositions: number;
  readonly mtp?: boolean;
}

/** Load a checkpoint directory, or weights that are at hand. */
export async function openTestModel(
  device: Device,
  from: string | { config: ModelConfig; source: TensorSource },
  size: TestEngineSize,
): Promise<Model> {
  if (typeof from !== 'string') return createModel(device, from.config, from.source, size);
  const source = await openCheckpoint(from);
  try {
    return await createModel(device, loadModelConfig(from, size), source, size);
  } finally {
    await source.close();
  }
}

/** Where one sequence lives in a cache. */
export interface TestPlace {
  readonly slot: number;
  readonly pages: readonly number[];
}

/** A cache of `slotCount` places, none of whose pages are in order or beside each other. */
export function createTestCache(
  model: Model,
  slotCount: number,
  { draft = model.mtpWorkspace !== null, stateBytes = 0 }: { draft?: boolean; stateBytes?: number } = {},
): { cache: KvCache; places: TestPlace[] } {
  const pagesEach = model.limits.maxPages;
  const pageCount = pagesEach * slotCount;
  const cache = createKvCache(model.device, model.config, { pageCount, slotCount, stateBytes, draft });
  const places = Array.from({ length: slotCount }, (_, index) => ({
    slot: (index + 1) % slotCount,
    pages: Array.from({ length: pagesEach }, (__, page) => pageCount - 1 - (page * slotCount + index)),
  }));
  return { cache, places };
}

/** Logits of every token of a prompt, computed `chunk` tokens at a time. */
export async function prefillLogits(
  model: Model,
  cache: KvCache,
  args: { place: TestPlace; ids: readonly number[]; chunk: number; start?: number; phase?: 'prefill' | 'decode' },
): Promise<Float32Array[]> {
  const { place, ids, chunk, start = 0, phase = 'prefill' } = args;
  const rows: Float32Array[] = [];
  for (let offset = 0; offset < ids.length; offset += chunk) {
    const tokens = ids.slice(offset, offset + chunk);
    const sequence = { ...place, start: start + offset, tokens, sampling: null };
    rows.push(...(await forwardLogits(model, cache, { phase, sequences: [sequence], positions: 'all' })));
  }
  return rows;
}
