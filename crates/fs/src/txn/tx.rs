//! An operation under the lock: it reads pages as the operations before it left them, and changes
//! copies, which join the batch when it has succeeded.

use crate::error::Result;
use crate::format::file_id::FileId;
use crate::format::inode::{INODE_BYTES, Ino, Inode, Time, check_ino, damaged_inode, inode_at};
use crate::format::page_map::Span;
use crate::format::{Page, page_map};
use crate::hash::NumberMap;
use crate::live::inode::TimeGrant;
use crate::live::tail_pages::TailPage;
use crate::txn::batch::Acknowledge;
use crate::txn::batch::join_hints;
use crate::txn::batch::{BatchEffects, PageChange};
use crate::txn::core::Core;
use pagemesh_base::bytes::put;
use pagemesh_base::space::TRANSACTION_PAGES_MAX;
use pagemesh_base::tier_hint::TierHint;
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Instant;

/// Pages that one operation may change; files are written in pieces.
const CHANGED_PAGES_MAX: usize = TRANSACTION_PAGES_MAX as usize;

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
    /// A page of the file, which need not be read.
    tail_page: Option<TailPage>,
    /// The last page of a file that was changed.
    last_data_page: Option<u64>,
    durable: bool,
    /// The hint of the data of files. None if files differ.
    data_hint: Option<TierHint>,
    /// Inodes stored so far.
    stored_inos: Vec<Ino>,
    /// An inode with times stored ahead, and their limit.
    time_grant: Option<(Ino, Time)>,
    /// The call returns before the transaction is committed: the kind of that, and the time.
    acknowledged: Option<(Acknowledge, Instant)>,
}

impl Drop for Tx<'_> {
    fn drop(&mut self) {
        let mut books = std::mem::take(&mut self.effects);
        // The pages are counted in `join_batch` only.
        books.page_delta = 0;
        self.core.roll_back(books);
    }
}

