/**
 * The one translation between the scheduler's batches and the model's forward pass.
 *
 * Owns the device, the model and the KV cache of one worker. `scheduler/` decides what runs and knows no tensor,
 * `model/` runs it and knows no batch.
 */
import { openDevice, type Device } from '../kernels/device.ts';
import type { TokenLogprobs } from '../kernels/logprobs.ts';
import type { Choosing, Sample } from '../model/choice.ts';
import { ConfigError, loadModelConfig, type ConfigChoices, type ModelConfig } from '../model/config.ts';
import { createKvCache, pageBytesOf, type KvCache } from '../model/kv-cache.ts';
import { forwardSamples, loadModel, type ForwardBatch, type Model, type PromptLog } from '../model/transformer.ts';
import type { DecodeBatch, PrefillBatch, RowRules } from '../scheduler/types.ts';
import type { PageId, RoomKey, SamplingParams } from '../transfer/messages.ts';

/** Stands where the draft goes in a step's tokens. */
export const DRAFT_PLACE = 0;

/** Sizes of one worker's engine; all are capacities fixed at start. */
export interface EngineOptions {
  readonly modelDir: string;
  /** Dawn's name of the adapter; the first one when left out. */
  readonly adapterName?: string;
  /** Rows of the largest step: prompt tokens on prefill, sequences on decode. */
  readonly maxRows: number;
  readonly maxSequences: number;
  /** Tokens of one page and of a sequence, what is rounded, how index keys are stored; the model's own where left out. */
  readonly choices?: ConfigChoices;
  /** Pages of the cache, decided once the size of a page is known. */
  readonly choosePageCount: (sizes: { contextTokens: number; pageBytes: number }) => number;
  readonly slotCount: number;
  /** Steps draft with the checkpoint's draft block; slots hold what that takes. */
  readonly speculative?: boolean;
  /** Adapter memory for copies of slots; none when left out. */
  readonly stateBytes?: number;
  readonly onProgress?: (progress: LoadProgress) => void;
}

/** How far loading is. */
export interface LoadProgress {
  readonly stage: 'weights' | 'pipelines';
  readonly done: number;
  readonly total: number;
  readonly note?: string;
}

/** How well drafts do. A step gives a row one token, and one more for a right draft. */
export interface DraftCounts {
  readonly rows: number;
  readonly drafts: number;
  readonly rightDrafts: number;
}

/**
 * Which tokens may be chosen next, by room, for the rooms that have such a rule: bit `id % 32` of word `id >> 5`,
 * ceil(V / 32) words. They must stay as they are until the step is done. A room with a mask must not be drafted.
 */
export type TokenMasks = ReadonlyMap<RoomKey, Uint32Array>;

/** What a step tells of one chunk of a prompt. */
export interface PrefilledChunk {
  /** Of the last chunk; its token is null where the chunk's rules and mask leave none. Null of the others. */
  readonly sample: Sample | null;
  /** Of the tokens behind the chunk's own, as far as they are of the prompt; null where they are not asked for. */
  readonly promptLogprobs: readonly TokenLogprobs[] | null;
}

/** A loaded model that runs batches and moves KV units in and out of the cache. */
export interface Engine {
  readonly config: ModelConfig;
  readonly device: Device;
  readonly contextTokens: number;
  readonly pageCount: number;
  readonly slotCount: number;
  /** Copies of slots that there is memory for. */
  readonly stateCount: number;
  readonly pageBytes: number;
  readonly slotBytes: number;
  /** What two workers must agree on to exchange units; compared field by field in HELLO. */
  readonly layout: KvCache['layout'];
  /** Run the chunks in one step. Resolves with what is known of each, in batch order. */
  prefill(batch: PrefillBatch, masks?: TokenMasks): Promise<PrefilledChunk[]>;
  /**
   * Advance every row. Resolves with the next sample of each row, in batch order; with two where a draft was right. A
   * token is null where the row's rules and mask leave none.
   */
  decode(batch: DecodeBatch, masks?: TokenMasks): Promise<Sample[][]>;
  /** Prompt tokens computed so far by `prefill`. */
  prefilledTokens(): number;
  /** Rows that `decode` has run so far, how many of them had a draft, and how many a right one. */
  draftCounts(): DraftCounts;
  /** Bytes of the pages in order, then of the slot when it is given; each in memory of its own. */
  readUnits(pages: readonly PageId[], slot: number | null): Promise<Uint8Array[]>;
  /** Bytes of a copy of a slot. */
  readState(state: number): Promise<Uint8Array>;
  /** Copy a slot into a state, ordered behind every earlier step and write. */
  keepSlot(slot: number, state: number): void;
  /** Copy a unit into the cache, ordered before every later step. */
  writePage(page: PageId, bytes: Uint8Array): void;
  writeSlot(slot: number, bytes: Uint8Array): void;
  /** Destroy the device. No step or read may be running. */
  close(): void;
}

/**
 * Open the adapter, load the checkpoint, compile and warm the pipelines.
 *
 * @throws DeviceError, ConfigError or a loader error naming what is wrong.
 */
