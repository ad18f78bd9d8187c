import { badRequest } from './error.js';
import type { Codec } from './frame.js';
import type { TokenDetails, TokenParams, TokenRequest } from './sign.js';

/** The answer of an `authUrl` or `authCallback`: a JWT, what the token exchange gave, or a request for it. */
export type TokenAnswer = string | TokenDetails | TokenRequest;

/** The credential, one of four kinds, and who the client is. */
export interface AuthOptions {
  /** The whole API key, `<secret>.<keyName>`. For servers: a page would show it to everybody. */
  key?: string | undefined;
  /** A service JWT. The connection ends with it. */
  token?: string | undefined;
  /** An address that answers with a {@link TokenAnswer}. It is asked on each connect, and before a token ends. */
  authUrl?: string | undefined;
  /** Asked as `authUrl` is. */
  authCallback?: (params: TokenParams) => TokenAnswer | Promise<TokenAnswer>;
  /** Headers of the request to `authUrl`. */
  authHeaders?: Record<string, string>;
  /** Parameters of the request to `authUrl`: in its query, or with POST in its body as JSON. */
  authParams?: Record<string, string>;
  authMethod?: 'GET' | 'POST';
  /** Who this client wants to be, where the credential leaves that open. */
  clientId?: string | undefined;
}

export interface RestOptions extends AuthOptions {
  /** Address of a node or of its load balancer, such as `https://realtime.example.com`. */
  url: string;
}

/** The part of the WebSocket of browsers that the client uses. */
export interface WebSocketLike {
  binaryType: string;
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
  /** Requests without an answer that may wait, such as publishes without a connection; 400, as a node takes at once, unless given. */
  queueMax?: number;
  /** The constructor of sockets, where it is not that of the platform. */
  webSocket?: new (url: string, protocols: string) => WebSocketLike;
}

const REST = ['url', 'key', 'token', 'authUrl', 'authCallback', 'authHeaders', 'authParams', 'authMethod', 'clientId'];
const REALTIME = ['echo', 'autoConnect', 'transports', 'codec', 'connectTimeoutMs', 'reconnectMinMs', 'reconnectMaxMs', 'queueMax', 'webSocket'];

/** Checks what only a client with a connection has. Gives the address. */
export function checkedRealtime(options: RealtimeOptions): string {
  const { transports, codec } = options;
  const bad = transports?.find((transport) => transport !== 'websocket' && transport !== 'sse');
  if (bad !== undefined || transports?.length === 0) throw badRequest('transports holds websocket and sse');
  if (codec !== undefined && typeof codec?.encode !== 'function') throw badRequest('codec is the msgpack of @fanfare/client/msgpack');
  return checked(options, REALTIME);
}

/** Checks names, address and credential. Gives the address without a slash at its end. */
export function checked(options: RestOptions, further: string[] = []): string {
  const unknown = Object.keys(options).find((name) => !REST.includes(name) && !further.includes(name));
  if (unknown !== undefined) throw badRequest(`there is no option ${unknown}`);
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
