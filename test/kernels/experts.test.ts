import assert from 'node:assert/strict';
import { test } from 'node:test';
import type { Device } from '../../kernels/device.ts';
import { decodeBf16, decodeE2m1, decodeE4m3, decodeE8m0, encodeBf16, type Dtype } from '../../kernels/dtype.ts';
import { allocateExpertScratch, experts, type ExpertFormat, type ExpertWeight } from '../../kernels/experts.ts';
import { throughBlocks, toBf16 } from '../reference/rounding.ts';
import { applyExpert, clampedSwiglu } from '../reference/routing.ts';
import {
  assertClose,
  assertSameBits,
  assertUntouched,
  createTestRandom,
  f32Tensor,
  guardedTensor,
  makePlainStep,
  openTestDevice,
  packedTensor,
  readF32,
  runOnDevice,
  u32Tensor,
} from '../support/gpu.ts';

const device = await openTestDevice();
const random = createTestRandom();

/** A weight as the device holds it and as numbers: [E * parts][rows * columns]. */
interface TestWeight {
  readonly weight: ExpertWeight;
  readonly matrices: Float64Array[];
}

interface Shape {
  readonly experts: number;
  readonly parts: number;
  readonly rows: number;
  readonly columns: number;
}

function makeWeight(format: ExpertFormat, shape: Shape): TestWeight {
  const { experts: count, parts, rows, columns } = shape;
  const matrixCount = count * parts;
  const elements = rows * columns;
  const dtype: Dtype = format === 'mxfp4' || format === 'nvfp4' ? 'e2m1' : format;
  const bits = { f32: 32, bf16: 16, e4m3: 8, mxfp4: 4, nvfp4: 4 }[format];
  const bytes = random.bytes((matrixCount * elements * bits) / 8);
  // Codes are drawn, values follow: every code of the narrow formats occurs.
  if (format === 'f32') new Float32Array(bytes.buffer).set(random.f32(matrixCount * elements, 0.2));
  if (format === 'bf16') new Uint16Array(bytes.buffer).set(random.f32(matrixCount * elements, 0.2).map(encodeBf16));
  if (format === 'e4m3') for (const [i, byte] of bytes.entries()) if ((byte & 127) === 127) bytes[i] = byte & 128;
  const weight: { -readonly [K in keyof ExpertWeight]: ExpertWeight[K] } = {
    format,
    ...shape,
    weight: packedTensor(device, dtype, [count, parts * rows, columns], bytes),
  };
  const element = (index: number): number => {
    if (format === 'f32') return new Float32Array(bytes.buffer)[index]!;
    if (format === 'bf16') return decodeBf16(new Uint16Array(bytes.buffer)[index]!);
    if (format === 'e4m3') return decodeE4m3(bytes[index]!);
    return decodeE2m1(bytes[index >> 1]! >> (4 * (index & 1)));
  };
  let factor: (matrix: number, row: number, column: number) => number = () => 1;
  if (format === 'e4m3') {
    const grid = [Math.ceil(rows / 128), Math.ceil(columns / 128)] as const;
    const scales = Float32Array.from({ length: matrixCount * grid[0] * grid[1] }, () => 2 ** -(9 + random.integer(3)));
    weight.scale = f32Tensor(device, [count, parts * grid[0], grid[1]], scales);
    factor = (matrix, row, column) => scales[(matrix * grid[0] + (row >> 7)) * grid[1] + (column >> 7)]!;
  }
  if (format === 'mxfp4') {
    const scales = random.bytes(matrixCount * rows * (columns / 32)).map((byte) => 122 + (byte % 4));
    weight.scale = packedTensor(device, 'e8m0', [count, parts * rows, columns / 32], scales);
    factor = (matrix, row, column) => decodeE8m0(scales[(matrix * rows + row) * (columns / 32) + (column >> 5)]!);
  }
  if (format === 'nvfp4') {
    const scales = random.bytes(matrixCount * rows * (columns / 16)).map((byte) => byte % 120);
    const second = random.f32(matrixCount, 0.002);
    weight.scale = packedTensor(device, 'e4m3', [count, parts * rows, columns / 16], scales);
    weight.scale2 = f32Tensor(device, [count, parts], second);
    factor = (matrix, row, column) =>
      decodeE4m3(scales[(matrix * rows + row) * (columns / 16) + (column >> 4)]!) * second[matrix]!;
  }
  const matrices = Array.from({ length: matrixCount }, (_, matrix) =>
    Float64Array.from(
      { length: elements },
      (_value, i) => element(matrix * elements + i) * factor(matrix, Math.floor(i / columns), i % columns),
    ),
  );
  return { weight, matrices };
}

