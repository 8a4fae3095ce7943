/** The router's room: the whole table of its phases and events, and its promises to the client. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { makeEpoch, makeRoomId, type Outcome, type Reason } from '../../../transfer/messages.ts';
import {
  auditRoom,
  createRoom,
  currentKey,
  stepRoom,
  type Room,
  type RoomEffect,
  type RoomEvent,
} from '../../../transfer/room.ts';

const LIMITS = { resendMinMs: 100, resendMaxMs: 2_000 };
const P = makeEpoch(1, 1);
const D = makeEpoch(1, 2);
const OTHER = makeEpoch(1, 9);
const ROOM = makeRoomId(makeEpoch(1, 3), 4);
const KEY = `${ROOM}.1`;
const REQUEST = {
  digest: 'x',
  promptTokens: Uint32Array.of(1, 2, 3),
  maxTokens: 5,
  stopTokens: [],
  sampling: { temperature: 0, topK: 0, topP: 1, minP: 0, seed: 0 },
  salt: null,
};

const bad = (reason: Reason): Outcome => ({ ok: false, reason });
const length: Outcome = { ok: true, finish: 'length' };

const endP = (outcome: Outcome, key = KEY): RoomEvent => ({
  type: 'end',
  key,
  epoch: P,
  outcome,
  tokenCount: 0,
  nowMs: 2,
});
const endD = (outcome: Outcome, tokenCount = 0, key = KEY): RoomEvent => ({
  type: 'end',
  key,
  epoch: D,
  outcome,
  tokenCount,
  nowMs: 2,
});
const tokens = (position: number, ids: number[], key = KEY): RoomEvent => ({
  type: 'tokens',
  key,
  epoch: D,
  position,
  tokens: ids,
  nowMs: 2,
});

const EVENTS: Record<string, RoomEvent> = {
  pair: {
    type: 'pair',
    prefill: { name: 'p0', epoch: P, address: 'tcp://p' },
    decode: { name: 'd0', epoch: D, address: '' },
    nowMs: 1,
  },
  no_pair: { type: 'no_pair', nowMs: 1 },
  'accepted P': { type: 'accepted', key: KEY, epoch: P, nowMs: 1 },
  'accepted D': { type: 'accepted', key: KEY, epoch: D, nowMs: 1 },
  'tokens 0': tokens(0, [10]),
  'tokens 0 1': tokens(0, [10, 11]),
  'tokens gap': tokens(3, [13]),
  'tokens stale': tokens(0, [10], `${ROOM}.7`),
  'P sent': endP({ ok: true, finish: 'sent' }),
  'P gone': endP(bad('gone')),
  'P mismatch': endP(bad('mismatch')),
  'D length 1': endD(length, 1),
  'D length 2': endD(length, 2),
  'D gone': endD(bad('gone')),
  'D mismatch': endD(bad('mismatch')),
  'D stale': endD(bad('gone'), 0, `${ROOM}.7`),
  'P lost': { type: 'worker_lost', epoch: P, nowMs: 1 },
  'D lost': { type: 'worker_lost', epoch: D, nowMs: 1 },
  'other lost': { type: 'worker_lost', epoch: OTHER, nowMs: 1 },
  'P up': { type: 'worker_up', epoch: P, nowMs: 1 },
  left: { type: 'client_lost', nowMs: 1 },
  stopped: { type: 'client_cancel', finish: 'stop', nowMs: 1 },
  cancelled: { type: 'client_cancel', finish: null, nowMs: 1 },
  tick: { type: 'tick', nowMs: 50 },
  deadline: { type: 'tick', nowMs: 10_000 },
};

const PHASES: Record<string, string[]> = {
  choosing: [],
  submitted: ['pair'],
  accepted: ['pair', 'accepted P', 'accepted D'],
  streaming: ['pair', 'accepted P', 'accepted D', 'tokens 0'],
  sent: ['pair', 'accepted P', 'accepted D', 'tokens 0', 'P sent'],
  'P failed': ['pair', 'accepted P', 'accepted D', 'P gone'],
  'D failed': ['pair', 'accepted P', 'accepted D', 'D gone'],
  leaving: ['pair', 'accepted P', 'accepted D', 'left'],
  answered: ['pair', 'accepted P', 'accepted D', 'tokens 0', 'D length 1'],
  ended: ['left'],
};

function reach(names: readonly string[]): Room {
  const room = createRoom(ROOM, REQUEST, { deadlineMs: 10_000, maxAttempts: 2 });
  for (const name of names) stepRoom(room, EVENTS[name] as RoomEvent, LIMITS);
  return room;
}

function shorten(effects: readonly RoomEffect[]): string {
  const short = effects.map((effect) => {
    switch (effect.type) {
      case 'send':
        return `${effect.epoch === P ? 'P' : effect.epoch === D ? 'D' : '?'}:${effect.message.type}`;
      case 'deliver':
        return `deliver[${effect.tokens.join()}]`;
      case 'outcome':
        return `outcome:${effect.outcome.ok ? effect.outcome.finish : effect.outcome.reason}`;
      case 'choose_pair':
        return `choose:${effect.attempt}`;
      case 'close':
        return 'close';
      default:
        throw new Error(String(effect satisfies never));
    }
  });
  return short.join(' ');
}

/** What most phases do with an event; the table below lists the rest. */
const QUIET: Record<string, string> = {
  ...Object.fromEntries(Object.keys(EVENTS).map((event) => [event, ''])),
  'P sent': 'P:end_ack',
  'P gone': 'P:end_ack',
  'P mismatch': 'P:end_ack',
  'D length 1': 'D:end_ack',
  'D length 2': 'D:end_ack',
  'D gone': 'D:end_ack',
  'D mismatch': 'D:end_ack',
  'D stale': 'D:end_ack',
};
const RUNNING: Record<string, string> = {
  ...QUIET,
  'tokens 0': 'deliver[10]',
  'tokens 0 1': 'deliver[10,11]',
  'tokens gap': 'outcome:peer_lost D:cancel P:cancel',
  'P gone': 'P:end_ack D:peer_failed',
  'P mismatch': 'P:end_ack D:peer_failed',
  // D says that it sent tokens which never came.
  'D length 1': 'D:end_ack P:cancel',
  'D length 2': 'D:end_ack P:cancel',
  'D gone': 'D:end_ack P:cancel',
  'D mismatch': 'D:end_ack P:cancel',
  'P lost': 'D:peer_failed',
  'D lost': 'P:cancel',
  left: 'outcome:client_lost D:cancel P:cancel',
  stopped: 'outcome:stop D:cancel P:cancel',
  cancelled: 'outcome:client_cancel D:cancel P:cancel',
  deadline: 'outcome:deadline D:cancel P:cancel',
};
const STREAMING: Record<string, string> = {
  ...RUNNING,
  'tokens 0': '',
  'tokens 0 1': 'deliver[11]',
  'D length 1': 'D:end_ack outcome:length',
  'D length 2': 'D:end_ack outcome:peer_lost P:cancel',
  'D gone': 'D:end_ack outcome:gone P:cancel',
  'D mismatch': 'D:end_ack outcome:mismatch P:cancel',
  'D lost': 'outcome:peer_lost P:cancel',
};

