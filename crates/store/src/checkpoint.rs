//! The owner's work behind the sessions: checkpoints, grants, the ends of
//! dead sessions, and the freeing of deleted objects.
//!
//! A checkpoint at C: every record with a seq below C is applied, that is, its
//! slots, frame-table words and bitmap bits are persistent; only then is a
//! superblock with C written, and only after that are lane lines and freed
//! frames used again. C never passes an open window: sessions publish a floor
//! before they take a seq. What goes on behind one that stays open: `bypass`.

use crate::control::{LOCK_WAIT_MAX, Range};
use crate::defect::{self, Defect};
use crate::geometry::OBJECT_BYTES;
use crate::in_flight::Noted;
use crate::lane::{Chunk, Followed, Lane};
use crate::object::{HEIGHT, Object, ROOT_AT, State};
use crate::pool::{OWN, ObjectError, Pool};
use crate::record::{Change, Entry, NO_SUMS, ObjectRecord, PAGES_MAX, Record};
use crate::recovery::{PoolError, in_flight_of, store_entry, write_superblock};
use crate::slot::Slot;
use crate::table::Location;
use crate::view::{Handle, NODE_SLOTS, StoreError, frame_at};
use crate::wait::{Deadline, Patience};
use pagemesh_base::checksum::{Sums, crc32c};
use pagemesh_base::ids::{FrameNo, ObjectId, PageNo, Seq};
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::{Media, Unfenced};
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

/// How long the owner waits at a time for a session to leave a window. An operation takes
/// microseconds, and one whose thread waits for a processor some milliseconds; longer, the
/// session may be dead, or wait for a lock of one that is, which only the owner frees.
const LEAVE_WAIT: Duration = Duration::from_millis(20);
/// Lines read at once: the longest entry fits, and so do they into a first
/// level cache.
const READ_LINES: u64 = 256;
/// Lines of the longest entry.
const ENTRY_LINES_MAX: u64 = PAGES_MAX as u64 / 3 + 2;
const _: () = assert!(READ_LINES > ENTRY_LINES_MAX);
/// Records of the deletion of an object in one go, so that sessions that wait
/// are served in between.
const RECLAIM_STEPS: u32 = 64;

/// How far a checkpoint goes.
#[derive(Clone, Copy)]
pub(crate) struct Reach {
    /// Recovery begins there; the seq of nobody who is inside a window is below.
    pub(crate) checkpoint: Seq,
    /// Records below are applied: to the checkpoint, or beyond it.
    pub(crate) applied: Seq,
    /// It goes beyond, so it applies what is noted and no more.
    pub(crate) is_bypass: bool,
}

impl Reach {
    /// Of a checkpoint that is no bypass.
    pub(crate) fn checkpoint(limit: Seq) -> Reach {
        Reach {
            checkpoint: limit,
            applied: limit,
            is_bypass: false,
        }
    }
}

/// What a pass over the lanes gathers. Kept from one to the next for its
/// buffers.
#[derive(Default)]
pub(crate) struct Pass {
    stores: Option<Unfenced>,
    /// Frames that records put to use, and that they freed.
    used: Vec<u64>,
    freed: Vec<u64>,
    /// The last flushed line of the frame table: frames follow each other.
    frame_line: usize,
    /// On `file-sync` pools: to be applied in seq order.
    pub(crate) records: Vec<Record>,
    objects: Vec<ObjectRecord>,
    chunk: Chunk,
    /// Committed lines of a lane that were left because of an open window, at most.
    pub(crate) held: u64,
}

impl Pass {
    fn reset(&mut self) {
        self.stores = None;
        self.used.clear();
        self.freed.clear();
        self.records.clear();
        self.objects.clear();
    }

    fn add(&mut self, stores: Unfenced) {
        self.stores = Some(stores.after(self.stores.take()));
    }
}

/// The map records of the group that was read first: behind what a session has
/// published there is one at most.
fn first_group(entries: Vec<(u64, Entry)>) -> Vec<(u64, Record)> {
    let first = entries.first().map(|(_, entry)| entry.seq());
    let of_it = entries
        .into_iter()
        .map_while(|(position, entry)| match entry {
            Entry::Map(record) if Some(record.seq) == first => Some((position, record)),
            _ => None,
        });
    of_it.collect()
}

/// Whether the lane of a session still has what is noted of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    GoesOn,
    /// It ends, or the lane is made free.
    Ends,
}

impl<M: Media> Pool<M> {
    /// Does what sessions wait for, and what should be done before they do:
    /// a checkpoint, grants, freeing deleted objects. True when there is more
    /// to do at once.
    ///
    /// # Errors
    /// When the pool failed.
    pub fn tend(&mut self) -> Result<bool, ObjectError> {
        self.checkpoint()?;
        if self.is_held_up() {
            self.bypass()?;
        }
        let more = self.reclaim()?;
        for number in self.lanes.numbers_open() {
            self.refill(number);
        }
        let mut stuck = None;
        for number in self.lanes.numbers_open() {
            match self.answer(number) {
                // Others need not wait for what this one waits for.
                Err(cause @ ObjectError::Stuck { .. }) => stuck = Some(cause),
                answered => answered?,
            }
        }
        stuck.map_or(Ok(more), Err)
    }

