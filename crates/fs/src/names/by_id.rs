//! Changes of names by callers that no kernel has checked: one transaction checks the identity of the directories and the
//! permissions, makes the change, and collects the attributes around it. It is committed when the call returns, also with a
//! commit interval: a server must not forget a name that it has reported.

use crate::error::Result;
use crate::file::access::{self, Caller, Rights};
use crate::file::attr::{Attr, attr};
use crate::file::free;
use crate::file::privileges::GROUP_EXECUTE;
use crate::file::wcc::{Wcc, WccReply, WccTracker};
use crate::format::directory_page::TreeEntry;
use crate::format::file_id::FileId;
use crate::format::inode::{FILE_BYTES_MAX, Ino, Inode, InodeKind, SET_ID, Time};
use crate::live::kernel_hooks::KernelHooks;
use crate::names::attrs::apply_changes;
use crate::names::create::{create_in, link_in};
use crate::names::entry::{check_name, named_inode};
use crate::names::remove::{Removal, check_directory_name, remove_in};
use crate::names::rename::{RenameMode, RenameOp};
use crate::names::set_attributes::{SetAttributes, set_attributes};
use crate::tree::directory::{Tree, check_directory};
use crate::tree::new_inode::{CreateKind, SET_GID};
use crate::txn::manager::TxManager;
use crate::txn::tx::Tx;
use rustix::io::Errno;

/// Mode of new inodes without one in the request: only the owner uses them.
const DEFAULT_MODE: u16 = 0o600;
/// Mode of links. It has no meaning.
const LINK_MODE: u16 = 0o777;

/// How a create treats an existing name (RFC 1813, `createmode3`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreateMode {
    /// Returns the existing inode. Only a given size changes it, if it is a file.
    Unchecked,
    /// Fails.
    Guarded,
    /// Fails, unless an exclusive create with the same verifier made the file and it is still empty: then the request is
    /// a repetition. The verifier is stored with the file.
    Exclusive([u8; 8]),
}

impl CreateMode {
    /// The number that is stored with the file; 0: none.
    fn verifier(self) -> u64 {
        match self {
            CreateMode::Exclusive(bytes) => match u64::from_le_bytes(bytes) {
                0 => u64::MAX,
                verifier => verifier,
            },
            _ => 0,
        }
    }
}

/// An inode that a create returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Created {
    /// Its attributes.
    pub attr: Attr,
    /// Whether this call made it.
    pub is_new: bool,
}

/// The result of a rename, and the attributes of both directories, also after an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenameReply {
    /// Of the directory with the old name.
    pub from: Wcc,
    /// Of the directory with the new name; the same if it is the same directory.
    pub to: Wcc,
    /// The inode that lost the new name. Its pins should be dropped.
    pub result: Result<Option<FileId>>,
}

/// The result of a link, and the attributes of file and directory, also after an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkReply {
    /// Of the file.
    pub file: Wcc,
    /// Of the directory.
    pub directory: Wcc,
    /// The result.
    pub result: Result<()>,
}

/// A new name and its inode.
struct NewEntry<'r> {
    name: &'r [u8],
    make: CreateKind<'r>,
    attrs: &'r SetAttributes,
    caller: &'r Caller,
    verifier: u64,
    now: Time,
}

impl NewEntry<'_> {
    /// Adds the entry to a directory.
    fn add(&self, tx: &mut Tx<'_>, (parent, parent_inode): (Ino, &mut Inode)) -> Result<Attr> {
        let of = (parent, &*parent_inode);
        access::check(tx, of, self.caller, Rights::CHANGE_ENTRIES)?;
        check_linked(parent_inode)?;
        self.check_kind()?;
        let is_inherited = parent_inode.mode & SET_GID != 0 && self.make == CreateKind::Directory;
        let mode = match self.make {
            CreateKind::Symlink(_) => LINK_MODE,
            _ => self.attrs.mode.unwrap_or(DEFAULT_MODE),
        };
        let owner = self.caller.credentials();
        let (ino, mut inode) = create_in(
            tx,
            (parent, parent_inode),
            self.name,
            (&self.make, mode.into()),
            owner,
            self.now,
        )?;
        let attrs = SetAttributes {
            mode: None,
            ..*self.attrs
        };
        attrs.check(tx, (ino, &inode), self.caller)?;
        let changes = attrs.changes(&inode, self.caller, self.now);
        apply_changes(tx, ino, &mut inode, changes)?;
        // The change of the owner above has cleared set-id bits; they belong to the request.
        inode.mode |= mode & SET_ID;
        // Without execution by the group the bit raises no privileges (`mode_strip_sgid`).
        let is_harmless = !inode.is_directory() && mode & GROUP_EXECUTE == 0;
        if !is_inherited && !is_harmless {
            inode.mode = access::permitted_mode(inode.mode, inode.gid, self.caller);
        }
        set_initial_size(&mut inode, attrs.size)?;
        inode.create_verifier = self.verifier;
        tx.core.record_unused_creation(ino);
        tx.put_inode(ino, &inode)?;
        attr(tx.core, ino, &inode)
    }
}

