//! Checkpoints.
//!
//! A checkpoint at C applies every record with a seq below C: its slots, frame-table words and
//! bitmap bits become persistent. Only then is a superblock with C written, and only after that are
//! journal lines and freed frames used again. C never passes an operation in progress: a session
//! publishes a floor before it takes a seq. `partial_checkpoint` handles an operation that stays in
//! progress.
//!
//! On a `file-sync` pool an fdatasync makes frames and journals durable. Slots, nodes, frame table
//! and object entries are in a private mapping until the checkpoint. The checkpoint syncs, stores
//! the changes of the *records* in seq order, syncs again, and writes the superblock.

use super::media_bytes::AppliedBytes;
use super::pool::Pool;
use crate::defect::{self, Defect};
use crate::format::journal::JournalChunk;
use crate::format::record::{ObjectRecord, Record};
use crate::format::version_log::Version;
use crate::recovery::PoolError;
use pagemesh_base::ids::Seq;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, UnfencedStores};
use std::sync::atomic::Ordering;

/// The limits of a checkpoint.
#[derive(Clone, Copy)]
pub(crate) struct CheckpointLimits {
    /// Recovery begins there. No operation in progress has a lower seq.
    pub(crate) checkpoint: Seq,
    /// Records below are applied. It is the checkpoint, or beyond it.
    pub(crate) applied: Seq,
    /// A partial checkpoint: it goes beyond the checkpoint. Of an open session other than the
    /// owner's it applies only the journal lines below which the operations were listed in the
    /// in-flight table.
    pub(crate) is_partial: bool,
}

impl CheckpointLimits {
    /// The limits of a full checkpoint.
    pub(crate) fn full(limit: Seq) -> CheckpointLimits {
        CheckpointLimits {
            checkpoint: limit,
            applied: limit,
            is_partial: false,
        }
    }
}

/// The state of a pass over the journals. The pool keeps it to reuse the buffers.
#[derive(Default)]
pub(crate) struct CheckpointPass {
    pub(super) stores: Option<UnfencedStores>,
    /// Frames that records took into use, and frames that they freed.
    pub(super) used: Vec<u64>,
    pub(super) freed: Vec<u64>,
    /// Versions that records replaced and that snapshots see. Their frames stay in use.
    pub(super) kept: Vec<Version>,
    /// The line of the frame table that was flushed last: consecutive frames share a line.
    pub(super) frame_line: usize,
    pub(super) written: AppliedBytes,
    /// On `file-sync` pools, the records to be applied in seq order.
    pub(crate) records: Vec<Record>,
    pub(super) objects: Vec<ObjectRecord>,
    pub(super) chunk: JournalChunk,
    /// The most committed lines of one journal that operations in progress kept from being applied.
    pub(crate) unapplied_lines: u64,
}

impl CheckpointPass {
    fn reset(&mut self) {
        self.stores = None;
        self.used.clear();
        self.freed.clear();
        self.kept.clear();
        self.records.clear();
        self.objects.clear();
        self.written = AppliedBytes::default();
    }

    pub(super) fn add(&mut self, stores: UnfencedStores) {
        self.stores = Some(stores.after(self.stores.take()));
    }
}

impl<M: Media> Pool<M> {
    /// Applies the committed records and makes the result the new start of recovery.
    ///
    /// # Errors
    /// When the medium fails or a journal holds an impossible record. The pool has then failed.
    pub fn checkpoint(&mut self) -> Result<(), PoolError> {
        self.checkpoint_to(CheckpointLimits::full(self.checkpoint_limit()))
    }

    pub(crate) fn checkpoint_to(&mut self, reach: CheckpointLimits) -> Result<(), PoolError> {
        if self.has_failed {
            return Err(PoolError::Failed);
        }
        let mut pass = std::mem::take(&mut self.checkpoint_pass);
        pass.unapplied_lines = 0;
        let result = self.try_checkpoint(reach, &mut pass);
        self.owner_bytes.add(pass.written.bytes());
        pass.reset();
        self.checkpoint_pass = pass;
        self.has_failed |= result.is_err();
        if result.is_err() {
            self.mapping.mark_owner_gone();
        }
        result
    }

    pub(crate) fn checkpoint_limit(&self) -> Seq {
        let next = self.mapping.control.seq().load(Ordering::Acquire);
        let floor = |number| {
            self.mapping
                .control
                .session_cells(number)
                .floor()
                .load(Ordering::SeqCst)
        };
        if defect::is(Defect::CheckpointPassesUnpublished) {
            return Seq(next);
        }
        let floors = (0..self.superblock.journals_end).map(floor);
        let limit = floors.min().map_or(next, |floor| floor.min(next));
        // A floor may be older than the session's later seq: the session read the counter before it
        // published the floor, possibly long before. Recovery never replays a record that a
        // checkpoint has passed.
        if defect::is(Defect::CheckpointGoesBack) {
            Seq(limit)
        } else {
            Seq(limit).max(self.superblock.checkpoint)
        }
    }

