/**
 * `handoff inspect` without a process: what it says of the embedded model and of the golden checkpoints, counted from
 * their headers in plain loops, and of DeepSeek-V4-Flash, whose totals are those of the model description.
 */
import assert from 'node:assert/strict';
import { existsSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, describe, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { inspect as inspectValue } from 'node:util';
import { parseModelConfig } from '../../../model/config.ts';
import { openCheckpoint } from '../../../model/safetensors.ts';
import { resolveConfig, type InspectConfig } from '../../../server/config.ts';
import { describeInspection, inspectCheckpoint, type Inspection } from '../../../server/inspect.ts';
import { FLASH_CONFIG, FLASH_SHARDS, releaseHeaders, writeHeaders, type Release } from '../../support/headers.ts';

const root = mkdtempSync(join(tmpdir(), 'handoff-inspect-'));
after(() => rmSync(root, { recursive: true }));

const GIB = 2 ** 30;
const KIB = 2 ** 10;

function inspect(...argv: string[]): Promise<Inspection> {
  return inspectCheckpoint(resolveConfig(['inspect', ...argv], {}) as InspectConfig);
}

const formatOf = (inspection: Inspection, part: string): string[] =>
  inspection.formats.filter((row) => row.part === part).map(({ format }) => format);
const bytesOf = (inspection: Inspection, matches: (part: string) => boolean): number =>
  inspection.formats.filter(({ part }) => matches(part)).reduce((sum, { storedBytes }) => sum + storedBytes, 0);

/** Rounded as the model description prints it. */
function assertAbout(actual: number, unit: number, expected: string): void {
  const digits = expected.split('.')[1]?.length ?? 0;
  assert.equal((actual / unit).toFixed(digits), expected);
}

describe('DeepSeek-V4-Flash as headers without weights', () => {
  const config = parseModelConfig(FLASH_CONFIG);
  const flash = (release: Release): string => {
    const directory = join(root, `flash-${release}`);
    const entries = releaseHeaders(config, release);
    writeHeaders(directory, FLASH_CONFIG, entries, { shards: FLASH_SHARDS, data: 'none' });
    return directory;
  };
  const directory = flash('mxfp4');
  const official = inspect(directory, '--memory', '192GiB', '--context-length', '131072');

  test('has the parameters, bytes and KV bytes of the model description, official release', async () => {
    const inspection = await official;
    const { files, parameters, draft, adapter, kv } = inspection;
    assert.equal(files.count, 46);
    // Sections 0 (summary) and 2.1, and appendix C.
    assertAbout(files.bytes + files.missingBytes, 1e9, '159.6');
    assertAbout(parameters.total, 1e9, '284.3');
    assertAbout(parameters.active, 1e9, '13.3');
    assertAbout(draft!.parameters, 1e9, '6.6');
    assertAbout(
      bytesOf(inspection, (part) => part === 'routed experts'),
      GIB,
      '137.1',
    );
    assertAbout(
      bytesOf(inspection, (part) => part !== 'routed experts' && part !== 'draft block'),
      1e9,
      '8.8',
    );
    assertAbout(
      bytesOf(inspection, (part) => part === 'draft block'),
      1e9,
      '3.6',
    );
    // Section 6.3: in f32.
    assert.equal(kv.bytesPerToken, 13760);
    // Windows 43 x 128 x 512; two rows of 2 x 1024 and 2 x 256 for each of 8 ring rows in 21 layers; 128 rows of 2 x 512 in 20.
    assert.equal(kv.slotBytes, 4 * (43 * 128 * 512 + 21 * 8 * 2 * (1024 + 256) + 20 * 128 * 2 * 512));
    assert.deepEqual(formatOf(inspection, 'routed experts'), ['MXFP4']);
    assert.deepEqual(formatOf(inspection, 'draft block'), ['MXFP4', 'FP8 (ue8m0 scales)', 'f32', 'bf16']);
    // All weights but scales of FP8 and vectors, which are widened, stay as they are.
    assertAbout(adapter.weightBytes, GIB, '145.3');
  });

  test('is told apart in its other formats', async () => {
    const nvfp4 = await inspect(flash('nvfp4'));
    assertAbout(
      bytesOf(nvfp4, (part) => part === 'routed experts'),
      GIB,
      '145.1',
    );
    assertAbout(nvfp4.files.bytes + nvfp4.files.missingBytes, 1e9, '168');
    assert.deepEqual(formatOf(nvfp4, 'routed experts'), ['NVFP4']);
    assert.equal(formatOf(nvfp4, 'draft block')[0], 'MXFP4', 'the release leaves the draft block as it was');
    // The base release has FP8 experts; four layers will do.
    const short = { ...FLASH_CONFIG, num_hidden_layers: 4 };
    const base = join(root, 'base');
    writeHeaders(base, short, releaseHeaders(parseModelConfig(short), 'fp8-f32-scales'), { shards: 2, data: 'none' });
    const inspection = await inspect(base);
    assert.deepEqual(formatOf(inspection, 'routed experts'), ['FP8 (f32 scales)']);
    assert.equal(formatOf(inspection, 'attention')[0], 'FP8 (ue8m0 scales)');
  });

  test('at its full size, in sparse files, is a checkpoint that may be opened for loading', async () => {
    const whole = join(root, 'flash-sparse');
    writeHeaders(whole, FLASH_CONFIG, releaseHeaders(config, 'mxfp4'), { shards: FLASH_SHARDS, data: 'sparse' });
    const source = await openCheckpoint(whole);
    await source.close();
    assertAbout(
      source.files.reduce((sum, { byteLength }) => sum + byteLength, 0),
      1e9,
      '159.6',
    );
    await assert.rejects(openCheckpoint(directory), /it is cut short/, 'nothing but inspect takes headers alone');
  });

  test('fits some memory and not other', async () => {
    const { capacity, adapter, kv } = await official;
    const workspaceBytes = Math.max(adapter.workspaceBytes.prefill, adapter.workspaceBytes.decode);
    const leftBytes = 192 * GIB - adapter.weightBytes - workspaceBytes;
    assert.equal(capacity!.leftBytes, leftBytes);
    const used = (tokens: number, requests: number): number => tokens * kv.bytesPerToken + requests * kv.slotBytes;
    const { tokens, longestSequence, sequences } = capacity!;
    assert.ok(
      used(tokens!, 64) <= leftBytes && used(tokens! + 128, 64) > leftBytes,
      `${tokens} tokens in ${leftBytes} bytes`,
    );
    assert.equal(longestSequence, 131072);
    assert.deepEqual(
      sequences.map((row) => row.tokens),
      [4096, 32768, 131072],
    );
    for (const row of sequences) {
      assert.ok(used(row.tokens * row.count, row.count) <= leftBytes, `${inspectValue(row)} in ${leftBytes} bytes`);
      assert.ok(
        used(row.tokens * (row.count + 1), row.count + 1) > leftBytes,
        `${inspectValue(row)} in ${leftBytes} bytes`,
      );
    }
    const small = await inspect(directory, '--memory', '24GiB');
    assert.ok(small.capacity!.leftBytes < 0, `${small.capacity!.leftBytes} bytes`);
    assert.deepEqual([small.capacity!.tokens, small.capacity!.longestSequence], [0, 0]);
    assert.deepEqual(new Set(small.capacity!.sequences.map(({ count }) => count)), new Set([0]));
    assert.match(
      describeInspection(small).at(-1)!,
      /^in 24\.0 GiB: weights and workspace need 146\.\d GiB, 122\.\d GiB more$/,
    );
  });

  test('takes less KV per token with narrower index keys: 512, 256, 132 or 68 bytes a key', async () => {
    for (const [precision, keyBytes] of [
      ['f32', 512],
      ['bf16', 256],
      ['fp8', 132],
      ['fp4', 68],
    ] as const) {
      const { kv } = await inspect(directory, '--index-precision', precision, '--mode', 'q');
      assert.equal(kv.bytesPerToken, 13760 - (21 * (512 - keyBytes)) / 4, precision);
      assert.equal(kv.indexPrecision, precision);
    }
  });

  test('is described in words', async () => {
    const text = describeInspection(await official).join('\n');
    for (const line of [
      /46 files, 69187 tensors, .*INCOMPLETE: 148\.6 GiB of tensors are not there/,
      /layers +43: 2 sliding, 21 of ratio 4 with indexer, 20 of ratio 128; 3 routed by token id/,
      /routed experts +MXFP4 +277\.0 billion +137\.1 GiB +137\.1 GiB/,
      /model +284\.3 billion/,
      /active per token +13\.3 billion/,
      /KV per token +13760 bytes/,
      /of 131072 tokens +\d+ sequences/,
    ])
      assert.match(text, line);
  });
});

interface HeaderEntry {
  dtype: string;
  shape: number[];
  data_offsets: [number, number];
}

/** A file's header, without any code of ours. */
function headerOf(path: string): [name: string, entry: HeaderEntry][] {
  const bytes = readFileSync(path);
  const header = JSON.parse(bytes.toString('utf8', 8, 8 + Number(bytes.readBigUInt64LE()))) as Record<
    string,
    HeaderEntry
  >;
  return Object.entries(header).filter(([name]) => name !== '__metadata__');
}

describe('a checkpoint with weights', () => {
  const expertFormats: Record<string, string> = {
    'nano-mxfp4': 'MXFP4',
    'nano-nvfp4': 'NVFP4',
    'nano-fp8': 'FP8 (ue8m0 scales)',
    'nano-bf16': 'bf16',
    'plain-bf16': 'bf16',
    'quant-fp8': 'FP8 (ue8m0 scales)',
    'quant-mxfp4': 'MXFP4',
    'quant-mxfp4-q': 'MXFP4',
    'quant-nvfp4': 'NVFP4',
  };
  const goldenRoot = process.env['HANDOFF_GOLDEN_DIR'];
  const directories = new Map([['model/nano', fileURLToPath(new URL('../../../model/nano', import.meta.url))]]);
  for (const name of Object.keys(expertFormats)) {
    if (goldenRoot && existsSync(join(goldenRoot, name))) directories.set(name, join(goldenRoot, name));
  }
  console.log(`# inspected: ${[...directories.keys()].join(', ')}`);
  for (const [name, directory] of directories) {
    test(`${name}: every count is that of its headers`, async () => {
      const inspection = await inspect(directory);
      const json = JSON.parse(readFileSync(join(directory, 'config.json'), 'utf8')) as Record<string, number> & {
        compress_ratios: number[];
      };
      const tensors = headerOf(join(directory, 'model.safetensors'));
      assert.equal(inspection.files.tensors, tensors.length);
      assert.equal(inspection.files.missingBytes, 0);

      // A packed byte is two parameters; scales and tables of ids are none.
      const parametersOf = (draft: boolean, pattern = /./): number =>
        tensors
          .filter(([tensor]) => tensor.startsWith('mtp.') === draft && pattern.test(tensor))
          .filter(([tensor]) => !/\.(scale|weight_scale|weight_scale_2|input_scale|tid2eid)$/.test(tensor))
          .reduce((sum, [, { dtype, shape }]) => {
            const count = shape.reduce((product, size) => product * size, 1);
            return sum + (dtype === 'I8' || dtype === 'U8' ? 2 * count : count);
          }, 0);
      const { parameters, draft } = inspection;
      assert.equal(parameters.total, parametersOf(false));
      assert.equal(draft?.parameters ?? 0, parametersOf(true));
      const routed = parametersOf(false, /\.experts\./);
      const idleExperts = routed * (1 - json['num_experts_per_tok']! / json['n_routed_experts']!);
      const idleRows = (json['vocab_size']! - 1) * json['hidden_size']!;
      assert.equal(parameters.active, parameters.total - idleExperts - idleRows);

      const stored = tensors
        .filter(([tensor]) => !tensor.endsWith('input_scale'))
        .reduce((sum, [, { data_offsets: offsets }]) => sum + offsets[1] - offsets[0], 0);
      assert.equal(
        bytesOf(inspection, () => true),
        stored,
      );
      const format = expertFormats[name] ?? 'MXFP4';
      assert.deepEqual(formatOf(inspection, 'routed experts'), [format]);
      assert.equal(formatOf(inspection, 'attention')[0], format === 'bf16' ? 'bf16' : 'FP8 (ue8m0 scales)');

      // An entry for every `ratio` tokens, and at ratio 4 an index key.
      const ratios = json.compress_ratios.slice(0, json['num_hidden_layers']!);
      const elements = ratios.map((ratio) => {
        if (ratio === 0) return 0;
        return (json['head_dim']! + (ratio === 4 ? json['index_head_dim']! : 0)) / ratio;
      });
      assert.equal(inspection.kv.bytesPerToken, 4 * elements.reduce((sum, count) => sum + count, 0));
    });
  }

  test('that lacks a part of its draft block is served, and the part is named', async () => {
    const json = JSON.parse(readFileSync(join(directories.get('model/nano')!, 'config.json'), 'utf8')) as object;
    const entries = releaseHeaders(parseModelConfig(json), 'mxfp4');
    const write = (name: string, kept: (tensor: string) => boolean): string => {
      const directory = join(root, name);
      const some = entries.filter((entry) => kept(entry.name));
      writeHeaders(directory, json, some, { shards: 1, data: 'none' });
      return directory;
    };
    const partly = await inspect(write('partly', (tensor) => tensor !== 'mtp.0.enorm.weight'));
    assert.match(partly.draft!.fault!, /mtp\.0\.enorm\.weight \[256\] is missing/);
    assert.match(
      describeInspection(partly).join('\n'),
      /CANNOT BE LOADED: .*\n.*mtp\.0\.enorm\.weight \[256\] is missing/,
    );
    assert.equal((await inspect(write('without', (tensor) => !tensor.startsWith('mtp.')))).draft, null);
    await assert.rejects(
      inspect(write('broken', (tensor) => tensor !== 'norm.weight')),
      /norm\.weight \[256\] is missing/,
    );
  });

  test('of a few MiB fits a few MiB', async () => {
    const { adapter, kv, capacity } = await inspect(directories.get('model/nano')!, '--memory', '64MiB');
    const leftBytes = 64 * KIB * KIB - adapter.weightBytes - adapter.workspaceBytes.prefill;
    assert.equal(capacity!.leftBytes, leftBytes);
    const pages = Math.floor((leftBytes - 64 * kv.slotBytes) / kv.pageBytes);
    assert.equal(capacity!.tokens, 128 * pages);
    assert.equal(capacity!.longestSequence, 4096);
    assert.deepEqual(capacity!.sequences, [
      { tokens: 4096, count: Math.floor(leftBytes / (32 * kv.pageBytes + kv.slotBytes)) },
    ]);
  });
});
