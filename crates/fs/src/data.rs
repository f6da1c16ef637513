//! Content: reading, writing, and what changes a file's size or pages.
//!
//! A write within the size of a file without holes changes no inode. It takes the
//! file's lock shared, goes out by the caller's own port, and only its time is
//! noted. Everything else takes the lock alone, and what it changes of the inode
//! goes in the same transaction as the pages, or is announced by [`TRIM`] before
//! the first page goes.

use crate::board::Data;
use crate::core::{Core, Tx, damaged_inode};
use crate::error::{FsError, Result};
use crate::extend::Extension;
use crate::format::{Damaged, FILE_BYTES_MAX, Ino, Inode, Kind, RESERVED, TRIM, Time};
use crate::io::{Overwrite, Pipe, Port};
use crate::map::{self, Piece};
use crate::namespace::SET_ID;
use crate::share::to_alike;
use crate::spans::Span;
use crate::xattrs::has_capabilities;
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
/// Pages of a file that are overwritten together.
pub const TOGETHER_PAGES_MAX: u64 = PIECE_PAGES_MAX;
/// Spans given back in one transaction: each may lie in a map page of its own.
pub(crate) const SPANS_FREED_MAX: usize = 24;
/// Times of reads that are noted again: older ones than this.
const ATIME_AGE_S: i64 = 86_400;

/// Whether a write is one within a file without holes.
enum Tried {
    Is(Overwrite),
    Not,
    /// Somebody has the file alone or waits for that, or nobody has looked it up.
    InTheWay,
}

/// Pages that begin below this byte.
pub(crate) fn pages_of(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE)
}

impl Inode {
    /// Whether every page below the size is mapped, and no other. The count of one that
    /// is being cut says nothing, and guests may have mapped more.
    pub(crate) fn is_dense(&self) -> bool {
        self.is_whole() && self.growth.is_none()
    }

    /// The same but for what guests did.
    pub(crate) fn is_whole(&self) -> bool {
        let is_settled = self.flags & (RESERVED | TRIM) == 0 && self.redo.is_none();
        is_settled && self.pages == pages_of(self.size)
    }

    /// Whether a write takes rights away from it.
    pub(crate) fn is_armed(&self) -> bool {
        self.mode & SET_ID != 0 || self.has_xattrs()
    }

    /// Mapped pages of a span; none: one must look.
    pub(crate) fn mapped_in(&self, piece: &Piece) -> Option<u64> {
        let pages = self.pages.saturating_sub(piece.at);
        self.is_dense().then(|| pages.min(1 << piece.span.order))
    }
}

/// Runs of the space behind bytes of a file, holes without a span left out:
/// byte of the file, byte of the space, length.
type Runs = Vec<(u64, u64, u64)>;

