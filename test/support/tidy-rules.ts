/**
 * The rules of the floor plan as functions from a tree of files to a list of faults. test/tidy.test.ts applies them to
 * this repository, and to small trees that break them.
 */
import { posix } from 'node:path';

/** Paths from the root of the repository, with `/`, and the text of each file. */
export type Tree = ReadonlyMap<string, string>;

interface Import {
  /** As written: `./x.ts`, `node:fs`, `@scope/name/part`. */
  readonly specifier: string;
  /** Erased by the compiler: says what something looks like, loads nothing. */
  readonly typeOnly: boolean;
}

interface FolderRule {
  /** Folders of ours. */
  readonly ours: readonly string[];
  /** Packages and node modules; `node:*` stands for all of Node's. */
  readonly outside: readonly string[];
}

/** Who may import whom. The two towers meet in server/ only; kernels/ and transfer/ are the ground. */
const floorPlan: Record<string, FolderRule> = {
  kernels: { ours: [], outside: ['webgpu', 'node:fs', 'node:assert'] },
  model: { ours: ['kernels'], outside: ['@huggingface/tokenizers', 'node:fs', 'node:path', 'node:assert'] },
  transfer: { ours: [], outside: ['@msgpack/msgpack', 'zeromq', 'node:assert'] },
  scheduler: { ours: ['transfer'], outside: ['node:assert'] },
  server: {
    ours: ['kernels', 'model', 'transfer', 'scheduler'],
    outside: ['fastify', 'pino', 'prom-client', '@redis/client', 'zeromq', 'ajv', 'webgpu', 'node:*'],
  },
  scripts: { ours: ['kernels', 'model', 'transfer', 'scheduler', 'server', 'test'], outside: ['*'] },
  test: { ours: ['kernels', 'model', 'transfer', 'scheduler', 'server', 'scripts'], outside: ['*'] },
};

/** Packages that only the named files may import, within folders that may. */
const onlyIn: Record<string, readonly string[]> = {
  '@msgpack/msgpack': ['transfer/messages.ts'],
  '@huggingface/tokenizers': ['model/tokenizer.ts'],
  webgpu: ['kernels/device.ts', 'server/adapter/probe.ts'],
};

/** The APIs as data; what is at their edges reads clocks and sockets. */
const pureApi = [
  'chat',
  'completions',
  'conversation',
  'dialect',
  'fields',
  'generate',
  'generation',
  'messages',
  'openapi',
  'responses',
  'responses-tools',
  'sampling',
  'tokenize',
].map((name) => `server/api/${name}.ts`);

