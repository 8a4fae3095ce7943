/**
 * What a seed decides before its world begins: how many processes, how large, how patient, what goes wrong and how often.
 * Each kind of fault is on in some seeds and off in others (swarm testing), so that each is also seen alone, and each odd
 * setting (BUGGIFY) is active in a quarter of them.
 */

import type { DecodeLimits, PrefillLimits } from '../../scheduler/types.ts';
import type { Salt } from '../../transfer/messages.ts';
import { pageBytesOf, SLOT_BYTES } from './ghost.ts';
import type { Weather } from './network.ts';

/**
 *   harmless   only what re-sends repair: every request must succeed, and no clock may end a half
 *   safety     faults until the last moment; nothing may ever be wrong
 *   liveness   faults, then a core is healed while the rest stays broken: everything must settle
 */
export type Mode = 'harmless' | 'safety' | 'liveness';

/** What happens to hosts and connections; how often, in times a simulated second. */
export interface FaultRates {
  cut: number;
  partition: number;
  isolate: number;
  /** Stop the links of a host one after the other, restore them in another order. */
  swizzle: number;
  crash: number;
  /** Drained, cancelled and ended as on SIGTERM, then started again. */
  shutdown: number;
  routerCrash: number;
  pause: number;
}

/** How long things take in an engine, in ms, and how often one takes fifty times as long. */
export interface EngineTimes {
  stepMs: number;
  readMs: number;
  writeMs: number;
  slow: number;
}

export interface Plan {
  seed: number;
  mode: Mode;
  prefillCount: number;
  decodeCount: number;
  routerCount: number;
  prefill: PrefillLimits;
  decode: DecodeLimits;
  requestMs: number;
  heartbeatMs: number;
  /** Period of a process's timer: deadlines, re-sends and leases. */
  tickMs: number;
  /** Periods of `load` and `mark`. */
  loadMs: number;
  /** An operator empties the prefix caches this often, or never. */
  flushMs: number | null;
  markMs: number;
  weather: Weather;
  rates: FaultRates;
  engine: EngineTimes;
  /** Faults happen, and requests come, in this span. */
  activeMs: number;
  requestCount: number;
  /** Chance that a client leaves before its answer is complete. */
  cancel: number;
  /** Most answers are long, so that pages run out while they grow. */
  longAnswers: boolean;
  /** Requests have rules, constraints, seeds of their own, and ask for log probabilities. */
  isRuled: boolean;
  /** Each request has one of these, by chance. */
  salts: readonly Salt[];
  /** Some requests may find no place. */
  isTight: boolean;
  /** The pools' free lists are turned over now and then: no order of allocation is promised. */
  shuffleFree: boolean;
}

