//! Bodies about snapshots, and about the cuts that clients make for them.

use super::BrickAddress;
pub use crate::snapshots::{CutResult, CutStep};
use crate::snapshots::{HoldTag, SnapshotName, SnapshotState};
use pagemesh_base::layout::{BrickId, EpochNumber, Layout, VolumeName};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::{IntoParams, ToSchema};

/// A snapshot of one volume to make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateSnapshot {
    /// Its name, unique among those of the volume.
    #[schema(value_type = crate::api::document::Name)]
    pub name: SnapshotName,
    /// Free texts: at most 8, of 1 to 128 bytes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 8)]
    pub labels: Vec<String>,
}

/// Snapshots of several volumes to make at one moment, with one name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateSnapshots {
    /// The volumes: 1 to 16, each once.
    #[schema(value_type = Vec<crate::api::document::Name>, min_items = 1, max_items = 16)]
    pub volumes: Vec<VolumeName>,
    /// The name of each snapshot.
    #[schema(value_type = crate::api::document::Name)]
    pub name: SnapshotName,
    /// Free texts: at most 8, of 1 to 128 bytes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 8)]
    pub labels: Vec<String>,
}

/// Snapshots that were made together: all or none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CreatedSnapshots {
    /// In the order of the request.
    pub snapshots: Vec<SnapshotInfo>,
    /// `true`: all of them show one moment.
    pub consistent: bool,
    /// Of several volumes that clients have attached: the longest time in µs that the changes of one waited for the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_us: Option<u64>,
}

/// A snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotInfo {
    /// The volume.
    #[schema(value_type = crate::api::document::Name)]
    pub volume: VolumeName,
    /// Its name.
    #[schema(value_type = crate::api::document::Name)]
    pub name: SnapshotName,
    /// Its epoch: it has every change with a lower one.
    #[schema(value_type = u32)]
    pub epoch: EpochNumber,
    /// Milliseconds since 1970.
    pub created_unix_ms: u64,
    /// `committed`; or `deleting` while bricks still drop it.
    pub state: SnapshotState,
    /// The size of the volume at that time; for `files`, the limit of all files together.
    pub size_bytes: u64,
    /// The tags that keep it from being deleted.
    #[schema(value_type = Vec<crate::api::document::Name>)]
    pub holds: Vec<HoldTag>,
    /// The texts of its maker.
    pub labels: Vec<String>,
    /// Its maker: the name of a token, or `cluster key`.
    pub made_by: String,
    /// The volumes that were cloned from it, and share pages with it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<crate::api::document::Name>)]
    pub clones: Vec<VolumeName>,
    /// The copies of the volume that lack it, or parts of it. The manager copies them from the other copies, but not to an
    /// asynchronous one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub missing_copies: usize,
    /// Whether an asynchronous copy is one of those. It gets the changes before the snapshot within seconds, or never.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub missing_on_replica: bool,
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// A snapshot, and the legs to read it from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotDetail {
    /// The same as in the list.
    pub info: SnapshotInfo,
    /// The volume's layout at that time, with the legs that have all of the snapshot. Its epoch is the snapshot's.
    #[schema(value_type = crate::api::document::Layout)]
    pub layout: Layout,
    /// The addresses of the bricks of these legs.
    #[schema(value_type = BTreeMap<String, BrickAddress>)]
    pub bricks: BTreeMap<BrickId, BrickAddress>,
}

/// The bytes of a snapshot, in one copy of the volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotSpaceInfo {
    /// The snapshot.
    #[schema(value_type = crate::api::document::Name)]
    pub name: SnapshotName,
    /// Its epoch.
    #[schema(value_type = u32)]
    pub epoch: EpochNumber,
    /// Whether the counted copies have all of it. Otherwise its bytes are too few: a copy that was away still gets it.
    pub complete: bool,
    /// Bytes that its deletion alone frees.
    pub exclusive_bytes: u64,
    /// Bytes that it keeps together with other snapshots.
    pub shared_bytes: u64,
    /// Bytes that it sees, with those that the volume still has.
    pub referenced_bytes: u64,
    /// Bytes that it sees and the snapshot before it does not.
    pub written_bytes: u64,
}

