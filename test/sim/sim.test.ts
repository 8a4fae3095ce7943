/**
 * The simulator in CI: some thousands of seeds, that the same seed is the same run, and that bugs put in on purpose are
 * found. `npm run sim -- --seeds 10000` runs more, `npm run sim -- --seed N` replays one with its trace.
 */

import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { createCoverage } from './audit.ts';
import { createClock } from './clock.ts';
import { createNetwork, type Host, type Packet, type Weather } from './network.ts';
import { BUGS } from './worker.ts';
import { runSeed, traceSeed } from './world.ts';

const SEEDS = 2000;
/** Every bug is to be found within so many. */
const BUG_SEEDS = 100;
/** What so few seeds can be asked for; `mustSee` of audit.ts is what a long run is. */
const SEEN = [
  ...['CHUNK', 'CREDIT', 'DONE_ACK', 'ABORT_ACK', 'peer_failed', 'tokens'].map((type) => `message ${type}`),
  ...['outcome stop', 'outcome length', 'outcome cancelled client_lost', 'outcome failed peer_lost'],
  ...['attempt 2', 'late CHUNK dropped', 'tombstone evicted by a mark', 'same life of a router linked again'],
  ...['settled: whole cluster', 'settled: beside a dead worker', 'settled: beside a flapping worker', 'retracted'],
  ...['worker restarted with rooms in flight', 'router restarted with rooms in flight'],
  ...['a draft was right', 'a draft was wrong', 'outcome failed unsatisfiable', 'another attempt with rules'],
  ...['cached prefix, with a salt', 'prompt that another salt has', 'restored with rules', 'restored with constraint'],
];

test(`seeds 1 to ${SEEDS}: one outcome each, right bytes, and nothing is left anywhere`, () => {
  const coverage = createCoverage();
  for (let seed = 1; seed <= SEEDS; seed++) {
    try {
      runSeed(seed, { coverage });
    } catch (error) {
      const { message } = error as Error;
      throw new Error(`${message}; replay it with: npm run sim -- --seed ${seed}`, { cause: error });
    }
  }
  for (const what of SEEN) assert.ok(coverage.counts.has(what), `never seen: ${what}`);
});

test('the same seed is the same run, event for event', () => {
  for (let seed = 1; seed <= 10; seed++) {
    const [first, second] = [traceSeed(seed), traceSeed(seed)];
    assert.ok(first.lines.length > 20, `seed ${seed}: ${first.lines.length} lines`);
    assert.deepEqual(first.lines, second.lines);
    assert.deepEqual(first.report, second.report);
    assert.equal(first.report?.fingerprint, runSeed(seed).fingerprint, 'a trace changes nothing');
  }
});

for (const bug of BUGS) {
  test(`a worker with the bug ${bug} is found, and its seed fails again the same way`, () => {
    for (let seed = 1; seed <= BUG_SEEDS; seed++) {
      try {
        runSeed(seed, { bug });
      } catch (error) {
        assert.equal(traceSeed(seed, bug).error?.message, (error as Error).message);
        return;
      }
    }
    assert.fail(`not found in ${BUG_SEEDS} seeds`);
  });
}

test('a seed that fails prints the end of its trace and the command that replays it', () => {
  const script = fileURLToPath(new URL('../../scripts/sim.ts', import.meta.url));
  const run = (...args: string[]): { status: number | null; stdout: string } =>
    spawnSync(process.execPath, ['--import', 'tsx', script, ...args], { encoding: 'utf8' });
  const found = run('--seeds', '20', '--jobs', '1', '--bug', 'crossed-read');
  const command = /^replay it with: npm run sim -- (--seed (\d+) --bug crossed-read)$/m.exec(found.stdout);
  assert.ok(command !== null, found.stdout);
  assert.match(found.stdout, /^ +\d+\.\d [a-z]\d/m);
  const failure = new RegExp(`^seed ${command[2]} failed: I4: .+$`, 'm');
  const again = run(...command[1]!.split(' '));
  assert.equal(failure.exec(again.stdout)?.[0], failure.exec(found.stdout)?.[0]);
  const wrong = run('--seed', 'x');
  assert.equal(wrong.status, 2);
});

test('events of one time run in the order in which they were asked for', () => {
  const clock = createClock();
  const seen: string[] = [];
  for (const [ms, name] of [
    [5, 'e'],
    [1, 'a'],
    [3, 'c'],
    [3, 'd'],
    [1, 'b'],
  ] as const) {
    clock.after(ms, () => seen.push(`${name}${clock.nowMs}`));
  }
  while (clock.next(4));
  assert.deepEqual(seen, ['a1', 'b1', 'c3', 'd3']);
  assert.equal(clock.nowMs, 4);
  assert.equal(clock.next(10), true, 'one event is left');
  assert.equal(clock.next(10), false, 'no event is left');
  assert.deepEqual(seen.at(-1), 'e5');
});

const CALM: Weather = {
  minLatencyMs: 1,
  maxLatencyMs: 5,
  drop: 0,
  dropRepeated: 0,
  duplicate: 0,
  reorder: 0,
  corrupt: 0,
  ackDelayMs: 0,
  byteMs: 0,
  queueLimit: 100,
};

test('a connection keeps its order, loses what was on the way when it breaks, and comes back', () => {
  const clock = createClock();
  const network = createNetwork(clock, () => 0.5, { ...CALM });
  const host = (name: string): Host => ({ name, isAlive: true, isPaused: false, backlog: [], offsetMs: 0 });
  const got: string[] = [];
  const gone: number[] = [];
  let opened = 0;
  network.listen(host('b'), 'b:x', (_id, _socket, frames) => got.push(Buffer.from(frames[0]!).toString()));
  const pipe = network.open(host('a'), {
    address: 'b:x',
    socket: 'control',
    routingId: 'a',
    onOpen: () => opened++,
    onFrames: () => {},
  });
  const packet = (text: string): Packet => ({
    frames: [Buffer.from(text)],
    type: 'OPEN',
    onGone: () => gone.push(clock.nowMs),
  });
  const runTo = (ms: number): void => {
    while (clock.next(ms));
  };
  network.send(pipe, packet('1')); // waits for the connection
  runTo(20);
  network.send(pipe, packet('2'));
  network.send(pipe, packet('3'));
  runTo(40);
  assert.deepEqual(got, ['1', '2', '3']);
  network.send(pipe, packet('lost'));
  network.cut(pipe);
  network.send(pipe, packet('4'));
  runTo(200);
  assert.deepEqual(got, ['1', '2', '3', '4']);
  assert.equal(opened, 2);
  network.block('a', 'b', 'hold');
  network.send(pipe, packet('5'));
  runTo(300);
  assert.equal(got.length, 4);
  network.block('a', 'b', null);
  runTo(400);
  network.block('a', 'b', 'lose');
  network.send(pipe, packet('lost too'));
  runTo(500);
  assert.deepEqual(got, ['1', '2', '3', '4', '5']);
  assert.equal(gone.length, 7, 'each packet was lost or handed over, once');
});
