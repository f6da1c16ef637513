//! The devices of a pool: ranges of its page numbers, each with a bitmap and a frame table of its own.
//!
//! The first device begins at page 0 and also has the superblocks, the journals and the tables of objects and
//! operations. Every further device has, from its first page on:
//!
//! ```text
//! page 0, 1  header and its copy: the pool, the device, its place in the pool, the number of the opening
//!            bitmap        64 bytes per 448 pages
//!            frame table   8 bytes per page
//!            frames
//! ```
//!
//! A page's number never changes, so a slot names a frame on any device by its number alone. The superblock lists the
//! devices; a header only identifies a device that was found.
//!
//! The number of the opening tells a device from an old copy of it. An opening writes the next number to both copies of
//! each header, one after the other, and then to both superblocks. So a header has the number of the superblock, or the
//! next one after a crash between the two.

use crate::format::regions::{FRAME_ENTRY_BYTES, LINE_FRAMES, PAGE, PAGES_MAX, Region, VERSION};
use pagemesh_base::bytes::{field, get_u32, get_u64, put};
use pagemesh_base::checksum::crc32c_append;
use pagemesh_base::ids::{FrameNo, Incarnation};
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use std::ops::Range;
use uuid::Uuid;

/// Devices of a pool, with the first.
pub const DEVICES_MAX: usize = 16;
/// The smallest further device.
pub const DEVICE_BYTES_MIN: u64 = 2 << 20;
/// Bytes of a device's entry in the superblock.
pub(crate) const DEVICE_ENTRY_BYTES: usize = 64;
const MAGIC: [u8; 8] = *b"pagemdev";
const HEADER_PAGES: u64 = 2;
/// The place of the number of the opening in a header, behind the device's entry.
const OPENING_AT: usize = 32 + DEVICE_ENTRY_BYTES;

/// The use of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceState {
    /// Its frames are granted.
    Active,
    /// No frame of it is granted, and those in use are moved to other devices.
    Draining,
    /// It is not used any more. No frame of it is granted, and those in use cannot be read.
    Failed,
}

/// The kind of a further device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// Its stores become durable as those of the first device do, and its frames are granted to any session.
    LikeFirst,
    /// A disk behind a first device in memory. Its stores become durable at a sync, and its frames get pages that the
    /// tier demotes.
    Flash,
}

/// A further device of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// The device's identity.
    pub id: Uuid,
    /// The number of its first page, a multiple of the frames of a line of the bitmap.
    pub first_page: u64,
    /// Its pages.
    pub pages: u64,
    /// Pages before its bitmap, its frame table and its frames.
    starts: [u32; 3],
    /// Its use.
    pub state: DeviceState,
    /// Its kind.
    pub kind: DeviceKind,
}

/// Why a device cannot join a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadDevice {
    /// Too small for its tables.
    #[error("{0} bytes are too small for a device of a pool; use at least 2M")]
    TooSmall(u64),
    /// The pool has no number left.
    #[error("a pool has at most {DEVICES_MAX} devices; drain one first")]
    TooMany,
    /// The pool would be too large.
    #[error("with {0} bytes more the pool would be larger than 64T; use several pools")]
    TooLarge(u64),
}

impl Device {
    /// The plan of a device of `bytes` at a page number.
    fn plan(id: Uuid, first_page: u64, bytes: u64, kind: DeviceKind) -> Device {
        let pages = bytes / PAGE;
        let in_pages = |bytes: u64| bytes.div_ceil(PAGE);
        let bitmap = HEADER_PAGES;
        let table = bitmap + in_pages(pages.div_ceil(LINE_FRAMES) * LINE_BYTES as u64);
        let frames = table + in_pages(pages * FRAME_ENTRY_BYTES);
        Device {
            id,
            first_page,
            pages,
            starts: [bitmap, table, frames].map(|start| start as u32),
            state: DeviceState::Active,
            kind,
        }
    }

    /// The number behind its last page.
    #[must_use]
    pub fn end_page(&self) -> u64 {
        self.first_page + self.pages
    }

    /// Its bytes in the pool.
    #[must_use]
    pub fn bytes(&self) -> Range<usize> {
        self.first_page as usize * PAGE_BYTES..self.end_page() as usize * PAGE_BYTES
    }

