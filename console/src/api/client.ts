// Requests to the manager. Every failure is an `ApiError` with a text and a way out.

import type { Problem } from "./types.ts";

/** Longer than the manager's own limit of 30 s, so that its answer wins. */
const TIMEOUT_MS = 35_000;

export class ApiError extends Error {
  readonly status: number;
  readonly hint: string;
  readonly code: string;

  constructor(status: number, text: string, hint: string, code: string) {
    super(text);
    this.status = status;
    this.hint = hint;
    this.code = code;
  }

  /** Whether the manager gave no answer at all. */
  get isUnreachable(): boolean {
    return this.status === 0;
  }
}

export function asApiError(error: unknown): ApiError {
  if (error instanceof ApiError) return error;
  return new ApiError(0, "The manager does not answer.", "Check that it runs; the console tries again.", "unreachable");
}

/** An idempotency key. `crypto.randomUUID` is missing on pages without TLS. */
export function newKey(): string {
  const random = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export interface Answer<T> {
  body: T;
  next: string | null;
}

export interface Sent {
  method?: "GET" | "POST" | "PUT" | "DELETE";
  body?: unknown;
  key?: string;
  signal?: AbortSignal;
}

/** The target of `rel="next"` in a `Link` header (RFC 8288). */
export function nextLink(header: string | null): string | null {
  if (!header) return null;
  const found = /<([^>]*)>\s*;[^,]*\brel="?next"?/.exec(header);
  return found?.[1] ?? null;
}

async function problem(response: Response): Promise<ApiError> {
  let given: Problem = {};
  try {
    given = (await response.json()) as Problem;
  } catch {
    // An answer without JSON is not the manager's; the status has to do.
  }
  const text = given.detail ?? given.error ?? given.title ?? `The answer was ${response.status} ${response.statusText}.`;
  let hint = given.hint ?? "";
  const wait = response.headers.get("Retry-After");
  if (response.status === 429 && wait) hint = `${hint} Try again in ${wait} s.`.trim();
  return new ApiError(response.status, text, hint, given.code ?? "");
}

type Listener = (error: ApiError | null, date: string | null) => void;
let listener: Listener = () => {};

/** Calls `heard` after every request: with its error, or null without a refusal, and with the `Date` of the answer. */
export function onOutcome(heard: Listener): void {
  listener = heard;
}

export async function send<T>(path: string, sent: Sent = {}): Promise<Answer<T>> {
  const headers: Record<string, string> = { Accept: "application/json" };
  if (sent.body !== undefined) headers["Content-Type"] = "application/json";
  if (sent.key) headers["Idempotency-Key"] = sent.key;
  const limit = AbortSignal.timeout(TIMEOUT_MS);
  const signal = sent.signal ? AbortSignal.any([sent.signal, limit]) : limit;
  let response: Response;
  try {
    response = await fetch(path, {
      method: sent.method ?? "GET",
      headers,
      body: sent.body === undefined ? null : JSON.stringify(sent.body),
      credentials: "same-origin",
      cache: "no-store",
      signal,
    });
  } catch (error) {
    if (sent.signal?.aborted) throw error;
    const unreachable = asApiError(error);
    listener(unreachable, null);
    throw unreachable;
  }
  if (!response.ok) {
    const refused = await problem(response);
    listener(refused, response.headers.get("Date"));
    throw refused;
  }
  const next = nextLink(response.headers.get("Link"));
  const text = await response.text();
  listener(null, response.headers.get("Date"));
  return { body: (text === "" ? null : JSON.parse(text)) as T, next };
}

/** The refusal of a stream, which an `EventSource` does not tell; null if the manager would serve it now. */
export async function streamRefusal(path: string): Promise<ApiError | null> {
  const abort = new AbortController();
  try {
    const signal = AbortSignal.any([abort.signal, AbortSignal.timeout(TIMEOUT_MS)]);
    const response = await fetch(path, { headers: { Accept: "text/event-stream" }, credentials: "same-origin", cache: "no-store", signal });
    return response.ok ? null : await problem(response);
  } catch (error) {
    return asApiError(error);
  } finally {
    abort.abort();
  }
}
