// The calls of the API that the console makes, one function each.

import { ApiError, newKey, send, type Answer } from "./client.ts";
import type {
  AttachReplica, BookmarkInfo, BrickInfo, ChooseReplica, ClusterStatus, CreatedToken, CreateToken, CreateVolume, DeviceList, DeviceRequestInfo, EventRecord,
  FigureSeries, NfsExport, RecentFigures, ScheduleDetail, ScheduleInfo, SchedulePolicy, Severity, SnapshotInfo, Span, StageFigures, TierPolicy, TokenInfo, VolumeContent, VolumeDetail, VolumeHealth,
  VolumeInfo, VolumeSizeReply, VolumeSpace, VolumeTier, WhoAmI,
} from "./types.ts";
import { queryText } from "../text/route.ts";

const V1 = "/api/v1";
const name = encodeURIComponent;

async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await send<T>(V1 + path, signal ? { signal } : {})).body;
}

async function post<T>(path: string, body: unknown, key?: string): Promise<T> {
  return (await send<T>(V1 + path, { method: "POST", body, ...(key ? { key } : {}) })).body;
}

async function put<T>(path: string, body: unknown): Promise<T> {
  return (await send<T>(V1 + path, { method: "PUT", body })).body;
}

async function remove<T>(path: string): Promise<T> {
  return (await send<T>(V1 + path, { method: "DELETE" })).body;
}

export const login = (token: string) => post<WhoAmI>("/login", { token });
export const logout = () => post<null>("/logout", {});
export const whoami = () => get<WhoAmI>("/whoami");
export const status = () => get<ClusterStatus>("/status");

/** Entries of the longest page of the API. */
const PAGE_MAX = 1000;
/** Pages of bricks that are read at most. */
const PAGES_MAX = 50;

export async function bricks(): Promise<BrickInfo[]> {
  let next: string | null = `${V1}/bricks?limit=${PAGE_MAX}`;
  const all: BrickInfo[] = [];
  for (let page = 0; next && page < PAGES_MAX; page += 1) {
    const answer: Answer<BrickInfo[]> = await send<BrickInfo[]>(next);
    all.push(...answer.body);
    next = answer.next;
  }
  return all;
}

export const scrub = (brick: string, stop: boolean) => post<BrickInfo>(`/bricks/${name(brick)}/scrub`, { stop });
export const forget = (brick: string, force: boolean) => remove<null>(`/bricks/${name(brick)}${queryText({ force: force ? "true" : null })}`);

export const addDevice = (brick: string, path: string, sizeBytes: number | null) =>
  post<DeviceRequestInfo>(`/bricks/${name(brick)}/devices`, { path, size_bytes: sizeBytes }, newKey());
export const drainDevice = (brick: string, device: string, cancel: boolean) =>
  post<DeviceRequestInfo>(`/bricks/${name(brick)}/devices/${name(device)}/drain`, { cancel });

/** The interval of looks at a request to a brick, and how many there are: two minutes. */
const LOOK_MS = 500;
const LOOKS_MAX = 240;

/** Waits until the brick has carried out a request to change its devices; its refusal is an error. */
export async function deviceRequestEnd(brick: string, request: string): Promise<void> {
  for (let look = 0; look < LOOKS_MAX; look += 1) {
    const list = await get<DeviceList>(`/bricks/${name(brick)}/devices`);
    const found = list.requests.find((it) => it.id === request);
    if (!found) throw new ApiError(409, "The manager was restarted and has forgotten the request.", "Look at the devices, and repeat it if nothing has changed.", "forgotten");
    if (found.state === "failed") throw new ApiError(409, found.error ?? "The brick refused it.", "", "brick-failed");
    if (found.state === "done") return;
    await new Promise((done) => setTimeout(done, LOOK_MS));
  }
}

export interface VolumeFilter {
  search?: string;
  health?: VolumeHealth | "";
  content?: VolumeContent;
  after?: string;
  limit: number;
}

export interface VolumePage {
  volumes: VolumeInfo[];
  /** Where the next page begins; null on the last. */
  after: string | null;
}

/** A page of volumes, filtered by the manager. It asks for one more than it shows, which tells whether a page follows. */
export async function volumes(filter: VolumeFilter, signal?: AbortSignal): Promise<VolumePage> {
  const { limit, ...wanted } = filter;
  const query = queryText({ limit: Math.min(PAGE_MAX, limit + 1), ...wanted });
  const found = await get<VolumeInfo[]>(`/volumes${query}`, signal);
  const shown = found.slice(0, limit);
  return { volumes: shown, after: found.length > limit ? (shown.at(-1)?.name ?? null) : null };
}

