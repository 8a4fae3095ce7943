/**
 * A name for what a directory's model computes, cheap enough for 200 GB.
 *
 * Router and workers each digest their own copy; a prompt digest contains it, and HELLO compares it, so two processes
 * with different checkpoints never exchange a page.
 */
import { createHash } from 'node:crypto';
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { openCheckpoint } from '../model/safetensors.ts';

/** Bytes hashed of each tensor: retrained weights differ in their first values already. */
const SAMPLE_BYTES = 64;
const DIGEST_HEX_DIGITS = 32;

/**
 * Digest of config.json, of every tensor's name, type and shape, and of its first bytes.
 *
 * @throws CheckpointError or a file error when the directory is no checkpoint.
 */
export async function digestModel(directory: string): Promise<string> {
  const hash = createHash('sha256');
  hash.update(await readFile(join(directory, 'config.json')));
  const source = await openCheckpoint(directory);
  try {
    const tensors = [...source.tensors.values()].sort((left, right) => (left.name < right.name ? -1 : 1));
    for (const tensor of tensors) {
      hash.update(JSON.stringify([tensor.name, tensor.dtype, tensor.shape]));
      const sample = new Uint8Array(Math.min(SAMPLE_BYTES, tensor.end - tensor.start));
      await source.read(tensor, 0, sample);
      hash.update(sample);
    }
  } finally {
    await source.close();
  }
  return hash.digest('hex').slice(0, DIGEST_HEX_DIGITS);
}
