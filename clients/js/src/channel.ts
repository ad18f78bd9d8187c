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

export type MessageListener = (message: Message) => void;

/** Before the client asks again for what the node could not give at the moment. */
const AGAIN_MS = 1_000;

/** What a channel needs of its client. */
export interface Host {
  ask(request: Request, isOwn?: boolean): Promise<ServerFrame>;
  isNew(channel: string, message: Message): boolean;
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
  #state: ChannelState = 'initialized';
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
    const modes = this.#options.modes ?? (this.#wanted.size > 0 ? [...this.#wanted] : undefined);
    const before = this.#asked;
    if (before && (!before.modes || modes?.every((mode) => before.modes?.includes(mode)))) return before.answer;
    if (this.#state !== 'attached') this.#state = 'attaching';
    const request: Request = { op: Op.attach, channel: this.name, ...this.#attachOptions(modes) };
    if (this.#options.rewind !== undefined && this.#serial === undefined) request.rewind = String(this.#options.rewind);
    const answer = this.#host.ask(request).then(
      () => {},
      (error: FanfareError) => {
        if (this.#asked?.answer === answer) this.#asked = before;
        if (this.#state === 'attaching' && this.#serial === undefined) this.#fail(error);
        throw error;
      },
    );
    // Who does not wait for it hears of it by the event.
    answer.catch(() => {});
    this.#asked = { modes, answer };
    return answer;
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
    this.#asked = undefined;
    await this.#host.ask({ op: Op.detach, channel: this.name });
  }

  /**
   * Calls `listener` for each message, or for those of one name. Attaches the channel.
   * @returns a promise of the attach, which a caller may leave alone
   */
  subscribe(listener: MessageListener): Promise<void>;
  subscribe(name: string, listener: MessageListener): Promise<void>;
  subscribe(name: string | MessageListener, listener?: MessageListener): Promise<void> {
    const [of, added] = typeof name === 'string' ? [name, listener] : [undefined, name];
    if (typeof added !== 'function') throw badRequest('listener must be a function');
    const listeners = this.#listeners.get(of) ?? new Set();
    this.#listeners.set(of, listeners.add(added));
    return this.#need('subscribe');
  }

  /** Removes a listener, or all of one name, or all. The channel stays attached. */
  unsubscribe(listener?: MessageListener): void;
  unsubscribe(name: string, listener?: MessageListener): void;
  unsubscribe(name?: string | MessageListener, listener?: MessageListener): void {
    const [of, removed] = typeof name === 'string' ? [name, listener] : [undefined, name];
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
    const drafts = typeof what === 'string' ? [{ name: what, ...(data === undefined ? {} : { data }) }] : [what].flat();
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
    if (this.#serial !== undefined && this.#state !== 'detaching') this.#reattach();
    this.presence.linked();
  }

  #reattach(): void {
    clearTimeout(this.#again);
    this.#state = 'attaching';
    const request: Request = { op: Op.attach, channel: this.name, ...this.#attachOptions(this.#asked?.modes) };
    this.#host.ask({ ...request, serial: this.#serial ?? '' }, true).catch((error: unknown) => {
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
    if (this.#state === 'detaching') return;
    const { resumed = false, serial = '', modes = [], warning } = frame;
    // Without messages there is nothing to miss; the list of members is told anew.
    const isGap = this.#serial !== undefined && !resumed && modes.includes('subscribe');
    // Nothing of a first attach is missing; of one that goes on, history begins where it began.
    if (!resumed) this.#attachedAt = serial;
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

  #detached({ code, error }: ServerFrame): void {
    if (this.#asked && code === undefined && this.#state === 'attaching') return;
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
    this.#serial = this.#asked = undefined;
    this.#granted = [];
    this.presence.detached();
  }

  /** @internal The client has ended. */
  end(): void {
    this.presence.end();
    if (this.#state !== 'initialized') this.#detached({ op: Op.detached, code: ErrorCode.closed, error: 'the client has ended' });
  }
}

/** A refusal of the moment. */
export function passes(error: FanfareError): boolean {
  if (error.reason === 'channel_limit') return false;
  return error.code === ErrorCode.limit || (error.code >= ErrorCode.internal && error.code < ErrorCode.closed);
}

export function idPrefix(): string {
  return randomText(12);
}
