/**
 * Sets of texts as automata over their bytes: what a string, a number or a list of literals may be in an answer.
 *
 *     pattern (code points) ─ encoding ─▶ bytes, nondeterministic ─ subsets ─▶ bytes, one state at a time
 *
 * Every state of a finished automaton can still reach an accepted text, so whoever follows it never gets stuck. All work
 * is counted, and more than a bound is refused: a pattern can ask for exponentially many states. Pure.
 */

/** A set of texts by their bytes. States are numbers; 0 is the first. */
export interface Automaton {
  /** The state behind `byte`, or -1 where no text of the set goes on like this. */
  step(state: number, byte: number): number;
  /** Whether the bytes so far are a text of the set. */
  accepts(state: number): boolean;
  /** Whether the bytes so far are whole characters. */
  isBoundary(state: number): boolean;
}

/** Code points from the first to the last, inclusive. */
export type Range = readonly [first: number, last: number];

/** A regular expression over code points. */
export type Pattern =
  | { readonly kind: 'set'; readonly ranges: readonly Range[] }
  | { readonly kind: 'sequence'; readonly parts: readonly Pattern[] }
  | { readonly kind: 'choice'; readonly parts: readonly Pattern[] }
  | { readonly kind: 'repeat'; readonly part: Pattern; readonly min: number; readonly max: number };

/** How a character of a string is spelled: within the quotes of JSON, or as it stands. */
export type Spelling = 'json' | 'raw';

/** What may still be spent on automata, in steps of well under a microsecond. */
export interface WorkBudget {
  work: number;
}

/** Enough for any pattern of the server's own. */
const OWN_WORK = 1_000_000;

function spend(budget: WorkBudget, amount: number): void {
  budget.work -= amount;
  if (budget.work < 0) throw new TooComplexError('the patterns take too much work');
}

/** An automaton would be larger than is built. */
export class TooComplexError extends Error {
  override readonly name = 'TooComplexError';
}

/**
 * The bar of the chat format's markers. No constrained text holds it as it stands: a string that did could begin a tool
 * call. JSON can spell it as an escape.
 */
const BAR = 0xff5c;
const MAX_CODE_POINT = 0x10ffff;
/** Any character that text can hold: no half of a surrogate pair. */
export const ANY_CHARACTER: readonly Range[] = [
  [0, 0xd7ff],
  [0xe000, MAX_CODE_POINT],
];

const MAX_NODES = 20_000;
const MAX_STATES = 4000;
const SHORT_ESCAPES = new Map([
  [0x08, 'b'],
  [0x09, 't'],
  [0x0a, 'n'],
  [0x0c, 'f'],
  [0x0d, 'r'],
  [0x22, '"'],
  [0x5c, '\\'],
]);

const utf8 = new TextEncoder();

/** `text` as a JSON string in the one spelling that the automata know. */
export function jsonString(text: string): string {
  return JSON.stringify(text).replaceAll('\uff5c', String.raw`\uff5c`);
}

/** Whether `text` can stand as it is in a constrained answer. */
export function hasRawSpelling(text: string): boolean {
  return !/[\p{Surrogate}\uff5c]/u.test(text);
}

/** The texts `texts`, at least one. */
export function literalAutomaton(texts: readonly string[]): Automaton {
  return texts.length === 1 ? singleText(utf8.encode(texts[0]!)) : textTree(texts);
}

function singleText(bytes: Uint8Array): Automaton {
  const isInside = (byte: number | undefined): boolean => byte !== undefined && byte >= 0x80 && byte < 0xc0;
  return {
    step: (state, byte) => (bytes[state] === byte ? state + 1 : -1),
    accepts: (state) => state === bytes.length,
    isBoundary: (state) => !isInside(bytes[state]),
  };
}

function textTree(texts: readonly string[]): Automaton {
  const encoded = texts.map((text) => utf8.encode(text));
  const most = encoded.reduce((sum, bytes) => sum + bytes.length, 1);
  // By state: its first child and next sibling (0 is none), the byte that leads to it, and what it is. Ten bytes each:
  // lists are as long as a request.
  const child = new Int32Array(most);
  const sibling = new Int32Array(most);
  const byteOf = new Uint8Array(most);
  const flags = new Uint8Array(most);
  const [IS_END, IS_INSIDE] = [1, 2];
  let count = 1;

  function step(state: number, byte: number): number {
    for (let next = child[state]!; next !== 0; next = sibling[next]!) if (byteOf[next] === byte) return next;
    return -1;
  }

  for (const bytes of encoded) {
    let state = 0;
    for (const [index, byte] of bytes.entries()) {
      let next = step(state, byte);
      if (next < 0) {
        next = count++;
        byteOf[next] = byte;
        sibling[next] = child[state]!;
        child[state] = next;
      }
      state = next;
      const following = bytes[index + 1];
      if (following !== undefined && following >= 0x80 && following < 0xc0) flags[state]! |= IS_INSIDE;
    }
    flags[state]! |= IS_END;
  }
  return {
    step,
    accepts: (state) => (flags[state]! & IS_END) !== 0,
    isBoundary: (state) => (flags[state]! & IS_INSIDE) === 0,
  };
}