    /// Grants frames to a session.
    pub(crate) fn refill(&mut self, number: u32) {
        if number == OWN {
            // It moves no data, and so needs no frames.
            return;
        }
        let book = self.lanes.book(number);
        book.refill(&self.view, number, &mut self.frames, 0);
    }

    /// Answers a session that waits.
    fn answer(&mut self, number: u32) -> Result<(), ObjectError> {
        let cells = self.view.control.cells(number);
        let asked = cells.asked().load(Ordering::Acquire);
        let (ticket, wanted) = (asked as u32, asked >> 32);
        if ticket == cells.answered().load(Ordering::Acquire) {
            return Ok(());
        }
        self.spill_if_full(number)?;
        // An operation that stands still keeps records, and frames that they freed, from
        // being used again.
        if self.frames.free() < wanted || self.is_lane_full(number) {
            self.bypass()?;
        }
        if self.frames.free() < wanted {
            self.recall_others(number);
        }
        if self.frames.free() < wanted || self.is_lane_full(number) {
            // Its own grants are all that is left: no other wait would end.
            self.await_windows()?;
        }
        let book = self.lanes.book(number);
        book.refill(&self.view, number, &mut self.frames, wanted);
        self.view.control.cells(number).answer(ticket);
        Ok(())
    }

    /// Takes grants back from sessions that are not inside a window.
    fn recall_others(&mut self, asking: u32) {
        // For all of them: those inside may wait for the one that stands still.
        let end = Deadline::after(LEAVE_WAIT);
        for number in self.lanes.numbers_open() {
            if number == asking || number == OWN {
                continue;
            }
            let cells = self.view.control.cells(number);
            let active = cells.active().load(Ordering::SeqCst);
            if active % 2 == 1 && !self.awaits_leave(number, active, end) {
                // Inside for too long: its grants stay its own.
                continue;
            }
            // The recall first: who enters after this sees it and steps back,
            // until it has ended. One that is given up never was.
            let before = cells.recalls().fetch_add(1, Ordering::SeqCst);
            let active = cells.active().load(Ordering::SeqCst);
            let is_inside = active % 2 == 1 && !defect::is(Defect::RecallNotAwaited);
            if is_inside && !self.awaits_leave(number, active, end) {
                let cells = self.view.control.cells(number);
                if !defect::is(Defect::GivenUpRecallKept) {
                    cells.recalls().store(before, Ordering::SeqCst);
                }
                continue;
            }
            let book = self.lanes.book(number);
            book.take_back(&self.view, number, &mut self.frames);
            let cells = self.view.control.cells(number);
            cells.recalls().fetch_add(1, Ordering::SeqCst);
        }
    }

    fn awaits_leave(&self, number: u32, active: u64, end: Deadline) -> bool {
        let cells = self.view.control.cells(number);
        let mut patience = Patience::default();
        while cells.active().load(Ordering::SeqCst) == active {
            if end.is_over() {
                return false;
            }
            patience.pause();
        }
        true
    }

    /// Waits until every operation that is inside a window has left it; not for long: the
    /// caller tries again as often as it can wait.
    pub(crate) fn await_windows(&self) -> Result<(), ObjectError> {
        // What the caller stored is there before it is looked who is inside: whoever begins
        // stores that, and looks then.
        fence(Ordering::SeqCst);
        for session in self.lanes.numbers_open() {
            let cells = self.view.control.cells(session);
            let active = cells.active().load(Ordering::SeqCst);
            let end = Deadline::after(LEAVE_WAIT);
            if active % 2 == 1 && !self.awaits_leave(session, active, end) {
                return Err(self.stuck(session, active));
            }
        }
        Ok(())
    }

    fn stuck(&self, session: u32, operation: u64) -> ObjectError {
        let pid = self.process(session);
        ObjectError::Stuck {
            session,
            operation,
            pid,
        }
    }

    /// Applies what was committed and makes it the new start of recovery.
    ///
    /// # Errors
    /// When the medium fails or a lane makes no sense; the pool has then
    /// failed.
    pub fn checkpoint(&mut self) -> Result<(), PoolError> {
        self.checkpoint_to(Reach::checkpoint(self.limit()))
    }

    pub(crate) fn checkpoint_to(&mut self, reach: Reach) -> Result<(), PoolError> {
        if self.failed {
            return Err(PoolError::Failed);
        }
        let mut pass = std::mem::take(&mut self.pass);
        pass.held = 0;
        let result = self.try_checkpoint(reach, &mut pass);
        pass.reset();
        self.pass = pass;
        self.failed |= result.is_err();
        if result.is_err() {
            self.view.abandon();
        }
        result
    }

    pub(crate) fn limit(&self) -> Seq {
        let next = self.view.control.seq().load(Ordering::Acquire);
        let floor = |number| {
            self.view
                .control
                .cells(number)
                .floor()
                .load(Ordering::SeqCst)
        };
        if defect::is(Defect::PassOpenWindow) {
            return Seq(next);
        }
        let floors = (0..self.block.lanes_end).map(floor);
        let limit = floors.min().map_or(next, |floor| floor.min(next));
        // A floor may be older than the seq behind it: whoever publishes one has read the
        // counter before, maybe long before. What a checkpoint has passed it never replays.
        match defect::is(Defect::CheckpointGoesBack) {
            true => Seq(limit),
            false => Seq(limit).max(self.block.checkpoint),
        }
    }

