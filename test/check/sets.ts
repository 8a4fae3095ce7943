/** The sets of `npm run check`: those of every run, and the deep ones. */
import { FAULTS, ONE_ROOM, type Fault, type Plan } from './plan.ts';

type Base = Omit<Plan, 'name' | 'faults'>;

/** Faults by name, one of each mention: `cancel+drop`. */
function plan(base: Base, what: string, names: readonly Fault[]): Plan {
  const faults: Partial<Record<Fault, number>> = {};
  for (const name of names) faults[name] = (faults[name] ?? 0) + 1;
  return { ...base, name: `${what}: ${names.length === 0 ? 'no fault' : names.join('+')}`, faults };
}

const oneRoom = (...names: Fault[]): Plan => plan(ONE_ROOM, 'one room', names);

const brief = { promptTokens: 1, maxTokens: 1 };
const growing = { promptTokens: 1, maxTokens: 3 };
const alike = { promptTokens: 2, commonTokens: 1, maxTokens: 1 };

/** Two rooms and what they have in common. Each wants a page of P, and a page of D for each token but the last. */
const TWO_ROOMS = {
  /** One page on D: the second room waits in the prealloc queue. */
  'one page of D': { ...ONE_ROOM, rooms: [brief, brief], decodePages: 1 },
  /** One page on P: the second room waits there. */
  'one page of P': { ...ONE_ROOM, rooms: [brief, brief], decodePages: 2, prefillPages: 1 },
  /** Credit for one unit: the second room waits until the first one's is settled. */
  'one credit': { ...ONE_ROOM, rooms: [brief, brief], decodePages: 2, peerBufferBytes: 3 },
  /** One place on each worker: the second room is refused while the first lives, and tried again. */
  'one place': { ...ONE_ROOM, rooms: [brief, brief], decodePages: 2, maxRooms: 1 },
  /** Both grow beyond what D has: the newer is retracted to host memory and comes back. */
  retraction: { ...ONE_ROOM, rooms: [growing, growing], decodePages: 4 },
  /** The same without host memory: the newer is ended. */
  'no host memory': { ...ONE_ROOM, rooms: [growing, growing], decodePages: 4, hostBytes: 0 },
  /**
   * A cached page that both begin with. With it three pages of P hold both; without, the second waits. The canary wants
   * another one, and gets it.
   */
  'a cached page': {
    ...ONE_ROOM,
    rooms: [alike, alike],
    decodePages: 4,
    prefillPages: 3,
    prefillChunkTokens: 1,
    stateCount: 1,
  },
} satisfies Record<string, Base>;
type Contention = keyof typeof TWO_ROOMS;

const twoRooms = (what: Contention, ...names: Fault[]): Plan => plan(TWO_ROOMS[what], `two rooms, ${what}`, names);

const BOTH_ASK = ['client: 0 asks', 'client: 1 asks'];

/** The same from the moment when the first room has what both want, and the second waits for it. */
const crowded = (what: Contention, ...names: Fault[]): Plan =>
  plan({ ...TWO_ROOMS[what], setup: BOTH_ASK }, `crowded, ${what}`, names);

const STEPPING = ['client: 0 asks', 'prefill: a step begins', 'client: 0 leaves'];
const WRITING = [
  'client: 0 asks',
  'prefill: a step begins',
  'prefill: the step ends',
  'prefill: unit 0 is read',
  'client: 0 leaves',
];

/** A room that waits for what a cancelled one holds until the step that is under way on P has ended. */
const behindStep = (...names: Fault[]): Plan =>
  plan({ ...TWO_ROOMS['one page of P'], setup: [...STEPPING, 'client: 1 asks'] }, 'behind a step of P', names);

/** A room that waits for what a cancelled one holds until the write that is under way on D has ended. */
const behindWrite = (...names: Fault[]): Plan =>
  plan({ ...TWO_ROOMS['one page of D'], setup: [...WRITING, 'client: 1 asks'] }, 'behind a write of D', names);

/** The same, before the second client asks. */
const comesBehindStep = (...names: Fault[]): Plan =>
  plan({ ...TWO_ROOMS['one page of P'], setup: STEPPING }, 'coming behind a step of P', names);
const comesBehindWrite = (...names: Fault[]): Plan =>
  plan({ ...TWO_ROOMS['one page of D'], setup: WRITING }, 'coming behind a write of D', names);

/** From the moment when the newer of two sequences is retracted. */
const retracting = (...names: Fault[]): Plan =>
  plan({ ...TWO_ROOMS.retraction, setup: [...BOTH_ASK, 'until decode is saving'] }, 'retracting', names);

