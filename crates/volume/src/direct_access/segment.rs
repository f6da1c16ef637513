//! The segment: the shared memory of a volume and its direct clients. It is volatile, and holds
//! offsets only, never pointers.
//!
//! ```text
//!     0  magic 8, version 4, rows 4
//!    64  generation 8 (0: no access), closed 8 (number of parties that block access),
//!        reason for no access 8,
//!        opens 8 (how often a process with direct threads opened a file past its preload library)
//!   128  number of the last operation 8,          (every writer's shared line)
//!        slots claimed in the ring 8,
//!        word of the stamps 8, as in `stamp_epoch`: the newest snapshot and whether it is held 4, the layout that it
//!        was cut under 4
//!  4096  rows of 64 bytes:
//!     0  active 8 (odd during an operation), file 8, first byte 8, bytes 8,
//!    32  claim in the ring 8 (0: none),
//!        runs 8 (0: the operation is the range of the row; else the number of its atomic runs)
//! 20480  runs of each row, 512 bytes: first page and number of pages, as one word each
//! ```
//!
//! The [`replication_ring`](crate::replication::ring) lies behind. It holds changes on their way
//! to an asynchronous replica.
//!
//! Invariants:
//! - A direct client sets its row active, and only then checks whether it has access. A party
//!   that blocks access first raises the `closed` count, and only then reads the rows. So one
//!   of the two sees the other.
//! - A row has one writer at a time: the direct client that owns it. After its death, the
//!   party that reconciles the row is the writer.

use crate::limits::{HOLD_LIMIT, HOLD_POLL};
use crate::replication::ring::{RING_END_AT, TAIL_AT};
use crate::stamp_epoch::{NO_SNAPSHOT, release, stamp_by};
use crate::steps::step;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::slice::{PageRun, SLICE_IO_BYTES_MAX};
use pagemesh_base::space::TRANSACTION_PAGES_MAX;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{MapError, SharedSegment};
use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// The maximum of concurrent direct client threads: more than a pool has sessions.
pub const ROWS: usize = 256;
/// Bytes of a segment.
pub const SEGMENT_BYTES: usize = RING_END_AT;
/// The maximum of page runs in one operation: each may be of one page.
pub const RUNS_MAX: usize = TRANSACTION_PAGES_MAX as usize;

const MAGIC: u64 = u64::from_le_bytes(*b"pmdirct\0");
const VERSION: u32 = 7;
const VERSION_AT: usize = 8;
const ROWS_NUMBER_AT: usize = 12;
const GENERATION_AT: usize = 64;
const CLOSED_AT: usize = 72;
const DISABLED_REASON_AT: usize = 80;
const UNTRACKED_OPENS_AT: usize = 88;
const OPS_AT: usize = 128;
/// Behind the claimed slots of the ring.
const STAMP_AT: usize = OPS_AT + 16;
const _: () = assert!(STAMP_AT == TAIL_AT + 8 && STAMP_AT / 64 == OPS_AT / 64);
const ROWS_AT: usize = PAGE_BYTES;
const ROW_BYTES: usize = 64;
const RUNS_AT: usize = ROWS_AT + ROWS * ROW_BYTES;
/// Where the runs of all rows end.
pub(crate) const RUNS_END_AT: usize = RUNS_AT + ROWS * RUNS_MAX * 8;
/// The position of a run's page count in its word, above the first page.
const RUN_COUNT_SHIFT: u32 = 48;
const _: () = assert!(SEGMENT_BYTES.is_multiple_of(PAGE_BYTES), "whole pages");

/// The reason for which direct clients have no access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectDisabledReason {
    /// The volume is fenced, or its legs are changing.
    Reconfiguring = 1,
    /// A written leg is not in-sync.
    LegNotInSync = 2,
    /// A leg is reached over TCP.
    TcpLeg = 3,
    /// A pool buffers: it is of class `file-sync`.
    BufferedPool = 4,
    /// The volume has several columns.
    MultipleColumns = 5,
}

