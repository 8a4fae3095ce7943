/** Real sockets on loopback. Nothing sleeps: every wait is for an event, under the test's time-out. */

import assert from 'node:assert/strict';
import { test, type TestContext } from 'node:test';
import { inspect } from 'node:util';
import { Dealer, Router } from 'zeromq';
import {
  createWriter,
  openConnector,
  openListener,
  type ChannelEvent,
  type ChannelOptions,
  type Connector,
  type Listener,
} from '../../../transfer/channel.ts';
import {
  decodeMessage,
  encodeMessage,
  makeEpoch,
  PROTOCOL_VERSION,
  type Epoch,
  type Message,
} from '../../../transfer/messages.ts';

const TIMEOUT = { timeout: 20_000 };

/** Events of one end, and a way to wait for one. */
interface Inbox {
  events: ChannelEvent[];
  push(event: ChannelEvent): void;
  next(matches: (event: ChannelEvent) => boolean): Promise<ChannelEvent>;
}

function createInbox(): Inbox {
  const events: ChannelEvent[] = [];
  const waiters: (() => void)[] = [];
  let read = 0;
  return {
    events,
    push(event) {
      events.push(event);
      for (const wake of waiters.splice(0)) wake();
    },
    async next(matches) {
      for (;;) {
        while (read < events.length) {
          const event = events[read++] as ChannelEvent;
          if (matches(event)) return event;
        }
        await new Promise<void>((resolve) => waiters.push(resolve));
      }
    },
  };
}

const isUp = (event: ChannelEvent): boolean => event.type === 'up';
const isLost = (event: ChannelEvent): boolean => event.type === 'lost';
const isMessage = (event: ChannelEvent): boolean => event.type === 'message';

function optionsFor(name: string, epoch: Epoch, inbox: Inbox, extra: Partial<ChannelOptions> = {}): ChannelOptions {
  return {
    role: name.startsWith('p') ? 'prefill' : 'decode',
    name,
    epoch,
    fields: { model: 'ghost', page_tokens: '128' },
    heartbeatMs: 50,
    leaseMs: 2000,
    dataSilenceMs: 2000,
    maxQueuedMessages: 100,
    maxQueuedBytes: 1 << 20,
    maxPayloadBytes: 1 << 20,
    lingerMs: 200,
    onEvent: (event) => inbox.push(event),
    ...extra,
  };
}

const P1 = makeEpoch(1000, 1);
const P2 = makeEpoch(2000, 1);
const D1 = makeEpoch(1000, 2);
const D2 = makeEpoch(2000, 2);
const KEY = `${makeEpoch(500, 5)}-0.1`;

interface Ends {
  listener: Listener;
  connector: Connector;
  atP: Inbox;
  atD: Inbox;
}

async function openPair(t: TestContext, extra: Partial<ChannelOptions> = {}): Promise<Ends> {
  const atP = createInbox();
  const atD = createInbox();
  const listener = await openListener(optionsFor('p0', P1, atP, extra), {
    address: 'tcp://127.0.0.1:0',
    dataAddress: 'tcp://127.0.0.1:0',
  });
  const connector = openConnector(optionsFor('d0', D1, atD, extra));
  t.after(async () => {
    await connector.close();
    await listener.close();
  });
  connector.connect(listener.address, false);
  await atD.next(isUp);
  await atP.next(isUp);
  return { listener, connector, atP, atD };
}

/** The messages in the frames of a control socket, by type. */
function typesOf(frames: readonly Uint8Array[]): (Message['type'] | null)[] {
  return frames.map((frame) => {
    const decoded = decodeMessage([frame]);
    return decoded.ok ? decoded.message.type : null;
  });
}

const open: Message = { type: 'OPEN', from: D1, to: P1, key: KEY, digest: 'd', tokenCount: 3 };

test('both ends report the link, and control and data arrive with payload', TIMEOUT, async (t) => {
  const { listener, connector, atP, atD } = await openPair(t);
  assert.match(listener.address, /^tcp:\/\/127\.0\.0\.1:[1-9]\d*$/);
  assert.notEqual(listener.address, listener.dataAddress);
  const up = atD.events.find(isUp);
  assert.ok(up?.type === 'up' && up.peer.epoch === P1 && up.peer.name === 'p0', inspect(up));

  assert.equal(connector.send(P1, 'control', open), true);
  const got = await atP.next(isMessage);
  assert.ok(got.type === 'message' && got.socket === 'control' && got.peer.epoch === D1, inspect(got));
  assert.deepEqual(got.message, open);

  const payload = Uint8Array.from({ length: 1000 }, (_, i) => i);
  const chunk: Message = {
    type: 'CHUNK',
    from: P1,
    to: D1,
    key: KEY,
    sequence: 0,
    firstUnit: 0,
    generations: [1],
    checksums: [2],
    payloadBytes: 1000,
  };
  assert.equal(listener.send(D1, 'data', chunk, payload), true);
  const data = await atD.next(isMessage);
  assert.ok(data.type === 'message' && data.socket === 'data', inspect(data));
  assert.deepEqual(data.message, chunk);
  assert.deepEqual(new Uint8Array(data.payload), payload);
});

