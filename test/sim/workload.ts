/**
 * Clients: what they ask for, what they may see, and when they leave. Each checks its own answer, token by token, and
 * what it is told of their choice, and that it gets one outcome and nothing after it (I4, I5, I11 of the protocol).
 */

import { promptDigest } from '../../transfer/checksum.ts';
import type {
  Epoch,
  PackedChoices,
  Reason,
  Salt,
  SamplingParams,
  SamplingRules,
  TokenChoice,
} from '../../transfer/messages.ts';
import { ApiError } from '../../server/errors.ts';
import type { RoomDriver, RoomHandle, RoomOutcome } from '../../server/rooms.ts';
import { answerTo, type Answer } from './answer.ts';
import { always, type Coverage } from './audit.ts';
import { answerSeed, ghostSeeds, VOCABULARY, type GhostSeeds } from './ghost.ts';
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
  sampling: SamplingParams;
  salt: Salt;
  leaving: Leaving;
}

/** One client and its request. */
export interface Client {
  readonly name: string;
  readonly wish: Wish;
  /** The right one. */
  readonly answer: Answer;
  /** Of its prompt and its answer. */
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

/** The requests of a seed. Some share a prompt or begin alike, some come in bursts, some are choices of one request. */
export function drawWishes(plan: Plan, random: () => number): Wish[] {
  const wishes: Wish[] = [];
  const longest = plan.decode.maxSequenceTokens;
  let atMs = 500;
  while (wishes.length < plan.requestCount) {
    if (random() < 0.6) atMs += (random() * plan.activeMs * 1.5) / plan.requestCount;
    const wish = drawWish(Math.min(atMs, plan.activeMs), { longest, ...plan }, wishes, random);
    const choiceCount = plan.isRuled && random() < 0.15 ? 2 + Math.floor(random() * 2) : 1;
    for (let choice = 0; choice < choiceCount && wishes.length < plan.requestCount; choice++) {
      const { sampling } = wish;
      wishes.push({ ...wish, sampling: { ...sampling, seed: (sampling.seed + choice) >>> 0 } });
    }
  }
  return wishes;
}

/** A request that nobody ends early, whatever the plan: what must work once all is well again. */
export function canaryWish(atMs: number, random: () => number): Wish {
  const plan = { longest: 32, cancel: 0, longAnswers: false, isRuled: false, salts: [null] };
  return { ...drawWish(atMs, plan, [], random), stopTokens: [] };
}

function drawWish(
  atMs: number,
  {
    longest,
    cancel,
    longAnswers,
    isRuled,
    salts,
  }: { longest: number } & Pick<Plan, 'cancel' | 'longAnswers' | 'isRuled' | 'salts'>,
  earlier: readonly Wish[],
  random: () => number,
): Wish {
  const between = (low: number, high: number): number => low + Math.floor(random() * (high - low + 1));
  const isLong = random() < (longAnswers ? 0.8 : 0.1);
  const maxTokens = random() < 0.2 ? between(1, 2) : isLong ? between(12, 28) : between(1, 12);
  const promptCount = between(1, random() < 0.3 ? longest - maxTokens : Math.min(12, longest - maxTokens));
  // Salts only make a difference to prompts that begin alike.
  const shared = random() < (salts.length > 1 ? 0.6 : 0.3) ? earlier[between(0, earlier.length - 1)] : undefined;
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
    // A part of them may come in an answer.
    promptTokens: [...begin, ...Array.from({ length: promptCount - begin.length }, () => between(0, 99))],
    stopTokens: random() < 0.3 ? [between(0, VOCABULARY - 1), between(0, VOCABULARY - 1)] : [],
    leaving,
    salt: salts[between(0, salts.length - 1)]!,
    sampling: isRuled ? drawSampling(maxTokens, between) : PLAIN,
  };
}

const PLAIN: SamplingParams = { temperature: 0, topK: 0, topP: 1, minP: 0, seed: 0 };

