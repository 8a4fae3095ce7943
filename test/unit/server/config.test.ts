import assert from 'node:assert/strict';
import { existsSync } from 'node:fs';
import { join, resolve } from 'node:path';
import { test } from 'node:test';
import { fileURLToPath } from 'node:url';
import {
  ConfigError,
  OPTIONS,
  choosePageCount,
  embeddedModelDir,
  environmentNameOf,
  flagOf,
  parseSize,
  resolveConfig,
} from '../../../server/config.ts';
import type {
  AllConfig,
  Config,
  GenerateConfig,
  InspectConfig,
  LogitsConfig,
  RouterConfig,
  WorkerConfig,
} from '../../../server/config.ts';

const idsFile = fileURLToPath(import.meta.url); // any file that exists
const workers = ['--prefill-worker', 'tcp://10.0.0.1:9000', '--decode-worker', 'tcp://d:9001'];

function faultsOf(argv: string[], env: Record<string, string> = {}): readonly string[] {
  try {
    resolveConfig(argv, env);
  } catch (error) {
    assert.ok(error instanceof ConfigError, String(error));
    return error.faults;
  }
  return [];
}

test('without flags each role has its documented defaults', () => {
  const all = resolveConfig(['all'], {}) as AllConfig;
  assert.deepEqual([all.host, all.port, all.prefill, all.decode], ['127.0.0.1', 8000, 1, 1]);
  assert.deepEqual([all.prefillPort, all.decodePort, all.adapter], [8100, 8200, null]);
  const decode = resolveConfig(['decode'], {}) as WorkerConfig;
  assert.deepEqual([decode.port, decode.control, decode.transfer], [8200, 'tcp://127.0.0.1:0', 'tcp://127.0.0.1:0']);
  assert.deepEqual(decode.limits, {
    maxRunningRequests: 64,
    maxQueuedRequests: 64,
    pageTokens: 128,
    prefillChunkTokens: 256,
    contextLength: null,
    kvPages: null,
    kvMemoryBytes: 2 ** 30,
    headroomTokens: 128,
    hostBytes: 2 ** 30,
    prefixCacheBytes: 2 ** 28,
    prefixHostBytes: 0,
    prefixStore: null,
  });
  assert.deepEqual(decode.deadlines, {
    heartbeatMs: 1000,
    leaseMs: 10_000,
    stallMs: 15_000,
    roomMs: 60_000,
    requestMs: 600_000,
    drainMs: 30_000,
  });
  assert.equal((resolveConfig(['prefill'], {}) as WorkerConfig).port, 8100);
  assert.equal((resolveConfig(['router', ...workers], {}) as RouterConfig).port, 8000);
});

test('the default model is the embedded one, a given one becomes absolute', () => {
  const config = resolveConfig(['all'], {}) as AllConfig;
  assert.equal(config.model, embeddedModelDir());
  assert.ok(existsSync(join(config.model, 'config.json')), `${config.model} has no config.json`);
  assert.equal((resolveConfig(['all', '--model', 'model/nano'], {}) as AllConfig).model, resolve('model/nano'));
});

test('a flag wins over the environment, the environment over the default, and the last of two flags', () => {
  const env = { HANDOFF_PORT: '9001', HANDOFF_LEASE: '8s' };
  const { port, deadlines } = resolveConfig(['decode', '--port=9002'], env) as WorkerConfig;
  assert.deepEqual([port, deadlines.leaseMs, deadlines.stallMs], [9002, 8000, 15_000]);
  assert.equal((resolveConfig(['decode', '--port', '1', '--port', '2'], {}) as WorkerConfig).port, 2);
});

test('worker addresses repeat as flags and are separated by commas in the environment', () => {
  const flags = resolveConfig(['router', ...workers, '--decode-worker=tcp://[::1]:9002'], {}) as RouterConfig;
  assert.deepEqual(flags.prefillWorkers, ['tcp://10.0.0.1:9000']);
  assert.deepEqual(flags.decodeWorkers, ['tcp://d:9001', 'tcp://[::1]:9002']);
  const env = { HANDOFF_PREFILL_WORKER: 'tcp://a:1, tcp://b:2', HANDOFF_DECODE_WORKER: 'tcp://c:3' };
  const fromEnv = resolveConfig(['router'], env) as RouterConfig;
  assert.deepEqual(fromEnv.prefillWorkers, ['tcp://a:1', 'tcp://b:2']);
});

