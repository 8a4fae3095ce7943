/** Keys, limits, origins and ids at the door of the API, over real sockets and scripted rooms. */
import assert from 'node:assert/strict';
import { Writable } from 'node:stream';
import { after, before, describe, test } from 'node:test';
import { pino } from 'pino';
import { closeApp } from '../../server/http.ts';
import { listen, tokenizer } from '../support/scripted-rooms.ts';

const keys = ['first-key', 'second-key'];
let server: Awaited<ReturnType<typeof listen>>;
const logged: string[] = [];

before(async () => {
  const log = pino(
    { level: 'trace' },
    new Writable({
      write(line: Buffer, _encoding, done) {
        logged.push(line.toString());
        done();
      },
    }),
  );
  server = await listen({ keyMaxRequests: 3 }, { apiKeys: keys, log, capacity: () => ({ running: 1, waiting: 8 }) });
});
after(() => closeApp(server.app, 0));

const bearer = (key: string) => ({ authorization: `Bearer ${key}` });
const completion = { model: 'nano', prompt: 'a' };

function send(path: string, headers: Record<string, string>, body: object | null = completion): Promise<Response> {
  return fetch(server.url + path, {
    method: body === null ? 'GET' : 'POST',
    headers: { ...(body === null ? {} : { 'content-type': 'application/json' }), ...headers },
    ...(body === null ? {} : { body: JSON.stringify(body) }),
  });
}

