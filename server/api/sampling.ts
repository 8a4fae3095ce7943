/**
 * What every request that generates has in common, whatever API it speaks: the model's name, how tokens are chosen, where
 * the answer ends, how it is sent. Pure.
 *
 * Fields that this server does not know are ignored, since clients send many; fields that it knows and
 * cannot honour are refused by name, since ignoring one would change the answer behind the client's back.
 */
import { createHash } from 'node:crypto';
import type { Salt, SamplingParams, SamplingRules } from '../../transfer/messages.ts';
import { ApiError } from '../errors.ts';
import { responseFormatField } from './constraints.ts';
import {
  boolean,
  described,
  finite,
  ignored,
  integer,
  isObject,
  list,
  object,
  optional,
  text,
  unsupported,
  wrong,
} from './fields.ts';
import type { Field, FieldValue, JsonObject } from './fields.ts';

/** What requests are checked against. */
export interface ServedModel {
  /** The name that answers carry when the request names none. */
  modelId: string;
  /** All names that requests may use, `modelId` among them. */
  names: readonly string[];
  /** Tokens that prompt and answer may have together. */
  contextLength: number;
  /** Token ids are below this. */
  vocabSize: number;
  /** Most choices of one request. */
  maxChoices: number;
  /** Whether answers start with reasoning where the request says nothing. */
  thinkingByDefault: boolean;
  /** Efforts that mean another one to this checkpoint; the others are taken as they are. */
  effortMap: ReadonlyMap<string, string>;
  /** Sampling where the request says nothing. */
  defaultTemperature: number;
  defaultTopP: number;
}

/** What a checked request asks of the generation, in the same form for every API. */
export interface GenerationCall {
  /** The name the client used for the model, for the answer. */
  model: string;
  stream: boolean;
  includeUsage: boolean;
  continuousUsage: boolean;
  /** Answers to each prompt. */
  choiceCount: number;
  /** Sampling without the seed; `seed` is the client's, folded to 32 bits, or null for a random one. */
  sampling: Omit<SamplingParams, 'seed'>;
  seed: number | null;
  /** Tokens asked for, or null where the request leaves it to the server; see resolveMaxTokens. */
  maxTokens: number | null;
  /** The answer does not end before it has so many; also in `sampling.rules`, for what ends by a token. */
  minTokens: number;
  /** Where the sampling fields stand in the body, for errors: '' or 'sampling_params.'. */
  samplingPath: string;
  stop: string[];
  stopTokenIds: number[];
  /** What ended the answer stays in its text. */
  keepsStop: boolean;
  ignoreEos: boolean;
  skipSpecialTokens: boolean;
  /** An id of the client's own, by which it may abort the request; unique among those in flight. */
  requestId: string | null;
  /** Requests of another salt share no cached prefix with it. */
  salt: Salt;
}

const maxStopCount = 16;
const maxStopLength = 1024;
const maxStopTokenCount = 1024;
/** OpenAI's bound of `n`; the server may be configured lower. */
export const maxChoiceCount = 128;
const maxLogitBiasCount = 1024;
const largestBias = 100;
/** OpenAI's seed is a signed 64-bit integer; the upper end is exclusive because 2^63 - 1 is no double. */
const seedLimit = 2 ** 63;

const isFalse = (value: unknown): boolean => value === false;

const seedExpected = 'an integer from -2^63 to 2^63 - 1';
const seed: Field<number> = {
  schema: { type: 'integer', minimum: -seedLimit, exclusiveMaximum: seedLimit },
  expected: seedExpected,
  read(value, path) {
    if (typeof value !== 'number' || !Number.isInteger(value)) throw wrong('invalid_type', path, seedExpected, value);
    if (value < -seedLimit || value >= seedLimit) throw wrong('invalid_value', path, seedExpected, value);
    return value;
  },
};

const stopText = text({ minLength: 1, maxLength: maxStopLength });

/** Stop strings in a list, as some APIs want them. */
export const stopTexts: Field<string[]> = list(stopText, { minItems: 0, maxItems: maxStopCount });

