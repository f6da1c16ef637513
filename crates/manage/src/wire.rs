//! JSON bodies of the REST API. Ids are UUIDs as text, sizes are bytes, epochs are numbers.

mod access;
mod bookmarks;
mod bricks;
mod devices;
mod figures;
mod holders;
mod nfs;
mod problem;
mod rollbacks;
mod schedules;
mod snapshot_checks;
mod snapshots;
mod status;
mod tier;

pub use crate::error_code::ErrorCode;
pub use crate::events::{
    Acknowledgement, EventFilter, EventKind, EventRecord, Severity, Subject, SubjectKind,
};
pub use crate::records::{Attachment, CloneOrigin, LegNote};
pub use crate::rollback::{Rollback, RollbackPhase};
pub use access::{CreateToken, CreatedToken, LoginRequest, TokenInfo, WhoAmI};
pub use bookmarks::{BookmarkDetail, BookmarkInfo, CreateBookmark};
pub use bricks::{
    BrickInfo, BrickRegistration, BrickScrub, HeartbeatReply, ScrubBrick, ScrubReport,
    ScrubRequest, ScrubState,
};
pub(crate) use devices::is_device_path;
pub use devices::{
    AddDevice, BrickDevice, BrickDevices, DeviceChange, DeviceList, DeviceRequest,
    DeviceRequestInfo, DeviceRequestState, DeviceResult, DeviceState, DrainDevice, DrainProgress,
};
pub use holders::{AttachVolume, HolderSign, HolderStatus, ReportHolder};
pub use nfs::{
    BadNfs4ClientId, LostNfsState, NFS_LIST_MAX, NFS_ORDERS_MAX, NFS_TEXT_BYTES_MAX, Nfs4Client,
    Nfs4ClientId, Nfs4Lease, NfsClient, NfsExpiry, NfsExpiryResult, NfsExport, NfsExportState,
    NfsGrace, NfsOperation, NfsOrders, NfsPath, NfsWorkers, ReportNfs,
};
pub use problem::{ErrorBody, PROBLEM_JSON};
pub use rollbacks::{BeginRollback, EndedRollback, FinishRollback, StartRollbackCopy};
pub use schedules::{
    CreateSchedule, ReportSent, RunSchedule, ScheduleDetail, ScheduleInfo, SchedulePlan,
    SchedulePolicy, ScheduleTarget, ScheduleVolume, SetLabels,
};
pub use snapshot_checks::{CheckPosition, CheckSnapshots, SnapshotCheckReply, SnapshotDifference};
pub use snapshots::{
    AnswerCut, CloneProgressReply, CountSpace, CreateClone, CreateSnapshot, CreateSnapshots,
    CreatedSnapshots, CutOrder, CutResult, CutStep, DeleteSnapshotReply, DeleteVolumeParams,
    ListSnapshots, PollCut, SnapshotDetail, SnapshotInfo, SnapshotSpaceInfo, VolumeSpaceReply,
};
pub use status::ClusterStatus;
pub use tier::{
    BrickTier, COUNTED_SLICES_MAX, NamedVolumeTier, SetTier, SlicePages, SliceTier, TierBytes,
    TierEffect, VolumeTier, VolumeTierBrick,
};

pub use figures::{
    ClusterMediaFigures, FigureKind, FigureSeries, FigureSpan, FigureValues, LatencyBand,
    MediaFigures, RecentFigures, ReportBrickFigures, ReportDelivery, ReportFigures, SpanParam,
    StageFigures, StageParams, SubjectFigures,
};

use crate::call::{RecordTag, etag_text};
use crate::shape::LayoutKind;
use crate::snapshots::SnapshotName;
use crate::tier_policy::TierPolicy;
use pagemesh_base::brick_name::{BrickLabel, BrickName, BrickRef};
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::durability::Durability;
use pagemesh_base::layout::{BrickId, EpochNumber, Layout, LegState, SliceId, VolumeName};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

/// The use of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VolumeContent {
    /// Blocks, for an export.
    #[default]
    Blocks,
    /// A file system, for a mount.
    Files,
}

