/**
 * The model: embedding, layers, head and sampling. The file to read first.
 *
 * A step takes chunks of one or more sequences (prefill: many rows of few sequences; decode: one row each), runs all
 * layers over all rows in one submit, and brings back nothing but the sampled tokens. What a row computes depends on its
 * own sequence alone: the same bits come out whatever else is in the step and however the prompt was cut into chunks.
 */
import assert from 'node:assert/strict';
import type { Device } from '../kernels/device.ts';
import { NOT_REACHED, SAMPLED } from '../kernels/draft.ts';
import { embed } from '../kernels/embed.ts';
import { Recorder } from '../kernels/kernel.ts';
import { LOGPROB_WORDS, type TokenLogprobs } from '../kernels/logprobs.ts';
import { NO_TOKEN, sample, SAMPLING_WORDS, writeSamplingRow } from '../kernels/sample.ts';
import { uploadTensor, type Tensor } from '../kernels/tensor.ts';
import type { BlockContext, StepShape } from './attention.ts';
import {
  editBound,
  loggedSamples,
  recordChosen,
  recordRules,
  writeChoices,
  type Choosing,
  type Sample,
  type StepChoices,
} from './choice.ts';
import { loadModelConfig, OVERLAP_RATIO, type ConfigChoices, type ModelConfig } from './config.ts';
import { createKvCache, type DraftCache, type KvCache } from './kv-cache.ts';
import { recordHead, recordLayer } from './layer.ts';
import {
  allocateMtpWorkspace,
  draftContext,
  recordDrafts,
  recordDraftTokens,
  recordMtpInput,
  writeDraftStep,
  type DraftArgs,
  type DraftChunk,
  type MtpWorkspace,
} from './mtp.ts';
import { ReadbackPool } from './readback.ts';
import { recordRounding } from './rounding.ts';
import { openCheckpoint, type TensorSource } from './safetensors.ts';
import { loadWeights, type ModelWeights, type MtpWeights } from './weights.ts';
import { allocateWorkspace, modelLimits, writeRopeTables, type ModelLimits, type Workspace } from './workspace.ts';

/** A model on a device, ready to run. Owns the device memory of its weights and workspace. */
export interface Model {
  readonly device: Device;
  readonly config: ModelConfig;
  readonly limits: ModelLimits;
  readonly weights: ModelWeights;
  readonly workspace: Workspace;
  /** Null unless the draft block is loaded. */
  readonly mtpWorkspace: MtpWorkspace | null;
  readonly readback: ReadbackPool;
}

/** How far loading is: bytes of weights, then pipelines. */
export interface ModelProgress {
  readonly stage: 'weights' | 'pipelines';
  readonly done: number;
  readonly total: number;
  readonly note?: string;
}

export interface ModelOptions extends ConfigChoices {
  /** Most rows of one step. */
  readonly maxRows: number;
  /** Most sequences of one step. */
  readonly maxSequences: number;
  /** Longest sequence; the config's own limit if that is smaller. */
  readonly maxPositions: number;
  /** Load the draft block too. */
  readonly mtp?: boolean;
  readonly onProgress?: (progress: ModelProgress) => void;
}

/** How the token after a chunk is chosen. Temperature 0 takes the likeliest. */
export interface SamplingParams {
  readonly temperature: number;
  readonly topK: number;
  readonly topP: number;
  readonly minP: number;
  readonly seed: number;
}

/**
 * A chunk of one sequence: `tokens` stand at positions [start, start + tokens.length). `rules` and `logprobs` are about
 * what is sampled after it (model/choice.ts); a sequence whose rules look at earlier tokens (`needsEarlierTokens`) must
 * not be `drafted`.
 */
export interface ForwardSequence extends Choosing {
  readonly slot: number;
  /** Page ids in order of positions; enough for the chunk's last position. */
  readonly pages: readonly number[];
  readonly start: number;
  readonly tokens: ArrayLike<number>;
  /** Null: nothing is sampled after this chunk. */
  readonly sampling: SamplingParams | null;
  /** For steps that draft: the token after a chunk that does not sample, where it is known. */
  readonly next?: number | undefined;
  /**
   * For steps that draft: the last of `tokens`, whatever it is, is replaced by the draft in the slot. The row before it
   * samples as it would without a draft; if it samples the draft, the draft's row samples too.
   */
  readonly drafted?: boolean;
  /** Of a prompt whose own tokens' log probabilities are asked for. */
  readonly told?: PromptLog | undefined;
}