impl<'c> Tx<'c> {
    pub(super) fn new(core: &'c mut Core) -> Tx<'c> {
        Tx {
            core,
            changes: NumberMap::default(),
            effects: BatchEffects::default(),
            new_table: None,
            new_limit_bytes: None,
            new_reserve: None,
            tail_page: None,
            last_data_page: None,
            durable: false,
            data_hint: None,
            stored_inos: Vec::new(),
            time_grant: None,
            acknowledged: None,
        }
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
        self.last_data_page = Some(page);
        // A whole page is copied once, and nothing is zeroed before.
        if part.len() == PAGE_BYTES
            && let Ok(whole) = Arc::<[u8]>::from(part).try_into()
        {
            self.changes.insert(page, PageDraft::Data(whole));
            return Ok(());
        }
        let mut bytes = match self.changes.remove(&page) {
            Some(PageDraft::Data(bytes)) => bytes,
            _ if is_new => Arc::new([0; PAGE_BYTES]),
            _ => match self.tail_page.take_if(|(tail, _)| *tail == page) {
                Some((_, bytes)) => bytes,
                None => self.core.data_page(page)?,
            },
        };
        Arc::make_mut(&mut bytes)[within..within + part.len()].copy_from_slice(part);
        self.changes.insert(page, PageDraft::Data(bytes));
        Ok(())
    }

    /// Supplies the content of a page of the file.
    pub(crate) fn set_tail_page(&mut self, tail: Option<TailPage>) {
        self.tail_page = tail;
    }

    /// The page of a file that was changed last.
    pub(crate) fn last_data_page(&self) -> Option<TailPage> {
        let page = self.last_data_page?;
        match self.changes.get(&page) {
            Some(PageDraft::Data(bytes)) => Some((page, Arc::clone(bytes))),
            _ => None,
        }
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

    /// Adds the hint of a file with data among the changes.
    pub(crate) fn add_data_hint(&mut self, hint: TierHint) {
        self.data_hint = Some(join_hints(self.data_hint, hint));
    }

    /// Makes the transaction complete only when it survives as the pool's class promises.
    pub(crate) fn make_durable(&mut self) {
        self.durable = true;
    }

    /// The call returns before the transaction is committed.
    pub(super) fn acknowledge(&mut self, when: Acknowledge, now: Instant) {
        self.acknowledged = Some((when, now));
    }

    /// Fails if unstable writes were lost since a moment at which the caller has planned the change.
    ///
    /// # Errors
    /// `ENOSPC`.
    pub(crate) fn check_no_loss_since(&self, losses: u64) -> Result<()> {
        match self.core.unstable_losses() == losses {
            true => Ok(()),
            false => Err(Errno::NOSPC.into()),
        }
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

    pub(crate) fn set_inode_table(&mut self, table: Inode) -> Result<()> {
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
    pub(crate) fn locate_inode(&mut self, ino: Ino) -> Result<Option<(u64, usize)>> {
        let (index, at) = inode_at(ino);
        let table = self.inode_table().map;
        let run = page_map::find(&table, index, &mut |page| self.page(page))?;
        Ok(run.map(|run| (run.page, at)))
    }

    /// Decodes the inode at a location.
    pub(crate) fn stored_inode(&mut self, ino: Ino, (page, at): (u64, usize)) -> Result<Inode> {
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

    /// As [`Tx::inode`], of one file for ever.
    ///
    /// # Errors
    /// `ESTALE` if the file is gone: the number is free or has another file, or the inode has no name. A pinned inode needs no name.
    pub(crate) fn inode_of(&mut self, id: FileId) -> Result<Inode> {
        let inode = self.inode(id.ino)?;
        let live = self.core.live_inodes.get(&id.ino);
        let is_pinned = live.is_some_and(|live| live.pins > 0);
        let is_gone = self.core.freeing.contains(&id.ino) || inode.links == 0 && !is_pinned;
        if is_gone || FileId::of(id.ino, &inode) != id {
            return Err(Errno::STALE.into());
        }
        Ok(inode)
    }

    /// Whether the root names an inode as its service file ([`crate::file::service_file`]).
    pub(crate) fn is_service_file(&mut self, ino: Ino, inode: &Inode) -> Result<bool> {
        Ok(inode.can_be_service_file()
            && self.inode(Ino::ROOT)?.service_file == Some(FileId::of(ino, inode)))
    }

    /// Stores an inode at its location, with its pending times.
    pub(crate) fn put_inode(&mut self, ino: Ino, inode: &Inode) -> Result<()> {
        let place = self.locate_inode(ino)?.ok_or(Errno::STALE)?;
        let (page, at) = place;
        let bytes = self.page_mut(page)?;
        let before = Inode::stored_pages(&bytes[at..at + INODE_BYTES]);
        put(&mut bytes[..], at, inode.encode());
        self.stored_inos.push(ino);
        let now = inode.pages + inode.granted_pages();
        self.effects.page_delta += now.cast_signed() - before.cast_signed();
        if let Some(live) = self.core.live_inodes.get_mut(&ino) {
            live.time_grant = None;
            let noted = live.take_pending_times();
            if !noted.is_empty() {
                self.effects.times_written.push((ino, noted));
            }
        }
        Ok(())
    }

    /// Stores an inode with mtime and ctime ahead of its own, which stay pending. Later overwrites need no transaction for a while.
    pub(crate) fn put_inode_ahead(&mut self, ino: Ino, inode: &Inode) -> Result<()> {
        let until = TimeGrant::until(inode.ctime);
        let mut ahead = inode.clone();
        (ahead.mtime, ahead.ctime) = (until, until);
        self.put_inode(ino, &ahead)?;
        let pending = self.core.live_inode(ino).pending_times_mut();
        (pending.mtime, pending.ctime) = (Some(inode.mtime), Some(inode.ctime));
        self.core.inos_with_pending_times.insert(ino);
        self.time_grant = Some((ino, until));
        Ok(())
    }

    /// Takes a free number for a new inode.
    pub(crate) fn take_free_ino(&mut self) -> Ino {
        let ino = self.core.ino_allocator.allocate();
        self.effects.inos_allocated.push(ino);
        ino
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
        if let Some(hint) = self.data_hint {
            batch.data_hint = Some(join_hints(batch.data_hint, hint));
        }
        if let Some(acknowledged) = self.acknowledged {
            let inos = self.stored_inos.drain(..);
            batch.acknowledged.add(inos, acknowledged);
        }
        if let Some((ino, until)) = self.time_grant {
            let stored = self.core.outcome();
            let grant = Box::new(TimeGrant { until, stored });
            self.core.live_inode(ino).time_grant = Some(grant);
        }
        Ok(())
    }
}
