//! LOOKUP, CREATE, MKDIR, SYMLINK, MKNOD, REMOVE, RMDIR, RENAME and LINK.

use super::{Failed, Outcome, Service, Target, convert};
use crate::limits::PARENT_STEPS_MAX;
use crate::nfs3::attributes::{Attributes, ChangeAttributes};
use crate::nfs3::names::{
    CreateArguments, CreateMode, CreatedFile, DirectoryName, LinkArguments, LinkedFile,
    LookedUpFile, MakeDirectoryArguments, MakeNodeArguments, RenameArguments, RenamedDirectories,
    SpecialFile, SymlinkArguments,
};
use crate::nfs3::status::Status;
use crate::peer::PeerCredential;
use pagemesh_fs::{
    Attr, Caller, CreateMode as FsCreateMode, FileId, FsError, Ino, InodeKind, SetAttributes,
    WccReply,
};
use rustix::io::Errno;

/// The result of a procedure that makes a file.
type Creation = Outcome<CreatedFile, ChangeAttributes>;
/// The result of a procedure that removes a name.
type Removal = Outcome<ChangeAttributes, ChangeAttributes>;

impl Target<'_> {
    /// The file with this name. `..` of the root is the root: the file system stores it so. In the
    /// export of a directory, `..` ends at that directory, and a directory that was moved out of the
    /// export has no `..`.
    pub(super) fn find(&self, name: &[u8]) -> WccReply<Attr> {
        let fs = &self.fs;
        let Some(root) = self.export.directory.filter(|_| name == b"..") else {
            return fs.lookup_at(self.id, name, &self.caller);
        };
        if self.id == root {
            return fs.lookup_at(self.id, b".", &self.caller);
        }
        let reply = fs.lookup_at(self.id, name, &self.caller);
        let is_below = |attr: &Attr| self.is_below(root, attr.file_id());
        let result = reply.result.and_then(|attr| match is_below(&attr)? {
            true => Ok(attr),
            false => Err(Errno::STALE.into()),
        });
        WccReply { result, ..reply }
    }

    /// Whether a directory is below another one, or is that one.
    fn is_below(&self, root: FileId, mut id: FileId) -> Result<bool, FsError> {
        let server = Caller::trusted(0, 0);
        for _ in 0..PARENT_STEPS_MAX {
            if id == root {
                return Ok(true);
            }
            if id.ino == Ino::ROOT {
                break;
            }
            let parent = self.fs.lookup_at(id, b"..", &server).result?;
            id = parent.file_id();
        }
        Ok(false)
    }

    fn created(&self, reply: &WccReply<Attr>) -> Creation {
        let directory = self.around(&reply.wcc);
        match &reply.result {
            Ok(attr) => Ok(CreatedFile {
                handle: Some(self.handle(attr.file_id())),
                attributes: Some(self.attributes(attr)),
                directory,
            }),
            Err(error) => Err(Failed::new(self.report(error), directory)),
        }
    }

    fn removed(&self, reply: &WccReply<FileId>) -> Removal {
        let attributes = self.around(&reply.wcc);
        match &reply.result {
            Ok(removed) => {
                self.name_removed(*removed);
                Ok(attributes)
            }
            Err(error) => Err(Failed::new(self.report(error), attributes)),
        }
    }
}

impl Service {
    pub(super) fn lookup(
        &self,
        peer: PeerCredential<'_>,
        at: &DirectoryName<'_>,
    ) -> Outcome<LookedUpFile, Option<Attributes>> {
        let target = self.target(peer, at.directory)?;
        let name = at.name.check()?;
        let (found, directory) = target.look_up(name);
        match found {
            Ok(found) => Ok(LookedUpFile {
                handle: target.export.handle_in(found.view.epoch(), found.id),
                attributes: Some(found.attributes),
                directory,
            }),
            Err(failed) => Err(Failed::new(failed.failure, directory)),
        }
    }

    pub(super) fn create(&self, peer: PeerCredential<'_>, it: &CreateArguments<'_>) -> Creation {
        let target = self.changed_target(peer, it.at.directory)?;
        let name = it.at.name.check()?;
        target.check_new_name(name)?;
        let (how, attrs) = match &it.mode {
            CreateMode::Unchecked(attrs) => (FsCreateMode::Unchecked, convert::changes(attrs)?),
            CreateMode::Guarded(attrs) => (FsCreateMode::Guarded, convert::changes(attrs)?),
            CreateMode::Exclusive(verifier) => (
                FsCreateMode::Exclusive(**verifier),
                SetAttributes::default(),
            ),
        };
        if matches!(how, FsCreateMode::Unchecked) && attrs.size.is_some() {
            target.check_truncation(name)?;
        }
        let fs = &target.export.fs;
        let caller = &target.caller;
        let reply = fs.create_at(target.id, name, how, &attrs, caller);
        target.created(&WccReply {
            wcc: reply.wcc,
            result: reply.result.map(|created| created.attr),
        })
    }

