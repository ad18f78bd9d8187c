import { badRequest } from './error.js';
import type { ClientFrame, Codec, ServerFrame } from './frame.js';
import type { Link, LinkEvents } from './link.js';
import type { RealtimeOptions } from './options.js';

const CLOSED = 1000;

/** The realtime socket. */
export class SocketLink implements Link {
  readonly #socket;
  readonly #codec: Codec;
  #waiting: ClientFrame[] | undefined = [];

  constructor(url: string, codec: Codec, webSocket: NonNullable<RealtimeOptions['webSocket']>, events: LinkEvents) {
    this.#codec = codec;
    const socket = new webSocket(url, 'fanfare');
    this.#socket = socket;
    socket.binaryType = 'arraybuffer';
    socket.onopen = () => {
      const waiting = this.#waiting ?? [];
      this.#waiting = undefined;
      for (const frame of waiting) this.send(frame);
    };
    socket.onmessage = ({ data }) => {
      let frame: unknown;
      try {
        frame = codec.decode(data);
      } catch {
        this.close();
        return events.ended('the node sent a frame that cannot be read');
      }
      events.frame(frame as ServerFrame);
    };
    // The reason follows with onclose; without a listener some sockets throw.
    socket.onerror = () => {};
    socket.onclose = ({ code, reason }) => {
      this.close();
      events.ended(`the socket closed with ${code}${reason && `: ${reason}`}`);
    };
  }

  send(frame: ClientFrame): void {
    if (this.#waiting) this.#waiting.push(frame);
    else this.#socket.send(this.#codec.encode(frame));
  }

  close(): void {
    const socket = this.#socket;
    socket.onopen = socket.onmessage = socket.onclose = null;
    // One that is being opened or closed may throw.
    try {
      socket.close(CLOSED);
    } catch {
      // It ends by itself.
    }
  }
}

let platform: unknown = (globalThis as { WebSocket?: unknown }).WebSocket;

/** Names the constructor of sockets for a platform that has none. */
export function usePlatform(webSocket: unknown): void {
  platform ??= webSocket;
}

/** The constructor of sockets of the application, or that of the platform. */
export function webSocketOf(options: RealtimeOptions): NonNullable<RealtimeOptions['webSocket']> {
  const own = options.webSocket ?? platform;
  if (typeof own !== 'function') throw badRequest('webSocket is missing: this platform has none of its own');
  return own as NonNullable<RealtimeOptions['webSocket']>;
}
