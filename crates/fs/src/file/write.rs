//! Writes of files.
//!
//! A write of pages that the file has changes no inode. It takes the file's lock
//! shared, goes out on the caller's own channel, and only its time is recorded, after its bytes: a
//! reader that gets the new attributes does not keep old bytes under them. Every other change
//! takes the lock exclusively. Its changes of the inode are in the same transaction as the pages,
//! or [`NEEDS_TRIM`] announces them before the first page changes.
//!
//! # One write
//!
//! A front begins a write of 4 KiB within a file without holes.
//!
//! 1. `Fs::begin_write` → `file::write::begin_write` → `write::try_overwrite`: under the core's lock it
//!    takes the file's lock shared. `write::plan_overwrite` finds the pages by
//!    `extents::file_extents`, and makes requests of the volume. The core's lock is released.
//! 2. `WriteQueue::begin` gives the request to the channel of the volume (`VolumeChannel::submit`).
//! 3. `WriteQueue::reap` takes the completion, records the time under the core's lock, releases the
//!    file's lock, and reports the result.
//!
//! Neither this process nor the kernel caches the data. A write that needs any other step returns
//! from step 1; its caller then calls [`write()`], which waits for the volume.

use crate::error::{Corruption, Result};
use crate::file::extend_bulk::{extend_bulk, extend_bulk_locked};
use crate::file::extents::file_extents;
use crate::file::write_hook::WriteHook;
use crate::file::{deferred_free, extend, privileges, redo_log, share, times};
use crate::format::inode::{FILE_BYTES_MAX, Ino, NEEDS_TRIM, damaged_inode};
use crate::format::xattr_kinds::XattrKinds;
use crate::format::{PAGE, page_count};
use crate::io::channel::IoChannel;
use crate::io::write_queue::{Overwrite, WriteEnd, WriteQueue};
use crate::live::file_lock::FileReadGuard;
use crate::live::kernel_pages::WritePath;
use crate::tree::xattr_list::has_capabilities;
use crate::txn::core::Core;
use crate::txn::manager::TxManager;
use bytes::Bytes;
use pagemesh_base::space::Request;
use pagemesh_base::tier_hint::TierHint;
use rustix::io::Errno;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

/// Whether a write is an overwrite of written pages.
enum OverwriteAttempt {
    Ready(FileReadGuard, PlannedOverwrite),
    NotOverwrite,
    /// Another thread holds the lock exclusively or waits for that, the file is not looked up, or changes must be committed
    /// first.
    Locked,
}

/// An overwrite within a file, into spans of its own.
struct PlannedOverwrite {
    requests: Vec<Request>,
    hint: TierHint,
    /// The file has holes, and the volume knows whether these pages are some of them.
    may_fill_holes: bool,
}

