/**
 * Streams that read on while others leave, in a process of their own: the gaps between their tokens are the server's, not
 * those of a client that is busy with closing hundreds of connections.
 *
 * The parent calls `openBystanders`; run as a program, this file is the child. Times are of the epoch, ms, so that both
 * mean the same.
 */
import { fork } from 'node:child_process';
import { once } from 'node:events';
import { fileURLToPath } from 'node:url';
import { createPrng, randomPrompt } from '../test/support/prng.ts';

/** Streams under way in the other process. */
export interface Bystanders {
  /** Gaps between two tokens that overlap a window, ms. One that has not ended counts as long as it has lasted. */
  gaps(fromMs: number, toMs: number): Promise<number[]>;
  /** Cuts all of them. Returns how many had come to their end before. Rejects if one was told an error. */
  leave(): Promise<number>;
}

/** To the child. */
type Order =
  | { readonly open: number; readonly url: string; readonly model: string }
  | { readonly fromMs: number; readonly toMs: number }
  | { readonly leave: true };
/** From the child: to `open`, to a window, to `leave`. */
type Answer = { readonly opened: true } | { readonly gaps: number[] } | { readonly done: number };

const PROMPT_TOKENS = 64;
/** Longer than any window takes. */
const ANSWER_TOKENS = 3900;

/** Opens `count` streams and resolves when each has its first token. */
export async function openBystanders(url: string, model: string, count: number): Promise<Bystanders> {
  const child = fork(fileURLToPath(import.meta.url), { execArgv: ['--import', 'tsx'] });
  const ask = async <A extends Answer>(order: Order): Promise<A> => {
    const abort = new AbortController();
    const ended = once(child, 'exit', { signal: abort.signal }).then(() => {
      throw new Error('the bystanders failed; see above');
    });
    child.send(order);
    const [answer] = (await Promise.race([once(child, 'message', { signal: abort.signal }), ended])) as [A];
    ended.catch(() => {}); // it is over
    abort.abort();
    return answer;
  };
  await ask({ open: count, url, model });
  return {
    gaps: async (fromMs, toMs) => (await ask<{ gaps: number[] }>({ fromMs, toMs })).gaps,
    async leave() {
      const { done } = await ask<{ done: number }>({ leave: true });
      child.disconnect();
      return done;
    },
  };
}

/** One stream: when its pieces came, and how it ended. */
interface Reader {
  readonly arrivalsMs: number[];
  readonly first: Promise<void>;
  readonly ended: Promise<'cut' | 'done'>;
  cut(): void;
}

function openReader(url: string, model: string, prompt: readonly number[]): Reader {
  const abort = new AbortController();
  const arrivalsMs: number[] = [];
  let started = (): void => {};
  const first = new Promise<void>((resolve) => (started = resolve));
  const read = async (): Promise<'done'> => {
    const response = await fetch(`${url}/v1/completions`, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify({
        model,
        prompt,
        max_tokens: ANSWER_TOKENS,
        ignore_eos: true,
        temperature: 0,
        stream: true,
      }),
      signal: abort.signal,
    });
    if (!response.ok) throw new Error(`a bystander was answered ${response.status}: ${await response.text()}`);
    const decoder = new TextDecoder();
    let tail = '';
    for await (const bytes of response.body!) {
      tail = (tail + decoder.decode(bytes, { stream: true })).slice(-10_000);
      if (tail.includes('"error"')) throw new Error(`a bystander was told ${tail}`);
      arrivalsMs.push(Date.now());
      started();
    }
    return 'done';
  };
  const ended = read().catch((error: unknown) => {
    if (abort.signal.aborted) return 'cut' as const;
    throw error;
  });
  return { arrivalsMs, first, ended, cut: () => abort.abort() };
}

function gapsWithin(readers: readonly Reader[], fromMs: number, toMs: number): number[] {
  return readers.flatMap(({ arrivalsMs }) => {
    const ends = [...arrivalsMs, Date.now()];
    const gaps: number[] = [];
    for (let i = 1; i < ends.length; i++) {
      if (ends[i]! > fromMs && ends[i - 1]! < toMs) gaps.push(ends[i]! - ends[i - 1]!);
    }
    return gaps;
  });
}

function serveOrders(): void {
  let readers: Reader[] = [];
  const answer = (what: Answer): void => void process.send!(what);
  const obey = async (order: Order): Promise<void> => {
    if ('open' in order) {
      const random = createPrng(order.open);
      readers = Array.from({ length: order.open }, () =>
        openReader(order.url, order.model, randomPrompt(random, PROMPT_TOKENS)),
      );
      await Promise.all(readers.map((reader) => Promise.race([reader.first, reader.ended])));
      answer({ opened: true });
    } else if ('fromMs' in order) {
      answer({ gaps: gapsWithin(readers, order.fromMs, order.toMs) });
    } else {
      for (const reader of readers) reader.cut();
      const endings = await Promise.all(readers.map((reader) => reader.ended));
      answer({ done: endings.filter((ending) => ending === 'done').length });
    }
  };
  process.on('message', (order: Order) => void obey(order));
}

if (process.argv[1] === fileURLToPath(import.meta.url)) serveOrders();
