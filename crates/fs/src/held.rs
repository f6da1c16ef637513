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
use crate::board::Data;
use crate::data::{PAGE, TOGETHER_PAGES_MAX, pages_of, write_pages};
use crate::error::{FsError, Result};
use crate::format::{FILE_BYTES_MAX, Ino, Page, Time};
use crate::io::Port;
use crate::map;
use bytes::Bytes;
use pagemesh_base::space::SpaceError;
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, MutexGuard, PoisonError};

/// Pages that a file system holds of all files, 256 MiB: what comes then has the file with
/// the most of them changed, synced or not.
pub const HELD_PAGES_MAX: u64 = 1 << 16;
/// Pages up to which more is held while there is no room to put it; less than a log may have
/// ([`crate::redo`]), by what the kernel sends at once.
pub const STUCK_PAGES_MAX: u64 = HELD_PAGES_MAX / 2 * 3;
/// How long a page is held: what is lost with the machine is not older, as with other file
/// systems (Linux, `dirty_expire_centisecs`).
pub const HELD_SECONDS_MAX: i64 = 30;
const TOGETHER: usize = TOGETHER_PAGES_MAX as usize;
/// Spans that are taken in one transaction: each may need a map page of each level.
const SPANS_TAKEN_MAX: usize = 8;

/// Pages of one file, whole ones: zeroes behind its end.
#[derive(Default)]
pub(crate) struct Held {
    pages: BTreeMap<u64, Arc<Page>>,
    /// When the first of them came.
    since: Option<Time>,
    /// The kernel was refused something, and takes it for written: it is gone.
    is_refused: bool,
}

/// Pages that go into a file as one, in order.
pub(crate) type Pages = [(u64, Arc<Page>)];

impl Held {
    fn put(&mut self, page: u64, bytes: Arc<Page>, now: Time) {
        self.pages.insert(page, bytes);
        self.since.get_or_insert(now);
    }

    /// They are in the file.
    fn end(&mut self) {
        self.pages.clear();
        self.since = None;
    }

    /// Has the pages that are held show these bytes, too.
    fn patch(&mut self, offset: u64, data: &[u8]) {
        let bytes = offset..offset + data.len() as u64;
        for (&page, held) in self.pages.range_mut(pages_with(&bytes)) {
            let (within, at) = common(page, &bytes);
            Arc::make_mut(held)[within].copy_from_slice(&data[at]);
        }
    }

    /// Nothing of these bytes is held any more: they are zeroes.
    fn clear(&mut self, bytes: Range<u64>) {
        let whole = pages_of(bytes.start)..bytes.end / PAGE;
        self.pages.retain(|page, _| !whole.contains(page));
        if self.pages.is_empty() {
            self.since = None;
        }
        for (&page, held) in self.pages.range_mut(pages_with(&bytes)) {
            let (within, _) = common(page, &bytes);
            Arc::make_mut(held)[within].fill(0);
        }
    }
}

/// How many pages are held of which files.
#[derive(Default)]
pub(crate) struct HeldFiles {
    pages: BTreeMap<Ino, u64>,
    all: u64,
    /// Files that stay open for what is held of them.
    kept: BTreeSet<Ino>,
}

impl HeldFiles {
    pub(crate) fn set(&mut self, ino: Ino, pages: u64) {
        let before = match pages {
            0 => self.pages.remove(&ino),
            pages => self.pages.insert(ino, pages),
        };
        self.all = self.all - before.unwrap_or(0) + pages;
    }

    pub(crate) fn has(&self, ino: Ino) -> bool {
        self.pages.contains_key(&ino)
    }

