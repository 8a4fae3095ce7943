import assert from 'node:assert/strict';
import { test } from 'node:test';
import { createDecode, stepDecode } from '../../../scheduler/decode.ts';
import { createPrefill, nextPrefillBatch, stepPrefill } from '../../../scheduler/prefill.ts';
import { creditByPeer, viewDecode, viewPrefill, viewUnacked } from '../../../scheduler/views.ts';
import { D, DECODE_LIMITS, keyOf, P, PREFILL_LIMITS, ROUTER, submitOf } from '../../support/halves.ts';

const NOTHING = new Uint8Array();

test('a decode room shows its queue, its peer, and what it owns under which name', () => {
  const state = createDecode(DECODE_LIMITS, D);
  const key = keyOf(0);
  stepDecode(state, { type: 'router_up', router: ROUTER, nowMs: 0 });
  stepDecode(state, { type: 'peer_up', peer: P, nowMs: 0 });
  stepDecode(state, { type: 'router_message', router: ROUTER, message: submitOf(0, 200), nowMs: 0 });
  const [queued] = viewDecode(state);
  assert.deepEqual([queued?.queue, queued?.state, queued?.peer], ['prealloc', 'queued', P]);
  assert.deepEqual(queued?.owns, { owner: null, pages: [], slot: null, creditBytes: 0 });

  const message = { type: 'QUEUED', from: P.epoch, to: D.epoch, key, state: 'waiting' } as const;
  stepDecode(state, { type: 'peer_message', peer: P, message, payload: NOTHING, nowMs: 1 });
  const views = viewDecode(state);
  assert.deepEqual([views[0]?.queue, views[0]?.state], ['transfer', 'bootstrapping']);
  assert.deepEqual([views[0]?.owns.owner, views[0]?.owns.slot], [`session ${key}`, 0]);
  assert.ok(views[0]!.owns.pages.length >= 2, 'two pages of the prompt at least');
  assert.equal(views[0]?.progress.units, 3, 'two pages and the slot');
  assert.equal(creditByPeer(views).get(P.epoch), views[0]?.owns.creditBytes);
  assert.ok(views[0]!.owns.creditBytes > 0, `${views[0]!.owns.creditBytes} bytes of credit`);
});

test('a stopped room leaves its unacknowledged messages in sight', () => {
  const state = createDecode(DECODE_LIMITS, D);
  stepDecode(state, { type: 'router_up', router: ROUTER, nowMs: 0 });
  stepDecode(state, { type: 'peer_up', peer: P, nowMs: 0 });
  stepDecode(state, { type: 'router_message', router: ROUTER, message: submitOf(0, 200), nowMs: 0 });
  const cancel = { type: 'cancel', key: keyOf(0), reason: 'client_lost' } as const;
  stepDecode(state, { type: 'router_message', router: ROUTER, message: cancel, nowMs: 7 });
  assert.deepEqual(viewDecode(state), []);
  assert.deepEqual(viewUnacked(state.desk), [
    { key: keyOf(0), to: 'peer', message: 'ABORT', name: P.name, sinceMs: 7 },
    { key: keyOf(0), to: 'router', message: 'end', name: ROUTER, sinceMs: null },
  ]);
});

test('a prefill room that computes is busy, and unwinds for as long as it is', () => {
  const state = createPrefill(PREFILL_LIMITS, P);
  const key = keyOf(0);
  const envelope = { from: D.epoch, to: P.epoch, key } as const;
  const submit = submitOf(0, 100);
  stepPrefill(state, { type: 'router_up', router: ROUTER, nowMs: 0 });
  stepPrefill(state, { type: 'peer_up', peer: D, nowMs: 0 });
  stepPrefill(state, { type: 'router_message', router: ROUTER, message: submit, nowMs: 0 });
  assert.deepEqual(
    viewPrefill(state).map(({ queue, state: phase }) => [queue, phase]),
    [['prealloc', 'bootstrapping']],
  );
  const open = { type: 'OPEN', ...envelope, digest: submit.digest, tokenCount: 100 } as const;
  stepPrefill(state, { type: 'peer_message', peer: D, message: open, nowMs: 1 });
  const manifest = {
    tokenCount: 100,
    validInLastPage: 100,
    pageCount: 1,
    pageBytes: 8,
    slotBytes: 12,
    generations: [1, 1],
  };
  const reserved = { type: 'RESERVED', ...envelope, manifest, credit: 20 } as const;
  stepPrefill(state, { type: 'peer_message', peer: D, message: reserved, nowMs: 2 });
  assert.notEqual(nextPrefillBatch(state), null);
  const [computing] = viewPrefill(state);
  assert.deepEqual([computing?.queue, computing?.state, computing?.isBusy], ['running', 'transferring', true]);
  assert.equal(computing?.owns.creditBytes, 20);

  const cancel = { type: 'cancel', key, reason: 'client_lost' } as const;
  stepPrefill(state, { type: 'router_message', router: ROUTER, message: cancel, nowMs: 3 });
  const [unwinding] = viewPrefill(state);
  assert.deepEqual([unwinding?.queue, unwinding?.isBusy, unwinding?.stopReason], ['unwinding', true, 'client_lost']);
  assert.deepEqual(unwinding?.owns.pages, [0], 'the step may still write the page');
});
