//! Content: reads, writes, and changes of a file's size or pages.
//!
//! A write within the size of a file without holes changes no inode. It takes the file's lock
//! shared, goes out on the caller's own channel, and only its time is recorded. Every other change
//! takes the lock exclusively. Its changes of the inode are in the same transaction as the pages,
//! or [`NEEDS_TRIM`] announces them before the first page changes.

use crate::alloc::spans::Span;
use crate::direct::shared_file_map::FileLock;
use crate::error::{FsError, Result};
use crate::file::extend::Extension;
use crate::file::share::bytes_to_shareable;
use crate::format::inode::{
    Corruption, FILE_BYTES_MAX, HAS_RESERVED_PAGES, Ino, Inode, InodeKind, NEEDS_TRIM, Time,
};
use crate::io::channel::{IoChannel, Overwrite, WriteQueue};
use crate::names::namespace::SET_ID;
use crate::names::xattrs::has_capabilities;
use crate::tree::page_map::{self as map, FileSpan};
use crate::txn::core::{Core, Tx, damaged_inode};
use crate::{Attr, Fs};
use bytes::Bytes;
use pagemesh_base::space::Request;
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

pub(crate) const PAGE: u64 = PAGE_BYTES as u64;
/// Pages of a file in one transaction; inode, map and table need the others.
pub(crate) const PIECE_PAGES_MAX: u64 = 48;
/// Pages of a file that one atomic overwrite may change.
pub const ATOMIC_PAGES_MAX: u64 = PIECE_PAGES_MAX;
/// Spans freed in one transaction: each may have its entry in a map page of its own.
pub(crate) const SPANS_FREED_MAX: usize = 24;
/// Age in seconds from which a read time is recorded again.
const ATIME_AGE_S: i64 = 86_400;

/// Whether a write is an overwrite within a file without holes.
enum OverwriteAttempt {
    Ready(Overwrite),
    NotOverwrite,
    /// Another thread holds the lock exclusively or waits for that, or the file is not looked up.
    Locked,
}

/// Pages that begin below this byte.
pub(crate) fn page_count(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE)
}

impl Inode {
    /// Whether every page below the size is mapped, and no other. The page count of a file that is
    /// being trimmed is not reliable, and direct clients may have mapped more pages.
    pub(crate) fn is_dense(&self) -> bool {
        self.is_dense_before_append() && self.append_extent.is_none()
    }

    /// As [`Inode::is_dense`], without the pages of direct clients.
    pub(crate) fn is_dense_before_append(&self) -> bool {
        let is_settled =
            self.flags & (HAS_RESERVED_PAGES | NEEDS_TRIM) == 0 && self.redo_log.is_none();
        is_settled && self.pages == page_count(self.size)
    }

    /// Whether a write removes set-id bits or capabilities.
    pub(crate) fn needs_remove_privs(&self) -> bool {
        self.mode & SET_ID != 0 || self.has_xattrs()
    }

    /// Mapped pages of a span; `None` if only the volume can tell.
    pub(crate) fn mapped_pages_in(&self, piece: &FileSpan) -> Option<u64> {
        let pages = self.pages.saturating_sub(piece.first_page);
        self.is_dense().then(|| pages.min(1 << piece.span.order))
    }
}

/// Runs of the space for a byte range of a file, without holes that have no span: byte of the file,
/// byte of the space, length.
type FileExtents = Vec<(u64, u64, u64)>;

/// The runs, and whether any of them is shared.
pub(crate) fn file_extents(
    inode: &Inode,
    bytes: Range<u64>,
    read: map::ReadPage<'_>,
) -> Result<(FileExtents, bool)> {
    let mut runs = FileExtents::new();
    let mut is_shared = false;
    let mut at = bytes.start;
    while at < bytes.end {
        let page = at / PAGE;
        let within = at % PAGE;
        let Some(run) = map::find(&inode.map, page, read)? else {
            at = (page + map::pages_to_next_span(page)) * PAGE;
            continue;
        };
        let len = (run.len * PAGE - within).min(bytes.end - at);
        let place = run.page * PAGE + within;
        is_shared |= run.is_shared;
        match runs.last_mut() {
            Some((first, last, so_far)) if *first + *so_far == at && *last + *so_far == place => {
                *so_far += len;
            }
            _ => runs.push((at, place, len)),
        }
        at += len;
    }
    Ok((runs, is_shared))
}