const TABLE: Record<string, Record<string, string>> = {
  choosing: {
    ...QUIET,
    pair: 'D:submit P:submit',
    no_pair: 'outcome:overloaded close',
    left: 'outcome:client_lost close',
    stopped: 'outcome:stop close',
    cancelled: 'outcome:client_cancel close',
    deadline: 'outcome:deadline close',
  },
  submitted: { ...RUNNING, 'P up': 'P:submit' },
  accepted: RUNNING,
  streaming: STREAMING,
  sent: {
    ...STREAMING,
    'P gone': 'P:end_ack',
    'P mismatch': 'P:end_ack',
    'P lost': '',
    'tokens gap': 'outcome:peer_lost D:cancel',
    'D length 1': 'D:end_ack outcome:length close',
    'D length 2': 'D:end_ack outcome:peer_lost close',
    'D gone': 'D:end_ack outcome:gone close',
    'D mismatch': 'D:end_ack outcome:mismatch close',
    'D lost': 'outcome:peer_lost close',
    left: 'outcome:client_lost D:cancel',
    stopped: 'outcome:stop D:cancel',
    cancelled: 'outcome:client_cancel D:cancel',
    deadline: 'outcome:deadline D:cancel',
  },
  // Past ready D needs no P: its tokens still count.
  'P failed': {
    ...RUNNING,
    'tokens gap': 'outcome:peer_lost D:cancel',
    'P gone': 'P:end_ack',
    'P mismatch': 'P:end_ack',
    'P lost': '',
    'D length 1': 'D:end_ack choose:2',
    'D length 2': 'D:end_ack choose:2',
    'D gone': 'D:end_ack choose:2',
    'D mismatch': 'D:end_ack outcome:mismatch close',
    'D lost': 'choose:2',
    left: 'outcome:client_lost D:cancel',
    stopped: 'outcome:stop D:cancel',
    cancelled: 'outcome:client_cancel D:cancel',
    deadline: 'outcome:deadline D:cancel',
  },
  'D failed': {
    ...QUIET,
    'P sent': 'P:end_ack choose:2',
    'P gone': 'P:end_ack choose:2',
    'P mismatch': 'P:end_ack choose:2',
    'P lost': 'choose:2',
    'P up': 'P:cancel',
    // P was cancelled when D failed, and is reminded only when that is due.
    left: 'outcome:client_lost',
    stopped: 'outcome:stop',
    cancelled: 'outcome:client_cancel',
    deadline: 'outcome:deadline P:cancel',
  },
  leaving: { ...QUIET, 'P up': 'P:cancel', deadline: 'D:cancel P:cancel' },
  answered: {
    ...QUIET,
    'P sent': 'P:end_ack close',
    'P gone': 'P:end_ack close',
    'P mismatch': 'P:end_ack close',
    'P lost': 'close',
  },
  ended: QUIET,
};

