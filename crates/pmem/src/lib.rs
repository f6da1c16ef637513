//! Media of pools: mapped persistent memory, the only code that flushes and fences, and disks.
//!
//! Invariants:
//! - Every store to persistent bytes goes through [`Media`], so that
//!   [`Recorder`] can stand in for [`MappedMedia`] and enumerate crash states.
//! - Ordering is a type: stores that may not be persistent yet are an [`UnfencedStores`], and only
//!   [`Media::fence`] turns it into a [`FenceProof`].
//! - Every offset is checked against the length before it is used.
//!
//! This crate never allocates frames and does not depend on a format. It blocks in [`Media::sync`], and where a
//! page of a [`DiskMedia`] must be read or has no room.

mod async_io;
pub mod copy;
pub mod cpu;
mod disk;
mod disk_figures;
mod durability;
mod joined_media;
mod map_error;
mod mapped_media;
mod media;
mod read_mapping;
mod recorder;
mod shared_segment;
#[cfg(feature = "test-api")]
pub mod test_api;
mod tiered_media;
pub mod unreadable;

pub use async_io::AsyncIo;
#[cfg(feature = "test-api")]
pub use disk::{DeviceEnd, SimulatedCounts, SimulatedDevice, SimulatedFault};
#[cfg(feature = "test-api")]
pub use disk::{DeviceEvent, DeviceFault, DeviceLog, DevicePlan, PlannedRequest};
pub use disk::{
    DeviceFacts, Disk, DiskMedia, DiskOptions, HandOver, REQUEST_LIMIT, RequestLimits, SoundDevice,
    WriteCache, io_uring_refusal,
};
pub use disk_figures::{DiskFigures, ResidentCheck};
pub use durability::{Durability, StatedClass, UnknownDurability};
pub use joined_media::JoinedMedia;
pub use map_error::MapError;
pub use mapped_media::MappedMedia;
pub use media::{FenceProof, Media, NewDevice, UnfencedStores};
pub use read_mapping::ReadMapping;
pub use recorder::{CrashImages, CrashPoint, Image, Recorder};
pub use shared_segment::SharedSegment;
pub use tiered_media::TieredMedia;
