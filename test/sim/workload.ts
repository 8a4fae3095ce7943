/**
 * Clients: what they ask for, what they may see, and when they leave. Each checks its own answer, token by token, and
 * that it gets one outcome and nothing after it (I4, I5, I11 of the protocol).
 */

import { promptDigest } from '../../transfer/checksum.ts';
import type { Epoch, Reason } from '../../transfer/messages.ts';
import { ApiError } from '../../server/errors.ts';
import type { RoomDriver, RoomHandle, RoomOutcome } from '../../server/rooms.ts';
import { always, type Coverage } from './audit.ts';
import { ghostSeeds, ghostToken, promptSeed, VOCABULARY, type GhostSeeds } from './ghost.ts';
import type { Plan } from './swarm.ts';

/** How a client ends its own request, if it does. */
export type Leaving =
  | { kind: 'after_ms'; ms: number }
  | { kind: 'after_tokens'; count: number; isStop: boolean }
  | null;

/** A request that will be made. */
export interface Wish {
  atMs: number;
  promptTokens: number[];
  maxTokens: number;
  stopTokens: number[];
  leaving: Leaving;
}

/** One client and its request. */
export interface Client {
  readonly name: string;
  readonly wish: Wish;
  readonly seed: number;
  readonly seeds: GhostSeeds;
  readonly digest: string;
  /** The router it asked, in which of its lives. */
  readonly router: Epoch;
  readonly startedMs: number;
  readonly requestMs: number;
  handle: RoomHandle | null;
  tokens: number[];
  outcome: RoomOutcome | null;
  /** Why the room failed; null if it did not. */
  reason: Reason | null;
  /** It went away, stopped, or its router died. */
  hasLeft: boolean;
  isRouterDead: boolean;
  /** Lives of workers that were sent a half of it. */
  workers: Set<Epoch>;
}

/** The requests of a seed. Some share a prompt or begin alike, some come in bursts. */
export function drawWishes(plan: Plan, random: () => number): Wish[] {
  const wishes: Wish[] = [];
  const longest = plan.decode.maxSequenceTokens;
  let atMs = 500;
  for (let i = 0; i < plan.requestCount; i++) {
    if (random() < 0.6) atMs += (random() * plan.activeMs * 1.5) / plan.requestCount;
    wishes.push(drawWish(Math.min(atMs, plan.activeMs), { longest, ...plan }, wishes, random));
  }
  return wishes;
}

/** A request that nobody ends early, whatever the plan: what must work once all is well again. */
export function canaryWish(atMs: number, random: () => number): Wish {
  return { ...drawWish(atMs, { longest: 32, cancel: 0, longAnswers: false }, [], random), stopTokens: [] };
}

function drawWish(
  atMs: number,
  { longest, cancel, longAnswers }: { longest: number; cancel: number; longAnswers: boolean },
  earlier: readonly Wish[],
  random: () => number,
): Wish {
  const between = (low: number, high: number): number => low + Math.floor(random() * (high - low + 1));
  const isLong = random() < (longAnswers ? 0.8 : 0.1);
  const maxTokens = random() < 0.2 ? between(1, 2) : isLong ? between(12, 28) : between(1, 12);
  const promptCount = between(1, random() < 0.3 ? longest - maxTokens : Math.min(12, longest - maxTokens));
  const shared = random() < 0.3 ? earlier[between(0, earlier.length - 1)] : undefined;
  const begin = shared?.promptTokens.slice(0, between(1, promptCount)) ?? [];
  const leaving: Leaving =
    random() >= cancel
      ? null
      : random() < 0.5
        ? { kind: 'after_ms', ms: Math.floor(random() ** 3 * 4000) }
        : { kind: 'after_tokens', count: between(1, maxTokens), isStop: random() < 0.5 };
  return {
    atMs,
    maxTokens,
    promptTokens: [...begin, ...Array.from({ length: promptCount - begin.length }, () => between(0, 999))],
    stopTokens: random() < 0.3 ? [between(0, VOCABULARY - 1), between(0, VOCABULARY - 1)] : [],
    leaving,
  };
}

/** What a client needs of the world. */
export interface Desk {
  coverage: Coverage;
  now: () => number;
  after: (ms: number, act: () => void) => void;
  trace: (who: string, what: () => string) => void;
  /** Why the room whose outcome is being told failed; null if it did not. */
  takeReason: () => Reason | null;
  /** True if that life of a worker, or its link to the router, was lost since. */
  wasDisturbed: (epoch: Epoch, sinceMs: number) => boolean;
}

