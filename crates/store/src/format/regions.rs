//! Units and regions of a pool that every structure on its medium uses.

use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use std::ops::Range;

/// The format this code reads and writes.
pub const VERSION: u32 = 1;
pub(crate) const PAGE: u64 = PAGE_BYTES as u64;
/// The largest pool. Slots could name four times as many frames.
pub const POOL_BYTES_MAX: u64 = 64 << 40;
/// Pages of the largest pool.
pub(crate) const PAGES_MAX: u64 = POOL_BYTES_MAX / PAGE;
/// Bytes of an entry of the frame table.
pub const FRAME_ENTRY_BYTES: u64 = 8;
/// Words of bits in a line of the bitmap; the checksum follows them.
pub(crate) const LINE_WORDS: usize = LINE_BYTES / 8 - 1;
/// Frames of a line of the bitmap.
pub(crate) const LINE_FRAMES: u64 = LINE_WORDS as u64 * 64;

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

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> Range<usize> {
        self.start as usize..self.end() as usize
    }
}
