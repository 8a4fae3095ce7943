import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';
import { fileURLToPath } from 'node:url';
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

const rulesPath = fileURLToPath(new URL('../../../docs/alerts.yml', import.meta.url));
const incidentsPath = fileURLToPath(new URL('../../data/alerts.test.yml', import.meta.url));
const rules = readFileSync(rulesPath, 'utf8');

test('the alert rules use metrics that exist, and the page explains each of them', () => {
  const alerts = [...rules.matchAll(/- alert: (\w+)/g)].map((match) => match[1]!);
  assert.notDeepEqual(alerts, []);
  assert.deepEqual(alerts, [...new Set(alerts)]);
  for (const alert of alerts) assert.ok(page.includes(alert), `${alert} is not in docs/operations.md`);
  for (const [, name] of page.matchAll(/\b(Handoff[A-Z]\w+)/g)) assert.ok(alerts.includes(name!), name);
  const metrics = new Set([...metricsTable().matchAll(/^\| `(\w+)`/gm)].map((match) => match[1]!));
  for (const text of [rules, readFileSync(incidentsPath, 'utf8')]) {
    for (const [name] of text.matchAll(/\b(?:sglang|handoff)_[a-z0-9_]+/g)) {
      assert.ok(metrics.has(name) || metrics.has(name.replace(/_(bucket|sum|count)$/, '')), name);
    }
  }
});

test('the alert rules are valid and catch each incident within a minute', (t) => {
  for (const args of [
    ['check', 'rules', rulesPath],
    ['test', 'rules', incidentsPath],
  ]) {
    const check = spawnSync('promtool', args, { encoding: 'utf8' });
    if (check.error === undefined) assert.equal(check.status, 0, check.stdout + check.stderr);
    else t.diagnostic('promtool (Debian package prometheus) is not here: names checked only');
  }
});
