//! Writes that make a plain file longer, with one look at it. Most files are written so:
//! made, written once, and closed.
//!
//! A file is plain here if every page below its size is mapped and no other, it shares
//! none of the pages that are written, no direct client knows it, and nothing is held of
//! it. Then the file's lock is taken without a wait, and what the write changes follows
//! from the inode alone. Any other write goes the long way of [`Fs::write`].

use crate::Fs;
use crate::core::{Core, Tx};
use crate::data::{PAGE, PIECE_PAGES_MAX, file_extents, page_count, write_pages};
use crate::error::Result;
use crate::format::{FILE_BYTES_MAX, Ino, Time};
use std::collections::BTreeSet;
use std::ops::Range;

/// One piece of a file that is written together with its inode.
pub(crate) struct Extension<'d> {
    pub(crate) at: u64,
    pub(crate) data: &'d [u8],
    /// Pages of the file that are not mapped yet.
    pub(crate) holes: BTreeSet<u64>,
    pub(crate) durable: bool,
}

impl Extension<'_> {
    /// Puts it into a transaction.
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
    /// Where the write goes and which pages it maps; none: the file is not plain, or does
    /// not get longer. The caller holds the file alone.
    fn plan_extension(
        &mut self,
        ino: Ino,
        offset: Option<u64>,
        len: u64,
    ) -> Result<Option<(u64, BTreeSet<u64>)>> {
        let inode = self.regular_file(ino)?;
        // The write may have to take capabilities away.
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
    /// Writes to a plain file that gets longer. Returns where the bytes went; none:
    /// nothing has happened, and the write must go the long way.
    ///
    /// # Errors
    /// `EISDIR`, `EINVAL`, `ENOSPC`, and what the volume says.
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