/** Ask a router. Null if it refuses at once; then nothing was reserved. */
export function startClient(
  desk: Desk,
  rooms: RoomDriver,
  { name, wish, router, plan }: { name: string; wish: Wish; router: Epoch; plan: Plan },
  onCreated: (client: Client) => void,
): Client | null {
  const digest = promptDigest(Uint32Array.from(wish.promptTokens), plan.decode.modelDigest);
  const client: Client = {
    name,
    wish,
    digest,
    seed: promptSeed(digest),
    seeds: ghostSeeds(wish.promptTokens, promptSeed(digest)),
    router,
    startedMs: desk.now(),
    requestMs: plan.requestMs,
    handle: null,
    tokens: [],
    outcome: null,
    reason: null,
    hasLeft: false,
    isRouterDead: false,
    workers: new Set(),
  };
  onCreated(client);
  const request = {
    requestId: name,
    promptTokens: wish.promptTokens,
    sampling: { temperature: 0, topK: 0, topP: 1, minP: 0, seed: 0 },
    maxTokens: wish.maxTokens,
    stopTokenIds: wish.stopTokens,
    salt: null,
  };
  try {
    client.handle = rooms.start(request, {
      onTokens: (ids) => receiveTokens(desk, client, ids),
      onCached: () => {},
      onEnd: (outcome) => receiveOutcome(desk, client, outcome, plan),
    });
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    desk.trace(name, () => `refused: ${error.code}`);
    desk.coverage.saw(`refused ${error.code}`);
    return null;
  }
  const { leaving } = wish;
  if (leaving?.kind === 'after_ms') {
    desk.after(leaving.ms, () => {
      if (client.outcome === null) leave(desk, client, 'client_lost');
    });
  }
  return client;
}

/** The client goes away, or has what it wanted. */
export function leave(desk: Desk, client: Client, why: 'client_lost' | 'stop_string'): void {
  if (client.hasLeft || client.outcome !== null) return;
  client.hasLeft = true;
  desk.trace(client.name, () => `leaves: ${why}`);
  client.handle?.cancel(why);
}

function receiveTokens(desk: Desk, client: Client, ids: readonly number[]): void {
  const { wish, tokens, name } = client;
  desk.trace(name, () => `gets ${ids.length} tokens after ${tokens.length}`);
  always(client.outcome === null && !client.hasLeft, 'I5', () => `${name}: a token after the end`);
  for (const id of ids) {
    const last = tokens.at(-1);
    always(last === undefined || !wish.stopTokens.includes(last), 'I4', () => `${name}: a token after a stop token`);
    always(id === ghostToken(client.seed, tokens.length), 'I4', () => `${name}: token ${tokens.length} is wrong`);
    tokens.push(id);
  }
  always(tokens.length <= wish.maxTokens, 'I4', () => `${name}: ${tokens.length} tokens of ${wish.maxTokens}`);
  const { leaving } = wish;
  if (leaving?.kind !== 'after_tokens' || tokens.length < leaving.count) return;
  // As the server does it: a stop string is found while tokens are being delivered.
  leave(desk, client, leaving.isStop ? 'stop_string' : 'client_lost');
}

function receiveOutcome(desk: Desk, client: Client, outcome: RoomOutcome, plan: Plan): void {
  const { name, wish, tokens } = client;
  const reason = desk.takeReason();
  client.reason = reason;
  desk.trace(name, () => `ends: ${outcome.kind}${reason === null ? '' : ` (${reason})`}`);
  always(client.outcome === null, 'I5', () => `${name}: a second outcome`);
  client.outcome = outcome;
  desk.coverage.saw(`outcome ${outcome.kind}${reason === null ? '' : ` ${reason}`}`);
  if (client.hasLeft) return;
  if (reason === null) {
    const isStopped = wish.stopTokens.includes(tokens.at(-1) ?? -1);
    const isComplete = outcome.kind === 'stop' ? isStopped : tokens.length === wish.maxTokens;
    always(isComplete, 'I4', () => `${name}: ${outcome.kind} after ${tokens.length} of ${wish.maxTokens} tokens`);
    return;
  }
  if (plan.mode === 'harmless') {
    // More than fits is refused, by either half, in good weather too; nothing else may fail.
    const isFull = reason === 'overloaded' || reason === 'out_of_memory' || reason === 'peer_aborted';
    always(isFull && plan.isTight, 'L1', () => `${name}: ended by ${reason}, but every fault was harmless`);
  }
  if (tokens.length === 0) return;
  // I11: after its first token only the client, the router, D itself or the request's deadline ends a room.
  const allowed: Partial<Record<Reason, boolean>> = {
    deadline: desk.now() - client.startedMs >= client.requestMs,
    peer_lost: [...client.workers].some((worker) => desk.wasDisturbed(worker, client.startedMs)),
    out_of_memory: true,
    shutdown: true,
  };
  always(allowed[reason] === true, 'I11', () => `${name}: ended by ${reason} after ${tokens.length} tokens`);
}
