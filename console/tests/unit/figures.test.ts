import { describe, expect, test } from "vitest";
import type { BrickInfo, FigureKind, FigureSeries, FigureValues, RecentFigures } from "../../src/api/types.ts";
import { mediaNote } from "../../src/text/media.ts";
import { ordered, brickOrder } from "../../src/text/order.ts";
import { resyncHint, resyncProgress, scrubSecondsLeft } from "../../src/text/progress.ts";
import { lastValue, rates, regularSeries, stageShares } from "../../src/text/series.ts";

const none: FigureValues = { operations: [], kib: [], p50_ns: [], p99_ns: [] };

function given(time: number[], read: Partial<FigureValues>): FigureSeries {
  return { step_s: 10, last_reported_us_ago: 0, time_unix_s: time, read: { ...none, ...read }, write: none, flush: none };
}

describe("histories", () => {
  test("steps without operations have the rate 0 and no latency; before the first nothing is known", () => {
    const series = regularSeries(given([100, 130], { operations: [50, 100], kib: [10, 20], p50_ns: [7, null], p99_ns: [8, 9] }), 60);
    expect(series.time).toEqual([80, 90, 100, 110, 120, 130]);
    expect(series.kinds.read.perSecond).toEqual([null, null, 5, 0, 0, 10]);
    expect(series.kinds.read.bytesPerSecond).toEqual([null, null, 1024, 0, 0, 2048]);
    expect(series.kinds.read.p50).toEqual([null, null, 7, null, null, null]);
  });

  test("the grid ends now, so that silence shows", () => {
    const quiet = { ...given([100], { operations: [50], kib: [10], p50_ns: [7], p99_ns: [8] }), last_reported_us_ago: 25_000_000 };
    const series = regularSeries(quiet, 40);
    expect(series.time).toEqual([90, 100, 110, 120]);
    expect(series.kinds.read.perSecond).toEqual([null, 5, 0, 0]);
  });

  test("bytes win over KiB, and a null is a gap", () => {
    const series = regularSeries(given([100], { operations: [null], bytes: [30], kib: [1], p50_ns: [null], p99_ns: [null] }), 10);
    expect(series.kinds.read.bytesPerSecond).toEqual([3]);
    expect(series.kinds.read.perSecond).toEqual([null]);
  });

  test("nothing reported is an empty history", () => {
    expect(regularSeries(given([], {}), 3600).time).toEqual([]);
    expect(regularSeries({ ...given([5], {}), step_s: 0 }, 3600).time).toEqual([]);
  });

  test("older steps than the span are left out, and the length is bounded", () => {
    const series = regularSeries(given([10, 1000], { operations: [1, 2], kib: [0, 0], p50_ns: [1, 1], p99_ns: [1, 1] }), 50);
    expect(series.time).toHaveLength(5);
    expect(regularSeries(given([10], { operations: [1] }), 1e12).time.length).toBeLessThanOrEqual(4096);
  });

  test("the last value is the last reported one", () => {
    expect(lastValue([1, 2, null])).toBe(2);
    expect(lastValue([null])).toBeNull();
  });

  test("rates add all kinds", () => {
    const kind = { kind: "read", operations: 60, bytes: 600, p50_ns: 1, p99_ns: 1 };
    expect(rates([kind, { ...kind, kind: "write" }], 60)).toEqual({ iops: 2, bytesPerSecond: 20 });
    expect(rates([kind], 0)).toEqual({ iops: 60, bytesPerSecond: 600 });
  });
});

describe("stages", () => {
  test("shares add up, in the order of an operation, unknown stages last", () => {
    const shares = stageShares({ later: 10, media: 30, queue: 60 });
    expect(shares.map((it) => it.key)).toEqual(["queue", "media", "later"]);
    expect(shares.reduce((sum, it) => sum + it.percent, 0)).toBeCloseTo(100);
  });

  test("no time has no shares", () => {
    expect(stageShares({ queue: 0 })[0]?.percent).toBe(0);
    expect(stageShares({})).toEqual([]);
  });
});

describe("progress", () => {
  test("the remaining time follows from the pace so far", () => {
    const progress = resyncProgress({ copy: 1, bytes_todo: 1000, bytes_done: 250, elapsed_ms: 5000 });
    expect(progress).toEqual({ percent: 25, bytesPerSecond: 50, secondsLeft: 15 });
  });

  test("there is no pace yet, or nothing to do", () => {
    expect(resyncProgress({ copy: 0, bytes_todo: 1000, bytes_done: 0, elapsed_ms: 5000 }).secondsLeft).toBeNull();
    expect(resyncProgress({ copy: 0, bytes_todo: 0, bytes_done: 0, elapsed_ms: 0 }).percent).toBe(0);
    expect(resyncProgress({ copy: 0, bytes_todo: 10, bytes_done: 20, elapsed_ms: 1 })).toMatchObject({ percent: 100, secondsLeft: 0 });
  });

  test("a scrub below one percent has no estimate", () => {
    expect(scrubSecondsLeft(0, 10)).toBeNull();
    expect(scrubSecondsLeft(50, 10)).toBe(10);
  });
});

describe("orders of bricks", () => {
  const brick = (name: string, used: number) => ({ name, used_bytes: used, capacity_bytes: 100 }) as BrickInfo;
  const kind = (operations: number, p99_ns: number | null): FigureKind => ({ kind: "write", operations, bytes: 0, p50_ns: null, p99_ns });
  const figures: Record<string, FigureKind[]> = { a: [kind(5, 900)], b: [kind(50, 20)], c: [] };
  const names = (order: string) => ordered([brick("c", 70), brick("a", 10), brick("b", 20)], brickOrder(order), (it) => figures[it.name!] ?? []).map((it) => it.name).join("");

  test("the slowest, busiest and fullest come first, and bricks without figures last", () => {
    expect([names("slow"), names("busy"), names("full"), names("")]).toEqual(["abc", "bac", "cba", "cab"]);
  });

  test("an unknown order is the one by failure domain", () => {
    expect([brickOrder("toString"), brickOrder(null), brickOrder("slow")]).toEqual(["", "", "slow"]);
  });
});

describe("hints of resyncs", () => {
  test("the copy that is ready last counts, and no report gives no hint", () => {
    const fast = { copy: 1, bytes_todo: 100, bytes_done: 90, elapsed_ms: 9000 };
    const slow = { copy: 2, bytes_todo: 100, bytes_done: 25, elapsed_ms: 100_000 };
    expect(resyncHint([fast, slow])).toBe("25 %, about 5 min left.");
    expect(resyncHint([fast, { ...slow, bytes_done: 0 }])).toBe("0 %, waiting for a pace.");
    expect(resyncHint([])).toBe(null);
  });
});

describe("bytes to media", () => {
  const written = { data_bytes: 6 << 20, journal_bytes: 50 << 10, table_bytes: 10 << 10 };
  const recent = (per_user_byte: number | null): RecentFigures => ({
    window_s: 60, cluster: null, volumes: [], bricks: [],
    media: { written, per_user_byte, metadata_per_user_byte: per_user_byte === null ? null : 0.0195 },
  });

  test("the ratio counts each copy, and metadata apart", () => {
    expect(mediaNote(recent(2.0195))).toBe("Written to media in the last minute: 103 KiB/s, 2.02 bytes per user byte, 0.02 of them metadata. Each copy counts.");
  });

  test("without all reports there is no ratio, and without any no sentence", () => {
    expect(mediaNote(recent(null))).toBe("Written to media in the last minute: 103 KiB/s.");
    expect(mediaNote({ window_s: 60, cluster: null, volumes: [], bricks: [] })).toBeNull();
  });
});
