/**
 * Channel: the one file that touches ZeroMQ. It carries messages (messages.ts) between processes over
 * links; it knows nothing of rooms.
 *
 * A prefill worker listens (`openListener`), decode workers connect to it (`openConnector`); the router
 * connects to its workers in the same way. A link is one ROUTER/DEALER pair for control and, if the
 * listener offers one, a second pair for data, so that control never queues behind pages. The listener
 * tells its data port in WELCOME; only the control address is ever configured.
 *
 *   connector   HELLO ──control──▶ listener      compare version and fields, name by name
 *               ◀──── WELCOME or REFUSE
 *               HELLO ──data─────▶               (only with a data socket)
 *               ◀──────── WELCOME                then both report `up`
 *
 * Promises to the owner:
 * - `up` comes before any message of a peer, `lost` after the last; the sockets of a lost link are
 *   closed by then, with everything that was queued in them. `up` again without `lost` is a reconnect.
 * - A link is lost if nothing was heard for a lease, or a larger epoch or a newer link said HELLO.
 *   A side that was given up learns it from REFUSE and gives up too, so both always start anew.
 * - `send` never waits. Each peer has a bounded queue for each socket; one that is full loses the
 *   message and counts it. Messages are at most once, ordered within a connection.
 * - Bad frames are counted and dropped. The loop outlives them.
 */

import { Dealer, Router } from 'zeromq';
import {
  decodeMessage,
  encodeMessage,
  PROTOCOL_VERSION,
  type Epoch,
  type HelloMessage,
  type Instance,
  type Message,
  type RefuseMessage,
  type WelcomeMessage,
} from './messages.ts';

/** A ROUTER whose peers are all full is tried again after this long. */
const FULL_RETRY_MS = 5;

/** Between HELLOs that nobody answers. */
const HELLO_MS = 250;

/** Our own pause that is forgiven: leases are extended by a longer gap between two checks. */
const FORGIVEN_GAP_MS = 1000;

/** A connection that is not kept is given up after this many leases without a peer. */
const ABANDON_LEASES = 3;

/** Largest control frame: a submit with a million token ids fits. */
const MAX_CONTROL_BYTES = 16 << 20;

/** Lost links of peers that have not come back, remembered by name. */
const MAX_LOST_LINKS = 1024;

/** Room for the header frame beside a payload. */
const MAX_HEADER_BYTES = 1 << 20;

export type SocketKind = 'control' | 'data';

/** Who speaks at the other end. */
export interface Peer extends Instance {
  role: string;
  fields: Record<string, string>;
}

export interface ChannelOptions {
  role: string;
  name: string;
  epoch: Epoch;
  /** Compared one by one with the other side's; a field that both name must be equal. */
  fields: Record<string, string>;
  /** PINGs on an idle link: 1 s. */
  heartbeatMs: number;
  /** Silence that ends a link: 10 s. */
  leaseMs: number;
  /**
   * Silence that ends a connection for data, which the next one replaces: 15 s. libzmq hears whole frames only, so it is
   * as long as the slowest frame may take.
   */
  dataSilenceMs: number;
  /** Bounds of one peer's queue on one socket. */
  maxQueuedMessages: number;
  maxQueuedBytes: number;
  /** Largest payload accepted. */
  maxPayloadBytes: number;
  /** How long `close` lets the control socket flush. Data is never waited for. */
  lingerMs: number;
  /** Called for everything that happens, synchronously and in order. It must not throw and not block. */
  onEvent: (event: ChannelEvent) => void;
}

/**
 * Why a link is lost: silence for a lease; a later life of the peer (`superseded`); a newer link of the same life
 * (`relinked`); the other side had given it up (`refused`); this side closes.
 */
export type LossCause = 'lease' | 'superseded' | 'relinked' | 'refused' | 'closed';

export type ChannelEvent =
  | { type: 'up'; peer: Peer; address: string }
  | { type: 'lost'; peer: Peer; address: string; why: LossCause }
  | { type: 'message'; peer: Peer; socket: SocketKind; message: Message; payload: Uint8Array }
  /** A HELLO was refused, by them or by us; it is tried again. */
  | { type: 'refused'; address: string; field: string; ours: string; theirs: string };

