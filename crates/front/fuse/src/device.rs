//! Mounting and unmounting: mount(2) for root, fusermount3 for others.

use crate::{abort, memory};
use pagemesh_base::mounts::{MountEntry, list_mounts};
use pagemesh_base::wait::until_ready;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags, open, statx};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags as KernelFlags, OpenTreeFlags, UnmountFlags, mount, mount_remount, open_tree,
    unmount,
};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::ffi::CString;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

const DEVICE: &str = "/dev/fuse";
const HELPER: &str = "fusermount3";
/// The descriptor over which the helper sends the device's. It is the helper's standard input,
/// which a child inherits without further steps.
const HELPER_SOCKET: (&str, &str) = ("_FUSE_COMMFD", "0");
const TYPE: &str = "fuse";
const SUBTYPE: &str = "pagemesh";

/// A mount, and its device.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) file: Arc<OwnedFd>,
    dir: PathBuf,
    /// The device number of the mounted file system, as `st_dev`; none if the kernel did not report
    /// it.
    number: Option<DeviceNumber>,
}

/// Major and minor.
type DeviceNumber = (u32, u32);

/// The device of a directory's file system, without a request to it: it may hang or be dead.
fn number_at(dir: &Path) -> io::Result<DeviceNumber> {
    let told = statx(CWD, dir, AtFlags::STATX_DONT_SYNC, StatxFlags::empty())?;
    Ok((told.stx_dev_major, told.stx_dev_minor))
}

/// The options of a mount.
pub(crate) struct DeviceOptions<'h> {
    pub(crate) source: &'h str,
    pub(crate) allow_other: bool,
    pub(crate) flags: MountFlags,
}

/// Options of a mount that the kernel implements, mount(8).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MountFlags {
    /// `ro`: it refuses all changes.
    pub is_read_only: bool,
    /// `dev`: device nodes can be opened. Only root can mount so.
    pub allows_devices: bool,
    /// `suid`: set-id bits and file capabilities of programs count. Only root can mount so.
    pub allows_setid: bool,
    /// `noexec`: it executes no program.
    pub forbids_programs: bool,
    /// `sync`: each change is durable when its call returns.
    pub is_sync: bool,
    /// `dirsync`: the same for names.
    pub is_dirsync: bool,
    /// `noatime`: reads change no access time.
    pub is_noatime: bool,
    /// `nodiratime`: the same for directories.
    pub is_nodiratime: bool,
}

impl MountFlags {
    /// The options that are set, as mount(8) and mount(2) name them.
    fn names(self) -> impl Iterator<Item = (&'static str, KernelFlags)> {
        let all = [
            (self.is_read_only, "ro", KernelFlags::RDONLY),
            (!self.allows_devices, "nodev", KernelFlags::NODEV),
            (!self.allows_setid, "nosuid", KernelFlags::NOSUID),
            (self.forbids_programs, "noexec", KernelFlags::NOEXEC),
            (self.is_sync, "sync", KernelFlags::SYNCHRONOUS),
            (self.is_dirsync, "dirsync", KernelFlags::DIRSYNC),
            (self.is_noatime, "noatime", KernelFlags::NOATIME),
            (self.is_nodiratime, "nodiratime", KernelFlags::NODIRATIME),
        ];
        let set = all.into_iter().filter(|(is_set, ..)| *is_set);
        set.map(|(_, name, flag)| (name, flag))
    }

    fn bits(self) -> KernelFlags {
        let mut bits: KernelFlags = self.names().map(|(_, flag)| flag).collect();
        // Without any flag for access times, a remount keeps those that the mount has.
        bits.set(KernelFlags::RELATIME, !self.is_noatime);
        bits
    }
}

impl DeviceOptions<'_> {
    /// The options for both mount methods.
    fn common_options(&self) -> String {
        let others = if self.allow_other { ",allow_other" } else { "" };
        format!("default_permissions,subtype={SUBTYPE}{others}")
    }
}

fn open_device() -> io::Result<OwnedFd> {
    Ok(open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
}

/// Whether the kernel still has the mount, if only for open files.
pub(crate) fn is_alive(device: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(device, PollFlags::empty())];
    // A wait that the kernel refuses proves nothing.
    let _ = until_ready(&mut polled, Some(Instant::now()));
    !polled[0].revents().contains(PollFlags::ERR)
}

