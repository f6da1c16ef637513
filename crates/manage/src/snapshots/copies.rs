//! The copies of versions to legs that lack them, as far as they got.

use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::{BrickId, EpochNumber, SliceId, VolumeName};
use pagemesh_base::slice::LISTED_SNAPSHOTS_MAX;
use std::collections::{BTreeMap, BTreeSet};

/// The copy of versions to one leg.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VersionCopy {
    pub volume: VolumeName,
    /// The epoch of the layout.
    pub below: EpochNumber,
    pub source: (BrickId, SliceId),
    pub target: (BrickId, SliceId),
    /// Snapshots that the source has as a whole, and the target not.
    pub missing: Vec<Epoch>,
    /// Snapshots that the target has as a whole.
    pub complete: Vec<Epoch>,
    /// The epochs of all snapshots and bookmarks of the volume.
    pub marks: Vec<Epoch>,
}

/// A copy that has begun.
#[derive(Debug)]
pub(crate) struct CopyProgress {
    /// The snapshots that are compared.
    pub missing: Vec<Epoch>,
    /// The layout in which it has begun.
    pub layout: EpochNumber,
    /// Those with views that cannot be made equal in this layout.
    pub unequal: BTreeSet<Epoch>,
    /// All views of pages below are equal, but those.
    pub next: PageNo,
}

/// The progress of copies, by target. The view of a snapshot on a leg does not change once the leg lists it. So the progress
/// holds in later layouts, and for other sources. A restarted manager begins anew.
#[derive(Debug, Default)]
pub(crate) struct VersionCopies {
    pub of: BTreeMap<SliceId, CopyProgress>,
    /// Snapshots that a leg cannot get, and the layout in which they were compared.
    pub refused: BTreeMap<SliceId, (EpochNumber, BTreeSet<Epoch>)>,
    /// The target of the last copy.
    pub last: Option<SliceId>,
}

impl CopyProgress {
    pub fn new(copy: &VersionCopy) -> CopyProgress {
        CopyProgress {
            missing: copy.missing.clone(),
            layout: copy.below,
            unequal: BTreeSet::new(),
            next: PageNo(0),
        }
    }

    /// Whether it holds for this copy: all of its snapshots were compared, and none was given up in another layout.
    pub fn is_of(&self, copy: &VersionCopy) -> bool {
        let mut missing = copy.missing.iter();
        let is_given_up = !self.unequal.is_empty() && self.layout != copy.below;
        missing.all(|it| self.missing.contains(it)) && !is_given_up
    }
}

impl VersionCopies {
    /// Notes snapshots that a leg cannot get in a layout.
    pub fn refuse(&mut self, target: SliceId, layout: EpochNumber, snapshots: &BTreeSet<Epoch>) {
        let refused = self
            .refused
            .entry(target)
            .or_insert((layout, BTreeSet::new()));
        if refused.0 != layout {
            *refused = (layout, BTreeSet::new());
        }
        refused.1.extend(snapshots);
    }

    /// Forgets slices that no volume has any more.
    pub fn keep_only(&mut self, is_known: impl Fn(&SliceId) -> bool) {
        self.of.retain(|slice, _| is_known(slice));
        self.refused.retain(|slice, _| is_known(slice));
    }

    /// Whether a leg may get a snapshot in a layout.
    pub fn may_copy(&self, target: SliceId, layout: EpochNumber, snapshot: Epoch) -> bool {
        let refused = self.refused.get(&target);
        !refused.is_some_and(|(of, snapshots)| *of == layout && snapshots.contains(&snapshot))
    }

    /// The snapshots to compare: those of a copy that has begun, or else as many as one list may name.
    pub fn begun_first(&self, target: SliceId, missing: Vec<Epoch>) -> Vec<Epoch> {
        let begun = self.of.get(&target).map_or(&[][..], |it| &it.missing);
        let is_begun = |it: &&Epoch| begun.contains(it);
        let of_begun: Vec<Epoch> = missing.iter().filter(is_begun).copied().collect();
        match of_begun.is_empty() {
            true => missing.into_iter().take(LISTED_SNAPSHOTS_MAX).collect(),
            false => of_begun,
        }
    }
}
