//! Fast path for writes that extend a plain file, with one look at the core. Most files are written
//! so: created, written once, and closed.
//!
//! A file is plain here if every page below its size is mapped and no other, no written page is
//! shared, it has no file map for direct clients, and it has no mmap-dirty pages. Then the file's
//! lock is taken without waiting, and the inode alone determines the changes. Any other write takes
//! the slow path of [`Fs::write`].

use crate::Fs;
use crate::error::Result;
use crate::file::write::{PAGE, PIECE_PAGES_MAX, file_extents, page_count, write_pages};
use crate::format::inode::{FILE_BYTES_MAX, Ino, Time};
use crate::txn::core::{Core, Tx};
use std::collections::BTreeSet;
use std::ops::Range;

/// One piece of a write, in one transaction with its inode.
pub(crate) struct Extension<'d> {
    pub(crate) at: u64,
    pub(crate) data: &'d [u8],
    /// Pages of the file that are not mapped yet.
    pub(crate) holes: BTreeSet<u64>,
    pub(crate) durable: bool,
}

impl Extension<'_> {
    /// Adds the piece to a transaction.
    pub(crate) fn apply(&self, tx: &mut Tx<'_>, ino: Ino, now: Time) -> Result<()> {
        let mut inode = tx.inode(ino)?;
        write_pages(tx, &mut inode, self.at, self.data, &self.holes)?;
        inode.size = inode.size.max(self.at + self.data.len() as u64);
        inode.mtime = now;
        inode.ctime = now;
        if self.durable {
            tx.make_durable();
        }
        tx.put_inode(ino, &inode)
    }
}

impl Core {
    /// The offset of the write and the pages that it maps; `None` if the file is not plain, or is
    /// not extended. The caller holds the file exclusively.
    fn plan_extension(
        &mut self,
        ino: Ino,
        offset: Option<u64>,
        len: u64,
    ) -> Result<Option<(u64, BTreeSet<u64>)>> {
        let inode = self.regular_file(ino)?;
        // The write may have to remove capabilities.
        if inode.has_xattrs() {
            return Ok(None);
        }
        let at = offset.unwrap_or(inode.size);
        let Some(end) = at.checked_add(len).filter(|&end| end <= FILE_BYTES_MAX) else {
            return Ok(None);
        };
        let pages = at / PAGE..page_count(end);
        let is_longer = at <= inode.size && inode.size < end;
        if !is_longer || !inode.is_dense() || pages.end - pages.start > PIECE_PAGES_MAX {
            return Ok(None);
        }
        let bytes = pages.start * PAGE..pages.end * PAGE;
        let (_, is_shared) = file_extents(&inode, bytes, &mut |page| self.page(page))?;
        let first_hole = pages.start.max(page_count(inode.size));
        Ok((!is_shared).then(|| (at, (first_hole..pages.end).collect())))
    }
}

impl Fs {
    /// Extends a plain file. Returns the range that was written; `None` if nothing happened, and
    /// the write must take the slow path.
    ///
    /// # Errors
    /// `EISDIR`, `EINVAL`, `ENOSPC`, and errors of the volume.
    pub(crate) fn extend_dense(
        &self,
        ino: Ino,
        offset: Option<u64>,
        data: &[u8],
        durable: bool,
    ) -> Result<Option<Range<u64>>> {
        let now = self.now();
        let mut core = self.lock_core();
        let live = core.live_inodes.get(&ino);
        let Some(_alone) = live.and_then(|live| live.file_lock.try_write()) else {
            return Ok(None);
        };
        core.check_running()?;
        let planned = core.plan_extension(ino, offset, data.len() as u64);
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
        self.change_from(core, |tx| extension.apply(tx, ino, now))?;
        Ok(Some(at..at + data.len() as u64))
    }
}
