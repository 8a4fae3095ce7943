/** The whole hand-over in memory under random interleavings and faults; every seed must settle clean. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import type { DecodeLimits } from '../../../scheduler/types.ts';
import { createPrng } from '../../support/prng.ts';
import {
  announceMark,
  clientOf,
  createWorld,
  deliver,
  isHeadSentOnce,
  leave,
  movesOf,
  passTime,
  pathsOf,
  residueOf,
  restart,
  restartRouter,
  submit,
  type Client,
  type World,
} from '../../support/transfer-world.ts';

const SEEDS = 1000;

/** Longest settling in simulated time: the room clock, an own queue, and re-sends. */
const SETTLE_MS = 300_000;

interface Faults {
  cancel: number;
  /** Of a client whose pages are just being copied: a rare moment. */
  cancelMoved: number;
  drop: number;
  /** As `drop`, but spares what is sent only once: every request must still succeed. */
  dropRepeated: number;
  duplicate: number;
  restart: number;
  routerRestart: number;
  pause: number;
}

function pick<T>(random: () => number, list: readonly T[]): T {
  return list[Math.floor(random() * list.length)] as T;
}

/** Each fault is on in half of the seeds, so that faults are also seen alone. */
function chooseFaults(random: () => number): Faults {
  const maybe = (rate: number): number => (random() < 0.5 ? rate : 0);
  return {
    cancel: maybe(0.02),
    cancelMoved: maybe(0.2),
    drop: maybe(0.05),
    dropRepeated: maybe(0.2),
    duplicate: maybe(0.05),
    restart: maybe(0.004),
    routerRestart: maybe(0.002),
    pause: maybe(0.02),
  };
}

/** Short answers in a roomy pool, or long ones in a pool that holds just one request of the largest kind. */
interface Shape {
  maxPrompt: number;
  maxAnswer: number;
  decode: Partial<DecodeLimits>;
}

function chooseShape(random: () => number): Shape {
  if (random() < 0.5) return { maxPrompt: 20, maxAnswer: 6, decode: {} };
  const hostBytes = pick(random, [0, 60, 1000]);
  return { maxPrompt: 12, maxAnswer: 17, decode: { pageCount: 7, headroomTokens: pick(random, [1, 4]), hostBytes } };
}

function submitRandom(world: World, random: () => number, { maxPrompt, maxAnswer }: Shape): Client {
  return submit(world, {
    promptCount: 1 + Math.floor(random() * maxPrompt),
    maxTokens: 1 + Math.floor(random() * maxAnswer),
    stopTokens: random() < 0.3 ? [7, 11] : [],
  });
}

function step(world: World, random: () => number, faults: Faults): void {
  const paths = pathsOf(world);
  const moves = movesOf(world);
  const choice = Math.floor(random() * (paths.length + moves.length + 1));
  if (choice < paths.length) {
    const chance = random();
    const path = paths[choice] as string;
    const drop = faults.drop + (isHeadSentOnce(world, path) ? 0 : faults.dropRepeated);
    const copies = chance < drop ? 0 : chance < drop + faults.duplicate ? 2 : 1;
    deliver(world, path, copies);
  } else if (choice < paths.length + moves.length) {
    moves[choice - paths.length]?.();
  } else {
    passTime(world, random() < faults.pause ? 5000 : Math.floor(random() * 200));
  }
}

/** No faults any more: deliver and do everything, and let time pass when nothing is left to do. */
function settle(world: World, random: () => number): void {
  const untilMs = world.nowMs + SETTLE_MS;
  while (world.nowMs < untilMs) {
    const paths = pathsOf(world);
    const moves = movesOf(world);
    if (paths.length > 0) deliver(world, pick(random, paths), 1);
    else if (moves.length > 0) pick(random, moves)();
    else {
      announceMark(world);
      passTime(world, 100);
      if (residueOf(world).every((line) => line === 'packets: 2')) return; // the marks
    }
  }
}

