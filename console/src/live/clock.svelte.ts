// The time of the page, renewed each second, so that every "ago" counts on by itself.

let now = $state(Date.now());
setInterval(() => {
  now = Date.now();
}, 1000);

export function nowMs(): number {
  return now;
}

/** The seconds since a moment of this page's clock. */
export function secondsSince(ms: number): number {
  return Math.max(0, (now - ms) / 1000);
}
