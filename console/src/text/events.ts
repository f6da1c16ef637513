// Events from several answers as one list. Pure.

import type { Acknowledgement, EventRecord } from "../api/types.ts";

/**
 * The newest first, each once. A repetition has a number of its own and replaces the event that it repeats, so an
 * older number of the same series is dropped.
 */
export function mergeEvents(...lists: EventRecord[][]): EventRecord[] {
  const bySeq = new Map(lists.flat().map((event) => [event.seq, event]));
  const sorted = [...bySeq.values()].sort((a, b) => b.seq - a.seq);
  const replaced = new Set<string>();
  return sorted.filter((event) => {
    if (event.first_unix_ms === undefined) return true;
    const series = JSON.stringify([event.kind, event.subject.kind, event.subject.name, event.first_unix_ms]);
    if (replaced.has(series)) return false;
    if ((event.count ?? 1) > 1) replaced.add(series);
    return true;
  });
}

/** The same events, with the acknowledgements by the numbers of the events. */
export function withAcknowledgements(events: EventRecord[], by: ReadonlyMap<number, Acknowledgement>): EventRecord[] {
  if (by.size === 0) return events;
  return events.map((event) => {
    const acknowledged = by.get(event.seq);
    return acknowledged ? { ...event, acknowledged } : event;
  });
}
