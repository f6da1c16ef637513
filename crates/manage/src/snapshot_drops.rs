//! Deleting snapshots: a record first, then the bricks, then the record goes.
//!
//! Invariant: a record goes only after each slice of the volume that may have the snapshot has dropped it. A request to
//! prepare it that is still on its way would bring it back. So an uncertain one is dropped again when no such request
//! can be left.

use crate::events::EventDraft;
use crate::fault::Fault;
use crate::manager::{Manager, ManagerState};
use crate::rollback_checks::check_not_needed;
use crate::slices::slice_locations;
use crate::snapshot_bookmarks::bookmark_removal_writes;
use crate::snapshot_lists::live_snapshot;
use crate::snapshots::{
    SnapshotEntry, SnapshotFault, SnapshotName, SnapshotRecord, SnapshotState, VolumeSnapshots,
};
use crate::store::{StoreError, StoreWrite};
use crate::sweep::{BrickConnections, UNCERTAIN_PERIOD};
use crate::wire::DeleteSnapshotReply;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, EpochNumber, Segment, SliceId, VolumeName};
use pagemesh_base::slice::{DROPPED_SNAPSHOTS_MAX, SNAPSHOTS_UNKNOWN, SliceError};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The snapshots that a slice should drop.
struct SliceDrops {
    volume: VolumeName,
    slice: SliceId,
    epochs: Vec<EpochNumber>,
}

impl Manager {
    /// Deletes a snapshot. The sweep retries slices that cannot drop it at once.
    ///
    /// # Errors
    /// When there is no such snapshot, a hold or a clone keeps it, or the store fails.
    pub fn delete_snapshot(
        &self,
        volume: &VolumeName,
        name: &SnapshotName,
    ) -> Result<DeleteSnapshotReply, Fault> {
        let epoch = {
            let mut book = self.state();
            let mut record = live_snapshot(&book, volume, name)?.clone();
            self.check_snapshot_unchanged(volume, &record)?;
            check_not_needed(book.volume(volume)?, name)?;
            check_deletable(&book, volume, &record)?;
            record.state = SnapshotState::Deleting;
            let deleted = EventDraft::snapshot_deleted(volume, name, &self.actor());
            self.commit(
                &mut book,
                &[StoreWrite::PutSnapshot(&record)],
                vec![deleted],
            )?;
            let epoch = record.epoch;
            book.snapshots.put(volume, record, self.clock.elapsed());
            epoch
        };
        self.drop_snapshots(Some(volume));
        let book = self.state();
        let entry = book.snapshots.of(volume).and_then(|of| of.get(epoch));
        let pending = entry.map(|entry| slices_to_drop(&book, volume, entry).len());
        Ok(DeleteSnapshotReply {
            pending_slices: pending.unwrap_or(0),
        })
    }

    /// Lets bricks drop the snapshots that are being deleted, and forgets those that no brick has. A dead or lost brick
    /// is left to the next sweep.
    pub(crate) fn drop_snapshots(&self, only: Option<&VolumeName>) {
        if self.store.has_failed() {
            return;
        }
        let begin = self.clock.elapsed();
        let mut controls = self.brick_connections();
        for (brick, slices) in self.plan_drops(only) {
            for drops in slices {
                match self.drop_on(&mut controls, brick, &drops) {
                    Ok(()) => self.note_dropped(&drops, begin),
                    Err(cause) => {
                        let (label, slice) = (self.brick_label(brick), drops.slice);
                        tracing::warn!(brick = %label, %slice, %cause, "cannot drop snapshots now; trying again later");
                        if let SliceError::Lost(_) = cause {
                            break;
                        }
                    }
                }
            }
        }
        self.forget_dropped(only);
    }

    /// The snapshots to drop, by living bricks and their slices.
    fn plan_drops(&self, only: Option<&VolumeName>) -> BTreeMap<BrickId, Vec<SliceDrops>> {
        let book = self.state();
        let mut plan: BTreeMap<BrickId, Vec<SliceDrops>> = BTreeMap::new();
        for (volume, of) in chosen(&book, only) {
            let mut by_slice: BTreeMap<(BrickId, SliceId), Vec<EpochNumber>> = BTreeMap::new();
            for entry in of.entries().filter(|entry| !entry.is_live()) {
                for slice in slices_to_drop(&book, volume, entry) {
                    let epochs = by_slice.entry(slice).or_default();
                    epochs.push(entry.record.epoch);
                }
            }
            for ((brick, slice), epochs) in by_slice {
                let is_alive = |brick| self.is_alive(brick);
                if book.bricks.get(&brick).is_some_and(is_alive) {
                    plan.entry(brick).or_default().push(SliceDrops {
                        volume: volume.clone(),
                        slice,
                        epochs,
                    });
                }
            }
        }
        plan
    }

