/**
 * Breadth-first search of every world that a plan allows, so that the first violation found has the shortest trace. Then
 * the liveness part: from every world the fair schedule (always the first transition that is no fault) comes to rest, all
 * is at its baseline there, and a new request succeeds. From this follow L1 to L4: no world is stuck, and rest can be
 * reached from each without a fault.
 */
import { Broken, createModel, WORLD_WIDTH, type Model } from './model.ts';
import type { Plan, Rules } from './plan.ts';

/** What a search found. */
export interface Report {
  name: string;
  states: number;
  transitions: number;
  /** Longest of the shortest ways from the start, in steps. */
  depth: number;
  /** Worlds at rest, and those among them from which the canary was tried. */
  quiet: number;
  canaries: number;
  /** Most steps of the fair schedule from any world to rest. */
  settleSteps: number;
  seconds: number;
  /** False if the limit of worlds or of time was reached first. */
  isComplete: boolean;
  violation: Violation | null;
  seen: string[];
}

/** What is wrong, and the shortest way there. */
export interface Violation {
  what: string;
  trace: string[];
}

/** Steps after which a canary is taken to be lost. */
const CANARY_STEPS = 1000;

/** Bounds of a search: one that reaches a bound is not complete. */
export interface Bounds {
  maxStates?: number;
  maxSeconds?: number;
}

/** Explore a plan. `rules` are the real ones unless a test breaks some. */
export function explore(plan: Plan, { rules, ...bounds }: Bounds & { rules?: Rules } = {}): Report {
  return exploreModel(createModel(plan, rules), bounds);
}

/** Worlds by number, in the order they were found. */
interface Table {
  count: number;
  rows: Int32Array;
  slots: Int32Array;
  parents: Int32Array;
  /** Which of its parent's transitions leads to a world. */
  choices: Uint8Array;
  /** By world: its successor under the fair schedule, or itself at rest. */
  fair: Int32Array;
}

/** Explore a model, which afterwards knows every state of its processes. */
export function exploreModel(model: Model, { maxStates = Infinity, maxSeconds = Infinity }: Bounds = {}): Report {
  const startMs = performance.now();
  const table: Table = {
    count: 0,
    rows: new Int32Array(WORLD_WIDTH << 12),
    slots: new Int32Array(1 << 14),
    parents: new Int32Array(1 << 12),
    choices: new Uint8Array(1 << 12),
    fair: new Int32Array(1 << 12),
  };
  const report: Report = {
    name: model.plan.name,
    states: 0,
    transitions: 0,
    depth: 0,
    quiet: 0,
    canaries: 0,
    settleSteps: 0,
    seconds: 0,
    isComplete: true,
    violation: null,
    seen: [],
  };
  const world = new Int32Array(WORLD_WIDTH);
  const next = new Int32Array(WORLD_WIDTH);
  insert(table, model.initial(), 0, 0);
  const quiet: number[] = [];
  let levelEnd = 1;
  let at = 0;
  try {
    for (; at < table.count; at++) {
      if (at === levelEnd) {
        levelEnd = table.count;
        report.depth++;
      }
      if ((at & 0x3fff) === 0 && (performance.now() - startMs) / 1000 > maxSeconds) report.isComplete = false;
      if (table.count > maxStates) report.isComplete = false;
      if (!report.isComplete) break;
      world.set(table.rows.subarray(at * WORLD_WIDTH, (at + 1) * WORLD_WIDTH));
      let choice = 0;
      let fair = -1;
      model.expand(world, next, (kind) => {
        const id = insert(table, next, at, choice++);
        report.transitions++;
        if (kind !== 'fault' && fair < 0 && id !== at) fair = id;
      });
      table.fair[at] = fair < 0 ? at : fair;
      if (fair < 0) {
        const residue = model.residue(world);
        if (residue.length > 0) {
          const what = `L: nothing can happen, but there are ${residue.join(', ')}`;
          report.violation = { what, trace: traceOf(model, table, at) };
          break;
        }
        quiet.push(at);
      }
    }
    if (report.violation === null && report.isComplete) {
      report.settleSteps = settle(model, table);
      report.canaries = tryCanaries(model, table, quiet);
    }
  } catch (error) {
    if (error instanceof Stuck) {
      report.violation = { what: error.message, trace: [...traceOf(model, table, error.world), ...error.rest] };
    } else if (error instanceof Broken) {
      report.violation = {
        what: error.message,
        trace: [...traceOf(model, table, at), `${error.who}: ${nameLast(model, world)}`],
      };
    } else throw error;
  }
  report.states = table.count;
  report.quiet = quiet.length;
  report.seconds = (performance.now() - startMs) / 1000;
  report.seen = [...model.seen].sort();
  return report;
}

