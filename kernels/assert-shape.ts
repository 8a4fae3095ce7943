/** The check that every wrapper makes before it records. */
import assert from 'node:assert/strict';
import type { Dtype } from './dtype.ts';
import type { Tensor } from './tensor.ts';

/** Assert a tensor's type and dimensions; null in `shape` is any size, and `dtype` null any type. */
export function assertShape(tensor: Tensor, shape: readonly (number | null)[], dtype: Dtype | null): void {
  const fits =
    tensor.shape.length === shape.length && shape.every((size, axis) => size === null || size === tensor.shape[axis]);
  assert(
    fits && (dtype === null || tensor.dtype === dtype),
    `tensor ${tensor.label} is ${tensor.dtype} [${tensor.shape}], expected ${dtype ?? 'any type'} [${shape.map((size) => size ?? 'any')}]`,
  );
}
