// A small manager for development and for the tests of the pages: the API of RFD 026 over an invented cluster.

import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import type { BrickInfo, CreateVolume, DeviceRequestInfo, Problem, Role, SchedulePolicy, Span, TierPolicy, VolumeDetail, VolumeTier } from "../src/api/types.ts";
import { includes } from "../src/text/words.ts";
import * as figures from "./figures.ts";
import { serveFile } from "./files.ts";
import { randomFrom } from "./random.ts";
import { addEvent, addSnapshot, brickNow, countSlices, makeVolume, makeWorld, statusOf, type Scenario, type StoredToken, type World } from "./world.ts";

class Refused extends Error {
  constructor(readonly status: number, readonly code: string, detail: string, readonly hint: string) {
    super(detail);
  }
}

interface Call {
  world: World;
  caller: StoredToken;
  query: URLSearchParams;
  body: Record<string, unknown>;
  /** The parts of the path that the route's stars stand for. */
  names: string[];
  publish(event: string, data: unknown): void;
  /** Publishes the bricks of a volume, as the manager does when slices come or go. */
  markBricks(of: VolumeDetail): void;
}
interface Result {
  status?: number;
  body?: unknown;
  headers?: Record<string, string>;
}
type Handler = (call: Call) => Result;

function volumeOf(call: Call) {
  const found = call.world.volumes.find((it) => it.info.name === call.names[0]);
  if (!found) throw new Refused(404, "not-found", `there is no volume ${call.names[0]}`, "see the list of volumes");
  return found;
}

function brickOf(call: Call) {
  const found = call.world.bricks.find((it) => it.name === call.names[0] || it.brick === call.names[0]);
  if (!found) throw new Refused(404, "not-found", `there is no brick ${call.names[0]}`, "see the list of bricks");
  return found;
}

function refuseInUse(call: Call, force: boolean): void {
  const { info } = volumeOf(call);
  if (info.attached && !force) throw new Refused(409, "in-use", `the volume ${info.name} is attached to ${info.attached.client}`, "end its client, or use force");
}

function published(call: Call, kind: string, text: string): void {
  const volume = volumeOf(call);
  volume.info.epoch = volume.layout.epoch += 1;
  call.publish("volume", volume.info);
  call.publish("event", addEvent(call.world, kind, "info", { kind: "volume", name: volume.info.name }, text, call.caller.name));
}

/** Changes the slices of a volume, and publishes the bricks that had or have one. */
function changeSlices(call: Call, of: VolumeDetail, change: () => void): void {
  const before = structuredClone(of);
  countSlices(call.world, of, -1);
  change();
  countSlices(call.world, of, 1);
  call.markBricks(before);
  call.markBricks(of);
}

const listVolumes: Handler = ({ world, query }) => {
  const limit = Number(query.get("limit") ?? 0);
  const matching = world.volumes.map((it) => it.info).filter((it) => it.name > (query.get("after") ?? "") && it.name.includes(query.get("search") ?? "") && ["health", "content"].every((key) => !query.get(key) || it[key as "health" | "content"] === query.get(key)));
  const body = limit > 0 ? matching.slice(0, limit) : matching;
  const next = new URLSearchParams(query);
  next.set("after", body.at(-1)?.name ?? "");
  return { body, ...(body.length < matching.length ? { headers: { Link: `</api/v1/volumes?${next}>; rel="next"` } } : {}) };
};

const create: Handler = (call) => {
  const asked = call.body as unknown as CreateVolume;
  if (call.world.volumes.some((it) => it.info.name === asked.name)) throw new Refused(409, "exists", `there already is a volume ${asked.name}`, "choose another name");
  const copies = asked.layout.includes("mirror") ? (asked.copies ?? 2) : 1;
  const columns = asked.layout.includes("stripe") ? (asked.columns ?? 2) : 1;
  const volume = makeVolume(call.world, randomFrom(Date.now()), { name: asked.name, copies, columns, gib: asked.size_bytes / 2 ** 30, content: asked.content });
  call.world.volumes.push(volume);
  call.world.volumes.sort((a, b) => (a.info.name < b.info.name ? -1 : 1));
  countSlices(call.world, volume, 1);
  call.markBricks(volume);
  published({ ...call, names: [asked.name] }, "volume-created", `The volume ${asked.name} was created.`);
  return { status: 201, body: { volume, asked_bytes: asked.size_bytes, rounded: false, note: null } };
};

