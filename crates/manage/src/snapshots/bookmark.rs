//! The records of bookmarks: epochs of volumes without the data of their snapshots, as `zfs bookmark` makes them.

use super::name::SnapshotName;
use pagemesh_base::layout::{EpochNumber, Layout, Segment, VolumeName};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Maximum of bookmarks of one volume. Each replication target needs one.
pub const VOLUME_BOOKMARKS_MAX: usize = 1024;
/// Maximum of bookmarks of all volumes: memory holds all of them, of less than 1 KiB each.
pub const BOOKMARKS_MAX: usize = 16 * 1024;

/// The epoch of a snapshot, and the copies that had it. Changes since can be sent, although the snapshot is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BookmarkRecord {
    /// The identity of the volume.
    pub volume: Uuid,
    /// Its name, unique among the bookmarks of the volume.
    pub name: SnapshotName,
    /// The epoch of the snapshot.
    pub epoch: EpochNumber,
    /// The name of the snapshot.
    pub snapshot: SnapshotName,
    /// Milliseconds since 1970 at which the snapshot was made.
    pub created_unix_ms: u64,
    /// The size of the volume at that time.
    pub size_bytes: u64,
    /// The segments of the volume at that time, with the legs that had all of the snapshot.
    pub segments: Vec<Segment>,
    /// The actor that made the bookmark.
    pub made_by: String,
}

impl BookmarkRecord {
    /// The layout of the snapshot.
    pub(crate) fn layout(&self, volume: &VolumeName) -> Layout {
        Layout {
            volume: self.volume,
            name: volume.clone(),
            epoch: self.epoch,
            segments: self.segments.clone(),
        }
    }
}
