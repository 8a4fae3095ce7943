/** Attention of few rows over many keys: the weighted sum is split over the keys, then combined. */
import type { AttentionArgs } from './attention-prefill.ts';
import { loadKernel, type Recorder } from './kernel.ts';

/**
 * Attention of a decode step; arguments and results (bit for bit) are those of `attentionPrefill`.
 * Worth it when rows are too few to fill the device.
 */
export function attentionDecode(recorder: Recorder, args: AttentionArgs): void {
  throw new Error('body follows');
}
