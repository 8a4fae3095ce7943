/** Reference logits in files, and the comparison of an engine's logits with them. */
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';

/** One golden file: what the independent numpy reference computed in f64. */
export interface Golden {
  readonly ids: readonly number[];
  /** Of every position. */
  readonly argmax: readonly number[];
  /** Largest logit minus the second largest, of every position. */
  readonly margin?: readonly number[];
  /** Whole rows of some positions. */
  readonly logits: Readonly<Record<string, readonly number[]>>;
  readonly mtp_argmax?: readonly number[];
  readonly mtp_logits?: Readonly<Record<string, readonly number[]>>;
}

export function readGolden<T = Golden>(path: string | URL): T {
  return JSON.parse(readFileSync(path, 'utf8')) as T;
}

/** What any engine must reach, and what an f32 engine should. */
export const GOLDEN_TOLERANCE = 2e-4;
/** Below this margin an error of GOLDEN_TOLERANCE on both sides may exchange the two largest. */
const DECIDED_MARGIN = 4e-4;

/**
 * Check the rows of positions 0, 1, … against the listed logits, and their argmax against every decided position.
 *
 * @returns the largest difference seen.
 */
export function assertGolden(
  rows: readonly ArrayLike<number>[],
  golden: Pick<Golden, 'logits' | 'argmax'> & { readonly margin?: readonly number[] | undefined },
  options: { tolerance?: number; undecided?: readonly number[] } = {},
): number {
  const { tolerance = GOLDEN_TOLERANCE, undecided = [] } = options;
  let worst = 0;
  let listed = 0;
  for (const [position, row] of rows.entries()) {
    const isDecided = golden.margin ? golden.margin[position]! > DECIDED_MARGIN : !undecided.includes(position);
    if (isDecided) assert.equal(argmax(row), golden.argmax[position], `argmax at position ${position}`);
    const expected = golden.logits[position];
    if (!expected) continue;
    listed += 1;
    for (const [token, value] of expected.entries()) {
      const difference = Math.abs(row[token]! - value);
      assert.ok(difference <= tolerance, `position ${position}, token ${token}: ${row[token]} instead of ${value}`);
      worst = Math.max(worst, difference);
    }
  }
  assert.ok(listed > 0, 'no listed position was compared');
  return worst;
}

/** Index of the largest value, the first of equals. */
export function argmax(values: ArrayLike<number>): number {
  let best = 0;
  for (let index = 1; index < values.length; index++) if (values[index]! > values[best]!) best = index;
  return best;
}
