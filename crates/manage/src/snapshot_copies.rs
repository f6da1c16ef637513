//! Snapshots on legs that were away, or did not exist, when the snapshots were made.
//!
//! 1. [`Manager::adopt_on_returning`]: before a leg becomes in-sync, its brick lists all snapshots of the volume. From then
//!    on, their views there do not change. A brick that was not reached lists them in a sweep.
//! 2. [`Manager::copy_missing_versions`]: each sweep compares the views there and on another in-sync leg, by
//!    checksums, and copies the differences, for a bounded time. Equal views need no edit, so a copy that is interrupted begins
//!    again without harm.
//! 3. The manager records the leg in the snapshot. Only then readers use it.
//!
//! Invariants: a brick lists the snapshots before their views are compared. A leg is recorded only after each page was
//! found equal. No call to a brick is made under the lock.

use crate::events::EventDraft;
use crate::fault::Fault;
use crate::manager::{Manager, ManagerState};
use crate::records::VolumeRecord;
use crate::snapshots::{CopyProgress, SnapshotRecord, SnapshotState, VersionCopy, VolumeSnapshots};
use crate::store::StoreWrite;
use crate::sweep::BrickConnections;
use crate::wire::ChangeLegs;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::{
    BrickId, Column, EpochNumber, Layout, Leg, LegState, SliceId, VolumeName,
};
use pagemesh_base::slice::{
    BrickControl, DROPPED_SNAPSHOTS_MAX, PageVersion, SliceError, VERSION_EDITS_MAX, VersionEdit,
    VersionEdits, VersionPlan, VersionRange, plan_version_edits,
};
use pagemesh_base::units::PAGE_BYTES;
use std::collections::BTreeSet;
use std::time::Duration;

/// The time that one sweep spends on copies.
const SWEEP_TIME: Duration = Duration::from_secs(2);
/// Comparisons of one sweep, at most. A comparison is of some leaves.
const SWEEP_COMPARISONS: usize = 1024;
/// Pages of a leaf: edits of one request are of one leaf.
const LEAF_PAGES: u64 = 512;

/// The work that is left to one sweep.
struct Budget {
    comparisons: usize,
    /// By the clock of the manager.
    end: Duration,
}

impl Manager {
    /// Lets bricks list the snapshots of a volume that legs lack, before these legs become in-sync. A sweep tries again
    /// what fails.
    pub(crate) fn adopt_on_returning(&self, volume: &VolumeName, request: &ChangeLegs) {
        let (legs, snapshots) = self.returning_legs(volume, request);
        if snapshots.is_empty() {
            return;
        }
        let mut controls = self.brick_connections();
        for leg in legs {
            if let Err(cause) = self.adopt(&mut controls, volume, leg, &snapshots) {
                let (label, slice) = (self.brick_label(leg.0), leg.1);
                tracing::warn!(brick = %label, %slice, %cause, "a copy that returns does not list the snapshots of its volume yet");
            }
        }
    }

