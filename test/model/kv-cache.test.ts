/** Pages and slots as bytes: own memory, the right place, nothing beside it. Lost devices reject. */
import assert from 'node:assert/strict';
import { describe, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { DeviceError, openDevice } from '../../kernels/device.ts';
import { loadModelConfig } from '../../model/config.ts';
import { createKvCache } from '../../model/kv-cache.ts';
import { createTestRandom, openTestDevice } from '../support/gpu.ts';

const device = await openTestDevice();
const random = createTestRandom();
const config = loadModelConfig(fileURLToPath(new URL('../../model/nano', import.meta.url)));

describe('a cache', () => {
  test('gives back the units that were written, from wherever, and leaves the others alone', async () => {
    const cache = createKvCache(device, config, { pageCount: 5, slotCount: 3 });
    // Entries of f32: layers of ratio 4 have 32 a page with index keys of 64, the one of ratio 128 has one.
    assert.equal(cache.pageBytes, 4 * (2 * 32 * (128 + 64) + 128));
    const pages = Array.from({ length: 5 }, () => random.bytes(cache.pageBytes));
    const slots = Array.from({ length: 3 }, () => random.bytes(cache.slotBytes));
    for (const [page, bytes] of pages.entries()) cache.writePage(page, bytes);
    for (const [slot, bytes] of slots.entries()) cache.writeSlot(slot, bytes);
    // Written again while earlier writes may still be under way: the last one counts, and only there.
    pages[2] = random.bytes(cache.pageBytes);
    slots[1] = random.bytes(cache.slotBytes);
    cache.writePage(2, pages[2]);
    cache.writeSlot(1, slots[1]);
    await cache.flushed();
    const [first, second] = await Promise.all([
      cache.readUnits({ pages: [4, 0, 2], slot: 1 }),
      cache.readUnits({ pages: [1, 3], slot: null }),
    ]);
    assert.deepEqual(first, [pages[4], pages[0], pages[2], slots[1]]);
    assert.deepEqual(second, [pages[1], pages[3]]);
    assert.deepEqual(await cache.readUnits({ pages: [], slot: 2 }), [slots[2]]);
    assert.deepEqual(await cache.readUnits({ pages: [], slot: null }), []);
    cache.destroy();
  });

  test('has smaller pages with narrower index keys, and a layout that names precision and mode', async () => {
    const layouts = new Set<string>();
    // 64 dimensions: 2 bytes each; 1 each and a scale of 4; half of one each and two scales in a word.
    for (const [indexPrecision, keyBytes] of [
      ['f32', 256],
      ['bf16', 128],
      ['fp8', 68],
      ['fp4', 36],
    ] as const) {
      for (const mode of ['hp', 'q', 'q-inputs'] as const) {
        const cache = createKvCache(device, { ...config, mode, indexPrecision }, { pageCount: 2, slotCount: 1 });
        assert.equal(cache.pageBytes, 2 * 32 * (4 * 128 + keyBytes) + 4 * 128);
        const bytes = random.bytes(cache.pageBytes);
        cache.writePage(1, bytes);
        assert.deepEqual((await cache.readUnits({ pages: [1], slot: null }))[0], bytes);
        layouts.add(JSON.stringify(cache.layout));
        cache.destroy();
      }
    }
    assert.equal(layouts.size, 12, 'HELLO compares layouts: no two of these may exchange a page');
  });

  test('with drafts has larger slots, which hold them and the window of the draft block, and another layout', async () => {
    const size = { pageCount: 1, slotCount: 2 };
    const plain = createKvCache(device, config, size);
    const cache = createKvCache(device, config, { ...size, draft: true });
    assert.equal(cache.slotBytes, plain.slotBytes + 4 * config.windowTokens * config.headDim + 4);
    assert.equal(cache.pageBytes, plain.pageBytes);
    const slots = [0, 1].map(() => random.bytes(cache.slotBytes));
    for (const [slot, bytes] of slots.entries()) cache.writeSlot(slot, bytes);
    for (const [slot, bytes] of slots.entries()) {
      assert.deepEqual(await cache.readUnits({ pages: [], slot }), [bytes]);
    }
    assert.throws(() => plain.writeSlot(0, slots[0]!), /a slot has/);
    assert.notEqual(JSON.stringify(cache.layout), JSON.stringify(plain.layout));
    plain.destroy();
    cache.destroy();
  });

  test('hands out memory that a later read does not touch', async () => {
    const cache = createKvCache(device, config, { pageCount: 2, slotCount: 1 });
    const bytes = random.bytes(cache.pageBytes);
    cache.writePage(0, bytes);
    const [read] = await cache.readUnits({ pages: [0], slot: null });
    cache.writePage(0, random.bytes(cache.pageBytes));
    await cache.readUnits({ pages: [0, 1], slot: 0 });
    assert.deepEqual(read, bytes);
    assert.equal(read!.buffer.byteLength, cache.pageBytes, 'a buffer of its own');
    cache.destroy();
  });

  test('copies slots into states and back, in the order asked for', async () => {
    const sizes = createKvCache(device, config, { pageCount: 1, slotCount: 1 });
    const { slotBytes } = sizes;
    sizes.destroy();
    const cache = createKvCache(device, config, { pageCount: 1, slotCount: 3, stateBytes: 2 * slotBytes + 1 });
    assert.equal(cache.stateCount, 2);
    const [first, second, third] = Array.from({ length: 3 }, () => random.bytes(slotBytes));
    cache.writeSlot(0, first!);
    cache.writeSlot(1, second!);
    cache.keepSlot(0, 1);
    cache.writeSlot(0, third!);
    cache.keepSlot(1, 0);
    cache.resumeSlot(1, 2);
    cache.resumeSlot(0, 1);
    cache.keepSlot(0, 1);
    for (const [slot, bytes] of [third, second, first].entries()) {
      assert.deepEqual(await cache.readUnits({ pages: [], slot }), [bytes], `slot ${slot}`);
    }
    assert.throws(() => cache.keepSlot(0, 2), /state 2 of a cache of 2/);
    assert.throws(() => cache.resumeSlot(0, 3), /slot 3 of a cache of 3/);
    cache.destroy();
  });

  test('refuses units that it does not have and bytes of another length', async () => {
    const cache = createKvCache(device, config, { pageCount: 2, slotCount: 1 });
    await assert.rejects(cache.readUnits({ pages: [2], slot: null }), /page 2 of a cache of 2/);
    await assert.rejects(cache.readUnits({ pages: [], slot: -1 }), /slot -1/);
    const bytes = new Uint8Array(cache.pageBytes);
    assert.throws(() => cache.writePage(0.5, bytes), /page 0\.5/);
    assert.throws(() => cache.writePage(0, bytes.subarray(1)), /a page has \d+ bytes/);
    assert.throws(() => cache.writeSlot(0, bytes), /a slot has \d+ bytes/);
    cache.destroy();
  });

  test('accounts for its memory and gives it back', () => {
    const before = device.allocatedBytes;
    const cache = createKvCache(device, config, { pageCount: 7, slotCount: 2, stateBytes: 2 ** 20 });
    assert.ok(cache.stateCount > 0, `${cache.stateCount} states`);
    const slotCount = 2 + cache.stateCount;
    assert.equal(device.allocatedBytes - before, 7 * cache.pageBytes + slotCount * cache.slotBytes);
    cache.destroy();
    assert.equal(device.allocatedBytes, before);
  });

  test('rejects reads and flushes on a device that is lost', async () => {
    const adapterName = process.env['HANDOFF_ADAPTER'];
    const doomed = await openDevice(adapterName ? { adapterName } : {});
    const cache = createKvCache(doomed, config, { pageCount: 2, slotCount: 1 });
    const reading = cache.readUnits({ pages: [0, 1], slot: 0 });
    doomed.close();
    await assert.rejects(reading, DeviceError);
    await assert.rejects(cache.flushed(), DeviceError);
  });
});