const stop: Field<string[]> = {
  schema: { anyOf: [stopText.schema, stopTexts.schema] },
  expected: `a string or an array of up to ${maxStopCount} strings`,
  read(value, path) {
    if (typeof value === 'string') return [stopText.read(value, path)];
    if (Array.isArray(value)) return stopTexts.read(value, path);
    throw wrong('invalid_type', path, this.expected, value);
  },
};

/** An id that a client gives its request. */
export const clientRequestId: Field<string> = {
  schema: { type: 'string', pattern: '^[A-Za-z0-9._:-]{1,128}$' },
  expected: 'a string of 1 to 128 letters, digits or . _ : -',
  read(value, path) {
    if (typeof value !== 'string') throw wrong('invalid_type', path, this.expected, value);
    if (!/^[A-Za-z0-9._:-]{1,128}$/.test(value)) throw wrong('invalid_value', path, this.expected, value);
    return value;
  },
};

const biasExpected = `an object of up to ${maxLogitBiasCount} token ids with numbers from -${largestBias} to ${largestBias}`;

/** Keys and values are checked in full by `samplingCall`, which knows the vocabulary. */
const logitBias: Field<JsonObject> = {
  expected: biasExpected,
  schema: {
    type: 'object',
    additionalProperties: { type: 'number', minimum: -largestBias, maximum: largestBias },
    maxProperties: maxLogitBiasCount,
    description: 'Added to the logits of these tokens, by id, behind all penalties.',
  },
  read(value, path) {
    if (!isObject(value)) throw wrong('invalid_type', path, biasExpected, value);
    return value;
  },
};

/** Most of the likeliest tokens that an answer may show with each of its own. */
export const maxTopLogprobs = 20;

/** How tokens are chosen and where the answer ends, under the names that all native and OpenAI routes share. */
export const samplingFields = {
  temperature: optional(finite({ min: 0, max: 2 })),
  top_p: optional(finite({ min: 0, max: 1 })),
  top_k: optional(integer({ min: -1 })),
  min_p: optional(finite({ min: 0, max: 1 })),
  stop: optional(stop),
  stop_token_ids: optional(list(integer({ min: 0 }), { minItems: 0, maxItems: maxStopTokenCount })),
  ignore_eos: optional(boolean()),
  skip_special_tokens: optional(boolean()),
  no_stop_trim: optional(boolean()),
  n: optional(integer({ min: 1, max: maxChoiceCount })),
  min_tokens: optional(integer({ min: 0 })),
  presence_penalty: optional(finite({ min: -2, max: 2 })),
  frequency_penalty: optional(finite({ min: -2, max: 2 })),
  repetition_penalty: optional(finite({ min: 0, max: 2, above: true })),
  logit_bias: optional(logitBias),
};

/** Constraints on the text that this server cannot honour. */
export const constraintFields = Object.fromEntries(
  [
    'stop_regex',
    'lora_path',
    'session_params',
    'custom_logit_processor',
    'custom_params',
    'json_schema',
    'regex',
    'ebnf',
    'structural_tag',
    'structured_outputs',
    'guided_json',
    'guided_regex',
    'guided_choice',
    'guided_grammar',
  ].map((name) => [name, unsupported({ neutral: () => false, accepted: 'null' })]),
);

const saltText = described(
  text({ minLength: 1, maxLength: 256 }),
  'Requests share cached prefixes only with those that have the same `cache_salt` and `extra_key`.',
);

/** What keeps the cached prefixes of a request apart, on every route that generates. */
export const saltFields = { cache_salt: optional(saltText), extra_key: optional(saltText) };

/** Fields that /v1/chat/completions and /v1/completions share. */
export const openaiFields = {
  ...samplingFields,
  model: optional(text()),
  stream: optional(boolean()),
  stream_options: optional(object({ include_usage: optional(boolean()), continuous_usage_stats: optional(boolean()) })),
  max_tokens: optional(integer({ min: 1 })),
  seed: optional(seed),
  include_stop_str_in_output: optional(boolean()),
  rid: optional(clientRequestId),
  request_id: optional(clientRequestId),
  priority: ignored('Requests are served in the order they come.', integer({ min: -(2 ** 31), max: 2 ** 31 - 1 })),
  ...saltFields,
  response_format: responseFormatField,
  return_hidden_states: unsupported({ field: boolean(), neutral: isFalse, accepted: 'false' }),
  ...constraintFields,
};