test('every phase times every event does what the table says', () => {
  const wrong: string[] = [];
  for (const [name, cells] of Object.entries(TABLE)) {
    for (const [event, content] of Object.entries(EVENTS)) {
      const room = reach(PHASES[name] as string[]);
      const actual = shorten(stepRoom(room, content, LIMITS));
      if (actual !== cells[event]) wrong.push(`${name} × ${event}: ${actual}; expected ${cells[event]}`);
      wrong.push(...auditRoom(room).map((what) => `${name} × ${event}: ${what}`));
    }
  }
  assert.deepEqual(wrong, []);
});

test('the next attempt starts under a new key, avoids who refused, and is the last allowed', () => {
  const room = reach(PHASES['accepted'] as string[]);
  stepRoom(room, endD(bad('overloaded')), LIMITS);
  const effects = stepRoom(room, endP(bad('client_cancel')), LIMITS);
  assert.deepEqual(effects.at(-1), { type: 'choose_pair', room: ROOM, attempt: 2, avoid: [D] });
  assert.equal(shorten(stepRoom(room, EVENTS['pair'] as RoomEvent, LIMITS)), 'D:submit P:submit');
  assert.equal(currentKey(room), `${ROOM}.2`);
  // What the first attempt still says is acknowledged and changes nothing.
  assert.equal(shorten(stepRoom(room, endD(length, 0), LIMITS)), 'D:end_ack');
  assert.equal(shorten(stepRoom(room, tokens(0, [1]), LIMITS)), '');
  stepRoom(room, endD(bad('gone'), 0, `${ROOM}.2`), LIMITS);
  const last = stepRoom(room, endP(bad('peer_aborted'), `${ROOM}.2`), LIMITS);
  assert.equal(shorten(last), 'P:end_ack outcome:gone close');
});

test('no pair for the next attempt ends the room with the reason of the last one', () => {
  const room = reach(PHASES['D failed'] as string[]);
  stepRoom(room, endP(bad('client_cancel')), LIMITS);
  assert.equal(shorten(stepRoom(room, EVENTS['no_pair'] as RoomEvent, LIMITS)), 'outcome:gone close');
});

test('the reason of the half that failed first is told, not that it took the other along', () => {
  const cases: [Reason, Reason, string][] = [
    ['peer_aborted', 'bad_checksum', 'bad_checksum'],
    ['mismatch', 'peer_aborted', 'mismatch'],
    ['client_cancel', 'deadline', 'deadline'],
    ['bad_checksum', 'peer_lost', 'bad_checksum'],
    // Prefill refused OPEN, and was cancelled before it saw the submit.
    ['unknown', 'peer_aborted', 'peer_aborted'],
  ];
  for (const [ofP, ofD, expected] of cases) {
    for (const order of [
      [endP(bad(ofP)), endD(bad(ofD))],
      [endD(bad(ofD)), endP(bad(ofP))],
    ]) {
      const room = reach(PHASES['accepted'] as string[]);
      room.maxAttempts = 1;
      const effects = order.flatMap((event) => stepRoom(room, event, LIMITS));
      assert.ok(shorten(effects).endsWith(`outcome:${expected} close`), shorten(effects));
    }
  }
});

test('unanswered messages are sent again at 100 ms, doubling to 2 s, until answered', () => {
  const room = reach(['pair', 'accepted P']);
  const sentAtMs: number[] = [];
  for (let nowMs = 2; nowMs < 9000; nowMs++) {
    const effects = stepRoom(room, { type: 'tick', nowMs }, LIMITS);
    if (effects.length > 0) {
      assert.equal(shorten(effects), 'D:submit');
      sentAtMs.push(nowMs);
    }
  }
  assert.deepEqual(sentAtMs, [101, 301, 701, 1501, 3101, 5101, 7101]);
});

test('choices come with their tokens, and each once', () => {
  const room = reach(['pair', 'accepted P', 'accepted D']);
  const choices = [-1, -2, -3].map((logprob) => ({ logprob, topIds: [], topLogprobs: [] }));
  const tokensAt = (position: number, tokens: number[]): RoomEvent => {
    const row = { key: KEY, position, tokens, choices: choices.slice(position, position + tokens.length) };
    return { type: 'tokens', epoch: D, ...row, nowMs: 1 };
  };
  const delivered = [tokensAt(0, [10, 11]), tokensAt(1, [11, 12])].flatMap((event) => stepRoom(room, event, LIMITS));
  assert.deepEqual(delivered, [
    { type: 'deliver', position: 0, tokens: [10, 11], choices: choices.slice(0, 2) },
    { type: 'deliver', position: 2, tokens: [12], choices: choices.slice(2) },
  ]);
});

test('a request whose rules leave no token is not tried again', () => {
  const room = reach(['pair', 'accepted P', 'accepted D']);
  const end = { type: 'end', key: KEY, tokenCount: 0, nowMs: 1 } as const;
  stepRoom(room, { ...end, epoch: P, outcome: { ok: false, reason: 'unsatisfiable' } }, LIMITS);
  const last = stepRoom(room, { ...end, epoch: D, outcome: { ok: false, reason: 'peer_aborted' } }, LIMITS);
  assert.equal(shorten(last), 'D:end_ack outcome:unsatisfiable close');
});
