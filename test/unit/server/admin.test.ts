import assert from 'node:assert/strict';
import { test } from 'node:test';
import { inspect } from 'node:util';
import { adminHeaders, createAdminGate } from '../../../server/operators/admin.ts';
import { ApiError } from '../../../server/errors.ts';

function statusOf(key: string | null, remoteAddress: string | undefined, headers: Record<string, string> = {}): number {
  try {
    createAdminGate(key)({ headers, socket: { remoteAddress } });
    return 200;
  } catch (error) {
    assert.ok(error instanceof ApiError, inspect(error));
    return error.status;
  }
}

test('with a key, whoever shows exactly it may pass, from anywhere', () => {
  assert.equal(statusOf('s3cret', '203.0.113.9', adminHeaders('s3cret')), 200);
  assert.equal(statusOf('s3cret', '203.0.113.9', { authorization: 'bearer  s3cret ' }), 200);
  for (const shown of ['s3cre', 's3crets', 'S3CRET', '']) {
    assert.equal(statusOf('s3cret', '127.0.0.1', adminHeaders(shown)), 401, shown);
  }
  assert.equal(statusOf('s3cret', '127.0.0.1'), 401, 'being local is no key');
  assert.equal(statusOf('s3cret', '127.0.0.1', { authorization: 's3cret' }), 401);
});

test('without a key, only clients on this machine may pass', () => {
  for (const local of ['127.0.0.1', '127.8.9.1', '::1', '::ffff:127.0.0.1']) assert.equal(statusOf(null, local), 200);
  for (const other of ['10.0.0.1', '::ffff:10.0.0.1', 'fe80::1', undefined]) assert.equal(statusOf(null, other), 403);
});

test('a proxy on this machine does not make its clients local', () => {
  for (const header of ['x-forwarded-for', 'forwarded', 'via', 'x-real-ip']) {
    assert.equal(statusOf(null, '127.0.0.1', { [header]: '203.0.113.9' }), 403, header);
  }
});
