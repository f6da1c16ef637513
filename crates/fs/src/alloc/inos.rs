//! Allocator of inode numbers. It takes the lowest free number, so that inodes in use stay
//! together.

use crate::alloc::range_set::RangeSet;
use crate::format::inode::Ino;

#[derive(Debug)]
pub(crate) struct InoAllocator {
    free: RangeSet,
    /// Numbers from here on were never used.
    next: u64,
}

impl InoAllocator {
    /// `free_inos` lie below `next`.
    pub(crate) fn new(free: RangeSet, next: u64) -> InoAllocator {
        InoAllocator { free, next }
    }

    pub(crate) fn allocate(&mut self) -> Ino {
        Ino(self.free.pop_lowest().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        }))
    }

    pub(crate) fn free(&mut self, ino: Ino) {
        let is_new = self.free.insert(ino.0);
        assert!(is_new && ino.0 < self.next, "{ino:?} was not in use");
    }

    pub(crate) fn in_use(&self) -> u64 {
        self.next - self.free.count()
    }
}
