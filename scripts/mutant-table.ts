/**
 * Bugs that are put into the pure cores on purpose, one at a time, each with the tests that must notice it. They test the
 * tests: `npm run mutants` (scripts/mutants.ts) applies and judges them, docs/testing.md says how to add one.
 *
 * A rule that two nets hold is broken in both; otherwise the mutant would be equivalent to the source, for all that
 * anybody can see from outside. `why` then names the other net.
 */

/** One exact piece of a source file and what stands there instead. It occurs once. */
export interface Edit {
  /** From the root of the repository. */
  readonly file: string;
  readonly find: string;
  readonly put: string;
}

/** What must fail under a mutant. */
export type Killer =
  /** A test of a file under test/unit/, by its whole name. */
  | { readonly kind: 'unit'; readonly file: string; readonly test: string }
  /** One of the simulator's seeds 1 to `seeds`, with a message like `finds`. */
  | { readonly kind: 'sim'; readonly seeds: number; readonly finds: RegExp }
  /** A set of the exhaustive checker, by its name or a part of it, with a violation like `finds`. */
  | { readonly kind: 'check'; readonly set: string; readonly finds: RegExp };

/** One bug. */
export interface Mutant {
  readonly name: string;
  /** The starred failure of docs/testing.md that it would bring back; null if it is none of them. */
  readonly failure: string | null;
  /** What goes wrong, as whom it hurts. */
  readonly why: string;
  readonly edits: readonly Edit[];
  /** Each of them alone must notice. */
  readonly killers: readonly Killer[];
}

/** Seeds that must be simulated for a bug that takes a rare meeting of faults, and for one that takes several. */
const RARE = 200;
const VERY_RARE = 1000;

const RECEIVER = 'transfer/receiver.ts';
const SENDER = 'transfer/sender.ts';
const ROOM = 'transfer/room.ts';
const CLOSING = 'transfer/closing.ts';
const LEDGER = 'transfer/ledger.ts';
const DECODE = 'scheduler/decode.ts';
const PREFILL = 'scheduler/prefill.ts';
const DESK = 'scheduler/desk.ts';
const PAGES = 'scheduler/pages.ts';
const PREFIX = 'scheduler/prefix-cache.ts';
const RULES = 'scheduler/rules.ts';

/** The test of a state machine that steps every event in every phase. */
const WHOLE_TABLE = 'every phase times every event does what the table says';

const unit = (file: string, test: string): Killer => ({ kind: 'unit', file, test });
const check = (set: string, finds: RegExp): Killer => ({ kind: 'check', set, finds });
const sim = (finds: RegExp, seeds = 100): Killer => ({ kind: 'sim', seeds, finds });

