//! Ends a connection if its mount cannot be reached by a path: other mount namespaces have it, or
//! open files hold it. The kernel's control file system for FUSE has a directory for each
//! connection, named by the minor number of its device. Root and the user of the mount may write to
//! the file `abort` in it (Documentation/filesystems/fuse/fuse.rst).

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

const CONTROL: &str = "/sys/fs/fuse/connections";
const CONTROL_TYPE: &str = "fusectl";

/// Ends the connection of a device: all its requests fail, and programs cannot make further ones.
pub(crate) fn abort_connection(number: Option<(u32, u32)>) -> io::Result<()> {
    let unknown = || io::Error::other("the device number of the mount is not known");
    let (_, minor) = number.ok_or_else(unknown)?;
    match write_abort_file(CWD, &format!("{CONTROL}/{minor}/abort")) {
        // The control file system is not mounted here, as in many containers.
        Err(Errno::NOENT) => {
            write_abort_file(mount_control_fs()?.as_fd(), &format!("{minor}/abort"))
        }
        ended => ended,
    }?;
    Ok(())
}

fn write_abort_file(dir: impl AsFd, path: &str) -> rustix::io::Result<()> {
    let file = openat(dir, path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, b"1").map(drop)
}

/// A detached mount of the control file system. For root.
fn mount_control_fs() -> rustix::io::Result<OwnedFd> {
    let context = fsopen(CONTROL_TYPE, FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(context.as_fd())?;
    let flags = FsMountFlags::FSMOUNT_CLOEXEC;
    fsmount(context.as_fd(), flags, MountAttrFlags::empty())
}
