//! New inodes, with the first page of a directory and the target of a link.

use crate::error::Result;
use crate::format::inode::{INLINE, INLINE_MAX, Ino, Inode, InodeKind, TARGET_MAX, TIER, Time};
use crate::tree::directory::Tree;
use crate::tree::{inode_table, map_update};
use crate::txn::tx::Tx;
use rustix::io::Errno;

pub(crate) const SET_GID: u16 = 0o2000;

/// Owner and group of a new inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Owner.
    pub uid: u32,
    /// Group, unless the directory is set-group-id.
    pub gid: u32,
}

/// Permissions of a new inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewMode {
    /// Of the request, with the set-id and sticky bits.
    pub mode: u16,
    /// Permissions to leave out (umask(2)), unless the directory has a default ACL.
    pub umask: u16,
}

impl From<u16> for NewMode {
    fn from(mode: u16) -> NewMode {
        NewMode { mode, umask: 0 }
    }
}

/// The type of a new inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreateKind<'m> {
    /// An empty file.
    File,
    /// An empty directory.
    Directory,
    /// A symbolic link to this target.
    Symlink(&'m [u8]),
    /// A pipe, socket or device, and its device number.
    Special(InodeKind, u32),
}

impl CreateKind<'_> {
    pub(crate) fn kind(&self) -> InodeKind {
        match self {
            CreateKind::File => InodeKind::File,
            CreateKind::Directory => InodeKind::Directory,
            CreateKind::Symlink(_) => InodeKind::Symlink,
            CreateKind::Special(kind, _) => *kind,
        }
    }
}

/// Allocates and fills a new inode; the caller stores it. It inherits no ACL: see [`super::acl_xattrs::inherit`].
pub(crate) fn new_inode(
    tx: &mut Tx<'_>,
    (parent_ino, parent): (Ino, &Inode),
    make: &CreateKind<'_>,
    mode: u16,
    caller: Credentials,
    now: Time,
) -> Result<(Ino, Inode)> {
    let (ino, generation) = inode_table::allocate_ino(tx)?;
    let mut inode = Inode::free(generation);
    let is_inherited = parent.mode & SET_GID != 0;
    let is_directory = make.kind() == InodeKind::Directory;
    inode.mode = make.kind().bits() | mode & 0o7777;
    if is_inherited && is_directory {
        inode.mode |= SET_GID;
    }
    inode.links = if is_directory { 2 } else { 1 };
    inode.uid = caller.uid;
    inode.gid = if is_inherited { parent.gid } else { caller.gid };
    inode.atime = now;
    inode.mtime = now;
    inode.ctime = now;
    inode.btime = now;
    if matches!(make, CreateKind::File | CreateKind::Directory) {
        inode.flags |= parent.flags & TIER;
    }
    match make {
        CreateKind::File => {}
        CreateKind::Directory => {
            inode.parent = parent_ino;
            Tree::new(tx, &mut inode).init_empty()?;
        }
        CreateKind::Symlink(target) => set_target(tx, &mut inode, target)?,
        CreateKind::Special(_, device) => inode.device = *device,
    }
    Ok((ino, inode))
}

fn set_target(tx: &mut Tx<'_>, inode: &mut Inode, target: &[u8]) -> Result<()> {
    if target.is_empty() || target.len() > TARGET_MAX {
        return Err(Errno::NAMETOOLONG.into());
    }
    inode.size = target.len() as u64;
    if target.len() <= INLINE_MAX {
        inode.target = target.to_vec();
        inode.flags |= INLINE;
    } else {
        let run = map_update::find_or_allocate(tx, inode, 0)?;
        tx.write_data(run.page, 0, target, true)?;
        inode.pages = 1;
    }
    Ok(())
}

/// Creates the root of a new file system.
pub(crate) fn make_root(tx: &mut Tx<'_>, caller: Credentials, mode: u16, now: Time) -> Result<()> {
    let parent = Inode::free(0);
    let made = new_inode(
        tx,
        (Ino::ROOT, &parent),
        &CreateKind::Directory,
        mode,
        caller,
        now,
    )?;
    let (ino, inode) = made;
    assert_eq!(ino, Ino::ROOT, "the first number is the root's");
    tx.put_inode(ino, &inode)
}
