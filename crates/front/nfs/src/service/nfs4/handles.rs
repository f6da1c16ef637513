//! The current and the saved file handle, names and the root of all exports.
//!
//! The root is a directory of the server with the exports as its entries. It is read-only, belongs to
//! user 0, and its file-system id is (0, 0): going into an export changes the id. It has the exports of
//! whole file systems only; NFSv3 also has the exports of directories.

use super::{Compound, Done, Fault};
use crate::export_table::ServedExport;
use crate::handle::HandleBytes;
use crate::nfs3::names::FileName;
use crate::nfs4::status::Status;
use crate::service::Target;
use crate::xdr::Writer;
use pagemesh_fs::{Attr, Ino, InodeKind};
use std::sync::Arc;

/// The handle of the root. Handles of files are longer.
pub(super) const ROOT_HANDLE: &[u8] = b"root";

/// The flavors of SECINFO: AUTH_SYS and AUTH_NONE.
const FLAVORS: [u32; 2] = [1, 0];

/// A file or the root of all exports.
#[derive(Clone)]
pub(super) enum CurrentFile<'a> {
    Root,
    File(Target<'a>),
}

/// A name of a client that a directory may have.
pub(super) fn checked_name(name: FileName<'_>) -> Result<&[u8], Fault> {
    if name.0.contains(&b'/') || name.0.contains(&0) {
        return Err(Status::BadCharacter.into());
    }
    match name.check().map_err(Status::from)? {
        b"." | b".." => Err(Status::BadName.into()),
        name => Ok(name),
    }
}

