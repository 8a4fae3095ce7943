/**
 * The table in docs/api.md of what the API does and the tests that show it: `npm run surface [-- --check]`.
 *
 * A comment right above a test names the rows of scripts/surface-rows.ts that it shows:
 *
 *     // surface: chat.stop, chat.seed
 *     test('…
 *
 * Without --check the table is written anew. With it nothing is written, and a table that is not up to date is an error.
 */
import { readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { parseCommandLine, say } from './command-line.ts';
import { SURFACE, type SurfaceRow } from './surface-rows.ts';

const ROOT = new URL('../', import.meta.url);
const PAGE = new URL('docs/api.md', ROOT);
const BEGIN = '<!-- surface: written by `npm run surface` -->';
const END = '<!-- /surface -->';
const OUTDATED = 'the table in docs/api.md is not up to date: npm run surface';

/** Tests by the row that they show, each as `path: name`. */
export type Coverage = ReadonlyMap<string, readonly string[]>;

/**
 * What the tests say of themselves. `sources` are the texts of test files by their path below test/, without
 * `.test.ts`. Throws for a comment that no test follows, and for a row that there is not.
 */
export function coverageOf(sources: ReadonlyMap<string, string>, rows: readonly SurfaceRow[]): Coverage {
  const found = new Map<string, string[]>(rows.map(({ id }) => [id, []]));
  const marked = /((?:^[ \t]*\/\/ surface: .*\n)+)(?:[ \t]*(?:await t\.)?test\(\s*('[^'\n]*'|`[^`\n]*`|"[^"\n]*"))?/gm;
  for (const [path, source] of sources) {
    for (const [, comments, quoted] of source.matchAll(marked)) {
      const ids = [...comments!.matchAll(/surface: (.*)/g)].flatMap(([, list]) => list!.split(', '));
      if (quoted === undefined) throw new Error(`test/${path}.test.ts: no test follows "surface: ${ids.join(', ')}"`);
      const name = quoted.slice(1, -1).replace(/^seed \$\{SEED\}: /, '');
      for (const id of ids) {
        const tests = found.get(id);
        if (tests === undefined) throw new Error(`test/${path}.test.ts: the surface has no row "${id}"`);
        tests.push(`${path}: ${name}`);
      }
    }
  }
  return found;
}

/** Rows that no test shows and that do not say why, and rows that say so although one does. */
export function faultsOf(coverage: Coverage, rows: readonly SurfaceRow[]): string[] {
  return rows.flatMap(({ id, missing }) => {
    const isShown = (coverage.get(id) ?? []).length > 0;
    if (isShown && missing !== undefined) return [`${id} is shown by a test: it is not missing any more`];
    return isShown || missing !== undefined ? [] : [`${id} is shown by no test`];
  });
}

/** The table as Markdown. */
export function tableOf(coverage: Coverage, surface: typeof SURFACE): string {
  const lines = ['| row | need | what | shown by |', '| --- | --- | --- | --- |'];
  for (const { chapter, rows } of surface) {
    lines.push(`| **${chapter}** | | | |`);
    for (const { id, need, what, missing } of rows) {
      const tests = missing === undefined ? (coverage.get(id) ?? []).join('<br>') : `not there: ${missing}`;
      lines.push(`| ${id} | ${need} | ${what} | ${tests.replaceAll('|', '\\|')} |`);
    }
  }
  return lines.join('\n');
}

/** The page with the table in its place. */
function pageWith(page: string, table: string): string {
  const [begin, end] = [page.indexOf(BEGIN), page.indexOf(END)];
  if (begin < 0 || end < begin) throw new Error(`docs/api.md lacks ${BEGIN} … ${END}`);
  return `${page.slice(0, begin)}${BEGIN}\n\n${table}\n\n${page.slice(end)}`;
}

/** All test files, by their path below test/ without `.test.ts`. */
function readTests(): Map<string, string> {
  const folder = new URL('test/', ROOT);
  const paths = readdirSync(folder, { recursive: true, encoding: 'utf8' }).filter((path) => path.endsWith('.test.ts'));
  return new Map(
    paths
      .map((path) => path.replaceAll('\\', '/'))
      .toSorted()
      .map((path) => [path.slice(0, -'.test.ts'.length), readFileSync(new URL(path, folder), 'utf8')]),
  );
}

/** What is wrong with the rows and with the table of the page as it is; and the page as it should be. */
export function checkSurface(): { faults: string[]; page: string } {
  const rows = SURFACE.flatMap((chapter) => chapter.rows);
  const coverage = coverageOf(readTests(), rows);
  const faults = faultsOf(coverage, rows);
  const before = readFileSync(PAGE, 'utf8');
  const page = pageWith(before, tableOf(coverage, SURFACE));
  if (page !== before) faults.push(OUTDATED);
  return { faults, page };
}

function main(): number {
  const { values } = parseCommandLine('npm run surface [-- --check]', {
    options: { check: { type: 'boolean', default: false } },
  });
  const { faults, page } = checkSurface();
  if (!values.check) writeFileSync(PAGE, page);
  const left = values.check ? faults : faults.filter((fault) => fault !== OUTDATED);
  for (const fault of left) say(fault);
  return left.length === 0 ? 0 : 1;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) process.exitCode = main();