/** Liveness does not hold from this world. */
class Stuck extends Error {
  readonly world: number;
  readonly rest: string[];
  constructor(world: number, what: string, rest: string[]) {
    super(what);
    this.world = world;
    this.rest = rest;
  }
}

/** Number of a world; a new one is noted with the way to it. */
function insert(table: Table, world: Int32Array, parent: number, choice: number): number {
  let { slots } = table;
  let slot = hashOf(world) & (slots.length - 1);
  for (;;) {
    const known = (slots[slot] as number) - 1;
    if (known < 0) break;
    if (isEqual(table.rows, known * WORLD_WIDTH, world)) return known;
    slot = (slot + 1) & (slots.length - 1);
  }
  const id = table.count++;
  if (id >= table.parents.length) grow(table);
  table.rows.set(world, id * WORLD_WIDTH);
  table.parents[id] = parent;
  table.choices[id] = choice;
  if (2 * table.count > slots.length) rehash(table);
  else slots[slot] = id + 1;
  ({ slots } = table);
  return id;
}

function hashOf(world: Int32Array): number {
  let hash = 0x811c9dc5;
  for (let column = 0; column < WORLD_WIDTH; column++) {
    hash = Math.imul(hash ^ (world[column] as number), 0x01000193);
    hash ^= hash >>> 15;
  }
  hash = Math.imul(hash ^ (hash >>> 16), 0x85ebca6b);
  return (hash ^ (hash >>> 13)) >>> 0;
}

function isEqual(rows: Int32Array, start: number, world: Int32Array): boolean {
  for (let column = 0; column < WORLD_WIDTH; column++) if (rows[start + column] !== world[column]) return false;
  return true;
}

function grow(table: Table): void {
  const size = 2 * table.parents.length;
  const resized = <Numbers extends Int32Array | Uint8Array>(old: Numbers, grown: Numbers): Numbers => {
    grown.set(old);
    return grown;
  };
  table.rows = resized(table.rows, new Int32Array(WORLD_WIDTH * size));
  table.parents = resized(table.parents, new Int32Array(size));
  table.fair = resized(table.fair, new Int32Array(size));
  table.choices = resized(table.choices, new Uint8Array(size));
}

function rehash(table: Table): void {
  const slots = new Int32Array(4 * table.slots.length);
  const world = new Int32Array(WORLD_WIDTH);
  for (let id = 0; id < table.count; id++) {
    world.set(table.rows.subarray(id * WORLD_WIDTH, (id + 1) * WORLD_WIDTH));
    let slot = hashOf(world) & (slots.length - 1);
    while (slots[slot] !== 0) slot = (slot + 1) & (slots.length - 1);
    slots[slot] = id + 1;
  }
  table.slots = slots;
}

