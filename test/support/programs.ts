/** Programs of other people that tests run: found, or installed from Debian's packages. */
import { spawnSync } from 'node:child_process';

/** Prometheus' own linter; null if it is not there and cannot be installed (which takes root and apt). */
export function ensurePromtool(): string | null {
  const found = ensure(['promtool'], 'prometheus');
  // The package starts a server; in a test's machine nothing should listen that no test started.
  if (found?.isNew) spawnSync('service', ['prometheus', 'stop']);
  return found?.name ?? null;
}

/** A server that speaks the protocol of Redis; null if there is none and it cannot be installed. */
export function ensureStoreServer(): string | null {
  const found = ensure(['valkey-server', 'redis-server'], 'redis-server');
  if (found?.isNew) spawnSync('service', ['redis-server', 'stop']);
  return found?.name ?? null;
}

function ensure(names: readonly string[], debianPackage: string): { name: string; isNew: boolean } | null {
  const installed = (): string | undefined => names.find((name) => spawnSync(name, ['--version']).status === 0);
  const there = installed();
  if (there !== undefined) return { name: there, isNew: false };
  if (process.getuid?.() !== 0) return null;
  const apt = (...args: string[]): void => {
    spawnSync('apt-get', ['-q', '-y', ...args], { env: { ...process.env, DEBIAN_FRONTEND: 'noninteractive' } });
  };
  apt('update');
  apt('install', '--no-install-recommends', debianPackage);
  const now = installed();
  return now === undefined ? null : { name: now, isNew: true };
}

/** What `promtool check metrics` says of a page; empty when it is clean. */
export function lintMetrics(page: string): string {
  const result = spawnSync('promtool', ['check', 'metrics'], { input: page, encoding: 'utf8' });
  if (result.error) throw result.error;
  return result.status === 0
    ? result.stdout + result.stderr
    : `exit ${result.status}: ${result.stdout}${result.stderr}`;
}