    fn try_checkpoint(&mut self, reach: Reach, pass: &mut Pass) -> Result<(), PoolError> {
        #[cfg(test)]
        if defect::is(Defect::FrameReuse) {
            return self.release_early(pass);
        }
        if self.view.has_overlay() && !defect::is(Defect::CheckpointNotSynced) {
            // Records and data first: nothing may be applied that could vanish.
            self.view.data.sync()?;
        }
        // Closed ones too: an open window may have kept their last records
        // from being applied.
        for number in 0..self.block.lanes_end {
            self.apply_lane(number, reach, pass)?;
        }
        self.apply_to_file(pass)?;
        self.withhold_unreadable();
        for &frame in &pass.used {
            self.frames.write(frame, true);
        }
        for &frame in &pass.freed {
            // It stays in use: an opening would not know, and grant it.
            if !self.frames.is_withheld(frame) {
                self.frames.write(frame, false);
            }
        }
        if let Some(stores) = self.frames.flush(&*self.view.data) {
            pass.add(stores);
        }
        let idle = pass.stores.is_none();
        if let Some(stores) = pass.stores.take()
            && !defect::is(Defect::TablesWithSuperblock)
        {
            let _fenced = self.view.data.fence(stores);
        }
        let heads = self.heads();
        if idle && heads == self.block.heads {
            return Ok(());
        }
        self.view.data.sync()?;
        if !defect::is(Defect::LaneReuse) && !defect::is(Defect::NewerNotLookedAt) {
            self.keep_superblock()?;
        }
        self.block.generation += 1;
        self.block.checkpoint = reach.checkpoint;
        self.block.used_frames = self.frames.used();
        self.block.heads = heads;
        if !defect::is(Defect::LaneReuse) {
            write_superblock(&*self.view.data, &self.block)?;
        }
        let mut freed_twice = None;
        for &frame in &pass.freed {
            if !self.frames.release(frame) {
                freed_twice = Some(frame);
            }
        }
        for (number, &head) in (0..self.block.lanes_end).zip(&self.block.heads) {
            self.view
                .control
                .cells(number)
                .head()
                .store(head, Ordering::Release);
        }
        self.recycle_objects(reach.checkpoint);
        freed_twice.map_or(Ok(()), |frame| Err(PoolError::FreedTwice(frame)))
    }

    /// Has frames that could not be read not used again. Whoever met one and then changes
    /// its page has told so before it committed that.
    pub(crate) fn withhold_unreadable(&mut self) {
        if defect::is(Defect::UnreadableReused) {
            return;
        }
        let view = &self.view;
        let pages = [&view.data, &view.meta].map(|media| media.unreadable());
        let own = pages.iter().flatten().map(|at| (at / PAGE_BYTES) as u64);
        let told = view.control.take_unreadable().map(|frame| frame.0);
        own.chain(told)
            .for_each(|frame| self.frames.withhold(frame));
    }

    /// What each lane must keep: records not applied, and those that may be
    /// missing on another leg.
    fn heads(&mut self) -> Vec<u64> {
        let mut heads = self.block.heads.clone();
        // Lanes beyond were never used.
        for (number, head) in (0..self.block.lanes_end).zip(&mut heads) {
            let complete = self
                .view
                .control
                .cells(number)
                .complete()
                .load(Ordering::Acquire);
            let book = self.lanes.book(number);
            let applied = book.applied.end();
            let needed = match defect::is(Defect::HeadPastOpen) {
                true => applied,
                false if defect::is(Defect::BypassKeepsRecords) => complete.min(applied),
                false => complete.max(book.noted).min(applied),
            };
            *head = needed.max(*head);
        }
        heads
    }

    pub(crate) fn apply_lane(
        &mut self,
        number: u32,
        reach: Reach,
        pass: &mut Pass,
    ) -> Result<(), PoolError> {
        let mut committed = self.committed(number);
        let settled = self.view.control.cells(number).settled();
        let settled = settled.load(Ordering::Acquire);
        let book = self.lanes.book(number);
        if reach.is_bypass && book.is_open && number != OWN {
            committed = committed.min(book.noted);
        }
        let settled = book.begin..settled;
        let mut lane = book.applied.clone();
        if lane.end() >= committed {
            return Ok(());
        }
        lane.advance(self.block.heads[number as usize]);
        // Another session may have stored to the line after its flush.
        pass.frame_line = 0;
        let (mut chunk, mut record) = (std::mem::take(&mut pass.chunk), Record::empty());
        chunk.clear();
        while lane.end() < committed {
            let before = lane.end();
            let is_settled = settled.contains(&before);
            let found = match is_settled && lane.follow_head(&*self.view.data, &mut record) {
                true => Followed::Map,
                false => {
                    if !chunk.has(before) {
                        let until = committed.min(before + READ_LINES);
                        lane.read_on(&*self.view.data, until, &mut chunk);
                    }
                    self.follow(&mut lane, committed, &mut chunk, &mut record)?
                }
            };
            let seq = match &found {
                Followed::Map => record.seq,
                Followed::Object(object) => object.seq,
                Followed::Pad => continue,
            };
            if seq >= reach.applied {
                lane.resume(before);
                pass.held = pass.held.max(committed - before);
                break;
            }
            match found {
                Followed::Object(object) => self.apply_object(object, pass),
                _ => self.apply_map(number, &mut record, is_settled, pass)?,
            }
        }
        pass.chunk = chunk;
        self.lanes.book(number).applied = lane;
        Ok(())
    }

