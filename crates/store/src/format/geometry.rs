//! The layout of a pool: the regions of its first device, and its further devices.
//!
//! The superblock names each region. [`Geometry::plan`] chooses those of a new pool by its size; a later program may
//! choose others, and opens this one's pools all the same.

use crate::format::devices::{
    BadDevice, Device, DeviceKind, DeviceState, DeviceTable, FrameNumbers,
};
pub use crate::format::regions::{FRAME_ENTRY_BYTES, POOL_BYTES_MAX, Region};
use crate::format::regions::{LINE_FRAMES, PAGE};
use pagemesh_base::ids::{FrameNo, ObjectId};
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::Media;
use std::ops::Range;
use uuid::Uuid;

/// The smallest pool: below it, journals and tables would take a tenth of it.
pub const POOL_BYTES_MIN: u64 = 2 << 20;
/// Most journals of a pool.
pub const JOURNALS_MAX: u32 = 4096;
/// Journals with heads in the page of the superblock. The heads of the others lie behind it.
pub(crate) const PAGE_HEADS: u32 = 256;
/// Bytes of an entry of the object table.
pub const OBJECT_BYTES: u64 = 256;

/// Bytes of an entry of the in-flight table.
pub const IN_FLIGHT_BYTES: u64 = 32;

const JOURNALS_MIN: u32 = 4;
/// The smallest journals take at most one part in so many of a pool.
const JOURNALS_SHARE: u64 = 8;
/// Journals for each gigabyte of a pool of a gigabyte and more. The number is rounded up to a power
/// of two.
const JOURNALS_PER_GIGABYTE: u32 = 16;
/// Fewest journals of such a pool, since bricks serve many clients, and most of a smaller one, which
/// has one for each 4 MiB.
const GIGABYTE_JOURNALS_MIN: u32 = 64;
/// The number from which on a pool has fewer journals for each gigabyte, so that they take at most 1 % of it.
const SCALED_JOURNALS: u32 = 256;
const LARGE_JOURNALS_PER_GIGABYTE: u32 = 4;
/// A journal holds the records of one checkpoint interval of one session. Its 32 768 lines delay
/// the reuse of at most 128 MiB of freed frames.
const JOURNAL_BYTES_MAX: u64 = 2 << 20;
const OBJECTS_MIN: u64 = 128;
const OBJECTS_MAX: u64 = 1 << 20;
/// Entries of the in-flight table: the operations that dead sessions leave until the next attach.
/// An overflow costs a comparison of the whole slice.
const IN_FLIGHT_MIN: u64 = 128;
const IN_FLIGHT_MAX: u64 = 1 << 16;

/// The layout of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size of the first device, whole pages.
    pub pool_bytes: u64,
    /// The number of journals.
    pub journals: u32,
    /// Bytes of each journal.
    pub journal_bytes: u64,
    /// The journals, one after the other.
    pub journal_region: Region,
    /// A bit per frame, set if the frame was in use at the last checkpoint, and a checksum per
    /// line.
    pub bitmap: Region,
    /// The frame table.
    pub frame_table: Region,
    /// The object table.
    pub objects: Region,
    /// The in-flight table.
    pub in_flight: Region,
    /// Frames of the first device that hold data and page-table nodes. A frame has the number of its page in the
    /// pool.
    pub frames: Region,
    /// Heads of journals that have no room in the page of the superblock: two copies.
    pub heads: Region,
    /// The further devices.
    pub devices: DeviceTable,
}

/// Regions in the superblock, by their first pages. The frames are the last and end with the device.
pub(crate) const REGIONS: usize = 7;

/// The frames of one device, with their part of the bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceFrames {
    /// The device's place in the superblock. The first device has place 0.
    pub(crate) place: usize,
    /// The number of the device's first page.
    pub(crate) first_page: u64,
    pub(crate) frames: Range<u64>,
    pub(crate) bitmap: Region,
    /// The device has failed, and its part of the bitmap is lost.
    pub(crate) is_failed: bool,
}

impl DeviceFrames {
    /// The lines of the bitmap with these frames. The device's first page is the first of a line.
    pub(crate) fn lines(&self) -> Range<u64> {
        self.first_page / LINE_FRAMES..self.frames.end.div_ceil(LINE_FRAMES)
    }

