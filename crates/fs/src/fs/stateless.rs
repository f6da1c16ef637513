//! The calls of stateless servers, such as NFS. Their clients name files by [`FileId`] for as long as they like. A call
//! checks the identity and the permissions of its caller in the same lock, or the same transaction, as it does its work.
//! No call counts an open or a lookup.

use super::Fs;
use crate::error::Result;
use crate::file::access::{self, AccessMask, Caller};
use crate::file::attr::Attr;
use crate::file::read::ReadReply;
use crate::file::wcc::WccReply;
use crate::file::{attr, lifetime, read, sync, write_at};
use crate::format::acl::{Acl, AclKind};
use crate::format::file_id::FileId;
use crate::format::inode::{InodeKind, Time};
use crate::io::channel::IoChannel;
use crate::names::acls::Acls;
use crate::names::by_id::{CreateMode, Created, LinkReply, RenameReply};
use crate::names::list::DirEntry;
use crate::names::remove::Removal;
use crate::names::set_attributes::SetAttributes;
use crate::names::{acls, by_id, list, lookup, set_attributes};
use crate::tree::new_inode::CreateKind;
use bytes::Bytes;
use std::sync::Arc;

/// Keeps an inode from being freed, also without a name. Content is read and written through a pin.
///
/// The drop of the last pin of an inode without a name frees it, as a last close does: it borrows a channel
/// and waits for the volume. A thread that holds a channel calls [`Pin::release`]. A drop never writes times: they
/// stay pending until [`Fs::flush_all_times`].
///
/// A pin holds the file system: drop all pins before the volume is detached.
pub struct Pin {
    fs: Arc<Fs>,
    id: FileId,
    /// Whether [`Pin::release`] has taken the pin back.
    is_released: bool,
}

impl Pin {
    /// The file.
    #[must_use]
    pub fn id(&self) -> FileId {
        self.id
    }

    /// Drops the pin with the caller's channel.
    pub fn release(mut self, channel: &mut IoChannel) {
        self.is_released = true;
        lifetime::unpin(&self.fs.txs, self.id, Some(channel));
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        if !self.is_released {
            lifetime::unpin(&self.fs.txs, self.id, None);
        }
    }
}

impl Fs {
    /// Pins a file. Its pages stay after its last name is removed, until the last pin is dropped. A server keeps
    /// pins of files in use for some seconds: without a pin, the removal of a file frees pages that a request reads.
    ///
    /// # Errors
    /// `ESTALE` if the file is gone, also if it has no name and no pin; errors of the volume.
    pub fn pin(self: &Arc<Fs>, id: FileId) -> Result<Pin> {
        lifetime::pin(&self.txs, id)?;
        Ok(Pin {
            fs: Arc::clone(self),
            id,
            is_released: false,
        })
    }

    /// Attributes of a file.
    ///
    /// # Errors
    /// As [`Fs::pin`].
    pub fn attr_of(&self, id: FileId) -> Result<Attr> {
        self.txs.inspect(|core| {
            let inode = core.inode_of(id)?;
            attr::attr(core, id.ino, &inode)
        })
    }

    /// The rights among `wanted` that a caller has, by the mode and the ACL. The owner's right to read and write always is not among them. Returns
    /// the attributes of the same lock.
    ///
    /// # Errors
    /// As [`Fs::pin`].
    pub fn access_mask(
        &self,
        id: FileId,
        caller: &Caller,
        wanted: AccessMask,
    ) -> Result<(AccessMask, Attr)> {
        self.txs.inspect(|core| {
            let inode = core.inode_of(id)?;
            let of = (id.ino, &inode);
            let granted = access::access_mask(&mut core.begin(), of, caller, wanted)?;
            Ok((granted, attr::attr(core, id.ino, &inode)?))
        })
    }

    /// Attributes of the inode that a directory names so; "." and ".." are names. [`Attr::file_id`] is its identity. The reply
    /// has the attributes of the directory.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`, `EACCES`, `ENAMETOOLONG`, and as [`Fs::pin`].
    pub fn lookup_at(&self, directory: FileId, name: &[u8], caller: &Caller) -> WccReply<Attr> {
        lookup::lookup_at(&self.txs, directory, name, caller)
    }

    /// The target of a symbolic link. Every caller may read it.
    ///
    /// # Errors
    /// `EINVAL` if the inode is not a symbolic link, and as [`Fs::pin`].
    pub fn read_link_at(&self, id: FileId) -> WccReply<Vec<u8>> {
        lookup::read_link_at(&self.txs, id)
    }

    /// Lists entries behind a cookie with their attributes, as [`Fs::list`], under one lock: entries and attributes belong
    /// together. Ends when `visit` returns false, and after 256 entries at most. Returns whether no entry follows. Cookies survive
    /// changes of the directory and restarts. Attributes are absent if the caller may not look names up, or if they are damaged.
    /// `visit` must not call the file system.
    ///
    /// # Errors
    /// `ENOTDIR`, `EACCES`, and as [`Fs::pin`].
    pub fn list_with_attributes(
        &self,
        directory: FileId,
        after: u64,
        caller: &Caller,
        visit: impl FnMut(&DirEntry, Option<&Attr>) -> bool,
    ) -> WccReply<bool> {
        list::list_with_attributes(&self.txs, directory, after, caller, visit)
    }

