/**
 * `handoff doctor`: what is wrong with a running cluster, on one screen.
 *
 * It reads the router's `/debug/rooms`, which has every process's rooms, and judges: entries that stay too long, halves
 * that their router does not know, ledgers that do not add up, peers that are silent, processes that run different
 * code. `diagnose` is pure; fetching and printing are around it.
 */
import { parseKey } from '../../transfer/messages.ts';
import { adminHeaders } from './admin.ts';
import type { BuildInfo } from './build-info.ts';
import type { Deadlines, DoctorConfig } from '../config.ts';
import type { RouterPage, WorkerPage } from './debug-page.ts';

/** What the doctor says: lines for a person, and the faults alone. */
export interface Diagnosis {
  readonly lines: readonly string[];
  /** One sentence each; none: the cluster is healthy. */
  readonly faults: readonly string[];
}

/** Nothing but a step or a read that is under way delays an unwinding room. */
const LONGEST_UNWINDING = 10;
/** What the clocks themselves may be late by. */
const SLACK = 5;
/** A half may outlive its room on the router by a message that is on its way. */
const LONGEST_ORPHAN = 5;
const LONGEST_UNACKED = 10;
/** Peers speak at least once per heartbeat. */
const SILENT_HEARTBEATS = 5;
const LONGEST_TICK = 2;
/** The router's page waits for its slowest worker. */
const PAGE_LIMIT_MS = 5000;
/** Keys are long; their ends tell rooms apart. */
const KEY_CHARS = 16;

/** Examine the cluster behind `config.url`, print what is found; resolves with the exit code: 0 healthy, 1 not. */
export async function runDoctor(config: DoctorConfig): Promise<number> {
  const diagnosis = await examine(config);
  process.stdout.write(`${diagnosis.lines.join('\n')}\n`);
  return diagnosis.faults.length === 0 ? 0 : 1;
}

async function examine({ url, adminKey }: DoctorConfig): Promise<Diagnosis> {
  try {
    const signal = AbortSignal.timeout(PAGE_LIMIT_MS);
    const response = await fetch(`${url}/debug/rooms`, { headers: adminHeaders(adminKey), signal });
    if (!response.ok) return unreachable(url, `/debug/rooms answered ${response.status}: ${await response.text()}`);
    const page = (await response.json()) as RouterPage | WorkerPage;
    if (page.role !== 'router') return unreachable(url, `this is ${page.name}; give the URL of a router`);
    return diagnose(url, page);
  } catch (error) {
    return unreachable(url, (error as Error).name === 'TimeoutError' ? 'no answer' : 'it cannot be reached');
  }
}

function unreachable(url: string, why: string): Diagnosis {
  return { lines: [`${url}: NOT HEALTHY`, `  ! router: ${why}`], faults: [`router: ${why}`] };
}

/** Judge a router's page. */
export function diagnose(url: string, page: RouterPage): Diagnosis {
  const workers = page.workers.flatMap(({ worker, page: own }) => (own === null ? [] : [{ worker, page: own }]));
  const faults = [
    ...routerFaults(page),
    ...page.workers.flatMap(({ worker, error }) => (error === null ? [] : [`${worker}: ${error}`])),
    ...workers.flatMap(({ worker, page: own }) => workerFaults(worker, own, page)),
    ...buildFaults(page, workers),
  ];
  const lines = [
    `${url}: ${faults.length === 0 ? 'healthy' : 'NOT HEALTHY'}`,
    '',
    ...table([
      ['process', 'rooms', 'oldest stay', 'unacked', 'pages', 'slots', 'ledger', 'reaper', 'epoch'],
      routerRow(page),
      ...page.workers.map((seat) => workerRow(seat.worker, seat.page)),
    ]),
    '',
    ...peerLines(page, workers),
    ...buildLines(page, workers),
    '',
    ...(faults.length === 0 ? ['Nothing is wrong.'] : faults.map((fault) => `! ${fault}`)),
  ];
  return { lines, faults };
}

type NamedPage = { readonly worker: string; readonly page: WorkerPage };

function routerFaults(page: RouterPage): string[] {
  const faults: string[] = [];
  for (const role of ['prefill', 'decode'] as const) {
    if (!page.workers.some((seat) => seat.role === role && seat.epoch !== null)) {
      faults.push(`router: no ${role} worker is linked`);
    }
  }
  if (page.reaperAgeSeconds > LONGEST_TICK)
    faults.push(`router: deadlines not judged for ${seconds(page.reaperAgeSeconds)}`);
  faults.push(
    ...silentPeers('router', page.peers, page.deadlines),
    ...page.rooms.flatMap((room) => stuck('router', room, page.deadlines)),
  );
  return faults;
}

