//! The headers of further devices, which an opening numbers.
//!
//! Invariants: a superblock has the number of an opening only after every header has it. One of the two copies of a header
//! is sound at any time.

use super::error::PoolError;
use crate::defect::{self, Defect};
use crate::format::devices::{Device, DeviceAge, DeviceIdentity, DeviceState};
use crate::format::superblock::Superblock;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{MapError, Media};

/// Refuses a device that is missing, or an old copy. A failed one is not looked at.
pub(super) fn check<M: Media>(media: &M, block: &Superblock) -> Result<(), PoolError> {
    for device in present(block) {
        let id = device.id;
        let identity = identity_of(media, device);
        let identity = identity.filter(|it| (it.pool, it.device) == (block.pool, id));
        let identity = identity.ok_or(PoolError::NoDeviceHeader(id))?;
        let (found, wanted) = (identity.opening.0, block.incarnation.0);
        match identity.age(block.incarnation) {
            DeviceAge::Current => {}
            DeviceAge::Stale => {
                return Err(PoolError::StaleDevice {
                    device: id,
                    found,
                    wanted,
                });
            }
            DeviceAge::Newer => {
                return Err(PoolError::StaleFirstDevice {
                    device: id,
                    found,
                    wanted,
                });
            }
        }
    }
    Ok(())
}

fn present(block: &Superblock) -> impl Iterator<Item = &Device> {
    let devices = block.geometry.devices.iter();
    devices.filter(|it| it.state != DeviceState::Failed)
}

fn identity_of<M: Media>(media: &M, device: &Device) -> Option<DeviceIdentity> {
    let [one, other] = &copies_of(media, device);
    DeviceIdentity::of_copies([one, other])
}

/// Both copies of a header. One that cannot be read has the bytes of a pattern.
fn copies_of<M: Media>(media: &M, device: &Device) -> [[u8; PAGE_BYTES]; 2] {
    places_of(device).map(|at| {
        let mut page = [0; PAGE_BYTES];
        media.read(at, &mut page);
        page
    })
}

/// The places of both copies, the one to write first at the front: a damaged one, so that the sound one stays meanwhile.
fn places_to_write<M: Media>(media: &M, device: &Device) -> [usize; 2] {
    let [one, other] = places_of(device);
    let [_, second] = copies_of(media, device);
    match Device::identify(&second) {
        Some(_) => [one, other],
        None => [other, one],
    }
}

/// Writes the number of an opening to all headers: first to one copy of each, then to the other. A write of a copy that
/// cannot be read lets the device replace the sector.
pub(super) fn write<M: Media>(media: &M, block: &Superblock) -> Result<(), MapError> {
    let places = present(block).map(|device| (device, places_to_write(media, device)));
    let places: Vec<_> = places.collect();
    if places.is_empty() {
        return Ok(());
    }
    for copy in 0..2 {
        let mut all = None;
        for (device, places) in &places {
            let header = device.header(block.pool, block.incarnation);
            let (_, stores) = M::stream_page(&[(media, places[copy])], &header);
            all = Some(stores.after(all.take()));
        }
        if copy == 0 && defect::is(Defect::DeviceHeadersTogether) {
            continue;
        }
        if let Some(stores) = all {
            let _fenced = media.fence(stores);
        }
        media.sync()?;
    }
    Ok(())
}

/// The bytes of a device's header and its copy in the pool.
fn places_of(device: &Device) -> [usize; 2] {
    let first = device.bytes().start;
    [first, first + PAGE_BYTES]
}
