//! The kernel's page cache and direct clients (RFD 023).
//!
//! The kernel's cached pages do not change when a direct client writes, and the kernel's size of a
//! file does not change when a direct client extends it. So either the kernel caches a file or
//! direct clients have it, never both:
//!
//! - An open that reads and writes through the page cache takes the file from direct clients, until
//!   it is released. The size that they gave it is published first, and the kernel is notified of
//!   it.
//! - Before the file is published to direct clients again, the kernel drops its pages.
//! - An open that bypasses the cache may cache pages by a single request, such as a page fault.
//!   That takes the file from direct clients until the kernel has dropped the pages.
//!
//! # Changes past the cache
//!
//! The kernel drops the pages of a write past the cache before it sends the write. A page fault may read such a page again before
//! the write is done. The page then lacks the written bytes. If a program stores into other
//! bytes of the page, the kernel later writes the whole page back, with the bytes from before the write.
//!
//! So a change past the cache is recorded with the file locked ([`KernelPages::record_change`]), until the kernel has dropped its pages
//! once more, and before the change is answered. Pages that are written back meanwhile do not
//! change the recorded bytes. A program that stores into these same bytes meanwhile has stored
//! before the change.

use crate::direct::{append, publish};
use crate::error::Result;
use crate::file::{free, lifetime, times};
use crate::format::inode::Ino;
use crate::format::{PAGE, page_map};
use crate::live::file_lock::FileLock;
use crate::live::kernel_hooks::KernelHooks;
use crate::live::kernel_pages::KernelPages;
use crate::live::shared_file_map::SharedFileMap;
use crate::txn::core::Core;
use crate::txn::manager::TxManager;
use parking_lot::MutexGuard;
use rustix::io::Errno;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// See [`crate::Fs::begin_caching`].
pub(crate) fn begin_caching(txs: &TxManager, hooks: &KernelHooks, ino: Ino) -> Result<()> {
    let data = txs.file_lock(ino)?;
    let pages = data.kernel_pages();
    pages.cached_opens.fetch_add(1, Ordering::SeqCst);
    let taken = revoke_direct_clients(txs, ino, &data);
    let told = taken.and_then(|()| notify_stale_size(txs, hooks, ino, &data));
    if told.is_err() {
        pages.cached_opens.fetch_sub(1, Ordering::SeqCst);
    }
    told
}

/// See [`crate::Fs::end_caching`].
pub(crate) fn end_caching(txs: &TxManager, ino: Ino) {
    // An error is impossible: the file is open.
    let Ok(data) = txs.file_lock(ino) else {
        return;
    };
    data.kernel_pages().record_cache_event();
    data.kernel_pages()
        .cached_opens
        .fetch_sub(1, Ordering::SeqCst);
}

/// See [`crate::Fs::record_cached_request`].
pub(crate) fn record_cached_request(txs: &TxManager, ino: Ino) -> Result<()> {
    let data = txs.file_lock(ino)?;
    let shared = data.lock.read();
    data.kernel_pages().record_cache_event();
    drop(shared);
    record_read_pages(&data);
    revoke_direct_clients(txs, ino, &data)
}

/// A change that began before does not know that its pages may be read; it has the lock.
fn record_read_pages(data: &FileLock) {
    if data.kernel_pages().record_read_pages() {
        let alone = data.lock.write();
        data.kernel_pages().record_waited_read();
        drop(alone);
    }
}

/// See [`crate::Fs::record_kernel_read`].
pub(crate) fn record_kernel_read(txs: &TxManager, ino: Ino) -> Result<()> {
    record_read_pages(&*txs.file_lock(ino)?);
    Ok(())
}

/// See [`crate::Fs::record_misplaced_write`].
pub(crate) fn record_misplaced_write(txs: &TxManager, ino: Ino) {
    txs.lock_core().record_unseen_write(ino);
    record_in_pages(txs, ino, KernelPages::mark_size_stale);
}

