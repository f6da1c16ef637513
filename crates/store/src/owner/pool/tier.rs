//! The owner's side of a pool with flash behind memory: frames of both classes, and sessions that wait for a demotion.
//!
//! Invariants: a flash frame is reserved before a page is copied to it, and until a record names it or it is returned.
//! No session is granted a flash frame.

use super::Pool;
use crate::defect::{self, Defect};
use crate::owner::frame_allocator::FrameClass;
use crate::session::tier::PageMove;
use crate::shared::wait::Deadline;
use pagemesh_base::ids::FrameNo;
use pagemesh_pmem::Media;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The time for which sessions wait for demotions without an answer, before the owner looks for a stuck operation.
const DEMOTION_LATE: Duration = Duration::from_secs(1);

/// The demotions of a pool, as its owner knows them.
#[derive(Default)]
pub(crate) struct TierState {
    /// The session that moves pages; it does not wait for itself.
    mover: Option<u32>,
    /// Whether the mover finds pages to demote.
    can_demote: bool,
    /// Whether a session waits for frames.
    is_wanted: bool,
    /// When to look for an operation that keeps frames from becoming free. Set while sessions wait.
    next_look: Option<Deadline>,
}

/// Frames of a pool with flash, by their class. Those in use are as of the last checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierUsage {
    /// Frames in memory.
    pub memory_frames: u64,
    /// Those neither in use nor granted.
    pub memory_free: u64,
    /// Frames on flash.
    pub flash_frames: u64,
    /// Those neither in use nor reserved.
    pub flash_free: u64,
}

impl<M: Media> Pool<M> {
    /// Whether the pool has flash behind memory.
    #[must_use]
    pub fn is_tiered(&self) -> bool {
        self.mapping.geometry().flash_start().is_some()
    }

    /// The frames by class.
    #[must_use]
    pub fn tier_usage(&self) -> TierUsage {
        let geometry = self.mapping.geometry();
        let flash_start = geometry.flash_start().unwrap_or(u64::MAX);
        let count = |is_flash: bool| {
            let ranges = geometry.frame_numbers().ranges();
            let of_class = ranges.filter(|range| (range.start >= flash_start) == is_flash);
            of_class
                .map(|range: Range<u64>| range.end - range.start)
                .sum()
        };
        TierUsage {
            memory_frames: count(false),
            memory_free: self.frame_allocator.free_of(FrameClass::Memory),
            flash_frames: count(true),
            flash_free: self.frame_allocator.free_of(FrameClass::Flash),
        }
    }

    /// Names the session that moves pages. From now on sessions wait for demotions when memory is full.
    pub fn set_tier_mover(&mut self, session: Option<u32>) {
        self.tier.mover = session;
        self.tier.can_demote = session.is_some();
    }

    /// Says whether the mover finds pages to demote. If not, sessions that wait are refused by the next maintenance.
    pub fn set_can_demote(&mut self, can_demote: bool) {
        self.tier.can_demote = can_demote && self.tier.mover.is_some();
    }

    /// Whether a session waits for frames since the last call.
    pub fn take_demotion_request(&mut self) -> bool {
        std::mem::take(&mut self.tier.is_wanted)
    }

    /// Whether a session waits for the owner's answer.
    #[must_use]
    pub fn is_unanswered(&self, number: u32) -> bool {
        let cells = self.mapping.control.session_cells(number);
        let asked = cells.asked().load(Ordering::Acquire) as u32;
        asked != cells.answered().load(Ordering::Acquire)
    }

    /// Whether a session that found memory full should wait.
    pub(in crate::owner) fn waits_for_demotion(&mut self, number: u32) -> bool {
        let is_possible = self.tier.can_demote
            && self.tier.mover != Some(number)
            && self.frame_allocator.free_of(FrameClass::Flash) > 0;
        self.tier.is_wanted |= is_possible;
        is_possible
    }

    /// Whether sessions have waited for demotions for long and none was answered: an operation in progress may keep the
    /// frames from becoming free.
    pub(in crate::owner) fn is_demotion_late(&mut self) -> bool {
        let limit = || Deadline::after(DEMOTION_LATE);
        self.tier.next_look.get_or_insert_with(limit).is_over()
    }

    /// A session was answered, or no operation is stuck.
    pub(in crate::owner) fn restart_demotion_limit(&mut self) {
        self.tier.next_look = None;
    }

    /// Reserves flash frames for a demotion, at most `want`.
    #[must_use]
    pub fn reserve_flash(&mut self, want: u64) -> Vec<FrameNo> {
        self.frame_allocator.reserve_flash(want)
    }

    /// Ends the reservation of the frames of moves, and of `unused` frames. Frames of pages that stayed are free again.
    pub fn end_moves(&mut self, moves: &[PageMove], unused: &[FrameNo]) {
        let with_frame = |it: &PageMove| it.flash_frame().map(|frame| (frame, it.is_moved()));
        for (frame, is_moved) in moves.iter().filter_map(with_frame) {
            let is_used = match is_moved {
                true => !defect::is(Defect::FlashFrameFreedTwice),
                false => defect::is(Defect::FlashFrameKept),
            };
            self.frame_allocator.end_reservation(&[frame], is_used);
        }
        self.frame_allocator.end_reservation(unused, false);
    }
}