    /// Bytes before its frames: header, bitmap and frame table.
    #[must_use]
    pub fn head_len(&self) -> usize {
        self.starts[2] as usize * PAGE_BYTES
    }

    /// The bytes of its frame table, from the device's start on.
    #[must_use]
    pub fn frame_table_bytes(&self) -> Range<usize> {
        let [_, table, frames] = self.starts.map(|start| start as usize * PAGE_BYTES);
        table..frames
    }

    /// Its frames' numbers.
    #[must_use]
    pub fn frames(&self) -> Range<u64> {
        self.first_page + u64::from(self.starts[2])..self.end_page()
    }

    /// The place of its bitmap in the pool.
    pub(crate) fn bitmap(&self) -> Region {
        self.region(0)
    }

    /// The place of its frame table in the pool.
    pub(crate) fn frame_table(&self) -> Region {
        self.region(1)
    }

    fn region(&self, number: usize) -> Region {
        let [start, end] = [number, number + 1].map(|at| u64::from(self.starts[at]));
        Region {
            start: (self.first_page + start) * PAGE,
            len: (end - start) * PAGE,
        }
    }

    /// Its entry in the superblock.
    fn encode(&self) -> [u8; DEVICE_ENTRY_BYTES] {
        let mut entry = [0; DEVICE_ENTRY_BYTES];
        put(&mut entry, 0, *self.id.as_bytes());
        put(&mut entry, 16, self.first_page.to_le_bytes());
        put(&mut entry, 24, self.pages.to_le_bytes());
        for (start, at) in self.starts.iter().zip([32, 36, 40]) {
            put(&mut entry, at, start.to_le_bytes());
        }
        let state = match self.state {
            DeviceState::Active => 1,
            DeviceState::Draining => 2,
            DeviceState::Failed => 3,
        };
        put(
            &mut entry,
            44,
            [state, u8::from(self.kind == DeviceKind::Flash)],
        );
        entry
    }

    /// Decodes an entry. An entry of zeroes is none.
    fn decode(entry: &[u8]) -> Result<Option<Device>, &'static str> {
        let state = match entry[44] {
            0 if entry.iter().all(|&byte| byte == 0) => return Ok(None),
            1 => DeviceState::Active,
            2 => DeviceState::Draining,
            3 => DeviceState::Failed,
            _ => return Err("a device has an unknown state"),
        };
        let kind = match entry[45] {
            0 => DeviceKind::LikeFirst,
            1 => DeviceKind::Flash,
            _ => return Err("a device has an unknown kind"),
        };
        let device = Device {
            id: Uuid::from_bytes(field(entry, 0)),
            first_page: get_u64(entry, 16),
            pages: get_u64(entry, 24),
            starts: [32, 36, 40].map(|at| get_u32(entry, at)),
            state,
            kind,
        };
        match device.is_sound() {
            true => Ok(Some(device)),
            false => Err("the regions of a device do not lie in it"),
        }
    }

    fn is_sound(&self) -> bool {
        let [bitmap, table, frames] = self.starts.map(u64::from);
        let lines = self.pages.div_ceil(LINE_FRAMES);
        let fits = |region: Region, needed: u64| region.len >= needed;
        self.pages <= PAGES_MAX
            && self.first_page <= PAGES_MAX
            && self.end_page() <= PAGES_MAX
            && self.first_page.is_multiple_of(LINE_FRAMES)
            && HEADER_PAGES <= bitmap
            && bitmap < table
            && table < frames
            && frames < self.pages
            && fits(self.bitmap(), lines * LINE_BYTES as u64)
            && fits(self.frame_table(), self.pages * FRAME_ENTRY_BYTES)
    }

    /// The header in its first two pages, with the number of the pool's opening.
    #[must_use]
    pub fn header(&self, pool: Uuid, opening: Incarnation) -> [u8; PAGE_BYTES] {
        let mut page = [0; PAGE_BYTES];
        put(&mut page, 0, MAGIC);
        put(&mut page, 8, VERSION.to_le_bytes());
        put(&mut page, 16, *pool.as_bytes());
        put(&mut page, 32, self.encode());
        put(&mut page, OPENING_AT, opening.0.to_le_bytes());
        let crc = header_checksum(&page);
        put(&mut page, 12, crc.to_le_bytes());
        page
    }

    /// The identity in a page of a device's header. None if the page is no sound header.
    #[must_use]
    pub fn identify(page: &[u8; PAGE_BYTES]) -> Option<DeviceIdentity> {
        let is_header = field(page, 0) == MAGIC && header_checksum(page) == get_u32(page, 12);
        is_header.then(|| {
            let [pool, device] = [16, 32].map(|at| Uuid::from_bytes(field(page, at)));
            let opening = Incarnation(get_u32(page, OPENING_AT));
            DeviceIdentity {
                pool,
                device,
                opening,
            }
        })
    }
}

