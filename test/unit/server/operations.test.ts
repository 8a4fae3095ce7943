import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { test } from 'node:test';
import { environmentNameOf, flagOf, flagsTable, OPTIONS } from '../../../server/config.ts';
import { errorKinds } from '../../../server/errors.ts';
import { metricsTable } from '../../../server/metrics.ts';

const page = readFileSync(new URL('../../../docs/operations.md', import.meta.url), 'utf8');

/** The text between `<!-- name: ... -->` and `<!-- end of name -->`. */
function section(name: string): string {
  const match = new RegExp(`<!-- ${name}: [^\\n]* -->\\n([^]*?)\\n<!-- end of ${name} -->`).exec(page);
  assert.ok(match !== null, `docs/operations.md has no section ${name}`);
  return match[1]!.trim();
}

for (const [name, table] of [
  ['flags', flagsTable()],
  ['metrics', metricsTable()],
] as const) {
  test(`docs/operations.md has the ${name} of the code`, () => {
    assert.equal(section(name), table, `replace the ${name} table of docs/operations.md by the one expected here`);
  });
}

test('the flags, variables, metrics and error codes that the page speaks of exist', () => {
  const flags = new Set(Object.keys(OPTIONS).map((key) => flagOf(key as keyof typeof OPTIONS)));
  const variables = new Set(Object.keys(OPTIONS).map((key) => environmentNameOf(key as keyof typeof OPTIONS)));
  const metrics = new Set([...metricsTable().matchAll(/^\| `(\w+)`/gm)].map((match) => match[1]!));
  for (const [flag] of page.matchAll(/(?<![\w-])--[a-z][a-z-]*/g)) assert.ok(flags.has(flag), flag);
  for (const [name] of page.matchAll(/\bHANDOFF_[A-Z_]+/g)) assert.ok(variables.has(name), name);
  for (const [name] of page.matchAll(/\b(?:sglang|handoff)_[a-z0-9_]+/g)) {
    assert.ok(metrics.has(name) || metrics.has(name.replace(/_(bucket|sum|count)$/, '')), name);
  }
  for (const [, code] of page.matchAll(/503 `(\w+)`/g))
    assert.equal(errorKinds[code as 'queue_full']?.status, 503, code);
});

test('the alert rules are valid', (t) => {
  const rules = /```yaml\n(groups:[^]*?)```/.exec(page)?.[1] ?? '';
  const alerts = [...rules.matchAll(/- alert: (\w+)/g)].map((match) => match[1]!);
  assert.ok(alerts.length > 0 && new Set(alerts).size === alerts.length);
  for (const [, name] of page.matchAll(/\b(Handoff[A-Z]\w+)/g)) assert.ok(alerts.includes(name!), name);
  const folder = mkdtempSync(join(tmpdir(), 'handoff-rules-'));
  t.after(() => rmSync(folder, { recursive: true }));
  writeFileSync(join(folder, 'rules.yaml'), rules);
  const check = spawnSync('promtool', ['check', 'rules', join(folder, 'rules.yaml')], { encoding: 'utf8' });
  if (check.error !== undefined) t.diagnostic('promtool (Debian package prometheus) is not here: names checked only');
  else assert.equal(check.status, 0, check.stdout + check.stderr);
});
