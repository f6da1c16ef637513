//! A second mapping of a medium, through which bytes are seen and never changed.
//!
//! Invariants: whoever has an address in it can read there until it is dropped, also once
//! the medium is gone: then it shows zeroes. It is not inherited by fork.

use crate::mapped::{MapError, Mapped, advise, map_shared, system, unmap};
use crate::media::{Media, check_range};
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

/// See the module.
pub struct Pane {
    base: NonNull<u8>,
    len: usize,
    is_vacated: AtomicBool,
}

// SAFETY: the mapping is plain memory that this process never stores to.
unsafe impl Send for Pane {}
// SAFETY: as above; only addresses are given out.
unsafe impl Sync for Pane {}

impl Pane {
    /// Maps all of a medium.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn of(media: &Mapped) -> Result<Pane, MapError> {
        let len = media.len_bytes();
        let base = map_shared(media.file(), len, libc::PROT_READ)
            .ok_or_else(|| system("map the file to read")(io::Error::last_os_error()))?;
        advise(base, len);
        Ok(Pane {
            base,
            len,
            is_vacated: AtomicBool::new(false),
        })
    }

    /// Where bytes of the medium are seen. Others may change them at any time.
    ///
    /// # Panics
    /// When they are beyond the end.
    #[must_use]
    pub fn at(&self, offset: usize, len: usize) -> NonNull<u8> {
        check_range(self.len, offset, len, 1);
        // SAFETY: in range of our own mapping.
        unsafe { self.base.add(offset) }
    }

    /// Lets go of the medium: all addresses show zeroes from now on.
    ///
    /// # Errors
    /// When the system refuses; the medium is then still mapped.
    pub fn vacate(&self) -> Result<(), MapError> {
        if self.is_vacated.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: replaces exactly our own mapping, to which nobody stores, at once.
        let base = unsafe {
            let base = self.base.as_ptr().cast();
            libc::mmap(base, self.len, libc::PROT_READ, flags, -1, 0)
        };
        match base == libc::MAP_FAILED {
            true => Err(system("let go of a mapping")(io::Error::last_os_error())),
            false => Ok(()),
        }
    }

    /// Whether it shows zeroes, or is about to.
    #[must_use]
    pub fn is_vacated(&self) -> bool {
        self.is_vacated.load(Ordering::Acquire)
    }
}

impl Drop for Pane {
    fn drop(&mut self) {
        // SAFETY: our own mapping; addresses in it are given out for its life only.
        unsafe { unmap(self.base, self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemesh_base::units::PAGE_BYTES;

    fn seen(at: NonNull<u8>) -> u8 {
        // SAFETY: in range of a living pane.
        unsafe { at.as_ptr().read_volatile() }
    }

    #[test]
    fn what_is_stored_is_seen_until_it_is_let_go() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(4 * PAGE_BYTES as u64).expect("room");
        let media = Mapped::new(file, 4 * PAGE_BYTES).expect("a mapping");
        let pane = Pane::of(&media).expect("a second one");
        let at = pane.at(PAGE_BYTES, 8);
        assert_eq!(seen(at), 0);
        media.store(PAGE_BYTES, 0x0707_0707_0707_0707);
        assert_eq!(seen(at), 7);
        drop(media);
        assert_eq!(seen(at), 7);
        pane.vacate().expect("memory");
        assert!(pane.is_vacated());
        assert_eq!(seen(at), 0);
    }

    #[test]
    #[should_panic(expected = "do not fit")]
    fn nothing_is_seen_beyond_the_end() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(PAGE_BYTES as u64).expect("room");
        let media = Mapped::new(file, PAGE_BYTES).expect("a mapping");
        let pane = Pane::of(&media).expect("a second one");
        let _ = pane.at(PAGE_BYTES - 1, 2);
    }
}
