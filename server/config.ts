/**
 * Every option of every command, in one table.
 *
 * A row gives the value's kind, unit, range, default, help and the commands that take it. The flag
 * (`--prefill-port`) and the environment name (`HANDOFF_PREFILL_PORT`) are the row's key, respelled. From the
 * table come parsing, validation with all faults listed at once, `--help`, the flags that `handoff all` passes
 * on to the processes it starts, and the table in docs/operations.md.
 *
 * Precedence: flag (the last one, if repeated), environment, default. The result is frozen; modules receive the small piece they need
 * (`SchedulerLimits`, `Deadlines`), never the whole.
 */
import { existsSync, readFileSync } from 'node:fs';
import { basename, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import type { ConfigChoices, ModelConfig, NumericMode } from '../model/config.ts';

export type Command =
  | 'all'
  | 'router'
  | 'prefill'
  | 'decode'
  | 'logits'
  | 'generate'
  | 'inspect'
  | 'import-encoding'
  | 'doctor'
  | 'drain-watch';
export type WorkerRole = 'prefill' | 'decode';
export type LogLevel = (typeof LOG_LEVELS)[number];

/** What bounds the scheduler of one worker, and what the router admits to it. */
export interface SchedulerLimits {
  /** Rows of the decode batch, per decode worker. */
  readonly maxRunningRequests: number;
  /** Requests that may wait beyond the running ones; the next one is refused with 503. */
  readonly maxQueuedRequests: number;
  /** Tokens of one KV page, a multiple of 128 (docs/architecture.md, "page"). */
  readonly pageTokens: number;
  /** Longest chunk of a prompt computed in one step; a multiple of `pageTokens`. */
  readonly prefillChunkTokens: number;
  /** Longest sequence, prompt and answer together; null: what the model's config says. */
  readonly contextLength: number | null;
  /** Pages of the KV pool; null: see `choosePageCount`. */
  readonly kvPages: number | null;
  /** What the pool may take when `kvPages` is null. */
  readonly kvMemoryBytes: number;
  /** Tokens beyond what it has for which a sequence on decode gets pages in advance. */
  readonly headroomTokens: number;
  /** Host memory of a decode worker for sequences that had to give their pages up. */
  readonly hostBytes: number;
  /** Adapter memory of a prefill worker for states from which cached prefixes go on; 0: nothing is cached. */
  readonly prefixCacheBytes: number;
  /** Host memory of a prefill worker for copies of cached prefixes; 0: none. */
  readonly prefixHostBytes: number;
  /** URL of a Valkey or Redis server for such copies; null: none. */
  readonly prefixStore: string | null;
}

/** The clocks of the hand-over, shortest first (protocol: "Liveness, progress, room, request"). */
export interface Deadlines {
  /** A peer is pinged this often; three misses must fit in the lease. */
  readonly heartbeatMs: number;
  /** A peer that says nothing for so long is lost. */
  readonly leaseMs: number;
  /** A transfer that makes no progress for so long fails. */
  readonly stallMs: number;
  /** Longest life of a room until its first token, time spent queued excluded. */
  readonly roomMs: number;
  /** Longest life of a request. */
  readonly requestMs: number;
  /** What a process that was told to end waits for its requests, before it ends them itself. */
  readonly drainMs: number;
}

interface Common {
  readonly logLevel: LogLevel;
  /** Absolute path of a directory with config.json. */
  readonly model: string;
}

/**
 * How a checkpoint is computed; equal on all workers, which refuse each other otherwise. The model chooses what is left
 * out.
 */
export type Numerics = Pick<ConfigChoices, 'mode' | 'indexPrecision'>;

interface Computing {
  readonly numerics: Numerics;
}

interface Listening {
  /** Where this process serves HTTP. */
  readonly host: string;
  /** 0: any free port. */
  readonly port: number;
}

export interface AllConfig extends Common, Listening {
  readonly command: 'all';
  readonly prefill: number;
  readonly decode: number;
  /** HTTP port of the first prefill worker, the next one has one more; 0: any free ports. */
  readonly prefillPort: number;
  readonly decodePort: number;
  readonly adapter: string | null;
  /** What requests call the model, first of all its names. */
  readonly servedName: string;
  /** Whether requests must show a key. */
  readonly needsKey: boolean;
  /** Keys and passwords for the children, by variable: anybody may read the arguments of a process. */
  readonly childEnvironment: Readonly<Record<string, string>>;
  /** What SIGTERM leaves to running requests. */
  readonly drainMs: number;
  /** Flags that each child gets as they are: everything `all` shares with that role. */
  readonly childFlags: Readonly<Record<'router' | WorkerRole, readonly string[]>>;
}

export interface RouterConfig extends Common, Listening {
  readonly command: 'router';
  /** Control addresses, tcp://HOST:PORT, at least one of each. */
  readonly prefillWorkers: readonly string[];
  readonly decodeWorkers: readonly string[];
  /** Whether special tokens in what clients send to chat are special. */
  readonly allowSpecialTokens: boolean;
  /** Whether metrics called `sglang_…` are there as `sglang:…`, too. */
  readonly metricsColonAliases: boolean;
  /** What a request's effort is to the checkpoint; efforts without an entry are taken as they are. */
  readonly effortMap: Readonly<Record<string, string>>;
  /** Null: only clients on this machine are operators. */
  readonly adminKey: string | null;
  readonly api: ApiSettings;
  readonly limits: SchedulerLimits;
  readonly deadlines: Deadlines;
}

/** What the router's API allows and assumes. */
export interface ApiSettings {
  /** Keys that requests must show one of; empty: none is needed. */
  readonly keys: readonly string[];
  /** Requests of one key at once, and in a minute; null: no limit. */
  readonly keyMaxRequests: number | null;
  readonly keyRequestsPerMinute: number | null;
  /** At least one; answers carry the first. */
  readonly modelNames: readonly string[];
  readonly thinkingByDefault: boolean;
  readonly maxBodyBytes: number;
  readonly maxChoices: number;
  readonly firstByteMs: number;
  readonly heartbeatMs: number;
}

export interface WorkerConfig extends Common, Computing, Listening {
  readonly command: WorkerRole;
  /** Address this worker binds for the router, tcp://HOST:PORT; port 0: any free port. */
  readonly control: string;
  /** Address this worker binds for its peers, tcp://HOST:PORT; port 0: any free port. */
  readonly transfer: string;
  /** The same for KV pages; null: any free port on the host of `transfer`. */
  readonly transferData: string | null;
  /** Host that peers are told instead of the bound one; null: the bound one. */
  readonly advertise: string | null;
  /** Null: only clients on this machine are operators. */
  readonly adminKey: string | null;
  /** `lavapipe`, `swiftshader` or a part of an adapter's name; null: the best one there is. */
  readonly adapter: string | null;
  /** Steps draft; equal on all workers, which refuse each other otherwise. */
  readonly speculative: boolean;
  readonly limits: SchedulerLimits;
  readonly deadlines: Deadlines;
}

export interface LogitsConfig extends Common, Computing {
  readonly command: 'logits';
  readonly adapter: string | null;
  /** Absolute path of a JSON file: an array of token ids, or an object with `ids`. */
  readonly ids: string;
  /** Null: every position. */
  readonly positions: readonly number[] | null;
  /** Rows of the multi-token-prediction head instead of the main one. */
  readonly mtp: boolean;
  /** Tokens computed at once; null: all. */
  readonly chunk: number | null;
}

export interface GenerateConfig extends Common, Computing {
  readonly command: 'generate';
  readonly adapter: string | null;
  /** Exactly one of `ids` (absolute path of a JSON file) and `chat` (text of one user message) is set. */
  readonly ids: string | null;
  readonly chat: string | null;
  readonly maxTokens: number;
  /** 0: greedy. */
  readonly temperature: number;
  readonly seed: number;
  readonly ignoreEos: boolean;
  readonly printIds: boolean;
  /** Steps draft. */
  readonly speculative: boolean;
}

export interface InspectConfig extends Computing {
  readonly command: 'inspect';
  /** Absolute path of a directory with config.json. */
  readonly model: string;
  readonly json: boolean;
  /** Memory of the adapter to plan for; null: say nothing about it. */
  readonly memoryBytes: number | null;
  /** As for a worker: they decide what it allocates. */
  readonly pageTokens: number;
  readonly prefillChunkTokens: number;
  readonly maxRunningRequests: number;
  /** Null: the model's. */
  readonly contextLength: number | null;
}

export interface ImportEncodingConfig {
  readonly command: 'import-encoding';
  /** Absolute path of the checkpoint directory to write into. */
  readonly model: string;
  /** Absolute path of the Python file with the checkpoint's chat format. */
  readonly source: string;
}

export interface DoctorConfig {
  readonly command: 'doctor';
  /** Base URL of a router. */
  readonly url: string;
  readonly adminKey: string | null;
}

export interface DrainWatchConfig {
  readonly command: 'drain-watch';
  readonly url: string;
  /** Between two samples. */
  readonly intervalMs: number;
  /** Give a verdict after so long at the latest. */
  readonly durationMs: number;
}

export interface HelpConfig {
  readonly command: 'help';
  /** What to print on standard output. */
  readonly text: string;
}

export type Config =
  | AllConfig
  | RouterConfig
  | WorkerConfig
  | LogitsConfig
  | GenerateConfig
  | InspectConfig
  | ImportEncodingConfig
  | DoctorConfig
  | DrainWatchConfig
  | HelpConfig;

/** The command line or environment is wrong; `faults` lists everything found, one sentence each. */
export class ConfigError extends Error {
  readonly faults: readonly string[];
  constructor(command: string | null, faults: readonly string[]) {
    const help = command === null ? 'handoff --help' : `handoff ${command} --help`;
    super([...faults.map((fault) => `handoff: ${fault}`), `Try: ${help}`].join('\n'));
    this.name = 'ConfigError';
    this.faults = faults;
  }
}

const LOG_LEVELS = ['fatal', 'error', 'warn', 'info', 'debug', 'trace', 'silent'] as const;

const MODES = ['hp', 'q', 'q-inputs'] as const satisfies readonly NumericMode[];
const INDEX_PRECISIONS = ['f32', 'bf16', 'fp8', 'fp4'] as const satisfies readonly ModelConfig['indexPrecision'][];

const ROLES = ['all', 'router', 'prefill', 'decode'] as const;
const WORKERS = ['prefill', 'decode'] as const;
const TOOLS = ['logits', 'generate'] as const;
const OPERATOR_TOOLS = ['doctor', 'drain-watch'] as const;
const EVERY = [...ROLES, ...TOOLS] as const;
/** What a worker allocates follows from these too. */
const PLANNERS = ['all', ...WORKERS, 'inspect'] as const;
const ENGINES = ['all', ...WORKERS, ...TOOLS] as const;

const COMMAND_HELP: Record<Command, string> = {
  all: 'start and supervise a router and its workers on this machine',
  router: 'serve the OpenAI API over workers started elsewhere',
  prefill: 'run one prefill worker',
  decode: 'run one decode worker',
  logits: "print the model's logits for given token ids, without a server",
  generate: 'prefill and decode in this process, without a server',
  inspect: 'say what a checkpoint holds and what it takes to serve it, from its headers alone',
  'import-encoding': "take the texts of the chat format from a checkpoint's Python file into its encoding.json",
  doctor: 'examine a running cluster and say what is wrong with it',
  'drain-watch': 'watch the queues of a running cluster and say whether they drain or leak',
};

/** The option that a command takes without its flag. */
const POSITIONAL: Partial<Record<Command, Key>> = { inspect: 'model', 'import-encoding': 'model' };

/** Largest value of a Node timer; longer ones fire at once. */
const MAX_TIMER_MS = 2 ** 31 - 1;
const MAX_PORT = 65_535;
const MAX_U32 = 2 ** 32 - 1;
const MIB = 2 ** 20;
/** Least common multiple of the model's compression ratios: a page must end on finished entries. */
const PAGE_TOKENS_STEP = 128;
/** Pings that may be lost before the lease runs out. */
const HEARTBEAT_MISSES = 3;

interface Row {
  /** A `duration` is given with its unit (`500ms`, `10s`, `2m`, `1h`) and kept in ms, a `size` (`24GiB`) in bytes. */
  readonly kind: 'integer' | 'number' | 'duration' | 'size' | 'text' | 'switch' | 'texts' | 'integers';
  /** What the value is, for help and faults: `N`, `HOST`, `DIR`. */
  readonly value?: string;
  readonly unit?: string;
  /** Null: not set. */
  readonly default: string | number | boolean | null;
  /** How the default reads in help and docs, where the value itself says too little. */
  readonly defaultText?: string;
  readonly help: string;
  readonly commands: readonly Command[];
  readonly min?: number;
  readonly max?: number;
  readonly choices?: readonly string[];
  /** An address: `bind` may have port 0, `connect` may not. */
  readonly endpoint?: 'bind' | 'connect';
  /** False: the option describes one run, not a deployment, so there is no environment name for it. */
  readonly environment?: false;
  /** False: `all` has it for itself and does not pass it on. */
  readonly inherited?: false;
  /** Children get it as a variable. */
  readonly secret?: true;
}

/** The table. Order is the order of help and docs. */
export const OPTIONS = {
  host: {
    kind: 'text',
    value: 'HOST',
    default: '127.0.0.1',
    help: 'address this process serves HTTP on (`all`: the router; its workers stay on loopback)',
    commands: ROLES,
    inherited: false,
  },
  port: {
    kind: 'integer',
    value: 'PORT',
    min: 0,
    max: MAX_PORT,
    default: 8000,
    defaultText: 'router 8000, prefill 8100, decode 8200',
    help: 'port this process serves HTTP on (`all`: the router); 0 is any free port',
    commands: ROLES,
    inherited: false,
  },
  prefill: {
    kind: 'integer',
    value: 'N',
    min: 1,
    max: 32,
    default: 1,
    help: 'prefill workers to start',
    commands: ['all'],
  },
  decode: {
    kind: 'integer',
    value: 'N',
    min: 1,
    max: 32,
    default: 1,
    help: 'decode workers to start',
    commands: ['all'],
  },
  prefillPort: {
    kind: 'integer',
    value: 'PORT',
    min: 0,
    max: MAX_PORT,
    default: 8100,
    help: 'HTTP port of the first prefill worker, the next has one more; 0 is any free ports',
    commands: ['all'],
  },
  decodePort: {
    kind: 'integer',
    value: 'PORT',
    min: 0,
    max: MAX_PORT,
    default: 8200,
    help: 'HTTP port of the first decode worker, the next has one more; 0 is any free ports',
    commands: ['all'],
  },
  prefillWorker: {
    kind: 'texts',
    value: 'tcp://HOST:PORT',
    endpoint: 'connect',
    default: null,
    help: 'control address of a prefill worker; repeat for more (environment: separated by commas)',
    commands: ['router'],
  },
  decodeWorker: {
    kind: 'texts',
    value: 'tcp://HOST:PORT',
    endpoint: 'connect',
    default: null,
    help: 'control address of a decode worker; repeat for more (environment: separated by commas)',
    commands: ['router'],
  },
  control: {
    kind: 'text',
    value: 'tcp://HOST:PORT',
    endpoint: 'bind',
    default: 'tcp://127.0.0.1:0',
    help: 'address this worker binds for the router; port 0 is any free port',
    commands: WORKERS,
  },
  transfer: {
    kind: 'text',
    value: 'tcp://HOST:PORT',
    endpoint: 'bind',
    default: 'tcp://127.0.0.1:0',
    help: 'address this worker binds for the control of transfers; port 0 is any free port',
    commands: WORKERS,
  },
  transferData: {
    kind: 'text',
    value: 'tcp://HOST:PORT',
    endpoint: 'bind',
    default: null,
    defaultText: 'any free port on the host of --transfer',
    help: 'address this worker binds for KV pages',
    commands: WORKERS,
  },
  advertise: {
    kind: 'text',
    value: 'HOST',
    default: null,
    defaultText: 'the host of --transfer',
    help: 'host by which peers reach --transfer and --transfer-data, where it is not the one that is bound (NAT, proxies)',
    commands: WORKERS,
  },
  model: {
    kind: 'text',
    value: 'DIR',
    default: null,
    defaultText: 'the embedded nano',
    help: 'checkpoint directory (config.json, tokenizer.json, *.safetensors)',
    commands: [...EVERY, 'inspect', 'import-encoding'],
  },
  adapter: {
    kind: 'text',
    value: 'NAME',
    default: null,
    defaultText: 'the best one found',
    help: 'GPU adapter to use: lavapipe, swiftshader, or a part of a name',
    commands: ENGINES,
  },
  maxRunningRequests: {
    kind: 'integer',
    value: 'N',
    unit: 'requests',
    min: 1,
    max: 1024,
    default: 64,
    help: 'rows of the decode batch, per decode worker',
    commands: [...ROLES, 'inspect'],
  },
  maxQueuedRequests: {
    kind: 'integer',
    value: 'N',
    unit: 'requests',
    min: 0,
    max: 65_536,
    default: 64,
    help: 'requests that may wait beyond the running ones; the next one gets 503',
    commands: ROLES,
  },
  contextLength: {
    kind: 'integer',
    value: 'N',
    unit: 'tokens',
    min: 1,
    max: 2 ** 24,
    default: null,
    defaultText: "the model's",
    help: 'longest sequence, prompt and answer together; beyond what the checkpoint was trained for answers get worse',
    commands: [...ROLES, 'inspect'],
  },
  effortMap: {
    kind: 'text',
    value: 'EFFORT=EFFORT,...',
    default: 'minimal=low,low=high,medium=high,xhigh=max',
    help: "what a request's reasoning effort is to the checkpoint, whose encoding.json has the texts; others stay as they are",
    commands: ['all', 'router'],
  },
  allowSpecialTokens: {
    kind: 'switch',
    default: false,
    help: 'read special tokens in messages as special; without it they are plain text, whatever clients send',
    commands: ['all', 'router'],
  },
  metricsColonAliases: {
    kind: 'switch',
    default: false,
    help: 'repeat every sglang_NAME of /metrics as sglang:NAME, for dashboards made for SGLang',
    commands: ['all', 'router'],
  },
  pageTokens: {
    kind: 'integer',
    value: 'N',
    unit: 'tokens',
    min: PAGE_TOKENS_STEP,
    max: 4096,
    default: 128,
    help: "tokens of one KV page, a multiple of 128 and of the model's compression ratios; equal on all workers",
    commands: PLANNERS,
  },
  mode: {
    kind: 'text',
    value: 'MODE',
    choices: MODES,
    default: 'hp',
    help: 'what is rounded: hp nothing, q activations, KV and index as the official runtime does, q-inputs also the inputs of FP8 and FP4 linears; equal on all workers',
    commands: [...ENGINES, 'inspect'],
  },
  indexPrecision: {
    kind: 'text',
    value: 'FORMAT',
    choices: INDEX_PRECISIONS,
    default: null,
    defaultText: 'f32 in mode hp, else fp4',
    help: 'how keys of the lightning indexer are stored in KV pages: f32, bf16, fp8 or fp4; equal on all workers',
    commands: [...ENGINES, 'inspect'],
  },
  speculative: {
    kind: 'text',
    value: 'SWITCH',
    choices: ['on', 'off'],
    default: 'off',
    help: "draft a token with the checkpoint's MTP block and check it in the same step: on or off; answers are the same, only their speed differs; equal on all workers",
    commands: ['all', ...WORKERS, 'generate'],
  },
  kvPages: {
    kind: 'integer',
    value: 'N',
    unit: 'pages',
    min: 1,
    max: 2 ** 24,
    default: null,
    defaultText: 'for all running requests at full length, within --kv-memory',
    help: "pages of a worker's KV pool",
    commands: ['all', ...WORKERS],
  },
  kvMemory: {
    kind: 'integer',
    value: 'N',
    unit: 'MiB',
    min: 1,
    max: 2 ** 24,
    default: 1024,
    help: "most that a worker's KV pool takes when --kv-pages is not given",
    commands: ['all', ...WORKERS],
  },
  numReservedDecodeTokens: {
    kind: 'integer',
    value: 'N',
    unit: 'tokens',
    min: 1,
    max: 2 ** 20,
    default: 128,
    help: 'tokens of the answer for which a request gets pages in advance; then it grows page by page',
    commands: ['all', 'decode'],
  },
  retractionMemory: {
    kind: 'integer',
    value: 'N',
    unit: 'MiB',
    min: 0,
    max: 2 ** 24,
    default: 1024,
    help: 'host memory for running requests whose pages must give way to older ones; when it is full, the newest ends',
    commands: ['all', 'decode'],
  },
  prefixCacheMemory: {
    kind: 'integer',
    value: 'N',
    unit: 'MiB',
    min: 0,
    max: 2 ** 24,
    default: 256,
    help: 'adapter memory for states from which cached prefixes of prompts go on, beside the KV pool; 0 caches none',
    commands: ['all', 'prefill'],
  },
  prefixHostMemory: {
    kind: 'integer',
    value: 'N',
    unit: 'MiB',
    min: 0,
    max: 2 ** 24,
    default: 0,
    help: 'host memory for copies of cached prefixes, which come back when the adapter has evicted them; 0 keeps none',
    commands: ['all', 'prefill'],
  },
  prefixStore: {
    kind: 'text',
    value: 'URL',
    default: null,
    defaultText: 'none',
    help: 'Valkey or Redis server for such copies, redis://HOST:PORT; slow or gone, it costs computation and no answer',
    commands: ['all', 'prefill'],
    secret: true, // it may have a password in it
  },
  prefillChunkTokens: {
    kind: 'integer',
    value: 'N',
    unit: 'tokens',
    min: PAGE_TOKENS_STEP,
    max: 65_536,
    default: 256,
    help: 'most prompt tokens computed in one step, a multiple of --page-tokens',
    commands: PLANNERS,
  },
  heartbeat: {
    kind: 'duration',
    value: 'TIME',
    min: 10,
    max: MAX_TIMER_MS,
    default: 1000,
    help: 'time between two pings to a peer; three must fit in --lease',
    commands: ROLES,
  },
  lease: {
    kind: 'duration',
    value: 'TIME',
    min: 10,
    max: MAX_TIMER_MS,
    default: 10_000,
    help: 'a peer that is silent for so long is lost',
    commands: ROLES,
  },
  transferStallTimeout: {
    kind: 'duration',
    value: 'TIME',
    min: 10,
    max: MAX_TIMER_MS,
    default: 15_000,
    help: 'a transfer without progress for so long fails; at least --lease',
    commands: ROLES,
  },
  roomTimeout: {
    kind: 'duration',
    value: 'TIME',
    min: 10,
    max: MAX_TIMER_MS,
    default: 60_000,
    help: "longest time to a request's first token, time spent queued excluded, for each 4096 tokens of a longer prompt; above --transfer-stall-timeout",
    commands: ROLES,
  },
  requestTimeout: {
    kind: 'duration',
    value: 'TIME',
    min: 10,
    max: MAX_TIMER_MS,
    default: 600_000,
    help: 'longest life of a request; above --room-timeout',
    commands: ROLES,
  },
  drainGrace: {
    kind: 'duration',
    value: 'TIME',
    min: 10,
    max: MAX_TIMER_MS,
    default: 30_000,
    help: 'time that SIGTERM leaves to running requests; above --transfer-stall-timeout',
    commands: ROLES,
  },
  ids: {
    kind: 'text',
    value: 'FILE.json',
    default: null,
    help: 'token ids: an array, or an object with `ids`',
    commands: TOOLS,
    environment: false,
  },
  positions: {
    kind: 'integers',
    value: '0,5,299',
    default: null,
    defaultText: 'every position',
    help: 'positions to print',
    commands: ['logits'],
    environment: false,
  },
  mtp: {
    kind: 'switch',
    default: false,
    help: 'print the rows of the multi-token-prediction head instead',
    commands: ['logits'],
    environment: false,
  },
  chunk: {
    kind: 'integer',
    value: 'N',
    unit: 'tokens',
    min: 1,
    max: 2 ** 24,
    default: null,
    defaultText: 'all at once',
    help: 'compute the prompt in chunks of so many tokens',
    commands: ['logits'],
    environment: false,
  },
  chat: {
    kind: 'text',
    value: 'TEXT',
    default: null,
    help: 'text of one user message, instead of --ids',
    commands: ['generate'],
    environment: false,
  },
  maxTokens: {
    kind: 'integer',
    value: 'N',
    unit: 'tokens',
    min: 1,
    max: 2 ** 24,
    default: 256,
    help: 'most tokens to generate',
    commands: ['generate'],
    environment: false,
  },
  temperature: {
    kind: 'number',
    value: 'T',
    min: 0,
    max: 2,
    default: 0,
    help: 'sampling temperature; 0 is greedy',
    commands: ['generate'],
    environment: false,
  },
  seed: {
    kind: 'integer',
    value: 'S',
    min: 0,
    max: MAX_U32,
    default: 0,
    help: 'seed of the sampler',
    commands: ['generate'],
    environment: false,
  },
  ignoreEos: {
    kind: 'switch',
    default: false,
    help: 'go on after the end-of-sequence token',
    commands: ['generate'],
    environment: false,
  },
  printIds: {
    kind: 'switch',
    default: false,
    help: 'print token ids instead of text',
    commands: ['generate'],
    environment: false,
  },
  memory: {
    kind: 'size',
    value: 'SIZE',
    min: 1,
    default: null,
    help: 'memory of an adapter, such as 24GiB: say how many tokens and sequences fit it',
    commands: ['inspect'],
    environment: false,
  },
  json: {
    kind: 'switch',
    default: false,
    help: 'print one JSON object instead of text',
    commands: ['inspect'],
    environment: false,
  },
  source: {
    kind: 'text',
    value: 'FILE.py',
    default: null,
    defaultText: 'encoding/encoding_dsv4.py of the checkpoint',
    help: "Python file with the checkpoint's chat format",
    commands: ['import-encoding'],
    environment: false,
  },
  url: {
    kind: 'text',
    value: 'URL',
    default: 'http://127.0.0.1:8000',
    help: 'base URL of the router',
    commands: OPERATOR_TOOLS,
    environment: false,
  },
  interval: {
    kind: 'duration',
    value: 'TIME',
    min: 10,
    max: MAX_TIMER_MS,
    default: 1000,
    help: 'time between two samples',
    commands: ['drain-watch'],
    environment: false,
  },
  duration: {
    kind: 'duration',
    value: 'TIME',
    min: 10,
    max: MAX_TIMER_MS,
    default: 60_000,
    help: 'longest time to watch',
    commands: ['drain-watch'],
    environment: false,
  },
  servedModelName: {
    kind: 'texts',
    value: 'NAME',
    default: null,
    defaultText: 'the name of the directory of --model',
    help: 'name that requests may give the model; repeat for more, answers carry the first (environment: separated by commas)',
    commands: ['all', 'router'],
  },
  defaultThinking: {
    kind: 'text',
    value: 'on|off',
    choices: ['on', 'off'],
    default: 'on',
    help: 'whether answers begin with reasoning where the request does not say',
    commands: ['all', 'router'],
  },
  maxBody: {
    kind: 'size',
    value: 'SIZE',
    min: 1024,
    max: 2 ** 30,
    default: 64 * MIB,
    defaultText: '64MiB',
    help: 'longest request body; a longer one is answered with 413',
    commands: ['all', 'router'],
  },
  maxChoices: {
    kind: 'integer',
    value: 'N',
    min: 1,
    max: 128,
    default: 128,
    help: 'most choices (`n`) of one request',
    commands: ['all', 'router'],
  },
  sseFirstByte: {
    kind: 'duration',
    value: 'TIME',
    min: 1,
    max: MAX_TIMER_MS,
    default: 60_000,
    help: 'a stream without a token for so long gets its headers and then heartbeats',
    commands: ['all', 'router'],
  },
  sseHeartbeat: {
    kind: 'duration',
    value: 'TIME',
    min: 0,
    max: MAX_TIMER_MS,
    default: 15_000,
    help: 'an idle stream gets a blank line this often; 0s turns that off',
    commands: ['all', 'router'],
  },
  apiKey: {
    kind: 'texts',
    value: 'KEY',
    default: null,
    defaultText: 'none: everybody may send requests',
    help: 'key that requests must show; repeat for more; better given as a variable (environment: separated by commas)',
    commands: ['all', 'router'],
    secret: true,
  },
  keyMaxRequests: {
    kind: 'integer',
    value: 'N',
    min: 1,
    max: 1_000_000,
    default: null,
    defaultText: 'no limit',
    help: 'requests that one API key may have at once; one more is answered with 429',
    commands: ['all', 'router'],
  },
  keyRequestsPerMinute: {
    kind: 'integer',
    value: 'N',
    min: 1,
    max: 1_000_000,
    default: null,
    defaultText: 'no limit',
    help: 'requests that one API key may send in a minute; one more is answered with 429',
    commands: ['all', 'router'],
  },
  adminKey: {
    kind: 'text',
    value: 'KEY',
    default: null,
    defaultText: 'none: clients on the same machine only',
    help: 'key of the pages and requests for operators, the same on all processes; better given as a variable',
    commands: [...ROLES, 'doctor'],
    secret: true,
  },
  logLevel: {
    kind: 'text',
    value: 'LEVEL',
    choices: LOG_LEVELS,
    default: 'info',
    help: `least level logged: ${LOG_LEVELS.join(', ')}`,
    commands: EVERY,
  },
} as const satisfies Record<string, Row>;

/** Efforts as DeepSeek's own API maps them onto those that its models were trained with. */
export const DEFAULT_EFFORT_MAP: Readonly<Record<string, string>> = parseEffortMap(OPTIONS.effortMap.default)!;

type Key = keyof typeof OPTIONS;

interface ValueOfKind {
  integer: number;
  number: number;
  duration: number;
  size: number;
  text: string;
  switch: boolean;
  texts: readonly string[];
  integers: readonly number[];
}
type Value = ValueOfKind[keyof ValueOfKind] | null;

/** One value per option, typed by its row; null only where the row's default is null. */
type Settings = {
  [K in Key]: ValueOfKind[(typeof OPTIONS)[K]['kind']] | ((typeof OPTIONS)[K]['default'] extends null ? null : never);
};

const ROWS: readonly [Key, Row][] = Object.entries(OPTIONS) as [Key, Row][];
const COMMANDS = Object.keys(COMMAND_HELP) as Command[];

/** HTTP port of a process that was not given one: worker ranges are those of `all`. */
const DEFAULT_PORTS: Partial<Record<Command, number>> = {
  prefill: OPTIONS.prefillPort.default,
  decode: OPTIONS.decodePort.default,
};

/** Duration units, largest first, in ms. */
const UNITS_MS = [
  ['h', 3_600_000],
  ['m', 60_000],
  ['s', 1000],
  ['ms', 1],
] as const;

/** Milliseconds of `500ms`, `1.5s`, `2m` or `1h`, whole ones; null when `text` is not of that form. */
export function parseDuration(text: string): number | null {
  const [, digits, name] = /^(\d+(?:\.\d+)?)(ms|s|m|h)$/.exec(text) ?? [];
  const unit = UNITS_MS.find(([candidate]) => candidate === name);
  return unit === undefined ? null : Math.round(Number(digits) * unit[1]);
}

/** `low=high,medium=high` as an object; null when `text` is not of that form. */
function parseEffortMap(text: string): Record<string, string> | null {
  const pairs = text.split(',').map((pair) => /^([a-z]+)=([a-z]+)$/.exec(pair.trim()));
  if (pairs.includes(null)) return null;
  return Object.fromEntries(pairs.map((pair) => [pair![1]!, pair![2]!]));
}

/** The shortest exact text of a duration: 15000 → `15s`. Inverse of `parseDuration`. */
export function formatDuration(ms: number): string {
  const [name, unitMs] = UNITS_MS.find(([, size]) => ms >= size && ms % size === 0) ?? ['ms', 1];
  return `${ms / unitMs}${name}`;
}

/** Size units in bytes, by their lower-case names. */
const UNITS_BYTES = new Map([
  ['kib', 2 ** 10],
  ['mib', 2 ** 20],
  ['gib', 2 ** 30],
  ['tib', 2 ** 40],
  ['kb', 1e3],
  ['mb', 1e6],
  ['gb', 1e9],
  ['tb', 1e12],
]);

/** Bytes of `24GiB`, `1.5 TiB` or `80GB` (powers of ten), whole ones; null when `text` is not of that form. */
export function parseSize(text: string): number | null {
  const [, digits, name = ''] = /^(\d+(?:\.\d+)?) ?([kmgt]i?b)$/i.exec(text) ?? [];
  const unitBytes = UNITS_BYTES.get(name.toLowerCase());
  return unitBytes === undefined ? null : Math.round(Number(digits) * unitBytes);
}

/** `prefillPort` → `--prefill-port`. */
export function flagOf(key: Key): string {
  return `--${key.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`)}`;
}

/** `prefillPort` → `HANDOFF_PREFILL_PORT`; null for options of a single run. */
export function environmentNameOf(key: Key): string | null {
  const row: Row = OPTIONS[key];
  return row.environment === false ? null : `HANDOFF_${flagOf(key).slice(2).replaceAll('-', '_').toUpperCase()}`;
}

/**
 * Read a command line and an environment.
 *
 * argv  what follows the program's name: the command, then its flags
 *
 * Returns a frozen config, or the text to print for `--help` and `--version`. Throws `ConfigError` with every
 * fault found: unknown flags (with the nearest known one), values that do not parse or are out of range,
 * and values that contradict each other.
 */
export function resolveConfig(argv: readonly string[], env: Readonly<Record<string, string | undefined>>): Config {
  const first = argv[0];
  if (first === undefined || first === '--help' || first === '-h' || first === 'help') {
    return Object.freeze({ command: 'help', text: overview() });
  }
  if (first === '--version') return Object.freeze({ command: 'help', text: `${version()}\n` });
  const command = COMMANDS.find((name) => name === first);
  if (command === undefined) {
    const hint = nearest(first, COMMANDS);
    throw new ConfigError(null, [`unknown command "${first}"${hint === null ? '' : `; did you mean "${hint}"?`}`]);
  }
  const words = argv.slice(1);
  if (words.includes('--help') || words.includes('-h')) {
    return Object.freeze({ command: 'help', text: helpFor(command) });
  }

  const faults: string[] = [];
  const given = { ...readEnvironment(command, env, faults), ...readFlags(command, words, faults) };
  const settings = withDefaults(command, given);
  faults.push(...contradictions(command, settings, given));
  if (faults.length > 0) throw new ConfigError(command, faults);
  return deepFreeze(buildConfig(command, settings, given));
}

/**
 * Pages for a worker's KV pool.
 *
 * contextTokens  longest sequence; pageBytes  bytes of one page, all layers
 *
 * `--kv-pages` as given; else enough for every running request at full length, but no more than
 * `--kv-memory`. Throws `ConfigError` when one sequence of full length would not fit.
 */
export function choosePageCount(
  limits: Pick<SchedulerLimits, 'kvPages' | 'kvMemoryBytes' | 'pageTokens' | 'maxRunningRequests'>,
  sizes: { contextTokens: number; pageBytes: number },
): number {
  const sequencePages = Math.ceil(sizes.contextTokens / limits.pageTokens);
  const fitting = Math.floor(limits.kvMemoryBytes / sizes.pageBytes);
  const pageCount = limits.kvPages ?? Math.min(limits.maxRunningRequests * sequencePages, fitting);
  if (pageCount < sequencePages) {
    throw new ConfigError(null, [
      `${pageCount} KV pages of ${sizes.pageBytes} bytes are too few: one sequence of ${sizes.contextTokens} tokens ` +
        `needs ${sequencePages}; raise ${flagOf('kvMemory')} or ${flagOf('kvPages')}, or lower ${flagOf('contextLength')}`,
    ]);
  }
  return pageCount;
}

/** The name clients use for the model: the last part of its directory. */
export function modelName(config: { readonly model: string }): string {
  return basename(config.model);
}

/** The embedded nano checkpoint, beside the sources or beside `dist`. */
export function embeddedModelDir(): string {
  const candidates = ['../model/nano', '../../model/nano'].map((path) => fileURLToPath(new URL(path, import.meta.url)));
  return candidates.find((dir) => existsSync(resolve(dir, 'config.json'))) ?? candidates[0]!;
}

/** The flags table of docs/operations.md, in Markdown. */
export function flagsTable(): string {
  const lines = [
    '| flag | environment | commands | unit | default | meaning |',
    '| --- | --- | --- | --- | --- | --- |',
  ];
  for (const [key, row] of ROWS) {
    const name = environmentNameOf(key);
    const cells = [
      `\`${usageOf(key, row)}\``,
      name === null ? '' : `\`${name}\``,
      EVERY.every((command) => row.commands.includes(command)) ? 'every' : row.commands.join(', '),
      row.unit ?? '',
      defaultTextOf(row),
      row.help,
    ];
    lines.push(`| ${cells.map((cell) => cell.replaceAll('|', '\\|')).join(' | ')} |`);
  }
  return lines.join('\n');
}

