/** A client of a cluster for chaos tests: seeded prompts, a canary, and what exactly a failed request was told. */
import assert from 'node:assert/strict';
import { sumOf, untilMetrics, type Sample } from './cluster.ts';
import { createPrng, randomPrompt } from './prng.ts';
import { held, untilQuiet } from './quiet.ts';
import type { SplitCluster } from './split-cluster.ts';
import { complete, openCompletion, ServerError, type CompletionRequest, type OpenStream } from './stream.ts';

/** A queue of one role, as the label of `handoff_queue_requests`. */
export type Stage =
  | ['prefill', 'prealloc' | 'waiting' | 'running' | 'inflight' | 'unwinding']
  | ['decode', 'prealloc' | 'transfer' | 'waiting' | 'running' | 'unwinding'];

/** What a client was told, byte for byte what it can act upon. */
export interface Told {
  readonly status: number;
  /** Code of the error, before or after the headers; null if there was none. */
  readonly code: string | null;
  /** Every finish reason other than null. */
  readonly finishReasons: string[];
}

/** See `createClient`. */
export interface Client {
  request(promptTokens: number, maxTokens: number): CompletionRequest;
  /** A stream with a random prompt of so many tokens, that goes on to its limit. */
  open(promptTokens: number, maxTokens?: number): OpenStream;
  /** Wait until that many requests are in a queue, over all workers of the role. */
  untilStage(stage: Stage, count: number): Promise<void>;
  /**
   * Wait until no room, page or slot is held anywhere, though the link is still held: what is remembered of rooms that
   * are over needs none of them. The credit that the peer may still use stays set aside until it has acknowledged.
   */
  untilNothingHeld(withinMs: number): Promise<void>;
  /** Everything is zero on every process, and a fixed prompt gets the answer it got first. */
  settles(withinMs: number): Promise<void>;
}

const CANARY = { prompt: randomPrompt(createPrng(1), 150), maxTokens: 12, ignoreEos: true };
const STAGE_TIMEOUT_MS = 30_000;
/** After a restart or a healed link, so long may requests be refused. */
const RECOVERY_MS = 10_000;

/** A client whose prompts follow from the seed. Asks the canary once. */
export async function createClient(cluster: SplitCluster, seed: number): Promise<Client> {
  const random = createPrng(seed);
  const canary = await complete(cluster.url, cluster.model, CANARY);
  const client: Client = {
    request: (promptTokens, maxTokens) => ({ prompt: randomPrompt(random, promptTokens), maxTokens, ignoreEos: true }),
    open: (promptTokens, maxTokens = 1000) =>
      openCompletion(cluster.url, cluster.model, client.request(promptTokens, maxTokens)),
    async untilStage(stage, count) {
      await untilMetrics(
        () => cluster.samples(),
        STAGE_TIMEOUT_MS,
        (samples) => countOf(samples, stage) === count,
        (samples) => `${count} in ${stage.join(' ')}, but ${held(samples).join(', ')}`,
      );
    },
    async untilNothingHeld(withinMs) {
      await untilMetrics(
        () => cluster.samples(),
        withinMs,
        (samples) => heldNow(samples).length === 0,
        (samples) => heldNow(samples).join('\n'),
      );
    },
    async settles(withinMs) {
      await untilQuiet(() => cluster.samples(), withinMs);
      const startMs = performance.now();
      for (;;) {
        const answer = await complete(cluster.url, cluster.model, CANARY).catch((error: unknown) => {
          // Refused because a worker is not back yet; anything else is a fault.
          const isRefusal = error instanceof ServerError && error.status === 503;
          if (!isRefusal || performance.now() - startMs > RECOVERY_MS) throw error;
          return null;
        });
        if (answer === null) continue;
        assert.deepEqual(answer, canary, 'the canary');
        break;
      }
      await untilQuiet(() => cluster.samples(), withinMs);
    },
  };
  return client;
}

function heldNow(samples: readonly Sample[]): string[] {
  return held(samples).filter((line) => !line.startsWith('handoff_transfer_in_flight_bytes'));
}

/** Requests in a queue, on pages that were read; NaN while no worker of the role answers. */
export function countOf(samples: readonly Sample[], [role, queue]: Stage): number {
  if (!samples.some(({ labels }) => labels.engine_type === role)) return NaN;
  return sumOf(samples, 'handoff_queue_requests', { engine_type: role, queue });
}

/** Ask once and report exactly what came back, streamed or not; never throws for what the server says. */
export async function ask(
  cluster: { url: string; model: string },
  request: CompletionRequest,
  stream: boolean,
): Promise<Told> {
  const response = await fetch(`${cluster.url}/v1/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({
      model: cluster.model,
      prompt: request.prompt,
      max_tokens: request.maxTokens,
      temperature: 0,
      ignore_eos: request.ignoreEos ?? false,
      stream,
      ...request.extra,
    }),
  });
  const text = await response.text();
  const isEvents = (response.headers.get('content-type') ?? '').startsWith('text/event-stream');
  const bodies = isEvents
    ? text
        .split('\n\n')
        .filter((event) => event.startsWith('data: ') && event !== 'data: [DONE]')
        .map((event) => event.slice('data: '.length))
    : [text];
  const told = { status: response.status, code: null as string | null, finishReasons: [] as string[] };
  for (const body of bodies) {
    const { error, choices = [] } = JSON.parse(body) as {
      error?: { code: string };
      choices?: { finish_reason: string | null }[];
    };
    if (error !== undefined) told.code = error.code;
    for (const choice of choices) if (choice.finish_reason !== null) told.finishReasons.push(choice.finish_reason);
  }
  return told;
}
