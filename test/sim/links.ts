/**
 * Links in the simulator: the rules of transfer/channel.ts, event for event, on the simulated network instead of ZeroMQ.
 *
 * The real file owns sockets and timers and cannot be stepped; this is its protocol alone: HELLO, WELCOME, REFUSE and
 * PING, `up` before and `lost` after every message of a peer, leases, newer epochs and newer links. What the rules mean
 * is said there.
 */

import {
  decodeMessage,
  encodeMessage,
  PROTOCOL_VERSION,
  type Epoch,
  type HelloMessage,
  type Message,
  type WelcomeMessage,
} from '../../transfer/messages.ts';
import type { ChannelEvent, LossCause, Peer, SocketKind } from '../../transfer/channel.ts';
import type { Frames, Host, Network, Packet, Pipe } from './network.ts';

/** Between HELLOs that nobody answers. */
const HELLO_MS = 250;
/** Our own pause that is forgiven: leases are extended by a longer gap between two checks. */
const FORGIVEN_GAP_MS = 1000;
/** A connection that is not kept is given up after this many leases without a peer. */
const ABANDON_LEASES = 3;

export interface LinkOptions {
  host: Host;
  network: Network;
  role: string;
  epoch: Epoch;
  fields: Record<string, string>;
  heartbeatMs: number;
  leaseMs: number;
  /** The host's clock. */
  now: () => number;
  onEvent: (event: ChannelEvent) => void;
  /** Frames that decode to nothing. */
  onRejected: () => void;
}

/** What a process does with its links; as transfer/channel.ts, and `check`, which is a timer there. */
export interface Links {
  send(epoch: Epoch, socket: SocketKind, message: Message, payload?: Uint8Array, onGone?: () => void): boolean;
  /** Judge leases and ping; call it at a period under the lease. */
  check(): void;
}

export interface Connector extends Links {
  connect(address: string, keep: boolean): void;
}

/** Encoded once: pings are most of what is on a quiet network, and they never change. */
const pings = new Map<string, Frames>();

function packetOf(message: Message, payload?: Uint8Array, onGone?: () => void): Packet {
  return { frames: framesOf(message, payload), type: message.type, onGone: onGone ?? null };
}

function framesOf(message: Message, payload?: Uint8Array): Frames {
  if (message.type !== 'PING') {
    return payload === undefined ? [encodeMessage(message)] : [encodeMessage(message), payload];
  }
  const name = `${message.from} ${message.to} ${message.link} ${message.answer}`;
  let frames = pings.get(name);
  if (frames === undefined) {
    if (pings.size > 10_000) pings.clear();
    frames = [encodeMessage(message)];
    pings.set(name, frames);
    decodedPings.set(frames, message);
  }
  return frames;
}

const decodedPings = new WeakMap<Frames, Message>();

function decode(frames: Frames): { message: Message; payload: Uint8Array } | null {
  const ping = decodedPings.get(frames);
  if (ping !== undefined) return { message: ping, payload: new Uint8Array(0) };
  const decoded = decodeMessage(frames);
  return decoded.ok ? decoded : null;
}

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

