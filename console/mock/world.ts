// An invented cluster with everything that a page can show: lost bricks, resyncs, replicas, damage, names with markup.

import type {
  BookmarkInfo, BrickInfo, ClusterStatus, Column, EventRecord, Layout, Leg, LegState, Nfs4Client, NfsExport, ScheduleDetail, Severity, SnapshotInfo, TokenInfo, VolumeDetail, VolumeInfo,
} from "../src/api/types.ts";
import { randomFrom, uuidFrom } from "./random.ts";

export type Scenario = "busy" | "empty" | "bare" | "many" | "large" | "healthy";

const GIB = 2 ** 30;
export const MARKUP = `<img src=x onerror="window.hacked=1">`;

/** The volumes of the scenario `large`, which has 100 bricks. */
export const VOLUMES_LARGE = 4096;

export interface StoredToken extends TokenInfo {
  secret: string;
}

export interface World {
  bricks: BrickInfo[];
  volumes: VolumeDetail[];
  events: EventRecord[];
  tokens: StoredToken[];
  /** The newest first. */
  snapshots: SnapshotInfo[];
  bookmarks: BookmarkInfo[];
  schedules: ScheduleDetail[];
  nfs: NfsExport[];
  startedMs: number;
  /** When this world was made: ages count on from then. */
  madeMs: number;
  /** Volumes without a report of their clients for ten minutes. */
  silentVolumes: Set<string>;
}

function brick(random: () => number, name: string, domain: string, more: Partial<BrickInfo>): BrickInfo {
  const capacity = 64 * GIB;
  const first = uuidFrom(random);
  const report = { checked: 1_284_113, superblocks: 0, records: 2, skipped_journals: 0, in_flight: 0, bitmap_lines: 1, objects: 0, slots: 4, corrected: 7, damaged: 0 };
  return {
    brick: first, name, alive: true, heartbeat_age_ms: 800, address: `10.0.${domain.length}.${name.length + 10}:7071`,
    map_socket: `/run/pagemesh/${name}.sock`, domain, durability: "file-sync", capacity_bytes: capacity,
    used_bytes: Math.floor(capacity * (0.2 + random() * 0.4)), provisioned_bytes: Math.floor(capacity * (1 + random())),
    slices: 6, pending_deletions: 0, sessions: 3 + Math.floor(random() * 9),
    scrub: { state: "waiting", passes: 4, progress_percent: null, next_in_ms: 2_340_000, pass: null, last: report, ended_ms_ago: 1_260_000, corrected: 7 },
    scrub_request: null, ...more,
    tier: { memory_bytes: capacity / 2, memory_free_bytes: capacity / 16, flash_bytes: capacity / 2, flash_free_bytes: capacity / 4, recent_hits: 94_120, recent_misses: 4_310, demoted_pages: 1_204_511, promoted_pages: 310_442, waits: 3 },
    devices: [
      { device: first, path: `/var/lib/pagemesh/${name}.pool`, is_first: true, size_bytes: capacity / 2, used_bytes: capacity / 8, state: "active", drain: null },
      { device: `${first.slice(0, -4)}0002`, path: "/dev/nvme1n1", is_first: false, size_bytes: capacity / 2, used_bytes: capacity / 16, state: "active", drain: null },
    ],
  };
}

export interface VolumePlan {
  name: string;
  columns?: number;
  copies?: number;
  gib?: number;
  segments?: number;
  content?: "blocks" | "files";
  client?: string | null;
  states?: LegState[];
  note?: string;
  replication?: VolumeDetail["replication"];
}

