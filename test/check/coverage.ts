/**
 * The tables of the three processes, (where a room stands) x (what comes): every cell is reached by the sets, declared
 * impossible (and then never reached), or declared to take more faults at once than a set has. The cells of the last two
 * kinds are tried by force in hostile-peer.test.ts.
 */

export type Owner = 'prefill' | 'decode' | 'router';

interface Table {
  /** Where a room may stand when a message for it comes. */
  phases: readonly string[];
  messages: readonly string[];
  /** What happens to a room without a message, and where it can: where the timer runs or the work is under way. */
  happenings: Readonly<Record<string, readonly string[]>>;
}

const PREFILL_LIVE = ['bootstrapping', 'waiting', 'computing', 'sending', 'confirming', 'unwinding'];
const RECEIVING = ['opening', 'queued', 'bootstrapping', 'transferring'];
const SEQUENCES = ['waiting', 'running', 'saving', 'retracted', 'restoring'];
const DECODE_LIVE = [...RECEIVING, 'unwinding', ...SEQUENCES, 'unwinding (sequence)'];

export const TABLES: Readonly<Record<Owner, Table>> = {
  prefill: {
    phases: ['unseen', ...PREFILL_LIVE, 'closed'],
    messages: [
      ...['submit', 'cancel', 'peer_failed', 'end_ack'],
      ...['OPEN', 'QUEUED waiting', 'RESERVED', 'CREDIT', 'DONE', 'ABORT', 'ABORT_ACK'],
    ],
    happenings: {
      mark: ['bootstrapping', 'unwinding'],
      peer_up: PREFILL_LIVE,
      peer_lost: PREFILL_LIVE,
      router_up: PREFILL_LIVE,
      router_lost: PREFILL_LIVE,
      'step begins': ['computing'],
      'step done': ['computing', 'unwinding'],
      'last step done': ['computing', 'unwinding'],
      read_done: ['computing', 'sending', 'unwinding'],
      're-send': ['confirming'],
      status: ['waiting', 'computing'],
      'room deadline': ['bootstrapping', 'waiting', 'computing', 'sending', 'confirming'],
      'stall deadline': ['computing', 'sending'],
    },
  },
  decode: {
    phases: ['unseen', ...DECODE_LIVE, 'closed'],
    messages: [
      ...['submit', 'cancel', 'peer_failed', 'end_ack'],
      ...['QUEUED waiting', 'QUEUED computing', 'CHUNK', 'END', 'DONE_ACK', 'ABORT', 'ABORT_ACK'],
    ],
    happenings: {
      mark: ['unwinding', 'unwinding (sequence)'],
      peer_up: DECODE_LIVE,
      peer_lost: DECODE_LIVE,
      router_up: DECODE_LIVE,
      router_lost: DECODE_LIVE,
      written: ['transferring', 'unwinding'],
      'step begins': ['waiting', 'running'],
      step_done: ['running', 'unwinding (sequence)'],
      saved: ['saving', 'unwinding (sequence)'],
      restored: ['restoring', 'unwinding (sequence)'],
      're-send': ['opening', 'bootstrapping', 'transferring'],
      status: ['queued'],
      'room deadline': RECEIVING,
      'stall deadline': ['transferring'],
      'request deadline': [...RECEIVING, ...SEQUENCES],
    },
  },
  router: {
    // `choosing` is answered in the same step, so no message finds a room there.
    phases: ['running', 'streaming', 'unwinding', 'closed'],
    messages: ['accepted of prefill', 'accepted of decode', 'tokens of decode', 'end of prefill', 'end of decode'],
    happenings: {
      pair: ['choosing'],
      no_pair: ['choosing'],
      worker_up: ['running', 'streaming', 'unwinding'],
      worker_lost: ['running', 'streaming', 'unwinding'],
      client_lost: ['running', 'streaming'],
      client_cancel: ['running', 'streaming'],
      're-send': ['running', 'streaming', 'unwinding'],
      'request deadline': ['running', 'streaming'],
    },
  },
};

/** Cells of one table and why they are special. */
export interface Declaration {
  owner: Owner;
  phases: readonly string[];
  messages: readonly string[];
  why: string;
}

const without = (all: readonly string[], ...some: string[]): string[] => all.filter((each) => !some.includes(each));

