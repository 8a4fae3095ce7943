/**
 * Runs a program (program.ts) over the bytes of an answer, and says which tokens may come next.
 *
 * A state is a list of threads, the ways in which the text so far can be understood; each is a place in the program and
 * a stack of places to return to. Every thread can be completed by itself, so when there are too many the last ones are
 * dropped: that makes fewer answers possible and none of them wrong. States are kept with what follows them, so that the
 * answers of one grammar share the work. Pure.
 */
import type { Instruction, Place, Program } from './program.ts';
import { setBit, type TokenTree, type Vocabulary } from './vocabulary.ts';

const MAX_THREADS = 128;
/** Threads of all states and masks that a grammar keeps; it forgets all of them when there are more. */
const MAX_KEPT_THREADS = 150_000;
const MAX_MASK_BYTES = 4 << 20;
/**
 * Threads that are moved for one walk over a tree of tokens, each about a microsecond and 100 bytes: tokens that are
 * longer than those looked at by then are not allowed. A text can always be spelled in shorter ones.
 */
const MAX_WALK_MOVES = 100_000;

interface Frame {
  readonly id: number;
  readonly place: Place;
  /** Of a repetition: how often it has run. */
  readonly count: number;
  readonly below: Frame | null;
}

interface Thread {
  readonly place: Place;
  /** State of the automaton at the place. */
  readonly inner: number;
  /** Characters so far, where they are counted. */
  readonly length: number;
  readonly frame: Frame | null;
}

interface State {
  readonly threads: readonly Thread[];
  /** Whether the answer is complete. */
  readonly isEnd: boolean;
  readonly next: Map<number, Move>;
  mask: Uint32Array | null;
}

/** What a byte leads to. */
interface Move {
  /** Null if the byte cannot come. */
  readonly to: State | null;
  /** Threads that were looked at to find out. */
  readonly cost: number;
  /** The last walk that has counted it. */
  walk: number;
}

/** A program over a vocabulary, and what has been found out about it so far. */
export interface Grammar {
  /** The beginning of an answer. */
  start(): Progress;
}

/** How far an answer has come. Does not change: each token leads to another. */
export interface Progress {
  /** A bit for each token that may come next; the end-of-sentence token's if the answer is complete. Not to be written. */
  mask(): Uint32Array;
  /** Behind another token; null if the token cannot come here. The end token leads nowhere. */
  accept(id: number): Progress | null;
  readonly isEnd: boolean;
}