interface Layer {
  readonly gateUp: TestWeight;
  readonly down: TestWeight;
  readonly limit: number;
}

interface Input {
  readonly x: Float32Array;
  readonly ids: Uint32Array;
  readonly weights: Float32Array;
  readonly shared: Float32Array;
  readonly rowCount: number;
  readonly chosenCount: number;
}

function makeLayer(
  format: ExpertFormat,
  sizes: { experts: number; hidden: number; width: number; limit: number },
): Layer {
  const { experts: count, hidden, width, limit } = sizes;
  return {
    gateUp: makeWeight(format, { experts: count, parts: 2, rows: hidden, columns: width }),
    down: makeWeight(format, { experts: count, parts: 1, rows: width, columns: hidden }),
    limit,
  };
}

function makeInput(layer: Layer, rowCount: number, chosenCount: number, pick?: (row: number) => number[]): Input {
  const { columns: width, experts: count } = layer.gateUp.weight;
  const choose = (): number[] => {
    const ids = new Set<number>();
    while (ids.size < chosenCount) ids.add(random.integer(count));
    return [...ids];
  };
  const chosen = Array.from({ length: rowCount }, (_, row) =>
    (pick ?? choose)(row).sort((left, right) => left - right),
  );
  return {
    x: random.f32(rowCount * width, 1),
    ids: Uint32Array.from(chosen.flat()),
    weights: random.f32(rowCount * chosenCount, 1),
    shared: random.f32(rowCount * width, 1),
    rowCount,
    chosenCount,
  };
}

/** Rows [start, start + rowCount) of an input. */
function sliceInput(input: Input, width: number, start: number, rowCount: number): Input {
  const { chosenCount } = input;
  return {
    x: input.x.slice(start * width, (start + rowCount) * width),
    ids: input.ids.slice(start * chosenCount, (start + rowCount) * chosenCount),
    weights: input.weights.slice(start * chosenCount, (start + rowCount) * chosenCount),
    shared: input.shared.slice(start * width, (start + rowCount) * width),
    rowCount,
    chosenCount,
  };
}

async function apply(gpu: Device, layer: Layer, input: Input, rounding?: 'bf16' | 'inputs'): Promise<Float32Array> {
  const { rows: hiddenWidth, columns: width, experts: expertCount } = layer.gateUp.weight;
  const { rowCount, chosenCount } = input;
  const maxRows = rowCount + 2;
  const out = guardedTensor(gpu, [maxRows, width]);
  const step = makePlainStep(gpu, rowCount);
  await runOnDevice(gpu, (recorder) => {
    experts(recorder, {
      x: f32Tensor(gpu, [rowCount, width], input.x),
      experts: u32Tensor(gpu, [rowCount, chosenCount], input.ids),
      weights: f32Tensor(gpu, [rowCount, chosenCount], input.weights),
      gateUp: layer.gateUp.weight,
      down: layer.down.weight,
      shared: f32Tensor(gpu, [rowCount, width], input.shared),
      out,
      step: step.step,
      scratch: allocateExpertScratch(gpu, { maxRows, chosenCount, expertCount, hiddenWidth, width }),
      limit: layer.limit,
      rowCount,
      rounding,
    });
  });
  const values = await readF32(gpu, out);
  assertUntouched(values, rowCount * width);
  return values.slice(0, rowCount * width);
}

