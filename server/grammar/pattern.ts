/**
 * Regular expressions of JSON schemas, as far as an automaton can follow them: no look-around, no back-references, no
 * word boundaries, and `^` and `$` at the ends only. Pure.
 */
import { ANY_CHARACTER, ANY_TEXT, type Pattern, type Range } from './automaton.ts';

/** A regular expression that is wrong, or says what is not supported. */
export class PatternError extends Error {
  override readonly name = 'PatternError';
}

const MAX_REPEAT = 1000;
const MAX_DEPTH = 32;
const MAX_CODE_POINT = 0x10ffff;

const DIGITS: Range[] = [[0x30, 0x39]];
const WORD: Range[] = [
  [0x30, 0x39],
  [0x41, 0x5a],
  [0x5f, 0x5f],
  [0x61, 0x7a],
];
const SPACES: Range[] = [
  [0x09, 0x0d],
  [0x20, 0x20],
  [0xa0, 0xa0],
  [0x1680, 0x1680],
  [0x2000, 0x200a],
  [0x2028, 0x2029],
  [0x202f, 0x202f],
  [0x205f, 0x205f],
  [0x3000, 0x3000],
  [0xfeff, 0xfeff],
];
const LINE_ENDS: Range[] = [
  [0x0a, 0x0a],
  [0x0d, 0x0d],
  [0x2028, 0x2029],
];
const CLASSES: Readonly<Record<string, readonly Range[]>> = {
  d: DIGITS,
  D: complement(DIGITS),
  w: WORD,
  W: complement(WORD),
  s: SPACES,
  S: complement(SPACES),
};
const CONTROLS: Readonly<Record<string, number>> = { t: 9, n: 10, v: 11, f: 12, r: 13, '0': 0 };
const DOT = complement(LINE_ENDS);

/** Every other character. */
function complement(ranges: readonly Range[]): Range[] {
  const sorted = ranges.toSorted((a, b) => a[0] - b[0]);
  const result: Range[] = [];
  let first = 0;
  for (const [low, high] of sorted) {
    if (low > first) result.push([first, low - 1]);
    first = Math.max(first, high + 1);
  }
  if (first <= MAX_CODE_POINT) result.push([first, MAX_CODE_POINT]);
  return result.flatMap(([low, high]) =>
    ANY_CHARACTER.flatMap(([from, to]): Range[] =>
      Math.max(low, from) <= Math.min(high, to) ? [[Math.max(low, from), Math.min(high, to)]] : [],
    ),
  );
}

/**
 * What a whole text must be so that the expression `source` matches somewhere in it.
 *
 * @throws PatternError saying what is wrong, in words that follow "the pattern".
 */