impl Core {
    /// Records the time of a read under the rules of `relatime`.
    pub(crate) fn record_read_time(&mut self, ino: Ino, inode: &Inode, now: Time) {
        if self.is_running()
            && (inode.atime <= inode.mtime.max(inode.ctime)
                || inode.atime.sec.saturating_add(ATIME_AGE_S) < now.sec)
        {
            self.live_inode(ino).pending_times.atime = Some(now);
            self.inos_with_pending_times.insert(ino);
        }
    }

    /// The requests of an overwrite within a file without holes, into spans of its own; `None` if
    /// it is not such a write. The caller holds the file's lock.
    fn plan_overwrite(
        &mut self,
        ino: Ino,
        offset: u64,
        data: &Bytes,
        durable: bool,
        now: Time,
    ) -> Result<Option<Vec<Request>>> {
        self.check_running()?;
        let inode = self.regular_file(ino)?;
        let end = offset.saturating_add(data.len() as u64);
        if end > inode.size || !inode.is_dense() {
            return Ok(None);
        }
        if has_capabilities(&mut self.begin(), ino, &inode)? {
            return Ok(None);
        }
        let (runs, is_shared) = file_extents(&inode, offset..end, &mut |page| self.page(page))?;
        if is_shared {
            return Ok(None);
        }
        if runs.iter().map(|&(_, _, len)| len).sum::<u64>() < data.len() as u64 {
            let what = "by its page count it is a file without holes, and it has one";
            return Err(damaged_inode(ino, Corruption(what.into())));
        }
        self.record_write_time(ino, now);
        let requests = runs.into_iter().map(|(at, place, len)| {
            let first = (at - offset) as usize;
            Request::Write {
                offset: place,
                data: data.slice(first..first + len as usize),
                durable,
            }
        });
        Ok(Some(requests.collect()))
    }

    /// The bytes that a read returns and their location; `None` if a redo log must be applied
    /// first.
    fn plan_read(
        &mut self,
        ino: Ino,
        offset: u64,
        len: u32,
        now: Time,
    ) -> Result<Option<(Range<u64>, FileExtents)>> {
        let inode = self.regular_file(ino)?;
        match inode.redo_log {
            Some(_) => Ok(None),
            None => self
                .extents_to_read(ino, &inode, (offset, len), now)
                .map(Some),
        }
    }

    /// As [`Core::plan_read`], whether the file has a redo log or not.
    fn extents_to_read(
        &mut self,
        ino: Ino,
        inode: &Inode,
        (offset, len): (u64, u32),
        now: Time,
    ) -> Result<(Range<u64>, FileExtents)> {
        self.record_read_time(ino, inode, now);
        let end = self
            .file_end(ino, inode)?
            .min(offset.saturating_add(u64::from(len)));
        let range = offset.min(end)..end;
        let (runs, _) = file_extents(inode, range.clone(), &mut |page| self.page(page))?;
        Ok((range, runs))
    }

    pub(crate) fn regular_file(&mut self, ino: Ino) -> Result<Inode> {
        let inode = self.inode(ino)?;
        self.check_trusted(ino)?;
        match inode.kind() {
            InodeKind::File => Ok(inode),
            InodeKind::Directory => Err(Errno::ISDIR.into()),
            _ => Err(Errno::INVAL.into()),
        }
    }
}

impl Fs {
    pub(crate) fn file_lock(&self, ino: Ino) -> Result<Arc<FileLock>> {
        self.inspect(|core| {
            core.inode(ino)?;
            Ok(Arc::clone(&core.live_inode(ino).file_lock))
        })
    }

    /// Reads bytes of a file; fewer at its end.
    ///
    /// # Errors
    /// `EISDIR`, `EINVAL`, and errors of the volume.
    pub fn read(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        offset: u64,
        len: u32,
    ) -> Result<Vec<u8>> {
        if let Some(bytes) = self.read_unlocked(channel, ino, offset, len)? {
            return Ok(bytes);
        }
        let lock = self.file_lock(ino)?;
        let shared = lock.read();
        if let Some(bytes) = self.read_with_mmap_dirty(channel, ino, &lock, offset, len)? {
            return Ok(bytes);
        }
        drop(shared);
        let _alone = lock.write();
        self.apply_redo_log(channel, ino)?;
        let bytes = self.read_with_mmap_dirty(channel, ino, &lock, offset, len)?;
        Ok(bytes.unwrap_or_default())
    }

