/**
 * `handoff inspect`: what a checkpoint directory holds and what it takes to serve it, from its headers alone.
 *
 * Bytes on an adapter are not estimated: weights, workspace and KV cache are laid out by the code that a worker runs, on
 * a device that only counts. No tensor is read, so 200 GB take seconds, and files may end after their headers.
 */
import { countingDevice } from '../kernels/device.ts';
import {
  ConfigError as ModelConfigError,
  loadModelConfig,
  OVERLAP_RATIO,
  type ConfigChoices,
  type ModelConfig,
} from '../model/config.ts';
import { createKvCache } from '../model/kv-cache.ts';
import { CheckpointError, openCheckpoint, type TensorSource } from '../model/safetensors.ts';
import { officialName, surveyWeights, type WeightSummary } from '../model/weights.ts';
import { allocateWorkspace, modelLimits } from '../model/workspace.ts';
import type { InspectConfig } from './config.ts';

/** Weights of one kind that are stored alike. */
export interface FormatSummary {
  readonly part: string;
  readonly format: string;
  readonly parameters: number;
  readonly storedBytes: number;
  readonly adapterBytes: number;
}

/** What fits an adapter of a given memory beside weights and workspace. */
export interface Capacity {
  readonly memoryBytes: number;
  /** Left for KV; negative: what is missing for the weights alone. */
  readonly leftBytes: number;
  /** Tokens of all sequences together, beside the state of all running requests; null: any number. */
  readonly tokens: number | null;
  /** The longest single sequence, at most the context length. */
  readonly longestSequence: number;
  /** How many sequences of so many tokens. */
  readonly sequences: readonly { readonly tokens: number; readonly count: number }[];
}

/** Everything that `handoff inspect --json` prints. */
export interface Inspection {
  readonly directory: string;
  readonly files: {
    readonly count: number;
    readonly tensors: number;
    readonly bytes: number;
    /** What the headers promise and the files do not have. */
    readonly missingBytes: number;
  };
  readonly architecture: Omit<ModelConfig, keyof ConfigChoices>;
  readonly formats: readonly FormatSummary[];
  /** Parameters of the model without its draft block; `active` are those that one token uses. */
  readonly parameters: { readonly total: number; readonly active: number };
  /** The draft block, if the checkpoint has one; `fault`: why it could not be loaded. */
  readonly draft: {
    readonly parameters: number;
    readonly adapterBytes: number;
    readonly fault: string | null;
  } | null;
  /** What every worker allocates on its adapter before any request. */
  readonly adapter: {
    readonly weightBytes: number;
    readonly workspaceBytes: { readonly prefill: number; readonly decode: number };
  };
  readonly kv: {
    readonly dtype: string;
    readonly indexPrecision: string;
    readonly bytesPerToken: number;
    readonly pageTokens: number;
    readonly pageBytes: number;
    /** State of fixed size of one running request. */
    readonly slotBytes: number;
    readonly contextTokens: number;
    readonly runningRequests: number;
  };
  /** Null unless a memory was given. */
  readonly capacity: Capacity | null;
}

/** Print what is found; resolves with the exit code: 0, or 1 when the checkpoint could not be served as it is. */
export async function runInspect(config: InspectConfig): Promise<number> {
  try {
    const inspection = await inspectCheckpoint(config);
    const lines = config.json ? [JSON.stringify(inspection)] : describeInspection(inspection);
    process.stdout.write(`${lines.join('\n')}\n`);
    return inspection.draft?.fault == null ? 0 : 1;
  } catch (error) {
    if (!(error instanceof ModelConfigError || error instanceof CheckpointError)) throw error;
    process.stderr.write(`handoff: ${error.message}\n`);
    return 1;
  }
}

/**
 * Examine the directory `config.model`.
 *
 * @throws ConfigError of model/config.ts, or CheckpointError, when the main model could not be loaded.
 */