export function readPattern(source: string): Pattern {
  const characters = Array.from(source);
  let place = 0;
  const peek = (): string | undefined => characters[place];
  const startsWith = (text: string): boolean => characters.slice(place, place + text.length).join('') === text;

  function take(text: string): boolean {
    if (!startsWith(text)) return false;
    place += text.length;
    return true;
  }

  /** Alternatives of the whole expression, each with the anchors it has; or those of a group, which have none. */
  function readAlternatives(depth: number): Pattern[] {
    if (depth > MAX_DEPTH) throw new PatternError(`has groups more than ${MAX_DEPTH} deep`);
    const alternatives: Pattern[] = [];
    do {
      const isTop = depth === 0;
      const isAnchored = isTop && take('^');
      const parts: Pattern[] = isTop && !isAnchored ? [ANY_TEXT] : [];
      while (peek() !== undefined && peek() !== '|' && peek() !== ')' && peek() !== '$')
        parts.push(readQuantified(depth));
      const isEnded = isTop && take('$');
      if (isTop && !isEnded) parts.push(ANY_TEXT);
      if (peek() === '$' || (isEnded && peek() !== undefined && peek() !== '|')) {
        throw new PatternError('has $ where it is not at the end');
      }
      alternatives.push({ kind: 'sequence', parts });
    } while (take('|'));
    return alternatives;
  }

  function readQuantified(depth: number): Pattern {
    let part = readAtom(depth);
    for (;;) {
      const bounds = readQuantifier();
      if (bounds === null) return part;
      // Whether a repetition is greedy decides which match is found, not whether there is one.
      take('?');
      part = { kind: 'repeat', part, min: bounds[0], max: bounds[1] };
      if ('*+?{'.includes(peek() ?? 'none')) throw new PatternError('has a repetition of a repetition without a group');
    }
  }

  function readQuantifier(): [number, number] | null {
    if (take('*')) return [0, Infinity];
    if (take('+')) return [1, Infinity];
    if (take('?')) return [0, 1];
    if (peek() !== '{') return null;
    const match = /^\{(\d{1,6})(?:(,)(\d{0,6}))?\}/.exec(characters.slice(place, place + 16).join(''));
    if (match === null) throw new PatternError('has a { that begins no repetition: write \\{');
    place += match[0].length;
    const min = Number(match[1]);
    const max = match[2] === undefined ? min : match[3] === '' ? Infinity : Number(match[3]);
    if (max < min) throw new PatternError(`has the repetition ${match[0]}, whose bounds are the wrong way round`);
    if (min > MAX_REPEAT || (max !== Infinity && max > MAX_REPEAT)) {
      throw new PatternError(`has the repetition ${match[0]}: more than ${MAX_REPEAT} times is not supported`);
    }
    return [min, max];
  }

  function readAtom(depth: number): Pattern {
    const character = peek()!;
    if (character === '(') return readGroup(depth);
    if (character === '[') return { kind: 'set', ranges: readClass() };
    if ('*+?{'.includes(character)) throw new PatternError(`has ${character} with nothing before it to repeat`);
    if (character === '^') throw new PatternError('has ^ where it is not at the beginning');
    place += 1;
    if (character === '.') return { kind: 'set', ranges: DOT };
    if (character === '\\') return { kind: 'set', ranges: readEscape(false) };
    return { kind: 'set', ranges: [single(character)] };
  }

  function readGroup(depth: number): Pattern {
    place += 1;
    if (take('?')) {
      if (take('<') && peek() !== '=' && peek() !== '!') {
        while (peek() !== undefined && peek() !== '>') place += 1;
        if (!take('>')) throw new PatternError('has a group name without end');
      } else if (!take(':')) {
        throw new PatternError('looks ahead or behind, which is not supported');
      }
    }
    const parts = readAlternatives(depth + 1);
    if (!take(')')) throw new PatternError('has a group without end');
    return { kind: 'choice', parts };
  }

  function readClass(): readonly Range[] {
    place += 1;
    const isNegated = take('^');
    const ranges: Range[] = [];
    while (!take(']')) {
      const low = readClassMember();
      if (peek() !== '-' || characters[place + 1] === ']' || characters[place + 1] === undefined) {
        ranges.push(...low);
        continue;
      }
      place += 1;
      const high = readClassMember();
      const [[first, last] = [0, -1], [from, to] = [0, -1]] = [low[0], high[0]];
      if (low.length !== 1 || high.length !== 1 || first !== last || from !== to || from < first) {
        throw new PatternError('has a class with a range that is none');
      }
      ranges.push([first, from]);
    }
    return isNegated ? complement(ranges) : ranges;
  }

  function readClassMember(): readonly Range[] {
    const character = peek();
    if (character === undefined) throw new PatternError('has a class without end');
    place += 1;
    return character === '\\' ? readEscape(true) : [single(character)];
  }

  function readEscape(isInClass: boolean): readonly Range[] {
    const character = peek();
    if (character === undefined) throw new PatternError('ends with a \\');
    place += 1;
    const known = CLASSES[character];
    if (known !== undefined) return known;
    const control = CONTROLS[character];
    if (control !== undefined) return [[control, control]];
    if (character === 'b' && isInClass) return [[8, 8]];
    if (character === 'x') return [code(readHex(2))];
    if (character === 'u') {
      if (!take('{')) return [code(readHex(4))];
      let digits = '';
      while (peek() !== undefined && peek() !== '}') digits += characters[place++];
      if (!take('}') || !/^[0-9a-fA-F]{1,6}$/.test(digits)) throw new PatternError('has a \\u{ that is no code point');
      return [code(digits)];
    }
    if (/[1-9k]/.test(character)) throw new PatternError('refers back to a group, which is not supported');
    if (/[a-zA-Z]/.test(character)) throw new PatternError(`has \\${character}, which is not supported`);
    return [single(character)];
  }

  function readHex(length: number): string {
    const digits = characters.slice(place, place + length).join('');
    if (!new RegExp(`^[0-9a-fA-F]{${length}}$`).test(digits))
      throw new PatternError('has an escape with too few digits');
    place += length;
    return digits;
  }

  const parts = readAlternatives(0);
  if (place < characters.length) throw new PatternError(`has a ${peek()} that closes nothing`);
  return { kind: 'choice', parts };
}

function single(character: string): Range {
  const point = character.codePointAt(0)!;
  return [point, point];
}

function code(digits: string): Range {
  const point = Number.parseInt(digits, 16);
  if (point > MAX_CODE_POINT || (point >= 0xd800 && point <= 0xdfff)) {
    throw new PatternError(`has \\u${digits}, which is no character`);
  }
  return [point, point];
}
