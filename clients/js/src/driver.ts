import { Backoff } from './backoff.js';
import { Credential } from './credential.js';
import { ErrorCode, FanfareError, asError } from './error.js';
import { StreamLink } from './event-stream.js';
import { type ClientFrame, type Encoded, Op, type ServerFrame, json } from './frame.js';
import { call, withQuery } from './http.js';
import type { Link, LinkEvents } from './link.js';
import type { RealtimeOptions } from './options.js';
import type { Requests } from './requests.js';
import { SocketLink, webSocketOf } from './websocket.js';

export type ConnectionState = 'initialized' | 'connecting' | 'connected' | 'disconnected' | 'closing' | 'closed' | 'failed';

/** Added to the node's heartbeat before a silent connection is given up. */
const SILENCE_EXTRA_MS = 10_000;
/** How long a node may take to answer a ping, after the device slept or changed its network. */
const PROBE_MS = 5_000;
/** A timer that is this late tells that the device slept. */
const SLEPT_MS = 2_000;
/** Between two attempts that the platform asks for. */
const WAKE_MS = 1_000;
/** How long the node may take to answer a close. */
const CLOSE_MS = 1_000;
/** A connection that held for less is followed by longer and longer pauses. */
const HELD_MS = 10_000;
/** A token that ends sooner than this when the node asks for another is a short one. */
const TOKEN_NOTICE_MS = 25_000;
/** A blocked WebSocket is tried again after this. */
const BLOCKED_MS = 300_000;
/** So many sockets that fail one after another, while HTTP works, are blocked. */
const BLOCKED_AFTER = 2;

export interface DriverEvents {
  state(state: ConnectionState, reason: FanfareError | undefined, retryInMs: number | undefined): void;
  /** A connection is there, but nothing was sent on it yet. */
  linked(connected: ServerFrame): void;
  frame(frame: ServerFrame): void;
}

/** Makes connections, one after another, and ends those that no longer answer. */
export class Driver {
  state: ConnectionState = 'initialized';
  readonly #options: RealtimeOptions;
  readonly #url: string;
  readonly #credential: Credential;
  readonly #requests: Requests;
  readonly #events: DriverEvents;
  readonly #backoff: Backoff;
  #link: Link | undefined;
  /** The one thing that is waited for: the end of a pause, op 3, the next frame, or the answer to a close. */
  #timer: ReturnType<typeof setTimeout> | undefined;
  #connected: ServerFrame | undefined;
  #linkedAt = 0;
  /** The node's clock less that of this device, in milliseconds. */
  #clockMs = 0;
  #lastReceived = 0;
  #lastSent = 0;
  /** The reason and the pause that the node gave before it ended the connection. */
  #lastWord: { error: FanfareError; afterMs: number | undefined } | undefined;
  /** When an attempt to resume was given up before the node had answered. */
  #unheardAt = -Infinity;
  /** Fresh tokens in a row that the node has refused. */
  #refusals = 0;
  #blocked = { count: 0, until: 0 };
  #closed: (() => void)[] = [];
  /** Told apart from attempts that were given up. */
  #attempt = 0;
  #refreshing: ReturnType<typeof setTimeout> | undefined;
  #isCloseSent = false;
  /** The application wants a connection: false after `close()`. */
  #isWanted = false;
  /** An attempt may begin before the pause is over: the node did not ask for it. */
  #mayWake = false;
  /** The console has been told that there was never a connection. */
  #hasWarned = false;
  #attemptedAt = 0;
  /** Told when the platform says that the network came back, or that the page is shown again. */
  readonly #onWake = (): void => this.#wake();

  constructor(url: string, options: RealtimeOptions, credential: Credential, requests: Requests, events: DriverEvents) {
    this.#url = url;
    this.#options = options;
    this.#credential = credential;
    this.#requests = requests;
    this.#events = events;
    this.#backoff = new Backoff(options.reconnectMinMs ?? 1_000, options.reconnectMaxMs ?? 30_000);
  }