export async function inspectCheckpoint(config: InspectConfig): Promise<Inspection> {
  const { model: directory, pageTokens, contextLength, maxRunningRequests: runningRequests, memoryBytes } = config;
  const checkpoint = loadModelConfig(directory, { pageTokens, ...config.numerics });
  const contextTokens = contextLength ?? checkpoint.maxPositions;
  const modelConfig = { ...checkpoint, maxPositions: contextTokens };
  const source = await openCheckpoint(directory, { headersOnly: true });
  await source.close();
  const { pageTokens: _, mode: __, indexPrecision: ___, ...architecture } = checkpoint;
  const { weights, draft } = surveyAll(modelConfig, source);
  const workspaceOf = (maxRows: number): number =>
    workspaceBytes(modelConfig, { maxRows, maxSequences: runningRequests, maxPositions: contextTokens });
  const adapter = {
    weightBytes: sum(weights, 'deviceBytes'),
    workspaceBytes: { prefill: workspaceOf(config.prefillChunkTokens), decode: workspaceOf(runningRequests) },
  };
  const cache = createKvCache(countingDevice(), modelConfig, { pageCount: 1, slotCount: 1 });
  const kv = {
    dtype: cache.layout.dtype,
    indexPrecision: cache.layout.indexPrecision,
    bytesPerToken: cache.pageBytes / modelConfig.pageTokens,
    pageTokens: modelConfig.pageTokens,
    pageBytes: cache.pageBytes,
    slotBytes: cache.slotBytes,
    contextTokens,
    runningRequests,
  };
  return {
    directory,
    files: {
      count: source.files.length,
      tensors: source.tensors.size,
      bytes: source.files.reduce((bytes, file) => bytes + file.byteLength, 0),
      missingBytes: source.files.reduce((bytes, file) => bytes + file.completeBytes - file.byteLength, 0),
    },
    architecture,
    formats: [...formatsOf(weights, partOf), ...formatsOf(draft?.weights ?? [], () => 'draft block')],
    parameters: countParameters(modelConfig, weights),
    draft: draft && {
      parameters: parametersOf(draft.weights),
      adapterBytes: sum(draft.weights, 'deviceBytes'),
      fault: draft.fault,
    },
    adapter,
    kv,
    capacity: memoryBytes === null ? null : capacityOf(memoryBytes, adapter, kv),
  };
}

/** The model's weights and the draft block's. A checkpoint without a draft block is complete; with a part of one it is not. */
function surveyAll(
  config: ModelConfig,
  source: TensorSource,
): { weights: WeightSummary[]; draft: { weights: WeightSummary[]; fault: string | null } | null } {
  const isDraft = (name: string): boolean => name.startsWith('mtp.');
  if (![...source.tensors.keys()].some((name) => isDraft(officialName(name)))) {
    return { weights: surveyWeights(config, source), draft: null };
  }
  try {
    const all = surveyWeights(config, source, { mtp: true });
    const draft = { weights: all.filter(({ name }) => isDraft(name)), fault: null };
    return { weights: all.filter(({ name }) => !isDraft(name)), draft };
  } catch (error) {
    if (!(error instanceof CheckpointError)) throw error;
    // Throws again when it is the model that is at fault.
    return { weights: surveyWeights(config, source), draft: { weights: [], fault: error.message } };
  }
}

function workspaceBytes(
  config: ModelConfig,
  asked: { maxRows: number; maxSequences: number; maxPositions: number },
): number {
  const device = countingDevice();
  allocateWorkspace(device, config, modelLimits(device, config, asked));
  return device.allocatedBytes;
}

/** `pageBytes` of 0: no layer keeps more of its past than the state of a request. */
function capacityOf(memoryBytes: number, adapter: Inspection['adapter'], kv: Inspection['kv']): Capacity {
  const { pageTokens, pageBytes, slotBytes, contextTokens, runningRequests } = kv;
  const { prefill, decode } = adapter.workspaceBytes;
  const leftBytes = memoryBytes - adapter.weightBytes - Math.max(prefill, decode);
  const tokensIn = (bytes: number): number => Math.max(0, Math.floor(bytes / pageBytes)) * pageTokens;
  const lengths = [...new Set([...USUAL_LENGTHS.filter((tokens) => tokens < contextTokens), contextTokens])];
  return {
    memoryBytes,
    leftBytes,
    tokens: pageBytes === 0 ? null : tokensIn(leftBytes - runningRequests * slotBytes),
    longestSequence:
      pageBytes === 0 && leftBytes >= slotBytes
        ? contextTokens
        : Math.min(contextTokens, tokensIn(leftBytes - slotBytes)),
    sequences: lengths.map((tokens) => {
      const sequenceBytes = Math.ceil(tokens / pageTokens) * pageBytes + slotBytes;
      return { tokens, count: Math.max(0, Math.floor(leftBytes / sequenceBytes)) };
    }),
  };
}

