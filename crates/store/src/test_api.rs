//! Internals for the integration tests of this crate. Nothing else may use them.
//!
//! The traits call the methods of the same names that the crate keeps to itself.

pub use crate::format::bitmap::update_line_checksum;
pub use crate::owner::defects::forget_granted_frames;
pub use crate::shared::control::cells::SessionCells;
pub use crate::shared::wait::explored::{Explorer, set_explorer};

use crate::control::{Control, FrameRun, LockTimeout, LockWords};
use crate::format::bitmap::Bitmap;
use crate::format::frame_set::FrameSet;
use crate::format::{geometry, object};
use crate::journal::Journal;
use crate::pool::{ObjectError, Pool};
use crate::pool_mapping::{Handle, PoolMapping, StoreError};
use crate::recovery::{self, PoolError};
use crate::scrub::ScrubReport;
use crate::session::Session;
use crate::slot::Slot;
use crate::superblock::Superblock;
use crate::table::SlotLocation;
use pagemesh_base::ids::{Epoch, FrameNo, ObjectId, PageNo, Seq};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_pmem::Media;
use std::sync::atomic::AtomicU64;

/// Bytes from an object's entry to the slot of its root.
pub const ROOT_AT: usize = object::ROOT_AT;
/// Bytes from an object's entry to the copy of its first line.
pub const COPY_AT: usize = object::COPY_AT;

/// The first byte of a frame.
#[must_use]
pub fn frame_at(frame: FrameNo) -> usize {
    geometry::frame_at(frame)
}

/// Recovers a pool and opens none; `is_ordered`: the medium is memory.
///
/// # Errors
/// When the medium is no pool, or damaged beyond repair.
pub fn recover<M: Media>(media: &M, is_ordered: bool) -> Result<(), PoolError> {
    recovery::recover(media, is_ordered, None, &[]).map(drop)
}

/// The owner's frames and journals.
pub trait PoolInternals {
    fn superblock(&self) -> &Superblock;
    fn checkpoint_limit(&self) -> Seq;
    fn partial_checkpoint(&mut self) -> Result<(), ObjectError>;
    fn is_journal_blocked(&self) -> bool;
    fn scrub_journal(&mut self, number: u32, found: &mut ScrubReport) -> Result<u64, ObjectError>;
    fn journal_at(&mut self, number: u32, position: u64) -> Journal;
    /// The end of a journal's applied records.
    fn applied_end(&mut self, number: u32) -> u64;
    fn free_frames(&self) -> u64;
    /// Takes a run of at most this many free frames; none: no frame is free.
    fn allocate_frames(&mut self, want: u64) -> Option<FrameRun>;
    fn return_frames(&mut self, run: FrameRun);
    /// Grants frames to a session, up to `wanted`.
    fn grant_frames(&mut self, number: u32, wanted: u64);
    /// Lets the next maintenance merge the version log, whatever its length.
    fn merge_versions_soon(&mut self);
    /// A bit for each frame that the owner counts as used.
    fn used_frames(&self) -> &[u64];
    /// Appends lines of no slice to the version log until it has this room.
    fn fill_version_log(&mut self, room: u64) -> Result<(), ObjectError>;
    /// Where the lines of the version log are, from its head on.
    fn version_lines(&self) -> Vec<usize>;
    /// Where the pages with the head, the list of snapshots, the directory and the entries of a slice's versions are, as far
    /// as they are written.
    fn version_pages(&self, slice: SliceId) -> Result<Vec<usize>, ObjectError>;
    /// A bit for each frame that the page tables name; none: a table is damaged.
    fn mapped_frames(&self) -> Option<Vec<u64>>;
    /// The number of used frames by the bitmap on the medium, and whether a line is damaged.
    fn stored_used_frames(&self) -> (u64, bool);
}

impl<M: Media> PoolInternals for Pool<M> {
    fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    fn checkpoint_limit(&self) -> Seq {
        Pool::checkpoint_limit(self)
    }

    fn partial_checkpoint(&mut self) -> Result<(), ObjectError> {
        Pool::partial_checkpoint(self)
    }

    fn is_journal_blocked(&self) -> bool {
        Pool::is_journal_blocked(self)
    }

    fn scrub_journal(&mut self, number: u32, found: &mut ScrubReport) -> Result<u64, ObjectError> {
        Pool::scrub_journal(self, number, found)
    }

    fn journal_at(&mut self, number: u32, position: u64) -> Journal {
        Pool::journal_at(self, number, position)
    }

    fn applied_end(&mut self, number: u32) -> u64 {
        self.sessions.session(number).applied_journal.end()
    }

    fn free_frames(&self) -> u64 {
        self.frame_allocator.free()
    }

    fn allocate_frames(&mut self, want: u64) -> Option<FrameRun> {
        self.frame_allocator.allocate(want)
    }

