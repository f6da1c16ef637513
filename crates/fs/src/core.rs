//! What the one lock of a file system guards, and how changes leave it.
//!
//! An operation runs under the lock as a [`Tx`]: it reads pages as the operations
//! before it left them, and writes copies. When it has succeeded, its pages join
//! the **batch**: what the next transaction of the space will hold. Whoever waits
//! for a batch and finds none on its way takes it along, without the lock; so one
//! transaction is on its way at a time, each begins where the one before ended, and
//! under load several operations share one.
//!
//! Invariants:
//! - a batch is one [`Request::Transact`]: all of it or nothing;
//! - a page in the batch, or on its way, counts before the cache and the space;
//! - what a batch frees (spans, numbers) is given out again only when it is
//!   committed; what it took comes back when it failed;
//! - pages of files never enter the cache: they change without this lock;
//! - no more changes are taken once one has failed for another reason than want of
//!   room, or something was found damaged.

use crate::board::Data;
use crate::cache::Cache;
use crate::check_ino;
use crate::error::{FsError, Result};
use crate::format::{
    Damaged, Head, INODE_BYTES, INODES_PER_PAGE, Ino, Inode, Page, Time, inode_at,
};
use crate::hash::{NumberMap, NumberSet};
use crate::held::HeldFiles;
use crate::io::Port;
use crate::left::Left;
use crate::map::{self, Piece};
use crate::numbers::Numbers;
use crate::share::Shares;
use crate::spans::{Span, Spans};
use crate::unseen::UnseenWrites;
use bytes::Bytes;
use pagemesh_base::bytes::put;
use pagemesh_base::slice::Part;
use pagemesh_base::space::{Request, SpaceError, TRANSACTION_PAGES_MAX};
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Pages that one operation may change; files are written in pieces.
pub(crate) const CHANGED_PAGES_MAX: usize = TRANSACTION_PAGES_MAX as usize;

/// A page that a transaction changes.
#[derive(Clone)]
enum Change {
    /// Of the name space.
    Kept(Arc<Page>),
    /// Of a file.
    Data(Arc<Page>),
    Cleared,
}

type Changes = BTreeMap<u64, Change>;

/// What came of a batch.
type Outcome = Arc<OnceLock<std::result::Result<(), SpaceError>>>;

/// What becomes one transaction.
#[derive(Default)]
pub(crate) struct Batch {
    changes: Changes,
    books: Books,
    outcome: Outcome,
    durable: bool,
}

/// What else a change means, in memory.
#[derive(Default)]
struct Books {
    spans_taken: Vec<Span>,
    spans_given: Vec<Span>,
    /// Spans that more places name, or fewer.
    shared: Vec<(Span, i64)>,
    inos_taken: Vec<Ino>,
    inos_given: Vec<Ino>,
    /// Noted times that are in their inodes now.
    times_put: Vec<(Ino, Noted)>,
    pages: i64,
}

impl Books {
    fn add(&mut self, other: Books) {
        self.spans_taken.extend(other.spans_taken);
        self.spans_given.extend(other.spans_given);
        self.shared.extend(other.shared);
        self.inos_taken.extend(other.inos_taken);
        self.inos_given.extend(other.inos_given);
        self.times_put.extend(other.times_put);
        self.pages += other.pages;
    }
}

/// Times of an inode that are not in it yet.
#[derive(Clone, Copy, Default, PartialEq)]
pub(crate) struct Noted {
    pub(crate) mtime: Option<Time>,
    pub(crate) atime: Option<Time>,
}

impl Noted {
    pub(crate) fn is_empty(self) -> bool {
        self == Noted::default()
    }

    /// Has the times that this one does not.
    fn fill(&mut self, older: Noted) {
        self.mtime = self.mtime.or(older.mtime);
        self.atime = self.atime.or(older.atime);
    }
}

