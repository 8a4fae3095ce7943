import assert from 'node:assert/strict';
import { test } from 'node:test';
import { ApiError, errorBody, errorKinds, errorOfReason } from '../../../server/errors.ts';
import { REASONS } from '../../../transfer/messages.ts';

// surface: errors.never
test('no error uses a status that SDKs misread: 409 is retried, 422 is not understood', () => {
  for (const [code, kind] of Object.entries(errorKinds)) {
    const status: number = kind.status;
    assert.ok(status >= 400 && status < 600, code);
    assert.ok(status !== 409 && status !== 422, code);
  }
});

// surface: errors.shape
test('an error body nests message, type, param and code', () => {
  const error = new ApiError('invalid_value', 'n must be 1.', { param: 'n' });
  assert.deepEqual(errorBody(error), {
    error: { message: 'n must be 1.', type: 'invalid_request_error', param: 'n', code: 'invalid_value' },
  });
  assert.equal(errorBody(new ApiError('queue_full', 'Full.')).error.param, null);
});

// surface: errors.retry-after
test('only errors worth retrying carry a time to wait', () => {
  assert.equal(new ApiError('queue_full', 'Full.').retryAfterSeconds, 1);
  assert.equal(new ApiError('decode_timeout', 'Late.', { retryAfterSeconds: 3 }).retryAfterSeconds, 3);
  assert.equal(new ApiError('invalid_json', 'No.', { retryAfterSeconds: 3 }).retryAfterSeconds, null);
});

test('a message cannot carry a whole prompt', () => {
  assert.equal(new ApiError('invalid_value', 'x'.repeat(10_000)).message.length, 2000);
});

test('every reason a room can end for has an error, and a bad checksum is a failed transfer', () => {
  for (const reason of REASONS) assert.ok(errorOfReason(reason).status >= 400, reason);
  assert.equal(errorOfReason('bad_checksum').code, 'kv_transfer_failed');
  assert.equal(errorOfReason('overloaded').status, 503);
});