/** An API that lacks a field leaves it out. */
type SamplingValues = { [K in keyof typeof samplingFields]?: FieldValue<(typeof samplingFields)[K]> };
type OpenaiValues = { [K in keyof typeof openaiFields]: FieldValue<(typeof openaiFields)[K]> };

/** How tokens are chosen and where the answer ends; throws `ApiError` for ids outside of the vocabulary. */
export function samplingCall(
  fields: SamplingValues,
  served: ServedModel,
  path = '',
): Pick<
  GenerationCall,
  | 'choiceCount'
  | 'sampling'
  | 'minTokens'
  | 'samplingPath'
  | 'stop'
  | 'stopTokenIds'
  | 'keepsStop'
  | 'ignoreEos'
  | 'skipSpecialTokens'
> {
  const prefix = path === '' ? '' : `${path}.`;
  const stopTokenIds = fields.stop_token_ids ?? [];
  for (const [index, id] of stopTokenIds.entries()) checkTokenId(id, `${prefix}stop_token_ids[${index}]`, served);
  const choiceCount = fields.n ?? 1;
  if (choiceCount > served.maxChoices) {
    throw wrong('invalid_value', `${prefix}n`, `an integer from 1 to ${served.maxChoices}`, choiceCount);
  }
  const topP = fields.top_p ?? served.defaultTopP;
  const topK = fields.top_k ?? 0;
  const rules = rulesOf(fields, served, prefix);
  return {
    choiceCount,
    sampling: {
      // A top_p of 0 leaves the likeliest token alone, which is what temperature 0 says.
      temperature: topP === 0 ? 0 : (fields.temperature ?? served.defaultTemperature),
      topP: topP === 0 ? 1 : topP,
      topK: topK < 1 || topK >= served.vocabSize ? 0 : topK,
      minP: fields.min_p ?? 0,
      ...(rules === null ? {} : { rules }),
    },
    minTokens: fields.min_tokens ?? 0,
    samplingPath: prefix,
    stop: fields.stop ?? [],
    stopTokenIds,
    keepsStop: fields.no_stop_trim ?? false,
    ignoreEos: fields.ignore_eos ?? false,
    skipSpecialTokens: fields.skip_special_tokens ?? true,
  };
}

/** What a chat or completion request asks of the generation, but for its token limit. */
export function openaiCall(fields: OpenaiValues, served: ServedModel): Omit<GenerationCall, 'maxTokens'> {
  return {
    model: servedModelName(fields.model, served),
    stream: fields.stream ?? false,
    includeUsage: fields.stream_options?.include_usage ?? false,
    continuousUsage: fields.stream_options?.continuous_usage_stats ?? false,
    ...samplingCall({ ...fields, no_stop_trim: fields.no_stop_trim ?? fields.include_stop_str_in_output }, served),
    seed: fields.seed === undefined ? null : foldSeed(fields.seed),
    requestId: fields.rid ?? fields.request_id ?? null,
    salt: saltOf(fields),
  };
}

/** One salt of both strings. A digest, so that nothing behind this knows what the client keeps to itself. */
export function saltOf(fields: { [K in keyof typeof saltFields]: string | undefined }): Salt {
  const parts = [fields.cache_salt ?? null, fields.extra_key ?? null];
  return parts.every((part) => part === null) ? null : createHash('sha256').update(JSON.stringify(parts)).digest('hex');
}

/**
 * How many tokens the answer may have: what was asked for, else `fallback` of what the context still holds after the
 * prompt. Throws `ApiError` context_length_exceeded if the two do not fit together; `param` is the field that holds the
 * prompt.
 */
export function resolveMaxTokens(
  call: Pick<GenerationCall, 'maxTokens'>,
  prompt: { tokenCount: number; param: string; fallback: number },
  contextLength: number,
): number {
  const { tokenCount, param, fallback } = prompt;
  const room = contextLength - tokenCount;
  const wanted = call.maxTokens ?? Math.max(Math.min(fallback, room), 1);
  if (wanted <= room) return wanted;
  const asked =
    call.maxTokens === null
      ? `your prompt has ${tokenCount} tokens`
      : `you requested ${tokenCount + wanted} tokens (${tokenCount} in the prompt, ${wanted} in the answer)`;
  throw new ApiError(
    'context_length_exceeded',
    `This model's maximum context length is ${contextLength} tokens. However, ${asked}. ` +
      'Please shorten the prompt or ask for fewer tokens.',
    { param },
  );
}

