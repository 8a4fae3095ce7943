/**
 * The answers of one worker that are held to something: which tokens may come next in each, before every step.
 *
 * A prefill worker asks for the first token only. A decode worker follows each answer from its first token, which it
 * replays, to its end; an answer that is interrupted meanwhile keeps its place, since nothing here depends on its pages.
 * Whatever goes wrong with a constraint leaves its answer no token, which ends that request and no other.
 */
import type { RoomKey, SamplingParams } from '../../transfer/messages.ts';
import type { Guide, GuideMaker } from './constraint.ts';

/** A row of a batch that samples. */
export interface SteeredRow {
  readonly key: RoomKey;
  readonly sampling: Pick<SamplingParams, 'constraint'>;
  /** The last token of the answer; null if it has none yet. */
  readonly token: number | null;
}

/** Follows the constrained answers of a worker. */
export interface Steering {
  /** The masks of those rows that are held to something. They stay as they are. */
  masks(rows: readonly SteeredRow[]): Map<RoomKey, Uint32Array>;
  /** A row's next token has been sampled. */
  took(key: RoomKey, token: number): void;
  /** Forget every room that is not live any more. */
  keep(live: { has(key: RoomKey): boolean }): void;
  /** Answers being followed. */
  readonly size: number;
}

/** Steer with `maker`; `onFault` is told what went wrong with a constraint, which ends its answer. */
export function createSteering(
  maker: GuideMaker,
  maskWords: number,
  onFault: (key: RoomKey, fault: unknown) => void,
): Steering {
  const guides = new Map<RoomKey, Guide>();
  const nothing = new Uint32Array(maskWords);
  const broken: Guide = { mask: () => nothing, accept: () => true };

  /** The guide of a new answer, behind the token that it begins with. */
  function begin({ key, token }: SteeredRow, constraint: string): Guide {
    try {
      const guide = maker.start(constraint);
      if (token === null || guide.accept(token)) return guide;
      onFault(key, new Error(`the first token, ${token}, is not allowed by the constraint`));
    } catch (error) {
      onFault(key, error);
    }
    return broken;
  }

  return {
    masks(rows) {
      const masks = new Map<RoomKey, Uint32Array>();
      for (const row of rows) {
        const { constraint } = row.sampling;
        if (constraint === undefined) continue;
        const guide = guides.get(row.key) ?? begin(row, constraint);
        // The first token of an answer is the only one that is sampled here, or it is replayed by who goes on.
        if (row.token !== null) guides.set(row.key, guide);
        masks.set(row.key, guide.mask());
      }
      return masks;
    },
    took(key, token) {
      const guide = guides.get(key);
      if (guide === undefined || guide.accept(token)) return;
      onFault(key, new Error(`token ${token} was sampled, which is not allowed by the constraint`));
      guides.set(key, broken);
    },
    keep(live) {
      for (const key of guides.keys()) if (!live.has(key)) guides.delete(key);
    },
    get size() {
      return guides.size;
    },
  };
}
