import { describe, expect, test } from "vitest";
import type { BrickInfo, BrickScrub, EventRecord, FigureKind, FigureSeries, FigureValues, RecentFigures } from "../../src/api/types.ts";
import { mediaNote } from "../../src/text/media.ts";
import { brickOrder, ordered, withChanges } from "../../src/text/order.ts";
import { drainSecondsLeft, resyncHint, resyncProgress, scrubDueSeconds, scrubSecondsLeft, scrubStart } from "../../src/text/progress.ts";
import { rates, recentRates, regularSeries, stageShares } from "../../src/text/series.ts";

const none: FigureValues = { operations: [], kib: [], p50_ns: [], p99_ns: [] };

function given(time: number[], read: Partial<FigureValues>): FigureSeries {
  return { step_s: 10, last_reported_us_ago: 0, time_unix_s: time, read: { ...none, ...read }, write: none, flush: none };
}

describe("histories", () => {
  test("steps without operations have the rate 0 and no latency; before the first nothing is known", () => {
    const series = regularSeries(given([100, 130], { operations: [50, 100], kib: [10, 20], p50_ns: [7, null], p99_ns: [8, 9] }), 60, 140);
    expect(series.time).toEqual([80, 90, 100, 110, 120, 130]);
    expect(series.kinds.read.perSecond).toEqual([null, null, 5, 0, 0, 10]);
    expect(series.kinds.read.bytesPerSecond).toEqual([null, null, 1024, 0, 0, 2048]);
    expect(series.kinds.read.p50).toEqual([null, null, 7, null, null, null]);
  });

  test("the grid ends with the last complete step, so that silence shows", () => {
    const quiet = given([100], { operations: [50], kib: [10], p50_ns: [7], p99_ns: [8] });
    const series = regularSeries(quiet, 40, 135);
    expect(series.time).toEqual([90, 100, 110, 120]);
    expect(series.kinds.read.perSecond).toEqual([null, 5, 0, 0]);
  });

  test("bytes win over KiB, and a null is a gap", () => {
    const series = regularSeries(given([100], { operations: [null], bytes: [30], kib: [1], p50_ns: [null], p99_ns: [null] }), 10, 110);
    expect(series.kinds.read.bytesPerSecond).toEqual([3]);
    expect(series.kinds.read.perSecond).toEqual([null]);
  });

  test("nothing reported is an empty history", () => {
    expect(regularSeries(given([], {}), 3600, 100).time).toEqual([]);
    expect(regularSeries({ ...given([5], {}), step_s: 0 }, 3600, 100).time).toEqual([]);
  });

  test("older steps than the span are left out, and the length is bounded", () => {
    const series = regularSeries(given([10, 1000], { operations: [1, 2], kib: [0, 0], p50_ns: [1, 1], p99_ns: [1, 1] }), 50, 1010);
    expect(series.time).toHaveLength(5);
    expect(regularSeries(given([10], { operations: [1] }), 1e12, 1010).time.length).toBeLessThanOrEqual(4096);
  });

  test("the open step is left out, because a part of its operations is still to come", () => {
    const day = { ...given([1200, 1500, 1800], { operations: [30_000, 30_000, 400], kib: [1, 1, 1], p50_ns: [7, 7, 7], p99_ns: [8, 8, 8] }), step_s: 300 };
    for (const passed of [1804, 2099]) {
      const series = regularSeries(day, 900, passed);
      expect(series.time).toEqual([900, 1200, 1500]);
      expect(series.kinds.read.perSecond).toEqual([null, 100, 100]);
    }
    expect(regularSeries(day, 900, 2100).time.at(-1)).toBe(1800);
  });

  test("a history of the open step alone has no rate yet", () => {
    const series = regularSeries({ ...given([1800], { operations: [400], kib: [1], p50_ns: [7], p99_ns: [8] }), step_s: 300 }, 600, 1900);
    expect(series.time).toEqual([1200, 1500]);
    expect(series.kinds.read.perSecond).toEqual([null, null]);
  });

  test("rates add all kinds", () => {
    const kind = { kind: "read", operations: 60, bytes: 600, p50_ns: 1, p99_ns: 1 };
    expect(rates([kind, { ...kind, kind: "write" }], 60)).toEqual({ iops: 2, bytesPerSecond: 20 });
    expect(rates([kind], 0)).toEqual({ iops: 60, bytesPerSecond: 600 });
  });
});