/// What is known of an inode only while somebody uses it.
#[derive(Default)]
pub(crate) struct Live {
    pub(crate) opens: u64,
    pub(crate) lookups: u64,
    /// Which run of what makes inodes began it; 0: none.
    pub(crate) made: u64,
    pub(crate) noted: Noted,
    pub(crate) data: Arc<Data>,
}

/// Everything behind the lock.
pub(crate) struct Core {
    pub(crate) head: Head,
    /// Pages of the space that spans may lie in.
    pub(crate) pages: u64,
    /// Pages in use: of files and of the name space.
    pub(crate) used: u64,
    pub(crate) numbers: Numbers,
    pub(crate) live: NumberMap<Ino, Live>,
    /// Runs of what makes inodes so far.
    pub(crate) makes: u64,
    /// What may have times that are not in the inode yet.
    pub(crate) noted: BTreeSet<Ino>,
    /// Files that have or had guests.
    pub(crate) boards: BTreeSet<Ino>,
    /// How often a file was lent room.
    pub(crate) growths: u64,
    /// Files that were written to past the kernel, by the mount, and that it was not told of.
    pub(crate) beside: BTreeSet<Ino>,
    /// Files that were written past the kernel, and whose watchers were not told of it.
    pub(crate) unseen: UnseenWrites,
    /// Files that something is held of.
    pub(crate) held: HeldFiles,
    /// Redo logs that were not ended: nobody else has their numbers.
    pub(crate) logs: NumberSet<Ino>,
    /// Orphans that are being freed, or left to be.
    pub(crate) going: NumberSet<Ino>,
    pub(crate) left: Left,
    /// Inodes whose pages are not theirs alone, or cannot be told.
    pub(crate) distrusted: NumberSet<Ino>,
    pub(crate) shares: Shares,
    spans: Spans,
    cache: Cache,
    port: Port,
    batch: Batch,
    on_its_way: Option<Changes>,
    /// Calls that wait for it.
    pub(crate) waiting: usize,
    /// What whoever wants to change something is told.
    stopped: Option<FsError>,
}

impl Core {
    pub(crate) fn new(
        head: Head,
        pages: u64,
        used: u64,
        numbers: Numbers,
        spans: Spans,
        port: Port,
    ) -> Core {
        Core {
            head,
            pages,
            used,
            numbers,
            live: NumberMap::default(),
            makes: 0,
            noted: BTreeSet::new(),
            boards: BTreeSet::new(),
            growths: 0,
            beside: BTreeSet::new(),
            unseen: UnseenWrites::default(),
            held: HeldFiles::default(),
            logs: NumberSet::default(),
            going: NumberSet::default(),
            left: Left::default(),
            distrusted: NumberSet::default(),
            shares: Shares::default(),
            spans,
            cache: Cache::default(),
            port,
            batch: Batch::default(),
            on_its_way: None,
            waiting: 0,
            stopped: None,
        }
    }

    /// A page as the last operation left it.
    pub(crate) fn page(&mut self, page: u64) -> Result<Arc<Page>> {
        if let Some(found) = self.changed(page) {
            return Ok(found);
        }
        if let Some(found) = self.cache.get(page) {
            return Ok(found);
        }
        let read: Arc<Page> = self.port.read_page(page)?.into();
        self.cache.put(page, read.clone());
        Ok(read)
    }

    /// A page of a file, as it is now.
    pub(crate) fn data_page(&mut self, page: u64) -> Result<Arc<Page>> {
        match self.changed(page) {
            Some(found) => Ok(found),
            None => Ok(self.port.read_page(page)?.into()),
        }
    }

    /// Runs of a range of pages of the space that hold data.
    pub(crate) fn mapped(&mut self, pages: Range<u64>) -> Result<Vec<Range<u64>>> {
        let mut runs = Vec::new();
        self.port.mapped(pages, |run| runs.push(run))?;
        Ok(runs)
    }

