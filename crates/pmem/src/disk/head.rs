//! The head of a device: the pages before its frames, in memory as a whole. Pages and offsets are of the device.
//!
//! Invariants: a page is loaded from the device before its first access. A store marks its page dirty after
//! it, and the writer takes the mark before it copies the page: a later store marks it again.

use super::memory::Memory;
use crate::map_error::MapError;
use pagemesh_base::poison::lock;
use pagemesh_base::units::PAGE_BYTES;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Locks of pages that are being loaded.
const LOAD_LOCKS: usize = 64;

/// Pages that are loaded at their first access. They reserve addresses for all pages, and memory for those that were
/// loaded and for a bit of each page.
pub(super) struct LoadedPages {
    pub(super) memory: Memory,
    /// A bit per page.
    loaded: Memory,
    loading: [Mutex<()>; LOAD_LOCKS],
}

impl LoadedPages {
    pub(super) fn new(len: usize) -> Result<LoadedPages, MapError> {
        Ok(LoadedPages {
            memory: Memory::new(len)?,
            loaded: Memory::new((len / PAGE_BYTES).div_ceil(64) * 8)?,
            loading: [const { Mutex::new(()) }; LOAD_LOCKS],
        })
    }

    /// The memory, after a load of each page of a range that was not loaded yet.
    #[inline]
    pub(super) fn loaded(
        &self,
        offset: usize,
        len: usize,
        load: impl Fn(usize, &mut [u8; PAGE_BYTES]),
    ) -> &Memory {
        let last = (offset + len.max(1) - 1) / PAGE_BYTES;
        for page in offset / PAGE_BYTES..=last {
            if !self.is_loaded(page) {
                self.load_page(page, &load);
            }
        }
        &self.memory
    }

    fn is_loaded(&self, page: usize) -> bool {
        let word = self.loaded.word(page / 64 * 8);
        word.load(Ordering::Acquire) >> (page % 64) & 1 == 1
    }

    /// Gives the memory back. The pages read as zeroes.
    pub(super) fn discard(&self) {
        self.memory.discard();
    }

    #[cold]
    fn load_page(&self, page: usize, load: &impl Fn(usize, &mut [u8; PAGE_BYTES])) {
        let _loading = lock(&self.loading[page % LOAD_LOCKS]);
        let (word, bit) = (self.loaded.word(page / 64 * 8), 1 << (page % 64));
        if word.load(Ordering::Acquire) & bit != 0 {
            return;
        }
        let mut bytes = [0; PAGE_BYTES];
        load(page, &mut bytes);
        self.memory.write(page * PAGE_BYTES, &bytes);
        word.fetch_or(bit, Ordering::Release);
    }
}

/// The resident pages of a device in the data view.
pub(super) struct Head {
    pages: LoadedPages,
    dirty: Vec<AtomicU64>,
}

impl Head {
    pub(super) fn new(len: usize) -> Result<Head, MapError> {
        Ok(Head {
            pages: LoadedPages::new(len)?,
            dirty: (0..(len / PAGE_BYTES).div_ceil(64))
                .map(|_| AtomicU64::new(0))
                .collect(),
        })
    }

    pub(super) fn len(&self) -> usize {
        self.pages.memory.len()
    }

    /// Gives the memory back.
    pub(super) fn discard(&self) {
        self.pages.discard();
    }

    /// The memory, with a range of it loaded.
    #[inline]
    pub(super) fn loaded(
        &self,
        offset: usize,
        len: usize,
        load: impl Fn(usize, &mut [u8; PAGE_BYTES]),
    ) -> &Memory {
        self.pages.loaded(offset, len, load)
    }

    /// Marks the pages of a range that was stored to.
    #[inline]
    pub(super) fn mark_dirty(&self, offset: usize, len: usize) {
        let last = (offset + len.max(1) - 1) / PAGE_BYTES;
        for page in offset / PAGE_BYTES..=last {
            // Always, not only if the mark is missing: the writer may take it at this moment, before it can
            // see the stores.
            self.dirty[page / 64].fetch_or(1 << (page % 64), Ordering::AcqRel);
        }
    }

    /// Whether a page is in memory, and the device should have the same bytes.
    pub(super) fn is_resident_clean(&self, page: usize) -> bool {
        let is_dirty = self.dirty[page / 64].load(Ordering::Acquire) >> (page % 64) & 1 == 1;
        self.pages.is_loaded(page) && !is_dirty
    }

    /// Takes the marks of all dirty pages, in rising order. `first` is added to their numbers.
    pub(super) fn take_dirty(&self, first: usize, into: &mut Vec<usize>) {
        for (number, word) in self.dirty.iter().enumerate() {
            if word.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut taken = word.swap(0, Ordering::AcqRel);
            while taken != 0 {
                into.push(first + number * 64 + taken.trailing_zeros() as usize);
                taken &= taken - 1;
            }
        }
    }

    /// Copies a page of the head for the writer.
    pub(super) fn copy_page(&self, page: usize, into: &mut [u8]) {
        self.pages.memory.read(page * PAGE_BYTES, into);
    }
}
