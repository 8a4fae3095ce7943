/** Checkpoint files from strangers: sound ones are read, damaged and hostile ones refused before any tensor is touched. */
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { mkdtempSync, openSync, closeSync, ftruncateSync, rmSync, writeFileSync, writeSync, mkdirSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, describe, test } from 'node:test';
import {
  CheckpointError,
  memorySource,
  openCheckpoint,
  parseIndex,
  type TensorSource,
} from '../../../model/safetensors.ts';
import { safetensorsBytes, type StoredEntry } from '../../support/checkpoints.ts';
import { createPrng } from '../../support/prng.ts';

const root = mkdtempSync(join(tmpdir(), 'handoff-safetensors-'));
after(() => rmSync(root, { recursive: true }));
let created = 0;

function directoryWith(files: Record<string, string | Uint8Array>): string {
  const directory = join(root, `${created++}`);
  mkdirSync(directory);
  for (const [name, content] of Object.entries(files)) writeFileSync(join(directory, name), content);
  return directory;
}

const entry = (name: string, count: number, first = 1): StoredEntry => ({
  name,
  dtype: 'U8',
  shape: [count],
  bytes: Uint8Array.from({ length: count }, (_, index) => first + index),
});

/** A file with this header text, its true length in front, and so many bytes of tensors. */
function fileWith(header: string | Uint8Array, dataBytes: number): Buffer {
  const json = Buffer.from(header);
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(json.byteLength));
  return Buffer.concat([length, json, Buffer.alloc(dataBytes)]);
}

const refuses = (file: Uint8Array | string, message: RegExp): Promise<void> =>
  assert.rejects(openCheckpoint(directoryWith({ 'model.safetensors': file })), (error) => {
    assert.ok(error instanceof CheckpointError, String(error));
    assert.match(error.message, message);
    return true;
  });

describe('a sound checkpoint', () => {
  test('is listed and read, whole and in part', async () => {
    const directory = directoryWith({
      'model.safetensors': safetensorsBytes([entry('a', 5), entry('empty', 0), entry('b', 3, 9)]),
    });
    const source = await openCheckpoint(directory);
    assert.deepEqual([...source.tensors.keys()], ['a', 'empty', 'b']);
    const bytes = new Uint8Array(2);
    await source.read(source.tensors.get('b')!, 1, bytes);
    assert.deepEqual([...bytes], [10, 11]);
    await assert.rejects(source.read(source.tensors.get('a')!, 4, bytes), /past its end/);
    await source.close();
  });

  test('may be spread over shards', async () => {
    const index = { metadata: {}, weight_map: { a: 'model-1.safetensors', b: 'model-2.safetensors' } };
    const directory = directoryWith({
      'model.safetensors.index.json': JSON.stringify(index),
      'model-1.safetensors': safetensorsBytes([entry('a', 5)]),
      'model-2.safetensors': safetensorsBytes([entry('b', 3, 7)]),
    });
    const source = await openCheckpoint(directory);
    const bytes = new Uint8Array(3);
    await source.read(source.tensors.get('b')!, 0, bytes);
    assert.deepEqual([...bytes], [7, 8, 9]);
    await source.close();
  });

  test('of 6 GB is listed without being read', async () => {
    const gigabytes = 6 * 2 ** 30;
    const header = JSON.stringify({ big: { dtype: 'U8', shape: [gigabytes], data_offsets: [0, gigabytes] } });
    const directory = directoryWith({});
    const file = openSync(join(directory, 'model.safetensors'), 'w');
    writeSync(file, fileWith(header, 0));
    // A sparse file: it takes no space.
    ftruncateSync(file, 8 + header.length + gigabytes);
    closeSync(file);
    const source = await openCheckpoint(directory);
    const last = new Uint8Array(1).fill(7);
    await source.read(source.tensors.get('big')!, gigabytes - 1, last);
    assert.equal(last[0], 0);
    await source.close();
  });

  test('that ends after its header is listed when that is enough, and says what is missing', async () => {
    const whole = safetensorsBytes([entry('a', 5), entry('b', 3)]);
    const directory = directoryWith({ 'model.safetensors': whole.subarray(0, whole.byteLength - 8) });
    await assert.rejects(openCheckpoint(directory), /tensor b ends at byte \d+, the file has \d+: it is cut short/);
    const source = await openCheckpoint(directory, { headersOnly: true });
    assert.deepEqual([...source.tensors.keys()], ['a', 'b']);
    assert.deepEqual(source.files, [
      { name: 'model.safetensors', byteLength: whole.byteLength - 8, completeBytes: whole.byteLength },
    ]);
    await assert.rejects(source.read(source.tensors.get('b')!, 0, new Uint8Array(3)), /ended at byte/);
    await source.close();
  });

  test('in memory behaves alike', async () => {
    const source = memorySource([entry('a', 4)]);
    const bytes = new Uint8Array(2);
    await source.read(source.tensors.get('a')!, 2, bytes);
    assert.deepEqual([...bytes], [3, 4]);
    await assert.rejects(source.read(source.tensors.get('a')!, 3, bytes), /past its end/);
    assert.throws(() => memorySource([{ ...entry('a', 4), shape: [5] }]), /needs 5 bytes, found 4/);
  });
});

