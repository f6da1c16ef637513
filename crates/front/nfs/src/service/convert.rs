//! Values of the file system, as the wire has them, and back.

use super::Target;
use super::snapshots::View;
use crate::nfs3::attributes::{
    self as wire, Attributes, ChangeAttributes, DeviceNumber, EarlierAttributes, FileType,
};
use crate::nfs3::status::Status;
use pagemesh_base::space::SpaceError;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fs::{Attr, FsError, InodeKind, SetAttributes, SetTime, Time, Wcc, WccAttr};
use rustix::io::Errno;

/// The status of an error. A fenced file system has none: see [`super::NoReply::Fenced`].
pub(super) fn status(error: &FsError) -> Status {
    match error {
        FsError::Posix(errno) => errno_status(*errno),
        FsError::Space(error) => match error {
            SpaceError::NoSpace(_) => Status::NoSpace,
            SpaceError::Unavailable(_) | SpaceError::Busy(_) | SpaceError::Fenced => {
                Status::Jukebox
            }
            SpaceError::OutOfRange { .. }
            | SpaceError::Damaged { .. }
            | SpaceError::Unsupported(_) => Status::Io,
        },
        FsError::Damaged { .. } => Status::Io,
        // The file system stopped because its volume did not answer. The next server goes on.
        FsError::Stopped(SpaceError::Unavailable(_) | SpaceError::Busy(_) | SpaceError::Fenced) => {
            Status::Jukebox
        }
        FsError::ReadOnly(_) | FsError::Snapshot | FsError::Stopped(_) => Status::ReadOnly,
    }
}

fn errno_status(errno: Errno) -> Status {
    match errno {
        Errno::PERM => Status::Permission,
        Errno::NOENT => Status::NoEntry,
        Errno::IO | Errno::UCLEAN => Status::Io,
        Errno::NXIO => Status::NoDevice,
        Errno::ACCESS => Status::Access,
        Errno::EXIST => Status::Exists,
        Errno::XDEV => Status::CrossDevice,
        Errno::NODEV => Status::DeviceUnsuitable,
        Errno::NOTDIR => Status::NotDirectory,
        Errno::ISDIR => Status::IsDirectory,
        Errno::INVAL => Status::Invalid,
        Errno::FBIG => Status::FileTooLarge,
        Errno::NOSPC => Status::NoSpace,
        Errno::ROFS => Status::ReadOnly,
        Errno::MLINK => Status::TooManyLinks,
        Errno::NAMETOOLONG => Status::NameTooLong,
        Errno::NOTEMPTY => Status::NotEmpty,
        Errno::DQUOT => Status::Quota,
        Errno::STALE => Status::Stale,
        Errno::OPNOTSUPP => Status::NotSupported,
        Errno::AGAIN | Errno::BUSY => Status::Jukebox,
        _ => Status::ServerFault,
    }
}

fn wire_time(time: Time) -> wire::Time {
    wire::Time::nearest(time.sec, time.nsec)
}

/// A time of a client.
pub(super) fn time(time: wire::Time) -> Time {
    Time {
        sec: time.seconds.into(),
        nsec: time.nanoseconds,
    }
}

fn file_type(kind: InodeKind) -> FileType {
    match kind {
        InodeKind::File => FileType::Regular,
        InodeKind::Directory => FileType::Directory,
        InodeKind::Symlink => FileType::Symlink,
        InodeKind::Fifo => FileType::Fifo,
        InodeKind::CharDevice => FileType::CharacterDevice,
        InodeKind::BlockDevice => FileType::BlockDevice,
        InodeKind::Socket => FileType::Socket,
    }
}

/// The parts of a device number as Linux encodes it in 32 bits (`new_encode_dev`).
fn device_number(device: u32) -> DeviceNumber {
    DeviceNumber {
        major: device >> 8 & 0xfff,
        minor: device & 0xff | device >> 12 & 0xf_ff00,
    }
}

/// The inverse of [`device_number`]; none if the kernel has no room for the parts.
pub(super) fn encoded_device(number: DeviceNumber) -> Option<u32> {
    let DeviceNumber { major, minor } = number;
    let fits = major <= 0xfff && minor <= 0xf_ffff;
    fits.then_some(minor & 0xff | major << 8 | (minor & 0xf_ff00) << 12)
}