    /// Up to where a session has committed.
    pub(crate) fn committed(&self, number: u32) -> u64 {
        let committed = self.view.control.cells(number).committed();
        committed.load(Ordering::Acquire)
    }

    /// As [`Lane::follow`], up to a line that is committed: what has one flipped
    /// bit is mended on the medium. The chunk may be another one afterwards.
    pub(crate) fn follow(
        &mut self,
        lane: &mut Lane,
        committed: u64,
        chunk: &mut Chunk,
        record: &mut Record,
    ) -> Result<Followed, PoolError> {
        if let Ok(found) = lane.follow(chunk, record) {
            return Ok(found);
        }
        let number = lane.place().lane;
        let bad = PoolError::Session(number);
        let data = &*self.view.data;
        let until = committed.min(lane.end() + READ_LINES);
        lane.read_on(data, until, chunk);
        let Some(stores) = lane.mend_next(data, chunk) else {
            return Err(bad);
        };
        let _fenced = data.fence(stores);
        self.mended_records += 1;
        lane.read_on(data, until, chunk);
        lane.follow(chunk, record).map_err(|_| bad)
    }

    fn apply_object(&mut self, object: ObjectRecord, pass: &mut Pass) {
        if self.view.has_overlay() {
            pass.objects.push(object);
        } else {
            // The owner stored and flushed it when it committed.
            pass.add(
                self.view
                    .data
                    .flush(self.view.entry_at(object.object), OBJECT_BYTES as usize),
            );
        }
    }

    /// Applies one record: frames change hands now, slots are flushed if the
    /// session has not done so, or wait for their turn on `file-sync` pools.
    fn apply_map(
        &mut self,
        lane: u32,
        record: &mut Record,
        is_settled: bool,
        pass: &mut Pass,
    ) -> Result<(), PoolError> {
        let numbers = self.view.geometry.frame_numbers();
        let bad = |slot: Slot| {
            slot.frame()
                .is_some_and(|frame| !numbers.contains(&frame.0))
        };
        let beyond = record.object.0 >= self.view.geometry.object_count();
        if beyond
            || record
                .changes
                .iter()
                .any(|change| bad(change.old) || bad(change.new))
        {
            return Err(PoolError::Session(lane));
        }
        if record.is_patch() {
            self.keep_patch(lane, record, is_settled, pass)?;
        }
        for change in &record.changes {
            let (old, new) = (change.old.frame(), change.new.frame());
            if old == new {
                continue;
            }
            if let Some(frame) = new {
                pass.used.push(frame.0);
                if record.level == 0 && !self.view.has_overlay() {
                    self.flush_sum(frame, pass);
                }
            }
            if let Some(frame) = old {
                pass.freed.push(frame.0);
            }
        }
        if self.view.has_overlay() {
            pass.records
                .push(std::mem::replace(record, Record::empty()));
            return Ok(());
        }
        if is_settled {
            return Ok(());
        }
        let walk = || {
            let view = &self.view;
            match view.locate_on(&view.data, record.object, record.level, record.page)? {
                Location::At(at) => Ok::<_, PoolError>(Some(at)),
                // The object was deleted since, and this node with it.
                Location::Unlinked(_) => Ok(None),
            }
        };
        let at = match record.level {
            0 => self.leaves.slot_at(record.object, record.page, walk)?,
            _ => walk()?,
        };
        if let Some(at) = at {
            pass.add(self.view.data.flush(at, record.changes.len() * 8));
            // A flush of what cannot be read writes nothing back.
            if self.view.data.is_unreadable(at) {
                return Err(PoolError::Unreadable(at));
            }
        }
        Ok(())
    }

    /// Flushes a frame's sum, with those of its line.
    fn flush_sum(&self, frame: FrameNo, pass: &mut Pass) {
        let at = self.view.geometry.frame_entry_at(frame);
        if at / LINE_BYTES != pass.frame_line && !defect::is(Defect::FrameTableNotFlushed) {
            pass.frame_line = at / LINE_BYTES;
            pass.add(self.view.data.flush(at, 8));
        }
    }

