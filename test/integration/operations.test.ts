/** What an operator sees: /metrics that lints, /health, a silent worker, a second start, and a quick end. */
import assert from 'node:assert/strict';
import { createServer } from 'node:http';
import { once } from 'node:events';
import { test } from 'node:test';
import { inspect } from 'node:util';
import { readMetrics, startCluster, startHandoff, sumOf, type Cluster } from '../support/cluster.ts';
import { ensurePromtool, lintMetrics } from '../support/programs.ts';
import { complete } from '../support/stream.ts';

test('a running cluster', async (t) => {
  const cluster: Cluster = await startCluster(['--prefill', '2', '--decode', '2']);
  try {
    await complete(cluster.url, cluster.model, { prompt: [0, 40, 41], maxTokens: 3, ignoreEos: true });

    await t.test('/metrics is clean for promtool', (t) => {
      // Without root and apt there is no linter to ask; CI has both.
      if (ensurePromtool() === null) return t.skip('promtool is not installed and cannot be (needs root and apt)');
      return fetch(`${cluster.url}/metrics`)
        .then((response) => response.text())
        .then((page) => assert.equal(lintMetrics(page), ''));
    });

    await t.test('/metrics has the series of every worker, told apart by a label', async () => {
      const samples = await readMetrics(cluster.url);
      for (const worker of ['prefill-0', 'prefill-1', 'decode-0', 'decode-1']) {
        assert.equal(sumOf(samples, 'handoff_worker_up', { worker }), 1);
        assert.ok(
          samples.some((sample) => sample.name === 'handoff_kv_pages' && sample.labels.worker === worker),
          worker,
        );
      }
      assert.equal(sumOf(samples, 'sglang_realtime_tokens_total', { mode: 'prefill_compute' }), 3);
      assert.equal(sumOf(samples, 'sglang_queue_time_seconds_count'), 1);
    });

    await t.test('a request makes every decode worker report where it stands', async () => {
      const health = await fetch(`${cluster.url}/health`);
      assert.equal(health.status, 200);
    });

    await t.test('SIGTERM ends every process within 5 s', async () => {
      const startMs = performance.now();
      assert.equal(await cluster.stop(), 0);
      assert.ok(performance.now() - startMs < 5000, `took ${performance.now() - startMs} ms`);
      await assert.rejects(fetch(`${cluster.url}/health`));
    });
  } finally {
    await cluster.stop();
  }
});

test('a busy port is named with the flag that changes it', async () => {
  const server = createServer().listen(0, '127.0.0.1');
  await once(server, 'listening');
  const address = server.address();
  assert.ok(address !== null && typeof address === 'object', inspect(address));
  const handoff = startHandoff(['all', '--port', String(address.port), '--prefill-port', '0', '--decode-port', '0']);
  try {
    await handoff.printed(new RegExp(`port ${address.port} .*in use.*--port`), 60_000);
    await once(handoff.child, 'exit');
    assert.notEqual(handoff.child.exitCode, 0);
  } finally {
    server.close();
    await handoff.stop();
  }
});

test('a wrong model directory is named at once', async () => {
  const handoff = startHandoff(['prefill', '--model', '/nonexistent/checkpoint']);
  try {
    await handoff.printed(/\/nonexistent\/checkpoint/, 30_000);
  } finally {
    await handoff.stop();
  }
  assert.notEqual(handoff.child.exitCode, 0);
});
