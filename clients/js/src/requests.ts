import { ErrorCode, FanfareError } from './error.js';
import { type ClientFrame, Op, type Request, type ServerFrame } from './frame.js';
import { ID_WINDOW_MS } from './seen.js';

/** A publish is repeated this long after it was first sent: the node tells repetitions apart only a little longer. */
const REPEAT_MAX_MS = ID_WINDOW_MS - 10_000;

interface Pending {
  frame: ClientFrame;
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
  #lastId = 0;
  #onIdle: (() => void) | undefined;
  /** Sends a frame; none without a connection. */
  #send: ((frame: ClientFrame) => void) | undefined;

  constructor(max: number) {
    this.#max = max;
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
    const answer = new Promise<ServerFrame>((resolve, reject) => {
      this.#pending.set(frame.id, { frame, resolve, reject, sentAt: undefined, isRepeated: false, isOwn });
    });
    const pending = this.#pending.get(frame.id);
    if (pending && this.#send) this.#first(pending, this.#send);
    answer.then(this.#answered, this.#answered);
    return answer;
  }

  /** A connection is there: sends what `first` asks for, and then what waits, in its order. */
  linked(send: (frame: ClientFrame) => void, first: () => void): void {
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
      if (pending.sentAt === undefined) this.#first(pending, send);
      else {
        pending.isRepeated = true;
        send(pending.frame);
      }
    }
  }

  #first(pending: Pending, send: (frame: ClientFrame) => void): void {
    pending.sentAt = Date.now();
    send(pending.frame);
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

function lost(): FanfareError {
  return new FanfareError('the connection was lost', ErrorCode.disconnected);
}
