//! Bodies about pools with disks behind memory, and the policies of volumes on them.

use crate::tier_policy::TierPolicy;
use pagemesh_base::brick_name::BrickName;
use pagemesh_base::layout::{BrickId, SliceId, VolumeName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The tier of a brick's pool, by its last heartbeat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BrickTier {
    /// Bytes for pages in memory.
    pub memory_bytes: u64,
    /// Bytes of these that are free.
    pub memory_free_bytes: u64,
    /// Bytes for pages on the disks behind it.
    pub flash_bytes: u64,
    /// Bytes of these that are free.
    pub flash_free_bytes: u64,
    /// Pages that reads over tcp found in memory in the last minute. Reads of clients that map the pool do not count.
    pub recent_hits: u64,
    /// Pages that such reads found on flash.
    pub recent_misses: u64,
    /// Pages that were moved to flash since the brick started.
    pub demoted_pages: u64,
    /// Pages that were moved to memory since then, except by writes.
    pub promoted_pages: u64,
    /// Pages that changed while they were copied, and stayed.
    pub abandoned_moves: u64,
    /// How often a request waited for a demotion, because memory was full.
    pub waits: u64,
    /// The digest of the policies that the pool obeys.
    pub policies: u64,
}

impl BrickTier {
    /// Hits of the last minute per read page; none without such reads.
    #[must_use]
    pub fn hit_ratio(&self) -> Option<f64> {
        let reads = self.recent_hits.saturating_add(self.recent_misses);
        (reads > 0).then(|| self.recent_hits as f64 / reads as f64)
    }
}

/// Slices in a report, at most.
pub const COUNTED_SLICES_MAX: usize = 8192;

/// The pages of a slice, as the brick counted them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SlicePages {
    /// The slice.
    #[schema(value_type = uuid::Uuid)]
    pub slice: SliceId,
    /// Pages in memory.
    pub memory: u64,
    /// Pages on flash.
    pub flash: u64,
}

/// The bytes of a volume in pools with disks behind memory, in all copies together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TierBytes {
    /// Bytes in memory.
    pub memory_bytes: u64,
    /// Bytes on flash.
    pub flash_bytes: u64,
}

/// The policy of a slice, on its way to the brick. A heartbeat answer has either none or all slices with a policy other
/// than `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SliceTier {
    /// The slice.
    #[schema(value_type = uuid::Uuid)]
    pub slice: SliceId,
    /// Its policy.
    pub policy: TierPolicy,
}

/// The new policy of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetTier {
    /// Where its pages shall lie.
    #[serde(deserialize_with = "TierPolicy::known")]
    pub policy: TierPolicy,
}

/// Whether a brick obeys the policies of its volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TierEffect {
    /// It does.
    Applied,
    /// The answer to its next heartbeat has them.
    Pending,
    /// It is dead, and gets them when it returns.
    Away,
    /// Its pool has no disk behind memory, so policies have no effect there.
    NoTier,
    /// An effect of a later version.
    #[serde(other)]
    Other,
}

impl TierEffect {
    /// Its name in REST and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            TierEffect::Applied => "applied",
            TierEffect::Pending => "pending",
            TierEffect::Away => "away",
            TierEffect::NoTier => "no-tier",
            TierEffect::Other => "other",
        }
    }
}

/// A brick with legs of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeTierBrick {
    /// The UUID of its pool.
    #[schema(value_type = uuid::Uuid)]
    pub brick: BrickId,
    /// Its name, if it has one.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub name: Option<BrickName>,
    /// Whether it obeys the policy.
    pub effect: TierEffect,
}

/// The policy of a volume, and the bricks that obey it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeTier {
    /// Where its pages shall lie.
    pub policy: TierPolicy,
    /// The bricks with legs of the volume, by name.
    pub bricks: Vec<VolumeTierBrick>,
    /// Its bytes in memory and on flash, by the last counts of these bricks. Missing before the first count.
    #[serde(default)]
    pub held: Option<TierBytes>,
}

/// The policy of a named volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NamedVolumeTier {
    /// Its name.
    #[schema(value_type = crate::api::document::Name)]
    pub volume: VolumeName,
    /// Its policy and its bricks.
    #[serde(flatten)]
    pub tier: VolumeTier,
}
