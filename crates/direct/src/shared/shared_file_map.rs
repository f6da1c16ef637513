//! The map of a file, in memory that the mount shares with the file's direct clients.
//!
//! ```text
//!     0  magic 8, version 4
//!    64  closed 8 (number of current reasons to bar direct access), outdated 8 (0: no),
//!        spans 8, closes 8 (how often a descriptor of the file was closed)
//!   128  time of the last write, nanoseconds since 1970; unreported 8 (0: the mount has
//!        recorded all writes)
//!   192  append lock 4 (number of the row that holds it, plus one; all bits: the mount),
//!        zero 4, end 8, append limit 8 (first page behind the append extent; 0: none was
//!        granted), nonce 8, torn 8 (0: no), tail writes 8 (how often the last page was
//!        written)
//!  4096  contents of the last page of the file below the end
//!  8192  the first page of each span, 8 bytes each
//! ```
//!
//! Invariants: the mount alone changes all fields except time, unreported, lock, end, last page and
//! tail writes, and only while no direct client is in an operation on the file. It counts closes at
//! any time. The holder of the lock changes the last page first, then the end. A client holds the
//! lock only inside of its row's operation. The memory is as long as for the longest file; it costs
//! only the part that is used.

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
/// Value of the append lock while the mount holds it.
const LOCKED_BY_MOUNT: u32 = u32::MAX;
/// Polls of a held append lock before the kernel does the append: an append takes a microsecond or
/// two, and several may be queued before this one.
const SPINS: u32 = 4000;
const PAGE: u64 = PAGE_BYTES as u64;
/// Bytes of a file map.
pub const FILE_MAP_BYTES: usize = SPAN_STARTS_AT + SPANS_MAX * 8;
/// One for each 2 MiB of the longest file, and some more: whole pages of them.
const SPANS_MAX: usize = (FILE_BYTES_MAX >> 21) as usize + PAGE_BYTES / 8;
const NANOS: u64 = 1_000_000_000;

/// The shared map of a file.
pub struct SharedFileMap {
    shared: SharedSegment,
    /// The identity of its memory.
    id: Option<(u64, u64)>,
}

/// A part of a file that is contiguous in the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileExtent {
    /// Its first byte in the volume.
    pub offset: u64,
    /// Its bytes.
    pub len: u64,
}

/// The append lock of a file.
pub struct AppendGuard<'b>(&'b SharedFileMap);

impl AppendGuard<'_> {
    /// How often the last page was written: it identifies a state of the last page within this
    /// append extent.
    #[inline]
    #[must_use]
    pub fn tail_writes(&self) -> u64 {
        self.0.word(TAIL_WRITES_AT).load(Ordering::Relaxed)
    }

    /// Copies the bytes of the last page below this end.
    #[inline]
    pub fn copy_tail(&self, end: u64, into: &mut [u8]) {
        let len = (end % PAGE) as usize;
        self.0.shared.get(TAIL_AT, &mut into[..len]);
    }

    /// Publishes pages that are written on all legs: readers see them from now on. The first
    /// changed byte is in the first page.
    #[inline]
    pub fn publish(&self, composed: TailWrite, pages: &[u8], changed: usize) {
        let last = composed.end / PAGE;
        let from = ((last - composed.first_page) * PAGE) as usize;
        let len = (composed.end % PAGE) as usize;
        // Another last page is all new.
        let at = if from == 0 { changed / 8 * 8 } else { 0 };
        self.0.put_tail(at, &pages[from..from + len][at..]);
        let writes = self.tail_writes() + 1;
        self.0.word(TAIL_WRITES_AT).store(writes, Ordering::Relaxed);
        self.0.word(END_AT).store(composed.end, Ordering::Release);
    }
}

impl Drop for AppendGuard<'_> {
    fn drop(&mut self) {
        // A client that panics with the lock is cleaned up as if it had died: its end may be wrong.
        if !std::thread::panicking() {
            self.0.lock().store(0, Ordering::Release);
        }
    }
}

/// The identity of a segment's memory: device and inode of its file.
pub(crate) fn memory_id(file: &File) -> Option<(u64, u64)> {
    let found = file.metadata().ok()?;
    Some((found.dev(), found.ino()))
}

impl SharedFileMap {
    /// Makes a map that no client may use yet.
    ///
    /// # Errors
    /// If the system refuses.
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

