//! The head of a device: the pages before its frames, in memory as a whole. Pages and offsets are of the device.
//!
//! Invariants: a page is loaded from the device before its first access. A store marks its page dirty after
//! it, and the writer takes the mark before it copies the page: a later store marks it again.

use super::memory::Memory;
use crate::map_error::MapError;
use pagemesh_base::poison::lock;
use pagemesh_base::units::PAGE_BYTES;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Locks of runs of pages that are being loaded.
const LOAD_LOCKS: usize = 64;
/// Pages of a head that are loaded by one request. A head is mostly read in order: journals, bitmaps, tables.
const HEAD_RUN_PAGES: usize = 64;

/// Reads pages to load. Pages are of the device.
pub(super) trait LoadPages {
    /// Fills a page in any case. A page that cannot be read is reported.
    fn load(&self, page: usize, into: &mut [u8; PAGE_BYTES]);

    /// Reads a run of pages, and reports nothing. False: a part of it cannot be read.
    fn try_load_run(&self, first: usize, into: &mut [u8]) -> bool;
}

/// Single pages.
impl<F: Fn(usize, &mut [u8; PAGE_BYTES])> LoadPages for F {
    fn load(&self, page: usize, into: &mut [u8; PAGE_BYTES]) {
        self(page, into);
    }

    fn try_load_run(&self, _first: usize, _into: &mut [u8]) -> bool {
        false
    }
}

/// Pages that are loaded at their first access. They reserve addresses for all pages, and memory for those that were
/// loaded and for a bit of each page.
pub(super) struct LoadedPages {
    pub(super) memory: Memory,
    /// A bit per page.
    loaded: Memory,
    /// Pages that are loaded together, at multiples of their number.
    run_pages: usize,
    /// A run is loaded under its lock.
    loading: [Mutex<()>; LOAD_LOCKS],
}

impl LoadedPages {
    pub(super) fn new(len: usize, run_pages: usize) -> Result<LoadedPages, MapError> {
        Ok(LoadedPages {
            memory: Memory::new(len)?,
            loaded: Memory::new((len / PAGE_BYTES).div_ceil(64) * 8)?,
            run_pages,
            loading: [const { Mutex::new(()) }; LOAD_LOCKS],
        })
    }