    /// The byte of a line of the bitmap.
    pub(crate) fn line_at(&self, line: u64) -> usize {
        let number = line - self.first_page / LINE_FRAMES;
        (self.bitmap.start + number * LINE_BYTES as u64) as usize
    }
}

/// Why a pool cannot have this size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadSize {
    /// Not whole pages.
    #[error("{0} bytes are not whole pages; use a multiple of 4096")]
    Unaligned(u64),
    /// Too little room for journals and tables.
    #[error("{0} bytes are too small for a pool; use at least 2M")]
    TooSmall(u64),
    /// No such number of sessions, or journals for them would take too much.
    #[error(
        "a pool of this size cannot serve {0} sessions; a pool serves 3 to 4095, and needs 32K for each"
    )]
    Sessions(u32),
    /// More than a pool can address.
    #[error("{0} bytes are too large for a pool; use at most 64T, and several pools")]
    TooLarge(u64),
}

impl Geometry {
    /// The layout of a pool of `pool_bytes`.
    ///
    /// # Errors
    /// When the size is not whole pages, too small or too large.
    pub fn plan(pool_bytes: u64) -> Result<Geometry, BadSize> {
        Geometry::plan_with(pool_bytes, None)
    }

    /// The layout of a pool with this number of journals, if one is given.
    ///
    /// # Errors
    /// As [`Geometry::plan`], and when the pool is too small for the journals.
    pub fn plan_with(pool_bytes: u64, journals: Option<u32>) -> Result<Geometry, BadSize> {
        // The size limit comes first: rounding does not help a pool that is too large.
        if pool_bytes > POOL_BYTES_MAX {
            return Err(BadSize::TooLarge(pool_bytes));
        }
        if !pool_bytes.is_multiple_of(PAGE) {
            return Err(BadSize::Unaligned(pool_bytes));
        }
        if pool_bytes < POOL_BYTES_MIN {
            return Err(BadSize::TooSmall(pool_bytes));
        }
        let frames = pool_bytes / PAGE;
        let journals = journals.unwrap_or_else(|| planned_journals(pool_bytes));
        let least_bytes = u64::from(journals) * PAGE;
        if !(JOURNALS_MIN..=JOURNALS_MAX).contains(&journals)
            || least_bytes > pool_bytes / JOURNALS_SHARE
        {
            return Err(BadSize::Sessions(journals.saturating_sub(1)));
        }
        let journal_bytes = (pool_bytes / 64 / u64::from(journals))
            .clamp(PAGE, JOURNAL_BYTES_MAX)
            .next_multiple_of(PAGE);
        let objects = (frames / 64).clamp(OBJECTS_MIN, OBJECTS_MAX);
        let in_flight = (frames / 64).clamp(IN_FLIGHT_MIN, IN_FLIGHT_MAX);
        let sizes = [
            2 * heads_copy_bytes(journals),
            u64::from(journals) * journal_bytes,
            frames.div_ceil(LINE_FRAMES) * LINE_BYTES as u64,
            frames * FRAME_ENTRY_BYTES,
            objects * OBJECT_BYTES,
            in_flight * IN_FLIGHT_BYTES,
        ];
        let mut starts = [2; REGIONS];
        for (number, bytes) in sizes.into_iter().enumerate() {
            starts[number + 1] = starts[number] + bytes.div_ceil(PAGE);
        }
        let planned = Geometry::from_regions(pool_bytes, (journals, journal_bytes), starts);
        Ok(planned.expect("a plan keeps the rules of geometries"))
    }