/// The bytes of a volume and its snapshots, in one copy, without their tables.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeSpaceReply {
    /// The volume.
    #[schema(value_type = crate::api::document::Name)]
    pub volume: VolumeName,
    /// Bytes of the volume itself.
    pub volume_bytes: u64,
    /// Bytes that only snapshots keep, with those that bricks still free.
    pub snapshot_bytes: u64,
    /// Bytes of the volume that the newest snapshot does not see.
    pub written_bytes: u64,
    /// Bytes that a deletion of the snapshots of `drop` frees.
    pub freed_bytes: u64,
    /// The oldest first.
    pub snapshots: Vec<SnapshotSpaceInfo>,
}

/// The snapshots whose deletion is asked about.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct CountSpace {
    /// Names of snapshots, with a comma between two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drop: Option<String>,
}

/// The result of a deletion of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeleteSnapshotReply {
    /// Slices that have not dropped the snapshot yet; the manager retries.
    pub pending_slices: usize,
}

/// The snapshots of a list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListSnapshots {
    /// Snapshots in one answer, 1 to 1000; 1000 if missing. `Link` has the next page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[param(minimum = 1, maximum = 1000)]
    pub limit: Option<usize>,
    /// Snapshots with a lower epoch: those that a list, newest first, has after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<u32>,
    /// The volume that `after` belongs to, in a list of all volumes. Volumes with lower names are left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[param(value_type = Option<String>, pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$")]
    pub after_volume: Option<VolumeName>,
    /// Snapshots with this text in their names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub search: Option<String>,
    /// Snapshots with this label.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Whether a hold keeps them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held: Option<bool>,
    /// `true`: those that bricks still drop, in place of those that exist.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deleting: bool,
}

/// How to delete a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct DeleteVolumeParams {
    /// `true` deletes it although a client has attached it.
    #[serde(default)]
    pub force: bool,
    /// `true` deletes its snapshots with it. Otherwise a volume with snapshots is refused.
    #[serde(default)]
    pub snapshots: bool,
}

/// A clone to make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateClone {
    /// The name of the new volume.
    #[schema(value_type = crate::api::document::Name)]
    pub name: VolumeName,
}

/// The progress of a promotion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CloneProgressReply {
    /// The clone.
    #[schema(value_type = crate::api::document::Name)]
    pub name: VolumeName,
    /// Parts of 2 MiB, over all copies, that it does not share any more.
    pub done: u64,
    /// All parts. When both are equal, the volume depends on nothing.
    pub all: u64,
}

/// A client's question for an order to cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct PollCut {
    /// The epoch that the attach returned.
    pub attachment: u32,
}

/// An order to cut: the client prepares the snapshot on all written legs, stamps later changes with its epoch, and
/// answers when all earlier changes have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CutOrder {
    /// The epoch of the snapshot.
    #[schema(value_type = u32)]
    pub epoch: EpochNumber,
    /// The part of the cut; all of it if missing.
    #[serde(default, skip_serializing_if = "CutStep::is_whole")]
    pub step: CutStep,
}

/// A client's answer to an order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AnswerCut {
    /// The epoch that the attach returned.
    #[schema(value_type = u32)]
    pub attachment: EpochNumber,
    /// The epoch of the order.
    #[schema(value_type = u32)]
    pub epoch: EpochNumber,
    /// The step of the order.
    #[serde(default, skip_serializing_if = "CutStep::is_whole")]
    pub step: CutStep,
    /// `done`, or `{"released": MICROSECONDS}`, or `{"layout-changed": REASON}`, or `{"failed": REASON}`.
    pub result: CutResult,
}
