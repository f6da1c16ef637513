//! Names: lookups, directories, and the operations that create, link, rename and remove names.

use super::{PERMISSIONS, RequestContext, refuse};
use crate::attr::dirent_type;
use crate::reply::{self, FuseReply, Listing};
use crate::request::{ReadRange, Request};
use pagemesh_fs::{CreateKind, DirEntry, Ino, InodeKind, RenameMode, Result};
use rustix::fs::RenameFlags;
use rustix::io::Errno;

/// Most entries that are looked up for one answer: more do not fit.
const LISTED_MAX: usize = 1024;

/// Returns the mode, and whether the old name gets a whiteout, too.
fn rename_mode(flags: u32) -> Option<(RenameMode, bool)> {
    let flags = RenameFlags::from_bits(flags)?;
    let leaves_whiteout = flags.contains(RenameFlags::WHITEOUT);
    let how = match flags - RenameFlags::WHITEOUT {
        RenameFlags::NOREPLACE => Some(RenameMode::NoReplace),
        RenameFlags::EXCHANGE => Some(RenameMode::Exchange),
        flags if flags.is_empty() => Some(RenameMode::Replace),
        _ => None,
    };
    Some((how?, leaves_whiteout))
}

impl RequestContext<'_> {
    pub(super) fn dispatch_name_op(&self, request: Request<'_>) -> Result<FuseReply> {
        match request {
            Request::Lookup(name) => self.lookup(name),
            Request::Forget(lookups) => {
                self.fs.forget(self.ino, lookups);
                Ok(FuseReply::DONE)
            }
            Request::ForgetAll(all) => {
                for one in all {
                    self.fs.forget(Ino(one.node), one.lookups);
                }
                Ok(FuseReply::DONE)
            }
            Request::ReadDir(span) => self.list(span),
            Request::ReadDirPlus(span) => self.list_with_attributes(span),
            Request::Create { name, mode, flags } => {
                let mode = (mode & PERMISSIONS) as u16;
                let made = self.fs.create_opened(self.ino, name, mode, self.caller)?;
                self.created_reply(&made, flags)
            }
            Request::CreateUnnamed { mode, flags } => {
                let mode = (mode & PERMISSIONS) as u16;
                let made = self.fs.create_unnamed(self.ino, mode, self.caller)?;
                self.created_reply(&made, flags)
            }
            Request::Mknod { name, mode, device } => self.mknod(name, mode, device),
            Request::Mkdir { name, mode } => self.make(name, CreateKind::Directory, mode),
            Request::Symlink { name, target } => {
                self.make(name, CreateKind::Symlink(target), 0o777)
            }
            Request::ReadLink => Ok(FuseReply::Data(self.fs.read_link(self.ino)?)),
            Request::Link { node, name } => {
                Ok(self.entry(&self.fs.link(Ino(node), self.ino, name)?))
            }
            Request::Unlink(name) => self.fs.unlink(self.ino, name).map(|()| FuseReply::DONE),
            Request::Rmdir(name) => self.fs.rmdir(self.ino, name).map(|()| FuseReply::DONE),
            Request::Rename {
                name,
                to,
                new,
                flags,
            } => self.rename((self.ino, name), (Ino(to), new), flags),
            other => self.dispatch_attribute_op(other),
        }
    }

    fn lookup(&self, name: &[u8]) -> Result<FuseReply> {
        Ok(self.entry(&match name {
            // A server that exports the mount asks this of files, too.
            b"." => self.fs.lookup_ino(self.ino),
            name => self.fs.lookup(self.ino, name),
        }?))
    }

    fn mknod(&self, name: &[u8], mode: u32, device: u32) -> Result<FuseReply> {
        let make = match InodeKind::of_mode(mode as u16) {
            Some(InodeKind::File) => CreateKind::File,
            None | Some(InodeKind::Directory | InodeKind::Symlink) => {
                return refuse(Errno::INVAL);
            }
            Some(kind) => CreateKind::Special(kind, device),
        };
        self.make(name, make, mode)
    }

    fn make(&self, name: &[u8], make: CreateKind<'_>, mode: u32) -> Result<FuseReply> {
        let mode = (mode & PERMISSIONS) as u16;
        let made = self.fs.create(self.ino, name, make, mode, self.caller)?;
        Ok(self.entry(&made))
    }

    fn rename(&self, from: (Ino, &[u8]), to: (Ino, &[u8]), flags: u32) -> Result<FuseReply> {
        let (how, leaves_whiteout) = rename_mode(flags).ok_or(Errno::INVAL)?;
        if leaves_whiteout {
            self.fs.rename_with_whiteout(from, to, how, self.caller)?;
        } else {
            self.fs.rename(from, to, how)?;
        }
        Ok(FuseReply::DONE)
    }

    fn list(&self, span: ReadRange) -> Result<FuseReply> {
        let mut listing = Listing::new(span.size);
        self.fs.list(self.ino, span.offset, |listed| {
            let entry = (listed.ino.0, listed.cookie, dirent_type(listed.kind));
            listing.add(None, entry, &listed.name)
        })?;
        Ok(listing.finish())
    }

    fn list_with_attributes(&self, span: ReadRange) -> Result<FuseReply> {
        let mut all: Vec<DirEntry> = Vec::new();
        self.fs.list(self.ino, span.offset, |listed| {
            all.push(listed.clone());
            all.len() < LISTED_MAX
        })?;
        let mut listing = Listing::new(span.size);
        for listed in all {
            // The kernel does not count these two as looked up.
            let is_dots = listed.name == b"." || listed.name == b"..";
            let attr = if is_dots {
                self.fs.attr(listed.ino)
            } else {
                self.fs.lookup_ino(listed.ino)
            };
            // It was removed meanwhile.
            let Ok(attr) = attr else { continue };
            let entry = (listed.ino.0, listed.cookie, dirent_type(attr.kind));
            if !listing.add(
                Some(&reply::entry(&attr, self.handler.cache)),
                entry,
                &listed.name,
            ) {
                if !is_dots {
                    self.fs.forget(listed.ino, 1);
                }
                break;
            }
        }
        Ok(listing.finish())
    }
}
