/** Rules that are broken on purpose, to show that the checker finds it. `npm run check -- --break NAME` runs one. */
import { stepDecode } from '../../scheduler/decode.ts';
import { release } from '../../scheduler/pages.ts';
import type { WorkerEffect } from '../../scheduler/types.ts';
import { REAL_RULES, type Rules } from './plan.ts';

/** A rule, how it is broken, and what must be found. */
export interface BrokenRule {
  rule: string;
  /** A set that finds it. */
  set: string;
  /** What is said of it. */
  finds: RegExp;
  rules: Rules;
}

export const BROKEN_RULES: Readonly<Record<string, BrokenRule>> = {
  'abort-once': {
    rule: 'ABORT is sent again until it is acknowledged',
    set: 'one room: cancel+drop',
    finds: /^L: nothing can happen, but there are .*no peer has acknowledged on d0/,
    rules: {
      ...REAL_RULES,
      stepDecode: (state, event) => withoutAborts(stepDecode(state, event), event.type),
    },
  },
  'early-release': {
    rule: 'pages are held until the last write under way has ended',
    set: 'one room: cancel',
    finds: /^I[13]/,
    rules: {
      ...REAL_RULES,
      stepDecode(state, event) {
        const effects = stepDecode(state, event);
        for (const room of state.live.values()) {
          if (room.receiver?.phase !== 'unwinding' || room.lease === null) continue;
          release(state.pools, room.lease);
          room.lease = null;
        }
        return effects;
      },
    },
  },
  'peer-failed-kills': {
    rule: 'after ready the prefill half no longer matters',
    set: 'one room: restartP',
    finds: /^I11/,
    rules: {
      ...REAL_RULES,
      stepDecode(state, event) {
        if (event.type !== 'router_message' || event.message.type !== 'peer_failed') return stepDecode(state, event);
        const { key } = event.message;
        return stepDecode(state, { ...event, message: { type: 'cancel', key, reason: 'peer_lost' } });
      },
    },
  },
};

/** The ABORTs of a tick or of a new link are those that are sent again. */
function withoutAborts(effects: WorkerEffect[], event: string): WorkerEffect[] {
  if (event !== 'tick' && event !== 'peer_up') return effects;
  return effects.filter((effect) => effect.type !== 'send' || effect.message.type !== 'ABORT');
}