/// The identity of a device, by its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceIdentity {
    /// The device's pool.
    pub pool: Uuid,
    /// The device.
    pub device: Uuid,
    /// The last opening of the pool that wrote the header.
    pub opening: Incarnation,
}

/// The age of a device beside the superblock that names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceAge {
    /// It was there at the pool's last opening.
    Current,
    /// It is an old copy of the device.
    Stale,
    /// The superblock is of an old copy of the first device.
    Newer,
}

impl DeviceIdentity {
    /// The identity in both copies of a header. A crash may have left an older number in one of them.
    #[must_use]
    pub fn of_copies(copies: [&[u8; PAGE_BYTES]; 2]) -> Option<DeviceIdentity> {
        match copies.map(Device::identify) {
            [Some(one), Some(other)] if (one.pool, one.device) == (other.pool, other.device) => {
                Some(match one.opening >= other.opening {
                    true => one,
                    false => other,
                })
            }
            [one, other] => one.or(other),
        }
    }

    /// The age of the device, by the opening in the pool's superblock.
    #[must_use]
    pub fn age(&self, superblock: Incarnation) -> DeviceAge {
        match self.opening.0.checked_sub(superblock.0) {
            None => DeviceAge::Stale,
            Some(0 | 1) => DeviceAge::Current,
            Some(_) => DeviceAge::Newer,
        }
    }
}

fn header_checksum(page: &[u8; PAGE_BYTES]) -> u32 {
    crc32c_append(crc32c_append(0, &page[..12]), &page[16..])
}

/// The further devices of a pool, in the places that they have in the superblock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceTable([Option<Device>; DEVICES_MAX - 1]);

/// A pool without further devices.
static NO_DEVICES: DeviceTable = DeviceTable([None; DEVICES_MAX - 1]);

impl DeviceTable {
    /// The devices.
    pub fn iter(&self) -> impl Iterator<Item = &Device> {
        self.0.iter().flatten()
    }

    /// The devices with their places, which are below [`DEVICES_MAX`] - 1.
    pub(crate) fn placed(&self) -> impl Iterator<Item = (usize, &Device)> {
        let places = self.0.iter().enumerate();
        places.filter_map(|(place, device)| Some((place, device.as_ref()?)))
    }

    /// The ids of the devices by their places. None for a place without one.
    pub(crate) fn ids(&self) -> impl Iterator<Item = Option<Uuid>> {
        self.0.iter().map(|entry| entry.map(|device| device.id))
    }

    /// Whether the pool has a device.
    pub(crate) fn has(&self, id: Uuid) -> bool {
        self.iter().any(|device| device.id == id)
    }

    /// Adds a device of `bytes` behind all others. `first_end` is the end of the first device, in pages.
    ///
    /// # Errors
    /// When the device is too small, or the pool would have too many or be too large.
    pub(crate) fn add(
        &mut self,
        id: Uuid,
        bytes: u64,
        kind: DeviceKind,
        first_end: u64,
    ) -> Result<Device, BadDevice> {
        if bytes < DEVICE_BYTES_MIN {
            return Err(BadDevice::TooSmall(bytes));
        }
        let free = self.0.iter_mut().position(|entry| entry.is_none());
        let free = free.ok_or(BadDevice::TooMany)?;
        let ends = self.iter().map(Device::end_page);
        let end = ends.fold(first_end, u64::max);
        let first_page = end.next_multiple_of(LINE_FRAMES);
        let in_use: u64 = self.iter().map(|device| device.pages).sum();
        if first_end + in_use + bytes / PAGE > PAGES_MAX || first_page + bytes / PAGE > PAGES_MAX {
            return Err(BadDevice::TooLarge(bytes));
        }
        let device = Device::plan(id, first_page, bytes, kind);
        self.0[free] = Some(device);
        Ok(device)
    }

