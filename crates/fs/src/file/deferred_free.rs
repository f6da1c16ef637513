//! Inodes with pages that are still to be freed, after a crash or because the pool had no room even
//! for that.
//!
//! Mounting only records them. The mounting process frees them in the background, a piece at a
//! time. Until then the pages count as in use.
//!
//! - An orphan on the list belongs to the thread that frees it: no lookup finds it any more.
//! - A file on the list may be used. Pages beyond its size are freed before it grows; other changes
//!   need not wait.

use crate::Fs;
use crate::error::{FsError, Result};
use crate::format::inode::{Ino, Inode, NEEDS_TRIM};
use crate::io::channel::IoChannel;
use crate::txn::core::Core;
use rustix::io::Errno;
use std::collections::BTreeSet;

/// Inodes with pages to be freed.
#[derive(Debug, Default)]
pub(crate) struct DeferredFree {
    ready: BTreeSet<Ino>,
    /// Inodes that failed; they are tried again after all others.
    retry: BTreeSet<Ino>,
    /// Whether a failure was logged.
    is_reported: bool,
}

impl DeferredFree {
    fn defer_retry(&mut self, ino: Ino, cause: &FsError) {
        if !std::mem::replace(&mut self.is_reported, true) {
            tracing::warn!(ino = ino.0, %cause, "the pages of a file are freed later");
        }
        self.retry.insert(ino);
    }
}

impl Core {
    /// Records the orphans and marked files that a crash left.
    pub(crate) fn defer_crash_leftovers(&mut self, orphans: Vec<Ino>, unfinished: Vec<Ino>) {
        self.freeing.extend(&orphans);
        self.deferred_free
            .ready
            .extend(orphans.into_iter().chain(unfinished));
    }

    /// Records a file with more pages to be freed.
    pub(crate) fn defer_rest(&mut self, ino: Ino) {
        self.deferred_free.ready.insert(ino);
    }

    /// An inode that is not being freed.
    pub(crate) fn inode_not_freeing(&mut self, ino: Ino) -> Result<Inode> {
        match self.freeing.contains(&ino) {
            true => Err(Errno::STALE.into()),
            false => self.inode(ino),
        }
    }

    fn take_deferred(&mut self) -> Option<Ino> {
        if !self.is_running() {
            return None;
        }
        let left = &mut self.deferred_free;
        if left.ready.is_empty() {
            left.ready = std::mem::take(&mut left.retry);
        }
        left.is_reported &= !left.ready.is_empty();
        left.ready.pop_first()
    }
}

impl Fs {
    /// Frees a piece of a deferred inode. If there is none, fills the reserve if there is room.
    /// Returns whether another call may succeed now. Inodes that failed are tried again by later
    /// calls. Call it until it returns false, and then periodically.
    pub fn free_deferred_piece(&self) -> bool {
        let Some(ino) = self.lock_core().take_deferred() else {
            self.refill_reserve();
            return false;
        };
        let freed = self.free_deferred_inode(ino);
        let mut core = self.lock_core();
        match freed {
            Ok(true) => drop(core.deferred_free.ready.insert(ino)),
            Ok(false) | Err(FsError::Posix(Errno::STALE)) => {}
            Err(cause) => {
                core.deferred_free.defer_retry(ino, &cause);
                return cause.errno() == Errno::NOSPC && !core.deferred_free.ready.is_empty();
            }
        }
        true
    }

    /// Number of inodes with pages to be freed.
    #[must_use]
    pub fn deferred_inodes(&self) -> usize {
        let core = self.lock_core();
        core.deferred_free
            .ready
            .union(&core.deferred_free.retry)
            .count()
    }

    fn free_deferred_inode(&self, ino: Ino) -> Result<bool> {
        if self.lock_core().freeing.contains(&ino) {
            return self.with_reserve_fallback(|| self.free_orphan_piece(ino, None));
        }
        // Keeps the file from being deleted meanwhile.
        self.open(ino)?;
        // The channel first: a thread with a channel may wait for the file.
        let finished = self.borrow_channel().and_then(|mut channel| {
            let lock = self.file_lock(ino)?;
            let _alone = lock.write();
            self.with_reserve_fallback(|| self.free_marked_piece(&mut channel, ino))
        });
        self.release(ino);
        finished
    }

    /// Frees some of the marked pages of a file. The caller holds it exclusively. Returns whether
    /// more is left.
    fn free_marked_piece(&self, channel: &mut IoChannel, ino: Ino) -> Result<bool> {
        self.complete_pending(channel, ino)?;
        self.free_spare(channel, ino)?;
        if self.inspect(|core| core.inode(ino))?.flags & NEEDS_TRIM == 0 {
            return Ok(false);
        }
        if self.trim_piece(channel, ino)? {
            return Ok(true);
        }
        self.clear_trim_mark(channel, ino, None)?;
        Ok(false)
    }

    /// Frees the marked pages of a file. The caller holds it exclusively.
    pub(crate) fn free_marked(&self, channel: &mut IoChannel, ino: Ino) -> Result<()> {
        while self.free_marked_piece(channel, ino)? {}
        Ok(())
    }

    /// Puts the inode on the list if `freed` is an error.
    pub(crate) fn defer_on_error<T>(&self, ino: Ino, freed: Result<T>) -> Result<T> {
        if let Err(cause) = &freed {
            self.lock_core().deferred_free.defer_retry(ino, cause);
        }
        freed
    }
}
