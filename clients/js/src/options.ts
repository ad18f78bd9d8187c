import { badRequest } from './error.js';
import type { Codec } from './frame.js';
import type { TokenDetails, TokenParams, TokenRequest } from './sign.js';

/** The answer of an `authUrl` or `authCallback`: a JWT, what the token exchange gave, or a request for it. */
export type TokenAnswer = string | TokenDetails | TokenRequest;

/** The credential, one of four kinds, and who the client is. */
export interface AuthOptions {
  /** The whole API key, `<secret>.<keyName>`. For servers: a page would show it to everybody. */
  key?: string;
  /** A service JWT. The connection ends with it. */
  token?: string;
  /** An address that answers with a {@link TokenAnswer}. It is asked on each connect, and before a token ends. */
  authUrl?: string;
  /** Asked as `authUrl` is. */
  authCallback?: (params: TokenParams) => TokenAnswer | Promise<TokenAnswer>;
  /** Headers of the request to `authUrl`. */
  authHeaders?: Record<string, string>;
  /** Parameters of the request to `authUrl`: in its query, or with POST in its body as JSON. */
  authParams?: Record<string, string>;
  authMethod?: 'GET' | 'POST';
  /** Who this client wants to be, where the credential leaves that open. */
  clientId?: string;
}

export interface RestOptions extends AuthOptions {
  /** Address of a node or of its load balancer, such as `https://realtime.example.com`. */
  url: string;
}

/** The part of the WebSocket of browsers that the client uses. */
export interface WebSocketLike {
  binaryType: string;
  readonly bufferedAmount: number;
  send(data: string | Uint8Array<ArrayBuffer>): void;
  close(code?: number): void;
  onopen: ((event: never) => void) | null;
  onmessage: ((event: { data: never }) => void) | null;
  onerror: ((event: never) => void) | null;
  onclose: ((event: { code: number; reason: string }) => void) | null;
}

export interface RealtimeOptions extends RestOptions {
  /** False: this connection does not receive its own messages. True unless given. */
  echo?: boolean;
  /** False: nothing is connected until `connect()`. True unless given. */
  autoConnect?: boolean;
  /** The ways to try, in this order. Event streams with HTTP publishes serve where WebSocket is blocked. */
  transports?: ('websocket' | 'sse')[];
  /** How frames are written: the `msgpack` of `@fanfare/client/msgpack`, else JSON. */
  codec?: Codec;
  /** Milliseconds that an attempt to connect may take; 10 000 unless given. */
  connectTimeoutMs?: number;
  /** The bound of the first pause after a lost connection, in milliseconds; 1 000 unless given. It doubles each time. */
  reconnectMinMs?: number;
  /** The largest bound of a pause, in milliseconds; 30 000 unless given. */
  reconnectMaxMs?: number;
  /** Requests without an answer that may wait, such as publishes without a connection; 1 000 unless given. */
  queueMax?: number;
  /** The constructor of sockets, where it is not that of the platform. */
  webSocket?: new (url: string, protocols: string) => WebSocketLike;
}

/** Checks the address and the credential. Gives the address without a slash at its end. */
export function checked(options: RestOptions): string {
  const kinds = (['key', 'token', 'authUrl', 'authCallback'] as const).filter((kind) => options[kind] !== undefined);
  if (kinds.length > 1) throw badRequest(`one credential is enough: ${kinds.join(', ')}`);
  let url: URL;
  try {
    url = new URL(options.url);
  } catch {
    throw badRequest(`url is no address: ${options.url}`);
  }
  const protocol = url.protocol.replace(/^ws/, 'http');
  if (!/^https?:$/.test(protocol)) throw badRequest('url must begin with https:// or http://');
  if (url.search || url.hash) throw badRequest('url has neither a query nor a fragment');
  return `${protocol}//${url.host}${url.pathname.replace(/\/+$/, '')}`;
}
