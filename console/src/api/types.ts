// The bodies of the manager's REST API, as docs/reference/rest.md and RFD 026 describe them.

export type Uuid = string;
export type Durability = "pmem" | "eadr" | "file-sync" | "process";
export type LegState = "in-sync" | "stale" | "syncing" | "following";
export type LayoutKind = "concat" | "stripe" | "mirror" | "stripe+mirror";
export type VolumeContent = "blocks" | "files";
export type VolumeHealth = "in-sync" | "syncing" | "degraded";
export type Role = "viewer" | "operator" | "admin" | "cluster";

/** `application/problem+json` (RFC 9457), with the fields that the manager adds. */
export interface Problem {
  type?: string;
  title?: string;
  status?: number;
  detail?: string;
  error?: string;
  hint?: string;
  code?: string;
  epoch?: number;
}

export interface WhoAmI {
  name: string;
  role: Role;
  expires_unix_s?: number | null;
}

export interface ClusterStatus {
  version: string;
  bricks: number;
  bricks_alive: number;
  capacity_bytes: number;
  used_bytes: number;
  provisioned_bytes: number;
  overprovision_factor: number;
  volumes: number;
  volumes_attached: number;
  volumes_degraded: number;
  pending_deletions: number;
  bricks_scrubbing: number;
  scrubs_corrected: number;
  scrubs_damaged: number;
  schedules?: number;
  schedules_warning?: number;
  schedules_critical?: number;
}

export interface ScrubReport {
  checked: number;
  superblocks: number;
  records: number;
  skipped_journals: number;
  in_flight: number;
  bitmap_lines: number;
  objects: number;
  slots: number;
  corrected: number;
  damaged: number;
}

export interface BrickScrub {
  state: "off" | "waiting" | "running";
  passes: number;
  progress_percent?: number | null;
  next_in_ms?: number | null;
  pass?: ScrubReport | null;
  last?: ScrubReport | null;
  ended_ms_ago?: number | null;
  corrected: number;
}

export interface DrainProgress {
  left_bytes: number;
  moved_bytes: number;
  bytes_per_s: number;
  running_s: number;
  problem?: string | null;
}

export interface BrickDevice {
  device: Uuid;
  path?: string | null;
  is_first: boolean;
  size_bytes: number;
  used_bytes: number;
  state: "active" | "draining" | "failed" | "other";
  errors?: number;
  last_error_s?: number | null;
  drain?: DrainProgress | null;
}

export interface DeviceRequestInfo {
  id: Uuid;
  state: "pending" | "done" | "failed";
  error?: string | null;
}

export interface DeviceList {
  alive: boolean;
  devices: BrickDevice[];
  requests: DeviceRequestInfo[];
}

export interface BrickTier {
  memory_bytes: number;
  memory_free_bytes: number;
  flash_bytes: number;
  flash_free_bytes: number;
  recent_hits: number;
  recent_misses: number;
  demoted_pages: number;
  promoted_pages: number;
  waits: number;
}

export type TierPolicy = "auto" | "memory" | "flash";

export interface VolumeTier {
  policy: TierPolicy;
  bricks: { brick: Uuid; name?: string | null; effect: "applied" | "pending" | "away" | "no-tier" }[];
}

export interface BrickInfo {
  brick: Uuid;
  name?: string | null;
  alive: boolean;
  heartbeat_age_ms?: number | null;
  address: string;
  map_socket?: string | null;
  domain: string;
  durability: Durability;
  capacity_bytes: number;
  used_bytes: number;
  provisioned_bytes: number;
  slices: number;
  pending_deletions: number;
  sessions: number;
  scrub?: BrickScrub | null;
  scrub_request?: { id: Uuid; stop: boolean } | null;
  devices?: BrickDevice[] | null;
  tier?: BrickTier | null;
}

export interface Attachment {
  client: string;
  epoch: number;
  since_unix_s: number;
}

export interface VolumeInfo {
  name: string;
  id: Uuid;
  content: VolumeContent;
  size_bytes: number;
  layout: LayoutKind;
  columns: number;
  copies: number;
  durability: Durability;
  epoch: number;
  health: VolumeHealth;
  unreachable_legs: number;
  attached?: Attachment | null;
  auto_promote: boolean;
  tier?: TierPolicy;
  /** Of a volume that receives snapshots: the epoch of the last attachment of a receiver. */
  received?: number | null;
  created_unix_s: number;
}

