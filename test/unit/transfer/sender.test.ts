/** The whole table of the sender: every phase times every event. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { combineChecksums } from '../../../transfer/checksum.ts';
import type { Manifest, PeerMessage, TokenChoice } from '../../../transfer/messages.ts';
import { makeEpoch, makeKey, makeRoomId } from '../../../transfer/messages.ts';
import {
  createSender,
  nextRead,
  readingBytes,
  stepSender,
  type Sender,
  type SenderEvent,
  type SenderLimits,
} from '../../../transfer/sender.ts';

const LIMITS: SenderLimits = {
  pageTokens: 4,
  pageBytes: 8,
  slotBytes: 12,
  stallMs: 15_000,
  roomMs: 60_000,
  statusMs: 2_000,
  resendMinMs: 100,
  resendMaxMs: 2_000,
};
const P = makeEpoch(1, 1);
const D = makeEpoch(1, 2);
const KEY = makeKey(makeRoomId(makeEpoch(1, 3), 0), 1);
const TO_P = { from: D, to: P, key: KEY };
const CHOICE: TokenChoice = { logprob: -0.5, topIds: [7], topLogprobs: [-0.5] };
const TOKENS = 6; // two pages, the second half full
const MANIFEST: Manifest = {
  tokenCount: TOKENS,
  validInLastPage: 2,
  pageCount: 2,
  pageBytes: 8,
  slotBytes: 12,
  generations: [3, 4, 5],
};

const EVENTS: Record<string, SenderEvent> = {
  submit: { type: 'submit', digest: 'x', tokenCount: TOKENS, nowMs: 1 },
  'submit*': { type: 'submit', digest: 'other', tokenCount: TOKENS, nowMs: 1 },
  OPEN: message({ type: 'OPEN', ...TO_P, digest: 'x', tokenCount: TOKENS }),
  'OPEN*': message({ type: 'OPEN', ...TO_P, digest: 'other', tokenCount: TOKENS }),
  QUEUED: message({ type: 'QUEUED', ...TO_P, state: 'waiting' }),
  RESERVED: message({ type: 'RESERVED', ...TO_P, manifest: MANIFEST, credit: 12 }),
  'RESERVED*': message({
    type: 'RESERVED',
    ...TO_P,
    manifest: { ...MANIFEST, generations: [3, 4, 6], slotBytes: 13 },
    credit: 12,
  }),
  CREDIT: message({ type: 'CREDIT', ...TO_P, bytes: 28 }),
  'CREDIT*': message({ type: 'CREDIT', ...TO_P, bytes: 29 }),
  DONE: message({ type: 'DONE', ...TO_P }),
  ABORT: message({ type: 'ABORT', ...TO_P, reason: 'deadline' }),
  ABORT_ACK: message({ type: 'ABORT_ACK', ...TO_P }),
  CHUNK: message({
    type: 'CHUNK',
    ...TO_P,
    sequence: 0,
    firstUnit: 0,
    generations: [3],
    checksums: [0],
    payloadBytes: 8,
  }),
  END: message({
    type: 'END',
    ...TO_P,
    unitCount: 3,
    tokenCount: TOKENS,
    digest: 'x',
    firstToken: 1,
    firstChoice: null,
    promptChoices: null,
    checksum: 0,
  }),
  DONE_ACK: message({ type: 'DONE_ACK', ...TO_P }),
  admitted: { type: 'admitted', nowMs: 1 },
  cached: { type: 'cached', computedTokens: 4 },
  step_started: { type: 'step_started' },
  computed: { type: 'computed', computedTokens: TOKENS, firstToken: 7, firstChoice: CHOICE, nowMs: 1 },
  read_done: { type: 'read_done', firstUnit: 0, checksums: [11], nowMs: 1 },
  peer_up: { type: 'peer_up', nowMs: 1 },
  stop: { type: 'stop', reason: 'client_cancel', tellPeer: true, nowMs: 1 },
  peer_lost: { type: 'stop', reason: 'peer_lost', tellPeer: false, nowMs: 1 },
  tick: { type: 'tick', nowMs: 10 },
  status: { type: 'tick', nowMs: 2_500 },
  expiry: { type: 'tick', nowMs: 60_001 },
};

function message(content: PeerMessage): SenderEvent {
  return { type: 'message', message: content, nowMs: 1 };
}

/** How a phase is reached: events of the table by name, `read` pulls the next read. */
const PHASES: Record<string, string[]> = {
  new: [],
  submitted: ['submit'],
  opened: ['OPEN'],
  reserved: ['OPEN', 'RESERVED'],
  waiting: ['submit', 'OPEN', 'RESERVED'],
  admitted: ['submit', 'OPEN', 'RESERVED', 'admitted'],
  stepping: ['submit', 'OPEN', 'RESERVED', 'admitted', 'step_started'],
  computed: ['submit', 'OPEN', 'RESERVED', 'admitted', 'step_started', 'computed'],
  reading: ['submit', 'OPEN', 'RESERVED', 'admitted', 'step_started', 'computed', 'read'],
  ended_sending: [
    ...['submit', 'OPEN', 'RESERVED', 'CREDIT', 'admitted', 'step_started', 'computed'],
    ...['read', 'read_done', 'read_rest'],
  ],
  unwinding_read: ['submit', 'OPEN', 'RESERVED', 'admitted', 'step_started', 'computed', 'read', 'stop'],
  unwinding_step: ['submit', 'OPEN', 'RESERVED', 'admitted', 'step_started', 'stop'],
  ended: ['stop'],
};