    /// Replaces the entry of a device, or removes it.
    ///
    /// # Panics
    /// When the pool has no such device.
    pub(crate) fn put(&mut self, id: Uuid, entry: Option<Device>) {
        let is_it = |found: &&mut Option<Device>| found.is_some_and(|device| device.id == id);
        let found = self.0.iter_mut().find(is_it);
        *found.expect("the pool has the device") = entry;
    }

    /// The device with a page.
    #[must_use]
    pub fn device_of(&self, page: u64) -> Option<&Device> {
        let has = |device: &&Device| (device.first_page..device.end_page()).contains(&page);
        self.iter().find(has)
    }

    /// Names a device as failed. False if the pool has no such device, or it has failed before.
    pub(crate) fn fail(&mut self, id: Uuid) -> bool {
        let mut others = self.0.iter_mut().flatten();
        let found = others.find(|it| it.id == id && it.state != DeviceState::Failed);
        let is_new = found.is_some();
        if let Some(device) = found {
            device.state = DeviceState::Failed;
        }
        is_new
    }

    /// The devices that have failed.
    pub fn failed(&self) -> impl Iterator<Item = &Device> {
        self.iter().filter(|it| it.state == DeviceState::Failed)
    }

    /// The first page of all flash devices. No other device lies behind it. None without flash.
    pub(crate) fn flash_start(&self) -> Option<u64> {
        let flash = self.iter().filter(|it| it.kind == DeviceKind::Flash);
        flash.map(|it| it.first_page).min()
    }

    /// Writes the entries of a superblock.
    pub(crate) fn encode(&self, into: &mut [u8]) {
        for (entry, bytes) in self.0.iter().zip(into.as_chunks_mut().0) {
            *bytes = entry.map_or([0; DEVICE_ENTRY_BYTES], |device| device.encode());
        }
    }

    /// Reads the entries of a superblock.
    pub(crate) fn decode(bytes: &[u8], first_end: u64) -> Result<DeviceTable, &'static str> {
        let mut table = DeviceTable::default();
        let entries = bytes.as_chunks::<DEVICE_ENTRY_BYTES>().0;
        for (entry, bytes) in table.0.iter_mut().zip(entries) {
            *entry = Device::decode(bytes)?;
        }
        let mut ranges: Vec<_> = table
            .iter()
            .map(|it| (it.first_page, it.end_page()))
            .collect();
        ranges.push((0, first_end));
        ranges.sort_unstable();
        match ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0) {
            true => Ok(table),
            false => Err("two devices have the same pages"),
        }
    }
}

/// The numbers of the frames of a pool.
#[derive(Clone, Copy, Debug)]
pub struct FrameNumbers<'g> {
    first_device: (u64, u64),
    others: &'g DeviceTable,
}

impl<'g> FrameNumbers<'g> {
    pub(crate) fn new(first_device: &Range<u64>, others: &'g DeviceTable) -> FrameNumbers<'g> {
        FrameNumbers {
            first_device: (first_device.start, first_device.end),
            others,
        }
    }

    /// Whether the pool has this frame.
    #[inline]
    #[must_use]
    pub fn contains(&self, frame: FrameNo) -> bool {
        let (start, end) = self.first_device;
        match frame.0 < end {
            true => frame.0 >= start,
            false => self.is_on_other(frame),
        }
    }

    #[cold]
    fn is_on_other(&self, frame: FrameNo) -> bool {
        let device = self.others.device_of(frame.0);
        device.is_some_and(|device| device.frames().contains(&frame.0))
    }

    /// The frames of each device, in rising order of their places in the superblock.
    pub fn ranges(self) -> impl Iterator<Item = Range<u64>> + 'g {
        let (start, end) = self.first_device;
        std::iter::once(start..end).chain(self.others.iter().map(Device::frames))
    }
}

