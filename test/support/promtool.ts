/** Prometheus' own linter, from the Debian package `prometheus`. */
import { spawnSync } from 'node:child_process';

/** Install promtool where that is possible (root and apt); true if it can be run. */
export function ensurePromtool(): boolean {
  const works = (): boolean => spawnSync('promtool', ['--version']).status === 0;
  if (works()) return true;
  if (process.getuid?.() !== 0) return false;
  const apt = (...args: string[]): void => {
    spawnSync('apt-get', ['-q', '-y', ...args], { env: { ...process.env, DEBIAN_FRONTEND: 'noninteractive' } });
  };
  apt('update');
  // The package starts a server; in a test's machine nothing should listen that no test started.
  apt('install', '--no-install-recommends', 'prometheus');
  spawnSync('service', ['prometheus', 'stop']);
  return works();
}

/** What `promtool check metrics` says of a page; empty when it is clean. */
export function lintMetrics(page: string): string {
  const result = spawnSync('promtool', ['check', 'metrics'], { input: page, encoding: 'utf8' });
  if (result.error) throw result.error;
  return result.status === 0
    ? result.stdout + result.stderr
    : `exit ${result.status}: ${result.stdout}${result.stderr}`;
}
