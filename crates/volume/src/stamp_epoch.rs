//! The epoch that changes are stamped with: the epoch of their layout, or that of the newest snapshot
//! that was cut under this layout.
//!
//! Invariants:
//! - A snapshot raises the stamps of its own layout only. So a change of an older layout keeps the epoch
//!   that the barrier of the newer one refuses, although its legs take any epoch from theirs on.
//! - The manager takes the epochs of layouts and snapshots from one sequence, and a snapshot is cut only
//!   under the newest layout. So a barrier of a later layout refuses every stamp of earlier ones.
//! - The word only rises.

use pagemesh_base::ids::Epoch;
use std::sync::atomic::{AtomicU64, Ordering};

const LAYOUT_SHIFT: u32 = 32;

/// The epoch of a change under a layout of this epoch, by a word of [`StampEpoch`].
#[inline]
pub(crate) fn stamp_by(word: u64, layout: Epoch) -> Epoch {
    match (word >> LAYOUT_SHIFT) as u32 == layout.0 {
        true => Epoch(word as u32),
        false => layout,
    }
}

/// The layout of the last cut in the upper half, and the snapshot in the lower half.
#[derive(Default)]
pub(crate) struct StampEpoch(AtomicU64);

impl StampEpoch {
    #[inline]
    pub(crate) fn of(&self, layout: Epoch) -> Epoch {
        stamp_by(self.0.load(Ordering::SeqCst), layout)
    }

    /// Stamps changes of this layout with the snapshot from now on.
    pub(crate) fn cut(&self, layout: Epoch, snapshot: Epoch) {
        debug_assert!(layout < snapshot, "a snapshot is newer than its layout");
        let word = u64::from(layout.0) << LAYOUT_SHIFT | u64::from(snapshot.0);
        self.0.fetch_max(word, Ordering::SeqCst);
    }

    pub(crate) fn word(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshot_raises_stamps_of_its_layout_only() {
        let stamp = StampEpoch::default();
        let check = |layout, expected| {
            assert_eq!(stamp.of(Epoch(layout)), Epoch(expected), "layout {layout}");
        };
        check(0, 0);
        check(7, 7);
        stamp.cut(Epoch(7), Epoch(8));
        check(6, 6);
        check(7, 8);
        check(9, 9);
        stamp.cut(Epoch(7), Epoch(10));
        check(7, 10);
        stamp.cut(Epoch(11), Epoch(12));
        check(7, 7);
        check(11, 12);
    }
}
