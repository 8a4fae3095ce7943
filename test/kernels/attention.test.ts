import assert from 'node:assert/strict';
import { test } from 'node:test';
import { attentionDecode } from '../../kernels/attention-decode.ts';
import { allocateAttentionScratch, attentionPrefill } from '../../kernels/attention-prefill.ts';
import { appendWindow } from '../../kernels/window.ts';
import { attend } from '../reference/attention.ts';
import { toBf16 } from '../reference/rounding.ts';
import {
  assertClose,
  assertSameBits,
  assertUntouched,
  createTestRandom,
  f32Tensor,
  guardedTensor,
  makeStep,
  openTestDevice,
  readF32,
  runOnDevice,
  u32Tensor,
} from '../support/gpu.ts';

const device = await openTestDevice();
const random = createTestRandom();

interface Layer {
  readonly heads: number;
  readonly headDim: number;
  readonly window: number;
  /** 0: the window alone. */
  readonly ratio: number;
  /** 0: no selection. */
  readonly topk: number;
  readonly entriesPerPage: number;
}

/** Queries, window keys, entries and selections of several sequences, by position. */
interface Content {
  readonly layer: Layer;
  readonly lengths: readonly number[];
  readonly sinks: Float32Array;
  readonly queries: Float32Array[][];
  readonly kv: Float32Array[][];
  readonly entries: Float32Array[][];
  readonly selected: number[][][];
}

function makeContent(layer: Layer, lengths: readonly number[]): Content {
  const { heads, headDim, ratio, topk } = layer;
  const visible = (position: number): number => (ratio === 0 ? 0 : Math.floor((position + 1) / ratio));
  const pick = (count: number): number[] => {
    const all = Array.from({ length: count }, (_, index) => index);
    while (all.length > topk) all.splice(random.integer(all.length), 1);
    return all;
  };
  return {
    layer,
    lengths,
    sinks: random.f32(heads, 2),
    queries: lengths.map((length) => Array.from({ length }, () => random.f32(heads * headDim, 2))),
    kv: lengths.map((length) => Array.from({ length }, () => random.f32(headDim, 1.5))),
    entries: lengths.map((length) => Array.from({ length: visible(length - 1) }, () => random.f32(headDim, 1.5))),
    selected: lengths.map((length) =>
      Array.from({ length }, (_, position) => (topk > 0 && visible(position) > topk ? pick(visible(position)) : [])),
    ),
  };
}

/** A content's ring and pages on the device; sequences use slots and pages in an order of their own. */
function makeState(content: Content) {
  const { layer, lengths } = content;
  const { headDim, window, entriesPerPage } = layer;
  const pagesEach = Math.max(1, ...content.entries.map((entries) => Math.ceil(entries.length / entriesPerPage)));
  const slotOf = (sequence: number): number => lengths.length - sequence;
  const pagesOf = (sequence: number): number[] =>
    Array.from({ length: pagesEach }, (_, index) => 1 + (pagesEach - 1 - index) * lengths.length + sequence);
  const pageCount = 2 + pagesEach * lengths.length;
  const pool = new Float32Array(pageCount * entriesPerPage * headDim).fill(NaN);
  for (const [sequence, entries] of content.entries.entries()) {
    for (const [index, entry] of entries.entries()) {
      const page = pagesOf(sequence)[Math.floor(index / entriesPerPage)]!;
      pool.set(entry, (page * entriesPerPage + (index % entriesPerPage)) * headDim);
    }
  }
  return {
    ring: guardedTensor(device, [lengths.length + 1, window, headDim]),
    entries: f32Tensor(device, [pageCount, entriesPerPage, headDim], pool),
    slotOf,
    pagesOf,
  };
}

type Chunk = readonly [sequence: number, start: number, end: number];

