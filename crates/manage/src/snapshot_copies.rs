//! Snapshots on legs that were away, or did not exist, when the snapshots were made.
//!
//! 1. [`Manager::adopt_on_returning`]: before a leg becomes in-sync, its brick lists all snapshots of the volume. So it keeps
//!    versions for them from the epoch of the next layout on.
//! 2. [`Manager::copy_missing_versions`]: each sweep copies versions from before that epoch, from another in-sync leg, for a
//!    bounded time. Equal lists of versions need no edit, so a copy that is interrupted begins again without harm.
//! 3. The manager records the leg in the snapshot. Only then readers use it.
//!
//! Invariants: versions are compared only below an epoch of the layout that came after the adoption. A leg is recorded only
//! after each leaf was found equal. No call to a brick is made under the lock.

use crate::events::EventDraft;
use crate::fault::Fault;
use crate::manager::{Manager, ManagerState};
use crate::records::{LateAdoption, VolumeRecord};
use crate::snapshots::{SnapshotRecord, SnapshotState, VersionCopy, VolumeSnapshots};
use crate::store::StoreWrite;
use crate::sweep::BrickConnections;
use crate::wire::ChangeLegs;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::{
    BrickId, Column, EpochNumber, Layout, Leg, LegState, SliceId, VolumeName,
};
use pagemesh_base::slice::{
    BrickControl, DROPPED_SNAPSHOTS_MAX, LISTED_SNAPSHOTS_MAX, PageVersion, SliceError,
    VERSION_EDITS_MAX, VersionEdit, VersionEdits, VersionRange, plan_version_edits,
};
use pagemesh_base::units::PAGE_BYTES;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// The time that one sweep spends on copies.
const SWEEP_TIME: Duration = Duration::from_secs(2);
/// Legs of a column, at most, for a comparison of their versions.
const COMPARED_LEGS_MAX: usize = 2;
/// Pages of a leaf: edits of one request are of one leaf.
const LEAF_PAGES: u64 = 512;

/// The end of the work on one copy in one sweep.
enum CopyStep {
    Done,
    /// The next sweep goes on here.
    Paused(PageNo),
}

impl Manager {
    /// Lets bricks list the snapshots of a volume that legs lack, before these legs become in-sync. Returns the legs that did
    /// not list them.
    pub(crate) fn adopt_on_returning(
        &self,
        volume: &VolumeName,
        request: &ChangeLegs,
    ) -> Vec<SliceId> {
        let (legs, snapshots) = self.returning_legs(volume, request);
        if snapshots.is_empty() {
            return vec![];
        }
        let mut controls = self.brick_connections();
        let mut failed = vec![];
        for (brick, slice) in legs {
            if let Err(cause) = adopt(&mut controls, (brick, slice), &snapshots) {
                let label = self.brick_label(brick);
                tracing::warn!(brick = %label, %slice, %cause, "a copy that returns does not list the snapshots of its volume yet");
                failed.push(slice);
            }
        }
        failed
    }

    /// The legs that become in-sync, and the snapshots of the volume.
    fn returning_legs(
        &self,
        volume: &VolumeName,
        request: &ChangeLegs,
    ) -> (Vec<(BrickId, SliceId)>, Vec<Epoch>) {
        let book = self.state();
        let Some(record) = book.volumes.get(volume) else {
            return (vec![], vec![]);
        };
        let segments = &record.layout_state.layout.segments;
        let become_in_sync = request
            .changes
            .iter()
            .filter(|it| it.to == LegState::InSync);
        let legs = become_in_sync.filter_map(|change| {
            let column = segments.get(change.segment)?.columns.get(change.column)?;
            let leg = column.legs.get(change.leg)?;
            Some((leg.brick, leg.slice))
        });
        (legs.collect(), committed_epochs(&book, volume))
    }

    /// Copies versions that legs lack, for a bounded time.
    pub(crate) fn copy_missing_versions(&self) {
        if self.store.has_failed() {
            return;
        }
        let end = Instant::now() + SWEEP_TIME;
        let mut controls = self.brick_connections();
        for copy in self.plan_version_copies() {
            if Instant::now() >= end {
                return;
            }
            let copied = self.run_copy(&mut controls, &copy, end);
            let (label, slice) = (self.brick_label(copy.target.0), copy.target.1);
            if let Err(cause) = copied {
                tracing::warn!(volume = %copy.volume, brick = %label, %slice, %cause, "cannot copy versions of snapshots to a copy now; trying again later");
            }
        }
    }