/** Follow the fair schedule from every world; the most steps to rest. Throws where it goes in a circle. */
function settle(model: Model, { fair, count, rows, parents, choices, slots }: Table): number {
  const steps = new Int32Array(count).fill(-1);
  let most = 0;
  for (let start = 0; start < count; start++) {
    const way: number[] = [];
    let at = start;
    while (steps[at] === -1) {
      steps[at] = -2; // on the way
      way.push(at);
      if (fair[at] === at) break;
      at = fair[at] as number;
    }
    const last = way.at(-1);
    if (last === undefined) continue;
    if (fair[last] !== last && steps[at] === -2) {
      const table = { fair, count, rows, parents, choices, slots };
      const circle = way.slice(way.indexOf(at));
      const rest = ['and then, again and again:', ...circle.map((world) => nameFair(model, table, world))];
      throw new Stuck(start, 'L: the fair schedule goes in a circle', rest);
    }
    let left = fair[last] === last ? -1 : (steps[at] as number);
    for (const world of way.reverse()) steps[world] = ++left;
    most = Math.max(most, left);
  }
  return most;
}

/** L4: a request that comes when all is at rest succeeds, and all is at rest again. Returns how many were tried. */
function tryCanaries(model: Model, table: Table, quiet: readonly number[]): number {
  const tried = new Set<string>();
  for (const id of quiet) {
    const world = table.rows.slice(id * WORLD_WIDTH, (id + 1) * WORLD_WIDTH);
    // What is left of the faults makes no difference to a request that meets none.
    const name = world.subarray(0, WORLD_WIDTH - 1).join();
    if (tried.has(name)) continue;
    tried.add(name);
    const rest = ['a canary asks'];
    let at = model.withCanary(world);
    if (at === null) throw new Stuck(id, 'L4: the router has no pair for a new request', rest);
    const next = new Int32Array(WORLD_WIDTH);
    for (let step = 0; ; step++) {
      let fair: Int32Array | null = null;
      try {
        const from: Int32Array = at;
        model.expand(from, next, (kind, who, what) => {
          if (kind === 'fault' || fair !== null || isEqual(next, 0, from)) return;
          fair = next.slice();
          rest.push(`${who}: ${what}`);
        });
      } catch (error) {
        if (error instanceof Broken) throw new Stuck(id, error.message, rest);
        throw error;
      }
      if (fair === null) break;
      if (step > CANARY_STEPS) throw new Stuck(id, 'L4: a canary does not come to an end', rest.slice(0, 100));
      at = fair;
    }
    const residue = model.residue(at);
    if (!model.isCanaryServed(at)) throw new Stuck(id, 'L4: a new request fails', rest);
    if (residue.length > 0) throw new Stuck(id, `L4: after a canary there are ${residue.join(', ')}`, rest);
  }
  return tried.size;
}

/** The transitions from the start to a world, one a line. */
function traceOf(model: Model, table: Table, id: number): string[] {
  const way: number[] = [];
  for (let at = id; at !== 0; at = table.parents[at] as number) way.push(at);
  const next = new Int32Array(WORLD_WIDTH);
  return way.reverse().map((at) => {
    const parent = table.parents[at] as number;
    const world = table.rows.slice(parent * WORLD_WIDTH, (parent + 1) * WORLD_WIDTH);
    let line = '';
    let choice = 0;
    model.expand(world, next, (_kind, who, what) => {
      if (choice++ === table.choices[at]) line = `${who}: ${what}`;
    });
    return line;
  });
}

/** What the fair schedule does in a world. */
function nameFair(model: Model, table: Table, id: number): string {
  const world = table.rows.slice(id * WORLD_WIDTH, (id + 1) * WORLD_WIDTH);
  const next = new Int32Array(WORLD_WIDTH);
  let line = '';
  model.expand(world, next, (kind, who, what) => {
    if (line === '' && kind !== 'fault' && !isEqual(next, 0, world)) line = `${who}: ${what}`;
  });
  return line;
}

/** The transition that broke an invariant, in words. */
function nameLast(model: Model, world: Int32Array): string {
  const next = new Int32Array(WORLD_WIDTH);
  try {
    model.expand(world, next, () => {});
  } catch (error) {
    if (error instanceof Broken) return error.doing;
    throw error;
  }
  return '';
}