/** Log probabilities of a prompt's tokens, each from the logits of the row before it. */
export interface PromptLog {
  /** How many of the likeliest are told with each, 0 to 20. */
  readonly topCount: number;
  /** A step appends what it knows: of the token behind each row of its chunk, `next` behind the last. */
  readonly into: TokenLogprobs[];
}

export interface ForwardBatch {
  /** Chooses kernels' shapes only; results are the same. */
  readonly phase: 'prefill' | 'decode';
  readonly sequences: readonly ForwardSequence[];
}

/** Read a checkpoint directory and make the model ready: weights loaded, every pipeline compiled and run once. */
export async function loadModel(device: Device, directory: string, options: ModelOptions): Promise<Model> {
  const config = loadModelConfig(directory, options);
  const source = await openCheckpoint(directory);
  try {
    return await createModel(device, config, source, options);
  } finally {
    await source.close();
  }
}

/** `loadModel` from a config and weights that are already at hand. */
export async function createModel(
  device: Device,
  config: ModelConfig,
  source: TensorSource,
  options: ModelOptions,
): Promise<Model> {
  const onProgress = options.onProgress ?? (() => {});
  const weights = await loadWeights(device, config, source, {
    mtp: options.mtp ?? false,
    onProgress: (progress) => onProgress({ stage: 'weights', ...progress }),
  });
  const limits = modelLimits(device, config, options);
  const workspace = allocateWorkspace(device, config, limits);
  writeRopeTables(device, config, workspace);
  const mtpWorkspace = weights.mtp ? allocateMtpWorkspace(device, config, limits) : null;
  const model: Model = { device, config, limits, weights, workspace, mtpWorkspace, readback: new ReadbackPool(device) };
  await warmPipelines(model, onProgress);
  return model;
}

/**
 * Run one step, or several if the batch is larger than what the adapter binds at once.
 *
 * If the cache was made with `draft` (the model must then be loaded with `mtp`), the draft block runs behind the model:
 * every sequence that samples gets a draft, in its slot, for the step that runs what it has sampled. A token that is
 * sampled is the same with and without: its row computes the same bits whether the row before it is of this step or of
 * an earlier one, and its draw depends on seed and position alone. A draft only decides whether it comes one step
 * earlier.
 *
 * @returns the samples of every sequence that samples, in order: one, or two where a draft was right. Rejects when the
 *   device is lost, or when a row without rules has no usable logit.
 */
export async function forwardSamples(model: Model, cache: KvCache, batch: ForwardBatch): Promise<Sample[][]> {
  const samples: Sample[][] = [];
  for (const step of stepsOf(model, batch)) {
    samples.push(...(await (cache.draft ? draftingStep(model, cache, step) : plainStep(model, cache, step))));
  }
  return samples;
}

/** `forwardSamples` of a cache without drafts: the sampled token of every sequence that samples, in order. */
export async function forward(model: Model, cache: KvCache, batch: ForwardBatch): Promise<number[]> {
  const tokens: number[] = [];
  for (const step of stepsOf(model, batch)) tokens.push(...(await plainStep(model, cache, step)).flatMap(tokensOf));
  return tokens;
}

/** `forwardSamples` of a cache with drafts: the tokens of every sequence that samples, in order. */
export async function forwardDrafting(model: Model, cache: KvCache, batch: ForwardBatch): Promise<number[][]> {
  const tokens: number[][] = [];
  for (const step of stepsOf(model, batch)) tokens.push(...(await draftingStep(model, cache, step)).map(tokensOf));
  return tokens;
}

function tokensOf(samples: readonly Sample[]): number[] {
  return samples.map(({ token }) => {
    assert(token !== null, 'the rules of a sequence leave no token');
    return token;
  });
}

async function plainStep(model: Model, cache: KvCache, batch: ForwardBatch): Promise<Sample[][]> {
  const { device, workspace } = model;
  const { shape, choices } = writeStep(model, cache, batch);
  const recorder = new Recorder(device);
  const context = { recorder, config: model.config, workspace, shape };
  recordLayers(context, model, cache);
  await tellPrompts(context, model, batch);
  if (shape.sampledCount > 0) recordSamples(context, model, choices);
  return readSamples(model, recorder, { batch, shape, choices });
}

