//! Changes of a file's size.

use crate::error::Result;
use crate::file::attr::{Attr, attr};
use crate::file::extents::write_pages;
use crate::file::{deferred_free, extents, free, mmap_dirty, privileges, redo_log, share};
use crate::format::inode::{FILE_BYTES_MAX, HAS_RESERVED_PAGES, Ino, Inode, NEEDS_TRIM};
use crate::format::{PAGE, page_count};
use crate::io::channel::IoChannel;
use crate::txn::manager::TxManager;
use crate::txn::tx::Tx;
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;
use std::collections::BTreeSet;

/// Work of a caller in the transaction that changes a size. The transaction may run again.
pub(crate) trait ResizeHook {
    /// Before the change. An error ends it.
    fn begin(&mut self, tx: &mut Tx<'_>) -> Result<()>;

    /// The inode with its new size and times, before it is stored.
    fn apply(&mut self, tx: &mut Tx<'_>, ino: Ino, inode: &mut Inode) -> Result<()>;

    /// The inode is stored.
    fn end(&mut self, tx: &mut Tx<'_>) -> Result<()>;
}

/// The kernel has checked the caller, and changes other attributes by other calls.
impl ResizeHook for () {
    fn begin(&mut self, _: &mut Tx<'_>) -> Result<()> {
        Ok(())
    }

    fn apply(&mut self, _: &mut Tx<'_>, _: Ino, _: &mut Inode) -> Result<()> {
        Ok(())
    }

    fn end(&mut self, _: &mut Tx<'_>) -> Result<()> {
        Ok(())
    }
}

/// See [`crate::Fs::set_size`].
pub(crate) fn set_size(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    size: u64,
) -> Result<Attr> {
    set_size_with(txs, channel, ino, size, &mut ())
}

/// As [`set_size`], with a hook.
pub(crate) fn set_size_with(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    size: u64,
    hook: &mut impl ResizeHook,
) -> Result<Attr> {
    if size > FILE_BYTES_MAX {
        return Err(Errno::FBIG.into());
    }
    let lock = txs.file_lock(ino)?;
    let _telling = lock.kernel_pages().lock_notify();
    let _alone = txs.lock_exclusive(ino, &lock)?;
    txs.with_reserve_fallback(|| redo_log::complete_pending(txs, channel, ino))?;
    privileges::drop_capabilities(txs, ino)?;
    let set = if size < txs.inspect(|core| core.regular_file(ino))?.size {
        txs.with_reserve_fallback(|| set_size_locked(txs, channel, ino, size, hook))
    } else {
        set_size_locked(txs, channel, ino, size, hook)
    };
    // The file may have been truncated although an error is returned.
    let size = txs.inspect(|core| core.regular_file(ino))?.size;
    mmap_dirty::discard(txs, ino, &lock, size..FILE_BYTES_MAX);
    set
}

/// The caller holds the file exclusively. After an error this may run again.
fn set_size_locked(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    size: u64,
    hook: &mut impl ResizeHook,
) -> Result<Attr> {
    let now = txs.now();
    let mut old = txs.inspect(|core| core.regular_file(ino))?;
    if size > old.size && old.flags & NEEDS_TRIM != 0 {
        deferred_free::free_marked(txs, channel, ino)?;
        old = txs.inspect(|core| core.regular_file(ino))?;
    }
    let is_cut = size < old.size || old.flags & (HAS_RESERVED_PAGES | NEEDS_TRIM) != 0;
    if is_cut {
        // The last span must be the file's own before its pages are freed or zeroed.
        let end = page_count(size);
        share::unshare(txs, channel, ino, end.saturating_sub(1)..end)?;
    }
    let tail = if is_cut && !size.is_multiple_of(PAGE) {
        extents::holes(txs, channel, ino, size / PAGE..size / PAGE + 1)?.is_empty()
    } else {
        false
    };
    txs.change(|tx| {
        hook.begin(tx)?;
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
        inode.touch_content(now);
        hook.apply(tx, ino, &mut inode)?;
        tx.put_inode(ino, &inode)?;
        hook.end(tx)
    })?;
    if is_cut {
        let was_dense = old.is_dense() && size <= old.size;
        let pages = was_dense.then(|| page_count(size));
        let trimmed = txs.with_reserve_fallback(|| free::trim(txs, channel, ino, pages));
        // The new size is set: a failure to free pages is retried later.
        let _ = txs.defer_on_error(ino, trimmed);
    }
    txs.inspect(|core| {
        let inode = core.inode(ino)?;
        attr(core, ino, &inode)
    })
}
