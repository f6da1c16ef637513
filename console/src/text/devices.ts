// The signs of failed devices, and of devices with errors. Pure.

import type { BrickDevice } from "../api/types.ts";
import { duration, plural } from "./format.ts";
import type { Tone } from "./words.ts";

/** A state to show as a badge, with an explanation. */
export interface Sign {
  tone: Tone;
  text: string;
  title: string;
}

export function hasFailed(device: BrickDevice): boolean {
  return device.state === "failed";
}

/** Whether the device is in use after an error. */
export function hadError(device: BrickDevice): boolean {
  return !hasFailed(device) && (device.errors ?? 0) > 0;
}

/** The sign of a device; null for a sound one. `heardAgo` is the age of the brick's report in seconds. */
export function deviceSign(device: BrickDevice, heardAgo: number): Sign | null {
  if (hasFailed(device)) return { tone: "bad", text: "failed", title: "The pool goes on without it, and its pages are damaged." };
  if (!hadError(device)) return null;
  const last = typeof device.last_error_s === "number" ? `, the last one ${duration(device.last_error_s + heardAgo)} ago` : "";
  return { tone: "warn", text: "had an error", title: `${plural(device.errors ?? 0, "error")} since the brick started${last}.` };
}

/** The signs of a list of devices: how many have failed, and how many had errors. */
export function deviceSigns(devices: readonly BrickDevice[]): Sign[] {
  const failed = devices.filter(hasFailed).length;
  const erroneous = devices.filter(hadError).length;
  const signs: Sign[] = [];
  if (failed > 0) signs.push({ tone: "bad", text: plural(failed, "failed device"), title: "The pool goes on without them." });
  if (erroneous > 0) signs.push({ tone: "warn", text: "a device had an error", title: "Check the devices of the brick." });
  return signs;
}
