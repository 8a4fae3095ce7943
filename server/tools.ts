/**
 * The engine without a server: `handoff logits` and `handoff generate`.
 *
 * Both take any checkpoint directory of the architecture. Results go to standard output, one JSON value or text and
 * nothing else; what a person should know goes to standard error.
 */
import { readFileSync } from 'node:fs';
import { once } from 'node:events';
import { DeviceError, openDevice, type Device } from '../kernels/device.ts';
import { loadChatEncoding, renderChat } from '../model/chat.ts';
import { ConfigError as ModelConfigError, loadModelConfig, type ModelConfig } from '../model/config.ts';
import { createKvCache, type KvCache } from '../model/kv-cache.ts';
import { CheckpointError } from '../model/safetensors.ts';
import { createDetokenizer, loadTokenizer } from '../model/tokenizer.ts';
import {
  forward,
  forwardDrafting,
  forwardLogits,
  forwardMtpLogits,
  loadModel,
  type ForwardSequence,
  type Model,
} from '../model/transformer.ts';
import { describeAdapter, setUpAdapter } from './adapter/adapter.ts';
import { ConfigError, type GenerateConfig, type LogitsConfig } from './config.ts';
import { DRAFT_PLACE, requireDraftBlock } from './engine.ts';
import { createTerminal } from './supervisor.ts';

// Tokens computed at once when nothing is asked for. Results do not depend on it, memory does.
const CHUNK_TOKENS = 1024;
// f32 values have at most 9 significant decimal digits.
const LOGIT_DIGITS = 9;

/** Print one line `{"position":p,"argmax":i,"logits":[…]}` for each position asked for, ascending. */
export async function runLogits(config: LogitsConfig): Promise<void> {
  await reportFaults(async () => {
    const modelConfig = loadModelConfig(config.model, config.numerics);
    const ids = readIds(config, config.ids, modelConfig);
    // The draft of a position needs the token after it.
    const rowCount = config.mtp ? ids.length - 1 : ids.length;
    const positions = checkPositions(config, rowCount);
    const chunkTokens = Math.min(config.chunk ?? CHUNK_TOKENS, ids.length);
    await withModel(
      config,
      { modelConfig, positions: ids.length, rows: chunkTokens, mtp: config.mtp },
      async (engine) => {
        const { model, cache, sequenceAt } = engine;
        const wanted = new Set(positions);
        for (let start = 0; start < ids.length; start += chunkTokens) {
          const sequence = sequenceAt(start, ids.slice(start, start + chunkTokens));
          const here = positions.filter((position) => position >= start && position < start + chunkTokens);
          const step = { phase: 'prefill', positions: here } as const;
          const rows = config.mtp
            ? await forwardMtpLogits(model, cache, {
                ...step,
                sequence: { ...sequence, next: ids[start + chunkTokens] },
              })
            : await forwardLogits(model, cache, { ...step, sequences: [sequence] });
          for (const [index, logits] of rows.entries()) await printLine(logitsLine(here[index]!, logits));
          for (const position of here) wanted.delete(position);
          if (wanted.size === 0) return;
        }
      },
    );
  });
}

/** Continue a prompt in this process: print the text as it comes, or one JSON array of token ids at the end. */
export async function runGenerate(config: GenerateConfig): Promise<void> {
  await reportFaults(async () => {
    const modelConfig = loadModelConfig(config.model, config.numerics);
    if (config.speculative) requireDraftBlock(modelConfig);
    // Before the model is loaded: a directory without a tokenizer should fail at once.
    const tokenizer = config.printIds && config.chat === null ? null : loadTokenizer(config.model);
    const prompt =
      config.chat === null
        ? readIds(config, config.ids!, modelConfig)
        : tokenizer!.encode(
            renderChat(loadChatEncoding(config.model), {
              messages: [{ role: 'user', content: config.chat }],
              thinking: false,
            }),
          );
    const length = prompt.length + config.maxTokens;
    if (length > modelConfig.maxPositions) {
      throw fault(
        config,
        `${prompt.length} prompt tokens and --max-tokens ${config.maxTokens} exceed the model's ${modelConfig.maxPositions} positions`,
      );
    }
    const rows = Math.min(CHUNK_TOKENS, prompt.length);
    await withModel(config, { modelConfig, positions: length, rows, mtp: config.speculative }, async (engine) => {
      const output: number[] = [];
      const detokenizer = config.printIds ? null : createDetokenizer(tokenizer!, { skipSpecialTokens: false });
      for await (const token of generateTokens(engine, prompt, config)) {
        output.push(token);
        if (token === modelConfig.eosTokenId && !config.ignoreEos) break;
        if (detokenizer) await print(detokenizer.push(token));
        if (output.length === config.maxTokens) break;
      }
      await print(detokenizer ? `${detokenizer.flush()}\n` : `${JSON.stringify(output)}\n`);
    });
  });
}

/** Prefill the prompt in chunks, then decode without end. */
async function* generateTokens(
  engine: ToolEngine,
  prompt: readonly number[],
  config: GenerateConfig,
): AsyncGenerator<number> {
  const { model, cache, sequenceAt } = engine;
  const sampling = { temperature: config.temperature, topK: 0, topP: 1, minP: 0, seed: config.seed };
  const step = async (phase: 'prefill' | 'decode', sequence: ForwardSequence): Promise<number[]> => {
    const batch = { phase, sequences: [sequence] };
    return cache.draft ? (await forwardDrafting(model, cache, batch)).flat() : forward(model, cache, batch);
  };
  let sampled: number[] = [];
  for (let start = 0; start < prompt.length; start += CHUNK_TOKENS) {
    const tokens = prompt.slice(start, start + CHUNK_TOKENS);
    const next = prompt[start + CHUNK_TOKENS];
    const sequence = { ...sequenceAt(start, tokens), next, sampling: next === undefined ? sampling : null };
    sampled = await step('prefill', sequence);
  }
  for (let position = prompt.length - 1; ;) {
    yield* sampled;
    position += sampled.length;
    const token = sampled.at(-1)!;
    // The place behind the last position that there is memory for takes no draft.
    const drafted = cache.draft !== null && position + 1 < prompt.length + config.maxTokens;
    const tokens = drafted ? [token, DRAFT_PLACE] : [token];
    sampled = await step('decode', { ...sequenceAt(position, tokens), sampling, drafted });
  }
}

