//! The interface between storage and its front ends: a byte-addressable persistent space, driven by
//! submission.
//!
//! A front end opens one [`Channel`] per thread, submits requests and reaps completions; nothing
//! here blocks on I/O. Requests own their bytes until they complete, because a volume may have to
//! resend one after losing a leg.
//!
//! Ordering: requests in flight together have no order, except that overlapping ones take effect in
//! the order of their submission on one channel. Durability: a completed `Write`, `Discard`,
//! `WriteZeroes` or `Transact` has reached every written leg (in-sync or syncing). On pools of class
//! `file-sync` it survives power loss once it was `durable`, or a later `Flush` has completed.

use crate::slice::TransactionPart;
use crate::tier_hint::TierHint;
use bytes::Bytes;
use std::os::fd::RawFd;
use std::time::Instant;

/// Bytes of the longest request: front ends split longer ones or refuse them.
pub const REQUEST_BYTES_MAX: u32 = 32 << 20;
/// Requests that a channel takes before completions must be reaped.
pub const REQUESTS_MAX: usize = 1024;

/// Pages of all parts of a transaction together: a pool keeps its records consecutive in a journal,
/// and every leg holds their locks at once.
pub const TRANSACTION_PAGES_MAX: u64 = 64;

/// The submitter's number of a request, returned with its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

/// A request to a space. Offsets and lengths are bytes, of any alignment; ranges lie within the
/// space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Reads the bytes of a range; unwritten ones read as zeroes.
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
        /// The data.
        data: Bytes,
        /// Complete only when the data survives the failures of the pool's class, and the
        /// asynchronous replica has it if there is one.
        durable: bool,
    },
    /// Frees the pages of a range, which then reads as zeroes. For a durable discard, send a flush
    /// after it.
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
    /// Changes pages of several places: all of them or none, on every leg, for a reader after a
    /// crash. A concurrent reader may see some parts before others. A space may refuse a
    /// transaction that it cannot make atomic, with [`SpaceError::Unsupported`].
    Transact {
        /// In any order; parts that pass [`crate::slice::check_parts`].
        parts: Vec<TransactionPart>,
        /// As for a write.
        durable: bool,
    },
    /// Makes durable every change that completed before this request was sent, on any channel of
    /// the space. It asks no leg of class `process`, `pmem` or `eadr`, and every written leg of
    /// class `file-sync`. If there is an asynchronous replica, it also waits until the replica has
    /// these changes. It fails with [`SpaceError::Unavailable`], once on each channel, after a
    /// column on `file-sync` pools has lost all its in-sync legs at once: changes that no flush had
    /// covered may be lost. A channel that is opened later reports that only if no other has.
    Flush,
    /// Lists the extents of a range.
    Extents {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

/// A part of a range, wholly written or wholly a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes.
    pub len: u64,
    /// Whether it holds data; a hole reads as zeroes.
    pub mapped: bool,
}

/// Extents of one answer; the caller continues at its end.
pub const EXTENTS_MAX: usize = 1024;

/// The result of a request.
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
    /// The range lies beyond the end.
    #[error("bytes {offset}..{end} are beyond the end at {size_bytes}")]
    OutOfRange {
        /// First byte asked for.
        offset: u64,
        /// The byte after the last.
        end: u64,
        /// The space's size.
        size_bytes: u64,
    },
    /// The pool behind it is full. Only whole pages before the failing one were changed.
    #[error("no space is left in the pool of {0}; delete or discard something, or add space")]
    NoSpace(String),
    /// Another client attached the volume; this one must not write any more.
    #[error("another client attached the volume; attach it again to go on")]
    Fenced,
    /// A page cannot be read intact from any leg.
    #[error(
        "the page at byte {offset} is damaged on {place} and no copy is left to repair it from"
    )]
    Damaged {
        /// The page's first byte.
        offset: u64,
        /// The place of the page.
        place: String,
    },
    /// No leg that could answer is reachable.
    #[error("{0}")]
    Unavailable(String),
    /// The space never supports this. Nothing was changed.
    #[error("{0}")]
    Unsupported(String),
    /// No further channel: as many are open as the space, or a brick behind it, supports. Open ones
    /// continue, and a closed one makes room.
    #[error("{0}")]
    Busy(String),
}

/// The end of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The token of the request.
    pub token: Token,
    /// The result.
    pub result: Result<Reply, SpaceError>,
}

/// One thread's access to a space.
pub trait Channel: Send {
    /// Whether the space has all resources that requests of this channel need. To be called before
    /// the first request, and again when a descriptor of [`Channel::poll_fds`] is readable. A
    /// request submitted earlier waits until then.
    ///
    /// # Errors
    /// Why the channel will never serve ([`SpaceError::Busy`], [`SpaceError::Fenced`]): all its
    /// requests would fail with it. A later channel may find room.
    fn ready(&mut self) -> Result<bool, SpaceError> {
        Ok(true)
    }

    /// Starts a request. It may complete at once; in any case its completion is reaped. Callers
    /// keep at most [`REQUESTS_MAX`] in flight.
    fn submit(&mut self, token: Token, request: Request);

    /// As [`Channel::submit`], with a hint about the tier of the pages. A space without a tier drops it.
    fn submit_hinted(&mut self, token: Token, request: Request, hint: TierHint) {
        let _ = hint;
        self.submit(token, request);
    }

    /// Makes progress without blocking and moves completed requests to `into`.
    fn reap(&mut self, into: &mut Vec<Completion>);

    /// Descriptors that become readable when `reap` may have work. They may change after any call;
    /// ask again before each wait.
    fn poll_fds(&self, into: &mut Vec<RawFd>);

    /// When `reap` must be called even if no descriptor is readable.
    fn deadline(&self) -> Option<Instant> {
        None
    }
}

/// A byte-addressable persistent space. A wrapper of another space passes on each method: the
/// defaults say that nothing buffers and nothing was lost.
pub trait Space: Send + Sync {
    /// Bytes; may grow while the space is open.
    fn size_bytes(&self) -> u64;

    /// Whether power loss may lose acknowledged data that was not flushed: any of it, in any order.
    fn has_write_cache(&self) -> bool {
        false
    }

    /// Whether a flush may have work or wait: for acknowledged, unflushed changes, or for an asynchronous replica.
    fn needs_flush(&self) -> bool {
        self.has_write_cache()
    }

    /// How often acknowledged, unflushed data may have been lost since the space was opened. It
    /// only rises.
    fn lost_writes(&self) -> u64 {
        0
    }

    /// Opens a channel.
    ///
    /// # Errors
    /// When too many are open already ([`SpaceError::Busy`], which may instead fail all requests of
    /// the channel from the first on), or no leg behind it is reachable.
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