/** Makes a volume with its legs on the bricks in turn. */
export function makeVolume(world: World, random: () => number, plan: VolumePlan): VolumeDetail {
  const { name, columns = 1, copies = 2, gib = 10, segments = 1, content = "blocks", client = null, states = [] } = plan;
  const usable = world.bricks.filter((it) => it.durability === "file-sync");
  let turn = Math.floor(random() * usable.length);
  const domains = [...new Set(usable.map((it) => it.domain))];
  const column = (): Column => {
    turn += 1;
    const legs = Array.from({ length: copies }, (_, copy): Leg => {
      const domain = domains[(turn + copy) % domains.length];
      const inDomain = usable.filter((it) => it.domain === domain);
      const state = states[copy] ?? "in-sync";
      return { brick: inDomain[turn % inDomain.length]!.brick, slice: uuidFrom(random), state, asynchronous: state === "following", empty: false, needs_full_resync: state === "syncing" };
    });
    return { legs, round: states.includes("stale") ? 1 : 0 };
  };
  const layout: Layout = {
    volume: uuidFrom(random), name, epoch: 4 + Math.floor(random() * 90),
    segments: Array.from({ length: segments }, () => ({ bytes: (gib / segments) * GIB, columns: Array.from({ length: columns }, column) })),
  };
  const ids = new Set(layout.segments.flatMap((it) => it.columns.flatMap((each) => each.legs.map((leg) => leg.brick))));
  const health = states.includes("stale") ? "degraded" : states.includes("syncing") ? "syncing" : "in-sync";
  const kind = columns > 1 ? (copies > 1 ? "stripe+mirror" : "stripe") : copies > 1 ? "mirror" : "concat";
  const now = Math.floor(Date.now() / 1000);
  const lost = layout.segments.flatMap((it) => it.columns.flatMap((each) => each.legs)).filter((leg) => !usable.find((it) => it.brick === leg.brick)?.alive);
  const info: VolumeInfo = {
    name, id: layout.volume, content, size_bytes: gib * GIB, layout: kind, columns, copies, durability: "file-sync",
    epoch: layout.epoch, health, unreachable_legs: lost.length, auto_promote: states.includes("following"), tier: "auto",
    attached: client ? { client, epoch: layout.epoch, since_unix_s: now - 86_400 * 3 } : null, created_unix_s: now - 86_400 * 40,
  };
  const bricks = Object.fromEntries(usable.filter((it) => ids.has(it.brick)).map((it) => [it.brick, { name: it.name ?? null, tcp: it.address, map_socket: it.map_socket ?? null, durability: it.durability }]));
  const staleAt = states.findIndex((it) => it === "stale");
  const notes = plan.note && staleAt >= 0 ? layout.segments.flatMap((it, segment) => it.columns.map((_, at) => ({ segment, column: at, leg: staleAt, text: plan.note!, since_unix_s: now - 700 }))) : [];
  return { info, layout, bricks, notes, replication: plan.replication ?? null };
}

/** A brick as answers and messages have it, with its ages as of now. A living brick sent its last heartbeat within 2 s. */
export function brickNow(world: World, of: BrickInfo): BrickInfo {
  const passed = Date.now() - world.madeMs;
  const beatAge = of.heartbeat_age_ms ?? null;
  const sinceBeat = of.alive ? passed % 2000 : passed;
  const age = beatAge === null ? null : of.alive ? sinceBeat : beatAge + passed;
  const later = (ms: number | null | undefined, sign: number) => (typeof ms === "number" ? Math.max(0, ms + (of.alive ? sign * passed : 0)) : null);
  const scrub = of.scrub ? { ...of.scrub, next_in_ms: later(of.scrub.next_in_ms, -1), ended_ms_ago: later(of.scrub.ended_ms_ago, 1) } : null;
  return { ...of, heartbeat_age_ms: age, scrub };
}

/** Counts the slices of a volume on its bricks, or no longer. */
export function countSlices(world: World, of: VolumeDetail, sign: 1 | -1): void {
  for (const segment of of.layout.segments) {
    for (const leg of segment.columns.flatMap((it) => it.legs)) {
      const brick = world.bricks.find((it) => it.brick === leg.brick);
      if (!brick) continue;
      brick.slices += sign;
      brick.provisioned_bytes += sign * Math.floor(segment.bytes / segment.columns.length);
    }
  }
}

