//! Errors of operations, and their `errno` for programs.

use pagemesh_base::space::SpaceError;
use rustix::io::Errno;

/// Inconsistent bytes: not written by pagemesh, or by one with a defect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Corruption(pub String);

/// Why an operation on a file system failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FsError {
    /// An error that POSIX has a number for.
    #[error("{0}")]
    Posix(Errno),
    /// The volume behind it failed.
    #[error("the volume failed: {0}")]
    Space(#[from] SpaceError),
    /// The data in the volume is inconsistent.
    #[error("{what} is damaged: {cause}; 'pagemesh volume check' compares the copies")]
    Damaged {
        /// Inode, directory or page.
        what: String,
        /// The inconsistency.
        cause: Corruption,
    },
    /// The file system takes no changes, because damage was found before.
    #[error(
        "the file system is damaged, and only its undamaged parts can be read: {0}. Copy them to \
         another file system, made with 'pagemesh fs create'; 'pagemesh volume check' shows \
         whether another copy of the volume differs"
    )]
    ReadOnly(String),
    /// The file system is that of a snapshot.
    #[error("a snapshot takes no changes; change the files of its volume, or copy them")]
    Snapshot,
    /// An earlier change failed, and its outcome is unknown.
    #[error(
        "the file system takes no more changes, because one failed: {0}; unmount it, check \
         the volume, and mount it again"
    )]
    Stopped(SpaceError),
}

/// The result of an operation.
pub type Result<T> = std::result::Result<T, FsError>;

impl From<Errno> for FsError {
    fn from(errno: Errno) -> FsError {
        FsError::Posix(errno)
    }
}

impl FsError {
    /// The error number that a program gets.
    #[must_use]
    pub fn errno(&self) -> Errno {
        match self {
            FsError::Posix(errno) => *errno,
            FsError::Space(SpaceError::NoSpace(_)) => Errno::NOSPC,
            FsError::Stopped(_) | FsError::ReadOnly(_) | FsError::Snapshot => Errno::ROFS,
            FsError::Damaged { .. } => Errno::UCLEAN,
            FsError::Space(_) => Errno::IO,
        }
    }
}
