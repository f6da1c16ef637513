// The effects of a change, shown before it is sent. Pure. The manager decides; these are the facts that it will
// decide on, as far as the console has them.

import type { BrickInfo, CreateVolume, Durability, LayoutKind, TierPolicy, VolumeDetail, VolumeTier } from "../api/types.ts";
import { bytes, commandSize, parseSize, plural } from "./format.ts";
import { brickName } from "./health.ts";
import { DURABILITY, TIERS } from "./words.ts";

const PAGE = 4096;
export const COLUMNS_MAX = 16;
export const COPIES_MAX = 3;

export function isStriped(kind: LayoutKind): boolean {
  return kind === "stripe" || kind === "stripe+mirror";
}

export function isMirrored(kind: LayoutKind): boolean {
  return kind === "mirror" || kind === "stripe+mirror";
}

/** The broken rule of a name; null for a good one. */
export function nameError(name: string): string | null {
  if (name === "") return "Give it a name.";
  if (name.length > 64) return "A name has at most 64 characters.";
  if (/^[.-]/.test(name)) return "A name does not start with a dot or a dash.";
  if (!/^[A-Za-z0-9._-]+$/.test(name)) return "A name has letters, digits, dots, dashes and underscores only.";
  return null;
}

/** The broken rule of a size; null for a good one. `above` is the present size of a volume that grows. */
export function sizeError(text: string, above = 0): string | null {
  const value = parseSize(text);
  if (value === null) return "Write a size such as 100G, 1.5T or 4096.";
  if (value < PAGE) return "The smallest size is 4096 bytes.";
  if (value % PAGE !== 0) return "A size is a multiple of 4096 bytes.";
  if (value <= above) return `It must be larger than ${bytes(above)}.`;
  return null;
}

/** The classes of living bricks, the strongest first, with the failure domains that each has. */
export function classes(bricks: BrickInfo[]): { durability: Durability; bricks: number; domains: number; freeBytes: number }[] {
  const found = new Map<Durability, BrickInfo[]>();
  for (const brick of bricks.filter((it) => it.alive)) {
    found.set(brick.durability, [...(found.get(brick.durability) ?? []), brick]);
  }
  const listed = [...found].map(([durability, of]) => ({
    durability,
    bricks: of.length,
    domains: new Set(of.map((it) => it.domain)).size,
    freeBytes: of.reduce((sum, it) => sum + Math.max(0, it.capacity_bytes - it.used_bytes), 0),
  }));
  return listed.sort((a, b) => DURABILITY[a.durability].rank - DURABILITY[b.durability].rank);
}

/** The effects of the creation of a volume, and the doubts about it. */
export function createPlan(asked: CreateVolume, bricks: BrickInfo[]): { does: string[]; doubts: string[] } {
  const copies = isMirrored(asked.layout) ? (asked.copies ?? 2) : 1;
  const columns = isStriped(asked.layout) ? (asked.columns ?? 2) : 1;
  const does: string[] = [];
  const doubts: string[] = [];
  const promised = asked.size_bytes * copies;
  const thing = asked.content === "files" ? "The files may take" : "The volume has";
  does.push(`${thing} ${bytes(asked.size_bytes)}. Space is used as data is written: up to ${bytes(promised)} on ${plural(copies * columns, "leg")}.`);
  if (copies > 1) does.push(`${copies} copies lie in ${copies} failure domains. Each write is on all of them before it is acknowledged.`);
  else does.push("There is one copy: the loss of one brick loses data.");
  if (columns > 1) does.push(`Units of 64 KiB alternate over ${columns} columns.`);
  const usable = classes(bricks).filter((it) => !asked.durability || it.durability === asked.durability);
  const possible = usable.filter((it) => it.domains >= copies);
  const legs = plural(copies * columns, "leg");
  const [only, ...others] = possible;
  if (only && others.length === 0) does.push(`Class ${only.durability}: ${DURABILITY[only.durability].meaning}.`);
  else if (only) does.push(`The manager chooses the class: the first of ${possible.map((it) => it.durability).join(", ")} with room for ${legs}.`);
  const domains = Math.max(0, ...usable.map((it) => it.domains));
  const freeBytes = Math.max(0, ...possible.map((it) => it.freeBytes));
  if (bricks.length === 0) doubts.push("There are no bricks yet. Start bricks first.");
  else if (usable.length === 0) doubts.push(asked.durability ? `No living brick has the class ${asked.durability}.` : "No brick is alive.");
  else if (!only) doubts.push(`${copies} copies need ${copies} failure domains of one class; there ${domains === 1 ? "is" : "are"} ${domains}.`);
  else if (freeBytes < promised) doubts.push(`The bricks${others.length > 0 ? " of any one class" : ""} have ${bytes(freeBytes)} free, less than the full volume will take. Add bricks before it fills.`);
  return { does, doubts };
}

/** The command that does the same as the dialog. */
export function createCommand(asked: CreateVolume): string {
  const size = commandSize(asked.size_bytes);
  const parts = asked.content === "files" ? ["pagemesh fs create", asked.name] : ["pagemesh volume create", asked.name];
  parts.push(`--size ${size}`);
  if (asked.content !== "files") parts.push(`--layout ${asked.layout}`);
  if (isStriped(asked.layout) && asked.columns) parts.push(`--columns ${asked.columns}`);
  if (isMirrored(asked.layout) && asked.copies) parts.push(`--copies ${asked.copies}`);
  if (asked.durability) parts.push(`--class ${asked.durability}`);
  return parts.join(" ");
}