export function addEvent(world: World, kind: string, severity: Severity, subject: EventRecord["subject"], text: string, actor = "manager", msAgo = 0): EventRecord {
  const seq = (world.events.at(-1)?.seq ?? 0) + 1;
  const event: EventRecord = { seq, time_unix_ms: Date.now() - msAgo, kind, severity, subject, actor, text, count: 1, first_unix_ms: Date.now() - msAgo };
  world.events.push(event);
  if (world.events.length > 10_000) world.events.shift();
  return event;
}

export function statusOf(world: World): ClusterStatus {
  const sum = (field: "capacity_bytes" | "used_bytes" | "provisioned_bytes") => world.bricks.reduce((total, it) => total + it[field], 0);
  return {
    version: "0.0.1", bricks: world.bricks.length, bricks_alive: world.bricks.filter((it) => it.alive).length,
    capacity_bytes: sum("capacity_bytes"), used_bytes: sum("used_bytes"), provisioned_bytes: sum("provisioned_bytes"), overprovision_factor: 4,
    volumes: world.volumes.length, volumes_attached: world.volumes.filter((it) => it.info.attached).length,
    volumes_degraded: world.volumes.filter((it) => it.info.health !== "in-sync").length, pending_deletions: 0,
    bricks_scrubbing: world.bricks.filter((it) => it.scrub?.state === "running").length, scrubs_corrected: world.bricks.length * 7,
    scrubs_damaged: world.bricks.reduce((total, it) => total + (it.scrub?.last?.damaged ?? 0), 0),
    schedules: world.schedules.length, schedules_warning: 0, schedules_critical: world.schedules.filter((it) => it.info.health === "critical").length,
  };
}

function addTokens(world: World): void {
  const now = Math.floor(Date.now() / 1000);
  const roles = ["admin", "operator", "viewer"] as const;
  for (const role of roles) {
    const name = { admin: "first-admin", operator: "on-call", viewer: "wall-display" }[role];
    world.tokens.push({ id: `id-${role}`, name, role, created_unix_s: now - 86_400 * 30, expires_unix_s: role === "admin" ? null : now + 86_400 * 12, secret: `pm_${role}` });
  }
  world.tokens.push({ id: "id-old", name: "contractor", role: "viewer", created_unix_s: now - 86_400 * 60, expires_unix_s: now - 86_400, secret: "pm_old" });
}

function addBusyVolumes(world: World, random: () => number): void {
  const add = (plan: VolumePlan) => world.volumes.push(makeVolume(world, random, plan));
  const lostNote = `the brick closed the connection: ${MARKUP}`;
  add({ name: "pg-orders", copies: 2, gib: 400, client: "db-1:4121", states: ["in-sync", "stale"], note: lostNote });
  add({ name: "pg-ledger", copies: 3, gib: 800, client: "db-2:977", states: ["in-sync", "in-sync", "syncing"], replication: { lag: null, reported_us_ago: 600_000, resyncs: [{ copy: 2, bytes_todo: 120 * GIB, bytes_done: 47 * GIB, elapsed_ms: 372_000 }] } });
  add({ name: "scratch", columns: 4, copies: 1, gib: 256, client: "batch-7:31" });
  add({ name: "vm-images", columns: 4, copies: 2, gib: 2048, client: "hyp-3:5120" });
  add({ name: "mail", copies: 2, gib: 120, segments: 3, client: "mx-1:88" });
  add({ name: "archive", copies: 2, gib: 4096 });
  add({ name: "dr-orders", copies: 3, gib: 400, client: "db-1:4122", states: ["in-sync", "in-sync", "following"], replication: { lag: { changes: 41, bytes: 3_481_600, age_us: 48_211 }, reported_us_ago: 3_100_000, resyncs: [] } });
  add({ name: "home", content: "files", gib: 512, client: "files-1:2201" });
  add({ name: "web-assets", content: "files", gib: 64, copies: 3, client: "www-2:190" });
  add({ name: "builds", content: "files", gib: 200, copies: 1 });
  add({ name: "a-name-that-is-as-long-as-a-name-of-a-volume-may-ever-be-64-chars", gib: 1, client: MARKUP });
}

