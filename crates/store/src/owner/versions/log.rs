//! The version log: its creation, the lines of a checkpoint, and the room that checkpoints need.
//!
//! Invariant: lines are durable before the superblock whose tail lies behind them.

use super::super::checkpoint::{CheckpointLimits, CheckpointPass};
use super::super::error::ObjectError;
use super::super::pool::Pool;
use super::super::version_store::PendingVersion;
use super::LEAF_PAGES;
use crate::defect::{self, Defect};
use crate::format::geometry::frame_at;
use crate::format::journal::{JournalChunk, NextEntry};
use crate::format::record::Record;
use crate::format::superblock::Features;
use crate::format::version_log::{
    FRAME_LINES, LOG_RUNS_MAX, LogRun, Version, VersionLogPlace, append_lines, load_versions,
};
use crate::recovery::PoolError;
use crate::shared::control::FrameRun;
use crate::shared::error::StoreError;
use pagemesh_base::ids::Seq;
#[cfg(feature = "test-api")]
use pagemesh_base::ids::{Epoch, ObjectId, PageNo};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;

/// The log of a pool has a line for so many frames, and more for its journals.
const FRAMES_PER_LINE: u64 = 8;
/// Lines of the longest log, apart from those for journals. Lines that are not merged are in memory.
const LINES_MAX: u64 = 1 << 21;
/// Journals full of the records with most pages that the log has room for, besides.
const JOURNALS_IN_LOG: u64 = 4;
/// Pages of one line of a journal, at most.
const PAGES_PER_JOURNAL_LINE: u64 = 3;
/// Frames for the owner's changes of versions, or this part of a small pool.
const RESERVED_FRAMES: u64 = 256;
const RESERVED_PART: u64 = 64;
/// Frames that a session may hold, however little room the log has: a long record needs half as many.
const GRANT_MIN: u64 = 512;
/// Merging begins when this part of the log has lines.
const MERGE_PART: u64 = 4;

impl<M: Media> Pool<M> {
    /// Creates the version log, unless it is there.
    pub(super) fn ensure_version_log(&mut self) -> Result<(), ObjectError> {
        if self.superblock.version_log.is_present() {
            return Ok(());
        }
        let frames = self.superblock.geometry.frame_bytes() / PAGE_BYTES as u64;
        let journal_lines = self.mapping.geometry().journal_lines();
        let of_journals = journal_lines * PAGES_PER_JOURNAL_LINE * JOURNALS_IN_LOG;
        let lines = (frames / FRAMES_PER_LINE).min(LINES_MAX) + of_journals;
        let runs = self.allocate_log_frames(lines.div_ceil(FRAME_LINES))?;
        // The superblock names the frames before their bits are stored: a crash in between loses none.
        self.superblock.features.incompatible |= Features::VERSIONS;
        self.superblock.version_log = VersionLogPlace::new(&runs);
        self.write_next_superblock()?;
        for frame in runs.iter().copied().flat_map(LogRun::frames) {
            self.frame_allocator.write(frame, true);
        }
        let stores = self.frame_allocator.flush(&*self.mapping.data);
        self.fence(stores);
        self.superblock.version_log.is_counted = true;
        self.superblock.used_frames = self.frame_allocator.used();
        self.superblock.bitmap_ends = *self.frame_allocator.bitmap().ends();
        self.write_next_superblock()?;
        Ok(())
    }

    fn allocate_log_frames(&mut self, wanted: u64) -> Result<Vec<LogRun>, ObjectError> {
        let mut runs: Vec<FrameRun> = Vec::new();
        let mut rest = wanted;
        while rest > 0 && runs.len() < LOG_RUNS_MAX {
            let Some(run) = self.frame_allocator.allocate(rest) else {
                break;
            };
            rest -= run.len;
            runs.push(run);
        }
        if rest > wanted / 2 {
            for run in runs {
                self.frame_allocator.return_unused(run);
            }
            return Err(StoreError::NoSpace.into());
        }
        let to_log = |run: FrameRun| LogRun {
            start: run.start,
            len: run.len,
        };
        Ok(runs.into_iter().map(to_log).collect())
    }