/// A volume to create.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateVolume {
    /// Its name.
    #[schema(value_type = crate::api::document::Name)]
    pub name: VolumeName,
    /// The size, in whole pages of 4096 bytes. The size of a striped volume is rounded up to whole
    /// stripes. For `files`: the limit of all files together.
    #[schema(
        minimum = 4096,
        maximum = 9_223_372_036_854_771_712_i64,
        multiple_of = 4096
    )]
    pub size_bytes: u64,
    /// `mirror` if missing.
    #[serde(default)]
    pub layout: LayoutKind,
    /// Columns of a stripe: 2 if missing.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 16)]
    pub columns: Option<usize>,
    /// Copies of a mirror: 2 if missing.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 3)]
    pub copies: Option<usize>,
    /// The durability class of its bricks: the strongest with room if missing.
    #[serde(default)]
    #[schema(value_type = Option<crate::api::document::Durability>)]
    pub durability: Option<Durability>,
    /// `blocks` if missing. `files` needs one column, and one brick per copy with room for all of
    /// it.
    #[serde(default)]
    pub content: VolumeContent,
    /// Where its pages lie in pools with disks behind memory: `auto` if missing.
    #[serde(
        default,
        skip_serializing_if = "TierPolicy::is_auto",
        deserialize_with = "TierPolicy::known"
    )]
    pub tier: TierPolicy,
    /// `true`: it receives snapshots of another volume, and is read-only for all others until it is promoted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub received: bool,
}

/// The new size of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GrowVolume {
    /// The size after growing: larger than now, in whole pages.
    #[schema(
        minimum = 4096,
        maximum = 9_223_372_036_854_771_712_i64,
        multiple_of = 4096
    )]
    pub size_bytes: u64,
}

/// A further copy of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AttachReplica {
    /// The name or the UUID of the brick of the new copy; if missing, each column takes a brick
    /// with room.
    #[serde(default)]
    #[schema(value_type = Option<crate::api::document::Name>)]
    pub brick: Option<BrickRef>,
    /// Whether the copy receives changes in order, after their acknowledgement. A durable write
    /// (`O_SYNC`, `fsync`, FUA, flush) is acknowledged once the copy has it. Needs a volume with
    /// one column; a volume has at most one such copy.
    #[serde(default)]
    pub asynchronous: bool,
    /// Whether the manager may promote the asynchronous copy for a client that reaches no in-sync
    /// copy, while every brick with an in-sync copy is dead.
    ///
    /// **Data loss:** the promoted copy may lack the last acknowledged writes.
    #[serde(default)]
    pub auto_promote: bool,
}

/// Chooses a copy of a volume to remove or to promote.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChooseReplica {
    /// The copy, counted from 0 as in the layout's columns.
    #[schema(minimum = 0, maximum = 2)]
    pub copy: usize,
    /// Do it although a client has attached the volume; the client is fenced. A promotion with
    /// `force` also accepts a copy that is not in-sync. A removal with `force` also accepts that no
    /// living brick would have an in-sync copy.
    ///
    /// **Data loss:** a forced promotion gives up the writes that the copy lacks.
    #[serde(default)]
    pub force: bool,
    /// The epoch of the layout in which the copies were counted; another current epoch is refused.
    #[serde(default)]
    #[schema(value_type = Option<u32>)]
    pub expected: Option<EpochNumber>,
}

/// A volume that was created or has grown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeSizeReply {
    /// The volume.
    pub volume: VolumeDetail,
    /// The requested size.
    pub asked_bytes: u64,
    /// Whether the size was rounded up to whole stripes.
    pub rounded: bool,
    /// The rounding in words, if there was one.
    pub note: Option<String>,
}

/// How to reach a brick.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BrickAddress {
    /// The name of the brick, if it has one.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub name: Option<BrickName>,
    /// `host:port` of the brick's tcp transport.
    pub tcp: String,
    /// The unix socket of the brick for clients on its machine: they map the pool, or send requests to a pool that cannot be mapped.
    pub map_socket: Option<String>,
    /// The durability class of its pool.
    #[schema(value_type = crate::api::document::Durability)]
    pub durability: Durability,
}

/// A layout and the addresses of its bricks. After an attach, the layout's epoch names the
/// attachment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AttachReply {
    /// The layout of the volume.
    #[schema(value_type = crate::api::document::Layout)]
    pub layout: Layout,
    /// The addresses by brick.
    #[schema(value_type = BTreeMap<String, BrickAddress>)]
    pub bricks: BTreeMap<BrickId, BrickAddress>,
}

/// Ends an attachment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DetachVolume {
    /// The epoch that the attach returned; another attachment stays. If missing, any attachment
    /// ends.
    #[serde(default)]
    #[schema(value_type = Option<u32>)]
    pub attachment: Option<EpochNumber>,
}

/// The result of a detach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DetachReply {
    /// Whether an attachment ended.
    pub detached: bool,
}

/// A requested change of the state of one leg.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LegChange {
    /// The segment of the layout, from 0.
    pub segment: usize,
    /// The column of the segment, from 0.
    pub column: usize,
    /// The leg of the column, from 0.
    pub leg: usize,
    /// The new state.
    #[schema(value_type = crate::api::document::LegState)]
    pub to: LegState,
    /// The reason, for people; stored until the leg is in-sync again.
    #[serde(default)]
    #[schema(min_length = 1, max_length = 256)]
    pub note: Option<String>,
}

