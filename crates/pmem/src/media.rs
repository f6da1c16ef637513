//! The trait that mapped memory and the crash recorder implement.

use crate::async_io::AsyncIo;
use crate::disk_figures::{DiskFigures, ResidentCheck};
use crate::map_error::MapError;
use pagemesh_base::checksum::{PageChecksums, crc32c};
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use std::fs::File;
use std::ops::Range;

/// A file or block device that joins a medium.
#[derive(Debug)]
pub struct NewDevice {
    /// The open file. Its lock (flock(2)) lasts until the device is detached and its requests have ended.
    pub file: File,
    /// Its bytes in the medium, whole pages, behind those of every device that has not left.
    pub bytes: Range<usize>,
    /// Bytes at its start that stay in memory: all before its frames.
    pub head_len: usize,
    /// Bytes of them, from its start on, that may leave memory as frames do: the frame table, which grows with the device.
    pub frame_table: Range<usize>,
}

/// Stores that the next fence of this thread makes persistent.
#[must_use = "streamed or flushed bytes are not persistent before a fence"]
#[derive(Debug)]
pub struct UnfencedStores(pub(crate) ());

impl UnfencedStores {
    /// Combines both obligations into one: a fence covers all stores before it.
    pub fn and(self, _other: UnfencedStores) -> UnfencedStores {
        self
    }

    /// Adds this obligation to an earlier one, if there is one.
    pub fn after(self, earlier: Option<UnfencedStores>) -> UnfencedStores {
        match earlier {
            Some(earlier) => earlier.and(self),
            None => self,
        }
    }
}

/// Proof that a fence followed the stores that it was made from.
#[derive(Debug)]
pub struct FenceProof(pub(crate) ());

/// Byte-addressable persistent memory. Offsets are bytes from its start.
///
/// # Panics
/// Every method panics when an offset is out of range or not aligned as documented: callers check
/// numbers read from media before they use them.
pub trait Media {
    /// Length in bytes, a multiple of [`PAGE_BYTES`].
    fn len_bytes(&self) -> usize;

    /// Copies bytes out. Bytes that another thread stores meanwhile may be
    /// torn; the caller verifies the copy.
    fn read(&self, offset: usize, into: &mut [u8]);

    /// Copies a page out, and returns the CRC32C of the copy.
    fn read_page(&self, offset: usize, into: &mut [u8; PAGE_BYTES]) -> u32 {
        self.read(offset, into);
        crc32c(into)
    }

    /// Loads an aligned word with acquire ordering.
    fn load(&self, offset: usize) -> u64;

    /// Stores an aligned word; not flushed.
    fn store(&self, offset: usize, word: u64);

    /// Stores bytes anywhere; not flushed. A concurrent reader may find them torn, and no other
    /// thread may store to their words.
    fn write(&self, offset: usize, bytes: &[u8]) {
        let mut rest = bytes;
        let mut at = offset;
        while !rest.is_empty() {
            let within = at % 8;
            let (part, after) = rest.split_at(rest.len().min(8 - within));
            let mut word = self.load(at - within).to_le_bytes();
            word[within..within + part.len()].copy_from_slice(part);
            self.store(at - within, u64::from_le_bytes(word));
            at += part.len();
            rest = after;
        }
    }

    /// Tells the processor that the line will be stored to soon.
    fn prefetch(&self, _offset: usize) {}

    /// The same for every line that holds a byte of the range.
    fn prefetch_all(&self, _offset: usize, _len: usize) {}

    /// Tells the processor that the line will be loaded soon.
    fn prefetch_load(&self, _offset: usize) {}

    /// Lets the system map whole pages that will be stored to, all at once: without it the first store to each one
    /// interrupts the thread. Changes no byte, and may do nothing.
    fn prepare_stores(&self, _offset: usize, _len: usize) {}

    /// Swaps an aligned word if it is `old`, or returns its value. Not flushed.
    ///
    /// # Errors
    /// The value found, when it is not `old`.
    fn compare_exchange(&self, offset: usize, old: u64, new: u64) -> Result<(), u64>;

    /// Streams one line past the caches. The offset is line-aligned.
    fn stream_line(&self, offset: usize, line: &[u8; LINE_BYTES]) -> UnfencedStores;

    /// Streams one page to an offset of each medium and returns its checksums. Each source byte is
    /// loaded once, so the checksums match the stored bytes even if the source changes meanwhile.
    /// The offsets are page-aligned.
    fn stream_page(
        targets: &[(&Self, usize)],
        page: &[u8; PAGE_BYTES],
    ) -> (PageChecksums, UnfencedStores)
    where
        Self: Sized;

    /// Starts writing back every line that holds a byte of the range, where
    /// caches do not survive power loss (not for class `eadr`).
    fn flush(&self, offset: usize, len: usize) -> UnfencedStores;

    /// Waits until everything this thread streamed or flushed, on any medium
    /// of the same kind, is persistent (for class `process`: visible to every
    /// process).
    fn fence(&self, stores: UnfencedStores) -> FenceProof;