  /** Connects, at once where a pause is under way. */
  start(): void {
    this.#isWanted = true;
    if (this.state === 'closing' || this.state === 'connecting' || this.state === 'connected') return;
    this.#listen(true);
    void this.#connect();
  }

  /** Ends the connection. Resolves when it has ended. */
  close(): Promise<void> {
    this.#isWanted = false;
    if (this.state === 'closed' || this.state === 'failed') return Promise.resolve();
    const closed = new Promise<void>((resolve) => this.#closed.push(resolve));
    if (this.state === 'closing') return closed;
    const link = this.state === 'connected' ? this.#link : undefined;
    this.#set('closing');
    if (link) {
      // The node answers first to requests that were sent before.
      this.#wait(CLOSE_MS, () => this.#sendClose(link));
      this.#requests.whenIdle(() => this.#sendClose(link));
    } else this.#finish('closed');
    return closed;
  }

  #sendClose(link: Link): void {
    if (this.state !== 'closing' || link !== this.#link || this.#isCloseSent) return;
    this.#isCloseSent = true;
    this.#wait(CLOSE_MS, () => this.#finish('closed'));
    link.send({ op: Op.close });
  }

  #set(state: ConnectionState, reason?: FanfareError, retryInMs?: number): void {
    this.state = state;
    this.#events.state(state, reason, retryInMs);
  }