function reach(name: string): Sender {
  const peer = { name: 'd0', epoch: D };
  const sender = createSender({ key: KEY, self: P, peer, tokenCount: TOKENS, digest: 'x' }, 0, LIMITS);
  for (const step of PHASES[name] as string[]) {
    if (step === 'read') assert.deepEqual(nextRead(sender, 8, 1, LIMITS), { firstUnit: 0, unitCount: 1 });
    else if (step === 'read_rest') {
      assert.deepEqual(nextRead(sender, 100, 1, LIMITS), { firstUnit: 1, unitCount: 2 });
      stepSender(sender, { type: 'read_done', firstUnit: 1, checksums: [12, 13], nowMs: 1 }, LIMITS);
    } else stepSender(sender, EVENTS[step] as SenderEvent, LIMITS);
  }
  return sender;
}

/** The phase after the event and its effects in short: messages by type, drops with their kind. */
function outcomeOf(name: string, event: string): string {
  const sender = reach(name);
  let effects: ReturnType<typeof stepSender>;
  try {
    effects = stepSender(sender, EVENTS[event] as SenderEvent, LIMITS);
  } catch {
    return 'impossible';
  }
  const short = effects.map((effect) => {
    if (effect.type === 'send') {
      const state = effect.message.type === 'QUEUED' ? `:${effect.message.state}` : '';
      return `${effect.message.type}${state}@${effect.socket}`;
    }
    if (effect.type === 'drop') return `drop:${effect.kind}`;
    if (effect.type === 'stopped') return `stopped:${effect.reason}${effect.tellPeer ? '+ABORT' : ''}`;
    if (effect.type === 'ended') {
      return `ended:${effect.outcome.ok ? effect.outcome.finish : effect.outcome.reason}`;
    }
    return effect.type;
  });
  return [sender.phase, ...short].join(' ');
}

const STOP = {
  mismatch: 'ended stopped:mismatch+ABORT ended:mismatch',
  protocol: 'ended stopped:protocol+ABORT ended:protocol',
  cancel: 'ended stopped:client_cancel+ABORT ended:client_cancel',
  lost: 'ended stopped:peer_lost ended:peer_lost',
  abort: 'ended stopped:peer_aborted ended:peer_aborted',
  expiry: 'ended stopped:deadline+ABORT ended:deadline',
};

