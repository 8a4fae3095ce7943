/** The thread behind encoder.ts: encodes one prompt at a time, and knows nothing of requests. */
import { parentPort, workerData } from 'node:worker_threads';
import { loadTokenizer } from '../../model/tokenizer.ts';
import type { PromptPiece } from '../../model/tokenizer.ts';

/** What the thread is started with. */
export interface EncoderThreadData {
  /** Of the checkpoint, whose tokenizer is read here once more: its tables cannot be shared between threads. */
  readonly modelDirectory: string;
}

const { modelDirectory } = workerData as EncoderThreadData;
const tokenizer = loadTokenizer(modelDirectory);

parentPort?.on('message', (prompt: string | readonly PromptPiece[]) => {
  const ids = Uint32Array.from(tokenizer.encode(prompt));
  parentPort?.postMessage(ids, [ids.buffer]);
});
