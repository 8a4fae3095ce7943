import assert from 'node:assert/strict';
import { test } from 'node:test';
import { cacheFolder, readTar } from '../../../server/adapter/swiftshader.ts';

/** A tar archive of regular files, as any tar program writes it. */
function tarOf(files: Record<string, string>): Buffer {
  const blocks: Buffer[] = [];
  for (const [name, content] of Object.entries(files)) {
    const header = Buffer.alloc(512);
    header.write(name, 0);
    header.write(`${content.length.toString(8).padStart(11, '0')} `, 124);
    header.write('0', 156);
    const body = Buffer.alloc(Math.ceil(content.length / 512) * 512);
    body.write(content);
    blocks.push(header, body);
  }
  return Buffer.concat([...blocks, Buffer.alloc(1024)]);
}

test('a tar archive yields its files, whatever their size', () => {
  const files = { 'package/empty': '', 'package/one block': 'x'.repeat(512), 'package/two': 'y'.repeat(513) };
  const found = readTar(tarOf(files));
  assert.deepEqual(Object.fromEntries([...found].map(([name, bytes]) => [name, Buffer.from(bytes).toString()])), files);
});

test('a tar archive that is cut short is refused', () => {
  const archive = tarOf({ name: 'x'.repeat(2000) });
  assert.throws(() => readTar(archive.subarray(0, 1024)), /damaged/);
});

test('the cache folder follows XDG_CACHE_HOME', () => {
  assert.equal(cacheFolder({ XDG_CACHE_HOME: '/elsewhere' }), '/elsewhere/handoff');
  assert.match(cacheFolder({}), /\.cache\/handoff$/);
});
