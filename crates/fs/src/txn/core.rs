//! The state under the one lock of a file system, and how changes leave it.
//!
//! An operation runs under the lock as a [`Tx`]: it reads pages as the operations before it left
//! them, and writes copies. When it has succeeded, its pages join the **batch**, the content of the
//! next transaction of the space. A thread that waits for a batch sends it if none is in flight,
//! without the lock. So one transaction is in flight at a time, each begins where the one before
//! ended, and under load several operations share one.
//!
//! Invariants:
//! - a batch is one [`Request::Transact`]: all of it or nothing;
//! - a page in the batch, or in flight, takes precedence over the cache and the space;
//! - spans and numbers that a batch frees are allocated again only after it is committed; those
//!   that it allocated are freed again if it fails;
//! - pages of files never enter the cache: they change without this lock;
//! - the file system takes no more changes once a transaction failed for another reason than want
//!   of space, or damage was found.

use crate::alloc::inos::InoAllocator;
use crate::alloc::spans::{Span, SpanAllocator};
use crate::check_ino;
use crate::direct::shared_file_map::FileLock;
use crate::direct::unseen_writes::UnseenWrites;
use crate::error::{FsError, Result};
use crate::file::deferred_free::DeferredFree;
use crate::file::mmap_dirty::MmapDirtyFiles;
use crate::file::share::ShareCounts;
use crate::format::inode::{
    Corruption, Head, INODE_BYTES, INODES_PER_PAGE, Ino, Inode, Page, Time, inode_at,
};
use crate::hash::{NumberMap, NumberSet};
use crate::io::channel::IoChannel;
use crate::tree::page_map::{self as map, FileSpan};
use crate::txn::cache::Cache;
use bytes::Bytes;
use pagemesh_base::bytes::put;
use pagemesh_base::slice::TransactionPart;
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
enum PageChange {
    /// Of the name space.
    Metadata(Arc<Page>),
    /// Of a file.
    Data(Arc<Page>),
    Cleared,
}

type PageChanges = BTreeMap<u64, PageChange>;

/// The result of a batch.
type BatchOutcome = Arc<OnceLock<std::result::Result<(), SpaceError>>>;

/// Changes that become one transaction.
#[derive(Default)]
pub(crate) struct Batch {
    changes: PageChanges,
    effects: BatchEffects,
    outcome: BatchOutcome,
    durable: bool,
}

/// Changes of the state in memory that go with a batch.
#[derive(Default)]
struct BatchEffects {
    spans_allocated: Vec<Span>,
    spans_freed: Vec<Span>,
    /// Changes of the number of sharers, by span.
    share_changes: Vec<(Span, i64)>,
    inos_allocated: Vec<Ino>,
    inos_freed: Vec<Ino>,
    /// Pending times that are in their inodes now.
    times_written: Vec<(Ino, PendingTimes)>,
    page_delta: i64,
}

impl BatchEffects {
    fn add(&mut self, other: BatchEffects) {
        self.spans_allocated.extend(other.spans_allocated);
        self.spans_freed.extend(other.spans_freed);
        self.share_changes.extend(other.share_changes);
        self.inos_allocated.extend(other.inos_allocated);
        self.inos_freed.extend(other.inos_freed);
        self.times_written.extend(other.times_written);
        self.page_delta += other.page_delta;
    }
}

/// Times of an inode that are not in it yet.
#[derive(Clone, Copy, Default, PartialEq)]
pub(crate) struct PendingTimes {
    pub(crate) mtime: Option<Time>,
    pub(crate) atime: Option<Time>,
}

impl PendingTimes {
    pub(crate) fn is_empty(self) -> bool {
        self == PendingTimes::default()
    }

    /// Takes from `older` the times that `self` lacks.
    fn fill_missing(&mut self, older: PendingTimes) {
        self.mtime = self.mtime.or(older.mtime);
        self.atime = self.atime.or(older.atime);
    }
}

/// State of an inode that exists only while the inode is in use.
#[derive(Default)]
pub(crate) struct LiveInode {
    pub(crate) opens: u64,
    pub(crate) lookups: u64,
    /// Value of [`Core::creations`] when the inode was created; 0: it existed before.
    pub(crate) creation: u64,
    pub(crate) pending_times: PendingTimes,
    pub(crate) file_lock: Arc<FileLock>,
}

