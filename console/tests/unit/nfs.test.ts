import { expect, test } from "vitest";
import type { Nfs4Client, NfsExport, NfsOperation } from "../../src/api/types.ts";
import { callsPerSecond, meanLatency, nfsClientState, nfsState, renewedSeconds, worstLatency } from "../../src/text/nfs.ts";

function operation(name: string, calls: number, mean_ns: number, p99_ns: number): NfsOperation {
  return { name, calls, errors: 0, mean_ns, p50_ns: mean_ns, p99_ns };
}

function served(operations: NfsOperation[] = [], reported_ms_ago = 2_000): NfsExport {
  const workers = { threads: 2, threads_max: 32, blocked: 0, queued: 0, mean_wait_ns: 0, stalled: false, last_change: "" };
  return { volume: "home", reported_ms_ago, export: { addresses: [], paths: [], clients: [], clients_total: 0, operations, step_ms: 10_000, workers } };
}

test("rates and latencies are of all operations", () => {
  const state = served([operation("READ", 300, 1_000, 9_000), operation("WRITE", 100, 5_000, 7_000)]).export;
  expect(callsPerSecond(state)).toBe(40);
  expect(meanLatency(state)).toBe(2_000);
  expect(worstLatency(state)).toBe(9_000);
  const idle = served().export;
  expect([callsPerSecond(idle), meanLatency(idle), worstLatency(idle)]).toEqual([0, null, null]);
});

test("a server without reports is silent, and one without free workers is stalled", () => {
  expect(nfsState(served()).text).toBe("serves");
  expect(nfsState(served([], 65_000)).text).toBe("silent for 1 min");
  const stalled = served();
  stalled.export.workers.stalled = true;
  expect(nfsState(stalled).text).toBe("stalled");
});

test("a client shows its lease, and the age of its renewal counts on since the report", () => {
  const client: Nfs4Client = { client: "1f00ba5e00000001", address: "10.0.4.11:702", name: "Linux NFSv4.1 db", minor_version: 1, lease: "active", renewed_s: 11, is_reclaiming: false, sessions: 1, running: 0, opens: 3, locks: 1, file_systems: ["home"] };
  const text = (changed: Partial<Nfs4Client>) => nfsClientState({ ...client, ...changed }).text;
  expect([text({}), text({ is_reclaiming: true }), text({ lease: "unconfirmed" }), text({ lease: "expired" })]).toEqual(["active", "reclaims", "no session", "expired"]);
  expect(renewedSeconds(client, served([], 2_900))).toBe(13);
});
