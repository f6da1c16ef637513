//! Pages that programs changed through memory mappings, buffered until they are synced (RFD 019).
//!
//! The kernel writes the dirty pages of a mapping back one by one, at times of its own choice. This
//! module buffers them until the file is synced, and then writes them as one change: after a crash
//! all of them are in the file, or none.
//!
//! - A read overlays the buffered pages on the file. A write goes to the file's pages at once, and
//!   into the buffered copies of them.
//! - All buffered pages of a file are flushed together: by a sync, by the last close, or when they
//!   are too old or too many.
//! - A file with buffered pages has no direct clients, and none of its spans becomes shared.

use crate::Fs;
use crate::direct::shared_file_map::FileLock;
use crate::error::{FsError, Result};
use crate::file::write::{ATOMIC_PAGES_MAX, PAGE, page_count, write_pages};
use crate::format::inode::{FILE_BYTES_MAX, Ino, Page, Time};
use crate::io::channel::IoChannel;
use crate::tree::page_map as map;
use bytes::Bytes;
use pagemesh_base::space::SpaceError;
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, MutexGuard, PoisonError};

/// Buffered pages of all files of a file system: 256 MiB. Above it, the files with the most
/// buffered pages are flushed, synced or not.
pub const MMAP_DIRTY_PAGES_MAX: u64 = 1 << 16;
/// Limit for buffered pages while the volume has no room for them. It is below the pages of a redo
/// log ([`crate::file::redo_log`]), with a margin for the pages that the kernel sends at once.
pub const MMAP_DIRTY_PAGES_HARD_MAX: u64 = MMAP_DIRTY_PAGES_MAX / 2 * 3;
/// Age at which a buffered page is flushed. A machine failure loses no older page, as with other
/// file systems (Linux, `dirty_expire_centisecs`).
pub const MMAP_DIRTY_SECONDS_MAX: i64 = 30;
const ATOMIC_PAGES: usize = ATOMIC_PAGES_MAX as usize;
/// Spans allocated in one transaction: each may need a map page of each level.
const SPANS_ALLOCATED_MAX: usize = 8;

/// Buffered whole pages of one file, with zeroes behind its end.
#[derive(Default)]
pub(crate) struct MmapDirtyPages {
    pages: BTreeMap<u64, Arc<Page>>,
    /// Arrival of the first of them.
    dirty_since: Option<Time>,
    /// The kernel considers pages clean that this module refused: their content is lost.
    has_lost_pages: bool,
}

/// Pages that are written to a file atomically, in order.
pub(crate) type NumberedPages = [(u64, Arc<Page>)];

impl MmapDirtyPages {
    fn put(&mut self, page: u64, bytes: Arc<Page>, now: Time) {
        self.pages.insert(page, bytes);
        self.dirty_since.get_or_insert(now);
    }

    /// The pages are in the file now.
    fn mark_clean(&mut self) {
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
    fn discard_range(&mut self, bytes: Range<u64>) {
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
    pages: BTreeMap<Ino, u64>,
    total_pages: u64,
    /// Files that are kept open for their buffered pages.
    kept_open: BTreeSet<Ino>,
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
    fn by_pages(&self) -> Vec<Ino> {
        let mut files: Vec<(u64, Ino)> = self
            .pages
            .iter()
            .map(|(&ino, &pages)| (pages, ino))
            .collect();
        files.sort_unstable_by(|one, other| other.cmp(one));
        files.into_iter().map(|(_, ino)| ino).collect()
    }
}

/// Whether a flush must be atomic.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum FlushMode {
    Atomic,
    /// In pieces if there is no room for all at once.
    Piecewise,
}

impl FileLock {
    fn lock_mmap_dirty(&self) -> MutexGuard<'_, MmapDirtyPages> {
        self.mmap_dirty
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The file was closed by every program that may have stored the refused pages.
    pub(crate) fn clear_lost_pages(&self) {
        self.lock_mmap_dirty().has_lost_pages = false;
    }

    /// Whether it has buffered pages.
    pub(crate) fn has_mmap_dirty(&self) -> bool {
        !self.lock_mmap_dirty().pages.is_empty()
    }

    /// Whether no stored page waits for a sync or was refused.
    pub(crate) fn has_nothing_to_sync(&self) -> bool {
        let held = self.lock_mmap_dirty();
        held.pages.is_empty() && !held.has_lost_pages
    }

    /// Overlays buffered pages on bytes that were read.
    pub(crate) fn overlay_mmap_dirty(&self, offset: u64, bytes: &mut [u8]) {
        let range = offset..offset + bytes.len() as u64;
        for (&page, held) in self
            .lock_mmap_dirty()
            .pages
            .range(pages_overlapping(&range))
        {
            let (within, at) = overlap_in_page(page, &range);
            bytes[at].copy_from_slice(&held[within]);
        }
    }