/** Attend for the rows of `chunks`, then append them to the window. Returns [rows, heads, headDim]. */
async function runStep(
  content: Content,
  state: ReturnType<typeof makeState>,
  chunks: readonly Chunk[],
  attention: typeof attentionPrefill,
  blockRows = 64,
): Promise<Float32Array> {
  const { layer } = content;
  const { heads, headDim, window, ratio, topk } = layer;
  const step = makeStep(
    device,
    chunks.map(([sequence, start, end]) => ({
      slot: state.slotOf(sequence),
      start,
      tokens: Array.from({ length: end - start }, () => 0),
      pages: state.pagesOf(sequence),
    })),
  );
  const { rowCount } = step;
  const positions = chunks.flatMap(([sequence, start, end]) =>
    Array.from({ length: end - start }, (_, i) => ({ sequence, position: start + i })),
  );
  const gather = (source: Float32Array[][]): Float32Array =>
    Float32Array.from(positions.flatMap(({ sequence, position }) => [...source[sequence]![position]!]));
  const selected = positions.flatMap(({ sequence, position }) =>
    Array.from({ length: topk }, (_, i) => content.selected[sequence]![position]![i] ?? 0xffffff),
  );
  const lastPosition = Math.max(...positions.map(({ position }) => position));
  const visible = ratio === 0 ? 0 : Math.floor((lastPosition + 1) / ratio);
  const maxKeys = window + (topk === 0 ? visible : topk);
  const kv = f32Tensor(device, [rowCount, headDim], gather(content.kv));
  const out = guardedTensor(device, [rowCount + 2, heads, headDim]);
  await runOnDevice(device, (recorder) => {
    attention(recorder, {
      queries: f32Tensor(device, [rowCount, heads, headDim], gather(content.queries)),
      kv,
      ring: state.ring,
      sinks: f32Tensor(device, [heads], content.sinks),
      compressed:
        ratio === 0
          ? undefined
          : {
              ratio,
              entries: state.entries,
              selected: topk === 0 ? undefined : u32Tensor(device, [rowCount, topk], selected),
            },
      rows: step.rows,
      sequences: step.sequences,
      pageTable: step.pageTable,
      step: step.step,
      out,
      scratch: allocateAttentionScratch(device, { blockRows, splitRows: blockRows, heads, headDim, maxKeys }),
      rowCount,
      lastPosition,
    });
    appendWindow(recorder, {
      kv,
      ring: state.ring,
      rows: step.rows,
      sequences: step.sequences,
      step: step.step,
      rowCount,
    });
  });
  const values = await readF32(device, out);
  await readF32(device, state.ring); // checks its guards
  assertUntouched(values, rowCount * heads * headDim);
  return values.slice(0, rowCount * heads * headDim);
}

function assertRow(content: Content, sequence: number, position: number, actual: Float32Array): void {
  const { heads, headDim, window, ratio, topk } = content.layer;
  const keys = content.kv[sequence]!.slice(Math.max(0, position - window + 1), position + 1);
  const count = ratio === 0 ? 0 : Math.floor((position + 1) / ratio);
  const entries = content.entries[sequence]!;
  if (topk > 0 && count > topk) for (const index of content.selected[sequence]![position]!) keys.push(entries[index]!);
  else keys.push(...entries.slice(0, count));
  for (let head = 0; head < heads; head += 1) {
    const range = [head * headDim, (head + 1) * headDim] as const;
    const expected = attend(content.queries[sequence]![position]!.subarray(...range), keys, content.sinks[head]!);
    // Logits reach about 20, whose f32 error of some 1e-6 is the relative error of a weight; values are of order 1.
    assertClose(
      actual.subarray(...range),
      expected,
      { absolute: 2e-5 },
      `sequence ${sequence} position ${position} head ${head}`,
    );
  }
}

const LAYERS: readonly (readonly [string, Layer, readonly number[]])[] = [
  ['window alone, nano', { heads: 4, headDim: 128, window: 64, ratio: 0, topk: 0, entriesPerPage: 1 }, [150, 3]],
  [
    'ratio 4 with selection, nano',
    { heads: 4, headDim: 128, window: 64, ratio: 4, topk: 64, entriesPerPage: 32 },
    [300, 70],
  ],
  ['ratio 128, nano', { heads: 4, headDim: 128, window: 64, ratio: 128, topk: 0, entriesPerPage: 1 }, [300, 127]],
  [
    'ratio 4 with selection, tiny',
    { heads: 4, headDim: 32, window: 16, ratio: 4, topk: 8, entriesPerPage: 4 },
    [75, 40, 1],
  ],
  ['ratio 16, tiny', { heads: 4, headDim: 32, window: 16, ratio: 16, topk: 0, entriesPerPage: 1 }, [75, 40, 1]],
  ['six heads of 96', { heads: 6, headDim: 96, window: 64, ratio: 4, topk: 24, entriesPerPage: 32 }, [130, 65]],
  [
    'more splits than one pass takes',
    { heads: 5, headDim: 40, window: 70, ratio: 2, topk: 0, entriesPerPage: 8 },
    [600, 190],
  ],
  ['odd sizes', { heads: 3, headDim: 10, window: 7, ratio: 4, topk: 5, entriesPerPage: 3 }, [60, 8, 29]],
];

