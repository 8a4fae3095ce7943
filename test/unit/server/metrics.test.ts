import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { createServer } from 'node:http';
import type { RequestListener } from 'node:http';
import type { AddressInfo } from 'node:net';
import { test } from 'node:test';
import type { TestContext } from 'node:test';
import {
  createRouterMetrics,
  createWorkerMetrics,
  mergeExpositions,
  parseExposition,
  withColonAliases,
} from '../../../server/metrics.ts';
import type { BuildInfo } from '../../../server/operators/build-info.ts';
import type { RouterMetrics, WorkerMetrics, WorkerSights, WorkerStats, WorkerTarget } from '../../../server/metrics.ts';
import { REASONS } from '../../../transfer/messages.ts';

const idle: WorkerStats = {
  queues: { prealloc: 0, transfer: 0, waiting: 0, running: 0, retracted: 0, inflight: 0, unwinding: 0 },
  pages: { free: 100, cached: 0, running: 0, prealloc: 0, inflight: 0, quarantined: 0 },
  slots: { free: 64, used: 0 },
  sentBytesTotal: 0,
  receivedBytesTotal: 0,
  inFlightBytes: 0,
  hostBytes: 0,
  retractionsTotal: 0,
  headroomTokens: 0,
  drafts: { rows: 0, drafts: 0, rightDrafts: 0 },
  prefilledTokensTotal: 0,
  cachedTokensTotal: 0,
  tier: { heldBytes: 0, fetchedPages: 0, damaged: 0 },
  prefixes: { hits: 0, misses: 0, evictedPages: 0, evictedStates: 0, statesFree: 0, statesHeld: 0 },
  generatedTokensTotal: 0,
  bootstrapFailuresTotal: 0,
  transferFailuresTotal: 0,
  checksumFailuresTotal: 0,
  droppedMessagesTotal: { late: 0, duplicate: 0, unknown: 0, stale_epoch: 0, protocol: 0, ignored: 0 },
  unacknowledged: { peer: 0, router: 0 },
  tombstones: 0,
  ledgerViolationsTotal: 0,
};

const build: BuildInfo = {
  version: '0.1.0',
  commit: null,
  codeDigest: 'c0de',
  code: 'clean',
  modelDigest: 'f00d',
  checkpoint: 'external',
};

const quiet: WorkerSights = {
  oldest: [],
  peers: [],
  reaperAgeSeconds: 0,
  links: { queuedBytes: 0, droppedTotal: 0, rejectedTotal: 0 },
  oldestUnacknowledgedSeconds: 0,
  auditAgeSeconds: 0,
  conservationFaults: 0,
};

function workerMetrics(t: TestContext, role: 'prefill' | 'decode', stats: () => WorkerStats): WorkerMetrics {
  const metrics = createWorkerMetrics({
    role,
    modelName: 'nano',
    adapter: 'test "adapter"',
    pageTokens: 128,
    build,
    stats,
    sights: () => quiet,
  });
  t.after(() => metrics.close());
  return metrics;
}

function routerMetrics(
  t: TestContext,
  workers: readonly WorkerTarget[],
  // A worker that shares a busy machine with this test must not look silent.
  options: { scrapeCapMs?: number } = { scrapeCapMs: 10_000 },
): RouterMetrics {
  const stats = () => ({ queued: 2, running: 5, unwinding: 1 });
  const metrics = createRouterMetrics({
    modelName: 'nano',
    build,
    stats,
    sights: () => quiet,
    workers: () => workers,
    ...options,
  });
  t.after(() => metrics.close());
  return metrics;
}

