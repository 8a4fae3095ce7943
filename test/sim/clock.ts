/** Simulated time: a queue of what happens when. Nothing else moves the clock, so a run is one sequence of events. */

export interface Clock {
  /** Now, in ms since the world began; has fractions. */
  readonly nowMs: number;
  /** Events run so far. */
  readonly eventCount: number;
  /** Run `run` after `delayMs`; of two events at one time the one asked for first is first. */
  after(delayMs: number, run: () => void): void;
  /** Run the next event. False if there is none before `untilMs`; the clock then stands at `untilMs`. */
  next(untilMs: number): boolean;
}

interface Event {
  atMs: number;
  order: number;
  run: () => void;
}

/** A clock at 0 with nothing to do. */
export function createClock(): Clock {
  /** A binary heap, the earliest event first. */
  const heap: Event[] = [];
  let nowMs = 0;
  let order = 0;
  let eventCount = 0;

  function isBefore(a: Event, b: Event): boolean {
    return a.atMs < b.atMs || (a.atMs === b.atMs && a.order < b.order);
  }

  function push(event: Event): void {
    let index = heap.push(event) - 1;
    while (index > 0) {
      const parent = (index - 1) >> 1;
      if (!isBefore(event, heap[parent]!)) break;
      heap[index] = heap[parent]!;
      index = parent;
    }
    heap[index] = event;
  }

  function pop(): Event {
    const first = heap[0]!;
    const last = heap.pop()!;
    if (heap.length === 0) return first;
    let index = 0;
    for (;;) {
      let child = 2 * index + 1;
      if (child >= heap.length) break;
      if (child + 1 < heap.length && isBefore(heap[child + 1]!, heap[child]!)) child++;
      if (!isBefore(heap[child]!, last)) break;
      heap[index] = heap[child]!;
      index = child;
    }
    heap[index] = last;
    return first;
  }

  return {
    get nowMs() {
      return nowMs;
    },
    get eventCount() {
      return eventCount;
    },
    after(delayMs, run) {
      push({ atMs: nowMs + Math.max(0, delayMs), order: order++, run });
    },
    next(untilMs) {
      if (heap.length === 0 || heap[0]!.atMs > untilMs) {
        nowMs = Math.max(nowMs, untilMs);
        return false;
      }
      const event = pop();
      nowMs = event.atMs;
      eventCount++;
      event.run();
      return true;
    },
  };
}
