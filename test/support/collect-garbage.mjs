/**
 * Preloaded into a process whose memory a test compares over time (with --expose-gc): SIGUSR2 collects garbage, so that
 * what is compared is what is held, not what V8 has not bothered to free yet.
 */
process.on('SIGUSR2', () => globalThis.gc());
