import { draftsOf, idPrefix } from './channel.js';
import { Credential, exchange } from './credential.js';
import { ErrorCode, FanfareError, asError, badRequest } from './error.js';
import type { Message, MessageDraft, Occupancy, PresenceEvent, PresenceMember } from './frame.js';
import { type HttpRequest, call } from './http.js';
import { type RestOptions, checked } from './options.js';
import {
  type JwtParams,
  type TokenDetails,
  type TokenParams,
  type TokenRequest,
  parseKey,
  signToken,
  signTokenRequest,
} from './sign.js';

/** Attempts at a publish that may not have arrived. */
const ATTEMPTS = 3;
const AGAIN_MS = 300;

/** Which records of a channel, and in which order. */
export interface HistoryParams {
  /** Records of a page, 1 to 1 000; 100 unless given. */
  limit?: number;
  /** The earliest timestamp, inclusive, in epoch milliseconds. */
  start?: number;
  /** The latest timestamp, exclusive, in epoch milliseconds. */
  end?: number;
  /** Newest first (`backwards`) unless given. */
  direction?: 'backwards' | 'forwards';
  /** The serial of an attach: only what came before. */
  until?: string;
}

/** A part of a list. Iterating over it with `for await` goes on to the pages that follow. */
export class Page<Item> implements AsyncIterable<Item> {
  readonly items: Item[];
  readonly #next: (() => Promise<Page<Item>>) | undefined;

  /** @internal */
  constructor(items: Item[], next: (() => Promise<Page<Item>>) | undefined) {
    this.items = items;
    this.#next = next;
  }

  get hasNext(): boolean {
    return this.#next !== undefined;
  }

  /** The page that follows; undefined after the last one. */
  async next(): Promise<Page<Item> | undefined> {
    return this.#next?.();
  }

  async *[Symbol.asyncIterator](): AsyncIterator<Item> {
    yield* this.items;
    const next = await this.next();
    if (next) yield* next;
  }
}

/** HTTP calls under a credential. */
export class RestClient {
  readonly url: string;
  readonly #credential: Credential;

  constructor(url: string, credential: Credential) {
    this.url = url;
    this.#credential = credential;
  }

  /** Calls the node. A token that it refuses is replaced once, where that can be. */
  async fetch(path: string, request: HttpRequest = {}): Promise<Response> {
    for (let attempt = 1; ; attempt++) {
      const authorization = await this.#credential.header();
      const headers = { ...request.headers, ...(authorization === undefined ? {} : { authorization }) };
      try {
        return await call(this.url + path, { ...request, headers });
      } catch (error) {
        const isRefused = error instanceof FanfareError && error.statusCode === 401;
        if (!isRefused || !this.#credential.isRenewable || attempt > 1) throw error;
        this.#credential.discard();
      }
    }
  }

  async json<Body>(path: string, request?: HttpRequest): Promise<Body> {
    return (await (await this.fetch(path, request)).json()) as Body;
  }

  async page<Item>(path: string, field: string, query: HttpRequest['query'] = {}): Promise<Page<Item>> {
    const response = await this.fetch(path, { query });
    const items = ((await response.json()) as Record<string, Item[]>)[field] ?? [];
    const next = /<([^>]+)>\s*;\s*rel="next"/.exec(response.headers.get('link') ?? '')?.[1];
    return new Page(items, next === undefined ? undefined : () => this.page<Item>(next, field));
  }
}

export function historyOf(rest: RestClient, channel: string, params: HistoryParams): Promise<Page<Message>> {
  return rest.page(`${pathOf(channel)}/history`, 'messages', { ...params });
}

function pathOf(channel: string): string {
  if (!channel) throw badRequest('channel name is empty');
  return `/api/channels/${encodeURIComponent(channel)}`;
}

/** The result of a batch for one channel. */
export type BatchResult = { channel: string; published: true } | { channel: string; error: string; status: number };

/** What was counted in one minute. */
export interface MetricRow {
  accountId: string;
  /** Epoch milliseconds, at the beginning of the minute. */
  minute: number;
  /** The node that counted; `*` of sums. */
  nodeId: string;
  kind: string;
  count: number;
  bytes: number;
}

/** A queue of the account on its broker. */
export interface Queue {
  id: string;
  accountId: string;
  name: string;
  /** Messages that it holds at most; absent: no bound. */
  maxLength?: number;
  /** False: what is published does not reach it. */
  enabled: boolean;
}

/** Which messages a rule chooses. */
export interface QueueFilter {
  /** The name of a message, or the action of a presence event: whole, or its beginning and `*`. */
  name?: string;
  source?: ('message' | 'presence')[];
}

/** Which messages a queue gets. */
export interface QueueRule {
  id: string;
  accountId: string;
  queueName: string;
  /** A channel, or the beginning of its name and `*`. */
  sourcePattern: string;
  filter?: QueueFilter;
  enabled: boolean;
}

/** A client without a connection, for servers: publishes, reads, signs. */
export class Rest {
  readonly auth: RestAuth;
  readonly channels: { get(name: string): RestChannel };
  readonly queues: Queues;
  readonly #rest: RestClient;