    pub(crate) fn pages_of(&self, ino: Ino) -> u64 {
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
pub(crate) enum How {
    Whole,
    /// In pieces, where there is no room for all at once.
    MayPart,
}

impl Data {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nobody has it open any more who could have stored what was refused.
    pub(crate) fn forget_refused(&self) {
        self.held().is_refused = false;
    }

    /// Whether something came from mappings of it and is in no page of it yet.
    pub(crate) fn has_held(&self) -> bool {
        !self.held().pages.is_empty()
    }

    /// Whether nothing that was stored into mappings waits for a sync, or was refused.
    pub(crate) fn holds_nothing(&self) -> bool {
        let held = self.held();
        held.pages.is_empty() && !held.is_refused
    }

    /// Lays what is held over bytes that were read.
    pub(crate) fn lay_over(&self, offset: u64, bytes: &mut [u8]) {
        let range = offset..offset + bytes.len() as u64;
        for (&page, held) in self.held().pages.range(pages_with(&range)) {
            let (within, at) = common(page, &range);
            bytes[at].copy_from_slice(&held[within]);
        }
    }

    /// Bytes were written to the file. The caller holds it alone.
    pub(crate) fn patch_held(&self, offset: u64, data: &[u8]) {
        self.held().patch(offset, data);
    }
}

impl Fs {
    /// Takes in what the kernel sends of a mapping. What lies beyond the end of the file
    /// is nothing. What is refused is lost, and syncs of the file say so until nobody has it
    /// open any more.
    ///
    /// # Errors
    /// `EISDIR`, `EINVAL`, what the volume says, and as [`Fs::sync`] where too much is held.
    pub fn hold(&self, port: &mut Port, ino: Ino, offset: u64, data: &Bytes) -> Result<()> {
        let lock = self.data_lock(ino)?;
        let held = self.hold_of(port, ino, &lock, offset, data);
        if let Err(cause) = &held {
            tracing::error!(ino = ino.0, %cause, "what was stored into a mapping of a file is lost");
            lock.held().is_refused = true;
        }
        held
    }

    fn hold_of(
        &self,
        port: &mut Port,
        ino: Ino,
        lock: &Data,
        offset: u64,
        data: &Bytes,
    ) -> Result<()> {
        if !lock.is_mapped() {
            self.bar_guests(ino)?;
        }
        self.make_room_to_hold(port, ino, pages_of(data.len() as u64) + 1)?;
        let _alone = lock.write();
        // There may have been no room for its end when guests were barred.
        self.making_room(|| self.settle_all(port, ino))?;
        let now = self.now();
        let size = self.look(|core| {
            core.check_running()?;
            let inode = core.file(ino)?;
            core.note_write(ino, now);
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
                false => self.shown_page(port, ino, lock, page)?,
            };
            let part = &data[(at - offset) as usize..(to - offset) as usize];
            bytes[(at - first) as usize..(to - first) as usize].copy_from_slice(part);
            pages.push((page, Arc::from(bytes)));
            at = last;
        }
        let is_first = !lock.has_held();
        for (page, bytes) in pages {
            lock.held().put(page, bytes, now);
        }
        self.count_held(ino, lock);
        if is_first && lock.has_held() {
            self.tell_unkept(ino);
        }
        Ok(())
    }

    /// Whether all that was stored into mappings of a file came here.
    pub(crate) fn check_refused(&self, ino: Ino) -> Result<()> {
        let core = self.core();
        let live = core.live.get(&ino);
        match live.is_some_and(|live| live.data.held().is_refused) {
            true => Err(Errno::IO.into()),
            false => Ok(()),
        }
    }

    /// A page of a file as whoever reads it sees it. The caller holds the file.
    fn shown_page(&self, port: &mut Port, ino: Ino, data: &Data, page: u64) -> Result<Box<Page>> {
        let mut bytes = Box::new([0; PAGE_BYTES]);
        let read = self.read_held(port, ino, data, page * PAGE, PAGE_BYTES as u32)?;
        let read = read.unwrap_or_default();
        bytes[..read.len()].copy_from_slice(&read);
        Ok(bytes)
    }

    fn count_held(&self, ino: Ino, data: &Data) {
        let mut core = self.core();
        let pages = data.held().pages.len() as u64;
        core.held.set(ino, pages);
    }

    /// Puts what is held of the files with most of it into them until there is room for so
    /// many pages more of this one. What cannot be put is held on up to a bound, and beyond it
    /// only a file is refused that cannot be put itself.
    fn make_room_to_hold(&self, port: &mut Port, ino: Ino, pages: u64) -> Result<()> {
        let has_room = |most| self.core().held.all + pages <= most;
        if has_room(HELD_PAGES_MAX) {
            return Ok(());
        }
        let files = self.core().held.by_pages();
        let mut own = Ok(());
        for file in files {
            tracing::debug!(
                ino = file.0,
                "a file is changed before a sync: too much is held"
            );
            let put = self.put_pinned(port, file);
            if has_room(HELD_PAGES_MAX) {
                return Ok(());
            }
            if file == ino {
                own = put;
            }
        }
        match has_room(STUCK_PAGES_MAX) {
            true => Ok(()),
            false => own,
        }
    }

    /// What is held of a file goes into it, which nobody may be using any more by now:
    /// until that is done its number is no other file's. Where there is no room for all of
    /// it at once, in pieces: nobody has synced it.
    fn put_pinned(&self, port: &mut Port, ino: Ino) -> Result<()> {
        match self.open(ino) {
            Err(FsError::Posix(Errno::STALE)) => return Ok(()),
            opened => opened?,
        };
        let put = self.put_held(port, ino, How::MayPart);
        self.release_by(ino, Some(port));
        put
    }

    /// Nothing of these bytes is held any more. The caller holds the file alone.
    pub(crate) fn clear_held(&self, ino: Ino, data: &Data, bytes: Range<u64>) {
        if data.has_held() {
            data.held().clear(bytes);
            self.count_held(ino, data);
        }
    }

    /// What is held of a file goes into it, all or nothing, for whoever reads it after a
    /// crash.
    ///
    /// # Errors
    /// What the volume says; then it is held as before.
    pub(crate) fn put_held(&self, port: &mut Port, ino: Ino, how: How) -> Result<()> {
        let data = {
            let mut core = self.core();
            let live = core.live.get(&ino);
            let data = live.map(|live| Arc::clone(&live.data));
            let Some(data) = data.filter(|data| data.has_held()) else {
                core.held.set(ino, 0);
                return Ok(());
            };
            data
        };
        let _alone = data.write();
        self.put_held_alone(port, ino, &data, how)
    }

    fn put_held_alone(&self, port: &mut Port, ino: Ino, data: &Data, how: How) -> Result<()> {
        self.settle_all(port, ino)?;
        let end = pages_of(self.look(|core| core.file(ino))?.size);
        let pages: Vec<(u64, Arc<Page>)> = {
            let held = data.held();
            let within = held.pages.range(..end);
            within
                .map(|(&page, bytes)| (page, Arc::clone(bytes)))
                .collect()
        };
        for run in runs(&pages) {
            self.unshare(port, ino, run)?;
        }
        self.take_spans(ino, pages.iter().map(|&(page, _)| page))?;
        let put = match pages.len() <= TOGETHER {
            true => self.put_pages(port, ino, &pages),
            false => self.put_by_redo(port, ino, &pages),
        };
        match put {
            Err(error) if how == How::MayPart && error.errno() == Errno::NOSPC => {
                // A log that is named already must be copied before.
                self.finish_redo(port, ino)?;
                pages
                    .chunks(TOGETHER)
                    .try_for_each(|pages| self.put_pages(port, ino, pages))?;
            }
            put => put?,
        }
        data.held().end();
        self.core().held.set(ino, 0);
        Ok(())
    }

    /// Puts pages into a file in one transaction. The caller holds the file alone; there
    /// are spans for them that are its own.
    pub(crate) fn put_pages(&self, port: &mut Port, ino: Ino, pages: &Pages) -> Result<()> {
        let holes = self.holes_of(port, ino, runs(pages))?;
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            for (page, bytes) in pages {
                let at = page * PAGE;
                let len = inode.size.saturating_sub(at).min(PAGE) as usize;
                write_pages(tx, &mut inode, at, &bytes[..len], &holes)?;
            }
            tx.make_durable();
            tx.put(ino, &inode)
        })
    }

