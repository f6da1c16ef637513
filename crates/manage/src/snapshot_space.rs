//! The space of the snapshots of a volume: what each keeps, and what a deletion would free.

use crate::fault::Fault;
use crate::manager::{Manager, ManagerState};
use crate::slices::{SliceLocation, slice_locations};
use crate::snapshot_lists::live_snapshot;
use crate::snapshots::{PagesByRun, SnapshotName, SnapshotState, account, add_runs};
use crate::wire::{SnapshotSpaceInfo, VolumeSpaceReply};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::{Column, EpochNumber, LegState, VolumeName};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// The time of one call. A volume of 16 TiB takes some seconds.
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
            (
                named_snapshots(&book, volume),
                dropped,
                self.counted_slices(&book, volume)?,
            )
        };
        let pages = self.count_pages(volume, &places)?;
        let epochs: Vec<Epoch> = snapshots.iter().map(|(epoch, _)| Epoch(epoch.0)).collect();
        let bytes = account(&pages, &epochs, &dropped);
        let info = snapshots
            .into_iter()
            .zip(bytes.snapshots)
            .map(|((epoch, name), bytes)| SnapshotSpaceInfo {
                name,
                epoch,
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

    /// One slice of each column: that of the in-sync leg with most of the snapshots.
    fn counted_slices(
        &self,
        book: &ManagerState,
        volume: &VolumeName,
    ) -> Result<Vec<SliceLocation>, Fault> {
        let layout = &book.volume(volume)?.layout_state.layout;
        let of = book.snapshots.of(volume);
        let count = |slice| {
            let live = of.into_iter().flat_map(|of| of.live());
            let layouts = live.filter_map(|record| of.and_then(|of| of.layout(record)));
            let columns = layouts.flat_map(|layout| &layout.segments);
            let legs = columns.flat_map(|segment| &segment.columns);
            legs.flat_map(|column| &column.legs)
                .filter(|leg| leg.slice == slice && leg.state == LegState::InSync)
                .count()
        };
        let columns = layout.segments.iter().flat_map(|it| &it.columns);
        let slice_of = |column: &Column| {
            let in_sync = column
                .legs
                .iter()
                .filter(|leg| leg.state == LegState::InSync);
            let best = in_sync.max_by_key(|leg| count(leg.slice))?;
            slice_locations(&layout.segments).find(|it| it.slice == best.slice)
        };
        let found: Option<Vec<SliceLocation>> = columns.map(slice_of).collect();
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
        places: &[SliceLocation],
    ) -> Result<PagesByRun, Fault> {
        let until = Instant::now() + SPACE_CALL_TIME;
        let mut controls = self.brick_connections();
        let mut pages = PagesByRun::new();
        for place in places {
            let mut from = Some(PageNo(0));
            while let Some(page) = from {
                let mut step = || {
                    controls
                        .get(place.brick)?
                        .count_seen_pages(place.slice, page)
                };
                let counted = step().map_err(|cause| self.brick_fault(place, cause))?;
                add_runs(&mut pages, &counted.runs);
                from = counted.next;
                if from.is_some() && Instant::now() >= until {
                    return Err(Fault::invalid_field(
                        format!(
                            "the pages of the volume {volume} were not counted within {} s",
                            SPACE_CALL_TIME.as_secs()
                        ),
                        "repeat the call when its bricks are less busy",
                    ));
                }
            }
        }
        Ok(pages)
    }
}

/// The committed snapshots of a volume, in the order of their epochs.
fn named_snapshots(book: &ManagerState, volume: &VolumeName) -> Vec<(EpochNumber, SnapshotName)> {
    let of = book.snapshots.of(volume).into_iter();
    let live = of.flat_map(|of| of.live());
    let committed = live.filter(|record| record.state == SnapshotState::Committed);
    let mut named: Vec<_> = committed
        .map(|record| (record.epoch, record.name.clone()))
        .collect();
    named.sort();
    named
}