    fn changed(&self, page: u64) -> Option<Arc<Page>> {
        let on_its_way = self.on_its_way.as_ref();
        let change = self
            .batch
            .changes
            .get(&page)
            .or_else(|| on_its_way?.get(&page))?;
        Some(match change {
            Change::Kept(bytes) | Change::Data(bytes) => bytes.clone(),
            Change::Cleared => Arc::new([0; PAGE_BYTES]),
        })
    }

    /// An inode in use, with the times that are not in it yet.
    pub(crate) fn inode(&mut self, ino: Ino) -> Result<Inode> {
        self.begin().inode(ino)
    }

    /// Adds the times that are not in the inode yet.
    fn add_times(&self, ino: Ino, inode: &mut Inode) {
        if let Some(live) = self.live.get(&ino) {
            let mtime = live.noted.mtime;
            inode.mtime = mtime.unwrap_or(inode.mtime);
            inode.ctime = mtime.map_or(inode.ctime, |time| time.max(inode.ctime));
            inode.atime = live.noted.atime.unwrap_or(inode.atime);
        }
    }

    pub(crate) fn live(&mut self, ino: Ino) -> &mut Live {
        self.live.entry(ino).or_default()
    }

    /// An inode was made: counts its first lookup, and so many opens. Returns what
    /// [`Core::unmake`] takes if it comes to nothing.
    pub(crate) fn made(&mut self, ino: Ino, opens: u64) -> (Ino, u64) {
        self.makes += 1;
        let live = Live {
            opens,
            lookups: 1,
            made: self.makes,
            ..Live::default()
        };
        self.live.insert(ino, live);
        (ino, self.makes)
    }

    /// Somebody else may have got the inode's number since.
    pub(crate) fn unmake(&mut self, (ino, made): (Ino, u64)) {
        if self.live.get(&ino).is_some_and(|live| live.made == made) {
            self.live.remove(&ino);
        }
    }

    /// Spans of an inode that hold pages from `from` on, in order; at most so many.
    pub(crate) fn pieces(&mut self, inode: &Inode, from: u64, max: usize) -> Result<Vec<Piece>> {
        let mut pieces = Vec::new();
        map::visit(
            &inode.map,
            from,
            &mut |page| self.page(page),
            &mut |piece| {
                pieces.push(piece);
                pieces.len() < max
            },
            &mut |_| Ok(()),
        )?;
        Ok(pieces)
    }

    /// Whether changes are taken at all.
    pub(crate) fn check_running(&self) -> Result<()> {
        match &self.stopped {
            None => Ok(()),
            Some(told) => Err(told.clone()),
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        self.stopped.is_none()
    }

    /// Takes no more changes, because something is damaged.
    pub(crate) fn stop(&mut self, damage: String) {
        if self.stopped.is_none() {
            self.stopped = Some(FsError::ReadOnly(damage));
        }
    }

    /// Stops when what was found makes no sense: what is built on it makes none.
    pub(crate) fn note_damage<T>(&mut self, result: &Result<T>) {
        if let Err(FsError::Damaged { what, cause }) = result
            && self.stopped.is_none()
        {
            tracing::error!(%what, %cause, "the file system is damaged; no more changes are taken");
            self.stop(format!("{what} is damaged: {cause}"));
        }
    }

    /// Refuses the content of an inode that mounting found no reason to believe.
    pub(crate) fn check_trusted(&self, ino: Ino) -> Result<()> {
        match self.distrusted.contains(&ino) {
            false => Ok(()),
            true => Err(damaged_inode(
                ino,
                Damaged("its pages belong to others, too, or cannot be told".into()),
            )),
        }
    }

    /// Begins an operation.
    pub(crate) fn begin(&mut self) -> Tx<'_> {
        Tx {
            core: self,
            changes: NumberMap::default(),
            books: Books::default(),
            table: None,
            limit_bytes: None,
            reserve: None,
            durable: false,
        }
    }