    /// Flushes the bytes of a patch, if the session has not done so, and the page's sum.
    /// The frame goes on to be the page's.
    fn keep_patch(
        &self,
        lane: u32,
        record: &Record,
        is_settled: bool,
        pass: &mut Pass,
    ) -> Result<(), PoolError> {
        let frame = record.changes[0].new.frame();
        let frame = frame.filter(|_| !self.view.has_overlay());
        let frame = frame.ok_or(PoolError::Session(lane))?;
        if defect::is(Defect::PatchedFrameFreed) {
            pass.freed.push(frame.0);
        }
        self.flush_sum(frame, pass);
        if !is_settled && !defect::is(Defect::PatchNotFlushed) {
            let at = frame_at(frame) + record.patch.within;
            pass.add(self.view.data.flush(at, record.patch.len));
        }
        Ok(())
    }

    /// `file-sync`: stores what the records say to the file, in seq order.
    fn apply_to_file(&mut self, pass: &mut Pass) -> Result<(), PoolError> {
        let data = &*self.view.data;
        let mut records = std::mem::take(&mut pass.records);
        if !defect::is(Defect::AppliedOutOfOrder) {
            records.sort_unstable_by_key(|record| record.seq);
        }
        for record in &records {
            let found = (self.view).locate_on(data, record.object, record.level, record.page)?;
            let Location::At(at) = found else {
                return Err(PoolError::Data(record.seq));
            };
            if !data.can_read(at) {
                return Err(PoolError::Unreadable(at));
            }
            for (i, change) in record.changes.iter().enumerate() {
                data.store(at + i * 8, change.new.encode());
                if let (0, Some(frame)) = (record.level, change.new.frame()) {
                    data.store(
                        self.view.geometry.frame_entry_at(frame),
                        u64::from(change.sums.crc),
                    );
                }
            }
            pass.add(data.flush(at, record.changes.len() * 8));
        }
        for object in std::mem::take(&mut pass.objects) {
            let at = self.view.entry_at(object.object);
            pass.add(store_entry(data, at, &object.entry));
        }
        Ok(())
    }

    /// Ends a session: see [`Pool::close_session`].
    pub(crate) fn bury(&mut self, number: u32) -> Result<(), ObjectError> {
        let cells = self.view.control.cells(number);
        cells.revoked().store(1, Ordering::SeqCst);
        // Lock words are taken, and what is not published is written, inside only.
        let was_inside = self.operation(number).is_some();
        if was_inside && defect::is(Defect::LocksFreedFirst) {
            self.view.control.release_all(number);
        }
        if was_inside && !defect::is(Defect::DeadNotFinished) {
            self.finish(number)?;
        }
        let cells = self.view.control.cells(number);
        if !defect::is(Defect::HoleKept) {
            cells.floor().store(u64::MAX, Ordering::Release);
        }
        let active = cells.active().load(Ordering::Acquire);
        cells
            .active()
            .store(active.next_multiple_of(2), Ordering::Release);
        if was_inside {
            self.view.control.release_all(number);
        }
        if !defect::is(Defect::InFlightOfDeadLost) {
            self.collect_in_flight_of(number, None, Life::Ends)?;
        }
        let cells = self.view.control.cells(number);
        let committed = cells.committed().load(Ordering::Acquire);
        cells.complete().store(committed, Ordering::Release);
        self.checkpoint()?;
        let cells = self.view.control.cells(number);
        cells.recalls().fetch_add(1, Ordering::SeqCst);
        let book = self.lanes.book(number);
        book.take_back(&self.view, number, &mut self.frames);
        book.is_open = false;
        let cells = self.view.control.cells(number);
        cells.recalls().fetch_add(1, Ordering::SeqCst);
        cells.state().store(0, Ordering::Release);
        Ok(())
    }

    /// Finishes the operation that a dead session had committed but not
    /// published, one record or a group; one that is not whole never happened,
    /// and what there is of it goes: parts of a group would be found behind what
    /// the lane's next user writes.
    fn finish(&mut self, number: u32) -> Result<(), ObjectError> {
        let cells = self.view.control.cells(number);
        let committed = cells.committed().load(Ordering::Acquire);
        let mut lane = self.lane_at(number, committed);
        let found = lane.recover(&*self.view.data);
        if found.as_ref().is_ok_and(|scan| scan.is_empty()) {
            return Ok(());
        }
        let group = found.map_or_else(|_| Vec::new(), |scan| first_group(scan.entries));
        if !self.is_whole(&group)? {
            let voided = self.lane_at(number, committed).void(&*self.view.data);
            self.fence(voided);
            return Ok(());
        }
        // Its stores reached memory, but maybe not persistence.
        let data = &*self.view.data;
        let at = self.view.geometry.lane_at(number);
        let mut stores = data.flush(at, self.view.geometry.lane_bytes as usize);
        // What a patch changes lies in its record.
        let records = || group.iter().filter(|(_, record)| !record.is_patch());
        let changes = || records().flat_map(|(_, record)| &record.changes);
        for frame in changes().filter_map(|change| change.new.frame()) {
            stores = stores.and(data.flush(frame_at(frame), PAGE_BYTES));
        }
        let _committed = data.fence(stores);
        for (_, record) in &group {
            self.show(record)?;
        }
        let fresh = |change: &Change| {
            let frame = change.new.frame();
            frame.filter(|_| frame != change.old.frame())
        };
        let book = self.lanes.book(number);
        let taken = changes().filter_map(fresh);
        let consumed = taken.filter_map(|frame| book.consumed_with(frame.0)).max();
        let end = group.last().map_or(committed, |(position, record)| {
            position + record.lines() as u64
        });
        let cells = self.view.control.cells(number);
        // The session may have come to say so before it died.
        let consumed = consumed.unwrap_or(0);
        cells.consumed().fetch_max(consumed, Ordering::AcqRel);
        cells.committed().store(end, Ordering::Release);
        Ok(())
    }

