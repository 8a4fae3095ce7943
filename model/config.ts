/**
 * The model's description: config.json in any of its spellings in, `ModelConfig` out.
 *
 * Three spellings are read: the checkpoint's config.json, the official inference config (`dim`, `n_layers`, …) and what
 * transformers saves (`layer_types`, `compress_rates`, `rope_parameters`). Everything that the forward pass does not
 * implement is refused here, so that no checkpoint runs silently wrong.
 */
import { readFileSync, statSync } from 'node:fs';
import { join } from 'node:path';
import type { IndexPrecision } from '../kernels/index-keys.ts';

/** One decoder layer: how it compresses its past and how it picks experts. */
export interface LayerConfig {
  /** Tokens pooled into one entry; 0 for sliding-window layers. Ratio 4 overlaps blocks and has an indexer. */
  readonly ratio: number;
  /** Experts come from a table by token id instead of from scores. */
  readonly hash: boolean;
}

/** Long-context correction of rotary frequencies (YaRN, without its amplitude factor). */
export interface YarnConfig {
  readonly factor: number;
  readonly originalMaxPositions: number;
  readonly betaFast: number;
  readonly betaSlow: number;
}

/**
 * What the forward pass rounds. `hp`, high precision: nothing, as transformers computes in f32. `q`: activations, keys and
 * index vectors as the official runtime does (appendix A of the model description, but rule 1). `q-inputs`: also the
 * inputs of FP8 and FP4 linears (rule 1), which is all of it.
 */
export type NumericMode = 'hp' | 'q' | 'q-inputs';

/** What a deployment chooses; the rest of `ModelConfig` is the checkpoint's. */
export interface ConfigChoices {
  /** Tokens of one KV page; the smallest that the model allows when left out. */
  readonly pageTokens?: number;
  readonly mode?: NumericMode;
  readonly indexPrecision?: IndexPrecision;
  /** Becomes `maxPositions`: positions are computed as well where the checkpoint was never trained. */
  readonly contextTokens?: number;
}

/** Everything the forward pass needs to know. Counts are positive integers. */
export interface ModelConfig {
  readonly vocabSize: number;
  /** Width of one residual stream. */
  readonly hiddenSize: number;
  readonly layers: readonly LayerConfig[];
  readonly heads: number;
  /** Width of a query head and of the one shared key-value head. */
  readonly headDim: number;
  /** Dimensions at the end of each head that are rotated. */
  readonly ropeDim: number;
  readonly queryRank: number;
  readonly outputRank: number;
  readonly outputGroups: number;
  readonly experts: number;
  readonly expertsPerToken: number;
  readonly expertHiddenSize: number;
  readonly routeScale: number;
  /** Clamp of gate (above) and up (both sides) before the activation. */
  readonly swigluLimit: number;
  /** Raw tokens that every layer attends over, the query's own included. */
  readonly windowTokens: number;
  /** Parallel residual streams. */
  readonly streams: number;
  readonly sinkhornIterations: number;
  readonly hcEps: number;
  readonly normEps: number;
  readonly indexHeads: number;
  readonly indexHeadDim: number;
  /** Entries that a ratio-4 layer attends over at most. */
  readonly indexTopK: number;
  /** Longest sequence. */
  readonly maxPositions: number;
  readonly ropeTheta: number;
  readonly compressRopeTheta: number;
  readonly yarn: YarnConfig | null;
  /** Draft blocks stored in the checkpoint (`mtp.N.*`); 0 or 1. */
  readonly mtpBlocks: number;
  readonly bosTokenId: number;
  readonly eosTokenId: number;
  /** Tokens of one KV page: a multiple of every ratio. */
  readonly pageTokens: number;
  readonly mode: NumericMode;
  /** How index keys are stored in KV pages. */
  readonly indexPrecision: IndexPrecision;
}

/** A config that cannot be used; the message starts with the field at fault. */
export class ConfigError extends Error {
  override readonly name = 'ConfigError';
  readonly field: string;

  constructor(field: string, problem: string) {
    super(`config.json: ${field}: ${problem}`);
    this.field = field;
  }
}

/** The ratio whose layers pool overlapping blocks and choose entries with an indexer. */
export const OVERLAP_RATIO = 4;

