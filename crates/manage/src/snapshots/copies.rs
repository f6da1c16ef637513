//! The copies of versions to legs that lack them, as far as they got.

use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::{BrickId, EpochNumber, SliceId, VolumeName};
use std::collections::BTreeMap;

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
}

/// The progress of copies, by target. A restarted manager begins anew.
#[derive(Debug, Default)]
pub(crate) struct VersionCopies {
    pub of: BTreeMap<SliceId, (VersionCopy, PageNo)>,
}
