//! What a volume shares with its guests: processes whose own threads read and overwrite
//! what lies in its legs (RFD 015). Volatile; offsets only, never pointers.
//!
//! ```text
//!     0  magic 8, version 4, rows 4
//!    64  generation 8 (0: nobody may), closed 8 (how many keep guests away), why nobody may 8,
//!        opens 8 (how often a process with guest threads opened a file past its preload library)
//!   128  number of the last operation 8           (every writer's shared line)
//!  4096  rows of 64 bytes:
//!     0  active 8 (odd inside of an operation), file 8, first byte 8, bytes 8,
//!    32  claim in the ring 8 (0: none),
//!        runs 8 (0: the operation is what the row says; else it is of so many runs as one)
//! 20480  runs of each row, 512 bytes: first page and number of pages, as one word each
//! ```
//!
//! The [`ring`](crate::ring) of what is on its way to a copy that follows lies behind.
//!
//! Invariants: a guest sets its row active, and only then looks whether it may; who keeps
//! guests away counts itself, and only then looks at rows. So one of the two sees the
//! other. A row has one writer at a time: the guest that was given it, and when that is
//! gone whoever cleans up behind it.

use crate::hub::guard;
use crate::ring;
use crate::steps::step;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::slice::{Run, SLICE_IO_BYTES_MAX};
use pagemesh_base::space::TRANSACTION_PAGES_MAX;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{MapError, Shared};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Threads of guests at the same time: more than a pool has sessions.
pub const ROWS: usize = 256;
/// Bytes of a segment.
pub const SEGMENT_BYTES: usize = ring::END_AT;
/// Runs of pages of one operation: each may be of one page.
pub const RUNS_MAX: usize = TRANSACTION_PAGES_MAX as usize;

const MAGIC: u64 = u64::from_le_bytes(*b"pmdirct\0");
const VERSION: u32 = 5;
const VERSION_AT: usize = 8;
const ROWS_NUMBER_AT: usize = 12;
const GENERATION_AT: usize = 64;
const CLOSED_AT: usize = 72;
const HINDRANCE_AT: usize = 80;
const OPENS_AT: usize = 88;
const OPS_AT: usize = 128;
const ROWS_AT: usize = PAGE_BYTES;
const ROW_BYTES: usize = 64;
const RUNS_AT: usize = ROWS_AT + ROWS * ROW_BYTES;
/// Where the runs of all rows end.
pub(crate) const RUNS_END_AT: usize = RUNS_AT + ROWS * RUNS_MAX * 8;
/// Where in a word the number of a run's pages lies, above the first page.
const COUNT_SHIFT: u32 = 48;
const _: () = assert!(SEGMENT_BYTES.is_multiple_of(PAGE_BYTES), "whole pages");

/// Why guests may do nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hindrance {
    /// The volume is fenced, or its legs are just changing.
    Busy = 1,
    /// A leg that is written is not in-sync.
    Legs = 2,
    /// A leg is reached over TCP.
    Tcp = 3,
    /// A pool buffers: it is of class `file-sync`.
    Buffers = 4,
    /// The volume has several columns.
    Columns = 5,
}

impl Hindrance {
    const ALL: [Hindrance; 5] = [
        Hindrance::Busy,
        Hindrance::Legs,
        Hindrance::Tcp,
        Hindrance::Buffers,
        Hindrance::Columns,
    ];
}

/// The shared memory.
pub struct Segment(Shared);

/// A guest thread's row.
#[derive(Clone, Copy)]
pub struct Row<'s> {
    shared: &'s Shared,
    at: usize,
    runs_at: usize,
}

/// What an operation is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The file, by a number that its mount knows.
    pub file: u64,
    /// The first byte of the volume.
    pub offset: u64,
    /// How many.
    pub len: u64,
}

/// Where a guest died inside of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wound {
    /// Each page may be changed or not.
    Bytes(Place),
    /// All pages are changed or none.
    Together {
        /// Of the file.
        file: u64,
        /// Pages of the volume.
        runs: Vec<Run>,
    },
}

impl Wound {
    /// Of the row of a dead guest, as far as it makes sense: what it said may be anything.
    #[must_use]
    pub fn of(row: Row<'_>) -> Option<Wound> {
        let place = row.place()?;
        let mut room = TRANSACTION_PAGES_MAX;
        let mut runs = row.runs();
        runs.retain_mut(|run| {
            run.count = run.count.min(room);
            room -= run.count;
            run.count > 0
        });
        if !runs.is_empty() {
            let file = place.file;
            return Some(Wound::Together { file, runs });
        }
        let len = place.len.min(u64::from(SLICE_IO_BYTES_MAX));
        let end = place.offset.checked_add(len + PAGE_BYTES as u64);
        end.map(|_| Wound::Bytes(Place { len, ..place }))
    }