    fn try_checkpoint(
        &mut self,
        reach: CheckpointLimits,
        pass: &mut CheckpointPass,
    ) -> Result<(), PoolError> {
        if let Some(released) = self.release_frames_early(pass) {
            return released;
        }
        let reach = self.within_log_room(reach)?;
        if self.mapping.has_overlay() && !defect::is(Defect::CheckpointNotSynced) {
            // Records and data come first: nothing may be applied that could vanish.
            self.mapping.data.sync()?;
        }
        // Closed sessions too: an operation in progress may have kept their last records from being
        // applied.
        for number in 0..self.superblock.journals_end {
            self.apply_journal(number, reach, pass)?;
        }
        self.log_versions_before_slots(pass)?;
        self.apply_to_file(pass)?;
        self.append_versions(pass);
        self.write_frame_bits(pass);
        let idle = pass.stores.is_none();
        if let Some(stores) = pass.stores.take()
            && !defect::is(Defect::TablesWithSuperblock)
        {
            let _fenced = self.mapping.data.fence(stores);
        }
        let heads = self.journal_heads();
        if idle && heads == self.superblock.journal_heads {
            return Ok(());
        }
        self.write_checkpoint(reach.checkpoint, heads)?;
        self.release_freed_resources(reach.checkpoint, pass)
    }

    /// Writes the bits of the frames that records took and freed.
    fn write_frame_bits(&mut self, pass: &mut CheckpointPass) {
        self.withhold_unreadable();
        for &frame in &pass.used {
            self.frame_allocator.write(frame, true);
        }
        for &frame in &pass.freed {
            // The frame stays in use in the bitmap: the next opening would not know that it is
            // unreadable, and would grant it.
            if !self.frame_allocator.is_withheld(frame) {
                self.frame_allocator.write(frame, false);
            }
        }
        pass.written
            .add_table_lines(self.frame_allocator.changed_lines());
        if let Some(stores) = self.frame_allocator.flush(&*self.mapping.data) {
            pass.add(stores);
        }
    }

    /// Writes the superblock that makes the applied records the new start of recovery.
    pub(super) fn write_checkpoint(
        &mut self,
        checkpoint: Seq,
        heads: Vec<u64>,
    ) -> Result<(), PoolError> {
        // With flash behind memory, its bitmap and frame table.
        if !self.is_tiered() || !defect::is(Defect::FlashTablesNotSynced) {
            self.mapping.data.sync()?;
        }
        if !defect::is(Defect::JournalReuse) && !defect::is(Defect::NewerSuperblockNotChecked) {
            self.ensure_newer_superblock()?;
        }
        self.superblock.generation += 1;
        self.superblock.checkpoint = checkpoint;
        self.superblock.used_frames = self.frame_allocator.used();
        self.superblock.version_log.head = self.merged_log_head();
        if !defect::is(Defect::BitmapEndNotStored) {
            self.superblock.bitmap_ends = *self.frame_allocator.bitmap().ends();
        }
        self.superblock.journal_heads = heads;
        if !defect::is(Defect::JournalReuse) {
            self.write_superblock()?;
        }
        Ok(())
    }

    /// Lets frames, journal lines and entries of objects that the checkpoint freed be used again.
    fn release_freed_resources(
        &mut self,
        checkpoint: Seq,
        pass: &CheckpointPass,
    ) -> Result<(), PoolError> {
        let mut freed_twice = None;
        for &frame in &pass.freed {
            if !self.frame_allocator.release(frame) {
                freed_twice = Some(frame);
            }
        }
        for (number, &head) in (0..self.superblock.journals_end).zip(&self.superblock.journal_heads)
        {
            self.mapping
                .control
                .session_cells(number)
                .head()
                .store(head, Ordering::Release);
        }
        self.recycle_objects(checkpoint);
        freed_twice.map_or(Ok(()), |frame| Err(PoolError::FreedTwice(frame)))
    }

    /// Withholds frames that could not be read from further use. A session that found one and then
    /// changes its page has reported the frame before it commits the change.
    pub(crate) fn withhold_unreadable(&mut self) {
        if defect::is(Defect::UnreadableReused) {
            return;
        }
        let mapping = &self.mapping;
        let pages = [&mapping.data, &mapping.meta].map(|media| media.unreadable_pages());
        let own = pages.iter().flatten().map(|at| (at / PAGE_BYTES) as u64);
        let reported = mapping.control.take_unreadable().map(|frame| frame.0);
        own.chain(reported)
            .for_each(|frame| self.frame_allocator.withhold(frame));
    }

    /// The first line that each journal must retain: records that are not applied, and records that
    /// may be missing on another leg.
    pub(super) fn journal_heads(&mut self) -> Vec<u64> {
        let mut heads = self.superblock.journal_heads.clone();
        // Journals beyond were never used.
        for (number, head) in (0..self.superblock.journals_end).zip(&mut heads) {
            let complete = self
                .mapping
                .control
                .session_cells(number)
                .complete()
                .load(Ordering::Acquire);
            let session_state = self.sessions.session(number);
            let applied = session_state.applied_journal.end();
            let needed = match defect::is(Defect::HeadPastOpen) {
                true => applied,
                false if defect::is(Defect::PartialCheckpointKeepsRecords) => complete.min(applied),
                false => complete.max(session_state.recorded_below).min(applied),
            };
            *head = needed.max(*head);
        }
        heads
    }
}