/** Serve on a free port until the test ends; returns the base URL. */
async function serve(t: TestContext, answer: RequestListener): Promise<string> {
  const server = createServer(answer);
  await once(server.listen(0, '127.0.0.1'), 'listening');
  t.after(() => {
    server.close();
    server.closeAllConnections();
  });
  return `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
}

async function serveMetrics(t: TestContext, metrics: WorkerMetrics): Promise<string> {
  return serve(t, (_, response) => void metrics.text().then((text) => response.end(text)));
}

/** The value of the one series whose line starts with `name` and has all of `labels`. */
function valueOf(text: string, name: string, ...labels: string[]): number {
  const lines = text
    .split('\n')
    .filter(
      (line) => (line.startsWith(`${name}{`) || line.startsWith(`${name} `)) && labels.every((l) => line.includes(l)),
    );
  assert.equal(lines.length, 1, `expected one series ${name} ${labels.join(' ')}, found:\n${lines.join('\n')}`);
  return Number(lines[0]!.split(' ').at(-1));
}

/** What `promtool check metrics` would say, as far as plain code can: form, order, names, units and types. */
function faultsOf(text: string): string[] {
  const families = parseExposition(text);
  if (families === null) return ['does not parse'];
  const faults: string[] = [];
  for (const keyword of ['HELP', 'TYPE'] as const) {
    const names = [...text.matchAll(new RegExp(`^# ${keyword} (\\S+)`, 'gm'))].map((match) => match[1]!);
    if (new Set(names).size !== names.length) faults.push(`a ${keyword} line twice`);
  }
  const series = text.split('\n').filter((line) => line !== '' && !line.startsWith('#'));
  const identities = series.map((line) => line.slice(0, line.lastIndexOf(' ')));
  if (new Set(identities).size !== identities.length) faults.push('a series twice');
  for (const { name, help, type } of families) {
    if (help === '') faults.push(`${name}: no help`);
    if (!/^[a-z][a-z0-9_]*$/.test(name)) faults.push(`${name}: not snake case`);
    if ((type === 'counter') !== name.endsWith('_total')) faults.push(`${name}: ${type} and _total do not go together`);
    if (/_(count|sum|bucket|gauge|counter|histogram|summary)(_|$)/.test(name)) faults.push(`${name}: reserved word`);
    if (/_(ms|us|ns|s|sec|kb|mb|gb|b|milliseconds|kilobytes)(_|$)/.test(name)) faults.push(`${name}: not a base unit`);
  }
  return faults;
}

function assertClean(t: TestContext, text: string): void {
  assert.deepEqual(faultsOf(text), []);
  const lint = spawnSync('promtool', ['check', 'metrics'], { input: text, encoding: 'utf8' });
  if (lint.error !== undefined) t.diagnostic('promtool (Debian package prometheus) is not here: own checks only');
  else assert.equal(`${lint.status} ${lint.stdout}${lint.stderr}`, '0 ');
}

test('ages, peers, reaper and build of a worker are shown; a peer that is forgotten has no series', async (t) => {
  let sights: WorkerSights = quiet;
  const options = {
    role: 'decode',
    modelName: 'nano',
    adapter: 'a',
    pageTokens: 128,
    build,
    stats: () => idle,
  } as const;
  const metrics = createWorkerMetrics({ ...options, sights: () => sights });
  t.after(() => metrics.close());
  const age = 'handoff_oldest_age_seconds';
  assert.equal(valueOf(await metrics.text(), age, 'queue="transfer"', 'state="transferring"'), 0);

  const silent = { name: 'prefill@a:8100', role: 'prefill', epoch: 'e2', isUp: false, silenceSeconds: 7.5 };
  sights = {
    oldest: [{ queue: 'transfer', state: 'transferring', seconds: 12.5 }],
    peers: [{ ...silent, epochChanges: 1, creditBytes: 4096 }],
    reaperAgeSeconds: 0.05,
    links: { queuedBytes: 9, droppedTotal: 8, rejectedTotal: 7 },
    oldestUnacknowledgedSeconds: 3,
    auditAgeSeconds: 0.5,
    conservationFaults: 2,
  };
  const text = await metrics.text();
  assertClean(t, text);
  const peer = 'peer="prefill@a:8100"';
  const expected: [string, string[], number][] = [
    [age, ['queue="transfer"', 'state="transferring"'], 12.5],
    [age, ['queue="running"'], 0],
    ['handoff_peer_up', [peer], 0],
    ['handoff_peer_silence_seconds', [peer, 'peer_role="prefill"'], 7.5],
    ['handoff_peer_info', [peer, 'epoch="e2"'], 1],
    ['handoff_peer_epoch_changes_total', [peer], 1],
    ['handoff_peer_credit_bytes', [peer], 4096],
    ['handoff_reaper_age_seconds', [], 0.05],
    ['handoff_link_dropped_messages_total', [], 8],
    ['handoff_link_rejected_messages_total', [], 7],
    ['handoff_link_queued_bytes', [], 9],
    ['handoff_oldest_unacknowledged_seconds', [], 3],
    ['handoff_audit_age_seconds', [], 0.5],
    ['handoff_conservation_faults', [], 2],
    ['handoff_build_info', ['code_digest="c0de"', 'code="clean"', 'checkpoint="external"'], 1],
  ];
  for (const [name, labels, value] of expected) assert.equal(valueOf(text, name, ...labels), value, name);

  sights = quiet;
  assert.deepEqual(
    (await metrics.text()).split('\n').filter((line) => line.includes(peer)),
    [],
  );
});

