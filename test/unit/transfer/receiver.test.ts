/** The whole table of the receiver: every phase times every event. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { combineChecksums, crc32c } from '../../../transfer/checksum.ts';
import type { Manifest, PeerMessage } from '../../../transfer/messages.ts';
import { makeEpoch, makeKey, makeRoomId } from '../../../transfer/messages.ts';
import {
  baseCreditBytes,
  createReceiver,
  outstandingBytes,
  stepReceiver,
  type Receiver,
  type ReceiverEffect,
  type ReceiverEvent,
  type ReceiverLimits,
} from '../../../transfer/receiver.ts';

const LIMITS: ReceiverLimits = {
  stallMs: 15_000,
  roomMs: 60_000,
  statusMs: 2_000,
  resendMinMs: 100,
  resendMaxMs: 2_000,
};
const P = makeEpoch(1, 1);
const D = makeEpoch(1, 2);
const KEY = makeKey(makeRoomId(makeEpoch(1, 3), 0), 1);
const TO_D = { from: P, to: D, key: KEY };
const TOKENS = 6;
const MANIFEST: Manifest = {
  tokenCount: TOKENS,
  validInLastPage: 2,
  pageCount: 2,
  pageBytes: 8,
  slotBytes: 12,
  generations: [3, 4, 5],
};
const UNITS = [new Uint8Array(8).fill(1), new Uint8Array(8).fill(2), new Uint8Array(12).fill(3)];
const CHECKSUMS = UNITS.map((unit) => crc32c(unit));
const NONE = new Uint8Array(0);

function message(content: PeerMessage, payload: Uint8Array = NONE): ReceiverEvent {
  return { type: 'message', message: content, payload, nowMs: 1 };
}

/** A chunk of units [first, end). */
function chunk(first: number, end: number, changes: object = {}): ReceiverEvent {
  const payload = new Uint8Array(Buffer.concat(UNITS.slice(first, end)));
  const content: PeerMessage = {
    type: 'CHUNK',
    ...TO_D,
    sequence: 0,
    firstUnit: first,
    generations: MANIFEST.generations.slice(first, end),
    checksums: CHECKSUMS.slice(first, end),
    payloadBytes: payload.length,
    ...changes,
  };
  return message(content, payload);
}

function end(changes: object = {}): ReceiverEvent {
  return message({
    type: 'END',
    ...TO_D,
    unitCount: 3,
    tokenCount: TOKENS,
    digest: 'x',
    firstToken: 7,
    firstChoice: null,
    promptChoices: null,
    checksum: combineChecksums(CHECKSUMS),
    ...changes,
  });
}

function flipped(): ReceiverEvent {
  const event = chunk(0, 1);
  if (event.type === 'message') event.payload[3] = 77;
  return event;
}

const EVENTS: Record<string, ReceiverEvent> = {
  reserved: { type: 'reserved', manifest: MANIFEST, creditBytes: 12, nowMs: 1 },
  granted: { type: 'granted', grantedBytes: 28, nowMs: 1 },
  waiting: message({ type: 'QUEUED', ...TO_D, state: 'waiting' }),
  computing: message({ type: 'QUEUED', ...TO_D, state: 'computing' }),
  CHUNK: chunk(0, 1),
  'CHUNK bytes': flipped(),
  'CHUNK generation': chunk(0, 1, { generations: [2] }),
  'CHUNK units': chunk(0, 1, { firstUnit: 3 }),
  'CHUNK size': chunk(0, 1, { firstUnit: 2, generations: [5] }),
  'CHUNK checksum': chunk(0, 1, { checksums: [1] }),
  'CHUNK all': chunk(0, 3),
  END: end(),
  'END count': end({ unitCount: 2 }),
  'END digest': end({ digest: 'other' }),
  ABORT: message({ type: 'ABORT', ...TO_D, reason: 'gone' }),
  ABORT_ACK: message({ type: 'ABORT_ACK', ...TO_D }),
  DONE: message({ type: 'DONE', ...TO_D }),
  OPEN: message({ type: 'OPEN', ...TO_D, digest: 'x', tokenCount: TOKENS }),
  written: { type: 'written', unit: 0, nowMs: 1 },
  peer_up: { type: 'peer_up', nowMs: 1 },
  stop: { type: 'stop', reason: 'client_cancel', tellPeer: true, nowMs: 1 },
  peer_lost: { type: 'stop', reason: 'peer_lost', tellPeer: false, nowMs: 1 },
  tick: { type: 'tick', nowMs: 2_500 },
  expiry: { type: 'tick', nowMs: 60_001 },
};