/** Counters since the channel was opened, and what is queued now. */
export interface ChannelStats {
  links: number;
  queuedMessages: number;
  queuedBytes: number;
  sentMessages: number;
  /** Queue full, peer gone, or no link. */
  droppedMessages: number;
  /** Frames that decode to nothing, or from a link that does not exist. */
  rejectedMessages: number;
}

/** A link that is up. */
export interface LinkView {
  peer: Peer;
  /** Since anything was heard on it; our own pauses excluded. */
  silenceMs: number;
}

export interface Listener {
  /** The control address, with the real port. */
  address: string;
  /** The data address, or '' without one. */
  dataAddress: string;
  /** Queue a message. False if it was dropped. `payload` must not change afterwards: pass a copy. */
  send(epoch: Epoch, socket: SocketKind, message: Message, payload?: Uint8Array): boolean;
  stats(): ChannelStats;
  /** Every link that is up. */
  links(): LinkView[];
  close(): Promise<void>;
}

export interface Connector {
  /** Keep a link to this control address; no-op if there is one. `keep`: never give it up. */
  connect(address: string, keep: boolean): void;
  /** Give the link up now; its peer is reported lost. */
  disconnect(address: string): void;
  send(epoch: Epoch, socket: SocketKind, message: Message, payload?: Uint8Array): boolean;
  stats(): ChannelStats;
  links(): LinkView[];
  close(): Promise<void>;
}

// ---------------------------------------------------------------------------------------------
// Writer: one send at a time on a socket, a bounded queue for each peer, peers in turn

/** One message: its frame, and its payload on a data socket. */
type Frames = Uint8Array[];

/** Messages that wait for a control socket travel together, as one ZeroMQ message, up to so many and so many bytes. */
const MAX_JOINED = 128;
const MAX_JOINED_BYTES = 64 << 10;

/** A message that waits. */
interface Queued {
  readonly frames: Frames;
  readonly bytes: number;
}

/** The one writer of a socket. */
export interface Writer {
  /** Queue a message for a peer: its routing id, '' on a DEALER. False if its queue is full or the writer is closed. */
  push(peer: string, frames: Frames): boolean;
  /** Forget what is queued for a peer. */
  forget(peer: string): void;
  stats(): { queuedMessages: number; queuedBytes: number; sent: number; dropped: number };
  /** Send what is queued, for at most `flushMs`, then stop. The socket is closed by the caller, after. */
  close(flushMs: number): Promise<void>;
}

/**
 * Make the writer of a socket; nobody else may send on it (a second send while one waits fails with
 * EBUSY). On a ROUTER, which must be `mandatory` with `sendTimeout: 0`, a full peer does not hold up
 * the others, and what is meant for a peer that is gone is dropped.
 *
 * A `control` writer joins what waits for a peer: handing a message to libzmq and taking it out costs more than all else
 * about it, and hundreds of rooms that end at once have thousands.
 */
