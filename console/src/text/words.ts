// The meaning of classes, layouts, states and roles, in the words of the book. Pure.

import type { Durability, LayoutKind, LegState, Role, TierPolicy, VolumeContent, VolumeHealth, VolumeTier } from "../api/types.ts";

export const DURABILITY: Record<Durability, { rank: number; meaning: string }> = {
  pmem: { rank: 0, meaning: "persistent memory; survives power loss" },
  eadr: { rank: 1, meaning: "persistent memory with persistent caches; survives power loss" },
  "file-sync": { rank: 2, meaning: "file or block device; durable after a completed flush" },
  process: { rank: 3, meaning: "survives the death of processes, but not of the machine" },
};
export const DURABILITIES = Object.keys(DURABILITY) as Durability[];

export const TIERS: Record<TierPolicy, string> = {
  auto: "Pages in use are in memory, and cold ones on flash.",
  memory: "Pages stay in memory, and return to it with their first use.",
  flash: "Pages leave memory first, and only writes return them.",
};
export const TIER_POLICIES = Object.keys(TIERS) as TierPolicy[];
export const TIER_EFFECTS: Record<VolumeTier["bricks"][number]["effect"], string> = {
  applied: "obeys",
  pending: "obeys from its next heartbeat on",
  away: "is lost, and obeys when it returns",
  "no-tier": "has no disk behind memory, so it has no effect there",
};

export const LAYOUTS: Record<LayoutKind, { name: string; meaning: string; survives: string }> = {
  concat: {
    name: "concat",
    meaning: "One copy, on one brick after the other.",
    survives: "Loses data with any of its bricks.",
  },
  stripe: {
    name: "stripe",
    meaning: "One copy, spread over columns in units of 64 KiB.",
    survives: "Loses data with any of its bricks.",
  },
  mirror: {
    name: "mirror",
    meaning: "Two or three copies, each in a failure domain of its own.",
    survives: "Works as long as one copy is in reach.",
  },
  "stripe+mirror": {
    name: "stripe+mirror",
    meaning: "Columns in units of 64 KiB, each with two or three copies.",
    survives: "Works as long as each column has one copy in reach.",
  },
};
export const LAYOUT_KINDS = Object.keys(LAYOUTS) as LayoutKind[];

export type Tone = "good" | "busy" | "warn" | "bad" | "plain";

export const LEG_STATES: Record<LegState, { name: string; tone: Tone; meaning: string }> = {
  "in-sync": { name: "in-sync", tone: "good", meaning: "holds all acknowledged writes" },
  stale: { name: "stale", tone: "warn", meaning: "missed writes; clients neither write nor read it" },
  syncing: { name: "syncing", tone: "busy", meaning: "being resynced; written, not read" },
  following: { name: "async-replica", tone: "good", meaning: "asynchronous replica in step" },
};

export const HEALTH: Record<VolumeHealth, { tone: Tone; meaning: string }> = {
  "in-sync": { tone: "good", meaning: "all copies are up to date" },
  syncing: { tone: "busy", meaning: "copies are being resynced" },
  degraded: { tone: "warn", meaning: "a copy is stale" },
};

/** The health of a volume in words. Copies on lost bricks count as up to date until a write misses them. */
export function healthMeaning(health: VolumeHealth, unreachableLegs: number): string {
  if (health !== "in-sync" || unreachableLegs === 0) return HEALTH[health].meaning;
  return "no copy has missed a write, but some legs are on lost bricks";
}

const RANKS: Record<Role, number> = { viewer: 0, operator: 1, admin: 2, cluster: 3 };

/** Whether a role includes another one. */
export function includes(role: Role | null | undefined, needed: Role): boolean {
  return role !== null && role !== undefined && RANKS[role] >= RANKS[needed];
}

/** The reason why a control is not offered; null if it is. */
export function denial(role: Role | null | undefined, needed: Role): string | null {
  if (includes(role, needed)) return null;
  return `Your role is ${role ?? "unknown"}; this needs ${needed}.`;
}

/** A layout in a few words, such as `mirror, 2 copies`. */
export function layoutWords(kind: LayoutKind, columns: number, copies: number): string {
  const parts: string[] = [kind];
  if (columns > 1) parts.push(`${columns} columns`);
  if (copies > 1) parts.push(`${copies} copies`);
  return parts.join(", ");
}

export function contentName(content: VolumeContent): string {
  return content === "files" ? "file system" : "volume";
}

const EVENT_WORDS: Record<string, string> = {
  "leg-lost": "copy lost",
  "leg-returned": "copy returned",
};

export function eventWords(kind: string): string {
  return EVENT_WORDS[kind] ?? kind.replaceAll("-", " ");
}
