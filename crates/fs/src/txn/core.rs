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

use crate::alloc::deferred_free::DeferredFree;
use crate::alloc::inos::InoAllocator;
use crate::alloc::share_counts::ShareCounts;
use crate::alloc::spans::SpanAllocator;
use crate::error::{Corruption, FsError, Result};
use crate::format::file_id::FileId;
use crate::format::inode::{Ino, Inode, InodeKind, Time, damaged_inode};
use crate::format::page_map::FileSpan;
use crate::format::superblock::Head;
use crate::format::{Page, page_map};
use crate::hash::{NumberMap, NumberSet};
use crate::io::channel::IoChannel;
use crate::live::inode::LiveInode;
use crate::live::mmap_dirty::MmapDirtyFiles;
use crate::live::read_times::ReadTimes;
use crate::live::tail_pages::TailPages;
use crate::live::unseen_writes::UnseenWrites;
use crate::live::xattr_indexes::XattrIndexes;
use crate::txn::batch::{
    Batch, BatchEffects, BatchInFlight, BatchOutcome, PageChange, PageChanges, transaction_parts,
};
use crate::txn::cache::Cache;
use crate::txn::tx::Tx;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::space::{Request, SpaceError};
use pagemesh_base::tier_hint::TierHint;
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

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
    pub(super) span_allocator: SpanAllocator,
    pub(crate) tail_pages: TailPages,
    pub(crate) read_times: ReadTimes,
    pub(crate) xattr_indexes: XattrIndexes,
    cache: Cache,
    channel: IoChannel,
    pub(super) batch: Batch,
    pub(super) in_flight: Option<BatchInFlight>,
    /// Mapped pages of the reserve.
    pub(super) reserved_pages: u64,
    /// The cause of the loss of acknowledged changes.
    pub(crate) lost_changes: Option<SpaceError>,
    /// Losses of unstable writes for lack of room. A loss takes changes of files back, so a change must not rely on a state from
    /// before it.
    pub(super) unstable_losses: Arc<AtomicU64>,
    /// Whether a page was read that a batch has changed and that is not committed. [`TxManager::change_from`] clears it.
    ///
    /// [`TxManager::change_from`]: crate::txn::manager::TxManager::change_from
    pub(super) has_read_uncommitted: bool,
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
            tail_pages: TailPages::default(),
            read_times: ReadTimes::default(),
            xattr_indexes: XattrIndexes::default(),
            cache: Cache::default(),
            channel,
            batch: Batch::default(),
            in_flight: None,
            reserved_pages: 0,
            lost_changes: None,
            unstable_losses: Arc::default(),
            has_read_uncommitted: false,
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

    /// Reads pages that are not in memory into the cache, all at once.
    pub(crate) fn read_pages(&mut self, pages: impl IntoIterator<Item = u64>) -> Result<()> {
        let mut missing: Vec<u64> = pages.into_iter().collect();
        missing.retain(|&page| self.pending_page(page).is_none() && self.cache.get(page).is_none());
        if missing.len() < 2 {
            // The first use reads it.
            return Ok(());
        }
        let size = PAGE_BYTES as u32;
        let ranges = missing.iter().map(|&page| (page * u64::from(size), size));
        let read = self.channel.read_all_hinted(ranges, TierHint::None)?;
        for (page, bytes) in missing.into_iter().zip(read) {
            let bytes: Box<Page> = bytes
                .into_boxed_slice()
                .try_into()
                .expect("as long as a page");
            self.cache.put(page, bytes.into());
        }
        Ok(())
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

    fn pending_page(&mut self, page: u64) -> Option<Arc<Page>> {
        let on_its_way = self.in_flight.as_ref();
        let change = self.batch.changes.get(&page);
        let change = change.or_else(|| on_its_way?.changes.get(&page))?;
        self.has_read_uncommitted = true;
        Some(change.bytes())
    }

    /// Pages of a range in flight, and then the newer ones of the batch.
    pub(crate) fn pending_pages(&self, pages: Range<u64>) -> Vec<(u64, Arc<Page>)> {
        let in_flight = self.in_flight.as_ref().map(|sent| &sent.changes);
        let of_both = in_flight.into_iter().chain([&self.batch.changes]);
        let found = of_both.flat_map(|changes| changes.range(pages.clone()));
        found
            .map(|(&page, change)| (page, change.bytes()))
            .collect()
    }

    /// An inode in use, with the times that are not in it yet.
    pub(crate) fn inode(&mut self, ino: Ino) -> Result<Inode> {
        self.begin().inode(ino)
    }

    /// See [`Tx::inode_of`].
    pub(crate) fn inode_of(&mut self, id: FileId) -> Result<Inode> {
        self.begin().inode_of(id)
    }

    /// An inode that is not being freed.
    pub(crate) fn inode_not_freeing(&mut self, ino: Ino) -> Result<Inode> {
        if self.freeing.contains(&ino) {
            Err(Errno::STALE.into())
        } else {
            self.inode(ino)
        }
    }

    /// An inode that a user may look up or open: not one that is being freed, and not the service file.
    pub(crate) fn inode_of_user(&mut self, ino: Ino) -> Result<Inode> {
        let inode = self.inode_not_freeing(ino)?;
        match self.begin().is_service_file(ino, &inode)? {
            true => Err(Errno::STALE.into()),
            false => Ok(inode),
        }
    }

    /// Whether an inode is freed after its last use.
    pub(crate) fn is_orphan(&mut self, ino: Ino) -> Result<bool> {
        let inode = self.inode(ino)?;
        Ok(inode.links == 0 && !self.begin().is_service_file(ino, &inode)?)
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

    /// Adds the times that are not in the inode yet.
    pub(crate) fn apply_pending_times(&self, ino: Ino, inode: &mut Inode) {
        if let Some(live) = self.live_inodes.get(&ino) {
            live.pending_times().apply(inode);
        }
    }

    pub(crate) fn live_inode(&mut self, ino: Ino) -> &mut LiveInode {
        self.live_inodes.entry(ino).or_default()
    }

    /// Records a new inode with its first lookup and `opens` opens. Returns the argument of
    /// [`Core::undo_creation`], for an operation that fails.
    pub(crate) fn record_creation(&mut self, ino: Ino, opens: u64) -> (Ino, u64) {
        self.creations += 1;
        let live = LiveInode::created(self.creations, opens);
        self.live_inodes.insert(ino, live);
        (ino, self.creations)
    }

    /// Records a new inode that no kernel has looked up. A failed create may have left state of its number.
    pub(crate) fn record_unused_creation(&mut self, ino: Ino) {
        self.live_inodes.remove(&ino);
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
        page_map::visit(
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

    /// Takes no more changes, because acknowledged ones are lost. A later change would survive them.
    pub(super) fn stop_after_loss(&mut self, cause: &SpaceError) {
        self.lost_changes = Some(cause.clone());
        self.stop_error = Some(FsError::Stopped(cause.clone()));
    }

    /// Takes no changes, because the space is a snapshot.
    pub(crate) fn stop_for_snapshot(&mut self) {
        self.stop_error.get_or_insert(FsError::Snapshot);
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
        if self.untrusted.contains(&ino) {
            Err(damaged_inode(
                ino,
                Corruption("its pages belong to other inodes, too, or are unknown".into()),
            ))
        } else {
            Ok(())
        }
    }

    /// Begins an operation.
    pub(crate) fn begin(&mut self) -> Tx<'_> {
        Tx::new(self)
    }

    /// See [`crate::Fs::poll_idle_channels`].
    pub(crate) fn poll_channel(&mut self, into: &mut Vec<RawFd>) -> Option<Instant> {
        self.channel.poll(into)
    }

    /// Records the time of a write; the inode gets it later.
    pub(crate) fn record_write_time(&mut self, ino: Ino, now: Time) {
        self.live_inode(ino).pending_times_mut().mtime = Some(now);
        self.inos_with_pending_times.insert(ino);
    }

    /// See [`LiveInode::grants_time`].
    pub(crate) fn grants_time(&self, ino: Ino, time: Time) -> bool {
        let live = self.live_inodes.get(&ino);
        live.is_some_and(|live| live.grants_time(time))
    }
}

/// Age in seconds from which a read time is recorded again.
const ATIME_AGE_S: i64 = 86_400;

impl Core {
    /// Records the time of a read, if the mount records such reads. Returns whether the time changes.
    pub(crate) fn record_read_time(&mut self, ino: Ino, inode: &Inode, now: Time) -> bool {
        let is_recorded = self.is_running()
            && self.read_times.include(inode)
            && (inode.atime <= inode.mtime.max(inode.ctime)
                || inode.atime.sec.saturating_add(ATIME_AGE_S) < now.sec);
        if is_recorded {
            self.live_inode(ino).pending_times_mut().atime = Some(now);
            self.inos_with_pending_times.insert(ino);
        }
        is_recorded
    }

    /// Records a write that the kernel does not know of.
    pub(crate) fn record_unseen_write(&mut self, ino: Ino) {
        self.kernel_stale_inos.insert(ino);
        self.unseen_writes.add(ino);
    }

    /// Records the time of direct clients' writes to a file, if there were any since the last call,
    /// and marks the file for a notification of the kernel.
    pub(crate) fn collect_direct_write(&mut self, ino: Ino) {
        let file_map = self
            .live_inodes
            .get(&ino)
            .and_then(|live| live.file_lock.file_map());
        if let Some(at) = file_map.and_then(|file_map| file_map.take_write_time()) {
            self.record_write_time(ino, at);
            self.record_unseen_write(ino);
        }
    }

    /// As [`Core::collect_direct_write`], for all files.
    pub(crate) fn collect_all_direct_writes(&mut self) {
        let mut files = std::mem::take(&mut self.inos_with_file_map);
        files.retain(|ino| self.live_inodes.contains_key(ino));
        files.iter().for_each(|&ino| self.collect_direct_write(ino));
        self.inos_with_file_map = files;
    }

    /// Records the orphans and marked files that a crash left.
    pub(crate) fn defer_crash_leftovers(&mut self, orphans: Vec<Ino>, unfinished: Vec<Ino>) {
        self.freeing.extend(&orphans);
        self.deferred_free
            .defer(orphans.into_iter().chain(unfinished));
    }

    /// Records a file with more pages to be freed.
    pub(crate) fn defer_rest(&mut self, ino: Ino) {
        self.deferred_free.defer([ino]);
    }

    /// Takes an inode with pages to be freed. `None` while the file system takes no changes.
    pub(crate) fn take_deferred(&mut self) -> Option<Ino> {
        if self.is_running() {
            self.deferred_free.take()
        } else {
            None
        }
    }

    /// Inodes in use, without those that a batch frees.
    pub(crate) fn inodes_in_use(&self) -> u64 {
        let sent = self.in_flight.as_ref().map_or(0, |sent| sent.inos_freed);
        let freed = self.batch.effects.inos_freed.len() + sent;
        self.ino_allocator.in_use().saturating_sub(freed as u64)
    }

    pub(crate) fn outcome(&self) -> BatchOutcome {
        self.batch.outcome.clone()
    }

    /// The last batch with changes that are not committed.
    pub(super) fn last_outcome(&self) -> Option<BatchOutcome> {
        match self.batch.changes.is_empty() {
            true => self.in_flight.as_ref().map(|sent| sent.outcome.clone()),
            false => Some(self.outcome()),
        }
    }

    /// The batch that creates an inode, if it is not committed.
    pub(crate) fn creation_outcome(&self, ino: Ino) -> Option<BatchOutcome> {
        if self.batch.effects.inos_allocated.contains(&ino) {
            return Some(self.outcome());
        }
        let sent = self.in_flight.as_ref()?;
        let is_sent = sent.inos_allocated.contains(&ino);
        is_sent.then(|| sent.outcome.clone())
    }

    pub(crate) fn has_batch_in_flight(&self) -> bool {
        self.in_flight.is_some()
    }

    /// Takes the batch as a request. [`Core::finish_batch`] must follow.
    pub(crate) fn take_batch(&mut self) -> (Batch, Request) {
        assert!(self.in_flight.is_none(), "one transaction at a time");
        let batch = std::mem::take(&mut self.batch);
        let is_deferred = !batch.acknowledged.is_empty();
        let request = Request::Transact {
            parts: transaction_parts(&batch.changes),
            durable: batch.durable && !(is_deferred && defect::is(Defect::DeferredBatchNotFlushed)),
        };
        self.in_flight = Some(BatchInFlight {
            changes: batch.changes.clone(),
            outcome: batch.outcome.clone(),
            acknowledged: batch.acknowledged.clone(),
            inos_freed: batch.effects.inos_freed.len(),
            inos_allocated: batch.effects.inos_allocated.clone(),
        });
        (batch, request)
    }

    /// Applies the result of a batch.
    pub(crate) fn finish_batch(
        &mut self,
        batch: Batch,
        result: std::result::Result<(), SpaceError>,
    ) {
        match &result {
            Ok(()) => {
                self.in_flight = None;
                self.apply_committed(batch.changes, batch.effects);
            }
            Err(cause) => {
                let lost = self.changes_to_lose(cause);
                self.in_flight = None;
                self.fail_batch(batch.effects, cause);
                self.lose_acknowledged(lost, cause);
            }
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

    pub(crate) fn roll_back(&mut self, books: BatchEffects) {
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
            // The inode of an acknowledged change may have no user by now.
            self.live_inode(ino).pending_times_mut().fill_missing(noted);
            self.inos_with_pending_times.insert(ino);
        }
    }
}