    /// See [`crate::Fs::tend`].
    pub(crate) fn tend(&mut self, into: &mut Vec<RawFd>) -> Option<Instant> {
        self.port.tend(into)
    }

    /// Notes the time of a write; the inode gets it later.
    pub(crate) fn note_write(&mut self, ino: Ino, now: Time) {
        self.live(ino).noted.mtime = Some(now);
        self.noted.insert(ino);
    }

    pub(crate) fn outcome(&self) -> Outcome {
        self.batch.outcome.clone()
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.on_its_way.is_some()
    }

    /// Takes the batch along, as a request; [`Core::end`] must follow.
    pub(crate) fn take_batch(&mut self) -> (Batch, Request) {
        assert!(self.on_its_way.is_none(), "one transaction at a time");
        let batch = std::mem::take(&mut self.batch);
        let request = Request::Transact {
            parts: parts(&batch.changes),
            durable: batch.durable,
        };
        self.on_its_way = Some(batch.changes.clone());
        (batch, request)
    }

    /// Takes in what came of a batch.
    pub(crate) fn end(&mut self, batch: Batch, result: std::result::Result<(), SpaceError>) {
        self.on_its_way = None;
        match &result {
            Ok(()) => self.settle(batch.changes, batch.books),
            Err(cause) => self.fail(batch.books, cause),
        }
        let _ = batch.outcome.set(result);
    }

    fn settle(&mut self, changes: Changes, books: Books) {
        for (page, change) in changes {
            match change {
                Change::Kept(bytes) => self.cache.put(page, bytes),
                Change::Data(_) | Change::Cleared => self.cache.forget(page),
            }
        }
        for span in books.spans_given {
            (span.page..span.end()).for_each(|page| self.cache.forget(page));
            self.spans.give(span);
        }
        for ino in books.inos_given {
            self.going.remove(&ino);
            self.numbers.give(ino);
        }
    }

    /// Nothing of a batch happened, so nothing of the one that builds on it does.
    fn fail(&mut self, books: Books, cause: &SpaceError) {
        let next = std::mem::take(&mut self.batch);
        // The last first: of two times of an inode the later one counts.
        for books in [next.books, books] {
            self.undo(books);
        }
        let _ = next.outcome.set(Err(cause.clone()));
        if !matches!(cause, SpaceError::NoSpace(_)) {
            tracing::error!(%cause, "a change of the file system failed; no more are taken");
            self.stopped = Some(FsError::Stopped(cause.clone()));
        } else if let Ok(page) = self.page(0)
            && let Ok(head) = Head::decode(&page, self.pages)
        {
            self.head = head;
        }
    }

    fn undo(&mut self, books: Books) {
        self.used = self.used.wrapping_add_signed(-books.pages);
        for span in books.spans_taken {
            self.spans.give(span);
        }
        for ino in books.inos_taken {
            self.numbers.give(ino);
        }
        for (span, places) in books.shared {
            self.shares.add(span.page, -places);
        }
        for (ino, noted) in books.times_put.into_iter().rev() {
            if let Some(live) = self.live.get_mut(&ino) {
                live.noted.fill(noted);
                self.noted.insert(ino);
            }
        }
    }
}

/// Changes as parts: neighbours in one.
fn parts(changes: &Changes) -> Vec<Part> {
    const PAGE: u64 = PAGE_BYTES as u64;
    let mut parts = Vec::new();
    let mut written: Vec<u8> = Vec::new();
    let mut first = 0;
    let flush = |written: &mut Vec<u8>, first: u64, parts: &mut Vec<Part>| {
        if !written.is_empty() {
            parts.push(Part::Write {
                offset: first * PAGE,
                data: Bytes::from(std::mem::take(written)),
            });
        }
    };
    for (&page, change) in changes {
        let is_next = first + (written.len() / PAGE_BYTES) as u64 == page;
        match change {
            Change::Kept(bytes) | Change::Data(bytes) => {
                if !is_next || written.is_empty() {
                    flush(&mut written, first, &mut parts);
                    first = page;
                }
                written.extend_from_slice(&bytes[..]);
            }
            Change::Cleared => {
                flush(&mut written, first, &mut parts);
                match parts.last_mut() {
                    Some(Part::Clear { offset, len }) if *offset + *len == page * PAGE => {
                        *len += PAGE;
                    }
                    _ => parts.push(Part::Clear {
                        offset: page * PAGE,
                        len: PAGE,
                    }),
                }
            }
        }
    }
    flush(&mut written, first, &mut parts);
    parts
}

