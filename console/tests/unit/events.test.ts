import { expect, test } from "vitest";
import type { EventRecord } from "../../src/api/types.ts";
import { mergeEvents } from "../../src/text/events.ts";

function event(seq: number, more: Partial<EventRecord> = {}): EventRecord {
  return { seq, time_unix_ms: seq, kind: "brick-lost", severity: "warning", subject: { kind: "brick", name: "b" }, actor: "manager", text: "", count: 1, first_unix_ms: seq, ...more };
}

test("lists become one, the newest first, later lists win", () => {
  const acknowledged = { by: "a", time_unix_ms: 1 };
  const merged = mergeEvents([event(1), event(3)], [event(2), event(1, { acknowledged })]);
  expect(merged.map((it) => it.seq)).toEqual([3, 2, 1]);
  expect(merged[2]?.acknowledged).toEqual(acknowledged);
});

test("a repetition replaces the event that it repeats, and no other", () => {
  const first = event(1);
  const second = event(4, { count: 2, first_unix_ms: 1 });
  const third = event(7, { count: 3, first_unix_ms: 1 });
  const other = event(5, { first_unix_ms: 1, subject: { kind: "brick", name: "c" } });
  expect(mergeEvents([first, other], [second], [third]).map((it) => it.seq)).toEqual([7, 5]);
});
