//! The space of the snapshots of a volume: what each keeps, and what a deletion would free.

use crate::fault::Fault;
use crate::manager::{Manager, ManagerState};
use crate::slices::{SliceLocation, slice_locations};
use crate::snapshot_copies::has_all;
use crate::snapshot_lists::live_snapshot;
use crate::snapshots::{PagesByRun, SnapshotName, SnapshotState, account, add_runs};
use crate::wire::{SnapshotSpaceInfo, VolumeSpaceReply};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::{Column, EpochNumber, LegState, SliceId, VolumeName};
use pagemesh_base::slice::SliceError;
use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// The time of one call.
const SPACE_CALL_TIME: Duration = Duration::from_secs(25);

impl Manager {
    /// Counts the bytes that the snapshots of a volume keep, in one copy, and those that a deletion of some of them frees.
    /// Bricks count the pages now, so the call takes longer for a larger volume.
    ///
    /// # Errors
    /// When there is no such volume or snapshot, a part of the volume has no copy in sync, or a brick fails or takes too
    /// long.
    pub fn snapshot_space(
        &self,
        volume: &VolumeName,
        dropped: &[SnapshotName],
    ) -> Result<VolumeSpaceReply, Fault> {
        let (snapshots, dropped, places) = {
            let book = self.state();
            let dropped = dropped
                .iter()
                .map(|name| live_snapshot(&book, volume, name))
                .map(|found| found.map(|record| Epoch(record.epoch.0)))
                .collect::<Result<BTreeSet<Epoch>, Fault>>()?;
            let places = self.counted_slices(&book, volume)?;
            (named_snapshots(&book, volume, &places), dropped, places)
        };
        let pages = self.count_pages(volume, &places)?;
        let epochs: Vec<Epoch> = snapshots.iter().map(|(epoch, ..)| Epoch(epoch.0)).collect();
        let bytes = account(&pages, &epochs, &dropped);
        let info =
            snapshots
                .into_iter()
                .zip(bytes.snapshots)
                .map(|((epoch, name, complete), bytes)| SnapshotSpaceInfo {
                    name,
                    epoch,
                    complete,
                    exclusive_bytes: bytes.exclusive,
                    shared_bytes: bytes.shared,
                    referenced_bytes: bytes.referenced,
                    written_bytes: bytes.written,
                });
        Ok(VolumeSpaceReply {
            volume: volume.clone(),
            volume_bytes: bytes.live,
            snapshot_bytes: bytes.kept,
            written_bytes: bytes.written,
            freed_bytes: bytes.freed,
            snapshots: info.collect(),
        })
    }

    /// The slice of one leg of each column, with the number of its segment: the in-sync leg with most of the snapshots.
    fn counted_slices(
        &self,
        book: &ManagerState,
        volume: &VolumeName,
    ) -> Result<Vec<(usize, SliceLocation)>, Fault> {
        let layout = &book.volume(volume)?.layout_state.layout;
        let mut counts: HashMap<SliceId, usize> = HashMap::new();
        let of = book.snapshots.of(volume);
        for (of, record) in of
            .into_iter()
            .flat_map(|of| of.live().map(move |it| (of, it)))
        {
            let columns = of.layout(record).into_iter().flat_map(|it| &it.segments);
            let legs = columns.flat_map(|it| &it.columns).flat_map(|it| &it.legs);
            let in_sync = legs.filter(|leg| leg.state == LegState::InSync);
            for slice in in_sync.map(|leg| &leg.slice).chain(&record.copies) {
                *counts.entry(*slice).or_default() += 1;
            }
        }
        let places: HashMap<SliceId, SliceLocation> = slice_locations(&layout.segments)
            .map(|place| (place.slice, place))
            .collect();
        let slice_of = |(segment, column): (usize, &Column)| {
            let legs = column.legs.iter();
            let in_sync = legs.filter(|leg| leg.state == LegState::InSync);
            let best = in_sync.max_by_key(|leg| counts.get(&leg.slice))?;
            Some((segment, places.get(&best.slice)?.clone()))
        };
        let segments = layout.segments.iter().enumerate();
        let columns = segments.flat_map(|(at, it)| it.columns.iter().map(move |it| (at, it)));
        let found: Option<Vec<_>> = columns.map(slice_of).collect();
        found.ok_or_else(|| {
            Fault::invalid_field(
                format!("a part of the volume {volume} has no copy in sync to count"),
                "see `pagemesh volume show`, and repeat the call once a copy is back",
            )
        })
    }

    fn count_pages(
        &self,
        volume: &VolumeName,
        places: &[(usize, SliceLocation)],
    ) -> Result<PagesByRun, Fault> {
        let until = Instant::now() + SPACE_CALL_TIME;
        let mut controls = self.brick_connections();
        let mut pages = PagesByRun::new();
        for (_, place) in places {
            let mut from = Some(PageNo(0));
            while let Some(page) = from {
                let mut step = || {
                    controls
                        .get(place.brick)?
                        .count_seen_pages(place.slice, page)
                };
                let counted = step().map_err(|cause| self.brick_fault(place.brick, cause))?;
                add_runs(&mut pages, &counted.runs);
                from = counted.next;
                if from.is_some() && Instant::now() >= until {
                    let cause = SliceError::Refused(format!(
                        "the pages of the volume {volume} were not counted within {} s; repeat the call when its bricks \
                         are less busy",
                        SPACE_CALL_TIME.as_secs()
                    ));
                    return Err(self.brick_fault(place.brick, cause));
                }
            }
        }
        Ok(pages)
    }
}

/// The committed snapshots of a volume, in the order of their epochs, and whether the counted slices have all of each.
fn named_snapshots(
    book: &ManagerState,
    volume: &VolumeName,
    places: &[(usize, SliceLocation)],
) -> Vec<(EpochNumber, SnapshotName, bool)> {
    let mut named = Vec::new();
    let of = book.snapshots.of(volume);
    for (of, record) in of
        .into_iter()
        .flat_map(|of| of.live().map(move |it| (of, it)))
    {
        if record.state != SnapshotState::Committed {
            continue;
        }
        // The volume had no later segments then.
        let segments = of.layout(record).map_or(0, |it| it.segments.len());
        let has = |(segment, place): &(usize, SliceLocation)| {
            *segment >= segments || has_all(of, record, place.slice)
        };
        named.push((record.epoch, record.name.clone(), places.iter().all(has)));
    }
    named.sort();
    named
}
