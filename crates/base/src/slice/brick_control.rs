//! A manager's calls to a brick.

use super::{
    BrickStatus, SeenPagesList, SliceError, SliceInfo, VersionEdits, VersionList, VersionRange,
};
use crate::ids::{Epoch, PageNo};
use crate::layout::SliceId;

/// The refusal of a brick of an earlier release, for the space of snapshots.
pub const SPACE_UNKNOWN: &str = "the brick does not count the space of snapshots; upgrade it first";

/// The progress of filling or promoting a clone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CloneProgress {
    /// Leaves of 512 pages that are done.
    pub done: u64,
    /// All leaves.
    pub all: u64,
}

impl CloneProgress {
    /// Whether nothing is left to do.
    #[must_use]
    pub fn is_complete(self) -> bool {
        self.done == self.all
    }
}

/// The snapshot that a clone begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CloneSource {
    /// The slice of the snapshot.
    pub origin: SliceId,
    /// The epoch of the snapshot.
    pub snapshot: Epoch,
}

/// The refusal of a brick of an earlier release. Such a brick has no snapshot.
pub const SNAPSHOTS_UNKNOWN: &str = "the brick does not know snapshots; upgrade it first";
/// The refusal of a brick of an earlier release, for a clone.
pub const CLONES_UNKNOWN: &str = "the brick does not know clones; upgrade it first";

/// The refusal of a brick of an earlier release, for a copy of versions.
pub const VERSION_COPIES_UNKNOWN: &str =
    "the brick does not know copies of snapshots to other legs; upgrade it first";

fn version_copies_unknown() -> SliceError {
    SliceError::Refused(VERSION_COPIES_UNKNOWN.into())
}

/// A manager's calls to a brick. They block for a bounded time.
pub trait BrickControl: Send + Sync {
    /// Makes an empty slice of at least this size in whole pages, thin.
    ///
    /// # Errors
    /// When it exists, or the pool's object table is full.
    fn create(&self, slice: SliceId, size_bytes: u64) -> Result<(), SliceError>;

    /// Grows it; a smaller size is refused.
    ///
    /// # Errors
    /// When it does not exist or would shrink.
    fn resize(&self, slice: SliceId, size_bytes: u64) -> Result<(), SliceError>;

    /// Deletes it, even while clients use it; its space is freed in the background.
    ///
    /// # Errors
    /// When it does not exist.
    fn delete(&self, slice: SliceId) -> Result<(), SliceError>;

    /// Every slice.
    ///
    /// # Errors
    /// When the brick is lost.
    fn list(&self) -> Result<Vec<SliceInfo>, SliceError>;

    /// The brick's status.
    ///
    /// # Errors
    /// When the brick is lost.
    fn status(&self) -> Result<BrickStatus, SliceError>;

    /// Raises the slice's epoch to that of a snapshot, so that no change before it comes any more, and
    /// keeps the versions that the snapshot sees from then on. Durable when it returns. For a volume that
    /// no client has attached. A second call for the same snapshot has no effect.
    ///
    /// # Errors
    /// When the slice does not exist, has a newer epoch, or the brick does not know snapshots.
    fn prepare_snapshot(&self, slice: SliceId, snapshot: Epoch) -> Result<(), SliceError> {
        let _ = (slice, snapshot);
        Err(SliceError::snapshots_unknown())
    }

    /// Drops snapshots of a slice, at most [`DROPPED_SNAPSHOTS_MAX`](super::DROPPED_SNAPSHOTS_MAX). Durable when it returns; space is
    /// freed in the background. Unknown ones are ignored.
    ///
    /// # Errors
    /// When the slice does not exist, there are too many, or the brick does not know snapshots.
    fn drop_snapshots(&self, slice: SliceId, dropped: &[Epoch]) -> Result<(), SliceError> {
        let _ = (slice, dropped);
        Err(SliceError::snapshots_unknown())
    }

    /// The snapshots of a slice, ascending, prepared ones included.
    ///
    /// # Errors
    /// When the slice does not exist, or the brick does not know snapshots.
    fn snapshots(&self, slice: SliceId) -> Result<Vec<Epoch>, SliceError> {
        let _ = slice;
        Err(SliceError::snapshots_unknown())
    }

    /// Makes a slice that begins with the pages of a snapshot, and shares them. It takes a bounded time: the caller
    /// repeats the call until nothing is left to do. No client can attach the slice before.
    ///
    /// # Errors
    /// When another slice has its identity, there is no such snapshot, the size is less than the origin's, the pool is full,
    /// or the brick does not know clones.
    fn create_clone(
        &self,
        slice: SliceId,
        source: CloneSource,
        size_bytes: u64,
    ) -> Result<CloneProgress, SliceError> {
        let _ = (slice, source, size_bytes);
        Err(SliceError::Refused(CLONES_UNKNOWN.into()))
    }

    /// Copies pages that a clone shares. It takes a bounded time: the caller repeats the call until nothing is left to do.
    /// Then the origin and its snapshot can be deleted. A slice that is no clone is done.
    ///
    /// # Errors
    /// When there is no such slice, clones depend on it, a page is damaged, the pool is full, or the brick does not know
    /// clones.
    fn promote_clone(&self, slice: SliceId) -> Result<CloneProgress, SliceError> {
        let _ = slice;
        Err(SliceError::Refused(CLONES_UNKNOWN.into()))
    }

    /// Lists further snapshots of a slice, which it lacked because it was away. It keeps versions for them from now on. Durable
    /// when it returns. At most [`DROPPED_SNAPSHOTS_MAX`](super::DROPPED_SNAPSHOTS_MAX).
    ///
    /// # Errors
    /// When the slice does not exist, the pool is full, or the brick does not know such copies.
    fn adopt_snapshots(&self, slice: SliceId, adopted: &[Epoch]) -> Result<(), SliceError> {
        let _ = (slice, adopted);
        Err(version_copies_unknown())
    }

    /// The versions of a range that died below an epoch of the slice.
    ///
    /// # Errors
    /// When the slice does not exist or has an older epoch, or the brick does not know such copies.
    fn list_versions(
        &self,
        slice: SliceId,
        range: &VersionRange,
    ) -> Result<VersionList, SliceError> {
        let _ = (slice, range);
        Err(version_copies_unknown())
    }

    /// Edits the versions of one leaf. Durable when it returns.
    ///
    /// # Errors
    /// When the slice does not exist, its versions must be listed again, the pool is full, or the brick does not know such
    /// copies. Then some edits may be made.
    fn edit_versions(&self, slice: SliceId, edits: &VersionEdits) -> Result<(), SliceError> {
        let _ = (slice, edits);
        Err(version_copies_unknown())
    }

    /// The bytes of a range as a snapshot sees them, at most [`SLICE_IO_BYTES_MAX`](super::SLICE_IO_BYTES_MAX).
    ///
    /// # Errors
    /// When there is no such slice or snapshot, a page is damaged, or the brick does not know such copies.
    fn read_version(
        &self,
        slice: SliceId,
        snapshot: Epoch,
        (offset, len): (u64, u32),
    ) -> Result<Vec<u8>, SliceError> {
        let _ = (slice, snapshot, offset, len);
        Err(version_copies_unknown())
    }

    /// Counts pages of a slice by the snapshots that see them, from a page on, in a bounded time.
    ///
    /// # Errors
    /// When there is no such slice, its versions are damaged, or the brick does not count.
    fn count_seen_pages(&self, slice: SliceId, from: PageNo) -> Result<SeenPagesList, SliceError> {
        let _ = (slice, from);
        Err(SliceError::Refused(SPACE_UNKNOWN.into()))
    }
}