impl PlannedOverwrite {
    /// Whether a page of it is a hole. The caller holds the file's lock, so none becomes one.
    fn fills_holes(&self, channel: &mut IoChannel) -> Result<bool> {
        for request in &self.requests {
            if let Request::Write { offset, data, .. } = request {
                let pages = offset / PAGE..page_count(offset + data.len() as u64);
                let written = channel.count_mapped_pages(pages.clone())?;
                if written < pages.end - pages.start {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }
}

/// Plans an overwrite; `None` if it is not such a write. The caller holds the file's lock. It checks the pages if the file
/// has holes ([`PlannedOverwrite::fills_holes`]).
fn plan_overwrite(
    core: &mut Core,
    ino: Ino,
    offset: u64,
    data: &Bytes,
    durable: bool,
    hook: &mut impl WriteHook,
) -> Result<Option<PlannedOverwrite>> {
    core.check_running()?;
    let inode = core.regular_file(ino)?;
    hook.begin(&mut core.begin(), ino, &inode)?;
    if hook.mode_after(&inode) != inode.mode {
        return Ok(None);
    }
    let end = offset.saturating_add(data.len() as u64);
    let may_fill_holes = !inode.is_dense();
    let is_pending = inode.redo_log.is_some() || inode.append_extent.is_some();
    if end > inode.size || is_pending {
        return Ok(None);
    }
    if has_capabilities(&mut core.begin(), ino, &inode)? {
        return Ok(None);
    }
    let (runs, is_shared) = file_extents(&inode, offset..end, &mut |page| core.page(page))?;
    if is_shared {
        return Ok(None);
    }
    if runs.iter().map(|&(_, _, len)| len).sum::<u64>() < data.len() as u64 {
        if may_fill_holes {
            return Ok(None);
        }
        let what = "by its page count it is a file without holes, and it has one";
        return Err(damaged_inode(ino, Corruption(what.into())));
    }
    let requests = runs.into_iter().map(|(at, place, len)| {
        let first = (at - offset) as usize;
        Request::Write {
            offset: place,
            data: data.slice(first..first + len as usize),
            durable,
        }
    });
    Ok(Some(PlannedOverwrite {
        requests: requests.collect(),
        hint: inode.tier_hint(),
        may_fill_holes,
    }))
}

/// Records the time of an overwrite. Its bytes are there, or some of them after an error; the file is still locked. With
/// `keeps_time` the time, or one ahead, is stored when this returns.
fn record_overwrite(
    txs: &TxManager,
    ino: Ino,
    keeps_time: bool,
    hook: &mut impl WriteHook,
) -> Result<()> {
    let now = txs.now();
    let is_kept = txs.inspect(|core| {
        let inode = core.inode(ino)?;
        hook.begin_attributes(&inode);
        let changed = inode.change_time(now);
        core.record_write_time(ino, changed);
        hook.end(core, ino, &inode)?;
        Ok(!keeps_time || core.grants_time(ino, changed))
    })?;
    match is_kept {
        true => Ok(()),
        false => times::store_ahead(txs, ino),
    }
}

/// The end of a queued write.
impl WriteEnd for TxManager {
    fn end_write(&self, ino: Ino, keeps_time: bool) -> Result<()> {
        record_overwrite(self, ino, keeps_time, &mut ())
    }
}

/// Sends the requests of an overwrite, waits for them, and records the time.
fn overwrite(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    planned: PlannedOverwrite,
    durable: bool,
    hook: &mut impl WriteHook,
) -> Result<()> {
    let sent = channel.call_all_hinted(planned.requests, planned.hint);
    let keeps_time = sent.is_ok() && times::keeps_time(txs, durable);
    let recorded = record_overwrite(txs, ino, keeps_time, hook);
    sent?;
    recorded?;
    hook.complete();
    Ok(())
}

/// See [`crate::Fs::write`] and [`crate::Fs::write_past_cache`].
pub(crate) fn write(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    offset: Option<u64>,
    data: &Bytes,
    how: (bool, WritePath),
) -> Result<Range<u64>> {
    write_with(txs, channel, ino, offset, data, how, &mut ())
}

/// As [`write()`], with a hook.
pub(crate) fn write_with(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    offset: Option<u64>,
    data: &Bytes,
    (durable, path): (bool, WritePath),
    hook: &mut impl WriteHook,
) -> Result<Range<u64>> {
    let written = write_unsynced(txs, channel, ino, offset, data, (durable, path), hook)?;
    if durable {
        txs.commit_acknowledged()?;
    }
    Ok(written)
}

/// As [`write_with`]; a durable write may precede acknowledged changes.
fn write_unsynced(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    offset: Option<u64>,
    data: &Bytes,
    (durable, path): (bool, WritePath),
    hook: &mut impl WriteHook,
) -> Result<Range<u64>> {
    let how = (durable, path);
    if let Some(written) = extend::extend_dense(txs, ino, offset, data, how, hook)? {
        return Ok(written);
    }
    if let Some(written) = extend_bulk(txs, channel, ino, offset, data, how, hook)? {
        return Ok(written);
    }
    // Nearly always the lock is free, and one look at the core suffices.
    if let Some(offset) = offset
        && overwrite_shared(txs, channel, ino, offset, data, how, hook)?
    {
        return Ok(offset..offset + data.len() as u64);
    }
    write_exclusively(txs, channel, ino, offset, data, (durable, path), hook)
}

/// Overwrites written pages, with the file's lock shared; false if the write needs it exclusively.
fn overwrite_shared(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    offset: u64,
    data: &Bytes,
    (durable, path): (bool, WritePath),
    hook: &mut impl WriteHook,
) -> Result<bool> {
    match try_overwrite(txs, ino, offset, data, (durable, path), hook)? {
        OverwriteAttempt::Ready(_guard, planned) => {
            overwrite_planned(txs, channel, ino, planned, durable, hook)
        }
        OverwriteAttempt::Locked => {
            let lock = txs.file_lock(ino)?;
            let _shared = txs.lock_shared(ino, &lock)?;
            if lock.has_mmap_dirty() || path.leaves_old_pages(lock.used_kernel_pages()) {
                return Ok(false);
            }
            overwrite_locked(txs, channel, ino, offset, data, durable, hook)
        }
        OverwriteAttempt::NotOverwrite => Ok(false),
    }
}

/// Any write, with the file locked.
fn write_exclusively(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    offset: Option<u64>,
    data: &Bytes,
    (durable, path): (bool, WritePath),
    hook: &mut impl WriteHook,
) -> Result<Range<u64>> {
    let lock = txs.file_lock(ino)?;
    let _alone = txs.lock_exclusive(ino, &lock)?;
    redo_log::complete_pending(txs, channel, ino)?;
    let inode = txs.inspect(|core| {
        let inode = core.regular_file(ino)?;
        // Also before the steps below, which change the file.
        hook.begin(&mut core.begin(), ino, &inode)?;
        Ok(inode)
    })?;
    if inode.may_have_xattr(XattrKinds::CAPABILITIES) {
        privileges::drop_capabilities(txs, ino)?;
    }
    let offset = offset.unwrap_or(inode.size);
    let room = FILE_BYTES_MAX.saturating_sub(offset);
    if room == 0 && !data.is_empty() {
        return Err(Errno::FBIG.into());
    }
    let data = &data.slice(..data.len().min(usize::try_from(room).unwrap_or(usize::MAX)));
    let end = offset + data.len() as u64;
    if end > inode.size && inode.flags & NEEDS_TRIM != 0 {
        deferred_free::free_marked(txs, channel, ino)?;
    }
    share::unshare(txs, channel, ino, offset / PAGE..page_count(end))?;
    let written = if overwrite_locked(txs, channel, ino, offset, data, durable, hook)? {
        offset..end
    } else {
        let written = match extend_bulk_locked(txs, channel, ino, offset, data, durable, hook)? {
            Some(written) => written,
            None => extend::extend_locked(txs, channel, ino, offset, data, durable, hook)?,
        };
        // The hint is set by a write that found holes. Others, such as appends, need no look at the inode.
        if lock.fills_holes.load(Relaxed) {
            let pages = txs.inspect(|core| core.inode(ino))?.pages;
            lock.fills_holes.store(pages != inode.pages, Relaxed);
        }
        written
    };
    lock.patch_mmap_dirty(offset, &data[..(written.end - offset) as usize]);
    if path.leaves_old_pages(lock.used_kernel_pages()) {
        lock.kernel_pages().record_change(written.clone());
    }
    Ok(written)
}

/// See [`crate::Fs::begin_write`].
pub(crate) fn begin_write(
    txs: &TxManager,
    pipe: &mut WriteQueue<'_>,
    id: u64,
    ino: Ino,
    offset: u64,
    data: &Bytes,
    (durable, path): (bool, WritePath),
) -> Result<bool> {
    let keeps_time = times::keeps_time(txs, durable);
    if keeps_time && !txs.lock_core().grants_time(ino, txs.now()) {
        // Its end would wait for a transaction.
        return Ok(false);
    }
    match try_overwrite(txs, ino, offset, data, (durable, path), &mut ())? {
        // The caller asks the volume about holes, and waits for that.
        OverwriteAttempt::Ready(_, planned) if planned.may_fill_holes => Ok(false),
        OverwriteAttempt::Ready(guard, planned) => {
            let write = Overwrite {
                ino,
                guard,
                requests: planned.requests,
                hint: planned.hint,
                bytes: data.len(),
            };
            pipe.begin(id, write, keeps_time);
            Ok(true)
        }
        OverwriteAttempt::NotOverwrite | OverwriteAttempt::Locked => Ok(false),
    }
}

/// Takes the file's lock, if it is free, for an overwrite.
fn try_overwrite(
    txs: &TxManager,
    ino: Ino,
    offset: u64,
    data: &Bytes,
    (durable, path): (bool, WritePath),
    hook: &mut impl WriteHook,
) -> Result<OverwriteAttempt> {
    txs.inspect(|core| {
        // A durable write commits all changes before it.
        if core.has_uncommitted(ino) || durable && core.has_acknowledged() {
            return Ok(OverwriteAttempt::Locked);
        }
        let lock = core.live_inodes.get(&ino).map(|live| &live.file_lock);
        let held = lock.and_then(|lock| Some((lock, lock.try_read()?)));
        let held = held.filter(|(lock, _)| !path.leaves_old_pages(lock.used_kernel_pages()));
        let Some((_, held)) = held else {
            return Ok(OverwriteAttempt::Locked);
        };
        let planned = plan_overwrite(core, ino, offset, data, durable, hook)?;
        Ok(match planned.filter(|it| !it.requests.is_empty()) {
            Some(planned) => OverwriteAttempt::Ready(held, planned),
            None => OverwriteAttempt::NotOverwrite,
        })
    })
}

/// Overwrites written pages; false if it is not such a write. The caller holds the file's lock.
fn overwrite_locked(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    offset: u64,
    data: &Bytes,
    durable: bool,
    hook: &mut impl WriteHook,
) -> Result<bool> {
    let planned = txs.inspect(|core| plan_overwrite(core, ino, offset, data, durable, hook))?;
    match planned {
        Some(planned) => overwrite_planned(txs, channel, ino, planned, durable, hook),
        None => Ok(false),
    }
}

/// As [`overwrite_locked`], of a planned write.
fn overwrite_planned(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    planned: PlannedOverwrite,
    durable: bool,
    hook: &mut impl WriteHook,
) -> Result<bool> {
    if planned.may_fill_holes {
        let last_filled = &txs.file_lock(ino)?.fills_holes;
        if last_filled.load(Relaxed) || planned.fills_holes(channel)? {
            last_filled.store(true, Relaxed);
            return Ok(false);
        }
    }
    overwrite(txs, channel, ino, planned, durable, hook)?;
    Ok(true)
}
