import assert from 'node:assert/strict';
import { test } from 'node:test';
import { inspect } from 'node:util';
import {
  decodeMessage,
  encodeMessage,
  packChoices,
  packedChoiceBytes,
  unpackChoices,
  makeEpoch,
  makeKey,
  makeRoomId,
  parseKey,
  type Message,
  type SamplingParams,
  type SamplingRules,
  type TokenChoice,
} from '../../../transfer/messages.ts';
import { createPrng } from '../../support/prng.ts';

const P = makeEpoch(1_700_000_000_000, 0xdeadbeef);
const D = makeEpoch(1_700_000_000_001, 1);
const KEY = makeKey(makeRoomId(makeEpoch(5, 6), 12), 3);
const PEER = { from: P, to: D, key: KEY };
const REF = { name: 'p0', epoch: P, address: 'tcp://127.0.0.1:1' };

const CHOICE: TokenChoice = { logprob: -0.5, topIds: [7, 9], topLogprobs: [-0.1, -3.25] };
const SAMPLING: SamplingParams = { temperature: 0.7, topK: 0, topP: 1, minP: 0, seed: 42 };
const RULES: SamplingRules = {
  presencePenalty: -2,
  frequencyPenalty: 0.5,
  repetitionPenalty: 1.25,
  biasIds: [5, 0],
  biases: [100, -100],
  minTokens: 3,
};

const SUBMIT: Message = {
  type: 'submit',
  key: KEY,
  prefill: REF,
  decode: REF,
  digest: 'abc',
  promptTokens: Uint32Array.of(0, 70_000, 0xffffffff),
  maxTokens: 10,
  stopTokens: [1],
  sampling: SAMPLING,
  salt: null,
  budgetMs: 1234.5,
};

const END: Message = {
  type: 'END',
  ...PEER,
  unitCount: 4,
  tokenCount: 300,
  digest: 'abc',
  firstToken: 9,
  firstChoice: null,
  promptChoices: null,
  checksum: 1,
};

/** One of each. */
const MESSAGES: Message[] = [
  { type: 'OPEN', ...PEER, digest: 'abc', tokenCount: 300 },
  { type: 'QUEUED', ...PEER, state: 'waiting' },
  {
    type: 'RESERVED',
    ...PEER,
    manifest: {
      tokenCount: 300,
      validInLastPage: 44,
      pageCount: 3,
      pageBytes: 1 << 20,
      slotBytes: 5000,
      generations: [1, 2, 0xffffffff, 4],
    },
    credit: 2 ** 40,
  },
  {
    type: 'CHUNK',
    ...PEER,
    sequence: 7,
    firstUnit: 1,
    generations: [2, 3],
    checksums: [0, 0xffffffff],
    payloadBytes: 5,
  },
  { type: 'CREDIT', ...PEER, bytes: 123 },
  END,
  { type: 'DONE', ...PEER },
  { type: 'DONE_ACK', ...PEER },
  { type: 'ABORT', ...PEER, reason: 'deadline' },
  { type: 'ABORT_ACK', ...PEER },
  { type: 'HELLO', version: 1, role: 'decode', name: 'd0', epoch: D, link: 1, fields: { model: 'x' } },
  {
    type: 'WELCOME',
    version: 1,
    role: 'prefill',
    name: 'p0',
    epoch: P,
    link: 1,
    dataAddress: 'tcp://*:5',
    fields: {},
  },
  { type: 'REFUSE', epoch: P, link: 2, field: 'model', ours: 'a', theirs: 'b' },
  { type: 'PING', from: P, to: '', link: 0, answer: true },
  SUBMIT,
  { type: 'cancel', key: KEY, reason: 'client_lost' },
  { type: 'peer_failed', key: KEY },
  { type: 'end_ack', key: KEY },
  { type: 'mark', smallestSequence: 9 },
  { type: 'drain' },
  { type: 'accepted', key: KEY, epoch: P },
  { type: 'tokens', epoch: D, rows: [{ key: KEY, position: 2, tokens: [5, 6] }] },
  { type: 'end', key: KEY, epoch: D, outcome: { ok: false, reason: 'gone' }, tokenCount: 1 },
  { type: 'end', key: KEY, epoch: D, outcome: { ok: true, finish: 'stop' }, tokenCount: 1 },
  {
    type: 'load',
    epoch: D,
    rooms: 1,
    roomLimit: 2,
    running: 3,
    queuedTokens: 4,
    pagesFree: 5,
    pagesTotal: 6,
    draining: false,
  },
  { ...END, firstChoice: CHOICE, promptChoices: packChoices([CHOICE], 3) },
  { type: 'tokens', epoch: D, rows: [{ key: KEY, position: 2, tokens: [5, 6], choices: [CHOICE, CHOICE] }] },
  { ...SUBMIT, sampling: { ...SAMPLING, rules: RULES, logprobs: 20 } },
  { ...SUBMIT, sampling: { ...SAMPLING, constraint: '"世"'.repeat(400) } },
];