    /// Sees to it that there are spans for these pages of a file, with holes in them. The
    /// caller holds the file alone.
    pub(crate) fn take_spans(&self, ino: Ino, pages: impl Iterator<Item = u64>) -> Result<()> {
        let mut missing = self.look(|core| {
            let inode = core.file(ino)?;
            let mut missing = Vec::new();
            let mut known = 0;
            for page in pages {
                if page < known {
                    continue;
                }
                known = page + map::to_next_span(page);
                if map::find(&inode.map, page, &mut |page| core.page(page))?.is_none() {
                    missing.push(page);
                }
            }
            Ok(missing)
        })?;
        while !missing.is_empty() {
            let left = missing.split_off(missing.len().min(SPANS_TAKEN_MAX));
            self.change(|tx| {
                let mut inode = tx.inode(ino)?;
                for &page in &missing {
                    map::ensure(tx, &mut inode, page)?;
                }
                tx.put(ino, &inode)
            })?;
            missing = left;
        }
        Ok(())
    }

    /// What is held of all files goes into them; the first error counts.
    pub(crate) fn put_all_held(&self, port: &mut Port) -> Result<()> {
        let all = self.core().held.by_pages();
        self.put_each_held(port, all)
    }

    fn put_each_held(&self, port: &mut Port, files: Vec<Ino>) -> Result<()> {
        let put = files.into_iter().map(|ino| self.put_pinned(port, ino));
        put.fold(Ok(()), Result::and)
    }

