//! Names: changes of inodes and directories. Every call is one transaction.

use crate::error::{FsError, Result};
use crate::format::directory_page::{FIRST_KEY, TreeEntry};
use crate::format::inode::{Corruption, INLINE, INLINE_MAX, Ino, Inode, InodeKind, Time};
use crate::io::channel::IoChannel;
use crate::names::xattrs;
use crate::tree::directory::Tree;
use crate::tree::page_map as map;
use crate::txn::core::{Tx, damaged_inode};
use crate::{Attr, Fs, LINKS_MAX, NAME_MAX, TARGET_MAX, check_ino};
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;

const SET_UID: u16 = 0o4000;
const SET_GID: u16 = 0o2000;
const GROUP_EXECUTE: u16 = 0o0010;
/// The attribute that Linux keeps the capabilities of a program in.
pub(crate) const CAPABILITIES: &[u8] = b"security.capability";
/// Bits that a write through the kernel clears. Direct clients do not clear them.
pub(crate) const SET_ID: u16 = 0o6000;

/// The mode without the bits that raise privileges. The set-group-id bit of a file that the group
/// may not execute has another meaning and stays.
fn without_setid(mode: u16) -> u16 {
    match mode & GROUP_EXECUTE {
        0 => mode & !SET_UID,
        _ => mode & !(SET_UID | SET_GID),
    }
}

/// Owner and group of a new inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Owner.
    pub uid: u32,
    /// Group, unless the directory is set-group-id.
    pub gid: u32,
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
    fn kind(&self) -> InodeKind {
        match self {
            CreateKind::File => InodeKind::File,
            CreateKind::Directory => InodeKind::Directory,
            CreateKind::Symlink(_) => InodeKind::Symlink,
            CreateKind::Special(kind, _) => *kind,
        }
    }
}

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

/// Attributes to change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttrChanges {
    /// Permissions, and the set-id and sticky bits.
    pub mode: Option<u16>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Last read.
    pub atime: Option<Time>,
    /// Last change of the content.
    pub mtime: Option<Time>,
}

/// An entry of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// The cookie to continue a listing behind this entry.
    pub cookie: u64,
    /// The inode that it names.
    pub ino: Ino,
    /// The type of that inode.
    pub kind: InodeKind,
    /// The name.
    pub name: Vec<u8>,
}

fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > NAME_MAX {
        return Err(Errno::NAMETOOLONG.into());
    }
    let is_odd = name.is_empty() || name.contains(&0) || name.contains(&b'/');
    match is_odd || name == b"." || name == b".." {
        true => Err(Errno::INVAL.into()),
        false => Ok(()),
    }
}

/// A directory to look names up in.
fn directory(tx: &mut Tx<'_>, ino: Ino) -> Result<Inode> {
    check_ino(ino)?;
    let inode = tx.inode(ino)?;
    match inode.is_directory() {
        true => Ok(inode),
        false => Err(Errno::NOTDIR.into()),
    }
}

/// A directory to add names to.
fn linked_directory(tx: &mut Tx<'_>, ino: Ino) -> Result<Inode> {
    let inode = directory(tx, ino)?;
    match inode.links {
        0 => Err(Errno::NOENT.into()),
        _ => Ok(inode),
    }
}

fn find(tx: &mut Tx<'_>, directory: &mut Inode, name: &[u8]) -> Result<TreeEntry> {
    let found = Tree::new(tx, directory).find(name)?;
    found.ok_or(Errno::NOENT.into())
}

/// The inode that an entry of a directory names. Entry and inode must agree on type, names and
/// parent: an operation on inconsistent ones would be wrong.
fn named_inode(tx: &mut Tx<'_>, parent: Ino, entry: &TreeEntry) -> Result<Inode> {
    let ino = entry.ino;
    let refuse = |why: &str| {
        let what = format!("inode {} names inode {}, and {why}", parent.0, ino.0);
        damaged_inode(parent, Corruption(what))
    };
    let inode = match tx.inode(ino) {
        Err(FsError::Posix(Errno::STALE)) => return Err(refuse("there is none")),
        inode => inode?,
    };
    if inode.kind() != entry.kind {
        return Err(refuse("it is something else"));
    }
    if inode.links == 0 {
        return Err(refuse("that has no name"));
    }
    if inode.is_directory() && (inode.parent != parent || ino == Ino::ROOT) {
        return Err(refuse("that lies in another directory"));
    }
    Ok(inode)
}

fn incremented_links(inode: &Inode) -> Result<u32> {
    Ok(inode.links.checked_add(1).ok_or(Errno::MLINK)?)
}

