import assert from 'node:assert/strict';
import { test } from 'node:test';
import { gate } from '../../kernels/gate.ts';
import { chooseExperts, weighExperts } from '../reference/routing.ts';
import {
  assertClose,
  assertUntouched,
  createTestRandom,
  f32Tensor,
  guardedTensor,
  makePlainStep,
  makeStep,
  openTestDevice,
  readF32,
  readU32,
  runOnDevice,
  u32Tensor,
} from '../support/gpu.ts';

const device = await openTestDevice();
const random = createTestRandom();

// exp, sqrt and divide may each be a few ulp off, and weights are a quotient of sums of K scores.
const TOLERANCE = { absolute: 1e-7, relative: 2e-6 };
const SCALE = 1.5;

async function route(args: {
  logits: Float32Array;
  bias?: Float32Array;
  table?: number[];
  tokens?: number[];
  expertCount: number;
  chosenCount: number;
}): Promise<{ ids: Uint32Array; weights: Float32Array; rowCount: number }> {
  const { expertCount, chosenCount } = args;
  const rowCount = args.logits.length / expertCount;
  const step = args.tokens ? makeStep(device, [{ start: 0, tokens: args.tokens }]) : makePlainStep(device, rowCount);
  const experts = guardedTensor(device, [rowCount + 2, chosenCount], 'u32');
  const weights = guardedTensor(device, [rowCount + 2, chosenCount]);
  await runOnDevice(device, (recorder) => {
    gate(recorder, {
      logits: f32Tensor(device, [rowCount, expertCount], args.logits),
      bias: args.bias && f32Tensor(device, [expertCount], args.bias),
      tokenExperts: args.table && u32Tensor(device, [args.table.length / chosenCount, chosenCount], args.table),
      rows: step.rows,
      step: step.step,
      experts,
      weights,
      scale: SCALE,
      rowCount,
    });
  });
  const ids = await readU32(device, experts);
  const weightValues = await readF32(device, weights);
  assertUntouched(ids, rowCount * chosenCount);
  assertUntouched(weightValues, rowCount * chosenCount);
  return { ids, weights: weightValues, rowCount };
}

for (const [rowCount, expertCount, chosenCount] of [
  [1, 32, 6],
  [65, 40, 6],
  [3, 8, 2],
  [5, 256, 6],
  [2, 1, 1],
  [7, 5, 5],
] as const) {
  test(`${rowCount} rows choose ${chosenCount} of ${expertCount} experts by score and bias`, async () => {
    const logits = random.f32(rowCount * expertCount, 4);
    const bias = random.f32(expertCount, 0.3);
    const result = await route({ logits, bias, expertCount, chosenCount });
    for (let row = 0; row < rowCount; row += 1) {
      const own = [...logits.subarray(row * expertCount, (row + 1) * expertCount)];
      const chosen = chooseExperts(own, [...bias], chosenCount);
      const range = [row * chosenCount, (row + 1) * chosenCount] as const;
      assert.deepEqual([...result.ids.subarray(...range)], chosen, `row ${row}`);
      assertClose(result.weights.subarray(...range), weighExperts(own, chosen, SCALE), TOLERANCE, `row ${row}`);
    }
  });
}

test('the lower id wins a tie, and ids ascend', async () => {
  const result = await route({
    logits: new Float32Array([1, 3, 1, 3, 1, 1]),
    bias: new Float32Array(6),
    expertCount: 6,
    chosenCount: 4,
  });
  assert.deepEqual([...result.ids.subarray(0, 4)], [0, 1, 2, 3]);
});

test('a bias moves the choice and not the weights', async () => {
  const logits = new Float32Array([5, 0, 0, -2]);
  const result = await route({ logits, bias: new Float32Array([0, 0, 0, 100]), expertCount: 4, chosenCount: 2 });
  assert.deepEqual([...result.ids.subarray(0, 2)], [0, 3]);
  assertClose(result.weights.subarray(0, 2), weighExperts([...logits], [0, 3], SCALE), TOLERANCE);
});

test('hash-routed rows take the experts of their token, sorted, weighed by score', async () => {
  const table = [7, 3, 0, 1, 5, 2];
  const tokens = [2, 0, 1, 2];
  const logits = random.f32(tokens.length * 8, 3);
  const result = await route({ logits, table, tokens, expertCount: 8, chosenCount: 2 });
  const expected = [
    [2, 5],
    [3, 7],
    [0, 1],
    [2, 5],
  ];
  for (const [row, chosen] of expected.entries()) {
    assert.deepEqual([...result.ids.subarray(row * 2, row * 2 + 2)], chosen);
    const own = [...logits.subarray(row * 8, row * 8 + 8)];
    assertClose(result.weights.subarray(row * 2, row * 2 + 2), weighExperts(own, chosen, SCALE), TOLERANCE);
  }
});

test('scores are sqrt(softplus) over the whole range', async () => {
  // Published values; the weight of logit i against logit 0 is score(i) / (score(0) + score(i)) * scale.
  const published = [
    [-10, 0.00673787],
    [-2, 0.35626958],
    [0, 0.83255461],
    [1.5, 1.30438234],
    [8, 2.82848642],
    [25, 5],
  ] as const;
  const logits = Float32Array.from(published.flatMap(([logit]) => [0, logit]));
  const result = await route({ logits, bias: new Float32Array(2), expertCount: 2, chosenCount: 2 });
  for (const [row, [, score]] of published.entries()) {
    assertClose([result.weights[row * 2 + 1]!], [(score / (score + 0.83255461)) * SCALE], { relative: 2e-6 });
  }
});

test('NaN logits still give valid expert ids', async () => {
  const result = await route({
    logits: new Float32Array(8).fill(NaN),
    bias: new Float32Array(8),
    expertCount: 8,
    chosenCount: 3,
  });
  assert.ok(
    result.ids.subarray(0, 3).every((id) => id < 8),
    `ids ${result.ids.subarray(0, 3).join(', ')}`,
  );
});

test('a gate with both a bias and a token table, or with neither, is refused', async () => {
  const args = { logits: new Float32Array(4), expertCount: 4, chosenCount: 1 };
  await assert.rejects(route({ ...args, bias: new Float32Array(4), table: [0] }), /either a bias or a token table/);
  await assert.rejects(route(args), /either a bias or a token table/);
});