/// Looks at the state of the kernel's page cache for a file; `None` is its default.
fn with_used_pages<T>(txs: &TxManager, ino: Ino, run: impl FnOnce(&KernelPages) -> T) -> Option<T> {
    let core = txs.lock_core();
    let live = core.live_inodes.get(&ino);
    live.and_then(|live| live.file_lock.used_kernel_pages())
        .map(run)
}

/// Changes the state of the kernel's page cache for a file in use.
fn record_in_pages(txs: &TxManager, ino: Ino, change: impl FnOnce(&KernelPages)) {
    let core = txs.lock_core();
    if let Some(live) = core.live_inodes.get(&ino) {
        change(live.file_lock.kernel_pages());
    }
}

/// See [`crate::Fs::record_kernel_pages`].
pub(crate) fn record_kernel_pages(txs: &TxManager, ino: Ino) {
    record_in_pages(txs, ino, KernelPages::record_pages);
}

/// See [`crate::Fs::has_cached_open`].
pub(crate) fn has_cached_open(txs: &TxManager, ino: Ino) -> bool {
    let is_open = with_used_pages(txs, ino, KernelPages::has_cached_open);
    is_open.unwrap_or(false)
}

/// See [`crate::Fs::drop_written_pages`].
pub(crate) fn drop_written_pages(
    txs: &TxManager,
    hooks: &KernelHooks,
    ino: Ino,
    bytes: Range<u64>,
) {
    let changes = with_used_pages(txs, ino, |pages| {
        let changes = pages.changes_within(&bytes);
        let may_be_there = pages.may_have_pages.load(Ordering::SeqCst);
        (may_be_there || !changes.is_empty()).then_some(changes)
    });
    if let Some(changes) = changes.flatten() {
        if !hooks.drop_pages(ino, Some(bytes)) {
            tracing::warn!(ino = ino.0, "the kernel keeps pages of changed bytes");
        }
        with_used_pages(txs, ino, |pages| pages.forget_changes(&changes));
    }
}

/// A program of this machine may store into mappings of a file: it has the file open for writes.
pub(crate) fn record_writable_open(txs: &TxManager, ino: Ino) -> Result<()> {
    let data = txs.file_lock(ino)?;
    let opens = &data.kernel_pages().writable_opens;
    opens.fetch_add(1, Ordering::SeqCst);
    Ok(())
}

/// Takes back one [`record_writable_open`].
pub(crate) fn record_writable_close(txs: &TxManager, ino: Ino) {
    with_used_pages(txs, ino, |pages| {
        let opens = &pages.writable_opens;
        let less = |opens: u64| opens.checked_sub(1);
        let _ = opens.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
    });
}

/// Makes the kernel write the stores of programs into mappings of these bytes back, before another front reads or
/// writes them. The caller holds no lock of the file.
pub(crate) fn write_back_mappings(
    txs: &TxManager,
    hooks: &KernelHooks,
    ino: Ino,
    bytes: Range<u64>,
) {
    if bytes.is_empty() || !hooks.has_callbacks() {
        return;
    }
    let may_be_dirty = with_used_pages(txs, ino, |pages| {
        pages.has_pages() && pages.writable_opens.load(Ordering::SeqCst) > 0
    });
    if may_be_dirty == Some(true) && !hooks.drop_pages(ino, Some(bytes)) {
        tracing::warn!(
            ino = ino.0,
            "the kernel did not write the pages of a mapped file back"
        );
    }
}

/// Another front has extended a file. A program that has it open through the page cache appends, maps and reads by the
/// size that the kernel knows.
pub(crate) fn notify_extension(txs: &TxManager, hooks: &KernelHooks, ino: Ino) {
    if hooks.has_callbacks() && has_cached_open(txs, ino) {
        notify_size(txs, hooks, ino);
    }
}

