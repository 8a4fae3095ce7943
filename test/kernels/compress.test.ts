import assert from 'node:assert/strict';
import { test } from 'node:test';
import { compress, tailShape } from '../../kernels/compress.ts';
import type { Tensor } from '../../kernels/tensor.ts';
import { hadamardTransform, normalise, poolBlock, rotate } from '../reference/attention.ts';
import { throughBlocks, toBf16 } from '../reference/rounding.ts';
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
} from '../support/gpu.ts';

const device = await openTestDevice();
const random = createTestRandom();

const EPS = 1e-6;

interface Compressor {
  readonly ratio: number;
  readonly width: number;
  readonly pairs: number;
  readonly pageTokens: number;
  readonly hadamard: boolean;
  readonly rounding?: boolean;
}

/** A compressor's constants and, for each of several sequences, the projections of every token. */
interface Setup extends Compressor {
  readonly columns: number;
  readonly ape: Float32Array;
  readonly norm: Float32Array;
  readonly cos: Float32Array;
  readonly sin: Float32Array;
  readonly k: Float32Array[][];
  readonly z: Float32Array[][];
}

function makeSetup(compressor: Compressor, lengths: readonly number[]): Setup {
  const { ratio, width, pairs } = compressor;
  const columns = ratio === 4 ? 2 * width : width;
  const positions = Math.max(...lengths);
  const angles = random.f32(positions * pairs, Math.PI);
  const draw = (scale: number): Float32Array[][] =>
    lengths.map((length) => Array.from({ length }, () => random.f32(columns, scale)));
  return {
    ...compressor,
    columns,
    ape: random.f32(ratio * columns, 2),
    norm: random.f32(width, 1.5),
    cos: angles.map(Math.cos),
    sin: angles.map(Math.sin),
    k: draw(3),
    z: draw(3),
  };
}

interface State {
  readonly tailK: Tensor;
  readonly tailZ: Tensor;
  readonly entries: Tensor;
}

// Sequence s has state slot SLOTS - 1 - s and pages in an order of their own.
const SLOTS = 4;
const slotOf = (sequence: number): number => SLOTS - 1 - sequence;
const pageOf = (sequence: number, index: number, pagesEach: number): number =>
  1 + index * SLOTS + ((sequence + pagesEach) % SLOTS);

function pagesEach(setup: Setup): number {
  return Math.ceil(Math.max(...setup.k.map((tokens) => tokens.length)) / setup.pageTokens);
}

function makeState(setup: Setup): State {
  const shape = tailShape({ slotCount: SLOTS, ratio: setup.ratio, entryWidth: setup.width });
  const pageCount = 2 + SLOTS * pagesEach(setup);
  return {
    tailK: guardedTensor(device, shape),
    tailZ: guardedTensor(device, shape),
    entries: guardedTensor(device, [pageCount, setup.pageTokens / setup.ratio, setup.width]),
  };
}

/** Run one step over `chunks` of [sequence, start, end). */
async function runStep(
  setup: Setup,
  state: State,
  chunks: readonly (readonly [number, number, number])[],
): Promise<void> {
  const pages = pagesEach(setup);
  const step = makeStep(
    device,
    chunks.map(([sequence, start, end]) => ({
      slot: slotOf(sequence),
      start,
      tokens: Array.from({ length: end - start }, () => 0),
      pages: Array.from({ length: pages }, (_, index) => pageOf(sequence, index, pages)),
    })),
  );
  const gather = (source: Float32Array[][]): Tensor => {
    const values = new Float32Array((step.rowCount + 1) * setup.columns).fill(NaN);
    let row = 0;
    for (const [sequence, start, end] of chunks) {
      for (let t = start; t < end; t += 1) values.set(source[sequence]![t]!, setup.columns * row++);
    }
    return f32Tensor(device, [step.rowCount + 1, setup.columns], values);
  };
  const positions = setup.cos.length / setup.pairs;
  await runOnDevice(device, (recorder) => {
    compress(recorder, {
      k: gather(setup.k),
      z: gather(setup.z),
      ape: f32Tensor(device, [setup.ratio, setup.columns], setup.ape),
      norm: f32Tensor(device, [setup.width], setup.norm),
      ...state,
      cos: f32Tensor(device, [positions, setup.pairs], setup.cos),
      sin: f32Tensor(device, [positions, setup.pairs], setup.sin),
      rows: step.rows,
      sequences: step.sequences,
      pageTable: step.pageTable,
      step: step.step,
      ratio: setup.ratio,
      eps: EPS,
      hadamard: setup.hadamard,
      rounding: setup.rounding,
      rowCount: step.rowCount,
    });
  });
}