/** What `handoff COMMAND --help` prints. */
export function helpFor(command: Command): string {
  const rows = ROWS.filter(([, row]) => row.commands.includes(command));
  const width = Math.max(...rows.map(([key, row]) => usageOf(key, row).length));
  const lines = rows.map(([key, row]) => {
    const standard = key === 'port' ? String(DEFAULT_PORTS[command] ?? row.default) : defaultTextOf(row);
    const note =
      standard === ''
        ? ''
        : ` [${standard}${row.unit === undefined || row.defaultText !== undefined ? '' : ` ${row.unit}`}]`;
    return `  ${usageOf(key, row).padEnd(width)}  ${row.help}${note}`;
  });
  const examples = rows.map(([key]) => key).filter((key) => environmentNameOf(key) !== null);
  const [first, last] = [examples[0], examples.at(-1)];
  const shown = [...new Set([last, first])].map((key) => key && `${flagOf(key)} is ${environmentNameOf(key)}`);
  const environment =
    first === undefined
      ? ''
      : `\nAn option may also come from the environment, in capitals: ${shown.join(', ')}. Flags win.\n`;
  const positional = POSITIONAL[command];
  const usage = positional === undefined ? command : `${command} [${(OPTIONS[positional] as Row).value}]`;
  return `handoff ${usage}: ${COMMAND_HELP[command]}\n\n${lines.join('\n')}\n${environment}`;
}

