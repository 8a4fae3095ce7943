import { test } from 'node:test';
import { hyperHead, hyperPost, hyperPre } from '../../kernels/hyper-connection.ts';
import { hyperFactor, hyperGates } from '../reference/hyper-connection.ts';
import {
  assertClose,
  assertSameBits,
  assertUntouched,
  createTestRandom,
  f32Tensor,
  guardedTensor,
  guardedTensorFrom,
  makePlainStep,
  openTestDevice,
  readF32,
  runOnDevice,
  u32Tensor,
} from '../support/gpu.ts';

const device = await openTestDevice();
const random = createTestRandom();

const config = { normEps: 1e-6, eps: 1e-6, iterations: 20 };

// Sigmoids and softmax of logits up to about 10 (exp is off by up to 25 units in the last place there), damped by the
// Sinkhorn iterations; sums of up to 600 squares.
const tolerance = { relative: 1e-4, absolute: 1e-6 };

interface Site {
  readonly streams: number;
  readonly columns: number;
  readonly base: Float32Array;
  readonly scale: Float32Array;
}

function randomSite(streams: number, columns: number): Site {
  const base = random.f32((2 + streams) * streams);
  return { streams, columns, base, scale: Float32Array.from([0.7, 0.5, 1.3]) };
}

async function runPre(
  site: Site,
  x: Float32Array,
  mix: Float32Array,
): Promise<{ y: Float32Array; post: Float32Array; comb: Float32Array }> {
  const { streams: n, columns } = site;
  const rowCount = mix.length / ((2 + n) * n);
  const y = guardedTensor(device, [rowCount + 2, columns]);
  const post = guardedTensor(device, [rowCount + 2, n]);
  const comb = guardedTensor(device, [rowCount + 2, n, n]);
  const { step } = makePlainStep(device, rowCount);
  const tensors = {
    streams: f32Tensor(device, [rowCount, n, columns], x),
    mix: f32Tensor(device, [rowCount, (2 + n) * n], mix),
    base: f32Tensor(device, [(2 + n) * n], site.base),
    scale: f32Tensor(device, [3], site.scale),
  };
  await runOnDevice(device, (recorder) =>
    hyperPre(recorder, { ...tensors, y, post, comb, config, step, rowCount: rowCount + 1 }),
  );
  const [yValues, postValues, combValues] = [
    await readF32(device, y),
    await readF32(device, post),
    await readF32(device, comb),
  ];
  assertUntouched(yValues, rowCount * columns);
  assertUntouched(postValues, rowCount * n);
  assertUntouched(combValues, rowCount * n * n);
  return {
    y: yValues.slice(0, rowCount * columns),
    post: postValues.slice(0, rowCount * n),
    comb: combValues.slice(0, rowCount * n * n),
  };
}

test('pre: the vectors of the specification', async () => {
  const base = Float32Array.from({ length: 24 }, (_, k) => 0.1 * (((7 * k) % 5) - 2));
  const site = { streams: 4, columns: 2, base, scale: Float32Array.from([1, 0.5, 2]) };
  // Streams of root mean square 1 leave the mixing logits as they are, but for eps.
  const x = Float32Array.from([1, -1, 1, 1, -1, -1, 1, -1]);
  const mix = Float32Array.from(
    { length: 24 },
    (_, k) => 1.5 * Math.sin(1.7 * k + 0.3) * Math.sqrt(1 + config.normEps),
  );
  const { y, post, comb } = await runPre(site, x, mix);
  const pre = [0.56052287, 0.7964013, 0.35554576, 0.22112181];
  const bound = { relative: 1e-5 };
  assertClose(post, [1.3125449, 1.1187806, 0.68158174, 0.96567751], bound, 'post');
  assertClose(
    comb,
    [
      0.24923171, 0.69468243, 0.026503466, 0.029580801, 0.53909461, 0.20678634, 0.090413174, 0.16370465, 0.18943834,
      0.078833147, 0.20855396, 0.5231738, 0.022234344, 0.019697089, 0.6745284, 0.28353975,
    ],
    bound,
    'comb',
  );
  const column = (index: number): number => pre.reduce((sum, gate, i) => sum + gate * x[2 * i + index]!, 0);
  assertClose(y, [column(0), column(1)], bound, 'y');
});