    /// Maps one that a mount made; it keeps no descriptor.
    ///
    /// # Errors
    /// The property that is not as expected.
    pub fn join(file: File) -> Result<SharedFileMap, String> {
        let id = memory_id(&file);
        let shared =
            SharedSegment::open(file, FILE_MAP_BYTES).map_err(|cause| cause.to_string())?;
        if shared.word(0).load(Ordering::Acquire) != MAGIC {
            return Err("the memory is not a file map".into());
        }
        if shared.half_word(VERSION_AT).load(Ordering::Relaxed) != VERSION {
            return Err(
                "the file map has another version; use the mount's version of pagemesh".into(),
            );
        }
        Ok(SharedFileMap {
            shared: shared.without_file(),
            id,
        })
    }

    /// Whether this file is its memory.
    #[must_use]
    pub fn is_backed_by(&self, memory: &File) -> bool {
        self.id.is_some() && self.id == memory_id(memory)
    }

    /// The memory's file, to be passed to direct clients.
    #[must_use]
    pub fn file(&self) -> &File {
        self.shared.file()
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        self.shared.word(at)
    }

    /// Bars direct clients from beginning operations on the file. Calls nest.
    pub fn close(&self) {
        self.word(CLOSED_AT).fetch_add(1, Ordering::SeqCst);
    }

    /// Ends one [`close`](SharedFileMap::close); other closes stay in force.
    pub fn reopen(&self) {
        let before = self.word(CLOSED_AT).fetch_sub(1, Ordering::SeqCst);
        debug_assert!(before > 0, "it was closed");
    }

    /// Marks the map as outdated.
    pub fn outdate(&self) {
        self.word(OUTDATED_AT).store(1, Ordering::SeqCst);
    }

    /// Counts that a descriptor of the file was closed.
    pub fn record_close(&self) {
        self.word(CLOSE_COUNT_AT).fetch_add(1, Ordering::SeqCst);
    }

    /// How often a descriptor of the file was closed.
    #[inline]
    #[must_use]
    pub fn close_count(&self) -> u64 {
        self.word(CLOSE_COUNT_AT).load(Ordering::SeqCst)
    }

    /// Whether the map is outdated. A client in an operation may rely on the answer until it
    /// leaves.
    #[inline]
    #[must_use]
    pub fn is_outdated(&self) -> bool {
        self.word(OUTDATED_AT).load(Ordering::SeqCst) != 0
    }

