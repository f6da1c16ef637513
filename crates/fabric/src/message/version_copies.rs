//! Requests that copy versions of snapshots to another leg: their limits, and those with a list of snapshots.

use super::bodies::decode_epochs;
use super::control::Control;
use super::{Header, MalformedMessage, MessageKind};
use bytes::Bytes;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{
    LISTED_SNAPSHOTS_MAX, SliceError, VERSION_EDITS_MAX, VersionEdits, VersionRange,
};
use pagemesh_base::units::PAGE_BYTES;

/// A request with a slice and a list of snapshots.
pub(super) fn decode_listed(header: &Header, body: &Bytes) -> Result<Control, MalformedMessage> {
    let (slice, snapshots) = decode_epochs(header, body)?;
    Ok(match header.kind {
        MessageKind::DropSnapshots => Control::DropSnapshots { slice, snapshots },
        MessageKind::AdoptSnapshots => Control::AdoptSnapshots { slice, snapshots },
        _ => Control::ListVersions {
            slice,
            range: VersionRange {
                below: Epoch(header.epoch),
                snapshots,
                from: PageNo(header.offset),
            },
        },
    })
}

/// A read of a snapshot.
pub(super) fn decode_read(header: &Header, slice: SliceId) -> Result<Control, MalformedMessage> {
    let len = u32::try_from(header.len).map_err(|_| header.malformed("a length beyond limits"))?;
    Ok(Control::ReadVersion {
        slice,
        snapshot: Epoch(header.epoch),
        range: (header.offset, len),
    })
}

/// Checks the number of snapshots of a list of versions. Both ends check.
///
/// # Errors
/// [`SliceError::OutOfRange`] with the limit.
pub fn check_version_range(range: &VersionRange) -> Result<(), SliceError> {
    match (1..=LISTED_SNAPSHOTS_MAX).contains(&range.snapshots.len()) {
        true => Ok(()),
        false => Err(SliceError::OutOfRange(format!(
            "versions of {} snapshots at once; list those of 1 to {LISTED_SNAPSHOTS_MAX}",
            range.snapshots.len()
        ))),
    }
}

/// Checks the number of edits of versions, and the bytes of their pages. Both ends check.
///
/// # Errors
/// [`SliceError::OutOfRange`] with the limit.
pub fn check_version_edits(edits: &VersionEdits) -> Result<(), SliceError> {
    let added = edits
        .edits
        .iter()
        .filter(|edit| edit.from.is_none())
        .count();
    let is_sound = (1..=VERSION_EDITS_MAX).contains(&edits.edits.len())
        && edits.data.len() == added * PAGE_BYTES;
    is_sound.then_some(()).ok_or_else(|| {
        SliceError::OutOfRange(format!(
            "{} edits of versions with {} bytes; send 1 to {VERSION_EDITS_MAX}, with a page for each added one",
            edits.edits.len(),
            edits.data.len()
        ))
    })
}
