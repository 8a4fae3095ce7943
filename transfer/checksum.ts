/**
 * Integrity of bytes on the way: CRC-32C of payloads and headers, and the digest that ties a room
 * to its prompt. Neither is a defence against an attacker; both find crossed, cut and flipped bytes.
 */

/** The Castagnoli polynomial, reflected (RFC 3720, appendix B.4). */
const CASTAGNOLI = 0x82f63b78;

/** Eight tables of 256 entries: table k advances a byte by k further bytes ("slicing by 8"). */
const TABLES = buildTables();
const NO_WORDS = new Uint32Array(0);
const T0 = TABLES[0] as Uint32Array;
const T1 = TABLES[1] as Uint32Array;
const T2 = TABLES[2] as Uint32Array;
const T3 = TABLES[3] as Uint32Array;
const T4 = TABLES[4] as Uint32Array;
const T5 = TABLES[5] as Uint32Array;
const T6 = TABLES[6] as Uint32Array;
const T7 = TABLES[7] as Uint32Array;

/**
 * CRC-32C of `bytes`, as an unsigned 32-bit integer. `previous` continues an earlier result:
 * `crc32c(b, crc32c(a))` equals the checksum of a followed by b.
 */
export function crc32c(bytes: Uint8Array, previous = 0): number {
  let crc = ~previous;
  let at = 0;
  const length = bytes.length;
  // Whole words need an aligned start; typed-array views on received frames nearly always have one.
  while (at < length && ((bytes.byteOffset + at) & 3) !== 0) {
    crc = (T0[(crc ^ (bytes[at++] as number)) & 255] as number) ^ (crc >>> 8);
  }
  const wordCount = ((length - at) >> 3) << 1;
  // Nothing left may also mean that alignment was not reached, where a view would throw.
  const words = wordCount === 0 ? NO_WORDS : new Uint32Array(bytes.buffer, bytes.byteOffset + at, wordCount);
  for (let i = 0; i < words.length; i += 2) {
    const low = (words[i] as number) ^ crc;
    const high = words[i + 1] as number;
    crc =
      (T7[low & 255] as number) ^
      (T6[(low >>> 8) & 255] as number) ^
      (T5[(low >>> 16) & 255] as number) ^
      (T4[low >>> 24] as number) ^
      (T3[high & 255] as number) ^
      (T2[(high >>> 8) & 255] as number) ^
      (T1[(high >>> 16) & 255] as number) ^
      (T0[high >>> 24] as number);
  }
  at += words.length << 2;
  while (at < length) crc = (T0[(crc ^ (bytes[at++] as number)) & 255] as number) ^ (crc >>> 8);
  return ~crc >>> 0;
}

/** Checksum of checksums: CRC-32C over the unit checksums of a room, in manifest order. */
export function combineChecksums(checksums: readonly number[]): number {
  return crc32c(new Uint8Array(Uint32Array.from(checksums).buffer));
}

/**
 * Digest of a prompt under a model: 16 hex digits over the token ids and the model's own digest.
 * Both halves of a room compute it on their own; OPEN and END compare (this also finds crossed legs).
 */
export function promptDigest(tokens: Uint32Array, modelDigest: string): string {
  // Two multiplicative hashes with different constants, mixed as in MurmurHash3's finaliser.
  let a = 0x9e3779b9 ^ tokens.length;
  let b = 0x85ebca6b;
  const feed = (word: number): void => {
    a = Math.imul(a ^ word, 0xcc9e2d51);
    a = (a << 15) | (a >>> 17);
    b = Math.imul(b ^ word, 0x1b873593) + 0x27d4eb2f;
    b = (b << 13) | (b >>> 19);
  };
  for (let i = 0; i < modelDigest.length; i++) feed(modelDigest.charCodeAt(i));
  for (const token of tokens) feed(token);
  return hex8(finalise(a ^ Math.imul(b, 3))) + hex8(finalise(b + a));
}

function finalise(hash: number): number {
  let h = hash;
  h = Math.imul(h ^ (h >>> 16), 0x85ebca6b);
  h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35);
  return (h ^ (h >>> 16)) >>> 0;
}

function hex8(word: number): string {
  return word.toString(16).padStart(8, '0');
}

function buildTables(): Uint32Array[] {
  const tables: Uint32Array[] = [];
  for (let t = 0; t < 8; t++) tables.push(new Uint32Array(256));
  const first = tables[0] as Uint32Array;
  for (let byte = 0; byte < 256; byte++) {
    let crc = byte;
    for (let bit = 0; bit < 8; bit++) crc = crc & 1 ? (crc >>> 1) ^ CASTAGNOLI : crc >>> 1;
    first[byte] = crc;
  }
  for (let t = 1; t < 8; t++) {
    const table = tables[t] as Uint32Array;
    const before = tables[t - 1] as Uint32Array;
    for (let byte = 0; byte < 256; byte++) {
      const crc = before[byte] as number;
      table[byte] = (crc >>> 8) ^ (first[crc & 255] as number);
    }
  }
  return tables;
}
