//! The stream of a snapshot: all of it, or its changes since an earlier one, over any pipe or file. [`backup`] has the bytes of backups.
//!
//! `docs/formats.md` has the bytes. A writer and a reader hold one record in memory, of [`DATA_BYTES_MAX`] at
//! most. Each record names its number, and its checksum continues that of the record before it. So a reader
//! returns a record only if the stream is intact up to its end, in order, and without a repetition.

pub mod backup;
mod error;
mod fields;
mod header;
mod reader;
mod record;
mod summary;
mod token;
mod writer;

pub use error::StreamError;
pub use header::{
    HEADER_BYTES, Header, NAME_BYTES_MAX, SnapshotIdentity, StreamContent, StreamStart, VERSION,
};
pub use reader::StreamReader;
pub use record::{DATA_BYTES_MAX, RECORD_HEADER_BYTES, Record, Totals};
pub use summary::ContentSummary;
pub use token::{BadResumeToken, ResumeToken};
pub use writer::StreamWriter;

/// Bytes of a page. Offsets and lengths in a stream are whole pages.
pub const PAGE_BYTES: usize = 4096;

/// Whether all of these bytes are zero.
#[must_use]
pub fn is_zero(data: &[u8]) -> bool {
    // The compiler makes vector instructions of the fold, and none of a loop that ends at each byte.
    let (chunks, rest) = data.as_chunks::<64>();
    let has_none = |bytes: &[u8]| bytes.iter().fold(0, |all, byte| all | byte) == 0;
    chunks.iter().all(|chunk| has_none(chunk)) && has_none(rest)
}