// Lengths that people plan with; the context length is added.
const USUAL_LENGTHS = [4096, 32_768, 131_072, 524_288];

const PARTS: readonly (readonly [pattern: RegExp, part: string])[] = [
  [/\.ffn\.experts\./, 'routed experts'],
  [/\.ffn\.shared_experts\./, 'shared experts'],
  [/\.attn\.(compressor|indexer)\./, 'compressors and indexers'],
  [/\.attn\./, 'attention'],
  [/^(embed|head)$/, 'embedding and head'],
];

function partOf(name: string): string {
  return PARTS.find(([pattern]) => pattern.test(name))?.[1] ?? 'gates, norms and mixing';
}

/** By part and format, largest first. */
function formatsOf(weights: readonly WeightSummary[], part: (name: string) => string): FormatSummary[] {
  const groups = new Map<string, WeightSummary[]>();
  for (const weight of weights) {
    const key = JSON.stringify([part(weight.name), weight.format]);
    groups.set(key, [...(groups.get(key) ?? []), weight]);
  }
  return [...groups]
    .map(([key, members]) => {
      const [name, format] = JSON.parse(key) as [string, string];
      return {
        part: name,
        format,
        parameters: parametersOf(members),
        storedBytes: sum(members, 'storedBytes'),
        adapterBytes: sum(members, 'deviceBytes'),
      };
    })
    .toSorted((left, right) => right.storedBytes - left.storedBytes);
}

/** A token reads one row of the embedding, and its own share of the routed experts; everything else whole. */
function countParameters(config: ModelConfig, weights: readonly WeightSummary[]): { total: number; active: number } {
  const total = parametersOf(weights);
  const routed = parametersOf(weights.filter(({ name }) => partOf(name) === 'routed experts'));
  const embedding = config.vocabSize * config.hiddenSize;
  const idle = routed * (1 - config.expertsPerToken / config.experts) + embedding - config.hiddenSize;
  return { total, active: Math.round(total - idle) };
}

// Tables of expert ids are no parameters.
function parametersOf(weights: readonly WeightSummary[]): number {
  return sum(
    weights.filter(({ name }) => !name.endsWith('.tid2eid')),
    'elements',
  );
}

function sum(weights: readonly WeightSummary[], field: 'elements' | 'storedBytes' | 'deviceBytes'): number {
  return weights.reduce((total, weight) => total + weight[field], 0);
}

/** The inspection for a person. */
export function describeInspection(inspection: Inspection): string[] {
  const { files, draft, adapter, kv, capacity, parameters } = inspection;
  const { prefill, decode } = adapter.workspaceBytes;
  const missing =
    files.missingBytes === 0 ? '' : `; INCOMPLETE: ${sizeText(files.missingBytes)} of tensors are not there`;
  return [
    inspection.directory,
    ...table([['', `${files.count} files, ${files.tensors} tensors, ${sizeText(files.bytes)}${missing}`]]),
    '',
    'architecture',
    ...table(architectureRows(inspection.architecture)),
    '',
    ...formatLines(inspection.formats),
    '',
    'parameters',
    ...table([
      ['model', countText(parameters.total)],
      ['active per token', countText(parameters.active)],
      ...(draft === null ? [] : [['draft block', countText(draft.parameters)]]),
      ...(draft?.fault == null ? [] : [['', `CANNOT BE LOADED: ${draft.fault}`]]),
    ]),
    '',
    'on the adapter of each worker',
    ...table([
      ['weights', sizeText(adapter.weightBytes)],
      ...(draft === null ? [] : [['with draft block', `${sizeText(draft.adapterBytes)} more`]]),
      ['workspace', `prefill ${sizeText(prefill)}, decode ${sizeText(decode)}`],
      [
        'KV per token',
        `${kv.bytesPerToken} bytes (${kv.dtype}, index keys ${kv.indexPrecision}; pages of ${kv.pageTokens} tokens)`,
      ],
      ['KV per request', `${sizeText(kv.slotBytes)} beside its pages`],
    ]),
    ...(capacity === null ? [] : ['', ...capacityLines(capacity, inspection)]),
  ];
}

