/**
 * `handoff all`: a router and its workers as child processes, started, watched and ended together.
 *
 * Workers come first and say where they listen (IPC messages below); then the router gets their control addresses. A
 * worker that dies is started again at the same addresses after a back-off, and the router meets it there as a new
 * epoch. A child that cannot come up for the first time ends everything, with its own words as the error.
 *
 *   launch -> starting -> ready -> (exit) -> waiting (back-off) -> starting ...
 *                \-> (exit, before its first ready, three times, or once with code 2) -> all end
 *
 * The children's half of the conversation, `serveRole` and `reportProgress`, is at the end: what a process of any role
 * does about signals, its parent and its own faults.
 */
import { fork } from 'node:child_process';
import type { ChildProcess } from 'node:child_process';
import { createServer } from 'node:net';
import { availableParallelism } from 'node:os';
import { fileURLToPath } from 'node:url';
import type { Logger } from 'pino';
import { ConfigError as ModelConfigError } from '../model/config.ts';
import { CheckpointError } from '../model/safetensors.ts';
import { ConfigError, flagOf } from './config.ts';
import type { AllConfig, WorkerRole } from './config.ts';

/** Where a process listens. Workers have all three. */
export interface Addresses {
  /** Base URL, http://HOST:PORT */
  readonly http: string;
  /** tcp://HOST:PORT */
  readonly control?: string | undefined;
  readonly transfer?: string | undefined;
}

/**
 * How much time running requests get when a process ends: `drain` is `--drain-grace`, for SIGTERM and roll-outs; `quick`
 * is 2 s, for a person at a terminal (Ctrl-C) and for orphans. An idle process ends at once in both.
 */
export type Closing = 'drain' | 'quick';

/** What `runRouter` and `runWorker` resolve with once they serve. */
export interface RunningRole extends Addresses {
  /** Take nothing new, let requests finish, end those that are left with an error, give back everything. Called once. */
  close(how: Closing): Promise<void>;
}

/** What a parent tells its child over IPC: end, in this way. */
export interface ParentMessage {
  readonly type: 'close';
  readonly how: Closing;
}

/** What `quick` leaves to running requests. */
export const QUICK_GRACE_MS = 2000;

/** A step of a long start, such as reading weights: `done` of `total`, in `unit`. */
export interface Progress {
  readonly step: string;
  readonly done: number;
  readonly total: number;
  /** Bytes, pipelines, ... */
  readonly unit: string;
}

/** What a child tells its parent over IPC. */
export type ChildMessage =
  | ({ readonly type: 'ready' } & Addresses)
  | ({ readonly type: 'progress' } & Progress)
  | { readonly type: 'failed'; readonly message: string };

type Role = 'router' | WorkerRole;

/** A child as others may see it. */
export interface ProcessView {
  /** `router`, `prefill-0`, `decode-1` */
  readonly name: string;
  readonly role: Role;
  readonly state: 'starting' | 'ready' | 'waiting' | 'ended';
  readonly pid: number | null;
  /** Set from its first ready on. */
  readonly addresses: Addresses | null;
  /** How often it was started again. */
  readonly restarts: number;
}

/** Something happened to a child; `delayMs` is the back-off that begins when it is waiting. */
export interface ProcessEvent extends ProcessView {
  readonly delayMs: number | null;
}

/** The cluster could not be started; the message is for a person and says what to do. */
export class SupervisorError extends Error {
  override readonly name = 'SupervisorError';
}

/** How patient the supervisor is, in milliseconds unless a count. */
export interface Patience {
  readonly backoffFirstMs: number;
  readonly backoffMaxMs: number;
  /** A child that was ready for so long starts with the first back-off again. */
  readonly stableMs: number;
  /** Failures in a row before the first ready that end everything. */
  readonly startFailures: number;
  /** From the request to end to SIGKILL; `--drain-grace` more for a drain. */
  readonly killMs: number;
}

const DEFAULT_PATIENCE: Patience = {
  backoffFirstMs: 1000,
  backoffMaxMs: 30_000,
  stableMs: 60_000,
  startFailures: 3,
  killMs: 4000, // everything must be over 5 s after Ctrl-C
};

