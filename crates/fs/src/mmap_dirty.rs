//! Pages that programs changed through mappings, held in memory until they are synced
//! (RFD 019).
//!
//! The kernel sends what was stored into a mapping of a file page by page, whenever it
//! likes. Here it waits until somebody syncs the file, and then goes into it as one
//! change: after a crash all of it is there, or none.
//!
//! - What is held is laid over what is read. What is written otherwise goes to the pages
//!   of the file at once, and into what is held of them.
//! - It goes into the file with a sync, when nobody has the file open any more, or when
//!   it is old, or too much; always all that is held of the file.
//! - A file of which something is held has no guests, and none of its spans begins to be
//!   shared.

use crate::Fs;
use crate::data::{ATOMIC_PAGES_MAX, PAGE, page_count, write_pages};
use crate::error::{FsError, Result};
use crate::format::{FILE_BYTES_MAX, Ino, Page, Time};
use crate::io::IoChannel;
use crate::map;
use crate::shared_file_map::FileLock;
use bytes::Bytes;
use pagemesh_base::space::SpaceError;
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, MutexGuard, PoisonError};

/// Pages that a file system holds of all files, 256 MiB: what comes then has the file with
/// the most of them changed, synced or not.
pub const MMAP_DIRTY_PAGES_MAX: u64 = 1 << 16;
/// Pages up to which more is held while there is no room to put it; less than a log may have
/// ([`crate::redo`]), by what the kernel sends at once.
pub const MMAP_DIRTY_PAGES_HARD_MAX: u64 = MMAP_DIRTY_PAGES_MAX / 2 * 3;
/// How long a page is held: what is lost with the machine is not older, as with other file
/// systems (Linux, `dirty_expire_centisecs`).
pub const MMAP_DIRTY_SECONDS_MAX: i64 = 30;
const ATOMIC_PAGES: usize = ATOMIC_PAGES_MAX as usize;
/// Spans that are taken in one transaction: each may need a map page of each level.
const SPANS_ALLOCATED_MAX: usize = 8;

/// Pages of one file, whole ones: zeroes behind its end.
#[derive(Default)]
pub(crate) struct MmapDirtyPages {
    pages: BTreeMap<u64, Arc<Page>>,
    /// When the first of them came.
    dirty_since: Option<Time>,
    /// The kernel was refused something, and takes it for written: it is gone.
    has_lost_pages: bool,
}

/// Pages that go into a file as one, in order.
pub(crate) type NumberedPages = [(u64, Arc<Page>)];

impl MmapDirtyPages {
    fn put(&mut self, page: u64, bytes: Arc<Page>, now: Time) {
        self.pages.insert(page, bytes);
        self.dirty_since.get_or_insert(now);
    }

    /// They are in the file.
    fn mark_clean(&mut self) {
        self.pages.clear();
        self.dirty_since = None;
    }

    /// Has the pages that are held show these bytes, too.
    fn overlay_write(&mut self, offset: u64, data: &[u8]) {
        let bytes = offset..offset + data.len() as u64;
        for (&page, held) in self.pages.range_mut(pages_overlapping(&bytes)) {
            let (within, at) = overlap_in_page(page, &bytes);
            Arc::make_mut(held)[within].copy_from_slice(&data[at]);
        }
    }

    /// Nothing of these bytes is held any more: they are zeroes.
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

/// How many pages are held of which files.
#[derive(Default)]
pub(crate) struct MmapDirtyFiles {
    pages: BTreeMap<Ino, u64>,
    total_pages: u64,
    /// Files that stay open for what is held of them.
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

    /// The files, those first of which most is held.
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

/// Whether what is held must go into a file as a whole.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum FlushMode {
    Atomic,
    /// In pieces, where there is no room for all at once.
    Piecewise,
}

impl FileLock {
    fn lock_mmap_dirty(&self) -> MutexGuard<'_, MmapDirtyPages> {
        self.mmap_dirty
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Nobody has it open any more who could have stored what was refused.
    pub(crate) fn clear_lost_pages(&self) {
        self.lock_mmap_dirty().has_lost_pages = false;
    }

    /// Whether something came from mappings of it and is in no page of it yet.
    pub(crate) fn has_mmap_dirty(&self) -> bool {
        !self.lock_mmap_dirty().pages.is_empty()
    }

    /// Whether nothing that was stored into mappings waits for a sync, or was refused.
    pub(crate) fn has_nothing_to_sync(&self) -> bool {
        let held = self.lock_mmap_dirty();
        held.pages.is_empty() && !held.has_lost_pages
    }

    /// Lays what is held over bytes that were read.
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