function bricksOf(detail: VolumeDetail, copy?: number): string[] {
  const legs = detail.layout.segments.flatMap((segment) => segment.columns.flatMap((column) => {
    return copy === undefined ? column.legs : column.legs.slice(copy, copy + 1);
  }));
  const ids = [...new Set(legs.map((leg) => leg.brick))];
  return ids.map((id) => brickName({ brick: id, name: detail.bricks[id]?.name ?? null }));
}

export function copyOf(detail: VolumeDetail, copy: number): { state: string; bricks: string[]; isInSync: boolean; isEmpty: boolean; isAsynchronous: boolean } {
  const legs = detail.layout.segments.flatMap((segment) => segment.columns.flatMap((column) => column.legs.slice(copy, copy + 1)));
  const order = ["stale", "syncing", "following", "in-sync"];
  const worst = legs.map((leg) => leg.state).sort((a, b) => order.indexOf(a) - order.indexOf(b))[0] ?? "stale";
  return {
    state: worst,
    bricks: bricksOf(detail, copy),
    isInSync: worst === "in-sync",
    isEmpty: legs.some((leg) => leg.empty === true),
    isAsynchronous: legs.some((leg) => leg.asynchronous === true),
  };
}

function inUse(detail: VolumeDetail): string | null {
  const attached = detail.info.attached;
  return attached ? `${attached.client} has it attached. It is fenced: its next writes fail.` : null;
}

function compact(lines: (string | null)[]): string[] {
  return lines.filter((line): line is string => line !== null);
}

export function deletePlan(detail: VolumeDetail): string[] {
  const { info } = detail;
  return compact([
    `${bytes(info.size_bytes)} in ${plural(info.copies, "copy", "copies")} on ${bricksOf(detail).join(", ")} are deleted. There is no way back.`,
    inUse(detail),
    "A slice on a lost brick is deleted when the brick returns.",
  ]);
}

export function growPlan(detail: VolumeDetail, to: number): string[] {
  const { info } = detail;
  const more = to - info.size_bytes;
  const files = info.content === "files";
  return compact([
    files ? `The limit of all files rises from ${bytes(info.size_bytes)} to ${bytes(to)}.` : `The volume grows from ${bytes(info.size_bytes)} to ${bytes(to)}: a new segment of ${bytes(more)} in ${plural(info.copies, "copy", "copies")}.`,
    "It stays in use meanwhile. Space is used as data is written.",
    files ? null : "Clients of NBD see the new size when they connect again.",
    files ? null : "A volume never shrinks.",
  ]);
}

/** The effects of a policy for the tier, on the bricks of a volume as far as they are known. */
export function tierPlan(policy: TierPolicy, tier: VolumeTier | null): string[] {
  const bricks = tier?.bricks ?? [];
  const tiered = bricks.filter((it) => it.effect !== "no-tier").length;
  return compact([
    TIERS[policy],
    policy === "memory" ? "A pin reserves no memory: if pinned pages fill it, some move to flash." : null,
    bricks.length > 0 && tiered < bricks.length ? `${plural(bricks.length - tiered, "brick")} of ${bricks.length} have no disk behind memory: it has no effect there.` : null,
    "Its bricks obey within a few seconds. No data is lost, and copies made later obey, too.",
  ]);
}

export function detachClientPlan(detail: VolumeDetail): string[] {
  const attached = detail.info.attached;
  return compact([
    attached ? `The manager forgets that ${attached.client} has attached ${detail.info.name}.` : "No client has it.",
    "A client that still runs learns of it within 10 s. It is then fenced and its I/O fails.",
    "Use it for a client that has died. A new client may also attach without it.",
  ]);
}

export function attachReplicaPlan(detail: VolumeDetail, isAsynchronous: boolean, autoPromote: boolean): string[] {
  const { info } = detail;
  return compact([
    `Every column gets a further copy: ${info.copies + 1} instead of ${info.copies}, up to ${bytes(info.size_bytes)} more space.`,
    info.attached ? "The client learns of it within 10 s and fills it while the volume is in use." : "The next client fills it.",
    isAsynchronous ? "Writes are acknowledged without it. It has a prefix of them, at most about 1.5 s or 64 MiB old; a flush waits for it." : "Every write waits for it, too.",
    isAsynchronous ? "Such a volume does not grow while it has this copy." : null,
    autoPromote ? "Data loss: if all in-sync copies are lost, the manager promotes it for the next client. The last acknowledged writes may then be missing." : null,
  ]);
}

export function detachReplicaPlan(detail: VolumeDetail, copy: number): string[] {
  const { info } = detail;
  const of = copyOf(detail, copy);
  return compact([
    `Copy ${copy} on ${of.bricks.join(", ")} is deleted; ${plural(info.copies - 1, "copy stays", "copies stay")}.`,
    info.copies - 1 === 1 ? "One copy is left: the loss of one brick then loses data." : null,
    copy < info.copies - 1 ? "Copies behind it move up by one number." : null,
    inUse(detail),
  ]);
}

export function promotePlan(detail: VolumeDetail, copy: number): string[] {
  const of = copyOf(detail, copy);
  return compact([
    `The volume goes on with copy ${copy} on ${of.bricks.join(", ")}.${of.isInSync ? "" : " The other copies become stale and return by comparison."}`,
    of.isInSync ? "The copy is in-sync: no write is lost, and the other copies stay as they are." : `Data loss: the copy is ${of.state === "following" ? "an asynchronous replica" : of.state}. Writes that it lacks are given up.`,
    inUse(detail),
  ]);
}

/** Whether the change needs `force`, because a client has the volume or the copy lacks writes. */
export function needsForce(detail: VolumeDetail, promotes: number | null = null): boolean {
  if (detail.info.attached) return true;
  return promotes !== null && !copyOf(detail, promotes).isInSync;
}