export function createWriter(
  socket: { send(frames: Frames): Promise<void> },
  kind: SocketKind,
  bounds: { maxQueuedMessages: number; maxQueuedBytes: number },
): Writer {
  const queues = new Map<string, Queued[]>();
  const queuedBytes = new Map<string, number>();
  let sent = 0;
  let dropped = 0;
  let isClosed = false;
  let wake: (() => void) | null = null;
  let whenIdle: (() => void) | null = null;

  /** What is sent next to a peer: one message, and those behind it that may go with it. */
  function takeable(queue: readonly Queued[]): readonly Queued[] {
    let count = 0;
    let bytes = 0;
    for (; count < (kind === 'control' ? MAX_JOINED : 1) && count < queue.length; count++) {
      bytes += queue[count]!.bytes;
      if (count > 0 && bytes > MAX_JOINED_BYTES) break;
    }
    return queue.slice(0, count);
  }

  /** One turn over all peers. True if anything left its queue. */
  async function sendRound(): Promise<boolean> {
    let hasMoved = false;
    for (const [peer, queue] of queues) {
      const joined = takeable(queue);
      if (joined.length === 0) continue;
      const routing = peer === '' ? [] : [Buffer.from(peer)];
      const outcome = await trySend([...routing, ...joined.flatMap(({ frames }) => frames)]);
      if (outcome === 'full') continue;
      hasMoved = true;
      if (outcome === 'sent') sent += joined.length;
      else dropped += joined.length;
      // The peer may have been forgotten, or even come back, while the send was under way.
      if (queues.get(peer) !== queue) continue;
      queue.splice(0, joined.length);
      const joinedBytes = joined.reduce((sum, { bytes }) => sum + bytes, 0);
      queuedBytes.set(peer, (queuedBytes.get(peer) ?? 0) - joinedBytes);
      if (queue.length === 0) forget(peer);
    }
    return hasMoved;
  }

  async function trySend(frames: Frames): Promise<'sent' | 'full' | 'gone'> {
    try {
      await socket.send(frames);
      return 'sent';
    } catch (error) {
      // EAGAIN: no room in the peer's pipe. All else (EHOSTUNREACH, a closed socket): it will not arrive.
      return (error as NodeJS.ErrnoException).code === 'EAGAIN' ? 'full' : 'gone';
    }
  }

  function forget(peer: string): void {
    queues.delete(peer);
    queuedBytes.delete(peer);
  }

  async function run(): Promise<void> {
    while (!isClosed) {
      if (queues.size === 0) {
        whenIdle?.();
        await new Promise<void>((resolve) => {
          wake = resolve;
        });
      } else if (!(await sendRound()) && !isClosed) {
        await new Promise<void>((resolve) => {
          const timer = setTimeout(resolve, FULL_RETRY_MS);
          wake = () => {
            clearTimeout(timer);
            resolve();
          };
        });
      }
    }
  }
  const running = run();

  return {
    push(peer, frames) {
      const queue = queues.get(peer) ?? [];
      let bytes = 0;
      for (const frame of frames) bytes += frame.length;
      const total = (queuedBytes.get(peer) ?? 0) + bytes;
      const isFull = queue.length >= bounds.maxQueuedMessages || total > bounds.maxQueuedBytes;
      if (isClosed || (isFull && queue.length > 0)) {
        dropped++;
        return false;
      }
      queue.push({ frames, bytes });
      queues.set(peer, queue);
      queuedBytes.set(peer, total);
      wake?.();
      return true;
    },
    forget,
    stats() {
      let queuedMessages = 0;
      let bytes = 0;
      for (const queue of queues.values()) queuedMessages += queue.length;
      for (const value of queuedBytes.values()) bytes += value;
      return { queuedMessages, queuedBytes: bytes, sent, dropped };
    },
    async close(flushMs) {
      if (flushMs > 0 && queues.size > 0) {
        await new Promise<void>((resolve) => {
          const timer = setTimeout(resolve, flushMs);
          whenIdle = () => {
            clearTimeout(timer);
            resolve();
          };
        });
      }
      isClosed = true;
      queues.clear();
      queuedBytes.clear();
      wake?.();
      // A send that waits for a peer ends only when the caller closes the socket.
      void running;
    },
  };
}

// ---------------------------------------------------------------------------------------------
// Sockets

/** Options of every socket. High-water marks count messages; credits in bytes keep well below them. */
function socketOptions(options: ChannelOptions, kind: SocketKind): Record<string, number> {
  const silenceMs = kind === 'control' ? options.leaseMs : options.dataSilenceMs;
  return {
    linger: kind === 'control' ? options.lingerMs : 0,
    sendHighWaterMark: 1000,
    receiveHighWaterMark: 10_000,
    maxMessageSize: kind === 'control' ? MAX_CONTROL_BYTES : options.maxPayloadBytes + MAX_HEADER_BYTES,
    heartbeatInterval: options.heartbeatMs,
    heartbeatTimeout: silenceMs,
    // Heartbeats do not see a stopped peer behind a full pipe; this does. A slow line, too, may keep a window shut for
    // as long as it takes to drain half of the receiver's buffer.
    tcpMaxRetransmitTimeout: silenceMs,
  };
}

function openRouter(options: ChannelOptions, kind: SocketKind): Router {
  const sockets = socketOptions(options, kind);
  return new Router({ ...sockets, mandatory: true, sendTimeout: 0, handover: true });
}