/// See [`crate::Fs::record_cached_read_open`].
pub(crate) fn record_cached_read_open(txs: &TxManager, hooks: &KernelHooks, ino: Ino) {
    if with_used_pages(txs, ino, KernelPages::has_pages) != Some(true) {
        return;
    }
    let now = txs.now();
    let is_recorded = txs.inspect(|core| {
        let inode = core.inode(ino)?;
        Ok(core.record_read_time(ino, &inode, now))
    });
    // The open itself meets an error again.
    if is_recorded.unwrap_or(false) {
        notify_attributes(txs, hooks, ino);
    }
}

/// Another front has changed the attributes or the ACLs of an inode. The kernel caches ACLs for as long as it has the inode.
pub(crate) fn notify_attributes(txs: &TxManager, hooks: &KernelHooks, ino: Ino) {
    let is_known = hooks.has_callbacks() && {
        let core = txs.lock_core();
        let live = core.live_inodes.get(&ino);
        // The kernel knows the root without a lookup.
        ino == Ino::ROOT || live.is_some_and(|live| live.lookups > 0)
    };
    if is_known {
        hooks.drop_attributes(ino);
    }
}

/// See [`crate::Fs::forget_kernel`].
pub(crate) fn forget_kernel(txs: &TxManager, hooks: &KernelHooks) {
    hooks.clear();
    if let Err(cause) = times::flush_all_times(txs) {
        tracing::warn!(%cause, "times of files wait for the volume");
    }
    let known: Vec<Ino> = {
        let mut core = txs.lock_core();
        let live = core.live_inodes.iter_mut();
        let known = live.filter(|(_, live)| live.lookups > 0);
        known
            .map(|(ino, live)| {
                live.lookups = 0;
                if let Some(pages) = live.file_lock.used_kernel_pages() {
                    pages.forget_kernel();
                }
                *ino
            })
            .collect()
    };
    for ino in known {
        free::release_if_unused(txs, ino);
    }
}

/// Makes direct clients leave a file, and publishes its size.
fn revoke_direct_clients(txs: &TxManager, ino: Ino, data: &FileLock) -> Result<()> {
    let shared = data.lock.read();
    let is_shown =
        data.has_current_map() || txs.inspect(|core| core.inode(ino))?.append_extent.is_some();
    drop(shared);
    if !is_shown {
        return Ok(());
    }
    let _alone = txs.lock_exclusive(ino, data)?;
    txs.with_reserve_fallback(|| append::publish_size(txs, ino))
}

/// See [`crate::Fs::notify_size`].
pub(crate) fn notify_size(txs: &TxManager, hooks: &KernelHooks, ino: Ino) {
    let told = txs.file_lock(ino).and_then(|data| {
        let telling = data.kernel_pages().lock_notify();
        notify_kernel_size(txs, hooks, ino, &data, telling)
    });
    if let Err(cause) = told {
        tracing::debug!(%cause, ino = ino.0, "the kernel was not told the size of a file");
    }
}

/// See [`crate::Fs::notify_mmapped_size`].
pub(crate) fn notify_mmapped_size(txs: &TxManager, hooks: &KernelHooks, ino: Ino) -> Result<()> {
    notify_stale_size(txs, hooks, ino, &*txs.file_lock(ino)?)
}

fn notify_stale_size(
    txs: &TxManager,
    hooks: &KernelHooks,
    ino: Ino,
    data: &FileLock,
) -> Result<()> {
    let is_stale = &data.kernel_pages().is_size_stale;
    if is_stale.load(Ordering::SeqCst) {
        // Otherwise the notification would overwrite data stored into a mapping of the last
        // page.
        hooks.drop_pages(ino, None);
    }
    // Changed under this lock: a thread that finds the flag clear has waited for the
    // notification.
    let telling = data.kernel_pages().lock_notify();
    if !is_stale.swap(false, Ordering::SeqCst) {
        return Ok(());
    }
    let told = notify_kernel_size(txs, hooks, ino, data, telling);
    if told.is_err() {
        is_stale.store(true, Ordering::SeqCst);
    }
    told
}