/** The texts of `automaton` but for `names`. Those go on for ever, so there is always another. */
export function exceptFor(automaton: Automaton, names: readonly string[]): Automaton {
  if (names.length === 0) return automaton;
  const excluded = literalAutomaton(names);
  // Both run side by side: `place` is one more than the state of the excluded texts, 0 once the text is none of them.
  const pairs: { state: number; place: number }[] = [{ state: 0, place: 1 }];
  const numbers = new Map<string, number>([['0,1', 0]]);
  return {
    step(number, byte) {
      const pair = pairs[number]!;
      const state = automaton.step(pair.state, byte);
      if (state < 0) return -1;
      const place = pair.place === 0 ? 0 : excluded.step(pair.place - 1, byte) + 1;
      const key = `${state},${place}`;
      let next = numbers.get(key);
      if (next === undefined) {
        next = pairs.push({ state, place }) - 1;
        numbers.set(key, next);
      }
      return next;
    },
    accepts(number) {
      const { state, place } = pairs[number]!;
      return automaton.accepts(state) && (place === 0 || !excluded.accepts(place - 1));
    },
    isBoundary: (number) => automaton.isBoundary(pairs[number]!.state),
  };
}

/**
 * The texts that `pattern` matches from end to end, with `min` to `max` characters, in the given spelling; null if there
 * are none.
 *
 * @throws TooComplexError if it has more states than are built.
 */
export function patternAutomaton(
  pattern: Pattern,
  spelling: Spelling,
  { min = 0, max = Infinity, budget = { work: OWN_WORK } }: { min?: number; max?: number; budget?: WorkBudget } = {},
): Automaton | null {
  const tables = determine(buildNodes(pattern, spelling, budget), budget);
  return finish(min === 0 && max === Infinity ? tables : withLength(tables, min, max, budget));
}

// ---------------------------------------------------------------------------------------------------------
// Nondeterministic: nodes with free moves and moves by byte

interface Nodes {
  readonly free: number[][];
  readonly edges: { first: number; last: number; to: number }[][];
  /** Whether whole characters lie behind a node. */
  readonly boundary: boolean[];
  readonly start: number;
  readonly end: number;
}

function buildNodes(pattern: Pattern, spelling: Spelling, budget: WorkBudget): Nodes {
  const free: number[][] = [];
  const edges: Nodes['edges'] = [];
  const boundary: boolean[] = [];
  const add = (isBoundary: boolean): number => {
    spend(budget, 1);
    if (free.length >= MAX_NODES) throw new TooComplexError('the pattern is too large');
    free.push([]);
    edges.push([]);
    return boundary.push(isBoundary) - 1;
  };
  const spelled = new Map<readonly Range[], Range[][]>();

  /** Write `part` from node `from` on; returns the node behind it. */
  function write(part: Pattern, from: number): number {
    switch (part.kind) {
      case 'set': {
        const end = add(true);
        let sequences = spelled.get(part.ranges);
        if (sequences === undefined) spelled.set(part.ranges, (sequences = spell(part.ranges, spelling)));
        // Sequences that begin alike share their nodes.
        const shared = new Map<string, number>();
        for (const sequence of sequences) {
          let node = from;
          let prefix = '';
          for (const [index, [first, last]] of sequence.entries()) {
            prefix += `${first}-${last} `;
            let to = index === sequence.length - 1 ? end : shared.get(prefix);
            if (to === undefined) shared.set(prefix, (to = add(false)));
            if (to === end || edges[node]!.every((edge) => edge.to !== to)) edges[node]!.push({ first, last, to });
            node = to;
          }
        }
        return end;
      }
      case 'sequence': {
        let node = from;
        for (const each of part.parts) node = write(each, node);
        return node;
      }
      case 'choice': {
        const end = add(true);
        for (const each of part.parts) {
          const begin = add(true);
          free[from]!.push(begin);
          free[write(each, begin)]!.push(end);
        }
        return end;
      }
      case 'repeat': {
        let node = from;
        for (let count = 0; count < part.min; count += 1) node = write(part.part, node);
        const end = add(true);
        if (part.max === Infinity) {
          const begin = add(true);
          free[node]!.push(begin);
          free[begin]!.push(end);
          free[write(part.part, begin)]!.push(begin);
          return end;
        }
        free[node]!.push(end);
        for (let count = part.min; count < part.max; count += 1) {
          node = write(part.part, node);
          free[node]!.push(end);
        }
        return end;
      }
      default:
        return part satisfies never;
    }
  }

  const start = add(true);
  const end = write(pattern, start);
  return { free, edges, boundary, start, end };
}

