//! All snapshots, in memory.
//!
//! Invariants: at most one snapshot of a volume that is not being deleted has a name. A layout is there as long as a
//! snapshot names it. A snapshot takes less than 500 bytes and its share of the layout.

use super::bookmark::BookmarkRecord;
use super::name::SnapshotName;
use super::record::{SnapshotLayout, SnapshotRecord, SnapshotState};
use pagemesh_base::layout::{EpochNumber, SliceId, VolumeName};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

/// Maximum of snapshots of one volume, with those that bricks still drop.
pub const VOLUME_SNAPSHOTS_MAX: usize = 10_000;
/// Maximum of snapshots of all volumes: memory holds all of them.
pub const SNAPSHOTS_MAX: usize = 100_000;

/// A snapshot, and its deletion as far as it got.
#[derive(Clone, Debug)]
pub(crate) struct SnapshotEntry {
    pub record: SnapshotRecord,
    /// Only of a snapshot that is being deleted.
    pub drop: Option<Box<DropProgress>>,
}

/// The progress of a deletion. A restarted manager begins anew, because bricks ignore epochs that they have dropped.
#[derive(Clone, Debug)]
pub(crate) struct DropProgress {
    pub since: Duration,
    /// The slices that have dropped the snapshot.
    pub dropped: BTreeSet<SliceId>,
}

/// A layout, and the number of snapshots with it.
#[derive(Debug)]
struct SharedLayout {
    layout: Arc<SnapshotLayout>,
    users: usize,
}

/// The snapshots of one volume.
#[derive(Debug, Default)]
pub(crate) struct VolumeSnapshots {
    entries: BTreeMap<EpochNumber, SnapshotEntry>,
    layouts: BTreeMap<EpochNumber, SharedLayout>,
}

/// All snapshots.
#[derive(Debug, Default)]
pub(crate) struct SnapshotTable {
    volumes: BTreeMap<VolumeName, VolumeSnapshots>,
    bookmarks: BTreeMap<VolumeName, BTreeMap<SnapshotName, BookmarkRecord>>,
    count: usize,
}

impl SnapshotEntry {
    pub(crate) fn is_live(&self) -> bool {
        self.record.state != SnapshotState::Deleting
    }
}