/** How much of the gap since the last check was our own pause. */
function createPauseMeter(now: () => number): () => number {
  let lastMs = now();
  return () => {
    const nowMs = now();
    const gapMs = nowMs - lastMs;
    lastMs = nowMs;
    return gapMs > FORGIVEN_GAP_MS ? gapMs : 0;
  };
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

/** Listen at `address`, with a data socket if `hasData`. */
export function openListener(options: LinkOptions, { address, hasData }: { address: string; hasData: boolean }): Links {
  const { network, host, now } = options;
  const byName = new Map<string, ListenerLink>();
  const byRoutingId = new Map<string, ListenerLink>();
  const lostLinks = new Map<string, { epoch: Epoch; link: number }>();
  const pauseMs = createPauseMeter(now);

  function sendTo(
    routingId: string,
    socket: SocketKind,
    message: Message,
    payload?: Uint8Array,
    onGone?: () => void,
  ): void {
    network.sendTo(address, routingId, socket, packetOf(message, payload, onGone));
  }

  function lose(link: ListenerLink, why: LossCause): void {
    byName.delete(link.peer.name);
    byRoutingId.delete(link.routingId);
    lostLinks.set(link.peer.name, { epoch: link.peer.epoch, link: link.link });
    if (link.isUp) options.onEvent({ type: 'lost', peer: link.peer, address: '', why });
  }

  function refuse(routingId: string, socket: SocketKind, hello: HelloMessage, field: string, ours: string): void {
    const theirs = field === 'epoch' ? `${hello.epoch} ${hello.link}` : (hello.fields[field] ?? '');
    sendTo(routingId, socket, { type: 'REFUSE', epoch: options.epoch, link: hello.link, field, ours, theirs });
  }

  function refuseLink(routingId: string, socket: SocketKind, link: number): void {
    const { epoch } = options;
    sendTo(routingId, socket, { type: 'REFUSE', epoch, link, field: 'link', ours: '', theirs: String(link) });
  }

  function onHello(routingId: string, socket: SocketKind, hello: HelloMessage): void {
    let link = byName.get(hello.name);
    const isKnown = link?.peer.epoch === hello.epoch && link.link === hello.link;
    const difference = firstDifference(options.fields, hello.fields);
    if (difference !== null) {
      refuse(routingId, socket, hello, difference.field, difference.ours);
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
        refuse(routingId, socket, hello, 'epoch', `${link.peer.epoch} ${link.link}`);
        return;
      }
      // The data socket only completes a link that its control socket has begun.
      if (socket === 'data') return;
      if (link !== undefined) lose(link, link.peer.epoch === hello.epoch ? 'relinked' : 'superseded');
      const { role, name, epoch, fields } = hello;
      const nowMs = now();
      link = {
        peer: { role, name, epoch, fields },
        link: hello.link,
        routingId,
        isUp: false,
        heardMs: nowMs,
        saidMs: nowMs,
      };
      byName.set(name, link);
      byRoutingId.set(routingId, link);
      lostLinks.delete(name);
    }
    if (link === undefined) return;
    link.heardMs = now();
    const welcome: WelcomeMessage = {
      type: 'WELCOME',
      version: PROTOCOL_VERSION,
      role: options.role,
      name: host.name,
      epoch: options.epoch,
      link: hello.link,
      dataAddress: hasData ? address : '',
      fields: options.fields,
    };
    sendTo(routingId, socket, welcome);
    if (socket === 'data' || !hasData || link.isUp) {
      link.isUp = true;
      options.onEvent({ type: 'up', peer: link.peer, address: '' });
    }
  }

  function ping(link: ListenerLink, answer: boolean): void {
    link.saidMs = now();
    const to = link.peer.epoch;
    sendTo(link.routingId, 'control', { type: 'PING', from: options.epoch, to, link: link.link, answer });
  }

  function onFrames(routingId: string, socket: SocketKind, frames: Frames): void {
    const decoded = decode(frames);
    if (decoded === null) {
      options.onRejected();
      return;
    }
    const { message, payload } = decoded;
    if (message.type === 'HELLO') {
      onHello(routingId, socket, message);
      return;
    }
    const link = byRoutingId.get(routingId);
    if (link === undefined) {
      // It believes in a link that we gave up or, in an earlier life, had: it must begin anew.
      if (message.type === 'PING') refuseLink(routingId, socket, message.link);
      return;
    }
    link.heardMs = now();
    if (message.type === 'PING') {
      if (!message.answer) ping(link, true);
    } else if (message.type === 'WELCOME' || message.type === 'REFUSE' || !link.isUp) {
      options.onRejected();
    } else {
      options.onEvent({ type: 'message', peer: link.peer, socket, message, payload });
    }
  }

  network.listen(host, address, onFrames);
  return {
    send(epoch, socket, message, payload, onGone) {
      for (const link of byName.values()) {
        if (link.peer.epoch !== epoch || !link.isUp) continue;
        sendTo(link.routingId, socket, message, payload, onGone);
        return true;
      }
      return false;
    },
    check() {
      const nowMs = now();
      const gapMs = pauseMs();
      for (const link of byName.values()) {
        link.heardMs += gapMs;
        if (nowMs - link.heardMs >= options.leaseMs) lose(link, 'lease');
        else if (nowMs - link.saidMs >= options.heartbeatMs) ping(link, false);
      }
    },
  };
}

// ---------------------------------------------------------------------------------------------
// Connector

interface Connection {
  address: string;
  keep: boolean;
  link: number;
  control: Pipe;
  data: Pipe | null;
  peer: Peer | null;
  isUp: boolean;
  heardMs: number;
  saidMs: number;
}

