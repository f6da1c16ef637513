//! The records of the store, as JSON. New fields need a default, so that a newer manager reads an
//! older store.

use crate::label_text::VolumeLabels;
use crate::layout_state::LayoutState;
use crate::rollback::Rollback;
use crate::shape::Shape;
use crate::snapshots::SnapshotName;
use crate::tier_policy::TierPolicy;
use pagemesh_base::brick_name::{BrickLabel, BrickName};
use pagemesh_base::durability::Durability;
use pagemesh_base::layout::{BrickId, EpochNumber, SliceId, VolumeName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The state of a brick that outlives its heartbeats.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrickRecord {
    /// The UUID of the brick's pool.
    pub brick: BrickId,
    /// Its name; a store of an earlier version has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<BrickName>,
    /// `host:port`.
    pub address: String,
    /// The unix socket of the brick's `map` transport.
    pub map_socket: Option<String>,
    /// The failure domain of the brick.
    pub domain: String,
    /// The durability class of the brick.
    pub durability: Durability,
    /// Bytes that slices can use.
    pub capacity_bytes: u64,
    /// Bytes in use when the record was stored; memory holds the current number.
    pub used_bytes: u64,
    /// The number of openings of the pool at its last registration.
    #[serde(default)]
    pub incarnation: u32,
    /// Whether an event has reported that its heartbeats are missing, and none that they arrive
    /// again. A restarted manager thus reports neither a second time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reported_lost: bool,
}

impl BrickRecord {
    /// How messages name the brick.
    #[must_use]
    pub fn label(&self) -> BrickLabel {
        BrickLabel {
            id: self.brick,
            name: self.name.clone(),
        }
    }
}

/// A volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRecord {
    /// The layout.
    #[serde(rename = "ledger")]
    pub layout_state: LayoutState,
    /// The requested shape; growing keeps it.
    pub shape: Shape,
    /// The class of all its bricks.
    pub durability: Durability,
    /// The client that has attached the volume, if any.
    pub attachment: Option<Attachment>,
    /// The reasons of legs that are not in-sync.
    pub notes: Vec<LegNote>,
    /// Seconds since 1970.
    pub created_unix_s: u64,
    /// The limit of all files together, if the volume holds files. Bricks promise this many bytes,
    /// while the address space of the volume is far larger.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files_bytes: Option<u64>,
    /// Whether the manager may promote the asynchronous copy for a client that reaches no in-sync
    /// copy, while every brick with an in-sync copy is dead.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub auto_promote: bool,
    /// Where its pages lie in pools with disks behind memory.
    #[serde(default, skip_serializing_if = "TierPolicy::is_default")]
    pub tier: TierPolicy,
    /// The snapshot that it was cloned from, as long as it shares pages with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<CloneOrigin>,
    /// Of a volume that receives snapshots of another one: the epoch of the last attachment of a receiver, or 0. It is read-only for all
    /// others until it is promoted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub received: Option<EpochNumber>,
    /// The rollback to a snapshot that has not ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollback: Option<Rollback>,
    /// The times that it may have got an earlier content: rollbacks, and promotions of asynchronous copies.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub content_returns: u64,
    /// Keys with values, by which schedules select it.
    #[serde(default, skip_serializing_if = "VolumeLabels::is_empty")]
    pub labels: VolumeLabels,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The snapshot that a volume was cloned from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CloneOrigin {
    /// The volume of the snapshot.
    #[schema(value_type = crate::api::document::Name)]
    pub volume: VolumeName,
    /// The name of the snapshot.
    #[schema(value_type = crate::api::document::Name)]
    pub snapshot: SnapshotName,
    /// Its epoch.
    #[schema(value_type = u32)]
    pub epoch: EpochNumber,
}

/// The attachment of a volume to a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Attachment {
    /// The name of the client, for people.
    pub client: String,
    /// The epoch that the attach returned; it names the attachment.
    #[schema(value_type = u32)]
    pub epoch: EpochNumber,
    /// Seconds since 1970.
    pub since_unix_s: u64,
    /// The identity of the client's process: its machine's boot, process namespace, number and start
    /// time. A later client on that machine learns from it whether the process runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<String>,
}

/// The reason why a leg is not in-sync.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LegNote {
    /// Segment of the layout.
    pub segment: usize,
    /// Column of the segment.
    pub column: usize,
    /// Leg of the column.
    pub leg: usize,
    /// The client's reason.
    pub text: String,
    /// Seconds since 1970.
    pub since_unix_s: u64,
}

/// A slice that must not exist: one to delete, or one about to be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PendingDelete {
    /// The brick of the slice.
    pub brick: BrickId,
    /// The slice.
    pub slice: SliceId,
    /// Whether a request to create the slice may still be on its way. The brick may then create the
    /// slice after it has answered that there is none.
    pub uncertain: bool,
}