/** Make a grammar of `program` over `vocabulary`. */
export function createGrammar(program: Program, vocabulary: Vocabulary): Grammar {
  const { instructions } = program;
  let frames = new Map<string, Frame>();
  let frameCount = 0;
  let states = new Map<string, State>();
  let withMasks: State[] = [];
  let keptThreads = 0;
  let walks = 0;

  function frameOf(place: Place, count: number, below: Frame | null): Frame {
    const key = `${place},${count},${below?.id ?? -1}`;
    let frame = frames.get(key);
    if (frame === undefined) frames.set(key, (frame = { id: frameCount++, place, count, below }));
    return frame;
  }

  /** Threads at texts and at the end, from a list of threads anywhere. */
  function settle(from: Thread[]): { state: State; steps: number } {
    const threads: Thread[] = [];
    const keys: string[] = [];
    const seen = new Set<string>();
    let isEnd = false;
    let steps = 0;
    // A stack, so that alternatives keep their order.
    const left = from.toReversed();
    const go = (place: Place, frame: Frame | null): void => void left.push({ place, inner: 0, length: 0, frame });
    while (left.length > 0 && threads.length < MAX_THREADS) {
      const thread = left.pop()!;
      steps += 1;
      const { place, inner, length, frame } = thread;
      const key = `${place},${inner},${length},${frame?.id ?? -1}`;
      if (seen.has(key)) continue;
      seen.add(key);
      const instruction = instructions[place]!;
      switch (instruction.op) {
        case 'text':
          if (instruction.automaton.accepts(inner) && length >= instruction.min) go(instruction.next, frame);
          threads.push(thread);
          keys.push(key);
          break;
        case 'split':
          for (const to of instruction.to.toReversed()) go(to, frame);
          break;
        case 'call':
          go(instruction.rule, behind(instruction.next, frame));
          break;
        case 'repeat':
          repeat(place, instruction, 0, frame, go);
          break;
        case 'return': {
          if (frame === null) break;
          const caller = instructions[frame.place]!;
          if (caller.op === 'repeat') repeat(frame.place, caller, frame.count, frame.below, go);
          else go(frame.place, frame.below);
          break;
        }
        case 'end':
          isEnd = true;
          break;
        default:
          instruction satisfies never;
      }
    }
    const key = `${isEnd ? 'end' : ''};${keys.join(';')}`;
    let state = states.get(key);
    if (state === undefined) {
      states.set(key, (state = { threads, isEnd, next: new Map(), mask: null }));
      keptThreads += 1 + threads.length;
    }
    return { state, steps };
  }

  /** The stack of a call: a call in last place needs no frame of its own, so lists do not make it grow. */
  function behind(next: Place, frame: Frame | null): Frame | null {
    return instructions[next]!.op === 'return' ? frame : frameOf(next, 0, frame);
  }

  function repeat(
    place: Place,
    instruction: Extract<Instruction, { op: 'repeat' }>,
    count: number,
    frame: Frame | null,
    go: (place: Place, frame: Frame | null) => void,
  ): void {
    const { min, max, rule, next } = instruction;
    if (count < max) {
      // Where there is no upper end, what has been reached is all that matters.
      const reached = max === Infinity ? Math.min(count + 1, min) : count + 1;
      go(rule, frameOf(place, reached, frame));
    }
    if (count >= min) go(next, frame);
  }

  function advance(state: State, byte: number): Move {
    const known = state.next.get(byte);
    if (known !== undefined) return known;
    const moved: Thread[] = [];
    for (const { place, inner, length, frame } of state.threads) {
      const { automaton, min, max } = instructions[place] as Extract<Instruction, { op: 'text' }>;
      const next = automaton.step(inner, byte);
      if (next < 0 || length >= max) continue;
      let reached = length;
      if ((min > 0 || max < Infinity) && automaton.isBoundary(next)) {
        reached = length + 1;
        if (max === Infinity) reached = Math.min(reached, min);
      }
      moved.push({ place, inner: next, length: reached, frame });
    }
    let cost = state.threads.length;
    let to: State | null = null;
    if (moved.length > 0) {
      const settled = settle(moved);
      cost += settled.steps;
      if (settled.state.threads.length > 0 || settled.state.isEnd) to = settled.state;
    }
    const move: Move = { to, cost, walk: 0 };
    state.next.set(byte, move);
    return move;
  }

  function maskOf(state: State): Uint32Array {
    if (state.mask !== null) return state.mask;
    const mask = new Uint32Array(vocabulary.maskWords);
    if (state.isEnd) setBit(mask, vocabulary.eosId);
    const rest: Thread[] = [];
    for (const thread of state.threads) {
      const instruction = instructions[thread.place] as Extract<Instruction, { op: 'text' }>;
      if (!instruction.isFree || !instruction.automaton.isBoundary(thread.inner)) {
        rest.push(thread);
        continue;
      }
      const room = Math.min(instruction.max - thread.length, vocabulary.plainMasks.length - 1);
      const allowed = vocabulary.plainMasks[room]!;
      for (let word = 0; word < mask.length; word += 1) mask[word]! |= allowed[word]!;
    }
    walk(vocabulary.others, state, mask);
    if (rest.length > 0) {
      const isAll = rest.length === state.threads.length;
      walk(vocabulary.plain, isAll ? state : { threads: rest, isEnd: false, next: new Map(), mask: null }, mask);
    }
    tidy();
    state.mask = mask;
    withMasks.push(state);
    return mask;
  }

  /** Allow every token of `tree` whose bytes can follow `state`; only the shorter ones where all are too much work. */
  function walk(tree: TokenTree, state: State, mask: Uint32Array): void {
    const all = mask.slice();
    if (walkInOrder(tree, state, all, 'deep')) mask.set(all);
    else walkInOrder(tree, state, mask, 'wide');
  }

  /**
   * Walk through `tree` until that is too much work; whether it came to the end. Deep is fast, wide has the shorter tokens
   * first, those of one byte always. What is known already counts like what is not, so that a mask does not depend on
   * what was asked before.
   */
  function walkInOrder(tree: TokenTree, state: State, mask: Uint32Array, order: 'deep' | 'wide'): boolean {
    walks += 1;
    const nodes = [0];
    const reached = [state];
    let moves = 0;
    for (let done = 0; done < nodes.length;) {
      if (moves > MAX_WALK_MOVES) return false;
      const node = order === 'deep' ? nodes.pop()! : nodes[done]!;
      const before = order === 'deep' ? reached.pop()! : reached[done]!;
      if (order === 'wide') done += 1;
      for (let child = tree.child[node]!; child !== 0; child = tree.sibling[child]!) {
        const move = advance(before, tree.byte[child]!);
        if (move.walk !== walks) {
          move.walk = walks;
          moves += move.cost;
        }
        const next = move.to;
        if (next === null) continue;
        if (tree.token[child]! >= 0) setBit(mask, tree.token[child]!);
        if (tree.child[child] === 0) continue;
        nodes.push(child);
        reached.push(next);
      }
    }
    return true;
  }

  /** Answers under way keep the states that they are in; they are only no longer shared. */
  function tidy(): void {
    if (keptThreads <= MAX_KEPT_THREADS && withMasks.length * vocabulary.maskWords * 4 <= MAX_MASK_BYTES) return;
    for (const state of withMasks) {
      state.mask = null;
      state.next.clear();
    }
    withMasks = [];
    states = new Map();
    frames = new Map();
    keptThreads = 0;
  }

  function progressAt(state: State): Progress {
    return {
      mask: () => maskOf(state),
      accept(id) {
        const bytes = vocabulary.bytesOf(id);
        if (bytes === null) return null;
        let next: State | null = state;
        for (const byte of bytes) {
          next = advance(next, byte).to;
          if (next === null) return null;
        }
        return progressAt(next);
      },
      isEnd: state.isEnd,
    };
  }

  return { start: () => progressAt(settle([{ place: program.start, inner: 0, length: 0, frame: null }]).state) };
}
