//! GETATTR, SETATTR, VERIFY, NVERIFY and ACCESS.

use super::handles::CurrentFile;
use super::{Compound, Done, Fault};
use crate::acl4::posix::{AclMappingError, PosixAcls, posix_acls};
use crate::acl4::{self, Ace};
use crate::nfs3::attributes::{Attributes, DeviceNumber, FileType, access};
use crate::nfs4::arguments::{self, EncodedAttributes};
use crate::nfs4::attributes::{
    AttributeChange, FileAttributes, OF_SPACE, SETTABLE, SetTime, SharedAttributes, Time,
    check_readable, encode_attributes, has_values,
};
use crate::nfs4::bitmap::{Bitmap, attribute};
use crate::nfs4::state::IoAccess;
use crate::nfs4::status::Status;
use crate::pseudo_fs::PseudoNo;
use crate::service::snapshots::View;
use crate::service::{Service, Target};
use crate::xdr::Writer;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fs::{
    AccessMask, AclKind, Acls, Attr, FILE_BYTES_MAX, InodeKind, LINKS_MAX, SetAttributes,
    SetTime as FsSetTime, Time as FsTime, WccAttr,
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
/// The rights to directories above the exports, and to `.snapshot`.
const DIRECTORY_RIGHTS: u32 = access::READ | access::LOOKUP;
/// The mode of directories above the exports.
const PSEUDO_MODE: u32 = 0o555;
/// Set-user-id, set-group-id and sticky.
const SPECIAL_MODE_BITS: u16 = 0o7000;
/// The place of the owner's rights in a mode.
const OWNER_MODE_SHIFT: u32 = 6;
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
    /// The attributes of a file of this export; `handle` is its handle, and `mounted_on` the number of the directory that it covers.
    pub(super) fn file_attributes<'h>(
        &self,
        attr: &Attr,
        mounted_on: u64,
        handle: &'h [u8],
    ) -> FileAttributes<'h> {
        let common = self.attributes(attr);
        FileAttributes {
            kind: common.kind,
            change: change_number(attr.ctime),
            size_bytes: attr.size,
            used_bytes: attr.pages.saturating_mul(PAGE_BYTES as u64),
            file_system: (self.export.file_system_id(), 0),
            handle,
            inode: common.inode,
            mounted_on,
            acl: &[],
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

    /// The attributes of a directory `.snapshot`, from the ones that NFSv3 has.
    pub(super) fn views_attributes<'h>(
        &self,
        own: &Attributes,
        handle: &'h [u8],
    ) -> FileAttributes<'h> {
        let time = |time: crate::nfs3::attributes::Time| Time {
            seconds: time.seconds.into(),
            nanoseconds: time.nanoseconds,
        };
        FileAttributes {
            kind: own.kind,
            change: change_number(crate::service::convert::time(own.changed)),
            size_bytes: own.size_bytes,
            used_bytes: own.used_bytes,
            file_system: (self.export.file_system_id(), 0),
            handle,
            inode: own.inode,
            mounted_on: own.inode,
            acl: &[],
            mode: own.mode,
            links: own.links,
            uid: own.uid,
            gid: own.gid,
            device: own.device,
            accessed: time(own.accessed),
            modified: time(own.modified),
            changed: time(own.changed),
            created: Time::default(),
        }
    }
}

impl Compound<'_> {
    /// The attributes of a directory above the exports. Its times and its change attribute follow from the time of the last load of exports.
    pub(super) fn pseudo_attributes(&self, at: PseudoNo) -> FileAttributes<'_> {
        let pseudo = &self.peer.table.pseudo;
        let change = pseudo.change();
        let loaded = Time {
            seconds: (change / NANOSECONDS as u64) as i64,
            nanoseconds: (change % NANOSECONDS as u64) as u32,
        };
        FileAttributes {
            kind: FileType::Directory,
            change,
            size_bytes: PAGE_BYTES as u64,
            used_bytes: 0,
            file_system: (0, 0),
            handle: pseudo.handle(at),
            inode: pseudo.inode(at),
            mounted_on: pseudo.inode(at),
            acl: &[],
            mode: PSEUDO_MODE,
            links: 2,
            uid: 0,
            gid: 0,
            device: DeviceNumber { major: 0, minor: 0 },
            accessed: loaded,
            modified: loaded,
            changed: loaded,
            created: loaded,
        }
    }
}

