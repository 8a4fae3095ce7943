/**
 * The simulated network: hosts, and pipes between them that behave as a DEALER and a ROUTER on one TCP connection.
 *
 * A pipe is opened by one host to an address; it connects when the other side listens and is reachable, and again, by
 * itself, whenever the connection breaks. What was on the way is lost with the connection. In order within a connection,
 * at most once; connections overtake each other. All that goes wrong is asked for: by the rates of `weather`, by `block`,
 * `cut` and `kill`.
 */

import type { Message } from '../../transfer/messages.ts';
import type { Clock } from './clock.ts';

/** One life of a process on a machine of its own. */
export interface Host {
  /** Stays over restarts. */
  readonly name: string;
  isAlive: boolean;
  /** Stopped (SIGSTOP): what should happen meanwhile waits in `backlog`. */
  isPaused: boolean;
  backlog: (() => void)[];
  /** What its monotonic clock shows when the world's shows 0: no two machines agree. */
  readonly offsetMs: number;
}

export type Frames = Uint8Array[];
export type SocketKind = 'control' | 'data';

/** What happens to single packets; each rate is a probability. */
export interface Weather {
  /** Every packet takes between these, in ms. */
  minLatencyMs: number;
  maxLatencyMs: number;
  /** Loses any packet. */
  drop: number;
  /** Loses only packets that are sent again until they are answered. */
  dropRepeated: number;
  duplicate: number;
  /** Overtakes its own connection. */
  reorder: number;
  /** Flips a bit. */
  corrupt: number;
  /** Acknowledgements take this much longer, in ms. */
  ackDelayMs: number;
  /** Time on the wire by size, in ms a byte. */
  byteMs: number;
  /** Packets on one connection and direction; one more is lost. */
  queueLimit: number;
}

/** How a direction between two hosts is blocked: packets wait for its end, or are lost. */
export type Block = 'hold' | 'lose';

export interface Packet {
  readonly frames: Frames;
  readonly type: Message['type'];
  /** Called once, when the packet is lost or handed over; null if nobody cares. */
  readonly onGone: (() => void) | null;
}

/** One connection, made again and again until it is shut. */
export interface Pipe {
  readonly host: Host;
  readonly address: string;
  readonly socket: SocketKind;
  readonly routingId: string;
  readonly onOpen: () => void;
  readonly onFrames: (frames: Frames) => void;
  state: 'connecting' | 'open' | 'shut';
  /** The connector's packets while there is no connection. */
  waiting: Packet[];
  lanes: { up: Lane; down: Lane };
}

/** One direction of a connection. */
interface Lane {
  packets: { packet: Packet; atMs: number }[];
  lastMs: number;
  /** Grows when the connection breaks, so that what was planned for it does not happen. */
  generation: number;
  isPlanned: boolean;
}

interface Endpoint {
  host: Host;
  onFrames: (routingId: string, socket: SocketKind, frames: Frames) => void;
  /** Open pipes by routing id and socket. */
  pipes: Map<string, Pipe>;
}

export interface Network {
  readonly weather: Weather;
  readonly pipes: Set<Pipe>;
  /** Run `act` on a host: now, when it is resumed, or never. */
  runOn(host: Host, act: () => void): void;
  listen(host: Host, address: string, onFrames: Endpoint['onFrames']): void;
  open(host: Host, to: Pick<Pipe, 'address' | 'socket' | 'routingId' | 'onOpen' | 'onFrames'>): Pipe;
  shut(pipe: Pipe): void;
  /** From the connector's side. Waits in the pipe while there is no connection. */
  send(pipe: Pipe, packet: Packet): void;
  /** From the listener's side. Lost if there is no such connection. */
  sendTo(address: string, routingId: string, socket: SocketKind, packet: Packet): void;
  /** Break a connection. */
  cut(pipe: Pipe): void;
  /** Block or, with null, unblock one direction between two hosts. */
  block(from: string, to: string, how: Block | null): void;
  /** The process ends. What it sent is lost too unless it `flushes`. */
  kill(host: Host, flushes: boolean): void;
  pause(host: Host): void;
  resume(host: Host): void;
}

