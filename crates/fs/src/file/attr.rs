//! Attributes of an inode.

use crate::direct::append;
use crate::error::Result;
use crate::format::file_id::FileId;
use crate::format::inode::{Ino, Inode, InodeKind, Time};
use crate::format::page_count;
use crate::txn::core::Core;

/// Attributes of an inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attr {
    /// Its number.
    pub ino: Ino,
    /// Number and generation together identify one file for ever.
    pub generation: u32,
    /// Its type.
    pub kind: InodeKind,
    /// Permissions, and the set-id and sticky bits.
    pub mode: u16,
    /// Number of names.
    pub links: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Size in bytes.
    pub size: u64,
    /// Pages of 4 KiB that hold data.
    pub pages: u64,
    /// Last read.
    pub atime: Time,
    /// Last change of the content.
    pub mtime: Time,
    /// Last change of anything.
    pub ctime: Time,
    /// Creation time.
    pub btime: Time,
    /// Device number; 0 for other types.
    pub device: u32,
    /// Whether size or pages may change at any time, by direct clients or by mmap-dirty pages.
    pub has_volatile_size: bool,
}

impl Attr {
    /// The identity of the file.
    #[must_use]
    pub fn file_id(&self) -> FileId {
        FileId::new(self.ino, self.generation, self.btime)
    }

    pub(crate) fn of(ino: Ino, inode: &Inode) -> Attr {
        Attr {
            ino,
            generation: inode.generation,
            kind: inode.kind(),
            mode: inode.mode & 0o7777,
            links: inode.links,
            uid: inode.uid,
            gid: inode.gid,
            size: inode.size,
            pages: inode.pages,
            atime: inode.atime,
            mtime: inode.mtime,
            ctime: inode.ctime,
            btime: inode.btime,
            device: inode.device,
            has_volatile_size: inode.append_extent.is_some(),
        }
    }
}

/// Attributes of an inode, with the size that direct clients see.
pub(crate) fn attr(core: &mut Core, ino: Ino, inode: &Inode) -> Result<Attr> {
    let mut attr = Attr::of(ino, inode);
    attr.size = append::file_end(core, ino, inode)?;
    attr.pages += page_count(attr.size) - page_count(inode.size);
    // Whether these pages fill holes is known only when they are written to the file.
    let held = core.mmap_dirty.page_count(ino);
    attr.pages = (attr.pages + held)
        .min(page_count(attr.size))
        .max(attr.pages);
    attr.has_volatile_size |= held > 0;
    Ok(attr)
}
