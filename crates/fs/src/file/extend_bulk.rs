//! Long writes at the end of a file: the pages first, then one transaction with the size.
//!
//! 1. A transaction allocates the missing spans, counts the new pages, and sets [`NEEDS_TRIM`].
//! 2. The whole pages behind the old end are written, outside of a batch and without a copy. Nothing behind the end of a
//!    file is visible.
//!    On a space with a write cache they are flushed, and written again if every copy was gone before that.
//! 3. A transaction stores the size and the rest of the bytes, and clears the flag.
//!
//! Invariants:
//! - a crash before the end of step 3 leaves the old content: the mount frees the pages behind the old end, because of the flag;
//! - a crash after it leaves all of the write;
//! - a write without room frees its pages again, and returns to the pieces of [`crate::file::extend`], which write
//!   as much as there is room for.

use crate::error::Result;
use crate::file::extents::{file_extents, write_pages};
use crate::file::free;
use crate::file::write_hook::WriteHook;
use crate::format::inode::{FILE_BYTES_MAX, Ino, NEEDS_TRIM};
use crate::format::page_map::pages_to_next_span;
use crate::format::xattr_kinds::XattrKinds;
use crate::format::{PAGE, page_count};
use crate::io::channel::IoChannel;
use crate::live::kernel_pages::WritePath;
use crate::tree::map_update;
use crate::txn::batch::Acknowledge;
use crate::txn::core::Core;
use crate::txn::manager::TxManager;
use bytes::Bytes;
use pagemesh_base::space::Request;
use pagemesh_base::tier_hint::TierHint;
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// Fewer pages go into one transaction with their inode: that is one transaction, and this is two.
const PAGES_MIN: u64 = 49;
/// The same with a write cache: the three steps flush three times, and each 48 pages in a transaction once.
const PAGES_MIN_CACHED: u64 = 3 * 48 + 1;
/// Most pages of one write: the map of more pages may not fit into one transaction.
const PAGES_MAX: u64 = 512;
/// Most pages in use that such a write may change, too. They are in the transaction of step 3.
const OLD_PAGES_MAX: u64 = 8;

/// A write of whole new pages, and then of its size.
struct BulkWrite<'d> {
    offset: u64,
    data: &'d Bytes,
    /// The first page behind the old end.
    first_page: u64,
    durable: bool,
    /// [`Core::unstable_losses`] at the plan: the old end may be an unstable write.
    losses: u64,
}

impl BulkWrite<'_> {
    fn end(&self) -> u64 {
        self.offset + self.data.len() as u64
    }

    /// The bytes of the pages of step 2.
    fn whole_pages(&self) -> Range<u64> {
        self.first_page * PAGE..self.end() / PAGE * PAGE
    }

    /// Bytes of the write by their place in the file.
    fn bytes(&self, range: Range<u64>) -> Bytes {
        let first = (range.start - self.offset) as usize;
        self.data
            .slice(first..first + (range.end - range.start) as usize)
    }
}

/// The write, if it is such a one. The caller holds the file exclusively.
fn plan<'d>(
    core: &mut Core,
    ino: Ino,
    offset: u64,
    data: &'d Bytes,
    (durable, pages_min): (bool, u64),
) -> Result<Option<BulkWrite<'d>>> {
    let inode = core.regular_file(ino)?;
    let end = offset.checked_add(data.len() as u64);
    let is_append = inode.is_dense() && offset <= inode.size;
    // The write may have to remove capabilities.
    let is_plain = is_append && !inode.may_have_xattr(XattrKinds::CAPABILITIES);
    if !is_plain || end.is_none_or(|end| end > FILE_BYTES_MAX) {
        return Ok(None);
    }
    let write = BulkWrite {
        offset,
        data,
        first_page: page_count(inode.size),
        durable,
        losses: core.unstable_losses(),
    };
    let whole = write.whole_pages();
    let pages = whole.end.saturating_sub(whole.start) / PAGE;
    let old_pages = write.first_page - (offset / PAGE).min(write.first_page);
    if !(pages_min..=PAGES_MAX).contains(&pages) || old_pages > OLD_PAGES_MAX {
        return Ok(None);
    }
    let touched = offset / PAGE * PAGE..whole.end;
    let (_, is_shared) = file_extents(&inode, touched, &mut |page| core.page(page))?;
    Ok((!is_shared).then_some(write))
}

fn pages_min(txs: &TxManager) -> u64 {
    match txs.channels.space().has_write_cache() {
        true => PAGES_MIN_CACHED,
        false => PAGES_MIN,
    }
}

