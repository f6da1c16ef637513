//! A second mapping of a medium that is only read.
//!
//! Invariants: an address in it is readable until the mapping is dropped, also after
//! [`ReadMapping::detach`]: then it shows zeroes. It is not inherited by fork.

use crate::map_error::MapError;
use crate::mapped_media::{MappedMedia, advise, map_shared, system, unmap};
use crate::media::{Media, check_range};
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

/// A read-only mapping of a medium, see the module.
pub struct ReadMapping {
    base: NonNull<u8>,
    len: usize,
    is_detached: AtomicBool,
}

// SAFETY: the mapping is plain memory that this process never stores to.
unsafe impl Send for ReadMapping {}
// SAFETY: as above; only addresses are given out.
unsafe impl Sync for ReadMapping {}

impl ReadMapping {
    /// Maps all of a medium.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn of(media: &MappedMedia) -> Result<ReadMapping, MapError> {
        let len = media.len_bytes();
        let base = map_shared(media.file(), len, libc::PROT_READ)
            .ok_or_else(|| system("map the file to read")(io::Error::last_os_error()))?;
        advise(base, len);
        Ok(ReadMapping {
            base,
            len,
            is_detached: AtomicBool::new(false),
        })
    }

    /// The address of a range. Other threads and processes may change the bytes at any time.
    ///
    /// # Panics
    /// When the range is beyond the end.
    #[must_use]
    pub fn at(&self, offset: usize, len: usize) -> NonNull<u8> {
        check_range(self.len, offset, len, 1);
        // SAFETY: in range of our own mapping.
        unsafe { self.base.add(offset) }
    }

    /// Unmaps the medium: all addresses show zeroes from now on.
    ///
    /// # Errors
    /// When the system refuses; the medium is then still mapped.
    pub fn detach(&self) -> Result<(), MapError> {
        if self.is_detached.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: atomically replaces exactly our own mapping, which has no stores.
        let base = unsafe {
            let base = self.base.as_ptr().cast();
            libc::mmap(base, self.len, libc::PROT_READ, flags, -1, 0)
        };
        match base == libc::MAP_FAILED {
            true => Err(system("detach a mapping")(io::Error::last_os_error())),
            false => Ok(()),
        }
    }

    /// Whether it shows zeroes, or is about to.
    #[must_use]
    pub fn is_detached(&self) -> bool {
        self.is_detached.load(Ordering::Acquire)
    }
}

impl Drop for ReadMapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping; the caller must not use its addresses after the drop.
        unsafe { unmap(self.base, self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemesh_base::units::PAGE_BYTES;

    fn read_byte(at: NonNull<u8>) -> u8 {
        // SAFETY: in range of a live mapping.
        unsafe { at.as_ptr().read_volatile() }
    }

    #[test]
    fn stores_are_visible_until_detach() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(4 * PAGE_BYTES as u64).expect("room");
        let media = MappedMedia::new(file, 4 * PAGE_BYTES).expect("a mapping");
        let pane = ReadMapping::of(&media).expect("a second one");
        let at = pane.at(PAGE_BYTES, 8);
        assert_eq!(read_byte(at), 0);
        media.store(PAGE_BYTES, 0x0707_0707_0707_0707);
        assert_eq!(read_byte(at), 7);
        drop(media);
        assert_eq!(read_byte(at), 7);
        pane.detach().expect("memory");
        assert!(pane.is_detached());
        assert_eq!(read_byte(at), 0);
    }

    #[test]
    #[should_panic(expected = "do not fit")]
    fn address_beyond_end_panics() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(PAGE_BYTES as u64).expect("room");
        let media = MappedMedia::new(file, PAGE_BYTES).expect("a mapping");
        let pane = ReadMapping::of(&media).expect("a second one");
        let _ = pane.at(PAGE_BYTES - 1, 2);
    }
}