    /// Copies bytes that were written to the file into its buffered pages. The caller holds the
    /// file exclusively.
    pub(crate) fn patch_mmap_dirty(&self, offset: u64, data: &[u8]) {
        self.lock_mmap_dirty().overlay_write(offset, data);
    }
}

impl Fs {
    /// Buffers bytes that the kernel writes back from a mapping. Bytes beyond the end of the file
    /// are ignored.
    ///
    /// **Data loss:** refused bytes are lost. Every sync of the file fails with `EIO` until all
    /// programs have closed it.
    ///
    /// # Errors
    /// `EISDIR`, `EINVAL`, errors of the volume, and as [`Fs::sync`] if too much is buffered.
    pub fn buffer_mmap_write(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        offset: u64,
        data: &Bytes,
    ) -> Result<()> {
        let lock = self.file_lock(ino)?;
        let held = self.buffer_mmap_write_locked(channel, ino, &lock, offset, data);
        if let Err(cause) = &held {
            tracing::error!(ino = ino.0, %cause, "pages of a mapped file are lost");
            lock.lock_mmap_dirty().has_lost_pages = true;
        }
        held
    }

    fn buffer_mmap_write_locked(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        lock: &FileLock,
        offset: u64,
        data: &Bytes,
    ) -> Result<()> {
        if !lock.is_mmapped() {
            self.disable_direct_access(ino)?;
        }
        self.limit_mmap_dirty(channel, ino, page_count(data.len() as u64) + 1)?;
        let _alone = lock.write();
        // The end may be unpublished since direct access was disabled, for lack of room.
        self.with_reserve_fallback(|| self.complete_pending(channel, ino))?;
        let now = self.now();
        let size = self.inspect(|core| {
            core.check_running()?;
            let inode = core.regular_file(ino)?;
            core.record_write_time(ino, now);
            Ok(inode.size)
        })?;
        let end = (offset + data.len() as u64).min(size);
        let mut at = offset;
        let mut pages = Vec::new();
        while at < end {
            let page = at / PAGE;
            let (first, last) = (page * PAGE, ((page + 1) * PAGE).min(size));
            let to = end.min(last);
            let is_whole = at == first && to == last;
            let mut bytes = match is_whole {
                true => Box::new([0; PAGE_BYTES]),
                false => self.visible_page(channel, ino, lock, page)?,
            };
            let part = &data[(at - offset) as usize..(to - offset) as usize];
            bytes[(at - first) as usize..(to - first) as usize].copy_from_slice(part);
            pages.push((page, Arc::from(bytes)));
            at = last;
        }
        let is_first = !lock.has_mmap_dirty();
        for (page, bytes) in pages {
            lock.lock_mmap_dirty().put(page, bytes, now);
        }
        self.count_mmap_dirty(ino, lock);
        if is_first && lock.has_mmap_dirty() {
            self.notify_uncacheable(ino);
        }
        Ok(())
    }

    /// Fails if pages stored into mappings of the file were refused.
    pub(crate) fn check_lost_pages(&self, ino: Ino) -> Result<()> {
        let core = self.lock_core();
        let live = core.live_inodes.get(&ino);
        match live.is_some_and(|live| live.file_lock.lock_mmap_dirty().has_lost_pages) {
            true => Err(Errno::IO.into()),
            false => Ok(()),
        }
    }

    /// A page of a file as a reader sees it. The caller holds the file.
    fn visible_page(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        data: &FileLock,
        page: u64,
    ) -> Result<Box<Page>> {
        let mut bytes = Box::new([0; PAGE_BYTES]);
        let read = self.read_with_mmap_dirty(channel, ino, data, page * PAGE, PAGE_BYTES as u32)?;
        let read = read.unwrap_or_default();
        bytes[..read.len()].copy_from_slice(&read);
        Ok(bytes)
    }

    fn count_mmap_dirty(&self, ino: Ino, data: &FileLock) {
        let mut core = self.lock_core();
        let pages = data.lock_mmap_dirty().pages.len() as u64;
        core.mmap_dirty.set(ino, pages);
    }

    /// Flushes the files with the most buffered pages until `pages` more fit. Pages that cannot be
    /// flushed stay buffered up to a hard limit. Beyond that limit only files that cannot be
    /// flushed themselves are refused.
    fn limit_mmap_dirty(&self, channel: &mut IoChannel, ino: Ino, pages: u64) -> Result<()> {
        let has_room = |most| self.lock_core().mmap_dirty.total_pages + pages <= most;
        if has_room(MMAP_DIRTY_PAGES_MAX) {
            return Ok(());
        }
        let files = self.lock_core().mmap_dirty.by_pages();
        let mut own = Ok(());
        for file in files {
            tracing::debug!(
                ino = file.0,
                "a file is flushed before a sync: too many pages are buffered"
            );
            let put = self.flush_mmap_dirty_pinned(channel, file);
            if has_room(MMAP_DIRTY_PAGES_MAX) {
                return Ok(());
            }
            if file == ino {
                own = put;
            }
        }
        match has_room(MMAP_DIRTY_PAGES_HARD_MAX) {
            true => Ok(()),
            false => own,
        }
    }