function workerFaults(worker: string, page: WorkerPage, router: RouterPage): string[] {
  const { deadlines } = router;
  const faults = [
    ...silentPeers(worker, page.peers, deadlines),
    ...page.rooms.flatMap((room) => stuck(worker, room, deadlines)),
  ];
  const known = new Set(router.rooms.map(({ room }) => room));
  for (const { room, ageSeconds, queue } of page.rooms) {
    const key = parseKey(room);
    if (key?.router !== router.epoch || known.has(key.room) || ageSeconds <= LONGEST_ORPHAN) continue;
    faults.push(`${worker}: ${short(room)} is in ${queue} for ${seconds(ageSeconds)}, but its router does not know it`);
  }
  for (const { room, message, name, ageSeconds } of page.unacknowledged) {
    if (ageSeconds === null || ageSeconds <= LONGEST_UNACKED) continue;
    faults.push(`${worker}: ${message} of ${short(room)} is not acknowledged by ${name} for ${seconds(ageSeconds)}`);
  }
  const { conservation, pages, slots } = page;
  for (const fault of conservation.faults) faults.push(`${worker}: ledger: ${fault}`);
  if (conservation.violationsTotal > 0) faults.push(`${worker}: ${conservation.violationsTotal} ledger violations`);
  if ((pages['quarantined'] ?? 0) > 0) faults.push(`${worker}: ${pages['quarantined']} pages are quarantined`);
  if (page.rooms.length === 0 && (usedPages(pages) > 0 || (slots['used'] ?? 0) > 0)) {
    faults.push(`${worker}: ${usedPages(pages)} pages and ${slots['used']} slots in use, but no room`);
  }
  if (page.reaperAgeSeconds > LONGEST_TICK)
    faults.push(`${worker}: deadlines not judged for ${seconds(page.reaperAgeSeconds)}`);
  return faults;
}

/** Longest stay in a queue that the clocks explain, in seconds; null: any. */
function longestStay(queue: string, { stallMs, roomMs }: Deadlines): number | null {
  switch (queue) {
    case 'inflight':
      return stallMs / 1000 + SLACK;
    case 'unwinding':
      return LONGEST_UNWINDING;
    case 'transfer': // pages are reserved while the prompt is computed, whatever its length
    case 'running':
      return null;
    default:
      // Waiting at a peer stops the room's clock, so this is a matter of taste: half as long again.
      return (1.5 * roomMs) / 1000;
  }
}

function stuck(
  process: string,
  room: { room: string; queue: string; state: string; ageSeconds: number; lastEvent: { ageSeconds: number } | null },
  deadlines: Deadlines,
): string[] {
  const { queue, state, ageSeconds, lastEvent } = room;
  const limit = longestStay(queue, deadlines);
  const where = state === queue ? queue : `${queue} (${state})`;
  if (limit !== null && ageSeconds > limit) {
    return [`${process}: ${short(room.room)} is in ${where} for ${seconds(ageSeconds)}`];
  }
  const quietSeconds = Math.min(ageSeconds, lastEvent?.ageSeconds ?? ageSeconds);
  if (limit === null && quietSeconds > deadlines.stallMs / 1000 + SLACK) {
    const place = queue === 'running' ? where : `in ${where}`;
    return [`${process}: ${short(room.room)} is ${place}, but nothing happened to it for ${seconds(quietSeconds)}`];
  }
  return [];
}

function silentPeers(process: string, peers: RouterPage['peers'], { heartbeatMs }: Deadlines): string[] {
  const longest = (SILENT_HEARTBEATS * heartbeatMs) / 1000;
  return peers.flatMap(({ name, isUp, silenceSeconds }) => {
    if (!isUp) return [`${process}: lost ${name} ${seconds(silenceSeconds)} ago`];
    return silenceSeconds > longest ? [`${process}: ${name} is silent for ${seconds(silenceSeconds)}`] : [];
  });
}

function buildFaults(router: RouterPage, workers: readonly NamedPage[]): string[] {
  return workers.flatMap(({ worker, page: { build } }) => {
    const faults: string[] = [];
    for (const field of ['codeDigest', 'modelDigest'] as const) {
      const [theirs, ours] = [build[field], router.build[field]];
      if (theirs !== ours)
        faults.push(`${worker}: ${field === 'codeDigest' ? 'code' : 'checkpoint'} ${theirs}, the router has ${ours}`);
    }
    return faults;
  });
}