/// Compare-and-swap of leg states: all changes or none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangeLegs {
    /// The epoch of the layout that the request is based on.
    #[schema(value_type = u32)]
    pub expected: EpochNumber,
    /// The attachment of the client; if it is over, the answer is `fenced`. A client always sends it.
    /// Without it only the epoch is compared, and the change may be that of a fenced client.
    #[serde(default)]
    #[schema(value_type = Option<u32>)]
    pub attachment: Option<EpochNumber>,
    /// Each leg at most once.
    pub changes: Vec<LegChange>,
}

/// The health of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VolumeHealth {
    /// All legs are in-sync, or asynchronous and up to date.
    InSync,
    /// Legs are being resynced, and none is stale.
    Syncing,
    /// A leg is stale.
    Degraded,
}

/// A volume in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeInfo {
    /// Its name.
    #[schema(value_type = crate::api::document::Name)]
    pub name: VolumeName,
    /// Its identity.
    pub id: Uuid,
    /// Blocks or files.
    #[serde(default)]
    pub content: VolumeContent,
    /// The size; for `files`, the limit of all files together.
    pub size_bytes: u64,
    /// Its kind of layout.
    pub layout: LayoutKind,
    /// Columns of each segment.
    pub columns: usize,
    /// Copies of each column.
    pub copies: usize,
    /// The class of its bricks.
    #[schema(value_type = crate::api::document::Durability)]
    pub durability: Durability,
    /// Its epoch.
    #[schema(value_type = u32)]
    pub epoch: EpochNumber,
    /// The health of its legs.
    pub health: VolumeHealth,
    /// Legs on bricks that count as dead.
    pub unreachable_legs: usize,
    /// The client that has attached it.
    pub attached: Option<Attachment>,
    /// Whether the manager may promote its asynchronous copy.
    #[serde(default)]
    pub auto_promote: bool,
    /// Where its pages lie in pools with disks behind memory.
    #[serde(default)]
    pub tier: TierPolicy,
    /// Of a volume that receives snapshots, and is read-only until it is promoted: the epoch of the last attachment of a receiver, or 0.
    /// Its content is that of its newest snapshot if that has a higher epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>)]
    pub received: Option<EpochNumber>,
    /// Seconds since 1970.
    pub created_unix_s: u64,
    /// The snapshot that it was cloned from, as long as it shares pages with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<CloneOrigin>,
    /// The rollback to a snapshot that has not ended: other uses of the volume are refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollback: Option<Rollback>,
    /// The times that it may have got an earlier content: rollbacks, and promotions of asynchronous copies.
    #[serde(default)]
    pub content_returns: u64,
    /// Keys with values, by which schedules select it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// The details of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeDetail {
    /// The same as in the list.
    pub info: VolumeInfo,
    /// The layout of the volume.
    #[schema(value_type = crate::api::document::Layout)]
    pub layout: Layout,
    /// The addresses of its bricks.
    #[schema(value_type = BTreeMap<String, BrickAddress>)]
    pub bricks: BTreeMap<BrickId, BrickAddress>,
    /// The reasons of legs that are not in-sync.
    pub notes: Vec<LegNote>,
    /// The last report of its client about asynchronous and resyncing copies.
    #[serde(default, alias = "told")]
    pub replication: Option<ReplicationStatus>,
    /// Only in the answer to a promotion: the snapshots that were deleted, because the promoted copy lacks parts of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<crate::api::document::Name>)]
    pub lost_snapshots: Vec<SnapshotName>,
}

impl VolumeDetail {
    /// The entity tag of the details of a volume with this record: `"RECORD.VIEW"`. The view has no ages.
    pub(crate) fn etag(&self, record: RecordTag) -> String {
        let mut view = self.clone();
        if let Some(replication) = &mut view.replication {
            replication.reported_us_ago = 0;
        }
        etag_text(record, &view)
    }
}

/// The report of a client about its copies, sent when it asks for the layout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReportReplication {
    /// The epoch that the attach returned.
    #[schema(value_type = u32)]
    pub attachment: EpochNumber,
    /// The lag of the asynchronous copy, if one has the state `async-replica`.
    #[serde(default)]
    pub lag: Option<ReplicaLag>,
    /// The copies that are being resynced, each at most once.
    ///
    /// Written under its earlier name: a manager of the previous version refuses a key that it does not know, and the
    /// client could no longer ask for its layout.
    #[serde(default, rename = "returns", alias = "resyncs")]
    pub resyncs: Vec<ResyncProgress>,
    /// Snapshots that the asynchronous copy has got as a whole. A manager of an earlier release refuses the key, and the
    /// client then reports without it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replica_snapshots: Vec<ReplicaSnapshot>,
}

/// A snapshot that an asynchronous copy has as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplicaSnapshot {
    /// The slice of the copy.
    #[schema(value_type = Uuid)]
    pub slice: SliceId,
    /// The epoch of the snapshot.
    #[schema(value_type = u32)]
    pub epoch: EpochNumber,
}