test('the gauges and totals of a worker are those of its state at the scrape', async (t) => {
  let stats: WorkerStats = idle;
  const metrics = workerMetrics(t, 'decode', () => stats);
  assert.equal(valueOf(await metrics.text(), 'sglang_num_running_reqs'), 0);

  stats = {
    ...idle,
    queues: { prealloc: 1, transfer: 2, waiting: 3, running: 4, retracted: 5, inflight: 0, unwinding: 6 },
    pages: { free: 40, cached: 10, running: 30, prealloc: 14, inflight: 5, quarantined: 1 },
    slots: { free: 60, used: 4 },
    generatedTokensTotal: 77,
    drafts: { rows: 50, drafts: 40, rightDrafts: 30 },
    receivedBytesTotal: 1000,
    checksumFailuresTotal: 1,
    droppedMessagesTotal: { late: 1, duplicate: 2, unknown: 3, stale_epoch: 4, protocol: 5, ignored: 6 },
    unacknowledged: { peer: 7, router: 8 },
    tombstones: 9,
    ledgerViolationsTotal: 10,
    hostBytes: 11,
    retractionsTotal: 12,
    headroomTokens: 13,
  };
  const text = await metrics.text();
  const expected: [string, string[], number][] = [
    ['sglang_num_running_reqs', [], 4],
    ['sglang_num_queue_reqs', [], 3],
    ['sglang_num_decode_prealloc_queue_reqs', [], 1],
    ['sglang_num_decode_transfer_queue_reqs', [], 2],
    ['handoff_queue_requests', ['queue="unwinding"'], 6],
    ['handoff_kv_pages', ['state="prealloc"'], 14],
    ['handoff_state_slots', ['state="used"'], 4],
    ['sglang_kv_available_tokens', [], 40 * 128],
    ['sglang_kv_evictable_tokens', [], 10 * 128],
    ['sglang_kv_used_tokens', [], 50 * 128],
    ['sglang_max_total_num_tokens', [], 100 * 128],
    ['sglang_token_usage', [], 0.5],
    ['sglang_realtime_tokens_total', ['mode="decode"'], 77],
    ['sglang_realtime_tokens_total', ['mode="prefill_compute"'], 0],
    ['handoff_draft_tokens_total', ['outcome="right"'], 30],
    ['handoff_draft_tokens_total', ['outcome="wrong"'], 10],
    ['sglang_spec_accept_rate', [], 0.75],
    ['sglang_spec_accept_length', [], 1.6],
    ['handoff_transfer_bytes_total', ['direction="received"'], 1000],
    ['handoff_checksum_failures_total', [], 1],
    ['handoff_dropped_messages_total', ['kind="stale_epoch"'], 4],
    ['handoff_unacknowledged_messages', ['to="router"'], 8],
    ['handoff_tombstones', [], 9],
    ['handoff_ledger_violations_total', [], 10],
    ['sglang_num_retracted_reqs', [], 5],
    ['handoff_queue_requests', ['queue="retracted"'], 5],
    ['handoff_host_bytes', [], 11],
    ['sglang_num_retracted_requests_total', [], 12],
    ['handoff_decode_headroom_tokens', [], 13],
  ];
  for (const [name, labels, value] of expected) assert.equal(valueOf(text, name, ...labels), value, name);
  // Twice the same state is twice the same total.
  assert.equal(valueOf(await metrics.text(), 'sglang_realtime_tokens_total', 'mode="decode"'), 77);
});