/** Cells that are the same in every phase before the end, unless a phase says otherwise. */
const LIVE: Record<string, string> = {
  submit: 'drop:duplicate',
  'submit*': 'drop:duplicate',
  'OPEN*': STOP.mismatch,
  QUEUED: '',
  DONE: STOP.protocol,
  ABORT: STOP.abort,
  ABORT_ACK: 'drop:ignored',
  CHUNK: 'drop:protocol',
  END: 'drop:protocol',
  DONE_ACK: 'drop:protocol',
  admitted: 'impossible',
  cached: 'impossible',
  step_started: 'impossible',
  computed: 'impossible',
  read_done: 'impossible',
  peer_up: '',
  stop: STOP.cancel,
  peer_lost: STOP.lost,
  tick: '',
  status: '',
  expiry: STOP.expiry,
};

/** After the stop everything of the peer is ignored: our ABORT answers it. */
const OVER: Record<string, string> = {
  ...Object.fromEntries(Object.keys(EVENTS).map((event) => [event, 'drop:ignored'])),
  submit: 'drop:duplicate',
  'submit*': 'drop:duplicate',
  admitted: 'impossible',
  cached: 'impossible',
  step_started: 'impossible',
  computed: 'impossible',
  read_done: 'impossible',
  peer_up: '',
  stop: '',
  peer_lost: '',
  tick: '',
  status: '',
  expiry: '',
};

const UNRESERVED = { CREDIT: 'drop:protocol', 'CREDIT*': 'drop:protocol' };
const RESERVED = {
  OPEN: 'QUEUED:waiting@control',
  RESERVED: 'drop:duplicate QUEUED:waiting@control',
  'RESERVED*': STOP.protocol,
  CREDIT: '',
  'CREDIT*': STOP.protocol,
};
const COMPUTING = {
  ...RESERVED,
  OPEN: 'QUEUED:computing@control',
  RESERVED: 'drop:duplicate QUEUED:computing@control',
};
const HELD = (reason: string): string => `unwinding stopped:${reason}`;
const HELD_STOPS = {
  'OPEN*': HELD('mismatch+ABORT'),
  'RESERVED*': HELD('protocol+ABORT'),
  'CREDIT*': HELD('protocol+ABORT'),
  DONE: HELD('protocol+ABORT'),
  ABORT: HELD('peer_aborted'),
  stop: HELD('client_cancel+ABORT'),
  peer_lost: HELD('peer_lost'),
  expiry: HELD('deadline+ABORT'),
};

/** By phase: the phase's name in code, and its cells. Text without a leading phase means that it stays. */
const TABLE: Record<string, [string, Record<string, string>]> = {
  new: [
    'bootstrapping',
    {
      ...LIVE,
      ...UNRESERVED,
      submit: '',
      'submit*': STOP.mismatch,
      OPEN: 'QUEUED:waiting@control',
      RESERVED: 'drop:ignored',
      'RESERVED*': 'drop:ignored',
    },
  ],
  submitted: [
    'bootstrapping',
    {
      ...LIVE,
      ...UNRESERVED,
      OPEN: 'QUEUED:waiting@control',
      RESERVED: 'drop:ignored',
      'RESERVED*': 'drop:ignored',
    },
  ],
  opened: [
    'bootstrapping',
    {
      ...LIVE,
      ...UNRESERVED,
      submit: '',
      'submit*': STOP.mismatch,
      OPEN: 'QUEUED:waiting@control',
      RESERVED: 'QUEUED:waiting@control',
      'RESERVED*': STOP.mismatch,
    },
  ],
  reserved: ['bootstrapping', { ...LIVE, ...RESERVED, submit: 'waiting waiting', 'submit*': STOP.mismatch }],
  waiting: [
    'waiting',
    {
      ...LIVE,
      ...RESERVED,
      admitted: 'transferring QUEUED:computing@control',
      status: 'QUEUED:waiting@control',
    },
  ],
  admitted: [
    'transferring',
    { ...LIVE, ...COMPUTING, cached: '', step_started: '', status: 'QUEUED:computing@control' },
  ],
  stepping: [
    'transferring',
    { ...LIVE, ...COMPUTING, ...HELD_STOPS, computed: '', status: 'QUEUED:computing@control' },
  ],
  computed: ['transferring', { ...LIVE, ...COMPUTING, step_started: '' }],
  reading: ['transferring', { ...LIVE, ...COMPUTING, ...HELD_STOPS, step_started: '', read_done: 'CHUNK@data' }],
  ended_sending: [
    'transferring',
    {
      ...LIVE,
      ...COMPUTING,
      CREDIT: 'drop:duplicate',
      DONE: 'ended ended:sent',
      step_started: '',
      peer_up: 'END@data',
      status: 'END@data',
    },
  ],
  unwinding_read: ['unwinding', { ...OVER, read_done: 'ended discard ended:client_cancel' }],
  unwinding_step: ['unwinding', { ...OVER, computed: 'ended ended:client_cancel' }],
  ended: ['ended', OVER],
};