function addBusyEvents(world: World): void {
  const minute = 60_000;
  const lost = world.bricks.find((it) => !it.alive)!.name!;
  addEvent(world, "manager-started", "info", { kind: "manager", name: "manager" }, "The manager has started, version 0.0.1.", "manager", 400 * minute);
  for (let index = 0; index < 130; index += 1) {
    addEvent(world, "attached", "info", { kind: "volume", name: "mail" }, `The client mx-1:${index} has attached the volume mail, epoch ${index}.`, `mx-1:${index}`, (390 - index * 2) * minute);
  }
  addEvent(world, "login-refused", "warning", { kind: "manager", name: "manager" }, "12 wrong tokens from 10.0.7.19 in a minute were refused. If that is no mistake, look for the sender.", "manager", 90 * minute).count = 12;
  addEvent(world, "scrub-found", "critical", { kind: "brick", name: "node-5" }, "The scrub of the brick node-5 has found 2 structures that it cannot correct, and has corrected 7. Stop the brick, run `pagemesh pool check`, and let the other copies resync it.", "manager", 55 * minute);
  addEvent(world, "volume-created", "info", { kind: "volume", name: "builds" }, "The volume builds of 214748364800 bytes was created.", "on-call", 40 * minute);
  addEvent(world, "brick-lost", "warning", { kind: "brick", name: lost }, `The brick ${lost} at 10.0.6.16:7071 has sent no heartbeat for 7 s, because it has ended, hangs, or cannot reach the manager. 4 volumes have legs on it, and in-sync copies on other living bricks. Start it again, or repair its network; if it is gone for good, replace it.`, "manager", 12 * minute);
  addEvent(world, "leg-lost", "warning", { kind: "volume", name: "pg-orders" }, `The volume pg-orders goes on without its legs on ${lost} (${MARKUP}): they miss writes from now on. Its client resyncs them once their bricks answer; see \`pagemesh volume show pg-orders\`.`, "db-1:4121", 11.8 * minute);
  addEvent(world, "leg-returned", "info", { kind: "volume", name: "mail" }, "The legs of the volume mail on node-2 are up to date again.", "mx-1:88", 3 * minute);
}

/** A snapshot of a volume, made so many seconds ago. */
export function addSnapshot(world: World, volume: string, name: string, agoS: number, more: Partial<SnapshotInfo> = {}): SnapshotInfo {
  const size = world.volumes.find((it) => it.info.name === volume)?.info.size_bytes ?? 0;
  const epoch = 2 + world.snapshots.length;
  const made: SnapshotInfo = { volume, name, epoch, created_unix_ms: Date.now() - agoS * 1000, state: "committed", size_bytes: size, holds: [], labels: [], made_by: "cluster key", ...more };
  world.snapshots.unshift(made);
  return made;
}

