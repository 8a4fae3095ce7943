/** The room clock: how long a room may take until its first token. */

/** A prompt up to here gets the room's time once, a longer one as much for every so many tokens. */
const TIMED_TOKENS = 4096;

/** When the clock of a room rings that starts, or starts again, now. Computing counts, so long prompts have longer. */
export function roomDeadline(nowMs: number, tokenCount: number, limits: { readonly roomMs: number }): number {
  return nowMs + limits.roomMs * Math.max(1, tokenCount / TIMED_TOKENS);
}