function architectureRows(config: Inspection['architecture']): string[][] {
  const { layers, yarn } = config;
  const ratios = [...new Set(layers.map(({ ratio }) => ratio))].toSorted((left, right) => left - right);
  const kinds = ratios.map((ratio) => {
    const count = layers.filter((layer) => layer.ratio === ratio).length;
    if (ratio === 0) return `${count} sliding`;
    return `${count} of ratio ${ratio}${ratio === OVERLAP_RATIO ? ' with indexer' : ''}`;
  });
  const hashed = layers.filter(({ hash }) => hash).length;
  return [
    ['layers', `${layers.length}: ${kinds.join(', ')}; ${hashed} routed by token id`],
    ['width', `${config.hiddenSize} in ${config.streams} streams, vocabulary ${config.vocabSize}`],
    [
      'attention',
      `${config.heads} heads of ${config.headDim} (${config.ropeDim} rotated), window ${config.windowTokens}, ranks ${config.queryRank} in, ${config.outputGroups} x ${config.outputRank} out`,
    ],
    ['indexer', `${config.indexHeads} heads of ${config.indexHeadDim}, best ${config.indexTopK}`],
    [
      'experts',
      `${config.experts} of width ${config.expertHiddenSize}, ${config.expertsPerToken} and a shared one per token`,
    ],
    ['positions', `${config.maxPositions}${yarn ? `, YaRN x${yarn.factor} of ${yarn.originalMaxPositions}` : ''}`],
    ['draft blocks', `${config.mtpBlocks} in the config`],
  ];
}

function formatLines(formats: readonly FormatSummary[]): string[] {
  const rows = formats.map(({ part, format, parameters, storedBytes, adapterBytes }) => [
    part,
    format,
    parameters === 0 ? '-' : countText(parameters),
    sizeText(storedBytes),
    sizeText(adapterBytes),
  ]);
  const [title = '', ...lines] = table([['weights', 'format', 'parameters', 'stored', 'on the adapter'], ...rows]);
  return [title.trimStart(), ...lines];
}

function capacityLines(capacity: Capacity, { adapter, kv }: Inspection): string[] {
  const { memoryBytes, leftBytes, tokens, longestSequence, sequences } = capacity;
  const title = `in ${sizeText(memoryBytes)}`;
  if (leftBytes < 0) {
    const { prefill, decode } = adapter.workspaceBytes;
    return [
      `${title}: weights and workspace need ${sizeText(adapter.weightBytes + Math.max(prefill, decode))}, ${sizeText(-leftBytes)} more`,
    ];
  }
  return [
    title,
    ...table([
      ['left for KV', sizeText(leftBytes)],
      ['tokens', `${tokens ?? 'any number'}, beside the state of ${kv.runningRequests} running requests`],
      ['longest sequence', `${longestSequence} tokens`],
      ...sequences.map(({ tokens: length, count }) => [`of ${length} tokens`, `${count} sequences`]),
    ]),
  ];
}

/** `145.3 GiB`: four significant digits at most. */
function sizeText(bytes: number): string {
  const units = ['bytes', 'KiB', 'MiB', 'GiB', 'TiB'];
  let value = bytes;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit++;
  }
  return `${unit === 0 ? value : value.toFixed(value < 10 ? 2 : 1)} ${units[unit]}`;
}

/** `284.3 billion`. */
function countText(count: number): string {
  if (count >= 1e9) return `${(count / 1e9).toFixed(1)} billion`;
  if (count >= 1e6) return `${(count / 1e6).toFixed(1)} million`;
  return String(count);
}

/** Indented columns as wide as their widest cell. */
function table(rows: readonly (readonly string[])[]): string[] {
  const widths = (rows[0] ?? []).map((_, column) => Math.max(...rows.map((row) => row[column]?.length ?? 0)));
  return rows.map((row) => `  ${row.map((cell, column) => cell.padEnd(widths[column] ?? 0)).join('  ')}`.trimEnd());
}
