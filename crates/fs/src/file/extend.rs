//! Writes that extend a file: each piece is one transaction with the inode. Long ones go by [`crate::file::extend_bulk`].
//!
//! There is a fast path for plain files, with one look at the core. Most files are written so:
//! created, written once, and closed.
//!
//! A file is plain here if every page below its size is mapped and no other, no written page is
//! shared, it has no file map for direct clients, and it has no mmap-dirty pages. Then the file's
//! lock is taken without waiting, and the inode alone determines the changes. Any other write takes
//! the slow path of [`crate::Fs::write`].

use crate::error::Result;
use crate::file::extents;
use crate::file::extents::{PIECE_PAGES_MAX, file_extents, write_pages};
use crate::file::write_hook::WriteHook;
use crate::format::inode::{FILE_BYTES_MAX, Ino, Time};
use crate::format::xattr_kinds::XattrKinds;
use crate::format::{PAGE, page_count};
use crate::io::channel::IoChannel;
use crate::live::kernel_pages::WritePath;
use crate::txn::batch::Acknowledge;
use crate::txn::core::Core;
use crate::txn::manager::TxManager;
use crate::txn::tx::Tx;
use bytes::Bytes;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// One piece of a write, in one transaction with its inode.
struct Extension<'d> {
    at: u64,
    data: &'d [u8],
    /// Pages of the file that are not mapped yet.
    holes: BTreeSet<u64>,
    durable: bool,
}

impl Extension<'_> {
    /// Adds the piece to a transaction.
    fn apply(&self, tx: &mut Tx<'_>, ino: Ino, now: Time, hook: &mut impl WriteHook) -> Result<()> {
        let mut inode = tx.inode(ino)?;
        hook.begin(tx, ino, &inode)?;
        inode.mode = hook.mode_after(&inode);
        write_pages(tx, &mut inode, self.at, self.data, &self.holes)?;
        inode.size = inode.size.max(self.at + self.data.len() as u64);
        inode.touch_content(now);
        tx.add_data_hint(inode.tier_hint());
        if self.durable {
            tx.make_durable();
        }
        tx.put_inode(ino, &inode)?;
        hook.end(tx.core, ino, &inode)
    }
}

/// The offset of the write and the pages that it maps; `None` if the file is not plain, or is
/// not extended. The caller holds the file exclusively.
fn plan_extension(
    core: &mut Core,
    ino: Ino,
    offset: Option<u64>,
    len: u64,
) -> Result<Option<(u64, BTreeSet<u64>)>> {
    let inode = core.regular_file(ino)?;
    // The write may have to remove capabilities.
    if inode.may_have_xattr(XattrKinds::CAPABILITIES) {
        return Ok(None);
    }
    let at = offset.unwrap_or(inode.size);
    let Some(end) = at.checked_add(len).filter(|&end| end <= FILE_BYTES_MAX) else {
        return Ok(None);
    };
    let pages = at / PAGE..page_count(end);
    // Behind the end in its last page, or in the next one, no page is left out.
    let is_longer = pages.start <= page_count(inode.size) && inode.size < end;
    if !is_longer || !inode.is_dense() || pages.end - pages.start > PIECE_PAGES_MAX {
        return Ok(None);
    }
    let bytes = pages.start * PAGE..pages.end * PAGE;
    let (_, is_shared) = file_extents(&inode, bytes, &mut |page| core.page(page))?;
    let first_hole = pages.start.max(page_count(inode.size));
    Ok((!is_shared).then(|| (at, (first_hole..pages.end).collect())))
}

/// Extends a plain file. Returns the range that was written; `None` if nothing happened, and
/// the write must take the slow path.
///
/// # Errors
/// `EISDIR`, `EINVAL`, `ENOSPC`, and errors of the volume.
pub(crate) fn extend_dense(
    txs: &TxManager,
    ino: Ino,
    offset: Option<u64>,
    data: &[u8],
    (durable, path): (bool, WritePath),
    hook: &mut impl WriteHook,
) -> Result<Option<Range<u64>>> {
    let now = txs.now();
    let mut core = txs.lock_core();
    let lock = core.live_inodes.get(&ino).map(|live| &live.file_lock);
    let held = lock.and_then(|lock| Some((Arc::clone(lock), lock.try_write()?)));
    let held = held.filter(|(lock, _)| !path.leaves_old_pages(lock.used_kernel_pages()));
    let Some((lock, _alone)) = held else {
        return Ok(None);
    };
    core.check_running()?;
    let planned = plan_extension(&mut core, ino, offset, data.len() as u64);
    core.stop_if_damaged(&planned);
    let Some((at, holes)) = planned? else {
        return Ok(None);
    };
    let extension = Extension {
        at,
        data,
        holes,
        durable,
    };
    let tail = core.tail_pages.take(&lock);
    let losses = core.unstable_losses();
    let when = match durable {
        true => Acknowledge::Committed,
        false => hook.acknowledge(),
    };
    let last = txs.change_from(core, when, |tx| {
        if tx.check_no_loss_since(losses).is_err() {
            return Ok(None);
        }
        tx.set_tail_page(tail.clone());
        extension.apply(tx, ino, now, hook)?;
        Ok(Some(tx.last_data_page()))
    })?;
    let Some(last) = last else {
        return Ok(None);
    };
    hook.complete();
    let end = at + data.len() as u64;
    if let Some(last) = last.filter(|_| !end.is_multiple_of(PAGE)) {
        let mut core = txs.lock_core();
        if core.unstable_losses() == losses {
            core.tail_pages.put(&lock, last);
        }
    }
    Ok(Some(at..end))
}

/// Writes the data with its inode, as far as possible. The caller holds the file exclusively.
pub(crate) fn extend_locked(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    offset: u64,
    data: &Bytes,
    durable: bool,
    hook: &mut impl WriteHook,
) -> Result<Range<u64>> {
    let end = offset + data.len() as u64;
    let mut at = offset;
    while at < end {
        let next = ((at / PAGE + PIECE_PAGES_MAX) * PAGE).min(end);
        let part = &data[(at - offset) as usize..(next - offset) as usize];
        match extend_piece(txs, channel, ino, at, part, durable, hook) {
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
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    at: u64,
    part: &[u8],
    durable: bool,
    hook: &mut impl WriteHook,
) -> Result<()> {
    let end = at + part.len() as u64;
    let extension = Extension {
        at,
        data: part,
        holes: extents::holes(txs, channel, ino, at / PAGE..page_count(end))?,
        durable,
    };
    let now = txs.now();
    txs.change(|tx| extension.apply(tx, ino, now, hook))?;
    hook.complete();
    Ok(())
}
