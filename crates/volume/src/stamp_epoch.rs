//! The epoch that changes are stamped with: the epoch of their layout, or that of the newest snapshot
//! that was cut under this layout.
//!
//! Invariants:
//! - A snapshot raises the stamps of its own layout only. So a change of an older layout keeps the epoch
//!   that the barrier of the newer one refuses, although its legs take any epoch from theirs on.
//! - The manager takes the epochs of layouts and snapshots from one sequence, and a snapshot is cut only
//!   under the newest layout. So a barrier of a later layout refuses every stamp of earlier ones.
//! - A held snapshot has raised the stamps, and gives none out before it is released. One load tells both.
//! - The word only rises: a release sets its lowest bit.

use pagemesh_base::ids::{EPOCH_MAX, Epoch};
use std::sync::atomic::{AtomicU64, Ordering};

const LAYOUT_SHIFT: u32 = 32;
const SNAPSHOT_SHIFT: u32 = 1;
/// Changes get the epoch of the snapshot. Without this bit they wait.
const RELEASED: u64 = 1;
const _: () = assert!(EPOCH_MAX < u32::MAX >> SNAPSHOT_SHIFT, "it fits");

/// The word before the first snapshot.
pub(crate) const NO_SNAPSHOT: u64 = RELEASED;

/// The epoch of a change under a layout of this epoch, by a word of [`StampEpoch`]. None: a snapshot of the
/// layout is held, and the change waits.
#[inline]
pub(crate) fn stamp_by(word: u64, layout: Epoch) -> Option<Epoch> {
    if (word >> LAYOUT_SHIFT) as u32 != layout.0 {
        return Some(layout);
    }
    (word & RELEASED != 0).then_some(Epoch(word as u32 >> SNAPSHOT_SHIFT))
}

/// Releases the snapshot that a word holds; true if it was held until now.
pub(crate) fn release(word: &AtomicU64) -> bool {
    word.fetch_or(RELEASED, Ordering::SeqCst) & RELEASED == 0
}

/// The layout of the last cut in the upper half, and the snapshot with [`RELEASED`] in the lower half.
pub(crate) struct StampEpoch(AtomicU64);

impl Default for StampEpoch {
    fn default() -> StampEpoch {
        StampEpoch(AtomicU64::new(NO_SNAPSHOT))
    }
}

impl StampEpoch {
    /// See [`stamp_by`].
    #[inline]
    pub(crate) fn of(&self, layout: Epoch) -> Option<Epoch> {
        stamp_by(self.word(), layout)
    }

    /// The epoch of the newest snapshot under a layout of this epoch, also while it is held.
    pub(crate) fn newest(&self, layout: Epoch) -> Epoch {
        stamp_by(self.word() | RELEASED, layout).unwrap_or(layout)
    }

    /// Stamps changes of this layout with the snapshot from now on.
    pub(crate) fn cut(&self, layout: Epoch, snapshot: Epoch) {
        self.raise(layout, snapshot, RELEASED);
    }

    /// Lets changes of this layout wait from now on, until [`StampEpoch::release`] gives them the epoch of the snapshot.
    pub(crate) fn hold(&self, layout: Epoch, snapshot: Epoch) {
        self.raise(layout, snapshot, 0);
    }

    fn raise(&self, layout: Epoch, snapshot: Epoch, released: u64) {
        debug_assert!(layout < snapshot, "a snapshot is newer than its layout");
        let half = u64::from(snapshot.0) << SNAPSHOT_SHIFT | released;
        let word = u64::from(layout.0) << LAYOUT_SHIFT | half;
        self.0.fetch_max(word, Ordering::SeqCst);
    }

    /// Ends [`StampEpoch::hold`]; true if it was in force until now.
    pub(crate) fn release(&self) -> bool {
        release(&self.0)
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
            assert_eq!(
                stamp.of(Epoch(layout)),
                Some(Epoch(expected)),
                "layout {layout}"
            );
        };
        check(0, 0);
        check(7, 7);
        stamp.cut(Epoch(7), Epoch(8));
        check(6, 6);
        check(7, 8);
        check(9, 9);
        stamp.cut(Epoch(7), Epoch(10));
        check(7, 10);
        stamp.cut(Epoch(11), Epoch(EPOCH_MAX));
        check(7, 7);
        check(11, EPOCH_MAX);
    }

    #[test]
    fn held_snapshot_gives_no_stamp_before_its_release() {
        let stamp = StampEpoch::default();
        assert!(!stamp.release(), "none is held");
        stamp.hold(Epoch(7), Epoch(8));
        assert_eq!(stamp.of(Epoch(7)), None);
        assert_eq!(stamp.of(Epoch(9)), Some(Epoch(9)), "another layout");
        assert_eq!(stamp.newest(Epoch(7)), Epoch(8));
        assert!(stamp.release());
        assert_eq!(stamp.of(Epoch(7)), Some(Epoch(8)));
        assert!(!stamp.release(), "it was released before");
        stamp.hold(Epoch(7), Epoch(9));
        stamp.cut(Epoch(7), Epoch(10));
        assert_eq!(stamp.of(Epoch(7)), Some(Epoch(10)));
    }
}
