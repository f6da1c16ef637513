//! All volumes with their summaries, so that a list of volumes, a list of bricks and the summary of
//! the cluster walk over no legs.
//!
//! Invariants: a summary equals the one that its record and the living bricks give; `insert`, `remove`
//! and `set_alive` renew it. A property test compares both after random histories.

use crate::records::VolumeRecord;
use crate::slices::{promised_slices, slice_locations};
use crate::tier_policy::TierPolicy;
use crate::wire::VolumeHealth;
use pagemesh_base::layout::{BrickId, Column, EpochNumber, Layout, LegState, SliceId, VolumeName};
use std::collections::{BTreeMap, BTreeSet};

/// The state of a volume that its legs decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VolumeSummary {
    pub health: VolumeHealth,
    /// Bytes of the layout.
    pub layout_bytes: u64,
    /// Whether a column has a leg that misses writes.
    pub is_degraded: bool,
    /// Legs on bricks that do not live.
    pub unreachable_legs: usize,
}

/// A volume and its summary.
#[derive(Debug)]
pub(crate) struct VolumeEntry {
    pub record: VolumeRecord,
    pub summary: VolumeSummary,
}

/// All volumes, by name.
#[derive(Debug, Default)]
pub(crate) struct VolumeTable {
    volumes: BTreeMap<VolumeName, VolumeEntry>,
    /// The number of legs of each volume on a brick.
    legs_on: BTreeMap<BrickId, BTreeMap<VolumeName, usize>>,
    /// The slices with a policy other than the automatic one.
    tiers: BTreeMap<BrickId, BTreeMap<SliceId, TierPolicy>>,
    /// Bytes and slices that volumes have on a brick.
    promised: BTreeMap<BrickId, (u128, usize)>,
    /// The clones of each snapshot.
    clones: BTreeMap<(VolumeName, EpochNumber), BTreeSet<VolumeName>>,
    /// The bricks that count as living in summaries.
    living: BTreeSet<BrickId>,
}

impl VolumeSummary {
    /// The summary of a record, while these bricks live.
    pub(crate) fn new(record: &VolumeRecord, is_living: impl Fn(BrickId) -> bool) -> VolumeSummary {
        let layout = &record.layout_state.layout;
        let unreachable = slice_locations(&layout.segments).filter(|it| !is_living(it.brick));
        VolumeSummary {
            health: health(layout),
            layout_bytes: layout.size_bytes(),
            is_degraded: layout.columns().any(|column| column.lost_since.0 != 0),
            unreachable_legs: unreachable.count(),
        }
    }
}

fn health(layout: &Layout) -> VolumeHealth {
    let columns = layout.columns();
    let has = |state| {
        let mut legs = columns.clone().flat_map(|column| &column.legs);
        legs.any(|leg| leg.state == state)
    };
    if has(LegState::Stale) {
        VolumeHealth::Degraded
    } else if has(LegState::Syncing) {
        VolumeHealth::Syncing
    } else {
        VolumeHealth::InSync
    }
}

impl VolumeTable {
    pub(crate) fn new(records: Vec<VolumeRecord>) -> VolumeTable {
        let mut table = VolumeTable::default();
        for record in records {
            table.insert(record.layout_state.layout.name.clone(), record);
        }
        table
    }

    pub(crate) fn get(&self, name: &VolumeName) -> Option<&VolumeRecord> {
        self.volumes.get(name).map(|entry| &entry.record)
    }

    pub(crate) fn entry(&self, name: &VolumeName) -> Option<&VolumeEntry> {
        self.volumes.get(name)
    }

    pub(crate) fn entries(&self) -> &BTreeMap<VolumeName, VolumeEntry> {
        &self.volumes
    }

    pub(crate) fn contains_key(&self, name: &VolumeName) -> bool {
        self.volumes.contains_key(name)
    }

