//! CREATE, LINK, REMOVE, RENAME and READLINK.

use super::attributes::{change_before, change_number, creation};
use super::handles::{changed, checked_name};
use super::{Compound, Done};
use crate::nfs3::attributes::DeviceNumber;
use crate::nfs3::names::FileName;
use crate::nfs4::arguments::{Create, CreateType, Rename};
use crate::nfs4::attributes::{AttributeChange, SETTABLE};
use crate::nfs4::status::Status;
use crate::service::snapshots::View;
use crate::service::{Target, convert};
use crate::xdr::Writer;
use pagemesh_fs::{FsError, InodeKind, Wcc};
use rustix::io::Errno;

/// Appends the change of a directory (`change_info4`).
pub(super) fn encode_change(wcc: &Wcc, out: &mut Writer) {
    let after = wcc.after.as_ref().map(|attr| change_number(attr.ctime));
    let after = after.unwrap_or_default();
    out.bool(wcc.before.is_some() && wcc.after.is_some());
    out.u64(wcc.before.as_ref().map_or(after, change_before));
    out.u64(after);
}

impl<'a> Compound<'a> {
    /// The new file becomes the current one.
    pub(super) fn create(&mut self, it: &Create<'_>, out: &mut Writer) -> Done {
        let target = self.changed_file()?;
        let name = checked_name(it.name)?;
        target.check_new_name(name).map_err(Status::from)?;
        let identities = &*self.service.nfs4.identities;
        let change = AttributeChange::decode(&it.attributes, SETTABLE, identities)?;
        if change.acl.is_some() && matches!(it.kind, CreateType::Symlink(_)) {
            return Err(Status::AttributeNotSupported.into());
        }
        let is_directory = matches!(it.kind, CreateType::Directory);
        let (attrs, acls) = creation(
            &change,
            is_directory,
            target.options.user(self.peer.credential),
        )?;
        let (fs, caller) = (&target.export.fs, &target.caller);
        let reply = match it.kind {
            CreateType::Directory => fs.make_directory_at(target.id, name, &attrs, caller),
            CreateType::Symlink(path) => {
                let path = path.check().map_err(Status::from)?;
                fs.symlink_at(target.id, name, path, &attrs, caller)
            }
            CreateType::Socket => {
                fs.make_node_at(target.id, name, (InodeKind::Socket, 0), &attrs, caller)
            }
            CreateType::Fifo => {
                fs.make_node_at(target.id, name, (InodeKind::Fifo, 0), &attrs, caller)
            }
            CreateType::Device {
                is_block,
                major,
                minor,
            } => {
                let device = convert::encoded_device(DeviceNumber { major, minor });
                let kind = match is_block {
                    true => InodeKind::BlockDevice,
                    false => InodeKind::CharDevice,
                };
                let node = (kind, device.ok_or(Status::Invalid)?);
                fs.make_node_at(target.id, name, node, &attrs, caller)
            }
            CreateType::Unsuitable(_) => return Err(Status::BadType.into()),
        };
        let attr = reply.result.map_err(|error| target.report(&error))?;
        let created = target.with(&attr);
        if let Some(acls) = acls {
            created.set_acls(acls)?;
        }
        encode_change(&reply.wcc, out);
        out.value(&it.attributes.attributes);
        self.current = Some(super::handles::CurrentFile::File(created));
        self.stateids.clear();
        Ok(())
    }

    pub(super) fn link(&self, name: FileName<'_>, out: &mut Writer) -> Done {
        let directory = self.changed_file()?;
        let file = changed(self.saved_place()?)?;
        check_same_file_system(file, directory)?;
        let name = checked_name(name)?;
        directory.check_new_name(name).map_err(Status::from)?;
        let fs = &file.export.fs;
        let reply = fs.link_at(file.id, directory.id, name, &file.caller);
        match reply.result {
            Ok(()) => {
                encode_change(&reply.directory, out);
                Ok(())
            }
            Err(FsError::Posix(Errno::PERM))
                if reply
                    .file
                    .after
                    .is_some_and(|attr| attr.kind == InodeKind::Directory) =>
            {
                Err(Status::IsDirectory.into())
            }
            Err(error) => Err(file.report(&error).into()),
        }
    }

    /// Removes files and empty directories.
    pub(super) fn remove(&self, name: FileName<'_>, out: &mut Writer) -> Done {
        let target = self.changed_file()?;
        let name = checked_name(name)?;
        let (fs, caller) = (&target.export.fs, &target.caller);
        let mut reply = fs.remove_at(target.id, name, caller);
        if matches!(reply.result, Err(FsError::Posix(Errno::ISDIR))) {
            reply = fs.remove_directory_at(target.id, name, caller);
        }
        let removed = reply.result.map_err(|error| target.report(&error))?;
        target.name_removed(removed);
        encode_change(&reply.wcc, out);
        Ok(())
    }

    pub(super) fn rename(&self, it: &Rename<'_>, out: &mut Writer) -> Done {
        let to = self.changed_file()?;
        let from = changed(self.saved_place()?)?;
        check_same_file_system(from, to)?;
        let names = (checked_name(it.from)?, checked_name(it.to)?);
        to.check_new_name(names.1).map_err(Status::from)?;
        let fs = &from.export.fs;
        let reply = fs.rename_at((from.id, names.0), (to.id, names.1), &from.caller);
        let replaced = match reply.result {
            Ok(replaced) => replaced,
            // RFC 8881, section 18.26.4: the existing target is not of a fitting type.
            Err(FsError::Posix(Errno::ISDIR | Errno::NOTDIR))
                if is_directory(&reply.from) && is_directory(&reply.to) =>
            {
                return Err(Status::Exists.into());
            }
            Err(FsError::Posix(Errno::NOTEMPTY)) => return Err(Status::Exists.into()),
            Err(error) => return Err(from.report(&error).into()),
        };
        if let Some(replaced) = replaced {
            to.name_removed(replaced);
        }
        encode_change(&reply.from, out);
        encode_change(&reply.to, out);
        Ok(())
    }

    pub(super) fn read_symlink(&self, out: &mut Writer) -> Done {
        let target = self.file_or(Status::WrongType)?;
        if target.view == View::Directory {
            return Err(Status::WrongType.into());
        }
        let reply = target.fs.read_link_at(target.id);
        match reply.result {
            Ok(path) => {
                out.opaque(&path);
                Ok(())
            }
            Err(FsError::Posix(Errno::INVAL)) => Err(Status::WrongType.into()),
            Err(error) => Err(target.report(&error).into()),
        }
    }
}

fn is_directory(wcc: &Wcc) -> bool {
    let after = wcc.after.as_ref();
    after.is_some_and(|attr| attr.kind == InodeKind::Directory)
}

fn check_same_file_system(one: &Target<'_>, other: &Target<'_>) -> Done {
    match one.export.is_same(&other.export) {
        true => Ok(()),
        false => Err(Status::CrossDevice.into()),
    }
}
