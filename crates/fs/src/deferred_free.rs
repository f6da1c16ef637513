//! What is left to be freed: by a crash, or because there was no room even for that.
//!
//! Mounting only takes note of it, and whoever mounted frees it beside everything else,
//! a piece at a time. Until then it counts as in use.
//!
//! - An orphan that is left belongs to whoever frees it: nobody finds it any more.
//! - A file that is left may be used. What lies beyond its size is freed before that
//!   grows; everything else may be done to it before.

use crate::Fs;
use crate::core::Core;
use crate::error::{FsError, Result};
use crate::format::{Ino, Inode, NEEDS_TRIM};
use crate::io::IoChannel;
use rustix::io::Errno;
use std::collections::BTreeSet;

/// Inodes of which something is left.
#[derive(Debug, Default)]
pub(crate) struct DeferredFree {
    ready: BTreeSet<Ino>,
    /// What did not succeed is tried again when all others were.
    retry: BTreeSet<Ino>,
    /// Whether it was said that something does not succeed.
    is_reported: bool,
}

impl DeferredFree {
    fn defer_retry(&mut self, ino: Ino, cause: &FsError) {
        if !std::mem::replace(&mut self.is_reported, true) {
            tracing::warn!(ino = ino.0, %cause, "what a file had is freed later");
        }
        self.retry.insert(ino);
    }
}

impl Core {
    /// Takes note of what a crash left: files without a name, and marked ones.
    pub(crate) fn defer_crash_leftovers(&mut self, orphans: Vec<Ino>, unfinished: Vec<Ino>) {
        self.freeing.extend(&orphans);
        self.deferred_free
            .ready
            .extend(orphans.into_iter().chain(unfinished));
    }

    /// Takes note of a file of which more is to be freed.
    pub(crate) fn defer_rest(&mut self, ino: Ino) {
        self.deferred_free.ready.insert(ino);
    }

    /// An inode that nobody is freeing.
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
    /// Frees a piece of what a crash left, or what there was no room to free, and at last
    /// takes the reserve, if there is room for it. Returns whether there may be more that
    /// succeeds now; what did not is tried again by calls after that. To be called until it returns false, and then once in a while.
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

    /// Inodes of which something is left to be freed.
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
        // Else somebody might delete it meanwhile.
        self.open(ino)?;
        // The port first: who has one may wait for the file.
        let finished = self.borrow_channel().and_then(|mut channel| {
            let lock = self.file_lock(ino)?;
            let _alone = lock.write();
            self.with_reserve_fallback(|| self.free_marked_piece(&mut channel, ino))
        });
        self.release(ino);
        finished
    }

    /// Frees some of what is marked of a file, which the caller holds alone. Returns
    /// whether more is left.
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

    /// Frees what is marked of a file, which the caller holds alone.
    pub(crate) fn free_marked(&self, channel: &mut IoChannel, ino: Ino) -> Result<()> {
        while self.free_marked_piece(channel, ino)? {}
        Ok(())
    }

    /// Takes note of what could not be freed.
    pub(crate) fn defer_on_error<T>(&self, ino: Ino, freed: Result<T>) -> Result<T> {
        if let Err(cause) = &freed {
            self.lock_core().deferred_free.defer_retry(ino, cause);
        }
        freed
    }
}
