import { describe, expect, test } from "vitest";
import type { SnapshotInfo } from "../../src/api/types.ts";
import { retentionWords, scheduleNameError, scheduleVolumes, snapshotNameError, timeline } from "../../src/text/snapshots.ts";

function snapshot(epoch: number, created_unix_ms: number, holds: string[] = []): SnapshotInfo {
  return { volume: "v", name: `s${epoch}`, epoch, created_unix_ms, state: "committed", size_bytes: 1, holds, labels: [], made_by: "x" };
}

describe("the timeline", () => {
  test("goes from the oldest snapshot to now", () => {
    const marks = timeline([snapshot(4, 900), snapshot(3, 500, ["keep"]), snapshot(2, 0)], 1000);
    expect(marks.map((it) => [it.at, it.isHeld])).toEqual([[0, false], [50, true], [90, false]]);
  });
  test("puts snapshots of one moment together, and those of the future at its end", () => {
    const marks = timeline([snapshot(4, 5000), snapshot(3, 1), snapshot(2, 0)], 1000);
    expect(marks.map((it) => [it.at, it.snapshots.length])).toEqual([[0, 2], [100, 1]]);
    expect(timeline([snapshot(2, 5)], 5)).toHaveLength(1);
  });
});

test("names are those of the manager", () => {
  for (const good of ["a", "monday", "a.b-c_d", "x".repeat(64)]) expect(snapshotNameError(good)).toBeNull();
  for (const bad of ["", "-a", ".a", "a b", "a@b", "a/b", "é", "x".repeat(65)]) expect(snapshotNameError(bad)).not.toBeNull();
});

test("volumes of a schedule are names, patterns and labels", () => {
  expect(scheduleVolumes("db-*  home, env=prod")).toEqual({ volumes: ["db-*", "home", "env=prod"], error: null });
  for (const bad of ["", "a/b", "=x", "a=", "a=b=c", "é", Array(65).fill("v").join(" ")]) expect(scheduleVolumes(bad).error).not.toBeNull();
  expect(scheduleNameError("x".repeat(24))).toBeNull();
  expect(scheduleNameError("x".repeat(25))).not.toBeNull();
});

test("a retention names what it keeps", () => {
  expect(retentionWords({ frequent: 0, hourly: 24, daily: 7, weekly: 0, monthly: 0, yearly: 1 })).toBe("24 hourly, 7 daily, 1 yearly");
});
