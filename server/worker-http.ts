/** A worker's own HTTP: what it is, how it does, and, for operators, every room it holds. */
import { createServer, type IncomingMessage, type Server, type ServerResponse } from 'node:http';
import { once } from 'node:events';
import type { AdminGate } from './operators/admin.ts';
import type { WorkerPage } from './operators/debug-page.ts';
import { ApiError, errorBody } from './errors.ts';
import { METRICS_CONTENT_TYPE } from './metrics.ts';

/** What the pages show; each is asked anew for every request. */
export interface WorkerPages {
  readonly gate: AdminGate;
  metrics(): Promise<string>;
  health(): { draining: boolean; body: Readonly<Record<string, unknown>> };
  rooms(): WorkerPage;
  /** Forget all cached prefixes; how many pages they had. */
  flush(): number;
}

interface Answer {
  status: number;
  type: string;
  body: string;
}

/** Listen, with 503 for an answer as yet: a worker's name has its port in it. Rejects when the port is taken. */
export async function listenHttp(host: string, port: number): Promise<Server> {
  const server = createServer((_, response) => {
    // Without a listener the request would hang, and so would a probe that came a moment too early.
    const starting = json(503, { status: 'starting' });
    response.writeHead(starting.status, { 'content-type': starting.type });
    response.end(starting.body);
  });
  server.listen(port, host);
  await once(server, 'listening');
  return server;
}

/** Answer requests with these pages from now on. */
export function servePages(server: Server, pages: WorkerPages): void {
  server.removeAllListeners('request');
  server.on('request', (request: IncomingMessage, response: ServerResponse) => {
    answer(request, pages)
      .catch((error: unknown) => refusal(error))
      .then(
        ({ status, type, body }) => {
          response.writeHead(status, { 'content-type': type });
          response.end(body);
        },
        () => response.destroy(),
      );
  });
}

async function answer(request: IncomingMessage, pages: WorkerPages): Promise<Answer> {
  const path = (request.url ?? '').split('?')[0];
  switch (path) {
    case '/metrics':
      return { status: 200, type: METRICS_CONTENT_TYPE, body: await pages.metrics() };
    case '/livez':
      return json(200, { status: 'ok' });
    case '/health':
    case '/readyz': {
      const { draining, body } = pages.health();
      return json(draining ? 503 : 200, { status: draining ? 'draining' : 'ok', ...body });
    }
    case '/debug/rooms':
      pages.gate(request);
      return json(200, pages.rooms());
    case '/flush_cache':
      pages.gate(request);
      if (request.method !== 'POST') throw new ApiError('method_not_allowed', '/flush_cache takes POST.');
      return json(200, { flushed_pages: pages.flush() });
    default:
      throw new ApiError(
        'not_found',
        'This worker serves /health, /livez, /readyz, /metrics, /debug/rooms and /flush_cache; the API is at the router.',
      );
  }
}

function refusal(error: unknown): Answer {
  const known = error instanceof ApiError ? error : new ApiError('internal_error', 'The worker had an internal error.');
  return json(known.status, errorBody(known));
}

function json(status: number, body: object): Answer {
  return { status, type: 'application/json; charset=utf-8', body: JSON.stringify(body) };
}
