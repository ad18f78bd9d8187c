/** Codes of {@link FanfareError}: those of the node, and some of the client's own. */
export const ErrorCode = {
  /** A request that the node, or the client, does not accept. */
  badRequest: 40000,
  /** The message is larger than the node takes. */
  tooLarge: 40009,
  /** The credential is not accepted. */
  unauthorized: 40100,
  /** The token has ended. */
  tokenExpired: 40142,
  /** The capability does not cover the operation. */
  forbidden: 40160,
  /** Another socket has taken up the connection. */
  takenOver: 40800,
  /** A limit is reached, of the node or of the client's own queue. */
  limit: 42900,
  /** The node had an error of its own. */
  internal: 50000,
  /** Not available now. Of a publish: the message may have been published, or not. */
  unavailable: 50003,
  /** The client is closed, or failed. */
  closed: 80000,
  /** The connection was lost, or could not be made. */
  disconnected: 80003,
  /** The application's `authUrl` or `authCallback` gave no token. */
  noToken: 80019,
} as const;

/** Where the first three digits of a code are not its HTTP status. */
const STATUSES: Record<number, number> = {
  [ErrorCode.tooLarge]: 413,
  [ErrorCode.forbidden]: 403,
  [ErrorCode.unavailable]: 503,
};

/** The one kind of error that this library throws or rejects with. */
export class FanfareError extends Error {
  /** One of {@link ErrorCode}, or another code of the node. */
  readonly code: number;
  /** The HTTP status that the code belongs to, such as 401. */
  readonly statusCode: number;
  /** A word of the node for programs, such as `connection_limit`. */
  readonly reason: string | undefined;

  constructor(message: string, code: number, options: { statusCode?: number; reason?: string; cause?: unknown } = {}) {
    super(message, options.cause === undefined ? undefined : { cause: options.cause });
    this.name = 'FanfareError';
    this.code = code;
    this.statusCode = options.statusCode ?? STATUSES[code] ?? (code < 60000 ? Math.floor(code / 100) : 503);
    this.reason = options.reason;
  }
}

export function badRequest(message: string): FanfareError {
  return new FanfareError(message, ErrorCode.badRequest);
}

/** Wraps what is no {@link FanfareError}. */
export function asError(error: unknown, code: number): FanfareError {
  if (error instanceof FanfareError) return error;
  const message = error instanceof Error ? error.message : String(error);
  return new FanfareError(message, code, { cause: error });
}