test('the tools take token ids or a chat, and no environment', () => {
  const logits = resolveConfig(['logits', '--ids', idsFile, '--positions', '0,5,299', '--mtp', '--chunk', '64'], {
    HANDOFF_CHUNK: 'nonsense',
  }) as LogitsConfig;
  assert.deepEqual([logits.ids, logits.positions, logits.mtp, logits.chunk], [idsFile, [0, 5, 299], true, 64]);
  const generate = resolveConfig(
    [
      'generate',
      '--chat',
      '--odd text',
      '--max-tokens=5',
      '--temperature=0.7',
      '--seed=3',
      '--ignore-eos',
      '--print-ids',
    ],
    {},
  ) as GenerateConfig;
  assert.deepEqual(
    { ...generate, model: '', logLevel: '' },
    {
      command: 'generate',
      model: '',
      logLevel: '',
      numerics: { mode: 'hp' },
      adapter: null,
      ids: null,
      chat: '--odd text',
      maxTokens: 5,
      temperature: 0.7,
      seed: 3,
      ignoreEos: true,
      printIds: true,
      speculative: false,
    },
  );
});

test('all faults are listed at once', () => {
  assert.deepEqual(
    faultsOf(
      [
        'all',
        '--prot',
        '80',
        '--prefill',
        '0',
        '--bogus-flag',
        'extra',
        '--decode',
        '1',
        'more',
        '--host',
        '--port',
        '1',
      ],
      { HANDOFF_LOG_LEVEL: 'loud', HANDOFF_LEASE: '1e4s' },
    ),
    [
      'HANDOFF_LEASE must be a time such as 500ms, 10s or 2m, from 10ms to 2147483647ms, got "1e4s"',
      'HANDOFF_LOG_LEVEL must be one of fatal, error, warn, info, debug, trace, silent, got "loud"',
      'unknown option --prot; did you mean --port?',
      'unknown option --bogus-flag',
      'unexpected argument "more"',
      '--host needs a value, HOST',
      '--prefill must be a whole number from 1 to 32, got "0"',
    ],
  );
});

