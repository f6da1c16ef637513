//! The use of an inode: it is created with its first lookup, looked up, opened, pinned and released. An
//! inode without a name is freed after its last use.

use crate::direct::append;
use crate::error::Result;
use crate::file::attr::Attr;
use crate::file::{attr, free, mmap_dirty};
use crate::format::file_id::FileId;
use crate::format::inode::Ino;
use crate::io::channel::IoChannel;
use crate::txn::manager::TxManager;

/// See [`crate::Fs::lookup_ino`].
pub(crate) fn lookup_ino(txs: &TxManager, ino: Ino) -> Result<Attr> {
    txs.inspect(|core| {
        let inode = core.inode_of_user(ino)?;
        let attr = attr::attr(core, ino, &inode)?;
        core.live_inode(ino).lookups += 1;
        Ok(attr)
    })
}

/// See [`crate::Fs::forget`].
pub(crate) fn forget(txs: &TxManager, ino: Ino, lookups: u64) {
    let mut core = txs.lock_core();
    let live = core.live_inode(ino);
    live.lookups = live.lookups.saturating_sub(lookups);
    drop(core);
    free::release_if_unused(txs, ino);
}

/// See [`crate::Fs::open`].
pub(crate) fn open(txs: &TxManager, ino: Ino) -> Result<Attr> {
    let (attr, creation, number) = txs.inspect(|core| {
        let inode = core.inode_of_user(ino)?;
        let attr = attr::attr(core, ino, &inode)?;
        let live = core.live_inode(ino);
        live.opens += 1;
        let number = live.creation;
        // A create that has returned is not waited for: its caller has accepted the loss.
        let is_acknowledged = core.has_uncommitted(ino) && !core.has_unstable(ino);
        let creation = core.creation_outcome(ino).filter(|_| !is_acknowledged);
        Ok((attr, creation, number))
    })?;
    if let Some(creation) = creation
        && let Err(cause) = txs.await_batch(txs.lock_core(), &creation)
    {
        let mut core = txs.lock_core();
        // Another file may have the number by now.
        let live = core.live_inodes.get_mut(&ino);
        if let Some(live) = live.filter(|it| it.creation == number) {
            live.opens = live.opens.saturating_sub(1);
        }
        return Err(cause);
    }
    Ok(attr)
}

/// Keeps an inode from being freed by other threads, until [`release`].
pub(crate) fn hold(txs: &TxManager, ino: Ino) -> Result<()> {
    txs.inspect(|core| {
        core.inode_not_freeing(ino)?;
        core.live_inode(ino).opens += 1;
        Ok(())
    })
}

/// See [`crate::Fs::release`].
pub(crate) fn release(txs: &TxManager, ino: Ino) {
    release_with(txs, ino, None);
}

/// As [`crate::Fs::release`], with the caller's channel if it has one.
pub(crate) fn release_with(txs: &TxManager, ino: Ino, mut channel: Option<&mut IoChannel>) {
    let mut core = txs.lock_core();
    // Published while the file is open, or the file could be freed meanwhile. Other threads may
    // open it too, and have direct clients or mmap-dirty pages. Mmap-dirty pages disable direct
    // access.
    let mut has_clients = core.inos_with_file_map.contains(&ino);
    while has_clients && core.live_inode(ino).opens == 1 {
        drop(core);
        let is_settled = append::publish_size_at_close(txs, ino);
        core = txs.lock_core();
        has_clients = is_settled
            && core
                .inode(ino)
                .is_ok_and(|inode| inode.append_extent.is_some());
    }
    let mut goes_on = true;
    while goes_on && core.mmap_dirty.contains(ino) && core.live_inode(ino).opens == 1 {
        drop(core);
        goes_on = mmap_dirty::flush_at_close(txs, ino, channel.as_deref_mut());
        core = txs.lock_core();
    }
    let live = core.live_inode(ino);
    live.opens = live.opens.saturating_sub(1);
    if live.opens == 0 {
        live.file_lock.clear_lost_pages();
    }
    drop(core);
    free::release_if_unused_with(txs, ino, channel);
}

/// See [`crate::Fs::pin`].
pub(crate) fn pin(txs: &TxManager, id: FileId) -> Result<()> {
    txs.inspect(|core| {
        core.inode_of(id)?;
        core.live_inode(id.ino).pins += 1;
        Ok(())
    })
}

/// Takes back one [`pin`]. Frees an inode without a name after its last use. Other inodes keep their pending
/// times. An error of the volume leaves an orphan for the next mount.
pub(crate) fn unpin(txs: &TxManager, id: FileId, channel: Option<&mut IoChannel>) {
    {
        let mut core = txs.lock_core();
        // A create may fail after another thread has pinned its inode. Then the number may have another file.
        let is_other = match core.inode(id.ino) {
            Ok(inode) => FileId::of(id.ino, &inode) != id,
            Err(_) => false,
        };
        let live = core.live_inodes.get_mut(&id.ino);
        if let Some(live) = live.filter(|_| !is_other) {
            live.pins = live.pins.saturating_sub(1);
        }
    }
    free::release_unpinned(txs, id.ino, channel);
}