const remove: Handler = (call) => {
  refuseInUse(call, call.query.get("force") === "true");
  const volume = volumeOf(call);
  const { info } = volume;
  countSlices(call.world, volume, -1);
  call.markBricks(volume);
  call.world.volumes = call.world.volumes.filter((it) => it.info !== info);
  call.publish("volume", { name: info.name, deleted: true });
  call.publish("event", addEvent(call.world, "volume-deleted", "info", { kind: "volume", name: info.name }, `The volume ${info.name} was deleted.`, call.caller.name));
  return { body: { pending_deletions: 0 } };
};

const grow: Handler = (call) => {
  const volume = volumeOf(call);
  const size = Number(call.body["size_bytes"]);
  if (size > 2 ** 50) throw new Refused(507, "no-room", "no brick has room for the new segment", "add a brick, or choose a smaller size");
  changeSlices(call, volume, () => volume.layout.segments.push({ ...structuredClone(volume.layout.segments[0]!), bytes: size - volume.info.size_bytes }));
  volume.info.size_bytes = size;
  published(call, "volume-grown", `The volume ${volume.info.name} has grown.`);
  return { body: { volume, asked_bytes: size, rounded: false, note: null } };
};

/** The policy of a volume. Living bricks of the mock with a tier obey at once. */
function tierOf(call: Call): VolumeTier {
  const volume = volumeOf(call);
  const bricks = call.world.bricks.filter((it) => it.brick in volume.bricks);
  const effect = (of: BrickInfo) => (!of.alive ? "away" : of.tier ? "applied" : "no-tier");
  return { policy: volume.info.tier ?? "auto", bricks: bricks.map((it) => ({ brick: it.brick, name: it.name ?? null, effect: effect(it) })) };
}

const setTier: Handler = (call) => {
  const { info } = volumeOf(call);
  info.tier = call.body["policy"] as TierPolicy;
  published(call, "tier-changed", `The tier of the volume ${info.name} is ${info.tier} now.`);
  return { body: tierOf(call) };
};

const replicas: Handler = (call) => {
  const volume = volumeOf(call);
  const used = new Set(Object.keys(volume.bricks));
  const brick = call.world.bricks.find((it) => it.alive && !used.has(it.brick))!;
  volume.bricks[brick.brick] = { name: brick.name ?? null, tcp: brick.address, durability: brick.durability };
  changeSlices(call, volume, () => {
    for (const column of volume.layout.segments.flatMap((it) => it.columns)) {
      column.legs.push({ brick: brick.brick, slice: brick.brick, state: "syncing", empty: true, asynchronous: call.body["asynchronous"] === true });
    }
  });
  Object.assign(volume.info, { copies: volume.info.copies + 1, health: "syncing" });
  published(call, "replica-attached", `The volume ${volume.info.name} has a further copy.`);
  return { status: 201, body: volume };
};

function dropCopy(call: Call): Result {
  refuseInUse(call, call.body["force"] === true);
  const volume = volumeOf(call);
  changeSlices(call, volume, () => {
    for (const column of volume.layout.segments.flatMap((it) => it.columns)) column.legs.splice(Number(call.body["copy"]), 1);
  });
  volume.info.copies -= 1;
  published(call, "replica-detached", `Copy ${call.body["copy"]} of the volume ${volume.info.name} was removed.`);
  return { body: volume };
}

