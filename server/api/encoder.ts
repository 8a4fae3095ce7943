/**
 * Long prompts are encoded in a thread, so that the event loop goes on: all streams of the router run on it, and a prompt
 * of 100,000 characters would stop each of them for 200 ms.
 *
 * There is one thread. It is given one prompt at a time, so that those whose clients have left can be dropped while they
 * wait.
 */
import { extname } from 'node:path';
import { Worker } from 'node:worker_threads';
import type { PromptPiece } from '../../model/tokenizer.ts';
import type { EncoderThreadData } from './encoder-thread.ts';

/**
 * Token ids of a prompt; null once `signal` is aborted. Prompts are done in the order in which they come. Rejects when
 * the thread has died of this prompt; the next one gets a new thread.
 */
export type EncodeAside = (prompt: string | readonly PromptPiece[], signal: AbortSignal) => Promise<number[] | null>;

interface Job {
  readonly prompt: string | readonly PromptPiece[];
  readonly resolve: (ids: number[] | null) => void;
  readonly reject: (error: unknown) => void;
}

/**
 * An encoder for the checkpoint in `modelDirectory`. Its thread starts with the first prompt and keeps the process
 * alive while it has one.
 */
export function createEncoder(modelDirectory: string): EncodeAside {
  const waiting = new Set<Job>();
  let running: Job | null = null;
  let thread: Worker | null = null;

  function startThread(): Worker {
    const workerData: EncoderThreadData = { modelDirectory };
    const started = openThread(workerData);
    started.on('message', (ids: Uint32Array) => settle((job) => job.resolve(Array.from(ids))));
    const die = (cause: unknown): void => {
      if (thread !== started) return;
      thread = null;
      settle((job) => job.reject(new Error('the thread that encodes prompts has died', { cause })));
    };
    started.once('error', die);
    started.once('exit', (code) => die(`exit code ${code}`));
    return started;
  }

  function settle(act: (job: Job) => void): void {
    const job = running;
    running = null;
    thread?.unref();
    if (job !== null) act(job);
    next();
  }

  function next(): void {
    const [job] = waiting;
    if (running !== null || job === undefined) return;
    waiting.delete(job);
    running = job;
    thread ??= startThread();
    thread.ref();
    thread.postMessage(job.prompt);
  }

  return (prompt, signal) =>
    new Promise((resolve, reject) => {
      if (signal.aborted) return resolve(null);
      const settled = (): void => signal.removeEventListener('abort', leave);
      const job: Job = {
        prompt,
        resolve(ids) {
          settled();
          resolve(ids);
        },
        reject(error) {
          settled();
          reject(error as Error);
        },
      };
      const leave = (): void => {
        waiting.delete(job);
        resolve(null);
      };
      signal.addEventListener('abort', leave, { once: true });
      waiting.add(job);
      next();
    });
}

/** The thread's file as it is in the package, or as a source: then the thread has to be taught TypeScript by itself. */
function openThread(workerData: EncoderThreadData): Worker {
  const extension = extname(import.meta.url);
  const file = new URL(`./encoder-thread${extension}`, import.meta.url);
  if (extension !== '.ts') return new Worker(file, { workerData });
  const [loader, source] = [import.meta.resolve('tsx/esm/api'), file.href].map((url) => JSON.stringify(url));
  const code = `import(${loader}).then(({ register }) => (register(), import(${source})));`;
  return new Worker(code, { eval: true, workerData });
}
