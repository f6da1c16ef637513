//! The current and the saved file handle, names, and the way between exports.
//!
//! Above the exports are the directories of the pseudo file system ([`PseudoFs`]). They are read-only,
//! belong to user 0, and their file-system id is (0, 0): going into an export changes the id. A name that is the root of another export
//! leads into that export, and its rules then decide, if the client has access to it. LOOKUPP at the root of an export leads to the
//! directory above in the nearest export above, or else into the pseudo file system, and never to files that no export gives to the client.

use super::{Compound, Done, Fault};
use crate::export_table::ServedExport;
use crate::handle::HandleBytes;
use crate::nfs3::names::FileName;
use crate::nfs4::status::Status;
use crate::pseudo_fs::{PseudoFs, PseudoNo};
use crate::service::Target;
use crate::service::snapshots::View;
use crate::xdr::Writer;
use pagemesh_fs::{Attr, FileId, Ino, InodeKind, SNAPSHOT_DIR};
use std::net::IpAddr;
use std::sync::Arc;

/// The flavors of SECINFO: AUTH_SYS and AUTH_NONE.
const FLAVORS: [u32; 2] = [1, 0];

/// A file of an export or a directory above the exports.
#[derive(Clone)]
pub(super) enum CurrentFile<'a> {
    Pseudo(PseudoNo),
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

    /// The current file. A directory above the exports has a status of the operation.
    pub(super) fn file_or(&self, of_pseudo: Status) -> Result<&Target<'a>, Fault> {
        match self.place()? {
            CurrentFile::Pseudo(_) => Err(of_pseudo.into()),
            CurrentFile::File(target) => Ok(target),
        }
    }

    /// The current file, for a change.
    pub(super) fn changed_file(&self) -> Result<&Target<'a>, Fault> {
        changed(self.place()?)
    }

    fn set_place(&mut self, place: CurrentFile<'a>) {
        self.change_place(place);
        self.stateids.clear();
    }

    fn change_place(&mut self, place: CurrentFile<'a>) {
        if let CurrentFile::File(target) = &place {
            self.worked_on = Some(target.export.volume);
        }
        self.current = Some(place);
    }

    pub(super) fn put_root(&mut self) -> Done {
        self.set_place(CurrentFile::Pseudo(PseudoNo::ROOT));
        Ok(())
    }

    pub(super) fn put_handle(&mut self, handle: HandleBytes<'_>) -> Done {
        if PseudoFs::is_handle(handle.0) {
            let table = self.peer.table;
            let found = table.pseudo.by_handle(handle.0);
            let found = found.filter(|at| table.is_visible(*at, self.client_address()));
            self.set_place(CurrentFile::Pseudo(found.ok_or(Status::Stale)?));
            return Ok(());
        }
        let target = self.service.target(self.peer, handle)?;
        self.set_place(CurrentFile::File(target));
        Ok(())
    }

    pub(super) fn get_handle(&self, out: &mut Writer) -> Done {
        match self.place()? {
            CurrentFile::Pseudo(at) => out.opaque(self.peer.table.pseudo.handle(*at)),
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
        self.change_place(saved);
        self.stateids.restore();
        Ok(())
    }

    pub(super) fn lookup(&mut self, name: FileName<'_>) -> Done {
        let place = self.found(name)?;
        self.set_place(place);
        Ok(())
    }

    pub(super) fn client_address(&self) -> IpAddr {
        self.peer.address.ip()
    }

    /// The file of a name in the current directory.
    pub(super) fn found(&self, name: FileName<'_>) -> Result<CurrentFile<'a>, Fault> {
        let place = self.place()?;
        let name = checked_name(name)?;
        match place {
            CurrentFile::Pseudo(at) => {
                let table = self.peer.table;
                let child = table.pseudo.child(*at, name);
                let child = child.filter(|it| table.is_visible(*it, self.client_address()));
                self.entered(child.ok_or(Status::NoEntry)?)
            }
            CurrentFile::File(target) => {
                let (child, kind) = target.child(name)?;
                let other = match kind {
                    InodeKind::Directory => self.crossed(&child),
                    _ => None,
                };
                Ok(CurrentFile::File(match other {
                    Some(export) => self.service.target_in(export, child.id, self.peer)?,
                    None => child,
                }))
            }
        }
    }

    /// The root of the export at a directory of the pseudo file system, or that directory.
    pub(super) fn entered(&self, at: PseudoNo) -> Result<CurrentFile<'a>, Fault> {
        let Some(export) = self.peer.table.export_at(at, self.client_address()) else {
            return Ok(CurrentFile::Pseudo(at));
        };
        let root = self.service.root_of(export)?;
        let target = self.service.target_in(export, root, self.peer)?;
        Ok(CurrentFile::File(target))
    }

    /// The other export that has a live directory as its root.
    pub(super) fn crossed(&self, target: &Target<'_>) -> Option<&'a Arc<ServedExport>> {
        if target.view != View::Live {
            return None;
        }
        let (table, volume) = (self.peer.table, target.export.volume);
        let other = table.export_of_directory(volume, target.id, self.client_address())?;
        (!other.is_same(&target.export)).then_some(other)
    }

    /// The entries of a directory of the pseudo file system that the client sees.
    pub(super) fn visible_children(
        &self,
        at: PseudoNo,
    ) -> impl Iterator<Item = PseudoNo> + use<'a> {
        let (table, address) = (self.peer.table, self.client_address());
        let children = table.pseudo.children(at).iter().copied();
        children.filter(move |child| table.is_visible(*child, address))
    }

    pub(super) fn lookup_parent(&mut self) -> Done {
        let pseudo = &self.peer.table.pseudo;
        let parent = match self.place()? {
            CurrentFile::Pseudo(at) => {
                CurrentFile::Pseudo(pseudo.parent(*at).ok_or(Status::NoEntry)?)
            }
            CurrentFile::File(target) if target.is_root() => self.above(target)?,
            CurrentFile::File(target) => CurrentFile::File(target.parent()?),
        };
        self.set_place(parent);
        Ok(())
    }

    /// The directory above the root of an export.
    fn above(&self, root: &Target<'a>) -> Result<CurrentFile<'a>, Fault> {
        let table = self.peer.table;
        match table.export_above(&root.export, self.client_address()) {
            Some(above) => {
                let target = self.service.target_in(above, root.id, self.peer)?;
                Ok(CurrentFile::File(target.parent()?))
            }
            None => {
                let parent = table.pseudo.parent(table.place(&root.export));
                Ok(CurrentFile::Pseudo(parent.ok_or(Status::NoEntry)?))
            }
        }
    }

    /// The file number of the directory that an export covers, for the root of an export (RFC 8881, section 5.8.2.19); else its own.
    pub(super) fn mounted_on(&self, target: &Target<'_>) -> u64 {
        if !target.is_root() {
            return target.view.file_number(target.id.ino);
        }
        let table = self.peer.table;
        match table.export_above(&target.export, self.client_address()) {
            Some(_) => target.id.ino.0,
            None => table.pseudo.inode(table.place(&target.export)),
        }
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
        CurrentFile::File(target) if !target.is_read_only() => Ok(target),
        CurrentFile::Pseudo(_) | CurrentFile::File(_) => Err(Status::ReadOnly.into()),
    }
}

impl<'a> Target<'a> {
    /// Whether the client cannot change the file.
    pub(super) fn is_read_only(&self) -> bool {
        self.options.is_read_only || self.check_live().is_err()
    }

    /// Whether the file is the live root of its export.
    pub(super) fn is_root(&self) -> bool {
        self.view == View::Live && self.is_root_directory()
    }

    /// Whether the file is the root directory of its export, in any view.
    fn is_root_directory(&self) -> bool {
        match self.export.directory {
            Some(directory) => self.id == directory,
            None => self.id.ino == Ino::ROOT,
        }
    }

    /// Another file of the same export, view and caller.
    pub(super) fn with(&self, attr: &Attr) -> Target<'a> {
        self.with_id(attr.file_id())
    }

    pub(super) fn with_id(&self, id: FileId) -> Target<'a> {
        Target { id, ..self.clone() }
    }

    /// The directory above, which is no root. `.snapshot` is above the root of a snapshot.
    fn parent(&self) -> Result<Target<'a>, Fault> {
        let view = match self.view {
            View::Directory => View::Live,
            View::Snapshot(_) if self.is_root_directory() => View::Directory,
            View::Live | View::Snapshot(_) => return Ok(self.child(b"..")?.0),
        };
        let mut above = self.clone();
        above.fs = Arc::clone(&self.export.fs);
        Ok(above.in_view(view)?)
    }

    /// The file of a name in this directory, and its type.
    pub(super) fn child(&self, name: &[u8]) -> Result<(Target<'a>, InodeKind), Fault> {
        if self.view == View::Directory {
            let found = self.look_snapshot_up(name)?;
            let child = self.with_id(found.id).in_view(found.view)?;
            return Ok((child, InodeKind::Directory));
        }
        let reply = self.find(name);
        let error = match reply.result {
            Ok(attr) => return Ok((self.with(&attr), attr.kind)),
            Err(error) => error,
        };
        let fault = Fault::from(self.report(&error));
        let kind = reply.wcc.after.map(|directory| directory.kind);
        let has_views = self.view == View::Live && self.export.snapshots().is_some();
        match (fault, kind) {
            (Fault::Status(Status::NotDirectory), Some(InodeKind::Symlink)) => {
                Err(Status::Symlink.into())
            }
            (Fault::Status(Status::NoEntry), _) if has_views && name == SNAPSHOT_DIR => {
                let views = self.clone().in_view(View::Directory)?;
                Ok((views, InodeKind::Directory))
            }
            (fault, _) => Err(fault),
        }
    }

    /// The type of the file, which must exist.
    pub(super) fn kind(&self) -> Result<InodeKind, Fault> {
        if self.view == View::Directory {
            return Ok(InodeKind::Directory);
        }
        let attr = self.fs.attr_of(self.id);
        let attr = attr.map_err(|error| self.report(&error))?;
        Ok(attr.kind)
    }

    /// The identity of the file in the state of clients. A file in a snapshot has a number of its own.
    pub(super) fn state_file(&self) -> FileId {
        FileId {
            ino: Ino(self.view.file_number(self.id.ino)),
            ..self.id
        }
    }
}