    /// Lists entries behind a cookie, as [`Fs::list_with_attributes`] does, and reads no inode of an entry. Ends after 4096 entries at
    /// most.
    ///
    /// # Errors
    /// As [`Fs::list_with_attributes`].
    pub fn list_at(
        &self,
        directory: FileId,
        after: u64,
        caller: &Caller,
        visit: impl FnMut(&DirEntry) -> bool,
    ) -> WccReply<bool> {
        list::list_at(&self.txs, directory, after, caller, visit)
    }

    /// Reads at most [`IO_BYTES_MAX`](crate::IO_BYTES_MAX) bytes of a file; fewer at its end. The attributes and the end belong to the lock
    /// that planned the read. The owner may read always, and every caller that may execute the file. Stores of this machine's programs
    /// into mappings of the range are written back before.
    ///
    /// # Errors
    /// `EACCES`, `EISDIR`, `EINVAL` for other types; errors of the volume.
    pub fn read_at(
        &self,
        pin: &Pin,
        offset: u64,
        len: u32,
        caller: &Caller,
    ) -> WccReply<ReadReply> {
        let hooks = &self.hooks;
        read::read_at(&self.txs, hooks, pin.id, (offset, len), caller)
    }

    /// Writes at most [`IO_BYTES_MAX`](crate::IO_BYTES_MAX) bytes of a file. Returns their number; fewer than `data` if a later piece
    /// failed. `is_stable`: they survive the failures of the pool's class when the call returns. Else they do after [`Fs::commit`], and
    /// without one on pools without a write cache ([`Fs::has_write_cache`]). A write by a user other than root clears set-id bits in
    /// the same transaction. The kernel of this machine drops its pages of the range.
    ///
    /// **Lost update:** a server reads [`Fs::lost_writes`] before an unstable write, and again after the commit. If it differs, the
    /// client must write again.
    ///
    /// # Errors
    /// `EACCES`, `EISDIR`, `EINVAL` for other types, `EFBIG`, `ENOSPC`; errors of the volume. Existing bytes before the page
    /// that failed may be overwritten.
    pub fn write_at(
        &self,
        pin: &Pin,
        offset: u64,
        data: &Bytes,
        is_stable: bool,
        caller: &Caller,
    ) -> WccReply<u32> {
        let what = (offset, data, is_stable);
        write_at::write_at(&self.txs, &self.hooks, pin.id, what, caller)
    }

    /// Makes completed changes of a file durable, as [`Fs::sync`] does, with its times and mmap-dirty pages. Returns
    /// [`Fs::lost_writes`], counted after the flush. A loss is no error here, and programs of this machine still get a loss of the volume
    /// from their syncs.
    ///
    /// # Errors
    /// Errors of the volume: then nothing is known to be durable.
    pub fn commit(&self, channel: &mut IoChannel, pin: &Pin) -> WccReply<u64> {
        sync::commit(&self.txs, channel, pin.id)
    }

    /// Write losses so far, of the volume and of unstable writes for lack of room. A loss may have hit each write that no commit
    /// followed.
    #[must_use]
    pub fn lost_writes(&self) -> u64 {
        self.txs.lost_writes()
    }

    /// Creates a file, or finds it, in one transaction. Both are committed when the call returns: a name that another call is
    /// making, or has made with a commit interval, too. A new file has `attrs`: an absent mode is 0600, a size makes a hole. An
    /// existing file that [`CreateMode::Unchecked`] returns gets the size, in a second transaction with checks of its own. Set-group-id
    /// is left out for a group without the caller. The reply has the attributes of the directory around the create.
    ///
    /// # Errors
    /// `EEXIST`, `EACCES`, `EPERM` for an owner or a group that the caller may not give, `ENOENT` if the directory has no
    /// name, `ENOTDIR`, `EINVAL`, `ENAMETOOLONG`, `EFBIG`, `ENOSPC`, and as [`Fs::pin`].
    pub fn create_at(
        &self,
        directory: FileId,
        name: &[u8],
        how: CreateMode,
        attrs: &SetAttributes,
        caller: &Caller,
    ) -> WccReply<Created> {
        let how = (how, attrs);
        by_id::create_at(&self.txs, &self.hooks, directory, name, how, caller)
    }

    /// Creates a directory with these attributes, in one transaction. A size is ignored.
    ///
    /// # Errors
    /// As [`Fs::create_at`], and `EMLINK`.
    pub fn make_directory_at(
        &self,
        directory: FileId,
        name: &[u8],
        attrs: &SetAttributes,
        caller: &Caller,
    ) -> WccReply<Attr> {
        let make = CreateKind::Directory;
        by_id::make_at(&self.txs, directory, name, make, attrs, caller)
    }

