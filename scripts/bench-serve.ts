/**
 * Serving speed: closed loops of streaming completions against a running router, or one that it starts itself.
 *
 * Prints one JSON line per stream count: commit, device, parameters, and for time to first token (TTFT), inter-token
 * latency (ITL) and tokens per second the median with the 10th and 90th percentile. All times are taken at the client.
 * With drafts also the share of right ones, and with `--speculative both` the speed-up over a server without.
 *
 *   npm run bench -- [--url http://127.0.0.1:8000] [--streams 1,8,32] [--prompt-tokens 128] [--output-tokens 64]
 *                    [--rounds 3] [--prompts random|samples] [--speculative on|off|both]
 */
import { execFileSync, spawn, type ChildProcess } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { chunksOf } from '../test/support/stream.ts';
import { oneOf, parseCommandLine, positive, refuse } from './command-line.ts';

const HELP = `
npm run bench [-- OPTIONS]

  --streams N,N,...   at a time (default 1,8,32)
  --prompt-tokens N   (default 128)
  --output-tokens N   (default 64)
  --rounds N          (default 3)
  --prompts KIND      random, whose answers have no end (default), or samples, which end in a question of nano
  --speculative MODE  on, off, or both: measure without drafts and with them; not with --url
  --url URL           a router to measure; without it one is started on free ports and stopped afterwards`;

const { values: options } = parseCommandLine(HELP, {
  options: {
    url: { type: 'string' },
    streams: { type: 'string', default: '1,8,32' },
    'prompt-tokens': { type: 'string', default: '128' },
    'output-tokens': { type: 'string', default: '64' },
    rounds: { type: 'string', default: '3' },
    prompts: { type: 'string', default: 'random' },
    speculative: { type: 'string' },
  },
});
const streamCounts = options.streams.split(',').map((text) => positive('--streams', text));
const promptTokens = positive('--prompt-tokens', options['prompt-tokens']);
const outputTokens = positive('--output-tokens', options['output-tokens']);
const rounds = positive('--rounds', options.rounds);
oneOf('--prompts', options.prompts, ['random', 'samples']);
if (options.speculative !== undefined) {
  oneOf('--speculative', options.speculative, ['on', 'off', 'both']);
  if (options.url !== undefined) refuse('--speculative is for the server that is started here, not for --url');
}
const samplePrompts =
  options.prompts === 'random'
    ? []
    : readFileSync(new URL('../test/data/nano-samples.jsonl', import.meta.url), 'utf8')
        .trim()
        .split('\n')
        .map((line) => (JSON.parse(line) as { prompt_ids: number[] }).prompt_ids);

/**
 * A prompt of `promptTokens` ids. Distinct ones: equal ones would measure a prefix cache. Random ids are below 256, plain
 * bytes of the vocabulary; samples are cut at the front, behind the first id, so that they end in their question.
 */
function promptOf(seed: number): number[] {
  if (samplePrompts.length === 0) {
    return Array.from({ length: promptTokens }, (_, index) => (index === 0 ? 0 : 2 + ((seed * 31 + index * 17) % 250)));
  }
  const ids: number[] = [];
  for (let index = seed; ids.length < promptTokens; index += 7) {
    ids.unshift(...samplePrompts[index % samplePrompts.length]!);
  }
  return [0, ...ids.slice(ids.length - promptTokens + 1)];
}

interface StreamTimes {
  readonly ttftMs: number;
  readonly gapsMs: readonly number[];
  readonly tokens: number;
}

