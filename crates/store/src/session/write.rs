//! A session: the right of one thread to change a pool's objects.
//!
//! Changes of several runs of pages as a whole: [`transact`](crate::session::transaction::transact).
//! Operations on several legs: [`multi_pool_op`]. Changes of a part of a page in place: [`patch`].
//!
//! A write of pages, over one to three pools at once ([`write()`]), takes these steps:
//!
//! 1. `Session::ensure_resources`: granted frames, and room in the journal;
//! 2. `Session::begin_op`: not revoked, object live, epoch new enough;
//! 3. take the lock words, then the seqs;
//! 4. stream the bytes into newly allocated frames of every pool, with their checksum from the same
//!    pass, and stream one record per pool;
//! 5. issue **one fence: the commit**;
//! 6. swap the slots, publish the committed index, unlock.
//!
//! Locks and seqs come before the copy. A locked instruction waits for bytes streamed before it,
//! and would cost a second drain. The copy of a page takes half a microsecond; a death during the
//! copy is handled like a death anywhere in the operation.
//!
//! Invariants:
//! - nothing fails between the taking of a seq and the publication of its record;
//! - before the commit, the control segment and the journal hold all that the owner needs to roll a
//!   dead session's operation forward or to discard it;
//! - a session waits for the owner only between operations.

use crate::defect::{self, Defect};
use crate::format::journal::Journal;
use crate::format::object::Gate;
use crate::format::record::{
    Change, NO_SUMS, Record, RecordAddress, add_checksum, lines, set_sums,
};
use crate::format::{slot::Slot, table::SlotLocation};
use crate::session::leaf_cache::LeafCache;
use crate::session::multi_pool_op::{self, OpRequirements};
use crate::session::partial_pages::{self, PageKey, PartialPageCache};
use crate::session::patch::{self, PATCH_MAX, PatchBuffer};
use crate::shared::control::{FrameRun, LockWords, SessionCells};
use crate::shared::pool_mapping::{
    Handle, NODE_SLOTS, PoolMapping, StoreError, damaged_page_error, frame_at,
};
use crate::shared::wait::{self, Deadline};
use pagemesh_base::checksum::{PageChecksums, crc32c, word_sum};
use pagemesh_base::ids::{Epoch, FrameNo, ObjectId, PageNo, Seq};
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::{Media, UnfencedStores};
use std::collections::VecDeque;
use std::sync::{Arc, atomic::Ordering};
use std::time::Duration;

/// Pages of the longest record: half a node, so that an entry stays well below the length of a
/// journal.
pub const RECORD_PAGES_MAX: u64 = 256;
/// The limit of a wait for the owner to make room, unless the session sets a shorter one. The owner
/// answers in well under a millisecond, unless it is dead, stalled, or waits for its disk.
const OWNER_WAIT_MAX: Duration = Duration::from_secs(5);
/// Waits for the owner before the session gives up. Other sessions may take the frames that an
/// answer freed.
const OWNER_WAITS_MAX: u32 = 3;

/// Lines of a page that are prefetched before a read: as many as a core can have in progress at
/// once. The hardware prefetches the others.
const PREFETCHED_LINES: usize = 12;

type Page = [u8; PAGE_BYTES];

/// A session of a pool. It belongs to one thread at a time.
pub struct Session<M> {
    pub(crate) mapping: Arc<PoolMapping<M>>,
    pub(crate) number: u32,
    pub(crate) journal: Journal,
    active: u64,
    grants: GrantCursor,
    /// Operations that may be incomplete on another leg: number, journal position.
    open_ops: VecDeque<(u64, u64)>,
    leaf_cache: LeafCache,
    /// The state of journal and grants for which the doorbell was rung last.
    doorbell_state: Option<(u64, u64)>,
    /// The round that the present operation stamps.
    pub(crate) round: u8,
    ticket: u32,
    /// Whether it is the session of the owner itself, which must not wait for the owner.
    is_owner: bool,
    /// The limit of a wait for the owner.
    owner_wait: Duration,
    /// Runs the owner's maintenance, if the owner is in this process.
    owner_work: Option<Box<dyn Fn() + Send>>,
    pub(crate) frames: Vec<FrameNo>,
    pub(crate) record: Record,
    pub(crate) encoded: Vec<[u8; LINE_BYTES]>,
    lock_words: LockWords,
    /// Slots of the last records, swapped and not flushed: first byte, end.
    unflushed_slots: Option<(usize, usize)>,
    /// Slots of earlier records, flushed for the fence of the present one.
    pending_slots: Option<UnfencedStores>,
    /// Bytes that the last record wrote in place, not flushed: first byte, end.
    unflushed_patch: Option<(usize, usize)>,
    /// Such bytes of earlier records, flushed for the fence of the present one.
    pending_patch: Option<UnfencedStores>,
    /// The changed bits of a patch in its page. The session keeps the buffer to reuse its memory.
    pub(crate) delta: Box<[u8; PATCH_MAX]>,
    /// The bytes of the next patch.
    pub(crate) patch_buffer: PatchBuffer,
    pub(crate) partial_pages: PartialPageCache,
    /// Whether the present record flushes the slots of all earlier ones.
    flushes_slots: bool,
    /// Unreadable slots were flushed: from now on no slots count as flushed.
    has_lost_flush: bool,
}

/// The session's position in its granted frames.
#[derive(Clone, Copy)]
struct GrantCursor {
    run: FrameRun,
    next: u64,
    consumed: u64,
    recalls: u32,
}

/// One leg of an operation: a session, and the slice of its pool.
pub struct LegSession<'s, M> {
    /// The session.
    pub session: &'s mut Session<M>,
    /// The object.
    pub handle: Handle,
}

/// The leg that failed, and the cause. The other legs have not changed either, except for whole
/// pages before the failing one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("leg {leg}: {cause}")]
pub struct LegFailure {
    /// The leg's index.
    pub leg: usize,
    /// The cause.
    pub cause: StoreError,
}

impl<M: Media> Session<M> {
    /// Opens the session with the number that the owner gave it.
    #[must_use]
    pub fn new(view: Arc<PoolMapping<M>>, number: u32) -> Session<M> {
        let cells = view.control.session_cells(number);
        let place = RecordAddress::new(
            view.pool,
            view.incarnation,
            number,
            cells.head().load(Ordering::Acquire),
        );
        let length = view.geometry.journal_lines();
        let mut journal = Journal::new(view.geometry.journal_at(number), length, place);
        journal.resume(cells.committed().load(Ordering::Acquire));
        let grants = GrantCursor {
            run: FrameRun { start: 0, len: 0 },
            // No recall has this number, so the session reads the ring's start when it needs it.
            next: 0,
            consumed: 0,
            recalls: 1,
        };
        Session {
            number,
            journal,
            active: cells.active().load(Ordering::Acquire),
            grants,
            open_ops: VecDeque::new(),
            leaf_cache: LeafCache::new(),
            doorbell_state: None,
            round: 0,
            ticket: cells.asked().load(Ordering::Acquire) as u32,
            is_owner: false,
            owner_wait: OWNER_WAIT_MAX,
            owner_work: None,
            frames: Vec::new(),
            record: Record::empty(),
            encoded: Vec::new(),
            lock_words: LockWords::of(ObjectId(0), PageNo(0), 1),
            unflushed_slots: None,
            pending_slots: None,
            unflushed_patch: None,
            pending_patch: None,
            delta: Box::new([0; PATCH_MAX]),
            patch_buffer: PatchBuffer::default(),
            partial_pages: PartialPageCache::default(),
            flushes_slots: false,
            has_lost_flush: false,
            mapping: view,
        }
    }

    pub(crate) fn for_owner(view: Arc<PoolMapping<M>>, number: u32) -> Session<M> {
        Session {
            is_owner: true,
            ..Session::new(view, number)
        }
    }