    fn run_copy(
        &self,
        controls: &mut BrickConnections<'_>,
        copy: &VersionCopy,
        end: Instant,
    ) -> Result<(), Fault> {
        let from = self.copied_below(copy);
        if from == PageNo(0) && !self.is_adopted(controls, copy)? {
            return Ok(());
        }
        let step = copy_versions(controls, copy, from, end);
        match step.map_err(|(brick, cause)| self.brick_fault(brick, cause))? {
            CopyStep::Done => self.record_copy(copy),
            CopyStep::Paused(next) => {
                let mut book = self.state();
                let progress = (copy.clone(), next);
                book.version_copies.of.insert(copy.target.1, progress);
                Ok(())
            }
        }
    }

    fn copied_below(&self, copy: &VersionCopy) -> PageNo {
        let book = self.state();
        let known = book.version_copies.of.get(&copy.target.1);
        known
            .filter(|(of, _)| of == copy)
            .map_or(PageNo(0), |(_, next)| *next)
    }

    /// Whether the target lists the missing snapshots. Otherwise lets it list them, and waits for another layout.
    fn is_adopted(
        &self,
        controls: &mut BrickConnections<'_>,
        copy: &VersionCopy,
    ) -> Result<bool, Fault> {
        let (brick, slice) = copy.target;
        let listed = controls
            .get(brick)
            .and_then(|control| control.snapshots(slice));
        let listed: BTreeSet<Epoch> = match listed {
            Ok(listed) => listed.into_iter().collect(),
            Err(cause) => return Err(self.brick_fault(brick, cause)),
        };
        let unlisted: Vec<Epoch> = copy
            .missing
            .iter()
            .filter(|it| !listed.contains(it))
            .copied()
            .collect();
        if unlisted.is_empty() {
            return Ok(true);
        }
        {
            let mut book = self.state();
            let mut record = book.volume(&copy.volume)?.clone();
            let epoch = record.layout_state.layout.epoch;
            note_late_adoption(&mut record, slice, epoch);
            self.commit_volume(&mut book, &record, vec![])?;
        }
        let adopted = adopt(controls, copy.target, &unlisted);
        adopted.map_err(|cause| self.brick_fault(brick, cause))?;
        Ok(false)
    }

    /// Records that the target has all of the missing snapshots.
    fn record_copy(&self, copy: &VersionCopy) -> Result<(), Fault> {
        let mut book = self.state();
        book.version_copies.of.remove(&copy.target.1);
        let Some(of) = book.snapshots.of(&copy.volume) else {
            return Ok(());
        };
        let mut records = Vec::new();
        for epoch in &copy.missing {
            let entry = of.get(EpochNumber(epoch.0));
            let Some(entry) = entry.filter(|it| it.record.state == SnapshotState::Committed) else {
                continue;
            };
            let mut record = entry.record.clone();
            record.copies.push(copy.target.1);
            records.push(record);
        }
        let label = book.label(copy.target.0);
        let draft = EventDraft::snapshots_copied(&copy.volume, records.len(), &label);
        let writes: Vec<_> = records.iter().map(StoreWrite::PutSnapshot).collect();
        self.commit(&mut book, &writes, vec![draft])?;
        for record in records {
            book.snapshots
                .put(&copy.volume, record, self.clock.elapsed());
        }
        Ok(())
    }

    /// The copies that can be made now: for each leg one, with living bricks at both ends.
    fn plan_version_copies(&self) -> Vec<VersionCopy> {
        let book = self.state();
        let mut plan = Vec::new();
        for (name, of) in book.snapshots.volumes(None) {
            let Some(record) = book.volumes.get(name) else {
                continue;
            };
            let layout = &record.layout_state.layout;
            if all_took_part(layout, of) {
                continue;
            }
            for (at, segment) in layout.segments.iter().enumerate() {
                let snapshots = snapshots_of_segment(layout, of, at);
                for column in &segment.columns {
                    self.plan_column(&book, record, (of, &snapshots), column, &mut plan);
                }
            }
        }
        plan
    }

