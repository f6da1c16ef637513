//! Writes that the kernel did not see, because direct clients or the mount made them past it.
//! Watchers of the files (inotify, fanotify) get events only if the mount notifies the kernel.
//!
//! Invariants: a file is listed once, from its first such write until it is taken. Files are taken
//! in turn, so that busy ones do not starve others.

use crate::error::Result;
use crate::format::inode::Ino;
use crate::txn::core::Core;
use crate::{Attr, Fs, SharedFileMap};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::ops::Bound;
use std::sync::{Arc, TryLockError};

/// Files with unseen writes.
#[derive(Default)]
pub(crate) struct UnseenWrites {
    files: BTreeSet<Ino>,
    /// The number of the file that was taken last.
    last_taken: u64,
}

impl UnseenWrites {
    pub(crate) fn add(&mut self, ino: Ino) {
        self.files.insert(ino);
    }

    /// Takes at most `max` files, beginning behind the last one taken.
    fn take(&mut self, max: usize) -> Vec<Ino> {
        let above = self
            .files
            .range((Bound::Excluded(Ino(self.last_taken)), Bound::Unbounded));
        let below = self.files.range(..=Ino(self.last_taken));
        let taken: Vec<Ino> = above.chain(below).copied().take(max).collect();
        for ino in &taken {
            self.files.remove(ino);
        }
        self.last_taken = taken.last().map_or(self.last_taken, |ino| ino.0);
        taken
    }
}

/// While it exists, no direct client moves the end of a file.
pub struct EndLock(Option<Arc<dyn SharedFileMap>>);

impl Drop for EndLock {
    fn drop(&mut self) {
        if let Some(board) = &self.0 {
            board.unlock_end();
        }
    }
}

impl Core {
    /// The map of a file that its direct clients share.
    fn file_map_of(&self, ino: Ino) -> Option<Arc<dyn SharedFileMap>> {
        let live = self.live_inodes.get(&ino)?;
        live.file_lock.file_map().map(Arc::clone)
    }
}

impl Fs {
    /// Takes at most `max` files with unseen writes, as far as [`Fs::collect_direct_writes`] has
    /// found them. Files that no program uses any more are dropped: they have no watchers.
    pub fn take_unseen_writes(&self, max: usize) -> Vec<Ino> {
        let mut core = self.lock_core();
        let mut taken = core.unseen_writes.take(max);
        taken.retain(|ino| core.live_inodes.contains_key(ino));
        taken
    }

    /// Lists a file again after a failed notification.
    pub fn requeue_unseen_write(&self, ino: Ino) {
        self.lock_core().unseen_writes.add(ino);
    }

    /// Keeps direct clients from moving the end of a file. `None`: a client is about to move it.
    #[must_use]
    pub fn lock_end(&self, ino: Ino) -> Option<EndLock> {
        let board = self.lock_core().file_map_of(ino);
        match board {
            Some(board) if !board.lock_end() => None,
            board => Some(EndLock(board)),
        }
    }

    /// Whether direct clients have, or had, the file. They may change its size at any time.
    #[must_use]
    pub fn has_direct_clients(&self, ino: Ino) -> bool {
        self.lock_core().file_map_of(ino).is_some()
    }

    /// As [`Fs::attr`], without waiting for other operations.
    ///
    /// # Errors
    /// `EAGAIN` while another operation has the core; as [`Fs::attr`].
    pub fn try_attr(&self, ino: Ino) -> Result<Attr> {
        let mut core = match self.core.try_lock() {
            Ok(core) => core,
            Err(TryLockError::Poisoned(core)) => core.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(Errno::AGAIN.into()),
        };
        let inode = core.inode(ino)?;
        core.attr(ino, &inode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unseen_writes_are_taken_in_turn() {
        let mut unseen = UnseenWrites::default();
        let all = [3, 5, 7, 9].map(Ino);
        all.iter().for_each(|&ino| unseen.add(ino));
        assert_eq!(unseen.take(2), all[..2]);
        // Files that were written again do not come before the others.
        all.iter().for_each(|&ino| unseen.add(ino));
        assert_eq!(unseen.take(3), [Ino(7), Ino(9), Ino(3)]);
        assert_eq!(unseen.take(3), [Ino(5)]);
        assert_eq!(unseen.take(3), []);
        // The highest number wraps around.
        unseen.add(Ino(u64::MAX));
        assert_eq!(unseen.take(1), [Ino(u64::MAX)]);
        unseen.add(Ino(1));
        assert_eq!(unseen.take(1), [Ino(1)]);
    }
}
