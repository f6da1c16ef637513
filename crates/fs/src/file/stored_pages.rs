//! Reads of a file's pages as they are, without a redo log that must be applied first.

use crate::direct::append;
use crate::error::Result;
use crate::file::extents::{FileExtents, file_extents};
use crate::format::inode::{Ino, Inode, Time};
use crate::format::{PAGE, Page, page_count};
use crate::io::channel::IoChannel;
use crate::live::file_lock::FileLock;
use crate::txn::core::Core;
use crate::txn::manager::TxManager;
use pagemesh_base::tier_hint::TierHint;
use std::ops::Range;
use std::sync::Arc;

/// The access time of a file after a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadTime {
    /// The time of the read, by the rules of the mount ([`crate::ReadTimes`]).
    Recorded,
    /// The one before, as for `O_NOATIME`.
    Unchanged,
}

impl ReadTime {
    fn now(self, txs: &TxManager) -> Option<Time> {
        (self == ReadTime::Recorded).then(|| txs.now())
    }
}

/// The bytes that a read returns, their location, and the hint of the requests for them.
type PlannedRead = (Range<u64>, FileExtents, TierHint);

/// The read as planned, and the result of `look`; `None` if a redo log must be applied first.
fn plan_read<T>(
    core: &mut Core,
    ino: Ino,
    offset: u64,
    len: u32,
    now: Option<Time>,
    look: &mut impl FnMut(&mut Core, &Inode) -> Result<T>,
) -> Result<Option<(PlannedRead, T)>> {
    let inode = core.regular_file(ino)?;
    let seen = look(core, &inode)?;
    match inode.redo_log {
        Some(_) => Ok(None),
        None => Ok(Some((
            extents_to_read(core, ino, &inode, (offset, len), now)?,
            seen,
        ))),
    }
}

/// As [`plan_read`], whether the file has a redo log or not. Records the read at `now`.
fn extents_to_read(
    core: &mut Core,
    ino: Ino,
    inode: &Inode,
    (offset, len): (u64, u32),
    now: Option<Time>,
) -> Result<PlannedRead> {
    if let Some(now) = now {
        core.record_read_time(ino, inode, now);
    }
    let end = append::file_end(core, ino, inode)?.min(offset.saturating_add(u64::from(len)));
    let range = offset.min(end)..end;
    let (runs, _) = file_extents(inode, range.clone(), &mut |page| core.page(page))?;
    Ok((range, runs, inode.tier_hint()))
}

/// Reads under the file's lock. `None` if a redo log must be applied first, unless buffered
/// pages cover all pages of the log.
pub(crate) fn read_with_mmap_dirty(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    data: &FileLock,
    offset: u64,
    len: u32,
) -> Result<Option<Vec<u8>>> {
    let how = (ReadTime::Unchanged, &mut |_: &mut Core, _: &Inode| Ok(()));
    let read = look_and_read(txs, channel, ino, data, (offset, len), how)?;
    Ok(read.map(|(bytes, ())| bytes))
}

/// As [`read_with_mmap_dirty`]. `look` sees the inode under the core's lock that plans the read; its error ends the read.
pub(crate) fn look_and_read<T>(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    data: &FileLock,
    (offset, len): (u64, u32),
    (time, look): (ReadTime, &mut impl FnMut(&mut Core, &Inode) -> Result<T>),
) -> Result<Option<(Vec<u8>, T)>> {
    let now = time.now(txs);
    let found = txs.inspect(|core| {
        let inode = core.regular_file(ino)?;
        let seen = look(core, &inode)?;
        if inode.redo_log.is_some() && !data.has_mmap_dirty() {
            return Ok(None);
        }
        let planned = extents_to_read(core, ino, &inode, (offset, len), now)?;
        Ok(Some((planned, seen)))
    })?;
    let Some(((range, runs, hint), seen)) = found else {
        return Ok(None);
    };
    let first = range.start;
    let mut bytes = read_extents(channel, range, &runs, hint)?;
    data.overlay_mmap_dirty(first, &mut bytes);
    Ok(Some((bytes, seen)))
}

/// Bytes of a page that is in a batch: their range in the page, the byte of the file at which they begin, and the page.
type PendingPart = (Range<usize>, u64, Arc<Page>);

/// The parts of these runs that are in a batch, which the space may not have yet. Later ones count.
fn pending_pages(core: &Core, runs: &FileExtents) -> Vec<PendingPart> {
    let mut parts = Vec::new();
    for &(at, place, len) in runs {
        for (page, bytes) in core.pending_pages(place / PAGE..page_count(place + len)) {
            let (first, end) = (page * PAGE, (page + 1) * PAGE);
            let (from, to) = (first.max(place), end.min(place + len));
            let within = (from - first) as usize..(to - first) as usize;
            parts.push((within, at + from - place, bytes));
        }
    }
    parts
}

/// Reads with one look at the core. `None` unless the file's lock is free, the file has no
/// shared map and no mmap-dirty pages, and no redo log must be applied.
pub(crate) fn read_unlocked<T>(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    (offset, len): (u64, u32),
    (time, look): (ReadTime, &mut impl FnMut(&mut Core, &Inode) -> Result<T>),
) -> Result<Option<(Vec<u8>, T)>> {
    let now = time.now(txs);
    let found = txs.inspect(|core| {
        let live = core.live_inodes.get(&ino);
        let Some(shared) = live.and_then(|live| live.file_lock.try_read()) else {
            return Ok(None);
        };
        let Some(found) = plan_read(core, ino, offset, len, now, look)? else {
            return Ok(None);
        };
        // Unstable writes, for example, are read without a wait for their batch.
        let pending = match core.has_uncommitted(ino) {
            true => pending_pages(core, &found.0.1),
            false => Vec::new(),
        };
        Ok(Some((shared, found, pending)))
    })?;
    let Some((_shared, ((range, runs, hint), seen), pending)) = found else {
        return Ok(None);
    };
    let first = range.start;
    let mut bytes = read_extents(channel, range, &runs, hint)?;
    for (part, at, page) in pending {
        let to = (at - first) as usize;
        bytes[to..to + part.len()].copy_from_slice(&page[part]);
    }
    Ok(Some((bytes, seen)))
}

fn read_extents(
    channel: &mut IoChannel,
    range: Range<u64>,
    runs: &[(u64, u64, u64)],
    hint: TierHint,
) -> Result<Vec<u8>> {
    let len = range.end - range.start;
    if let [(_, place, all)] = runs
        && *all == len
    {
        return channel.read_hinted(*place, len as u32, hint);
    }
    // All runs at once.
    let parts = channel.read_all_hinted(
        runs.iter().map(|&(_, place, len)| (place, len as u32)),
        hint,
    )?;
    let mut bytes = Vec::with_capacity(len as usize);
    for (&(at, ..), part) in runs.iter().zip(parts) {
        bytes.resize((at - range.start) as usize, 0);
        bytes.extend_from_slice(&part);
    }
    bytes.resize(len as usize, 0);
    Ok(bytes)
}