  /** @throws FanfareError with the code 40000, which names the option */
  constructor(options: RestOptions) {
    const url = checked(options);
    const rest = new RestClient(url, new Credential(url, options));
    const ids = idPrefix();
    let lastId = 0;
    const messageId = (): string => `${ids}:${++lastId}`;
    this.#rest = rest;
    this.auth = new RestAuth(rest, options);
    this.queues = new Queues(rest);
    this.channels = { get: (name) => new RestChannel(rest, name, messageId) };
  }

  /** Publishes the same messages to several channels, of which each has its own result. */
  async publish(channels: string[], messages: MessageDraft | MessageDraft[]): Promise<BatchResult[]> {
    const body = { channels, messages: draftsOf(messages, undefined) };
    return (await this.#rest.json<{ results: BatchResult[] }>('/api/publish', { method: 'POST', body })).results;
  }

  /** Counts of the account by minute. `window`: `1h`, `6h`, `24h`, `7d`, or milliseconds. */
  async metrics(params: { window?: string | number; aggregate?: 'sum' } = {}): Promise<MetricRow[]> {
    return (await this.#rest.json<{ series: MetricRow[] }>('/api/metrics/series', { query: params })).series;
  }

  /** Open connections of the tenant, and its ceiling. */
  connections(): Promise<{ connections: number; limit: number | null }> {
    return this.#rest.json('/api/connections/count');
  }

  /** Ends every connection of a client. Gives their number. */
  async closeClient(clientId: string): Promise<number> {
    const path = `/api/clients/${encodeURIComponent(clientId)}/connections/close`;
    return (await this.#rest.json<{ closed: number }>(path, { method: 'POST' })).closed;
  }

  /** The node's clock, in epoch milliseconds. */
  async time(): Promise<number> {
    return (await this.#rest.json<{ now: number }>('/time')).now;
  }
}

/** Tokens: signed here, or issued by the node. */
export class RestAuth {
  readonly #rest: RestClient;
  readonly #options: RestOptions;

  /** @internal */
  constructor(rest: RestClient, options: RestOptions) {
    this.#rest = rest;
    this.#options = options;
  }

  /** Signs a request for a token, which a browser may exchange. Calls nobody. */
  async createTokenRequest(params?: TokenParams): Promise<TokenRequest> {
    return signTokenRequest(this.#key(), this.#with(params));
  }

  /** Signs a token, a service JWT. Calls nobody. */
  async signToken(params: JwtParams): Promise<string> {
    return signToken(this.#key(), this.#with(params));
  }

  /** Signs a request and exchanges it for a token. */
  async requestToken(params?: TokenParams): Promise<TokenDetails> {
    return exchange(this.#rest.url, await this.createTokenRequest(params));
  }

  /** Takes back tokens of the key that were issued before now, or `issuedBefore`; with `clientId` those of one client. */
  async revokeTokens(params: { clientId?: string; issuedBefore?: number } = {}): Promise<void> {
    const { name } = parseKey(this.#key());
    await this.#rest.fetch(`/keys/${encodeURIComponent(name)}/revokeTokens`, { method: 'POST', body: params });
  }

  #key(): string {
    if (this.#options.key === undefined) throw badRequest('key is missing: only a server that holds it can sign');
    return this.#options.key;
  }

  #with<Params extends { clientId?: string }>(params: Params = {} as Params): Params {
    const { clientId } = this.#options;
    return clientId === undefined ? params : { clientId, ...params };
  }
}

/** A channel over HTTP. */
export class RestChannel {
  readonly name: string;
  readonly presence: RestPresence;
  readonly #rest: RestClient;
  readonly #messageId: () => string;

  /** @internal */
  constructor(rest: RestClient, name: string, messageId: () => string) {
    pathOf(name);
    this.name = name;
    this.presence = new RestPresence(rest, pathOf(name));
    this.#rest = rest;
    this.#messageId = messageId;
  }

  /**
   * Publishes a message, or several in order, all or none. Sent again under the same ids where no answer came.
   * @returns a promise that resolves when the node has stored it
   */
  publish(name: string, data?: unknown): Promise<void>;
  publish(messages: MessageDraft | MessageDraft[]): Promise<void>;
  async publish(what: string | MessageDraft | MessageDraft[], data?: unknown): Promise<void> {
    const body = draftsOf(what, data).map((draft) => ({ ...draft, id: draft.id ?? this.#messageId() }));
    for (let attempt = 1; ; attempt++) {
      try {
        await this.#rest.fetch(`${pathOf(this.name)}/publish`, { method: 'POST', body });
        return;
      } catch (error) {
        const { code } = asError(error, ErrorCode.disconnected);
        const mayPass = code === ErrorCode.disconnected || code === ErrorCode.unavailable;
        if (!mayPass || attempt === ATTEMPTS) throw error;
        await new Promise((resolve) => setTimeout(resolve, AGAIN_MS * attempt));
      }
    }
  }

  history(params: HistoryParams = {}): Promise<Page<Message>> {
    return historyOf(this.#rest, this.name, params);
  }

  /** The counts of the channel. */
  async occupancy(): Promise<Occupancy> {
    const { occupancy, source } = await this.#rest.json<{ occupancy: Omit<Occupancy, 'source'>; source: Occupancy['source'] }>(
      pathOf(this.name),
    );
    return { ...occupancy, source };
  }
}

/** Presence of a channel over HTTP. */
export class RestPresence {
  readonly #rest: RestClient;
  readonly #path: string;

  /** @internal */
  constructor(rest: RestClient, path: string) {
    this.#rest = rest;
    this.#path = path;
  }

  /** The members of this moment. */
  async get(): Promise<PresenceMember[]> {
    type Told = Omit<PresenceMember, 'timestamp'> & { updatedAt: number };
    const { members } = await this.#rest.json<{ members: Told[] }>(`${this.#path}/presence`);
    return members.map(({ updatedAt, ...member }) => ({ ...member, timestamp: updatedAt }));
  }

  /** Who came, changed and went. */
  history(params: HistoryParams = {}): Promise<Page<PresenceEvent>> {
    return this.#rest.page(`${this.#path}/presence/history`, 'events', { ...params });
  }
}

/** Queues of the account, for workers. */
export class Queues {
  readonly #rest: RestClient;

  /** @internal */
  constructor(rest: RestClient) {
    this.#rest = rest;
  }

  /** The queues that the capability covers; `all`: with those that are paused. */
  async list(params: { all?: boolean } = {}): Promise<Queue[]> {
    const query = params.all ? { all: 1 } : {};
    return (await this.#rest.json<{ queues: Queue[] }>('/api/queues', { query })).queues;
  }

  /** Makes a queue, or changes the one of this name. */
  async put(queue: { name: string; maxLength?: number | null; enabled?: boolean }): Promise<Queue> {
    return (await this.#rest.json<{ queue: Queue }>('/api/queues', { method: 'POST', body: queue })).queue;
  }

  /** A queue with the counts of the broker. */
  get(id: string): Promise<{ queue: Queue; ready: number; consumers: number; unacknowledged?: number; deadLetters?: number }> {
    return this.#rest.json(queuePath(id));
  }

  async update(id: string, change: { maxLength?: number | null; enabled?: boolean }): Promise<Queue> {
    return (await this.#rest.json<{ queue: Queue }>(queuePath(id), { method: 'PATCH', body: change })).queue;
  }

  /** Deletes a queue with its messages. */
  async delete(id: string): Promise<void> {
    await this.#rest.fetch(queuePath(id), { method: 'DELETE' });
  }

  async rules(id: string): Promise<QueueRule[]> {
    return (await this.#rest.json<{ rules: QueueRule[] }>(`${queuePath(id)}/rules`)).rules;
  }

  async addRule(id: string, rule: { sourcePattern: string; filter?: QueueFilter | string }): Promise<QueueRule> {
    return (await this.#rest.json<{ rule: QueueRule }>(`${queuePath(id)}/rules`, { method: 'POST', body: rule })).rule;
  }

  async deleteRule(id: string, ruleId: string): Promise<void> {
    await this.#rest.fetch(`${queuePath(id)}/rules/${encodeURIComponent(ruleId)}`, { method: 'DELETE' });
  }
}

function queuePath(id: string): string {
  return `/api/queues/${encodeURIComponent(id)}`;
}
