import { ErrorCode, FanfareError, asError } from './error.js';
import { type ClientFrame, Op, type Request, type ServerFrame } from './frame.js';
import { call, refusal, withQuery } from './http.js';
import type { Link, LinkEvents } from './link.js';
import { NEEDS_SOCKET } from './presence.js';

/** Channels of one stream at most, by the node. */
const CHANNELS_MAX = 20;
/** Attaches within this many milliseconds go into one stream. */
const GATHER_MS = 5;
/** The stream has a comment at least this often, unless the node is set to an uncommon heartbeat. */
const HEARTBEAT_MS = 60_000;
const LOOK_MS = 30_000;

interface Attachment {
  serial: string;
  /** The attach that waits for its answer. */
  id: string | undefined;
}

export interface StreamOptions {
  url: string;
  clientId: string | undefined;
  /** The value of the `authorization` header. */
  authorization: () => Promise<string | undefined>;
}

/**
 * Frames of the socket over a stream of server-sent events, and HTTP calls for publishes. The stream is opened anew, from where it
 * stands, whenever a channel comes or goes. Presence cannot be entered this way.
 */
export class StreamLink implements Link {
  readonly #options: StreamOptions;
  readonly #events: LinkEvents;
  readonly #channels = new Map<string, Attachment>();
  readonly #end = new AbortController();
  #stream: AbortController | undefined;
  #gathering: ReturnType<typeof setTimeout> | undefined;
  #publishes: Promise<void> = Promise.resolve();
  /** Without a channel there is no stream that would tell whether the node is there. */
  readonly #look: ReturnType<typeof setInterval>;

