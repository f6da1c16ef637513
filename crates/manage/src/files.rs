//! Volumes that hold files. They are thin: bricks promise only the limit of all files together, not
//! the size of the volume.

use crate::events::EventDraft;
use crate::fault::Fault;
use crate::manager::{Manager, ManagerState};
use crate::placement::{Placement, PlacementError};
use crate::shape::{FILES_BYTES_MAX, FILES_SPACE_FACTOR_MIN, Shape, files_space_bytes};
use crate::slices::slice_locations;
use crate::volumes::{bytes_to_add, size_reply};
use crate::wire::VolumeSizeReply;
use pagemesh_base::layout::VolumeName;

impl Manager {
    /// Raises the limit of the files of a volume. The client that has attached the volume, or the
    /// next one, applies the new limit to the file system.
    ///
    /// # Errors
    /// When the limit does not rise, exceeds the address space of the volume, or a brick has no
    /// room.
    pub(crate) fn grow_files(
        &self,
        book: &mut ManagerState,
        name: &VolumeName,
        size_bytes: u64,
    ) -> Result<VolumeSizeReply, Fault> {
        let mut record = book.volume(name)?.clone();
        let now = record.files_bytes.unwrap_or(0);
        let more = record.shape.fit(bytes_to_add(now, size_bytes)?)?;
        let bytes = now.saturating_add(more);
        let most = record.layout_state.layout.size_bytes() / FILES_SPACE_FACTOR_MIN;
        if bytes > most {
            return Err(Fault::invalid_field(
                format!("the file system {name} was made for no more than {most} bytes"),
                "make a larger file system and copy the files",
            ));
        }
        let provisioned = book.provisioned();
        for place in slice_locations(&record.layout_state.layout.segments) {
            let Some(brick) = book.bricks.get(&place.brick) else {
                continue;
            };
            let most = brick.record.capacity_bytes;
            let most = most.saturating_mul(self.settings.overprovision_factor);
            let promised = provisioned.get(&place.brick).map_or(0, |sum| sum.0);
            let room = most.saturating_sub(promised);
            if room < more {
                return Err(PlacementError::NoRoomOn {
                    brick: book.label(place.brick),
                    bytes: more,
                    room_bytes: room,
                }
                .into());
            }
        }
        record.files_bytes = Some(bytes);
        let grown = EventDraft::volume_grown(name, &self.actor(), bytes);
        self.commit_volume(book, &record, vec![grown])?;
        Ok(size_reply(
            self.volume_detail(book, &record),
            size_bytes,
            bytes,
        ))
    }
}

/// Checks the shape and limit of a volume with files: one column, and at most [`FILES_BYTES_MAX`]
/// bytes.
pub(crate) fn check_files(shape: Shape, bytes: u64) -> Result<u64, Fault> {
    if shape.columns != 1 {
        return Err(Fault::invalid_field(
            format!("a file system lies in one column, not in {}", shape.columns),
            "take the layout mirror, or concat for one copy",
        ));
    }
    if bytes > FILES_BYTES_MAX {
        return Err(crate::shape::ShapeError::TooLarge {
            asked: bytes,
            what: "a file system",
            most: FILES_BYTES_MAX,
        }
        .into());
    }
    Ok(bytes)
}

/// Widens the single segment to the address space of the files. Refuses a placement on several
/// segments: one brick must have room for all files.
pub(crate) fn set_address_space(placement: &mut Placement, bytes: u64) -> Result<(), Fault> {
    match placement.segments.as_mut_slice() {
        [segment] => {
            segment.bytes = files_space_bytes(bytes);
            Ok(())
        }
        segments => {
            let largest = segments.iter().map(|segment| segment.bytes).max();
            let largest_bytes = largest.unwrap_or(0);
            Err(PlacementError::NoRoom {
                bytes,
                largest_bytes,
            }
            .into())
        }
    }
}