    fn plan_column(
        &self,
        book: &ManagerState,
        record: &VolumeRecord,
        (of, snapshots): (&VolumeSnapshots, &[&SnapshotRecord]),
        column: &Column,
        plan: &mut Vec<VersionCopy>,
    ) {
        // While a third leg is stale, a resync gives copied pages new births. Then births do not name bytes.
        if column.legs.len() > COMPARED_LEGS_MAX {
            return;
        }
        let layout = &record.layout_state.layout;
        let usable = |leg: &&Leg| {
            let brick = book.bricks.get(&leg.brick);
            leg.state == LegState::InSync && brick.is_some_and(|it| self.is_alive(it))
        };
        let legs: Vec<&Leg> = column.legs.iter().filter(usable).collect();
        let epoch = |it: &&SnapshotRecord| Epoch(it.epoch.0);
        for target in &legs {
            let (complete, lacking): (Vec<&SnapshotRecord>, Vec<_>) = snapshots
                .iter()
                .partition(|it| has_all(of, it, target.slice));
            let source = lacking
                .first()
                .and_then(|first| legs.iter().find(|leg| has_all(of, first, leg.slice)));
            let (Some(source), true) = (source, is_comparable(record, target)) else {
                continue;
            };
            let both = lacking.iter().filter(|it| has_all(of, it, source.slice));
            plan.push(VersionCopy {
                volume: layout.name.clone(),
                below: layout.epoch,
                source: (source.brick, source.slice),
                target: (target.brick, target.slice),
                missing: both.take(LISTED_SNAPSHOTS_MAX).map(epoch).collect(),
                complete: complete.iter().map(epoch).collect(),
            });
        }
    }
}

/// Whether the leg with a slice has all of a snapshot.
pub(crate) fn has_all(of: &VolumeSnapshots, snapshot: &SnapshotRecord, slice: SliceId) -> bool {
    snapshot.copies.contains(&slice)
        || of
            .layout(snapshot)
            .is_some_and(|layout| layout.has_all(slice))
}

/// Whether all in-sync legs took part in all snapshots: the usual case, found without a look at each snapshot.
fn all_took_part(layout: &Layout, of: &VolumeSnapshots) -> bool {
    of.layouts().all(|then| {
        let segments = layout.segments.iter().take(then.segments.len());
        let columns = segments.flat_map(|segment| &segment.columns);
        let mut legs = columns.flat_map(|column| &column.legs);
        legs.all(|leg| leg.state != LegState::InSync || then.has_all(leg.slice))
    })
}

/// The committed snapshots that hold a segment: not those from before the volume had it. Their versions can be compared in
/// the present layout.
fn snapshots_of_segment<'a>(
    layout: &Layout,
    of: &'a VolumeSnapshots,
    segment: usize,
) -> Vec<&'a SnapshotRecord> {
    let holds = |it: &&SnapshotRecord| {
        it.state == SnapshotState::Committed
            && it.epoch < layout.epoch
            && of.layout(it).is_some_and(|it| segment < it.segments.len())
    };
    of.live().filter(holds).collect()
}

/// Notes that a leg may have listed snapshots while the layout had this epoch.
pub(crate) fn note_late_adoption(record: &mut VolumeRecord, slice: SliceId, epoch: EpochNumber) {
    record.late_adoptions.retain(|it| it.slice != slice);
    record.late_adoptions.push(LateAdoption { slice, epoch });
}

/// Whether the leg listed all snapshots before the epoch of the layout.
fn is_comparable(record: &VolumeRecord, leg: &Leg) -> bool {
    let mut late = record.late_adoptions.iter();
    let epoch = record.layout_state.layout.epoch;
    !late.any(|it| it.slice == leg.slice && it.epoch >= epoch)
}

fn committed_epochs(book: &ManagerState, volume: &VolumeName) -> Vec<Epoch> {
    let of = book.snapshots.of(volume).into_iter();
    let live = of.flat_map(|of| of.live());
    let committed = live.filter(|it| it.state == SnapshotState::Committed);
    committed.map(|it| Epoch(it.epoch.0)).collect()
}