for (const [rowCount, n, columns] of [
  [1, 4, 64],
  [3, 4, 33],
  [11, 4, 150],
  [8, 2, 9],
] as const) {
  test(`pre: ${rowCount} rows of ${n} streams of ${columns} agree with f64`, async () => {
    const site = randomSite(n, columns);
    const x = random.f32(rowCount * n * columns, 5);
    const width = (2 + n) * n;
    const mix = random.f32(rowCount * width, 12);
    const { y, post, comb } = await runPre(site, x, mix);
    for (let row = 0; row < rowCount; row += 1) {
      const streams = x.subarray(row * n * columns, (row + 1) * n * columns);
      const factor = hyperFactor(streams, config.normEps);
      const m = Float64Array.from(mix.subarray(row * width, (row + 1) * width), (value) => value * factor);
      const gates = hyperGates(m, site.base, site.scale, { streams: n, ...config });
      assertClose(post.subarray(row * n), gates.post, tolerance, `post of row ${row}`);
      assertClose(comb.subarray(row * n * n), gates.comb.flat(), tolerance, `comb of row ${row}`);
      const mixed = Array.from({ length: columns }, (_, c) =>
        gates.pre.reduce((sum, gate, i) => sum + gate * streams[i * columns + c]!, 0),
      );
      assertClose(y.subarray(row * columns), mixed, { absolute: 1e-4 }, `y of row ${row}`);
    }
  });
}

test('pre: a row has the same bits alone and in a step of eleven', async () => {
  const site = randomSite(4, 40);
  const x = random.f32(11 * 160);
  const mix = random.f32(11 * 24);
  const together = await runPre(site, x, mix);
  for (const row of [0, 5, 10]) {
    const alone = await runPre(site, x.slice(row * 160, (row + 1) * 160), mix.slice(row * 24, (row + 1) * 24));
    assertSameBits(alone.y, together.y.slice(row * 40, (row + 1) * 40), 'y');
    assertSameBits(alone.post, together.post.slice(row * 4, (row + 1) * 4), 'post');
    assertSameBits(alone.comb, together.comb.slice(row * 16, (row + 1) * 16), 'comb');
  }
});

for (const [rowCount, n, columns] of [
  [1, 4, 3],
  [3, 4, 300],
  [5, 2, 17],
] as const) {
  test(`post: ${rowCount} rows of ${n} streams of ${columns} are mixed from source to destination`, async () => {
    const x = random.f32(rowCount * n * columns);
    const block = random.f32(rowCount * columns);
    const gates = random.f32(rowCount * n);
    const weights = random.f32(rowCount * n * n);
    const streams = guardedTensorFrom(device, [rowCount + 2, n, columns], x);
    const { step } = makePlainStep(device, rowCount);
    const tensors = {
      y: f32Tensor(device, [rowCount, columns], block),
      post: f32Tensor(device, [rowCount, n], gates),
      comb: f32Tensor(device, [rowCount, n, n], weights),
    };
    await runOnDevice(device, (recorder) => hyperPost(recorder, { streams, ...tensors, step, rowCount: rowCount + 1 }));
    const result = await readF32(device, streams);
    const expected = Float64Array.from(x, (_, index) => {
      const row = Math.floor(index / (n * columns));
      const j = Math.floor(index / columns) % n;
      const c = index % columns;
      let value = gates[row * n + j]! * block[row * columns + c]!;
      for (let i = 0; i < n; i += 1) value += weights[(row * n + i) * n + j]! * x[(row * n + i) * columns + c]!;
      return value;
    });
    // n + 1 products of numbers up to 1, summed: 2n + 1 roundings of numbers up to n + 1.
    assertClose(result, expected, { absolute: (2 * n + 1) * (n + 1) * 2 ** -24 });
    assertUntouched(result, x.length);
  });
}

test('head: only the sampled rows, in their order', async () => {
  const [rowCount, n, columns] = [12, 4, 21];
  const sampledRows = [11, 0, 4, 4, 7, 2, 3, 9, 10];
  const x = random.f32(rowCount * n * columns, 2);
  const mix = random.f32(rowCount * n, 3);
  const base = random.f32(n);
  const scale = Float32Array.from([0.8]);
  const out = guardedTensor(device, [sampledRows.length + 2, columns]);
  const tensors = {
    streams: f32Tensor(device, [rowCount, n, columns], x),
    mix: f32Tensor(device, [rowCount, n], mix),
    base: f32Tensor(device, [n], base),
    scale: f32Tensor(device, [1], scale),
    sampled: u32Tensor(device, [rowCount], sampledRows),
    step: u32Tensor(device, [4], [rowCount, 1, sampledRows.length, 0]),
  };
  await runOnDevice(device, (recorder) =>
    hyperHead(recorder, { ...tensors, out, config, sampledCount: sampledRows.length + 1 }),
  );
  const result = await readF32(device, out);
  for (const [index, row] of sampledRows.entries()) {
    const streams = x.subarray(row * n * columns, (row + 1) * n * columns);
    const factor = hyperFactor(streams, config.normEps);
    const expected = Array.from({ length: columns }, (_, c) => {
      let value = 0;
      for (let i = 0; i < n; i += 1) {
        const gate = 1 / (1 + Math.exp(-(mix[row * n + i]! * factor * scale[0]! + base[i]!))) + config.eps;
        value += gate * streams[i * columns + c]!;
      }
      return value;
    });
    assertClose(result.subarray(index * columns), expected, { absolute: 1e-5 }, `sampled ${index}`);
  }
  assertUntouched(result, sampledRows.length * columns);
});
