/**
 * Agents at work: `npm run bench:agents`. One JSON line at the end, progress on stderr; exit code 1 if it is not `ok`.
 *
 * Each agent is a closed loop: it sends its conversation and its tools, and gets an answer or tool calls; it answers those
 * and sends what there is now, until the question is answered; then comes the next question. Patience is personal: how
 * often an agent gives a request up, at a random moment, is drawn for each. Every so often (`--mass-cancels`) all have a
 * request under way and leave at once; the time until every gauge of every process is zero is `cancelToCleanMs`.
 *
 * At the end the clients' ledger is compared with the server's counters. So that both can know how a request ended, one
 * that will be given up asks for an answer without end: none completes while its client is leaving. Nobody leaves within
 * half a second, for a request that the router has not read is counted by nobody.
 *
 * With `--url` (and `--worker-url` for each worker) a running cluster is measured, which must serve nobody else and admit
 * as many requests as there are agents.
 */
import { sumOf, untilMetrics } from '../test/support/cluster.ts';
import { createPrng } from '../test/support/prng.ts';
import { unsettled, untilQuiet } from '../test/support/quiet.ts';
import { chunksOf, complete } from '../test/support/stream.ts';
import { drawTask, toolResult, type Tool } from './agent-tasks.ts';
import { parseCommandLine, positive, positiveOrZero, say, within } from './command-line.ts';
import { hundredths, spread, surroundings } from './measurement.ts';
import { compareLedgers, countsOf, openTarget } from './target.ts';

const HELP = `
npm run bench:agents [-- OPTIONS]

  --agents N        at a time (default 100)
  --minutes N       how long (default 5)
  --cancel-share N  of the requests, given up by their agent (default 0.33)
  --mass-cancels N  how often all leave at once (default 4)
  --seed N          (default 1)
  --url URL         a router to measure; without it a cluster is started on free ports and stopped afterwards
  --worker-url URL  of each of its prefill and decode workers`;

const { values: options } = parseCommandLine(HELP, {
  options: {
    agents: { type: 'string', default: '100' },
    minutes: { type: 'string', default: '5' },
    'cancel-share': { type: 'string', default: '0.33' },
    'mass-cancels': { type: 'string', default: '4' },
    seed: { type: 'string', default: '1' },
    url: { type: 'string' },
    'worker-url': { type: 'string', multiple: true, default: [] },
  },
});
const agentCount = positive('--agents', options.agents);
const durationMs = within('--minutes', options.minutes, { min: 0.1, max: 10_000 }) * 60_000;
const cancelShare = within('--cancel-share', options['cancel-share'], { min: 0, max: 0.9 });
const massCancels = positiveOrZero('--mass-cancels', options['mass-cancels']);
const seed = positive('--seed', options.seed);

/** Questions of one conversation. */
const QUESTIONS = 2;
/** Tool calls that an agent answers before it takes what it has for an answer. */
const TOOL_ROUNDS = 3;
const ANSWER_TOKENS = 200;
/** Of an answer that is given up: more than come while anybody waits. */
const ENDLESS_TOKENS = 2000;
/** With what its next turn adds and an answer without end it still fits the context of nano. */
const LONGEST_CONVERSATION_TOKENS = 1500;
/** Nobody leaves earlier. A router that is that late with reading is broken. */
const LEAST_WAIT_MS = 500;
/** A request that has no end by then hangs. */
const HANG_MS = 300_000;
/** What is still held so long after all have left has leaked. */
const CLEAN_MS = 60_000;
/** Messages of failures that the summary repeats. */
const SHOWN = 5;

interface ToolCall {
  readonly id: string;
  readonly type: 'function';
  readonly function: { name: string; arguments: string };
}

type Message =
  | { readonly role: 'user'; readonly content: string }
  | { readonly role: 'assistant'; readonly content: string; readonly tool_calls?: readonly ToolCall[] }
  | { readonly role: 'tool'; readonly tool_call_id: string; readonly content: string };

interface Chunk {
  readonly choices: readonly {
    readonly delta: {
      readonly content?: string;
      readonly reasoning_content?: string;
      readonly tool_calls?: readonly {
        readonly index: number;
        readonly id?: string;
        readonly function: { readonly name?: string; readonly arguments?: string };
      }[];
    };
    readonly finish_reason: 'stop' | 'length' | 'tool_calls' | null;
  }[];
  readonly usage?: Usage | null;
}

interface Usage {
  readonly completion_tokens: number;
  readonly total_tokens: number;
}

/** A whole answer. `totalTokens`: with its prompt. */
interface Reply {
  readonly text: string;
  readonly calls: readonly ToolCall[];
  readonly finish: 'stop' | 'toolCalls' | 'length';
  readonly answerTokens: number;
  readonly totalTokens: number;
}