/** Lines of a child kept to explain its death. */
const TAIL_LINES = 20;
/** What Dawn says of every adapter it opens; it means nothing to anyone who runs this. */
const DAWN_NOISE = /^Warning: max\w+PerPipelineLayout artificially reduced/;
const LOOPBACK = '127.0.0.1';

export interface SupervisorOptions {
  /** For every child: the variables that select the adapter. */
  readonly environment?: Readonly<Record<string, string>>;
  /** The adapter runs on the CPU: workers share its cores. */
  readonly softwareAdapter: boolean;
  readonly log: Logger;
  /** Lines for a person: children's output and progress. */
  readonly terminal: Terminal;
  readonly onEvent?: (event: ProcessEvent) => void;
  readonly patience?: Partial<Patience>;
  /** The script that runs a role; main.ts unless given (tests). */
  readonly entry?: string;
}

export interface Supervisor {
  /**
   * Start everything. Resolves when the router serves. Rejects with `SupervisorError`, all children ended, when a
   * port is busy or a child cannot come up; also when `close` is called meanwhile.
   */
  start(): Promise<void>;
  processes(): ProcessView[];
  /** End all children, by force those that take too long. Resolves when none is left. The first call counts. */
  close(how: Closing): Promise<void>;
  /** End all children at once. */
  kill(): void;
}

interface Child {
  readonly name: string;
  readonly role: Role;
  /** Which of its role, from 0. */
  readonly index: number;
  state: ProcessView['state'];
  process: ChildProcess | null;
  addresses: Addresses | null;
  restarts: number;
  startFailures: number;
  backoffMs: number;
  readyAtMs: number;
  backoff: NodeJS.Timeout | null;
  /** Its last lines, and the reason it gave, since it was last started. */
  tail: string[];
  reason: string | null;
  firstReady: Deferred;
}