    /// Fences the stores of this thread to several media of one kind. Mapped memory needs one
    /// instruction for all of them.
    fn fence_each(media: &[&Self], stores: UnfencedStores) -> FenceProof
    where
        Self: Sized,
    {
        let fence = |media: &&Self| media.fence(UnfencedStores(()));
        let UnfencedStores(()) = stores;
        media
            .iter()
            .map(fence)
            .reduce(|_, last| last)
            .expect("a medium")
    }

    /// Tolerates unreadable pages from this offset on, where readers verify the bytes that they
    /// read: such a page, after a machine check or a bad sector, may read as
    /// [`PATTERN`](crate::unreadable::PATTERN). Before the offset, and on a store, an unreadable
    /// page ends the process.
    fn tolerate_unreadable(&self, _from: usize) {}

    /// Whether an access of this process has found the page of this byte unreadable.
    fn is_unreadable(&self, _offset: usize) -> bool {
        false
    }

    /// Tries to read the page of this aligned word.
    fn can_read(&self, offset: usize) -> bool {
        self.load(offset);
        !self.is_unreadable(offset)
    }

    /// The first bytes of all unreadable pages found.
    fn unreadable_pages(&self) -> Vec<usize> {
        Vec::new()
    }

    /// Whether a read of the page of this byte does not wait for a device.
    fn is_cached(&self, _offset: usize) -> bool {
        true
    }

    /// Loads the pages of these bytes that lie on a device and are not in memory, many at a time, so that reads of them do
    /// not wait one by one. It reports nothing: a page that cannot be read, or found no room, is loaded by its read.
    fn load_ahead(&self, _offsets: &[usize]) {}

    /// Whether the page of this byte lies on a device below, which [`AsyncIo::reload`](crate::AsyncIo::reload) reads.
    fn is_on_disk(&self, _offset: usize) -> bool {
        false
    }

    /// Whether a change does not wait for the medium to write earlier ones.
    fn has_room(&self) -> bool {
        true
    }

    /// The figures of the device below, if there is one.
    fn disk_figures(&self) -> Option<DiskFigures> {
        None
    }

    /// Compares bytes that stay in memory with the device below, from this offset on, and rewrites those that
    /// differ there. Does a step; without a device it does nothing.
    fn compare_resident(&self, _from: usize) -> ResidentCheck {
        ResidentCheck::default()
    }

    /// A new user of the medium's asynchronous requests. None: no page is ever missing, and a sync returns at
    /// once or blocks.
    ///
    /// # Errors
    /// When the system refuses.
    fn async_io(&self) -> Result<Option<Box<dyn AsyncIo>>, MapError> {
        Ok(None)
    }

    /// Extends the medium by a device. Views of the same medium reach there as well.
    ///
    /// # Errors
    /// When the device is too short or cannot be used, or the medium takes none.
    fn attach_device(&self, _device: NewDevice) -> Result<(), MapError> {
        Err(MapError::NoFurtherDevices)
    }

    /// Takes a device out of the medium and closes its file. Changes of it that were not written are dropped. Its bytes
    /// read as [`PATTERN`](crate::unreadable::PATTERN) from then on, and nothing may be stored there. The length of the
    /// medium does not change.
    ///
    /// # Errors
    /// When no device begins at the byte.
    fn detach_device(&self, _first_byte: usize) -> Result<(), MapError> {
        Err(MapError::NoFurtherDevices)
    }

    /// Lets a range of the medium be absent, because its device has failed. Its pages cannot be read: they have
    /// [`PATTERN`](crate::unreadable::PATTERN). Changes there are dropped. The medium becomes so long that it has the
    /// range. A device may take its place later.
    ///
    /// # Errors
    /// When the medium has no further devices.
    fn attach_absent(&self, _bytes: Range<usize>) -> Result<(), MapError> {
        Err(MapError::NoFurtherDevices)
    }

    /// The byte from which on stores are durable only after a sync, on a medium that keeps the order of fences before
    /// it: memory in front of disks. None on a medium of one kind.
    fn buffers_from(&self) -> Option<usize> {
        None
    }

    /// Makes all stores so far durable on media where a fence does not (`file-sync`). Blocks;
    /// concurrent calls share one flush. On other media it returns at once.
    ///
    /// # Errors
    /// Once it has failed, for ever: the durable state is then unknown.
    fn sync(&self) -> Result<(), MapError> {
        Ok(())
    }
}

/// Checks a range against a length; the only bounds check of the crate.
#[track_caller]
pub(crate) fn check_range(len: usize, offset: usize, count: usize, align: usize) {
    assert!(
        offset.is_multiple_of(align),
        "offset {offset} is not a multiple of {align}"
    );
    assert!(
        offset.checked_add(count).is_some_and(|end| end <= len),
        "{count} bytes at {offset} do not fit into {len}"
    );
}