    /// Whether direct access to the file is closed.
    #[inline]
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.word(CLOSED_AT).load(Ordering::SeqCst) != 0
    }

    /// Publishes size and spans of the file, while no client is in an operation on it.
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

    /// Lets direct clients append, while none is in an operation on the file. `tail` is the
    /// contents of its last page below the end.
    pub fn grant_append_space(&self, append_extent: AppendExtent, tail: &[u8]) {
        self.put_tail(0, tail);
        self.word(NONCE_AT)
            .store(append_extent.nonce, Ordering::Relaxed);
        self.word(APPEND_LIMIT_AT)
            .store(append_extent.limit_page, Ordering::SeqCst);
    }

    /// The granted append extent.
    #[inline]
    #[must_use]
    pub fn append_extent(&self) -> Option<AppendExtent> {
        let limit_page = self.word(APPEND_LIMIT_AT).load(Ordering::Relaxed);
        (limit_page != 0).then(|| AppendExtent {
            nonce: self.word(NONCE_AT).load(Ordering::Relaxed),
            limit_page,
        })
    }

    /// The end of the file that clients of this append extent published. None: the extent is not
    /// the current one, or its end is torn.
    #[must_use]
    pub fn append_end(&self, append_extent: AppendExtent) -> Option<u64> {
        let is_torn = self.word(TORN_AT).load(Ordering::SeqCst) != 0;
        (!is_torn && self.append_extent() == Some(append_extent)).then(|| self.size())
    }

    fn lock(&self) -> &AtomicU32 {
        self.shared.half_word(LOCK_AT)
    }

    /// Takes the append lock for a row, inside of its operation. None: other clients hold it for
    /// long, or the map is outdated.
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
                // A holder may have died meanwhile.
                return (!self.is_outdated()).then_some(guard);
            }
            std::hint::spin_loop();
        }
        None
    }

    /// Takes the append lock for the mount, so that the end stays as it is. False: direct clients
    /// hold it for long. Their operations without the lock go on.
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

    /// Gives the mount's append lock back.
    pub fn unlock_end(&self) {
        let order = (Ordering::Release, Ordering::Relaxed);
        let released = self
            .lock()
            .compare_exchange(LOCKED_BY_MOUNT, 0, order.0, order.1);
        debug_assert!(released.is_ok(), "the mount has it");
    }

    /// Releases the append lock of a dead client, after its legs are reconciled. If it held the
    /// lock, end and last page are no longer valid. Its row is still active.
    pub fn release_dead_lock(&self, row: usize) {
        let lock = self.lock();
        if lock.load(Ordering::Acquire) == row as u32 + 1 {
            self.word(TORN_AT).store(1, Ordering::SeqCst);
            self.outdate();
            lock.store(0, Ordering::Release);
        }
    }

    /// Puts bytes into the copy of the last page, from a word boundary on.
    #[inline]
    fn put_tail(&self, at: usize, bytes: &[u8]) {
        debug_assert!(
            at.is_multiple_of(8) && at + bytes.len() <= PAGE_BYTES,
            "a page"
        );
        self.shared.put(TAIL_AT + at, bytes);
    }

    /// The place of a file's bytes in the volume, as many as are contiguous from the first on.
    /// None: the map does not cover it.
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

    /// Records the time of a client's write, inside of its operation. Most calls find the time
    /// recorded already. The mount may take the time at that moment: a process that reads
    /// attributes afresh waits for the operation.
    #[inline]
    pub fn record_write_time(&self, at_ns: u64) {
        let (written, unreported) = (self.word(WRITE_TIME_AT), self.word(WRITE_UNREPORTED_AT));
        if unreported.load(Ordering::Relaxed) == 0 {
            // The clock may have been set back.
            written.store(at_ns, Ordering::Relaxed);
            unreported.store(1, Ordering::Release);
        } else if written.load(Ordering::Relaxed) < at_ns {
            written.fetch_max(at_ns, Ordering::Relaxed);
            // The mount may have taken the earlier time in between.
            unreported.store(1, Ordering::Release);
        }
    }

    /// The time of the last direct write, if the mount has not taken it.
    fn unreported_write_time(&self) -> Option<Time> {
        let is_unreported = self.word(WRITE_UNREPORTED_AT).load(Ordering::Acquire) != 0;
        is_unreported.then(|| self.write_time())
    }

    /// The time of the last direct write, if the mount has not taken it yet; marks it as taken.
    #[must_use]
    pub fn take_write_time(&self) -> Option<Time> {
        // Most maps have nothing to report; a plain load leaves the cache line with their clients.
        self.unreported_write_time()?;
        let is_unreported = self.word(WRITE_UNREPORTED_AT).swap(0, Ordering::AcqRel) != 0;
        is_unreported.then(|| self.write_time())
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
        let guard = file_map.lock_append(1).expect("the lock is free");
        let end = file_map.size();
        let composed = TailWrite::plan(append_extent, end, end, data.len()).expect("room");
        let mut pages = [0xee; 2 * PAGE_BYTES];
        guard.copy_tail(end, &mut pages);
        composed.fill(append_extent, &mut pages, end, end, data);
        guard.publish(composed, &pages, (end % PAGE) as usize);
    }

    fn tail_of(file_map: &SharedFileMap) -> Vec<u8> {
        let guard = file_map.lock_append(1).expect("the lock is free");
        let mut page = [0; PAGE_BYTES];
        guard.copy_tail(file_map.size(), &mut page);
        page[..(file_map.size() % PAGE) as usize].to_vec()
    }

    #[test]
    fn end_locked_by_the_mount_cannot_be_moved() {
        let file_map = SharedFileMap::create().expect("a file map");
        file_map.publish(100, &[800]);
        assert!(file_map.lock_end());
        assert!(file_map.lock_append(0).is_none());
        // The mount's lock does not depend on the death of a client.
        file_map.release_dead_lock(0);
        assert!(file_map.lock_append(0).is_none() && !file_map.is_outdated());
        file_map.unlock_end();
        let guard = file_map.lock_append(0).expect("the lock is free");
        assert!(!file_map.lock_end());
        drop(guard);
        assert!(file_map.lock_end());
    }

    #[test]
    fn client_reads_the_published_file_map() {
        let file_map = SharedFileMap::create().expect("a file map");
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
        // A client dies with the lock.
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