    /// Of which file.
    #[must_use]
    pub fn file(&self) -> u64 {
        match self {
            Wound::Bytes(place) => place.file,
            Wound::Together { file, .. } => *file,
        }
    }
}

impl Segment {
    /// Makes one whose operations are numbered from here on.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn create(last_op: u64) -> Result<Segment, MapError> {
        let shared = Shared::create(SEGMENT_BYTES)?;
        shared.half(VERSION_AT).store(VERSION, Ordering::Relaxed);
        shared
            .half(ROWS_NUMBER_AT)
            .store(ROWS as u32, Ordering::Relaxed);
        shared.word(OPS_AT).store(last_op, Ordering::Relaxed);
        shared.word(0).store(MAGIC, Ordering::Release);
        Ok(Segment(shared))
    }

    /// Takes one that another process made; it takes no descriptor.
    ///
    /// # Errors
    /// What about it is not as expected.
    pub fn join(file: File) -> Result<Segment, String> {
        let shared = Shared::open(file, SEGMENT_BYTES).map_err(|cause| cause.to_string())?;
        let version = shared.half(VERSION_AT).load(Ordering::Relaxed);
        let rows = shared.half(ROWS_NUMBER_AT).load(Ordering::Relaxed);
        if shared.word(0).load(Ordering::Acquire) != MAGIC {
            return Err("it is no direct segment".into());
        }
        if (version, rows as usize) != (VERSION, ROWS) {
            return Err("the direct segment has another version; use the mount's".into());
        }
        Ok(Segment(shared.without_file()))
    }

    /// The memory's file, to be passed to guests.
    #[must_use]
    pub fn file(&self) -> &File {
        self.0.file()
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.0
    }

    fn closed(&self) -> &AtomicU64 {
        step("guests closed");
        self.0.word(CLOSED_AT)
    }

    /// The number of the picture that guests may work by; 0: none.
    #[inline]
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.0.word(GENERATION_AT).load(Ordering::SeqCst)
    }

    /// Why nobody may; none: guests may, or it is not known yet.
    #[must_use]
    pub fn hindrance(&self) -> Option<Hindrance> {
        let code = self.0.word(HINDRANCE_AT).load(Ordering::Relaxed);
        Hindrance::ALL.into_iter().find(|it| *it as u64 == code)
    }

    pub(crate) fn set_hindrance(&self, hindrance: Option<Hindrance>) {
        let code = hindrance.map_or(0, |it| it as u64);
        self.0.word(HINDRANCE_AT).store(code, Ordering::Relaxed);
    }

    fn set_generation(&self, generation: u64) {
        self.0
            .word(GENERATION_AT)
            .store(generation, Ordering::SeqCst);
    }

    /// Whether anybody keeps guests away.
    #[inline]
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed().load(Ordering::SeqCst) != 0
    }

    /// Keeps guests from beginning anything until [`Segment::reopen`]. Those that are
    /// inside go on: see [`Segment::is_quiet`].
    pub fn close(&self) {
        self.closed().fetch_add(1, Ordering::SeqCst);
    }

    /// Lets guests in, but for others who keep them away.
    pub fn reopen(&self) {
        let before = self.closed().fetch_sub(1, Ordering::SeqCst);
        debug_assert!(before > 0, "it was closed");
    }

    /// A process with guest threads opens a file of the mount past its preload library.
    pub fn note_open(&self) {
        self.0.word(OPENS_AT).fetch_add(1, Ordering::SeqCst);
    }

    /// How often a process with guest threads opened a file past its preload library.
    #[inline]
    #[must_use]
    pub fn opens(&self) -> u64 {
        self.0.word(OPENS_AT).load(Ordering::SeqCst)
    }

    /// The number of a new operation of a guest, or of the volume.
    #[inline]
    pub fn next_op(&self) -> u64 {
        self.ops().fetch_add(1, Ordering::Relaxed) + 1
    }

    /// A write will come: fetches the line of the numbers, which another core may have had last.
    #[inline]
    pub fn expect_op(&self) {
        self.0.prefetch(OPS_AT);
    }

    pub(crate) fn ops(&self) -> &AtomicU64 {
        self.0.word(OPS_AT)
    }

    /// A row.
    ///
    /// # Panics
    /// When there is none of this number.
    #[inline]
    #[must_use]
    pub fn row(&self, number: usize) -> Row<'_> {
        assert!(number < ROWS, "row {number} of {ROWS}");
        Row {
            shared: &self.0,
            at: ROWS_AT + number * ROW_BYTES,
            runs_at: RUNS_AT + number * RUNS_MAX * 8,
        }
    }

    /// Rows that are inside of an operation, with what it is about.
    pub fn active(&self) -> impl Iterator<Item = (usize, Place)> + '_ {
        (0..ROWS).filter_map(|number| Some((number, self.row(number).place()?)))
    }

    /// Whether no guest is inside of an operation.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.active().next().is_none()
    }
}