    /// Shows the pages of a record that a dead session had committed.
    fn show(&self, record: &Record) -> Result<(), ObjectError> {
        let found = self.view.locate(record.object, record.level, record.page)?;
        let Location::At(at) = found else {
            return Ok(());
        };
        if !self.view.meta.can_read(at) || self.view.data.is_unreadable(at) {
            return Err(PoolError::Unreadable(at).into());
        }
        if record.is_patch() {
            self.show_patch(at, record);
            return Ok(());
        }
        for (i, change) in record.changes.iter().enumerate() {
            if let (0, Some(frame)) = (record.level, change.new.frame()) {
                let at = self.view.geometry.frame_entry_at(frame);
                self.view.meta.store(at, u64::from(change.sums.crc));
            }
            // Whoever finds it swapped already was the session itself. What does not
            // check is damage, and whoever mends it may do so now.
            let at = at + i * 8;
            let (old, new) = (change.old.encode(), change.new.encode());
            let meta = &*self.view.meta;
            while let Err(found) = meta.swap(at, old, new)
                && Slot::decode(found).is_err()
                && meta.swap(at, found, new).is_err()
            {}
        }
        Ok(())
    }

    /// The same of a patch, unless the session has come to show it. Its bytes may be there
    /// in part: they are put there as a whole, but not where the page cannot be read any
    /// more, which then is told by whoever reads it. The session's lock word is still taken,
    /// so the slot is its own, or damaged.
    fn show_patch(&self, at: usize, record: &Record) {
        let Change { old, new, .. } = record.changes[0];
        let found = Slot::decode(self.view.meta.load(at));
        if found.is_ok_and(|found| ![old, new.changing()].contains(&found)) {
            return;
        }
        let bytes_at = new.frame().map_or(0, frame_at) + record.patch.within;
        let mut bytes = vec![0; record.patch.len];
        self.view.data.read(bytes_at, &mut bytes);
        if self.view.data.is_unreadable(bytes_at) || defect::is(Defect::DeadPatchNotPut) {
            self.view.meta.store(at, new.encode());
            return;
        }
        // Flushed by the checkpoint that passes the record: the session never said that
        // they are settled.
        self.view.apply_patch(at, record);
    }