/** Watch over the processes of one `handoff all`. Nothing runs before `start`. */
export function createSupervisor(config: AllConfig, options: SupervisorOptions): Supervisor {
  const patience = { ...DEFAULT_PATIENCE, ...options.patience };
  const { log, terminal } = options;
  const here = fileURLToPath(import.meta.url);
  const entry = options.entry ?? fileURLToPath(new URL(here.endsWith('.ts') ? 'main.ts' : 'main.js', import.meta.url));
  // From the sources children need the loader that this process has; its full path, as they may run anywhere.
  const execArgv = entry.endsWith('.ts') ? ['--import', import.meta.resolve('tsx')] : [];
  const workerCount = config.prefill + config.decode;

  const workers = [
    ...Array.from({ length: config.prefill }, (_, index) => newChild('prefill', index, patience)),
    ...Array.from({ length: config.decode }, (_, index) => newChild('decode', index, patience)),
  ];
  const router = newChild('router', 0, patience);
  const children = [router, ...workers];
  let closing = false;
  let ended: Promise<void> | null = null;

  function argumentsFor(child: Child): string[] {
    const { role, index, addresses } = child;
    const shared = config.childFlags[role];
    // Once it was ready, a child comes back where it was, also if the system chose the ports.
    const oldPort = addresses === null ? null : Number(new URL(addresses.http).port);
    if (role === 'router') {
      const known = workers.map((worker) => `${flagOf(workerFlag(worker.role))}=${worker.addresses?.control ?? ''}`);
      return [role, `--host=${config.host}`, `--port=${oldPort ?? config.port}`, ...shared, ...known];
    }
    return [
      role,
      `--host=${LOOPBACK}`,
      `--port=${oldPort ?? workerPort(config, role, index)}`,
      `--control=${addresses?.control ?? `tcp://${LOOPBACK}:0`}`,
      `--transfer=${addresses?.transfer ?? `tcp://${LOOPBACK}:0`}`,
      ...shared,
    ];
  }

  function environmentFor(child: Child): NodeJS.ProcessEnv {
    const env = { ...process.env, ...options.environment };
    if (child.role === 'router' || !options.softwareAdapter) return env;
    // lavapipe starts a thread per core in every process; several of them would only take turns.
    const threads = Math.max(1, Math.floor(availableParallelism() / workerCount));
    return { LP_NUM_THREADS: String(threads), ...env };
  }

  function launch(child: Child): void {
    child.backoff = null;
    child.tail = [];
    child.reason = null;
    child.readyAtMs = Number.POSITIVE_INFINITY;
    const running = fork(entry, argumentsFor(child), {
      execArgv,
      env: environmentFor(child),
      stdio: ['ignore', 'pipe', 'pipe', 'ipc'],
    });
    child.process = running;
    for (const stream of [running.stdout!, running.stderr!]) {
      eachLine(stream, (line) => {
        if (DAWN_NOISE.test(line)) return;
        child.tail = [...child.tail.slice(1 - TAIL_LINES), line];
        terminal.line(line.startsWith('{') ? line : `${child.name} | ${line}`);
      });
    }
    running.on('message', (message) => onMessage(child, message as ChildMessage));
    running.on('error', (cause) => {
      child.reason ??= cause.message;
      if (running.pid === undefined) onExit(child, 'could not be started');
    });
    // `close` and not `exit`: by then its last lines have been read.
    running.on('close', (code, signal) => {
      onExit(child, signal === null ? `exit code ${code}` : `signal ${signal}`, code === HOPELESS);
    });
    enter(child, 'starting');
  }

  function onMessage(child: Child, message: ChildMessage): void {
    switch (message.type) {
      case 'progress':
        terminal.progress(child.name, message);
        break;
      case 'failed':
        child.reason = message.message;
        break;
      case 'ready': {
        const { http, control, transfer } = message;
        child.addresses = { http, control, transfer };
        child.readyAtMs = performance.now();
        terminal.finished(child.name);
        enter(child, 'ready');
        child.firstReady.resolve();
        break;
      }
      default:
        message satisfies never;
    }
  }

  function onExit(child: Child, how: string, isHopeless = false): void {
    if (child.process === null) return;
    child.process = null;
    terminal.finished(child.name);
    if (closing) return enter(child, 'ended');

    const stableSince = child.readyAtMs + patience.stableMs;
    if (performance.now() >= stableSince) child.backoffMs = patience.backoffFirstMs;
    if (child.addresses === null) {
      child.startFailures += 1;
      if (isHopeless || child.startFailures >= patience.startFailures) {
        enter(child, 'ended');
        return child.firstReady.reject(new SupervisorError(epitaph(child, how)));
      }
    }
    const delayMs = child.backoffMs;
    child.backoffMs = Math.min(patience.backoffMaxMs, child.backoffMs * 2);
    child.backoff = setTimeout(() => {
      child.restarts += 1;
      launch(child);
    }, delayMs);
    log.warn({ process: child.name, how, reason: child.reason, delayMs }, 'process ended, starting it again');
    enter(child, 'waiting', delayMs);
  }

  function enter(child: Child, state: ProcessView['state'], delayMs: number | null = null): void {
    child.state = state;
    options.onEvent?.({ ...view(child), delayMs });
  }

  async function start(): Promise<void> {
    const busy = await busyPorts(config);
    if (busy.length > 0) throw new SupervisorError(busy.join('\n'));
    try {
      for (const child of workers) if (!closing) launch(child);
      await Promise.all(workers.map((child) => child.firstReady.promise));
      if (!closing) launch(router);
      await router.firstReady.promise;
    } catch (error) {
      await close('quick');
      throw error;
    }
  }

  function close(how: Closing): Promise<void> {
    closing = true;
    ended ??= endAll(how);
    return ended;
  }

  async function endAll(how: Closing): Promise<void> {
    const limitMs = patience.killMs + (how === 'drain' ? config.drainMs : 0);
    for (const child of children) {
      if (child.backoff !== null) clearTimeout(child.backoff);
      child.backoff = null;
      child.firstReady.reject(new SupervisorError('stopped before everything was ready'));
    }
    const ends = children.map(async (child) => {
      const running = child.process;
      if (running === null) return enter(child, 'ended');
      // `exit` and not `close`: something it started may hold its output open for longer.
      const gone = new Promise<void>((settle) => running.once('exit', () => settle()));
      // One that is still starting has nothing to drain, and may not listen to messages yet.
      const request: ParentMessage = { type: 'close', how };
      if (child.state === 'ready' && running.connected) running.send(request, () => {});
      else running.kill('SIGTERM');
      const timer = setTimeout(() => running.kill('SIGKILL'), limitMs);
      await gone;
      clearTimeout(timer);
      onExit(child, 'stopped');
    });
    await Promise.all(ends);
    terminal.close();
  }

  return {
    start,
    processes: () => children.map(view),
    close,
    kill: () => children.forEach((child) => child.process?.kill('SIGKILL')),
  };
}