/** The bytes of each character in `ranges`, as sequences of byte ranges. */
function spell(ranges: readonly Range[], spelling: Spelling): Range[][] {
  const sequences: Range[][] = [];
  const escape = (text: string): void => void sequences.push([...utf8.encode(text)].map((byte) => [byte, byte]));
  for (const [first, last] of ranges) {
    for (const [low, high] of without([first, last], spelling)) sequences.push(...utf8Sequences(low, high));
    if (spelling === 'raw') continue;
    for (let code = first; code <= Math.min(last, 0x5c); code += 1) {
      if (code >= 0x20 && code !== 0x22 && code !== 0x5c) continue;
      const short = SHORT_ESCAPES.get(code);
      escape(short === undefined ? `\\u${code.toString(16).padStart(4, '0')}` : `\\${short}`);
    }
    if (first <= BAR && last >= BAR) escape(String.raw`\uff5c`);
  }
  return sequences;
}

/** What of a range stands as it is in text of a spelling. */
function without(range: Range, spelling: Spelling): Range[] {
  const holes: Range[] =
    spelling === 'json'
      ? [
          [0, 0x1f],
          [0x22, 0x22],
          [0x5c, 0x5c],
        ]
      : [];
  holes.push([0xd800, 0xdfff], [BAR, BAR]);
  const kept: Range[] = [];
  let [first] = range;
  for (const [low, high] of holes) {
    if (high < first || low > range[1]) continue;
    if (low > first) kept.push([first, low - 1]);
    first = high + 1;
  }
  if (first <= range[1]) kept.push([first, range[1]]);
  return kept;
}

/** UTF-8 of all code points of a range, as sequences of byte ranges. */
function utf8Sequences(first: number, last: number): Range[][] {
  const sequences: Range[][] = [];
  for (const limit of [0x7f, 0x7ff, 0xffff, MAX_CODE_POINT]) {
    if (first > limit) continue;
    const end = Math.min(last, limit);
    splitBytes(bytesOf(first), bytesOf(end), [], sequences);
    if (end === last) break;
    first = end + 1;
  }
  return sequences;
}

function bytesOf(codePoint: number): number[] {
  return [...utf8.encode(String.fromCodePoint(codePoint))];
}

/** Texts of one length between `low` and `high`, into `sequences` behind `prefix`. */
function splitBytes(
  low: readonly number[],
  high: readonly number[],
  prefix: readonly Range[],
  sequences: Range[][],
): void {
  const [first, ...lowRest] = low as [number, ...number[]];
  const [last, ...highRest] = high as [number, ...number[]];
  if (lowRest.length === 0) {
    sequences.push([...prefix, [first, last]]);
    return;
  }
  if (first === last) return splitBytes(lowRest, highRest, [...prefix, [first, first]], sequences);
  const least = lowRest.map(() => 0x80);
  const most = lowRest.map(() => 0xbf);
  let [from, to] = [first, last];
  if (lowRest.some((byte) => byte !== 0x80)) {
    splitBytes(lowRest, most, [...prefix, [first, first]], sequences);
    from += 1;
  }
  const hasTail = highRest.some((byte) => byte !== 0xbf);
  if (hasTail) to -= 1;
  if (from <= to) sequences.push([...prefix, [from, to], ...least.map((): Range => [0x80, 0xbf])]);
  if (hasTail) splitBytes(least, highRest, [...prefix, [last, last]], sequences);
}

// ---------------------------------------------------------------------------------------------------------
// Deterministic: a table of states by classes of bytes that are never told apart

interface Tables {
  readonly classOf: Uint8Array;
  readonly classCount: number;
  /** Row by row, a state and its next one by class; -1 is none. */
  readonly next: number[];
  readonly accepts: boolean[];
  readonly boundary: boolean[];
}

