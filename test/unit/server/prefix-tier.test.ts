/** The prefix tier over an engine that only has bytes, and stores that forget, lie and stand still. */
import assert from 'node:assert/strict';
import { createServer, type AddressInfo } from 'node:net';
import { once } from 'node:events';
import { test } from 'node:test';
import type { Engine } from '../../../server/engine.ts';
import { openPrefixStore, type PrefixStore } from '../../../server/prefix-store.ts';
import { createPrefixTier, type PrefixTier } from '../../../server/prefix-tier.ts';

const PAGE_TOKENS = 4;
const TOKENS = Uint32Array.from({ length: 12 }, (_, index) => index);
const PAGES = [0, 1, 2].map((page) => Uint8Array.of(page, page, page, 9));
const SALT = 'a'.repeat(64);
const STATE = Uint8Array.of(1, 2, 3);
const WHERE = { tokens: TOKENS, salt: null, from: 0, pages: [10, 11, 12], slot: 5, keep: 7 };

interface Bench {
  tier: PrefixTier;
  written: Map<string, Uint8Array | number>;
}

function create({ identity = 'm', limitBytes = 1000, store = null as PrefixStore | null } = {}): Bench {
  const written: Bench['written'] = new Map();
  const engine = {
    config: { pageTokens: PAGE_TOKENS },
    pageBytes: 4,
    slotBytes: 3,
    readUnits: async (pages: number[]) => pages.map((page) => PAGES[page]!),
    readState: async () => STATE,
    writePage: (page: number, bytes: Uint8Array) => void written.set(`page ${page}`, bytes.slice()),
    writeSlot: (slot: number, bytes: Uint8Array) => void written.set(`slot ${slot}`, bytes.slice()),
    keepSlot: (slot: number, state: number) => void written.set(`state ${state}`, slot),
  } as unknown as Engine;
  return { tier: createPrefixTier(engine, { identity, limitBytes, store }), written };
}

/** A store in this process, whose values a test may change. */
function memoryStore(): PrefixStore & { values: Map<string, Uint8Array> } {
  const values = new Map<string, Uint8Array>();
  return {
    values,
    get: async (names) => names.map((name) => values.get(name) ?? null),
    has: async (names) => names.map((name) => values.has(name)),
    put: (name, value) => void values.set(name, value),
    close() {},
  };
}

const all = {
  tokens: TOKENS,
  salt: null,
  pages: [0, 1, 2].map((page) => ({ index: page, page })),
  states: [{ index: 1, state: 0 }],
};

test('pages come back as far as there is a state, with it, in their places', async () => {
  const { tier, written } = create();
  await tier.stash(all);
  assert.equal(await tier.fetch(WHERE), 2 * PAGE_TOKENS);
  const expected = { 'page 10': PAGES[0], 'page 11': PAGES[1], 'slot 5': STATE, 'state 7': 5 };
  assert.deepEqual(Object.fromEntries(written), expected);
});

test('what is there already is not fetched, and nothing is found beyond a gap', async () => {
  const { tier, written } = create();
  await tier.stash({ ...all, pages: all.pages.slice(1) });
  assert.equal(await tier.fetch(WHERE), 0);
  assert.equal(written.size, 0);
  assert.equal(await tier.fetch({ ...WHERE, from: 1 }), 2 * PAGE_TOKENS);
  assert.deepEqual([...written.keys()], ['page 11', 'slot 5', 'state 7']);
});

test('other tokens, another salt, another model and another layout find nothing', async () => {
  const store = memoryStore();
  await create({ store }).tier.stash(all);
  const other = TOKENS.slice();
  other[0] = 99;
  assert.equal(await create({ store }).tier.fetch({ ...WHERE, tokens: other }), 0);
  assert.equal(await create({ store }).tier.fetch({ ...WHERE, salt: SALT }), 0);
  assert.equal(await create({ store, identity: 'other' }).tier.fetch(WHERE), 0);
  assert.equal(await create({ store }).tier.fetch(WHERE), 2 * PAGE_TOKENS, 'the same finds it');
});

test('what has a salt is found under the same one alone, and names and values do not show it', async () => {
  const store = memoryStore();
  const { tier } = create({ store });
  await tier.stash({ ...all, salt: SALT });
  assert.equal(await tier.fetch({ ...WHERE, salt: SALT }), 2 * PAGE_TOKENS);
  assert.equal(await create({ store }).tier.fetch({ ...WHERE, salt: SALT }), 2 * PAGE_TOKENS, 'in the store');
  for (const salt of [null, 'b'.repeat(64)]) assert.equal(await tier.fetch({ ...WHERE, salt }), 0);
  await tier.stash(all);
  assert.equal(new Set(store.values.keys()).size, 2 * (all.pages.length + all.states.length));
  for (const [name, value] of store.values) {
    assert.ok(!name.includes(SALT) && !Buffer.from(value).includes(SALT), name);
  }
});

test('a value with any flipped bit, or of another length, is not there', async () => {
  const store = memoryStore();
  await create({ store }).tier.stash(all);
  for (const [name, value] of store.values) {
    for (const broken of [...value.keys()].map((at) => flip(value, at)).concat([value.slice(1), new Uint8Array(0)])) {
      store.values.set(name, broken);
      const { tier, written } = create({ store });
      const end = await tier.fetch(WHERE);
      assert.ok(end < 2 * PAGE_TOKENS || !written.has('page 12'), `${name}: ${end}`);
      for (const [place, bytes] of written) {
        if (place.startsWith('page')) assert.deepEqual(bytes, PAGES[Number(place.slice(5)) - 10]);
      }
    }
    store.values.set(name, value);
  }
});

test('host memory is bounded, and what was used longest ago goes', async () => {
  const { tier } = create({ limitBytes: 60 });
  await tier.stash(all);
  assert.ok(tier.stats().heldBytes <= 60, `${tier.stats().heldBytes} bytes`);
  assert.equal(await tier.fetch(WHERE), 0, 'its first page is gone');
  tier.clear();
  assert.equal(tier.stats().heldBytes, 0);
});

test('a store that takes a connection and says nothing costs one deadline in all, and no error', async (t) => {
  const silent = createServer((socket) => void socket.resume()).listen(0, '127.0.0.1');
  await once(silent, 'listening');
  t.after(() => silent.close());
  const faults: string[] = [];
  const { port } = silent.address() as AddressInfo;
  const store = openPrefixStore(`redis://127.0.0.1:${port}`, (kind) => void faults.push(kind));
  t.after(() => store.close());
  const { tier } = create({ store, limitBytes: 0 });
  await tier.stash(all);
  for (let round = 0; round < 3; round++) assert.equal(await tier.fetch(WHERE), 0);
  assert.ok(faults.length <= 1, faults.join());
});

test('a store that is not there is a fault that is told once, and no error', async (t) => {
  const closed = createServer().listen(0, '127.0.0.1');
  await once(closed, 'listening');
  const { port } = closed.address() as AddressInfo;
  closed.close();
  const fault = new Promise<string>((resolve) => {
    const store = openPrefixStore(`redis://127.0.0.1:${port}`, resolve);
    t.after(() => store.close());
    const { tier } = create({ store, limitBytes: 0 });
    void tier.stash(all).then(() => tier.fetch(WHERE));
  });
  assert.equal(await fault, 'gone');
});

function flip(value: Uint8Array, at: number): Uint8Array {
  const broken = value.slice();
  broken[at]! ^= 1;
  return broken;
}