/// The state under the lock.
pub(crate) struct Core {
    pub(crate) head: Head,
    /// Pages of the space that spans may lie in.
    pub(crate) total_pages: u64,
    /// Pages in use: of files and of the name space.
    pub(crate) used_pages: u64,
    pub(crate) ino_allocator: InoAllocator,
    pub(crate) live_inodes: NumberMap<Ino, LiveInode>,
    /// Inodes created so far; numbers them for [`LiveInode::creation`].
    pub(crate) creations: u64,
    /// Inodes that may have times which are not in the inode yet.
    pub(crate) inos_with_pending_times: BTreeSet<Ino>,
    /// Files that have or had direct clients.
    pub(crate) inos_with_file_map: BTreeSet<Ino>,
    /// Number of grants of append space.
    pub(crate) append_grants: u64,
    /// Files that were written past the kernel; the kernel does not know their new state.
    pub(crate) kernel_stale_inos: BTreeSet<Ino>,
    /// Files that were written past the kernel; their watchers are not notified yet.
    pub(crate) unseen_writes: UnseenWrites,
    /// Files that have mmap-dirty pages.
    pub(crate) mmap_dirty: MmapDirtyFiles,
    /// Redo logs in use. Their numbers are not allocated to other files.
    pub(crate) redo_logs: NumberSet<Ino>,
    /// Orphans that are being freed, or that are deferred.
    pub(crate) freeing: NumberSet<Ino>,
    pub(crate) deferred_free: DeferredFree,
    /// Inodes with pages that another inode claims too, or with unknown pages.
    pub(crate) untrusted: NumberSet<Ino>,
    pub(crate) share_counts: ShareCounts,
    span_allocator: SpanAllocator,
    cache: Cache,
    channel: IoChannel,
    batch: Batch,
    in_flight: Option<PageChanges>,
    /// Calls that wait for the batch in flight.
    pub(crate) waiters: usize,
    /// The error of every further change.
    stop_error: Option<FsError>,
}

impl Core {
    pub(crate) fn new(
        head: Head,
        pages: u64,
        used: u64,
        numbers: InoAllocator,
        spans: SpanAllocator,
        channel: IoChannel,
    ) -> Core {
        Core {
            head,
            total_pages: pages,
            used_pages: used,
            ino_allocator: numbers,
            live_inodes: NumberMap::default(),
            creations: 0,
            inos_with_pending_times: BTreeSet::new(),
            inos_with_file_map: BTreeSet::new(),
            append_grants: 0,
            kernel_stale_inos: BTreeSet::new(),
            unseen_writes: UnseenWrites::default(),
            mmap_dirty: MmapDirtyFiles::default(),
            redo_logs: NumberSet::default(),
            freeing: NumberSet::default(),
            deferred_free: DeferredFree::default(),
            untrusted: NumberSet::default(),
            share_counts: ShareCounts::default(),
            span_allocator: spans,
            cache: Cache::default(),
            channel,
            batch: Batch::default(),
            in_flight: None,
            waiters: 0,
            stop_error: None,
        }
    }

    /// A page as the last operation left it.
    pub(crate) fn page(&mut self, page: u64) -> Result<Arc<Page>> {
        if let Some(found) = self.pending_page(page) {
            return Ok(found);
        }
        if let Some(found) = self.cache.get(page) {
            return Ok(found);
        }
        let read: Arc<Page> = self.channel.read_page(page)?.into();
        self.cache.put(page, read.clone());
        Ok(read)
    }

    /// A page of a file, with its current content.
    pub(crate) fn data_page(&mut self, page: u64) -> Result<Arc<Page>> {
        match self.pending_page(page) {
            Some(found) => Ok(found),
            None => Ok(self.channel.read_page(page)?.into()),
        }
    }

    /// Runs of a range of pages of the space that hold data.
    pub(crate) fn mapped_runs(&mut self, pages: Range<u64>) -> Result<Vec<Range<u64>>> {
        let mut runs = Vec::new();
        self.channel
            .for_each_mapped_run(pages, |run| runs.push(run))?;
        Ok(runs)
    }

