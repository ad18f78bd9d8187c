/** A message published again under its id within this many milliseconds of the node's time is the same message. */
export const ID_WINDOW_MS = 120_000;
/** Ids beyond this are forgotten before their time. */
const IDS_MAX = 65_536;

/** The ids of messages that were handed over, so that a message that is delivered again is dropped. */
export class Seen {
  /** By channel: publisher and id → the message's timestamp, oldest first. */
  readonly #channels = new Map<string, Map<string, number>>();
  #count = 0;

  /** Remembers a message. False if it was seen within the window. */
  isNew(channel: string, message: { id: string; connectionId: string; timestamp: number }): boolean {
    const timestamps = this.#channels.get(channel) ?? new Map<string, number>();
    this.#channels.set(channel, timestamps);
    // A message that comes again is the one that was stored, with the connection that published it.
    const key = `${message.connectionId} ${message.id}`;
    const now = message.timestamp;
    const before = timestamps.get(key);
    if (before !== undefined && Math.abs(now - before) < ID_WINDOW_MS) return false;
    for (const [oldest, at] of timestamps) {
      if (this.#count < IDS_MAX && now - at < ID_WINDOW_MS) break;
      timestamps.delete(oldest);
      this.#count -= 1;
    }
    if (timestamps.delete(key)) this.#count -= 1;
    timestamps.set(key, now);
    this.#count += 1;
    return true;
  }

  /** The channel is left: what comes of it later was asked for. */
  forget(channel: string): void {
    this.#count -= this.#channels.get(channel)?.size ?? 0;
    this.#channels.delete(channel);
  }
}