const PHASES: Record<string, string[]> = {
  opening: [],
  queued: ['waiting'],
  reserved: ['waiting', 'reserved'],
  writing: ['waiting', 'reserved', 'CHUNK'],
  receiving: ['waiting', 'reserved', 'CHUNK', 'written'],
  ended_early: ['waiting', 'reserved', 'CHUNK', 'END'],
  unwinding: ['waiting', 'reserved', 'CHUNK', 'stop'],
  ended: ['stop'],
};

function reach(name: string): Receiver {
  const peer = { name: 'p0', epoch: P };
  const { receiver } = createReceiver({ key: KEY, self: D, peer, tokenCount: TOKENS, digest: 'x' }, 0, LIMITS);
  for (const step of PHASES[name] as string[]) stepReceiver(receiver, EVENTS[step] as ReceiverEvent, LIMITS);
  return receiver;
}

function shorten(effects: readonly ReceiverEffect[]): string[] {
  return effects.map((effect) => {
    switch (effect.type) {
      case 'send':
        return effect.message.type;
      case 'drop':
        return `drop:${effect.kind}`;
      case 'stopped':
        return `stopped:${effect.reason}${effect.tellPeer ? '+ABORT' : ''}`;
      case 'ended':
        return `ended:${effect.reason}`;
      case 'write':
        return `write:${effect.unit}`;
      case 'ready':
        return `ready:${effect.firstToken}`;
      case 'queued':
        return 'queued';
      default:
        throw new Error(String(effect satisfies never));
    }
  });
}

function outcomeOf(name: string, event: string): string {
  const receiver = reach(name);
  try {
    const effects = stepReceiver(receiver, EVENTS[event] as ReceiverEvent, LIMITS);
    return [`[${receiver.phase}]`, ...shorten(effects)].join(' ');
  } catch {
    return 'impossible';
  }
}

const stopNow = (reason: string, abort = '+ABORT'): string => `[ended] stopped:${reason}${abort} ended:${reason}`;
const stopLater = (reason: string, abort = '+ABORT'): string => `[unwinding] stopped:${reason}${abort}`;

const LIVE: Record<string, string> = {
  granted: 'impossible',
  reserved: 'impossible',
  waiting: '',
  computing: '',
  written: 'impossible',
  ABORT: stopNow('peer_aborted', ''),
  ABORT_ACK: 'drop:ignored',
  DONE: 'drop:protocol',
  OPEN: 'drop:protocol',
  stop: stopNow('client_cancel'),
  peer_lost: stopNow('peer_lost', ''),
  expiry: stopNow('deadline'),
};
/** Nothing was promised yet, so an honest peer sends nothing. */
const UNRESERVED = Object.fromEntries(
  Object.keys(EVENTS)
    .filter((event) => /^(CHUNK|END)/.test(event))
    .map((event) => [event, 'drop:protocol']),
);
const RECEIVING: Record<string, string> = {
  CHUNK: '[transferring] write:0',
  'CHUNK bytes': '[ended] drop:badChecksum stopped:bad_checksum+ABORT ended:bad_checksum',
  'CHUNK checksum': '[ended] drop:badChecksum stopped:bad_checksum+ABORT ended:bad_checksum',
  'CHUNK generation': 'drop:unknown',
  'CHUNK units': 'drop:unknown',
  'CHUNK size': 'drop:protocol',
  // 28 bytes against a credit of 12: the first page fits.
  'CHUNK all': '[unwinding] write:0 stopped:protocol+ABORT',
  END: '[transferring]',
  'END count': stopNow('mismatch'),
  'END digest': stopNow('mismatch'),
};
const AFTER_FIRST: Record<string, string> = {
  ...RECEIVING,
  granted: 'CREDIT',
  CHUNK: 'drop:duplicate',
  // The payload of a duplicate is not looked at: nothing is copied.
  'CHUNK bytes': 'drop:duplicate',
  'CHUNK checksum': stopNow('protocol'),
  'CHUNK all': '[ended] drop:duplicate stopped:protocol+ABORT ended:protocol',
  tick: '',
};
const WRITING: Record<string, string> = {
  ...LIVE,
  ...AFTER_FIRST,
  written: '',
  'CHUNK checksum': stopLater('protocol'),
  'CHUNK all': '[unwinding] drop:duplicate stopped:protocol+ABORT',
  'END count': stopLater('mismatch'),
  'END digest': stopLater('mismatch'),
  ABORT: stopLater('peer_aborted', ''),
  stop: stopLater('client_cancel'),
  peer_lost: stopLater('peer_lost', ''),
  expiry: stopLater('deadline'),
};
const OVER: Record<string, string> = {
  ...Object.fromEntries(Object.keys(EVENTS).map((event) => [event, 'drop:ignored'])),
  reserved: 'impossible',
  granted: 'impossible',
  written: 'impossible',
  peer_up: '',
  stop: '',
  peer_lost: '',
  tick: '',
  expiry: '',
};

