import { ErrorCode, FanfareError, asError } from './error.js';
import { type ClientFrame, type Codec, type Encoded, Op, type Request, type ServerFrame } from './frame.js';
import { ID_WINDOW_MS } from './seen.js';

/** A publish is repeated this long after it was first sent: the node tells repetitions apart only a little longer. */
const REPEAT_MAX_MS = ID_WINDOW_MS - 10_000;

/** A node closes a connection on which a larger frame comes. */
const FRAME_BYTES_MAX = 524_288;

type Send = (frame: ClientFrame, encoded: Encoded) => void;

interface Pending {
  frame: ClientFrame;
  /** As it was when it was asked for. */
  encoded: Encoded;
  resolve: (answer: ServerFrame) => void;
  reject: (error: FanfareError) => void;
  /** When it was first sent, by `Date.now()`. */
  sentAt: number | undefined;
  isRepeated: boolean;
  /** It ends with the connection, since the client asks for it anew on the next one. */
  isOwn: boolean;
}

/** The requests without an answer, which outlive the connection that they were sent on. */
export class Requests {
  readonly #pending = new Map<string, Pending>();
  readonly #max: number;
  readonly #codec: Codec;
  #lastId = 0;
  #onIdle: (() => void) | undefined;
  /** Sends a frame; none without a connection. */
  #send: Send | undefined;

  constructor(max: number, codec: Codec) {
    this.#max = max;
    this.#codec = codec;
  }

  /**
   * Sends a request, now or on the next connection.
   * @returns the answer, which is no nack
   */
  ask(request: Request, isOwn = false): Promise<ServerFrame> {
    if (!isOwn && this.#pending.size >= this.#max) {
      return Promise.reject(new FanfareError(`${this.#max} requests wait for an answer`, ErrorCode.limit));
    }
    const frame = { ...request, id: String(++this.#lastId) };
    if (isOwn && !this.#send) return Promise.reject(lost());
    let encoded: Encoded;
    try {
      encoded = this.#codec.encode(frame);
    } catch (error) {
      return Promise.reject(asError(error, ErrorCode.badRequest));
    }
    if (bytesOf(encoded) > FRAME_BYTES_MAX) {
      return Promise.reject(new FanfareError(`the request has more than ${FRAME_BYTES_MAX} bytes`, ErrorCode.tooLarge));
    }
    const answer = new Promise<ServerFrame>((resolve, reject) => {
      this.#pending.set(frame.id, { frame, encoded, resolve, reject, sentAt: undefined, isRepeated: false, isOwn });
    });
    const pending = this.#pending.get(frame.id);
    if (pending && this.#send) this.#transmit(pending, this.#send);
    answer.then(this.#answered, this.#answered);
    return answer;
  }

  /** A connection is there: sends what `first` asks for, and then what waits, in its order. */
  linked(send: Send, first: () => void): void {
    this.#send = send;
    const waiting = [...this.#pending];
    first();
    const now = Date.now();
    for (const [id, pending] of waiting) {
      const isLate = pending.sentAt !== undefined && now - pending.sentAt > REPEAT_MAX_MS;
      if (isLate && pending.frame.op === Op.message) {
        this.#pending.delete(id);
        pending.reject(new FanfareError('the connection was lost for too long: the outcome is unknown', ErrorCode.unavailable));
        continue;
      }
      pending.isRepeated = pending.sentAt !== undefined;
      this.#transmit(pending, send);
    }
  }

  #transmit(pending: Pending, send: Send): void {
    pending.sentAt ??= Date.now();
    send(pending.frame, pending.encoded);
  }

  /** The connection is lost. */
  unlinked(): void {
    this.#send = undefined;
    for (const [id, pending] of [...this.#pending].filter(([, { isOwn }]) => isOwn)) {
      this.#pending.delete(id);
      pending.reject(lost());
    }
  }

  /** Takes the answer to a request. False if it is none. */
  answer(answer: ServerFrame): boolean {
    const pending = answer.id === undefined ? undefined : this.#pending.get(answer.id);
    if (!pending || answer.op === Op.heartbeat) return false;
    this.#pending.delete(pending.frame.id ?? '');
    if (answer.op === Op.nack) pending.reject(refused(answer, pending));
    else pending.resolve(answer);
    return true;
  }

  /** Calls `done` when all that was sent is answered. */
  whenIdle(done: () => void): void {
    this.#onIdle = done;
    this.#answered();
  }

  readonly #answered = (): void => {
    const isBusy = [...this.#pending.values()].some(({ sentAt }) => sentAt !== undefined);
    if (isBusy || !this.#onIdle) return;
    const done = this.#onIdle;
    this.#onIdle = undefined;
    done();
  };

  /** Nothing is answered any more. */
  end(error: FanfareError): void {
    this.#send = undefined;
    const all = [...this.#pending.values()];
    this.#pending.clear();
    for (const { reject } of all) reject(error);
  }
}

/** A refusal that depends on the moment says nothing of the first time that the publish was sent. */
function refused({ code, error, reason }: ServerFrame, { isRepeated, frame }: Pending): FanfareError {
  const isUnsure = isRepeated && frame.op === Op.message && (code ?? 0) >= ErrorCode.unauthorized;
  const message = error ?? 'refused';
  if (isUnsure) return new FanfareError(`the outcome is unknown: sent again and refused with ${code}: ${message}`, ErrorCode.unavailable);
  return new FanfareError(message, code ?? ErrorCode.internal, reason === undefined ? {} : { reason });
}

function bytesOf(encoded: Encoded): number {
  if (typeof encoded !== 'string') return encoded.length;
  // A character has three bytes at most.
  return encoded.length * 3 > FRAME_BYTES_MAX ? new TextEncoder().encode(encoded).length : encoded.length;
}

function lost(): FanfareError {
  return new FanfareError('the connection was lost', ErrorCode.disconnected);
}