    fn return_frames(&mut self, run: FrameRun) {
        self.frame_allocator.return_unused(run);
    }

    fn grant_frames(&mut self, number: u32, wanted: u64) {
        let frames = &mut self.frame_allocator;
        let session = self.sessions.session(number);
        session.refill(&self.mapping, number, frames, (wanted, u64::MAX), 0);
    }

    fn merge_versions_soon(&mut self) {
        self.merge_all_soon();
    }

    fn fill_version_log(&mut self, room: u64) -> Result<(), ObjectError> {
        Ok(Pool::fill_version_log(self, room)?)
    }

    fn version_lines(&self) -> Vec<usize> {
        let log = &self.superblock.version_log;
        let lines = (log.head..log.tail).map(|position| log.line_at(position));
        lines.map(|(frame, at)| frame_at(frame) + at).collect()
    }

    fn version_pages(&self, slice: SliceId) -> Result<Vec<usize>, ObjectError> {
        self.version_page_places(slice)
    }

    fn used_frames(&self) -> &[u64] {
        self.frame_allocator.bitmap().words()
    }

    fn mapped_frames(&self) -> Option<Vec<u64>> {
        let (data, geometry) = (&self.mapping.data, self.mapping.geometry());
        let end = self.superblock.objects_end;
        let (frames, is_whole) = FrameSet::from_tables(
            &**data,
            geometry,
            end,
            (&self.superblock.version_log, self.mapping.pool),
        );
        is_whole.then(|| frames.words().to_vec())
    }

    fn stored_used_frames(&self) -> (u64, bool) {
        let (data, geometry) = (&self.mapping.data, self.mapping.geometry());
        let ends = self.superblock.bitmap_ends;
        let (bitmap, damaged) = Bitmap::load(&**data, geometry, self.mapping.pool, ends);
        (bitmap.used(), !damaged.is_empty())
    }
}

/// Slots of page tables.
pub trait MappingInternals {
    fn locate(&self, object: ObjectId, level: u8, page: PageNo)
    -> Result<SlotLocation, StoreError>;
    fn slot(&self, at: usize, page: PageNo) -> Result<Slot, StoreError>;
}

impl<M: Media> MappingInternals for PoolMapping<M> {
    fn locate(
        &self,
        object: ObjectId,
        level: u8,
        page: PageNo,
    ) -> Result<SlotLocation, StoreError> {
        PoolMapping::locate(self, object, level, page)
    }

    fn slot(&self, at: usize, page: PageNo) -> Result<Slot, StoreError> {
        PoolMapping::slot(self, at, page)
    }
}

/// Words of the control segment.
pub trait ControlInternals {
    fn seq(&self) -> &AtomicU64;
    fn session_cells(&self, session: u32) -> SessionCells<'_>;
    fn lock(&self, words: &[u16], session: u32) -> Result<(), LockTimeout>;
    fn unlock(&self, words: &[u16]);
    fn is_unlocked(&self, range: &LockWords) -> bool;
    fn release_all(&self, session: u32);
}

impl ControlInternals for Control {
    fn seq(&self) -> &AtomicU64 {
        Control::seq(self)
    }

    fn session_cells(&self, session: u32) -> SessionCells<'_> {
        Control::session_cells(self, session)
    }

    fn lock(&self, words: &[u16], session: u32) -> Result<(), LockTimeout> {
        Control::lock(self, words, session)
    }

    fn unlock(&self, words: &[u16]) {
        Control::unlock(self, words);
    }

    fn is_unlocked(&self, range: &LockWords) -> bool {
        Control::is_unlocked(self, range)
    }

    fn release_all(&self, session: u32) {
        Control::release_all(self, session);
    }
}

/// The state of a session between operations.
pub trait SessionInternals {
    fn slot_at(&mut self, handle: &Handle, page: PageNo) -> Result<Option<usize>, StoreError>;
    fn link_leaf(&mut self, handle: &Handle, page: PageNo, epoch: Epoch) -> Result<(), StoreError>;
    fn record_complete(&mut self, stamp: Stamp);
    /// The end of the session's journal.
    fn journal_end(&self) -> u64;
}

impl<M: Media> SessionInternals for Session<M> {
    fn slot_at(&mut self, handle: &Handle, page: PageNo) -> Result<Option<usize>, StoreError> {
        Session::slot_at(self, handle, page)
    }

    fn link_leaf(&mut self, handle: &Handle, page: PageNo, epoch: Epoch) -> Result<(), StoreError> {
        Session::link_leaf(self, handle, page, epoch)
    }

    fn record_complete(&mut self, stamp: Stamp) {
        Session::record_complete(self, stamp);
    }

    fn journal_end(&self) -> u64 {
        self.journal.end()
    }
}
