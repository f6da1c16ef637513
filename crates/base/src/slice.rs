//! The interface between a volume and its legs: the requests of a client to one slice of a brick,
//! and the calls of a manager to the brick. The transports of the fabric implement it, and so do
//! the fakes of tests.

mod brick_control;
mod page_versions;
mod seen_pages;

use crate::ids::{Epoch, PageNo};
use crate::layout::{BrickId, SliceId};
use crate::space::{Extent, SpaceError, TRANSACTION_PAGES_MAX, check_range};
use crate::tier_hint::TierHint;
use crate::units::PAGE_BYTES;
pub use brick_control::{
    BrickControl, CLONES_UNKNOWN, CloneProgress, CloneSource, SNAPSHOTS_UNKNOWN, SPACE_UNKNOWN,
    VERSION_COPIES_UNKNOWN,
};
use bytes::Bytes;
pub use page_versions::{
    LISTED_SNAPSHOTS_MAX, PageVersion, VERSION_EDITS_MAX, VIEWS_ONLY, VersionEdit, VersionEdits,
    VersionList, VersionPlan, VersionRange, plan_version_edits, unequal_views,
};
pub use seen_pages::{SEEN_BY_SLICE, SEEN_RUNS_MAX, SeenPages, SeenPagesList};
use serde::{Deserialize, Serialize};
use std::os::fd::RawFd;
use std::time::Instant;

/// Bytes of the longest write or read of a slice; volumes split longer ones.
pub const SLICE_IO_BYTES_MAX: u32 = 1 << 20;
/// Pages of one [`SliceRequest::Copy`].
pub const COPY_PAGES_MAX: usize = 128;
/// Entries of one answer that lists something.
pub const LIST_ENTRIES_MAX: usize = 4096;
/// Snapshots that one call drops.
pub const DROPPED_SNAPSHOTS_MAX: usize = 1024;
/// Bytes of the frames of a leaf: for each page the number of its frame + 1, as a little-endian word of 8 bytes; 0: a hole;
/// [`VERSION_LOST`]: a page that the medium may have lost.
pub const VERSION_LEAF_BYTES: usize = 512 * 8;
/// See [`VERSION_LEAF_BYTES`].
pub const VERSION_LOST: u64 = u64::MAX;
/// Requests in flight on one leg.
pub const LEG_REQUESTS_MAX: usize = 4096;

/// The author of a change to a page, and its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stamp {
    /// The volume's epoch; a slice with a higher one refuses.
    pub epoch: Epoch,
    /// The client's operation number: rises within an epoch, assigned while
    /// the volume's range lock is held.
    pub op: u64,
    /// `op` less the oldest operation of this leg's connection that may be
    /// incomplete on another leg.
    pub open_ops: u32,
}

/// A part of a transaction: whole pages in a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransactionPart {
    /// Replaces pages.
    Write {
        /// First byte.
        offset: u64,
        /// The data.
        data: Bytes,
    },
    /// Frees pages; they then read as zeroes.
    Clear {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

impl TransactionPart {
    /// Its first byte.
    #[must_use]
    pub fn offset(&self) -> u64 {
        match self {
            TransactionPart::Write { offset, .. } | TransactionPart::Clear { offset, .. } => {
                *offset
            }
        }
    }

    /// Bytes that it changes; never zero after [`check_parts`].
    #[must_use]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        match self {
            TransactionPart::Write { data, .. } => data.len() as u64,
            TransactionPart::Clear { len, .. } => *len,
        }
    }
}

/// Checks the parts of a transaction against the size of the slice or space: whole pages each, at
/// least one, no page twice, not too many in all.
///
/// # Errors
/// [`SpaceError::OutOfRange`], or [`SpaceError::Unsupported`] with the reason.
pub fn check_parts(parts: &[TransactionPart], size_bytes: u64) -> Result<(), SpaceError> {
    const PAGE: u64 = PAGE_BYTES as u64;
    let refuse = |why: String| Err(SpaceError::Unsupported(why));
    if parts.is_empty() {
        return refuse("a transaction has no parts; name at least one".into());
    }
    let mut pages = 0;
    for (at, part) in parts.iter().enumerate() {
        let (offset, len) = (part.offset(), part.len());
        check_range(size_bytes, offset, len)?;
        if len == 0 || !offset.is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) {
            return refuse(format!(
                "a part of {len} bytes at {offset} is not of whole pages of {PAGE} bytes; write the rest of those pages along with it"
            ));
        }
        pages += len / PAGE;
        // This also bounds the search of earlier parts: each part has a page.
        if pages > TRANSACTION_PAGES_MAX {
            return refuse(format!(
                "a transaction changes more than {TRANSACTION_PAGES_MAX} pages; split it"
            ));
        }
        let overlaps = |other: &TransactionPart| {
            offset < other.offset() + other.len() && other.offset() < offset + len
        };
        if parts[..at].iter().any(overlaps) {
            return refuse(format!(
                "the part at byte {offset} overlaps another of its transaction; join them"
            ));
        }
    }
    Ok(())
}