    fn pending_page(&self, page: u64) -> Option<Arc<Page>> {
        let on_its_way = self.in_flight.as_ref();
        let change = self
            .batch
            .changes
            .get(&page)
            .or_else(|| on_its_way?.get(&page))?;
        Some(match change {
            PageChange::Metadata(bytes) | PageChange::Data(bytes) => bytes.clone(),
            PageChange::Cleared => Arc::new([0; PAGE_BYTES]),
        })
    }

    /// An inode in use, with the times that are not in it yet.
    pub(crate) fn inode(&mut self, ino: Ino) -> Result<Inode> {
        self.begin().inode(ino)
    }

    /// Adds the times that are not in the inode yet.
    fn apply_pending_times(&self, ino: Ino, inode: &mut Inode) {
        if let Some(live) = self.live_inodes.get(&ino) {
            let mtime = live.pending_times.mtime;
            inode.mtime = mtime.unwrap_or(inode.mtime);
            inode.ctime = mtime.map_or(inode.ctime, |time| time.max(inode.ctime));
            inode.atime = live.pending_times.atime.unwrap_or(inode.atime);
        }
    }

    pub(crate) fn live_inode(&mut self, ino: Ino) -> &mut LiveInode {
        self.live_inodes.entry(ino).or_default()
    }

    /// Records a new inode with its first lookup and `opens` opens. Returns the argument of
    /// [`Core::undo_creation`], for an operation that fails.
    pub(crate) fn record_creation(&mut self, ino: Ino, opens: u64) -> (Ino, u64) {
        self.creations += 1;
        let live = LiveInode {
            opens,
            lookups: 1,
            creation: self.creations,
            ..LiveInode::default()
        };
        self.live_inodes.insert(ino, live);
        (ino, self.creations)
    }

    /// Undoes [`Core::record_creation`], unless another inode has got the number since.
    pub(crate) fn undo_creation(&mut self, (ino, made): (Ino, u64)) {
        if self
            .live_inodes
            .get(&ino)
            .is_some_and(|live| live.creation == made)
        {
            self.live_inodes.remove(&ino);
        }
    }