function expectedRow(layer: Layer, input: Input, row: number): number[] {
  const { rows: hiddenWidth, columns: width } = layer.gateUp.weight;
  const x = input.x.subarray(row * width, (row + 1) * width);
  const sum = [...input.shared.subarray(row * width, (row + 1) * width)];
  for (let choice = 0; choice < input.chosenCount; choice += 1) {
    const pair = row * input.chosenCount + choice;
    const id = input.ids[pair]!;
    const matrices = {
      gate: layer.gateUp.matrices[2 * id]!,
      up: layer.gateUp.matrices[2 * id + 1]!,
      down: layer.down.matrices[id]!,
    };
    const out = applyExpert(x, matrices, { hiddenWidth, weight: input.weights[pair]!, limit: layer.limit });
    for (let dim = 0; dim < width; dim += 1) sum[dim]! += out[dim]!;
  }
  return sum;
}

function assertRows(layer: Layer, input: Input, actual: Float32Array): void {
  const width = layer.gateUp.weight.columns;
  for (let row = 0; row < input.rowCount; row += 1) {
    const expected = expectedRow(layer, input, row);
    // Two chains of f32 additions, 256 long at most, with inputs of order 1: errors of some 1e-6 of the largest output.
    const largest = Math.max(1, ...expected.map(Math.abs));
    assertClose(actual.subarray(row * width, (row + 1) * width), expected, { absolute: 1e-5 * largest }, `row ${row}`);
  }
}

const NANO = { experts: 32, hidden: 64, width: 256, limit: 10 };

for (const [format, sizes, chosenCount, rowCounts] of [
  ['mxfp4', NANO, 6, [1, 3, 23]],
  ['nvfp4', NANO, 6, [1, 3, 23]],
  ['e4m3', { experts: 8, hidden: 132, width: 260, limit: 10 }, 2, [1, 9]],
  ['bf16', { experts: 40, hidden: 96, width: 160, limit: 10 }, 6, [1, 13]],
  ['f32', { experts: 8, hidden: 32, width: 64, limit: 0.5 }, 2, [1, 12]],
  ['f32', { experts: 3, hidden: 7, width: 13, limit: 1 }, 2, [1, 5]],
] as const) {
  for (const rowCount of rowCounts) {
    test(`${format} experts of ${sizes.width} x ${sizes.hidden} serve ${rowCount} rows of ${chosenCount} of ${sizes.experts}`, async () => {
      const layer = makeLayer(format, sizes);
      const input = makeInput(layer, rowCount, chosenCount);
      assertRows(layer, input, await apply(device, layer, input));
    });
  }
}

test('all rows on the same experts, and experts without rows', async () => {
  const layer = makeLayer('f32', { experts: 6, hidden: 8, width: 16, limit: 10 });
  for (const rowCount of [3, 4, 5, 16]) {
    const input = makeInput(layer, rowCount, 2, () => [5, 1]);
    assertRows(layer, input, await apply(device, layer, input));
  }
});

for (const format of ['mxfp4', 'bf16'] as const) {
  test(`a row of ${format} experts has the same bits alone, in a small batch and in a large one`, async () => {
    const layer = makeLayer(format, NANO);
    const { width } = NANO;
    const input = makeInput(layer, 40, 6);
    const all = await apply(device, layer, input);
    for (const [start, rowCount] of [
      [0, 1],
      [17, 1],
      [39, 1],
      [3, 4],
      [20, 19],
    ] as const) {
      const part = await apply(device, layer, sliceInput(input, width, start, rowCount));
      assertSameBits(part, all.slice(start * width, (start + rowCount) * width), `rows from ${start}`);
    }
  });
}