/// A client's request to one slice. Offsets and lengths are bytes, of any alignment. Overlapping
/// requests are not in flight together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SliceRequest {
    /// The bytes of a range, checked against their checksums.
    Read {
        /// First byte.
        offset: u64,
        /// At most [`SLICE_IO_BYTES_MAX`].
        len: u32,
    },
    /// Replaces bytes, each page as a whole or not at all.
    Write {
        /// First byte.
        offset: u64,
        /// At most [`SLICE_IO_BYTES_MAX`].
        data: Bytes,
        /// Its order.
        stamp: Stamp,
    },
    /// Frees the whole pages of a range and zeroes the rest of it.
    Clear {
        /// First byte.
        offset: u64,
        /// Bytes; at most 1 GiB.
        len: u64,
        /// Its order.
        stamp: Stamp,
    },
    /// Changes pages of several places as a whole or not at all.
    Transact {
        /// Parts that pass [`check_parts`].
        parts: Vec<TransactionPart>,
        /// Their order: they are one operation.
        stamp: Stamp,
    },
    /// Makes all completed changes durable, as the pool's class promises.
    Flush,
    /// Makes a change, then a [`SliceRequest::Flush`] that covers it, too. One answer for both.
    Durable {
        /// A write, a clear or a transaction.
        change: Box<SliceRequest>,
    },
    /// Lists the extents of a range.
    Extents {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// The CRC32C of each page of a run, after reading and checking it; an
    /// unmapped page counts as zeroes.
    Checksums {
        /// The first page.
        page: PageNo,
        /// At most [`LIST_ENTRIES_MAX`].
        count: u32,
    },
    /// The pages born at an epoch or since, holes included. A page of unknown birth is one of them.
    Dirty {
        /// The oldest birth.
        since: Epoch,
        /// The first page to check.
        from: PageNo,
    },
    /// The operations of dead or fenced sessions that may be missing on another leg, since the
    /// last [`SliceRequest::ForgetInFlight`].
    InFlight,
    /// From here on, a failed change of this connection fails all later ones, so that the slice
    /// holds a prefix of the changes sent over it. Changes may be in flight together although they
    /// overlap; they are made in the order of their arrival.
    KeepOrder,
    /// The legs were reconciled: clears the list of [`SliceRequest::InFlight`].
    ForgetInFlight,
    /// A barrier: refuses older epochs. It returns when every operation admitted before has ended
    /// and is in the answer to `InFlight`. All later changes are born at this epoch or above.
    RaiseEpoch {
        /// At least the present one.
        epoch: Epoch,
        /// The epoch of the oldest loss of a leg that is still behind, as in the layout; 0 if none
        /// is. Operations of earlier epochs stay in the answer to `InFlight`, even once they are
        /// complete, until a barrier names no loss.
        lost_since: Epoch,
    },
    /// The birth of each page of a run.
    Births {
        /// The first page.
        page: PageNo,
        /// At most [`LIST_ENTRIES_MAX`].
        count: u32,
    },
    /// Replaces whole pages by copies that keep their births. Each page changes as a whole or not at
    /// all.
    Copy {
        /// The first page.
        page: PageNo,
        /// One per page, at most [`COPY_PAGES_MAX`]. 0 for an unknown birth: the page is born now.
        births: Vec<Epoch>,
        /// The bytes of the pages. Empty if all of them are holes.
        data: Bytes,
        /// Its order.
        stamp: Stamp,
    },
    /// Keeps the versions that a snapshot of this epoch sees, from now on. Durable when it is answered. A
    /// second request for the same snapshot has no effect. The epoch that fences does not change.
    PrepareSnapshot {
        /// The snapshot: it holds the changes of lower epochs.
        snapshot: Epoch,
    },
    /// The bytes of a range, as a snapshot sees them. No epoch refuses it.
    ReadVersion {
        /// The snapshot.
        snapshot: Epoch,
        /// First byte.
        offset: u64,
        /// At most [`SLICE_IO_BYTES_MAX`].
        len: u32,
    },
    /// Lists the extents of a range, as a snapshot sees it. No epoch refuses it.
    VersionExtents {
        /// The snapshot.
        snapshot: Epoch,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// The frames that a snapshot sees in a leaf of 512 pages, for a process that maps the pool: [`SliceReply::Data`] with
    /// [`VERSION_LEAF_BYTES`]. No epoch refuses it.
    VersionLeaf {
        /// The snapshot.
        snapshot: Epoch,
        /// The number of the leaf: its first page / 512.
        leaf: u64,
    },
    /// Lists the parts of a range that differ between two snapshots, as extents: mapped ones may differ,
    /// and the others are equal. No epoch refuses it.
    VersionChanges {
        /// The earlier snapshot. 0: an empty slice, so that each page that `to` sees differs.
        from: Epoch,
        /// The later snapshot.
        to: Epoch,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

impl SliceRequest {
    /// The change of a durable change, and any other request itself.
    #[must_use]
    pub fn without_flush(&self) -> &SliceRequest {
        match self {
            SliceRequest::Durable { change } => change,
            request => request,
        }
    }

    /// The epoch of the client that asks, where the request tells it.
    #[must_use]
    pub fn epoch(&self) -> Option<Epoch> {
        match self.without_flush() {
            SliceRequest::Write { stamp, .. }
            | SliceRequest::Clear { stamp, .. }
            | SliceRequest::Transact { stamp, .. }
            | SliceRequest::Copy { stamp, .. } => Some(stamp.epoch),
            SliceRequest::RaiseEpoch { epoch, .. } => Some(*epoch),
            _ => None,
        }
    }

    /// Whether only a brick that knows snapshots understands it.
    #[must_use]
    pub fn is_of_snapshot(&self) -> bool {
        self.is_read_of_snapshot() || matches!(self, SliceRequest::PrepareSnapshot { .. })
    }

    /// Whether it reads a snapshot.
    #[must_use]
    pub fn is_read_of_snapshot(&self) -> bool {
        matches!(
            self,
            SliceRequest::ReadVersion { .. }
                | SliceRequest::VersionExtents { .. }
                | SliceRequest::VersionLeaf { .. }
                | SliceRequest::VersionChanges { .. }
        )
    }

    /// Whether it may change bytes.
    #[must_use]
    pub fn is_change(&self) -> bool {
        matches!(
            self.without_flush(),
            SliceRequest::Write { .. }
                | SliceRequest::Clear { .. }
                | SliceRequest::Transact { .. }
                | SliceRequest::Copy { .. }
        )
    }
}

/// An operation that may be missing on another leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InFlightOp {
    /// Its first page.
    pub page: PageNo,
    /// Its pages.
    pub count: u32,
    /// The epoch it was written in.
    pub epoch: Epoch,
    /// Its number.
    pub op: u64,
}

/// A run of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// The first.
    pub page: PageNo,
    /// How many.
    pub count: u64,
}

/// A slice's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SliceReply {
    /// Done.
    Done,
    /// The bytes read.
    Data(Vec<u8>),
    /// From the start of the range, at least one unless the range is empty.
    Extents(Vec<Extent>),
    /// One per page.
    Checksums(Vec<u32>),
    /// One per page. 0 if it is unknown, or if the page was never written.
    Births(Vec<Epoch>),
    /// Dirty runs in order, and where to go on, if there is more.
    Dirty {
        /// At most [`LIST_ENTRIES_MAX`].
        runs: Vec<PageRun>,
        /// The page to ask from next; none at the end.
        next: Option<PageNo>,
    },
    /// Operations in no order. None: there were too many to record, so the whole slice must be
    /// compared.
    InFlight(Option<Vec<InFlightOp>>),
}

