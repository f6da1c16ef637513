// Two times. The age of an answer counts on the browser's monotonic clock, so a jump of a wall clock does not change
// it. The age of an event counts on the manager's wall clock, as the `Date` of its answers gives it.

/** `Date` has whole seconds, and an answer takes some time: smaller differences mean nothing. */
const PRECISION_MS = 3000;
/** From this difference on the page names it. */
const NOTEWORTHY_MS = 60_000;

let elapsed = $state(performance.now());
/** The manager's wall clock at the start of the monotonic one. */
let managerOrigin = $state(Date.now() - performance.now());
let difference = $state(0);
setInterval(() => {
  elapsed = performance.now();
}, 1000);

/** The time of an answer, for `secondsSince`. */
export function monotonicMs(): number {
  return performance.now();
}

/** The seconds since a time of `monotonicMs`; renewed each second. */
export function secondsSince(ms: number): number {
  return Math.max(0, (elapsed - ms) / 1000);
}

/** The manager's wall clock; renewed each second. */
export function managerNowMs(): number {
  return elapsed + managerOrigin;
}

/** A time that the manager's wall clock has surely passed: `Date` is known within `PRECISION_MS`, and has whole seconds. */
export function managerPassedMs(): number {
  return performance.now() + managerOrigin - PRECISION_MS - 1000;
}

/** Takes the `Date` of an answer. */
export function hearManagerClock(date: string | null): void {
  const given = date === null ? Number.NaN : Date.parse(date);
  if (Number.isNaN(given)) return;
  const origin = given - performance.now();
  if (Math.abs(origin - managerOrigin) > PRECISION_MS) managerOrigin = origin;
  const behind = given - Date.now();
  difference = Math.abs(behind) < NOTEWORTHY_MS ? 0 : behind;
}

/** The seconds by which the manager's clock is ahead of the browser's; 0 for a difference of less than a minute. */
export function clockDifferenceSeconds(): number {
  return difference / 1000;
}
