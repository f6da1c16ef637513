// The progress of resyncs and the remaining time. Pure.

import type { BrickScrub, DrainProgress, EventRecord, ResyncProgress } from "../api/types.ts";
import { duration } from "./format.ts";

export interface Progress {
  percent: number;
  bytesPerSecond: number | null;
  secondsLeft: number | null;
}

/** The remaining time at the pace so far; null until there is a pace. */
export function resyncProgress(report: ResyncProgress): Progress {
  const { bytes_todo: todo, bytes_done: done, elapsed_ms: elapsed } = report;
  const percent = todo > 0 ? Math.min(100, (done / todo) * 100) : 0;
  if (done <= 0 || elapsed <= 0) return { percent, bytesPerSecond: null, secondsLeft: null };
  const bytesPerSecond = (done / elapsed) * 1000;
  return { percent, bytesPerSecond, secondsLeft: Math.max(0, todo - done) / bytesPerSecond };
}

/**
 * When the running scrub of a brick began, by the manager's clock in milliseconds, from the events of the brick; null if
 * they do not tell. A start before the end of the last scrub, or before an interruption of the brick, is one of an
 * earlier scrub.
 */
export function scrubStart(events: EventRecord[], lastEndedMs: number | null): number | null {
  const kinds = ["scrub-started", "brick-lost", "brick-returned"];
  const latest = events.filter((it) => kinds.includes(it.kind)).reduce<EventRecord | null>((a, b) => (a === null || b.seq > a.seq ? b : a), null);
  if (latest?.kind !== "scrub-started") return null;
  return lastEndedMs === null || latest.time_unix_ms > lastEndedMs ? latest.time_unix_ms : null;
}

/** The seconds until the next scrub, for a heartbeat of `heardAgo` seconds ago; null if none is planned. */
export function scrubDueSeconds(scrub: BrickScrub, heardAgo: number): number | null {
  const due = scrub.next_in_ms;
  return due === null || due === undefined ? null : due / 1000 - heardAgo;
}

/** The remaining seconds of a scrub that began `elapsed` seconds ago; null below one percent. */
export function scrubSecondsLeft(percent: number, elapsedSeconds: number): number | null {
  if (percent < 1 || elapsedSeconds <= 0) return null;
  return (elapsedSeconds / percent) * (100 - percent);
}

/** The remaining seconds of a drain at its present rate; null while nothing moves. */
export function drainSecondsLeft(drain: DrainProgress): number | null {
  return drain.bytes_per_s > 0 ? drain.left_bytes / drain.bytes_per_s : null;
}

/** The copy of a volume that is ready last, as a hint; null if no client has reported a resync. */
export function resyncHint(reports: ResyncProgress[]): string | null {
  const all = reports.map(resyncProgress);
  const last = all.reduce<Progress | null>((a, b) => (a === null || (b.secondsLeft ?? Infinity) > (a.secondsLeft ?? Infinity) ? b : a), null);
  if (last === null) return null;
  const left = last.secondsLeft === null ? "waiting for a pace" : `about ${duration(last.secondsLeft)} left`;
  return `${Math.floor(last.percent)} %, ${left}.`;
}
