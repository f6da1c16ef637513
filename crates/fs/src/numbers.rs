//! Which inode numbers are free: the lowest is taken first, so that inodes in use
//! stay together.

use crate::format::Ino;
use std::collections::BTreeSet;

#[derive(Debug)]
pub(crate) struct Numbers {
    free: BTreeSet<u64>,
    /// Numbers from here on were never in use.
    next: u64,
}

impl Numbers {
    /// `free` lie below `next`.
    pub(crate) fn new(free: BTreeSet<u64>, next: u64) -> Numbers {
        assert!(free.last().is_none_or(|&last| last < next), "free numbers");
        Numbers { free, next }
    }

    pub(crate) fn take(&mut self) -> Ino {
        Ino(self.free.pop_first().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        }))
    }

    pub(crate) fn give(&mut self, ino: Ino) {
        let is_new = self.free.insert(ino.0);
        assert!(is_new && ino.0 < self.next, "{ino:?} was not in use");
    }

    pub(crate) fn in_use(&self) -> u64 {
        self.next - self.free.len() as u64
    }
}
