//! Pages of a slice, counted by the snapshots that see them.

use crate::ids::{Epoch, PageNo};

/// The last reader of pages that the slice itself has. It is above each epoch.
pub const SEEN_BY_SLICE: Epoch = Epoch(u32::MAX);
/// Runs of one list.
pub const SEEN_RUNS_MAX: usize = 1 << 15;

/// Pages that the same run of snapshots sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SeenPages {
    /// The first snapshot that sees them; [`SEEN_BY_SLICE`]: only the slice has them.
    pub first: Epoch,
    /// The last one; [`SEEN_BY_SLICE`]: the slice has them, too.
    pub last: Epoch,
    /// Their number.
    pub pages: u64,
}

/// A part of the counts of a slice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SeenPagesList {
    /// Sorted by their snapshots, each run once.
    pub runs: Vec<SeenPages>,
    /// The page to continue with; none: the slice ends.
    pub next: Option<PageNo>,
}