    fn drop_on(
        &self,
        controls: &mut BrickConnections<'_>,
        brick: BrickId,
        drops: &SliceDrops,
    ) -> Result<(), SliceError> {
        let control = controls.get(brick)?;
        let epochs: Vec<Epoch> = drops.epochs.iter().map(|epoch| Epoch(epoch.0)).collect();
        for some in epochs.chunks(DROPPED_SNAPSHOTS_MAX) {
            match control.drop_snapshots(drops.slice, some) {
                Ok(()) | Err(SliceError::NoSuchSlice(_)) => {}
                Err(SliceError::Refused(cause)) if cause == SNAPSHOTS_UNKNOWN => {}
                Err(cause) => return Err(cause),
            }
        }
        Ok(())
    }

    /// Notes drops that began at this time.
    fn note_dropped(&self, drops: &SliceDrops, begin: Duration) {
        let mut book = self.state();
        for epoch in &drops.epochs {
            let of = book.snapshots.of(&drops.volume);
            let entry = of.and_then(|of| of.get(*epoch));
            if entry.is_some_and(|entry| is_final(entry, begin)) {
                book.snapshots
                    .note_dropped(&drops.volume, *epoch, drops.slice);
            }
        }
    }

    /// Removes the records that no slice has to drop any more.
    fn forget_dropped(&self, only: Option<&VolumeName>) {
        let mut book = self.state();
        let mut gone = Vec::new();
        for (volume, of) in chosen(&book, only) {
            let dropped = of.entries().filter(|entry| {
                !entry.is_live() && slices_to_drop(&book, volume, entry).is_empty()
            });
            gone.extend(dropped.map(|entry| (volume.clone(), entry.record.epoch)));
        }
        // Records that stay are tried again later, which does no harm.
        if let Err(error) = self.remove_snapshots(&mut book, &gone) {
            tracing::error!(%error, "cannot write down which snapshots are deleted");
        }
    }

    /// Removes records, and the layouts that no other record has.
    pub(crate) fn remove_snapshots(
        &self,
        book: &mut ManagerState,
        removed: &[(VolumeName, EpochNumber)],
    ) -> Result<(), StoreError> {
        let writes = removal_writes(book, removed);
        self.commit(book, &writes, vec![])?;
        for (volume, epoch) in removed {
            book.snapshots.remove(volume, *epoch);
        }
        Ok(())
    }

    /// Refuses to delete a volume with snapshots that should stay, and returns all of its snapshots.
    pub(crate) fn snapshots_of_deleted(
        book: &ManagerState,
        volume: &VolumeName,
        with_snapshots: bool,
    ) -> Result<Vec<(VolumeName, EpochNumber)>, Fault> {
        let Some(of) = book.snapshots.of(volume) else {
            return Ok(vec![]);
        };
        if of.is_preparing() {
            return Err(SnapshotFault::Running(volume.clone()).into());
        }
        let count = of.live().count();
        if count > 0 && !with_snapshots {
            let volume = volume.clone();
            return Err(SnapshotFault::VolumeHasSnapshots { volume, count }.into());
        }
        of.live()
            .try_for_each(|record| check_deletable(book, volume, record))?;
        let all = of.entries();
        Ok(all
            .map(|entry| (volume.clone(), entry.record.epoch))
            .collect())
    }

    /// Refuses to remove a copy that is the only one with all of a snapshot.
    pub(crate) fn check_snapshots_keep_copy(
        book: &ManagerState,
        volume: &VolumeName,
        copy: usize,
        left: &[Segment],
    ) -> Result<(), Fault> {
        let Some(of) = book.snapshots.of(volume) else {
            return Ok(());
        };
        let slices: BTreeSet<SliceId> = slice_locations(left).map(|it| it.slice).collect();
        let mut is_lost: BTreeMap<(EpochNumber, &[SliceId]), bool> = BTreeMap::new();
        let mut count = 0;
        for record in of.live() {
            let look = || {
                let layout = of
                    .layout(record)
                    .map(|it| it.with_copies(left, &record.copies));
                layout.is_some_and(|it| !it.is_readable_from(|slice| slices.contains(&slice)))
            };
            let key = (record.layout, &record.copies[..]);
            count += usize::from(*is_lost.entry(key).or_insert_with(look));
        }
        match count {
            0 => Ok(()),
            count => Err(SnapshotFault::LastCopy {
                volume: volume.clone(),
                copy,
                count,
            }
            .into()),
        }
    }
}