async function draftingStep(model: Model, cache: KvCache, batch: ForwardBatch): Promise<Sample[][]> {
  const { device, workspace, config } = model;
  const { mtp, buffers, draft } = draftParts(model, cache);
  const { phase, sequences } = batch;
  const { shape, choices } = writeStep(model, cache, batch);
  const chunks = draftChunks(sequences);
  // At least the two rows of a draft's outcomes.
  const rowsEach = Math.max(2, config.windowTokens);
  const args = { buffers, cache: draft, shape: writeDraftStep(device, buffers, { phase, chunks, rowsEach }) };
  const recorder = new Recorder(device);
  const context = { recorder, config, workspace, shape };
  recordDraftTokens(context, args);
  recordLayers(context, model, cache);
  await tellPrompts(context, model, batch);
  recordSamplesAndDrafts(context, { model, mtp, args, choices });
  return readSamples(model, recorder, { batch, shape, choices });
}

// Before the step's own samples: drafts write over the streams, and what the samples need is uploaded again behind this.
async function tellPrompts(context: BlockContext, model: Model, batch: ForwardBatch): Promise<void> {
  const asked = toldRows(batch.sequences);
  if (asked.length === 0) return;
  const { device, config, limits, weights } = model;
  const { recorder, workspace, shape } = context;
  const { choice, steps, logits, tokens } = workspace;
  recorder.submit();
  for (let first = 0; first < asked.length; first += limits.maxSampled) {
    const block = asked.slice(first, first + limits.maxSampled);
    const count = block.length;
    uploadTensor(device, steps.step, Uint32Array.of(shape.rowCount, batch.sequences.length, count, 0));
    uploadTensor(
      device,
      steps.sampled,
      Uint32Array.from(block, ({ row }) => row),
    );
    uploadTensor(
      device,
      tokens,
      Uint32Array.from(block, ({ token }) => token),
    );
    const asking = block.map(({ topCount }) => ({ logprobs: topCount, sampleCount: 1 }));
    const choices = writeChoices(device, choice, { config, limits, sequences: asking });
    recordHead({ ...context, shape: { ...shape, sampledCount: count } }, weights);
    recordRules(recorder, { ...choice, logits }, choices);
    recordChosen(recorder, { ...choice, logits, tokens }, choices);
    const parts = [{ source: choice.logprobs, byteLength: count * LOGPROB_WORDS * 4 }];
    const words = new Uint32Array(await readBack(model, recorder, parts));
    for (const [index, logprobs] of loggedSamples(choices, words, count).entries()) block[index]!.into.push(logprobs!);
  }
  writeSamples(model, batch);
}

// The rows of a step whose next token is of a prompt that asks, with that token.
function toldRows(sequences: readonly ForwardSequence[]): (PromptLog & { row: number; token: number })[] {
  let firstRow = 0;
  return sequences.flatMap(({ tokens, next, told }) => {
    const row = firstRow;
    firstRow += tokens.length;
    if (told === undefined) return [];
    const known = [...Array.from(tokens).slice(1), ...(next === undefined ? [] : [next])];
    return known.map((token, index) => ({ ...told, row: row + index, token }));
  });
}

// Submit, and bring back what was sampled: tokens, and log probabilities of those that ask.
async function readSamples(
  model: Model,
  recorder: Recorder,
  { batch, shape, choices }: { batch: ForwardBatch; shape: StepShape; choices: StepChoices },
): Promise<Sample[][]> {
  const { tokens, choice } = model.workspace;
  const { sampledCount } = shape;
  // Four bytes at least, to know that the step is done: `onSubmittedWorkDone` resolves even when the device is lost.
  const tokenWords = Math.max(1, sampledCount);
  const parts = [{ source: tokens, byteLength: tokenWords * 4 }];
  const loggedBytes = choices.logged.length * LOGPROB_WORDS * 4;
  if (loggedBytes > 0) parts.push({ source: choice.logprobs, byteLength: loggedBytes });
  const words = new Uint32Array(await readBack(model, recorder, parts));
  const logprobs = loggedSamples(choices, words.subarray(tokenWords), sampledCount);
  let next = 0;
  return batch.sequences.flatMap((sequence) => {
    const samples: Sample[] = [];
    for (let count = sampleCount(sequence); count > 0; count--, next++) {
      const token = words[next]!;
      if (token === NOT_REACHED) continue;
      assert(
        token !== NO_TOKEN || sequence.rules,
        'a row of logits holds no usable number: the weights or the cache are damaged',
      );
      samples.push({ token: token === NO_TOKEN ? null : token, logprobs: logprobs[next]! });
    }
    return samples.length === 0 ? [] : [samples];
  });
}