    /// The memory, after a load of each page of a range that was not loaded yet.
    #[inline]
    pub(super) fn loaded(&self, offset: usize, len: usize, load: &impl LoadPages) -> &Memory {
        let last = (offset + len.max(1) - 1) / PAGE_BYTES;
        for page in offset / PAGE_BYTES..=last {
            if !self.is_loaded(page) {
                self.load_page(page, load);
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

    /// Loads a page, and by the same request those around it that are not loaded yet.
    #[cold]
    fn load_page(&self, page: usize, load: &impl LoadPages) {
        let _loading = lock(&self.loading[page / self.run_pages % LOAD_LOCKS]);
        if self.is_loaded(page) {
            return;
        }
        let run = self.unloaded_around(page);
        if run.len() > 1 && self.try_load(run.clone(), load) {
            return;
        }
        // Only this page is reported if it cannot be read: the others may never be needed.
        let mut bytes = [0; PAGE_BYTES];
        load.load(page, &mut bytes);
        self.memory.write(page * PAGE_BYTES, &bytes);
        self.mark_loaded(page..page + 1);
        for other in run.filter(|other| *other != page) {
            self.try_load(other..other + 1, load);
        }
    }

    /// The unloaded neighbours of an unloaded page in its run. The caller has the run's lock.
    fn unloaded_around(&self, page: usize) -> Range<usize> {
        let first = page / self.run_pages * self.run_pages;
        let end = (first + self.run_pages).min(self.memory.len() / PAGE_BYTES);
        let below = (first..page).rev().take_while(|it| !self.is_loaded(*it));
        let above = (page..end).take_while(|it| !self.is_loaded(*it));
        page - below.count()..page + above.count()
    }

    /// Loads unloaded pages by one request. The caller has their run's lock. False: they are still unloaded.
    fn try_load(&self, run: Range<usize>, load: &impl LoadPages) -> bool {
        let len = run.len() * PAGE_BYTES;
        let address = self.memory.address(run.start * PAGE_BYTES, len);
        // SAFETY: in range. Nobody else looks at pages that are not loaded, and the caller's lock keeps other loads away.
        let bytes = unsafe { std::slice::from_raw_parts_mut(address, len) };
        let is_done = load.try_load_run(run.start, bytes);
        if is_done {
            self.mark_loaded(run);
        }
        is_done
    }

    fn mark_loaded(&self, pages: Range<usize>) {
        for page in pages {
            let word = self.loaded.word(page / 64 * 8);
            word.fetch_or(1 << (page % 64), Ordering::Release);
        }
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
            pages: LoadedPages::new(len, HEAD_RUN_PAGES)?,
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
    pub(super) fn loaded(&self, offset: usize, len: usize, load: &impl LoadPages) -> &Memory {
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
    pub(super) fn read_page(&self, page: usize, into: &mut [u8; PAGE_BYTES]) {
        self.pages.memory.read(page * PAGE_BYTES, into);
    }

    /// The same into memory of a request.
    pub(super) fn copy_page(&self, page: usize, into: &Memory, at: usize) {
        into.copy_page(at, &self.pages.memory, page * PAGE_BYTES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    /// A device whose bytes are the numbers of their pages. Some pages cannot be read.
    #[derive(Default)]
    struct NumberedPages {
        unreadable: Vec<usize>,
        runs: RefCell<Vec<Range<usize>>>,
        reported: RefCell<Vec<usize>>,
    }

    impl LoadPages for NumberedPages {
        fn load(&self, page: usize, into: &mut [u8; PAGE_BYTES]) {
            self.reported.borrow_mut().push(page);
            into.fill(page as u8);
        }

        fn try_load_run(&self, first: usize, into: &mut [u8]) -> bool {
            let run = first..first + into.len() / PAGE_BYTES;
            self.runs.borrow_mut().push(run.clone());
            for (page, bytes) in run.clone().zip(into.chunks_mut(PAGE_BYTES)) {
                bytes.fill(page as u8);
            }
            !self.unreadable.iter().any(|page| run.contains(page))
        }
    }

    fn byte_of(head: &Head, page: usize, device: &NumberedPages) -> u8 {
        let mut byte = [0];
        let at = page * PAGE_BYTES + 9;
        head.loaded(at, 1, device).read(at, &mut byte);
        byte[0]
    }

    #[test]
    fn head_is_loaded_in_aligned_runs() {
        let head = Head::new(100 * PAGE_BYTES).expect("memory");
        let device = NumberedPages::default();
        for page in (0..100).rev() {
            assert_eq!(byte_of(&head, page, &device), page as u8);
        }
        assert_eq!(*device.runs.borrow(), [64..100, 0..64]);
        assert!(device.reported.borrow().is_empty());
    }

    #[test]
    fn unreadable_pages_of_a_run_are_loaded_alone() {
        let head = Head::new(64 * PAGE_BYTES).expect("memory");
        let mut device = NumberedPages {
            unreadable: vec![5, 9],
            ..NumberedPages::default()
        };
        assert_eq!(byte_of(&head, 20, &device), 20);
        // The page that was needed. The unreadable ones may never be.
        assert_eq!(*device.reported.borrow(), [20]);
        let stored = head.loaded(7 * PAGE_BYTES, PAGE_BYTES, &device);
        stored.write(7 * PAGE_BYTES, &[77; PAGE_BYTES]);
        device.unreadable.clear();
        device.runs.borrow_mut().clear();
        assert_eq!(byte_of(&head, 9, &device), 9);
        assert_eq!(byte_of(&head, 5, &device), 5);
        assert_eq!(*device.reported.borrow(), [20, 9, 5]);
        assert!(device.runs.borrow().is_empty());
        assert_eq!(byte_of(&head, 7, &device), 77, "a store is lost");
    }
}
