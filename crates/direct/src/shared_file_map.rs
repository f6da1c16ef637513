//! What the guests of a file are told, in memory that they share with the mount.
//!
//! ```text
//!     0  magic 8, version 4
//!    64  closed 8 (how many keep guests away), outdated 8 (0: no), spans 8,
//!        closes 8 (how often a descriptor of the file was closed)
//!   128  time of the last write, nanoseconds since 1970; untold 8 (0: the mount has taken
//!        note of all writes)
//!   192  append lock 4 (the number of the row that holds it, and one; all bits: the mount), zero 4, end 8,
//!        reach 8 (behind the last page that may be written; 0: none was lent), nonce 8,
//!        torn 8 (0: no), turns 8 (how often the last page was written)
//!  4096  what the last page of the file has below the end
//!  8192  the first page of each span, 8 bytes each
//! ```
//!
//! Invariants: everything but time, untold, lock, end and last page is changed by the mount alone,
//! while guests are away. The mount counts closes at any time. End and last page are changed by who holds the lock: first the page. A guest
//! holds it inside of its row's operation only. The memory is as long as for the longest file,
//! and costs what is used of it.

use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fs::{AppendExtent, FILE_BYTES_MAX, TailWrite, Time, span_index};
use pagemesh_pmem::{MapError, SharedSegment};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const MAGIC: u64 = u64::from_le_bytes(*b"pmboard\0");
const VERSION: u32 = 3;
const VERSION_AT: usize = 8;
const CLOSED_AT: usize = 64;
const OUTDATED_AT: usize = 72;
const SPANS_AT: usize = 80;
const CLOSE_COUNT_AT: usize = 88;
const WRITE_TIME_AT: usize = 128;
const WRITE_UNREPORTED_AT: usize = 136;
const LOCK_AT: usize = 192;
const END_AT: usize = 200;
const APPEND_LIMIT_AT: usize = 208;
const NONCE_AT: usize = 216;
const TORN_AT: usize = 224;
const TAIL_WRITES_AT: usize = 232;
const TAIL_AT: usize = PAGE_BYTES;
const SPAN_STARTS_AT: usize = 2 * PAGE_BYTES;
/// The mount holds the append lock.
const LOCKED_BY_MOUNT: u32 = u32::MAX;
/// Looks at a held append lock before the kernel does it: an append takes a microsecond or
/// two, and some may be before this one.
const SPINS: u32 = 4000;
const PAGE: u64 = PAGE_BYTES as u64;
/// Bytes of a board.
pub const FILE_MAP_BYTES: usize = SPAN_STARTS_AT + SPANS_MAX * 8;
/// One for each 2 MiB of the longest file, and some: whole pages of them.
const SPANS_MAX: usize = (FILE_BYTES_MAX >> 21) as usize + PAGE_BYTES / 8;
const NANOS: u64 = 1_000_000_000;

/// A file's board.
pub struct SharedFileMap {
    shared: SharedSegment,
    /// Which memory it is.
    id: Option<(u64, u64)>,
}

/// A part of a file that lies in one piece in the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileExtent {
    /// Its first byte in the volume.
    pub offset: u64,
    /// How many.
    pub len: u64,
}

/// The append lock of a file.
pub struct AppendGuard<'b>(&'b SharedFileMap);

impl AppendGuard<'_> {
    /// How often the last page was written: what tells it from any other of this growth.
    #[inline]
    #[must_use]
    pub fn tail_writes(&self) -> u64 {
        self.0.word(TAIL_WRITES_AT).load(Ordering::Relaxed)
    }

    /// Copies what the last page has below this end.
    #[inline]
    pub fn copy_tail(&self, end: u64, into: &mut [u8]) {
        let len = (end % PAGE) as usize;
        self.0.shared.get(TAIL_AT, &mut into[..len]);
    }

    /// These pages are in place on all legs: whoever looks sees them from now on. The first
    /// changed byte is one of the first page.
    #[inline]
    pub fn publish(&self, composed: TailWrite, pages: &[u8], changed: usize) {
        let last = composed.end / PAGE;
        let from = ((last - composed.first_page) * PAGE) as usize;
        let len = (composed.end % PAGE) as usize;
        // Another page is all new.
        let at = if from == 0 { changed / 8 * 8 } else { 0 };
        self.0.put_tail(at, &pages[from..from + len][at..]);
        let turns = self.tail_writes() + 1;
        self.0.word(TAIL_WRITES_AT).store(turns, Ordering::Relaxed);
        self.0.word(END_AT).store(composed.end, Ordering::Release);
    }
}

impl Drop for AppendGuard<'_> {
    fn drop(&mut self) {
        // Whoever panics with it is cleaned up behind as if dead: its end may be told no more.
        if !std::thread::panicking() {
            self.0.lock().store(0, Ordering::Release);
        }
    }
}