const PAGE_TOKENS = 128;
// A ratio that needs larger pages than this is a mistake.
const MAX_PAGE_TOKENS = 4096;
// A config is some kB; more is an attempt to exhaust memory.
const MAX_CONFIG_BYTES = 16 * 1024 * 1024;
// Sizes that no tensor's shape confirms, and that would take memory or time without end. Far above every release.
const LARGEST: readonly (readonly [size: (config: ModelConfig) => number, field: string, largest: number])[] = [
  [(config) => config.layers.length, 'num_hidden_layers', 1024],
  [(config) => config.maxPositions, 'max_position_embeddings', 2 ** 24],
  [(config) => config.windowTokens, 'sliding_window', 2 ** 16],
  [(config) => config.indexTopK, 'index_topk', 2 ** 20],
  [(config) => config.sinkhornIterations, 'hc_sinkhorn_iters', 1000],
];

/**
 * Read `config.json` of a checkpoint directory.
 *
 * @throws ConfigError naming the field, or when `pageTokens` is not a multiple of what the model allows.
 */
export function loadModelConfig(directory: string, choices: ConfigChoices = {}): ModelConfig {
  const path = join(directory, 'config.json');
  let text: string;
  try {
    const stats = statSync(path);
    const { size } = stats;
    if (!stats.isFile()) throw new Error('it is not a regular file');
    if (size > MAX_CONFIG_BYTES) throw new Error(`it has ${size} bytes, at most ${MAX_CONFIG_BYTES} are allowed`);
    text = readFileSync(path, 'utf8');
  } catch (cause) {
    throw new ConfigError('(file)', `cannot be read at ${path}: ${(cause as Error).message}`);
  }
  let json: unknown;
  try {
    json = JSON.parse(text);
  } catch (cause) {
    throw new ConfigError('(file)', `is not JSON: ${(cause as Error).message}`);
  }
  const { pageTokens, mode = 'hp', indexPrecision = indexPrecisionOf(mode), contextTokens } = choices;
  const checkpoint = parseModelConfig(json);
  const config = { ...checkpoint, mode, indexPrecision, maxPositions: contextTokens ?? checkpoint.maxPositions };
  if (pageTokens === undefined || pageTokens === config.pageTokens) return config;
  if (pageTokens <= 0 || pageTokens % config.pageTokens !== 0) {
    const problem = `KV pages must be a multiple of ${config.pageTokens} tokens, ${pageTokens} are asked for`;
    throw new ConfigError('compress_ratios', problem);
  }
  return { ...config, pageTokens };
}

/**
 * How index keys are stored unless a deployment says otherwise: in f32 where nothing is rounded, since every narrower
 * format loses choices (docs/recall.md); else in FP4, which loses nothing of keys that have been through it.
 */
function indexPrecisionOf(mode: NumericMode): IndexPrecision {
  return mode === 'hp' ? 'f32' : 'fp4';
}

/**
 * Check a parsed config.json and give it our names.
 *
 * @throws ConfigError naming the field that is missing, malformed, contradictory or not implemented.
 */
export function parseModelConfig(json: unknown): ModelConfig {
  const root = new Fields('', json);
  refuseUnimplemented(root);
  const layerCount = root.count('num_hidden_layers', 'n_layers');
  const ratios = readRatios(root, layerCount);
  const hash = readHashLayers(root, layerCount);
  const headDim = root.count('head_dim');
  const config: ModelConfig = {
    vocabSize: root.count('vocab_size'),
    hiddenSize: root.count('hidden_size', 'dim'),
    layers: ratios.map((ratio, index) => ({ ratio, hash: hash[index]! })),
    heads: root.count('num_attention_heads', 'n_heads'),
    headDim,
    ropeDim: readRopeDim(root, headDim),
    queryRank: root.count('q_lora_rank'),
    outputRank: root.count('o_lora_rank'),
    outputGroups: root.count('o_groups'),
    experts: root.count('n_routed_experts', 'num_local_experts'),
    expertsPerToken: root.count('num_experts_per_tok', 'n_activated_experts'),
    expertHiddenSize: root.count('moe_intermediate_size', 'moe_inter_dim', 'intermediate_size'),
    routeScale: root.positive('routed_scaling_factor', 'route_scale'),
    swigluLimit: root.positive('swiglu_limit'),
    windowTokens: root.count('sliding_window', 'window_size'),
    streams: root.count('hc_mult'),
    sinkhornIterations: root.count('hc_sinkhorn_iters'),
    hcEps: root.positive('hc_eps'),
    normEps: root.positive('rms_norm_eps', 'norm_eps'),
    indexHeads: root.count('index_n_heads'),
    indexHeadDim: root.count('index_head_dim'),
    indexTopK: root.count('index_topk'),
    maxPositions: root.count('max_position_embeddings', 'max_seq_len'),
    ...readRope(root),
    mtpBlocks: root.optionalWhole(0, 'num_nextn_predict_layers', 'n_mtp_layers'),
    bosTokenId: readTokenId(root, 'bos_token_id', 0),
    eosTokenId: readTokenId(root, 'eos_token_id', 1),
    pageTokens: pageTokensFor(ratios),
    mode: 'hp',
    indexPrecision: indexPrecisionOf('hp'),
  };
  checkShapes(config);
  return config;
}