/** Throws `ApiError` if the answer is to have more tokens than it may have. */
export function checkMinTokens(call: Pick<GenerationCall, 'minTokens' | 'samplingPath'>, maxTokens: number): void {
  if (call.minTokens <= maxTokens) return;
  const expected = `an integer from 0 to ${maxTokens}, the most that the answer may have`;
  throw wrong('invalid_value', `${call.samplingPath}min_tokens`, expected, call.minTokens);
}

/** The model name to answer with; throws 404 for a model that is not served. */
export function servedModelName(name: string | undefined, served: ServedModel): string {
  if (name === undefined) return served.modelId;
  if (served.names.includes(name) || name === 'default') return name;
  throw modelNotFound(name, served);
}

/** The 404 for a model name that is not served. */
export function modelNotFound(name: string, served: ServedModel): ApiError {
  const shown = JSON.stringify(name.slice(0, 64));
  return new ApiError('model_not_found', `The model ${shown} does not exist; this server has "${served.modelId}".`, {
    param: 'model',
  });
}

/** Throws `ApiError` for an id outside of the vocabulary. */
export function checkTokenId(id: number, path: string, served: ServedModel): void {
  if (id >= served.vocabSize) {
    throw wrong('invalid_value', path, `a token id from 0 to ${served.vocabSize - 1}`, id);
  }
}

/** An array of token ids. Throws `ApiError` that names the first that is none. */
export function readTokenIds(value: unknown, path: string, served: ServedModel): number[] {
  const expected = `a token id from 0 to ${served.vocabSize - 1}`;
  if (!Array.isArray(value)) throw wrong('invalid_type', path, 'an array of token ids', value);
  for (const [index, id] of value.entries()) {
    if (!Number.isInteger(id)) throw wrong('invalid_type', `${path}[${index}]`, expected, id);
    if (id < 0 || id >= served.vocabSize) throw wrong('invalid_value', `${path}[${index}]`, expected, id);
  }
  return value as number[];
}

/** What a request's rules come to; null if they change nothing. Throws `ApiError` for a bias that is none. */
function rulesOf(fields: SamplingValues, served: ServedModel, prefix: string): SamplingRules | null {
  const rules = {
    presencePenalty: fields.presence_penalty ?? 0,
    frequencyPenalty: fields.frequency_penalty ?? 0,
    repetitionPenalty: fields.repetition_penalty ?? 1,
    ...readBias(fields.logit_bias ?? {}, served, `${prefix}logit_bias`),
    minTokens: fields.min_tokens ?? 0,
  };
  const { presencePenalty, frequencyPenalty, repetitionPenalty, biasIds, minTokens } = rules;
  const hasPenalty = presencePenalty !== 0 || frequencyPenalty !== 0 || repetitionPenalty !== 1;
  return hasPenalty || biasIds.length > 0 || minTokens > 0 ? rules : null;
}

/** Throws `ApiError` unless the keys of a logit bias are token ids in canonical form and its values in range. */
function readBias(bias: JsonObject, served: ServedModel, path: string): Pick<SamplingRules, 'biasIds' | 'biases'> {
  const entries = Object.entries(bias);
  if (entries.length > maxLogitBiasCount) throw wrong('invalid_value', path, biasExpected, bias);
  const amount = finite({ min: -largestBias, max: largestBias });
  const biasIds: number[] = [];
  const biases: number[] = [];
  for (const [key, value] of entries) {
    if (!/^(0|[1-9]\d*)$/.test(key) || Number(key) >= served.vocabSize) {
      throw wrong('invalid_value', path, `keyed by token ids from 0 to ${served.vocabSize - 1}`, key);
    }
    biases.push(amount.read(value, `${path}.${key}`));
    biasIds.push(Number(key));
  }
  return { biasIds, biases };
}

/** The seed as 32 bits: itself below 2^32, else both halves of its two's complement mixed. */
export function foldSeed(value: number): number {
  const bits = BigInt.asUintN(64, BigInt(value));
  return Number((bits & 0xffff_ffffn) ^ (bits >> 32n));
}
