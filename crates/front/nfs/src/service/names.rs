//! LOOKUP, CREATE, MKDIR, SYMLINK, MKNOD, REMOVE, RMDIR, RENAME and LINK.

use super::{Failed, Outcome, Service, Target, convert};
use crate::nfs3::attributes::{Attributes, ChangeAttributes};
use crate::nfs3::names::{
    CreateArguments, CreateMode, CreatedFile, DirectoryName, LinkArguments, LinkedFile,
    LookedUpFile, MakeDirectoryArguments, MakeNodeArguments, RenameArguments, RenamedDirectories,
    SpecialFile, SymlinkArguments,
};
use crate::nfs3::status::Status;
use crate::rpc::Credential;
use pagemesh_fs::{Attr, CreateMode as FsCreateMode, FileId, SetAttributes, WccReply};

/// The result of a procedure that makes a file.
type Creation = Outcome<CreatedFile, ChangeAttributes>;
/// The result of a procedure that removes a name.
type Removal = Outcome<ChangeAttributes, ChangeAttributes>;

impl Target<'_> {
    fn created(&self, reply: &WccReply<Attr>) -> Creation {
        let directory = self.around(&reply.wcc);
        match &reply.result {
            Ok(attr) => Ok(CreatedFile {
                handle: Some(self.export.handle(attr.file_id())),
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
                self.export.pins.forget(*removed);
                Ok(attributes)
            }
            Err(error) => Err(Failed::new(self.report(error), attributes)),
        }
    }
}

impl Service {
    /// `..` of the root is the root: the file system stores it so.
    pub(super) fn lookup(
        &self,
        credential: &Credential<'_>,
        at: &DirectoryName<'_>,
    ) -> Outcome<LookedUpFile, Option<Attributes>> {
        let target = self.target(credential, at.directory)?;
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

    pub(super) fn create(&self, credential: &Credential<'_>, it: &CreateArguments<'_>) -> Creation {
        let target = self.changed_target(credential, it.at.directory)?;
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
        let fs = &target.export.fs;
        let mut channel = fs.borrow_channel().map_err(|error| target.report(&error))?;
        let caller = &target.caller;
        let reply = fs.create_at(&mut channel, target.id, name, how, &attrs, caller);
        target.created(&WccReply {
            wcc: reply.wcc,
            result: reply.result.map(|created| created.attr),
        })
    }

    pub(super) fn make_directory(
        &self,
        credential: &Credential<'_>,
        it: &MakeDirectoryArguments<'_>,
    ) -> Creation {
        let target = self.changed_target(credential, it.at.directory)?;
        let name = it.at.name.check()?;
        target.check_new_name(name)?;
        let attrs = convert::changes(&it.attributes)?;
        let fs = &target.export.fs;
        let reply = fs.make_directory_at(target.id, name, &attrs, &target.caller);
        target.created(&reply)
    }

    pub(super) fn make_symlink(
        &self,
        credential: &Credential<'_>,
        it: &SymlinkArguments<'_>,
    ) -> Creation {
        let target = self.changed_target(credential, it.at.directory)?;
        let name = it.at.name.check()?;
        target.check_new_name(name)?;
        let path = it.target.check()?;
        let attrs = convert::changes(&it.attributes)?;
        let fs = &target.export.fs;
        let reply = fs.symlink_at(target.id, name, path, &attrs, &target.caller);
        target.created(&reply)
    }

    /// The file system has no call for special files by a caller without a kernel yet, so all types
    /// are refused.
    pub(super) fn make_node(
        &self,
        credential: &Credential<'_>,
        it: &MakeNodeArguments<'_>,
    ) -> Creation {
        self.changed_target(credential, it.at.directory)?;
        match it.file {
            SpecialFile::Unsuitable(_) => Err(Status::BadType.into()),
            SpecialFile::CharacterDevice(..)
            | SpecialFile::BlockDevice(..)
            | SpecialFile::Socket(_)
            | SpecialFile::Fifo(_) => Err(Status::NotSupported.into()),
        }
    }

    pub(super) fn remove(&self, credential: &Credential<'_>, at: &DirectoryName<'_>) -> Removal {
        let target = self.changed_target(credential, at.directory)?;
        let name = at.name.check()?;
        let reply = target.export.fs.remove_at(target.id, name, &target.caller);
        target.removed(&reply)
    }

    pub(super) fn remove_directory(
        &self,
        credential: &Credential<'_>,
        at: &DirectoryName<'_>,
    ) -> Removal {
        let target = self.changed_target(credential, at.directory)?;
        let name = at.name.check()?;
        let fs = &target.export.fs;
        let reply = fs.remove_directory_at(target.id, name, &target.caller);
        target.removed(&reply)
    }

    pub(super) fn rename(
        &self,
        credential: &Credential<'_>,
        it: &RenameArguments<'_>,
    ) -> Outcome<RenamedDirectories, RenamedDirectories> {
        let from = self.changed_target(credential, it.from.directory)?;
        let to = self.changed_target(credential, it.to.directory)?;
        if from.export.volume != to.export.volume {
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
                    from.export.pins.forget(replaced);
                }
                Ok(directories)
            }
            Err(error) => Err(Failed::new(from.report(&error), directories)),
        }
    }

    pub(super) fn link(
        &self,
        credential: &Credential<'_>,
        it: &LinkArguments<'_>,
    ) -> Outcome<LinkedFile, LinkedFile> {
        let file = self.changed_target(credential, it.file)?;
        let directory = self.changed_target(credential, it.at.directory)?;
        if file.export.volume != directory.export.volume {
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
