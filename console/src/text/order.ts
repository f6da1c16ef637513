// The list of bricks: its changes and its orders. Pure.

import type { BrickInfo, Changed, FigureKind } from "../api/types.ts";
import { share } from "./format.ts";

const byText = new Intl.Collator(undefined, { numeric: true });

/** The bricks by name after changes in their order; a brick without a name counts by its id. */
export function withChanges(bricks: BrickInfo[], changes: Changed<BrickInfo>[]): BrickInfo[] {
  const byId = new Map(bricks.map((it) => [it.brick, it]));
  for (const change of changes) {
    if ("deleted" in change) byId.delete(change.name);
    else byId.set(change.brick, change);
  }
  return [...byId.values()].sort((a, b) => byText.compare(a.name || a.brick, b.name || b.brick));
}

export const BRICK_ORDERS = { "": "By failure domain", slow: "Slowest writes first", busy: "Busiest first", full: "Fullest first" } as const;
export type BrickOrder = keyof typeof BRICK_ORDERS;

export function brickOrder(text: string | null): BrickOrder {
  return text !== null && Object.hasOwn(BRICK_ORDERS, text) ? (text as BrickOrder) : "";
}

/** The p99 of one kind of operation; null if none was timed. */
export function p99(kinds: FigureKind[], kind: string): number | null {
  return kinds.find((it) => it.kind === kind)?.p99_ns ?? null;
}

/** The bricks by a value, the largest first; equal ones keep their order, and bricks without figures come last. */
export function ordered(bricks: BrickInfo[], order: BrickOrder, kindsOf: (brick: BrickInfo) => FigureKind[]): BrickInfo[] {
  const values: Record<BrickOrder, (brick: BrickInfo) => number> = {
    "": () => 0,
    slow: (brick) => p99(kindsOf(brick), "write") ?? p99(kindsOf(brick), "read") ?? -1,
    busy: (brick) => kindsOf(brick).reduce((sum, kind) => sum + kind.operations, 0),
    full: (brick) => share(brick.used_bytes, brick.capacity_bytes),
  };
  const value = values[order];
  const rated = bricks.map((brick) => ({ brick, value: value(brick) }));
  return rated.sort((a, b) => b.value - a.value).map((it) => it.brick);
}