function overview(): string {
  const width = Math.max(...COMMANDS.map((name) => name.length));
  const lines = COMMANDS.map((name) => `  ${name.padEnd(width)}  ${COMMAND_HELP[name]}`);
  return `Usage: handoff COMMAND [options]\n\n${lines.join('\n')}\n\nOptions of a command: handoff COMMAND --help\n`;
}

function usageOf(key: Key, row: Row): string {
  return row.value === undefined ? flagOf(key) : `${flagOf(key)} ${row.value}`;
}

function defaultTextOf(row: Row): string {
  if (row.defaultText !== undefined) return row.defaultText;
  if (row.default === null || row.default === false) return '';
  return row.kind === 'duration' ? formatDuration(row.default as number) : String(row.default);
}

function version(): string {
  const paths = ['../package.json', '../../package.json'].map((path) => new URL(path, import.meta.url));
  const found = paths.find((path) => existsSync(path));
  if (found === undefined) return 'handoff (unknown version)';
  const { version: text } = JSON.parse(readFileSync(found, 'utf8')) as { version: string };
  return `handoff ${text}`;
}

/** What was given, parsed; null where it did not parse, so that it does not count as missing too. */
type Given = Partial<Record<Key, Value>>;

function readEnvironment(command: Command, env: Readonly<Record<string, string | undefined>>, faults: string[]): Given {
  const given: Given = {};
  for (const [key, row] of ROWS) {
    const name = environmentNameOf(key);
    const text = name === null ? undefined : env[name];
    if (name === null || text === undefined || text === '' || !row.commands.includes(command)) continue;
    const texts = row.kind === 'texts' ? text.split(',').map((part) => part.trim()) : [text];
    given[key] = parseValue(name, row, texts, faults);
  }
  return given;
}

