//! GETATTR, SETATTR, VERIFY, NVERIFY and ACCESS.

use super::handles::{CurrentFile, ROOT_HANDLE};
use super::{Compound, Done, Fault};
use crate::nfs3::attributes::{DeviceNumber, FileType, access};
use crate::nfs4::arguments::{self, EncodedAttributes};
use crate::nfs4::attributes::{
    AttributeChange, FileAttributes, OF_SPACE, SETTABLE, SetTime, SharedAttributes, Time,
    check_readable, encode_attributes, has_values,
};
use crate::nfs4::bitmap::Bitmap;
use crate::nfs4::state::IoAccess;
use crate::nfs4::status::Status;
use crate::service::{Service, Target};
use crate::xdr::Writer;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fs::{
    AccessMask, Attr, FILE_BYTES_MAX, LINKS_MAX, SetAttributes, SetTime as FsSetTime,
    Time as FsTime, WccAttr,
};

/// The rights that ACCESS knows.
const RIGHTS: u32 = access::READ
    | access::LOOKUP
    | access::MODIFY
    | access::EXTEND
    | access::DELETE
    | access::EXECUTE;
/// The rights that a read-only export does not give.
const CHANGES: u32 = access::MODIFY | access::EXTEND | access::DELETE;
/// The rights to the root of all exports.
const ROOT_RIGHTS: u32 = access::READ | access::LOOKUP;
/// The number of the root of all exports in its own file system.
const ROOT_INODE: u64 = 1;
/// The mode of the root of all exports.
const ROOT_MODE: u32 = 0o555;
const NANOSECONDS: i64 = 1_000_000_000;

/// The change attribute (RFC 8881, section 5.8.1.4): changes of an inode have rising times, in
/// nanoseconds.
pub(super) fn change_number(changed: FsTime) -> u64 {
    let seconds = changed.sec.wrapping_mul(NANOSECONDS);
    seconds.wrapping_add(changed.nsec.into()) as u64
}

/// The change attribute of a directory before its change.
pub(super) fn change_before(before: &WccAttr) -> u64 {
    change_number(before.ctime)
}

fn wire_time(time: FsTime) -> Time {
    Time {
        seconds: time.sec,
        nanoseconds: time.nsec,
    }
}

/// The change of a client, as the file system takes it.
pub(super) fn fs_changes(change: &AttributeChange) -> SetAttributes {
    let set_time = |set| match set {
        SetTime::ToServerTime => FsSetTime::Now,
        SetTime::To(time) => FsSetTime::At(FsTime {
            sec: time.seconds,
            nsec: time.nanoseconds,
        }),
    };
    SetAttributes {
        mode: change.mode.map(|mode| mode as u16),
        uid: change.uid,
        gid: change.gid,
        size: change.size_bytes,
        atime: change.accessed.map(set_time),
        mtime: change.modified.map(set_time),
    }
}

impl Target<'_> {
    /// The attributes of a file of this export; `handle` is its handle.
    pub(super) fn file_attributes<'h>(&self, attr: &Attr, handle: &'h [u8]) -> FileAttributes<'h> {
        let common = self.attributes(attr);
        let inode = attr.ino.0;
        FileAttributes {
            kind: common.kind,
            change: change_number(attr.ctime),
            size_bytes: attr.size,
            used_bytes: attr.pages.saturating_mul(PAGE_BYTES as u64),
            file_system: (self.export.file_system_id(), 0),
            handle,
            inode,
            mounted_on: match self.with(attr).is_root() {
                true => self.export.file_system_id(),
                false => inode,
            },
            mode: attr.mode.into(),
            links: attr.links,
            uid: attr.uid,
            gid: attr.gid,
            device: common.device,
            accessed: wire_time(attr.atime),
            modified: wire_time(attr.mtime),
            changed: wire_time(attr.ctime),
            created: wire_time(attr.btime),
        }
    }
}

