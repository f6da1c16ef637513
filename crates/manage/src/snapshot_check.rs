//! The check of snapshots: compares their views on the copies of a volume, by the checksums of pages.
//!
//! A call compares for a bounded time, and says where the next one goes on. Each column is compared with its first in-sync
//! leg. The view of a snapshot does not change, so clients write meanwhile. Snapshots that are made during a check have no
//! part in it, and those that are deleted leave it.

use crate::fault::Fault;
use crate::manager::{Manager, ManagerState};
use crate::snapshot_copies::{has_all, list_both, open_both};
use crate::snapshot_lists::live_snapshot;
use crate::snapshots::{SnapshotName, SnapshotState};
use crate::sweep::BrickConnections;
use crate::wire::{CheckPosition, SnapshotCheckReply, SnapshotDifference};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::{BrickId, EpochNumber, Layout, LegState, SliceId, VolumeName};
use pagemesh_base::slice::{
    LISTED_SNAPSHOTS_MAX, SliceError, VIEWS_ONLY, VersionRange, unequal_views,
};
use pagemesh_base::units::PAGE_BYTES;
use std::time::Duration;

/// The time of one call.
const CHECK_CALL_TIME: Duration = Duration::from_secs(5);
/// Lists of one call, at most.
const CHECK_CALL_LISTS: usize = 512;
/// Differences of one answer; the call ends behind the list that exceeds it.
const DIFFERENCES_MAX: usize = 1000;

/// Two legs of a column.
struct LegPair {
    segment: usize,
    column: usize,
    legs: [(BrickId, SliceId); 2],
    slice_bytes: u64,
}

/// A list to compare: some snapshots that both legs of a pair have.
struct Comparison {
    pair: LegPair,
    snapshots: Vec<(Epoch, SnapshotName)>,
}

impl Comparison {
    fn epochs(&self) -> Vec<Epoch> {
        self.snapshots.iter().map(|(epoch, _)| *epoch).collect()
    }
}

impl Manager {
    /// Compares the views of the snapshots of a volume, or of one of them, on its copies, from a position on.
    ///
    /// # Errors
    /// When there is no such volume or snapshot, the layout has changed since the position was answered, or a brick fails.
    pub fn check_snapshots(
        &self,
        volume: &VolumeName,
        snapshot: Option<&SnapshotName>,
        from: Option<CheckPosition>,
    ) -> Result<SnapshotCheckReply, Fault> {
        let mut at = match from {
            Some(from) => from,
            None => first_position(&self.state(), volume)?,
        };
        let mut reply = SnapshotCheckReply {
            volume: volume.clone(),
            checked_pages: 0,
            differences: vec![],
            done_bytes: 0,
            all_bytes: 0,
            next: None,
        };
        let end = self.clock.elapsed() + CHECK_CALL_TIME;
        let mut controls = self.brick_connections();
        for lists in 0.. {
            let is_over = lists >= CHECK_CALL_LISTS || self.clock.elapsed() >= end;
            let next = next_comparison(&self.state(), (volume, snapshot), &mut at, &mut reply)?;
            let Some(comparison) = next else { break };
            if lists > 0 && is_over || reply.differences.len() >= DIFFERENCES_MAX {
                reply.next = Some(at);
                break;
            }
            let from = PageNo(at.page);
            match self.check_list(&mut controls, &comparison, from, &mut reply) {
                Ok(Some(next)) => at.page = next.0,
                Ok(None) => (at.after, at.page) = (at.through, 0),
                Err((brick, cause)) => {
                    if self.are_live(volume, &comparison) {
                        return Err(self.brick_fault(brick, cause));
                    }
                }
            }
        }
        Ok(reply)
    }

    /// Whether no snapshot of a comparison was deleted meanwhile.
    fn are_live(&self, volume: &VolumeName, comparison: &Comparison) -> bool {
        let book = self.state();
        let of = book.snapshots.of(volume);
        let is_live = |epoch: &Epoch| {
            let entry = of.and_then(|of| of.get(EpochNumber(epoch.0)));
            entry.is_some_and(|it| it.record.state == SnapshotState::Committed)
        };
        comparison.epochs().iter().all(is_live)
    }