for (const rounding of ['bf16', 'inputs'] as const) {
  for (const rowCount of [3, 9]) {
    test(`${rowCount} rows are rounded where the official runtime does: ${rounding}`, async () => {
      // Multiples of 1/8: the first products are exact sums, so that only exp may come out on another side of halfway.
      const eighths = (count: number, seed: number): Float32Array =>
        Float32Array.from({ length: count }, (_, index) => (((index + seed) * 7919) % 31) / 8 - 2);
      const [count, hidden, width, chosenCount] = [3, 150, 6, 2];
      const [gate, up, down] = [eighths(900, 1), eighths(900, 5), eighths(900, 9)];
      const matrices = (id: number): Float64Array[] =>
        [gate, up, down].map((all) => Float64Array.from(all, (v) => v + id / 4));
      const parts = [0, 1, 2].map(matrices);
      const weightOf = (matrixList: Float64Array[], shape: Shape): TestWeight => ({
        matrices: matrixList,
        weight: {
          format: 'f32',
          ...shape,
          weight: f32Tensor(
            device,
            [shape.experts, shape.parts * shape.rows, shape.columns],
            matrixList.flatMap((matrix) => [...matrix]),
          ),
        },
      });
      const layer: Layer = {
        gateUp: weightOf(
          parts.flatMap(([g, u]) => [g!, u!]),
          { experts: count, parts: 2, rows: hidden, columns: width },
        ),
        down: weightOf(
          parts.map(([, , d]) => d!),
          { experts: count, parts: 1, rows: width, columns: hidden },
        ),
        limit: 3,
      };
      const input: Input = {
        x: eighths(rowCount * width, 3),
        ids: Uint32Array.from({ length: rowCount * 2 }, (_, index) => (index % 2 === 0 ? 0 : 1 + ((index >> 1) % 2))),
        weights: Float32Array.from({ length: rowCount * 2 }, (_, index) => 0.25 * (1 + (index % 3))),
        shared: eighths(rowCount * width, 11),
        rowCount,
        chosenCount,
      };
      const actual = await apply(device, layer, input, rounding);
      let same = 0;
      for (let row = 0; row < rowCount; row += 1) {
        const x = input.x.subarray(row * width, (row + 1) * width);
        const sum = [...input.shared.subarray(row * width, (row + 1) * width)];
        for (let choice = 0; choice < chosenCount; choice += 1) {
          const pair = row * chosenCount + choice;
          const [g, u, d] = parts[input.ids[pair]!]!;
          const dot = (matrix: Float64Array, n: number, vector: ArrayLike<number>): number =>
            toBf16(Array.from(vector).reduce((total, value, k) => total + matrix[n * vector.length + k]! * value, 0));
          let layerValues = Array.from({ length: hidden }, (_, n) =>
            toBf16(clampedSwiglu(dot(g!, n, x), dot(u!, n, x), layer.limit) * input.weights[pair]!),
          );
          if (rounding === 'inputs') layerValues = throughBlocks(layerValues, 'e4m3', 128);
          for (let dim = 0; dim < width; dim += 1) sum[dim]! += dot(d!, dim, layerValues);
        }
        const expected = sum.map(toBf16);
        const own = actual.subarray(row * width, (row + 1) * width);
        same += expected.filter((value, dim) => value === own[dim]).length;
        // One hidden value on the other side of halfway moves an output by at most 2^-8 of 4 · 2 (e4m3: 2^-4).
        assertClose(own, expected, { absolute: rounding === 'inputs' ? 1 : 0.1, relative: 2 ** -8 }, `row ${row}`);
      }
      assert.ok(same >= 0.9 * rowCount * width, `${same} of ${rowCount * width} outputs are the expected bf16`);
    });
  }
}

test('columns that do not fill the scale blocks of a format are refused', async () => {
  const layer = makeLayer('mxfp4', { experts: 2, hidden: 32, width: 64, limit: 10 });
  const odd = {
    ...layer,
    down: { ...layer.down, weight: { ...layer.down.weight, format: 'mxfp4', columns: 40 } },
  } as Layer;
  await assert.rejects(apply(device, odd, makeInput(layer, 1, 1)), /40/);
});