impl Device {
    pub(crate) fn mount(dir: &Path, how: &DeviceOptions<'_>) -> io::Result<Device> {
        let dir = dir.canonicalize()?;
        let file = match mount_as_root(&dir, how) {
            Err(cause) if cause.raw_os_error() == Some(Errno::PERM.raw_os_error()) => {
                mount_by_helper(&dir, how)
            }
            mounted => mounted,
        };
        let file = Arc::new(file?);
        let number = number_at(&dir).ok();
        Ok(Device { file, dir, number })
    }

    /// The mount in the list of this mount namespace. None: it is not there, or the list cannot be read.
    pub(crate) fn entry(&self) -> Option<MountEntry> {
        let (major, minor) = self.number?;
        let device = format!("{major}:{minor}");
        let mounts = list_mounts().ok()?.into_iter();
        let mut own = mounts.filter(|mount| mount.device == device);
        own.find(|mount| mount.dir == self.dir)
    }

    /// A further descriptor of the same connection, with requests of its own.
    pub(crate) fn clone_connection(&self) -> io::Result<OwnedFd> {
        let fresh = open_device()?;
        memory::clone_device(fresh.as_fd(), self.file.as_fd())?;
        Ok(fresh)
    }

    pub(crate) fn is_alive(&self) -> bool {
        is_alive(&self.file)
    }

    /// Whether the mount is in its place in this mount namespace. Another mount may cover it.
    fn is_in_place(&self) -> bool {
        match (self.number, number_at(&self.dir)) {
            (Some(own), Ok(found)) => own == found,
            _ => true,
        }
    }

    /// Unmounts in this namespace, unless that is done. Other mount namespaces may still have the
    /// mount: then it goes on.
    pub(crate) fn unmount(&self) -> io::Result<()> {
        if !self.is_alive() || !self.is_in_place() {
            return Ok(());
        }
        unmount_dir(&self.dir, false)
    }

    /// A detached clone of the mount: files that are open on it do not keep the mount itself from
    /// being unmounted. None: the mount is not in its place.
    pub(crate) fn clone_mount(&self) -> Result<Option<OwnedFd>, Errno> {
        if !self.is_alive() {
            return Ok(None);
        }
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let cloned = open_tree(CWD, &self.dir, flags | OpenTreeFlags::AT_SYMLINK_NOFOLLOW)?;
        let flags = AtFlags::STATX_DONT_SYNC | AtFlags::EMPTY_PATH;
        let found = statx(&cloned, c"", flags, StatxFlags::empty())?;
        let is_own = self.number == Some((found.stx_dev_major, found.stx_dev_minor));
        Ok(is_own.then_some(cloned))
    }

    /// Ends the connection for all users, in every mount namespace.
    pub(crate) fn abort(&self) -> io::Result<()> {
        if !self.is_alive() {
            return Ok(());
        }
        let taken = match self.is_in_place() {
            true => unmount_with_fallback(&self.dir, UnmountFlags::FORCE | UnmountFlags::DETACH),
            false => Ok(()),
        };
        match self.is_alive() {
            true => abort::abort_connection(self.number).and(taken),
            false => Ok(()),
        }
    }
}

/// Unmounts the file system on a directory, as root or as the mounting user. With `lazy` it leaves
/// its place at once, and ends with the last open file.
///
/// # Errors
/// If it is in use, or another user's.
pub fn unmount_dir(dir: &Path, lazy: bool) -> io::Result<()> {
    let flags = match lazy {
        true => UnmountFlags::DETACH,
        false => UnmountFlags::empty(),
    };
    unmount_with_fallback(dir, flags)
}

/// Unmounts the file system on a directory, and ends its connection for all users, in all mount
/// namespaces. For root and the mounting user.
///
/// # Errors
/// If it is another user's.
pub fn abort_dir(dir: &Path) -> io::Result<()> {
    let number = number_at(dir)?;
    match unmount(dir, UnmountFlags::FORCE | UnmountFlags::DETACH) {
        Err(Errno::PERM) => {
            abort::abort_connection(Some(number))?;
            unmount_by_helper(dir, true)
        }
        unmounted => Ok(unmounted?),
    }
}

/// Changes the options of the mount on a directory. The options for durability must stay as they are.
///
/// # Errors
/// `EBUSY` for `ro` while a file is open for writing; `EPERM` if the caller is not root.
pub fn remount_dir(dir: &Path, flags: MountFlags) -> io::Result<()> {
    Ok(mount_remount(dir, flags.bits(), "")?)
}

