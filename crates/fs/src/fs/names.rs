//! The calls for names and attributes.

use super::Fs;
use crate::error::Result;
use crate::file::attr::Attr;
use crate::file::privileges::SetIdCaller;
use crate::file::{attr, creation, lifetime};
use crate::format::acl::{Acl, AclKind};
use crate::format::inode::Ino;
use crate::names::attrs::AttrChanges;
use crate::names::list::DirEntry;
use crate::names::rename::RenameMode;
use crate::names::xattrs::SetXattrMode;
use crate::names::{acls, attrs, create, list, lookup, remove, rename, xattrs};
use crate::tree::new_inode::{CreateKind, Credentials, NewMode};

impl Fs {
    /// The attributes of the inode that a directory names so. The lookup counts until
    /// [`Fs::forget`].
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`, `ENAMETOOLONG`.
    pub fn lookup(&self, parent: Ino, name: &[u8]) -> Result<Attr> {
        lookup::lookup(&self.txs, parent, name)
    }

    /// Attributes of an inode. Counts as a lookup.
    ///
    /// # Errors
    /// `ESTALE`.
    pub fn lookup_ino(&self, ino: Ino) -> Result<Attr> {
        lifetime::lookup_ino(&self.txs, ino)
    }

    /// Takes back `lookups` lookups. An inode without a name is freed with the last.
    pub fn forget(&self, ino: Ino, lookups: u64) {
        lifetime::forget(&self.txs, ino, lookups);
    }

    /// Keeps an inode from being freed, even without a name, until [`Fs::release`]. A create of the inode that has not returned is
    /// committed when the call returns.
    ///
    /// # Errors
    /// `ESTALE`; the error of the create.
    pub fn open(&self, ino: Ino) -> Result<Attr> {
        lifetime::open(&self.txs, ino)
    }

    /// Takes back one [`Fs::open`].
    pub fn release(&self, ino: Ino) {
        lifetime::release(&self.txs, ino);
    }

    /// Creates an inode under a name. Counts as a lookup. The inode inherits the default ACL of the directory.
    ///
    /// # Errors
    /// `EEXIST`, `ENOENT`, `ENOTDIR`, `ENAMETOOLONG`, `ENOSPC`, `EMLINK`.
    pub fn create(
        &self,
        parent: Ino,
        name: &[u8],
        make: CreateKind<'_>,
        mode: impl Into<NewMode>,
        caller: Credentials,
    ) -> Result<Attr> {
        create::create(&self.txs, 0, parent, name, (make, mode.into()), caller)
    }

    /// Creates an empty file, and opens it as [`Fs::open`] does.
    ///
    /// # Errors
    /// As [`Fs::create`].
    pub fn create_opened(
        &self,
        parent: Ino,
        name: &[u8],
        mode: impl Into<NewMode>,
        caller: Credentials,
    ) -> Result<Attr> {
        let how = (CreateKind::File, mode.into());
        create::create(&self.txs, 1, parent, name, how, caller)
    }

    /// Creates a file without a name, and opens it.
    ///
    /// # Errors
    /// As [`Fs::create`].
    pub fn create_unnamed(
        &self,
        parent: Ino,
        mode: impl Into<NewMode>,
        caller: Credentials,
    ) -> Result<Attr> {
        creation::create_unnamed(&self.txs, parent, mode.into(), caller)
    }

    /// Gives a file another name. Counts as a lookup.
    ///
    /// # Errors
    /// `EPERM` for a directory, `EMLINK`, and as [`Fs::create`].
    pub fn link(&self, ino: Ino, parent: Ino, name: &[u8]) -> Result<Attr> {
        create::link(&self.txs, ino, parent, name)
    }

    /// Removes a name of an inode that is not a directory.
    ///
    /// # Errors
    /// `ENOENT`, `EISDIR`, `ENOTDIR`.
    pub fn unlink(&self, parent: Ino, name: &[u8]) -> Result<()> {
        remove::unlink(&self.txs, parent, name)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// `ENOTEMPTY`, `ENOENT`, `ENOTDIR`.
    pub fn rmdir(&self, parent: Ino, name: &[u8]) -> Result<()> {
        remove::rmdir(&self.txs, parent, name)
    }

    /// Renames an entry.
    ///
    /// # Errors
    /// `EINVAL` when a directory would go below itself, `EEXIST` with
    /// [`RenameMode::NoReplace`], `ENOTEMPTY`, `EISDIR`, `ENOTDIR`, `ENOENT`.
    pub fn rename(
        &self,
        (from, old): (Ino, &[u8]),
        (to, new): (Ino, &[u8]),
        how: RenameMode,
    ) -> Result<()> {
        rename::rename(&self.txs, (from, old), (to, new), how)
    }

    /// As [`Fs::rename`], and leaves a whiteout under the old name: a character device 0/0, by
    /// which overlayfs marks a deleted name (`RENAME_WHITEOUT`, rename(2)). Both are one
    /// transaction.
    ///
    /// # Errors
    /// As [`Fs::rename`]; `EINVAL` for an exchange, which leaves no old name.
    pub fn rename_with_whiteout(
        &self,
        (from, old): (Ino, &[u8]),
        (to, new): (Ino, &[u8]),
        how: RenameMode,
        caller: Credentials,
    ) -> Result<()> {
        rename::rename_with_whiteout(&self.txs, (from, old), (to, new), how, caller)
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// `EINVAL` if the inode is not a symbolic link.
    pub fn read_link(&self, ino: Ino) -> Result<Vec<u8>> {
        lookup::read_link(&self.txs, ino)
    }

    /// Lists entries behind a cookie, in order, until `visit` returns false. Cookie 0 begins with
    /// "." and "..". An entry that is added or removed meanwhile may be listed or not; every other
    /// entry is listed once.
    ///
    /// # Errors
    /// `ENOTDIR`.
    pub fn list(&self, ino: Ino, after: u64, visit: impl FnMut(&DirEntry) -> bool) -> Result<()> {
        list::list(&self.txs, ino, after, visit)
    }

    /// Attributes of an inode.
    ///
    /// # Errors
    /// `ESTALE` when there is no such inode.
    pub fn attr(&self, ino: Ino) -> Result<Attr> {
        self.txs.inspect(|core| {
            let inode = core.inode(ino)?;
            attr::attr(core, ino, &inode)
        })
    }

    /// Changes attributes. A new mode changes the access ACL. A new owner or group of a file clears its set-id bits and its
    /// capabilities.
    ///
    /// # Errors
    /// `ESTALE`.
    pub fn set_attr(&self, ino: Ino, changes: AttrChanges) -> Result<Attr> {
        attrs::set_attr(&self.txs, ino, changes)
    }

    /// Clears the set-id bits that a change by a caller removes. `caller` gets the group of a file
    /// that has such bits. The change itself removes the capabilities.
    ///
    /// # Errors
    /// `ESTALE`.
    pub fn clear_setid(&self, ino: Ino, caller: impl FnOnce(u32) -> SetIdCaller) -> Result<()> {
        attrs::clear_setid(&self.txs, ino, caller)
    }

    /// An access control list; `None` of an access list: the mode says all.
    ///
    /// # Errors
    /// `EIO` if the stored list is not valid; `ESTALE`.
    pub fn acl(&self, ino: Ino, kind: AclKind) -> Result<Option<Acl>> {
        acls::get(&self.txs, ino, kind)
    }

    /// Sets an access control list, or removes it, in one transaction with the mode: an access list sets the rights in it, and is not
    /// stored if it says no more. [`Fs::set_attr`] with a mode changes the list. `clears_setgid`: for a caller
    /// that is not in the group.
    ///
    /// # Errors
    /// `EACCES` for a default list of anything but a directory, `EOPNOTSUPP` for a symbolic link; `ENOSPC`, `ESTALE`.
    pub fn set_acl(
        &self,
        ino: Ino,
        kind: AclKind,
        acl: Option<&Acl>,
        clears_setgid: bool,
    ) -> Result<()> {
        acls::set(&self.txs, ino, (kind, acl), clears_setgid)
    }

    /// The value of an attribute. An ACL is one (acl(5)), with the rights that the mode has.
    ///
    /// # Errors
    /// `ENODATA` if the attribute does not exist.
    pub fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        xattrs::get(&self.txs, ino, name)
    }

    /// The names of all attributes.
    ///
    /// # Errors
    /// `ESTALE`.
    pub fn xattr_names(&self, ino: Ino) -> Result<Vec<Vec<u8>>> {
        xattrs::names(&self.txs, ino)
    }

    /// Sets an attribute; an ACL as [`Fs::set_acl`] does, without a condition.
    ///
    /// # Errors
    /// For an ACL `EINVAL`, `EOPNOTSUPP` for another version of its value, and as [`Fs::set_acl`]. For other attributes
    /// `EEXIST`, `ENODATA`, `ERANGE`, `E2BIG`; `ENOSPC` if all attributes together would take more
    /// than 124 KiB.
    pub fn set_xattr(&self, ino: Ino, name: &[u8], value: &[u8], how: SetXattrMode) -> Result<()> {
        xattrs::set(&self.txs, ino, name, value, how)
    }

    /// Removes an attribute.
    ///
    /// # Errors
    /// `ENODATA` if the attribute does not exist, unless it is an ACL.
    pub fn remove_xattr(&self, ino: Ino, name: &[u8]) -> Result<()> {
        xattrs::remove(&self.txs, ino, name)
    }
}