fn adopt(
    controls: &mut BrickConnections<'_>,
    (brick, slice): (BrickId, SliceId),
    snapshots: &[Epoch],
) -> Result<(), SliceError> {
    let control = controls.get(brick)?;
    for some in snapshots.chunks(DROPPED_SNAPSHOTS_MAX) {
        control.adopt_snapshots(slice, some)?;
    }
    Ok(())
}

/// Copies versions from a page on, until the time is over.
fn copy_versions(
    controls: &mut BrickConnections<'_>,
    copy: &VersionCopy,
    mut from: PageNo,
    end: Instant,
) -> Result<CopyStep, (BrickId, SliceError)> {
    // Both connections are there before both are used.
    controls
        .get(copy.source.0)
        .map_err(|cause| (copy.source.0, cause))?;
    controls
        .get(copy.target.0)
        .map_err(|cause| (copy.target.0, cause))?;
    let source = controls.opened(copy.source.0);
    let target = controls.opened(copy.target.0);
    let (Some(source), Some(target)) = (source, target) else {
        return Ok(CopyStep::Paused(from));
    };
    while Instant::now() < end {
        let range = VersionRange {
            below: Epoch(copy.below.0),
            snapshots: copy.missing.clone(),
            from,
        };
        let list = |control: &dyn BrickControl, (brick, slice): (BrickId, SliceId)| {
            control
                .list_versions(slice, &range)
                .map_err(|cause| (brick, cause))
        };
        let mut of_source = list(source, copy.source)?;
        let mut of_target = list(target, copy.target)?;
        let next = [of_source.next, of_target.next].into_iter().flatten().min();
        if next == Some(from) {
            // A pool merges its versions first.
            continue;
        }
        for list in [&mut of_source, &mut of_target] {
            list.versions
                .retain(|it| next.is_none_or(|next| it.page < next));
        }
        let lists = (&of_source.versions[..], &of_target.versions[..]);
        let plan = plan_version_edits(lists, &copy.missing, &copy.complete);
        for edits in split_edits(&plan) {
            let data = read_added(source, copy, edits, &of_source.versions)
                .map_err(|cause| (copy.source.0, cause))?;
            let request = VersionEdits {
                below: range.below,
                edits: edits.to_vec(),
                data: data.into(),
            };
            let edited = target.edit_versions(copy.target.1, &request);
            edited.map_err(|cause| (copy.target.0, cause))?;
        }
        // The lists are compared again after edits.
        if plan.is_empty() {
            let Some(next) = next else {
                return Ok(CopyStep::Done);
            };
            from = next;
        }
    }
    Ok(CopyStep::Paused(from))
}

/// Edits in requests of one leaf each.
fn split_edits(edits: &[VersionEdit]) -> impl Iterator<Item = &[VersionEdit]> {
    let of_leaf = |one: &VersionEdit, other: &VersionEdit| {
        one.page.0 / LEAF_PAGES == other.page.0 / LEAF_PAGES
    };
    let of_leaves = edits.chunk_by(of_leaf);
    of_leaves.flat_map(|edits| edits.chunks(VERSION_EDITS_MAX))
}

/// The bytes of the versions that edits add.
fn read_added(
    source: &dyn BrickControl,
    copy: &VersionCopy,
    edits: &[VersionEdit],
    versions: &[PageVersion],
) -> Result<Vec<u8>, SliceError> {
    const PAGE: u64 = PAGE_BYTES as u64;
    let mut data = Vec::new();
    for edit in edits.iter().filter(|edit| edit.from.is_none()) {
        let is_of = |it: &&PageVersion| (it.page, it.birth) == (edit.page, edit.birth);
        let version = versions.iter().find(is_of);
        let sees = |it: &&Epoch| version.is_some_and(|version| version.is_seen_by(**it));
        let Some(&snapshot) = copy.missing.iter().find(sees) else {
            return Err(SliceError::Refused("no snapshot sees a version".into()));
        };
        let range = (edit.page.0.saturating_mul(PAGE), PAGE_BYTES as u32);
        data.extend(source.read_version(copy.source.1, snapshot, range)?);
    }
    Ok(data)
}