impl Service {
    /// The attributes of the root of all exports.
    fn root_attributes(&self) -> FileAttributes<'static> {
        let time = Time::default();
        FileAttributes {
            kind: FileType::Directory,
            change: 0,
            size_bytes: PAGE_BYTES as u64,
            used_bytes: 0,
            file_system: (0, 0),
            handle: ROOT_HANDLE,
            inode: ROOT_INODE,
            mounted_on: ROOT_INODE,
            mode: ROOT_MODE,
            links: 2,
            uid: 0,
            gid: 0,
            device: DeviceNumber { major: 0, minor: 0 },
            accessed: time,
            modified: time,
            changed: time,
            created: time,
        }
    }

    /// The values that files share, with the space of a file system if one is wanted.
    pub(super) fn shared_attributes(
        &self,
        wanted: Bitmap,
        target: Option<&Target<'_>>,
    ) -> SharedAttributes<'_> {
        let target = target.filter(|_| !wanted.and(OF_SPACE).is_empty());
        SharedAttributes {
            lease_seconds: self.nfs4.lease_seconds(),
            file_bytes_max: FILE_BYTES_MAX,
            links_max: LINKS_MAX,
            identities: &*self.nfs4.identities,
            space: target.map(|target| target.space_with(None)),
        }
    }
}

impl Compound<'_> {
    /// Calls `use_them` with the attributes of the current file.
    fn with_attributes<T>(
        &self,
        wanted: Bitmap,
        use_them: impl FnOnce(&FileAttributes<'_>, &SharedAttributes<'_>) -> T,
    ) -> Result<T, Fault> {
        let service = self.service;
        match self.place()? {
            CurrentFile::Root => {
                let shared = service.shared_attributes(wanted, None);
                Ok(use_them(&service.root_attributes(), &shared))
            }
            CurrentFile::File(target) => {
                let attr = target.export.fs.attr_of(target.id);
                let attr = attr.map_err(|error| target.report(&error))?;
                let handle = target.handle(target.id);
                let shared = service.shared_attributes(wanted, Some(target));
                let file = target.file_attributes(&attr, handle.bytes());
                Ok(use_them(&file, &shared))
            }
        }
    }

    pub(super) fn get_attributes(&self, wanted: Bitmap, out: &mut Writer) -> Done {
        self.place()?;
        check_readable(wanted)?;
        self.with_attributes(wanted, |file, shared| {
            encode_attributes(wanted, file, shared, out);
        })
    }

    pub(super) fn verify(&self, wanted: &EncodedAttributes<'_>, is_equal: bool) -> Done {
        let has = self.with_attributes(wanted.attributes, |file, shared| {
            has_values(wanted, file, shared)
        })?;
        match (has?, is_equal) {
            (true, true) | (false, false) => Ok(()),
            (true, false) => Err(Status::Same.into()),
            (false, true) => Err(Status::NotSame.into()),
        }
    }

    pub(super) fn access(&self, wanted: u32, out: &mut Writer) -> Done {
        let granted = match self.place()? {
            CurrentFile::Root => wanted & ROOT_RIGHTS,
            CurrentFile::File(target) => {
                let asked = match target.options.is_read_only {
                    true => wanted & RIGHTS & !CHANGES,
                    false => wanted & RIGHTS,
                };
                let fs = &target.export.fs;
                let mask = fs.access_mask(target.id, &target.caller, AccessMask(asked));
                mask.map_err(|error| target.report(&error))?.0.0
            }
        };
        out.u32(wanted & RIGHTS);
        out.u32(granted);
        Ok(())
    }

    /// The set of changed attributes follows the status, also after a failure.
    pub(super) fn set_attributes(
        &mut self,
        it: &arguments::SetAttributes<'_>,
        out: &mut Writer,
    ) -> Done {
        let identities = &*self.service.nfs4.identities;
        let target = self.changed_file()?;
        let change = AttributeChange::decode(&it.attributes, SETTABLE, identities)?;
        if change.size_bytes.is_some() {
            self.check_io(target, it.stateid, IoAccess::Write)?;
        }
        target.set(&change)?;
        out.value(&it.attributes.attributes);
        Ok(())
    }
}

impl Target<'_> {
    /// Changes attributes.
    pub(super) fn set(&self, change: &AttributeChange) -> Done {
        let wanted = fs_changes(change);
        let fs = &self.export.fs;
        let reply = fs.set_attributes(self.id, &wanted, None, &self.caller);
        reply.result.map_err(|error| self.report(&error).into())
    }

    /// The attributes of the file, which must exist.
    pub(super) fn attr(&self) -> Result<Attr, Fault> {
        let attr = self.export.fs.attr_of(self.id);
        attr.map_err(|error| self.report(&error).into())
    }
}