/** The lines that end a start: where to connect, the processes, and a request to try. */
export function describeCluster(config: AllConfig, processes: readonly ProcessView[]): string[] {
  const rows = processes.map(({ name, pid, addresses }) => [
    name,
    String(pid ?? '-'),
    addresses?.http ?? '-',
    addresses?.control ?? '-',
    addresses?.transfer ?? '-',
  ]);
  const table = [['process', 'pid', 'http', 'control', 'transfer'], ...rows];
  const widths = table[0]!.map((_, column) => Math.max(...table.map((row) => row[column]!.length)));
  const lines = table.map((row) =>
    row
      .map((cell, column) => cell.padEnd(widths[column]!))
      .join('  ')
      .trimEnd(),
  );

  const url = processes.find(({ role }) => role === 'router')?.addresses?.http ?? '';
  // A wildcard address is not one to connect to.
  const reachable = url.replace(/\/\/(0\.0\.0\.0|\[::\])/, '//127.0.0.1');
  const content = 'Mia lives in Oslo. The code of the red lamp is 417. What is the code of the red lamp?';
  const body = JSON.stringify({ model: config.servedName, temperature: 0, messages: [{ role: 'user', content }] });
  const headers = ["-H 'content-type: application/json'"];
  if (config.needsKey) headers.push('-H "authorization: Bearer $HANDOFF_API_KEY"');
  return [
    ...lines,
    '',
    `Serving ${config.servedName} on ${reachable}. Try:`,
    '',
    `curl ${reachable}/v1/chat/completions ${headers.join(' ')} -d '${body.replaceAll("'", "'\\''")}'`,
  ];
}

function newChild(role: Role, index: number, patience: Patience): Child {
  return {
    name: role === 'router' ? role : `${role}-${index}`,
    role,
    index,
    state: 'waiting',
    process: null,
    addresses: null,
    restarts: 0,
    startFailures: 0,
    backoffMs: patience.backoffFirstMs,
    readyAtMs: Number.POSITIVE_INFINITY,
    backoff: null,
    tail: [],
    reason: null,
    firstReady: newDeferred(),
  };
}

function view(child: Child): ProcessView {
  const { name, role, state, addresses, restarts } = child;
  return { name, role, state, pid: child.process?.pid ?? null, addresses, restarts };
}

/** Why a child that never came up ended: the reason it gave, else its last lines. */
function epitaph(child: Child, how: string): string {
  const words = child.reason ?? child.tail.join('\n');
  const tries = child.startFailures === 1 ? '1 try' : `${child.startFailures} tries`;
  return `${child.name} could not be started (${tries}, last: ${how}):\n${words}`;
}

function workerFlag(role: Role): 'prefillWorker' | 'decodeWorker' {
  return role === 'prefill' ? 'prefillWorker' : 'decodeWorker';
}

function workerPort(config: AllConfig, role: WorkerRole, index: number): number {
  const first = role === 'prefill' ? config.prefillPort : config.decodePort;
  return first === 0 ? 0 : first + index;
}

/** One sentence for each port that somebody else has, naming the flag that changes it. */
async function busyPorts(config: AllConfig): Promise<string[]> {
  const wanted = [{ name: 'the router', host: config.host, port: config.port, flag: flagOf('port') }];
  for (const role of ['prefill', 'decode'] as const) {
    for (let index = 0; index < config[role]; index++) {
      const port = workerPort(config, role, index);
      wanted.push({ name: `${role}-${index}`, host: LOOPBACK, port, flag: flagOf(`${role}Port`) });
    }
  }
  const faults = await Promise.all(
    wanted.map(async ({ name, host, port, flag }) => {
      const code = port === 0 ? null : await tryPort(host, port);
      if (code === null) return null;
      const what = code === 'EADDRINUSE' ? 'is in use' : `cannot be used (${code})`;
      return `port ${port} on ${host}, for ${name}, ${what}; choose another with ${flag}`;
    }),
  );
  return faults.filter((fault) => fault !== null);
}