impl VolumeSnapshots {
    /// The snapshots from the newest to the oldest, below an epoch.
    pub(crate) fn newest_first(
        &self,
        below: Option<EpochNumber>,
    ) -> impl Iterator<Item = &SnapshotEntry> {
        let end = below.map_or(Bound::Unbounded, Bound::Excluded);
        let entries = self.entries.range((Bound::Unbounded, end));
        entries.rev().map(|(_, entry)| entry)
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = &SnapshotEntry> {
        self.entries.values()
    }

    pub(crate) fn live(&self) -> impl Iterator<Item = &SnapshotRecord> {
        let live = self.entries.values().filter(|entry| entry.is_live());
        live.map(|entry| &entry.record)
    }

    pub(crate) fn get(&self, epoch: EpochNumber) -> Option<&SnapshotEntry> {
        self.entries.get(&epoch)
    }

    /// The snapshot of this name that is not being deleted.
    pub(crate) fn find(&self, name: &SnapshotName) -> Option<&SnapshotRecord> {
        self.live().find(|record| record.name == *name)
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether a cut runs.
    pub(crate) fn is_preparing(&self) -> bool {
        self.live().any(|it| it.state == SnapshotState::Preparing)
    }

    /// The layout of a snapshot. Each snapshot in the table has one.
    pub(crate) fn layout(&self, record: &SnapshotRecord) -> Option<&Arc<SnapshotLayout>> {
        self.layouts.get(&record.layout).map(|it| &it.layout)
    }

    /// The layouts of all snapshots.
    pub(crate) fn layouts(&self) -> impl Iterator<Item = &SnapshotLayout> {
        self.layouts.values().map(|it| &*it.layout)
    }

    /// The layout that was used last.
    pub(crate) fn last_layout(&self) -> Option<&Arc<SnapshotLayout>> {
        self.layouts.last_key_value().map(|(_, it)| &it.layout)
    }
}

impl SnapshotTable {
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    pub(crate) fn of(&self, volume: &VolumeName) -> Option<&VolumeSnapshots> {
        self.volumes.get(volume)
    }

    /// The volumes that have any, from a name on.
    pub(crate) fn volumes(
        &self,
        from: Option<&VolumeName>,
    ) -> impl Iterator<Item = (&VolumeName, &VolumeSnapshots)> {
        let start = from.map_or(Bound::Unbounded, Bound::Included);
        self.volumes
            .range::<VolumeName, _>((start, Bound::Unbounded))
    }

    /// Adds a layout, before the first snapshot with it.
    pub(crate) fn put_layout(&mut self, volume: &VolumeName, layout: Arc<SnapshotLayout>) {
        let layouts = &mut self.volumes.entry(volume.clone()).or_default().layouts;
        layouts
            .entry(layout.first)
            .or_insert(SharedLayout { layout, users: 0 });
    }

    /// Adds a snapshot, or replaces it.
    pub(crate) fn put(&mut self, volume: &VolumeName, record: SnapshotRecord, now: Duration) {
        let of = self.volumes.entry(volume.clone()).or_default();
        let drop = (record.state == SnapshotState::Deleting).then(|| {
            let dropped = BTreeSet::new();
            Box::new(DropProgress {
                since: now,
                dropped,
            })
        });
        let layout = record.layout;
        let entry = SnapshotEntry { record, drop };
        if of.entries.insert(entry.record.epoch, entry).is_none() {
            self.count += 1;
            if let Some(shared) = of.layouts.get_mut(&layout) {
                shared.users += 1;
            }
        }
    }

    /// Removes a snapshot, and its layout with the last snapshot that has it.
    pub(crate) fn remove(&mut self, volume: &VolumeName, epoch: EpochNumber) {
        let Some(of) = self.volumes.get_mut(volume) else {
            return;
        };
        let Some(entry) = of.entries.remove(&epoch) else {
            return;
        };
        self.count -= 1;
        let layout = entry.record.layout;
        if let Some(shared) = of.layouts.get_mut(&layout) {
            shared.users -= 1;
            if shared.users == 0 {
                of.layouts.remove(&layout);
            }
        }
        if of.entries.is_empty() {
            self.volumes.remove(volume);
        }
    }

    /// The bookmarks of a volume, by name.
    pub(crate) fn bookmarks_of(
        &self,
        volume: &VolumeName,
    ) -> impl Iterator<Item = &BookmarkRecord> {
        self.bookmarks
            .get(volume)
            .into_iter()
            .flat_map(BTreeMap::values)
    }

    pub(crate) fn bookmark(
        &self,
        volume: &VolumeName,
        name: &SnapshotName,
    ) -> Option<&BookmarkRecord> {
        self.bookmarks.get(volume)?.get(name)
    }

    /// The bookmarks of all volumes.
    pub(crate) fn count_bookmarks(&self) -> usize {
        self.bookmarks.values().map(BTreeMap::len).sum()
    }

    pub(crate) fn put_bookmark(&mut self, volume: &VolumeName, record: BookmarkRecord) {
        let of = self.bookmarks.entry(volume.clone()).or_default();
        of.insert(record.name.clone(), record);
    }

    pub(crate) fn remove_bookmark(&mut self, volume: &VolumeName, name: &SnapshotName) {
        if let Some(of) = self.bookmarks.get_mut(volume) {
            of.remove(name);
            if of.is_empty() {
                self.bookmarks.remove(volume);
            }
        }
    }

    /// Removes all bookmarks of a volume.
    pub(crate) fn remove_bookmarks(&mut self, volume: &VolumeName) {
        self.bookmarks.remove(volume);
    }

    /// Removes all of a volume.
    pub(crate) fn remove_volume(&mut self, volume: &VolumeName) {
        self.remove_bookmarks(volume);
        if let Some(of) = self.volumes.remove(volume) {
            self.count -= of.entries.len();
        }
    }

    /// Notes that a slice has dropped a snapshot.
    pub(crate) fn note_dropped(&mut self, volume: &VolumeName, epoch: EpochNumber, slice: SliceId) {
        let of = self.volumes.get_mut(volume);
        let entry = of.and_then(|of| of.entries.get_mut(&epoch));
        if let Some(drop) = entry.and_then(|entry| entry.drop.as_mut()) {
            drop.dropped.insert(slice);
        }
    }

    /// The layouts that no snapshot has after these are removed.
    pub(crate) fn layouts_without(
        &self,
        removed: &[(VolumeName, EpochNumber)],
    ) -> Vec<(Uuid, EpochNumber)> {
        let mut counts: BTreeMap<(&VolumeName, EpochNumber), usize> = BTreeMap::new();
        for (volume, epoch) in removed {
            let entry = self.of(volume).and_then(|of| of.get(*epoch));
            if let Some(entry) = entry {
                *counts.entry((volume, entry.record.layout)).or_default() += 1;
            }
        }
        let unused = counts.into_iter().filter_map(|((volume, layout), count)| {
            let shared = self.of(volume)?.layouts.get(&layout)?;
            (shared.users <= count).then_some((shared.layout.volume, layout))
        });
        unused.collect()
    }
}