export const volume = (of: string, signal?: AbortSignal) => get<VolumeDetail>(`/volumes/${name(of)}`, signal);
/** `key` names the dialog: a second press, or a retry after a lost answer, creates nothing twice. */
export const createVolume = (asked: CreateVolume, key: string) => post<VolumeSizeReply>("/volumes", asked, key);
export const growVolume = (of: string, size_bytes: number) => post<VolumeSizeReply>(`/volumes/${name(of)}/grow`, { size_bytes });
export const volumeTier = (of: string, signal?: AbortSignal) => get<VolumeTier>(`/volumes/${name(of)}/tier`, signal);
export const setTier = (of: string, policy: TierPolicy) => put<VolumeTier>(`/volumes/${name(of)}/tier`, { policy });
export const deleteVolume = (of: string, force: boolean) => remove<{ pending_deletions: number }>(`/volumes/${name(of)}${queryText({ force: force ? "true" : null })}`);
export const detachVolume = (of: string, attachment: number) => post<{ detached: boolean }>(`/volumes/${name(of)}/detach`, { attachment });
export const attachReplica = (of: string, asked: AttachReplica, key: string) => post<VolumeDetail>(`/volumes/${name(of)}/replicas`, asked, key);
export const detachReplica = (of: string, asked: ChooseReplica) => post<VolumeDetail>(`/volumes/${name(of)}/replicas/detach`, asked);
export const promoteReplica = (of: string, asked: ChooseReplica) => post<VolumeDetail>(`/volumes/${name(of)}/replicas/promote`, asked);

export const promoteVolume = (of: string) => post<VolumeDetail>(`/volumes/${name(of)}/promote`, {});

export interface SnapshotPage {
  /** The newest first. */
  snapshots: SnapshotInfo[];
  hasMore: boolean;
}

/** The newest snapshots of a volume, a page of them. */
export async function snapshots(of: string, signal?: AbortSignal): Promise<SnapshotPage> {
  const answer = await send<SnapshotInfo[]>(`${V1}/volumes/${name(of)}/snapshots?limit=${PAGE_MAX}`, signal ? { signal } : {});
  return { snapshots: answer.body, hasMore: answer.next !== null };
}
const snapshotPath = (of: string, snapshot: string) => `/volumes/${name(of)}/snapshots/${name(snapshot)}`;
export const createSnapshot = (of: string, snapshot: string, key: string) => post<SnapshotInfo>(`/volumes/${name(of)}/snapshots`, { name: snapshot }, key);
export const deleteSnapshot = (of: string, snapshot: string) => remove<{ pending_slices: number }>(snapshotPath(of, snapshot));
export const holdSnapshot = (of: string, snapshot: string, tag: string) => put<SnapshotInfo>(`${snapshotPath(of, snapshot)}/holds/${name(tag)}`, {});
export const releaseSnapshot = (of: string, snapshot: string, tag: string) => remove<SnapshotInfo>(`${snapshotPath(of, snapshot)}/holds/${name(tag)}`);
/** The bytes that the snapshots keep, counted by the bricks now, and those that a deletion of some of them frees. */
export const snapshotSpace = (of: string, dropped: string[] = [], signal?: AbortSignal) => get<VolumeSpace>(`/volumes/${name(of)}/snapshot-space${queryText({ drop: dropped.join(",") })}`, signal);
export const bookmarks = (of: string, signal?: AbortSignal) => get<BookmarkInfo[]>(`/volumes/${name(of)}/bookmarks`, signal);

export const nfsExports = (signal?: AbortSignal) => get<NfsExport[]>("/nfs", signal);
/** Waits for the server of the client, up to 25 s. */
export const expireNfsClient = (client: string) => remove<{ opens: number; locks: number }>(`/nfs/clients/${name(client)}`);

export const schedules = (signal?: AbortSignal) => get<ScheduleInfo[]>("/schedules", signal);
export const schedule = (of: string, signal?: AbortSignal) => get<ScheduleDetail>(`/schedules/${name(of)}`, signal);
export const createSchedule = (made: string, policy: SchedulePolicy, key: string) => post<ScheduleInfo>("/schedules", { name: made, policy }, key);
export const updateSchedule = (of: string, policy: SchedulePolicy) => put<ScheduleInfo>(`/schedules/${name(of)}`, policy);
export const deleteSchedule = (of: string) => remove<null>(`/schedules/${name(of)}`);

export interface EventQuery {
  severity?: Severity | "";
  subject?: string;
  last?: number;
  after?: number;
  limit?: number;
}

export const events = (query: EventQuery, signal?: AbortSignal) => get<EventRecord[]>(`/events${queryText({ ...query })}`, signal);
export const acknowledge = (seq: number) => post<EventRecord>(`/events/${seq}/acknowledge`, {});

export const recentFigures = () => get<RecentFigures>("/figures");
export const clusterFigures = (span: Span, signal?: AbortSignal) => get<FigureSeries>(`/figures/cluster?span=${span}`, signal);
export const volumeFigures = (of: string, span: Span, signal?: AbortSignal) => get<FigureSeries>(`/figures/volumes/${name(of)}?span=${span}`, signal);
export const brickFigures = (of: string, span: Span, signal?: AbortSignal) => get<FigureSeries>(`/figures/bricks/${name(of)}?span=${span}`, signal);
export const why = (of: string, kind: string, quantile: number) => get<StageFigures>(`/why/volumes/${name(of)}?kind=${kind}&quantile=${quantile}`);

export const tokens = () => get<TokenInfo[]>("/tokens");
export const createToken = (asked: CreateToken) => post<CreatedToken>("/tokens", asked, newKey());
export const revokeToken = (id: string) => remove<null>(`/tokens/${name(id)}`);