impl Service {
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
        let of_mode = |mode: u32| match wanted.contains(attribute::ACL) {
            true => acl4::aces_of(&Acls::default(), mode as u16, true),
            false => Vec::new(),
        };
        let target = match self.place()? {
            CurrentFile::Pseudo(at) => {
                let shared = service.shared_attributes(wanted, None);
                let mut file = self.pseudo_attributes(*at);
                let acl = of_mode(file.mode);
                file.acl = &acl;
                return Ok(use_them(&file, &shared));
            }
            CurrentFile::File(target) => target,
        };
        let handle = target.handle(target.id);
        let shared = service.shared_attributes(wanted, Some(target));
        if target.view == View::Directory {
            let own = target.snapshot_directory()?;
            let mut file = target.views_attributes(&own, handle.bytes());
            let acl = of_mode(file.mode);
            file.acl = &acl;
            return Ok(use_them(&file, &shared));
        }
        let (attr, acl) = target.attr_and_acl(wanted)?;
        let mounted_on = self.mounted_on(target);
        let mut file = target.file_attributes(&attr, mounted_on, handle.bytes());
        file.acl = &acl;
        Ok(use_them(&file, &shared))
    }

    pub(super) fn get_attributes(&self, wanted: Bitmap, out: &mut Writer) -> Done {
        self.place()?;
        check_readable(wanted)?;
        self.with_attributes(wanted, |file, shared| {
            encode_attributes(wanted, file, shared, out)
        })??;
        Ok(())
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
            CurrentFile::Pseudo(_) => wanted & DIRECTORY_RIGHTS,
            CurrentFile::File(target) if target.view == View::Directory => {
                wanted & DIRECTORY_RIGHTS
            }
            CurrentFile::File(target) => {
                let asked = match target.is_read_only() {
                    true => wanted & RIGHTS & !CHANGES,
                    false => wanted & RIGHTS,
                };
                let fs = &target.fs;
                let mask = fs.access_mask(target.id, &target.caller, AccessMask(asked));
                mask.map_err(|error| target.report(&error))?.0.0
            }
        };
        out.u32(wanted & RIGHTS);
        out.u32(granted);
        Ok(())
    }

    /// The set of changed attributes follows the status, also after a failure. An ACL is set after the other attributes, so that it decides
    /// about the permissions if a mode is there, too (RFC 8881, section 6.4.1.3).
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
        let acls = match &change.acl {
            Some(aces) => Some(target.posix_acls(aces, change.uid)?),
            None => None,
        };
        let others = it.attributes.attributes.without_one(attribute::ACL);
        if !others.is_empty() || acls.is_none() {
            target.set(&change)?;
        }
        if let Some(acls) = acls
            && let Err(fault) = target.set_acls(acls)
        {
            self.changed_before_failure = others;
            return Err(fault);
        }
        out.value(&it.attributes.attributes);
        Ok(())
    }
}

/// A status for the ACL of a client.
fn mapping_status(error: AclMappingError) -> Status {
    tracing::debug!(%error, "an ACL of NFSv4 is refused");
    match error {
        AclMappingError::Unsupported(_) => Status::AttributeNotSupported,
        AclMappingError::TooLong => Status::Invalid,
    }
}

/// The attributes of a new file of this user, and its ACLs. The file has the rights of its owner alone until its ACLs are set.
pub(super) fn creation(
    change: &AttributeChange,
    is_directory: bool,
    user: u32,
) -> Result<(SetAttributes, Option<PosixAcls>), Status> {
    let mut attrs = fs_changes(change);
    let Some(aces) = &change.acl else {
        return Ok((attrs, None));
    };
    let owner = change.uid.unwrap_or(user);
    let acls = posix_acls(aces, is_directory, owner).map_err(mapping_status)?;
    let of_owner = acls.access.entries().first().map_or(0, |it| it.rights);
    let special = attrs.mode.unwrap_or(0) & SPECIAL_MODE_BITS;
    attrs.mode = Some(special | of_owner << OWNER_MODE_SHIFT);
    Ok((attrs, Some(acls)))
}

impl Target<'_> {
    /// Changes attributes without the ACL.
    pub(super) fn set(&self, change: &AttributeChange) -> Done {
        let wanted = fs_changes(change);
        let fs = &self.export.fs;
        let reply = fs.set_attributes(self.id, &wanted, None, &self.caller);
        reply.result.map_err(|error| self.report(&error).into())
    }

    /// The POSIX ACLs for an ACL of NFSv4, if the file may have one. `owner` is its owner from now on.
    fn posix_acls(&self, aces: &[Ace], owner: Option<u32>) -> Result<PosixAcls, Fault> {
        let attr = self.fs.attr_of(self.id);
        let attr = attr.map_err(|error| self.report(&error))?;
        if attr.kind == InodeKind::Symlink {
            return Err(Status::AttributeNotSupported.into());
        }
        let is_directory = attr.kind == InodeKind::Directory;
        let acls = posix_acls(aces, is_directory, owner.unwrap_or(attr.uid));
        Ok(acls.map_err(mapping_status)?)
    }

    /// Sets the ACLs, in one transaction. A directory without a default ACL loses an earlier one.
    pub(super) fn set_acls(&self, acls: PosixAcls) -> Done {
        let mut changes = vec![(AclKind::Access, Some(acls.access))];
        if self.kind()? == InodeKind::Directory {
            changes.push((AclKind::Default, acls.default));
        }
        let fs = &self.export.fs;
        let reply = fs.set_acls(self.id, &changes, &self.caller);
        reply.result.map_err(|error| self.report(&error).into())
    }

    /// The attributes of a file that is no `.snapshot`, and its ACL if it is wanted.
    pub(super) fn attr_and_acl(&self, wanted: Bitmap) -> Result<(Attr, Vec<Ace>), Fault> {
        if !wanted.contains(attribute::ACL) {
            let attr = self.fs.attr_of(self.id);
            let attr = attr.map_err(|error| self.report(&error))?;
            return Ok((attr, Vec::new()));
        }
        let found = self.fs.acls_of(self.id);
        let (acls, attr) = found.map_err(|error| self.report(&error))?;
        let is_directory = attr.kind == InodeKind::Directory;
        let aces = acl4::aces_of(&acls, attr.mode, is_directory);
        Ok((attr, aces))
    }
}
