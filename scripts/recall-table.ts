/** The lines of bench-recall, and the table that docs/recall.md makes of them. */
import type { IndexPrecision } from '../kernels/index-keys.ts';

/** How many of the best k entries were chosen: share of k, mean and least over rows. */
export interface Selection {
  readonly k: number;
  readonly rows: number;
  readonly mean: number;
  readonly least: number;
}

/** One context with keys of one precision. */
export interface RecallLine {
  readonly bench: 'recall';
  readonly commit: string;
  readonly device: string;
  readonly seed: number;
  readonly contextTokens: number;
  readonly precision: IndexPrecision;
  readonly keyBytes: number;
  readonly kvBytesPerToken: number;
  /** With the model's own k and a quarter of it; null where no row has a choice. */
  readonly selections: readonly (Selection | null)[];
  readonly answers: {
    readonly asked: number;
    readonly right: number;
    /** The same text as with f32 keys. */
    readonly asWithF32: number;
  };
}

/** The table in Markdown. `how` says what was asked. */
export function recallTable(lines: readonly RecallLine[], how: string): string {
  const first = lines[0];
  if (first === undefined) throw new RangeError('no lines to make a table of');
  const ks = first.selections.map((_, index) => lines.map(({ selections }) => selections[index]?.k).find(Boolean) ?? 0);
  const rows = lines.map(({ contextTokens, precision, kvBytesPerToken, selections, answers }) => [
    String(contextTokens),
    precision,
    String(kvBytesPerToken),
    ...selections.map((selection) =>
      selection === null ? 'no choice' : `${selection.mean.toFixed(4)} (${selection.least.toFixed(4)})`,
    ),
    `${answers.right} of ${answers.asked}`,
    `${answers.asWithF32} of ${answers.asked}`,
  ]);
  const titles = ['context', 'keys', 'KV bytes per token', ...ks.map((k) => `recall of the best ${k}`)];
  const head = [...titles, 'right answers', 'answers as with f32'];
  return [
    `${how}; commit ${first.commit}, ${first.device}. Recall: mean over rows, and the least of any row.`,
    '',
    ...[head, head.map(() => '---'), ...rows].map((cells) => `| ${cells.join(' | ')} |`),
  ].join('\n');
}

/** A page with its table, between two marks, replaced. */
export function replaceTable(page: string, table: string): string {
  const marks = /(<!-- recall table: [^\n]* -->\n)[^]*?(\n<!-- end of recall table -->)/;
  if (!marks.test(page)) throw new Error('the page has no marks around its recall table');
  return page.replace(marks, (_, start: string, end: string) => `${start}\n${table}\n${end}`);
}