    /// What is held for long goes into its file. To be called once in a while.
    ///
    /// # Errors
    /// What the volume says.
    pub fn put_old_held(&self) -> Result<()> {
        let now = self.now();
        // A clock may be set back.
        let is_old = |since: Time| now.sec - since.sec >= HELD_SECONDS_MAX || now.sec < since.sec;
        let (kept, old) = {
            let core = self.core();
            let kept = core.held.kept.clone();
            let since = |ino: &Ino| core.live.get(ino)?.data.held().since;
            let others = core.held.pages.keys().filter(|ino| !kept.contains(ino));
            let old = others.filter(|ino| since(ino).is_some_and(is_old));
            let old: Vec<Ino> = old.copied().collect();
            (kept, old)
        };
        if kept.is_empty() && old.is_empty() {
            return Ok(());
        }
        let mut port = self.borrow()?;
        // Closed once more, which may keep them again.
        for ino in kept {
            self.core().held.kept.remove(&ino);
            self.release_by(ino, Some(&mut port));
        }
        self.put_each_held(&mut port, old)
    }

    /// Pages that are held of all files.
    #[must_use]
    pub fn held_pages(&self) -> u64 {
        self.core().held.all
    }

    /// A file is about to be closed for the last time: what is held of it goes into it,
    /// unless it goes itself. Where no copy is in reach it is kept open until one is. Whether
    /// that may have helped.
    pub(crate) fn put_held_at_end(&self, ino: Ino, port: Option<&mut Port>) -> bool {
        let inode = self.look(|core| core.inode(ino));
        if inode.is_ok_and(|inode| inode.links == 0) {
            return false;
        }
        let put = self.with_port(port, |port| self.put_held(port, ino, How::MayPart));
        let Err(cause) = put else { return true };
        let data = {
            let mut core = self.core();
            let core = &mut *core;
            let live = core.live.get_mut(&ino).filter(|live| live.opens <= 1);
            if let Some(live) = live
                && is_passing(&cause)
            {
                tracing::warn!(ino = ino.0, %cause, "what was stored into mappings of a file waits");
                live.opens += 1;
                core.held.kept.insert(ino);
                return false;
            }
            let live = core.live.get(&ino).filter(|live| live.opens <= 1);
            live.map(|live| Arc::clone(&live.data))
        };
        if let Some(data) = data {
            tracing::error!(
                ino = ino.0, %cause,
                "what was stored into mappings of a file and not synced is lost"
            );
            let _alone = data.write();
            self.clear_held(ino, &data, 0..FILE_BYTES_MAX);
        }
        false
    }
}

/// Whether what failed so may succeed later, though nobody does anything about it.
fn is_passing(cause: &FsError) -> bool {
    matches!(
        cause,
        FsError::Space(SpaceError::Unavailable(_) | SpaceError::Busy(_))
    )
}

/// Pages that have some of these bytes.
fn pages_with(bytes: &Range<u64>) -> Range<u64> {
    bytes.start / PAGE..pages_of(bytes.end)
}

/// What a page has of these bytes: where in the page, and where among them.
fn common(page: u64, bytes: &Range<u64>) -> (Range<usize>, Range<usize>) {
    let first = bytes.start.max(page * PAGE);
    let last = bytes.end.min((page + 1) * PAGE);
    let from = |base: u64| (first - base) as usize..(last - base) as usize;
    (from(page * PAGE), from(bytes.start))
}

/// Pages that follow each other.
pub(crate) fn runs(pages: &Pages) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for &(page, _) in pages {
        match runs.last_mut() {
            Some(run) if run.end == page => run.end += 1,
            _ => runs.push(page..page + 1),
        }
    }
    runs
}
