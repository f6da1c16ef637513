//! Snapshots on asynchronous replicas, and the snapshots of a volume after a promotion.
//!
//! 1. [`Manager::record_replica_snapshots`]: the client reports that the replica has all of a snapshot, and the record of
//!    the snapshot names the replica's slice.
//! 2. [`PromotedSnapshots::plan`]: a promotion of a copy that may lack writes keeps the snapshots that this copy has as a
//!    whole, and deletes the others.
//!
//! Invariant: a slice is recorded only on the report of the client that has attached the volume. What a slice has of a
//! snapshot never changes, so a late report is right, too.

use crate::events::EventDraft;
use crate::fault::Fault;
use crate::manager::{Manager, ManagerState};
use crate::records::VolumeRecord;
use crate::rollback_checks::check_not_needed;
use crate::snapshot_copies::has_all;
use crate::snapshot_drops::check_losable;
use crate::snapshots::{
    BookmarkRecord, SnapshotName, SnapshotRecord, SnapshotState, VolumeSnapshots,
};
use crate::store::StoreWrite;
use crate::wire::ReplicaSnapshot;
use pagemesh_base::layout::{EpochNumber, Leg, LegState, Segment, SliceId, VolumeName};

/// Snapshots in one report of a client.
const REPORTED_MAX: usize = 1024;

impl Manager {
    /// Records the snapshots that the asynchronous replica of a volume has got. A snapshot that is still being made counts,
    /// too: the client may report it before the call that makes it ends.
    pub(crate) fn record_replica_snapshots(
        &self,
        book: &mut ManagerState,
        volume: &VolumeRecord,
        reported: &[ReplicaSnapshot],
    ) -> Result<(), Fault> {
        if reported.len() > REPORTED_MAX {
            return Err(Fault::invalid_field(
                format!("a report names at most {REPORTED_MAX} snapshots of a replica"),
                "report them in several calls",
            ));
        }
        let layout = &volume.layout_state.layout;
        let Some(of) = book.snapshots.of(&layout.name) else {
            return Ok(());
        };
        let mut records: Vec<SnapshotRecord> = Vec::new();
        for ReplicaSnapshot { slice, epoch } in reported {
            let mut legs = layout.columns().flat_map(|column| &column.legs);
            let is_replica = legs.any(|leg| leg.asynchronous && leg.slice == *slice);
            let entry = of.get(*epoch).filter(|it| it.is_live() && is_replica);
            let Some(record) = entry.map(|it| &it.record) else {
                continue;
            };
            if !record.replica_copies.contains(slice)
                && !records.iter().any(|it| it.epoch == *epoch)
            {
                let mut record = record.clone();
                record.replica_copies.push(*slice);
                // A snapshot that is being made stays uncertain until its cut has ended.
                record.uncertain &= record.state != SnapshotState::Committed;
                records.push(record);
            }
        }
        if records.is_empty() {
            return Ok(());
        }
        let writes: Vec<_> = records.iter().map(StoreWrite::PutSnapshot).collect();
        self.commit(book, &writes, vec![])?;
        for record in records {
            let now = self.clock.elapsed();
            book.snapshots.put(&layout.name, record, now);
        }
        Ok(())
    }
}

/// Whether the leg with a slice has all of a snapshot, as an asynchronous replica too.
pub(crate) fn has_all_or_replicated(
    of: &VolumeSnapshots,
    snapshot: &SnapshotRecord,
    slice: SliceId,
) -> bool {
    snapshot.replica_copies.contains(&slice) || has_all(of, snapshot, slice)
}

/// The changes of a volume's snapshots and bookmarks at a promotion.
#[derive(Debug, Default)]
pub(crate) struct PromotedSnapshots {
    /// Kept snapshots with changed records.
    kept: Vec<SnapshotRecord>,
    /// Snapshots that the promoted copy lacks. They are being deleted.
    lost: Vec<SnapshotRecord>,
    /// Kept bookmarks.
    bookmarks: Vec<BookmarkRecord>,
}

