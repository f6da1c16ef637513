//! The owner's memory of versions for snapshots, as `versions` keeps it.

use crate::format::version_log::Version;
use crate::format::version_pages::VersionsHead;
use pagemesh_base::ids::{Epoch, ObjectId};
use std::collections::{BTreeMap, HashMap};

/// A line of the version log that is not merged yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingVersion {
    /// The position of its line.
    pub(super) position: u64,
    pub(super) version: Version,
}

/// The versions of one slice.
pub(super) struct SliceVersions {
    /// The object with the versions.
    pub(super) object: ObjectId,
    pub(super) head: VersionsHead,
    /// Ascending.
    pub(super) snapshots: Vec<Epoch>,
    pub(super) sweep: Option<Sweep>,
    /// The slice is deleted: the tail of the log at that time.
    pub(super) retires_after: Option<u64>,
    /// A page of the object cannot be used. The snapshots cannot be read, and nothing is freed.
    pub(super) is_damaged: bool,
    /// Whether the head on the medium tells all damage, as far as it can be written.
    pub(super) is_damage_stored: bool,
}

/// The versions of all slices.
#[derive(Default)]
pub(crate) struct VersionStore {
    /// By the object of the slice.
    pub(super) slices: HashMap<ObjectId, SliceVersions>,
    /// Lines of the log that are not merged, by object and leaf.
    pub(super) pending: BTreeMap<(ObjectId, u64), Vec<PendingVersion>>,
    /// The number of all pending lines.
    pub(super) pending_lines: u64,
    /// Lines below this position were in the log when the pool was opened. They may be merged already.
    pub(super) recovered_tail: u64,
    /// Lines below this position are merged.
    pub(super) merged_head: u64,
    pub(super) batch: Option<MergeBatch>,
    /// By the object of the slice.
    pub(super) settled: HashMap<ObjectId, SettledVersions>,
    /// The log had no room for all versions of the last checkpoint.
    pub(super) is_checkpoint_limited: bool,
    /// The last merge found no free frame.
    pub(super) is_out_of_room: bool,
}

impl VersionStore {
    pub(super) fn of(&self, object: ObjectId) -> Option<&SliceVersions> {
        self.slices.get(&object)
    }
}

impl SliceVersions {
    /// Whether the head is known. Otherwise its page is damaged.
    pub(super) fn has_head(&self) -> bool {
        self.head != VersionsHead::default()
    }

    pub(super) fn has_snapshot(&self, snapshot: Epoch) -> bool {
        self.snapshots.binary_search(&snapshot).is_ok()
    }

    /// Whether some snapshot sees a version.
    pub(super) fn is_seen(&self, birth: Epoch, death: Epoch) -> bool {
        let first = self
            .snapshots
            .partition_point(|&snapshot| snapshot <= birth);
        self.snapshots.get(first).is_some_and(|&it| it <= death)
    }

    pub(super) fn newest(&self) -> Epoch {
        self.snapshots.last().copied().unwrap_or(Epoch(0))
    }
}

/// All versions of a slice that died below an epoch are applied.
#[derive(Clone, Copy, Debug)]
pub(super) struct SettledVersions {
    pub(super) below: Epoch,
    /// The tail of the log then. They are merged once the head has passed it.
    pub(super) after: u64,
}

/// A merge in progress.
#[derive(Clone, Copy, Debug)]
pub(super) struct MergeBatch {
    /// Lines below are merged.
    pub(super) end: u64,
    /// The leaf to continue with.
    pub(super) next: (ObjectId, u64),
}

/// The progress of a sweep.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sweep {
    /// The tail of the log when the snapshot was dropped.
    pub(super) after: u64,
    pub(super) next_leaf: u64,
}

/// The owner's memory of clones in progress. A restart begins again, and passes what is done.
#[derive(Default)]
pub(crate) struct CloneWork {
    pub(super) filled_below: HashMap<ObjectId, u64>,
    pub(super) promoted: HashMap<ObjectId, Promotion>,
}

impl CloneWork {
    /// Forgets the progress of an object that is gone. Another one may get its number.
    pub(super) fn forget(&mut self, object: ObjectId) {
        self.filled_below.remove(&object);
        self.promoted.remove(&object);
    }
}

/// The progress of a promotion.
#[derive(Clone, Copy, Default)]
pub(super) struct Promotion {
    /// The next page of the slice.
    pub(super) next_page: u64,
    /// All pages of the slice are its own, so no new line of the log names a shared frame. The tail of the log then.
    pub(super) logged_below: Option<u64>,
    /// The next page of its object of versions.
    pub(super) next_version: u64,
}