/// The writes that remove records, and the layouts that no other record has.
fn removal_writes<'a>(
    book: &ManagerState,
    removed: &[(VolumeName, EpochNumber)],
) -> Vec<StoreWrite<'a>> {
    let records = removed.iter().filter_map(|(volume, epoch)| {
        let entry = book.snapshots.of(volume)?.get(*epoch)?;
        Some(StoreWrite::RemoveSnapshot(entry.record.volume, *epoch))
    });
    let layouts = book.snapshots.layouts_without(removed).into_iter();
    let layouts = layouts.map(|(id, first)| StoreWrite::RemoveSnapshotLayout(id, first));
    records.chain(layouts).collect()
}

/// The writes that remove all snapshots and bookmarks of a volume.
pub(crate) fn volume_removal_writes<'a>(
    book: &ManagerState,
    volume: &VolumeName,
    snapshots: &[(VolumeName, EpochNumber)],
) -> Vec<StoreWrite<'a>> {
    let mut writes = removal_writes(book, snapshots);
    writes.extend(bookmark_removal_writes(book, volume));
    writes
}

/// The volumes with snapshots: one, or all.
fn chosen<'a>(
    book: &'a ManagerState,
    only: Option<&'a VolumeName>,
) -> impl Iterator<Item = (&'a VolumeName, &'a VolumeSnapshots)> {
    let volumes = book.snapshots.volumes(only);
    volumes.take_while(move |(volume, _)| only.is_none_or(|only| only == *volume))
}

/// The slices of a volume that may have a snapshot, and have not dropped it. A slice that has left the volume is deleted
/// as a whole.
fn slices_to_drop(
    book: &ManagerState,
    volume: &VolumeName,
    entry: &SnapshotEntry,
) -> Vec<(BrickId, SliceId)> {
    let (Some(record), Some(drop)) = (book.volumes.get(volume), &entry.drop) else {
        return vec![];
    };
    // A client may have prepared it on legs that it got after the epoch was reserved, and legs that came later may have
    // listed it. A brick ignores epochs that it does not have.
    slice_locations(&record.layout_state.layout.segments)
        .filter(|it| !drop.dropped.contains(&it.slice))
        .map(|it| (it.brick, it.slice))
        .collect()
}

/// Whether a slice that dropped a snapshot at this time never has it again.
fn is_final(entry: &SnapshotEntry, dropped_at: Duration) -> bool {
    let Some(drop) = &entry.drop else {
        return false;
    };
    !entry.record.uncertain || dropped_at.saturating_sub(drop.since) >= UNCERTAIN_PERIOD
}

/// Whether a hold or a clone keeps a snapshot.
pub(crate) fn is_kept(book: &ManagerState, volume: &VolumeName, record: &SnapshotRecord) -> bool {
    check_deletable(book, volume, record).is_err()
}

/// Refuses to delete a snapshot that a hold or a clone keeps.
fn check_deletable(
    book: &ManagerState,
    volume: &VolumeName,
    record: &SnapshotRecord,
) -> Result<(), Fault> {
    if !record.holds.is_empty() {
        let fault = SnapshotFault::Held {
            volume: volume.clone(),
            name: record.name.clone(),
            tags: record.holds.clone(),
        };
        return Err(fault.into());
    }
    check_no_clone(book, volume, record)
}

/// Refuses a promotion that loses a snapshot with clones; without `force` also one that is held.
pub(crate) fn check_losable(
    book: &ManagerState,
    volume: &VolumeName,
    record: &SnapshotRecord,
    force: bool,
) -> Result<(), Fault> {
    let clones = book.volumes.clones_of(volume, record.epoch);
    let tags = match force {
        true => vec![],
        false => record.holds.clone(),
    };
    match clones.is_empty() && tags.is_empty() {
        true => Ok(()),
        false => Err(SnapshotFault::LostAtPromotion {
            volume: volume.clone(),
            name: record.name.clone(),
            tags,
            clones,
        }
        .into()),
    }
}

/// Refuses a change of a snapshot on which clones depend.
pub(crate) fn check_no_clone(
    book: &ManagerState,
    volume: &VolumeName,
    snapshot: &SnapshotRecord,
) -> Result<(), Fault> {
    let clones = book.volumes.clones_of(volume, snapshot.epoch);
    match clones.is_empty() {
        false => Err(SnapshotFault::HasClones {
            volume: volume.clone(),
            name: snapshot.name.clone(),
            clones,
        }
        .into()),
        true => Ok(()),
    }
}
