//! What the store keeps, as JSON: fields may be added with a default, so that
//! an older store is read by a newer manager.

use crate::durability::Durability;
use crate::ledger::Ledger;
use crate::shape::Shape;
use pagemesh_base::layout::{BrickId, EpochNumber, SliceId};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A brick, as far as it outlives its heartbeats.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrickRecord {
    /// The UUID of its pool.
    pub brick: BrickId,
    /// `host:port`.
    pub address: String,
    /// The unix socket of its `map` transport.
    pub map_socket: Option<String>,
    /// What fails together with it.
    pub domain: String,
    /// Its class.
    pub durability: Durability,
    /// Bytes that slices can use.
    pub capacity_bytes: u64,
    /// Bytes in use when last written down; the present figure is in memory.
    pub used_bytes: u64,
    /// How often its pool had been opened, when it last registered.
    #[serde(default)]
    pub incarnation: u32,
}

/// A volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRecord {
    /// Layout and rounds.
    pub ledger: Ledger,
    /// What was asked for; growing keeps it.
    pub shape: Shape,
    /// The class of all its bricks.
    pub durability: Durability,
    /// Who has it.
    pub attachment: Option<Attachment>,
    /// Why legs are not in-sync.
    pub notes: Vec<Note>,
    /// Seconds since 1970.
    pub created_unix_s: u64,
    /// Bytes that the files in it may take, if it holds files: what its bricks
    /// are promised to it, while the volume itself is far larger.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files_bytes: Option<u64>,
    /// Whether its asynchronous copy is promoted for who can reach no in-sync one, while
    /// every brick with one is dead.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub auto_promote: bool,
}

/// Who has a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Attachment {
    /// What the client calls itself.
    pub client: String,
    /// The epoch that the attach gave; it names the attachment.
    #[schema(value_type = u32)]
    pub epoch: EpochNumber,
    /// Seconds since 1970.
    pub since_unix_s: u64,
}

/// Why a leg is not in-sync.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Note {
    /// Segment of the layout.
    pub segment: usize,
    /// Column of the segment.
    pub column: usize,
    /// Leg of the column.
    pub leg: usize,
    /// What the client said.
    pub text: String,
    /// Seconds since 1970.
    pub since_unix_s: u64,
}

/// A slice that must not be there: to delete, or about to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Doomed {
    /// Where.
    pub brick: BrickId,
    /// Which.
    pub slice: SliceId,
    /// Whether a request to make it may still be under way, so that a brick
    /// that does not know it now may know it later.
    pub uncertain: bool,
}
