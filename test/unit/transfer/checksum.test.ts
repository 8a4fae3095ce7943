import assert from 'node:assert/strict';
import { test } from 'node:test';
import { combineChecksums, crc32c, promptDigest } from '../../../transfer/checksum.ts';
import { createPrng } from '../../support/prng.ts';

test('crc32c gives the published check values', () => {
  // RFC 3720, appendix B.4, and the catalogue value of "123456789".
  const cases: [Uint8Array, number][] = [
    [Buffer.from('123456789'), 0xe3069283],
    [new Uint8Array(32), 0x8a9136aa],
    [new Uint8Array(32).fill(0xff), 0x62a8ab43],
    [Uint8Array.from({ length: 32 }, (_, i) => i), 0x46dd794e],
    [Uint8Array.from({ length: 32 }, (_, i) => 31 - i), 0x113fdb5c],
    [new Uint8Array(0), 0],
  ];
  for (const [bytes, expected] of cases) assert.equal(crc32c(bytes), expected);
});

/** One bit at a time, as the definition has it. */
function slowCrc(bytes: Uint8Array): number {
  let crc = ~0;
  for (const byte of bytes) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = crc & 1 ? (crc >>> 1) ^ 0x82f63b78 : crc >>> 1;
  }
  return ~crc >>> 0;
}

test('crc32c agrees with the definition at every length and alignment, and continues', () => {
  const random = createPrng(1);
  const memory = Uint8Array.from({ length: 80 }, () => Math.floor(random() * 256));
  for (let start = 0; start < 9; start++) {
    for (let end = start; end <= memory.length; end++) {
      const bytes = memory.subarray(start, end);
      assert.equal(crc32c(bytes), slowCrc(bytes), `[${start}, ${end})`);
      const middle = (end - start) >> 1;
      assert.equal(crc32c(bytes.subarray(middle), crc32c(bytes.subarray(0, middle))), slowCrc(bytes));
    }
  }
});

test('any single flipped bit changes the checksum', () => {
  const bytes = new Uint8Array(64);
  const clean = crc32c(bytes);
  for (let bit = 0; bit < 512; bit++) {
    bytes[bit >> 3] = 1 << (bit & 7);
    assert.notEqual(crc32c(bytes), clean);
    bytes[bit >> 3] = 0;
  }
});

test('combined checksums depend on order', () => {
  assert.notEqual(combineChecksums([1, 2]), combineChecksums([2, 1]));
  assert.equal(combineChecksums([1, 2]), slowCrc(Uint8Array.from([1, 0, 0, 0, 2, 0, 0, 0])));
});

test('prompt digests differ for another order, length, token or model', () => {
  const digests = new Set<string>();
  const prompts = [[], [0], [0, 0], [1, 2], [2, 1], [1, 2, 0], [0x80000000], [1]];
  for (const tokens of prompts) {
    for (const model of ['a', 'b', '']) {
      const digest = promptDigest(Uint32Array.from(tokens), model);
      assert.match(digest, /^[0-9a-f]{16}$/);
      digests.add(digest);
    }
  }
  assert.equal(digests.size, prompts.length * 3);
  assert.equal(promptDigest(Uint32Array.of(1, 2), 'a'), promptDigest(Uint32Array.of(1, 2), 'a'));
});