function expectedEntry(setup: Setup, sequence: number, block: number): number[] {
  const { ratio, width, columns, pairs } = setup;
  const ape = Array.from({ length: ratio }, (_, i) => setup.ape.subarray(i * columns, (i + 1) * columns));
  const pooled = poolBlock(setup.k[sequence]!, setup.z[sequence]!, ape, { block, ratio, width });
  const table = [block * ratio * pairs, (block * ratio + 1) * pairs] as const;
  const rotated = rotate(
    normalise(pooled, setup.norm, EPS),
    setup.cos.subarray(...table),
    setup.sin.subarray(...table),
  );
  return setup.hadamard ? hadamardTransform(rotated) : rotated;
}

/** Every entry of every sequence up to `ends`, and nothing else, is there and right. */
async function assertEntries(setup: Setup, state: State, ends: readonly number[]): Promise<Float32Array> {
  const content = await readF32(device, state.entries);
  const perPage = setup.pageTokens / setup.ratio;
  const written = new Set<number>();
  for (const [sequence, end] of ends.entries()) {
    for (let block = 0; (block + 1) * setup.ratio <= end; block += 1) {
      const page = pageOf(sequence, Math.floor(block / perPage), pagesEach(setup));
      const base = (page * perPage + (block % perPage)) * setup.width;
      written.add(base);
      // Entries are of order 1.5; exp, the sums of up to 128 terms and the norm leave some 1e-6.
      assertClose(
        content.subarray(base, base + setup.width),
        expectedEntry(setup, sequence, block),
        { absolute: 2e-5 },
        `sequence ${sequence} block ${block}`,
      );
    }
  }
  for (let base = 0; base < content.length; base += setup.width) {
    if (!written.has(base)) assertUntouched(content, base, base + setup.width);
  }
  return content;
}

for (const compressor of [
  { ratio: 4, width: 128, pairs: 32, pageTokens: 128, hadamard: false },
  { ratio: 4, width: 64, pairs: 32, pageTokens: 128, hadamard: true },
  { ratio: 128, width: 128, pairs: 32, pageTokens: 128, hadamard: false },
  { ratio: 4, width: 32, pairs: 4, pageTokens: 16, hadamard: false },
  { ratio: 4, width: 16, pairs: 4, pageTokens: 16, hadamard: true },
  { ratio: 16, width: 32, pairs: 4, pageTokens: 16, hadamard: false },
  { ratio: 128, width: 96, pairs: 16, pageTokens: 256, hadamard: false },
] as const) {
  const { ratio, width, pageTokens, hadamard } = compressor;
  const name = `ratio ${ratio}, ${width} dimensions, pages of ${pageTokens}${hadamard ? ', transformed' : ''}`;

  test(`${name}: one chunk emits every complete block`, async () => {
    const length = 2 * ratio + 3;
    const setup = makeSetup(compressor, [length]);
    const state = makeState(setup);
    await runStep(setup, state, [[0, 0, length]]);
    await assertEntries(setup, state, [length]);
  });

  test(`${name}: chunks of several sequences give the bits of whole prompts`, async () => {
    const lengths = [3 * ratio, 2 * ratio + 1, ratio - 1];
    const setup = makeSetup(compressor, lengths);
    const whole = makeState(setup);
    for (const [sequence, length] of lengths.entries()) await runStep(setup, whole, [[sequence, 0, length]]);
    const expected = await assertEntries(setup, whole, lengths);

    const state = makeState(setup);
    const done = [0, 0, 0];
    // Uneven chunks, single rows among them; sequences join and end at different steps.
    for (let step = 0; done.some((end, sequence) => end < lengths[sequence]!); step += 1) {
      const chunks: [number, number, number][] = [];
      for (const sequence of [2, 0, 1]) {
        const size = step % 3 === 0 ? 1 : 1 + random.integer(ratio + 3);
        const end = Math.min(lengths[sequence]!, done[sequence]! + size);
        if (end > done[sequence]! && (step + sequence) % 4 !== 0) {
          chunks.push([sequence, done[sequence]!, end]);
          done[sequence] = end;
        }
      }
      if (chunks.length > 0) await runStep(setup, state, chunks);
    }
    assertSameBits(await assertEntries(setup, state, lengths), expected);
    assertSameBits(await readF32(device, state.tailK), await readF32(device, whole.tailK), 'tailK');
    assertSameBits(await readF32(device, state.tailZ), await readF32(device, whole.tailZ), 'tailZ');
  });
}