/** Positions whose logits are wanted. */
export type WantedPositions = 'all' | readonly number[];

/**
 * Run one step and bring back whole rows of logits, of the positions asked for: sequence by sequence, positions
 * ascending. For tools and tests; `sampling` is ignored.
 */
export async function forwardLogits(
  model: Model,
  cache: KvCache,
  batch: ForwardBatch & { readonly positions: WantedPositions },
): Promise<Float32Array[]> {
  const { phase, positions } = batch;
  const unsampled = batch.sequences.map((sequence) => ({ ...sequence, sampling: null }));
  const logits: Float32Array[] = [];
  for (const { sequences } of stepsOf(model, { phase, sequences: unsampled })) {
    const { shape } = writeStep(model, cache, { phase, sequences });
    const recorder = new Recorder(model.device);
    const context = { recorder, config: model.config, workspace: model.workspace, shape };
    recordLayers(context, model, cache);
    recorder.submit();
    logits.push(...(await readLogits(model, context, { sequences, positions, head: model.weights })));
  }
  return logits;
}

/**
 * Run one step of one sequence, then the draft block on all of its rows, and bring back the draft's logits: the row of
 * position p is about the token at p + 2. At the end of what is known (`next` left out) the last row has no draft.
 *
 * `cache` must have been made with `draft`, the model loaded with `mtp`.
 */
export async function forwardMtpLogits(
  model: Model,
  cache: KvCache,
  batch: {
    readonly phase: 'prefill' | 'decode';
    readonly sequence: ForwardSequence;
    readonly positions: WantedPositions;
  },
): Promise<Float32Array[]> {
  const { device, config, workspace, weights } = model;
  const { mtp, buffers, draft } = draftParts(model, cache);
  const { phase, positions } = batch;
  const sequences = [{ ...batch.sequence, sampling: null }];
  const recorder = new Recorder(device);
  const context = { recorder, config, workspace, shape: writeStep(model, cache, { phase, sequences }).shape };
  const chunks = draftChunks(sequences);
  const shape = writeDraftStep(device, buffers, { phase, chunks, rowsEach: Infinity });
  recordLayers(context, model, cache);
  if (shape.rowCount === 0) {
    recorder.submit();
    return [];
  }
  const own = draftContext(context, { buffers, shape });
  recordMtpInput(own, { weights: mtp, embedding: weights.embedding, buffers });
  recordLayer(own, { ratio: 0, weights: mtp.layer, cache: draft.layer });
  recorder.submit();
  const rows = sequences.map(({ start }) => ({ start, tokens: chunks[0]!.next }));
  return readLogits(model, own, { sequences: rows, positions, head: { ...mtp, head: weights.head } });
}

// Logits of rows whose streams the step before has left in the workspace, as many at a time as the workspace holds.
async function readLogits(
  model: Model,
  context: BlockContext,
  args: {
    sequences: readonly Pick<ForwardSequence, 'start' | 'tokens'>[];
    positions: WantedPositions;
    head: Pick<ModelWeights, 'headMix' | 'norm' | 'head'>;
  },
): Promise<Float32Array[]> {
  const { device, config, limits } = model;
  const { workspace } = context;
  const { sequences, positions } = args;
  const wanted = positions === 'all' ? null : new Set(positions);
  const rows: number[] = [];
  let row = 0;
  for (const { start, tokens } of sequences) {
    for (let index = 0; index < tokens.length; index++, row++) if (!wanted || wanted.has(start + index)) rows.push(row);
  }
  const rowBytes = config.vocabSize * 4;
  const logits: Float32Array[] = [];
  for (let first = 0; first < rows.length; first += limits.maxSampled) {
    const block = rows.slice(first, first + limits.maxSampled);
    const { rowCount } = context.shape;
    uploadTensor(device, workspace.steps.step, Uint32Array.of(rowCount, sequences.length, block.length, 0));
    uploadTensor(device, workspace.steps.sampled, Uint32Array.from(block));
    recordHead({ ...context, shape: { ...context.shape, sampledCount: block.length } }, args.head);
    const parts = [{ source: workspace.logits, byteLength: block.length * rowBytes }];
    const bytes = await readBack(model, context.recorder, parts);
    for (let index = 0; index < block.length; index++) {
      logits.push(new Float32Array(bytes.slice(index * rowBytes, (index + 1) * rowBytes)));
    }
  }
  return logits;
}