function readFlags(command: Command, words: readonly string[], faults: string[]): Given {
  const keyByName = new Map(ROWS.map(([key]) => [flagOf(key).slice(2), key]));
  const own = ROWS.filter(([, row]) => row.commands.includes(command)).map(([key]) => flagOf(key));
  // Not strict: the strict mode stops at the first fault, and the caller wants all of them.
  const { tokens } = parseArgs({
    args: [...words],
    strict: false,
    tokens: true,
    options: Object.fromEntries(
      ROWS.map(([key, row]) => [
        flagOf(key).slice(2),
        { type: row.kind === 'switch' ? ('boolean' as const) : ('string' as const), multiple: true },
      ]),
    ),
  });

  const texts = new Map<Key, string[]>();
  // The word after a faulty flag was meant as its value: one fault, not two.
  let forgivenIndex = -1;
  for (const token of tokens) {
    if (token.kind === 'positional' && token.index !== forgivenIndex) {
      const key = POSITIONAL[command];
      if (key === undefined || texts.has(key)) faults.push(`unexpected argument "${token.value}"`);
      else texts.set(key, [token.value]);
    }
    if (token.kind !== 'option') continue;
    const before = faults.length;
    const key = keyByName.get(token.name);
    const row: Row | undefined = key === undefined ? undefined : OPTIONS[key];
    if (key === undefined || row === undefined || !token.rawName.startsWith('--')) {
      const hint = nearest(token.rawName, own);
      faults.push(`unknown option ${token.rawName}${hint === null ? '' : `; did you mean ${hint}?`}`);
    } else if (!row.commands.includes(command)) {
      faults.push(
        `${token.rawName} is an option of ${row.commands.map((name) => `handoff ${name}`).join(', ')}, not of handoff ${command}`,
      );
    } else if (row.kind === 'switch') {
      if (token.value !== undefined) faults.push(`${token.rawName} takes no value, got "${token.value}"`);
      else texts.set(key, ['true']);
    } else if (token.value === undefined || (!token.inlineValue && /^--?[a-z][a-z-]*(=|$)/i.test(token.value))) {
      // parseArgs takes the next word whatever it is: `--host --port 1` would make "--port" the host.
      faults.push(`${token.rawName} needs a value, ${row.value ?? 'text'}`);
    } else {
      texts.set(key, [...(texts.get(key) ?? []), token.value]);
    }
    if (faults.length > before) {
      forgivenIndex = token.index + (token.value === undefined || token.inlineValue ? 1 : 2);
    }
  }

  const given: Given = {};
  for (const [key, values] of texts) {
    const row: Row = OPTIONS[key];
    given[key] = parseValue(flagOf(key), row, values, faults);
  }
  return given;
}

