//! Bodies about bookmarks.

use super::BrickAddress;
use crate::snapshots::SnapshotName;
use pagemesh_base::layout::{BrickId, EpochNumber, Layout, VolumeName};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// A bookmark to make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateBookmark {
    /// The snapshot.
    #[schema(value_type = crate::api::document::Name)]
    pub snapshot: SnapshotName,
    /// Its name, unique among the bookmarks of the volume; that of the snapshot if missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<crate::api::document::Name>)]
    pub name: Option<SnapshotName>,
}

/// A bookmark.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BookmarkInfo {
    /// The volume.
    #[schema(value_type = crate::api::document::Name)]
    pub volume: VolumeName,
    /// Its name.
    #[schema(value_type = crate::api::document::Name)]
    pub name: SnapshotName,
    /// The name of the snapshot, which need not exist any more.
    #[schema(value_type = crate::api::document::Name)]
    pub snapshot: SnapshotName,
    /// The epoch of the snapshot.
    #[schema(value_type = u32)]
    pub epoch: EpochNumber,
    /// Milliseconds since 1970 at which the snapshot was made.
    pub created_unix_ms: u64,
    /// The size of the volume at that time; for `files`, the limit of all files together.
    pub size_bytes: u64,
    /// Its maker: the name of a token, or `cluster key`.
    pub made_by: String,
}

/// A bookmark, and the legs that can tell the changes since.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BookmarkDetail {
    /// The same as in the list.
    pub info: BookmarkInfo,
    /// The volume's layout at that time, with the legs that had all of the snapshot. Its epoch is the snapshot's.
    #[schema(value_type = crate::api::document::Layout)]
    pub layout: Layout,
    /// The addresses of the bricks of these legs.
    #[schema(value_type = BTreeMap<String, BrickAddress>)]
    pub bricks: BTreeMap<BrickId, BrickAddress>,
}
