/**
 * Whose request goes next. With several API keys, no more requests are handed to the workers than they can run; those
 * beyond wait here, each key in a line of its own, and what becomes free goes to the key that has least. So a hundred
 * streams of one key do not stand in the way of another's one.
 */
import { ApiError } from '../errors.ts';
import type { Client } from './access.ts';

/** What one client may use. Null: as much as it likes. */
export interface ClientLimits {
  /** Requests at once, waiting ones included; one more is answered with 429. */
  readonly maxRequests: number | null;
  /** Requests in any minute; one more is answered with 429. */
  readonly requestsPerMinute: number | null;
}

/** Everything `createTurns` works with. */
export interface TurnsOptions {
  readonly limits: ClientLimits;
  /** Clients that are told apart. With one there is nobody to be fair to, and the workers' own queues do. */
  readonly clientCount: number;
  /** Rooms that run at once on the workers there are, and those that may wait beyond. */
  readonly capacity: () => { running: number; waiting: number };
  /** A request that has waited so long is answered with 503. */
  readonly maxWaitMs: number;
  readonly now: () => number;
}

/** A request that was let in. */
export interface Turn {
  /** It is over, or its client has left the line. */
  leave(): void;
}

/** The lines of one server. */
export interface Turns {
  /**
   * Let a request in that needs so many rooms. `start` is called when its turn comes, perhaps before this returns;
   * `refuse` when it has waited for too long.
   *
   * @throws ApiError 429 when the client is over its limits, 503 when its line is too long.
   */
  enter(client: Client, rooms: number, start: () => void, refuse: (error: ApiError) => void): Turn;
}

interface Waiter {
  readonly rooms: number;
  readonly start: () => void;
  readonly timer: NodeJS.Timeout;
}

interface Line {
  /** Requests let in and not over. */
  requests: number;
  /** Rooms of those whose turn has come. */
  running: number;
  readonly waiting: Set<Waiter>;
  /** Requests that may still come in this minute, and when that was counted. */
  allowance: number;
  countedMs: number;
  /** Number of its last turn; of two lines with as little, the one that was served longer ago goes next. */
  lastTurn: number;
}

const minuteMs = 60_000;

/** Lines of nobody yet. */
export function createTurns(options: TurnsOptions): Turns {
  const { limits, clientCount, capacity, now } = options;
  const lines = new Map<Client, Line>();
  const isFair = clientCount > 1;
  let turnCount = 0;

  function lineOf(client: Client): Line {
    const found = lines.get(client) ?? {
      requests: 0,
      running: 0,
      waiting: new Set<Waiter>(),
      allowance: limits.requestsPerMinute ?? 0,
      countedMs: now(),
      lastTurn: 0,
    };
    lines.set(client, found);
    return found;
  }

  function checkRate(line: Line): void {
    const { requestsPerMinute: rate } = limits;
    if (rate === null) return;
    const nowMs = now();
    line.allowance = Math.min(rate, line.allowance + ((nowMs - line.countedMs) * rate) / minuteMs);
    line.countedMs = nowMs;
    if (line.allowance < 1) {
      throw new ApiError('rate_limit_exceeded', `This API key may send ${rate} requests a minute.`, {
        retryAfterSeconds: ((1 - line.allowance) * minuteMs) / rate / 1000,
      });
    }
    line.allowance -= 1;
  }

  const runningRooms = () => [...lines.values()].reduce((sum, line) => sum + line.running, 0);

  /** A request larger than all there is runs alone. */
  function fits(rooms: number): boolean {
    const running = runningRooms();
    return !isFair || running === 0 || running + rooms <= capacity().running;
  }

  function begin(line: Line, rooms: number, start: () => void): void {
    line.running += rooms;
    turnCount += 1;
    line.lastTurn = turnCount;
    start();
  }

  /** Give what is free to those that wait. */
  function serve(): void {
    for (;;) {
      const next = [...lines.values()]
        .filter((line) => line.waiting.size > 0)
        .toSorted((a, b) => a.running - b.running || a.lastTurn - b.lastTurn)[0];
      const waiter = next?.waiting.values().next().value;
      if (next === undefined || waiter === undefined || !fits(waiter.rooms)) return;
      next.waiting.delete(waiter);
      clearTimeout(waiter.timer);
      begin(next, waiter.rooms, waiter.start);
    }
  }

  return {
    enter(client, rooms, start, refuse) {
      const line = lineOf(client);
      if (limits.maxRequests !== null && line.requests >= limits.maxRequests) {
        throw new ApiError('rate_limit_exceeded', `This API key may have ${limits.maxRequests} requests at once.`);
      }
      checkRate(line);
      let waiter: Waiter | null = null;
      let isOver = false;
      if (isFair && (line.waiting.size > 0 || !fits(rooms))) {
        // Each client has its share of the places to wait, so that one cannot take them all.
        if (line.waiting.size >= Math.max(1, Math.floor(capacity().waiting / clientCount))) {
          throw new ApiError('queue_full', 'The server is at its limit of requests; try again shortly.');
        }
        const timer = setTimeout(() => {
          turn.leave();
          refuse(new ApiError('queue_timeout', 'The request has waited too long for its turn.'));
        }, options.maxWaitMs);
        timer.unref(); // its connection holds the process, not the clock
        waiter = { rooms, start, timer };
        line.waiting.add(waiter);
      }
      line.requests += 1;
      const turn: Turn = {
        leave() {
          if (isOver) return;
          isOver = true;
          line.requests -= 1;
          if (waiter !== null && line.waiting.delete(waiter)) clearTimeout(waiter.timer);
          else line.running -= rooms;
          serve();
        },
      };
      if (waiter === null) begin(line, rooms, start);
      return turn;
    },
  };
}
