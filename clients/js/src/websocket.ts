import { badRequest } from './error.js';
import type { ClientFrame, Codec, Encoded, ServerFrame } from './frame.js';
import type { Link, LinkEvents } from './link.js';
import type { RealtimeOptions } from './options.js';

const CLOSED = 1000;
const TERMINATE_MS = 500;

/** The realtime socket. */
export class SocketLink implements Link {
  readonly #socket;
  readonly #codec: Codec;
  #waiting: Encoded[] | undefined = [];

  constructor(url: string, codec: Codec, webSocket: NonNullable<RealtimeOptions['webSocket']>, events: LinkEvents) {
    this.#codec = codec;
    const socket = new webSocket(url, 'fanfare');
    this.#socket = socket;
    socket.binaryType = 'arraybuffer';
    socket.onopen = () => {
      const waiting = this.#waiting ?? [];
      this.#waiting = undefined;
      for (const encoded of waiting) socket.send(encoded);
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

  send(frame: ClientFrame, encoded: Encoded = this.#codec.encode(frame)): void {
    if (this.#waiting) this.#waiting.push(encoded);
    else this.#socket.send(encoded);
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
    // That of Node waits for a peer that may be gone, and keeps the process.
    const { terminate } = socket as { terminate?: () => void };
    if (terminate) setTimeout(() => terminate.call(socket), TERMINATE_MS);
  }
}

let platform: unknown = (globalThis as { WebSocket?: unknown }).WebSocket;

/** Names the constructor of sockets of a platform. */
export function usePlatform(webSocket: unknown): void {
  platform = webSocket;
}

/** The constructor of sockets of the application, or that of the platform. */
export function webSocketOf(options: RealtimeOptions): NonNullable<RealtimeOptions['webSocket']> {
  const own = options.webSocket ?? platform;
  if (typeof own !== 'function') throw badRequest('webSocket is missing: this platform has none of its own');
  return own as NonNullable<RealtimeOptions['webSocket']>;
}