fn notify_kernel_size(
    txs: &TxManager,
    hooks: &KernelHooks,
    ino: Ino,
    data: &FileLock,
    telling: Option<MutexGuard<'_, ()>>,
) -> Result<()> {
    let mut end = 0;
    if hooks.has_callbacks() {
        let (size, last) = txs.inspect(|core| last_byte(core, ino))?;
        if size > 0 {
            let mut byte = [last];
            data.overlay_mmap_dirty(size - 1, &mut byte);
            hooks.notify_size(ino, size, byte[0]);
            end = size;
        }
    }
    drop(telling);
    // The kernel keeps the last page as read, but its byte may have been overwritten meanwhile.
    if end > 0 {
        hooks.drop_pages(ino, Some(end - 1..end));
    }
    Ok(())
}

/// Makes the kernel drop the pages that it may have of a file without cached opens. The caller
/// holds no lock of the file: the kernel waits for requests that read or write pages.
fn drop_kernel_pages(txs: &TxManager, hooks: &KernelHooks, ino: Ino) {
    // The caller notices a file that is gone itself.
    let Ok(data) = txs.file_lock(ino) else {
        return;
    };
    let pages = data.kernel_pages();
    if pages.has_cached_open() {
        return;
    }
    if let Some(left) = pages.undropped_event() {
        let had_read_pages = pages.forget_pages();
        if hooks.drop_pages(ino, None) {
            pages.dropped_events.fetch_max(left, Ordering::SeqCst);
        } else {
            pages.restore_pages(had_read_pages);
        }
    }
}

/// Makes the kernel drop all pages of a file that was changed past the kernel, with or without
/// cached opens.
///
/// # Errors
/// `EIO`: the kernel may return old data.
pub(crate) fn drop_changed_pages(txs: &TxManager, hooks: &KernelHooks, ino: Ino) -> Result<()> {
    let data = txs.file_lock(ino)?;
    let pages = data.kernel_pages();
    let changes = pages.changes_within(&(0..u64::MAX));
    let may_be_cached = pages.blocks_direct_clients();
    let is_stale = may_be_cached && !hooks.drop_pages(ino, None);
    pages.forget_changes(&changes);
    if is_stale {
        Err(Errno::IO.into())
    } else {
        Ok(())
    }
}

/// See [`crate::Fs::is_cached`].
pub(crate) fn is_cached(txs: &TxManager, ino: Ino) -> bool {
    let data = txs.file_lock(ino);
    data.is_ok_and(|data| data.kernel_pages().blocks_direct_clients())
}

/// The size of a file and its last byte, without mmap-dirty pages.
fn last_byte(core: &mut Core, ino: Ino) -> Result<(u64, u8)> {
    let inode = core.regular_file(ino)?;
    let Some(last) = inode.size.checked_sub(1) else {
        return Ok((0, 0));
    };
    let run = page_map::find(&inode.map, last / PAGE, &mut |page| core.page(page))?;
    let byte = match run {
        Some(run) => core.data_page(run.page)?[(last % PAGE) as usize],
        None => 0,
    };
    Ok((inode.size, byte))
}

pub(crate) fn publish_file_map(
    txs: &TxManager,
    hooks: &KernelHooks,
    ino: Ino,
    wants_append_space: bool,
    make: impl FnOnce() -> Option<Arc<dyn SharedFileMap>>,
) -> Result<Option<Arc<dyn SharedFileMap>>> {
    {
        let mut core = txs.lock_core();
        let live = core.live_inodes.get_mut(&ino).filter(|live| live.opens > 0);
        let Some(live) = live else { return Ok(None) };
        // Keeps the file from being freed meanwhile: the issuer may be killed and its file
        // closed.
        live.opens += 1;
    }
    drop_kernel_pages(txs, hooks, ino);
    let shown = publish::publish_open_file_map(txs, hooks, ino, wants_append_space, make);
    lifetime::release(txs, ino);
    shown
}