function openDealer(options: ChannelOptions, kind: SocketKind, link: number): Dealer {
  const routingId = routingIdOf(options, link);
  return new Dealer({ ...socketOptions(options, kind), routingId, immediate: true, reconnectMaxInterval: 1000 });
}

/** A new link never inherits what was queued for the one before, so its identity is new too. */
function routingIdOf({ name, epoch }: Instance, link: number): string {
  return `${name.slice(0, 200)} ${epoch} ${link}`;
}

/** Deliver every message of a socket until it is closed. */
async function receiveAll(socket: Router | Dealer, deliver: (frames: Uint8Array[]) => void): Promise<void> {
  try {
    for await (const frames of socket) deliver(frames);
  } catch (error) {
    // Closing a socket under its reader ends the loop, or rejects it, depending on the moment.
    if (!socket.closed) throw error;
  }
}

/** The messages of a ZeroMQ message, without its routing id. */
function split(socket: SocketKind, frames: Uint8Array[]): Frames[] {
  return socket === 'control' ? frames.map((frame) => [frame]) : [frames];
}

/**
 * Close a bound socket and wait until its port is free.
 *
 * Not by `unbind`: that runs on another thread, and a reader or writer of the same socket that wakes up meanwhile makes
 * two threads in one socket, which libzmq answers with a crash. The last event of a socket comes after its port is free.
 */
async function closeBound(socket: Router): Promise<void> {
  const ended = new Promise<void>((resolve) => socket.events.on('end', () => resolve()));
  socket.close();
  await ended;
}

/** First field in which the two sides differ, with both values; null if they agree. */
function firstDifference(
  ours: Record<string, string>,
  theirs: Record<string, string>,
): { field: string; ours: string; theirs: string } | null {
  for (const [field, value] of Object.entries(ours)) {
    const other = theirs[field];
    if (other !== undefined && other !== value) return { field, ours: value, theirs: other };
  }
  return null;
}

/** Milliseconds on a clock that never goes back. */
function now(): number {
  return performance.now();
}

/** Call `check` at a period; it gets the time and how much of the last gap was our own pause. */
function startChecks(periodMs: number, check: (nowMs: number, pauseMs: number) => void): () => void {
  let lastMs = now();
  const timer = setInterval(() => {
    const nowMs = now();
    const gapMs = nowMs - lastMs;
    lastMs = nowMs;
    check(nowMs, gapMs > FORGIVEN_GAP_MS ? gapMs : 0);
  }, periodMs);
  return () => clearInterval(timer);
}

function checkPeriodMs({ heartbeatMs }: ChannelOptions): number {
  return Math.max(10, Math.min(HELLO_MS, heartbeatMs / 2));
}

// ---------------------------------------------------------------------------------------------
// Listener

interface ListenerLink {
  peer: Peer;
  link: number;
  routingId: string;
  isUp: boolean;
  heardMs: number;
  saidMs: number;
}

/**
 * Bind `address` for control and, unless it is null, `dataAddress` for data (port 0: any free port).
 * Rejects if an address cannot be bound.
 */
