//! The check of snapshots: compares what they see on the copies of a volume, by the checksums of pages.
//!
//! A call compares for a bounded time, and says where the next one goes on. Each column is compared with its first in-sync
//! leg. What a snapshot sees does not change, so clients write meanwhile.

use crate::fault::Fault;
use crate::manager::{Manager, ManagerState};
use crate::snapshot_copies::has_all;
use crate::snapshot_lists::live_snapshot;
use crate::snapshots::{SnapshotName, SnapshotState, VolumeSnapshots};
use crate::sweep::BrickConnections;
use crate::wire::{CheckPosition, SnapshotCheckReply, SnapshotDifference};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::{BrickId, Column, LegState, SliceId, VolumeName};
use pagemesh_base::slice::{
    LISTED_SNAPSHOTS_MAX, SliceError, VIEWS_ONLY, VersionRange, unequal_views,
};
use pagemesh_base::units::PAGE_BYTES;
use std::collections::BTreeMap;
use std::time::Duration;

/// The time of one call.
const CHECK_CALL_TIME: Duration = Duration::from_secs(5);
/// Lists of one call, at most.
const CHECK_CALL_LISTS: usize = 512;
/// Differences of one answer; the call ends behind the list that exceeds it.
const DIFFERENCES_MAX: usize = 1000;

/// Two legs of a column, and snapshots that both have.
struct LegPair {
    segment: usize,
    column: usize,
    legs: [(BrickId, SliceId); 2],
    slice_bytes: u64,
    snapshots: Vec<Epoch>,
}

impl Manager {
    /// Compares what the snapshots of a volume, or one of them, see on its copies, from a position on.
    ///
    /// # Errors
    /// When there is no such volume or snapshot, the layout has changed since the position was answered, or a brick fails.
    pub fn check_snapshots(
        &self,
        volume: &VolumeName,
        snapshot: Option<&SnapshotName>,
        from: Option<CheckPosition>,
    ) -> Result<SnapshotCheckReply, Fault> {
        let (begin, names, pairs) = {
            let book = self.state();
            let only = snapshot.map(|name| live_snapshot(&book, volume, name));
            let only = only.transpose()?.map(|record| Epoch(record.epoch.0));
            let layout = &book.volume(volume)?.layout_state.layout;
            let begin = from.unwrap_or(CheckPosition {
                layout: layout.epoch,
                pair: 0,
                page: 0,
            });
            if begin.layout != layout.epoch {
                return Err(Fault::invalid_field(
                    format!("the layout of the volume {volume} has changed during the check"),
                    "begin the check again",
                ));
            }
            let (names, pairs) = leg_pairs(&book, volume, only);
            (begin, names, pairs)
        };
        let mut reply = SnapshotCheckReply {
            volume: volume.clone(),
            checked_pages: 0,
            differences: vec![],
            done_bytes: 0,
            all_bytes: pairs.iter().map(|pair| pair.slice_bytes).sum(),
            next: None,
        };
        let end = self.clock.elapsed() + CHECK_CALL_TIME;
        let mut controls = self.brick_connections();
        let (mut at, mut lists) = (begin, 0);
        while let Some(pair) = pairs.get(at.pair) {
            let is_over = lists == CHECK_CALL_LISTS || self.clock.elapsed() >= end;
            if lists > 0 && is_over || reply.differences.len() >= DIFFERENCES_MAX {
                reply.next = Some(at);
                break;
            }
            lists += 1;
            let next = self.check_list(&mut controls, pair, (PageNo(at.page), &names), &mut reply);
            let next = next.map_err(|(brick, cause)| self.brick_fault(brick, cause))?;
            (at.pair, at.page) = match next {
                Some(page) => (at.pair, page.0),
                None => (at.pair + 1, 0),
            };
        }
        let ended = pairs.iter().take(at.pair).map(|pair| pair.slice_bytes);
        let of_page = at.page.saturating_mul(PAGE_BYTES as u64);
        reply.done_bytes = ended
            .sum::<u64>()
            .saturating_add(of_page)
            .min(reply.all_bytes);
        Ok(reply)
    }