    pub(in crate::owner) fn write_next_superblock(&mut self) -> Result<(), PoolError> {
        self.mapping.data.sync()?;
        self.ensure_newer_superblock()?;
        self.superblock.generation += 1;
        self.write_superblock()
    }

    /// Appends the versions that the records of a checkpoint replaced. The caller fences the stores of the pass before
    /// it writes the superblock.
    pub(in crate::owner) fn append_versions(&mut self, pass: &mut CheckpointPass) {
        let mapping = self.mapping.clone();
        let log = &mut self.superblock.version_log;
        let first = log.tail;
        let read =
            |frame, into: &mut _| mapping.data.read(frame_at(frame), into as &mut [u8; 4096]);
        let lines = pass.kept.iter().copied().map(Some);
        for written in append_lines(log, mapping.pool, lines, read) {
            let target = (&*mapping.data, frame_at(written.frame));
            let (_, streamed) = M::stream_page(&[target], &written.bytes);
            if !defect::is(Defect::VersionLogNotFenced) {
                pass.add(streamed);
            }
        }
        for (position, version) in (first..).zip(&pass.kept) {
            self.add_pending(position, *version);
        }
    }

    /// On a file: makes the replaced versions durable in the log before slots are stored. A recovery that finds a record's
    /// slot stored then knows that the version which it replaced is in the log.
    pub(in crate::owner) fn log_versions_before_slots(
        &mut self,
        pass: &mut CheckpointPass,
    ) -> Result<(), PoolError> {
        if !self.mapping.has_overlay()
            || pass.kept.is_empty()
            || defect::is(Defect::VersionLogNotFenced)
        {
            return Ok(());
        }
        self.append_versions(pass);
        pass.kept.clear();
        if let Some(stores) = pass.stores.take() {
            let _fenced = self.mapping.data.fence(stores);
        }
        self.write_next_superblock()
    }

    fn add_pending(&mut self, position: u64, version: Version) {
        let key = (version.object, version.page.0 / LEAF_PAGES);
        let pending = PendingVersion { position, version };
        self.versions.pending.entry(key).or_default().push(pending);
        self.versions.pending_lines += 1;
    }

    pub(super) fn load_version_log(&mut self) {
        let log = self.superblock.version_log;
        let versions = load_versions(&*self.mapping.data, &log, self.mapping.pool);
        let mut has_lost = false;
        for (position, version) in (log.head..).zip(versions) {
            match version {
                Some(version) => self.add_pending(position, version),
                // The version is lost, and its frame stays in use until a check of the pool frees it.
                None => has_lost = true,
            }
        }
        if has_lost {
            self.note_lost_lines();
        }
        self.versions.recovered_tail = log.tail;
        self.versions.merged_head = log.head;
    }

    /// Whether the durable head has passed all lines.
    pub(super) fn is_log_merged(&self) -> bool {
        let log = &self.superblock.version_log;
        log.head == log.tail
    }

    /// See [`fill_version_log`](crate::test_api::PoolInternals::fill_version_log).
    #[cfg(feature = "test-api")]
    pub(crate) fn fill_version_log(&mut self, room: u64) -> Result<(), PoolError> {
        let log = self.superblock.version_log;
        let Some(frame) = log.frames().next() else {
            return Ok(());
        };
        let of_no_slice = Version {
            object: ObjectId(u32::MAX),
            page: PageNo(0),
            frame,
            birth: Epoch(0),
            death: Epoch(1),
        };
        let mut pass = CheckpointPass {
            kept: vec![of_no_slice; (log.room() - room) as usize],
            ..CheckpointPass::default()
        };
        self.append_versions(&mut pass);
        if let Some(stores) = pass.stores.take() {
            let _fenced = self.mapping.data.fence(stores);
        }
        self.write_next_superblock()
    }

    /// Whether enough lines wait for a merge to begin.
    pub(super) fn is_merge_due(&self) -> bool {
        let log = &self.superblock.version_log;
        self.versions.pending_lines * MERGE_PART >= log.capacity().max(1)
    }