  #wait(ms: number, done: () => void): void {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(done, ms);
  }

  async #connect(): Promise<void> {
    clearTimeout(this.#timer);
    const attempt = ++this.#attempt;
    this.#attemptedAt = Date.now();
    this.#lastWord = undefined;
    this.#set('connecting');
    let query: Record<string, string | undefined>;
    try {
      query = await this.#credential.query();
    } catch (error) {
      if (attempt !== this.#attempt) return;
      const reason = asError(error, ErrorCode.noToken);
      // The application's server knows this user no more.
      if (reason.statusCode === 403) return this.#finish('failed', reason);
      return this.#pause(reason);
    }
    if (attempt !== this.#attempt) return;
    this.#wait(this.#options.connectTimeoutMs ?? 10_000, () => this.#lose('the node did not answer in time'));
    const events: LinkEvents = {
      frame: (frame) => this.#take(frame),
      sign: () => this.#received(),
      ended: (why) => this.#lose(why),
    };
    try {
      this.#link = this.#takesStream() ? this.#openStream(events) : this.#openSocket(query, events);
    } catch (error) {
      this.#finish('failed', asError(error, ErrorCode.badRequest));
    }
  }

  #openSocket(query: Record<string, string | undefined>, events: LinkEvents): Link {
    const { codec = json, echo } = this.#options;
    const resume = this.#connected?.connectionKey;
    const address = withQuery(`${this.#url.replace(/^http/, 'ws')}/realtime`, {
      ...query,
      resume,
      format: codec.format === 'json' ? undefined : codec.format,
      echo: echo === false ? 'false' : undefined,
      errors: 'socket',
    });
    return new SocketLink(address, codec, webSocketOf(this.#options), events);
  }

  #openStream(events: LinkEvents): Link {
    const authorization = (): Promise<string | undefined> => this.#credential.header();
    return new StreamLink({ url: this.#url, clientId: this.#options.clientId, authorization }, events);
  }

  #takesStream(): boolean {
    const [first, second] = this.#options.transports ?? ['websocket', 'sse'];
    return first === 'sse' || (second === 'sse' && Date.now() < this.#blocked.until);
  }

  #received(): void {
    this.#lastReceived = Date.now();
    const link = this.#link;
    if (!link || this.state !== 'connected') return;
    if (this.#lastReceived - this.#lastSent >= this.#heartbeatMs()) this.send({ op: Op.heartbeat });
  }

  #heartbeatMs(): number {
    return this.#connected?.heartbeatMs ?? 15_000;
  }

  /** Sends a frame on the connection, which is there. */
  send(frame: ClientFrame, encoded?: Encoded): void {
    this.#lastSent = Date.now();
    this.#link?.send(frame, encoded);
  }

  #take(frame: ServerFrame): void {
    this.#received();
    switch (frame.op) {
      case Op.connected:
        return this.#welcome(frame);
      case Op.disconnected: {
        const error = new FanfareError(frame.error ?? 'the node ended the connection', frame.code ?? ErrorCode.unavailable);
        // Coming back with the same token would end the same way.
        if (error.code === ErrorCode.tokenExpired && !this.#credential.isRenewable) return this.#finish('failed', error);
        this.#lastWord = { error, afterMs: frame.reconnectAfterMs };
        return this.#lose(error.message);
      }
      case Op.closed:
        return this.state === 'closing' ? this.#finish('closed') : this.#lose('the node closed the connection');
      case Op.error:
        if (frame.channel === undefined) return this.#refused(frame);
        break;
      case Op.auth:
        return this.#refresh(frame.expires);
    }
    if (!this.#requests.answer(frame)) this.#events.frame(frame);
    else if (frame.op === Op.attached || frame.op === Op.detached) this.#events.frame(frame);
  }

  #welcome(frame: ServerFrame): void {
    const isFirst = this.state === 'connecting';
    this.#connected = { ...this.#connected, ...frame };
    if (frame.serverTime !== undefined) this.#clockMs = frame.serverTime - Date.now();
    this.#refusals = 0;
    if (!isFirst) return;
    this.#blocked.count = 0;
    this.#linkedAt = Date.now();
    this.state = 'connected';
    this.#watch();
    this.#requests.linked((sent, encoded) => this.send(sent, encoded), () => this.#events.linked(frame));
    this.#set('connected');
  }

  /** Ends a connection that has been silent for too long. */
  #watch(): void {
    const limit = this.#heartbeatMs() + SILENCE_EXTRA_MS;
    const due = this.#lastReceived + limit;
    this.#wait(due - Date.now(), () => {
      const late = Date.now() - due;
      if (this.#lastReceived + limit > Date.now()) this.#watch();
      else if (late > SLEPT_MS) this.#probe();
      else this.#lose('the node has been silent for too long');
    });
  }

  /** The network may have changed: a node that does not answer soon is gone. */
  #probe(): void {
    const asked = Date.now();
    this.send({ op: Op.heartbeat, id: 'probe' });
    this.#wait(PROBE_MS, () => (this.#lastReceived >= asked ? this.#watch() : this.#lose('the node does not answer')));
  }

  #wake(): void {
    if ((globalThis as { document?: { hidden?: boolean } }).document?.hidden) return;
    const isSoon = Date.now() - this.#attemptedAt < WAKE_MS;
    if (this.state === 'disconnected' && this.#mayWake && !isSoon) void this.#connect();
    else if (this.state === 'connected') this.#probe();
  }

  #refused({ code = ErrorCode.internal, error = 'refused' }: ServerFrame): void {
    const hint = this.#credential.isEmpty ? ': give key, token, authUrl or authCallback' : '';
    const reason = new FanfareError(error + hint, code);
    const window = this.#connected?.resumeWindowMs ?? 0;
    if (code === ErrorCode.takenOver && Date.now() - this.#unheardAt <= window) return this.#lose(error);
    // Another token may be good, unless the account has closed the client's connections.
    const isOfToken = Math.floor(code / 100) === 401 && code !== ErrorCode.forbidden;
    const mayTryAgain = isOfToken && this.#credential.isRenewable && this.#refusals < 1;
    if (!mayTryAgain) return this.#finish('failed', reason);
    this.#refusals += 1;
    this.#credential.discard();
    this.#lastWord = { error: reason, afterMs: undefined };
    this.#lose(error);
  }

  /** The connection is lost, or was not made. */
  #lose(why: string): void {
    const { state } = this;
    if (state === 'closing') return this.#finish('closed');
    if (state !== 'connecting' && state !== 'connected') return;
    const isSocket = this.#link instanceof SocketLink;
    // A node without room refuses event streams too.
    if (state === 'connecting' && this.#link && !isSocket) this.#blocked.until = 0;
    this.#unlink();
    const place = state === 'connecting' ? `cannot connect to ${this.#url}: ` : '';
    const reason = this.#lastWord?.error ?? new FanfareError(place + why, ErrorCode.disconnected);
    if (!this.#connected && !this.#hasWarned) {
      this.#hasWarned = true;
      console.warn(`fanfare: ${reason.message}; trying again`);
    }
    if (state === 'connecting' && isSocket && !this.#lastWord) {
      this.#unheardAt = Date.now();
      void this.#suspectBlocked();
    }
    const hasHeld = state === 'connected' && Date.now() - this.#linkedAt >= HELD_MS;
    if (hasHeld) this.#backoff.reset();
    const own = this.#backoff.next();
    const asked = this.#lastWord?.afterMs;
    // A node that asks again and again to come back at once is not taken at its word.
    this.#pause(reason, asked === undefined ? own : hasHeld ? asked : Math.max(asked, own), asked === undefined);
  }

  #unlink(): void {
    this.#attempt += 1;
    clearTimeout(this.#timer);
    clearTimeout(this.#refreshing);
    this.#link?.close();
    this.#link = undefined;
    this.#requests.unlinked();
  }

  /** Waits before the next attempt. */
  #pause(reason: FanfareError, pause = this.#backoff.next(), mayWake = true): void {
    this.#mayWake = mayWake;
    this.#wait(pause, () => void this.#connect());
    this.#set('disconnected', reason, pause);
  }

  /** A socket failed without a word. Where HTTP works, something on the way may not let WebSocket through. */
  async #suspectBlocked(): Promise<void> {
    try {
      await call(`${this.#url}/health`);
    } catch {
      return;
    }
    this.#blocked.count += 1;
    if (this.#blocked.count >= BLOCKED_AFTER) this.#blocked = { count: 0, until: Date.now() + BLOCKED_MS };
  }

  /** The token ends soon. */
  #refresh(expires: number | undefined): void {
    if (!this.#credential.isRenewable) return;
    const left = expires === undefined ? 0 : expires - (Date.now() + this.#clockMs);
    clearTimeout(this.#refreshing);
    this.#refreshing = setTimeout(() => void this.#replaceToken(), left < TOKEN_NOTICE_MS ? Math.max(0, left / 2) : 0);
  }

  async #replaceToken(): Promise<void> {
    const link = this.#link;
    try {
      const accessToken = await this.#credential.fetch();
      if (link === this.#link) await this.#requests.ask({ op: Op.auth, accessToken }, true);
    } catch (error) {
      // The connection goes on until its token ends, and comes back with another one.
      if (link === this.#link) console.warn('fanfare: no new token', error);
    }
  }

  #finish(state: 'closed' | 'failed', reason?: FanfareError): void {
    this.#unlink();
    this.#listen(false);
    this.#connected = undefined;
    this.#isCloseSent = false;
    this.#backoff.reset();
    this.#requests.end(reason ?? new FanfareError('the client is closed', ErrorCode.closed));
    this.#set(state, reason);
    for (const resolve of this.#closed.splice(0)) resolve();
    if (state === 'closed' && this.#isWanted) this.start();
  }

  #listen(on: boolean): void {
    const page = globalThis as unknown as Partial<EventTarget> & { document?: Partial<EventTarget> };
    const change = on ? 'addEventListener' : 'removeEventListener';
    for (const name of ['online', 'offline', 'pageshow']) page[change]?.(name, this.#onWake);
    for (const name of ['visibilitychange', 'resume']) page.document?.[change]?.(name, this.#onWake);
  }
}
