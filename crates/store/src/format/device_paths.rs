//! The last known path of each further device, in the superblock.
//!
//! A path is a hint: the header of a device identifies it. Paths that have no room are left out.

use crate::format::devices::{DEVICES_MAX, DeviceTable};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Bytes of all paths in the superblock, with two bytes of length for each.
pub(crate) const DEVICE_PATHS_BYTES: usize = 768;

/// The paths of further devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DevicePaths(BTreeMap<Uuid, PathBuf>);

impl DevicePaths {
    /// The last known path of a device.
    #[must_use]
    pub fn of(&self, device: Uuid) -> Option<&Path> {
        self.0.get(&device).map(PathBuf::as_path)
    }

    /// Sets the path of a device, and forgets those of devices that have left. False if there is no room for it.
    pub(crate) fn set(&mut self, device: Uuid, path: &Path, devices: &DeviceTable) -> bool {
        self.0.retain(|id, _| devices.has(*id));
        let before = self.0.insert(device, path.to_owned());
        let lengths = self.0.values().map(|path| path.as_os_str().len());
        let fits = fits(lengths.sum());
        if !fits {
            match before {
                Some(before) => self.0.insert(device, before),
                None => self.0.remove(&device),
            };
        }
        fits
    }

    /// Whether there is room for the path of one more device.
    pub(crate) fn has_room_for(&self, path: &Path, devices: &DeviceTable) -> bool {
        let others = self.0.iter().filter(|(id, _)| devices.has(**id));
        let lengths = others.map(|(_, path)| path.as_os_str().len());
        fits(lengths.sum::<usize>() + path.as_os_str().len())
    }

    /// Writes the paths in the order of the devices' places in the superblock.
    pub(crate) fn encode(&self, devices: &DeviceTable, into: &mut [u8]) {
        let mut rest = into;
        for (number, place) in devices.ids().enumerate() {
            let path = place.and_then(|id| self.0.get(&id));
            let path = path.map_or(&[][..], |path| path.as_os_str().as_bytes());
            let path = match has_room(path.len(), number, rest.len()) {
                true => path,
                false => &[],
            };
            let (entry, after) = rest.split_at_mut(2 + path.len());
            entry[..2].copy_from_slice(&(path.len() as u16).to_le_bytes());
            entry[2..].copy_from_slice(path);
            rest = after;
        }
    }

    /// Reads the paths. Those that have no room in `bytes` are left out: they are hints.
    pub(crate) fn decode(devices: &DeviceTable, bytes: &[u8]) -> DevicePaths {
        let mut paths = BTreeMap::new();
        let mut rest = bytes;
        for (number, place) in devices.ids().enumerate() {
            let len = usize::from(u16::from_le_bytes([rest[0], rest[1]]));
            if !has_room(len, number, rest.len()) {
                break;
            }
            let (entry, after) = rest.split_at(2 + len);
            rest = after;
            if let Some(id) = place.filter(|_| len > 0) {
                paths.insert(id, PathBuf::from(OsStr::from_bytes(&entry[2..])));
            }
        }
        DevicePaths(paths)
    }
}

/// Whether paths of so many bytes in all fit into the superblock.
fn fits(path_bytes: usize) -> bool {
    path_bytes + 2 * (DEVICES_MAX - 1) <= DEVICE_PATHS_BYTES
}

/// Whether the path of a place fits into the rest of the bytes, with the lengths of all later places.
fn has_room(len: usize, place: usize, rest: usize) -> bool {
    2 * (DEVICES_MAX - 1 - place) + len <= rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::devices::DeviceKind;

    #[test]
    fn paths_round_trip_and_long_ones_have_no_room() {
        let mut devices = DeviceTable::default();
        let ids = [1, 2, 3].map(Uuid::from_u128);
        for id in ids {
            devices
                .add(id, 4 << 20, DeviceKind::LikeFirst, 1000)
                .expect("a device");
        }
        devices.put(ids[1], None);
        let mut paths = DevicePaths::default();
        assert!(paths.set(ids[0], Path::new("/dev/disk/by-id/a"), &devices));
        assert!(paths.set(ids[2], Path::new("/srv/b"), &devices));
        let long = PathBuf::from(format!("/{}", "x".repeat(DEVICE_PATHS_BYTES)));
        assert!(!paths.set(ids[2], &long, &devices));
        let mut bytes = [0; DEVICE_PATHS_BYTES];
        paths.encode(&devices, &mut bytes);
        assert_eq!(DevicePaths::decode(&devices, &bytes), paths);
        // Bytes of another program are no reason to refuse the pool.
        let _ = DevicePaths::decode(&devices, &[0xff; DEVICE_PATHS_BYTES]);
        devices.put(ids[2], None);
        assert!(paths.set(ids[0], Path::new("/srv/c"), &devices));
        assert_eq!(
            (paths.of(ids[0]), paths.of(ids[2])),
            (Some(Path::new("/srv/c")), None)
        );
    }
}