    /// Whether a group that a dead session left was committed.
    fn is_whole(&self, group: &[(u64, Record)]) -> Result<bool, ObjectError> {
        let mut records = group.iter().map(|(_, record)| record);
        if !group.is_empty() && records.all(|record| self.has_data(record)) {
            return Ok(true);
        }
        for (_, record) in group {
            if self.is_swapped(record)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub(crate) fn lane_at(&mut self, number: u32, position: u64) -> Lane {
        let place = self.lanes.book(number).applied.place().at(position);
        Lane::new(
            self.view.geometry.lane_at(number),
            self.view.geometry.lane_lines(),
            place,
        )
    }

    /// Whether a slot holds what the record says: it was committed, and its
    /// page was damaged since.
    fn is_swapped(&self, record: &Record) -> Result<bool, ObjectError> {
        let found = self.view.locate(record.object, record.level, record.page)?;
        Ok(match found {
            Location::At(at) => record.is_in(&*self.view.meta, at),
            Location::Unlinked(_) => false,
        })
    }

    fn has_data(&self, record: &Record) -> bool {
        let numbers = self.view.geometry.frame_numbers();
        if record.is_patch() {
            let frame = record.changes[0].new.frame();
            return frame.is_some_and(|frame| numbers.contains(&frame.0));
        }
        let mut page = [0; PAGE_BYTES];
        record
            .changes
            .iter()
            .all(|change| match change.new.frame() {
                None => true,
                Some(frame) if !numbers.contains(&frame.0) => false,
                Some(frame) => {
                    self.view.data.read(frame_at(frame), &mut page);
                    record.level > 0 || crc32c(&page) == change.sums.crc
                }
            })
    }

    /// Notes what may be missing elsewhere of every open session.
    pub(crate) fn collect_in_flight(
        &mut self,
        object: Option<ObjectId>,
    ) -> Result<(), ObjectError> {
        for number in self.lanes.numbers_open() {
            if number != OWN {
                self.collect_in_flight_of(number, object, Life::GoesOn)?;
            }
        }
        Ok(())
    }

    /// Notes what may be missing elsewhere of one session. Up to where of its lane; none
    /// where all of it was left behind, as a record cannot be read.
    pub(crate) fn collect_in_flight_of(
        &mut self,
        number: u32,
        object: Option<ObjectId>,
        life: Life,
    ) -> Result<Option<u64>, ObjectError> {
        let view = &self.view;
        let over = self.in_flight.forget_complete(&*view.data, &view.control);
        if life == Life::Ends && !defect::is(Defect::BypassedOfDeadForgotten) {
            // Their records may be gone from the lane.
            self.in_flight.keep_of(number);
        }
        let cells = self.view.control.cells(number);
        // What was noted before may be gone from the lane.
        let head = self.block.heads[number as usize];
        let complete = cells.complete().load(Ordering::Acquire).max(head);
        let committed = cells.committed().load(Ordering::Acquire);
        let mut lane = self.lane_at(number, complete);
        let (mut chunk, mut record) = (Chunk::default(), Record::empty());
        let mut stores = over;
        while lane.end() < committed {
            lane.read_on(&*self.view.data, committed, &mut chunk);
            while lane.end() < chunk.end() {
                let position = lane.end();
                match self.follow(&mut lane, committed, &mut chunk, &mut record) {
                    Ok(Followed::Map) => {}
                    Ok(_) => continue,
                    Err(_) if self.is_applied(&lane) => {
                        self.leave_behind(number)?;
                        return Ok(None);
                    }
                    Err(bad) => return Err(bad.into()),
                }
                let Some(entry) = in_flight_of(&record) else {
                    continue;
                };
                if object.is_some_and(|object| object != record.object) {
                    continue;
                }
                let noted = (life == Life::GoesOn).then_some(Noted {
                    session: number,
                    position,
                });
                let data = &*self.view.data;
                match self.in_flight.add(data, record.object, entry, noted) {
                    Ok((_, stored)) => stores = Some(stored.after(stores)),
                    Err(crate::in_flight::Overflow) => self.mark_compare(record.object)?,
                }
            }
        }
        self.fence(stores);
        Ok(Some(lane.end()))
    }

    /// Whether the last checkpoint left much of a session's lane retained.
    fn is_lane_full(&self, number: u32) -> bool {
        let retained = self.committed(number) - self.block.heads[number as usize];
        retained >= self.view.geometry.lane_lines() / 4
    }

    /// A lane that is full of operations that are incomplete elsewhere: notes
    /// them, so that the lane can go on.
    fn spill_if_full(&mut self, number: u32) -> Result<(), ObjectError> {
        let cells = self.view.control.cells(number);
        let head = self.block.heads[number as usize];
        let complete = cells.complete().load(Ordering::Acquire).max(head);
        let committed = cells.committed().load(Ordering::Acquire);
        if committed - complete < self.view.geometry.lane_lines() / 4 {
            return Ok(());
        }
        self.collect_in_flight_of(number, None, Life::Ends)?;
        // The session waits for our answer: nobody else writes this cell now.
        self.view
            .control
            .cells(number)
            .complete()
            .store(committed, Ordering::Release);
        self.checkpoint()?;
        Ok(())
    }

    /// Stamps the round on the pages of an object's in-flight operations.
    pub(crate) fn stamp(&mut self, object: ObjectId, round: u8) -> Result<(), ObjectError> {
        let Object {
            slice, size_bytes, ..
        } = self.objects[&object];
        let found: Vec<_> = self.in_flight_of(object, size_bytes).collect();
        let handle = self.view.handle(object, slice)?;
        for entry in found {
            for page in entry.page.0..entry.page.0 + u64::from(entry.count) {
                self.stamp_page(&handle, PageNo(page), round)?;
            }
        }
        Ok(())
    }

    fn stamp_page(&mut self, handle: &Handle, page: PageNo, round: u8) -> Result<(), ObjectError> {
        let range = Range::of(handle.object, page, 1);
        let control = &self.view.control;
        let end = Deadline::after(LOCK_WAIT_MAX);
        loop {
            let before = control.holder(&range);
            if control.lock_within(&range, OWN, LEAVE_WAIT).is_ok() {
                break;
            }
            // Who cleans up behind the dead needs the pool, and may have to end this one.
            if let Some((session, operation)) = before
                && before == control.holder(&range)
            {
                return Err(self.stuck(session, operation));
            }
            if end.is_over() {
                return Err(StoreError::Stalled.into());
            }
        }
        let stamped = self.stamp_locked(handle, page, round);
        self.view.control.unlock(&range);
        stamped
    }

    fn stamp_locked(
        &mut self,
        handle: &Handle,
        page: PageNo,
        round: u8,
    ) -> Result<(), ObjectError> {
        let Location::At(at) = self.view.locate(handle.object, 0, page)? else {
            return Ok(());
        };
        // Lists of dirty pages name a damaged slot whatever the round: it counts as
        // stamped.
        let Ok(old) = self.view.slot(at, page) else {
            return Ok(());
        };
        if old.track() == round || old == Slot::EMPTY {
            return Ok(());
        }
        let (new, crc) = match old.frame() {
            Some(frame) => {
                let crc =
                    self.view
                        .meta
                        .load(self.view.geometry.frame_entry_at(frame)) as u32;
                (old.map(frame, round), crc)
            }
            None => (old.unmap(round), 0),
        };
        let change = [Change {
            old,
            new,
            // The second one is added where it can be told.
            sums: Sums { crc, words: 0 },
        }];
        self.retrying(|own| own.commit_changes(handle, 0, page, at, &change))
    }

    /// Frees frames of deleted objects, some at a time. True when there is
    /// more to do.
    fn reclaim(&mut self) -> Result<bool, ObjectError> {
        let Some(&(seq, object)) = self.deleting.first() else {
            return Ok(false);
        };
        // Records of the object that came before must be applied first.
        if seq >= self.block.checkpoint && seq != Seq(0) {
            return Ok(false);
        }
        assert_eq!(
            self.objects[&object].state,
            State::Deleting,
            "a deleted object"
        );
        let handle = self.view.handle(object, self.objects[&object].slice)?;
        for _ in 0..RECLAIM_STEPS {
            if !self.reclaim_step(&handle)? {
                self.deleting.remove(0);
                self.drop_object(object)?;
                return Ok(!self.deleting.is_empty());
            }
        }
        Ok(true)
    }

    /// Unmaps some slots at the lowest level of the first branch that is
    /// left. False when nothing is.
    fn reclaim_step(&mut self, handle: &Handle) -> Result<bool, ObjectError> {
        let root_at = self.view.entry_at(handle.object) + ROOT_AT;
        let (mut at, mut level, mut page) = (root_at, HEIGHT, 0u64);
        loop {
            // What is below a slot that cannot be mended is lost; the frames are found
            // by a check of the pool.
            let node = self.node_at(handle.object, level, page, at);
            let Some(node) =
                node.filter(|node| self.view.geometry.frame_numbers().contains(&node.0))
            else {
                self.clear_root(handle)?;
                return Ok(false);
            };
            if level == 1
                && let Some((first, changes)) = self.unmap_some(node, |slot| slot.unmap(0))
            {
                let slots_at = frame_at(node) + first * 8;
                let page = PageNo(page + first as u64);
                self.retrying(|own| own.commit_changes(handle, 0, page, slots_at, &changes))?;
                return Ok(true);
            }
            let page_of = |i: usize| page + ((i as u64) << (9 * u32::from(level - 1)));
            let below = (0..NODE_SLOTS as usize).find(|&i| {
                let at = frame_at(node) + i * 8;
                level > 1
                    && self
                        .node_at(handle.object, level - 1, page_of(i), at)
                        .is_some()
            });
            match below {
                Some(i) => {
                    page = page_of(i);
                    level -= 1;
                    at = frame_at(node) + i * 8;
                }
                None => {
                    let old = Slot::decode(self.view.meta.load(at))
                        .map_err(|_| StoreError::NoSuchObject)?;
                    // The root goes back to empty, as a new object finds it.
                    let new = if at == root_at {
                        Slot::EMPTY
                    } else {
                        old.unmap(0)
                    };
                    let change = [Change {
                        old,
                        new,
                        sums: NO_SUMS,
                    }];
                    let page = PageNo(page);
                    self.retrying(|own| own.commit_changes(handle, level, page, at, &change))?;
                    return Ok(at != root_at);
                }
            }
        }
    }

    /// Empties the root slot of a deleted object if it does not check: a new object
    /// finds it empty.
    fn clear_root(&mut self, handle: &Handle) -> Result<(), ObjectError> {
        let at = self.view.entry_at(handle.object) + ROOT_AT;
        if Slot::decode(self.view.meta.load(at)).is_ok() {
            return Ok(());
        }
        let change = [Change {
            old: Slot::EMPTY,
            new: Slot::EMPTY,
            sums: NO_SUMS,
        }];
        self.retrying(|own| own.commit_changes(handle, HEIGHT, PageNo(0), at, &change))
    }

    /// The node that the slot of `level` above `page` names, which lies at this byte.
    fn node_at(&self, object: ObjectId, level: u8, page: u64, at: usize) -> Option<FrameNo> {
        let slot = self.view.node_slot(object, level, PageNo(page), at);
        slot.ok().and_then(Slot::frame)
    }

    fn is_linked(&self, node: FrameNo, index: usize) -> bool {
        let slot = Slot::decode(self.view.meta.load(frame_at(node) + index * 8));
        slot.is_ok_and(|slot| slot.frame().is_some())
    }

    /// The first run of mapped slots of a leaf, as changes.
    fn unmap_some(
        &self,
        node: FrameNo,
        unmapped: impl Fn(Slot) -> Slot,
    ) -> Option<(usize, Vec<Change>)> {
        let limit = (self.view.geometry.lane_lines() as usize / 4 - 1) * 3;
        let first = (0..NODE_SLOTS as usize).find(|&i| self.is_linked(node, i))?;
        let changes = (first..NODE_SLOTS as usize)
            .take_while(|&i| self.is_linked(node, i))
            .take(limit.min(PAGES_MAX / 2))
            .filter_map(|i| Slot::decode(self.view.meta.load(frame_at(node) + i * 8)).ok())
            .map(|old| Change {
                old,
                new: unmapped(old),
                sums: NO_SUMS,
            })
            .collect();
        Some((first, changes))
    }

    /// What the owner knows of an object.
    #[must_use]
    pub fn object(&self, object: ObjectId) -> Option<&Object> {
        self.objects.get(&object)
    }
}