export interface SnapshotInfo {
  volume: string;
  name: string;
  epoch: number;
  created_unix_ms: number;
  state: "committed" | "deleting";
  size_bytes: number;
  holds: string[];
  labels: string[];
  made_by: string;
}

export interface BookmarkInfo {
  volume: string;
  name: string;
  snapshot: string;
  epoch: number;
  created_unix_ms: number;
}

/** The bytes of a snapshot, in one copy of its volume. */
export interface SnapshotSpaceInfo {
  name: string;
  epoch: number;
  exclusive_bytes: number;
  shared_bytes: number;
  referenced_bytes: number;
  written_bytes: number;
}

/** The bytes of a volume and its snapshots, in one copy. */
export interface VolumeSpace {
  volume: string;
  volume_bytes: number;
  snapshot_bytes: number;
  written_bytes: number;
  freed_bytes: number;
  /** The oldest first. */
  snapshots: SnapshotSpaceInfo[];
}

/** The calls of an NFS operation in a step. */
export interface NfsOperation {
  name: string;
  calls: number;
  errors: number;
  mean_ns: number;
  p50_ns: number;
  p99_ns: number;
}

/** A client of NFSv4.1. Its numbers are of all file systems of the server. */
export interface Nfs4Client {
  client: string;
  address: string;
  name: string;
  minor_version: number;
  lease: "unconfirmed" | "active" | "expired";
  renewed_s: number;
  is_reclaiming: boolean;
  sessions: number;
  running: number;
  opens: number;
  locks: number;
  file_systems: string[];
}

export interface NfsExportState {
  addresses: string[];
  paths: { path: string; rules: string[] }[];
  clients: { address: string; connections: number; calls: number; idle_s: number }[];
  clients_total: number;
  operations: NfsOperation[];
  step_ms: number;
  workers: { threads: number; threads_max: number; blocked: number; queued: number; mean_wait_ns: number; stalled: boolean; last_change: string };
  /** The grace period of NFSv4.1, while it lasts. */
  grace?: { left_s: number; clients: number };
  listed_clients?: number;
  unwritten_records?: number;
  /** The ones with the most locks and opens first; a server of an earlier release has none. */
  nfs4_clients?: Nfs4Client[];
  nfs4_clients_total?: number;
}

/** A file system that is served over NFS, with the age of its report. */
export interface NfsExport {
  volume: string;
  reported_ms_ago: number;
  export: NfsExportState;
}

export type ScheduleHealth = "ok" | "warning" | "critical";

export interface Retention {
  frequent: number;
  hourly: number;
  daily: number;
  weekly: number;
  monthly: number;
  yearly: number;
}

export interface SchedulePolicy {
  prefix?: string | null;
  volumes: string[];
  retention: Retention;
  frequent_minutes?: number | null;
  warn_after_s?: number | null;
  critical_after_s?: number | null;
  enabled: boolean;
  prune: boolean;
  group?: boolean;
  targets?: { name: string; manager: string; volume_prefix?: string }[];
}

export interface ScheduleInfo {
  name: string;
  policy: SchedulePolicy;
  volumes: number;
  health: ScheduleHealth;
  created_unix_s: number;
  made_by: string;
}

export interface ScheduleVolume {
  volume: string;
  snapshots: number;
  newest?: string | null;
  age_s: number;
  health: ScheduleHealth;
  received: boolean;
  error?: string | null;
  sent?: Record<string, { snapshot: string; epoch: number; sent_unix_ms: number }>;
}

export interface ScheduleDetail {
  info: ScheduleInfo;
  volumes: ScheduleVolume[];
}

export interface Leg {
  brick: Uuid;
  slice: Uuid;
  state: LegState;
  needs_full_resync?: boolean;
  asynchronous?: boolean;
  empty?: boolean;
}

export interface Column {
  legs: Leg[];
  round: number;
}

export interface Segment {
  bytes: number;
  columns: Column[];
}

export interface Layout {
  volume: Uuid;
  name: string;
  epoch: number;
  segments: Segment[];
}

export interface LegNote {
  segment: number;
  column: number;
  leg: number;
  text: string;
  since_unix_s: number;
}

