//! The reads that a mount records.

use crate::format::inode::Inode;

/// The reads that set the access time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadTimes {
    /// Those of files, links and directories, once after a change and once in a day (`relatime`).
    #[default]
    Relative,
    /// The same without directories (`nodiratime`).
    WithoutDirectories,
    /// None (`noatime`).
    None,
}

impl ReadTimes {
    pub(crate) fn include(self, inode: &Inode) -> bool {
        match self {
            ReadTimes::Relative => true,
            ReadTimes::WithoutDirectories => !inode.is_directory(),
            ReadTimes::None => false,
        }
    }
}
