//! Deliberate defects of a write ([`crate::defect`]), as hooks at the steps that they break. Without
//! the feature `defects` each hook is a constant or nothing.

use super::{LegSession, Session};
use crate::defect::{self, Defect};
use crate::format::frame_word::FrameWord;
use crate::format::record::{Change, Record};
use crate::format::slot::Slot;
use crate::shared::control::SessionCells;
use crate::shared::pool_mapping::PoolMapping;
use pagemesh_base::ids::{Epoch, Seq};
use pagemesh_base::slice::Stamp;
use pagemesh_pmem::{Media, UnfencedStores};
use std::sync::atomic::Ordering;

/// Takes the number of an operation before its locks.
#[inline(always)]
pub(super) fn number_before_locks(stamp: &impl Fn() -> Stamp) -> Option<Stamp> {
    defect::is(Defect::NumberedBeforeLocks).then(stamp)
}

/// Whether a write takes no lock words.
#[inline(always)]
pub(super) fn skips_locks() -> bool {
    defect::is(Defect::NotLocked)
}

/// The runs of a transaction that it locks.
#[inline(always)]
pub(super) fn runs_to_lock<T>(runs: &[T]) -> &[T] {
    if defect::is(Defect::GroupNotLocked) {
        &runs[..1]
    } else {
        runs
    }
}

/// Whether the floor is published after the seq was taken.
#[inline(always)]
pub(super) fn delays_floor() -> bool {
    defect::is(Defect::FloorAfterSeq)
}

/// Publishes the floor that [`delays_floor`] held back.
#[inline(always)]
pub(super) fn store_delayed_floor(cells: SessionCells<'_>, seq: Seq) {
    if delays_floor() {
        cells.floor().store(seq.0, Ordering::Relaxed);
    }
}

/// The index of the leg that gets the record number `at`.
#[inline(always)]
pub(super) fn leg_in_order(at: usize, count: usize) -> usize {
    if defect::is(Defect::LastLegFirst) {
        count - 1 - at
    } else {
        at
    }
}

/// Publishes a group up to the end of its first record, before the others are there.
#[inline(always)]
pub(super) fn publish_group_early<M: Media>(session: &Session<M>, end: impl FnOnce() -> u64) {
    if defect::is(Defect::GroupPublishedEarly) {
        let cells = session.session_cells();
        cells.committed().store(end(), Ordering::Release);
    }
}

/// Releases locks, or copies patches into their pages, before the fence.
#[inline(always)]
pub(super) fn before_fence<M: Media>(legs: &[LegSession<'_, M>]) {
    if defect::is(Defect::UnlockBeforeFence) {
        unlock_all(legs);
    }
    if defect::is(Defect::PatchedBeforeFence) {
        for LegSession { session, .. } in legs {
            session.write_before_fence();
        }
    }
}

/// Whether the records are not fenced where they must be.
#[inline(always)]
pub(super) fn withholds_fence() -> bool {
    defect::is(Defect::NoCommitFence) || defect::is(Defect::SwapBeforeFence)
}

/// Releases locks before the slots are swapped.
#[inline(always)]
pub(super) fn after_fence<M: Media>(legs: &[LegSession<'_, M>]) {
    if defect::is(Defect::UnlockBeforePublish) {
        unlock_all(legs);
    }
}

/// The records that are fenced after the slots were swapped, because [`withholds_fence`] held them
/// back.
#[inline(always)]
pub(super) fn late_fence(withheld: Option<UnfencedStores>) -> Option<UnfencedStores> {
    withheld.filter(|_| defect::is(Defect::SwapBeforeFence))
}

/// Whether the bytes of patches are not flushed.
#[inline(always)]
pub(super) fn skips_patch_flush() -> bool {
    defect::is(Defect::SessionPatchNotFlushed)
}

/// The end of the slots that are flushed from `first` on.
#[inline(always)]
pub(super) fn flushed_slots_end(first: usize, end: usize) -> usize {
    if defect::is(Defect::SessionSlotsNotFlushed) {
        first
    } else {
        end
    }
}

/// The line below which slots are reported as flushed: the first line of the present record.
#[inline(always)]
pub(super) fn settled_line(start: u64, end: u64) -> u64 {
    if defect::is(Defect::LastSlotsReportedFlushed) {
        end
    } else {
        start
    }
}

/// The word of the frame table for the page of a change.
#[inline(always)]
pub(super) fn frame_word<M: Media>(
    mapping: &PoolMapping<M>,
    record: &Record,
    change: &Change,
) -> u64 {
    let frame = change
        .new
        .frame()
        .filter(|_| defect::is(Defect::BirthNotStored));
    frame.map_or_else(
        || record.frame_word(change),
        |frame| {
            let before = mapping.frame_word(frame).birth();
            FrameWord::new(change.sums.crc, before.unwrap_or(Epoch(1))).bits()
        },
    )
}

/// Whether a copy of holes refuses a damaged slot among `count` from byte `at` on.
#[inline(always)]
pub(super) fn refuses_damage<M: Media>(mapping: &PoolMapping<M>, at: usize, count: usize) -> bool {
    let is_damaged = |index: usize| Slot::decode(mapping.meta.load(at + index * 8)).is_err();
    defect::is(Defect::DamageNotCleared) && (0..count).any(is_damaged)
}

fn unlock_all<M: Media>(legs: &[LegSession<'_, M>]) {
    for LegSession { session, .. } in legs {
        session.mapping.control.unlock(&session.lock_words);
    }
}
