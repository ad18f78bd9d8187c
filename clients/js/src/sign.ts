import { badRequest } from './error.js';

/** Operations for each pattern of channels, such as `{ "chat:*": ["subscribe", "publish"] }`. */
export type Capability = Record<string, ('subscribe' | 'publish' | 'presence' | 'history' | 'amqp-subscribe')[]>;

/** What a token is to allow, and to whom. */
export interface TokenParams {
  /** Lifetime in milliseconds; an hour unless the node is set otherwise. */
  ttl?: number;
  /** What the token allows; without one, all that the key does. */
  capability?: Capability | string;
  /** The identity that the token forces on its connections. */
  clientId?: string;
  /** Epoch milliseconds; now unless given. */
  timestamp?: number;
  /** A text that this key has not used; made at random unless given. */
  nonce?: string;
}

/** A request for a token, signed with the key. It can be exchanged once, within two minutes. */
export interface TokenRequest {
  keyName: string;
  ttl: number;
  capability: string;
  clientId: string;
  timestamp: number;
  nonce: string;
  mac: string;
}

/** A token that the service has issued. */
export interface TokenDetails {
  token: string;
  keyName: string;
  /** Epoch milliseconds. */
  issued: number;
  /** Epoch milliseconds. */
  expires: number;
  capability: string;
  clientId?: string;
}

export interface ApiKey {
  secret: string;
  name: string;
}

const TTL_MS = 3_600_000;

/** The two parts of an API key, which the last dot separates. */
export function parseKey(key: string): ApiKey {
  if (/\s/.test(key)) throw badRequest('key has white space in it');
  const dot = key.lastIndexOf('.');
  if (dot < 1 || dot === key.length - 1) throw badRequest('key must be <secret>.<keyName>');
  return { secret: key.slice(0, dot), name: key.slice(dot + 1) };
}

/** Signs a token request; calls nobody. */
export async function signTokenRequest(key: string, params: TokenParams = {}): Promise<TokenRequest> {
  const { secret, name } = parseKey(key);
  const request = {
    keyName: name,
    ttl: params.ttl ?? TTL_MS,
    capability: capabilityText(params.capability ?? ''),
    clientId: params.clientId ?? '',
    timestamp: params.timestamp ?? Date.now(),
    nonce: params.nonce ?? randomText(16),
  };
  const text = [name, request.ttl, request.capability, request.clientId, request.timestamp, request.nonce].join('\n');
  return { ...request, mac: base64(await hmac(secret, `${text}\n`)) };
}

/** What a JWT that is signed here says. It names its capability, which must be within the key's. */
export type JwtParams = Omit<TokenParams, 'nonce' | 'capability'> & Required<Pick<TokenParams, 'capability'>>;

/** Signs a service JWT; calls nobody. */
export async function signToken(key: string, params: JwtParams): Promise<string> {
  const { secret, name } = parseKey(key);
  if (!params.capability) throw badRequest('capability is missing: a token says what it allows');
  const issued = Math.floor((params.timestamp ?? Date.now()) / 1000);
  const claims = {
    iat: issued,
    exp: issued + Math.ceil((params.ttl ?? TTL_MS) / 1000),
    'x-service-capability': capabilityText(params.capability),
    ...(params.clientId === undefined ? {} : { 'x-service-client-id': params.clientId }),
  };
  const encode = (part: object) => base64url(new TextEncoder().encode(JSON.stringify(part)));
  const text = `${encode({ alg: 'HS256', typ: 'JWT', kid: name })}.${encode(claims)}`;
  return `${text}.${base64url(await hmac(secret, text))}`;
}

function capabilityText(capability: Capability | string): string {
  return typeof capability === 'string' ? capability : JSON.stringify(capability);
}

async function hmac(secret: string, text: string): Promise<Uint8Array> {
  const encoder = new TextEncoder();
  const algorithm = { name: 'HMAC', hash: 'SHA-256' };
  const key = await crypto.subtle.importKey('raw', encoder.encode(secret), algorithm, false, ['sign']);
  return new Uint8Array(await crypto.subtle.sign('HMAC', key, encoder.encode(text)));
}

export function base64(bytes: Uint8Array): string {
  return btoa(String.fromCharCode(...bytes));
}

function base64url(bytes: Uint8Array): string {
  return base64(bytes).replace(/\+/g, '-').replace(/\//g, '_').replace(/=/g, '');
}

/** Random bytes as text. */
export function randomText(bytes: number): string {
  return base64url(crypto.getRandomValues(new Uint8Array(bytes)));
}
