// Snapshots and schedules as people read them. Pure.

import type { Retention, ScheduleHealth, ScheduleInfo, SnapshotInfo } from "../api/types.ts";
import type { Tone } from "./words.ts";

export const SCHEDULE_HEALTH: Record<ScheduleHealth, { tone: Tone; meaning: string }> = {
  ok: { tone: "good", meaning: "each newest snapshot is young enough" },
  warning: { tone: "warn", meaning: "a newest snapshot is older than the warning age" },
  critical: { tone: "bad", meaning: "a newest snapshot is older than the critical age" },
};

/** The classes of snapshots, the finest first. */
export const RETENTION_CLASSES = ["frequent", "hourly", "daily", "weekly", "monthly", "yearly"] as const;

/** The retention of a schedule, as in "24 hourly, 7 daily". */
export function retentionWords(retention: Retention): string {
  return RETENTION_CLASSES.filter((it) => retention[it] > 0).map((it) => `${retention[it]} ${it}`).join(", ");
}

/** The badge of a schedule. */
export function scheduleState(info: ScheduleInfo): { tone: Tone; text: string; meaning: string } {
  if (!info.policy.enabled) return { tone: "plain", text: "disabled", meaning: "the manager does not carry it out" };
  return { ...SCHEDULE_HEALTH[info.health], text: info.health };
}

export interface Mark {
  /** The snapshots at this place, the newest first. */
  snapshots: SnapshotInfo[];
  /** The place on the line in percent, from the oldest to now. */
  at: number;
  isHeld: boolean;
}

/** Steps of the line. Snapshots of one step share a mark. */
const STEPS = 100;

/** The marks of a timeline from the oldest snapshot to now. Times in the future are at its end. */
export function timeline(snapshots: readonly SnapshotInfo[], nowMs: number): Mark[] {
  const oldest = Math.min(...snapshots.map((it) => it.created_unix_ms));
  const length = Math.max(1, nowMs - oldest);
  const bySteps = new Map<number, SnapshotInfo[]>();
  for (const snapshot of snapshots) {
    const share = Math.min(1, Math.max(0, (snapshot.created_unix_ms - oldest) / length));
    const step = Math.round(share * STEPS);
    bySteps.set(step, [...(bySteps.get(step) ?? []), snapshot]);
  }
  const marks = [...bySteps].map(([step, found]) => ({ snapshots: found, at: (step / STEPS) * 100, isHeld: found.some((it) => it.holds.length > 0) }));
  return marks.sort((a, b) => a.at - b.at);
}

/** The error of a name for a schedule, or null: it begins the names of its snapshots. */
export function scheduleNameError(name: string): string | null {
  return name.length > 24 ? "Use 24 characters at most." : snapshotNameError(name);
}

/** The names, patterns and labels of a text, and its error. */
export function scheduleVolumes(text: string): { volumes: string[]; error: string | null } {
  const volumes = text.split(/[\s,]+/).filter((it) => it !== "");
  if (volumes.length === 0) return { volumes, error: "Name a volume." };
  if (volumes.length > 64) return { volumes, error: "Name 64 at most, or use a pattern." };
  const isGood = (it: string) => /^[A-Za-z0-9_.*-]{1,64}$/.test(it) || /^[A-Za-z0-9_.-]{1,32}=[A-Za-z0-9_.-]{1,32}$/.test(it);
  const bad = volumes.find((it) => !isGood(it));
  return { volumes, error: bad === undefined ? null : `${bad} is no name, pattern or label.` };
}

/** The error of a name for a snapshot or a hold, or null. */
export function snapshotNameError(name: string): string | null {
  if (name === "") return "Give a name.";
  if (/^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$/.test(name)) return null;
  return "Use 1 to 64 letters, digits, points, dashes and underscores; not a point or a dash first.";
}
