import { Emitter, call } from './emitter.js';
import { ErrorCode, FanfareError, asError, badRequest } from './error.js';
import { type ChannelMode, type Message, type MessageDraft, type Occupancy, Op, type Request, type ServerFrame } from './frame.js';
import { Presence } from './presence.js';
import type { HistoryParams, Page } from './rest.js';
import { randomText } from './sign.js';

export type ChannelState = 'initialized' | 'attaching' | 'attached' | 'detaching' | 'detached' | 'failed';

export interface ChannelOptions {
  /** What was published before the first attach: a count up to `100`, or a time such as `2m`. */
  rewind?: string | number;
  /** What the connection receives. Without it, what the listeners of the channel need. */
  modes?: ChannelMode[];
  /** True: `occupancy` events tell how many are at the channel. */
  occupancy?: boolean;
}

export interface AttachedEvent {
  /** Nothing is missing since the channel was attached before. False for a first attach. */
  resumed: boolean;
  /** What the connection receives: that of the modes that the capability grants. */
  modes: ChannelMode[];
  /** What of the request the node did not do. */
  warning?: string;
}

/** Messages may be missing: reload what the application shows, for example from `history()`. */
export interface DiscontinuityEvent {
  channel: string;
}

export type ChannelEvents = {
  attached: [AttachedEvent];
  detached: [FanfareError | undefined];
  failed: [FanfareError];
  discontinuity: [DiscontinuityEvent];
  occupancy: [Occupancy];
};

export type MessageListener<Data = unknown> = (message: Message<Data>) => void;

/** Before the client asks again for what the node could not give at the moment. */
const AGAIN_MS = 1_000;
/** So often it asks again for what the application waits for. */
const ATTEMPTS = 10;

/** What a channel needs of its client. */
export interface Host {
  ask(request: Request, isOwn?: boolean): Promise<ServerFrame>;
  isNew(channel: string, message: Message): boolean;
  /** The channel is left: what comes of it later counts as new. */
  forget(channel: string): void;
  history(channel: string, params: HistoryParams): Promise<Page<Message>>;
  discontinuity(event: DiscontinuityEvent): boolean;
  /** Own messages are to be left out, where the node itself cannot do so. */
  isOwnEcho(message: Message): boolean;
  messageId(): string;
}

/** A channel of a connection. */
export class Channel extends Emitter<ChannelEvents> {
  readonly name: string;
  readonly presence: Presence;
  readonly #host: Host;
  readonly #options: ChannelOptions;
  readonly #listeners = new Map<string | undefined, Set<MessageListener>>();
  readonly #wanted = new Set<ChannelMode>();
  /** What the last attach asked for; undefined within stands for all that the capability grants. */
  #asked: { modes: ChannelMode[] | undefined; answer: Promise<void> } | undefined;
  #granted: ChannelMode[] = [];
  /** The application was given everything up to here. */
  #serial: string | undefined;
  /** The node has withheld messages since the capability did not cover them. */
  #isWithheld = false;
  #state: ChannelState = 'initialized';
  /** Attaches without an answer, and those of them that came before a detach. */
  #unanswered = 0;
  #stale = 0;
  #isReleased = false;
  /** The client has ended while it was attached. */
  #comesBack = false;
  #again: ReturnType<typeof setTimeout> | undefined;