    /// Reads with one look at the core. `None` unless the file's lock is free, the file has no
    /// shared map and no mmap-dirty pages, and no redo log must be applied.
    fn read_unlocked(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        offset: u64,
        len: u32,
    ) -> Result<Option<Vec<u8>>> {
        let now = self.now();
        let found = self.inspect(|core| {
            let live = core.live_inodes.get(&ino);
            let Some(shared) = live.and_then(|live| live.file_lock.try_read()) else {
                return Ok(None);
            };
            let found = core.plan_read(ino, offset, len, now)?;
            Ok(found.map(|found| (shared, found)))
        })?;
        let Some((_shared, (range, runs))) = found else {
            return Ok(None);
        };
        read_extents(channel, range, &runs).map(Some)
    }

    /// Reads under the file's lock. `None` if a redo log must be applied first, unless buffered
    /// pages cover those of the log.
    pub(crate) fn read_with_mmap_dirty(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        data: &FileLock,
        offset: u64,
        len: u32,
    ) -> Result<Option<Vec<u8>>> {
        let now = self.now();
        let found = self.inspect(|core| {
            let inode = core.regular_file(ino)?;
            if inode.redo_log.is_some() && !data.has_mmap_dirty() {
                return Ok(None);
            }
            core.extents_to_read(ino, &inode, (offset, len), now)
                .map(Some)
        })?;
        let Some((range, runs)) = found else {
            return Ok(None);
        };
        let first = range.start;
        let mut bytes = read_extents(channel, range, &runs)?;
        data.overlay_mmap_dirty(first, &mut bytes);
        Ok(Some(bytes))
    }

    /// Writes bytes at an offset, or at the end. Returns the range that was written. It is shorter
    /// than `data` if a later piece failed, or if the file would exceed its longest size (POSIX,
    /// `write`).
    ///
    /// # Errors
    /// `EFBIG`, `ENOSPC`, and errors of the volume. Existing bytes before the page that failed
    /// may be overwritten.
    pub fn write(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        offset: Option<u64>,
        data: &Bytes,
        durable: bool,
    ) -> Result<Range<u64>> {
        if let Some(written) = self.extend_dense(ino, offset, data, durable)? {
            return Ok(written);
        }
        let all = |offset: u64| offset..offset + data.len() as u64;
        // Nearly always the lock is free, and one look at the core suffices.
        if let Some(offset) = offset {
            match self.try_overwrite(ino, offset, data, durable)? {
                OverwriteAttempt::Ready(write) => {
                    channel.call_all(write.requests)?;
                    return Ok(all(offset));
                }
                OverwriteAttempt::Locked => {
                    let lock = self.file_lock(ino)?;
                    let _shared = lock.read();
                    if !lock.has_mmap_dirty()
                        && self.overwrite_locked(channel, ino, offset, data, durable)?
                    {
                        return Ok(all(offset));
                    }
                }
                OverwriteAttempt::NotOverwrite => {}
            }
        }
        let lock = self.file_lock(ino)?;
        let _alone = lock.write();
        self.complete_pending(channel, ino)?;
        let inode = self.inspect(|core| core.regular_file(ino))?;
        if inode.has_xattrs() {
            self.drop_capabilities(ino)?;
        }
        let offset = offset.unwrap_or(inode.size);
        let room = FILE_BYTES_MAX.saturating_sub(offset);
        if room == 0 && !data.is_empty() {
            return Err(Errno::FBIG.into());
        }
        let data = &data.slice(..data.len().min(usize::try_from(room).unwrap_or(usize::MAX)));
        let end = offset + data.len() as u64;
        if end > inode.size && inode.flags & NEEDS_TRIM != 0 {
            self.free_marked(channel, ino)?;
        }
        self.unshare(channel, ino, offset / PAGE..page_count(end))?;
        let written = match self.overwrite_locked(channel, ino, offset, data, durable)? {
            true => offset..end,
            false => self.extend_locked(channel, ino, offset, data, durable)?,
        };
        lock.patch_mmap_dirty(offset, &data[..(written.end - offset) as usize]);
        Ok(written)
    }

