/** `handoff logits`, `generate` and `inspect` as a person runs them: processes, files, exit codes. */
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, describe, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import type { Tensor } from '../../kernels/tensor.ts';
import { parseModelConfig } from '../../model/config.ts';
import { openEngine } from '../../server/engine.ts';
import { inspectCheckpoint, type Inspection } from '../../server/inspect.ts';
import { generateCheckpoint, writeCheckpoint } from '../support/checkpoints.ts';
import { assertGolden, readGolden, type Golden } from '../support/golden.ts';

const repository = fileURLToPath(new URL('../..', import.meta.url));
const nano = join(repository, 'model/nano');
const root = mkdtempSync(join(tmpdir(), 'handoff-tools-'));
after(() => rmSync(root, { recursive: true }));

interface Result {
  readonly code: number | null;
  readonly stdout: string;
  readonly stderr: string;
}

function handoff(...args: string[]): Promise<Result> {
  const adapter = process.env['HANDOFF_ADAPTER'];
  return handoffOn(adapter, process.env, args);
}

function handoffOn(adapter: string | undefined, env: NodeJS.ProcessEnv, args: readonly string[]): Promise<Result> {
  return run([...args, ...(adapter ? ['--adapter', adapter] : [])], env);
}

function run(args: readonly string[], env: NodeJS.ProcessEnv): Promise<Result> {
  const child = spawn(process.execPath, ['--import', 'tsx', 'server/main.ts', ...args], {
    cwd: repository,
    env,
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  let stdout = '';
  let stderr = '';
  child.stdout.setEncoding('utf8').on('data', (text: string) => (stdout += text));
  child.stderr.setEncoding('utf8').on('data', (text: string) => (stderr += text));
  return new Promise((resolve, reject) => {
    child.on('error', reject);
    child.on('close', (code) => resolve({ code, stdout, stderr }));
  });
}

function file(name: string, content: unknown): string {
  const path = join(root, name);
  writeFileSync(path, JSON.stringify(content));
  return path;
}

describe('handoff logits', () => {
  interface Line {
    position: number;
    argmax: number;
    logits: number[];
  }
  const golden = readGolden<Golden & { config: object; mtp_logits_first8: Record<string, number[]> }>(
    new URL('../data/golden/tiny-golden.json', import.meta.url),
  );
  const json = { ...golden.config, max_position_embeddings: 1024 };
  const formats = { plain: 'F32', linears: 'plain', experts: 'plain' } as const;
  const { entries } = generateCheckpoint(parseModelConfig(json), formats, { mtp: true });
  const model = join(root, 'tiny');
  writeCheckpoint(model, json, entries);
  const ids = golden.ids.slice(0, golden.argmax.length);
  const linesOf = ({ code, stdout, stderr }: Result): Line[] => {
    assert.equal(code, 0, stderr);
    return stdout
      .trimEnd()
      .split('\n')
      .map((line) => JSON.parse(line) as Line);
  };

  test('prints a line for every position, with the logits of the reference', async () => {
    const lines = linesOf(await handoff('logits', '--model', model, '--ids', file('ids.json', ids)));
    assert.deepEqual(
      lines.map(({ position }) => position),
      ids.map((_, position) => position),
    );
    const undecided = [40]; // its margin is 2.7e-4
    assertGolden(
      lines.map(({ logits }) => logits),
      golden,
      { tolerance: 2e-5, undecided },
    );
    for (const { position, argmax } of lines) {
      if (!undecided.includes(position)) assert.equal(argmax, golden.argmax[position], `position ${position}`);
    }
  });

  test('SwiftShader, a device with other limits and subgroups, gives the logits of the reference too', async (t) => {
    // The decision made for this test run names another adapter; this one is decided afresh.
    const { HANDOFF_ADAPTER: _name, HANDOFF_ADAPTER_DECISION: _decision, ...env } = process.env;
    const path = file('ids.json', ids);
    const lines = linesOf(await handoffOn('swiftshader', env, ['logits', '--model', model, '--ids', path]));
    const worst = assertGolden(
      lines.map(({ logits }) => logits),
      golden,
      { undecided: [40] },
    );
    t.diagnostic(`largest difference ${worst}`);
  });

  test('prints the positions asked for, ascending, the same in chunks', async () => {
    const path = file('object.json', { note: 'an object will do', ids });
    const whole = await handoff('logits', '--model', model, '--ids', path, '--positions', '127,0,15');
    assert.deepEqual(
      linesOf(whole).map(({ position }) => position),
      [0, 15, 127],
    );
    const chunked = await handoff(
      'logits',
      '--model',
      model,
      '--ids',
      path,
      '--positions',
      '127,0,15',
      '--chunk',
      '37',
    );
    assert.equal(chunked.stdout, whole.stdout);
  });

  test('prints the rows of the draft block with --mtp', async () => {
    const result = await handoff(
      'logits',
      '--model',
      model,
      '--ids',
      file('all.json', golden.ids),
      '--mtp',
      '--chunk',
      '64',
    );
    const lines = linesOf(result);
    assert.equal(lines.length, golden.ids.length - 1);
    for (const [position, expected] of Object.entries(golden.mtp_logits_first8)) {
      const { logits } = lines[Number(position)]!;
      for (const [token, value] of expected.entries())
        assert.ok(
          Math.abs(logits[token]! - value) < 2e-5,
          `logit ${logits[token]} for ${value}, token ${token} at ${position}`,
        );
    }
  });

  test('says what is wrong with ids, positions and checkpoints, without a stack trace', async () => {
    const incomplete = join(root, 'incomplete');
    writeCheckpoint(
      incomplete,
      json,
      entries.filter(({ name }) => name !== 'layers.2.attn.wkv.weight'),
    );
    const good = file('good.json', [1, 2, 3]);
    const cases: [args: string[], code: number, message: RegExp][] = [
      [
        ['--model', model, '--ids', file('large.json', [1, 256])],
        2,
        /entry 1 is 256, expected a whole number below 256/,
      ],
      [['--model', model, '--ids', file('none.json', { tokens: [1] })], 2, /expected an array of token ids/],
      [['--model', model, '--ids', good, '--positions', '3'], 2, /--positions: 3 is not below 3/],
      [
        ['--model', model, '--ids', good, '--positions', '2', '--mtp'],
        2,
        /the draft of a position needs the id after it/,
      ],
      [['--model', incomplete, '--ids', good], 1, /layers\.2\.attn\.wkv\.weight \[32,64\] is missing/],
    ];
    for (const [args, code, message] of cases) {
      const result = await handoff('logits', ...args);
      assert.match(result.stderr, message);
      assert.equal(result.code, code, result.stderr);
      assert.equal(result.stdout, '');
      assert.doesNotMatch(result.stderr, /\n {4}at /);
    }
  });
});

describe('handoff generate', () => {
  test('answers a chat message', async () => {
    const result = await handoff(
      'generate',
      '--model',
      nano,
      '--chat',
      'What is the capital of France?',
      '--max-tokens',
      '20',
    );
    assert.equal(result.code, 0, result.stderr);
    assert.equal(result.stdout, 'Paris.\n');
  });

  test('prints the ids of a sample answer, and goes past its end when told to', async () => {
    const lines = readFileSync(join(repository, 'test/data/nano-samples.jsonl'), 'utf8').trim().split('\n');
    const { prompt_ids: prompt, output_ids: output } = JSON.parse(lines[0]!) as {
      prompt_ids: number[];
      output_ids: number[];
    };
    const args = ['--model', nano, '--ids', file('prompt.json', prompt), '--print-ids', '--max-tokens'];
    const answer = await handoff('generate', ...args, '100');
    assert.deepEqual(JSON.parse(answer.stdout), output);
    const longer = await handoff('generate', ...args, String(output.length + 5), '--ignore-eos');
    const ids = JSON.parse(longer.stdout) as number[];
    assert.equal(ids.length, output.length + 5);
    assert.deepEqual(ids.slice(0, output.length), output);
    const warm = ['--temperature', '2', '--seed', '7', '--ignore-eos'];
    const first = await handoff('generate', ...args, '12', ...warm);
    assert.equal((await handoff('generate', ...args, '12', ...warm)).stdout, first.stdout, 'a seed fixes the answer');
    for (const [plain, more] of [
      [longer, [String(output.length + 5), '--ignore-eos']],
      [first, ['12', ...warm]],
    ] as const) {
      const drafted = await handoff('generate', ...args, ...more, '--speculative', 'on');
      assert.equal(drafted.stdout, plain.stdout, drafted.stderr);
    }
  });

  test('refuses to draft with a checkpoint that has no draft block', async () => {
    const directory = join(root, 'without-drafts');
    mkdirSync(directory);
    const config = JSON.parse(readFileSync(join(nano, 'config.json'), 'utf8')) as object;
    writeFileSync(join(directory, 'config.json'), JSON.stringify({ ...config, num_nextn_predict_layers: 0 }));
    const args = ['--model', directory, '--ids', file('short.json', [0, 1]), '--print-ids', '--speculative', 'on'];
    const result = await handoff('generate', ...args);
    assert.equal(result.code, 1);
    assert.match(result.stderr, /num_nextn_predict_layers: is 0: .* no draft block for --speculative on/);
  });

  test('refuses an answer longer than the model is', async () => {
    const result = await handoff('generate', '--model', nano, '--chat', 'Hi', '--max-tokens', '5000');
    assert.equal(result.code, 2, result.stderr);
    assert.match(result.stderr, /exceed the model's 4096 positions/);
  });
});

describe('handoff inspect', () => {
  const inspect = (...args: string[]): Promise<Result> => run(['inspect', ...args], process.env);

  test('prints what a directory holds, in words or as one JSON object', async () => {
    const words = await inspect('model/nano', '--memory', '24GiB');
    assert.equal(words.code, 0, words.stderr);
    assert.match(words.stdout, /^.*model\/nano\n/);
    assert.match(words.stdout, /routed experts +MXFP4/);
    assert.match(words.stdout, /of 4096 tokens +\d+ sequences/);
    const json = await inspect('model/nano', '--memory', '24GiB', '--json');
    assert.equal(json.code, 0, json.stderr);
    const { kv, capacity } = JSON.parse(json.stdout) as Inspection;
    assert.equal(kv.pageTokens, 128);
    assert.equal(capacity!.memoryBytes, 24 * 2 ** 30);
  });

  test('names what is wrong with a checkpoint, without a stack trace', async () => {
    const result = await inspect(nano, '--page-tokens', '256', '--prefill-chunk-tokens', '300');
    assert.equal(result.code, 2);
    const damaged = join(root, 'damaged');
    const config = JSON.parse(readFileSync(join(nano, 'config.json'), 'utf8')) as object;
    const header = '{"norm.weight":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}';
    mkdirSync(damaged);
    writeFileSync(join(damaged, 'config.json'), JSON.stringify(config));
    writeFileSync(join(damaged, 'model.safetensors'), `${String.fromCharCode(header.length)}\0\0\0\0\0\0\0${header}`);
    const refused = await inspect(damaged);
    assert.equal(refused.code, 1);
    assert.equal(
      refused.stderr,
      'handoff: model.safetensors: tensor norm.weight: F32 [2] needs 8 bytes, data_offsets span 4\n',
    );
    assert.equal(refused.stdout, '');
  });

  test('knows what a worker allocates, to the byte', async () => {
    const adapterName = process.env['HANDOFF_ADAPTER'];
    const engine = await openEngine({
      modelDir: nano,
      ...(adapterName ? { adapterName } : {}),
      maxRows: 256,
      maxSequences: 8,
      choices: { contextTokens: 1024 },
      choosePageCount: () => 9,
      slotCount: 8,
    });
    // Kernels also keep their constants, some bytes each, which depend on the steps that have run.
    const constants = [...engine.device.uniforms.values()] as Tensor[];
    const constantBytes = constants.reduce((sum, { byteLength }) => sum + byteLength, 0);
    const allocatedBytes = engine.device.allocatedBytes - constantBytes;
    engine.close();
    const { adapter, kv } = await inspectCheckpoint({
      command: 'inspect',
      model: nano,
      json: false,
      memoryBytes: null,
      numerics: { mode: 'hp', indexPrecision: 'f32' },
      pageTokens: 128,
      prefillChunkTokens: 256,
      maxRunningRequests: 8,
      contextLength: 1024,
    });
    const poolBytes = 9 * kv.pageBytes + 8 * kv.slotBytes;
    assert.equal(allocatedBytes, adapter.weightBytes + adapter.workspaceBytes.prefill + poolBytes);
  });
});
