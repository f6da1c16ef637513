//! Why the owner refuses to change an object, and the client's error for it.

use crate::format::version_pages::DamagedVersions;
use crate::recovery::PoolError;
use crate::shared::error::StoreError;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::SliceError;
use uuid::Uuid;

/// Why the owner refuses to change an object.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// The name is taken.
    #[error("the pool already has a slice {0}")]
    Exists(SliceId),
    /// No such slice.
    #[error("the pool has no slice {0}")]
    Unknown(SliceId),
    /// Its entry, or the entry of another slice, is damaged.
    #[error(
        "slice {slice} cannot be used: entry {entry} of the pool's object table is damaged and may be its own; stop the brick and run `pagemesh pool check` on the pool"
    )]
    Lost {
        /// The requested slice.
        slice: SliceId,
        /// The damaged entry.
        entry: u32,
    },
    /// A size that no object has.
    #[error("a slice of {0} bytes is not possible; use whole pages, at least one, at most 64T")]
    BadSize(u64),
    /// Objects do not shrink.
    #[error("the slice has {present} bytes and cannot shrink to {wanted}")]
    Shrinks {
        /// Its size.
        present: u64,
        /// The requested size.
        wanted: u64,
    },
    /// No entry is free.
    #[error("the pool's object table is full; delete a slice, or use a larger pool")]
    TableFull,
    /// The epoch is older than the object's.
    #[error("the slice is at epoch {current}; epoch {wanted} is old")]
    StaleEpoch {
        /// The slice's epoch.
        current: Epoch,
        /// The requested epoch.
        wanted: Epoch,
    },
    /// No such snapshot.
    #[error("slice {slice} has no snapshot at epoch {snapshot}")]
    UnknownSnapshot {
        /// The slice.
        slice: SliceId,
        /// The epoch.
        snapshot: Epoch,
    },
    /// Snapshots are taken in the order of their epochs.
    #[error("a snapshot at epoch {snapshot} cannot follow one at epoch {newest}")]
    BadSnapshot {
        /// The requested epoch.
        snapshot: Epoch,
        /// The newest snapshot.
        newest: Epoch,
    },
    /// A clone shares pages with a snapshot of the slice.
    #[error(
        "clone {clone} shares pages with the snapshot at epoch {snapshot}; promote or delete the clone first"
    )]
    HasClone {
        /// The clone.
        clone: SliceId,
        /// The snapshot.
        snapshot: Epoch,
    },
    /// A clone cannot be used before all of its leaves are linked.
    #[error("slice {0} is a clone that is still being created; try again, or delete it")]
    UnfilledClone(SliceId),
    /// The list of snapshots is full.
    #[error("the slice has {0} snapshots, as many as a slice can have; delete some")]
    SnapshotsFull(usize),
    /// A list of versions does not decode.
    #[error("{0}; delete the volume's snapshots, or replace this copy of the volume")]
    Versions(#[from] DamagedVersions),
    /// The version log may still name versions that would be edited.
    #[error("the versions below epoch {0} are not merged yet; list them again first")]
    VersionsNotMerged(Epoch),
    /// Edits that no plan has.
    #[error("the edits of versions are none of one leaf of the slice; list the versions again")]
    BadVersionEdits,
    /// No such device.
    #[error("the pool has no device {0}; `pagemesh pool device list` shows its devices")]
    NoSuchDevice(Uuid),
    /// Only a device that is draining can be removed.
    #[error("device {0} is not draining; drain it first")]
    NotDraining(Uuid),
    /// A device that has failed is not used again.
    #[error(
        "device {0} has failed, and is not used again; drain it, so that the pool forgets it, and add another one"
    )]
    DeviceFailed(Uuid),
    /// The data of a device has no room elsewhere.
    #[error(
        "the device holds {wanted_bytes} bytes, and the pool's other devices have {free_bytes} free; add a device, or delete something"
    )]
    NoRoomToDrain {
        /// Bytes in use on the device.
        wanted_bytes: u64,
        /// Free bytes elsewhere.
        free_bytes: u64,
    },
    /// The session did not end its operation in time; the session must be ended first.
    #[error("session {session} of process {pid} is stalled in an operation; end the process")]
    SessionStuck {
        /// Its number.
        session: u32,
        /// The operation, by the session's own count.
        operation: u64,
        /// The session's process.
        pid: u32,
    },
    /// Every session is in use.
    #[error("all {0} sessions of the pool are in use; detach something, or use a larger pool")]
    SessionsFull(u32),
    /// The store refused.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The pool failed.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

impl From<ObjectError> for SliceError {
    fn from(cause: ObjectError) -> SliceError {
        match cause {
            ObjectError::Exists(slice) => SliceError::SliceExists(slice),
            ObjectError::Unknown(slice) => SliceError::NoSuchSlice(slice),
            ObjectError::StaleEpoch { current, .. } => SliceError::StaleEpoch { current },
            ObjectError::Store(cause) => cause.into(),
            ObjectError::SessionsFull(_) => SliceError::NoSession(cause.to_string()),
            ObjectError::BadSize(_)
            | ObjectError::Shrinks { .. }
            | ObjectError::BadSnapshot { .. } => SliceError::OutOfRange(cause.to_string()),
            other => SliceError::Refused(other.to_string()),
        }
    }
}