    pub(crate) fn len(&self) -> usize {
        self.volumes.len()
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &VolumeName> {
        self.volumes.keys()
    }

    /// The names of the volumes with legs on a brick.
    pub(crate) fn on_brick(&self, brick: BrickId) -> impl Iterator<Item = &VolumeName> {
        self.legs_on
            .get(&brick)
            .into_iter()
            .flat_map(BTreeMap::keys)
    }

    /// The volumes that were cloned from a snapshot.
    pub(crate) fn clones_of(&self, volume: &VolumeName, snapshot: EpochNumber) -> Vec<VolumeName> {
        let clones = self.clones.get(&(volume.clone(), snapshot));
        clones.into_iter().flatten().cloned().collect()
    }

    /// The slices on a brick with a policy other than the automatic one.
    pub(crate) fn tier_policies(
        &self,
        brick: BrickId,
    ) -> impl Iterator<Item = (SliceId, TierPolicy)> {
        let slices = self.tiers.get(&brick).into_iter().flatten();
        slices.map(|(slice, policy)| (*slice, *policy))
    }

    /// Bytes and slices of volumes, by brick.
    pub(crate) fn promised(&self) -> BTreeMap<BrickId, (u64, usize)> {
        let sums = self.promised.iter();
        sums.map(|(brick, (bytes, slices))| {
            let bytes = u64::try_from(*bytes).unwrap_or(u64::MAX);
            (*brick, (bytes, *slices))
        })
        .collect()
    }

    /// Adds a volume, or replaces it.
    pub(crate) fn insert(&mut self, name: VolumeName, record: VolumeRecord) {
        self.remove(&name);
        let layout = &record.layout_state.layout;
        for place in slice_locations(&layout.segments) {
            let volumes = self.legs_on.entry(place.brick).or_default();
            *volumes.entry(name.clone()).or_default() += 1;
            if !record.tier.is_auto() {
                let slices = self.tiers.entry(place.brick).or_default();
                slices.insert(place.slice, record.tier);
            }
        }
        for place in promised_slices(&layout.segments, record.files_bytes) {
            let (bytes, slices) = self.promised.entry(place.brick).or_default();
            *bytes += u128::from(place.bytes);
            *slices += 1;
        }
        if let Some(origin) = &record.origin {
            let key = (origin.volume.clone(), origin.epoch);
            self.clones.entry(key).or_default().insert(name.clone());
        }
        let summary = VolumeSummary::new(&record, |brick| self.living.contains(&brick));
        self.volumes.insert(name, VolumeEntry { record, summary });
    }

    pub(crate) fn remove(&mut self, name: &VolumeName) {
        let Some(VolumeEntry { record, .. }) = self.volumes.remove(name) else {
            return;
        };
        let layout = &record.layout_state.layout;
        for place in promised_slices(&layout.segments, record.files_bytes) {
            if let Some(volumes) = self.legs_on.get_mut(&place.brick) {
                volumes.remove(name);
            }
            if let Some((bytes, slices)) = self.promised.get_mut(&place.brick) {
                *bytes -= u128::from(place.bytes);
                *slices -= 1;
            }
            if let Some(slices) = self.tiers.get_mut(&place.brick) {
                slices.remove(&place.slice);
            }
        }
        if let Some(origin) = record.origin {
            let key = (origin.volume, origin.epoch);
            if let Some(clones) = self.clones.get_mut(&key) {
                clones.remove(name);
                if clones.is_empty() {
                    self.clones.remove(&key);
                }
            }
        }
        self.tiers.retain(|_, slices| !slices.is_empty());
        self.legs_on.retain(|_, volumes| !volumes.is_empty());
        self.promised.retain(|_, (_, slices)| *slices > 0);
    }

    /// The volumes with a column that has no in-sync leg on a living brick.
    pub(crate) fn count_unusable(&self) -> usize {
        let is_usable = |column: &Column| {
            let mut legs = column.legs.iter();
            legs.any(|leg| leg.state == LegState::InSync && self.is_living(leg.brick))
        };
        let impaired = self
            .volumes
            .values()
            .filter(|it| it.summary.unreachable_legs > 0);
        let unusable = impaired.filter(|it| {
            let mut columns = it.record.layout_state.layout.columns();
            !columns.all(is_usable)
        });
        unusable.count()
    }

    pub(crate) fn is_living(&self, brick: BrickId) -> bool {
        self.living.contains(&brick)
    }

    /// Counts a brick as living or not; returns the volumes whose summaries change.
    pub(crate) fn set_living(&mut self, brick: BrickId, is_living: bool) -> Vec<VolumeName> {
        let is_changed = match is_living {
            true => self.living.insert(brick),
            false => self.living.remove(&brick),
        };
        let volumes = self.legs_on.get(&brick).filter(|_| is_changed);
        let mut changed = Vec::new();
        for (name, legs) in volumes.into_iter().flatten() {
            if let Some(entry) = self.volumes.get_mut(name) {
                let unreachable = &mut entry.summary.unreachable_legs;
                *unreachable = match is_living {
                    true => unreachable.saturating_sub(*legs),
                    false => *unreachable + legs,
                };
                changed.push(name.clone());
            }
        }
        changed
    }
}