    /// Spans of an inode that hold pages from `from` on, in order; at most so many.
    pub(crate) fn pieces(&mut self, inode: &Inode, from: u64, max: usize) -> Result<Vec<FileSpan>> {
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

    /// Fails if the file system takes no changes.
    pub(crate) fn check_running(&self) -> Result<()> {
        match &self.stop_error {
            None => Ok(()),
            Some(told) => Err(told.clone()),
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        self.stop_error.is_none()
    }

    /// Takes no more changes, because something is damaged.
    pub(crate) fn stop(&mut self, damage: String) {
        if self.stop_error.is_none() {
            self.stop_error = Some(FsError::ReadOnly(damage));
        }
    }

    /// Stops all changes if `result` reports damage: a change that builds on it would be wrong.
    pub(crate) fn stop_if_damaged<T>(&mut self, result: &Result<T>) {
        if let Err(FsError::Damaged { what, cause }) = result
            && self.stop_error.is_none()
        {
            tracing::error!(%what, %cause, "the file system is damaged; it takes no more changes");
            self.stop(format!("{what} is damaged: {cause}"));
        }
    }

    /// Refuses the content of an inode that mounting found untrusted.
    pub(crate) fn check_trusted(&self, ino: Ino) -> Result<()> {
        match self.untrusted.contains(&ino) {
            false => Ok(()),
            true => Err(damaged_inode(
                ino,
                Corruption("its pages belong to other inodes, too, or are unknown".into()),
            )),
        }
    }

    /// Begins an operation.
    pub(crate) fn begin(&mut self) -> Tx<'_> {
        Tx {
            core: self,
            changes: NumberMap::default(),
            effects: BatchEffects::default(),
            new_table: None,
            new_limit_bytes: None,
            new_reserve: None,
            durable: false,
        }
    }

    /// See [`crate::Fs::poll_idle_channels`].
    pub(crate) fn poll_channel(&mut self, into: &mut Vec<RawFd>) -> Option<Instant> {
        self.channel.poll(into)
    }

    /// Records the time of a write; the inode gets it later.
    pub(crate) fn record_write_time(&mut self, ino: Ino, now: Time) {
        self.live_inode(ino).pending_times.mtime = Some(now);
        self.inos_with_pending_times.insert(ino);
    }

    pub(crate) fn outcome(&self) -> BatchOutcome {
        self.batch.outcome.clone()
    }

    pub(crate) fn has_batch_in_flight(&self) -> bool {
        self.in_flight.is_some()
    }

    /// Takes the batch as a request. [`Core::finish_batch`] must follow.
    pub(crate) fn take_batch(&mut self) -> (Batch, Request) {
        assert!(self.in_flight.is_none(), "one transaction at a time");
        let batch = std::mem::take(&mut self.batch);
        let request = Request::Transact {
            parts: transaction_parts(&batch.changes),
            durable: batch.durable,
        };
        self.in_flight = Some(batch.changes.clone());
        (batch, request)
    }

    /// Applies the result of a batch.
    pub(crate) fn finish_batch(
        &mut self,
        batch: Batch,
        result: std::result::Result<(), SpaceError>,
    ) {
        self.in_flight = None;
        match &result {
            Ok(()) => self.apply_committed(batch.changes, batch.effects),
            Err(cause) => self.fail_batch(batch.effects, cause),
        }
        let _ = batch.outcome.set(result);
    }

    fn apply_committed(&mut self, changes: PageChanges, books: BatchEffects) {
        for (page, change) in changes {
            match change {
                PageChange::Metadata(bytes) => self.cache.put(page, bytes),
                PageChange::Data(_) | PageChange::Cleared => self.cache.forget(page),
            }
        }
        for span in books.spans_freed {
            (span.page..span.end()).for_each(|page| self.cache.forget(page));
            self.span_allocator.free(span);
        }
        for ino in books.inos_freed {
            self.freeing.remove(&ino);
            self.ino_allocator.free(ino);
        }
    }

    /// The batch failed, so the next one, which builds on it, fails too.
    fn fail_batch(&mut self, books: BatchEffects, cause: &SpaceError) {
        let next = std::mem::take(&mut self.batch);
        // The next batch first: of two times of an inode the later one counts.
        for books in [next.effects, books] {
            self.roll_back(books);
        }
        let _ = next.outcome.set(Err(cause.clone()));
        if !matches!(cause, SpaceError::NoSpace(_)) {
            tracing::error!(%cause, "a change of the file system failed; it takes no more changes");
            self.stop_error = Some(FsError::Stopped(cause.clone()));
        } else if let Ok(page) = self.page(0)
            && let Ok(head) = Head::decode(&page, self.total_pages)
        {
            self.head = head;
        }
    }

    fn roll_back(&mut self, books: BatchEffects) {
        self.used_pages = self.used_pages.wrapping_add_signed(-books.page_delta);
        for span in books.spans_allocated {
            self.span_allocator.free(span);
        }
        for ino in books.inos_allocated {
            self.ino_allocator.free(ino);
        }
        for (span, places) in books.share_changes {
            self.share_counts.add(span.page, -places);
        }
        for (ino, noted) in books.times_written.into_iter().rev() {
            if let Some(live) = self.live_inodes.get_mut(&ino) {
                live.pending_times.fill_missing(noted);
                self.inos_with_pending_times.insert(ino);
            }
        }
    }
}

/// Changes as parts of a transaction; adjacent pages share a part.
fn transaction_parts(changes: &PageChanges) -> Vec<TransactionPart> {
    const PAGE: u64 = PAGE_BYTES as u64;
    let mut parts = Vec::new();
    let mut written: Vec<u8> = Vec::new();
    let mut first = 0;
    let flush = |written: &mut Vec<u8>, first: u64, parts: &mut Vec<TransactionPart>| {
        if !written.is_empty() {
            parts.push(TransactionPart::Write {
                offset: first * PAGE,
                data: Bytes::from(std::mem::take(written)),
            });
        }
    };
    for (&page, change) in changes {
        let is_next = first + (written.len() / PAGE_BYTES) as u64 == page;
        match change {
            PageChange::Metadata(bytes) | PageChange::Data(bytes) => {
                if !is_next || written.is_empty() {
                    flush(&mut written, first, &mut parts);
                    first = page;
                }
                written.extend_from_slice(&bytes[..]);
            }
            PageChange::Cleared => {
                flush(&mut written, first, &mut parts);
                match parts.last_mut() {
                    Some(TransactionPart::Clear { offset, len })
                        if *offset + *len == page * PAGE =>
                    {
                        *len += PAGE;
                    }
                    _ => parts.push(TransactionPart::Clear {
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

pub(crate) fn damaged_inode(ino: Ino, cause: Corruption) -> FsError {
    FsError::Damaged {
        what: format!("inode {}", ino.0),
        cause,
    }
}

/// A page that an operation changes.
enum PageDraft {
    Metadata(Arc<Page>),
    Data(Arc<Page>),
    Cleared,
}

/// An operation. Dropped without [`Tx::join_batch`] it leaves no trace.
pub(crate) struct Tx<'c> {
    pub(crate) core: &'c mut Core,
    changes: NumberMap<u64, PageDraft>,
    effects: BatchEffects,
    /// The inode table's own inode, where it changed.
    new_table: Option<Inode>,
    /// The new limit of the file system in bytes.
    new_limit_bytes: Option<u64>,
    /// The new span of the reserve.
    new_reserve: Option<Span>,
    durable: bool,
}

impl Drop for Tx<'_> {
    fn drop(&mut self) {
        let mut books = std::mem::take(&mut self.effects);
        // The pages are counted in `join_batch` only.
        books.page_delta = 0;
        self.core.roll_back(books);
    }
}

impl Tx<'_> {
    /// A page of the name space, as this operation sees it.
    pub(crate) fn page(&mut self, page: u64) -> Result<Arc<Page>> {
        match self.changes.get(&page) {
            Some(PageDraft::Metadata(bytes) | PageDraft::Data(bytes)) => Ok(Arc::clone(bytes)),
            Some(PageDraft::Cleared) => Ok(Arc::new([0; PAGE_BYTES])),
            None => self.core.page(page),
        }
    }

    /// Reads a page of the name space without copying it.
    pub(crate) fn with_page<T>(&mut self, page: u64, look: impl FnOnce(&Page) -> T) -> Result<T> {
        match self.changes.get(&page) {
            Some(PageDraft::Metadata(bytes) | PageDraft::Data(bytes)) => Ok(look(bytes)),
            Some(PageDraft::Cleared) => Ok(look(&[0; PAGE_BYTES])),
            None => Ok(look(&*self.core.page(page)?)),
        }
    }

    /// A page of the name space to change.
    pub(crate) fn page_mut(&mut self, page: u64) -> Result<&mut Page> {
        if !matches!(self.changes.get(&page), Some(PageDraft::Metadata(_))) {
            let bytes = self.page(page)?;
            self.changes.insert(page, PageDraft::Metadata(bytes));
        }
        match self.changes.get_mut(&page) {
            Some(PageDraft::Metadata(bytes)) => Ok(Arc::make_mut(bytes)),
            _ => unreachable!("it was just put there"),
        }
    }

    /// A page of the name space that was not in use.
    pub(crate) fn new_page(&mut self, page: u64) -> &mut Page {
        self.changes
            .insert(page, PageDraft::Metadata(Arc::new([0; PAGE_BYTES])));
        match self.changes.get_mut(&page) {
            Some(PageDraft::Metadata(bytes)) => Arc::make_mut(bytes),
            _ => unreachable!("it was just put there"),
        }
    }

    /// Replaces bytes of a file's page. The rest of the page keeps its content, or is zeroes if the
    /// page `is_new`.
    pub(crate) fn write_data(
        &mut self,
        page: u64,
        within: usize,
        part: &[u8],
        is_new: bool,
    ) -> Result<()> {
        let mut bytes = match self.changes.remove(&page) {
            Some(PageDraft::Data(bytes)) => bytes,
            _ if is_new || part.len() == PAGE_BYTES => Arc::new([0; PAGE_BYTES]),
            _ => self.core.data_page(page)?,
        };
        Arc::make_mut(&mut bytes)[within..within + part.len()].copy_from_slice(part);
        self.changes.insert(page, PageDraft::Data(bytes));
        Ok(())
    }

    pub(crate) fn clear(&mut self, page: u64) {
        self.changes.insert(page, PageDraft::Cleared);
    }

    /// Counts pages that come into use or are freed, apart from the pages that inodes count.
    pub(crate) fn count_pages(&mut self, pages: i64) {
        self.effects.page_delta += pages;
    }

    /// Pages changed so far.
    pub(crate) fn changed_pages(&self) -> usize {
        self.changes.len()
    }

    /// Makes the transaction complete only when it survives as the pool's class promises.
    pub(crate) fn make_durable(&mut self) {
        self.durable = true;
    }

    /// Allocates a span; its pages hold nothing.
    pub(crate) fn allocate_span(&mut self, order: u8) -> Result<Span> {
        let span = self
            .core
            .span_allocator
            .allocate(order)
            .ok_or(Errno::NOSPC)?;
        self.effects.spans_allocated.push(span);
        Ok(span)
    }

    /// Frees a span. Its content must be cleared, by this operation or before it.
    pub(crate) fn free_span(&mut self, span: Span) {
        self.effects.spans_freed.push(span);
    }

    /// Number of references to a shared span.
    pub(crate) fn sharer_count(&self, span: Span) -> i64 {
        self.core.share_counts.count(span.page)
    }

    /// Adds `places` references to a shared span; negative: removes.
    pub(crate) fn add_sharers(&mut self, span: Span, places: i64) {
        self.core.share_counts.add(span.page, places);
        self.effects.share_changes.push((span, places));
    }

    pub(crate) fn inode_table(&self) -> &Inode {
        self.new_table.as_ref().unwrap_or(&self.core.head.table)
    }

    fn set_inode_table(&mut self, table: Inode) -> Result<()> {
        self.new_table = Some(table);
        self.put_head()
    }

    /// Sets the limit in bytes.
    pub(crate) fn set_limit(&mut self, limit_bytes: u64) -> Result<()> {
        self.new_limit_bytes = Some(limit_bytes);
        self.put_head()
    }

    /// Sets the span of the reserve.
    pub(crate) fn set_reserve(&mut self, span: Span) -> Result<()> {
        self.new_reserve = Some(span);
        self.put_head()
    }

    fn put_head(&mut self) -> Result<()> {
        let mut head = self.core.head.clone();
        head.table = self.inode_table().clone();
        head.reserve = self.new_reserve.or(head.reserve);
        head.limit_bytes = self.new_limit_bytes.unwrap_or(head.limit_bytes);
        *self.page_mut(0)? = head.encode();
        Ok(())
    }

    /// The location of an inode, in use or not: page of the space, byte of the page. `None` if the
    /// table does not reach so far.
    fn locate_inode(&mut self, ino: Ino) -> Result<Option<(u64, usize)>> {
        let (index, at) = inode_at(ino);
        let table = self.inode_table().map;
        let run = map::find(&table, index, &mut |page| self.page(page))?;
        Ok(run.map(|run| (run.page, at)))
    }

    /// Decodes the inode at a location.
    fn stored_inode(&mut self, ino: Ino, (page, at): (u64, usize)) -> Result<Inode> {
        let pages = self.core.total_pages;
        let decode = |page: &Page| Inode::decode(&page[at..at + INODE_BYTES], pages);
        let decoded = self.with_page(page, decode)?;
        decoded.map_err(|cause| damaged_inode(ino, cause))
    }

    /// An inode in use, as this operation sees it, with the times that are not in it yet. Write
    /// times of direct clients are recorded first: this operation is later than they are.
    pub(crate) fn inode(&mut self, ino: Ino) -> Result<Inode> {
        check_ino(ino)?;
        let place = self.locate_inode(ino)?.ok_or(Errno::STALE)?;
        let mut inode = self.stored_inode(ino, place)?;
        if inode.is_free() {
            return Err(Errno::STALE.into());
        }
        self.core.collect_direct_write(ino);
        self.core.apply_pending_times(ino, &mut inode);
        Ok(inode)
    }

    /// Stores an inode at its location, with its pending times.
    pub(crate) fn put_inode(&mut self, ino: Ino, inode: &Inode) -> Result<()> {
        let place = self.locate_inode(ino)?.ok_or(Errno::STALE)?;
        let (page, at) = place;
        let bytes = self.page_mut(page)?;
        let before = Inode::stored_pages(&bytes[at..at + INODE_BYTES]);
        put(&mut bytes[..], at, inode.encode());
        let now = inode.pages + inode.granted_pages();
        self.effects.page_delta += now.cast_signed() - before.cast_signed();
        if let Some(live) = self.core.live_inodes.get_mut(&ino) {
            let noted = std::mem::take(&mut live.pending_times);
            if !noted.is_empty() {
                self.effects.times_written.push((ino, noted));
            }
        }
        Ok(())
    }

    /// Allocates a number and its generation for a new inode, and extends the table if necessary.
    pub(crate) fn allocate_ino(&mut self) -> Result<(Ino, u32)> {
        let ino = self.core.ino_allocator.allocate();
        self.effects.inos_allocated.push(ino);
        let (index, _) = inode_at(ino);
        let mut table = self.inode_table().clone();
        if map::find(&table.map, index, &mut |page| self.page(page))?.is_none() {
            let run = map::find_or_allocate(self, &mut table, index)?;
            // The whole span is added to the table: its unwritten pages read as free inodes.
            let (end, pages) = (index + run.len, table.pages);
            table.size = table.size.max(end * PAGE_BYTES as u64);
            table.pages += run.len;
            self.effects.page_delta += (table.pages - pages).cast_signed();
            self.set_inode_table(table)?;
        }
        let place = self.locate_inode(ino)?.ok_or(Errno::STALE)?;
        let before = self.stored_inode(ino, place)?;
        Ok((ino, before.generation.wrapping_add(1)))
    }

    /// Frees the number when the transaction is committed.
    pub(crate) fn free_ino(&mut self, ino: Ino) {
        self.effects.inos_freed.push(ino);
    }

    /// Whether the batch has room for this operation. If not, the operation must wait and run
    /// again.
    pub(crate) fn fits(&self) -> bool {
        let batch = &self.core.batch.changes;
        let more = self.changes.keys().filter(|page| !batch.contains_key(page));
        batch.is_empty() || batch.len() + more.count() <= CHANGED_PAGES_MAX
    }

    /// Adds the operation to the batch.
    ///
    /// # Errors
    /// `ENOSPC` if the file system would exceed its limit.
    pub(crate) fn join_batch(mut self) -> Result<()> {
        assert!(
            self.changes.len() <= CHANGED_PAGES_MAX,
            "{} pages in one operation",
            self.changes.len()
        );
        let used = self
            .core
            .used_pages
            .wrapping_add_signed(self.effects.page_delta);
        let limit = self.core.head.limit_bytes / PAGE_BYTES as u64;
        if self.effects.page_delta > 0 && limit > 0 && used > limit {
            return Err(Errno::NOSPC.into());
        }
        self.core.used_pages = used;
        if let Some(table) = self.new_table.take() {
            self.core.head.table = table;
        }
        if let Some(limit) = self.new_limit_bytes {
            self.core.head.limit_bytes = limit;
        }
        self.core.head.reserve = self.new_reserve.or(self.core.head.reserve);
        let batch = &mut self.core.batch;
        for (page, draft) in self.changes.drain() {
            let change = match draft {
                PageDraft::Metadata(bytes) => PageChange::Metadata(bytes),
                PageDraft::Data(bytes) => PageChange::Data(bytes),
                PageDraft::Cleared => PageChange::Cleared,
            };
            batch.changes.insert(page, change);
        }
        batch.effects.add(std::mem::take(&mut self.effects));
        batch.durable |= self.durable;
        Ok(())
    }
}

/// Number of inodes in the table's pages.
pub(crate) fn table_inodes(table: &Inode) -> u64 {
    table.size / PAGE_BYTES as u64 * INODES_PER_PAGE
}
