/** Seeded pseudo-random numbers for tests: same seed, same test. */

/** A generator of numbers in [0, 1) (mulberry32). Print the seed when a test fails. */
export function createPrng(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = state;
    mixed = Math.imul(mixed ^ (mixed >>> 15), mixed | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}

/** `count` token ids of the embedded model's plain vocabulary, BOS first. */
export function randomPrompt(random: () => number, count: number): number[] {
  // 2 to 1017 are plain tokens; 0 and 1 are BOS and EOS, the last six ids are the chat markers.
  return Array.from({ length: count }, (_, index) => (index === 0 ? 0 : 2 + Math.floor(random() * 1016)));
}
