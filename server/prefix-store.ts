/**
 * A store outside this process for what the prefix tier keeps: Valkey or Redis, through its ordinary client.
 *
 * It may be slow or gone at any time. So nothing waits for it longer than a deadline, and while a command is overdue no
 * other is sent: a server that stands still costs one deadline, not one for each request. Nothing here ever throws.
 */
import { createClient, RESP_TYPES } from '@redis/client';

/** Values that are on their way to the store at once; more are not stored. */
const MAX_PENDING_BYTES = 64 << 20;
const CONNECT_MS = 1000;
const MAX_RECONNECT_MS = 5000;

/** Where values are kept by name. */
export interface PrefixStore {
  /** The values of these names, null where there is none; null as a whole if it is not known in time. */
  get(names: readonly string[], limitMs: number): Promise<(Uint8Array | null)[] | null>;
  /** Which of these names have a value; null if that is not known in time. */
  has(names: readonly string[], limitMs: number): Promise<boolean[] | null>;
  /** Store a value, some time, perhaps. */
  put(name: string, value: Uint8Array): void;
  close(): void;
}

/** Connect to `url`, again and again. `onFault` hears of each change for the worse, by its kind. */
export function openPrefixStore(url: string, onFault: (kind: 'gone' | 'slow', detail: string) => void): PrefixStore {
  const client = createClient({
    url,
    disableOfflineQueue: true,
    socket: {
      connectTimeout: CONNECT_MS,
      reconnectStrategy: (retries) => Math.min(100 * 2 ** Math.min(retries, 10), MAX_RECONNECT_MS),
    },
  });
  const binary = client.withTypeMapping({ [RESP_TYPES.BLOB_STRING]: Buffer });
  let isGone = false;
  let overdue = 0;
  let pendingBytes = 0;
  client.on('error', (error: Error) => {
    if (!isGone) onFault('gone', error.message);
    isGone = true;
  });
  client.on('ready', () => {
    isGone = false;
  });
  client.connect().catch((error: Error) => onFault('gone', error.message));

  /** What `ask` brings within the time, or null. */
  async function inTime<T>(limitMs: number, ask: () => Promise<T>): Promise<T | null> {
    if (!client.isReady || overdue > 0 || limitMs <= 0) return null;
    let timer: NodeJS.Timeout | undefined;
    const late = new Promise<null>((resolve) => {
      timer = setTimeout(() => {
        onFault('slow', `no answer within ${Math.ceil(limitMs)} ms`);
        overdue++;
        const settle = (): void => void overdue--;
        answer.then(settle, settle);
        resolve(null);
      }, limitMs);
    });
    const answer = ask().catch(() => null);
    try {
      return await Promise.race([answer, late]);
    } finally {
      clearTimeout(timer);
    }
  }

  return {
    get: (names, limitMs) => inTime(limitMs, async () => (await binary.mGet([...names])) as (Buffer | null)[]),
    has: (names, limitMs) =>
      inTime(limitMs, async () => (await Promise.all(names.map((name) => client.exists(name)))).map((n) => n > 0)),
    put(name, value) {
      if (!client.isReady || overdue > 0 || pendingBytes + value.byteLength > MAX_PENDING_BYTES) return;
      pendingBytes += value.byteLength;
      const settle = (): void => void (pendingBytes -= value.byteLength);
      client.set(name, Buffer.from(value.buffer, value.byteOffset, value.byteLength)).then(settle, settle);
    },
    close: () => client.destroy(),
  };
}
