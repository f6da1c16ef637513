//! Renames: both directories change in one transaction.

use crate::error::{Corruption, Result};
use crate::file::access::{self, Caller, Rights};
use crate::file::attr::Attr;
use crate::file::{creation, free, lifetime};
use crate::format::directory_page::TreeEntry;
use crate::format::inode::{Ino, Inode, InodeKind, Time, damaged_inode};
use crate::names::entry::{
    check_name, decremented_links, find, incremented_links, named_inode, put_changed_directory,
    unlink_inode,
};
use crate::tree::directory::{Tree, directory, linked_directory};
use crate::tree::new_inode::{CreateKind, Credentials, new_inode};
use crate::txn::manager::TxManager;
use crate::txn::tx::Tx;
use rustix::io::Errno;

/// How a rename treats an existing new name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenameMode {
    /// The inode there loses the name.
    Replace,
    /// The rename fails.
    NoReplace,
    /// Both inodes change places.
    Exchange,
}

/// The entry by which overlayfs marks a deleted name.
const WHITEOUT: CreateKind<'static> = CreateKind::Special(InodeKind::CharDevice, 0);

/// See [`crate::Fs::rename`].
pub(crate) fn rename(
    txs: &TxManager,
    (from, old): (Ino, &[u8]),
    (to, new): (Ino, &[u8]),
    how: RenameMode,
) -> Result<()> {
    check_name(old)?;
    check_name(new)?;
    let now = txs.now();
    let gone = txs.change_deferrable(|tx| {
        RenameOp::begin(tx, (from, old), (to, new), now)?.apply(how, None)
    })?;
    if let Some(ino) = gone {
        free::release_if_unused(txs, ino);
    }
    Ok(())
}

/// See [`crate::Fs::rename_with_whiteout`].
pub(crate) fn rename_with_whiteout(
    txs: &TxManager,
    (from, old): (Ino, &[u8]),
    (to, new): (Ino, &[u8]),
    how: RenameMode,
    caller: Credentials,
) -> Result<()> {
    check_name(old)?;
    check_name(new)?;
    if how == RenameMode::Exchange {
        return Err(Errno::INVAL.into());
    }
    let now = txs.now();
    let mut gone = None;
    let made = creation::create_inode(txs, 0, |tx| {
        let of = directory(tx, from)?;
        let (ino, inode) = new_inode(tx, (from, &of), &WHITEOUT, 0, caller, now)?;
        tx.put_inode(ino, &inode)?;
        let moving = RenameOp::begin(tx, (from, old), (to, new), now)?;
        gone = moving.apply(how, Some(ino))?;
        Ok(Attr::of(ino, &inode))
    })?;
    // The kernel looks the whiteout up when it needs it.
    lifetime::forget(txs, made.ino, 1);
    if let Some(ino) = gone {
        free::release_if_unused(txs, ino);
    }
    Ok(())
}

/// A rename: both directories, once if they are the same.
pub(crate) struct RenameOp<'t, 'c, 'n> {
    tx: &'t mut Tx<'c>,
    now: Time,
    from: (Ino, Inode),
    /// `None` if it is the same directory.
    to: Option<(Ino, Inode)>,
    new: &'n [u8],
    entry: TreeEntry,
    target: Option<TreeEntry>,
}

impl<'t, 'c, 'n> RenameOp<'t, 'c, 'n> {
    pub(crate) fn begin(
        tx: &'t mut Tx<'c>,
        (from, old): (Ino, &[u8]),
        (to, new): (Ino, &'n [u8]),
        now: Time,
    ) -> Result<RenameOp<'t, 'c, 'n>> {
        let mut from_inode = directory(tx, from)?;
        let mut to_inode = if to == from {
            None
        } else {
            Some((to, linked_directory(tx, to)?))
        };
        let entry = find(tx, &mut from_inode, old)?;
        named_inode(tx, from, &entry)?;
        let at = to_inode
            .as_mut()
            .map_or(&mut from_inode, |(_, inode)| inode);
        let target = Tree::new(tx, at).find(new)?;
        if let Some(target) = &target {
            named_inode(tx, to, target)?;
        }
        Ok(RenameOp {
            tx,
            now,
            from: (from, from_inode),
            to: to_inode,
            new,
            entry,
            target,
        })
    }

    /// Checks that a caller may remove the old name, and add or replace the new one. A directory that gets another parent
    /// changes itself, too.
    pub(crate) fn check_access(&mut self, caller: &Caller) -> Result<()> {
        let moved = self.tx.inode(self.entry.ino)?;
        access::check_delete(&self.from.1, &moved, caller)?;
        let replaced = match self.target {
            Some(target) => Some(self.tx.inode(target.ino)?),
            None => None,
        };
        let to = self.target_inode();
        match &replaced {
            Some(inode) => access::check_delete(to, inode, caller)?,
            None => access::check(to, caller, Rights::CHANGE_ENTRIES)?,
        }
        match moved.is_directory() && self.to.is_some() {
            true => access::check(&moved, caller, Rights::WRITE),
            false => Ok(()),
        }
    }

    /// The inode that gets the new name.
    pub(crate) fn moved(&self) -> Ino {
        self.entry.ino
    }

    fn target_ino(&self) -> Ino {
        self.to.as_ref().map_or(self.from.0, |to| to.0)
    }