test('every phase times every event does what the table says', () => {
  const wrong: string[] = [];
  for (const [name, [phase, cells]] of Object.entries(TABLE)) {
    for (const event of Object.keys(EVENTS)) {
      const cell = cells[event];
      assert.notEqual(cell, undefined, `${name} × ${event} is not in the table`);
      const changes = /^(impossible|waiting waiting|transferring|unwinding|ended) ?/.test(cell as string);
      const expected = changes ? cell : [phase, cell].filter((part) => part !== '').join(' ');
      const actual = outcomeOf(name, event);
      if (actual !== expected) wrong.push(`${name} × ${event}: ${actual}; expected ${expected}`);
    }
  }
  assert.deepEqual(wrong, []);
});

test('units go out in order, within the credit, full pages first', () => {
  const sender = reach('stepping');
  assert.equal(nextRead(sender, 100, 1, LIMITS), null);
  stepSender(sender, { type: 'computed', computedTokens: 4, firstToken: null, nowMs: 1 }, LIMITS);
  assert.deepEqual(nextRead(sender, 100, 1, LIMITS), { firstUnit: 0, unitCount: 1 });
  stepSender(sender, { type: 'step_started' }, LIMITS);
  stepSender(sender, EVENTS['computed'] as SenderEvent, LIMITS);
  // 8 of 12 bytes are used: the next page does not fit.
  assert.equal(nextRead(sender, 100, 1, LIMITS), null);
  stepSender(sender, message({ type: 'CREDIT', ...TO_P, bytes: 16 }), LIMITS);
  assert.deepEqual(nextRead(sender, 100, 1, LIMITS), { firstUnit: 1, unitCount: 1 });
  assert.equal(readingBytes(sender), 16);
  stepSender(sender, EVENTS['CREDIT'] as SenderEvent, LIMITS);
  assert.equal(nextRead(sender, 0, 1, LIMITS), null);
  assert.deepEqual(nextRead(sender, 1, 1, LIMITS), { firstUnit: 2, unitCount: 1 });
  assert.equal(nextRead(sender, 100, 1, LIMITS), null);
});

test('cached pages go out before anything is computed', () => {
  const sender = reach('admitted');
  assert.equal(nextRead(sender, 100, 1, LIMITS), null);
  stepSender(sender, { type: 'cached', computedTokens: 4 }, LIMITS);
  assert.deepEqual(nextRead(sender, 100, 1, LIMITS), { firstUnit: 0, unitCount: 1 });
});

