//! Errors of changes to the devices of a pool.

use crate::device_file::DeviceFileError;
use pagemesh_pmem::MapError;
use pagemesh_store::pool::ObjectError;
use pagemesh_store::recovery::PoolError;
use std::path::PathBuf;

/// Why the devices of a pool cannot be changed so.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The file or block device cannot be used.
    #[error(transparent)]
    File(#[from] DeviceFileError),
    /// The pool refuses.
    #[error(transparent)]
    Pool(#[from] ObjectError),
    /// The tables of the device cannot be planned any more.
    #[error(transparent)]
    Plan(#[from] PoolError),
    /// The medium cannot use it.
    #[error("{path} cannot join the pool: {cause}")]
    Attach {
        /// The file.
        path: PathBuf,
        /// The cause.
        cause: MapError,
    },
    /// The superblock has no room for its path.
    #[error(
        "the pool has no room for the path {0}: all its further devices have 738 bytes for their paths; use a shorter path, \
         for example through a symbolic link"
    )]
    LongPath(PathBuf),
    /// The first device stays.
    #[error(
        "the first device of a pool cannot be drained, because it has the journals and tables; move the volumes to another pool instead"
    )]
    FirstDevice,
    /// The pool failed or the brick ends.
    #[error("the brick ends; start it again and repeat the request")]
    Ending,
}
