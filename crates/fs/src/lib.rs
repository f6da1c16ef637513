//! A file system: a POSIX name space and its files in the pages of one volume.
//!
//! What a call changed is there as a whole or not at all after a crash, and before
//! what later calls changed ([`core`]); when the call returns it has reached every
//! in-sync copy. On pools of class `file-sync` it survives power loss after
//! [`Fs::sync`], or if it was written `durable`.
//!
//! Permissions are the caller's business: whoever mounts lets the kernel check
//! them. What they mean for what is made (owner, group, set-group-id directories)
//! is seen to here.
//!
//! This crate opens no files and knows no kernel; fronts do.

#![forbid(unsafe_code)]

mod allocate;
mod board;
mod cache;
mod core;
mod data;
mod error;
mod extend;
mod format;
mod free;
mod growth;
mod hash;
mod held;
mod io;
mod kernel_pages;
mod left;
mod map;
mod mount;
mod namespace;
mod node;
mod numbers;
mod ports;
mod redo;
mod reserve;
mod runs;
mod scan;
mod share;
mod spans;
mod sync;
mod tree;
mod unseen;
mod xattrs;

pub use allocate::{Allocate, Seek};
pub use board::{Board, span_index, span_pages};
pub use data::TOGETHER_PAGES_MAX;
pub use error::{FsError, Result};
pub use format::{FILE_BYTES_MAX, Growth, Ino, Kind, Time};
pub use growth::{APPEND_PAGES_MAX, Composed, FOOTER_BYTES, footer_page};
pub use held::{HELD_PAGES_MAX, HELD_SECONDS_MAX, STUCK_PAGES_MAX};
pub use io::{Pipe, Port, Wait};
pub use mount::{MakeOptions, make};
pub use namespace::{Caller, Changes, Listed, Make, Rename};
pub use ports::Borrowed;
pub use sync::Seen;
pub use unseen::HeldEnd;
pub use xattrs::SetXattr;

use crate::core::{Core, Tx};
use crate::data::pages_of;
use crate::format::Inode;
use crate::ports::Ports;
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
    ended: Condvar,
    /// The way of the batches, and of the reserve.
    commits: Mutex<Port>,
    /// Pages that the reserve has; held by who gives it up or takes it.
    reserve: Mutex<u64>,
    /// Losses of the volume that somebody was told.
    told: Seen,
    /// Changes are not sent again.
    is_given_up: AtomicBool,
    ports: Ports,
    /// Told of files that guests begin to make longer, or of which pages begin to be held.
    on_growth: OnceLock<Box<dyn Fn(Ino) + Send + Sync>>,
    on_open: OnceLock<Box<dyn Fn(u32) + Send + Sync>>,
    kernel: OnceLock<kernel_pages::Kernel>,
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
    pub kind: Kind,
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
    pub grows: bool,
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
            grows: inode.growth.is_some(),
        }
    }
}

impl Core {
    /// What is told of an inode, as guests have it.
    fn attr(&mut self, ino: Ino, inode: &Inode) -> Result<Attr> {
        let mut attr = Attr::of(ino, inode);
        attr.size = self.end_of(ino, inode)?;
        attr.pages += pages_of(attr.size) - pages_of(inode.size);
        // Whether they lie in holes is seen when they are put there.
        let held = self.held.pages_of(ino);
        attr.pages = (attr.pages + held).min(pages_of(attr.size)).max(attr.pages);
        attr.grows |= held > 0;
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

    fn commits(&self) -> MutexGuard<'_, Port> {
        self.commits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn core(&self) -> MutexGuard<'_, Core> {
        // A panic under the lock ends the process of whoever mounts; tests go on.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs what only looks. What makes no sense ends all changes.
    fn look<T>(&self, run: impl FnOnce(&mut Core) -> Result<T>) -> Result<T> {
        let mut core = self.core();
        let seen = run(&mut core);
        core.note_damage(&seen);
        seen
    }

    /// Why the file system takes no changes, if something in it is damaged.
    #[must_use]
    pub fn damage(&self) -> Option<FsError> {
        let stopped = self.core().check_running().err();
        stopped.filter(|error| matches!(error, FsError::ReadOnly(_)))
    }

    /// Runs an operation and waits until it is committed. It may run more than
    /// once: what it does outside of the transaction must bear that.
    fn change<T>(&self, run: impl FnMut(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        self.change_from(self.core(), run)
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
                    core.note_damage(&failed);
                    return failed;
                }
            };
            if tx.changed() == 0 {
                return Ok(value);
            }
            if tx.fits() {
                if self.space.buffers() {
                    // Else a later one may be there and this one not, and what it freed
                    // be cleared though it is still named.
                    tx.make_durable();
                }
                tx.join()?;
                self.commit(core)?;
                return Ok(value);
            }
            drop(tx);
            core = self.carry(core);
        }
    }

    /// Waits until what has joined the batch is committed.
    fn commit<'a>(&'a self, mut core: MutexGuard<'a, Core>) -> Result<()> {
        let outcome = core.outcome();
        loop {
            if let Some(result) = outcome.get() {
                return result.clone().map_err(FsError::Space);
            }
            core = self.carry(core);
        }
    }

    /// Takes the batch along, or waits for the one that is on its way.
    fn carry<'a>(&'a self, mut core: MutexGuard<'a, Core>) -> MutexGuard<'a, Core> {
        if core.is_busy() {
            core.waiting += 1;
            let ended = self.ended.wait(core);
            let mut core = ended.unwrap_or_else(PoisonError::into_inner);
            core.waiting -= 1;
            return core;
        }
        let (batch, request) = core.take_batch();
        drop(core);
        let result = self.send(&request);
        let mut core = self.core();
        core.end(batch, result.map(drop));
        // Each notification is a system call.
        if core.waiting > 0 {
            self.ended.notify_all();
        }
        core
    }

    /// Sends a batch until it is known what came of it: nobody else changes its pages,
    /// so sent twice they are what they were.
    fn send(&self, request: &Request) -> std::result::Result<Reply, SpaceError> {
        let mut port = self.commits();
        let mut pause = RESEND_PAUSE_MIN;
        loop {
            let result = port.call(request.clone());
            let Err(SpaceError::Unavailable(cause)) = &result else {
                return result;
            };
            if self.is_given_up.load(Ordering::Acquire) {
                return result;
            }
            if pause == RESEND_PAUSE_MIN {
                tracing::warn!(%cause, "changes of files wait for the volume");
            }
            port.pause(pause);
            pause = (pause * 2).min(RESEND_PAUSE_MAX);
        }
    }

    /// Nobody needs its changes any more: those that wait for a volume that is out of
    /// reach fail now, and so do later ones.
    pub fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Release);
    }

    /// How full it is.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let core = self.core();
        Usage {
            limit_bytes: core.head.limit_bytes,
            used_bytes: core.used.saturating_mul(PAGE_BYTES as u64),
            inodes: core.numbers.in_use(),
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
        self.look(|core| {
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
