/**
 * The tier below the prefix cache: verified pages and states in host memory and, if there is one, in a store outside
 * (server/prefix-store.ts). They come back when the adapter has evicted them, or after a restart.
 *
 * A value is named by a chain of SHA-256 over the model, the layout, the salt and all tokens up to its end, and holds the
 * tokens of its page and a checksum over all of it. What does not agree in every respect is not there. What takes too long
 * neither: the worst that the tier can do is to cost a computation and a short wait.
 */
import { createHash } from 'node:crypto';
import type { TierFetch, TierStash } from '../scheduler/types.ts';
import { crc32c } from '../transfer/checksum.ts';
import type { Salt } from '../transfer/messages.ts';
import type { Engine } from './engine.ts';
import type { PrefixStore } from './prefix-store.ts';

/** A prompt waits at most so long for a store. */
const FETCH_MS = 250;
/** Values asked for at once: a prompt that is not there costs one question. */
const BATCH = 8;
const CHECKSUM_BYTES = 4;

/** Counts since the start, and what is held now. */
export interface TierStats {
  readonly heldBytes: number;
  readonly fetchedPages: number;
  readonly damaged: number;
}

/** See the head of this file. */
export interface PrefixTier {
  /** Copy pages and states. Rejects when the device is lost. */
  stash(what: TierStash): Promise<void>;
  /** Write what there is into the places; how many tokens of the prompt are there then, or `from` pages of them. */
  fetch(where: TierFetch): Promise<number>;
  /** Forget what is in host memory. */
  clear(): void;
  stats(): TierStats;
  close(): void;
}

/** A tier over the engine's cache. `identity` is what two caches must agree on: model and layout. */
export function createPrefixTier(
  engine: Engine,
  { identity, limitBytes, store }: { identity: string; limitBytes: number; store: PrefixStore | null },
): PrefixTier {
  const { pageTokens } = engine.config;
  /** Longest unused first. */
  const held = new Map<string, Uint8Array>();
  let heldBytes = 0;
  let fetchedPages = 0;
  let damaged = 0;

  /** Names of a prompt's first `count` pages. */
  function namesOf({ tokens, salt }: { tokens: Uint32Array; salt: Salt }, count: number): string[] {
    let previous = createHash('sha256')
      .update(JSON.stringify([identity, salt]))
      .digest();
    return Array.from({ length: count }, (_, index) => {
      previous = createHash('sha256')
        .update(previous)
        .update(bytesOf(pageOf(tokens, index)))
        .digest();
      return `handoff:${previous.toString('hex')}`;
    });
  }

  function pageOf(tokens: Uint32Array, index: number): Uint32Array {
    return tokens.subarray(index * pageTokens, (index + 1) * pageTokens);
  }

  function hold(name: string, value: Uint8Array): void {
    const before = held.get(name);
    held.delete(name);
    heldBytes -= before?.byteLength ?? 0;
    if (value.byteLength > limitBytes) return;
    held.set(name, value);
    heldBytes += value.byteLength;
    for (const [oldest, { byteLength }] of held) {
      if (heldBytes <= limitBytes) break;
      held.delete(oldest);
      heldBytes -= byteLength;
    }
  }

  function keep(name: string, tokens: Uint32Array, bytes: Uint8Array): void {
    const value = new Uint8Array(CHECKSUM_BYTES + tokens.byteLength + bytes.byteLength);
    value.set(bytesOf(tokens), CHECKSUM_BYTES);
    value.set(bytes, CHECKSUM_BYTES + tokens.byteLength);
    new DataView(value.buffer).setUint32(0, crc32c(value.subarray(CHECKSUM_BYTES)), true);
    hold(name, value);
    store?.put(name, value);
  }

  /** The bytes in a value, if it is whole and of these tokens. */
  function open(value: Uint8Array, tokens: Uint32Array, byteLength: number): Uint8Array | null {
    const expected = bytesOf(tokens);
    const start = CHECKSUM_BYTES + expected.byteLength;
    const isWhole =
      value.byteLength === start + byteLength &&
      new DataView(value.buffer, value.byteOffset).getUint32(0, true) === crc32c(value.subarray(CHECKSUM_BYTES)) &&
      Buffer.compare(value.subarray(CHECKSUM_BYTES, start), expected) === 0;
    if (!isWhole) damaged++;
    return isWhole ? value.subarray(start) : null;
  }

  /** Values by name, from host memory or the store; null where there is none. */
  async function find(names: readonly string[], limitMs: number): Promise<(Uint8Array | null)[]> {
    const values = names.map((name) => held.get(name) ?? null);
    const missing = names.filter((_, index) => values[index] === null);
    const stored = missing.length > 0 ? ((await store?.get(missing, limitMs)) ?? []) : [];
    for (const [index, name] of missing.entries()) {
      const value = stored[index];
      if (value == null) continue;
      values[names.indexOf(name)] = value;
      hold(name, value);
    }
    return values;
  }

  return {
    async stash({ tokens, salt, pages, states }) {
      const count = Math.max(0, ...[...pages, ...states].map(({ index }) => index + 1));
      const names = namesOf({ tokens, salt }, count);
      const bytes = await engine.readUnits(
        pages.map(({ page }) => page),
        null,
      );
      for (const [at, { index }] of pages.entries()) keep(names[index]!, pageOf(tokens, index), bytes[at]!);
      for (const { index, state } of states) {
        keep(`${names[index]!}:state`, pageOf(tokens, index), await engine.readState(state));
      }
    },
    async fetch({ tokens, salt, from, pages, slot, keep: state }) {
      const untilMs = performance.now() + FETCH_MS;
      const left = (): number => untilMs - performance.now();
      const names = namesOf({ tokens, salt }, pages.length);
      const found: Uint8Array[] = [];
      for (let first = from; first < names.length; first += BATCH) {
        const values = await find(names.slice(first, first + BATCH), left());
        for (const [at, value] of values.entries()) {
          const bytes = value === null ? null : open(value, pageOf(tokens, first + at), engine.pageBytes);
          if (bytes === null) break;
          found.push(bytes);
        }
        if (found.length < Math.min(first + BATCH, names.length) - from) break;
      }
      // The deepest page with a state is how far it goes.
      const stateNames = names.slice(from, from + found.length).map((name) => `${name}:state`);
      const stored = stateNames.every((name) => held.has(name))
        ? null
        : ((await store?.has(stateNames, left())) ?? null);
      for (let at = found.length - 1; at >= 0; at--) {
        const name = stateNames[at]!;
        if (!held.has(name) && stored?.[at] !== true) continue;
        const [value] = await find([name], left());
        const bytes = value == null ? null : open(value, pageOf(tokens, from + at), engine.slotBytes);
        if (bytes === null) continue;
        for (let index = 0; index <= at; index++) engine.writePage(pages[from + index]!, found[index]!);
        engine.writeSlot(slot, bytes);
        if (state !== null) engine.keepSlot(slot, state);
        fetchedPages += at + 1;
        return (from + at + 1) * pageTokens;
      }
      return from * pageTokens;
    },
    clear() {
      held.clear();
      heldBytes = 0;
    },
    stats: () => ({ heldBytes, fetchedPages, damaged }),
    close: () => store?.close(),
  };
}

function bytesOf(tokens: Uint32Array): Uint8Array {
  return new Uint8Array(tokens.buffer, tokens.byteOffset, tokens.byteLength);
}
