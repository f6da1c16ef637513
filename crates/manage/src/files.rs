//! Volumes that hold files: thin ones, of which bricks are promised only what the files
//! may take together.

use crate::fault::Fault;
use crate::manager::{Book, Manager, places};
use crate::placement::{PlaceError, Placement};
use crate::shape::{FILES_BYTES_MAX, FILES_SPACE_FACTOR_MIN, Shape, files_space_bytes};
use crate::volumes::{growth, sized};
use crate::wire::Sized;
use pagemesh_base::layout::VolumeName;

impl Manager {
    /// Raises what the files of a volume may take together. The client that has it, or
    /// the next one, takes that over into the file system.
    ///
    /// # Errors
    /// When it is not more than now, or more than the addresses of the volume are good
    /// for, or a brick has no room.
    pub(crate) fn grow_files(
        &self,
        book: &mut Book,
        name: &VolumeName,
        size_bytes: u64,
    ) -> Result<Sized, Fault> {
        let mut record = book.volume(name)?.clone();
        let now = record.files_bytes.unwrap_or(0);
        let more = record.shape.fit(growth(now, size_bytes)?)?;
        let bytes = now.saturating_add(more);
        let most = record.ledger.layout.size_bytes() / FILES_SPACE_FACTOR_MIN;
        if bytes > most {
            return Err(Fault::bad(
                format!("the file system {name} was made for no more than {most} bytes"),
                "make a larger file system and copy the files",
            ));
        }
        let provisioned = book.provisioned();
        for place in places(&record.ledger.layout.segments) {
            let Some(brick) = book.bricks.get(&place.brick) else {
                continue;
            };
            let most = brick.record.capacity_bytes;
            let most = most.saturating_mul(self.settings.overprovision_factor);
            let promised = provisioned.get(&place.brick).map_or(0, |sum| sum.0);
            let room = most.saturating_sub(promised);
            if room < more {
                return Err(PlaceError::NoRoomOn {
                    brick: place.brick,
                    bytes: more,
                    room_bytes: room,
                }
                .into());
            }
        }
        record.files_bytes = Some(bytes);
        self.replace(book, &record)?;
        Ok(sized(self.detail(book, &record), size_bytes, bytes))
    }
}

/// Files need one column, and fewer bytes than their volume has addresses for.
pub(crate) fn check_files(shape: Shape, bytes: u64) -> Result<u64, Fault> {
    if shape.columns != 1 {
        return Err(Fault::bad(
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

/// Gives files their addresses, where one brick has room for all they may take.
pub(crate) fn make_thin(placement: &mut Placement, bytes: u64) -> Result<(), Fault> {
    match placement.segments.as_mut_slice() {
        [segment] => {
            segment.bytes = files_space_bytes(bytes);
            Ok(())
        }
        segments => {
            let largest = segments.iter().map(|segment| segment.bytes).max();
            let largest_bytes = largest.unwrap_or(0);
            Err(PlaceError::NoRoom {
                bytes,
                largest_bytes,
            }
            .into())
        }
    }
}