/** Reads fields of one JSON object; every fault names the field with the path to it. */
class Fields {
  readonly #path: string;
  readonly #values: Readonly<Record<string, unknown>>;

  constructor(path: string, value: unknown) {
    this.#path = path;
    if (typeof value !== 'object' || value === null || Array.isArray(value)) {
      throw new ConfigError(path === '' ? '(file)' : path, `expected an object, found ${describe(value)}`);
    }
    this.#values = value as Record<string, unknown>;
  }

  path(name: string): string {
    return this.#path === '' ? name : `${this.#path}.${name}`;
  }

  /** The first spelling that is there and not null, and its value. */
  find(...names: string[]): { field: string; value: unknown } | null {
    for (const name of names) {
      if (!Object.hasOwn(this.#values, name)) continue;
      const value = this.#values[name];
      if (value !== null && value !== undefined) return { field: this.path(name), value };
    }
    return null;
  }

  fault(name: string, problem: string): ConfigError {
    return new ConfigError(this.path(name), problem);
  }

  object(name: string): Fields | null {
    const found = this.find(name);
    return found ? new Fields(found.field, found.value) : null;
  }

  list(name: string): readonly unknown[] | null {
    const found = this.find(name);
    if (!found) return null;
    if (!Array.isArray(found.value))
      throw new ConfigError(found.field, `expected a list, found ${describe(found.value)}`);
    return found.value;
  }

  count(...names: string[]): number {
    return this.#number(names, 'a positive whole number', (value) => Number.isSafeInteger(value) && value > 0);
  }

  positive(...names: string[]): number {
    return this.#number(names, 'a positive number', (value) => Number.isFinite(value) && value > 0);
  }

  optionalWhole(fallback: number, ...names: string[]): number {
    if (!this.find(...names)) return fallback;
    return this.#number(names, 'a whole number of at least 0', (value) => Number.isSafeInteger(value) && value >= 0);
  }

  #number(names: string[], expected: string, accepts: (value: number) => boolean): number {
    const found = this.find(...names);
    if (!found) throw this.fault(names[0]!, `is missing; expected ${expected}`);
    if (typeof found.value !== 'number' || !accepts(found.value)) {
      throw new ConfigError(found.field, `expected ${expected}, found ${describe(found.value)}`);
    }
    return found.value;
  }
}

function describe(value: unknown): string {
  const text = JSON.stringify(value) ?? String(value);
  return text.length > 60 ? `${text.slice(0, 60)}…` : text;
}

// Values that change the mathematics in a way that is not built; each may be left out.
const ONLY_VALUES: readonly (readonly [names: readonly string[], value: unknown])[] = [
  [['model_type'], 'deepseek_v4'],
  [['num_key_value_heads'], 1],
  [['n_shared_experts'], 1],
  [['scoring_func', 'score_func'], 'sqrtsoftplus'],
  [['topk_method'], 'noaux_tc'],
  [['norm_topk_prob'], true],
  [['hidden_act'], 'silu'],
  [['tie_word_embeddings'], false],
  [['attention_bias'], false],
];

function refuseUnimplemented(root: Fields): void {
  for (const [names, value] of ONLY_VALUES) {
    const found = root.find(...names);
    if (found && found.value !== value) {
      throw new ConfigError(found.field, `only ${describe(value)} is implemented, found ${describe(found.value)}`);
    }
  }
  const mtp = root.find('num_nextn_predict_layers', 'n_mtp_layers');
  if (mtp && mtp.value !== 0 && mtp.value !== 1)
    throw new ConfigError(mtp.field, `only 0 or 1 is implemented, found ${describe(mtp.value)}`);
}

const LAYER_TYPES: Readonly<Record<string, 'sliding' | 'overlap' | 'plain'>> = {
  sliding_attention: 'sliding',
  compressed_sparse_attention: 'overlap',
  heavily_compressed_attention: 'plain',
};

// `compress_ratios` may go on past the layers (the draft block, whose ratio is 0); `layer_types` is what transformers saves.
function readRatios(root: Fields, layerCount: number): number[] {
  const listed = root.list('compress_ratios');
  const types = root.list('layer_types');
  const fromTypes = types && ratiosOfTypes(root, types, layerCount);
  if (!listed) {
    if (fromTypes) return fromTypes;
    throw root.fault('compress_ratios', 'is missing, and so is layer_types; one of them must list the layers');
  }
  if (listed.length < layerCount) {
    throw root.fault(
      'compress_ratios',
      `expected at least ${layerCount} entries (num_hidden_layers), found ${listed.length}`,
    );
  }
  const ratios = listed.slice(0, layerCount).map((ratio, index) => {
    if (!Number.isSafeInteger(ratio) || (ratio as number) < 0 || ratio === 1) {
      throw root.fault(`compress_ratios[${index}]`, `expected 0 or a whole number above 1, found ${describe(ratio)}`);
    }
    return ratio as number;
  });
  for (const [index, ratio] of ratios.entries()) {
    if (fromTypes && fromTypes[index] !== ratio) {
      throw root.fault(`layer_types[${index}]`, `says ratio ${fromTypes[index]}, compress_ratios says ${ratio}`);
    }
  }
  return ratios;
}

function ratiosOfTypes(root: Fields, types: readonly unknown[], layerCount: number): number[] {
  if (types.length !== layerCount) {
    throw root.fault('layer_types', `expected ${layerCount} entries (num_hidden_layers), found ${types.length}`);
  }
  const rates = root.object('compress_rates');
  const overlap =
    readRate(rates, 'compressed_sparse_attention') ?? readRate(root, 'compress_rate_csa') ?? OVERLAP_RATIO;
  const plain = readRate(rates, 'heavily_compressed_attention') ?? readRate(root, 'compress_rate_hca') ?? 128;
  if (overlap !== OVERLAP_RATIO) {
    throw root.fault(
      'compress_rates.compressed_sparse_attention',
      `only ${OVERLAP_RATIO} is implemented, found ${overlap}`,
    );
  }
  if (plain === OVERLAP_RATIO || plain < 2) {
    throw root.fault(
      'compress_rates.heavily_compressed_attention',
      `expected above 1 and not ${OVERLAP_RATIO}, found ${plain}`,
    );
  }
  return types.map((type, index) => {
    const kind = typeof type === 'string' && Object.hasOwn(LAYER_TYPES, type) ? LAYER_TYPES[type] : undefined;
    if (!kind) {
      throw root.fault(
        `layer_types[${index}]`,
        `expected one of ${Object.keys(LAYER_TYPES).join(', ')}, found ${describe(type)}`,
      );
    }
    return kind === 'sliding' ? 0 : kind === 'overlap' ? overlap : plain;
  });
}

function readRate(fields: Fields | null, name: string): number | null {
  return fields?.find(name) ? fields.count(name) : null;
}

function readHashLayers(root: Fields, layerCount: number): boolean[] {
  const types = root.list('mlp_layer_types');
  const count = root.find('num_hash_layers', 'n_hash_layers');
  if (!types) {
    if (!count) throw root.fault('num_hash_layers', 'is missing, and so is mlp_layer_types');
    const hashLayers = root.optionalWhole(0, 'num_hash_layers', 'n_hash_layers');
    return Array.from({ length: layerCount }, (_, index) => index < hashLayers);
  }
  if (types.length !== layerCount) {
    throw root.fault('mlp_layer_types', `expected ${layerCount} entries (num_hidden_layers), found ${types.length}`);
  }
  return types.map((type, index) => {
    if (type !== 'hash_moe' && type !== 'moe') {
      throw root.fault(`mlp_layer_types[${index}]`, `expected hash_moe or moe, found ${describe(type)}`);
    }
    return type === 'hash_moe';
  });
}

function readRopeDim(root: Fields, headDim: number): number {
  if (root.find('qk_rope_head_dim', 'rope_head_dim')) return root.count('qk_rope_head_dim', 'rope_head_dim');
  const main = root.object('rope_parameters')?.object('main');
  const source = root.find('partial_rotary_factor') ? root : main?.find('partial_rotary_factor') ? main : null;
  if (!source) throw root.fault('qk_rope_head_dim', 'is missing, and so is partial_rotary_factor');
  return Math.floor(headDim * source.positive('partial_rotary_factor'));
}

function readRope(root: Fields): Pick<ModelConfig, 'ropeTheta' | 'compressRopeTheta' | 'yarn'> {
  const parameters = root.object('rope_parameters');
  const main = parameters?.object('main') ?? null;
  const compress = parameters?.object('compress') ?? null;
  const ropeTheta = main?.find('rope_theta') ? main.positive('rope_theta') : root.positive('rope_theta');
  const compressRopeTheta = compress?.find('rope_theta')
    ? compress.positive('rope_theta')
    : root.positive('compress_rope_theta');
  const scaling = compress ?? root.object('rope_scaling');
  return { ropeTheta, compressRopeTheta, yarn: scaling ? readYarn(scaling) : readFlatYarn(root) };
}

function readYarn(scaling: Fields): YarnConfig | null {
  const type = scaling.find('rope_type', 'type');
  if (type?.value === 'default') return null;
  if (type && type.value !== 'yarn')
    throw new ConfigError(type.field, `only "yarn" or "default" is implemented, found ${describe(type.value)}`);
  const amplitude = scaling.find('attention_factor');
  if (amplitude && amplitude.value !== 1)
    throw new ConfigError(amplitude.field, `only 1 is implemented, found ${describe(amplitude.value)}`);
  for (const name of ['mscale', 'mscale_all_dim']) {
    if (scaling.find(name)) throw scaling.fault(name, 'is not implemented: these models scale frequencies only');
  }
  return {
    factor: scaling.positive('factor'),
    originalMaxPositions: scaling.count('original_max_position_embeddings'),
    betaFast: scaling.positive('beta_fast'),
    betaSlow: scaling.positive('beta_slow'),
  };
}

// The official inference config has the four numbers at its root; an original length of 0 switches the correction off.
function readFlatYarn(root: Fields): YarnConfig | null {
  if (!root.find('rope_factor') && !root.find('original_seq_len')) return null;
  const originalMaxPositions = root.optionalWhole(0, 'original_seq_len');
  if (originalMaxPositions === 0) return null;
  return {
    factor: root.positive('rope_factor'),
    originalMaxPositions,
    betaFast: root.positive('beta_fast'),
    betaSlow: root.positive('beta_slow'),
  };
}

function readTokenId(root: Fields, name: string, fallback: number): number {
  const found = root.find(name);
  if (!found) return fallback;
  const value = Array.isArray(found.value) && found.value.length === 1 ? found.value[0] : found.value;
  if (!Number.isSafeInteger(value) || (value as number) < 0) {
    throw new ConfigError(found.field, `expected one token id, found ${describe(found.value)}`);
  }
  return value as number;
}

function pageTokensFor(ratios: readonly number[]): number {
  let tokens = PAGE_TOKENS;
  for (const [index, ratio] of ratios.entries()) {
    if (ratio === 0) continue;
    tokens = (tokens / greatestCommonDivisor(tokens, ratio)) * ratio;
    if (tokens > MAX_PAGE_TOKENS) {
      throw new ConfigError(
        `compress_ratios[${index}]`,
        `ratio ${ratio} needs pages of ${tokens} tokens, at most ${MAX_PAGE_TOKENS} are possible`,
      );
    }
  }
  return tokens;
}

function greatestCommonDivisor(left: number, right: number): number {
  return right === 0 ? left : greatestCommonDivisor(right, left % right);
}

function checkShapes(config: ModelConfig): void {
  const check = (holds: boolean, field: string, problem: string): void => {
    if (!holds) throw new ConfigError(field, problem);
  };
  for (const [size, field, largest] of LARGEST) {
    check(size(config) <= largest, field, `expected at most ${largest}, found ${size(config)}`);
  }
  const { heads, headDim, ropeDim, indexHeadDim } = config;
  check(
    ropeDim % 2 === 0 && ropeDim > 0 && ropeDim <= headDim,
    'qk_rope_head_dim',
    `expected an even number up to head_dim ${headDim}, found ${ropeDim}`,
  );
  check(
    heads % config.outputGroups === 0,
    'o_groups',
    `expected a divisor of num_attention_heads ${heads}, found ${config.outputGroups}`,
  );
  check(
    config.expertsPerToken <= config.experts,
    'num_experts_per_tok',
    `expected at most n_routed_experts ${config.experts}, found ${config.expertsPerToken}`,
  );
  if (config.layers.some((layer) => layer.ratio === OVERLAP_RATIO)) {
    check(
      indexHeadDim >= ropeDim,
      'index_head_dim',
      `expected at least qk_rope_head_dim ${ropeDim}, found ${indexHeadDim}`,
    );
    check(
      (indexHeadDim & (indexHeadDim - 1)) === 0,
      'index_head_dim',
      `expected a power of two (Hadamard transform), found ${indexHeadDim}`,
    );
  }
  check(
    config.bosTokenId < config.vocabSize,
    'bos_token_id',
    `expected below vocab_size ${config.vocabSize}, found ${config.bosTokenId}`,
  );
  check(
    config.eosTokenId < config.vocabSize,
    'eos_token_id',
    `expected below vocab_size ${config.vocabSize}, found ${config.eosTokenId}`,
  );
}