    /// Bytes were written to the file. The caller holds it alone.
    pub(crate) fn patch_mmap_dirty(&self, offset: u64, data: &[u8]) {
        self.lock_mmap_dirty().overlay_write(offset, data);
    }
}

impl Fs {
    /// Takes in what the kernel sends of a mapping. What lies beyond the end of the file
    /// is nothing. What is refused is lost, and syncs of the file say so until nobody has it
    /// open any more.
    ///
    /// # Errors
    /// `EISDIR`, `EINVAL`, what the volume says, and as [`Fs::sync`] where too much is held.
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
            tracing::error!(ino = ino.0, %cause, "what was stored into a mapping of a file is lost");
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
        // There may have been no room for its end when guests were barred.
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

    /// Whether all that was stored into mappings of a file came here.
    pub(crate) fn check_lost_pages(&self, ino: Ino) -> Result<()> {
        let core = self.lock_core();
        let live = core.live_inodes.get(&ino);
        match live.is_some_and(|live| live.file_lock.lock_mmap_dirty().has_lost_pages) {
            true => Err(Errno::IO.into()),
            false => Ok(()),
        }
    }

    /// A page of a file as whoever reads it sees it. The caller holds the file.
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

    /// Puts what is held of the files with most of it into them until there is room for so
    /// many pages more of this one. What cannot be put is held on up to a bound, and beyond it
    /// only a file is refused that cannot be put itself.
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
                "a file is changed before a sync: too much is held"
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

    /// What is held of a file goes into it, which nobody may be using any more by now:
    /// until that is done its number is no other file's. Where there is no room for all of
    /// it at once, in pieces: nobody has synced it.
    fn flush_mmap_dirty_pinned(&self, channel: &mut IoChannel, ino: Ino) -> Result<()> {
        match self.open(ino) {
            Err(FsError::Posix(Errno::STALE)) => return Ok(()),
            opened => opened?,
        };
        let put = self.flush_mmap_dirty(channel, ino, FlushMode::Piecewise);
        self.release_with(ino, Some(channel));
        put
    }

    /// Nothing of these bytes is held any more. The caller holds the file alone.
    pub(crate) fn discard_mmap_dirty(&self, ino: Ino, data: &FileLock, bytes: Range<u64>) {
        if data.has_mmap_dirty() {
            data.lock_mmap_dirty().discard_range(bytes);
            self.count_mmap_dirty(ino, data);
        }
    }

    /// What is held of a file goes into it, all or nothing, for whoever reads it after a
    /// crash.
    ///
    /// # Errors
    /// What the volume says; then it is held as before.
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
                // A log that is named already must be copied before.
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

    /// Puts pages into a file in one transaction. The caller holds the file alone; there
    /// are spans for them that are its own.
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

    /// Sees to it that there are spans for these pages of a file, with holes in them. The
    /// caller holds the file alone.
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

    /// What is held of all files goes into them; the first error counts.
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

    /// What is held for long goes into its file. To be called once in a while.
    ///
    /// # Errors
    /// What the volume says.
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
        // Closed once more, which may keep them again.
        for ino in kept {
            self.lock_core().mmap_dirty.kept_open.remove(&ino);
            self.release_with(ino, Some(&mut channel));
        }
        self.flush_mmap_dirty_of(&mut channel, old)
    }

    /// Pages that are held of all files.
    #[must_use]
    pub fn mmap_dirty_pages(&self) -> u64 {
        self.lock_core().mmap_dirty.total_pages
    }

    /// A file is about to be closed for the last time: what is held of it goes into it,
    /// unless it goes itself. Where no copy is in reach it is kept open until one is. Whether
    /// that may have helped.
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
                tracing::warn!(ino = ino.0, %cause, "what was stored into mappings of a file waits");
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
                "what was stored into mappings of a file and not synced is lost"
            );
            let _alone = data.write();
            self.discard_mmap_dirty(ino, &data, 0..FILE_BYTES_MAX);
        }
        false
    }
}

/// Whether what failed so may succeed later, though nobody does anything about it.
fn is_transient(cause: &FsError) -> bool {
    matches!(
        cause,
        FsError::Space(SpaceError::Unavailable(_) | SpaceError::Busy(_))
    )
}

/// Pages that have some of these bytes.
fn pages_overlapping(bytes: &Range<u64>) -> Range<u64> {
    bytes.start / PAGE..page_count(bytes.end)
}

/// What a page has of these bytes: where in the page, and where among them.
fn overlap_in_page(page: u64, bytes: &Range<u64>) -> (Range<usize>, Range<usize>) {
    let first = bytes.start.max(page * PAGE);
    let last = bytes.end.min((page + 1) * PAGE);
    let from = |base: u64| (first - base) as usize..(last - base) as usize;
    (from(page * PAGE), from(bytes.start))
}

/// Pages that follow each other.
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
