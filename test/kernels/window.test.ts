import assert from 'node:assert/strict';
import { test } from 'node:test';
import { appendWindow } from '../../kernels/window.ts';
import {
  assertUntouched,
  f32Tensor,
  guardedTensor,
  makeStep,
  openTestDevice,
  readF32,
  runOnDevice,
} from '../support/gpu.ts';

const device = await openTestDevice();

const WIDTH = 96;
const WINDOW = 16;
const SLOTS = 5;

// A value that tells its sequence, position and dimension apart.
const cell = (sequence: number, position: number, dim: number): number => sequence * 100_000 + position * 100 + dim;

for (const [name, starts, counts] of [
  ['one row at position 0', [0], [1]],
  ['one row that wraps round the ring', [33], [1]],
  ['a chunk longer than the window keeps its last rows only', [5], [41]],
  ['chunks of several sequences, exactly a window, one less and one more', [0, 7, 16], [16, 15, 17]],
] as const) {
  test(`the ring takes ${name}`, async () => {
    const slots = starts.map((_, sequence) => SLOTS - 1 - sequence);
    const chunks = starts.map((start, sequence) => ({
      slot: slots[sequence]!,
      start,
      tokens: Array.from({ length: counts[sequence]! }, () => 0),
    }));
    const step = makeStep(device, chunks);
    const values: number[] = [];
    for (const [sequence, start] of starts.entries()) {
      for (let i = 0; i < counts[sequence]!; i += 1) {
        for (let dim = 0; dim < WIDTH; dim += 1) values.push(cell(sequence, start + i, dim));
      }
    }
    const kv = f32Tensor(
      device,
      [step.rowCount + 3, WIDTH],
      [...values, ...Array.from({ length: 3 * WIDTH }, () => 7)],
    );
    const ring = guardedTensor(device, [SLOTS, WINDOW, WIDTH]);
    await runOnDevice(device, (recorder) => {
      appendWindow(recorder, {
        kv,
        ring,
        rows: step.rows,
        sequences: step.sequences,
        step: step.step,
        rowCount: step.rowCount,
      });
    });
    const content = await readF32(device, ring);
    const written = new Set<number>();
    for (const [sequence, start] of starts.entries()) {
      const end = start + counts[sequence]!;
      for (let position = Math.max(start, end - WINDOW); position < end; position += 1) {
        const base = (slots[sequence]! * WINDOW + (position % WINDOW)) * WIDTH;
        written.add(base);
        for (let dim = 0; dim < WIDTH; dim += 1) assert.equal(content[base + dim], cell(sequence, position, dim));
      }
    }
    for (let base = 0; base < content.length; base += WIDTH) {
      if (!written.has(base)) assertUntouched(content, base, base + WIDTH);
    }
  });
}
