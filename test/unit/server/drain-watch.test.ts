import assert from 'node:assert/strict';
import { test } from 'node:test';
import { judgeDrain, readSample, type DrainSample } from '../../../server/operators/drain-watch.ts';

/** One sample a second: what is in decode's transfer queue, and the progress counter. */
function samples(...values: readonly [transfer: number, progress: number][]): DrainSample[] {
  return values.map(([transfer, progress], index) => ({
    atMs: index * 1000,
    held: transfer === 0 ? {} : { 'decode-0 queue transfer': transfer },
    progress,
  }));
}

test('three entries that stay at zero load are a leak', () => {
  assert.equal(judgeDrain(samples([3, 10], [3, 10], [3, 10], [3, 10])), 'leak');
});

test('queues that shrink drain, also where nothing is computed', () => {
  assert.equal(judgeDrain(samples([3, 10], [3, 10], [2, 10], [1, 10])), 'draining');
  assert.equal(judgeDrain(samples([3, 10], [0, 10])), 'drained');
});

test('a cluster that works does not leak', () => {
  assert.equal(judgeDrain(samples([3, 10], [3, 20], [3, 30])), 'draining');
});

test('what shrank and then stands still is a leak', () => {
  assert.equal(judgeDrain(samples([5, 10], [3, 15], [3, 20], [3, 20], [3, 20], [3, 20], [3, 20])), 'leak');
});

test('one sample proves nothing but emptiness', () => {
  assert.equal(judgeDrain(samples([1, 0])), 'draining');
  assert.equal(judgeDrain(samples([0, 0])), 'drained');
});

test('a sample has what is held, by process, and leaves out what is free', () => {
  const page = `# HELP handoff_kv_pages x
# TYPE handoff_kv_pages gauge
handoff_kv_pages{worker="decode-0",state="free"} 90
handoff_kv_pages{worker="decode-0",state="cached"} 4
handoff_kv_pages{worker="decode-0",state="prealloc"} 6
# HELP handoff_queue_requests x
# TYPE handoff_queue_requests gauge
handoff_queue_requests{worker="decode-0",queue="transfer"} 3
handoff_queue_requests{worker="decode-0",queue="running"} 0
# HELP sglang_realtime_tokens_total x
# TYPE sglang_realtime_tokens_total counter
sglang_realtime_tokens_total{worker="decode-0",mode="decode"} 70
sglang_realtime_tokens_total{worker="prefill-0",mode="prefill_compute"} 5
`;
  assert.deepEqual(readSample(page, 9), {
    atMs: 9,
    held: { 'decode-0 queue transfer': 3, 'decode-0 pages prealloc': 6 },
    progress: 75,
  });
  assert.throws(() => readSample('<html>', 0), /does not parse/);
});