/** No clock, randomness, I/O, timers or promises: what the simulator replays and the checker explores. */
export function isPure(path: string): boolean {
  if (/^(transfer|scheduler)\//.test(path)) return path !== 'transfer/channel.ts';
  return path === 'server/balancer.ts' || pureApi.includes(path);
}

/** Files that must load without Dawn: the router's process has no GPU. */
const gpuFree = ['model/config.ts', 'model/tokenizer.ts', 'model/chat.ts', 'model/safetensors.ts', 'server/router.ts'];

/** Imports that the floor plan does not allow. */
export function forbiddenImports(tree: Tree): string[] {
  const faults: string[] = [];
  for (const [path, text] of sources(tree)) {
    const folder = path.split('/')[0] ?? '';
    const rule = floorPlan[folder];
    if (rule === undefined) continue;
    for (const { specifier, typeOnly } of importsOf(text)) {
      if (specifier.startsWith('.')) {
        const target = resolve(path, specifier);
        const to = target.split('/')[0] ?? '';
        if (to !== folder && !rule.ours.includes(to)) faults.push(`${path} imports ${target}`);
        if (folder === 'scheduler' && target === 'transfer/channel.ts') faults.push(`${path} imports ${target}`);
        if (folder !== 'test' && target.endsWith('.test.ts')) faults.push(`${path} imports ${target}`);
        continue;
      }
      const name = packageOf(specifier);
      const allowed = rule.outside.some(
        (each) => each === '*' || each === name || (each === 'node:*' && name.startsWith('node:')),
      );
      if (!allowed) faults.push(`${path} imports ${name}`);
      const places = rule.outside.includes('*') ? undefined : onlyIn[name];
      if (places !== undefined && !typeOnly && !places.includes(path)) {
        faults.push(`${path} imports ${name}, which belongs in ${places.join(' or ')}`);
      }
      if (folder === 'transfer' && name === 'zeromq' && path !== 'transfer/channel.ts')
        faults.push(`${path} imports zeromq`);
    }
  }
  return faults;
}

/** Circles of imports that load code, each once, as `a -> b -> a`. */
export function importCycles(tree: Tree): string[] {
  const faults: string[] = [];
  const finished = new Set<string>();
  const visit = (path: string, trail: string[]): void => {
    const at = trail.indexOf(path);
    if (at >= 0) faults.push([...trail.slice(at), path].join(' -> '));
    if (at >= 0 || finished.has(path)) return;
    for (const next of loadedBy(tree, path)) visit(next, [...trail, path]);
    finished.add(path);
  };
  for (const [path] of sources(tree)) visit(path, []);
  return faults;
}

/** Words in pure files that reach outside of them. */
export function impurities(tree: Tree): string[] {
  const word =
    /(?<![.\w$])(Date|performance|Math\.random|crypto|process|console|setTimeout|setInterval|setImmediate|queueMicrotask|async|await|Promise)\b(?!\s*\??:)/g;
  const faults: string[] = [];
  for (const [path, text] of sources(tree)) {
    if (!isPure(path)) continue;
    for (const match of codeOf(text).matchAll(word))
      faults.push(`${path}:${lineAt(text, match.index)} uses ${match[1]}`);
  }
  return faults;
}

/** Files that load Dawn, directly or through others, and must not. */
export function gpuReached(tree: Tree): string[] {
  const faults: string[] = [];
  for (const start of gpuFree) {
    const seen = new Set<string>();
    const queue = tree.has(start) ? [start] : [];
    for (let path = queue.pop(); path !== undefined; path = queue.pop()) {
      if (seen.has(path)) continue;
      seen.add(path);
      if (importsOf(tree.get(path) ?? '').some(({ specifier, typeOnly }) => !typeOnly && specifier === 'webgpu')) {
        faults.push(`${start} loads webgpu through ${path}`);
      }
      queue.push(...loadedBy(tree, path));
    }
  }
  return faults;
}

/**
 * Kernels without a wrapper of the same stem, wrappers that load another kernel than their own or one that is not
 * there, bindings that the wrapper does not name. Files of kernels/ that load no .wgsl are not wrappers.
 */
export function unpairedKernels(tree: Tree): string[] {
  const faults: string[] = [];
  for (const [path, text] of tree) {
    const [, stem = '', extension] = /^kernels\/([^/]+)\.(ts|wgsl)$/.exec(path) ?? [];
    if (extension === 'ts') {
      for (const [, kernel = ''] of codeOf(text, 'keep quotes').matchAll(/'\.\/([\w-]+)\.wgsl'/g)) {
        if (kernel !== stem) faults.push(`${path} loads ${kernel}.wgsl`);
        if (!tree.has(`kernels/${kernel}.wgsl`)) faults.push(`${path} has no ${kernel}.wgsl`);
      }
    }
    if (extension !== 'wgsl') continue;
    const wrapper = tree.get(`kernels/${stem}.ts`);
    if (wrapper === undefined) faults.push(`${path} has no ${stem}.ts`);
    const code = codeOf(wrapper ?? '', 'keep quotes');
    for (const [, name = ''] of text.matchAll(/@binding\(\d+\)\s*var<[^>]+>\s*(\w+)\s*:/g)) {
      if (wrapper !== undefined && name !== 'params' && !new RegExp(`\\b${name}\\b`).test(code)) {
        faults.push(`kernels/${stem}.ts never names the binding ${name} of ${path}`);
      }
    }
  }
  return faults;
}

/**
 * Tests that are left out of a run, or that leave others out. A test may itself find that the system lacks a program,
 * and then says which: `if (...) return t.skip('reason')`.
 */
export function silencedTests(tree: Tree): string[] {
  const silenced = /(?<!\) return t)\.skip\(|\.(only|todo)\(|\b(only|skip|todo): *(true|['"`])/g;
  const faults: string[] = [];
  for (const [path, text] of tree) {
    if (!path.endsWith('.test.ts')) continue;
    for (const match of codeOf(text, 'keep quotes').matchAll(silenced))
      faults.push(`${path}:${lineAt(text, match.index)} has ${match[0]}`);
  }
  return faults;
}

/**
 * Assertions of truth without a message. A failing one looks like a hang: to quote the expression, Node 20 parses the
 * source again and again from the place of the compiled code, which in what tsx runs is another place, for minutes of
 * CPU. A message holds what was found, and is never undefined: then Node looks for the expression all the same.
 */
export function speechlessAssertions(tree: Tree): string[] {
  const faults: string[] = [];
  for (const [path, text] of sources(tree)) {
    const code = codeOf(text);
    for (const match of code.matchAll(/(?<![.\w$])assert(\.ok)?\(/g)) {
      const parts = argumentsAt(code, text, match.index + match[0].length);
      if (parts.length < 2) faults.push(`${path}:${lineAt(text, match.index)} does not say what it found`);
    }
  }
  return faults;
}

/** Marks of unfinished work. */
export function unfinishedMarks(tree: Tree): string[] {
  const marks = new RegExp(`\\b(${['TO' + 'DO', 'FIX' + 'ME', 'X' + 'XX', 'HA' + 'CK'].join('|')})\\b`, 'g');
  const faults: string[] = [];
  for (const [path, text] of tree) {
    for (const match of text.matchAll(marks)) faults.push(`${path}:${lineAt(text, match.index)} has ${match[0]}`);
  }
  return faults;
}

/** Places where a package registry is named: the lock file and .npmrc must work with any mirror. */
export function registryNames(tree: Tree): string[] {
  const faults: string[] = [];
  if (/"resolved": *"https?:/.test(tree.get('package-lock.json') ?? ''))
    faults.push('package-lock.json names a registry');
  if (/registry *=|\/\//.test(tree.get('.npmrc') ?? '')) faults.push('.npmrc names a registry');
  return faults;
}

/** Files whose name is no idea (`utils`) or not in kebab case. */
export function badNames(tree: Tree): string[] {
  const faults: string[] = [];
  for (const path of tree.keys()) {
    const file = path.split('/').at(-1) ?? '';
    if (/^(utils?|helpers?|common|misc|index)\.[a-z]+$/.test(file))
      faults.push(`${path} says nothing about its content`);
    if (/\.(ts|mjs|wgsl)$/.test(file) && !/^[a-z0-9]+(-[a-z0-9]+)*(\.test)?\.(ts|mjs|wgsl)$/.test(file))
      faults.push(`${path} is not in kebab case`);
  }
  return faults;
}

/** `npm run` commands in the documentation that package.json does not have. */
export function unknownCommands(tree: Tree): string[] {
  const { scripts = {} } = JSON.parse(tree.get('package.json') ?? '{}') as { scripts?: Record<string, string> };
  const faults: string[] = [];
  for (const [path, text] of tree) {
    if (!path.endsWith('.md')) continue;
    for (const [, name = ''] of text.matchAll(/npm run ([a-z][a-z:-]*)/g)) {
      if (!(name in scripts)) faults.push(`${path} mentions npm run ${name}`);
    }
  }
  return faults;
}

/** Those of the names that a document does not contain as whole words. */
export function undocumented(names: readonly string[], text: string): string[] {
  return names.filter((name) => !new RegExp(`(?<![\\w-])${name}(?![\\w-])`).test(text));
}

/** The imports, re-exports and dynamic imports of a TypeScript file. */
export function importsOf(text: string): Import[] {
  const found: Import[] = [];
  const code = codeOf(text, 'keep quotes');
  for (const [, kind, names = '', specifier = ''] of code.matchAll(
    /^(import|export)\b([^;'"]*?)\bfrom\s*['"]([^'"]+)['"]/gm,
  )) {
    const inner = /^\s*\{([^}]*)\}\s*$/.exec(names)?.[1];
    const each = inner
      ?.split(',')
      .map((name) => name.trim())
      .filter((name) => name !== '');
    const typeOnly =
      /^\s*type\b/.test(names) ||
      (kind === 'import' && each !== undefined && each.length > 0 && each.every((name) => name.startsWith('type ')));
    found.push({ specifier, typeOnly });
  }
  for (const [, specifier = ''] of code.matchAll(/^import\s*['"]([^'"]+)['"]/gm))
    found.push({ specifier, typeOnly: false });
  for (const [, specifier = ''] of code.matchAll(/\bimport\(\s*['"]([^'"]+)['"]/g))
    found.push({ specifier, typeOnly: false });
  return found;
}

/**
 * The code of a TypeScript file without comments, and unless they are kept without the content of quoted strings.
 * Blanks take their places, so that line numbers stay. Template literals keep what is inside their `${}`.
 */
export function codeOf(text: string, quotes: 'drop quotes' | 'keep quotes' = 'drop quotes'): string {
  const blank = (part: string): string => part.replace(/[^\n]/g, ' ');
  const token =
    /\/\/[^\n]*|\/\*[\s\S]*?\*\/|'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"|`(?:[^`\\]|\\[\s\S])*`|(?<=[(=,:[!&|?{};\n]\s*)\/(?![/*])(?:[^/\\\n[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+\/[a-z]*/g;
  return text.replace(token, (part) => {
    if (part.startsWith('//') || part.startsWith('/*')) return blank(part);
    if (part.startsWith('`'))
      return part.replace(/\$\{[^}]*\}|[^$]+|\$/g, (piece) => (piece.startsWith('${') ? piece : blank(piece)));
    return part.startsWith('/') || quotes === 'drop quotes' ? blank(part) : part;
  });
}

function* sources(tree: Tree): Generator<[string, string]> {
  for (const entry of tree) if (/\.(ts|mjs)$/.test(entry[0])) yield entry;
}

/** Files of the tree that loading `path` loads as well. */
function loadedBy(tree: Tree, path: string): string[] {
  return importsOf(tree.get(path) ?? '')
    .filter(({ specifier, typeOnly }) => !typeOnly && specifier.startsWith('.'))
    .map(({ specifier }) => resolve(path, specifier))
    .filter((target) => tree.has(target));
}

function resolve(from: string, specifier: string): string {
  return posix.normalize(posix.join(posix.dirname(from), specifier));
}

/** `node:fs/promises` -> `node:fs`, `@scope/name/part` -> `@scope/name`. */
function packageOf(specifier: string): string {
  return specifier
    .split('/')
    .slice(0, specifier.startsWith('@') ? 2 : 1)
    .join('/');
}

/** The arguments of the call whose bracket opens before `start`: where they end is read in `code`, the rest in `text`. */
function argumentsAt(code: string, text: string, start: number): string[] {
  const parts: string[] = [];
  let depth = 1;
  let from = start;
  for (let at = start; at < code.length && depth > 0; at++) {
    const sign = code[at]!;
    if ('([{'.includes(sign)) depth += 1;
    if (')]}'.includes(sign)) depth -= 1;
    if (depth > 0 && !(depth === 1 && sign === ',')) continue;
    parts.push(
      text
        .slice(from, at)
        .replace(/\/\/.*|\/\*[\s\S]*?\*\//g, '')
        .trim(),
    );
    from = at + 1;
  }
  return parts.filter((part) => part !== '');
}

function lineAt(text: string, index: number): number {
  return text.slice(0, index).split('\n').length;
}
