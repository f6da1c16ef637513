//! The slices of a layout: their bricks, and the bytes that the bricks hold or promise.

use pagemesh_base::layout::{BrickId, Segment, SliceId};

/// A slice and its present or future brick.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SliceLocation {
    pub brick: BrickId,
    pub slice: SliceId,
    pub bytes: u64,
}

/// The slices of segments.
pub(crate) fn slice_locations(segments: &[Segment]) -> impl Iterator<Item = SliceLocation> {
    segments.iter().flat_map(|segment| {
        let legs = segment.columns.iter().flat_map(|column| &column.legs);
        legs.map(|leg| SliceLocation {
            brick: leg.brick,
            slice: leg.slice,
            bytes: segment.slice_bytes(),
        })
    })
}

/// The slices of segments, with the bytes that their bricks promise. For a volume with files that
/// is the limit of its files.
pub(crate) fn promised_slices(
    segments: &[Segment],
    files_bytes: Option<u64>,
) -> impl Iterator<Item = SliceLocation> {
    slice_locations(segments).map(move |place| SliceLocation {
        bytes: place.bytes.min(files_bytes.unwrap_or(u64::MAX)),
        ..place
    })
}