    fn target_inode(&mut self) -> &mut Inode {
        self.to.as_mut().map_or(&mut self.from.1, |to| &mut to.1)
    }

    /// Whether a directory lies at or below another.
    fn is_below(&mut self, mut ino: Ino, above: Ino) -> Result<bool> {
        for _ in 0..self.tx.core.ino_allocator.in_use() {
            if ino == above {
                return Ok(true);
            }
            if ino == Ino::ROOT {
                return Ok(false);
            }
            ino = self.tx.inode(ino)?.parent;
        }
        let what = "the directories above it never come to the root";
        Err(damaged_inode(ino, Corruption(what.into())))
    }

    /// Applies the rename, with a whiteout under the old name if one is given. Returns the inode
    /// that lost its name.
    pub(crate) fn apply(mut self, how: RenameMode, whiteout: Option<Ino>) -> Result<Option<Ino>> {
        let is_directory = self.entry.kind == InodeKind::Directory;
        let to = self.target_ino();
        if is_directory && self.is_below(to, self.entry.ino)? {
            return Err(Errno::INVAL.into());
        }
        let gone = match (how, self.target) {
            (RenameMode::Exchange, None) => return Err(Errno::NOENT.into()),
            (RenameMode::Exchange, Some(target)) => {
                self.exchange(&target)?;
                None
            }
            (RenameMode::NoReplace, Some(_)) => return Err(Errno::EXIST.into()),
            (_, Some(target)) if target.ino == self.entry.ino => match whiteout {
                None => return Ok(None),
                // The kernel never asks for it: both names are of one file.
                Some(_) => return Err(Errno::INVAL.into()),
            },
            (_, target) => self.replace(target, whiteout)?,
        };
        put_changed_directory(self.tx, self.from.0, &mut self.from.1, self.now)?;
        if let Some((ino, mut inode)) = self.to.take() {
            put_changed_directory(self.tx, ino, &mut inode, self.now)?;
        }
        Ok(gone)
    }

    fn exchange(&mut self, target: &TreeEntry) -> Result<()> {
        let from = self.from.0;
        if target.kind == InodeKind::Directory && self.is_below(from, target.ino)? {
            return Err(Errno::INVAL.into());
        }
        let entry = self.entry;
        Tree::new(self.tx, &mut self.from.1).replace(entry.key, target.ino, target.kind)?;
        let at = self.to.as_mut().map_or(&mut self.from.1, |to| &mut to.1);
        Tree::new(self.tx, at).replace(target.key, entry.ino, entry.kind)?;
        let to = self.target_ino();
        self.update_moved(entry.ino, from, to)?;
        if target.ino != entry.ino {
            self.update_moved(target.ino, to, from)?;
        }
        Ok(())
    }

    fn replace(&mut self, target: Option<TreeEntry>, whiteout: Option<Ino>) -> Result<Option<Ino>> {
        let entry = self.entry;
        let mut gone = None;
        if let Some(target) = target {
            let mut inode = self.tx.inode(target.ino)?;
            match (entry.kind == InodeKind::Directory, inode.is_directory()) {
                (true, false) => return Err(Errno::NOTDIR.into()),
                (false, true) => return Err(Errno::ISDIR.into()),
                (false, false) => {}
                (true, true) => {
                    if !Tree::new(self.tx, &mut inode).is_empty()? {
                        return Err(Errno::NOTEMPTY.into());
                    }
                    let ino = self.target_ino();
                    let above = self.target_inode();
                    above.links = decremented_links(ino, above)?;
                }
            }
            let now = self.now;
            unlink_inode(self.tx, target.ino, &mut inode, now)?;
            let at = self.to.as_mut().map_or(&mut self.from.1, |to| &mut to.1);
            Tree::new(self.tx, at).replace(target.key, entry.ino, entry.kind)?;
            gone = Some(target.ino);
        } else {
            let new = self.new;
            let at = self.to.as_mut().map_or(&mut self.from.1, |to| &mut to.1);
            Tree::new(self.tx, at).insert(new, entry.ino, entry.kind)?;
        }
        let mut old = Tree::new(self.tx, &mut self.from.1);
        match whiteout {
            None => old.remove(entry.key)?,
            Some(ino) => old.replace(entry.key, ino, WHITEOUT.kind())?,
        }
        let (from, to) = (self.from.0, self.target_ino());
        self.update_moved(entry.ino, from, to)?;
        Ok(gone)
    }

    /// Updates a moved inode's ctime, and a moved directory's parent.
    fn update_moved(&mut self, ino: Ino, from: Ino, to: Ino) -> Result<()> {
        let mut inode = self.tx.inode(ino)?;
        inode.touch(self.now);
        if inode.is_directory() && from != to {
            inode.parent = to;
            self.adjust_directory_links(from, -1)?;
            self.adjust_directory_links(to, 1)?;
        }
        self.tx.put_inode(ino, &inode)
    }

    fn adjust_directory_links(&mut self, ino: Ino, links: i32) -> Result<()> {
        let inode = if ino == self.from.0 {
            &mut self.from.1
        } else {
            self.target_inode()
        };
        inode.links = match links {
            ..0 => decremented_links(ino, inode)?,
            _ => incremented_links(inode)?,
        };
        Ok(())
    }
}
