/** Names and inventory of a checkpoint, without a device: what fits is accepted in any spelling, what does not is named. */
import assert from 'node:assert/strict';
import { describe, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { countingDevice, type Device } from '../../../kernels/device.ts';
import { loadModelConfig, parseModelConfig } from '../../../model/config.ts';
import { memorySource, openCheckpoint, type TensorSource } from '../../../model/safetensors.ts';
import { checkCheckpoint, loadWeights, officialName, surveyWeights } from '../../../model/weights.ts';
import {
  generateCheckpoint,
  savedName,
  transformersName,
  type StorageFormats,
  type StoredEntry,
} from '../../support/checkpoints.ts';
import { FLASH_CONFIG, releaseHeaders } from '../../support/headers.ts';

const config = parseModelConfig({
  vocab_size: 8,
  hidden_size: 32,
  num_hidden_layers: 3,
  num_attention_heads: 2,
  head_dim: 8,
  qk_rope_head_dim: 4,
  q_lora_rank: 8,
  o_lora_rank: 8,
  o_groups: 2,
  n_routed_experts: 2,
  num_experts_per_tok: 1,
  moe_intermediate_size: 32,
  routed_scaling_factor: 1.5,
  swiglu_limit: 1,
  sliding_window: 4,
  hc_mult: 2,
  hc_sinkhorn_iters: 2,
  hc_eps: 1e-6,
  rms_norm_eps: 1e-6,
  index_n_heads: 2,
  index_head_dim: 4,
  index_topk: 4,
  max_position_embeddings: 64,
  rope_theta: 10000,
  compress_rope_theta: 160000,
  compress_ratios: [0, 4, 8],
  num_hash_layers: 1,
  num_nextn_predict_layers: 1,
});
const plain: StorageFormats = { plain: 'BF16', linears: 'plain', experts: 'plain' };

const entriesIn = (formats: StorageFormats, options: { mtp?: boolean } = {}): StoredEntry[] =>
  generateCheckpoint(config, formats, options).entries;

const check = (entries: readonly StoredEntry[], options: { mtp?: boolean } = {}): { totalBytes: number } =>
  checkCheckpoint(config, memorySource(entries), options);

describe('names', () => {
  test('of transformers are understood, every one', () => {
    const formats: StorageFormats = { plain: 'BF16', linears: 'fp8', experts: 'fp8' };
    for (const { name } of entriesIn(formats)) assert.equal(officialName(transformersName(name)), name);
    for (const { name } of entriesIn(formats, { mtp: true }))
      assert.equal(officialName(name), name, 'official names stay');
  });

  test('as transformers saves them are understood', () => {
    const saved: Record<string, string> = {
      'model.layers.3.attn.norm.weight': 'layers.3.attn.kv_norm.weight',
      'model.embed_tokens.weight': 'embed.weight',
      'model.hc_head.hc_fn': 'hc_head_fn',
      'model.norm.weight': 'norm.weight',
      'head.weight': 'head.weight',
      'model.layers.0.ffn.experts.7.w2.weight': 'layers.0.ffn.experts.7.w2.weight',
    };
    for (const [name, official] of Object.entries(saved)) assert.equal(officialName(name), official);
    for (const { name } of entriesIn({ plain: 'BF16', linears: 'fp8', experts: 'mxfp4' }))
      assert.equal(officialName(savedName(name)), name);
  });
});

describe('a checkpoint fits', () => {
  const formats: Record<string, StorageFormats> = {
    bf16: plain,
    f16: { plain: 'F16', linears: 'plain', experts: 'plain' },
    'FP8 and MXFP4': { plain: 'BF16', linears: 'fp8', experts: 'mxfp4' },
    'FP8 and NVFP4': { plain: 'BF16', linears: 'fp8', experts: 'nvfp4' },
    'FP8 with f32 scales': { plain: 'F32', linears: 'fp8-f32-scales', experts: 'fp8' },
    'FP8, its experts with f32 scales': { plain: 'BF16', linears: 'fp8', experts: 'fp8-f32-scales' },
  };
  for (const [name, format] of Object.entries(formats)) {
    test(`in ${name}, with and without its draft block`, () => {
      const without = check(entriesIn(format)).totalBytes;
      const withDraft = entriesIn(format, { mtp: true });
      assert.equal(check(withDraft).totalBytes, without, 'the draft block is accepted and not loaded');
      const draftedBytes = check(withDraft, { mtp: true }).totalBytes;
      assert.ok(draftedBytes > without, `${draftedBytes} bytes with, ${without} without`);
    });
  }

  test('with fused experts', () => {
    const entries = entriesIn(plain);
    const fused: StoredEntry[] = entries.filter(({ name }) => !/\.experts\./.test(name));
    for (let layer = 0; layer < 3; layer++) {
      const bytes = new Uint8Array(2 * 2 * 32 * 32 * 2);
      const prefix = `model.layers.${layer}.mlp.experts.`;
      fused.push({ name: `${prefix}gate_up_proj`, dtype: 'BF16', shape: [2, 64, 32], bytes });
      fused.push({
        name: `${prefix}down_proj`,
        dtype: 'BF16',
        shape: [2, 32, 32],
        bytes: bytes.slice(0, 2 * 32 * 32 * 2),
      });
    }
    assert.equal(check(fused).totalBytes, check(entries).totalBytes);
  });
});

describe('the survey of a checkpoint', () => {
  const summary = (format: StorageFormats, name: string): { format: string; elements: number; storedBytes: number } => {
    const found = surveyWeights(config, memorySource(entriesIn(format))).find((weight) => weight.name === name);
    assert.ok(found, name);
    return { format: found.format, elements: found.elements, storedBytes: found.storedBytes };
  };

  test('tells the format of each weight, its elements and its bytes', () => {
    const quantised: StorageFormats = { plain: 'BF16', linears: 'fp8', experts: 'nvfp4' };
    // 2 experts x 2 matrices x 32 x 32: half a byte each, one byte for 16, 4 bytes a matrix.
    assert.deepEqual(summary(quantised, 'layers.1.ffn.experts.*.w1+w3'), {
      format: 'NVFP4',
      elements: 4096,
      storedBytes: 2048 + 256 + 16,
    });
    assert.deepEqual(summary({ ...quantised, experts: 'mxfp4' }, 'layers.1.ffn.experts.*.w2'), {
      format: 'MXFP4',
      elements: 2048,
      storedBytes: 1024 + 64,
    });
    assert.deepEqual(summary(quantised, 'layers.1.attn.wq_a'), {
      format: 'FP8 (ue8m0 scales)',
      elements: 8 * 32,
      storedBytes: 8 * 32 + 1,
    });
    const base: StorageFormats = { ...quantised, experts: 'fp8-f32-scales' };
    assert.equal(summary(base, 'layers.1.ffn.experts.*.w2').format, 'FP8 (f32 scales)');
    assert.deepEqual(summary(quantised, 'embed'), { format: 'bf16', elements: 8 * 32, storedBytes: 2 * 8 * 32 });
    assert.equal(summary(quantised, 'layers.0.ffn.gate.tid2eid').format, 'i64');
  });

  test('needs nothing but headers, which this generator writes like the exporter of the embedded model', async () => {
    const directory = fileURLToPath(new URL('../../../model/nano', import.meta.url));
    const source = await openCheckpoint(directory);
    await source.close();
    const line = ({ name, dtype, shape }: { name: string; dtype: string; shape: readonly number[] }): string =>
      `${name} ${dtype} [${shape}]`;
    assert.deepEqual(
      releaseHeaders(loadModelConfig(directory), 'mxfp4').map(line).toSorted(),
      [...source.tensors.values()].map(line).toSorted(),
    );
  });
});

test('loading 6 GB holds one piece of the files and what the device has not taken yet, no more', async () => {
  const flash = parseModelConfig({ ...FLASH_CONFIG, num_hidden_layers: 1, num_nextn_predict_layers: 0 });
  const tensors = new Map(
    releaseHeaders(flash, 'mxfp4').map(({ name, dtype, shape, byteLength }) => [
      name,
      { name, dtype, shape, start: 0, end: byteLength, file: 'none' },
    ]),
  );
  const pieces = new Set<ArrayBufferLike>();
  let largestRead = 0;
  let readBytes = 0;
  const source: TensorSource = {
    tensors,
    files: [],
    read(_tensor, _offset, target) {
      pieces.add(target.buffer);
      largestRead = Math.max(largestRead, target.byteLength);
      readBytes += target.byteLength;
      return Promise.resolve();
    },
    close: () => Promise.resolve(),
  };
  let waitingBytes = 0;
  let largestWait = 0;
  let writtenBytes = 0;
  const device: Device = {
    ...countingDevice(),
    queue: {
      writeBuffer(_buffer: unknown, _at: number, data: ArrayBuffer, _offset?: number, size = data.byteLength) {
        waitingBytes += size;
        writtenBytes += size;
        largestWait = Math.max(largestWait, waitingBytes);
      },
      submit() {},
      onSubmittedWorkDone() {
        waitingBytes = 0;
        return Promise.resolve();
      },
    } as unknown as GPUQueue,
  };
  let progress = { done: -1, total: 0 };
  let reports = 0;
  await loadWeights(device, flash, source, {
    onProgress(step) {
      assert.ok(
        step.done > progress.done && step.done <= step.total,
        `${step.done} of ${step.total} after ${progress.done}`,
      );
      progress = step;
      reports++;
    },
  });
  const mib = 2 ** 20;
  assert.equal(pieces.size, 1, 'one buffer takes every piece');
  assert.ok(largestRead <= 16 * mib, `${largestRead} bytes at once`);
  assert.ok(largestWait <= 80 * mib, `${largestWait} bytes wait for the device`);
  assert.equal(waitingBytes, 0);
  const survey = surveyWeights(flash, source);
  assert.equal(
    readBytes,
    survey.reduce((sum, weight) => sum + weight.storedBytes, 0),
  );
  assert.equal(
    writtenBytes,
    survey.reduce((sum, weight) => sum + weight.deviceBytes, 0),
  );
  assert.equal(device.allocatedBytes, writtenBytes);
  assert.deepEqual([progress.done, progress.total], [readBytes, readBytes]);
  assert.ok(reports > 100 && reports < readBytes / (16 * mib) + 2, `${reports} reports`);
});

describe('a checkpoint that does not fit is refused:', () => {
  const formats: StorageFormats = { plain: 'BF16', linears: 'fp8', experts: 'mxfp4' };
  const sound = entriesIn(formats, { mtp: true });
  const change = (name: string, fields: Partial<StoredEntry>): StoredEntry[] => {
    assert.ok(
      sound.some((entry) => entry.name === name),
      name,
    );
    return sound.map((entry) => (entry.name === name ? { ...entry, ...fields } : entry));
  };
  const drop = (name: string): StoredEntry[] => sound.filter((entry) => entry.name !== name);
  const extra = (name: string): StoredEntry[] => [
    ...sound,
    { name, dtype: 'F32', shape: [1], bytes: new Uint8Array(4) },
  ];
  const cases: [name: string, entries: StoredEntry[], message: RegExp, options?: { mtp: boolean }][] = [
    ['a missing norm', drop('norm.weight'), /norm\.weight \[32\] is missing/],
    [
      'a missing matrix of one expert',
      drop('layers.1.ffn.experts.1.w3.weight'),
      /experts\.1\.w3\.weight \[32,32\] is missing/,
    ],
    ['a missing scale', drop('layers.0.attn.wq_a.scale'), /layers\.0\.attn\.wq_a\.scale \[1,1\] is missing/],
    ['a missing draft', drop('mtp.0.e_proj.weight'), /mtp\.0\.e_proj\.weight \[32,32\] is missing/, { mtp: true }],
    ['a superfluous tensor', extra('layers.0.attn.secret'), /layers\.0\.attn\.secret is superfluous/],
    ['a layer too many', extra('layers.3.attn_norm.weight'), /layers\.3\.attn_norm\.weight is superfluous/],
    [
      'one tensor in two spellings',
      extra('model.norm.weight'),
      /model\.norm\.weight and norm\.weight are the same tensor/,
    ],
    ['a wrong shape', change('norm.weight', { shape: [8, 4] }), /norm\.weight is \[8,4\], the config asks for \[32\]/],
    [
      'whole numbers for a norm',
      change('norm.weight', { dtype: 'I32' }),
      /norm\.weight is I32, expected F32, BF16 or F16/,
    ],
    ['halves for a matrix of FP8', change('layers.0.attn.wkv.weight', { dtype: 'F8_E5M2' }), /wkv\.weight is F8_E5M2/],
    ['a table of floats', change('layers.0.ffn.gate.tid2eid', { dtype: 'F64' }), /tid2eid is F64, expected I64 or I32/],
    [
      'experts in different formats',
      [
        ...sound.filter(({ name }) => !name.startsWith('layers.0.ffn.experts.1.w1.')),
        ...entriesIn({ ...formats, experts: 'fp8' }).filter(({ name }) =>
          name.startsWith('layers.0.ffn.experts.1.w1.'),
        ),
      ],
      /experts\.1\.w1\.weight is stored in e4m3, layers\.0\.ffn\.experts\.0\.w1\.weight in mxfp4: experts of a layer must agree/,
    ],
  ];
  for (const [name, entries, message, options] of cases) {
    test(name, () => assert.throws(() => check(entries, options), message));
  }

  test('a fault once: scales of a matrix that is wrong are not superfluous as well', () => {
    const faultsOf = (entries: StoredEntry[]): string[] => {
      try {
        check(entries);
      } catch (error) {
        return (error as Error).message.split('\n').slice(1);
      }
      return [];
    };
    assert.equal(faultsOf(change('layers.0.attn.wkv.weight', { dtype: 'F8_E5M2' })).length, 1);
    assert.equal(faultsOf(drop('layers.1.ffn.experts.1.w3.weight')).length, 1);
  });

  test('rows that no kernel can decode', () => {
    const narrow = { ...config, hiddenSize: 34 };
    const checkNarrow = (formats: StorageFormats): unknown =>
      checkCheckpoint(narrow, memorySource(generateCheckpoint(config, formats).entries));
    const linears: StorageFormats = { plain: 'BF16', linears: 'fp8', experts: 'plain' };
    assert.throws(() => checkNarrow(linears), /wq_a\.weight is F8_E4M3 in rows of 34, a multiple of 4 is needed/);
    const experts: StorageFormats = { plain: 'BF16', linears: 'plain', experts: 'mxfp4' };
    assert.throws(() => checkNarrow(experts), /w1\.weight is I8 in rows of 34, a multiple of 32 is needed/);
  });

  test('experts without end, without counting them', () => {
    const absurd = { ...config, experts: 2 ** 40 };
    assert.throws(
      () => checkCheckpoint(absurd, memorySource(sound)),
      /layers\.0\.ffn\.experts\.\*\.w1\+w3: the config asks for 1099511627776 experts, the checkpoint has \d+ tensors/,
    );
  });

  test('with all faults at once, and not without end', () => {
    assert.throws(() => check([]), /embed\.weight.*\n.*layers\.0\.hc_attn_fn[\s\S]*and \d+ more/);
  });
});
