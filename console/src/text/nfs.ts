// The state of NFS exports in words and numbers. Pure.
import type { Nfs4Client, NfsExport, NfsExportState } from "../api/types.ts";
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

/** The state of a client of NFSv4.1. */
export function nfsClientState(client: Nfs4Client): { tone: Tone; text: string; meaning: string } {
  if (client.lease === "unconfirmed") return { tone: "plain", text: "no session", meaning: "The client has not made a session yet." };
  if (client.lease === "expired") {
    return { tone: "warn", text: "expired", meaning: "The lease is over. The client keeps its opens and locks until another client needs them." };
  }
  if (client.is_reclaiming) return { tone: "busy", text: "reclaims", meaning: "The client takes the opens and locks back that it had before a restart of the server." };
  return { tone: "good", text: "active", meaning: "The lease runs." };
}

/** Seconds since a client renewed its lease. */
export function renewedSeconds(client: Nfs4Client, shown: NfsExport): number {
  return client.renewed_s + Math.floor(shown.reported_ms_ago / 1000);
}