    /// Begins an overwrite; the queue reports its end under `id`. Returns false if the write
    /// changes more than existing bytes, or may have to wait for other operations. Then nothing has
    /// begun, and [`Fs::write`] can do it once the queue is empty.
    ///
    /// # Errors
    /// `EISDIR`, `EINVAL`, and errors of the volume.
    pub fn begin_write(
        &self,
        pipe: &mut WriteQueue<'_>,
        id: u64,
        ino: Ino,
        offset: u64,
        data: &Bytes,
        durable: bool,
    ) -> Result<bool> {
        match self.try_overwrite(ino, offset, data, durable)? {
            OverwriteAttempt::Ready(write) => {
                pipe.begin(id, write);
                Ok(true)
            }
            OverwriteAttempt::NotOverwrite | OverwriteAttempt::Locked => Ok(false),
        }
    }

    /// Takes the file's lock, if it is free, for an overwrite within a file without holes.
    fn try_overwrite(
        &self,
        ino: Ino,
        offset: u64,
        data: &Bytes,
        durable: bool,
    ) -> Result<OverwriteAttempt> {
        let now = self.now();
        let bytes = data.len();
        self.inspect(|core| {
            let live = core.live_inodes.get(&ino);
            let Some(held) = live.and_then(|live| live.file_lock.try_read()) else {
                return Ok(OverwriteAttempt::Locked);
            };
            let requests = core.plan_overwrite(ino, offset, data, durable, now)?;
            Ok(match requests.filter(|requests| !requests.is_empty()) {
                Some(requests) => OverwriteAttempt::Ready(Overwrite {
                    guard: held,
                    requests,
                    bytes,
                }),
                None => OverwriteAttempt::NotOverwrite,
            })
        })
    }

    /// Overwrites within a file without holes; false if it is not such a write.
    fn overwrite_locked(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        offset: u64,
        data: &Bytes,
        durable: bool,
    ) -> Result<bool> {
        let now = self.now();
        let requests = self.inspect(|core| core.plan_overwrite(ino, offset, data, durable, now))?;
        let is_that = requests.is_some();
        if let Some(requests) = requests {
            channel.call_all(requests)?;
        }
        Ok(is_that)
    }

    /// Writes the data with its inode, as far as possible. The caller holds the file exclusively.
    fn extend_locked(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        offset: u64,
        data: &Bytes,
        durable: bool,
    ) -> Result<Range<u64>> {
        let end = offset + data.len() as u64;
        let mut at = offset;
        while at < end {
            let next = ((at / PAGE + PIECE_PAGES_MAX) * PAGE).min(end);
            let part = &data[(at - offset) as usize..(next - offset) as usize];
            match self.extend_piece(channel, ino, at, part, durable) {
                Err(error) if at == offset => return Err(error),
                // The caller's next write of the rest gets the error.
                Err(_) => break,
                Ok(()) => at = next,
            }
        }
        Ok(offset..at)
    }

    /// Writes one piece in one transaction.
    fn extend_piece(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        at: u64,
        part: &[u8],
        durable: bool,
    ) -> Result<()> {
        let end = at + part.len() as u64;
        let extension = Extension {
            at,
            data: part,
            holes: self.holes(channel, ino, at / PAGE..page_count(end))?,
            durable,
        };
        let now = self.now();
        self.change(|tx| extension.apply(tx, ino, now))
    }

    /// The unmapped pages among a range of a file's pages. The caller holds the file exclusively.
    pub(crate) fn holes(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        pages: Range<u64>,
    ) -> Result<BTreeSet<u64>> {
        let (inode, runs) = self.inspect(|core| {
            let inode = core.regular_file(ino)?;
            let bytes = pages.start * PAGE..pages.end * PAGE;
            let (runs, _) = file_extents(&inode, bytes, &mut |page| core.page(page))?;
            Ok((inode, runs))
        })?;
        let mut holes: BTreeSet<u64> = pages.collect();
        if inode.is_dense() {
            holes.retain(|&page| page >= page_count(inode.size));
            return Ok(holes);
        }
        for (at, place, len) in runs {
            let first = at / PAGE;
            let of_space = place / PAGE..(place + len) / PAGE;
            channel.for_each_mapped_run(of_space.clone(), |mapped| {
                for page in mapped {
                    holes.remove(&(first + page - of_space.start));
                }
            })?;
        }
        Ok(holes)
    }