    /// Lets a brick list snapshots. A deletion meanwhile may have asked the brick already, so snapshots that are not
    /// live any more are dropped again.
    fn adopt(
        &self,
        controls: &mut BrickConnections<'_>,
        volume: &VolumeName,
        (brick, slice): (BrickId, SliceId),
        snapshots: &[Epoch],
    ) -> Result<(), SliceError> {
        let control = controls.get(brick)?;
        for some in snapshots.chunks(DROPPED_SNAPSHOTS_MAX) {
            control.adopt_snapshots(slice, some)?;
        }
        let live: BTreeSet<Epoch> = committed_epochs(&self.state(), volume)
            .into_iter()
            .collect();
        let gone = snapshots.iter().filter(|it| !live.contains(it));
        let gone: Vec<Epoch> = gone.copied().collect();
        for some in gone.chunks(DROPPED_SNAPSHOTS_MAX) {
            control.drop_snapshots(slice, some)?;
        }
        Ok(())
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

    /// Copies versions that legs lack, for a bounded time. Each sweep begins with the leg after that of the last one.
    pub(crate) fn copy_missing_versions(&self) {
        if self.store.has_failed() {
            return;
        }
        let mut budget = Budget {
            comparisons: SWEEP_COMPARISONS,
            end: self.clock.elapsed() + SWEEP_TIME,
        };
        let mut controls = self.brick_connections();
        for copy in self.plan_version_copies() {
            if !self.has_budget(&budget) {
                return;
            }
            let copied = self.run_copy(&mut controls, &copy, &mut budget);
            let (label, slice) = (self.brick_label(copy.target.0), copy.target.1);
            if let Err(cause) = copied {
                tracing::warn!(volume = %copy.volume, brick = %label, %slice, %cause, "cannot copy versions of snapshots to a copy now; trying again later");
            }
        }
    }

    fn has_budget(&self, budget: &Budget) -> bool {
        budget.comparisons > 0 && self.clock.elapsed() < budget.end
    }

    fn run_copy(
        &self,
        controls: &mut BrickConnections<'_>,
        copy: &VersionCopy,
        budget: &mut Budget,
    ) -> Result<(), Fault> {
        let fault = |(brick, cause)| self.brick_fault(brick, cause);
        let listed = self.list_missing(controls, copy);
        let are_new = listed.map_err(|cause| fault((copy.target.0, cause)))?;
        let known = {
            let mut book = self.state();
            book.version_copies.last = Some(copy.target.1);
            book.version_copies.of.remove(&copy.target.1)
        };
        let known = known.filter(|it| !are_new && it.is_of(copy));
        let mut progress = known.unwrap_or_else(|| CopyProgress::new(copy));
        progress.missing.clone_from(&copy.missing);
        let copied = self.copy_versions(controls, copy, &mut progress, budget);
        if matches!(copied, Ok(true)) {
            return self.record_copy(copy, &progress.unequal);
        }
        let mut book = self.state();
        book.version_copies.of.insert(copy.target.1, progress);
        copied.map(drop).map_err(fault)
    }

    /// Lets the brick of the target list the missing snapshots. Whether it did not list one of them before.
    fn list_missing(
        &self,
        controls: &mut BrickConnections<'_>,
        copy: &VersionCopy,
    ) -> Result<bool, SliceError> {
        let listed = controls.get(copy.target.0)?.snapshots(copy.target.1)?;
        let listed: BTreeSet<Epoch> = listed.into_iter().collect();
        let unlisted = copy.missing.iter().filter(|it| !listed.contains(it));
        let unlisted: Vec<Epoch> = unlisted.copied().collect();
        if !unlisted.is_empty() {
            self.adopt(controls, &copy.volume, copy.target, &unlisted)?;
        }
        Ok(!unlisted.is_empty())
    }

    /// Copies versions from the page of the progress on. True: the slice ends, and all views were equal but those that the
    /// progress names.
    fn copy_versions(
        &self,
        controls: &mut BrickConnections<'_>,
        copy: &VersionCopy,
        progress: &mut CopyProgress,
        budget: &mut Budget,
    ) -> Result<bool, (BrickId, SliceError)> {
        let [source, target] = open_both(controls, [copy.source, copy.target])?;
        while self.has_budget(budget) {
            budget.comparisons -= 1;
            let compared = copy
                .missing
                .iter()
                .filter(|it| !progress.unequal.contains(it));
            let compared: Vec<Epoch> = compared.copied().collect();
            if compared.is_empty() {
                return Ok(true);
            }
            let legs = (source, target);
            let (plan, next) = compare(legs, copy, &compared, progress.next)?;
            if next == Some(progress.next) {
                // A pool merges its versions first. Other copies go on meanwhile.
                return Ok(false);
            }
            let unread = edit(legs, copy, &plan)?;
            for edit in unread {
                let unseen = |it: &&Epoch| edit.birth < **it && Some(**it) <= edit.to;
                progress.unequal.extend(compared.iter().filter(unseen));
            }
            // The lists are compared again after edits.
            if plan.edits.is_empty() {
                progress.unequal.extend(plan.unequal.iter().map(|it| it.1));
                match next {
                    Some(next) => progress.next = next,
                    None => return Ok(true),
                }
            }
        }
        Ok(false)
    }

    /// Records that the target has the missing snapshots, apart from those with unequal views. These are not compared
    /// again in the layout.
    fn record_copy(&self, copy: &VersionCopy, unequal: &BTreeSet<Epoch>) -> Result<(), Fault> {
        let label = self.brick_label(copy.target.0);
        let mut book = self.state();
        if !unequal.is_empty() {
            let slice = copy.target.1;
            tracing::warn!(volume = %copy.volume, brick = %label, %slice, snapshots = unequal.len(), "a copy of the volume cannot get the contents of snapshots; replace it, if it should have them");
            book.version_copies.refuse(slice, copy.below, unequal);
        }
        let Some(of) = book.snapshots.of(&copy.volume) else {
            return Ok(());
        };
        let mut records = Vec::new();
        for epoch in copy.missing.iter().filter(|it| !unequal.contains(it)) {
            let entry = of.get(EpochNumber(epoch.0));
            let Some(entry) = entry.filter(|it| it.record.state == SnapshotState::Committed) else {
                continue;
            };
            let mut record = entry.record.clone();
            record.copies.push(copy.target.1);
            records.push(record);
        }
        if records.is_empty() {
            return Ok(());
        }
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
        let mut book = self.state();
        let mut known = BTreeSet::new();
        let mut plan: Vec<VersionCopy> = Vec::new();
        for (name, of) in book.snapshots.volumes(None) {
            let Some(record) = book.volumes.get(name) else {
                continue;
            };
            let layout = &record.layout_state.layout;
            if all_took_part(layout, of) {
                continue;
            }
            let legs = layout.columns().flat_map(|column| &column.legs);
            known.extend(legs.map(|leg| leg.slice));
            let bookmarks = book.snapshots.bookmarks_of(name);
            let bookmarks = bookmarks.map(|it| Epoch(it.epoch.0));
            let live = of.live().map(|it| Epoch(it.epoch.0));
            let marks: Vec<Epoch> = live.chain(bookmarks).collect();
            for (at, segment) in layout.segments.iter().enumerate() {
                let snapshots = snapshots_of_segment(layout, of, at);
                for column in &segment.columns {
                    self.plan_column(&book, record, (of, &snapshots, &marks), column, &mut plan);
                }
            }
        }
        book.version_copies.keep_only(|slice| known.contains(slice));
        plan.sort_by_key(|copy| copy.target.1);
        let last = book.version_copies.last;
        let after = plan.partition_point(|copy| Some(copy.target.1) <= last);
        plan.rotate_left(after);
        plan
    }

    fn plan_column(
        &self,
        book: &ManagerState,
        record: &VolumeRecord,
        (of, snapshots, marks): (&VolumeSnapshots, &[&SnapshotRecord], &[Epoch]),
        column: &Column,
        plan: &mut Vec<VersionCopy>,
    ) {
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
            let copies = &book.version_copies;
            let lacking = lacking.into_iter();
            let lacking: Vec<_> = lacking
                .filter(|it| copies.may_copy(target.slice, layout.epoch, epoch(it)))
                .collect();
            let has = |leg: &&&Leg, it: &SnapshotRecord| has_all(of, it, leg.slice);
            let source = lacking
                .iter()
                .find_map(|it| legs.iter().find(|leg| has(leg, it)));
            let Some(source) = source else { continue };
            let both = lacking.iter().filter(|it| has(&source, it));
            let both: Vec<Epoch> = both.map(epoch).collect();
            plan.push(VersionCopy {
                volume: layout.name.clone(),
                below: layout.epoch,
                source: (source.brick, source.slice),
                target: (target.brick, target.slice),
                missing: copies.begun_first(target.slice, both),
                complete: complete.iter().map(epoch).collect(),
                marks: marks.to_vec(),
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

fn committed_epochs(book: &ManagerState, volume: &VolumeName) -> Vec<Epoch> {
    let of = book.snapshots.of(volume).into_iter();
    let live = of.flat_map(|of| of.live());
    let committed = live.filter(|it| it.state == SnapshotState::Committed);
    committed.map(|it| Epoch(it.epoch.0)).collect()
}

/// The bricks of two legs. Both connections are there before both are used.
pub(crate) fn open_both<'a>(
    controls: &'a mut BrickConnections<'_>,
    legs: [(BrickId, SliceId); 2],
) -> Result<[&'a dyn BrickControl; 2], (BrickId, SliceError)> {
    for (brick, _) in legs {
        controls.get(brick).map_err(|cause| (brick, cause))?;
    }
    let opened = |(brick, _)| {
        let lost = || SliceError::Lost("the connection has ended".into());
        controls.opened(brick).ok_or_else(|| (brick, lost()))
    };
    Ok([opened(legs[0])?, opened(legs[1])?])
}

/// The same pages of two legs, and the page to go on with.
type ListsOfBoth = ([Vec<PageVersion>; 2], Option<PageNo>);

/// Lists the pages of a range that both legs list, and the page to go on with; none: the slice ends.
pub(crate) fn list_both(
    controls: [&dyn BrickControl; 2],
    legs: [(BrickId, SliceId); 2],
    range: &VersionRange,
) -> Result<ListsOfBoth, (BrickId, SliceError)> {
    let list = |at: usize| {
        let (brick, slice) = legs[at];
        let listed = controls[at].list_versions(slice, range);
        listed.map_err(|cause| (brick, cause))
    };
    let lists = [list(0)?, list(1)?];
    let next = lists.iter().filter_map(|list| list.next).min();
    let versions = lists.map(|mut list| {
        list.versions
            .retain(|it| next.is_none_or(|next| it.page < next));
        list.versions
    });
    Ok((versions, next))
}

/// Compares the views of the missing snapshots on both legs from a page on. Returns the page to go on with; none: the slice ends.
fn compare(
    (source, target): (&dyn BrickControl, &dyn BrickControl),
    copy: &VersionCopy,
    missing: &[Epoch],
    from: PageNo,
) -> Result<(VersionPlan, Option<PageNo>), (BrickId, SliceError)> {
    let below = Epoch(copy.below.0);
    let range = VersionRange {
        below,
        snapshots: missing.to_vec(),
        from,
    };
    let ([of_source, of_target], next) =
        list_both([source, target], [copy.source, copy.target], &range)?;
    let versions = (&of_source[..], &of_target[..]);
    let plan = plan_version_edits(versions, below, (missing, &copy.complete), &copy.marks);
    Ok((plan, next))
}

/// Makes the edits of a plan. Returns those that add pages which the source cannot read.
fn edit(
    (source, target): (&dyn BrickControl, &dyn BrickControl),
    copy: &VersionCopy,
    plan: &VersionPlan,
) -> Result<Vec<VersionEdit>, (BrickId, SliceError)> {
    let mut unread = Vec::new();
    for edits in split_edits(&plan.edits) {
        let mut readable = Vec::new();
        let mut data = Vec::new();
        for edit in edits {
            match read_added(source, copy, edit) {
                Ok(page) => {
                    data.extend(page);
                    readable.push(*edit);
                }
                Err(SliceError::Lost(cause)) => {
                    return Err((copy.source.0, SliceError::Lost(cause)));
                }
                Err(cause) => {
                    let (volume, slice) = (&copy.volume, copy.source.1);
                    tracing::warn!(%volume, %slice, page = edit.page.0, %cause, "cannot read a page of a snapshot for another copy");
                    unread.push(*edit);
                }
            }
        }
        if readable.is_empty() {
            continue;
        }
        let request = VersionEdits {
            below: Epoch(copy.below.0),
            edits: readable,
            data: data.into(),
        };
        let edited = target.edit_versions(copy.target.1, &request);
        edited.map_err(|cause| (copy.target.0, cause))?;
    }
    Ok(unread)
}

/// Edits in requests of one leaf each.
fn split_edits(edits: &[VersionEdit]) -> impl Iterator<Item = &[VersionEdit]> {
    let of_leaf = |one: &VersionEdit, other: &VersionEdit| {
        one.page.0 / LEAF_PAGES == other.page.0 / LEAF_PAGES
    };
    let of_leaves = edits.chunk_by(of_leaf);
    of_leaves.flat_map(|edits| edits.chunks(VERSION_EDITS_MAX))
}

/// The bytes of the version that an edit adds: it dies at a snapshot that sees it. None of other edits.
fn read_added(
    source: &dyn BrickControl,
    copy: &VersionCopy,
    edit: &VersionEdit,
) -> Result<Vec<u8>, SliceError> {
    const PAGE: u64 = PAGE_BYTES as u64;
    match (edit.from, edit.to) {
        (None, Some(snapshot)) => {
            let range = (edit.page.0.saturating_mul(PAGE), PAGE_BYTES as u32);
            source.read_version(copy.source.1, snapshot, range)
        }
        _ => Ok(vec![]),
    }
}