/** The code of the error that listening there gives, or null. */
function tryPort(host: string, port: number): Promise<string | null> {
  return new Promise((settle) => {
    const server = createServer();
    server.once('error', (error: NodeJS.ErrnoException) => settle(error.code ?? error.message));
    server.listen({ host, port }, () => server.close(() => settle(null)));
  });
}

interface Deferred {
  readonly promise: Promise<void>;
  resolve(): void;
  reject(error: Error): void;
}

/** A promise settled from outside; later calls change nothing. A rejection nobody waits for yet is not an error. */
function newDeferred(): Deferred {
  let resolve!: () => void;
  let reject!: (error: Error) => void;
  const promise = new Promise<void>((onResolve, onReject) => {
    resolve = onResolve;
    reject = onReject;
  });
  promise.catch(() => {});
  return { promise, resolve, reject };
}

function eachLine(stream: NodeJS.ReadableStream, take: (line: string) => void): void {
  let rest = '';
  stream.setEncoding('utf8');
  stream.on('data', (text: string) => {
    const lines = (rest + text).split('\n');
    rest = lines.pop()!;
    lines.forEach(take);
  });
  stream.on('end', () => {
    if (rest !== '') take(rest);
  });
}

/** What a person sees while processes start and run. */
export interface Terminal {
  line(text: string): void;
  progress(name: string, progress: Progress): void;
  /** Nothing more to come from this process's start. */
  finished(name: string): void;
  close(): void;
}

/** Redraws of the bar a second: fewer look frozen, more cost a slow terminal. */
const REDRAW_MS = 80;
/** Without a terminal, a line per process this often. */
const PLAIN_LINE_MS = 2000;
/** A rate over less says nothing. */
const RATE_AFTER_MS = 1000;
const BAR_CELLS = 20;

/**
 * Lines and progress on a stream.
 *
 * On a terminal, one line at the bottom shows all processes that load, redrawn in place. Elsewhere each process
 * gets a line when a step begins or ends, and every 2 s between. Steps in bytes have their mean rate beside them.
 *
 * now  milliseconds of a clock that only goes forward
 */
export function createTerminal(
  out: NodeJS.WritableStream & { isTTY?: boolean; columns?: number },
  now: () => number = () => performance.now(),
): Terminal {
  const loading = new Map<string, Timed>();
  const shownAtMs = new Map<string, number>();
  let drawn = false;
  let drawnAtMs = Number.NEGATIVE_INFINITY;

  const erase = (): void => {
    if (drawn) out.write('\r\u001b[K');
    drawn = false;
  };
  const draw = (): void => {
    if (loading.size === 0) return;
    const text = [...loading].map(([name, progress]) => `${name} ${bar(progress)}`).join('   ');
    out.write(`\r\u001b[K${text.slice(0, (out.columns ?? 80) - 1)}`);
    drawn = true;
    drawnAtMs = now();
  };

  return {
    line(text) {
      erase();
      out.write(`${text}\n`);
      if (out.isTTY) draw();
    },
    progress(name, reported) {
      const before = loading.get(name);
      const nowMs = now();
      const same = before?.step === reported.step ? before : null;
      const progress = {
        ...reported,
        sinceMs: same?.sinceMs ?? nowMs,
        sinceDone: same?.sinceDone ?? reported.done,
        nowMs,
      };
      loading.set(name, progress);
      if (out.isTTY) {
        if (nowMs - drawnAtMs >= REDRAW_MS || progress.done >= progress.total) draw();
        return;
      }
      const edge = before?.step !== progress.step || progress.done >= progress.total;
      if (!edge && nowMs - (shownAtMs.get(name) ?? 0) < PLAIN_LINE_MS) return;
      shownAtMs.set(name, nowMs);
      out.write(`${name}: ${progress.step} ${amount(progress)}\n`);
    },
    finished(name) {
      if (!loading.delete(name) || !out.isTTY) return;
      erase();
      draw();
    },
    close: erase,
  };
}

/** A step, and when it was first heard of. */
interface Timed extends Progress {
  readonly sinceMs: number;
  readonly sinceDone: number;
  readonly nowMs: number;
}

function bar(progress: Timed): string {
  const share = progress.total === 0 ? 1 : Math.min(1, progress.done / progress.total);
  const filled = Math.round(share * BAR_CELLS);
  return `${progress.step} [${'#'.repeat(filled)}${'.'.repeat(BAR_CELLS - filled)}] ${amount(progress)}`;
}