/**
 * What the clients know. Every request is in exactly one of the first six: `givenUp` by its agent, `massCut` with all
 * others.
 */
const ledger = { stop: 0, toolCalls: 0, length: 0, givenUp: 0, massCut: 0, failed: 0, answers: 0, tokens: 0 };
const failures: string[] = [];
const ttftMs: number[] = [];
const itlMs: number[] = [];
const cleanMs: number[] = [];

/**
 * Everybody leaves at once. While it is being prepared, requests have no end of their own, and whoever's is over waits for
 * the others here.
 */
interface MassCancel {
  readonly leave: AbortController;
  /** Agents that are there. */
  joined: number;
  /** Resolves when all is clean and work goes on. */
  readonly over: Promise<void>;
}
let massCancel: MassCancel | null = null;
const ended = new AbortController();
/** When time is over, who is to leave with the others still does. */
const goesOn = (): boolean => !ended.signal.aborted || massCancel !== null;

const target = await openTarget({ url: options.url, workers: options['worker-url'] }, [
  ...['--max-running-requests', String(Math.min(1024, agentCount + 16))],
  ...['--max-queued-requests', String(agentCount)],
]);
try {
  process.exitCode = await main();
} finally {
  await target.stop();
}

async function main(): Promise<number> {
  const canary = { prompt: [0, 5, 6, 7], maxTokens: 4, ignoreEos: true };
  await complete(target.url, target.model, canary); // pipelines are compiled
  await untilQuiet(() => target.samples(), CLEAN_MS);
  const before = countsOf(await target.samples());
  const startMs = performance.now();
  setTimeout(() => ended.abort(), durationMs);
  await Promise.all([leaveTogether(startMs), ...Array.from({ length: agentCount }, (_, index) => runAgent(index))]);
  const seconds = (performance.now() - startMs) / 1000;
  await untilQuiet(() => target.samples(), CLEAN_MS);
  const samples = await target.samples();
  const { stop, toolCalls, length, givenUp, failed } = ledger;
  const whole = stop + toolCalls + length;
  const cut = givenUp + ledger.massCut;
  const comparison = compareLedgers(
    { before, after: countsOf(samples) },
    {
      ended: whole + cut + failed,
      aborted: cut,
      abortsByReason: cut,
      length,
      stop: stop + toolCalls,
      cancelled: cut,
      failed,
      rejected: 0,
    },
  );
  const isOk = comparison.agrees && failed === 0 && unsettled(samples).length === 0 && ledger.answers > 0;
  const line = {
    bench: 'agents',
    ok: isOk,
    ...surroundings(samples),
    model: target.model,
    seed,
    agents: agentCount,
    seconds: hundredths(seconds),
    requests: ledger,
    givenUpShare: hundredths(givenUp / (whole + givenUp + failed)),
    ttftMs: spread(ttftMs),
    itlMs: spread(itlMs),
    goodput: {
      tokensPerSecond: hundredths(ledger.tokens / seconds),
      answersPerMinute: hundredths((60 * ledger.answers) / seconds),
    },
    cancelToCleanMs: { times: cleanMs.length, ...spread(cleanMs) },
    counters: comparison.line,
    failures: failures.slice(0, SHOWN),
  };
  process.stdout.write(`${JSON.stringify(line)}\n`);
  return isOk ? 0 : 1;
}

/** One agent: conversation after conversation. */
async function runAgent(index: number): Promise<void> {
  const random = createPrng(seed * 10_000 + index);
  const agent: Agent = { random, givesUp: 2 * cancelShare * random(), usualMs: 5000 };
  while (goesOn()) {
    const messages: Message[] = [];
    for (let question = 0; question < QUESTIONS && goesOn(); question++) {
      const task = drawTask(random);
      messages.push({ role: 'user', content: task.question });
      if (!(await workOn(agent, messages, task.tools))) break; // and starts another conversation
    }
  }
}

/** What is personal. `givesUp`: the share of its requests; `usualMs`: how long whole answers took it lately. */
interface Agent {
  readonly random: () => number;
  readonly givesUp: number;
  usualMs: number;
}

/** Ask, and answer tool calls, until there is an answer. False: the agent gave up, or has filled its context. */
async function workOn(agent: Agent, messages: Message[], tools: readonly Tool[]): Promise<boolean> {
  for (let round = 0; round <= TOOL_ROUNDS && goesOn(); round++) {
    const reply = await ask(agent, messages, tools);
    if (reply === null || reply.totalTokens > LONGEST_CONVERSATION_TOKENS) return false;
    const { text, calls } = reply;
    messages.push({ role: 'assistant', content: text, ...(calls.length === 0 ? {} : { tool_calls: calls }) });
    if (calls.length === 0) {
      ledger.answers++;
      return true;
    }
    for (const { id, function: call } of calls) {
      messages.push({ role: 'tool', tool_call_id: id, content: toolResult(call.name, agent.random) });
    }
  }
  return true;
}