    /// Compares the pages of one list. Returns the page to go on with; none: the slice ends.
    fn check_list(
        &self,
        controls: &mut BrickConnections<'_>,
        comparison: &Comparison,
        from: PageNo,
        reply: &mut SnapshotCheckReply,
    ) -> Result<Option<PageNo>, (BrickId, SliceError)> {
        let pair = &comparison.pair;
        let snapshots = comparison.epochs();
        let range = VersionRange {
            below: VIEWS_ONLY,
            snapshots: snapshots.clone(),
            from,
        };
        let opened = open_both(controls, pair.legs)?;
        let ([one, other], next) = list_both(opened, pair.legs, &range)?;
        reply.checked_pages += one.len() as u64;
        for (page, epoch) in unequal_views((&one, &other), &snapshots) {
            let found = comparison.snapshots.iter().find(|it| it.0 == epoch);
            let Some((_, name)) = found else { continue };
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

fn first_position(book: &ManagerState, volume: &VolumeName) -> Result<CheckPosition, Fault> {
    let layout = book.volume(volume)?.layout_state.layout.epoch;
    let newest = book.snapshots.of(volume);
    let newest = newest.and_then(|of| of.live().map(|it| it.epoch).max());
    Ok(CheckPosition {
        layout,
        newest: newest.unwrap_or(EpochNumber(0)),
        pair: 0,
        after: EpochNumber(0),
        through: EpochNumber(0),
        page: 0,
    })
}

/// The list to compare at a position, which moves to it; none: the check ends. Notes the progress.
fn next_comparison(
    book: &ManagerState,
    (volume, only): (&VolumeName, Option<&SnapshotName>),
    at: &mut CheckPosition,
    reply: &mut SnapshotCheckReply,
) -> Result<Option<Comparison>, Fault> {
    let only = only
        .map(|name| live_snapshot(book, volume, name))
        .transpose()?;
    let layout = &book.volume(volume)?.layout_state.layout;
    if at.layout != layout.epoch {
        return Err(Fault::invalid_field(
            format!("the layout of the volume {volume} has changed during the check"),
            "begin the check again",
        ));
    }
    let mut pairs = leg_pairs(layout);
    reply.all_bytes = pairs.iter().map(|pair| pair.slice_bytes).sum();
    let mut done = |pair: usize, page: u64, pairs: &[LegPair]| {
        let ended = pairs.iter().take(pair).map(|pair| pair.slice_bytes);
        let of_page = page.saturating_mul(PAGE_BYTES as u64);
        let bytes = ended.sum::<u64>().saturating_add(of_page);
        reply.done_bytes = bytes.min(reply.all_bytes);
    };
    while let Some(pair) = pairs.get(at.pair) {
        done(at.pair, at.page, &pairs);
        let snapshots = snapshots_of_both(book, (volume, only.map(|it| it.epoch)), at, pair);
        if let Some((last, _)) = snapshots.last() {
            at.through = EpochNumber(last.0);
            let pair = pairs.swap_remove(at.pair);
            return Ok(Some(Comparison { pair, snapshots }));
        }
        let is_begun = at.page > 0 && at.through > at.after;
        *at = CheckPosition {
            // The rest of a list that is deleted, or the next pair.
            pair: at.pair + usize::from(!is_begun),
            after: if is_begun { at.through } else { EpochNumber(0) },
            through: EpochNumber(0),
            page: 0,
            ..*at
        };
    }
    done(pairs.len(), 0, &pairs);
    Ok(None)
}

/// The snapshots of the list at a position that both legs have: up to its last one, or as many as a list may name.
fn snapshots_of_both(
    book: &ManagerState,
    (volume, only): (&VolumeName, Option<EpochNumber>),
    at: &CheckPosition,
    pair: &LegPair,
) -> Vec<(Epoch, SnapshotName)> {
    let Some(of) = book.snapshots.of(volume) else {
        return vec![];
    };
    let last = match at.page {
        0 => at.newest,
        _ => at.through.min(at.newest),
    };
    let meant = of.live().filter(|it| {
        it.state == SnapshotState::Committed
            && only.is_none_or(|only| only == it.epoch)
            && (at.after < it.epoch && it.epoch <= last)
            && pair.legs.iter().all(|leg| has_all(of, it, leg.1))
    });
    let named = meant.map(|it| (Epoch(it.epoch.0), it.name.clone()));
    named.take(LISTED_SNAPSHOTS_MAX).collect()
}

/// The first in-sync leg of each column with each other one, in an order that the layout keeps.
fn leg_pairs(layout: &Layout) -> Vec<LegPair> {
    let mut pairs = Vec::new();
    for (segment, found) in layout.segments.iter().enumerate() {
        let slice_bytes = found.bytes / found.columns.len().max(1) as u64;
        for (column, legs) in found.columns.iter().enumerate() {
            let in_sync = legs.legs.iter().filter(|leg| leg.state == LegState::InSync);
            let mut in_sync = in_sync.map(|leg| (leg.brick, leg.slice));
            let Some(first) = in_sync.next() else {
                continue;
            };
            pairs.extend(in_sync.map(|leg| LegPair {
                segment,
                column,
                legs: [first, leg],
                slice_bytes,
            }));
        }
    }
    pairs
}