impl DirectDisabledReason {
    const ALL: [DirectDisabledReason; 5] = [
        DirectDisabledReason::Reconfiguring,
        DirectDisabledReason::LegNotInSync,
        DirectDisabledReason::TcpLeg,
        DirectDisabledReason::BufferedPool,
        DirectDisabledReason::MultipleColumns,
    ];
}

/// The shared memory of a volume and its direct clients.
pub struct DirectSegment(SharedSegment);

/// The row of a direct client thread.
#[derive(Clone, Copy)]
pub struct ClientRow<'s> {
    shared: &'s SharedSegment,
    at: usize,
    runs_at: usize,
}

/// The byte range of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileRange {
    /// The file, by the number that its mount gave it.
    pub file: u64,
    /// The first byte in the volume.
    pub offset: u64,
    /// The number of bytes.
    pub len: u64,
}

/// An operation that a direct client left incomplete when it died.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TornOp {
    /// Each page is changed or not, independently of the others.
    PerPage(FileRange),
    /// Either all pages are changed or none.
    Atomic {
        /// The file, by the number that its mount gave it.
        file: u64,
        /// The changed pages of the volume.
        runs: Vec<PageRun>,
    },
}

impl TornOp {
    /// Reads the torn operation from the row of a dead direct client. The client may have
    /// written anything there, so counts and lengths are bounded; none if the row is idle or
    /// its range is invalid.
    #[must_use]
    pub fn of_row(row: ClientRow<'_>) -> Option<TornOp> {
        let place = row.active_range()?;
        let mut room = TRANSACTION_PAGES_MAX;
        let mut runs = row.runs();
        runs.retain_mut(|run| {
            run.count = run.count.min(room);
            room -= run.count;
            run.count > 0
        });
        if !runs.is_empty() {
            let file = place.file;
            return Some(TornOp::Atomic { file, runs });
        }
        let len = place.len.min(u64::from(SLICE_IO_BYTES_MAX));
        let end = place.offset.checked_add(len + PAGE_BYTES as u64);
        end.map(|_| TornOp::PerPage(FileRange { len, ..place }))
    }

    /// The file that the operation changed.
    #[must_use]
    pub fn file(&self) -> u64 {
        match self {
            TornOp::PerPage(place) => place.file,
            TornOp::Atomic { file, .. } => *file,
        }
    }
}