/// Why a slice or brick refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SliceError {
    /// A newer client has attached.
    #[error("the slice is at epoch {current}; this client is fenced")]
    StaleEpoch {
        /// The slice's epoch.
        current: Epoch,
    },
    /// The pool is full.
    #[error("the pool is full; delete or discard something")]
    NoSpace,
    /// A page's bytes do not match their checksum, or its table is damaged.
    #[error("the page at byte {offset} is damaged")]
    Damaged {
        /// Its first byte in the slice.
        offset: u64,
    },
    /// The page is on a disk of the pool, and only the pool's brick reaches it. Not sent in messages.
    #[error("a page is on a disk of the pool; the brick must be asked for it")]
    OnFlash,
    /// No such slice.
    #[error("the brick has no slice {0}")]
    NoSuchSlice(SliceId),
    /// The name is taken.
    #[error("the brick already has a slice {0}")]
    SliceExists(SliceId),
    /// Beyond the slice, or beyond a limit.
    #[error("the request is out of range: {0}")]
    OutOfRange(String),
    /// The connection or the brick is gone. The requests in flight may or may not have been
    /// executed.
    #[error("the brick is lost: {0}")]
    Lost(String),
    /// The brick cannot do this.
    #[error("{0}")]
    Refused(String),
    /// The brick has no session or connection left for a new connection. Open ones continue, and a
    /// closed one makes room.
    #[error("{0}")]
    NoSession(String),
}

