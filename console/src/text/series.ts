// Histories as the charts draw them: rates per second, and latencies with gaps. Pure.

import { OP_KINDS, type FigureKind, type FigureSeries, type FigureValues, type OpKind, type SubjectFigures } from "../api/types.ts";

export interface KindSeries {
  perSecond: (number | null)[];
  bytesPerSecond: (number | null)[];
  p50: (number | null)[];
  p99: (number | null)[];
}

export interface Series {
  time: number[];
  kinds: Record<OpKind, KindSeries>;
}

function emptyKind(length: number): KindSeries {
  const gap = () => Array<number | null>(length).fill(null);
  return { perSecond: gap(), bytesPerSecond: gap(), p50: gap(), p99: gap() };
}

function bytesAt(values: FigureValues, index: number): number | null {
  const direct = values.bytes?.[index];
  if (direct !== undefined) return direct;
  const kib = values.kib?.[index];
  return kib === undefined || kib === null ? null : kib * 1024;
}

/**
 * A history on a regular grid that ends with the last complete step. `passedS` is a time that the manager's clock has
 * passed: the step that contains it, and later ones, still get reports, so their sums divided by a whole step would be
 * too small. The manager has no entry for a step without operations: from the first entry on, such a step has the rate
 * 0 and no latency. Before it nothing is known.
 */
export function regularSeries(given: FigureSeries, spanSeconds: number, passedS: number): Series {
  const step = given.step_s;
  const reported = given.time_unix_s.at(-1);
  const kinds = { read: emptyKind(0), write: emptyKind(0), flush: emptyKind(0) };
  if (reported === undefined || step <= 0) return { time: [], kinds };
  const last = reported + Math.floor((passedS - step - reported) / step) * step;
  const length = Math.min(4096, Math.max(1, Math.round(spanSeconds / step)));
  const first = last - (length - 1) * step;
  const time = Array.from({ length }, (_, index) => first + index * step);
  for (const kind of OP_KINDS) {
    const out = emptyKind(length);
    const values = given[kind];
    const known = Math.max(0, Math.round(((given.time_unix_s[0] ?? last) - first) / step));
    out.perSecond.fill(0, known);
    out.bytesPerSecond.fill(0, known);
    given.time_unix_s.forEach((at, index) => {
      const slot = Math.round((at - first) / step);
      if (slot < 0 || slot >= length || !values) return;
      const operations = values.operations[index];
      const bytes = bytesAt(values, index);
      out.perSecond[slot] = operations === null || operations === undefined ? null : operations / step;
      out.bytesPerSecond[slot] = bytes === null ? null : bytes / step;
      out.p50[slot] = values.p50_ns[index] ?? null;
      out.p99[slot] = values.p99_ns[index] ?? null;
    });
    kinds[kind] = out;
  }
  return { time, kinds };
}

export interface Rates {
  iops: number;
  bytesPerSecond: number;
}

/** Operations and bytes per second of all kinds together. */
export function rates(kinds: FigureKind[], windowSeconds: number): Rates {
  const seconds = Math.max(1, windowSeconds);
  const sum = (field: "operations" | "bytes") => kinds.reduce((total, kind) => total + kind[field], 0);
  return { iops: sum("operations") / seconds, bytesPerSecond: sum("bytes") / seconds };
}

/** From this age on a report is old: clients and bricks report every 10 s, also without operations. */
export const FRESH_SECONDS = 30;

export interface Recent {
  /** The last minute; null if nothing was reported in it. */
  rates: Rates | null;
  /** The age of the last report in seconds, if it is old. */
  oldSeconds: number | null;
}

/** The last minute of a volume or brick in an answer of `answeredAgo` seconds ago. */
export function recentRates(of: SubjectFigures | null, windowSeconds: number, answeredAgo: number): Recent {
  if (!of) return { rates: null, oldSeconds: null };
  const age = of.last_reported_us_ago / 1e6;
  const isSilent = age > Math.max(windowSeconds, FRESH_SECONDS);
  const now = age + answeredAgo;
  return { rates: isSilent ? null : rates(of.kinds, windowSeconds), oldSeconds: now > FRESH_SECONDS ? now : null };
}

export const STAGES: readonly { key: string; name: string; meaning: string }[] = [
  { key: "queue", name: "queue", meaning: "waiting in the client" },
  { key: "lock", name: "lock", meaning: "range locks" },
  { key: "fabric", name: "fabric", meaning: "network and sockets" },
  { key: "brick", name: "brick", meaning: "brick, without its store" },
  { key: "media", name: "media", meaning: "store: copy, checksum, fence" },
  { key: "finish", name: "finish", meaning: "after the last answer" },
];

export interface StageShare {
  key: string;
  name: string;
  meaning: string;
  ns: number;
  percent: number;
}

/** The stages with their shares of the sum, in the order of an operation; unknown ones come last. */
export function stageShares(stages: Record<string, number>): StageShare[] {
  const total = Object.values(stages).reduce((sum, ns) => sum + ns, 0);
  const known = STAGES.filter((stage) => stage.key in stages);
  const others = Object.keys(stages).filter((key) => !STAGES.some((stage) => stage.key === key));
  const all = [...known, ...others.map((key) => ({ key, name: key, meaning: "" }))];
  return all.map((stage) => {
    const ns = stages[stage.key]!;
    return { ...stage, ns, percent: total > 0 ? (ns / total) * 100 : 0 };
  });
}
