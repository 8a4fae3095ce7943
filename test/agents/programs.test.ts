/**
 * Agent programs as people use them, one turn each and one that is broken off. `npm run test:agents` installs them and runs
 * this file where there is no network but loopback.
 */
import assert from 'node:assert/strict';
import { spawn, type ChildProcess } from 'node:child_process';
import { EventEmitter, once } from 'node:events';
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { createServer, request as httpRequest, type Server } from 'node:http';
import type { AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, before, describe, test } from 'node:test';
import { readWholeMetrics, startCluster, sumOf, type Cluster } from '../support/cluster.ts';
import { untilQuiet } from '../support/quiet.ts';

/** What these programs say before the user's words, in tokens of nano: at least. */
const LEAST_PROMPT_TOKENS = 8000;
/** A software adapter on two cores that others use, too, takes two minutes for a prompt. */
const TURN_MS = 480_000;
const QUIET_MS = 30_000;

/** How a program is asked for one turn. */
interface Program {
  readonly name: string;
  /** The executable; undefined: not asked for. */
  readonly path: string | undefined;
  /** Command line, and what is added to the environment. Files of its configuration go into `home`. */
  prepare(home: string, url: string): { args: string[]; env: Record<string, string> };
}

const ALL_PROGRAMS: readonly Program[] = [
  {
    name: 'codex exec',
    path: process.env['HANDOFF_CODEX'],
    prepare(_, url) {
      const provider = `{name="nano",base_url="${url}/v1",env_key="NANO_KEY",wire_api="responses"}`;
      const settings = ['model_provider=nano', 'model="nano"', `model_providers.nano=${provider}`];
      return {
        args: ['exec', '--skip-git-repo-check', ...settings.flatMap((setting) => ['-c', setting]), 'Say hello'],
        env: { NANO_KEY: 'any' },
      };
    },
  },
  {
    name: 'opencode run',
    path: process.env['HANDOFF_OPENCODE'],
    prepare(home, url) {
      const model = { name: 'nano', limit: { context: 131_072, output: 4096 } };
      const options = { baseURL: `${url}/v1`, apiKey: 'any' };
      const provider = { npm: '@ai-sdk/openai-compatible', name: 'nano', options, models: { nano: model } };
      const settings = { provider: { nano: provider }, model: 'nano/nano', small_model: 'nano/nano' };
      writeFileSync(
        join(home, 'work', 'opencode.json'),
        JSON.stringify({ ...settings, autoupdate: false, share: 'disabled' }),
      );
      return { args: ['run', 'Say hello'], env: {} };
    },
  },
];

const PROGRAMS = ALL_PROGRAMS.filter(({ path }) => path !== undefined);

/** A program that was started. */
interface Run {
  readonly child: ChildProcess;
  readonly ended: Promise<unknown>;
  output(): { stdout: string; stderr: string };
}

/** Between the programs and the router: passes everything on, and keeps the texts of the answers. */
interface Tap {
  readonly url: string;
  readonly server: Server;
  /** Each answer to a long prompt so far. */
  readonly texts: string[];
  /** `begun`: an answer to a long prompt has begun. Some programs ask for a title at the same time. */
  readonly events: EventEmitter;
}

/** Bodies of their turns have 30 kB and more, of their titles 3 kB. */
const LONG_BODY_BYTES = 20_000;