describe("the last minute in lists", () => {
  const kind = { kind: "write", operations: 600, bytes: 0, p50_ns: 1, p99_ns: 1 };
  const of = (seconds: number, operations = 600) => ({ name: "v", last_reported_us_ago: seconds * 1e6, kinds: [{ ...kind, operations }] });

  test("fresh figures carry no age", () => {
    expect(recentRates(of(8), 60, 2)).toEqual({ rates: { iops: 10, bytesPerSecond: 0 }, oldSeconds: null });
  });

  test("old figures carry their age, which counts on from the answer", () => {
    expect(recentRates(of(8), 60, 40)).toEqual({ rates: { iops: 10, bytesPerSecond: 0 }, oldSeconds: 48 });
  });

  test("a client that has not reported for the whole window has no rate, rather than the rate 0", () => {
    expect(recentRates(of(600, 0), 60, 5)).toEqual({ rates: null, oldSeconds: 605 });
    expect(recentRates(null, 60, 5)).toEqual({ rates: null, oldSeconds: null });
  });

  test("a manager that has just started has a short window, and reports within it are not old", () => {
    expect(recentRates(of(8, 40), 4, 0).rates).toEqual({ iops: 10, bytesPerSecond: 0 });
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
    expect(drainSecondsLeft({ left_bytes: 100, moved_bytes: 0, bytes_per_s: 50, running_s: 1 })).toBe(2);
    expect(drainSecondsLeft({ left_bytes: 100, moved_bytes: 0, bytes_per_s: 0, running_s: 1 })).toBeNull();
    expect(resyncProgress({ copy: 0, bytes_todo: 0, bytes_done: 0, elapsed_ms: 0 }).percent).toBe(0);
    expect(resyncProgress({ copy: 0, bytes_todo: 10, bytes_done: 20, elapsed_ms: 1 })).toMatchObject({ percent: 100, secondsLeft: 0 });
  });

  test("a scrub below one percent has no estimate", () => {
    expect(scrubSecondsLeft(0, 10)).toBeNull();
    expect(scrubSecondsLeft(50, 10)).toBe(10);
  });
});

describe("scrubs", () => {
  const event = (seq: number, kind: string, time_unix_ms: number) => ({ seq, kind, time_unix_ms }) as EventRecord;

  test("a scrub began with its last start", () => {
    const events = [event(9, "scrub-found", 900), event(8, "scrub-started", 800), event(2, "scrub-started", 200)];
    expect(scrubStart(events, 300)).toBe(800);
    expect(scrubStart(events, null)).toBe(800);
  });

  test("the start of an earlier scrub says nothing of the running one", () => {
    expect(scrubStart([event(2, "scrub-started", 200)], 300)).toBeNull();
    expect(scrubStart([event(2, "scrub-started", 200), event(5, "brick-returned", 250)], null)).toBeNull();
    expect(scrubStart([], null)).toBeNull();
  });

  test("the time until the next scrub counts on from the heartbeat", () => {
    expect(scrubDueSeconds({ next_in_ms: 90_000 } as BrickScrub, 60)).toBe(30);
    expect(scrubDueSeconds({ next_in_ms: null } as BrickScrub, 60)).toBeNull();
  });
});

describe("changes of bricks", () => {
  const brick = (id: string, name: string, slices = 0) => ({ brick: id, name, slices }) as BrickInfo;

  test("the last change of a brick counts, and the list stays ordered by name", () => {
    const before = [brick("1", "node-2"), brick("2", "node-10")];
    const after = withChanges(before, [brick("3", "node-9"), brick("1", "node-2", 1), brick("1", "node-2", 2), { name: "2", deleted: true }]);
    expect(after.map((it) => [it.name, it.slices])).toEqual([["node-2", 2], ["node-9", 0]]);
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