function framesOf(message: Message): Uint8Array[] {
  const header = encodeMessage(message);
  return message.type === 'CHUNK' ? [header, new Uint8Array(message.payloadBytes)] : [header];
}

test('every message survives encoding, from plain arrays and from the buffers of a socket', () => {
  for (const message of MESSAGES) {
    for (const wrap of [(bytes: Uint8Array) => bytes, (bytes: Uint8Array) => Buffer.from(bytes)]) {
      const decoded = decodeMessage(framesOf(message).map(wrap));
      assert.ok(decoded.ok, message.type);
      const found = decoded.message;
      // A view of the frame that it came in.
      if (found.type === 'END' && found.promptChoices) found.promptChoices = new Uint8Array(found.promptChoices);
      assert.deepEqual(found, message);
    }
  }
});

test('a flipped bit anywhere in the header frame is rejected', () => {
  for (const message of MESSAGES) {
    const frames = framesOf(message);
    const header = frames[0] as Uint8Array;
    for (let bit = 0; bit < header.length * 8; bit++) {
      header[bit >> 3] = (header[bit >> 3] as number) ^ (1 << (bit & 7));
      assert.equal(decodeMessage(frames).ok, false, `${message.type} bit ${bit}`);
      header[bit >> 3] = (header[bit >> 3] as number) ^ (1 << (bit & 7));
    }
  }
});

test('cut frames, missing payloads and extra frames are rejected', () => {
  for (const message of MESSAGES) {
    const frames = framesOf(message);
    const header = frames[0] as Uint8Array;
    for (let length = 0; length < header.length; length++) {
      assert.equal(decodeMessage([header.subarray(0, length)]).ok, false);
    }
    assert.equal(decodeMessage([...frames, new Uint8Array(1)]).ok, false);
  }
  const chunk = MESSAGES[3] as Message;
  assert.deepEqual(decodeMessage([encodeMessage(chunk)]), { ok: false, rejection: 'payload' });
  assert.deepEqual(decodeMessage([]), { ok: false, rejection: 'short' });
});