function promote(call: Call): Result {
  refuseInUse(call, call.body["force"] === true);
  const volume = volumeOf(call);
  volume.info.attached = null;
  const copy = Number(call.body["copy"]);
  // The promotion of an in-sync copy changes no leg.
  for (const column of volume.layout.segments.flatMap((it) => it.columns)) {
    if (column.legs[copy]?.state === "in-sync") continue;
    volume.info.health = "degraded";
    column.legs.forEach((leg, index) => (leg.state = index === copy ? "in-sync" : "stale"));
  }
  published(call, "promoted", `Copy ${copy} of the volume ${volume.info.name} was promoted.`);
  return { body: volume };
}

const detach: Handler = (call) => {
  const volume = volumeOf(call);
  volume.info.attached = null;
  published(call, "detached", `${volume.info.name} was detached.`);
  return { body: { detached: true } };
};

const scrub: Handler = (call) => {
  const brick = brickOf(call);
  const stop = call.body["stop"] === true;
  brick.scrub_request = { id: brick.brick, stop };
  call.publish("brick", brickNow(call.world, brick));
  return { body: brickNow(call.world, brick) };
};

/** The next heartbeat of a brick carries out the request that the answer to the last one had. */
function carryOutScrub(world: World, brick: BrickInfo): void {
  const stop = brick.scrub_request!.stop;
  brick.scrub_request = null;
  brick.scrub = { ...brick.scrub!, state: stop ? "waiting" : "running", progress_percent: stop ? null : 0, next_in_ms: stop ? 3_600_000 : null };
  if (!stop) addEvent(world, "scrub-started", "info", { kind: "brick", name: brick.name || brick.brick }, `A scrub of the pool of the brick ${brick.name} has started.`);
}

const deviceRequests = new WeakMap<World, DeviceRequestInfo[]>();

/** Carries out a request for the devices of a brick at once; a brick takes until its next heartbeat. */
function deviceResult(call: Call, error: string | null): Result {
  const requests = deviceRequests.get(call.world) ?? [];
  const request: DeviceRequestInfo = { id: `request-${requests.length}`, state: error === null ? "done" : "failed", error };
  deviceRequests.set(call.world, [...requests, request]);
  call.publish("brick", brickNow(call.world, brickOf(call)));
  return { status: 201, body: request };
}

const listDevices: Handler = (call) => {
  const brick = brickOf(call);
  return { body: { alive: brick.alive, devices: brick.devices ?? [], requests: deviceRequests.get(call.world) ?? [] } };
};

const addDevice: Handler = (call) => {
  const brick = brickOf(call);
  const path = String(call.body["path"]);
  if (brick.devices?.some((it) => it.path === path)) return deviceResult(call, `${path} is a device of this pool already; \`pagemesh pool device list\` shows its devices`);
  brick.devices = [...(brick.devices ?? []), { device: `${brick.brick.slice(0, -4)}000${(brick.devices ?? []).length + 1}`, path, is_first: false, size_bytes: Number(call.body["size_bytes"] ?? 2 ** 34), used_bytes: 0, state: "active", drain: null }];
  return deviceResult(call, null);
};

const drainDevice: Handler = (call) => {
  const device = brickOf(call).devices?.find((it) => it.device === call.names[1]);
  if (!device) throw new Refused(404, "not-found", "the pool has no such device", "list what there is with: pagemesh pool device list BRICK");
  const isCancelled = call.body["cancel"] === true;
  device.state = isCancelled ? "active" : "draining";
  device.drain = isCancelled ? null : { left_bytes: device.used_bytes, moved_bytes: 0, bytes_per_s: 2 ** 25, running_s: 0, problem: null };
  return deviceResult(call, null);
};

/** A brick without its ages, which are no changes. */
function agelessText(brick: BrickInfo): string {
  return JSON.stringify({ ...brick, heartbeat_age_ms: null, scrub: brick.scrub ? { ...brick.scrub, next_in_ms: null, ended_ms_ago: null } : null });
}