function addSnapshots(world: World): void {
  const hour = 3600;
  addSnapshot(world, "mail", "before-migration", 16 * 24 * hour, { holds: ["audit-2026", "legal"], made_by: "on-call" });
  for (let index = 30; index >= 0; index -= 1) {
    const agoS = index < 12 ? index * hour + 900 : (index - 11) * 12 * hour;
    const time = new Date(Date.now() - agoS * 1000).toISOString().replace(/[-:]/g, "").slice(0, 15).replace("T", "-");
    addSnapshot(world, "mail", `auto-${time}-${index % 12 === 0 ? "hd" : "h"}`, agoS, { labels: ["schedule=auto"], made_by: "schedule auto" });
  }
  world.bookmarks.push({ volume: "mail", name: "auto.backup", snapshot: "auto", epoch: 20, created_unix_ms: Date.now() });
  const retention = { frequent: 0, hourly: 24, daily: 7, weekly: 4, monthly: 0, yearly: 0 };
  const policy = { prefix: "auto", volumes: ["mail", "pg-*"], retention, frequent_minutes: 15, warn_after_s: 2 * hour, critical_after_s: 4 * hour, enabled: true, prune: true };
  const info = { name: "auto", policy: { ...policy, targets: [{ name: "backup", manager: "http://10.0.9.1:7070" }] }, volumes: 2, health: "ok" as const, created_unix_s: world.startedMs / 1000, made_by: "on-call" };
  const newest = world.snapshots[0]!.name;
  world.schedules.push({ info, volumes: [
    { volume: "mail", snapshots: 31, newest, age_s: 900, health: "ok", received: false, sent: { backup: { snapshot: newest, epoch: 30, sent_unix_ms: Date.now() } } },
    { volume: "pg-orders", snapshots: 30, newest, age_s: 1000, health: "ok", received: false },
  ] });
  const nightly = { ...policy, prefix: "nightly", volumes: ["home", "gone-*"], retention: { ...retention, hourly: 0 }, warn_after_s: 48 * hour, critical_after_s: 96 * hour, targets: [] };
  world.schedules.push({ info: { ...info, name: "nightly", policy: nightly, volumes: 1, health: "critical" }, volumes: [
    { volume: "home", snapshots: 3, newest: "nightly-20261120-000001-d", age_s: 130 * hour, health: "critical", received: false, error: `the client nas-1:7 of the volume home does not answer: it has ended ${MARKUP}` },
  ] });
}

function addNfs(world: World): void {
  const operation = (name: string, calls: number, mean_us: number, errors = 0) => ({ name, calls, errors, mean_ns: mean_us * 1000, p50_ns: mean_us * 800, p99_ns: mean_us * 7_000 });
  const clients = Array.from({ length: 6 }, (_, index) => ({ address: `10.0.4.${index + 11}`, connections: 1 + (index % 2), calls: 84_000 - index * 9_300, idle_s: index * index * 4 }));
  const holder = (index: number, name: string, changed: Partial<Nfs4Client>): Nfs4Client => ({ client: `1f00ba5e0000000${index}`, address: `10.0.4.${index + 10}:702`, name, minor_version: 1, lease: "active", renewed_s: 11, is_reclaiming: false, sessions: 1, running: 0, opens: 0, locks: 0, file_systems: ["home"], ...changed });
  const nfs4_clients = [
    holder(1, "Linux NFSv4.1 db-3.example.org", { opens: 412, locks: 96, running: 2 }),
    holder(2, `Linux NFSv4.1 laptop-17 ${MARKUP}`, { lease: "expired", renewed_s: 31_000, opens: 7, locks: 2, file_systems: ["home", "web-assets"] }),
    holder(3, "Linux NFSv4.1 build-1.example.org", { is_reclaiming: true, opens: 1 }),
    holder(4, "Linux NFSv4.1 new", { lease: "unconfirmed", sessions: 0, file_systems: [] }),
  ];
  world.nfs.push({
    volume: "home", reported_ms_ago: 3_200,
    export: {
      addresses: ["10.0.1.7:2049"], clients, clients_total: 6, nfs4_clients, nfs4_clients_total: 4, step_ms: 10_000,
      paths: [{ path: "/home", rules: ["10.0.4.0/24(rw,root_squash)", "*(ro,all_squash)"] }, { path: `/home/${MARKUP}`, rules: ["10.0.4.11(rw,no_root_squash)"] }],
      operations: [operation("READ", 52_310, 96), operation("LOOKUP", 41_002, 31, 830), operation("GETATTR", 30_911, 22), operation("WRITE", 12_440, 170), operation("READDIRPLUS", 903, 410), operation("COMMIT", 640, 220)],
      workers: { threads: 6, threads_max: 32, blocked: 1, queued: 2, mean_wait_ns: 1_900_000, stalled: false, last_change: "grew to 6: a call waited 1.2 ms" },
    },
  });
  const idle = { threads: 0, threads_max: 32, blocked: 0, queued: 0, mean_wait_ns: 0, stalled: false, last_change: "" };
  world.nfs.push({ volume: "web-assets", reported_ms_ago: 95_000, export: { addresses: ["10.0.1.8:2049", "[fd00::8]:2049"], clients: [], clients_total: 0, step_ms: 10_000, paths: [{ path: "/web-assets", rules: ["*(ro)"] }], operations: [], workers: idle } });
}