const refusals: [string, string[], RegExp][] = [
  ['an unknown command', ['al'], /unknown command "al"; did you mean "all"\?/],
  ['a short option', ['all', '-p', '80'], /unknown option -p/],
  [
    'a flag of another command',
    ['decode', '--prefill', '2'],
    /--prefill is an option of handoff all, not of handoff decode/,
  ],
  ['a switch with a value', ['logits', '--ids', idsFile, '--mtp=no'], /--mtp takes no value, got "no"/],
  ['a port out of range', ['all', '--port', '65536'], /from 0 to 65535/],
  ['a negative number', ['all', '--port=-1'], /from 0 to 65535, got "-1"/],
  ['a missing last value', ['all', '--port'], /--port needs a value, PORT/],
  ['an address without a port', ['decode', '--control', 'tcp://127.0.0.1'], /--control must be tcp:\/\/HOST:PORT/],
  ['another transport', ['decode', '--control', 'ipc:///x'], /--control must be tcp:\/\/HOST:PORT/],
  [
    'any port to connect to',
    ['router', ...workers, '--decode-worker=tcp://h:0'],
    /with a port from 1 to 65535, got "tcp:\/\/h:0"/,
  ],
  ['a router without workers', ['router', '--decode-worker=tcp://h:1'], /--prefill-worker is needed at least once/],
  ['a directory without a model', ['all', '--model', 'scripts'], /--model: no config.json in .*scripts/],
  [
    'heartbeats too rare for the lease',
    ['all', '--heartbeat=4s'],
    /^3 \* --heartbeat \(4s\) < --lease \(10s\) does not hold$/,
  ],
  [
    'a lease above the stall clock',
    ['all', '--lease=16s'],
    /^--lease \(16s\) <= --transfer-stall-timeout \(15s\) does/,
  ],
  [
    'a stall clock above the room clock',
    ['all', '--room-timeout=15s'],
    /^--transfer-stall-timeout \(15s\) < --room-timeout \(15s\) does/,
  ],
  [
    'a room clock above the request clock',
    ['all', '--request-timeout=1m'],
    /^--room-timeout \(1m\) < --request-timeout \(1m\) does/,
  ],
  [
    'a drain shorter than a stall',
    ['all', '--drain-grace=15s'],
    /^--transfer-stall-timeout \(15s\) < --drain-grace \(15s\)/,
  ],
  [
    'a time without a unit',
    ['all', '--lease=10'],
    /^--lease must be given with a unit: write 10ms, 10s or 10m, got "10"$/,
  ],
  ['a time in a unit that does not exist', ['all', '--lease=10min'], /--lease must be a time such as 500ms, 10s or 2m/],
  ['a time that no timer can hold', ['all', '--request-timeout=600h'], /from 10ms to 2147483647ms, got "600h"/],
  ['a mode that does not exist', ['prefill', '--mode', 'Q'], /--mode must be one of hp, q, q-inputs, got "Q"/],
  ['a precision that does not exist', ['decode', '--index-precision=int8'], /one of f32, bf16, fp8, fp4, got "int8"/],
  ['pages that split a compressed entry', ['prefill', '--page-tokens=192'], /--page-tokens must be a multiple of 128/],
  [
    'chunks that split a page',
    ['prefill', '--prefill-chunk-tokens=320'],
    /must be a multiple of --page-tokens \(128\)/,
  ],
  [
    'ports that overlap',
    ['all', '--prefill=2', '--decode-port=8101'],
    /--prefill-port \(8100, 2 of them\) and --decode-port \(8101, 1/,
  ],
  [
    'ports past the last one',
    ['all', '--prefill=2', '--prefill-port=65535'],
    /--prefill-port 65535 leaves no room for 2/,
  ],
  ['logits without ids', ['logits'], /--ids is needed/],
  ['ids that are not there', ['logits', '--ids', 'none.json'], /--ids: no file .*none\.json/],
  ['both ids and chat', ['generate', '--ids', idsFile, '--chat', 'x'], /exactly one of --ids and --chat is needed/],
  ['neither ids nor chat', ['generate'], /exactly one of --ids and --chat is needed/],
  [
    'positions that are no numbers',
    ['logits', '--ids', idsFile, '--positions', '1,x'],
    /whole numbers separated by commas/,
  ],
];
for (const [what, argv, expected] of refusals) {
  test(`${what} is refused with one sentence`, () => {
    const faults = faultsOf(argv);
    assert.equal(faults.length, 1, faults.join('\n'));
    assert.match(faults[0]!, expected);
  });
}

test('all passes on what it shares with a role, and nothing else', () => {
  const { childFlags } = resolveConfig(
    [
      'all',
      '--port=1',
      '--context-length=2048',
      '--adapter',
      'lavapipe',
      '--request-timeout=700s',
      '--allow-special-tokens',
    ],
    {},
  ) as AllConfig;
  for (const role of ['router', 'prefill', 'decode'] as const) {
    const flags = childFlags[role];
    assert.ok(flags.includes('--context-length=2048') && flags.includes('--request-timeout=700s'), role);
    assert.equal(flags.includes('--adapter=lavapipe'), role !== 'router');
    assert.equal(flags.includes('--allow-special-tokens'), role === 'router');
    assert.ok(
      !flags.some((flag) => /^--(host|port|prefill|decode)/.test(flag) && !flag.startsWith('--prefill-chunk')),
      role,
    );
    // A child accepts them: otherwise `all` could never start one.
    const own = role === 'router' ? workers : [];
    assert.equal((resolveConfig([role, ...own, ...flags], {}) as Config).command, role);
  }
});

test('all hands keys and passwords on as variables, which a process does not show as it does its arguments', () => {
  const { childFlags, childEnvironment } = resolveConfig(
    [
      'all',
      '--api-key=open',
      '--api-key=sesame',
      '--admin-key=sesame',
      '--prefix-store=redis://:sesame@127.0.0.1:6379',
    ],
    {},
  ) as AllConfig;
  assert.doesNotMatch(JSON.stringify(childFlags), /sesame/);
  const router = resolveConfig(['router', ...workers], childEnvironment) as RouterConfig;
  assert.deepEqual([router.api.keys, router.adminKey], [['open', 'sesame'], 'sesame']);
  const prefill = resolveConfig(['prefill'], childEnvironment) as WorkerConfig;
  assert.deepEqual([prefill.adminKey, prefill.limits.prefixStore], ['sesame', 'redis://:sesame@127.0.0.1:6379']);
});

test('inspect takes a directory, and plans with the sizes of a worker', () => {
  const config = resolveConfig(['inspect', 'model/nano', '--memory', '24GiB', '--json'], {
    HANDOFF_PAGE_TOKENS: '256',
  }) as InspectConfig;
  assert.deepEqual(config, {
    command: 'inspect',
    model: resolve('model/nano'),
    json: true,
    memoryBytes: 24 * 2 ** 30,
    numerics: { mode: 'hp' },
    pageTokens: 256,
    prefillChunkTokens: 256,
    maxRunningRequests: 64,
    contextLength: null,
  });
  assert.equal((resolveConfig(['inspect', '--model', 'model/nano'], {}) as InspectConfig).model, resolve('model/nano'));
  assert.deepEqual(faultsOf(['inspect', 'model/nano', 'more']), ['unexpected argument "more"']);
  assert.match(
    faultsOf(['inspect', 'test']).join(),
    /--model: no config\.json in .*test; expected a checkpoint directory/,
  );
  assert.match(faultsOf(['inspect', '--memory', '24']).join(), /--memory must be a size with its unit, such as 24GiB/);
  assert.match(faultsOf(['inspect', '--memory', '0GiB']).join(), /--memory must be a size/);
});

test('a size has a unit of powers of two or of ten', () => {
  const sizes = { '24GiB': 24 * 2 ** 30, '1.5 TiB': 1.5 * 2 ** 40, '80GB': 8e10, '512mib': 2 ** 29, '0.3kB': 300 };
  for (const [text, bytes] of Object.entries(sizes)) assert.equal(parseSize(text), bytes, text);
  for (const text of ['24', '24G', 'GiB', '-1GiB', '1e3GB', '24GiBs', '']) assert.equal(parseSize(text), null, text);
});

test('help of a command shows exactly its flags', () => {
  for (const command of ['all', 'router', 'prefill', 'decode', 'logits', 'generate', 'inspect'] as const) {
    const help = resolveConfig([command, '--nonsense', '--help'], {});
    assert.ok(help.command === 'help', `${command} --help is ${help.command}`);
    const shown = [...help.text.matchAll(/^ {2}(--[a-z-]+)/gm)].map((match) => match[1]);
    const expected = Object.entries(OPTIONS).filter(([, row]) => (row.commands as readonly string[]).includes(command));
    assert.deepEqual(
      shown,
      expected.map(([key]) => flagOf(key as keyof typeof OPTIONS)),
    );
  }
});

test('without a command, and with --version, there is something to print', () => {
  for (const argv of [[], ['--help'], ['help']]) {
    const config = resolveConfig(argv, {});
    assert.ok(config.command === 'help', `${argv.join(' ')} is ${config.command}`);
    assert.match(config.text, /handoff COMMAND/);
  }
  const version = resolveConfig(['--version'], {});
  assert.match(version.command === 'help' ? version.text : '', /^handoff \d+\.\d+\.\d+\n$/);
});

test('names are respelled from the key', () => {
  assert.equal(flagOf('prefillChunkTokens'), '--prefill-chunk-tokens');
  assert.equal(environmentNameOf('prefillChunkTokens'), 'HANDOFF_PREFILL_CHUNK_TOKENS');
  assert.equal(environmentNameOf('chat'), null);
});

test('a config is frozen at every depth', () => {
  const config = resolveConfig(['decode'], {}) as WorkerConfig;
  assert.deepEqual(
    [config, config.limits, config.deadlines].map((part) => Object.isFrozen(part)),
    [true, true, true],
  );
});

test('the page pool holds all running requests, within the memory it may take', () => {
  const limits = { kvPages: null, kvMemoryBytes: 2 ** 30, pageTokens: 128, maxRunningRequests: 64 };
  const sizes = { contextTokens: 4096, pageBytes: 65_536 };
  assert.equal(choosePageCount(limits, sizes), 64 * 32);
  assert.equal(choosePageCount(limits, { ...sizes, contextTokens: 4097 }), 64 * 33);
  assert.equal(choosePageCount({ ...limits, kvMemoryBytes: 2 ** 26 }, sizes), 1024);
  assert.equal(choosePageCount({ ...limits, maxRunningRequests: 1024 }, { ...sizes, pageBytes: 1024 }), 32_768);
  assert.equal(choosePageCount({ ...limits, kvPages: 40 }, sizes), 40);
  assert.throws(
    () => choosePageCount({ ...limits, kvPages: 31 }, sizes),
    /31 KV pages of 65536 bytes are too few: one sequence of 4096 tokens needs 32; raise --kv-memory or --kv-pages/,
  );
});

test('efforts are mapped as the flag says', () => {
  const workers = ['--prefill-worker', 'tcp://p:1', '--decode-worker', 'tcp://d:1'];
  const mapOf = (...argv: string[]) => (resolveConfig(['router', ...workers, ...argv], {}) as RouterConfig).effortMap;
  assert.deepEqual(mapOf(), { minimal: 'low', low: 'high', medium: 'high', xhigh: 'max' });
  assert.deepEqual(mapOf('--effort-map', 'low=low, medium=max'), { low: 'low', medium: 'max' });
  for (const odd of ['low', 'low=', 'low=high;medium=max', 'low=high,']) {
    assert.throws(() => mapOf('--effort-map', odd), /--effort-map must be like minimal=low,.*got "low/);
  }
});