export async function openListener(
  options: ChannelOptions,
  { address, dataAddress }: { address: string; dataAddress: string | null },
): Promise<Listener> {
  const control = openRouter(options, 'control');
  const data = dataAddress === null ? null : openRouter(options, 'data');
  try {
    await control.bind(address);
    if (dataAddress !== null) await data?.bind(dataAddress);
  } catch (error) {
    control.close();
    data?.close();
    throw new Error(`cannot listen on ${address}: ${(error as Error).message}`, { cause: error });
  }
  const boundAddress = control.lastEndpoint as string;
  const boundDataAddress = data?.lastEndpoint ?? '';
  // The host of the data address is whatever host the other side reached us by.
  const dataPort = boundDataAddress === '' ? '' : `tcp://*:${boundDataAddress.split(':').at(-1)}`;
  const writers = {
    control: createWriter(control, 'control', options),
    data: data === null ? null : createWriter(data, 'data', options),
  };
  const byName = new Map<string, ListenerLink>();
  const byRoutingId = new Map<string, ListenerLink>();
  /**
   * By name: the link that was lost last. A connector that did not notice may come back with it; taken up again, it would
   * never learn that everything on it has ended here.
   */
  const lostLinks = new Map<string, { epoch: Epoch; link: number }>();
  let rejectedMessages = 0;
  let strayMessages = 0;
  let isClosed = false;

  function sendTo(routingId: string, socket: SocketKind, message: Message, payload?: Uint8Array): boolean {
    const frames: Frames = [encodeMessage(message)];
    if (payload !== undefined) frames.push(payload);
    return writers[socket]?.push(routingId, frames) ?? false;
  }

  function lose(link: ListenerLink, why: LossCause): void {
    byName.delete(link.peer.name);
    byRoutingId.delete(link.routingId);
    lostLinks.set(link.peer.name, { epoch: link.peer.epoch, link: link.link });
    const [oldest] = lostLinks.keys();
    if (lostLinks.size > MAX_LOST_LINKS && oldest !== undefined) lostLinks.delete(oldest);
    writers.control.forget(link.routingId);
    writers.data?.forget(link.routingId);
    if (link.isUp) options.onEvent({ type: 'lost', peer: link.peer, address: '', why });
  }

  function refuse(
    routingId: string,
    socket: SocketKind,
    link: number,
    field: string,
    ours: string,
    theirs: string,
  ): void {
    const refusal: RefuseMessage = { type: 'REFUSE', epoch: options.epoch, link, field, ours, theirs };
    sendTo(routingId, socket, refusal);
    options.onEvent({ type: 'refused', address: '', field, ours, theirs });
  }

  /** That link is over for us, whatever the other side believes: it must begin another. */
  function refuseLink(routingId: string, socket: SocketKind, link: number): void {
    const { epoch } = options;
    sendTo(routingId, socket, { type: 'REFUSE', epoch, link, field: 'link', ours: '', theirs: String(link) });
  }

  function onHello(routingId: string, socket: SocketKind, hello: HelloMessage): void {
    let link = byName.get(hello.name);
    const isKnown = link?.peer.epoch === hello.epoch && link.link === hello.link;
    if (routingId !== routingIdOf(hello, hello.link)) {
      rejectedMessages++;
      return;
    }
    if (hello.version !== PROTOCOL_VERSION) {
      refuse(routingId, socket, hello.link, 'version', String(PROTOCOL_VERSION), String(hello.version));
      return;
    }
    const difference = firstDifference(options.fields, hello.fields);
    if (difference !== null) {
      refuse(routingId, socket, hello.link, difference.field, difference.ours, difference.theirs);
      return;
    }
    const lost = lostLinks.get(hello.name);
    if (!isKnown && lost?.epoch === hello.epoch && hello.link <= lost.link) {
      refuseLink(routingId, socket, hello.link);
      return;
    }
    if (!isKnown) {
      if (
        link !== undefined &&
        (link.peer.epoch > hello.epoch || (link.peer.epoch === hello.epoch && link.link > hello.link))
      ) {
        refuse(
          routingId,
          socket,
          hello.link,
          'epoch',
          `${link.peer.epoch} ${link.link}`,
          `${hello.epoch} ${hello.link}`,
        );
        return;
      }
      // The data socket only completes a link that its control socket has begun.
      if (socket === 'data') return;
      if (link !== undefined) lose(link, link.peer.epoch === hello.epoch ? 'relinked' : 'superseded');
      const { role, name, epoch, fields } = hello;
      link = {
        peer: { role, name, epoch, fields },
        link: hello.link,
        routingId,
        isUp: false,
        heardMs: now(),
        saidMs: now(),
      };
      byName.set(name, link);
      byRoutingId.set(routingId, link);
      lostLinks.delete(name); // it is older than what is in `byName` now
    }
    if (link === undefined) return;
    link.heardMs = now();
    const welcome: WelcomeMessage = {
      type: 'WELCOME',
      version: PROTOCOL_VERSION,
      role: options.role,
      name: options.name,
      epoch: options.epoch,
      link: hello.link,
      dataAddress: dataPort,
      fields: options.fields,
    };
    sendTo(routingId, socket, welcome);
    if (socket === 'data' || data === null || link.isUp) {
      link.isUp = true;
      options.onEvent({ type: 'up', peer: link.peer, address: '' });
    }
  }

  function onFrames(socket: SocketKind, [id, ...frames]: Uint8Array[]): void {
    const routingId = Buffer.from(id ?? []).toString();
    for (const each of split(socket, frames)) onOne(socket, routingId, each);
  }

  function onOne(socket: SocketKind, routingId: string, frames: Frames): void {
    if (isClosed) return;
    const decoded = decodeMessage(frames);
    if (!decoded.ok) {
      rejectedMessages++;
      return;
    }
    const { message, payload } = decoded;
    if (message.type === 'HELLO') {
      onHello(routingId, socket, message);
      return;
    }
    const link = byRoutingId.get(routingId);
    if (link === undefined) {
      strayMessages++;
      // It believes in a link that we gave up or, in an earlier life, had: it must begin anew.
      if (message.type === 'PING') refuseLink(routingId, socket, message.link);
      return;
    }
    link.heardMs = now();
    if (message.type === 'PING') {
      if (!message.answer) ping(link, true);
    } else if (message.type === 'WELCOME' || message.type === 'REFUSE' || !link.isUp) {
      rejectedMessages++;
    } else {
      options.onEvent({ type: 'message', peer: link.peer, socket, message, payload });
    }
  }

  function ping(link: ListenerLink, answer: boolean): void {
    link.saidMs = now();
    sendTo(link.routingId, 'control', {
      type: 'PING',
      from: options.epoch,
      to: link.peer.epoch,
      link: link.link,
      answer,
    });
  }

  const stopChecks = startChecks(checkPeriodMs(options), (nowMs, pauseMs) => {
    for (const link of byName.values()) {
      link.heardMs += pauseMs;
      if (nowMs - link.heardMs >= options.leaseMs) lose(link, 'lease');
      else if (nowMs - link.saidMs >= options.heartbeatMs) ping(link, false);
    }
  });
  const loops = [receiveAll(control, (frames) => onFrames('control', frames))];
  if (data !== null) loops.push(receiveAll(data, (frames) => onFrames('data', frames)));

  return {
    address: boundAddress,
    dataAddress: boundDataAddress,
    send(epoch, socket, message, payload) {
      for (const link of byName.values()) {
        if (link.peer.epoch === epoch && link.isUp) return sendTo(link.routingId, socket, message, payload);
      }
      strayMessages++;
      return false;
    },
    stats() {
      const all = [writers.control.stats(), ...(writers.data === null ? [] : [writers.data.stats()])];
      return sumStats(byName.size, all, strayMessages, rejectedMessages);
    },
    links: () => linkViews([...byName.values()]),
    async close() {
      if (isClosed) return;
      isClosed = true;
      stopChecks();
      await Promise.all([writers.control.close(options.lingerMs), writers.data?.close(0)]);
      for (const link of byName.values()) lose(link, 'closed');
      await Promise.all([closeBound(control), data === null ? undefined : closeBound(data)]);
      await Promise.all(loops);
    },
  };
}

