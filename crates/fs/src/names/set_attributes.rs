//! Changes of attributes by a caller that no kernel has checked: one guarded change of all fields (NFSv3 SETATTR).

use crate::error::Result;
use crate::file::access::{self, Caller, Rights};
use crate::file::resize::{ResizeHook, set_size_with};
use crate::file::wcc::{WccReply, WccTracker};
use crate::file::{kernel_pages, lifetime, write_at};
use crate::format::file_id::FileId;
use crate::format::inode::{FILE_BYTES_MAX, Ino, Inode, Time};
use crate::io::channel::IoChannel;
use crate::live::kernel_hooks::KernelHooks;
use crate::names::attrs::{AttrChanges, apply_changes, lock_to_arm};
use crate::txn::manager::TxManager;
use crate::txn::tx::Tx;
use rustix::io::Errno;

/// A new time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The time of the change.
    Now,
    /// This one.
    At(Time),
}

/// Attributes to change, or of a new inode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttributes {
    /// Permissions, and the set-id and sticky bits.
    pub mode: Option<u16>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Size in bytes.
    pub size: Option<u64>,
    /// Last read.
    pub atime: Option<SetTime>,
    /// Last change of the content.
    pub mtime: Option<SetTime>,
}

impl SetAttributes {
    /// Checks that a caller may change these attributes of an inode.
    pub(crate) fn check(
        &self,
        tx: &mut Tx<'_>,
        (ino, inode): (Ino, &Inode),
        caller: &Caller,
    ) -> Result<()> {
        if self.mode.is_some() {
            access::check_owner(inode, caller)?;
        }
        if let Some(uid) = self.uid {
            access::check_new_uid(inode, caller, uid)?;
        }
        if let Some(gid) = self.gid {
            access::check_new_gid(inode, caller, gid)?;
        }
        if self.size.is_some() {
            access::check_write(tx, (ino, inode), caller)?;
        }
        for time in [self.atime, self.mtime].into_iter().flatten() {
            match time {
                SetTime::At(_) => access::check_owner(inode, caller)?,
                SetTime::Now if access::check_owner(inode, caller).is_ok() => {}
                SetTime::Now => access::check(tx, (ino, inode), caller, Rights::WRITE)?,
            }
        }
        Ok(())
    }

    /// The changes of an inode, without the size and without bits that the caller may not set.
    pub(crate) fn changes(&self, inode: &Inode, caller: &Caller, now: Time) -> AttrChanges {
        let time = |set: SetTime| match set {
            SetTime::Now => now,
            SetTime::At(time) => time,
        };
        let gid = self.gid.unwrap_or(inode.gid);
        let mode = self.mode.map(|mode| mode & 0o7777);
        let is_given = self.uid.is_some() || self.gid.is_some();
        // A new owner clears set-id bits, also one that root gives.
        let is_cleared = is_given && !inode.is_directory();
        AttrChanges {
            mode: match mode {
                Some(mode) => Some(access::permitted_mode(mode, gid, caller)),
                None => is_cleared.then(|| access::mode_without_setid(inode, caller) & 0o7777),
            },
            uid: self.uid,
            gid: self.gid,
            atime: self.atime.map(time),
            mtime: self.mtime.map(time),
        }
    }
}

/// One change of attributes. It runs in the transaction of a new size, or in one of its own.
struct AttrChange<'c> {
    id: FileId,
    wanted: &'c SetAttributes,
    guard: Option<Time>,
    caller: &'c Caller,
    now: Time,
    tracker: WccTracker,
}

impl AttrChange<'_> {
    /// The inode, if the change is permitted.
    fn check(&mut self, tx: &mut Tx<'_>) -> Result<Inode> {
        let inode = self.tracker.begin(tx)?;
        if self.guard.is_some_and(|ctime| ctime != inode.ctime) {
            return Err(Errno::AGAIN.into());
        }
        self.wanted.check(tx, (self.id.ino, &inode), self.caller)?;
        Ok(inode)
    }

    /// Changes all but the size.
    fn run(&mut self, tx: &mut Tx<'_>) -> Result<()> {
        let mut inode = self.check(tx)?;
        if *self.wanted != SetAttributes::default() {
            let changes = self.wanted.changes(&inode, self.caller, self.now);
            apply_changes(tx, self.id.ino, &mut inode, changes)?;
            inode.touch(self.now);
            tx.put_inode(self.id.ino, &inode)?;
        }
        self.tracker.end(tx)
    }
}

impl ResizeHook for AttrChange<'_> {
    fn begin(&mut self, tx: &mut Tx<'_>) -> Result<()> {
        self.check(tx).map(drop)
    }

    fn apply(&mut self, tx: &mut Tx<'_>, ino: Ino, inode: &mut Inode) -> Result<()> {
        let changes = self.wanted.changes(inode, self.caller, self.now);
        inode.mode = access::mode_after_write(inode, self.caller);
        apply_changes(tx, ino, inode, changes)
    }

    fn end(&mut self, tx: &mut Tx<'_>) -> Result<()> {
        self.tracker.end(tx)
    }
}

/// See [`crate::Fs::set_attributes`].
pub(crate) fn set_attributes(
    txs: &TxManager,
    hooks: &KernelHooks,
    id: FileId,
    wanted: &SetAttributes,
    guard: Option<Time>,
    caller: &Caller,
) -> WccReply<()> {
    let mut change = AttrChange {
        id,
        wanted,
        guard,
        caller,
        now: txs.now(),
        tracker: WccTracker::new(id),
    };
    // The lock of the file, which some changes need, must not belong to a later file with this number.
    let pinned = lifetime::pin(txs, id);
    let result = pinned.and_then(|()| {
        let mut channel = match txs.channels.borrow() {
            Ok(channel) => channel,
            Err(error) => {
                lifetime::unpin(txs, id, None);
                return Err(error);
            }
        };
        let changed = match wanted.size {
            Some(size) => resize(txs, &mut channel, size, &mut change),
            None => change_fields(txs, &mut change),
        };
        lifetime::unpin(txs, id, Some(&mut channel));
        changed
    });
    // The kernel may need a channel for this, so none is held.
    if let (Some(size), Ok(())) = (wanted.size, &result) {
        write_at::notify_kernel(txs, hooks, id, &(size..FILE_BYTES_MAX));
        kernel_pages::notify_extension(txs, hooks, id.ino);
    }
    if result.is_ok() {
        kernel_pages::notify_attributes(txs, hooks, id.ino);
    }
    WccReply {
        wcc: change.tracker.wcc(txs, &result),
        result,
    }
}

fn change_fields(txs: &TxManager, change: &mut AttrChange<'_>) -> Result<()> {
    let armed = lock_to_arm(txs, change.id.ino, change.wanted.mode)?;
    let _alone = armed.as_ref().map(|data| data.write());
    txs.change(|tx| change.run(tx))
}

fn resize(
    txs: &TxManager,
    channel: &mut IoChannel,
    size: u64,
    change: &mut AttrChange<'_>,
) -> Result<()> {
    let ino = change.id.ino;
    // Also before the steps that precede the transaction.
    txs.inspect(|core| {
        change.check(&mut core.begin())?;
        core.regular_file(ino).map(drop)
    })?;
    let resized = set_size_with(txs, channel, ino, size, change)?;
    change.tracker.set_pages(resized.pages);
    Ok(())
}
