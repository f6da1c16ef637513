//! The figures and findings of a disk.

/// The figures of a disk and of its cache of data pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskFigures {
    /// Bytes of pages that the cache holds at most.
    pub cache_bytes_max: u64,
    /// Bytes of pages that it holds.
    pub cache_bytes: u64,
    /// Pages that are not on the device yet.
    pub dirty_pages: u64,
    /// Reads of pages that were in the cache.
    pub hits: u64,
    /// Pages that were loaded from the device.
    pub misses: u64,
    /// Pages of the device that could not be read.
    pub unreadable_pages: u64,
    /// Requests that took longer than the limit for a report.
    pub slow_requests: u64,
}

/// The findings of a comparison of resident bytes with the device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResidentCheck {
    /// The first bytes of lines that differed on the device. They are rewritten.
    pub damaged_lines: Vec<usize>,
    /// The start of the next step. None: everything is compared.
    pub next: Option<usize>,
}
