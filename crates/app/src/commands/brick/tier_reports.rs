//! The tier of a brick's pool in its heartbeats, and the policies in the answers.

use pagemesh_base::units::PAGE_BYTES;
use pagemesh_brick::brick::Brick;
use pagemesh_manage::wire::{BrickTier, SliceTier};
use pagemesh_manage::{TierPolicy, digest_policies};
use pagemesh_pmem::Media;
use pagemesh_store::object::TierPolicy as PoolPolicy;
use std::sync::Arc;
use std::time::Instant;

/// The figures of the tier. None for a pool without disks behind memory.
pub fn report<M: Media + Send + Sync + 'static>(brick: &Arc<Brick<M>>) -> Option<BrickTier> {
    let tier = brick.tier_figures()?;
    let (recent_hits, recent_misses) = brick.recent_tier_touches(Instant::now());
    let policies = brick.tier_policies().into_iter();
    let policies = policies.map(|(slice, policy)| (slice, wire_policy(policy)));
    let bytes = |frames: u64| frames * PAGE_BYTES as u64;
    Some(BrickTier {
        memory_bytes: bytes(tier.usage.memory_frames),
        memory_free_bytes: bytes(tier.usage.memory_free),
        flash_bytes: bytes(tier.usage.flash_frames),
        flash_free_bytes: bytes(tier.usage.flash_free),
        recent_hits,
        recent_misses,
        demoted_pages: tier.demoted,
        promoted_pages: tier.promoted,
        abandoned_moves: tier.abandoned,
        waits: tier.waits,
        policies: digest_policies(policies),
    })
}

/// Has the pool obey the policies of a heartbeat answer.
pub fn apply<M: Media + Send + Sync + 'static>(brick: &Arc<Brick<M>>, tiers: Vec<SliceTier>) {
    let tiers = tiers
        .into_iter()
        .map(|it| (it.slice, pool_policy(it.policy)));
    if let Err(cause) = brick.set_tier_policies(&tiers.collect()) {
        // The next answer has them again.
        tracing::warn!(%cause, "the pool does not obey the policies of its tier yet");
    }
}

fn wire_policy(policy: PoolPolicy) -> TierPolicy {
    match policy {
        PoolPolicy::Automatic => TierPolicy::Auto,
        PoolPolicy::Memory => TierPolicy::Memory,
        PoolPolicy::Flash => TierPolicy::Flash,
    }
}

fn pool_policy(policy: TierPolicy) -> PoolPolicy {
    match policy {
        TierPolicy::Auto => PoolPolicy::Automatic,
        TierPolicy::Memory => PoolPolicy::Memory,
        TierPolicy::Flash => PoolPolicy::Flash,
    }
}
