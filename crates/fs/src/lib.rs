//! A file system: a POSIX name space and its files in the pages of one volume.
//!
//! What a call changed is there as a whole or not at all after a crash, and before
//! what later calls changed ([`lock_core`]); when the call returns it has reached every
//! in-sync copy. On pools of class `file-sync` it survives power loss after
//! [`Fs::sync`], or if it was written `durable_pages`.
//!
//! Permissions are the caller's business: whoever mounts lets the kernel check
//! them. What they mean for what is made (owner, group, set-group-id directories)
//! is seen to here.
//!
//! This crate opens no files and knows no kernel; fronts do.

#![forbid(unsafe_code)]

mod allocate;
mod append;
mod cache;
mod channel_pool;
mod core;
mod data;
mod deferred_free;
mod error;
mod extend;
mod format;
mod free;
mod hash;
mod ino_allocator;
mod io;
mod kernel_pages;
mod map;
mod mmap_dirty;
mod mount;
mod namespace;
mod node;
mod range_set;
mod redo;
mod reserve;
mod scan;
mod share;
mod shared_file_map;
mod spans;
mod sync;
mod tree;
mod unseen_writes;
mod xattrs;

pub use allocate::{AllocateMode, SeekTarget};
pub use append::{APPEND_PAGES_MAX, FOOTER_BYTES, TailWrite, footer_page};
pub use channel_pool::PooledChannel;
pub use data::ATOMIC_PAGES_MAX;
pub use error::{FsError, Result};
pub use format::{AppendExtent, FILE_BYTES_MAX, Ino, InodeKind, Time};
pub use io::{IoChannel, Wait, WriteQueue};
pub use mmap_dirty::{MMAP_DIRTY_PAGES_HARD_MAX, MMAP_DIRTY_PAGES_MAX, MMAP_DIRTY_SECONDS_MAX};
pub use mount::{MkfsOptions, mkfs};
pub use namespace::{AttrChanges, CreateKind, Credentials, DirEntry, RenameMode};
pub use shared_file_map::{SharedFileMap, span_index, span_pages};
pub use sync::LostWriteCursor;
pub use unseen_writes::EndLock;
pub use xattrs::SetXattrMode;

use crate::channel_pool::ChannelPool;
use crate::core::{Core, Tx};
use crate::data::page_count;
use crate::format::Inode;
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
/// Names of one file: what ext4 allows, and far more than anybody uses.
pub const LINKS_MAX: u32 = 65_000;

/// First pause before a batch is sent again; the volume has waited long by then.
const RESEND_PAUSE_MIN: Duration = Duration::from_millis(5);
/// Longest such pause.
const RESEND_PAUSE_MAX: Duration = Duration::from_millis(500);

/// The time of day, for what changes now.
pub type Clock = fn() -> Time;

/// A mounted file system.
pub struct Fs {
    wait: Wait,
    clock: Clock,
    core: Mutex<Core>,
    /// Something that a batch waits for has ended.
    batch_done: Condvar,
    /// The way of the batches, and of the reserve.
    commit_channel: Mutex<IoChannel>,
    /// Pages that the reserve has; held by who gives it up or takes it.
    reserved_pages: Mutex<u64>,
    /// Losses of the volume that somebody was told.
    reported_losses: LostWriteCursor,
    /// Changes are not sent again.
    is_resend_stopped: AtomicBool,
    channel_pool: ChannelPool,
    /// Told of files that guests begin to make longer, or of which pages begin to be held.
    append_hook: OnceLock<Box<dyn Fn(Ino) + Send + Sync>>,
    open_hook: OnceLock<Box<dyn Fn(u32) + Send + Sync>>,
    kernel_callbacks: OnceLock<kernel_pages::KernelCallbacks>,
    /// Last, so that its channels are dropped before it: it waits for them.
    space: Arc<dyn Space>,
}

/// What is told of an inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attr {
    /// Its number.
    pub ino: Ino,
    /// With the number it names one file for ever.
    pub generation: u32,
    /// What it is.
    pub kind: InodeKind,
    /// Permissions, and the set-id and sticky bits.
    pub mode: u16,
    /// Names.
    pub links: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Bytes.
    pub size: u64,
    /// Pages of 4 KiB that hold data.
    pub pages: u64,
    /// Last read.
    pub atime: Time,
    /// Last change of the content.
    pub mtime: Time,
    /// Last change of anything.
    pub ctime: Time,
    /// Made.
    pub btime: Time,
    /// Of a device.
    pub device: u32,
    /// Whether size or pages may change at any time: by guests, or because pages are held.
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
    /// What is told of an inode, as guests have it.
    fn attr(&mut self, ino: Ino, inode: &Inode) -> Result<Attr> {
        let mut attr = Attr::of(ino, inode);
        attr.size = self.file_end(ino, inode)?;
        attr.pages += page_count(attr.size) - page_count(inode.size);
        // Whether they lie in holes is seen when they are put there.
        let held = self.mmap_dirty.page_count(ino);
        attr.pages = (attr.pages + held)
            .min(page_count(attr.size))
            .max(attr.pages);
        attr.has_volatile_size |= held > 0;
        Ok(attr)
    }
}

/// How full a file system is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Bytes that it may take; 0: as many as its pools have.
    pub limit_bytes: u64,
    /// Bytes that it takes.
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
        // A panic under the lock ends the process of whoever mounts; tests go on.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs what only looks. What makes no sense ends all changes.
    fn inspect<T>(&self, run: impl FnOnce(&mut Core) -> Result<T>) -> Result<T> {
        let mut core = self.lock_core();
        let seen = run(&mut core);
        core.stop_if_damaged(&seen);
        seen
    }

    /// Why the file system takes no changes, if something in it is damaged.
    #[must_use]
    pub fn damage(&self) -> Option<FsError> {
        let stopped = self.lock_core().check_running().err();
        stopped.filter(|error| matches!(error, FsError::ReadOnly(_)))
    }

    /// Runs an operation and waits until it is committed. It may run more than
    /// once: what it does outside of the transaction must bear that.
    fn change<T>(&self, run: impl FnMut(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        self.change_from(self.lock_core(), run)
    }

    /// The same for a caller that has the lock already.
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
                    // Else a later one may be there and this one not, and what it freed
                    // be cleared though it is still named.
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

    /// Waits until what has joined the batch is committed.
    fn commit<'a>(&'a self, mut core: MutexGuard<'a, Core>) -> Result<()> {
        let outcome = core.outcome();
        loop {
            if let Some(result) = outcome.get() {
                return result.clone().map_err(FsError::Space);
            }
            core = self.advance_batch(core);
        }
    }

    /// Takes the batch along, or waits for the one that is on its way.
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

    /// Sends a batch until it is known what came of it: nobody else changes its pages,
    /// so sent twice they are what they were.
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

    /// Nobody needs its changes any more: those that wait for a volume that is out of
    /// reach fail now, and so do later ones.
    pub fn stop_resending(&self) {
        self.is_resend_stopped.store(true, Ordering::Release);
    }

    /// How full it is.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let core = self.lock_core();
        Usage {
            limit_bytes: core.head.limit_bytes,
            used_bytes: core.used_pages.saturating_mul(PAGE_BYTES as u64),
            inodes: core.ino_allocator.in_use(),
        }
    }

    /// Lets it take more bytes, if it may take fewer now. A crash leaves the old limit
    /// or the new one. Returns whether anything was changed.
    ///
    /// # Errors
    /// What the volume says.
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

    /// What is told of an inode.
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