    /// Compares the pages of one list. Returns the page to go on with; none: the slice ends.
    fn check_list(
        &self,
        controls: &mut BrickConnections<'_>,
        pair: &LegPair,
        (from, names): (PageNo, &BTreeMap<Epoch, SnapshotName>),
        reply: &mut SnapshotCheckReply,
    ) -> Result<Option<PageNo>, (BrickId, SliceError)> {
        let range = VersionRange {
            below: VIEWS_ONLY,
            snapshots: pair.snapshots.clone(),
            from,
        };
        let mut list = |(brick, slice): (BrickId, SliceId)| {
            let listed = controls
                .get(brick)
                .and_then(|control| control.list_versions(slice, &range));
            listed.map_err(|cause| (brick, cause))
        };
        let [mut one, mut other] = [list(pair.legs[0])?, list(pair.legs[1])?];
        let next = [one.next, other.next].into_iter().flatten().min();
        for list in [&mut one, &mut other] {
            let versions = &mut list.versions;
            versions.retain(|it| next.is_none_or(|next| it.page < next));
        }
        reply.checked_pages += one.versions.len() as u64;
        let unequal = unequal_views((&one.versions, &other.versions), &pair.snapshots);
        for (page, snapshot) in unequal {
            let Some(name) = names.get(&snapshot) else {
                continue;
            };
            reply.differences.push(SnapshotDifference {
                snapshot: name.clone(),
                segment: pair.segment,
                column: pair.column,
                offset_bytes: page.0.saturating_mul(PAGE_BYTES as u64),
                copies: pair
                    .legs
                    .map(|(brick, _)| self.brick_label(brick).to_string()),
            });
        }
        Ok(next)
    }
}

/// The comparisons of a volume, in an order that a layout keeps, and the names of its snapshots.
fn leg_pairs(
    book: &ManagerState,
    volume: &VolumeName,
    only: Option<Epoch>,
) -> (BTreeMap<Epoch, SnapshotName>, Vec<LegPair>) {
    let mut names = BTreeMap::new();
    let mut pairs = Vec::new();
    let known = (book.volumes.get(volume), book.snapshots.of(volume));
    let (Some(record), Some(of)) = known else {
        return (names, pairs);
    };
    for record in of.live().filter(|it| it.state == SnapshotState::Committed) {
        let epoch = Epoch(record.epoch.0);
        if only.is_none_or(|only| only == epoch) {
            names.insert(epoch, record.name.clone());
        }
    }
    let segments = record.layout_state.layout.segments.iter().enumerate();
    for (segment, found) in segments {
        for (column, legs) in found.columns.iter().enumerate() {
            let slice_bytes = found.bytes / found.columns.len().max(1) as u64;
            let add = |(legs, snapshots)| {
                pairs.push(LegPair {
                    segment,
                    column,
                    legs,
                    slice_bytes,
                    snapshots,
                })
            };
            compared_legs(of, &names, legs).into_iter().for_each(add);
        }
    }
    (names, pairs)
}

/// The first in-sync leg of a column with each other one, and the snapshots that both have.
fn compared_legs(
    of: &VolumeSnapshots,
    names: &BTreeMap<Epoch, SnapshotName>,
    column: &Column,
) -> Vec<([(BrickId, SliceId); 2], Vec<Epoch>)> {
    let in_sync = column
        .legs
        .iter()
        .filter(|leg| leg.state == LegState::InSync);
    let mut legs = in_sync.map(|leg| (leg.brick, leg.slice));
    let Some(first) = legs.next() else {
        return vec![];
    };
    let mut found = Vec::new();
    for leg in legs {
        let named = of
            .live()
            .filter(|it| names.contains_key(&Epoch(it.epoch.0)));
        let of_both = named.filter(|it| [first, leg].iter().all(|leg| has_all(of, it, leg.1)));
        let both: Vec<Epoch> = of_both.map(|it| Epoch(it.epoch.0)).collect();
        found.extend(
            both.chunks(LISTED_SNAPSHOTS_MAX)
                .map(|some| ([first, leg], some.to_vec())),
        );
    }
    found
}