describe('a hostile file is refused:', () => {
  const tensor = (fields: object): string =>
    JSON.stringify({ t: { dtype: 'U8', shape: [4], data_offsets: [0, 4], ...fields } });
  const pair = (first: [number, number], second: [number, number]): string =>
    JSON.stringify({
      a: { dtype: 'U8', shape: [first[1] - first[0]], data_offsets: first },
      b: { dtype: 'U8', shape: [second[1] - second[0]], data_offsets: second },
    });
  const cases: [name: string, file: Uint8Array, message: RegExp][] = [
    ['an empty file', new Uint8Array(0), /too few/],
    ['a header longer than the file', fileWith('{}', 0).fill(200, 0, 1), /a header of 200 bytes in a file of 10/],
    ['a header of 16 exabytes', Buffer.alloc(64, 0xff), /at most 100000000/],
    ['a header that is no object', fileWith('[1]', 0), /does not start with "\{"/],
    ['a header with spaces in front', fileWith(' {}', 0), /does not start/],
    ['a header that is no JSON', fileWith('{"a":', 0), /not JSON in UTF-8/],
    ['a header that is no UTF-8', fileWith(Uint8Array.of(0x7b, 0x22, 0xff, 0x22, 0x7d), 0), /not JSON in UTF-8/],
    ['an unknown dtype', fileWith(tensor({ dtype: 'Q4' }), 4), /unknown dtype "Q4"/],
    ['a dtype that every object has', fileWith(tensor({ dtype: 'constructor' }), 4), /unknown dtype/],
    ['a shape that is no list', fileWith(tensor({ shape: 4 }), 4), /shape is not a list/],
    ['a negative size', fileWith(tensor({ shape: [-4] }), 4), /shape is not a list/],
    ['a shape whose product overflows', fileWith(tensor({ shape: [2 ** 32, 2 ** 32] }), 4), /overflows/],
    ['a shape that does not fit the span', fileWith(tensor({ shape: [5] }), 4), /needs 5 bytes, data_offsets span 4/],
    ['offsets that run backwards', fileWith(tensor({ data_offsets: [4, 0] }), 4), /backwards/],
    ['offsets that are not whole', fileWith(tensor({ data_offsets: [0, 4.5] }), 4), /pair of whole numbers/],
    ['offsets past the file', fileWith(tensor({}), 3), /cut short/],
    ['bytes after the last tensor', fileWith(tensor({}), 5), /1 bytes after the last tensor/],
    ['bytes before the first tensor', fileWith(tensor({ data_offsets: [1, 5] }), 5), /1 bytes before tensor t/],
    ['tensors that overlap', fileWith(pair([0, 4], [3, 6]), 6), /b overlaps/],
    ['a hole between tensors', fileWith(pair([0, 2], [3, 6]), 6), /1 bytes before tensor b/],
    ['an entry that is no object', fileWith('{"t":7}', 0), /not an object/],
    ['a name that steers a terminal', fileWith('{"\\u001b[2J":{}}', 0), /a tensor's name has control characters/],
    ['a name without end', fileWith(`{"${'a'.repeat(1000)}":{}}`, 0), /or more than 512 characters/],
    ['metadata that is not text', fileWith('{"__metadata__":{"a":1}}', 0), /__metadata__/],
  ];
  for (const [name, file, message] of cases) test(name, () => refuses(file, message));

  test('no checkpoint at all', async () => {
    await assert.rejects(openCheckpoint(directoryWith({})), /model\.safetensors cannot be opened/);
    const directory = directoryWith({});
    mkdirSync(join(directory, 'model.safetensors'));
    await assert.rejects(openCheckpoint(directory), /not a regular file/);
  });

  test('a pipe, which nobody writes into', async () => {
    for (const name of ['model.safetensors', 'model.safetensors.index.json']) {
      const directory = directoryWith({});
      execFileSync('mkfifo', [join(directory, name)]);
      await assert.rejects(openCheckpoint(directory), /not a regular file/);
    }
  });
});

const SEED = Number(process.env['HANDOFF_SEED'] ?? 20260424);

test(`seed ${SEED}: of a damaged file nothing is believed that its bytes do not bear out`, async (t) => {
  const random = createPrng(SEED);
  const below = (count: number): number => Math.floor(random() * count);
  const sound = safetensorsBytes([entry('a', 6), entry('layers.0.attn.wq_a.weight', 9), entry('b', 3)]);
  const headerEnd = 8 + Number(sound.readBigUInt64LE());
  const pieces = [
    '9',
    '0',
    '-',
    '"',
    '[',
    ']',
    '{',
    '}',
    ',',
    ':',
    'e',
    '1e99',
    'null',
    '"a"',
    '\\u0000',
    '"U8"',
    '[]',
  ];
  const path = join(directoryWith({}), 'model.safetensors');
  let accepted = 0;
  for (let round = 0; round < 1000; round++) {
    let bytes = Buffer.from(sound);
    for (let change = 0; change <= below(3); change++) {
      const at = below(headerEnd);
      const kind = below(5);
      if (kind === 0) bytes[at] = below(256);
      else if (kind === 1) bytes = bytes.subarray(0, below(bytes.byteLength));
      else if (kind === 2) bytes = Buffer.concat([bytes, Buffer.alloc(below(9))]);
      else {
        // Another piece of JSON in place of some of it, with a length that fits or does not.
        const piece = Buffer.from(pieces[below(pieces.length)]!);
        bytes = Buffer.concat([bytes.subarray(0, at), piece, bytes.subarray(at + below(piece.byteLength + 2))]);
        if (kind === 3 && bytes.byteLength >= 8) bytes.writeBigUInt64LE(BigInt(below(headerEnd + 4)));
      }
    }
    writeFileSync(path, bytes);
    let source: TensorSource;
    try {
      source = await openCheckpoint(join(path, '..'));
    } catch (error) {
      assert.ok(error instanceof CheckpointError, `round ${round}: ${String((error as Error).stack)}`);
      continue;
    }
    accepted++;
    const spans = [...source.tensors.values()].toSorted(
      (left, right) => left.start - right.start || left.end - right.end,
    );
    let end = 8 + Number(bytes.readBigUInt64LE());
    for (const tensor of spans) {
      assert.equal(tensor.start, end, `round ${round}`);
      end = tensor.end;
    }
    assert.equal(end, bytes.byteLength, `round ${round}`);
    await source.close();
  }
  t.diagnostic(`${accepted} accepted`);
  assert.ok(accepted > 3, `${accepted} damages changed nothing that matters, such as a letter of a name`);
});

describe('an index is refused', () => {
  for (const shard of [
    '../x.safetensors',
    '/etc/x.safetensors',
    'a/b.safetensors',
    'a\\b.safetensors',
    '.safetensors',
    'x.bin',
    '',
    7,
    '..',
  ]) {
    test(`when a shard is called ${JSON.stringify(shard)}`, () => {
      assert.throws(() => parseIndex(JSON.stringify({ weight_map: { a: shard } })), /not a plain file name/);
    });
  }

  test('when it and the shards disagree', async () => {
    const shards = {
      'one.safetensors': safetensorsBytes([entry('a', 1)]),
      'two.safetensors': safetensorsBytes([entry('b', 1)]),
    };
    const open = (map: object): Promise<unknown> =>
      openCheckpoint(directoryWith({ ...shards, 'model.safetensors.index.json': JSON.stringify({ weight_map: map }) }));
    await assert.rejects(open({ a: 'one.safetensors', b: 'one.safetensors' }), /tensor b is not in one\.safetensors/);
    await assert.rejects(
      open({ a: 'two.safetensors', b: 'one.safetensors' }),
      /tensor a is not in two\.safetensors but in one/,
    );
    await assert.rejects(open({ b: 'two.safetensors', a: 'two.safetensors' }), /tensor a is not in two/);
    await assert.rejects(open({ a: 'three.safetensors' }), /three\.safetensors cannot be opened/);
    await assert.rejects(open({}), /weight_map is empty/);
    const twice = directoryWith({
      'one.safetensors': safetensorsBytes([entry('a', 1)]),
      'two.safetensors': safetensorsBytes([entry('a', 1), entry('b', 1)]),
      'model.safetensors.index.json': JSON.stringify({ weight_map: { a: 'one.safetensors', b: 'two.safetensors' } }),
    });
    await assert.rejects(openCheckpoint(twice), /tensor a is also in one/);
  });

  test('when it is a folder', async () => {
    const directory = directoryWith({ 'model.safetensors': safetensorsBytes([entry('a', 1)]) });
    mkdirSync(join(directory, 'model.safetensors.index.json'));
    await assert.rejects(openCheckpoint(directory), (error) => {
      assert.ok(error instanceof CheckpointError, String(error));
      assert.match(error.message, /model\.safetensors\.index\.json: is not a regular file/);
      return true;
    });
  });

  test('when a name in it steers a terminal', () => {
    const text = JSON.stringify({ weight_map: { 'a\u009b2J': 'a.safetensors' } });
    assert.throws(() => parseIndex(text), /a tensor's name has control characters/);
  });

  test('when it is no JSON or has no map', () => {
    for (const text of ['{', 'null', '[]', '{"weight_map":[]}', '{"weight_map":"a"}'])
      assert.throws(() => parseIndex(text), CheckpointError);
  });
});
