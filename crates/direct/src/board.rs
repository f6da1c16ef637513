//! What the guests of a file are told, in memory that they share with the mount.
//!
//! ```text
//!     0  magic 8, version 4
//!    64  closed 8 (how many keep guests away), outdated 8 (0: no), size 8, spans 8
//!   128  time of the last write, nanoseconds since 1970 (0: none)
//!  4096  the first page of each span, 8 bytes each
//! ```
//!
//! Invariants: everything but the time is changed by the mount alone, while guests are
//! away. The memory is as long as for the longest file, and costs what is used of it.

use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fs::{FILE_BYTES_MAX, Time, span_index};
use pagemesh_pmem::{MapError, Shared};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};

const MAGIC: u64 = u64::from_le_bytes(*b"pmboard\0");
const VERSION: u32 = 0;
const VERSION_AT: usize = 8;
const CLOSED_AT: usize = 64;
const OUTDATED_AT: usize = 72;
const SIZE_AT: usize = 80;
const SPANS_AT: usize = 88;
const WRITTEN_AT: usize = 128;
const PLACES_AT: usize = PAGE_BYTES;
const PAGE: u64 = PAGE_BYTES as u64;
/// Bytes of a board.
pub const BOARD_BYTES: usize = PLACES_AT + SPANS_MAX * 8;
/// One for each 2 MiB of the longest file, and some: whole pages of them.
const SPANS_MAX: usize = (FILE_BYTES_MAX >> 21) as usize + PAGE_BYTES / 8;
const NANOS: u64 = 1_000_000_000;

/// A file's board.
pub struct Board {
    shared: Shared,
    /// Which memory it is.
    id: Option<(u64, u64)>,
}

/// A part of a file that lies in one piece in the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Its first byte in the volume.
    pub offset: u64,
    /// How many.
    pub len: u64,
}

fn identity(file: &File) -> Option<(u64, u64)> {
    let found = file.metadata().ok()?;
    Some((found.dev(), found.ino()))
}