async function openTap(routerUrl: string): Promise<Tap> {
  const texts: string[] = [];
  const events = new EventEmitter();
  const server = createServer((request, response) => {
    const isLong = Number(request.headers['content-length']) > LONG_BODY_BYTES;
    const target = httpRequest(`${routerUrl}${request.url}`, { method: request.method, headers: request.headers });
    target.on('response', (answer) => {
      response.writeHead(answer.statusCode!, answer.headers);
      let received = '';
      answer.setEncoding('utf8').on('data', (part: string) => {
        const hadBegun = received.includes('data: ');
        received += part;
        if (isLong && !hadBegun && received.includes('data: ')) events.emit('begun');
        response.write(part);
      });
      answer.on('end', () => {
        if (isLong) texts.push(textOf(received));
        response.end();
      });
      answer.on('error', () => response.destroy());
    });
    target.on('error', () => response.destroy());
    response.on('close', () => target.destroy());
    request.pipe(target);
  });
  await once(server.listen(0, '127.0.0.1'), 'listening');
  return { url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`, server, texts, events };
}

/** The content of a streamed answer, of either API. */
function textOf(stream: string): string {
  const deltas = [...stream.matchAll(/^data: (\{.*\})$/gm)].map(([, json]) => {
    const event = JSON.parse(json!) as {
      type?: string;
      delta?: string;
      choices?: { delta: { content?: string } }[];
    };
    if (event.type === 'response.output_text.delta') return event.delta ?? '';
    return event.choices?.[0]?.delta.content ?? '';
  });
  return deltas.join('');
}

let cluster: Cluster;
let tap: Tap;
let folder: string;
const children = new Set<ChildProcess>();

before(async () => {
  assert.ok(PROGRAMS.length > 0, 'run this by `npm run test:agents`');
  folder = mkdtempSync(join(tmpdir(), 'handoff-agents-'));
  // Thoughts alone, which an answer of nano may be, are no text on a terminal.
  cluster = await startCluster(['--context-length', '131072', '--default-thinking', 'off']);
  tap = await openTap(cluster.url);
});
after(async () => {
  for (const child of children) child.kill('SIGKILL');
  tap?.server.close();
  await cluster?.stop();
  rmSync(folder, { recursive: true, force: true });
});

/** Start a program in a home of its own, its standard input closed. */
function start(program: Program, name: string): Run {
  const home = join(folder, name);
  mkdirSync(join(home, 'work'), { recursive: true });
  const { args, env } = program.prepare(home, tap.url);
  const child = spawn(program.path!, args, {
    cwd: join(home, 'work'),
    env: { PATH: process.env['PATH'] ?? '', HOME: home, TMPDIR: home, ...env },
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  children.add(child);
  let [stdout, stderr] = ['', ''];
  child.stdout.on('data', (bytes: Buffer) => void (stdout += bytes.toString()));
  child.stderr.on('data', (bytes: Buffer) => void (stderr += bytes.toString()));
  const ended = once(child, 'close').finally(() => children.delete(child));
  return { child, ended, output: () => ({ stdout, stderr }) };
}

async function counts(): Promise<{ prompt: number; generated: number; cancelled: number; failed: number }> {
  const samples = await readWholeMetrics(cluster.url);
  const outcome = (name: string): number => sumOf(samples, 'handoff_request_outcomes_total', { outcome: name });
  return {
    prompt: sumOf(samples, 'sglang_prompt_tokens_total'),
    generated: sumOf(samples, 'sglang_generation_tokens_total'),
    cancelled: outcome('cancelled'),
    failed: outcome('failed'),
  };
}

for (const program of PROGRAMS) {
  describe(program.name, () => {
    test('completes a turn: exit code 0, and the text of nano on the terminal', { timeout: TURN_MS }, async (t) => {
      const earlier = await counts();
      const run = start(program, `${program.name} turn`);
      await run.ended;
      const { stdout, stderr } = run.output();
      t.diagnostic(`standard output: ${JSON.stringify(stdout)}`);
      assert.equal(run.child.exitCode, 0, stderr);
      const text = tap.texts.at(-1)!.trim();
      assert.match(text, /\w/);
      assert.ok(stdout.includes(text), `${text} is not in ${stdout}`);
      const now = await counts();
      t.diagnostic(`${now.prompt - earlier.prompt} prompt tokens, ${now.generated - earlier.generated} generated`);
      assert.ok(now.prompt - earlier.prompt > LEAST_PROMPT_TOKENS, `${now.prompt - earlier.prompt} prompt tokens`);
      assert.ok(now.generated > earlier.generated, `${now.generated - earlier.generated} generated`);
      assert.deepEqual([now.failed, now.cancelled], [earlier.failed, earlier.cancelled]);
      await untilQuiet(cluster.url, QUIET_MS);
    });

    test('broken off by SIGINT in mid-answer leaves every queue and page at zero', { timeout: TURN_MS }, async (t) => {
      const earlier = await counts();
      const begun = once(tap.events, 'begun');
      const run = start(program, `${program.name} broken off`);
      const [, decodePid] = /^decode-0 +(\d+) /m.exec(cluster.output())!;
      await Promise.race([begun, run.ended]);
      assert.equal(run.child.exitCode, null, 'it ended before it was broken off');
      // Nano's answers are short: it must not come to its end before the program does.
      process.kill(Number(decodePid), 'SIGSTOP');
      try {
        run.child.kill('SIGINT');
        await run.ended;
      } finally {
        process.kill(Number(decodePid), 'SIGCONT');
      }
      const tookMs = await untilQuiet(cluster.url, QUIET_MS);
      t.diagnostic(`exit ${run.child.exitCode ?? run.child.signalCode}, quiet after ${Math.round(tookMs)} ms`);
      const now = await counts();
      assert.ok(now.cancelled > earlier.cancelled, 'a request was cancelled');
      assert.equal(now.failed, earlier.failed);
    });
  });
}