    /// Lets the durable head pass the merged lines.
    pub(super) fn pass_log_head(&mut self) -> Result<(), PoolError> {
        if self.superblock.version_log.head != self.versions.merged_head {
            let heads = self.superblock.journal_heads.clone();
            self.write_checkpoint(self.superblock.checkpoint, heads)?;
        }
        Ok(())
    }

    /// The limits of a checkpoint whose versions have room in the log.
    pub(in crate::owner) fn within_log_room(
        &mut self,
        reach: CheckpointLimits,
    ) -> Result<CheckpointLimits, PoolError> {
        let room = self.superblock.version_log.room();
        self.versions.is_checkpoint_limited = false;
        let has_snapshots = self
            .objects
            .values()
            .any(|entry| entry.newest_snapshot().0 > 0);
        if !has_snapshots || self.unapplied_pages_max() <= room {
            return Ok(reach);
        }
        let mut groups = self.unapplied_groups(reach.checkpoint)?;
        groups.sort_unstable();
        let mut rest = room;
        for (seq, pages) in groups {
            if pages > rest {
                self.versions.is_checkpoint_limited = true;
                return Ok(CheckpointLimits::full(seq.min(reach.checkpoint)));
            }
            rest -= pages;
        }
        Ok(CheckpointLimits::full(reach.checkpoint))
    }

    /// Free frames that no session gets: a full pool must still drop snapshots.
    pub(in crate::owner) fn reserved_frames(&self) -> u64 {
        let frames = self.superblock.geometry.frame_bytes() / PAGE_BYTES as u64;
        match self.superblock.version_log.is_present() {
            true => RESERVED_FRAMES.min(frames / RESERVED_PART) + self.merge_frames(),
            false => 0,
        }
    }

    /// Frames that a merge of all pending lines may take: entries and nodes of new blocks, and pages of the directory.
    fn merge_frames(&self) -> u64 {
        let leaves = self.versions.pending.len() as u64;
        leaves / 4 + leaves / 1024 + self.versions.pending_lines / 250
    }

    /// The frames that one session may hold: each may replace a version, and a recovery logs all that are not logged yet.
    pub(in crate::owner) fn grant_limit(&self) -> u64 {
        let log = &self.superblock.version_log;
        match log.is_present() {
            true => {
                (log.room() / (2 * u64::from(self.sessions.open_count()).max(1))).max(GRANT_MIN)
            }
            false => u64::MAX,
        }
    }

    /// A bound on the pages that committed and unapplied records replace.
    fn unapplied_pages_max(&mut self) -> u64 {
        let mut lines = 0;
        for number in 0..self.superblock.journals_end {
            let committed = self.committed_end(number);
            let applied = self.sessions.session(number).applied_journal.end();
            lines += committed.saturating_sub(applied);
        }
        lines.saturating_mul(PAGES_PER_JOURNAL_LINE)
    }

    /// The committed and unapplied records below a seq, with their pages.
    fn unapplied_groups(&mut self, limit: Seq) -> Result<Vec<(Seq, u64)>, PoolError> {
        let mut groups = Vec::new();
        let mut record = Record::empty();
        for number in 0..self.superblock.journals_end {
            let committed = self.committed_end(number);
            let mut journal = self.sessions.session(number).applied_journal.clone();
            let mut chunk = JournalChunk::default();
            while journal.end() < committed {
                let before = journal.end();
                if !chunk.has(before) {
                    journal.read_ahead(
                        &*self.mapping.data,
                        committed.min(before + 256),
                        &mut chunk,
                    );
                }
                match self.read_next_record(&mut journal, committed, &mut chunk, &mut record)? {
                    NextEntry::Map if record.seq >= limit => break,
                    NextEntry::Map => groups.push((record.seq, record.changes.len() as u64)),
                    NextEntry::Object(_) | NextEntry::Pad => {}
                }
            }
        }
        Ok(groups)
    }
}
