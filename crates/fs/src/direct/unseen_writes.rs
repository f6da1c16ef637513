//! Writes that the kernel did not see, because direct clients or the mount made them past it.
//! Watchers of the files (inotify, fanotify) get events only if the mount notifies the kernel.

use crate::format::inode::Ino;
use crate::live::shared_file_map::SharedFileMap;
use crate::txn::core::Core;
use crate::txn::manager::TxManager;
use std::sync::Arc;

/// While it exists, no direct client moves the end of a file.
pub struct EndLock(Option<Arc<dyn SharedFileMap>>);

impl Drop for EndLock {
    fn drop(&mut self) {
        if let Some(file_map) = &self.0 {
            file_map.unlock_end();
        }
    }
}

/// The map of a file that its direct clients share.
fn file_map_of(core: &Core, ino: Ino) -> Option<Arc<dyn SharedFileMap>> {
    let live = core.live_inodes.get(&ino)?;
    live.file_lock.file_map().map(Arc::clone)
}

/// See [`crate::Fs::take_unseen_writes`].
pub(crate) fn take(txs: &TxManager, max: usize) -> Vec<Ino> {
    let mut core = txs.lock_core();
    let mut taken = core.unseen_writes.take(max);
    taken.retain(|ino| core.live_inodes.contains_key(ino));
    taken
}

/// See [`crate::Fs::lock_end`].
pub(crate) fn lock_end(txs: &TxManager, ino: Ino) -> Option<EndLock> {
    let file_map = file_map_of(&txs.lock_core(), ino);
    match file_map {
        Some(file_map) if !file_map.lock_end() => None,
        file_map => Some(EndLock(file_map)),
    }
}

/// See [`crate::Fs::has_direct_clients`].
pub(crate) fn has_direct_clients(txs: &TxManager, ino: Ino) -> bool {
    file_map_of(&txs.lock_core(), ino).is_some()
}

/// See [`crate::Fs::collect_direct_writes`].
pub(crate) fn collect(txs: &TxManager) -> Vec<Ino> {
    let mut core = txs.lock_core();
    core.collect_all_direct_writes();
    let changed = std::mem::take(&mut core.kernel_stale_inos);
    let grows = |ino: &Ino| {
        core.inode(*ino)
            .is_ok_and(|inode| inode.append_extent.is_some())
    };
    let (later, now): (Vec<Ino>, Vec<Ino>) = changed.into_iter().partition(grows);
    core.kernel_stale_inos.extend(later);
    now
}