/** One streaming completion from token ids; times at the client, from the request's first byte. */
async function runStream(url: string, model: string, seed: number): Promise<StreamTimes> {
  const prompt = promptOf(seed);
  const startMs = performance.now();
  const response = await fetch(`${url}/v1/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({
      model,
      prompt,
      max_tokens: outputTokens,
      ignore_eos: true,
      temperature: 0,
      stream: true,
      stream_options: { include_usage: true },
    }),
  });
  const arrivalsMs: number[] = [];
  let tokens = 0;
  type Chunk = { choices?: { text: string }[]; usage?: { completion_tokens: number } | null };
  for await (const chunk of chunksOf<Chunk>(response)) {
    if (chunk.usage) tokens = chunk.usage.completion_tokens;
    if (chunk.choices?.[0]?.text) arrivalsMs.push(performance.now());
  }
  if (tokens !== outputTokens) throw new Error(`asked for ${outputTokens} tokens, got ${tokens}`);
  const gapsMs = arrivalsMs.slice(1).map((at, index) => at - arrivalsMs[index]!);
  return { ttftMs: arrivalsMs[0]! - startMs, gapsMs, tokens };
}

function quantile(values: readonly number[], share: number): number {
  const sorted = [...values].sort((left, right) => left - right);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))]!;
}

function spread(values: readonly number[]): { median: number; p10: number; p90: number } {
  const round = (value: number): number => Math.round(value * 100) / 100;
  return { median: round(quantile(values, 0.5)), p10: round(quantile(values, 0.1)), p90: round(quantile(values, 0.9)) };
}

/** Start `handoff all` on free ports; resolves with its URL once the router listens. */
async function startServer(flags: readonly string[]): Promise<{ url: string; child: ChildProcess }> {
  const ports = ['--port', '0', '--prefill-port', '0', '--decode-port', '0'];
  const child = spawn(
    process.execPath,
    ['--import', 'tsx', 'server/main.ts', 'all', '--log-level', 'warn', ...ports, ...flags],
    {
      stdio: ['ignore', 'pipe', 'inherit'],
    },
  );
  return new Promise((resolve, reject) => {
    let text = '';
    child.once('exit', (code) => reject(new Error(`the server ended with ${code}`)));
    child.stdout!.on('data', (bytes: Buffer) => {
      text += bytes.toString();
      const url = /curl[^\n]*(http:\/\/[\d.]+:\d+)/.exec(text)?.[1];
      if (url) resolve({ url, child });
    });
  });
}

/** Drafts so far by outcome, over all decode workers. */
async function draftCounts(url: string): Promise<{ right: number; wrong: number }> {
  const metrics = await (await fetch(`${url}/metrics`)).text();
  const count = (outcome: string): number => {
    const found = metrics.matchAll(
      new RegExp(`^handoff_draft_tokens_total\\{[^}]*outcome="${outcome}"[^}]*\\} (\\S+)`, 'gm'),
    );
    return [...found].reduce((sum, [, value]) => sum + Number(value), 0);
  };
  return { right: count('right'), wrong: count('wrong') };
}

/** Measure every stream count. `plain` are the medians of tokens per second without drafts, to be compared with. */
async function measure(url: string, speculative: string | undefined, plain: readonly number[]): Promise<number[]> {
  const models = (await (await fetch(`${url}/v1/models`)).json()) as { data: { id: string }[] };
  const model = models.data[0]!.id;
  const metrics = await (await fetch(`${url}/metrics`)).text();
  const device = /handoff_worker_info\{[^}]*adapter="([^"]*)"/.exec(metrics)?.[1] ?? 'unknown';
  const commit = execFileSync('git', ['rev-parse', '--short', 'HEAD']).toString().trim();
  await runStream(url, model, 0); // caches and pipelines are warm afterwards
  const medians: number[] = [];
  for (const [index, streams] of streamCounts.entries()) {
    const ttftMs: number[] = [];
    const itlMs: number[] = [];
    const tokensPerSecond: number[] = [];
    const before = await draftCounts(url);
    for (let round = 0; round < rounds; round++) {
      const startMs = performance.now();
      const results = await Promise.all(
        Array.from({ length: streams }, (_, stream) => runStream(url, model, 1 + round * streams + stream)),
      );
      const seconds = (performance.now() - startMs) / 1000;
      ttftMs.push(...results.map((result) => result.ttftMs));
      itlMs.push(...results.flatMap((result) => result.gapsMs));
      tokensPerSecond.push(results.reduce((sum, result) => sum + result.tokens, 0) / seconds);
    }
    const after = await draftCounts(url);
    const right = after.right - before.right;
    const drafts = right + after.wrong - before.wrong;
    const median = quantile(tokensPerSecond, 0.5);
    medians.push(median);
    const line = {
      bench: 'serve',
      commit,
      device,
      model,
      streams,
      prompts: options.prompts,
      promptTokens,
      outputTokens,
      rounds,
      ...(speculative === undefined ? {} : { speculative }),
      ttftMs: spread(ttftMs),
      itlMs: spread(itlMs),
      tokensPerSecond: spread(tokensPerSecond),
      ...(drafts === 0 ? {} : { draftAcceptRate: Math.round((1000 * right) / drafts) / 1000 }),
      ...(plain[index] === undefined ? {} : { speedUp: Math.round((100 * median) / plain[index]) / 100 }),
    };
    process.stdout.write(`${JSON.stringify(line)}\n`);
  }
  return medians;
}

if (options.url) {
  await measure(options.url, undefined, []);
} else {
  const turns = options.speculative === 'both' ? ['off', 'on'] : [options.speculative];
  let plain: number[] = [];
  for (const turn of turns) {
    const { url, child } = await startServer(turn === undefined ? [] : ['--speculative', turn]);
    try {
      plain = await measure(url, turn, plain);
    } finally {
      child.kill('SIGTERM');
    }
  }
}