    /// The layout with these first pages of the regions, in their order on the device.
    ///
    /// # Errors
    /// The rule that they break.
    pub(crate) fn from_regions(
        pool_bytes: u64,
        (journals, journal_bytes): (u32, u64),
        starts: [u64; REGIONS],
    ) -> Result<Geometry, &'static str> {
        let pages = pool_bytes / PAGE;
        let are_ordered = starts.is_sorted() && starts[0] >= 2 && starts[REGIONS - 1] < pages;
        if !pool_bytes.is_multiple_of(PAGE) || pool_bytes > POOL_BYTES_MAX || !are_ordered {
            return Err("its regions do not lie in it");
        }
        let region = |number: usize| {
            let end = starts.get(number + 1).copied().unwrap_or(pages);
            Region {
                start: starts[number] * PAGE,
                len: (end - starts[number]) * PAGE,
            }
        };
        let [
            heads,
            journal_region,
            bitmap,
            frame_table,
            objects,
            in_flight,
            frames,
        ] = std::array::from_fn(region);
        let journals_fit = (JOURNALS_MIN..=JOURNALS_MAX).contains(&journals)
            && (PAGE..=JOURNAL_BYTES_MAX).contains(&journal_bytes)
            && journal_bytes.is_multiple_of(PAGE)
            && journal_region.len >= u64::from(journals) * journal_bytes
            && heads.len >= 2 * heads_copy_bytes(journals);
        let tables_fit = bitmap.len >= pages.div_ceil(LINE_FRAMES) * LINE_BYTES as u64
            && frame_table.len >= pages * FRAME_ENTRY_BYTES
            && (OBJECTS_MIN..=OBJECTS_MAX).contains(&(objects.len / OBJECT_BYTES))
            && (IN_FLIGHT_MIN..=IN_FLIGHT_MAX).contains(&(in_flight.len / IN_FLIGHT_BYTES));
        if !journals_fit || !tables_fit {
            return Err("its journals or tables do not fit their regions");
        }
        Ok(Geometry {
            pool_bytes,
            journals,
            journal_bytes,
            journal_region,
            bitmap,
            frame_table,
            objects,
            in_flight,
            frames,
            heads,
            devices: DeviceTable::default(),
        })
    }

    /// The first pages of the regions.
    pub(crate) fn region_starts(&self) -> [u64; REGIONS] {
        let regions = [
            self.heads,
            self.journal_region,
            self.bitmap,
            self.frame_table,
            self.objects,
            self.in_flight,
            self.frames,
        ];
        regions.map(|region| region.start / PAGE)
    }

    /// Adds a device of `bytes`, rounded down to whole pages.
    ///
    /// # Errors
    /// When it is too small, or the pool would have too many or be too large.
    pub fn add_device(
        &mut self,
        id: Uuid,
        bytes: u64,
        kind: DeviceKind,
    ) -> Result<Device, BadDevice> {
        let kind = match self.devices.flash_start() {
            // Frames behind those of flash are flash.
            Some(_) => DeviceKind::Flash,
            None => kind,
        };
        self.devices.add(id, bytes, kind, self.pool_bytes / PAGE)
    }

    /// The number from which on frames are on flash, behind a first device in memory. None without flash.
    #[must_use]
    pub fn flash_start(&self) -> Option<u64> {
        self.devices.flash_start()
    }

    /// Whether a frame is on flash.
    #[inline]
    #[must_use]
    pub fn is_on_flash(&self, frame: FrameNo) -> bool {
        frame.0 * PAGE >= self.pool_bytes && self.is_on_flash_device(frame)
    }

    #[cold]
    fn is_on_flash_device(&self, frame: FrameNo) -> bool {
        let device = self.devices.device_of(frame.0);
        device.is_some_and(|device| device.kind == DeviceKind::Flash)
    }

    /// The byte behind the last device.
    #[must_use]
    pub fn end_bytes(&self) -> u64 {
        let ends = self.devices.iter().map(|device| device.end_page() * PAGE);
        ends.fold(self.pool_bytes, u64::max)
    }

    /// Bytes of all frames.
    #[must_use]
    pub fn frame_bytes(&self) -> u64 {
        let counts = self.frame_numbers().ranges().map(|it| it.end - it.start);
        counts.sum::<u64>() * PAGE
    }

    /// Bytes of the frames that can be granted: those of no draining device.
    #[must_use]
    pub fn granted_bytes(&self) -> u64 {
        let draining = self
            .devices
            .iter()
            .filter(|it| it.state != DeviceState::Active);
        let counts = draining.map(|it| it.frames().end - it.frames().start);
        self.frame_bytes() - counts.sum::<u64>() * PAGE
    }

    /// Numbers of the frames that hold data and nodes.
    #[must_use]
    pub fn frame_numbers(&self) -> FrameNumbers<'_> {
        FrameNumbers::new(&self.first_frames(), &self.devices)
    }

    /// Numbers of the first device's frames.
    #[must_use]
    pub fn first_frames(&self) -> Range<u64> {
        self.frames.start / PAGE..self.frames.end() / PAGE
    }

    /// The frames of each device, with their part of the bitmap.
    pub(crate) fn device_frames(&self) -> impl Iterator<Item = DeviceFrames> {
        let first = DeviceFrames {
            place: 0,
            first_page: 0,
            frames: self.first_frames(),
            bitmap: self.bitmap,
            is_failed: false,
        };
        let others = self.devices.placed().map(|(place, device)| DeviceFrames {
            place: place + 1,
            first_page: device.first_page,
            frames: device.frames(),
            bitmap: device.bitmap(),
            is_failed: device.state == DeviceState::Failed,
        });
        std::iter::once(first).chain(others)
    }

    /// Lines of the bitmap, by number. Those of no device have no place.
    pub(crate) fn bitmap_lines(&self) -> u64 {
        let ends = self.device_frames().map(|it| it.lines().end);
        ends.max().unwrap_or(0)
    }

    /// The byte of a line of the bitmap. None if no device has it, or the device has failed.
    pub(crate) fn bitmap_line_at(&self, line: u64) -> Option<usize> {
        let mut devices = self.device_frames();
        let with_line = devices.find(|it| it.lines().contains(&line));
        with_line
            .filter(|it| !it.is_failed)
            .map(|it| it.line_at(line))
    }

    /// The byte of a frame's word in its frame table. A frame of no device has the first word, which belongs to no
    /// frame: a caller that has not checked the frame may only look at it.
    #[inline]
    #[must_use]
    pub fn frame_entry_at(&self, frame: FrameNo) -> usize {
        match frame.0 * PAGE < self.pool_bytes {
            true => (self.frame_table.start + frame.0 * FRAME_ENTRY_BYTES) as usize,
            false => self.entry_on_other(frame),
        }
    }

    #[cold]
    fn entry_on_other(&self, frame: FrameNo) -> usize {
        let Some(device) = self.devices.device_of(frame.0) else {
            return self.frame_table.start as usize;
        };
        let within = frame.0 - device.first_page;
        (device.frame_table().start + within * FRAME_ENTRY_BYTES) as usize
    }

    /// The byte of a copy of the heads behind the superblock.
    pub(crate) fn heads_at(&self, copy: u64) -> usize {
        (self.heads.start + copy * heads_copy_bytes(self.journals)) as usize
    }

    /// Entries of the object table.
    #[must_use]
    pub fn object_count(&self) -> u32 {
        (self.objects.len / OBJECT_BYTES) as u32
    }

    /// The byte of the pool where an object's entry starts.
    #[must_use]
    pub fn object_at(&self, object: ObjectId) -> usize {
        (self.objects.start + u64::from(object.0) * OBJECT_BYTES) as usize
    }

    /// The byte where a journal starts.
    #[must_use]
    pub fn journal_at(&self, journal: u32) -> usize {
        assert!(
            journal < self.journals,
            "journal {journal} of {}",
            self.journals
        );
        (self.journal_region.start + u64::from(journal) * self.journal_bytes) as usize
    }

    /// Lines of a journal.
    #[must_use]
    pub fn journal_lines(&self) -> u64 {
        self.journal_bytes / LINE_BYTES as u64
    }
}