/// Which memory it is.
pub(crate) fn memory_id(file: &File) -> Option<(u64, u64)> {
    let found = file.metadata().ok()?;
    Some((found.dev(), found.ino()))
}

impl SharedFileMap {
    /// Makes one that nobody may use yet.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn create() -> Result<SharedFileMap, MapError> {
        let shared = SharedSegment::create(FILE_MAP_BYTES)?;
        shared
            .half_word(VERSION_AT)
            .store(VERSION, Ordering::Relaxed);
        shared.word(OUTDATED_AT).store(1, Ordering::Relaxed);
        shared.word(0).store(MAGIC, Ordering::Release);
        let id = memory_id(shared.file());
        Ok(SharedFileMap { shared, id })
    }

    /// Takes one that a mount made; it takes no descriptor.
    ///
    /// # Errors
    /// What about it is not as expected.
    pub fn join(file: File) -> Result<SharedFileMap, String> {
        let id = memory_id(&file);
        let shared =
            SharedSegment::open(file, FILE_MAP_BYTES).map_err(|cause| cause.to_string())?;
        if shared.word(0).load(Ordering::Acquire) != MAGIC {
            return Err("it is no board".into());
        }
        if shared.half_word(VERSION_AT).load(Ordering::Relaxed) != VERSION {
            return Err("the board has another version; use the mount's".into());
        }
        Ok(SharedFileMap {
            shared: shared.without_file(),
            id,
        })
    }

    /// Whether this is its memory.
    #[must_use]
    pub fn is_backed_by(&self, memory: &File) -> bool {
        self.id.is_some() && self.id == memory_id(memory)
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

    /// A descriptor of the file was closed.
    pub fn record_close(&self) {
        self.word(CLOSE_COUNT_AT).fetch_add(1, Ordering::SeqCst);
    }

    /// How often a descriptor of the file was closed.
    #[inline]
    #[must_use]
    pub fn close_count(&self) -> u64 {
        self.word(CLOSE_COUNT_AT).load(Ordering::SeqCst)
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
    pub fn publish(&self, size: u64, spans: &[u64]) {
        assert!(spans.len() <= SPANS_MAX, "{} spans", spans.len());
        for (index, &page) in spans.iter().enumerate() {
            self.word(SPAN_STARTS_AT + index * 8)
                .store(page, Ordering::Relaxed);
        }
        self.word(SPANS_AT)
            .store(spans.len() as u64, Ordering::Relaxed);
        for at in [TORN_AT, APPEND_LIMIT_AT, NONCE_AT, TAIL_WRITES_AT] {
            self.word(at).store(0, Ordering::Relaxed);
        }
        self.word(END_AT).store(size, Ordering::Relaxed);
        self.word(OUTDATED_AT).store(0, Ordering::SeqCst);
    }

    /// Bytes of the file.
    #[inline]
    #[must_use]
    pub fn size(&self) -> u64 {
        self.word(END_AT).load(Ordering::Acquire)
    }

    /// Lets guests make it longer, while they are away. `cached_tail` is what its last page has
    /// below the end.
    pub fn grant_append_space(&self, append_extent: AppendExtent, tail: &[u8]) {
        self.put_tail(0, tail);
        self.word(NONCE_AT)
            .store(append_extent.nonce, Ordering::Relaxed);
        self.word(APPEND_LIMIT_AT)
            .store(append_extent.limit_page, Ordering::SeqCst);
    }

    /// What was lent.
    #[inline]
    #[must_use]
    pub fn append_extent(&self) -> Option<AppendExtent> {
        let reach = self.word(APPEND_LIMIT_AT).load(Ordering::Relaxed);
        (reach != 0).then(|| AppendExtent {
            nonce: self.word(NONCE_AT).load(Ordering::Relaxed),
            limit_page: reach,
        })
    }

    /// Where guests to whom this was lent say that the file ends.
    #[must_use]
    pub fn append_end(&self, append_extent: AppendExtent) -> Option<u64> {
        let is_torn = self.word(TORN_AT).load(Ordering::SeqCst) != 0;
        (!is_torn && self.append_extent() == Some(append_extent)).then(|| self.size())
    }

    fn lock(&self) -> &AtomicU32 {
        self.shared.half_word(LOCK_AT)
    }

    /// Takes the append lock for a row, inside of its operation; none: others have it for
    /// long, or the board says nothing any more.
    #[inline]
    #[must_use]
    pub fn lock_append(&self, row: usize) -> Option<AppendGuard<'_>> {
        let lock = self.lock();
        let own = row as u32 + 1;
        for _ in 0..SPINS {
            let is_free = lock.load(Ordering::Relaxed) == 0;
            let take = || lock.compare_exchange(0, own, Ordering::Acquire, Ordering::Relaxed);
            if is_free && take().is_ok() {
                let guard = AppendGuard(self);
                // One may have died with it meanwhile.
                return (!self.is_outdated()).then_some(guard);
            }
            std::hint::spin_loop();
        }
        None
    }

    /// The mount takes the append lock, so that the end stays where it is; false: direct clients
    /// have it for long. Whatever they do without it goes on.
    #[must_use]
    pub fn lock_end(&self) -> bool {
        let take = || {
            let order = (Ordering::Acquire, Ordering::Relaxed);
            self.lock()
                .compare_exchange(0, LOCKED_BY_MOUNT, order.0, order.1)
        };
        (0..SPINS).any(|_| {
            let is_taken = take().is_ok();
            if !is_taken {
                std::hint::spin_loop();
            }
            is_taken
        })
    }

    /// The mount gives the append lock back.
    pub fn unlock_end(&self) {
        let order = (Ordering::Release, Ordering::Relaxed);
        let released = self
            .lock()
            .compare_exchange(LOCKED_BY_MOUNT, 0, order.0, order.1);
        debug_assert!(released.is_ok(), "the mount has it");
    }

    /// A guest is gone, and its legs are alike: if it had the append lock, end and last page
    /// say nothing any more. Its row is active yet.
    pub fn release_dead_lock(&self, row: usize) {
        let lock = self.lock();
        if lock.load(Ordering::Acquire) == row as u32 + 1 {
            self.word(TORN_AT).store(1, Ordering::SeqCst);
            self.outdate();
            lock.store(0, Ordering::Release);
        }
    }

    /// Puts bytes into the copy of the last page, from the word in which they begin.
    #[inline]
    fn put_tail(&self, at: usize, bytes: &[u8]) {
        debug_assert!(
            at.is_multiple_of(8) && at + bytes.len() <= PAGE_BYTES,
            "a page"
        );
        self.shared.put(TAIL_AT + at, bytes);
    }

    /// Where bytes of the file lie, as many as lie in one piece from the first on; none:
    /// it does not say.
    #[inline]
    #[must_use]
    pub fn extent(&self, offset: u64, len: u64) -> Option<FileExtent> {
        let (page, within) = (offset / PAGE, offset % PAGE);
        let (index, in_span) = span_index(page);
        if index as u64 >= self.word(SPANS_AT).load(Ordering::Relaxed) || index >= SPANS_MAX {
            return None;
        }
        let first = self
            .word(SPAN_STARTS_AT + index * 8)
            .load(Ordering::Relaxed);
        let rest = pagemesh_fs::span_pages(index) - in_span;
        Some(FileExtent {
            offset: (first + in_span).checked_mul(PAGE)? + within,
            len: len.min(rest * PAGE - within),
        })
    }

    /// Notes that a guest writes, and when, inside of its operation. Most find that it is
    /// there already. The mount may take note just then: whoever reads what it has the kernel
    /// forget waits for the operation.
    #[inline]
    pub fn record_write_time(&self, at_ns: u64) {
        let (written, untold) = (self.word(WRITE_TIME_AT), self.word(WRITE_UNREPORTED_AT));
        if untold.load(Ordering::Relaxed) == 0 {
            // The clock may have been set back.
            written.store(at_ns, Ordering::Relaxed);
            untold.store(1, Ordering::Release);
        } else if written.load(Ordering::Relaxed) < at_ns {
            written.fetch_max(at_ns, Ordering::Relaxed);
            // The mount may have taken note in between, of the time before.
            untold.store(1, Ordering::Release);
        }
    }

    /// When a guest wrote last, if nobody took note of it.
    fn unreported_write_time(&self) -> Option<Time> {
        let is_untold = self.word(WRITE_UNREPORTED_AT).load(Ordering::Acquire) != 0;
        is_untold.then(|| self.write_time())
    }

    /// The same, and takes note.
    #[must_use]
    pub fn take_write_time(&self) -> Option<Time> {
        // Most have nothing to tell, and their guests keep the line.
        self.unreported_write_time()?;
        let is_untold = self.word(WRITE_UNREPORTED_AT).swap(0, Ordering::AcqRel) != 0;
        is_untold.then(|| self.write_time())
    }

    fn write_time(&self) -> Time {
        let at = self.word(WRITE_TIME_AT).load(Ordering::Relaxed);
        Time {
            sec: (at / NANOS) as i64,
            nsec: (at % NANOS) as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn append(file_map: &SharedFileMap, append_extent: AppendExtent, data: &[u8]) {
        let guard = file_map.lock_append(1).expect("nobody has it");
        let end = file_map.size();
        let composed = TailWrite::plan(append_extent, end, end, data.len()).expect("room");
        let mut pages = [0xee; 2 * PAGE_BYTES];
        guard.copy_tail(end, &mut pages);
        composed.fill(append_extent, &mut pages, end, end, data);
        guard.publish(composed, &pages, (end % PAGE) as usize);
    }

    fn tail_of(file_map: &SharedFileMap) -> Vec<u8> {
        let guard = file_map.lock_append(1).expect("nobody has it");
        let mut page = [0; PAGE_BYTES];
        guard.copy_tail(file_map.size(), &mut page);
        page[..(file_map.size() % PAGE) as usize].to_vec()
    }

    #[test]
    fn end_locked_by_the_mount_cannot_be_moved() {
        let file_map = SharedFileMap::create().expect("a board");
        file_map.publish(100, &[800]);
        assert!(file_map.lock_end());
        assert!(file_map.lock_append(0).is_none());
        // The death of a client is none of the mount's.
        file_map.release_dead_lock(0);
        assert!(file_map.lock_append(0).is_none() && !file_map.is_outdated());
        file_map.unlock_end();
        let guard = file_map.lock_append(0).expect("nobody has it");
        assert!(!file_map.lock_end());
        drop(guard);
        assert!(file_map.lock_end());
    }

    #[test]
    fn client_reads_the_published_file_map() {
        let file_map = SharedFileMap::create().expect("a board");
        assert!(file_map.is_outdated());
        // Spans of 8, 8 and 16 pages.
        file_map.publish(20 * PAGE, &[800, 400, 1600]);
        let client = SharedFileMap::join(file_map.file().try_clone().expect("a descriptor"));
        let client = client.expect("the same");
        assert!(!client.is_outdated() && client.size() == 20 * PAGE);
        let extent = |offset, len| {
            client
                .extent(offset, len)
                .map(|extent| (extent.offset, extent.len))
        };
        assert_eq!(extent(5, 10), Some((800 * PAGE + 5, 10)));
        assert_eq!(extent(7 * PAGE, 3 * PAGE), Some((807 * PAGE, PAGE)));
        assert_eq!(extent(9 * PAGE + 1, PAGE), Some((401 * PAGE + 1, PAGE)));
        assert_eq!(extent(16 * PAGE, 99 * PAGE), Some((1600 * PAGE, 16 * PAGE)));
        assert_eq!(extent(32 * PAGE, 1), None);
        client.record_write_time(5 * NANOS + 7);
        client.record_write_time(4 * NANOS);
        assert_eq!(
            file_map.unreported_write_time(),
            Some(Time { sec: 5, nsec: 7 })
        );
        assert_eq!(file_map.take_write_time(), Some(Time { sec: 5, nsec: 7 }));
        assert_eq!(
            (file_map.unreported_write_time(), file_map.take_write_time()),
            (None, None)
        );
        // In the same tick, and with a clock that was set back.
        for at in [5 * NANOS + 7, 2 * NANOS] {
            client.record_write_time(at);
            assert!(file_map.unreported_write_time().is_some());
            let sec = (at / NANOS) as i64;
            assert_eq!(file_map.take_write_time().map(|time| time.sec), Some(sec));
        }
        // A part of the second page.
        let append_extent = AppendExtent {
            nonce: 7,
            limit_page: 8,
        };
        file_map.publish(5000, &[800]);
        file_map.grant_append_space(append_extent, &[3; 904]);
        assert_eq!(
            (client.append_extent(), file_map.append_end(append_extent)),
            (Some(append_extent), Some(5000))
        );
        assert_eq!(
            file_map.append_end(AppendExtent {
                nonce: 8,
                limit_page: 8
            }),
            None
        );
        append(&client, append_extent, &[4; 100]);
        assert_eq!(tail_of(&client), [[3; 904].as_slice(), &[4; 100]].concat());
        append(&client, append_extent, &[5; 3100]);
        assert_eq!(
            (file_map.append_end(append_extent), tail_of(&client).len()),
            (Some(8200), 8)
        );
        // One dies with the lock.
        std::mem::forget(client.lock_append(9));
        assert!(client.lock_append(8).is_none());
        file_map.release_dead_lock(8);
        assert!(client.lock_append(8).is_none() && !client.is_outdated());
        file_map.release_dead_lock(9);
        assert!(client.lock_append(8).is_none() && client.is_outdated());
        assert_eq!(file_map.append_end(append_extent), None);
        file_map.close();
        assert!(client.is_closed());
        file_map.outdate();
        file_map.reopen();
        assert!(!client.is_closed() && client.is_outdated());
    }
}
