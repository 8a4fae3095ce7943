/**
 * What the precision of index keys costs: the lightning indexer's choice beside one in f64, and the embedded model's
 * answers to questions about texts that grow from 256 tokens to as many as it has positions.
 *
 * For each context and each precision one JSON line: `selection` says how many of the best k entries by f64 scores the
 * device chose (queries and exact keys are those of the f32 model; a row without a choice does not count), `answers` how
 * many greedy answers are exactly right, and how many are what f32 keys make of the same question.
 *
 *   npm run bench:recall -- [--contexts 256,512,1024,2048,4096] [--texts 1] [--questions 32] [--seed N] [--adapter NAME]
 *                           [--write]
 */
import { readFileSync, writeFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { DeviceError, openDevice, type Device } from '../kernels/device.ts';
import { indexKeyWords, packKeys, type IndexPrecision } from '../kernels/index-keys.ts';
import { selectEntries } from '../kernels/indexer.ts';
import { Recorder } from '../kernels/kernel.ts';
import { allocateTensor, destroyTensor, downloadTensor, uploadTensor, type Tensor } from '../kernels/tensor.ts';
import { loadChatEncoding, renderChat } from '../model/chat.ts';
import { OVERLAP_RATIO } from '../model/config.ts';
import { createKvCache, pageBytesOf, type KvCache } from '../model/kv-cache.ts';
import { loadTokenizer } from '../model/tokenizer.ts';
import { forward, loadModel, type Model } from '../model/transformer.ts';
import { AdapterError, describeAdapter, setUpAdapter } from '../server/adapter/adapter.ts';
import { createPrng } from '../test/support/prng.ts';
import { surroundings } from './measurement.ts';
import { recallFacts, type RecallFact } from './recall-prompts.ts';
import { recallTable, replaceTable, type RecallLine, type Selection } from './recall-table.ts';
import { parseCommandLine, positive, refuse, say } from './command-line.ts';

const HELP = `bench-recall [--contexts 256,512,...] [--texts N] [--questions N] [--seed N] [--adapter NAME] [--write]

  --contexts   tokens of a prompt, text and question
  --texts      texts of each context
  --questions  questions about each text
  --seed       of the texts
  --adapter    lavapipe, swiftshader or a part of an adapter's name
  --write      put the table into docs/recall.md
`;

const PRECISIONS: readonly IndexPrecision[] = ['f32', 'bf16', 'fp8', 'fp4'];
const modelDirectory = fileURLToPath(new URL('../model/nano', import.meta.url));
const tablePath = new URL('../docs/recall.md', import.meta.url);
const CHUNK_TOKENS = 256;
/** Rows whose choices are compared: the last ones of a text. */
const CHOOSING_ROWS = 64;
/** The longest answer has 5 tokens. */
const MAX_ANSWER_TOKENS = 8;
const GREEDY = { temperature: 0, topK: 0, topP: 1, minP: 0, seed: 0 };

function parseOptions() {
  const { values } = parseCommandLine(HELP, {
    options: {
      contexts: { type: 'string', default: '256,512,1024,2048,4096' },
      texts: { type: 'string', default: '1' },
      questions: { type: 'string', default: '32' },
      seed: { type: 'string', default: '20261129' },
      adapter: { type: 'string' },
      write: { type: 'boolean', default: false },
    },
  });
  return {
    contexts: values.contexts.split(',').map((text) => positive('--contexts', text)),
    textCount: positive('--texts', values.texts),
    questionCount: positive('--questions', values.questions),
    seed: positive('--seed', values.seed),
    adapter: values.adapter ?? process.env['HANDOFF_ADAPTER'],
    write: values.write,
  };
}

// ------------------------------------------------------------------------------------------------------------- texts

/** A text in tokens: what all its prompts begin with, and for each question the rest and the right answer. */
interface Text {
  readonly shared: readonly number[];
  readonly questions: readonly { readonly rest: readonly number[]; readonly answer: string }[];
}

function makeTexts(options: { contexts: readonly number[]; textCount: number; questionCount: number; seed: number }) {
  const tokenizer = loadTokenizer(modelDirectory);
  const encoding = loadChatEncoding(modelDirectory);
  const promptOf = (facts: readonly RecallFact[], question: string): number[] => {
    const content = `${facts.map(({ sentence }) => sentence).join(' ')}\n\n${question}`;
    return tokenizer.encode(renderChat(encoding, { messages: [{ role: 'user', content }], thinking: false }));
  };
  const random = createPrng(options.seed);
  const makeText = (contextTokens: number): Text => {
    // A fact has at least 7 tokens.
    const all = recallFacts(random, Math.min(500, Math.ceil(contextTokens / 7)));
    let count = all.length;
    const longest = (): number => promptOf(all.slice(0, count), 'What is the code of the orange mirror?').length;
    while (longest() > contextTokens) count -= Math.max(1, Math.floor((longest() - contextTokens) / 16));
    const facts = all.slice(0, count);
    // Spread over the text.
    const asked = Array.from(
      { length: Math.min(options.questionCount, count) },
      (_, index) => facts[Math.floor(((index + random()) * count) / Math.min(options.questionCount, count))]!,
    );
    const prompts = asked.map(({ question }) => promptOf(facts, question));
    let sharedLength = 0;
    while (prompts.every((prompt) => prompt[sharedLength] === prompts[0]![sharedLength])) sharedLength++;
    return {
      shared: prompts[0]!.slice(0, sharedLength),
      questions: asked.map(({ answer }, index) => ({ rest: prompts[index]!.slice(sharedLength), answer })),
    };
  };
  return { tokenizer, makeText };
}

// ----------------------------------------------------------------------------------------------------------- answers

/** One sequence of a model, in slot 0 and all pages of a cache. */
class Sequence {
  readonly #model: Model;
  readonly #cache: KvCache;
  readonly #pages: readonly number[];

  constructor(model: Model, cache: KvCache) {
    this.#model = model;
    this.#cache = cache;
    this.#pages = Array.from({ length: cache.pageCount }, (_, page) => page);
  }

  /** Run tokens from position `start` on; the token after them if `sampled`. */
  async run(tokens: readonly number[], start: number, sampled: boolean): Promise<number> {
    let next: number[] = [];
    for (let offset = 0; offset < tokens.length; offset += CHUNK_TOKENS) {
      const chunk = tokens.slice(offset, offset + CHUNK_TOKENS);
      const last = offset + chunk.length === tokens.length;
      const place = { slot: 0, pages: this.#pages, start: start + offset, tokens: chunk };
      const sequence = { ...place, sampling: sampled && last ? GREEDY : null };
      const phase = chunk.length === 1 ? 'decode' : 'prefill';
      next = await forward(this.#model, this.#cache, { phase, sequences: [sequence] });
    }
    return next[0] ?? 0;
  }

  /** The state behind the tokens so far; pages need no copy, since later tokens only write behind it. */
  async save(): Promise<Uint8Array> {
    return (await this.#cache.readUnits({ pages: [], slot: 0 }))[0]!;
  }

  restore(state: Uint8Array): void {
    this.#cache.writeSlot(0, state);
  }
}

/** Answer every question of a text greedily. */
async function answer(model: Model, text: Text, decode: (ids: readonly number[]) => string): Promise<string[]> {
  const { config, limits } = model;
  const cache = createKvCache(model.device, config, { pageCount: limits.maxPages, slotCount: 1 });
  try {
    const sequence = new Sequence(model, cache);
    await sequence.run(text.shared, 0, false);
    const state = await sequence.save();
    const answers: string[] = [];
    for (const { rest } of text.questions) {
      sequence.restore(state);
      let position = text.shared.length;
      const output: number[] = [];
      let token = await sequence.run(rest, position, true);
      position += rest.length;
      while (token !== config.eosTokenId && output.length < MAX_ANSWER_TOKENS) {
        output.push(token);
        token = await sequence.run([token], position++, true);
      }
      answers.push(decode(output));
    }
    return answers;
  } finally {
    cache.destroy();
  }
}

// ---------------------------------------------------------------------------------------------------------- selection

/** What the indexer of one layer is given for the last rows of a text, as the model with f32 keys computes it. */
interface IndexerInput {
  readonly firstPosition: number;
  readonly rowCount: number;
  readonly queries: Float32Array;
  readonly headWeights: Float32Array;
  /** [entries, width]. */
  readonly keys: Float32Array;
}

async function indexerInputs(model: Model, text: Text): Promise<IndexerInput[]> {
  const { device, config, limits, workspace } = model;
  const { indexHeads: heads, indexHeadDim: width, layers } = config;
  const rowCount = Math.min(CHOOSING_ROWS, text.shared.length);
  const firstPosition = text.shared.length - rowCount;
  const cache = createKvCache(device, config, { pageCount: limits.maxPages, slotCount: 1 });
  try {
    const sequence = new Sequence(model, cache);
    await sequence.run(text.shared.slice(0, firstPosition), 0, false);
    const state = await sequence.save();
    const inputs: IndexerInput[] = [];
    for (const [index, { ratio }] of layers.entries()) {
      if (ratio !== OVERLAP_RATIO) continue;
      // Layers share a workspace: what this one has put there stays when it is the last one.
      sequence.restore(state);
      const upToHere = { ...model, config: { ...config, layers: layers.slice(0, index + 1) } };
      await new Sequence(upToHere, cache).run(text.shared.slice(firstPosition), firstPosition, false);
      const floats = async (tensor: Tensor, count: number): Promise<Float32Array> =>
        new Float32Array(await downloadTensor(device, tensor)).subarray(0, count);
      inputs.push({
        firstPosition,
        rowCount,
        queries: await floats(workspace.attention.indexer!.queries, rowCount * heads * width),
        headWeights: await floats(workspace.attention.indexer!.headWeights, rowCount * heads),
        keys: await floats(cache.layers[index]!.indexKeys!, Math.floor(text.shared.length / ratio) * width),
      });
    }
    return inputs;
  } finally {
    cache.destroy();
  }
}

/** The best k of the first `count` entries by scores in f64, for one row; the smaller index wins a tie. */
function bestEntries(input: IndexerInput, row: number, count: number, k: number, width: number): Set<number> {
  const heads = input.headWeights.length / input.rowCount;
  const scores = Array.from({ length: count }, (_, entry) => {
    let total = 0;
    for (let head = 0; head < heads; head++) {
      const base = (row * heads + head) * width;
      let dot = 0;
      for (let i = 0; i < width; i++) dot += input.queries[base + i]! * input.keys[entry * width + i]!;
      total += input.headWeights[row * heads + head]! * Math.max(0, dot);
    }
    return total;
  });
  const order = scores.map((_, entry) => entry);
  order.sort((left, right) => scores[right]! - scores[left]! || left - right);
  return new Set(order.slice(0, k));
}

/** What the device chooses among keys stored in `precision`: k entries of each row. */
async function chosenEntries(
  device: Device,
  input: IndexerInput,
  args: { precision: IndexPrecision; k: number; width: number; entriesPerPage: number },
): Promise<Uint32Array> {
  const { precision, k, width, entriesPerPage } = args;
  const { rowCount, firstPosition } = input;
  const entryCount = input.keys.length / width;
  const pageCount = Math.ceil(entryCount / entriesPerPage);
  const heads = input.headWeights.length / rowCount;
  const tensors: Tensor[] = [];
  const make = (shape: readonly number[], values?: Float32Array | Uint32Array): Tensor => {
    const dtype = values instanceof Float32Array ? 'f32' : 'u32';
    const tensor = allocateTensor(device, { shape, dtype, label: 'bench-recall' });
    if (values) uploadTensor(device, tensor, values);
    tensors.push(tensor);
    return tensor;
  };
  try {
    const pageTable = make(
      [1, pageCount],
      Uint32Array.from({ length: pageCount }, (_, page) => page),
    );
    const rowsAt = (positions: readonly number[]): { rows: Tensor; step: Tensor; rowCount: number } => ({
      rows: make([positions.length, 4], Uint32Array.from(positions.flatMap((position, row) => [0, position, 0, row]))),
      step: make([4], Uint32Array.of(positions.length, 1, 0, 0)),
      rowCount: positions.length,
    });
    const keys = make([pageCount, entriesPerPage, indexKeyWords(width, precision)]);
    const selected = make([rowCount, k]);
    const scores = make([rowCount, entryCount], new Float32Array(rowCount * entryCount));
    const common = { keys, precision, pageTable, ratio: OVERLAP_RATIO };
    const completing = Array.from({ length: entryCount }, (_, entry) => (entry + 1) * OVERLAP_RATIO - 1);
    const choosing = Array.from({ length: rowCount }, (_, row) => firstPosition + row);
    const recorder = new Recorder(device);
    packKeys(recorder, { ...common, ...rowsAt(completing), staged: make([entryCount, width], input.keys) });
    selectEntries(recorder, {
      ...common,
      ...rowsAt(choosing),
      queries: make([rowCount, heads, width], input.queries),
      headWeights: make([rowCount, heads], input.headWeights),
      scores,
      selected,
      lastPosition: firstPosition + rowCount - 1,
    });
    recorder.submit();
    return new Uint32Array(await downloadTensor(device, selected));
  } finally {
    for (const tensor of tensors) destroyTensor(device, tensor);
  }
}

/** The share of the best k that each row's choice has, over all rows that have one. */
async function recallOf(
  model: Model,
  inputs: readonly IndexerInput[],
  precision: IndexPrecision,
  k: number,
): Promise<Selection | null> {
  const { config, device } = model;
  const width = config.indexHeadDim;
  const entriesPerPage = config.pageTokens / OVERLAP_RATIO;
  const shares: number[] = [];
  for (const input of inputs) {
    const chosen = await chosenEntries(device, input, { precision, k, width, entriesPerPage });
    for (let row = 0; row < input.rowCount; row++) {
      const count = Math.floor((input.firstPosition + row + 1) / OVERLAP_RATIO);
      // The model makes index queries only for steps in which it has a choice itself.
      if (count <= Math.max(k, config.indexTopK)) continue;
      const best = bestEntries(input, row, count, k, width);
      let found = 0;
      for (let slot = 0; slot < k; slot++) if (best.has(chosen[row * k + slot]!)) found++;
      shares.push(found / k);
    }
  }
  if (shares.length === 0) return null;
  const mean = shares.reduce((sum, share) => sum + share, 0) / shares.length;
  return { k, rows: shares.length, mean: fourDigits(mean), least: fourDigits(Math.min(...shares)) };
}

function fourDigits(value: number): number {
  return Number(value.toFixed(4));
}

// --------------------------------------------------------------------------------------------------------------- main

const options = parseOptions();

async function main(): Promise<void> {
  const choice = await setUpAdapter({ wanted: options.adapter, say });
  Object.assign(process.env, choice.environment);
  for (const line of describeAdapter(choice)) say(line);
  const device = await openDevice({ adapterName: choice.name });
  try {
    await bench(device);
  } finally {
    device.close();
  }
}

async function bench(device: Device): Promise<void> {
  const { contexts, textCount, questionCount, seed } = options;
  const { commit } = surroundings([]);
  const { tokenizer, makeText } = makeTexts(options);
  const model = await loadModel(device, modelDirectory, {
    maxRows: CHUNK_TOKENS,
    maxSequences: 1,
    maxPositions: Math.max(...contexts) + MAX_ANSWER_TOKENS,
    indexPrecision: 'f32',
  });
  const { config } = model;
  if (Math.max(...contexts) > config.maxPositions) refuse(`--contexts: the model has ${config.maxPositions} positions`);
  const lines: RecallLine[] = [];
  for (const contextTokens of contexts) {
    // The answer must fit too.
    const texts = Array.from({ length: textCount }, () =>
      makeText(Math.min(contextTokens, config.maxPositions - MAX_ANSWER_TOKENS)),
    );
    const inputs = (await sequentially(texts, (text) => indexerInputs(model, text))).flat();
    const right = texts.flatMap(({ questions }) => questions.map((question) => question.answer));
    let exactAnswers: string[] | null = null;
    for (const precision of PRECISIONS) {
      const startMs = performance.now();
      const chosen = { ...config, indexPrecision: precision };
      const withPrecision = { ...model, config: chosen };
      const decode = (ids: readonly number[]): string => tokenizer.decode(ids);
      const answers = (await sequentially(texts, (text) => answer(withPrecision, text, decode))).flat();
      exactAnswers ??= answers;
      const line: RecallLine = {
        bench: 'recall',
        commit,
        device: device.info.name,
        seed,
        contextTokens,
        precision,
        keyBytes: 4 * indexKeyWords(config.indexHeadDim, precision),
        kvBytesPerToken: pageBytesOf(chosen) / config.pageTokens,
        selections: [
          await recallOf(model, inputs, precision, config.indexTopK),
          await recallOf(model, inputs, precision, config.indexTopK / 4),
        ],
        answers: {
          asked: right.length,
          right: answers.filter((text, index) => text === right[index]).length,
          asWithF32: answers.filter((text, index) => text === exactAnswers![index]).length,
        },
      };
      lines.push(line);
      process.stdout.write(`${JSON.stringify(line)}\n`);
      say(`${contextTokens} tokens, ${precision}: ${((performance.now() - startMs) / 1000).toFixed(0)} s`);
    }
  }
  if (!options.write) return;
  const how = `${textCount} ${textCount === 1 ? 'text' : 'texts'} a context, ${questionCount} questions each, seed ${seed}`;
  writeFileSync(tablePath, replaceTable(readFileSync(tablePath, 'utf8'), recallTable(lines, how)));
  say(`written: ${fileURLToPath(tablePath)}`);
}

/** Map one after the other: there is one device. */
async function sequentially<T, R>(items: readonly T[], map: (item: T) => Promise<R>): Promise<R[]> {
  const results: R[] = [];
  for (const item of items) results.push(await map(item));
  return results;
}

// Whoever reads the lines may have seen enough (`| head`).
process.stdout.on('error', (error: NodeJS.ErrnoException) => process.exit(error.code === 'EPIPE' ? 0 : 1));
try {
  await main();
} catch (error) {
  if (!(error instanceof AdapterError || error instanceof DeviceError)) throw error;
  say(`bench-recall: ${error.message}`);
  process.exitCode = 1;
}
