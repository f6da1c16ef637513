//! Requests of a manager.

use super::MessageKind;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{CloneSource, VersionEdits, VersionRange};

/// A manager's call to the brick.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Control {
    /// Make a slice.
    Create {
        /// Its identity.
        slice: SliceId,
        /// Its size.
        size_bytes: u64,
    },
    /// Grow it.
    Resize {
        /// The slice.
        slice: SliceId,
        /// Its new size.
        size_bytes: u64,
    },
    /// Delete it.
    Delete {
        /// The slice.
        slice: SliceId,
    },
    /// List the slices in the order of their identities.
    List {
        /// The last slice of the previous answer.
        after: Option<SliceId>,
    },
    /// Get the brick's status.
    Status,
    /// Prepare a snapshot of a slice that no client uses.
    PrepareSnapshot {
        /// The slice.
        slice: SliceId,
        /// The snapshot.
        snapshot: Epoch,
    },
    /// Drop snapshots.
    DropSnapshots {
        /// The slice.
        slice: SliceId,
        /// At least one, at most [`DROPPED_SNAPSHOTS_MAX`](pagemesh_base::slice::DROPPED_SNAPSHOTS_MAX).
        snapshots: Vec<Epoch>,
    },
    /// List the snapshots of a slice in ascending order.
    Snapshots {
        /// The slice.
        slice: SliceId,
        /// The last snapshot of the previous answer, or 0.
        after: Epoch,
    },
    /// Make a slice from a snapshot of another one, as far as a bounded time allows.
    CreateClone {
        /// The slice.
        slice: SliceId,
        /// The snapshot.
        source: CloneSource,
        /// Its size.
        size_bytes: u64,
    },
    /// Copy pages that a clone shares.
    PromoteClone {
        /// The slice.
        slice: SliceId,
    },
    /// Count pages by the snapshots that see them.
    CountSeenPages {
        /// The slice.
        slice: SliceId,
        /// The first page.
        from: PageNo,
    },
    /// List further snapshots of a slice.
    AdoptSnapshots {
        /// The slice.
        slice: SliceId,
        /// At least one, at most [`DROPPED_SNAPSHOTS_MAX`](pagemesh_base::slice::DROPPED_SNAPSHOTS_MAX).
        snapshots: Vec<Epoch>,
    },
    /// List versions of pages.
    ListVersions {
        /// The slice.
        slice: SliceId,
        /// The versions.
        range: VersionRange,
    },
    /// Edit versions of pages.
    EditVersions {
        /// The slice.
        slice: SliceId,
        /// The edits.
        edits: VersionEdits,
    },
    /// Read bytes as a snapshot sees them.
    ReadVersion {
        /// The slice.
        slice: SliceId,
        /// The snapshot.
        snapshot: Epoch,
        /// The first byte, and bytes.
        range: (u64, u32),
    },
}

impl Control {
    pub(super) fn kind(&self) -> MessageKind {
        match self {
            Control::Create { .. } => MessageKind::Create,
            Control::Resize { .. } => MessageKind::Resize,
            Control::Delete { .. } => MessageKind::Delete,
            Control::List { .. } => MessageKind::List,
            Control::Status => MessageKind::Status,
            Control::PrepareSnapshot { .. } => MessageKind::ControlPrepareSnapshot,
            Control::DropSnapshots { .. } => MessageKind::DropSnapshots,
            Control::Snapshots { .. } => MessageKind::Snapshots,
            Control::CreateClone { .. } => MessageKind::CreateClone,
            Control::PromoteClone { .. } => MessageKind::PromoteClone,
            Control::CountSeenPages { .. } => MessageKind::CountSeenPages,
            Control::AdoptSnapshots { .. } => MessageKind::AdoptSnapshots,
            Control::ListVersions { .. } => MessageKind::ListVersions,
            Control::EditVersions { .. } => MessageKind::EditVersions,
            Control::ReadVersion { .. } => MessageKind::ControlReadVersion,
        }
    }
}
