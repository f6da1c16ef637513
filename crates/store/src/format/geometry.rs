//! The layout of a pool: a function of its size alone.

use crate::format::bitmap::LINE_FRAMES;
use pagemesh_base::ids::{FrameNo, ObjectId};
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::Media;
use std::ops::Range;

const PAGE: u64 = PAGE_BYTES as u64;
/// The smallest pool: below it, journals and tables would take a tenth of it.
pub const POOL_BYTES_MIN: u64 = 2 << 20;
/// The largest pool. Slots could name four times as many frames.
pub const POOL_BYTES_MAX: u64 = 64 << 40;
/// Journals with heads that fit into a superblock.
pub const JOURNALS_MAX: u32 = 256;
/// Bytes of an entry of the object table.
pub const OBJECT_BYTES: u64 = 128;
/// Bytes of an entry of the frame table.
pub const FRAME_ENTRY_BYTES: u64 = 8;

/// Bytes of an entry of the in-flight table.
pub const IN_FLIGHT_BYTES: u64 = 32;

const JOURNALS_MIN: u32 = 4;
/// Journals for each gigabyte of a pool of a gigabyte and more. The number is rounded up to a power
/// of two.
const JOURNALS_PER_GIGABYTE: u32 = 16;
/// Fewest journals of such a pool, since bricks serve many clients, and most of a smaller one, which
/// has one for each 4 MiB.
const GIGABYTE_JOURNALS_MIN: u32 = 64;
/// A journal holds the records of one checkpoint interval of one session. Its 32 768 lines delay
/// the reuse of at most 128 MiB of freed frames.
const JOURNAL_BYTES_MAX: u64 = 2 << 20;
const OBJECTS_MIN: u64 = 128;
const OBJECTS_MAX: u64 = 1 << 20;
/// Entries of the in-flight table: the operations that dead sessions leave until the next attach.
/// An overflow costs a comparison of the whole slice.
const IN_FLIGHT_MIN: u64 = 128;
const IN_FLIGHT_MAX: u64 = 1 << 16;

/// A run of bytes of a pool, whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// First byte.
    pub start: u64,
    /// Bytes.
    pub len: u64,
}

impl Region {
    /// The byte after the last.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.start + self.len
    }
}

/// The layout of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size of the pool, whole pages.
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
    /// Frames that hold data and page-table nodes. A frame has the number of its page in the
    /// pool.
    pub frames: Region,
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
        let journals = match pool_bytes >> 30 {
            0 => ((pool_bytes >> 22) as u32).clamp(JOURNALS_MIN, GIGABYTE_JOURNALS_MIN),
            gigabytes => (gigabytes as u32)
                .saturating_mul(JOURNALS_PER_GIGABYTE)
                .clamp(GIGABYTE_JOURNALS_MIN, JOURNALS_MAX),
        }
        .next_power_of_two();
        let lane_bytes = (pool_bytes / 64 / u64::from(journals))
            .clamp(PAGE, JOURNAL_BYTES_MAX)
            .next_multiple_of(PAGE);
        let objects = (frames / 64).clamp(OBJECTS_MIN, OBJECTS_MAX);
        let in_flight = (frames / 64).clamp(IN_FLIGHT_MIN, IN_FLIGHT_MAX);
        let mut end = 2 * PAGE;
        let mut take = |bytes: u64| {
            let region = Region {
                start: end,
                len: bytes.next_multiple_of(PAGE),
            };
            end = region.end();
            region
        };
        let lane_region = take(u64::from(journals) * lane_bytes);
        let bitmap = take(frames.div_ceil(LINE_FRAMES) * LINE_BYTES as u64);
        let frame_table = take(frames * FRAME_ENTRY_BYTES);
        let objects = take(objects * OBJECT_BYTES);
        let in_flight = take(in_flight * IN_FLIGHT_BYTES);
        assert!(end < pool_bytes, "tables leave room for frames");
        let frames = Region {
            start: end,
            len: pool_bytes - end,
        };
        Ok(Geometry {
            pool_bytes,
            journals,
            journal_bytes: lane_bytes,
            journal_region: lane_region,
            bitmap,
            frame_table,
            objects,
            in_flight,
            frames,
        })
    }

    /// Numbers of the frames that hold data and nodes.
    #[must_use]
    pub fn frame_numbers(&self) -> Range<u64> {
        self.frames.start / PAGE..self.frames.end() / PAGE
    }

    /// The byte of a frame's word in the frame table.
    #[must_use]
    pub fn frame_entry_at(&self, frame: FrameNo) -> usize {
        (self.frame_table.start + frame.0 * FRAME_ENTRY_BYTES) as usize
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
            let regions = [plan.journal_region, plan.bitmap, plan.frame_table, plan.objects, plan.in_flight, plan.frames];
            let mut end = 2 * PAGE;
            for region in regions {
                prop_assert_eq!(region.start, end);
                prop_assert!(region.len > 0 && region.len.is_multiple_of(PAGE));
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
