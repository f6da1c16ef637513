//! A file system: a POSIX name space and its files in the pages of one volume.
//!
//! A call's changes are atomic: after a crash all of them are there, or none. They precede the
//! changes of later calls ([`core`]). When the call returns, every in-sync copy has them. On pools
//! of class `file-sync` they survive power loss after [`Fs::sync`], or if they were written with
//! `durable_pages`.
//!
//! The kernel of the mounting machine checks permissions. This crate applies them to new inodes
//! only: owner, group, set-group-id directories.
//!
//! This crate opens no files and knows no kernel; fronts do.

#![forbid(unsafe_code)]

mod alloc;
mod direct;
mod error;
mod file;
mod format;
mod hash;
mod io;
mod names;
mod recovery;
mod tree;
mod txn;

pub use direct::append::{APPEND_PAGES_MAX, FOOTER_BYTES, TailWrite, footer_page};
pub use direct::shared_file_map::{SharedFileMap, span_index, span_pages};
pub use direct::unseen_writes::EndLock;
pub use error::{FsError, Result};
pub use file::allocate::{AllocateMode, SeekTarget};
pub use file::mmap_dirty::{
    MMAP_DIRTY_PAGES_HARD_MAX, MMAP_DIRTY_PAGES_MAX, MMAP_DIRTY_SECONDS_MAX,
};
pub use file::sync::LostWriteCursor;
pub use file::write::ATOMIC_PAGES_MAX;
pub use format::inode::{AppendExtent, FILE_BYTES_MAX, Ino, InodeKind, Time};
pub use io::channel::{IoChannel, Wait, WriteQueue};
pub use io::channel_pool::PooledChannel;
pub use names::namespace::{AttrChanges, CreateKind, Credentials, DirEntry, RenameMode};
pub use names::xattrs::SetXattrMode;
pub use recovery::mount::{MkfsOptions, mkfs};

use crate::file::write::page_count;
use crate::format::inode::Inode;
use crate::io::channel_pool::ChannelPool;
use crate::txn::core::{Core, Tx};
use pagemesh_base::space::{Reply, Request, Space, SpaceError};
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Bytes of the longest name of an entry.
pub const NAME_MAX: usize = 255;
/// Bytes of the longest target of a link.
pub const TARGET_MAX: usize = 4095;
/// Names of one file: the limit of ext4.
pub const LINKS_MAX: u32 = 65_000;

/// First pause before a batch is sent again. The volume itself has retried for long by then.
const RESEND_PAUSE_MIN: Duration = Duration::from_millis(5);
/// Longest such pause.
const RESEND_PAUSE_MAX: Duration = Duration::from_millis(500);

/// Reads the time of day, for the times of changed inodes.
pub type Clock = fn() -> Time;

/// A mounted file system.
pub struct Fs {
    wait: Wait,
    clock: Clock,
    core: Mutex<Core>,
    /// Signals that the batch in flight has ended.
    batch_done: Condvar,
    /// Sends batches and the requests of the reserve.
    commit_channel: Mutex<IoChannel>,
    /// Mapped pages of the reserve. Locked while the reserve is filled or released.
    reserved_pages: Mutex<u64>,
    /// Write losses of the volume that were already reported to a sync.
    reported_losses: LostWriteCursor,
    /// Batches are not sent again after an error.
    is_resend_stopped: AtomicBool,
    channel_pool: ChannelPool,
    /// Called when direct clients begin to append to a file, or its first mmap-dirty page arrives.
    append_hook: OnceLock<Box<dyn Fn(Ino) + Send + Sync>>,
    open_hook: OnceLock<Box<dyn Fn(u32) + Send + Sync>>,
    kernel_callbacks: OnceLock<file::kernel_pages::KernelCallbacks>,
    /// The last field: the channels above are dropped first, because the space waits for them.
    space: Arc<dyn Space>,
}

/// Attributes of an inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attr {
    /// Its number.
    pub ino: Ino,
    /// Number and generation together identify one file for ever.
    pub generation: u32,
    /// Its type.
    pub kind: InodeKind,
    /// Permissions, and the set-id and sticky bits.
    pub mode: u16,
    /// Number of names.
    pub links: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Size in bytes.
    pub size: u64,
    /// Pages of 4 KiB that hold data.
    pub pages: u64,
    /// Last read.
    pub atime: Time,
    /// Last change of the content.
    pub mtime: Time,
    /// Last change of anything.
    pub ctime: Time,
    /// Creation time.
    pub btime: Time,
    /// Device number; 0 for other types.
    pub device: u32,
    /// Whether size or pages may change at any time, by direct clients or by mmap-dirty pages.
    pub has_volatile_size: bool,
}

impl Attr {
    fn of(ino: Ino, inode: &Inode) -> Attr {
        Attr {
            ino,
            generation: inode.generation,
            kind: inode.kind(),
            mode: inode.mode & 0o7777,
            links: inode.links,
            uid: inode.uid,
            gid: inode.gid,
            size: inode.size,
            pages: inode.pages,
            atime: inode.atime,
            mtime: inode.mtime,
            ctime: inode.ctime,
            btime: inode.btime,
            device: inode.device,
            has_volatile_size: inode.append_extent.is_some(),
        }
    }
}

impl Core {
    /// Attributes of an inode, with the size that direct clients see.
    fn attr(&mut self, ino: Ino, inode: &Inode) -> Result<Attr> {
        let mut attr = Attr::of(ino, inode);
        attr.size = self.file_end(ino, inode)?;
        attr.pages += page_count(attr.size) - page_count(inode.size);
        // Whether these pages fill holes is known only when they are written to the file.
        let held = self.mmap_dirty.page_count(ino);
        attr.pages = (attr.pages + held)
            .min(page_count(attr.size))
            .max(attr.pages);
        attr.has_volatile_size |= held > 0;
        Ok(attr)
    }
}

