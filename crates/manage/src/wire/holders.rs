//! The holder of a volume: the client that has attached it, and the signs of its life.

use crate::records::Attachment;
use pagemesh_base::layout::EpochNumber;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A sign of life of the client that has attached a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReportHolder {
    /// The epoch that the attach returned.
    #[schema(value_type = u32)]
    pub attachment: EpochNumber,
    /// Whether the client no longer serves the volume to programs. It may still store data, and
    /// detaches afterwards.
    pub ending: bool,
}

/// The client that has attached a volume, and the signs of its life.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HolderStatus {
    /// The client, if there is one.
    pub attached: Option<Attachment>,
    /// Its last sign of life since the manager started.
    pub sign: Option<HolderSign>,
    /// Microseconds without a sign of life: since the last one, or since the manager started.
    pub silent_us: u64,
}

/// The last sign of life of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HolderSign {
    /// Number of signs since the attach or since the manager started.
    pub count: u64,
    /// Whether the client no longer serves the volume.
    pub ending: bool,
}

/// Attaches a volume to a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AttachVolume {
    /// The name of the client, for people: 1 to 128 bytes.
    #[schema(min_length = 1, max_length = 128)]
    pub client: String,
    /// The client has just attached and reached no in-sync copy. The manager may then promote the
    /// asynchronous copy, if `auto_promote` allows it.
    #[serde(default)]
    pub unreachable: bool,
    /// The identity of the client's process, see `Attachment`: 1 to 128 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 128)]
    pub process: Option<String>,
    /// The attachment that may end by this attach, 0 for none. Another attachment, except an earlier one
    /// of the same client, is refused with `in-use`. If missing, any attachment ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>)]
    pub replaces: Option<EpochNumber>,
    /// The client receives snapshots. Only such a client attaches a volume that receives them, and no other volume.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub receive: bool,
}