/** Turn texts into the row's value, or note what is wrong and return null. `texts` has at least one. */
function parseValue(name: string, row: Row, texts: readonly string[], faults: string[]): Value {
  const text = texts.at(-1) ?? '';
  const refuse = (expected: string, found = text): null => {
    faults.push(`${name} must be ${expected}, got "${found}"`);
    return null;
  };
  switch (row.kind) {
    case 'switch':
      return text === 'true';
    case 'integer':
    case 'number': {
      const pattern = row.kind === 'integer' ? /^\d+$/ : /^\d+(\.\d+)?(e-?\d+)?$/i;
      const value = pattern.test(text) ? Number(text) : Number.NaN;
      const { min = 0, max = Number.MAX_SAFE_INTEGER } = row;
      const kind = row.kind === 'integer' ? 'a whole number' : 'a number';
      return value >= min && value <= max ? value : refuse(`${kind} from ${min} to ${max}`);
    }
    case 'duration': {
      const value = parseDuration(text);
      const { min = 0, max = MAX_TIMER_MS } = row;
      if (value !== null && value >= min && value <= max) return value;
      // A bare number could be anything; saying so is better than guessing a factor of 1000 wrong.
      if (/^\d+(\.\d+)?$/.test(text)) return refuse(`given with a unit: write ${text}ms, ${text}s or ${text}m`);
      return refuse(`a time such as 500ms, 10s or 2m, from ${formatDuration(min)} to ${formatDuration(max)}`);
    }
    case 'size': {
      const value = parseSize(text);
      const { min = 0, max = Number.MAX_SAFE_INTEGER } = row;
      if (value !== null && value >= min && value <= max) return value;
      return refuse('a size with its unit, such as 24GiB or 80GB');
    }
    case 'integers': {
      const parts = text.split(',');
      const wrong = parts.find((part) => !/^\d+$/.test(part.trim()) || !Number.isSafeInteger(Number(part)));
      return wrong === undefined ? parts.map(Number) : refuse('whole numbers separated by commas');
    }
    case 'text':
      if (row.choices !== undefined && !row.choices.includes(text)) return refuse(`one of ${row.choices.join(', ')}`);
      if (row.endpoint !== undefined && !isEndpoint(text, row.endpoint)) return refuse(endpointShape(row.endpoint));
      return text === '' ? refuse('not empty') : text;
    case 'texts': {
      // A variable separates them by commas, so a flag must not say what a variable cannot.
      const odd = texts.find((part) => part === '' || part.includes(','));
      if (odd !== undefined) return refuse('not empty and without commas', '…');
      const wrong = row.endpoint === undefined ? undefined : texts.find((part) => !isEndpoint(part, row.endpoint!));
      return wrong === undefined ? texts : refuse(endpointShape(row.endpoint!), wrong);
    }
    default:
      return row.kind satisfies never;
  }
}