function routerRow(page: RouterPage): string[] {
  const { rooms, reaperAgeSeconds, epoch } = page;
  return ['router', String(rooms.length), oldestStay(rooms), '-', '-', '-', '-', seconds(reaperAgeSeconds), epoch];
}

function workerRow(worker: string, page: WorkerPage | null): string[] {
  if (page === null) return [worker, '?', '?', '?', '?', '?', '?', '?', '?'];
  const { rooms, pages, slots, conservation, reaperAgeSeconds, epoch, unacknowledged } = page;
  const total = Object.values(pages).reduce((sum, count) => sum + count, 0);
  const used = slots['used'] ?? 0;
  return [
    page.draining ? `${worker} (draining)` : worker,
    String(rooms.length),
    oldestStay(rooms),
    String(unacknowledged.length),
    `${usedPages(pages)} of ${total}`,
    `${used} of ${used + (slots['free'] ?? 0)}`,
    conservation.faults.length === 0 && conservation.violationsTotal === 0 ? 'adds up' : 'BROKEN',
    seconds(reaperAgeSeconds),
    epoch,
  ];
}

/** Per queue, how many and the longest stay: `running 3 (4.2 s), transfer 1 (0.1 s)`. */
function oldestStay(rooms: readonly { queue: string; ageSeconds: number }[]): string {
  const queues = new Map<string, { count: number; oldest: number }>();
  for (const { queue, ageSeconds } of rooms) {
    const { count, oldest } = queues.get(queue) ?? { count: 0, oldest: 0 };
    queues.set(queue, { count: count + 1, oldest: Math.max(oldest, ageSeconds) });
  }
  if (queues.size === 0) return '-';
  return [...queues].map(([queue, { count, oldest }]) => `${queue} ${count} (${seconds(oldest)})`).join(', ');
}

function peerLines(router: RouterPage, workers: readonly NamedPage[]): string[] {
  const all = [{ worker: 'router', page: router }, ...workers];
  const rows = all.flatMap(({ worker, page }) =>
    page.peers.map(({ name, epoch, isUp, silenceSeconds, epochChanges }) => [
      worker,
      name,
      isUp ? 'up' : 'LOST',
      seconds(silenceSeconds),
      epoch,
      String(epochChanges),
    ]),
  );
  return rows.length === 0 ? [] : [...table([['process', 'peer', 'link', 'silent', 'epoch', 'restarts'], ...rows]), ''];
}

function buildLines(router: RouterPage, workers: readonly NamedPage[]): string[] {
  const byText = new Map<string, string[]>();
  for (const { worker, page } of [{ worker: 'router', page: router }, ...workers]) {
    const text = buildText(page.build);
    byText.set(text, [...(byText.get(text) ?? []), worker]);
  }
  return [...byText].map(([text, names]) => `${names.join(', ')}: ${text}`);
}

function buildText({ version, commit, code, codeDigest, checkpoint, modelDigest }: BuildInfo): string {
  const cleanness = {
    clean: 'a clean build',
    modified: 'MODIFIED since',
    unknown: 'of unknown origin',
    external: 'not part of the build',
  };
  const at = commit === null ? '' : ` at ${commit.slice(0, 12)}`;
  return `version ${version}${at}, code ${codeDigest} (${cleanness[code]}), checkpoint ${modelDigest.slice(0, 16)} (${cleanness[checkpoint]})`;
}

function usedPages(pages: Readonly<Record<string, number>>): number {
  let used = 0;
  for (const [state, count] of Object.entries(pages)) if (state !== 'free' && state !== 'cached') used += count;
  return used;
}

function short(key: string): string {
  return key.length <= KEY_CHARS ? key : `…${key.slice(-KEY_CHARS)}`;
}

function seconds(value: number): string {
  return `${value.toFixed(value < 10 ? 1 : 0)} s`;
}

/** Columns as wide as their widest cell. */
function table(rows: readonly (readonly string[])[]): string[] {
  const widths = (rows[0] ?? []).map((_, column) => Math.max(...rows.map((row) => row[column]?.length ?? 0)));
  return rows.map((row) =>
    row
      .map((cell, column) => cell.padEnd(widths[column] ?? 0))
      .join('  ')
      .trimEnd(),
  );
}
