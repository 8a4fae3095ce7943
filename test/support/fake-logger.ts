/** A process that logs more than its reader takes: reports, and when told to, does so again and ends. */
import { once } from 'node:events';
import { createLogger } from '../../server/log.ts';

const LINES = 20_000;
const filler = 'x'.repeat(1000);
const log = createLogger({ role: 'decode', level: 'info' });

function fill(): number {
  let longestMs = 0;
  for (let i = 0; i < LINES; i++) {
    const startMs = performance.now();
    log.info({ filler }, 'a line');
    longestMs = Math.max(longestMs, performance.now() - startMs);
  }
  return longestMs;
}

const longestMs = fill();
process.send!({ longestMs, bytes: LINES * filler.length });
await once(process, 'message'); // it has read, and stopped again
fill();
process.exit(0);
