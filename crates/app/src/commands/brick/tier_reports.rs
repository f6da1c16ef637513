//! The tier of a brick's pool in its heartbeats, and the policies in the answers.

use pagemesh_base::units::PAGE_BYTES;
use pagemesh_brick::brick::Brick;
use pagemesh_brick::tier::SlicePages;
use pagemesh_manage::wire::{self, BrickTier, COUNTED_SLICES_MAX, SliceTier};
use pagemesh_manage::{TierPolicy, digest_policies};
use pagemesh_pmem::Media;
use pagemesh_store::object::TierPolicy as PoolPolicy;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Unchanged counts are sent again after this time.
const REPEAT_INTERVAL: Duration = Duration::from_secs(60);

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

/// The last counts of pages that the manager has got.
#[derive(Default)]
pub struct SentCounts(Option<(Instant, Arc<Vec<SlicePages>>)>);

impl SentCounts {
    /// The counts for the next heartbeat: new ones, or the same again after a minute, as the manager forgets them with its
    /// end.
    pub fn due<M: Media>(&self, brick: &Brick<M>, now: Instant) -> Option<Arc<Vec<SlicePages>>> {
        let (counts, walks) = brick.tier_counts();
        let is_known = self.0.as_ref().is_some_and(|(at, sent)| {
            now.saturating_duration_since(*at) < REPEAT_INTERVAL && *sent == counts
        });
        (walks > 0 && !is_known).then_some(counts)
    }

    /// The manager has got counts.
    pub fn note(&mut self, counts: Option<Arc<Vec<SlicePages>>>, now: Instant) {
        if let Some(counts) = counts {
            self.0 = Some((now, counts));
        }
    }
}

/// Counts of pages in a heartbeat. Those of further slices are left out.
pub fn wire_counts(counts: &[SlicePages]) -> Vec<wire::SlicePages> {
    let first = counts.iter().take(COUNTED_SLICES_MAX);
    first
        .map(|it| wire::SlicePages {
            slice: it.slice,
            memory: it.memory,
            flash: it.flash,
        })
        .collect()
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
        TierPolicy::Auto | TierPolicy::Other => PoolPolicy::Automatic,
        TierPolicy::Memory => PoolPolicy::Memory,
        TierPolicy::Flash => PoolPolicy::Flash,
    }
}
