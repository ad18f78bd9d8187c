/** A message published again under its id within this many milliseconds of the node's time is the same message. */
export const ID_WINDOW_MS = 120_000;
/** Ids beyond this are forgotten before their time. */
const IDS_MAX = 65_536;

/** The ids of messages that were handed over, so that a message that is delivered again is dropped. */
export class Seen {
  /** Channel, client and id → the message's timestamp, oldest first. */
  readonly #timestamps = new Map<string, number>();

  /** Remembers a message. False if it was seen within the window. */
  isNew(channel: string, message: { id: string; clientId?: string; timestamp: number }): boolean {
    const key = JSON.stringify([channel, message.clientId, message.id]);
    const now = message.timestamp;
    const before = this.#timestamps.get(key);
    if (before !== undefined && Math.abs(now - before) < ID_WINDOW_MS) return false;
    for (const [oldest, at] of this.#timestamps) {
      if (this.#timestamps.size < IDS_MAX && now - at < ID_WINDOW_MS) break;
      this.#timestamps.delete(oldest);
    }
    this.#timestamps.delete(key);
    this.#timestamps.set(key, now);
    return true;
  }
}