/** Reached only if the peer, the router or our own code lies. */
export const IMPOSSIBLE: readonly Declaration[] = [
  {
    owner: 'prefill',
    phases: TABLES.prefill.phases,
    messages: ['peer_failed'],
    why: 'the router tells it to the decode half; a prefill half is cancelled',
  },
  {
    owner: 'prefill',
    phases: without(TABLES.prefill.phases, 'closed'),
    messages: ['end_ack'],
    why: 'it answers `end`, which closes the key',
  },
  {
    owner: 'prefill',
    phases: without(PREFILL_LIVE, 'unwinding'),
    messages: ['ABORT_ACK'],
    why: 'it answers ABORT, which a half sends when it stops',
  },
  {
    owner: 'prefill',
    phases: without(TABLES.prefill.phases, 'confirming', 'closed'),
    messages: ['DONE'],
    why: 'it answers END; a half that has sent END has no read or step under way, so it never unwinds',
  },
  {
    owner: 'prefill',
    phases: ['unseen', 'bootstrapping', 'waiting'],
    messages: ['CREDIT'],
    why: 'it answers units, which are sent later',
  },
  {
    owner: 'prefill',
    phases: ['unseen'],
    messages: ['QUEUED waiting', 'RESERVED'],
    why: 'D says them when P has answered OPEN',
  },
  {
    owner: 'decode',
    phases: without(TABLES.decode.phases, 'closed'),
    messages: ['end_ack'],
    why: 'it answers `end`, which closes the key',
  },
  {
    owner: 'decode',
    phases: without(TABLES.decode.phases, 'unwinding', 'closed'),
    messages: ['ABORT_ACK'],
    why: 'it answers ABORT, which a receiver sends when it stops; a sequence says no ABORT',
  },
  {
    owner: 'decode',
    phases: ['unseen', ...RECEIVING, 'unwinding'],
    messages: ['DONE_ACK'],
    why: 'it answers DONE, which makes the room a sequence',
  },
  {
    owner: 'decode',
    phases: ['unseen', 'opening', 'queued'],
    messages: ['QUEUED computing', 'CHUNK', 'END'],
    why: 'P computes after RESERVED',
  },
  { owner: 'decode', phases: ['unseen'], messages: ['QUEUED waiting'], why: 'it answers OPEN' },
  {
    owner: 'decode',
    phases: ['bootstrapping'],
    messages: ['END'],
    why: 'the first credit is for one unit, and no other is sent before that one has arrived',
  },
];

/** Possible, but only with more faults at once than the sets have. */
export const BEYOND: readonly Declaration[] = [
  {
    owner: 'prefill',
    phases: ['unwinding'],
    messages: ['OPEN'],
    why: 'a late copy, and a stop while a read or a step is under way',
  },
  {
    owner: 'prefill',
    phases: without(TABLES.prefill.phases, 'unseen', 'bootstrapping'),
    messages: ['QUEUED waiting'],
    why: 'D waits for pages that another room has, says so, and RESERVED overtakes it',
  },
  {
    owner: 'decode',
    phases: ['saving', 'retracted', 'restoring'],
    messages: ['submit', 'peer_failed', 'QUEUED waiting', 'QUEUED computing', 'CHUNK', 'END', 'ABORT'],
    why: 'two rooms grow beyond the pool while a late copy, or a failure of P after ready, is on its way',
  },
  {
    owner: 'decode',
    phases: ['unwinding (sequence)'],
    messages: ['CHUNK', 'peer_failed'],
    why: 'a late copy or a failure of P after ready, and a stop while a step is under way',
  },
];

/** What was reached of the tables, and what should not be as it is. */
export interface Coverage {
  tables: { owner: Owner; phases: number; events: number; reached: number; impossible: number; beyond: number }[];
  missing: string[];
  impossibleButReached: string[];
  /** Reached, but in no table: a phase or message that has been added. */
  unknown: string[];
}

/** Cells of declarations, as `process | phase | event`. */
export function cellsOf(declarations: readonly Declaration[]): Set<string> {
  return new Set(
    declarations.flatMap(({ owner, phases, messages }) =>
      phases.flatMap((phase) => messages.map((message) => `${owner} | ${phase} | ${message}`)),
    ),
  );
}

/** Judge the cells that a run has reached. */
export function judge(seen: Iterable<string>): Coverage {
  const reached = new Set(seen);
  const impossible = cellsOf(IMPOSSIBLE);
  const beyond = cellsOf(BEYOND);
  const known = new Set<string>();
  const coverage: Coverage = { tables: [], missing: [], impossibleButReached: [], unknown: [] };
  for (const owner of Object.keys(TABLES) as Owner[]) {
    const { phases, messages, happenings } = TABLES[owner];
    const cells = [
      ...phases.flatMap((phase) => messages.map((message) => `${owner} | ${phase} | ${message}`)),
      ...Object.entries(happenings).flatMap(([name, where]) => where.map((phase) => `${owner} | ${phase} | ${name}`)),
    ];
    for (const cell of cells) {
      known.add(cell);
      if (reached.has(cell)) {
        if (impossible.has(cell)) coverage.impossibleButReached.push(cell);
      } else if (!impossible.has(cell) && !beyond.has(cell)) coverage.missing.push(cell);
    }
    coverage.tables.push({
      owner,
      phases: new Set(cells.map((cell) => cell.split(' | ')[1])).size,
      events: messages.length + Object.keys(happenings).length,
      reached: cells.filter((cell) => reached.has(cell)).length,
      impossible: cells.filter((cell) => impossible.has(cell)).length,
      beyond: cells.filter((cell) => beyond.has(cell) && !reached.has(cell)).length,
    });
  }
  for (const cell of reached) if (!known.has(cell)) coverage.unknown.push(cell);
  return coverage;
}