/// Journals of a new pool.
fn planned_journals(pool_bytes: u64) -> u32 {
    let gigabytes = (pool_bytes >> 30) as u32;
    let planned = match gigabytes {
        0 => ((pool_bytes >> 22) as u32).clamp(JOURNALS_MIN, GIGABYTE_JOURNALS_MIN),
        _ => {
            let scaled = gigabytes.saturating_mul(JOURNALS_PER_GIGABYTE);
            let large = gigabytes.saturating_mul(LARGE_JOURNALS_PER_GIGABYTE);
            let scaled = scaled.clamp(GIGABYTE_JOURNALS_MIN, SCALED_JOURNALS);
            scaled.max(large).min(JOURNALS_MAX)
        }
    };
    planned.next_power_of_two()
}

/// Bytes of one copy of the heads that have no room in the page of the superblock.
fn heads_copy_bytes(journals: u32) -> u64 {
    (u64::from(journals.saturating_sub(PAGE_HEADS)) * 8).next_multiple_of(PAGE)
}

/// The byte where a frame starts.
pub(crate) fn frame_at(frame: FrameNo) -> usize {
    frame.0 as usize * PAGE_BYTES
}

/// Lets frames be unreadable: everything in a frame has a checksum. Zeroes in place of the regions
/// before the frames would be mistaken for other content: an end of the journal, a free frame.
pub(crate) fn tolerate_unreadable_frames<M: Media>(media: &M, geometry: &Geometry) {
    media.tolerate_unreadable(geometry.frames.start as usize);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::object::HEIGHT;
    use proptest::prelude::*;

    #[test]
    fn invalid_pool_sizes_are_refused() {
        use BadSize::*;
        assert_eq!(Geometry::plan(0), Err(TooSmall(0)));
        assert_eq!(
            Geometry::plan(POOL_BYTES_MIN + 1),
            Err(Unaligned(POOL_BYTES_MIN + 1))
        );
        assert_eq!(
            Geometry::plan(POOL_BYTES_MAX + PAGE),
            Err(TooLarge(POOL_BYTES_MAX + PAGE))
        );
        assert_eq!(Geometry::plan(u64::MAX), Err(TooLarge(u64::MAX)));
        assert!(Geometry::plan(POOL_BYTES_MAX).is_ok());
    }

    /// Bytes of the tables for the pages of one object that fills the pool.
    fn tables_bytes(plan: &Geometry) -> u64 {
        let mut nodes = 0;
        let mut slots = plan.frames.len / PAGE;
        for _level in 1..=HEIGHT {
            slots = slots.div_ceil(512);
            nodes += slots * PAGE;
        }
        plan.bitmap.len + plan.frame_table.len + nodes
    }

    fn check_tables(pool_bytes: u64) -> Result<(), TestCaseError> {
        let plan = Geometry::plan(pool_bytes).expect("a plan");
        let tables = tables_bytes(&plan);
        prop_assert!(
            u128::from(tables) * 1000 <= u128::from(pool_bytes) * 6,
            "{tables} of {pool_bytes}"
        );
        Ok(())
    }

    #[test]
    fn tables_of_the_smallest_and_largest_pools() {
        for pool_bytes in [
            16 << 20,
            64 << 20,
            1 << 30,
            64 << 30,
            1 << 40,
            POOL_BYTES_MAX,
        ] {
            check_tables(pool_bytes).expect("0.6 %");
        }
        assert!(
            check_tables((8 << 20) + PAGE).is_err(),
            "too small for the promise"
        );
    }

    proptest! {
        #[test]
        fn regions_follow_each_other_and_fill_the_pool(shift in 21u32..46, odd in 0u64..1 << 24) {
            let pool_bytes = ((1u64 << shift) + odd * PAGE).min(POOL_BYTES_MAX);
            let plan = Geometry::plan(pool_bytes).expect("a plan");
            let regions = [plan.heads, plan.journal_region, plan.bitmap, plan.frame_table, plan.objects, plan.in_flight, plan.frames];
            let mut end = 2 * PAGE;
            for region in regions {
                prop_assert_eq!(region.start, end);
                prop_assert!(region.len > 0 || region == plan.heads);
                prop_assert!(region.len.is_multiple_of(PAGE));
                end = region.end();
            }
            prop_assert_eq!(end, pool_bytes);
            prop_assert!(plan.journals <= JOURNALS_MAX);
        }

        /// The promise: page tables, frame table and bitmap take at most 0.6 % of a pool of 16 MiB
        /// or more that one object fills. They take 0.41 to 0.43 % of a large pool. In a small pool
        /// the share is higher, because every object has three nodes above the leaves and tables
        /// are rounded to whole pages. At 8 MiB and a page it is 0.63 %.
        #[test]
        fn tables_take_at_most_0_6_percent(shift in 24u32..=46, part in 0u64..1 << 20) {
            let pool_bytes = (1u64 << shift) + ((1u64 << shift) >> 20) * part;
            let pool_bytes = (pool_bytes / PAGE * PAGE).min(POOL_BYTES_MAX);
            check_tables(pool_bytes)?;
        }
    }
}