/// A user other than root has mounted by the helper, so the helper unmounts.
fn unmount_with_fallback(dir: &Path, flags: UnmountFlags) -> io::Result<()> {
    match unmount(dir, flags) {
        Err(Errno::PERM) => unmount_by_helper(dir, flags.contains(UnmountFlags::DETACH)),
        unmounted => Ok(unmounted?),
    }
}

fn mount_as_root(dir: &Path, how: &DeviceOptions<'_>) -> io::Result<OwnedFd> {
    let file = open_device()?;
    let options = format!(
        "fd={},rootmode={:o},user_id={},group_id={},{}",
        file.as_raw_fd(),
        std::fs::metadata(dir)?.mode(),
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw(),
        how.common_options()
    );
    let options = CString::new(options)?;
    mount(how.source, dir, TYPE, how.flags.bits(), options.as_c_str())?;
    Ok(file)
}

/// Escapes commas and backslashes, which separate options.
fn escape_option(option: &str) -> String {
    option.replace('\\', "\\\\").replace(',', "\\,")
}

/// The option that only root can mount with: fusermount3 ignores or refuses these.
fn option_for_root(flags: MountFlags) -> Option<&'static str> {
    let all = [
        (flags.allows_devices, "dev"),
        (flags.allows_setid, "suid"),
        (flags.is_nodiratime, "nodiratime"),
    ];
    let set = all.into_iter().find(|(is_set, _)| *is_set);
    set.map(|(_, name)| name)
}

fn mount_by_helper(dir: &Path, how: &DeviceOptions<'_>) -> io::Result<OwnedFd> {
    if let Some(option) = option_for_root(how.flags) {
        let cause = format!("only root can mount with the option {option}; leave it out");
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, cause));
    }
    let (theirs, ours) = UnixStream::pair()?;
    let mut options = format!(
        "fsname={},{}",
        escape_option(how.source),
        how.common_options()
    );
    for (name, _) in how.flags.names() {
        options.extend([",", name]);
    }
    let child = Command::new(HELPER)
        .args(["-o", &options, "--"])
        .arg(dir)
        .env(HELPER_SOCKET.0, HELPER_SOCKET.1)
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|cause| io::Error::new(cause.kind(), format!("{HELPER}: {cause}")))?;
    let received = receive_descriptor(&ours);
    drop(ours);
    let ended = child.wait_with_output()?;
    let said = String::from_utf8_lossy(&ended.stderr);
    match received {
        Some(file) if ended.status.success() => {
            rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::CLOEXEC)?;
            Ok(file)
        }
        _ => Err(io::Error::other(said.trim().to_owned())),
    }
}

fn receive_descriptor(socket: &UnixStream) -> Option<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    loop {
        let parts = &mut [IoSliceMut::new(&mut byte)];
        match recvmsg(socket, parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            Err(_) => return None,
            Ok(_) => break,
        }
    }
    control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    })
}

fn unmount_by_helper(dir: &Path, lazy: bool) -> io::Result<()> {
    let ended = Command::new(HELPER)
        .args(["-u", "-q"])
        .args(lazy.then_some("-z"))
        .arg("--")
        .arg(dir)
        .output()
        .map_err(|cause| io::Error::new(cause.kind(), format!("{HELPER}: {cause}")))?;
    match ended.status.success() {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "{HELPER} did not unmount: {}",
            String::from_utf8_lossy(&ended.stderr).trim()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_the_helper_refuses_are_for_root() {
        let with = |change: fn(&mut MountFlags)| {
            let mut flags = MountFlags::default();
            change(&mut flags);
            option_for_root(flags)
        };
        assert_eq!(with(|flags| flags.allows_devices = true), Some("dev"));
        assert_eq!(with(|flags| flags.allows_setid = true), Some("suid"));
        assert_eq!(with(|flags| flags.is_nodiratime = true), Some("nodiratime"));
        assert_eq!(with(|flags| flags.is_noatime = true), None);
        assert_eq!(with(|flags| flags.is_read_only = true), None);
    }

    #[test]
    fn name_with_commas_stays_one_option() {
        assert_eq!(escape_option(r"a,b\c"), r"a\,b\\c");
    }
}
