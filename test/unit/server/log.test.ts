import assert from 'node:assert/strict';
import { test } from 'node:test';
import { createLogger, requestLogger } from '../../../server/log.ts';

function capture(level: 'info' | 'warn'): { lines: Record<string, unknown>[]; log: ReturnType<typeof createLogger> } {
  const lines: Record<string, unknown>[] = [];
  const destination = { write: (line: string) => void lines.push(JSON.parse(line) as Record<string, unknown>) };
  return { lines, log: createLogger({ role: 'decode', worker: 'decode-1', level, destination }) };
}

test('a line carries role, worker, request and the fields given', () => {
  const { lines, log } = capture('info');
  requestLogger(log, { requestId: 'r1', room: 'e-7', attempt: 2 }).info({ tokens: 5 }, 'request ended');
  const { time, pid, ...rest } = lines[0]!;
  assert.match(String(time), /^\d{4}-\d\d-\d\dT/);
  assert.equal(pid, process.pid);
  assert.deepEqual(rest, {
    level: 'info',
    role: 'decode',
    worker: 'decode-1',
    requestId: 'r1',
    room: 'e-7',
    attempt: 2,
    tokens: 5,
    msg: 'request ended',
  });
});

test('prompts, outputs and credentials do not reach the log, also one level down', () => {
  const { lines, log } = capture('info');
  const secrets = { prompt: 'sesame', messages: ['sesame'], text: 'sesame', authorization: 'sesame', apiKey: 'sesame' };
  log.info({ ...secrets, body: secrets, req: { headers: { authorization: 'sesame', host: 'h' } } }, 'request');
  assert.ok(!JSON.stringify(lines).includes('sesame'));
  assert.ok(JSON.stringify(lines).includes('"host":"h"'));
});

test('lines below the level are dropped, errors keep their stack and cause', () => {
  const { lines, log } = capture('warn');
  log.info('quiet');
  log.error({ err: new Error('outer', { cause: new Error('inner') }) }, 'failed');
  assert.equal(lines.length, 1);
  const { message, stack } = lines[0]!['err'] as { message: string; stack: string };
  assert.equal(message, 'outer: inner');
  assert.match(stack, /log\.test\.ts/);
});