// ---------------------------------------------------------------------------------------------
// Connector

interface Connection {
  address: string;
  keep: boolean;
  /** Counts the links of this address in this life; every new one is larger. */
  link: number;
  control: Dealer;
  controlWriter: Writer;
  data: Dealer | null;
  dataWriter: Writer | null;
  /** Known from WELCOME on. */
  peer: Peer | null;
  isUp: boolean;
  heardMs: number;
  saidMs: number;
  loops: Promise<void>[];
}

/** Connect to listeners; `connect` names them, at any time, started or not. */
export function openConnector(options: ChannelOptions): Connector {
  const connections = new Map<string, Connection>();
  const closing: Promise<void>[] = [];
  const totals = { sent: 0, dropped: 0 };
  let linkCount = 0;
  let rejectedMessages = 0;
  let strayMessages = 0;
  let isClosed = false;

  function open(address: string, keep: boolean): void {
    const link = ++linkCount;
    const control = openDealer(options, 'control', link);
    const connection: Connection = {
      address,
      keep,
      link,
      control,
      controlWriter: createWriter(control, 'control', options),
      data: null,
      dataWriter: null,
      peer: null,
      isUp: false,
      heardMs: now(),
      saidMs: now(),
      loops: [],
    };
    connections.set(address, connection);
    // After a silent reconnect the listener may be another life of itself: HELLO finds out, and both
    // sides then send again what is unanswered.
    control.events.on('handshake', () => hello(connection, 'control'));
    control.connect(address);
    connection.loops.push(receiveAll(control, (frames) => onFrames(connection, 'control', frames)));
  }

  /** Close the sockets first: nothing of this link is delivered after `lost`. */
  function shut(connection: Connection, why: LossCause): void {
    connections.delete(connection.address);
    const { control, data, controlWriter, dataWriter, peer, isUp, loops } = connection;
    connection.isUp = false;
    for (const writer of [controlWriter, dataWriter]) {
      if (writer === null) continue;
      const { sent, dropped, queuedMessages } = writer.stats();
      totals.sent += sent;
      totals.dropped += dropped + queuedMessages;
      closing.push(writer.close(0));
    }
    control.close();
    data?.close();
    closing.push(...loops);
    if (peer !== null && isUp) options.onEvent({ type: 'lost', peer, address: connection.address, why });
  }

  function reopen(connection: Connection, why: LossCause): void {
    shut(connection, why);
    if (!isClosed) open(connection.address, connection.keep);
  }

  function sendOn(connection: Connection, socket: SocketKind, message: Message, payload?: Uint8Array): boolean {
    const writer = socket === 'control' ? connection.controlWriter : connection.dataWriter;
    const frames: Frames = [encodeMessage(message)];
    if (payload !== undefined) frames.push(payload);
    return writer?.push('', frames) ?? false;
  }

  function hello(connection: Connection, socket: SocketKind): void {
    if (connections.get(connection.address) !== connection) return;
    const { role, name, epoch, fields } = options;
    connection.saidMs = now();
    sendOn(connection, socket, {
      type: 'HELLO',
      version: PROTOCOL_VERSION,
      role,
      name,
      epoch,
      link: connection.link,
      fields,
    });
  }

  function onWelcome(connection: Connection, socket: SocketKind, welcome: WelcomeMessage): void {
    const { role, name, epoch, fields } = welcome;
    if (welcome.link !== connection.link) {
      rejectedMessages++;
      return;
    }
    if (connection.peer !== null && connection.peer.epoch !== epoch) {
      reopen(connection, 'superseded');
      return;
    }
    const version =
      welcome.version === PROTOCOL_VERSION
        ? null
        : { field: 'version', ours: String(PROTOCOL_VERSION), theirs: String(welcome.version) };
    const difference = version ?? firstDifference(options.fields, fields);
    if (difference !== null) {
      options.onEvent({ type: 'refused', address: connection.address, ...difference });
      return;
    }
    connection.peer ??= { role, name, epoch, fields };
    if (socket === 'control' && welcome.dataAddress !== '') {
      if (connection.data === null) openData(connection, welcome.dataAddress);
      else if (!connection.isUp) hello(connection, 'data');
    }
    if (socket === 'data' || welcome.dataAddress === '' || connection.isUp) {
      connection.isUp = true;
      options.onEvent({ type: 'up', peer: connection.peer, address: connection.address });
    }
  }

  function openData(connection: Connection, dataAddress: string): void {
    const host = connection.address.replace(/^tcp:\/\//, '').replace(/:[^:]*$/, '');
    const data = openDealer(options, 'data', connection.link);
    connection.data = data;
    connection.dataWriter = createWriter(data, 'data', options);
    data.connect(dataAddress.replace('://*:', `://${host}:`));
    connection.loops.push(receiveAll(data, (frames) => onFrames(connection, 'data', frames)));
    hello(connection, 'data');
  }

  function onFrames(connection: Connection, socket: SocketKind, frames: Uint8Array[]): void {
    for (const each of split(socket, frames)) onOne(connection, socket, each);
  }

  function onOne(connection: Connection, socket: SocketKind, frames: Frames): void {
    if (isClosed || connections.get(connection.address) !== connection) return;
    const decoded = decodeMessage(frames);
    if (!decoded.ok) {
      rejectedMessages++;
      return;
    }
    const { message, payload } = decoded;
    const { peer } = connection;
    connection.heardMs = now();
    switch (message.type) {
      case 'WELCOME':
        onWelcome(connection, socket, message);
        break;
      case 'REFUSE':
        if (message.link !== connection.link) break;
        if (message.field === 'link' || connection.isUp) reopen(connection, 'refused');
        else
          options.onEvent({
            type: 'refused',
            address: connection.address,
            field: message.field,
            ours: message.theirs,
            theirs: message.ours,
          });
        break;
      case 'PING':
        if (peer !== null && message.from !== peer.epoch) reopen(connection, 'superseded');
        else if (peer !== null && !message.answer) ping(connection, true);
        break;
      case 'HELLO':
        rejectedMessages++;
        break;
      default:
        if (peer === null || !connection.isUp) rejectedMessages++;
        else options.onEvent({ type: 'message', peer, socket, message, payload });
    }
  }

  function ping(connection: Connection, answer: boolean): void {
    // Before it is up only HELLO counts: a PING answered more often than HELLO is due would put that off for ever.
    if (connection.isUp) connection.saidMs = now();
    const { peer, link } = connection;
    sendOn(connection, 'control', { type: 'PING', from: options.epoch, to: peer?.epoch ?? '', link, answer });
  }

  const stopChecks = startChecks(checkPeriodMs(options), (nowMs, pauseMs) => {
    for (const connection of connections.values()) {
      connection.heardMs += pauseMs;
      const silenceMs = nowMs - connection.heardMs;
      const quietMs = nowMs - connection.saidMs;
      if (connection.isUp) {
        if (silenceMs >= options.leaseMs) reopen(connection, 'lease');
        else if (quietMs >= options.heartbeatMs) ping(connection, false);
      } else if (!connection.keep && silenceMs >= ABANDON_LEASES * options.leaseMs) {
        shut(connection, 'lease');
      } else if (quietMs >= HELLO_MS && connection.controlWriter.stats().queuedMessages === 0) {
        hello(connection, 'control');
      }
    }
  });

  return {
    connect(address, keep) {
      if (isClosed) return;
      const connection = connections.get(address);
      if (connection === undefined) open(address, keep);
      else connection.keep ||= keep;
    },
    disconnect(address) {
      const connection = connections.get(address);
      if (connection !== undefined) shut(connection, 'closed');
    },
    send(epoch, socket, message, payload) {
      for (const connection of connections.values()) {
        if (connection.peer?.epoch === epoch && connection.isUp) return sendOn(connection, socket, message, payload);
      }
      strayMessages++;
      return false;
    },
    stats() {
      const all = [{ queuedMessages: 0, queuedBytes: 0, ...totals }];
      let links = 0;
      for (const connection of connections.values()) {
        if (connection.isUp) links++;
        all.push(connection.controlWriter.stats());
        if (connection.dataWriter !== null) all.push(connection.dataWriter.stats());
      }
      return sumStats(links, all, strayMessages, rejectedMessages);
    },
    links: () => linkViews([...connections.values()]),
    async close() {
      if (isClosed) return;
      isClosed = true;
      stopChecks();
      const open = [...connections.values()];
      await Promise.all(
        open.filter(({ isUp }) => isUp).map(({ controlWriter }) => controlWriter.close(options.lingerMs)),
      );
      for (const connection of open) shut(connection, 'closed');
      await Promise.all(closing);
    },
  };
}

function linkViews(links: readonly { peer: Peer | null; isUp: boolean; heardMs: number }[]): LinkView[] {
  const nowMs = now();
  return links.flatMap(({ peer, isUp, heardMs }) =>
    peer === null || !isUp ? [] : [{ peer, silenceMs: Math.max(0, nowMs - heardMs) }],
  );
}

function sumStats(
  links: number,
  writers: { queuedMessages: number; queuedBytes: number; sent: number; dropped: number }[],
  strayMessages: number,
  rejectedMessages: number,
): ChannelStats {
  const stats: ChannelStats = {
    links,
    queuedMessages: 0,
    queuedBytes: 0,
    sentMessages: 0,
    droppedMessages: strayMessages,
    rejectedMessages,
  };
  for (const { queuedMessages, queuedBytes, sent, dropped } of writers) {
    stats.queuedMessages += queuedMessages;
    stats.queuedBytes += queuedBytes;
    stats.sentMessages += sent;
    stats.droppedMessages += dropped;
  }
  return stats;
}