const TABLE: Record<string, [string, Record<string, string>]> = {
  opening: [
    'queued',
    { ...LIVE, ...UNRESERVED, waiting: 'queued', computing: 'queued', peer_up: 'OPEN', tick: 'OPEN' },
  ],
  queued: ['queued', { ...LIVE, ...UNRESERVED, reserved: '[bootstrapping] RESERVED', peer_up: '', tick: 'QUEUED' }],
  reserved: ['bootstrapping', { ...LIVE, ...RECEIVING, peer_up: 'RESERVED', tick: 'RESERVED' }],
  writing: ['transferring', { ...WRITING, peer_up: '' }],
  receiving: ['transferring', { ...LIVE, ...AFTER_FIRST, peer_up: '', END: '' }],
  ended_early: ['transferring', { ...WRITING, END: 'drop:duplicate', peer_up: '' }],
  unwinding: ['unwinding', { ...OVER, written: '[ended] ended:client_cancel' }],
  ended: ['ended', OVER],
};

test('every phase times every event does what the table says', () => {
  const wrong: string[] = [];
  for (const [name, [phase, cells]] of Object.entries(TABLE)) {
    for (const event of Object.keys(EVENTS)) {
      const cell = cells[event];
      assert.notEqual(cell, undefined, `${name} × ${event} is not in the table`);
      const isWhole = /^(\[|impossible)/.test(cell as string);
      const expected = isWhole ? cell : [`[${phase}]`, cell].filter((part) => part !== '').join(' ');
      const actual = outcomeOf(name, event);
      if (actual !== expected) wrong.push(`${name} × ${event}: ${actual}; expected ${expected}`);
    }
  }
  assert.deepEqual(wrong, []);
});

/** A receiver that may get everything at once. */
function withFullCredit(): Receiver {
  const receiver = reach('queued');
  const reserved = { type: 'reserved', manifest: MANIFEST, creditBytes: 28, nowMs: 1 } as const;
  stepReceiver(receiver, reserved, LIMITS);
  return receiver;
}

test('units in any order, then END: ready when the last write is done, not before', () => {
  for (const order of [
    ['c2', 'c0', 'c1', 'w1', 'w2', 'END', 'w0'],
    ['c1', 'w1', 'c0', 'c2', 'w0', 'w2', 'END'],
    ['END', 'c0', 'c1', 'c2', 'w2', 'w1', 'w0'],
  ]) {
    const receiver = withFullCredit();
    const ready = order.map((step) => {
      const unit = Number(step[1]);
      const event: ReceiverEvent =
        step === 'END' ? end() : step.startsWith('c') ? chunk(unit, unit + 1) : { type: 'written', unit, nowMs: 1 };
      return shorten(stepReceiver(receiver, event, LIMITS)).includes('ready:7');
    });
    assert.deepEqual(ready, [...Array.from({ length: 6 }, () => false), true], order.join(' '));
    assert.equal(outstandingBytes(receiver), 0);
  }
});

test('an END whose checksum does not cover what was written is a mismatch, not ready', () => {
  const receiver = withFullCredit();
  stepReceiver(receiver, chunk(0, 3), LIMITS);
  for (const unit of [0, 1, 2]) stepReceiver(receiver, { type: 'written', unit, nowMs: 1 }, LIMITS);
  const effects = stepReceiver(receiver, end({ checksum: 1 }), LIMITS);
  assert.deepEqual(shorten(effects), ['stopped:mismatch+ABORT', 'ended:mismatch']);
});

test('each unit of a chunk is written from its own part of the payload', () => {
  const receiver = withFullCredit();
  const effects = stepReceiver(receiver, chunk(0, 3), LIMITS);
  assert.deepEqual(
    effects.map((effect) => (effect.type === 'write' ? new Uint8Array(effect.payload) : null)),
    UNITS,
  );
});

test('CREDIT is sent again until a unit beyond the grant before it has come', () => {
  const receiver = reach('queued');
  stepReceiver(receiver, { type: 'reserved', manifest: MANIFEST, creditBytes: 16, nowMs: 1 }, LIMITS);
  stepReceiver(receiver, chunk(0, 1), LIMITS);
  stepReceiver(receiver, { type: 'written', unit: 0, nowMs: 1 }, LIMITS);
  stepReceiver(receiver, { type: 'granted', grantedBytes: 28, nowMs: 1 }, LIMITS);
  // This unit was within the first grant: it may have been sent without the CREDIT.
  stepReceiver(receiver, chunk(1, 2), LIMITS);
  assert.deepEqual(shorten(stepReceiver(receiver, { type: 'tick', nowMs: 101 }, LIMITS)), ['CREDIT']);
  stepReceiver(receiver, chunk(2, 3), LIMITS);
  assert.deepEqual(stepReceiver(receiver, { type: 'tick', nowMs: 5000 }, LIMITS), []);
});

test('RESERVED is sent again until the peer computes: `waiting` may answer an OPEN sent twice', () => {
  const receiver = reach('reserved');
  stepReceiver(receiver, EVENTS['waiting'] as ReceiverEvent, LIMITS);
  assert.deepEqual(shorten(stepReceiver(receiver, { type: 'tick', nowMs: 101 }, LIMITS)), ['RESERVED']);
  stepReceiver(receiver, EVENTS['computing'] as ReceiverEvent, LIMITS);
  assert.deepEqual(stepReceiver(receiver, { type: 'tick', nowMs: 5000 }, LIMITS), []);
});

test('the stall clock starts with the first unit and is renewed by units and by computing', () => {
  const receiver = reach('reserved');
  assert.equal(receiver.stallDeadlineMs, null);
  stepReceiver(receiver, chunk(0, 1), LIMITS);
  assert.equal(receiver.stallDeadlineMs, 15_001);
  const computing: PeerMessage = { type: 'QUEUED', ...TO_D, state: 'computing' };
  stepReceiver(receiver, { type: 'message', message: computing, payload: NONE, nowMs: 9_000 }, LIMITS);
  assert.equal(receiver.stallDeadlineMs, 24_000);
  const waiting: PeerMessage = { type: 'QUEUED', ...TO_D, state: 'waiting' };
  stepReceiver(receiver, { type: 'message', message: waiting, payload: NONE, nowMs: 10_000 }, LIMITS);
  assert.equal(receiver.stallDeadlineMs, 24_000);
  const effects = stepReceiver(receiver, { type: 'tick', nowMs: 24_000 }, LIMITS);
  assert.deepEqual(shorten(effects), ['stopped:deadline+ABORT']);
});

test('a unit that comes twice does not keep a transfer alive', () => {
  const receiver = reach('reserved');
  stepReceiver(receiver, chunk(0, 1), LIMITS);
  stepReceiver(receiver, { ...chunk(0, 1), nowMs: 9_000 }, LIMITS);
  assert.equal(receiver.stallDeadlineMs, 15_001);
});

test('time in a queue, here or at the peer, is not counted against the room, time after it is', () => {
  const receiver = reach('queued');
  for (let nowMs = 2000; nowMs <= 200_000; nowMs += 2000) stepReceiver(receiver, { type: 'tick', nowMs }, LIMITS);
  assert.equal(receiver.phase, 'queued');
  stepReceiver(receiver, EVENTS['reserved'] as ReceiverEvent, LIMITS);
  const waiting: PeerMessage = { type: 'QUEUED', ...TO_D, state: 'waiting' };
  stepReceiver(receiver, { type: 'message', message: waiting, payload: NONE, nowMs: 250_000 }, LIMITS);
  assert.notEqual(stepReceiver(receiver, { type: 'tick', nowMs: 309_999 }, LIMITS)[0]?.type, 'stopped');
  assert.equal(stepReceiver(receiver, { type: 'tick', nowMs: 310_000 }, LIMITS)[0]?.type, 'stopped');
});

test('a prompt of five times 4096 tokens has five times as long to arrive', () => {
  const receiver = reach('queued');
  receiver.tokenCount = 5 * 4096;
  const waiting: PeerMessage = { type: 'QUEUED', ...TO_D, state: 'waiting' };
  stepReceiver(receiver, { type: 'message', message: waiting, payload: NONE, nowMs: 2000 }, LIMITS);
  stepReceiver(receiver, EVENTS['reserved'] as ReceiverEvent, LIMITS);
  assert.notEqual(stepReceiver(receiver, { type: 'tick', nowMs: 301_999 }, LIMITS)[0]?.type, 'stopped');
  assert.equal(stepReceiver(receiver, { type: 'tick', nowMs: 302_000 }, LIMITS)[0]?.type, 'stopped');
});

test('the base credit holds any one unit, and no more than the room has', () => {
  assert.equal(baseCreditBytes(MANIFEST), 12);
  assert.equal(baseCreditBytes({ pageCount: 3, pageBytes: 50, slotBytes: 12 }), 50);
  assert.equal(baseCreditBytes({ pageCount: 0, pageBytes: 50, slotBytes: 12 }), 12);
});
