// The verdict on the cluster and its reasons, each with a way out. Pure.

import type { BrickInfo, ClusterStatus, EventRecord, VolumeInfo } from "../api/types.ts";
import { hadError, hasFailed } from "./devices.ts";
import { bytes, duration, percent, plural, share } from "./format.ts";
import { brickPath, volumePath } from "./route.ts";
import { contentName, type Tone } from "./words.ts";

/** From this share on a full brick is a problem: a thin volume on it may soon fail to write. */
export const FULL_PERCENT = 85;
const SHOWN_MAX = 8;

export interface Trouble {
  tone: "warn" | "bad" | "busy";
  text: string;
  hint: string;
  path: string;
}

export interface Verdict {
  tone: Tone;
  title: string;
  troubles: Trouble[];
  /** Troubles beyond those listed. */
  more: number;
}

export function brickName(brick: { name?: string | null; brick: string }): string {
  return brick.name || brick.brick.slice(0, 8);
}

/** The seconds since the brick's last heartbeat, for a message of `heardAgo` seconds ago; null if the manager has received none since its start. */
export function silence(brick: BrickInfo, heardAgo: number): number | null {
  const age = brick.heartbeat_age_ms;
  return age === null || age === undefined ? null : age / 1000 + heardAgo;
}

/** The time without heartbeats of a lost brick. */
export function silenceWords(seconds: number | null, words: (seconds: number) => string = duration): string {
  return seconds === null ? "since the manager's start" : `for ${words(seconds)}`;
}

function brickTroubles(brick: BrickInfo, heardAgo: number): Trouble[] {
  const found: Trouble[] = [];
  const name = brickName(brick);
  const path = brickPath(brick.name || brick.brick);
  if (!brick.alive) {
    found.push({
      tone: "bad",
      text: `Brick ${name} has sent no heartbeat ${silenceWords(silence(brick, heardAgo))}.`,
      hint: brick.slices > 0 ? `${plural(brick.slices, "slice")} on it. Start it again, or replace it.` : "Start it again, or forget it.",
      path,
    });
  }
  const damaged = Math.max(brick.scrub?.pass?.damaged ?? 0, brick.scrub?.last?.damaged ?? 0);
  if (damaged > 0) {
    found.push({
      tone: "bad",
      text: `Brick ${name} has ${plural(damaged, "damaged structure")}.`,
      hint: "Stop the brick and run pagemesh pool check; the other copies resync it.",
      path,
    });
  }
  const devices = brick.devices ?? [];
  const failed = devices.filter(hasFailed).length;
  if (failed > 0) {
    found.push({
      tone: "bad",
      text: `Brick ${name} has ${plural(failed, "failed device")}.`,
      hint: "Add a device if it lacks room, scrub its volumes, and drain the failed one.",
      path,
    });
  }
  const erroneous = devices.filter(hadError).length;
  if (erroneous > 0) {
    found.push({
      tone: "warn",
      text: `Brick ${name} had errors of ${plural(erroneous, "device")}.`,
      hint: "Check the device: after another failure within 24 hours its pool goes on without it.",
      path,
    });
  }
  if (brick.alive && share(brick.used_bytes, brick.capacity_bytes) >= FULL_PERCENT) {
    const free = bytes(Math.max(0, brick.capacity_bytes - brick.used_bytes));
    found.push({
      tone: "warn",
      text: `Brick ${name} is ${percent(brick.used_bytes, brick.capacity_bytes)} full; ${free} are free.`,
      hint: "Delete data, or add a brick and move copies to it.",
      path,
    });
  }
  return found;
}

function volumeTrouble(volume: VolumeInfo, resyncs: ReadonlyMap<string, string>): Trouble | null {
  const thing = `${volume.content === "files" ? "File system" : "Volume"} ${volume.name}`;
  const path = volumePath(volume.name, volume.content);
  if (volume.health === "syncing") {
    return { tone: "busy", text: `${thing} is resyncing.`, hint: resyncs.get(volume.name) ?? "Copies return by themselves.", path };
  }
  if (volume.health !== "degraded") return null;
  const away = volume.unreachable_legs;
  const hint = volume.attached
    ? "Its client resyncs the copy once its brick answers."
    : `A client resyncs it once the ${contentName(volume.content)} is attached.`;
  const lost = away > 0 ? `, ${plural(away, "leg")} on lost bricks` : "";
  return { tone: "warn", text: `${thing} is degraded${lost}.`, hint, path };
}

/**
 * The verdict; `volumes` has the volumes that are not in-sync, or some of them, and `resyncs` their progress by name.
 * `heardAgo` gives the age of a brick's figures in seconds.
 */
export function verdict(
  status: ClusterStatus,
  bricks: BrickInfo[],
  volumes: VolumeInfo[],
  critical: EventRecord[],
  resyncs: ReadonlyMap<string, string> = new Map(),
  heardAgo: (brick: BrickInfo) => number = () => 0,
): Verdict {
  const all = bricks.flatMap((brick) => brickTroubles(brick, heardAgo(brick)));
  for (const volume of volumes) {
    const trouble = volumeTrouble(volume, resyncs);
    if (trouble) all.push(trouble);
  }
  const open = critical.filter((event) => !event.acknowledged && event.severity === "critical");
  if (open.length > 0) {
    const text = `${plural(open.length, "critical event is", "critical events are")} not acknowledged.`;
    all.push({ tone: "bad", text, hint: "Read the events, and acknowledge those that are handled.", path: "/events?severity=critical" });
  }
  const unlisted = Math.max(0, status.volumes_degraded - volumes.length);
  const order = { bad: 0, warn: 1, busy: 2 };
  all.sort((a, b) => order[a.tone] - order[b.tone]);
  const troubles = all.slice(0, SHOWN_MAX);
  const more = all.length - troubles.length + unlisted;
  const worst = troubles[0]?.tone;
  if (worst === "bad") return { tone: "bad", title: "Needs attention", troubles, more };
  if (worst === "warn") return { tone: "warn", title: "Redundancy reduced", troubles, more };
  if (worst === "busy") return { tone: "busy", title: "Resyncing", troubles, more };
  if (status.bricks === 0) return { tone: "plain", title: "No bricks yet", troubles, more };
  return { tone: "good", title: "Healthy", troubles, more };
}