impl PromotedSnapshots {
    /// The changes at a promotion of a copy that may lack writes. `record` has the layout after it.
    ///
    /// Other copies may have snapshots that this copy lacks. They are lost, too: when such a copy returns, it gets pages
    /// with births from before these snapshots, over pages that they see.
    ///
    /// # Errors
    /// When a lost snapshot has clones, or a rollback needs it; without `force` also when it is held.
    pub(crate) fn plan(
        book: &ManagerState,
        record: &VolumeRecord,
        copy: usize,
        force: bool,
    ) -> Result<PromotedSnapshots, Fault> {
        let layout = &record.layout_state.layout;
        let mut plan = PromotedSnapshots::default();
        let Some(of) = book.snapshots.of(&layout.name) else {
            return Ok(plan);
        };
        let before = &book.volume(&layout.name)?.layout_state.layout;
        let mut newest_kept = None;
        let committed = of.live().filter(|it| it.state == SnapshotState::Committed);
        for snapshot in committed {
            let legs = legs_of_snapshot(of, snapshot, &before.segments, &layout.segments, copy);
            let is_kept = !legs.is_empty()
                && legs.iter().all(|leg| {
                    leg.is_some_and(|leg| has_all_or_replicated(of, snapshot, leg.slice))
                });
            let mut changed = snapshot.clone();
            if !is_kept {
                check_losable(book, &layout.name, snapshot, force)?;
                check_not_needed(record, &snapshot.name)?;
                changed.state = SnapshotState::Deleting;
                plan.lost.push(changed);
                continue;
            }
            newest_kept = newest_kept.max(Some(snapshot.epoch));
            for leg in legs.into_iter().flatten() {
                changed.replica_copies.retain(|slice| *slice != leg.slice);
                if !has_all(of, snapshot, leg.slice) {
                    changed.copies.push(leg.slice);
                }
            }
            if changed != *snapshot {
                plan.kept.push(changed);
            }
        }
        // A copy that was lost in the middle of a resync holds a mixture, so its births tell less.
        let mut legs = before.columns().filter_map(|column| column.legs.get(copy));
        if legs.all(|leg| leg.state == LegState::AsyncReplica) {
            plan.keep_bookmarks(book, record, copy, newest_kept);
        }
        Ok(plan)
    }

    /// Keeps the bookmarks from before the newest snapshot that the promoted copy has: it has all changes before them.
    fn keep_bookmarks(
        &mut self,
        book: &ManagerState,
        record: &VolumeRecord,
        copy: usize,
        newest_kept: Option<EpochNumber>,
    ) {
        let layout = &record.layout_state.layout;
        let bookmarks = book.snapshots.bookmarks_of(&layout.name);
        for bookmark in bookmarks.filter(|it| newest_kept.is_some_and(|newest| it.epoch <= newest))
        {
            let mut bookmark = bookmark.clone();
            for (then, now) in bookmark.segments.iter_mut().zip(&layout.segments) {
                for (column, now) in then.columns.iter_mut().zip(&now.columns) {
                    let Some(leg) = now.legs.get(copy) else {
                        continue;
                    };
                    column.legs.retain(|it| it.slice != leg.slice);
                    column.legs.push(Leg {
                        state: LegState::InSync,
                        ..leg.clone()
                    });
                }
            }
            self.bookmarks.push(bookmark);
        }
    }

    /// The names of the lost snapshots.
    pub(crate) fn lost_names(&self) -> Vec<SnapshotName> {
        self.lost.iter().map(|it| it.name.clone()).collect()
    }

    /// The event of lost snapshots, if there are any.
    pub(crate) fn draft(
        &self,
        volume: &VolumeName,
        actor: &str,
        copy: usize,
    ) -> Option<EventDraft> {
        let names = self.lost_names();
        (!names.is_empty()).then(|| EventDraft::snapshots_lost(volume, actor, copy, &names))
    }

    /// The writes, besides that of the volume.
    pub(crate) fn writes(&self) -> impl Iterator<Item = StoreWrite<'_>> {
        let snapshots = self.kept.iter().chain(&self.lost);
        let bookmarks = self.bookmarks.iter().map(StoreWrite::PutBookmark);
        snapshots.map(StoreWrite::PutSnapshot).chain(bookmarks)
    }

    /// Whether a bookmark stays.
    pub(crate) fn keeps_bookmark(&self, name: &SnapshotName) -> bool {
        self.bookmarks.iter().any(|it| it.name == *name)
    }

    /// The records, after they were stored.
    pub(crate) fn into_records(self) -> (Vec<SnapshotRecord>, Vec<BookmarkRecord>) {
        let mut snapshots = self.kept;
        snapshots.extend(self.lost);
        (snapshots, self.bookmarks)
    }
}

/// By column of a snapshot: the leg that may have it after the promotion of a copy; none for a column without one. A column
/// in which that copy was in sync keeps all its legs.
fn legs_of_snapshot<'a>(
    of: &VolumeSnapshots,
    snapshot: &SnapshotRecord,
    before: &[Segment],
    present: &'a [Segment],
    copy: usize,
) -> Vec<Option<&'a Leg>> {
    let segments = of.layout(snapshot).map_or(0, |it| it.segments.len());
    let columns = present.iter().take(segments).flat_map(|it| &it.columns);
    let before = before.iter().flat_map(|it| &it.columns);
    let is_in_sync = |leg: &Leg| leg.state == LegState::InSync;
    let pairs = before.zip(columns).map(|(before, column)| {
        let promoted = column.legs.get(copy);
        if !before.legs.get(copy).is_some_and(is_in_sync) {
            return promoted;
        }
        let mut in_sync = column.legs.iter().filter(|leg| is_in_sync(leg));
        in_sync
            .find(|leg| has_all_or_replicated(of, snapshot, leg.slice))
            .or(promoted)
    });
    pairs.collect()
}