    pub(super) fn make_directory(
        &self,
        peer: PeerCredential<'_>,
        it: &MakeDirectoryArguments<'_>,
    ) -> Creation {
        let target = self.changed_target(peer, it.at.directory)?;
        let name = it.at.name.check()?;
        target.check_new_name(name)?;
        let attrs = convert::changes(&it.attributes)?;
        let fs = &target.export.fs;
        let reply = fs.make_directory_at(target.id, name, &attrs, &target.caller);
        target.created(&reply)
    }

    pub(super) fn make_symlink(
        &self,
        peer: PeerCredential<'_>,
        it: &SymlinkArguments<'_>,
    ) -> Creation {
        let target = self.changed_target(peer, it.at.directory)?;
        let name = it.at.name.check()?;
        target.check_new_name(name)?;
        let path = it.target.check()?;
        let attrs = convert::changes(&it.attributes)?;
        let fs = &target.export.fs;
        let reply = fs.symlink_at(target.id, name, path, &attrs, &target.caller);
        target.created(&reply)
    }

    pub(super) fn make_node(
        &self,
        peer: PeerCredential<'_>,
        it: &MakeNodeArguments<'_>,
    ) -> Creation {
        let target = self.changed_target(peer, it.at.directory)?;
        let name = it.at.name.check()?;
        target.check_new_name(name)?;
        let device = |number| convert::encoded_device(number).ok_or(Status::Invalid);
        let (node, attrs) = match &it.file {
            SpecialFile::Unsuitable(_) => return Err(Status::BadType.into()),
            SpecialFile::CharacterDevice(attrs, number) => {
                ((InodeKind::CharDevice, device(*number)?), attrs)
            }
            SpecialFile::BlockDevice(attrs, number) => {
                ((InodeKind::BlockDevice, device(*number)?), attrs)
            }
            SpecialFile::Socket(attrs) => ((InodeKind::Socket, 0), attrs),
            SpecialFile::Fifo(attrs) => ((InodeKind::Fifo, 0), attrs),
        };
        let attrs = convert::changes(attrs)?;
        let fs = &target.export.fs;
        let reply = fs.make_node_at(target.id, name, node, &attrs, &target.caller);
        target.created(&reply)
    }

    pub(super) fn remove(&self, peer: PeerCredential<'_>, at: &DirectoryName<'_>) -> Removal {
        let target = self.changed_target(peer, at.directory)?;
        let name = at.name.check()?;
        let reply = target.export.fs.remove_at(target.id, name, &target.caller);
        target.removed(&reply)
    }

    pub(super) fn remove_directory(
        &self,
        peer: PeerCredential<'_>,
        at: &DirectoryName<'_>,
    ) -> Removal {
        let target = self.changed_target(peer, at.directory)?;
        let name = at.name.check()?;
        let fs = &target.export.fs;
        let reply = fs.remove_directory_at(target.id, name, &target.caller);
        target.removed(&reply)
    }

    pub(super) fn rename(
        &self,
        peer: PeerCredential<'_>,
        it: &RenameArguments<'_>,
    ) -> Outcome<RenamedDirectories, RenamedDirectories> {
        let from = self.changed_target(peer, it.from.directory)?;
        let to = self.changed_target(peer, it.to.directory)?;
        if !from.export.is_same(&to.export) {
            return Err(Status::CrossDevice.into());
        }
        let names = (it.from.name.check()?, it.to.name.check()?);
        to.check_new_name(names.1)?;
        let fs = &from.export.fs;
        let reply = fs.rename_at((from.id, names.0), (to.id, names.1), &from.caller);
        let directories = RenamedDirectories {
            from: from.around(&reply.from),
            to: to.around(&reply.to),
        };
        match reply.result {
            Ok(replaced) => {
                if let Some(replaced) = replaced {
                    to.name_removed(replaced);
                }
                Ok(directories)
            }
            Err(error) => Err(Failed::new(from.report(&error), directories)),
        }
    }

    pub(super) fn link(
        &self,
        peer: PeerCredential<'_>,
        it: &LinkArguments<'_>,
    ) -> Outcome<LinkedFile, LinkedFile> {
        let file = self.changed_target(peer, it.file)?;
        let directory = self.changed_target(peer, it.at.directory)?;
        if !file.export.is_same(&directory.export) {
            return Err(Status::CrossDevice.into());
        }
        let name = it.at.name.check()?;
        directory.check_new_name(name)?;
        let fs = &file.export.fs;
        let reply = fs.link_at(file.id, directory.id, name, &file.caller);
        let linked = LinkedFile {
            attributes: file.after(&reply.file),
            directory: directory.around(&reply.directory),
        };
        match reply.result {
            Ok(()) => Ok(linked),
            Err(error) => Err(Failed::new(file.report(&error), linked)),
        }
    }
}
