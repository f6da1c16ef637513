//! The body about the whole cluster.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The cluster at a glance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterStatus {
    /// The manager's version.
    pub version: String,
    /// Known bricks.
    pub bricks: usize,
    /// Bricks that are alive.
    pub bricks_alive: usize,
    /// Capacity of all bricks in bytes.
    pub capacity_bytes: u64,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes of all slices, written or not.
    pub provisioned_bytes: u64,
    /// Bytes of slices that a brick may be promised, for each byte of capacity.
    pub overprovision_factor: u64,
    /// Volumes.
    pub volumes: usize,
    /// Attached volumes.
    pub volumes_attached: usize,
    /// Volumes with a leg that is stale or syncing.
    pub volumes_degraded: usize,
    /// Slices of deleted volumes that bricks still hold.
    pub pending_deletions: usize,
    /// Bricks with a running scrub.
    #[serde(default)]
    pub bricks_scrubbing: usize,
    /// Corrections by pool scrubs since the bricks started.
    #[serde(default, alias = "scrubs_mended")]
    pub scrubs_corrected: u64,
    /// Structures that scrubs found damaged and could not correct.
    #[serde(default)]
    pub scrubs_damaged: u64,
    /// Whether the manager's store failed to write a change, so that it takes none.
    #[serde(default)]
    pub store_failed: bool,
    /// Schedules that are enabled.
    #[serde(default)]
    pub schedules: usize,
    /// Of these, the late ones: the newest snapshot of a volume is older than the warning age.
    #[serde(default)]
    pub schedules_warning: usize,
    /// Those with a newest snapshot that is older than the critical age.
    #[serde(default)]
    pub schedules_critical: usize,
}
