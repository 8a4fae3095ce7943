/**
 * The world that is explored: router, prefill and decode worker made of the real step functions, and seven sockets.
 *
 * A world is a row of small numbers: one for each process (its whole state), one for each socket (its packets), flags and
 * what is left of each fault. Steps are pure, so what a process does in a state is computed once, checked once, and looked
 * up ever after; that is what makes millions of worlds affordable.
 *
 * Time is left out. What would happen after a while may happen at any moment, with two exceptions that keep worlds few:
 * a message is sent again only when nothing of its room is under way between the two (a copy that is too early is the fault
 * `duplicate`), and a deadline passes only as a fault, or where the loss of a CHUNK leaves nothing else to wait for.
 */
import type { Message, RoomKey } from '../../transfer/messages.ts';
import {
  allDecodeRooms,
  bornDecode,
  decodeInternals,
  decodePhase,
  deliverToDecode,
  normaliseDecode,
  runDecode,
  type DecodeProcess,
} from './decode-process.ts';
import { residueOf } from './invariants.ts';
import { FAULTS, NOW_MS, REAL_RULES, type Fault, type Plan, type Rules } from './plan.ts';
import {
  allPrefillRooms,
  bornPrefill,
  deliverToPrefill,
  normalisePrefill,
  prefillInternals,
  runPrefill,
  type PrefillProcess,
} from './prefill-process.ts';
import { NO_PAYLOAD, QUEUE, QUEUES, type Internal, type Packet, type Role, type Turn } from './process.ts';
import {
  abandonedClients,
  bornRouter,
  deliverToRouter,
  endClient,
  linkEvent,
  newClients,
  normaliseRouter,
  routerInternals,
  smallestSequence,
  submit,
  type RouterProcess,
} from './router-process.ts';
import { copyOf, createInterner, type Interner } from './values.ts';

/** Columns of a world: three processes, seven sockets from `SOCKETS` on, strays, flags, faults left. */
const ROUTER = 0;
const PREFILL = 1;
const DECODE = 2;
const SOCKETS = 3;
const STRAYS = SOCKETS + QUEUES.length;
const FLAGS = STRAYS + 1;
const LEFT = FLAGS + 1;
export const WORLD_WIDTH = LEFT + 1;

/** Flags: a bit for each link that is there, one for "an answer may end badly", and one for each room that lost data. */
const EXCUSED = 1 << 3;
const FIRST_KEY_BIT = 4;

/** Bits that count what is left of one fault. */
const FAULT_BITS = 2;

interface Link {
  between: readonly [Role, Role];
  queues: readonly number[];
}
const LINKS: readonly Link[] = [
  { between: ['router', 'prefill'], queues: [QUEUE.routerToPrefill, QUEUE.prefillToRouter] },
  { between: ['router', 'decode'], queues: [QUEUE.routerToDecode, QUEUE.decodeToRouter] },
  { between: ['decode', 'prefill'], queues: [QUEUE.decodeToPrefill, QUEUE.prefillToDecode, QUEUE.data] },
];
const DECODE_LINK = 1;
const PEER_LINK = 2;

const FROM: Role[] = QUEUES.map((name) => name.split('>')[0] as Role);
const TO: Role[] = QUEUES.map((name) => name.split(/[> ]/)[1] as Role);
const LINK_OF: number[] = QUEUES.map((_, queue) => LINKS.findIndex(({ queues }) => queues.includes(queue)));

/** What a process does on an event: its next state and what it sends. Or what is wrong with it. */
interface Step {
  next: number;
  sent: { queue: number; to: string; packet: number }[];
  lateFailure: string | null;
  error: string | null;
}

/** All states of one process that were seen, and all steps from them. */
interface Store<Process> {
  states: Interner<Process>;
  internals: Internal<Process>[][];
  steps: Map<string | number, Step>[];
  step(id: number, name: string | number, run: (process: Process, turn: Turn) => void): Step;
  add(process: Process): number;
}

/** What kind of transition: of a process by itself, or a message, client, link or mark; or a fault. */
export type Kind = 'message' | 'client' | 'link' | 'mark' | 'fault' | Internal<never>['kind'];

/** A transition: who does what. */
export type Emit = (kind: Kind, who: string, what: string) => void;

export interface Model {
  plan: Plan;
  initial(): Int32Array;
  /**
   * Every transition from `world`: writes each successor into `next`, then calls `emit`. What is no fault comes first, in
   * the order of the fair schedule. Throws `Broken` where an invariant does not hold.
   */
  expand(world: Int32Array, next: Int32Array, emit: Emit): void;
  /** Why a world in which nothing can happen is not at rest; empty if it is. */
  residue(world: Int32Array): string[];
  /** The world with a canary's request; null if the router has no pair to give it. */
  withCanary(world: Int32Array): Int32Array | null;
  /** Whether the canary has its answer. */
  isCanaryServed(world: Int32Array): boolean;
  /** Cells of the tables that were reached, as `process | phase | event`. */
  seen: Set<string>;
  /** States of each process that were seen, and packets. */
  sizes(): { router: number; prefill: number; decode: number; packets: number; steps: number };
  /** All states of a worker that were seen: material for tests. */
  prefillStates(): PrefillProcess[];
  decodeStates(): DecodeProcess[];
}