pub(crate) fn damaged_inode(ino: Ino, cause: Damaged) -> FsError {
    FsError::Damaged {
        what: format!("inode {}", ino.0),
        cause,
    }
}

/// A page that an operation changes.
enum Draft {
    Kept(Arc<Page>),
    Data(Arc<Page>),
    Cleared,
}

/// An operation. Dropped without [`Tx::join`] it leaves nothing behind.
pub(crate) struct Tx<'c> {
    pub(crate) core: &'c mut Core,
    changes: NumberMap<u64, Draft>,
    books: Books,
    /// The inode table's own inode, where it changed.
    table: Option<Inode>,
    /// What the file system may take from then on.
    limit_bytes: Option<u64>,
    /// Where the reserve lies from then on.
    reserve: Option<Span>,
    durable: bool,
}

impl Drop for Tx<'_> {
    fn drop(&mut self) {
        let mut books = std::mem::take(&mut self.books);
        // Counted when it joins.
        books.pages = 0;
        self.core.undo(books);
    }
}

impl Tx<'_> {
    /// A page of the name space, as this operation sees it.
    pub(crate) fn page(&mut self, page: u64) -> Result<Arc<Page>> {
        match self.changes.get(&page) {
            Some(Draft::Kept(bytes) | Draft::Data(bytes)) => Ok(Arc::clone(bytes)),
            Some(Draft::Cleared) => Ok(Arc::new([0; PAGE_BYTES])),
            None => self.core.page(page),
        }
    }

    /// Looks at a page of the name space without copying it.
    pub(crate) fn with_page<T>(&mut self, page: u64, look: impl FnOnce(&Page) -> T) -> Result<T> {
        match self.changes.get(&page) {
            Some(Draft::Kept(bytes) | Draft::Data(bytes)) => Ok(look(bytes)),
            Some(Draft::Cleared) => Ok(look(&[0; PAGE_BYTES])),
            None => Ok(look(&*self.core.page(page)?)),
        }
    }

    /// A page of the name space to change.
    pub(crate) fn page_mut(&mut self, page: u64) -> Result<&mut Page> {
        if !matches!(self.changes.get(&page), Some(Draft::Kept(_))) {
            let bytes = self.page(page)?;
            self.changes.insert(page, Draft::Kept(bytes));
        }
        match self.changes.get_mut(&page) {
            Some(Draft::Kept(bytes)) => Ok(Arc::make_mut(bytes)),
            _ => unreachable!("it was just put there"),
        }
    }

    /// A page of the name space that was not in use.
    pub(crate) fn fresh(&mut self, page: u64) -> &mut Page {
        self.changes
            .insert(page, Draft::Kept(Arc::new([0; PAGE_BYTES])));
        match self.changes.get_mut(&page) {
            Some(Draft::Kept(bytes)) => Arc::make_mut(bytes),
            _ => unreachable!("it was just put there"),
        }
    }

    /// Replaces bytes of a file's page; the rest of it stays, or is zeroes if it
    /// `is_new`.
    pub(crate) fn write_data(
        &mut self,
        page: u64,
        within: usize,
        part: &[u8],
        is_new: bool,
    ) -> Result<()> {
        let mut bytes = match self.changes.remove(&page) {
            Some(Draft::Data(bytes)) => bytes,
            _ if is_new || part.len() == PAGE_BYTES => Arc::new([0; PAGE_BYTES]),
            _ => self.core.data_page(page)?,
        };
        Arc::make_mut(&mut bytes)[within..within + part.len()].copy_from_slice(part);
        self.changes.insert(page, Draft::Data(bytes));
        Ok(())
    }

    pub(crate) fn clear(&mut self, page: u64) {
        self.changes.insert(page, Draft::Cleared);
    }

    /// Pages taken into use, or given up, beside those that inodes count.
    pub(crate) fn count_pages(&mut self, pages: i64) {
        self.books.pages += pages;
    }

    /// Pages changed so far.
    pub(crate) fn changed(&self) -> usize {
        self.changes.len()
    }

    /// Complete only when it survives what the pool's class promises.
    pub(crate) fn make_durable(&mut self) {
        self.durable = true;
    }

    /// Pages that are given to nobody, and hold nothing.
    pub(crate) fn take_span(&mut self, order: u8) -> Result<Span> {
        let span = self.core.spans.take(order).ok_or(Errno::NOSPC)?;
        self.books.spans_taken.push(span);
        Ok(span)
    }

    /// Gives pages back; what they hold must be cleared, here or before.
    pub(crate) fn give_span(&mut self, span: Span) {
        self.books.spans_given.push(span);
    }

    /// Places that name a span as a shared one.
    pub(crate) fn sharers(&self, span: Span) -> i64 {
        self.core.shares.count(span.page)
    }

    /// So many more places name it so, or fewer.
    pub(crate) fn share(&mut self, span: Span, places: i64) {
        self.core.shares.add(span.page, places);
        self.books.shared.push((span, places));
    }

    pub(crate) fn table(&self) -> &Inode {
        self.table.as_ref().unwrap_or(&self.core.head.table)
    }

    fn set_table(&mut self, table: Inode) -> Result<()> {
        self.table = Some(table);
        self.put_head()
    }

    /// Lets the file system take so many bytes.
    pub(crate) fn set_limit(&mut self, limit_bytes: u64) -> Result<()> {
        self.limit_bytes = Some(limit_bytes);
        self.put_head()
    }

    /// Lets the reserve lie there.
    pub(crate) fn set_reserve(&mut self, span: Span) -> Result<()> {
        self.reserve = Some(span);
        self.put_head()
    }

    fn put_head(&mut self) -> Result<()> {
        let mut head = self.core.head.clone();
        head.table = self.table().clone();
        head.reserve = self.reserve.or(head.reserve);
        head.limit_bytes = self.limit_bytes.unwrap_or(head.limit_bytes);
        *self.page_mut(0)? = head.encode();
        Ok(())
    }

    /// Where an inode lies, in use or not: page of the space, byte of the page.
    /// None: the table does not reach so far.
    fn place(&mut self, ino: Ino) -> Result<Option<(u64, usize)>> {
        let (index, at) = inode_at(ino);
        let table = self.table().map;
        let run = map::find(&table, index, &mut |page| self.page(page))?;
        Ok(run.map(|run| (run.page, at)))
    }

    /// What lies in an inode's place.
    fn stored(&mut self, ino: Ino, (page, at): (u64, usize)) -> Result<Inode> {
        let pages = self.core.pages;
        let decode = |page: &Page| Inode::decode(&page[at..at + INODE_BYTES], pages);
        let decoded = self.with_page(page, decode)?;
        decoded.map_err(|cause| damaged_inode(ino, cause))
    }

    /// An inode in use, as this operation sees it, with the times that are not in
    /// it yet. When guests wrote before counts as noted: what is done now is later.
    pub(crate) fn inode(&mut self, ino: Ino) -> Result<Inode> {
        check_ino(ino)?;
        let place = self.place(ino)?.ok_or(Errno::STALE)?;
        let mut inode = self.stored(ino, place)?;
        if inode.is_free() {
            return Err(Errno::STALE.into());
        }
        self.core.note_guests(ino);
        self.core.add_times(ino, &mut inode);
        Ok(inode)
    }

    /// Puts an inode in its place, with its times.
    pub(crate) fn put(&mut self, ino: Ino, inode: &Inode) -> Result<()> {
        let place = self.place(ino)?.ok_or(Errno::STALE)?;
        let (page, at) = place;
        let bytes = self.page_mut(page)?;
        let before = Inode::pages_of_stored(&bytes[at..at + INODE_BYTES]);
        put(&mut bytes[..], at, inode.encode());
        let now = inode.pages + inode.lent();
        self.books.pages += now.cast_signed() - before.cast_signed();
        if let Some(live) = self.core.live.get_mut(&ino) {
            let noted = std::mem::take(&mut live.noted);
            if !noted.is_empty() {
                self.books.times_put.push((ino, noted));
            }
        }
        Ok(())
    }

    /// A number and a generation for a new inode, for which the table has room.
    pub(crate) fn take_ino(&mut self) -> Result<(Ino, u32)> {
        let ino = self.core.numbers.take();
        self.books.inos_taken.push(ino);
        let (index, _) = inode_at(ino);
        let mut table = self.table().clone();
        if map::find(&table.map, index, &mut |page| self.page(page))?.is_none() {
            let run = map::ensure(self, &mut table, index)?;
            // A span of the table is made whole: its pages read as free inodes.
            let (end, pages) = (index + run.len, table.pages);
            table.size = table.size.max(end * PAGE_BYTES as u64);
            table.pages += run.len;
            self.books.pages += (table.pages - pages).cast_signed();
            self.set_table(table)?;
        }
        let place = self.place(ino)?.ok_or(Errno::STALE)?;
        let before = self.stored(ino, place)?;
        Ok((ino, before.generation.wrapping_add(1)))
    }

    /// The number is free when this is committed.
    pub(crate) fn give_ino(&mut self, ino: Ino) {
        self.books.inos_given.push(ino);
    }

    /// Whether the batch has room for it; else it must wait and be run again.
    pub(crate) fn fits(&self) -> bool {
        let batch = &self.core.batch.changes;
        let more = self.changes.keys().filter(|page| !batch.contains_key(page));
        batch.is_empty() || batch.len() + more.count() <= CHANGED_PAGES_MAX
    }

    /// Makes it part of the batch.
    ///
    /// # Errors
    /// When it would take more than the file system may.
    pub(crate) fn join(mut self) -> Result<()> {
        assert!(
            self.changes.len() <= CHANGED_PAGES_MAX,
            "{} pages in one operation",
            self.changes.len()
        );
        let used = self.core.used.wrapping_add_signed(self.books.pages);
        let limit = self.core.head.limit_bytes / PAGE_BYTES as u64;
        if self.books.pages > 0 && limit > 0 && used > limit {
            return Err(Errno::NOSPC.into());
        }
        self.core.used = used;
        if let Some(table) = self.table.take() {
            self.core.head.table = table;
        }
        if let Some(limit) = self.limit_bytes {
            self.core.head.limit_bytes = limit;
        }
        self.core.head.reserve = self.reserve.or(self.core.head.reserve);
        let batch = &mut self.core.batch;
        for (page, draft) in self.changes.drain() {
            let change = match draft {
                Draft::Kept(bytes) => Change::Kept(bytes),
                Draft::Data(bytes) => Change::Data(bytes),
                Draft::Cleared => Change::Cleared,
            };
            batch.changes.insert(page, change);
        }
        batch.books.add(std::mem::take(&mut self.books));
        batch.durable |= self.durable;
        Ok(())
    }
}

/// Inodes of the table's pages up to its size.
pub(crate) fn inodes_of(table: &Inode) -> u64 {
    table.size / PAGE_BYTES as u64 * INODES_PER_PAGE
}