    /// The session of a thread in the owner's process. It calls `tend` for the owner's work, which
    /// lets [`Pool::maintain`](crate::owner::pool::Pool::maintain) run. It does not sleep for another
    /// thread.
    #[must_use]
    pub fn in_owner_process(mut self, tend: Box<dyn Fn() + Send>) -> Session<M> {
        self.owner_work = Some(tend);
        self
    }

    /// Sets the limit of each wait for the owner.
    #[must_use]
    pub fn with_owner_wait(mut self, limit: Duration) -> Session<M> {
        self.owner_wait = limit;
        self
    }

    /// The mapping of the pool.
    #[must_use]
    pub fn mapping(&self) -> &Arc<PoolMapping<M>> {
        &self.mapping
    }

    /// The session's number, which is its journal's.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Lines of the longest group. A quarter of the journal may have to be retained, and almost as
    /// many lines as the group has may be skipped at the end of the ring.
    pub(crate) fn group_lines_max(&self) -> usize {
        self.mapping.geometry.journal_lines() as usize * 3 / 8
    }

    /// Pages of one record, by the length of the journal.
    #[must_use]
    pub fn pages_max(&self) -> u64 {
        let by_journal = (self.mapping.geometry.journal_lines() / 4 - 1) * 3;
        by_journal.min(RECORD_PAGES_MAX)
    }

    /// The number of the `len` bytes from `offset` on that one record of [`write_numbered`] can
    /// cover. Its pages are in one leaf, and it may begin and end with parts of pages.
    #[inline]
    #[must_use]
    pub fn record_len_max(&self, offset: u64, len: u64) -> u64 {
        let page = PAGE_BYTES as u64;
        let in_leaf = NODE_SLOTS - offset / page % NODE_SLOTS;
        let pages = in_leaf.min(self.pages_max());
        len.min(pages * page - offset % page)
    }