    /// As [`Fs::holes`], for several ranges.
    pub(crate) fn holes_in_ranges(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        ranges: impl IntoIterator<Item = Range<u64>>,
    ) -> Result<BTreeSet<u64>> {
        let mut holes = BTreeSet::new();
        for pages in ranges {
            holes.append(&mut self.holes(channel, ino, pages)?);
        }
        Ok(holes)
    }

    /// Overwrites several byte ranges of a file atomically, for readers and across a crash. The
    /// ranges lie within the file and in at most [`ATOMIC_PAGES_MAX`] pages, and do not overlap.
    ///
    /// **Lost update:** `is_wanted` is called under the exclusive lock of the file. It must return
    /// false if the issuer of the request has exited. A late request would overwrite later writes.
    ///
    /// # Errors
    /// `EINTR` if `is_wanted` returns false; `EINVAL` for ranges that break the rules above;
    /// `EOPNOTSUPP` for a file that the kernel maps, or that has set-id bits or extended
    /// attributes; and as [`Fs::write`].
    pub fn write_atomic(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        parts: &[(u64, Bytes)],
        is_wanted: impl FnOnce() -> bool,
    ) -> Result<()> {
        // Keeps the file from being freed meanwhile: the issuer may be killed and its file closed.
        self.open(ino)?;
        let written = self.write_atomic_open(channel, ino, parts, is_wanted);
        let written = written.and_then(|()| self.drop_changed_pages(ino));
        self.release_with(ino, Some(channel));
        written
    }

