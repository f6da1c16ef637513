//! Why memory could not be mapped or made durable.

use crate::durability::Durability;
use std::io;

/// Why a file could not be mapped or made durable.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// Zero bytes, or not whole pages.
    #[error("a mapping of {0} bytes is not possible; use a positive multiple of 4096")]
    BadLength(usize),
    /// The file ends before the mapping would: an access would be a SIGBUS.
    #[error("the file has {found} bytes but {wanted} were to be mapped; is it truncated?")]
    TooShort {
        /// Bytes to be mapped.
        wanted: u64,
        /// Bytes the file has.
        found: u64,
    },
    /// The system refused.
    #[error("cannot {action}: {cause}")]
    System {
        /// The failed action.
        action: &'static str,
        /// The error of the system.
        cause: io::Error,
    },
    /// An earlier fdatasync failed. The kernel may have dropped dirty pages,
    /// so a later success would prove nothing.
    #[error("an earlier fdatasync of this medium failed; reopen it to recover the durable state")]
    SyncFailed,
    /// The class promises more than the medium shows.
    #[error(
        "its medium is of class {medium}, and nothing shows that it keeps the promise of class {class}; use class {medium}, or, if you know that it does, make the pool with --trust-medium"
    )]
    ClassNotProvided {
        /// The class stated.
        class: Durability,
        /// The medium's own.
        medium: Durability,
    },
    /// A medium without further devices.
    #[error(
        "this pool was opened without further devices and takes none; start its brick with --device, or create the pool on a disk"
    )]
    NoFurtherDevices,
    /// No device begins at the byte.
    #[error("no device of the pool begins at byte {0}")]
    NoDeviceAt(usize),
    /// Too many devices have joined since the opening.
    #[error("too many devices have joined this pool since its opening; restart its brick")]
    TooManyJoins,
    /// A device cannot lie there.
    #[error(
        "a device cannot have the bytes {start} to {end} of its pool with a head of {head_len}"
    )]
    BadDevicePlace {
        /// Its first byte.
        start: usize,
        /// The byte behind its last.
        end: usize,
        /// Bytes before its frames.
        head_len: usize,
    },
    /// A character device has neither fdatasync nor private mappings.
    #[error(
        "a character device cannot be synced, so class file-sync is not possible; use another class, or a file on it"
    )]
    CannotSync,
}