test('a worker has the queues of its role only', async (t) => {
  const prefill = await workerMetrics(t, 'prefill', () => idle).text();
  const decode = await workerMetrics(t, 'decode', () => idle).text();
  for (const name of ['sglang_num_prefill_bootstrap_queue_reqs', 'sglang_num_prefill_inflight_queue_reqs']) {
    assert.ok(prefill.includes(name) && !decode.includes(name), name);
  }
  for (const name of ['sglang_num_decode_prealloc_queue_reqs', 'handoff_decode_batch_size_mean']) {
    assert.ok(!prefill.includes(name) && decode.includes(name), name);
  }
});

test('the mean decode batch is that of the last 512 steps', async (t) => {
  const metrics = workerMetrics(t, 'decode', () => idle);
  assert.equal(valueOf(await metrics.text(), 'handoff_decode_batch_size_mean'), 0);
  metrics.stepped({ seconds: 0.01, rows: 10 });
  metrics.stepped({ seconds: 0.01, rows: 20 });
  assert.equal(valueOf(await metrics.text(), 'handoff_decode_batch_size_mean'), 15);
  for (let step = 0; step < 512; step++) metrics.stepped({ seconds: 0.01, rows: 3 });
  const text = await metrics.text();
  assert.equal(valueOf(text, 'handoff_decode_batch_size_mean'), 3);
  assert.equal(valueOf(text, 'handoff_decode_batch_size_count'), 514);
  assert.equal(valueOf(text, 'handoff_decode_batch_size_sum'), 30 + 512 * 3);
});

