//! Remedies for errors of the system, as texts.

use pagemesh_pmem::MapError;
use std::io;

/// The remedy for an error of the system, if one is known.
pub(crate) fn io_hint(cause: &io::Error) -> &'static str {
    match cause.kind() {
        io::ErrorKind::NotFound => {
            "; check the path: a pool is made by `pagemesh pool create`, in a directory that is there"
        }
        io::ErrorKind::PermissionDenied => "; run this as a user with write access to it",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; make room on its file system, or choose a smaller --size"
        }
        io::ErrorKind::FileTooLarge => {
            "; choose a smaller --size, or a file system for larger files"
        }
        io::ErrorKind::Unsupported => "; choose a file system that allocates ahead, as ext4 or xfs",
        io::ErrorKind::ReadOnlyFilesystem => "; choose a path that can be written",
        io::ErrorKind::IsADirectory => "; name a file or a device",
        _ => "",
    }
}

pub(crate) fn map_hint(cause: &MapError) -> &'static str {
    let MapError::System { cause, .. } = cause else {
        return "";
    };
    match cause.raw_os_error() {
        Some(nix::libc::ENODEV) => "; name a plain file, a block device or a DAX device",
        Some(nix::libc::ENOMEM | nix::libc::EFAULT) => {
            "; more memory is needed: make room, or choose a smaller --size"
        }
        _ => "",
    }
}