  /** @internal */
  constructor(name: string, options: ChannelOptions, host: Host) {
    super();
    this.name = name;
    this.#options = options;
    this.#host = host;
    this.presence = new Presence(name, host, () => this.#need('presence'));
  }

  get state(): ChannelState {
    return this.#state;
  }

  /** What the connection receives of the channel. */
  get modes(): readonly ChannelMode[] {
    return this.#granted;
  }

  /** Begins to receive the channel. Resolves when the node has confirmed it. */
  attach(): Promise<void> {
    if (this.#isReleased) return Promise.reject(badRequest(`${this.name} was released: get the channel again`));
    const modes = this.#options.modes ?? (this.#wanted.size > 0 ? [...this.#wanted] : undefined);
    const before = this.#asked;
    const isAsked = before && (!before.modes || modes?.every((mode) => before.modes?.includes(mode)));
    // A token may grant less than before, and a later one more.
    const isGranted = this.#state !== 'attached' || !modes || modes.every((mode) => this.#granted.includes(mode));
    if (isAsked && isGranted) return before.answer;
    const { rewind } = this.#options;
    const isFirst = modes?.includes('subscribe') !== false && !this.#granted.includes('subscribe');
    if (rewind !== undefined && isFirst && this.#state === 'attached') {
      // A channel that is attached gives nothing of the past.
      void this.detach().catch(() => {});
    }
    if (this.#state !== 'attached') this.#state = 'attaching';
    const request: Request = { op: Op.attach, channel: this.name, ...this.#attachOptions(modes) };
    if (rewind !== undefined && this.#serial === undefined) request.rewind = String(rewind);
    const answer = this.#askAttach(request).catch((error: unknown) => {
      if (this.#asked?.answer === answer) this.#asked = before;
      const reason = asError(error, ErrorCode.internal);
      if (this.#state === 'attaching' && this.#serial === undefined) this.#fail(reason);
      throw reason;
    });
    // A caller who does not wait for it hears of it by the event.
    answer.catch(() => {});
    this.#asked = { modes, answer };
    return answer;
  }

  async #askAttach(request: Request): Promise<void> {
    for (let attempt = 1; ; attempt++) {
      this.#unanswered += 1;
      try {
        await this.#host.ask(request);
        return;
      } catch (error) {
        this.#answered();
        if (attempt === ATTEMPTS || this.#state !== 'attaching' || !passes(asError(error, ErrorCode.internal))) throw error;
        await pause(AGAIN_MS);
        if (this.#state !== 'attaching') throw error;
      }
    }
  }

  /** An attach has its answer. False: a detach has followed it. */
  #answered(): boolean {
    this.#unanswered -= 1;
    if (this.#stale === 0) return true;
    this.#stale -= 1;
    return false;
  }

  #attachOptions(modes: ChannelMode[] | undefined): { modes?: ChannelMode[]; occupancy?: boolean } {
    return { ...(modes ? { modes } : {}), ...(this.#options.occupancy ? { occupancy: true } : {}) };
  }

  #need(mode: ChannelMode): Promise<void> {
    this.#wanted.add(mode);
    return this.attach();
  }

  /** Stops to receive the channel. Listeners stay, for the next attach. */
  async detach(): Promise<void> {
    if (this.#state !== 'attached' && this.#state !== 'attaching') return;
    this.#state = 'detaching';
    clearTimeout(this.#again);
    this.#stale = this.#unanswered;
    // An attach that follows is a first one.
    this.#asked = this.#serial = undefined;
    this.#granted = [];
    this.#isWithheld = false;
    this.#host.forget(this.name);
    for (let attempt = 1; ; attempt++) {
      try {
        await this.#host.ask({ op: Op.detach, channel: this.name });
        return;
      } catch (error) {
        if (attempt === ATTEMPTS || !passes(asError(error, ErrorCode.internal))) throw error;
        await pause(AGAIN_MS);
      }
    }
  }

  /** @internal */
  async release(): Promise<void> {
    this.#isReleased = true;
    this.presence.detached();
    await this.detach();
    if (this.#state === 'detaching') this.#reset('detached');
  }

  /**
   * Calls `listener` for each message, or for those of one name. Attaches the channel.
   * @returns a promise of the attach, which a caller may leave alone
   */
  subscribe<Data = unknown>(listener: MessageListener<Data>): Promise<void>;
  subscribe<Data = unknown>(name: string, listener: MessageListener<Data>): Promise<void>;
  subscribe<Data>(name: string | MessageListener<Data>, listener?: MessageListener<Data>): Promise<void> {
    const [of, added] = (typeof name === 'string' ? [name, listener] : [undefined, name]) as [string?, MessageListener?];
    if (typeof added !== 'function') throw badRequest('listener must be a function');
    const listeners = this.#listeners.get(of) ?? new Set();
    this.#listeners.set(of, listeners.add(added));
    return this.#need('subscribe');
  }

  /** Removes a listener, or all of one name, or all. The channel stays attached. */
  unsubscribe<Data = unknown>(listener?: MessageListener<Data>): void;
  unsubscribe<Data = unknown>(name: string, listener?: MessageListener<Data>): void;
  unsubscribe<Data>(name?: string | MessageListener<Data>, listener?: MessageListener<Data>): void {
    const [of, removed] = (typeof name === 'string' ? [name, listener] : [undefined, name]) as [string?, MessageListener?];
    if (removed) this.#listeners.get(of)?.delete(removed);
    else if (of === undefined) this.#listeners.clear();
    else this.#listeners.delete(of);
  }

  /**
   * Publishes a message, or several in order, all or none. It needs no attach. Without a connection it waits for one.
   * @returns a promise that resolves when the node has stored it
   */
  publish(name: string, data?: unknown): Promise<void>;
  publish(messages: MessageDraft | MessageDraft[]): Promise<void>;
  async publish(what: string | MessageDraft | MessageDraft[], data?: unknown): Promise<void> {
    const drafts = draftsOf(what, data);
    // A retry under the same id is the same message.
    const messages = drafts.map((draft) => ({ ...draft, id: draft.id ?? this.#host.messageId() }));
    await this.#host.ask({ op: Op.message, channel: this.name, messages });
  }

  /** What was published, newest first unless asked otherwise. `untilAttach`: only what came before the channel was attached. */
  async history(params: HistoryParams & { untilAttach?: boolean } = {}): Promise<Page<Message>> {
    const { untilAttach, ...rest } = params;
    if (!untilAttach) return this.#host.history(this.name, rest);
    if (this.#attachedAt === undefined) throw badRequest('untilAttach: the channel is not attached');
    return this.#host.history(this.name, { ...rest, until: this.#attachedAt });
  }

  #attachedAt: string | undefined;

  /** @internal A connection is there. */
  linked(): void {
    if (this.#comesBack) {
      this.#comesBack = false;
      void this.attach().catch(() => {});
    }
    if (this.#serial !== undefined && this.#state !== 'detaching') this.#reattach();
    this.presence.linked();
  }

  #reattach(): void {
    clearTimeout(this.#again);
    this.#state = 'attaching';
    const request: Request = { op: Op.attach, channel: this.name, ...this.#attachOptions(this.#asked?.modes) };
    this.#unanswered += 1;
    this.#host.ask({ ...request, serial: this.#serial ?? '' }, true).catch((error: unknown) => {
      this.#answered();
      const reason = asError(error, ErrorCode.internal);
      // The next connection asks for it.
      if (reason.code === ErrorCode.disconnected || this.#state !== 'attaching') return;
      if (passes(reason)) this.#again = setTimeout(() => this.#reattach(), AGAIN_MS);
      else this.#fail(reason);
    });
  }

  /** @internal */
  take(frame: ServerFrame): void {
    switch (frame.op) {
      case Op.attached:
        return this.#attached(frame);
      case Op.detached:
        return this.#detached(frame);
      case Op.message:
        return this.#deliver(frame);
      case Op.presence:
      case Op.sync:
        return this.presence.take(frame);
      case Op.occupancy:
        if (frame.occupancy && frame.source) this.emit('occupancy', { ...frame.occupancy, source: frame.source });
    }
  }

  #attached(frame: ServerFrame): void {
    const isStale = frame.id !== undefined && !this.#answered();
    if (isStale || this.#state === 'detaching') return;
    const { resumed = false, serial = '', modes = [], warning } = frame;
    const hasMessages = modes.includes('subscribe');
    const hadMessages = this.#granted.includes('subscribe');
    // Without messages there is nothing to miss; the list of members is told anew.
    const isGap = hasMessages && (this.#isWithheld || (this.#serial !== undefined && hadMessages && !resumed));
    this.#isWithheld = !hasMessages && (hadMessages || this.#isWithheld);
    // History begins where messages began to come without a break.
    if (hasMessages && (!resumed || !hadMessages)) this.#attachedAt = serial;
    this.#serial = serial;
    this.#granted = modes;
    this.#state = 'attached';
    this.presence.attached(modes.includes('presence'), frame.presence === true);
    if (isGap) this.#tellGap();
    this.emit('attached', { resumed, modes, ...(warning === undefined ? {} : { warning }) });
  }

  #tellGap(): void {
    const event = { channel: this.name };
    const isHeard = this.#host.discontinuity(event) || this.listenerCount('discontinuity') > 0;
    if (!isHeard) console.warn(`fanfare: messages of ${this.name} may be missing; listen to "discontinuity" to reload them`);
    this.emit('discontinuity', event);
  }

  #detached({ id, code, error }: ServerFrame): void {
    // An attach has followed the detach.
    if (id !== undefined && this.#state !== 'detaching') return;
    this.#reset('detached');
    this.emit('detached', code === undefined ? undefined : new FanfareError(error ?? 'detached', code));
  }

  #deliver({ messages = [], serial }: ServerFrame): void {
    for (const message of messages) {
      if (!this.#host.isNew(this.name, message) || this.#host.isOwnEcho(message)) continue;
      const named = message.name === undefined ? [] : (this.#listeners.get(message.name) ?? []);
      for (const listener of [...(this.#listeners.get(undefined) ?? []), ...named]) call(listener, message);
    }
    // Only now: what the application was not given must come again.
    if (serial !== undefined && this.#serial !== undefined) this.#serial = serial;
  }

  #fail(error: FanfareError): void {
    this.#reset('failed');
    this.emit('failed', error);
  }

  #reset(state: ChannelState): void {
    clearTimeout(this.#again);
    this.#state = state;
    this.#serial = this.#asked = this.#attachedAt = undefined;
    this.#granted = [];
    this.#isWithheld = false;
    this.#host.forget(this.name);
    this.presence.detached();
  }

  /** @internal The client has ended. */
  end(): void {
    this.#comesBack = this.#state === 'attached' || this.#state === 'attaching';
    this.#unanswered = this.#stale = 0;
    if (this.#state !== 'initialized') this.#detached({ op: Op.detached, code: ErrorCode.closed, error: 'the client has ended' });
  }
}

/** A refusal of the moment. */
export function passes(error: FanfareError): boolean {
  if (error.reason === 'channel_limit') return false;
  return error.code === ErrorCode.limit || (error.code >= ErrorCode.internal && error.code < ErrorCode.closed);
}

const DRAFT_FIELDS = ['name', 'data', 'extras', 'id'];

/** The messages of a publish. */
export function draftsOf(what: string | MessageDraft | MessageDraft[], data: unknown): MessageDraft[] {
  const drafts = typeof what === 'string' ? [{ name: what, ...(data === undefined ? {} : { data }) }] : [what].flat();
  for (const draft of drafts as unknown[]) {
    if (typeof draft !== 'object' || draft === null) throw badRequest('a message is an object, or a name and data');
    const unknown = Object.keys(draft).find((field) => !DRAFT_FIELDS.includes(field));
    if (unknown !== undefined) throw badRequest(`a message has no field ${unknown}: it has ${DRAFT_FIELDS.join(', ')}`);
  }
  return drafts;
}

function pause(ms: number): Promise<void> {
  return new Promise((done) => setTimeout(done, ms));
}

export function idPrefix(): string {
  return randomText(12);
}