// ----------------------------------------------------------------------------------------------------------- layers

function recordLayers(context: BlockContext, model: Model, cache: KvCache): void {
  const { recorder, config, workspace, shape } = context;
  const { rows, step } = workspace.steps;
  const { rowCount } = shape;
  embed(recorder, { rows, table: model.weights.embedding, out: workspace.streams, step, rowCount });
  recordRounding(context, workspace.streams, { step, rowCount });
  for (const [index, { ratio }] of config.layers.entries()) {
    recordLayer(context, { ratio, weights: model.weights.layers[index]!, cache: cache.layers[index]! });
  }
}

function recordSamplesAndDrafts(
  context: BlockContext,
  parts: { model: Model; mtp: MtpWeights; args: DraftArgs; choices: StepChoices },
): void {
  const { model, mtp, args, choices } = parts;
  if (context.shape.sampledCount > 0) recordSamples(context, model, choices);
  recordDrafts(context, { ...args, weights: mtp, model: model.weights });
}

// The head, and the choice of a token from its logits under the rules of each row.
function recordSamples(context: BlockContext, model: Model, choices: StepChoices): void {
  const { recorder, workspace, shape } = context;
  const { choice, steps, logits, tokens } = workspace;
  recordHead(context, model.weights);
  recordRules(recorder, { ...choice, logits }, choices);
  sample(recorder, { ...steps, logits, tokens, sampledCount: shape.sampledCount });
  recordChosen(recorder, { ...choice, logits, tokens }, choices);
}

function draftParts(model: Model, cache: KvCache): { mtp: MtpWeights; buffers: MtpWorkspace; draft: DraftCache } {
  const { weights, mtpWorkspace } = model;
  assert(weights.mtp && mtpWorkspace, 'the draft block is not loaded');
  assert(cache.draft, 'the cache has no place for drafts');
  return { mtp: weights.mtp, buffers: mtpWorkspace, draft: cache.draft };
}

// ------------------------------------------------------------------------------------------------------------- steps

// Cut a batch into steps that the workspace holds. How a sequence is cut makes no difference to what it computes.
function* stepsOf({ limits, config }: Model, batch: ForwardBatch): Generator<ForwardBatch> {
  const { phase } = batch;
  let sequences: ForwardSequence[] = [];
  let rows = 0;
  let samples = 0;
  let edits = 0;
  for (const sequence of batch.sequences) {
    const { start, tokens, drafted, rules } = sequence;
    const editCount = editBound(rules, config.vocabSize, sampleCount(sequence));
    // A draft stays with the row that checks it.
    const leastRows = drafted ? tokens.length : 1;
    let first = 0;
    do {
      const isFull =
        rows + leastRows > limits.maxRows ||
        sequences.length === limits.maxSampled ||
        samples + sampleCount(sequence) > limits.maxSampled ||
        edits + editCount > limits.maxEdits;
      if (sequences.length > 0 && isFull) {
        yield { phase, sequences };
        sequences = [];
        rows = 0;
        samples = 0;
        edits = 0;
      }
      const end = Math.min(tokens.length, first + limits.maxRows - rows);
      const chunk = Array.from({ length: end - first }, (_, index) => tokens[first + index]!);
      const isLast = end === tokens.length;
      const part = { ...sequence, start: start + first, tokens: chunk };
      sequences.push(isLast ? part : { ...part, sampling: null, next: tokens[end] });
      rows += end - first;
      samples += isLast ? sampleCount(sequence) : 0;
      edits += isLast ? editCount : 0;
      first = end;
    } while (first < tokens.length);
  }
  yield { phase, sequences };
}

/** Rows of a chunk that sample: its last, and the one before a draft. */
function sampleCount({ sampling, drafted }: ForwardSequence): number {
  return sampling === null ? 0 : drafted ? 2 : 1;
}

// What follows each row of a step: the chunk's own next token, `next`, or what is sampled there.
function draftChunks(sequences: readonly ForwardSequence[]): DraftChunk[] {
  let row = 0;
  let sampled = 0;
  return sequences.map((sequence): DraftChunk => {
    const { slot, start, tokens, sampling, next: known, drafted = false } = sequence;
    const count = sampleCount(sequence);
    const firstRow = row;
    const next = Array.from(tokens).slice(1, drafted ? -1 : undefined);
    if (sampling === null && known !== undefined) next.push(known);
    for (let index = 0; index < count; index++) next.push(SAMPLED + sampled + index);
    const checkedBy = drafted ? sampled : null;
    row += tokens.length;
    sampled += count;
    return { slot, start, firstRow, next, checkedBy, sampling };
  });
}