export const MUTANTS: readonly Mutant[] = [
  // ---- Pages and the work that refers to them

  {
    name: 'decode-frees-on-time-out',
    failure: 'T-01',
    why: 'A time-out is not proof that nothing is under way: a write would end in pages of somebody else.',
    edits: [
      {
        file: RECEIVER,
        find: `    return stop(receiver, 'deadline', true);`,
        put: `    receiver.units = receiver.units.map((unit) => (unit === 'writing' ? 'missing' : unit));
    return stop(receiver, 'deadline', true);`,
      },
    ],
    killers: [unit('transfer/receiver', WHOLE_TABLE), check('one room: expiry', /^I10/)],
  },
  {
    name: 'decode-frees-under-write',
    failure: 'T-01',
    why: 'Pages of a stopped room are lent again while one of its units is still being written.',
    edits: [{ file: RECEIVER, find: `  if (receiver.units.includes('writing')) return [];\n`, put: '' }],
    killers: [
      unit('scheduler/decode', 'a cancel in mid-write keeps the pages until the write is done (api-bugs 83)'),
      unit('transfer/receiver', WHOLE_TABLE),
      check('one room: cancel', /^I10/),
      sim(/^I3/, VERY_RARE),
    ],
  },
  {
    name: 'decode-frees-under-step',
    failure: 'T-01',
    why: 'Pages of a cancelled sequence are lent again while the step that writes them is running.',
    edits: [
      {
        file: DECODE,
        find: `  if (!sequence.stepping && sequence.moving === null) {`,
        put: `  if (sequence.moving === null) {`,
      },
    ],
    killers: [
      unit('scheduler/decode', 'a cancel in mid-step keeps the pages until the step returns, and sends no token'),
      sim(/./),
    ],
  },
  {
    name: 'decode-frees-under-copy',
    failure: 'T-01',
    why: 'Pages of a cancelled sequence are lent again while they are copied to host memory or back.',
    edits: [
      {
        file: DECODE,
        find: `  if (!sequence.stepping && sequence.moving === null) {`,
        put: `  if (!sequence.stepping) {`,
      },
    ],
    killers: [check('retracting: cancel', /^I10/)],
  },
  {
    name: 'prefill-frees-under-read',
    failure: 'T-01',
    why: 'The next room overwrites pages of a stopped one that are still being read.',
    edits: [
      {
        file: SENDER,
        find: `  if (sender.reads.length > 0 || sender.stepping) return [];`,
        put: `  if (sender.stepping) return [];`,
      },
    ],
    killers: [
      unit(
        'scheduler/prefill',
        'a cancel in mid-read keeps the pages until the read returns, whose bytes are not sent',
      ),
      sim(/./),
    ],
  },
  {
    name: 'prefill-frees-under-step',
    failure: 'T-01',
    why: 'Pages of a stopped room are lent again while the step that writes them is running.',
    edits: [
      {
        file: SENDER,
        find: `  if (sender.reads.length > 0 || sender.stepping) return [];`,
        put: `  if (sender.reads.length > 0) return [];`,
      },
    ],
    killers: [unit('scheduler/prefill', 'a cancel in mid-step keeps the pages until the step returns'), sim(/./)],
  },
  {
    name: 'slot-stays-behind',
    failure: 'X-01',
    why: 'Each room that ends leaves its state slot behind, until there is none.',
    edits: [{ file: PAGES, find: `  giveBack(pools.slots, [lease.slot], lease.owner);\n`, put: '' }],
    killers: [unit('scheduler/prefill', 'a cancel in mid-step keeps the pages until the step returns'), sim(/^I1/)],
  },
  {
    name: 'double-release',
    failure: null,
    why: 'Who is not the owner of a page may free it: two rooms then share it.',
    edits: [
      {
        file: LEDGER,
        find: `  if (actual === owner && !isRead) return true;`,
        put: `  if (actual !== null) return true;`,
      },
    ],
    killers: [unit('transfer/ledger', 'in production a violation is recorded once and its handle never lent again')],
  },
  // ---- The prefix cache

  {
    name: 'cache-keeps-what-failed',
    failure: null,
    why: 'Pages of a room that failed before anybody had them whole are read by later rooms.',
    edits: [
      {
        file: PREFILL,
        find: `        if (room.lease !== null) disownPrefix(state.cache, state.pools, room.lease);\n`,
        put: '',
      },
    ],
    killers: [
      unit(
        'scheduler/prefix-cache',
        'a room that fails takes what it computed out of the cache, unless it was verified before',
      ),
      sim(/^I1/),
    ],
  },
  {
    name: 'hash-decides',
    failure: null,
    why: 'A prompt whose hash is that of another one by chance is answered with the cache of the other.',
    edits: [
      {
        file: PREFIX,
        find: `isNext && entry.tokens.every((token, offset) => token === tokens[start + offset])`,
        put: `isNext && start < tokens.length`,
      },
    ],
    killers: [unit('scheduler/prefix-cache', 'equal hashes are no match: the tokens decide')],
  },
  {
    name: 'salt-is-only-hashed',
    failure: null,
    why: 'A client whose salt has the hash of another one by chance reads the cache of the other.',
    edits: [
      {
        file: PREFIX,
        find: `entry.parent === parent && entry.salt === salt`,
        put: `entry.parent === parent`,
      },
    ],
    killers: [
      unit('scheduler/prefix-cache', 'equal hashes are no match: the salt decides, at the beginning and behind it'),
    ],
  },
  {
    name: 'salt-is-forgotten',
    failure: null,
    why: 'Clients that are kept apart read what the others have computed.',
    edits: [
      {
        file: PREFIX,
        find: `let hash = salt === null ? 0 : crc32c(new TextEncoder().encode(salt));`,
        put: `let hash = 0;`,
      },
      {
        file: PREFIX,
        find: `entry.parent === parent && entry.salt === salt`,
        put: `entry.parent === parent`,
      },
    ],
    killers: [sim(/^I[14]/)],
  },
  {
    name: 'tier-forgets-salt',
    failure: null,
    why: 'What is kept outside the adapter is given to clients of every salt.',
    edits: [
      {
        file: PREFILL,
        find: `promptTokens, salt, pages, states });`,
        put: `promptTokens, salt: null, pages, states });`,
      },
      { file: PREFILL, find: `key, tokens, salt, from: shared`, put: `key, tokens, salt: null, from: shared` },
    ],
    killers: [sim(/^I4/, VERY_RARE)],
  },
  {
    name: 'first-reader-frees',
    failure: null,
    why: 'A page that has left the cache is lent again when the first of those who read it ends.',
    edits: [
      {
        file: PREFIX,
        find: `    if (!isIdle(pools.pages, page)) continue;\n    if (cache.orphanPages`,
        put: `    if (cache.orphanPages`,
      },
    ],
    killers: [sim(/./)],
  },
  {
    name: 'goes-on-from-an-earlier-state',
    failure: null,
    why: 'A room starts behind all the pages it found, with the state of an earlier one in its slot.',
    edits: [
      {
        file: PREFIX,
        find: `  const state = cache.pages.get(path.at(-1) as PageId)?.state as StateId;`,
        put: `  const states = path.map((page) => cache.pages.get(page)?.state ?? null).filter((held) => held !== null);
  const state = states[0] as StateId;`,
      },
    ],
    killers: [sim(/^I4/)],
  },
  {
    name: 'copy-in-wrong-order',
    failure: null,
    why: 'A retracted sequence comes back with its pages in another order, which no checksum covers.',
    edits: [
      {
        file: DECODE,
        find: `    effects.push({ type: 'restore', key, places: copiedPlaces(limits, room) });`,
        put: `    const places = copiedPlaces(limits, room);
    effects.push({ type: 'restore', key, places: [...places.slice(0, -1).reverse(), ...places.slice(-1)] });`,
      },
    ],
    killers: [
      unit(
        'scheduler/retraction',
        'the units of a copy are the pages that were written, then the slot, and go back in that order',
      ),
      sim(/^I4/),
    ],
  },
  {
    name: 'draft-without-page',
    failure: null,
    why: 'A draft is run at a position that its sequence has no page for.',
    edits: [
      {
        file: DECODE,
        find: `    tokenCount < request.maxTokens && lease.pages.length`,
        put: `    tokenCount < request.maxTokens || lease.pages.length`,
      },
    ],
    killers: [
      unit('scheduler/decode', 'a row has a draft where the token behind it is wanted and its page is there'),
      check('drafts: no fault', /^I4/),
    ],
  },
  {
    name: 'draft-beside-penalties',
    failure: null,
    why: 'The token behind a draft is chosen as if the one before it had not been generated.',
    edits: [{ file: RULES, find: `return !hasPenalties(rules) && banEnds(`, put: `return banEnds(` }],
    killers: [
      unit('scheduler/rules', 'a row is drafted if the rules of both tokens are known and the same'),
      sim(/^I4/),
    ],
  },
  {
    name: 'restored-without-rules',
    failure: null,
    why: 'An answer that was retracted goes on as if its request had asked for no rules.',
    edits: [
      {
        file: DECODE,
        find: `  forgetCopy(state, key, sequence, effects);\n  sequence.phase = 'waiting';`,
        put: `  forgetCopy(state, key, sequence, effects);
  const { rules: _, ...sampling } = room.request.sampling;
  room.request.sampling = sampling;
  sequence.phase = 'waiting';`,
      },
    ],
    killers: [sim(/^I4/, VERY_RARE)],
  },
  {
    name: 'next-attempt-without-rules',
    failure: null,
    why: 'A request that is tried again is answered as if it had asked for no rules.',
    edits: [
      {
        file: ROOM,
        find: `    ...room.request,\n`,
        put: `    ...room.request,
    ...(room.attempt > 1 && { sampling: (({ rules: _, ...rest }) => rest)(room.request.sampling) }),
`,
      },
    ],
    killers: [sim(/^I4/)],
  },
  {
    name: 'first-choice-is-lost',
    failure: null,
    why: 'The log probability of the first token, which the prefill half has computed, never reaches its client.',
    edits: [{ file: DECODE, find: `choice: firstChoice ?? undefined`, put: `choice: undefined` }],
    killers: [sim(/^I4/)],
  },
  {
    name: 'prompt-log-is-overwritten',
    failure: null,
    why: 'What each chunk tells of a prompt is put at its beginning: that of a prompt of several chunks is not its own.',
    edits: [
      {
        file: PREFILL,
        find: `promptChoices.set(told, sender.computedTokens * choiceBytes);`,
        put: `promptChoices.set(told, 0);`,
      },
    ],
    killers: [sim(/^I4/)],
  },
  {
    name: 'prompt-log-keeps-a-state',
    failure: null,
    why: 'A prompt that passes by the cache takes a state for it at the end of a page, which nobody gives back.',
    edits: [{ file: PREFILL, find: `const keep = hashes.length > 0 && end`, put: `const keep = end` }],
    killers: [sim(/./)],
  },
  {
    name: 'draft-after-the-end',
    failure: null,
    why: 'A stop token that a right draft follows does not end the answer: one token too many is sent.',
    edits: [
      {
        file: DECODE,
        find: `added.slice(0, isStopped ? stopIndex + 1 : maxTokens - position)`,
        put: `added.slice(0, maxTokens - position)`,
      },
    ],
    killers: [unit('scheduler/decode', 'what a right draft brings behind the end of an answer is dropped')],
  },
  {
    name: 'oldest-is-retracted',
    failure: null,
    why: 'The oldest gives way instead of the newest: two sequences may push each other out for ever.',
    edits: [
      {
        file: DECODE,
        find: `  const key = order.findLast((other) =>`,
        put: `  const key = order.find((other) =>`,
      },
    ],
    killers: [unit('scheduler/retraction', 'the newest gives way, waits, and goes on where it was with other pages')],
  },

  // ---- What arrives: proved complete, and of this room

  {
    name: 'chunk-of-older-lease',
    failure: 'T-01',
    why: 'A unit that was promised under an older generation of its page is written. No honest peer sends one: the key of its room is closed before.',
    edits: [
      {
        file: RECEIVER,
        find: `    if (chunk.generations[unit - chunk.firstUnit] !== manifest.generations[unit]) {
      return [{ type: 'drop', kind: 'unknown' }];
    }
`,
        put: '',
      },
    ],
    killers: [unit('transfer/receiver', WHOLE_TABLE)],
  },
  {
    name: 'duplicate-is-written',
    failure: null,
    why: 'A unit that came before is written again, while a step may already read it.',
    edits: [
      {
        file: RECEIVER,
        find: `    if (receiver.units[unit] !== 'missing') {`,
        put: `    if (receiver.units[unit] === 'writing') {`,
      },
    ],
    killers: [unit('transfer/receiver', WHOLE_TABLE), sim(/./)],
  },
  {
    name: 'duplicate-is-progress',
    failure: null,
    why: 'Messages are counted instead of units: with one lost and one twice, a transfer is taken for complete. The checksum over all units, which would notice, is off.',
    edits: [
      {
        file: RECEIVER,
        find: `      effects.push({ type: 'drop', kind: 'duplicate' });
      continue;`,
        put: `      receiver.repeats = (receiver.repeats ?? 0) + 1;
      effects.push({ type: 'drop', kind: 'duplicate' });
      continue;`,
      },
      { file: RECEIVER, find: `  statusDueMs: number;\n}`, put: `  statusDueMs: number;\n  repeats?: number;\n}` },
      {
        file: RECEIVER,
        find: `  if (end === null || receiver.units.some((unit) => unit !== 'written')) return [];`,
        put: `  const missing = receiver.units.filter((unit) => unit === 'missing').length;
  if (end === null || receiver.units.includes('writing') || missing > (receiver.repeats ?? 0)) return [];`,
      },
      {
        file: RECEIVER,
        find: `  if (combineChecksums(receiver.checksums) !== end.checksum) return stop(receiver, 'mismatch', true);\n`,
        put: '',
      },
    ],
    killers: [check('one room: drop+duplicate', /^I1/)],
  },
  {
    name: 'duplicate-renews-stall',
    failure: 'T-02',
    why: 'A peer that repeats itself keeps a dead transfer alive.',
    edits: [
      {
        file: RECEIVER,
        find: `      effects.push({ type: 'drop', kind: 'duplicate' });
      continue;`,
        put: `      receiver.stallDeadlineMs = nowMs + limits.stallMs;
      effects.push({ type: 'drop', kind: 'duplicate' });
      continue;`,
      },
    ],
    killers: [unit('transfer/receiver', 'a unit that comes twice does not keep a transfer alive')],
  },
  {
    name: 'ready-without-end',
    failure: null,
    why: 'All units are there, so decode begins, with a first token that nobody sent.',
    edits: [
      {
        file: RECEIVER,
        find: `  const { end } = receiver;
  if (end === null || receiver.units`,
        put: `  const end = receiver.end ?? { checksum: combineChecksums(receiver.checksums), firstToken: 0 };
  if (receiver.units`,
      },
    ],
    killers: [
      unit('transfer/receiver', 'units in any order, then END: ready when the last write is done, not before'),
      sim(/^I4/),
    ],
  },
  {
    name: 'ready-before-written',
    failure: null,
    why: 'A first step reads pages of which the last write has not ended.',
    edits: [
      {
        file: RECEIVER,
        find: `receiver.units.some((unit) => unit !== 'written')) return [];`,
        put: `receiver.units.includes('missing')) return [];`,
      },
    ],
    killers: [
      unit('transfer/receiver', 'units in any order, then END: ready when the last write is done, not before'),
      sim(/./),
    ],
  },
  {
    name: 'checksum-not-compared',
    failure: 'G-01',
    why: 'Bytes that were damaged on the way become an answer.',
    edits: [{ file: RECEIVER, find: `    if (crc32c(part) !== checksum) {`, put: `    if (part.length === 0) {` }],
    killers: [
      unit('scheduler/decode', 'one flipped byte ends its room with that reason, and no other'),
      sim(/^I4/, RARE),
    ],
  },
  {
    name: 'digest-not-compared',
    failure: 'A-01',
    why: 'Two halves that hold different prompts under one key work together.',
    edits: [
      {
        file: SENDER,
        find: `      if (message.digest !== sender.digest || message.tokenCount !== sender.tokenCount) {`,
        put: `      if (message.tokenCount !== sender.tokenCount) {`,
      },
    ],
    killers: [unit('scheduler/prefill', 'halves that disagree about the prompt end as a mismatch')],
  },
  {
    name: 'slot-is-not-sent',
    failure: null,
    why: 'END comes after the pages, without the slot, whose state cannot be rebuilt.',
    edits: [
      {
        file: SENDER,
        find: `  if (sender.sentUnits === manifest.pageCount + 1) {`,
        put: `  if (sender.sentUnits === manifest.pageCount) {`,
      },
    ],
    killers: [unit('transfer/sender', 'END says what was sent, whatever the order of the reads'), sim(/./)],
  },
  {
    name: 'page-leaves-too-early',
    failure: null,
    why: 'A page is read when its first token is computed, not its last.',
    edits: [
      {
        file: SENDER,
        find: `  return Math.floor(sender.computedTokens / limits.pageTokens);`,
        put: `  return Math.min(manifest.pageCount, Math.ceil((sender.computedTokens + 1) / limits.pageTokens));`,
      },
    ],
    killers: [unit('transfer/sender', 'units go out in order, within the credit, full pages first'), sim(/^I4/)],
  },

  // ---- Terminal knowledge is state

  {
    name: 'abort-once',
    failure: 'X-01',
    why: 'ABORT is sent once. Lost, it leaves an entry on the other side.',
    edits: [
      {
        file: DESK,
        find: `    } else if (isDue(resend, nowMs, limits)) {`,
        put: `    } else if (message.type !== 'ABORT' && isDue(resend, nowMs, limits)) {`,
      },
    ],
    killers: [
      unit('scheduler/prefill', 'ABORT is sent again until acknowledged, and outlives the room'),
      check('one room: cancel+drop', /^L/),
      sim(/^L2/),
    ],
  },
  {
    name: 'abort-dies-with-room',
    failure: 'X-01',
    why: 'ABORT and DONE are forgotten with their room. That the router cancels the other half as well is off.',
    edits: [
      {
        file: DECODE,
        find: `  live.delete(key);
  remove(state.order, key);`,
        put: `  live.delete(key);
  const entry = desk.closing.unwinds.get(key);
  if (entry !== undefined) returnStranded(state, entry);
  desk.closing.unwinds.delete(key);
  remove(state.order, key);`,
      },
      {
        file: ROOM,
        find: `      cancel(other, key, outcome.reason, nowMs, limits, effects);`,
        put: `      void [other, key];`,
      },
    ],
    killers: [check('one room: cancel+drop', /^L/)],
  },
  {
    name: 'done-dies-with-sequence',
    failure: null,
    why: 'A lost DONE strands the prefill half until its clock runs out, though the answer was good.',
    edits: [
      {
        file: DECODE,
        find: `  live.delete(key);
  remove(state.order, key);`,
        put: `  live.delete(key);
  if (desk.closing.unwinds.get(key)?.message.type === 'DONE') desk.closing.unwinds.delete(key);
  remove(state.order, key);`,
      },
    ],
    killers: [
      unit(
        'scheduler/decode',
        'DONE is sent again after the sequence has ended, until acknowledged; END is answered by it',
      ),
      sim(/^L1/, RARE),
    ],
  },
  {
    name: 'end-once',
    failure: 'R-01',
    why: 'A worker says once that its half has ended. Lost, the router waits for ever.',
    edits: [
      {
        file: DESK,
        find: `    if (isDue(resend, nowMs, limits)) effects.push({ type: 'report', router, message });`,
        put: `    void [resend, router, message];`,
      },
    ],
    killers: [sim(/^L2/)],
  },
  {
    name: 'tombstone-on-acknowledgement',
    failure: null,
    why: 'A key is closed when the peer has acknowledged its ABORT, not when the room ends: an OPEN on its way makes it anew.',
    edits: [
      {
        file: DESK,
        find: `  bury(desk.closing, key, { ok: false, reason }, tokenCount);\n  if (!tellPeer) return;`,
        put: `  void tokenCount;\n  if (!tellPeer) return;`,
      },
      {
        file: PREFILL,
        find: `  bury(desk.closing, key, outcome, 0);\n`,
        put: `  if (outcome.ok) bury(desk.closing, key, outcome, 0);\n`,
      },
      {
        file: PREFILL,
        find: `?.message.type === 'ABORT') desk.closing.unwinds.delete(key);`,
        put: `?.message.type === 'ABORT') {
      desk.closing.unwinds.delete(key);
      buryUnseen(desk.closing, key, 'gone');
    }`,
      },
    ],
    killers: [check('one room: cancel', /^I6/), sim(/^I6/)],
  },
  {
    name: 'tombstone-without-mark',
    failure: null,
    why: 'A tombstone goes when the router has acknowledged the end, though a late OPEN may still come.',
    edits: [
      {
        file: DESK,
        find: `  if (message.type === 'end_ack') desk.closing.endings.delete(message.key);`,
        put: `  if (message.type === 'end_ack') {
    desk.closing.endings.delete(message.key);
    desk.closing.tombstones.delete(message.key);
  }`,
      },
    ],
    killers: [check('one room: duplicate', /^I6/)],
  },
  {
    name: 'mark-opens-keys',
    failure: null,
    why: 'With their tombstones, keys below the mark are forgotten to be closed.',
    edits: [
      {
        file: CLOSING,
        find: `  return parts.sequence < (closing.marks.get(parts.router) ?? 0);`,
        put: `  return false;`,
      },
    ],
    killers: [
      unit('scheduler/prefill', 'only below the router’s mark are tombstones forgotten, and keys stay closed'),
      check('one room: duplicate', /^I6/),
    ],
  },
  {
    name: 'open-under-tombstone',
    failure: null,
    why: 'An OPEN that comes twice, the second time after the room has ended, makes the room anew.',
    edits: [
      {
        file: PREFILL,
        find: `  if (tombstone !== undefined) return tombstone.outcome.ok ? 'gone' : tombstone.outcome.reason;
  if (isClosed(desk.closing, message.key)) return 'gone';`,
        put: `  void tombstone;`,
      },
    ],
    killers: [
      unit('scheduler/prefill', 'a closed key is answered and never comes back'),
      check('one room: duplicate', /^I1: .* closed, but live/),
      sim(/^I6/),
    ],
  },
  {
    name: 'submit-under-tombstone',
    failure: 'A-01',
    why: 'A submit that comes after its cancel starts a room that nobody waits for.',
    edits: [
      {
        file: DECODE,
        find: `  if (isClosed(desk.closing, message.key)) return 'gone'; // answered from its tombstone\n`,
        put: '',
      },
    ],
    killers: [sim(/./)],
  },

  // ---- Credit

  {
    name: 'credit-as-delta',
    failure: null,
    why: 'CREDIT says what is added instead of the sum: each time it is sent again it grants again.',
    edits: [
      {
        file: RECEIVER,
        find: `bytes: receiver.grantedBytes };`,
        put: `bytes: receiver.grantedBytes - receiver.grantedBeforeBytes };`,
      },
      {
        file: SENDER,
        find: `      if (message.bytes <= sender.creditBytes) return [{ type: 'drop', kind: 'duplicate' }];\n`,
        put: '',
      },
      {
        file: SENDER,
        find: `      sender.creditBytes = message.bytes;`,
        put: `      sender.creditBytes += message.bytes;`,
      },
    ],
    killers: [check('one room: status+reset', /^I8/), sim(/./)],
  },
  {
    name: 'credit-without-attempt',
    failure: null,
    why: 'A late CREDIT of one attempt raises the credit of the next.',
    edits: [
      {
        file: PREFILL,
        find: `  let room = live.get(key);
  if (room !== undefined && room.sender`,
        put: `  let room = live.get(key);
  if (message.type === 'CREDIT') {
    for (const [other, candidate] of live) if (parseKey(other)?.room === parseKey(key)?.room) room = candidate;
  }
  if (room !== undefined && room.sender`,
      },
    ],
    killers: [unit('scheduler/prefill', 'a message of an earlier attempt changes nothing')],
  },
  {
    name: 'credit-returns-early',
    failure: null,
    why: 'Credit of a stopped room is lent again before its peer has said that nothing is under way.',
    edits: [
      {
        file: DECODE,
        find: `  if (entry === undefined || entry.returned) addCreditBytes`,
        put: `  if (entry !== null) addCreditBytes`,
      },
    ],
    killers: [
      unit('scheduler/decode', 'a room’s unspent credit waits for the peer’s acknowledgement'),
      check('crowded, one credit: cancel', /^I8/),
    ],
  },
  {
    name: 'read-beyond-credit',
    failure: null,
    why: 'Prefill sends what decode has no room for.',
    edits: [{ file: SENDER, find: `    if (sender.readBytes + bytes + size > sender.creditBytes) break;\n`, put: '' }],
    killers: [unit('transfer/sender', 'units go out in order, within the credit, full pages first'), sim(/^I1/)],
  },

  // ---- Stops that reach everybody

  {
    name: 'abort-kills-running-row',
    failure: null,
    why: 'The prefill half gives up late, after all it had to give, and takes a good answer along.',
    edits: [
      {
        file: DECODE,
        find: `      else if (room.receiver === null) desk.drops.ignored++;`,
        put: `      else if (room.receiver === null) {
        stopRoom(state, key, room, { reason: 'peer_aborted', tellPeer: false }, nowMs, effects);
      }`,
      },
    ],
    killers: [
      unit('scheduler/decode', 'after ready no failure of the prefill half ends a room'),
      check('one room: expiry', /^I11/),
    ],
  },
  {
    name: 'peer-failed-kills-running-row',
    failure: null,
    why: 'The death of a prefill worker ends the answers that it had begun.',
    edits: [
      {
        file: DECODE,
        find: `        desk.drops.ignored++; // after ready the prefill half no longer matters`,
        put: `        stopRoom(state, message.key, room, { reason: 'peer_lost', tellPeer: true }, nowMs, effects);`,
      },
    ],
    killers: [
      unit('scheduler/decode', 'after ready no failure of the prefill half ends a room'),
      check('one room: restartP', /^I11/),
    ],
  },
  {
    name: 'prefill-stops-in-silence',
    failure: 'X-02',
    why: 'Decode is not told that prefill has given up. That the router tells it as well is off.',
    edits: [
      { file: DESK, find: `  if (!tellPeer) return;\n`, put: `  if (!tellPeer || socket === 'data') return;\n` },
      {
        file: ROOM,
        find: `    send(other, { type: 'peer_failed', key }, nowMs, limits, effects);`,
        put: `    void key;`,
      },
    ],
    killers: [check('one room: expiry', /^L/)],
  },
  {
    name: 'abort-misses-waiting-queue',
    failure: 'X-03',
    why: 'A room that decode gives up stays in the queue of prefill. That the router cancels it as well is off.',
    edits: [
      {
        file: SENDER,
        find: `      return stop(sender, 'peer_aborted', false);`,
        put: `      return sender.phase === 'waiting' ? [] : stop(sender, 'peer_aborted', false);`,
      },
      {
        file: ROOM,
        find: `      cancel(other, key, outcome.reason, nowMs, limits, effects);`,
        put: `      void [other, key];`,
      },
    ],
    killers: [unit('transfer/sender', WHOLE_TABLE), sim(/^L/, VERY_RARE)],
  },
  {
    name: 'stopped-room-stays-queued',
    failure: 'X-03',
    why: 'A room that was stopped while it waited for pages is still in the queue.',
    edits: [{ file: PREFILL, find: `        remove(state.waiting, key);\n`, put: '' }],
    killers: [sim(/./)],
  },
  {
    name: 'other-half-is-not-cancelled',
    failure: 'R-01',
    why: 'One half fails and the other is left alone. That the worker itself tells its peer is off.',
    edits: [
      {
        file: ROOM,
        find: `      cancel(other, key, outcome.reason, nowMs, limits, effects);`,
        put: `      void [other, key];`,
      },
      { file: DESK, find: `  if (!tellPeer) return;\n`, put: `  if (!tellPeer || socket === 'control') return;\n` },
    ],
    killers: [unit('transfer/room', WHOLE_TABLE), sim(/^L/, VERY_RARE)],
  },
  {
    name: 'retry-beside-first-attempt',
    failure: null,
    why: 'The next attempt starts when one half of the last has ended: the other may still run.',
    edits: [
      {
        file: ROOM,
        find: `  if (room.phase !== 'running' || room.prefill?.outcome == null || room.decode?.outcome == null) return;
  if (room.outcome === null) {
    const reason = failure(room.prefill.outcome, room.decode.outcome);`,
        put: `  if (room.phase !== 'running') return;
  const first = room.decode?.outcome ?? room.prefill?.outcome;
  if (first == null || (first.ok && room.prefill?.outcome == null)) return;
  if (room.outcome === null) {
    const reason = failure(room.prefill?.outcome ?? first, room.decode?.outcome ?? first);`,
      },
    ],
    killers: [unit('transfer/room', WHOLE_TABLE), check('one room: restartP', /^I11/), sim(/^I11/)],
  },

  // ---- Clocks

  {
    name: 'no-stall-clock',
    failure: 'T-02',
    why: 'A transfer whose rest never comes is judged by the room clock only, four times later.',
    edits: [
      {
        file: RECEIVER,
        find: `  if (nowMs >= receiver.roomDeadlineMs || nowMs >= (receiver.stallDeadlineMs ?? Infinity)) {`,
        put: `  if (nowMs >= receiver.roomDeadlineMs) {`,
      },
    ],
    killers: [
      unit('transfer/receiver', 'the stall clock starts with the first unit and is renewed by units and by computing'),
      unit('scheduler/decode', 'the client’s budget ends a running room, and the stall clock a transfer'),
    ],
  },
  {
    name: 'no-room-clock-on-prefill',
    failure: 'T-02',
    why: 'A room whose peer is silent but alive is held until the client gives up.',
    edits: [
      {
        file: SENDER,
        find: `  if (nowMs >= sender.roomDeadlineMs || nowMs`,
        put: `  if (nowMs`,
      },
    ],
    killers: [unit('transfer/sender', WHOLE_TABLE)],
  },
  {
    name: 'no-clocks-at-all',
    failure: 'T-02',
    why: 'One lost unit, and the request hangs for ever on both sides: nothing but a deadline ends it.',
    edits: [
      {
        file: RECEIVER,
        find: `  if (nowMs >= receiver.roomDeadlineMs || nowMs >= (receiver.stallDeadlineMs ?? Infinity)) {`,
        put: `  if (nowMs < 0) {`,
      },
      {
        file: SENDER,
        find: `  if (nowMs >= sender.roomDeadlineMs || nowMs >= (sender.stallDeadlineMs ?? Infinity)) {`,
        put: `  if (nowMs < 0) {`,
      },
      { file: DECODE, find: `    if (nowMs >= request.deadlineMs) {`, put: `    if (nowMs < 0) {` },
      { file: PREFILL, find: `    if (nowMs >= (request?.deadlineMs ?? Infinity)) {`, put: `    if (nowMs < 0) {` },
      { file: ROOM, find: `  if (nowMs >= room.deadlineMs) {`, put: `  if (nowMs < 0) {` },
    ],
    killers: [sim(/^L/)],
  },
  {
    name: 'prefill-reaper-needs-work',
    failure: 'T-03',
    why: 'Deadlines are judged only while something is computed, so a stuck system stays stuck.',
    edits: [
      {
        file: PREFILL,
        find: `  const pauseMs = ownPauseMs(state.desk, nowMs);`,
        put: `  if (state.step === null) return;
  const pauseMs = ownPauseMs(state.desk, nowMs);`,
      },
    ],
    killers: [
      unit('scheduler/prefill', 'the client’s budget ends a room that waits, though its room clock would not'),
      sim(/./),
    ],
  },
  {
    name: 'decode-reaper-needs-work',
    failure: 'T-03',
    why: 'Deadlines are judged and terminal messages sent again only while a step is running.',
    edits: [
      {
        file: DECODE,
        find: `  const pauseMs = ownPauseMs(state.desk, nowMs);`,
        put: `  if (state.step === null) return;
  const pauseMs = ownPauseMs(state.desk, nowMs);`,
      },
    ],
    killers: [
      unit('scheduler/decode', 'the client’s budget ends a running room, and the stall clock a transfer'),
      sim(/./),
    ],
  },
  {
    name: 'drained-reaper-stops',
    failure: 'T-03',
    why: 'A worker that drains judges no deadline, so it never becomes empty.',
    edits: [
      {
        file: PREFILL,
        find: `  const pauseMs = ownPauseMs(state.desk, nowMs);`,
        put: `  if (state.desk.draining) return;
  const pauseMs = ownPauseMs(state.desk, nowMs);`,
      },
    ],
    killers: [unit('scheduler/prefill', 'a drain does not stop the clocks')],
  },
  {
    name: 'peers-queue-is-counted',
    failure: 'B-02',
    why: 'Time spent in the queue of decode ends good rooms on prefill, just when load is high.',
    edits: [
      {
        file: SENDER,
        find: `      if (sender.phase === 'bootstrapping') sender.roomDeadlineMs = nowMs + limits.roomMs;\n`,
        put: '',
      },
    ],
    killers: [unit('transfer/sender', 'time in the peer’s queue is not counted against the room')],
  },
  {
    name: 'own-queue-is-counted',
    failure: 'B-02',
    why: 'Time spent in the own queue of decode ends good rooms there.',
    edits: [
      {
        file: RECEIVER,
        find: `  receiver.roomDeadlineMs = roomDeadline(nowMs, receiver.tokenCount, limits);
  const { self, peer, key } = receiver;`,
        put: `  const { self, peer, key } = receiver;`,
      },
    ],
    killers: [
      unit(
        'transfer/receiver',
        'time in a queue, here or at the peer, is not counted against the room, time after it is',
      ),
    ],
  },

  // ---- Identity

  {
    name: 'peer-by-name',
    failure: 'C-03',
    why: 'A peer is who has its name: messages of an earlier life are taken for those of the later one.',
    edits: [
      {
        file: DESK,
        find: `  if (desk.peers.get(peer.name) === peer.epoch && message.from === peer.epoch && message.to === desk.self.epoch) {`,
        put: `  if (desk.peers.has(peer.name)) {`,
      },
    ],
    killers: [unit('scheduler/prefill', 'messages of and for another life are dropped and counted')],
  },
  {
    name: 'old-life-is-kept',
    failure: 'C-03',
    why: 'Rooms with an earlier life of a peer wait for it when the later one has spoken.',
    edits: [
      {
        file: PREFILL,
        find: `    if (other.name === peer.name && other.epoch < peer.epoch) {`,
        put: `    if (other.name === peer.name && other.epoch > peer.epoch) {`,
      },
      {
        file: PREFILL,
        find: `    if (room.sender.peer.epoch === peer.epoch) {
      stopRoom`,
        put: `    if (room.sender.peer.name === '') {
      stopRoom`,
      },
    ],
    killers: [
      unit('scheduler/prefill', 'a newer life of the peer ends the rooms of the older one without an ABORT'),
      check('one room: restartD', /^L/),
    ],
  },
  {
    name: 'key-is-used-twice',
    failure: 'A-01',
    why: 'A second submit under a live key starts it over, and the first is lost with its pages.',
    edits: [
      {
        file: DECODE,
        find: `  if (existing !== undefined) {`,
        put: `  if (existing !== undefined && existing.sequence !== null) {`,
      },
    ],
    killers: [unit('scheduler/decode', 'admission counts everything that is not over, and refuses at once'), sim(/./)],
  },
  {
    name: 'dead-router-speaks',
    failure: null,
    why: 'A router whose lease is over still starts rooms, of which it will never hear the end.',
    edits: [
      {
        file: PREFILL,
        find: `  if (desk.closing.deadRouters.includes(router)) {
    desk.drops.staleEpoch++;
    return;
  }
`,
        put: '',
      },
      {
        file: CLOSING,
        find: `  if (parts === null || closing.deadRouters.includes(parts.router)) return true;`,
        put: `  if (parts === null) return true;`,
      },
    ],
    killers: [
      unit(
        'scheduler/prefill',
        'the death of the router ends its rooms, tells the peers, and closes its keys for ever',
      ),
    ],
  },

  // ---- Admission, outcomes, gauges

  {
    name: 'limit-by-queue',
    failure: 'A-02',
    why: 'The limit counts rooms that run, not those that wait or unwind.',
    edits: [
      {
        file: DECODE,
        find: `  if (live.size >= limits.maxRooms) return 'overloaded';`,
        put: `  if (state.running.length >= limits.maxRooms) return 'overloaded';`,
      },
    ],
    killers: [
      unit('scheduler/decode', 'admission counts everything that is not over, and refuses at once'),
      sim(/^I1/),
    ],
  },
  {
    name: 'limit-by-one',
    failure: 'A-02',
    why: 'One room more than the limit is admitted, by submit and by OPEN. Either half alone would keep the other within.',
    edits: [
      {
        file: PREFILL,
        find: `  if (live.size >= limits.maxRooms || !canEverFit(limits, message.tokenCount)) return 'overloaded';`,
        put: `  if (live.size > limits.maxRooms || !canEverFit(limits, message.tokenCount)) return 'overloaded';`,
      },
      {
        file: PREFILL,
        find: `  if (live.size >= limits.maxRooms || !canEverFit(limits, tokenCount)) return 'overloaded';`,
        put: `  if (live.size > limits.maxRooms || !canEverFit(limits, tokenCount)) return 'overloaded';`,
      },
      {
        file: DECODE,
        find: `  if (live.size >= limits.maxRooms) return 'overloaded';`,
        put: `  if (live.size > limits.maxRooms) return 'overloaded';`,
      },
    ],
    killers: [
      unit('scheduler/prefill', 'admission counts everything that is not over, and refuses at once'),
      unit('scheduler/decode', 'admission counts everything that is not over, and refuses at once'),
      sim(/^I1/),
    ],
  },
  {
    name: 'lost-tokens-are-an-answer',
    failure: 'G-01',
    why: 'An answer of which tokens were lost on the way ends as if it were whole.',
    edits: [
      {
        file: ROOM,
        find: `      if (half === room.decode && outcome.ok && event.tokenCount !== room.tokenCount) {`,
        put: `      if (half === room.decode && outcome.ok && event.tokenCount < room.tokenCount) {`,
      },
    ],
    killers: [unit('transfer/room', WHOLE_TABLE), sim(/^I4/, RARE)],
  },
  {
    name: 'gap-in-tokens',
    failure: 'G-01',
    why: 'Tokens after a gap are delivered as if they followed.',
    edits: [
      { file: ROOM, find: `  if (event.position > room.tokenCount) {`, put: `  if (event.position < 0) {` },
      {
        file: ROOM,
        find: `const seen = room.tokenCount - event.position;`,
        put: `const seen = Math.max(0, room.tokenCount - event.position);`,
      },
    ],
    killers: [unit('transfer/room', WHOLE_TABLE), sim(/^I4/, RARE)],
  },
  {
    name: 'failure-is-length',
    failure: 'G-01',
    why: 'A decode half that fails after its first token ends the answer with `length`.',
    edits: [
      {
        file: ROOM,
        find: `      if (room.tokenCount > 0) decide(room, outcome, effects);`,
        put: `      if (room.tokenCount > 0) decide(room, { ok: true, finish: 'length' }, effects);`,
      },
    ],
    killers: [unit('transfer/room', WHOLE_TABLE), sim(/^I4/, RARE)],
  },
  {
    name: 'second-outcome',
    failure: null,
    why: 'A client is told twice how its request ended.',
    edits: [
      {
        file: ROOM,
        find: `  if (room.outcome !== null) return;
  room.outcome = outcome;`,
        put: `  room.outcome = outcome;`,
      },
    ],
    killers: [sim(/^I5/)],
  },
  {
    name: 'unwinding-is-not-shown',
    failure: 'O-01',
    why: 'A room that cannot end is in no gauge: everything looks idle while the pool is empty.',
    edits: [
      {
        file: DECODE,
        find: `    stats.slotsHeld += room.lease === null ? 0 : 1;
    const held`,
        put: `    if (room.receiver?.phase === 'unwinding' || room.sequence?.phase === 'unwinding') continue;
    stats.slotsHeld += room.lease === null ? 0 : 1;
    const held`,
      },
    ],
    killers: [check('one room, wide window: cancel', /^I9/)],
  },
  {
    name: 'stuck-step-is-not-busy',
    failure: 'O-01',
    why: 'What an unwinding room waits for is not shown, so nobody can tell a stuck engine from a stuck peer.',
    edits: [
      {
        file: 'scheduler/views.ts',
        find: `    isBusy: sender.stepping || sender.reads.length > 0,`,
        put: `    isBusy: sender.reads.length > 0,`,
      },
    ],
    killers: [unit('scheduler/views', 'a prefill room that computes is busy, and unwinds for as long as it is')],
  },
];