test('an unknown peer is refused at once and counted', TIMEOUT, async (t) => {
  const { listener, connector } = await openPair(t);
  assert.equal(listener.send(D2, 'control', open), false);
  assert.equal(connector.send(P2, 'control', open), false);
  assert.equal(listener.stats().droppedMessages, 1);
  assert.equal(connector.stats().droppedMessages, 1);
});

test('a listener that restarts on its address is lost and then up in its new life', TIMEOUT, async (t) => {
  const { listener, connector, atD } = await openPair(t);
  await listener.close();
  const atP2 = createInbox();
  const second = await openListener(optionsFor('p0', P2, atP2), {
    address: listener.address,
    dataAddress: 'tcp://127.0.0.1:0',
  });
  t.after(() => second.close());
  const lost = await atD.next(isLost);
  assert.ok(lost.type === 'lost' && lost.peer.epoch === P1 && lost.why !== 'lease', inspect(lost));
  const up = await atD.next(isUp);
  assert.ok(up.type === 'up' && up.peer.epoch === P2, inspect(up));
  await atP2.next(isUp);
  assert.equal(connector.send(P1, 'control', open), false);
  assert.equal(connector.send(P2, 'control', { ...open, to: P2 } as Message), true);
  await atP2.next(isMessage);
});

test('a connector that restarts supersedes its earlier life, whose late HELLO is refused', TIMEOUT, async (t) => {
  const { listener, atP, connector } = await openPair(t);
  const atD2 = createInbox();
  const second = openConnector(optionsFor('d0', D2, atD2));
  t.after(() => second.close());
  second.connect(listener.address, false);
  const lost = await atP.next(isLost);
  assert.ok(lost.type === 'lost' && lost.peer.epoch === D1 && lost.why === 'superseded', inspect(lost));
  const up = await atP.next(isUp);
  assert.ok(up.type === 'up' && up.peer.epoch === D2, inspect(up));
  // The earlier life hears REFUSE to its next PING, begins anew, and is refused by name.
  const refused = await atP.next((event) => event.type === 'refused');
  assert.ok(refused.type === 'refused' && refused.field === 'epoch', inspect(refused));
  assert.equal(connector.send(P1, 'control', open), false);
});

test('a difference of model is refused with the field and both values', TIMEOUT, async (t) => {
  const atP = createInbox();
  const atD = createInbox();
  const listener = await openListener(optionsFor('p0', P1, atP), {
    address: 'tcp://127.0.0.1:0',
    dataAddress: 'tcp://127.0.0.1:0',
  });
  const fields = { model: 'other', page_tokens: '128' };
  const connector = openConnector(optionsFor('d0', D1, atD, { fields }));
  t.after(async () => {
    await connector.close();
    await listener.close();
  });
  connector.connect(listener.address, true);
  const refused = await atD.next((event) => event.type === 'refused');
  assert.deepEqual(refused, {
    type: 'refused',
    address: listener.address,
    field: 'model',
    ours: 'other',
    theirs: 'ghost',
  });
  assert.deepEqual(atP.events.filter(isUp), []);
});

test('a peer that says nothing for a lease is lost, and starts anew with the same epoch', TIMEOUT, async (t) => {
  // The connector's heartbeat is longer than the listener's lease: to the listener it falls silent.
  const atP = createInbox();
  const atD = createInbox();
  const listener = await openListener(optionsFor('p0', P1, atP, { heartbeatMs: 60_000, leaseMs: 120 }), {
    address: 'tcp://127.0.0.1:0',
    dataAddress: 'tcp://127.0.0.1:0',
  });
  const connector = openConnector(optionsFor('d0', D1, atD, { heartbeatMs: 400, leaseMs: 60_000 }));
  t.after(async () => {
    await connector.close();
    await listener.close();
  });
  connector.connect(listener.address, false);
  await atP.next(isUp);
  const lost = await atP.next(isLost);
  assert.ok(lost.type === 'lost' && lost.why === 'lease' && lost.peer.epoch === D1, inspect(lost));
  // The connector's next PING is refused, so it gives the link up too and both begin again.
  const given = await atD.next(isLost);
  assert.ok(given.type === 'lost' && given.why === 'refused', inspect(given));
  await atD.next(isUp);
  const again = await atP.next(isUp);
  assert.ok(again.type === 'up' && again.peer.epoch === D1, inspect(again));
});