/** A loaded model and the one sequence that a tool runs. */
interface ToolEngine {
  readonly model: Model;
  readonly cache: KvCache;
  readonly sequenceAt: (start: number, tokens: readonly number[]) => ForwardSequence;
}

async function withModel(
  config: LogitsConfig | GenerateConfig,
  size: { modelConfig: ModelConfig; positions: number; rows: number; mtp: boolean },
  use: (engine: ToolEngine) => Promise<void>,
): Promise<void> {
  const { modelConfig } = size;
  const device = await openAdapter(config.adapter);
  const terminal = createTerminal(process.stderr);
  try {
    const model = await Promise.race([
      loadModel(device, config.model, {
        maxRows: size.rows,
        maxSequences: 1,
        maxPositions: size.positions,
        mtp: size.mtp,
        ...config.numerics,
        onProgress: ({ stage, done, total, note }) => {
          if (stage === 'pipelines' && note) terminal.line(`compiling kernels, ${done + 1} of ${total}: ${note} rows`);
          if (stage !== 'weights') return;
          terminal.progress('model', { step: stage, done, total, unit: 'bytes' });
          if (done === total) terminal.finished('model');
        },
      }),
      device.lost,
    ]);
    const pages = Array.from({ length: Math.ceil(size.positions / modelConfig.pageTokens) }, (_, page) => page);
    const cache = createKvCache(device, modelConfig, { pageCount: pages.length, slotCount: 1, draft: size.mtp });
    await use({ model, cache, sequenceAt: (start, tokens) => ({ slot: 0, pages, start, tokens, sampling: null }) });
  } finally {
    device.close();
  }
}

async function openAdapter(wanted: string | null): Promise<Device> {
  const choice = await setUpAdapter({ wanted, say });
  Object.assign(process.env, choice.environment);
  for (const line of describeAdapter(choice)) say(line);
  return openDevice({ adapterName: choice.name });
}

function readIds(config: LogitsConfig | GenerateConfig, path: string, modelConfig: ModelConfig): number[] {
  let json: unknown;
  try {
    json = JSON.parse(readFileSync(path, 'utf8'));
  } catch (cause) {
    throw fault(config, `--ids ${path}: ${(cause as Error).message}`);
  }
  const ids: unknown = Array.isArray(json) ? json : (json as { ids?: unknown } | null)?.ids;
  if (!Array.isArray(ids) || ids.length === 0)
    throw fault(config, `--ids ${path}: expected an array of token ids, or an object with "ids"`);
  const odd = ids.findIndex(
    (id) => !Number.isSafeInteger(id) || (id as number) < 0 || (id as number) >= modelConfig.vocabSize,
  );
  if (odd >= 0)
    throw fault(
      config,
      `--ids ${path}: entry ${odd} is ${JSON.stringify(ids[odd])}, expected a whole number below ${modelConfig.vocabSize}`,
    );
  if (ids.length > modelConfig.maxPositions)
    throw fault(config, `--ids ${path}: ${ids.length} ids, the model has ${modelConfig.maxPositions} positions`);
  return ids as number[];
}

function checkPositions(config: LogitsConfig, rowCount: number): number[] {
  const positions = [...new Set(config.positions ?? Array.from({ length: rowCount }, (_, position) => position))];
  const odd = positions.find((position) => position >= rowCount);
  if (odd !== undefined) {
    const why = config.mtp ? ' (the draft of a position needs the id after it)' : '';
    throw fault(config, `--positions: ${odd} is not below ${rowCount}${why}`);
  }
  return positions.sort((left, right) => left - right);
}

function logitsLine(position: number, logits: Float32Array): string {
  let argmax = 0;
  for (let index = 1; index < logits.length; index++) if (logits[index]! > logits[argmax]!) argmax = index;
  const digits = Array.from(logits, (logit) => Number(logit.toPrecision(LOGIT_DIGITS)));
  return JSON.stringify({ position, argmax, logits: digits });
}

function fault(config: LogitsConfig | GenerateConfig, problem: string): ConfigError {
  return new ConfigError(config.command, [problem]);
}

/** What is wrong with a checkpoint or an adapter is told without a stack trace. */
async function reportFaults(run: () => Promise<void>): Promise<void> {
  // Whoever reads the output may have seen enough (`| head`): then there is nothing left to do.
  process.stdout.on('error', (error: NodeJS.ErrnoException) => process.exit(error.code === 'EPIPE' ? 0 : 1));
  try {
    await run();
  } catch (error) {
    const known = error instanceof ModelConfigError || error instanceof CheckpointError || error instanceof DeviceError;
    if (!known) throw error;
    say(`handoff: ${error.message}`);
    process.exitCode = 1;
  }
}

function printLine(line: string): Promise<void> {
  return print(`${line}\n`);
}

async function print(text: string): Promise<void> {
  if (!process.stdout.write(text)) await once(process.stdout, 'drain');
}

function say(line: string): void {
  process.stderr.write(`${line}\n`);
}
