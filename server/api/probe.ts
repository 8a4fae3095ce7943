/** GET /health_generate: whether a token comes out of the whole path, prefill, transfer and decode. */
import { performance } from 'node:perf_hooks';
import { ApiError } from '../errors.ts';
import type { Rooms } from '../rooms.ts';
import type { Tokenizer } from '../../model/tokenizer.ts';

/** A token that was seen within this time is proof enough. */
const freshMs = 1000;
/** How long a token may take. */
const patienceMs = 20_000;

/**
 * A probe of these rooms: resolves when one token has come, at once if one came lately. Probes that are asked for while
 * one runs share it. Rejects with `ApiError` 503.
 */
export function createProbe(
  { rooms, tokenizer }: { rooms: Rooms; tokenizer: Tokenizer },
  lastTokenMs: () => number,
): () => Promise<void> {
  let running: Promise<void> | null = null;
  const prompt = tokenizer.encode('hi');

  function generate(): Promise<void> {
    return new Promise((resolve, reject) => {
      const fail = (why: string) => reject(new ApiError('engine_unavailable', `No token came: ${why}.`));
      const timer = setTimeout(() => {
        handle.cancel('client_lost');
        fail(`${patienceMs / 1000} s have passed`);
      }, patienceMs);
      const sampling = { temperature: 0, topP: 1, topK: 0, minP: 0, seed: 0 };
      const least = { maxTokens: 1, stopTokenIds: [], salt: null };
      const request = { requestId: 'health_generate', promptTokens: prompt, sampling, ...least };
      const handle = rooms.start(request, {
        onTokens: () => resolve(),
        onCached: () => {},
        onEnd(outcome) {
          clearTimeout(timer);
          if (outcome.kind === 'failed') fail(outcome.error.message);
          else if (outcome.kind === 'cancelled') fail('it was cancelled');
          else resolve();
        },
      });
    });
  }

  return async () => {
    if (performance.now() - lastTokenMs() < freshMs) return;
    running ??= generate().finally(() => {
      running = null;
    });
    await running;
  };
}