test('a data HELLO that is lost is repeated, however often the listener pings meanwhile', TIMEOUT, async (t) => {
  const atD = createInbox();
  const control = new Router({ linger: 0 });
  const data = new Router({ linger: 0 });
  await control.bind('tcp://127.0.0.1:0');
  await data.bind('tcp://127.0.0.1:0');
  const connector = openConnector(optionsFor('d0', D1, atD));
  let pings: NodeJS.Timeout | undefined;
  t.after(async () => {
    clearInterval(pings);
    await connector.close();
    control.close();
    data.close();
  });
  connector.connect(control.lastEndpoint as string, false);
  const welcome = encodeMessage({
    type: 'WELCOME',
    version: PROTOCOL_VERSION,
    role: 'prefill',
    name: 'p0',
    epoch: P1,
    link: 1,
    dataAddress: `tcp://*:${(data.lastEndpoint as string).split(':').at(-1)}`,
    fields: {},
  });
  const next = async (router: Router, type: Message['type']): Promise<Buffer> => {
    for (;;) {
      const [id, ...frames] = (await router.receive()) as [Buffer, ...Buffer[]];
      if (typesOf(frames).includes(type)) return id;
    }
  };
  const id = await next(control, 'HELLO');
  await control.send([id, welcome]);
  await next(data, 'HELLO'); // lost: nobody answers it
  const outbox = createWriter(control, 'control', { maxQueuedMessages: 100, maxQueuedBytes: 1 << 20 });
  const ping = encodeMessage({ type: 'PING', from: P1, to: D1, link: 1, answer: false });
  pings = setInterval(() => void outbox.push(id.toString(), [ping]), 10);
  await next(control, 'PING'); // behind every HELLO from before the pings
  for (let pingCount = 0; ; pingCount++) {
    const [, ...frames] = (await control.receive()) as [Buffer, ...Buffer[]];
    if (typesOf(frames).includes('HELLO')) break;
    assert.ok(pingCount < 100, 'a hundred PINGs answered, 10 ms apart, and no HELLO');
  }
  outbox.push(id.toString(), [welcome]);
  const again = await next(data, 'HELLO');
  await data.send([again, welcome]);
  await atD.next(isUp);
});

test(
  'a link that the listener has lost is never taken up again: its connector must begin another',
  TIMEOUT,
  async (t) => {
    const atP = createInbox();
    const listener = await openListener(optionsFor('p0', P1, atP, { heartbeatMs: 60_000, leaseMs: 100 }), {
      address: 'tcp://127.0.0.1:0',
      dataAddress: null,
    });
    const open = (link: number): { hello: () => Promise<Message> } => {
      const dealer = new Dealer({ routingId: `r0 ${D1} ${link}`, linger: 0 });
      dealer.connect(listener.address);
      t.after(() => dealer.close());
      const identity = { role: 'router', name: 'r0', epoch: D1, link };
      const frame = encodeMessage({ type: 'HELLO', version: PROTOCOL_VERSION, ...identity, fields: {} });
      const hello = async (): Promise<Message> => {
        await dealer.send(frame);
        const [answer] = (await dealer.receive()) as [Buffer];
        const decoded = decodeMessage([answer]);
        assert.ok(decoded.ok, inspect(decoded));
        return decoded.message;
      };
      return { hello };
    };
    t.after(() => listener.close());
    const first = open(1);
    assert.equal((await first.hello()).type, 'WELCOME');
    const lost = await atP.next(isLost);
    assert.ok(lost.type === 'lost' && lost.why === 'lease', inspect(lost));
    // It was cut off for a lease, did not notice, and connects again.
    const refusal = await first.hello();
    assert.ok(refusal.type === 'REFUSE' && refusal.field === 'link' && refusal.link === 1, inspect(refusal));
    assert.equal((await open(2).hello()).type, 'WELCOME');
    await atP.next(isUp);
  },
);

test('junk frames are counted and the link lives on', TIMEOUT, async (t) => {
  const { listener, connector, atP } = await openPair(t);
  const junk = new Dealer({ routingId: 'junk', linger: 0 });
  t.after(() => junk.close());
  junk.connect(listener.address);
  await junk.send(['']);
  await junk.send(['HO']);
  await junk.send([Buffer.from([0x48, 0x4f, 1, 0, 0, 0, 0, 0, 0xc1]), 'x', 'y']);
  await junk.send([Buffer.alloc(100_000, 7)]);
  assert.equal(connector.send(P1, 'control', open), true);
  await atP.next(isMessage);
  // The last junk may still be on its way; its own socket is ordered, so a PING behind it tells.
  await junk.send([encodeMessage({ type: 'PING', from: D1, to: P1, link: 1, answer: false })]);
  const [answer] = (await junk.receive()) as [Buffer];
  assert.ok(answer.length > 8, `${answer.length} bytes`);
  assert.equal(listener.stats().rejectedMessages, 6, 'each frame of a control socket is a message');
});

