//! Writes of stateless servers: the steps of [`crate::file::write`], with the caller checked and attributes collected.

use crate::error::Result;
use crate::file::access::Caller;
use crate::file::kernel_pages;
use crate::file::read::IO_BYTES_MAX;
use crate::file::wcc::{Wcc, WccReply};
use crate::file::write::write_with;
use crate::file::write_hook::{CheckedWrite, WriteHook};
use crate::format::file_id::FileId;
use crate::live::kernel_hooks::KernelHooks;
use crate::live::kernel_pages::WritePath;
use crate::txn::manager::TxManager;
use bytes::Bytes;
use std::ops::Range;

/// See [`crate::Fs::write_at`].
pub(crate) fn write_at(
    txs: &TxManager,
    hooks: &KernelHooks,
    id: FileId,
    (offset, data, is_stable): (u64, &Bytes, bool),
    caller: &Caller,
) -> WccReply<u32> {
    let mut hook = CheckedWrite::new(id, caller);
    let data = data.slice(..data.len().min(IO_BYTES_MAX as usize));
    let how = (is_stable, WritePath::Copy);
    let range = offset..offset.saturating_add(data.len() as u64);
    // The kernel may need a channel for this, and for the notifications below. So none is held then.
    kernel_pages::write_back_mappings(txs, hooks, id.ino, range);
    let result = match data.is_empty() {
        true => check_empty(txs, id, &mut hook).map(|()| 0..0),
        false => txs.channels.borrow().and_then(|mut channel| {
            write_with(
                txs,
                &mut channel,
                id.ino,
                Some(offset),
                &data,
                how,
                &mut hook,
            )
        }),
    };
    let wcc = hook.wcc().unwrap_or_else(|| Wcc::now(txs, id));
    if let Ok(written) = &result {
        notify_kernel(txs, hooks, id, written);
        if is_extension(&wcc, written) {
            kernel_pages::notify_extension(txs, hooks, id.ino);
        }
    }
    WccReply {
        wcc,
        result: result.map(|written| (written.end - written.start) as u32),
    }
}

/// Whether a write may have moved the end of the file.
fn is_extension(wcc: &Wcc, written: &Range<u64>) -> bool {
    wcc.before.is_none_or(|before| written.end > before.size)
}

/// A write of no bytes changes nothing.
fn check_empty(txs: &TxManager, id: FileId, hook: &mut CheckedWrite<'_>) -> Result<()> {
    txs.inspect(|core| {
        core.regular_file(id.ino)?;
        let inode = core.inode_of(id)?;
        hook.begin(&mut core.begin(), id.ino, &inode)?;
        hook.end(core, id.ino, &inode)
    })?;
    hook.complete();
    Ok(())
}

/// The kernel of this machine drops its pages of the written bytes, and its attributes within a second.
pub(crate) fn notify_kernel(
    txs: &TxManager,
    hooks: &KernelHooks,
    id: FileId,
    written: &Range<u64>,
) {
    if !hooks.has_callbacks() || written.is_empty() {
        return;
    }
    {
        let mut core = txs.lock_core();
        let live = core.live_inodes.get(&id.ino);
        if live.is_some_and(|live| live.lookups > 0) {
            core.record_unseen_write(id.ino);
        }
    }
    kernel_pages::drop_written_pages(txs, hooks, id.ino, written.clone());
}