// Describe the step to the device. Everything that changes from step to step is in these tensors, so that bind groups,
// which hold the rest, stay cached.
function writeStep(model: Model, cache: KvCache, batch: ForwardBatch): { shape: StepShape; choices: StepChoices } {
  const { device, limits, workspace } = model;
  const { sequences, phase } = batch;
  const rowCount = sequences.reduce((sum, { tokens }) => sum + tokens.length, 0);
  assert(
    sequences.length > 0 && sequences.length <= limits.maxSequences,
    `${sequences.length} sequences in a step of at most ${limits.maxSequences}`,
  );
  assert(rowCount <= limits.maxRows, `${rowCount} rows in a step of at most ${limits.maxRows}`);

  const rows = new Uint32Array(rowCount * 4);
  const chunks = new Uint32Array(sequences.length * 4);
  const pageTable = new Uint32Array(sequences.length * limits.maxPages);
  let row = 0;
  let lastPosition = 0;
  for (const [index, sequence] of sequences.entries()) {
    const { slot, pages, start, tokens } = sequence;
    checkSequence(model, cache, sequence);
    chunks.set([slot, start, row, tokens.length], index * 4);
    pageTable.set(pages.slice(0, limits.maxPages), index * limits.maxPages);
    for (let offset = 0; offset < tokens.length; offset++) {
      rows.set([tokens[offset]!, start + offset, index, offset], (row + offset) * 4);
    }
    row += tokens.length;
    lastPosition = Math.max(lastPosition, start + tokens.length - 1);
  }
  const { steps } = workspace;
  uploadTensor(device, steps.rows, rows);
  uploadTensor(device, steps.sequences, chunks);
  uploadTensor(device, steps.pageTable, pageTable);
  const { sampledCount, choices } = writeSamples(model, batch);
  return { shape: { phase, rowCount, sampledCount, lastPosition }, choices };
}

// What the head and the choice of tokens are told of a step, and how large it is.
function writeSamples(model: Model, { sequences }: ForwardBatch): { sampledCount: number; choices: StepChoices } {
  const { device, limits, workspace, config } = model;
  const sampledCount = sequences.reduce((sum, sequence) => sum + sampleCount(sequence), 0);
  const sampled = new Uint32Array(sampledCount);
  const sampling = new Uint32Array(sampledCount * SAMPLING_WORDS);
  let row = 0;
  let sample = 0;
  for (const sequence of sequences) {
    row += sequence.tokens.length;
    if (!sequence.sampling) continue;
    const end = sequence.start + sequence.tokens.length;
    for (let back = sampleCount(sequence) - 1; back >= 0; back--, sample++) {
      sampled[sample] = row - 1 - back;
      writeSamplingRow(sampling, sample, { ...sequence.sampling, position: end - back });
    }
  }

  const { steps } = workspace;
  uploadTensor(device, steps.step, Uint32Array.of(row, sequences.length, sampledCount, 0));
  if (sampledCount > 0) {
    uploadTensor(device, steps.sampled, sampled);
    uploadTensor(device, steps.sampling, sampling);
  }
  const asking = sequences.map((sequence) => ({ ...sequence, sampleCount: sampleCount(sequence) }));
  const choices = writeChoices(device, workspace.choice, { config, limits, sequences: asking });
  return { sampledCount, choices };
}

function checkSequence(model: Model, cache: KvCache, sequence: ForwardSequence): void {
  const { config, limits } = model;
  const { slot, pages, start, tokens } = sequence;
  const end = start + tokens.length;
  assert(tokens.length > 0, 'a chunk without tokens');
  assert(!sequence.drafted || tokens.length > 1, 'a draft without a token before it');
  assert(slot >= 0 && slot < cache.slotCount, `slot ${slot} of a cache of ${cache.slotCount}`);
  assert(end <= limits.maxPositions, `positions [${start}, ${end}) of at most ${limits.maxPositions}`);
  assert(
    pages.length * config.pageTokens >= end || cache.pageBytes === 0,
    `${pages.length} pages for ${end} positions`,
  );
  for (const page of pages)
    assert(page >= 0 && page < cache.pageCount, `page ${page} of a cache of ${cache.pageCount}`);
  for (let index = 0; index < tokens.length; index++) {
    assert(tokens[index]! < config.vocabSize, `token ${tokens[index]} of a vocabulary of ${config.vocabSize}`);
  }
}

