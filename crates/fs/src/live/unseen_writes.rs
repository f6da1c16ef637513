//! Files with writes that the kernel did not see. Watchers of these files are not notified yet.
//!
//! Invariants: a file is listed once, from its first such write until it is taken. Files are taken
//! in turn, so that busy ones do not starve others.

use crate::format::inode::Ino;
use std::collections::BTreeSet;
use std::ops::Bound;

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
    pub(crate) fn take(&mut self, max: usize) -> Vec<Ino> {
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