impl SliceError {
    /// The refusal of a request of a snapshot, for a brick of an earlier release.
    #[must_use]
    pub fn snapshots_unknown() -> SliceError {
        SliceError::Refused(SNAPSHOTS_UNKNOWN.into())
    }
}

/// Whether operations are counted and timed. Always, but for builds that measure what that costs.
pub const IS_MEASURED: bool = !cfg!(feature = "unmeasured");

/// The time that a brick spent on a request, by its own clock, in nanoseconds. Zero if the brick does
/// not report it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceTime {
    /// From the arrival of the request until its reply.
    pub brick_ns: u64,
    /// Of that, the time in the store.
    pub store_ns: u64,
}

/// The end of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceCompletion {
    /// The submitter's number.
    pub tag: u64,
    /// The result.
    pub result: Result<SliceReply, SliceError>,
    /// The time that the brick reports.
    pub service: ServiceTime,
}

impl SliceCompletion {
    /// A completion without a report of time.
    #[must_use]
    pub fn new(tag: u64, result: Result<SliceReply, SliceError>) -> SliceCompletion {
        SliceCompletion {
            tag,
            result,
            service: ServiceTime::default(),
        }
    }
}

/// One thread's connection to one slice. After [`SliceError::Lost`] every request fails with it,
/// those in flight included; nothing is retried.
pub trait Leg: Send {
    /// Starts a request; at most [`LEG_REQUESTS_MAX`] are in flight.
    fn submit(&mut self, tag: u64, request: SliceRequest);

    /// As [`Leg::submit`], with a hint about the tier of the pages. A leg that does not know hints drops it.
    fn submit_hinted(&mut self, tag: u64, request: SliceRequest, hint: TierHint) {
        let _ = hint;
        self.submit(tag, request);
    }

    /// Makes progress without blocking and moves completed requests to `into`.
    fn reap(&mut self, into: &mut Vec<SliceCompletion>);

    /// Checks, without waiting, whether the connection has ended while no request is in flight;
    /// returns the reason. Requests in flight get it in their answers.
    fn poll_closed(&mut self) -> Option<SliceError> {
        None
    }

    /// Descriptors that become readable when `reap` may have work, or the connection has ended.
    fn poll_fds(&self, into: &mut Vec<RawFd>);

    /// When `reap` must be called even if no descriptor is readable.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// The time, by the clock of the time-outs; none: requests complete inside `submit`, and no
    /// answer is late.
    fn now(&self) -> Option<Instant> {
        None
    }

    /// The leg itself, for a volume that can write several legs of one kind at once.
    fn as_any(&mut self) -> Option<&mut dyn std::any::Any> {
        None
    }
}

/// A brick's information about one slice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SliceInfo {
    /// Its identity.
    pub slice: SliceId,
    /// Its size.
    pub size_bytes: u64,
    /// Its fencing number.
    pub epoch: u32,
}

/// A brick's information about itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrickStatus {
    /// The pool's identity.
    pub brick: BrickId,
    /// The pool's durability class: `pmem`, `eadr`, `file-sync` or `process`.
    pub durability: String,
    /// Bytes that slices can use in all.
    pub capacity_bytes: u64,
    /// Bytes in use, page tables included.
    pub used_bytes: u64,
    /// Sessions open.
    pub sessions: u32,
    /// Rises with each opening of the pool.
    pub incarnation: u32,
}

#[cfg(test)]
mod tests;
