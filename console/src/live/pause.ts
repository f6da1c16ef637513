// Runs something once for many changes.

export interface Debounced {
  (): void;
  cancel(): void;
}

/** Runs after `pauseMs` without a call, and at the latest `mostMs` after the first call. */
export function debounced(run: () => void, pauseMs: number, mostMs: number): Debounced {
  let timer: ReturnType<typeof setTimeout> | undefined;
  let latest = 0;
  const call = () => {
    const now = performance.now();
    if (timer === undefined) latest = now + mostMs;
    clearTimeout(timer);
    timer = setTimeout(() => {
      timer = undefined;
      run();
    }, Math.max(0, Math.min(pauseMs, latest - now)));
  };
  const cancel = () => {
    clearTimeout(timer);
    timer = undefined;
  };
  return Object.assign(call, { cancel });
}
