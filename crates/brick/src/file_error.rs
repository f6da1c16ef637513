//! Errors of the files and block devices of a pool.

use crate::error_hints::{io_hint, map_hint};
use crate::resource_limits;
use pagemesh_pmem::{Durability, MapError};
use pagemesh_store::recovery::PoolError;
use std::io;
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Why a pool's file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The system refused.
    #[error("cannot {action} {path}: {cause}{}", io_hint(cause))]
    System {
        /// The failed action.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the system.
        cause: io::Error,
    },
    /// A file exists at the path.
    #[error("{0} exists; remove it first if nothing on it is needed")]
    Exists(PathBuf),
    /// The device holds a pool.
    #[error(
        "{0} holds a pagemesh pool; if nothing in it is needed, clear its first 8 KiB \
         (dd if=/dev/zero of={0} bs=4096 count=2) and try again"
    )]
    HoldsPool(PathBuf),
    /// A device that is mounted, or that the kernel uses otherwise.
    #[error("{0} is mounted, or in use otherwise; name another device")]
    Mounted(PathBuf),
    /// Another brick, or a client of a dead one, holds the pool.
    #[error("{0} is in use by a running brick, or by a client that still maps it; end them first")]
    InUse(PathBuf),
    /// A plain file with holes that cannot be allocated.
    #[error(
        "{path} has holes, and {missing_bytes} bytes more cannot be allocated: {cause}; make room on its file system, as writing to a hole of a full one would end the brick"
    )]
    Holes {
        /// The file.
        path: PathBuf,
        /// Bytes that are not allocated.
        missing_bytes: u64,
        /// The error of the system.
        cause: io::Error,
    },
    /// A limit of the system leaves no room for the pool.
    #[error("no room for {path}: {cause}; or choose a smaller --size, or a path on a disk")]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// The limit.
        cause: resource_limits::Shortage,
    },
    /// The medium does not support the class.
    #[error("{path} cannot be of class {class}: {cause}")]
    Class {
        /// The file.
        path: PathBuf,
        /// The class stated.
        class: Durability,
        /// The cause.
        cause: MapError,
    },
    /// The disk below a pool failed while the pool was recovered.
    #[error("{path}: {cause}")]
    DiskFailed {
        /// The file.
        path: PathBuf,
        /// The cause.
        cause: String,
    },
    /// A pool on a disk, where one in memory is needed.
    #[error("{0} is of class file-sync, which cannot be mapped; name a pool in memory")]
    OnDisk(PathBuf),
    /// A pool in memory, where one on a disk is needed.
    #[error("{path} is of class {class}; name a pool of class file-sync")]
    NoDisk {
        /// The file.
        path: PathBuf,
        /// The class.
        class: Durability,
    },
    /// A further device of the pool was not found.
    #[error(transparent)]
    Device(#[from] FindDeviceError),
    /// The file cannot be mapped.
    #[error("{path}: {cause}{}", map_hint(cause))]
    Map {
        /// The file.
        path: PathBuf,
        /// The cause.
        cause: MapError,
    },
    /// A pool of class `process` from an earlier boot, which its class does not survive.
    #[error(
        "{0} is of class process, and the machine was restarted since it was made: its medium may hold a mixture of old and new data; remove and recreate it, then attach copies to the new brick and detach the lost ones with `pagemesh replica`"
    )]
    Restarted(PathBuf),
    /// Not a pool, or a damaged one.
    #[error("{path}: {cause}")]
    Pool {
        /// The file.
        path: PathBuf,
        /// The cause.
        cause: PoolError,
    },
}

pub(crate) fn system<'p>(
    action: &'static str,
    path: &'p Path,
) -> impl Fn(io::Error) -> FileError + 'p {
    move |cause| FileError::System {
        action,
        path: path.into(),
        cause,
    }
}

/// Why the devices of a pool were not found.
#[derive(Debug, thiserror::Error)]
pub enum FindDeviceError {
    /// A device of the pool is missing.
    #[error(
        "device {device} of {pool} is missing: {cause}; connect it, or name its path with --device; if the device is lost \
         for ever, start the brick with --failed-device {device}: its pages are damaged then"
    )]
    Missing {
        /// The pool's path.
        pool: PathBuf,
        /// The device.
        device: Uuid,
        /// Where it was searched.
        cause: String,
    },
    /// An old copy of a device.
    #[error(
        "{path} is a stale copy of device {device} of {pool}: the pool was opened without it since; connect the device \
         itself, or name its path with --device; if the device is lost for ever, start the brick with \
         --failed-device {device}: its pages are damaged then"
    )]
    Stale {
        /// The pool's path.
        pool: PathBuf,
        /// The device.
        device: Uuid,
        /// The copy.
        path: PathBuf,
    },
    /// An old copy of the pool's first device.
    #[error(
        "{pool} is a stale copy of the pool's first device: {path} (device {device}) was used with a later one since; \
         start the brick with the first device itself"
    )]
    StalePool {
        /// The pool's path.
        pool: PathBuf,
        /// The device.
        device: Uuid,
        /// Its path.
        path: PathBuf,
    },
    /// A device that the operator calls failed is there.
    #[error(
        "device {device} of {pool} is not taken for failed: it is present at {path}, and its header is current; start the \
         brick without --failed-device {device}; if the device does not work all the same, disconnect it first"
    )]
    NotFailed {
        /// The pool's path.
        pool: PathBuf,
        /// The device.
        device: Uuid,
        /// Its path.
        path: PathBuf,
    },
    /// A path that the operator named is none of the pool.
    #[error(
        "{path} is no device of {pool}; name the devices that `pagemesh pool device list` shows"
    )]
    NotOfPool {
        /// The named path.
        path: PathBuf,
        /// The pool's path.
        pool: PathBuf,
    },
    /// Two paths that the operator named have one header: a device and its copy.
    #[error(
        "{one} and {other} are both device {device}, so one is a copy, and may be old; name only the right one"
    )]
    NamedTwice {
        /// A named path.
        one: PathBuf,
        /// Another one.
        other: PathBuf,
        /// The device in both headers.
        device: Uuid,
    },
}
