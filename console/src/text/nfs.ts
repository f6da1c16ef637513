// The state of NFS exports in words and numbers. Pure.
import type { NfsExport, NfsExportState } from "../api/types.ts";
import { roughDuration } from "./format.ts";
import type { Tone } from "./words.ts";

/** A server reports each 10 s. After three reports that did not come, its numbers are old. */
const SILENT_MS = 30_000;

export function nfsState(shown: NfsExport): { tone: Tone; text: string; meaning: string } {
  if (shown.reported_ms_ago > SILENT_MS) {
    return { tone: "warn", text: `silent for ${roughDuration(shown.reported_ms_ago / 1000)}`, meaning: "The server has the file system, but it does not report. The numbers are old." };
  }
  if (shown.export.workers.stalled) {
    return { tone: "warn", text: "stalled", meaning: "Calls run, and none has ended for a second: the storage does not answer." };
  }
  return { tone: "good", text: "serves", meaning: "The server reports." };
}

export function callsPerSecond(state: NfsExportState): number {
  const calls = state.operations.reduce((sum, it) => sum + it.calls, 0);
  return state.step_ms > 0 ? (calls * 1000) / state.step_ms : 0;
}

/** The mean latency of all calls of the step in nanoseconds; null without calls. */
export function meanLatency(state: NfsExportState): number | null {
  const calls = state.operations.reduce((sum, it) => sum + it.calls, 0);
  const total = state.operations.reduce((sum, it) => sum + it.calls * it.mean_ns, 0);
  return calls > 0 ? total / calls : null;
}

/** The largest 99th percentile among the operations in nanoseconds; null without calls. */
export function worstLatency(state: NfsExportState): number | null {
  const busy = state.operations.filter((it) => it.calls > 0);
  return busy.length > 0 ? Math.max(...busy.map((it) => it.p99_ns)) : null;
}