export async function openEngine(options: EngineOptions): Promise<Engine> {
  // Read before the adapter is opened: a wrong directory should fail in milliseconds.
  const config = loadModelConfig(options.modelDir, options.choices);
  const { speculative = false } = options;
  if (speculative) requireDraftBlock(config);
  const contextTokens = config.maxPositions;
  const device = await openDevice(options.adapterName === undefined ? {} : { adapterName: options.adapterName });
  try {
    const pageCount = options.choosePageCount({ contextTokens, pageBytes: pageBytesOf(config) });
    const model = await loadModel(device, options.modelDir, {
      maxRows: options.maxRows,
      maxSequences: options.maxSequences,
      maxPositions: contextTokens,
      mtp: speculative,
      ...options.choices,
      ...(options.onProgress ? { onProgress: options.onProgress } : {}),
    });
    const { slotCount, stateBytes = 0 } = options;
    const cache = createKvCache(device, config, { pageCount, slotCount, stateBytes, draft: speculative });
    return engineOf(device, model, cache);
  } catch (error) {
    device.close();
    throw error;
  }
}

/**
 * Refuse to speculate with a checkpoint that has nothing to do it with.
 *
 * @throws ConfigError naming the field.
 */
export function requireDraftBlock(config: ModelConfig): void {
  if (config.mtpBlocks > 0) return;
  throw new ConfigError('num_nextn_predict_layers', 'is 0: this checkpoint has no draft block for --speculative on');
}

function engineOf(device: Device, model: Model, cache: KvCache): Engine {
  let prefilledTokens = 0;
  const counts = { rows: 0, drafts: 0, rightDrafts: 0 };
  const run = (batch: ForwardBatch): Promise<Sample[][]> => forwardSamples(model, cache, batch);
  return {
    config: model.config,
    device,
    contextTokens: model.limits.maxPositions,
    pageCount: cache.pageCount,
    slotCount: cache.slotCount,
    stateCount: cache.stateCount,
    pageBytes: cache.pageBytes,
    slotBytes: cache.slotBytes,
    layout: cache.layout,
    async prefill(batch, masks) {
      // Before the first `await`: what the scheduler does with these states from now on comes later on the device, too.
      for (const { resume, slot } of batch.chunks) if (resume !== null) cache.resumeSlot(resume, slot);
      const told = batch.chunks.map(({ sampling: { promptLogprobs, logprobs = 0 } }): PromptLog | undefined =>
        promptLogprobs ? { topCount: logprobs, into: [] } : undefined,
      );
      const sampled = await run({
        phase: 'prefill',
        sequences: batch.chunks.map((chunk, index) => ({
          slot: chunk.slot,
          pages: chunk.pages,
          start: chunk.start,
          tokens: chunk.tokens,
          next: chunk.next ?? undefined,
          sampling: chunk.last ? chunk.sampling : null,
          told: told[index],
          ...(chunk.last ? choosing(chunk, masks) : {}),
        })),
      });
      for (const { start, end, slot, keep } of batch.chunks) {
        if (keep !== null) cache.keepSlot(slot, keep);
        prefilledTokens += end - start;
      }
      const samples = sampled.flat();
      return batch.chunks.map(({ last }, index) => ({
        sample: last ? samples.shift()! : null,
        promptLogprobs: told[index]?.into ?? null,
      }));
    },
    async decode(batch, masks) {
      const sampled = await run({
        phase: 'decode',
        sequences: batch.rows.map((row) => ({
          slot: row.slot,
          pages: row.pages,
          start: row.position,
          tokens: row.drafted ? [row.token, DRAFT_PLACE] : [row.token],
          drafted: row.drafted,
          sampling: row.sampling,
          ...choosing(row, masks),
        })),
      });
      counts.rows += batch.rows.length;
      counts.drafts += batch.rows.filter(({ drafted }) => drafted).length;
      counts.rightDrafts += sampled.reduce((sum, tokens) => sum + tokens.length - 1, 0);
      return sampled;
    },
    prefilledTokens: () => prefilledTokens,
    draftCounts: () => ({ ...counts }),
    readUnits: (pages, slot) => cache.readUnits({ pages: [...pages], slot }),
    readState: (state) => cache.readState(state),
    keepSlot: (slot, state) => cache.keepSlot(slot, state),
    writePage: (page, bytes) => cache.writePage(page, bytes),
    writeSlot: (slot, bytes) => cache.writeSlot(slot, bytes),
    close: () => device.close(),
  };
}

/** A row's rules and its wish for log probabilities, as the model takes them. */
function choosing(
  { key, rules, sampling }: { key: RoomKey; rules: RowRules | null; sampling: SamplingParams },
  masks: TokenMasks | undefined,
): Choosing {
  const mask = masks?.get(key);
  const logprobs = sampling.logprobs ?? null;
  if (rules === null) return { rules: mask === undefined ? null : { mask }, logprobs };
  const { biasIds: ids, biases: amounts, banned, penalties } = rules;
  return { rules: { mask, bias: { ids, amounts }, banned, penalties: penalties ?? undefined }, logprobs };
}