test('END says what was sent, whatever the order of the reads', () => {
  const sender = reach('computed');
  stepSender(sender, EVENTS['CREDIT'] as SenderEvent, LIMITS);
  for (let i = 0; i < 3; i++) nextRead(sender, 1, 1, LIMITS);
  stepSender(sender, { type: 'read_done', firstUnit: 2, checksums: [13], nowMs: 1 }, LIMITS);
  stepSender(sender, { type: 'read_done', firstUnit: 0, checksums: [11], nowMs: 1 }, LIMITS);
  const effects = stepSender(sender, { type: 'read_done', firstUnit: 1, checksums: [12], nowMs: 1 }, LIMITS);
  const sent = effects.map((effect) => (effect.type === 'send' ? effect.message : null));
  assert.deepEqual(sent[0], {
    type: 'CHUNK',
    from: P,
    to: D,
    key: KEY,
    sequence: 2,
    firstUnit: 1,
    generations: [4],
    checksums: [12],
    payloadBytes: 8,
  });
  assert.deepEqual(sent[1], {
    type: 'END',
    from: P,
    to: D,
    key: KEY,
    unitCount: 3,
    tokenCount: TOKENS,
    digest: 'x',
    firstToken: 7,
    firstChoice: CHOICE,
    promptChoices: null,
    checksum: combineChecksums([11, 12, 13]),
  });
});

test('END is sent again at 100 ms, doubling to 2 s, until DONE', () => {
  const sender = reach('ended_sending');
  const sentAtMs: number[] = [];
  for (let nowMs = 2; nowMs < 8000; nowMs++) {
    if (stepSender(sender, { type: 'tick', nowMs }, LIMITS).length > 0) sentAtMs.push(nowMs);
  }
  assert.deepEqual(sentAtMs, [101, 301, 701, 1501, 3101, 5101, 7101]);
});

test('a read that never comes back ends the room by the stall clock', () => {
  const sender = reach('reading');
  assert.deepEqual(stepSender(sender, { type: 'tick', nowMs: 15_000 }, LIMITS), []);
  const effects = stepSender(sender, { type: 'tick', nowMs: 15_001 }, LIMITS);
  assert.deepEqual(effects, [{ type: 'stopped', reason: 'deadline', tellPeer: true }]);
  assert.equal(sender.phase, 'unwinding');
});

test('time in the peer’s queue is not counted against the room', () => {
  const sender = reach('opened');
  const queued: PeerMessage = { type: 'QUEUED', ...TO_P, state: 'waiting' };
  stepSender(sender, { type: 'message', message: queued, nowMs: 50_000 }, LIMITS);
  assert.deepEqual(stepSender(sender, { type: 'tick', nowMs: 109_999 }, LIMITS), []);
  assert.equal(stepSender(sender, { type: 'tick', nowMs: 110_000 }, LIMITS)[0]?.type, 'stopped');
});

test('time in the own queue is not counted against the room, time computing is', () => {
  const sender = reach('waiting');
  for (let nowMs = 2000; nowMs <= 200_000; nowMs += 2000) stepSender(sender, { type: 'tick', nowMs }, LIMITS);
  assert.equal(sender.phase, 'waiting');
  stepSender(sender, { type: 'admitted', nowMs: 200_000 }, LIMITS);
  for (let nowMs = 202_000; nowMs < 260_000; nowMs += 2000) stepSender(sender, { type: 'tick', nowMs }, LIMITS);
  assert.equal(sender.phase, 'transferring');
  assert.equal(stepSender(sender, { type: 'tick', nowMs: 260_000 }, LIMITS)[0]?.type, 'stopped');
});

test('a prompt of five times 4096 tokens has five times as long to be computed', () => {
  const sender = reach('waiting');
  sender.tokenCount = 5 * 4096;
  stepSender(sender, { type: 'tick', nowMs: 2002 }, LIMITS);
  stepSender(sender, { type: 'admitted', nowMs: 2002 }, LIMITS);
  assert.notEqual(stepSender(sender, { type: 'tick', nowMs: 302_001 }, LIMITS)[0]?.type, 'stopped');
  assert.equal(stepSender(sender, { type: 'tick', nowMs: 302_002 }, LIMITS)[0]?.type, 'stopped');
});