function determine(nodes: Nodes, budget: WorkBudget): Tables {
  const { classOf, classCount } = byteClasses(nodes);
  const tables: Tables = { classOf, classCount, next: [], accepts: [], boundary: [] };
  const numbers = new Map<string, number>();
  const sets: number[][] = [];

  function stateOf(seed: Iterable<number>): number {
    const seen = new Set(seed);
    for (const node of seen) {
      spend(budget, 1 + nodes.free[node]!.length);
      for (const to of nodes.free[node]!) seen.add(to);
    }
    const set = [...seen].toSorted((a, b) => a - b);
    spend(budget, set.length);
    const key = set.join();
    let number = numbers.get(key);
    if (number !== undefined) return number;
    number = sets.push(set) - 1;
    if (number >= MAX_STATES) throw new TooComplexError('the pattern has too many states');
    numbers.set(key, number);
    tables.accepts.push(set.includes(nodes.end));
    tables.boundary.push(set.every((node) => nodes.boundary[node]));
    return number;
  }

  stateOf([nodes.start]);
  for (let state = 0; state < sets.length; state += 1) {
    spend(budget, classCount);
    const targets = Array.from({ length: classCount }, () => new Set<number>());
    for (const node of sets[state]!) {
      for (const { first, last, to } of nodes.edges[node]!) {
        spend(budget, classOf[last]! - classOf[first]! + 1);
        for (let index = classOf[first]!; index <= classOf[last]!; index += 1) targets[index]!.add(to);
      }
    }
    for (const target of targets) tables.next.push(target.size === 0 ? -1 : stateOf(target));
  }
  return tables;
}

/** Classes of bytes, numbered in the order of the bytes. */
function byteClasses({ edges }: Nodes): { classOf: Uint8Array; classCount: number } {
  const begins = new Uint8Array(257);
  for (const { first, last } of edges.flat()) {
    begins[first] = 1;
    begins[last + 1] = 1;
  }
  const classOf = new Uint8Array(256);
  let index = 0;
  for (let byte = 1; byte < 256; byte += 1) classOf[byte] = index += begins[byte]!;
  return { classOf, classCount: index + 1 };
}

/** The same texts, of these those with `min` to `max` characters: states are pairs of a state and a count. */
function withLength(tables: Tables, min: number, max: number, budget: WorkBudget): Tables {
  const { classOf, classCount } = tables;
  const result: Tables = { classOf, classCount, next: [], accepts: [], boundary: [] };
  const most = max === Infinity ? min : max;
  const numbers = new Map<number, number>();
  const pairs: { state: number; count: number }[] = [];
  const stateOf = (state: number, count: number): number => {
    const key = state * (most + 1) + count;
    let number = numbers.get(key);
    if (number !== undefined) return number;
    number = pairs.push({ state, count }) - 1;
    spend(budget, classCount);
    if (number >= MAX_NODES) throw new TooComplexError('the pattern and its lengths have too many states');
    numbers.set(key, number);
    result.accepts.push(tables.accepts[state]! && count >= min);
    result.boundary.push(tables.boundary[state]!);
    return number;
  };
  stateOf(0, 0);
  for (let number = 0; number < pairs.length; number += 1) {
    const { state, count } = pairs[number]!;
    for (let index = 0; index < classCount; index += 1) {
      const next = tables.next[state * classCount + index]!;
      const after = next >= 0 && tables.boundary[next]! ? count + 1 : count;
      if (next < 0 || (after > most && max !== Infinity)) result.next.push(-1);
      else result.next.push(stateOf(next, Math.min(after, most)));
    }
  }
  return result;
}

/** Cut what leads nowhere. Null if that is everything. */
function finish({ classOf, classCount, next, accepts, boundary }: Tables): Automaton | null {
  const before: number[][] = accepts.map(() => []);
  for (const [place, to] of next.entries()) if (to >= 0) before[to]!.push(Math.floor(place / classCount));
  const alive = new Set(accepts.flatMap((isEnd, state) => (isEnd ? [state] : [])));
  for (const state of alive) for (const from of before[state]!) alive.add(from);
  if (!alive.has(0)) return null;
  const table = Int32Array.from(next, (to) => (alive.has(to) ? to : -1));
  return {
    step: (state, byte) => table[state * classCount + classOf[byte]!]!,
    accepts: (state) => accepts[state]!,
    isBoundary: (state) => boundary[state]!,
  };
}

// ---------------------------------------------------------------------------------------------------------
// Ready-made patterns

const digit: Pattern = { kind: 'set', ranges: [[0x30, 0x39]] };

/** The characters of `text`, one after the other. */
export function literalPattern(text: string): Pattern {
  const parts = Array.from(text).map((character): Pattern => {
    const code = character.codePointAt(0)!;
    return { kind: 'set', ranges: [[code, code]] };
  });
  return { kind: 'sequence', parts };
}

/** `part`, or nothing. */
export function maybe(part: Pattern): Pattern {
  return { kind: 'repeat', part, min: 0, max: 1 };
}