// Submit what is recorded and bring the starts of tensors back, one behind the other, as memory of the caller's own.
function readBack(
  model: Model,
  recorder: Recorder,
  parts: readonly { source: Tensor; byteLength: number }[],
): Promise<ArrayBuffer> {
  return model.readback.read(
    parts.reduce((sum, { byteLength }) => sum + byteLength, 0),
    (buffer) => {
      let offset = 0;
      for (const { source, byteLength } of parts) {
        recorder.copy(source.buffer, source.offsetBytes, buffer, offset, byteLength);
        offset += byteLength;
      }
      recorder.submit();
    },
    (bytes) => bytes.slice(0),
  );
}

// ----------------------------------------------------------------------------------------------------------- warm-up

// Rows of the larger warm-up steps: more than any kernel's few-row variant takes.
const WARM_ROWS = 32;

// A pipeline is compiled by the driver at its first dispatch, which takes up to seconds; a first request must not.
// These steps reach every variant: many and few rows, with and without a choice of entries, greedy and random.
async function warmPipelines(model: Model, onProgress: (progress: ModelProgress) => void): Promise<void> {
  const { config, limits } = model;
  const drafting = model.mtpWorkspace !== null;
  const cache = createKvCache(model.device, config, { pageCount: 1, slotCount: 1, draft: drafting });
  const steps = warmSteps(config, limits);
  try {
    for (const [index, { note, phase, rowCount, lastPosition }] of steps.entries()) {
      onProgress({ stage: 'pipelines', done: index, total: steps.length, note });
      const start = lastPosition + 1 - rowCount;
      const pages = Array.from({ length: Math.ceil((lastPosition + 1) / config.pageTokens) }, () => 0);
      const greedy = { temperature: 0, topK: 0, topP: 1, minP: 0, seed: 0 };
      const tokens = new Uint32Array(rowCount).fill(config.bosTokenId);
      const asked = { rules: { banned: [config.eosTokenId] }, logprobs: 1 };
      const sequence = { slot: 0, pages, start, tokens, sampling: greedy, drafted: drafting && rowCount > 1, ...asked };
      await warmStep(model, cache, { phase, sequences: [sequence] });
    }
    onProgress({ stage: 'pipelines', done: steps.length, total: steps.length });
  } finally {
    cache.destroy();
  }
}

function warmSteps(
  config: ModelConfig,
  limits: ModelLimits,
): { note: string; phase: 'prefill' | 'decode'; rowCount: number; lastPosition: number }[] {
  // Far enough that ratio-4 layers choose among their entries.
  const last = Math.min(limits.maxPositions, OVERLAP_RATIO * (config.indexTopK + WARM_ROWS)) - 1;
  const steps: { note: string; phase: 'prefill' | 'decode'; rowCount: number; lastPosition: number }[] = [];
  for (const phase of ['prefill', 'decode'] as const) {
    for (const rowCount of new Set([1, Math.min(WARM_ROWS, limits.maxRows, last + 1)])) {
      steps.push({ note: `${phase} of ${rowCount}`, phase, rowCount, lastPosition: last });
    }
  }
  return steps;
}

// What a warm-up step computes is of no interest; its cache was never filled, so its logits may not be numbers.
async function warmStep(model: Model, cache: KvCache, batch: ForwardBatch): Promise<void> {
  const recorder = new Recorder(model.device);
  const { shape, choices } = writeStep(model, cache, batch);
  const context = { recorder, config: model.config, workspace: model.workspace, shape };
  if (cache.draft) {
    const { mtp, buffers, draft } = draftParts(model, cache);
    const step = { phase: batch.phase, chunks: draftChunks(batch.sequences), rowsEach: Infinity };
    const args = { buffers, cache: draft, shape: writeDraftStep(model.device, buffers, step) };
    recordDraftTokens(context, args);
    recordLayers(context, model, cache);
    recordSamplesAndDrafts(context, { model, mtp, args, choices });
  } else {
    recordLayers(context, model, cache);
    recordSamples(context, model, choices);
  }
  await readBack(model, recorder, [{ source: model.workspace.tokens, byteLength: 4 }]);
}
