//! Lists of snapshots, and the details of one.

use crate::call::RecordTag;
use crate::fault::Fault;
use crate::manager::{Manager, ManagerState};
use crate::slices::slice_locations;
use crate::snapshots::{
    SnapshotFault, SnapshotName, SnapshotRecord, SnapshotState, VolumeSnapshots,
};
use crate::wire::{ListSnapshots, SnapshotDetail, SnapshotInfo};
use pagemesh_base::layout::{EpochNumber, Leg, SliceId, VolumeName};
use std::collections::BTreeSet;

impl Manager {
    /// The snapshots of a volume, newest first, and whether more follow.
    ///
    /// # Errors
    /// When there is no such volume.
    pub fn list_snapshots(
        &self,
        volume: &VolumeName,
        asked: &ListSnapshots,
        limit: usize,
    ) -> Result<(Vec<SnapshotInfo>, bool), Fault> {
        let book = self.state();
        book.volume(volume)?;
        let below = asked.after.map(EpochNumber);
        let of = book.snapshots.of(volume).into_iter();
        let matching = of.flat_map(|of| matching_infos(&book, (volume, of), asked, below));
        Ok(take_page(matching, limit))
    }

    /// The snapshots of all volumes, by volume, newest first, and whether more follow.
    #[must_use]
    pub fn list_all_snapshots(
        &self,
        asked: &ListSnapshots,
        limit: usize,
    ) -> (Vec<SnapshotInfo>, bool) {
        let book = self.state();
        let from = asked.after_volume.as_ref();
        let volumes = book.snapshots.volumes(from);
        let matching = volumes.flat_map(|(volume, of)| {
            let is_first = from == Some(volume);
            let below = asked.after.filter(|_| is_first).map(EpochNumber);
            matching_infos(&book, (volume, of), asked, below)
        });
        take_page(matching, limit)
    }

    /// The details of a snapshot, and the tag of its record.
    ///
    /// # Errors
    /// When there is no such volume or snapshot.
    pub fn show_snapshot(
        &self,
        volume: &VolumeName,
        name: &SnapshotName,
    ) -> Result<(SnapshotDetail, RecordTag), Fault> {
        let book = self.state();
        let record = live_snapshot(&book, volume, name)?;
        let segments = &book.volume(volume)?.layout_state.layout.segments;
        let present: BTreeSet<SliceId> = slice_locations(segments).map(|it| it.slice).collect();
        let no_such = || no_such_snapshot(volume, name);
        let of = book.snapshots.of(volume).ok_or_else(no_such)?;
        let layout = of.layout(record).ok_or_else(no_such)?;
        let layout = layout.with_copies(segments, &record.copies);
        let layout = layout.for_readers(volume, record.epoch, |slice| present.contains(&slice));
        let detail = SnapshotDetail {
            info: snapshot_info(&book, (volume, of), record),
            bricks: book.addresses(&layout.segments),
            layout,
        };
        Ok((detail, RecordTag::new(record)))
    }

    /// Refuses a change of a snapshot that is not in a state that the request expects.
    pub(crate) fn check_snapshot_unchanged(
        &self,
        volume: &VolumeName,
        record: &SnapshotRecord,
    ) -> Result<(), Fault> {
        self.check_unchanged(
            || RecordTag::new(record),
            || format!("the snapshot {volume}@{}", record.name),
        )
    }
}

/// A committed snapshot.
pub(crate) fn live_snapshot<'b>(
    book: &'b ManagerState,
    volume: &VolumeName,
    name: &SnapshotName,
) -> Result<&'b SnapshotRecord, Fault> {
    book.volume(volume)?;
    let found = book.snapshots.of(volume).and_then(|of| of.find(name));
    let found = found.filter(|record| record.state == SnapshotState::Committed);
    found.ok_or_else(|| no_such_snapshot(volume, name))
}

pub(crate) fn no_such_snapshot(volume: &VolumeName, name: &SnapshotName) -> Fault {
    SnapshotFault::NoSuchSnapshot {
        volume: volume.clone(),
        name: name.clone(),
    }
    .into()
}

/// The snapshots of a volume that a list shows, newest first.
fn matching_infos<'a>(
    book: &'a ManagerState,
    (volume, of): (&'a VolumeName, &'a VolumeSnapshots),
    asked: &'a ListSnapshots,
    below: Option<EpochNumber>,
) -> impl Iterator<Item = SnapshotInfo> + 'a {
    let shown = match asked.deleting {
        true => SnapshotState::Deleting,
        false => SnapshotState::Committed,
    };
    let records = of.newest_first(below).map(|entry| &entry.record);
    let matching = records.filter(move |record| {
        let search = asked.search.as_ref();
        let label = asked.label.as_ref();
        record.state == shown
            && search.is_none_or(|text| record.name.as_str().contains(text))
            && label.is_none_or(|label| record.labels.contains(label))
            && asked
                .held
                .is_none_or(|held| held != record.holds.is_empty())
    });
    matching.map(move |record| snapshot_info(book, (volume, of), record))
}

fn take_page(
    mut matching: impl Iterator<Item = SnapshotInfo>,
    limit: usize,
) -> (Vec<SnapshotInfo>, bool) {
    let page = matching.by_ref().take(limit).collect();
    (page, matching.next().is_some())
}

/// Whether the asynchronous copy of the volume lacks the snapshot, or parts of it.
fn is_missing_on_replica(
    book: &ManagerState,
    volume: &VolumeName,
    record: &SnapshotRecord,
) -> bool {
    let columns = book.volumes.get(volume).into_iter();
    let columns = columns.flat_map(|it| it.layout_state.layout.columns());
    let mut legs = columns.flat_map(|column| &column.legs);
    legs.any(|leg| leg.asynchronous && !record.replica_copies.contains(&leg.slice))
}

/// The copies of the volume that lack the snapshot, or parts of it.
fn count_missing_copies(
    book: &ManagerState,
    (volume, of): (&VolumeName, &VolumeSnapshots),
    record: &SnapshotRecord,
) -> usize {
    let (Some(present), Some(layout)) = (book.volumes.get(volume), of.layout(record)) else {
        return 0;
    };
    let present = &present.layout_state.layout.segments;
    let columns = present.iter().zip(&layout.segments);
    let columns = columns.flat_map(|(now, _)| &now.columns);
    let lacks = |leg: &&Leg| match leg.asynchronous {
        true => !record.replica_copies.contains(&leg.slice),
        false => !record.copies.contains(&leg.slice) && !layout.has_all(leg.slice),
    };
    let missing = columns.map(|column| column.legs.iter().filter(lacks).count());
    missing.max().unwrap_or(0)
}

/// A snapshot in a list.
pub(crate) fn snapshot_info(
    book: &ManagerState,
    (volume, of): (&VolumeName, &VolumeSnapshots),
    record: &SnapshotRecord,
) -> SnapshotInfo {
    SnapshotInfo {
        volume: volume.clone(),
        name: record.name.clone(),
        epoch: record.epoch,
        created_unix_ms: record.created_unix_ms,
        state: match record.state {
            // A cut is shown once it is committed, and its answer is made before.
            SnapshotState::Preparing => SnapshotState::Committed,
            state => state,
        },
        size_bytes: of.layout(record).map_or(0, |layout| layout.size_bytes),
        holds: record.holds.clone(),
        labels: record.labels.clone(),
        made_by: record.made_by.clone(),
        clones: book.volumes.clones_of(volume, record.epoch),
        missing_copies: count_missing_copies(book, (volume, of), record),
        missing_on_replica: is_missing_on_replica(book, volume, record),
    }
}
