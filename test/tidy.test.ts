/** The floor plan, enforced: who imports whom, what is pure, what a file may hold. docs/architecture.md has the reasons. */
import assert from 'node:assert/strict';
import { existsSync, readdirSync, readFileSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { describe, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import {
  badNames,
  codeOf,
  forbiddenImports,
  gpuReached,
  importCycles,
  importsOf,
  impurities,
  registryNames,
  silencedTests,
  speechlessAssertions,
  undocumented,
  unfinishedMarks,
  unknownCommands,
  unpairedKernels,
  type Tree,
} from './support/tidy-rules.ts';

const root = fileURLToPath(new URL('..', import.meta.url));
const largestFileBytes = 100_000;
/** Not ours to judge: what others make, and what is built or kept beside the sources. */
const ignoredFolders = ['node_modules', 'dist', '.git', '.cache', '__pycache__', 'shared'];
const dataFolders = /^(model\/nano|test\/data|scripts\/nano)\//;

function readTree(): { tree: Tree; sizes: Map<string, number> } {
  const tree = new Map<string, string>();
  const sizes = new Map<string, number>();
  const walk = (folder: string): void => {
    for (const entry of readdirSync(join(root, folder), { withFileTypes: true })) {
      const path = folder === '' ? entry.name : `${folder}/${entry.name}`;
      if (entry.isDirectory() && !ignoredFolders.includes(entry.name)) walk(path);
      if (!entry.isFile() || /\.(log|tgz)$/.test(path)) continue;
      sizes.set(path, statSync(join(root, path)).size);
      if (!dataFolders.test(path)) tree.set(path, readFileSync(join(root, path), 'utf8'));
    }
  };
  walk('');
  return { tree, sizes };
}

describe('this repository', () => {
  const { tree, sizes } = readTree();
  const rules = {
    'imports follow the floor plan': forbiddenImports,
    'no file imports itself through others': importCycles,
    'pure files use no clock, randomness, I/O, timers or promises': impurities,
    'what the router loads does not load Dawn': gpuReached,
    'every kernel has a wrapper that names its bindings': unpairedKernels,
    'no test is left out': silencedTests,
    'an assertion of truth says what it found': speechlessAssertions,
    'no mark of unfinished work is left': unfinishedMarks,
    'no package registry is named': registryNames,
    'file names say what is inside, in kebab case': badNames,
    'commands in the documentation exist': unknownCommands,
  };
  for (const [name, rule] of Object.entries(rules)) {
    test(name, () => assert.deepEqual(rule(tree), []));
  }

  test('files are small enough to read', () => {
    const large = [...sizes].filter(
      ([path, bytes]) => bytes > largestFileBytes && !dataFolders.test(path) && path !== 'package-lock.json',
    );
    assert.deepEqual(large, []);
  });

  test('every option and every metric is in docs/operations.md', () => {
    const operations = tree.get('docs/operations.md');
    if (operations === undefined)
      return assert.equal(existsSync(join(root, 'docs/operations.md')), false, 'the page is there and was not read');
    const table = /export const OPTIONS = \{([\s\S]*?)\n\}/.exec(tree.get('server/config.ts') ?? '')?.[1] ?? '';
    const options = [...table.matchAll(/^ {2}(\w+): \{/gm)].map(
      ([, key = '']) => `--${key.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`)}`,
    );
    assert.ok(options.length > 10, 'server/config.ts has its table of options where this test expects it');
    assert.deepEqual(undocumented(options, operations), []);
    const metrics = new Set(
      [...(tree.get('server/metrics.ts') ?? '').matchAll(/'((?:sglang|handoff)[_:]\w+)'/g)].map(
        ([, name = '']) => name,
      ),
    );
    assert.deepEqual(undocumented([...metrics], operations), []);
  });
});

describe('the rules', () => {
  const tree = (files: Record<string, string>): Tree => new Map(Object.entries(files));
  const cases: {
    rule: (files: Tree) => string[];
    bad: Record<string, string>;
    fault: RegExp;
    good: Record<string, string>;
  }[] = [
    {
      rule: forbiddenImports,
      bad: { 'scheduler/a.ts': "import { b } from '../kernels/b.ts';" },
      fault: /^scheduler\/a\.ts imports kernels\/b\.ts$/,
      good: { 'scheduler/a.ts': "import { b } from '../transfer/b.ts';\nimport type { c } from './c.ts';" },
    },
    {
      rule: forbiddenImports,
      bad: { 'scheduler/a.ts': "import type { b } from '../transfer/channel.ts';" },
      fault: /channel/,
      good: { 'server/a.ts': "import { b } from '../transfer/channel.ts';" },
    },
    {
      rule: forbiddenImports,
      bad: { 'model/a.ts': "import {\n  b,\n} from 'node:os';" },
      fault: /model\/a\.ts imports node:os/,
      good: { 'model/a.ts': "import { readFile } from 'node:fs/promises';\n// import 'node:os'" },
    },
    {
      rule: forbiddenImports,
      bad: { 'kernels/a.ts': "const b = await import('webgpu');" },
      fault: /belongs in kernels\/device\.ts/,
      good: { 'kernels/device.ts': "import { create } from 'webgpu';" },
    },
    {
      rule: forbiddenImports,
      bad: { 'scripts/a.ts': "import '../test/b.test.ts';" },
      fault: /imports test\/b\.test\.ts/,
      good: { 'scripts/a.ts': "import '../test/support/b.ts';" },
    },
    {
      rule: importCycles,
      bad: { 'a/x.ts': "import { y } from './y.ts';", 'a/y.ts': "export { x } from './x.ts';" },
      fault: /^a\/x\.ts -> a\/y\.ts -> a\/x\.ts$/,
      good: { 'a/x.ts': "import { y } from './y.ts';", 'a/y.ts': "import type { x } from './x.ts';" },
    },
    {
      rule: impurities,
      bad: { 'transfer/a.ts': '\nconst now = `${Date.now()}`;' },
      fault: /^transfer\/a\.ts:2 uses Date$/,
      good: { 'transfer/a.ts': "// Date\nconst at = state.process; const text = 'await';" },
    },
    {
      rule: impurities,
      bad: { 'server/balancer.ts': 'export async function f() {}' },
      fault: /uses async/,
      good: { 'server/router.ts': 'export async function f() {}', 'transfer/channel.ts': 'setTimeout(f, 1)' },
    },
    {
      rule: gpuReached,
      bad: {
        'server/router.ts': "import { a } from '../model/a.ts';",
        'model/a.ts': "import { b } from '../kernels/device.ts';",
        'kernels/device.ts': "import { create } from 'webgpu';",
      },
      fault: /^server\/router\.ts loads webgpu through kernels\/device\.ts$/,
      good: {
        'server/router.ts': "import type { b } from '../kernels/device.ts';",
        'kernels/device.ts': "import 'webgpu';",
      },
    },
    {
      rule: unpairedKernels,
      bad: { 'kernels/a.wgsl': '' },
      fault: /a\.wgsl has no a\.ts/,
      good: { 'kernels/include/a.wgsl': '' },
    },
    {
      rule: unpairedKernels,
      bad: { 'kernels/a.ts': "new URL('./a.wgsl', import.meta.url)" },
      fault: /a\.ts has no a\.wgsl/,
      good: { 'kernels/tensor.ts': '', 'kernels/device.ts': '// ./a.wgsl' },
    },
    {
      rule: unpairedKernels,
      bad: {
        'kernels/a.wgsl': '@group(0) @binding(1) var<storage, read_write> out: array<f32>;',
        'kernels/a.ts': '// out',
      },
      fault: /never names the binding out/,
      good: {
        'kernels/a.wgsl': '@group(0) @binding(1) var<storage, read_write> out: array<f32>;',
        'kernels/a.ts': 'run({ out });',
      },
    },
    {
      rule: silencedTests,
      bad: { 'test/a.test.ts': `test.${'only'}('x', f);` },
      fault: /a\.test\.ts:1/,
      good: { 'test/a.test.ts': "test('x', f); // not the only one" },
    },
    {
      rule: silencedTests,
      bad: { 'test/a.test.ts': `test.${'skip'}('x', f);` },
      fault: /a\.test\.ts:1/,
      good: { 'test/a.test.ts': "test('x', f);" },
    },
    {
      rule: silencedTests,
      bad: { 'test/a.test.ts': `test('x', { ${'skip'}: 'no GPU' }, f);` },
      fault: /a\.test\.ts:1/,
      good: { 'test/a.test.ts': "f({ skipped: true }); if (!here) return t.skip('needs a program');" },
    },
    {
      rule: speechlessAssertions,
      bad: { 'test/a.test.ts': "\nassert.ok(f(a, [b, c], 'd, e'));\nassert.ok(a, `${b}`);" },
      fault: /^test\/a\.test\.ts:2 does not say what it found$/,
      good: { 'test/a.test.ts': "assert.ok(f(a), 'b'); assert.equal(a, b); t.assert.ok(a); // assert.ok(a)" },
    },
    {
      rule: speechlessAssertions,
      bad: { 'kernels/a.ts': 'assert(\n  a === b, // c, d\n);' },
      fault: /^kernels\/a\.ts:1 /,
      good: { 'kernels/a.ts': 'assert(\n  a === b,\n  `${a}, ${b}`,\n);\nassert(a, `plain`);' },
    },
    {
      rule: unfinishedMarks,
      bad: { 'a.md': `one\n${'TO' + 'DO'}: two` },
      fault: /^a\.md:2/,
      good: { 'a.md': 'to do' },
    },
    {
      rule: registryNames,
      bad: { 'package-lock.json': '{"resolved": "https://x"}' },
      fault: /lock/,
      good: { 'package-lock.json': '{"url": "https://x"}', '.npmrc': 'audit=false' },
    },
    { rule: registryNames, bad: { '.npmrc': 'registry=x' }, fault: /npmrc/, good: {} },
    { rule: badNames, bad: { 'model/utils.ts': '' }, fault: /utils/, good: { 'model/kv-cache.ts': '' } },
    { rule: badNames, bad: { 'model/kvCache.ts': '' }, fault: /kebab/, good: { 'test/a-b.test.ts': '' } },
    {
      rule: unknownCommands,
      bad: { 'a.md': '`npm run fly`', 'package.json': '{}' },
      fault: /npm run fly/,
      good: { 'a.md': '`npm run lint`', 'package.json': '{"scripts":{"lint":""}}' },
    },
  ];
  for (const { rule, bad, fault, good } of cases) {
    test(`${rule.name} objects to ${Object.keys(bad).join(', ')} (${fault.source})`, () => {
      const faults = rule(tree(bad));
      assert.equal(faults.length, 1, faults.join('; '));
      assert.match(faults[0] ?? '', fault);
      assert.deepEqual(rule(tree(good)), []);
    });
  }

  test('an import is found in every form, with what is only a type told apart', () => {
    const text = [
      "import a, { type B } from 'a';",
      "import type { C } from 'c';",
      "import { type D, type E } from 'd';",
      "export * from 'f';",
      "import 'g';",
      "const h = await import('h');",
      "const text = 'import x from y';",
    ].join('\n');
    const found = importsOf(text).map(({ specifier, typeOnly }) => `${specifier}${typeOnly ? ' (type)' : ''}`);
    assert.deepEqual(found.sort(), ['a', 'c (type)', 'd (type)', 'f', 'g', 'h']);
  });

  test('code is told from comments, strings and regular expressions', () => {
    assert.equal(codeOf("a; // b\nc('d', `e${f}`, /'g/); /* h\n*/ i").replace(/ +/g, ' '), 'a; \nc( , ${f} , ); \n i');
  });

  test('an undocumented name is found even if a longer one is documented', () => {
    assert.deepEqual(undocumented(['--port', '--host'], 'use --port-base and --host'), ['--port']);
  });
});
