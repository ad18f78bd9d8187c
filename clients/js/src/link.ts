import type { ClientFrame, Encoded, ServerFrame } from './frame.js';

/** One connection to a node, over whichever transport. It ends once, and gives no frame afterwards. */
export interface Link {
  /** `encoded`: the frame as the client's codec has written it, when it was made. */
  send(frame: ClientFrame, encoded?: Encoded): void;
  /** Ends it; the owner is not told. */
  close(): void;
}

export interface LinkEvents {
  frame(frame: ServerFrame): void;
  /** Something came that is no frame, such as a comment of an event stream. */
  sign(): void;
  ended(why: string): void;
}