function isEndpoint(text: string, use: 'bind' | 'connect'): boolean {
  const match = /^tcp:\/\/(?:[A-Za-z0-9._-]+|\*|\[[0-9A-Fa-f:.]+\]):(\d{1,5})$/.exec(text);
  if (match === null) return false;
  const port = Number(match[1]);
  return port <= MAX_PORT && (use === 'bind' || (port > 0 && !text.startsWith('tcp://*')));
}

function endpointShape(use: 'bind' | 'connect'): string {
  return use === 'bind' ? 'tcp://HOST:PORT' : 'tcp://HOST:PORT with a port from 1 to 65535';
}

function withDefaults(command: Command, given: Given): Settings {
  const settings: Record<string, Value> = {};
  for (const [key, row] of ROWS) settings[key] = given[key] ?? row.default;
  settings['port'] = given.port ?? DEFAULT_PORTS[command] ?? OPTIONS.port.default;
  for (const key of ['model', 'ids', 'source'] as const) {
    const path = settings[key];
    if (typeof path === 'string') settings[key] = resolve(path);
  }
  settings['model'] ??= embeddedModelDir();
  settings['source'] ??= resolve(settings['model'] as string, 'encoding/encoding_dsv4.py');
  return settings as Settings;
}

/** Faults that only show when several values, or the disk, are looked at together. */
function contradictions(command: Command, settings: Settings, given: Given): string[] {
  const faults: string[] = [];
  const needsModel = (OPTIONS.model.commands as readonly Command[]).includes(command);
  if (needsModel && !existsSync(resolve(settings.model!, 'config.json'))) {
    faults.push(`${flagOf('model')}: no config.json in ${settings.model}; expected a checkpoint directory`);
  }
  switch (command) {
    case 'all':
      faults.push(...overlappingPorts(settings), ...wrongOrder(settings), ...wrongPages(settings));
      break;
    case 'router':
      for (const key of ['prefillWorker', 'decodeWorker'] as const) {
        if (!(key in given)) faults.push(`${flagOf(key)} is needed at least once`);
      }
      faults.push(...wrongOrder(settings));
      break;
    case 'prefill':
    case 'decode':
      faults.push(...wrongOrder(settings), ...wrongPages(settings));
      break;
    case 'inspect':
      faults.push(...wrongPages(settings));
      break;
    case 'logits':
      if (!('ids' in given)) faults.push(`${flagOf('ids')} is needed`);
      break;
    case 'generate':
      if ('ids' in given === 'chat' in given) {
        faults.push(`exactly one of ${flagOf('ids')} and ${flagOf('chat')} is needed`);
      }
      break;
    case 'import-encoding':
      if (!('model' in given)) faults.push(`${flagOf('model')} is needed`);
      else if (!existsSync(settings.source!)) faults.push(`${flagOf('source')}: no file ${settings.source}`);
      break;
    case 'doctor':
    case 'drain-watch':
      if (!/^https?:\/\/[^/]+/.test(settings.url))
        faults.push(`${flagOf('url')} must be http://HOST:PORT, got "${settings.url}"`);
      break;
    default:
      command satisfies never;
  }
  if (parseEffortMap(settings.effortMap) === null) {
    faults.push(`${flagOf('effortMap')} must be like ${OPTIONS.effortMap.default}, got "${settings.effortMap}"`);
  }
  if (typeof given.ids === 'string' && !existsSync(given.ids)) faults.push(`${flagOf('ids')}: no file ${given.ids}`);
  return faults;
}