/** The plan of a seed, drawn from its generator. */
export function drawPlan(seed: number, random: () => number): Plan {
  const chance = (probability: number): boolean => random() < probability;
  const between = (low: number, high: number): number => low + Math.floor(random() * (high - low + 1));
  const buggify = (): boolean => chance(0.25);

  const kind = random();
  const mode: Mode = kind < 0.15 ? 'harmless' : kind < 0.35 ? 'safety' : 'liveness';
  const isLarge = chance(0.1);
  const most = isLarge ? 4 : 2;
  const isHasty = mode !== 'harmless' && chance(0.5);
  const pageTokens = [2, 4, 4, 8][between(0, 3)]!;
  const pageBytes = pageBytesOf(pageTokens);
  const largestUnit = Math.max(pageBytes, SLOT_BYTES);
  const heartbeatMs = isHasty ? 300 : 2000;
  const maxSequenceTokens = 40;
  const longest = Math.ceil(maxSequenceTokens / pageTokens);

  const requestCount = between(3, isLarge ? 16 : 9);

  const shared = {
    pageTokens,
    pageBytes,
    slotBytes: SLOT_BYTES,
    strictLedger: true,
    modelDigest: 'ghost',
    maxSequenceTokens,
    maxRooms: buggify() ? between(1, 2) : 8,
    leaseMs: isHasty ? 1500 : 10_000,
    stallMs: isHasty ? 2000 : 15_000,
    roomMs: isHasty ? 5000 : 60_000,
    resendMinMs: 100,
    resendMaxMs: 2000,
    statusMs: isHasty ? 400 : 2000,
  };
  const prefill: PrefillLimits = {
    ...shared,
    pageCount: longest + between(0, longest),
    slotCount: buggify() ? 1 : between(2, 4),
    prefillChunkTokens: pageTokens * between(1, 4),
    stateCount: chance(0.25) ? 0 : between(1, 12),
    hasTier: chance(0.4),
    maxChunkBytes: buggify() ? 1 : largestUnit * between(1, 3),
    stagingBytes: buggify() ? 1 : largestUnit * between(1, 4),
  };
  const decode: DecodeLimits = {
    ...shared,
    pageCount: longest + (chance(0.4) ? 0 : between(0, 2 * longest)),
    slotCount: buggify() ? 1 : between(2, 5),
    maxRunning: buggify() ? 1 : between(2, 4),
    peerBufferBytes: buggify() ? largestUnit : largestUnit * between(2, 6),
    roomWindowBytes: largestUnit * between(1, 3),
    headroomTokens: buggify() ? 1 : between(1, 2 * pageTokens),
    hostBytes: buggify() ? 0 : between(1, 8) * longest * pageBytes,
    drafts: chance(0.5),
  };
  const maybe = (rate: number): number => (mode !== 'harmless' && chance(0.3) ? rate * (0.2 + random()) : 0);
  const latencyMs = !buggify() ? 10 : mode !== 'harmless' && chance(0.3) ? 3000 : 200;
  return {
    seed,
    mode,
    prefillCount: between(1, most),
    decodeCount: between(1, most),
    routerCount: chance(0.15) ? 2 : 1,
    prefill,
    decode,
    requestMs: isHasty ? (buggify() ? between(500, 3000) : 15_000) : 120_000,
    heartbeatMs,
    tickMs: buggify() ? between(200, 400) : between(60, 150),
    loadMs: between(400, 2000),
    flushMs: chance(0.1) ? between(300, 3000) : null,
    markMs: buggify() ? 4000 : 1000,
    weather: {
      minLatencyMs: 0.2,
      maxLatencyMs: latencyMs,
      drop: maybe(0.04),
      dropRepeated: chance(0.3) ? 0.2 * random() : 0,
      duplicate: chance(0.3) ? 0.1 * random() : 0,
      reorder: maybe(0.05),
      corrupt: maybe(0.01),
      ackDelayMs: buggify() ? between(100, 1500) : 0,
      byteMs: buggify() ? 1 : 0,
      queueLimit: mode !== 'harmless' && buggify() ? between(3, 12) : 1000,
    },
    rates: {
      cut: maybe(0.4),
      partition: maybe(0.2),
      isolate: maybe(0.1),
      swizzle: maybe(0.05),
      crash: maybe(0.1),
      shutdown: maybe(0.05),
      routerCrash: maybe(0.05),
      pause: maybe(0.1),
    },
    engine: {
      stepMs: between(2, 60),
      readMs: between(1, 30),
      writeMs: between(0, 20),
      slow: mode !== 'harmless' && buggify() ? 0.02 : 0,
    },
    activeMs: between(2000, isHasty ? 8000 : 12_000),
    requestCount,
    cancel: mode !== 'harmless' && chance(0.6) ? random() * 0.6 : 0,
    longAnswers: buggify(),
    isRuled: chance(0.5),
    salts: chance(0.5) ? [null] : [null, 'a'.repeat(64), 'b'.repeat(64)],
    isTight: shared.maxRooms < requestCount || decode.hostBytes < requestCount * longest * pageBytes,
    shuffleFree: buggify(),
  };
}