test('entries can be handed over row by row, the same bits as in their pages', async () => {
  const setup = makeSetup({ ratio: 4, width: 16, pairs: 4, pageTokens: 16, hadamard: true }, [23]);
  const paged = makeState(setup);
  await runStep(setup, paged, [[0, 0, 23]]);
  const content = await assertEntries(setup, paged, [23]);
  const staged = { ...makeState(setup), entries: guardedTensor(device, [13, 16]) };
  await runStep(setup, staged, [[0, 0, 12]]);
  await runStep(setup, staged, [[0, 12, 23]]);
  const rows = await readF32(device, staged.entries);
  // Rows 3 and 7 were written again by the second step, whose rows are positions 12 to 22.
  const blockOf = new Map([
    [3, 3],
    [7, 4],
    [11, 2],
  ]);
  for (let row = 0; row < 13; row += 1) {
    const block = blockOf.get(row);
    if (block === undefined) {
      assertUntouched(rows, row * 16, (row + 1) * 16);
      continue;
    }
    const base = (pageOf(0, Math.floor(block / 4), pagesEach(setup)) * 4 + (block % 4)) * 16;
    assertSameBits(rows.slice(row * 16, (row + 1) * 16), content.slice(base, base + 16), `row ${row}`);
  }
});

for (const hadamard of [false, true]) {
  test(`${hadamard ? 'index keys' : 'entries'} are rounded where the official runtime rounds them`, async () => {
    const sizes = { ratio: 4, width: 128, pairs: 16, pageTokens: 128, hadamard };
    const setup: Setup = { ...makeSetup(sizes, [40]), rounding: true };
    const state = makeState(setup);
    await runStep(setup, state, [[0, 0, 40]]);
    const content = await readF32(device, state.entries);
    let same = 0;
    for (let block = 0; block < 10; block += 1) {
      const base = (pageOf(0, 0, pagesEach(setup)) * 32 + block) * 128;
      const actual = content.subarray(base, base + 128);
      const expected = officialEntry(setup, block);
      same += expected.filter((value, channel) => value === actual[channel]).length;
      // Entries reach 6; a value on the other side of halfway is one step of e2m1 (e4m3) under the block's scale away.
      assertClose(actual, expected, { absolute: hadamard ? 2 : 0.3 }, `block ${block}`);
      const plain = hadamard ? actual : actual.subarray(0, 96);
      const again = hadamard ? throughBlocks(plain, 'e2m1', 32) : throughBlocks(plain, 'e4m3', 64);
      assertClose(plain, again, {}, 'values of the format');
    }
    assert.ok(same > 0.97 * 1280, `${same} of 1280 values are the expected ones`);
  });
}

/** Entry `block` of sequence 0 with the rounding of appendix A 6, then 5 or 7. */
function officialEntry(setup: Setup, block: number): number[] {
  const { ratio, width, columns, pairs, hadamard } = setup;
  const ape = Array.from({ length: ratio }, (_, i) => setup.ape.subarray(i * columns, (i + 1) * columns));
  const pooled = poolBlock(setup.k[0]!, setup.z[0]!, ape, { block, ratio, width }).map(toBf16);
  const normed = normalise(pooled, setup.norm, EPS).map(toBf16);
  const table = [block * ratio * pairs, (block * ratio + 1) * pairs] as const;
  const rotated = rotate(normed, setup.cos.subarray(...table), setup.sin.subarray(...table)).map(toBf16);
  if (hadamard) return throughBlocks(hadamardTransform(rotated).map(toBf16), 'e2m1', 32);
  const plain = width - 2 * pairs;
  return [...throughBlocks(rotated.slice(0, plain), 'e4m3', 64), ...rotated.slice(plain)];
}

test('tails hold k and z plus ape of the last tokens at their position modulo the ring', async () => {
  const setup = makeSetup({ ratio: 4, width: 16, pairs: 4, pageTokens: 16, hadamard: false }, [21]);
  const state = makeState(setup);
  await runStep(setup, state, [[0, 0, 21]]);
  const tailK = await readF32(device, state.tailK);
  const tailZ = await readF32(device, state.tailZ);
  const ring = 8;
  for (let token = 21 - ring; token < 21; token += 1) {
    const base = (slotOf(0) * ring + (token % ring)) * setup.columns;
    const ape = setup.ape.subarray((token % 4) * setup.columns);
    assertClose(tailK.subarray(base, base + setup.columns), setup.k[0]![token]!, {}, `k of ${token}`);
    const z = setup.z[0]![token]!.map((value, i) => value + ape[i]!);
    assertClose(tailZ.subarray(base, base + setup.columns), z, {}, `z of ${token}`);
  }
  assertUntouched(tailK, 0, slotOf(0) * ring * setup.columns);
  assertUntouched(tailZ, 0, slotOf(0) * ring * setup.columns);
});