/** An invariant does not hold after the transition that was being made. */
export class Broken extends Error {
  readonly who: string;
  readonly doing: string;
  constructor(who: string, doing: string, what: string) {
    super(what);
    this.who = who;
    this.doing = doing;
  }
}

/** The model of a plan under rules: the real ones, unless a test breaks some. */
export function createModel(plan: Plan, rules: Rules = REAL_RULES): Model {
  const seen = new Set<string>();
  let stepCount = 0;
  /** By state of the router: what it would announce. */
  const marks: number[] = [];
  const packets = createInterner<Packet>();
  const packetKeys: number[] = [];
  const packetNames: string[] = [];
  const keyBits = new Map<RoomKey, number>();
  const queues = createInterner<number[]>();
  const queueKeys: number[] = [];
  const queueBytes: number[] = [];
  /** By queue: the queue without its head; by queue and packet: the queue with it at its end. */
  const popped: number[] = [];
  const pushed: Map<number, number>[] = [];
  /** Packets that left the order of their socket, as `8 * packet + queue`: they arrive at any time. */
  const strays = createInterner<number[]>();
  internQueue([]);
  strays.intern([]);

  function bitOf(key: RoomKey): number {
    let bit = keyBits.get(key);
    if (bit === undefined) {
      if (FIRST_KEY_BIT + keyBits.size > 30) throw new Error('more rooms and attempts than flags');
      bit = 1 << (FIRST_KEY_BIT + keyBits.size);
      keyBits.set(key, bit);
    }
    return bit;
  }

  function internPacket(packet: Packet): number {
    const { id, isNew } = packets.intern(packet);
    if (isNew) {
      const { message } = packet;
      let bits = 0;
      if ('key' in message) bits = bitOf(message.key);
      else if (message.type === 'tokens') for (const { key } of message.rows) bits |= bitOf(key);
      packetKeys.push(bits);
      packetNames.push(describe(packet));
    }
    return id;
  }

  function internQueue(content: number[]): number {
    const { id, isNew } = queues.intern(content);
    if (isNew) {
      let bits = 0;
      let bytes = 0;
      for (const packet of content) {
        bits |= packetKeys[packet] as number;
        const { payload, isCopy } = packets.get(packet);
        if (!isCopy) bytes += payload.length;
      }
      queueKeys.push(bits);
      queueBytes.push(bytes);
      pushed.push(new Map());
      popped[id] = content.length > 1 ? internQueue(content.slice(1)) : 0;
    }
    return id;
  }

  function createStore<Process>(
    normalise: (process: Process) => void,
    internalsOf: (process: Process) => Internal<Process>[],
  ): Store<Process> {
    const states = createInterner<Process>();
    const store: Store<Process> = {
      states,
      internals: [],
      steps: [],
      add(process) {
        normalise(process);
        const { id, isNew } = states.intern(process);
        if (isNew) {
          store.internals.push(internalsOf(process));
          store.steps.push(new Map());
        }
        return id;
      },
      step(id, name, run) {
        const known = (store.steps[id] as Map<string | number, Step>).get(name);
        if (known !== undefined) return known;
        stepCount++;
        const process = copyOf(states.get(id));
        const turn: Turn = { plan, rules, sent: [], lateFailure: null, seen };
        let step: Step;
        try {
          run(process, turn);
          const sent = turn.sent.map(({ queue, to, packet }) => ({ queue, to, packet: internPacket(packet) }));
          step = { next: store.add(process), sent, lateFailure: turn.lateFailure, error: null };
        } catch (error) {
          step = { next: id, sent: [], lateFailure: null, error: (error as Error).message };
        }
        (store.steps[id] as Map<string | number, Step>).set(name, step);
        return step;
      },
    };
    return store;
  }

  const routers = createStore<RouterProcess>(normaliseRouter, routerInternals);
  const prefills = createStore<PrefillProcess>(normalisePrefill, prefillInternals);
  const decodes = createStore<DecodeProcess>(normaliseDecode, decodeInternals);

  const routerOf = (world: Int32Array): RouterProcess => routers.states.get(world[ROUTER] as number);
  const prefillOf = (world: Int32Array): PrefillProcess => prefills.states.get(world[PREFILL] as number);
  const decodeOf = (world: Int32Array): DecodeProcess => decodes.states.get(world[DECODE] as number);

  function epochIn(world: Int32Array, role: Role): string {
    if (role === 'router') return routerOf(world).epoch;
    return (role === 'prefill' ? prefillOf(world) : decodeOf(world)).self.epoch;
  }

  /** The life that `side` believes to have at the other end of a link; null if it knows of none. */
  function believedBy(world: Int32Array, side: Role, link: number): string | null {
    if (side === 'router') return routerOf(world).linked[link === DECODE_LINK ? 'decode' : 'prefill'];
    const worker = side === 'prefill' ? prefillOf(world) : decodeOf(world);
    if (link !== PEER_LINK) return worker.router;
    return worker.state.desk.peers.get(side === 'prefill' ? 'd0' : 'p0') ?? null;
  }

  // ---- transitions write into `to`

  /** Let a process step; what it sends goes out if there is a link to the life it is meant for. */
  function run<Process>(
    to: Int32Array,
    store: Store<Process>,
    column: number,
    who: string,
    name: string | number,
    act: (process: Process, turn: Turn) => void,
  ): void {
    const step = store.step(to[column] as number, name, act);
    if (step.error !== null) throw new Broken(who, sayStep(store, to[column] as number, name), step.error);
    if (step.lateFailure !== null && step.lateFailure !== 'out_of_memory' && ((to[FLAGS] as number) & EXCUSED) === 0) {
      throw new Broken(
        who,
        sayStep(store, to[column] as number, name),
        `I11: an answer ended with ${step.lateFailure} after its first token`,
      );
    }
    to[column] = step.next;
    for (const { queue, to: life, packet } of step.sent) {
      if (((to[FLAGS] as number) & (1 << (LINK_OF[queue] as number))) === 0) continue;
      if (epochIn(to, TO[queue] as Role) !== life) continue;
      push(to, queue, packet);
    }
  }

  /** The name of a step in words: a step is named by a packet and its socket, or by what a process does by itself. */
  function sayStep<Process>(store: Store<Process>, id: number, name: string | number): string {
    if (typeof name === 'number') return packetNames[Math.floor(name / 8)] as string;
    const index = /^internal (\d+)$/.exec(name)?.[1];
    return index === undefined ? name : (store.internals[id]?.[Number(index)]?.label as string);
  }

  function contentOf(world: Int32Array, queue: number): readonly number[] {
    return queues.get(world[SOCKETS + queue] as number);
  }

  function push(to: Int32Array, queue: number, packet: number): void {
    const column = SOCKETS + queue;
    const before = to[column] as number;
    const known = (pushed[before] as Map<number, number>).get(packet);
    to[column] = known ?? internQueue([...queues.get(before), packet]);
    if (known === undefined) (pushed[before] as Map<number, number>).set(packet, to[column] as number);
  }

  function pop(to: Int32Array, queue: number): void {
    to[SOCKETS + queue] = popped[to[SOCKETS + queue] as number] as number;
  }

  /** A socket is closed with all that is in it. */
  function clear(to: Int32Array, queue: number): void {
    to[SOCKETS + queue] = 0;
    if (straysIn(to).length > 0) {
      setStrays(
        to,
        straysIn(to).filter((stray) => (stray & 7) !== queue),
      );
    }
  }

  /** Hand a packet to the process at the end of its socket. */
  function deliver(to: Int32Array, queue: number, packet: number): void {
    const name = packet * 8 + queue;
    const content = packets.get(packet);
    switch (TO[queue]) {
      case 'router': {
        const role = FROM[queue] as 'prefill' | 'decode';
        run(to, routers, ROUTER, 'router', name, (at, turn) => deliverToRouter(at, content, role, turn));
        break;
      }
      case 'prefill': {
        const isFromRouter = FROM[queue] === 'router';
        run(to, prefills, PREFILL, 'prefill', name, (at, turn) => deliverToPrefill(at, content, isFromRouter, turn));
        break;
      }
      case 'decode': {
        const isFromRouter = FROM[queue] === 'router';
        run(to, decodes, DECODE, 'decode', name, (at, turn) => deliverToDecode(at, content, isFromRouter, turn));
        break;
      }
      default:
        throw new Error(`nobody reads ${QUEUES[queue]}`);
    }
  }

  /** A side gives a link up: it closes its sockets with all that is in them, and its process is told. */
  function lose(to: Int32Array, side: Role, link: number): void {
    const epoch = believedBy(to, side, link) as string;
    for (const queue of (LINKS[link] as Link).queues) if (TO[queue] === side) clear(to, queue);
    if (side === 'router') {
      const role = link === DECODE_LINK ? 'decode' : 'prefill';
      run(to, routers, ROUTER, side, `lose ${role}`, (at, turn) => {
        at.linked[role] = null;
        linkEvent(at, 'worker_lost', epoch, turn);
      });
    } else if (link === PEER_LINK) {
      if (side === 'prefill') {
        const event = { type: 'peer_lost', peer: { name: 'd0', epoch }, nowMs: NOW_MS } as const;
        run(to, prefills, PREFILL, side, 'lose decode', (at, turn) =>
          runPrefill(at, event, turn, allPrefillRooms(at, 'peer_lost')),
        );
      } else {
        const event = { type: 'peer_lost', peer: { name: 'p0', epoch }, nowMs: NOW_MS } as const;
        run(to, decodes, DECODE, side, 'lose prefill', (at, turn) =>
          runDecode(at, event, turn, allDecodeRooms(at, 'peer_lost')),
        );
      }
    } else {
      runWorker(to, side, 'lose router', (at, notify) => {
        at.router = null;
        at.lostRouters.push(epoch);
        notify({ type: 'router_lost', router: epoch, isDead: false, nowMs: NOW_MS }, 'router_lost');
      });
    }
  }

  type RouterLinkEvent =
    | { type: 'router_up'; router: string; nowMs: number }
    | { type: 'router_lost'; router: string; isDead: boolean; nowMs: number };

  /** Step a worker, whichever, on events of its link to the router. */
  function runWorker(
    to: Int32Array,
    side: 'prefill' | 'decode',
    name: string,
    act: (at: PrefillProcess | DecodeProcess, notify: (event: RouterLinkEvent, cell: string) => void) => void,
  ): void {
    if (side === 'prefill') {
      run(to, prefills, PREFILL, side, name, (at, turn) =>
        act(at, (event, cell) => runPrefill(at, event, turn, allPrefillRooms(at, cell))),
      );
    } else {
      run(to, decodes, DECODE, side, name, (at, turn) =>
        act(at, (event, cell) => runDecode(at, event, turn, allDecodeRooms(at, cell))),
      );
    }
  }

  /** A worker's link to the router's life is there, as server/worker.ts hears of it. */
  function greetRouter(to: Int32Array, side: 'prefill' | 'decode'): void {
    const { epoch } = routerOf(to);
    runWorker(to, side, `greet ${epoch}`, (at, notify) => {
      // A later life says HELLO while the link to the earlier one still seems to be there.
      if (at.router !== null && at.router !== epoch) {
        notify({ type: 'router_lost', router: at.router, isDead: true, nowMs: NOW_MS }, 'router_lost');
      }
      at.router = epoch;
      notify({ type: 'router_up', router: epoch, nowMs: NOW_MS }, 'router_up');
      for (const earlier of at.lostRouters) {
        if (earlier === epoch) continue;
        notify({ type: 'router_lost', router: earlier, isDead: true, nowMs: NOW_MS }, 'router_lost');
      }
      at.lostRouters = [];
    });
  }

  function greetWorker(to: Int32Array, role: 'prefill' | 'decode'): void {
    const epoch = epochIn(to, role);
    run(to, routers, ROUTER, 'router', `greet ${epoch}`, (at, turn) => {
      at.linked[role] = epoch;
      linkEvent(at, 'worker_up', epoch, turn);
    });
  }

  function greetPeers(to: Int32Array): void {
    const prefill = prefillOf(to).self;
    const decode = decodeOf(to).self;
    run(to, prefills, PREFILL, 'prefill', `greet ${decode.epoch}`, (at, turn) =>
      runPrefill(at, { type: 'peer_up', peer: decode, nowMs: NOW_MS }, turn, allPrefillRooms(at, 'peer_up')),
    );
    run(to, decodes, DECODE, 'decode', `greet ${prefill.epoch}`, (at, turn) =>
      runDecode(at, { type: 'peer_up', peer: prefill, nowMs: NOW_MS }, turn, allDecodeRooms(at, 'peer_up')),
    );
  }

  /** Both sides of a link hear that it is there (again). */
  function greet(to: Int32Array, link: number): void {
    to[FLAGS] = (to[FLAGS] as number) | (1 << link);
    if (link === PEER_LINK) return greetPeers(to);
    const role = link === DECODE_LINK ? 'decode' : 'prefill';
    greetRouter(to, role);
    greetWorker(to, role);
  }

  function isUp(world: Int32Array, link: number): boolean {
    return ((world[FLAGS] as number) & (1 << link)) !== 0;
  }

  function isUnderWay(world: Int32Array, bit: number): boolean {
    for (let queue = 0; queue < QUEUES.length; queue++) {
      if (((queueKeys[world[SOCKETS + queue] as number] as number) & bit) !== 0) return true;
    }
    return straysIn(world).some((stray) => {
      const packet = stray >> 3;
      return ((packetKeys[packet] as number) & bit) !== 0 && !packets.get(packet).isCopy;
    });
  }

  function straysIn(world: Int32Array): readonly number[] {
    return strays.get(world[STRAYS] as number);
  }

  function setStrays(to: Int32Array, content: number[]): void {
    to[STRAYS] = strays.intern(content).id;
  }

  function addStray(to: Int32Array, queue: number, packet: number): void {
    setStrays(
      to,
      [...straysIn(to), 8 * packet + queue].sort((left, right) => left - right),
    );
  }

  /** An engine works on the transfer of a room. */
  function isWorkedOn(world: Int32Array, key: RoomKey): boolean {
    const { reads, batch } = prefillOf(world);
    if (batch?.chunks.some((chunk) => chunk.key === key) || reads.some((read) => read.key === key)) return true;
    return decodeOf(world).writes.some((write) => write.key === key);
  }

  function leftOf(world: Int32Array, fault: Fault): number {
    return ((world[LEFT] as number) >> (FAULT_BITS * FAULTS.indexOf(fault))) & ((1 << FAULT_BITS) - 1);
  }

  function spend(to: Int32Array, fault: Fault): void {
    to[LEFT] = (to[LEFT] as number) - (1 << (FAULT_BITS * FAULTS.indexOf(fault)));
  }

  function excuse(to: Int32Array): void {
    to[FLAGS] = (to[FLAGS] as number) | EXCUSED;
  }

  /** A process dies: what was on the way to it is gone; what it had sent may still arrive. */
  function die(to: Int32Array, role: Role): void {
    for (const [index, { between, queues: sockets }] of LINKS.entries()) {
      if (!between.includes(role)) continue;
      to[FLAGS] = (to[FLAGS] as number) & ~(1 << index);
      for (const queue of sockets) if (TO[queue] === role) clear(to, queue);
    }
  }

  function expand(world: Int32Array, next: Int32Array, emit: Emit): void {
    const flags = world[FLAGS] as number;
    const start = (): void => next.set(world);

    for (let queue = 0; queue < QUEUES.length; queue++) {
      const head = contentOf(world, queue)[0];
      if (head === undefined || isBehindStray(world, queue, head)) continue;
      start();
      pop(next, queue);
      deliver(next, queue, head);
      check(next, TO[queue] as Role, packetNames[head] as string);
      emit('message', TO[queue] as string, packetNames[head] as string);
    }

    expandInternals(world, next, emit, routers, ROUTER, 'router', 'engine');
    expandInternals(world, next, emit, prefills, PREFILL, 'prefill', 'engine');
    expandInternals(world, next, emit, decodes, DECODE, 'decode', 'engine');

    const { linked, clients } = routerOf(world);
    // Clients come in order: which of two equal ones is first makes no difference.
    const newcomer = clients.findIndex(({ phase }) => phase === 'new');
    if (newcomer >= 0 && linked.prefill !== null && linked.decode !== null) {
      start();
      run(next, routers, ROUTER, 'router', `submit ${newcomer}`, (at, turn) => submit(at, newcomer, turn));
      emit('client', 'client', `${newcomer} asks`);
    }

    for (const [index, { between }] of LINKS.entries()) {
      if ((flags & (1 << index)) !== 0) continue;
      expandLink(world, next, emit, index, between);
    }

    for (const stray of straysIn(world)) {
      const queue = stray & 7;
      const packet = stray >> 3;
      start();
      const rest = straysIn(world).slice();
      rest.splice(rest.indexOf(stray), 1);
      setStrays(next, rest);
      deliver(next, queue, packet);
      check(next, TO[queue] as Role, packetNames[packet] as string);
      emit('message', TO[queue] as string, `${packetNames[packet]} (late)`);
    }

    for (const kind of ['stall', 'room', 'lease', 'resend'] as const) {
      expandInternals(world, next, emit, routers, ROUTER, 'router', kind);
      expandInternals(world, next, emit, prefills, PREFILL, 'prefill', kind);
      expandInternals(world, next, emit, decodes, DECODE, 'decode', kind);
    }
    expandMarks(world, next, emit);
    expandFaults(world, next, emit);
  }

  /** What says that no more units come is never overtaken by one: a connection keeps its order. */
  function isBehindStray(world: Int32Array, queue: number, packet: number): boolean {
    if (queue !== QUEUE.data || straysIn(world).length === 0) return false;
    const { type } = packets.get(packet).message;
    if (type !== 'ABORT' && type !== 'ABORT_ACK') return false;
    return straysIn(world).some((stray) => (stray & 7) === queue && !packets.get(stray >> 3).isCopy);
  }

  /** Whether what a process may do by itself may happen now without being a fault. */
  function isFree(world: Int32Array, role: Role, { kind, key, to }: Internal<never>): boolean {
    switch (kind) {
      case 'engine':
        return true;
      case 'resend': {
        const link = LINKS.findIndex(({ between }) => between.includes(role) && between.includes(to as Role));
        return isUp(world, link) && key !== null && !isUnderWay(world, bitOf(key)) && !isWorkedOn(world, key);
      }
      case 'stall':
      case 'room':
        // Units are sent once: when one is lost, these clocks are all that is left.
        return role === 'decode' && key !== null && ((world[FLAGS] as number) & bitOf(key)) !== 0;
      case 'lease': {
        const other = role === 'prefill' ? decodeOf(world).self : prefillOf(world).self;
        const worker = role === 'prefill' ? prefillOf(world) : decodeOf(world);
        const isDead = worker.state.desk.closing.unwinds.get(key as RoomKey)?.peer.epoch !== other.epoch;
        return isDead || (!isUp(world, PEER_LINK) && !decodeOf(world).wantsLink);
      }
      case 'status':
      case 'request':
        return false;
      default:
        throw new Error(`unknown kind ${String(kind satisfies never)}`);
    }
  }

  function expandInternals<Process>(
    world: Int32Array,
    next: Int32Array,
    emit: Emit,
    store: Store<Process>,
    column: number,
    role: Role,
    kind: Internal<Process>['kind'],
    isFault = false,
  ): void {
    const internals = store.internals[world[column] as number] as Internal<Process>[];
    for (let index = 0; index < internals.length; index++) {
      const internal = internals[index] as Internal<Process>;
      if (internal.kind !== kind || isFault === isFree(world, role, internal as Internal<never>)) continue;
      next.set(world);
      if (isFault) spend(next, kind === 'status' ? 'status' : 'expiry');
      if (kind === 'request') excuse(next);
      run(next, store, column, role, `internal ${index}`, (at, turn) => internal.run(at, turn));
      check(next, role, internal.label);
      emit(isFault ? 'fault' : kind, role, internal.label);
    }
  }

  function expandLink(
    world: Int32Array,
    next: Int32Array,
    emit: Emit,
    link: number,
    between: readonly [Role, Role],
  ): void {
    const believers = between.filter((side) => believedBy(world, side, link) !== null);
    for (const side of believers) {
      next.set(world);
      lose(next, side, link);
      const other = between[side === between[0] ? 1 : 0];
      check(next, side, `loses ${other}`);
      emit('link', side, `loses ${other}`);
    }
    const [first, second] = between;
    if (link === PEER_LINK) {
      if (believers.length > 0 || !decodeOf(world).wantsLink) return;
    } else if (
      believers.includes('router') ||
      (believers.length > 0 && believedBy(world, second, link) === routerOf(world).epoch)
    ) {
      return; // each side ends the old link before there is a new one
    }
    next.set(world);
    for (const queue of (LINKS[link] as Link).queues) clear(next, queue);
    greet(next, link);
    check(next, first, `is linked to ${second}`);
    emit('link', first, `is linked to ${second}`);
  }

  function expandMarks(world: Int32Array, next: Int32Array, emit: Emit): void {
    const router = routerOf(world);
    const mark = (marks[world[ROUTER] as number] ??= smallestSequence(router));
    for (const role of ['prefill', 'decode'] as const) {
      const link = role === 'prefill' ? 0 : DECODE_LINK;
      const queue = role === 'prefill' ? QUEUE.routerToPrefill : QUEUE.routerToDecode;
      const worker = role === 'prefill' ? prefillOf(world) : decodeOf(world);
      const known = worker.state.desk.closing.marks.get(router.epoch) ?? 0;
      const isLinked = isUp(world, link) && worker.router === router.epoch && router.linked[role] !== null;
      if (!isLinked || mark <= known) continue;
      if (contentOf(world, queue).some((packet) => packets.get(packet).message.type === 'mark')) continue;
      next.set(world);
      const message: Message = { type: 'mark', smallestSequence: mark };
      push(next, queue, internPacket({ message, payload: NO_PAYLOAD, isCopy: false }));
      emit('mark', 'router', `tells its mark to ${role}`);
    }
  }

  function expandFaults(world: Int32Array, next: Int32Array, emit: Emit): void {
    const { clients } = routerOf(world);
    for (const [fault, type] of [
      ['cancel', 'client_lost'],
      ['stop', 'client_cancel'],
    ] as const) {
      if (leftOf(world, fault) === 0) continue;
      for (const [index, { phase }] of clients.entries()) {
        if (phase !== 'open') continue;
        next.set(world);
        spend(next, fault);
        run(next, routers, ROUTER, 'router', `${type} ${index}`, (at, turn) => endClient(at, index, type, turn));
        emit('fault', 'client', `${index} ${fault === 'cancel' ? 'leaves' : 'has its stop string'}`);
      }
    }
    expandSocketFaults(world, next, emit);
    if (leftOf(world, 'expiry') > 0) {
      for (const kind of ['stall', 'room', 'request', 'lease'] as const) {
        expandInternals(world, next, emit, routers, ROUTER, 'router', kind, true);
        expandInternals(world, next, emit, prefills, PREFILL, 'prefill', kind, true);
        expandInternals(world, next, emit, decodes, DECODE, 'decode', kind, true);
      }
    }
    if (leftOf(world, 'status') > 0) {
      expandInternals(world, next, emit, prefills, PREFILL, 'prefill', 'status', true);
      expandInternals(world, next, emit, decodes, DECODE, 'decode', 'status', true);
    }
    expandLinkFaults(world, next, emit);
    expandRestarts(world, next, emit);
  }

  function expandSocketFaults(world: Int32Array, next: Int32Array, emit: Emit): void {
    for (let queue = 0; queue < QUEUES.length; queue++) {
      const head = contentOf(world, queue)[0];
      if (head === undefined) continue;
      const { message, payload } = packets.get(head);
      const name = packetNames[head] as string;
      if (leftOf(world, 'drop') > 0) {
        next.set(world);
        spend(next, 'drop');
        pop(next, queue);
        if (message.type === 'CHUNK') next[FLAGS] = (next[FLAGS] as number) | (packetKeys[head] as number);
        if (message.type === 'tokens') excuse(next);
        emit('fault', 'network', `loses ${name}`);
      }
      if (leftOf(world, 'duplicate') > 0 && !isBehindStray(world, queue, head)) {
        next.set(world);
        spend(next, 'duplicate');
        pop(next, queue);
        addStray(next, queue, internPacket({ message, payload, isCopy: true }));
        deliver(next, queue, head);
        check(next, TO[queue] as Role, name);
        emit('fault', 'network', `delivers ${name}, and will again`);
      }
      if (leftOf(world, 'reorder') > 0) {
        next.set(world);
        spend(next, 'reorder');
        pop(next, queue);
        addStray(next, queue, head);
        if (queue === QUEUE.decodeToRouter) excuse(next);
        emit('fault', 'network', `holds ${name} back`);
      }
    }
  }

  function expandLinkFaults(world: Int32Array, next: Int32Array, emit: Emit): void {
    for (const [link, { between, queues: sockets }] of LINKS.entries()) {
      if (!isUp(world, link)) continue;
      const name = between.join(' and ');
      if (leftOf(world, 'reset') > 0) {
        next.set(world);
        spend(next, 'reset');
        if (link === DECODE_LINK) excuse(next);
        // Control and data are connections of their own; a lost unit is the fault `drop`.
        for (const queue of sockets) if (queue !== QUEUE.data) clear(next, queue);
        greet(next, link);
        check(next, between[0], 'reset');
        emit('fault', name, 'have a new connection');
      }
      if (leftOf(world, 'unlink') > 0) {
        next.set(world);
        spend(next, 'unlink');
        if (link === DECODE_LINK) excuse(next);
        next[FLAGS] = (next[FLAGS] as number) & ~(1 << link);
        emit('fault', name, 'hear nothing of each other for a lease');
      }
    }
  }

  function expandRestarts(world: Int32Array, next: Int32Array, emit: Emit): void {
    const lifeAfter = (fault: Fault): number => 2 + (plan.faults[fault] ?? 0) - leftOf(world, fault);
    if (leftOf(world, 'restartP') > 0) {
      next.set(world);
      next[PREFILL] = prefills.add(bornPrefill(plan, lifeAfter('restartP')));
      die(next, 'prefill');
      spend(next, 'restartP');
      emit('fault', 'prefill', 'dies and comes back');
    }
    if (leftOf(world, 'restartD') > 0) {
      next.set(world);
      next[DECODE] = decodes.add(bornDecode(plan, lifeAfter('restartD')));
      die(next, 'decode');
      spend(next, 'restartD');
      excuse(next);
      emit('fault', 'decode', 'dies and comes back');
    }
    if (leftOf(world, 'restartR') > 0) {
      next.set(world);
      const clients = abandonedClients(routerOf(world).clients);
      next[ROUTER] = routers.add(bornRouter(lifeAfter('restartR'), clients));
      die(next, 'router');
      spend(next, 'restartR');
      emit('fault', 'router', 'dies and comes back');
    }
  }

  /** I8, which takes both sides: bytes under way within the buffer, credit no larger than what was granted. */
  function check(world: Int32Array, who: string, doing: string): void {
    const decode = decodeOf(world);
    let bytes = queueBytes[world[SOCKETS + QUEUE.data] as number] as number;
    for (const stray of straysIn(world)) {
      const { payload, isCopy } = packets.get(stray >> 3);
      if (!isCopy) bytes += payload.length;
    }
    for (const { payload } of decode.writes) bytes += payload.length;
    if (bytes > plan.peerBufferBytes) throw new Broken(who, doing, `I8: ${bytes} bytes are under way to d0`);
    for (const [key, { sender }] of prefillOf(world).state.live) {
      const receiver = decode.state.live.get(key)?.receiver;
      if (receiver == null || sender.peer.epoch !== decode.self.epoch) continue;
      if (sender.creditBytes > receiver.grantedBytes) {
        throw new Broken(
          who,
          doing,
          `I8: p0 has credit of ${sender.creditBytes} bytes for ${key}, granted were ${receiver.grantedBytes}`,
        );
      }
    }
  }

  /** All that comes of messages and links alone: every room gets as far as it can without an engine. */
  function withoutEngines(world: Int32Array): Int32Array {
    for (let at: Int32Array = world; ;) {
      const next = new Int32Array(WORLD_WIDTH);
      let first: Int32Array | null = null;
      expand(at, next, (kind) => {
        if (kind === 'message' || kind === 'link') first ??= next.slice();
      });
      if (first === null) return at;
      at = first;
    }
  }

  /** The world after the first transition that is wanted. */
  function choose(world: Int32Array, isWanted: (kind: Kind, name: string) => boolean): Int32Array {
    const next = new Int32Array(WORLD_WIDTH);
    let found: Int32Array | null = null;
    expand(world, next, (kind, who, what) => {
      if (
        found === null &&
        !next.every((value, column) => value === world[column]) &&
        isWanted(kind, `${who}: ${what}`)
      ) {
        found = next.slice();
      }
    });
    if (found === null) throw new Error('the setup of this plan does not lead where it should');
    return found;
  }

  /** Where the exploration begins. */
  function setUp(world: Int32Array, setup: readonly string[]): Int32Array {
    let at: Int32Array = world.slice();
    const left = world[LEFT] as number;
    for (const wanted of setup) {
      at = withoutEngines(at);
      const phase = /^until decode is (.*)$/.exec(wanted)?.[1];
      if (phase === undefined) {
        at[LEFT] = -1 >>> 1; // faults of the setup are free
        at = choose(at, (_kind, name) => name === wanted);
        at[LEFT] = left;
        continue;
      }
      while (![...decodeOf(at).state.live.keys()].some((key) => decodePhase(decodeOf(at).state, key) === phase)) {
        at = choose(at, (kind) => kind !== 'fault');
      }
      return at;
    }
    return withoutEngines(at);
  }

  return {
    plan,
    seen,
    expand,
    initial() {
      const world = new Int32Array(WORLD_WIDTH);
      const decode = bornDecode(plan, 1);
      decode.wantsLink = true;
      world[ROUTER] = routers.add(bornRouter(1, newClients(plan)));
      world[PREFILL] = prefills.add(bornPrefill(plan, 1));
      world[DECODE] = decodes.add(decode);
      let left = 0;
      for (const [index, fault] of FAULTS.entries()) left |= (plan.faults[fault] ?? 0) << (FAULT_BITS * index);
      world[LEFT] = left;
      for (const link of LINKS.keys()) greet(world, link);
      return plan.setup === null ? world : setUp(world, plan.setup);
    },
    residue(world) {
      const found = residueOf(prefillOf(world), decodeOf(world));
      const { rooms, clients } = routerOf(world);
      if (rooms.size > 0) found.push(`${rooms.size} rooms on the router`);
      for (const [index, { phase }] of clients.entries()) {
        if (phase === 'new' || phase === 'open') found.push(`client ${index} is ${phase}`);
      }
      for (const [queue, name] of QUEUES.entries()) {
        const count = contentOf(world, queue).length;
        if (count > 0) found.push(`${count} packets in ${name}`);
      }
      if (straysIn(world).length > 0) found.push(`${straysIn(world).length} late packets`);
      return found;
    },
    withCanary(world) {
      const { linked, clients } = routerOf(world);
      if (linked.prefill === null || linked.decode === null) return null;
      const next = world.slice();
      run(next, routers, ROUTER, 'router', 'submit canary', (at, turn) => {
        at.clients.push({ phase: 'new', room: null, tokenCount: 0, isOk: false });
        submit(at, clients.length, turn);
      });
      return next;
    },
    isCanaryServed(world) {
      const canary = routerOf(world).clients[plan.rooms.length];
      return canary?.phase === 'decided' && canary.isOk;
    },
    sizes: () => ({
      router: routers.states.size(),
      prefill: prefills.states.size(),
      decode: decodes.states.size(),
      packets: packets.size(),
      steps: stepCount,
    }),
    prefillStates: () => Array.from({ length: prefills.states.size() }, (_, id) => prefills.states.get(id)),
    decodeStates: () => Array.from({ length: decodes.states.size() }, (_, id) => decodes.states.get(id)),
  };
}

/** A packet in a trace: its message, its room and attempt, and what it says. */
function describe({ message, isCopy }: Packet): string {
  let text: string = message.type;
  if ('key' in message) text += ` ${message.key.slice(message.key.indexOf('-') + 1)}`;
  if (message.type === 'QUEUED') text += ` ${message.state}`;
  if (message.type === 'CHUNK') text += ` unit ${message.firstUnit}`;
  if (message.type === 'CREDIT') text += ` ${message.bytes} bytes`;
  if (message.type === 'ABORT' || message.type === 'cancel') text += ` (${message.reason})`;
  if (message.type === 'end') text += ` (${message.outcome.ok ? message.outcome.finish : message.outcome.reason})`;
  if (message.type === 'mark') text += ` ${message.smallestSequence}`;
  if (message.type === 'tokens') {
    text += message.rows.map(({ key, position }) => ` ${key.slice(key.indexOf('-') + 1)} at ${position}`).join();
  }
  return isCopy ? `${text} (copy)` : text;
}