    /// Creates a symbolic link with these attributes, in one transaction. Mode and size are ignored.
    ///
    /// # Errors
    /// As [`Fs::create_at`]; `ENAMETOOLONG` also for a target that is empty or too long.
    pub fn symlink_at(
        &self,
        directory: FileId,
        name: &[u8],
        target: &[u8],
        attrs: &SetAttributes,
        caller: &Caller,
    ) -> WccReply<Attr> {
        let make = CreateKind::Symlink(target);
        by_id::make_at(&self.txs, directory, name, make, attrs, caller)
    }

    /// Creates a pipe, socket or device with these attributes, in one transaction. The number of a device is as the kernel encodes
    /// it in 32 bits (`new_encode_dev`); others have 0. A size is ignored.
    ///
    /// # Errors
    /// `EPERM` for a device by a caller other than root, `EINVAL` for other types, and as [`Fs::create_at`].
    pub fn make_node_at(
        &self,
        directory: FileId,
        name: &[u8],
        (kind, device): (InodeKind, u32),
        attrs: &SetAttributes,
        caller: &Caller,
    ) -> WccReply<Attr> {
        let make = CreateKind::Special(kind, device);
        by_id::make_at(&self.txs, directory, name, make, attrs, caller)
    }

    /// Removes a name of an inode that is not a directory, in one transaction. Returns the inode: drop its pins. Without a use
    /// and another name it is freed before the call returns.
    ///
    /// # Errors
    /// `ENOENT`, `EISDIR`, `ENOTDIR`, `EACCES`, `EPERM` in a sticky directory, and as [`Fs::pin`].
    pub fn remove_at(&self, directory: FileId, name: &[u8], caller: &Caller) -> WccReply<FileId> {
        by_id::remove_at(
            &self.txs,
            &self.hooks,
            directory,
            name,
            Removal::Name,
            caller,
        )
    }

    /// Removes an empty directory, as [`Fs::remove_at`] removes other inodes.
    ///
    /// # Errors
    /// `ENOTEMPTY`, and as [`Fs::remove_at`] without `EISDIR`.
    pub fn remove_directory_at(
        &self,
        directory: FileId,
        name: &[u8],
        caller: &Caller,
    ) -> WccReply<FileId> {
        let what = Removal::EmptyDirectory;
        by_id::remove_at(&self.txs, &self.hooks, directory, name, what, caller)
    }

    /// Renames an entry in one transaction, and replaces the new name. Returns the inode that lost the new name.
    ///
    /// # Errors
    /// `EINVAL` when a directory would go below itself, `ENOTEMPTY`, `EISDIR`, `ENOTDIR`, `ENOENT`, `EACCES`, `EPERM` in a
    /// sticky directory, and as [`Fs::pin`].
    pub fn rename_at(
        &self,
        from: (FileId, &[u8]),
        to: (FileId, &[u8]),
        caller: &Caller,
    ) -> RenameReply {
        by_id::rename_at(&self.txs, &self.hooks, from, to, caller)
    }

    /// Gives a file another name, in one transaction.
    ///
    /// # Errors
    /// `EPERM` for a directory, `EMLINK`, `EEXIST`, `ENOENT` if the file or the directory has no name, `ENOTDIR`, `EACCES`, `ENOSPC`,
    /// and as [`Fs::pin`].
    pub fn link_at(
        &self,
        file: FileId,
        directory: FileId,
        name: &[u8],
        caller: &Caller,
    ) -> LinkReply {
        by_id::link_at(&self.txs, file, directory, name, caller)
    }

    /// Changes attributes in one transaction, if the ctime is `guard`. The transaction of a new size has all other attributes,
    /// too; the pages behind the size are freed after it. A new owner or group clears set-id bits and capabilities; so does a new size
    /// by a user other than root. Without attributes only the guard is checked.
    ///
    /// # Errors
    /// `EAGAIN` if the ctime differs from `guard`, also if the file had capabilities and gets a size: they are removed
    /// before. `EPERM` for changes of the owner only, `EACCES`, `EFBIG`; `EISDIR` and `EINVAL` for a size of another type; `ENOSPC`, and
    /// as [`Fs::pin`].
    pub fn set_attributes(
        &self,
        id: FileId,
        wanted: &SetAttributes,
        guard: Option<Time>,
        caller: &Caller,
    ) -> WccReply<()> {
        set_attributes::set_attributes(&self.txs, &self.hooks, id, wanted, guard, caller)
    }

    /// The access control lists of a file, and its attributes of the same lock. Every caller may read them.
    ///
    /// # Errors
    /// `EIO` if a stored list is not valid, and as [`Fs::pin`].
    pub fn acls_of(&self, id: FileId) -> Result<(Acls, Attr)> {
        acls::acls_of(&self.txs, id)
    }

    /// Sets or removes access control lists of a file, in one transaction, as [`Fs::set_acl`] does. The kernel of this machine drops
    /// its copies before the call returns. An access list of a caller that
    /// is not in the group clears set-group-id.
    ///
    /// # Errors
    /// `EPERM` unless the caller is the owner or root, and as [`Fs::set_acl`] and [`Fs::pin`].
    pub fn set_acls(
        &self,
        id: FileId,
        changes: &[(AclKind, Option<Acl>)],
        caller: &Caller,
    ) -> WccReply<()> {
        acls::set_acls(&self.txs, &self.hooks, id, changes, caller)
    }
}