/** Connect to listeners. */
export function openConnector(options: LinkOptions): Connector {
  const { network, host, now } = options;
  const connections = new Map<string, Connection>();
  const pauseMs = createPauseMeter(now);
  let linkCount = 0;

  function open(address: string, keep: boolean): void {
    const link = ++linkCount;
    const nowMs = now();
    const connection: Connection = {
      address,
      keep,
      link,
      control: network.open(host, {
        address,
        socket: 'control',
        routingId: `${host.name} ${options.epoch} ${link}`,
        // After a silent reconnect the listener may be another life of itself: HELLO finds out.
        onOpen: () => hello(connection, 'control'),
        onFrames: (frames) => onFrames(connection, 'control', frames),
      }),
      data: null,
      peer: null,
      isUp: false,
      heardMs: nowMs,
      saidMs: nowMs,
    };
    connections.set(address, connection);
  }

  /** Close the sockets first: nothing of this link is delivered after `lost`. */
  function shut(connection: Connection, why: LossCause): void {
    connections.delete(connection.address);
    const { control, data, peer, isUp, address } = connection;
    connection.isUp = false;
    network.shut(control);
    if (data !== null) network.shut(data);
    if (peer !== null && isUp) options.onEvent({ type: 'lost', peer, address, why });
  }

  function reopen(connection: Connection, why: LossCause): void {
    shut(connection, why);
    open(connection.address, connection.keep);
  }

  function sendOn(
    connection: Connection,
    socket: SocketKind,
    message: Message,
    payload?: Uint8Array,
    onGone?: () => void,
  ): void {
    const pipe = socket === 'control' ? connection.control : connection.data;
    if (pipe === null) onGone?.();
    else network.send(pipe, packetOf(message, payload, onGone));
  }

  function hello(connection: Connection, socket: SocketKind): void {
    if (connections.get(connection.address) !== connection) return;
    const { role, epoch, fields } = options;
    connection.saidMs = now();
    const { link } = connection;
    sendOn(connection, socket, {
      type: 'HELLO',
      version: PROTOCOL_VERSION,
      role,
      name: host.name,
      epoch,
      link,
      fields,
    });
  }

  function onWelcome(connection: Connection, socket: SocketKind, welcome: WelcomeMessage): void {
    const { role, name, epoch, fields } = welcome;
    if (welcome.link !== connection.link) {
      options.onRejected();
      return;
    }
    if (connection.peer !== null && connection.peer.epoch !== epoch) {
      reopen(connection, 'superseded');
      return;
    }
    if (firstDifference(options.fields, fields) !== null) return;
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

  function openData(connection: Connection, address: string): void {
    connection.data = network.open(host, {
      address,
      socket: 'data',
      routingId: connection.control.routingId,
      onOpen: () => {},
      onFrames: (frames) => onFrames(connection, 'data', frames),
    });
    hello(connection, 'data');
  }

  function onFrames(connection: Connection, socket: SocketKind, frames: Frames): void {
    if (connections.get(connection.address) !== connection) return;
    const decoded = decode(frames);
    if (decoded === null) {
      options.onRejected();
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
        if (message.link === connection.link && (message.field === 'link' || connection.isUp)) {
          reopen(connection, 'refused');
        }
        break;
      case 'PING':
        if (peer !== null && message.from !== peer.epoch) reopen(connection, 'superseded');
        else if (peer !== null && !message.answer) ping(connection, true);
        break;
      case 'HELLO':
        options.onRejected();
        break;
      default:
        if (peer === null || !connection.isUp) options.onRejected();
        else options.onEvent({ type: 'message', peer, socket, message, payload });
    }
  }

  function ping(connection: Connection, answer: boolean): void {
    if (connection.isUp) connection.saidMs = now();
    const { peer, link } = connection;
    sendOn(connection, 'control', { type: 'PING', from: options.epoch, to: peer?.epoch ?? '', link, answer });
  }

  return {
    connect(address, keep) {
      const connection = connections.get(address);
      if (connection === undefined) open(address, keep);
      else connection.keep ||= keep;
    },
    send(epoch, socket, message, payload, onGone) {
      for (const connection of connections.values()) {
        if (connection.peer?.epoch !== epoch || !connection.isUp) continue;
        sendOn(connection, socket, message, payload, onGone);
        return true;
      }
      return false;
    },
    check() {
      const nowMs = now();
      const gapMs = pauseMs();
      for (const connection of [...connections.values()]) {
        connection.heardMs += gapMs;
        const silenceMs = nowMs - connection.heardMs;
        const quietMs = nowMs - connection.saidMs;
        if (connection.isUp) {
          if (silenceMs >= options.leaseMs) reopen(connection, 'lease');
          else if (quietMs >= options.heartbeatMs) ping(connection, false);
        } else if (!connection.keep && silenceMs >= ABANDON_LEASES * options.leaseMs) {
          shut(connection, 'lease');
        } else if (quietMs >= HELLO_MS && connection.control.waiting.length === 0) {
          hello(connection, 'control');
        }
      }
    },
  };
}