/// As [`extend_bulk_locked`], for a file with a free lock, without mappings and direct clients.
pub(crate) fn extend_bulk(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    offset: Option<u64>,
    data: &Bytes,
    (durable, path): (bool, WritePath),
    hook: &mut impl WriteHook,
) -> Result<Option<Range<u64>>> {
    let pages_min = pages_min(txs);
    if (data.len() as u64) < pages_min * PAGE {
        return Ok(None);
    }
    let mut core = txs.lock_core();
    let lock = core.live_inodes.get(&ino).map(|live| &live.file_lock);
    let held = lock.and_then(|lock| Some((Arc::clone(lock), lock.try_write()?)));
    let held = held.filter(|(lock, _)| !path.leaves_old_pages(lock.used_kernel_pages()));
    let Some((lock, _alone)) = held else {
        return Ok(None);
    };
    core.check_running()?;
    // A kept page of the end would be older than the file.
    drop(core.tail_pages.take(&lock));
    let planned = core.regular_file(ino).and_then(|inode| {
        let offset = offset.unwrap_or(inode.size);
        plan(&mut core, ino, offset, data, (durable, pages_min))
    });
    core.stop_if_damaged(&planned);
    drop(core);
    match planned? {
        Some(write) => run(txs, channel, ino, &write, hook),
        None => Ok(None),
    }
}

/// Extends a file by a long write. Returns the range that was written, all of it; `None` if the write is no such one or has no room, and the
/// caller writes it in pieces. The caller holds the file exclusively.
///
/// # Errors
/// Errors of the volume and of the hook.
pub(crate) fn extend_bulk_locked(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    offset: u64,
    data: &Bytes,
    durable: bool,
    hook: &mut impl WriteHook,
) -> Result<Option<Range<u64>>> {
    let pages_min = pages_min(txs);
    let planned = txs.inspect(|core| plan(core, ino, offset, data, (durable, pages_min)))?;
    match planned {
        Some(write) => run(txs, channel, ino, &write, hook),
        None => Ok(None),
    }
}

/// All steps.
fn run(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    write: &BulkWrite<'_>,
    hook: &mut impl WriteHook,
) -> Result<Option<Range<u64>>> {
    match announce(txs, ino, write, hook) {
        Err(error) if error.errno() == Errno::NOSPC => return Ok(None),
        announced => announced?,
    }
    let written =
        store_pages(txs, channel, ino, write).and_then(|()| publish_size(txs, ino, write, hook));
    let Err(error) = written else {
        hook.complete();
        return Ok(Some(write.offset..write.end()));
    };
    let trimmed =
        txs.with_reserve_fallback(|| free::trim(txs, channel, ino, Some(write.first_page)));
    let is_trimmed = trimmed.is_ok();
    let _ = txs.defer_on_error(ino, trimmed);
    match is_trimmed && error.errno() == Errno::NOSPC {
        true => Ok(None),
        false => Err(error),
    }
}

/// Step 1.
fn announce(
    txs: &TxManager,
    ino: Ino,
    write: &BulkWrite<'_>,
    hook: &mut impl WriteHook,
) -> Result<()> {
    let pages = page_count(write.end());
    txs.change(|tx| {
        tx.check_no_loss_since(write.losses)?;
        let mut inode = tx.inode(ino)?;
        hook.begin(tx, ino, &inode)?;
        let mut page = write.first_page;
        while page < pages {
            map_update::find_or_allocate(tx, &mut inode, page)?;
            page += pages_to_next_span(page);
        }
        inode.flags |= NEEDS_TRIM;
        inode.pages = pages;
        tx.put_inode(ino, &inode)
    })
}

/// Step 2.
fn store_pages(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    write: &BulkWrite<'_>,
) -> Result<()> {
    let (runs, hint): (_, TierHint) = txs.inspect(|core| {
        let inode = core.regular_file(ino)?;
        let (runs, _) = file_extents(&inode, write.whole_pages(), &mut |page| core.page(page))?;
        Ok((runs, inode.tier_hint()))
    })?;
    txs.change_pages_durably(channel, |channel| {
        let requests = runs.iter().map(|&(at, place, len)| Request::Write {
            offset: place,
            data: write.bytes(at..at + len),
            durable: false,
        });
        channel.call_all_hinted(requests, hint)?;
        Ok(())
    })
}

/// Step 3.
fn publish_size(
    txs: &TxManager,
    ino: Ino,
    write: &BulkWrite<'_>,
    hook: &mut impl WriteHook,
) -> Result<()> {
    let now = txs.now();
    let (whole, end) = (write.whole_pages(), write.end());
    let when = match write.durable {
        true => Acknowledge::Committed,
        // Names are not ordered with pages outside of batches, so a commit interval defers none of these.
        false if hook.acknowledge() == Acknowledge::Unstable => Acknowledge::Unstable,
        false => Acknowledge::Committed,
    };
    txs.change_from(txs.lock_core(), when, |tx| {
        let mut inode = tx.inode(ino)?;
        hook.begin(tx, ino, &inode)?;
        inode.mode = hook.mode_after(&inode);
        if write.offset < whole.start {
            let head = write.bytes(write.offset..whole.start);
            write_pages(tx, &mut inode, write.offset, &head, &BTreeSet::new())?;
        }
        if whole.end < end {
            let tail = write.bytes(whole.end..end);
            let hole = BTreeSet::from([whole.end / PAGE]);
            write_pages(tx, &mut inode, whole.end, &tail, &hole)?;
        }
        inode.size = end;
        inode.pages = page_count(end);
        inode.flags &= !NEEDS_TRIM;
        inode.touch_content(now);
        tx.add_data_hint(inode.tier_hint());
        if write.durable {
            tx.make_durable();
        }
        tx.put_inode(ino, &inode)?;
        hook.end(tx.core, ino, &inode)
    })
}
