//! The seam between what stores bytes and what serves them: a
//! byte-addressable persistent space, driven by submission.
//!
//! A front opens one [`Channel`] per thread, submits requests and reaps
//! completions; nothing here blocks on I/O. Requests own their bytes until
//! they complete, because a volume may have to drive one again after losing a
//! leg.
//!
//! Ordering: requests in flight together have no order, except that those
//! which overlap take effect in the order of their submission on one channel.
//! Durability: a completed `Write`, `Discard`, `WriteZeroes` or `Transact` has
//! reached every in-sync copy. On pools of class `file-sync` it survives power loss
//! once it was `durable`, or a later `FlushInstruction` has completed.

use crate::slice::TransactionPart;
use bytes::Bytes;
use std::os::fd::RawFd;
use std::time::Instant;

/// Bytes of the longest request: fronts split longer ones or refuse them.
pub const REQUEST_BYTES_MAX: u32 = 32 << 20;
/// Requests that a channel takes before completions must be reaped.
pub const REQUESTS_MAX: usize = 1024;

/// Pages of all parts of a transaction together: a pool keeps the records of
/// one behind each other in a lane, and every copy holds their locks at once.
pub const TRANSACTION_PAGES_MAX: u64 = 64;

/// The submitter's name for a request, given back with its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

/// What a space can be asked. Offsets and lengths are bytes, of any
/// alignment; ranges lie within the space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// The bytes of a range; what was never written reads as zeroes.
    Read {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u32,
    },
    /// Replaces bytes. Each 4 KiB page changes as a whole or not at all.
    Write {
        /// First byte.
        offset: u64,
        /// What to write.
        data: Bytes,
        /// Complete only when it survives what the class promises.
        durable: bool,
    },
    /// Frees what a range occupies; it then reads as zeroes.
    Discard {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Makes a range read as zeroes; whole pages are freed.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// As for a write.
        durable: bool,
    },
    /// Changes pages of several places: all of them or none, in every copy,
    /// for whoever reads after a crash. Who reads beside it may see some parts
    /// before others. A space may refuse what it cannot keep whole, as
    /// [`SpaceError::Unsupported`].
    Transact {
        /// In any order, as [`crate::slice::check_parts`] wants them.
        parts: Vec<TransactionPart>,
        /// As for a write.
        durable: bool,
    },
    /// Makes every completed change durable.
    Flush,
    /// Which parts of a range hold data.
    Extents {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

/// A part of a range, all of it written or all of it a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes.
    pub len: u64,
    /// Whether it holds data; a hole reads as zeroes.
    pub mapped: bool,
}

/// Extents of one answer; the asker goes on where it ends.
pub const EXTENTS_MAX: usize = 1024;

/// What a request gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Done.
    Done,
    /// The bytes read.
    Data(Vec<u8>),
    /// At least one extent, in order, from the range's start; they may end
    /// before the range does, never after it.
    Extents(Vec<Extent>),
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpaceError {
    /// Beyond the end.
    #[error("bytes {offset}..{end} are beyond the end at {size_bytes}")]
    OutOfRange {
        /// First byte asked for.
        offset: u64,
        /// The byte after the last.
        end: u64,
        /// The space's size.
        size_bytes: u64,
    },
    /// The pool behind it is full. Nothing was changed beyond whole pages
    /// that came before the failing one.
    #[error("no space is left in the pool of {0}; delete or discard something, or add space")]
    NoSpace(String),
    /// Another client attached; this one must not write any more.
    #[error("another client attached the volume; attach it again to go on")]
    Fenced,
    /// A page cannot be read right from any copy.
    #[error(
        "the page at byte {offset} is damaged on {place} and no copy is left to repair it from"
    )]
    Damaged {
        /// The page's first byte.
        offset: u64,
        /// Where.
        place: String,
    },
    /// Nothing that could answer is reachable.
    #[error("{0}")]
    Unavailable(String),
    /// The space cannot do this, whenever it is asked. Nothing was changed.
    #[error("{0}")]
    Unsupported(String),
    /// There is no further channel: as many are open as the space, or a brick behind it,
    /// has room for. Others go on, and one that is closed makes room.
    #[error("{0}")]
    Busy(String),
}

/// The end of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Whose.
    pub token: Token,
    /// What came of it.
    pub result: Result<Reply, SpaceError>,
}

/// One thread's way into a space.
pub trait Channel: Send {
    /// Whether the space has all that requests of this channel need. To be called before
    /// the first request, and again when a descriptor of [`Channel::poll_fds`] is readable.
    /// A request that is submitted earlier waits until then.
    ///
    /// # Errors
    /// Why the channel will never serve ([`SpaceError::Busy`], [`SpaceError::FenceProof`]):
    /// all its requests would fail so. A further channel may find room.
    fn ready(&mut self) -> Result<bool, SpaceError> {
        Ok(true)
    }

    /// Starts a request. It may complete at once; in any case its completion
    /// is reaped. Callers keep at most [`REQUESTS_MAX`] in flight.
    fn submit(&mut self, token: Token, request: Request);

    /// Makes progress without blocking and moves what has completed to `into`.
    fn reap(&mut self, into: &mut Vec<Completion>);

    /// Descriptors that become readable when `reap` may have something to do.
    /// They may change after any call; ask again before each wait.
    fn poll_fds(&self, into: &mut Vec<RawFd>);

    /// When `reap` must be called even if no descriptor is readable.
    fn deadline(&self) -> Option<Instant> {
        None
    }
}

/// A byte-addressable persistent space.
pub trait Space: Send + Sync {
    /// Bytes; may grow while the space is open.
    fn size_bytes(&self) -> u64;

    /// Whether what is acknowledged may be lost with the power until it is flushed: any
    /// of it, in any order.
    fn has_write_cache(&self) -> bool {
        false
    }

    /// Whether a flush may have anything to do or to wait for: bytes that are buffered, or an
    /// asynchronous replica.
    fn needs_flush(&self) -> bool {
        self.has_write_cache()
    }

    /// How often what was acknowledged and not flushed may have been lost, since the
    /// space was opened. It only rises.
    fn lost_writes(&self) -> u64 {
        0
    }

    /// Opens a channel.
    ///
    /// # Errors
    /// When there are too many already ([`SpaceError::Busy`], which may also be how its
    /// requests end, all of them from the first on), or nothing behind it is reachable.
    fn open(&self) -> Result<Box<dyn Channel>, SpaceError>;
}

/// Checks a range against the size of a space.
///
/// # Errors
/// [`SpaceError::OutOfRange`], also when the end overflows.
pub fn check_range(size_bytes: u64, offset: u64, len: u64) -> Result<(), SpaceError> {
    match offset.checked_add(len) {
        Some(end) if end <= size_bytes => Ok(()),
        end => Err(SpaceError::OutOfRange {
            offset,
            end: end.unwrap_or(u64::MAX),
            size_bytes,
        }),
    }
}