    fn write_atomic_open(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        parts: &[(u64, Bytes)],
        is_wanted: impl FnOnce() -> bool,
    ) -> Result<()> {
        let lock = self.file_lock(ino)?;
        let _alone = lock.write();
        if !is_wanted() {
            return Err(Errno::INTR.into());
        }
        self.complete_pending(channel, ino)?;
        let inode = self.inspect(|core| core.regular_file(ino))?;
        if lock.is_mmapped() || inode.needs_remove_privs() {
            return Err(Errno::OPNOTSUPP.into());
        }
        let ranges = atomic_ranges(parts, inode.size)?;
        let pages = |range: &Range<u64>| range.start / PAGE..page_count(range.end);
        for range in &ranges {
            self.unshare(channel, ino, pages(range))?;
        }
        self.ensure_spans(ino, ranges.iter().flat_map(pages))?;
        let holes = self.holes_in_ranges(channel, ino, ranges.iter().map(pages))?;
        let now = self.now();
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            for (offset, data) in parts {
                write_pages(tx, &mut inode, *offset, data, &holes)?;
            }
            inode.mtime = now;
            inode.ctime = now;
            tx.make_durable();
            tx.put_inode(ino, &inode)
        })?;
        self.lock_core().record_unseen_write(ino);
        Ok(())
    }

    /// Truncates a file, or extends it by a hole.
    ///
    /// # Errors
    /// `EFBIG`, `EISDIR`, `EINVAL`.
    pub fn set_size(&self, channel: &mut IoChannel, ino: Ino, size: u64) -> Result<Attr> {
        if size > FILE_BYTES_MAX {
            return Err(Errno::FBIG.into());
        }
        let lock = self.file_lock(ino)?;
        let _telling = lock.kernel_pages.lock_notify();
        let _alone = lock.write();
        self.with_reserve_fallback(|| self.complete_pending(channel, ino))?;
        self.drop_capabilities(ino)?;
        let set = match size < self.inspect(|core| core.regular_file(ino))?.size {
            true => self.with_reserve_fallback(|| self.set_size_locked(channel, ino, size)),
            false => self.set_size_locked(channel, ino, size),
        };
        // The file may have been truncated although an error is returned.
        let size = self.inspect(|core| core.regular_file(ino))?.size;
        self.discard_mmap_dirty(ino, &lock, size..FILE_BYTES_MAX);
        set
    }

    /// The caller holds the file exclusively. After an error this may run again.
    fn set_size_locked(&self, channel: &mut IoChannel, ino: Ino, size: u64) -> Result<Attr> {
        let now = self.now();
        let mut old = self.inspect(|core| core.regular_file(ino))?;
        if size > old.size && old.flags & NEEDS_TRIM != 0 {
            self.free_marked(channel, ino)?;
            old = self.inspect(|core| core.regular_file(ino))?;
        }
        let is_cut = size < old.size || old.flags & (HAS_RESERVED_PAGES | NEEDS_TRIM) != 0;
        if is_cut {
            // The last span must be the file's own before its pages are freed or zeroed.
            let end = page_count(size);
            self.unshare(channel, ino, end.saturating_sub(1)..end)?;
        }
        let tail = match is_cut && !size.is_multiple_of(PAGE) {
            true => self
                .holes(channel, ino, size / PAGE..size / PAGE + 1)?
                .is_empty(),
            false => false,
        };
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            if is_cut {
                inode.flags |= NEEDS_TRIM;
                inode.flags &= !HAS_RESERVED_PAGES;
            }
            if tail && size < inode.size {
                let within = (size % PAGE) as usize;
                let zeroes = [0; PAGE_BYTES];
                write_pages(tx, &mut inode, size, &zeroes[within..], &BTreeSet::new())?;
            }
            inode.size = size;
            inode.mtime = now;
            inode.ctime = now;
            tx.put_inode(ino, &inode)
        })?;
        if is_cut {
            let was_dense = old.is_dense() && size <= old.size;
            let pages = was_dense.then(|| page_count(size));
            let trimmed = self.with_reserve_fallback(|| self.trim(channel, ino, pages));
            // The new size is set: a failure to free pages is retried later.
            let _ = self.defer_on_error(ino, trimmed);
        }
        self.attr(ino)
    }

    /// Writes the pending times of a file, its own and those of direct clients, into its inode.
    pub(crate) fn flush_times(&self, ino: Ino) -> Result<()> {
        let is_noted = {
            let mut core = self.lock_core();
            core.collect_direct_write(ino);
            let live = core.live_inodes.get(&ino);
            live.is_some_and(|live| !live.pending_times.is_empty())
        };
        if !is_noted {
            return Ok(());
        }
        self.with_reserve_fallback(|| {
            self.change(|tx| {
                let inode = tx.inode(ino)?;
                tx.put_inode(ino, &inode)
            })
        })
    }

    /// Writes all pending times into their inodes, also those of direct clients. Call it
    /// periodically: a crash loses the times recorded since the last call.
    ///
    /// # Errors
    /// The first error. The next call retries the inodes that failed.
    pub fn flush_all_times(&self) -> Result<()> {
        let mut noted = {
            let mut core = self.lock_core();
            core.collect_all_direct_writes();
            std::mem::take(&mut core.inos_with_pending_times)
        };
        let mut first = Ok(());
        while let Some(ino) = noted.pop_first() {
            let put = match self.flush_times(ino) {
                Err(FsError::Posix(Errno::STALE)) => Ok(()),
                put => put,
            };
            if let Err(cause) = &put {
                let mut core = self.lock_core();
                core.inos_with_pending_times.insert(ino);
                // A failed volume would fail the other inodes too.
                if matches!(cause, FsError::Space(_)) {
                    core.inos_with_pending_times.append(&mut noted);
                }
            }
            first = first.and(put);
        }
        first
    }

    /// Copies bytes from one file to another, or within one where source and target do not overlap;
    /// fewer at the end of the source. Whole spans are shared if both ranges have the same
    /// alignment and the target has no span there. Returns the number of bytes copied.
    ///
    /// # Errors
    /// `EINVAL` for ranges of one file that overlap, and as [`Fs::write`].
    pub fn copy(
        &self,
        channel: &mut IoChannel,
        (from, mut source): (Ino, u64),
        (to, mut target): (Ino, u64),
        len: u64,
    ) -> Result<u64> {
        const STEP: u64 = 1 << 20;
        let is_apart = from != to || source.abs_diff(target) >= len;
        if !is_apart {
            return Err(Errno::INVAL.into());
        }
        // The size before the copy: bytes copied to the same file do not extend the source.
        let size = self.inspect(|core| {
            let inode = core.regular_file(from)?;
            core.file_end(from, &inode)
        })?;
        let len = len.min(size.saturating_sub(source));
        if len > 0 {
            let lock = self.file_lock(to)?;
            let _alone = lock.write();
            self.drop_capabilities(to)?;
        }
        let fits = target
            .checked_add(len)
            .is_some_and(|end| end <= FILE_BYTES_MAX);
        let mut copied = 0;
        while copied < len {
            let to_alike = bytes_to_shareable(source, target);
            let shared = match to_alike {
                Some(0) if fits => {
                    self.share_spans(channel, (from, source), (to, target), len - copied)
                }
                _ => Ok(0),
            };
            match shared {
                Ok(0) => {}
                Err(_) if copied > 0 => break,
                shared => {
                    let step = shared?;
                    source += step;
                    target += step;
                    copied += step;
                    continue;
                }
            }
            let apart = to_alike.filter(|&apart| apart > 0).unwrap_or(STEP);
            let step = STEP.min(len - copied).min(apart);
            let bytes = Bytes::from(self.read(channel, from, source, step as u32)?);
            if bytes.is_empty() {
                break;
            }
            match self.write(channel, to, Some(target), &bytes, false) {
                Err(_) if copied > 0 => break,
                written => written?,
            };
            let step = bytes.len() as u64;
            source += step;
            target += step;
            copied += step;
        }
        Ok(copied)
    }
}