/** Integers of an answer have so many digits at most: all of them are exact in every client. */
const MAX_DIGITS = 15;
const LARGEST = 10 ** MAX_DIGITS - 1;

/** Whether there is an integer of up to 15 digits from `min` to `max`. */
export function hasInteger(min: number, max: number): boolean {
  return Math.max(Math.ceil(min), -LARGEST) <= Math.min(Math.floor(max), LARGEST);
}

/**
 * Decimal integers from `min` to `max` of up to 15 digits, of which there must be one.
 *
 * Nothing is built, so a schema may have thousands of them: a state is what has been read, as a number. Once the bounds
 * only say how many digits may follow, it is that, so that texts which go on alike share their states.
 */
export function integerAutomaton(min: number, max: number): Automaton {
  const low = Math.max(Math.ceil(min), -LARGEST);
  const high = Math.min(Math.floor(max), LARGEST);
  // States: 0, the minus, 2 + what stands behind no minus, NEGATIVE + what stands behind it, COUNTED + how many digits
  // may follow: at least and at most.
  const [MINUS, NATURAL, NEGATIVE, COUNTED] = [1, 2, 2 + 10 ** MAX_DIGITS, 2 + 2 * 10 ** MAX_DIGITS];
  const counted = (least: number, most: number): number => COUNTED + least * 16 + most;

  /** The state behind the digits of `value`; its own absolute value has to be within the bounds. */
  function behind(value: number, isNegative: boolean): number {
    const [from, to] = isNegative ? [Math.max(1, -high), -low] : [Math.max(0, low), high];
    // Nothing follows a zero.
    if (value === 0) return from === 0 && to >= 0 ? counted(0, 0) : -1;
    let [least, most] = [-1, -1];
    let isOpen = false;
    for (let digits = 0, first = value, last = value; first <= to; digits += 1, first *= 10, last = last * 10 + 9) {
      if (last < from) continue;
      if (first < from || last > to) isOpen = true;
      if (least < 0) least = digits;
      most = digits;
    }
    if (least < 0) return -1;
    return isOpen ? (isNegative ? NEGATIVE : NATURAL) + value : counted(least, most);
  }

  return {
    step(state, byte) {
      if (state === 0 && byte === 0x2d) return low < 0 ? MINUS : -1;
      const digit = byte - 0x30;
      if (digit < 0 || digit > 9) return -1;
      if (state <= MINUS) return behind(digit, state === MINUS);
      if (state >= COUNTED) {
        const [least, most] = [Math.floor((state - COUNTED) / 16), (state - COUNTED) % 16];
        return most === 0 ? -1 : counted(Math.max(least - 1, 0), most - 1);
      }
      const isNegative = state >= NEGATIVE;
      return behind((state - (isNegative ? NEGATIVE : NATURAL)) * 10 + digit, isNegative);
    },
    accepts(state) {
      if (state <= MINUS) return false;
      if (state >= COUNTED) return state - COUNTED < 16;
      const value = state >= NEGATIVE ? NEGATIVE - state : state - NATURAL;
      return value >= low && value <= high;
    },
    isBoundary: () => true,
  };
}

/** JSON numbers of bounded length, none of them too large for a double. */
export const NUMBER_PATTERN: Pattern = {
  kind: 'sequence',
  parts: [
    integerOrZero(),
    maybe({ kind: 'sequence', parts: [literalPattern('.'), { kind: 'repeat', part: digit, min: 1, max: MAX_DIGITS }] }),
    maybe({
      kind: 'sequence',
      parts: [
        {
          kind: 'set',
          ranges: [
            [0x45, 0x45],
            [0x65, 0x65],
          ],
        },
        maybe({
          kind: 'set',
          ranges: [
            [0x2b, 0x2b],
            [0x2d, 0x2d],
          ],
        }),
        { kind: 'repeat', part: digit, min: 1, max: 2 },
      ],
    }),
  ],
};

function integerOrZero(): Pattern {
  return {
    kind: 'sequence',
    parts: [
      maybe(literalPattern('-')),
      {
        kind: 'choice',
        parts: [
          literalPattern('0'),
          {
            kind: 'sequence',
            parts: [
              { kind: 'set', ranges: [[0x31, 0x39]] },
              { kind: 'repeat', part: digit, min: 0, max: MAX_DIGITS - 1 },
            ],
          },
        ],
      },
    ],
  };
}

/** Any text. */
export const ANY_TEXT: Pattern = {
  kind: 'repeat',
  part: { kind: 'set', ranges: ANY_CHARACTER },
  min: 0,
  max: Infinity,
};