/// The last report about asynchronous and resyncing copies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReplicationStatus {
    /// The lag of the asynchronous copy.
    pub lag: Option<ReplicaLag>,
    /// The progress of resyncs.
    #[serde(alias = "returns")]
    pub resyncs: Vec<ResyncProgress>,
    /// The age of the report, in microseconds.
    #[serde(alias = "told_us_ago")]
    pub reported_us_ago: u64,
}

/// The lag of an asynchronous copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplicaLag {
    /// Changes that the copy does not have yet.
    pub changes: u64,
    /// Bytes of these changes.
    pub bytes: u64,
    /// Microseconds since the oldest of them was, or could have been, acknowledged.
    pub age_us: u64,
}

/// The progress of a resync, the first one included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResyncProgress {
    /// The copy, counted from 0.
    pub copy: usize,
    /// Bytes to copy or compare, as far as known.
    pub bytes_todo: u64,
    /// Bytes of these that are done.
    pub bytes_done: u64,
    /// Milliseconds since the resync began.
    pub elapsed_ms: u64,
}

impl VolumeDetail {
    /// How messages name a brick of the volume.
    #[must_use]
    pub fn label(&self, id: BrickId) -> BrickLabel {
        let address = self.bricks.get(&id);
        let name = address.and_then(|address| address.name.clone());
        BrickLabel { id, name }
    }

    /// Whether the volume is attached with this epoch. A client checks this before it takes a
    /// layout that it reads later as its own.
    #[must_use]
    pub fn is_attached_as(&self, attachment: EpochNumber) -> bool {
        let attached = self.info.attached.as_ref();
        attached.is_some_and(|present| {
            present.epoch == attachment || defect::is(Defect::ForeignLayoutTaken)
        })
    }
}

/// Whether to override a safety check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ForceParam {
    /// `true` overrides the check.
    #[serde(default)]
    pub force: bool,
}

/// The result of a deletion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeleteReply {
    /// Slices that are not deleted yet; the manager retries.
    pub pending_deletions: usize,
}

/// The volumes of a list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListVolumes {
    /// Volumes in one answer, 1 to 1000; all if missing. `Link` has the next page.
    #[serde(default)]
    #[param(minimum = 1, maximum = 1000)]
    pub limit: Option<usize>,
    /// Volumes whose names follow this one.
    #[serde(default)]
    #[param(value_type = Option<String>, pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$")]
    pub after: Option<VolumeName>,
    /// Volumes with this text in their names.
    #[serde(default)]
    pub search: Option<String>,
    /// Volumes of this health.
    #[serde(default)]
    #[param(value_type = VolumeHealth, required = false, inline)]
    pub health: Option<VolumeHealth>,
    /// Volumes with this use: `blocks` or `files`.
    #[serde(default)]
    #[param(value_type = VolumeContent, required = false, inline)]
    pub content: Option<VolumeContent>,
}

/// The bricks of a list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListBricks {
    /// Bricks in one answer, 1 to 1000; all if missing. `Link` has the next page.
    #[serde(default)]
    #[param(minimum = 1, maximum = 1000)]
    pub limit: Option<usize>,
    /// Bricks whose names follow this one; a brick without a name has its UUID.
    #[serde(default)]
    pub after: Option<String>,
    /// Bricks with this text in their names.
    #[serde(default)]
    pub search: Option<String>,
    /// `alive` or `dead` bricks.
    #[serde(default)]
    #[param(value_type = BrickHealth, required = false, inline)]
    pub health: Option<BrickHealth>,
}

/// Whether the heartbeats of a brick arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BrickHealth {
    /// They arrive.
    Alive,
    /// They are missing.
    Dead,
}

/// The first message of a stream of changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Hello {
    /// The manager's version.
    pub version: String,
    /// The start of the manager, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// The number of the last event before the stream.
    pub last_seq: u64,
}

/// Events that a stream cannot give any more, after its `hello`: the history had no room for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventGap {
    /// The number after which the client wanted to continue.
    pub after: u64,
    /// Events up to this number are missing; the history still has some of them, which follow.
    pub up_to: u64,
}

/// A thing that the manager no longer has, in a stream of changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Deleted {
    /// The name of the volume, or the UUID of the brick.
    pub name: String,
    /// Always `true`.
    pub deleted: bool,
}

impl Deleted {
    pub(crate) fn new(name: &impl ToString) -> Deleted {
        Deleted {
            name: name.to_string(),
            deleted: true,
        }
    }
}

/// An acknowledged event, in a stream of changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Acknowledged {
    /// The number of the event.
    pub seq: u64,
    /// Its acknowledgement.
    pub acknowledged: Acknowledgement,
}