impl DirectSegment {
    /// Creates a segment. Its operations are numbered after `last_op`.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn create(last_op: u64) -> Result<DirectSegment, MapError> {
        let shared = SharedSegment::create(SEGMENT_BYTES)?;
        shared
            .half_word(VERSION_AT)
            .store(VERSION, Ordering::Relaxed);
        shared
            .half_word(ROWS_NUMBER_AT)
            .store(ROWS as u32, Ordering::Relaxed);
        shared.word(OPS_AT).store(last_op, Ordering::Relaxed);
        shared.word(STAMP_AT).store(NO_SNAPSHOT, Ordering::Relaxed);
        shared.word(0).store(MAGIC, Ordering::Release);
        Ok(DirectSegment(shared))
    }

    /// Opens a segment that another process created. It takes no descriptor.
    ///
    /// # Errors
    /// The way in which the file is not as expected.
    pub fn join(file: File) -> Result<DirectSegment, String> {
        let shared = SharedSegment::open(file, SEGMENT_BYTES).map_err(|cause| cause.to_string())?;
        let version = shared.half_word(VERSION_AT).load(Ordering::Relaxed);
        let rows = shared.half_word(ROWS_NUMBER_AT).load(Ordering::Relaxed);
        if shared.word(0).load(Ordering::Acquire) != MAGIC {
            return Err("it is no direct segment".into());
        }
        if (version, rows as usize) != (VERSION, ROWS) {
            return Err("the direct segment has another version; use the mount's".into());
        }
        Ok(DirectSegment(shared.without_file()))
    }

    /// The memory's file, to be passed to direct clients.
    #[must_use]
    pub fn file(&self) -> &File {
        self.0.file()
    }

    pub(crate) fn shared(&self) -> &SharedSegment {
        &self.0
    }

    fn closed_count(&self) -> &AtomicU64 {
        step("guests closed");
        self.0.word(CLOSED_AT)
    }

    /// The generation of the lease that is valid for direct clients; 0: none.
    #[inline]
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.0.word(GENERATION_AT).load(Ordering::SeqCst)
    }

    /// The reason for which direct clients have no access; none if they have it, or if it is
    /// not known yet.
    #[must_use]
    pub fn disabled_reason(&self) -> Option<DirectDisabledReason> {
        let code = self.0.word(DISABLED_REASON_AT).load(Ordering::Relaxed);
        DirectDisabledReason::ALL
            .into_iter()
            .find(|it| *it as u64 == code)
    }

    pub(crate) fn set_disabled_reason(&self, hindrance: Option<DirectDisabledReason>) {
        let code = hindrance.map_or(0, |it| it as u64);
        self.0
            .word(DISABLED_REASON_AT)
            .store(code, Ordering::Relaxed);
    }

    pub(super) fn set_generation(&self, generation: u64) {
        self.0
            .word(GENERATION_AT)
            .store(generation, Ordering::SeqCst);
    }

    /// Whether any party blocks direct access.
    #[inline]
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed_count().load(Ordering::SeqCst) != 0
    }

    /// Blocks new operations of direct clients until [`DirectSegment::reopen`]. Operations in
    /// progress go on: see [`DirectSegment::is_idle`].
    pub fn close(&self) {
        self.closed_count().fetch_add(1, Ordering::SeqCst);
    }

    /// Ends one [`DirectSegment::close`]. Access stays blocked while another party blocks it.
    pub fn reopen(&self) {
        let before = self.closed_count().fetch_sub(1, Ordering::SeqCst);
        debug_assert!(before > 0, "it was closed");
    }

    /// Counts that a process with direct threads opened a file of the mount past its preload
    /// library.
    pub fn record_untracked_open(&self) {
        self.0
            .word(UNTRACKED_OPENS_AT)
            .fetch_add(1, Ordering::SeqCst);
    }

    /// How often a process with direct threads opened a file past its preload library.
    #[inline]
    #[must_use]
    pub fn untracked_opens(&self) -> u64 {
        self.0.word(UNTRACKED_OPENS_AT).load(Ordering::SeqCst)
    }

    /// The number of a new operation of a direct client, or of the volume.
    #[inline]
    pub fn next_op(&self) -> u64 {
        self.last_op().fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The epoch of an operation under a lease of this epoch. The caller holds the lock words of its
    /// pages. It waits while a snapshot is held, some milliseconds and at most [`HOLD_LIMIT`].
    #[inline]
    #[must_use]
    pub fn stamp_epoch(&self, lease: Epoch) -> Epoch {
        match self.try_stamp_epoch(lease) {
            Some(epoch) => epoch,
            None => self.await_release(lease),
        }
    }

    #[inline]
    fn try_stamp_epoch(&self, lease: Epoch) -> Option<Epoch> {
        step("stamp epoch");
        stamp_by(self.0.word(STAMP_AT).load(Ordering::SeqCst), lease)
    }

    /// Waits for the release of a held snapshot. After [`HOLD_LIMIT`] it releases the snapshot itself: its controller
    /// may be dead. The controller finds that out, and the snapshot fails.
    #[cold]
    fn await_release(&self, lease: Epoch) -> Epoch {
        let began = Instant::now();
        loop {
            if let Some(epoch) = self.try_stamp_epoch(lease) {
                return epoch;
            }
            match began.elapsed() < HOLD_LIMIT {
                true => std::thread::sleep(HOLD_POLL),
                false => _ = self.release_stamps(),
            }
        }
    }

    /// Releases a held snapshot; true if it was held until now.
    pub(crate) fn release_stamps(&self) -> bool {
        step("stamp epoch");
        release(self.0.word(STAMP_AT))
    }

    /// Epoch and number of a new operation of a direct client under a lease of this epoch. The caller
    /// holds the lock words of its pages.
    #[inline]
    pub fn next_stamp(&self, lease: Epoch) -> (Epoch, u64) {
        (self.stamp_epoch(lease), self.next_op())
    }

    /// Raises the word of the stamps; see [`crate::stamp_epoch`].
    pub(crate) fn raise_stamp_word(&self, word: u64) {
        self.0.word(STAMP_AT).fetch_max(word, Ordering::SeqCst);
    }

    /// Fetches the line of the operation numbers for a coming write. Another core may have had
    /// it last.
    #[inline]
    pub fn prefetch_op(&self) {
        self.0.prefetch(OPS_AT);
    }

    pub(crate) fn last_op(&self) -> &AtomicU64 {
        self.0.word(OPS_AT)
    }

    /// The row of this number.
    ///
    /// # Panics
    /// When there is none of this number.
    #[inline]
    #[must_use]
    pub fn row(&self, number: usize) -> ClientRow<'_> {
        assert!(number < ROWS, "row {number} of {ROWS}");
        ClientRow {
            shared: &self.0,
            at: ROWS_AT + number * ROW_BYTES,
            runs_at: RUNS_AT + number * RUNS_MAX * 8,
        }
    }

    /// The rows with an operation in progress, with its range.
    pub fn active_ops(&self) -> impl Iterator<Item = (usize, FileRange)> + '_ {
        (0..ROWS).filter_map(|number| Some((number, self.row(number).active_range()?)))
    }

    /// Whether no direct client has an operation in progress.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.active_ops().next().is_none()
    }
}