    fn session_cells(&self) -> SessionCells<'_> {
        self.mapping.control.session_cells(self.number)
    }

    /// Ensures `frames` granted frames, and room for a record of `entry_lines`. Asks the owner for
    /// them if necessary.
    pub(crate) fn ensure_resources(
        &mut self,
        frames: u64,
        entry_lines: usize,
    ) -> Result<(), StoreError> {
        for tries in 0.. {
            if self.mapping.is_owner_gone() {
                return Err(StoreError::OwnerGone);
            }
            self.refresh_from_owner()?;
            let has_frames = frames == 0 || self.available_frames(frames) >= frames;
            if has_frames && self.journal.has_room(entry_lines).is_ok() {
                break;
            }
            if self.is_owner || tries == OWNER_WAITS_MAX {
                return Err(if has_frames {
                    StoreError::TimedOut
                } else {
                    StoreError::NoSpace
                });
            }
            self.request_frames(frames)?;
        }
        self.ring_doorbell_if_low();
        Ok(())
    }

    /// Loads the owner's changes. No operation may be in progress.
    fn refresh_from_owner(&mut self) -> Result<(), StoreError> {
        let recalls = self.wait_for_recall()?;
        let cells = self.mapping.control.session_cells(self.number);
        let head = cells.head().load(Ordering::Acquire);
        self.journal.advance(head);
        if recalls != self.grants.recalls {
            self.grants.recalls = recalls;
            self.grants.run.len = 0;
            self.grants.next = cells.ring_start().load(Ordering::Acquire);
            // A failed operation took frames and did not publish them.
            self.grants.consumed = cells.consumed().load(Ordering::Acquire);
        }
        Ok(())
    }

    /// The number of recalls so far. During a recall the ring's start is that of an earlier one,
    /// and the runs behind it have other users by now.
    fn wait_for_recall(&self) -> Result<u32, StoreError> {
        let cells = self.session_cells();
        let recalls = cells.recalls().load(Ordering::Acquire);
        if recalls.is_multiple_of(2) {
            return Ok(recalls);
        }
        let end = Deadline::after(self.owner_wait);
        loop {
            let recalls = cells.recalls().load(Ordering::Acquire);
            if recalls.is_multiple_of(2) {
                return Ok(recalls);
            }
            if self.mapping.is_owner_gone() {
                return Err(StoreError::OwnerGone);
            }
            if end.is_over() {
                return Err(StoreError::TimedOut);
            }
            wait::pause();
        }
    }

    /// The number of granted frames, counted as far as `enough`.
    fn available_frames(&self, enough: u64) -> u64 {
        let mut sum = self.grants.run.len;
        if sum < enough {
            let cells = self.session_cells();
            let end = cells.ring_end().load(Ordering::Acquire);
            for index in self.grants.next..end {
                sum += cells.run(index).len;
                if sum >= enough {
                    break;
                }
            }
        }
        sum
    }

    #[cold]
    fn request_frames(&mut self, frames: u64) -> Result<(), StoreError> {
        self.ticket = self.ticket.wrapping_add(1);
        let cells = self.mapping.control.session_cells(self.number);
        cells
            .asked()
            .store(u64::from(self.ticket) | frames << 32, Ordering::SeqCst);
        match &self.owner_work {
            Some(tend) => tend(),
            None => {
                self.mapping.control.ring_doorbell();
                let control = &self.mapping.control;
                control.wait_for_answer(self.number, self.ticket, self.owner_wait);
            }
        }
        if self.mapping.is_owner_gone() {
            return Err(StoreError::OwnerGone);
        }
        match cells.answered().load(Ordering::Acquire) == self.ticket {
            true => Ok(()),
            false => Err(StoreError::TimedOut),
        }
    }

    /// Wakes the owner once when half of the journal or of the grants is used.
    fn ring_doorbell_if_low(&mut self) {
        let cells = self.mapping.control.session_cells(self.number);
        let granted = cells.granted().load(Ordering::Relaxed);
        let (head, used) = (
            self.journal.head(),
            self.journal.end() - self.journal.head(),
        );
        let half_a_journal = self.mapping.geometry.journal_lines() / 2;
        let low = used > half_a_journal || granted - self.grants.consumed < half_a_journal / 2;
        if low && self.doorbell_state != Some((head, granted)) && !self.is_owner {
            self.doorbell_state = Some((head, granted));
            self.mapping.control.ring_doorbell();
        }
    }

    /// Begins an operation, and checks that the session is admitted.
    pub(crate) fn begin_op(&mut self, handle: &Handle, epoch: Epoch) -> Result<Gate, StoreError> {
        let cells = self.mapping.control.session_cells(self.number);
        self.active += 1;
        cells.active().swap(self.active, Ordering::SeqCst);
        let admitted = self.check_admission(handle, epoch);
        if admitted.is_err() {
            self.end_op();
        }
        admitted
    }

    fn check_admission(&self, handle: &Handle, epoch: Epoch) -> Result<Gate, StoreError> {
        let cells = self.session_cells();
        if cells.revoked().load(Ordering::Acquire) != 0
            && !defect::is(Defect::RevokedBeginsOperation)
        {
            return Err(StoreError::Revoked);
        }
        if self.mapping.is_owner_gone() {
            return Err(StoreError::OwnerGone);
        }
        let recalls = cells.recalls().load(Ordering::Acquire);
        if recalls != self.grants.recalls && !defect::is(Defect::RecallIgnored) {
            return Err(StoreError::TimedOut);
        }
        let gate = self.mapping.gate(handle)?;
        match gate.epoch() > epoch && !defect::is(Defect::StaleEpochTaken) {
            true => Err(StoreError::StaleEpoch {
                current: gate.epoch(),
            }),
            false => Ok(gate),
        }
    }

    /// Ends the operation.
    pub(crate) fn end_op(&mut self) {
        self.active += 1;
        self.mapping
            .control
            .session_cells(self.number)
            .active()
            .store(self.active, Ordering::Release);
    }

    /// Takes `count` granted frames. `ensure_resources` has ensured them.
    pub(crate) fn take_frames(&mut self, count: u64) {
        self.frames.clear();
        while (self.frames.len() as u64) < count {
            if self.grants.run.len == 0 {
                let cells = self.mapping.control.session_cells(self.number);
                let end = cells.ring_end().load(Ordering::Acquire);
                assert!(
                    self.grants.next < end,
                    "ensure_resources granted the frames"
                );
                self.grants.run = cells.run(self.grants.next);
                self.grants.next += 1;
                let numbers = self.mapping.geometry.frame_numbers();
                let FrameRun { start, len } = self.grants.run;
                assert!(
                    numbers.start <= start && start + len <= numbers.end,
                    "granted frames"
                );
            }
            let taken = self.grants.run.len.min(count - self.frames.len() as u64);
            let start = self.grants.run.start;
            self.frames.extend((start..start + taken).map(FrameNo));
            self.grants.run.start += taken;
            self.grants.run.len -= taken;
        }
        self.grants.consumed += count;
    }

    /// The byte of the page's slot; none when its leaf is not linked. Only within an operation.
    pub(crate) fn slot_at(
        &mut self,
        handle: &Handle,
        page: PageNo,
    ) -> Result<Option<usize>, StoreError> {
        let view = &*self.mapping;
        self.leaf_cache.slot_at(handle.object, page, || {
            Ok(match view.locate(handle.object, 0, page)? {
                SlotLocation::At(at) => Some(at),
                SlotLocation::Unlinked(_) => None,
            })
        })
    }

    /// Assigns a granted frame to each change.
    fn assign_frames(&mut self, count: usize) {
        self.take_frames(count as u64);
        for (change, &frame) in self.record.changes.iter_mut().zip(&self.frames) {
            change.new = change.old.map(frame, self.round);
            // Without the prefetch the swap of the slot would wait for the store to that entry.
            self.mapping
                .meta
                .prefetch(self.mapping.geometry.frame_entry_at(frame));
        }
    }

    /// Prepares a write of this page: prefetches the lines that other cores had last. Slots are
    /// prefetched only if their leaf was used before.
    #[inline]
    pub fn prefetch_write(&self, handle: &Handle, page: PageNo) {
        self.mapping.control.prefetch(handle.object, page);
        if let Some(at) = self.cached_slot(handle, page) {
            self.mapping.meta.prefetch(at);
        }
    }

    /// Prepares a read of this page: prefetches its slot.
    #[inline]
    pub fn prefetch_read(&self, handle: &Handle, page: PageNo) {
        if let Some(at) = self.cached_slot(handle, page) {
            self.mapping.meta.prefetch_load(at);
        }
    }

    /// Prepares a read of this page that comes next: prefetches the first lines of the page, if its
    /// frame is known.
    #[inline]
    pub fn prefetch_page(&self, handle: &Handle, page: PageNo) {
        if let Some(frame) = self.cached_frame(handle, page) {
            let view = &*self.mapping;
            view.meta.prefetch_load(view.geometry.frame_entry_at(frame));
            let lines = (frame_at(frame)..).step_by(LINE_BYTES);
            lines
                .take(PREFETCHED_LINES)
                .for_each(|at| view.data.prefetch_load(at));
        }
    }

    /// The byte of the page's slot, if its leaf was used before: a hint.
    #[inline]
    fn cached_slot(&self, handle: &Handle, page: PageNo) -> Option<usize> {
        self.leaf_cache.cached_slot_at(handle.object, page)
    }

    /// The page's frame, if its leaf was used before: a hint. The caller does not hold the lock
    /// words, so another session may be changing the slot.
    #[inline]
    pub(crate) fn cached_frame(&self, handle: &Handle, page: PageNo) -> Option<FrameNo> {
        let slot = self.mapping.slot(self.cached_slot(handle, page)?, page);
        slot.ok()?.frame()
    }

    /// Clears the leaf cache, because an object's number may be used again.
    pub fn clear_leaf_cache(&mut self) {
        self.leaf_cache.clear();
    }

    /// Links the nodes down to the page's leaf. No operation may be in progress.
    #[cold]
    pub(crate) fn link_leaf(
        &mut self,
        handle: &Handle,
        page: PageNo,
        epoch: Epoch,
    ) -> Result<(), StoreError> {
        loop {
            self.ensure_resources(1, 1)?;
            match self.begin_op(handle, epoch) {
                // The owner recalled the grants in between: begin again.
                Err(StoreError::TimedOut) => continue,
                entered => entered?,
            };
            let linked = self.link_next_node(handle, page, epoch);
            self.end_op();
            if linked? {
                return Ok(());
            }
        }
    }

    /// Links the highest missing node; true when none is missing.
    fn link_next_node(
        &mut self,
        handle: &Handle,
        page: PageNo,
        epoch: Epoch,
    ) -> Result<bool, StoreError> {
        let SlotLocation::Unlinked(level) = self.mapping.locate(handle.object, 0, page)? else {
            return Ok(true);
        };
        let range = LockWords::of_node(handle.object, level, page);
        self.mapping
            .control
            .lock(&range, self.number)
            .map_err(|_| StoreError::TimedOut)?;
        let linked = self.link_locked(handle, level, page, epoch);
        self.mapping.control.unlock(&range);
        linked.map(|()| false)
    }

    fn link_locked(
        &mut self,
        handle: &Handle,
        level: u8,
        page: PageNo,
        epoch: Epoch,
    ) -> Result<(), StoreError> {
        let SlotLocation::At(at) = self.mapping.locate(handle.object, level, page)? else {
            return Err(damaged_page_error(page));
        };
        let old = Slot::decode(self.mapping.meta.load(at)).map_err(|_| damaged_page_error(page))?;
        if old.frame().is_some() {
            return Ok(());
        }
        self.take_frames(1);
        let node = self.frames[0];
        self.zero_node(node);
        self.record.changes.clear();
        self.record.changes.push(Change {
            old,
            new: old.map(node, 0),
            sums: NO_SUMS,
        });
        let first = page.0 & !((1 << (9 * u32::from(level))) - 1);
        let linked = self.commit_record(handle, level, PageNo(first), at, epoch);
        linked.map_err(|_| damaged_page_error(page))
    }

    /// Commits the prepared record. Publishes it even if a slot is damaged, because it is on media.
    fn commit_record(
        &mut self,
        handle: &Handle,
        level: u8,
        page: PageNo,
        at: usize,
        epoch: Epoch,
    ) -> Result<(), StoreError> {
        let stamp = Stamp {
            epoch,
            op: 0,
            open_ops: 0,
        };
        let is_summed = self.add_second_sums(level);
        self.encode_record(handle, level, page, stamp, is_summed);
        self.flush_pending_slots(at);
        let stores = self.stream_record();
        let _committed = self.mapping.data.fence(stores);
        let swapped = self.swap_slots(at, page);
        self.publish_record(None);
        swapped
    }

    /// Adds the second sums of pages that the prepared record names and that are already in their
    /// frames. So recovery can judge it like the record that wrote the pages. Returns false if a
    /// page is damaged, because its second sum is then unknown.
    fn add_second_sums(&mut self, level: u8) -> bool {
        if level > 0 {
            return true;
        }
        let mut page = [0; PAGE_BYTES];
        for change in &mut self.record.changes {
            if let Some(frame) = change.new.frame() {
                self.mapping.data.read(frame_at(frame), &mut page);
                if crc32c(&page) != change.sums.crc {
                    self.mapping.report_unreadable(frame);
                    return false;
                }
                change.sums.words = word_sum(&page);
            }
        }
        true
    }

    /// Zeroes a frame persistently, before it becomes a node.
    fn zero_node(&self, node: FrameNo) {
        let view = &self.mapping;
        if defect::is(Defect::NodeNotZeroed) {
            return;
        }
        let (_, stores) = M::stream_page(&[(&*view.data, frame_at(node))], &[0; PAGE_BYTES]);
        let _fenced = view.data.fence(stores);
        if view.has_overlay() {
            for at in (frame_at(node)..).step_by(8).take(NODE_SLOTS as usize) {
                if view.meta.load(at) != 0 {
                    view.meta.store(at, 0);
                }
            }
        }
    }

    /// Takes a seq. Nothing may fail between this and `publish_record`.
    pub(crate) fn take_seq(&mut self) {
        let control = &self.mapping.control;
        // The floor comes first: a checkpoint that finds the seq taken must find the floor. The
        // counter's release here and its acquire there order the two.
        let cells = control.session_cells(self.number);
        if !defect::is(Defect::FloorAfterSeq) {
            let next = control.seq().load(Ordering::Acquire);
            cells.floor().store(next, Ordering::Relaxed);
        }
        self.record.seq = Seq(control.seq().fetch_add(1, Ordering::AcqRel));
        if defect::is(Defect::FloorAfterSeq) {
            cells.floor().store(self.record.seq.0, Ordering::Relaxed);
        }
    }

    /// Reserves room in the journal, takes a seq and encodes the record of `self.record.changes`,
    /// without the sums of its data. All of that comes before the data is streamed. A load that
    /// spans several recent stores would wait until every streamed byte has left the core.
    fn encode_record(
        &mut self,
        handle: &Handle,
        level: u8,
        page: PageNo,
        stamp: Stamp,
        is_summed: bool,
    ) {
        self.begin_record(handle, level, page, stamp, is_summed);
        self.record.encode(&mut self.encoded);
    }

    /// As `encode_record`, without the encoding.
    pub(crate) fn begin_record(
        &mut self,
        handle: &Handle,
        level: u8,
        page: PageNo,
        stamp: Stamp,
        is_summed: bool,
    ) {
        self.reserve_journal(self.record.lines());
        self.take_seq();
        let record = &mut self.record;
        record.object = handle.object;
        record.epoch = stamp.epoch;
        record.level = level;
        record.page = page;
        record.op = stamp.op;
        record.open = stamp.open_ops;
        record.has_second_sum = is_summed;
        self.encoded.clear();
    }

    /// Flushes the slots of the previous record for the fence of the present one; `at` is the byte
    /// of the present record's first slot. The flushed slots are in this core's cache now, and will
    /// not be when a checkpoint needs them persistent. Slots in the same line wait for each other,
    /// because a flush may evict the line.
    fn flush_pending_slots(&mut self, at: usize) {
        self.flush_patch();
        if let Some((first, end)) = self.unflushed_slots
            && !(first / LINE_BYTES == at / LINE_BYTES && (end - 1) / LINE_BYTES == at / LINE_BYTES)
        {
            self.flush_slots(first, end);
        }
    }

    /// Flushes all slots that were swapped so far, for the next fence. Slots of several places
    /// cannot wait: the session remembers one range, and the flush of a range over both places
    /// flushes all lines in between. A crash does not reveal such a range, as it holds every slot;
    /// `record_unflushed_slots` asserts against it.
    pub(crate) fn flush_all_slots(&mut self) {
        self.flush_patch();
        if let Some((first, end)) = self.unflushed_slots {
            self.flush_slots(first, end);
        }
    }

    /// Flushes the bytes that the previous record wrote in place. They are not flushed at once,
    /// because the unlock would wait for the flush.
    fn flush_patch(&mut self) {
        if let Some((first, end)) = self.unflushed_patch.take()
            && !defect::is(Defect::SessionPatchNotFlushed)
        {
            let flushed = self.mapping.data.flush(first, end - first);
            self.pending_patch = Some(flushed.after(self.pending_patch.take()));
        }
    }

    fn flush_slots(&mut self, first: usize, end: usize) {
        let end = match defect::is(Defect::SessionSlotsNotFlushed) {
            true => first,
            false => end,
        };
        self.pending_slots = Some(self.mapping.data.flush(first, end - first));
        self.has_lost_flush |= self.mapping.data.is_unreadable(first);
        self.unflushed_slots = None;
    }

    pub(crate) fn reserve_journal(&mut self, entry_lines: usize) {
        let room = self.journal.reserve(&*self.mapping.data, entry_lines);
        room.expect("ensure_resources made room in the journal");
    }

    /// Sets the sums of the data of change number `index`.
    fn set_sums(&mut self, index: usize, sums: PageChecksums) {
        self.record.changes[index].sums = sums;
        set_sums(&mut self.encoded, index, sums);
    }

    /// Streams the record that `encode_record` encoded.
    fn stream_record(&mut self) -> UnfencedStores {
        let sealed = match self.record.is_patch() {
            // The other lines have their sum already.
            true => &mut self.encoded[..1],
            false => &mut self.encoded[..],
        };
        add_checksum(sealed, self.journal.next_address());
        self.append()
    }

    /// Streams the encoded entry into the journal.
    pub(crate) fn append(&mut self) -> UnfencedStores {
        self.flushes_slots = self.pending_slots.is_some() && !self.has_lost_flush;
        let stores = self.journal.append(&*self.mapping.data, &self.encoded);
        let flushed = [self.pending_slots.take(), self.pending_patch.take()];
        flushed.into_iter().fold(stores, UnfencedStores::after)
    }

    /// Records that bytes were written in place. They are flushed for the next record, together
    /// with the slot.
    pub(crate) fn record_unflushed_patch(&mut self, first: usize, len: usize) {
        debug_assert!(
            self.unflushed_patch.is_none(),
            "a record flushes the bytes of the one before"
        );
        self.unflushed_patch = Some((first, first + len));
    }

    /// Publishes the pages of the committed record; its first slot lies at byte `at`. Stores their
    /// checksums first.
    pub(crate) fn publish_slots(&mut self, at: usize, page: PageNo) -> Result<(), StoreError> {
        if self.record.is_patch() {
            self.record_unflushed_slots(at, 1);
            return match self.publish_patch(at) {
                true => Ok(()),
                false => Err(damaged_page_error(page)),
            };
        }
        for change in &self.record.changes {
            if let Some(frame) = change.new.frame() {
                let at = self.mapping.geometry.frame_entry_at(frame);
                self.mapping.meta.store(at, u64::from(change.sums.crc));
            }
        }
        self.swap_slots(at, page)
    }

    /// Swaps the slots of the committed record, the first at byte `at`.
    fn swap_slots(&mut self, at: usize, page: PageNo) -> Result<(), StoreError> {
        self.record_unflushed_slots(at, self.record.changes.len());
        let mut result = Ok(());
        let meta = &*self.mapping.meta;
        for (i, change) in self.record.changes.iter().enumerate() {
            // The session holds the lock, so it needs no locked instruction: only damage can have
            // changed the slot. A slot that does not check is damaged.
            let at = at + i * 8;
            let found = meta.load(at);
            if found == change.old.encode() || Slot::decode(found).is_err() {
                meta.store(at, change.new.encode());
            } else {
                result = Err(damaged_page_error(PageNo(page.0 + i as u64)));
            }
        }
        result
    }

    /// Records that `slots` slots, the first at byte `at`, are about to be swapped.
    fn record_unflushed_slots(&mut self, at: usize, slots: usize) {
        if self.mapping.has_overlay() {
            return;
        }
        let (first, end) = self.unflushed_slots.unwrap_or((at, at));
        // The session remembers one range. If the range grew from one place to another, no slot
        // would be lost. But its flush would cover all lines in between, possibly most of the pool.
        let line = |byte: usize| byte / LINE_BYTES;
        debug_assert!(
            line(first) == line(at) && line(end.max(at + 1) - 1) == line(at),
            "slots at {first} and {at} are unflushed at once"
        );
        self.unflushed_slots = Some((first.min(at), end.max(at + slots * 8)));
    }

    /// Publishes the committed record.
    pub(crate) fn publish_record(&mut self, op: Option<Stamp>) {
        let cells = self.mapping.control.session_cells(self.number);
        let start = self.journal.end() - self.encoded.len() as u64;
        if let Some(stamp) = op {
            remove_complete(&mut self.open_ops, stamp);
            self.open_ops.push_back((stamp.op, start));
            let complete = self
                .open_ops
                .front()
                .map_or(start, |&(_, position)| position);
            cells.complete().store(complete, Ordering::Relaxed);
        } else if self.open_ops.is_empty() {
            cells
                .complete()
                .store(self.journal.end(), Ordering::Relaxed);
        }
        cells
            .consumed()
            .store(self.grants.consumed, Ordering::Relaxed);
        if self.flushes_slots {
            let settled = match defect::is(Defect::LastSlotsReportedFlushed) {
                true => self.journal.end(),
                false => start,
            };
            cells.settled().store(settled, Ordering::Release);
        }
        cells
            .committed()
            .store(self.journal.end(), Ordering::Release);
        cells.floor().store(u64::MAX, Ordering::Release);
    }

    /// Records which of the session's operations are complete on all legs. Without this the last
    /// one counts as incomplete until there is another, or for ever.
    pub(crate) fn record_complete(&mut self, stamp: Stamp) {
        remove_complete(&mut self.open_ops, stamp);
        let oldest = self.open_ops.front().map(|&(_, position)| position);
        let complete = oldest.unwrap_or(self.journal.end());
        let cells = self.mapping.control.session_cells(self.number);
        cells.complete().store(complete, Ordering::Release);
        // Only a checkpoint makes the completion durable. Otherwise the operation counts as
        // incomplete again after the owner's death.
        if !self.is_owner {
            self.mapping.control.ring_doorbell();
        }
    }

    /// Commits an object record. For the owner.
    pub(crate) fn commit_object(
        &mut self,
        object: ObjectId,
        entry: [u8; 128],
    ) -> Result<Seq, StoreError> {
        self.ensure_resources(0, 3)?;
        self.reserve_journal(3);
        self.take_seq();
        let seq = self.record.seq;
        let record = crate::format::record::ObjectRecord { seq, object, entry };
        self.encoded.clear();
        crate::format::record::JournalEntry::Object(record)
            .encode(self.journal.next_address(), &mut self.encoded);
        let stores = self.append();
        if !defect::is(Defect::ObjectNotFenced) {
            let _committed = self.mapping.data.fence(stores);
        }
        self.publish_record(None);
        Ok(seq)
    }

    /// Swaps slots without moving data: unmaps pages, stamps a round, unlinks nodes. `changes` are
    /// consecutive from `page`; its slot lies at byte `at`. For the owner, which takes the locks.
    pub(crate) fn commit_changes(
        &mut self,
        handle: &Handle,
        level: u8,
        page: PageNo,
        at: usize,
        changes: &[Change],
    ) -> Result<(), StoreError> {
        self.ensure_resources(0, lines(changes.len()))?;
        self.record.changes.clear();
        self.record.changes.extend_from_slice(changes);
        self.commit_record(handle, level, page, at, Epoch(0))
    }
}