/**
 * The chain of deadlines: a shorter clock must ring before the longer one that would hide it. Each inequality that
 * does not hold is named with both values.
 */
function wrongOrder(settings: Settings): string[] {
  const chain: { short: Key; times?: number; relation: '<' | '<='; long: Key }[] = [
    { short: 'heartbeat', times: HEARTBEAT_MISSES, relation: '<', long: 'lease' },
    { short: 'lease', relation: '<=', long: 'transferStallTimeout' },
    { short: 'transferStallTimeout', relation: '<', long: 'roomTimeout' },
    { short: 'roomTimeout', relation: '<', long: 'requestTimeout' },
    { short: 'transferStallTimeout', relation: '<', long: 'drainGrace' },
  ];
  return chain.flatMap(({ short, times = 1, relation, long }) => {
    const [shortMs, longMs] = [settings[short] as number, settings[long] as number];
    if (shortMs * times < longMs || (relation === '<=' && shortMs === longMs)) return [];
    const left = `${times === 1 ? '' : `${times} * `}${flagOf(short)} (${formatDuration(shortMs)})`;
    return [`${left} ${relation} ${flagOf(long)} (${formatDuration(longMs)}) does not hold`];
  });
}

function wrongPages(settings: Settings): string[] {
  const faults: string[] = [];
  const { pageTokens, prefillChunkTokens } = settings;
  if (pageTokens % PAGE_TOKENS_STEP !== 0) {
    faults.push(`--page-tokens must be a multiple of ${PAGE_TOKENS_STEP}, got ${pageTokens}`);
  } else if (prefillChunkTokens % pageTokens !== 0) {
    faults.push(`--prefill-chunk-tokens (${prefillChunkTokens}) must be a multiple of --page-tokens (${pageTokens})`);
  }
  return faults;
}

function overlappingPorts(settings: Settings): string[] {
  const ranges = [
    { flag: flagOf('port'), start: settings.port, count: 1 },
    { flag: flagOf('prefillPort'), start: settings.prefillPort, count: settings.prefill },
    { flag: flagOf('decodePort'), start: settings.decodePort, count: settings.decode },
  ].filter((range) => range.start !== 0);
  const faults: string[] = [];
  for (const [index, a] of ranges.entries()) {
    if (a.start + a.count - 1 > MAX_PORT) faults.push(`${a.flag} ${a.start} leaves no room for ${a.count} ports`);
    for (const b of ranges.slice(index + 1)) {
      if (a.start < b.start + b.count && b.start < a.start + a.count) {
        faults.push(
          `the ports of ${a.flag} (${a.start}, ${a.count} of them) and ${b.flag} (${b.start}, ${b.count} of them) overlap`,
        );
      }
    }
  }
  return faults;
}