impl<'a> Compound<'a> {
    pub(super) fn place(&self) -> Result<&CurrentFile<'a>, Fault> {
        self.current
            .as_ref()
            .ok_or(Fault::Status(Status::NoFileHandle))
    }

    pub(super) fn saved_place(&self) -> Result<&CurrentFile<'a>, Fault> {
        self.saved
            .as_ref()
            .ok_or(Fault::Status(Status::NoFileHandle))
    }

    /// The current file. The root of all exports has a status of the operation.
    pub(super) fn file_or(&self, of_root: Status) -> Result<&Target<'a>, Fault> {
        match self.place()? {
            CurrentFile::Root => Err(of_root.into()),
            CurrentFile::File(target) => Ok(target),
        }
    }

    /// The current file, for a change.
    pub(super) fn changed_file(&self) -> Result<&Target<'a>, Fault> {
        changed(self.place()?)
    }

    fn set_place(&mut self, place: CurrentFile<'a>) {
        self.current = Some(place);
        self.stateids.clear();
    }

    pub(super) fn put_root(&mut self) -> Done {
        self.set_place(CurrentFile::Root);
        Ok(())
    }

    pub(super) fn put_handle(&mut self, handle: HandleBytes<'_>) -> Done {
        if handle.0 == ROOT_HANDLE {
            return self.put_root();
        }
        let target = self.service.target(self.peer, handle)?;
        // Snapshots are for NFSv3.
        target.check_live().map_err(|_| Status::Stale)?;
        self.set_place(CurrentFile::File(target));
        Ok(())
    }

    pub(super) fn get_handle(&self, out: &mut Writer) -> Done {
        match self.place()? {
            CurrentFile::Root => out.opaque(ROOT_HANDLE),
            CurrentFile::File(target) => out.value(&target.handle(target.id)),
        }
        Ok(())
    }

    pub(super) fn save_handle(&mut self) -> Done {
        let place = self.place()?.clone();
        self.saved = Some(place);
        self.stateids.save();
        Ok(())
    }

    pub(super) fn restore_handle(&mut self) -> Done {
        let saved = self.saved.clone().ok_or(Status::RestoreHandle)?;
        self.current = Some(saved);
        self.stateids.restore();
        Ok(())
    }

    pub(super) fn lookup(&mut self, name: FileName<'_>) -> Done {
        let place = self.found(name)?;
        self.set_place(place);
        Ok(())
    }

    /// The file of a name in the current directory.
    fn found(&self, name: FileName<'_>) -> Result<CurrentFile<'a>, Fault> {
        let place = self.place()?;
        let name = checked_name(name)?;
        match place {
            CurrentFile::Root => {
                let export = self
                    .exports()
                    .find(|it| it.path.file_system.as_bytes() == name);
                self.root_of(export.ok_or(Status::NoEntry)?)
            }
            CurrentFile::File(target) => Ok(CurrentFile::File(target.child(name)?.0)),
        }
    }

    /// The root directory of an export.
    pub(super) fn root_of(&self, export: &Arc<ServedExport>) -> Result<CurrentFile<'a>, Fault> {
        let root = self.service.root_of(export)?;
        let target = self.service.target_in(export, root, self.peer)?;
        Ok(CurrentFile::File(target))
    }

    /// The entries of the root: the exports of whole file systems to which the client has access.
    pub(super) fn exports(&self) -> impl Iterator<Item = &'a Arc<ServedExport>> + use<'a> {
        let address = self.peer.address.ip();
        let exports = self.peer.table.iter();
        exports.filter(move |it| it.directory.is_none() && it.rule(address).is_some())
    }

    pub(super) fn lookup_parent(&mut self) -> Done {
        let parent = match self.place()? {
            CurrentFile::Root => return Err(Status::NoEntry.into()),
            CurrentFile::File(target) if target.is_root() => CurrentFile::Root,
            CurrentFile::File(target) => CurrentFile::File(target.child(b"..")?.0),
        };
        self.set_place(parent);
        Ok(())
    }

    /// The reply uses the current file handle up (RFC 8881, section 2.6.3.1.1.8).
    pub(super) fn security_info(&mut self, name: FileName<'_>, out: &mut Writer) -> Done {
        self.found(name)?;
        self.forget_place(out)
    }

    /// `style` 1 means the parent.
    pub(super) fn security_info_no_name(&mut self, style: u32, out: &mut Writer) -> Done {
        match style {
            0 => drop(self.place()?),
            1 => self.lookup_parent()?,
            _ => return Err(Status::BadXdr.into()),
        }
        self.forget_place(out)
    }

    fn forget_place(&mut self, out: &mut Writer) -> Done {
        self.current = None;
        self.stateids.clear();
        out.length(FLAVORS.len());
        FLAVORS.iter().for_each(|flavor| out.u32(*flavor));
        Ok(())
    }
}

/// A file of an operation that changes it.
pub(super) fn changed<'p, 'a>(place: &'p CurrentFile<'a>) -> Result<&'p Target<'a>, Fault> {
    match place {
        CurrentFile::File(target) if !target.options.is_read_only => Ok(target),
        CurrentFile::Root | CurrentFile::File(_) => Err(Status::ReadOnly.into()),
    }
}

impl<'a> Target<'a> {
    /// Whether the file is the root of its export.
    pub(super) fn is_root(&self) -> bool {
        match self.export.directory {
            Some(directory) => self.id == directory,
            None => self.id.ino == Ino::ROOT,
        }
    }

    /// Another file of the same export and caller.
    pub(super) fn with(&self, attr: &Attr) -> Target<'a> {
        Target {
            id: attr.file_id(),
            ..self.clone()
        }
    }

    /// The file of a name in this directory.
    pub(super) fn child(&self, name: &[u8]) -> Result<(Target<'a>, Attr), Fault> {
        let reply = self.find(name);
        match reply.result {
            Ok(attr) => Ok((self.with(&attr), attr)),
            Err(error) => {
                let fault = Fault::from(self.report(&error));
                let kind = reply.wcc.after.map(|directory| directory.kind);
                Err(match (fault, kind) {
                    (Fault::Status(Status::NotDirectory), Some(InodeKind::Symlink)) => {
                        Status::Symlink.into()
                    }
                    (fault, _) => fault,
                })
            }
        }
    }
}