export interface ResyncProgress {
  copy: number;
  bytes_todo: number;
  bytes_done: number;
  elapsed_ms: number;
}

export interface ReplicaLag {
  changes: number;
  bytes: number;
  age_us: number;
}

export interface ReplicationStatus {
  lag?: ReplicaLag | null;
  resyncs: ResyncProgress[];
  reported_us_ago: number;
}

export interface BrickAddress {
  name?: string | null;
  tcp: string;
  map_socket?: string | null;
  durability: Durability;
}

export interface VolumeDetail {
  info: VolumeInfo;
  layout: Layout;
  bricks: Record<Uuid, BrickAddress>;
  notes: LegNote[];
  replication?: ReplicationStatus | null;
}

export interface CreateVolume {
  name: string;
  size_bytes: number;
  layout: LayoutKind;
  columns?: number;
  copies?: number;
  durability?: Durability;
  content: VolumeContent;
}

export interface VolumeSizeReply {
  volume: VolumeDetail;
  asked_bytes: number;
  rounded: boolean;
  note?: string | null;
}

export interface AttachReplica {
  brick?: string;
  asynchronous: boolean;
  auto_promote: boolean;
}

export interface ChooseReplica {
  copy: number;
  force: boolean;
  expected?: number;
}

export type Severity = "info" | "warning" | "critical";

export interface EventRecord {
  seq: number;
  time_unix_ms: number;
  kind: string;
  severity: Severity;
  subject: { kind: "brick" | "volume" | "token" | "manager"; name: string };
  actor: string;
  text: string;
  count?: number;
  first_unix_ms?: number;
  acknowledged?: Acknowledgement | null;
}

export interface Acknowledgement {
  by: string;
  time_unix_ms: number;
}

export type OpKind = "read" | "write" | "flush";
export const OP_KINDS: readonly OpKind[] = ["read", "write", "flush"];

/** One kind of operation of a history; arrays as long as `time_unix_s`. */
export interface FigureValues {
  operations: (number | null)[];
  bytes?: (number | null)[];
  kib?: (number | null)[];
  p50_ns: (number | null)[];
  p99_ns: (number | null)[];
}

export interface FigureSeries {
  step_s: number;
  last_reported_us_ago: number | null;
  is_shortened?: boolean;
  time_unix_s: number[];
  read: FigureValues;
  write: FigureValues;
  flush: FigureValues;
}

export interface FigureKind {
  kind: string;
  operations: number;
  bytes: number;
  p50_ns: number | null;
  p99_ns: number | null;
}

export interface SubjectFigures {
  name: string;
  last_reported_us_ago: number;
  kinds: FigureKind[];
  /** Of a brick that has reported it. */
  media?: MediaFigures | null;
}

/** Bytes written to a medium in the last minute. */
export interface MediaFigures {
  data_bytes: number;
  journal_bytes: number;
  table_bytes: number;
}

export interface ClusterMediaFigures {
  written: MediaFigures;
  per_user_byte: number | null;
  metadata_per_user_byte: number | null;
}

export interface RecentFigures {
  window_s: number;
  cluster: SubjectFigures | null;
  volumes: SubjectFigures[];
  bricks: SubjectFigures[];
  /** Missing in answers of an earlier manager. */
  media?: ClusterMediaFigures | null;
}

export interface StageFigures {
  kind: string;
  quantile: number;
  last_reported_us_ago: number | null;
  operations: number;
  timed: number;
  latency_ns: number | null;
  around: number;
  stages_ns: Record<string, number> | null;
  mean_stages_ns: Record<string, number> | null;
}

export type Span = "1h" | "24h";

export interface TokenInfo {
  id: string;
  name: string;
  role: Role;
  created_unix_s: number;
  expires_unix_s?: number | null;
}

export interface CreateToken {
  name: string;
  role: Role;
  expires_s?: number;
}

export interface CreatedToken extends TokenInfo {
  token: string;
}

/** The messages of `/api/v1/watch`. */
export interface WatchHello {
  version: string;
  started_unix_ms?: number;
}
export interface Acknowledged {
  seq: number;
  acknowledged: Acknowledgement;
}
export type Changed<T> = T | { name: string; deleted: true };