  constructor(options: StreamOptions, events: LinkEvents) {
    this.#options = options;
    this.#events = events;
    this.#look = setInterval(() => {
      if (this.#channels.size === 0) call(`${options.url}/health`).then(events.sign, () => {});
    }, LOOK_MS);
    void this.#begin();
  }

  send(frame: ClientFrame): void {
    const { id } = frame;
    switch (frame.op) {
      case Op.attach:
        if (this.#channels.size >= CHANNELS_MAX && !this.#channels.has(frame.channel)) {
          const error = `an event stream has at most ${CHANNELS_MAX} channels`;
          return this.#answer(nack(id, new FanfareError(error, ErrorCode.limit, { reason: 'channel_limit' })));
        }
        this.#channels.set(frame.channel, { serial: frame.serial ?? '', id });
        return this.#restart();
      case Op.detach:
        this.#channels.delete(frame.channel);
        this.#restart();
        return this.#answer({ op: Op.detached, id, channel: frame.channel });
      case Op.message:
        this.#publishes = this.#publishes.then(() => this.#publish(frame, id));
        return;
      case Op.presence:
        return this.#answer(
          nack(id, new FanfareError('presence needs a WebSocket', ErrorCode.badRequest, { reason: NEEDS_SOCKET })),
        );
      case Op.auth:
        // Each stream and each call takes the credential as it is.
        this.#answer({ op: Op.ack, id });
        return this.#restart();
      case Op.heartbeat:
        return void call(`${this.#options.url}/health`).then(this.#events.sign, () => {});
      case Op.close:
        return this.#answer({ op: Op.closed });
    }
  }

  close(): void {
    clearTimeout(this.#gathering);
    clearInterval(this.#look);
    this.#end.abort();
    this.#stream?.abort();
  }

  /** Later, as the node's answers are. */
  #answer(frame: { [Field in keyof ServerFrame]: ServerFrame[Field] | undefined }): void {
    queueMicrotask(() => {
      if (!this.#end.signal.aborted) this.#events.frame(frame as ServerFrame);
    });
  }

  #lose(why: string): void {
    if (this.#end.signal.aborted) return;
    this.close();
    this.#events.ended(why);
  }

  async #begin(): Promise<void> {
    try {
      const authorization = await this.#options.authorization();
      const headers = authorization === undefined ? {} : { authorization };
      const response = await call(`${this.#options.url}/time`, { headers, signal: this.#end.signal });
      const { now } = (await response.json()) as { now?: number };
      const connected = { op: Op.connected, connectionId: '', resumed: false, heartbeatMs: HEARTBEAT_MS };
      this.#answer({ ...connected, serverTime: now, clientId: this.#options.clientId });
    } catch (error) {
      this.#refuse(asError(error, ErrorCode.disconnected));
    }
  }

  #refuse(error: FanfareError): void {
    if (this.#end.signal.aborted) return;
    const { message, code, reason } = error;
    const isOver = code === ErrorCode.unauthorized || code === ErrorCode.badRequest || code === ErrorCode.forbidden;
    if (isOver) this.#events.frame({ op: Op.error, error: message, code, ...(reason ? { reason } : {}) });
    this.#lose(message);
  }

  #restart(): void {
    this.#gathering ??= setTimeout(() => {
      this.#gathering = undefined;
      this.#stream?.abort();
      this.#stream = undefined;
      if (this.#channels.size > 0) void this.#read((this.#stream = new AbortController()));
    }, GATHER_MS);
  }

  async #read(stream: AbortController): Promise<void> {
    const channels = [...this.#channels];
    const query = new URLSearchParams(channels.map(([channel]) => ['channel', channel])).toString();
    const lastEventId = channels.map(([, { serial }]) => serial).join(',');
    const { url, clientId } = this.#options;
    const address = `${url}/realtime/sse?${query}`;
    try {
      const authorization = await this.#options.authorization();
      const headers = authorization === undefined ? {} : { authorization };
      // Channels that all begin anew have no id, since one empty serial is none.
      const last = /[^,]/.test(lastEventId) ? { lastEventId } : {};
      const init = { headers, signal: stream.signal };
      const response = await fetch(withQuery(address, { ...last, clientId }) || address, init);
      if (!response.ok || !response.body) throw await refusal(response);
      await this.#parse(response.body, stream);
      throw new Error('the event stream ended');
    } catch (error) {
      if (stream.signal.aborted) return;
      const failure = asError(error, ErrorCode.disconnected);
      const mayBeOfOne = failure.code === ErrorCode.forbidden || failure.code === ErrorCode.badRequest;
      if (mayBeOfOne && (await this.#refuseSome())) this.#restart();
      else this.#refuse(failure);
    }
  }

  /** Refuses those attaches for which the node opens no stream. True if there were any. */
  async #refuseSome(): Promise<boolean> {
    let isAny = false;
    for (const [channel, { id }] of [...this.#channels].filter(([, attachment]) => attachment.id !== undefined)) {
      try {
        const authorization = await this.#options.authorization();
        const headers = authorization === undefined ? {} : { authorization };
        const { clientId } = this.#options;
        await call(`${this.#options.url}/realtime/sse`, { method: 'HEAD', headers, query: { channel, clientId } });
      } catch (error) {
        const failure = asError(error, ErrorCode.disconnected);
        if (failure.code === ErrorCode.disconnected) return false;
        isAny = true;
        this.#channels.delete(channel);
        const told = failure.code === ErrorCode.forbidden ? 'the capability does not cover subscribe here' : failure.message;
        this.#answer(nack(id, new FanfareError(told, failure.code)));
      }
    }
    return isAny;
  }

  async #parse(body: ReadableStream<Uint8Array>, stream: AbortController): Promise<void> {
    const reader = body.getReader();
    const decoder = new TextDecoder();
    let text = '';
    for (;;) {
      const { done, value } = await reader.read();
      if (done || stream.signal.aborted) return;
      this.#events.sign();
      text += decoder.decode(value, { stream: true });
      const events = text.split('\n\n');
      text = events.pop() ?? '';
      for (const event of events) {
        const [, field, value = ''] = /^(data|retry): ?(.*)$/m.exec(event) ?? [];
        if (field === 'data') this.#take(JSON.parse(value) as ServerFrame);
        // The node's last word: when to come back.
        if (field === 'retry') this.#events.frame({ op: Op.disconnected, reconnectAfterMs: Number(value) });
        if (stream.signal.aborted) return;
      }
    }
  }

  #take(frame: ServerFrame): void {
    const attachment = this.#channels.get(frame.channel ?? '');
    if (!attachment) {
      // Of the stream itself, or of a channel that was detached just now.
      if (frame.channel === undefined) this.#events.frame(frame);
      return;
    }
    if (frame.serial !== undefined && frame.op !== Op.presence) attachment.serial = frame.serial;
    if (frame.op === Op.attached) {
      const { id } = attachment;
      attachment.id = undefined;
      if (id !== undefined) frame.id = id;
      // Another channel came or went, and this one goes on as it was. Its members are told anew.
      else if (frame.resumed) {
        const isEmpty = frame.modes?.includes('presence') === true && frame.presence !== true;
        const { channel = '' } = frame;
        return isEmpty ? this.#events.frame({ op: Op.sync, channel, members: [], more: false }) : undefined;
      }
    }
    this.#events.frame(frame);
  }

  async #publish({ channel, messages }: Extract<Request, { op: typeof Op.message }>, id: string | undefined): Promise<void> {
    if (this.#end.signal.aborted) return;
    try {
      const authorization = await this.#options.authorization();
      const headers = authorization === undefined ? {} : { authorization };
      const path = `/api/channels/${encodeURIComponent(channel)}/publish`;
      const signal = this.#end.signal;
      await call(this.#options.url + path, { method: 'POST', headers, body: messages, signal });
      this.#answer({ op: Op.ack, id, serials: [] });
    } catch (error) {
      const failure = asError(error, ErrorCode.disconnected);
      // Sent again on the next connection, under the same ids.
      const isLost = failure.code === ErrorCode.disconnected || failure.code === ErrorCode.unauthorized;
      if (isLost) this.#lose(failure.message);
      else this.#answer(nack(id, failure));
    }
  }
}

function nack(id: string | undefined, error: FanfareError): ServerFrame {
  const { message, code, reason } = error;
  return { op: Op.nack, ...(id === undefined ? {} : { id }), error: message, code, ...(reason ? { reason } : {}) };
}