test('well-formed messages with wrong fields are rejected', () => {
  const hostile: Record<string, unknown>[] = [
    { ...MESSAGES[0], tokenCount: -1 },
    { ...MESSAGES[0], tokenCount: 1.5 },
    { ...MESSAGES[0], from: 'me' },
    { ...MESSAGES[0], key: 'x' },
    { ...MESSAGES[0], key: `${makeEpoch(5, 6)}-12.0` },
    { ...MESSAGES[0], digest: 'x'.repeat(2000) },
    { ...MESSAGES[1], state: 'asleep' },
    { ...MESSAGES[8], reason: 'boredom' },
    { ...MESSAGES[3], checksums: [1] },
    { ...MESSAGES[3], generations: [1, 2 ** 32] },
    { ...MESSAGES[14], promptTokens: new Uint8Array(3) },
    { ...MESSAGES[14], budgetMs: Number.NaN },
    ...['', 'sesame', 'A'.repeat(64), 'a'.repeat(65), 7, {}].map((salt) => ({ ...SUBMIT, salt })),
    { ...MESSAGES[22], outcome: { ok: true, finish: 'stop', extra: 1 } },
    { ...MESSAGES[10], fields: { model: 7 } },
    ...[
      { rules: { ...RULES, presencePenalty: 2.5 } },
      { rules: { ...RULES, frequencyPenalty: Number.NaN } },
      { rules: { ...RULES, repetitionPenalty: 0 } },
      { rules: { ...RULES, biasIds: [5] } },
      { rules: { ...RULES, biases: [101, 0] } },
      { rules: { ...RULES, minTokens: -1 } },
      { rules: { ...RULES, colour: 1 } },
      { rules: null },
      { logprobs: 21 },
      { constraint: null },
      { constraint: 'x'.repeat(2 ** 21 + 1) },
      { logprobs: true },
      { seed: -1 },
      { typicalP: 0.5 },
    ].map((wrong) => ({ ...SUBMIT, sampling: { ...SAMPLING, ...wrong } })),
    ...[[CHOICE], [CHOICE, { ...CHOICE, topIds: [7] }], [CHOICE, { ...CHOICE, logprob: -Infinity }], null].map(
      (choices) => ({ ...MESSAGES[21], rows: [{ key: KEY, position: 2, tokens: [5, 6], choices }] }),
    ),
  ];
  for (const message of hostile) {
    const frames = framesOf(message as unknown as Message);
    assert.deepEqual(decodeMessage(frames), { ok: false, rejection: 'field' }, JSON.stringify(message));
  }
  const reserved = MESSAGES[2] as Extract<Message, { type: 'RESERVED' }>;
  const short = { ...reserved, manifest: { ...reserved.manifest, generations: [1] } };
  assert.deepEqual(decodeMessage([encodeMessage(short)]), { ok: false, rejection: 'field' });
});

test('random bytes never throw and never decode', () => {
  const seed = 7;
  const random = createPrng(seed);
  for (let i = 0; i < 5000; i++) {
    const frame = Uint8Array.from({ length: Math.floor(random() * 60) }, () => Math.floor(random() * 256));
    if (frame.length > 3) frame.set([0x48, 0x4f, 1, 0].slice(0, Math.floor(random() * 5)));
    assert.equal(decodeMessage([frame]).ok, false, `seed ${seed}, frame ${i}`);
  }
});

test('epochs order by time, and keys come apart again', () => {
  assert.ok(makeEpoch(999, 0xffffffff) < makeEpoch(1000, 0), inspect([makeEpoch(999, 0xffffffff), makeEpoch(1000, 0)]));
  assert.ok(makeEpoch(2 ** 40, 0) < makeEpoch(2 ** 40, 1), inspect([makeEpoch(2 ** 40, 0), makeEpoch(2 ** 40, 1)]));
  assert.deepEqual(parseKey(KEY), {
    router: makeEpoch(5, 6),
    room: makeRoomId(makeEpoch(5, 6), 12),
    sequence: 12,
    attempt: 3,
  });
  for (const bad of ['', 'x', `${makeEpoch(5, 6)}-1`, `${makeEpoch(5, 6)}-01.1`, `${KEY} `]) {
    assert.equal(parseKey(bad), null, bad);
  }
});

test('choices of a prompt come back as they were packed, wherever they lie in a frame', () => {
  const choices: TokenChoice[] = [
    CHOICE,
    { logprob: -1.5, topIds: [], topLogprobs: [] },
    { logprob: -Infinity, topIds: [0, 0xfffffffe], topLogprobs: [-0.25, -3] },
  ];
  const topCount = Math.max(...choices.map(({ topIds }) => topIds.length));
  const packed = packChoices(choices, topCount);
  assert.equal(packed.length, choices.length * packedChoiceBytes(topCount));
  const frame = new Uint8Array(packed.length + 3);
  frame.set(packed, 3);
  const known = choices.map((choice) => ({ ...choice, topLogprobs: choice.topLogprobs.map(Math.fround) }));
  assert.deepEqual(unpackChoices(frame.subarray(3), topCount), known);
  assert.equal(unpackChoices(packed.subarray(0, -1), topCount).length, choices.length - 1);
});