const forget: Handler = (call) => {
  const brick = brickOf(call);
  if (brick.alive || brick.slices > 0) throw new Refused(409, "in-use", "the brick is alive or holds slices", "stop it and move its slices");
  call.world.bricks = call.world.bricks.filter((it) => it !== brick);
  call.publish("brick", { name: brick.brick, deleted: true });
  return { status: 204 };
};

const expireNfsClient: Handler = (call) => {
  const id = call.names[0];
  let lost: { opens: number; locks: number } | null = null;
  for (const { export: state } of call.world.nfs) {
    const found = state.nfs4_clients?.find((it) => it.client === id);
    if (!found) continue;
    lost = { opens: found.opens, locks: found.locks };
    state.nfs4_clients = state.nfs4_clients!.filter((it) => it !== found);
    state.nfs4_clients_total = state.nfs4_clients.length;
  }
  if (!lost) throw new Refused(404, "not-found", `no NFS server has a client ${id}`, "list them with: pagemesh nfs clients");
  return { body: lost };
};

function snapshotOf(call: Call) {
  const found = call.world.snapshots.find((it) => it.volume === call.names[0] && it.name === call.names[1]);
  if (!found) throw new Refused(404, "not-found", `there is no snapshot ${call.names.slice(0, 2).join("@")}`, "list what there is with: pagemesh snapshot list");
  return found;
}

function aboutSnapshot(call: Call, kind: string, name: string, verb: string): void {
  const volume = volumeOf(call).info.name;
  call.publish("event", addEvent(call.world, kind, "info", { kind: "volume", name: volume }, `The snapshot ${volume}@${name} was ${verb}.`, call.caller.name));
}

const createSnapshot: Handler = (call) => {
  const { info } = volumeOf(call);
  const name = String(call.body["name"]);
  if (call.world.snapshots.some((it) => it.volume === info.name && it.name === name)) throw new Refused(409, "exists", `there already is a snapshot ${info.name}@${name}`, "choose another name");
  const made = addSnapshot(call.world, info.name, name, 0, { made_by: call.caller.name });
  aboutSnapshot(call, "snapshot-created", name, "made");
  return { status: 201, body: made };
};

const deleteSnapshot: Handler = (call) => {
  const gone = snapshotOf(call);
  if (gone.holds.length > 0) throw new Refused(409, "in-use", `the snapshot is held by ${gone.holds.join(", ")}`, "release it first");
  call.world.snapshots = call.world.snapshots.filter((it) => it !== gone);
  aboutSnapshot(call, "snapshot-deleted", gone.name, "deleted");
  return { body: { pending_slices: 0 } };
};

const hold: Handler = (call) => {
  const held = snapshotOf(call);
  held.holds = [...new Set([...held.holds, call.names[2]!])];
  return { body: held };
};

const release: Handler = (call) => {
  const held = snapshotOf(call);
  held.holds = held.holds.filter((it) => it !== call.names[2]);
  return { body: held };
};

const promoteVolume: Handler = (call) => {
  volumeOf(call).info.received = null;
  published(call, "volume-promoted", `The volume ${call.names[0]} was promoted.`);
  return { body: volumeOf(call) };
};

function scheduleOf(call: Call) {
  const found = call.world.schedules.find((it) => it.info.name === call.names[0]);
  if (!found) throw new Refused(404, "not-found", `there is no schedule ${call.names[0]}`, "list what there is with: pagemesh schedule list");
  return found;
}

/** Each snapshot keeps 3 MiB alone, and 5 MiB with its neighbours. */
const snapshotSpace: Handler = (call) => {
  const volume = volumeOf(call).info.name;
  const of = call.world.snapshots.filter((it) => it.volume === volume).reverse();
  const dropped = (call.query.get("drop") ?? "").split(",").filter((it) => it !== "");
  const mib = 1 << 20;
  const snapshots = of.map((it) => ({ name: it.name, epoch: it.epoch, exclusive_bytes: 3 * mib, shared_bytes: 5 * mib, referenced_bytes: it.size_bytes / 4, written_bytes: 8 * mib }));
  return { body: { volume, volume_bytes: 900 * mib, snapshot_bytes: 8 * mib * of.length, written_bytes: 12 * mib, freed_bytes: 3 * mib * dropped.length, snapshots } };
};

