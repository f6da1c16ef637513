//! Bodies about bricks: heartbeats, scrubs of pools, and the list.

use super::devices::{BrickDevice, BrickDevices, DeviceRequest};
use super::tier::{BrickTier, SlicePages, SliceTier};
use pagemesh_base::brick_name::{BrickLabel, BrickName};
use pagemesh_base::durability::Durability;
use pagemesh_base::layout::BrickId;
pub use pagemesh_base::scrub::ScrubReport;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

/// The state that a brick reports with each heartbeat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BrickRegistration {
    /// The UUID of the brick's pool; the same as in the path.
    #[schema(value_type = Uuid)]
    pub brick: BrickId,
    /// The name of the brick: 1 to 64 of `A-Z a-z 0-9 . _ -`, not starting with a dot or a dash,
    /// and no UUID. If missing, the brick keeps its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<crate::api::document::Name>)]
    pub name: Option<BrickName>,
    /// Whether the name is only for a brick that has none yet. The manager then appends `-2`, `-3`,
    /// … if another brick has it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub name_is_default: bool,
    /// `host:port` of the brick's tcp transport.
    pub address: String,
    /// The unix socket of the brick for clients on its machine: they map the pool, or send requests to a pool that cannot be mapped. An absolute path.
    #[serde(default)]
    pub map_socket: Option<String>,
    /// The failure domain of the brick, such as a machine or a rack.
    #[schema(min_length = 1, max_length = 64)]
    pub domain: String,
    /// The durability class of its pool.
    #[schema(value_type = crate::api::document::Durability)]
    pub durability: Durability,
    /// Bytes that slices can use in total.
    #[schema(minimum = 1)]
    pub capacity_bytes: u64,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Rises with each opening of the pool: a later incarnation replaces an earlier one.
    pub incarnation: u32,
    /// Open sessions.
    #[serde(default)]
    pub sessions: u32,
    /// The scrubs of its pool.
    #[serde(default)]
    #[schema(value_type = Option<crate::api::document::BrickScrub>)]
    pub scrub: Option<BrickScrub>,
    /// The devices of its pool. If missing, the brick cannot change them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<BrickDevices>,
    /// The tier of its pool. Missing if the pool has no disk behind memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier: Option<BrickTier>,
    /// The pages of its slices, if the tier has counted them anew: at most 8192 slices. If missing, the last ones hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier_pages: Option<Vec<SlicePages>>,
}

impl BrickRegistration {
    /// The name that the brick insists on, if it has got another one.
    #[must_use]
    pub fn name_kept_from(&self, assigned: Option<&BrickName>) -> Option<&BrickName> {
        let asked = self.name.as_ref().filter(|_| !self.name_is_default);
        asked.filter(|asked| assigned != Some(*asked))
    }
}

/// Whether a brick scrubs its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ScrubState {
    /// No scrub is planned.
    Off,
    /// The next scrub waits for its time.
    Waiting,
    /// A scrub is running.
    Running,
}

/// The scrubs of a brick's pool since it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrickScrub {
    /// The current state.
    pub state: ScrubState,
    /// Completed scrubs.
    pub passes: u64,
    /// Progress of the running scrub, in percent.
    pub progress_percent: Option<u8>,
    /// Milliseconds until the next scrub, if none is running.
    pub next_in_ms: Option<u64>,
    /// Findings of the running scrub so far.
    pub pass: Option<ScrubReport>,
    /// Findings of the last completed scrub.
    pub last: Option<ScrubReport>,
    /// Milliseconds since the last completed scrub.
    pub ended_ms_ago: Option<u64>,
    /// Corrections by all scrubs together.
    #[serde(flatten, with = "corrected_keys")]
    pub corrected: u64,
    /// The scrub request that the brick carried out last.
    #[serde(default)]
    pub fulfilled: Option<Uuid>,
}

/// The JSON keys of [`BrickScrub::corrected`]: its name and the earlier one, which a manager of the previous version requires
/// in heartbeats. Without it the brick would count as dead.
mod corrected_keys {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct Keys {
        corrected: Option<u64>,
        mended: Option<u64>,
    }

