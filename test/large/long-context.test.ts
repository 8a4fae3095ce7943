/** A context of 131072 tokens; see test/support/long-context.ts. About four minutes of processor time on lavapipe. */
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { openTestDevice } from '../support/gpu.ts';
import { assertFlatMemory, openIndexedModel, runLongContext } from '../support/long-context.ts';

const device = await openTestDevice();

test('one ratio-4 layer computes at 131072 tokens what the reference does, in flat memory', async (t) => {
  const run = await runLongContext(await openIndexedModel(device, 131_072), 131_072);
  t.diagnostic(run.words);
  assert.ok(run.worst < 1e-5, `largest difference ${run.worst}`);
  assertFlatMemory(run);
});