const createSchedule: Handler = (call) => {
  const { name, policy } = call.body as unknown as { name: string; policy: SchedulePolicy };
  if (call.world.schedules.some((it) => it.info.name === name)) throw new Refused(409, "exists", `there already is a schedule ${name}`, "choose another name");
  const full = { ...policy, prefix: name, frequent_minutes: 15, warn_after_s: 7200, critical_after_s: 14_400 };
  const info = { name, policy: full, volumes: 0, health: "ok" as const, created_unix_s: Math.floor(Date.now() / 1000), made_by: call.caller.name };
  call.world.schedules.push({ info, volumes: [] });
  return { status: 201, body: info };
};

const updateSchedule: Handler = (call) => {
  const found = scheduleOf(call);
  found.info = { ...found.info, policy: call.body as unknown as SchedulePolicy };
  return { body: found.info };
};

const deleteSchedule: Handler = (call) => {
  const gone = scheduleOf(call);
  call.world.schedules = call.world.schedules.filter((it) => it !== gone);
  return { status: 204 };
};

const RANK = { info: 0, warning: 1, critical: 2 };
const listEvents: Handler = ({ world, query }) => {
  const least = RANK[(query.get("severity") ?? "info") as keyof typeof RANK];
  const subject = query.get("subject");
  const found = world.events.filter((it) => it.seq > Number(query.get("after") ?? 0) && RANK[it.severity] >= least && (!subject || it.subject.name === subject || `${it.subject.kind}:${it.subject.name}` === subject));
  return { body: query.has("last") ? found.slice(-Number(query.get("last"))) : found.slice(0, Number(query.get("limit") ?? 1000)) };
};

const acknowledge: Handler = (call) => {
  const event = call.world.events.find((it) => it.seq === Number(call.names[0]));
  if (!event) throw new Refused(404, "not-found", "there is no such event", "it may have left the ring");
  event.acknowledged ??= { by: call.caller.name, time_unix_ms: Date.now() };
  call.publish("acknowledged", { seq: event.seq, acknowledged: event.acknowledged });
  return { body: event };
};

const createToken: Handler = ({ world, body }) => {
  const name = String(body["name"]);
  const secret = `pm_${name.padEnd(43, "x").slice(0, 43)}`;
  const now = Math.floor(Date.now() / 1000);
  const expires = typeof body["expires_s"] === "number" ? now + body["expires_s"] : null;
  const token: StoredToken = { id: `id-${name}`, name, role: body["role"] as Role, created_unix_s: now, expires_unix_s: expires, secret };
  world.tokens.push(token);
  return { status: 201, body: { ...shown(token), token: secret } };
};

const revokeToken: Handler = ({ world, names }) => {
  world.tokens = world.tokens.filter((it) => it.id !== names[0]);
  return { status: 204 };
};

function shown({ secret: _, ...token }: StoredToken) {
  return token;
}

