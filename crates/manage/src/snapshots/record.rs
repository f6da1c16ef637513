//! The records of snapshots in the store, as JSON. New fields need a default.

use super::name::{HoldTag, SnapshotName};
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::layout::{
    Column, EpochNumber, Layout, Leg, LegState, Segment, SliceId, VolumeName,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

/// The state of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SnapshotState {
    /// The cut runs. No list shows the snapshot.
    Preparing,
    /// The snapshot exists.
    Committed,
    /// The bricks drop it, and its name is free again.
    Deleting,
}

/// A snapshot of a volume. It has every change with a lower epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotRecord {
    /// The identity of the volume.
    pub volume: Uuid,
    /// Its name.
    pub name: SnapshotName,
    /// Its epoch, from the sequence of the volume's epochs.
    pub epoch: EpochNumber,
    /// Milliseconds since 1970.
    pub created_unix_ms: u64,
    /// Its state.
    pub state: SnapshotState,
    /// The name of its layout: the epoch of the first snapshot with it.
    pub layout: EpochNumber,
    /// The actor that made it.
    pub made_by: String,
    /// The tags that keep it from being deleted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub holds: Vec<HoldTag>,
    /// Free texts of its maker.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<String>,
    /// Whether a request to prepare it may still be on its way, so that a brick may have it after it was dropped.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub uncertain: bool,
    /// The slices that got all of the snapshot after it was made, from other legs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<SliceId>,
    /// The slices of asynchronous replicas that have all of the snapshot. Readers do not use them. A promotion moves the
    /// slice of its copy to `copies`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replica_copies: Vec<SliceId>,
}

/// The size and the legs that snapshots of a volume share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotLayout {
    /// The identity of the volume.
    pub volume: Uuid,
    /// The epoch of the first snapshot with it.
    pub first: EpochNumber,
    /// The size of the volume.
    pub size_bytes: u64,
    /// The segments of the volume, with the legs that took part in the cut: in-sync ones have the snapshot, syncing ones
    /// only parts of it.
    pub segments: Vec<Segment>,
}

impl SnapshotLayout {
    /// The layout of a snapshot that is made now. Syncing legs take part in the cut of a client.
    pub(crate) fn new(
        layout: &Layout,
        size_bytes: u64,
        first: EpochNumber,
        is_attached: bool,
    ) -> SnapshotLayout {
        let takes_part = |leg: &&Leg| match leg.state {
            LegState::InSync => true,
            LegState::Syncing => is_attached,
            LegState::Stale | LegState::AsyncReplica => false,
        };
        let cut_leg = |leg: &Leg| Leg {
            state: match defect::is(Defect::SyncingLegHasSnapshot) {
                true => LegState::InSync,
                false => leg.state,
            },
            ..leg.clone()
        };
        let column = |column: &Column| Column {
            legs: column.legs.iter().filter(takes_part).map(cut_leg).collect(),
            lost_since: EpochNumber(0),
        };
        let segments = layout.segments.iter().map(|segment| Segment {
            bytes: segment.bytes,
            columns: segment.columns.iter().map(column).collect(),
        });
        SnapshotLayout {
            volume: layout.volume,
            first,
            size_bytes,
            segments: segments.collect(),
        }
    }

    /// Whether another snapshot with this layout can share it.
    pub(crate) fn is_like(&self, other: &SnapshotLayout) -> bool {
        (self.size_bytes, &self.segments) == (other.size_bytes, &other.segments)
    }

    /// Whether the leg with this slice took part in the cut, and has all of the snapshot.
    pub(crate) fn has_all(&self, slice: SliceId) -> bool {
        let columns = self.segments.iter().flat_map(|it| &it.columns);
        let mut legs = columns.flat_map(|column| &column.legs);
        legs.any(|leg| leg.state == LegState::InSync && leg.slice == slice)
    }

    /// The layout of a snapshot with the legs that got it later: those of the volume's present segments that are in `copies`.
    pub(crate) fn with_copies(&self, present: &[Segment], copies: &[SliceId]) -> SnapshotLayout {
        let mut layout = self.clone();
        for (segment, now) in layout.segments.iter_mut().zip(present) {
            for (column, now) in segment.columns.iter_mut().zip(&now.columns) {
                column.legs.retain(|leg| !copies.contains(&leg.slice));
                let later = now.legs.iter().filter(|leg| copies.contains(&leg.slice));
                column.legs.extend(later.map(|leg| Leg {
                    state: LegState::InSync,
                    ..leg.clone()
                }));
            }
        }
        layout
    }

    /// Whether each column has an in-sync leg among these slices.
    pub(crate) fn is_readable_from(&self, has: impl Fn(SliceId) -> bool) -> bool {
        let is_source = |leg: &Leg| leg.state == LegState::InSync && has(leg.slice);
        let mut columns = self.segments.iter().flat_map(|it| &it.columns);
        columns.all(|column| column.legs.iter().any(is_source))
    }

    /// The layout for readers of a snapshot: the legs that have all of it, and still are legs of the volume.
    pub(crate) fn for_readers(
        &self,
        volume: &VolumeName,
        epoch: EpochNumber,
        has: impl Fn(SliceId) -> bool,
    ) -> Layout {
        let is_source = |leg: &&Leg| leg.state == LegState::InSync && has(leg.slice);
        let column = |column: &Column| Column {
            legs: column.legs.iter().filter(is_source).cloned().collect(),
            lost_since: EpochNumber(0),
        };
        let segments = self.segments.iter().map(|segment| Segment {
            bytes: segment.bytes,
            columns: segment.columns.iter().map(column).collect(),
        });
        Layout {
            volume: self.volume,
            name: volume.clone(),
            epoch,
            segments: segments.collect(),
        }
    }
}