function runSeed(seed: number, seen: Set<string>): void {
  const random = createPrng(seed);
  const faults = chooseFaults(random);
  const shape = chooseShape(random);
  const world = createWorld(random, shape.decode);
  for (let i = 0; i < 400; i++) {
    if (world.clients.size < 6 && random() < 0.05) submitRandom(world, random, shape);
    if (random() < faults.restart) restart(world, random() < 0.5 ? 'prefill' : 'decode');
    if (random() < faults.routerRestart) restartRouter(world);
    const client = random() < faults.cancel ? pick(random, [...world.clients.values()]) : undefined;
    if (client?.left === false) leave(world, client);
    const moved = random() < faults.cancelMoved ? world.moves.at(0) : undefined;
    if (moved !== undefined) leave(world, clientOf(world, moved.key));
    step(world, random, faults);
  }
  settle(world, random);
  const canary = submit(world, { promptCount: 9, maxTokens: 3, stopTokens: [] });
  settle(world, random);
  assert.deepEqual(
    residueOf(world).filter((line) => !line.startsWith('packets')),
    [],
  );
  for (const { room, outcomes, left } of world.clients.values()) {
    // A client whose router died has none; every other has exactly one.
    if (!left || outcomes.length > 0) assert.equal(outcomes.length, 1, `outcomes of ${room}`);
  }
  assert.deepEqual(canary.outcomes, [{ ok: true, finish: 'length' }]);
  const { cancel, cancelMoved, drop, restart: workerRestart, routerRestart } = faults;
  const isHarmless = cancel + cancelMoved + drop + workerRestart + routerRestart === 0;
  // Nor may a clock be what ends a half of it.
  if (isHarmless) assert.ok(!world.seen.has('half ended deadline'), 'a half ended by its deadline');
  if (isHarmless) seen.add(`harmless ${faults.dropRepeated > 0 ? 'with drops' : 'without drops'}`);
  for (const { outcomes } of world.clients.values()) {
    if (outcomes.length === 0) continue;
    // Only the loss of a chunk or of tokens may cost a request; for all else there are re-sends.
    const [outcome] = outcomes;
    const isMemory = outcome?.ok === false && outcome.reason === 'out_of_memory';
    if (isMemory) assert.notEqual(shape.decode.hostBytes ?? 1000, 1000, 'host memory for all was not enough');
    else if (isHarmless) assert.ok(outcome?.ok, `harmless faults: ${JSON.stringify(outcome)}`);
    seen.add(`outcome ${JSON.stringify(outcomes[0])}`);
  }
  for (const what of world.seen) seen.add(what);
  if (isHarmless && world.decode.retractions > 0) seen.add('harmless with retractions');
  for (const role of ['prefill', 'decode'] as const) {
    for (const [kind, count] of Object.entries(world[role].desk.drops)) {
      if (count > 0) seen.add(`${role} drop ${kind}`);
    }
  }
}

test(`seeds 1 to ${SEEDS}: one outcome each, right bytes, and nothing is left on either side`, () => {
  const seen = new Set<string>();
  for (let seed = 1; seed <= SEEDS; seed++) {
    try {
      runSeed(seed, seen);
    } catch (error) {
      throw new Error(`seed ${seed}: ${(error as Error).message}`, { cause: error });
    }
  }
  // Rare paths were walked, or the test proves less than it says.
  for (const what of [
    'message OPEN',
    'message QUEUED',
    'message RESERVED',
    'message CHUNK',
    'message CREDIT',
    'message END',
    'message DONE',
    'message DONE_ACK',
    'message ABORT',
    'message ABORT_ACK',
    'message peer_failed',
    'room choose_pair',
    'save',
    'restore',
    'cancel while waiting',
    'cancel while running',
    'cancel while saving',
    'cancel while retracted',
    'cancel while restoring',
    'harmless with retractions',
    'outcome {"ok":false,"reason":"out_of_memory"}',
    'harmless with drops',
    'harmless without drops',
    'prefill drop late',
    'decode drop late',
    'decode drop duplicate',
    'outcome {"ok":true,"finish":"stop"}',
    'outcome {"ok":true,"finish":"length"}',
    'outcome {"ok":false,"reason":"client_lost"}',
    'outcome {"ok":false,"reason":"peer_lost"}',
  ]) {
    assert.ok(seen.has(what), `never seen: ${what}; seen: ${[...seen].sort().join(', ')}`);
  }
});