/** Packets that are sent once: nothing repeats them when they are lost. */
const SENT_ONCE: ReadonlySet<string> = new Set<Message['type']>(['CHUNK', 'tokens']);
const ACKNOWLEDGEMENTS: ReadonlySet<string> = new Set<Message['type']>([
  'ABORT_ACK',
  'DONE_ACK',
  'end_ack',
  'accepted',
]);
/** First and largest gap between two attempts to connect. */
const CONNECT_MIN_MS = 50;
const CONNECT_MAX_MS = 1000;

/** A network without hosts, in the given weather. */
export function createNetwork(clock: Clock, random: () => number, weather: Weather): Network {
  const pipes = new Set<Pipe>();
  const endpoints = new Map<string, Endpoint>();
  const blocks = new Map<string, Block>();

  function runOn(host: Host, act: () => void): void {
    if (!host.isAlive) return;
    if (host.isPaused) host.backlog.push(act);
    else act();
  }

  function latencyMs(): number {
    return weather.minLatencyMs + random() * (weather.maxLatencyMs - weather.minLatencyMs);
  }

  function attempt(pipe: Pipe, gapMs: number): void {
    clock.after(random() * gapMs + latencyMs(), () => {
      if (pipe.state !== 'connecting') return;
      const endpoint = endpoints.get(pipe.address);
      const ends = endpoint === undefined ? null : [pipe.host.name, endpoint.host.name];
      const isReachable =
        ends !== null &&
        !blocks.has(ends.join('>')) &&
        !blocks.has(ends.reverse().join('>')) &&
        !endpoint!.host.isPaused;
      if (endpoint === undefined || !isReachable || pipe.host.isPaused) {
        attempt(pipe, Math.min(2 * gapMs, CONNECT_MAX_MS));
        return;
      }
      pipe.state = 'open';
      endpoint.pipes.set(`${pipe.socket} ${pipe.routingId}`, pipe);
      // What waited goes first: the greeting is sent by `onOpen`, behind it.
      for (const packet of pipe.waiting.splice(0)) enqueue(pipe, 'up', packet);
      runOn(pipe.host, () => {
        if (pipe.state === 'open') pipe.onOpen();
      });
    });
  }

  function enqueue(pipe: Pipe, direction: 'up' | 'down', packet: Packet): void {
    const { type } = packet;
    const lane = pipe.lanes[direction];
    const loss = weather.drop + (SENT_ONCE.has(type) ? 0 : weather.dropRepeated);
    if (lane.packets.length >= weather.queueLimit || (loss > 0 && random() < loss)) {
      packet.onGone?.();
      return;
    }
    let delayMs = latencyMs() + (ACKNOWLEDGEMENTS.has(type) ? weather.ackDelayMs : 0);
    for (const frame of packet.frames) delayMs += frame.length * weather.byteMs;
    const sent = weather.corrupt > 0 && random() < weather.corrupt ? flipBit(packet, random) : packet;
    const copies = weather.duplicate > 0 && random() < weather.duplicate ? 2 : 1;
    for (let copy = 0; copy < copies; copy++) {
      const atMs = clock.nowMs + delayMs * (1 + copy);
      if (weather.reorder > 0 && random() < weather.reorder) {
        // On its own, past everything in the lane.
        const { generation } = lane;
        clock.after(random() * 2 * delayMs, () => {
          if (lane.generation !== generation) sent.onGone?.();
          else handOver(pipe, direction, sent);
        });
        continue;
      }
      lane.lastMs = Math.max(lane.lastMs, atMs);
      lane.packets.push({ packet: sent, atMs: lane.lastMs });
    }
    plan(pipe, direction);
  }

  /** Wake the lane when its first packet is due. */
  function plan(pipe: Pipe, direction: 'up' | 'down'): void {
    const lane = pipe.lanes[direction];
    const head = lane.packets[0];
    if (head === undefined || lane.isPlanned) return;
    const { generation } = lane;
    lane.isPlanned = true;
    clock.after(head.atMs - clock.nowMs, () => {
      if (lane.generation !== generation) return;
      lane.isPlanned = false;
      if (lane.packets[0] === undefined) return;
      // Held back: `block` plans it again.
      if (blockOf(pipe, direction) === 'hold') return;
      handOver(pipe, direction, lane.packets.shift()!.packet);
      plan(pipe, direction);
    });
  }

  function blockOf(pipe: Pipe, direction: 'up' | 'down'): Block | undefined {
    const listener = endpoints.get(pipe.address)?.host.name ?? '';
    return blocks.get(direction === 'up' ? `${pipe.host.name}>${listener}` : `${listener}>${pipe.host.name}`);
  }

  function handOver(pipe: Pipe, direction: 'up' | 'down', packet: Packet): void {
    const endpoint = endpoints.get(pipe.address);
    const host = direction === 'up' ? endpoint?.host : pipe.host;
    if (host === undefined || !host.isAlive || blockOf(pipe, direction) !== undefined) {
      packet.onGone?.();
      return;
    }
    runOn(host, () => {
      packet.onGone?.();
      if (direction === 'up') endpoint!.onFrames(pipe.routingId, pipe.socket, packet.frames);
      else if (pipe.state !== 'shut') pipe.onFrames(packet.frames);
    });
  }

  function clearLanes(pipe: Pipe): void {
    for (const lane of [pipe.lanes.up, pipe.lanes.down]) {
      lane.generation++;
      lane.isPlanned = false;
      lane.lastMs = 0;
      for (const { packet } of lane.packets.splice(0)) packet.onGone?.();
    }
  }

  function detach(pipe: Pipe): void {
    const endpoint = endpoints.get(pipe.address);
    const name = `${pipe.socket} ${pipe.routingId}`;
    if (endpoint?.pipes.get(name) === pipe) endpoint.pipes.delete(name);
  }

  function shut(pipe: Pipe, flushes = false): void {
    if (pipe.state === 'shut') return;
    const { up } = pipe.lanes;
    const last = flushes ? up.packets.splice(0) : [];
    detach(pipe);
    clearLanes(pipe);
    for (const packet of pipe.waiting.splice(0)) packet.onGone?.();
    pipe.state = 'shut';
    pipes.delete(pipe);
    for (const { packet, atMs } of last) {
      clock.after(atMs - clock.nowMs, () => handOver(pipe, 'up', packet));
    }
  }

  function cut(pipe: Pipe): void {
    if (pipe.state !== 'open') return;
    detach(pipe);
    clearLanes(pipe);
    pipe.state = 'connecting';
    attempt(pipe, CONNECT_MIN_MS);
  }

  return {
    weather,
    pipes,
    runOn,
    listen(host, address, onFrames) {
      endpoints.set(address, { host, onFrames, pipes: new Map() });
    },
    open(host, to) {
      const lane = (): Lane => ({ packets: [], lastMs: 0, generation: 0, isPlanned: false });
      const pipe: Pipe = { ...to, host, state: 'connecting', waiting: [], lanes: { up: lane(), down: lane() } };
      pipes.add(pipe);
      attempt(pipe, 1);
      return pipe;
    },
    shut: (pipe) => shut(pipe),
    send(pipe, packet) {
      if (pipe.state === 'open') enqueue(pipe, 'up', packet);
      else if (pipe.state === 'connecting' && pipe.waiting.length < weather.queueLimit) pipe.waiting.push(packet);
      else packet.onGone?.();
    },
    sendTo(address, routingId, socket, packet) {
      const pipe = endpoints.get(address)?.pipes.get(`${socket} ${routingId}`);
      if (pipe === undefined) packet.onGone?.();
      else enqueue(pipe, 'down', packet);
    },
    cut,
    block(from, to, how) {
      if (how !== null) {
        blocks.set(`${from}>${to}`, how);
        return;
      }
      blocks.delete(`${from}>${to}`);
      for (const pipe of pipes) {
        if (pipe.state !== 'open') continue;
        plan(pipe, 'up');
        plan(pipe, 'down');
      }
    },
    kill(host, flushes) {
      host.isAlive = false;
      host.backlog = [];
      for (const pipe of [...pipes]) {
        if (pipe.host === host) shut(pipe, flushes);
        else if (endpoints.get(pipe.address)?.host === host) cut(pipe);
      }
      for (const [address, endpoint] of endpoints) if (endpoint.host === host) endpoints.delete(address);
    },
    pause(host) {
      host.isPaused = true;
    },
    resume(host) {
      host.isPaused = false;
      for (const act of host.backlog.splice(0)) runOn(host, act);
    },
  };
}

function flipBit(packet: Packet, random: () => number): Packet {
  const frames = packet.frames.map((frame) => frame.slice());
  const frame = frames[Math.floor(random() * frames.length)]!;
  const bit = Math.floor(random() * frame.length * 8);
  if (frame.length > 0) frame[bit >> 3]! ^= 1 << (bit & 7);
  return { ...packet, frames };
}