impl NewEntry<'_> {
    /// Only root makes devices: a device gives access to the hardware of each machine that mounts the file system.
    fn check_kind(&self) -> Result<()> {
        match self.make {
            CreateKind::Special(kind, _) => match kind {
                InodeKind::CharDevice | InodeKind::BlockDevice if !self.caller.is_privileged() => {
                    Err(Errno::PERM.into())
                }
                InodeKind::CharDevice
                | InodeKind::BlockDevice
                | InodeKind::Fifo
                | InodeKind::Socket => Ok(()),
                InodeKind::File | InodeKind::Directory | InodeKind::Symlink => {
                    Err(Errno::INVAL.into())
                }
            },
            CreateKind::File | CreateKind::Directory | CreateKind::Symlink(_) => Ok(()),
        }
    }
}

/// A new file is one hole.
fn set_initial_size(inode: &mut Inode, size: Option<u64>) -> Result<()> {
    match size {
        Some(size) if size > FILE_BYTES_MAX => Err(Errno::FBIG.into()),
        Some(size) if inode.kind() == InodeKind::File => {
            inode.size = size;
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Names are added only to directories with a name.
fn check_linked(directory: &Inode) -> Result<()> {
    match directory.links {
        0 => Err(Errno::NOENT.into()),
        _ => Ok(()),
    }
}

/// Begins a change of a directory.
fn begin_directory(tracker: &mut WccTracker, tx: &mut Tx<'_>, caller: &Caller) -> Result<Inode> {
    let inode = tracker.begin(tx)?;
    check_directory(&inode)?;
    access::check(tx, (tracker.ino(), &inode), caller, Rights::EXECUTE)?;
    Ok(inode)
}

/// See [`crate::Fs::create_at`].
pub(crate) fn create_at(
    txs: &TxManager,
    hooks: &KernelHooks,
    directory: FileId,
    name: &[u8],
    (how, attrs): (CreateMode, &SetAttributes),
    caller: &Caller,
) -> WccReply<Created> {
    let mut tracker = WccTracker::new(directory);
    let new = NewEntry {
        name,
        make: CreateKind::File,
        attrs,
        caller,
        verifier: how.verifier(),
        now: txs.now(),
    };
    let result = txs.change_or_read(|tx| {
        let mut inode = begin_directory(&mut tracker, tx, caller)?;
        check_name(name)?;
        let found = Tree::new(tx, &mut inode).find(name)?;
        let attr = match &found {
            Some(entry) => existing(tx, directory.ino, entry, how)?,
            None => new.add(tx, (directory.ino, &mut inode))?,
        };
        tracker.end(tx)?;
        Ok(Created {
            attr,
            is_new: found.is_none(),
        })
    });
    let wcc = tracker.wcc(txs, &result);
    let is_cut = |made: &Created| !made.is_new && made.attr.kind == InodeKind::File;
    let size = SetAttributes {
        size: attrs.size.filter(|_| how == CreateMode::Unchecked),
        ..SetAttributes::default()
    };
    let result = match result {
        Ok(made) if is_cut(&made) && size.size.is_some() => {
            let id = made.attr.file_id();
            let cut = set_attributes(txs, hooks, id, &size, None, caller);
            cut.result.map(|()| Created {
                attr: cut.wcc.after.unwrap_or(made.attr),
                is_new: false,
            })
        }
        made => made,
    };
    WccReply { wcc, result }
}

/// The inode of an existing name, if the create accepts it.
fn existing(tx: &mut Tx<'_>, parent: Ino, entry: &TreeEntry, how: CreateMode) -> Result<Attr> {
    let inode = named_inode(tx, parent, entry)?;
    let is_accepted = match how {
        CreateMode::Unchecked => true,
        CreateMode::Guarded => false,
        CreateMode::Exclusive(_) => {
            let is_empty = inode.kind() == InodeKind::File && inode.size == 0;
            is_empty && inode.create_verifier == how.verifier()
        }
    };
    match is_accepted {
        true => attr(tx.core, entry.ino, &inode),
        false => Err(Errno::EXIST.into()),
    }
}

/// See [`crate::Fs::make_directory_at`], [`crate::Fs::symlink_at`] and [`crate::Fs::make_node_at`].
pub(crate) fn make_at(
    txs: &TxManager,
    directory: FileId,
    name: &[u8],
    make: CreateKind<'_>,
    attrs: &SetAttributes,
    caller: &Caller,
) -> WccReply<Attr> {
    let mut tracker = WccTracker::new(directory);
    let new = NewEntry {
        name,
        make,
        attrs,
        caller,
        verifier: 0,
        now: txs.now(),
    };
    let result = txs.change(|tx| {
        let mut inode = begin_directory(&mut tracker, tx, caller)?;
        check_name(name)?;
        let attr = new.add(tx, (directory.ino, &mut inode))?;
        tracker.end(tx)?;
        Ok(attr)
    });
    WccReply {
        wcc: tracker.wcc(txs, &result),
        result,
    }
}

/// See [`crate::Fs::remove_at`] and [`crate::Fs::remove_directory_at`].
pub(crate) fn remove_at(
    txs: &TxManager,
    hooks: &KernelHooks,
    directory: FileId,
    name: &[u8],
    removal: Removal,
    caller: &Caller,
) -> WccReply<FileId> {
    let mut tracker = WccTracker::new(directory);
    let now = txs.now();
    let may_remove = |tx: &mut Tx<'_>, parent: (Ino, &Inode), inode: &Inode| {
        access::check_delete(tx, parent, inode, caller)
    };
    let mut take = |tx: &mut Tx<'_>| {
        let mut inode = begin_directory(&mut tracker, tx, caller)?;
        match removal {
            Removal::Name => check_name(name)?,
            Removal::EmptyDirectory => check_directory_name(name)?,
        }
        let parent = (directory.ino, &mut inode);
        let (ino, gone) = remove_in(tx, parent, name, removal, now, may_remove)?;
        tracker.end(tx)?;
        Ok(FileId::of(ino, &gone))
    };
    let result = txs.with_reserve_fallback(|| txs.change(&mut take));
    let wcc = tracker.wcc(txs, &result);
    if let Ok(id) = &result {
        forget_name(txs, hooks, directory.ino, name, id.ino);
        free::release_if_unused(txs, id.ino);
    }
    WccReply { wcc, result }
}

/// See [`crate::Fs::rename_at`].
pub(crate) fn rename_at(
    txs: &TxManager,
    hooks: &KernelHooks,
    (from, old): (FileId, &[u8]),
    (to, new): (FileId, &[u8]),
    caller: &Caller,
) -> RenameReply {
    let (mut of_from, mut of_to) = (WccTracker::new(from), WccTracker::new(to));
    let now = txs.now();
    let mut moved = Ino(0);
    let result = txs.change(|tx| {
        begin_directory(&mut of_from, tx, caller)?;
        begin_directory(&mut of_to, tx, caller)?;
        check_name(old)?;
        check_name(new)?;
        let mut rename = RenameOp::begin(tx, (from.ino, old), (to.ino, new), now)?;
        moved = rename.moved();
        rename.check_access(caller)?;
        let gone = rename.apply(RenameMode::Replace, None)?;
        of_from.end(tx)?;
        of_to.end(tx)?;
        let gone = gone.map(|ino| Ok(FileId::of(ino, &tx.inode(ino)?)));
        gone.transpose()
    });
    let reply = RenameReply {
        from: of_from.wcc(txs, &result),
        to: of_to.wcc(txs, &result),
        result,
    };
    if let Ok(gone) = &reply.result {
        forget_name(txs, hooks, from.ino, old, moved);
        if let Some(id) = gone {
            forget_name(txs, hooks, to.ino, new, id.ino);
            free::release_if_unused(txs, id.ino);
        }
    }
    reply
}

/// The kernel of this machine forgets a name that no longer leads to this inode, if it knows both: its reference would keep the
/// pages of a removed file.
fn forget_name(txs: &TxManager, hooks: &KernelHooks, directory: Ino, name: &[u8], ino: Ino) {
    if !hooks.has_callbacks() {
        return;
    }
    let (is_known, is_removed) = {
        let mut core = txs.lock_core();
        let knows = |ino: Ino| {
            let live = core.live_inodes.get(&ino);
            live.is_some_and(|live| live.lookups > 0)
        };
        // The kernel knows the root without a lookup.
        let is_known = (directory == Ino::ROOT || knows(directory)) && knows(ino);
        let is_removed = is_known && core.inode(ino).is_ok_and(|inode| inode.links == 0);
        (is_known, is_removed)
    };
    if is_known {
        hooks.forget_name(directory, name, is_removed.then_some(ino));
    }
}

/// See [`crate::Fs::link_at`].
pub(crate) fn link_at(
    txs: &TxManager,
    file: FileId,
    directory: FileId,
    name: &[u8],
    caller: &Caller,
) -> LinkReply {
    let (mut of_file, mut of_directory) = (WccTracker::new(file), WccTracker::new(directory));
    let now = txs.now();
    let result = txs.change(|tx| {
        let mut inode = of_file.begin(tx)?;
        let parent_inode = begin_directory(&mut of_directory, tx, caller)?;
        check_name(name)?;
        let parent = (directory.ino, &parent_inode);
        access::check(tx, parent, caller, Rights::CHANGE_ENTRIES)?;
        // A pinned file without a name does not come back.
        check_linked(&inode)?;
        link_in(tx, (file.ino, &mut inode), directory.ino, name, now)?;
        of_file.end(tx)?;
        of_directory.end(tx)
    });
    LinkReply {
        file: of_file.wcc(txs, &result),
        directory: of_directory.wcc(txs, &result),
        result,
    }
}