impl<'s> Row<'s> {
    #[inline]
    pub(crate) fn number(self) -> usize {
        (self.at - ROWS_AT) / ROW_BYTES
    }

    #[inline]
    fn word(self, index: usize) -> &'s AtomicU64 {
        self.shared.word(self.at + index * 8)
    }

    /// Before an access to the first word. Models have few rows.
    #[inline]
    fn step(self) {
        const NAMES: [&str; 3] = ["first row", "second row", "third row"];
        if let Some(name) = NAMES.get(self.number()) {
            step(name);
        }
    }

    /// Says what will be done next, and that it begins. The guest looks behind this
    /// whether it may.
    #[inline]
    pub fn enter(self, place: Place) {
        self.word(1).store(place.file, Ordering::Relaxed);
        self.claim().store(0, Ordering::Relaxed);
        self.word(5).store(0, Ordering::Relaxed);
        self.say(place.offset, place.len);
        let active = self.word(0).load(Ordering::Relaxed);
        self.step();
        self.word(0).swap(active | 1, Ordering::SeqCst);
    }

    /// The first place that the record at hand has in the ring, and one; see
    /// [`Ring`](crate::ring::Ring).
    #[inline]
    pub(crate) fn claim(self) -> &'s AtomicU64 {
        self.word(4)
    }

    /// Says where it goes on, inside of an operation.
    #[inline]
    pub fn say(self, offset: u64, len: u64) {
        // Of who dies in between there is nothing here, and no place but its own.
        self.word(3).store(0, Ordering::Relaxed);
        self.word(2).store(offset, Ordering::Release);
        self.word(3).store(len, Ordering::Release);
    }

    /// Says that it changes these pages as one, inside of an operation.
    ///
    /// # Panics
    /// When there are more than [`RUNS_MAX`].
    pub fn say_runs(self, runs: &[Run]) {
        assert!(runs.len() <= RUNS_MAX, "{} runs", runs.len());
        for (index, run) in runs.iter().enumerate() {
            let word = run.page.0 | run.count << COUNT_SHIFT;
            let at = self.runs_at + index * 8;
            self.shared.word(at).store(word, Ordering::Relaxed);
        }
        self.word(5).store(runs.len() as u64, Ordering::Release);
    }

    /// The runs that it changes as one; none: it is what [`Row::place`] says. What a dead
    /// guest said may be anything.
    #[must_use]
    pub fn runs(self) -> Vec<Run> {
        let count = self.word(5).load(Ordering::Acquire).min(RUNS_MAX as u64);
        let words = (0..count as usize).map(|index| self.shared.word(self.runs_at + index * 8));
        let run = |word: u64| Run {
            page: PageNo(word & ((1 << COUNT_SHIFT) - 1)),
            count: word >> COUNT_SHIFT,
        };
        words
            .map(|word| run(word.load(Ordering::Relaxed)))
            .collect()
    }

    /// The operation has ended.
    #[inline]
    pub fn leave(self) {
        let active = self.word(0).load(Ordering::Relaxed);
        self.step();
        self.word(0).store((active | 1) + 1, Ordering::Release);
    }

    /// How many operations it has begun and ended: what tells one from the next.
    #[must_use]
    pub fn active(self) -> u64 {
        self.step();
        self.word(0).load(Ordering::SeqCst)
    }

    /// What the operation that it is inside of is about.
    #[must_use]
    pub fn place(self) -> Option<Place> {
        (self.active() % 2 == 1).then(|| Place {
            file: self.word(1).load(Ordering::Relaxed),
            len: self.word(3).load(Ordering::Acquire),
            offset: self.word(2).load(Ordering::Relaxed),
        })
    }
}

/// A leg that a guest works on, and where its session comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seat {
    /// Whose pool.
    pub brick: BrickId,
    /// The slice in it.
    pub slice: SliceId,
    /// The brick's `map` socket.
    pub socket: PathBuf,
}

