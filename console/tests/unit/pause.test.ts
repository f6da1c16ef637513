import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { debounced } from "../../src/live/pause.ts";

describe("debounced calls", () => {
  let runs: number[] = [];
  let start = 0;
  beforeEach(() => {
    vi.useFakeTimers();
    runs = [];
    start = performance.now();
  });
  afterEach(() => {
    vi.useRealTimers();
  });
  const make = () => debounced(() => void runs.push(performance.now() - start), 500, 2000);

  test("several calls run once, after a pause", () => {
    const call = make();
    call();
    vi.advanceTimersByTime(400);
    call();
    vi.advanceTimersByTime(5000);
    expect(runs).toEqual([900]);
  });

  test("calls without a pause run at the latest after the longest wait", () => {
    const call = make();
    for (let index = 0; index < 50; index += 1) {
      call();
      vi.advanceTimersByTime(100);
    }
    expect(runs).toEqual([2000, 4000]);
  });

  test("a cancelled call does not run, and the next one waits anew", () => {
    const call = make();
    call();
    call.cancel();
    vi.advanceTimersByTime(3000);
    call();
    vi.advanceTimersByTime(3000);
    expect(runs).toEqual([3500]);
  });
});
