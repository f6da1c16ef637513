//! Pages that programs changed through memory mappings, buffered in memory.
//! [`crate::file::mmap_dirty`] says when they are flushed.

use crate::format::inode::{Ino, Time};
use crate::format::{PAGE, Page, page_count};
use crate::live::file_lock::FileLock;
use parking_lot::{MappedMutexGuard, MutexGuard};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// Buffered pages of all files of a file system: 256 MiB. Above it, the files with the most
/// buffered pages are flushed, synced or not.
pub const MMAP_DIRTY_PAGES_MAX: u64 = 1 << 16;
/// Limit for buffered pages while the volume has no room for them. It is below the pages of a redo
/// log ([`crate::file::redo_log`]), with a margin for the pages that the kernel sends at once.
pub const MMAP_DIRTY_PAGES_HARD_MAX: u64 = MMAP_DIRTY_PAGES_MAX / 2 * 3;
/// Age at which a buffered page is flushed. A machine failure loses no older page, as with other
/// file systems (Linux, `dirty_expire_centisecs`).
pub const MMAP_DIRTY_SECONDS_MAX: i64 = 30;

/// Buffered whole pages of one file, with zeroes behind its end.
#[derive(Default)]
pub(crate) struct MmapDirtyPages {
    pub(crate) pages: BTreeMap<u64, Arc<Page>>,
    /// Arrival of the first of them.
    pub(crate) dirty_since: Option<Time>,
    /// The kernel considers pages clean that this module refused: their content is lost.
    pub(crate) has_lost_pages: bool,
}

impl MmapDirtyPages {
    pub(crate) fn put(&mut self, page: u64, bytes: Arc<Page>, now: Time) {
        self.pages.insert(page, bytes);
        self.dirty_since.get_or_insert(now);
    }

    /// The pages are in the file now.
    pub(crate) fn mark_clean(&mut self) {
        self.pages.clear();
        self.dirty_since = None;
    }

    /// Copies written bytes into the buffered pages.
    fn overlay_write(&mut self, offset: u64, data: &[u8]) {
        let bytes = offset..offset + data.len() as u64;
        for (&page, held) in self.pages.range_mut(pages_overlapping(&bytes)) {
            let (within, at) = overlap_in_page(page, &bytes);
            Arc::make_mut(held)[within].copy_from_slice(&data[at]);
        }
    }

    /// Drops buffered pages within these bytes, and zeroes the parts of pages at the edges.
    pub(crate) fn discard_range(&mut self, bytes: Range<u64>) {
        let whole = page_count(bytes.start)..bytes.end / PAGE;
        self.pages.retain(|page, _| !whole.contains(page));
        if self.pages.is_empty() {
            self.dirty_since = None;
        }
        for (&page, held) in self.pages.range_mut(pages_overlapping(&bytes)) {
            let (within, _) = overlap_in_page(page, &bytes);
            Arc::make_mut(held)[within].fill(0);
        }
    }
}

/// Buffered pages by file.
#[derive(Default)]
pub(crate) struct MmapDirtyFiles {
    pub(crate) pages: BTreeMap<Ino, u64>,
    pub(crate) total_pages: u64,
    /// Files that are kept open for their buffered pages.
    pub(crate) kept_open: BTreeSet<Ino>,
}

impl MmapDirtyFiles {
    pub(crate) fn set(&mut self, ino: Ino, pages: u64) {
        let before = match pages {
            0 => self.pages.remove(&ino),
            pages => self.pages.insert(ino, pages),
        };
        self.total_pages = self.total_pages - before.unwrap_or(0) + pages;
    }

    pub(crate) fn contains(&self, ino: Ino) -> bool {
        self.pages.contains_key(&ino)
    }

    pub(crate) fn page_count(&self, ino: Ino) -> u64 {
        self.pages.get(&ino).copied().unwrap_or(0)
    }

    /// The files, those with the most buffered pages first.
    pub(crate) fn by_pages(&self) -> Vec<Ino> {
        let mut files: Vec<(u64, Ino)> = self
            .pages
            .iter()
            .map(|(&ino, &pages)| (pages, ino))
            .collect();
        files.sort_unstable_by(|one, other| other.cmp(one));
        files.into_iter().map(|(_, ino)| ino).collect()
    }
}

impl FileLock {
    /// The buffered pages, for a change.
    pub(crate) fn lock_mmap_dirty(&self) -> MappedMutexGuard<'_, MmapDirtyPages> {
        MutexGuard::map(self.mmap_dirty.lock(), |held| {
            &mut **held.get_or_insert_default()
        })
    }

    /// The buffered pages; `None` if the file never had any.
    pub(crate) fn lock_known_mmap_dirty(&self) -> Option<MappedMutexGuard<'_, MmapDirtyPages>> {
        MutexGuard::try_map(self.mmap_dirty.lock(), Option::as_deref_mut).ok()
    }

    /// The file was closed by every program that may have stored the refused pages.
    pub(crate) fn clear_lost_pages(&self) {
        if let Some(mut held) = self.lock_known_mmap_dirty() {
            held.has_lost_pages = false;
        }
    }

    /// Whether it has buffered pages.
    pub(crate) fn has_mmap_dirty(&self) -> bool {
        let held = self.lock_known_mmap_dirty();
        held.is_some_and(|held| !held.pages.is_empty())
    }

    /// Whether no stored page waits for a sync or was refused.
    pub(crate) fn has_nothing_to_sync(&self) -> bool {
        let held = self.lock_known_mmap_dirty();
        held.is_none_or(|held| held.pages.is_empty() && !held.has_lost_pages)
    }

    /// Overlays buffered pages on bytes that were read.
    pub(crate) fn overlay_mmap_dirty(&self, offset: u64, bytes: &mut [u8]) {
        let range = offset..offset + bytes.len() as u64;
        let Some(held) = self.lock_known_mmap_dirty() else {
            return;
        };
        for (&page, held) in held.pages.range(pages_overlapping(&range)) {
            let (within, at) = overlap_in_page(page, &range);
            bytes[at].copy_from_slice(&held[within]);
        }
    }

    /// Copies bytes that were written to the file into its buffered pages. The caller holds the
    /// file exclusively.
    pub(crate) fn patch_mmap_dirty(&self, offset: u64, data: &[u8]) {
        if let Some(mut held) = self.lock_known_mmap_dirty() {
            held.overlay_write(offset, data);
        }
    }
}

/// The pages that overlap these bytes.
fn pages_overlapping(bytes: &Range<u64>) -> Range<u64> {
    bytes.start / PAGE..page_count(bytes.end)
}

/// The overlap of a page with these bytes: range in the page, range in the bytes.
fn overlap_in_page(page: u64, bytes: &Range<u64>) -> (Range<usize>, Range<usize>) {
    let first = bytes.start.max(page * PAGE);
    let last = bytes.end.min((page + 1) * PAGE);
    let from = |base: u64| (first - base) as usize..(last - base) as usize;
    (from(page * PAGE), from(bytes.start))
}