// surface: metrics.names
test('the router shows its own series and those of its workers, kept apart by a label (api-bugs 98, 100)', async (t) => {
  const prefill = workerMetrics(t, 'prefill', () => ({ ...idle, prefilledTokensTotal: 11 }));
  const decode = workerMetrics(t, 'decode', () => ({ ...idle, generatedTokensTotal: 22 }));
  const metrics = routerMetrics(t, [
    { worker: 'prefill-0', role: 'prefill', http: await serveMetrics(t, prefill) },
    { worker: 'decode-0', role: 'decode', http: await serveMetrics(t, decode) },
    { worker: 'decode-1', role: 'decode', http: null },
  ]);
  metrics.rejected('queue_full');
  metrics.aborted('client_lost', 'prefill');
  metrics.responded('/v1/models', 200);
  metrics.firstToken(0.3, true);
  metrics.betweenTokens(0.01);
  metrics.constrained('violated');
  metrics.finished({ outcome: 'stop', seconds: 1.5, streaming: true, promptTokens: 7, generatedTokens: 9 });

  const text = await metrics.text();
  const expected: [string, string[], number][] = [
    ['handoff_worker_up', ['worker="prefill-0"', 'role="prefill"'], 1],
    ['handoff_worker_up', ['worker="decode-0"'], 1],
    ['handoff_worker_up', ['worker="decode-1"', 'role="decode"'], 0],
    ['sglang_realtime_tokens_total', ['worker="prefill-0"', 'mode="prefill_compute"'], 11],
    ['sglang_realtime_tokens_total', ['worker="decode-0"', 'mode="prefill_compute"'], 0],
    ['sglang_realtime_tokens_total', ['worker="decode-0"', 'mode="decode"'], 22],
    ['handoff_active_requests', ['state="queued"', 'worker="router"'], 2],
    ['handoff_active_requests', ['state="running"'], 5],
    ['handoff_rejections_total', ['code="queue_full"'], 1],
    ['handoff_constrained_answers_total', ['outcome="violated"'], 1],
    ['handoff_constrained_answers_total', ['outcome="cut"'], 0],
    ['handoff_aborts_total', ['reason="client_lost"', 'phase="prefill"'], 1],
    ['handoff_aborts_total', ['reason="deadline"', 'phase="queued"'], 0],
    ['sglang_num_aborted_requests_total', [], 1],
    ['handoff_http_responses_total', ['route="/v1/models"', 'status="200"'], 1],
    ['handoff_active_requests', ['state="unwinding"'], 1],
    ['sglang_time_to_first_token_seconds_sum', ['is_streaming="true"'], 0.3],
    ['sglang_inter_token_latency_seconds_bucket', ['le="0.01"'], 1],
    ['sglang_inter_token_latency_seconds_bucket', ['le="0.008"'], 0],
    ['sglang_e2e_request_latency_seconds_sum', ['is_streaming="true"'], 1.5],
    ['sglang_num_requests_total', ['is_streaming="true"'], 1],
    ['handoff_request_outcomes_total', ['outcome="stop"'], 1],
    ['sglang_prompt_tokens_total', ['is_streaming="true"'], 7],
    ['sglang_generation_tokens_total', ['is_streaming="true"'], 9],
  ];
  for (const [name, labels, value] of expected) assert.equal(valueOf(text, name, ...labels), value, name);
  assert.equal([...text.matchAll(/^handoff_aborts_total/gm)].length, REASONS.length * 3);
  for (const line of text.split('\n'))
    assert.ok(line === '' || line.startsWith('#') || line.includes('worker="'), line);
  for (const [worker, role] of [
    ['router', 'router'],
    ['prefill-0', 'prefill'],
    ['decode-0', 'decode'],
  ]) {
    const own = text.split('\n').filter((line) => line.startsWith('sglang_') && line.includes(`worker="${worker}"`));
    assert.ok(own.length > 0 && own.every((line) => line.includes(`engine_type="${role}"`)), worker);
  }
  assert.doesNotMatch(text, /^[^#{ ]*:/m, 'no colon in a name');
  assertClean(t, text);
});

// surface: metrics.colons
test('names are repeated with colons for who asks for them, whole families at a time', async (t) => {
  const text = await workerMetrics(t, 'decode', () => ({ ...idle, generatedTokensTotal: 22 })).text();
  const aliased = withColonAliases(text);
  assert.equal(aliased.slice(0, text.length), text);
  const [plain, more] = [parseExposition(text)!, parseExposition(aliased.slice(text.length))!];
  assert.notEqual(parseExposition(aliased), null);
  assert.deepEqual(
    more.map(({ name }) => name),
    plain.flatMap(({ name }) => (name.startsWith('sglang_') ? [name.replace('sglang_', 'sglang:')] : [])),
  );
  assert.equal(valueOf(aliased, 'sglang:realtime_tokens_total', 'mode="decode"'), 22);
});

// surface: metrics.names
test('the metrics of a worker alone are clean', async (t) => {
  for (const role of ['prefill', 'decode'] as const) assertClean(t, await workerMetrics(t, role, () => idle).text());
});

test('the own checks of a text notice what promtool would', () => {
  const faulty = ['# HELP my_ms Time.', '# TYPE my_ms counter', 'my_ms 1', 'my_ms 1', ''].join('\n');
  assert.deepEqual(faultsOf(faulty), [
    'a series twice',
    'my_ms: counter and _total do not go together',
    'my_ms: not a base unit',
  ]);
});

for (const [what, answer] of Object.entries<RequestListener>({
  'does not answer': () => {},
  'stops in the middle': (_, response) => void response.writeHead(200).write('# HELP a_total A.\n'),
  'answers with an error': (_, response) => void response.writeHead(503).end('# HELP a_total A.\n'),
  'answers with something else': (_, response) => void response.end('<html>'),
  'hangs up': (request) => void request.socket.destroy(),
  'never stops talking': (_, response) => {
    const line = `# HELP a_total ${'a'.repeat(65_536)}\n`;
    const more = (): boolean => response.destroyed || (response.write(line) && more());
    response.on('drain', more);
    more();
  },
})) {
  test(`a worker that ${what} is down for the router, which answers in time all the same`, async (t) => {
    const metrics = routerMetrics(
      t,
      [
        { worker: 'decode-0', role: 'decode', http: await serve(t, answer) },
        {
          worker: 'prefill-0',
          role: 'prefill',
          http: await serveMetrics(
            t,
            workerMetrics(t, 'prefill', () => idle),
          ),
        },
      ],
      { scrapeCapMs: 1000 },
    );
    const startMs = performance.now();
    const text = await metrics.text();
    const tookMs = performance.now() - startMs;

    assert.equal(valueOf(text, 'handoff_worker_up', 'worker="decode-0"'), 0);
    assert.equal(valueOf(text, 'handoff_worker_up', 'worker="prefill-0"'), 1);
    // The rest above the cap is for a machine that does other things too.
    assert.ok(tookMs < 3000, `took ${tookMs} ms`);
    assertClean(t, text);
  });
}

// surface: metrics.prompt
test('a silent worker delays the page by 50 ms and no more', async (t) => {
  const silent = { worker: 'decode-0', role: 'decode', http: await serve(t, () => {}) } as const;
  const metrics = routerMetrics(t, [silent], {});
  const startMs = performance.now();
  const text = await metrics.text();
  // The rest is for a machine that does other things too.
  assert.ok(performance.now() - startMs < 1000, `${performance.now() - startMs} ms`);
  assert.equal(valueOf(text, 'handoff_worker_up', 'worker="decode-0"'), 0);
});

test('merging writes each family once, and drops the part whose type differs', () => {
  const part = (worker: string, text: string) => ({ worker, families: parseExposition(text)! });
  const merged = mergeExpositions([
    part('a', '# HELP x_total X.\n# TYPE x_total counter\nx_total 1\n'),
    part('b', '# HELP x_total Another.\n# TYPE x_total counter\nx_total{mode="m"} 2\nx_total{worker="own"} 3\n'),
    part('c', '# HELP x_total X.\n# TYPE x_total gauge\nx_total 4\n'),
    part('quote"back\\slash\nline', '# HELP y Y.\n# TYPE y gauge\ny 5\n'),
  ]);
  assert.equal(
    merged,
    [
      '# HELP x_total X.',
      '# TYPE x_total counter',
      'x_total{worker="a"} 1',
      'x_total{worker="b",mode="m"} 2',
      'x_total{worker="own"} 3',
      '',
      '# HELP y Y.',
      '# TYPE y gauge',
      'y{worker="quote\\"back\\\\slash\\nline"} 5',
      '',
    ].join('\n'),
  );
});

test('a text of another form is refused as a whole', () => {
  const head = '# HELP x X.\n# TYPE x gauge\n';
  for (const line of ['x', 'x one', 'y 1', 'x{a=b} 1', 'x{a="b} 1', 'x 1 2 3', '{} 1', '# EOF']) {
    assert.equal(parseExposition(`${head}${line}\n`), null, line);
  }
  for (const line of ['x 1', 'x -1.5e-7', 'x +Inf', 'x NaN', 'x{a="b"} 1', 'x{a="\\"}"} 1', '']) {
    assert.notEqual(parseExposition(`${head}${line}\n`), null, line);
  }
});
