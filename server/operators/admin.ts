/**
 * Who may see and do what is an operator's: `/debug/rooms`, aborting everything, flushing caches.
 *
 * With a key, whoever shows it. Without one, only a client on this machine that did not come through a proxy: a proxy
 * on the same machine would make the whole world local.
 */
import { createHash, timingSafeEqual } from 'node:crypto';
import type { IncomingMessage } from 'node:http';
import { ApiError } from '../errors.ts';

/** Headers by which proxies say that they speak for somebody else. */
const PROXY_HEADERS = ['forwarded', 'via', 'x-forwarded-for', 'x-real-ip'];

/** What the gate looks at. */
export type Knock = Pick<IncomingMessage, 'headers'> & {
  readonly socket: { readonly remoteAddress?: string | undefined };
};

/** Returns for those who may pass; throws `ApiError` 401 or 403 for others. */
export type AdminGate = (request: Knock) => void;

/** The gate of one process. key: null where none is configured. */
export function createAdminGate(key: string | null): AdminGate {
  return (request) => {
    if (key === null) {
      if (isLocal(request)) return;
      throw new ApiError(
        'insufficient_permissions',
        'Without --admin-key this is for clients on the same machine only.',
      );
    }
    const shown = keyOf(request);
    if (shown === null) throw new ApiError('invalid_api_key', 'This needs the admin key: Authorization: Bearer KEY.');
    if (!isEqual(shown, key)) throw new ApiError('invalid_api_key', 'This is not the admin key.');
  };
}

/** Headers that open the gate of a process with this key. */
export function adminHeaders(key: string | null): Record<string, string> {
  return key === null ? {} : { authorization: `Bearer ${key}` };
}

function keyOf({ headers }: Knock): string | null {
  return /^Bearer +(.+)$/i.exec(headers.authorization ?? '')?.[1]?.trim() ?? null;
}

/** In time that depends on neither text: digests have one length, whatever was shown. */
function isEqual(left: string, right: string): boolean {
  const digest = (text: string): Buffer => createHash('sha256').update(text).digest();
  return timingSafeEqual(digest(left), digest(right));
}

function isLocal({ headers, socket }: Knock): boolean {
  if (PROXY_HEADERS.some((name) => headers[name] !== undefined)) return false;
  const address = (socket.remoteAddress ?? '').replace(/^::ffff:/, '');
  return address === '::1' || address.startsWith('127.');
}
