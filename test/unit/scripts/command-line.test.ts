/** The command lines of all scripts: help, and a mistake, are answered before anything is started. */
import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';
import { fileURLToPath } from 'node:url';

const root = fileURLToPath(new URL('../../..', import.meta.url));
const { scripts } = JSON.parse(readFileSync(`${root}package.json`, 'utf8')) as { scripts: Record<string, string> };
// `build` takes no options.
const files = Object.entries(scripts)
  .filter(([name]) => name !== 'build')
  .flatMap(([, command]) => /bootstrap\.mjs (scripts\/\S+)/.exec(command)?.[1] ?? []);

function run(file: string, option: string): Promise<{ code: unknown; stdout: string; stderr: string }> {
  return new Promise((resolve) => {
    execFile(process.execPath, ['--import', 'tsx', file, option], { cwd: root }, (error, stdout, stderr) =>
      resolve({ code: error === null ? 0 : error.code, stdout, stderr }),
    );
  });
}

for (const file of new Set(files)) {
  test(`${file} prints its help, and says in one line that an option is unknown`, async () => {
    const [help, mistake] = await Promise.all([run(file, '--help'), run(file, '--nonsense')]);
    assert.deepEqual([help.code, help.stderr], [0, '']);
    assert.match(help.stdout, /^[a-z][^]*--/);
    assert.deepEqual(mistake, { code: 2, stdout: '', stderr: "Unknown option '--nonsense'\nTry --help.\n" });
  });
}
