/** A router played by hand: control links to real workers, on which a test says what no honest router says. */
import { openConnector, type Peer } from '../../transfer/channel.ts';
import type { Message, RouterToWorker, SubmitMessage, WorkerRef, WorkerToRouter } from '../../transfer/messages.ts';
import { makeEpoch, makeKey, makeRoomId, type Epoch, type RoomKey } from '../../transfer/messages.ts';
import { promptDigest } from '../../transfer/checksum.ts';
import { digestModel } from '../../server/model-digest.ts';

const MODEL_DIR = new URL('../../model/nano/', import.meta.url).pathname;
const ANSWER_TIMEOUT_MS = 20_000;

/** Messages a worker sent, in order, `load` left out. */
export interface Heard {
  readonly from: Epoch;
  readonly message: Exclude<WorkerToRouter, { type: 'load' }>;
}

export interface HandRouter {
  readonly prefill: WorkerRef;
  readonly decode: WorkerRef;
  readonly heard: readonly Heard[];
  keyOf(sequence: number | bigint, attempt?: number): RoomKey;
  /** The submit of a prompt, as both workers would get it. */
  submitOf(key: RoomKey, prompt: readonly number[], maxTokens: number): SubmitMessage;
  /** Send to one worker or, if none is named, to both. */
  send(message: RouterToWorker, to?: WorkerRef): void;
  /** Wait until what was heard satisfies `holds`. Rejects after 20 s. */
  until(holds: (heard: readonly Heard[]) => boolean): Promise<void>;
  /** Ids delivered for a key so far, in the order of their positions; throws if one came twice. */
  tokensOf(key: RoomKey): number[];
  /** Ends of a key by worker, as their reasons or finishes; each is acknowledged when it is heard. */
  endsOf(key: RoomKey, from: WorkerRef): string[];
  close(): Promise<void>;
}

/** Link to the two workers that listen at these control addresses. */
export async function openHandRouter(addresses: { prefill: string; decode: string }): Promise<HandRouter> {
  const modelDigest = await digestModel(MODEL_DIR);
  const epoch = makeEpoch(Date.now(), process.pid);
  const peers = new Map<string, Peer>();
  const heard: Heard[] = [];
  const waiters = new Set<() => void>();
  const wake = (): void => {
    for (const waiter of [...waiters]) waiter();
  };
  const connector = openConnector({
    role: 'router',
    name: `router@hand-${process.pid}`,
    epoch,
    fields: { model: modelDigest },
    heartbeatMs: 1000,
    leaseMs: 10_000,
    dataSilenceMs: 10_000,
    maxQueuedMessages: 10_000,
    maxQueuedBytes: 1 << 26,
    maxPayloadBytes: 0,
    lingerMs: 200,
    onEvent(event) {
      if (event.type === 'up') peers.set(event.address, event.peer);
      if (event.type === 'message') {
        const message = event.message as Message;
        if (message.type === 'load') return;
        heard.push({ from: event.peer.epoch, message: message as Heard['message'] });
        if (message.type === 'end') {
          connector.send(event.peer.epoch, 'control', { type: 'end_ack', key: message.key });
        }
      }
      wake();
    },
  });

  function until(holds: () => boolean): Promise<void> {
    return new Promise((resolve, reject) => {
      const finish = (act: () => void): void => {
        waiters.delete(look);
        clearTimeout(timer);
        act();
      };
      const look = (): void => {
        if (holds()) finish(resolve);
      };
      const timer = setTimeout(
        () => finish(() => reject(new Error(`not heard: ${JSON.stringify(heard)}`))),
        ANSWER_TIMEOUT_MS,
      );
      waiters.add(look);
      look();
    });
  }

  connector.connect(addresses.prefill, true);
  connector.connect(addresses.decode, true);
  await until(() => peers.size === 2);
  const refOf = (address: string): WorkerRef => {
    const { name, epoch: life, fields } = peers.get(address)!;
    return { name, epoch: life, address: fields['transfer'] ?? '' };
  };
  const prefill = refOf(addresses.prefill);
  const decode = refOf(addresses.decode);

  return {
    prefill,
    decode,
    heard,
    keyOf: (sequence, attempt = 1) => makeKey(makeRoomId(epoch, sequence as number), attempt),
    submitOf(key, prompt, maxTokens) {
      const promptTokens = Uint32Array.from(prompt);
      return {
        type: 'submit',
        key,
        prefill,
        decode,
        digest: promptDigest(promptTokens, modelDigest),
        promptTokens,
        maxTokens,
        stopTokens: [],
        sampling: { temperature: 0, topK: 0, topP: 1, minP: 0, seed: 0 },
        salt: null,
        budgetMs: 60_000,
      };
    },
    send(message, to) {
      for (const worker of to === undefined ? [decode, prefill] : [to]) {
        connector.send(worker.epoch, 'control', message);
      }
    },
    until: (holds) => until(() => holds(heard)),
    tokensOf(key) {
      const tokens: number[] = [];
      for (const { message } of heard) {
        if (message.type !== 'tokens') continue;
        for (const row of message.rows) {
          if (row.key !== key) continue;
          if (row.position !== tokens.length) throw new Error(`position ${row.position} after ${tokens.length} tokens`);
          tokens.push(...row.tokens);
        }
      }
      return tokens;
    },
    endsOf: (key, from) =>
      heard.flatMap(({ from: worker, message }) => {
        if (message.type !== 'end' || message.key !== key || worker !== from.epoch) return [];
        return [message.outcome.ok ? message.outcome.finish : message.outcome.reason];
      }),
    close: () => connector.close(),
  };
}
