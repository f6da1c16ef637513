//! Why the store refuses an operation of a session, and the client's error for it.
//!
//! Each layer has one error type that names the errors of that layer alone: [`StoreError`] of
//! sessions, `PoolError` of recovery, `ObjectError` of the owner. The next layer wraps it, and
//! `From` turns it into the error of a slice ([`SliceError`]), which clients get.

use crate::format::table::BadTable;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::SliceError;
use pagemesh_base::units::PAGE_BYTES;

/// Why the store refuses an operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The object has a newer epoch.
    #[error("the object is at epoch {current}; this client is fenced")]
    StaleEpoch {
        /// The object's epoch.
        current: Epoch,
    },
    /// No frame is free.
    #[error("the pool is full; delete or discard something")]
    NoSpace,
    /// A page or the table above it does not match its checksum.
    #[error("the page at byte {offset} is damaged")]
    Damaged {
        /// Its first byte in the object.
        offset: u64,
    },
    /// The page is on a device of the pool that this process has not mapped.
    #[error("a page is on a disk of the pool; the pool's owner must be asked for it")]
    OnFlash,
    /// Deleted, or never there.
    #[error("there is no such object in the pool")]
    NoSuchObject,
    /// Beyond the object's end.
    #[error("bytes {offset}..{end} are beyond the object's end at {size_bytes}")]
    OutOfRange {
        /// First byte.
        offset: u64,
        /// The byte after the last.
        end: u64,
        /// The object's size.
        size_bytes: u64,
    },
    /// The parts do not form a transaction.
    #[error("the transaction is invalid: {0}")]
    InvalidTransaction(&'static str),
    /// The pool's journals are too short for it, even when empty.
    #[error(
        "a transaction that may take {lines} lines of the journal is too long for this pool, which takes at most {lines_max}; use a larger pool"
    )]
    TooLong {
        /// The lines that it may take.
        lines: usize,
        /// The lines that a transaction may take at most.
        lines_max: usize,
    },
    /// The owner of the pool ended this session.
    #[error("the pool's owner ended the session")]
    Revoked,
    /// The owner of the pool is gone.
    #[error("the pool's owner is gone")]
    OwnerGone,
    /// The owner did not answer, or a lock was not released, in time.
    #[error(
        "the pool's owner did not answer, or another session did not release a lock, in time; try again"
    )]
    TimedOut,
}

impl From<StoreError> for SliceError {
    fn from(cause: StoreError) -> SliceError {
        match cause {
            StoreError::StaleEpoch { current } => SliceError::StaleEpoch { current },
            StoreError::NoSpace => SliceError::NoSpace,
            StoreError::Damaged { offset } => SliceError::Damaged { offset },
            StoreError::OnFlash => SliceError::OnFlash,
            StoreError::NoSuchObject => SliceError::NoSuchSlice(SliceId::default()),
            StoreError::OutOfRange { .. }
            | StoreError::InvalidTransaction(_)
            | StoreError::TooLong { .. } => SliceError::OutOfRange(cause.to_string()),
            StoreError::Revoked | StoreError::OwnerGone | StoreError::TimedOut => {
                SliceError::Lost(cause.to_string())
            }
        }
    }
}

/// The error of a page that is damaged, or below a damaged table.
pub(crate) fn damaged_page_error(page: PageNo) -> StoreError {
    StoreError::Damaged {
        offset: page.0.saturating_mul(PAGE_BYTES as u64),
    }
}

pub(crate) fn damaged_table_error(cause: BadTable) -> StoreError {
    damaged_page_error(match cause {
        BadTable::Damaged { page, .. }
        | BadTable::NoSuchFrame { page, .. }
        | BadTable::OutOfReach { page, .. } => page,
    })
}
