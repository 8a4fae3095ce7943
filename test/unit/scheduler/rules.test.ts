/** Rules of requests in batches, choices in messages, and rooms whose rules leave no token. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { nextDecodeBatch, type DecodeState } from '../../../scheduler/decode.ts';
import type { SampledToken, WorkerEffect } from '../../../scheduler/types.ts';
import {
  packChoices,
  type PeerMessage,
  type SamplingRules,
  type SubmitMessage,
  type TokenChoice,
} from '../../../transfer/messages.ts';
import { chunk, create, endOf, fromPeer, makeReady, run, step, waiting } from '../../support/decode-half.ts';
import { D, keyOf, P, promptOf, ROUTER, SAMPLING, submitOf } from '../../support/halves.ts';

const RULES: SamplingRules = {
  presencePenalty: 0,
  frequencyPenalty: 0,
  repetitionPenalty: 1,
  biasIds: [],
  biases: [],
  minTokens: 0,
};
const CHOICE: TokenChoice = { logprob: -0.5, topIds: [7], topLogprobs: [-0.5] };

function ruled(rules: Partial<SamplingRules>): Partial<SubmitMessage> {
  return { sampling: { ...SAMPLING, rules: { ...RULES, ...rules } }, stopTokens: [9], maxTokens: 8 };
}

function stepDone(state: DecodeState, tokens: Omit<SampledToken, 'key'>[]): string[] {
  const key = keyOf(0);
  return step(state, { type: 'step_done', tokens: tokens.map((each) => ({ key, ...each })), nowMs: 2 });
}

test('a row has the rules of its position: ends are banned for so many tokens, penalties count all before', () => {
  const state = create();
  const penalised = { presencePenalty: 0.5, frequencyPenalty: -1, repetitionPenalty: 1.5 };
  makeReady(state, 0, 3, ruled({ ...penalised, biasIds: [4], biases: [-7], minTokens: 2 }));
  const penalties = { presence: 0.5, frequency: -1, repetition: 1.5, prompt: promptOf(3) };
  const bias = { biasIds: [4], biases: [-7] };
  assert.deepEqual(nextDecodeBatch(state)?.rows[0]?.rules, {
    ...bias,
    banned: [9],
    penalties: { ...penalties, generated: [50] },
  });
  stepDone(state, [{ token: 60 }]);
  assert.deepEqual(nextDecodeBatch(state)?.rows[0]?.rules, {
    ...bias,
    banned: [],
    penalties: { ...penalties, generated: [50, 60] },
  });
});

test('a row without rules, and one whose rules are over, has none', () => {
  for (const changes of [{}, ruled({}), ruled({ minTokens: 1 })]) {
    const state = create();
    makeReady(state, 0, 3, changes);
    assert.equal(nextDecodeBatch(state)?.rows[0]?.rules, null);
  }
});

test('a row is drafted if the rules of both tokens are known and the same', () => {
  const isDrafted = (rules: Partial<SamplingRules>): boolean | undefined => {
    const state = create({ drafts: true });
    makeReady(state, 0, 3, ruled(rules));
    return nextDecodeBatch(state)?.rows[0]?.drafted;
  };
  assert.equal(isDrafted({ biasIds: [4], biases: [-7] }), true);
  assert.equal(isDrafted({ presencePenalty: 0.1 }), false);
  assert.equal(isDrafted({ frequencyPenalty: 0.1 }), false);
  assert.equal(isDrafted({ repetitionPenalty: 1.1 }), false);
  // The first token is there: the step samples the second one, and the third behind a draft.
  assert.equal(isDrafted({ minTokens: 1 }), true);
  assert.equal(isDrafted({ minTokens: 2 }), false);
  assert.equal(isDrafted({ minTokens: 3 }), true);
  // What an answer that is held to something may go on with depends on its last token.
  const held = create({ drafts: true });
  makeReady(held, 0, 3, { sampling: { ...SAMPLING, constraint: '{}' } });
  assert.equal(nextDecodeBatch(held)?.rows[0]?.drafted, false);
});

test('choices go to the router with their tokens, those of tokens that are cut off do not', () => {
  const state = create({ drafts: true });
  makeReady(state, 0, 3, { maxTokens: 3 });
  nextDecodeBatch(state);
  const other = { ...CHOICE, logprob: -2 };
  const key = keyOf(0);
  const tokens = [60, 61, 62].map((token, index) => ({ key, token, choice: index === 0 ? CHOICE : other }));
  const effects = run(state, { type: 'step_done', tokens, nowMs: 2 });
  const messages = effects.flatMap((effect) => (effect.type === 'report' ? [effect.message] : []));
  const [first] = messages.flatMap((message) => (message.type === 'tokens' ? message.rows : []));
  assert.deepEqual(first, { key, position: 1, tokens: [60, 61], choices: [CHOICE, other] });
});

test('rules that leave no token end the room behind the tokens that there are', () => {
  const state = create({ drafts: true });
  makeReady(state, 0, 3);
  nextDecodeBatch(state);
  assert.deepEqual(stepDone(state, [{ token: 60 }, { token: null }]), ['token1:60', 'end:unsatisfiable']);
  const other = create();
  makeReady(other, 0, 3);
  nextDecodeBatch(other);
  assert.deepEqual(stepDone(other, [{ token: null }]), ['end:unsatisfiable']);
});

test('an answer that has ended is not undone by what comes behind its end', () => {
  const state = create({ drafts: true });
  makeReady(state, 0, 3, ruled({}));
  nextDecodeBatch(state);
  assert.deepEqual(stepDone(state, [{ token: 9 }, { token: null }]), ['token1:9', 'end:stop']);
});

test('what is known of a prompt goes to the router once, beside the first token', () => {
  const state = create();
  const promptChoices = packChoices([CHOICE, CHOICE], 1);
  const submit = submitOf(0, 3, { sampling: { ...SAMPLING, logprobs: 1, promptLogprobs: true } });
  step(state, { type: 'router_message', router: ROUTER, message: submit, nowMs: 1 });
  fromPeer(state, 0, waiting);
  for (const unit of [0, 1]) {
    chunk(state, 0, unit, unit + 1);
    step(state, { type: 'written', key: keyOf(0), unit, nowMs: 1 });
  }
  const end = { ...endOf(1, submit, 50), firstChoice: CHOICE, promptChoices };
  const message = { from: P.epoch, to: D.epoch, key: keyOf(0), ...end } as PeerMessage;
  const rowsOf = (effects: readonly WorkerEffect[]) =>
    effects.flatMap((effect) =>
      effect.type === 'report' && effect.message.type === 'tokens' ? effect.message.rows : [],
    );
  const first = run(state, { type: 'peer_message', peer: P, message, payload: new Uint8Array(0), nowMs: 1 });
  assert.deepEqual(rowsOf(first), [{ key: keyOf(0), position: 0, tokens: [50], choices: [CHOICE], promptChoices }]);
  nextDecodeBatch(state);
  const next = run(state, { type: 'step_done', tokens: [{ key: keyOf(0), token: 51, choice: CHOICE }], nowMs: 2 });
  assert.deepEqual(rowsOf(next), [{ key: keyOf(0), position: 1, tokens: [51], choices: [CHOICE] }]);
});