impl Board {
    /// Makes one that nobody may use yet.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn create() -> Result<Board, MapError> {
        let shared = Shared::create(BOARD_BYTES)?;
        shared.half(VERSION_AT).store(VERSION, Ordering::Relaxed);
        shared.word(OUTDATED_AT).store(1, Ordering::Relaxed);
        shared.word(0).store(MAGIC, Ordering::Release);
        let id = identity(shared.file());
        Ok(Board { shared, id })
    }

    /// Takes one that a mount made; it takes no descriptor.
    ///
    /// # Errors
    /// What about it is not as expected.
    pub fn join(file: File) -> Result<Board, String> {
        let id = identity(&file);
        let shared = Shared::open(file, BOARD_BYTES).map_err(|cause| cause.to_string())?;
        if shared.word(0).load(Ordering::Acquire) != MAGIC {
            return Err("it is no board".into());
        }
        if shared.half(VERSION_AT).load(Ordering::Relaxed) != VERSION {
            return Err("the board has another version; use the mount's".into());
        }
        Ok(Board {
            shared: shared.without_file(),
            id,
        })
    }

    /// Whether this is its memory.
    #[must_use]
    pub fn is_of(&self, memory: &File) -> bool {
        self.id.is_some() && self.id == identity(memory)
    }

    /// The memory's file, to be passed to guests.
    #[must_use]
    pub fn file(&self) -> &File {
        self.shared.file()
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        self.shared.word(at)
    }

    /// Keeps guests from beginning anything.
    pub fn close(&self) {
        self.word(CLOSED_AT).fetch_add(1, Ordering::SeqCst);
    }

    /// Lets guests in, but for others who keep them away.
    pub fn reopen(&self) {
        let before = self.word(CLOSED_AT).fetch_sub(1, Ordering::SeqCst);
        debug_assert!(before > 0, "it was closed");
    }

    /// What it says is not so any more.
    pub fn outdate(&self) {
        self.word(OUTDATED_AT).store(1, Ordering::SeqCst);
    }

    /// Whether it says how the file is. A guest that is inside may believe it.
    #[inline]
    #[must_use]
    pub fn is_outdated(&self) -> bool {
        self.word(OUTDATED_AT).load(Ordering::SeqCst) != 0
    }

    /// Whether anybody keeps guests away.
    #[inline]
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.word(CLOSED_AT).load(Ordering::SeqCst) != 0
    }

    /// Says how the file is, while guests are away.
    pub fn show(&self, size: u64, spans: &[u64]) {
        assert!(spans.len() <= SPANS_MAX, "{} spans", spans.len());
        for (index, &page) in spans.iter().enumerate() {
            self.word(PLACES_AT + index * 8)
                .store(page, Ordering::Relaxed);
        }
        self.word(SPANS_AT)
            .store(spans.len() as u64, Ordering::Relaxed);
        self.word(SIZE_AT).store(size, Ordering::Relaxed);
        self.word(OUTDATED_AT).store(0, Ordering::SeqCst);
    }

    /// Bytes of the file.
    #[inline]
    #[must_use]
    pub fn size(&self) -> u64 {
        self.word(SIZE_AT).load(Ordering::Relaxed)
    }

    /// Where bytes of the file lie, as many as lie in one piece from the first on; none:
    /// it does not say.
    #[inline]
    #[must_use]
    pub fn run(&self, offset: u64, len: u64) -> Option<Run> {
        let (page, within) = (offset / PAGE, offset % PAGE);
        let (index, in_span) = span_index(page);
        if index as u64 >= self.word(SPANS_AT).load(Ordering::Relaxed) || index >= SPANS_MAX {
            return None;
        }
        let first = self.word(PLACES_AT + index * 8).load(Ordering::Relaxed);
        let rest = pagemesh_fs::span_pages(index) - in_span;
        Some(Run {
            offset: (first + in_span).checked_mul(PAGE)? + within,
            len: len.min(rest * PAGE - within),
        })
    }

    /// Notes when a guest writes. Most find that it is there already.
    #[inline]
    pub fn note_written(&self, at_ns: u64) {
        let written = self.word(WRITTEN_AT);
        if written.load(Ordering::Relaxed) < at_ns {
            written.fetch_max(at_ns, Ordering::Relaxed);
        }
    }

    /// When a guest wrote last.
    #[must_use]
    pub fn written(&self) -> Option<Time> {
        let at = self.word(WRITTEN_AT).load(Ordering::Relaxed);
        (at != 0).then_some(Time {
            sec: (at / NANOS) as i64,
            nsec: (at % NANOS) as u32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_finds_what_the_mount_shows() {
        let board = Board::create().expect("a board");
        assert!(board.is_outdated());
        // Spans of 8, 8 and 16 pages.
        board.show(20 * PAGE, &[800, 400, 1600]);
        let guest = Board::join(board.file().try_clone().expect("a descriptor"));
        let guest = guest.expect("the same");
        assert!(!guest.is_outdated() && guest.size() == 20 * PAGE);
        let run = |offset, len| guest.run(offset, len).map(|run| (run.offset, run.len));
        assert_eq!(run(5, 10), Some((800 * PAGE + 5, 10)));
        assert_eq!(run(7 * PAGE, 3 * PAGE), Some((807 * PAGE, PAGE)));
        assert_eq!(run(9 * PAGE + 1, PAGE), Some((401 * PAGE + 1, PAGE)));
        assert_eq!(run(16 * PAGE, 99 * PAGE), Some((1600 * PAGE, 16 * PAGE)));
        assert_eq!(run(32 * PAGE, 1), None);
        guest.note_written(5 * NANOS + 7);
        guest.note_written(4 * NANOS);
        assert_eq!(board.written(), Some(Time { sec: 5, nsec: 7 }));
        board.close();
        assert!(guest.is_closed());
        board.outdate();
        board.reopen();
        assert!(!guest.is_closed() && guest.is_outdated());
    }
}