/** A generator's seed, and each of rules, a constraint and log probabilities for some. */
function drawSampling(maxTokens: number, between: (low: number, high: number) => number): SamplingParams {
  const sampling: SamplingParams = { ...PLAIN, seed: between(0, 2 ** 32 - 1) };
  if (between(1, 2) === 1) sampling.rules = drawRules(maxTokens, between);
  if (between(1, 4) === 1) sampling.constraint = String(between(0, 2 ** 32 - 1));
  if (between(1, 3) === 1) sampling.logprobs = between(0, 3);
  if (sampling.logprobs === 1 || sampling.logprobs === 2) sampling.promptLogprobs = true;
  return sampling;
}

/** All numbers are such that sums of them are exact. */
function drawRules(maxTokens: number, between: (low: number, high: number) => number): SamplingRules {
  const maybe = (value: number, none: number): number => (between(1, 2) === 1 ? value : none);
  const biasIds = Array.from({ length: VOCABULARY }, (_, token) => token).filter(() => between(1, 8) === 1);
  return {
    presencePenalty: maybe(between(-4, 8) / 4, 0),
    frequencyPenalty: maybe(between(-2, 8) / 4, 0),
    repetitionPenalty: maybe([0.5, 2][between(0, 1)]!, 1),
    biasIds,
    biases: biasIds.map(() => (between(1, 4) === 1 ? -100 : between(-4, 4) / 2)),
    minTokens: maybe(between(0, maxTokens), 0),
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
  const answer = answerTo(wish, answerSeed(digest, wish.sampling.seed));
  for (const cause of answer.causes) desk.coverage.saw(`answer changed by ${cause}`);
  const client: Client = {
    name,
    wish,
    digest,
    answer,
    seeds: ghostSeeds([...wish.promptTokens, ...answer.tokens], wish.salt),
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
    sampling: wish.sampling,
    maxTokens: wish.maxTokens,
    stopTokenIds: wish.stopTokens,
    salt: wish.salt,
  };
  try {
    client.handle = rooms.start(request, {
      onTokens: (ids, choices, promptChoices) => receiveTokens(desk, client, ids, { choices, promptChoices }),
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

const NONE = new Uint8Array(0);

function receiveTokens(
  desk: Desk,
  client: Client,
  ids: readonly number[],
  { choices, promptChoices }: { choices: readonly TokenChoice[] | undefined; promptChoices: PackedChoices | undefined },
): void {
  const { wish, answer, tokens, name } = client;
  desk.trace(name, () => `gets ${ids.length} tokens after ${tokens.length}`);
  always(client.outcome === null && !client.hasLeft, 'I5', () => `${name}: a token after the end`);
  const isPromptRight =
    Buffer.compare(promptChoices ?? NONE, (tokens.length === 0 && answer.promptChoices) || NONE) === 0;
  always(isPromptRight, 'I4', () => `${name}: what is told of its prompt is wrong`);
  if (promptChoices !== undefined) desk.coverage.saw('a prompt was told of');
  const told = answer.choices?.slice(tokens.length, tokens.length + ids.length);
  for (const id of ids) {
    const last = tokens.at(-1);
    always(last === undefined || !wish.stopTokens.includes(last), 'I4', () => `${name}: a token after a stop token`);
    always(tokens.length < wish.maxTokens, 'I4', () => `${name}: more than ${wish.maxTokens} tokens`);
    always(id === answer.tokens[tokens.length], 'I4', () => `${name}: token ${tokens.length} is wrong`);
    tokens.push(id);
  }
  const isToldRight = JSON.stringify(choices) === JSON.stringify(told);
  always(isToldRight, 'I4', () => `${name}: what is told of the choice of ${ids.length} tokens is wrong`);
  const { leaving } = wish;
  if (leaving?.kind !== 'after_tokens' || tokens.length < leaving.count) return;
  // As the server does it: a stop string is found while tokens are being delivered.
  leave(desk, client, leaving.isStop ? 'stop_string' : 'client_lost');
}

function receiveOutcome(desk: Desk, client: Client, outcome: RoomOutcome, plan: Plan): void {
  const { name, wish, answer, tokens } = client;
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
  if (reason === 'unsatisfiable') {
    // Tokens before may have been lost on the way.
    const isEnd = answer.isStuck && (tokens.length === answer.tokens.length || plan.mode !== 'harmless');
    always(isEnd, 'I4', () => `${name}: ${reason} after ${tokens.length} tokens of ${answer.tokens.length}`);
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
