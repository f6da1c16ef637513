//! Writes that the kernel did not see, because direct clients or the mount made them past it:
//! their watchers (inotify, fanotify) hear of them only if the mount has the kernel tell them.
//!
//! Invariants: a file is listed from its first such write on until it is taken, once however
//! often it was written. Files are taken in turn, so that busy ones do not starve others.

use crate::core::Core;
use crate::error::Result;
use crate::format::Ino;
use crate::{Attr, Fs, SharedFileMap};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::ops::Bound;
use std::sync::{Arc, TryLockError};

/// Files with such writes.
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

    /// Takes at most so many files, from the one behind the last on.
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

/// While this is there, no direct client moves the end of a file.
pub struct EndLock(Option<Arc<dyn SharedFileMap>>);

impl Drop for EndLock {
    fn drop(&mut self) {
        if let Some(board) = &self.0 {
            board.unlock_end();
        }
    }
}

impl Core {
    /// The shared map of a file to its direct clients.
    fn file_map_of(&self, ino: Ino) -> Option<Arc<dyn SharedFileMap>> {
        let live = self.live_inodes.get(&ino)?;
        live.file_lock.file_map().map(Arc::clone)
    }
}

impl Fs {
    /// Takes at most `max` files that were written past the kernel, as far as [`Fs::note_guests`]
    /// has found them. Files that nobody uses any more are dropped: nobody can watch them.
    pub fn take_unseen_writes(&self, max: usize) -> Vec<Ino> {
        let mut core = self.lock_core();
        let mut taken = core.unseen_writes.take(max);
        taken.retain(|ino| core.live_inodes.contains_key(ino));
        taken
    }

    /// Lists a file again whose watchers could not be told.
    pub fn requeue_unseen_write(&self, ino: Ino) {
        self.lock_core().unseen_writes.add(ino);
    }

    /// Keeps direct clients from moving the end of a file. None: one of them is about to.
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

    /// The same as [`Fs::attr`] without waiting for other operations.
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
        // Those were written again, and do not come before the others.
        all.iter().for_each(|&ino| unseen.add(ino));
        assert_eq!(unseen.take(3), [Ino(7), Ino(9), Ino(3)]);
        assert_eq!(unseen.take(3), [Ino(5)]);
        assert_eq!(unseen.take(3), []);
        // Numbers end somewhere.
        unseen.add(Ino(u64::MAX));
        assert_eq!(unseen.take(1), [Ino(u64::MAX)]);
        unseen.add(Ino(1));
        assert_eq!(unseen.take(1), [Ino(1)]);
    }
}
