import { Channel, type ChannelOptions, type DiscontinuityEvent, type Host, idPrefix } from './channel.js';
import { Credential } from './credential.js';
import { type ConnectionState, Driver } from './driver.js';
import { Emitter } from './emitter.js';
import { ErrorCode, FanfareError, badRequest } from './error.js';
import { type Message, type Request, type ServerFrame, json } from './frame.js';
import { type RealtimeOptions, checkedRealtime } from './options.js';
import { Requests } from './requests.js';
import { type HistoryParams, type Page, RestClient, historyOf } from './rest.js';
import { Seen } from './seen.js';

export interface ConnectionStateChange {
  current: ConnectionState;
  previous: ConnectionState;
  /** Why, where the client did not ask for it. */
  reason?: FanfareError;
  /** Milliseconds until the next attempt. */
  retryInMs?: number;
}

/** A change for which there is always a reason. */
export type ConnectionLoss = ConnectionStateChange & { reason: FanfareError };

export type ConnectionEvents = { [State in Exclude<ConnectionState, 'failed' | 'disconnected'>]: [ConnectionStateChange] } & {
  change: [ConnectionStateChange];
  disconnected: [ConnectionLoss];
  failed: [ConnectionLoss];
};

/** The connection of a client, over however many sockets. Events have the names of the states; `change` is all of them. */
export class Connection extends Emitter<ConnectionEvents> {
  readonly #driver: Driver;
  #id: string | undefined;
  #clientId: string | undefined;
  #errorReason: FanfareError | undefined;
  #state: ConnectionState = 'initialized';

  /** @internal */
  constructor(driver: Driver) {
    super();
    this.#driver = driver;
  }

  get state(): ConnectionState {
    return this.#state;
  }

  /** Stands in each message that the connection publishes. Undefined before the first connect. */
  get id(): string | undefined {
    return this.#id;
  }

  /** The identity of the connection: that of its token, or the one that the client chose. */
  get clientId(): string | undefined {
    return this.#clientId;
  }

  /** Why the connection is not there, or was lost last. */
  get errorReason(): FanfareError | undefined {
    return this.#errorReason;
  }

  /** Connects now: for the first time, again after `close()`, or before the pause is over. */
  connect(): void {
    this.#driver.start();
  }

  /** Ends the connection: its members leave, and what waits for an answer is rejected. */
  close(): Promise<void> {
    return this.#driver.close();
  }

  /** @internal */
  linked(connected: ServerFrame): void {
    this.#id = connected.connectionId || undefined;
    this.#clientId = connected.clientId;
    this.#errorReason = undefined;
  }

  /** @internal */
  changed(current: ConnectionState, reason: FanfareError | undefined, retryInMs: number | undefined): void {
    const previous = this.#state;
    this.#state = current;
    if (reason) this.#errorReason = reason;
    const change = { current, previous, ...(reason ? { reason } : {}), ...(retryInMs === undefined ? {} : { retryInMs }) };
    this.emit(current, change as ConnectionLoss);
    this.emit('change', change);
  }
}

/** The channels of a client, each once. */
export class Channels {
  readonly #all = new Map<string, Channel>();
  readonly #make: (name: string, options: ChannelOptions) => Channel;

  /** @internal */
  constructor(make: (name: string, options: ChannelOptions) => Channel) {
    this.#make = make;
  }

  /** The channel of this name; `options` count when it is got for the first time. */
  get(name: string, options: ChannelOptions = {}): Channel {
    if (!name) throw badRequest('channel name is empty');
    const channel = this.#all.get(name) ?? this.#make(name, options);
    this.#all.set(name, channel);
    return channel;
  }

  /** Detaches the channel and forgets it. */
  async release(name: string): Promise<void> {
    const channel = this.#all.get(name);
    this.#all.delete(name);
    await channel?.release();
  }

  /** @internal */
  of(name: string | undefined): Channel | undefined {
    return name === undefined ? undefined : this.#all.get(name);
  }

  [Symbol.iterator](): IterableIterator<Channel> {
    return this.#all.values();
  }
}

/** A client with a connection: subscribes, publishes, is present. */
export class Realtime extends Emitter<{ discontinuity: [DiscontinuityEvent] }> {
  readonly connection: Connection;
  readonly channels: Channels;
  readonly #requests: Requests;

  /** @throws FanfareError with the code 40000, which names the option */
  constructor(options: RealtimeOptions) {
    super();
    const url = checkedRealtime(options);
    const credential = new Credential(url, options);
    const rest = new RestClient(url, credential);
    const seen = new Seen();
    const ids = idPrefix();
    let lastId = 0;
    this.#requests = new Requests(options.queueMax ?? 400, options.codec ?? json);
    const driver = new Driver(url, options, credential, this.#requests, {
      state: (state, reason, retryInMs) => {
        this.connection.changed(state, reason, retryInMs);
        if (state === 'closed' || state === 'failed') for (const channel of this.channels) channel.end();
      },
      linked: (connected) => {
        this.connection.linked(connected);
        for (const channel of this.channels) channel.linked();
      },
      frame: (frame) => this.channels.of(frame.channel)?.take(frame),
    });
    this.connection = new Connection(driver);
    const host: Host = {
      ask: (request, isOwn) => this.#ask(request, isOwn),
      isNew: (channel, message) => seen.isNew(channel, message),
      forget: (channel) => seen.forget(channel),
      history: (channel, params: HistoryParams): Promise<Page<Message>> => historyOf(rest, channel, params),
      discontinuity: (event) => {
        this.emit('discontinuity', event);
        return this.listenerCount('discontinuity') > 0;
      },
      isOwnEcho: ({ id }) => options.echo === false && id.startsWith(ids),
      messageId: () => `${ids}:${++lastId}`,
    };
    this.channels = new Channels((name, channelOptions) => new Channel(name, channelOptions, host));
    if (options.autoConnect !== false) driver.start();
  }

  #ask(request: Request, isOwn = false): Promise<ServerFrame> {
    const { state, errorReason } = this.connection;
    if (state === 'closing' || state === 'closed' || state === 'failed') {
      const why = state === 'failed' && errorReason ? ` has failed: ${errorReason.message}` : ` is ${state}`;
      return Promise.reject(new FanfareError(`the client${why}`, ErrorCode.closed, { cause: errorReason }));
    }
    return this.#requests.ask(request, isOwn);
  }

  /** Connects, where `autoConnect` is false or after `close()`. */
  connect(): void {
    this.connection.connect();
  }

  /** Ends the connection. */
  close(): Promise<void> {
    return this.connection.close();
  }
}
