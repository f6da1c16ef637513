// Numbers, sizes and times as people read them. Pure.

const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/** Three significant digits, without an exponent. */
function digits(value: number): string {
  if (value >= 100 || Number.isInteger(value)) return Math.round(value).toString();
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** A size with a binary unit. */
export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  let unit = 0;
  let scaled = Math.abs(value);
  while (scaled >= 1023.5 && unit < BINARY.length - 1) {
    scaled /= 1024;
    unit += 1;
  }
  const sign = value < 0 ? "-" : "";
  return `${sign}${digits(scaled)} ${BINARY[unit]}`;
}

/** A count with k, M or G from ten thousand on. */
export function count(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  for (const [least, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]] as const) {
    const divisor = unit === "k" ? 1e3 : least;
    if (Math.abs(value) >= least) return `${digits(value / divisor)} ${unit}`;
  }
  if (Number.isInteger(value)) return value.toString();
  return digits(value);
}

/** A latency, from nanoseconds. */
export function latency(ns: number | null | undefined): string {
  if (ns === null || ns === undefined || !Number.isFinite(ns)) return "–";
  if (ns < 1e3) return `${Math.round(ns)} ns`;
  if (ns < 999_500) return `${digits(ns / 1e3)} µs`;
  if (ns < 999_500_000) return `${digits(ns / 1e6)} ms`;
  return `${digits(ns / 1e9)} s`;
}

/** A duration with its two largest units. */
export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  const units: [number, string][] = [[86_400, "d"], [3_600, "h"], [60, "min"], [1, "s"]];
  const first = units.findIndex(([size]) => whole >= size);
  const [size, name] = units[first]!;
  const [nextSize, nextName] = units[first + 1]!;
  const rest = Math.floor((whole % size) / nextSize);
  const head = `${Math.floor(whole / size)} ${name}`;
  return rest === 0 ? head : `${head} ${rest} ${nextName}`;
}

/** A duration in its largest unit, for lists: the seconds of many rows would only flicker. */
export function roughDuration(seconds: number): string {
  const whole = Math.max(0, Math.round(seconds));
  const unit = [86_400, 3_600, 60].find((size) => whole >= size) ?? 1;
  return duration(Math.floor(whole / unit) * unit);
}

/** The age of something, as in "3 s ago". */
export function ago(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "never";
  return seconds < 1 ? "just now" : `${duration(seconds)} ago`;
}

/** A share of a whole in percent; 0 of 0 is 0. */
export function share(part: number, whole: number): number {
  return whole > 0 ? Math.min(100, Math.max(0, (part / whole) * 100)) : 0;
}

export function percent(part: number, whole: number): string {
  const value = share(part, whole);
  return value > 0 && value < 1 ? "<1 %" : `${Math.floor(value)} %`;
}

/** Date and time of the reader's zone, as 2026-03-01 14:05:09. */
export function moment(unixMs: number): string {
  const date = new Date(unixMs);
  if (Number.isNaN(date.getTime())) return "–";
  const two = (value: number) => value.toString().padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** A message of the manager as a sentence: it has neither a capital letter nor a full stop. */
export function sentence(text: string): string {
  const trimmed = text.trim();
  if (trimmed === "") return "";
  const end = /[.!?]$/.test(trimmed) ? "" : ".";
  return `${trimmed[0]!.toUpperCase()}${trimmed.slice(1)}${end}`;
}

/** `one volume`, `3 volumes`. */
export function plural(number: number, one: string, many = `${one}s`): string {
  return `${number} ${number === 1 ? one : many}`;
}

const UNITS: Record<string, number> = { "": 1, B: 1, K: 2 ** 10, M: 2 ** 20, G: 2 ** 30, T: 2 ** 40, P: 2 ** 50 };

/** The bytes of a size such as `100G` or `1.5 TiB`; null for anything else. */
export function parseSize(text: string): number | null {
  const found = /^\s*(\d+(?:\.\d+)?)\s*([KMGTP]?)(?:i?B)?\s*$/i.exec(text);
  if (!found) return null;
  const value = Number(found[1]) * (UNITS[found[2]!.toUpperCase()] ?? 1);
  return Number.isSafeInteger(Math.round(value)) ? Math.round(value) : null;
}

/** The size as the command line takes it: whole units, the largest that fits. */
export function commandSize(value: number): string {
  for (const unit of ["P", "T", "G", "M", "K"]) {
    const size = UNITS[unit]!;
    if (value >= size && value % size === 0) return `${value / size}${unit}`;
  }
  return value.toString();
}
