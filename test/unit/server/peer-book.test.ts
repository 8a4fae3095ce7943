import assert from 'node:assert/strict';
import { test } from 'node:test';
import { createPeerBook } from '../../../server/operators/peer-book.ts';
import type { LinkView, Peer } from '../../../transfer/channel.ts';

const peer = (epoch: string): Peer => ({ role: 'decode', name: 'decode@b:8200', epoch, fields: {} });
const up = (epoch: string) => ({ type: 'up', peer: peer(epoch), address: '' }) as const;
const lost = (epoch: string) => ({ type: 'lost', peer: peer(epoch), address: '', why: 'lease' }) as const;

test('a linked peer is as silent as its link says', () => {
  let links: LinkView[] = [];
  const book = createPeerBook(() => links);
  book.onEvent(up('1'), 1000);
  links = [{ peer: peer('1'), silenceMs: 3500 }];
  assert.deepEqual(book.peers(5000), [
    { name: 'decode@b:8200', role: 'decode', epoch: '1', isUp: true, silenceSeconds: 3.5, epochChanges: 0 },
  ]);
});

test('a lost peer keeps its name, and its silence goes on from when it was last heard', () => {
  let links: LinkView[] = [{ peer: peer('1'), silenceMs: 9000 }];
  const book = createPeerBook(() => links);
  book.onEvent(up('1'), 0);
  book.look(20_000);
  links = [];
  book.onEvent(lost('1'), 20_050);
  const [view] = book.peers(31_000);
  assert.equal(view?.isUp, false);
  assert.equal(view?.silenceSeconds, 20, 'last heard at 11 s');
});

test('another life under the same name is counted, a reconnect of the same one is not', () => {
  const book = createPeerBook(() => []);
  book.onEvent(up('1'), 0);
  book.onEvent(lost('1'), 10);
  book.onEvent(up('1'), 20);
  assert.equal(book.peers(20)[0]?.epochChanges, 0);
  book.onEvent(up('2'), 30);
  book.onEvent(lost('1'), 40);
  const [view] = book.peers(40);
  assert.deepEqual([view?.epoch, view?.isUp, view?.epochChanges], ['2', true, 1], 'the loss of the old life is stale');
});

test('a peer that has been gone for ten minutes is forgotten', () => {
  const book = createPeerBook(() => []);
  book.onEvent(up('1'), 0);
  book.onEvent(lost('1'), 0);
  assert.equal(book.peers(600_000).length, 1);
  assert.equal(book.peers(600_001).length, 0);
});