describe('a server with API keys', () => {
  // surface: transport.auth
  test('asks for one on every route but those of health and documentation (api-bugs 74)', async () => {
    const document = (await (await send('/openapi.json', {}, null)).json()) as {
      paths: Record<string, Record<string, { security?: object[] }>>;
    };
    const open: string[] = [];
    for (const [path, methods] of Object.entries(document.paths)) {
      for (const [method, { security }] of Object.entries(methods)) {
        const url = path.replace('{id}', 'nano');
        const response = await send(url, {}, method === 'get' ? null : {});
        if (security === undefined) open.push(path);
        else assert.equal(response.status, 401, `${method} ${path}`);
        await response.text();
      }
    }
    assert.deepEqual(open.toSorted(), [
      '/abort_request',
      '/docs',
      '/health',
      '/livez',
      '/metrics',
      '/metrics/',
      '/openapi.json',
      '/ping',
      '/readyz',
    ]);
    assert.equal((await send('/abort_request', {}, { rid: 'x' })).status, 401, 'it looks for itself');
  });

  // surface: transport.auth
  test('is not to be got around by how the path is written (api-bugs 74)', async () => {
    for (const path of [
      '//v1/completions',
      '/v1//completions',
      '/V1/completions',
      '/v1/completions/',
      '/x/../v1/models',
    ]) {
      const response = await send(path, {}, completion);
      assert.ok([401, 404, 405].includes(response.status), `${path}: ${response.status}`);
    }
    assert.equal(server.rooms.startCount, 0);
  });

  // surface: transport.auth, errors.401
  test('takes either key in any case of the scheme, and answers others with 401 that says how', async () => {
    for (const key of keys) {
      const response = await send('/v1/models', { authorization: `bEARER ${key}` }, null);
      assert.equal(response.status, 200);
    }
    for (const headers of [{}, bearer('third-key'), bearer('first-ke'), { authorization: 'first-key' }]) {
      const response = await send('/v1/models', headers, null);
      assert.equal(response.status, 401);
      assert.equal(response.headers.get('www-authenticate'), 'Bearer');
      const { error } = (await response.json()) as { error: { code: string; type: string } };
      assert.deepEqual([error.code, error.type], ['invalid_api_key', 'authentication_error']);
    }
  });

  // surface: transport.auth
  test('reads x-api-key where clients of Anthropic send it, and only there', async () => {
    const body = { model: 'nano', messages: [{ role: 'user', content: 'hi' }] };
    const counted = await send('/v1/messages/count_tokens', { 'x-api-key': 'first-key' }, body);
    assert.equal(counted.status, 200);
    assert.equal((await send('/v1/models', { 'x-api-key': 'first-key' }, null)).status, 401);
  });

  // surface: transport.auth
  test('does not let an API key do what is an operator’s', async () => {
    assert.equal((await send('/flush_cache', bearer('first-key'), {})).status, 403);
    assert.equal((await send('/debug/rooms', bearer('first-key'), null)).status, 403);
    assert.equal((await send('/abort_request', bearer('first-key'), { abort_all: true })).status, 403);
    assert.equal((await send('/flush_cache', bearer('test-key'), {})).status, 200);
  });

  test("lets no key end another's request, gives what is free to who has least, and limits requests at once", async () => {
    const own = send('/v1/completions', bearer('first-key'), { ...completion, rid: 'own' });
    const room = await server.rooms.next();
    const waiting = ['w1', 'w2'].map((rid) => send('/v1/completions', bearer('first-key'), { ...completion, rid }));
    // The fourth is refused only once the other three have come.
    let fourth = await send('/v1/completions', bearer('first-key'), { ...completion, rid: 'w1' });
    while (fourth.status === 200) fourth = await send('/v1/completions', bearer('first-key'));
    assert.ok([400, 429].includes(fourth.status), `status ${fourth.status}`);
    const other = send('/v1/completions', bearer('second-key'), { ...completion, rid: 'other' });
    const stranger = await send('/abort_request', bearer('second-key'), { rid: 'own' });
    assert.deepEqual(await stranger.json(), { success: true, aborted: 0 });
    let aborted = 0;
    while (aborted === 0) {
      const answer = await send('/abort_request', bearer('second-key'), { rid: 'other' });
      aborted = ((await answer.json()) as { aborted: number }).aborted;
    }
    assert.equal((await other).status, 499);
    room.finish('one');
    assert.equal((await own).status, 200);
    for (const response of waiting) {
      (await server.rooms.next()).finish('more');
      assert.equal((await response).status, 200);
    }
  });

  // surface: errors.429
  test('limits the requests of a key in a minute, and says when to come again', async () => {
    const other = await listen({ keyRequestsPerMinute: 1 }, { apiKeys: keys });
    other.rooms.script = (room) => room.finish('fine');
    const ask = (key: string) =>
      fetch(`${other.url}/v1/completions`, {
        method: 'POST',
        headers: { 'content-type': 'application/json', ...bearer(key) },
        body: JSON.stringify(completion),
      });
    assert.equal((await ask('first-key')).status, 200);
    const refused = await ask('first-key');
    assert.equal(refused.status, 429);
    assert.match(refused.headers.get('retry-after') ?? '', /^[1-9]\d?$/);
    assert.equal(((await refused.json()) as { error: { code: string } }).error.code, 'rate_limit_exceeded');
    assert.equal((await ask('second-key')).status, 200);
    await closeApp(other.app, 0);
  });

  test('writes neither keys nor prompts nor answers to its log', async () => {
    const secret = 'zebra crossing';
    const whole = send('/v1/completions', bearer('second-key'), { ...completion, prompt: secret });
    (await server.rooms.next()).finish('quagga');
    assert.equal((await whole).status, 200);
    await send('/v1/completions', bearer('wrong-secret'), completion);
    await send('/v1/completions', bearer('second-key'), { prompt: [secret, 5] });
    const text = logged.join('');
    assert.match(text, /request ended/);
    for (const word of [...keys, 'wrong-secret', 'zebra', 'quagga', String(tokenizer.encode(secret))]) {
      assert.ok(!text.includes(word), word);
    }
  });
});

describe('a page of another origin', () => {
  // surface: transport.cors
  test('may ask with whatever headers it names, without a key (api-bugs 75)', async () => {
    const response = await fetch(`${server.url}/v1/chat/completions`, {
      method: 'OPTIONS',
      headers: {
        origin: 'https://example.com',
        'access-control-request-method': 'POST',
        'access-control-request-headers': 'authorization, x-stainless-os, content-type',
      },
    });
    assert.equal(response.status, 204);
    assert.equal(response.headers.get('access-control-allow-origin'), '*');
    assert.equal(response.headers.get('access-control-allow-credentials'), null);
    assert.equal(response.headers.get('access-control-allow-headers'), 'authorization, x-stainless-os, content-type');
  });

  // surface: transport.cors
  test('may read answers and errors with their ids', async () => {
    for (const headers of [{}, bearer('first-key')]) {
      const response = await send('/v1/models', { ...headers, origin: 'https://example.com' }, null);
      assert.equal(response.headers.get('access-control-allow-origin'), '*');
      assert.match(response.headers.get('access-control-expose-headers') ?? '', /x-request-id/);
      assert.match(response.headers.get('x-request-id') ?? '', /./);
    }
  });
});