/// The byte ranges of parts that are written atomically, in order.
fn atomic_ranges(parts: &[(u64, Bytes)], size: u64) -> Result<Vec<Range<u64>>> {
    let range = |(offset, data): &(u64, Bytes)| {
        let end = offset.checked_add(data.len() as u64)?;
        (!data.is_empty() && end <= size).then_some(*offset..end)
    };
    let ranges: Option<Vec<_>> = parts.iter().map(range).collect();
    let mut ranges = ranges.ok_or(Errno::INVAL)?;
    ranges.sort_unstable_by_key(|range| range.start);
    let overlap = ranges.windows(2).any(|pair| pair[0].end > pair[1].start);
    let pages = |range: &Range<u64>| page_count(range.end) - range.start / PAGE;
    // A page with bytes of two parts counts twice.
    let pages: u64 = ranges.iter().map(pages).sum();
    match overlap || pages > ATOMIC_PAGES_MAX {
        true => Err(Errno::INVAL.into()),
        false => Ok(ranges),
    }
}

/// The request that frees the part of a span within `pages` of the file. The two overlap.
pub(crate) fn discard_request(piece: &FileSpan, pages: &Range<u64>) -> Request {
    let Span { page, order } = piece.span;
    let first = piece.first_page.max(pages.start);
    let end = (piece.first_page + (1 << order)).min(pages.end);
    Request::Discard {
        offset: (page + first - piece.first_page) * PAGE,
        len: (end - first) * PAGE,
    }
}

fn read_extents(
    channel: &mut IoChannel,
    range: Range<u64>,
    runs: &[(u64, u64, u64)],
) -> Result<Vec<u8>> {
    let len = range.end - range.start;
    if let [(_, place, all)] = runs
        && *all == len
    {
        return channel.read(*place, len as u32);
    }
    let mut bytes = vec![0; len as usize];
    for &(at, place, len) in runs {
        let first = (at - range.start) as usize;
        let part = channel.read(place, len as u32)?;
        bytes[first..first + part.len()].copy_from_slice(&part);
    }
    Ok(bytes)
}

/// Adds bytes of a file to the transaction.
pub(crate) fn write_pages(
    tx: &mut Tx<'_>,
    inode: &mut Inode,
    offset: u64,
    data: &[u8],
    holes: &BTreeSet<u64>,
) -> Result<()> {
    let mut at = offset;
    let mut rest = data;
    while !rest.is_empty() {
        let page = at / PAGE;
        let within = (at % PAGE) as usize;
        let (part, after) = rest.split_at(rest.len().min(PAGE_BYTES - within));
        let is_new = holes.contains(&page);
        let run = map::find_or_allocate(tx, inode, page)?;
        tx.write_data(run.page, within, part, is_new)?;
        inode.pages += u64::from(is_new);
        at += part.len() as u64;
        rest = after;
    }
    Ok(())
}
