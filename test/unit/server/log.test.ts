import assert from 'node:assert/strict';
import { fork } from 'node:child_process';
import { once } from 'node:events';
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
  assert.doesNotMatch(JSON.stringify(lines), /sesame/);
  assert.match(JSON.stringify(lines), /"host":"h"/);
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

test(
  'a reader that stops reading holds up neither the process nor its end, and is told what it missed',
  { timeout: 60_000 },
  async (t) => {
    const program = new URL('../../support/fake-logger.ts', import.meta.url);
    const child = fork(program, { execArgv: ['--import', 'tsx'], stdio: ['ignore', 'ignore', 'pipe', 'ipc'] });
    t.after(() => {
      child.kill('SIGKILL');
      child.stderr!.destroy();
    });
    const [report] = (await once(child, 'message')) as [{ longestMs: number; bytes: number }];
    assert.ok(report.bytes > 16 << 20, 'more was logged than any pipe and the backlog hold');
    // Without a pause: one write that waits for its reader would take for ever.
    assert.ok(report.longestMs < 2000, `one line took ${report.longestMs} ms`);

    let text = '';
    const toldWhatItMissed = new Promise<void>((resolve) => {
      child.stderr!.setEncoding('utf8').on('data', (piece: string) => {
        text += piece;
        if (/"lines":\d+,"msg":"log lines were dropped[^\n]*\n/.test(text.slice(-2000))) resolve();
      });
    });
    await toldWhatItMissed;
    const broken = text.split('\n').filter((line) => line !== '' && !/^\{"level".*\}$/.test(line)).length;
    assert.equal(broken, 0, 'every line is whole');

    child.stderr!.pause();
    const ended = once(child, 'exit');
    child.send('end');
    assert.equal((await ended)[0], 0);
  },
);