    #[allow(clippy::trivially_copy_pass_by_ref)]
    pub(super) fn serialize<S: Serializer>(corrected: &u64, to: S) -> Result<S::Ok, S::Error> {
        let keys = Keys {
            corrected: Some(*corrected),
            mended: Some(*corrected),
        };
        keys.serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
        let keys = Keys::deserialize(from)?;
        let found = keys.corrected.or(keys.mended);
        found.ok_or_else(|| D::Error::missing_field("corrected"))
    }
}

impl BrickScrub {
    /// Structures that are still damaged, by the running scrub or else by the last one.
    #[must_use]
    pub fn damaged(&self) -> u64 {
        let found = [self.pass, self.last];
        let damaged = found.iter().flatten().map(|found| found.damaged);
        damaged.max().unwrap_or(0)
    }
}

/// Asks a brick to start or stop a scrub of its pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ScrubBrick {
    /// Stop the running scrub instead of starting one.
    #[serde(default)]
    pub stop: bool,
}

/// A scrub request on its way to the brick. Each heartbeat answer repeats it until the brick
/// reports it as carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ScrubRequest {
    /// The id of the request, so that the brick carries it out only once.
    pub id: Uuid,
    /// Stop the running scrub instead of starting one.
    pub stop: bool,
}

/// The answer to a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HeartbeatReply {
    /// Milliseconds until the next heartbeat is due.
    pub interval_ms: u64,
    /// A brick without a heartbeat for this many milliseconds counts as dead.
    pub dead_after_ms: u64,
    /// The pending scrub request, if any.
    #[serde(default)]
    pub scrub: Option<ScrubRequest>,
    /// The pending requests to change the devices of its pool, the oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceRequest>,
    /// All slices with a policy other than `auto`, if the pool obeys other policies. Slices that are not named are `auto`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tiers: Option<Vec<SliceTier>>,
    /// The name of the brick, if it has one.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub name: Option<BrickName>,
}

/// A brick.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BrickInfo {
    /// The UUID of the brick's pool.
    #[schema(value_type = Uuid)]
    pub brick: BrickId,
    /// The name of the brick, if it has one.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub name: Option<BrickName>,
    /// Whether its heartbeats arrive.
    pub alive: bool,
    /// Milliseconds since the last heartbeat; missing if this manager received none since its
    /// start.
    pub heartbeat_age_ms: Option<u64>,
    /// `host:port` of the brick's tcp transport.
    pub address: String,
    /// The unix socket of the brick for clients on its machine: they map the pool, or send requests to a pool that cannot be mapped.
    pub map_socket: Option<String>,
    /// The failure domain of the brick.
    pub domain: String,
    /// The durability class of its pool.
    #[schema(value_type = crate::api::document::Durability)]
    pub durability: Durability,
    /// Bytes that slices can use in total.
    pub capacity_bytes: u64,
    /// Bytes in use, by the last heartbeat.
    pub used_bytes: u64,
    /// Bytes of all slices placed on the brick, written or not.
    pub provisioned_bytes: u64,
    /// Slices of volumes.
    pub slices: usize,
    /// Slices of deleted volumes that it still holds.
    pub pending_deletions: usize,
    /// Open sessions, by the last heartbeat.
    pub sessions: u32,
    /// The scrubs of its pool, by the last heartbeat.
    #[serde(default)]
    #[schema(value_type = Option<crate::api::document::BrickScrub>)]
    pub scrub: Option<BrickScrub>,
    /// The scrub request that the brick has not carried out yet.
    #[serde(default, alias = "scrub_wish")]
    pub scrub_request: Option<ScrubRequest>,
    /// The devices of its pool, by the last heartbeat; missing if the brick does not report them.
    #[serde(default)]
    pub devices: Option<Vec<BrickDevice>>,
    /// The tier of its pool, by the last heartbeat; missing if the pool has no disk behind memory.
    #[serde(default)]
    pub tier: Option<BrickTier>,
}

impl BrickInfo {
    /// The brick in a message for people.
    #[must_use]
    pub fn label(&self) -> BrickLabel {
        BrickLabel {
            id: self.brick,
            name: self.name.clone(),
        }
    }
}
