/** Two releases on one wire: who does not fit is told which version each side speaks, and nothing is left waiting. */
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { inspect } from 'node:util';
import { Dealer } from 'zeromq';
import { openListener, type ChannelEvent } from '../../../transfer/channel.ts';
import { decodeMessage, encodeMessage, makeEpoch, PROTOCOL_VERSION } from '../../../transfer/messages.ts';

const EPOCH = makeEpoch(1000, 1);

test('a HELLO of another protocol version is refused with both versions', { timeout: 20_000 }, async (t) => {
  const events: ChannelEvent[] = [];
  const listener = await openListener(
    {
      role: 'prefill',
      name: 'p0',
      epoch: EPOCH,
      fields: {},
      heartbeatMs: 1000,
      leaseMs: 10_000,
      dataSilenceMs: 10_000,
      maxQueuedMessages: 100,
      maxQueuedBytes: 1 << 20,
      maxPayloadBytes: 1 << 20,
      lingerMs: 0,
      onEvent: (event) => events.push(event),
    },
    { address: 'tcp://127.0.0.1:0', dataAddress: null },
  );
  t.after(() => listener.close());
  const name = 'd0';
  const dealer = new Dealer({ routingId: `${name} ${EPOCH} 1`, linger: 0 });
  t.after(() => dealer.close());
  dealer.connect(listener.address);
  const hello = {
    type: 'HELLO',
    version: PROTOCOL_VERSION + 1,
    role: 'decode',
    name,
    epoch: EPOCH,
    link: 1,
    fields: {},
  } as const;
  await dealer.send([encodeMessage(hello)]);
  const decoded = decodeMessage(await dealer.receive());
  assert.ok(decoded.ok, inspect(decoded));
  assert.deepEqual(decoded.message, {
    type: 'REFUSE',
    epoch: EPOCH,
    link: 1,
    field: 'version',
    ours: '4',
    theirs: '5',
  });
  assert.deepEqual(events, [{ type: 'refused', address: '', field: 'version', ours: '4', theirs: '5' }]);
});

test('a frame of another version is not read at all', () => {
  const frame = encodeMessage({ type: 'drain' });
  frame[2] = 2;
  assert.deepEqual(decodeMessage([frame]), { ok: false, rejection: 'version' });
});
