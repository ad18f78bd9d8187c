import { ErrorCode, FanfareError, asError } from './error.js';

const TIMEOUT_MS = 10_000;

export interface HttpRequest {
  method?: string;
  query?: Record<string, string | number | undefined>;
  headers?: Record<string, string>;
  body?: unknown;
  signal?: AbortSignal;
  /** No answer of before will do. */
  isFresh?: boolean;
}

/** Appends those parameters that have a value. */
export function withQuery(url: string, query: Record<string, string | number | undefined> = {}): string {
  const given = Object.entries(query).filter((pair): pair is [string, string | number] => pair[1] !== undefined);
  const text = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return text && url + (url.includes('?') ? '&' : '?') + text;
}

/**
 * One HTTP call, of at most 10 s.
 * @throws FanfareError with the node's status, or with the code 80003 where no answer came
 */
export async function call(url: string, request: HttpRequest = {}): Promise<Response> {
  const headers: Record<string, string> = { ...request.headers };
  const init: RequestInit = { method: request.method ?? 'GET', headers };
  if (request.isFresh) init.cache = 'no-store';
  if (request.body !== undefined) {
    init.body = JSON.stringify(request.body);
    headers['content-type'] = 'application/json';
  }
  const end = new AbortController();
  const abort = (): void => end.abort(new FanfareError('there was no answer in time', ErrorCode.disconnected));
  const timer = setTimeout(abort, TIMEOUT_MS);
  request.signal?.addEventListener('abort', abort, { once: true });
  init.signal = end.signal;
  try {
    const response = await fetch(withQuery(url, request.query) || url, init);
    // With all of its body, so that the time holds for that too.
    const body = await response.arrayBuffer();
    const { status, headers: told } = response;
    const whole = new Response(status === 204 ? null : body, { status, headers: told });
    if (!whole.ok) throw await refusal(whole);
    return whole;
  } catch (error) {
    throw asError(error, ErrorCode.disconnected);
  } finally {
    clearTimeout(timer);
    request.signal?.removeEventListener('abort', abort);
  }
}

/** The error that an answer stands for. */
export async function refusal(response: Response): Promise<FanfareError> {
  const { status } = response;
  const text = await response.text().catch(() => '');
  let told: { error?: unknown; reason?: unknown } = {};
  try {
    told = JSON.parse(text) as typeof told;
  } catch {
    // A proxy's page.
  }
  const message = typeof told.error === 'string' ? told.error : `HTTP status ${status}`;
  const reason = typeof told.reason === 'string' ? { reason: told.reason } : {};
  return new FanfareError(message, codeOf(status), { statusCode: status, ...reason });
}

const CODES: Record<number, number> = {
  403: ErrorCode.forbidden,
  413: ErrorCode.tooLarge,
  503: ErrorCode.unavailable,
};

function codeOf(status: number): number {
  return CODES[status] ?? status * 100;
}
