//! The policies of volumes in pools with disks behind memory.
//!
//! A heartbeat of a brick with such a pool has a digest of the policies there. If the digest differs from the one of the
//! brick's volumes, the answer has all policies that are not `auto`. So a brick that was away, and a new leg, get them, too.
//!
//! Invariant: the store has a policy before any brick gets it.

use crate::events::EventDraft;
use crate::fault::Fault;
use crate::manager::{BrickState, Manager, ManagerState};
use crate::records::VolumeRecord;
use crate::slices::slice_locations;
use crate::tier_policy::digest_policies;
use crate::wire::{
    BrickRegistration, BrickTier, COUNTED_SLICES_MAX, NamedVolumeTier, SetTier, SlicePages,
    SliceTier, TierBytes, TierEffect, VolumeTier, VolumeTierBrick,
};
use pagemesh_base::layout::{BrickId, SliceId, VolumeName};
use pagemesh_base::units::PAGE_BYTES;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

impl Manager {
    /// Sets where the pages of a volume lie. Bricks obey from the answer to their next heartbeat on.
    ///
    /// # Errors
    /// When there is no such volume, it has changed since a state that the request expects, or the store fails.
    pub fn set_tier(&self, name: &VolumeName, request: SetTier) -> Result<VolumeTier, Fault> {
        let mut book = self.state();
        let mut record = book.volume(name)?.clone();
        self.check_volume_unchanged(&record)?;
        if record.tier != request.policy {
            record.tier = request.policy;
            let changed = EventDraft::tier_changed(name, &self.actor(), request.policy);
            self.commit_volume(&mut book, &record, vec![changed])?;
        }
        Ok(self.tier_of(&book, &record))
    }

    /// The policy of a volume, and the bricks that obey it.
    ///
    /// # Errors
    /// When there is no such volume.
    pub fn volume_tier(&self, name: &VolumeName) -> Result<VolumeTier, Fault> {
        let book = self.state();
        Ok(self.tier_of(&book, book.volume(name)?))
    }

    /// The volumes with a policy other than `auto`, or with a leg in a pool with disks behind memory, by name.
    #[must_use]
    pub fn volume_tiers(&self) -> Vec<NamedVolumeTier> {
        let book = self.state();
        let is_tiered = |id: &BrickId| book.bricks.get(id).is_some_and(|it| it.tier.is_some());
        let has_tier = |record: &VolumeRecord| {
            let mut slices = slice_locations(&record.layout_state.layout.segments);
            !record.tier.is_auto() || slices.any(|it| is_tiered(&it.brick))
        };
        let mut effects = BTreeMap::new();
        let entries = book.volumes.entries().iter();
        let shown = entries.filter(|(_, entry)| has_tier(&entry.record));
        let tiers = shown.map(|(name, entry)| NamedVolumeTier {
            volume: name.clone(),
            tier: self.tier_with(&book, &entry.record, &mut effects),
        });
        tiers.collect()
    }

    fn tier_of(&self, book: &ManagerState, record: &VolumeRecord) -> VolumeTier {
        self.tier_with(book, record, &mut BTreeMap::new())
    }

    /// The tier of a volume. The effect on a brick costs its slices, so that `effects` keeps it.
    fn tier_with(
        &self,
        book: &ManagerState,
        record: &VolumeRecord,
        effects: &mut BTreeMap<BrickId, TierEffect>,
    ) -> VolumeTier {
        let slices = slice_locations(&record.layout_state.layout.segments);
        let bricks: BTreeSet<BrickId> = slices.map(|it| it.brick).collect();
        let bricks = bricks.into_iter().map(|id| VolumeTierBrick {
            brick: id,
            name: book.label(id).name,
            effect: *effects
                .entry(id)
                .or_insert_with(|| self.tier_effect(book, id)),
        });
        let mut bricks: Vec<VolumeTierBrick> = bricks.collect();
        bricks.sort_by(|one, other| one.name.cmp(&other.name));
        VolumeTier {
            policy: record.tier,
            bricks,
            held: held_bytes(book, record),
        }
    }

    fn tier_effect(&self, book: &ManagerState, id: BrickId) -> TierEffect {
        match book.bricks.get(&id) {
            Some(brick) if self.is_alive(brick) => match &brick.tier {
                None => TierEffect::NoTier,
                Some(tier) if obeys(book, id, tier) => TierEffect::Applied,
                Some(_) => TierEffect::Pending,
            },
            _ => TierEffect::Away,
        }
    }
}

/// Whether a brick obeys the policies of its slices.
fn obeys(book: &ManagerState, brick: BrickId, reported: &BrickTier) -> bool {
    reported.policies == digest_policies(book.volumes.tier_policies(brick))
}

/// The policies of a brick's slices, if the brick obeys others.
pub(crate) fn policies_to_send(
    book: &ManagerState,
    brick: BrickId,
    reported: &BrickTier,
) -> Option<Vec<SliceTier>> {
    let send = |(slice, policy)| SliceTier { slice, policy };
    let policies = || book.volumes.tier_policies(brick).map(send).collect();
    (!obeys(book, brick, reported)).then(policies)
}

/// The bytes of the volume's slices that bricks have counted.
fn held_bytes(book: &ManagerState, record: &VolumeRecord) -> Option<TierBytes> {
    let slices = slice_locations(&record.layout_state.layout.segments);
    let counted = slices.filter_map(|it| book.bricks.get(&it.brick)?.tier_pages.get(&it.slice));
    let bytes = |pages: u64| pages.saturating_mul(PAGE_BYTES as u64);
    counted.fold(None, |sum, pages| {
        let sum: TierBytes = sum.unwrap_or_default();
        Some(TierBytes {
            memory_bytes: sum.memory_bytes.saturating_add(bytes(pages.memory)),
            flash_bytes: sum.flash_bytes.saturating_add(bytes(pages.flash)),
        })
    })
}

/// The tier in a heartbeat.
pub(crate) struct TierReport {
    pub tier: Option<BrickTier>,
    pages: Option<Arc<BTreeMap<SliceId, SlicePages>>>,
}

impl TierReport {
    pub(crate) fn new(registration: &BrickRegistration) -> TierReport {
        let by_slice = |list: &Vec<SlicePages>| {
            let first = list.iter().take(COUNTED_SLICES_MAX);
            Arc::new(first.map(|it| (it.slice, *it)).collect())
        };
        TierReport {
            tier: registration.tier,
            pages: registration.tier_pages.as_ref().map(by_slice),
        }
    }

    /// The counts after the heartbeat.
    pub(crate) fn pages_after(
        self,
        known: Option<&BrickState>,
    ) -> Arc<BTreeMap<SliceId, SlicePages>> {
        match (self.tier, self.pages, known) {
            (None, ..) | (_, None, None) => Arc::default(),
            (_, Some(pages), _) => pages,
            (_, None, Some(known)) => known.tier_pages.clone(),
        }
    }
}