const scaleOf = (call: Call) => (volumeOf(call).info.attached ? 0.3 : 0);
const spanOf = (call: Call) => (call.query.get("span") ?? "1h") as Span;
const ROUTES: [string, string, Role, Handler][] = [
  ["GET", "whoami", "viewer", ({ caller }) => ({ body: { name: caller.name, role: caller.role, expires_unix_s: caller.expires_unix_s } })],
  ["GET", "status", "viewer", ({ world }) => ({ body: statusOf(world) })],
  ["GET", "bricks", "viewer", ({ world }) => ({ body: world.bricks.map((it) => brickNow(world, it)) })],
  ["POST", "bricks/*/scrub", "operator", scrub],
  ["GET", "bricks/*/devices", "viewer", listDevices],
  ["POST", "bricks/*/devices", "admin", addDevice],
  ["POST", "bricks/*/devices/*/drain", "operator", drainDevice],
  ["DELETE", "bricks/*", "admin", forget],
  ["GET", "volumes", "viewer", listVolumes],
  ["POST", "volumes", "operator", create],
  ["GET", "volumes/*", "viewer", (call) => ({ body: volumeOf(call) })],
  ["DELETE", "volumes/*", "operator", remove],
  ["POST", "volumes/*/grow", "operator", grow],
  ["GET", "volumes/*/tier", "viewer", (call) => ({ body: tierOf(call) })],
  ["PUT", "volumes/*/tier", "operator", setTier],
  ["POST", "volumes/*/detach", "operator", detach],
  ["POST", "volumes/*/replicas", "operator", replicas],
  ["POST", "volumes/*/replicas/detach", "operator", dropCopy],
  ["POST", "volumes/*/replicas/promote", "operator", promote],
  ["POST", "volumes/*/promote", "operator", promoteVolume],
  ["GET", "volumes/*/snapshots", "viewer", (call) => ({ body: call.world.snapshots.filter((it) => it.volume === volumeOf(call).info.name) })],
  ["POST", "volumes/*/snapshots", "operator", createSnapshot],
  ["DELETE", "volumes/*/snapshots/*", "operator", deleteSnapshot],
  ["PUT", "volumes/*/snapshots/*/holds/*", "operator", hold],
  ["DELETE", "volumes/*/snapshots/*/holds/*", "operator", release],
  ["GET", "volumes/*/bookmarks", "viewer", (call) => ({ body: call.world.bookmarks.filter((it) => it.volume === call.names[0]) })],
  ["GET", "volumes/*/snapshot-space", "viewer", snapshotSpace],
  ["GET", "nfs", "viewer", ({ world }) => ({ body: world.nfs })],
  ["DELETE", "nfs/clients/*", "operator", expireNfsClient],
  ["POST", "schedules", "operator", createSchedule],
  ["GET", "schedules", "viewer", ({ world }) => ({ body: world.schedules.map((it) => it.info) })],
  ["GET", "schedules/*", "viewer", (call) => ({ body: scheduleOf(call) })],
  ["PUT", "schedules/*", "operator", updateSchedule],
  ["DELETE", "schedules/*", "operator", deleteSchedule],
  ["GET", "events", "viewer", listEvents],
  ["POST", "events/*/acknowledge", "operator", acknowledge],
  ["GET", "figures", "viewer", ({ world }) => ({ body: figures.recent(world) })],
  ["GET", "figures/cluster", "viewer", (call) => ({ body: figures.series("cluster", spanOf(call), call.world.volumes.length > 0 ? 1 : 0) })],
  ["GET", "figures/volumes/*", "viewer", (call) => ({ body: figures.series(call.names[0]!, spanOf(call), scaleOf(call)) })],
  ["GET", "figures/bricks/*", "viewer", (call) => ({ body: figures.series(call.names[0]!, spanOf(call), brickOf(call).slices > 0 ? 0.25 : 0) })],
  ["GET", "why/volumes/*", "viewer", (call) => ({ body: figures.why(call.query.get("kind") ?? "write", Number(call.query.get("quantile") ?? 0.99), scaleOf(call) > 0) })],
  ["GET", "tokens", "admin", ({ world }) => ({ body: world.tokens.map(shown) })],
  ["POST", "tokens", "admin", createToken],
  ["DELETE", "tokens/*", "admin", revokeToken],
];

function match(method: string, path: string): { role: Role; handler: Handler; names: string[] } | null {
  const parts = path.split("/");
  for (const [routeMethod, pattern, role, handler] of ROUTES) {
    const wanted = pattern.split("/");
    if (routeMethod !== method || wanted.length !== parts.length) continue;
    if (!wanted.every((part, index) => part === "*" || part === parts[index])) continue;
    return { role, handler, names: wanted.flatMap((part, index) => (part === "*" ? [decodeURIComponent(parts[index]!)] : [])) };
  }
  return null;
}