/** One request. Null: it was given up, or failed. */
async function ask(agent: Agent, messages: readonly Message[], tools: readonly Tool[]): Promise<Reply | null> {
  const mass = massCancel;
  if (mass !== null) mass.joined++;
  const leave = mass?.leave ?? new AbortController();
  const isCut = mass !== null || agent.random() < agent.givesUp;
  const waitMs = LEAST_WAIT_MS + agent.random() * Math.max(0, agent.usualMs - LEAST_WAIT_MS);
  let hangs = false;
  const timer = setTimeout(
    () => {
      hangs = !isCut || mass !== null;
      leave.abort();
    },
    isCut && mass === null ? waitMs : HANG_MS,
  );
  const startMs = performance.now();
  try {
    const reply = await readReply(messages, tools, { isEndless: isCut, signal: leave.signal });
    if (isCut) throw new Error(`an answer without end ended with ${reply.finish}`);
    ledger[reply.finish]++;
    ledger.tokens += reply.answerTokens;
    agent.usualMs = 0.8 * agent.usualMs + 0.2 * (performance.now() - startMs);
    return reply;
  } catch (error) {
    if (leave.signal.aborted && !hangs) ledger[mass === null ? 'givenUp' : 'massCut']++;
    else {
      ledger.failed++;
      failures.push(hangs ? `a request had no end after ${HANG_MS / 1000} s` : String(error));
      say(failures.at(-1)!);
    }
    return null;
  } finally {
    clearTimeout(timer);
    if (mass !== null) await mass.over;
  }
}

async function readReply(
  messages: readonly Message[],
  tools: readonly Tool[],
  { isEndless, signal }: { isEndless: boolean; signal: AbortSignal },
): Promise<Reply> {
  const startMs = performance.now();
  const response = await fetch(`${target.url}/v1/chat/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({
      model: target.model,
      messages,
      tools,
      temperature: 0,
      reasoning_effort: 'none',
      max_tokens: isEndless ? ENDLESS_TOKENS : ANSWER_TOKENS,
      ignore_eos: isEndless,
      stream: true,
      stream_options: { include_usage: true },
    }),
    signal,
  });
  let text = '';
  let usage: Usage = { completion_tokens: 0, total_tokens: 0 };
  let finish: Chunk['choices'][number]['finish_reason'] = null;
  let lastMs: number | null = null;
  const calls: ToolCall[] = [];
  for await (const chunk of chunksOf<Chunk>(response)) {
    usage = chunk.usage ?? usage;
    const [choice] = chunk.choices;
    if (choice === undefined) continue;
    const { content = '', reasoning_content: thought = '', tool_calls: parts = [] } = choice.delta;
    finish = choice.finish_reason ?? finish;
    text += content;
    for (const { index, id, function: part } of parts) {
      calls[index] ??= { id: id ?? '', type: 'function', function: { name: part.name ?? '', arguments: '' } };
      calls[index].function.arguments += part.arguments ?? '';
    }
    if (content === '' && thought === '' && parts.length === 0) continue;
    const nowMs = performance.now();
    if (lastMs === null) ttftMs.push(nowMs - startMs);
    else itlMs.push(nowMs - lastMs);
    lastMs = nowMs;
  }
  if (finish === null) throw new Error('the answer has no finish_reason');
  const { completion_tokens: answerTokens, total_tokens: totalTokens } = usage;
  return { text, calls, finish: finish === 'tool_calls' ? 'toolCalls' : finish, answerTokens, totalTokens };
}

/** So often all agents leave at once, in the middle of whatever it is. */
async function leaveTogether(startMs: number): Promise<void> {
  for (let turn = 0; turn < massCancels; turn++) {
    await pause(startMs + ((turn + 0.5) / massCancels) * durationMs - performance.now());
    if (ended.signal.aborted) return;
    let finish = (): void => {};
    const leave = new AbortController();
    const mass: MassCancel = { leave, joined: 0, over: new Promise((resolve) => (finish = resolve)) };
    massCancel = mass;
    // Everybody has a request of that kind, and the router has read it.
    await untilMetrics(
      () => target.samples(),
      HANG_MS,
      (samples) => mass.joined === agentCount && sumOf(samples, 'handoff_active_requests') === agentCount,
    );
    leave.abort();
    massCancel = null;
    cleanMs.push(await untilQuiet(() => target.samples(), CLEAN_MS));
    say(
      `${turn + 1} of ${massCancels}: ${agentCount} left, clean after ${Math.round(cleanMs.at(-1)!)} ms; ${summary()}`,
    );
    finish();
  }
}

function summary(): string {
  const { answers, givenUp, failed } = ledger;
  return `${answers} answers, ${givenUp} given up, ${failed} failed`;
}

function pause(ms: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, ms));
}
