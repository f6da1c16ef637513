//! Page copies that compute the checksums from the same registers: past the caches into pools, and
//! out of them.
//!
//! Every kernel loads each source byte exactly once, so a source that changes during the copy
//! cannot make the checksums differ from the stored bytes. No kernel fences.

mod checksum;
mod fold;
mod page;
mod shared;
#[cfg(test)]
mod tests;

pub use checksum::{
    crc32c_lines, crc32c_lines_by, crc32c_patched, crc32c_patched_by, crc32c_words,
};
pub use page::{TARGETS_MAX, read_page, read_page_by, stream_page, stream_page_by};
pub use shared::{
    copy_shared, prefetch, prefetch_all, prefetch_load, store_fence, stream_shared,
    stream_shared_by,
};
