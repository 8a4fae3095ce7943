import assert from 'node:assert/strict';
import type { AddressInfo } from 'node:net';
import { test } from 'node:test';
import { listenHttp, servePages } from '../../../server/worker-http.ts';

test('a probe that comes before the pages is told so at once, and the next one gets them', async (t) => {
  const server = await listenHttp('127.0.0.1', 0);
  t.after(() => {
    server.close();
    server.closeAllConnections();
  });
  const url = `http://127.0.0.1:${(server.address() as AddressInfo).port}/health`;
  const early = await fetch(url, { signal: AbortSignal.timeout(5000) });
  assert.equal(early.status, 503);
  assert.deepEqual(await early.json(), { status: 'starting' });

  servePages(server, {
    gate: () => {},
    metrics: async () => '',
    health: () => ({ draining: false, body: { role: 'decode' } }),
    rooms: () => assert.fail('not asked for'),
    flush: () => assert.fail('not asked for'),
  });
  const later = await fetch(url, { signal: AbortSignal.timeout(5000) });
  assert.equal(later.status, 200);
  assert.deepEqual(await later.json(), { status: 'ok', role: 'decode' });
});