function buildConfig(command: Command, settings: Settings, given: Given): Exclude<Config, HelpConfig> {
  const common = { logLevel: settings.logLevel as LogLevel, model: settings.model! };
  const listening = { host: settings.host, port: settings.port };
  const numerics = {
    mode: settings.mode as NumericMode,
    ...(settings.indexPrecision === null
      ? {}
      : { indexPrecision: settings.indexPrecision as ModelConfig['indexPrecision'] }),
  };
  const deadlines: Deadlines = {
    heartbeatMs: settings.heartbeat,
    leaseMs: settings.lease,
    stallMs: settings.transferStallTimeout,
    roomMs: settings.roomTimeout,
    requestMs: settings.requestTimeout,
    drainMs: settings.drainGrace,
  };
  const limits: SchedulerLimits = {
    maxRunningRequests: settings.maxRunningRequests,
    maxQueuedRequests: settings.maxQueuedRequests,
    pageTokens: settings.pageTokens,
    prefillChunkTokens: settings.prefillChunkTokens,
    contextLength: settings.contextLength,
    kvPages: settings.kvPages,
    kvMemoryBytes: settings.kvMemory * MIB,
    headroomTokens: settings.numReservedDecodeTokens,
    hostBytes: settings.retractionMemory * MIB,
    prefixCacheBytes: settings.prefixCacheMemory * MIB,
    prefixHostBytes: settings.prefixHostMemory * MIB,
    prefixStore: settings.prefixStore,
  };
  switch (command) {
    case 'all':
      return {
        command,
        ...common,
        ...listening,
        prefill: settings.prefill,
        decode: settings.decode,
        prefillPort: settings.prefillPort,
        decodePort: settings.decodePort,
        adapter: settings.adapter,
        servedName: settings.servedModelName?.[0] ?? modelName(common),
        needsKey: (settings.apiKey ?? []).length > 0,
        childEnvironment: childEnvironment(settings),
        drainMs: settings.drainGrace,
        childFlags: {
          router: childFlags('router', settings),
          prefill: childFlags('prefill', settings),
          decode: childFlags('decode', settings),
        },
      };
    case 'router':
      return {
        command,
        ...common,
        ...listening,
        prefillWorkers: settings.prefillWorker ?? [],
        decodeWorkers: settings.decodeWorker ?? [],
        allowSpecialTokens: settings.allowSpecialTokens,
        metricsColonAliases: settings.metricsColonAliases,
        effortMap: parseEffortMap(settings.effortMap)!,
        adminKey: settings.adminKey,
        api: {
          keys: settings.apiKey ?? [],
          keyMaxRequests: settings.keyMaxRequests,
          keyRequestsPerMinute: settings.keyRequestsPerMinute,
          modelNames: settings.servedModelName ?? [modelName(common)],
          thinkingByDefault: settings.defaultThinking === 'on',
          maxBodyBytes: settings.maxBody,
          maxChoices: settings.maxChoices,
          firstByteMs: settings.sseFirstByte,
          heartbeatMs: settings.sseHeartbeat,
        },
        limits,
        deadlines,
      };
    case 'prefill':
    case 'decode':
      return {
        command,
        ...common,
        numerics,
        ...listening,
        control: settings.control,
        transfer: settings.transfer,
        transferData: settings.transferData,
        advertise: settings.advertise,
        adminKey: settings.adminKey,
        adapter: settings.adapter,
        speculative: settings.speculative === 'on',
        limits,
        deadlines,
      };
    case 'logits':
      return {
        command,
        ...common,
        numerics,
        adapter: settings.adapter,
        ids: settings.ids!,
        positions: settings.positions,
        mtp: settings.mtp,
        chunk: settings.chunk,
      };
    case 'generate':
      return {
        command,
        ...common,
        numerics,
        adapter: settings.adapter,
        ids: given.ids === undefined ? null : settings.ids,
        chat: settings.chat,
        maxTokens: settings.maxTokens,
        temperature: settings.temperature,
        seed: settings.seed,
        ignoreEos: settings.ignoreEos,
        printIds: settings.printIds,
        speculative: settings.speculative === 'on',
      };
    case 'inspect':
      return {
        command,
        model: common.model,
        json: settings.json,
        memoryBytes: settings.memory,
        numerics,
        pageTokens: settings.pageTokens,
        prefillChunkTokens: settings.prefillChunkTokens,
        maxRunningRequests: settings.maxRunningRequests,
        contextLength: settings.contextLength,
      };
    case 'import-encoding':
      return { command, model: common.model, source: settings.source! };
    case 'doctor':
      return { command, url: settings.url.replace(/\/+$/, ''), adminKey: settings.adminKey };
    case 'drain-watch':
      return {
        command,
        url: settings.url.replace(/\/+$/, ''),
        intervalMs: settings.interval,
        durationMs: settings.duration,
      };
    default:
      return command satisfies never;
  }
}

/** Every row that `all` shares with a child, as flags. Values go inline: an adapter's name may start with "-". */
function childFlags(role: 'router' | WorkerRole, settings: Settings): string[] {
  const flags: string[] = [];
  for (const [key, row] of ROWS) {
    const value = settings[key];
    if (row.inherited === false || row.secret === true || value === null || value === false) continue;
    if (!row.commands.includes('all') || !row.commands.includes(role)) continue;
    if (row.kind === 'switch') flags.push(flagOf(key));
    else for (const each of [value].flat()) flags.push(`${flagOf(key)}=${textOf(row.kind, each)}`);
  }
  return flags;
}

/** What children must not show in their command lines, by variable. */
function childEnvironment(settings: Settings): Record<string, string> {
  const environment: Record<string, string> = {};
  for (const [key, row] of ROWS) {
    const value = settings[key];
    if (row.secret === true && value !== null) environment[environmentNameOf(key)!] = [value].flat().join(',');
  }
  return environment;
}

/** A value as a flag takes it. */
function textOf(kind: Row['kind'], value: string | number | boolean): string {
  if (kind === 'duration') return formatDuration(value as number);
  // Sizes need a unit; the smallest has three zeros too many, so parts of it are written out.
  return kind === 'size' ? `${(value as number) / 2 ** 10}KiB` : String(value);
}

/** The candidate within two edits of `word` (three for long words), nearest first; null when none is near. */
function nearest(word: string, candidates: readonly string[]): string | null {
  let best: string | null = null;
  let bestDistance = word.length > 10 ? 4 : 3;
  for (const candidate of candidates) {
    const distance = editDistance(word, candidate);
    if (distance < bestDistance) {
      best = candidate;
      bestDistance = distance;
    }
  }
  return best;
}

/** Levenshtein distance, one row at a time. */
function editDistance(a: string, b: string): number {
  let above = Array.from({ length: b.length + 1 }, (_, index) => index);
  for (let i = 1; i <= a.length; i++) {
    const row = [i];
    for (let j = 1; j <= b.length; j++) {
      const swap = above[j - 1]! + (a[i - 1] === b[j - 1] ? 0 : 1);
      row.push(Math.min(swap, above[j]! + 1, row[j - 1]! + 1));
    }
    above = row;
  }
  return above[b.length]!;
}

function deepFreeze<T extends object>(value: T): T {
  for (const part of Object.values(value)) {
    if (typeof part === 'object' && part !== null) deepFreeze(part as object);
  }
  return Object.freeze(value);
}
