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
use crate::format::{Ino, Inode, TRIM};
use crate::io::Port;
use rustix::io::Errno;
use std::collections::BTreeSet;

/// Inodes of which something is left.
#[derive(Debug, Default)]
pub(crate) struct Left {
    now: BTreeSet<Ino>,
    /// What did not succeed is tried again when all others were.
    later: BTreeSet<Ino>,
    /// Whether it was said that something does not succeed.
    is_told: bool,
}

impl Left {
    fn put_off(&mut self, ino: Ino, cause: &FsError) {
        if !std::mem::replace(&mut self.is_told, true) {
            tracing::warn!(ino = ino.0, %cause, "what a file had is freed later");
        }
        self.later.insert(ino);
    }
}

impl Core {
    /// Takes note of what a crash left: files without a name, and marked ones.
    pub(crate) fn leave(&mut self, orphans: Vec<Ino>, unfinished: Vec<Ino>) {
        self.going.extend(&orphans);
        self.left.now.extend(orphans.into_iter().chain(unfinished));
    }

    /// Takes note of a file of which more is to be freed.
    pub(crate) fn left_over(&mut self, ino: Ino) {
        self.left.now.insert(ino);
    }

    /// An inode that nobody is freeing.
    pub(crate) fn staying(&mut self, ino: Ino) -> Result<Inode> {
        match self.going.contains(&ino) {
            true => Err(Errno::STALE.into()),
            false => self.inode(ino),
        }
    }

    fn take_left(&mut self) -> Option<Ino> {
        if !self.is_running() {
            return None;
        }
        let left = &mut self.left;
        if left.now.is_empty() {
            left.now = std::mem::take(&mut left.later);
        }
        left.is_told &= !left.now.is_empty();
        left.now.pop_first()
    }
}

impl Fs {
    /// Frees a piece of what a crash left, or what there was no room to free, and at last
    /// takes the reserve, if there is room for it. Returns whether there may be more that
    /// succeeds now; what did not is tried again by calls after that. To be called until it returns false, and then once in a while.
    pub fn free_some(&self) -> bool {
        let Some(ino) = self.core().take_left() else {
            self.refill();
            return false;
        };
        let freed = self.free_left(ino);
        let mut core = self.core();
        match freed {
            Ok(true) => drop(core.left.now.insert(ino)),
            Ok(false) | Err(FsError::Posix(Errno::STALE)) => {}
            Err(cause) => {
                core.left.put_off(ino, &cause);
                return cause.errno() == Errno::NOSPC && !core.left.now.is_empty();
            }
        }
        true
    }

    /// Inodes of which something is left to be freed.
    #[must_use]
    pub fn left(&self) -> usize {
        let core = self.core();
        core.left.now.union(&core.left.later).count()
    }

    fn free_left(&self, ino: Ino) -> Result<bool> {
        if self.core().going.contains(&ino) {
            return self.making_room(|| self.free_some_of(ino, None));
        }
        // Else somebody might delete it meanwhile.
        self.open(ino)?;
        // The port first: who has one may wait for the file.
        let finished = self.borrow().and_then(|mut port| {
            let lock = self.data_lock(ino)?;
            let _alone = lock.write();
            self.making_room(|| self.finish_some(&mut port, ino))
        });
        self.release(ino);
        finished
    }

    /// Frees some of what is marked of a file, which the caller holds alone. Returns
    /// whether more is left.
    fn finish_some(&self, port: &mut Port, ino: Ino) -> Result<bool> {
        self.settle_all(port, ino)?;
        self.free_spare(port, ino)?;
        if self.look(|core| core.inode(ino))?.flags & TRIM == 0 {
            return Ok(false);
        }
        if self.trim_some(port, ino)? {
            return Ok(true);
        }
        self.end_trim(port, ino, None)?;
        Ok(false)
    }

    /// Frees what is marked of a file, which the caller holds alone.
    pub(crate) fn finish(&self, port: &mut Port, ino: Ino) -> Result<()> {
        while self.finish_some(port, ino)? {}
        Ok(())
    }

    /// Takes note of what could not be freed.
    pub(crate) fn leave<T>(&self, ino: Ino, freed: Result<T>) -> Result<T> {
        if let Err(cause) = &freed {
            self.core().left.put_off(ino, cause);
        }
        freed
    }
}