for (const [name, layer, lengths] of LAYERS) {
  test(`${name}: whole prompts of several sequences in one prefill step`, async () => {
    const content = makeContent(layer, lengths);
    const rowWidth = layer.heads * layer.headDim;
    const chunks = lengths.map((length, sequence) => [sequence, 0, length] as const);
    const actual = await runStep(content, makeState(content), chunks, attentionPrefill);
    let row = 0;
    for (const [sequence, length] of lengths.entries()) {
      for (let position = 0; position < length; position += 1, row += 1) {
        assertRow(content, sequence, position, actual.subarray(row * rowWidth, (row + 1) * rowWidth));
      }
    }
  });

  test(`${name}: chunks and decode steps give the bits of whole prompts`, async () => {
    const content = makeContent(layer, lengths);
    const rowWidth = layer.heads * layer.headDim;
    const whole: Float32Array[] = [];
    for (const [sequence, length] of lengths.entries()) {
      whole.push(await runStep(content, makeState(content), [[sequence, 0, length]], attentionPrefill));
    }
    const state = makeState(content);
    const done = lengths.map(() => 0);
    let decoded = 0;
    for (let step = 0; done.some((end, sequence) => end < lengths[sequence]!); step += 1) {
      const chunks: Chunk[] = [];
      const decode = step % 2 === 1;
      for (const [sequence, length] of lengths.entries()) {
        const start = done[sequence]!;
        const end = Math.min(length, start + (decode ? 1 : 1 + random.integer(layer.window + 9)));
        if (end > start) chunks.unshift([sequence, start, end]);
        done[sequence] = end;
      }
      const attention = decode ? attentionDecode : attentionPrefill;
      const actual = await runStep(content, state, chunks, attention, decode ? 64 : 5);
      let row = 0;
      for (const [sequence, start, end] of chunks) {
        const rows = end - start;
        assertSameBits(
          actual.slice(row * rowWidth, (row + rows) * rowWidth),
          whole[sequence]!.slice(start * rowWidth, end * rowWidth),
          `sequence ${sequence} rows [${start}, ${end})`,
        );
        row += rows;
      }
      if (decode) decoded += chunks.length;
    }
    assert.ok(decoded > 0, `${decoded} decoded`);
  });
}

test('decode rows of several sequences with large heads are handled in blocks of rows', async () => {
  const layer = { heads: 8, headDim: 512, window: 128, ratio: 128, topk: 0, entriesPerPage: 1 };
  const content = makeContent(layer, [300, 260, 200]);
  const state = makeState(content);
  await runStep(
    content,
    state,
    [
      [0, 0, 299],
      [1, 0, 259],
      [2, 0, 199],
    ],
    attentionPrefill,
  );
  const last: Chunk[] = [
    [0, 299, 300],
    [1, 259, 260],
    [2, 199, 200],
  ];
  const decode = await runStep(content, state, last, attentionDecode, 2);
  for (const [row, [sequence, position]] of last.entries()) {
    assertRow(content, sequence, position, decode.subarray(row * 8 * 512, (row + 1) * 8 * 512));
  }
});

test('a sink far above all scores leaves nothing, one far below takes nothing', async () => {
  const layer = { heads: 2, headDim: 8, window: 4, ratio: 0, topk: 0, entriesPerPage: 1 };
  const content = makeContent(layer, [3]);
  content.sinks.set([1000, -1000]);
  const actual = await runStep(content, makeState(content), [[0, 0, 3]], attentionPrefill);
  for (let position = 0; position < 3; position += 1) {
    assertClose(actual.subarray(position * 16, position * 16 + 8), new Float32Array(8), { absolute: 1e-30 });
    assertRow(content, 0, position, actual.subarray(position * 16, position * 16 + 16));
  }
});

test('numerators are rounded to bf16 on request, and the denominator is the sum of what they were', async () => {
  const layer = { heads: 1, headDim: 4, window: 4, ratio: 0, topk: 0, entriesPerPage: 1 };
  const content = makeContent(layer, [3]);
  // Scores are 2, 1.7 and 0.9: every numerator but the largest is cut by some 2^-10 of itself.
  const keys = [
    [2, 1, -3, 5],
    [1.7, -7, 2, 1],
    [0.9, 4, 9, -6],
  ];
  for (const [position, key] of keys.entries()) content.kv[0]![position]!.set(key);
  content.queries[0]![2]!.set([2, 0, 0, 0]);
  content.sinks[0] = 0;
  for (const roundNumerators of [false, true]) {
    for (const attention of [attentionPrefill, attentionDecode]) {
      const rounding: typeof attentionPrefill = (recorder, args) => attention(recorder, { ...args, roundNumerators });
      const actual = await runStep(content, makeState(content), [[0, 0, 3]], rounding);
      const numerators = [0, -0.3, -1.1].map((logit) => Math.exp(logit));
      const sum = numerators.reduce((total, value) => total + value, Math.exp(-2));
      const weights = roundNumerators ? numerators.map(toBf16) : numerators;
      const expected = [0, 1, 2, 3].map((dim) => weights.reduce((x, w, key) => x + w * keys[key]![dim]!, 0) / sum);
      // The two expectations are 1e-3 apart.
      assertClose(actual.subarray(8, 12), expected, { absolute: 2e-6 }, `rounded: ${roundNumerators}`);
    }
  }
});

test('more keys than the scratch holds are refused', async () => {
  const layer = { heads: 2, headDim: 8, window: 4, ratio: 2, topk: 0, entriesPerPage: 4 };
  const content = makeContent(layer, [20]);
  const small: typeof attentionPrefill = (recorder, args) =>
    attentionPrefill(recorder, {
      ...args,
      scratch: allocateAttentionScratch(device, { blockRows: 4, splitRows: 4, heads: 2, headDim: 8, maxKeys: 13 }),
    });
  await assert.rejects(
    runStep(content, makeState(content), [[0, 0, 20]], small),
    /14 keys at position 19, scratch for 13/,
  );
});