    /// Flushes a file that may be unused by now. It is opened meanwhile, so that its number is not
    /// reused. Without room for all pages at once they go in pieces, because this is not a sync.
    fn flush_mmap_dirty_pinned(&self, channel: &mut IoChannel, ino: Ino) -> Result<()> {
        match self.open(ino) {
            Err(FsError::Posix(Errno::STALE)) => return Ok(()),
            opened => opened?,
        };
        let put = self.flush_mmap_dirty(channel, ino, FlushMode::Piecewise);
        self.release_with(ino, Some(channel));
        put
    }

    /// Drops the buffered bytes of this range. The caller holds the file exclusively.
    pub(crate) fn discard_mmap_dirty(&self, ino: Ino, data: &FileLock, bytes: Range<u64>) {
        if data.has_mmap_dirty() {
            data.lock_mmap_dirty().discard_range(bytes);
            self.count_mmap_dirty(ino, data);
        }
    }

    /// Writes all buffered pages of a file into it. With [`FlushMode::Atomic`] a crash leaves all
    /// of them or none.
    ///
    /// # Errors
    /// Errors of the volume. The pages stay buffered then.
    pub(crate) fn flush_mmap_dirty(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        how: FlushMode,
    ) -> Result<()> {
        let data = {
            let mut core = self.lock_core();
            let live = core.live_inodes.get(&ino);
            let data = live.map(|live| Arc::clone(&live.file_lock));
            let Some(data) = data.filter(|data| data.has_mmap_dirty()) else {
                core.mmap_dirty.set(ino, 0);
                return Ok(());
            };
            data
        };
        let _alone = data.write();
        self.flush_mmap_dirty_locked(channel, ino, &data, how)
    }

    fn flush_mmap_dirty_locked(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        data: &FileLock,
        how: FlushMode,
    ) -> Result<()> {
        self.complete_pending(channel, ino)?;
        let end = page_count(self.inspect(|core| core.regular_file(ino))?.size);
        let pages: Vec<(u64, Arc<Page>)> = {
            let held = data.lock_mmap_dirty();
            let within = held.pages.range(..end);
            within
                .map(|(&page, bytes)| (page, Arc::clone(bytes)))
                .collect()
        };
        for run in page_runs(&pages) {
            self.unshare(channel, ino, run)?;
        }
        self.ensure_spans(ino, pages.iter().map(|&(page, _)| page))?;
        let put = match pages.len() <= ATOMIC_PAGES {
            true => self.write_pages_atomic(channel, ino, &pages),
            false => self.write_through_redo_log(channel, ino, &pages),
        };
        match put {
            Err(error) if how == FlushMode::Piecewise && error.errno() == Errno::NOSPC => {
                // A log that the file names already must be applied before.
                self.apply_redo_log(channel, ino)?;
                pages
                    .chunks(ATOMIC_PAGES)
                    .try_for_each(|pages| self.write_pages_atomic(channel, ino, pages))?;
            }
            put => put?,
        }
        data.lock_mmap_dirty().mark_clean();
        self.lock_core().mmap_dirty.set(ino, 0);
        Ok(())
    }

