import { ErrorCode, FanfareError, asError, badRequest } from './error.js';
import { call } from './http.js';
import { type TokenAnswer, type AuthOptions } from './options.js';
import { type TokenDetails, type TokenRequest, base64, parseKey } from './sign.js';

const JWT = /^[\w-]+\.[\w-]+\.[\w-]+$/;
/** How long the application may take to give a token. */
const SOURCE_MS = 30_000;
/** A token of a source is not used for HTTP when it ends within this. */
const TOKEN_LEFT_MS = 10_000;

/** The credential of a client, and where further tokens come from. */
export class Credential {
  readonly #options: AuthOptions;
  readonly #url: string;
  #token: string | undefined;
  /** By this device's clock, which may be off: counted from when the token came. */
  #goodUntil = 0;
  #fetching: Promise<string> | undefined;

  constructor(url: string, options: AuthOptions) {
    this.#url = url;
    this.#options = options;
    this.#token = options.token;
    if (options.key !== undefined) parseKey(options.key);
  }

  /** A node that checks credentials lets nobody in without one. */
  get isEmpty(): boolean {
    return !this.isRenewable && this.#options.key === undefined && this.#options.token === undefined;
  }

  /** The application gives a token whenever it is asked. */
  get isRenewable(): boolean {
    return this.#options.authUrl !== undefined || this.#options.authCallback !== undefined;
  }

  /** The parameters of the socket's address. A token is asked for anew, where that can be. */
  async query(): Promise<Record<string, string | undefined>> {
    const { key, clientId } = this.#options;
    const accessToken = this.isRenewable ? await this.fetch() : this.#token;
    return { key, accessToken, clientId };
  }

  /** The value of the `authorization` header. */
  async header(): Promise<string | undefined> {
    const { key } = this.#options;
    if (key !== undefined) return `Basic ${base64(new TextEncoder().encode(key))}`;
    const token = !this.isRenewable || Date.now() < this.#goodUntil ? this.#token : await this.fetch();
    return token === undefined ? undefined : `Bearer ${token}`;
  }

  /** The node has refused the token. */
  discard(): void {
    this.#goodUntil = 0;
  }

  /** A new token of the application; several who ask at once get the same one. */
  fetch(): Promise<string> {
    this.#fetching ??= this.#fetch().finally(() => {
      this.#fetching = undefined;
    });
    return this.#fetching;
  }

  async #fetch(): Promise<string> {
    let answer: TokenAnswer;
    let timer: ReturnType<typeof setTimeout> | undefined;
    const late = new Promise<never>((_, reject) => {
      timer = setTimeout(() => reject(new FanfareError('the application gave no token in time', ErrorCode.noToken)), SOURCE_MS);
    });
    try {
      answer = await Promise.race([this.#ask(), late]);
    } catch (error) {
      const { message, statusCode } = asError(error, ErrorCode.noToken);
      const source = this.#options.authCallback ? 'authCallback' : `authUrl ${this.#options.authUrl}`;
      throw new FanfareError(`${source}: ${message}`, ErrorCode.noToken, { statusCode, cause: error });
    } finally {
      clearTimeout(timer);
    }
    const token = await exchanged(this.#url, answer);
    if (typeof token !== 'string' || !JWT.test(token)) throw new FanfareError('the answer of the application holds no token', ErrorCode.noToken);
    this.#token = token;
    this.#goodUntil = Date.now() + lifetimeMs(token) - TOKEN_LEFT_MS;
    return token;
  }

  async #ask(): Promise<TokenAnswer> {
    const { authCallback, authUrl, authHeaders, authParams, authMethod, clientId } = this.#options;
    if (authCallback) return authCallback(clientId === undefined ? {} : { clientId });
    const params = { ...(clientId === undefined ? {} : { clientId }), ...authParams };
    const headers = authHeaders ? { headers: authHeaders } : {};
    const sent = authMethod === 'POST' ? { method: 'POST', body: params } : { query: params };
    const response = await call(authUrl ?? '', { ...headers, ...sent, isFresh: true });
    const text = (await response.text()).trim();
    return text.startsWith('{') || text.startsWith('"') ? (JSON.parse(text) as TokenAnswer) : text;
  }
}

/** The token of an answer, for which a request is exchanged. */
export async function exchanged(url: string, answer: TokenAnswer): Promise<string> {
  if (typeof answer === 'string' && answer !== '') return answer;
  if (typeof answer === 'object' && answer !== null) {
    if ('token' in answer) return answer.token;
    if ('mac' in answer) return (await exchange(url, answer)).token;
  }
  throw new FanfareError('the answer is neither a token, TokenDetails nor a TokenRequest', ErrorCode.noToken);
}

/** Exchanges a token request. */
export async function exchange(url: string, request: TokenRequest): Promise<TokenDetails> {
  if (!request.keyName) throw badRequest('keyName is missing');
  const path = `/keys/${encodeURIComponent(request.keyName)}/requestToken`;
  const response = await call(url + path, { method: 'POST', body: request });
  return (await response.json()) as TokenDetails;
}

/** How long a token is good, by its claims; a minute where it has none. */
function lifetimeMs(token: string): number {
  try {
    const claims = token.split('.')[1]?.replace(/-/g, '+').replace(/_/g, '/') ?? '';
    const { iat, exp } = JSON.parse(atob(claims)) as { iat: number; exp: number };
    return Number.isFinite(exp - iat) ? (exp - iat) * 1000 : 60_000;
  } catch {
    return 60_000;
  }
}
