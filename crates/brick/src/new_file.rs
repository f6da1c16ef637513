//! A file that becomes a pool as a whole, or does not exist.

use crate::file_error::{FileError, system};
use rustix::fs::{AtFlags, CWD, linkat};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The directory of a file.
pub(crate) fn dir_of(path: &Path) -> &Path {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
}

/// A file in the making. It gets its name only once it is a pool, so a process that is killed
/// before, for example by the kernel when memory is short, leaves nothing behind. On a file system
/// without unnamed files the file has its name from the start, and is removed if this value is
/// dropped before the end.
pub(crate) struct NewFile<'p> {
    pub(crate) file: File,
    path: &'p Path,
    is_named: bool,
    is_persisted: bool,
}

impl NewFile<'_> {
    pub(crate) fn create(path: &Path) -> Result<NewFile<'_>, FileError> {
        if path.symlink_metadata().is_ok() {
            return Err(FileError::Exists(path.into()));
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600);
        let unnamed = options
            .clone()
            .custom_flags(nix::libc::O_TMPFILE)
            .open(dir_of(path));
        let (file, is_named) = match unnamed {
            Ok(file) => (file, false),
            Err(cause) if lacks_tmpfile(&cause) => {
                let named = options.create_new(true).open(path);
                (
                    named.map_err(|cause| exists_or_system("create", path, cause))?,
                    true,
                )
            }
            Err(cause) => return Err(system("create", path)(cause)),
        };
        Ok(NewFile {
            file,
            path,
            is_named,
            is_persisted: false,
        })
    }

    pub(crate) fn persist(mut self) -> Result<(), FileError> {
        if !self.is_named {
            // open(2) documents this for files of O_TMPFILE.
            let own = format!("/proc/self/fd/{}", self.file.as_raw_fd());
            linkat(CWD, own, CWD, self.path, AtFlags::SYMLINK_FOLLOW)
                .map_err(|cause| exists_or_system("name", self.path, cause.into()))?;
        }
        self.is_persisted = true;
        // A pool or a superblock may name the file from now on, so its name must survive power loss.
        let dir = dir_of(self.path);
        let synced = File::open(dir).and_then(|dir| dir.sync_all());
        synced.map_err(system("sync", dir))
    }
}

impl Drop for NewFile<'_> {
    fn drop(&mut self) {
        if self.is_named && !self.is_persisted {
            // The error to report is the first one.
            let _ = std::fs::remove_file(self.path);
        }
    }
}

/// Whether a file system does not support O_TMPFILE, by the errors of open(2).
fn lacks_tmpfile(cause: &io::Error) -> bool {
    let codes = [
        nix::libc::EOPNOTSUPP,
        nix::libc::EISDIR,
        nix::libc::EINVAL,
        nix::libc::ENOENT,
    ];
    let code = cause.raw_os_error();
    code.is_some_and(|code| codes.contains(&code))
}

fn exists_or_system(action: &'static str, path: &Path, cause: io::Error) -> FileError {
    match cause.kind() {
        io::ErrorKind::AlreadyExists => FileError::Exists(path.into()),
        _ => system(action, path)(cause),
    }
}