/// Writes bytes at the same offset of each leg's object, every page as a whole or not at all. The
/// legs' media are of one kind.
///
/// # Errors
/// The first leg that failed.
pub fn write<M: Media>(
    members: &mut [LegSession<'_, M>],
    offset: u64,
    data: &[u8],
    stamp: Stamp,
) -> Result<(), LegFailure> {
    let merging = MergeSource::EachLeg;
    write_merging(members, offset, data, merging, stamp.epoch, &|| stamp)
}

/// As [`write()`], for a client that shares pages with others and takes no locks of its own. Each
/// record gets the result of `stamp`, a stamp of `epoch`, which is called after its pages are
/// locked. So the numbers of a page's records have the order of its slots. Records are written in
/// the order of the legs, so a dead session's record on the last leg is on all of them. The legs
/// hold the same data: a page that is written in part is read from the first leg.
///
/// # Errors
/// As [`write()`].
pub fn write_numbered<M: Media>(
    members: &mut [LegSession<'_, M>],
    offset: u64,
    data: &[u8],
    epoch: Epoch,
    stamp: impl Fn() -> Stamp,
) -> Result<(), LegFailure> {
    write_merging(members, offset, data, MergeSource::FirstLeg, epoch, &stamp)
}

/// The source of the rest of a page that is written in part.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MergeSource {
    /// Each leg's own page: a leg may lack bytes that must still be resynced.
    EachLeg,
    /// The first leg's page: all legs hold the same data.
    FirstLeg,
}

fn write_merging<M: Media>(
    members: &mut [LegSession<'_, M>],
    offset: u64,
    data: &[u8],
    merging: MergeSource,
    epoch: Epoch,
    stamp: &impl Fn() -> Stamp,
) -> Result<(), LegFailure> {
    for (index, member) in members.iter().enumerate() {
        let checked = member
            .session
            .mapping
            .check_range(&member.handle, offset, data.len() as u64);
        checked.map_err(|cause| LegFailure { leg: index, cause })?;
    }
    let sources = match merging {
        MergeSource::FirstLeg => 1,
        MergeSource::EachLeg => members.len(),
    };
    let mut at = offset;
    let mut rest = data;
    while !rest.is_empty() {
        let page = PageNo(at / PAGE_BYTES as u64);
        let within = (at % PAGE_BYTES as u64) as usize;
        let len = record_bytes(members, at, rest.len(), merging);
        let part = (within, &rest[..len]);
        match within + len <= PAGE_BYTES && len < PAGE_BYTES {
            true => write_part(members, page, part, sources, epoch, stamp)?,
            false => write_pages(members, page, part, epoch, stamp)?,
        }
        at += len as u64;
        rest = &rest[len..];
    }
    Ok(())
}

/// The number of the `len` bytes from `offset` on that one record can cover. If all legs hold the
/// same data, the record may begin and end with parts of pages. A leg that may lack bytes keeps the
/// stamps of partly written pages, so each of those gets a record of its own.
fn record_bytes<M: Media>(
    members: &[LegSession<'_, M>],
    offset: u64,
    len: usize,
    merging: MergeSource,
) -> usize {
    let within = (offset % PAGE_BYTES as u64) as usize;
    let record_len = |member: &LegSession<'_, M>| member.session.record_len_max(offset, len as u64);
    let run = members.iter().map(record_len).min();
    let run = run.unwrap_or_default() as usize;
    match merging {
        MergeSource::FirstLeg => run,
        MergeSource::EachLeg if within != 0 || len < PAGE_BYTES => len.min(PAGE_BYTES - within),
        MergeSource::EachLeg => run / PAGE_BYTES * PAGE_BYTES,
    }
}

/// Begins the operation on all legs for one run of pages, with the resources in `needs`. Returns
/// the location of its first slot on each leg, and the round.
fn begin_all<M: Media>(
    members: &mut [LegSession<'_, M>],
    page: PageNo,
    needs: OpRequirements,
    epoch: Epoch,
) -> Result<[(usize, u8); 3], LegFailure> {
    let mut places = [(0, 0); 3];
    multi_pool_op::begin_all(members, needs, epoch, |index, member, gate| {
        let at = member.session.slot_at(&member.handle, page)?;
        Ok(match at {
            Some(at) => {
                places[index] = (at, gate.round());
                None
            }
            None => Some(page),
        })
    })?;
    Ok(places)
}

/// Takes the locks of the range in every pool.
fn lock_all<M: Media>(
    members: &mut [LegSession<'_, M>],
    page: PageNo,
    count: u64,
) -> Result<(), LegFailure> {
    for member in members.iter_mut() {
        let object = member.handle.object;
        member.session.lock_words.set(object, page, count);
    }
    if defect::is(Defect::NotLocked) {
        return Ok(());
    }
    multi_pool_op::lock_all(members, |_, session| &session.lock_words)
}

fn flush_pending_slots_all<M: Media>(members: &mut [LegSession<'_, M>], places: &[(usize, u8); 3]) {
    for (member, &(at, _)) in members.iter_mut().zip(places) {
        member.session.flush_pending_slots(at);
    }
}

fn unlock_and_end_op<M: Media>(member: &mut LegSession<'_, M>) {
    let session = &mut *member.session;
    session.mapping.control.unlock(&session.lock_words);
    session.end_op();
}

/// Unlocks and ends the operation on all legs. Nothing has changed, as one of them failed.
fn abort_all<M: Media>(
    members: &mut [LegSession<'_, M>],
    member: usize,
    cause: StoreError,
) -> Result<(), LegFailure> {
    members.iter_mut().for_each(unlock_and_end_op);
    Err(LegFailure { leg: member, cause })
}

/// Writes pages in one record. The first and the last may be written in part; the rest of them is
/// then merged from the first leg's page for all legs.
fn write_pages<M: Media>(
    members: &mut [LegSession<'_, M>],
    page: PageNo,
    (within, data): (usize, &[u8]),
    epoch: Epoch,
    stamp: &impl Fn() -> Stamp,
) -> Result<(), LegFailure> {
    let count = (within + data.len()).div_ceil(PAGE_BYTES);
    let needs = OpRequirements {
        frames: count as u64,
        entry_lines: lines(count),
    };
    let places = begin_all(members, page, needs, epoch)?;
    let early = defect::is(Defect::NumberedBeforeLocks).then(stamp);
    if let Err(failure) = lock_all(members, page, count as u64) {
        members.iter_mut().for_each(|m| m.session.end_op());
        return Err(failure);
    }
    for index in 0..members.len() {
        if let Err(cause) = members[index]
            .session
            .load_changes(page, count, places[index])
        {
            return abort_all(members, index, cause);
        }
    }
    let merged = match merge_ends(members, page, places[0].0, (within, data)) {
        Ok(merged) => merged,
        Err(cause) => return abort_all(members, 0, cause),
    };
    // Locked instructions wait for streamed bytes, so all of them come first: locks, number, seqs.
    // From here on nothing fails.
    let stamp = early.unwrap_or_else(stamp);
    for member in members.iter_mut() {
        let session = &mut *member.session;
        session.assign_frames(count);
        session.encode_record(&member.handle, 0, page, stamp, true);
    }
    flush_pending_slots_all(members, &places);
    let [first, last] = &merged;
    let whole = &data[first.as_ref().map_or(0, |_| PAGE_BYTES - within)..];
    let first = first.as_deref().into_iter();
    let pages = first.chain(whole.as_chunks().0).chain(last.as_deref());
    let mut stores = None;
    for (i, bytes) in pages.enumerate() {
        stores = Some(stream_page(members, i, bytes));
    }
    commit(members, page, places, stamp, stores)?;
    let session = &mut *members[0].session;
    for (bytes, index) in merged.into_iter().zip([0, count - 1]) {
        if let Some(bytes) = bytes {
            session.partial_pages.put(&session.record, index, bytes);
        }
    }
    Ok(())
}

/// The first and the last page of a range of several pages, if they are written in part. They are
/// merged with the first leg's pages, with their slots from byte `at` on. The range begins at byte
/// `within` of its first page.
fn merge_ends<M: Media>(
    members: &mut [LegSession<'_, M>],
    page: PageNo,
    at: usize,
    (within, data): (usize, &[u8]),
) -> Result<[Option<partial_pages::PageBytes>; 2], StoreError> {
    let LegSession { session, handle } = &mut members[0];
    let last = (within + data.len()) / PAGE_BYTES;
    let behind = (within + data.len()) % PAGE_BYTES;
    let mut merge =
        |index: usize, part| session.merge_page(handle, (page, index), at + index * 8, part);
    let first = match within {
        0 => None,
        _ => Some(merge(0, (within, &data[..PAGE_BYTES - within]))?),
    };
    let last = match behind {
        0 => None,
        _ => Some(merge(last, (0, &data[data.len() - behind..]))?),
    };
    Ok([first, last])
}

/// Streams a page into frame number `number` of each leg.
fn stream_page<M: Media>(
    members: &mut [LegSession<'_, M>],
    number: usize,
    bytes: &Page,
) -> UnfencedStores {
    let target = |index: usize| {
        let session = &members[index.min(members.len() - 1)].session;
        (&*session.mapping.data, frame_at(session.frames[number]))
    };
    let targets = [target(0), target(1), target(2)];
    let (sums, streamed) = M::stream_page(&targets[..members.len()], bytes);
    for member in members.iter_mut() {
        member.session.set_sums(number, sums);
    }
    streamed
}

/// Streams the records, fences, swaps and publishes. The caller holds the locks and has taken the
/// seqs. Releases the locks and ends the operation on all legs.
///
/// Records go to the legs in their order. If the session dies in between, a record on the last leg
/// is on all legs before it, too. Direct clients read the last leg.
fn commit<M: Media>(
    members: &mut [LegSession<'_, M>],
    page: PageNo,
    places: [(usize, u8); 3],
    stamp: Stamp,
    mut stores: Option<UnfencedStores>,
) -> Result<(), LegFailure> {
    if defect::is(Defect::LastLegFirst) {
        for member in members.iter_mut().skip(1).rev() {
            stores = Some(member.session.stream_record().after(stores.take()));
        }
    }
    let in_order = match defect::is(Defect::LastLegFirst) {
        true => 1,
        false => members.len(),
    };
    for member in &mut members[..in_order] {
        let streamed = member.session.stream_record();
        stores = Some(streamed.after(stores.take()));
    }
    if defect::is(Defect::UnlockBeforeFence) {
        for LegSession { session, .. } in members.iter() {
            session.mapping.control.unlock(&session.lock_words);
        }
    }
    if defect::is(Defect::PatchedBeforeFence) {
        for LegSession { session, .. } in members.iter() {
            session.write_before_fence();
        }
    }
    if !defect::is(Defect::NoCommitFence) && !defect::is(Defect::SwapBeforeFence) {
        multi_pool_op::fence_all(members, stores.take().expect("a record"));
    }
    if defect::is(Defect::UnlockBeforePublish) {
        for LegSession { session, .. } in members.iter() {
            session.mapping.control.unlock(&session.lock_words);
        }
    }
    let mut result = Ok(());
    for (index, member) in members.iter_mut().enumerate() {
        if let Err(cause) = member.session.publish_slots(places[index].0, page) {
            result = Err(LegFailure { leg: index, cause });
        }
    }
    if defect::is(Defect::SwapBeforeFence) {
        multi_pool_op::fence_all(members, stores.expect("a record"));
    }
    // Locked instructions wait for the stores above, so the stores of all legs come first.
    for member in members.iter_mut() {
        member.session.publish_record(Some(stamp));
        unlock_and_end_op(member);
    }
    result
}

/// Writes a part of a page, in place if possible.
fn write_part<M: Media>(
    members: &mut [LegSession<'_, M>],
    page: PageNo,
    part: (usize, &[u8]),
    sources: usize,
    epoch: Epoch,
    stamp: &impl Fn() -> Stamp,
) -> Result<(), LegFailure> {
    let needs = OpRequirements {
        frames: 1,
        entry_lines: patch::entry_lines(part.1.len()),
    };
    patch::stage(members, page, part);
    let places = begin_all(members, page, needs, epoch)?;
    let early = defect::is(Defect::NumberedBeforeLocks).then(stamp);
    if let Err(failure) = lock_all(members, page, 1) {
        members.iter_mut().for_each(|m| m.session.end_op());
        return Err(failure);
    }
    if let Err(failure) = load_slots_all(members, page, &places) {
        members.iter_mut().for_each(unlock_and_end_op);
        return Err(failure);
    }
    let place = (page, places);
    let stamp = || early.unwrap_or_else(stamp);
    let is_alike = sources < members.len();
    if patch::build_records(members, part.1.len(), is_alike) {
        return write_patch(members, place, stamp());
    }
    write_merged(members, sources, place, part, stamp)
}

/// Loads each leg's slot of a page that is written in part. The caller holds the locks.
fn load_slots_all<M: Media>(
    members: &mut [LegSession<'_, M>],
    page: PageNo,
    places: &[(usize, u8); 3],
) -> Result<(), LegFailure> {
    for (member, &place) in (0..members.len()).zip(places) {
        let taken = members[member].session.load_slot(page, place);
        taken.map_err(|cause| LegFailure { leg: member, cause })?;
    }
    Ok(())
}

/// Commits the records that [`patch::build_records`] prepared.
fn write_patch<M: Media>(
    members: &mut [LegSession<'_, M>],
    (page, places): (PageNo, [(usize, u8); 3]),
    stamp: Stamp,
) -> Result<(), LegFailure> {
    patch::begin(members, page, stamp);
    flush_pending_slots_all(members, &places);
    commit(members, page, places, stamp, None)
}

/// Writes a page that changes in part into another frame. The rest comes from the pages of
/// `sources` legs: from each leg's own, or from the first leg's for all.
fn write_merged<M: Media>(
    members: &mut [LegSession<'_, M>],
    sources: usize,
    (page, places): (PageNo, [(usize, u8); 3]),
    part: (usize, &[u8]),
    stamp: impl FnOnce() -> Stamp,
) -> Result<(), LegFailure> {
    // Everything that can fail comes before the seqs.
    let mut merged = [const { None }; 3];
    for ((index, bytes), &(at, _)) in merged.iter_mut().enumerate().take(sources).zip(&places) {
        let LegSession { session, handle } = &mut members[index];
        match session.merge_page(handle, (page, 0), at, part) {
            Ok(page) => *bytes = Some(page),
            Err(cause) => return abort_all(members, index, cause),
        }
    }
    let stamp = stamp();
    for member in members.iter_mut() {
        member.session.assign_frames(1);
        member
            .session
            .encode_record(&member.handle, 0, page, stamp, true);
    }
    flush_pending_slots_all(members, &places);
    let all = merged.iter().flatten();
    let streamed = match sources {
        1 => all.map(|bytes| stream_page(members, 0, bytes)).last(),
        _ => {
            let each = members.iter_mut().zip(all);
            let streamed =
                each.map(|(member, bytes)| stream_page(std::slice::from_mut(member), 0, bytes));
            streamed.reduce(UnfencedStores::and)
        }
    };
    commit(members, page, places, stamp, streamed)?;
    for (LegSession { session, .. }, bytes) in members.iter_mut().zip(merged.into_iter().flatten())
    {
        session.partial_pages.put(&session.record, 0, bytes);
    }
    Ok(())
}

/// Removes operations that are complete on all legs by the stamp.
fn remove_complete(open: &mut VecDeque<(u64, u64)>, stamp: Stamp) {
    let oldest = stamp.op.saturating_sub(u64::from(stamp.open_ops));
    while open.front().is_some_and(|&(op, _)| op < oldest) {
        open.pop_front();
    }
}

/// Frees the whole pages of a range of each leg's object, and zeroes the parts of pages at its
/// ends.
///
/// # Errors
/// The first leg that failed.
pub fn clear<M: Media>(
    members: &mut [LegSession<'_, M>],
    offset: u64,
    len: u64,
    stamp: Stamp,
) -> Result<(), LegFailure> {
    const PAGE: u64 = PAGE_BYTES as u64;
    for (index, member) in members.iter_mut().enumerate() {
        let fail = |cause| LegFailure { leg: index, cause };
        member
            .session
            .mapping
            .check_range(&member.handle, offset, len)
            .map_err(fail)?;
        if len == 0 {
            member.session.record_complete(stamp);
            continue;
        }
        let end = offset + len;
        let (first, last) = (offset.next_multiple_of(PAGE), end / PAGE * PAGE);
        let mut member = [LegSession {
            session: &mut *member.session,
            handle: member.handle,
        }];
        if first > last {
            zero_part(&mut member, offset, len, stamp).map_err(|f| fail(f.cause))?;
            continue;
        }
        zero_part(&mut member, offset, first - offset, stamp).map_err(|f| fail(f.cause))?;
        zero_part(&mut member, last, end - last, stamp).map_err(|f| fail(f.cause))?;
        let [member] = &mut member;
        let mut page = first / PAGE;
        while page < last / PAGE {
            page = clear_next_run(member, PageNo(page), last / PAGE, stamp).map_err(fail)?;
        }
    }
    Ok(())
}

fn zero_part<M: Media>(
    member: &mut [LegSession<'_, M>; 1],
    offset: u64,
    len: u64,
    stamp: Stamp,
) -> Result<(), LegFailure> {
    if len == 0 {
        return Ok(());
    }
    let page = PageNo(offset / PAGE_BYTES as u64);
    let [one] = member;
    let holds_data = one.session.is_mapped(&one.handle, page, stamp.epoch);
    match holds_data.map_err(|cause| LegFailure { leg: 0, cause })? {
        false => Ok(()),
        true => {
            let zeroes = [0; PAGE_BYTES];
            let within = (offset % PAGE_BYTES as u64) as usize;
            let part = &zeroes[..len as usize];
            let part = (within, part);
            write_part(member, page, part, 1, stamp.epoch, &|| stamp)
        }
    }
}

/// Unmaps the next run of mapped pages and returns the page after it.
fn clear_next_run<M: Media>(
    member: &mut LegSession<'_, M>,
    page: PageNo,
    end: u64,
    stamp: Stamp,
) -> Result<u64, StoreError> {
    let in_leaf = (page.0 / NODE_SLOTS + 1) * NODE_SLOTS;
    let end = end.min(in_leaf).min(page.0 + member.session.pages_max());
    let count = end - page.0;
    let handle = member.handle;
    let session = &mut *member.session;
    session.ensure_resources(0, lines(count as usize))?;
    let gate = match session.begin_op(&handle, stamp.epoch) {
        Err(StoreError::TimedOut) => return Ok(page.0),
        entered => entered?,
    };
    let at = match session.slot_at(&handle, page) {
        Ok(Some(at)) => at,
        other => {
            session.end_op();
            // Nothing was ever written under this leaf.
            return other.map(|_| in_leaf);
        }
    };
    if let Err(failure) = lock_all(std::slice::from_mut(member), page, count) {
        member.session.end_op();
        return Err(failure.cause);
    }
    let session = &mut *member.session;
    match session.load_unmap_changes(at, page, count, gate.round()) {
        Ok((skipped, 0)) => {
            unlock_and_end_op(member);
            Ok(page.0 + skipped)
        }
        Ok((skipped, found)) => {
            let places = [(at + skipped as usize * 8, 0); 3];
            let first = PageNo(page.0 + skipped);
            session.encode_record(&handle, 0, first, stamp, true);
            session.flush_pending_slots(places[0].0);
            let committed = commit(std::slice::from_mut(member), first, places, stamp, None);
            committed.map_err(|failure| failure.cause)?;
            Ok(first.0 + found)
        }
        Err(cause) => {
            unlock_and_end_op(member);
            Err(cause)
        }
    }
}

impl<M: Media> Session<M> {
    /// Loads the slots that a write of whole pages replaces. The caller holds the locks.
    pub(crate) fn load_changes(
        &mut self,
        page: PageNo,
        count: usize,
        (at, round): (usize, u8),
    ) -> Result<(), StoreError> {
        self.round = round;
        self.record.changes.clear();
        for i in 0..count {
            let at = at + i * 8;
            // The frame of a damaged slot is unknown. The page is written as a whole, so the frame
            // is not needed. It stays in use, and a check of the pool finds it. No frame is freed
            // by a damaged slot.
            let old = match Slot::decode(self.mapping.meta.load(at)) {
                Err(_) if self.mapping.is_unreadable(at) => {
                    return Err(damaged_page_error(PageNo(page.0 + i as u64)));
                }
                Err(_) => Slot::EMPTY,
                Ok(slot) => self.mapping.check_frame(slot, PageNo(page.0 + i as u64))?,
            };
            self.record.changes.push(Change {
                old,
                new: old,
                sums: NO_SUMS,
            });
        }
        Ok(())
    }

    /// Page number `index` of the present record, with a part of it replaced. Its slot lies at byte
    /// `at`.
    fn merge_page(
        &mut self,
        handle: &Handle,
        (first, index): (PageNo, usize),
        at: usize,
        (within, part): (usize, &[u8]),
    ) -> Result<partial_pages::PageBytes, StoreError> {
        let page = PageNo(first.0 + index as u64);
        let (mut bytes, is_it) = self.partial_pages.take(PageKey {
            object: handle.object,
            page,
            slot: self.record.changes[index].old,
            crc: self.checksum_before(index),
        });
        if !is_it {
            self.mapping
                .read_slot(at, (handle.object, page), &mut bytes)?;
        }
        bytes[within..within + part.len()].copy_from_slice(part);
        Ok(bytes)
    }

    /// Loads the slot of a page that is written in part. The caller holds the locks.
    fn load_slot(&mut self, page: PageNo, (at, round): (usize, u8)) -> Result<(), StoreError> {
        self.load_changes(page, 1, (at, round))?;
        // A resyncing leg merges these bytes into stale ones. The page must still be copied, so its
        // stamp stays.
        if round == 0 {
            self.round = self.record.changes[0].old.round();
        }
        Ok(())
    }

    /// Loads changes that unmap the first run of mapped or damaged pages of a range. Returns the
    /// number of pages before the run, and its length.
    pub(crate) fn load_unmap_changes(
        &mut self,
        at: usize,
        page: PageNo,
        count: u64,
        round: u8,
    ) -> Result<(u64, u64), StoreError> {
        self.record.changes.clear();
        let mut skipped = 0;
        for i in 0..count {
            let page = PageNo(page.0 + i);
            // As for a write, the frame of a damaged slot is not needed.
            let at = at + i as usize * 8;
            let (old, is_damaged) = match Slot::decode(self.mapping.meta.load(at)) {
                Err(_) if defect::is(Defect::DamageNotCleared) => {
                    return Err(damaged_page_error(page));
                }
                Err(_) if self.mapping.is_unreadable(at) => return Err(damaged_page_error(page)),
                Err(_) => (Slot::EMPTY, true),
                Ok(slot) => (self.mapping.check_frame(slot, page)?, false),
            };
            if old.frame().is_some() || is_damaged {
                let change = Change {
                    old,
                    new: old.unmap(round),
                    sums: NO_SUMS,
                };
                self.record.changes.push(change);
            } else if self.record.changes.is_empty() {
                skipped += 1;
            } else {
                break;
            }
        }
        Ok((skipped, self.record.changes.len() as u64))
    }

    fn is_mapped(
        &mut self,
        handle: &Handle,
        page: PageNo,
        epoch: Epoch,
    ) -> Result<bool, StoreError> {
        self.with_op(handle, epoch, |session| {
            match session.slot_at(handle, page)? {
                Some(at) => Ok(session.mapping.slot(at, page)?.frame().is_some()),
                None => Ok(false),
            }
        })
    }

    /// Runs `read` within an operation.
    pub(crate) fn with_op<T>(
        &mut self,
        handle: &Handle,
        epoch: Epoch,
        read: impl FnOnce(&mut Self) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.refresh_from_owner()?;
        loop {
            match self.begin_op(handle, epoch) {
                Err(StoreError::TimedOut) => self.refresh_from_owner()?,
                Err(cause) => return Err(cause),
                Ok(_) => break,
            }
        }
        let result = read(self);
        self.end_op();
        result
    }

    /// Reads bytes, each page checked against its checksum.
    ///
    /// # Errors
    /// When a page is damaged, the range is beyond the end, or the client is
    /// fenced.
    pub fn read(
        &mut self,
        handle: &Handle,
        offset: u64,
        into: &mut [u8],
        epoch: Epoch,
    ) -> Result<(), StoreError> {
        self.mapping
            .check_range(handle, offset, into.len() as u64)?;
        self.with_op(handle, epoch, |session| {
            session.read_pages(handle, offset, into)
        })
    }

    fn read_pages(
        &mut self,
        handle: &Handle,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), StoreError> {
        let mut at = offset;
        let mut rest = into;
        while !rest.is_empty() {
            let page = PageNo(at / PAGE_BYTES as u64);
            let within = (at % PAGE_BYTES as u64) as usize;
            let count = rest.len().min(PAGE_BYTES - within);
            let (part, after) = rest.split_at_mut(count);
            let of_object = (handle.object, page);
            match self.slot_at(handle, page)? {
                None => part.fill(0),
                Some(slot_at) => match <&mut Page>::try_from(&mut *part) {
                    Ok(whole) => drop(self.mapping.read_slot(slot_at, of_object, whole)?),
                    Err(_) => {
                        let mut whole = [0; PAGE_BYTES];
                        self.mapping.read_slot(slot_at, of_object, &mut whole)?;
                        part.copy_from_slice(&whole[within..within + count]);
                    }
                },
            }
            at += count as u64;
            rest = after;
        }
        Ok(())
    }

    /// Reads and checks each page of a run, and returns the CRC32C of each.
    ///
    /// # Errors
    /// As [`Session::read`].
    pub fn checksums(
        &mut self,
        handle: &Handle,
        page: PageNo,
        count: u32,
        epoch: Epoch,
    ) -> Result<Vec<u32>, StoreError> {
        const PAGE: u64 = PAGE_BYTES as u64;
        let offset = page.0.saturating_mul(PAGE);
        self.mapping
            .check_range(handle, offset, u64::from(count) * PAGE)?;
        let of_zeroes = pagemesh_base::checksum::crc32c(&[0; PAGE_BYTES]);
        let mut buffer = [0; PAGE_BYTES];
        self.with_op(handle, epoch, |session| {
            let pages = (page.0..page.0 + u64::from(count)).map(PageNo);
            let mut sums = Vec::with_capacity(count as usize);
            for page in pages {
                let sum = match session.slot_at(handle, page)? {
                    None => None,
                    Some(at) => {
                        session
                            .mapping
                            .read_slot(at, (handle.object, page), &mut buffer)?
                    }
                };
                sums.push(sum.unwrap_or(of_zeroes));
            }
            Ok(sums)
        })
    }

    /// Calls `visit` with runs of pages of a range and their slots. The slot is none if it is
    /// damaged. A leaf that is not linked is one run of empty slots. Stops when `visit` returns
    /// false, and returns the page after the last one visited.
    ///
    /// # Errors
    /// As [`Session::read`].
    pub fn visit_slots(
        &mut self,
        handle: &Handle,
        pages: std::ops::Range<u64>,
        epoch: Epoch,
        mut visit: impl FnMut(PageNo, u64, Option<Slot>) -> bool,
    ) -> Result<u64, StoreError> {
        self.with_op(handle, epoch, |session| {
            let mut page = pages.start;
            while page < pages.end {
                let in_leaf = ((page / NODE_SLOTS + 1) * NODE_SLOTS).min(pages.end);
                match session.slot_at(handle, PageNo(page))? {
                    None => {
                        if !visit(PageNo(page), in_leaf - page, Some(Slot::EMPTY)) {
                            return Ok(page);
                        }
                        page = in_leaf;
                    }
                    Some(at) => {
                        let slot = session.mapping.slot(at, PageNo(page)).ok();
                        if !visit(PageNo(page), 1, slot) {
                            return Ok(page);
                        }
                        page += 1;
                    }
                }
            }
            Ok(page)
        })
    }
}
