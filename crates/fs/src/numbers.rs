//! Which inode numbers are free: the lowest is taken first, so that inodes in use
//! stay together.

use crate::format::Ino;
use crate::runs::Runs;

#[derive(Debug)]
pub(crate) struct Numbers {
    free: Runs,
    /// Numbers from here on were never in use.
    next: u64,
}

impl Numbers {
    /// `free` lie below `next`.
    pub(crate) fn new(free: Runs, next: u64) -> Numbers {
        Numbers { free, next }
    }

    pub(crate) fn take(&mut self) -> Ino {
        Ino(self.free.take().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        }))
    }

    pub(crate) fn give(&mut self, ino: Ino) {
        let is_new = self.free.give(ino.0);
        assert!(is_new && ino.0 < self.next, "{ino:?} was not in use");
    }

    pub(crate) fn in_use(&self) -> u64 {
        self.next - self.free.count()
    }
}
