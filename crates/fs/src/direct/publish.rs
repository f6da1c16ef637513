//! How the mount gives a file to direct clients and takes it back (RFD 015). Their protection from
//! each other is in [`crate::live::file_lock`].

use crate::direct::append;
use crate::error::Result;
use crate::format::inode::{Ino, InodeKind};
use crate::format::page_count;
use crate::format::page_map::span_index;
use crate::live::file_lock::FileLock;
use crate::live::inode::LiveInode;
use crate::live::kernel_hooks::KernelHooks;
use crate::live::shared_file_map::SharedFileMap;
use crate::txn::core::Core;
use crate::txn::manager::TxManager;
use std::sync::Arc;

/// Up to this number of maps of all files, maps of closed files are kept for the next open.
const FILE_MAPS_KEPT_MAX: usize = 1024;

/// The spans of a file, up to the end of its append extent. `None` if direct clients cannot
/// have it: it has holes or shared spans, is damaged, or a write would remove privileges.
fn direct_spans(core: &mut Core, ino: Ino) -> Result<Option<(u64, Vec<u64>)>> {
    let inode = core.inode(ino)?;
    let is_sound = core.check_trusted(ino).is_ok() && core.is_running();
    if inode.kind() != InodeKind::File
        || !inode.is_dense_before_append()
        || !is_sound
        || inode.needs_remove_privs()
    {
        return Ok(None);
    }
    let pieces = core.pieces(&inode, 0, usize::MAX)?;
    let pages = match inode.append_extent {
        None => page_count(inode.size),
        Some(extent) => extent.limit_page,
    };
    let needed = match pages.checked_sub(1) {
        None => 0,
        Some(last) => span_index(last).0 + 1,
    };
    if pieces.iter().any(|piece| piece.is_shared) || pieces.len() < needed {
        return Ok(None);
    }
    let numbered = pieces.iter().enumerate();
    let in_order = numbered
        .take(needed)
        .all(|(index, piece)| span_index(piece.first_page) == (index, 0));
    let spans = pieces.iter().map(|piece| piece.span.page);
    Ok(in_order.then(|| (inode.size, spans.take(needed).collect())))
}

/// The caller has the file open.
pub(crate) fn publish_open_file_map(
    txs: &TxManager,
    hooks: &KernelHooks,
    ino: Ino,
    wants_append_space: bool,
    make: impl FnOnce() -> Option<Arc<dyn SharedFileMap>>,
) -> Result<Option<Arc<dyn SharedFileMap>>> {
    let data = txs.file_lock(ino)?;
    let _lock = data.lock.write();
    txs.settle(ino)?;
    if data.is_mmapped() || data.kernel_pages().blocks_direct_clients() {
        return Ok(None);
    }
    let extent = txs.inspect(|core| core.inode(ino))?.append_extent;
    if let (Some(extent), Some(file_map)) = (extent, data.file_map())
        && !file_map.is_outdated()
        && file_map.append_end(extent).is_some()
    {
        return Ok(Some(Arc::clone(file_map)));
    }
    let blocked = data.block_direct();
    blocked.outdate();
    append::publish_size(txs, ino)?;
    // Checked before `make` is called: a directory gets no map.
    if txs.inspect(|core| direct_spans(core, ino))?.is_none() {
        return Ok(None);
    }
    if data.file_map().is_none()
        && let Some(file_map) = make()
    {
        data.set_file_map(file_map);
        txs.lock_core().inos_with_file_map.insert(ino);
    }
    let Some(file_map) = data.file_map() else {
        return Ok(None);
    };
    let granted = if wants_append_space {
        append::grant_append_space(txs, hooks, ino, &data)?
    } else {
        None
    };
    let Some((size, spans)) = txs.inspect(|core| direct_spans(core, ino))? else {
        return Ok(None);
    };
    file_map.publish(size, &spans);
    if let Some((extent, tail)) = granted {
        file_map.grant_append_space(extent, &tail);
    }
    Ok(Some(Arc::clone(file_map)))
}

/// See [`crate::Fs::disable_direct_access`].
pub(crate) fn disable_direct_access(txs: &TxManager, ino: Ino) -> Result<()> {
    let data = txs.file_lock(ino)?;
    let _alone = data.lock.write();
    txs.settle(ino)?;
    if !data.set_mmapped() {
        data.block_direct_permanently();
    }
    txs.with_reserve_fallback(|| append::publish_size(txs, ino))
}

/// See [`crate::Fs::is_mmapped`].
pub(crate) fn is_mmapped(txs: &TxManager, ino: Ino) -> bool {
    let data = txs.file_lock(ino);
    data.is_ok_and(|data| data.is_mmapped() || data.has_mmap_dirty())
}

/// See [`crate::Fs::record_close`].
pub(crate) fn record_close(txs: &TxManager, ino: Ino) {
    let data = txs
        .lock_core()
        .live_inodes
        .get(&ino)
        .map(|live| Arc::clone(&live.file_lock));
    if let Some(file_map) = data.as_ref().and_then(|data| data.file_map()) {
        file_map.record_close();
    }
}

/// Releases the map of a file at its last close, if too many files have one: each map takes a
/// file descriptor, and descriptors are limited. The caller holds the file exclusively, and
/// only the caller has it open.
pub(crate) fn release_file_map(txs: &TxManager, ino: Ino, data: &Arc<FileLock>) {
    if data.is_mmapped() || data.has_mmap_dirty() {
        return;
    }
    if txs.lock_core().inos_with_file_map.len() <= FILE_MAPS_KEPT_MAX {
        return;
    }
    let ended = data.block_direct_permanently();
    let mut core = txs.lock_core();
    core.collect_direct_write(ino);
    // A thread that waits for the lock, or had it, holds a reference. The core gives out new
    // ones.
    let is_unused = |live: &LiveInode| live.opens == 1 && Arc::strong_count(data) == 2;
    let live = core.live_inodes.get_mut(&ino);
    if let Some(live) = live.filter(|live| is_unused(live) && Arc::ptr_eq(&live.file_lock, data)) {
        live.file_lock = Arc::new(data.without_file_map());
        core.inos_with_file_map.remove(&ino);
    } else {
        drop(core);
        ended.unblock();
    }
}