/// Space usage of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Limit in bytes; 0: no limit but that of its pools.
    pub limit_bytes: u64,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Inodes in use.
    pub inodes: u64,
}

impl Fs {
    fn now(&self) -> Time {
        (self.clock)()
    }

    fn lock_commit_channel(&self) -> MutexGuard<'_, IoChannel> {
        self.commit_channel
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_core(&self) -> MutexGuard<'_, Core> {
        // A panic under the lock ends the mounting process; tests go on.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a read-only operation. If it finds damage, the file system takes no more changes.
    fn inspect<T>(&self, run: impl FnOnce(&mut Core) -> Result<T>) -> Result<T> {
        let mut core = self.lock_core();
        let seen = run(&mut core);
        core.stop_if_damaged(&seen);
        seen
    }

    /// Why the file system takes no changes, if a part of it is damaged.
    #[must_use]
    pub fn damage(&self) -> Option<FsError> {
        let stopped = self.lock_core().check_running().err();
        stopped.filter(|error| matches!(error, FsError::ReadOnly(_)))
    }

    /// Runs an operation and waits until it is committed. `run` may run more than once, so its
    /// effects outside the transaction must be repeatable.
    fn change<T>(&self, run: impl FnMut(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        self.change_from(self.lock_core(), run)
    }

    /// As [`Fs::change`], for a caller that already holds the core's lock.
    fn change_from<'a, T>(
        &'a self,
        mut core: MutexGuard<'a, Core>,
        mut run: impl FnMut(&mut Tx<'_>) -> Result<T>,
    ) -> Result<T> {
        loop {
            core.check_running()?;
            let mut tx = core.begin();
            let value = match run(&mut tx) {
                Ok(value) => value,
                Err(error) => {
                    drop(tx);
                    let failed = Err(error);
                    core.stop_if_damaged(&failed);
                    return failed;
                }
            };
            if tx.changed_pages() == 0 {
                return Ok(value);
            }
            if tx.fits() {
                if self.space.has_write_cache() {
                    // Otherwise a later transaction might survive a power loss and this one not,
                    // and a span that this one freed would be cleared although an inode still names
                    // it.
                    tx.make_durable();
                }
                tx.join_batch()?;
                self.commit(core)?;
                return Ok(value);
            }
            drop(tx);
            core = self.advance_batch(core);
        }
    }

    /// Waits until the current batch is committed.
    fn commit<'a>(&'a self, mut core: MutexGuard<'a, Core>) -> Result<()> {
        let outcome = core.outcome();
        loop {
            if let Some(result) = outcome.get() {
                return result.clone().map_err(FsError::Space);
            }
            core = self.advance_batch(core);
        }
    }

    /// Sends the current batch, or waits for the batch in flight.
    fn advance_batch<'a>(&'a self, mut core: MutexGuard<'a, Core>) -> MutexGuard<'a, Core> {
        if core.has_batch_in_flight() {
            core.waiters += 1;
            let ended = self.batch_done.wait(core);
            let mut core = ended.unwrap_or_else(PoisonError::into_inner);
            core.waiters -= 1;
            return core;
        }
        let (batch, request) = core.take_batch();
        drop(core);
        let result = self.send_batch(&request);
        let mut core = self.lock_core();
        core.finish_batch(batch, result.map(drop));
        // Each notification is a system call.
        if core.waiters > 0 {
            self.batch_done.notify_all();
        }
        core
    }

    /// Sends a batch until its outcome is known. Sending it twice is safe: only this thread changes
    /// its pages.
    fn send_batch(&self, request: &Request) -> std::result::Result<Reply, SpaceError> {
        let mut channel = self.lock_commit_channel();
        let mut pause = RESEND_PAUSE_MIN;
        loop {
            let result = channel.call(request.clone());
            let Err(SpaceError::Unavailable(cause)) = &result else {
                return result;
            };
            if self.is_resend_stopped.load(Ordering::Acquire) {
                return result;
            }
            if pause == RESEND_PAUSE_MIN {
                tracing::warn!(%cause, "changes of files wait for the volume");
            }
            channel.wait_for(pause);
            pause = (pause * 2).min(RESEND_PAUSE_MAX);
        }
    }

    /// Stops resending. Changes that wait for an unreachable volume fail now, and so do later ones.
    pub fn stop_resending(&self) {
        self.is_resend_stopped.store(true, Ordering::Release);
    }

    /// Space usage.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let core = self.lock_core();
        Usage {
            limit_bytes: core.head.limit_bytes,
            used_bytes: core.used_pages.saturating_mul(PAGE_BYTES as u64),
            inodes: core.ino_allocator.in_use(),
        }
    }

    /// Raises the limit to `limit_bytes` if it is lower now. A crash leaves the old limit or the
    /// new one. Returns whether the limit changed.
    ///
    /// # Errors
    /// Errors of the volume.
    pub fn raise_limit(&self, limit_bytes: u64) -> Result<bool> {
        self.change(|tx| {
            let now = tx.core.head.limit_bytes;
            if now == 0 || limit_bytes <= now {
                return Ok(false);
            }
            tx.set_limit(limit_bytes)?;
            Ok(true)
        })
    }

    /// Attributes of an inode.
    ///
    /// # Errors
    /// `ESTALE` when there is no such inode.
    pub fn attr(&self, ino: Ino) -> Result<Attr> {
        self.inspect(|core| {
            let inode = core.inode(ino)?;
            core.attr(ino, &inode)
        })
    }
}

fn check_ino(ino: Ino) -> Result<()> {
    match ino {
        Ino::TABLE => Err(Errno::STALE.into()),
        _ => Ok(()),
    }
}