export class Mock {
  world: World;
  #root: string;
  #server: Server | null = null;
  #streams = new Set<ServerResponse>();
  streamsOpened = 0;
  port = 0;
  /** Answers the stream with 503, as a manager with too many of them. */
  refusesStreams = false;
  /** Paths of the API that fail. */
  failing: RegExp | null = null;
  failingStatus = 500;
  /** Paths of the API that get no answer. */
  silent: RegExp | null = null;
  /** The difference of the manager's clock from the browser's. */
  clockAheadMs = 0;
  /** The times of the manager: bricks are compared, and an unchanged summary is repeated. */
  compareEveryMs = 2000;
  statusEveryMs = 10_000;
  #published = new Map<string, string>();
  #status = "";
  #statusAt = 0;
  #timer: ReturnType<typeof setInterval> | undefined;

  constructor(scenario: Scenario, root: string) {
    this.world = makeWorld(scenario);
    this.#root = root;
  }

  get url(): string {
    return `http://127.0.0.1:${this.port}`;
  }

  /** Listens; again on the same port after a stop, as a manager that restarts. */
  async start(port = this.port): Promise<void> {
    const server = createServer((request, response) => void this.#answer(request, response));
    await new Promise<void>((ready) => server.listen(port, "127.0.0.1", ready));
    this.#server = server;
    this.port = (server.address() as AddressInfo).port;
    this.#timer = setInterval(() => this.#heartbeats(), this.compareEveryMs);
  }

  async stop(): Promise<void> {
    clearInterval(this.#timer);
    this.#published.clear();
    for (const stream of this.#streams) stream.destroy();
    this.#streams.clear();
    const server = this.#server;
    this.#server = null;
    server?.closeAllConnections();
    await new Promise<void>((done) => (server ? server.close(() => done()) : done()));
  }

  get streams(): number {
    return this.#streams.size;
  }

  /** Takes the heartbeats, and publishes all that has changed, as the manager does without a mark. */
  #heartbeats(): void {
    for (const brick of this.world.bricks.filter((it) => it.alive && it.scrub_request)) {
      const seq = this.world.events.at(-1)?.seq ?? 0;
      carryOutScrub(this.world, brick);
      for (const event of this.world.events.filter((it) => it.seq > seq)) this.publish("event", event);
    }
    if (this.#streams.size === 0) return;
    for (const brick of this.world.bricks) {
      if (this.#published.get(brick.brick) !== agelessText(brick)) this.publish("brick", brickNow(this.world, brick));
    }
    this.#publishStatus();
  }

  #publishStatus(): void {
    const status = JSON.stringify(statusOf(this.world));
    if (status === this.#status && Date.now() < this.#statusAt + this.statusEveryMs) return;
    this.#status = status;
    this.#statusAt = Date.now();
    this.publish("status", statusOf(this.world));
  }

  #markBricks(of: VolumeDetail): void {
    const ids = new Set(of.layout.segments.flatMap((it) => it.columns.flatMap((each) => each.legs.map((leg) => leg.brick))));
    for (const brick of this.world.bricks.filter((it) => ids.has(it.brick))) this.publish("brick", brickNow(this.world, brick));
  }

  publish(event: string, data: unknown): void {
    if (event === "brick" && !("deleted" in (data as object))) {
      const id = (data as BrickInfo).brick;
      const stored = this.world.bricks.find((it) => it.brick === id);
      if (stored) this.#published.set(id, agelessText(stored));
    }
    for (const stream of this.#streams) stream.write(`event: ${event}\ndata: ${JSON.stringify(data)}\n\n`);
  }

  async #answer(request: IncomingMessage, response: ServerResponse): Promise<void> {
    const url = new URL(request.url ?? "/", "http://mock");
    response.setHeader("Date", new Date(Date.now() + this.clockAheadMs).toUTCString());
    if (!url.pathname.startsWith("/api/")) {
      serveFile(this.#root, url.pathname, request, response);
      return;
    }
    if (this.silent?.test(url.pathname)) return;
    try {
      if (this.failing?.test(url.pathname)) throw new Refused(this.failingStatus, "internal", "the store cannot be read", "look at the manager's log: journalctl -u pagemesh-manager");
      await this.#api(request, response, url);
    } catch (error) {
      const refused = error instanceof Refused ? error : new Refused(500, "internal", String(error), "look at the mock");
      const body: Problem = { type: `urn:pagemesh:error:${refused.code}`, title: refused.code, status: refused.status, detail: refused.message, error: refused.message, hint: refused.hint, code: refused.code };
      response.writeHead(refused.status, { "Content-Type": "application/problem+json" }).end(JSON.stringify(body));
    }
  }

  #token(request: IncomingMessage): StoredToken | undefined {
    const secret = /(?:^|; )pagemesh_token=([^;]*)/.exec(request.headers.cookie ?? "")?.[1];
    const found = this.world.tokens.find((it) => it.secret === secret);
    const isOver = found?.expires_unix_s && found.expires_unix_s < Date.now() / 1000;
    return isOver ? undefined : found;
  }

  async #api(request: IncomingMessage, response: ServerResponse, url: URL): Promise<void> {
    const path = url.pathname.replace(/^\/api\/v1\//, "");
    const chunks: Buffer[] = [];
    for await (const chunk of request) chunks.push(chunk as Buffer);
    const text = Buffer.concat(chunks).toString();
    const body = text === "" ? {} : (JSON.parse(text) as Record<string, unknown>);
    if (path === "login" || path === "logout") {
      const known = this.world.tokens.find((it) => it.secret === body["token"]);
      if (path === "login" && !known) throw new Refused(401, "unauthorized", "the token is wrong, expired or revoked", "ask an admin for another: pagemesh token create");
      const cookie = path === "login" ? `pagemesh_token=${known!.secret}` : "pagemesh_token=; Max-Age=0";
      const caller = known && { name: known.name, role: known.role, expires_unix_s: known.expires_unix_s ?? null };
      response.writeHead(path === "login" ? 200 : 204, { "Set-Cookie": `${cookie}; HttpOnly; SameSite=Strict; Path=/` });
      response.end(path === "login" ? JSON.stringify(caller) : undefined);
      return;
    }
    const caller = this.#token(request);
    if (!caller) throw new Refused(401, "unauthorized", "the request has no valid token", "log in");
    if (path === "watch") {
      if (this.refusesStreams) throw new Refused(503, "overloaded", "the manager has too many watching clients, or too many of this address", "close a page or a `pagemesh events --follow`, or ask for lists at intervals");
      this.#stream(response);
      return;
    }
    const found = match(request.method ?? "GET", path);
    if (!found) throw new Refused(404, "not-found", `there is nothing at ${url.pathname}`, "read /api/v1/openapi.json");
    if (!includes(caller.role, found.role)) throw new Refused(403, "forbidden", `this needs the role ${found.role}; you are ${caller.role}`, "ask for another token");
    const result = found.handler({ world: this.world, caller, query: url.searchParams, body, names: found.names, publish: (event, data) => this.publish(event, data), markBricks: (of) => this.#markBricks(of) });
    if (request.method !== "GET") this.#publishStatus();
    response.writeHead(result.status ?? 200, { "Content-Type": "application/json", ...result.headers });
    response.end(result.body === undefined ? undefined : JSON.stringify(result.body));
  }

  #stream(response: ServerResponse): void {
    response.writeHead(200, { "Content-Type": "text/event-stream", "Cache-Control": "no-store" });
    response.write(`event: hello\ndata: ${JSON.stringify({ version: "0.0.1", started_unix_ms: this.world.startedMs })}\n\n`);
    this.#streams.add(response);
    this.streamsOpened += 1;
    // The publisher sends the summary to a new client.
    response.write(`event: status\ndata: ${JSON.stringify(statusOf(this.world))}\n\n`);
    response.on("close", () => this.#streams.delete(response));
  }
}