export function makeWorld(scenario: Scenario): World {
  const random = randomFrom(7);
  const world: World = { bricks: [], volumes: [], events: [], tokens: [], snapshots: [], bookmarks: [], schedules: [], nfs: [], startedMs: Date.now() - 86_400_000 * 3, madeMs: Date.now(), silentVolumes: new Set() };
  addTokens(world);
  if (scenario === "empty") {
    addEvent(world, "manager-started", "info", { kind: "manager", name: "manager" }, "The manager has started, version 0.0.1.");
    return world;
  }
  for (let index = 1; index <= 6; index += 1) {
    world.bricks.push(brick(random, `node-${index}`, `rack-${Math.ceil(index / 2)}`, {}));
  }
  if (scenario === "bare") return world;
  if (scenario === "healthy") {
    world.volumes.push(makeVolume(world, random, { name: "data", client: "db-1:1", gib: 100 }));
    return world;
  }
  const [, , second, fourth, fifth, sixth] = world.bricks;
  Object.assign(sixth!, { alive: false, heartbeat_age_ms: 731_000, sessions: 0 });
  fifth!.scrub!.last!.damaged = 2;
  Object.assign(second!, { used_bytes: Math.floor(second!.capacity_bytes * 0.91) });
  second!.scrub = { ...second!.scrub!, state: "running", progress_percent: 37, next_in_ms: null, pass: { ...second!.scrub!.last!, checked: 481_223 } };
  world.bricks.push(brick(random, "", "rack-4", { name: null, used_bytes: 0, slices: 0, scrub: null, durability: "pmem", alive: false, heartbeat_age_ms: null }));
  world.bricks.push(brick(random, "fast-1", MARKUP, { durability: "pmem", slices: 0, used_bytes: 0, provisioned_bytes: 0 }));
  addBusyVolumes(world, random);
  if (scenario === "large") {
    for (let index = 9; index <= 100; index += 1) {
      world.bricks.push(brick(random, `node-${index}`, `rack-${Math.ceil(index / 8)}`, {}));
    }
  }
  if (scenario === "many") {
    fourth!.devices!.push(
      { device: `${fourth!.brick.slice(0, -4)}0003`, path: "/dev/nvme2n1", is_first: false, size_bytes: 2 ** 34, used_bytes: 2 ** 31, state: "active", errors: 1, last_error_s: 4_200, drain: null },
      { device: `${fourth!.brick.slice(0, -4)}0004`, path: "/dev/nvme3n1", is_first: false, size_bytes: 2 ** 34, used_bytes: 0, state: "failed", errors: 2, last_error_s: 9_000, drain: null },
    );
  }
  if (scenario === "many" || scenario === "large") {
    const tenants = scenario === "large" ? VOLUMES_LARGE - world.volumes.length : 1230;
    for (let index = 0; index < tenants; index += 1) {
      const name = `tenant-${index.toString().padStart(4, "0")}`;
      world.volumes.push(makeVolume(world, random, { name, gib: 20, content: index % 3 === 0 ? "files" : "blocks" }));
    }
  }
  world.volumes.sort((a, b) => (a.info.name < b.info.name ? -1 : 1));
  addSnapshots(world);
  addNfs(world);
  addBusyEvents(world);
  return world;
}