/// The runs, and whether any of them is shared.
pub(crate) fn runs(inode: &Inode, bytes: Range<u64>, read: map::Read<'_>) -> Result<(Runs, bool)> {
    let mut runs = Runs::new();
    let mut is_shared = false;
    let mut at = bytes.start;
    while at < bytes.end {
        let page = at / PAGE;
        let within = at % PAGE;
        let Some(run) = map::find(&inode.map, page, read)? else {
            at = (page + map::to_next_span(page)) * PAGE;
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
    /// Notes that a file was read, as `relatime` does.
    pub(crate) fn note_read(&mut self, ino: Ino, inode: &Inode, now: Time) {
        if self.is_running()
            && (inode.atime <= inode.mtime.max(inode.ctime)
                || inode.atime.sec.saturating_add(ATIME_AGE_S) < now.sec)
        {
            self.live(ino).noted.atime = Some(now);
            self.noted.insert(ino);
        }
    }

    /// What writes within a file without holes, whose lock is held, to spans of its own;
    /// none: it is not that.
    fn overwriting(
        &mut self,
        ino: Ino,
        offset: u64,
        data: &Bytes,
        durable: bool,
        now: Time,
    ) -> Result<Option<Vec<Request>>> {
        self.check_running()?;
        let inode = self.file(ino)?;
        let end = offset.saturating_add(data.len() as u64);
        if end > inode.size || !inode.is_dense() {
            return Ok(None);
        }
        if has_capabilities(&mut self.begin(), ino, &inode)? {
            return Ok(None);
        }
        let (runs, is_shared) = runs(&inode, offset..end, &mut |page| self.page(page))?;
        if is_shared {
            return Ok(None);
        }
        if runs.iter().map(|&(_, _, len)| len).sum::<u64>() < data.len() as u64 {
            let what = "it counts as without holes, and has one";
            return Err(damaged_inode(ino, Damaged(what.into())));
        }
        self.note_write(ino, now);
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

    /// The bytes that a read gives and where they lie; none: a log must be copied before.
    fn reading(
        &mut self,
        ino: Ino,
        offset: u64,
        len: u32,
        now: Time,
    ) -> Result<Option<(Range<u64>, Runs)>> {
        let inode = self.file(ino)?;
        match inode.redo {
            Some(_) => Ok(None),
            None => self.runs_read(ino, &inode, (offset, len), now).map(Some),
        }
    }

    /// The same, whether there is a log or not.
    fn runs_read(
        &mut self,
        ino: Ino,
        inode: &Inode,
        (offset, len): (u64, u32),
        now: Time,
    ) -> Result<(Range<u64>, Runs)> {
        self.note_read(ino, inode, now);
        let end = self
            .end_of(ino, inode)?
            .min(offset.saturating_add(u64::from(len)));
        let range = offset.min(end)..end;
        let (runs, _) = runs(inode, range.clone(), &mut |page| self.page(page))?;
        Ok((range, runs))
    }

    pub(crate) fn file(&mut self, ino: Ino) -> Result<Inode> {
        let inode = self.inode(ino)?;
        self.check_trusted(ino)?;
        match inode.kind() {
            Kind::File => Ok(inode),
            Kind::Directory => Err(Errno::ISDIR.into()),
            _ => Err(Errno::INVAL.into()),
        }
    }
}

impl Fs {
    pub(crate) fn data_lock(&self, ino: Ino) -> Result<Arc<Data>> {
        self.look(|core| {
            core.inode(ino)?;
            Ok(Arc::clone(&core.live(ino).data))
        })
    }

    /// Bytes of a file; fewer at its end.
    ///
    /// # Errors
    /// `EISDIR`, `EINVAL`, and what the volume says.
    pub fn read(&self, port: &mut Port, ino: Ino, offset: u64, len: u32) -> Result<Vec<u8>> {
        if let Some(bytes) = self.read_plain(port, ino, offset, len)? {
            return Ok(bytes);
        }
        let lock = self.data_lock(ino)?;
        let shared = lock.read();
        if let Some(bytes) = self.read_held(port, ino, &lock, offset, len)? {
            return Ok(bytes);
        }
        drop(shared);
        let _alone = lock.write();
        self.finish_redo(port, ino)?;
        let bytes = self.read_held(port, ino, &lock, offset, len)?;
        Ok(bytes.unwrap_or_default())
    }

    /// The same with one look, where the file's lock can be had at once, no direct client
    /// knows the file, and nothing is held of it; none: it is not so.
    fn read_plain(
        &self,
        port: &mut Port,
        ino: Ino,
        offset: u64,
        len: u32,
    ) -> Result<Option<Vec<u8>>> {
        let now = self.now();
        let found = self.look(|core| {
            let live = core.live.get(&ino);
            let Some(shared) = live.and_then(|live| live.data.try_read()) else {
                return Ok(None);
            };
            let found = core.reading(ino, offset, len, now)?;
            Ok(found.map(|found| (shared, found)))
        })?;
        let Some((_shared, (range, runs))) = found else {
            return Ok(None);
        };
        read_runs(port, range, &runs).map(Some)
    }

    /// The same for who holds the file in some way; none: a log must be copied before.
    pub(crate) fn read_held(
        &self,
        port: &mut Port,
        ino: Ino,
        data: &Data,
        offset: u64,
        len: u32,
    ) -> Result<Option<Vec<u8>>> {
        let now = self.now();
        let found = self.look(|core| {
            let inode = core.file(ino)?;
            if inode.redo.is_some() && !data.has_held() {
                return Ok(None);
            }
            core.runs_read(ino, &inode, (offset, len), now).map(Some)
        })?;
        let Some((range, runs)) = found else {
            return Ok(None);
        };
        let first = range.start;
        let mut bytes = read_runs(port, range, &runs)?;
        data.lay_over(first, &mut bytes);
        Ok(Some(bytes))
    }

    /// Writes bytes at an offset, or at the end. Returns where they went: less than
    /// all, where that much was there when the next piece failed, or the file may not
    /// be longer (POSIX, `write`).
    ///
    /// # Errors
    /// `EFBIG`, `ENOSPC`, and what the volume says. Of bytes that the file had, what came
    /// before the failing page may be there.
    pub fn write(
        &self,
        port: &mut Port,
        ino: Ino,
        offset: Option<u64>,
        data: &Bytes,
        durable: bool,
    ) -> Result<Range<u64>> {
        if let Some(written) = self.extend_plain(ino, offset, data, durable)? {
            return Ok(written);
        }
        let all = |offset: u64| offset..offset + data.len() as u64;
        // Nearly always nobody is in the way, and one look tells.
        if let Some(offset) = offset {
            match self.try_overwrite(ino, offset, data, durable)? {
                Tried::Is(write) => {
                    port.call_all(write.requests)?;
                    return Ok(all(offset));
                }
                Tried::InTheWay => {
                    let lock = self.data_lock(ino)?;
                    let _shared = lock.read();
                    if !lock.has_held() && self.overwrite(port, ino, offset, data, durable)? {
                        return Ok(all(offset));
                    }
                }
                Tried::Not => {}
            }
        }
        let lock = self.data_lock(ino)?;
        let _alone = lock.write();
        self.settle_all(port, ino)?;
        let inode = self.look(|core| core.file(ino))?;
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
        if end > inode.size && inode.flags & TRIM != 0 {
            self.finish(port, ino)?;
        }
        self.unshare(port, ino, offset / PAGE..pages_of(end))?;
        let written = match self.overwrite(port, ino, offset, data, durable)? {
            true => offset..end,
            false => self.extend(port, ino, offset, data, durable)?,
        };
        lock.patch_held(offset, &data[..(written.end - offset) as usize]);
        Ok(written)
    }

    /// Begins a write of which the pipe will tell under this name. False: it is one that
    /// changes more than bytes which the file has, or may have to wait for what is under
    /// way; nothing has begun, and [`Fs::write`] can do it once the pipe is empty.
    ///
    /// # Errors
    /// `EISDIR`, `EINVAL`, and what the volume says.
    pub fn begin_write(
        &self,
        pipe: &mut Pipe<'_>,
        name: u64,
        ino: Ino,
        offset: u64,
        data: &Bytes,
        durable: bool,
    ) -> Result<bool> {
        match self.try_overwrite(ino, offset, data, durable)? {
            Tried::Is(write) => {
                pipe.begin(name, write);
                Ok(true)
            }
            Tried::Not | Tried::InTheWay => Ok(false),
        }
    }

    /// Takes the file's lock, if it can be had at once, for a write within a file without
    /// holes.
    fn try_overwrite(&self, ino: Ino, offset: u64, data: &Bytes, durable: bool) -> Result<Tried> {
        let now = self.now();
        let bytes = data.len();
        self.look(|core| {
            let live = core.live.get(&ino);
            let Some(held) = live.and_then(|live| live.data.try_read()) else {
                return Ok(Tried::InTheWay);
            };
            let requests = core.overwriting(ino, offset, data, durable, now)?;
            Ok(match requests.filter(|requests| !requests.is_empty()) {
                Some(requests) => Tried::Is(Overwrite {
                    held,
                    requests,
                    bytes,
                }),
                None => Tried::Not,
            })
        })
    }

    /// Writes within a file without holes; false: it is not that.
    fn overwrite(
        &self,
        port: &mut Port,
        ino: Ino,
        offset: u64,
        data: &Bytes,
        durable: bool,
    ) -> Result<bool> {
        let now = self.now();
        let requests = self.look(|core| core.overwriting(ino, offset, data, durable, now))?;
        let is_that = requests.is_some();
        if let Some(requests) = requests {
            port.call_all(requests)?;
        }
        Ok(is_that)
    }

    /// Writes with the inode, as far as it goes. The caller holds the file alone.
    fn extend(
        &self,
        port: &mut Port,
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
            match self.extend_by(port, ino, at, part, durable) {
                Err(error) if at == offset => return Err(error),
                // Whoever tries the rest hears of it.
                Err(_) => break,
                Ok(()) => at = next,
            }
        }
        Ok(offset..at)
    }

    /// Writes one piece as a whole.
    fn extend_by(
        &self,
        port: &mut Port,
        ino: Ino,
        at: u64,
        part: &[u8],
        durable: bool,
    ) -> Result<()> {
        let end = at + part.len() as u64;
        let extension = Extension {
            at,
            data: part,
            holes: self.holes(port, ino, at / PAGE..pages_of(end))?,
            durable,
        };
        let now = self.now();
        self.change(|tx| extension.apply(tx, ino, now))
    }

    /// Which of a file's pages are not mapped. The caller holds the file alone.
    pub(crate) fn holes(
        &self,
        port: &mut Port,
        ino: Ino,
        pages: Range<u64>,
    ) -> Result<BTreeSet<u64>> {
        let (inode, runs) = self.look(|core| {
            let inode = core.file(ino)?;
            let bytes = pages.start * PAGE..pages.end * PAGE;
            let (runs, _) = runs(&inode, bytes, &mut |page| core.page(page))?;
            Ok((inode, runs))
        })?;
        let mut holes: BTreeSet<u64> = pages.collect();
        if inode.is_dense() {
            holes.retain(|&page| page >= pages_of(inode.size));
            return Ok(holes);
        }
        for (at, place, len) in runs {
            let first = at / PAGE;
            let of_space = place / PAGE..(place + len) / PAGE;
            port.mapped(of_space.clone(), |mapped| {
                for page in mapped {
                    holes.remove(&(first + page - of_space.start));
                }
            })?;
        }
        Ok(holes)
    }

    /// The same of several ranges of pages.
    pub(crate) fn holes_of(
        &self,
        port: &mut Port,
        ino: Ino,
        ranges: impl IntoIterator<Item = Range<u64>>,
    ) -> Result<BTreeSet<u64>> {
        let mut holes = BTreeSet::new();
        for pages in ranges {
            holes.append(&mut self.holes(port, ino, pages)?);
        }
        Ok(holes)
    }

    /// Overwrites bytes of several places of a file, all of them or none, for whoever
    /// reads meanwhile and after a crash. They lie within the file and in at most
    /// [`TOGETHER_PAGES_MAX`] pages, and do not overlap. Once nobody else has the file any
    /// more, `is_wanted` is asked whether to go on: what somebody asked for who is gone by
    /// then must not overwrite what others wrote who knew that.
    ///
    /// # Errors
    /// `EINTR` when it is not wanted;
    /// `EINVAL` when they are not as they must be; `EOPNOTSUPP` for a file that the kernel
    /// keeps pages of, or that a write takes rights away from; and as [`Fs::write`].
    pub fn write_together(
        &self,
        port: &mut Port,
        ino: Ino,
        parts: &[(u64, Bytes)],
        is_wanted: impl FnOnce() -> bool,
    ) -> Result<()> {
        // Else it could be closed and freed meanwhile: who asks may be killed.
        self.open(ino)?;
        let written = self.write_open_together(port, ino, parts, is_wanted);
        let written = written.and_then(|()| self.drop_changed_pages(ino));
        self.release_by(ino, Some(port));
        written
    }

    fn write_open_together(
        &self,
        port: &mut Port,
        ino: Ino,
        parts: &[(u64, Bytes)],
        is_wanted: impl FnOnce() -> bool,
    ) -> Result<()> {
        let lock = self.data_lock(ino)?;
        let _alone = lock.write();
        if !is_wanted() {
            return Err(Errno::INTR.into());
        }
        self.settle_all(port, ino)?;
        let inode = self.look(|core| core.file(ino))?;
        if lock.is_mapped() || inode.is_armed() {
            return Err(Errno::OPNOTSUPP.into());
        }
        let ranges = ranges_together(parts, inode.size)?;
        let pages = |range: &Range<u64>| range.start / PAGE..pages_of(range.end);
        for range in &ranges {
            self.unshare(port, ino, pages(range))?;
        }
        self.take_spans(ino, ranges.iter().flat_map(pages))?;
        let holes = self.holes_of(port, ino, ranges.iter().map(pages))?;
        let now = self.now();
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            for (offset, data) in parts {
                write_pages(tx, &mut inode, *offset, data, &holes)?;
            }
            inode.mtime = now;
            inode.ctime = now;
            tx.make_durable();
            tx.put(ino, &inode)
        })?;
        self.core().note_beside(ino);
        Ok(())
    }

    /// Cuts a file or lengthens it by a hole.
    ///
    /// # Errors
    /// `EFBIG`, `EISDIR`, `EINVAL`.
    pub fn set_size(&self, port: &mut Port, ino: Ino, size: u64) -> Result<Attr> {
        if size > FILE_BYTES_MAX {
            return Err(Errno::FBIG.into());
        }
        let lock = self.data_lock(ino)?;
        let _telling = lock.kernel_pages.await_telling();
        let _alone = lock.write();
        self.making_room(|| self.settle_all(port, ino))?;
        self.drop_capabilities(ino)?;
        let set = match size < self.look(|core| core.file(ino))?.size {
            true => self.making_room(|| self.set_size_alone(port, ino, size)),
            false => self.set_size_alone(port, ino, size),
        };
        // It may have been cut all the same.
        let size = self.look(|core| core.file(ino))?.size;
        self.clear_held(ino, &lock, size..FILE_BYTES_MAX);
        set
    }

    /// The caller holds the file alone. What fails may be run again.
    fn set_size_alone(&self, port: &mut Port, ino: Ino, size: u64) -> Result<Attr> {
        let now = self.now();
        let mut old = self.look(|core| core.file(ino))?;
        if size > old.size && old.flags & TRIM != 0 {
            self.finish(port, ino)?;
            old = self.look(|core| core.file(ino))?;
        }
        let is_cut = size < old.size || old.flags & (RESERVED | TRIM) != 0;
        if is_cut {
            // What is freed or zeroed of the last span must be of its own.
            let end = pages_of(size);
            self.unshare(port, ino, end.saturating_sub(1)..end)?;
        }
        let tail = match is_cut && !size.is_multiple_of(PAGE) {
            true => self
                .holes(port, ino, size / PAGE..size / PAGE + 1)?
                .is_empty(),
            false => false,
        };
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            if is_cut {
                inode.flags |= TRIM;
                inode.flags &= !RESERVED;
            }
            if tail && size < inode.size {
                let within = (size % PAGE) as usize;
                let zeroes = [0; PAGE_BYTES];
                write_pages(tx, &mut inode, size, &zeroes[within..], &BTreeSet::new())?;
            }
            inode.size = size;
            inode.mtime = now;
            inode.ctime = now;
            tx.put(ino, &inode)
        })?;
        if is_cut {
            let was_dense = old.is_dense() && size <= old.size;
            let pages = was_dense.then(|| pages_of(size));
            let trimmed = self.making_room(|| self.trim(port, ino, pages));
            // It has its new size: what is not freed now is later.
            let _ = self.leave(ino, trimmed);
        }
        self.attr(ino)
    }

    /// Puts the times of a file that are only noted, here or by guests, into its inode.
    pub(crate) fn note_times(&self, ino: Ino) -> Result<()> {
        let is_noted = {
            let mut core = self.core();
            core.note_guests(ino);
            let live = core.live.get(&ino);
            live.is_some_and(|live| !live.noted.is_empty())
        };
        if !is_noted {
            return Ok(());
        }
        self.making_room(|| {
            self.change(|tx| {
                let inode = tx.inode(ino)?;
                tx.put(ino, &inode)
            })
        })
    }

    /// Puts all noted times into their inodes, also those when guests wrote. To be called
    /// once in a while: a crash loses what was noted since.
    ///
    /// # Errors
    /// What was said first; what failed is tried again by the next call.
    pub fn put_times(&self) -> Result<()> {
        let mut noted = {
            let mut core = self.core();
            core.note_all_guests();
            std::mem::take(&mut core.noted)
        };
        let mut first = Ok(());
        while let Some(ino) = noted.pop_first() {
            let put = match self.note_times(ino) {
                Err(FsError::Posix(Errno::STALE)) => Ok(()),
                put => put,
            };
            if let Err(cause) = &put {
                let mut core = self.core();
                core.noted.insert(ino);
                // The volume would say it of each.
                if matches!(cause, FsError::Space(_)) {
                    core.noted.append(&mut noted);
                }
            }
            first = first.and(put);
        }
        first
    }

    /// Copies bytes from one file to another, or within one where they do not
    /// overlap; fewer at the end of the first. Whole spans are shared, where they lie alike
    /// and the other has none there. Returns how many.
    ///
    /// # Errors
    /// `EINVAL` for ranges of one file that overlap, and as [`Fs::write`].
    pub fn copy(
        &self,
        port: &mut Port,
        (from, mut source): (Ino, u64),
        (to, mut target): (Ino, u64),
        len: u64,
    ) -> Result<u64> {
        const STEP: u64 = 1 << 20;
        let is_apart = from != to || source.abs_diff(target) >= len;
        if !is_apart {
            return Err(Errno::INVAL.into());
        }
        // What is copied to the same file does not make it longer to copy.
        let size = self.look(|core| {
            let inode = core.file(from)?;
            core.end_of(from, &inode)
        })?;
        let len = len.min(size.saturating_sub(source));
        if len > 0 {
            let lock = self.data_lock(to)?;
            let _alone = lock.write();
            self.drop_capabilities(to)?;
        }
        let fits = target
            .checked_add(len)
            .is_some_and(|end| end <= FILE_BYTES_MAX);
        let mut copied = 0;
        while copied < len {
            let to_alike = to_alike(source, target);
            let shared = match to_alike {
                Some(0) if fits => self.share(port, (from, source), (to, target), len - copied),
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
            let bytes = Bytes::from(self.read(port, from, source, step as u32)?);
            if bytes.is_empty() {
                break;
            }
            match self.write(port, to, Some(target), &bytes, false) {
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

/// The bytes of parts that are written together, in order.
fn ranges_together(parts: &[(u64, Bytes)], size: u64) -> Result<Vec<Range<u64>>> {
    let range = |(offset, data): &(u64, Bytes)| {
        let end = offset.checked_add(data.len() as u64)?;
        (!data.is_empty() && end <= size).then_some(*offset..end)
    };
    let ranges: Option<Vec<_>> = parts.iter().map(range).collect();
    let mut ranges = ranges.ok_or(Errno::INVAL)?;
    ranges.sort_unstable_by_key(|range| range.start);
    let overlap = ranges.windows(2).any(|pair| pair[0].end > pair[1].start);
    let pages = |range: &Range<u64>| pages_of(range.end) - range.start / PAGE;
    // Counts a page twice that two parts lie in.
    let pages: u64 = ranges.iter().map(pages).sum();
    match overlap || pages > TOGETHER_PAGES_MAX {
        true => Err(Errno::INVAL.into()),
        false => Ok(ranges),
    }
}

/// Frees what of a span lies within pages of the file; some of it does.
pub(crate) fn discard(piece: &Piece, pages: &Range<u64>) -> Request {
    let Span { page, order } = piece.span;
    let first = piece.at.max(pages.start);
    let end = (piece.at + (1 << order)).min(pages.end);
    Request::Discard {
        offset: (page + first - piece.at) * PAGE,
        len: (end - first) * PAGE,
    }
}

fn read_runs(port: &mut Port, range: Range<u64>, runs: &[(u64, u64, u64)]) -> Result<Vec<u8>> {
    let len = range.end - range.start;
    if let [(_, place, all)] = runs
        && *all == len
    {
        return port.read(*place, len as u32);
    }
    let mut bytes = vec![0; len as usize];
    for &(at, place, len) in runs {
        let first = (at - range.start) as usize;
        let part = port.read(place, len as u32)?;
        bytes[first..first + part.len()].copy_from_slice(&part);
    }
    Ok(bytes)
}

/// Puts bytes of a file into the transaction.
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
        let run = map::ensure(tx, inode, page)?;
        tx.write_data(run.page, within, part, is_new)?;
        inode.pages += u64::from(is_new);
        at += part.len() as u64;
        rest = after;
    }
    Ok(())
}
