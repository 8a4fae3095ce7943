/**
 * Who may use which route. Routes are guarded one by one, by what they are and never by how their path begins; a path
 * that is no route leads nowhere.
 */
import { createHash, timingSafeEqual } from 'node:crypto';
import type { IncomingMessage } from 'node:http';
import { ApiError } from '../errors.ts';
import type { AdminGate } from '../operators/admin.ts';

/** What a route asks for: nothing, an API key where any are configured, or to be an operator's. */
export type Access = 'open' | 'key' | 'admin';

/** A party whose requests are counted together: an API key (`key-0` is the first), or everybody where there are none. */
export type Client = string;

/** The client of requests to a server without API keys. */
export const ANYONE: Client = 'anyone';

/** Lets requests in. */
export interface Door {
  /**
   * Whose request this is. `takesApiKeyHeader`: the route also reads `x-api-key`, as Anthropic's clients send it. Throws
   * `ApiError` 401 for a key that is missing or wrong, 403 for an API key where an operator is asked for.
   */
  enter(request: IncomingMessage, access: Access, takesApiKeyHeader: boolean): Client;
}

/** The door of a server with these keys; no keys let everybody in. */
export function createDoor(apiKeys: readonly string[], gate: AdminGate): Door {
  // Digests have one length, so that comparing them takes one time, whatever was shown.
  const digestOf = (key: string) => createHash('sha256').update(key).digest();
  const digests = apiKeys.map(digestOf);

  /** Compares with every key, so that the time does not say which one it was. */
  function clientOf(shown: string): Client | null {
    const digest = digestOf(shown);
    let found: Client | null = null;
    for (const [index, known] of digests.entries()) if (timingSafeEqual(digest, known)) found = `key-${index}`;
    return found;
  }

  return {
    enter(request, access, takesApiKeyHeader) {
      const { headers } = request;
      const bearer = /^Bearer +(.+)$/i.exec(headers.authorization ?? '')?.[1]?.trim();
      const other = headers['x-api-key'];
      const shown = bearer ?? (takesApiKeyHeader && typeof other === 'string' ? other : undefined);
      const client = shown === undefined ? null : clientOf(shown);
      if (access === 'admin') {
        if (client !== null) throw new ApiError('insufficient_permissions', 'This needs the admin key.');
        gate(request);
        return 'admin';
      }
      if (access === 'open' || digests.length === 0) return ANYONE;
      if (client !== null) return client;
      throw new ApiError(
        'invalid_api_key',
        shown === undefined ? 'This needs an API key: Authorization: Bearer KEY.' : 'The API key is wrong.',
      );
    },
  };
}