test('a reader that stands still fills only its own bounded queue', TIMEOUT, async (t) => {
  const router = new Router({ mandatory: true, sendTimeout: 0, sendHighWaterMark: 2, linger: 0 });
  await router.bind('tcp://127.0.0.1:0');
  const address = router.lastEndpoint as string;
  const still = new Dealer({ routingId: 'still', receiveHighWaterMark: 1, linger: 0 });
  const lively = new Dealer({ routingId: 'lively', linger: 0 });
  const writer = createWriter(router, 'data', { maxQueuedMessages: 8, maxQueuedBytes: 16 << 20 });
  t.after(async () => {
    await writer.close(0);
    router.close();
    still.close();
    lively.close();
  });
  for (const dealer of [still, lively]) {
    dealer.connect(address);
    await dealer.send('here');
    await router.receive();
  }
  // Whatever the kernel's buffers hold, the queue is full in the end, and stays at its bound.
  const megabyte = new Uint8Array(1 << 20);
  let accepted = 0;
  while (writer.stats().dropped === 0) {
    if (writer.push('still', [megabyte])) accepted++;
    else break;
    await new Promise((resolve) => setImmediate(resolve));
    assert.ok(accepted < 1000, 'bounded');
  }
  assert.equal(writer.stats().queuedMessages, 8);
  for (let i = 0; i < 20; i++) {
    writer.push('lively', [new Uint8Array([i])]);
    const [frame] = (await lively.receive()) as [Buffer];
    assert.equal(frame[0], i);
  }
});

test('a message larger than the queue goes out when the queue is empty', TIMEOUT, async () => {
  const sent: number[] = [];
  const socket = {
    send: (frames: Uint8Array[]) => {
      sent.push(frames.at(-1)!.length);
      return Promise.resolve();
    },
  };
  const writer = createWriter(socket, 'control', { maxQueuedMessages: 4, maxQueuedBytes: 10 });
  assert.equal(writer.push('a', [new Uint8Array(100)]), true);
  assert.equal(writer.push('a', [new Uint8Array(1)]), false);
  await writer.close(1000);
  assert.deepEqual(sent, [100]);
});

test('what waits for a control socket travels together within bounds, and each message on a data socket alone', async () => {
  for (const [kind, expected] of [
    ['control', [128, 24, 1]], // 128 messages; 64 KiB at most; the rest
    ['data', Array<number>(153).fill(1)],
  ] as const) {
    const sent: number[] = [];
    const frames: Uint8Array[] = [];
    const socket = {
      send: ([id, ...rest]: Uint8Array[]) => {
        assert.equal(Buffer.from(id!).toString(), 'a');
        sent.push(rest.length);
        frames.push(...rest);
        return Promise.resolve();
      },
    };
    const writer = createWriter(socket, kind, { maxQueuedMessages: 1000, maxQueuedBytes: 1 << 20 });
    const messages = Array.from({ length: 151 }, (_, index) => new Uint8Array([index]));
    messages.push(new Uint8Array(60_000), new Uint8Array(60_000));
    for (const message of messages)
      assert.equal(writer.push('a', [message]), true, `message of ${message.length} bytes`);
    await writer.close(1000);
    assert.deepEqual(sent, expected);
    assert.deepEqual(frames, messages, 'in their order');
    assert.deepEqual(writer.stats(), { queuedMessages: 0, queuedBytes: 0, sent: messages.length, dropped: 0 });
  }
});

test('close reports every peer as lost once and frees the addresses', TIMEOUT, async (t) => {
  const { listener, connector, atP, atD } = await openPair(t);
  await connector.close();
  assert.equal(atD.events.filter(isLost).length, 1);
  await listener.close();
  await listener.close();
  assert.equal(atP.events.filter(isLost).length, 1);
  assert.equal(connector.send(P1, 'control', open), false);
  for (const address of [listener.address, listener.dataAddress]) {
    const again = new Router({ linger: 0 });
    await again.bind(address);
    again.close();
  }
});

test('an address that is taken is named in the error', TIMEOUT, async (t) => {
  const { listener } = await openPair(t);
  await assert.rejects(
    openListener(optionsFor('p1', P1, createInbox()), { address: listener.address, dataAddress: null }),
    new RegExp(`cannot listen on ${listener.address}`),
  );
});