impl From<Range<u64>> for FrameNumbers<'_> {
    fn from(frames: Range<u64>) -> Self {
        FrameNumbers::new(&frames, &NO_DEVICES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FIRST_END: u64 = 1000;
    const KIND: DeviceKind = DeviceKind::Flash;

    fn table(sizes: &[u64]) -> DeviceTable {
        let mut table = DeviceTable::default();
        for (number, &pages) in (1..).zip(sizes) {
            let added = table.add(Uuid::from_u128(number), pages * PAGE, KIND, FIRST_END);
            added.expect("a device");
        }
        table
    }

    #[test]
    fn device_beyond_a_limit_is_refused() {
        let mut table = table(&[1 << 10; DEVICES_MAX - 2]);
        let id = Uuid::from_u128(99);
        let small = DEVICE_BYTES_MIN - 1;
        assert_eq!(
            table.add(id, small, KIND, FIRST_END),
            Err(BadDevice::TooSmall(small))
        );
        let large = 64 << 40;
        assert_eq!(
            table.add(id, large, KIND, FIRST_END),
            Err(BadDevice::TooLarge(large))
        );
        table
            .add(id, DEVICE_BYTES_MIN, KIND, FIRST_END)
            .expect("the last device");
        let more = table.add(Uuid::from_u128(100), DEVICE_BYTES_MIN, KIND, FIRST_END);
        assert_eq!(more, Err(BadDevice::TooMany));
    }

    #[test]
    fn header_identifies_pool_and_device() {
        let (pool, table) = (Uuid::from_u128(7), table(&[1 << 10]));
        let device = table.iter().next().expect("a device");
        let header = |opening| device.header(pool, Incarnation(opening));
        let identity = |opening| DeviceIdentity {
            pool,
            device: device.id,
            opening: Incarnation(opening),
        };
        let mut page = header(7);
        assert_eq!(Device::identify(&page), Some(identity(7)));
        page[100] ^= 1;
        assert_eq!(Device::identify(&page), None);
        assert_eq!(Device::identify(&[0; PAGE_BYTES]), None);
        for copies in [[8, 7], [7, 8]] {
            let [one, other] = copies.map(header);
            let found = DeviceIdentity::of_copies([&one, &other]);
            assert_eq!(found, Some(identity(8)));
        }
        let found = DeviceIdentity::of_copies([&page, &header(6)]);
        assert_eq!(found, Some(identity(6)));
    }

    #[test]
    fn only_present_and_next_opening_are_current() {
        let identity = DeviceIdentity {
            pool: Uuid::nil(),
            device: Uuid::nil(),
            opening: Incarnation(7),
        };
        let ages = [5, 6, 7, 8].map(|superblock| identity.age(Incarnation(superblock)));
        use DeviceAge::{Current, Newer, Stale};
        assert_eq!(ages, [Newer, Current, Current, Stale]);
    }

    #[test]
    fn devices_with_the_same_pages_are_refused() {
        let mut bytes = [0; DEVICE_ENTRY_BYTES * (DEVICES_MAX - 1)];
        table(&[1 << 10]).encode(&mut bytes);
        bytes.copy_within(..DEVICE_ENTRY_BYTES, DEVICE_ENTRY_BYTES);
        let decoded = DeviceTable::decode(&bytes, FIRST_END);
        assert_eq!(decoded, Err("two devices have the same pages"));
    }

    proptest! {
        #[test]
        fn table_of_devices_round_trips(
            sizes in prop::collection::vec(512u64..1 << 20, 0..DEVICES_MAX),
        ) {
            let table = table(&sizes);
            let mut bytes = [0; DEVICE_ENTRY_BYTES * (DEVICES_MAX - 1)];
            table.encode(&mut bytes);
            prop_assert_eq!(DeviceTable::decode(&bytes, FIRST_END), Ok(table));
            let mut end = FIRST_END;
            for device in table.iter() {
                prop_assert!(device.first_page >= end && device.is_sound());
                prop_assert!(device.frame_table().end() == device.frames().start * PAGE);
                end = device.end_page();
                prop_assert_eq!(table.device_of(end - 1), Some(device));
            }
            prop_assert_eq!(table.device_of(end), None);
            let numbers = FrameNumbers::new(&(10..FIRST_END), &table);
            for range in numbers.ranges() {
                prop_assert!(numbers.contains(FrameNo(range.start)));
                prop_assert!(numbers.contains(FrameNo(range.end - 1)));
                prop_assert!(!numbers.contains(FrameNo(range.start - 1)));
            }
        }
    }
}