/// What a guest works by: all legs that are written, each in-sync and mapped. The last
/// is the one that is read: what it got of a guest that died, all before it got, too
/// (`store::session::write_numbered`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// It counts while the segment says this number.
    pub generation: u64,
    /// The epoch of its operations.
    pub epoch: Epoch,
    /// The legs.
    pub seats: Vec<Seat>,
}

/// The segment, and what guests may work by at the moment.
pub(crate) struct Guests {
    pub segment: Arc<Segment>,
    picture: Mutex<Option<Picture>>,
    /// Rows of guests that died inside of an operation, until it is cleaned up behind them.
    dead: Mutex<BTreeSet<usize>>,
}

impl Guests {
    pub(crate) fn new(last_op: u64) -> Result<Guests, MapError> {
        Ok(Guests {
            segment: Arc::new(Segment::create(last_op)?),
            picture: Mutex::default(),
            dead: Mutex::default(),
        })
    }

    /// A new view is shown: what guests had is over.
    pub(crate) fn withdraw(&self) {
        let mut picture = guard(&self.picture);
        self.segment.set_generation(0);
        *picture = None;
    }

    /// Guests may work by this. `followed`: a copy gets what they change later.
    pub(crate) fn offer(&self, offered: Picture, followed: bool) {
        let mut picture = guard(&self.picture);
        // Before anybody is let in.
        self.segment.set_hindrance(None);
        self.segment.ring().set_followed(followed);
        self.segment.set_generation(offered.generation);
        *picture = Some(offered);
    }

    pub(crate) fn picture(&self) -> Option<Picture> {
        guard(&self.picture).clone()
    }

    pub(crate) fn note_dead(&self, row: usize) {
        guard(&self.dead).insert(row);
    }

    /// It is cleaned up behind it.
    pub(crate) fn forget_dead(&self, row: usize) {
        guard(&self.dead).remove(&row);
    }

    pub(crate) fn is_dead(&self, row: usize) -> bool {
        guard(&self.dead).contains(&row)
    }

    /// Whether no guest that lives is inside of an operation on one of these files.
    pub(crate) fn are_quiet(&self, is_meant: impl Fn(u64) -> bool) -> bool {
        let mut active = self.segment.active();
        let is_dead = |row| self.is_dead(row) && !defect::is(Defect::SettlingAwaitsHeal);
        !active.any(|(number, place)| is_meant(place.file) && !is_dead(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_closes_sees_who_is_inside() {
        let segment = Segment::create(7).expect("a segment");
        assert_eq!(segment.next_op(), 8);
        let place = Place {
            file: 3,
            offset: 4096,
            len: 100,
        };
        assert!(segment.is_quiet() && !segment.is_closed());
        segment.row(9).enter(place);
        segment.close();
        segment.close();
        assert_eq!(segment.active().collect::<Vec<_>>(), [(9, place)]);
        segment.row(9).say(8192, 50);
        assert_eq!(segment.row(9).place().map(|it| it.offset), Some(8192));
        assert!(segment.row(9).runs().is_empty());
        let run = |page, count| Run {
            page: PageNo(page),
            count,
        };
        let runs = [run(7, 2), run(1 << 40, 1)];
        segment.row(9).say_runs(&runs);
        assert_eq!(segment.row(9).runs(), runs);
        let inside = segment.row(9).active();
        segment.row(9).leave();
        assert!(segment.is_quiet() && segment.is_closed());
        segment.row(9).enter(place);
        assert_ne!(segment.row(9).active(), inside, "another operation");
        assert!(segment.row(9).runs().is_empty());
        segment.reopen();
        assert!(segment.is_closed());
        segment.reopen();
        assert!(!segment.is_closed());
    }

    #[test]
    fn what_is_no_segment_is_refused() {
        let other = Shared::create(SEGMENT_BYTES).expect("memory");
        let copy = |shared: &Shared| shared.file().try_clone().expect("a descriptor");
        assert!(Segment::join(copy(&other)).is_err());
        let short = Shared::create(PAGE_BYTES).expect("memory");
        assert!(Segment::join(copy(&short)).is_err());
        let segment = Segment::create(0).expect("a segment");
        let again = Segment::join(segment.file().try_clone().expect("a descriptor"));
        let again = again.expect("the same");
        again.close();
        assert!(segment.is_closed());
        segment.0.half(VERSION_AT).store(9, Ordering::Relaxed);
        let newer = segment.file().try_clone().expect("a descriptor");
        assert!(Segment::join(newer).is_err());
    }
}
