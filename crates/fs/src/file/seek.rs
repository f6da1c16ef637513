//! The search for data and holes.

use crate::direct::append;
use crate::error::Result;
use crate::format::PAGE;
use crate::format::inode::Ino;
use crate::format::page_map::FileSpan;
use crate::io::channel::IoChannel;
use crate::txn::manager::TxManager;
use rustix::io::Errno;
use std::ops::Range;

/// The target of a seek.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeekTarget {
    /// The next byte that may be other than zero.
    Data,
    /// The next byte of a hole; the end is one.
    Hole,
}

/// See [`crate::Fs::seek`].
pub(crate) fn seek(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    offset: u64,
    what: SeekTarget,
) -> Result<u64> {
    let lock = txs.file_lock(ino)?;
    let _shared = txs.lock_shared(ino, &lock)?;
    let (inode, pieces) = txs.inspect(|core| {
        let mut inode = core.regular_file(ino)?;
        inode.size = append::file_end(core, ino, &inode)?;
        let pieces = core.pieces(&inode, offset / PAGE, usize::MAX)?;
        Ok((inode, pieces))
    })?;
    if offset >= inode.size {
        return Err(Errno::NXIO.into());
    }
    if lock.is_mmapped() || lock.has_mmap_dirty() || inode.redo_log.is_some() {
        // Pages in the kernel or in the buffer may lie in holes: all bytes count as data.
        return Ok(match what {
            SeekTarget::Data => offset,
            SeekTarget::Hole => inode.size,
        });
    }
    let mut data: Vec<Range<u64>> = Vec::new();
    for FileSpan {
        first_page: at,
        span,
        ..
    } in pieces
    {
        channel.for_each_mapped_run(span.page..span.end(), |run| {
            let first = at + run.start - span.page;
            let end = at + run.end - span.page;
            match data.last_mut() {
                Some(last) if last.end == first => last.end = end,
                _ => data.push(first..end),
            }
        })?;
        let is_known = data.last().is_some_and(|run| match what {
            SeekTarget::Data => run.end * PAGE > offset,
            SeekTarget::Hole => run.end < at + (1 << span.order),
        });
        if is_known {
            break;
        }
    }
    let mut runs = data.into_iter().map(|run| run.start * PAGE..run.end * PAGE);
    match what {
        SeekTarget::Data => runs
            .find(|run| run.end > offset)
            .map(|run| run.start.max(offset))
            .filter(|&at| at < inode.size)
            .ok_or(Errno::NXIO.into()),
        SeekTarget::Hole => {
            let within = runs.find(|run| run.contains(&offset));
            Ok(within.map_or(offset, |run| run.end.min(inode.size)))
        }
    }
}