/** Answers with drafts: of one room, and of two whose newer one is retracted. Drafts take the pages that are lent in advance. */
const drafting = { promptTokens: 1, maxTokens: 4 };
const DRAFTS = { ...ONE_ROOM, rooms: [drafting], decodePages: 4, drafts: true };
const CROWDED_DRAFTS = { ...DRAFTS, rooms: [drafting, drafting], decodePages: 6, setup: BOTH_ASK };

/** Both read the cached page; the one that computed it has more to compute, and nobody has verified it. */
const SHARING = [
  'client: 0 asks',
  'prefill: a step begins',
  'prefill: the step ends',
  'client: 1 asks',
  'prefill: a step begins',
];
const sharing = (...names: Fault[]): Plan =>
  plan({ ...TWO_ROOMS['a cached page'], setup: SHARING }, 'sharing a cached page', names);

/** The same after the one that computed it was given up, in mid-step: the other goes on with a page that nobody keeps. */
const forsaken = (...names: Fault[]): Plan =>
  plan({ ...TWO_ROOMS['a cached page'], setup: [...SHARING, 'client: 0 leaves'] }, 'forsaken on a cached page', names);

/** A prompt of two steps, so that units leave P before the last chunk is computed. */
const TWO_STEPS = { ...ONE_ROOM, prefillChunkTokens: 1 };

/** All of a room's units may be under way at once, so that some arrive while others are written. */
const WIDE_WINDOW = { ...ONE_ROOM, roomWindowBytes: 7, peerBufferBytes: 14 };

/** `unlink` alone is as much as all the others together; `stop` is to the workers what `cancel` is. */
const QUICK_FAULTS = FAULTS.filter((fault) => fault !== 'unlink' && fault !== 'stop');

/** Explored by every `npm run check`: under a minute in all on two cores. */
export const CI_SETS: readonly Plan[] = [
  oneRoom(),
  ...FAULTS.map((fault) => oneRoom(fault)),
  plan(TWO_STEPS, 'one room, two steps', ['cancel']),
  plan(TWO_STEPS, 'one room, two steps', ['expiry']),
  plan(WIDE_WINDOW, 'one room, wide window', ['cancel']),
  oneRoom('drop', 'duplicate'),
  oneRoom('cancel', 'drop'),
  oneRoom('drop', 'expiry'),
  oneRoom('restartP', 'restartD'),
  oneRoom('restartP', 'restartR'),
  twoRooms('one page of D'),
  crowded('one page of D', 'restartP'),
  crowded('one credit', 'restartP'),
  crowded('one place', 'cancel'),
  crowded('retraction'),
  crowded('no host memory'),
  plan(DRAFTS, 'drafts', []),
  plan(DRAFTS, 'drafts', ['cancel']),
  plan(CROWDED_DRAFTS, 'crowded, drafts', []),
  ...QUICK_FAULTS.map((fault) => behindStep(fault)),
  ...QUICK_FAULTS.map((fault) => behindWrite(fault)),
  comesBehindStep('duplicate'),
  comesBehindWrite('duplicate'),
  ...QUICK_FAULTS.map((fault) => retracting(fault)),
  sharing(),
  forsaken(),
  forsaken('duplicate'),
  forsaken('restartR'),
];

/** Triples that broke something in an implementation of the same protocol, or belong to a starred failure. */
const TRIPLES: readonly Fault[][] = [
  ['cancel', 'drop', 'duplicate'],
  ['cancel', 'duplicate', 'reorder'],
  ['cancel', 'drop', 'restartP'],
  ['cancel', 'drop', 'restartD'],
  ['drop', 'expiry', 'restartP'],
  ['restartP', 'restartD', 'restartR'],
  ['drop', 'restartP', 'restartP'],
];

/** Faults that one room can have once only: its client leaves or has its stop string. */
const ONCE: readonly Fault[] = ['cancel', 'stop'];

function allPairs(): Plan[] {
  return FAULTS.flatMap((first, index) =>
    FAULTS.slice(index)
      .filter((second) => second !== first || !ONCE.includes(first))
      .map((second) => oneRoom(first, second)),
  );
}

/** Explored by `npm run check -- --deep` besides. */
export const DEEP_SETS: readonly Plan[] = [
  ...allPairs(),
  ...TRIPLES.map((names) => oneRoom(...names)),
  ...(Object.keys(TWO_ROOMS) as Contention[]).flatMap((what) => [
    twoRooms(what),
    ...FAULTS.map((fault) => crowded(what, fault)),
    ...FAULTS.map((fault) => twoRooms(what, fault)),
  ]),
  ...FAULTS.flatMap((fault) => [
    behindStep(fault),
    behindWrite(fault),
    retracting(fault),
    sharing(fault),
    forsaken(fault),
  ]),
].filter((deep) => !CI_SETS.some(({ name }) => name === deep.name));
