//! Anonymous memory, accessed by words and pages as a mapped medium is.

use crate::copy;
use crate::map_error::MapError;
use crate::mapped_media::{exclude_from_core_dumps, system, unmap};
use crate::media::check_range;
use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::units::PAGE_BYTES;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// Zeroed memory of this process. Pages take memory from their first store on.
pub(super) struct Memory {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory, of which words are accessed atomically and bytes copied by instructions that
// tolerate concurrent stores. Users of bytes verify or lock them.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Reserves `len` bytes.
    ///
    /// # Errors
    /// When the system refuses.
    pub(super) fn new(len: usize) -> Result<Memory, MapError> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
        let base = match NonNull::new(base.cast::<u8>()) {
            Some(base) if base.as_ptr().cast() != libc::MAP_FAILED => base,
            _ => return Err(system("reserve memory")(io::Error::last_os_error())),
        };
        exclude_from_core_dumps(base.as_ptr().cast(), len);
        // SAFETY: our own mapping; the advice changes no bytes, and a child never uses it.
        unsafe { libc::madvise(base.as_ptr().cast(), len, libc::MADV_DONTFORK) };
        // The overlay is touched in single pages far apart: a huge page for each would be most of the pool.
        // SAFETY: as above.
        unsafe { libc::madvise(base.as_ptr().cast(), len, libc::MADV_NOHUGEPAGE) };
        Ok(Memory { base, len })
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Gives the memory back. It reads as zeroes until the next store.
    pub(super) fn discard(&self) {
        // SAFETY: our own mapping. Anonymous memory is replaced by zeroes, which readers of shared words must expect.
        let given =
            unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, libc::MADV_DONTNEED) };
        if given != 0 {
            tracing::warn!(cause = %io::Error::last_os_error(), "memory of a device is not given back");
        }
    }

    /// The address of a range, for a request to the kernel.
    pub(super) fn address(&self, offset: usize, len: usize) -> *mut u8 {
        check_range(self.len, offset, len, 1);
        // SAFETY: in range.
        unsafe { self.base.as_ptr().add(offset) }
    }

    pub(super) fn word(&self, offset: usize) -> &AtomicU64 {
        check_range(self.len, offset, 8, 8);
        // SAFETY: in range and aligned; the memory lives as long as `self`.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    pub(super) fn read(&self, offset: usize, into: &mut [u8]) {
        let from = self.address(offset, into.len());
        // SAFETY: in range, and `into` is other memory of this process.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }

    pub(super) fn write(&self, offset: usize, bytes: &[u8]) {
        let to = self.address(offset, bytes.len());
        // SAFETY: in range, and `bytes` are other memory of this process.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Copies a page of other memory in.
    pub(super) fn copy_page(&self, offset: usize, other: &Memory, from: usize) {
        assert!(
            !std::ptr::eq(self, other),
            "a page is copied to other memory"
        );
        let from = other.address(from, PAGE_BYTES);
        let to = self.address(offset, PAGE_BYTES);
        // SAFETY: both are in range, and of two mappings.
        unsafe { std::ptr::copy_nonoverlapping(from, to, PAGE_BYTES) };
    }

    /// Copies a page out, and returns the CRC32C of the copy.
    pub(super) fn read_page(&self, offset: usize, into: &mut [u8; PAGE_BYTES]) -> u32 {
        let from = self.address(offset, PAGE_BYTES);
        // SAFETY: in range, and `into` is other memory of this process.
        unsafe { copy::read_page(from, into) }
    }

    /// Copies a page in, and returns the checksums of the copy.
    pub(super) fn stream_page(&self, offset: usize, page: &[u8; PAGE_BYTES]) -> PageChecksums {
        check_range(self.len, offset, PAGE_BYTES, PAGE_BYTES);
        let to = self.address(offset, PAGE_BYTES);
        // SAFETY: in range and page-aligned; `page` is other memory.
        unsafe { copy::stream_page(&[to], page) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: our own mapping, and no reference into it outlives `self`.
        unsafe { unmap(self.base, self.len) };
    }
}
