import assert from 'node:assert/strict';
import { readdirSync, readFileSync } from 'node:fs';
import { test } from 'node:test';
import { compileMessages, loadKernel } from '../../kernels/kernel.ts';
import { openTestDevice } from '../support/gpu.ts';

const KERNELS = new URL('../../kernels/', import.meta.url);

const device = await openTestDevice();
const files = readdirSync(KERNELS).filter((name) => name.endsWith('.wgsl'));

test('the folder of kernels is found', () => {
  assert.ok(files.length >= 8, `${files.length} files`);
});

for (const file of files) {
  test(`${file} compiles with its defaults`, async () => {
    const kernel = loadKernel(new URL(file, KERNELS), includesOf(file));
    assert.deepEqual(await compileMessages(device, kernel), []);
  });
}

test('a broken kernel is reported with its file and line', async () => {
  const kernel = loadKernel(new URL('rope.wgsl', KERNELS));
  const source = kernel.source.replace('let row = id.y;', 'let row = missing;');
  const messages = await compileMessages(device, { ...kernel, source });
  const line = kernel.source.slice(0, kernel.source.indexOf('let row = id.y;')).split('\n').length;
  assert.equal(messages.length, 1);
  assert.match(messages[0]!, new RegExp(`^rope\\.wgsl:${line}:\\d+ .*missing`));
});

/** The includes that the kernel's wrapper names in its loadKernel call. */
function includesOf(file: string): string[] {
  const wrapper = readFileSync(new URL(file.replace(/\.wgsl$/, '.ts'), KERNELS), 'utf8');
  const call = new RegExp(
    `loadKernel\\(\\s*new URL\\('\\./${file}', import\\.meta\\.url\\),?\\s*(\\[[^\\]]*\\])?`,
  ).exec(wrapper);
  assert.ok(call, `${file} is loaded by its wrapper`);
  return [...(call[1] ?? '').matchAll(/'([\w-]+)'/g)].map((match) => match[1]!);
}