function amount({ done, total, unit, sinceMs, sinceDone, nowMs }: Timed): string {
  if (unit !== 'bytes') return `${done} of ${total} ${unit}`;
  const [name, size] = total < 2 ** 30 ? ['MiB', 2 ** 20] : ['GiB', 2 ** 30];
  const elapsedMs = nowMs - sinceMs;
  const rate = ((done - sinceDone) / elapsedMs) * 1000;
  const at = elapsedMs < RATE_AFTER_MS ? '' : `, ${(rate / 2 ** 20).toFixed(0)} MiB/s`;
  return `${(done / size).toFixed(1)} of ${(total / size).toFixed(1)} ${name}${at}`;
}

/** Seconds a process may take to close after its parent went away: nobody else would end it. */
const ORPHAN_LIMIT_MS = 4000;
/** Exit code of a start that would fail the same way again: what was asked for does not fit, or the checkpoint is damaged. */
const HOPELESS = 2;
const hopelessErrors = [ConfigError, ModelConfigError, CheckpointError];
/** A dying process waits so long at most for its parent to read why. */
const LAST_WORDS_MS = 500;

/**
 * Be one role for the rest of this process's life.
 *
 * Starts it, tells the parent, if there is one, where it listens, and then ends the process:
 * with 0 when SIGTERM (which drains), SIGINT, its parent or the loss of it closed it; with 1 when the start failed, on an
 * unhandled error, or when the same signal comes twice (not on any second signal: Ctrl-C reaches parent and children at
 * once, and the parent's SIGTERM follows it); with 2 when another start would fail, too.
 */
export function serveRole(options: { start: () => Promise<RunningRole>; log: Logger }): void {
  const { log } = options;
  let running: RunningRole | null = null;
  let closing = false;
  const seen = new Set<string>();

  const die = (message: string, error: unknown): void => {
    const reason = error instanceof Error ? error.message : String(error);
    const code = hopelessErrors.some((kind) => error instanceof kind) ? HOPELESS : 1;
    log.fatal({ err: error }, message);
    tell({ type: 'failed', message: reason }, () => process.exit(code));
    setTimeout(() => process.exit(code), LAST_WORDS_MS);
  };
  const end = (cause: string, how: Closing): void => {
    if (closing) return;
    closing = true;
    log.info({ cause, how }, 'closing');
    if (running === null) process.exit(0);
    running.close(how).then(
      () => process.exit(0),
      (error: unknown) => die('could not close', error),
    );
  };

  process.on('uncaughtException', (error) => die('unhandled exception', error));
  process.on('unhandledRejection', (error) => die('unhandled rejection', error));
  for (const signal of ['SIGTERM', 'SIGINT'] as const) {
    process.on(signal, () => {
      if (seen.has(signal)) process.exit(1);
      seen.add(signal);
      end(signal, signal === 'SIGTERM' ? 'drain' : 'quick');
    });
  }
  if (process.send !== undefined) {
    process.on('message', (message: ParentMessage) => end('asked by parent', message.how));
    process.on('disconnect', () => {
      setTimeout(() => process.exit(1), ORPHAN_LIMIT_MS).unref();
      end('parent lost', 'quick');
    });
  }

  options.start().then(
    (role) => {
      running = role;
      const { http, control, transfer } = role;
      log.info({ http, control, transfer }, 'ready');
      tell({ type: 'ready', http, control, transfer });
    },
    (error: unknown) => die('could not start', error),
  );
}

let ownTerminal: Terminal | null = null;

/** Report a step of this process's start: to the parent if it has one, else on standard error. */
export function reportProgress(progress: Progress): void {
  if (process.send !== undefined) return tell({ type: 'progress', ...progress });
  ownTerminal ??= createTerminal(process.stderr);
  ownTerminal.progress('start', progress);
  if (progress.done >= progress.total) ownTerminal.finished('start');
}

function tell(message: ChildMessage, then: () => void = () => {}): void {
  if (process.send === undefined || !process.connected) return then();
  // A parent that goes away meanwhile is noticed by `disconnect`, not here.
  process.send(message, undefined, undefined, () => then());
}