    /// Writes pages into a file in one transaction. The caller holds the file exclusively, and the
    /// pages have spans of the file's own.
    pub(crate) fn write_pages_atomic(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        pages: &NumberedPages,
    ) -> Result<()> {
        let holes = self.holes_in_ranges(channel, ino, page_runs(pages))?;
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            for (page, bytes) in pages {
                let at = page * PAGE;
                let len = inode.size.saturating_sub(at).min(PAGE) as usize;
                write_pages(tx, &mut inode, at, &bytes[..len], &holes)?;
            }
            tx.make_durable();
            tx.put_inode(ino, &inode)
        })
    }

    /// Allocates missing spans, with holes in them, for these pages of a file. The caller holds the
    /// file exclusively.
    pub(crate) fn ensure_spans(&self, ino: Ino, pages: impl Iterator<Item = u64>) -> Result<()> {
        let mut missing = self.inspect(|core| {
            let inode = core.regular_file(ino)?;
            let mut missing = Vec::new();
            let mut known = 0;
            for page in pages {
                if page < known {
                    continue;
                }
                known = page + map::pages_to_next_span(page);
                if map::find(&inode.map, page, &mut |page| core.page(page))?.is_none() {
                    missing.push(page);
                }
            }
            Ok(missing)
        })?;
        while !missing.is_empty() {
            let left = missing.split_off(missing.len().min(SPANS_ALLOCATED_MAX));
            self.change(|tx| {
                let mut inode = tx.inode(ino)?;
                for &page in &missing {
                    map::find_or_allocate(tx, &mut inode, page)?;
                }
                tx.put_inode(ino, &inode)
            })?;
            missing = left;
        }
        Ok(())
    }

    /// Flushes all files; returns the first error.
    pub(crate) fn flush_all_mmap_dirty(&self, channel: &mut IoChannel) -> Result<()> {
        let all = self.lock_core().mmap_dirty.by_pages();
        self.flush_mmap_dirty_of(channel, all)
    }

    fn flush_mmap_dirty_of(&self, channel: &mut IoChannel, files: Vec<Ino>) -> Result<()> {
        let put = files
            .into_iter()
            .map(|ino| self.flush_mmap_dirty_pinned(channel, ino));
        put.fold(Ok(()), Result::and)
    }

    /// Flushes files with old buffered pages. Call it periodically.
    ///
    /// # Errors
    /// Errors of the volume.
    pub fn flush_old_mmap_dirty(&self) -> Result<()> {
        let now = self.now();
        // A clock may be set back.
        let is_old =
            |since: Time| now.sec - since.sec >= MMAP_DIRTY_SECONDS_MAX || now.sec < since.sec;
        let (kept, old) = {
            let core = self.lock_core();
            let kept = core.mmap_dirty.kept_open.clone();
            let since = |ino: &Ino| {
                core.live_inodes
                    .get(ino)?
                    .file_lock
                    .lock_mmap_dirty()
                    .dirty_since
            };
            let others = core
                .mmap_dirty
                .pages
                .keys()
                .filter(|ino| !kept.contains(ino));
            let old = others.filter(|ino| since(ino).is_some_and(is_old));
            let old: Vec<Ino> = old.copied().collect();
            (kept, old)
        };
        if kept.is_empty() && old.is_empty() {
            return Ok(());
        }
        let mut channel = self.borrow_channel()?;
        // Closing may keep the file open again.
        for ino in kept {
            self.lock_core().mmap_dirty.kept_open.remove(&ino);
            self.release_with(ino, Some(&mut channel));
        }
        self.flush_mmap_dirty_of(&mut channel, old)
    }

    /// Buffered pages of all files.
    #[must_use]
    pub fn mmap_dirty_pages(&self) -> u64 {
        self.lock_core().mmap_dirty.total_pages
    }

    /// Flushes a file before its last close, unless the file has no name. If no copy of the volume
    /// is reachable, the file is kept open until one is. Returns whether the caller should check
    /// the file again.
    pub(crate) fn flush_mmap_dirty_at_close(
        &self,
        ino: Ino,
        channel: Option<&mut IoChannel>,
    ) -> bool {
        let inode = self.inspect(|core| core.inode(ino));
        if inode.is_ok_and(|inode| inode.links == 0) {
            return false;
        }
        let put = self.with_channel(channel, |channel| {
            self.flush_mmap_dirty(channel, ino, FlushMode::Piecewise)
        });
        let Err(cause) = put else { return true };
        let data = {
            let mut core = self.lock_core();
            let core = &mut *core;
            let live = core
                .live_inodes
                .get_mut(&ino)
                .filter(|live| live.opens <= 1);
            if let Some(live) = live
                && is_transient(&cause)
            {
                tracing::warn!(ino = ino.0, %cause, "pages of a mapped file wait for the volume");
                live.opens += 1;
                core.mmap_dirty.kept_open.insert(ino);
                return false;
            }
            let live = core.live_inodes.get(&ino).filter(|live| live.opens <= 1);
            live.map(|live| Arc::clone(&live.file_lock))
        };
        if let Some(data) = data {
            tracing::error!(
                ino = ino.0, %cause,
                "unsynced pages of a mapped file are lost"
            );
            let _alone = data.write();
            self.discard_mmap_dirty(ino, &data, 0..FILE_BYTES_MAX);
        }
        false
    }
}

/// Whether the operation may succeed later without any action.
fn is_transient(cause: &FsError) -> bool {
    matches!(
        cause,
        FsError::Space(SpaceError::Unavailable(_) | SpaceError::Busy(_))
    )
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

/// Runs of consecutive pages.
pub(crate) fn page_runs(pages: &NumberedPages) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for &(page, _) in pages {
        match runs.last_mut() {
            Some(run) if run.end == page => run.end += 1,
            _ => runs.push(page..page + 1),
        }
    }
    runs
}
