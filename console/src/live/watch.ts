// The stream `/api/v1/watch`, with reconnection. After each `hello` the lists are read again, because messages may be
// missing from the time without a stream.

import { streamRefusal, type ApiError } from "../api/client.ts";
import type { Acknowledged, BrickInfo, Changed, ClusterStatus, EventRecord, VolumeInfo, WatchHello } from "../api/types.ts";

export interface WatchHandlers {
  hello(hello: WatchHello): void;
  status(status: ClusterStatus): void;
  brick(brick: Changed<BrickInfo>): void;
  volume(volume: Changed<VolumeInfo>): void;
  event(event: EventRecord): void;
  acknowledged(change: Acknowledged): void;
  /** The manager answered, and opened no stream. */
  refused(error: ApiError): void;
  /** The stream has ended; another one follows after a pause. */
  lost(): void;
}

const PATH = "/api/v1/watch";
/** The manager sends a message at least every 10 s. A stream that is silent for this long is lost, though nothing has closed it. */
const SILENCE_MS_MAX = 35_000;
const PAUSE_MS_MIN = 1000;
const PAUSE_MS_MAX = 10_000;

/** Opens the stream and keeps it open until the returned function is called. */
export function watch(handlers: WatchHandlers): () => void {
  let source: EventSource | null = null;
  let timer: ReturnType<typeof setTimeout> | undefined;
  let silence: ReturnType<typeof setTimeout> | undefined;
  let pause = PAUSE_MS_MIN;
  let isOpened = false;
  let isClosed = false;

  function heard<T>(name: string, handle: (value: T) => void): void {
    source?.addEventListener(name, (message) => {
      clearTimeout(silence);
      silence = setTimeout(lose, SILENCE_MS_MAX);
      let value: T;
      try {
        value = JSON.parse((message as MessageEvent<string>).data) as T;
      } catch {
        return;
      }
      handle(value);
    });
  }

  async function askForRefusal(): Promise<void> {
    const refusal = await streamRefusal(PATH);
    if (refusal && !refusal.isUnreachable && !isClosed) handlers.refused(refusal);
  }

  function lose(): void {
    source?.close();
    clearTimeout(silence);
    if (isClosed) return;
    handlers.lost();
    if (!isOpened) void askForRefusal();
    timer = setTimeout(open, pause);
    pause = Math.min(PAUSE_MS_MAX, pause * 2);
  }

  function open(): void {
    isOpened = false;
    source = new EventSource(PATH);
    heard<WatchHello>("hello", (hello) => {
      isOpened = true;
      pause = PAUSE_MS_MIN;
      handlers.hello(hello);
    });
    heard<ClusterStatus>("status", handlers.status);
    heard<Changed<BrickInfo>>("brick", handlers.brick);
    heard<Changed<VolumeInfo>>("volume", handlers.volume);
    heard<EventRecord>("event", handlers.event);
    heard<Acknowledged>("acknowledged", handlers.acknowledged);
    // The browser's own retry gives up after a refusal, so this closes and opens again itself.
    source.onerror = lose;
  }

  open();
  return () => {
    isClosed = true;
    clearTimeout(timer);
    clearTimeout(silence);
    source?.close();
  };
}