impl<'s> ClientRow<'s> {
    #[inline]
    pub(crate) fn number(self) -> usize {
        (self.at - ROWS_AT) / ROW_BYTES
    }

    #[inline]
    fn word(self, index: usize) -> &'s AtomicU64 {
        self.shared.word(self.at + index * 8)
    }

    /// Runs before each access to the first word. Models have few rows.
    #[inline]
    fn model_step(self) {
        const NAMES: [&str; 3] = ["first row", "second row", "third row"];
        if let Some(name) = NAMES.get(self.number()) {
            step(name);
        }
    }

    /// Records the operation's range, and that it begins. The direct client checks its access
    /// after this.
    #[inline]
    pub fn begin_op(self, place: FileRange) {
        self.word(1).store(place.file, Ordering::Relaxed);
        self.claim().store(0, Ordering::Relaxed);
        self.word(5).store(0, Ordering::Relaxed);
        self.set_range(place.offset, place.len);
        let active = self.word(0).load(Ordering::Relaxed);
        self.model_step();
        self.word(0).swap(active | 1, Ordering::SeqCst);
    }

    /// The claim of the present record: its first slot in the ring plus one; see
    /// [`ReplicationRing`](crate::replication::ring::ReplicationRing).
    #[inline]
    pub fn claim(self) -> &'s AtomicU64 {
        self.word(4)
    }

    /// Moves the range of the operation in progress.
    #[inline]
    pub fn set_range(self, offset: u64, len: u64) {
        // If the client dies between these stores, the row shows an empty range or one of its
        // own.
        self.word(3).store(0, Ordering::Relaxed);
        self.word(2).store(offset, Ordering::Release);
        self.word(3).store(len, Ordering::Release);
    }

    /// Records that the operation in progress changes these pages atomically.
    ///
    /// # Panics
    /// When there are more than [`RUNS_MAX`].
    pub fn set_runs(self, runs: &[PageRun]) {
        assert!(runs.len() <= RUNS_MAX, "{} runs", runs.len());
        for (index, run) in runs.iter().enumerate() {
            let word = run.page.0 | run.count << RUN_COUNT_SHIFT;
            let at = self.runs_at + index * 8;
            self.shared.word(at).store(word, Ordering::Relaxed);
        }
        self.word(5).store(runs.len() as u64, Ordering::Release);
    }

    /// The runs that the operation changes atomically. If there are none, the operation is the
    /// range in [`ClientRow::active_range`]. A dead direct client may have written anything
    /// here.
    #[must_use]
    pub fn runs(self) -> Vec<PageRun> {
        let count = self.word(5).load(Ordering::Acquire).min(RUNS_MAX as u64);
        let words = (0..count as usize).map(|index| self.shared.word(self.runs_at + index * 8));
        let run = |word: u64| PageRun {
            page: PageNo(word & ((1 << RUN_COUNT_SHIFT) - 1)),
            count: word >> RUN_COUNT_SHIFT,
        };
        words
            .map(|word| run(word.load(Ordering::Relaxed)))
            .collect()
    }

    /// Marks the operation as ended.
    #[inline]
    pub fn end_op(self) {
        let active = self.word(0).load(Ordering::Relaxed);
        self.model_step();
        self.word(0).store((active | 1) + 1, Ordering::Release);
    }

    /// Counts the begins and ends of operations, which tells one operation from the next.
    #[must_use]
    pub fn op_sequence(self) -> u64 {
        self.model_step();
        self.word(0).load(Ordering::SeqCst)
    }

    /// The range of the operation in progress; none if the row is idle.
    #[must_use]
    pub fn active_range(self) -> Option<FileRange> {
        (self.op_sequence() % 2 == 1).then(|| FileRange {
            file: self.word(1).load(Ordering::Relaxed),
            len: self.word(3).load(Ordering::Acquire),
            offset: self.word(2).load(Ordering::Relaxed),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_and_claims_in_the_ring_have_words_of_their_own() {
        let segment = DirectSegment::create(7).expect("a segment");
        let layout = Epoch(3);
        assert_eq!(
            (segment.ring().tail(), segment.stamp_epoch(layout)),
            (0, layout)
        );
        assert_eq!(segment.ring().claim(segment.row(1), 2), 0);
        let stamps = crate::stamp_epoch::StampEpoch::default();
        stamps.cut(layout, Epoch(5));
        segment.raise_stamp_word(stamps.word());
        assert_eq!(
            (segment.ring().tail(), segment.stamp_epoch(layout)),
            (2, Epoch(5))
        );
        assert_eq!(segment.ring().claim(segment.row(1), 1), 2);
        assert_eq!(segment.stamp_epoch(layout), Epoch(5));
    }

    #[test]
    fn closed_segment_shows_active_rows() {
        let segment = DirectSegment::create(7).expect("a segment");
        assert_eq!(segment.next_op(), 8);
        let place = FileRange {
            file: 3,
            offset: 4096,
            len: 100,
        };
        assert!(segment.is_idle() && !segment.is_closed());
        segment.row(9).begin_op(place);
        segment.close();
        segment.close();
        assert_eq!(segment.active_ops().collect::<Vec<_>>(), [(9, place)]);
        segment.row(9).set_range(8192, 50);
        assert_eq!(
            segment.row(9).active_range().map(|it| it.offset),
            Some(8192)
        );
        assert!(segment.row(9).runs().is_empty());
        let run = |page, count| PageRun {
            page: PageNo(page),
            count,
        };
        let runs = [run(7, 2), run(1 << 40, 1)];
        segment.row(9).set_runs(&runs);
        assert_eq!(segment.row(9).runs(), runs);
        let inside = segment.row(9).op_sequence();
        segment.row(9).end_op();
        assert!(segment.is_idle() && segment.is_closed());
        segment.row(9).begin_op(place);
        assert_ne!(segment.row(9).op_sequence(), inside, "another operation");
        assert!(segment.row(9).runs().is_empty());
        segment.reopen();
        assert!(segment.is_closed());
        segment.reopen();
        assert!(!segment.is_closed());
    }

    #[test]
    fn foreign_file_is_refused_as_segment() {
        let other = SharedSegment::create(SEGMENT_BYTES).expect("memory");
        let copy = |shared: &SharedSegment| shared.file().try_clone().expect("a descriptor");
        assert!(DirectSegment::join(copy(&other)).is_err());
        let short = SharedSegment::create(PAGE_BYTES).expect("memory");
        assert!(DirectSegment::join(copy(&short)).is_err());
        let segment = DirectSegment::create(0).expect("a segment");
        let again = DirectSegment::join(segment.file().try_clone().expect("a descriptor"));
        let again = again.expect("the same");
        again.close();
        assert!(segment.is_closed());
        segment.0.half_word(VERSION_AT).store(9, Ordering::Relaxed);
        let newer = segment.file().try_clone().expect("a descriptor");
        assert!(DirectSegment::join(newer).is_err());
    }
}