/// The links of a directory that loses one.
fn decremented_links(ino: Ino, inode: &Inode) -> Result<u32> {
    let fewer = inode.links.checked_sub(1).filter(|&links| links >= 2);
    let what = || {
        Corruption(format!(
            "it has {} links, and a directory in it",
            inode.links
        ))
    };
    fewer.ok_or_else(|| damaged_inode(ino, what()))
}

/// Allocates and fills a new inode; the caller stores it.
fn new_inode(
    tx: &mut Tx<'_>,
    (parent_ino, parent): (Ino, &Inode),
    make: &CreateKind<'_>,
    mode: u16,
    caller: Credentials,
    now: Time,
) -> Result<(Ino, Inode)> {
    let (ino, generation) = tx.allocate_ino()?;
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
        let run = map::find_or_allocate(tx, inode, 0)?;
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

/// Removes one name. Removing the last makes the inode an orphan, which is freed when it is unused.
fn unlink_inode(tx: &mut Tx<'_>, ino: Ino, inode: &mut Inode, now: Time) -> Result<()> {
    inode.links = if inode.is_directory() {
        0
    } else {
        inode.links.saturating_sub(1)
    };
    inode.ctime = now;
    tx.put_inode(ino, inode)
}

/// Stores a directory with changed entries.
fn put_changed_directory(
    tx: &mut Tx<'_>,
    ino: Ino,
    directory: &mut Inode,
    now: Time,
) -> Result<()> {
    directory.mtime = now;
    directory.ctime = now;
    tx.put_inode(ino, directory)
}

impl Fs {
    /// The attributes of the inode that a directory names so. The lookup counts until
    /// [`Fs::forget`].
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`, `ENAMETOOLONG`.
    pub fn lookup(&self, parent: Ino, name: &[u8]) -> Result<Attr> {
        if name.len() > NAME_MAX {
            return Err(Errno::NAMETOOLONG.into());
        }
        self.inspect(|core| {
            let mut tx = core.begin();
            let mut parent_inode = directory(&mut tx, parent)?;
            let (ino, inode) = match name {
                b"." => (parent, parent_inode),
                b".." => (parent_inode.parent, tx.inode(parent_inode.parent)?),
                name => {
                    let entry = find(&mut tx, &mut parent_inode, name)?;
                    (entry.ino, named_inode(&mut tx, parent, &entry)?)
                }
            };
            drop(tx);
            let attr = core.attr(ino, &inode)?;
            core.live_inode(ino).lookups += 1;
            Ok(attr)
        })
    }

    /// Attributes of an inode. Counts as a lookup.
    ///
    /// # Errors
    /// `ESTALE`.
    pub fn lookup_ino(&self, ino: Ino) -> Result<Attr> {
        self.inspect(|core| {
            let inode = core.inode_not_freeing(ino)?;
            let attr = core.attr(ino, &inode)?;
            core.live_inode(ino).lookups += 1;
            Ok(attr)
        })
    }

    /// Takes back `lookups` lookups. An inode without a name is freed with the last.
    pub fn forget(&self, ino: Ino, lookups: u64) {
        let mut core = self.lock_core();
        let live = core.live_inode(ino);
        live.lookups = live.lookups.saturating_sub(lookups);
        drop(core);
        self.release_if_unused(ino);
    }

    /// Keeps an inode from being freed, even without a name, until [`Fs::release`].
    ///
    /// # Errors
    /// `ESTALE`.
    pub fn open(&self, ino: Ino) -> Result<Attr> {
        self.inspect(|core| {
            let inode = core.inode_not_freeing(ino)?;
            let attr = core.attr(ino, &inode)?;
            core.live_inode(ino).opens += 1;
            Ok(attr)
        })
    }

    /// Takes back one [`Fs::open`].
    pub fn release(&self, ino: Ino) {
        self.release_with(ino, None);
    }

    /// As [`Fs::release`], with the caller's channel if it has one.
    pub(crate) fn release_with(&self, ino: Ino, mut channel: Option<&mut IoChannel>) {
        let mut core = self.lock_core();
        // Published while the file is open, or the file could be freed meanwhile. Other threads may
        // open it too, and have direct clients or mmap-dirty pages. Mmap-dirty pages disable direct
        // access.
        let mut has_guests = core.inos_with_file_map.contains(&ino);
        while has_guests && core.live_inode(ino).opens == 1 {
            drop(core);
            let is_settled = self.publish_size_at_close(ino);
            core = self.lock_core();
            has_guests = is_settled
                && core
                    .inode(ino)
                    .is_ok_and(|inode| inode.append_extent.is_some());
        }
        let mut goes_on = true;
        while goes_on && core.mmap_dirty.contains(ino) && core.live_inode(ino).opens == 1 {
            drop(core);
            goes_on = self.flush_mmap_dirty_at_close(ino, channel.as_deref_mut());
            core = self.lock_core();
        }
        let live = core.live_inode(ino);
        live.opens = live.opens.saturating_sub(1);
        if live.opens == 0 {
            live.file_lock.clear_lost_pages();
        }
        drop(core);
        self.release_if_unused_with(ino, channel);
    }

    /// Creates an inode under a name. Counts as a lookup.
    ///
    /// # Errors
    /// `EEXIST`, `ENOENT`, `ENOTDIR`, `ENAMETOOLONG`, `ENOSPC`, `EMLINK`.
    pub fn create(
        &self,
        parent: Ino,
        name: &[u8],
        make: CreateKind<'_>,
        mode: u16,
        caller: Credentials,
    ) -> Result<Attr> {
        self.create_with(0, parent, name, (make, mode), caller)
    }

    /// Creates an empty file, and opens it as [`Fs::open`] does.
    ///
    /// # Errors
    /// As [`Fs::create`].
    pub fn create_opened(
        &self,
        parent: Ino,
        name: &[u8],
        mode: u16,
        caller: Credentials,
    ) -> Result<Attr> {
        self.create_with(1, parent, name, (CreateKind::File, mode), caller)
    }

    /// As [`Fs::create`], with `opens` opens.
    fn create_with(
        &self,
        opens: u64,
        parent: Ino,
        name: &[u8],
        (make, mode): (CreateKind<'_>, u16),
        caller: Credentials,
    ) -> Result<Attr> {
        check_name(name)?;
        let now = self.now();
        self.create_inode(opens, |tx| {
            let mut parent_inode = linked_directory(tx, parent)?;
            let key = Tree::new(tx, &mut parent_inode).vacant_key(name)?;
            let of = (parent, &parent_inode);
            let (ino, inode) = new_inode(tx, of, &make, mode, caller, now)?;
            Tree::new(tx, &mut parent_inode).insert_at(key, name, ino, make.kind())?;
            if inode.is_directory() {
                parent_inode.links = incremented_links(&parent_inode)?;
            }
            put_changed_directory(tx, parent, &mut parent_inode, now)?;
            tx.put_inode(ino, &inode)?;
            Ok(Attr::of(ino, &inode))
        })
    }

    /// Runs an operation that creates an inode, and records its first lookup and `opens` opens.
    fn create_inode(
        &self,
        opens: u64,
        mut run: impl FnMut(&mut Tx<'_>) -> Result<Attr>,
    ) -> Result<Attr> {
        let mut made = None;
        let result = self.change(|tx| {
            // `run` runs again if it did not fit, and may get another number then.
            made.take()
                .into_iter()
                .for_each(|made| tx.core.undo_creation(made));
            let attr = run(tx)?;
            made = Some(tx.core.record_creation(attr.ino, opens));
            Ok(attr)
        });
        if let (Err(_), Some(made)) = (&result, made) {
            self.lock_core().undo_creation(made);
        }
        result
    }

    /// Creates a file without a name, and opens it.
    ///
    /// # Errors
    /// As [`Fs::create`].
    pub fn create_unnamed(&self, parent: Ino, mode: u16, caller: Credentials) -> Result<Attr> {
        let now = self.now();
        self.create_inode(1, |tx| {
            let parent_inode = linked_directory(tx, parent)?;
            let of = (parent, &parent_inode);
            let (ino, mut inode) = new_inode(tx, of, &CreateKind::File, mode, caller, now)?;
            inode.links = 0;
            tx.put_inode(ino, &inode)?;
            Ok(Attr::of(ino, &inode))
        })
    }

    /// Gives a file another name. Counts as a lookup.
    ///
    /// # Errors
    /// `EPERM` for a directory, `EMLINK`, and as [`Fs::create`].
    pub fn link(&self, ino: Ino, parent: Ino, name: &[u8]) -> Result<Attr> {
        check_name(name)?;
        check_ino(ino)?;
        let now = self.now();
        let attr = self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            if inode.is_directory() {
                return Err(Errno::PERM.into());
            }
            if inode.links >= LINKS_MAX {
                return Err(Errno::MLINK.into());
            }
            let mut parent_inode = linked_directory(tx, parent)?;
            Tree::new(tx, &mut parent_inode).insert(name, ino, inode.kind())?;
            put_changed_directory(tx, parent, &mut parent_inode, now)?;
            inode.links += 1;
            inode.ctime = now;
            tx.put_inode(ino, &inode)?;
            tx.core.attr(ino, &inode)
        })?;
        self.lock_core().live_inode(ino).lookups += 1;
        Ok(attr)
    }

    /// Removes a name of an inode that is not a directory.
    ///
    /// # Errors
    /// `ENOENT`, `EISDIR`, `ENOTDIR`.
    pub fn unlink(&self, parent: Ino, name: &[u8]) -> Result<()> {
        check_name(name)?;
        self.remove_name(parent, name, |_, inode| match inode.is_directory() {
            true => Err(Errno::ISDIR.into()),
            false => Ok(()),
        })
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// `ENOTEMPTY`, `ENOENT`, `ENOTDIR`.
    pub fn rmdir(&self, parent: Ino, name: &[u8]) -> Result<()> {
        match name {
            b"." => return Err(Errno::INVAL.into()),
            b".." => return Err(Errno::NOTEMPTY.into()),
            name => check_name(name)?,
        }
        self.remove_name(parent, name, |tx, inode| {
            if !inode.is_directory() {
                return Err(Errno::NOTDIR.into());
            }
            match Tree::new(tx, inode).is_empty()? {
                true => Ok(()),
                false => Err(Errno::NOTEMPTY.into()),
            }
        })
    }

    /// Removes a name if `check` permits it for the inode.
    fn remove_name(
        &self,
        parent: Ino,
        name: &[u8],
        check: impl Fn(&mut Tx<'_>, &mut Inode) -> Result<()>,
    ) -> Result<()> {
        let now = self.now();
        let mut take = |tx: &mut Tx<'_>| {
            let mut parent_inode = directory(tx, parent)?;
            let entry = find(tx, &mut parent_inode, name)?;
            let mut inode = named_inode(tx, parent, &entry)?;
            check(tx, &mut inode)?;
            Tree::new(tx, &mut parent_inode).remove(entry.key)?;
            if inode.is_directory() {
                parent_inode.links = decremented_links(parent, &parent_inode)?;
            }
            put_changed_directory(tx, parent, &mut parent_inode, now)?;
            unlink_inode(tx, entry.ino, &mut inode, now)?;
            Ok(entry.ino)
        };
        let ino = self.with_reserve_fallback(|| self.change(&mut take))?;
        self.release_if_unused(ino);
        Ok(())
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
        check_name(old)?;
        check_name(new)?;
        let now = self.now();
        let gone =
            self.change(|tx| RenameOp::begin(tx, (from, old), (to, new), now)?.apply(how, None))?;
        if let Some(ino) = gone {
            self.release_if_unused(ino);
        }
        Ok(())
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
        check_name(old)?;
        check_name(new)?;
        if how == RenameMode::Exchange {
            return Err(Errno::INVAL.into());
        }
        let now = self.now();
        let mut gone = None;
        let made = self.create_inode(0, |tx| {
            let of = directory(tx, from)?;
            let (ino, inode) = new_inode(tx, (from, &of), &WHITEOUT, 0, caller, now)?;
            tx.put_inode(ino, &inode)?;
            let moving = RenameOp::begin(tx, (from, old), (to, new), now)?;
            gone = moving.apply(how, Some(ino))?;
            Ok(Attr::of(ino, &inode))
        })?;
        // The kernel looks the whiteout up when it needs it.
        self.forget(made.ino, 1);
        if let Some(ino) = gone {
            self.release_if_unused(ino);
        }
        Ok(())
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// `EINVAL` if the inode is not a symbolic link.
    pub fn read_link(&self, ino: Ino) -> Result<Vec<u8>> {
        self.inspect(|core| {
            let inode = core.inode(ino)?;
            if inode.kind() != InodeKind::Symlink {
                return Err(Errno::INVAL.into());
            }
            if !inode.target.is_empty() {
                return Ok(inode.target);
            }
            core.check_trusted(ino)?;
            let run = map::find(&inode.map, 0, &mut |page| core.page(page))?;
            let run =
                run.ok_or_else(|| damaged_inode(ino, Corruption("it has no target".into())))?;
            let page = core.page(run.page)?;
            Ok(page[..(inode.size as usize).min(PAGE_BYTES)].to_vec())
        })
    }

    /// Lists entries behind a cookie, in order, until `visit` returns false. Cookie 0 begins with
    /// "." and "..". An entry that is added or removed meanwhile may be listed or not; every other
    /// entry is listed once.
    ///
    /// # Errors
    /// `ENOTDIR`.
    pub fn list(
        &self,
        ino: Ino,
        after: u64,
        mut visit: impl FnMut(&DirEntry) -> bool,
    ) -> Result<()> {
        let now = self.now();
        self.inspect(|core| {
            let tx = &mut core.begin();
            let mut inode = directory(tx, ino)?;
            tx.core.record_read_time(ino, &inode, now);
            let dots: [(&[u8], Ino); 2] = [(b".", ino), (b"..", inode.parent)];
            for (cookie, (name, ino)) in (1..).zip(dots) {
                let listed = DirEntry {
                    cookie,
                    ino,
                    kind: InodeKind::Directory,
                    name: name.to_vec(),
                };
                if cookie > after && !visit(&listed) {
                    return Ok(());
                }
            }
            let from = after.saturating_add(1).max(FIRST_KEY);
            let mut odd = None;
            Tree::new(tx, &mut inode).scan(from, |entry, name| {
                if check_name(name).is_err() {
                    odd = Some(name.to_vec());
                    return false;
                }
                visit(&DirEntry {
                    cookie: entry.key,
                    ino: entry.ino,
                    kind: entry.kind,
                    name: name.to_vec(),
                })
            })?;
            match odd {
                None => Ok(()),
                Some(name) => Err(damaged_inode(
                    ino,
                    Corruption(format!("it names {:?}", String::from_utf8_lossy(&name))),
                )),
            }
        })
    }

    /// Clears the set-id bits, as for a write by an unprivileged program. The write itself removes
    /// the capabilities.
    ///
    /// # Errors
    /// `ESTALE`.
    pub fn clear_setid(&self, ino: Ino) -> Result<()> {
        check_ino(ino)?;
        let inode = self.inspect(|core| core.inode(ino))?;
        let kept = without_setid(inode.mode);
        if kept == inode.mode {
            return Ok(());
        }
        let changes = AttrChanges {
            mode: Some(kept & 0o7777),
            ..AttrChanges::default()
        };
        self.set_attr(ino, changes).map(drop)
    }

    /// Changes attributes. A new owner or group of a file clears its set-id bits and its
    /// capabilities.
    ///
    /// # Errors
    /// `ESTALE`.
    pub fn set_attr(&self, ino: Ino, changes: AttrChanges) -> Result<Attr> {
        check_ino(ino)?;
        let now = self.now();
        let arms = changes.mode.is_some_and(|mode| mode & SET_ID != 0);
        let armed = arms.then(|| self.file_lock(ino)).transpose()?;
        let _alone = armed.as_ref().map(|data| data.write());
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            if let Some(mode) = changes.mode {
                inode.mode = inode.kind().bits() | mode & 0o7777;
            }
            let is_given = changes.uid.is_some() || changes.gid.is_some();
            if is_given && changes.mode.is_none() && !inode.is_directory() {
                inode.mode = without_setid(inode.mode);
            }
            if is_given && !inode.is_directory() {
                xattrs::remove_capabilities(tx, ino, &mut inode)?;
            }
            inode.uid = changes.uid.unwrap_or(inode.uid);
            inode.gid = changes.gid.unwrap_or(inode.gid);
            inode.atime = changes.atime.unwrap_or(inode.atime);
            inode.mtime = changes.mtime.unwrap_or(inode.mtime);
            inode.ctime = now;
            tx.put_inode(ino, &inode)?;
            tx.core.attr(ino, &inode)
        })
    }
}

/// A rename: both directories, once if they are the same.
struct RenameOp<'t, 'c, 'n> {
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
    fn begin(
        tx: &'t mut Tx<'c>,
        (from, old): (Ino, &[u8]),
        (to, new): (Ino, &'n [u8]),
        now: Time,
    ) -> Result<RenameOp<'t, 'c, 'n>> {
        let mut from_inode = directory(tx, from)?;
        let mut to_inode = match to == from {
            true => None,
            false => Some((to, linked_directory(tx, to)?)),
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
    fn apply(mut self, how: RenameMode, whiteout: Option<Ino>) -> Result<Option<Ino>> {
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
        inode.ctime = self.now;
        if inode.is_directory() && from != to {
            inode.parent = to;
            self.adjust_directory_links(from, -1)?;
            self.adjust_directory_links(to, 1)?;
        }
        self.tx.put_inode(ino, &inode)
    }

    fn adjust_directory_links(&mut self, ino: Ino, links: i32) -> Result<()> {
        let inode = match ino == self.from.0 {
            true => &mut self.from.1,
            false => self.target_inode(),
        };
        inode.links = match links {
            ..0 => decremented_links(ino, inode)?,
            _ => incremented_links(inode)?,
        };
        Ok(())
    }
}
