/** The bytes of docs/protocol.md, as test/reference/wire.py writes them: another msgpack, another CRC, another language. */
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';
import { combineChecksums, promptDigest } from '../../../transfer/checksum.ts';
import {
  decodeMessage,
  encodeMessage,
  packChoices,
  type Message,
  type TokenChoice,
} from '../../../transfer/messages.ts';

interface Golden {
  messages: { message: Record<string, unknown> & { type: Message['type'] }; frames: string[] }[];
  digests: { tokens: number[]; model: string; digest: string }[];
  combined: { checksums: number[]; checksum: number }[];
}

const golden = JSON.parse(readFileSync(new URL('../../data/golden/wire.json', import.meta.url), 'utf8')) as Golden;

/** Every type there is: the compiler objects when one is missing here. */
const TYPES: Record<Message['type'], true> = {
  HELLO: true,
  WELCOME: true,
  REFUSE: true,
  PING: true,
  OPEN: true,
  QUEUED: true,
  RESERVED: true,
  CHUNK: true,
  CREDIT: true,
  END: true,
  DONE: true,
  DONE_ACK: true,
  ABORT: true,
  ABORT_ACK: true,
  submit: true,
  cancel: true,
  peer_failed: true,
  end_ack: true,
  mark: true,
  drain: true,
  accepted: true,
  tokens: true,
  end: true,
  load: true,
  cached: true,
};

test('there are golden bytes of every message', () => {
  assert.deepEqual(golden.messages.map(({ message }) => message.type).sort(), Object.keys(TYPES).sort());
});

for (const { message: json, frames } of golden.messages) {
  const message = { ...json } as unknown as Message;
  if (message.type === 'submit') message.promptTokens = Uint32Array.from(message.promptTokens);
  if (message.type === 'END')
    message.promptChoices = Buffer.from(packChoices(json['promptChoices'] as TokenChoice[], 2));

  test(`${message.type} is written and read as the protocol says`, () => {
    assert.equal(Buffer.from(encodeMessage(message)).toString('hex'), frames[0]);
    const decoded = decodeMessage(frames.map((hex) => Buffer.from(hex, 'hex')));
    assert.ok(decoded.ok, JSON.stringify(decoded));
    assert.deepEqual(decoded.message, message);
    assert.equal(Buffer.from(decoded.payload).toString('hex'), frames[1] ?? '');
  });
}

test('digests of prompts are those of the protocol', () => {
  for (const { tokens, model, digest } of golden.digests) {
    assert.equal(promptDigest(Uint32Array.from(tokens), model), digest);
  }
});

test('checksums of checksums are those of the protocol', () => {
  for (const { checksums, checksum } of golden.combined) assert.equal(combineChecksums(checksums), checksum);
});
