// The progress of resyncs and the remaining time. Pure.

import type { ResyncProgress } from "../api/types.ts";
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

/** The remaining seconds of a scrub that began `elapsed` seconds ago; null below one percent. */
export function scrubSecondsLeft(percent: number, elapsedSeconds: number): number | null {
  if (percent < 1 || elapsedSeconds <= 0) return null;
  return (elapsedSeconds / percent) * (100 - percent);
}

/** The copy of a volume that is ready last, as a hint; null if no client has reported a resync. */
export function resyncHint(reports: ResyncProgress[]): string | null {
  const all = reports.map(resyncProgress);
  const last = all.reduce<Progress | null>((a, b) => (a === null || (b.secondsLeft ?? Infinity) > (a.secondsLeft ?? Infinity) ? b : a), null);
  if (last === null) return null;
  const left = last.secondsLeft === null ? "waiting for a pace" : `about ${duration(last.secondsLeft)} left`;
  return `${Math.floor(last.percent)} %, ${left}.`;
}