fn earlier(before: WccAttr) -> EarlierAttributes {
    EarlierAttributes {
        size_bytes: before.size,
        modified: wire_time(before.mtime),
        changed: wire_time(before.ctime),
    }
}

/// The change that a client asks for.
pub(super) fn changes(wanted: &wire::SetAttributes) -> Result<SetAttributes, Status> {
    wanted.check()?;
    let set_time = |set| match set {
        wire::SetTime::Keep => None,
        wire::SetTime::ToServerTime => Some(SetTime::Now),
        wire::SetTime::To(at) => Some(SetTime::At(time(at))),
    };
    let mode = wanted.mode.map(|mode| (mode & wire::MODE_BITS) as u16);
    Ok(SetAttributes {
        mode,
        uid: wanted.uid,
        gid: wanted.gid,
        size: wanted.size_bytes,
        atime: set_time(wanted.accessed),
        mtime: set_time(wanted.modified),
    })
}

impl Target<'_> {
    pub(super) fn attributes(&self, attr: &Attr) -> Attributes {
        self.attributes_in(self.view, attr)
    }

    /// The attributes of a file of another view.
    pub(super) fn attributes_in(&self, view: View, attr: &Attr) -> Attributes {
        Attributes {
            kind: file_type(attr.kind),
            mode: attr.mode.into(),
            links: attr.links,
            uid: attr.uid,
            gid: attr.gid,
            size_bytes: attr.size,
            used_bytes: attr.pages.saturating_mul(PAGE_BYTES as u64),
            device: device_number(attr.device),
            file_system: self.export.file_system_id(),
            inode: view.file_number(attr.ino),
            accessed: wire_time(attr.atime),
            modified: wire_time(attr.mtime),
            changed: wire_time(attr.ctime),
        }
    }

    /// The attributes after an operation.
    pub(super) fn after(&self, wcc: &Wcc) -> Option<Attributes> {
        wcc.after.as_ref().map(|attr| self.attributes(attr))
    }

    /// The attributes around a change.
    pub(super) fn around(&self, wcc: &Wcc) -> ChangeAttributes {
        ChangeAttributes {
            before: wcc.before.map(earlier),
            after: self.after(wcc),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_are_split_as_linux_does() {
        let check = |device, major, minor| {
            let number = DeviceNumber { major, minor };
            assert_eq!(device_number(device), number);
            assert_eq!(encoded_device(number), Some(device));
        };
        check(0x0801, 8, 1);
        check(0xfff0_00ff, 0, 0xf_ffff);
        check(0x000f_ff00, 0xfff, 0);
        check(0x1230_4567, 0x45, 0x1_2367);
        for (major, minor) in [(0x1000, 0), (0, 0x10_0000), (u32::MAX, u32::MAX)] {
            assert_eq!(encoded_device(DeviceNumber { major, minor }), None);
        }
    }

    #[test]
    fn errors_have_the_status_of_their_cause() {
        let text = || String::from("x");
        let check = |error: FsError, wanted| assert_eq!(status(&error), wanted, "{error}");
        check(Errno::STALE.into(), Status::Stale);
        check(Errno::NOTEMPTY.into(), Status::NotEmpty);
        check(Errno::PIPE.into(), Status::ServerFault);
        check(SpaceError::NoSpace(text()).into(), Status::NoSpace);
        check(SpaceError::Unavailable(text()).into(), Status::Jukebox);
        check(SpaceError::Busy(text()).into(), Status::Jukebox);
        check(SpaceError::Unsupported(text()).into(), Status::Io);
        check(FsError::Snapshot, Status::ReadOnly);
        check(FsError::ReadOnly(text()), Status::ReadOnly);
        let stopped = FsError::Stopped(SpaceError::Unavailable(text()));
        check(stopped, Status::Jukebox);
        let stopped = FsError::Stopped(SpaceError::Unsupported(text()));
        check(stopped, Status::ReadOnly);
    }

    #[test]
    fn fenced_errors_are_told_apart() {
        use super::super::is_fenced;
        assert!(is_fenced(&SpaceError::Fenced.into()));
        assert!(is_fenced(&FsError::Stopped(SpaceError::Fenced)));
        assert!(!is_fenced(&FsError::Snapshot));
        assert!(!is_fenced(&SpaceError::Busy("x".into()).into()));
    }
}
