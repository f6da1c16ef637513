//! Why an operation failed, and the number that a program gets to see.

use crate::format::Corruption;
use pagemesh_base::space::SpaceError;
use rustix::io::Errno;

/// Why an operation on a file system failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FsError {
    /// What POSIX has a number for, and nothing else is to be said of.
    #[error("{0}")]
    Posix(Errno),
    /// The volume behind it failed.
    #[error("the volume failed: {0}")]
    Space(#[from] SpaceError),
    /// What lies in the volume makes no sense.
    #[error("{what} is damaged: {cause}; 'pagemesh volume check' compares the copies")]
    Damaged {
        /// Inode, directory or page.
        what: String,
        /// What is wrong.
        cause: Corruption,
    },
    /// Something in it was found damaged before.
    #[error(
        "the file system is damaged, and only what is sound of it can be read: {0}. Copy that \
         to another file system, made with 'pagemesh fs create'; 'pagemesh volume check' tells \
         whether another copy of the volume differs"
    )]
    ReadOnly(String),
    /// A change failed in a way that leaves unknown whether it happened.
    #[error(
        "the file system takes no more changes, because one failed: {0}; unmount it, see to \
         the volume, and mount it again"
    )]
    Stopped(SpaceError),
}

/// What an operation gives.
pub type Result<T> = std::result::Result<T, FsError>;

impl From<Errno> for FsError {
    fn from(errno: Errno) -> FsError {
        FsError::Posix(errno)
    }
}

impl FsError {
    /// What a program that called the kernel gets to see.
    #[must_use]
    pub fn errno(&self) -> Errno {
        match self {
            FsError::Posix(errno) => *errno,
            FsError::Space(SpaceError::NoSpace(_)) => Errno::NOSPC,
            FsError::Stopped(_) | FsError::ReadOnly(_) => Errno::ROFS,
            FsError::Damaged { .. } => Errno::UCLEAN,
            FsError::Space(_) => Errno::IO,
        }
    }
}
